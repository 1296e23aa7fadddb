//! One share without its capsule, and what each request makes of it. Every store decides with this and only keeps it differently.

use lockbox_share_protocol::handle::Handle;
use siphasher::sip128::{Hasher128, SipHasher24};
use std::hash::Hasher;
use std::time::Duration;

use super::cell::{Cell, Ended, Running, Slot};
use super::clock::{StoreClock, Time};
use super::{
    Auth, ClaimEvent, ClaimId, ClaimState, Finish, Info, Lease, LeaseToken, NewShare, OwnerToken, Periods, Result,
    SpoolEntry, State, StoreError, Verifier, WallTime,
};

/// However often its holder asks again, a lease is renewed until here after its claim.
const LONGEST_LEASE: Duration = Duration::from_secs(24 * 3600);

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

/// Everything about a share but its capsule.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Share {
    /// Grows with each change; of two records of one share the higher version is the newer.
    pub(crate) version: u32,
    pub(crate) created: Time,
    pub(crate) expires: Time,
    pub(crate) revoked: Option<Time>,
    pub(crate) auth: Verifier,
    pub(crate) owner: Verifier,
    pub(crate) capsule_bytes: u32,
    pub(crate) payload: Option<SpoolEntry>,
    pub(crate) cell: Cell,
}

/// What a claim came to.
pub(crate) struct Step {
    pub(crate) slot: Slot,
    pub(crate) left: u8,
    pub(crate) repeated: bool,
}

impl Share {
    pub(crate) fn new(new: &NewShare, now: Time) -> Share {
        Share {
            version: 1,
            created: now,
            expires: now.after(new.ttl),
            revoked: None,
            auth: new.auth,
            owner: new.owner,
            capsule_bytes: new.capsule.len() as u32,
            payload: new.payload,
            cell: Cell::new(new.claims),
        }
    }

    /// A share that nobody has proof of: what a missing one is compared with (Store rule 5).
    pub(crate) fn decoy(noise: [u8; 32]) -> Share {
        Share {
            version: 1,
            created: Time(0),
            expires: Time(0),
            revoked: None,
            auth: Verifier(noise),
            owner: Verifier(noise),
            capsule_bytes: 0,
            payload: None,
            cell: Cell::new(1),
        }
    }

    /// # Errors
    /// `Unknown` without proof; otherwise why nothing can be claimed.
    pub(crate) fn claim(
        &mut self,
        auth: &Auth,
        id: ClaimId,
        clock: &StoreClock,
        periods: &Periods,
        fresh: impl FnOnce() -> Result<LeaseToken>,
    ) -> Result<Step> {
        self.prove(auth)?;
        let now = clock.now();
        self.cell.settle(now);
        if let Some(at) = self.revoked {
            return Err(StoreError::Revoked { at: clock.wall(at) });
        }
        if let Some(slot) = self.cell.repeated(id, now, periods.repeat) {
            return Ok(Step { slot: *slot, left: self.cell.left(), repeated: true });
        }
        if self.expires <= now {
            return Err(StoreError::Expired { at: clock.wall(self.expires) });
        }
        if self.cell.left() == 0 {
            return Err(self.taken(clock));
        }
        let lease = match self.payload {
            Some(_) => Some((fresh()?, now.after(periods.first_lease))),
            None => None,
        };
        match self.cell.take(id, now, lease) {
            Some(slot) => {
                self.version += 1;
                Ok(Step { slot, left: self.cell.left(), repeated: false })
            }
            None => Err(self.taken(clock)),
        }
    }

    fn prove(&self, auth: &Auth) -> Result<()> {
        self.auth.accepts(&Verifier::of(&auth.0)).then_some(()).ok_or(StoreError::Unknown)
    }

    fn prove_owner(&self, owner: &OwnerToken) -> Result<()> {
        self.owner.accepts(&Verifier::of(&owner.0)).then_some(()).ok_or(StoreError::Unknown)
    }

    /// Why no slot is free.
    fn taken(&self, clock: &StoreClock) -> StoreError {
        let leases = self.cell.slots().iter().filter_map(|slot| match slot {
            Slot::Leased(lease) => Some(lease.until),
            _ => None,
        });
        match leases.min() {
            Some(until) => StoreError::Busy { until: clock.wall(until) },
            None => StoreError::Used { at: clock.wall(self.last_end()) },
        }
    }

    fn last_end(&self) -> Time {
        let ends = self.cell.slots().iter().filter_map(|slot| match slot {
            Slot::Ended(ended) => Some(ended.at),
            _ => None,
        });
        ends.max().unwrap_or(self.created)
    }

    /// The lease that runs under a token.
    fn running(&mut self, token: &LeaseToken, clock: &StoreClock) -> Result<&mut Running> {
        self.cell.settle(clock.now());
        let revoked = self.revoked;
        let slot = self.cell.by_token(token).ok_or(StoreError::Unknown)?;
        if let Some(at) = revoked {
            return Err(StoreError::Revoked { at: clock.wall(at) });
        }
        match slot {
            Slot::Leased(lease) => Ok(lease),
            Slot::Ended(ended) => Err(StoreError::Used { at: clock.wall(ended.at) }),
            Slot::Free => Err(StoreError::Unknown),
        }
    }

    /// Tells of a lease (Store rule 12).
    pub(crate) fn lease(&self, token: &LeaseToken, clock: &StoreClock) -> Result<Lease> {
        let mut settled = *self;
        let payload = self.payload;
        let lease = settled.running(token, clock)?;
        Ok(Lease { token: lease.token, until: clock.wall(lease.until), payload: payload.ok_or(StoreError::Unknown)? })
    }

    /// Notes that a byte of the payload goes out and renews the lease. Renewals are noted when half of the time is over, so that
    /// a download in many parts costs few writes. Who asks again after the last byte lacks something still: the lease goes on.
    pub(crate) fn payload(&mut self, token: &LeaseToken, clock: &StoreClock, periods: &Periods) -> Result<Lease> {
        let now = clock.now();
        let payload = self.payload;
        let lease = self.running(token, clock)?;
        let payload = payload.ok_or(StoreError::Unknown)?;
        let renewed = now.after(periods.transfer_lease).min(lease.claimed.after(LONGEST_LEASE));
        let due = lease.until < renewed && lease.until < now.after(periods.transfer_lease / 2);
        let news = !lease.sent || lease.finishing || due;
        if news {
            lease.sent = true;
            lease.finishing = false;
            lease.until = lease.until.max(renewed);
        }
        let (token, until) = (lease.token, clock.wall(lease.until));
        self.version += u32::from(news);
        Ok(Lease { token, until, payload })
    }

    /// True when a claim of which something was sent is complete by this call.
    pub(crate) fn finish(&mut self, token: &LeaseToken, how: Finish, clock: &StoreClock) -> Result<bool> {
        let now = clock.now();
        self.cell.settle(now);
        let revoked = self.revoked;
        let slot = self.cell.by_token(token).ok_or(StoreError::Unknown)?;
        if let Some(at) = revoked {
            return Err(StoreError::Revoked { at: clock.wall(at) });
        }
        let complete = match slot {
            Slot::Leased(lease) => match how {
                Finish::Now => {
                    let sent = lease.sent;
                    *slot = lease.ended(now, true);
                    sent
                }
                // Of several last bytes under way the first counts.
                Finish::After(_) if lease.finishing => return Ok(false),
                Finish::After(grace) => {
                    lease.sent = true;
                    lease.finishing = true;
                    lease.until = now.after(grace);
                    false
                }
            },
            Slot::Ended(Ended { completed: true, .. }) => return Ok(false),
            // The receiver got all of it although its lease ran out meanwhile: the audit tells the truth.
            Slot::Ended(ended) => {
                ended.completed = true;
                true
            }
            Slot::Free => return Err(StoreError::Unknown),
        };
        self.version += 1;
        Ok(complete)
    }

    pub(crate) fn info(&self, owner: &OwnerToken, clock: &StoreClock) -> Result<Info> {
        self.prove_owner(owner)?;
        Ok(self.told(clock))
    }

    pub(crate) fn revoke(&mut self, owner: &OwnerToken, clock: &StoreClock) -> Result<Info> {
        self.prove_owner(owner)?;
        let now = clock.now();
        self.cell.settle(now);
        if matches!(self.state(now), State::Armed | State::Leased) || self.interrupted() {
            self.revoked.get_or_insert(now);
            self.version += 1;
        }
        Ok(self.told(clock))
    }

    pub(crate) fn rearm(&mut self, owner: &OwnerToken, clock: &StoreClock) -> Result<Info> {
        self.prove_owner(owner)?;
        let now = clock.now();
        self.cell.settle(now);
        if let Some(at) = self.revoked {
            return Err(StoreError::Revoked { at: clock.wall(at) });
        }
        if self.expires <= now {
            return Err(StoreError::Expired { at: clock.wall(self.expires) });
        }
        if self.cell.rearm() == 0 {
            return Err(StoreError::NothingToRearm);
        }
        self.version += 1;
        Ok(self.told(clock))
    }

    /// Some download ended early and can be rearmed, so the content is still there.
    fn interrupted(&self) -> bool {
        self.revoked.is_none()
            && self.cell.slots().iter().any(|s| matches!(s, Slot::Ended(Ended { completed: false, .. })))
    }

    pub(crate) fn state(&self, now: Time) -> State {
        let leased = self.cell.slots().iter().any(|slot| matches!(slot, Slot::Leased(_)));
        if self.revoked.is_some() {
            State::Revoked
        } else if self.cell.left() == 0 {
            if leased { State::Leased } else { State::Consumed }
        } else if self.expires <= now {
            if leased { State::Leased } else { State::Expired }
        } else {
            State::Armed
        }
    }

    fn told(&self, clock: &StoreClock) -> Info {
        let now = clock.now();
        let mut settled = *self;
        settled.cell.settle(now);
        let event =
            |claimed, state, ended| ClaimEvent { claimed: clock.wall(claimed), state, ended: clock.wall(ended) };
        let events = settled.cell.slots().iter().filter_map(|slot| match slot {
            Slot::Free => None,
            Slot::Leased(l) if l.sent => Some(event(l.claimed, ClaimState::Sending, l.until)),
            Slot::Leased(l) => Some(event(l.claimed, ClaimState::Leased, l.until)),
            Slot::Ended(e) if e.completed => Some(event(e.claimed, ClaimState::Completed, e.at)),
            Slot::Ended(e) => Some(event(e.claimed, ClaimState::Interrupted, e.at)),
        });
        Info {
            state: settled.state(now),
            created: clock.wall(self.created),
            expires: clock.wall(self.expires),
            revoked: self.revoked.map(|at| clock.wall(at)),
            claims_allowed: self.cell.allowed(),
            claims_left: settled.cell.left(),
            events: events.collect(),
            capsule_bytes: self.capsule_bytes,
            payload_bytes: self.payload.map_or(0, |p| p.length),
            version: self.version,
        }
    }

    /// From when on nothing can need the content, unless something happens before (Store rule 7).
    pub(crate) fn content_until(&self, periods: &Periods) -> Time {
        if self.revoked.is_some() {
            return Time(0);
        }
        let needs = self.cell.slots().iter().map(|slot| match slot {
            Slot::Free => self.expires,
            Slot::Leased(lease) => self.expires.max(lease.until),
            Slot::Ended(Ended { completed: false, .. }) => self.expires,
            // With a payload in the spool the repeated answer holds the capsule as well.
            Slot::Ended(ended) => ended.claimed.after(periods.repeat),
        });
        needs.max().unwrap_or(Time(0))
    }

    /// Something may still be claimed or downloaded, now or after a rearm. Its end is the death of the content, but for repeats.
    pub(crate) fn live(&self) -> bool {
        self.revoked.is_none()
            && self.cell.slots().iter().any(|s| !matches!(s, Slot::Ended(Ended { completed: true, .. })))
    }

    /// From when on nothing is known of the share.
    pub(crate) fn audit_until(&self, periods: &Periods) -> Time {
        self.content_until(periods).max(self.expires).after(periods.audit)
    }

    /// The answer to a claim.
    pub(crate) fn claimed(&self, step: &Step, capsule: bytes::Bytes, clock: &StoreClock) -> super::Claimed {
        let (at, lease): (Time, Option<(LeaseToken, WallTime)>) = match &step.slot {
            Slot::Leased(lease) => (lease.claimed, Some((lease.token, clock.wall(lease.until)))),
            Slot::Ended(ended) => (ended.claimed, Some((ended.token, clock.wall(ended.at)))),
            Slot::Free => (self.created, None),
        };
        let lease = lease.zip(self.payload).map(|((token, until), payload)| Lease { token, until, payload });
        super::Claimed { capsule, lease, claims_left: step.left, at: clock.wall(at), repeated: step.repeated }
    }
}
