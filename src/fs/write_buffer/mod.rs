//! Write buffer: file data that is accepted but not yet referenced by extents; bounded, and visible
//! to readers at once.
//!
//! A dirty file has layers over its extents: the sealed ones, oldest first, each being written as
//! part of a batch, then the active one that takes writes.
//!
//! # Locks, in order
//! That of a file ([`LockedFile`]: a whole write or truncate, sealing for writeback) > writers'
//! lock (operations, commits) > `gate` > `batches` > the state of a batch; `gate` > a shard >
//! `content` of a file (short: no I/O on data, never while waiting for one of the others). A
//! function that needs the first takes it as a parameter; `gate`, `batches` and `content` are
//! private to this module. The flusher runs under the writers' lock and so locks no file; readers
//! take a shard and `content` only.
//!
//! # Invariants
//! STAGE-1  A reader misses no accepted byte: under `content` it takes the state, drops the layers
//!     of batches that the state includes, and copies the others. A byte in no layer was dropped
//!     for this state or an earlier one, so the state has it.
//! STAGE-2  A layer is newer than the extents and than the layers before it, or equal to the
//!     extents. Truncation, and data that goes straight into extents, wait until no sealed layer is
//!     left, and remove the range that they supersede from the active layer once their operation is
//!     in the state (`txn::Publication`).
//! STAGE-3  A commit is one point in time: a write enters its layer with `gate` shared, the flusher
//!     seals all layers with it exclusive.
//! STAGE-4  Space for all dirty bytes is reserved before they are accepted, and belongs to the
//!     frame that needs it.
//! STAGE-5  A change that needs space leaves free the space of all leaves that a commit of the
//!     dirty data changes. It is counted and not reserved: the parents of the leaves, one request
//!     of each thread, and changes that free space use the reserve beyond it.
//! BATCH-1  A batch moves from `Writing` to `Written`. It is done when an operation that references
//!     it is published, which `txn::Publication` records. An operation that is not published
//!     changes nothing of that: the next caller that applies the batch under the writers' lock
//!     references it again. So a failed operation loses nothing.
//! BATCH-2  `Writing` waits for neither the writers' lock nor a file's lock nor space. So a thread
//!     that holds any of these may wait for `Written`.
//! BATCH-3  A batch with layers over older sealed ones is applied after the batches of these, or in
//!     one operation with them, also for files that the caller is not interested in. Only a flush
//!     makes such batches. Of one file, the order of registration is that of the layers.

mod dirty_file;
mod layer;

pub(super) use dirty_file::{ContentSize, DirtyFile, LockedFile, SealedLayers};
pub(super) use layer::{DirtyPiece, Frame, GROUP, INLINE_GROUPS, Layer, WHOLE_GROUPS};

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::{Deref, Range};
use std::sync::Arc;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

use super::extents::{self, join_ranges};
use super::inode;
use super::types::mode;
use crate::error::{Error, Result};
use crate::format::log::{LogEntry, LogPiece, piece_length};
use crate::format::values::InodeValue;
use crate::format::{Ino, kind};
use crate::txn::{
    Operation, Publication, Reservation, State, UnreferencedPages, View, Volume, WrittenPiece, groups_for,
};
use dirty_file::{DirtyContent, DirtyOverlay, DirtyTotals, InodeAndSize, PublishedRanges, TouchedFrames};

/// Number of locks over the map of dirty files; a few times the threads that serve a mount.
const SHARDS: u64 = 16;

pub(super) struct WriteBuffer {
    volume: Arc<Volume>,
    shards: Vec<Mutex<HashMap<Ino, Arc<DirtyFile>>>>,
    /// Makes sealing for a commit exclusive (STAGE-3).
    gate: RwLock<()>,
    totals: DirtyTotals,
    /// Batches that may not be published yet, oldest first.
    batches: Mutex<Vec<Arc<WritebackBatch>>>,
    /// Maximum bytes that a flush sealed.
    #[cfg(test)]
    most_flushed: AtomicU64,
}

/// Reference to a dirty file. The file leaves the map when its last reference is dropped and it has
/// no dirty data.
pub(super) struct DirtyFileRef<'s> {
    write_buffer: &'s WriteBuffer,
    file: Arc<DirtyFile>,
}

impl Deref for DirtyFileRef<'_> {
    type Target = Arc<DirtyFile>;

    fn deref(&self) -> &Arc<DirtyFile> {
        &self.file
    }
}

impl Drop for DirtyFileRef<'_> {
    fn drop(&mut self) {
        let mut shard = self.write_buffer.shard(self.file.ino()).lock();
        // This reference and the map's.
        if Arc::strong_count(&self.file) == 2 && self.file.is_empty() {
            shard.remove(&self.file.ino());
        }
    }
}

impl WriteBuffer {
    pub(super) fn new(volume: Arc<Volume>) -> WriteBuffer {
        let totals = DirtyTotals { weight: Arc::default(), leaves: volume.allocator().dirty_leaves() };
        WriteBuffer {
            volume,
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            gate: RwLock::new(()),
            totals,
            batches: Mutex::default(),
            #[cfg(test)]
            most_flushed: AtomicU64::new(0),
        }
    }

    fn shard(&self, ino: Ino) -> &Mutex<HashMap<Ino, Arc<DirtyFile>>> {
        &self.shards[(ino.0 % SHARDS) as usize]
    }

    /// Returns the weight of all layers.
    pub(super) fn total_bytes(&self) -> u64 {
        self.totals.weight.load(Ordering::Relaxed)
    }

    /// Returns whether a version taken from now on has all data accepted before: an entry is
    /// removed only when its data is published.
    pub(super) fn is_empty(&self) -> bool {
        self.shards.iter().all(|shard| shard.lock().is_empty())
    }

    pub(super) fn find(&self, ino: Ino) -> Option<DirtyFileRef<'_>> {
        let file = self.shard(ino).lock().get(&ino).cloned()?;
        Some(DirtyFileRef { write_buffer: self, file })
    }

    pub(super) fn file(&self, ino: Ino) -> DirtyFileRef<'_> {
        let make = || Arc::new(DirtyFile::new(ino, self.totals.clone()));
        let file = self.shard(ino).lock().entry(ino).or_insert_with(make).clone();
        DirtyFileRef { write_buffer: self, file }
    }

    /// Returns all files in the order of their numbers, which is the order of creation.
    pub(super) fn files(&self) -> Vec<Arc<DirtyFile>> {
        let mut files: Vec<_> =
            self.shards.iter().flat_map(|s| s.lock().values().cloned().collect::<Vec<_>>()).collect();
        files.sort_unstable_by_key(|file| file.ino());
        files
    }

    /// Drops published data, and unused entries without content.
    pub(super) fn drop_published(&self) {
        for file in self.files() {
            file.drop_published(&self.volume);
        }
        for shard in &self.shards {
            // Under the shard's lock no other thread can get an entry that only the map references.
            shard.lock().retain(|_, file| Arc::strong_count(file) > 1 || !file.is_empty());
        }
        self.remove_finished_batches();
    }

    /// Returns a state, and the result of `f` on the dirty content over it (STAGE-1).
    fn with_dirty_content<R>(
        &self,
        ino: Ino,
        f: impl FnOnce(&mut DirtyContent, View<'_>) -> R,
    ) -> (Arc<State>, Option<R>) {
        // An entry leaves the map only when all its data is published, so without one the state
        // taken now has everything.
        let file = self.shard(ino).lock().get(&ino).cloned();
        let Some(file) = file else { return (self.volume.state(), None) };
        file.with_content(|content| {
            let state = self.volume.state();
            content.drop_published(&state);
            let found = (!content.is_empty()).then(|| f(content, self.volume.view(&state)));
            (state, found)
        })
    }

    pub(super) fn read_overlay(&self, ino: Ino, range: &Range<u64>) -> (Arc<State>, DirtyOverlay) {
        let (state, overlay) = self.with_dirty_content(ino, |content, _| content.overlay(range));
        (state, overlay.unwrap_or_default())
    }

    /// Discards the dirty data of an inode that no longer exists.
    pub(super) fn discard(&self, ino: Ino) {
        if let Some(file) = self.find(ino) {
            file.with_content(|content| *content = DirtyContent::default());
        }
    }

    /// Accepts all of `parts` into the active layer or nothing, with `reserved` and further space
    /// as needed. `inline`: the file may have inline data.
    pub(super) fn put(
        &self,
        file: &LockedFile<'_>,
        inline: bool,
        parts: &[(u64, &[u8])],
        mut reserved: Option<Reservation>,
    ) -> Result<()> {
        let touched = TouchedFrames::new(parts, inline);
        loop {
            // STAGE-4. Space is reserved without the content's lock: finding it may take a commit.
            let short = file.with_content(|content| touched.shortfall(content));
            let got = reserved.as_ref().map_or(0, Reservation::groups);
            if short > got {
                self.volume.reserve_data((short - got) * GROUP, 0)?.join(&mut reserved);
            }
            let gate = self.gate.read();
            // A refusal means that the flusher took frames with reserved space.
            let accepted = file.with_content(|content| content.accept(&touched, parts, &mut reserved));
            if accepted {
                // Before a log entry can include it: a commit that finds no mark contains all dirty
                // data.
                self.volume.writer().mark_staged();
                return Ok(());
            }
            drop(gate);
        }
    }

    /// Registers the batch and seals all dirty data for it (STAGE-3). Returns that, and the older
    /// batches that are not finished. The caller holds the writers' lock, as `op` proves, so
    /// nothing is published meanwhile.
    pub(super) fn seal_all(
        &self,
        batch: &Arc<WritebackBatch>,
        _op: &Operation<'_>,
    ) -> (SealedLayers, Vec<Arc<WritebackBatch>>) {
        let mut sealed = SealedLayers::default();
        let state = self.volume.state();
        let _gate = self.gate.write();
        let mut batches = self.batches.lock();
        // Failed batches are unsealed by now, so their data is sealed here.
        let older = batches.iter().filter(|older| !older.is_finished()).cloned().collect();
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

    /// Registers the batch and seals the next frames of `files`, ascending, for it: up to about
    /// `pieces` pieces and `bytes` bytes.
    pub(super) fn seal_some(
        &self,
        batch: &Arc<WritebackBatch>,
        files: &[LockedFile<'_>],
        mut pieces: u64,
        mut bytes: u64,
    ) -> SealedLayers {
        let mut sealed = SealedLayers::default();
        let _gate = self.gate.read();
        self.register_batch(batch);
        for file in files {
            sealed.add(file, |content| {
                content.drop_published(&self.volume.state());
                // A sealed layer belongs to a concurrent flush, which sealed all there was.
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

    /// Registers the batch with the next flush, which then applies it first, or waits for it.
    pub(super) fn register_batch(&self, batch: &Arc<WritebackBatch>) {
        self.batches.lock().push(batch.clone());
    }

    /// Returns the unfinished batches up to the last one of `batches`, in the order in which they
    /// have to be applied.
    pub(super) fn batches_until(&self, batches: &[Arc<WritebackBatch>]) -> Vec<Arc<WritebackBatch>> {
        if batches.is_empty() {
            return Vec::new();
        }
        let registered = self.batches.lock();
        let is_wanted = |batch: &Arc<WritebackBatch>| batches.iter().any(|wanted| Arc::ptr_eq(wanted, batch));
        let end = registered.iter().rposition(is_wanted).map_or(0, |last| last + 1);
        registered[..end].iter().filter(|batch| !batch.is_finished()).cloned().collect()
    }

    pub(super) fn remove_finished_batches(&self) {
        self.batches.lock().retain(|batch| !batch.is_finished());
    }

    /// Returns a state, and the ranges of the dirty data over it, sorted and disjoint.
    pub(super) fn dirty_ranges(&self, ino: Ino) -> (Arc<State>, Vec<Range<u64>>) {
        let (state, ranges) = self.with_dirty_content(ino, |content, _| content.ranges());
        (state, join_ranges(ranges.unwrap_or_default()))
    }

    /// Returns a state, and the inode with its size including dirty data, if there is any.
    ///
    /// The kernel may call this with each write, for a file with thousands of dirty pieces: only
    /// frames that changed since the last count are compared with the published ranges.
    pub(super) fn load_dirty_inode(&self, ino: Ino) -> Result<(Arc<State>, Option<InodeAndSize>)> {
        let (state, dirty) = self.with_dirty_content(ino, |content, view| {
            let inode = inode::load(view, ino)?;
            let below = PublishedRanges::new(view, ino, &inode)?;
            let added = content.new_bytes(&|range| below.hole_bytes(&range))?;
            let content_size =
                ContentSize { size: inode.size.max(content.end()), bytes: inode.bytes.saturating_add(added) };
            Ok((inode, content_size))
        });
        Ok((state, dirty.transpose()?))
    }

    pub(super) fn load_inode(&self, ino: Ino) -> Result<InodeAndSize> {
        let (state, dirty) = self.load_dirty_inode(ino)?;
        if let Some(dirty) = dirty {
            return Ok(dirty);
        }
        let inode = inode::load(self.volume.view(&state), ino)?;
        Ok((inode, ContentSize::published(&inode)))
    }

    /// Counts like [`Self::load_inode`], without cached counts.
    #[cfg(test)]
    pub(super) fn recount_size(&self, ino: Ino) -> Result<ContentSize> {
        let (state, dirty) = self.dirty_ranges(ino);
        let view = self.volume.view(&state);
        let inode = inode::load(view, ino)?;
        let below = PublishedRanges::new(view, ino, &inode)?.counting_extents();
        let added = dirty.iter().map(|range| below.hole_bytes(range)).sum::<Result<u64>>()?;
        let size = inode.size.max(dirty.last().map_or(0, |range| range.end));
        Ok(ContentSize { size, bytes: inode.bytes + added })
    }

    #[cfg(test)]
    pub(super) fn max_flushed(&self) -> u64 {
        self.most_flushed.load(Ordering::Relaxed)
    }
}

/// Valid pieces of several log entries, by inode.
#[derive(Default)]
pub(crate) struct LogPieces {
    layers: BTreeMap<Ino, Layer>,
    /// Files without inline data, by their newest inode in the entries.
    large: HashSet<Ino>,
}

impl LogPieces {
    /// Collects the pieces of entries in their order. Of each entry it first drops ranges, then
    /// inodes that were removed, then puts its pieces over older ones.
    pub(crate) fn of(entries: &[LogEntry]) -> LogPieces {
        let mut all: BTreeMap<Ino, Layer> = BTreeMap::new();
        let mut large = HashSet::new();
        for entry in entries {
            for dropped in &entry.dropped {
                if let Some(layer) = all.get_mut(&dropped.ino) {
                    layer.remove(dropped.start..dropped.end);
                }
            }
            for (key, value) in entry.records.iter().filter(|(key, _)| key.kind == kind::INODE) {
                let ino = Ino(key.object);
                if value.is_none() {
                    all.remove(&ino);
                }
                let inode = value.as_deref().and_then(|value| InodeValue::decode(value).ok());
                if inode.is_some_and(|inode| !extents::may_be_inline(&inode)) {
                    large.insert(ino);
                } else {
                    large.remove(&ino);
                }
            }
            for piece in &entry.pieces {
                all.entry(piece.ino).or_default().put(piece.offset, &piece.data);
            }
        }
        all.retain(|_, layer| !layer.is_empty());
        LogPieces { layers: all, large }
    }

    /// Returns the bytes of one file with their offsets, ascending.
    pub(crate) fn of_file(&self, ino: Ino) -> impl Iterator<Item = (u64, &[u8])> {
        self.layers.get(&ino).into_iter().flat_map(Layer::iter)
    }

    pub(in crate::fs) fn len(&self) -> u64 {
        self.layers.values().map(Layer::pieces).sum()
    }

    /// Returns the maximum groups for writing all of it back, in any state of the files.
    pub(in crate::fs) fn groups(&self) -> u64 {
        let own = |frame: &Frame| groups_for(frame.bytes(), frame.pieces.len() as u64).min(WHOLE_GROUPS);
        let of_file = |(ino, layer): (&Ino, &Layer)| {
            let inline = if self.is_maybe_inline(*ino) { INLINE_GROUPS } else { 0 };
            layer.frames().values().map(|frame| own(frame) + inline).sum::<u64>()
        };
        self.layers.iter().map(of_file).sum()
    }

    /// Returns whether the file may have inline data, as far as the entries show.
    fn is_maybe_inline(&self, ino: Ino) -> bool {
        !self.large.contains(&ino)
    }
}

impl WriteBuffer {
    /// Returns the dirty pieces that are in no log entry, if an entry with `capacity` bytes can
    /// hold them, and marks them as logged. The caller holds the writers' lock, so nothing is
    /// published meanwhile, and the pieces are consistent with the published state (STAGE-3).
    pub(in crate::fs) fn take_log_pieces(&self, capacity: usize) -> Option<Vec<LogPiece>> {
        let state = self.volume.state();
        let _gate = self.gate.write();
        let mut files = self.files();
        files.retain(|file| file.with_content(|content| !content.is_logged()));
        let (mut pieces, mut length) = (Vec::new(), 0);
        for file in &files {
            let unlogged = file.with_content(|content| {
                content.drop_published(&state);
                content.unlogged()
            });
            for (offset, data) in unlogged.iter() {
                length += piece_length(data.len());
                if length > capacity {
                    return None;
                }
                pieces.push(LogPiece { ino: file.ino(), offset, data: data.to_vec() });
            }
        }
        files.iter().for_each(|file| file.with_content(|content| content.mark_logged()));
        Some(pieces)
    }

    pub(in crate::fs) fn is_logged(&self) -> bool {
        self.files().iter().all(|file| file.with_content(|content| content.is_logged()))
    }

    /// Replays pieces of log entries into the buffer; `view` has the records of the entries. A
    /// writer passes the space for all of them in `reserved`. Errors: `NoSpace` when `reserved` is
    /// too small. For a writer, `Damaged` for a damaged inode.
    pub(in crate::fs) fn restore_from_log(
        &self,
        pieces: &LogPieces,
        view: View<'_>,
        mut reserved: Option<Reservation>,
    ) -> Result<()> {
        let writes = reserved.is_some();
        for (ino, layer) in &pieces.layers {
            let has_bytes = match inode::find(view, *ino) {
                // An orphan in reclaim has hidden extents, and no bytes either.
                Ok(Some(inode)) => inode.mode & mode::TYPE == mode::REGULAR && (inode.links > 0 || inode.trim > 0),
                // A removed file has no bytes.
                Ok(None) => false,
                // LOG-6: a reader of this file gets the error.
                Err(Error::Damaged(_)) if !writes => true,
                Err(error) => return Err(error),
            };
            if !has_bytes {
                continue;
            }
            let entry = self.file(*ino);
            let accepted = entry.with_content(|content| {
                layer.iter().all(|(offset, data)| {
                    if !writes {
                        content.put(offset, data);
                        return true;
                    }
                    // One at a time, as they were written: each piece of a frame has its own space.
                    let parts = [(offset, data)];
                    let touched = TouchedFrames::new(&parts, pieces.is_maybe_inline(*ino));
                    let mut own = reserved.as_mut().map(|all| all.split(touched.shortfall(content)));
                    content.accept(&touched, &parts, &mut own)
                })
            });
            if !accepted {
                return Err(Error::NoSpace("no room to replay the log".into()));
            }
        }
        if writes {
            self.volume.writer().mark_staged();
        }
        Ok(())
    }
}

/// Pages written for one file's layer, and the change of the file that references them.
#[derive(Debug)]
pub(crate) struct FilePlan {
    pub(crate) ino: Ino,
    /// End of the layer: the minimum size of the file afterwards.
    pub(crate) end: u64,
    /// Content of the whole file if it is stored inline; then there are no pieces.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) pieces: Vec<WrittenPiece>,
    /// Number of extents that the pieces will cut or replace.
    pub(crate) cuts: u64,
    /// A piece covers a former hole: the file gets more blocks than its dirty data counted.
    pub(crate) fills_holes: bool,
    /// The inode at the time of planning.
    inode: InodeValue,
}

impl FilePlan {
    /// Creates the plan of a layer that ends at `end`, with nothing written yet.
    pub(crate) fn new(ino: Ino, end: u64, inode: InodeValue) -> FilePlan {
        FilePlan { ino, end, inline: None, pieces: Vec::new(), cuts: 0, fills_holes: false, inode }
    }

    /// Upper bound of the records that applying it changes: inode and inline data in addition to
    /// the extents.
    pub(crate) fn records(&self) -> u64 {
        2 + self.pieces.len() as u64 * extents::RECORDS_PER_PIECE + self.cuts * extents::RECORDS_PER_CUT
    }
}

#[derive(Default)]
enum BatchState {
    #[default]
    Writing,
    Written(Vec<FilePlan>, UnreferencedPages),
    /// No operation referenced the batch, and its layers were unsealed. Threads that wait for the
    /// batch get the error.
    Failed(Error),
}

/// Dirty layers of several files, written once and referenced by exactly one published operation
/// (BATCH-1).
#[derive(Default)]
pub(crate) struct WritebackBatch {
    state: Mutex<BatchState>,
    changed: Condvar,
    /// A thread waited for its pages.
    is_awaited: AtomicBool,
    pub(crate) publication: Publication,
}

impl WritebackBatch {
    pub(crate) fn set_written(&self, plans: Vec<FilePlan>, pages: UnreferencedPages) {
        *self.state.lock() = BatchState::Written(plans, pages);
        self.changed.notify_all();
    }

    pub(crate) fn set_failed(&self, error: &Error) {
        *self.state.lock() = BatchState::Failed(error.clone());
        self.changed.notify_all();
    }

    /// Waits until its pages are written or failed. A caller that is about to apply the batch waits
    /// here, without locks that others need and outside of an operation.
    pub(crate) fn await_pages(&self) {
        drop(self.wait_until_written());
    }

    pub(crate) fn is_awaited(&self) -> bool {
        self.is_awaited.load(Ordering::Relaxed)
    }

    fn wait_until_written(&self) -> MutexGuard<'_, BatchState> {
        let mut step = self.state.lock();
        while matches!(&*step, BatchState::Writing) {
            self.is_awaited.store(true, Ordering::Relaxed);
            self.changed.wait(&mut step);
        }
        step
    }

    /// References the batch's pages in `op` unless a published operation already did; waits while
    /// it is being written (BATCH-2).
    pub(crate) fn apply(&self, op: &mut Operation<'_>) -> Result<()> {
        self.apply_with(op, |op, plan| inode::find(op.view(), plan.ino))
    }

    /// Like [`Self::apply`], in the operation in which the batch was planned, and which has not
    /// changed its files since.
    pub(crate) fn apply_as_planned(&self, op: &mut Operation<'_>) -> Result<()> {
        self.apply_with(op, |_, plan| Ok(Some(plan.inode)))
    }

    fn apply_with(
        &self,
        op: &mut Operation<'_>,
        inode_of: impl Fn(&Operation<'_>, &FilePlan) -> Result<Option<InodeValue>>,
    ) -> Result<()> {
        if self.publication.is_set() {
            return Ok(());
        }
        if let BatchState::Written(plans, pages) = &mut *self.wait_until_written() {
            let inodes = plans.iter().map(|plan| inode_of(op, plan)).collect::<Result<Vec<_>>>()?;
            // Pages of files that were removed since are never referenced: inode numbers are not
            // reused.
            let there: HashSet<Ino> =
                plans.iter().zip(&inodes).filter(|(_, inode)| inode.is_some()).map(|(plan, _)| plan.ino).collect();
            pages.name(op, |piece| there.contains(&piece.ino))?;
            for (plan, inode) in plans.iter().zip(inodes) {
                let Some(mut inode) = inode else { continue };
                if let Some(value) = &plan.inline {
                    extents::remove_range(op, plan.ino, &mut inode, 0..u64::MAX)?;
                    extents::set_inline(op, plan.ino, &mut inode, value)?;
                } else {
                    // The planner merged the inline data into the layer.
                    extents::set_inline(op, plan.ino, &mut inode, &[])?;
                    extents::replace(op, &mut inode, &plan.pieces)?;
                }
                inode.size = inode.size.max(plan.end);
                inode::store(op, plan.ino, &inode)?;
            }
            // A log entry contains only the dirty data that is not in the trees.
            op.needs_commit();
            op.carry(&self.publication);
        }
        Ok(())
    }

    pub(crate) fn error(&self) -> Option<Error> {
        match &*self.state.lock() {
            BatchState::Failed(error) => Some(error.clone()),
            _ => None,
        }
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.publication.is_set() || matches!(&*self.state.lock(), BatchState::Failed(_))
    }
}
