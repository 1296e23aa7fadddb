//! Turns dirty data into pages and extents: all of it at each commit, some of it when the
//! dirty-data limit is near; and keeps writers under that limit.
//!
//! Two threads may want to write back the same file: the thread that sealed a layer of it
//! (`write_back`) and the flusher, which holds the writers' lock. They never do it twice. A layer
//! is sealed for exactly one batch, under its content's lock; the batch is registered before. The
//! flusher first applies every registered batch, waiting while pages are being written (the writing
//! threads wait for no lock that it holds, BATCH-2), then seals the active layers for a batch of
//! its own. The second of the two finds the batch applied and changes nothing.

mod plan;

pub(super) use plan::{MIN_FRAMES_PER_THREAD, run_parallel};

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::types::FsOptions;
use super::write_buffer::{DirtyFile, FilePlan, LockedFile, SealedLayers, WriteBuffer, WritebackBatch};
use crate::error::Result;
use crate::format::{Generation, Ino, MAX_DATA};
use crate::txn::{Operation, Publication, Reservation, UnreferencedPages, View, Volume};
use plan::{BatchKind, PagePlanner, worker_threads};

/// Maximum pieces of one writeback by a writer: bounds its operation to some thousands of records.
pub(super) const BATCH_PIECES: u64 = 512;

/// Maximum bytes of one writeback by a writer: a flush, which holds the writers' lock, may have to
/// wait for it.
const BATCH_BYTES: u64 = 8 << 20;

/// Maximum bytes sealed ahead of a commit: twice a full log. They count as dirty until then.
const AHEAD_BYTES: u64 = 2 << 20;

/// Estimated records of applying an older batch; only decides whether to make space first.
const LEFT_OVER: u64 = 64;

pub(super) struct Writeback {
    volume: Arc<Volume>,
    write_buffer: Arc<WriteBuffer>,
    options: FsOptions,
    pub(super) threads: usize,
    /// Generation of the record before the last commit that a batch was sealed ahead of; `u64::MAX`
    /// for none.
    sealed_ahead: AtomicU64,
    pub(super) block_count_changes: BlockCountChanges,
}

impl Writeback {
    pub(super) fn new(volume: Arc<Volume>, write_buffer: Arc<WriteBuffer>, options: FsOptions) -> Writeback {
        Writeback {
            volume,
            write_buffer,
            options,
            threads: worker_threads(),
            sealed_ahead: AtomicU64::new(u64::MAX),
            block_count_changes: BlockCountChanges::default(),
        }
    }

    /// Flushes all dirty data accepted so far, at the start of each commit and under the writers'
    /// lock (STAGE-3).
    pub(super) fn flush(&self, op: &mut Operation<'_>) -> Result<()> {
        let batch = Arc::new(WritebackBatch::default());
        let (mut sealed, older) = self.write_buffer.seal_all(&batch, op);
        let was_ahead = self.has_sealed_ahead(self.volume.durable().generation);
        let kind = if was_ahead { BatchKind::Remainder } else { BatchKind::Whole };
        let written = apply_all(&older, op).and_then(|()| self.write_pages(op.view(), &batch, &mut sealed, kind));
        let result = match written {
            Ok((plans, pages)) => {
                self.block_count_changes.record(&batch.publication, &plans);
                batch.set_written(plans, pages);
                batch.apply_as_planned(op)
            }
            Err(error) => {
                sealed.unseal(&batch);
                batch.set_failed(&error);
                Err(error)
            }
        };
        self.write_buffer.remove_finished_batches();
        result
    }

    /// Writes the pages of the sealed layers. After an error none of them is kept, and their space
    /// is reserved for the layers again.
    fn write_pages(
        &self,
        view: View<'_>,
        batch: &WritebackBatch,
        sealed: &mut SealedLayers,
        kind: BatchKind,
    ) -> Result<(Vec<FilePlan>, UnreferencedPages)> {
        let SealedLayers { layers, reserved, .. } = sealed;
        let held = reserved.as_ref().map_or(0, Reservation::groups);
        let written = UnreferencedPages::new(&self.volume);
        let (volume, options) = (&self.volume, self.options);
        let threads = if kind == BatchKind::Ahead { 1 } else { self.threads };
        let planner = PagePlanner { volume, options, view, reserved, threads, kind, batch, written };
        let planned = planner.plan(layers);
        if planned.is_err() {
            let lost = held.saturating_sub(reserved.as_ref().map_or(0, Reservation::groups));
            // If other threads took it, writeback reserves again.
            if let Some(reserved) = reserved
                && let Some(back) = self.volume.reserve_spare(lost)
            {
                reserved.absorb(back);
            }
        }
        planned
    }

    /// Writes back some of the dirty data of `files`, ascending. Returns whether there was any.
    pub(super) fn write_back(&self, files: &[LockedFile<'_>]) -> Result<bool> {
        let (batch, sealed) = self.seal(files)?;
        self.write_sealed(&batch, sealed)
    }

    /// Like [`Self::write_back`], but unlocks the files as soon as a layer is sealed, so that
    /// writers continue. A thread that wants to change the data under that layer applies it first,
    /// or checks again (STAGE-2).
    pub(super) fn write_back_unlocked(&self, files: Vec<LockedFile<'_>>) -> Result<bool> {
        let (batch, sealed) = self.seal(&files)?;
        drop(files);
        self.write_sealed(&batch, sealed)
    }

    fn seal(&self, files: &[LockedFile<'_>]) -> Result<(Arc<WritebackBatch>, SealedLayers)> {
        files.iter().try_for_each(|file| self.finish_older_batches(file))?;
        let batch = Arc::new(WritebackBatch::default());
        let sealed = self.write_buffer.seal_some(&batch, files, BATCH_PIECES, BATCH_BYTES);
        Ok((batch, sealed))
    }

    /// Seals pages for the dirty data of files that are not locked, and leaves it to the next
    /// commit to name them: log entries can follow (LOG-2), and that commit has less to do while
    /// callers wait for it. It merges no frames either; the next batch here does. Where the sync of
    /// an entry does not wait for the pages, this writes them as well, and returns true: the caller
    /// syncs them.
    ///
    /// Once for each commit, which follows `record`: a file takes one sealed layer at a time,
    /// because a second one would be planned on extents that the first one replaces.
    pub(super) fn seal_ahead(&self, record: Generation) -> Result<bool> {
        let files = self.write_buffer.files();
        let locked: Vec<_> = files.iter().filter_map(|file| file.try_lock()).collect();
        let batch = Arc::new(WritebackBatch::default());
        let mut sealed = self.write_buffer.seal_some(&batch, &locked, BATCH_PIECES, AHEAD_BYTES);
        drop(locked);
        self.sealed_ahead.store(record.0, Ordering::Relaxed);
        self.write_batch(&batch, &mut sealed, BatchKind::Ahead)?;
        Ok(self.volume.has_range_sync() && !sealed.layers.is_empty())
    }

    /// Returns whether a batch was sealed ahead of the commit that follows this record.
    pub(super) fn has_sealed_ahead(&self, record: Generation) -> bool {
        self.sealed_ahead.load(Ordering::Relaxed) == record.0
    }

    fn write_sealed(&self, batch: &Arc<WritebackBatch>, mut sealed: SealedLayers) -> Result<bool> {
        let records = self.write_batch(batch, &mut sealed, BatchKind::Whole)?;
        // Only now: the flusher of a commit may have waited for the pages (BATCH-2).
        self.volume.limit_unsynced()?;
        // If this fails the batch stays registered, and the next commit or change of these files
        // applies it.
        self.volume.operate(records, true, |op| batch.apply(op))?;
        sealed.drop_published(&self.volume);
        self.write_buffer.remove_finished_batches();
        Ok(!sealed.layers.is_empty())
    }

    /// Writes the pages of a batch, outside of any operation; returns the number of records that
    /// applying it changes. After an error its layers are unsealed.
    fn write_batch(&self, batch: &Arc<WritebackBatch>, sealed: &mut SealedLayers, kind: BatchKind) -> Result<u64> {
        let written = self.write_pages(self.volume.view(&self.volume.state()), batch, sealed, kind);
        let (plans, pages) = match written {
            Ok(planned) => planned,
            Err(error) => {
                // Unsealed before the flusher stops waiting, so that it fails too rather than
                // commit without this data.
                sealed.unseal(batch);
                batch.set_failed(&error);
                self.write_buffer.remove_finished_batches();
                self.volume.writer().mark_staged();
                return Err(error);
            }
        };
        let records = plans.iter().map(FilePlan::records).sum();
        self.block_count_changes.record(&batch.publication, &plans);
        batch.set_written(plans, pages);
        sealed.reserved = None;
        Ok(records)
    }

    /// Applies and publishes all sealed layers of the file (a commit may seal another one at once),
    /// and every batch before them (BATCH-3).
    pub(super) fn finish_older_batches(&self, file: &LockedFile<'_>) -> Result<()> {
        let batches = self.write_buffer.batches_until(&file.sealed_batches(&self.volume));
        if batches.is_empty() {
            return Ok(());
        }
        batches.iter().for_each(|batch| batch.await_pages());
        self.volume.operate(LEFT_OVER, true, |op| batches.iter().try_for_each(|batch| batch.apply(op)))?;
        file.drop_published(&self.volume);
        Ok(())
    }

    /// Publishes all sealed layers of the file and the dirty data of `range`. A commit may seal a
    /// layer of the rest at once; `is_clear` detects that.
    pub(super) fn clear(&self, file: &LockedFile<'_>, range: &Range<u64>) -> Result<()> {
        loop {
            self.finish_older_batches(file)?;
            if !file.has_active(range) {
                return Ok(());
            }
            self.write_back(std::slice::from_ref(file))?;
        }
    }

    /// Returns whether the extents of `range` may be changed in `op` (STAGE-2). The answer is
    /// definite, because `op` holds the writers' lock.
    pub(super) fn is_clear(&self, file: &LockedFile<'_>, op: &Operation<'_>, range: &Range<u64>) -> bool {
        file.is_unsealed(&self.volume, op) && !file.has_active(range)
    }
}

/// Files that got more blocks in writeback than their dirty data counted, with the publications
/// that make them grow; for invalidation of cached attributes.
///
/// Many small pieces of a frame go into one page, which then covers the holes between them
/// (`plan`). Before that is published the file has the blocks of its pieces, and afterwards the
/// blocks of the page, so attributes returned before are outdated. A file is reported only after
/// its batch is published: from then on every count includes the page.
#[derive(Default)]
pub(super) struct BlockCountChanges(Mutex<HashMap<Ino, Vec<Publication>>>);

impl BlockCountChanges {
    /// Records the files that a batch will make grow, before the batch is applied.
    fn record(&self, publication: &Publication, plans: &[FilePlan]) {
        for plan in plans.iter().filter(|plan| plan.fills_holes) {
            let mut files = self.0.lock();
            let growing = files.entry(plan.ino).or_default();
            // A published one is reported together with this one, so the list stays short in an
            // archive whose caller never asks.
            growing.retain(|older| !older.is_set());
            growing.push(publication.clone());
        }
    }

    /// Returns each file with a publication in the newest state once.
    pub(super) fn take(&self, volume: &Volume) -> Vec<Ino> {
        let mut files = self.0.lock();
        if files.is_empty() {
            return Vec::new();
        }
        let state = volume.state();
        let mut taken = Vec::new();
        files.retain(|ino, growing| {
            let before = growing.len();
            growing.retain(|publication| !publication.is_in(&state));
            if growing.len() < before {
                taken.push(*ino);
            }
            !growing.is_empty()
        });
        taken
    }
}

fn apply_all(batches: &[Arc<WritebackBatch>], op: &mut Operation<'_>) -> Result<()> {
    for batch in batches {
        batch.apply(op)?;
        if let Some(error) = batch.error() {
            return Err(error);
        }
    }
    Ok(())
}

/// Dirty bytes from which a file is written back alone; smaller ones are collected, so that small
/// files are packed.
const LARGE_FILE_BYTES: u64 = MAX_DATA as u64;

/// Dirty bytes of small files collected for one batch: several packed pages.
const SMALL_FILES_BYTES: u64 = 8 * MAX_DATA as u64;

/// Maximum dirty bytes while a caller waits for a commit. The commit's flush seals them under the
/// writers' lock, which excludes all other changes: this amount, and one request of each serving
/// thread, bounds the time that the lock is held. At 400 MiB/s, the compression rate of one
/// processor, 10 ms.
pub(super) const COMMIT_WAIT_BYTES: u64 = 4 << 20;

/// Maximum dirty bytes while programs sync: a program that syncs now and then waits for as much.
/// 8,192 pieces of 4 KiB take some 0.2 s.
pub(super) const SYNCED_BYTES: u64 = 32 << 20;

/// Ends of a period of periodic commits after a sync until the bound rises: the one that may follow
/// at once, and one whole period.
const SYNCED_PERIODS: u64 = 2;

/// Freed bytes beyond which a writer makes a commit that begins to give them back, if they are also
/// a share of the data in use ([`Volume::has_freed`]). Such a commit costs some milliseconds, the
/// writing of so much data a hundred and more.
pub(super) const FREED_BYTES: u64 = 32 << 20;

/// Consecutive attempts that find every file taken by a commit or locked, after which the writer
/// continues without writing back.
const MAX_FRUITLESS: u32 = 8;
/// Interval at which a thread that waits for a file's lock checks whether the holder may wait for
/// space: longer than most writes take.
const LOCK_POLL: Duration = Duration::from_millis(5);

/// Bounds the dirty data: writers over the limit help with writeback.
///
/// While a caller waits for a commit, the limit is lower (`COMMIT_WAIT_BYTES`), so that the flusher
/// holds the writers' lock for some milliseconds and not for all dirty data: the waiting caller and
/// the other writers write back the rest before the commit.
pub(super) struct DirtyThrottle {
    volume: Arc<Volume>,
    write_buffer: Arc<WriteBuffer>,
    writeback: Arc<Writeback>,
    /// Maximum dirty bytes while no caller waits for a commit.
    most: u64,
    /// Held by the thread that brings the total under its limit. It only tries to lock files: a
    /// file with a writer that waits for space delays no other file.
    lock: Mutex<()>,
    /// Number of callers that wait for a commit.
    awaited: AtomicU64,
    /// Ends of periods until no program counts as one that syncs.
    synced: AtomicU64,
}

pub(super) struct CommitWait<'a>(&'a AtomicU64);

impl Drop for CommitWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DirtyThrottle {
    pub(super) fn new(
        volume: Arc<Volume>,
        write_buffer: Arc<WriteBuffer>,
        writeback: Arc<Writeback>,
        most: u64,
    ) -> DirtyThrottle {
        DirtyThrottle {
            volume,
            write_buffer,
            writeback,
            most,
            lock: Mutex::new(()),
            awaited: AtomicU64::new(0),
            synced: AtomicU64::new(0),
        }
    }

    pub(super) fn begin_commit_wait(&self) -> CommitWait<'_> {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        CommitWait(&self.awaited)
    }

    pub(super) fn record_sync(&self) {
        self.synced.store(SYNCED_PERIODS, Ordering::Relaxed);
    }

    pub(super) fn record_period(&self) {
        let next = self.synced.load(Ordering::Relaxed).saturating_sub(1);
        self.synced.store(next, Ordering::Relaxed);
    }

    pub(super) fn programs_sync(&self) -> bool {
        self.synced.load(Ordering::Relaxed) > 0
    }

    fn bound(&self) -> u64 {
        if self.awaited.load(Ordering::Relaxed) > 0 {
            self.most.min(COMMIT_WAIT_BYTES)
        } else if self.programs_sync() {
            self.most.min(SYNCED_BYTES)
        } else {
            self.most
        }
    }

    pub(super) fn is_near_limit(&self) -> bool {
        self.write_buffer.total_bytes() >= self.bound() / 8 * 7
    }

    fn is_above_target(&self) -> bool {
        self.write_buffer.total_bytes() > self.bound() / 4 * 3
    }

    /// Writes back until dirty bytes are under three quarters of the limit, when they come near it.
    /// One writer does the work, and the others continue until the limit is reached. The caller has
    /// no file locked.
    ///
    /// If every file with much dirty data is locked, a writer waits for the largest without holding
    /// any lock: otherwise two writers that lock one file in turn would add dirty data without
    /// bound.
    pub(super) fn throttle(&self) -> Result<()> {
        self.throttle_with(|busy| Some(busy.lock()))
    }

    /// Like [`Self::throttle`], for a caller that asks for durability. It waits for a file's
    /// writer, which soon ends, because the flusher holds the writers' lock and should seal little
    /// (`COMMIT_WAIT_BYTES`). It does not wait while any thread waits for space, since that writer
    /// may be the one; the flusher, which locks no file, then writes back the file that this writer
    /// holds.
    pub(super) fn throttle_before_commit(&self) -> Result<()> {
        self.throttle_with(|busy| {
            loop {
                match busy.try_lock_for(LOCK_POLL) {
                    Some(locked) => return Some(locked),
                    None if self.volume.space_waiter().is_short() => return None,
                    None => {}
                }
            }
        })
    }

    /// Throttles; `lock` waits for a file's lock or gives up.
    fn throttle_with(&self, lock: impl Fn(&Arc<DirtyFile>) -> Option<LockedFile<'_>>) -> Result<()> {
        while let Some(busy) = self.throttle_unlocked_files()? {
            if self.write_buffer.total_bytes() <= self.bound() {
                break;
            }
            let Some(locked) = lock(&busy) else { break };
            if !self.is_above_target() || !self.writeback.write_back_unlocked(vec![locked])? {
                break;
            }
        }
        Ok(())
    }

    /// Writes back files that are not locked. Returns the largest file when much is left to do and
    /// all such files are locked.
    fn throttle_unlocked_files(&self) -> Result<Option<Arc<DirtyFile>>> {
        let total = self.write_buffer.total_bytes();
        let held = if total > self.bound() {
            Some(self.lock.lock())
        } else if total > self.bound() / 8 * 7 {
            self.lock.try_lock()
        } else {
            None
        };
        let Some(_held) = held else { return Ok(None) };
        let mut fruitless = 0;
        while self.is_above_target() && fruitless < MAX_FRUITLESS {
            self.write_buffer.drop_published();
            if !self.is_above_target() {
                break;
            }
            let files = self.write_buffer.files();
            let mut large: Vec<_> = files.iter().filter(|file| file.active_bytes() >= LARGE_FILE_BYTES).collect();
            large.sort_by_key(|file| Reverse(file.active_bytes()));
            let chosen = match large.iter().find_map(|file| file.try_lock()) {
                Some(free) => vec![free],
                None => lock_small(&files),
            };
            if chosen.is_empty() {
                return Ok(large.first().map(|file| Arc::clone(file)));
            }
            fruitless = if self.writeback.write_back_unlocked(chosen)? { 0 } else { fruitless + 1 };
        }
        Ok(None)
    }
}

/// Returns the first unlocked files in the order of creation, to be written back together.
fn lock_small(files: &[Arc<DirtyFile>]) -> Vec<LockedFile<'_>> {
    let mut chosen = Vec::new();
    let mut bytes = 0;
    for file in files.iter().filter(|file| file.active_bytes() > 0) {
        if bytes >= SMALL_FILES_BYTES || chosen.len() as u64 >= BATCH_PIECES {
            break;
        }
        // Waiting for a second lock while holding the first could deadlock.
        if let Some(locked) = file.try_lock() {
            bytes += file.active_bytes();
            chosen.push(locked);
        }
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::super::tests::support::fresh;
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_commit_tells_why_a_write_out_that_it_waited_for_failed() {
        let (_, fs) = fresh(1);
        let batch = Arc::new(WritebackBatch::default());
        fs.write_buffer.register_batch(&batch);
        let committing = std::thread::spawn({
            let fs = fs.clone();
            move || {
                fs.volume.writer().mark_staged();
                fs.sync()
            }
        });
        // In either order: the commit finds the registered batch and waits for it, or finds it
        // finished and has no error to report.
        let failed = Error::io("cannot write", std::io::Error::from_raw_os_error(5));
        while Arc::strong_count(&batch) < 3 {
            std::thread::yield_now();
        }
        batch.set_failed(&failed);
        let result = committing.join().unwrap();
        assert!(matches!(result, Err(Error::Io { source, .. }) if source.raw_os_error() == Some(5)));
    }
}
