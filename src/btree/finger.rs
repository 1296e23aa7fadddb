//! Finger search: starts at the leaf of the previous search, so that nearby keys need no descent.

use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::node::{Body, Bounds, Leaf, Node};
use super::{NodeStore, ScanVisitor, Tree, cursor};
use crate::error::Result;
use crate::format::Key;

/// Leaf of the previous search in one version of one tree; must not be used with another version
/// (TREE-1). Threads may share it; a thread that finds it locked descends from the root.
#[derive(Default)]
pub(crate) struct Finger(Mutex<Option<Arc<Node>>>);

impl Finger {
    fn leaf_of(&self, key: Key) -> Option<Arc<Node>> {
        let last = self.0.try_lock()?;
        last.as_ref().filter(|leaf| leaf.lower <= key && key < leaf.upper).cloned()
    }

    fn remember(&self, leaf: &Arc<Node>) {
        if let Some(mut last) = self.0.try_lock() {
            *last = Some(Arc::clone(leaf));
        }
    }
}

impl Tree {
    /// Like [`Tree::get`], starting at the finger.
    pub(crate) fn get_near<R>(
        &self,
        store: &NodeStore,
        finger: &Finger,
        key: Key,
        f: impl FnOnce(&[u8]) -> Result<R>,
    ) -> Result<Option<R>> {
        self.in_leaf(store, finger, key, |leaf, _| leaf.get(key).map(f).transpose()).map(Option::flatten)
    }

    /// Like [`Tree::floor`], starting at the finger.
    pub(crate) fn floor_near<R>(
        &self,
        store: &NodeStore,
        finger: &Finger,
        key: Key,
        f: impl FnOnce(Key, &[u8]) -> Result<R>,
    ) -> Result<Option<R>> {
        let mut f = Some(f);
        let found = self.in_leaf(store, finger, key, |leaf, _| {
            let Some(position) = leaf.count_through(key).checked_sub(1) else { return Ok(None) };
            let (key, value) = leaf.entry(position);
            f.take().map(|f| f(key, value)).transpose()
        })?;
        match (found.flatten(), f) {
            // All entries of the leaf come after the key: the entry is in a neighbour.
            (None, Some(f)) => self.floor(store, key, f),
            (found, _) => Ok(found),
        }
    }

    /// Like [`Tree::scan`], starting at the finger.
    pub(crate) fn scan_near(
        &self,
        store: &NodeStore,
        finger: &Finger,
        from: Key,
        to: Key,
        f: &mut ScanVisitor<'_>,
    ) -> Result<()> {
        if from >= to {
            return Ok(());
        }
        let first =
            self.in_leaf(store, finger, from, |leaf, upper| Ok((cursor::scan_leaf(leaf, from, to, f)?, upper)))?;
        match first {
            Some((ControlFlow::Continue(()), upper)) if upper < to => self.scan(store, upper, to, f),
            _ => Ok(()),
        }
    }

    /// Runs `f` on the leaf that covers `key`, with its upper fence; returns `None` when the tree
    /// is empty. The finger is not locked while `f` runs.
    fn in_leaf<R>(
        &self,
        store: &NodeStore,
        finger: &Finger,
        key: Key,
        f: impl FnOnce(&Leaf, Key) -> Result<R>,
    ) -> Result<Option<R>> {
        let Some(root) = &self.root else { return Ok(None) };
        let node = match finger.leaf_of(key) {
            Some(leaf) => leaf,
            None => {
                let leaf = cursor::leaf(store, root, Bounds::root(self.id as u8, self.level), key)?;
                finger.remember(&leaf);
                leaf
            }
        };
        let Body::Leaf(leaf) = &node.body else { unreachable!("a descent ends at a leaf") };
        f(leaf, node.upper).map(Some)
    }
}
