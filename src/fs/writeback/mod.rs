//! Turns dirty data into pages and extents: all of it at each commit, some of it when the
//! dirty-data limit is near.
//!
//! Two threads may want to write back the same file: the thread that sealed a layer of it
//! (`write_back`) and the flusher, which holds the writers' lock. They never do it twice. A layer
//! is sealed for exactly one batch, under its content's lock; the batch is registered before. The
//! flusher first applies every registered batch, waiting while pages are being written (the writing
//! threads wait for no lock that it holds, BATCH-2), then seals the active layers for a batch of
//! its own. The second of the two finds the batch applied and changes nothing.

mod plan;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::parallel_writer::worker_threads;
use super::types::FsOptions;
use super::write_buffer::{FilePlan, LockedFile, SealedLayers, WriteBuffer, WritebackBatch};
use crate::error::Result;
use crate::format::Ino;
use crate::txn::{Operation, Publication, Reservation, UnreferencedPages, View, Volume};
use plan::PagePlanner;

/// Maximum pieces of one writeback by a writer: bounds its operation to some thousands of records.
pub(super) const BATCH_PIECES: u64 = 512;

/// Maximum bytes of one writeback by a writer: a flush, which holds the writers' lock, may have to
/// wait for it.
const BATCH_BYTES: u64 = 8 << 20;

/// Estimated records of applying an older batch; only decides whether to make space first.
const LEFT_OVER: u64 = 64;

pub(super) struct Writeback {
    volume: Arc<Volume>,
    write_buffer: Arc<WriteBuffer>,
    options: FsOptions,
    threads: usize,
    block_count_changes: BlockCountChanges,
}

impl Writeback {
    pub(super) fn new(volume: Arc<Volume>, write_buffer: Arc<WriteBuffer>, options: FsOptions) -> Writeback {
        Writeback {
            volume,
            write_buffer,
            options,
            threads: worker_threads(),
            block_count_changes: BlockCountChanges::default(),
        }
    }

    /// Returns the number of threads that write pages.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Flushes all dirty data accepted so far, at the start of each commit and under the writers'
    /// lock (STAGE-3).
    pub(super) fn flush(&self, op: &mut Operation<'_>) -> Result<()> {
        let batch = Arc::new(WritebackBatch::new());
        let (mut sealed, older) = self.write_buffer.seal_all(&batch, op);
        let written = apply_all(&older, op).and_then(|()| self.write_pages(op.view(), &mut sealed));
        let result = match written {
            Ok((plans, pages)) => {
                self.block_count_changes.record(batch.publication(), &plans);
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
    fn write_pages(&self, view: View<'_>, sealed: &mut SealedLayers) -> Result<(Vec<FilePlan>, UnreferencedPages)> {
        let (layers, reserved) = sealed.parts();
        let held = reserved.as_ref().map_or(0, Reservation::groups);
        let written = UnreferencedPages::new(&self.volume);
        let planner =
            PagePlanner { volume: &self.volume, options: self.options, view, reserved, threads: self.threads, written };
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
        for file in files {
            self.finish_older_batches(file)?;
        }
        let batch = Arc::new(WritebackBatch::new());
        let sealed = self.write_buffer.seal_some(&batch, files, BATCH_PIECES, BATCH_BYTES);
        Ok((batch, sealed))
    }

    fn write_sealed(&self, batch: &Arc<WritebackBatch>, mut sealed: SealedLayers) -> Result<bool> {
        let state = self.volume.state();
        let written = self.write_pages(self.volume.view(&state), &mut sealed);
        drop(state);
        let (plans, pages) = match written {
            Ok(planned) => planned,
            Err(error) => {
                // Unsealed before the flusher stops waiting, so that it fails too rather than
                // commit without this data.
                sealed.unseal(batch);
                batch.set_failed(&error);
                self.write_buffer.remove_finished_batches();
                self.volume.mark_staged();
                return Err(error);
            }
        };
        let records = plans.iter().map(FilePlan::records).sum();
        self.block_count_changes.record(batch.publication(), &plans);
        batch.set_written(plans, pages);
        drop(sealed.parts().1.take());
        // Only now: the flusher of a commit may have waited for the pages (BATCH-2).
        self.volume.limit_unsynced()?;
        // If this fails the batch stays registered, and the next commit or change of these files
        // applies it.
        self.volume.operate(records, true, |op| batch.apply(op))?;
        sealed.drop_published(&self.volume);
        self.write_buffer.remove_finished_batches();
        Ok(!sealed.is_empty())
    }

    /// Applies and publishes all sealed layers of the file (a commit may seal another one at once).
    pub(super) fn finish_older_batches(&self, file: &LockedFile<'_>) -> Result<()> {
        let batches = file.sealed_batches(&self.volume);
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

    /// Returns and clears the files that got more blocks in writeback since the last call.
    pub(super) fn take_block_count_changes(&self) -> Vec<Ino> {
        self.block_count_changes.take(&self.volume)
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
struct BlockCountChanges(Mutex<HashMap<Ino, Vec<Publication>>>);

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
    fn take(&self, volume: &Volume) -> Vec<Ino> {
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

#[cfg(test)]
mod tests {
    use super::super::tests::support::fresh;
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_commit_tells_why_a_write_out_that_it_waited_for_failed() {
        let (_, fs) = fresh(1);
        let batch = Arc::new(WritebackBatch::new());
        fs.write_buffer.register_batch(&batch);
        let committing = std::thread::spawn({
            let fs = fs.clone();
            move || {
                fs.volume.mark_staged();
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
