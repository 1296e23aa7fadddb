//! An archive in an ordinary file, locked against other processes.

use std::ops::Range;
use std::path::Path;

use super::Storage;
use crate::error::Result;

/// How a file is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Reading: several at once.
    Shared,
    /// Writing: alone.
    Exclusive,
}

/// A locked file.
pub struct FileStorage {}

impl FileStorage {
    /// Creates a new file with mode 0600 (refusing an existing one) and locks it for writing.
    pub fn create(path: &Path) -> Result<FileStorage> {
        let _ = path;
        todo!()
    }

    /// Opens and locks (open-file-description lock), then checks that the path still names the file.
    ///
    /// # Errors
    /// `InUse` when another process holds it in a conflicting way (the message names the process id when the host tells it),
    /// `NotFound`, `Io`, `NotArchive` when it is no regular file.
    pub fn open(path: &Path, mode: LockMode) -> Result<FileStorage> {
        let _ = (path, mode);
        todo!()
    }

    /// Makes the file's name durable: syncs its directory.
    pub fn sync_directory(&self) -> Result<()> {
        todo!()
    }
}

impl Storage for FileStorage {
    fn len(&self) -> Result<u64> {
        todo!()
    }
    fn read_at(&self, _offset: u64, _out: &mut [u8]) -> Result<()> {
        todo!()
    }
    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        todo!()
    }
    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    fn set_len(&self, _length: u64) -> Result<()> {
        todo!()
    }
    fn barrier(&self) -> Result<()> {
        todo!()
    }
    fn evict(&self, _offset: u64, _length: u64) -> Result<()> {
        todo!()
    }
    fn next_data(&self, _offset: u64) -> Result<Option<Range<u64>>> {
        todo!()
    }
    fn read_only(&self) -> bool {
        todo!()
    }
}
