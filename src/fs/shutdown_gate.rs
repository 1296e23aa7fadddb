//! Nothing is written behind a closed record: who works beside the requests of a mount, and the one who closes, meet here.
//!
//! # Invariant
//! Closing takes space at the end of the file away and then says in its record how long the file is. Whoever else gets space meanwhile
//! lengthens the file in between, and the record would claim blocks that were cut off: the archive would be refused as truncated. So work
//! that an operator asks for ends before closing begins, and none begins afterwards. Requests of a mount have ended by then.

use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::{Error, Result};

#[derive(Default)]
pub(super) struct Closing {
    begun: AtomicBool,
    gate: RwLock<()>,
}

impl Closing {
    /// Held during the work. Not to be taken twice by one thread: who closes may come in between.
    pub(super) fn work(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let work = self.gate.read();
        self.check()?;
        Ok(work)
    }

    /// Long work asks now and then, so that closing does not wait for the rest of it.
    ///
    /// # Errors
    /// `Invalid` once closing has begun.
    pub(super) fn check(&self) -> Result<()> {
        if self.begun.load(Ordering::SeqCst) { Err(Error::invalid("the archive is being closed")) } else { Ok(()) }
    }

    /// Returns when no work is under way. If there is any, `before` comes before the waiting.
    pub(super) fn begin(&self, before: impl FnOnce()) -> RwLockWriteGuard<'_, ()> {
        self.begun.store(true, Ordering::SeqCst);
        self.gate.try_write().unwrap_or_else(|| {
            before();
            self.gate.write()
        })
    }
}
