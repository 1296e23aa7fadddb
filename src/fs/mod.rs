//! POSIX objects on transactions: inodes, directories, xattrs and file data; no kernel types.
//!
//! # The parts
//! [`FileSystem`] owns them, and its operations (`ops`) call them; each has its own locks and knows only those before it:
//! `staging` (data that no extent names yet), `writeout` (staged data into extents), `pressure` (how much may be staged), `reclaim` (open handles, and
//! what nobody can reach); `repack` (pages of small files written anew), `ahead` (reading ahead on archives of other machines) and `closing` stand beside them. All know `extents`, `inode` and the volume.

pub(crate) mod acl;
mod check;
mod directory;
mod dirty_throttle;
mod extents;
mod inode;
mod ops;
mod packing;
mod parallel_writer;
pub(crate) mod ranges;
mod readahead;
mod reclaim;
mod repack;
mod shutdown_gate;
#[cfg(test)]
mod tests;
mod types;
mod write_buffer;
mod writeback;

pub(crate) use check::{Reading, Structure};
pub(crate) use directory::name_hash;
#[cfg(test)]
pub(crate) use directory::{index_key, list_key};
pub(crate) use ops::ChangedInode;
pub use ops::{BegunSync, MAX_SMALL_FILE, NewFile, SnapshotView};
pub use types::*;

use std::sync::Arc;

use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::{Generation, Ino};
use crate::txn::{Finding, Volume};
use check::StructureCounts;
use dirty_throttle::Pressure;
use readahead::Ahead;
use reclaim::Reclaim;
use repack::Repack;
use shutdown_gate::Closing;
pub(crate) use write_buffer::LoggedPieces;
use write_buffer::Staging;
use writeback::WriteOut;

/// The mounted (or otherwise used) file system of one open archive. All methods may be called from several threads.
pub struct FileSystem {
    pub(crate) volume: Arc<Volume>,
    pub(crate) environment: Arc<dyn Environment>,
    options: FsOptions,
    /// Key of the directory and xattr name hashes.
    pub(crate) name_key: [u8; 16],
    staging: Arc<Staging>,
    write_out: Arc<WriteOut>,
    pressure: Pressure,
    reclaim: Arc<Reclaim>,
    repack: Repack,
    closing: Closing,
    /// Where the archive is on another machine.
    ahead: Option<Ahead>,
}

impl FileSystem {
    /// Takes over an open volume: registers the flusher and queues orphans and trims of the last session for reclaim.
    pub(crate) fn new(
        volume: Arc<Volume>,
        environment: Arc<dyn Environment>,
        name_key: [u8; 16],
        options: FsOptions,
    ) -> Result<Arc<FileSystem>> {
        let ahead = volume.is_far().then(Ahead::default);
        let staging = Arc::new(Staging::new(volume.clone()));
        let write_out = Arc::new(WriteOut::new(volume.clone(), staging.clone(), options));
        let fs = Arc::new(FileSystem {
            reclaim: Arc::new(Reclaim::new(volume.clone(), staging.clone(), write_out.clone())),
            repack: Repack::new(volume.clone(), environment.clone(), options),
            pressure: Pressure::new(volume.clone(), staging.clone(), write_out.clone(), options.staged_bytes),
            volume,
            environment,
            options,
            name_key,
            staging,
            write_out,
            closing: Closing::default(),
            ahead,
        });
        if fs.volume.read_only() {
            fs.lay_log()?;
            return Ok(fs);
        }
        // Weak: the volume belongs to the parts, not the other way round.
        let flusher = Arc::downgrade(&fs.write_out);
        fs.volume.set_flusher(Box::new(move |op| flusher.upgrade().map_or(Ok(()), |write_out| write_out.flush(op))));
        let source = Arc::downgrade(&fs.staging);
        fs.volume.set_log_source(Box::new(move |capacity| source.upgrade().and_then(|staging| staging.log(capacity))));
        fs.volume.set_reclaimer(Box::new(Arc::downgrade(&fs.reclaim)));
        fs.lay_log()?;
        fs.reclaim.add_left_over()?;
        let durable = fs.volume.durable();
        if !durable.closed && durable.generation != Generation(0) {
            fs.repack.begin_search();
        }
        Ok(fs)
    }

    /// Lays what the log says beyond the record that was opened over it, before anything else is read or changed.
    ///
    /// # Errors
    /// `NoSpace` for a writer without room for it; who reads needs none.
    fn lay_log(&self) -> Result<()> {
        let Some(logged) = self.volume.take_logged() else { return Ok(()) };
        let pieces = LoggedPieces::of(&logged.entries);
        if self.volume.read_only() {
            return self.volume.lay_for_reading(&logged, &mut |view| self.staging.restore(&pieces, view, None));
        }
        let mut reserved = Some(self.volume.reserve_accepted(pieces.groups())?);
        self.volume.lay(&logged, pieces.len(), &mut |view| self.staging.restore(&pieces, view, reserved.take()))
    }

    /// Whether nothing can be changed.
    pub fn read_only(&self) -> bool {
        self.volume.read_only()
    }

    /// Whether the last session left something to be reclaimed: what was unlinked while it was open, or cut off.
    pub(crate) fn has_left_over(&self) -> Result<bool> {
        self.reclaim.has_left_over()
    }

    /// Makes everything durable, reclaims what is unlinked, erases free space and writes the closed record. Nobody has anything open by now,
    /// whoever did not say so is gone. Waits for calls of [`FileSystem::purge`] and [`FileSystem::make_durable`]; later ones fail.
    ///
    /// # Errors
    /// That of closing the volume, else that of reclaim: what cannot be reclaimed stays for the next session; else that of repacking: what
    /// deleted files left on shared pages then stays until `purge` finds it.
    pub fn close(&self) -> Result<()> {
        // Who works may wait for something that never comes, such as the file of a backup on a server: whoever kills this program for that loses nothing.
        let _closing = self.closing.begin(|| {
            if let Err(error) = self.commit_all() {
                tracing::debug!(%error, "nothing could be made durable before closing, which tells why");
            }
        });
        let writable = !self.volume.read_only();
        let mut reclaimed = if writable { self.reclaim.forget_handles().map(|()| true) } else { Ok(false) };
        while matches!(reclaimed, Ok(true)) {
            reclaimed = self.reclaim.step();
        }
        let repacked = if writable { self.repack_at_the_end() } else { Ok(()) };
        self.volume.close().map_err(|error| self.told(error))?;
        reclaimed.map(drop).and(repacked)
    }

    fn repack_at_the_end(&self) -> Result<()> {
        // What is staged may take the place of packed files.
        if self.volume.is_dirty() {
            self.volume.commit()?;
            self.staging.sweep();
        }
        match self.repack.all(None) {
            // For `check` to report; closing need not fail for it.
            Err(Error::Damaged(reason)) => {
                tracing::warn!("not all pages of small files could be looked at: {reason}");
                Ok(())
            }
            repacked => repacked,
        }
    }

    /// Makes everything durable, reclaims what is unlinked or was shown by removed snapshots alone, and erases all free space, without waiting for its
    /// age. What is deleted while it runs may be erased only later.
    ///
    /// # Errors
    /// `ReadOnly`, `NoSpace`, `Latched`; `Invalid` when the archive is being closed.
    pub fn purge(&self) -> Result<()> {
        let _work = self.closing.work()?;
        while self.reclaim.step()? {
            self.closing.check()?;
        }
        self.finish_removals_in(&mut || Ok(()))?;
        self.commit_all()?;
        let repacked = self.repack.all(Some(&self.closing));
        self.volume.commit()?;
        // What could not be repacked keeps nothing else from being erased, and neither failure keeps what was read in memory.
        let erased = self.volume.erase_everything();
        self.volume.forget_plaintext();
        erased?;
        repacked
    }

    /// One background step: reclaim of orphans and trims, repacking of pages that deleted files left bytes on, then [`Volume::maintain`]. Returns whether work is left.
    /// To be called about once a second: until a step has followed the last commit, damage to its pages looks like an interruption and undoes it.
    pub fn maintain(&self) -> Result<bool> {
        if self.volume.read_only() {
            return Ok(false);
        }
        let reclaimed = self.reclaim.step();
        let repacked = self.repack.step();
        let left = self.volume.maintain();
        // What went wrong first is the cause of the others.
        reclaimed?;
        Ok(left? || repacked? || self.reclaim.is_pending())
    }

    /// Files whose block count has grown without a call that changed them since this was asked last; for each, attributes that were
    /// told before may be wrong.
    pub fn take_grown(&self) -> Vec<Ino> {
        self.write_out.take_grown()
    }

    /// [`FileSystem::walk_structure`] by itself: `full` reads every page of file data through the extents that name it.
    pub(crate) fn check_structure(
        &self,
        full: bool,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(StructureCounts, Vec<Finding>)> {
        let reading = if full { Reading::All } else { Reading::Nothing };
        let Structure { counts, findings, .. } = self.walk_structure(reading, progress)?;
        Ok((counts, findings))
    }

    /// Walks the live tree of the newest version; no finding is made in what is sound. `progress` gets (done, total) inodes.
    ///
    /// # Errors
    /// Only what makes going on impossible; a node or page that cannot be read is a finding like others.
    pub(crate) fn walk_structure(&self, reading: Reading<'_>, progress: &mut dyn FnMut(u64, u64)) -> Result<Structure> {
        check::walk_structure(&self.volume, &self.name_key, reading, progress)
    }
}
