//! Descents, finger searches, scans and node prefetch, without copying values: resident nodes are
//! borrowed, loaded ones are held by the call.

use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::node::{Body, Bounds, Leaf, Node, slot_of};
use super::{Child, LostNode, LostVisitor, NodeStore, ScanVisitor, Tree};
use crate::error::Result;
use crate::format::{Key, Pointer};

/// Maximum number of nodes prefetched per level. Each also brings its neighbours, and prefetched
/// data occupies memory until it is read.
pub(super) const MAX_PREFETCH: usize = 64;

pub(super) fn with_node<R>(
    store: &NodeStore,
    child: &Child,
    bounds: Bounds,
    f: impl FnOnce(&Node) -> Result<R>,
) -> Result<R> {
    match child {
        Child::Resident(node) => f(node),
        Child::Stored(pointer) => f(&*store.load(pointer, bounds)?),
    }
}

pub(super) fn get<R>(
    store: &NodeStore,
    node: &Node,
    key: Key,
    f: impl FnOnce(&[u8]) -> Result<R>,
) -> Result<Option<R>> {
    match &node.body {
        Body::Leaf(leaf) => leaf.get(key).map(f).transpose(),
        Body::Internal(children) => {
            let slot = slot_of(children, key);
            with_node(store, &children[slot].1, node.child_bounds(slot), |child| get(store, child, key, f))
        }
    }
}

/// Implements [`Tree::floor`]; takes `f` out when an entry is found. A leaf without an entry at or
/// before `key` sends the search to its left neighbour, whose entries are all before `key`. No leaf
/// below a root is empty (TREE-5), so at most two children per level are visited.
pub(super) fn floor<R, F: FnOnce(Key, &[u8]) -> Result<R>>(
    store: &NodeStore,
    node: &Node,
    key: Key,
    f: &mut Option<F>,
) -> Result<Option<R>> {
    match &node.body {
        Body::Leaf(leaf) => {
            let Some((key, value)) = leaf.floor(key) else { return Ok(None) };
            f.take().map(|f| f(key, value)).transpose()
        }
        Body::Internal(children) => {
            for slot in (0..=slot_of(children, key)).rev() {
                let bounds = node.child_bounds(slot);
                let found = with_node(store, &children[slot].1, bounds, |child| floor(store, child, key, f))?;
                if found.is_some() {
                    return Ok(found);
                }
            }
            Ok(None)
        }
    }
}

pub(super) fn fences_before(
    store: &NodeStore,
    child: &Child,
    bounds: Bounds,
    key: Key,
    f: &mut dyn FnMut(Key) -> ControlFlow<()>,
) -> Result<ControlFlow<()>> {
    if bounds.level == 0 {
        return Ok(f(bounds.lower));
    }
    with_node(store, child, bounds, |node| {
        let Body::Internal(children) = &node.body else { return Ok(ControlFlow::Continue(())) };
        for slot in (0..=slot_of(children, key)).rev() {
            let bounds = node.child_bounds(slot);
            if fences_before(store, &children[slot].1, bounds, key, &mut *f)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    })
}

fn leaf(store: &NodeStore, child: &Child, bounds: Bounds, key: Key) -> Result<Arc<Node>> {
    match child {
        Child::Resident(node) => leaf_below(store, node, key),
        Child::Stored(pointer) => leaf_below(store, &store.load(pointer, bounds)?, key),
    }
}

fn leaf_below(store: &NodeStore, node: &Arc<Node>, key: Key) -> Result<Arc<Node>> {
    match &node.body {
        Body::Leaf(_) => Ok(Arc::clone(node)),
        Body::Internal(children) => {
            let slot = slot_of(children, key);
            leaf(store, &children[slot].1, node.child_bounds(slot), key)
        }
    }
}

fn scan_leaf(leaf: &Leaf, from: Key, to: Key, f: &mut ScanVisitor<'_>) -> Result<ControlFlow<()>> {
    for position in leaf.count_below(from)..leaf.len() {
        let (key, value) = leaf.entry(position);
        if key >= to {
            break;
        }
        if f(key, value)?.is_break() {
            return Ok(ControlFlow::Break(()));
        }
    }
    Ok(ControlFlow::Continue(()))
}

pub(super) fn scan(
    store: &NodeStore,
    node: &Node,
    from: Key,
    to: Key,
    f: &mut ScanVisitor<'_>,
) -> Result<ControlFlow<()>> {
    match &node.body {
        Body::Leaf(leaf) => return scan_leaf(leaf, from, to, f),
        Body::Internal(children) => {
            for (slot, (_, child)) in children.iter().enumerate().skip(slot_of(children, from)) {
                let bounds = node.child_bounds(slot);
                if bounds.lower >= to {
                    break;
                }
                let flow = with_node(store, child, bounds, |child| scan(store, child, from, to, &mut *f))?;
                if flow.is_break() {
                    return Ok(flow);
                }
            }
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Returns the node, or `None` after reporting a damaged one to `lost`.
fn load_or_skip(
    store: &NodeStore,
    child: &Child,
    bounds: Bounds,
    lost: &mut LostVisitor<'_>,
) -> Result<Option<Arc<Node>>> {
    match child {
        Child::Resident(node) => Ok(Some(node.clone())),
        Child::Stored(pointer) => match store.load(pointer, bounds) {
            Ok(node) => Ok(Some(node)),
            Err(error) if error.is_page_loss() => {
                lost(LostNode { pointer: *pointer, lower: bounds.lower, upper: bounds.upper, error })?;
                Ok(None)
            }
            Err(error) => Err(error),
        },
    }
}

pub(super) fn scan_surviving(
    store: &NodeStore,
    child: &Child,
    bounds: Bounds,
    f: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
    lost: &mut LostVisitor<'_>,
) -> Result<()> {
    let Some(node) = load_or_skip(store, child, bounds, lost)? else { return Ok(()) };
    match &node.body {
        Body::Leaf(leaf) => leaf.iter().try_for_each(|(key, value)| f(key, value)),
        Body::Internal(children) => children
            .iter()
            .enumerate()
            .try_for_each(|(slot, (_, child))| scan_surviving(store, child, node.child_bounds(slot), f, lost)),
    }
}

impl Tree {
    /// Prefetches the nodes that cover `ranges` (ascending and disjoint) on remote storage, where
    /// every node read costs a round trip, and reads all of them except leaves. Requests at most
    /// [`MAX_PREFETCH`] nodes per level.
    pub(crate) fn prefetch(&self, store: &NodeStore, ranges: &[(Key, Key)]) -> Result<()> {
        let Some((root, bounds)) = self.root().filter(|_| store.pages.is_remote()) else { return Ok(()) };
        let mut nodes = vec![(root.clone(), bounds)];
        for _ in 0..self.level {
            let mut below = Vec::new();
            for (child, bounds) in nodes {
                with_node(store, &child, bounds, |node| {
                    let children = node.children();
                    let all = (0..children.len()).map(|slot| (&children[slot].1, node.child_bounds(slot)));
                    let wanted = all.filter(|(_, bounds)| is_touched(bounds, ranges));
                    below
                        .extend(wanted.take(MAX_PREFETCH - below.len()).map(|(child, bounds)| (child.clone(), bounds)));
                    Ok(())
                })?;
            }
            store.prefetch(below.iter().map(|(child, _)| child));
            nodes = below;
        }
        Ok(())
    }
}

fn is_touched(bounds: &Bounds, ranges: &[(Key, Key)]) -> bool {
    let at = ranges.partition_point(|(_, to)| *to <= bounds.lower);
    ranges.get(at).is_some_and(|(from, _)| *from < bounds.upper)
}

pub(super) fn visit_pages(
    store: &NodeStore,
    child: &Child,
    bounds: Bounds,
    f: &mut dyn FnMut(&Pointer, u8) -> Result<()>,
    lost: &mut LostVisitor<'_>,
) -> Result<()> {
    if let Some(pointer) = child.pointer() {
        f(pointer, bounds.level)?;
    }
    let Some(node) = load_or_skip(store, child, bounds, lost)? else { return Ok(()) };
    for (slot, (_, child)) in node.children().iter().enumerate() {
        visit_pages(store, child, node.child_bounds(slot), f, lost)?;
    }
    Ok(())
}

// ---- finger search: starts at the leaf of the previous search ----

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
    pub(crate) fn get_near<R>(
        &self,
        store: &NodeStore,
        finger: &Finger,
        key: Key,
        f: impl FnOnce(&[u8]) -> Result<R>,
    ) -> Result<Option<R>> {
        self.in_leaf(store, finger, key, |leaf, _| leaf.get(key).map(f).transpose()).map(Option::flatten)
    }

    pub(crate) fn floor_near<R>(
        &self,
        store: &NodeStore,
        finger: &Finger,
        key: Key,
        f: impl FnOnce(Key, &[u8]) -> Result<R>,
    ) -> Result<Option<R>> {
        let mut f = Some(f);
        let found = self.in_leaf(store, finger, key, |leaf, _| {
            let Some((key, value)) = leaf.floor(key) else { return Ok(None) };
            f.take().map(|f| f(key, value)).transpose()
        })?;
        match (found.flatten(), f) {
            // All entries of the leaf come after the key: the entry is in a neighbour.
            (None, Some(f)) => self.floor(store, key, f),
            (found, _) => Ok(found),
        }
    }

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
        let first = self.in_leaf(store, finger, from, |leaf, upper| Ok((scan_leaf(leaf, from, to, f)?, upper)))?;
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
        let Some((root, bounds)) = self.root() else { return Ok(None) };
        let node = match finger.leaf_of(key) {
            Some(leaf) => leaf,
            None => {
                let leaf = leaf(store, root, bounds, key)?;
                finger.remember(&leaf);
                leaf
            }
        };
        let Body::Leaf(leaf) = &node.body else { unreachable!("a descent ends at a leaf") };
        f(leaf, node.upper).map(Some)
    }
}
