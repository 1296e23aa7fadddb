//! Parallel page sealing and writing, so that a commit uses all processors.

use std::thread;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::txn::Reservation;

/// Maximum threads; more would wait for the space map and for the host.
const MAX_THREADS: usize = 8;

/// Job queue that the threads share.
struct WorkQueue<'r, R> {
    next: usize,
    reserved: &'r mut Option<Reservation>,
    /// Results with the index of their first job.
    done: Vec<(usize, R)>,
    failed: Option<Error>,
}

/// Returns the number of worker threads for this machine.
pub(super) fn worker_threads() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get().min(MAX_THREADS))
}

/// Runs all `jobs` on up to `threads` threads. Each thread takes `stride` jobs at a time, with the
/// groups of `reserved` that `share` returns for them, and gives back the rest. Returns the results
/// in the order of the jobs; after an error no more jobs start.
pub(super) fn run_parallel<J: Sync, R: Send>(
    threads: usize,
    stride: usize,
    jobs: &[J],
    reserved: &mut Option<Reservation>,
    share: impl Fn(&J) -> u64 + Sync,
    work: impl Fn(&[J], &mut Option<Reservation>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let shared = Mutex::new(WorkQueue { next: 0, reserved, done: Vec::new(), failed: None });
    let run = || {
        loop {
            let mut state = shared.lock();
            let first = state.next;
            if state.failed.is_some() || first >= jobs.len() {
                return;
            }
            let mine = &jobs[first..(first + stride).min(jobs.len())];
            state.next = first + mine.len();
            let groups = mine.iter().map(&share).sum();
            let mut reserved = state.reserved.as_mut().map(|reserved| reserved.split(groups));
            drop(state);
            let result = work(mine, &mut reserved);
            let mut state = shared.lock();
            if let (Some(all), Some(left)) = (state.reserved.as_mut(), reserved) {
                all.absorb(left);
            }
            match result {
                Ok(done) => state.done.push((first, done)),
                Err(error) => drop(state.failed.get_or_insert(error)),
            }
        }
    };
    thread::scope(|scope| {
        // This thread is a worker too, and does the work of threads that cannot be started.
        for _ in 1..threads {
            if thread::Builder::new().name("sealer".into()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let WorkQueue { mut done, failed, .. } = shared.into_inner();
    done.sort_unstable_by_key(|(first, _)| *first);
    failed.map_or_else(|| Ok(done.into_iter().map(|(_, done)| done).collect()), Err)
}
