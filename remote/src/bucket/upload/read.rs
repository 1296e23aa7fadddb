//! What was written is read, and what lies in the store: from the base, which reads ahead, or by its place.

use std::ops::Range;
use std::sync::Arc;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use rangemap::RangeSet;

use super::super::layout::{BLOCK, MAX_BLOCKS};
use super::super::object_names::{hex, random};
use super::super::object_ref::{Entry, Id};
use super::super::version::Reading;
use super::state::Seen;
use super::{Shared, Staged};
use crate::Options;
use crate::remote_file::{RemoteFile, told_later};

impl Staged {
    /// From now on all is read from the store, ahead of whoever reads one after the other. Nobody writes meanwhile.
    pub(super) fn rebase(&self) -> Result<()> {
        self.settle(true)?;
        let (map, length, written) = {
            let state = self.shared.state.lock();
            if state.base.is_some() && state.changed.is_empty() {
                return Ok(());
            }
            (state.map.clone(), state.length, state.written)
        };
        let reading = Arc::new(Reading { blocks: self.shared.blocks.clone(), map, length, tag: hex(&random()?) });
        // Nobody comes back to a moment that is in the making.
        let options = Options { cache_bytes: Some(0), ..self.options.clone() };
        let base = match length {
            0 => None,
            _ => Some(Arc::new(RemoteFile::counting(
                Box::new(reading.clone()),
                self.shared.blocks.store.name.clone(),
                &options,
            )?)),
        };
        let mut state = self.shared.state.lock();
        (state.base, state.based_on, state.based) = (base, Some(reading), written);
        state.changed = RangeSet::new();
        state.last.clear();
        Ok(())
    }

    /// What was written by now is read ahead of, too, as far as nobody writes just now. Without that it is read all the same.
    pub(super) fn look_ahead_again(&self) {
        let _writing = self.writing.lock();
        if self.shared.state.lock().dirty.is_empty()
            && let Err(error) = self.rebase()
        {
            tracing::debug!(%error, "what was written is not read ahead of yet");
        }
    }

    /// Makes the base anew when it names any of these objects, which are about to be removed. Whether it names none of them (STAGED-2).
    pub(in super::super) fn lets_go_of(&self, ids: &[Id]) -> bool {
        let _writing = self.writing.lock();
        let names = |reading: &Arc<Reading>| ids.iter().any(|id| reading.map.names(id));
        let is_named = self.shared.state.lock().based_on.as_ref().is_some_and(names);
        !is_named || self.rebase().is_ok()
    }

    /// STAGED-2
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let state = self.shared.state.lock();
        let length = state.length;
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= length).ok_or_else(|| {
            Error::damaged(format!(
                "archive is truncated: length={length} needed={}",
                offset.saturating_add(out.len() as u64)
            ))
        })?;
        if out.is_empty() {
            return Ok(());
        }
        let Seen { old, base, far, mut pieces } = state.see(offset / BLOCK..end.div_ceil(BLOCK));
        drop(state);
        for run in old {
            let part = (run.start * BLOCK).max(offset)..(run.end * BLOCK).min(end);
            let into = &mut out[(part.start - offset) as usize..(part.end - offset) as usize];
            // It ended where the archive did then.
            let there = base.as_ref().map_or(Ok(0), |base| base.len())?.clamp(part.start, part.end) - part.start;
            let (there, behind) = into.split_at_mut(there as usize);
            behind.fill(0);
            if let Some(base) = base.as_ref().filter(|_| !there.is_empty()) {
                base.read_at(part.start, there)?;
            }
        }
        let (here, far) = self.shared.near.take(far);
        pieces.extend(here.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        // All at once: what many records have is one round trip away, not one for each.
        if let (Some(first), Some(last)) = (far.first(), far.last()) {
            let range = (first.blocks.start * BLOCK).max(offset)..(last.blocks.end * BLOCK).min(end);
            let brought = self.shared.bring(&far, range.clone())?;
            for part in &far {
                let part = (part.blocks.start * BLOCK).max(offset)..(part.blocks.end * BLOCK).min(end);
                let from = (part.start - range.start) as usize..(part.end - range.start) as usize;
                out[(part.start - offset) as usize..(part.end - offset) as usize].copy_from_slice(&brought[from]);
            }
        }
        for (number, bytes, from) in pieces {
            let start = number * BLOCK;
            let part = start.max(offset)..(start + from.len() as u64).min(end);
            let from = from.start + (part.start - start) as usize;
            let length = (part.end - part.start) as usize;
            let to = (part.start - offset) as usize;
            out[to..to + length].copy_from_slice(&bytes[from..from + length]);
        }
        Ok(())
    }

    /// What is read soon.
    pub(super) fn expect(&self, offset: u64, length: u64) {
        let state = self.shared.state.lock();
        let end = offset.saturating_add(length).min(state.length);
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        if offset >= end {
            return;
        }
        // What was changed since has other bytes than the base: those that are in memory are known, and the others are brought by their places.
        let old: Vec<Range<u64>> = state.changed.gaps(&blocks).collect();
        let changed = state.changed.overlapping(&blocks);
        let changed = changed.flat_map(|run| run.start.max(blocks.start)..run.end.min(blocks.end));
        let is_far = |number: &u64| !state.dirty.contains_key(number) && !state.last.contains_key(number);
        let new =
            changed.take(MAX_BLOCKS as usize).filter(is_far).flat_map(|number| state.map.parts(number..number + 1));
        let is_up = |part: &Entry| part.place.is_some_and(|place| state.object(&place.id).is_none());
        let new: Vec<Entry> = new.filter(is_up).collect();
        let base = state.base.clone();
        drop(state);
        self.shared.near.expect(&new);
        if let Some(base) = base {
            old.into_iter().for_each(|run| base.will_need(run.start * BLOCK, (run.end - run.start) * BLOCK));
        }
    }
}

impl Shared {
    /// The bytes of a range, whose blocks lie where `parts` says: asked for all at once, and patiently.
    pub(super) fn bring(&self, parts: &[Entry], range: Range<u64>) -> Result<Vec<u8>> {
        let mut brought = vec![0; (range.end - range.start) as usize];
        let store = &self.blocks.store;
        let filled = store.patiently(&mut || self.blocks.fill(parts, range.clone(), &mut brought));
        filled.map_err(|trouble| told_later(&store.name, trouble))?;
        Ok(brought)
    }
}
