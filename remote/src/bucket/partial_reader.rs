//! What is left of a moment of which objects are gone or were cut: for who rescues it, and asks of each block alone whether it is there.
//!
//! What is gone reads as zeros, in which no page of the archive begins; what comes with any of it is still read. That a request failed is told as ever (REMOTE-3).

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::Mutex;

use super::layout::BLOCK;
use super::object_ref::{Entry, Id, Place};
use super::version::Reading;
use crate::range_source::{Source, Trouble, Version};

/// See above.
pub(super) struct Salvage {
    reading: Reading,
    version: Version,
    /// From which block on an object has nothing.
    gone: Mutex<HashMap<Id, u32>>,
}

impl Salvage {
    pub(super) fn of(reading: Reading) -> Salvage {
        let version = Version { length: reading.length, tag: Some(reading.tag.clone()), modified: None };
        Salvage { reading, version, gone: Mutex::default() }
    }

    /// The bytes of a range.
    fn fill(&self, range: Range<u64>, out: &mut [u8]) -> Result<(), Trouble> {
        let parts = self.reading.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK));
        let parts: Vec<Entry> = parts.iter().filter_map(|part| self.left(part)).collect();
        match self.reading.blocks.fill(&parts, range.clone(), out) {
            Err(Trouble::Damaged(_)) => {}
            asked => return asked,
        }
        out.fill(0);
        parts.iter().try_for_each(|part| self.search(part, &range, out))
    }

    /// The blocks of a part that are there as far as is known.
    fn left(&self, part: &Entry) -> Option<Entry> {
        let place = part.place?;
        let gone = self.gone.lock().get(&place.id).copied().unwrap_or(u32::MAX);
        let end = part.blocks.end.min(part.blocks.start + u64::from(gone.saturating_sub(place.at)));
        (part.blocks.start < end).then(|| Entry { blocks: part.blocks.start..end, ..part.clone() })
    }

    /// The blocks of a part that are there: an object has none behind one that it lacks.
    fn search(&self, part: &Entry, all: &Range<u64>, out: &mut [u8]) -> Result<(), Trouble> {
        let Some(part) = self.left(part) else { return Ok(()) };
        let range = (part.blocks.start * BLOCK).max(all.start)..(part.blocks.end * BLOCK).min(all.end);
        let into = &mut out[(range.start - all.start) as usize..(range.end - all.start) as usize];
        let (why, place) = match (self.reading.blocks.fill(std::slice::from_ref(&part), range, into), part.place) {
            (Err(Trouble::Damaged(why)), Some(place)) => (why, place),
            (asked, _) => return asked,
        };
        into.fill(0);
        let count = part.blocks.end - part.blocks.start;
        if count == 1 {
            tracing::warn!("{}: {why}; what it lacks is passed over", self.reading.blocks.store.name);
            self.gone.lock().insert(place.id, place.at);
            return Ok(());
        }
        let middle = part.blocks.start + count / 2;
        let later = Place { at: place.at + (count / 2) as u32, ..place };
        self.search(&Entry { blocks: part.blocks.start..middle, ..part.clone() }, all, out)?;
        self.search(&Entry { blocks: middle..part.blocks.end, place: Some(later) }, all, out)
    }
}

impl Source for Salvage {
    fn first(&self, count: u64) -> Result<(Version, Vec<u8>), Trouble> {
        let mut bytes = vec![0; usize::try_from(count.min(self.reading.length)).unwrap_or_default()];
        self.fill(0..bytes.len() as u64, &mut bytes)?;
        Ok((self.version.clone(), bytes))
    }

    fn range(&self, version: &Version, range: Range<u64>) -> Result<Vec<u8>, Trouble> {
        if *version != self.version {
            return Err(Trouble::Changed);
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.fill(range, &mut bytes).map(|()| bytes)
    }
}
