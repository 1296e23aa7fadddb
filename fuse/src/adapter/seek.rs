//! SEEK_DATA and SEEK_HOLE, after the kernel has written back its cached pages of the file.

use std::sync::Arc;

use fuser::{INodeNo, ReplyLseek};
use lockbox::fs::FileSystem;
use lockbox::{Error, Result};

use crate::convert::ino;
use crate::errno::errno;
use crate::kernel_cache::KernelCache;

/// Resolves lseek(2) with the given functions for data and holes.
pub(super) fn resolve(
    offset: i64,
    whence: i32,
    next_data: &dyn Fn(u64) -> Result<u64>,
    next_hole: &dyn Fn(u64) -> Result<u64>,
) -> Result<i64> {
    // No file has anything before its first byte.
    let from = u64::try_from(offset).map_err(|_| Error::NoSuchRange)?;
    let found = match whence {
        nix::libc::SEEK_DATA => next_data(from)?,
        nix::libc::SEEK_HOLE => next_hole(from)?,
        _ => return Err(Error::invalid(format!("whence={whence}"))),
    };
    // Offsets end at 2^63-1.
    Ok(i64::try_from(found).unwrap_or(i64::MAX))
}

/// One LSEEK request.
pub(super) struct SeekRequest {
    pub(super) number: INodeNo,
    pub(super) offset: i64,
    pub(super) whence: i32,
}

impl SeekRequest {
    fn reply(&self, fs: &FileSystem, reply: ReplyLseek) {
        let file = ino(self.number);
        let found =
            resolve(self.offset, self.whence, &|from| fs.next_data(file, from), &|from| fs.next_hole(file, from));
        match found {
            Ok(found) => reply.offset(found),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Replies after writeback. The kernel seeks without writing its dirty pages first, so a
    /// copying program would skip their data. Only an inode with a writer has dirty pages
    /// (KERNEL-3). Dropping its cached pages writes them, by WRITE requests that the event loops
    /// answer; hence the thread.
    pub(super) fn serve(self, fs: &Arc<FileSystem>, cache: &Arc<KernelCache>, reply: ReplyLseek) {
        if !cache.has_writer(self.number.0) {
            return self.reply(fs, reply);
        }
        let (fs, cache) = (Arc::clone(fs), Arc::clone(cache));
        let job = move || {
            cache.drop_pages(self.number, self.offset.max(0));
            self.reply(&fs, reply);
        };
        if let Err(error) = std::thread::Builder::new().name("seek".into()).spawn(job) {
            // The reply was dropped with the closure, which reported a failure to the kernel.
            tracing::error!(%error, "no thread for a seek");
        }
    }
}
