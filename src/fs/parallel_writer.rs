//! Writes many pages on several threads at once: whoever waits for a commit waits for all processors, not for one.

use std::thread;

use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::txn::Reservation;

/// More threads would wait for the space map and for the host.
const MOST: usize = 8;

/// What the threads share.
struct Work<'r, R> {
    next: usize,
    reserved: &'r mut Option<Reservation>,
    /// By the index of the first job.
    done: Vec<(usize, R)>,
    failed: Option<Error>,
}

/// How many threads this machine runs at once.
pub(super) fn processors() -> usize {
    thread::available_parallelism().map_or(1, |count| count.get().min(MOST))
}

/// Does all `jobs` on up to so many threads, each taking `stride` jobs at once with the groups of `reserved` that `share` says; what is left of them
/// comes back. Answers in the order of the jobs; after an error no more are begun.
pub(super) fn spread<J: Sync, R: Send>(
    threads: usize,
    stride: usize,
    jobs: &[J],
    reserved: &mut Option<Reservation>,
    share: impl Fn(&J) -> u64 + Sync,
    work: impl Fn(&[J], &mut Option<Reservation>) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let shared = Mutex::new(Work { next: 0, reserved, done: Vec::new(), failed: None });
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
        // This thread is one of them, and does the work of those that cannot be started.
        for _ in 1..threads {
            if thread::Builder::new().name("sealer".into()).spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let Work { mut done, failed, .. } = shared.into_inner();
    done.sort_unstable_by_key(|(first, _)| *first);
    failed.map_or_else(|| Ok(done.into_iter().map(|(_, done)| done).collect()), Err)
}
