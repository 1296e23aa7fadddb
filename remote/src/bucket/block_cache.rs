//! Block fetches of an archive in a bucket, and an in-memory cache of uploaded blocks.
//!
//! Adjacent blocks of an object are fetched together, and several requests run concurrently. The
//! cache has the inline blocks of a writer's last records, and prefetched ones.
//!
//! # Invariants
//! NEAR-1  A block is keyed by its object and its position there, and an object never changes
//!     (BUCKET-1): no entry is ever stale, wherever the archive's blocks move.
//! NEAR-2  A reader waits for a block in flight and does not request it again. If the fetch fails,
//!     the reader requests the block itself and gets the error.
//!
//! Whole objects, for a check of all bytes: one request for an object serves both the reads of the
//! archive and the comparison with the hash in the object's name.
//!
//! WHOLE-1  A verdict is about all bytes of an object as the store sent them in one response.
//! WHOLE-2  An object that was received is not requested as a whole again. A file without a name
//!     keeps received objects, and its bytes are authenticated like bytes of the store. Reads of an
//!     object removed from it request their range.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::Instant;

use lru::LruCache;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{FallocateFlags, fallocate};
use sha2::{Digest, Sha256};

use super::layout::{self, BLOCK, Incarnation, MAX_BLOCKS, MAX_BODY, TRAILER_BYTES, Trailer};
use super::map::{MapEntry, ObjectId, ObjectRef};
use super::objects::{ObjectRange, object_path};
use super::store::{BucketStore, run_on_threads};
use crate::range_source::{RemoteResult, copy_shared};
use crate::transport::{self, AttemptClock, LastProgress};

/// Maximum objects requested concurrently by one read: the start of a written archive spans many.
const MAX_CONCURRENT_FETCHES: usize = 16;
/// Maximum gap, in blocks, between two parts of an object that are fetched with one request.
const MAX_GAP: u64 = 32;
/// Maximum length of a segment or a record; the runs of a segment take less than the body of a
/// record.
const MAX_OBJECT_BYTES: u64 = MAX_BLOCKS as u64 * BLOCK + MAX_BODY + TRAILER_BYTES as u64;

/// Fetches blocks of an archive, independent of its version.
#[derive(Clone)]
pub(super) struct BlockFetcher {
    pub(super) store: Arc<BucketStore>,
    pub(super) incarnation: Incarnation,
    /// Sequence of the newest record that the reader depends on: that of its version, or a later
    /// one of a writer that still reads its base.
    pub(super) sequence: Arc<AtomicU64>,
    /// Set for a check of all bytes.
    pub(super) whole: Option<Arc<WholeObjects>>,
}

impl BlockFetcher {
    pub(super) fn fetch(&self, place: &ObjectRef, length: u64) -> RemoteResult<Vec<u8>> {
        let whole = self.whole.as_ref().and_then(|whole| whole.read(&self.store, &self.incarnation, place, length));
        match whole {
            Some(blocks) => Ok(blocks),
            None => self.store.read_blocks(&self.incarnation, &self.sequence, place, length),
        }
    }

    /// Copies a range to `out` from the locations in `parts`. Bytes of unmapped blocks stay; after
    /// a failure all do.
    pub(super) fn fill(&self, parts: &[MapEntry], range: Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        let fetches = plan_fetches(parts);
        let fetched = self.fetch_all(&fetches)?;
        for (fetch, bytes) in fetches.iter().zip(fetched) {
            for (blocks, at) in &fetch.parts {
                let from = (u64::from(at - fetch.place.at) * BLOCK) as usize;
                let length = ((blocks.end - blocks.start) * BLOCK) as usize;
                copy_shared(&bytes[from..from + length], blocks.start * BLOCK, out, range.start);
            }
        }
        Ok(())
    }

    fn fetch_all(&self, fetches: &[BlockFetch]) -> RemoteResult<Vec<Vec<u8>>> {
        let fetch = |fetch: &BlockFetch| self.fetch(&fetch.place, fetch.blocks * BLOCK);
        if let [one] = fetches {
            return Ok(vec![fetch(one)?]);
        }
        let fetched: Vec<(&BlockFetch, OnceLock<_>)> = fetches.iter().map(|fetch| (fetch, OnceLock::new())).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((fetch_of, place)) = fetched.get(next.fetch_add(1, Ordering::Relaxed)) {
                let answer = fetch(fetch_of);
                // The others are asked for in vain.
                if answer.is_err() {
                    next.store(fetches.len(), Ordering::Relaxed);
                }
                let _ = place.set(answer);
            }
        };
        run_on_threads("fetch", fetches.len().min(MAX_CONCURRENT_FETCHES), work);
        // A fetch is skipped only after another one failed.
        fetched.into_iter().filter_map(|(_, answer)| answer.into_inner()).collect()
    }
}

/// One request: a run of blocks of an object, and the archive blocks among them with their
/// positions in the object.
struct BlockFetch {
    place: ObjectRef,
    blocks: u64,
    parts: Vec<(Range<u64>, u32)>,
}

/// Groups parts into requests: neighbours in an object share one.
fn plan_fetches(parts: &[MapEntry]) -> Vec<BlockFetch> {
    let mut by_object: BTreeMap<_, Vec<(ObjectRef, Range<u64>)>> = BTreeMap::new();
    for MapEntry { blocks, place } in parts {
        if let Some(place) = place {
            by_object.entry(place.id).or_default().push((*place, blocks.clone()));
        }
    }
    let mut fetches: Vec<BlockFetch> = Vec::new();
    for mut parts in by_object.into_values() {
        parts.sort_unstable_by_key(|(place, _)| place.at);
        let mut last: Option<BlockFetch> = None;
        for (place, blocks) in parts {
            let count = blocks.end - blocks.start;
            match &mut last {
                Some(fetch) if u64::from(place.at) <= u64::from(fetch.place.at) + fetch.blocks + MAX_GAP => {
                    fetch.blocks = fetch.blocks.max(u64::from(place.at - fetch.place.at) + count);
                    fetch.parts.push((blocks, place.at));
                }
                _ => {
                    let next = BlockFetch { place, blocks: count, parts: vec![(blocks, place.at)] };
                    fetches.extend(last.replace(next));
                }
            }
        }
        fetches.extend(last);
    }
    fetches
}

/// Capacity in blocks: 4 MiB.
const CAPACITY: NonZeroUsize = NonZeroUsize::new(4 << 8).unwrap();
/// Maximum concurrent requests: more than the pieces of a page of file data.
const MAX_PREFETCH_THREADS: usize = 32;

pub(super) type BlockBytes = [u8; BLOCK as usize];

type BlockKey = (ObjectId, u32);

/// In-memory cache of uploaded blocks.
pub(super) struct BlockCache {
    blocks: BlockFetcher,
    state: Mutex<CacheState>,
    arrived: Condvar,
    pub(super) progress: LastProgress,
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
        BlockCache { blocks, state: Mutex::new(state), arrived: Condvar::new(), progress: LastProgress::default() }
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
        while state.threads < wanted.min(MAX_PREFETCH_THREADS) {
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
            let clock = AttemptClock::new(transport::deadline(Instant::now(), self.blocks.store.timeout));
            let request = || self.blocks.fetch(&fetch.place, fetch.blocks * BLOCK);
            let fetched = AttemptClock::run(Some(clock.clone()), request);
            self.progress.note(clock.silent_since());
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
pub(super) fn split_blocks(part: &MapEntry) -> impl Iterator<Item = (u64, ObjectRef)> + use<> {
    let MapEntry { blocks, place } = part.clone();
    let first = blocks.start;
    place.into_iter().flat_map(move |place| {
        blocks.clone().map(move |block| (block, ObjectRef { at: place.at + (block - first) as u32, ..place }))
    })
}

fn slice_entry(part: &MapEntry, blocks: Range<u64>) -> Option<MapEntry> {
    let behind = (blocks.start - part.blocks.start) as u32;
    let place = part.place.map(|place| ObjectRef { at: place.at + behind, ..place });
    (!blocks.is_empty()).then_some(MapEntry { blocks, place })
}

/// Objects of one archive that a check reads as a whole.
pub struct WholeObjects {
    file: File,
    /// Maximum bytes of the objects in the file.
    capacity: u64,
    state: Mutex<WholeState>,
    arrived: Condvar,
}

struct WholeState {
    /// Range of the file of each object that it keeps.
    objects: LruCache<ObjectId, Range<u64>>,
    /// Bytes of these objects.
    bytes: u64,
    /// End of the last object: ranges are not used twice, and the file has holes before it.
    end: u64,
    in_flight: HashSet<ObjectId>,
    /// Result of the comparison of each received object with the hash in its name.
    verdicts: HashMap<ObjectId, bool>,
}

impl WholeObjects {
    /// Keeps received objects in `file`, which is empty and has no name, up to `capacity` bytes.
    pub(super) fn new(file: File, capacity: u64) -> WholeObjects {
        let state = WholeState {
            objects: LruCache::unbounded(),
            bytes: 0,
            end: 0,
            in_flight: HashSet::new(),
            verdicts: HashMap::new(),
        };
        WholeObjects { file, capacity, state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Reads `length` bytes of an object's blocks; None where the caller has to request them.
    pub(super) fn read(
        &self,
        store: &BucketStore,
        incarnation: &Incarnation,
        place: &ObjectRef,
        length: u64,
    ) -> Option<Vec<u8>> {
        let id = &place.id;
        let start = u64::from(place.at) * BLOCK;
        let mut state = self.state.lock();
        while state.in_flight.contains(id) {
            self.arrived.wait(&mut state);
        }
        if let Some(kept) = state.objects.get(id) {
            // Under the lock: the range is not punched meanwhile.
            let wanted = kept.start + start..kept.start + start + length;
            let mut blocks = vec![0; length as usize];
            let read = wanted.end <= kept.end && self.file.read_exact_at(&mut blocks, wanted.start).is_ok();
            return read.then_some(blocks);
        }
        if state.verdicts.contains_key(id) {
            return None;
        }
        state.in_flight.insert(*id);
        drop(state);
        // The request for the range reports a failure, and its repetition comes here again.
        let object = store.objects.get(&object_path(incarnation, id), ObjectRange::All(MAX_OBJECT_BYTES)).ok();
        let verdict = object.as_ref().map(|object| has_expected_content(incarnation, id, object));
        let state = &mut *self.state.lock();
        state.in_flight.remove(id);
        if let (Some(object), Some(verdict)) = (&object, verdict) {
            self.keep(state, *id, object);
            state.verdicts.insert(*id, verdict);
        }
        self.arrived.notify_all();
        object?.get(start as usize..(start + length) as usize).map(<[u8]>::to_vec)
    }

    /// Returns whether the content of an object matches its name; None for one that was not
    /// received as a whole.
    pub(super) fn verdict(&self, id: &ObjectId) -> Option<bool> {
        self.state.lock().verdicts.get(id).copied()
    }

    /// Appends an object to the file and removes the least recently used ones beyond its capacity.
    /// A full host keeps fewer.
    fn keep(&self, state: &mut WholeState, id: ObjectId, object: &[u8]) {
        let kept = state.end..state.end + object.len() as u64;
        state.end = kept.end;
        // Space that a failed or interrupted call leaves is that of the file until its end.
        #[expect(clippy::disallowed_methods, reason = "the call is not repeated when a signal interrupts it")]
        let remove = |range: Range<u64>| {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(&self.file, punch, range.start, range.end - range.start);
        };
        if self.file.write_all_at(object, kept.start).is_err() {
            return remove(kept);
        }
        state.bytes += object.len() as u64;
        state.objects.put(id, kept);
        while state.bytes > self.capacity
            && let Some((_, oldest)) = state.objects.pop_lru()
        {
            state.bytes -= oldest.end - oldest.start;
            remove(oldest);
        }
    }
}

/// Returns whether the bytes match the object's name.
pub(super) fn has_expected_content(incarnation: &Incarnation, id: &ObjectId, bytes: &[u8]) -> bool {
    match id {
        ObjectId::Segment(hash) | ObjectId::Checkpoint(hash) => *hash == *Sha256::digest(bytes),
        ObjectId::Log(number) => {
            let Some(at) = bytes.len().checked_sub(TRAILER_BYTES) else { return false };
            let Ok(trailer) = Trailer::decode(&bytes[at..], incarnation) else { return false };
            if trailer.sequence != *number || trailer.bytes() != bytes.len() as u64 {
                return false;
            }
            let (pages, body) = bytes[..at].split_at((u64::from(trailer.blocks) * BLOCK) as usize);
            trailer.pages_hash == *Sha256::digest(pages) && layout::decode_body(&trailer, body).is_ok()
        }
    }
}
