//! Requests that change file content, with the cache invalidation that they need.

use fuser::{INodeNo, Request, WriteFlags};
use lockbox::Result;
use lockbox::fs::SetAttributes;

use super::context::Adapter;
use super::reply::MAX_COPY;
use crate::convert::{self, Allocation, ino};

impl Adapter {
    /// Accepts the data of a WRITE. After replying, the caller starts early writeback of dirty
    /// data.
    pub(super) fn write_content(&self, number: INodeNo, offset: u64, data: &[u8], flags: WriteFlags) -> Result<()> {
        self.removed_capabilities.forget(self.live_inode(number)?);
        let kill = flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID);
        let set = SetAttributes { kill_set_id: true, brings_times: true, ..SetAttributes::default() };
        let ready = if kill { self.fs.set_attributes(ino(number), &set).map(drop) } else { Ok(()) };
        let written = ready.and_then(|()| self.fs.accept(ino(number), offset, data));
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
