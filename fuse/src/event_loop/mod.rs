//! Keeps one event loop at the kernel's queue while requests are short, and lets others join when they are not.
//!
//! The kernel wakes the loop that has waited longest, so two loops at the queue take turns: each request finds a thread
//! that slept, on the other processor. One loop alone created twice as many small files a second here. But one loop alone
//! would let everybody wait for an fsync. So a loop whose request is answered stays away while another one waits at the
//! queue, and comes back when that one gets something long to do or finds request after request waiting.
//!
//! # Rules
//! 1  A loop stays away only after its reply was sent, and holds no lock then.
//! 2  Before long work, a loop that leaves the queue empty of loops calls another one.
//! 3  Nobody stays away for longer than [`PARK_TIME`] without being called, so work that turned out long without being announced
//!    holds others up for a moment only, and the end of the connection is noticed.
//! 4  While long work is under way, every request may have to wait for it (a commit holds the writers' lock for a while), so a
//!    loop that takes one then calls another, as if its own were long.
//! 5  A loop that goes back to the queue looks at it for a moment before it sleeps there ([`linger`]): only while that finds
//!    requests, and only while nobody else wants the processor.
//!
//! From 1 and 2 follows that no call is lost: who stays away and who calls decide under one lock, a call is a count and not
//! only a signal, and whoever comes back takes one call at most, also when its time is up just then.

mod busy_poll;
mod queue;

use std::cell::Cell;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use self::busy_poll::{Arrival, BusyPoll};
pub use self::queue::RequestQueue;

/// How long a loop stays away at most: an unmount waits for it, and 50 wake-ups a second cost nothing under load.
const PARK_TIME: Duration = Duration::from_millis(20);

/// So many waiting requests in a row make a second loop worth waking, which costs about as much as they do.
const BUSY_STREAK: u32 = 4;

/// Requests of at least this many bytes count as long: sealing or opening them takes more than waking a thread.
pub const LONG_BYTES: usize = 64 << 10;

/// The event loops of one connection.
pub struct LoopScheduler {
    queue: Box<dyn RequestQueue>,
    busy_poll: BusyPoll,
    state: Mutex<LoopCounts>,
    call: Condvar,
}

#[derive(Default)]
struct LoopCounts {
    /// Loops that are at work.
    working: usize,
    /// Loops that stay away.
    parked: usize,
    /// Of these, how many have been called and are not back yet.
    called: usize,
    /// Requests under way that were announced as long.
    long: usize,
    loops: usize,
}

impl LoopCounts {
    /// Loops at the queue, or on their way there. One that has not started or has ended counts as if it were: others then stay away,
    /// for [`PARK_TIME`] at most.
    fn at_queue(&self) -> usize {
        (self.loops + self.called).saturating_sub(self.working + self.parked)
    }
}

thread_local! {
    /// How many requests in a row this loop found waiting when it came back to the queue.
    static QUEUED_STREAK: Cell<u32> = const { Cell::new(0) };
}

/// One request; ends when it is dropped, which has to be after its reply.
pub struct InFlight<'a> {
    scheduler: &'a LoopScheduler,
    long: Cell<bool>,
}

impl LoopScheduler {
    /// For `loops` event loops that read from `queue`.
    pub fn new(loops: usize, queue: impl RequestQueue + 'static) -> LoopScheduler {
        LoopScheduler {
            queue: Box::new(queue),
            busy_poll: BusyPoll::new(),
            state: Mutex::new(LoopCounts { loops, ..LoopCounts::default() }),
            call: Condvar::new(),
        }
    }

    /// A request came in.
    pub fn begin(&self) -> InFlight<'_> {
        let mut state = self.state.lock();
        state.working += 1;
        if QUEUED_STREAK.get() >= BUSY_STREAK || state.long > 0 {
            self.wake_another(&mut state);
        }
        InFlight { scheduler: self, long: Cell::new(false) }
    }

    /// Long work on a thread that is no event loop, until the answer is dropped.
    pub fn begin_long_work(&self) -> LongWork<'_> {
        self.state.lock().long += 1;
        LongWork(self)
    }

    fn wake_another(&self, state: &mut LoopCounts) {
        if state.at_queue() == 0 && state.parked > state.called {
            state.called += 1;
            self.call.notify_one();
        }
    }
}

/// Long work that takes no event loop.
pub struct LongWork<'a>(&'a LoopScheduler);

impl Drop for LongWork<'_> {
    fn drop(&mut self) {
        self.0.state.lock().long -= 1;
    }
}

impl InFlight<'_> {
    /// What follows takes long, or waits for something.
    pub fn long(&self) {
        let mut state = self.scheduler.state.lock();
        if !self.long.replace(true) {
            state.long += 1;
        }
        self.scheduler.wake_another(&mut state);
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let scheduler = self.scheduler;
        let mut state = scheduler.state.lock();
        state.working -= 1;
        if self.long.get() {
            state.long -= 1;
        }
        // This one counts as being there already; the others are what matters.
        if state.at_queue() > 1 {
            state.parked += 1;
            let until = Instant::now() + PARK_TIME;
            let mut in_time = true;
            while state.called == 0 && in_time {
                in_time = !scheduler.call.wait_until(&mut state, until).timed_out();
            }
            state.called = state.called.saturating_sub(1);
            state.parked -= 1;
        }
        drop(state);
        match scheduler.busy_poll.poll(&*scheduler.queue) {
            Arrival::Queued => QUEUED_STREAK.set(QUEUED_STREAK.get().saturating_add(1)),
            Arrival::Polled | Arrival::NoRequest => QUEUED_STREAK.set(0),
        }
    }
}

#[cfg(test)]
mod tests;
