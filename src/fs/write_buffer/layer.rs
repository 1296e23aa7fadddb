//! A sparse buffer of file bytes: sorted pieces within aligned frames, the unit of write-out.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::error::Result;
use crate::format::BLOCK;
use crate::fs::extents::FRAME;
use crate::fs::ranges::gaps;
use crate::txn::groups_for;

/// More pieces than this cutting one frame are rewritten as a whole (design 3.3: more cost more space than they save).
pub(crate) const MAX_PIECES: usize = 12;

/// Bytes of a group of four blocks, the unit of reservations.
pub(crate) const GROUP: u64 = 4 * BLOCK;

/// What a frame costs at most, since it can always be written as one page.
pub(crate) const WHOLE_GROUPS: u64 = groups_for(FRAME, 1);

/// Groups promised for a byte that counts as staged, at most one for each of so many: a page of its own for every 4 KiB written here and there.
const BYTES_PER_GROUP: u64 = GROUP / 4;

/// Room for the page that inline data becomes.
pub(crate) const INLINE_GROUPS: u64 = 1;

/// Bytes present without a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Offset in the frame.
    pub(crate) start: u32,
    pub(crate) data: Vec<u8>,
}

impl Piece {
    fn end(&self) -> u32 {
        // Pieces lie within a frame of 128 KiB.
        self.start + self.data.len() as u32
    }
}

/// Pieces of one frame: sorted, disjoint, not adjacent, never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) pieces: Vec<Piece>,
    /// Groups promised to the write-out of this frame; a layer keeps the sum of them.
    pub(crate) held: u64,
    /// The file may have inline data, which write-out may have to turn into a page.
    pub(crate) inline: bool,
    /// Bytes of the pieces that nothing lies below, once they are counted.
    pub(crate) added: Option<u64>,
}

impl Frame {
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.data.len() as u64).sum()
    }

    /// Groups that the frame needs at most when another `more` bytes are put. What merging it with its extents takes beyond that is asked for
    /// when it is written out: then it is known, and nothing is lost when it is not there.
    pub(crate) fn groups_with(&self, more: u64) -> u64 {
        let (bytes, pieces) = (self.bytes() + more, self.pieces.len() as u64 + 1);
        groups_for(bytes, pieces).min(WHOLE_GROUPS) + if self.inline { INLINE_GROUPS } else { 0 }
    }

    /// Groups of the promise that are for the frame itself.
    pub(crate) fn own_groups(&self) -> u64 {
        if self.inline { self.held.saturating_sub(INLINE_GROUPS) } else { self.held }
    }

    pub(crate) fn put(&mut self, start: u32, new: &[u8]) {
        let end = start + new.len() as u32;
        let low = self.pieces.partition_point(|p| p.end() < start);
        let high = self.pieces.partition_point(|p| p.start <= end);
        if low >= high {
            self.pieces.insert(low, Piece { start, data: new.to_vec() });
            return;
        }
        let last = &self.pieces[high - 1];
        let tail = if high - low > 1 && last.end() > end {
            last.data[(end - last.start) as usize..].to_vec()
        } else {
            Vec::new()
        };
        let first = &mut self.pieces[low];
        if first.start <= start {
            let at = (start - first.start) as usize;
            let over = (first.data.len() - at).min(new.len());
            first.data[at..at + over].copy_from_slice(&new[..over]);
            first.data.extend_from_slice(&new[over..]);
            first.data.extend_from_slice(&tail);
        } else {
            let mut data = new.to_vec();
            if high - low == 1 {
                let kept = (end - first.start) as usize;
                data.extend_from_slice(first.data.get(kept..).unwrap_or_default());
            }
            data.extend_from_slice(&tail);
            *first = Piece { start, data };
        }
        self.pieces.drain(low + 1..high);
    }

    fn remove(&mut self, from: u32, to: u32) {
        let mut kept = Vec::with_capacity(self.pieces.len() + 1);
        for mut piece in self.pieces.drain(..) {
            let (start, end) = (piece.start, piece.end());
            if end <= from || start >= to {
                kept.push(piece);
                continue;
            }
            if end > to {
                let tail = Piece { start: to, data: piece.data[(to - start) as usize..].to_vec() };
                if start < from {
                    piece.data.truncate((from - start) as usize);
                    kept.push(piece);
                }
                kept.push(tail);
            } else if start < from {
                piece.data.truncate((from - start) as usize);
                kept.push(piece);
            }
        }
        self.pieces = kept;
    }
}

/// The frames of one file by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer {
    frames: BTreeMap<u64, Frame>,
    /// Sums over the frames, kept because every request asks for them.
    bytes: u64,
    held: u64,
    added: u64,
    /// Frames of which `added` is not known.
    uncounted: BTreeSet<u64>,
}

impl Layer {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What counts against the bound of staged data. Room on the host is promised in whole groups: what is promised for small pieces may go
    /// beyond the bound, but only by a known factor.
    pub(crate) fn weight(&self) -> u64 {
        self.bytes.max(self.held * BYTES_PER_GROUP)
    }

    /// Groups promised to the write-out of all of it.
    pub(crate) fn held(&self) -> u64 {
        self.held
    }

    pub(crate) fn frames(&self) -> &BTreeMap<u64, Frame> {
        &self.frames
    }

    /// Promises `groups` more to a frame that is there.
    pub(crate) fn hold(&mut self, number: u64, groups: u64) {
        if let Some(frame) = self.frames.get_mut(&number) {
            frame.held += groups;
            self.held += groups;
        }
    }

    /// Makes a frame, to which bytes are put before anybody else sees the layer, unless it is there.
    pub(crate) fn begin(&mut self, number: u64, inline: bool) {
        self.frames.entry(number).or_insert_with(|| Frame { inline, ..Frame::default() });
    }

    /// Says that the file may have inline data after all.
    pub(crate) fn may_have_inline(&mut self, number: u64) {
        if let Some(frame) = self.frames.get_mut(&number) {
            frame.inline = true;
        }
    }

    /// Bytes that nothing lies below. `bare` says how many of a range are such, and is asked about frames that changed since they were counted.
    pub(crate) fn added(&mut self, mut bare: impl FnMut(Range<u64>) -> Result<u64>) -> Result<u64> {
        while let Some(number) = self.uncounted.first().copied() {
            if let Some(frame) = self.frames.get_mut(&number) {
                let offset = |piece: &Piece| number * FRAME + u64::from(piece.start);
                let counts =
                    frame.pieces.iter().map(|piece| bare(offset(piece)..offset(piece) + piece.data.len() as u64));
                let added = counts.sum::<Result<u64>>()?;
                frame.added = Some(added);
                self.added += added;
            }
            self.uncounted.remove(&number);
        }
        Ok(self.added)
    }

    /// Something else may lie below the frame from now on.
    pub(crate) fn uncount(&mut self, number: u64) {
        if let Some(added) = self.frames.get_mut(&number).and_then(|frame| frame.added.take()) {
            self.added -= added;
            self.uncounted.insert(number);
        }
    }

    pub(crate) fn pieces(&self) -> u64 {
        self.frames.values().map(|f| f.pieces.len() as u64).sum()
    }

    /// First offset behind all bytes; 0 when empty.
    pub(crate) fn end(&self) -> u64 {
        self.frames
            .last_key_value()
            .map_or(0, |(number, frame)| number * FRAME + frame.pieces.last().map_or(0, |p| u64::from(p.end())))
    }

    /// The pieces with their file offsets, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.frames.iter().flat_map(|(number, f)| {
            f.pieces.iter().map(move |p| (number * FRAME + u64::from(p.start), p.data.as_slice()))
        })
    }

    fn edit(&mut self, number: u64, change: impl FnOnce(&mut Frame)) {
        let frame = self.frames.entry(number).or_default();
        let bytes = frame.bytes();
        change(frame);
        self.bytes = self.bytes - bytes + frame.bytes();
        self.added -= frame.added.take().unwrap_or(0);
        if frame.pieces.is_empty() {
            self.held -= frame.held;
            self.frames.remove(&number);
            self.uncounted.remove(&number);
        } else {
            self.uncounted.insert(number);
        }
    }

    /// Puts bytes over what is there.
    pub(crate) fn put(&mut self, offset: u64, data: &[u8]) {
        for (number, start, range) in split(offset, data.len()) {
            self.edit(number, |frame| frame.put(start, &data[range]));
        }
    }

    /// Removes the bytes of `range`. Promised space of frames that vanish is the caller's to give back.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let numbers: Vec<u64> =
            self.frames.range(range.start / FRAME..=(range.end - 1) / FRAME).map(|(number, _)| *number).collect();
        for number in numbers {
            let base = number * FRAME;
            let from = range.start.saturating_sub(base).min(FRAME) as u32;
            let to = (range.end - base).min(FRAME) as u32;
            self.edit(number, |frame| frame.remove(from, to));
        }
    }

    /// The parts of `range` that have no bytes here, ascending.
    pub(crate) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        gaps(range.clone(), self.within(&range).map(|(offset, data)| offset..offset + data.len() as u64))
    }

    /// The present parts of `range`, clipped to it, ascending.
    pub(crate) fn within<'a>(&'a self, range: &Range<u64>) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let range = range.clone();
        let frames = range.start / FRAME..range.end.div_ceil(FRAME).max(range.start / FRAME);
        self.frames.range(frames).flat_map(move |(number, frame)| {
            let base = number * FRAME;
            let range = range.clone();
            frame.pieces.iter().filter_map(move |piece| {
                let offset = base + u64::from(piece.start);
                let from = range.start.max(offset);
                let to = range.end.min(offset + piece.data.len() as u64);
                (from < to).then(|| (from, &piece.data[(from - offset) as usize..(to - offset) as usize]))
            })
        })
    }

    /// Moves the first frames out until they hold at least `pieces` pieces, or `most` bytes.
    pub(crate) fn take_first(&mut self, pieces: u64, most: u64) -> Layer {
        let mut taken = Layer::default();
        let mut count = 0;
        while count < pieces && taken.bytes < most {
            let Some((number, frame)) = self.frames.pop_first() else { break };
            count += frame.pieces.len() as u64;
            let bytes = frame.bytes();
            self.bytes -= bytes;
            self.held -= frame.held;
            taken.bytes += bytes;
            taken.held += frame.held;
            // A sealed layer is not counted: it is nothing but what is on its way.
            self.added -= frame.added.unwrap_or(0);
            self.uncounted.remove(&number);
            taken.frames.insert(number, frame);
        }
        taken
    }
}

/// Cuts a range of `length` bytes into its parts per frame: frame number, offset in the frame, range of the data.
pub(crate) fn split(offset: u64, length: usize) -> impl Iterator<Item = (u64, u32, Range<usize>)> {
    let mut done = 0;
    std::iter::from_fn(move || {
        if done == length {
            return None;
        }
        let at = offset + done as u64;
        let start = at % FRAME;
        let part = ((FRAME - start) as usize).min(length - done);
        let range = done..done + part;
        done += part;
        Some((at / FRAME, start as u32, range))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::env::SeededEnvironment;

    fn check(layer: &Layer, model: &[Option<u8>]) {
        let mut shown = vec![None; model.len()];
        for (offset, data) in layer.iter() {
            for (i, byte) in data.iter().enumerate() {
                shown[offset as usize + i] = Some(*byte);
            }
        }
        assert!(shown == model);
        assert_eq!(layer.bytes(), model.iter().flatten().count() as u64);
        assert_eq!(layer.end(), model.iter().rposition(Option::is_some).map_or(0, |at| at as u64 + 1));
        assert_eq!(layer.held(), layer.frames.values().map(|frame| frame.held).sum::<u64>());
        for frame in layer.frames.values() {
            assert!(!frame.pieces.is_empty());
            assert!(frame.pieces.windows(2).all(|w| w[0].end() < w[1].start), "pieces touch");
        }
    }

    #[test]
    fn a_layer_holds_exactly_what_was_put_and_not_removed() {
        let random = SeededEnvironment::new(11);
        let size = 3 * FRAME;
        let mut layer = Layer::default();
        let mut model = vec![None; size as usize];
        for round in 0..600_u64 {
            let from = random.next_u64() % size;
            let length = (random.next_u64() % if round % 7 == 0 { FRAME } else { 3000 }).min(size - from);
            let range = from as usize..(from + length) as usize;
            if random.next_u64().is_multiple_of(4) {
                layer.remove(from..from + length);
                model[range].fill(None);
            } else {
                layer.put(from, &vec![round as u8; length as usize]);
                layer.hold(from / FRAME, round % 3);
                model[range].fill(Some(round as u8));
            }
            if round % 20 == 0 {
                check(&layer, &model);
                let (from, to) = (size / 5, size / 5 + FRAME);
                let absent: u64 = layer.gaps(from..to).iter().map(|gap| gap.end - gap.start).sum();
                assert_eq!(absent, model[from as usize..to as usize].iter().filter(|b| b.is_none()).count() as u64);
            }
        }
        layer.remove(FRAME + 5..u64::MAX);
        model[FRAME as usize + 5..].fill(None);
        check(&layer, &model);
    }

    #[test]
    fn what_lies_below_is_asked_again_only_of_frames_that_changed() {
        let mut layer = Layer::default();
        let asked = std::cell::Cell::new(0);
        let count = |layer: &mut Layer| {
            asked.set(0);
            let added = layer.added(|range| {
                asked.set(asked.get() + 1);
                Ok((range.end - range.start) / 2)
            });
            (added.unwrap(), asked.get())
        };
        for number in 0..100 {
            layer.put(number * FRAME + 5, &[1; 10]);
        }
        assert_eq!(count(&mut layer), (500, 100));
        assert_eq!(count(&mut layer), (500, 0));
        layer.put(7 * FRAME + 5, &[2; 20]);
        layer.uncount(9);
        layer.remove(3 * FRAME..4 * FRAME);
        assert_eq!(count(&mut layer), (500, 2));
        assert_eq!(layer.take_first(10, u64::MAX).frames().len(), 10);
        assert_eq!(count(&mut layer), (445, 0));
        assert_eq!(layer.take_first(u64::MAX, 15).frames().len(), 2);
    }
}
