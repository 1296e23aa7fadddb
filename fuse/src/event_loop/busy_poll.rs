//! Looks at the queue for a moment instead of sleeping there at once.
//!
//! A processor without work halts, and waking it takes 25 us and more in a virtual machine: as long as answering a small
//! request. A program that makes one call after the other makes the next one sooner than that, so who looks for it finds it.
//! Looking costs the processor's time, which is somebody else's when there is other work: so it gives way at each look, ends
//! when giving way took long, and is left off for a while then, as after moments without a request.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use super::queue::Queue;

/// Longer than most programs take between two calls, and than it takes to wake.
const MOMENT: Duration = Duration::from_micros(50);

/// Who only runs for a moment (an interrupt, a thread of the kernel, the program that the reply woke) gives the processor back
/// sooner than this; who computes keeps it for its slice of some milliseconds.
const SLICE: Duration = Duration::from_micros(500);

/// How long nobody looks after somebody took a slice. It doubles when the processor is found wanted again soon after, so that looking costs
/// about a hundredth of the time on a busy machine.
const CROWDED: Duration = Duration::from_millis(100);
const LONGEST_CROWDED: Duration = Duration::from_millis(400);

/// Of so many turns in a row at most that find nothing, one looks.
const RARELY: u32 = 64;

/// When the next request came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    /// It was waiting already.
    AtOnce,
    Later,
    Nothing,
}

/// What the loops of a connection have found so far. It decides about time only, so nothing depends on who sees which value.
pub(super) struct Linger {
    began: Instant,
    /// Microseconds after `began`.
    crowded_until: AtomicU64,
    /// How long the last crowded time was, in microseconds.
    crowded: AtomicU64,
    /// Turns that do not look.
    left_off: AtomicU32,
    /// Turns to leave off after the next moment without a request.
    next: AtomicU32,
    /// Alone on one processor, looking would keep the others from making a request.
    alone: bool,
}

impl Linger {
    pub(super) fn new() -> Linger {
        Linger {
            began: Instant::now(),
            crowded_until: AtomicU64::new(0),
            crowded: AtomicU64::new(0),
            left_off: AtomicU32::new(0),
            next: AtomicU32::new(1),
            alone: thread::available_parallelism().is_ok_and(|count| count.get() == 1),
        }
    }

    /// Looks for a moment, or once only.
    pub(super) fn look(&self, queue: &dyn Queue) -> Arrival {
        self.look_by(queue, || self.began.elapsed(), thread::yield_now)
    }

    fn look_by(&self, queue: &dyn Queue, now: impl Fn() -> Duration, give_way: impl Fn()) -> Arrival {
        if queue.waiting() {
            return Arrival::AtOnce;
        }
        let left_off = self.left_off.load(Relaxed);
        if left_off > 0 {
            self.left_off.store(left_off - 1, Relaxed);
            return Arrival::Nothing;
        }
        let mut last = now();
        if self.alone || micros(last) < self.crowded_until.load(Relaxed) {
            return Arrival::Nothing;
        }
        let until = last + MOMENT;
        while last < until {
            give_way();
            let time = now();
            let found = queue.waiting();
            // A clock that steps back does not tell how long it took, and may be long in coming to the end of the moment.
            let took = time.checked_sub(last);
            if took.is_none_or(|took| took >= SLICE) {
                if took.is_some() {
                    self.leave_off(time);
                }
                return if found { Arrival::Later } else { Arrival::Nothing };
            }
            if found {
                self.next.store(1, Relaxed);
                return Arrival::Later;
            }
            last = time;
        }
        let next = self.next.load(Relaxed);
        self.left_off.store(next, Relaxed);
        self.next.store((next * 2).min(RARELY), Relaxed);
        Arrival::Nothing
    }

    /// Somebody took a slice.
    fn leave_off(&self, now: Duration) {
        let (until, last) = (self.crowded_until.load(Relaxed), self.crowded.load(Relaxed));
        let again = micros(now).saturating_sub(until) < last;
        let crowded = if again { (last * 2).min(micros(LONGEST_CROWDED)) } else { micros(CROWDED) };
        self.crowded.store(crowded, Relaxed);
        self.crowded_until.store(micros(now) + crowded, Relaxed);
    }
}

fn micros(time: Duration) -> u64 {
    time.as_micros() as u64
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::sync::atomic::AtomicUsize;

    use super::*;

    const fn us(count: u64) -> Duration {
        Duration::from_micros(count)
    }

    /// A queue that gets a request at the look of this number; looks are counted.
    struct Script {
        looks: AtomicUsize,
        arrives: usize,
    }

    impl Queue for Script {
        fn waiting(&self) -> bool {
            self.looks.fetch_add(1, Relaxed) + 1 >= self.arrives
        }
    }

    /// One loop with a clock of its own: each giving way takes the next of these times, or 1 us.
    struct Played {
        linger: Linger,
        clock: Cell<Duration>,
        taken: RefCell<Vec<Duration>>,
    }

    impl Played {
        fn new() -> Played {
            let linger = Linger { alone: false, ..Linger::new() };
            Played { linger, clock: Cell::new(us(0)), taken: RefCell::default() }
        }

        /// What a look finds whose request comes at its `arrives`th glance, and the glances that it took.
        fn look(&self, arrives: usize) -> (Arrival, usize) {
            let queue = Script { looks: AtomicUsize::new(0), arrives };
            let give_way = || {
                let took = self.taken.borrow_mut().pop().unwrap_or(us(1));
                self.clock.set(self.clock.get() + took);
            };
            let found = self.linger.look_by(&queue, || self.clock.get(), give_way);
            (found, queue.looks.into_inner())
        }

        fn takes_slice(&self, later: Duration) {
            self.clock.set(self.clock.get() + later);
            self.taken.borrow_mut().push(SLICE);
            assert_eq!(self.look(usize::MAX).0, Arrival::Nothing);
        }

        /// Whether a look goes on after the first glance.
        fn lingers(&self) -> bool {
            self.look(2) == (Arrival::Later, 2)
        }
    }

    #[test]
    fn a_request_of_the_next_moment_is_found_and_a_later_one_left_to_the_read() {
        let played = Played::new();
        assert_eq!(played.look(1), (Arrival::AtOnce, 1));
        assert_eq!(played.look(10), (Arrival::Later, 10));
        assert_eq!(played.look(usize::MAX), (Arrival::Nothing, 51));
    }

    #[test]
    fn looks_become_rare_while_they_find_nothing_and_common_again_when_they_do() {
        let played = Played::new();
        let lingered: usize = (0..1000).filter(|_| played.look(usize::MAX).1 > 1).count();
        assert!((1000 / 65..30).contains(&lingered), "{lingered}");
        while !played.lingers() {}
        assert!((0..100).all(|_| played.lingers()));
        assert_eq!(played.look(usize::MAX).1, 51);
        assert!(!played.lingers() && played.lingers());
    }

    #[test]
    fn who_only_runs_for_a_moment_does_not_end_it() {
        let played = Played::new();
        *played.taken.borrow_mut() = vec![us(30); 20];
        assert_eq!(played.look(2), (Arrival::Later, 2));
        *played.taken.borrow_mut() = vec![SLICE - us(1)];
        assert_eq!(played.look(2), (Arrival::Later, 2));
        assert!(played.lingers());
    }

    #[test]
    fn nobody_looks_for_a_while_when_others_want_the_processor() {
        let played = Played::new();
        let tick = CROWDED / 10;
        // Left off for twice as long each time that it is found wanted again soon.
        let mut crowded = CROWDED;
        for _ in 0..6 {
            played.takes_slice(us(0));
            let from = played.clock.get();
            while !played.lingers() {
                assert_eq!(played.look(usize::MAX), (Arrival::Nothing, 1));
                played.clock.set(played.clock.get() + tick);
            }
            let off = played.clock.get() - from;
            assert!(off > crowded - tick && off <= crowded + tick, "{off:?} {crowded:?}");
            crowded = (crowded * 2).min(LONGEST_CROWDED);
        }
        // After a quiet time it is the short one again.
        played.takes_slice(LONGEST_CROWDED);
        played.clock.set(played.clock.get() + CROWDED);
        assert!(played.lingers());
    }

    #[test]
    fn a_clock_that_steps_back_ends_the_look_and_nothing_else() {
        let played = Played::new();
        for (arrives, found) in [(2, Arrival::Later), (3, Arrival::Nothing)] {
            played.clock.set(us(1_000_000));
            let queue = Script { looks: AtomicUsize::new(0), arrives };
            let give_way = || played.clock.set(us(10));
            assert_eq!(played.linger.look_by(&queue, || played.clock.get(), give_way), found);
            assert_eq!(queue.looks.into_inner(), 2);
        }
        assert!(played.lingers());
    }

    #[test]
    fn on_a_single_processor_nobody_lingers() {
        let mut played = Played::new();
        played.linger.alone = true;
        assert_eq!(played.look(2), (Arrival::Nothing, 1));
        assert_eq!(played.look(1), (Arrival::AtOnce, 1));
    }
}
