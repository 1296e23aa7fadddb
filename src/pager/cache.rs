//! What was read out of data pages, decompressed cells and opened heads: a sharded LRU with a byte budget.

use lru::LruCache;
use parking_lot::Mutex;

use crate::error::CacheUse;
use crate::format::Pointer;

const SHARDS: usize = 16;
/// Bytes counted for an entry beside its content: key, links, allocation headers.
const ENTRY_OVERHEAD: usize = 128;

// The tag is part of the key because an address may be reused within one generation.
#[derive(PartialEq, Eq, Hash, Clone, Copy)]
struct PartKey {
    address: u64,
    tag: u64,
    part: u32,
}

struct Shard<V> {
    /// Values with their bytes.
    entries: LruCache<PartKey, (V, usize)>,
    bytes: usize,
    /// Counted under the lock that is held anyway.
    hits: u64,
    misses: u64,
}

/// Parts of pages by (page, number of the part).
pub(crate) struct PartCache<V> {
    shards: Vec<Mutex<Shard<V>>>,
    shard_budget: usize,
}

impl<V: Clone> PartCache<V> {
    pub(crate) fn new(budget: usize) -> PartCache<V> {
        let shards =
            (0..SHARDS).map(|_| Mutex::new(Shard { entries: LruCache::unbounded(), bytes: 0, hits: 0, misses: 0 }));
        PartCache { shards: shards.collect(), shard_budget: budget / SHARDS }
    }

    fn locate(&self, page: &Pointer, part: u32) -> (PartKey, &Mutex<Shard<V>>) {
        let [a, b, c, d, e, f, g, h, ..] = page.tag;
        let key = PartKey { address: page.run.address, tag: u64::from_le_bytes([a, b, c, d, e, f, g, h]), part };
        let spread = (key.address ^ key.tag).wrapping_add(u64::from(part));
        (key, &self.shards[spread as usize % SHARDS])
    }

    pub(crate) fn get(&self, page: &Pointer, part: u32) -> Option<V> {
        let (key, shard) = self.locate(page, part);
        let mut shard = shard.lock();
        let found = shard.entries.get(&key).map(|(value, _)| value.clone());
        let counter = if found.is_some() { &mut shard.hits } else { &mut shard.misses };
        *counter += 1;
        found
    }

    /// Whether it is there; counted neither as found nor as used.
    pub(crate) fn has(&self, page: &Pointer, part: u32) -> bool {
        let (key, shard) = self.locate(page, part);
        shard.lock().entries.contains(&key)
    }

    /// Keeps `value`, which takes `bytes` of memory.
    pub(crate) fn put(&self, page: &Pointer, part: u32, value: V, bytes: usize) {
        let (key, shard) = self.locate(page, part);
        let bytes = bytes + ENTRY_OVERHEAD;
        // Freed behind the lock.
        let mut gone = Vec::new();
        let mut shard = shard.lock();
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
        let cache = PartCache::new(SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        for n in 0..10_000 {
            cache.put(&page(n), 0, n, 1000);
            assert!(cache.bytes() <= SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
        }
        assert_eq!(cache.get(&page(9_999), 0).unwrap(), 9_999);
        assert!(cache.get(&page(1), 0).is_none());
        assert!(cache.has(&page(9_999), 0) && !cache.has(&page(1), 0));
        let usage = cache.usage();
        assert_eq!((usage.hits, usage.misses), (1, 1));
        cache.clear();
        assert!(cache.get(&page(9_999), 0).is_none());
        assert_eq!(cache.bytes(), 0);
    }

    #[test]
    fn another_page_at_the_same_address_is_another_entry() {
        let cache = PartCache::new(1 << 20);
        let mut page = Pointer { run: Run::new(500, 1), generation: Generation(1), tag: [1; 16] };
        cache.put(&page, 0, 1, 10);
        page.tag = [2; 16];
        assert!(cache.get(&page, 0).is_none());
    }
}
