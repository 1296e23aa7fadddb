//! The only place where roots change: operations, commits, recovery, references, snapshots and
//! reclaim of space.
//!
//! # Invariants
//! TXN-1  A block freed by commit N is not written, erased or truncated away before commit N+1 is
//!     durable and every reader that took its state before the freeing operation has dropped it.
//! TXN-2  The record of N names every page that N brought in and no earlier barrier covered, or a
//!     barrier stands between those pages and the record. Where barriers are atomic (STORAGE-4)
//!     the one after the record is enough.
//! TXN-3  The record of N+1 is written only after N's last barrier returned; it carries the tag of
//!     N.
//! TXN-4  A generation number is greater than that of every authentic record, a rejected one
//!     included, so none is used twice for commits that a caller can have been notified of. A
//!     number without a record may be reused after a crash; as the first commit of a session
//!     changes no live node, live nodes of one generation are of one session all the same.
//! TXN-5  An operation is accepted only against free blocks that are allocated on the host: its
//!     data at worst case, the nodes that it may dirty, and the pages of the commit itself. So a
//!     commit never meets a full disk, but for TXN-9. An operation that finds none first waits for
//!     pending frees (`space_wait`).
//! TXN-6  An operation is published whole or not at all, and its publication mark tells for each
//!     state whether it contains the operation (`Publication`).
//! TXN-7  The space map of checkpoint c together with the lists of the records c..=g is exactly the
//!     set of pages of root g. A record that no such chain leads to names checkpoint 0; then that
//!     set is the pages that the trees reference.
//! TXN-8  A record that shared a barrier with its pages and has lost one of them looks like one
//!     that was interrupted, and recovery undoes it as long as it is the newest. So it does not
//!     stay the newest: an idle or closing volume writes a record that lists no page after it
//!     (`Volume::maintain`, `Volume::close`).
//! TXN-9  A commit that the host has no room for before its record is written (copy-on-write, thin
//!     provisioning, quotas: an allocated block is no promise there) counts as in flight until it
//!     is finished, and the next leader finishes it before anything else: its blocks stay taken, no
//!     other commit or entry of the log comes before it, and callers get `NoSpace` each time. So
//!     nothing that is true while a commit is in flight ceases to be, and nothing latches.

mod allocator;
mod ancestry;
mod audit;
mod commit;
mod findings;
mod operation;
mod recovery;
mod space_wait;
mod state;
#[cfg(test)]
mod tests;
mod volume;
mod writer;

pub use crate::frame::Compression;
pub(crate) use allocator::{Reservation, groups_for};
pub(crate) use ancestry::{Ancestry, Durable, EntryMark, Mark};
pub(crate) use audit::{Audit, DataPages};
pub(crate) use commit::CommitTicket;
pub use findings::{Finding, FindingKind, Lost, Severity};
pub(crate) use operation::Operation;
pub(crate) use recovery::{LostPage, has_entries};
pub(crate) use state::{Difference, DifferenceCursor, Publication, State, View};
pub(crate) use volume::{Choice, OpenOptions, Pinned, ReadView, UnreferencedPages, Volume, WrittenPiece};
pub(crate) use writer::VolumeOwner;
