//! Keeps shares and gives each of them away as often as was agreed, whatever happens in between.
//!
//! # States
//! A share has 1 to 8 slots, one for each claim that it allows. Every slot goes its own way:
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
//! The share as a whole is Armed while a slot is free, Leased while none is free and one is leased, Consumed when all have ended,
//! Revoked after its owner said so, and Expired after its time.
//!
//! # Store rules
//! - Store rule 1: a claim takes one free slot in one atomic step. No two claims take the same slot.
//! - Store rule 2: whatever gives content away is answered after the change that pays for it is as durable as the mode says:
//!   a claim, the first byte of a payload. In mode `commit` no power cut gives a slot back after its reply went out.
//! - Store rule 3: the same claim id within 60 seconds gets the same answer and takes no second slot.
//! - Store rule 4: a lease that ends before a payload byte was sent gives its slot back. After one was sent it does not.
//! - Store rule 5: missing, expired, revoked and used are the same to whoever has no proof: `Unknown`, after the same work.
//!   With proof the answer is true.
//! - Store rule 6: handles are kept as keyed hashes, proofs and owner tokens as SHA-256, compared in constant time.
//! - Store rule 7: content goes when no slot can need it any more; what happened stays readable for the owner until the audit ends.
//! - Store rule 8: time is the store's own and never runs backwards; a step of the machine's clock moves no expiry.
//! - Store rule 9: a change that failed to become durable ends all changes: the store latches and refuses them until a restart.
//! - Store rule 10: no call waits for a barrier of the disk. The change is made during the call, and awaiting the answer waits for
//!   its durability. Many changes that are made before the first is awaited share their barrier.
//! - Store rule 11: an answer that carries bytes of a payload obeys its lease for as long as it goes out. It asks [`ShareStore::payload`]
//!   again when 10 seconds have gone by, when the share was revoked or rearmed meanwhile, and before its last part; so no body is
//!   whole whose lease had ended before that part, and after ten seconds nothing more of it is handed over. What the connection's
//!   buffers hold by then cannot be called back. Asking renews the lease: it lives while bytes flow, up to a day after its claim.
//!   An answer that stands still, because its client takes nothing, does not ask and renews nothing.
//! - Store rule 12: only an answer that carries bytes of a payload notes that something was sent. A question about a lease (HEAD, 304, 416)
//!   changes nothing.
//!
//! # The way of a request
//! 1. It names a handle. The store looks for its keyed hash in the shard's index (a hash table on disk with a small cache), reads the newest
//!    record, and lets `share` decide. All stores (segments, Valkey, and one in memory for tests) decide with the same code (`requests`) and
//!    differ only in how they keep the record.
//! 2. A change appends one record to the segment in which the share lives: one file for each shard and minute of expiry. So expiry is an
//!    unlink, and what happened to a share is never in another file than the share. In mode `commit` the reply waits for the group's barrier,
//!    which has no fixed delay: while one runs, changes gather for the next.
//! 3. Who has no proof gets the same answer after the same work: a missing share is read from a decoy.
//! 4. Expiry and compaction copy what is still needed (a download that runs, an audit record without content, shares that live), pass a
//!    barrier, then unlink. A crash in between leaves a share in two files; the higher version counts, and equal versions say the same.
//! 5. A start reads all segments and makes the index anew. What is torn is passed over; records behind it still count, because they can only
//!    tell of more that was used.

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
#[cfg(all(test, feature = "model"))]
mod loom_sync;
#[cfg(any(test, fuzzing))]
pub(crate) mod manual_clock;
#[cfg(any(test, fuzzing))]
pub(crate) mod memory;
#[cfg(all(test, feature = "model"))]
mod model;
mod pending;
mod random;
mod record;
mod requests;
pub mod segments;
mod share;
#[cfg(any(test, fuzzing))]
pub(crate) mod simulated;
pub mod spool;
pub mod valkey;

pub use contract::{
    ClaimGrant, ClaimRecord, Durability, LeaseFinish, LeaseGrant, MAX_TTL, NewShare, Periods, ShareReport, ShareStore,
    ShareTimes, SpoolEntry, StoreMaintenance, StoreStats, create_random,
};
pub use error::{Result, StoreError, WallTime};
pub use pending::PendingReply;
pub use random::random_handle;
