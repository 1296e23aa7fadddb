//! Shutdown gate: background tasks finish before the close record is written.
//!
//! # Invariant
//! Closing frees space at the end of the file and then records the file's length. An allocation in
//! between would lengthen the file, and the record would claim blocks that were cut off: the
//! archive would be refused as truncated. So work that an operator requests ends before closing
//! begins, and none begins afterwards. Requests of a mount have ended by then.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::{Error, Result};

#[derive(Default)]
pub(super) struct ShutdownGate {
    begun: AtomicBool,
    gate: RwLock<()>,
}

impl ShutdownGate {
    /// Keeps the archive from closing while the guard lives. One thread must not take it twice: a
    /// pending close between the two would deadlock.
    pub(super) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let work = self.gate.read();
        self.check_open()?;
        Ok(work)
    }

    /// Fails once closing has begun. Long work calls it regularly, so that closing does not wait
    /// for the rest of the work.
    ///
    /// # Errors
    /// `Invalid` once closing has begun.
    pub(super) fn check_open(&self) -> Result<()> {
        if self.begun.load(Ordering::SeqCst) { Err(Error::invalid("the archive is being closed")) } else { Ok(()) }
    }

    /// Refuses new work and waits until none is in progress. If there is any, `before` runs before
    /// the wait.
    pub(super) fn shut(&self, before: impl FnOnce()) -> RwLockWriteGuard<'_, ()> {
        self.begun.store(true, Ordering::SeqCst);
        self.gate.try_write().unwrap_or_else(|| {
            before();
            self.gate.write()
        })
    }
}
