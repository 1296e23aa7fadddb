//! Interruption of programs that wait in fsync(2) for a store.
//!
//! While the store is unreachable or refuses, such a program would wait in a state that no signal
//! ends. FUSE_INTERRUPT is no way out: `fuser` answers the first one with ENOSYS without passing it
//! on, and the kernel then sends no other. So the signals that wait for the calling thread are read
//! from /proc, by the mount agent. The thread cannot end before its reply, so its number is not
//! reused meanwhile. A fsync that ends within [`WatchTimes::patience`] costs a short list entry.
//!
//! # Rules
//! 1  EINTR promises nothing. The commit of the caller stays in flight as it is, another thread
//!    waits on its ticket, and a later fsync needs a commit that begins after it.
//! 2  A caller is answered once: the first of both threads takes the reply.
//! 3  A signal counts in the second sample in a row. Another thread of the program that may take a
//!    signal of its process does so before.
//! 4  A caller of another PID namespace has no number here, and waits.

use std::sync::{Arc, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use fuser::Errno;
use parking_lot::{Condvar, Mutex};

type Outcome = Result<(), Errno>;
type Reply = Box<dyn FnOnce(Outcome) + Send>;

/// Caller of fsync that was not answered yet.
pub(super) struct WaitingCaller {
    /// Thread number in this process's PID namespace; 0 if it has none here.
    thread: u32,
    since: Instant,
    reply: Mutex<Option<Reply>>,
}

impl WaitingCaller {
    pub(super) fn new(thread: u32, reply: impl FnOnce(Outcome) + Send + 'static) -> Arc<WaitingCaller> {
        Arc::new(WaitingCaller { thread, since: Instant::now(), reply: Mutex::new(Some(Box::new(reply))) })
    }

    /// Replies unless the caller was answered before (rule 2).
    pub(super) fn answer(&self, outcome: Outcome) {
        let reply = self.reply.lock().take();
        if let Some(reply) = reply {
            reply(outcome);
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct WatchTimes {
    /// A shorter wait is not interrupted: few commits to a store that answers take longer.
    pub(super) patience: Duration,
    /// Time between two samples of a caller.
    pub(super) interval: Duration,
}

impl WatchTimes {
    pub(super) const DEFAULT: WatchTimes =
        WatchTimes { patience: Duration::from_secs(1), interval: Duration::from_millis(250) };
}

#[derive(Default)]
struct State {
    arrived: Vec<Weak<WaitingCaller>>,
    /// The thread waits without a limit, as it watches no caller.
    is_idle: bool,
    ended: bool,
}

#[derive(Default)]
struct SharedState {
    state: Mutex<State>,
    changed: Condvar,
}

/// Thread that answers interrupted callers.
pub(super) struct InterruptWatch {
    shared: Arc<SharedState>,
    thread: Option<JoinHandle<()>>,
}

impl InterruptWatch {
    /// `has_signal` returns whether a signal waits for a thread that interrupts a system call.
    ///
    /// # Errors
    /// Fails if the thread cannot be started.
    pub(super) fn start(
        times: WatchTimes,
        has_signal: impl Fn(u32) -> bool + Send + 'static,
    ) -> std::io::Result<InterruptWatch> {
        let shared = Arc::new(SharedState::default());
        let of_thread = Arc::clone(&shared);
        let thread =
            thread::Builder::new().name("interrupts".into()).spawn(move || watch(&of_thread, times, &has_signal))?;
        Ok(InterruptWatch { shared, thread: Some(thread) })
    }

    /// Watches a caller until it is dropped.
    pub(super) fn register(&self, caller: &Arc<WaitingCaller>) {
        if caller.thread == 0 {
            return;
        }
        let mut state = self.shared.state.lock();
        state.arrived.push(Arc::downgrade(caller));
        if state.is_idle {
            self.shared.changed.notify_one();
        }
    }
}

impl Drop for InterruptWatch {
    fn drop(&mut self) {
        self.shared.state.lock().ended = true;
        self.shared.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct WatchedCaller {
    caller: Weak<WaitingCaller>,
    /// The last sample found a signal.
    had_signal: bool,
}

impl WatchedCaller {
    /// Takes a sample; returns whether the caller is still to be watched.
    fn sample(&mut self, patience: Duration, has_signal: &impl Fn(u32) -> bool) -> bool {
        let Some(caller) = self.caller.upgrade() else { return false };
        if caller.since.elapsed() < patience {
            return true;
        }
        let is_second = std::mem::replace(&mut self.had_signal, has_signal(caller.thread));
        // Rule 3.
        let is_interrupted = is_second && self.had_signal;
        if is_interrupted {
            caller.answer(Err(Errno::EINTR));
        }
        !is_interrupted
    }
}

fn watch(shared: &SharedState, times: WatchTimes, has_signal: &impl Fn(u32) -> bool) {
    let mut watched: Vec<WatchedCaller> = Vec::new();
    let mut state = shared.state.lock();
    loop {
        state.is_idle = true;
        let has_no_caller = |state: &mut State| watched.is_empty() && state.arrived.is_empty() && !state.ended;
        shared.changed.wait_while(&mut state, has_no_caller);
        state.is_idle = false;
        shared.changed.wait_while_for(&mut state, |state| !state.ended, times.interval);
        if state.ended {
            return;
        }
        watched.extend(state.arrived.drain(..).map(|caller| WatchedCaller { caller, had_signal: false }));
        drop(state);
        watched.retain_mut(|caller| caller.sample(times.patience, has_signal));
        state = shared.state.lock();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{self, Receiver};

    use super::*;

    const AT_ONCE: WatchTimes = WatchTimes { patience: Duration::ZERO, interval: Duration::from_millis(1) };
    /// Ends a hang.
    const LIMIT: Duration = Duration::from_secs(60);

    fn waiting(thread: u32) -> (Arc<WaitingCaller>, Receiver<Outcome>) {
        let (answer, answered) = mpsc::channel();
        (
            WaitingCaller::new(thread, move |outcome| {
                let _ = answer.send(outcome);
            }),
            answered,
        )
    }

    /// Returns a watch in which the threads of these numbers have a signal, and the samples that it
    /// takes.
    fn watch_with(signals: impl Fn(u32) -> bool + Send + 'static) -> (InterruptWatch, Receiver<u32>) {
        let (sample, samples) = mpsc::channel();
        let watch = InterruptWatch::start(AT_ONCE, move |thread| {
            let _ = sample.send(thread);
            signals(thread)
        });
        (watch.unwrap(), samples)
    }

    #[test]
    fn a_caller_with_a_signal_is_answered_and_others_wait_on() {
        let (watch, samples) = watch_with(|thread| thread == 7);
        let ((quiet, quiet_answer), (signalled, answer)) = (waiting(5), waiting(7));
        watch.register(&quiet);
        watch.register(&signalled);
        assert_eq!(answer.recv_timeout(LIMIT), Ok(Err(Errno::EINTR)));
        // Its commit ends later.
        signalled.answer(Ok(()));
        assert!(answer.recv().is_err(), "answered twice");
        // Several samples later it still waits, and gets the result of its commit.
        assert_eq!(samples.iter().filter(|thread| *thread == 5).take(5).count(), 5);
        assert!(quiet_answer.try_recv().is_err());
        quiet.answer(Ok(()));
        assert_eq!(quiet_answer.recv(), Ok(Ok(())));
    }

    #[test]
    fn a_signal_that_another_thread_takes_interrupts_nothing() {
        let samples_taken = Mutex::new(0);
        let (watch, samples) = watch_with(move |_| {
            let mut count = samples_taken.lock();
            *count += 1;
            *count % 2 == 0
        });
        let (caller, answer) = waiting(5);
        watch.register(&caller);
        assert_eq!(samples.iter().take(9).count(), 9);
        assert!(answer.try_recv().is_err());
    }

    #[test]
    fn callers_without_a_number_or_with_an_answer_are_not_looked_up() {
        let (watch, samples) = watch_with(|_| true);
        let ((stranger, no_answer), (answered, _)) = (waiting(0), waiting(6));
        watch.register(&stranger);
        watch.register(&answered);
        drop(answered);
        let (caller, answer) = waiting(5);
        watch.register(&caller);
        assert_eq!(answer.recv_timeout(LIMIT), Ok(Err(Errno::EINTR)));
        drop(watch);
        // The one of the number 6 may have been sampled before it was dropped.
        assert!(samples.iter().all(|thread| thread != 0) && no_answer.try_recv().is_err());
    }

    #[test]
    fn a_short_wait_is_not_looked_up() {
        let mut watched = WatchedCaller { caller: Weak::new(), had_signal: false };
        assert!(!watched.sample(Duration::ZERO, &|_| true), "dropped");
        let (caller, answer) = waiting(5);
        watched.caller = Arc::downgrade(&caller);
        for _ in 0..3 {
            assert!(watched.sample(Duration::MAX, &|_| panic!("it is looked up")));
        }
        assert!(watched.sample(Duration::ZERO, &|_| true), "the first sample");
        assert!(!watched.sample(Duration::ZERO, &|_| true), "the second one");
        assert_eq!(answer.try_recv(), Ok(Err(Errno::EINTR)));
    }
}
