//! Copy-on-write inserts and removes, with splits and merges.

use std::sync::Arc;

use super::node::{Body, Bounds, Leaf, Node, slot_of};
use super::{Child, Edits, NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::node::NODE_HEAD;
use crate::format::{Key, MAX_LEVEL, MAX_VALUE, NODE_CAPACITY};

/// Encoded size below which a node is merged with a neighbour.
const SPARSE: usize = NODE_CAPACITY / 4;
/// Maximum encoded size of a merged node, so that it takes many inserts before it splits again.
const MAX_MERGED: usize = NODE_CAPACITY / 4 * 3;

struct Editor<'a> {
    store: &'a NodeStore,
    edits: &'a mut Edits,
}

impl Tree {
    /// Inserts or replaces an entry; returns whether the key existed. After an error the tree may
    /// be partly changed: the caller discards it.
    pub(crate) fn insert(&mut self, store: &NodeStore, edits: &mut Edits, key: Key, value: &[u8]) -> Result<bool> {
        if value.len() > MAX_VALUE {
            return Err(Error::invalid(format!("tree value too long: bytes={}", value.len())));
        }
        if key == Key::MAX {
            return Err(Error::invalid("the greatest key is only a fence"));
        }
        let mut editor = Editor { store, edits };
        let bounds = self.root_bounds();
        let Some(root) = &mut self.root else {
            let mut leaf = Leaf::default();
            leaf.put(key, value);
            self.root = Some(editor.new_child(Node::new(editor.edits.generation, bounds, Body::Leaf(leaf))));
            return Ok(false);
        };
        let root = editor.editable(root, bounds)?;
        let (existed, right) = editor.insert(root, key, value)?;
        if let Some((middle, right)) = right {
            if self.level == MAX_LEVEL {
                return Err(Error::NoSpace(format!("tree is too high: tree={} level={}", bounds.tree, self.level)));
            }
            self.level += 1;
            if let Some(left) = self.root.take() {
                let body = Body::Internal(vec![(Key::MIN, left), (middle, right)]);
                let bounds = Bounds::root(bounds.tree, self.level);
                self.root = Some(editor.new_child(Node::new(editor.edits.generation, bounds, body)));
            }
        }
        Ok(existed)
    }

    /// Removes an entry; returns whether the key existed. After an error the tree may be partly
    /// changed: the caller discards it.
    pub(crate) fn remove(&mut self, store: &NodeStore, edits: &mut Edits, key: Key) -> Result<bool> {
        // A missing key must not dirty its path.
        if self.get(store, key, |_| Ok(()))?.is_none() {
            return Ok(false);
        }
        let mut editor = Editor { store, edits };
        let bounds = self.root_bounds();
        let Some(root) = &mut self.root else { return Ok(false) };
        let node = editor.editable(root, bounds)?;
        editor.remove(node, key)?;
        if node.is_empty() {
            // TREE-5: an empty tree has no node at all.
            editor.edits.dirtied -= 1;
            *self = Tree::empty(self.id);
            return Ok(true);
        }
        while let Some(Child::Resident(node)) = &self.root {
            let [(_, only)] = node.children() else { break };
            let only = only.clone();
            editor.retire(Arc::clone(node));
            self.root = Some(only);
            self.level -= 1;
        }
        Ok(true)
    }

    /// Applies a log record (`None` removes it) to a read-only tree that no commit will write; it
    /// may contain empty leaves afterwards. On `Damaged` the record is not applied and nothing else
    /// has changed, but from then on the keys of the damaged leaf are unavailable, even if the
    /// medium could read the node again: it would return values from before the record.
    pub(crate) fn overlay(
        &mut self,
        store: &NodeStore,
        edits: &mut Edits,
        key: Key,
        value: Option<&[u8]>,
    ) -> Result<()> {
        let mut editor = Editor { store, edits };
        let bounds = self.root_bounds();
        let Some(root) = &mut self.root else {
            return value.map_or(Ok(()), |value| self.insert(store, edits, key, value).map(drop));
        };
        let leaf = editor.descend(root, bounds, key)?;
        match value {
            // All nodes of the path are in memory now.
            Some(value) => {
                self.insert(store, edits, key, value)?;
            }
            // The leaf stays in place even if empty: the neighbour that would take its range may be
            // lost.
            None => {
                leaf.remove(key);
            }
        }
        Ok(())
    }
}

impl Editor<'_> {
    /// Returns the leaf below `child` that covers `key`, with all nodes on the path editable. A
    /// damaged child is given up permanently: its pointer gets the generation of the open
    /// transaction, in which no page of that address exists.
    fn descend<'n>(&mut self, child: &'n mut Child, bounds: Bounds, key: Key) -> Result<&'n mut Leaf> {
        if let Child::Stored(pointer) = child {
            match self.store.load(pointer, bounds) {
                Ok(node) => *child = Child::Resident(node),
                Err(error) => {
                    if matches!(error, Error::Damaged(_)) {
                        pointer.generation = self.edits.generation;
                    }
                    return Err(error);
                }
            }
        }
        let node = self.editable(child, bounds)?;
        let upper = node.upper;
        match &mut node.body {
            Body::Leaf(leaf) => Ok(leaf),
            Body::Internal(children) => {
                let slot = slot_of(children, key);
                let upper = children.get(slot + 1).map_or(upper, |next| next.0);
                let bounds = Bounds { level: bounds.level - 1, lower: children[slot].0, upper, ..bounds };
                self.descend(&mut children[slot].1, bounds, key)
            }
        }
    }

    fn insert(&mut self, node: &mut Node, key: Key, value: &[u8]) -> Result<(bool, Option<(Key, Child)>)> {
        let level = node.level;
        let (tree, upper) = (node.tree, node.upper);
        let (newest, existed) = match &mut node.body {
            Body::Leaf(leaf) => leaf.put(key, value),
            Body::Internal(children) => {
                let slot = slot_of(children, key);
                let upper = children.get(slot + 1).map_or(upper, |next| next.0);
                let bounds = Bounds { tree, level: level - 1, lower: children[slot].0, upper };
                let child = self.editable(&mut children[slot].1, bounds)?;
                let (existed, right) = self.insert(child, key, value)?;
                let Some(right) = right else { return Ok((existed, None)) };
                children.insert(slot + 1, right);
                (slot + 1, existed)
            }
        };
        if node.encoded_size() <= NODE_CAPACITY {
            return Ok((existed, None));
        }
        let right = node.split(newest);
        debug_assert!(node.encoded_size() <= NODE_CAPACITY && right.encoded_size() <= NODE_CAPACITY, "TREE-5");
        Ok((existed, Some((right.lower, self.new_child(right)))))
    }

    /// Removes an existing key. May leave `node` empty or sparse, which its parent repairs.
    fn remove(&mut self, node: &mut Node, key: Key) -> Result<()> {
        let slot = match &mut node.body {
            Body::Leaf(leaf) => {
                leaf.remove(key);
                return Ok(());
            }
            Body::Internal(children) => slot_of(children, key),
        };
        let child = self.editable_child(node, slot)?;
        self.remove(child, key)?;
        let (empty, size) = (child.is_empty(), child.encoded_size());
        if empty {
            self.absorb(node, slot)
        } else if size < SPARSE {
            self.merge(node, slot)
        } else {
            Ok(())
        }
    }

    /// Removes the empty child in `slot` and gives its range to a neighbour, to the right one if
    /// there is no left one, or a damaged one. Without a neighbour, `node` becomes empty.
    fn absorb(&mut self, node: &mut Node, slot: usize) -> Result<()> {
        let range = node.child_bounds(slot);
        let has_right = slot + 1 < node.children().len();
        let mut to_right = has_right;
        if slot > 0 {
            let left = self.editable_child(node, slot - 1).and_then(|left| self.raise_upper(left, range.upper));
            to_right = has_right && matches!(left, Err(Error::Damaged(_)));
            if !to_right {
                left?;
            }
        }
        if to_right {
            let right = self.editable_child(node, slot + 1)?;
            self.drop_lower(right, range.lower)?;
        }
        let Body::Internal(children) = &mut node.body else { return Ok(()) };
        if let (_, Child::Resident(gone)) = children.remove(slot) {
            self.retire(gone);
        }
        if to_right {
            children[slot].0 = range.lower;
        }
        Ok(())
    }

    /// Raises the upper fence of a node and of the last child on every level below it.
    fn raise_upper(&mut self, node: &mut Node, upper: Key) -> Result<()> {
        if let Body::Internal(children) = &node.body {
            let last = self.editable_child(node, children.len() - 1)?;
            self.raise_upper(last, upper)?;
        }
        node.upper = upper;
        Ok(())
    }

    /// Lowers the lower fence of a node and of the first child on every level below it.
    fn drop_lower(&mut self, node: &mut Node, lower: Key) -> Result<()> {
        if let Body::Internal(_) = &node.body {
            let first = self.editable_child(node, 0)?;
            self.drop_lower(first, lower)?;
        }
        if let Body::Internal(children) = &mut node.body {
            children[0].0 = lower;
        }
        node.lower = lower;
        Ok(())
    }

    /// Merges the sparse child in `slot` with a neighbour, preferably the left one, if the merged
    /// node is small enough. A merge only saves space, so a damaged neighbour prevents no change.
    fn merge(&mut self, node: &mut Node, slot: usize) -> Result<()> {
        let first = slot.saturating_sub(1);
        let last = (slot + 1).min(node.children().len() - 1);
        for left in first..last {
            let children = node.children();
            let load = |slot: usize| children[slot].1.load(self.store, node.child_bounds(slot));
            let (a, b) = match (load(left), load(left + 1)) {
                (Err(Error::Damaged(_)), _) | (_, Err(Error::Damaged(_))) => continue,
                (a, b) => (a?, b?),
            };
            if a.encoded_size() + b.encoded_size() - NODE_HEAD > MAX_MERGED {
                continue;
            }
            let joined = self.new_child(Node::merge(&a, &b, self.edits.generation));
            let Body::Internal(children) = &mut node.body else { return Ok(()) };
            children[left].1 = joined;
            children.remove(left + 1);
            self.retire(a);
            self.retire(b);
            break;
        }
        Ok(())
    }

    fn editable_child<'n>(&mut self, node: &'n mut Node, slot: usize) -> Result<&'n mut Node> {
        let bounds = node.child_bounds(slot);
        let Body::Internal(children) = &mut node.body else { unreachable!("only internal nodes have slots") };
        self.editable(&mut children[slot].1, bounds)
    }

    /// Returns the node of `child` for changes in place. The caller reached `child` through
    /// editable nodes, so a unique `Arc` here is unique along the whole path (TREE-2).
    fn editable<'n>(&mut self, child: &'n mut Child, bounds: Bounds) -> Result<&'n mut Node> {
        if let Child::Stored(pointer) = child {
            *child = Child::Resident(self.store.load(pointer, bounds)?);
        }
        let Child::Resident(node) = child else { unreachable!("made resident above") };
        if self.is_older(node) {
            let copy = Arc::new(node.clone_for(self.edits.generation));
            // TREE-3: no tree of this lineage reaches the original any more, so it cannot be
            // superseded again.
            self.edits.superseded.push(std::mem::replace(node, copy));
            self.edits.dirtied += 1;
        }
        // TREE-2: copied if another version shares it. It belongs to the open transaction, so
        // nothing is superseded.
        Ok(Arc::make_mut(node))
    }

    fn new_child(&mut self, node: Node) -> Child {
        self.edits.dirtied += 1;
        Child::Resident(Arc::new(node))
    }

    fn retire(&mut self, node: Arc<Node>) {
        if self.is_older(&node) {
            self.edits.superseded.push(node); // TREE-3
        } else {
            self.edits.dirtied -= 1;
        }
    }

    /// Returns whether an earlier transaction created the node: then it has a page, or a commit in
    /// flight is writing one.
    fn is_older(&self, node: &Node) -> bool {
        node.born != self.edits.generation || node.stored.get().is_some()
    }
}
