//! One atomic change of the archive: works on its own copy of the trees, published whole or
//! dropped.

use std::ops::Range;

use super::log::{Changes, LoggedRecords};
use super::state::{Counters, Publication, State, Trees, View};
use crate::btree::{Edits, NodeStore};
use crate::error::{Error, Result};
use crate::format::log::DroppedRange;
use crate::format::values::Extent;
use crate::format::{Generation, Ino, Key, MAX_INO, Pointer, Run, Tag, kind};

/// The working copy of an operation; see `Volume::operate`.
pub(crate) struct Operation<'v> {
    pub(super) store: &'v NodeStore,
    pub(super) generation: Generation,
    pub(super) trees: Trees,
    pub(super) counters: Counters,
    /// Anything at all was changed: otherwise nothing is published.
    pub(super) changed: bool,
    /// Edits of the live tree: its superseded nodes may belong to a snapshot.
    pub(super) live_edits: Edits,
    /// Edits of the global trees, which no snapshot contains.
    pub(super) global_edits: Edits,
    /// Pages that this operation brings in.
    pub(super) adopted: Vec<(Run, Tag)>,
    /// Pages whose last reference this operation removed.
    pub(super) freed: Vec<Run>,
    /// Part of the commit itself: may use all space, including the reserve of commits.
    pub(super) of_commit: bool,
    /// Packed pages that lost some of their references.
    pub(super) stale: Vec<Pointer>,
    /// Cells that get the number of the state when the operation is published.
    pub(super) carried: Vec<Publication>,
    /// Changes to record in a log entry.
    pub(super) log: Changes,
}

impl<'v> Operation<'v> {
    pub(super) fn new(store: &'v NodeStore, generation: Generation, base: &State) -> Operation<'v> {
        Operation {
            store,
            generation,
            trees: base.trees.clone(),
            counters: base.counters,
            changed: false,
            live_edits: Edits::new(generation),
            global_edits: Edits::new(generation),
            adopted: Vec::new(),
            freed: Vec::new(),
            of_commit: false,
            stale: Vec::new(),
            carried: Vec::new(),
            log: Changes::default(),
        }
    }

    /// The live tree as changed so far.
    pub(crate) fn view(&self) -> View<'_> {
        View { tree: &self.trees.live, store: self.store, finger: None }
    }

    /// The open transaction: `born` of every new extent.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Inserts or replaces a record of the live tree; returns whether it was there.
    pub(crate) fn insert(&mut self, key: Key, value: &[u8]) -> Result<bool> {
        self.changed = true;
        self.log.record(key);
        self.trees.live.insert(self.store, &mut self.live_edits, key, value)
    }

    pub(crate) fn remove(&mut self, key: Key) -> Result<bool> {
        let removed = self.trees.live.remove(self.store, &mut self.live_edits, key)?;
        self.changed |= removed;
        self.log.record(key);
        Ok(removed)
    }

    /// A number never used before; counts the inode as in use.
    pub(crate) fn allocate_ino(&mut self) -> Result<Ino> {
        let ino = self.set_aside_inos(1)?;
        self.inode_made();
        Ok(ino)
    }

    /// Allocates `count` inode numbers and returns the first. They are never reused, even if
    /// unused; `inode_made` counts used ones.
    pub(crate) fn set_aside_inos(&mut self, count: u64) -> Result<Ino> {
        let first = self.counters.next_ino;
        match first.checked_add(count) {
            Some(next) if next <= MAX_INO + 1 => self.counters.next_ino = next,
            _ => return Err(Error::NoSpace("inode numbers are used up".into())),
        }
        self.changed = true;
        Ok(Ino(first))
    }

    /// A number that was set aside is in use now.
    pub(crate) fn inode_made(&mut self) {
        self.changed = true;
        self.counters.inodes = self.counters.inodes.saturating_add(1);
    }

    /// The inode's last record is gone.
    pub(crate) fn inode_gone(&mut self) {
        self.changed = true;
        self.counters.inodes = self.counters.inodes.saturating_sub(1);
    }

    /// Sets the publication when this operation is published.
    pub(crate) fn carry(&mut self, publication: &Publication) {
        debug_assert!(!publication.is_set(), "it was published before");
        self.carried.push(publication.clone());
    }

    /// Drops the dirty bytes of the range once this operation is published (specification 9.5).
    pub(crate) fn drop_staged(&mut self, ino: Ino, range: Range<u64>) {
        self.log.drop_range(DroppedRange { ino, start: range.start, end: range.end });
    }

    /// Marks the operation as durable by a commit only: it brings pages in, takes staged data into
    /// the trees, or makes changes that a log entry cannot express.
    pub(crate) fn needs_commit(&mut self) {
        self.log.need_commit();
    }

    /// Notes a page that loses some of its references in this operation, and may hold other files.
    pub(crate) fn note_stale(&mut self, page: &Pointer) {
        if self.stale.last() != Some(page) {
            self.stale.push(*page);
        }
    }

    /// Nodes that the next commit has to write because of this operation, net.
    pub(super) fn dirtied(&self) -> i64 {
        self.live_edits.dirtied + self.global_edits.dirtied
    }

    /// Moves nodes of the live tree that the newest snapshot still shows to its dead list instead
    /// of freeing them.
    pub(super) fn bury_snapshot_nodes(&mut self) -> Result<()> {
        let newest = self.counters.newest_snapshot;
        if newest == Generation(0) {
            return Ok(());
        }
        let (theirs, ours): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.live_edits.superseded).into_iter().partition(|node| {
                // A node that is not stored yet belongs to the commit in flight, which is newer
                // than any snapshot.
                node.stored.get().is_some_and(|pointer| pointer.generation <= newest)
            });
        self.live_edits.superseded = ours;
        for pointer in theirs.iter().filter_map(|node| node.stored.get()) {
            self.bury(pointer.run, pointer.generation)?;
        }
        Ok(())
    }
}

impl Operation<'_> {
    /// Applies the records and the counters to tree 1, and derives their effect on pages (LOG-2).
    /// Idempotent.
    ///
    /// # Errors
    /// `Damaged` where a record has no place, or does not decode: no writer continues with a part
    /// of them.
    pub(super) fn replay(&mut self, logged: &LoggedRecords) -> Result<()> {
        self.needs_commit();
        self.count(logged);
        let mut released: Vec<(Pointer, Generation)> = Vec::new();
        for (key, value) in &logged.records {
            if key.kind == kind::EXTENT {
                let old = self.view().get(*key, Extent::decode)?;
                let new = value.as_deref().map(Extent::decode).transpose()?;
                let name = |extent: &Extent| (extent.page, extent.born);
                if old.as_ref().map(name) != new.as_ref().map(name) {
                    if let Some(new) = &new {
                        self.share(&new.page, 1)?;
                    }
                    released.extend(old.as_ref().map(name));
                }
            }
            let _there = match value {
                Some(value) => self.insert(*key, value)?,
                None => self.remove(*key)?,
            };
        }
        // After all new references are counted, so that no page loses its last count in between.
        for (page, born) in released {
            self.release(&page, born)?;
            self.note_stale(&page);
        }
        Ok(())
    }

    /// Like [`Self::replay`], for read-only volumes. Skips records of a damaged node; that node is
    /// lost with all its records (LOG-6).
    pub(super) fn replay_read_only(&mut self, logged: &LoggedRecords) -> Result<()> {
        self.count(logged);
        let mut damage = Vec::new();
        for (key, value) in &logged.records {
            match self.trees.live.overlay(self.store, &mut self.live_edits, *key, value.as_deref()) {
                Err(Error::Damaged(reason)) => damage.push(reason),
                laid => laid?,
            }
        }
        if let Some(first) = damage.first() {
            tracing::warn!("records of the log that lie on what is damaged: {}, the first one: {first}", damage.len());
        }
        Ok(())
    }

    fn count(&mut self, logged: &LoggedRecords) {
        self.changed = true;
        self.counters.next_ino = self.counters.next_ino.max(logged.next_ino);
        self.counters.inodes = logged.inodes;
    }
}
