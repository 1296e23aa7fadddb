//! In-memory cache of uploaded blocks: inline blocks of a writer's last records, and prefetched
//! ones.
//!
//! # Invariants
//! NEAR-1  A block is keyed by its object and its position there, and an object never changes
//!     (BUCKET-1): no entry is ever stale, wherever the archive's blocks move.
//! NEAR-2  A reader waits for a block in flight and does not request it again. If the fetch fails,
//!     the reader requests the block itself and gets the error.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use lru::LruCache;
use parking_lot::{Condvar, Mutex};

use super::blocks::{BlockFetch, BlockFetcher, plan_fetches};
use super::layout::BLOCK;
use super::object_ref::{MapEntry, ObjectId, ObjectRef};

/// Capacity in blocks: 4 MiB.
const CAPACITY: NonZeroUsize = NonZeroUsize::new(4 << 8).unwrap();
/// Maximum concurrent requests: more than the pieces of a page of file data.
const MAX_CONCURRENT: usize = 32;

pub(super) type BlockBytes = [u8; BLOCK as usize];

/// Object and block number in it.
type BlockKey = (ObjectId, u32);

/// In-memory cache of uploaded blocks.
pub(super) struct BlockCache {
    blocks: BlockFetcher,
    state: Mutex<CacheState>,
    arrived: Condvar,
}

struct CacheState {
    blocks: LruCache<BlockKey, Arc<BlockBytes>>,
    in_flight: HashSet<BlockKey>,
    queue: VecDeque<BlockFetch>,
    threads: usize,
}

impl BlockCache {
    pub(super) fn new(blocks: BlockFetcher) -> BlockCache {
        let state = CacheState {
            blocks: LruCache::new(CAPACITY),
            in_flight: HashSet::new(),
            queue: VecDeque::new(),
            threads: 0,
        };
        BlockCache { blocks, state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Inserts a block that the store has.
    pub(super) fn insert(&self, place: &ObjectRef, block: &BlockBytes) {
        self.state.lock().blocks.put((place.id, place.at), Arc::new(*block));
    }

    /// Prefetches blocks concurrently. A hint: excess blocks are dropped.
    pub(super) fn prefetch(self: &Arc<BlockCache>, parts: &[MapEntry]) {
        let state = &mut *self.state.lock();
        let mut missing = Vec::new();
        for (block, place) in parts.iter().flat_map(split_blocks) {
            let name = (place.id, place.at);
            // Counts as a use: prefetched blocks must not evict it.
            let is_here = state.blocks.get(&name).is_some();
            if !is_here && state.in_flight.len() < CAPACITY.get() && state.in_flight.insert(name) {
                missing.push(MapEntry { blocks: block..block + 1, place: Some(place) });
            }
        }
        let fetches = plan_fetches(&missing);
        // All running threads are busy.
        let wanted = state.threads + fetches.len();
        state.queue.extend(fetches);
        while state.threads < wanted.min(MAX_CONCURRENT) {
            let cache = self.clone();
            if thread::Builder::new().name("fetch".into()).spawn(move || cache.run_prefetch()).is_err() {
                break;
            }
            state.threads += 1;
        }
        if state.threads == 0 {
            // No thread will fetch them.
            state.queue.clear();
            state.in_flight.clear();
        }
    }

    /// Runs a prefetch thread until the queue is empty.
    fn run_prefetch(&self) {
        loop {
            let mut state = self.state.lock();
            let Some(fetch) = state.queue.pop_front() else {
                state.threads -= 1;
                return;
            };
            drop(state);
            let fetched = self.blocks.fetch(&fetch.place, fetch.blocks * BLOCK);
            let bytes = fetched.unwrap_or_default();
            let state = &mut *self.state.lock();
            for (blocks, at) in &fetch.parts {
                for at in *at..*at + (blocks.end - blocks.start) as u32 {
                    let name = (fetch.place.id, at);
                    state.in_flight.remove(&name);
                    let from = (u64::from(at - fetch.place.at) * BLOCK) as usize;
                    let block = bytes.get(from..from + BLOCK as usize);
                    if let Some(block) = block.and_then(|block| block.try_into().ok()) {
                        state.blocks.put(name, Arc::new(block));
                    }
                }
            }
            self.arrived.notify_all();
        }
    }

    /// Returns the cached blocks of the parts, after waiting for those in flight, and the parts to
    /// request.
    pub(super) fn get_or_wait(&self, parts: Vec<MapEntry>) -> (Vec<(u64, Arc<BlockBytes>)>, Vec<MapEntry>) {
        let (mut cached, mut missing) = (Vec::new(), Vec::new());
        let mut state = self.state.lock();
        for part in parts {
            let mut rest = part.blocks.start;
            for (block, place) in split_blocks(&part) {
                let name = (place.id, place.at);
                while state.in_flight.contains(&name) {
                    self.arrived.wait(&mut state);
                }
                if let Some(found) = state.blocks.get(&name) {
                    cached.push((block, found.clone()));
                    missing.extend(slice_entry(&part, rest..block));
                    rest = block + 1;
                }
            }
            missing.extend(slice_entry(&part, rest..part.blocks.end));
        }
        (cached, missing)
    }
}

/// Iterates over the blocks of an entry with their references; zeros have none.
fn split_blocks(part: &MapEntry) -> impl Iterator<Item = (u64, ObjectRef)> + use<> {
    let MapEntry { blocks, place } = part.clone();
    let first = blocks.start;
    place.into_iter().flat_map(move |place| {
        blocks.clone().map(move |block| (block, ObjectRef { at: place.at + (block - first) as u32, ..place }))
    })
}

/// Returns the entry restricted to these blocks; None if there are none.
fn slice_entry(part: &MapEntry, blocks: Range<u64>) -> Option<MapEntry> {
    let behind = (blocks.start - part.blocks.start) as u32;
    let place = part.place.map(|place| ObjectRef { at: place.at + behind, ..place });
    (!blocks.is_empty()).then_some(MapEntry { blocks, place })
}
