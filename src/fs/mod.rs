//! POSIX objects on transactions: inodes, directories, xattrs and file data; no kernel types.
//!
//! # Parts
//! [`FileSystem`] owns the parts, and its operations (`ops`) call them. Each part has its own locks
//! and uses only the parts above it in this list:
//!
//! - `write_buffer`: dirty data, which no extent names yet.
//! - `writeback`: turns dirty data into pages and extents, and bounds the amount of dirty data.
//! - `reclaim`: open handles, and removal of unlinked inodes.
//!
//! Independent of these are `repack` (rewrites pages with deleted parts), `readahead` (prefetch
//! from remote archives) and the shutdown gate. All parts use `extents`, `inode` and the volume.

pub(crate) mod acl;
mod check;
mod directory;
mod extents;
mod inode;
mod ops;
mod readahead;
mod reclaim;
mod repack;
#[cfg(test)]
mod tests;
mod types;
mod write_buffer;
mod writeback;

pub use crate::format::{Ino, MAX_INO, ROOT_INO};
pub(crate) use check::{DataReading, StructureReport};
pub(crate) use directory::name_hash;
pub(crate) use extents::join_ranges;
pub(crate) use ops::ChangedInode;
pub(crate) use ops::MAX_SMALL_FILE;
pub use ops::{NewFile, PendingSync, SnapshotView};
pub use types::*;
pub(crate) use write_buffer::LogPieces;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::Generation;
use crate::format::log::LogPiece;
use crate::txn::{Finding, Operation, Volume, VolumeOwner};
#[cfg(test)]
pub(crate) use directory::{index_key, list_key};
use readahead::Readahead;
use reclaim::Reclaim;
use repack::Repacker;
use write_buffer::WriteBuffer;
use writeback::{DirtyThrottle, Writeback};

/// Parts of a file system that its volume calls. Weak: the volume belongs to the parts, not the
/// other way round. Without them there is nothing to flush, log or reclaim.
struct OwnerParts {
    writeback: Weak<Writeback>,
    write_buffer: Weak<WriteBuffer>,
    reclaim: Weak<Reclaim>,
}

impl VolumeOwner for OwnerParts {
    fn flush(&self, operation: &mut Operation<'_>) -> Result<()> {
        self.writeback.upgrade().map_or(Ok(()), |writeback| writeback.flush(operation))
    }

    fn take_log_pieces(&self, capacity: usize) -> Option<Vec<LogPiece>> {
        self.write_buffer.upgrade()?.take_log_pieces(capacity)
    }

    fn reclaim_step(&self) -> Result<bool> {
        self.reclaim.upgrade().map_or(Ok(false), |reclaim| reclaim.step_for_space())
    }

    fn is_reclaim_blocked(&self) -> Result<bool> {
        self.reclaim.upgrade().map_or(Ok(false), |reclaim| reclaim.has_blocked_work())
    }
}

/// File system of one open archive, mounted or not. All methods may be called from several threads.
pub struct FileSystem {
    pub(crate) volume: Arc<Volume>,
    pub(crate) environment: Arc<dyn Environment>,
    options: FsOptions,
    /// Key of the directory and xattr name hashes.
    pub(crate) name_key: [u8; 16],
    write_buffer: Arc<WriteBuffer>,
    writeback: Arc<Writeback>,
    dirty_throttle: DirtyThrottle,
    reclaim: Arc<Reclaim>,
    repack: Repacker,
    shutdown_gate: ShutdownGate,
    /// Callers of `sync` get an error: see [`FileSystem::end_syncs`].
    syncs_ended: AtomicBool,
    /// `Some` for a remote archive.
    readahead: Option<Readahead>,
}

impl FileSystem {
    /// Creates the file system of an open volume: registers as its owner, replays the log, and
    /// queues the orphans and trims of the last session for reclaim.
    pub(crate) fn new(
        volume: Arc<Volume>,
        environment: Arc<dyn Environment>,
        name_key: [u8; 16],
        options: FsOptions,
    ) -> Result<Arc<FileSystem>> {
        let readahead = volume.is_remote().then(Readahead::default);
        let write_buffer = Arc::new(WriteBuffer::new(volume.clone()));
        let writeback = Arc::new(Writeback::new(volume.clone(), write_buffer.clone(), options));
        let fs = Arc::new(FileSystem {
            reclaim: Arc::new(Reclaim::new(volume.clone(), write_buffer.clone(), writeback.clone())),
            repack: Repacker::new(volume.clone(), environment.clone(), options),
            dirty_throttle: DirtyThrottle::new(
                volume.clone(),
                write_buffer.clone(),
                writeback.clone(),
                options.max_dirty_bytes,
            ),
            volume,
            environment,
            options,
            name_key,
            write_buffer,
            writeback,
            shutdown_gate: ShutdownGate::default(),
            syncs_ended: AtomicBool::new(false),
            readahead,
        });
        if fs.volume.read_only() {
            fs.replay_log()?;
            return Ok(fs);
        }
        fs.volume.set_owner(OwnerParts {
            writeback: Arc::downgrade(&fs.writeback),
            write_buffer: Arc::downgrade(&fs.write_buffer),
            reclaim: Arc::downgrade(&fs.reclaim),
        });
        fs.replay_log()?;
        fs.reclaim.queue_leftovers()?;
        let durable = fs.volume.durable();
        if !durable.closed && durable.generation != Generation(0) {
            fs.repack.begin_search();
        }
        Ok(fs)
    }

    /// Replays the log entries that are newer than the opened record, before anything else is read
    /// or changed. Errors: `NoSpace` for a writer without space for the entries; a reader needs
    /// none.
    fn replay_log(&self) -> Result<()> {
        let Some(logged) = self.volume.take_logged() else { return Ok(()) };
        let pieces = LogPieces::of(&logged.entries);
        if self.volume.read_only() {
            return self
                .volume
                .replay_read_only(&logged, &mut |view| self.write_buffer.restore_from_log(&pieces, view, None));
        }
        let mut reserved = Some(self.volume.reserve_accepted(pieces.groups())?);
        self.volume.replay(&logged, pieces.len(), &mut |view| {
            self.write_buffer.restore_from_log(&pieces, view, reserved.take())
        })
    }

    pub fn read_only(&self) -> bool {
        self.volume.read_only()
    }

    /// Returns whether the last session left work for reclaim: inodes unlinked while open, or
    /// unfinished trims.
    pub(crate) fn has_pending_reclaim(&self) -> Result<bool> {
        self.reclaim.has_pending_reclaim()
    }

    /// Commits everything, reclaims unlinked inodes, erases free space and writes the closed
    /// record. The caller has no open handles left; handles that were never released are dropped.
    /// Waits for running calls of [`FileSystem::purge`] and [`FileSystem::make_durable`]; later
    /// ones fail.
    ///
    /// # Errors
    /// That of closing the volume, else that of reclaim (the next session retries it), else that of
    /// repacking (remains of deleted files on shared pages then stay until `purge` finds them).
    pub(crate) fn close(&self) -> Result<()> {
        // Background work may block for ever, for instance on the file of a backup on a server.
        // Committing first means that killing this program then loses no data.
        let _closing = self.shutdown_gate.shut(|| {
            if let Err(error) = self.commit_all() {
                tracing::debug!(%error, "nothing could be made durable before closing, which tells why");
            }
        });
        let writable = !self.volume.read_only();
        let mut reclaimed = if writable { self.reclaim.forget_handles().map(|()| true) } else { Ok(false) };
        while matches!(reclaimed, Ok(true)) {
            reclaimed = self.reclaim.step();
        }
        let repacked = if writable { self.repack_before_close() } else { Ok(()) };
        self.volume.close().map_err(|error| self.volume.error_for(error))?;
        reclaimed.map(drop).and(repacked)
    }

    fn repack_before_close(&self) -> Result<()> {
        // Dirty data may replace packed files.
        if self.volume.writer().is_dirty() {
            self.volume.commit()?;
            self.write_buffer.drop_published();
        }
        match self.repack.run_all(None) {
            // `check` reports the damage; closing need not fail for it.
            Err(Error::Damaged(reason)) => {
                tracing::warn!("cannot inspect all pages of small files: {reason}");
                Ok(())
            }
            repacked => repacked,
        }
    }

    /// Commits everything, reclaims inodes that are unlinked or were visible only in removed
    /// snapshots, rewrites pages with deleted parts (REPACK-5), and erases all free space without
    /// waiting for its age. Data deleted during the call may be erased only later.
    ///
    /// # Errors
    /// `ReadOnly`, `NoSpace`, `WriteFailed`; `Invalid` when the archive is being closed. `InUse` if
    /// a backup, a comparison or a slow read still needs deleted data, `Damaged` or `NoSpace` if an
    /// object cannot be reclaimed, and `Damaged` or `Io` if a part of the archive cannot be
    /// searched: everything else is erased then.
    pub fn purge(&self) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        // An object that cannot be reclaimed must not prevent the erasing of the others.
        let reclaimed = self.reclaim.run_queued(&|| self.shutdown_gate.check_open())?;
        self.finish_removals_in(&mut || Ok(()))?;
        self.commit_all()?;
        let repacked = self.repack.run_all(Some(&self.shutdown_gate));
        self.volume.commit()?;
        // A failed repack must not prevent the erasing, and neither failure keeps plaintext in
        // memory.
        let erased = self.volume.erase_everything();
        self.volume.forget_plaintext();
        erased?;
        repacked?;
        reclaimed
    }

    /// Runs one background step: reclaim of orphans and trims, repacking of stale packed pages,
    /// then [`Volume::maintain`]. Returns whether work is left.
    ///
    /// To be called about once a second: until a step has followed the last commit, recovery takes
    /// damage to the pages of that commit for an interrupted write and rolls the commit back.
    pub fn maintain(&self) -> Result<bool> {
        if self.volume.read_only() {
            return Ok(false);
        }
        let reclaimed = self.reclaim.step();
        let repacked = self.repack.step();
        let left = self.volume.maintain();
        // The first error is the cause of the later ones.
        reclaimed?;
        Ok(left? || repacked? || self.reclaim.is_pending())
    }

    /// Returns and clears the files that got more blocks in writeback since the last call;
    /// attributes returned earlier for them may be outdated.
    pub fn take_block_count_changes(&self) -> Vec<Ino> {
        self.writeback.block_count_changes.take(&self.volume)
    }

    /// Runs [`FileSystem::walk_structure`] alone; `full` reads every page of file data through the
    /// extents that name it.
    pub(crate) fn check_structure(&self, full: bool) -> Result<Vec<Finding>> {
        let reading = if full { DataReading::All } else { DataReading::Nothing };
        Ok(self.walk_structure(reading, &mut |_, _| {})?.findings)
    }

    /// Checks the live tree of the newest version. `progress` gets (done, total) inodes. Errors:
    /// only errors that make continuing impossible; an unreadable node or page is a finding.
    pub(crate) fn walk_structure(
        &self,
        reading: DataReading<'_>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<StructureReport> {
        check::walk_structure(&self.volume, &self.name_key, reading, progress)
    }
}

/// Lets background tasks finish before the close record is written.
///
/// Closing frees space at the end of the file and then records the file's length. An allocation in
/// between would lengthen the file, and the record would claim blocks that were cut off: the
/// archive would be refused as truncated. So work that an operator requests ends before closing
/// begins, and none begins afterwards. Requests of a mount have ended by then.
#[derive(Default)]
struct ShutdownGate {
    begun: AtomicBool,
    gate: RwLock<()>,
}

impl ShutdownGate {
    /// Keeps the archive from closing while the guard lives. One thread must not take it twice: a
    /// pending close between the two would deadlock.
    fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        let work = self.gate.read();
        self.check_open()?;
        Ok(work)
    }

    /// Fails once closing has begun. Long work calls it regularly, so that closing does not wait
    /// for the rest of the work. Errors: `Invalid` once closing has begun.
    fn check_open(&self) -> Result<()> {
        if self.begun.load(Ordering::SeqCst) { Err(Error::invalid("the archive is being closed")) } else { Ok(()) }
    }

    /// Refuses new work and waits until none is in progress. If there is any, `before` runs before
    /// the wait.
    fn shut(&self, before: impl FnOnce()) -> RwLockWriteGuard<'_, ()> {
        self.begun.store(true, Ordering::SeqCst);
        self.gate.try_write().unwrap_or_else(|| {
            before();
            self.gate.write()
        })
    }
}
