//! Reads of an upload buffer: from memory, from the base with readahead, or by location from the
//! store.

use std::ops::Range;
use std::sync::Arc;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use rangemap::RangeSet;

use super::super::layout::{BLOCK, MAX_BLOCKS};
use super::super::object_names::{hex, random_bytes};
use super::super::object_ref::{MapEntry, ObjectId};
use super::super::version::VersionReader;
use super::state::ReadPlan;
use super::{Shared, UploadBuffer};
use crate::RemoteOptions;
use crate::remote_file::RemoteFile;

impl UploadBuffer {
    /// Replaces the base by the current state, so that all reads use readahead. Writes must not run
    /// concurrently.
    pub(super) fn rebase(&self) -> Result<()> {
        self.wait_uploads(true)?;
        let (map, length, written) = {
            let state = self.shared.state.lock();
            if state.base.is_some() && state.changed.is_empty() {
                return Ok(());
            }
            (state.map.clone(), state.length, state.written)
        };
        let reading =
            Arc::new(VersionReader { blocks: self.shared.blocks.clone(), map, length, tag: hex(&random_bytes()?) });
        // The state has no name to which a later mount could return.
        let options = RemoteOptions { cache_bytes: Some(0), ..self.options.clone() };
        let base = match length {
            0 => None,
            _ => Some(Arc::new(RemoteFile::open_metered(
                Box::new(reading.clone()),
                self.shared.blocks.store.name.clone(),
                &options,
            )?)),
        };
        let mut state = self.shared.state.lock();
        (state.base, state.base_reader, state.written_at_rebase) = (base, Some(reading), written);
        state.changed = RangeSet::new();
        state.last_inline.clear();
        Ok(())
    }

    /// Refreshes the base, so that readahead covers recent writes, unless there are dirty blocks. A
    /// failure only costs readahead.
    pub(super) fn refresh_base(&self) {
        let _writing = self.writing.lock();
        if self.shared.state.lock().dirty.is_empty()
            && let Err(error) = self.rebase()
        {
            tracing::debug!(%error, "what was written is not read ahead of yet");
        }
    }

    /// Refreshes the base if it names any of these objects, which are about to be removed. Returns
    /// whether it names none of them (STAGED-2).
    pub(in super::super) fn release_objects(&self, ids: &[ObjectId]) -> bool {
        let _writing = self.writing.lock();
        let names = |reading: &Arc<VersionReader>| ids.iter().any(|id| reading.map.references(id));
        let is_named = self.shared.state.lock().base_reader.as_ref().is_some_and(names);
        !is_named || self.rebase().is_ok()
    }

    /// Reads the newest bytes (STAGED-2).
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
        let ReadPlan { unchanged, base, remote, mut pieces } = state.plan_read(offset / BLOCK..end.div_ceil(BLOCK));
        drop(state);
        for run in unchanged {
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
        let (cached, remote) = self.shared.cache.get_or_wait(remote);
        pieces.extend(cached.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        // Concurrently: blocks of many records take one round trip, not one each.
        if let (Some(first), Some(last)) = (remote.first(), remote.last()) {
            let range = (first.blocks.start * BLOCK).max(offset)..(last.blocks.end * BLOCK).min(end);
            let fetched = self.shared.fetch_ranges(&remote, range.clone())?;
            for part in &remote {
                let part = (part.blocks.start * BLOCK).max(offset)..(part.blocks.end * BLOCK).min(end);
                let from = (part.start - range.start) as usize..(part.end - range.start) as usize;
                out[(part.start - offset) as usize..(part.end - offset) as usize].copy_from_slice(&fetched[from]);
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

    /// Prefetches a range.
    pub(super) fn prefetch(&self, offset: u64, length: u64) {
        let state = self.shared.state.lock();
        let end = offset.saturating_add(length).min(state.length);
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        if offset >= end {
            return;
        }
        // Blocks changed since differ from the base: those in memory need no request, and the
        // others are fetched by location.
        let unchanged: Vec<Range<u64>> = state.changed.gaps(&blocks).collect();
        let changed = state.changed.overlapping(&blocks);
        let changed = changed.flat_map(|run| run.start.max(blocks.start)..run.end.min(blocks.end));
        let is_far = |number: &u64| !state.dirty.contains_key(number) && !state.last_inline.contains_key(number);
        let new =
            changed.take(MAX_BLOCKS as usize).filter(is_far).flat_map(|number| state.map.parts(number..number + 1));
        let is_up = |part: &MapEntry| part.place.is_some_and(|place| state.local_object(&place.id).is_none());
        let new: Vec<MapEntry> = new.filter(is_up).collect();
        let base = state.base.clone();
        drop(state);
        self.shared.cache.prefetch(&new);
        if let Some(base) = base {
            unchanged.into_iter().for_each(|run| base.will_need(run.start * BLOCK, (run.end - run.start) * BLOCK));
        }
    }
}

impl Shared {
    /// Fetches a range from the locations in `parts`, concurrently and with retries.
    pub(super) fn fetch_ranges(&self, parts: &[MapEntry], range: Range<u64>) -> Result<Vec<u8>> {
        let mut fetched = vec![0; (range.end - range.start) as usize];
        let store = &self.blocks.store;
        let filled = store.with_retry(&mut || self.blocks.fill(parts, range.clone(), &mut fetched));
        filled.map_err(|error| error.into_deferred_error(&store.name))?;
        Ok(fetched)
    }
}
