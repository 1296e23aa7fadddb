//! Invalidation of the kernel's caches: attributes, names and pages that changed without its
//! request.
//!
//! # Attributes
//! Mode and access control lists need no invalidation: SETATTR replies with the new mode, and after
//! it, as after setting or removing a list, the kernel drops both by itself.
//!
//! # Names
//! With `sync=always` an operation is published first and committed then. If the commit fails the
//! caller gets the error, but the name exists, or is gone. The kernel caches names without expiry
//! and would keep the old state. A restore also changes names without requests of the kernel
//! (KERNEL-11).
//!
//! # Pages
//! Dropping the cached pages of an inode writes them first, by WRITE requests that the event loops
//! answer. So pages are never dropped from an event loop. An error means that the kernel has
//! dropped the inode and its pages, or that the connection is closed.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use fuser::{FileAttr, INodeNo};
use lockbox::format::Ino;
use lockbox::fs::{Attributes, FileSystem, SyncProfile};
use lockbox::{Error, Result};

use super::KernelCache;
use crate::convert;

impl KernelCache {
    /// Converts attributes for a reply (KERNEL-7).
    pub(crate) fn to_file_attr(&self, a: &Attributes) -> FileAttr {
        FileAttr { blocks: self.writers.reported_blocks(a.ino.0, a.blocks), ..convert::to_file_attr(a) }
    }

    /// Returns how long the kernel may cache attributes that come with another reply: for an inode
    /// with writers it requests them when needed.
    pub(crate) fn attribute_timeout(&self, ino: u64) -> Duration {
        if self.writers.has_writer(ino) { Duration::ZERO } else { self.entry_timeout() }
    }

    /// Returns attributes and timeout for GETATTR; an invalidation ends the timeout.
    pub(crate) fn getattr(&self, fs: &FileSystem, ino: INodeNo) -> Result<(FileAttr, Duration)> {
        self.writers.begin_getattr(ino.0);
        let a = fs.attributes(Ino(ino.0))?;
        let (blocks, keeps) = self.writers.finish_getattr(ino.0, a.blocks);
        if !keeps {
            self.invalidate_attributes(ino);
        }
        Ok((
            FileAttr { blocks, ..convert::to_file_attr(&a) },
            if keeps { self.entry_timeout() } else { Duration::ZERO },
        ))
    }

    /// Returns the attributes for CREATE, of a file that it created, or found, and opened.
    pub(crate) fn created_attributes(&self, a: &Attributes, writes: bool) -> FileAttr {
        if writes {
            self.writers.add_created(a.ino.0, a.blocks);
        }
        self.to_file_attr(a)
    }

    /// Registers a writer: from now on the block count changes without the kernel's knowledge, so
    /// its cached attributes are invalidated.
    pub(crate) fn begin_writing(&self, ino: INodeNo) {
        if self.writers.add(ino.0) {
            self.invalidate_attributes(ino);
        }
    }

    /// Removes a writer. KERNEL-7: a reported block that does not exist is invalidated.
    pub(crate) fn end_writing(&self, fs: &FileSystem, ino: INodeNo) {
        if let Some(cached) = self.writers.remove(ino.0)
            && fs.attributes(Ino(ino.0)).is_ok_and(|a| !cached.matches(a.blocks))
        {
            self.invalidate_attributes(ino);
        }
    }

    /// Records a WRITE before its reply; with `kill` the mode may have changed too.
    pub(crate) fn content_written(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill { self.content_changed(fs, ino, kill) } else { self.writers.record_write(ino.0) }
    }

    /// Records a failed WRITE of `bytes` before its reply, so that the writer learns of it
    /// (KERNEL-12).
    pub(crate) fn record_refused_write(&self, ino: INodeNo, bytes: usize) {
        self.writers.set_refused(ino.0, bytes);
        self.invalidate_blocks(Ino(ino.0));
    }

    /// Returns the size of the last failed WRITE, or 0 if there is none or it would succeed now
    /// (KERNEL-12). A smaller one may find space where the kernel's do not.
    pub(crate) fn refused_bytes(&self, ino: INodeNo) -> usize {
        self.writers.refused(ino.0)
    }

    /// Records that the failed WRITE would succeed now.
    pub(crate) fn clear_refused_write(&self, ino: INodeNo) {
        self.writers.set_refused(ino.0, 0);
    }

    /// Invalidates block counts changed by WRITEs since the last call. Call it without a lock of
    /// the file system, as `invalidate_blocks`.
    pub(crate) fn invalidate_written(&self, fs: &FileSystem) {
        for ino in self.writers.take_written() {
            self.content_changed(fs, INodeNo(ino), false);
        }
    }

    /// Records another change of the content before its reply; with `kill` the mode may have
    /// changed too.
    pub(crate) fn content_changed(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill {
            self.writers.forget_wrong_blocks(ino.0, None);
            self.invalidate_attributes(ino);
        } else if self.writers.has_cached_blocks(ino.0) {
            let blocks = fs.attributes(Ino(ino.0)).ok().map(|a| a.blocks);
            if self.writers.forget_wrong_blocks(ino.0, blocks) {
                self.invalidate_attributes(ino);
            }
        }
    }

    /// Invalidates a block count that changed without a request, whether or not the inode has
    /// writers. Call it without a lock of the file system: the kernel may first wait for the reply
    /// to a request about the inode.
    pub(crate) fn invalidate_blocks(&self, ino: Ino) {
        self.writers.forget_wrong_blocks(ino.0, None);
        self.invalidate_attributes(INodeNo(ino.0));
    }

    /// Makes the kernel request the attributes again.
    pub(crate) fn invalidate_attributes(&self, ino: INodeNo) {
        // A negative offset invalidates attributes only. The kernel may not know the inode, which
        // is harmless.
        self.drop_pages(ino, -1);
    }
}

impl KernelCache {
    /// Invalidates the names of a failed operation; call it before the reply. The kernel holds the
    /// directory's lock until the reply, so the invalidation runs in a thread: here it would
    /// deadlock.
    pub(crate) fn invalidate_uncertain_names<T>(
        &self,
        profile: SyncProfile,
        result: &Result<T>,
        names: &[(INodeNo, &OsStr)],
    ) {
        let Err(error) = result else { return };
        if !may_be_published(profile, error) {
            return;
        }
        let Some(notifier) = self.notifier.get().cloned() else { return };
        let names: Vec<_> = names.iter().map(|&(parent, name)| (parent, name.to_owned())).collect();
        let spawned = thread::Builder::new().name("names".into()).spawn(move || {
            for (parent, name) in names {
                // The kernel may not know the name.
                let _ = notifier.inval_entry(parent, &name);
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "the kernel may believe in a name that is not so");
        }
    }
}

/// Returns whether the operation may have been published. Errors about the names themselves come
/// before that.
fn may_be_published(profile: SyncProfile, error: &Error) -> bool {
    let refused = matches!(
        error,
        Error::Exists
            | Error::NotFound
            | Error::NotDirectory
            | Error::IsDirectory
            | Error::NotEmpty
            | Error::NameTooLong
            | Error::Invalid(_)
    );
    profile == SyncProfile::Always && !refused
}

impl KernelCache {
    /// Returns the inodes of which the kernel may hold dirty pages (KERNEL-3).
    pub(crate) fn dirty_inodes(&self) -> Vec<u64> {
        self.writers.inodes()
    }

    /// Makes the kernel write the pages of these inodes and drop them.
    pub(crate) fn write_back(&self, inodes: &[u64]) {
        for &ino in inodes {
            self.drop_pages(INodeNo(ino), 0);
        }
    }

    /// Writes and drops the pages of one inode from `offset` on.
    pub(crate) fn drop_pages(&self, ino: INodeNo, offset: i64) {
        if let Some(notifier) = self.notifier.get() {
            let _ = notifier.inval_inode(ino, offset, 0);
        }
    }

    /// Writes and drops the pages of every inode up to `newest`, then of the snapshot inodes that
    /// the kernel knows, starting with views that were read. Returns whether that finished before
    /// `until`. Newer inodes come first: they are likelier to be cached, and time is short.
    pub(crate) fn drop_all_pages(&self, newest: u64, until: Instant) -> bool {
        if self.notifier.get().is_none() {
            return true;
        }
        for (view, newest) in std::iter::once((0, newest)).chain(self.views.known_to_kernel()) {
            for number in (1..=newest).rev() {
                self.drop_pages(INodeNo(view | number), 0);
                if number % 256 == 0 && Instant::now() > until {
                    return false;
                }
            }
        }
        true
    }
}

impl KernelCache {
    /// Hides the content of this directory from the kernel, and shows the directory that was hidden
    /// before.
    pub(crate) fn hide_directory(&self, directory: Ino) {
        self.hidden.store(directory.0, Ordering::SeqCst);
    }

    /// # Errors
    /// `PermissionDenied` for the hidden directory.
    pub(crate) fn check_visible(&self, directory: INodeNo) -> Result<()> {
        if self.hidden.load(Ordering::SeqCst) == directory.0 { Err(Error::PermissionDenied) } else { Ok(()) }
    }

    /// Makes the kernel drop a name, existing or missing. No other thread may create, remove or
    /// rename it meanwhile. Not to be called from an event loop: the kernel may hold the
    /// directory's lock for a request that waits for us.
    pub(crate) fn invalidate_name(&self, directory: Ino, name: &[u8]) {
        if let Some(notifier) = self.notifier.get() {
            // The kernel may not know the directory or the name.
            let _ = notifier.inval_entry(INodeNo(directory.0), OsStr::from_bytes(name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_uncertain_when_its_commit_may_have_failed() {
        let failed = Error::WriteFailed(String::new());
        assert!(may_be_published(SyncProfile::Always, &failed));
        assert!(!may_be_published(SyncProfile::Periodic, &failed));
        for refused in [Error::Exists, Error::NotFound, Error::NotEmpty] {
            assert!(!may_be_published(SyncProfile::Always, &refused), "{refused}");
        }
    }

    #[test]
    fn one_directory_is_hidden_and_at_first_none() {
        let cache = KernelCache::default();
        let is_open = |ino| cache.check_visible(INodeNo(ino)).is_ok();
        assert!(is_open(1) && is_open(7) && is_open(9));
        cache.hide_directory(Ino(7));
        assert!(is_open(1) && !is_open(7));
        cache.hide_directory(Ino(9));
        assert!(is_open(7) && !is_open(9), "it is deleted by then");
    }
}
