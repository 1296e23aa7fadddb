//! Notes that the mount is used: whether a request came, and how many handles are open.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What idleness is judged by. Noting costs a request one load, unless somebody has looked since the last one.
#[derive(Default)]
pub struct Activity {
    used: AtomicBool,
    files: AtomicU64,
    directories: AtomicU64,
}

impl Activity {
    pub fn note(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether anything was noted since the last call.
    pub fn take_used(&self) -> bool {
        self.used.swap(false, Ordering::Relaxed)
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
