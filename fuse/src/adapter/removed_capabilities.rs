//! Restores file capabilities that the kernel removed for a chown(2) that was then refused.
//!
//! If set-id bits are to be cleared, the kernel removes `security.capability` before it requests
//! the change of the inode: REMOVEXATTR, then SETATTR, both by the calling thread under the inode's
//! lock. A `chown(-1, -1)` by a user other than the owner is refused only in the second step
//! (`privileges.rs`). Other file systems refuse before anything has changed.
//!
//! # Scope
//! 1. Only capabilities removed for a thread without CAP_SETFCAP: the thread cannot remove them
//!    itself, so the kernel did.
//! 2. Only for the very next change of the inode, by the same thread. Any other change drops the
//!    remembered capabilities, except the kernel's own flush of the times that the removal changed.
//!    So a reused thread number finds nothing, unless the file was not changed meanwhile.
//! 3. Nothing after a crash between the two requests: fewer privileges are the safe side.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockbox::format::Ino;
use parking_lot::Mutex;

pub(super) const CAPABILITY: &[u8] = b"security.capability";

/// Maximum number of threads between the two requests, far more than there are event loops.
const MAX_REMEMBERED: usize = 64;

#[derive(Default)]
pub(super) struct RemovedCapabilities {
    removed: Mutex<VecDeque<RemovedCapability>>,
    /// Length of the queue; lets writes skip the lock.
    count: AtomicUsize,
}

struct RemovedCapability {
    file: Ino,
    thread: u32,
    value: Vec<u8>,
}

impl RemovedCapabilities {
    pub(super) fn record(&self, file: Ino, thread: u32, value: Vec<u8>) {
        let mut removed = self.removed.lock();
        removed.retain(|other| other.file != file);
        if removed.len() == MAX_REMEMBERED {
            removed.pop_front();
        }
        removed.push_back(RemovedCapability { file, thread, value });
        self.count.store(removed.len(), Ordering::Release);
    }

    /// Returns the value removed from the file for this thread, and forgets the values removed from
    /// it for any thread.
    pub(super) fn take(&self, file: Ino, thread: u32) -> Option<Vec<u8>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut removed = self.removed.lock();
        let at = removed.iter().position(|removed| removed.file == file)?;
        let found = removed.remove(at)?;
        self.count.store(removed.len(), Ordering::Release);
        (found.thread == thread && thread != 0).then_some(found.value)
    }

    /// Forgets the file's value after another change of the file.
    pub(super) fn forget(&self, file: Ino) {
        drop(self.take(file, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_next_change_of_the_file_by_the_same_thread_gets_it_back() {
        let removed = RemovedCapabilities::default();
        let record = |thread| removed.record(Ino(7), thread, vec![1]);
        record(5);
        assert_eq!(removed.take(Ino(8), 5), None, "another file");
        assert_eq!(removed.take(Ino(7), 5), Some(vec![1]));
        assert_eq!(removed.take(Ino(7), 5), None, "once");
        record(5);
        assert_eq!(removed.take(Ino(7), 6), None, "another thread");
        assert_eq!(removed.take(Ino(7), 5), None, "whose change came first");
        record(5);
        removed.forget(Ino(7));
        assert_eq!(removed.take(Ino(7), 5), None, "it was written");
        record(0);
        assert_eq!(removed.take(Ino(7), 0), None, "a thread that has no number here");
        (0..100).for_each(|number| removed.record(Ino(number), 5, vec![]));
        assert_eq!(removed.removed.lock().len(), MAX_REMEMBERED);
        assert_eq!((removed.take(Ino(0), 5), removed.take(Ino(99), 5)), (None, Some(vec![])));
    }
}
