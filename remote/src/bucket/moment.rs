//! One moment of an archive in a bucket: what its newest record names. It never changes, and what it needs stays for a day after newer records need it no more.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread;

use lockbox::{Error, Result};

use super::layout::{BLOCK, Dead, Incarnation, Owner, Said, Trailer};
use super::map::Map;
use super::place::{Entry, Place};
use super::store::{Store, hex};
use crate::source::{Source, Trouble, Version};

/// Times that a reader begins anew because the writer went on while it looked.
const TRIES: usize = 8;
/// Blocks between two parts of an object that are fetched along rather than asked for apart.
const GAP: u64 = 16;

/// What the newest record says.
pub(crate) struct Moment {
    pub(super) trailer: Trailer,
    pub(super) map: Map,
    pub(super) dead: Vec<Dead>,
    pub(super) owner: Owner,
}

impl Moment {
    /// The newest one; None before the first record.
    ///
    /// # Errors
    /// Those of requests; `Damaged`.
    pub(super) fn newest(store: &Store, incarnation: &Incarnation) -> Result<Option<Moment>> {
        for _ in 0..TRIES {
            let Some(sequence) = store.newest(incarnation)? else { return Ok(None) };
            // The newest record is never removed, so it was not the newest any more.
            let Some((trailer, said)) = store.record(incarnation, sequence)? else { continue };
            match Moment::of(store, incarnation, trailer, said) {
                // Who slept for a day looks for what was removed meanwhile.
                Err(Error::Damaged(_)) if store.newest(incarnation)? != Some(sequence) => {}
                moment => return moment.map(Some),
            }
        }
        Err(Error::damaged(format!("{}: the newest record that is listed is not there", store.name)))
    }

    fn of(store: &Store, incarnation: &Incarnation, trailer: Trailer, said: Said) -> Result<Moment> {
        let mut map = store.checkpoint(incarnation, trailer.checkpoint)?;
        for entry in &said.changes {
            map.lay(entry);
        }
        if map.end() > trailer.length.div_ceil(BLOCK) {
            return Err(Error::damaged(format!("{}: a map of more than the archive has", store.name)));
        }
        Ok(Moment { trailer, map, dead: said.dead, owner: said.owner })
    }
}

/// The bytes of a moment.
pub(crate) struct Reading {
    pub(super) store: Arc<Store>,
    pub(super) incarnation: Incarnation,
    pub(super) map: Map,
    pub(super) length: u64,
    /// The number of the newest record of who reads: that of the moment, or a later one of a writer who looks back at its beginning.
    pub(super) sequence: Arc<AtomicU64>,
    /// The hash of the record that names the moment.
    pub(super) tag: String,
}

impl Reading {
    pub(super) fn of(store: Arc<Store>, incarnation: Incarnation, moment: &Moment) -> Reading {
        let (length, tag) = (moment.trailer.length, hex(&moment.trailer.hash));
        let sequence = Arc::new(AtomicU64::new(moment.trailer.sequence));
        Reading { store, incarnation, map: moment.map.clone(), length, sequence, tag }
    }

    fn version(&self) -> Version {
        Version { length: self.length, tag: Some(self.tag.clone()), modified: None }
    }

    fn fill(&self, range: Range<u64>, out: &mut [u8]) -> std::result::Result<(), Trouble> {
        // The file's last block may be a part of one.
        let parts = self.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK));
        fill(&self.store, &self.incarnation, &self.sequence, &parts, range, out)
    }
}

/// The bytes of a range, whose blocks lie where `parts` says, as of the record `sequence`.
pub(super) fn fill(
    store: &Store,
    incarnation: &Incarnation,
    sequence: &AtomicU64,
    parts: &[Entry],
    range: Range<u64>,
    out: &mut [u8],
) -> std::result::Result<(), Trouble> {
    out.fill(0);
    let fetches = fetches(parts);
    for (fetch, bytes) in fetches.iter().zip(fetched(store, incarnation, sequence, &fetches)?) {
        for (blocks, at) in &fetch.parts {
            let from = (u64::from(at - fetch.place.at) * BLOCK) as usize;
            let place = (blocks.start * BLOCK).max(range.start)..(blocks.end * BLOCK).min(range.end);
            let from = from + (place.start - blocks.start * BLOCK) as usize;
            let length = (place.end - place.start) as usize;
            let to = (place.start - range.start) as usize;
            out[to..to + length].copy_from_slice(&bytes[from..from + length]);
        }
    }
    Ok(())
}

/// What each of them brings, several under way at once.
fn fetched(
    store: &Store,
    incarnation: &Incarnation,
    sequence: &AtomicU64,
    fetches: &[Fetch],
) -> std::result::Result<Vec<Vec<u8>>, Trouble> {
    let fetch = |fetch: &Fetch| {
        let mut bytes = vec![0; usize::try_from(fetch.blocks * BLOCK).unwrap_or_default()];
        store.blocks(incarnation, sequence, &fetch.place, &mut bytes).map(|()| bytes)
    };
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
    thread::scope(|scope| {
        for _ in 1..fetches.len().min(store.at_once) {
            // Without them it takes longer.
            let _ = thread::Builder::new().name("fetch".into()).spawn_scoped(scope, work);
        }
        work();
    });
    // One that was not asked for is there only beside one that failed.
    brought.into_iter().filter_map(OnceLock::into_inner).collect()
}

/// One request: so many blocks of an object from a place on, and which blocks of the archive are among them at which of the object's.
struct Fetch {
    place: Place,
    blocks: u64,
    parts: Vec<(Range<u64>, u32)>,
}

/// The requests for these parts: neighbours in an object are asked for together.
fn fetches(parts: &[Entry]) -> Vec<Fetch> {
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

impl Source for Reading {
    fn first(&self, count: u64) -> std::result::Result<(Version, Vec<u8>), Trouble> {
        let mut bytes = vec![0; usize::try_from(count.min(self.length)).unwrap_or_default()];
        self.fill(0..bytes.len() as u64, &mut bytes)?;
        Ok((self.version(), bytes))
    }

    fn whole(&self) -> bool {
        true
    }

    fn range(&self, version: &Version, range: Range<u64>, out: &mut [u8]) -> std::result::Result<(), Trouble> {
        match *version == self.version() {
            true => self.fill(range, out),
            false => Err(Trouble::Changed),
        }
    }
}
