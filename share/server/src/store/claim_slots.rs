//! The claim cell: the slots of one share and the steps that each of them can take.

use std::time::Duration;

use lockbox_share_protocol::message::MAX_CLAIMS;
use lockbox_share_protocol::token::{ClaimId, LeaseToken};
use subtle::ConstantTimeEq;

use super::env::Time;

/// A lease token as it is kept. Zero stands for none.
pub(crate) type Token = [u8; LeaseToken::LENGTH];
const NO_TOKEN: Token = [0; LeaseToken::LENGTH];

/// One claim that a share allows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Slot {
    Free,
    Leased(Running),
    Ended(Ended),
}

/// A lease that runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Running {
    pub id: [u8; ClaimId::LENGTH],
    pub token: Token,
    pub claimed: Time,
    pub until: Time,
    /// A byte of the payload went out (Store rule 4).
    pub sent: bool,
    /// The last byte went out: the end of the lease is its completion.
    pub finishing: bool,
}

/// A claim that is over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    pub id: [u8; ClaimId::LENGTH],
    /// Zero when there was no payload to download.
    pub token: Token,
    pub claimed: Time,
    pub at: Time,
    pub completed: bool,
}

/// All slots of a share; the first `allowed` of them count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    pub(crate) slots: [Slot; MAX_CLAIMS as usize],
    pub(crate) allowed: u8,
}

impl Cell {
    /// `allowed` is 1 to 8, which whoever accepts a share has checked.
    pub(crate) fn new(allowed: u8) -> Cell {
        Cell { slots: [Slot::Free; MAX_CLAIMS as usize], allowed: allowed.clamp(1, MAX_CLAIMS) }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        &self.slots[..usize::from(self.allowed)]
    }

    pub(crate) fn slots_mut(&mut self) -> &mut [Slot] {
        &mut self.slots[..usize::from(self.allowed)]
    }

    pub(crate) fn allowed(&self) -> u8 {
        self.allowed
    }

    pub(crate) fn left(&self) -> u8 {
        self.slots().iter().filter(|slot| matches!(slot, Slot::Free)).count() as u8
    }

    /// Ends the leases whose time is over (Store rule 4). Depends on `now` alone, so that it need not be written down.
    pub(crate) fn end_overdue(&mut self, now: Time) {
        for slot in self.slots_mut() {
            if let Slot::Leased(lease) = *slot
                && lease.until <= now
            {
                *slot =
                    if lease.sent || lease.finishing { lease.ended(lease.until, lease.finishing) } else { Slot::Free };
            }
        }
    }

    /// The slot that this claim took before, while its answer may be repeated (Store rule 3).
    pub(crate) fn repeated(&self, id: &ClaimId, now: Time, window: Duration) -> Option<&Slot> {
        let id = id.as_bytes();
        self.slots().iter().find(|slot| match slot {
            Slot::Free => false,
            Slot::Leased(lease) => lease.id == *id && now < lease.claimed.after(window),
            Slot::Ended(ended) => ended.id == *id && now < ended.claimed.after(window),
        })
    }

    /// Takes a free slot (Store rule 1): with a lease, or for good when there is nothing to download.
    pub(crate) fn take(&mut self, id: &ClaimId, now: Time, lease: Option<(Token, Time)>) -> Option<Slot> {
        let id = *id.as_bytes();
        let slot = self.slots_mut().iter_mut().find(|slot| matches!(slot, Slot::Free))?;
        *slot = match lease {
            Some((token, until)) => {
                Slot::Leased(Running { id, token, claimed: now, until, sent: false, finishing: false })
            }
            None => Slot::Ended(Ended { id, token: NO_TOKEN, claimed: now, at: now, completed: true }),
        };
        Some(*slot)
    }

    /// The slot whose lease has this token. All slots are compared, in constant time each.
    pub(crate) fn by_token(&mut self, token: &LeaseToken) -> Option<&mut Slot> {
        let mut found = None;
        let is_same = |kept: &Token| bool::from(kept.ct_eq(token.as_bytes()));
        for slot in self.slots_mut() {
            let matches = match slot {
                Slot::Free => false,
                Slot::Leased(lease) => is_same(&lease.token),
                Slot::Ended(ended) => ended.token != NO_TOKEN && is_same(&ended.token),
            };
            if matches {
                found = Some(slot);
            }
        }
        found
    }

    /// Frees what ended early or still runs, and says how many slots that were.
    pub(crate) fn rearm(&mut self) -> usize {
        let mut freed = 0;
        for slot in self.slots_mut() {
            if matches!(slot, Slot::Leased(_) | Slot::Ended(Ended { completed: false, .. })) {
                *slot = Slot::Free;
                freed += 1;
            }
        }
        freed
    }
}

impl Running {
    pub(crate) fn ended(&self, at: Time, completed: bool) -> Slot {
        Slot::Ended(Ended { id: self.id, token: self.token, claimed: self.claimed, at, completed })
    }
}
