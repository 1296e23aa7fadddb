//! Copy-on-write B+tree over pages: persistent trees that share nodes, changed in memory and
//! written once by a commit.
//!
//! It depends on `frame`, because a node is the body of a page that `frame` decrypted.
//!
//! # Invariants
//! TREE-1  A `Tree` value is a snapshot: operations on other clones do not change its content.
//! TREE-2  A node is changed in place only if no other tree can reach it: its `Arc` is unique along
//!     the whole path, it was created in the open transaction, and it is not stored. Otherwise it
//!     is cloned.
//! TREE-3  Cloning a node of an older transaction (committed, or frozen and being written) adds it
//!     to `Edits::superseded`, exactly once; its page is freed when the open transaction commits.
//!     Discarded edits supersede nothing.
//! TREE-4  A loaded node is used only if its tree, level and both fences match those of its parent.
//! TREE-5  An encoded node never exceeds NODE_CAPACITY; no node except an empty leaf root is empty.

mod cursor;
mod difference;
mod edit;
mod node;
mod node_store;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::sync::Arc;

pub(crate) use cursor::Finger;
pub(crate) use difference::{DifferenceVisitor, DifferenceWalk, RangeVisitor};
use node::Bounds;
pub(crate) use node::Node;
pub(crate) use node_store::NodeStore;

use crate::error::{Error, Result};
use crate::format::record::Root;
use crate::format::{Generation, Key, Pointer, TreeId};

/// Reference from a parent to a child node.
#[derive(Clone)]
pub(crate) enum Child {
    /// Stored on the medium, possibly in the node cache.
    Stored(Pointer),
    /// In memory: changed since the last commit, or written by a commit whose nodes were not
    /// dropped yet (`Node::stored` is then set).
    Resident(Arc<Node>),
}

/// Callback for the entries of a scan; stops it by breaking.
pub(crate) type ScanVisitor<'a> = dyn FnMut(Key, &[u8]) -> Result<ControlFlow<()>> + 'a;

/// Node that cannot be read.
pub(crate) struct LostNode {
    pub(crate) pointer: Pointer,
    /// Key range below the lost node.
    pub(crate) lower: Key,
    pub(crate) upper: Key,
    pub(crate) error: Error,
}

/// Callback for nodes that a walk skips because they cannot be read.
pub(crate) type LostVisitor<'a> = dyn FnMut(LostNode) -> Result<()> + 'a;

/// One version of one tree. Cloning is cheap.
#[derive(Clone)]
pub(crate) struct Tree {
    id: TreeId,
    level: u8,
    root: Option<Child>,
}

/// Effects of an operation's changes on pages and memory.
pub(crate) struct Edits {
    /// Generation of the open transaction.
    pub(crate) generation: Generation,
    /// Nodes of older transactions that the new tree no longer uses.
    pub(crate) superseded: Vec<Arc<Node>>,
    /// Net change in the number of nodes that the next commit writes.
    pub(crate) dirtied: i64,
}

impl Edits {
    pub(crate) fn new(generation: Generation) -> Edits {
        Edits { generation, superseded: Vec::new(), dirtied: 0 }
    }
}

impl Tree {
    pub(crate) fn empty(id: TreeId) -> Tree {
        Tree { id, level: 0, root: None }
    }

    /// Creates the tree that a commit record names.
    pub(crate) fn from_root(id: TreeId, root: &Root) -> Tree {
        if root.pointer.is_null() {
            return Tree::empty(id);
        }
        Tree { id, level: root.level, root: Some(Child::Stored(root.pointer)) }
    }

    /// Returns the maximum number of nodes that changing one record may dirty.
    ///
    /// An insert clones one node and splits off another on each of the `level + 1` levels, and may
    /// add a root: `2 * (level + 1) + 1`. A remove clones the path. A merge turns two nodes into
    /// one, of which at least the one on the path was just cloned. A neighbour that takes the range
    /// of an emptied child is cloned when that child's own clone is dropped: `level + 1`. One more
    /// level is counted because a tree may grow between the reservation and the change.
    #[cfg(test)]
    pub(crate) fn worst_case_dirty(&self) -> u64 {
        2 * (u64::from(self.level) + 2) + 1
    }

    /// Calls `f` with the value of `key`, if it exists.
    pub(crate) fn get<R>(&self, store: &NodeStore, key: Key, f: impl FnOnce(&[u8]) -> Result<R>) -> Result<Option<R>> {
        self.with_root(store, |root| cursor::get(store, root, key, f)).map(Option::flatten)
    }

    /// Calls `f` with the greatest entry at or before `key`, if it exists.
    pub(crate) fn floor<R>(
        &self,
        store: &NodeStore,
        key: Key,
        f: impl FnOnce(Key, &[u8]) -> Result<R>,
    ) -> Result<Option<R>> {
        self.with_root(store, |root| cursor::floor(store, root, key, &mut Some(f))).map(Option::flatten)
    }

    /// Calls `f` with the lower fence of the leaf that covers `key` and of the leaves before it,
    /// descending, until it breaks. Reads no leaf, so entries may or may not exist there.
    pub(crate) fn fences_before(
        &self,
        store: &NodeStore,
        key: Key,
        f: &mut dyn FnMut(Key) -> ControlFlow<()>,
    ) -> Result<()> {
        match &self.root {
            None => Ok(()),
            Some(root) => cursor::fences_before(store, root, Bounds::root(self.id as u8, self.level), key, f).map(drop),
        }
    }

    /// Calls `f` with every entry in `[from, to)` in ascending order until it breaks.
    pub(crate) fn scan(&self, store: &NodeStore, from: Key, to: Key, f: &mut ScanVisitor<'_>) -> Result<()> {
        if from < to {
            self.with_root(store, |root| cursor::scan(store, root, from, to, f))?;
        }
        Ok(())
    }

    /// Calls `f` with every readable entry, and `lost` with each unreadable node.
    pub(crate) fn scan_surviving(
        &self,
        store: &NodeStore,
        f: &mut dyn FnMut(Key, &[u8]) -> Result<()>,
        lost: &mut LostVisitor<'_>,
    ) -> Result<()> {
        match &self.root {
            None => Ok(()),
            Some(root) => cursor::scan_surviving(store, root, Bounds::root(self.id as u8, self.level), f, lost),
        }
    }

    /// Inserts or replaces an entry; returns whether the key existed. After an error the tree may
    /// be partly changed: the caller discards it.
    pub(crate) fn insert(&mut self, store: &NodeStore, edits: &mut Edits, key: Key, value: &[u8]) -> Result<bool> {
        edit::insert(self, store, edits, key, value)
    }

    /// Removes an entry; returns whether the key existed. After an error the tree may be partly
    /// changed: the caller discards it.
    pub(crate) fn remove(&mut self, store: &NodeStore, edits: &mut Edits, key: Key) -> Result<bool> {
        edit::remove(self, store, edits, key)
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
        edit::overlay(self, store, edits, key, value)
    }

    /// Writes every resident node that is not stored yet, children first, through `write(level,
    /// encoded) -> pointer`. Sets `Node::stored`, adds the written nodes to the store's cache, and
    /// returns the root for the commit record. Takes no lock on the tree: other clones may be read
    /// and edited concurrently.
    pub(crate) fn flush(
        &self,
        store: &NodeStore,
        write: &mut dyn FnMut(u8, Vec<u8>) -> Result<Pointer>,
    ) -> Result<Root> {
        let pointer = match &self.root {
            None => return Ok(Root::default()),
            Some(Child::Stored(pointer)) => *pointer,
            Some(Child::Resident(root)) => node_store::flush(store, root, write)?,
        };
        Ok(Root { pointer, level: self.level })
    }

    /// Replaces stored resident nodes by their pointers, so that the cache bounds memory again.
    /// Visits only nodes that are not stored, and their children.
    pub(crate) fn forget_written(&mut self) {
        if let Some(root) = &mut self.root {
            node_store::forget_written(root);
        }
    }

    /// Returns the number of resident nodes that no commit has written.
    #[cfg(test)]
    pub(crate) fn count_dirty(&self) -> u64 {
        self.root.as_ref().map_or(0, node_store::count_dirty)
    }

    /// Calls `f` with pointer and level of every stored node, for `check` and for rebuilding the
    /// space map. Reads all nodes and verifies TREE-4; continues after unreadable nodes, which are
    /// passed to `f` and then to `lost`.
    pub(crate) fn visit_pages(
        &self,
        store: &NodeStore,
        f: &mut dyn FnMut(&Pointer, u8) -> Result<()>,
        lost: &mut LostVisitor<'_>,
    ) -> Result<()> {
        match &self.root {
            None => Ok(()),
            Some(root) => cursor::visit_pages(store, root, Bounds::root(self.id as u8, self.level), f, lost),
        }
    }

    fn with_root<R>(&self, store: &NodeStore, f: impl FnOnce(&Node) -> Result<R>) -> Result<Option<R>> {
        let Some(root) = &self.root else { return Ok(None) };
        cursor::with_node(store, root, Bounds::root(self.id as u8, self.level), f).map(Some)
    }
}
