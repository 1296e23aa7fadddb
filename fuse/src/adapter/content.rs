//! Requests on file content: writing, fallocate(2), copies, and SEEK_DATA and SEEK_HOLE.

use std::sync::Arc;

use fuser::{INodeNo, ReplyLseek, Request, WriteFlags};
use lockbox::fs::{FileSystem, SetAttributes};
use lockbox::{Error, Result};

use super::context::Adapter;
use super::reply::MAX_COPY;
use crate::convert::{self, Allocation, ino};
use crate::errno::errno;
use crate::kernel_cache::KernelCache;

impl Adapter {
    /// Accepts the data of a WRITE. After replying, the caller starts early writeback of dirty
    /// data.
    pub(super) fn write_content(&self, number: INodeNo, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.removed_capabilities.forget(self.live_inode(number)?);
        let kill = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let set = SetAttributes { kill_set_id: true, keeps_times: true, ..SetAttributes::default() };
        let ready = if kill { self.fs.set_attributes(ino(number), &set).map(drop) } else { Ok(()) };
        let written = ready.and_then(|()| self.fs.write_buffered(ino(number), offset, data));
        self.cache.content_written(&self.fs, number, kill);
        if written.is_err() {
            self.cache.record_refused_write(number, data.len());
        }
        written
    }

    /// Executes fallocate(2). The kernel keeps the times, even where it sends none (before Linux
    /// 6.1, except fixed stable kernels): it would neither show nor keep times set here, since it
    /// trusts and stores its own (KERNEL-1, KERNEL-8).
    pub(super) fn allocate_content(
        &self,
        request: &Request,
        number: INodeNo,
        offset: u64,
        length: u64,
        mode: i32,
    ) -> Result<()> {
        let (file, kill) = (self.live_inode(number)?, request.uid() != 0);
        self.removed_capabilities.forget(file);
        let done = convert::allocation(mode).and_then(|how| match how {
            Allocation::Punch => self.fs.punch_hole(file, offset, length, kill),
            Allocation::Zero { keep_size } => self.fs.zero_range(file, offset, length, keep_size, kill),
            Allocation::Plain { keep_size } => {
                self.fs.allocate(file, offset, length, keep_size, kill, self.host_free())
            }
        });
        self.cache.content_changed(&self.fs, number, kill);
        done
    }

    /// Copies a range. The kernel has already written its dirty pages of both ranges, and drops
    /// those of the target afterwards.
    pub(super) fn copy_content(
        &self,
        request: &Request,
        (source, from): (INodeNo, u64),
        (target, to): (INodeNo, u64),
        length: u64,
    ) -> Result<u64> {
        self.removed_capabilities.forget(self.live_inode(target)?);
        let kill = request.uid() != 0;
        let copied = self.fs.copy_range(ino(source), from, ino(target), to, length.min(MAX_COPY.into()), kill);
        self.cache.content_changed(&self.fs, target, kill);
        copied
    }
}

/// Resolves lseek(2) with the given functions for data and holes.
pub(super) fn resolve_seek(
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
            resolve_seek(self.offset, self.whence, &|from| fs.next_data(file, from), &|from| fs.next_hole(file, from));
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
