//! Cached pages of files in the kernel: dirty ones, and those that hold plaintext.
//!
//! Dropping the cached pages of an inode writes them first, by WRITE requests that the event loops
//! answer. So no function here may be called from an event loop. An error means that the kernel has
//! dropped the inode and its pages, or that the connection is closed.

use std::time::Instant;

use fuser::INodeNo;

use super::KernelCache;

impl KernelCache {
    /// Returns the inodes of which the kernel may hold dirty pages (KERNEL-3).
    pub(crate) fn dirty_inodes(&self) -> Vec<u64> {
        self.writers.inodes()
    }

    /// Makes the kernel write the pages of these inodes and drop them.
    pub(crate) fn write_back(&self, inodes: &[u64]) {
        for &ino in inodes {
            self.drop_pages(INodeNo(ino), 0);
        }
    }

    /// Writes and drops the pages of one inode from `offset` on.
    pub(crate) fn drop_pages(&self, ino: INodeNo, offset: i64) {
        if let Some(notifier) = self.notifier.get() {
            let _ = notifier.inval_inode(ino, offset, 0);
        }
    }

    /// Writes and drops the pages of every inode up to `newest`, then of the snapshot inodes that
    /// the kernel knows, starting with views that were read. Returns whether that finished before
    /// `until`. Newer inodes come first: they are likelier to be cached, and time is short.
    pub(crate) fn drop_all_pages(&self, newest: u64, until: Instant) -> bool {
        if self.notifier.get().is_none() {
            return true;
        }
        for (view, newest) in std::iter::once((0, newest)).chain(self.views.known_to_kernel()) {
            for number in (1..=newest).rev() {
                self.drop_pages(INodeNo(view | number), 0);
                if number % 256 == 0 && Instant::now() > until {
                    return false;
                }
            }
        }
        true
    }
}
