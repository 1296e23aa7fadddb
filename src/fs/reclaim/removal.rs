//! Removal of a name: the inode stays, is deleted at once, or waits for its last handle or for
//! reclaim.

use super::handles::OpenHandles;
use super::records;
use crate::error::{Result, Timestamp};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::inode;
use crate::fs::types::mode;
use crate::txn::Operation;

/// Inode that loses its last name in an operation, if any.
pub(in crate::fs) struct NameRemoval<'r> {
    handles: &'r OpenHandles,
    last: Option<UnlinkedInode>,
}

struct UnlinkedInode {
    ino: Ino,
    /// Not open, and protected from opens by `OpenHandles::retire`.
    retired: bool,
    /// All its records are removed.
    gone: bool,
}

impl<'r> NameRemoval<'r> {
    pub(super) fn new(handles: &'r OpenHandles) -> NameRemoval<'r> {
        NameRemoval { handles, last: None }
    }

    /// Removes a name of `inode` (of a directory: the only one) and stores it. Changes 1 record,
    /// and at most REMOVAL_RECORDS.
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
            let last = self.last.insert(UnlinkedInode { ino, retired, gone: false });
            last.gone = records::remove_unlinked(op, ino, inode, !retired)?;
        }
        Ok(())
    }

    /// Ends the protection after the operation. Returns the inode that lost its last name, and
    /// whether all its records were removed.
    pub(super) fn end(self) -> Option<(Ino, bool)> {
        let UnlinkedInode { ino, retired, gone } = self.last?;
        if retired {
            self.handles.revive(ino);
        }
        Some((ino, gone))
    }
}
