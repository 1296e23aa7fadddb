//! Makes the kernel write back cached pages of files open for writing, even if no path leads to
//! them.
//!
//! syncfs(2) needs an open file of the mount, and none can be opened once the mount is detached.
//! But dropping the cached pages of an inode writes them first, by WRITE requests that the event
//! loops answer. That blocks, hence a thread, which is abandoned if the kernel or the loops hang.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::kernel_cache::KernelCache;

/// Writeback of one connection's pages.
pub(crate) struct KernelWriteback {
    cache: Arc<KernelCache>,
    /// Closed by an abandoned thread when it ends; until then no second thread is started.
    stuck: Mutex<Option<Receiver<()>>>,
}

impl KernelWriteback {
    pub(crate) fn new(cache: Arc<KernelCache>) -> KernelWriteback {
        KernelWriteback { cache, stuck: Mutex::default() }
    }

    /// Returns whether all data written before the call has arrived within `limit`. Not to be
    /// called from an event loop.
    pub(crate) fn run(&self, limit: Duration) -> bool {
        let inodes = self.cache.dirty_inodes();
        if inodes.is_empty() {
            return true;
        }
        let cache = Arc::clone(&self.cache);
        self.run_job(limit, move || cache.write_back(&inodes))
    }

    fn run_job(&self, limit: Duration, job: impl FnOnce() + Send + 'static) -> bool {
        let until = Instant::now() + limit;
        let mut stuck = self.stuck.lock();
        if let Some(earlier) = stuck.take()
            && !ends_before(&earlier, until)
        {
            *stuck = Some(earlier);
            return false;
        }
        let (end, ended) = mpsc::channel();
        let started = thread::Builder::new().name("handover".into()).spawn(move || {
            job();
            drop(end);
        });
        if let Err(error) = started {
            tracing::error!("no thread for what the kernel caches of open files: {error}");
            return false;
        }
        let over = ends_before(&ended, until);
        if !over {
            *stuck = Some(ended);
        }
        over
    }
}

/// Waits for the channel to be closed; nothing is sent on it.
fn ends_before(ended: &Receiver<()>, until: Instant) -> bool {
    let rest = until.saturating_duration_since(Instant::now());
    ended.recv_timeout(rest) == Err(RecvTimeoutError::Disconnected)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn without_a_writer_nothing_is_waited_for() {
        assert!(KernelWriteback::new(Arc::default()).run(Duration::ZERO));
    }

    #[test]
    fn a_stuck_kernel_holds_nobody_up_and_gets_no_second_thread() {
        let writeback = KernelWriteback::new(Arc::default());
        let runs = Arc::new(AtomicUsize::new(0));
        let counts = || {
            let runs = Arc::clone(&runs);
            move || {
                runs.fetch_add(1, Ordering::SeqCst);
            }
        };
        let (go_on, stuck) = mpsc::channel::<()>();
        let waits = move || {
            let _ = stuck.recv();
        };
        assert!(!writeback.run_job(Duration::from_millis(1), waits));
        assert!(!writeback.run_job(Duration::from_millis(1), counts()), "the first is still at it");
        drop(go_on);
        assert!(writeback.run_job(Duration::from_secs(60), counts()));
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }
}
