//! Limits the bytes that the next barrier has to wait for, so that an fsync of one file never waits
//! for gigabytes of another.
//!
//! Writers only count; [`UnsyncedBytes::limit`] alone may wait for the medium. Writers of file data
//! call it after the last use of their pages. A commit therefore never waits for an early barrier
//! while it blocks other writers: its flush waits for pages in flight and issues its own barriers.

use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::Result;

/// Unsynced bytes, excluding batches in flight, that an fsync of a small file may have to wait for.
const LIMIT: u64 = 16 << 20;

/// Bytes written since the last barrier.
#[derive(Default)]
pub(super) struct UnsyncedBytes {
    bytes: AtomicU64,
    /// Held by the writer that issues an early barrier.
    early: Mutex<()>,
}

impl UnsyncedBytes {
    /// Resets the count before a barrier that covers all counted bytes.
    pub(super) fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
    }

    /// Counts written bytes of file data.
    pub(super) fn count(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Issues an early barrier when the limit is exceeded.
    pub(super) fn limit(&self, barrier: impl FnOnce() -> Result<()>) -> Result<()> {
        let sum = self.bytes.load(Ordering::Relaxed);
        if sum < LIMIT {
            return Ok(());
        }
        // One thread waits for the medium; the others continue until twice the limit.
        let guard = if sum < 2 * LIMIT { self.early.try_lock() } else { Some(self.early.lock()) };
        if guard.is_some() && self.bytes.load(Ordering::Relaxed) >= LIMIT { barrier() } else { Ok(()) }
    }
}
