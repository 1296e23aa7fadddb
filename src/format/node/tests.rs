//! Nodes: round trips and every refusal of section 6.1.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;

use super::*;
use crate::format::ids::{Generation, Run};
use crate::format::tests::{key, mutated, noise, pointer};

fn head(level: u8) -> NodeHead {
    NodeHead { level, tree: 1, lower: Key::new(1, 1, 0), upper: Key::new(9, 0, 0) }
}

fn leaf(entries: &[(Key, &[u8])]) -> Vec<u8> {
    encode_leaf(&head(0), entries.iter().copied())
}

fn child(address: u64) -> Pointer {
    Pointer { run: Run::new(address, 4), generation: Generation(2), tag: [9; 16] }
}

fn refused(bytes: &[u8]) -> String {
    match decode(bytes) {
        Err(Error::Damaged(detail)) => detail,
        other => panic!("accepted: {:?}", other.map(|view| view.head)),
    }
}

#[test]
fn a_leaf_decodes_to_what_was_encoded() {
    let entries: [(Key, &[u8]); 3] =
        [(Key::new(1, 1, 0), b"first"), (Key::new(1, 1, 1), b""), (Key::new(8, 255, u64::MAX), &[1; MAX_VALUE])];
    let bytes = leaf(&entries);
    let view = decode(&bytes).unwrap();
    assert_eq!(view.head, head(0));
    assert_eq!(view.entries, NodeEntries::Leaf(entries.to_vec()));
}

#[test]
fn a_key_is_17_bytes_object_kind_sub() {
    let mut out = vec![];
    put_key(&mut out, Key::new(0x0102, 3, 0x0405));
    assert_eq!(out, [2, 1, 0, 0, 0, 0, 0, 0, 3, 5, 4, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn keys_ascend_within_the_fences() {
    let (a, b) = (Key::new(2, 0, 0), Key::new(3, 0, 0));
    for keys in [[b, a], [a, a], [Key::new(1, 0, 7), a], [a, Key::new(9, 0, 0)], [a, Key::MAX]] {
        let bytes = leaf(&[(keys[0], b""), (keys[1], b"")]);
        assert!(refused(&bytes).contains("out of order"), "{keys:?}");
    }
    for keys in [[b, a], [a, a], [a, Key::new(9, 0, 0)]] {
        let first = NodeHead { lower: keys[0], ..head(1) };
        let bytes = encode_internal(&first, [(keys[0], child(65)), (keys[1], child(69))].into_iter());
        assert!(refused(&bytes).contains("out of order"), "{keys:?}");
    }
}

#[test]
fn the_first_key_of_an_internal_node_is_its_lower_fence() {
    let bytes = encode_internal(&head(1), [(Key::new(1, 1, 1), child(65))].into_iter());
    assert!(refused(&bytes).contains("out of order"));
    let bytes = encode_internal(&head(1), [(Key::new(1, 1, 0), child(65))].into_iter());
    assert!(decode(&bytes).is_ok());
}

#[test]
fn an_internal_node_has_an_entry_and_no_null_pointer() {
    assert!(refused(&encode_internal(&head(1), [].into_iter())).contains("empty"));
    let bytes = encode_internal(&head(1), [(Key::new(1, 1, 0), Pointer::NULL)].into_iter());
    assert!(refused(&bytes).contains("null"));
}

#[test]
fn only_a_root_may_be_an_empty_leaf() {
    assert!(refused(&leaf(&[])).contains("empty"));
    let root = NodeHead { lower: Key::MIN, upper: Key::MAX, ..head(0) };
    assert!(decode(&encode_leaf(&root, [].into_iter())).is_ok());
}

#[test]
fn level_tree_fences_and_reserved_bytes_are_checked() {
    let good = leaf(&[(Key::new(2, 0, 0), b"v")]);
    for (at, value, want) in [(0, 16, "level"), (1, 0, "tree"), (1, 6, "tree"), (4, 1, "reserved"), (7, 1, "reserved")]
    {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert!(refused(&bytes).contains(want), "at={at}");
    }
    let crossed = NodeHead { upper: head(0).lower, ..head(0) };
    assert!(refused(&encode_leaf(&crossed, [].into_iter())).contains("fences"));
}

#[test]
fn nothing_is_left_over_and_nothing_missing() {
    let good = leaf(&[(Key::new(2, 0, 0), b"value")]);
    assert!(refused(&[&good[..], &[0]].concat()).contains("too long"));
    for end in 0..good.len() {
        refused(&good[..end]);
    }
    assert!(refused(&vec![0; NODE_CAPACITY + 1]).contains("too long"));
}

#[test]
fn a_value_of_more_than_3500_bytes_is_refused() {
    let mut bytes = leaf(&[(Key::new(2, 0, 0), &[0; MAX_VALUE])]);
    bytes.push(0);
    put(&mut bytes, NODE_HEAD + KEY, (MAX_VALUE as u16 + 1).to_le_bytes());
    assert!(refused(&bytes).contains("value that is too long"));
}

fn bounded() -> NodeHead {
    NodeHead { level: 0, tree: 1, lower: Key::MIN, upper: Key::MAX }
}

proptest! {
    #[test]
    fn leaves_round_trip(map in btree_map(key(), vec(any::<u8>(), 0..100), 0..100)) {
        let bytes = encode_leaf(&bounded(), map.iter().map(|(key, value)| (*key, &value[..])));
        let view = decode(&bytes).unwrap();
        let want: Vec<(Key, &[u8])> = map.iter().map(|(key, value)| (*key, &value[..])).collect();
        prop_assert_eq!(view.entries, NodeEntries::Leaf(want));
    }

    #[test]
    fn internal_nodes_round_trip(map in btree_map(key(), pointer(), 1..300)) {
        let lower = *map.keys().next().unwrap();
        let head = NodeHead { level: 3, lower, ..bounded() };
        let bytes = encode_internal(&head, map.iter().map(|(key, pointer)| (*key, *pointer)));
        let view = decode(&bytes).unwrap();
        prop_assert_eq!(view.head, head);
        prop_assert_eq!(view.entries, NodeEntries::Internal(map.into_iter().collect()));
    }

    #[test]
    fn no_input_panics(
        bytes in noise(400),
        leaf in mutated(leaf(&[(Key::new(1, 1, 0), b"first"), (Key::new(2, 1, 1), b"second")])),
        internal in mutated(encode_internal(&head(1), [(Key::new(1, 1, 0), child(65)), (Key::new(3, 1, 0), child(69))].into_iter())),
    ) {
        for input in [&bytes, &leaf, &internal] {
            let _ = decode(input);
        }
    }
}
