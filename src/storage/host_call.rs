//! Interruptible host calls, repeated after EINTR.
//!
//! # Why a repeated fsync loses nothing
//! After a failed fsync(2) a second one cannot be trusted: the host reports a lost write once, and
//! may then mark its page as clean. EINTR is not such a report: it means that the call ended early.
//! Linux keeps the error of a failed writeback with the file (EIO, ENOSPC, EDQUOT) until a sync of
//! the same descriptor returns it (fsync(2), a write with RWF_DSYNC), and file systems on which
//! writeback itself can be interrupted (NFS, SMB) leave the page dirty. So the repeated call does
//! the remaining work or returns the error, and every error except EINTR is returned at once. (A
//! FUSE host that replies EINTR to a WRITE and drops it would break this, like one that replies 0.)
//!
//! The methods of [`std::fs::File`] (`sync_all`, `sync_data`, `set_len`, `open`) repeat themselves.
//! All other interruptible host calls go through this module: `clippy.toml` forbids the bare calls.
#![expect(clippy::disallowed_methods, reason = "the place that repeats them")]

use std::io::IoSlice;
use std::os::fd::AsFd;

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, ReadWriteFlags, Result, pwritev2, retry_on_intr};

/// Makes a file, or the names of a directory, durable.
pub fn sync(file: impl AsFd) -> Result<()> {
    retry_on_intr(|| rustix::fs::fsync(&file))
}

/// Makes the names of a directory durable. Some network and FUSE file systems without directory
/// sync return EINVAL, which is ignored.
pub(crate) fn sync_directory(directory: impl AsFd) -> Result<()> {
    match sync(directory) {
        Err(Errno::INVAL) => Ok(()),
        synced => synced,
    }
}

/// Makes content and length of a file durable.
pub(crate) fn sync_data(file: impl AsFd) -> Result<()> {
    retry_on_intr(|| rustix::fs::fdatasync(&file))
}

/// Writes `data` and makes it durable without waiting for other dirty pages of the file; returns
/// the bytes written.
pub(crate) fn write_synced(file: impl AsFd, offset: u64, data: &[u8]) -> Result<usize> {
    retry_on_intr(|| pwritev2(&file, &[IoSlice::new(data)], offset, ReadWriteFlags::DSYNC))
}

pub(crate) fn sync_file_system(file: impl AsFd) -> Result<()> {
    retry_on_intr(|| rustix::fs::syncfs(&file))
}

pub(crate) fn set_length(file: impl AsFd, length: u64) -> Result<()> {
    retry_on_intr(|| rustix::fs::ftruncate(&file, length))
}

/// Allocates, punches or zeroes a range, depending on `flags`.
pub(crate) fn allocate(file: impl AsFd, flags: FallocateFlags, offset: u64, length: u64) -> Result<()> {
    retry_on_intr(|| rustix::fs::fallocate(&file, flags, offset, length))
}
