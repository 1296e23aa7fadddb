//! State of an upload buffer: dirty blocks and the location of each block's newest bytes. Makes no
//! requests.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use lockbox::Error;
use rangemap::RangeSet;

use super::super::block_cache::BlockBytes;
use super::super::layout::BLOCK;
use super::super::map::BlockMap;
use super::super::object_ref::{MapEntry, ObjectId};
use super::super::version::VersionReader;
use crate::remote_file::RemoteFile;

/// Blocks repeated in the closing record because they were written last, and as many because the
/// previous writer left them so: some tree nodes.
pub(super) const RECENT_BLOCKS: usize = 48;

/// State under one lock.
pub(super) struct UploadState {
    /// Blocks not uploaded yet.
    pub(super) dirty: BTreeMap<u64, Box<BlockBytes>>,
    /// Inline blocks of the last record, sent or in flight, unless overwritten since.
    pub(super) last_inline: BTreeMap<u64, Box<BlockBytes>>,
    /// Set if there are changes that no record has.
    pub(super) touched: bool,
    /// Blocks that the next open reads first.
    pub(super) read_first: RangeSet<u64>,
    /// Last written blocks, in order.
    pub(super) latest: VecDeque<u64>,
    /// Blocks written since the acquisition, and their number at the last rebase.
    pub(super) written: u64,
    pub(super) written_at_rebase: u64,
    /// Blocks assigned while a record is in flight.
    pub(super) changed_since_cut: Option<RangeSet<u64>>,
    /// Segments in flight; their bytes begin with the pages.
    pub(super) in_flight: HashMap<ObjectId, Arc<Vec<u8>>>,
    /// Segments with a failed upload: at most those in flight at the time, since nothing is sent
    /// after.
    pub(super) failed_uploads: HashMap<ObjectId, Arc<Vec<u8>>>,
    /// Segments that are uploaded, or may be, and that no record names yet.
    pub(super) uploaded: Vec<ObjectId>,
    pub(super) failed: Option<Error>,
    /// Locations of all blocks that are not dirty.
    pub(super) map: BlockMap,
    pub(super) length: u64,
    /// Source of unchanged blocks, and its reader.
    pub(super) base: Option<Arc<RemoteFile>>,
    pub(super) base_reader: Option<Arc<VersionReader>>,
    /// Blocks changed since the base.
    pub(super) changed: RangeSet<u64>,
}

/// Sources of a range of blocks, determined without a request (STAGED-2).
pub(super) struct ReadPlan {
    /// Runs to read from the base.
    pub(super) unchanged: Vec<Range<u64>>,
    pub(super) base: Option<Arc<RemoteFile>>,
    /// Runs to fetch from the store.
    pub(super) remote: Vec<MapEntry>,
    /// Bytes in memory with their first block; a later piece overrides an earlier one.
    pub(super) pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)>,
}

impl UploadState {
    /// Creates a state without writes. With `touched`, the next record must be written.
    pub(super) fn new(map: BlockMap, length: u64, touched: bool) -> UploadState {
        UploadState {
            dirty: BTreeMap::new(),
            last_inline: BTreeMap::new(),
            touched,
            read_first: RangeSet::new(),
            latest: VecDeque::new(),
            written: 0,
            written_at_rebase: 0,
            changed_since_cut: None,
            in_flight: HashMap::new(),
            failed_uploads: HashMap::new(),
            uploaded: Vec::new(),
            failed: None,
            map,
            length,
            base: None,
            base_reader: None,
            changed: RangeSet::new(),
        }
    }

    pub(super) fn put(&mut self, number: u64, block: Box<BlockBytes>) {
        // Zeros need no place.
        if block.iter().all(|byte| *byte == 0) {
            return self.zero_blocks(number..number + 1);
        }
        self.dirty.insert(number, block);
        self.changed.insert(number..number + 1);
        self.touched = true;
        self.written += 1;
    }

    /// Returns the bytes of a segment if they are in memory.
    pub(super) fn local_object(&self, id: &ObjectId) -> Option<&Arc<Vec<u8>>> {
        self.in_flight.get(id).or_else(|| self.failed_uploads.get(id))
    }

    pub(super) fn note_write(&mut self, number: u64) {
        if self.latest.len() == RECENT_BLOCKS {
            self.latest.pop_front();
        }
        self.latest.push_back(number);
    }

    pub(super) fn zero_blocks(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let gone: Vec<u64> = self.dirty.range(blocks.clone()).map(|(number, _)| *number).collect();
        gone.iter().for_each(|number| drop(self.dirty.remove(number)));
        // Erasing zeros is not a change.
        self.touched |= !gone.is_empty() || self.map.has(&blocks);
        self.assign(&MapEntry { blocks: blocks.clone(), place: None });
        self.changed.insert(blocks);
    }

    pub(super) fn assign(&mut self, entry: &MapEntry) {
        let gone: Vec<u64> = self.last_inline.range(entry.blocks.clone()).map(|(number, _)| *number).collect();
        gone.iter().for_each(|number| drop(self.last_inline.remove(number)));
        self.map.assign(entry);
        if let Some(late) = self.changed_since_cut.as_mut().filter(|_| !entry.blocks.is_empty()) {
            late.insert(entry.blocks.clone());
        }
    }

    pub(super) fn is_scattered(&self, most_runs: usize) -> bool {
        self.map.runs() + self.dirty.len() > most_runs
    }

    /// Determines the source of the newest bytes of each block.
    pub(super) fn plan_read(&self, blocks: Range<u64>) -> ReadPlan {
        let mut rest = RangeSet::from_iter([blocks.clone()]);
        // Blocks of the last record first: dirty ones override them.
        let local = self.last_inline.range(blocks.clone()).chain(self.dirty.range(blocks.clone()));
        let dirty: Vec<(u64, Box<BlockBytes>)> = local.map(|(number, block)| (*number, block.clone())).collect();
        dirty.iter().for_each(|(number, _)| rest.remove(*number..number + 1));
        let (mut unchanged, mut new): (Vec<Range<u64>>, Vec<MapEntry>) = (Vec::new(), Vec::new());
        for run in rest.iter() {
            unchanged.extend(self.changed.gaps(run));
            let changed = self.changed.overlapping(run);
            new.extend(changed.flat_map(|other| self.map.parts(run.start.max(other.start)..run.end.min(other.end))));
        }
        let (local, remote): (Vec<MapEntry>, Vec<MapEntry>) =
            new.into_iter().partition(|part| part.place.is_none_or(|place| self.local_object(&place.id).is_some()));
        let mut pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)> = Vec::new();
        for MapEntry { blocks, place } in &local {
            let count = ((blocks.end - blocks.start) * BLOCK) as usize;
            match place.and_then(|place| Some((self.local_object(&place.id)?, place.at))) {
                None => pieces.push((blocks.start, Arc::new(vec![0; count]), 0..count)),
                Some((bytes, at)) => {
                    let from = (u64::from(at) * BLOCK) as usize;
                    pieces.push((blocks.start, bytes.clone(), from..from + count));
                }
            }
        }
        pieces.extend(dirty.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        ReadPlan { unchanged, base: self.base.clone(), remote, pieces }
    }
}
