//! Polls the request queue briefly before a loop sleeps there.
//!
//! An idle processor halts, and waking it takes 25 us and more in a virtual machine: as long as
//! serving a small request. A program that makes one call after the other sends the next one sooner
//! than that, so polling finds it. Polling costs processor time that other threads may need. So it
//! yields at each iteration, stops when a yield took long, and then backs off for a while, as it
//! does after polls that found no request.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Source of requests that can be checked without blocking.
pub trait RequestQueue: Send + Sync {
    /// Returns whether a read would return at once.
    fn has_request(&self) -> bool;
}

/// The FUSE device; any descriptor of the connection will do.
impl RequestQueue for OwnedFd {
    fn has_request(&self) -> bool {
        // The end of the connection also counts as an event; errors are left to the read.
        poll(&mut [PollFd::new(self.as_fd(), PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }
}

/// Polling time: longer than most programs take between two calls, and than a wake-up takes.
const POLL_TIME: Duration = Duration::from_micros(50);

/// Yields that take less than this were short interruptions (an interrupt, a kernel thread, the
/// program that the reply woke); a thread that computes keeps the processor for its time slice of
/// some milliseconds.
const SLICE_TIME: Duration = Duration::from_micros(500);

/// Back-off after a yield took a time slice. It doubles if the processor is busy again soon after,
/// so that polling costs about one percent on a busy machine.
const BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_millis(400);

/// Maximum number of turns without polling after polls that found no request.
const MAX_SKIPS: u32 = 64;

/// When the next request arrived.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Arrival {
    /// A request was already queued.
    Queued,
    Polled,
    NoRequest,
}

/// Polling state shared by the loops of a connection. It affects timing only, so relaxed atomics
/// suffice.
pub(super) struct BusyPoll {
    began: Instant,
    /// End of the back-off, in microseconds after `began`.
    backoff_until: AtomicU64,
    /// Length of the last back-off, in microseconds.
    backoff: AtomicU64,
    /// Turns left without polling.
    skips: AtomicU32,
    /// Turns to skip after the next poll without a request.
    next: AtomicU32,
    /// With a single processor, polling would keep other programs from making a request.
    is_single_cpu: bool,
}

impl BusyPoll {
    pub(super) fn new() -> BusyPoll {
        BusyPoll {
            began: Instant::now(),
            backoff_until: AtomicU64::new(0),
            backoff: AtomicU64::new(0),
            skips: AtomicU32::new(0),
            next: AtomicU32::new(1),
            is_single_cpu: thread::available_parallelism().is_ok_and(|count| count.get() == 1),
        }
    }

    /// Polls for [`POLL_TIME`], or checks the queue once if polling is suspended.
    pub(super) fn poll(&self, queue: &dyn RequestQueue) -> Arrival {
        self.poll_with(queue, || self.began.elapsed(), thread::yield_now)
    }

    fn poll_with(&self, queue: &dyn RequestQueue, now: impl Fn() -> Duration, yield_now: impl Fn()) -> Arrival {
        if queue.has_request() {
            return Arrival::Queued;
        }
        let skips = self.skips.load(Relaxed);
        if skips > 0 {
            self.skips.store(skips - 1, Relaxed);
            return Arrival::NoRequest;
        }
        let mut last = now();
        if self.is_single_cpu || micros(last) < self.backoff_until.load(Relaxed) {
            return Arrival::NoRequest;
        }
        let until = last + POLL_TIME;
        while last < until {
            yield_now();
            let time = now();
            let found = queue.has_request();
            // If the clock stepped back, the duration is unknown and the end of the polling time
            // may be far away.
            let took = time.checked_sub(last);
            if took.is_none_or(|took| took >= SLICE_TIME) {
                if took.is_some() {
                    self.back_off(time);
                }
                return if found { Arrival::Polled } else { Arrival::NoRequest };
            }
            if found {
                self.next.store(1, Relaxed);
                return Arrival::Polled;
            }
            last = time;
        }
        let next = self.next.load(Relaxed);
        self.skips.store(next, Relaxed);
        self.next.store((next * 2).min(MAX_SKIPS), Relaxed);
        Arrival::NoRequest
    }

    /// Suspends polling after a yield took a time slice.
    fn back_off(&self, now: Duration) {
        let (until, last) = (self.backoff_until.load(Relaxed), self.backoff.load(Relaxed));
        let again = micros(now).saturating_sub(until) < last;
        let backoff = if again { (last * 2).min(micros(MAX_BACKOFF)) } else { micros(BACKOFF) };
        self.backoff.store(backoff, Relaxed);
        self.backoff_until.store(micros(now) + backoff, Relaxed);
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

    /// Queue that gets a request at the check of this number; checks are counted.
    struct Script {
        checks: AtomicUsize,
        arrives: usize,
    }

    impl RequestQueue for Script {
        fn has_request(&self) -> bool {
            self.checks.fetch_add(1, Relaxed) + 1 >= self.arrives
        }
    }

    /// One loop with a simulated clock: each yield takes the next of these times, or 1 us.
    struct FakeLoop {
        busy_poll: BusyPoll,
        clock: Cell<Duration>,
        taken: RefCell<Vec<Duration>>,
    }

    impl FakeLoop {
        fn new() -> FakeLoop {
            let busy_poll = BusyPoll { is_single_cpu: false, ..BusyPoll::new() };
            FakeLoop { busy_poll, clock: Cell::new(us(0)), taken: RefCell::default() }
        }

        /// Returns the result of a poll whose request arrives at the given check, and the number of
        /// checks.
        fn poll(&self, arrives: usize) -> (Arrival, usize) {
            let queue = Script { checks: AtomicUsize::new(0), arrives };
            let yield_now = || {
                let took = self.taken.borrow_mut().pop().unwrap_or(us(1));
                self.clock.set(self.clock.get() + took);
            };
            let found = self.busy_poll.poll_with(&queue, || self.clock.get(), yield_now);
            (found, queue.checks.into_inner())
        }

        fn takes_slice(&self, later: Duration) {
            self.clock.set(self.clock.get() + later);
            self.taken.borrow_mut().push(SLICE_TIME);
            assert_eq!(self.poll(usize::MAX).0, Arrival::NoRequest);
        }

        /// Returns whether a poll goes on after the first check.
        fn polls(&self) -> bool {
            self.poll(2) == (Arrival::Polled, 2)
        }
    }

    #[test]
    fn a_request_within_the_polling_time_is_found() {
        let fake = FakeLoop::new();
        assert_eq!(fake.poll(1), (Arrival::Queued, 1));
        assert_eq!(fake.poll(10), (Arrival::Polled, 10));
        assert_eq!(fake.poll(usize::MAX), (Arrival::NoRequest, 51));
    }

    #[test]
    fn polling_backs_off_without_requests_and_resumes_with_them() {
        let fake = FakeLoop::new();
        let lingered: usize = (0..1000).filter(|_| fake.poll(usize::MAX).1 > 1).count();
        assert!((1000 / 65..30).contains(&lingered), "{lingered}");
        while !fake.polls() {}
        assert!((0..100).all(|_| fake.polls()));
        assert_eq!(fake.poll(usize::MAX).1, 51);
        assert!(!fake.polls() && fake.polls());
    }

    #[test]
    fn short_interruptions_do_not_end_polling() {
        let fake = FakeLoop::new();
        *fake.taken.borrow_mut() = vec![us(30); 20];
        assert_eq!(fake.poll(2), (Arrival::Polled, 2));
        *fake.taken.borrow_mut() = vec![SLICE_TIME - us(1)];
        assert_eq!(fake.poll(2), (Arrival::Polled, 2));
        assert!(fake.polls());
    }

    #[test]
    fn polling_pauses_while_the_processor_is_busy() {
        let fake = FakeLoop::new();
        let tick = BACKOFF / 10;
        // The back-off doubles each time that the processor is busy again soon.
        let mut backoff = BACKOFF;
        for _ in 0..6 {
            fake.takes_slice(us(0));
            let from = fake.clock.get();
            while !fake.polls() {
                assert_eq!(fake.poll(usize::MAX), (Arrival::NoRequest, 1));
                fake.clock.set(fake.clock.get() + tick);
            }
            let off = fake.clock.get() - from;
            assert!(off > backoff - tick && off <= backoff + tick, "{off:?} {backoff:?}");
            backoff = (backoff * 2).min(MAX_BACKOFF);
        }
        // After a quiet period it is the short one again.
        fake.takes_slice(MAX_BACKOFF);
        fake.clock.set(fake.clock.get() + BACKOFF);
        assert!(fake.polls());
    }

    #[test]
    fn a_clock_step_back_ends_only_the_current_poll() {
        let fake = FakeLoop::new();
        for (arrives, found) in [(2, Arrival::Polled), (3, Arrival::NoRequest)] {
            fake.clock.set(us(1_000_000));
            let queue = Script { checks: AtomicUsize::new(0), arrives };
            let yield_now = || fake.clock.set(us(10));
            assert_eq!(fake.busy_poll.poll_with(&queue, || fake.clock.get(), yield_now), found);
            assert_eq!(queue.checks.into_inner(), 2);
        }
        assert!(fake.polls());
    }

    #[test]
    fn a_single_processor_never_polls() {
        let mut fake = FakeLoop::new();
        fake.busy_poll.is_single_cpu = true;
        assert_eq!(fake.poll(2), (Arrival::NoRequest, 1));
        assert_eq!(fake.poll(1), (Arrival::Queued, 1));
    }
}
