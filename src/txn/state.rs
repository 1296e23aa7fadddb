//! Published versions of the archive, and which of them readers still hold.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use arc_swap::{ArcSwap, Guard};
use parking_lot::Mutex;

use crate::btree::Tree;
use crate::format::record::{BackupOrigin, CommitRecord};
use crate::format::{Generation, TreeId};

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

/// Counters that are part of a version.
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
            counters: Counters {
                next_ino: record.next_ino,
                inodes: record.inodes,
                next_dead: record.next_dead,
                next_snapshot: record.next_snapshot,
                newest_snapshot: record.newest_snapshot,
                newest_snapshot_id: record.newest_snapshot_id,
                origin: record.origin,
            },
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

    /// The live tree's records in use.
    pub(crate) fn inodes(&self) -> u64 {
        self.counters.inodes
    }
}

/// Published version, newest durable record, and versions that readers hold. Nothing else is
/// locked, read or written while its lock is held.
pub(super) struct Versions {
    published: ArcSwap<State>,
    /// A version is in use as long as its `Arc` is held, so reading costs no bookkeeping.
    held: Mutex<VecDeque<(u64, Weak<State>)>>,
    durable: ArcSwap<CommitRecord>,
    open_generation: AtomicU64,
}

impl Versions {
    /// `record` is durable; the transaction that takes operations is `open`.
    pub(super) fn new(record: CommitRecord, open: Generation) -> Versions {
        let first = Arc::new(State::of_record(&record));
        Versions {
            held: Mutex::new(VecDeque::from([(first.sequence, Arc::downgrade(&first))])),
            published: ArcSwap::new(first),
            durable: ArcSwap::from_pointee(record),
            open_generation: AtomicU64::new(open.0),
        }
    }

    /// The version that is published now. Never waits.
    pub(super) fn published(&self) -> Arc<State> {
        self.published.load_full()
    }

    /// The number of the version that is published now.
    pub(super) fn sequence(&self) -> u64 {
        self.published.load().sequence
    }

    pub(super) fn publish(&self, state: Arc<State>) {
        // Before any reader can take it.
        self.held.lock().push_back((state.sequence, Arc::downgrade(&state)));
        self.published.store(state);
    }

    /// Returns the number of the oldest version in use; the published one always is.
    pub(super) fn oldest(&self) -> u64 {
        let mut held = self.held.lock();
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

    /// The transaction that takes operations now.
    pub(super) fn open_generation(&self) -> Generation {
        Generation(self.open_generation.load(Ordering::Acquire))
    }

    pub(super) fn set_open_generation(&self, generation: Generation) {
        self.open_generation.store(generation.0, Ordering::Release);
    }
}
