//! File data accepted but not yet named by extents: bounded, visible to readers at once.
//!
//! A staged file is layers over its extents: the sealed ones, oldest first, each on its way into extents as part of a batch, then the
//! active one that takes writes.
//!
//! # Locks, in order
//! That of a file ([`LockedFile`]: a whole write or truncate, sealing for write-out) > writers' lock (operations, commits) > `gate` > `batches` > the step of a
//! batch; `gate` > a shard > `content` of a file (short: no I/O on data, never while waiting for one of the others). What needs the first takes it
//! as a parameter; `gate`, `batches` and `content` are seen in this module only. The flusher runs under the writers' lock and so locks no file;
//! readers take a shard and `content` only.
//!
//! # Invariants
//! STAGE-1  A reader misses no accepted byte: under `content` it takes the state, drops the layers whose batch that state has, and copies the others.
//!     What it does not find in a layer was dropped for this state or an earlier one, so the state has it.
//! STAGE-2  A layer is newer than the extents and than the layers before it, or equal to the extents: data that goes straight into extents,
//!     and truncation, wait until no sealed layer is left, and take what they supersede out of the active layer from the moment on that
//!     their operation is in the state (`txn::Publication`).
//! STAGE-3  One commit is one moment in time: a write enters its layer with `gate` shared, the flusher seals all layers with it exclusive.
//! STAGE-4  Room for all staged bytes is reserved before they are accepted, held by the frame that needs it.

mod allocated_ranges;
mod batch;
mod dirty_content;
mod dirty_file;
mod layer;
mod log_pieces;
mod sealed_layers;

pub(super) use allocated_ranges::Presence;
pub(super) use batch::{Batch, Plan};
pub(super) use dirty_file::{LockedFile, StagedFile};
pub(super) use layer::{Frame, GROUP, INLINE_GROUPS, Layer, MAX_PIECES, Piece, WHOLE_GROUPS};
pub(crate) use log_pieces::LoggedPieces;
pub(super) use sealed_layers::Sealed;

use std::collections::HashMap;
use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, RwLock};

use crate::error::Result;
use crate::format::Ino;
use crate::fs::inode;
use crate::fs::ranges::join;
use crate::txn::{Operation, Reservation, State, View, Volume};
use allocated_ranges::{Below, Known};
use dirty_content::{Content, Overlay, Touched};

/// Spreads the map of staged files over this many locks; a few times the threads that serve a mount.
const SHARDS: u64 = 16;

/// All staged files of one file system.
pub(super) struct Staging {
    volume: Arc<Volume>,
    shards: Vec<Mutex<HashMap<Ino, Arc<StagedFile>>>>,
    /// STAGE-3.
    gate: RwLock<()>,
    /// Weight of all layers.
    total: Arc<AtomicU64>,
    /// Batches that may not be published yet, oldest first.
    batches: Mutex<Vec<Arc<Batch>>>,
    /// The most bytes that a flush sealed.
    #[cfg(test)]
    most_flushed: AtomicU64,
}

/// A staged file in use. It leaves the map when its last user ends with nothing staged of it.
pub(super) struct Entry<'s> {
    staging: &'s Staging,
    file: Arc<StagedFile>,
}

impl Deref for Entry<'_> {
    type Target = Arc<StagedFile>;

    fn deref(&self) -> &Arc<StagedFile> {
        &self.file
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        let mut shard = self.staging.shard(self.file.ino()).lock();
        // This one and the map's.
        if Arc::strong_count(&self.file) == 2 && self.file.is_empty() {
            shard.remove(&self.file.ino());
        }
    }
}

impl Staging {
    pub(super) fn new(volume: Arc<Volume>) -> Staging {
        Staging {
            volume,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            gate: RwLock::new(()),
            total: Arc::default(),
            batches: Mutex::default(),
            #[cfg(test)]
            most_flushed: AtomicU64::new(0),
        }
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

    pub(super) fn find(&self, ino: Ino) -> Option<Entry<'_>> {
        let file = self.shard(ino).lock().get(&ino).cloned()?;
        Some(Entry { staging: self, file })
    }

    pub(super) fn entry(&self, ino: Ino) -> Entry<'_> {
        let make = || Arc::new(StagedFile::new(ino, self.total.clone()));
        let file = self.shard(ino).lock().entry(ino).or_insert_with(make).clone();
        Entry { staging: self, file }
    }

    /// All files in the order of their numbers, which is the order of creation.
    pub(super) fn files(&self) -> Vec<Arc<StagedFile>> {
        let mut files: Vec<_> =
            self.shards.iter().flat_map(|s| s.lock().values().cloned().collect::<Vec<_>>()).collect();
        files.sort_unstable_by_key(|file| file.ino());
        files
    }

    /// Drops what is published, and entries without content that nobody uses.
    pub(super) fn sweep(&self) {
        for file in self.files() {
            file.drop_published(&self.volume);
        }
        for shard in &self.shards {
            // Under the shard's lock nobody else can get hold of an entry that only the map holds.
            shard.lock().retain(|_, file| Arc::strong_count(file) > 1 || !file.is_empty());
        }
        self.forget_batches();
    }

    /// A state, and what `f` tells of the content that lies over it (STAGE-1).
    fn look<R>(&self, ino: Ino, f: impl FnOnce(&mut Content, View<'_>) -> R) -> (Arc<State>, Option<R>) {
        // An entry leaves the map only when all it had is published, so without one the state taken now has everything.
        let file = self.shard(ino).lock().get(&ino).cloned();
        let Some(file) = file else { return (self.volume.state(), None) };
        file.with(|content| {
            let state = self.volume.state();
            content.drop_published(&state);
            let found = (!content.is_empty()).then(|| f(content, self.volume.view(&state)));
            (state, found)
        })
    }

    pub(super) fn overlay(&self, ino: Ino, range: &Range<u64>) -> (Arc<State>, Overlay) {
        let (state, overlay) = self.look(ino, |content, _| content.overlay(range));
        (state, overlay.unwrap_or_default())
    }

    /// Drops the staged data of an inode that no longer exists.
    pub(super) fn forget(&self, ino: Ino) {
        if let Some(file) = self.find(ino) {
            file.with(|content| *content = Content::default());
        }
    }

    /// Accepts `parts` into the active layer, all or nothing, on `reserved` and what it lacks. `inline` says that the file may have inline data.
    pub(super) fn stage(
        &self,
        file: &LockedFile<'_>,
        inline: bool,
        parts: &[(u64, &[u8])],
        mut reserved: Option<Reservation>,
    ) -> Result<()> {
        let touched = Touched::new(parts, inline);
        loop {
            // STAGE-4. Room is reserved without the content's lock: it may take a commit to find it.
            let short = file.with(|content| touched.shortfall(content));
            let got = reserved.as_ref().map_or(0, Reservation::groups);
            if short > got {
                self.volume.reserve_data((short - got) * GROUP, 0)?.join(&mut reserved);
            }
            let gate = self.gate.read();
            // When it is refused the flusher took frames that had space in them.
            let staged = file.with(|content| content.accept(&touched, parts, &mut reserved));
            if staged {
                // Before an entry of the log can have it: a commit that finds no mark contains all that is staged.
                self.volume.mark_staged();
                return Ok(());
            }
            drop(gate);
        }
    }

    /// Announces the batch and seals all that is staged for it (STAGE-3); answers that, and the batches before it that are not over. The caller holds the
    /// writers' lock, which `op` proves, so nothing is published meanwhile.
    pub(super) fn seal_all(&self, batch: &Arc<Batch>, _op: &Operation<'_>) -> (Sealed, Vec<Arc<Batch>>) {
        let mut sealed = Sealed::default();
        let state = self.volume.state();
        let _gate = self.gate.write();
        let mut batches = self.batches.lock();
        // Failed ones are unsealed by now, so their data is sealed here.
        let older = batches.iter().filter(|older| !older.is_over()).cloned().collect();
        batches.push(batch.clone());
        drop(batches);
        for file in self.files() {
            sealed.add(&file, |content| {
                content.drop_published(&state);
                content.mark_logged();
                content.seal(batch, u64::MAX, u64::MAX)
            });
        }
        #[cfg(test)]
        self.most_flushed.fetch_max(sealed.bytes(), Ordering::Relaxed);
        (sealed, older)
    }

    /// Announces the batch and seals the first frames of `files`, ascending, for it: up to about so many pieces and bytes.
    pub(super) fn seal_some(
        &self,
        batch: &Arc<Batch>,
        files: &[LockedFile<'_>],
        mut pieces: u64,
        mut bytes: u64,
    ) -> Sealed {
        let mut sealed = Sealed::default();
        let _gate = self.gate.read();
        self.announce(batch);
        for file in files {
            sealed.add(file, |content| {
                content.drop_published(&self.volume.state());
                // A sealed layer is one of the flusher, who came between and took all there was.
                let (layer, reserved) = if content.has_sealed() { None } else { content.seal(batch, pieces, bytes) }?;
                pieces = pieces.saturating_sub(layer.pieces());
                bytes = bytes.saturating_sub(layer.bytes());
                Some((layer, reserved))
            });
            if pieces == 0 || bytes == 0 {
                break;
            }
        }
        sealed
    }

    /// Has the next flush land the batch first, or wait for it.
    pub(super) fn announce(&self, batch: &Arc<Batch>) {
        self.batches.lock().push(batch.clone());
    }

    /// Lets the announced batches go that nothing is left to do with.
    pub(super) fn forget_batches(&self) {
        self.batches.lock().retain(|batch| !batch.is_over());
    }

    /// A state, and the ranges of the staged data that lies over it, sorted and disjoint.
    pub(super) fn staged_ranges(&self, ino: Ino) -> (Arc<State>, Vec<Range<u64>>) {
        let (state, ranges) = self.look(ino, |content, _| content.ranges());
        (state, join(ranges.unwrap_or_default()))
    }

    /// A state, and what the inode is with the staged data that lies over it, if there is any.
    ///
    /// The kernel may ask with each write, of a file of which thousands of pieces are staged: only those are looked at of which it is not
    /// known yet what lies below them.
    pub(super) fn staged_presence(&self, ino: Ino) -> Result<(Arc<State>, Option<Known>)> {
        let (state, staged) = self.look(ino, |content, view| {
            let inode = inode::load(view, ino)?;
            let below = Below::new(view, ino, &inode)?;
            let added = content.added(&|range| below.bare(&range))?;
            let presence = Presence { size: inode.size.max(content.end()), bytes: inode.bytes.saturating_add(added) };
            Ok((inode, presence))
        });
        Ok((state, staged.transpose()?))
    }

    pub(super) fn presence(&self, ino: Ino) -> Result<Known> {
        let (state, staged) = self.staged_presence(ino)?;
        if let Some(staged) = staged {
            return Ok(staged);
        }
        let inode = inode::load(self.volume.view(&state), ino)?;
        Ok((inode, Presence::published(&inode)))
    }

    /// As [`Self::presence`], with nothing remembered.
    #[cfg(test)]
    pub(super) fn presence_anew(&self, ino: Ino) -> Result<Presence> {
        let (state, staged) = self.staged_ranges(ino);
        let view = self.volume.view(&state);
        let inode = inode::load(view, ino)?;
        let below = Below::new(view, ino, &inode)?;
        let added = staged.iter().map(|range| below.bare(range)).sum::<Result<u64>>()?;
        let size = inode.size.max(staged.last().map_or(0, |range| range.end));
        Ok(Presence { size, bytes: inode.bytes + added })
    }

    /// The most bytes that a flush sealed.
    #[cfg(test)]
    pub(super) fn most_flushed(&self) -> u64 {
        self.most_flushed.load(Ordering::Relaxed)
    }
}
