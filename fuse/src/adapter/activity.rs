//! Use of a mount: requests since the last check, and the number of open handles.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Each consumer has its own flag: the idle timer and the replica poller.
const ALL: u8 = IDLE | REPLICA;
const IDLE: u8 = 1;
const REPLICA: u8 = 2;

/// Use of one mount. Recording a request costs one load, unless a consumer has checked since the
/// last request.
#[derive(Default)]
pub struct Activity {
    /// Flags of the consumers that have not seen the last request yet.
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

    /// Returns whether a request came since the last call.
    pub fn take_idle_flag(&self) -> bool {
        self.take_flag(IDLE)
    }

    /// Returns the same for the replica poller.
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
