//! Planned faults: which operation fails, how, and whether later ones fail too; and the space
//! accounting of a copy-on-write host.

use super::super::memory::HOST_BLOCK;
use super::{SimulatedStorage, State, eio};
use crate::error::{Error, Result};
use crate::storage::BALLAST;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Eio,
    NoSpace,
    /// Half of a write reaches the cache before EIO; other operations only fail.
    Short,
}

/// Operations that are counted and may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FaultClass {
    Read,
    Write,
    Allocate,
    Punch,
    SetLen,
    Barrier,
    /// All operations except reads.
    Change,
    /// Operations that a full host may refuse: growth, allocation, and punching, which needs space
    /// for the host's extent lists.
    Room,
}

impl FaultClass {
    fn covers(self, other: FaultClass) -> bool {
        match self {
            FaultClass::Change => other != FaultClass::Read,
            FaultClass::Room => matches!(other, FaultClass::Allocate | FaultClass::Punch),
            one => one == other,
        }
    }
}

/// Fails the next operation of `class` after `count` ones, and with `lasting` all later ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FaultPlan {
    pub(crate) class: FaultClass,
    pub(crate) count: u64,
    pub(crate) fault: Fault,
    pub(crate) lasting: bool,
}

impl SimulatedStorage {
    /// Fails once, after `count` more writes, allocations, punches, length changes and barriers.
    pub(crate) fn fail_after(&self, count: u64, fault: Fault) {
        self.inject(Some(FaultPlan { class: FaultClass::Change, count, fault, lasting: false }));
    }

    /// Sets the fault plan; `None` ends it. A failing barrier acts as in
    /// [`SimulatedStorage::fail_next_barrier`]; other failing operations have no effect except
    /// [`Fault::Short`].
    pub(crate) fn inject(&self, plan: Option<FaultPlan>) {
        self.state.lock().faults = plan.map(ActiveFault::new);
    }

    /// Runs `look` without faults and without counting its operations.
    pub(crate) fn without_faults<R>(&self, look: impl FnOnce() -> R) -> R {
        let faults = self.state.lock().faults.take();
        let seen = look();
        self.state.lock().faults = faults;
        seen
    }

    /// Returns the number of operations that failed as planned since the last `inject`.
    pub(crate) fn injected(&self) -> u64 {
        self.state.lock().faults.as_ref().map_or(0, ActiveFault::failed)
    }
}

#[derive(Clone)]
pub(super) struct ActiveFault {
    plan: FaultPlan,
    met: u64,
    failed: u64,
}

impl ActiveFault {
    pub(super) fn new(plan: FaultPlan) -> ActiveFault {
        ActiveFault { plan, met: 0, failed: 0 }
    }

    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    pub(super) fn is_full_host(&self) -> bool {
        self.plan.fault == Fault::NoSpace
    }

    pub(super) fn is_short(&self) -> bool {
        self.plan.fault == Fault::Short
    }

    pub(super) fn meet(&mut self, class: FaultClass) -> Result<()> {
        if !self.plan.class.covers(class) {
            return Ok(());
        }
        let turn = self.met;
        self.met += 1;
        if turn < self.plan.count || (turn > self.plan.count && !self.plan.lasting) {
            return Ok(());
        }
        self.failed += 1;
        Err(match self.plan.fault {
            Fault::NoSpace => Error::NoSpace(format!("simulated full host: {class:?}")),
            Fault::Eio | Fault::Short => eio(&format!("error: {class:?}")),
        })
    }
}

/// Space of a copy-on-write host (btrfs, ZFS) in bytes: overwriting needs new space until the next
/// barrier (HOST-6).
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CowSpace {
    free: u64,
    /// Bytes replaced or freed since the last barrier.
    pinned: u64,
    ballast: u64,
    keeps: bool,
}

impl CowSpace {
    fn take(&mut self, bytes: u64) -> Result<()> {
        self.free = self.free.checked_sub(bytes).ok_or_else(|| {
            Error::NoSpace(format!("simulated host without room to overwrite: free={} needed={bytes}", self.free))
        })?;
        Ok(())
    }

    fn fill_ballast(&mut self) -> Result<()> {
        self.take(BALLAST - self.ballast)?;
        self.ballast = BALLAST;
        Ok(())
    }
}

impl State {
    /// Sets the free bytes, or turns copy-on-write off.
    pub(super) fn set_room(&mut self, free: Option<u64>) {
        self.room = free.map(|free| CowSpace { free, ..self.room.unwrap_or_default() });
    }

    /// Takes the space for a write before any of it is applied.
    pub(super) fn take_for_write(&mut self, offset: u64, length: u64) -> Result<()> {
        let Some(room) = &mut self.room else { return Ok(()) };
        let blocks = (offset + length).div_ceil(HOST_BLOCK) - offset / HOST_BLOCK;
        room.take(blocks * HOST_BLOCK)?;
        let holes = self.cache.holes(offset, length)?;
        room.pinned += blocks.checked_sub(holes).ok_or_else(|| eio("count of blocks"))? * HOST_BLOCK;
        Ok(())
    }

    pub(super) fn take_for_allocation(&mut self, offset: u64, length: u64) -> Result<()> {
        let grows = offset + length > self.cache.len();
        let holes = self.cache.holes(offset, length)?;
        let Some(room) = &mut self.room else { return Ok(()) };
        let before = *room;
        let taken = if room.keeps && grows { room.fill_ballast() } else { Ok(()) };
        taken.and_then(|()| room.take(holes * HOST_BLOCK)).inspect_err(|_| *room = before)
    }

    pub(super) fn give_back(&mut self, allocated_before: u64) {
        let after = self.cache.allocated();
        if let Some(room) = &mut self.room {
            room.pinned += allocated_before.saturating_sub(after);
        }
    }

    pub(super) fn unpin(&mut self) {
        if let Some(room) = &mut self.room {
            room.free += std::mem::take(&mut room.pinned);
        }
    }

    pub(super) fn keep_ballast(&mut self) {
        if let Some(room) = &mut self.room {
            room.keeps = true;
            // Without space there is no ballast.
            let _ = room.fill_ballast();
        }
    }

    pub(super) fn cut_ballast(&mut self) -> bool {
        let Some(room) = &mut self.room else { return false };
        let cut = std::mem::take(&mut room.ballast);
        room.free += cut;
        cut > 0
    }
}
