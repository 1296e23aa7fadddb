//! Counts the open handles of each inode.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use parking_lot::Mutex;

use crate::format::Ino;

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
