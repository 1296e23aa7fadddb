//! Kept roots (specification section 8): taking, listing and removing snapshots, reading them, and
//! the space that they hold.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::{Pinned, Start, Volume};
use crate::btree::{Finger, Tree};
use crate::error::{Error, Result, SnapshotStats};
use crate::format::record::{CommitRecord, Roots};
use crate::format::values::{DeadValue, SnapshotValue};
use crate::format::{BLOCK, Generation, Key, Run, Timestamp, TreeId, kind};
use crate::pager::space::SpaceMap;
use crate::txn::commit::{CommitReason, Session};
use crate::txn::operation::{Operation, following, reference_count};
use crate::txn::recovery::OpenedRecord;
use crate::txn::state::{
    Counters, State, Trees, View, before, check_name, is_being_removed, snapshot_tree, snapshots_of,
};

pub(crate) type Choice<'a> = &'a mut dyn FnMut(&[(u64, SnapshotValue)]) -> Result<Vec<u64>>;

/// Dead-list entries handled by one operation.
const REMOVAL_STEP: usize = 256;

/// Dead-list entries read in one version when they are summed up.
const SPACE_STEP: usize = 4096;

/// Nodes that are read of it are kept in so many bytes, a quarter of this.
const MOMENT_MEMORY: u64 = 32 << 20;

impl Volume {
    /// Creates a snapshot of the present content under `name`, durable on return. Returns its id.
    /// Errors: `Exists` when another snapshot has the name, `Invalid` for an invalid name,
    /// `ReadOnly`, `NoSpace`, `WriteFailed`.
    ///
    /// # After an error
    /// A commit that fails after the publication may stay in flight (TXN-9), or leave its changes
    /// to the next one. Either would make a snapshot durable that the caller believes refused. So
    /// the name is cleared before the error is returned, by an operation that may use the reserve,
    /// as it frees. It follows the publication, under the lock of snapshots: every later commit but
    /// the one in flight contains both, and a retry finds the name unused. After a crash before
    /// such a commit, or after `WriteFailed`, the snapshot may be there as a whole.
    pub(crate) fn take_snapshot(&self, name: &[u8]) -> Result<u64> {
        check_name(name)?;
        self.committer.check_writable()?;
        self.committer.open_session()?;
        let mut removals = self.snapshots.lock();
        if self.snapshots()?.iter().any(|(_, other)| other.name == name) {
            return Err(Error::Exists);
        }
        let id = self.keep(name, None)?;
        let committed = self.commit();
        if committed.is_err() {
            match self.writer.lock().operate(true, |operation| operation.forget_snapshots(&[id])) {
                Ok(()) => *removals = true,
                Err(error) => tracing::warn!(%error, "a snapshot that is not durable stays listed"),
            }
        }
        self.look_again();
        committed.map(|_| id)
    }

    /// Recreates a snapshot from another file of this archive: keeps the present content with the
    /// name and time of `kept`. The name need not be unique. The next commit makes it durable.
    /// Errors: `ReadOnly`, `NoSpace`, `WriteFailed`.
    pub(crate) fn take_snapshot_again(&self, kept: &SnapshotValue) -> Result<()> {
        self.committer.check_writable()?;
        self.committer.open_session()?;
        let _removals = self.snapshots.lock();
        self.keep(&kept.name, Some(kept.time)).map(drop)
    }

    /// Creates a snapshot; the caller holds the lock of snapshots. `time` defaults to now. The next
    /// commit makes it durable.
    fn keep(&self, name: &[u8], time: Option<Timestamp>) -> Result<u64> {
        self.committer.as_leader(|chain| {
            // No operation may come between the commit and the record that keeps its root, so the
            // writers wait.
            let mut transaction = self.writer.lock();
            self.writer.mark_staged();
            self.committer.commit_locked(CommitReason::FreeSpace, chain, &mut transaction)?;
            let durable = self.durable();
            let root = durable.roots[TreeId::Live];
            transaction.operate(false, |operation| {
                let id = operation.counters.next_snapshot;
                let value = SnapshotValue {
                    generation: durable.generation,
                    time: time.unwrap_or_else(|| self.medium.environment.now()),
                    root,
                    inodes: operation.counters.inodes,
                    name: name.to_vec(),
                };
                operation.counters.next_snapshot = following(id)?;
                operation.counters.newest_snapshot = durable.generation;
                operation.counters.newest_snapshot_id = id;
                operation.put_snapshot(id, &value)?;
                Ok(id)
            })
        })
    }

    /// Refreshes the value of [`Self::snapshot_use`]; taking and removing snapshots does so too.
    /// Errors: `Damaged`, errors of the host.
    pub(crate) fn look_at_snapshots(&self) -> Result<()> {
        let all = self.readable_snapshots()?;
        let newest = all.last().map(|(_, snapshot)| snapshot.time);
        *self.snapshot_use.lock() = Some(SnapshotStats { count: all.len() as u64, newest });
        Ok(())
    }

    fn look_again(&self) {
        if self.look_at_snapshots().is_err() {
            *self.snapshot_use.lock() = None;
        }
    }

    pub(crate) fn snapshot_use(&self) -> Option<SnapshotStats> {
        *self.snapshot_use.lock()
    }

    /// Returns whether the durable live tree differs from the newest snapshot; true without a
    /// snapshot. The record of the snapshot itself does not count, nor do later commits without
    /// changes: the pointer to the root changes only with an operation that changes the tree below
    /// it (TREE-1).
    pub(crate) fn differs_from_newest_snapshot(&self) -> Result<bool> {
        let all = self.readable_snapshots()?;
        let live = self.durable().roots[TreeId::Live];
        Ok(all.last().is_none_or(|(_, snapshot)| snapshot.root != live))
    }

    /// Returns all snapshots by ascending id. A snapshot with an empty name is being removed and
    /// its tree must not be read.
    pub(crate) fn snapshots(&self) -> Result<Vec<(u64, SnapshotValue)>> {
        snapshots_of(&self.state().trees.snapshots, &self.medium.store)
    }

    pub(crate) fn readable_snapshots(&self) -> Result<Vec<(u64, SnapshotValue)>> {
        let mut all = self.snapshots()?;
        all.retain(|(_, snapshot)| !is_being_removed(snapshot));
        Ok(all)
    }

    /// Returns the id and record of the readable snapshot of this name. Errors: `NotFound` when
    /// there is none.
    pub(crate) fn snapshot_named(&self, name: &[u8]) -> Result<(u64, SnapshotValue)> {
        // Writers keep names unique, but any holder of the key can write duplicates; the newest
        // counts.
        let found = self.readable_snapshots()?.into_iter().rev().find(|(_, snapshot)| snapshot.name == name);
        found.ok_or(Error::NotFound)
    }

    /// Returns the tree of the snapshot with this id. `state` must be held as long as the tree is
    /// used. Errors: `Stale` when that version has none, or only one that is being removed.
    pub(in crate::txn) fn snapshot_tree(&self, state: &State, id: u64) -> Result<Tree> {
        let key = Key::new(id, kind::SNAPSHOT, 0);
        let found = state.trees.snapshots.get(&self.medium.store, key, SnapshotValue::decode)?;
        let snapshot = found.filter(|snapshot| !is_being_removed(snapshot)).ok_or(Error::Stale)?;
        Ok(snapshot_tree(&snapshot))
    }

    pub(crate) fn has_begun_removals(&self) -> Result<bool> {
        Ok(self.snapshots()?.iter().any(|(_, snapshot)| is_being_removed(snapshot)))
    }

    /// Replaces the live tree of a read-only volume by the snapshot of this name, without the log,
    /// which belongs to the live tree. Call before any read. Errors: `NotFound` when there is none
    /// of this name.
    pub(crate) fn show_snapshot(&self, name: &[u8]) -> Result<()> {
        let (_, snapshot) = self.snapshot_named(name)?;
        self.take_logged();
        let versions = &self.medium.versions;
        let base = versions.published();
        let trees = Trees { live: snapshot_tree(&snapshot), ..base.trees.clone() };
        let counters = Counters { inodes: snapshot.inodes, ..base.counters };
        let _first = self.before_replay.set(base.clone());
        versions.publish(Arc::new(State { trees, counters, sequence: base.sequence + 1 }));
        Ok(())
    }

    /// Clears the names of the snapshots that `choose` selects, after which they cannot be read;
    /// [`Self::removal_step`] frees their space. The next commit makes it durable. No snapshot is
    /// taken or removed between the choice and the end; ids that do not exist are skipped. It is
    /// one operation, so that all of the names are removed or none (TXN-6), also after a crash: a
    /// retry by name would refuse the missing ones. Errors: that of `choose`, `NoSpace`; with
    /// nothing removed.
    pub(crate) fn forget_snapshots(&self, choose: Choice<'_>) -> Result<()> {
        let mut removals = self.snapshots.lock();
        let ids = choose(&self.readable_snapshots()?)?;
        if !ids.is_empty() {
            self.operate(2 * ids.len() as u64, true, |operation| operation.forget_snapshots(&ids))?;
            *removals = true;
        }
        self.look_again();
        Ok(())
    }

    /// Frees some pages that only snapshots without a name show, and removes the record of such a
    /// snapshot when nothing is left of it; returns whether there may be more to do. Resumes the
    /// removals of an interrupted session.
    pub(crate) fn removal_step(&self) -> Result<bool> {
        self.step_of(&mut self.snapshots.lock())
    }

    /// Like [`Self::removal_step`], for background work: returns false while another thread holds
    /// the lock of snapshots, or when damage stops the removal.
    pub(super) fn removal_step_aside(&self) -> Result<bool> {
        self.snapshots.try_lock().map_or(Ok(false), |mut removals| self.step_past_damage(&mut removals))
    }

    /// Like [`Self::removal_step`], for callers that need the space; returns false when damage
    /// stops the removal. Holders of the lock of snapshots wait neither for space nor for a file.
    pub(crate) fn removal_step_for_room(&self) -> Result<bool> {
        self.step_past_damage(&mut self.snapshots.lock())
    }

    fn step_past_damage(&self, removals: &mut bool) -> Result<bool> {
        self.step_of(removals).or_else(|error| match error {
            Error::Damaged(reason) => {
                tracing::warn!("a removed snapshot keeps its space: {reason}");
                *removals = false;
                Ok(false)
            }
            error => Err(error),
        })
    }

    /// `removals` is true while there may be unfinished removals.
    fn step_of(&self, removals: &mut bool) -> Result<bool> {
        *removals = *removals && self.has_begun_removals()?;
        if *removals {
            self.operate(2 * REMOVAL_STEP as u64, true, |operation| operation.remove_some_of_snapshot())?;
        }
        Ok(*removals)
    }
}

impl Operation<'_> {
    fn put_snapshot(&mut self, id: u64, snapshot: &SnapshotValue) -> Result<()> {
        self.change_of_snapshots();
        let key = Key::new(id, kind::SNAPSHOT, 0);
        self.trees.snapshots.insert(self.store, &mut self.global_edits, key, &snapshot.encode()).map(drop)
    }

    fn forget_snapshots(&mut self, ids: &[u64]) -> Result<()> {
        // Which one is newest and which one is before it, is asked within the operation.
        let mut all = snapshots_of(&self.trees.snapshots, self.store)?;
        for id in ids {
            let Ok(at) = all.binary_search_by_key(id, |(other, _)| *other) else { continue };
            let snapshot = &mut all[at].1;
            if is_being_removed(snapshot) {
                continue;
            }
            // The empty name says, also after a crash, that the tree is not whole any more.
            snapshot.name.clear();
            let unnamed = snapshot.clone();
            self.put_snapshot(*id, &unnamed)?;
            if self.counters.newest_snapshot_id == *id {
                // From now on pages that leave the live tree belong to the previous snapshot, if it
                // is old enough to show them, and otherwise to no snapshot.
                let (newest, generation) = before(&all, *id).unwrap_or((0, Generation(0)));
                self.counters.newest_snapshot = generation;
                self.counters.newest_snapshot_id = newest;
            }
        }
        Ok(())
    }

    /// Marks a change that no log entry can record, so that it needs a commit.
    fn change_of_snapshots(&mut self) {
        self.changed = true;
        self.needs_commit();
    }

    /// Moves or drops some dead-list entries of a snapshot that lost its name; its record goes
    /// last.
    fn remove_some_of_snapshot(&mut self) -> Result<()> {
        let all = snapshots_of(&self.trees.snapshots, self.store)?;
        let Some((id, _)) = all.iter().find(|(_, snapshot)| is_being_removed(snapshot)) else { return Ok(()) };
        self.change_of_snapshots();
        let older = before(&all, *id);
        let mut entries = Vec::new();
        let (from, to) = (Key::new(*id, kind::DEAD, 0), Key::new(*id, kind::DEAD, u64::MAX));
        self.trees.references.scan(self.store, from, to, &mut |key, value| {
            entries.push((key, DeadValue::decode(value)?));
            Ok(if entries.len() < REMOVAL_STEP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        for (key, dead) in &entries {
            self.trees.references.remove(self.store, &mut self.global_edits, *key)?;
            match older {
                Some((older, generation)) if dead.born <= generation => {
                    self.insert_dead(Key::new(older, kind::DEAD, key.sub), dead)?;
                }
                _ => self.drop_count(dead.run)?,
            }
        }
        if entries.len() < REMOVAL_STEP {
            let key = Key::new(*id, kind::SNAPSHOT, 0);
            self.trees.snapshots.remove(self.store, &mut self.global_edits, key)?;
        }
        Ok(())
    }
}

// ---- reading ----

/// Several searches in one version; searches near each other share a descent. Owns the version
/// together with the place in it, so that neither is used with another.
///
/// # Why a snapshot is whole while it is read
/// Its record is looked up in a published version, and that version is held as long as its tree is
/// used. Where the record has a name, no page that the tree reaches is free: pages that leave the
/// live tree go to a dead list. Removal of a snapshot clears the name by one operation and frees
/// pages by later ones.
///
/// Those operations follow the held version, so their pages stay as they are until it is released
/// (TXN-1). A later look-up of the record finds no name. So nothing has to be held between two
/// requests, and a stored file number keeps no blocks in use.
///
/// Nodes and chunks in memory are shared with readers of the live tree: they are identified by
/// address, generation and tag of their page, stored nodes never change (TREE-2), and the content
/// that such a pointer names never does (READ-2).
pub(crate) struct ReadView<'v> {
    volume: &'v Volume,
    state: Arc<State>,
    /// Tree of a snapshot, read in place of the version's live tree.
    kept: Option<Tree>,
    finger: Finger,
}

impl<'v> ReadView<'v> {
    pub(crate) fn of(volume: &'v Volume, state: Arc<State>) -> ReadView<'v> {
        ReadView { volume, state, kept: None, finger: Finger::default() }
    }

    /// Errors: `Stale` when it is gone, or its removal has begun.
    pub(crate) fn of_snapshot(volume: &'v Volume, id: u64) -> Result<ReadView<'v>> {
        let state = volume.state();
        let kept = Some(volume.snapshot_tree(&state, id)?);
        Ok(ReadView { volume, state, kept, finger: Finger::default() })
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    pub(crate) fn view(&self) -> View<'_> {
        let live = self.volume.view(&self.state);
        View { finger: Some(&self.finger), tree: self.kept.as_ref().unwrap_or(live.tree), ..live }
    }
}

// ---- read-only volumes of a snapshot or a pinned version of an open archive ----
//
// Such a volume uses the pages of that archive and has caches and a version of its own, which
// never changes. It pins no version of the archive. A snapshot needs no pin: as long as it has its
// name, neither its nodes nor the pages of its extents are freed (specification section 8).
//
// So the holder of the volume must prevent removal of the snapshot meanwhile. Where that cannot be
// guaranteed, [`Operation::require_snapshot`] checks within the operation itself.

impl Volume {
    /// The snapshot of this name as a volume that can only be read. Errors: `NotFound` when there
    /// is none of this name.
    pub(crate) fn snapshot_view(&self, name: &[u8]) -> Result<Arc<Volume>> {
        let (id, snapshot) = self.snapshot_named(name)?;
        let mut volume = self.beside(&snapshot);
        volume.snapshot = Some(id);
        Ok(Arc::new(volume))
    }

    /// Returns the pinned version as a read-only volume. The caller holds the pin as long as the
    /// volume is in use.
    pub(crate) fn pinned_view(&self, pinned: &Pinned) -> Arc<Volume> {
        Arc::new(self.beside(pinned.content()))
    }

    fn beside(&self, snapshot: &SnapshotValue) -> Volume {
        let durable = self.durable();
        // The other trees are those of the archive, which go on changing: they are not used here.
        let mut roots = Roots::default();
        roots[TreeId::Live] = snapshot.root;
        let record = CommitRecord {
            generation: snapshot.generation,
            time: snapshot.time,
            closed: true,
            roots,
            next_ino: durable.next_ino,
            inodes: snapshot.inodes,
            total_blocks: durable.total_blocks,
            ..CommitRecord::default()
        };
        let pager = self.medium.pager.clone();
        let start = Start {
            // Nothing is allocated.
            space: SpaceMap::new(record.total_blocks, 0, false, pager.reserved()),
            next_generation: snapshot.generation.next(),
            record,
            memory: MOMENT_MEMORY,
            session: Session { id: durable.session, header_sequence: durable.header_sequence, read_only: true },
            opened: OpenedRecord::default(),
        };
        Volume::assemble(pager, self.medium.environment.clone(), start)
    }

    /// Returns whether `other` has the same pages: both are views of one open archive.
    pub(crate) fn shares_pages_with(&self, other: &Volume) -> bool {
        Arc::ptr_eq(&self.medium.pager, &other.medium.pager)
    }
}

impl Operation<'_> {
    /// Checks, within this operation, that the snapshot that `view` shows still has its name.
    /// Errors: `Stale` when it has not, or `view` shows no snapshot.
    pub(crate) fn require_snapshot(&self, view: &Volume) -> Result<()> {
        let id = view.snapshot.ok_or(Error::Stale)?;
        let found = self.trees.snapshots.get(self.store, Key::new(id, kind::SNAPSHOT, 0), SnapshotValue::decode)?;
        if found.is_some_and(|snapshot| !is_being_removed(&snapshot)) { Ok(()) } else { Err(Error::Stale) }
    }
}

// ---- the space that removal of a set of snapshots would free ----
//
// # Why the dead lists suffice
// A page that neither a remaining snapshot nor the live tree shows is named by entries of dead
// lists alone: as many as its count. Such an entry, on the list of snapshot s with birth b, stands
// for a reference in s and in every older snapshot whose generation is b or later; generations
// rise with ids.
//
// Each removal moves the entry to the snapshot before, or drops it when that is older than b
// (specification section 8). So when a whole set is removed, in any order, the entry moves to the
// newest remaining snapshot before s. It is dropped exactly when s is removed and b is later than
// that snapshot, or there is none. A page is freed when all entries of its count are dropped.
//
// A removal that has begun and not ended continues anyway: its snapshot is in every set, and pages
// that are freed without the others are not counted.

/// Dropped entries of a page with several counts: all that the set drops, and those dropped in any
/// case.
#[derive(Default)]
struct Dropped {
    all: u64,
    anyway: u64,
}

#[derive(Default)]
struct Sum {
    blocks: u64,
    shared: BTreeMap<Run, Dropped>,
}

impl Volume {
    /// Returns the bytes of the pages that only snapshots of this set show, one or several of them.
    /// The result is an estimate: each piece of a list is read in the version current at that time,
    /// so that no freed page waits for the end.
    pub(crate) fn held_by_snapshots(&self, is_in: &dyn Fn(u64) -> bool) -> Result<u64> {
        let mut sum = Sum::default();
        for (id, snapshot) in self.snapshots()? {
            if is_being_removed(&snapshot) || is_in(id) {
                self.add_list(id, is_in, &mut sum)?;
            }
        }
        let (state, store) = (self.state(), &self.medium.store);
        for (run, dropped) in sum.shared {
            let count = reference_count(&state.trees.references, store, run.address)?;
            if dropped.anyway < count && count <= dropped.all {
                sum.blocks = sum.blocks.saturating_add(run.blocks);
            }
        }
        Ok(sum.blocks.saturating_mul(BLOCK))
    }

    fn add_list(&self, id: u64, is_in: &dyn Fn(u64) -> bool, sum: &mut Sum) -> Result<()> {
        let store = &self.medium.store;
        let (mut from, to) = (Key::new(id, kind::DEAD, 0), Key::new(id, kind::DEAD, u64::MAX));
        loop {
            let state = self.state();
            let trees = &state.trees;
            let all = snapshots_of(&trees.snapshots, store)?;
            let stays = stays_before(&all, id, is_in);
            let goes = all.iter().any(|(other, snapshot)| *other == id && is_being_removed(snapshot));
            let heir = before(&all, id).map(|(_, generation)| generation);
            let mut read = 0;
            trees.references.scan(store, from, to, &mut |key, value| {
                let DeadValue { run, born } = DeadValue::decode(value)?;
                let is_newer_than = |generation: Option<Generation>| generation.is_none_or(|it| born > it);
                if is_newer_than(stays) {
                    let anyway = goes && is_newer_than(heir);
                    match reference_count(&trees.references, store, run.address)? {
                        1 if anyway => {}
                        1 => sum.blocks = sum.blocks.saturating_add(run.blocks),
                        _ => {
                            let dropped = sum.shared.entry(run).or_default();
                            dropped.all += 1;
                            dropped.anyway += u64::from(anyway);
                        }
                    }
                }
                from.sub = key.sub.saturating_add(1);
                read += 1;
                Ok(if read < SPACE_STEP { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            })?;
            if read < SPACE_STEP {
                return Ok(());
            }
        }
    }
}

/// The generation of the newest one before `id` that is neither in the set nor being removed.
fn stays_before(all: &[(u64, SnapshotValue)], id: u64, is_in: &dyn Fn(u64) -> bool) -> Option<Generation> {
    let stays = all.iter().rev().find(|(other, one)| *other < id && !is_being_removed(one) && !is_in(*other));
    stays.map(|(_, snapshot)| snapshot.generation)
}
