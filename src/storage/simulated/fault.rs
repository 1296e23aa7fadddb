//! Planned faults: which operation fails, how, and whether later ones fail too.

use super::{SimulatedStorage, eio};
use crate::error::{Error, Result};

/// Effect of an injected fault.
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

/// Fault plan with its counters.
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
