//! What happens to an inode that loses a name: it stays, is deleted, or waits for its last handle or for reclaim.

use super::handles::OpenHandles;
use super::records;
use crate::error::{Result, Timestamp};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::inode;
use crate::fs::types::mode;
use crate::txn::Operation;

/// The inode, if any, that loses its last name in an operation.
pub(in crate::fs) struct Removal<'r> {
    handles: &'r OpenHandles,
    last: Option<Last>,
}

struct Last {
    ino: Ino,
    /// Nobody had it open, and `OpenHandles::retire` lets nobody open it.
    retired: bool,
    /// All its records are removed.
    gone: bool,
}

impl<'r> Removal<'r> {
    pub(super) fn new(handles: &'r OpenHandles) -> Removal<'r> {
        Removal { handles, last: None }
    }

    /// Takes a name away from `inode` (of a directory: the only one) and stores it. Changes 1 record, and at most REMOVED_RECORDS.
    pub(in crate::fs) fn drop_name(
        &mut self,
        op: &mut Operation<'_>,
        ino: Ino,
        inode: &mut InodeValue,
        now: Timestamp,
    ) -> Result<()> {
        inode.links = if inode.mode & mode::TYPE == mode::DIRECTORY { 0 } else { inode.links.saturating_sub(1) };
        inode.ctime = now;
        inode::store(op, ino, inode)?;
        if inode.links == 0 {
            let retired = self.handles.retire(ino);
            let last = self.last.insert(Last { ino, retired, gone: false });
            last.gone = records::removed(op, ino, inode, !retired)?;
        }
        Ok(())
    }

    /// The operation has ended: the inode that lost its last name in it, and whether all its records went.
    pub(super) fn end(self) -> Option<(Ino, bool)> {
        let Last { ino, retired, gone } = self.last?;
        if retired {
            self.handles.revive(ino);
        }
        Some((ino, gone))
    }
}
