//! Blocks of an archive are brought from its objects: neighbours together, and several requests under way at once.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use super::layout::{BLOCK, Incarnation};
use super::object_ref::{Entry, Place};
use super::parallel::by_many;
use super::store::Store;
use crate::range_source::Trouble;

/// Objects that are asked for at once by one read: the start of an archive that is written to lies in many.
const AT_ONCE: usize = 16;
/// Blocks between two parts of an object that are fetched along rather than asked for apart.
const GAP: u64 = 32;

/// Where the blocks of an archive come from, whatever the moment.
#[derive(Clone)]
pub(super) struct Blocks {
    pub(super) store: Arc<Store>,
    pub(super) incarnation: Incarnation,
    /// The number of the newest record of who reads, which needs them: that of the moment, or a later one of a writer who looks back at its beginning.
    pub(super) sequence: Arc<AtomicU64>,
}

impl Blocks {
    /// So many bytes of one object, from a place on.
    pub(super) fn of(&self, place: &Place, length: u64) -> Result<Vec<u8>, Trouble> {
        self.store.blocks(&self.incarnation, &self.sequence, place, length)
    }

    /// The bytes of a range, whose blocks lie where `parts` says; zeros where it names nothing.
    pub(super) fn fill(&self, parts: &[Entry], range: Range<u64>, out: &mut [u8]) -> Result<(), Trouble> {
        out.fill(0);
        self.lay(parts, range, out)
    }

    /// The same over what `out` has: that stays where `parts` names nothing.
    pub(super) fn lay(&self, parts: &[Entry], range: Range<u64>, out: &mut [u8]) -> Result<(), Trouble> {
        let fetches = fetches(parts);
        let brought = self.fetched(&fetches)?;
        put(&fetches, brought, &range, out);
        Ok(())
    }

    /// What each of them brings, several under way at once.
    fn fetched(&self, fetches: &[Fetch]) -> Result<Vec<Vec<u8>>, Trouble> {
        let fetch = |fetch: &Fetch| self.of(&fetch.place, fetch.blocks * BLOCK);
        if let [one] = fetches {
            return Ok(vec![fetch(one)?]);
        }
        let brought: Vec<OnceLock<_>> = fetches.iter().map(|_| OnceLock::new()).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some((fetch_of, place)) = {
                let number = next.fetch_add(1, Ordering::Relaxed);
                fetches.get(number).zip(brought.get(number))
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
        by_many("fetch", fetches.len().min(AT_ONCE), work);
        // One that was not asked for is there only beside one that failed.
        brought.into_iter().filter_map(OnceLock::into_inner).collect()
    }
}

/// Lays what was brought where it belongs in the bytes of a range.
fn put(fetches: &[Fetch], brought: Vec<Vec<u8>>, range: &Range<u64>, out: &mut [u8]) {
    for (fetch, bytes) in fetches.iter().zip(brought) {
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

/// One request: so many blocks of an object from a place on, and which blocks of the archive are among them at which of the object's.
pub(super) struct Fetch {
    pub(super) place: Place,
    pub(super) blocks: u64,
    pub(super) parts: Vec<(Range<u64>, u32)>,
}

/// The requests for these parts: neighbours in an object are asked for together.
pub(super) fn fetches(parts: &[Entry]) -> Vec<Fetch> {
    let mut by_object: BTreeMap<_, Vec<(Place, Range<u64>)>> = BTreeMap::new();
    for Entry { blocks, place } in parts {
        if let Some(place) = place {
            by_object.entry(place.id).or_default().push((*place, blocks.clone()));
        }
    }
    let mut fetches: Vec<Fetch> = Vec::new();
    for mut parts in by_object.into_values() {
        parts.sort_unstable_by_key(|(place, _)| place.at);
        let mut last: Option<Fetch> = None;
        for (place, blocks) in parts {
            let count = blocks.end - blocks.start;
            match &mut last {
                Some(fetch) if u64::from(place.at) <= u64::from(fetch.place.at) + fetch.blocks + GAP => {
                    fetch.blocks = fetch.blocks.max(u64::from(place.at - fetch.place.at) + count);
                    fetch.parts.push((blocks, place.at));
                }
                _ => {
                    let next = Fetch { place, blocks: count, parts: vec![(blocks, place.at)] };
                    fetches.extend(last.replace(next));
                }
            }
        }
        fetches.extend(last);
    }
    fetches
}
