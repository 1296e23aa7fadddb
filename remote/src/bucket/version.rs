//! One moment of an archive in a bucket: what its newest record names. It never changes, and what it needs stays for a day after newer records need it no more.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lockbox::{Error, Result};
use sha2::{Digest, Sha256};

use super::blocks::Blocks;
use super::layout::{BLOCK, Dead, Incarnation, Owner, Said, Trailer};
use super::map::Map;
use super::object_names::hex;
use super::object_ref::{Entry, Hash, Id, Place};
use super::store::Store;
use crate::range_source::{Label, Source, Trouble, Version};
use crate::remote_file::START;

/// Times that a reader begins anew because the writer went on while it looked.
const TRIES: usize = 8;

/// What the newest record says.
pub(crate) struct Moment {
    pub(super) trailer: Trailer,
    /// What its checkpoint says, and what lies elsewhere.
    pub(super) checkpoint: Map,
    pub(super) changes: Vec<Entry>,
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
        Moment::newest_of(store, incarnation, None)
    }

    /// The same of which the number was just found.
    ///
    /// # Errors
    /// As of [`Moment::newest`].
    pub(super) fn newest_of(
        store: &Store,
        incarnation: &Incarnation,
        mut found: Option<u64>,
    ) -> Result<Option<Moment>> {
        for _ in 0..TRIES {
            let number = found.take().map_or_else(|| store.newest(incarnation), |number| Ok(Some(number)));
            let Some(sequence) = number? else { return Ok(None) };
            // The newest record is never removed, so it was not the newest any more.
            let Some((trailer, said)) = store.first_record(incarnation, sequence)? else { continue };
            let checkpoint = store.checkpoint(incarnation, trailer.checkpoint);
            match checkpoint.and_then(|checkpoint| Moment::of(store, checkpoint, trailer, said)) {
                // Who slept for a day looks for what was removed meanwhile.
                Err(Error::Damaged(_)) if store.newest(incarnation)? != Some(sequence) => {}
                moment => return moment.map(Some),
            }
        }
        Err(Error::damaged(format!("{}: the newest record that is listed is not there", store.name)))
    }

    /// The newest one of a writer that goes on meanwhile. Who looks for the number, and then for the record, has one that was the newest two ways to the store and back ago,
    /// and a writer that makes one commit after the other has made another since; what this gives was the newest one way and back ago.
    ///
    /// # Errors
    /// As of [`Moment::newest`].
    pub(super) fn newest_of_a_race(store: &Store, incarnation: &Incarnation) -> Result<Option<Moment>> {
        let Some(moment) = Moment::newest(store, incarnation)? else { return Ok(None) };
        let Some((trailer, said)) = store.record_behind(incarnation, moment.trailer.sequence)? else {
            return Ok(Some(moment));
        };
        let Moment { trailer: Trailer { checkpoint: name, .. }, checkpoint, .. } = &moment;
        Moment::after(store, incarnation, (*name, checkpoint), trailer, said).map(Some)
    }

    /// Of a record that may name the same checkpoint as an earlier one, `known` with its map: then that is not asked for again.
    ///
    /// # Errors
    /// As of [`Moment::newest`].
    pub(super) fn after(
        store: &Store,
        incarnation: &Incarnation,
        known: (Option<(Hash, u64)>, &Map),
        trailer: Trailer,
        said: Said,
    ) -> Result<Moment> {
        let checkpoint = match trailer.checkpoint == known.0 {
            true => known.1.clone(),
            false => store.checkpoint(incarnation, trailer.checkpoint)?,
        };
        Moment::of(store, checkpoint, trailer, said)
    }

    /// Of a record, and of the map of the checkpoint that it names.
    ///
    /// # Errors
    /// `Damaged`.
    pub(super) fn of(store: &Store, checkpoint: Map, trailer: Trailer, said: Said) -> Result<Moment> {
        let mut map = checkpoint.clone();
        for entry in &said.changes {
            map.lay(entry);
        }
        if map.end() > trailer.length.div_ceil(BLOCK) {
            return Err(Error::damaged(format!("{}: a map of more than the archive has", store.name)));
        }
        Ok(Moment { trailer, checkpoint, changes: said.changes, map, dead: said.dead, owner: said.owner })
    }
}

/// The bytes of a moment.
pub(crate) struct Reading {
    pub(super) blocks: Blocks,
    pub(super) map: Map,
    pub(super) length: u64,
    /// The hash of the record that names the moment.
    pub(super) tag: String,
}

impl Reading {
    pub(super) fn of(store: Arc<Store>, incarnation: Incarnation, moment: &Moment) -> Reading {
        let (length, tag) = (moment.trailer.length, hex(&moment.trailer.hash));
        let sequence = Arc::new(AtomicU64::new(moment.trailer.sequence));
        Reading { blocks: Blocks { store, incarnation, sequence }, map: moment.map.clone(), length, tag }
    }

    pub(super) fn version(&self) -> Version {
        Version { length: self.length, tag: Some(self.tag.clone()), modified: None }
    }

    /// What [`Source::first`] gives of a file's start, of which `old` is that of an earlier moment: blocks that lie where they lay are taken from there.
    pub(super) fn start_after(&self, before: &Reading, old: &[u8]) -> std::result::Result<Vec<u8>, Trouble> {
        let mut start = vec![0; usize::try_from(START.min(self.length)).unwrap_or_default()];
        let count = start.len().div_ceil(BLOCK as usize) as u64;
        let (here, there) = (places(&self.map, count), places(&before.map, count));
        let mut missing = Vec::new();
        for (number, bytes) in (0..).zip(start.chunks_mut(BLOCK as usize)) {
            let at = number as usize * BLOCK as usize;
            match old.get(at..at + bytes.len()) {
                Some(known) if here[number as usize] == there[number as usize] => bytes.copy_from_slice(known),
                _ => missing.extend(self.map.parts(number..number + 1)),
            }
        }
        let all = 0..start.len() as u64;
        self.blocks.lay(&missing, all, &mut start)?;
        Ok(start)
    }

    fn bytes(&self, range: Range<u64>) -> std::result::Result<Vec<u8>, Trouble> {
        // The file's last block may be a part of one.
        let parts = self.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK));
        let length = range.end - range.start;
        match &parts[..] {
            // What lies side by side in one object is what came.
            [Entry { place: Some(place), .. }] if range.start.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK) => {
                self.blocks.of(place, length)
            }
            _ => {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
                self.blocks.lay(&parts, range, &mut bytes)?;
                Ok(bytes)
            }
        }
    }
}

/// Where each of the first blocks is; None for one of zeros.
fn places(map: &Map, count: u64) -> Vec<Option<(Id, u32)>> {
    let each = |Entry { blocks, place }: Entry| {
        let first = blocks.start;
        blocks.map(move |block| place.map(|place| (place.id, place.at + (block - first) as u32)))
    };
    map.parts(0..count).into_iter().flat_map(each).collect()
}

impl Source for Reading {
    fn first(&self, count: u64) -> std::result::Result<(Version, Vec<u8>), Trouble> {
        Ok((self.version(), self.bytes(0..count.min(self.length))?))
    }

    fn whole(&self) -> bool {
        true
    }

    fn lineage(&self) -> Option<&[u8]> {
        Some(&self.blocks.incarnation)
    }

    /// Of where its blocks are: an object never changes.
    fn label(&self, range: Range<u64>) -> Label {
        let mut hash = Sha256::new();
        hash.update((range.end - range.start).to_le_bytes());
        for Entry { blocks, place } in self.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK)) {
            hash.update((blocks.end - blocks.start).to_le_bytes());
            match place {
                None => hash.update([0]),
                Some(Place { id: Id::Log(sequence), at, .. }) => {
                    hash.update([1]);
                    hash.update(sequence.to_le_bytes());
                    hash.update(at.to_le_bytes());
                }
                Some(Place { id: Id::Segment(name) | Id::Checkpoint(name), at, .. }) => {
                    hash.update([2]);
                    hash.update(name);
                    hash.update(at.to_le_bytes());
                }
            }
        }
        hash.finalize().into()
    }

    fn has(&self, offset: u64, out: &mut [u8]) -> bool {
        let end = offset + out.len() as u64;
        let mut block = [0; BLOCK as usize];
        let parts = self.map.parts(offset / BLOCK..end.div_ceil(BLOCK));
        parts.into_iter().all(|Entry { blocks, place }| {
            let first = blocks.start;
            blocks.into_iter().all(|number| {
                let place = place.map(|place| Place { at: place.at + (number - first) as u32, ..place });
                let is_here = place.is_some_and(|place| self.blocks.store.has(&place, &mut block));
                let part = (number * BLOCK).max(offset)..((number + 1) * BLOCK).min(end);
                if is_here {
                    let from = (part.start - number * BLOCK) as usize;
                    let (to, length) = ((part.start - offset) as usize, (part.end - part.start) as usize);
                    out[to..to + length].copy_from_slice(&block[from..from + length]);
                }
                is_here
            })
        })
    }

    fn range(&self, version: &Version, range: Range<u64>) -> std::result::Result<Vec<u8>, Trouble> {
        if *version != self.version() {
            return Err(Trouble::Changed);
        }
        self.bytes(range)
    }
}
