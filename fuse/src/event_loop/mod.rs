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
//! 3  Nobody stays away for longer than [`AWAY`] without being called, so work that turned out long without being announced
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

use self::busy_poll::{Arrival, Linger};
pub use self::queue::Queue;

/// How long a loop stays away at most: an unmount waits for it, and 50 wake-ups a second cost nothing under load.
const AWAY: Duration = Duration::from_millis(20);

/// So many waiting requests in a row make a second loop worth waking, which costs about as much as they do.
const ROW: u32 = 4;

/// Requests of at least this many bytes count as long: sealing or opening them takes more than waking a thread.
pub const LONG_BYTES: usize = 64 << 10;

/// The event loops of one connection.
pub struct Pace {
    queue: Box<dyn Queue>,
    linger: Linger,
    state: Mutex<State>,
    call: Condvar,
}

#[derive(Default)]
struct State {
    /// Loops that are at work.
    working: usize,
    /// Loops that stay away.
    away: usize,
    /// Of these, how many have been called and are not back yet.
    called: usize,
    /// Requests under way that were announced as long.
    long: usize,
    loops: usize,
}

impl State {
    /// Loops at the queue, or on their way there. One that has not started or has ended counts as if it were: others then stay away,
    /// for [`AWAY`] at most.
    fn at_queue(&self) -> usize {
        (self.loops + self.called).saturating_sub(self.working + self.away)
    }
}

thread_local! {
    /// How many requests in a row this loop found waiting when it came back to the queue.
    static IN_A_ROW: Cell<u32> = const { Cell::new(0) };
}

/// One request; ends when it is dropped, which has to be after its reply.
pub struct InFlight<'a> {
    pace: &'a Pace,
    long: Cell<bool>,
}

impl Pace {
    /// For `loops` event loops that read from `queue`.
    pub fn new(loops: usize, queue: impl Queue + 'static) -> Pace {
        Pace {
            queue: Box::new(queue),
            linger: Linger::new(),
            state: Mutex::new(State { loops, ..State::default() }),
            call: Condvar::new(),
        }
    }

    /// A request came in.
    pub fn begin(&self) -> InFlight<'_> {
        let mut state = self.state.lock();
        state.working += 1;
        if IN_A_ROW.get() >= ROW || state.long > 0 {
            self.call_another(&mut state);
        }
        InFlight { pace: self, long: Cell::new(false) }
    }

    /// Long work on a thread that is no event loop, until the answer is dropped.
    pub fn elsewhere(&self) -> Elsewhere<'_> {
        self.state.lock().long += 1;
        Elsewhere(self)
    }

    fn call_another(&self, state: &mut State) {
        if state.at_queue() == 0 && state.away > state.called {
            state.called += 1;
            self.call.notify_one();
        }
    }
}

/// Long work that takes no event loop.
pub struct Elsewhere<'a>(&'a Pace);

impl Drop for Elsewhere<'_> {
    fn drop(&mut self) {
        self.0.state.lock().long -= 1;
    }
}

impl InFlight<'_> {
    /// What follows takes long, or waits for something.
    pub fn long(&self) {
        let mut state = self.pace.state.lock();
        if !self.long.replace(true) {
            state.long += 1;
        }
        self.pace.call_another(&mut state);
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        let pace = self.pace;
        let mut state = pace.state.lock();
        state.working -= 1;
        if self.long.get() {
            state.long -= 1;
        }
        // This one counts as being there already; the others are what matters.
        if state.at_queue() > 1 {
            state.away += 1;
            let until = Instant::now() + AWAY;
            let mut in_time = true;
            while state.called == 0 && in_time {
                in_time = !pace.call.wait_until(&mut state, until).timed_out();
            }
            state.called = state.called.saturating_sub(1);
            state.away -= 1;
        }
        drop(state);
        match pace.linger.look(&*pace.queue) {
            Arrival::AtOnce => IN_A_ROW.set(IN_A_ROW.get().saturating_add(1)),
            Arrival::Later | Arrival::Nothing => IN_A_ROW.set(0),
        }
    }
}

#[cfg(test)]
mod tests;
