//! A sharded LRU with a byte budget: of decompressed cells and opened heads here, of decoded nodes in `btree`.

use std::hash::Hash;

use lru::LruCache;
use parking_lot::Mutex;

use crate::error::CacheUse;
use crate::format::Pointer;

/// Shards, each with its own lock: several times the threads that serve requests.
const SHARDS: usize = 16;
/// Bytes counted for an entry beside its content: key, links, allocation headers.
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

struct Shard<K, V> {
    /// Values with their bytes.
    entries: LruCache<K, (V, usize)>,
    bytes: usize,
    /// Counted under the lock that is held anyway.
    hits: u64,
    misses: u64,
}

/// The values that were used last. Its locks are leaves: nothing else is locked, read or written while one is held.
pub(crate) struct Cache<K, V> {
    shards: [Mutex<Shard<K, V>>; SHARDS],
    shard_budget: usize,
}

impl<K: CacheKey, V: Clone> Cache<K, V> {
    /// `budget` in bytes.
    pub(crate) fn new(budget: usize) -> Cache<K, V> {
        let shard = || Shard { entries: LruCache::unbounded(), bytes: 0, hits: 0, misses: 0 };
        Cache { shards: std::array::from_fn(|_| Mutex::new(shard())), shard_budget: budget / SHARDS }
    }

    fn shard(&self, key: &K) -> &Mutex<Shard<K, V>> {
        // Fibonacci hashing: addresses are often multiples of a page's blocks, so their low bits alone would share few shards.
        let hash = key.place().wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.shards[hash as usize % SHARDS]
    }

    pub(crate) fn get(&self, key: &K) -> Option<V> {
        let mut shard = self.shard(key).lock();
        let found = shard.entries.get(key).map(|(value, _)| value.clone());
        let counter = if found.is_some() { &mut shard.hits } else { &mut shard.misses };
        *counter += 1;
        found
    }

    /// Whether it is there; counted neither as found nor as used.
    pub(crate) fn has(&self, key: &K) -> bool {
        self.shard(key).lock().entries.contains(key)
    }

    /// Keeps `value`, which takes `bytes` of memory.
    pub(crate) fn put(&self, key: K, value: V, bytes: usize) {
        let bytes = bytes + ENTRY_OVERHEAD;
        // Freed behind the lock.
        let mut gone = Vec::new();
        let mut shard = self.shard(&key).lock();
        shard.bytes += bytes;
        if let Some(old) = shard.entries.put(key, (value, bytes)) {
            shard.bytes -= old.1;
            gone.push(old);
        }
        while shard.bytes > self.shard_budget {
            let Some((_, old)) = shard.entries.pop_lru() else { break };
            shard.bytes -= old.1;
            gone.push(old);
        }
        drop(shard);
    }

    pub(crate) fn forget(&self, key: &K) {
        let mut shard = self.shard(key).lock();
        if let Some((_, bytes)) = shard.entries.pop(key) {
            shard.bytes -= bytes;
        }
    }

    /// Forgets everything.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.bytes = 0;
            shard.entries.clear();
        }
    }

    /// What is held now, and how often something was found since the start.
    pub(crate) fn usage(&self) -> CacheUse {
        self.shards.iter().map(|shard| shard.lock()).fold(CacheUse::default(), |sum, shard| CacheUse {
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
    fn another_page_at_the_same_address_is_another_entry() {
        let cache = Cache::new(1 << 20);
        let mut page = Pointer { run: Run::new(500, 1), generation: Generation(1), tag: [1; 16] };
        cache.put((page, 0), 1, 10);
        page.tag = [2; 16];
        assert!(cache.get(&(page, 0)).is_none());
    }
}
