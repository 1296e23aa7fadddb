//! Uploads: segments in the background, and the records that name them.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use lockbox::{Error, Result};
use rangemap::RangeSet;

use super::super::block_cache::BlockBytes;
use super::super::layout::{self, BLOCK, MAX_BLOCKS, RecordKind};
use super::super::map::BlockMap;
use super::super::object_names::random_bytes;
use super::super::object_ref::{MapEntry, ObjectId, ObjectRef};
use super::super::session::{InlinePages, WriterSession, inline_entries};
use super::UploadBuffer;

/// Maximum segments in flight; each is in memory.
const MAX_UPLOADS: usize = 4;
/// Maximum inline blocks of a record: 4 MiB.
pub(super) const MAX_INLINE_BLOCKS: usize = 4 << 8;

/// Content of one commit.
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
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Uploads the dirty blocks as segments in the background.
    pub(super) fn send_dirty(&self) -> Result<()> {
        loop {
            let mut state = self.shared.state.lock();
            while state.in_flight.len() >= MAX_UPLOADS {
                self.shared.sent.wait(&mut state);
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let mut dirty = std::mem::take(&mut state.dirty);
            if let Some(rest) = dirty.keys().nth(MAX_BLOCKS as usize).copied() {
                state.dirty = dirty.split_off(&rest);
            }
            if dirty.is_empty() {
                return Ok(());
            }
            let runs = runs(&dirty);
            let blocks: Vec<Range<u64>> = runs.iter().map(InlinePages::blocks).collect();
            let pages: Vec<u8> = runs.into_iter().flat_map(|run| run.pages).collect();
            let (bytes, hash) =
                layout::encode_segment(&self.shared.blocks.incarnation, &random_bytes()?, &blocks, &pages);
            let id = ObjectId::Segment(hash);
            let (count, mut at) = ((pages.len() as u64 / BLOCK) as u32, 0);
            for run in blocks {
                let length = (run.end - run.start) as u32;
                state.assign(&MapEntry { blocks: run, place: Some(ObjectRef { id, blocks: count, at }) });
                at += length;
            }
            drop(pages);
            let bytes = Arc::new(bytes);
            state.in_flight.insert(id, bytes.clone());
            let shared = self.shared.clone();
            let sent = thread::Builder::new().name("send".into()).spawn(move || {
                let uploaded =
                    WriterSession::create_segment(&shared.blocks.store, &shared.blocks.incarnation, &id, &bytes);
                let mut state = shared.state.lock();
                state.in_flight.remove(&id);
                state.uploaded.push(id);
                if let Err(error) = uploaded {
                    state.failed_uploads.insert(id, bytes);
                    state.failed.get_or_insert(error);
                }
                shared.sent.notify_all();
            });
            if let Err(error) = sent {
                let bytes = state.in_flight.remove(&id);
                state.failed_uploads.extend(bytes.map(|bytes| (id, bytes)));
                let error = Error::io("cannot start a thread that sends", error);
                state.failed = Some(error.clone());
                return Err(error);
            }
        }
    }

    /// Commits all writes and closes the session; atomic, and durable on return.
    ///
    /// # Errors
    /// `InUse` when another writer took over; errors of requests.
    pub(in super::super) fn publish(&self, session: &mut WriterSession) -> Result<()> {
        self.repack_sparse(session.most_runs(), u64::MAX)?;
        self.commit(session, RecordKind::Close)
    }

    /// Commits all writes before the call with one record, atomically. Without writes, only a
    /// closing record is made.
    ///
    /// # Errors
    /// As of [`WriterSession::commit`]; the error of a segment's upload. Nothing is sent after an
    /// error.
    pub(in super::super) fn commit(&self, session: &mut WriterSession, kind: RecordKind) -> Result<()> {
        let Some(batch) = self.take_batch(session.sequence() + 1, kind)? else { return Ok(()) };
        let checkpoint = session.checkpoint();
        let sent = self.wait_for(&batch.in_flight);
        let done = sent.and_then(|()| session.commit(batch.map, batch.inline, batch.length, kind));
        let mut state = self.shared.state.lock();
        let late = state.changed_since_cut.take().unwrap_or_default();
        if let Err(error) = done {
            state.failed.get_or_insert(error.clone());
            return Err(error);
        }
        if session.checkpoint() != checkpoint {
            state.map.reset_changes_to(late);
        }
        state.uploaded.retain(|id| !batch.uploaded.contains(id));
        self.shared.blocks.sequence.store(session.sequence(), Ordering::Release);
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
        if self.shared.state.lock().dirty.len() > MAX_INLINE_BLOCKS {
            self.send_dirty()?;
        }
        let mut state = self.shared.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
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

    /// Waits for the upload of these segments.
    fn wait_for(&self, ids: &[ObjectId]) -> Result<()> {
        let mut state = self.shared.state.lock();
        while ids.iter().any(|id| state.in_flight.contains_key(id)) {
            self.shared.sent.wait(&mut state);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Abandons all uploads: returns the uploaded segments, and those in flight, for which it does
    /// not wait.
    pub(in super::super) fn abandon(&self) -> (Vec<ObjectId>, Vec<ObjectId>) {
        let mut state = self.shared.state.lock();
        (std::mem::take(&mut state.uploaded), state.in_flight.keys().copied().collect())
    }
}

impl InlinePages {
    fn blocks(&self) -> Range<u64> {
        self.block..self.block + self.pages.len() as u64 / BLOCK
    }
}

/// Groups adjacent blocks.
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
