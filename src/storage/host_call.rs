//! Host calls that a signal can interrupt (EINTR), each repeated until it returns anything else.
//!
//! # Why a repeated fsync loses nothing
//! After a failed fsync(2) no second one may be believed: the host reports a lost write once, and
//! may then call its page clean. EINTR is no such report. It says that the call ended before it was
//! done; Linux keeps the error of a failed write-back with the file (EIO, ENOSPC, EDQUOT) until an
//! fsync(2) of the same descriptor returns it, and file systems with a write-back that itself is
//! interrupted (NFS, SMB) leave the page dirty. So the call that follows does the rest of the work
//! or returns the error, and every error but EINTR is returned at once. (A FUSE host that answers a
//! WRITE with EINTR and forgets it would deceive this, as one that answers 0 would.)
//!
//! The methods of [`std::fs::File`] (`sync_all`, `sync_data`, `set_len`, `open`) repeat themselves.
//! All other calls of the host go through here: `clippy.toml` refuses the bare calls.
#![expect(clippy::disallowed_methods, reason = "the place that repeats them")]

use std::os::fd::AsFd;

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, Result, retry_on_intr};

/// Makes a file, or the names of a directory, durable.
pub fn sync(file: impl AsFd) -> Result<()> {
    retry_on_intr(|| rustix::fs::fsync(&file))
}

/// Makes the names of a directory durable. File systems without the notion (some network and FUSE
/// ones) answer EINVAL; there is nothing to wait for.
pub fn sync_directory(directory: impl AsFd) -> Result<()> {
    match sync(directory) {
        Err(Errno::INVAL) => Ok(()),
        synced => synced,
    }
}

/// Makes the content of a file durable, and its length.
pub fn sync_data(file: impl AsFd) -> Result<()> {
    retry_on_intr(|| rustix::fs::fdatasync(&file))
}

/// Makes the whole file system of a file durable.
pub fn sync_file_system(file: impl AsFd) -> Result<()> {
    retry_on_intr(|| rustix::fs::syncfs(&file))
}

/// Sets the length of a file.
pub fn set_length(file: impl AsFd, length: u64) -> Result<()> {
    retry_on_intr(|| rustix::fs::ftruncate(&file, length))
}

/// Allocates, punches or zeroes a range, as `flags` say.
pub fn allocate(file: impl AsFd, flags: FallocateFlags, offset: u64, length: u64) -> Result<()> {
    retry_on_intr(|| rustix::fs::fallocate(&file, flags, offset, length))
}
