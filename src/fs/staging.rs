//! File data accepted but not yet named by extents: bounded, visible to readers at once.
//!
//! A staged file is layers over its extents: the sealed ones, oldest first, each on its way into extents as part of a batch, then the
//! active one that takes writes.
//!
//! # Locks, in order
//! `turn` of a file (a whole write, truncate or write-out) > writers' lock (operations, commits) > `gate` > `content` of a file (short:
//! no I/O on data, never while waiting for one of the others) > the batch. The flusher runs under the writers' lock and so takes no
//! turn; readers take `content` only.
//!
//! While somebody waits for a commit, staged bytes have a lower bound (`writeout::AWAITED_BYTES`), so that the flusher holds the writers' lock
//! for some milliseconds, not for all that may be staged: who waits for the commit, and whoever stages more meanwhile, writes out the rest before.
//!
//! # Invariants
//! D1  A reader misses no accepted byte: under `content` it takes the state, drops the layers whose batch that state has, and copies the others.
//!     What it does not find in a layer was dropped for this state or an earlier one, so the state has it.
//! D2  A layer is newer than the extents and than the layers before it, or equal to the extents: data that goes straight into extents,
//!     and truncation, wait until no sealed layer is left, and take what they supersede out of the active layer from the moment on that
//!     their operation is in the state (`txn::Publication`).
//! D3  One commit is one moment in time: a write enters its layer with `gate` shared, the flusher seals all layers with it exclusive.
//! D4  Room for all staged bytes is reserved before they are accepted, held by the frame that needs it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use super::batch::Batch;
use super::layer::{Frame, Layer, QUAD, split};
use super::{FileSystem, inode};
use crate::error::Result;
use crate::format::{Ino, MAX_VALUE};
use crate::txn::{Operation, Publication, Reservation, State, View, Volume};

/// Spreads the map of staged files over this many locks; a few times the threads that serve a mount.
const SHARDS: u64 = 16;

/// All staged files of one file system.
pub(crate) struct Staging {
    shards: Vec<Mutex<HashMap<Ino, Arc<StagedFile>>>>,
    /// D3.
    pub(super) gate: RwLock<()>,
    /// Weight of all layers.
    total: Arc<AtomicU64>,
    /// Batches that may not be published yet, oldest first.
    pub(super) batches: Mutex<Vec<Arc<Batch>>>,
    /// Held by the thread that brings the total under its bound.
    pub(super) pressure: Mutex<()>,
    /// Callers that wait for a commit.
    awaited: AtomicU64,
    /// The most bytes that a flush sealed.
    #[cfg(test)]
    pub(super) most_flushed: AtomicU64,
}

/// While it lives somebody waits for a commit.
pub(super) struct Awaited<'a>(&'a Staging);

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.0.awaited.fetch_sub(1, Ordering::Relaxed);
    }
}

/// One file's staged data.
pub(crate) struct StagedFile {
    pub(super) ino: Ino,
    pub(super) turn: Mutex<()>,
    content: Mutex<Content>,
    total: Arc<AtomicU64>,
    /// Bytes of the active layer, for choosing what to write out.
    active_bytes: AtomicU64,
}

/// A layer on its way into extents.
struct Sealed {
    layer: Arc<Layer>,
    batch: Arc<Batch>,
}

#[derive(Default)]
pub(super) struct Content {
    pub(super) active: Layer,
    /// Covers exactly what the frames of `active` hold.
    pub(super) room: Option<Reservation>,
    sealed: Vec<Sealed>,
    /// What the active layer has no more as soon as an operation is in the state (D2).
    superseded: Option<(Publication, Range<u64>)>,
}

/// Staged parts of a range as a reader sees them: later ones lie over earlier ones.
pub(super) struct Overlay {
    /// First offset behind all staged bytes of the file.
    pub(super) end: u64,
    pub(super) parts: Vec<(u64, Vec<u8>)>,
}

impl Staging {
    pub(super) fn new() -> Staging {
        Staging {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            gate: RwLock::new(()),
            total: Arc::default(),
            batches: Mutex::default(),
            pressure: Mutex::new(()),
            awaited: AtomicU64::new(0),
            #[cfg(test)]
            most_flushed: AtomicU64::new(0),
        }
    }

    pub(super) fn await_commit(&self) -> Awaited<'_> {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        Awaited(self)
    }

    pub(super) fn is_awaited(&self) -> bool {
        self.awaited.load(Ordering::Relaxed) > 0
    }

    fn shard(&self, ino: Ino) -> &Mutex<HashMap<Ino, Arc<StagedFile>>> {
        &self.shards[(ino.0 % SHARDS) as usize]
    }

    pub(super) fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    /// Whether a version taken from now on has all that was accepted before: an entry leaves only when what it had is published.
    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().is_empty())
    }

    pub(super) fn find(&self, ino: Ino) -> Option<Arc<StagedFile>> {
        self.shard(ino).lock().get(&ino).cloned()
    }

    pub(super) fn entry(&self, ino: Ino) -> Arc<StagedFile> {
        let make = || {
            Arc::new(StagedFile {
                ino,
                turn: Mutex::new(()),
                content: Mutex::default(),
                total: self.total.clone(),
                active_bytes: AtomicU64::new(0),
            })
        };
        self.shard(ino).lock().entry(ino).or_insert_with(make).clone()
    }

    /// All entries in the order of their numbers, which is the order of creation.
    pub(super) fn files(&self) -> Vec<Arc<StagedFile>> {
        let mut files: Vec<_> =
            self.shards.iter().flat_map(|s| s.lock().values().cloned().collect::<Vec<_>>()).collect();
        files.sort_unstable_by_key(|file| file.ino);
        files
    }

    /// Drops what is published, and entries without content that nobody uses.
    pub(super) fn sweep(&self, volume: &Volume) {
        for file in self.files() {
            file.settle(volume);
        }
        for shard in &self.shards {
            // Under the shard's lock nobody else can get hold of an entry that only the map holds.
            shard.lock().retain(|_, file| Arc::strong_count(file) > 1 || !file.content.lock().is_empty());
        }
        self.batches.lock().retain(|batch| !batch.is_over());
    }

    /// Lets the entry go when it is empty and only the caller uses it.
    pub(super) fn leave(&self, file: Arc<StagedFile>) {
        let mut shard = self.shard(file.ino).lock();
        if Arc::strong_count(&file) == 2 && file.content.lock().is_empty() {
            shard.remove(&file.ino);
        }
    }
}

impl StagedFile {
    /// Runs `f` on the content and keeps the totals right.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Content) -> R) -> R {
        let mut content = self.content.lock();
        let before = content.weight();
        let result = f(&mut content);
        let after = content.weight();
        if after > before {
            self.total.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.total.fetch_sub(before - after, Ordering::Relaxed);
        }
        self.active_bytes.store(content.active.bytes(), Ordering::Relaxed);
        result
    }

    /// Drops what is published by now.
    pub(super) fn settle(&self, volume: &Volume) {
        self.with(|content| content.settle(&volume.state()));
    }

    pub(super) fn active_bytes(&self) -> u64 {
        self.active_bytes.load(Ordering::Relaxed)
    }
}

impl Content {
    fn weight(&self) -> u64 {
        self.active.weight() + self.sealed.iter().map(|sealed| sealed.layer.weight()).sum::<u64>()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.active.is_empty() && self.sealed.is_empty()
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
    pub(super) fn settle(&mut self, state: &State) {
        for sealed in self.sealed.extract_if(.., |sealed| sealed.batch.is_in(state)) {
            // Write-out may have filled holes between the pieces.
            sealed.layer.frames().keys().for_each(|number| self.active.uncount(*number));
        }
        if let Some((_, range)) = self.superseded.take_if(|(publication, _)| publication.is_in(state)) {
            self.active.remove(range);
            self.trim_room();
        }
    }

    /// Lets the active layer lose the range when `op` is published. The caller holds the turn and settles the file afterwards; when `op` fails, nothing
    /// is lost.
    pub(super) fn supersede(&mut self, op: &mut Operation<'_>, range: Range<u64>) {
        let publication = Publication::default();
        op.carry(&publication);
        self.superseded = Some((publication, range));
    }

    /// Gives back the room of frames that vanished.
    pub(super) fn trim_room(&mut self) {
        let held = self.active.held();
        if let Some(room) = &mut self.room {
            drop(room.split(room.quads().saturating_sub(held)));
        }
    }

    pub(super) fn add_room(&mut self, more: Reservation) {
        match &mut self.room {
            Some(room) => room.absorb(more),
            None => self.room = Some(more),
        }
    }

    /// Moves the first frames, up to about `pieces` pieces and `most` bytes, into a sealed layer with the room that they hold.
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
        let room = self.room.as_mut().map(|room| room.split(layer.held()));
        self.sealed.push(Sealed { layer: layer.clone(), batch: batch.clone() });
        Some((layer, room))
    }

    /// Puts a layer that could not be written back under the newer ones, with what is left of the batch's room.
    pub(super) fn thaw(&mut self, batch: &Arc<Batch>, room: &mut Option<Reservation>) {
        let Some(at) = self.sealed.iter().position(|sealed| Arc::ptr_eq(&sealed.batch, batch)) else { return };
        let layer = self.sealed.remove(at).layer;
        for (offset, data) in layer.iter() {
            let newer = self.sealed[at..].iter().map(|sealed| &*sealed.layer).chain([&self.active]);
            let range = offset..offset + data.len() as u64;
            let gaps: Vec<Range<u64>> =
                newer.fold(vec![range], |gaps, layer| gaps.into_iter().flat_map(|gap| layer.gaps(gap)).collect());
            for gap in gaps {
                self.active.put(gap.start, &data[(gap.start - offset) as usize..(gap.end - offset) as usize]);
            }
        }
        for (number, sealed) in layer.frames() {
            self.active.uncount(*number);
            if sealed.inline {
                self.active.doubt_inline(*number);
            }
            if self.active.frames().contains_key(number)
                && let Some(got) = room.as_mut().map(|room| room.split(sealed.held))
            {
                self.active.hold(*number, got.quads());
                self.add_room(got);
            }
        }
    }

    fn overlay(&self, range: &Range<u64>) -> Overlay {
        let parts = self.layers().flat_map(|layer| layer.within(range)).map(|(at, data)| (at, data.to_vec())).collect();
        Overlay { end: self.end(), parts }
    }

    /// Bytes of the layers that lie over no others and over nothing published; `bare` says how many bytes of a range nothing published has.
    pub(super) fn added(&mut self, bare: &dyn Fn(Range<u64>) -> Result<u64>) -> Result<u64> {
        let over = |older: &[Sealed], range: Range<u64>| {
            let gaps = older
                .iter()
                .fold(vec![range], |gaps, sealed| gaps.into_iter().flat_map(|gap| sealed.layer.gaps(gap)).collect());
            gaps.into_iter().map(bare).sum::<Result<u64>>()
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
    pub(super) fn discard(&mut self) {
        self.active = Layer::default();
        self.room = None;
        self.superseded = None;
    }

    fn clear(&mut self) {
        *self = Content::default();
    }
}

impl FileSystem {
    /// A state, and what `f` tells of the content that lies over it (D1).
    pub(super) fn look<R>(&self, ino: Ino, f: impl FnOnce(&mut Content, View<'_>) -> R) -> (Arc<State>, Option<R>) {
        // An entry leaves the map only when all it had is published, so without one the state taken now has everything.
        let Some(file) = self.staging.find(ino) else { return (self.volume.state(), None) };
        file.with(|content| {
            let state = self.volume.state();
            content.settle(&state);
            let found = (!content.is_empty()).then(|| f(content, self.volume.view(&state)));
            (state, found)
        })
    }

    pub(super) fn overlay(&self, ino: Ino, range: &Range<u64>) -> (Arc<State>, Overlay) {
        let (state, overlay) = self.look(ino, |content, _| content.overlay(range));
        (state, overlay.unwrap_or(Overlay { end: 0, parts: Vec::new() }))
    }

    /// Drops the staged data of an inode that no longer exists.
    pub(crate) fn forget_staged(&self, ino: Ino) {
        if let Some(file) = self.staging.find(ino) {
            file.with(Content::clear);
            self.staging.leave(file);
        }
    }

    /// Accepts `parts` into the active layer, all or nothing, on `room` and what it lacks. The caller holds the turn.
    pub(super) fn stage(&self, file: &StagedFile, parts: &[(u64, &[u8])], mut room: Option<Reservation>) -> Result<()> {
        let touched = self.frames_touched(file, parts)?;
        loop {
            // D4. Room is reserved without the content's lock: it may take a commit to find it.
            let short = file.with(|content| touched.shortfall(content));
            let got = room.as_ref().map_or(0, Reservation::quads);
            if short > got {
                let more = self.volume.reserve_data((short - got) * QUAD, 0)?;
                match &mut room {
                    Some(room) => room.absorb(more),
                    None => room = Some(more),
                }
            }
            let gate = self.staging.gate.read();
            let staged = file.with(|content| {
                if touched.shortfall(content) > room.as_ref().map_or(0, Reservation::quads) {
                    // The flusher took frames that had room in them.
                    return false;
                }
                touched.give(content, room.take());
                for (offset, data) in parts {
                    content.active.put(*offset, data);
                }
                content.trim_room();
                true
            });
            drop(gate);
            if staged {
                self.volume.mark_staged();
                return Ok(());
            }
        }
    }

    /// The frames that `parts` reach.
    fn frames_touched(&self, file: &StagedFile, parts: &[(u64, &[u8])]) -> Result<Touched> {
        let state = self.volume.state();
        let inode = inode::find(self.volume.view(&state), file.ino)?.unwrap_or_default();
        let mut frames: Vec<(u64, u64)> = Vec::new();
        for (offset, data) in parts {
            for (number, _, range) in split(*offset, data.len()) {
                match frames.last_mut() {
                    Some((last, bytes)) if *last == number => *bytes += range.len() as u64,
                    _ => frames.push((number, range.len() as u64)),
                }
            }
        }
        Ok(Touched { frames, inline: inode.bytes <= MAX_VALUE as u64 })
    }
}

/// Frames that a write reaches: number, bytes to come.
struct Touched {
    frames: Vec<(u64, u64)>,
    /// The file may have inline data.
    inline: bool,
}

impl Touched {
    /// Quads that the frames need beside what they hold.
    fn missing(&self, content: &Content, number: u64, more: u64) -> u64 {
        match content.active.frames().get(&number) {
            Some(frame) => frame.room_with(more).saturating_sub(frame.held),
            None => Frame { inline: self.inline, ..Frame::default() }.room_with(more),
        }
    }

    fn shortfall(&self, content: &Content) -> u64 {
        self.frames.iter().map(|(number, more)| self.missing(content, *number, *more)).sum()
    }

    /// Hands the room, which is no shorter than the shortfall, out to the frames, which come into being here.
    fn give(&self, content: &mut Content, room: Option<Reservation>) {
        for (number, more) in &self.frames {
            let missing = self.missing(content, *number, *more);
            content.active.begin(*number, self.inline);
            content.active.hold(*number, missing);
        }
        if let Some(room) = room {
            content.add_room(room);
        }
    }
}
