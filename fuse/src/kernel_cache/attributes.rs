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
    pub(crate) fn told(&self, a: &Attributes) -> FileAttr {
        FileAttr { blocks: self.writers.told(a.ino.0, a.blocks), ..convert::attributes(a) }
    }

    /// How long the kernel may keep attributes that come with another answer: it asks for those of an inode with writers when it wants them.
    pub(crate) fn lifetime(&self, ino: u64) -> Duration {
        if self.writers.has(ino) { Duration::ZERO } else { self.believed() }
    }

    /// What GETATTR is answered, and how long the kernel may keep it unless it is told otherwise.
    pub(crate) fn attributes(&self, fs: &FileSystem, ino: INodeNo) -> Result<(FileAttr, Duration)> {
        self.writers.ask(ino.0);
        let a = fs.attributes(Ino(ino.0))?;
        let (blocks, keeps) = self.writers.answer(ino.0, a.blocks);
        if !keeps {
            self.invalidate_attributes(ino);
        }
        Ok((FileAttr { blocks, ..convert::attributes(&a) }, if keeps { self.believed() } else { Duration::ZERO }))
    }

    /// What CREATE is answered of a file that it made, or found, and opened.
    pub(crate) fn created(&self, a: &Attributes, writes: bool) -> FileAttr {
        if writes {
            self.writers.add_created(a.ino.0, a.blocks);
        }
        self.told(a)
    }

    /// From now on the block count changes behind the kernel's back, so what it holds for ever is taken from it.
    pub(crate) fn begin_writing(&self, ino: INodeNo) {
        if self.writers.add(ino.0) {
            self.invalidate_attributes(ino);
        }
    }

    /// KERNEL-7: whoever was told of a block that is not there is to ask again.
    pub(crate) fn end_writing(&self, fs: &FileSystem, ino: INodeNo) {
        if let Some(kept) = self.writers.remove(ino.0)
            && fs.attributes(Ino(ino.0)).is_ok_and(|a| !kept.is(a.blocks))
        {
            self.invalidate_attributes(ino);
        }
    }

    /// Comes after a WRITE, before its reply; with `kill` the mode may have changed too.
    pub(crate) fn content_written(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill { self.content_changed(fs, ino, kill) } else { self.writers.wrote(ino.0) }
    }

    /// Comes after a WRITE of so many bytes that was refused, before its reply: whoever writes on is told (KERNEL-12).
    pub(crate) fn content_refused(&self, ino: INodeNo, bytes: usize) {
        self.writers.refuse(ino.0, bytes);
        self.blocks_changed(Ino(ino.0));
    }

    /// Bytes of the WRITE that was refused, and would be still as far as is known; 0 for none (KERNEL-12). A smaller one may find room where the kernel's do not.
    pub(crate) fn refused(&self, ino: INodeNo) -> usize {
        self.writers.refused(ino.0)
    }

    /// The WRITE that was refused would be accepted now.
    pub(crate) fn content_accepted(&self, ino: INodeNo) {
        self.writers.refuse(ino.0, 0);
    }

    /// Tells which block counts WRITEs made wrong since this was called last. No lock of the file system may be held, as for `blocks_changed`.
    pub(crate) fn tell_written(&self, fs: &FileSystem) {
        for ino in self.writers.take_written() {
            self.content_changed(fs, INodeNo(ino), false);
        }
    }

    /// Comes after another change of the content, before its reply; with `kill` the mode may have changed too.
    pub(crate) fn content_changed(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill {
            self.writers.changed(ino.0, None);
            self.invalidate_attributes(ino);
        } else if self.writers.keeps(ino.0) {
            let blocks = fs.attributes(Ino(ino.0)).ok().map(|a| a.blocks);
            if self.writers.changed(ino.0, blocks) {
                self.invalidate_attributes(ino);
            }
        }
    }

    /// The block count has changed without a request, and what the kernel was told of it is wrong, whether the inode has writers or not.
    /// No lock of the file system may be held: the kernel may wait for the answer to a request about the inode first.
    pub(crate) fn blocks_changed(&self, ino: Ino) {
        self.writers.changed(ino.0, None);
        self.invalidate_attributes(INodeNo(ino.0));
    }

    /// Has the kernel ask again.
    pub(crate) fn invalidate_attributes(&self, ino: INodeNo) {
        // An offset below 0 means attributes only. The kernel may not know the inode: nothing is lost then.
        self.drop_pages(ino, -1);
    }
}
