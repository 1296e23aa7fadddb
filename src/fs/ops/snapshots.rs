//! Snapshots: moments of the whole tree that are kept.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::values::SnapshotValue;
use crate::fs::{FileSystem, KeptSnapshot, SnapshotId, SnapshotView};
use crate::txn::{Choice, Pinned};

impl FileSystem {
    /// Keeps what is there now under a name; durable when it returns. What was deleted before is not kept with it, but for files that are still open, and for
    /// what is damaged or found no room to be reclaimed.
    ///
    /// # Errors
    /// `Exists` when another one has the name, `Invalid` for what is no name and when the archive is being closed, `ReadOnly`, `NoSpace`, `Latched`.
    pub(crate) fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        let _work = self.closing.work()?;
        self.check_snapshots_writable()?;
        self.reclaim.what_waits(&|| self.closing.check())?;
        // What is staged may take the place of packed files, so it is written before those are looked for. What came meanwhile, with what the repacking
        // changed, is written once more: so little is left to the commit for which writers wait that they wait for no more than for an fsync.
        self.commit_all()?;
        self.repack.noted(&self.closing)?;
        self.commit_all()?;
        self.volume.take_snapshot(name).map(drop).map_err(|error| self.told(error))
    }

    /// Pins what is there now, made durable for that.
    ///
    /// # Errors
    /// Those of a commit; `Invalid` when the archive is being closed.
    pub(crate) fn pin(&self) -> Result<Pinned> {
        let _work = self.closing.work()?;
        self.pin_at_work()
    }

    /// The same for somebody who holds [`FileSystem::work`], and longer than the pin.
    ///
    /// # Errors
    /// Those of a commit.
    pub(crate) fn pin_at_work(&self) -> Result<Pinned> {
        if !self.volume.read_only() {
            // So that little is left to the commit for which writers wait.
            self.commit_all()?;
        }
        self.volume.pin().map_err(|error| self.told(error))
    }

    /// Keeps the archive from being closed while the answer is there.
    ///
    /// # Errors
    /// `Invalid` when it is being closed.
    pub fn work(&self) -> Result<impl Drop + '_> {
        self.closing.work()
    }

    /// Long work asks now and then, so that closing does not wait for the rest of it.
    ///
    /// # Errors
    /// `Invalid` when the archive is being closed.
    pub fn check_closing(&self) -> Result<()> {
        self.closing.check()
    }

    /// Whether something was changed since the newest snapshot was taken; true without one. What was accepted is made durable for that.
    ///
    /// # Errors
    /// As [`FileSystem::make_durable`]; `Damaged`.
    pub(crate) fn differs_from_newest_snapshot(&self) -> Result<bool> {
        let _work = self.closing.work()?;
        if self.volume.is_dirty() {
            self.commit_all()?;
        }
        self.volume.differs_from_newest_snapshot()
    }

    /// What the snapshot of this name shows, as a file system of its own for reading. Nobody may remove the snapshot while it is in use.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub(crate) fn moment(&self, name: &[u8]) -> Result<Arc<FileSystem>> {
        FileSystem::new(self.volume.moment(name)?, self.environment.clone(), self.name_key, self.options)
    }

    /// What is pinned, as a file system of its own for reading. The pin has to be held as long as it is in use.
    ///
    /// # Errors
    /// Those of reading its root.
    pub(crate) fn pinned_moment(&self, pinned: &Pinned) -> Result<Arc<FileSystem>> {
        FileSystem::new(self.volume.pinned_moment(pinned), self.environment.clone(), self.name_key, self.options)
    }

    /// Those that can be read, the oldest first, with their numbers and the bytes that removing each one alone would free.
    pub(crate) fn snapshots(&self) -> Result<Vec<(u64, SnapshotValue, u64)>> {
        let mut all = Vec::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            all.push((id, snapshot, self.volume.held_by_snapshots(&|other| other == id)?));
        }
        Ok(all)
    }

    /// Those that a name leads to, the oldest first.
    pub fn kept_snapshots(&self) -> Result<Vec<KeptSnapshot>> {
        // Names are given once; whoever holds the key can write what they like, and the newest one counts.
        let mut newest = BTreeMap::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            newest.insert(snapshot.name, (id, snapshot.time));
        }
        let kept = |(name, (id, time))| KeptSnapshot { id: SnapshotId(id), name, time };
        let mut all: Vec<KeptSnapshot> = newest.into_iter().map(kept).collect();
        all.sort_unstable_by_key(|snapshot| snapshot.id);
        Ok(all)
    }

    /// The one of this name.
    ///
    /// # Errors
    /// `NotFound` when there is none.
    pub fn snapshot_named(&self, name: &[u8]) -> Result<SnapshotId> {
        self.volume.snapshot_named(name).map(|(id, _)| SnapshotId(id))
    }

    /// What a snapshot shows, beside the live tree. It may be gone already, which each request finds out.
    pub fn snapshot_view(&self, id: SnapshotId) -> SnapshotView<'_> {
        SnapshotView::new(&self.volume, &self.name_key, id)
    }

    /// Removes the snapshots that `choose` wants gone of those that there are: durable when it returns, though what they alone showed is still to be freed
    /// ([`FileSystem::finish_removals`]). Nobody takes or removes one between the choice and the removal.
    ///
    /// # Errors
    /// That of `choose`, with nothing removed; `ReadOnly`, `NoSpace`, `Latched`; `Invalid` when the archive is being closed.
    pub(crate) fn remove_chosen_snapshots(&self, choose: Choice<'_>) -> Result<()> {
        let _work = self.closing.work()?;
        self.check_snapshots_writable()?;
        self.volume.forget_snapshots(choose)?;
        self.commit_all()
    }

    /// The same of snapshots by their ids.
    ///
    /// # Errors
    /// `NotFound` when one of them is gone.
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

    /// Frees what removed snapshots alone showed, in steps, before each of which `go_on` is asked. What is left is done in the background of a mount.
    pub(crate) fn finish_removals(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let _work = self.closing.work()?;
        self.finish_removals_in(go_on)
    }

    /// By who works already.
    pub(in crate::fs) fn finish_removals_in(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        while self.volume.removal_step()? {
            self.closing.check()?;
            go_on()?;
        }
        Ok(())
    }
}
