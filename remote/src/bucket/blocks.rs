//! Fetches blocks of an archive from its objects: adjacent blocks together, several requests
//! concurrently.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::layout::{BLOCK, Incarnation};
use super::object_ref::{MapEntry, ObjectRef};
use super::parallel::run_on_threads;
use super::store::BucketStore;
use crate::range_source::RemoteResult;

/// Maximum objects requested concurrently by one read: the start of a written archive spans many.
const MAX_CONCURRENT: usize = 16;
/// Maximum gap, in blocks, between two parts of an object that are fetched with one request.
const MAX_GAP: u64 = 32;

/// Fetches blocks of an archive, independent of its version.
#[derive(Clone)]
pub(super) struct BlockFetcher {
    pub(super) store: Arc<BucketStore>,
    pub(super) incarnation: Incarnation,
    /// Sequence of the newest record that the reader depends on: that of its version, or a later
    /// one of a writer that still reads its base.
    pub(super) sequence: Arc<AtomicU64>,
}

impl BlockFetcher {
    /// Fetches `length` bytes from an object.
    pub(super) fn fetch(&self, place: &ObjectRef, length: u64) -> RemoteResult<Vec<u8>> {
        self.store.read_blocks(&self.incarnation, &self.sequence, place, length)
    }

    /// Fills `out` with a range from the locations in `parts`; unmapped blocks are zeros.
    pub(super) fn fill(&self, parts: &[MapEntry], range: Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        out.fill(0);
        self.overlay(parts, range, out)
    }

    /// Like [`Self::fill`], but keeps the bytes of unmapped blocks.
    pub(super) fn overlay(&self, parts: &[MapEntry], range: Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        let fetches = plan_fetches(parts);
        let fetched = self.fetch_all(&fetches)?;
        scatter(&fetches, fetched, &range, out);
        Ok(())
    }

    /// Runs all fetches concurrently.
    fn fetch_all(&self, fetches: &[BlockFetch]) -> RemoteResult<Vec<Vec<u8>>> {
        let fetch = |fetch: &BlockFetch| self.fetch(&fetch.place, fetch.blocks * BLOCK);
        if let [one] = fetches {
            return Ok(vec![fetch(one)?]);
        }
        let fetched: Vec<OnceLock<_>> = fetches.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((fetch_of, place)) = {
                let number = next.fetch_add(1, Ordering::Relaxed);
                fetches.get(number).zip(fetched.get(number))
            } {
                let answer = fetch(fetch_of);
                // The others are asked for in vain.
                let failed = answer.is_err();
                let _ = place.set(answer);
                if failed {
                    next.store(fetches.len(), Ordering::Relaxed);
                }
            }
        };
        run_on_threads("fetch", fetches.len().min(MAX_CONCURRENT), work);
        // A fetch is skipped only after another one failed.
        fetched.into_iter().filter_map(OnceLock::into_inner).collect()
    }
}

/// Copies the fetched bytes to their places in the range.
fn scatter(fetches: &[BlockFetch], fetched: Vec<Vec<u8>>, range: &Range<u64>, out: &mut [u8]) {
    for (fetch, bytes) in fetches.iter().zip(fetched) {
        for (blocks, at) in &fetch.parts {
            let from = (u64::from(at - fetch.place.at) * BLOCK) as usize;
            let place = (blocks.start * BLOCK).max(range.start)..(blocks.end * BLOCK).min(range.end);
            let from = from + (place.start - blocks.start * BLOCK) as usize;
            let length = (place.end - place.start) as usize;
            let to = (place.start - range.start) as usize;
            out[to..to + length].copy_from_slice(&bytes[from..from + length]);
        }
    }
}

/// One request: a run of blocks of an object, and the archive blocks among them with their
/// positions in the object.
pub(super) struct BlockFetch {
    pub(super) place: ObjectRef,
    pub(super) blocks: u64,
    pub(super) parts: Vec<(Range<u64>, u32)>,
}

/// Groups parts into requests: neighbours in an object share one.
pub(super) fn plan_fetches(parts: &[MapEntry]) -> Vec<BlockFetch> {
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
