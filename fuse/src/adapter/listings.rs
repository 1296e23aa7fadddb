//! Lists directories. Each listing ends where the directory ended when it was opened, so that renaming while listing terminates.

use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;

use fuser::{FileHandle, INodeNo, OpenFlags, ReplyDirectory, ReplyDirectoryPlus};
use lockbox::{Error, Result};

use super::context::Adapter;
use super::reply::full;
use crate::convert::{self, GENERATION, ino, notes_access};

impl Adapter {
    pub(super) fn begin_listing(&self, directory: INodeNo, flags: OpenFlags) -> Result<FileHandle> {
        let bound = self.bound_now(directory)?;
        self.activity.directory_opened();
        if notes_access(flags) && self.kept(directory).is_none() {
            self.note_access(directory);
        }
        Ok(FileHandle(self.open_directories.open(bound)))
    }

    fn bound_now(&self, directory: INodeNo) -> Result<u64> {
        match self.kept(directory) {
            Some(kept) => kept.bound(),
            None => self.cache.check_open(directory).and_then(|()| self.fs.directory_bound(ino(directory))),
        }
    }

    /// The bound of a listing; reading from the start refreshes it.
    fn bound(&self, directory: INodeNo, handle: FileHandle, offset: u64) -> Result<u64> {
        let bound = self.open_directories.bound(handle.0).ok_or(Error::Stale)?;
        self.cache.check_open(directory)?;
        if offset > 0 {
            return Ok(bound);
        }
        let bound = self.bound_now(directory)?;
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
        if let Some(kept) = self.kept(directory) {
            return kept.list(offset, bound, reply);
        }
        let (mut any, mut is_full) = (false, false);
        let listed = self.fs.list_directory(ino(directory), offset, bound, false, &mut |entry, _| {
            any = true;
            let kind = convert::file_type(entry.file_type.into());
            is_full = reply.add(INodeNo(entry.ino.0), entry.cookie, kind, OsStr::from_bytes(entry.name));
            full(is_full)
        });
        if or_the_others(listed, any, directory)? && !is_full {
            self.list_last(directory, offset, reply);
        }
        Ok(())
    }

    /// With attributes.
    pub(super) fn list_plus(
        &self,
        directory: INodeNo,
        handle: FileHandle,
        offset: u64,
        reply: &mut ReplyDirectoryPlus,
    ) -> Result<()> {
        let bound = self.bound(directory, handle, offset)?;
        if let Some(kept) = self.kept(directory) {
            return kept.list_plus(offset, bound, reply);
        }
        let (mut any, mut is_full) = (false, false);
        let listed = self.fs.list_directory(ino(directory), offset, bound, true, &mut |entry, attributes| {
            let Some(a) = attributes else {
                tracing::warn!(directory = directory.0, inode = entry.ino.0, "a listing leaves out a damaged entry");
                return ControlFlow::Continue(());
            };
            any = true;
            // One time counts for the name and the attributes, and names are kept for ever. The kernel drops attributes that were
            // asked for before it was told to forget them.
            if self.cache.has_writer(a.ino.0) {
                self.cache.invalidate_attributes(INodeNo(a.ino.0));
            }
            let name = OsStr::from_bytes(entry.name);
            let lifetime = self.cache.believed();
            is_full = reply.add(INodeNo(a.ino.0), entry.cookie, name, &lifetime, &self.cache.told(a), GENERATION);
            full(is_full)
        });
        let is_whole = or_the_others(listed, any, directory)?;
        if is_full || !is_whole { Ok(()) } else { self.list_last_plus(directory, offset, reply) }
    }

    pub(super) fn end_listing(&self, handle: FileHandle) {
        self.open_directories.close(handle.0);
        self.activity.directory_closed();
    }
}

/// An entry that cannot be read keeps nobody from the others: it fails a request that has nothing else to say, and is told in the log.
/// Answers whether the listing was read as far as it was asked for. If not, the next request begins at the damage and fails there, so nothing may be
/// said behind it: who takes a listing for whole may remove elsewhere what it leaves out.
pub(super) fn or_the_others(listed: Result<()>, any: bool, directory: INodeNo) -> Result<bool> {
    match listed {
        Ok(()) => Ok(true),
        Err(Error::Damaged(reason)) if any => {
            tracing::warn!(directory = directory.0, reason, "a listing leaves out a damaged entry");
            Ok(false)
        }
        Err(error) => Err(error),
    }
}
