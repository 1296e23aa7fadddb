//! Upload of one segment: its turn among the others, and its division after a broken connection.
//!
//! A link that breaks now and then, or carries less than four requests at once, fails large
//! segments again and again. So after a failure fewer segments are sent at a time, new ones are
//! smaller, and a segment that was sent in part is divided: its pieces replace it in the map, and
//! each piece that the store has confirmed stays there.
//!
//! # Invariants
//! DIVIDE-1  Under the lock of the state, the pieces take the place of the segment in the map and
//!     among the uploads in flight: a read finds each block at any time (STAGED-2).
//! DIVIDE-2  A batch that named the segment waits for its pieces, and names them instead
//!     ([`DividedSegment::replace_in`]). The record declares the segment dead: the store may have
//!     it.
//! DIVIDE-3  A record is not divided, since a sent part may arrive late and only the same bytes are
//!     harmless then. On a link that broke, a record has at most as many pages as an object sent
//!     since, and a few more. While segments are in flight, and the link may be about to break, it
//!     has few. Further pages are uploaded as a segment before it.

use std::ops::Range;
use std::sync::Arc;

use lockbox::{Error, Result};

use super::super::layout::{self, BLOCK};
use super::super::map::{BlockMap, MapEntry, ObjectId, ObjectRef};
use super::super::objects::random_bytes;
use super::super::session::WriterSession;
use super::{SEGMENT_BLOCKS, Shared};

/// Maximum segments in flight; each is in memory.
pub(super) const MAX_UPLOADS: usize = 4;
/// Segments of at most these blocks are not divided: 512 KiB take half a minute at 128 kbit/s, and
/// less would be many objects.
const MIN_SEGMENT_BLOCKS: usize = 128;
/// Maximum inline blocks of a record: 4 MiB.
pub(super) const MAX_INLINE_BLOCKS: usize = 4 << 8;
/// Inline blocks by which a record may exceed the largest object before it: changed nodes.
const INLINE_GROWTH: usize = 64;
/// Successes in a row after which the pace rises.
const SUCCESSES: u32 = 8;

/// Number and size of the segments that are sent at a time.
pub(super) struct UploadPace {
    /// Requests at a time.
    pub(super) limit: usize,
    pub(super) segment_blocks: usize,
    /// Blocks of the largest object that the store took since the last failure; before the first
    /// one, the maximum of a record.
    proven: usize,
    /// Requests in progress.
    sending: usize,
    successes: u32,
}

impl Default for UploadPace {
    fn default() -> UploadPace {
        UploadPace {
            limit: MAX_UPLOADS,
            segment_blocks: SEGMENT_BLOCKS,
            proven: MAX_INLINE_BLOCKS,
            sending: 0,
            successes: 0,
        }
    }
}

impl UploadPace {
    /// Returns the maximum inline blocks of the next record (DIVIDE-3).
    pub(super) fn inline_blocks(&self, is_uploading: bool) -> usize {
        let carried = if is_uploading { MIN_SEGMENT_BLOCKS } else { self.proven };
        MAX_INLINE_BLOCKS.min(self.segment_blocks).min(carried + INLINE_GROWTH)
    }

    /// Notes an object with so many blocks that the store took.
    pub(super) fn note_proven(&mut self, blocks: usize) {
        self.proven = self.proven.max(blocks);
    }

    fn note_failure(&mut self) {
        self.proven = MIN_SEGMENT_BLOCKS;
        self.limit = (self.limit / 2).max(1);
        self.segment_blocks = (self.segment_blocks / 2).max(MIN_SEGMENT_BLOCKS);
        self.successes = 0;
    }

    fn note_success(&mut self) {
        self.successes += 1;
        if self.successes == SUCCESSES {
            self.successes = 0;
            self.limit = (self.limit + 1).min(MAX_UPLOADS);
            self.segment_blocks = (self.segment_blocks * 2).min(SEGMENT_BLOCKS);
        }
    }
}

pub(super) struct SegmentUpload {
    pub(super) id: ObjectId,
    /// Runs of archive blocks, in the order of its pages.
    pub(super) runs: Vec<Range<u64>>,
    /// The pages, their runs and the trailer.
    pub(super) bytes: Arc<Vec<u8>>,
}

/// Segment that was divided, with its pieces in order.
pub(super) struct DividedSegment {
    pub(super) id: ObjectId,
    runs: Vec<Range<u64>>,
    pieces: Vec<(ObjectId, u32)>,
}

impl SegmentUpload {
    pub(super) fn new(shared: &Shared, runs: Vec<Range<u64>>, pages: &[u8]) -> Result<SegmentUpload> {
        let (bytes, hash) = layout::encode_segment(&shared.blocks.incarnation, &random_bytes()?, &runs, pages);
        Ok(SegmentUpload { id: ObjectId::Segment(hash), runs, bytes: Arc::new(bytes) })
    }

    pub(super) fn blocks(&self) -> u32 {
        self.runs.iter().map(|run| run.end - run.start).sum::<u64>() as u32
    }

    /// Encodes two segments with the halves of its blocks.
    fn halve(&self, shared: &Shared) -> Result<[SegmentUpload; 2]> {
        let mut left = u64::from(self.blocks() / 2);
        let at = (left * BLOCK) as usize;
        let (mut first, mut second) = (Vec::new(), Vec::new());
        for run in &self.runs {
            let taken = left.min(run.end - run.start);
            left -= taken;
            first.extend(Some(run.start..run.start + taken).filter(|run| !run.is_empty()));
            second.extend(Some(run.start + taken..run.end).filter(|run| !run.is_empty()));
        }
        let pages = &self.bytes[..self.blocks() as usize * BLOCK as usize];
        Ok([SegmentUpload::new(shared, first, &pages[..at])?, SegmentUpload::new(shared, second, &pages[at..])?])
    }
}

impl DividedSegment {
    /// Returns the entries of `map` that name the segment, with its pieces in its place.
    pub(super) fn replacements(&self, map: &BlockMap) -> Vec<MapEntry> {
        let mut replacements = Vec::new();
        let named = self.runs.iter().flat_map(|run| map.parts(run.clone()));
        for MapEntry { blocks, place } in named {
            let Some(place) = place.filter(|place| place.id == self.id) else { continue };
            let (mut start, mut first) = (blocks.start, 0);
            for (id, count) in &self.pieces {
                let at = place.at + (start - blocks.start) as u32;
                if start < blocks.end && (first..first + count).contains(&at) {
                    let end = blocks.end.min(start + u64::from(first + count - at));
                    let place = ObjectRef { id: *id, blocks: *count, at: at - first };
                    replacements.push(MapEntry { blocks: start..end, place: Some(place) });
                    start = end;
                }
                first += count;
            }
        }
        replacements
    }

    /// Replaces the segment in the map of a batch (DIVIDE-2).
    pub(super) fn replace_in(&self, map: &mut BlockMap) {
        self.replacements(map).iter().for_each(|entry| map.assign(entry));
    }

    pub(super) fn piece_ids(&self) -> impl Iterator<Item = ObjectId> {
        self.pieces.iter().map(|(id, _)| *id)
    }
}

impl Shared {
    /// Uploads a segment that is in flight, in pieces if necessary.
    pub(super) fn upload(&self, segment: SegmentUpload) {
        let mut waiting = vec![segment];
        while let Some(segment) = waiting.pop() {
            let is_done = self.upload_once(&segment);
            match is_done.and_then(|is_done| if is_done { Ok(None) } else { segment.halve(self).map(Some) }) {
                Ok(None) => self.finish_upload(&segment, None),
                Ok(Some([first, second])) => {
                    self.divide(segment, [&first, &second]);
                    waiting.extend([second, first]);
                }
                Err(error) => self.finish_upload(&segment, Some(error)),
            }
        }
    }

    /// Sends a segment when it is its turn. Returns false if it has to be divided.
    fn upload_once(&self, segment: &SegmentUpload) -> Result<bool> {
        let mut state = self.state.lock();
        while state.pace.sending >= state.pace.limit {
            self.sent.wait(&mut state);
        }
        // STAGED-3
        state.check_failure()?;
        state.pace.sending += 1;
        drop(state);
        let (store, incarnation) = (&self.blocks.store, &self.blocks.incarnation);
        let is_divisible = segment.blocks() as usize > MIN_SEGMENT_BLOCKS;
        let uploaded = WriterSession::create_segment(store, incarnation, &segment.id, &segment.bytes, is_divisible);
        let mut state = self.state.lock();
        state.pace.sending -= 1;
        match uploaded {
            Ok(true) => {
                state.pace.note_proven(segment.blocks() as usize);
                state.pace.note_success();
            }
            Ok(false) | Err(_) => state.pace.note_failure(),
        }
        self.sent.notify_all();
        uploaded
    }

    fn finish_upload(&self, segment: &SegmentUpload, error: Option<Error>) {
        let mut state = self.state.lock();
        let bytes = state.in_flight.remove(&segment.id);
        state.uploaded.push(segment.id);
        if let Some(error) = error {
            state.failed_uploads.extend(bytes.map(|bytes| (segment.id, bytes)));
            state.failed.get_or_insert(error);
        }
        self.sent.notify_all();
    }

    /// Replaces a segment by its pieces (DIVIDE-1).
    fn divide(&self, segment: SegmentUpload, pieces: [&SegmentUpload; 2]) {
        let divided = DividedSegment {
            id: segment.id,
            runs: segment.runs,
            pieces: pieces.iter().map(|piece| (piece.id, piece.blocks())).collect(),
        };
        let mut state = self.state.lock();
        let replacements = divided.replacements(&state.map);
        replacements.iter().for_each(|entry| state.assign(entry));
        state.in_flight.extend(pieces.iter().map(|piece| (piece.id, piece.bytes.clone())));
        state.in_flight.remove(&segment.id);
        // The store may have it.
        state.uploaded.push(segment.id);
        // Without a batch that waits for its uploads, only the map names it.
        if state.changed_since_cut.is_some() {
            state.divided.push(divided);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// DIVIDE-3
    #[test]
    fn a_record_has_few_pages_on_a_link_that_breaks_and_while_that_is_not_known() {
        let mut pace = UploadPace::default();
        assert_eq!(pace.inline_blocks(false), MAX_INLINE_BLOCKS);
        let few = MIN_SEGMENT_BLOCKS + INLINE_GROWTH;
        assert_eq!(pace.inline_blocks(true), few);
        pace.note_failure();
        assert_eq!(pace.inline_blocks(false), few);
        pace.note_proven(300);
        pace.note_proven(200);
        assert_eq!((pace.inline_blocks(false), pace.inline_blocks(true)), (300 + INLINE_GROWTH, few));
        (0..8).for_each(|_| pace.note_failure());
        assert_eq!(pace.inline_blocks(false), MIN_SEGMENT_BLOCKS, "as small as segments");
    }
}
