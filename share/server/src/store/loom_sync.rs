//! Loom's locks under the names of parking_lot, for model checking.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

pub(crate) struct Mutex<T>(loom::sync::Mutex<T>);

/// None only while a condition is waited for.
pub(crate) struct Guard<'a, T>(Option<loom::sync::MutexGuard<'a, T>>);

pub(crate) struct Condvar(loom::sync::Condvar);

pub(crate) struct TimedOut;

impl TimedOut {
    pub(crate) fn timed_out(&self) -> bool {
        false
    }
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Mutex<T> {
        Mutex(loom::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> Guard<'_, T> {
        Guard(Some(self.0.lock().unwrap()))
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0.as_ref().unwrap()
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0.as_mut().unwrap()
    }
}

impl Condvar {
    pub(crate) fn new() -> Condvar {
        Condvar(loom::sync::Condvar::new())
    }

    pub(crate) fn wait<T>(&self, guard: &mut Guard<'_, T>) {
        guard.0 = Some(self.0.wait(guard.0.take().unwrap()).unwrap());
    }

    /// Time does not go by in a model.
    pub(crate) fn wait_for<T>(&self, guard: &mut Guard<'_, T>, _: Duration) -> TimedOut {
        self.wait(guard);
        TimedOut
    }

    pub(crate) fn notify_one(&self) {
        self.0.notify_one();
    }

    pub(crate) fn notify_all(&self) {
        self.0.notify_all();
    }
}
