//! Where an archive is that somebody opens.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{FileStorage, LockMode, Storage};
use crate::error::Result;

/// Where an archive is.
#[derive(Clone, Copy)]
pub enum Site<'a> {
    /// A file of the host: it is opened and locked by whoever opens the archive.
    File(&'a Path),
    /// Elsewhere: the caller has opened what holds its bytes, and sees to it that nobody writes there, or that it is noticed.
    Opened(&'a Arc<dyn Storage>),
}

impl Site<'_> {
    /// What holds its bytes; a file is locked.
    ///
    /// # Errors
    /// As of [`FileStorage::open`].
    pub(crate) fn open(self, mode: LockMode) -> Result<Arc<dyn Storage>> {
        Ok(match self {
            Site::File(path) => Arc::new(FileStorage::open(path, mode)?),
            Site::Opened(storage) => Arc::clone(storage),
        })
    }
}

impl<'a> From<&'a Path> for Site<'a> {
    fn from(path: &'a Path) -> Site<'a> {
        Site::File(path)
    }
}

impl<'a> From<&'a PathBuf> for Site<'a> {
    fn from(path: &'a PathBuf) -> Site<'a> {
        Site::File(path)
    }
}

impl<'a> From<&'a Arc<dyn Storage>> for Site<'a> {
    fn from(storage: &'a Arc<dyn Storage>) -> Site<'a> {
        Site::Opened(storage)
    }
}
