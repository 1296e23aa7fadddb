//! Faults that a test plans: which operation fails, how, and whether it is the only one.

use super::eio;
use crate::error::{Error, Result};

/// How an injected fault shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Eio,
    NoSpace,
    /// Half of a write reaches the cache before EIO; anything else just fails.
    Short,
}

/// Operations that are counted and may fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Read,
    Write,
    Allocate,
    Punch,
    SetLen,
    Barrier,
    /// All but reads.
    Change,
    /// What may meet a full host: growth and allocation, and punching, which needs room for the host's own lists.
    Room,
}

impl Class {
    fn covers(self, other: Class) -> bool {
        match self {
            Class::Change => other != Class::Read,
            Class::Room => matches!(other, Class::Allocate | Class::Punch),
            one => one == other,
        }
    }
}

/// After `count` operations of the class the next one fails, and with `lasting` all after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultPlan {
    pub class: Class,
    pub count: u64,
    pub fault: Fault,
    pub lasting: bool,
}

/// A plan on its way.
#[derive(Clone)]
pub(super) struct Armed {
    plan: FaultPlan,
    met: u64,
    failed: u64,
}

impl Armed {
    pub(super) fn new(plan: FaultPlan) -> Armed {
        Armed { plan, met: 0, failed: 0 }
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

    pub(super) fn meet(&mut self, class: Class) -> Result<()> {
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
