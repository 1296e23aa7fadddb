//! Turns staged data into pages and extents: all of it at each commit, some of it when there is too much.
//!
//! Two may want to write out the same file: the thread that holds its turn (`write_out`) and the flusher, which holds the writers' lock.
//! They never do it twice. A layer is sealed for exactly one batch, under its content's lock; the batch is announced before. The flusher
//! first lands every announced batch, waiting for those whose pages are being written (they wait for nothing that it holds, W2), then
//! seals what is active for a batch of its own. Whoever comes second finds the batch applied and changes nothing.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::batch::{Batch, Plan};
use super::layer::Layer;
use super::staging::StagedFile;
use super::{FileSystem, extents};
use crate::error::Result;
use crate::format::values::InodeValue;
use crate::format::{Ino, MAX_DATA};
use crate::txn::{Operation, Reservation, UnnamedPages, View};

/// Pieces of one write-out under pressure: bounds its operation to some thousands of records.
const BATCH_PIECES: u64 = 512;

/// A file with this much staged is written out alone; others are collected, so that small files are packed.
const ALONE: u64 = MAX_DATA as u64;

/// Bytes collected of small files at once: several packed pages.
const COLLECT: u64 = 8 * MAX_DATA as u64;

/// Records of landing a batch that was left over; the estimate only decides whether to make room first.
const LEFT_OVER: u64 = 64;

/// Bytes of one write-out under pressure: what a flush, which holds the writers' lock, may have to wait for.
const BATCH_BYTES: u64 = 8 << 20;

/// Staged bytes at most while somebody waits for a commit. The commit's flush seals them under the writers' lock, beside which nothing can be
/// changed: with one request of each serving thread on top, that is what it can hold the lock for. At 400 MiB/s, what one processor
/// compresses, 10 ms.
pub(super) const AWAITED_BYTES: u64 = 4 << 20;

/// Attempts in a row that find every file taken by a commit or busy, before the writer goes on all the same.
const FRUITLESS: u32 = 8;
/// How soon who waits for a turn looks whether its holder may wait for room: longer than most writes take.
const LOOK: Duration = Duration::from_millis(5);

/// What was sealed for one batch.
#[derive(Default)]
struct Sealing {
    layers: Vec<(Ino, Arc<Layer>)>,
    files: Vec<Arc<StagedFile>>,
    room: Option<Reservation>,
}

impl Sealing {
    fn add(&mut self, file: &Arc<StagedFile>, layer: Arc<Layer>, room: Option<Reservation>) {
        self.layers.push((file.ino, layer));
        self.files.push(file.clone());
        if let Some(more) = room {
            match &mut self.room {
                Some(room) => room.absorb(more),
                None => self.room = Some(more),
            }
        }
    }

    #[cfg(test)]
    fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, layer)| layer.bytes()).sum()
    }

    fn thaw(&mut self, batch: &Arc<Batch>) {
        for file in &self.files {
            file.with(|content| content.thaw(batch, &mut self.room));
        }
    }
}

impl FileSystem {
    /// What runs at the start of each commit, under the writers' lock: leaves nothing staged that was accepted before (D3).
    pub(super) fn flush(&self, op: &mut Operation<'_>) -> Result<()> {
        let batch = Arc::new(Batch::new());
        let mut sealing = Sealing::default();
        let older = {
            let _gate = self.staging.gate.write();
            let mut batches = self.staging.batches.lock();
            // Failed ones are thawed by now, so their data is sealed here.
            let older: Vec<Arc<Batch>> = batches.iter().filter(|older| !older.is_over()).cloned().collect();
            batches.push(batch.clone());
            drop(batches);
            self.seal_all(&batch, &mut sealing);
            older
        };
        #[cfg(test)]
        self.staging.most_flushed.fetch_max(sealing.bytes(), std::sync::atomic::Ordering::Relaxed);
        let plans = self.land_all(&older, op).and_then(|()| self.write_pages(op.view(), &mut sealing));
        let result = match plans {
            Ok((plans, pages)) => {
                self.filled.note(batch.publication(), &plans);
                batch.written(plans, pages);
                batch.land(op)
            }
            Err(error) => {
                sealing.thaw(&batch);
                batch.failed(&error);
                Err(error)
            }
        };
        self.staging.batches.lock().retain(|batch| !batch.is_over());
        result
    }

    fn land_all(&self, batches: &[Arc<Batch>], op: &mut Operation<'_>) -> Result<()> {
        for batch in batches {
            batch.land(op)?;
            if let Some(error) = batch.failure() {
                return Err(error);
            }
        }
        Ok(())
    }

    fn seal_all(&self, batch: &Arc<Batch>, sealing: &mut Sealing) {
        for file in self.staging.files() {
            file.settle(&self.volume);
            if let Some((layer, room)) = file.with(|content| content.seal(batch, u64::MAX, u64::MAX)) {
                sealing.add(&file, layer, room);
            }
        }
    }

    /// Writes the pages of what was sealed; on an error none of them is kept, and the room that they took is promised to the layers again.
    fn write_pages(&self, view: View<'_>, sealing: &mut Sealing) -> Result<(Vec<Plan>, UnnamedPages)> {
        let held = sealing.room.as_ref().map_or(0, Reservation::quads);
        let planned = self.planner(view, &mut sealing.room).plan(&sealing.layers);
        if planned.is_err() {
            let lost = held.saturating_sub(sealing.room.as_ref().map_or(0, Reservation::quads));
            // When others were quicker, write-out asks again.
            if let Some(room) = &mut sealing.room
                && let Some(back) = self.volume.reserve_spare(lost)
            {
                room.absorb(back);
            }
        }
        planned
    }

    /// Writes out some of what is staged of `files`, ascending, whose turns the caller holds. Answers whether there was anything.
    fn write_out(&self, files: &[Arc<StagedFile>]) -> Result<bool> {
        for file in files {
            self.land_older(file)?;
        }
        let batch = Arc::new(Batch::new());
        let mut sealing = Sealing::default();
        {
            let _gate = self.staging.gate.read();
            self.staging.batches.lock().push(batch.clone());
            self.seal_some(&batch, files, &mut sealing);
        }
        let state = self.volume.state();
        let plans = self.write_pages(self.volume.view(&state), &mut sealing);
        drop(state);
        let (plans, pages) = match plans {
            Ok(planned) => planned,
            Err(error) => {
                // Thawed before the flusher stops waiting, so that it fails too rather than commit without this data.
                sealing.thaw(&batch);
                batch.failed(&error);
                self.staging.batches.lock().retain(|batch| !batch.is_over());
                self.volume.mark_staged();
                return Err(error);
            }
        };
        let records = plans.iter().map(Plan::records).sum();
        self.filled.note(batch.publication(), &plans);
        batch.written(plans, pages);
        drop(sealing.room.take());
        // When this fails the batch stays announced, and the next commit or change of these files lands it.
        self.volume.operate(records, true, |op| batch.land(op))?;
        files.iter().for_each(|file| file.settle(&self.volume));
        self.staging.batches.lock().retain(|batch| !batch.is_over());
        Ok(!sealing.layers.is_empty())
    }

    fn seal_some(&self, batch: &Arc<Batch>, files: &[Arc<StagedFile>], sealing: &mut Sealing) {
        let (mut left, mut most) = (BATCH_PIECES, BATCH_BYTES);
        for file in files {
            let sealed = file.with(|content| {
                content.settle(&self.volume.state());
                // A layer of the flusher came between; it takes all there was.
                if content.has_sealed() { None } else { content.seal(batch, left, most) }
            });
            if let Some((layer, room)) = sealed {
                left = left.saturating_sub(layer.pieces());
                most = most.saturating_sub(layer.bytes());
                sealing.add(file, layer, room);
            }
            if left == 0 || most == 0 {
                break;
            }
        }
    }

    /// Returns when no sealed layer of the file is left (a commit may seal another one at once). The caller holds the turn.
    pub(super) fn land_older(&self, file: &StagedFile) -> Result<()> {
        file.settle(&self.volume);
        let batches = file.with(|content| content.sealed_batches());
        if batches.is_empty() {
            return Ok(());
        }
        self.volume.operate(LEFT_OVER, true, |op| batches.iter().try_for_each(|batch| batch.land(op)))?;
        file.settle(&self.volume);
        Ok(())
    }

    /// Returns when no sealed layer of the file is left and nothing staged lies over `range` (a commit may seal a layer of the rest at once;
    /// `is_clear` tells). The caller holds the turn.
    pub(super) fn clear_staged(&self, file: &Arc<StagedFile>, range: &Range<u64>) -> Result<()> {
        loop {
            self.land_older(file)?;
            if file.with(|content| content.active.within(range).next().is_none()) {
                return Ok(());
            }
            self.write_out(std::slice::from_ref(file))?;
        }
    }

    /// Whether the extents of `range` may be changed in `op` (D2); a definite answer, for `op` holds the writers' lock.
    pub(super) fn is_clear(&self, file: &StagedFile, op: &Operation<'_>, range: &Range<u64>) -> bool {
        self.is_settled(file, op) && file.with(|content| content.active.within(range).next().is_none())
    }

    /// Staged bytes at most.
    fn staging_bound(&self) -> u64 {
        let bound = self.options.staged_bytes;
        if self.staging.is_awaited() { bound.min(AWAITED_BYTES) } else { bound }
    }

    /// Staged bytes from which on a write may have to write some out.
    pub(super) fn nearly_staged(&self) -> u64 {
        self.staging_bound() / 8 * 7
    }

    /// Brings the staged bytes under three quarters of their bound when they come near it: one writer does, and the others go on until
    /// the bound is reached.
    ///
    /// Who has `pressure` waits for no turn, so a file whose writer waits for room holds up nobody beside it. Where every file with much in it is
    /// busy, a writer waits for the largest, holding nothing: otherwise two that take turns with one file would stage without bound.
    pub(super) fn relieve(&self) -> Result<()> {
        self.relieve_by(|busy| Some(busy.turn.lock()))
    }

    /// As [`Self::relieve`], for who asks for durability. It waits for a writer, who is soon done, because the flusher holds the writers' lock and
    /// is to seal little (`AWAITED_BYTES`); but not while anybody waits for room, since that writer may. What he is busy with is left to the
    /// flusher then, which needs no turn.
    pub(super) fn relieve_before_commit(&self) -> Result<()> {
        self.relieve_by(|busy| {
            loop {
                match busy.turn.try_lock_for(LOOK) {
                    Some(turn) => return Some(turn),
                    None if self.volume.is_short() => return None,
                    None => {}
                }
            }
        })
    }

    /// `turn` waits for that of a file, or gives up.
    fn relieve_by(&self, turn: impl Fn(&StagedFile) -> Option<MutexGuard<'_, ()>>) -> Result<()> {
        while let Some(busy) = self.relieve_unless_busy()? {
            if self.staging.total() <= self.staging_bound() {
                break;
            }
            let Some(_turn) = turn(&busy) else { break };
            if !self.is_much_staged() || !self.write_out(std::slice::from_ref(&busy))? {
                break;
            }
        }
        Ok(())
    }

    fn is_much_staged(&self) -> bool {
        self.staging.total() > self.staging_bound() / 4 * 3
    }

    /// Answers the largest file when there is still much to do and nothing that nobody is busy with.
    fn relieve_unless_busy(&self) -> Result<Option<Arc<StagedFile>>> {
        let total = self.staging.total();
        let pressure = if total > self.staging_bound() {
            Some(self.staging.pressure.lock())
        } else if total > self.nearly_staged() {
            self.staging.pressure.try_lock()
        } else {
            None
        };
        let Some(_pressure) = pressure else { return Ok(None) };
        let mut fruitless = 0;
        while self.is_much_staged() && fruitless < FRUITLESS {
            self.staging.sweep(&self.volume);
            if !self.is_much_staged() {
                break;
            }
            let files = self.staging.files();
            let mut large: Vec<_> = files.iter().filter(|file| file.active_bytes() >= ALONE).collect();
            large.sort_by_key(|file| Reverse(file.active_bytes()));
            let free = large.iter().find_map(|file| file.turn.try_lock().map(|turn| (turn, *file)));
            let progress = match free {
                Some((_turn, file)) => Some(self.write_out(std::slice::from_ref(file))?),
                None => self.write_out_small(&files)?,
            };
            match progress {
                Some(true) => fruitless = 0,
                Some(false) => fruitless += 1,
                None => return Ok(large.first().map(|file| Arc::clone(file))),
            }
        }
        Ok(None)
    }

    /// Writes out the first files that nobody is busy with, in the order of creation; None when there are none.
    fn write_out_small(&self, files: &[Arc<StagedFile>]) -> Result<Option<bool>> {
        let mut turns = Vec::new();
        let mut chosen = Vec::new();
        let mut bytes = 0;
        for file in files.iter().filter(|file| file.active_bytes() > 0) {
            if bytes >= COLLECT || chosen.len() as u64 >= BATCH_PIECES {
                break;
            }
            // Waiting for a second turn while holding the first could be a cycle.
            if let Some(turn) = file.turn.try_lock() {
                turns.push(turn);
                bytes += file.active_bytes();
                chosen.push(file.clone());
            }
        }
        if chosen.is_empty() { Ok(None) } else { self.write_out(&chosen).map(Some) }
    }

    /// Whether the file has no sealed layer, so that its extents may be changed in `op`; a definite answer, for `op` holds the writers' lock.
    pub(super) fn is_settled(&self, file: &StagedFile, _op: &Operation<'_>) -> bool {
        file.settle(&self.volume);
        !file.with(|content| content.has_sealed())
    }

    /// Names pages that were written for one file in `op` and makes them its content.
    pub(super) fn name_pages(
        &self,
        op: &mut Operation<'_>,
        inode: &mut InodeValue,
        pages: &mut UnnamedPages,
    ) -> Result<()> {
        pages.name(op, |_| true)?;
        extents::replace(op, inode, pages.pieces())
    }
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
        fs.staging.batches.lock().push(batch.clone());
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
