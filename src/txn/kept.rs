//! The snapshots that a version has, and their trees (specification section 8).

use std::ops::ControlFlow;

use super::state::State;
use crate::btree::{NodeStore, Tree};
use crate::error::Result;
use crate::format::values::SnapshotValue;
use crate::format::{Key, TreeId, kind};

/// All snapshots by ascending id; one with an empty name is being destroyed and its tree must not be read.
pub(super) fn snapshots_of(state: &State, store: &NodeStore) -> Result<Vec<(u64, SnapshotValue)>> {
    let mut found = Vec::new();
    state.trees.snapshots.scan(store, Key::MIN, Key::MAX, &mut |key, value| {
        // Strays are passed by, whatever they say (specification 6.2).
        if key.kind == kind::SNAPSHOT && key.sub == 0 {
            found.push((key.object, SnapshotValue::decode(value)?));
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

/// The live tree as the snapshot keeps it. The snapshot must not be destroyed while the tree is in use.
pub(super) fn snapshot_tree(snapshot: &SnapshotValue) -> Tree {
    Tree::from_root(TreeId::Live, &snapshot.root)
}
