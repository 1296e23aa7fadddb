//! Where an archive is that somebody opens.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{FileStorage, LockMode, Storage};
use crate::error::Result;

/// Where an archive is.
#[derive(Clone, Copy)]
pub enum ArchiveSource<'a> {
    /// A file of the host: it is opened and locked by whoever opens the archive.
    File(&'a Path),
    /// Elsewhere: the caller has opened what holds its bytes, and sees to it that nobody writes there, or that it is noticed.
    Storage(&'a Arc<dyn Storage>),
}

impl ArchiveSource<'_> {
    /// What holds its bytes; a file is locked.
    ///
    /// # Errors
    /// As of [`FileStorage::open`].
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
