//! What a record has again although it is up: what whoever comes reads first, and what is needed of objects that are hardly needed.

use std::collections::HashMap;
use std::ops::Range;

use lockbox::Result;
use rangemap::RangeSet;

use super::super::layout::BLOCK;
use super::super::object_ref::{Entry, Id};
use super::send::INLINE;
use super::state::LITTLE;
use super::{SEGMENT, Staged};
use crate::remote_file::START;

impl Staged {
    /// What every opening reads lies in two objects from then on, whatever number of commits there were: the file's start in the one that has most of it, and the rest in the
    /// record to come, which whoever comes reads first. So does what was written last and what the writer before left there so: the nodes that lead to everything else.
    pub(in super::super) fn gather_first(&self) -> Result<()> {
        let mut chosen: RangeSet<u64> = RangeSet::new();
        // What a record has no room for goes up before, and without these.
        if self.shared.state.lock().dirty.len() > INLINE / 2 {
            self.send()?;
        }
        {
            let mut state = self.shared.state.lock();
            chosen.extend(state.latest.iter().map(|number| *number..number + 1));
            let before = self.shared.blocks.store.has_of();
            let left = |entry: &Entry| {
                entry.blocks.start >= START / BLOCK && entry.place.is_some_and(|place| Some(place.id) == before)
            };
            let left = state.map.entries().into_iter().filter(left).flat_map(|entry| entry.blocks);
            left.take(LITTLE).for_each(|number| chosen.insert(number..number + 1));
            let parts = state.map.parts(0..START / BLOCK);
            let mut objects: HashMap<Id, u64> = HashMap::new();
            for Entry { blocks, place } in &parts {
                if let Some(place) = place {
                    *objects.entry(place.id).or_default() += blocks.end - blocks.start;
                }
            }
            let most = objects.into_iter().max_by_key(|(id, blocks)| (*blocks, *id)).map(|(id, _)| id);
            let elsewhere = |part: &Entry| part.place.is_some_and(|place| Some(place.id) != most);
            chosen.extend(parts.into_iter().filter(elsewhere).map(|part| part.blocks));
            state.first = chosen.clone();
        }
        let chosen: Vec<Range<u64>> = chosen.into_iter().collect();
        self.write_anew(&chosen)
    }

    /// Writes blocks anew as they are. The store is asked for all of them at once, neighbours in an object together, and nobody writes meanwhile: what is newer stays.
    fn write_anew(&self, runs: &[Range<u64>]) -> Result<()> {
        let _writing = self.writing.lock();
        let (mut numbers, mut parts, mut near) = (Vec::new(), Vec::new(), Vec::new());
        {
            let state = self.shared.state.lock();
            // What was written since goes up by itself.
            let rest = runs.iter().flat_map(|run| run.clone()).filter(|number| !state.dirty.contains_key(number));
            for number in rest {
                let Some(place) = state.map.parts(number..number + 1).first().and_then(|part| part.place) else {
                    continue;
                };
                let from = (u64::from(place.at) * BLOCK) as usize;
                let start = (number * BLOCK) as usize;
                let base = state.base.as_ref().filter(|_| !state.changed.contains(&number));
                let known = base.and_then(|base| base.start().get(start..start + BLOCK as usize));
                if let Some(block) = known.or(state.last.get(&number).map(|block| &block[..])) {
                    near.push((number, block.to_vec()));
                    continue;
                }
                match state.object(&place.id) {
                    Some(bytes) => near.push((number, bytes[from..from + BLOCK as usize].to_vec())),
                    None => {
                        // As if they were neighbours, which is where they are put.
                        let at = numbers.len() as u64;
                        parts.push(Entry { blocks: at..at + 1, place: Some(place) });
                        numbers.push(number);
                    }
                }
            }
        }
        let (here, parts) = self.shared.near.take(parts);
        let mut brought = self.shared.bring(&parts, 0..numbers.len() as u64 * BLOCK)?;
        for (at, block) in here {
            let at = (at * BLOCK) as usize;
            brought[at..at + BLOCK as usize].copy_from_slice(&*block);
        }
        let mut state = self.shared.state.lock();
        let far = numbers.into_iter().zip(brought.chunks_exact(BLOCK as usize));
        let near = near.iter().map(|(number, block)| (*number, &block[..]));
        for (number, block) in far.chain(near) {
            let mut whole = Box::new([0; BLOCK as usize]);
            whole.copy_from_slice(block);
            state.put(number, whole);
        }
        let is_full = state.dirty.len() >= SEGMENT;
        drop(state);
        if is_full { self.send() } else { Ok(()) }
    }

    /// Objects of which less than half is needed go: what is needed of them is written anew, of so many blocks at most, those first that have the least. With more than so
    /// many runs all is, in order. The pages are sealed, so nothing is opened.
    pub(in super::super) fn gather_sparse(&self, most_runs: usize, most_blocks: u64) -> Result<()> {
        let sparse: RangeSet<u64> = {
            let mut state = self.shared.state.lock();
            // What is written again is needed no more where it was.
            let again: Vec<u64> = state.dirty.keys().copied().collect();
            again.into_iter().for_each(|number| state.lay(&Entry { blocks: number..number + 1, place: None }));
            let mut sparse = state.map.sparse();
            sparse.sort_by_key(|(_, live)| *live);
            let mut sum = 0;
            let fits = |(_, live): &(Id, u64)| {
                sum += live;
                sum <= most_blocks
            };
            let ids: HashMap<Id, u64> = sparse.into_iter().take_while(fits).collect();
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
            for start in (run.start..run.end).step_by(SEGMENT) {
                let part = start..run.end.min(start + SEGMENT as u64);
                if blocks + part.end - part.start > SEGMENT as u64 {
                    self.write_anew(&std::mem::take(&mut runs))?;
                    blocks = 0;
                }
                blocks += part.end - part.start;
                runs.push(part);
            }
        }
        self.write_anew(&runs)
    }
}
