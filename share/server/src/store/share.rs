//! State of one share without its capsule: its claim slots, and the effect of each request on it.
//!
//! All stores decide with this code and differ only in storage: a store implements the insertion of
//! a share, and the execution of one step on an existing share or on a decoy ([`ShareBackend`]).

use std::hash::Hasher;
use std::time::Duration;

use bytes::Bytes;
use lockbox_share_protocol::message::{ClaimState, MAX_CLAIMS, ShareState};
use lockbox_share_protocol::token::{Auth, ClaimId, Handle, LeaseToken, OwnerToken, Verifier};
use siphasher::sip128::{Hasher128, SipHasher24};
use subtle::ConstantTimeEq;

use super::barrier_group::PendingReply;
use super::contract::{
    ClaimGrant, ClaimRecord, LeaseFinish, LeaseGrant, NewShare, Periods, ShareReport, ShareStore, ShareTimes,
    SpoolEntry, StoreMaintenance,
};
use super::env::{StoreClock, StoreTime, WallTime, random};
use super::{Result, StoreError};

/// A lease is renewed until this time after its claim, however often its holder asks again.
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);

pub(crate) struct StoreTiming {
    pub(crate) clock: StoreClock,
    pub(crate) periods: Periods,
}

/// A handle as it is kept: hashed under a key of the store (Store rule 6).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) [u8; 16]);

impl Key {
    pub(crate) fn of(handle: Handle, secret: &[u8; 16]) -> Key {
        let mut hasher = SipHasher24::new_with_key(secret);
        hasher.write(handle.to_string().as_bytes());
        Key(hasher.finish128().as_bytes())
    }
}

/// A lease token as it is kept. Zero stands for none.
pub(crate) type Token = [u8; LeaseToken::LENGTH];
const NO_TOKEN: Token = [0; LeaseToken::LENGTH];

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimSlot {
    Free,
    Leased(ActiveLease),
    Ended(EndedClaim),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ActiveLease {
    pub id: [u8; ClaimId::LENGTH],
    pub token: Token,
    pub claimed: StoreTime,
    pub until: StoreTime,
    /// A byte of the payload went out (Store rule 4).
    pub sent: bool,
    /// The last byte was handed to a connection: the lease ends after the grace.
    pub finishing: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndedClaim {
    pub id: [u8; ClaimId::LENGTH],
    /// Zero when there was no payload to download.
    pub token: Token,
    pub claimed: StoreTime,
    pub at: StoreTime,
    /// The receiver confirmed it. A last byte that was sent can still be lost in buffers, and the
    /// claim with it.
    pub completed: bool,
}

/// All slots of a share; the first `allowed` of them count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClaimSlots {
    slots: [ClaimSlot; MAX_CLAIMS as usize],
    pub(crate) allowed: u8,
}

impl ClaimSlots {
    /// Creates free slots. `allowed` is 1 to 8; the caller has checked it.
    pub(crate) fn new(allowed: u8) -> ClaimSlots {
        ClaimSlots { slots: [ClaimSlot::Free; MAX_CLAIMS as usize], allowed: allowed.clamp(1, MAX_CLAIMS) }
    }

    pub(crate) fn slots(&self) -> &[ClaimSlot] {
        &self.slots[..usize::from(self.allowed)]
    }

    pub(crate) fn slots_mut(&mut self) -> &mut [ClaimSlot] {
        &mut self.slots[..usize::from(self.allowed)]
    }

    pub(crate) fn left(&self) -> u8 {
        self.slots().iter().filter(|slot| matches!(slot, ClaimSlot::Free)).count() as u8
    }

    pub(crate) fn first_lease_end(&self) -> Option<StoreTime> {
        let ends = self.slots().iter().filter_map(|slot| match slot {
            ClaimSlot::Leased(lease) => Some(lease.until),
            _ => None,
        });
        ends.min()
    }

    /// Ends overdue leases (Store rule 4). Depends on `now` alone: the result need not be stored.
    pub(crate) fn end_overdue(&mut self, now: StoreTime) {
        for slot in self.slots_mut() {
            if let ClaimSlot::Leased(lease) = *slot
                && lease.until <= now
            {
                let is_used = lease.sent || lease.finishing;
                *slot = if is_used { lease.ended(lease.until, false) } else { ClaimSlot::Free };
            }
        }
    }

    /// The slot that this claim took before, while its answer may be repeated (Store rule 3).
    pub(crate) fn repeated(&self, id: &ClaimId, now: StoreTime, window: Duration) -> Option<&ClaimSlot> {
        let id = id.as_bytes();
        self.slots().iter().find(|slot| match slot {
            ClaimSlot::Free => false,
            ClaimSlot::Leased(lease) => lease.id == *id && now < lease.claimed.after(window),
            ClaimSlot::Ended(ended) => ended.id == *id && now < ended.claimed.after(window),
        })
    }

    /// Takes a free slot (Store rule 1): with a lease, or for good without a payload.
    pub(crate) fn take(
        &mut self,
        id: &ClaimId,
        now: StoreTime,
        lease: Option<(Token, StoreTime)>,
    ) -> Option<ClaimSlot> {
        let id = *id.as_bytes();
        let slot = self.slots_mut().iter_mut().find(|slot| matches!(slot, ClaimSlot::Free))?;
        *slot = match lease {
            Some((token, until)) => {
                ClaimSlot::Leased(ActiveLease { id, token, claimed: now, until, sent: false, finishing: false })
            }
            None => ClaimSlot::Ended(EndedClaim { id, token: NO_TOKEN, claimed: now, at: now, completed: true }),
        };
        Some(*slot)
    }

    /// Returns the slot with this lease token. All slots are compared, each in constant time.
    pub(crate) fn by_token(&mut self, token: &LeaseToken) -> Option<&mut ClaimSlot> {
        let mut found = None;
        let is_same = |kept: &Token| bool::from(kept.ct_eq(token.as_bytes()));
        for slot in self.slots_mut() {
            let matches = match slot {
                ClaimSlot::Free => false,
                ClaimSlot::Leased(lease) => is_same(&lease.token),
                ClaimSlot::Ended(ended) => ended.token != NO_TOKEN && is_same(&ended.token),
            };
            if matches {
                found = Some(slot);
            }
        }
        found
    }

    /// Frees interrupted and active slots, and returns their number.
    pub(crate) fn rearm(&mut self) -> usize {
        let mut freed = 0;
        for slot in self.slots_mut() {
            if matches!(slot, ClaimSlot::Leased(_) | ClaimSlot::Ended(EndedClaim { completed: false, .. })) {
                *slot = ClaimSlot::Free;
                freed += 1;
            }
        }
        freed
    }
}

impl ActiveLease {
    pub(crate) fn ended(&self, at: StoreTime, completed: bool) -> ClaimSlot {
        ClaimSlot::Ended(EndedClaim { id: self.id, token: self.token, claimed: self.claimed, at, completed })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// Grows with each change; of two records of one share the higher version is the newer.
    pub(crate) version: u32,
    pub(crate) created: StoreTime,
    pub(crate) expires: StoreTime,
    pub(crate) revoked: Option<StoreTime>,
    pub(crate) auth: Verifier,
    pub(crate) owner: Verifier,
    pub(crate) capsule_bytes: u32,
    pub(crate) payload: Option<SpoolEntry>,
    pub(crate) claims: ClaimSlots,
}

impl Share {
    pub(crate) fn new(new: &NewShare, now: StoreTime) -> Share {
        Share {
            version: 1,
            created: now,
            expires: now.after(new.ttl),
            revoked: None,
            auth: new.auth,
            owner: new.owner,
            capsule_bytes: new.capsule.len() as u32,
            payload: new.payload,
            claims: ClaimSlots::new(new.claims),
        }
    }

    /// Creates a decoy that accepts no proof; it stands in for a missing share (Store rule 5).
    pub(crate) fn decoy(noise: [u8; 32]) -> Share {
        Share {
            version: 1,
            created: StoreTime(0),
            expires: StoreTime(0),
            revoked: None,
            auth: Verifier::new(noise),
            owner: Verifier::new(noise),
            capsule_bytes: 0,
            payload: None,
            claims: ClaimSlots::new(1),
        }
    }

    pub(crate) fn created(&self, clock: &StoreClock) -> ShareTimes {
        ShareTimes { at: clock.wall(self.created), expires: clock.wall(self.expires) }
    }

    /// Returns the expiry while a slot is free. Errors: `Unknown` without proof, else the obstacle.
    pub(crate) fn look(&self, auth: &Verifier, timing: &StoreTiming) -> Result<WallTime> {
        let mut current = *self;
        current.open_to(auth, &timing.clock)?;
        current.must_have_left(&timing.clock)?;
        Ok(timing.clock.wall(self.expires))
    }

    /// Claims without the capsule, which the store adds. Errors: as for [`Share::look`], and of
    /// `fresh`.
    pub(crate) fn claim(
        &mut self,
        auth: &Verifier,
        id: &ClaimId,
        timing: &StoreTiming,
        fresh: impl FnOnce() -> Result<[u8; LeaseToken::LENGTH]>,
    ) -> Result<ClaimGrant> {
        let StoreTiming { clock, periods } = timing;
        let now = self.open_to(auth, clock)?;
        if let Some(slot) = self.claims.repeated(id, now, periods.repeat) {
            return Ok(self.claimed(slot, true, clock));
        }
        self.must_have_left(clock)?;
        let lease = match self.payload {
            Some(_) => Some((fresh()?, now.after(periods.first_lease))),
            None => None,
        };
        let Some(slot) = self.claims.take(id, now, lease) else { return Err(self.taken(clock)) };
        self.version += 1;
        Ok(self.claimed(&slot, false, clock))
    }

    fn open_to(&mut self, auth: &Verifier, clock: &StoreClock) -> Result<StoreTime> {
        prove(&self.auth, auth)?;
        let now = clock.now();
        self.claims.end_overdue(now);
        self.must_stand(clock).map(|()| now)
    }

    fn must_stand(&self, clock: &StoreClock) -> Result<()> {
        self.revoked.map_or(Ok(()), |at| Err(StoreError::Revoked { at: clock.wall(at) }))
    }

    fn must_have_left(&self, clock: &StoreClock) -> Result<()> {
        if self.expires <= clock.now() {
            return Err(StoreError::Expired { at: clock.wall(self.expires) });
        }
        if self.claims.left() == 0 { Err(self.taken(clock)) } else { Ok(()) }
    }

    fn claimed(&self, slot: &ClaimSlot, repeated: bool, clock: &StoreClock) -> ClaimGrant {
        let (at, token, until) = match slot {
            ClaimSlot::Leased(lease) => (lease.claimed, lease.token, lease.until),
            ClaimSlot::Ended(ended) => (ended.claimed, ended.token, ended.at),
            ClaimSlot::Free => (self.created, NO_TOKEN, self.created),
        };
        let lease =
            self.payload.map(|payload| LeaseGrant { token: LeaseToken::new(token), until: clock.wall(until), payload });
        ClaimGrant { capsule: Bytes::new(), lease, claims_left: self.claims.left(), at: clock.wall(at), repeated }
    }

    fn taken(&self, clock: &StoreClock) -> StoreError {
        if let Some(until) = self.claims.first_lease_end() {
            return StoreError::Busy { until: clock.wall(until) };
        }
        let ends = self.claims.slots().iter().filter_map(|slot| match slot {
            ClaimSlot::Ended(ended) => Some(ended.at),
            _ => None,
        });
        StoreError::Used { at: clock.wall(ends.max().unwrap_or(self.created)) }
    }

    /// The slot of a token, after overdue leases ended.
    fn slot(&mut self, token: &LeaseToken, clock: &StoreClock) -> Result<&mut ClaimSlot> {
        self.claims.end_overdue(clock.now());
        let stands = self.must_stand(clock);
        let slot = self.claims.by_token(token).ok_or(StoreError::Unknown)?;
        stands.map(|()| slot)
    }

    fn running(&mut self, token: &LeaseToken, clock: &StoreClock) -> Result<&mut ActiveLease> {
        match self.slot(token, clock)? {
            ClaimSlot::Leased(lease) => Ok(lease),
            ClaimSlot::Ended(ended) => Err(StoreError::Used { at: clock.wall(ended.at) }),
            ClaimSlot::Free => Err(StoreError::Unknown),
        }
    }

    /// Tells of a lease (Store rule 12).
    pub(crate) fn lease(&self, token: &LeaseToken, timing: &StoreTiming) -> Result<LeaseGrant> {
        let mut current = *self;
        let until = current.running(token, &timing.clock)?.until;
        self.leased(token, until, &timing.clock)
    }

    fn leased(&self, token: &LeaseToken, until: StoreTime, clock: &StoreClock) -> Result<LeaseGrant> {
        let payload = self.payload.ok_or(StoreError::Unknown)?;
        Ok(LeaseGrant { token: LeaseToken::new(*token.as_bytes()), until: clock.wall(until), payload })
    }

    /// Marks the payload as sent and renews the lease. A renewal is stored when half of the time is
    /// over, so that a download in many parts costs few writes. A client that requests bytes after
    /// the last one still lacks some: the lease continues.
    pub(crate) fn payload(&mut self, token: &LeaseToken, timing: &StoreTiming) -> Result<LeaseGrant> {
        let StoreTiming { clock, periods } = timing;
        let now = clock.now();
        let lease = self.running(token, clock)?;
        let renewed = now.after(periods.transfer_lease).min(lease.claimed.after(LONGEST_LEASE));
        let due = lease.until < renewed && lease.until < now.after(periods.transfer_lease / 2);
        let news = !lease.sent || lease.finishing || due;
        if news {
            lease.sent = true;
            lease.finishing = false;
            lease.until = lease.until.max(renewed);
        }
        let until = lease.until;
        self.version += u32::from(news);
        self.leased(token, until, clock)
    }

    /// True when a claim of which something was sent is complete by this call.
    pub(crate) fn finish(&mut self, token: &LeaseToken, how: LeaseFinish, timing: &StoreTiming) -> Result<bool> {
        let now = timing.clock.now();
        let slot = self.slot(token, &timing.clock)?;
        let complete = match slot {
            ClaimSlot::Leased(lease) => match how {
                LeaseFinish::Now => {
                    let sent = lease.sent;
                    *slot = lease.ended(now, true);
                    sent
                }
                // Of several last bytes in flight the first counts.
                LeaseFinish::After(_) if lease.finishing => return Ok(false),
                LeaseFinish::After(grace) => {
                    lease.sent = true;
                    lease.finishing = true;
                    lease.until = now.after(grace);
                    false
                }
            },
            // The receiver got all of it although its lease ran out meanwhile: the audit tells the
            // truth.
            ClaimSlot::Ended(ended) if how == LeaseFinish::Now && !ended.completed => {
                ended.completed = true;
                true
            }
            ClaimSlot::Ended(_) => return Ok(false),
            ClaimSlot::Free => return Err(StoreError::Unknown),
        };
        self.version += 1;
        Ok(complete)
    }

    pub(crate) fn info(&self, owner: &Verifier, timing: &StoreTiming) -> Result<ShareReport> {
        prove(&self.owner, owner)?;
        Ok(self.report(&timing.clock))
    }

    pub(crate) fn revoke(&mut self, owner: &Verifier, timing: &StoreTiming) -> Result<ShareReport> {
        prove(&self.owner, owner)?;
        let clock = &timing.clock;
        let now = clock.now();
        self.claims.end_overdue(now);
        if matches!(self.state(now), ShareState::Armed | ShareState::Leased) || self.interrupted() {
            self.revoked.get_or_insert(now);
            self.version += 1;
        }
        Ok(self.report(clock))
    }

    pub(crate) fn rearm(&mut self, owner: &Verifier, timing: &StoreTiming) -> Result<ShareReport> {
        prove(&self.owner, owner)?;
        let clock = &timing.clock;
        let now = clock.now();
        self.claims.end_overdue(now);
        self.must_stand(clock)?;
        if self.expires <= now {
            return Err(StoreError::Expired { at: clock.wall(self.expires) });
        }
        if self.claims.rearm() == 0 {
            return Err(StoreError::NothingToRearm);
        }
        self.version += 1;
        Ok(self.report(clock))
    }

    /// Returns whether a download was interrupted and can be rearmed; its content is still stored.
    fn interrupted(&self) -> bool {
        self.revoked.is_none()
            && self.claims.slots().iter().any(|s| matches!(s, ClaimSlot::Ended(EndedClaim { completed: false, .. })))
    }

    pub(crate) fn state(&self, now: StoreTime) -> ShareState {
        let leased = self.claims.slots().iter().any(|slot| matches!(slot, ClaimSlot::Leased(_)));
        if self.revoked.is_some() {
            ShareState::Revoked
        } else if self.claims.left() == 0 {
            if leased { ShareState::Leased } else { ShareState::Consumed }
        } else if self.expires <= now {
            if leased { ShareState::Leased } else { ShareState::Expired }
        } else {
            ShareState::Armed
        }
    }

    fn report(&self, clock: &StoreClock) -> ShareReport {
        let now = clock.now();
        let mut current = *self;
        current.claims.end_overdue(now);
        let event =
            |claimed, state, ended| ClaimRecord { claimed: clock.wall(claimed), state, ended: clock.wall(ended) };
        let events = current.claims.slots().iter().filter_map(|slot| match slot {
            ClaimSlot::Free => None,
            ClaimSlot::Leased(l) if l.sent => Some(event(l.claimed, ClaimState::Sending, l.until)),
            ClaimSlot::Leased(l) => Some(event(l.claimed, ClaimState::Leased, l.until)),
            ClaimSlot::Ended(e) if e.completed => Some(event(e.claimed, ClaimState::Completed, e.at)),
            ClaimSlot::Ended(e) => Some(event(e.claimed, ClaimState::Interrupted, e.at)),
        });
        ShareReport {
            state: current.state(now),
            created: clock.wall(self.created),
            expires: clock.wall(self.expires),
            revoked: self.revoked.map(|at| clock.wall(at)),
            claims_allowed: self.claims.allowed,
            claims_left: current.claims.left(),
            events: events.collect(),
            capsule_bytes: self.capsule_bytes,
            payload_bytes: self.payload.map_or(0, |p| p.length),
            version: self.version,
        }
    }

    /// Time from which on nothing can need the content, unless the share changes (Store rule 7).
    pub(crate) fn content_until(&self, periods: &Periods) -> StoreTime {
        if self.revoked.is_some() {
            return StoreTime(0);
        }
        let needs = self.claims.slots().iter().map(|slot| match slot {
            ClaimSlot::Free => self.expires,
            ClaimSlot::Leased(lease) => self.expires.max(lease.until),
            ClaimSlot::Ended(EndedClaim { completed: false, .. }) => self.expires,
            // With a payload in the spool the repeated answer holds the capsule as well.
            ClaimSlot::Ended(ended) => ended.claimed.after(periods.repeat),
        });
        needs.max().unwrap_or(StoreTime(0))
    }

    /// Returns whether a claim or a download is possible, now or after a rearm. Repeats are not
    /// counted.
    pub(crate) fn live(&self) -> bool {
        self.revoked.is_none()
            && self.claims.slots().iter().any(|s| !matches!(s, ClaimSlot::Ended(EndedClaim { completed: true, .. })))
    }

    pub(crate) fn audit_until(&self, periods: &Periods) -> StoreTime {
        self.content_until(periods).max(self.expires).after(periods.audit)
    }
}

/// In constant time (Store rule 6).
fn prove(kept: &Verifier, shown: &Verifier) -> Result<()> {
    kept.accepts(shown).then_some(()).ok_or(StoreError::Unknown)
}

/// Result of a step, to which the store may have to add the capsule.
pub(crate) trait StepReply: Send + Unpin + 'static {
    /// Whether the capsule is given away with the answer.
    const HAS_CAPSULE: bool = false;

    fn add_capsule(&mut self, _: Bytes) {}
}

impl StepReply for ClaimGrant {
    const HAS_CAPSULE: bool = true;

    fn add_capsule(&mut self, capsule: Bytes) {
        self.capsule = capsule;
    }
}

impl StepReply for LeaseGrant {}
impl StepReply for ShareReport {}
impl StepReply for bool {}
impl StepReply for WallTime {}

pub(crate) trait ShareBackend: StoreMaintenance {
    /// Deposits a share that was checked.
    fn deposit(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes>;

    /// Runs `step` on the share of this handle, or on a decoy that accepts no proof (Store rule 5),
    /// and stores its change. Runs it again if the share was changed concurrently.
    fn step<T: StepReply>(
        &self,
        handle: Handle,
        step: impl FnMut(&StoreTiming, &mut Share) -> Result<T> + Send + 'static,
    ) -> PendingReply<T>;
}

impl<K: ShareBackend> ShareStore for K {
    fn create(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes> {
        match share.check() {
            Ok(()) => self.deposit(handle, share),
            Err(error) => PendingReply::ready(Err(error)),
        }
    }

    fn look(&self, handle: Handle, auth: &Auth) -> PendingReply<WallTime> {
        let auth = auth.verifier();
        self.step(handle, move |timing, share| share.look(&auth, timing))
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> PendingReply<ClaimGrant> {
        let auth = auth.verifier();
        self.step(handle, move |timing, share| share.claim(&auth, &id, timing, random))
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |timing, share| share.lease(&token, timing))
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |timing, share| share.payload(&token, timing))
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: LeaseFinish) -> PendingReply<bool> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |timing, share| share.finish(&token, how, timing))
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        let owner = owner.verifier();
        self.step(handle, move |timing, share| share.info(&owner, timing))
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        let owner = owner.verifier();
        self.step(handle, move |timing, share| share.revoke(&owner, timing))
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        let owner = owner.verifier();
        self.step(handle, move |timing, share| share.rearm(&owner, timing))
    }
}
