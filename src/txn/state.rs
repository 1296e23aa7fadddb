//! Versions of the archive: the published one, versions that readers hold, and read access to their
//! trees.

use std::collections::VecDeque;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use crate::btree::{
    DifferenceVisitor, DifferenceWalk, Finger, LostVisitor, NodeStore, RangeVisitor, ScanVisitor, Tree,
};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::{BackupOrigin, CommitRecord};
use crate::format::values::SnapshotValue;
use crate::format::{Generation, Key, MAX_NAME, TreeId, kind};
use crate::pager::Pager;

/// The trees that operations change; the space tree belongs to commits alone.
#[derive(Clone)]
pub(crate) struct Trees {
    pub(crate) live: Tree,
    pub(crate) references: Tree,
    pub(crate) snapshots: Tree,
    pub(crate) history: Tree,
}

impl Trees {
    /// Each tree with the number that it has in a record.
    pub(super) fn each(&self) -> [(&Tree, TreeId); 4] {
        [
            (&self.live, TreeId::Live),
            (&self.references, TreeId::References),
            (&self.snapshots, TreeId::Snapshots),
            (&self.history, TreeId::History),
        ]
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    pub(crate) next_ino: u64,
    pub(crate) inodes: u64,
    pub(crate) next_dead: u64,
    pub(crate) next_snapshot: u64,
    pub(crate) newest_snapshot: Generation,
    pub(crate) newest_snapshot_id: u64,
    /// Origin of a backup's content; only an incremental backup carries it on.
    pub(crate) origin: Option<BackupOrigin>,
}

impl Counters {
    fn of_record(record: &CommitRecord) -> Counters {
        Counters {
            next_ino: record.next_ino,
            inodes: record.inodes,
            next_dead: record.next_dead,
            next_snapshot: record.next_snapshot,
            newest_snapshot: record.newest_snapshot,
            newest_snapshot_id: record.newest_snapshot_id,
            origin: record.origin,
        }
    }

    /// Returns a record with these counters and nothing else.
    pub(super) fn to_record(self) -> CommitRecord {
        CommitRecord {
            next_ino: self.next_ino,
            inodes: self.inodes,
            next_dead: self.next_dead,
            next_snapshot: self.next_snapshot,
            newest_snapshot: self.newest_snapshot,
            newest_snapshot_id: self.newest_snapshot_id,
            origin: self.origin,
            ..CommitRecord::default()
        }
    }
}

/// One published version; holding it pins every block that it can see.
pub(crate) struct State {
    pub(crate) trees: Trees,
    pub(crate) counters: Counters,
    /// Number of the operation that published it, ascending.
    pub(crate) sequence: u64,
}

impl State {
    fn of_record(record: &CommitRecord) -> State {
        let tree = |id: TreeId| Tree::from_root(id, &record.roots[id]);
        State {
            trees: Trees {
                live: tree(TreeId::Live),
                references: tree(TreeId::References),
                snapshots: tree(TreeId::Snapshots),
                history: tree(TreeId::History),
            },
            counters: Counters::of_record(record),
            sequence: 1,
        }
    }

    /// Releases the memory of nodes that a commit wrote: the trees refer to them by pointer again.
    /// The content and the number stay.
    pub(super) fn without_written_nodes(&self) -> State {
        let mut trees = self.trees.clone();
        trees.live.forget_written();
        trees.references.forget_written();
        trees.snapshots.forget_written();
        trees.history.forget_written();
        State { trees, counters: self.counters, sequence: self.sequence }
    }

    pub(crate) fn inodes(&self) -> u64 {
        self.counters.inodes
    }
}

/// Published version, newest durable record, and versions that readers hold. Nothing else is
/// locked, read or written while its lock is held.
pub(super) struct Versions {
    published: ArcSwap<State>,
    /// A version is in use as long as its `Arc` is held, so reading costs no bookkeeping.
    held: Mutex<HeldVersions>,
    durable: ArcSwap<CommitRecord>,
    open_generation: AtomicU64,
}

/// Versions in the order of publication. The front is in use, or the only one.
struct HeldVersions {
    versions: VecDeque<(u64, Weak<State>)>,
    /// Length at which released versions behind the front are removed: one that is held for long
    /// must not keep an entry of each later one.
    prune_at: usize,
}

impl HeldVersions {
    fn new(first: &Arc<State>) -> HeldVersions {
        let mut held = HeldVersions { versions: VecDeque::new(), prune_at: 1024 };
        held.add(first);
        held
    }

    fn add(&mut self, state: &Arc<State>) {
        if self.versions.len() >= self.prune_at {
            self.versions.retain(|(_, state)| state.strong_count() > 0);
            self.prune_at = (2 * self.versions.len()).max(1024);
        }
        self.versions.push_back((state.sequence, Arc::downgrade(state)));
    }
}

impl Versions {
    /// `record` is durable; the transaction that takes operations is `open`.
    pub(super) fn new(record: CommitRecord, open: Generation) -> Versions {
        let first = Arc::new(State::of_record(&record));
        Versions {
            held: Mutex::new(HeldVersions::new(&first)),
            published: ArcSwap::new(first),
            durable: ArcSwap::from_pointee(record),
            open_generation: AtomicU64::new(open.0),
        }
    }

    /// The version that is published now. Never waits.
    pub(super) fn published(&self) -> Arc<State> {
        self.published.load_full()
    }

    pub(super) fn sequence(&self) -> u64 {
        self.published.load().sequence
    }

    pub(super) fn next_ino(&self) -> u64 {
        self.published.load().counters.next_ino
    }

    pub(super) fn publish(&self, state: Arc<State>) {
        // Before any reader can take it.
        self.held.lock().add(&state);
        self.published.store(state);
    }

    /// Returns the number of the oldest version in use; the published one always is.
    pub(super) fn oldest(&self) -> u64 {
        let held = &mut self.held.lock().versions;
        // A version that is neither published nor held can never be taken again.
        while held.len() > 1 && held.front().is_some_and(|(_, state)| state.strong_count() == 0) {
            held.pop_front();
        }
        held.front().map_or(0, |(sequence, _)| *sequence)
    }

    /// Returns the newest durable record for brief use: a long-held guard slows other readers.
    pub(super) fn durable(&self) -> Guard<Arc<CommitRecord>> {
        self.durable.load()
    }

    pub(super) fn set_durable(&self, record: CommitRecord) {
        self.durable.store(Arc::new(record));
    }

    pub(super) fn open_generation(&self) -> Generation {
        Generation(self.open_generation.load(Ordering::Acquire))
    }

    pub(super) fn set_open_generation(&self, generation: Generation) {
        self.open_generation.store(generation.0, Ordering::Release);
    }
}

pub(super) struct VolumeContext {
    pub(super) pager: Arc<Pager>,
    pub(super) store: NodeStore,
    pub(super) versions: Versions,
    pub(super) environment: Arc<dyn Environment>,
}

/// Publication mark: tells whether a state contains an operation, without a search of the trees.
///
/// # The argument
/// A publication is a cell that holds 0 until an operation that carries it is published, and the
/// number of that operation's state from then on. `OpenTransaction::publish` takes the number when
/// nothing can fail any more, and `announce` writes it into the cells before it has the state
/// stored. Both happen under the writers' lock, so that states are stored in the order of their
/// numbers. Nothing returns between the two stores.
///
/// - A failed operation leaves its cells at 0, whether it failed itself, found no space for its
///   nodes, or was the flush of a commit that was given up. It never counts as done, and another
///   operation may carry the same cell. A crash leaves neither cells nor callers that wait for
///   them.
/// - A holder of a state of this number or a later one finds the number in the cell. It was written
///   before that state was stored; storing releases and loading acquires (each is a sequentially
///   consistent exchange of `ArcSwap`). So the cell itself needs no order of its own.
/// - A reader of the cell between the two stores, or a holder of an older state, has a state of a
///   lower number: "not yet" is true of that state.
/// - A published operation is never undone: the cell is written once, and later states have higher
///   numbers. A state that a commit stores again (`OpenTransaction::forget_written`) has the same
///   trees and the same number.
/// - The result of an operation that changed nothing is true of the state that it began with, whose
///   number its cells get. A caller that loaded that state earlier may see "not yet", and sees the
///   same content in it.
///
/// So `is_in` is exact for every state, and costs one load.
#[derive(Clone, Debug, Default)]
pub(crate) struct Publication(Arc<AtomicU64>);

impl Publication {
    pub(crate) fn is_in(&self, state: &State) -> bool {
        (1..=state.sequence).contains(&self.0.load(Ordering::Relaxed))
    }

    /// Returns whether an operation that carried this was published; under the writers' lock, the
    /// present state then contains it.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed) > 0
    }

    /// Writes the number into the cells of an operation that cannot fail any more, and then stores
    /// its state.
    pub(super) fn announce(carried: &[Publication], sequence: u64, store: impl FnOnce()) {
        carried.iter().for_each(|publication| publication.0.store(sequence, Ordering::Relaxed));
        store();
    }
}

/// Read access to one version of the live tree; the same for readers and inside an operation.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) tree: &'a Tree,
    pub(crate) store: &'a NodeStore,
    /// Belongs to this version of the tree.
    pub(crate) finger: Option<&'a Finger>,
}

impl<'a> View<'a> {
    pub(crate) fn get<R>(&self, key: Key, f: impl FnOnce(&[u8]) -> Result<R>) -> Result<Option<R>> {
        match self.finger {
            Some(finger) => self.tree.get_near(self.store, finger, key, f),
            None => self.tree.get(self.store, key, f),
        }
    }

    pub(crate) fn floor<R>(&self, key: Key, f: impl FnOnce(Key, &[u8]) -> Result<R>) -> Result<Option<R>> {
        match self.finger {
            Some(finger) => self.tree.floor_near(self.store, finger, key, f),
            None => self.tree.floor(self.store, key, f),
        }
    }

    pub(crate) fn scan(&self, from: Key, to: Key, f: &mut ScanVisitor<'_>) -> Result<()> {
        match self.finger {
            Some(finger) => self.tree.scan_near(self.store, finger, from, to, f),
            None => self.tree.scan(self.store, from, to, f),
        }
    }

    pub(crate) fn fences_before(&self, key: Key, f: &mut dyn FnMut(Key) -> ControlFlow<()>) -> Result<()> {
        self.tree.fences_before(self.store, key, f)
    }

    pub(crate) fn differences(&self, older: &View<'_>, f: &mut DifferenceVisitor<'_>) -> Result<()> {
        self.tree.differences(older.tree, self.store, f)
    }

    pub(crate) fn changed_since(&self, since: Generation, f: &mut RangeVisitor<'_>) -> Result<()> {
        self.tree.changed_since(self.store, since, f)
    }

    pub(crate) fn prefetch(&self, ranges: &[(Key, Key)]) -> Result<()> {
        self.tree.prefetch(self.store, ranges)
    }

    /// Returns the differences as a cursor; without an older version, every record of this one.
    pub(crate) fn differences_since(&self, older: Option<&View<'a>>) -> DifferenceCursor<'a> {
        DifferenceCursor { walk: self.tree.differences_since(older.map(|older| older.tree)), store: self.store }
    }

    /// Every entry that can still be read; `lost` gets each node that cannot.
    pub(crate) fn scan_surviving(
        &self,
        f: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
        lost: &mut LostVisitor<'_>,
    ) -> Result<()> {
        self.tree.scan_surviving(self.store, f, lost)
    }
}

#[derive(Debug)]
pub(crate) struct Difference {
    pub(crate) key: Key,
    pub(crate) old: Option<Vec<u8>>,
    pub(crate) new: Option<Vec<u8>>,
}

/// Cursor over the differences of two versions, by ascending key.
pub(crate) struct DifferenceCursor<'a> {
    walk: DifferenceWalk<'a>,
    store: &'a NodeStore,
}

impl DifferenceCursor<'_> {
    /// Up to `most` further records; fewer only at the end.
    pub(crate) fn batch(&mut self, most: usize) -> Result<Vec<Difference>> {
        let mut batch = Vec::new();
        self.walk.resume(self.store, &mut |key, old, new| {
            batch.push(Difference { key, old: old.map(<[u8]>::to_vec), new: new.map(<[u8]>::to_vec) });
            Ok(if batch.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
        })?;
        Ok(batch)
    }
}

/// Returns all snapshots of the tree of snapshots, by ascending id; one with an empty name is being
/// removed and its tree must not be read.
pub(super) fn snapshots_of(snapshots: &Tree, store: &NodeStore) -> Result<Vec<(u64, SnapshotValue)>> {
    let mut found = Vec::new();
    snapshots.scan(store, Key::MIN, Key::MAX, &mut |key, value| {
        // Stray records are skipped regardless of their content (specification 6.2).
        if key.kind == kind::SNAPSHOT && key.sub == 0 {
            found.push((key.object, SnapshotValue::decode(value)?));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

/// Id and generation of the newest one before `id` that is not being removed.
pub(super) fn before(all: &[(u64, SnapshotValue)], id: u64) -> Option<(u64, Generation)> {
    let older = all.iter().rev().find(|(other, snapshot)| *other < id && !is_being_removed(snapshot));
    older.map(|(older, snapshot)| (*older, snapshot.generation))
}

pub(super) fn is_being_removed(snapshot: &SnapshotValue) -> bool {
    snapshot.name.is_empty()
}

/// Returns the live tree as the snapshot keeps it. The snapshot must not be removed while the tree
/// is in use.
pub(super) fn snapshot_tree(snapshot: &SnapshotValue) -> Tree {
    Tree::from_root(TreeId::Live, &snapshot.root)
}

/// Rejects invalid snapshot names: a name may become that of a directory.
pub(super) fn check_name(name: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(Error::invalid("the name of a snapshot has 1 to 255 bytes"));
    }
    if name == b"." || name == b".." || name.iter().any(|&byte| byte == b'/' || byte == 0) {
        return Err(Error::invalid("the name of a snapshot has no slash and no NUL, and is neither '.' nor '..'"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_versions_are_forgotten_while_an_older_one_is_held() {
        let versions = Versions::new(CommitRecord::default(), Generation(1));
        let oldest = versions.published();
        for sequence in 2..100_000 {
            let Versions { published, .. } = &versions;
            let State { trees, counters, .. } = &**published.load();
            let next = State { trees: trees.clone(), counters: *counters, sequence };
            versions.publish(Arc::new(next));
        }
        assert!(versions.held.lock().versions.len() < 2048);
        assert_eq!(versions.oldest(), oldest.sequence);
        drop(oldest);
        assert_eq!(versions.oldest(), 99_999);
    }
}
