//! Turns staged data into pages and extents: all of it at each commit, some of it when there is too much.
//!
//! Two may want to write out the same file: the thread that sealed a layer of it (`write_out`) and the flusher, which holds the writers' lock.
//! They never do it twice. A layer is sealed for exactly one batch, under its content's lock; the batch is announced before. The flusher
//! first lands every announced batch, waiting for those whose pages are being written (they wait for nothing that it holds, BATCH-2), then
//! seals what is active for a batch of its own. Whoever comes second finds the batch applied and changes nothing.

mod block_count_changes;
mod plan;

use std::ops::Range;
use std::sync::Arc;

use super::parallel_writer::processors;
use super::types::FsOptions;
use super::write_buffer::{Batch, LockedFile, Plan, Sealed, Staging};
use crate::error::Result;
use crate::format::Ino;
use crate::txn::{Operation, Reservation, UnnamedPages, View, Volume};
use block_count_changes::Grown;
use plan::Planner;

/// Pieces of one write-out under pressure: bounds its operation to some thousands of records.
pub(super) const BATCH_PIECES: u64 = 512;

/// Bytes of one write-out under pressure: what a flush, which holds the writers' lock, may have to wait for.
const BATCH_BYTES: u64 = 8 << 20;

/// Records of landing a batch that was left over; the estimate only decides whether to make space first.
const LEFT_OVER: u64 = 64;

pub(super) struct WriteOut {
    volume: Arc<Volume>,
    staging: Arc<Staging>,
    options: FsOptions,
    threads: usize,
    grown: Grown,
}

impl WriteOut {
    pub(super) fn new(volume: Arc<Volume>, staging: Arc<Staging>, options: FsOptions) -> WriteOut {
        WriteOut { volume, staging, options, threads: processors(), grown: Grown::default() }
    }

    /// How many may write pages at once.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// What runs at the start of each commit, under the writers' lock: leaves nothing staged that was accepted before (STAGE-3).
    pub(super) fn flush(&self, op: &mut Operation<'_>) -> Result<()> {
        let batch = Arc::new(Batch::new());
        let (mut sealed, older) = self.staging.seal_all(&batch, op);
        let written = land_all(&older, op).and_then(|()| self.write_pages(op.view(), &mut sealed));
        let result = match written {
            Ok((plans, pages)) => {
                self.grown.note(batch.publication(), &plans);
                batch.written(plans, pages);
                batch.land_as_planned(op)
            }
            Err(error) => {
                sealed.unseal(&batch);
                batch.failed(&error);
                Err(error)
            }
        };
        self.staging.forget_batches();
        result
    }

    /// Writes the pages of what was sealed; on an error none of them is kept, and the space that they took is promised to the layers again.
    fn write_pages(&self, view: View<'_>, sealed: &mut Sealed) -> Result<(Vec<Plan>, UnnamedPages)> {
        let (layers, reserved) = sealed.parts();
        let held = reserved.as_ref().map_or(0, Reservation::groups);
        let written = UnnamedPages::new(&self.volume);
        let planner =
            Planner { volume: &self.volume, options: self.options, view, reserved, threads: self.threads, written };
        let planned = planner.plan(layers);
        if planned.is_err() {
            let lost = held.saturating_sub(reserved.as_ref().map_or(0, Reservation::groups));
            // When others were quicker, write-out asks again.
            if let Some(reserved) = reserved
                && let Some(back) = self.volume.reserve_spare(lost)
            {
                reserved.absorb(back);
            }
        }
        planned
    }

    /// Writes out some of what is staged of `files`, ascending. Answers whether there was anything.
    pub(super) fn write_out(&self, files: &[LockedFile<'_>]) -> Result<bool> {
        let (batch, sealed) = self.seal(files)?;
        self.write_sealed(&batch, sealed)
    }

    /// As [`Self::write_out`], beside whoever writes to the files meanwhile: they are let go once a layer of them is sealed. Whoever is to change what lies
    /// below that lands it first, or looks again (STAGE-2).
    pub(super) fn write_out_beside(&self, files: Vec<LockedFile<'_>>) -> Result<bool> {
        let (batch, sealed) = self.seal(&files)?;
        drop(files);
        self.write_sealed(&batch, sealed)
    }

    fn seal(&self, files: &[LockedFile<'_>]) -> Result<(Arc<Batch>, Sealed)> {
        for file in files {
            self.land_older(file)?;
        }
        let batch = Arc::new(Batch::new());
        let sealed = self.staging.seal_some(&batch, files, BATCH_PIECES, BATCH_BYTES);
        Ok((batch, sealed))
    }

    fn write_sealed(&self, batch: &Arc<Batch>, mut sealed: Sealed) -> Result<bool> {
        let state = self.volume.state();
        let written = self.write_pages(self.volume.view(&state), &mut sealed);
        drop(state);
        let (plans, pages) = match written {
            Ok(planned) => planned,
            Err(error) => {
                // Unsealed before the flusher stops waiting, so that it fails too rather than commit without this data.
                sealed.unseal(batch);
                batch.failed(&error);
                self.staging.forget_batches();
                self.volume.mark_staged();
                return Err(error);
            }
        };
        let records = plans.iter().map(Plan::records).sum();
        self.grown.note(batch.publication(), &plans);
        batch.written(plans, pages);
        drop(sealed.parts().1.take());
        // Only now: the flusher of a commit may have waited for the pages (BATCH-2).
        self.volume.bound_unsynced()?;
        // When this fails the batch stays announced, and the next commit or change of these files lands it.
        self.volume.operate(records, true, |op| batch.land(op))?;
        sealed.drop_published(&self.volume);
        self.staging.forget_batches();
        Ok(!sealed.is_empty())
    }

    /// Returns when no sealed layer of the file is left (a commit may seal another one at once).
    pub(super) fn land_older(&self, file: &LockedFile<'_>) -> Result<()> {
        let batches = file.sealed_batches(&self.volume);
        if batches.is_empty() {
            return Ok(());
        }
        batches.iter().for_each(|batch| batch.await_pages());
        self.volume.operate(LEFT_OVER, true, |op| batches.iter().try_for_each(|batch| batch.land(op)))?;
        file.drop_published(&self.volume);
        Ok(())
    }

    /// Returns when no sealed layer of the file is left and nothing staged lies over `range` (a commit may seal a layer of the rest at once;
    /// `is_clear` tells).
    pub(super) fn clear(&self, file: &LockedFile<'_>, range: &Range<u64>) -> Result<()> {
        loop {
            self.land_older(file)?;
            if !file.has_active(range) {
                return Ok(());
            }
            self.write_out(std::slice::from_ref(file))?;
        }
    }

    /// Whether the extents of `range` may be changed in `op` (STAGE-2); a definite answer, for `op` holds the writers' lock.
    pub(super) fn is_clear(&self, file: &LockedFile<'_>, op: &Operation<'_>, range: &Range<u64>) -> bool {
        file.is_unsealed(&self.volume, op) && !file.has_active(range)
    }

    /// Files whose block count has grown without a call that changed them since this was asked last.
    pub(super) fn take_grown(&self) -> Vec<Ino> {
        self.grown.take(&self.volume)
    }
}

fn land_all(batches: &[Arc<Batch>], op: &mut Operation<'_>) -> Result<()> {
    for batch in batches {
        batch.land(op)?;
        if let Some(error) = batch.failure() {
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
        let batch = Arc::new(Batch::new());
        fs.staging.announce(&batch);
        let committing = std::thread::spawn({
            let fs = fs.clone();
            move || {
                fs.volume.mark_staged();
                fs.sync()
            }
        });
        // Whichever comes first: the commit takes up the announced batch and waits for it, or finds it over and has nothing to report.
        let failed = Error::io("cannot write", std::io::Error::from_raw_os_error(5));
        while Arc::strong_count(&batch) < 3 {
            std::thread::yield_now();
        }
        batch.failed(&failed);
        let told = committing.join().unwrap();
        assert!(matches!(told, Err(Error::Io { source, .. }) if source.raw_os_error() == Some(5)));
    }
}
