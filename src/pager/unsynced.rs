//! Bounds the bytes that the next barrier has to wait for, so that one file's fsync never waits for gigabytes of another.
//!
//! Writing counts, and only `bound` may wait for the medium. Whoever wrote file data calls it when nobody waits for those pages any more: so a commit,
//! whose flush waits for pages that are being written and has barriers of its own, waits for no early one while it keeps writers out.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::Result;

/// Written bytes that no barrier covered, beside those of the batches that are being written: what an fsync of a small file may have to wait for.
const LIMIT: u64 = 16 << 20;

/// What was written since the last barrier.
#[derive(Default)]
pub(super) struct UnsyncedBytes {
    bytes: AtomicU64,
    /// Held by the one writer that makes what was written durable before it is too much.
    early: Mutex<()>,
}

impl UnsyncedBytes {
    /// A barrier is made that covers all that was counted until now.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
    }

    /// Counts bytes of file data that were written.
    pub(super) fn count(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Makes an early barrier when too much was written.
    pub(super) fn limit(&self, barrier: impl FnOnce() -> Result<()>) -> Result<()> {
        let sum = self.bytes.load(Ordering::Relaxed);
        if sum < LIMIT {
            return Ok(());
        }
        // One thread waits for the medium; others go on until twice the bound.
        let guard = if sum < 2 * LIMIT { self.early.try_lock() } else { Some(self.early.lock()) };
        if guard.is_some() && self.bytes.load(Ordering::Relaxed) >= LIMIT { barrier() } else { Ok(()) }
    }
}
