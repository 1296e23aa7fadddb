//! The snapshots that a version has, and their trees (specification section 8).

use std::ops::ControlFlow;

use crate::btree::{NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::values::SnapshotValue;
use crate::format::{Generation, Key, MAX_NAME, TreeId, kind};

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
