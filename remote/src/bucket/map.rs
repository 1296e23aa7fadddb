//! Ids of objects, and the block map: the object and the position of each block of an archive.

use std::collections::BTreeMap;
use std::ops::Range;

use rangemap::{RangeMap, RangeSet};

pub(crate) type Hash = [u8; 32];

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ObjectId {
    /// Log record, by its number.
    Log(u64),
    /// Segment, by the hash of its content.
    Segment(Hash),
    Checkpoint(Hash),
}

impl ObjectId {
    /// Returns the number of a record; None for another object.
    pub(crate) fn sequence(self) -> Option<u64> {
        if let ObjectId::Log(sequence) = self { Some(sequence) } else { None }
    }
}

/// Position of a run of blocks in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectRef {
    pub(crate) id: ObjectId,
    /// Size of the object in blocks of pages.
    pub(crate) blocks: u32,
    /// First block in the object.
    pub(crate) at: u32,
}

/// Run of blocks of the archive and its location; None for zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MapEntry {
    pub(crate) blocks: Range<u64>,
    pub(crate) place: Option<ObjectRef>,
}

#[derive(Clone, Copy, Debug)]
struct MappedObject {
    blocks: u32,
    /// Blocks of the object that the map names.
    live: u64,
    /// Index that pieces refer to it by.
    number: u32,
}

/// Location of a run. Runs that are adjacent in the archive and in the object have equal values, so
/// `RangeMap` merges them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MapPiece {
    object: u32,
    /// Block number in the archive minus block number in the object.
    shift: i64,
}

/// Block map of one version of an archive. Unmapped blocks are zeros.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockMap {
    pieces: RangeMap<u64, MapPiece>,
    objects: BTreeMap<ObjectId, MappedObject>,
    /// Object ids by index; an index in `free` has none.
    ids: Vec<ObjectId>,
    /// Indices of removed objects, to which no piece refers.
    free: Vec<u32>,
    /// Blocks changed since the checkpoint.
    changed: RangeSet<u64>,
}

impl BlockMap {
    pub(crate) fn assign(&mut self, entry: &MapEntry) {
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
                let object = self.objects.entry(place.id).or_insert_with(|| {
                    let number = self.free.pop().unwrap_or_else(|| {
                        self.ids.push(place.id);
                        self.ids.len() as u32 - 1
                    });
                    self.ids[number as usize] = place.id;
                    MappedObject { blocks: place.blocks, live: 0, number }
                });
                object.live += blocks.end - blocks.start;
                let shift = blocks.start as i64 - i64::from(place.at);
                self.pieces.insert(blocks.clone(), MapPiece { object: object.number, shift });
            }
        }
        self.changed.insert(blocks);
    }

    /// Returns the entries of a range of blocks, in order and without gaps.
    pub(crate) fn parts(&self, blocks: Range<u64>) -> Vec<MapEntry> {
        let mut parts = Vec::new();
        let mut at = blocks.start;
        for (range, piece) in self.pieces.overlapping(&blocks) {
            let (start, end) = (range.start.max(blocks.start), range.end.min(blocks.end));
            if at < start {
                parts.push(MapEntry { blocks: at..start, place: None });
            }
            parts.push(MapEntry { blocks: start..end, place: self.place(start, piece) });
            at = end;
        }
        if at < blocks.end {
            parts.push(MapEntry { blocks: at..blocks.end, place: None });
        }
        parts
    }

    fn place(&self, block: u64, piece: &MapPiece) -> Option<ObjectRef> {
        let id = *self.ids.get(piece.object as usize)?;
        let at = (block as i64 - piece.shift) as u32;
        Some(ObjectRef { id, blocks: self.objects.get(&id)?.blocks, at })
    }

    /// Returns all entries, as a checkpoint stores them.
    pub(crate) fn entries(&self) -> Vec<MapEntry> {
        let entry = |(range, piece): (&Range<u64>, &MapPiece)| split_entry(range, self.place(range.start, piece));
        self.pieces.iter().flat_map(entry).collect()
    }

    pub(crate) fn changes(&self) -> Vec<MapEntry> {
        let parts = |range: &Range<u64>| self.parts(range.clone());
        self.changed.iter().flat_map(parts).flat_map(|entry| split_entry(&entry.blocks, entry.place)).collect()
    }

    /// Starts to count changes from an earlier map, with the blocks assigned since.
    pub(crate) fn reset_changes(&mut self, late: RangeSet<u64>) {
        self.changed = late;
    }

    pub(crate) fn has(&self, blocks: &Range<u64>) -> bool {
        self.pieces.overlaps(blocks)
    }

    pub(crate) fn next(&self, block: u64) -> Option<Range<u64>> {
        self.pieces.overlapping(&(block..u64::MAX)).next().map(|(range, _)| range.clone())
    }

    pub(crate) fn live_blocks(&self) -> u64 {
        self.objects.values().map(|object| object.live).sum()
    }

    /// Removes the objects of which no block is mapped. Later objects get their indices: a map that
    /// changes for months has as many as it had objects at once.
    pub(crate) fn take_unreferenced(&mut self) -> Vec<ObjectId> {
        let dead: Vec<_> = self.objects.extract_if(.., |_, object| object.live == 0).collect();
        self.free.extend(dead.iter().map(|(_, object)| object.number));
        dead.into_iter().map(|(id, _)| id).collect()
    }

    /// Returns the objects of which less than half is mapped, with their mapped blocks.
    pub(crate) fn sparse_objects(&self) -> Vec<(ObjectId, u64)> {
        let sparse = self.objects.iter().filter(|(_, object)| object.live * 2 < object.blocks.into());
        sparse.map(|(id, object)| (*id, object.live)).collect()
    }

    pub(crate) fn references(&self, id: &ObjectId) -> bool {
        self.objects.get(id).is_some_and(|object| object.live > 0)
    }

    pub(crate) fn objects_with_sizes(&self) -> impl Iterator<Item = (ObjectId, u32)> {
        self.objects.iter().map(|(id, object)| (*id, object.blocks))
    }

    pub(crate) fn runs(&self) -> usize {
        self.pieces.len()
    }

    pub(crate) fn object_count(&self) -> usize {
        self.objects.len()
    }

    /// Returns the block after the last mapped one.
    pub(crate) fn end(&self) -> u64 {
        self.pieces.last_range_value().map_or(0, |(range, _)| range.end)
    }
}

/// Splits a range into entries, which have 32-bit lengths. Only zeros are longer than that.
fn split_entry(range: &Range<u64>, place: Option<ObjectRef>) -> impl Iterator<Item = MapEntry> + use<> {
    const MOST: usize = u32::MAX as usize;
    let end = range.end;
    range.clone().step_by(MOST).map(move |at| MapEntry { blocks: at..end.min(at + MOST as u64), place })
}

/// Returns the entries of runs of blocks that one object has, in this order.
pub(crate) fn object_entries(id: ObjectId, runs: &[Range<u64>]) -> Vec<MapEntry> {
    let (blocks, mut at) = (runs.iter().map(|run| run.end - run.start).sum::<u64>() as u32, 0);
    let entry = |run: &Range<u64>| {
        let place = Some(ObjectRef { id, blocks, at });
        at += (run.end - run.start) as u32;
        MapEntry { blocks: run.clone(), place }
    };
    runs.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A session of months commits millions of objects.
    #[test]
    fn ids_of_unreferenced_objects_are_replaced() {
        let mut map = BlockMap::default();
        let run = |sequence: u64| sequence % 3..sequence % 3 + 1;
        let entry = |sequence| object_entries(ObjectId::Log(sequence), &[run(sequence)]);
        for sequence in 0..1000 {
            map.assign(&entry(sequence)[0]);
            assert_eq!(
                map.take_unreferenced(),
                sequence.checked_sub(3).map(ObjectId::Log).into_iter().collect::<Vec<_>>()
            );
            for earlier in sequence.saturating_sub(2)..=sequence {
                assert_eq!(map.parts(run(earlier)), entry(earlier));
            }
        }
        assert_eq!(map.ids.len(), 4, "three mapped objects, and one that was replaced");
    }
}
