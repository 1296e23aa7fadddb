//! The bytes of an archive that is elsewhere: that a request failed says nothing of what is there, so the rescue ends with it, and takes nothing for lost.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::storage::Storage;

/// See above.
pub(super) struct Asked {
    storage: Arc<dyn Storage>,
    failed: OnceLock<Error>,
}

impl Asked {
    pub(super) fn of(storage: Arc<dyn Storage>) -> Asked {
        Asked { storage, failed: OnceLock::new() }
    }

    /// Whatever became of the rest, when a request failed.
    ///
    /// # Errors
    /// That of the first request that failed.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// No failure of a medium, which would be damage of one place.
    fn told<T>(&self, asked: Result<T>) -> Result<T> {
        asked.map_err(|error| match error {
            Error::Io { .. } => {
                let _ = self.failed.set(error);
                Error::Stale
            }
            error => error,
        })
    }
}

impl Storage for Asked {
    fn len(&self) -> Result<u64> {
        self.told(self.storage.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check().map_err(|_| Error::Stale)?;
        self.told(self.storage.read_at(offset, out))
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.storage.will_need(offset, length);
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(only_read())
    }

    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(only_read())
    }

    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(only_read())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(only_read())
    }

    fn barrier(&self) -> Result<()> {
        Err(only_read())
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        self.storage.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.told(self.storage.next_data(offset))
    }

    fn read_only(&self) -> bool {
        true
    }
}

fn only_read() -> Error {
    Error::ReadOnly("a rescue only reads".into())
}
