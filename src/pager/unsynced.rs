//! Bounds the bytes that the next barrier has to wait for, so that one file's fsync never waits for gigabytes of another.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::Pager;
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

/// See [`Pager::barrier_follows`].
pub(crate) struct BarrierFollows<'p>(&'p AtomicBool);

impl Drop for BarrierFollows<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Pager {
    /// Waits until everything written before is on the medium; a failure latches.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.unsynced.bytes.store(0, Ordering::Relaxed);
        self.latch.check()?;
        self.storage.barrier().map_err(|e| self.latch.set("making writes durable", e))
    }

    /// Until the answer is dropped nobody makes an early barrier: the caller holds the writers' lock, which the others need to go on, writes a bounded
    /// amount, and makes a barrier of its own afterwards. Should it fail before that, the bytes still count.
    pub(crate) fn barrier_follows(&self) -> BarrierFollows<'_> {
        self.unsynced.follows.store(true, Ordering::Release);
        BarrierFollows(&self.unsynced.follows)
    }

    /// Counts `bytes` of file data that were written, and makes an early barrier when they are too many.
    pub(crate) fn bound_unsynced(&self, bytes: u64) -> Result<()> {
        let Unsynced { bytes: counted, early, follows } = &self.unsynced;
        let sum = counted.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if sum < LIMIT || follows.load(Ordering::Acquire) {
            return Ok(());
        }
        // One thread waits for the medium; others go on until twice the bound.
        let guard = if sum < 2 * LIMIT { early.try_lock() } else { Some(early.lock()) };
        if guard.is_some() && counted.load(Ordering::Relaxed) >= LIMIT {
            self.barrier()?;
        }
        Ok(())
    }
}
