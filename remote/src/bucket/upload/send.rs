//! Uploads of an upload buffer: segments in the background, the records that name them, and
//! repacking, which rewrites uploaded blocks into a record for locality, or to free old segments.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Instant;

use lockbox::{Error, Result};
use rangemap::RangeSet;

use super::super::block_cache::BlockBytes;
use super::super::layout::{BLOCK, MAX_BLOCKS, RecordKind};
use super::super::map::{BlockMap, MapEntry, ObjectId, object_entries};
use super::super::session::{InlinePages, WriterSession, inline_entries, join_pages};
use super::segment::SegmentUpload;
use super::{RECENT_BLOCKS, SEGMENT_BLOCKS, UploadBuffer, UploadState};
use crate::remote_file::START_BYTES;

struct CommitBatch {
    map: BlockMap,
    inline: Vec<InlinePages>,
    length: u64,
    /// Segments that must be uploaded before the record.
    in_flight: Vec<ObjectId>,
    /// Segments that the record names or declares dead.
    uploaded: HashSet<ObjectId>,
}

impl UploadBuffer {
    /// Waits for uploads in flight; with `all`, uploads dirty blocks first.
    pub(in super::super) fn wait_uploads(&self, all: bool) -> Result<()> {
        if all {
            self.send_dirty()?;
        }
        let mut state = self.shared.state.lock();
        while !state.in_flight.is_empty() {
            self.shared.sent.wait(&mut state);
        }
        state.check_failure()
    }

    /// Uploads the dirty blocks as segments in the background.
    pub(super) fn send_dirty(&self) -> Result<()> {
        loop {
            let mut state = self.shared.state.lock();
            while state.in_flight.len() >= state.pace.limit {
                self.shared.sent.wait(&mut state);
            }
            state.check_failure()?;
            let mut dirty = std::mem::take(&mut state.dirty);
            let most = state.pace.segment_blocks;
            let most = if most < SEGMENT_BLOCKS { most } else { MAX_BLOCKS as usize };
            if let Some(rest) = dirty.keys().nth(most).copied() {
                state.dirty = dirty.split_off(&rest);
            }
            if dirty.is_empty() {
                return Ok(());
            }
            let runs = runs(&dirty);
            let blocks: Vec<Range<u64>> = runs.iter().map(InlinePages::blocks).collect();
            let pages = join_pages(&runs);
            drop(runs);
            let segment = SegmentUpload::new(&self.shared, blocks, &pages)?;
            drop(pages);
            object_entries(segment.id, &segment.runs).iter().for_each(|entry| state.assign(entry));
            let id = segment.id;
            state.in_flight.insert(id, segment.bytes.clone());
            let shared = self.shared.clone();
            let sent = thread::Builder::new().name("send".into()).spawn(move || shared.upload(segment));
            if let Err(error) = sent {
                let bytes = state.in_flight.remove(&id);
                state.failed_uploads.extend(bytes.map(|bytes| (id, bytes)));
                let error = Error::io("cannot start a thread that sends", error);
                state.failed = Some(error.clone());
                return Err(error);
            }
        }
    }

    /// Uploads the dirty blocks if there are more than `most` permits.
    fn send_dirty_above(&self, most: impl FnOnce(&UploadState) -> usize) -> Result<()> {
        let state = self.shared.state.lock();
        let is_large = state.dirty.len() > most(&state);
        drop(state);
        if is_large { self.send_dirty() } else { Ok(()) }
    }

    /// Commits all writes and closes the session; atomic, and durable on return. Errors: `InUse`
    /// when another writer took over; errors of requests.
    pub(in super::super) fn publish(&self, session: &mut WriterSession) -> Result<()> {
        self.repack_sparse(session.most_runs(), u64::MAX)?;
        self.commit(session, RecordKind::Close)
    }

    /// Commits all writes before the call with one record, atomically. Without writes, only a
    /// closing record is made. Errors: as of [`WriterSession::commit`]; the error of a segment's
    /// upload. Nothing is sent after an error.
    pub(in super::super) fn commit(&self, session: &mut WriterSession, kind: RecordKind) -> Result<()> {
        let Some(mut batch) = self.take_batch(session.newest.sequence + 1, kind)? else { return Ok(()) };
        let (checkpoint, inline) =
            (session.newest.checkpoint, batch.inline.iter().map(|run| run.pages.len()).sum::<usize>());
        let sent = self.wait_for_batch(&mut batch);
        let done = sent.and_then(|()| session.commit(batch.map, batch.inline, batch.length, kind));
        let mut state = self.shared.state.lock();
        let late = state.changed_since_cut.take().unwrap_or_default();
        if let Err(error) = done {
            state.failed.get_or_insert(error.clone());
            return Err(error);
        }
        if session.newest.checkpoint != checkpoint {
            state.map.reset_changes(late);
        }
        state.uploaded.retain(|id| !batch.uploaded.contains(id));
        state.pace.note_proven(inline / BLOCK as usize);
        self.shared.blocks.sequence.store(session.newest.sequence, Ordering::Release);
        let is_rebase_due = state.written - state.written_at_rebase >= self.rebase_after && kind == RecordKind::Commit;
        drop(state);
        if is_rebase_due {
            self.refresh_base();
        }
        Ok(())
    }

    /// Takes the dirty blocks as a batch for one record (STAGED-1).
    fn take_batch(&self, sequence: u64, kind: RecordKind) -> Result<Option<CommitBatch>> {
        let _writing = self.writing.lock();
        self.send_dirty_above(|state| state.pace.inline_blocks(!state.in_flight.is_empty()))?;
        let mut state = self.shared.state.lock();
        state.check_failure()?;
        if !state.touched && kind == RecordKind::Commit {
            return Ok(None);
        }
        state.touched = false;
        let dirty = std::mem::take(&mut state.dirty);
        let mut inline = runs(&dirty);
        // The end of a record, which an open reads first, has its last blocks.
        let is_first = |run: &InlinePages| state.read_first.overlaps(&run.blocks());
        inline.sort_by_key(is_first);
        inline_entries(&inline, sequence).iter().for_each(|entry| state.assign(entry));
        // The inline blocks of the previous record are uploaded, and may be read again where no
        // newer ones exist.
        for (number, block) in std::mem::replace(&mut state.last_inline, dirty) {
            if let Some(place) = state.map.parts(number..number + 1).first().and_then(|part| part.place) {
                self.shared.cache.insert(&place, &block);
            }
        }
        let map = state.map.clone();
        // The record says that they are dead.
        state.map.take_unreferenced();
        state.changed_since_cut = Some(RangeSet::new());
        let in_flight: Vec<ObjectId> = state.in_flight.keys().copied().collect();
        let uploaded = state.uploaded.iter().chain(&in_flight).copied().collect();
        Ok(Some(CommitBatch { map, inline, length: state.length, in_flight, uploaded }))
    }

    /// Waits for the upload of the batch's segments, or of the pieces that replace them (DIVIDE-2).
    fn wait_for_batch(&self, batch: &mut CommitBatch) -> Result<()> {
        let mut state = self.shared.state.lock();
        while let Some(waiting) = batch.in_flight.last() {
            if let Some(divided) = state.divided.iter().find(|divided| divided.id == *waiting) {
                divided.replace_in(&mut batch.map);
                batch.in_flight.pop();
                batch.in_flight.extend(divided.piece_ids());
                batch.uploaded.extend(divided.piece_ids());
            } else if state.in_flight.contains_key(waiting) {
                self.shared.sent.wait(&mut state);
            } else {
                batch.in_flight.pop();
            }
        }
        // Commits follow each other, so no other batch names a divided segment.
        state.divided.clear();
        state.check_failure()
    }

    /// Abandons all uploads: returns the uploaded segments, and those in flight, for which it does
    /// not wait.
    pub(in super::super) fn abandon(&self) -> (Vec<ObjectId>, Vec<ObjectId>) {
        let mut state = self.shared.state.lock();
        // The pieces of a divided segment are not sent after it.
        state.failed.get_or_insert_with(|| Error::request("the writes were discarded", io::ErrorKind::Interrupted));
        (std::mem::take(&mut state.uploaded), state.in_flight.keys().copied().collect())
    }
}

fn runs(blocks: &BTreeMap<u64, Box<BlockBytes>>) -> Vec<InlinePages> {
    let mut runs: Vec<InlinePages> = Vec::new();
    for (number, block) in blocks {
        match runs.last_mut() {
            Some(run) if run.blocks().end == *number => run.pages.extend_from_slice(&**block),
            _ => runs.push(InlinePages { block: *number, pages: block.to_vec() }),
        }
    }
    runs
}

impl UploadBuffer {
    /// Rewrites the blocks that every open reads, so that they are in two objects, regardless of
    /// the number of commits: the start of the file in the object that has most of it, and the rest
    /// in the next record, which an open reads first. So are the last written blocks and the blocks
    /// that the previous writer left there: the tree nodes that lead to all others.
    pub(in super::super) fn repack_start(&self) -> Result<()> {
        let mut chosen: RangeSet<u64> = RangeSet::new();
        // Writes that exceed a record are uploaded before, without these blocks.
        self.send_dirty_above(|state| state.pace.inline_blocks(false) / 2)?;
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
        let began = Instant::now();
        let (cached, parts) = self.shared.cache.get_or_wait(parts);
        let since = self.shared.cache.progress.silent_since(began);
        let mut fetched = self.shared.fetch_ranges(&parts, 0..numbers.len() as u64 * BLOCK, since)?;
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
