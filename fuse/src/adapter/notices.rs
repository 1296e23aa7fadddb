//! Tells the kernel which of its cached attributes changed without its doing.
//!
//! Mode and access control lists are not among them: SETATTR answers with the new mode, and after it, as after setting or removing a list,
//! the kernel forgets by itself what it knew of both. A WRITE that takes set-id bits away has a writer, whose attributes are not kept.

use fuser::{INodeNo, OpenAccMode, OpenFlags};

use super::{Adapter, ino};
use crate::errno::errno;

impl Adapter {
    /// From now on the block count changes behind the kernel's back, so what it holds for ever is taken from it.
    pub(super) fn begin_writing(&self, ino: INodeNo) {
        if self.shared.writers.add(ino.0)
            && let Some(notifier) = self.shared.notifier.get()
        {
            // An offset below 0 means attributes only. The kernel may not know the inode: nothing is lost then.
            let _ = notifier.inval_inode(ino, -1, 0);
        }
    }

    /// Reading goes on when its time cannot be noted (full disk, latch); damage is logged by `errno`.
    pub(super) fn note_access(&self, number: INodeNo) {
        if !self.access_times {
            return;
        }
        match self.fs.note_access(ino(number)) {
            Ok(false) => {}
            Ok(true) => {
                // The kernel keeps attributes for ever and no reply here carries new ones.
                if let Some(notifier) = self.shared.notifier.get() {
                    let _ = notifier.inval_inode(number, -1, 0);
                }
            }
            Err(error) => drop(errno(&error)),
        }
    }
}

pub(super) fn writes(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_RDONLY
}

/// Whether an open counts as access.
pub(super) fn notes_access(flags: OpenFlags) -> bool {
    flags.acc_mode() != OpenAccMode::O_WRONLY && flags.0 & nix::libc::O_NOATIME == 0
}
