//! Changes of nodes in place, valid values, fill of nodes, and the cache.

use super::*;
use crate::btree::node::Leaf;
use crate::format::MAX_VALUE;
use crate::format::node::{self, NodeHead};

fn key(object: u64) -> Key {
    Key::new(object, 1, 0)
}

fn resident(tree: &Tree) -> *const Node {
    match &tree.root {
        Some(Child::Resident(node)) => Arc::as_ptr(node),
        _ => panic!("not resident"),
    }
}

fn leaves_of(medium: &Medium, tree: &Tree) -> Vec<usize> {
    let mut sizes = Vec::new();
    let store = Arc::new(Medium::default()).cold(1 << 20);
    let mut write = |level, bytes: Vec<u8>| {
        if level == 0 {
            sizes.push(bytes.len());
        }
        Ok(medium.write(Generation(1), bytes))
    };
    tree.flush(&store, &mut write).unwrap();
    sizes
}

#[test]
fn only_a_private_node_changes_in_place() {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(1 << 20);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    tree.insert(&store, &mut edits, key(1), b"a").unwrap();
    let first = resident(&tree);
    tree.insert(&store, &mut edits, key(2), b"b").unwrap();
    assert_eq!(resident(&tree), first, "TREE-2: private");

    let published = tree.clone();
    tree.insert(&store, &mut edits, key(3), b"c").unwrap();
    assert_ne!(resident(&tree), first, "TREE-2: shared");
    assert_eq!((edits.superseded.len(), edits.dirtied), (0, 1), "TREE-3: the same transaction");
    assert_eq!(scan_all(&store, &published).len(), 2, "TREE-1");
    drop(published);

    // Frozen, not yet written, and no longer shared: still not editable in place.
    let frozen = resident(&tree);
    let mut edits = Edits::new(Generation(2));
    tree.insert(&store, &mut edits, key(4), b"d").unwrap();
    assert_ne!(resident(&tree), frozen);
    assert_eq!((edits.superseded.len(), edits.dirtied), (1, 1), "TREE-3: an older transaction");
    assert_eq!(Arc::as_ptr(&edits.superseded[0]), frozen);
}

/// A copy has space for the entry for which it is made.
#[test]
fn an_insert_copies_a_shared_leaf_once() {
    let store = Arc::new(Medium::default()).cold(1 << 20);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    for object in 0..100 {
        tree.insert(&store, &mut edits, key(object), &[1; 100]).unwrap();
    }
    let published = tree.clone();
    tree.insert(&store, &mut edits, key(100), &[1; 100]).unwrap();
    drop(published);
    let Some(Child::Resident(leaf)) = &tree.root else { panic!("not resident") };
    assert_eq!((leaf.level, Arc::strong_count(leaf)), (0, 1));
    assert!(leaf.memory() < leaf.encoded_size() / 4 * 5, "{} of {} bytes", leaf.memory(), leaf.encoded_size());
}

#[test]
fn readers_see_their_version_while_a_commit_and_edits_run() {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(64 << 10);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    for object in 0..2000 {
        tree.insert(&store, &mut edits, key(object), &[1; 100]).unwrap();
    }
    let frozen = tree.clone();
    std::thread::scope(|scope| {
        let readers = [0, 1].map(|_| {
            scope.spawn(|| {
                for _ in 0..20 {
                    let content = scan_all(&store, &frozen);
                    assert!(content.len() == 2000 && content.values().all(|value| value == &[1; 100]), "TREE-1");
                }
            })
        });
        let commit = scope.spawn(|| medium.flush(&store, &frozen, Generation(1)));
        let mut edits = Edits::new(Generation(2));
        for object in (0..2000).step_by(3) {
            tree.insert(&store, &mut edits, key(object), b"new").unwrap();
            tree.remove(&store, &mut edits, key(object + 1)).unwrap();
        }
        let root = commit.join().unwrap();
        assert!(edits.superseded.iter().all(|node| node.stored.get().is_some()));
        tree.forget_written();
        assert_eq!(tree.count_dirty() as i64, edits.dirtied);
        assert_eq!(scan_all(&medium.cold(0), &Tree::from_root(TreeId::Live, &root)).len(), 2000);
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

#[test]
fn ascending_keys_fill_their_leaves() {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(0);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    for object in 0..3000 {
        tree.insert(&store, &mut edits, key(object), &[1; 100]).unwrap();
    }
    let sizes = leaves_of(&medium, &tree);
    let full = &sizes[..sizes.len() - 1];
    assert!(full.len() > 20 && full.iter().all(|size| size * 100 >= NODE_CAPACITY * 85), "{sizes:?}");
}

#[test]
fn removing_most_records_merges_nodes() {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(0);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    for object in 0..3000 {
        tree.insert(&store, &mut edits, key(object), &[1; 100]).unwrap();
    }
    for object in (0..3000).filter(|object| object % 20 != 0) {
        tree.remove(&store, &mut edits, key(object)).unwrap();
    }
    check_structure(&store, &tree);
    // 150 records of 119 bytes: two leaves would suffice, and a quarter full is the minimum.
    assert!(leaves_of(&medium, &tree).len() <= 5);
    assert!(edits.superseded.is_empty(), "nothing older was there");
}

#[test]
fn entries_too_large_for_a_leaf_are_refused() {
    let store = Arc::new(Medium::default()).cold(0);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    assert!(matches!(tree.insert(&store, &mut edits, key(1), &[0; MAX_VALUE + 1]), Err(Error::Invalid(_))));
    assert!(matches!(tree.insert(&store, &mut edits, Key::MAX, b""), Err(Error::Invalid(_))));
    assert_eq!(edits.dirtied, 0);
    assert!(!tree.insert(&store, &mut edits, key(1), &[0; MAX_VALUE]).unwrap());
    assert!(tree.get(&store, Key::MAX, |_| Ok(())).unwrap().is_none());
}

#[test]
fn the_cache_keeps_within_its_budget_and_forgets() {
    let medium = Arc::new(Medium::default());
    let writer = medium.cold(0);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    for object in 0..3000 {
        tree.insert(&writer, &mut edits, key(object), &[1; 100]).unwrap();
    }
    let root = medium.flush(&writer, &tree, Generation(1));
    assert_eq!(writer.memory(), 0);
    let tree = Tree::from_root(TreeId::Live, &root);

    let small = medium.cold(500_000);
    scan_all(&small, &tree);
    assert!(small.memory() > 100_000 && small.memory() <= 500_000, "{}", small.memory());

    let large = medium.cold(1 << 24);
    let pages = pages_of(&large, &tree);
    assert!(large.memory() > 3000 * 119);
    medium.pages.lock().clear();
    assert_eq!(scan_all(&large, &tree).len(), 3000, "served from memory");
    pages.iter().for_each(|pointer| large.forget(pointer));
    assert_eq!(large.memory(), 0);
    assert!(tree.get(&large, key(1), |_| Ok(())).is_err());
}

/// Three internal nodes with one leaf each, of one record: allowed by the format, though never
/// written here.
fn thin_tree(medium: &Medium) -> Tree {
    let fences = [Key::MIN, key(2), key(3), Key::MAX];
    let head = |level, lower, upper| NodeHead { level, tree: TreeId::Live as u8, lower, upper };
    let children: Vec<(Key, Pointer)> = (0..3)
        .map(|slot| {
            let (lower, upper) = (fences[slot], fences[slot + 1]);
            let entry = (key(slot as u64 + 1), &b"value"[..]);
            let leaf = node::encode_leaf(&head(0, lower, upper), std::iter::once(entry));
            let leaf = medium.write(Generation(1), leaf);
            let internal = node::encode_internal(&head(1, lower, upper), std::iter::once((lower, leaf)));
            (lower, medium.write(Generation(1), internal))
        })
        .collect();
    let root = node::encode_internal(&head(2, Key::MIN, Key::MAX), children.into_iter());
    let pointer = medium.write(Generation(1), root);
    Tree::from_root(TreeId::Live, &Root { pointer, level: 2 })
}

#[test]
fn a_neighbour_takes_the_range_of_an_emptied_node_on_every_level() {
    for order in [[1, 2, 3], [1, 3, 2], [2, 1, 3], [2, 3, 1], [3, 2, 1], [3, 1, 2]] {
        let medium = Arc::new(Medium::default());
        let store = medium.cold(1 << 20);
        let mut tree = thin_tree(&medium);
        let mut edits = Edits::new(Generation(2));
        for object in order {
            let (before, bound) = (edits.dirtied, i64::from(tree.level) + 1);
            assert!(tree.remove(&store, &mut edits, key(object)).unwrap());
            assert!(edits.dirtied - before <= bound, "worst case");
            assert_eq!(tree.count_dirty() as i64, edits.dirtied);
            check_structure(&store, &tree);
            // The whole range still takes records.
            let mut copy = tree.clone();
            let mut apart = Edits::new(Generation(2));
            for other in [0, 1, 2, 3, 4] {
                copy.insert(&store, &mut apart, key(other), b"new").unwrap();
            }
            assert_eq!(scan_all(&store, &copy).len(), 5);
        }
        assert!(tree.root.is_none());
        let superseded: HashSet<Pointer> =
            edits.superseded.iter().filter_map(|node| node.stored.get().copied()).collect();
        assert_eq!(
            (edits.dirtied, edits.superseded.len(), superseded.len()),
            (0, 7, 7),
            "TREE-3: each of 7 pages once"
        );
    }
}

#[test]
fn replaced_values_do_not_pile_up_in_a_leaf() {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(0);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(Generation(1));
    for round in 0..1000 {
        let length = round % 1000;
        tree.insert(&store, &mut edits, key(1), &vec![1; length]).unwrap();
        tree.insert(&store, &mut edits, key(2), &[2; 3]).unwrap();
        tree.remove(&store, &mut edits, key(2)).unwrap();
    }
    let Some(Child::Resident(node)) = &tree.root else { panic!("not resident") };
    let bound = 2 * (2 * node.encoded_size() + 512 + 1000);
    assert!(node.memory() <= size_of::<Node>() + size_of::<Leaf>() + 4 * 32 + bound, "{}", node.memory());
    assert_eq!(tree.get(&store, key(1), |value| Ok(value.len())).unwrap(), Some(999));
}
