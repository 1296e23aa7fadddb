//! Invalidates cached attributes in the kernel that changed without its request.
//!
//! Mode and access control lists are not among them: SETATTR replies with the new mode, and after
//! it, as after setting or removing a list, the kernel drops both by itself.

use std::time::Duration;

use fuser::{FileAttr, INodeNo};
use lockbox::Result;
use lockbox::format::Ino;
use lockbox::fs::{Attributes, FileSystem};

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
        if self.writers.has(ino) { Duration::ZERO } else { self.entry_timeout() }
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
