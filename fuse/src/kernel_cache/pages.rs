//! The kernel's pages of files: those that wait to be written, and those that hold plaintext.
//!
//! Dropping the cached pages of an inode has them written first, by WRITE requests that the event loops answer meanwhile. So none of this is
//! called from an event loop. An error says that the kernel has forgotten the inode, and with it its pages, or that the connection is gone.

use std::time::Instant;

use fuser::INodeNo;

use super::KernelCache;

impl KernelCache {
    /// The inodes of which the kernel may hold dirty pages (KERNEL-3).
    pub(crate) fn dirty_inodes(&self) -> Vec<u64> {
        self.writers.inodes()
    }

    /// Has the pages of these inodes written, and drops them.
    pub(crate) fn write_back(&self, inodes: &[u64]) {
        for &ino in inodes {
            self.drop_pages(INodeNo(ino), 0);
        }
    }

    /// The same for what lies behind `offset` in one inode.
    pub(crate) fn drop_pages(&self, ino: INodeNo, offset: i64) {
        if let Some(notifier) = self.notifier.get() {
            let _ = notifier.inval_inode(ino, offset, 0);
        }
    }

    /// The same for every inode up to `newest`, then for those that the kernel was told of views, first of views of which something was read; answers
    /// whether that was done by `until`. Newest inodes first: those are likelier to be in the kernel's cache, and time is short.
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
