//! Share store: keeps shares and gives each away as often as agreed, across crashes and races.
//!
//! # States
//! A share has 1 to 8 slots, one for each claim that it allows. Every slot changes independently:
//!
//! ```text
//!            claim, payload in the spool             finished
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
mod claim_slots;
#[cfg(test)]
pub(crate) mod conformance;
mod contract;
mod disk;
pub mod env;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
#[cfg(any(test, fuzzing))]
pub(crate) mod memory;
#[cfg(test)]
mod model;
mod record;
pub mod segments;
mod share;
#[cfg(any(test, fuzzing))]
pub(crate) mod simulated;
pub mod spool;
pub mod valkey;

use parking_lot as sync;

pub use barrier_group::PendingReply;
pub use contract::{
    ClaimGrant, ClaimRecord, Durability, LeaseFinish, LeaseGrant, MAX_TTL, NewShare, Periods, ShareReport, ShareStore,
    ShareTimes, SpoolEntry, StoreMaintenance, StoreStats, create_random,
};
pub use env::random_handle;
pub use error::{Result, StoreError, WallTime};
