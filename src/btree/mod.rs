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
//! TREE-4  A loaded node is used only if its tree, level and both fences match its parent's.
//! TREE-5  An encoded node never exceeds NODE_CAPACITY; no node except an empty leaf root is empty.

mod cursor;
mod difference;
mod edit;
mod node;
#[cfg(test)]
mod tests;

pub(crate) use cursor::Finger;
pub(crate) use difference::{DifferenceVisitor, DifferenceWalk, RangeVisitor};
pub(crate) use node::Node;

use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use crate::error::{CacheStats, Error, Result};
use crate::format::node::{self as encoding, NodeEntries};
use crate::format::page::PageKind;
use crate::format::record::Root;
use crate::format::{Generation, Key, Pointer, TreeId};
use crate::pager::{Pager, ShardedCache};
use node::{Body, Bounds, Leaf};

/// Reference from a parent to a child node.
#[derive(Clone)]
pub(crate) enum Child {
    /// Stored on the medium, possibly in the node cache.
    Stored(Pointer),
    /// In memory: changed since the last commit, or written by a commit whose nodes were not
    /// dropped yet (`Node::stored` is then set).
    Resident(Arc<Node>),
}

impl Child {
    /// Returns the pointer of the stored node; `None` for one that no commit has written yet.
    fn pointer(&self) -> Option<&Pointer> {
        match self {
            Child::Stored(pointer) => Some(pointer),
            Child::Resident(node) => node.stored.get(),
        }
    }

    fn load(&self, store: &NodeStore, bounds: Bounds) -> Result<Arc<Node>> {
        match self {
            Child::Stored(pointer) => store.load(pointer, bounds),
            Child::Resident(node) => Ok(Arc::clone(node)),
        }
    }
}

/// Callback for the entries of a scan; stops it by breaking.
pub(crate) type ScanVisitor<'a> = dyn FnMut(Key, &[u8]) -> Result<ControlFlow<()>> + 'a;

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

    pub(crate) fn from_root(id: TreeId, root: &Root) -> Tree {
        if root.pointer.is_null() {
            return Tree::empty(id);
        }
        Tree { id, level: root.level, root: Some(Child::Stored(root.pointer)) }
    }

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
        let Some((root, bounds)) = self.root() else { return Ok(()) };
        cursor::fences_before(store, root, bounds, key, f).map(drop)
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
        let Some((root, bounds)) = self.root() else { return Ok(()) };
        cursor::scan_surviving(store, root, bounds, f, lost)
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
            Some(Child::Resident(root)) => flush(store, root, write)?,
        };
        Ok(Root { pointer, level: self.level })
    }

    /// Replaces stored resident nodes by their pointers, so that the cache bounds memory again.
    /// Visits only nodes that are not stored, and their children.
    pub(crate) fn forget_written(&mut self) {
        if let Some(root) = &mut self.root {
            forget_written(root);
        }
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
        let Some((root, bounds)) = self.root() else { return Ok(()) };
        cursor::visit_pages(store, root, bounds, f, lost)
    }

    fn root(&self) -> Option<(&Child, Bounds)> {
        Some((self.root.as_ref()?, self.root_bounds()))
    }

    fn root_bounds(&self) -> Bounds {
        Bounds::root(self.id as u8, self.level)
    }

    fn with_root<R>(&self, store: &NodeStore, f: impl FnOnce(&Node) -> Result<R>) -> Result<Option<R>> {
        self.root().map(|(root, bounds)| cursor::with_node(store, root, bounds, f)).transpose()
    }
}

trait NodePages: Send + Sync {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>>;

    fn is_remote(&self) -> bool {
        false
    }

    fn prefetch_nodes(&self, _pointers: &mut dyn Iterator<Item = &Pointer>) {}
}

impl NodePages for Pager {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>> {
        let page = self.read_page(pointer, PageKind::Node)?;
        // Specification 6.1: the prologue, which scanners use to sort pages, must agree with the
        // node.
        let (tree, level) = (page.prologue.owner, page.prologue.position);
        match page.body() {
            [own_level, own_tree, ..] if (u64::from(*own_tree), u64::from(*own_level)) == (tree, level) => {}
            _ => return Err(pointer.damaged("node does not match its prologue")),
        }
        Ok(page.into_body())
    }

    fn is_remote(&self) -> bool {
        Pager::is_remote(self)
    }

    fn prefetch_nodes(&self, pointers: &mut dyn Iterator<Item = &Pointer>) {
        self.prefetch_pages(pointers);
    }
}

/// Loader and cache of stored nodes.
pub(crate) struct NodeStore {
    pages: Arc<dyn NodePages>,
    /// Stored nodes only; nodes changed by a transaction are not cached here.
    nodes: ShardedCache<Pointer, Arc<Node>>,
}

impl NodeStore {
    pub(crate) fn new(pager: Arc<Pager>, budget: usize) -> NodeStore {
        NodeStore::from_pages(pager, budget)
    }

    fn from_pages(pages: Arc<dyn NodePages>, budget: usize) -> NodeStore {
        NodeStore { pages, nodes: ShardedCache::new(budget) }
    }

    /// Evicts a node whose page was freed; its address may be reused under another generation.
    pub(crate) fn forget(&self, pointer: &Pointer) {
        self.nodes.forget(pointer);
    }

    /// Returns the cache statistics; sizes are estimates.
    pub(crate) fn usage(&self) -> CacheStats {
        self.nodes.usage()
    }

    pub(crate) fn clear(&self) {
        self.nodes.clear();
    }

    fn prefetch<'a>(&self, children: impl Iterator<Item = &'a Child>) {
        if self.pages.is_remote() {
            let missing = |child: &'a Child| match child {
                Child::Stored(pointer) if !self.nodes.has(pointer) => Some(pointer),
                _ => None,
            };
            self.pages.prefetch_nodes(&mut children.filter_map(missing));
        }
    }

    /// Returns the stored node at `pointer`, verified against its parent's bounds (TREE-4).
    fn load(&self, pointer: &Pointer, bounds: Bounds) -> Result<Arc<Node>> {
        if let Some(node) = self.nodes.get(pointer) {
            check_bounds(&node, pointer, bounds)?;
            return Ok(node);
        }
        // Two threads that miss at the same time both load; the later one replaces an equal node.
        let node = decode(&self.pages.read_node(pointer)?, pointer)?;
        check_bounds(&node, pointer, bounds)?;
        let node = Arc::new(node);
        self.cache_node(pointer, &node);
        Ok(node)
    }

    /// Caches a node stored at `pointer`. An internal node must have only stored children, or the
    /// budget would not bound memory.
    fn cache_node(&self, pointer: &Pointer, node: &Arc<Node>) {
        self.nodes.put(*pointer, Arc::clone(node), node.memory());
    }
}

fn decode(bytes: &[u8], pointer: &Pointer) -> Result<Node> {
    let view = encoding::decode(bytes).map_err(|error| match error {
        Error::Damaged(detail) => pointer.damaged(detail),
        other => other,
    })?;
    let body = match view.entries {
        NodeEntries::Leaf(entries) => Body::Leaf(Leaf::from_entries(entries.into_iter())),
        NodeEntries::Internal(entries) => {
            Body::Internal(entries.into_iter().map(|(key, child)| (key, Child::Stored(child))).collect())
        }
    };
    let mut node = Node::new(pointer.generation, view.head, body);
    node.stored = OnceLock::from(*pointer);
    Ok(node)
}

/// Verifies TREE-4, and the part of TREE-5 that a node alone cannot show: only a root may be an
/// empty leaf.
fn check_bounds(node: &Node, pointer: &Pointer, bounds: Bounds) -> Result<()> {
    let flaw = if node.tree != bounds.tree {
        "tree node belongs to another tree"
    } else if node.level != bounds.level {
        "tree node has another level than its parent says"
    } else if (node.lower, node.upper) != (bounds.lower, bounds.upper) {
        "tree node has other fences than its parent says"
    } else if node.is_empty() && (bounds.lower, bounds.upper) != (Key::MIN, Key::MAX) {
        "tree node is empty"
    } else {
        return Ok(());
    };
    Err(pointer.damaged(flaw))
}

// ---- writing ----

fn flush(
    store: &NodeStore,
    node: &Arc<Node>,
    write: &mut dyn FnMut(u8, Vec<u8>) -> Result<Pointer>,
) -> Result<Pointer> {
    if let Some(pointer) = node.stored.get() {
        // Children of a stored node are stored: its page names them.
        return Ok(*pointer);
    }
    let mut pointers = Vec::with_capacity(node.children().len());
    for (_, child) in node.children() {
        pointers.push(match child {
            Child::Stored(pointer) => *pointer,
            Child::Resident(child) => flush(store, child, write)?,
        });
    }
    let pointer = write(node.level, node.encode(&pointers))?;
    // TREE-1, TREE-2: newer versions share the node, so only its `stored` cell is set. The cell was
    // empty above, and this commit is the only writer.
    let _ = node.stored.set(pointer);
    match &node.body {
        Body::Leaf(_) => store.cache_node(&pointer, node),
        Body::Internal(children) => {
            let children = children.iter().zip(&pointers).map(|((key, _), child)| (*key, Child::Stored(*child)));
            let mut written = Node::new(node.born, node.bounds(), Body::Internal(children.collect()));
            written.stored = OnceLock::from(pointer);
            store.cache_node(&pointer, &Arc::new(written));
        }
    }
    Ok(pointer)
}

fn forget_written(child: &mut Child) {
    let Child::Resident(node) = child else { return };
    if let Some(pointer) = node.stored.get() {
        *child = Child::Stored(*pointer);
        return;
    }
    let Body::Internal(children) = &node.body else { return };
    if !children.iter().any(|(_, child)| matches!(child, Child::Resident(_))) {
        return;
    }
    // TREE-1: copied when a published version shares it. The node belongs to the open transaction,
    // so nothing is superseded (TREE-3).
    if let Body::Internal(children) = &mut Arc::make_mut(node).body {
        children.iter_mut().for_each(|(_, child)| forget_written(child));
    }
}
