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
//! - Store rule 12: only an answer that carries bytes of a payload notes that something was sent. Telling of a lease (HEAD, 304, 416)
//!   changes nothing.

use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, ZeroizeOnDrop};

pub mod cell;
pub mod clock;
#[cfg(test)]
pub(crate) mod conformance;
pub mod disk;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod group;
pub mod memory;
#[cfg(all(test, feature = "model"))]
mod model;
mod pending;
mod record;
pub mod segments;
mod share;
#[cfg(any(test, fuzzing))]
pub(crate) mod simulated;
pub mod spool;
mod sync;
pub mod valkey;

pub use pending::Pending;

/// The content of a capsule may have this many bytes.
pub const MAX_CAPSULE: usize = 8 * 1024;
/// A share may be claimed at most this often.
pub const MAX_CLAIMS: u8 = 8;
/// The longest life of a share.
pub const MAX_TTL: Duration = Duration::from_secs(31 * 24 * 3600);

/// Result of every operation of a store.
pub type Result<T> = std::result::Result<T, StoreError>;

/// What became of a request, few kinds chosen by what is to be answered.
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
    /// With proof: all claims are taken, but one may come back when its lease ends without a byte sent.
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
    /// The medium takes no changes (read-only, failed, or latched by Store rule 9), or the remote store does not answer.
    #[error("the store takes no changes: {0}")]
    Unavailable(String),
    /// A value out of the range that the caller was told.
    #[error("{0}")]
    Invalid(&'static str),
}

/// A point in time for people: milliseconds since 1970 by the wall clock. Nothing is decided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub u64);

/// Proof of a receiver, derived from the link's secret by the client.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct Auth(pub [u8; 32]);

/// Proof of the owner.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct OwnerToken(pub [u8; 32]);

/// SHA-256 of a proof: all that is kept of it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Verifier(pub [u8; 32]);

impl Verifier {
    pub fn of(proof: &[u8; 32]) -> Verifier {
        use sha2::Digest;
        Verifier(sha2::Sha256::digest(proof).into())
    }

    /// In constant time.
    pub fn accepts(&self, other: &Verifier) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

/// Chosen by the receiver for one attempt, so that repeating a request whose answer was lost costs nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ClaimId(pub [u8; 16]);

/// Lets its holder download the payload of one claim.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct LeaseToken(pub [u8; 16]);

impl LeaseToken {
    /// In constant time.
    fn accepts(&self, other: &LeaseToken) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

/// Ciphertext that lies in the spool as one file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SpoolEntry {
    /// Random, the name of the file.
    pub id: [u8; 16],
    /// Bytes.
    pub length: u64,
    /// SHA-256 of the ciphertext.
    pub digest: [u8; 32],
}

/// What is deposited.
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

/// Answer to a deposit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Created {
    pub at: WallTime,
    pub expires: WallTime,
}

/// Answer to a claim.
#[derive(Clone)]
pub struct Claimed {
    pub capsule: Bytes,
    /// Present when the share has a payload in the spool.
    pub lease: Option<Lease>,
    /// Claims that are left after this one.
    pub claims_left: u8,
    /// When the claim was made first.
    pub at: WallTime,
    /// This is the second answer to the same claim id.
    pub repeated: bool,
}

/// The right to download, for some time.
#[derive(Clone)]
pub struct Lease {
    pub token: LeaseToken,
    pub until: WallTime,
    pub payload: SpoolEntry,
}

/// How a lease is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The receiver said that it has everything.
    Now,
    /// The last byte was sent; the receiver may still ask again during this time.
    After(Duration),
}

/// The share as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Armed,
    Leased,
    Consumed,
    Revoked,
    Expired,
}

/// How a claim stands or ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimState {
    /// The lease runs and no byte was sent.
    Leased,
    /// The lease runs and bytes were sent.
    Sending,
    Completed,
    Interrupted,
}

/// One claim in the audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClaimEvent {
    pub claimed: WallTime,
    pub state: ClaimState,
    /// When it ended, or when the running lease will.
    pub ended: WallTime,
}

/// What the owner learns. It holds no content and stays until the audit ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    pub state: State,
    pub created: WallTime,
    pub expires: WallTime,
    pub revoked: Option<WallTime>,
    pub claims_allowed: u8,
    pub claims_left: u8,
    /// By slot; a slot that was given back is not listed.
    pub events: Vec<ClaimEvent>,
    pub capsule_bytes: u32,
    pub payload_bytes: u64,
    /// Grows with every change, for whoever watches. The end of a lease or of the share's life by time alone does not change it,
    /// but changes `state`.
    pub version: u32,
}

/// Periods that a store keeps to.
#[derive(Clone, Copy, Debug)]
pub struct Periods {
    /// The same claim id gets the same answer for so long.
    pub repeat: Duration,
    /// How long a lease lasts before its first byte: short, because a scanner that claims and does not download holds it.
    pub first_lease: Duration,
    /// How long a lease lasts after the newest request for a part.
    pub transfer_lease: Duration,
    /// What happened stays readable so long after the share's expiry.
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
pub struct Figures {
    /// Shares whose content is kept.
    pub live: u64,
    pub segment_files: u64,
    pub segment_bytes: u64,
    /// Bytes of the index on disk.
    pub index_bytes: u64,
    pub spool_bytes: u64,
    /// Bytes on disk of content whose time is over. It returns to zero.
    pub expired_bytes_pending: u64,
    /// Shares that expired unused, since the start.
    pub expired: u64,
    /// Barriers since the start, and the microseconds that they took.
    pub barriers: u64,
    pub barrier_micros: u64,
}

/// A place for shares. Calls change at once and never wait for a barrier; awaiting their answer does (Store rule 10).
pub trait ShareStore: Send + Sync {
    /// Deposits a share under `handle`.
    ///
    /// # Errors
    /// `Taken`, `Full`, `Unavailable`, `Invalid`. A payload whose share was not created stays with the caller, who discards it.
    fn create(&self, handle: Handle, share: NewShare) -> Pending<Created>;

    /// Takes one slot (Store rule 1) and gives the content away.
    ///
    /// # Errors
    /// `Unknown`; with proof `Expired`, `Revoked`, `Used`, `Busy`; `Full`, `Unavailable` (nothing was given away).
    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> Pending<Claimed>;

    /// Tells of a lease and changes nothing (Store rule 12).
    ///
    /// # Errors
    /// `Unknown` for a token that is wrong or whose lease ended unused; `Used` when the lease is over, `Revoked`; `Unavailable`.
    fn lease(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease>;

    /// Must be awaited before each answer that carries bytes of the payload, and while it goes out (Store rule 11): notes that a
    /// byte is sent, and renews the lease.
    ///
    /// # Errors
    /// As [`ShareStore::lease`].
    fn payload(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease>;

    /// Ends a lease as complete; doing it twice is no error. True when a claim of which something was sent is complete by this call,
    /// which it is once.
    ///
    /// # Errors
    /// As [`ShareStore::payload`]. A lease whose payload was never asked for is finished as well: the receiver says that it is done.
    fn finish(&self, handle: Handle, token: &LeaseToken, how: Finish) -> Pending<bool>;

    /// # Errors
    /// `Unknown`, `Unavailable`.
    fn info(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info>;

    /// Takes the share back. Of a share that is consumed or expired nothing is left to take, and the answer says so.
    ///
    /// # Errors
    /// `Unknown`, `Full`, `Unavailable`.
    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info>;

    /// Frees the slots whose download was interrupted, and ends downloads that run.
    ///
    /// # Errors
    /// `Unknown`, `NothingToRearm`, `Expired`, `Revoked`, `Full`, `Unavailable`.
    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info>;

    /// Gauges and counters, for the metrics.
    fn figures(&self) -> Figures;

    /// Whether changes are taken at this time, for `/readyz`.
    ///
    /// # Errors
    /// `Unavailable` with the reason.
    fn ready(&self) -> Result<()>;

    /// Makes everything durable; the last call before the end of a process.
    fn flush(&self) -> Pending<()>;
}

/// Refuses what no store would keep.
fn check(share: &NewShare) -> Result<()> {
    if share.capsule.len() > MAX_CAPSULE {
        return Err(StoreError::Invalid("a capsule has at most 8192 bytes"));
    }
    if !(1..=MAX_CLAIMS).contains(&share.claims) {
        return Err(StoreError::Invalid("a share allows 1 to 8 claims"));
    }
    if share.ttl.is_zero() || share.ttl > MAX_TTL {
        return Err(StoreError::Invalid("a share lives for more than no time and at most 31 days"));
    }
    Ok(())
}

/// Draws handles until one is free. Ten collisions in a row mean that the digits are too few for the live shares.
///
/// # Errors
/// Those of [`ShareStore::create`]; `Invalid` when `routing` or `digits` is out of range.
pub async fn mint(store: &dyn ShareStore, routing: u8, digits: u32, share: NewShare) -> Result<(Handle, Created)> {
    for _ in 0..10 {
        let handle = random_handle(routing, digits)?;
        match store.create(handle, share.clone()).await {
            Err(StoreError::Taken) => {}
            created => return created.map(|created| (handle, created)),
        }
    }
    Err(StoreError::Full)
}

/// A handle with random digits, without bias.
///
/// # Errors
/// `Invalid` when a part is out of range, `Unavailable` without randomness.
pub fn random_handle(routing: u8, digits: u32) -> Result<Handle> {
    let limit = 10u64.pow(digits.min(12));
    let bound = u64::MAX - u64::MAX % limit;
    loop {
        let number = u64::from_le_bytes(random()?);
        if number < bound {
            return Handle::new(routing, digits, number % limit)
                .ok_or(StoreError::Invalid("a handle has a routing digit and 6 to 12 random digits"));
        }
    }
}

/// A name that nobody guesses.
pub(crate) fn random_id() -> Result<[u8; 16]> {
    random()
}

fn random<const N: usize>() -> Result<[u8; N]> {
    let mut out = [0; N];
    getrandom::fill(&mut out).map_err(|error| StoreError::Unavailable(format!("no randomness: {error}")))?;
    Ok(out)
}
