//! Scheduler of the event loops: one loop reads the kernel's queue while requests are short, and
//! more loops join for long ones.
//!
//! The kernel wakes the loop that has waited longest, so two waiting loops alternate: each request
//! wakes a sleeping thread on another processor. A single loop created twice as many small files
//! per second here. But with a single loop every request would wait for an fsync. So a loop that
//! has replied parks while another loop waits at the queue. It returns when that loop starts long
//! work, or finds request after request already queued.
//!
//! # Rules
//! 1  A loop parks only after its reply was sent, and holds no lock then.
//! 2  Before long work, a loop that leaves no loop at the queue wakes a parked one.
//! 3  No loop is parked for longer than [`PARK_TIME`]. So unannounced long work delays other
//!    requests only briefly, and the end of the connection is noticed.
//! 4  While long work is in progress, any request may have to wait for it (a commit holds the
//!    writers' lock for a while), so a loop that takes a request then wakes another, as if its own
//!    were long.
//! 5  A loop that returns to the queue polls it briefly before it sleeps there ([`busy_poll`]):
//!    only while polling finds requests, and only while no other thread needs the processor.
//!
//! From 1 and 2 it follows that no wake-up is lost. Parking and waking happen under one lock, a
//! wake-up is a count and not only a signal, and a returning loop consumes at most one wake-up,
//! even if its time-out expires at the same moment.

mod busy_poll;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

pub use self::busy_poll::RequestQueue;
use self::busy_poll::{Arrival, BusyPoll};

/// Maximum park time: an unmount waits for it, and 50 wake-ups a second are negligible under load.
const PARK_TIME: Duration = Duration::from_millis(20);

/// Consecutive queued requests that justify waking a second loop, which costs about as much as
/// serving them.
const BUSY_STREAK: u32 = 4;

/// Requests of at least this many bytes count as long: sealing or opening them costs more than
/// waking a thread.
pub const LONG_BYTES: usize = 64 << 10;

/// Scheduler of the event loops of one connection.
pub struct LoopScheduler {
    queue: Box<dyn RequestQueue>,
    busy_poll: BusyPoll,
    state: Mutex<LoopCounts>,
    wake_up: Condvar,
}

#[derive(Default)]
struct LoopCounts {
    /// Loops that serve a request.
    working: usize,
    parked: usize,
    /// Parked loops that were woken and have not returned yet.
    woken: usize,
    /// Requests in flight that were announced as long.
    long: usize,
    loops: usize,
}

impl LoopCounts {
    /// Loops at the queue or returning to it. A loop that has not started or has ended is counted
    /// too; other loops then park for [`PARK_TIME`] at most.
    fn at_queue(&self) -> usize {
        (self.loops + self.woken).saturating_sub(self.working + self.parked)
    }
}

thread_local! {
    /// Requests in a row that this loop found already queued.
    static QUEUED_STREAK: Cell<u32> = const { Cell::new(0) };
}

/// Request in flight until it is dropped; drop it after the reply.
pub struct InFlight<'a> {
    scheduler: &'a LoopScheduler,
    long: Cell<bool>,
}

impl LoopScheduler {
    /// Creates the scheduler for `loops` event loops that read from `queue`.
    pub fn new(loops: usize, queue: impl RequestQueue + 'static) -> LoopScheduler {
        LoopScheduler {
            queue: Box::new(queue),
            busy_poll: BusyPoll::new(),
            state: Mutex::new(LoopCounts { loops, ..LoopCounts::default() }),
            wake_up: Condvar::new(),
        }
    }

    /// Starts a request.
    pub fn begin_request(&self) -> InFlight<'_> {
        let mut state = self.state.lock();
        state.working += 1;
        if QUEUED_STREAK.get() >= BUSY_STREAK || state.long > 0 {
            self.wake_another(&mut state);
        }
        InFlight { scheduler: self, long: Cell::new(false) }
    }

    /// Announces long work that no request in flight announces, until the guard is dropped: on
    /// another thread, or for a request without a reply.
    pub(crate) fn begin_long_work(&self) -> LongWork<'_> {
        self.state.lock().long += 1;
        LongWork(self)
    }

    fn wake_another(&self, state: &mut LoopCounts) {
        if state.at_queue() == 0 && state.parked > state.woken {
            state.woken += 1;
            self.wake_up.notify_one();
        }
    }
}

/// Guard of long work outside the event loops.
pub struct LongWork<'a>(&'a LoopScheduler);

impl Drop for LongWork<'_> {
    fn drop(&mut self) {
        self.0.state.lock().long -= 1;
    }
}

impl InFlight<'_> {
    /// Announces that the rest of the request takes long or blocks.
    pub fn mark_long(&self) {
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
        // This loop already counts as being at the queue; park only if there is another.
        if state.at_queue() > 1 {
            state.parked += 1;
            scheduler.wake_up.wait_while_for(&mut state, |state| state.woken == 0, PARK_TIME);
            state.woken = state.woken.saturating_sub(1);
            state.parked -= 1;
        }
        drop(state);
        match scheduler.busy_poll.poll(&*scheduler.queue) {
            Arrival::Queued => QUEUED_STREAK.set(QUEUED_STREAK.get().saturating_add(1)),
            Arrival::Polled | Arrival::NoRequest => QUEUED_STREAK.set(0),
        }
    }
}

/// Loops that reads of a remote archive leave free: one serves, and the other one waits at the
/// kernel's queue.
const SPARE_LOOPS: usize = 2;
/// Maximum reads outside of the event loops. With those, less than the fetcher's 40 sockets.
const MAX_READ_THREADS: usize = 24;
/// Time after which an idle thread gives its memory back.
const IDLE_TIME: Duration = Duration::from_secs(10);

type ReadJob = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct QueuedReads {
    waiting: VecDeque<ReadJob>,
    threads: usize,
    idle: usize,
    ended: bool,
}

#[derive(Default)]
struct SharedReads {
    state: Mutex<QueuedReads>,
    called: Condvar,
}

/// Queue of a mount's reads of a remote archive that leave the event loops for other requests.
///
/// A read that waits for a store which does not answer occupies its event loop for `timeout`, or
/// for ever. When readers occupy all loops, requests that need nothing of the store wait, too. So a
/// read that would take one of the last loops is handed over to a thread of this queue.
///
/// # Rules
/// 1  [`SPARE_LOOPS`] loops never serve a read of a remote archive, or all if there are fewer.
/// 2  A thread is started if none is idle, up to [`MAX_READ_THREADS`]; more reads wait. An idle
///    thread ends after [`IDLE_TIME`].
/// 3  All threads end with the adapters of the mount, after the last event loop, and serve all
///    queued reads before.
///
/// Lookups and listings of parts that are not cached still occupy a loop while they wait.
#[derive(Default)]
pub(crate) struct ReadQueue(Arc<SharedReads>);

impl ReadQueue {
    /// Returns whether a read that the caller has begun has to leave its loop.
    pub(crate) fn has_to_leave(scheduler: &LoopScheduler) -> bool {
        let state = scheduler.state.lock();
        state.loops.saturating_sub(state.working) < SPARE_LOOPS
    }

    /// Runs `job` on a thread; on the caller's if there is no other one.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.0.state.lock();
        state.waiting.push_back(Box::new(job));
        if state.idle >= state.waiting.len() || state.threads == MAX_READ_THREADS {
            self.0.called.notify_one();
            return;
        }
        state.threads += 1;
        let shared = Arc::clone(&self.0);
        if thread::Builder::new().name("reads".into()).spawn(move || serve(&shared)).is_err() {
            state.threads -= 1;
            let job = if state.threads == 0 { state.waiting.pop_back() } else { None };
            drop(state);
            job.into_iter().for_each(|job| job());
        }
    }
}

fn serve(shared: &SharedReads) {
    let mut state = shared.state.lock();
    loop {
        while let Some(job) = state.waiting.pop_front() {
            drop(state);
            job();
            state = shared.state.lock();
        }
        if state.ended {
            break;
        }
        state.idle += 1;
        let is_late = shared.called.wait_for(&mut state, IDLE_TIME).timed_out();
        state.idle -= 1;
        if is_late && state.waiting.is_empty() {
            break;
        }
    }
    state.threads -= 1;
    shared.called.notify_all();
}

impl Drop for ReadQueue {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.ended = true;
        self.0.called.notify_all();
        self.0.called.wait_while(&mut state, |state| state.threads > 0);
    }
}

#[cfg(test)]
mod tests;
