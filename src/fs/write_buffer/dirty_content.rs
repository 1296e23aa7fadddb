//! Content of one staged file: sealed layers under the active one, and the space promised to it.

use std::ops::Range;
use std::sync::Arc;

use super::batch::Batch;
use super::layer::{Frame, Layer, split};
use crate::error::Result;
use crate::format::Ino;
use crate::fs::ranges::join;
use crate::txn::{Operation, Publication, Reservation, State};

/// Ranges that are kept apart of what no entry of the log has: what is written again and again without a commit must not grow.
const MOST_RANGES: usize = 1024;

/// A layer on its way into extents.
struct SealedLayer {
    layer: Arc<Layer>,
    batch: Arc<Batch>,
}

#[derive(Default)]
pub(super) struct Content {
    active: Layer,
    /// Covers exactly what the frames of `active` hold.
    reserved: Option<Reservation>,
    sealed: Vec<SealedLayer>,
    /// What the active layer has no more as soon as an operation is in the state (STAGE-2).
    superseded: Option<(Publication, Range<u64>)>,
    /// Where bytes were accepted that no entry of the log has, in no order. They need not be staged any more.
    unlogged: Vec<Range<u64>>,
}

/// Staged parts of a range as a reader sees them: later ones lie over earlier ones.
#[derive(Default)]
pub(in crate::fs) struct Overlay {
    /// First offset behind all staged bytes of the file.
    pub(in crate::fs) end: u64,
    pub(in crate::fs) parts: Vec<(u64, Vec<u8>)>,
}

impl Content {
    pub(super) fn weight(&self) -> u64 {
        self.active.weight() + self.sealed.iter().map(|sealed| sealed.layer.weight()).sum::<u64>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty() && self.sealed.is_empty()
    }

    pub(super) fn active_bytes(&self) -> u64 {
        self.active.bytes()
    }

    /// Whether the active layer has bytes of the range.
    pub(super) fn has_active(&self, range: &Range<u64>) -> bool {
        self.active.within(range).next().is_some()
    }

    pub(super) fn has_sealed(&self) -> bool {
        !self.sealed.is_empty()
    }

    pub(super) fn sealed_batches(&self) -> Vec<Arc<Batch>> {
        self.sealed.iter().map(|sealed| sealed.batch.clone()).collect()
    }

    fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.sealed.iter().map(|sealed| &*sealed.layer).chain([&self.active])
    }

    /// First offset behind all staged bytes.
    pub(super) fn end(&self) -> u64 {
        self.layers().map(Layer::end).max().unwrap_or(0)
    }

    /// Drops what the state has. The caller holds the writers' lock, or took the state with the content locked, or can do with "not yet".
    pub(super) fn drop_published(&mut self, state: &State) {
        for sealed in self.sealed.extract_if(.., |sealed| sealed.batch.is_in(state)) {
            // Write-out may have filled holes between the pieces.
            sealed.layer.frames().keys().for_each(|number| self.active.uncount(*number));
        }
        if let Some((_, range)) = self.superseded.take_if(|(publication, _)| publication.is_in(state)) {
            self.active.remove(range);
            self.trim_reservation();
        }
    }

    /// As [`super::LockedFile::supersede`].
    pub(super) fn supersede(&mut self, op: &mut Operation<'_>, ino: Ino, range: Range<u64>) {
        let publication = Publication::default();
        op.carry(&publication);
        op.drop_staged(ino, range.clone());
        self.superseded = Some((publication, range));
    }

    /// Gives back the space of frames that vanished.
    fn trim_reservation(&mut self) {
        let held = self.active.held();
        if let Some(reserved) = &mut self.reserved {
            drop(reserved.split(reserved.groups().saturating_sub(held)));
        }
    }

    /// Moves the first frames, up to about `pieces` pieces and `most` bytes, into a sealed layer with the space that they hold.
    pub(super) fn seal(
        &mut self,
        batch: &Arc<Batch>,
        pieces: u64,
        most: u64,
    ) -> Option<(Arc<Layer>, Option<Reservation>)> {
        let layer = Arc::new(self.active.take_first(pieces, most));
        if layer.is_empty() {
            return None;
        }
        let reserved = self.reserved.as_mut().map(|reserved| reserved.split(layer.held()));
        self.sealed.push(SealedLayer { layer: layer.clone(), batch: batch.clone() });
        Some((layer, reserved))
    }

    /// Puts a layer that could not be written back under the newer ones, with what is left of the batch's space.
    pub(super) fn unseal(&mut self, batch: &Arc<Batch>, reserved: &mut Option<Reservation>) {
        let Some(at) = self.sealed.iter().position(|sealed| Arc::ptr_eq(&sealed.batch, batch)) else { return };
        let layer = self.sealed.remove(at).layer;
        for (offset, data) in layer.iter() {
            self.unlogged.push(offset..offset + data.len() as u64);
            let newer = self.sealed[at..].iter().map(|sealed| &*sealed.layer).chain([&self.active]);
            for gap in outside(newer, offset..offset + data.len() as u64) {
                self.active.put(gap.start, &data[(gap.start - offset) as usize..(gap.end - offset) as usize]);
            }
        }
        for (number, sealed) in layer.frames() {
            self.active.uncount(*number);
            if sealed.inline {
                self.active.may_have_inline(*number);
            }
            if self.active.frames().contains_key(number)
                && let Some(got) = reserved.as_mut().map(|reserved| reserved.split(sealed.held))
            {
                self.active.hold(*number, got.groups());
                got.join(&mut self.reserved);
            }
        }
    }

    pub(super) fn overlay(&self, range: &Range<u64>) -> Overlay {
        let parts = self.layers().flat_map(|layer| layer.within(range)).map(|(at, data)| (at, data.to_vec())).collect();
        Overlay { end: self.end(), parts }
    }

    /// Bytes of the layers that lie over no others and over nothing published; `bare` says how many bytes of a range nothing published has.
    pub(super) fn added(&mut self, bare: &dyn Fn(Range<u64>) -> Result<u64>) -> Result<u64> {
        let over = |older: &[SealedLayer], range: Range<u64>| {
            outside(older.iter().map(|sealed| &*sealed.layer), range).into_iter().map(bare).sum::<Result<u64>>()
        };
        let mut added = 0;
        for (at, sealed) in self.sealed.iter().enumerate() {
            for (offset, data) in sealed.layer.iter() {
                added += over(&self.sealed[..at], offset..offset + data.len() as u64)?;
            }
        }
        Ok(added + self.active.added(|range| over(&self.sealed, range))?)
    }

    /// Where the layers have bytes, in no order.
    pub(super) fn ranges(&self) -> Vec<Range<u64>> {
        self.layers().flat_map(Layer::iter).map(|(offset, data)| offset..offset + data.len() as u64).collect()
    }

    /// Drops what no batch has sealed.
    pub(super) fn discard_active(&mut self) {
        self.active = Layer::default();
        self.reserved = None;
        self.superseded = None;
        self.unlogged.clear();
    }

    /// Puts the parts into the active layer when `reserved` is enough for what the touched frames lack, and takes it then (STAGE-4).
    pub(super) fn accept(
        &mut self,
        touched: &Touched,
        parts: &[(u64, &[u8])],
        reserved: &mut Option<Reservation>,
    ) -> bool {
        if touched.shortfall(self) > reserved.as_ref().map_or(0, Reservation::groups) {
            return false;
        }
        touched.give(self, reserved.take());
        for (offset, data) in parts {
            self.put(*offset, data);
        }
        self.trim_reservation();
        true
    }

    /// Puts bytes into the active layer, for which the caller has room, or which are never written out.
    pub(super) fn put(&mut self, offset: u64, data: &[u8]) {
        self.active.put(offset, data);
        let range = offset..offset + data.len() as u64;
        match self.unlogged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.unlogged.push(range),
        }
        if self.unlogged.len() > MOST_RANGES {
            self.unlogged = join(std::mem::take(&mut self.unlogged));
            if self.unlogged.len() > MOST_RANGES / 2 {
                // More than an entry would take, mostly.
                self.unlogged.truncate(1);
                self.unlogged[0] = 0..u64::MAX;
            }
        }
    }

    /// The staged bytes that no entry of the log has, as pieces that are sorted and disjoint.
    pub(super) fn unlogged(&self) -> Layer {
        let mut merged = Layer::default();
        for range in join(self.unlogged.clone()) {
            for (offset, data) in self.layers().flat_map(|layer| layer.within(&range)) {
                merged.put(offset, data);
            }
        }
        merged
    }

    /// An entry of the log, or a commit, has all that is staged.
    pub(super) fn mark_logged(&mut self) {
        self.unlogged.clear();
    }

    pub(super) fn is_logged(&self) -> bool {
        self.unlogged.is_empty()
    }
}

/// The parts of the range that are in none of the layers.
fn outside<'l>(layers: impl Iterator<Item = &'l Layer>, range: Range<u64>) -> Vec<Range<u64>> {
    layers.fold(vec![range], |gaps, layer| gaps.into_iter().flat_map(|gap| layer.gaps(gap)).collect())
}

/// Frames that a write reaches: number, bytes to come.
pub(super) struct Touched {
    frames: Vec<(u64, u64)>,
    /// The file may have inline data.
    inline: bool,
}

impl Touched {
    pub(super) fn new(parts: &[(u64, &[u8])], inline: bool) -> Touched {
        let mut frames: Vec<(u64, u64)> = Vec::new();
        for (offset, data) in parts {
            for (number, _, range) in split(*offset, data.len()) {
                match frames.last_mut() {
                    Some((last, bytes)) if *last == number => *bytes += range.len() as u64,
                    _ => frames.push((number, range.len() as u64)),
                }
            }
        }
        Touched { frames, inline }
    }

    /// Groups that the frames need beside what they hold.
    fn missing(&self, content: &Content, number: u64, more: u64) -> u64 {
        match content.active.frames().get(&number) {
            Some(frame) => frame.groups_with(more).saturating_sub(frame.held),
            None => Frame { inline: self.inline, ..Frame::default() }.groups_with(more),
        }
    }

    pub(super) fn shortfall(&self, content: &Content) -> u64 {
        self.frames.iter().map(|(number, more)| self.missing(content, *number, *more)).sum()
    }

    /// Hands the space, which is no shorter than the shortfall, out to the frames, which come into being here.
    fn give(&self, content: &mut Content, reserved: Option<Reservation>) {
        for (number, more) in &self.frames {
            let missing = self.missing(content, *number, *more);
            content.active.begin(*number, self.inline);
            content.active.hold(*number, missing);
        }
        if let Some(reserved) = reserved {
            reserved.join(&mut content.reserved);
        }
    }
}
