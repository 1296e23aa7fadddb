//! Partial reader: reads a version with missing or truncated objects block by block, for a rescue.
//!
//! Missing blocks read as zeros, in which no page of the archive begins; the other blocks of the
//! same request are still read. A failed request is reported as an error (REMOTE-3).

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::Mutex;

use super::layout::BLOCK;
use super::object_ref::{MapEntry, ObjectId, ObjectRef};
use super::version::VersionReader;
use crate::range_source::{FileVersion, RangeSource, RemoteError, RemoteResult};

/// Reads a version with missing or truncated objects.
pub(super) struct PartialReader {
    reading: VersionReader,
    version: FileVersion,
    /// First missing block of each damaged object.
    missing_from: Mutex<HashMap<ObjectId, u32>>,
}

impl PartialReader {
    pub(super) fn new(reading: VersionReader) -> PartialReader {
        let version = FileVersion { length: reading.length, tag: Some(reading.tag.clone()), modified: None };
        PartialReader { reading, version, missing_from: Mutex::default() }
    }

    /// Reads a range.
    fn fill(&self, range: Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        let parts = self.reading.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK));
        let parts: Vec<MapEntry> = parts.iter().filter_map(|part| self.readable_part(part)).collect();
        match self.reading.blocks.fill(&parts, range.clone(), out) {
            Err(RemoteError::Damaged(_)) => {}
            asked => return asked,
        }
        out.fill(0);
        parts.iter().try_for_each(|part| self.bisect(part, &range, out))
    }

    /// Returns the blocks of a part that are not known to be missing.
    fn readable_part(&self, part: &MapEntry) -> Option<MapEntry> {
        let place = part.place?;
        let missing_from = self.missing_from.lock().get(&place.id).copied().unwrap_or(u32::MAX);
        let end = part.blocks.end.min(part.blocks.start + u64::from(missing_from.saturating_sub(place.at)));
        (part.blocks.start < end).then(|| MapEntry { blocks: part.blocks.start..end, ..part.clone() })
    }

    /// Reads a part by bisection: an object has no blocks after its first missing one.
    fn bisect(&self, part: &MapEntry, all: &Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        let Some(part) = self.readable_part(part) else { return Ok(()) };
        let range = (part.blocks.start * BLOCK).max(all.start)..(part.blocks.end * BLOCK).min(all.end);
        let into = &mut out[(range.start - all.start) as usize..(range.end - all.start) as usize];
        let (why, place) = match (self.reading.blocks.fill(std::slice::from_ref(&part), range, into), part.place) {
            (Err(RemoteError::Damaged(why)), Some(place)) => (why, place),
            (asked, _) => return asked,
        };
        into.fill(0);
        let count = part.blocks.end - part.blocks.start;
        if count == 1 {
            tracing::warn!("{}: {why}; what it lacks is passed over", self.reading.blocks.store.name);
            self.missing_from.lock().insert(place.id, place.at);
            return Ok(());
        }
        let middle = part.blocks.start + count / 2;
        let later = ObjectRef { at: place.at + (count / 2) as u32, ..place };
        self.bisect(&MapEntry { blocks: part.blocks.start..middle, ..part.clone() }, all, out)?;
        self.bisect(&MapEntry { blocks: middle..part.blocks.end, place: Some(later) }, all, out)
    }
}

impl RangeSource for PartialReader {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        let mut bytes = vec![0; usize::try_from(count.min(self.reading.length)).unwrap_or_default()];
        self.fill(0..bytes.len() as u64, &mut bytes)?;
        Ok((self.version.clone(), bytes))
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        if *version != self.version {
            return Err(RemoteError::Changed);
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.fill(range, &mut bytes).map(|()| bytes)
    }
}
