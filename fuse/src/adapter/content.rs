//! Requests on the content of files (writing, fallocate(2), copies, SEEK_DATA and SEEK_HOLE) and of
//! directories.
//!
//! A listing ends where the directory ended when it was opened, so that renaming while listing
//! terminates.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use fuser::{Errno, FileHandle, INodeNo, OpenFlags, ReplyDirectoryPlus, ReplyLseek, Request, WriteFlags};
use lockbox::fs::SetAttributes;
use lockbox::{Error, Result};

use super::context::{Adapter, free_bytes};
use crate::convert::{self, Allocation, GENERATION, MAX_COPY, ino, reply_offset, updates_atime};

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
            Allocation::Zero { keep_size } => self.fs.zero_range(file, offset, length, keep_size, kill),
            Allocation::Plain { keep_size } => {
                self.fs.allocate(file, offset, length, keep_size, kill, free_bytes(self.host.as_ref()))
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

impl Adapter {
    /// Replies to lseek(2) after writeback. The kernel seeks without writing its dirty pages first,
    /// so a copying program would skip their data. Only an inode with a writer has dirty pages
    /// (KERNEL-3). Dropping its cached pages writes them, by WRITE requests that the event loops
    /// answer; hence the thread.
    ///
    /// Data that may not have arrived must not count as a hole. The end of the data is unknown too,
    /// because the kernel's size is ahead. So the reply is ENOSYS then: the kernel seeks by itself,
    /// in all files of the mount from now on, and takes each for data up to its size.
    pub(super) fn seek_content(&self, number: INodeNo, offset: i64, whence: i32, reply: ReplyLseek) {
        let (fs, file) = (Arc::clone(&self.fs), ino(number));
        let seek =
            move || resolve_seek(offset, whence, &|from| fs.next_data(file, from), &|from| fs.next_hole(file, from));
        if !self.cache.writers.has_writer(number.0) {
            return reply_offset(seek(), reply);
        }
        let cache = Arc::clone(&self.cache);
        let job = move || {
            if cache.write_back_for_seek(number, offset.max(0)) {
                return reply_offset(seek(), reply);
            }
            tracing::warn!(
                "the kernel did not finish the writeback of a file in time: holes of files are reported as data \
                 until the next mount"
            );
            reply.error(Errno::ENOSYS);
        };
        if let Err(error) = std::thread::Builder::new().name("seek".into()).spawn(job) {
            // The reply was dropped with the closure, which reported a failure to the kernel.
            tracing::error!(%error, "cannot start a thread for a seek");
        }
    }

    pub(super) fn begin_listing(&self, directory: INodeNo, flags: OpenFlags) -> Result<FileHandle> {
        let bound = self.current_bound(directory)?;
        self.activity.directory_opened();
        if updates_atime(flags) && self.snapshot_inode(directory).is_none() {
            self.note_access(directory);
        }
        Ok(FileHandle(self.open_directories.open(bound)))
    }

    fn current_bound(&self, directory: INodeNo) -> Result<u64> {
        match self.snapshot_inode(directory) {
            Some(inode) => inode.listing_bound(),
            None => self.cache.check_visible(directory).and_then(|()| self.fs.directory_bound(ino(directory))),
        }
    }

    /// Returns the end of a listing; reading from the start refreshes it.
    fn bound(&self, directory: INodeNo, handle: FileHandle, offset: u64) -> Result<u64> {
        let bound = self.open_directories.bound(handle.0).ok_or(Error::Stale)?;
        self.cache.check_visible(directory)?;
        if offset > 0 {
            return Ok(bound);
        }
        let bound = self.current_bound(directory)?;
        self.open_directories.rewind(handle.0, bound);
        Ok(bound)
    }

    pub(super) fn list(
        &self,
        directory: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let bound = self.bound(directory, handle, offset)?;
        if let Some(inode) = self.snapshot_inode(directory) {
            return inode.list(offset, bound, reply);
        }
        let (mut any, mut is_full) = (false, false);
        let listed = self.fs.list_directory(ino(directory), offset, bound, true, &mut |entry, attributes| {
            let Some(a) = attributes else {
                tracing::warn!(directory = directory.0, inode = entry.ino.0, "a listing leaves out a damaged entry");
                return ControlFlow::Continue(());
            };
            any = true;
            // The reply has one timeout for name and attributes, and names never expire. The
            // kernel drops attributes that it requested before an invalidation.
            if self.cache.writers.has_writer(a.ino.0) {
                self.cache.invalidate_attributes(INodeNo(a.ino.0));
            }
            let name = OsStr::from_bytes(entry.name);
            let lifetime = self.cache.entry_timeout();
            is_full =
                reply.add(INodeNo(a.ino.0), entry.cookie, name, &lifetime, &self.cache.to_file_attr(a), GENERATION);
            stop_if_full(is_full)
        });
        let is_complete = tolerate_damage(listed, any, directory)?;
        if is_full || !is_complete { Ok(()) } else { self.list_snapshot_dir(directory, offset, reply) }
    }

    pub(super) fn end_listing(&self, handle: FileHandle) {
        self.open_directories.close(handle.0);
        self.activity.directory_closed();
    }
}

/// Tolerates damage after the first entry: a damaged entry fails the request only if no other entry
/// was added, and is logged. Returns whether the listing is complete up to the requested end. If
/// not, no entry may be added after the damage: the next request starts there and fails. A program
/// that took the listing for complete could delete the missing entries in a copy.
pub(super) fn tolerate_damage(listed: Result<()>, any: bool, directory: INodeNo) -> Result<bool> {
    match listed {
        Ok(()) => Ok(true),
        Err(Error::Damaged(reason)) if any => {
            tracing::warn!(directory = directory.0, reason, "a listing leaves out a damaged entry");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

pub(super) fn stop_if_full(is_full: bool) -> ControlFlow<()> {
    if is_full { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}
