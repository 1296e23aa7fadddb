//! Snapshots: moments of the whole tree that are kept.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::format::values::SnapshotValue;
use crate::fs::{FileSystem, KeptSnapshot, SnapshotId, SnapshotView};

impl FileSystem {
    /// Keeps what is there now under a name; durable when it returns. What was deleted before is not kept with it, but for files that are still open.
    ///
    /// # Errors
    /// `Exists` when another one has the name, `Invalid` for what is no name and when the archive is being closed, `ReadOnly`, `NoSpace`, `Latched`.
    pub(crate) fn take_snapshot(&self, name: &[u8]) -> Result<()> {
        let _work = self.closing.work()?;
        if self.volume.read_only() {
            return Err(Error::ReadOnly("the archive is opened for reading".into()));
        }
        while self.reclaim.step()? {
            self.closing.check()?;
        }
        // Most of what is staged is written by this, so that writers wait for no more than for an fsync.
        self.commit_all()?;
        self.repack.noted(&self.closing)?;
        self.volume.take_snapshot(name).map(drop).map_err(|error| self.told(error))
    }

    /// Those that can be read, the oldest first, with their numbers and the bytes that removing each one alone would free.
    pub(crate) fn snapshots(&self) -> Result<Vec<(u64, SnapshotValue, u64)>> {
        let mut all = Vec::new();
        for (id, snapshot) in self.volume.readable_snapshots()? {
            all.push((id, snapshot, self.volume.held_by_snapshot(id)?));
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

    /// Removes snapshots: durable when it returns, though what they alone showed is still to be freed ([`FileSystem::finish_removals`]).
    ///
    /// # Errors
    /// `NotFound` when one of them is gone, with those before it removed.
    pub(crate) fn remove_snapshots(&self, ids: &[u64]) -> Result<()> {
        let _work = self.closing.work()?;
        for id in ids {
            self.volume.forget_snapshot(*id)?;
        }
        self.commit_all()
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
