//! Time of retries: that of the host, or a simulated one in tests.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Longest real pause: outages of tests are counted in attempts.
const MAX_REAL_PAUSE: Duration = if cfg!(test) { Duration::from_millis(5) } else { Duration::MAX };

pub(crate) trait RetryClock: Send + Sync {
    fn now(&self) -> Instant;

    /// Waits for `pause`, or until `is_over`, which changes before a [`RetryClock::wake`].
    fn sleep(&self, pause: Duration, is_over: &dyn Fn() -> bool);

    fn wake(&self) {}
}

#[derive(Default)]
pub(crate) struct HostClock {
    lock: Mutex<()>,
    woken: Condvar,
}

impl RetryClock for HostClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep(&self, pause: Duration, is_over: &dyn Fn() -> bool) {
        self.woken.wait_while_for(&mut self.lock.lock(), |()| !is_over(), pause.min(MAX_REAL_PAUSE));
    }

    fn wake(&self) {
        // A sleeper that has not begun to wait sees the change.
        drop(self.lock.lock());
        self.woken.notify_all();
    }
}

/// Clock that a sleep advances.
#[cfg(test)]
pub(crate) struct SimulatedClock(Mutex<Instant>);

#[cfg(test)]
impl SimulatedClock {
    pub(crate) fn new() -> SimulatedClock {
        SimulatedClock(Mutex::new(Instant::now()))
    }
}

#[cfg(test)]
impl RetryClock for SimulatedClock {
    fn now(&self) -> Instant {
        *self.0.lock()
    }

    fn sleep(&self, pause: Duration, _is_over: &dyn Fn() -> bool) {
        *self.0.lock() += pause;
    }
}
