//! Directory listings. A listing ends where the directory ended when it was opened, so that
//! renaming while listing terminates.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;

use fuser::{FileHandle, INodeNo, OpenFlags, ReplyDirectory, ReplyDirectoryPlus};
use lockbox::{Error, Result};

use super::context::Adapter;
use super::reply::stop_if_full;
use crate::convert::{self, GENERATION, ino, updates_atime};

impl Adapter {
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
        reply: &mut ReplyDirectory,
    ) -> Result<()> {
        let bound = self.bound(directory, handle, offset)?;
        if let Some(inode) = self.snapshot_inode(directory) {
            return inode.list(offset, bound, reply);
        }
        let (mut any, mut is_full) = (false, false);
        let listed = self.fs.list_directory(ino(directory), offset, bound, false, &mut |entry, _| {
            any = true;
            let kind = convert::file_type(entry.file_type.into());
            is_full = reply.add(INodeNo(entry.ino.0), entry.cookie, kind, OsStr::from_bytes(entry.name));
            stop_if_full(is_full)
        });
        if tolerate_damage(listed, any, directory)? && !is_full {
            self.list_snapshot_dir(directory, offset, reply);
        }
        Ok(())
    }

    pub(super) fn list_plus(
        &self,
        directory: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let bound = self.bound(directory, handle, offset)?;
        if let Some(inode) = self.snapshot_inode(directory) {
            return inode.list_plus(offset, bound, reply);
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
            if self.cache.has_writer(a.ino.0) {
                self.cache.invalidate_attributes(INodeNo(a.ino.0));
            }
            let name = OsStr::from_bytes(entry.name);
            let lifetime = self.cache.entry_timeout();
            is_full =
                reply.add(INodeNo(a.ino.0), entry.cookie, name, &lifetime, &self.cache.to_file_attr(a), GENERATION);
            stop_if_full(is_full)
        });
        let is_complete = tolerate_damage(listed, any, directory)?;
        if is_full || !is_complete { Ok(()) } else { self.list_snapshot_dir_plus(directory, offset, reply) }
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
