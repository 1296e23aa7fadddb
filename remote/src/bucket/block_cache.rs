//! Blocks of objects that a writer has in memory although they are up: what its last records had, and what it was told that it will need.
//!
//! # Invariants
//! NEAR-1  A block is named by its object and its place there, and an object never changes (BUCKET-1): nothing here is ever stale, wherever the archive's blocks lie meanwhile.
//! NEAR-2  What is under way is waited for by who reads it, and not asked for twice. When it does not come, who reads asks by itself and is told why.

use std::collections::{HashSet, VecDeque};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use lru::LruCache;
use parking_lot::{Condvar, Mutex};

use super::blocks::{Blocks, Fetch, fetches};
use super::layout::BLOCK;
use super::object_ref::{Entry, Id, Place};

/// Blocks in memory: 4 MiB.
const KEPT: NonZeroUsize = NonZeroUsize::new(4 << 8).unwrap();
/// Requests under way at once: more than a page of file data has pieces.
const AT_ONCE: usize = 32;

pub(super) type Block = [u8; BLOCK as usize];

/// A block of an object.
type Name = (Id, u32);

/// See above.
pub(super) struct Near {
    blocks: Blocks,
    state: Mutex<State>,
    arrived: Condvar,
}

struct State {
    blocks: LruCache<Name, Arc<Block>>,
    coming: HashSet<Name>,
    queue: VecDeque<Fetch>,
    threads: usize,
}

impl Near {
    pub(super) fn new(blocks: Blocks) -> Near {
        let state = State { blocks: LruCache::new(KEPT), coming: HashSet::new(), queue: VecDeque::new(), threads: 0 };
        Near { blocks, state: Mutex::new(state), arrived: Condvar::new() }
    }

    /// Keeps what is in the store by now.
    pub(super) fn keep(&self, place: &Place, block: &Block) {
        self.state.lock().blocks.put((place.id, place.at), Arc::new(*block));
    }

    /// Has blocks brought, all at once. A hint: more than there is room for is passed over.
    pub(super) fn expect(self: &Arc<Near>, parts: &[Entry]) {
        let state = &mut *self.state.lock();
        let mut missing = Vec::new();
        for (block, place) in parts.iter().flat_map(each) {
            let name = (place.id, place.at);
            // Looked at as if it were read: what comes is not to take its place.
            let is_here = state.blocks.get(&name).is_some();
            if !is_here && state.coming.len() < KEPT.get() && state.coming.insert(name) {
                missing.push(Entry { blocks: block..block + 1, place: Some(place) });
            }
        }
        let fetches = fetches(&missing);
        // None of those that are there waits for work.
        let wanted = state.threads + fetches.len();
        state.queue.extend(fetches);
        while state.threads < wanted.min(AT_ONCE) {
            let near = self.clone();
            if thread::Builder::new().name("fetch".into()).spawn(move || near.bring()).is_err() {
                break;
            }
            state.threads += 1;
        }
        if state.threads == 0 {
            // Nobody brings it.
            state.queue.clear();
            state.coming.clear();
        }
    }

    /// A thread that brings what is expected.
    fn bring(&self) {
        loop {
            let mut state = self.state.lock();
            let Some(fetch) = state.queue.pop_front() else {
                state.threads -= 1;
                return;
            };
            drop(state);
            let came = self.blocks.of(&fetch.place, fetch.blocks * BLOCK);
            let bytes = came.unwrap_or_default();
            let state = &mut *self.state.lock();
            for (blocks, at) in &fetch.parts {
                for at in *at..*at + (blocks.end - blocks.start) as u32 {
                    let name = (fetch.place.id, at);
                    state.coming.remove(&name);
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

    /// The blocks of these parts that are here, when those have come that are under way; and what has to be asked for.
    pub(super) fn take(&self, parts: Vec<Entry>) -> (Vec<(u64, Arc<Block>)>, Vec<Entry>) {
        let (mut here, mut missing) = (Vec::new(), Vec::new());
        let mut state = self.state.lock();
        for part in parts {
            let mut rest = part.blocks.start;
            for (block, place) in each(&part) {
                let name = (place.id, place.at);
                while state.coming.contains(&name) {
                    self.arrived.wait(&mut state);
                }
                if let Some(found) = state.blocks.get(&name) {
                    here.push((block, found.clone()));
                    missing.extend(cut(&part, rest..block));
                    rest = block + 1;
                }
            }
            missing.extend(cut(&part, rest..part.blocks.end));
        }
        (here, missing)
    }
}

/// Each block of what has a place, and where it lies.
fn each(part: &Entry) -> impl Iterator<Item = (u64, Place)> + use<> {
    let Entry { blocks, place } = part.clone();
    let first = blocks.start;
    place.into_iter().flat_map(move |place| {
        blocks.clone().map(move |block| (block, Place { at: place.at + (block - first) as u32, ..place }))
    })
}

/// These blocks of it; None for none.
fn cut(part: &Entry, blocks: Range<u64>) -> Option<Entry> {
    let behind = (blocks.start - part.blocks.start) as u32;
    let place = part.place.map(|place| Place { at: place.at + behind, ..place });
    (!blocks.is_empty()).then_some(Entry { blocks, place })
}
