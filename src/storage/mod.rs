//! Where an archive's bytes are: one trait, and the file, memory and crash-simulating implementations, and that of another process; and names of the host's files.

mod archive_source;
#[cfg(test)]
mod counting;
mod file;
pub mod host_call;
mod host_entry;
pub mod ipc;
#[cfg(any(test, fuzzing))]
mod memory;
#[cfg(any(test, fuzzing))]
pub(crate) mod simulated;
#[cfg(any(test, fuzzing))]
mod sparse_image;

pub use archive_source::ArchiveSource;
#[cfg(test)]
pub(crate) use counting::CountingStorage;
pub use file::{FileStorage, LockMode};
pub use host_entry::{FileIdentity, HostEntry, names, rename_to_free_name};
pub use ipc::{IpcStorage, serve_storage};
#[cfg(any(test, fuzzing))]
pub(crate) use memory::MemoryStorage;

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Bytes of the ballast: the blocks that are kept for deletes and commits (1 MiB) may all be
/// overwritten once, and 256 records or small entries of the log.
pub(crate) const BALLAST: u64 = 2 << 20;

/// A growable array of bytes with barriers. All methods may be called from several threads at once.
///
/// # Contract
/// STORAGE-1  `write_at`, `punch`, `allocate` and `set_len` may reach the medium in any order, in parts of 512 bytes, or not at all,
///     until a `barrier` that was called after them has returned `Ok`.
/// STORAGE-2  After a failed `barrier` nothing is known about any write since the last good one; the caller latches.
/// STORAGE-3  `read_at` sees every earlier write of this process, whether or not it is on the medium; after `barrier` and `evict` it reads the medium.
/// STORAGE-4  Where [`Storage::has_atomic_barrier`] says so, everything between two barriers reaches the medium with the second one, all of it at once or nothing, in the
///     order of the barriers; what no barrier covered dies with the process. A barrier that fails may have been carried out all the same, as a whole.
/// STORAGE-5  What is written into a [`Replacement`] is seen by nobody who looks at this storage until its `publish`, which makes all of it durable in the place of
///     what is here, at once. Without that, or when it fails, here is what was here; one that fails may have been carried out all the same, as a whole. Afterwards this
///     storage is only read, and shows what it showed.
/// STORAGE-6  After `keep_ballast`, where overwriting takes room, the host has allocated
///     [`BALLAST`] bytes that nothing is ever written to, or `cut_ballast` was called since, or the
///     host had no room for them. They lie on the medium and outlive the process. Growth takes none
///     of them: it is refused while they do not fit behind the new end.
pub trait Storage: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> Result<u64>;

    fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Fills `out` from `offset`; `Damaged("archive is truncated ...")` when the storage ends before.
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Says that the range is about to be read, so that the medium can fetch it while others are read. A hint: nothing waits for it, nothing
    /// fails by it, and what is then read is read and verified all the same.
    fn will_need(&self, _offset: u64, _length: u64) {}

    /// Whether a read takes a way to another machine and back, so that it pays to ask for much that is likely to be read.
    fn is_remote(&self) -> bool {
        false
    }

    /// Writes all of `data`, growing the storage when needed.
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// Makes the range really allocated on the host (zeros where it was a hole), growing the storage when needed.
    /// `NoSpace` when the host is full; then nothing changed that matters.
    fn allocate(&self, offset: u64, length: u64) -> Result<()>;

    /// Keeps room for overwriting allocated ranges, where that takes room (STORAGE-6). Other
    /// storages keep nothing.
    fn keep_ballast(&self) {}

    /// Gives that room back to the host, which may give it to the first program that asks; answers
    /// whether there was any.
    fn cut_ballast(&self) -> bool {
        false
    }

    /// Gives the range back to the host; it reads as zeros. `Unsupported` where the host refuses.
    fn punch(&self, offset: u64, length: u64) -> Result<()>;

    fn set_len(&self, length: u64) -> Result<()>;

    /// Returns when everything before it is on the medium.
    fn barrier(&self) -> Result<()>;

    /// Whether STORAGE-4 holds. Then one barrier makes durable what elsewhere takes two, no record is ever found that names what is not there, and nothing has to
    /// be overwritten to be gone: whoever writes there may leave out what only a torn write makes necessary.
    fn has_atomic_barrier(&self) -> bool {
        false
    }

    /// Drops cached copies of the range, which must have been covered by a barrier, so that the next read comes from the medium.
    fn evict(&self, offset: u64, length: u64) -> Result<()>;

    /// The next range at or behind `offset` that holds data as the host sees it (SEEK_DATA), or None.
    /// A host without the notion answers with the whole rest.
    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>>;

    /// Bytes that the host has really allocated, as far as it tells; without holes the length.
    fn allocated(&self) -> Result<u64> {
        self.len()
    }

    /// Checks that the file still has a name and at least the length seen last: that what is written now can be found later.
    ///
    /// # Errors
    /// `Damaged` when it was cut, removed or replaced; any other when the host does not tell.
    fn check_identity(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether the file has no name any more: its content is lost when it is closed. A reader
    /// of a file that was replaced loses nothing.
    fn is_unlinked(&self) -> bool {
        false
    }

    /// Bytes that barriers covered and that this host alone has, of an archive that is elsewhere: who opens it there does not find them, and nobody is to be told that
    /// they were there.
    ///
    /// # Errors
    /// When nobody tells.
    fn pending_upload_bytes(&self) -> Result<u64> {
        Ok(0)
    }

    /// Begins what is to take the place of all that is here: an empty storage beside this one, which nobody writes to meanwhile.
    ///
    /// # Errors
    /// `Unsupported` where that is no matter of the storage, as of a file, which another one can take the name of.
    fn begin_replace(&self) -> Result<Box<dyn Replacement + '_>> {
        Err(Error::Unsupported("here nothing can take the place of a whole archive".into()))
    }

    /// The uid that owns the file, as it is open; None when it is not a file of this host.
    fn owner(&self) -> Result<Option<u32>> {
        Ok(None)
    }

    /// Whether writes are refused by the way it was opened.
    fn read_only(&self) -> bool;
}

/// What is being written to take the place of all that a storage has (STORAGE-5). Dropped before [`Replacement::publish`], it goes.
pub trait Replacement {
    /// Where it is written. A barrier there makes nothing durable.
    fn storage(&self) -> Arc<dyn Storage>;

    /// Puts it in the place of what is there.
    ///
    /// # Errors
    /// As of a barrier.
    fn publish(self: Box<Self>) -> Result<()>;
}

/// End of a range, which the host counts in signed 64 bits.
fn end_of(offset: u64, length: u64) -> Result<u64> {
    match offset.checked_add(length) {
        Some(end) if end <= i64::MAX as u64 => Ok(end),
        _ => Err(Error::invalid(format!("range beyond the largest file: offset={offset} length={length}"))),
    }
}

/// The storage ends before what an authentic structure or the layout says must be there.
fn truncated(length: u64, needed: u64) -> Error {
    Error::damaged(format!("archive is truncated: length={length} needed={needed}"))
}
