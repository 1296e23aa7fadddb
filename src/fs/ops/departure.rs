//! What happens to an inode that loses a name: it stays, is deleted, or waits for its last handle or for reclaim.

use crate::error::{Result, Timestamp};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::{FileSystem, inode, mode, reclaim};
use crate::txn::Operation;

/// The inode that lost its last name in an operation.
#[derive(Default)]
pub(super) struct Departure {
    last: Option<Last>,
}

struct Last {
    ino: Ino,
    /// Nobody had it open, and `OpenHandles::retire` lets nobody open it.
    retired: bool,
    /// All its records are removed.
    gone: bool,
}

impl FileSystem {
    /// `Volume::operate` for an `f` that may let an inode depart; what follows from that happens after the publication.
    pub(super) fn operate_departing<R>(
        &self,
        records: u64,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>, &mut Departure) -> Result<R>,
    ) -> Result<R> {
        let mut departure = Departure::default();
        let records = records + reclaim::REMOVED_RECORDS;
        let result = self.volume.operate(records, essential, |op| f(op, &mut departure));
        let Some(Last { ino, retired, gone }) = departure.last else { return result };
        if retired {
            self.handles.revive(ino);
        }
        if result.is_ok() && gone {
            self.forget_staged(ino);
        } else if result.is_ok() && !self.handles.is_open(ino) {
            // Also when the last handle was released before the orphan was published: that release could not see it.
            self.queue_reclaim(ino);
        }
        result
    }

    /// Takes a name away from `inode` (of a directory: the only one) and stores it. Changes 1 record, and at most REMOVED_RECORDS.
    pub(super) fn drop_name(
        &self,
        op: &mut Operation<'_>,
        departure: &mut Departure,
        ino: Ino,
        inode: &mut InodeValue,
        now: Timestamp,
    ) -> Result<()> {
        inode.links = if inode.mode & mode::TYPE == mode::DIRECTORY { 0 } else { inode.links.saturating_sub(1) };
        inode.ctime = now;
        inode::store(op, ino, inode)?;
        if inode.links == 0 {
            let retired = self.handles.retire(ino);
            let last = departure.last.insert(Last { ino, retired, gone: false });
            last.gone = reclaim::removed(op, ino, inode, !retired)?;
        }
        Ok(())
    }
}
