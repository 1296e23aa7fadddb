//! Prologues and pointers: round trips and every refusal of section 5.

use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, pointer};

fn node_prologue() -> Prologue {
    Prologue {
        kind: PageKind::Node,
        compressed: true,
        blocks: 2,
        stored_length: 5000,
        plain_length: 16280,
        generation: Generation(4),
        owner: 1,
        position: 2,
    }
}

fn data_prologue() -> Prologue {
    Prologue {
        kind: PageKind::Data,
        compressed: false,
        blocks: 33,
        stored_length: 131072,
        plain_length: 131072,
        generation: Generation(4),
        owner: 12,
        position: 1 << 40,
    }
}

fn refused(prologue: Prologue) -> bool {
    matches!(Prologue::decode(&prologue.encode()), Err(Error::Damaged(_)))
}

#[test]
fn a_prologue_decodes_to_what_was_encoded() {
    let packed = Prologue { kind: PageKind::Packed, owner: 0, position: 0, ..data_prologue() };
    let list = Prologue { kind: PageKind::DeltaList, stored_length: 131072, ..packed };
    for prologue in [node_prologue(), data_prologue(), packed, list] {
        assert_eq!(Prologue::decode(&prologue.encode()).unwrap(), prologue);
    }
}

#[test]
fn a_prologue_with_lengths_beyond_its_page_is_refused() {
    assert!(refused(Prologue { blocks: 0, ..data_prologue() }));
    assert!(refused(Prologue { blocks: 65, ..data_prologue() }));
    assert!(refused(Prologue { blocks: 32, ..data_prologue() }));
    // The head has a chunk at least.
    let fullest = Prologue { stored_length: 33 * 4096 - 104 - 28, ..data_prologue() };
    assert_eq!(Prologue::decode(&fullest.encode()).unwrap().main_length(), 28);
    assert!(refused(Prologue { stored_length: fullest.stored_length + 1, ..fullest }));
    assert!(refused(Prologue { stored_length: 0, ..fullest }));
    assert!(refused(Prologue { stored_length: u32::MAX, ..fullest }));
    let list = Prologue { kind: PageKind::DeltaList, owner: 0, position: 0, blocks: 1, ..data_prologue() };
    let lengths = |length| Prologue { stored_length: length, plain_length: length, ..list };
    assert_eq!(Prologue::decode(&lengths(3992).encode()).unwrap().main_length(), 3992);
    assert!(refused(lengths(3993)));
    assert!(refused(Prologue { plain_length: 131073, ..data_prologue() }));
    assert!(refused(Prologue { plain_length: 0, ..data_prologue() }));
    assert!(refused(Prologue { plain_length: 16281, ..node_prologue() }));
}

#[test]
fn a_node_page_is_raw_in_4_blocks_or_compressed_in_fewer() {
    let raw = Prologue { compressed: false, blocks: 4, stored_length: 205, plain_length: 205, ..node_prologue() };
    assert_eq!(Prologue::decode(&raw.encode()).unwrap(), raw);
    assert!(refused(Prologue { blocks: 3, ..raw }));
    assert!(refused(Prologue { blocks: 5, ..raw }));
    assert!(refused(Prologue { stored_length: 204, ..raw }));
    assert!(refused(Prologue { blocks: 4, ..node_prologue() }));
}

#[test]
fn only_nodes_are_compressed_as_a_whole() {
    assert!(refused(Prologue { compressed: true, ..data_prologue() }));
    let mut bytes = node_prologue().encode();
    bytes[1] = 2;
    assert!(Prologue::decode(&bytes).is_err());
}

#[test]
fn a_prologue_of_an_impossible_owner_is_refused() {
    assert!(refused(Prologue { owner: 0, ..node_prologue() }));
    assert!(refused(Prologue { owner: 6, ..node_prologue() }));
    assert!(refused(Prologue { position: 16, ..node_prologue() }));
    assert!(refused(Prologue { owner: 0, ..data_prologue() }));
    assert!(refused(Prologue { owner: 1 << 48, ..data_prologue() }));
    assert!(refused(Prologue { position: MAX_OFFSET, ..data_prologue() }));
    assert!(refused(Prologue { kind: PageKind::Packed, ..data_prologue() }));
}

#[test]
fn unknown_kinds_and_reserved_bytes_of_a_prologue_are_refused() {
    for (at, value) in [(0, 0), (0, 5), (12, 1), (15, 1), (40, 1), (47, 1)] {
        let mut bytes = data_prologue().encode();
        bytes[at] = value;
        assert!(matches!(Prologue::decode(&bytes), Err(Error::Damaged(_))), "at={at}");
    }
}

#[test]
fn the_null_pointer_is_zero_throughout() {
    assert_eq!(Pointer::NULL.encode(), [0; 32]);
    assert_eq!(Pointer::decode(&[0; 32]).unwrap(), Pointer::NULL);
    for at in [0, 5, 8, 31] {
        let mut bytes = [0; 32];
        bytes[at] = 1;
        assert!(matches!(Pointer::decode(&bytes), Err(Error::Damaged(_))), "at={at}");
    }
}

#[test]
fn a_pointer_to_more_than_64_blocks_is_refused() {
    let long = Pointer { run: Run::new(400, 65), generation: Generation(1), tag: [1; 16] };
    assert!(Pointer::decode(&long.encode()).is_err());
}

proptest! {
    #[test]
    fn pointers_round_trip(pointer in pointer()) {
        prop_assert_eq!(Pointer::decode(&pointer.encode()).unwrap(), pointer);
    }

    #[test]
    fn no_input_panics(bytes in any::<[u8; 48]>(), prologue in mutated(data_prologue().encode().to_vec())) {
        let _ = Prologue::decode(&bytes);
        if let Ok(prologue) = <[u8; 48]>::try_from(prologue) {
            let _ = Prologue::decode(&prologue);
        }
        let _ = Pointer::decode(&array_at(&bytes, 0));
    }
}
