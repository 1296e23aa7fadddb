//! Source of an archive to open: a path or an opened storage.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{FileStorage, LockMode, Storage};
use crate::error::Result;

/// Source of an archive to open.
#[derive(Clone, Copy)]
pub enum ArchiveSource<'a> {
    /// Host file; it is opened and locked when the archive is opened.
    File(&'a Path),
    /// Opened storage, such as a remote archive. The caller ensures that there is no other writer,
    /// or that one is detected.
    Storage(&'a Arc<dyn Storage>),
}

impl ArchiveSource<'_> {
    /// Returns the storage; a file is opened and locked.
    ///
    /// # Errors
    /// Same as [`FileStorage::open`].
    pub(crate) fn open(self, mode: LockMode) -> Result<Arc<dyn Storage>> {
        Ok(match self {
            ArchiveSource::File(path) => Arc::new(FileStorage::open(path, mode)?),
            ArchiveSource::Storage(storage) => Arc::clone(storage),
        })
    }
}

impl<'a> From<&'a Path> for ArchiveSource<'a> {
    fn from(path: &'a Path) -> ArchiveSource<'a> {
        ArchiveSource::File(path)
    }
}

impl<'a> From<&'a PathBuf> for ArchiveSource<'a> {
    fn from(path: &'a PathBuf) -> ArchiveSource<'a> {
        ArchiveSource::File(path)
    }
}

impl<'a> From<&'a Arc<dyn Storage>> for ArchiveSource<'a> {
    fn from(storage: &'a Arc<dyn Storage>) -> ArchiveSource<'a> {
        ArchiveSource::Storage(storage)
    }
}
