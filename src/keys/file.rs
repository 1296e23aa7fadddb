//! Reads the header of an archive's file without a lock on it.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use super::header::Header;
use crate::error::{Error, Result};
use crate::storage::{ArchiveSource, Storage};

/// Reads the archive's header, regardless of locks on the archive.
///
/// # Errors
/// Like [`Header::read`], and `NotArchive` if it is not a regular file.
pub(crate) fn read_header<'a>(site: impl Into<ArchiveSource<'a>>) -> Result<Header> {
    match site.into() {
        ArchiveSource::File(path) => Header::read(&HeaderFile::open(path)?),
        ArchiveSource::Storage(storage) => Header::read(&**storage),
    }
}

/// The archive file without a lock: enough to read the header, which survives a concurrent change
/// of one copy.
struct HeaderFile {
    file: File,
    length: u64,
}

impl HeaderFile {
    fn open(path: &Path) -> Result<HeaderFile> {
        let failed = |source| Error::io(format!("cannot open {}", path.display()), source);
        // A FIFO would block the open for ever, so the kind is looked at first.
        let metadata = std::fs::metadata(path).map_err(failed)?;
        if metadata.is_dir() {
            return Err(Error::NotArchive("it is a directory".into()));
        }
        if !metadata.is_file() {
            return Err(Error::NotArchive("it is no regular file".into()));
        }
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.size();
        Ok(HeaderFile { file, length })
    }
}

impl Storage for HeaderFile {
    fn len(&self) -> Result<u64> {
        Ok(self.length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.file.read_exact_at(out, offset).map_err(|e| Error::io("cannot read the header", e))
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(refuse_write())
    }

    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(refuse_write())
    }

    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(refuse_write())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(refuse_write())
    }

    fn barrier(&self) -> Result<()> {
        Err(refuse_write())
    }

    fn evict(&self, _offset: u64, _length: u64) -> Result<()> {
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<std::ops::Range<u64>>> {
        Ok((offset < self.length).then_some(offset..self.length))
    }

    fn read_only(&self) -> bool {
        true
    }
}

fn refuse_write() -> Error {
    Error::ReadOnly("the file is not locked".into())
}
