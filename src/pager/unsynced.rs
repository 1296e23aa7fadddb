//! Bounds the bytes that the next barrier has to wait for, so that one file's fsync never waits for gigabytes of another.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::Result;

/// Written bytes that no barrier covered, at most: what an fsync of a small file may have to wait for.
const LIMIT: u64 = 16 << 20;

/// What was written since the last barrier.
#[derive(Default)]
pub(super) struct Unsynced {
    bytes: AtomicU64,
    /// Held by the one writer that makes what was written durable before it is too much.
    early: Mutex<()>,
    /// Somebody holds locks that others need, and makes a barrier when it has let them go.
    follows: AtomicBool,
}

/// See [`Unsynced::barrier_follows`].
pub(crate) struct BarrierFollows<'p>(&'p AtomicBool);

impl Drop for BarrierFollows<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Unsynced {
    /// A barrier is made that covers all that was counted until now.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
    }

    /// Until the answer is dropped nobody makes an early barrier: the caller holds the writers' lock, which the others need to go on, writes a bounded
    /// amount, and makes a barrier of its own afterwards. Should it fail before that, the bytes still count.
    pub(super) fn barrier_follows(&self) -> BarrierFollows<'_> {
        self.follows.store(true, Ordering::Release);
        BarrierFollows(&self.follows)
    }

    /// Counts `bytes` of file data that were written, and makes an early barrier when they are too many.
    pub(super) fn count(&self, bytes: u64, barrier: impl FnOnce() -> Result<()>) -> Result<()> {
        let sum = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if sum < LIMIT || self.follows.load(Ordering::Acquire) {
            return Ok(());
        }
        // One thread waits for the medium; others go on until twice the bound.
        let guard = if sum < 2 * LIMIT { self.early.try_lock() } else { Some(self.early.lock()) };
        if guard.is_some() && self.bytes.load(Ordering::Relaxed) >= LIMIT { barrier() } else { Ok(()) }
    }
}
