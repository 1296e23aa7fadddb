//! Snapshots: named versions of the whole tree.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::values::SnapshotValue;
use crate::fs::{FileSystem, SnapshotId, SnapshotInfo, SnapshotView};
use crate::txn::{Choice, Pinned};

impl FileSystem {
    /// Takes a snapshot of the current version; durable on return. Data deleted before is not in
    /// it, except for files that are still open, and for inodes that are damaged or found no space
    /// to be reclaimed.
    ///
    /// # Errors
    /// `Exists` when another snapshot has the name, `Invalid` for an invalid name and when the
    /// archive is being closed, `ReadOnly`, `NoSpace`, `Latched`.
    pub(crate) fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.check_snapshots_writable()?;
        self.reclaim.run_queued(&|| self.shutdown_gate.check_open())?;
        // Dirty data may replace packed files, so it is written before stale pages are searched.
        // Data accepted meanwhile, and changes of the repacking, are written once more: so little
        // is left to the commit, which blocks writers, that they wait no longer than for an fsync.
        self.commit_all()?;
        self.repack.run_noted(&self.shutdown_gate)?;
        self.commit_all()?;
        self.volume.take_snapshot(name).map(drop).map_err(|error| self.deliver_error(error))
    }

    /// Commits and pins the current version.
    ///
    /// # Errors
    /// Errors of a commit; `Invalid` when the archive is being closed.
    pub(crate) fn pin(&self) -> Result<Pinned> {
        let _work = self.shutdown_gate.enter()?;
        self.pin_held_open()
    }

    /// Pins the current version, for a caller that holds [`FileSystem::hold_open`] longer than the
    /// pin.
    ///
    /// # Errors
    /// Errors of a commit.
    pub(crate) fn pin_held_open(&self) -> Result<Pinned> {
        if !self.volume.read_only() {
            // Leaves little to the commit, which blocks writers.
            self.commit_all()?;
        }
        self.volume.pin().map_err(|error| self.deliver_error(error))
    }

    /// Keeps the archive from being closed while the guard lives.
    ///
    /// # Errors
    /// `Invalid` when it is being closed.
    pub fn hold_open(&self) -> Result<impl Drop + '_> {
        self.shutdown_gate.enter()
    }

    /// Fails when the archive is being closed. Long work calls it regularly, so that closing does
    /// not wait for the rest of the work.
    ///
    /// # Errors
    /// `Invalid` when the archive is being closed.
    pub fn check_closing(&self) -> Result<()> {
        self.shutdown_gate.check_open()
    }

    /// Returns whether anything changed since the newest snapshot; true without one. Commits
    /// accepted data for that.
    ///
    /// # Errors
    /// Errors of [`FileSystem::make_durable`]; `Damaged`.
    pub(crate) fn differs_from_newest_snapshot(&self) -> Result<bool> {
        let _work = self.shutdown_gate.enter()?;
        if self.volume.is_dirty() {
            self.commit_all()?;
        }
        self.volume.differs_from_newest_snapshot()
    }

    /// Opens the snapshot of this name as a read-only file system. The snapshot must not be removed
    /// while it is in use.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub(crate) fn open_snapshot(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        FileSystem::new(self.volume.moment(name)?, self.environment.clone(), self.name_key, self.options)
    }

    /// Opens a pinned version as a read-only file system. The pin has to be held as long as it is
    /// in use.
    ///
    /// # Errors
    /// Errors of reading its root.
    pub(crate) fn open_pinned(&self, pinned: &Pinned) -> Result<Arc<FileSystem>> {
        FileSystem::new(self.volume.pinned_moment(pinned), self.environment.clone(), self.name_key, self.options)
    }

    /// Returns the readable snapshots, the oldest first, with their numbers and the bytes that
    /// removing each one alone would free.
    pub(crate) fn snapshots(&self) -> Result<Vec<(u64, SnapshotValue, u64)>> {
        let mut all = Vec::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            all.push((id, snapshot, self.volume.held_by_snapshots(&|other| other == id)?));
        }
        Ok(all)
    }

    /// Returns the readable snapshots with unique names, the oldest first.
    pub fn list_snapshots(&self) -> Result<Vec<SnapshotInfo>> {
        // Names are unique, but a key holder can write duplicates: the newest one counts.
        let mut newest = BTreeMap::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            newest.insert(snapshot.name, (id, snapshot.time));
        }
        let kept = |(name, (id, time))| SnapshotInfo { id: SnapshotId(id), name, time };
        let mut all: Vec<SnapshotInfo> = newest.into_iter().map(kept).collect();
        all.sort_unstable_by_key(|snapshot| snapshot.id);
        Ok(all)
    }

    /// Returns the id of the snapshot of this name.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn snapshot_named(&self, name: &[u8]) -> Result<SnapshotId> {
        self.volume.snapshot_named(name).map(|(id, _)| SnapshotId(id))
    }

    /// Returns a view of a snapshot. The snapshot may be removed already, which each request
    /// detects.
    pub fn snapshot_view(&self, id: SnapshotId) -> SnapshotView<'_> {
        SnapshotView::new(&self.volume, &self.name_key, id)
    }

    /// Removes the snapshots that `choose` selects from the existing ones. The removal is durable
    /// on return, but the space is freed later ([`FileSystem::finish_removals`]). No snapshot is
    /// taken or removed between the choice and the removal.
    ///
    /// # Errors
    /// Errors of `choose`, with nothing removed; `ReadOnly`, `NoSpace`, `Latched`; `Invalid` when
    /// the archive is being closed.
    pub(crate) fn remove_chosen_snapshots(&self, choose: Choice<'_>) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.check_snapshots_writable()?;
        self.volume.forget_snapshots(choose)?;
        self.commit_all()
    }

    /// Removes snapshots by their ids.
    ///
    /// # Errors
    /// `NotFound` when one of them does not exist.
    #[cfg(test)]
    pub(crate) fn remove_snapshots(&self, ids: &[u64]) -> Result<()> {
        self.remove_chosen_snapshots(&mut |all| {
            let is_there = |id: &u64| all.iter().any(|(other, _)| other == id);
            if ids.iter().all(is_there) { Ok(ids.to_vec()) } else { Err(Error::NotFound) }
        })
    }

    fn check_snapshots_writable(&self) -> Result<()> {
        match self.volume.read_only() {
            true => Err(Error::ReadOnly("the archive is opened for reading".into())),
            false => Ok(()),
        }
    }

    /// Frees the space that only removed snapshots used, in steps; `go_on` is called before each.
    /// The background work of a mount does the rest.
    pub(crate) fn finish_removals(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.finish_removals_in(go_on)
    }

    /// Frees like [`Self::finish_removals`], for a caller inside the shutdown gate.
    pub(in crate::fs) fn finish_removals_in(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        while self.volume.removal_step()? {
            self.shutdown_gate.check_open()?;
            go_on()?;
        }
        Ok(())
    }
}
