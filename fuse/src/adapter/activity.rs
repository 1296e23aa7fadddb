//! Notes that the mount is used: whether a request came, and how many handles are open.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Two look, each for itself: who ends an idle mount, and who follows a writer.
const BOTH: u8 = IDLE | FOLLOWED;
const IDLE: u8 = 1;
const FOLLOWED: u8 = 2;

/// What idleness is judged by. Noting costs a request one load, unless somebody has looked since the last one.
#[derive(Default)]
pub struct Activity {
    /// Who has not seen yet that a request came.
    used: AtomicU8,
    files: AtomicU64,
    directories: AtomicU64,
}

impl Activity {
    pub fn note(&self) {
        if self.used.load(Ordering::Relaxed) != BOTH {
            self.used.store(BOTH, Ordering::Relaxed);
        }
    }

    /// Whether anything was noted since the last call.
    pub fn take_used(&self) -> bool {
        self.take(IDLE)
    }

    /// The same for who follows a writer.
    pub fn take_followed(&self) -> bool {
        self.take(FOLLOWED)
    }

    fn take(&self, bit: u8) -> bool {
        self.used.fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }

    pub fn open_files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    pub fn open_directories(&self) -> u64 {
        self.directories.load(Ordering::Relaxed)
    }

    pub(super) fn file_opened(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn file_closed(&self) {
        self.files.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn directory_opened(&self) {
        self.directories.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn directory_closed(&self) {
        self.directories.fetch_sub(1, Ordering::Relaxed);
    }
}
