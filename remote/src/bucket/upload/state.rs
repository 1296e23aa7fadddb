//! What is staged, and where the newest bytes of each block are: no request is made here.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use lockbox::Error;
use rangemap::RangeSet;

use super::super::block_cache::Block;
use super::super::layout::BLOCK;
use super::super::map::Map;
use super::super::object_ref::{Entry, Id};
use super::super::version::Reading;
use crate::remote_file::RemoteFile;

/// Blocks that the record with which a writer goes has again because they were written last, and as many because the writer before left them so: some nodes.
pub(super) const LITTLE: usize = 48;

/// All of it, which changes under one lock.
pub(super) struct State {
    /// What has not gone up.
    pub(super) dirty: BTreeMap<u64, Box<Block>>,
    /// What the last record has itself, sent or on its way, where nothing else has come since.
    pub(super) last: BTreeMap<u64, Box<Block>>,
    /// Whether anything was changed that no record has.
    pub(super) touched: bool,
    /// What who comes next reads first.
    pub(super) first: RangeSet<u64>,
    /// The blocks that were written last, in their order.
    pub(super) latest: VecDeque<u64>,
    /// Blocks that were written since the writer came, and how many of them the base has.
    pub(super) written: u64,
    pub(super) based: u64,
    /// What was laid into the map while a record was on its way.
    pub(super) late: Option<RangeSet<u64>>,
    /// What is going up: segments, which begin with their pages.
    pub(super) sending: HashMap<Id, Arc<Vec<u8>>>,
    /// The same that did not get there: no more than was sent at once, for then nothing is.
    pub(super) lost: HashMap<Id, Arc<Vec<u8>>>,
    /// What went up, or may have, and no record names yet.
    pub(super) made: Vec<Id>,
    pub(super) failed: Option<Error>,
    /// Where all is but what is dirty.
    pub(super) map: Map,
    pub(super) length: u64,
    /// For what is as it was there, and where that has it from.
    pub(super) base: Option<Arc<RemoteFile>>,
    pub(super) based_on: Option<Arc<Reading>>,
    /// What is not.
    pub(super) changed: RangeSet<u64>,
}

/// What a range of blocks is, as far as is known without a request (STAGED-2).
pub(super) struct Seen {
    /// As the base has it.
    pub(super) old: Vec<Range<u64>>,
    pub(super) base: Option<Arc<RemoteFile>>,
    /// What lies in the store.
    pub(super) far: Vec<Entry>,
    /// What is in memory, from these blocks on; the later one of two is the newer one.
    pub(super) pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)>,
}

impl State {
    /// Nothing is written yet. What is there has to go with a record if it is `touched`.
    pub(super) fn new(map: Map, length: u64, touched: bool) -> State {
        State {
            dirty: BTreeMap::new(),
            last: BTreeMap::new(),
            touched,
            first: RangeSet::new(),
            latest: VecDeque::new(),
            written: 0,
            based: 0,
            late: None,
            sending: HashMap::new(),
            lost: HashMap::new(),
            made: Vec::new(),
            failed: None,
            map,
            length,
            base: None,
            based_on: None,
            changed: RangeSet::new(),
        }
    }

    pub(super) fn put(&mut self, number: u64, block: Box<Block>) {
        // Zeros need no place.
        if block.iter().all(|byte| *byte == 0) {
            return self.forget(number..number + 1);
        }
        self.dirty.insert(number, block);
        self.changed.insert(number..number + 1);
        self.touched = true;
        self.written += 1;
    }

    /// What is not in the store, or not yet.
    pub(super) fn object(&self, id: &Id) -> Option<&Arc<Vec<u8>>> {
        self.sending.get(id).or_else(|| self.lost.get(id))
    }

    pub(super) fn is_written(&mut self, number: u64) {
        if self.latest.len() == LITTLE {
            self.latest.pop_front();
        }
        self.latest.push_back(number);
    }

    pub(super) fn forget(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let gone: Vec<u64> = self.dirty.range(blocks.clone()).map(|(number, _)| *number).collect();
        gone.iter().for_each(|number| drop(self.dirty.remove(number)));
        // Erasing what is erased already is no change.
        self.touched |= !gone.is_empty() || self.map.has(&blocks);
        self.lay(&Entry { blocks: blocks.clone(), place: None });
        self.changed.insert(blocks);
    }

    pub(super) fn lay(&mut self, entry: &Entry) {
        let gone: Vec<u64> = self.last.range(entry.blocks.clone()).map(|(number, _)| *number).collect();
        gone.iter().for_each(|number| drop(self.last.remove(number)));
        self.map.lay(entry);
        if let Some(late) = self.late.as_mut().filter(|_| !entry.blocks.is_empty()) {
            late.insert(entry.blocks.clone());
        }
    }

    pub(super) fn is_scattered(&self, most_runs: usize) -> bool {
        self.map.runs() + self.dirty.len() > most_runs
    }

    /// Where the newest bytes of each of these blocks are.
    pub(super) fn see(&self, blocks: Range<u64>) -> Seen {
        let mut rest = RangeSet::from_iter([blocks.clone()]);
        // Those of the last record first: newer ones are laid over them.
        let near = self.last.range(blocks.clone()).chain(self.dirty.range(blocks.clone()));
        let dirty: Vec<(u64, Box<Block>)> = near.map(|(number, block)| (*number, block.clone())).collect();
        dirty.iter().for_each(|(number, _)| rest.remove(*number..number + 1));
        let (mut old, mut new): (Vec<Range<u64>>, Vec<Entry>) = (Vec::new(), Vec::new());
        for run in rest.iter() {
            old.extend(self.changed.gaps(run));
            let changed = self.changed.overlapping(run);
            new.extend(changed.flat_map(|other| self.map.parts(run.start.max(other.start)..run.end.min(other.end))));
        }
        let (near, far): (Vec<Entry>, Vec<Entry>) =
            new.into_iter().partition(|part| part.place.is_none_or(|place| self.object(&place.id).is_some()));
        let mut pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)> = Vec::new();
        for Entry { blocks, place } in &near {
            let count = ((blocks.end - blocks.start) * BLOCK) as usize;
            match place.and_then(|place| Some((self.object(&place.id)?, place.at))) {
                None => pieces.push((blocks.start, Arc::new(vec![0; count]), 0..count)),
                Some((bytes, at)) => {
                    let from = (u64::from(at) * BLOCK) as usize;
                    pieces.push((blocks.start, bytes.clone(), from..from + count));
                }
            }
        }
        pieces.extend(dirty.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        Seen { old, base: self.base.clone(), far, pieces }
    }
}
