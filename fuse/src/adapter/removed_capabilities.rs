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
const MOST: usize = 64;

#[derive(Default)]
pub(super) struct TakenCapabilities {
    taken: Mutex<VecDeque<Taken>>,
    /// So that writes need no lock.
    count: AtomicUsize,
}

struct Taken {
    file: Ino,
    thread: u32,
    value: Vec<u8>,
}

impl TakenCapabilities {
    pub(super) fn note(&self, file: Ino, thread: u32, value: Vec<u8>) {
        let mut taken = self.taken.lock();
        taken.retain(|other| other.file != file);
        if taken.len() == MOST {
            taken.pop_front();
        }
        taken.push_back(Taken { file, thread, value });
        self.count.store(taken.len(), Ordering::Release);
    }

    /// Returns the value that was removed from the file for this thread, and forgets the values
    /// that were removed from it for any thread.
    pub(super) fn take(&self, file: Ino, thread: u32) -> Option<Vec<u8>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut taken = self.taken.lock();
        let at = taken.iter().position(|taken| taken.file == file)?;
        let found = taken.remove(at)?;
        self.count.store(taken.len(), Ordering::Release);
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
        let taken = TakenCapabilities::default();
        let note = |thread| taken.note(Ino(7), thread, vec![1]);
        note(5);
        assert_eq!(taken.take(Ino(8), 5), None, "another file");
        assert_eq!(taken.take(Ino(7), 5), Some(vec![1]));
        assert_eq!(taken.take(Ino(7), 5), None, "once");
        note(5);
        assert_eq!(taken.take(Ino(7), 6), None, "another thread");
        assert_eq!(taken.take(Ino(7), 5), None, "whose change came first");
        note(5);
        taken.forget(Ino(7));
        assert_eq!(taken.take(Ino(7), 5), None, "it was written");
        note(0);
        assert_eq!(taken.take(Ino(7), 0), None, "a thread that has no number here");
        (0..100).for_each(|number| taken.note(Ino(number), 5, vec![]));
        assert_eq!(taken.taken.lock().len(), MOST);
        assert_eq!((taken.take(Ino(0), 5), taken.take(Ino(99), 5)), (None, Some(vec![])));
    }
}
