//! Repacking: rewrites uploaded blocks into a record for locality, or to free old segments.

use std::collections::HashMap;
use std::ops::Range;

use lockbox::Result;
use rangemap::RangeSet;

use super::super::layout::BLOCK;
use super::super::object_ref::{MapEntry, ObjectId};
use super::send::MAX_INLINE_BLOCKS;
use super::state::RECENT_BLOCKS;
use super::{SEGMENT_BLOCKS, UploadBuffer};
use crate::remote_file::START_BYTES;

impl UploadBuffer {
    /// Rewrites the blocks that every open reads, so that they are in two objects, regardless of
    /// the number of commits: the start of the file in the object that has most of it, and the rest
    /// in the next record, which an open reads first. So are the last written blocks and the blocks
    /// that the previous writer left there: the tree nodes that lead to all others.
    pub(in super::super) fn repack_start(&self) -> Result<()> {
        let mut chosen: RangeSet<u64> = RangeSet::new();
        // Writes that exceed a record are uploaded before, without these blocks.
        if self.shared.state.lock().dirty.len() > MAX_INLINE_BLOCKS / 2 {
            self.send_dirty()?;
        }
        {
            let mut state = self.shared.state.lock();
            chosen.extend(state.latest.iter().map(|number| *number..number + 1));
            let before = self.shared.blocks.store.tail_record();
            let left = |entry: &MapEntry| {
                entry.blocks.start >= START_BYTES / BLOCK && entry.place.is_some_and(|place| Some(place.id) == before)
            };
            let left = state.map.entries().into_iter().filter(left).flat_map(|entry| entry.blocks);
            left.take(RECENT_BLOCKS).for_each(|number| chosen.insert(number..number + 1));
            let parts = state.map.parts(0..START_BYTES / BLOCK);
            let mut objects: HashMap<ObjectId, u64> = HashMap::new();
            for MapEntry { blocks, place } in &parts {
                if let Some(place) = place {
                    *objects.entry(place.id).or_default() += blocks.end - blocks.start;
                }
            }
            let most = objects.into_iter().max_by_key(|(id, blocks)| (*blocks, *id)).map(|(id, _)| id);
            let elsewhere = |part: &MapEntry| part.place.is_some_and(|place| Some(place.id) != most);
            chosen.extend(parts.into_iter().filter(elsewhere).map(|part| part.blocks));
            state.read_first = chosen.clone();
        }
        let chosen: Vec<Range<u64>> = chosen.into_iter().collect();
        self.rewrite_blocks(&chosen)
    }

    /// Rewrites blocks unchanged. Fetches all of them concurrently, with adjacent ones together. No
    /// writes run concurrently, so newer data stays.
    fn rewrite_blocks(&self, runs: &[Range<u64>]) -> Result<()> {
        let _writing = self.writing.lock();
        let (mut numbers, mut parts, mut local) = (Vec::new(), Vec::new(), Vec::new());
        {
            let state = self.shared.state.lock();
            // Blocks written since are uploaded anyway.
            let rest = runs.iter().flat_map(|run| run.clone()).filter(|number| !state.dirty.contains_key(number));
            for number in rest {
                let Some(place) = state.map.parts(number..number + 1).first().and_then(|part| part.place) else {
                    continue;
                };
                let from = (u64::from(place.at) * BLOCK) as usize;
                let start = (number * BLOCK) as usize;
                let base = state.base.as_ref().filter(|_| !state.changed.contains(&number));
                let known = base.and_then(|base| base.start().get(start..start + BLOCK as usize));
                if let Some(block) = known.or(state.last_inline.get(&number).map(|block| &block[..])) {
                    local.push((number, block.to_vec()));
                    continue;
                }
                match state.local_object(&place.id) {
                    Some(bytes) => local.push((number, bytes[from..from + BLOCK as usize].to_vec())),
                    None => {
                        // Numbered consecutively, in the order of the buffer.
                        let at = numbers.len() as u64;
                        parts.push(MapEntry { blocks: at..at + 1, place: Some(place) });
                        numbers.push(number);
                    }
                }
            }
        }
        let (cached, parts) = self.shared.cache.get_or_wait(parts);
        let mut fetched = self.shared.fetch_ranges(&parts, 0..numbers.len() as u64 * BLOCK)?;
        for (at, block) in cached {
            let at = (at * BLOCK) as usize;
            fetched[at..at + BLOCK as usize].copy_from_slice(&*block);
        }
        let mut state = self.shared.state.lock();
        let remote = numbers.into_iter().zip(fetched.chunks_exact(BLOCK as usize));
        let local = local.iter().map(|(number, block)| (*number, &block[..]));
        for (number, block) in remote.chain(local) {
            let mut whole = Box::new([0; BLOCK as usize]);
            whole.copy_from_slice(block);
            state.put(number, whole);
        }
        let is_full = state.dirty.len() >= SEGMENT_BLOCKS;
        drop(state);
        if is_full { self.send_dirty() } else { Ok(()) }
    }

    /// Rewrites the needed blocks of objects of which less than half is needed, the sparsest first,
    /// up to `most_blocks`; with more than `most_runs` runs, rewrites all blocks in order. The
    /// pages are sealed, so no key is needed.
    pub(in super::super) fn repack_sparse(&self, most_runs: usize, most_blocks: u64) -> Result<()> {
        let sparse: RangeSet<u64> = {
            let mut state = self.shared.state.lock();
            // The old locations of rewritten blocks are not needed.
            let again: Vec<u64> = state.dirty.keys().copied().collect();
            again.into_iter().for_each(|number| state.assign(&MapEntry { blocks: number..number + 1, place: None }));
            let mut sparse = state.map.sparse_objects();
            sparse.sort_by_key(|(_, live)| *live);
            let mut sum = 0;
            let fits = |(_, live): &(ObjectId, u64)| {
                sum += live;
                sum <= most_blocks
            };
            let ids: HashMap<ObjectId, u64> = sparse.into_iter().take_while(fits).collect();
            let is_scattered = state.is_scattered(most_runs);
            let named = state.map.entries().into_iter();
            named
                .filter(|entry| entry.place.is_some_and(|place| is_scattered || ids.contains_key(&place.id)))
                .map(|entry| entry.blocks)
                .collect()
        };
        // In parts that fit.
        let (mut runs, mut blocks) = (Vec::new(), 0);
        for run in sparse {
            for start in (run.start..run.end).step_by(SEGMENT_BLOCKS) {
                let part = start..run.end.min(start + SEGMENT_BLOCKS as u64);
                if blocks + part.end - part.start > SEGMENT_BLOCKS as u64 {
                    self.rewrite_blocks(&std::mem::take(&mut runs))?;
                    blocks = 0;
                }
                blocks += part.end - part.start;
                runs.push(part);
            }
        }
        self.rewrite_blocks(&runs)
    }
}
