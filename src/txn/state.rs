//! Published versions of the archive, and which of them readers still hold.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::btree::Tree;
use crate::format::record::CommitRecord;
use crate::format::{Generation, TreeId};

/// The trees that operations change; the space tree belongs to commits alone.
#[derive(Clone)]
pub(crate) struct Trees {
    pub(crate) live: Tree,
    pub(crate) references: Tree,
    pub(crate) snapshots: Tree,
    pub(crate) history: Tree,
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
}

/// One published version; holding it pins every block that it can see.
pub(crate) struct State {
    pub(crate) trees: Trees,
    pub(crate) counters: Counters,
    /// Number of the operation that published it, ascending.
    pub(crate) sequence: u64,
}

impl State {
    pub(super) fn of_record(record: &CommitRecord) -> State {
        let tree = |id: TreeId| Tree::from_root(id, &record.roots[id as usize - 1]);
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
            },
            sequence: 1,
        }
    }

    /// The live tree's records in use.
    pub(crate) fn inodes(&self) -> u64 {
        self.counters.inodes
    }
}

/// Reader epochs: a version is in use as long as somebody holds its `Arc`, so reading costs no bookkeeping.
pub(super) struct Epochs(Mutex<VecDeque<(u64, Weak<State>)>>);

impl Epochs {
    pub(super) fn new(first: &Arc<State>) -> Epochs {
        Epochs(Mutex::new(VecDeque::from([(first.sequence, Arc::downgrade(first))])))
    }

    /// To be called before the version is published.
    pub(super) fn add(&self, state: &Arc<State>) {
        self.0.lock().push_back((state.sequence, Arc::downgrade(state)));
    }

    /// Sequence of the oldest version that somebody holds; the published one always is held.
    pub(super) fn oldest(&self) -> u64 {
        let mut states = self.0.lock();
        // A version that is published no more and that nobody holds can never be taken again.
        while states.len() > 1 && states.front().is_some_and(|(_, state)| state.strong_count() == 0) {
            states.pop_front();
        }
        states.front().map_or(0, |(sequence, _)| *sequence)
    }
}
