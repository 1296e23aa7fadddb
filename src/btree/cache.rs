//! Loads nodes through the pager and keeps decoded ones in a sharded LRU with a byte budget.

use std::sync::{Arc, OnceLock};

use lru::LruCache;
use parking_lot::Mutex;

use super::Child;
use super::node::{Body, Bounds, Leaf, Node};
use crate::error::{CacheUse, Error, Result};
use crate::format::node::{self, NodeEntries};
use crate::format::page::PageKind;
use crate::format::{Generation, Key, Pointer};
use crate::pager::Pager;

/// Shards of the cache, each with its own lock: several times the threads that serve requests.
const SHARDS: usize = 16;

/// Where the bytes of nodes come from.
pub(super) trait NodePages: Send + Sync {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>>;
}

impl NodePages for Pager {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>> {
        let page = self.read_page(pointer, PageKind::Node)?;
        // Specification 6.1: the prologue, by which a scan sorts pages, says the same as the node.
        let (tree, level) = (page.prologue.owner, page.prologue.position);
        match page.body() {
            [own_level, own_tree, ..] if (u64::from(*own_tree), u64::from(*own_level)) == (tree, level) => {}
            _ => return Err(misfit("node is not what its prologue says", pointer)),
        }
        Ok(page.into_body())
    }
}

enum Source {
    Pager(Arc<Pager>),
    #[cfg(test)]
    Pages(Arc<dyn NodePages>),
}

/// Where stored nodes come from.
pub(crate) struct NodeStore {
    source: Source,
    /// Leaf locks: nothing else is locked, read or written while one is held.
    shards: [Mutex<Shard>; SHARDS],
    shard_budget: usize,
}

/// Nodes by address and generation, which together name one page for ever (TXN-4).
struct Shard {
    nodes: LruCache<(u64, Generation), Arc<Node>>,
    /// Sum of the nodes' estimated bytes.
    bytes: usize,
    hits: u64,
    misses: u64,
}

impl NodeStore {
    /// `budget` in bytes of decoded nodes.
    pub(crate) fn new(pager: Arc<Pager>, budget: usize) -> NodeStore {
        NodeStore::with_source(Source::Pager(pager), budget)
    }

    #[cfg(test)]
    pub(super) fn over(pages: Arc<dyn NodePages>, budget: usize) -> NodeStore {
        NodeStore::with_source(Source::Pages(pages), budget)
    }

    fn with_source(source: Source, budget: usize) -> NodeStore {
        let shards =
            std::array::from_fn(|_| Mutex::new(Shard { nodes: LruCache::unbounded(), bytes: 0, hits: 0, misses: 0 }));
        NodeStore { source, shards, shard_budget: budget / SHARDS }
    }

    /// Forgets a node whose page was freed (its address may be reused under another generation).
    pub(crate) fn forget(&self, pointer: &Pointer) {
        let mut shard = self.shard(pointer).lock();
        if let Some(node) = shard.nodes.pop(&(pointer.run.address, pointer.generation)) {
            shard.bytes -= node.memory();
        }
    }

    /// Estimated bytes of the nodes kept, and how often one was found since the start.
    pub(crate) fn usage(&self) -> CacheUse {
        self.shards.iter().map(|shard| shard.lock()).fold(CacheUse::default(), |sum, shard| CacheUse {
            bytes: sum.bytes + shard.bytes as u64,
            hits: sum.hits + shard.hits,
            misses: sum.misses + shard.misses,
        })
    }

    /// Forgets all nodes; what a transaction changed is not kept here.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let mut shard = shard.lock();
            shard.bytes = 0;
            shard.nodes.clear();
        }
    }

    #[cfg(test)]
    pub(crate) fn memory(&self) -> usize {
        self.usage().bytes as usize
    }

    /// The stored node at `pointer`, which must be what its parent says (TREE-4).
    pub(super) fn load(&self, pointer: &Pointer, bounds: Bounds) -> Result<Arc<Node>> {
        if let Some(node) = self.cached(pointer) {
            check_bounds(&node, pointer, bounds)?;
            return Ok(node);
        }
        // Two threads that miss at once both load; the later one replaces an equal node.
        let bytes = match &self.source {
            Source::Pager(pager) => pager.read_node(pointer)?,
            #[cfg(test)]
            Source::Pages(pages) => pages.read_node(pointer)?,
        };
        let node = decode(&bytes, pointer)?;
        check_bounds(&node, pointer, bounds)?;
        let node = Arc::new(node);
        self.keep(pointer, &node);
        Ok(node)
    }

    fn cached(&self, pointer: &Pointer) -> Option<Arc<Node>> {
        let mut shard = self.shard(pointer).lock();
        let cached = shard.nodes.get(&(pointer.run.address, pointer.generation)).cloned();
        // A pointer with another tag does not name the page that was cached: let the pager judge it.
        let cached = cached.filter(|node| node.stored.get() == Some(pointer));
        let counter = if cached.is_some() { &mut shard.hits } else { &mut shard.misses };
        *counter += 1;
        cached
    }

    /// Caches a node that is stored at `pointer`; an internal one has only stored children, or the budget would not bound memory.
    pub(super) fn keep(&self, pointer: &Pointer, node: &Arc<Node>) {
        let mut shard = self.shard(pointer).lock();
        shard.bytes += node.memory();
        if let Some(old) = shard.nodes.put((pointer.run.address, pointer.generation), Arc::clone(node)) {
            shard.bytes -= old.memory();
        }
        while shard.bytes > self.shard_budget {
            let Some((_, old)) = shard.nodes.pop_lru() else { break };
            shard.bytes -= old.memory();
        }
    }

    fn shard(&self, pointer: &Pointer) -> &Mutex<Shard> {
        // Fibonacci hashing: addresses are often multiples of a node's blocks, so their low bits alone would share few shards.
        let hash = pointer.run.address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        &self.shards[hash as usize % SHARDS]
    }
}

fn decode(bytes: &[u8], pointer: &Pointer) -> Result<Node> {
    let view = node::decode(bytes).map_err(|error| match error {
        Error::Damaged(detail) => misfit(&detail, pointer),
        other => other,
    })?;
    let body = match view.entries {
        NodeEntries::Leaf(entries) => Body::Leaf(Leaf::copied(entries.into_iter())),
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

/// TREE-4. Also the part of TREE-5 that one node alone cannot tell: only a root may be an empty leaf.
fn check_bounds(node: &Node, pointer: &Pointer, bounds: Bounds) -> Result<()> {
    if node.tree != bounds.tree {
        return Err(misfit("tree node belongs to another tree", pointer));
    }
    if node.level != bounds.level {
        return Err(misfit("tree node has another level than its parent says", pointer));
    }
    if (node.lower, node.upper) != (bounds.lower, bounds.upper) {
        return Err(misfit("tree node has other fences than its parent says", pointer));
    }
    if node.is_empty() && (bounds.lower, bounds.upper) != (Key::MIN, Key::MAX) {
        return Err(misfit("tree node is empty", pointer));
    }
    Ok(())
}

fn misfit(detail: &str, pointer: &Pointer) -> Error {
    Error::damaged(format!("{detail}: block={} generation={}", pointer.run.address, pointer.generation.0))
}
