//! Faults that a test plans: which operation fails, how, and whether it is the only one.

use super::{SimulatedStorage, eio};
use crate::error::{Error, Result};

/// How an injected fault shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Eio,
    NoSpace,
    /// Half of a write reaches the cache before EIO; anything else just fails.
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
    /// All but reads.
    Change,
    /// What may meet a full host: growth and allocation, and punching, which needs space for the host's own lists.
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

/// After `count` operations of the class the next one fails, and with `lasting` all after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FaultPlan {
    pub(crate) class: FaultClass,
    pub(crate) count: u64,
    pub(crate) fault: Fault,
    pub(crate) lasting: bool,
}

impl SimulatedStorage {
    /// After `count` more writes, allocations, punches, changes of length and barriers, the next one fails, once.
    pub(crate) fn fail_after(&self, count: u64, fault: Fault) {
        self.inject(Some(FaultPlan { class: FaultClass::Change, count, fault, lasting: false }));
    }

    /// Operations fail as planned from here on; None ends that. A failing barrier acts as in [`SimulatedStorage::fail_next_barrier`], of
    /// others nothing happens but what [`Fault::Short`] says.
    pub(crate) fn inject(&self, plan: Option<FaultPlan>) {
        self.state.lock().faults = plan.map(ActiveFault::new);
    }

    /// Looks on without meeting planned faults or counting towards them.
    pub(crate) fn without_faults<R>(&self, look: impl FnOnce() -> R) -> R {
        let faults = self.state.lock().faults.take();
        let seen = look();
        self.state.lock().faults = faults;
        seen
    }

    /// Operations that failed as planned since the last `inject`.
    pub(crate) fn injected(&self) -> u64 {
        self.state.lock().faults.as_ref().map_or(0, ActiveFault::failed)
    }
}

/// A plan on its way.
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
