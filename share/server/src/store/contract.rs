//! Contract of every store: requests, replies and their guarantees.

use std::time::Duration;

use bytes::Bytes;
use clap::ValueEnum;
use lockbox_share_protocol::capsule::MAX_CAPSULE;
use lockbox_share_protocol::message::{ClaimState, MAX_CLAIMS, ShareState};
use lockbox_share_protocol::token::{Auth, ClaimId, Digest, Handle, LeaseToken, OwnerToken, Verifier};

use super::barrier_group::PendingReply;
use super::env::{WallTime, random_handle};
use super::{Result, StoreError};

pub const MAX_TTL: Duration = Duration::from_secs(31 * 24 * 3600);

/// Ciphertext that lies in the spool as one file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SpoolEntry {
    /// Random, the name of the file.
    pub id: [u8; 16],
    /// Bytes.
    pub length: u64,
    pub digest: Digest,
}

#[derive(Clone)]
pub struct NewShare {
    pub auth: Verifier,
    pub owner: Verifier,
    /// Above zero, at most [`MAX_TTL`].
    pub ttl: Duration,
    /// 1 to [`MAX_CLAIMS`].
    pub claims: u8,
    /// At most [`MAX_CAPSULE`] bytes.
    pub capsule: Bytes,
    /// Without one the capsule holds everything, and a claim consumes.
    pub payload: Option<SpoolEntry>,
}

impl NewShare {
    pub(crate) fn check(&self) -> Result<()> {
        if self.capsule.len() > MAX_CAPSULE {
            return Err(StoreError::Invalid("a capsule has at most 8192 bytes"));
        }
        if !(1..=MAX_CLAIMS).contains(&self.claims) {
            return Err(StoreError::Invalid("a share allows 1 to 8 claims"));
        }
        if self.ttl.is_zero() || self.ttl > MAX_TTL {
            return Err(StoreError::Invalid("a share lives for more than no time and at most 31 days"));
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareTimes {
    pub at: WallTime,
    pub expires: WallTime,
}

pub struct ClaimGrant {
    pub capsule: Bytes,
    pub lease: Option<LeaseGrant>,
    pub claims_left: u8,
    /// When the claim was made first.
    pub at: WallTime,
    pub repeated: bool,
}

pub struct LeaseGrant {
    pub token: LeaseToken,
    pub until: WallTime,
    pub payload: SpoolEntry,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseFinish {
    /// The receiver said that it has everything.
    Now,
    /// The last byte was sent; the receiver may still ask again during this time.
    After(Duration),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimRecord {
    pub claimed: WallTime,
    pub state: ClaimState,
    /// Time of the end, or of the running lease's expiry.
    pub ended: WallTime,
}

/// State of a share for its owner. It holds no content and stays until the audit ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShareReport {
    pub state: ShareState,
    pub created: WallTime,
    pub expires: WallTime,
    pub revoked: Option<WallTime>,
    pub claims_allowed: u8,
    pub claims_left: u8,
    /// By slot; a slot that was given back is not listed.
    pub events: Vec<ClaimRecord>,
    pub capsule_bytes: u32,
    pub payload_bytes: u64,
    /// Grows with every change, for watchers. The end of a lease or of the share's life by time
    /// alone does not change it, but changes `state`.
    pub version: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Durability {
    /// After its change is durable
    Commit,
    /// At once; a power cut loses or repeats 50 ms
    Periodic,
    /// At once; a power cut loses or repeats changes that the kernel had not written
    ///
    /// About the last half minute. All shares survive an end of the process alone.
    None,
}

#[derive(Clone, Copy, Debug)]
pub struct Periods {
    /// The same claim id gets the same answer for so long.
    pub repeat: Duration,
    /// Lease before its first byte: short, because a scanner may claim without a download.
    pub first_lease: Duration,
    /// How long a lease lasts after the newest request for a part.
    pub transfer_lease: Duration,
    /// Time for which the audit stays readable after the share's expiry.
    pub audit: Duration,
}

impl Default for Periods {
    fn default() -> Self {
        Periods {
            repeat: Duration::from_secs(60),
            first_lease: Duration::from_secs(120),
            transfer_lease: Duration::from_secs(3600),
            audit: Duration::from_secs(24 * 3600),
        }
    }
}

/// Gauges and counters. A store that cannot tell one leaves it zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    pub live: u64,
    pub segment_files: u64,
    pub segment_bytes: u64,
    pub index_bytes: u64,
    pub spool_bytes: u64,
    /// Bytes on disk of expired content. It returns to zero.
    pub expired_bytes_pending: u64,
    /// Shares that expired unused, since the start.
    pub expired: u64,
    /// Barriers since the start, and the microseconds that they took.
    pub barriers: u64,
    pub barrier_micros: u64,
}

/// Store of shares. Calls do not wait for a barrier; awaiting their reply does (Store rule 10).
pub trait ShareStore: StoreMaintenance {
    /// Creates a share under `handle`. Errors: `Taken`, `Full`, `Unavailable`, `Invalid`. If the
    /// share was not created, its payload stays with the caller, which discards it.
    fn create(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes>;

    /// Returns the expiry of a share that has a free slot. Changes nothing. Errors: as
    /// [`ShareStore::claim`] without `Full`, for the same proof.
    fn look(&self, handle: Handle, auth: &Auth) -> PendingReply<WallTime>;

    /// Takes one slot (Store rule 1) and gives the content away. Errors: `Unknown`; with proof
    /// `Expired`, `Revoked`, `Used`, `Busy`; `Full`, `Unavailable` (nothing was given away).
    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> PendingReply<ClaimGrant>;

    /// Returns a lease and changes nothing (Store rule 12). Errors: `Unknown` for a token that is
    /// wrong or belongs to a lease that ended unused; `Used` when the lease is over, `Revoked`;
    /// `Unavailable`.
    fn lease(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant>;

    /// Must be awaited before each answer that carries bytes of the payload, and while it goes out
    /// (Store rule 11): notes that a byte is sent, and renews the lease. Errors: as
    /// [`ShareStore::lease`].
    fn payload(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant>;

    /// Ends a lease as complete; idempotent. Returns true for the one call that completes a claim
    /// after payload bytes were sent. Errors: as [`ShareStore::payload`]. A lease without a payload
    /// request is finished as well: the receiver reports completion.
    fn finish(&self, handle: Handle, token: &LeaseToken, how: LeaseFinish) -> PendingReply<bool>;

    /// Errors: `Unknown`, `Unavailable`.
    fn info(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport>;

    /// Revokes the rest of the share; the report tells the state of one that is consumed or
    /// expired, which is no error. Errors: `Unknown`, `Full`, `Unavailable`.
    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport>;

    /// Frees slots with interrupted downloads, and ends running downloads. Errors: `Unknown`,
    /// `NothingToRearm`, `Expired`, `Revoked`, `Full`, `Unavailable`.
    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport>;
}

pub trait StoreMaintenance: Send + Sync {
    fn stats(&self) -> StoreStats;

    /// Errors: `Unavailable` with the reason, while no changes are taken; for `/readyz`.
    fn ready(&self) -> Result<()>;

    /// Makes everything durable; the last call before the end of a process.
    fn flush(&self) -> PendingReply<()>;
}

/// Creates a share under a random handle; retries while the handle is taken. Ten collisions in a
/// row mean that the digits are too few for the live shares.
///
/// # Errors
/// As [`ShareStore::create`]; `Invalid` when `routing` or `digits` is out of range.
pub(crate) async fn create_random(
    store: &dyn ShareStore,
    routing: u8,
    digits: u32,
    share: NewShare,
) -> Result<(Handle, ShareTimes)> {
    for _ in 0..10 {
        let handle = random_handle(routing, digits)?;
        match store.create(handle, share.clone()).await {
            Err(StoreError::Taken) => {}
            created => return created.map(|created| (handle, created)),
        }
    }
    Err(StoreError::Full)
}
