//! Finds records in trees where no writer puts them, except in the tree of files (specification
//! 6.2): readers skip them.

use super::finding::{Finding, FindingKind, Severity};
use super::state::State;
use crate::btree::{NodeStore, Tree};
use crate::error::Result;
use crate::format::{Key, TreeId, kind};

/// Returns whether a key of this kind belongs to the tree. The tree of files is checked by the walk
/// over the files.
fn belongs(tree: TreeId, key: Key) -> bool {
    match (tree, key.kind) {
        (TreeId::Live, _) | (TreeId::References, kind::DEAD) => true,
        (TreeId::References, kind::REFERENCE) | (TreeId::History, kind::HISTORY) => key.object == 0,
        (TreeId::Snapshots, kind::SNAPSHOT) | (TreeId::Space, kind::SPACE) => key.sub == 0,
        _ => false,
    }
}

/// Reports each record that does not belong into its tree. Unreadable nodes are reported by the
/// page count.
pub(super) fn find_strays(
    store: &NodeStore,
    state: &State,
    space: &Tree,
    found: &mut dyn FnMut(Finding),
) -> Result<()> {
    let trees = &state.trees;
    for (tree, id) in [
        (&trees.references, TreeId::References),
        (&trees.snapshots, TreeId::Snapshots),
        (&trees.history, TreeId::History),
        (space, TreeId::Space),
    ] {
        let look = &mut |key: Key, _: &[u8]| {
            if !belongs(id, key) {
                let (number, Key { object, kind, sub }) = (id as u8, key);
                let text = format!("tree {number} has a record that does not belong there: ({object}, {kind}, {sub})");
                found(Finding::new(FindingKind::Record, Severity::Wrong, text));
            }
            Ok(())
        };
        tree.scan_surviving(store, look, &mut |_| Ok(()))?;
    }
    Ok(())
}
