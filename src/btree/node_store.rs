//! Node store: loads nodes through the pager, caches decoded ones, prefetches from remote storage,
//! and writes dirty nodes bottom-up.

use std::sync::{Arc, OnceLock};

use super::Child;
use super::node::{Body, Bounds, Leaf, Node};
use crate::error::{CacheStats, Error, Result};
use crate::format::node::{self, NodeEntries};
use crate::format::page::PageKind;
use crate::format::{Key, Pointer};
use crate::pager::{Pager, ShardedCache};

/// Source of encoded nodes.
pub(super) trait NodePages: Send + Sync {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>>;
}

impl NodePages for Pager {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>> {
        let page = self.read_page(pointer, PageKind::Node)?;
        // Specification 6.1: the prologue, which scanners use to sort pages, must agree with the
        // node.
        let (tree, level) = (page.prologue.owner, page.prologue.position);
        match page.body() {
            [own_level, own_tree, ..] if (u64::from(*own_tree), u64::from(*own_level)) == (tree, level) => {}
            _ => return Err(mismatch_error("node is not what its prologue says", pointer)),
        }
        Ok(page.into_body())
    }
}

enum Source {
    Pager(Arc<Pager>),
    #[cfg(test)]
    Pages(Arc<dyn NodePages>),
}

/// Loader and cache of stored nodes.
pub(crate) struct NodeStore {
    source: Source,
    /// Stored nodes only; nodes changed by a transaction are not cached here.
    nodes: ShardedCache<Pointer, Arc<Node>>,
}

impl NodeStore {
    /// Creates a store with a cache of `budget` bytes of decoded nodes.
    pub(crate) fn new(pager: Arc<Pager>, budget: usize) -> NodeStore {
        NodeStore { source: Source::Pager(pager), nodes: ShardedCache::new(budget) }
    }

    #[cfg(test)]
    pub(super) fn from_pages(pages: Arc<dyn NodePages>, budget: usize) -> NodeStore {
        NodeStore { source: Source::Pages(pages), nodes: ShardedCache::new(budget) }
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

    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self.nodes.bytes()
    }

    /// Returns whether reading a node costs a network round trip.
    pub(super) fn is_remote(&self) -> bool {
        match &self.source {
            Source::Pager(pager) => pager.is_remote(),
            #[cfg(test)]
            Source::Pages(_) => false,
        }
    }

    /// Prefetches nodes from remote storage, except those in memory.
    pub(super) fn prefetch<'a>(&self, children: impl Iterator<Item = &'a Child>) {
        match &self.source {
            Source::Pager(pager) if pager.is_remote() => {
                let stored = children.filter_map(|child| match child {
                    Child::Stored(pointer) => Some(pointer),
                    Child::Resident(_) => None,
                });
                pager.prefetch_pages(stored.filter(|pointer| !self.nodes.has(pointer)));
            }
            _ => {}
        }
    }

    /// Returns the stored node at `pointer`, verified against its parent's bounds (TREE-4).
    pub(super) fn load(&self, pointer: &Pointer, bounds: Bounds) -> Result<Arc<Node>> {
        if let Some(node) = self.nodes.get(pointer) {
            check_bounds(&node, pointer, bounds)?;
            return Ok(node);
        }
        // Two threads that miss at the same time both load; the later one replaces an equal node.
        let bytes = match &self.source {
            Source::Pager(pager) => pager.read_node(pointer)?,
            #[cfg(test)]
            Source::Pages(pages) => pages.read_node(pointer)?,
        };
        let node = decode(&bytes, pointer)?;
        check_bounds(&node, pointer, bounds)?;
        let node = Arc::new(node);
        self.cache_node(pointer, &node);
        Ok(node)
    }

    /// Caches a node stored at `pointer`. An internal node must have only stored children, or the
    /// budget would not bound memory.
    pub(super) fn cache_node(&self, pointer: &Pointer, node: &Arc<Node>) {
        self.nodes.put(*pointer, Arc::clone(node), node.memory());
    }
}

fn decode(bytes: &[u8], pointer: &Pointer) -> Result<Node> {
    let view = node::decode(bytes).map_err(|error| match error {
        Error::Damaged(detail) => mismatch_error(&detail, pointer),
        other => other,
    })?;
    let body = match view.entries {
        NodeEntries::Leaf(entries) => Body::Leaf(Leaf::from_entries(entries.into_iter())),
        NodeEntries::Internal(entries) => {
            Body::Internal(entries.into_iter().map(|(key, child)| (key, Child::Stored(child))).collect())
        }
    };
    let bounds =
        Bounds { tree: view.head.tree, level: view.head.level, lower: view.head.lower, upper: view.head.upper };
    let mut node = Node::new(pointer.generation, bounds, body);
    node.stored = OnceLock::from(*pointer);
    Ok(node)
}

/// Verifies TREE-4, and the part of TREE-5 that a node alone cannot show: only a root may be an
/// empty leaf.
fn check_bounds(node: &Node, pointer: &Pointer, bounds: Bounds) -> Result<()> {
    if node.tree != bounds.tree {
        return Err(mismatch_error("tree node belongs to another tree", pointer));
    }
    if node.level != bounds.level {
        return Err(mismatch_error("tree node has another level than its parent says", pointer));
    }
    if (node.lower, node.upper) != (bounds.lower, bounds.upper) {
        return Err(mismatch_error("tree node has other fences than its parent says", pointer));
    }
    if node.is_empty() && (bounds.lower, bounds.upper) != (Key::MIN, Key::MAX) {
        return Err(mismatch_error("tree node is empty", pointer));
    }
    Ok(())
}

fn mismatch_error(detail: &str, pointer: &Pointer) -> Error {
    Error::damaged(format!("{detail}: block={} generation={}", pointer.run.address, pointer.generation.0))
}

// ---- writing ----

/// Writes `node` and unstored nodes below it; returns its pointer.
pub(super) fn flush(
    store: &NodeStore,
    node: &Arc<Node>,
    write: &mut dyn FnMut(u8, Vec<u8>) -> Result<Pointer>,
) -> Result<Pointer> {
    if let Some(pointer) = node.stored.get() {
        // Children of a stored node are stored: its page names them.
        return Ok(*pointer);
    }
    let mut pointers = Vec::new();
    if let Body::Internal(children) = &node.body {
        pointers.reserve_exact(children.len());
        for (_, child) in children {
            pointers.push(match child {
                Child::Stored(pointer) => *pointer,
                Child::Resident(child) => flush(store, child, write)?,
            });
        }
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

/// Replaces stored resident nodes in and below `child` by their pointers.
pub(super) fn forget_written(child: &mut Child) {
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

#[cfg(test)]
pub(super) fn count_dirty(child: &Child) -> u64 {
    match child {
        Child::Resident(node) if node.stored.get().is_none() => {
            1 + match &node.body {
                Body::Leaf(_) => 0,
                Body::Internal(children) => children.iter().map(|(_, child)| count_dirty(child)).sum(),
            }
        }
        _ => 0,
    }
}
