//! Lists directories, and remembers for each open one where its listing ends, so that renaming while listing terminates.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicU64, Ordering};

use fuser::{FileHandle, INodeNo, OpenFlags, ReplyDirectory, ReplyDirectoryPlus};
use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::context::GENERATION;
use super::reply::full;
use super::{Adapter, ino, notes_access};
use crate::convert;
use crate::kernel_cache::FOR_EVER;

const SHARDS: u64 = 16;

pub(crate) struct Listings {
    next: AtomicU64,
    shards: Vec<Mutex<HashMap<u64, u64>>>,
}

impl Default for Listings {
    fn default() -> Listings {
        Listings { next: AtomicU64::new(1), shards: (0..SHARDS).map(|_| Mutex::default()).collect() }
    }
}

impl Listings {
    fn shard(&self, handle: u64) -> &Mutex<HashMap<u64, u64>> {
        &self.shards[(handle % SHARDS) as usize]
    }

    /// Opens a listing that ends before `bound`.
    pub(crate) fn open(&self, bound: u64) -> u64 {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.shard(handle).lock().insert(handle, bound);
        handle
    }

    pub(crate) fn bound(&self, handle: u64) -> Option<u64> {
        self.shard(handle).lock().get(&handle).copied()
    }

    /// rewinddir(3) is to see what was created since opendir(3).
    pub(crate) fn rewind(&self, handle: u64, bound: u64) {
        self.shard(handle).lock().insert(handle, bound);
    }

    pub(crate) fn close(&self, handle: u64) {
        self.shard(handle).lock().remove(&handle);
    }
}

impl Adapter {
    pub(super) fn begin_listing(&self, directory: INodeNo, flags: OpenFlags) -> Result<FileHandle> {
        let bound = self.fs.directory_bound(ino(directory))?;
        self.activity.directory_opened();
        if notes_access(flags) {
            self.note_access(directory);
        }
        Ok(FileHandle(self.listings.open(bound)))
    }

    /// The bound of a listing; reading from the start refreshes it.
    fn bound(&self, directory: INodeNo, handle: FileHandle, offset: u64) -> Result<u64> {
        let bound = self.listings.bound(handle.0).ok_or(Error::Stale)?;
        if offset > 0 {
            return Ok(bound);
        }
        let bound = self.fs.directory_bound(ino(directory))?;
        self.listings.rewind(handle.0, bound);
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
        let mut any = false;
        let listed = self.fs.list_directory(ino(directory), offset, bound, false, &mut |entry, _| {
            any = true;
            let kind = convert::file_type(entry.file_type.into());
            full(reply.add(INodeNo(entry.ino.0), entry.cookie, kind, OsStr::from_bytes(entry.name)))
        });
        or_the_others(listed, any, directory)
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
        let mut any = false;
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
            full(reply.add(INodeNo(a.ino.0), entry.cookie, name, &FOR_EVER, &self.cache.told(a), GENERATION))
        });
        or_the_others(listed, any, directory)
    }

    pub(super) fn end_listing(&self, handle: FileHandle) {
        self.listings.close(handle.0);
        self.activity.directory_closed();
    }
}

/// An entry that cannot be read keeps nobody from the others: it fails a request that has nothing else to say, and is told in the log.
fn or_the_others(listed: Result<()>, any: bool, directory: INodeNo) -> Result<()> {
    match listed {
        Err(Error::Damaged(reason)) if any => {
            tracing::warn!(directory = directory.0, reason, "a listing leaves out a damaged entry");
            Ok(())
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_handle_has_its_bound() {
        let listings = Listings::default();
        let (a, b) = (listings.open(10), listings.open(20));
        assert_eq!((listings.bound(a), listings.bound(b)), (Some(10), Some(20)));
        listings.rewind(a, 30);
        assert_eq!(listings.bound(a), Some(30));
        listings.close(a);
        assert_eq!(listings.bound(a), None);
    }
}
