//! Open handles, and removal of an object after its last name: the inode is deleted at once if its
//! records are few, or becomes an orphan that waits for its last handle and for reclaim in steps.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::ControlFlow;

use parking_lot::Mutex;

use crate::error::{Result, Timestamp};
use crate::format::values::{Extent, InodeValue, NO_TRIM};
use crate::format::{Ino, Key, MAX_INO, ROOT_INO, kind};
use crate::fs::types::mode;
use crate::fs::{extents, inode};
use crate::txn::{Operation, View};

/// Number of shards, so that opens of different files rarely share a lock; opens are short, so a
/// few times the number of threads is enough.
const SHARDS: usize = 16;
/// Count of an inode that an operation is about to delete: it can no longer be opened.
const RETIRED: u64 = u64::MAX;

/// Number of open handles of each inode.
///
/// The operation that drops the last name of an inode decides by `retire` whether the inode is
/// deleted or kept. An `open` between that decision and the publication is refused, so it cannot
/// hold a deleted inode.
#[derive(Default)]
pub(super) struct OpenHandles {
    shards: [Mutex<HashMap<Ino, u64>>; SHARDS],
}

impl OpenHandles {
    fn shard(&self, ino: Ino) -> &Mutex<HashMap<Ino, u64>> {
        &self.shards[(ino.0 % SHARDS as u64) as usize]
    }

    /// Counts a handle; returns false, and counts nothing, when the inode is being deleted.
    pub(super) fn open(&self, ino: Ino) -> bool {
        let mut counts = self.shard(ino).lock();
        let count = counts.entry(ino).or_insert(0);
        if *count == RETIRED {
            return false;
        }
        *count += 1;
        true
    }

    /// Releases a handle; returns whether it was the last one.
    pub(super) fn release(&self, ino: Ino) -> bool {
        let mut counts = self.shard(ino).lock();
        let Entry::Occupied(mut count) = counts.entry(ino) else { return false };
        match *count.get() {
            RETIRED => false,
            0 | 1 => {
                count.remove();
                true
            }
            _ => {
                *count.get_mut() -= 1;
                false
            }
        }
    }

    /// Drops all handles.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            shard.lock().retain(|_, count| *count == RETIRED);
        }
    }

    pub(super) fn is_open(&self, ino: Ino) -> bool {
        self.shard(ino).lock().get(&ino).is_some_and(|&count| count != RETIRED)
    }

    /// Refuses opens of the inode until `revive`; returns false, and does nothing, if it is open.
    pub(super) fn retire(&self, ino: Ino) -> bool {
        *self.shard(ino).lock().entry(ino).or_insert(RETIRED) == RETIRED
    }

    /// Ends `retire`: either the inode is deleted, which a later open sees in the tree, or the
    /// deletion failed.
    pub(super) fn revive(&self, ino: Ino) {
        let mut counts = self.shard(ino).lock();
        if counts.get(&ino) == Some(&RETIRED) {
            counts.remove(&ino);
        }
    }
}

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
            last.gone = remove_unlinked(op, ino, inode, !retired)?;
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

/// Maximum records of an object that one operation removes: about a hundred leaves, well under a
/// tenth of a second.
pub(in crate::fs) const STEP: u64 = 512;

/// Records that an operation has to reserve for `remove_unlinked`: each record, and for extents the
/// reference records around it.
pub(in crate::fs) const REMOVAL_RECORDS: u64 = STEP * 5;

pub(super) fn orphan_key(ino: Ino) -> Key {
    Key::new(0, kind::ORPHAN, ino.0)
}

fn trim_key(ino: Ino) -> Key {
    Key::new(0, kind::TRIM, ino.0)
}

/// Returns the first records of the object without its inode value, at most `limit`; extents with
/// their value.
fn first_records(view: View<'_>, ino: Ino, limit: u64) -> Result<Vec<(Key, Option<Extent>)>> {
    let mut found = Vec::new();
    view.scan(Key::new(ino.0, kind::INODE, 1), Key::new(ino.0 + 1, 0, 0), &mut |key, value| {
        let extent = if key.kind == kind::EXTENT { Some(Extent::decode(value)?) } else { None };
        found.push((key, extent));
        Ok(if found.len() as u64 >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(found)
}

fn remove_records(op: &mut Operation<'_>, records: &[(Key, Option<Extent>)]) -> Result<()> {
    for (key, extent) in records {
        op.remove(*key)?;
        if let Some(extent) = extent {
            extents::note_stale_if_packed(op, key.sub, extent);
            op.release(&extent.page, extent.born)?;
        }
    }
    Ok(())
}

/// Removes an inode in the operation that dropped its last link. A small inode that is not open is
/// deleted at once: the result is true and, once the operation is published, the caller discards
/// its dirty data. Otherwise it becomes an orphan and the result is false; the caller queues it
/// unless it is open.
pub(in crate::fs) fn remove_unlinked(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue, open: bool) -> Result<bool> {
    if !open {
        let records = first_records(op.view(), ino, STEP + 1)?;
        if records.len() as u64 <= STEP {
            remove_records(op, &records)?;
            op.remove(Key::new(ino.0, kind::INODE, 0))?;
            if inode.trim != NO_TRIM {
                op.remove(trim_key(ino))?;
            }
            op.inode_gone();
            return Ok(true);
        }
    }
    op.insert(orphan_key(ino), &[])?;
    Ok(false)
}

/// Frees up to `STEP` extents from the trim offset on and advances the offset past them.
pub(super) fn trim_step(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue) -> Result<()> {
    let mut found = Vec::new();
    op.view().scan(extents::key(ino, inode.trim), extents::end_key(ino), &mut |key, value| {
        found.push((key, Some(Extent::decode(value)?)));
        Ok(if found.len() as u64 > STEP { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    let next = found.get(STEP as usize).map(|(key, _)| key.sub);
    found.truncate(STEP as usize);
    remove_records(op, &found)?;
    inode.trim = next.unwrap_or(NO_TRIM);
    if next.is_none() {
        op.remove(trim_key(ino))?;
    }
    inode::store(op, ino, inode)
}

/// Returns whether an orphan record is plausible: an inode with names, or the root, is never
/// reclaimed because of a forged record.
pub(super) fn is_unlinked(ino: Ino, inode: Option<&InodeValue>) -> bool {
    ino != ROOT_INO && ino.0 <= MAX_INO && inode.is_none_or(|inode| inode.links == 0)
}

/// Runs one step for an orphan; returns whether it is deleted.
pub(super) fn orphan_step(op: &mut Operation<'_>, ino: Ino) -> Result<bool> {
    let Some(mut inode) = inode::find(op.view(), ino)? else {
        op.remove(orphan_key(ino))?;
        return Ok(true);
    };
    let mut records = first_records(op.view(), ino, STEP + 1)?;
    let all = records.len() as u64 <= STEP;
    records.truncate(STEP as usize);
    remove_records(op, &records)?;
    if all {
        op.remove(Key::new(ino.0, kind::INODE, 0))?;
        op.remove(orphan_key(ino))?;
        op.remove(trim_key(ino))?;
        op.inode_gone();
    } else if inode.trim != 0 {
        // The rest is hidden, so the inode stays consistent with its extents between the steps.
        inode.size = 0;
        inode.bytes = 0;
        inode.trim = 0;
        op.drop_staged(ino, 0..u64::MAX);
        op.insert(trim_key(ino), &[])?;
        inode::store(op, ino, &inode)?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_retired_inode_cannot_be_opened_and_an_open_one_not_retired() {
        let handles = OpenHandles::default();
        assert!(handles.open(Ino(5)) && handles.open(Ino(5)));
        assert!(!handles.retire(Ino(5)));
        assert!(!handles.release(Ino(5)));
        assert!(handles.is_open(Ino(5)));
        assert!(handles.release(Ino(5)));
        assert!(!handles.release(Ino(5)) && !handles.is_open(Ino(5)));
        assert!(handles.retire(Ino(5)));
        assert!(!handles.open(Ino(5)) && !handles.is_open(Ino(5)));
        handles.revive(Ino(5));
        assert!(handles.open(Ino(5)));
    }
}
