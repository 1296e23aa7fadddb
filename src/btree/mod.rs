//! Copy-on-write B+tree over pages: persistent trees that share nodes, changed in memory, written once by a commit.
//!
//! It sees `frame`, because a node is the body of a page that `frame` opened.
//!
//! # Invariants
//! TREE-1  A `Tree` value is a snapshot: no operation on another clone changes what it answers.
//! TREE-2  A node is changed in place only when nobody else can reach it: its `Arc` is unique along the whole path, it was born in the
//!     transaction that is open now, and it is not stored. Otherwise it is cloned.
//! TREE-3  Cloning a node that an older transaction made (committed, or frozen and being written) adds it to `Edits::superseded`,
//!     exactly once; its page is freed when the present transaction commits. Discarded edits supersede nothing.
//! TREE-4  A loaded node is used only when tree, level and both fences are those that its parent says.
//! TREE-5  An encoded node never exceeds NODE_CAPACITY; no node but an empty leaf root is empty.

mod cursor;
mod difference;
mod edit;
mod finger;
mod flush;
mod newer_subtrees;
mod node;
mod node_store;
mod prefetch;
mod search;
#[cfg(test)]
mod tests;

use std::ops::ControlFlow;
use std::sync::Arc;

pub(crate) use difference::{DifferenceVisitor, DifferenceWalk};
pub(crate) use finger::Finger;
pub(crate) use newer_subtrees::RangeVisitor;
use node::Bounds;
pub(crate) use node::Node;
pub(crate) use node_store::NodeStore;

use crate::error::{Error, Result};
use crate::format::record::Root;
use crate::format::{Generation, Key, Pointer, TreeId};

/// A child as its parent knows it.
#[derive(Clone)]
pub(crate) enum Child {
    /// On the medium (and perhaps in the node cache).
    Stored(Pointer),
    /// In memory: changed since the last commit, or written by a commit whose nodes are not yet forgotten (`Node::stored` is set then).
    Resident(Arc<Node>),
}

/// Gets the entries of a scan until it breaks.
pub(crate) type ScanVisitor<'a> = dyn FnMut(Key, &[u8]) -> Result<ControlFlow<()>> + 'a;

/// A node that cannot be read.
pub(crate) struct LostNode {
    pub(crate) pointer: Pointer,
    /// The keys that lay below it.
    pub(crate) lower: Key,
    pub(crate) upper: Key,
    pub(crate) error: Error,
}

/// Gets the nodes that a walk has to pass by.
pub(crate) type LostVisitor<'a> = dyn FnMut(LostNode) -> Result<()> + 'a;

/// One version of one tree. Cloning is cheap.
#[derive(Clone)]
pub(crate) struct Tree {
    id: TreeId,
    level: u8,
    root: Option<Child>,
}

/// What an operation's changes did to pages and memory.
pub(crate) struct Edits {
    /// The open transaction.
    pub(crate) generation: Generation,
    /// Nodes of older transactions that the new tree does not use any more.
    pub(crate) superseded: Vec<Arc<Node>>,
    /// Net number of nodes that the next commit has to write because of these edits.
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

    /// The tree that a commit record names.
    pub(crate) fn from_root(id: TreeId, root: &Root) -> Tree {
        if root.pointer.is_null() {
            return Tree::empty(id);
        }
        Tree { id, level: root.level, root: Some(Child::Stored(root.pointer)) }
    }

    /// Number of nodes that changing one record may dirty at most.
    ///
    /// An insert clones one node and makes another by a split on each of the `level + 1` levels, and may put a root on top:
    /// `2 * (level + 1) + 1`. A remove clones the path; a merge makes one node of two, of which at least the path's was just cloned,
    /// and a neighbour that takes the range of an emptied child is cloned when that child's own clone goes: `level + 1`.
    /// One more level is counted because a tree may grow between the reservation and the change.
    #[cfg(test)]
    pub(crate) fn worst_case_dirty(&self) -> u64 {
        2 * (u64::from(self.level) + 2) + 1
    }

    /// Calls `f` with the value of `key`, if there is one.
    pub(crate) fn get<R>(&self, store: &NodeStore, key: Key, f: impl FnOnce(&[u8]) -> Result<R>) -> Result<Option<R>> {
        self.with_root(store, |root| cursor::get(store, root, key, f)).map(Option::flatten)
    }

    /// Calls `f` with the greatest entry at or before `key`, if there is one.
    pub(crate) fn floor<R>(
        &self,
        store: &NodeStore,
        key: Key,
        f: impl FnOnce(Key, &[u8]) -> Result<R>,
    ) -> Result<Option<R>> {
        self.with_root(store, |root| cursor::floor(store, root, key, &mut Some(f))).map(Option::flatten)
    }

    /// Calls `f` with the first key of the range of the leaf that `key` belongs to, and of those before it, descending, until it breaks. It reads no leaf, so
    /// it tells where entries may be and not that there are any.
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

    /// Calls `f` with every entry that can still be read; `lost` gets each node that cannot.
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

    /// Inserts or replaces; answers whether the key was there. On an error the tree may be half changed: the caller discards it.
    pub(crate) fn insert(&mut self, store: &NodeStore, edits: &mut Edits, key: Key, value: &[u8]) -> Result<bool> {
        edit::insert(self, store, edits, key, value)
    }

    /// Removes; answers whether the key was there. On an error the tree may be half changed: the caller discards it.
    pub(crate) fn remove(&mut self, store: &NodeStore, edits: &mut Edits, key: Key) -> Result<bool> {
        edit::remove(self, store, edits, key)
    }

    /// Puts a record, or takes it away, in a tree that is only read and that no commit will write; it may have empty leaves afterwards. On `Damaged` the record has
    /// no place, and nothing else has changed. Nothing answers for the keys beside it any more, not even when the medium would give the damaged node
    /// back another time: they would be those from before.
    pub(crate) fn overlay(
        &mut self,
        store: &NodeStore,
        edits: &mut Edits,
        key: Key,
        value: Option<&[u8]>,
    ) -> Result<()> {
        edit::overlay(self, store, edits, key, value)
    }

    /// Writes every resident node that is not stored yet, children first, through `write(level, encoded) -> pointer`,
    /// sets `Node::stored`, puts the written nodes into the store's cache, and returns the root for the commit record.
    /// Runs without any lock on the tree: other clones may be read and edited meanwhile.
    pub(crate) fn flush(
        &self,
        store: &NodeStore,
        write: &mut dyn FnMut(u8, Vec<u8>) -> Result<Pointer>,
    ) -> Result<Root> {
        let pointer = match &self.root {
            None => return Ok(Root::default()),
            Some(Child::Stored(pointer)) => *pointer,
            Some(Child::Resident(root)) => flush::flush(store, root, write)?,
        };
        Ok(Root { pointer, level: self.level })
    }

    /// Replaces resident nodes that are stored by their pointers, so that memory is bounded by the cache again.
    /// Only visits nodes that are not stored and their children.
    pub(crate) fn forget_written(&mut self) {
        if let Some(root) = &mut self.root {
            flush::forget_written(root);
        }
    }

    /// Number of resident nodes that no commit has written (for tests and accounting checks).
    #[cfg(test)]
    pub(crate) fn count_dirty(&self) -> u64 {
        self.root.as_ref().map_or(0, flush::count_dirty)
    }

    /// Visits every stored node page of the tree (pointer, level), for `check` and rebuilding the space map. Reads all nodes, verifying TREE-4, and goes on
    /// behind those that cannot be read, which `lost` gets after `f`.
    pub(crate) fn visit_pages(
        &self,
        store: &NodeStore,
        f: &mut dyn FnMut(&Pointer, u8) -> Result<()>,
        lost: &mut LostVisitor<'_>,
    ) -> Result<()> {
        match &self.root {
            None => Ok(()),
            Some(root) => flush::visit_pages(store, root, Bounds::root(self.id as u8, self.level), f, lost),
        }
    }

    fn with_root<R>(&self, store: &NodeStore, f: impl FnOnce(&Node) -> Result<R>) -> Result<Option<R>> {
        let Some(root) = &self.root else { return Ok(None) };
        cursor::with_node(store, root, Bounds::root(self.id as u8, self.level), f).map(Some)
    }
}
