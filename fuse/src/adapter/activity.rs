//! Notes that the mount is used: whether a request came, and how many handles are open.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Two look, each for itself: who ends an idle mount, and who follows a writer.
const ALL: u8 = IDLE | REPLICA;
const IDLE: u8 = 1;
const REPLICA: u8 = 2;

/// What idleness is judged by. Noting costs a request one load, unless somebody has looked since the last one.
#[derive(Default)]
pub struct Activity {
    /// Who has not seen yet that a request came.
    used: AtomicU8,
    files: AtomicU64,
    directories: AtomicU64,
}

impl Activity {
    pub fn record_request(&self) {
        if self.used.load(Ordering::Relaxed) != ALL {
            self.used.store(ALL, Ordering::Relaxed);
        }
    }

    /// Whether anything was noted since the last call.
    pub fn take_idle_flag(&self) -> bool {
        self.take_flag(IDLE)
    }

    /// The same for who follows a writer.
    pub fn take_replica_flag(&self) -> bool {
        self.take_flag(REPLICA)
    }

    fn take_flag(&self, bit: u8) -> bool {
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
