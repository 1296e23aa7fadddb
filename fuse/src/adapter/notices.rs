//! Tells the kernel which of its cached attributes changed without its doing.
//!
//! Mode and access control lists are not among them: SETATTR answers with the new mode, and after it, as after setting or removing a list,
//! the kernel forgets by itself what it knew of both.

use std::time::Duration;

use fuser::{FileAttr, INodeNo, OpenAccMode, OpenFlags, ReplyAttr};
use lockbox::fs::Attributes;

use super::served::FOR_EVER;
use super::{Adapter, Shared, convert, ino};
use crate::errno::errno;

impl Adapter {
    /// From now on the block count changes behind the kernel's back, so what it holds for ever is taken from it.
    pub(super) fn begin_writing(&self, ino: INodeNo) {
        if self.shared.writers.add(ino.0) {
            self.take_attributes(ino);
        }
    }

    /// F7: whoever was told of a block that is not there is to ask again.
    pub(super) fn end_writing(&self, number: INodeNo) {
        if self.shared.writers.remove(number.0) && self.fs.attributes(ino(number)).is_ok_and(|a| a.blocks == 0) {
            self.take_attributes(number);
        }
    }

    /// Comes after a change of the content, before its reply; with `kill` the mode may have changed too.
    pub(super) fn content_changed(&self, number: INodeNo, kill: bool) {
        let writers = &self.shared.writers;
        if kill {
            writers.changed(number.0, None);
            self.take_attributes(number);
        } else if writers.keeps(number.0) {
            let blocks = self.fs.attributes(ino(number)).ok().map(|a| a.blocks);
            if writers.changed(number.0, blocks) {
                self.take_attributes(number);
            }
        }
    }

    /// Has the kernel ask again.
    pub(super) fn take_attributes(&self, ino: INodeNo) {
        self.shared.take_attributes(ino);
    }

    /// Answers GETATTR with what the kernel may keep until it is told otherwise.
    pub(super) fn answer_attributes(&self, number: INodeNo, reply: ReplyAttr) {
        self.shared.writers.ask(number.0);
        match self.fs.attributes(ino(number)) {
            Ok(a) => {
                let (blocks, keeps) = self.shared.writers.answer(number.0, a.blocks);
                if !keeps {
                    self.take_attributes(number);
                }
                let attributes = FileAttr { blocks, ..convert::attributes(&a) };
                reply.attr(if keeps { &FOR_EVER } else { &Duration::ZERO }, &attributes);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Reading goes on when its time cannot be noted (full disk, latch); damage is logged by `errno`.
    pub(super) fn note_access(&self, number: INodeNo) {
        if !self.access_times {
            return;
        }
        match self.fs.note_access(ino(number)) {
            Ok(false) => {}
            // The kernel keeps attributes for ever and no reply here carries new ones.
            Ok(true) => self.take_attributes(number),
            Err(error) => drop(errno(&error)),
        }
    }
}

impl Shared {
    /// What the kernel is told of an object (F7).
    pub(super) fn told(&self, a: &Attributes) -> FileAttr {
        FileAttr { blocks: self.writers.told(a.ino.0, a.blocks), ..convert::attributes(a) }
    }

    fn take_attributes(&self, ino: INodeNo) {
        if let Some(notifier) = self.notifier.get() {
            // An offset below 0 means attributes only. The kernel may not know the inode: nothing is lost then.
            let _ = notifier.inval_inode(ino, -1, 0);
        }
    }

    /// The block count has changed without a request, and what the kernel was told of it is wrong, whether the inode has writers or not.
    /// No lock of the file system may be held: the kernel may wait for the answer to a request about the inode first.
    pub(crate) fn blocks_changed(&self, ino: lockbox::format::Ino) {
        self.writers.changed(ino.0, None);
        self.take_attributes(INodeNo(ino.0));
    }
}

pub(super) fn writes(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_RDONLY
}

/// Whether an open counts as access.
pub(super) fn notes_access(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_WRONLY && flags.0 & nix::libc::O_NOATIME == 0
}
