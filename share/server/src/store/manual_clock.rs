//! A clock that tests turn.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::env::Clock;
use super::error::WallTime;

pub(crate) struct ManualClock {
    steady: AtomicU64,
    wall: AtomicU64,
    boot: AtomicU64,
}

impl ManualClock {
    pub(crate) fn new() -> ManualClock {
        ManualClock { steady: AtomicU64::new(5_000), wall: AtomicU64::new(1_700_000_000_000), boot: AtomicU64::new(1) }
    }

    /// Time goes by.
    pub(crate) fn pass(&self, period: Duration) {
        self.steady.fetch_add(period.as_millis() as u64, Ordering::SeqCst);
        self.wall.fetch_add(period.as_millis() as u64, Ordering::SeqCst);
    }

    /// Sets the wall clock.
    #[cfg(test)]
    pub(crate) fn step(&self, milliseconds: i64) {
        self.wall.fetch_add(milliseconds as u64, Ordering::SeqCst);
    }

    /// Reboots the machine: steady time restarts, and the wall clock advances by `away`.
    #[cfg(test)]
    pub(crate) fn reboot(&self, away: Duration) {
        self.steady.store(1_000, Ordering::SeqCst);
        self.wall.fetch_add(away.as_millis() as u64, Ordering::SeqCst);
        self.boot.fetch_add(1, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn steady(&self) -> u64 {
        self.steady.load(Ordering::SeqCst)
    }

    fn wall(&self) -> WallTime {
        WallTime(self.wall.load(Ordering::SeqCst))
    }

    fn boot(&self) -> String {
        self.boot.load(Ordering::SeqCst).to_string()
    }
}
