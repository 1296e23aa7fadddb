//! Reads of a remote archive that leave event loops for other requests.
//!
//! A read that waits for a store which does not answer occupies its event loop for `timeout`, or
//! for ever. When readers occupy all loops, requests that need nothing of the store wait, too. So a
//! read that would take one of the last loops is handed over to a thread of this queue.
//!
//! # Rules
//! 1  [`SPARE_LOOPS`] loops never serve a read of a remote archive, or all if there are fewer.
//! 2  A thread is started if none is idle, up to [`MAX_READ_THREADS`]; more reads wait. An idle
//!    thread ends after [`IDLE_TIME`].
//! 3  All threads end with the adapters of the mount, after the last event loop, and serve all
//!    queued reads before.
//!
//! Lookups and listings of parts that are not cached still occupy a loop while they wait.

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::event_loop::LoopScheduler;

/// Loops that reads of a remote archive leave free: one serves, and the other one waits at the
/// kernel's queue.
const SPARE_LOOPS: usize = 2;
/// Maximum reads outside of the event loops. With those, less than the fetcher's 40 sockets.
const MAX_READ_THREADS: usize = 24;
/// Time after which an idle thread gives its memory back.
const IDLE_TIME: Duration = Duration::from_secs(10);

type ReadJob = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    waiting: VecDeque<ReadJob>,
    threads: usize,
    idle: usize,
    ended: bool,
}

#[derive(Default)]
struct SharedReads {
    state: Mutex<State>,
    called: Condvar,
}

/// Queue of the reads of one mount.
#[derive(Default)]
pub(super) struct ReadQueue(Arc<SharedReads>);

impl ReadQueue {
    /// Returns whether a read that the caller has begun has to leave its loop.
    pub(super) fn has_to_leave(scheduler: &LoopScheduler) -> bool {
        scheduler.free_loops() < SPARE_LOOPS
    }

    /// Runs `job` on a thread; on the caller's if there is no other one.
    pub(super) fn submit(&self, job: impl FnOnce() + Send + 'static) {
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
        while state.threads > 0 {
            self.0.called.wait(&mut state);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn reads_leave_the_last_loops() {
        let (_kernel, queue) = UnixStream::pair().unwrap();
        let scheduler = LoopScheduler::new(4, OwnedFd::from(queue));
        let requests: Vec<_> = (0..4)
            .map(|_| {
                let request = scheduler.begin_request();
                (request, ReadQueue::has_to_leave(&scheduler))
            })
            .collect();
        let leaves: Vec<bool> = requests.iter().map(|(_, leaves)| *leaves).collect();
        assert_eq!(leaves, [false, false, true, true]);
    }

    #[test]
    fn stuck_reads_wait_for_each_other_only_beyond_the_threads_and_all_end_with_the_queue() {
        let queue = ReadQueue::default();
        let (began, begins) = mpsc::channel();
        let (release, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let submit = |number: usize| {
            let (began, gate) = (began.clone(), Arc::clone(&gate));
            queue.submit(move || {
                began.send(number).unwrap();
                // Ends when the test drops the other end.
                let _ = gate.lock().recv();
            });
        };
        (0..MAX_READ_THREADS + 3).for_each(submit);
        let mut running: Vec<usize> = (0..MAX_READ_THREADS).map(|_| begins.recv().unwrap()).collect();
        running.sort_unstable();
        assert_eq!(running, (0..MAX_READ_THREADS).collect::<Vec<_>>());
        assert_eq!(queue.0.state.lock().waiting.len(), 3);
        drop(release);
        drop(queue);
        drop(began);
        assert_eq!(begins.iter().count(), 3, "queued reads are served before the end");
    }
}
