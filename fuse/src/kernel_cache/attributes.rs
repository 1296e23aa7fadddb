//! Tells the kernel which of its cached attributes changed without its doing.
//!
//! Mode and access control lists are not among them: SETATTR answers with the new mode, and after it, as after setting or removing a list,
//! the kernel forgets by itself what it knew of both.

use std::time::Duration;

use fuser::{FileAttr, INodeNo};
use lockbox::Result;
use lockbox::format::Ino;
use lockbox::fs::{Attributes, FileSystem};

use super::KernelCache;
use crate::convert;

impl KernelCache {
    /// What the kernel is told of an object (KERNEL-7).
    pub(crate) fn to_file_attr(&self, a: &Attributes) -> FileAttr {
        FileAttr { blocks: self.writers.reported_blocks(a.ino.0, a.blocks), ..convert::to_file_attr(a) }
    }

    /// How long the kernel may keep attributes that come with another answer: it asks for those of an inode with writers when it wants them.
    pub(crate) fn attribute_timeout(&self, ino: u64) -> Duration {
        if self.writers.has(ino) { Duration::ZERO } else { self.entry_timeout() }
    }

    /// What GETATTR is answered, and how long the kernel may keep it unless it is told otherwise.
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

    /// What CREATE is answered of a file that it made, or found, and opened.
    pub(crate) fn created_attributes(&self, a: &Attributes, writes: bool) -> FileAttr {
        if writes {
            self.writers.add_created(a.ino.0, a.blocks);
        }
        self.to_file_attr(a)
    }

    /// From now on the block count changes behind the kernel's back, so what it holds for ever is taken from it.
    pub(crate) fn begin_writing(&self, ino: INodeNo) {
        if self.writers.add(ino.0) {
            self.invalidate_attributes(ino);
        }
    }

    /// KERNEL-7: whoever was told of a block that is not there is to ask again.
    pub(crate) fn end_writing(&self, fs: &FileSystem, ino: INodeNo) {
        if let Some(cached) = self.writers.remove(ino.0)
            && fs.attributes(Ino(ino.0)).is_ok_and(|a| !cached.matches(a.blocks))
        {
            self.invalidate_attributes(ino);
        }
    }

    /// Comes after a WRITE, before its reply; with `kill` the mode may have changed too.
    pub(crate) fn content_written(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill { self.content_changed(fs, ino, kill) } else { self.writers.record_write(ino.0) }
    }

    /// Comes after a WRITE of so many bytes that was refused, before its reply: whoever writes on is told (KERNEL-12).
    pub(crate) fn record_refused_write(&self, ino: INodeNo, bytes: usize) {
        self.writers.set_refused(ino.0, bytes);
        self.invalidate_blocks(Ino(ino.0));
    }

    /// Bytes of the WRITE that was refused, and would be still as far as is known; 0 for none (KERNEL-12). A smaller one may find room where the kernel's do not.
    pub(crate) fn refused_bytes(&self, ino: INodeNo) -> usize {
        self.writers.refused(ino.0)
    }

    /// The WRITE that was refused would be accepted now.
    pub(crate) fn clear_refused_write(&self, ino: INodeNo) {
        self.writers.set_refused(ino.0, 0);
    }

    /// Tells which block counts WRITEs made wrong since this was called last. No lock of the file system may be held, as for `invalidate_blocks`.
    pub(crate) fn invalidate_written(&self, fs: &FileSystem) {
        for ino in self.writers.take_written() {
            self.content_changed(fs, INodeNo(ino), false);
        }
    }

    /// Comes after another change of the content, before its reply; with `kill` the mode may have changed too.
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

    /// The block count has changed without a request, and what the kernel was told of it is wrong, whether the inode has writers or not.
    /// No lock of the file system may be held: the kernel may wait for the answer to a request about the inode first.
    pub(crate) fn invalidate_blocks(&self, ino: Ino) {
        self.writers.forget_wrong_blocks(ino.0, None);
        self.invalidate_attributes(INodeNo(ino.0));
    }

    /// Has the kernel ask again.
    pub(crate) fn invalidate_attributes(&self, ino: INodeNo) {
        // An offset below 0 means attributes only. The kernel may not know the inode: nothing is lost then.
        self.drop_pages(ino, -1);
    }
}
