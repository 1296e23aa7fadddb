//! Share store: keeps shares and gives each away as often as agreed, across crashes and races.
//!
//! # States
//! A share has 1 to 8 slots, one for each claim that it allows. Every slot changes independently:
//!
//! ```text
//!            claim, payload in the spool             confirmed
//!   Free ------------------------------> Leased ------------------> Completed
//!    ^ ^                                  |  |
//!    | +--- lease over, nothing sent -----+  +--- lease over, something sent ---> Interrupted
//!    |                                                                                 |
//!    +--------------------------------- rearm by the owner ----------------------------+
//!   Free --- claim, everything is in the capsule ---> Completed
//! ```
//!
//! The share as a whole is Armed while a slot is free, Leased while none is free and one is leased,
//! Consumed when all have ended, Revoked after its owner revoked it, and Expired after its time.
//!
//! # Store rules
//! - Store rule 1: a claim takes one free slot in one atomic step. No two claims take the same
//!   slot.
//! - Store rule 2: a reply that gives content away (to a claim, the first byte of a payload) is
//!   sent after its change is as durable as the mode requires. In mode `commit` no power cut frees
//!   a slot after its reply was sent.
//! - Store rule 3: the same claim id within 60 seconds gets the same answer and takes no second
//!   slot.
//! - Store rule 4: a lease that ends before a payload byte was sent frees its slot. After one was
//!   sent it does not.
//! - Store rule 5: without proof, missing, expired, revoked and used shares have the same reply,
//!   `Unknown`, after the same work. With proof the reply is true.
//! - Store rule 6: handles are stored as keyed hashes, proofs and owner tokens as SHA-256, compared
//!   in constant time.
//! - Store rule 7: content is removed when no slot can need it any more; the audit stays readable
//!   for the owner until its own end.
//! - Store rule 8: the store has a clock of its own, which never runs backwards; a step of the
//!   machine's clock moves no expiry.
//! - Store rule 9: after a failed barrier the store latches and refuses all changes until a
//!   restart.
//! - Store rule 10: no call waits for a barrier of the disk. The change is made during the call,
//!   and awaiting the reply waits for its durability. Changes that are made before the first is
//!   awaited share their barrier.
//! - Store rule 11: a response with bytes of a payload is bound to its lease while it is sent. It
//!   calls [`ShareStore::payload`] again after 10 seconds, after a revocation or a rearm of the
//!   share, and before its last part; so no body is complete if its lease had ended before that
//!   part, and after ten seconds no more of it is handed over. Bytes in the connection's buffers
//!   cannot be recalled. The call renews the lease: it lives while bytes flow, up to a day after
//!   its claim. A stalled response does not call and renews nothing.
//! - Store rule 12: only a response with bytes of a payload marks the payload as sent. A question
//!   about a lease (HEAD, 304, 416) changes nothing.
//!
//! # Path of a request
//! 1. The request names a handle. The store looks up its keyed hash in the shard's index (a hash
//!    table on disk with a small cache), reads the newest record, and lets `share` decide. All
//!    stores (segments, Valkey, and one in memory for tests) decide with the same code (`share`)
//!    and differ only in the storage of the record.
//! 2. A change appends one record to the segment of its share: one file for each shard and minute
//!    of expiry. So expiry is an unlink, and all records of a share are in one file. In mode
//!    `commit` the reply waits for the group's barrier, which has no fixed delay: while one runs,
//!    changes gather for the next.
//! 3. A request without proof gets the same reply after the same work: for a missing share a decoy
//!    is read.
//! 4. Expiry and compaction copy live data (a running download, an audit record without content,
//!    live shares), pass a barrier, then unlink. After a crash in between a share is in two files;
//!    the higher version counts, and records of equal versions are equal.
//! 5. A start reads all segments and rebuilds the index. Torn records are skipped; records after
//!    them still count, because they can only report further use.

mod barrier_group;
mod contract;
pub mod env;
#[cfg(any(test, debug_assertions))]
pub mod fuzzing;
mod record;
pub mod segments;
mod share;
pub mod spool;
#[cfg(any(test, debug_assertions))]
pub(crate) mod tests;
pub mod valkey;

use std::io;

use parking_lot as sync;

pub use barrier_group::PendingReply;
pub(crate) use contract::create_random;
pub use contract::{
    ClaimGrant, ClaimRecord, Durability, LeaseFinish, LeaseGrant, MAX_TTL, NewShare, Periods, ShareReport, ShareStore,
    ShareTimes, SpoolEntry, StoreMaintenance, StoreStats,
};
pub use env::{WallTime, random_handle};
#[cfg(any(test, debug_assertions))]
pub(crate) use tests::simulated;

/// Result of every operation of a store.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Error of a store request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// There is no such share, or no proof (Store rule 5).
    #[error("there is no such share, or the proof is wrong")]
    Unknown,
    /// With proof: its time is over.
    #[error("the share has expired")]
    Expired { at: WallTime },
    /// With proof: its owner took it back.
    #[error("the share was revoked by its owner")]
    Revoked { at: WallTime },
    /// With proof: all claims were used, the last one ended then.
    #[error("the share was used")]
    Used { at: WallTime },
    /// With proof: all claims are taken, but a lease that ends without a byte sent frees its claim.
    #[error("the share is being downloaded")]
    Busy { until: WallTime },
    /// The owner asked to rearm, and no slot ended early.
    #[error("no download of the share was interrupted")]
    NothingToRearm,
    /// The handle is in use: mint another one.
    #[error("the handle is taken")]
    Taken,
    /// The disk or the configured capacity is full. Nothing has changed.
    #[error("no space is left for shares")]
    Full,
    /// The medium is read-only, failed or latched (Store rule 9), or the remote store does not
    /// reply.
    #[error("the store takes no changes: {0}")]
    Unavailable(String),
    /// A value outside of its documented range.
    #[error("{0}")]
    Invalid(&'static str),
}

/// A write that did not happen changed nothing.
impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> StoreError {
        if is_full(&error) { StoreError::Full } else { StoreError::Unavailable(error.to_string()) }
    }
}

/// Whether the disk or the quota has no space.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
