//! Sparse buffer of file bytes: sorted pieces within aligned frames, the unit of writeback.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::error::Result;
use crate::format::BLOCK;
use crate::fs::extents::{FRAME, gaps};
use crate::txn::groups_for;

/// Bytes of a group of four blocks, the unit of reservations.
pub(crate) const GROUP: u64 = 4 * BLOCK;

/// Maximum groups of a frame, since it can always be written as one page.
pub(crate) const WHOLE_GROUPS: u64 = groups_for(FRAME, 1);

/// Bytes of dirty data counted for each reserved group at least: every 4 KiB of scattered writes
/// may take a page of its own.
const BYTES_PER_GROUP: u64 = GROUP / 4;

/// Space for the page that inline data becomes.
pub(crate) const INLINE_GROUPS: u64 = 1;

/// Frames of a window. Their extents are neighbours in the tree: writeback changes two leaves, and
/// adds the leaves that its pieces fill.
const WINDOW: u64 = 8;

/// Pieces that fill no more than one leaf.
pub(crate) const PIECES_PER_LEAF: u64 = 64;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DirtyPiece {
    /// Offset in the frame.
    pub(crate) start: u32,
    pub(crate) data: Vec<u8>,
}

impl DirtyPiece {
    fn end(&self) -> u32 {
        // Pieces lie within a frame of 128 KiB.
        self.start + self.data.len() as u32
    }

    /// Returns the piece's range in the file; its frame begins at `base`.
    pub(crate) fn range(&self, base: u64) -> Range<u64> {
        base + u64::from(self.start)..base + u64::from(self.end())
    }
}

/// Pieces of one frame: sorted, disjoint, not adjacent, never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) pieces: Vec<DirtyPiece>,
    /// Groups reserved for the writeback of this frame; the layer keeps their sum.
    pub(crate) reserved_groups: u64,
    /// The file may have inline data, which writeback may have to turn into a page.
    pub(crate) inline: bool,
    /// Bytes of the pieces over holes of the published file; `None` until counted.
    pub(crate) new_bytes: Option<u64>,
}

impl Frame {
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.data.len() as u64).sum()
    }

    /// Returns the maximum groups that the frame needs after another `more` bytes are put. Merging
    /// it with its extents may take more, which writeback requests: it is known then, and nothing
    /// is lost if it is not available.
    pub(crate) fn groups_with(&self, more: u64) -> u64 {
        let (bytes, pieces) = (self.bytes() + more, self.pieces.len() as u64 + 1);
        groups_for(bytes, pieces).min(WHOLE_GROUPS) + if self.inline { INLINE_GROUPS } else { 0 }
    }

    /// Returns the reserved groups without those for inline data.
    pub(crate) fn own_groups(&self) -> u64 {
        if self.inline { self.reserved_groups.saturating_sub(INLINE_GROUPS) } else { self.reserved_groups }
    }

    pub(crate) fn put(&mut self, start: u32, new: &[u8]) {
        let end = start + new.len() as u32;
        let low = self.pieces.partition_point(|p| p.end() < start);
        let high = self.pieces.partition_point(|p| p.start <= end);
        if low >= high {
            self.pieces.insert(low, DirtyPiece { start, data: new.to_vec() });
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
                let remaining = (end - first.start) as usize;
                data.extend_from_slice(first.data.get(remaining..).unwrap_or_default());
            }
            data.extend_from_slice(&tail);
            *first = DirtyPiece { start, data };
        }
        self.pieces.drain(low + 1..high);
    }

    fn remove(&mut self, from: u32, to: u32) {
        let mut remaining = Vec::with_capacity(self.pieces.len() + 1);
        for mut piece in self.pieces.drain(..) {
            let (start, end) = (piece.start, piece.end());
            if end <= from || start >= to {
                remaining.push(piece);
                continue;
            }
            let tail = (end > to).then(|| DirtyPiece { start: to, data: piece.data[(to - start) as usize..].to_vec() });
            if start < from {
                piece.data.truncate((from - start) as usize);
                remaining.push(piece);
            }
            remaining.extend(tail);
        }
        self.pieces = remaining;
    }
}

/// The frames of one file by number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Layer {
    frames: BTreeMap<u64, Frame>,
    /// Sums over the frames, cached because every request reads them.
    bytes: u64,
    reserved_groups: u64,
    pieces: u64,
    /// Windows with a frame.
    windows: u64,
    new_bytes: u64,
    /// Frames with unknown `new_bytes`.
    uncounted_frames: BTreeSet<u64>,
}

impl Layer {
    pub(crate) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes counted against the limit of dirty data. Space on the host is reserved in
    /// whole groups: reservations for small pieces may exceed the limit, but only by a known
    /// factor.
    pub(crate) fn weight(&self) -> u64 {
        self.bytes.max(self.reserved_groups * BYTES_PER_GROUP)
    }

    pub(crate) fn reserved_groups(&self) -> u64 {
        self.reserved_groups
    }

    /// Returns the leaves that writeback changes at most, in pieces. The only frame of a small file
    /// needs none: with inline data, or in a page with others, it leaves a reserved group unused.
    pub(crate) fn leaf_pieces(&self) -> u64 {
        let is_small = self.frames.len() == 1 && self.frames.get(&0).is_some_and(|frame| frame.inline);
        if is_small { 0 } else { 2 * PIECES_PER_LEAF * self.windows + self.pieces }
    }

    pub(crate) fn frames(&self) -> &BTreeMap<u64, Frame> {
        &self.frames
    }

    pub(crate) fn reserve_groups(&mut self, number: u64, groups: u64) {
        if let Some(frame) = self.frames.get_mut(&number) {
            frame.reserved_groups += groups;
            self.reserved_groups += groups;
        }
    }

    /// Creates a frame unless it exists. The caller puts bytes into it before another thread sees
    /// the layer.
    pub(crate) fn begin(&mut self, number: u64, inline: bool) {
        if !self.frames.contains_key(&number) {
            self.insert(number, Frame { inline, ..Frame::default() });
        }
    }

    fn insert(&mut self, number: u64, frame: Frame) {
        self.windows += u64::from(!self.has_window(number));
        self.frames.insert(number, frame);
    }

    fn remove_frame(&mut self, number: u64) -> Option<Frame> {
        let frame = self.frames.remove(&number)?;
        self.windows -= u64::from(!self.has_window(number));
        Some(frame)
    }

    /// Returns whether a frame of the same window is there.
    fn has_window(&self, number: u64) -> bool {
        let first = number / WINDOW * WINDOW;
        self.frames.range(first..first + WINDOW).next().is_some()
    }

    pub(crate) fn set_maybe_inline(&mut self, number: u64) {
        if let Some(frame) = self.frames.get_mut(&number) {
            frame.inline = true;
        }
    }

    /// Returns the bytes over holes of the published file. `hole_bytes` counts them in a range; it
    /// is called for frames that changed since they were counted.
    pub(crate) fn new_bytes(&mut self, mut hole_bytes: impl FnMut(Range<u64>) -> Result<u64>) -> Result<u64> {
        while let Some(number) = self.uncounted_frames.first().copied() {
            if let Some(frame) = self.frames.get_mut(&number) {
                let counts = frame.pieces.iter().map(|piece| hole_bytes(piece.range(number * FRAME)));
                let added = counts.sum::<Result<u64>>()?;
                frame.new_bytes = Some(added);
                self.new_bytes += added;
            }
            self.uncounted_frames.remove(&number);
        }
        Ok(self.new_bytes)
    }

    /// Invalidates the count of a frame, because the published data under it may have changed.
    pub(crate) fn invalidate_count(&mut self, number: u64) {
        if let Some(added) = self.frames.get_mut(&number).and_then(|frame| frame.new_bytes.take()) {
            self.new_bytes -= added;
            self.uncounted_frames.insert(number);
        }
    }

    pub(crate) fn pieces(&self) -> u64 {
        self.pieces
    }

    pub(crate) fn end(&self) -> u64 {
        self.frames
            .last_key_value()
            .map_or(0, |(number, frame)| number * FRAME + frame.pieces.last().map_or(0, |p| u64::from(p.end())))
    }

    /// Returns the pieces with their file offsets, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.frames.iter().flat_map(|(number, f)| {
            f.pieces.iter().map(move |p| (number * FRAME + u64::from(p.start), p.data.as_slice()))
        })
    }

    fn edit(&mut self, number: u64, change: impl FnOnce(&mut Frame)) {
        self.begin(number, false);
        let Some(frame) = self.frames.get_mut(&number) else { return };
        let (bytes, pieces) = (frame.bytes(), frame.pieces.len() as u64);
        change(frame);
        self.bytes = self.bytes - bytes + frame.bytes();
        self.pieces = self.pieces - pieces + frame.pieces.len() as u64;
        self.new_bytes -= frame.new_bytes.take().unwrap_or(0);
        if frame.pieces.is_empty() {
            self.reserved_groups -= frame.reserved_groups;
            self.remove_frame(number);
            self.uncounted_frames.remove(&number);
        } else {
            self.uncounted_frames.insert(number);
        }
    }

    pub(crate) fn put(&mut self, offset: u64, data: &[u8]) {
        for (number, start, range) in split(offset, data.len()) {
            self.edit(number, |frame| frame.put(start, &data[range]));
        }
    }

    /// Removes the bytes of `range`. The caller releases the reserved space of frames that become
    /// empty.
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

    /// Returns the parts of `range` without bytes, ascending.
    pub(crate) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        gaps(range.clone(), self.pieces_in(&range).map(|(offset, data)| offset..offset + data.len() as u64))
    }

    /// Returns the parts of `range` with bytes, clipped to it, ascending.
    pub(crate) fn pieces_in<'a>(&'a self, range: &Range<u64>) -> impl Iterator<Item = (u64, &'a [u8])> + use<'a> {
        let range = range.clone();
        let frames = range.start / FRAME..range.end.div_ceil(FRAME).max(range.start / FRAME);
        self.frames.range(frames).flat_map(move |(number, frame)| {
            let range = range.clone();
            frame.pieces.iter().filter_map(move |piece| {
                let at = piece.range(number * FRAME);
                let (from, to) = (range.start.max(at.start), range.end.min(at.end));
                (from < to).then(|| (from, &piece.data[(from - at.start) as usize..(to - at.start) as usize]))
            })
        })
    }

    /// Moves frames out until they have at least `pieces` pieces, or `most` bytes: from frame
    /// `next` on, and after the last one from the first. Sets `next` to the frame after them.
    pub(crate) fn take(&mut self, next: &mut u64, pieces: u64, most: u64) -> Layer {
        let mut taken = Layer::default();
        let mut count = 0;
        while count < pieces && taken.bytes < most {
            let after = self.frames.range(*next..).next();
            let Some(number) = after.or_else(|| self.frames.first_key_value()).map(|(number, _)| *number) else {
                break;
            };
            let Some(frame) = self.remove_frame(number) else { break };
            *next = number + 1; // numbers are offsets in units of a frame
            let (bytes, held) = (frame.bytes(), frame.pieces.len() as u64);
            count += held;
            self.bytes -= bytes;
            self.pieces -= held;
            self.reserved_groups -= frame.reserved_groups;
            taken.bytes += bytes;
            taken.pieces += held;
            taken.reserved_groups += frame.reserved_groups;
            // Sealed layers keep no count, since their data will be published.
            self.new_bytes -= frame.new_bytes.unwrap_or(0);
            self.uncounted_frames.remove(&number);
            taken.insert(number, frame);
        }
        taken
    }
}

/// Splits a range of `length` bytes into its parts per frame: frame number, offset in the frame,
/// range of the data.
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
        assert_eq!(layer.reserved_groups(), layer.frames.values().map(|frame| frame.reserved_groups).sum::<u64>());
        let windows: BTreeSet<u64> = layer.frames.keys().map(|number| number / WINDOW).collect();
        let pieces = layer.frames.values().map(|frame| frame.pieces.len() as u64).sum::<u64>();
        assert_eq!((layer.windows, layer.pieces), (windows.len() as u64, pieces));
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
                layer.reserve_groups(from / FRAME, round % 3);
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
            let added = layer.new_bytes(|range| {
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
        layer.invalidate_count(9);
        layer.remove(3 * FRAME..4 * FRAME);
        assert_eq!(count(&mut layer), (500, 2));
        let mut next = 0;
        assert_eq!(layer.take(&mut next, 10, u64::MAX).frames().len(), 10);
        assert_eq!(count(&mut layer), (445, 0));
        assert_eq!(layer.take(&mut next, u64::MAX, 15).frames().len(), 2);
    }

    #[test]
    fn frames_are_taken_in_turn() {
        let mut layer = Layer::default();
        let mut next = 0;
        let mut take = |layer: &mut Layer, pieces| {
            layer.take(&mut next, pieces, u64::MAX).frames().keys().copied().collect::<Vec<_>>()
        };
        (0..5).for_each(|number| layer.put(number * FRAME, &[1]));
        assert_eq!(take(&mut layer, 2), [0, 1]);
        assert_eq!((layer.windows, layer.pieces), (1, 3));
        (0..2).for_each(|number| layer.put(number * FRAME, &[2]));
        assert_eq!(take(&mut layer, 2), [2, 3]);
        assert_eq!(take(&mut layer, 2), [0, 4]);
        assert_eq!(take(&mut layer, u64::MAX), [1]);
        assert!(layer.is_empty() && take(&mut layer, 1).is_empty());
        assert_eq!(layer.leaf_pieces(), 0);
    }
}
