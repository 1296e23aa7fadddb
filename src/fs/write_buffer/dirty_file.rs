//! Dirty data of one file under its two locks (one for whole changes, one for the content): sealed
//! layers under the active one, and the space reserved for it.
//!
//! Also the layers that a batch seals of several files, and the size of a file, dirty and published
//! data together.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::WritebackBatch;
use super::layer::{Frame, Layer, PIECES_PER_LEAF, split};
use crate::error::Result;
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::extents::{self, join_ranges};
use crate::txn::{Operation, Publication, Reservation, State, View, Volume};

/// Maximum number of separate unlogged ranges: repeated writes without a commit must not grow the
/// list without bound.
const MOST_RANGES: usize = 1024;

struct SealedLayer {
    layer: Arc<Layer>,
    batch: Arc<WritebackBatch>,
}

#[derive(Default)]
pub(super) struct DirtyContent {
    active: Layer,
    /// Frame at which sealing continues. Frames are sealed in turn, so that each collects pieces
    /// for as long as the others. If the first ones were always sealed, random writes would
    /// rewrite them for each piece, while the last ones took the memory.
    next: u64,
    /// Covers exactly the reserved groups of the frames of `active`.
    reserved: Option<Reservation>,
    sealed: Vec<SealedLayer>,
    /// A range to be removed from the active layer as soon as an operation is in the state
    /// (STAGE-2).
    superseded: Option<(Publication, Range<u64>)>,
    /// Ranges of accepted bytes that are in no log entry, unordered. They may have been written
    /// back since.
    unlogged: Vec<Range<u64>>,
}

/// Dirty parts of a range as a reader sees them: later parts overwrite earlier ones.
#[derive(Default)]
pub(in crate::fs) struct DirtyOverlay {
    /// End of the last dirty byte of the file.
    pub(in crate::fs) end: u64,
    pub(in crate::fs) parts: Vec<(u64, Vec<u8>)>,
}

impl DirtyContent {
    pub(super) fn weight(&self) -> u64 {
        self.active.weight() + self.sealed.iter().map(|sealed| sealed.layer.weight()).sum::<u64>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty() && self.sealed.is_empty()
    }

    pub(super) fn has_sealed(&self) -> bool {
        !self.sealed.is_empty()
    }

    /// Returns the number of leaves that writeback changes.
    fn leaves(&self) -> u64 {
        self.layers().map(Layer::leaf_pieces).sum::<u64>() / PIECES_PER_LEAF
    }

    fn layers(&self) -> impl Iterator<Item = &Layer> {
        self.sealed.iter().map(|sealed| &*sealed.layer).chain([&self.active])
    }

    pub(super) fn end(&self) -> u64 {
        self.layers().map(Layer::end).max().unwrap_or(0)
    }

    /// Drops all that the state includes. The caller holds the writers' lock, or took the state
    /// with the content locked, or accepts that published data may be left.
    pub(super) fn drop_published(&mut self, state: &State) {
        for sealed in self.sealed.extract_if(.., |sealed| sealed.batch.publication.is_in(state)) {
            // Writeback may have filled holes between the pieces.
            sealed.layer.frames().keys().for_each(|number| self.active.invalidate_count(*number));
        }
        if let Some((_, range)) = self.superseded.take_if(|(publication, _)| publication.is_in(state)) {
            self.active.remove(range);
            self.trim_reservation();
        }
    }

    /// Releases the space of frames that were removed.
    fn trim_reservation(&mut self) {
        let held = self.active.reserved_groups();
        if let Some(reserved) = &mut self.reserved {
            drop(reserved.split(reserved.groups().saturating_sub(held)));
        }
    }

    /// Moves the next frames, up to about `pieces` pieces and `most` bytes, into a sealed layer,
    /// with their reserved space.
    pub(super) fn seal(
        &mut self,
        batch: &Arc<WritebackBatch>,
        pieces: u64,
        most: u64,
    ) -> Option<(Arc<Layer>, Option<Reservation>)> {
        let layer = Arc::new(self.active.take(&mut self.next, pieces, most));
        if layer.is_empty() {
            return None;
        }
        let reserved = self.reserved.as_mut().map(|reserved| reserved.split(layer.reserved_groups()));
        self.sealed.push(SealedLayer { layer: layer.clone(), batch: batch.clone() });
        Some((layer, reserved))
    }

    /// After a failed writeback, puts the layer back under the newer ones, with the rest of the
    /// batch's space.
    pub(super) fn unseal(&mut self, batch: &Arc<WritebackBatch>, reserved: &mut Option<Reservation>) {
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
            self.active.invalidate_count(*number);
            if sealed.inline {
                self.active.set_maybe_inline(*number);
            }
            if self.active.frames().contains_key(number)
                && let Some(got) = reserved.as_mut().map(|reserved| reserved.split(sealed.reserved_groups))
            {
                self.active.reserve_groups(*number, got.groups());
                got.join(&mut self.reserved);
            }
        }
    }

    pub(super) fn overlay(&self, range: &Range<u64>) -> DirtyOverlay {
        let parts =
            self.layers().flat_map(|layer| layer.pieces_in(range)).map(|(at, data)| (at, data.to_vec())).collect();
        DirtyOverlay { end: self.end(), parts }
    }

    /// Returns the dirty bytes that overwrite neither published data nor older layers; `hole_bytes`
    /// returns the bytes of a range that are holes in the published file.
    pub(super) fn new_bytes(&mut self, hole_bytes: &dyn Fn(Range<u64>) -> Result<u64>) -> Result<u64> {
        let over = |older: &[SealedLayer], range: Range<u64>| {
            outside(older.iter().map(|sealed| &*sealed.layer), range).into_iter().map(hole_bytes).sum::<Result<u64>>()
        };
        let mut added = 0;
        for (at, sealed) in self.sealed.iter().enumerate() {
            for (offset, data) in sealed.layer.iter() {
                added += over(&self.sealed[..at], offset..offset + data.len() as u64)?;
            }
        }
        Ok(added + self.active.new_bytes(|range| over(&self.sealed, range))?)
    }

    /// Returns the ranges of the dirty bytes, unordered.
    pub(super) fn ranges(&self) -> Vec<Range<u64>> {
        self.layers().flat_map(Layer::iter).map(|(offset, data)| offset..offset + data.len() as u64).collect()
    }

    /// Puts the parts into the active layer, and takes `reserved`, if that covers the shortfall of
    /// the touched frames (STAGE-4).
    pub(super) fn accept(
        &mut self,
        touched: &TouchedFrames,
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

    /// Puts bytes into the active layer. The caller has space for them, or they are never written
    /// back.
    pub(super) fn put(&mut self, offset: u64, data: &[u8]) {
        self.active.put(offset, data);
        let range = offset..offset + data.len() as u64;
        match self.unlogged.last_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.unlogged.push(range),
        }
        if self.unlogged.len() > MOST_RANGES {
            self.unlogged = join_ranges(std::mem::take(&mut self.unlogged));
            if self.unlogged.len() > MOST_RANGES / 2 {
                // Mostly more than a log entry takes.
                self.unlogged.truncate(1);
                self.unlogged[0] = 0..u64::MAX;
            }
        }
    }

    /// Returns the dirty bytes that are in no log entry, as sorted and disjoint pieces.
    pub(super) fn unlogged(&self) -> Layer {
        let mut merged = Layer::default();
        for range in join_ranges(self.unlogged.clone()) {
            for (offset, data) in self.layers().flat_map(|layer| layer.pieces_in(&range)) {
                merged.put(offset, data);
            }
        }
        merged
    }

    /// Records that all dirty bytes are in a log entry or a commit.
    pub(super) fn mark_logged(&mut self) {
        self.unlogged.clear();
    }

    pub(super) fn is_logged(&self) -> bool {
        self.unlogged.is_empty()
    }
}

fn outside<'l>(layers: impl Iterator<Item = &'l Layer>, range: Range<u64>) -> Vec<Range<u64>> {
    layers.fold(vec![range], |gaps, layer| gaps.into_iter().flat_map(|gap| layer.gaps(gap)).collect())
}

/// Frames that a write touches: number, and bytes to be added.
pub(super) struct TouchedFrames {
    frames: Vec<(u64, u64)>,
    /// The file may have inline data.
    inline: bool,
}

impl TouchedFrames {
    pub(super) fn new(parts: &[(u64, &[u8])], inline: bool) -> TouchedFrames {
        let mut frames: Vec<(u64, u64)> = Vec::new();
        for (offset, data) in parts {
            for (number, _, range) in split(*offset, data.len()) {
                match frames.last_mut() {
                    Some((last, bytes)) if *last == number => *bytes += range.len() as u64,
                    _ => frames.push((number, range.len() as u64)),
                }
            }
        }
        TouchedFrames { frames, inline }
    }

    /// Returns the groups that a frame needs in addition to its reserved ones.
    fn missing(&self, content: &DirtyContent, number: u64, more: u64) -> u64 {
        match content.active.frames().get(&number) {
            Some(frame) => frame.groups_with(more).saturating_sub(frame.reserved_groups),
            None => Frame { inline: self.inline, ..Frame::default() }.groups_with(more),
        }
    }

    pub(super) fn shortfall(&self, content: &DirtyContent) -> u64 {
        self.frames.iter().map(|(number, more)| self.missing(content, *number, *more)).sum()
    }

    /// Distributes the space, which covers at least the shortfall, to the frames, and creates
    /// missing ones.
    fn give(&self, content: &mut DirtyContent, reserved: Option<Reservation>) {
        for (number, more) in &self.frames {
            let missing = self.missing(content, *number, *more);
            content.active.begin(*number, self.inline);
            content.active.reserve_groups(*number, missing);
        }
        if let Some(reserved) = reserved {
            reserved.join(&mut content.reserved);
        }
    }
}

/// Sums over all files of the file system.
#[derive(Clone)]
pub(super) struct DirtyTotals {
    pub(super) weight: Arc<AtomicU64>,
    /// Leaves that writeback changes; the allocator leaves space for them (STAGE-5).
    pub(super) leaves: Arc<AtomicU64>,
}

pub(in crate::fs) struct DirtyFile {
    ino: Ino,
    lock: Mutex<()>,
    content: Mutex<DirtyContent>,
    totals: DirtyTotals,
    /// Bytes of the active layer, for choosing files to write back.
    active_bytes: AtomicU64,
}

/// Exclusive right to make whole changes (write, truncate) of a file and to seal its layers; only
/// commits do so without it. Layers sealed before may be written and published meanwhile.
///
/// The holder may wait for space and for commits, but neither for a second file nor for the lock of
/// `DirtyThrottle`.
pub(in crate::fs) struct LockedFile<'f> {
    file: &'f Arc<DirtyFile>,
    _lock: MutexGuard<'f, ()>,
}

impl Deref for LockedFile<'_> {
    type Target = Arc<DirtyFile>;

    fn deref(&self) -> &Arc<DirtyFile> {
        self.file
    }
}

impl DirtyFile {
    pub(super) fn new(ino: Ino, totals: DirtyTotals) -> DirtyFile {
        DirtyFile { ino, lock: Mutex::default(), content: Mutex::default(), totals, active_bytes: AtomicU64::new(0) }
    }

    pub(in crate::fs) fn ino(&self) -> Ino {
        self.ino
    }

    pub(in crate::fs) fn lock(self: &Arc<Self>) -> LockedFile<'_> {
        LockedFile { file: self, _lock: self.lock.lock() }
    }

    pub(in crate::fs) fn try_lock(self: &Arc<Self>) -> Option<LockedFile<'_>> {
        self.lock.try_lock().map(|lock| LockedFile { file: self, _lock: lock })
    }

    pub(in crate::fs) fn try_lock_for(self: &Arc<Self>, time: Duration) -> Option<LockedFile<'_>> {
        self.lock.try_lock_for(time).map(|lock| LockedFile { file: self, _lock: lock })
    }

    /// Runs `f` on the content and updates the totals.
    pub(super) fn with_content<R>(&self, f: impl FnOnce(&mut DirtyContent) -> R) -> R {
        let mut content = self.content.lock();
        let before = (content.weight(), content.leaves());
        let result = f(&mut content);
        // A difference below 0 wraps, and so does the sum.
        self.totals.weight.fetch_add(content.weight().wrapping_sub(before.0), Ordering::Relaxed);
        self.totals.leaves.fetch_add(content.leaves().wrapping_sub(before.1), Ordering::Relaxed);
        self.active_bytes.store(content.active.bytes(), Ordering::Relaxed);
        result
    }

    pub(super) fn is_empty(&self) -> bool {
        self.content.lock().is_empty()
    }

    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.with_content(|content| content.drop_published(&volume.state()));
    }

    pub(in crate::fs) fn active_bytes(&self) -> u64 {
        self.active_bytes.load(Ordering::Relaxed)
    }
}

impl LockedFile<'_> {
    pub(in crate::fs) fn end(&self) -> u64 {
        self.with_content(|content| content.end())
    }

    /// Returns the batches of the sealed layers that are not published yet.
    pub(in crate::fs) fn sealed_batches(&self, volume: &Volume) -> Vec<Arc<WritebackBatch>> {
        self.with_content(|content| {
            content.drop_published(&volume.state());
            content.sealed.iter().map(|sealed| sealed.batch.clone()).collect()
        })
    }

    pub(in crate::fs) fn has_active(&self, range: &Range<u64>) -> bool {
        self.with_content(|content| content.active.pieces_in(range).next().is_some())
    }

    /// Returns whether the file has no sealed layer, so that its extents may be changed in `op`
    /// (STAGE-2). The answer is definite, because `op` holds the writers' lock.
    pub(in crate::fs) fn is_unsealed(&self, volume: &Volume, _op: &Operation<'_>) -> bool {
        self.with_content(|content| {
            content.drop_published(&volume.state());
            !content.has_sealed()
        })
    }

    /// Removes the range from the active layer once `op` is published. The caller calls
    /// `drop_published` afterwards; when `op` fails, the data stays.
    pub(in crate::fs) fn supersede(&self, op: &mut Operation<'_>, range: Range<u64>) {
        self.with_content(|content| {
            let publication = Publication::default();
            op.carry(&publication);
            op.drop_staged(self.ino, range.clone());
            content.superseded = Some((publication, range));
        });
    }

    /// Drops all data that no batch has sealed.
    pub(in crate::fs) fn discard_active(&self) {
        self.with_content(|content| {
            content.active = Layer::default();
            content.reserved = None;
            content.superseded = None;
            content.unlogged.clear();
        });
    }
}

/// Layers sealed for one batch.
#[derive(Default)]
pub(in crate::fs) struct SealedLayers {
    /// In the order of the files' numbers.
    pub(in crate::fs) layers: Vec<(Ino, Arc<Layer>)>,
    files: Vec<Arc<DirtyFile>>,
    /// Space for writing the layers.
    pub(in crate::fs) reserved: Option<Reservation>,
}

impl SealedLayers {
    pub(super) fn add(
        &mut self,
        file: &Arc<DirtyFile>,
        seal: impl FnOnce(&mut DirtyContent) -> Option<(Arc<Layer>, Option<Reservation>)>,
    ) {
        let Some((layer, reserved)) = file.with_content(seal) else { return };
        self.layers.push((file.ino(), layer));
        self.files.push(file.clone());
        if let Some(more) = reserved {
            more.join(&mut self.reserved);
        }
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, layer)| layer.bytes()).sum()
    }

    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.files.iter().for_each(|file| file.drop_published(volume));
    }

    /// Puts the layers back under newer data, because the batch could not be written.
    pub(in crate::fs) fn unseal(&mut self, batch: &Arc<WritebackBatch>) {
        for file in &self.files {
            file.with_content(|content| content.unseal(batch, &mut self.reserved));
        }
    }
}

/// Size of a file, and its bytes that are not in holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) struct ContentSize {
    pub(in crate::fs) size: u64,
    pub(in crate::fs) bytes: u64,
}

/// The published inode, and the size of the file including dirty data.
pub(in crate::fs) type InodeAndSize = (InodeValue, ContentSize);

impl ContentSize {
    pub(in crate::fs) fn published(inode: &InodeValue) -> ContentSize {
        ContentSize { size: inode.size, bytes: inode.bytes }
    }
}

pub(super) struct PublishedRanges<'a> {
    view: View<'a>,
    ino: Ino,
    bytes: u64,
    /// End of the visible extents.
    visible: u64,
    inline: Option<u64>,
}

impl PublishedRanges<'_> {
    pub(super) fn new<'a>(view: View<'a>, ino: Ino, inode: &InodeValue) -> Result<PublishedRanges<'a>> {
        let inline = extents::load_inline(view, ino, inode)?.map(|content| content.len() as u64);
        Ok(PublishedRanges { view, ino, bytes: inode.bytes, visible: inode.trim.min(inode.size), inline })
    }

    /// Returns the same ranges, of which every extent is counted.
    #[cfg(test)]
    pub(super) fn counting_extents(self) -> Self {
        PublishedRanges { bytes: if self.bytes == 0 { 0 } else { u64::MAX }, ..self }
    }

    /// Returns the bytes of the range that are holes in the published file.
    pub(super) fn hole_bytes(&self, range: &Range<u64>) -> Result<u64> {
        let visible = range.start..range.end.min(self.visible).max(range.start);
        let covered = match self.inline {
            Some(length) => length.min(range.end).saturating_sub(range.start),
            None if self.bytes == 0 => 0,
            // A file without holes, as most are: the kernel asks with each fsync. (Extents beyond
            // the size, which only a foreign archive has, make st_blocks wrong.)
            None if self.bytes == self.visible => visible.end - visible.start,
            None => extents::measure(self.view, self.ino, visible, u64::MAX)?.1,
        };
        Ok(range.end - range.start - covered)
    }
}
