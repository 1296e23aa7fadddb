//! Counts the open handles that may write, per inode and in all.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Enough that event loops seldom meet.
const SHARDS: u64 = 16;

/// While an inode has a writer the kernel's cached block count is stale, and only then can the kernel hold dirty pages.
pub struct Writers {
    shards: Vec<Mutex<HashMap<u64, u32>>>,
    open: AtomicUsize,
}

impl Default for Writers {
    fn default() -> Writers {
        Writers { shards: (0..SHARDS).map(|_| Mutex::default()).collect(), open: AtomicUsize::new(0) }
    }
}

impl Writers {
    fn shard(&self, ino: u64) -> &Mutex<HashMap<u64, u32>> {
        &self.shards[(ino % SHARDS) as usize]
    }

    /// Returns whether this is the inode's first writer.
    pub fn add(&self, ino: u64) -> bool {
        let mut counts = self.shard(ino).lock();
        let count = counts.entry(ino).or_insert(0);
        *count += 1;
        self.open.fetch_add(1, Ordering::SeqCst);
        *count == 1
    }

    pub fn remove(&self, ino: u64) {
        if let Entry::Occupied(mut entry) = self.shard(ino).lock().entry(ino) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
            self.open.fetch_sub(1, Ordering::SeqCst);
        }
    }

    pub fn has(&self, ino: u64) -> bool {
        self.any() && self.shard(ino).lock().contains_key(&ino)
    }

    pub fn any(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inode_has_writers_until_the_last_is_removed() {
        let writers = Writers::default();
        assert!(writers.add(5));
        assert!(!writers.add(5));
        assert!(writers.has(5));
        assert!(!writers.has(6));
        writers.remove(5);
        assert!(writers.has(5));
        writers.remove(5);
        assert!(!writers.has(5));
        assert!(!writers.any());
        writers.remove(5);
        assert!(!writers.any());
    }
}
