//! The claim cell: the slots of one share and the steps that each of them can take.

use std::time::Duration;

use lockbox_share_protocol::message::MAX_CLAIMS;
use lockbox_share_protocol::token::{ClaimId, LeaseToken};
use subtle::ConstantTimeEq;

use super::env::StoreTime;

/// A lease token as it is kept. Zero stands for none.
pub(crate) type Token = [u8; LeaseToken::LENGTH];
const NO_TOKEN: Token = [0; LeaseToken::LENGTH];

/// One claim that a share allows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ClaimSlot {
    Free,
    Leased(ActiveLease),
    Ended(EndedClaim),
}

/// A lease that runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ActiveLease {
    pub id: [u8; ClaimId::LENGTH],
    pub token: Token,
    pub claimed: StoreTime,
    pub until: StoreTime,
    /// A byte of the payload went out (Store rule 4).
    pub sent: bool,
    /// The last byte went out: the end of the lease is its completion.
    pub finishing: bool,
}

/// A claim that is over.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct EndedClaim {
    pub id: [u8; ClaimId::LENGTH],
    /// Zero when there was no payload to download.
    pub token: Token,
    pub claimed: StoreTime,
    pub at: StoreTime,
    pub completed: bool,
}

/// All slots of a share; the first `allowed` of them count.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClaimSlots {
    pub(crate) slots: [ClaimSlot; MAX_CLAIMS as usize],
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

    pub(crate) fn allowed(&self) -> u8 {
        self.allowed
    }

    pub(crate) fn left(&self) -> u8 {
        self.slots().iter().filter(|slot| matches!(slot, ClaimSlot::Free)).count() as u8
    }

    /// Ends overdue leases (Store rule 4). Depends on `now` alone, so that the result need not be
    /// stored.
    pub(crate) fn end_overdue(&mut self, now: StoreTime) {
        for slot in self.slots_mut() {
            if let ClaimSlot::Leased(lease) = *slot
                && lease.until <= now
            {
                *slot = if lease.sent || lease.finishing {
                    lease.ended(lease.until, lease.finishing)
                } else {
                    ClaimSlot::Free
                };
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

    /// Takes a free slot (Store rule 1): with a lease, or for good when there is nothing to
    /// download.
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
