//! File capabilities that the kernel took away for a chown(2) that was then refused: they are given
//! back.
//!
//! With set-ID bits to clear, the kernel removes `security.capability` before it asks for the
//! change of the inode (REMOVEXATTR, then SETATTR, both by the thread that called, under the lock
//! of the inode). A chown(2) of -1 and -1 is refused to others than the owner only in the second
//! step (`privileges.rs`). Other file systems refuse before anything is changed.
//!
//! # Scope
//! 1. Only capabilities that were removed for a thread without CAP_SETFCAP: it cannot remove
//!    capabilities by itself, so the kernel did.
//! 2. Only to the very next change of the inode, by the same thread: any other change drops the
//!    remembered capabilities, except the kernel's own flush of the times that the removal changed.
//!    A number of a thread that is used again finds nothing then, unless
//!    the file was not changed meanwhile.
//! 3. Nothing after a crash between the two requests: fewer privileges are the safe side.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};

use lockbox::format::Ino;
use parking_lot::Mutex;

pub(super) const CAPABILITY: &[u8] = b"security.capability";

/// Threads between the two requests at a time, of which this is far more than there are event
/// loops.
const MAX_REMEMBERED: usize = 64;

#[derive(Default)]
pub(super) struct RemovedCapabilities {
    removed: Mutex<VecDeque<RemovedCapability>>,
    /// So that writes need no lock.
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

    /// Returns the value that was removed from the file for this thread, and forgets the values
    /// that were removed from it for any thread.
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

    /// The file is changed in another way.
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
