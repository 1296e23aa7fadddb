//! Every interleaving of claims and barriers, by loom. Compiles the group commit once more, against
//! loom's locks.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use super::super::env::StoreClock;
use super::super::share::{Share, StoreTiming};
use super::super::simulated::ManualClock;
use super::super::{NewShare, Periods, Result, StoreError};
use super::conformance::{auth, id, large, small};
use barrier_group::{BarrierGroup, BarrierTicket, Syncable};
use sync::Mutex;

#[allow(clippy::duplicate_mod, dead_code, unreachable_pub)]
#[path = "../barrier_group.rs"]
mod barrier_group;

/// Loom's locks under the names of parking_lot.
mod sync {
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
}

/// Explores all interleavings with at most `preemptions` preemptions.
fn check(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

/// Number of taken slots in memory, and in the durable state.
struct Medium {
    /// Number of taken slots that were written, and that are durable.
    written: AtomicUsize,
    durable: AtomicUsize,
    fails: bool,
}

impl Syncable for Medium {
    fn sync(&self) -> std::io::Result<()> {
        if self.fails {
            return Err(std::io::Error::other("the medium fails"));
        }
        let written = self.written.load(Ordering::SeqCst);
        self.durable.store(written, Ordering::SeqCst);
        Ok(())
    }
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits as a runtime would: nothing but the waker brings it on.
fn wait(ticket: Option<BarrierTicket>) -> Result<()> {
    let Some(mut ticket) = ticket else { return Ok(()) };
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match ticket.poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(outcome) => return outcome,
            Poll::Pending => thread::park(),
        }
    }
}

/// Claims of `claimants` threads on a share that allows `allowed`, with the thread that makes
/// barriers.
fn race(preemptions: usize, claimants: u64, share: NewShare, fails: bool) {
    let allowed = usize::from(share.claims);
    check(preemptions, move || {
        let clock = StoreClock::fresh(Arc::new(ManualClock::new()));
        let timing = Arc::new(StoreTiming { clock, periods: Periods::default() });
        let cell = Arc::new(Mutex::new((Share::new(&share, timing.clock.now()), 0u64)));
        let medium = Arc::new(Medium { written: AtomicUsize::new(0), durable: AtomicUsize::new(0), fails });
        let group = BarrierGroup::new();
        let barriers = {
            let group = Arc::clone(&group);
            thread::spawn(move || group.run(None))
        };
        let claims: Vec<_> = (0..claimants)
            .map(|number| {
                let (cell, medium, group, timing) =
                    (Arc::clone(&cell), Arc::clone(&medium), Arc::clone(&group), Arc::clone(&timing));
                thread::spawn(move || {
                    // As a shard does it: the step and its record under one lock, the wait outside.
                    let (step, ticket, taken) = {
                        let mut locked = cell.lock();
                        let (share, noted) = &mut *locked;
                        let fresh = || Ok([number as u8 + 1; 16]);
                        let step = share.claim(&auth(1).verifier(), &id(number), &timing, fresh);
                        let taken = usize::from(share.claims.allowed - share.claims.left());
                        if step.is_ok() {
                            medium.written.store(taken, Ordering::SeqCst);
                            let target: Arc<dyn Syncable> = medium.clone();
                            *noted = group.note(&target, *noted);
                        }
                        (step, group.ticket(*noted), taken)
                    };
                    let told = wait(ticket).and(step.map(|_| ()));
                    if told.is_ok() {
                        // Store rule 2: the reply goes out, so the slot is durable.
                        assert!(medium.durable.load(Ordering::SeqCst) >= taken);
                    }
                    told
                })
            })
            .collect();
        let told: Vec<Result<()>> = claims.into_iter().map(|claim| claim.join().unwrap()).collect();
        group.stop();
        barriers.join().unwrap();
        let won = told.iter().filter(|told| told.is_ok()).count();
        if fails {
            assert!(told.iter().all(|told| matches!(told, Err(StoreError::Unavailable(_)))));
        } else {
            assert_eq!(won, allowed.min(claimants as usize));
        }
    });
}

#[test]
fn of_two_claims_one_wins_and_is_told_after_its_barrier() {
    race(3, 2, small(1), false);
}

#[test]
fn of_three_claims_on_a_payload_two_win_when_two_are_allowed() {
    race(1, 3, NewShare { claims: 2, ..large(1) }, false);
}

#[test]
fn a_barrier_that_fails_is_told_to_everybody() {
    race(3, 2, small(1), true);
}

#[test]
fn a_barrier_of_another_thread_tells_nobody_too_soon() {
    check(3, || {
        let medium = Arc::new(Medium { written: AtomicUsize::new(0), durable: AtomicUsize::new(0), fails: false });
        let group = BarrierGroup::new();
        let barriers = {
            let group = Arc::clone(&group);
            thread::spawn(move || group.run(Some(Duration::from_millis(50))))
        };
        let sweeper = {
            let group = Arc::clone(&group);
            thread::spawn(move || group.barrier())
        };
        medium.written.store(1, Ordering::SeqCst);
        let target: Arc<dyn Syncable> = medium.clone();
        let noted = group.note(&target, 0);
        wait(group.ticket(noted)).unwrap();
        assert_eq!(medium.durable.load(Ordering::SeqCst), 1);
        sweeper.join().unwrap().unwrap();
        group.stop();
        barriers.join().unwrap();
    });
}
