//! Where each block of an archive is: in which object, and at which of its blocks.

use std::collections::BTreeMap;
use std::ops::Range;

use rangemap::{RangeMap, RangeSet};

use super::object_ref::{Entry, Id, Place};

/// Of an object that the map names.
#[derive(Clone, Copy, Debug)]
struct Object {
    blocks: u32,
    /// Blocks of it that the map names.
    live: u64,
    /// What pieces name it by.
    number: u32,
}

/// Neighbours of the archive that are neighbours in their object have the same value, so the ranges merge by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    object: u32,
    /// Block of the archive less the block in the object.
    shift: i64,
}

/// The map of one moment of an archive. Blocks that it does not name are zeros.
#[derive(Clone, Debug, Default)]
pub(crate) struct Map {
    pieces: RangeMap<u64, Piece>,
    objects: BTreeMap<Id, Object>,
    /// By number.
    ids: Vec<Id>,
    /// Blocks that lie elsewhere than the checkpoint says.
    changed: RangeSet<u64>,
}

impl Map {
    /// Says where a run of blocks is from now on.
    pub(crate) fn lay(&mut self, entry: &Entry) {
        let blocks = entry.blocks.clone();
        if blocks.is_empty() {
            return;
        }
        for (range, piece) in self.pieces.overlapping(&blocks) {
            let lost = range.end.min(blocks.end) - range.start.max(blocks.start);
            if let Some(object) = self.objects.get_mut(&self.ids[piece.object as usize]) {
                object.live -= lost;
            }
        }
        match &entry.place {
            None => self.pieces.remove(blocks.clone()),
            Some(place) => {
                let next = self.ids.len() as u32;
                let object = self.objects.entry(place.id).or_insert_with(|| {
                    self.ids.push(place.id);
                    Object { blocks: place.blocks, live: 0, number: next }
                });
                object.live += blocks.end - blocks.start;
                let shift = blocks.start as i64 - i64::from(place.at);
                self.pieces.insert(blocks.clone(), Piece { object: object.number, shift });
            }
        }
        self.changed.insert(blocks);
    }

    /// What is in a range of blocks, in order and without gaps.
    pub(crate) fn parts(&self, blocks: Range<u64>) -> Vec<Entry> {
        let mut parts = Vec::new();
        let mut at = blocks.start;
        for (range, piece) in self.pieces.overlapping(&blocks) {
            let (start, end) = (range.start.max(blocks.start), range.end.min(blocks.end));
            if at < start {
                parts.push(Entry { blocks: at..start, place: None });
            }
            parts.push(Entry { blocks: start..end, place: self.place(start, piece) });
            at = end;
        }
        if at < blocks.end {
            parts.push(Entry { blocks: at..blocks.end, place: None });
        }
        parts
    }

    fn place(&self, block: u64, piece: &Piece) -> Option<Place> {
        let id = *self.ids.get(piece.object as usize)?;
        let at = (block as i64 - piece.shift) as u32;
        Some(Place { id, blocks: self.objects.get(&id)?.blocks, at })
    }

    /// All of it: what a checkpoint has.
    pub(crate) fn entries(&self) -> Vec<Entry> {
        let entry = |(range, piece): (&Range<u64>, &Piece)| split(range, self.place(range.start, piece));
        self.pieces.iter().flat_map(entry).collect()
    }

    /// What lies elsewhere than the checkpoint says.
    pub(crate) fn changes(&self) -> Vec<Entry> {
        let parts = |range: &Range<u64>| self.parts(range.clone());
        self.changed.iter().flat_map(parts).flat_map(|entry| split(&entry.blocks, entry.place)).collect()
    }

    /// From now on changes count from what the map is now.
    pub(crate) fn checkpointed(&mut self) {
        self.changed = RangeSet::new();
    }

    /// The same, but for what was laid since it was.
    pub(crate) fn checkpointed_but(&mut self, late: RangeSet<u64>) {
        self.changed = late;
    }

    /// Whether it names any of these blocks.
    pub(crate) fn has(&self, blocks: &Range<u64>) -> bool {
        self.pieces.overlaps(blocks)
    }

    /// The next blocks from this one on that are no zeros.
    pub(crate) fn next(&self, block: u64) -> Option<Range<u64>> {
        self.pieces.overlapping(&(block..u64::MAX)).next().map(|(range, _)| range.clone())
    }

    /// Blocks that it names.
    pub(crate) fn live(&self) -> u64 {
        self.objects.values().map(|object| object.live).sum()
    }

    /// Forgets the objects that it names no block of any more, and gives them.
    pub(crate) fn forget_dead(&mut self) -> Vec<Id> {
        let dead: Vec<Id> = self.objects.iter().filter(|(_, object)| object.live == 0).map(|(id, _)| *id).collect();
        self.objects.retain(|_, object| object.live > 0);
        dead
    }

    /// The objects of which less than half is named, with what is.
    pub(crate) fn sparse(&self) -> Vec<(Id, u64)> {
        let sparse = self.objects.iter().filter(|(_, object)| object.live * 2 < object.blocks.into());
        sparse.map(|(id, object)| (*id, object.live)).collect()
    }

    /// Whether it names any block of the object.
    pub(crate) fn names(&self, id: &Id) -> bool {
        self.objects.get(id).is_some_and(|object| object.live > 0)
    }

    /// Those that it names a block of.
    pub(crate) fn objects(&self) -> impl Iterator<Item = Id> {
        self.objects.keys().copied()
    }

    /// The same with the blocks that each has.
    pub(crate) fn sized(&self) -> impl Iterator<Item = (Id, u32)> {
        self.objects.iter().map(|(id, object)| (*id, object.blocks))
    }

    /// Runs that it has.
    pub(crate) fn runs(&self) -> usize {
        self.pieces.len()
    }

    /// Behind the last block that is no zeros.
    pub(crate) fn end(&self) -> u64 {
        self.pieces.last_range_value().map_or(0, |(range, _)| range.end)
    }
}

/// Lengths of entries have 32 bits.
fn split(range: &Range<u64>, place: Option<Place>) -> Vec<Entry> {
    const MOST: u64 = u32::MAX as u64;
    let mut entries = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let end = range.end.min(at + MOST);
        // Only zeros are as long as that.
        entries.push(Entry { blocks: at..end, place });
        at = end;
    }
    entries
}
