//! Storage wrapper for remote archives: aborts the rescue on the first transport error instead of
//! treating it as damage.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use crate::error::{Error, Result};
use crate::storage::Storage;

/// Storage that remembers the first failed request.
pub(super) struct StrictStorage {
    storage: Arc<dyn Storage>,
    failed: OnceLock<Error>,
}

impl StrictStorage {
    pub(super) fn of(storage: Arc<dyn Storage>) -> StrictStorage {
        StrictStorage { storage, failed: OnceLock::new() }
    }

    /// Returns the first failed request, regardless of later results.
    ///
    /// # Errors
    /// That of the first failed request.
    pub(super) fn check(&self) -> Result<()> {
        self.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Records an I/O error and returns `Stale`, so that it is not treated as local damage.
    fn record_failure<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| match error {
            Error::Io { .. } => {
                let _ = self.failed.set(error);
                Error::Stale
            }
            error => error,
        })
    }
}

impl Storage for StrictStorage {
    fn len(&self) -> Result<u64> {
        self.record_failure(self.storage.len())
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.check().map_err(|_| Error::Stale)?;
        self.record_failure(self.storage.read_at(offset, out))
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
        self.record_failure(self.storage.next_data(offset))
    }

    fn read_only(&self) -> bool {
        true
    }
}

fn only_read() -> Error {
    Error::ReadOnly("a rescue only reads".into())
}
