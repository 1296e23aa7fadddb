//! Storage trait with file, in-memory, crash-simulating and IPC implementations; and names of host
//! files.

mod file;
pub mod host_call;
mod host_entry;
pub mod ipc;
#[cfg(any(test, debug_assertions))]
mod tests;

pub use file::{FileStorage, LockMode};
pub(crate) use host_entry::names;
pub use host_entry::{FileIdentity, HostEntry, rename_to_free_name};
pub use ipc::{IpcStorage, serve_storage};
#[cfg(test)]
pub(crate) use tests::CountingStorage;
#[cfg(any(test, debug_assertions))]
pub(crate) use tests::{MemoryStorage, simulated};

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Result};

/// Bytes of the ballast: enough to overwrite once all blocks reserved for deletes and commits (1
/// MiB), and 256 records or small log entries.
pub(crate) const BALLAST: u64 = 2 << 20;

/// Growable byte array with barriers. All methods may be called from several threads at once.
///
/// # Contract
/// STORAGE-1  `write_at`, `punch`, `allocate` and `set_len` may reach the medium in any order, in
///     parts of 512 bytes, or not at all, until a `barrier` called after them, or a `sync_range` of
///     the last write to these bytes, has returned `Ok`.
/// STORAGE-2  After a failed `barrier` or `sync_range` the state of all writes since the last
///     successful `barrier` is unknown; the caller rejects further writes (sticky error).
/// STORAGE-3  `read_at` sees every earlier write of this process, whether or not it is on the
///     medium; after `barrier` and `evict` it reads the medium.
/// STORAGE-4  If [`Storage::has_atomic_barrier`] holds, all writes between two barriers reach the
///     medium with the second one, atomically and in the order of the barriers. Writes not covered
///     by a barrier are lost when the process ends. A barrier that fails may still have taken
///     effect, as a whole.
/// STORAGE-5  Writes to a [`Replacement`] are invisible to readers of this storage until its
///     `publish`, which durably and atomically replaces the content of this storage. Without
///     `publish`, or if it fails, the old content remains; a `publish` that fails may still have
///     taken effect, as a whole. Afterwards this storage is only read, and still shows the old
///     content.
/// STORAGE-6  After `keep_ballast`, where overwriting needs new space, the host has allocated
///     [`BALLAST`] bytes that are never written, unless `cut_ballast` was called since or the host
///     had no space for them. They are on the medium and outlive the process. Growth does not use
///     them: it fails when they do not fit after the new end.
pub trait Storage: Send + Sync {
    /// Returns the length in bytes.
    fn len(&self) -> Result<u64>;

    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `out` from `offset`. Errors: `Damaged("archive is truncated ...")` when the storage
    /// ends before.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Hints that the range will be read soon, so that the medium can prefetch it. Never blocks or
    /// fails, and does not replace the read or its verification.
    fn will_need(&self, _offset: u64, _length: u64) {}

    /// Returns whether a read costs a network round trip, so that prefetching pays.
    fn is_remote(&self) -> bool {
        false
    }

    /// Writes all of `data`, growing the storage if needed. Like the other changes refused with
    /// `ReadOnly` by a storage that has no implementation of its own.
    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(only_readable())
    }

    /// Allocates the range on the host (holes read as zeros), growing the storage if needed.
    /// Errors: `NoSpace` when the host is full; the content is then unchanged.
    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(only_readable())
    }

    /// Allocates the ballast on storage where overwriting needs new space (STORAGE-6); otherwise
    /// does nothing.
    fn keep_ballast(&self) {}

    /// Returns the ballast to the host, where other programs may take the space; returns whether
    /// there was any.
    fn cut_ballast(&self) -> bool {
        false
    }

    /// Deallocates the range, which then reads as zeros. Errors: `Unsupported` where the host
    /// refuses.
    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(only_readable())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(only_readable())
    }

    /// Hints that the range, which was just written, is complete, so that the host can write it to
    /// the medium before the next barrier waits for it. Makes nothing durable, never fails, and may
    /// wait for the medium.
    fn start_writeback(&self, _range: Range<u64>) {}

    /// Waits until all earlier writes are durable. Fails also after a failed call that may have
    /// taken the error of an earlier write.
    fn barrier(&self) -> Result<()> {
        Err(only_readable())
    }

    /// Waits until `data`, which was just written at `offset`, is durable. Where
    /// [`Storage::has_range_sync`] holds, earlier writes may stay volatile. An error is final, like
    /// that of a barrier.
    fn sync_range(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        self.barrier()
    }

    /// Returns whether [`Storage::sync_range`] waits for its range only and not for all earlier
    /// writes.
    fn has_range_sync(&self) -> bool {
        false
    }

    /// Returns whether STORAGE-4 holds. Then one barrier does the work of two, no recovered record
    /// names missing pages, and freed data need not be overwritten: the caller may skip every
    /// measure against torn writes.
    fn has_atomic_barrier(&self) -> bool {
        false
    }

    /// Drops cached copies of the range, which must be covered by a barrier, so that the next read
    /// comes from the medium.
    fn evict(&self, offset: u64, length: u64) -> Result<()>;

    /// Returns the next range at or after `offset` that holds data (SEEK_DATA), or `None`. Hosts
    /// without holes return the whole rest.
    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>>;

    /// Returns the bytes allocated on the host if known, otherwise the length.
    fn allocated(&self) -> Result<u64> {
        self.len()
    }

    /// Checks that the file still has a name and at least its known length, so that new writes can
    /// be found later. Errors: `Damaged` when it was truncated, removed or replaced; other errors
    /// when the host cannot tell.
    fn check_identity(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether the file has no name any more: its content is lost on close. Does not hold
    /// for a read-only replaced file, of which nothing is lost.
    fn is_unlinked(&self) -> bool {
        false
    }

    /// Returns the bytes of a remote archive that barriers covered but that exist on this host
    /// only. Other clients do not find them, so their commit must not be recorded as seen. Errors:
    /// when the count cannot be determined.
    fn pending_upload_bytes(&self) -> Result<u64> {
        Ok(0)
    }

    /// Creates an empty [`Replacement`] for the whole content of this storage; no writes to this
    /// storage may happen until it is published or dropped. Errors: `Unsupported` where the storage
    /// has no such operation, as for a file, which is replaced by rename.
    fn begin_replace(&self) -> Result<Box<dyn Replacement + '_>> {
        Err(Error::Unsupported("here nothing can take the place of a whole archive".into()))
    }

    /// Returns the uid of the open file's owner; `None` for storage that is not a host file.
    fn owner(&self) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Returns whether it was opened read-only.
    fn read_only(&self) -> bool;
}

/// New content that replaces the whole content of a storage (STORAGE-5). Discarded when dropped
/// before [`Replacement::publish`].
pub trait Replacement {
    /// Returns the storage for the new content. Its barriers make nothing durable.
    fn storage(&self) -> Arc<dyn Storage>;

    /// Replaces the old content. Errors: same as a barrier.
    fn publish(self: Box<Self>) -> Result<()>;
}

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
    /// Returns the storage; a file is opened and locked. Errors: same as [`FileStorage::open`].
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

fn only_readable() -> Error {
    Error::ReadOnly("this storage can only be read".into())
}

/// Returns the end of a range, checked against the host's signed 64-bit offsets.
fn end_of(offset: u64, length: u64) -> Result<u64> {
    match offset.checked_add(length) {
        Some(end) if end <= i64::MAX as u64 => Ok(end),
        _ => Err(Error::invalid(format!("range beyond the largest file: offset={offset} length={length}"))),
    }
}

/// Error for a storage that is shorter than an authentic structure or the layout requires.
fn truncated(length: u64, needed: u64) -> Error {
    Error::damaged(format!("archive is truncated: length={length} needed={needed}"))
}
