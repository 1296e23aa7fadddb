//! A sharded cache with a byte budget: of decompressed cells and opened heads here, of decoded nodes in `btree`.
//!
//! What goes when there is no room is decided by second chance (the CLOCK of Corbató, 1968): in the order in which they came, but what was used since it was looked at
//! last comes to the end of the order. A list of least recent use would write to two neighbours whenever something is found, which among many entries is
//! waiting for memory twice.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use foldhash::fast::RandomState;
use parking_lot::Mutex;

use crate::error::CacheStats;
use crate::format::Pointer;

/// Shards, each with its own lock: several times the threads that serve requests.
const SHARDS: usize = 16;
/// Bytes counted for an entry beside its content: key, order, allocation headers.
const ENTRY_OVERHEAD: usize = 128;

/// A page, or a part of one. The whole pointer is the key: an address may be reused, and one with another tag names another page.
pub(crate) trait CacheKey: Copy + Eq + Hash {
    /// What differs among the keys in use at a time.
    fn place(&self) -> u64;
}

impl CacheKey for Pointer {
    fn place(&self) -> u64 {
        self.run.address
    }
}

impl CacheKey for (Pointer, u32) {
    fn place(&self) -> u64 {
        self.0.run.address.wrapping_add(self.1.into())
    }
}

impl CacheKey for u32 {
    fn place(&self) -> u64 {
        (*self).into()
    }
}

struct Entry<V> {
    value: V,
    bytes: usize,
    /// Of its place in the order.
    stamp: u64,
    /// Since its place was looked at last.
    used: bool,
}

struct Shard<K, V> {
    entries: HashMap<K, Entry<V>, RandomState>,
    /// Each entry once with its stamp, and some that are gone.
    order: VecDeque<(K, u64)>,
    stamps: u64,
    bytes: usize,
    /// Counted under the lock that is held anyway.
    hits: u64,
    misses: u64,
}

/// What of the order is gone may be as many as the entries and so many more.
const GONE: usize = 32;

impl<K: CacheKey, V> Shard<K, V> {
    /// Takes out of the order what was used longest ago, about; None when nothing is left.
    fn pop(&mut self) -> Option<V> {
        while let Some((key, stamp)) = self.order.pop_front() {
            let Some(entry) = self.entries.get_mut(&key).filter(|entry| entry.stamp == stamp) else { continue };
            if std::mem::take(&mut entry.used) {
                self.order.push_back((key, stamp));
                continue;
            }
            return self.remove(&key);
        }
        None
    }

    fn remove(&mut self, key: &K) -> Option<V> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        Some(entry.value)
    }

    fn insert(&mut self, key: K, value: V, bytes: usize) {
        self.stamps += 1;
        self.bytes += bytes;
        self.entries.insert(key, Entry { value, bytes, stamp: self.stamps, used: false });
        if self.order.len() >= 2 * self.entries.len() + GONE {
            let entries = &self.entries;
            self.order.retain(|(key, stamp)| entries.get(key).is_some_and(|entry| entry.stamp == *stamp));
        }
        self.order.push_back((key, self.stamps));
    }
}

/// The values that were used last, about. Its locks are leaves: nothing else is locked, read or written while one is held.
pub(crate) struct Cache<K, V> {
    shards: [Mutex<Shard<K, V>>; SHARDS],
    shard_budget: usize,
}

impl<K: CacheKey, V: Clone> Cache<K, V> {
    /// `budget` in bytes.
    pub(crate) fn new(budget: usize) -> Cache<K, V> {
        let shard =
            || Shard { entries: HashMap::default(), order: VecDeque::new(), stamps: 0, bytes: 0, hits: 0, misses: 0 };
        Cache { shards: std::array::from_fn(|_| Mutex::new(shard())), shard_budget: budget / SHARDS }
    }

    fn shard(&self, key: &K) -> &Mutex<Shard<K, V>> {
        // Fibonacci hashing: addresses are often multiples of a page's blocks, so their low bits alone would share few shards.
        let hash = key.place().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.shards[hash as usize % SHARDS]
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        let mut shard = self.shard(key).lock();
        let found = shard.entries.get_mut(key).map(|entry| {
            entry.used = true;
            entry.value.clone()
        });
        let counter = if found.is_some() { &mut shard.hits } else { &mut shard.misses };
        *counter += 1;
        found
    }

    /// Whether it is there; counted neither as found nor as used.
    pub(crate) fn has(&self, key: &K) -> bool {
        self.shard(key).lock().entries.contains_key(key)
    }

    /// Keeps `value`, which takes `bytes` of memory, unless it alone is more than the budget.
    pub(crate) fn put(&self, key: K, value: V, bytes: usize) {
        let bytes = bytes + ENTRY_OVERHEAD;
        // Freed behind the lock.
        let mut gone = Vec::new();
        let mut shard = self.shard(&key).lock();
        gone.extend(shard.remove(&key));
        if bytes <= self.shard_budget {
            // Before it comes: what is new is not the first to go.
            while shard.bytes + bytes > self.shard_budget {
                let Some(old) = shard.pop() else { break };
                gone.push(old);
            }
            shard.insert(key, value, bytes);
        }
        drop(shard);
    }

    pub(crate) fn forget(&self, key: &K) {
        let gone = self.shard(key).lock().remove(key);
        drop(gone);
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.bytes = 0;
            shard.entries.clear();
            shard.order.clear();
        }
    }

    /// What is held now, and how often something was found since the start.
    pub(crate) fn usage(&self) -> CacheStats {
        self.shards.iter().map(|shard| shard.lock()).fold(CacheStats::default(), |sum, shard| CacheStats {
            bytes: sum.bytes + shard.bytes as u64,
            hits: sum.hits + shard.hits,
            misses: sum.misses + shard.misses,
        })
    }

    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.usage().bytes as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Generation, Run};

    #[test]
    fn the_budget_bounds_the_cache_and_the_last_used_stay() {
        let cache = Cache::new(SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        for n in 0..10_000 {
            cache.put(page(n), n, 1000);
            assert!(cache.bytes() <= SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
        }
        assert_eq!(cache.get(&page(9_999)).unwrap(), 9_999);
        assert!(cache.get(&page(1)).is_none());
        assert!(cache.has(&page(9_999)) && !cache.has(&page(1)));
        let usage = cache.usage();
        assert_eq!((usage.hits, usage.misses), (1, 1));
        cache.clear();
        assert!(cache.get(&page(9_999)).is_none());
        assert_eq!(cache.bytes(), 0);
    }

    #[test]
    fn what_is_used_again_stays_when_others_come_and_go() {
        let cache = Cache::new(SHARDS * 8 * (1000 + ENTRY_OVERHEAD));
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        cache.put(page(0), 0, 1000);
        for n in 1..10_000 {
            cache.put(page(n), n, 1000);
            assert_eq!(cache.get(&page(0)), Some(0), "after {n}");
        }
        assert!(!cache.has(&page(1)) && cache.has(&page(9_999)));
    }

    #[test]
    fn what_is_forgotten_and_put_again_has_one_place_in_the_order() {
        let cache = Cache::new(1 << 20);
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        for round in 0..1_000 {
            for n in 0..10 {
                cache.put(page(n), round, 100);
            }
            (5..10).for_each(|n| cache.forget(&page(n)));
        }
        for shard in &cache.shards {
            let shard = shard.lock();
            assert!(shard.order.len() <= 2 * 10 + GONE + 1, "{}", shard.order.len());
            let current =
                shard.order.iter().filter(|(key, stamp)| shard.entries.get(key).is_some_and(|e| e.stamp == *stamp));
            assert_eq!(current.count(), shard.entries.len());
        }
        assert_eq!(cache.bytes(), 5 * (100 + ENTRY_OVERHEAD));
    }

    #[test]
    fn what_is_more_than_the_budget_is_not_kept_and_takes_nothing_else_with_it() {
        let cache = Cache::new(SHARDS * 2000);
        cache.put(1u32, 1, 100);
        cache.put(1u32, 2, 200);
        assert_eq!((cache.get(&1), cache.bytes()), (Some(2), 200 + ENTRY_OVERHEAD));
        let same_shard = (2u32..).find(|key| std::ptr::eq(cache.shard(key), cache.shard(&1))).unwrap();
        cache.put(same_shard, 3, 2000);
        assert!(cache.has(&1) && !cache.has(&same_shard));
        cache.put(1u32, 4, 2000);
        assert_eq!((cache.get(&1), cache.bytes()), (None, 0));
    }

    #[test]
    fn another_page_at_the_same_address_is_another_entry() {
        let cache = Cache::new(1 << 20);
        let mut page = Pointer { run: Run::new(500, 1), generation: Generation(1), tag: [1; 16] };
        cache.put((page, 0), 1, 10);
        page.tag = [2; 16];
        assert!(cache.get(&(page, 0)).is_none());
    }
}
