//! Authentic pages in a wrong place are reported as damage (TREE-4), cached or not.

use super::*;
use crate::format::node::{self, NodeEntries, NodeHead};

const GENERATION: Generation = Generation(7);

/// A tree of two levels on a medium.
fn stored_tree() -> (Arc<Medium>, Root, Vec<(Key, Pointer)>) {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(1 << 20);
    let mut tree = Tree::empty(TreeId::Live);
    let mut edits = Edits::new(GENERATION);
    for sub in 0..40 {
        tree.insert(&store, &mut edits, Key::new(sub, 1, 0), &[7; 2000]).unwrap();
    }
    let root = medium.flush(&store, &tree, GENERATION);
    assert_eq!(root.level, 1);
    let children = children(&medium, &root.pointer).1;
    assert!(children.len() >= 3);
    (medium, root, children)
}

fn children(medium: &Medium, pointer: &Pointer) -> (NodeHead, Vec<(Key, Pointer)>) {
    let bytes = medium.read_node(pointer).unwrap();
    let view = node::decode(&bytes).unwrap();
    let NodeEntries::Internal(children) = view.entries else { panic!("not an internal node") };
    (view.head, children)
}

fn put_root(medium: &Medium, root: &Root, children: Vec<(Key, Pointer)>) {
    let head = self::children(medium, &root.pointer).0;
    let bytes = node::encode_internal(&head, children.into_iter());
    medium.pages.lock().insert(root.pointer, bytes);
}

/// Rewrites the leaf's head and keeps the first `count` of its entries.
fn put_leaf(medium: &Medium, pointer: &Pointer, count: usize, change: impl FnOnce(&mut NodeHead)) {
    let bytes = medium.read_node(pointer).unwrap();
    let mut view = node::decode(&bytes).unwrap();
    let NodeEntries::Leaf(mut entries) = view.entries else { panic!("not a leaf") };
    change(&mut view.head);
    entries.truncate(count);
    medium.pages.lock().insert(*pointer, node::encode_leaf(&view.head, entries.into_iter()));
}

/// Returns the objects of the readable entries, and the number of lost nodes.
fn surviving(store: &NodeStore, tree: &Tree) -> (Vec<u64>, usize) {
    let (mut objects, mut lost) = (Vec::new(), 0);
    let mut keep = |key: Key, _: &[u8]| {
        objects.push(key.object);
        Ok(())
    };
    let mut pass = |_| {
        lost += 1;
        Ok(())
    };
    tree.scan_surviving(store, &mut keep, &mut pass).unwrap();
    (objects, lost)
}

/// Asserts that every path to the damaged node fails with its block and generation.
#[track_caller]
fn assert_damaged(store: &NodeStore, tree: TreeId, root: &Root, detail: &str) {
    let tree = Tree::from_root(tree, root);
    let mut edits = Edits::new(GENERATION.next());
    let key = Key::new(0, 1, 0);
    let mut working = tree.clone();
    let errors = [
        tree.get(store, key, |_| Ok(())).unwrap_err(),
        tree.floor(store, key, |_, _| Ok(())).unwrap_err(),
        tree.scan(store, Key::MIN, Key::MAX, &mut |_, _| Ok(ControlFlow::Continue(()))).unwrap_err(),
        tree.visit_pages(store, &mut |_, _| Ok(()), &mut |lost| Err(lost.error)).unwrap_err(),
        tree.scan_surviving(store, &mut |_, _| Ok(()), &mut |lost| Err(lost.error)).unwrap_err(),
        working.remove(store, &mut edits, key).unwrap_err(),
        working.insert(store, &mut edits, key, b"x").unwrap_err(),
    ];
    for error in errors {
        let Error::Damaged(text) = &error else { panic!("{error}") };
        assert!(text.contains(detail) && text.contains("block="), "{text}");
    }
}

#[test]
fn swapped_children_are_damage() {
    let (medium, root, mut children) = stored_tree();
    let (a, b) = (children[0].1, children[1].1);
    (children[0].1, children[1].1) = (b, a);
    put_root(&medium, &root, children);
    assert_damaged(&medium.cold(1 << 20), TreeId::Live, &root, "other fences");
}

#[test]
fn swapped_children_are_damage_in_the_cache_too() {
    let (medium, root, mut children) = stored_tree();
    let store = medium.cold(1 << 20);
    scan_all(&store, &Tree::from_root(TreeId::Live, &root));
    children[0].1 = children[1].1;
    put_root(&medium, &root, children);
    store.forget(&root.pointer);
    assert_damaged(&store, TreeId::Live, &root, "other fences");
}

#[test]
fn a_wrong_fence_is_damage() {
    let (medium, root, children) = stored_tree();
    put_leaf(&medium, &children[0].1, usize::MAX, |head| head.upper = Key::new(99, 0, 0));
    assert_damaged(&medium.cold(1 << 20), TreeId::Live, &root, "other fences");
}

#[test]
fn a_wrong_level_is_damage() {
    let (medium, root, _) = stored_tree();
    for level in [0, 2, 15] {
        let root = Root { level, ..root };
        assert_damaged(&medium.cold(1 << 20), TreeId::Live, &root, "another level");
    }
}

#[test]
fn a_child_of_the_same_level_is_damage() {
    let (medium, root, mut children) = stored_tree();
    children[0].1 = root.pointer;
    put_root(&medium, &root, children);
    assert_damaged(&medium.cold(1 << 20), TreeId::Live, &root, "another level");
}

#[test]
fn a_node_of_another_tree_is_damage() {
    let (medium, root, _) = stored_tree();
    assert_damaged(&medium.cold(1 << 20), TreeId::Space, &root, "another tree");
}

#[test]
fn an_empty_leaf_below_the_root_is_damage() {
    let (medium, root, children) = stored_tree();
    put_leaf(&medium, &children[0].1, 0, |_| ());
    assert_damaged(&medium.cold(1 << 20), TreeId::Live, &root, "");
}

#[test]
fn a_page_that_does_not_decode_is_damage() {
    let (medium, root, children) = stored_tree();
    medium.pages.lock().get_mut(&children[0].1).unwrap().truncate(60);
    assert_damaged(&medium.cold(1 << 20), TreeId::Live, &root, "generation=7");
}

#[test]
fn a_pointer_with_another_tag_is_not_served_from_the_cache() {
    let (medium, root, _) = stored_tree();
    let store = medium.cold(1 << 20);
    scan_all(&store, &Tree::from_root(TreeId::Live, &root));
    let mut forged = root;
    forged.pointer.tag[0] ^= 1;
    assert_damaged(&store, TreeId::Live, &forged, "no page");
}

#[test]
fn an_empty_root_leaf_of_another_writer_is_an_empty_tree() {
    let medium = Arc::new(Medium::default());
    let store = medium.cold(1 << 20);
    let head = NodeHead { level: 0, tree: TreeId::Live as u8, lower: Key::MIN, upper: Key::MAX };
    let pointer = medium.write(GENERATION, node::encode_leaf(&head, std::iter::empty()));
    let mut tree = Tree::from_root(TreeId::Live, &Root { pointer, level: 0 });
    let mut edits = Edits::new(GENERATION.next());
    let key = Key::new(1, 1, 1);
    assert!(tree.floor(&store, key, |_, _| Ok(())).unwrap().is_none());
    assert!(!tree.remove(&store, &mut edits, key).unwrap());
    assert!(!tree.insert(&store, &mut edits, key, b"value").unwrap());
    assert_eq!((edits.superseded.len(), edits.dirtied), (1, 1));
    assert!(tree.remove(&store, &mut edits, key).unwrap());
    assert_eq!((edits.superseded.len(), edits.dirtied), (1, 0));
}

/// A record that cannot be applied is lost permanently with its leaf; all other records are
/// applied, whatever the state of their neighbours (LOG-6).
#[test]
fn a_record_laid_on_a_damaged_leaf_is_never_seen_as_it_was() {
    let (medium, root, children) = stored_tree();
    let before = Tree::from_root(TreeId::Live, &root);
    // All keys of the middle leaf and of its neighbours.
    let last = children[1].0.object..children[2].0.object;
    let lost = children[1].1;
    let page = medium.pages.lock().remove(&lost).unwrap();
    let store = medium.cold(1 << 20);
    let mut tree = before.clone();
    let mut edits = Edits::new(GENERATION.next());
    for sub in 0..40 {
        let key = Key::new(sub, 1, 0);
        let value = (sub % 2 == 0 && sub > last.end).then_some(&[8; 10][..]);
        let laid = tree.overlay(&store, &mut edits, key, value);
        assert_eq!(matches!(laid, Err(Error::Damaged(_))), last.contains(&sub), "{sub}: {laid:?}");
    }
    // The medium can read the page again.
    medium.pages.lock().insert(lost, page);
    for sub in 0..40 {
        let got = tree.get(&store, Key::new(sub, 1, 0), |value| Ok(value.to_vec()));
        match got {
            Err(error) => assert!(matches!(error, Error::Damaged(_)) && last.contains(&sub), "{sub}: {error}"),
            Ok(found) => {
                assert!(!last.contains(&sub), "{sub}");
                assert_eq!(found, (sub % 2 == 0 && sub > last.end).then(|| vec![8; 10]), "{sub}");
            }
        }
    }
    let end = Key::new(last.end, 1, 0);
    assert!(matches!(tree.floor(&store, end, |_, _| Ok(())), Err(Error::Damaged(_))), "its left neighbour is lost");
    let first = Key::new(last.start - 1, 1, 0);
    assert!(tree.floor(&store, first, |_, _| Ok(())).unwrap().is_none());
    let compared = tree.differences(&before, &store, &mut |key, _, _| {
        assert!(key < children[1].0);
        Ok(ControlFlow::Continue(()))
    });
    assert!(matches!(compared, Err(Error::Damaged(_))), "what is lost was told to be the same");
    assert_eq!(surviving(&store, &tree), ((last.end + 1..40).filter(|sub| sub % 2 == 0).collect(), 1));
}

#[test]
fn a_damaged_neighbour_prevents_no_removal() {
    let (medium, root, children) = stored_tree();
    medium.pages.lock().remove(&children[1].1);
    let store = medium.cold(1 << 20);
    let mut tree = Tree::from_root(TreeId::Live, &root);
    let mut edits = Edits::new(GENERATION.next());
    let upper = children[1].0.object;
    // The last entry of a leaf is not removed without a neighbour.
    for sub in 1..upper {
        assert!(tree.remove(&store, &mut edits, Key::new(sub, 1, 0)).unwrap(), "{sub} of {upper}");
    }
    // That of the next leaf is removed with the other neighbour.
    let (next, end) = (children[2].0.object, children[3].0.object);
    for sub in next..end {
        assert!(tree.remove(&store, &mut edits, Key::new(sub, 1, 0)).unwrap(), "{sub} of {end}");
    }
    let root = medium.flush(&store, &tree, edits.generation);
    let written = Tree::from_root(TreeId::Live, &root);
    assert_eq!(surviving(&medium.cold(1 << 20), &written), ([0].into_iter().chain(end..40).collect(), 1));
}
