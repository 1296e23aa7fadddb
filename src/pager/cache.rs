//! Sharded cache with a byte budget, for decompressed chunks and decrypted heads, and for decoded
//! nodes in `btree`; and reusable buffers.
//!
//! Eviction is second chance (CLOCK; Corbató, 1968): entries are examined in insertion order, and
//! an entry used since its last examination moves to the end. An LRU list would write to two
//! neighbours on every hit, which with many entries means two cache misses.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use foldhash::fast::RandomState;
use parking_lot::Mutex;
use zeroize::Zeroize;

use crate::error::CacheStats;
use crate::format::Pointer;

/// Shards with separate locks: several times the number of threads that serve requests.
const SHARDS: usize = 16;
/// Bytes counted per entry in addition to its value: key, order and allocation headers.
const ENTRY_OVERHEAD: usize = 128;

/// Cache key: a page or part of one. The whole pointer is the key, because an address may be
/// reused; the tag then differs.
pub(crate) trait CacheKey: Copy + Eq + Hash {
    /// Returns the part of the key that differs most among live keys; input of the shard hash.
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
    /// Stamp of the entry's current position in `order`.
    stamp: u64,
    /// Set by a hit, cleared when the entry is examined for eviction.
    used: bool,
}

struct Shard<K, V> {
    entries: HashMap<K, Entry<V>, RandomState>,
    /// Every entry once, with its stamp, plus some stale positions.
    order: VecDeque<(K, u64)>,
    stamps: u64,
    bytes: usize,
    /// Counters are updated under the shard lock, which is held anyway.
    hits: u64,
    misses: u64,
}

/// Stale positions allowed in `order` in addition to the number of live entries.
const MAX_STALE: usize = 32;

impl<K: CacheKey, V> Shard<K, V> {
    /// Evicts the entry that was used least recently, approximately. `None` when the shard is
    /// empty.
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
        if self.order.len() >= 2 * self.entries.len() + MAX_STALE {
            let entries = &self.entries;
            self.order.retain(|(key, stamp)| entries.get(key).is_some_and(|entry| entry.stamp == *stamp));
        }
        self.order.push_back((key, self.stamps));
    }
}

/// Cache of recently used values. Its locks are leaves: no other lock or I/O happens under them.
pub(crate) struct ShardedCache<K, V> {
    shards: [Mutex<Shard<K, V>>; SHARDS],
    shard_budget: usize,
}

impl<K: CacheKey, V: Clone> ShardedCache<K, V> {
    pub(crate) fn new(budget: usize) -> ShardedCache<K, V> {
        let shard =
            || Shard { entries: HashMap::default(), order: VecDeque::new(), stamps: 0, bytes: 0, hits: 0, misses: 0 };
        ShardedCache { shards: std::array::from_fn(|_| Mutex::new(shard())), shard_budget: budget / SHARDS }
    }

    fn shard(&self, key: &K) -> &Mutex<Shard<K, V>> {
        // Fibonacci hashing: addresses are often multiples of a page size, so the low bits alone
        // would use few shards.
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

    /// Returns whether `key` is cached, without counting a hit or marking the entry as used.
    pub(crate) fn has(&self, key: &K) -> bool {
        self.shard(key).lock().entries.contains_key(key)
    }

    /// Inserts `value` of `bytes` bytes, unless it exceeds the budget of a shard by itself.
    pub(crate) fn put(&self, key: K, value: V, bytes: usize) {
        let bytes = bytes + ENTRY_OVERHEAD;
        // Freed after the lock is released.
        let mut evicted = Vec::new();
        let mut shard = self.shard(&key).lock();
        evicted.extend(shard.remove(&key));
        if bytes <= self.shard_budget {
            // Evict before inserting, so that the new entry is not the first to be evicted.
            while shard.bytes + bytes > self.shard_budget {
                let Some(old) = shard.pop() else { break };
                evicted.push(old);
            }
            shard.insert(key, value, bytes);
        }
        drop(shard);
    }

    pub(crate) fn forget(&self, key: &K) {
        let evicted = self.shard(key).lock().remove(key);
        drop(evicted);
    }

    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.bytes = 0;
            shard.entries.clear();
            shard.order.clear();
        }
    }

    pub(crate) fn usage(&self) -> CacheStats {
        self.shards.iter().map(|shard| shard.lock()).fold(CacheStats::default(), |sum, shard| CacheStats {
            bytes: sum.bytes + shard.bytes as u64,
            hits: sum.hits + shard.hits,
            misses: sum.misses + shard.misses,
        })
    }
}

/// Reusable buffers for plain file data, wiped when their content must be forgotten.
///
/// They are reused because zeroing a buffer costs as much as decrypting the page that goes into it.
/// After a read a buffer holds content that may be deleted and purged later, or that must not stay
/// in memory while the machine sleeps. The pool therefore belongs to the archive and not to a
/// thread, which could not be made to wipe its memory: [`BufferPool::wipe`] wipes all idle buffers,
/// and each user of a buffer wipes it on return if `wipe` was called in between.
#[derive(Default)]
pub(crate) struct BufferPool(Mutex<PoolState>);

#[derive(Default)]
struct PoolState {
    free: Vec<Vec<u8>>,
    wipes: u64,
}

impl BufferPool {
    /// Runs `f` with an exclusive buffer. Its content is left over from an earlier use and has no
    /// meaning.
    pub(crate) fn with_buffer<R>(&self, f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        let (wipes, buffer) = {
            let mut state = self.0.lock();
            (state.wipes, state.free.pop())
        };
        let mut buffer = buffer.unwrap_or_default();
        let done = f(&mut buffer);
        let mut state = self.0.lock();
        if state.wipes == wipes {
            state.free.push(buffer);
        } else {
            drop(state);
            buffer.zeroize();
        }
        done
    }

    /// Wipes all idle buffers and returns their memory to the host. Concurrent reads wipe theirs on
    /// return.
    pub(crate) fn wipe(&self) {
        let mut buffers = {
            let mut state = self.0.lock();
            state.wipes += 1;
            std::mem::take(&mut state.free)
        };
        buffers.zeroize();
    }
}

/// Returns the first `length` bytes of `buffer`, growing it if needed. Wipes the old allocation
/// before it is replaced.
pub(crate) fn grow_to(buffer: &mut Vec<u8>, length: usize) -> &mut [u8] {
    if buffer.len() < length {
        if buffer.capacity() < length {
            buffer.zeroize();
        }
        buffer.resize(length, 0);
    }
    &mut buffer[..length]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Generation, Run};

    impl<K: CacheKey, V: Clone> ShardedCache<K, V> {
        pub(crate) fn bytes(&self) -> usize {
            self.usage().bytes as usize
        }
    }

    #[test]
    fn the_budget_bounds_the_cache_and_the_last_used_stay() {
        let cache = ShardedCache::new(SHARDS * 4 * (1000 + ENTRY_OVERHEAD));
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
    fn used_entries_survive_eviction() {
        let cache = ShardedCache::new(SHARDS * 8 * (1000 + ENTRY_OVERHEAD));
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        cache.put(page(0), 0, 1000);
        for n in 1..10_000 {
            cache.put(page(n), n, 1000);
            assert_eq!(cache.get(&page(0)), Some(0), "after {n}");
        }
        assert!(!cache.has(&page(1)) && cache.has(&page(9_999)));
    }

    #[test]
    fn a_reinserted_entry_has_one_position() {
        let cache = ShardedCache::new(1 << 20);
        let page = |n: u64| Pointer { run: Run::new(n, 1), generation: Generation(1), tag: [0; 16] };
        for round in 0..1_000 {
            for n in 0..10 {
                cache.put(page(n), round, 100);
            }
            (5..10).for_each(|n| cache.forget(&page(n)));
        }
        for shard in &cache.shards {
            let shard = shard.lock();
            assert!(shard.order.len() <= 2 * 10 + MAX_STALE + 1, "{}", shard.order.len());
            let current =
                shard.order.iter().filter(|(key, stamp)| shard.entries.get(key).is_some_and(|e| e.stamp == *stamp));
            assert_eq!(current.count(), shard.entries.len());
        }
        assert_eq!(cache.bytes(), 5 * (100 + ENTRY_OVERHEAD));
    }

    #[test]
    fn an_entry_over_budget_is_not_cached_and_evicts_nothing() {
        let cache = ShardedCache::new(SHARDS * 2000);
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
        let cache = ShardedCache::new(1 << 20);
        let mut page = Pointer { run: Run::new(500, 1), generation: Generation(1), tag: [1; 16] };
        cache.put((page, 0), 1, 10);
        page.tag = [2; 16];
        assert!(cache.get(&(page, 0)).is_none());
    }

    #[test]
    fn a_buffer_is_reused_until_wiped() {
        let buffers = BufferPool::default();
        buffers.with_buffer(|buffer| grow_to(buffer, 6).copy_from_slice(b"secret"));
        buffers.with_buffer(|buffer| assert_eq!(buffer, b"secret", "it is neither allocated nor zeroed again"));
        buffers.wipe();
        buffers.with_buffer(|buffer| assert_eq!(buffer.capacity(), 0));
    }

    #[test]
    fn a_read_that_runs_meanwhile_wipes_its_buffer_itself() {
        let buffers = BufferPool::default();
        buffers.with_buffer(|buffer| {
            grow_to(buffer, 6).copy_from_slice(b"secret");
            buffers.wipe();
            assert_eq!(buffer, b"secret", "it is in use");
        });
        buffers.with_buffer(|buffer| assert_eq!(buffer.capacity(), 0, "it was not kept"));
    }

    #[test]
    fn two_reads_at_once_have_buffers_of_their_own() {
        let buffers = BufferPool::default();
        buffers.with_buffer(|one| {
            grow_to(one, 1)[0] = 1;
            buffers.with_buffer(|two| grow_to(two, 1)[0] = 2);
            assert_eq!(one, &[1]);
        });
        assert_eq!(buffers.0.lock().free.len(), 2);
    }
}
