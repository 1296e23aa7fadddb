//! Shared test support: a medium in memory, seeded randomness and a check of a tree's structure.

mod damage;
mod difference;
mod model;
mod sharing;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::NodePages;
use super::node::Body;
use super::*;
use crate::error::Error;
use crate::format::{NODE_CAPACITY, Run};

type Content = BTreeMap<Key, Vec<u8>>;

impl Tree {
    /// Returns the maximum number of nodes that changing one record may dirty.
    ///
    /// An insert clones one node and splits off another on each of the `level + 1` levels, and may
    /// add a root: `2 * (level + 1) + 1`. A remove clones the path. A merge turns two nodes into
    /// one, of which at least the one on the path was just cloned. A neighbour that takes the range
    /// of an emptied child is cloned when that child's own clone is dropped: `level + 1`. One more
    /// level is counted because a tree may grow between the reservation and the change.
    fn worst_case_dirty(&self) -> u64 {
        2 * (u64::from(self.level) + 2) + 1
    }

    fn count_dirty(&self) -> u64 {
        self.root.as_ref().map_or(0, count_dirty)
    }
}

fn count_dirty(child: &Child) -> u64 {
    match child {
        Child::Resident(node) if node.stored.get().is_none() => {
            1 + node.children().iter().map(|(_, child)| count_dirty(child)).sum::<u64>()
        }
        _ => 0,
    }
}

impl NodeStore {
    fn memory(&self) -> usize {
        self.nodes.bytes()
    }
}

/// All pages ever written, by pointer.
#[derive(Default)]
struct Medium {
    pages: Mutex<HashMap<Pointer, Vec<u8>>>,
}

impl NodePages for Medium {
    fn read_node(&self, pointer: &Pointer) -> Result<Vec<u8>> {
        let pages = self.pages.lock();
        pages.get(pointer).cloned().ok_or_else(|| Error::damaged(format!("no page: block={}", pointer.run.address)))
    }
}

impl Medium {
    fn write(&self, generation: Generation, bytes: Vec<u8>) -> Pointer {
        assert!(bytes.len() <= NODE_CAPACITY, "TREE-5");
        let mut pages = self.pages.lock();
        let address = 1000 + 4 * pages.len() as u64;
        let mut tag = [0; 16];
        tag[..8].copy_from_slice(&(address * 31).to_le_bytes());
        let pointer = Pointer { run: Run::new(address, 4), generation, tag };
        assert!(pages.insert(pointer, bytes).is_none());
        pointer
    }

    /// Creates a store with an empty cache.
    fn cold(self: &Arc<Medium>, budget: usize) -> NodeStore {
        NodeStore::from_pages(Arc::clone(self) as Arc<dyn NodePages>, budget)
    }

    fn flush(&self, store: &NodeStore, tree: &Tree, generation: Generation) -> Root {
        tree.flush(store, &mut |_, bytes| Ok(self.write(generation, bytes))).unwrap()
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn value(&mut self, longest: u64) -> Vec<u8> {
        let length = self.below(longest + 1) as usize;
        let seed = self.next().to_le_bytes();
        (0..length).map(|i| seed[i % 8] ^ i as u8).collect()
    }
}

/// Prints the seed of a failing test; `SEED` replays one, `SEEDS` tries more.
struct Seed(u64);

impl Seed {
    fn choose(seeds: std::ops::Range<u64>) -> impl Iterator<Item = u64> {
        crate::env::seeds(seeds.start..=seeds.end - 1)
    }
}

impl Drop for Seed {
    #[allow(clippy::print_stderr)]
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with SEED={}", self.0);
        }
    }
}

fn scan_all(store: &NodeStore, tree: &Tree) -> Content {
    let mut content = Content::new();
    let mut last = None;
    tree.scan(store, Key::MIN, Key::MAX, &mut |key, value| {
        assert!(last < Some(key), "keys ascend");
        last = Some(key);
        content.insert(key, value.to_vec());
        Ok(ControlFlow::Continue(()))
    })
    .unwrap();
    content
}

fn pages_of(store: &NodeStore, tree: &Tree) -> HashSet<Pointer> {
    let mut pages = HashSet::new();
    let visit = &mut |pointer: &Pointer, _| {
        assert!(pages.insert(*pointer), "a page has one parent");
        Ok(())
    };
    tree.visit_pages(store, visit, &mut |lost| Err(lost.error)).unwrap();
    pages
}

/// Checks TREE-5 and that every fence matches the parent, in resident and stored nodes.
fn check_structure(store: &NodeStore, tree: &Tree) {
    let Some(root) = &tree.root else { return };
    check_node(store, root, Bounds::root(tree.id as u8, tree.level));
}

fn check_node(store: &NodeStore, child: &Child, bounds: Bounds) {
    cursor::with_node(store, child, bounds, |node| {
        assert_eq!((node.tree, node.level), (bounds.tree, bounds.level));
        assert_eq!((node.lower, node.upper), (bounds.lower, bounds.upper), "level {}", node.level);
        assert!(!node.is_empty() && node.encoded_size() <= NODE_CAPACITY, "TREE-5");
        match &node.body {
            Body::Leaf(leaf) => {
                assert_eq!(node.encode(&[]).len(), node.encoded_size());
                assert!(leaf.iter().all(|(key, _)| bounds.lower <= key && key < bounds.upper));
            }
            Body::Internal(children) => {
                assert_eq!(children[0].0, node.lower);
                assert!(children.is_sorted_by(|a, b| a.0 < b.0));
                for (slot, (_, child)) in children.iter().enumerate() {
                    check_node(store, child, node.child_bounds(slot));
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Asserts that memory holds only nodes that no commit has written.
fn assert_settled(child: &Child) {
    let Child::Resident(node) = child else { return };
    assert!(node.stored.get().is_none(), "settled");
    if let Body::Internal(children) = &node.body {
        children.iter().for_each(|(_, child)| assert_settled(child));
    }
}
