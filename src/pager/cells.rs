//! The frame cache: decompressed cells of data pages in a sharded LRU with a byte budget.

use std::sync::Arc;

use lru::LruCache;
use parking_lot::Mutex;

use crate::format::Pointer;

const SHARDS: usize = 16;
/// Bytes counted for an entry beside its content: key, links, allocation headers.
const ENTRY_OVERHEAD: usize = 128;

// The tag is part of the key because an address may be reused within one generation.
#[derive(PartialEq, Eq, Hash, Clone, Copy)]
struct CellKey {
    address: u64,
    tag: u64,
    cell: u32,
}

struct Shard {
    entries: LruCache<CellKey, Arc<[u8]>>,
    bytes: usize,
}

/// Decompressed cells by (page, cell number).
pub(crate) struct CellCache {
    shards: Vec<Mutex<Shard>>,
    shard_budget: usize,
}

impl CellCache {
    pub(crate) fn new(budget: usize) -> CellCache {
        let shards = (0..SHARDS).map(|_| Mutex::new(Shard { entries: LruCache::unbounded(), bytes: 0 })).collect();
        CellCache { shards, shard_budget: budget / SHARDS }
    }

    fn place(&self, page: &Pointer, cell: u32) -> (CellKey, &Mutex<Shard>) {
        let [a, b, c, d, e, f, g, h, ..] = page.tag;
        let key = CellKey { address: page.run.address, tag: u64::from_le_bytes([a, b, c, d, e, f, g, h]), cell };
        let spread = (key.address ^ key.tag).wrapping_add(u64::from(cell));
        (key, &self.shards[spread as usize % SHARDS])
    }

    pub(crate) fn get(&self, page: &Pointer, cell: u32) -> Option<Arc<[u8]>> {
        let (key, shard) = self.place(page, cell);
        shard.lock().entries.get(&key).cloned()
    }

    pub(crate) fn put(&self, page: &Pointer, cell: u32, plain: Arc<[u8]>) {
        let (key, shard) = self.place(page, cell);
        let mut shard = shard.lock();
        shard.bytes += plain.len() + ENTRY_OVERHEAD;
        if let Some(old) = shard.entries.put(key, plain) {
            shard.bytes -= old.len() + ENTRY_OVERHEAD;
        }
        while shard.bytes > self.shard_budget {
            let Some((_, old)) = shard.entries.pop_lru() else { break };
            shard.bytes -= old.len() + ENTRY_OVERHEAD;
        }
    }

    /// Bytes held now.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Generation, Run};

    #[test]
    fn the_budget_bounds_the_cache_and_the_last_used_stay() {
        let cache = CellCache::new(SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        for n in 0..10_000 {
            cache.put(&page(n), 0, vec![n as u8; 1000].into());
            assert!(cache.bytes() <= SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
        }
        assert_eq!(cache.get(&page(9_999), 0).unwrap()[0], 9_999u64 as u8);
        assert!(cache.get(&page(1), 0).is_none());
    }

    #[test]
    fn another_page_at_the_same_address_is_another_entry() {
        let cache = CellCache::new(1 << 20);
        let mut page = Pointer { run: Run::new(500, 1), generation: Generation(1), tag: [1; 16] };
        cache.put(&page, 0, vec![1; 10].into());
        page.tag = [2; 16];
        assert!(cache.get(&page, 0).is_none());
    }
}
