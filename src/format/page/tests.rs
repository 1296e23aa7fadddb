//! Prologues, pointers and data bodies: round trips and every refusal of section 5.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::format::strategies::{mutated, noise, pointer};

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
        stored_length: 131096,
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
    assert!(refused(Prologue { stored_length: 33 * 4096 - 103, ..data_prologue() }));
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

fn body() -> Vec<u8> {
    let items = [
        PackedItem { ino: Ino(5), offset: 0, start: 0, length: 4000 },
        PackedItem { ino: Ino(6), offset: 0, start: 4000, length: 1000 },
    ];
    encode_data_body(12, &[(&[1; 300], false), (&[2; 904], true)], &items)
}

#[test]
fn a_cell_table_tells_where_each_cell_lies() {
    let body = body();
    let table = decode_cell_table(&body, 5000).unwrap();
    assert_eq!(table.cell_size, 4096);
    assert_eq!(table.cells[0], Cell { stored: 64..364, raw: false, plain_length: 4096 });
    assert_eq!(table.cells[1], Cell { stored: 364..1268, raw: true, plain_length: 904 });
    assert_eq!(table.items[1], PackedItem { ino: Ino(6), offset: 0, start: 4000, length: 1000 });
    assert_eq!(body[table.cells[1].stored.clone()], [2; 904]);
}

#[test]
fn a_cell_table_that_does_not_fit_its_body_is_refused() {
    let good = body();
    let longer = [&good[..], &[0]].concat();
    assert!(decode_cell_table(&longer, 5000).is_err(), "left over");
    assert!(decode_cell_table(&good[..good.len() - 1], 5000).is_err(), "cell cut");
    for plain in [0, 4096, 4999, 5001, 8193, 131073] {
        assert!(decode_cell_table(&good, plain).is_err(), "plain={plain}");
    }
    for (at, value) in [(0, 1), (0, 65), (1, 1), (2, 11), (2, 18), (3, 1), (6, 1), (7, 1)] {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert!(decode_cell_table(&bytes, 5000).is_err(), "at={at}");
    }
    let empty_cell = encode_data_body(12, &[(&[], false)], &[]);
    assert!(decode_cell_table(&empty_cell, 10).is_err());
}

#[test]
fn packed_items_lie_within_the_data_and_apart() {
    let whole = [0; 100];
    let item = |start, length| PackedItem { ino: Ino(3), offset: 0, start, length };
    let decode = |items: &[PackedItem]| decode_cell_table(&encode_data_body(12, &[(&whole, true)], items), 100);
    assert!(decode(&[item(50, 50), item(0, 50)]).is_ok(), "any order");
    assert!(decode(&[item(0, 51), item(50, 50)]).is_err());
    assert!(decode(&[item(50, 50), item(0, 51)]).is_err());
    assert!(decode(&[item(0, 0)]).is_err());
    assert!(decode(&[item(1, 100)]).is_err());
    assert!(decode(&[item(u32::MAX, 2)]).is_err());
    assert!(decode(&[PackedItem { ino: Ino(0), ..item(0, 1) }]).is_err());
    assert!(decode(&[PackedItem { offset: u64::MAX, ..item(0, 1) }]).is_err());
}

proptest! {
    #[test]
    fn pointers_round_trip(pointer in pointer()) {
        prop_assert_eq!(Pointer::decode(&pointer.encode()).unwrap(), pointer);
    }

    #[test]
    fn cell_tables_round_trip(plain in 1..=131072u32, log2 in 12..=17u8, sizes in vec(1..2000usize, 64), raw in any::<u64>()) {
        let cell_size = 1u32 << log2;
        let count = plain.div_ceil(cell_size) as usize;
        let plain_of = |i: usize| (plain - i as u32 * cell_size).min(cell_size);
        let stored: Vec<(Vec<u8>, bool)> = (0..count)
            .map(|i| if raw >> i & 1 == 1 { (vec![0; plain_of(i) as usize], true) } else { (vec![1; sizes[i]], false) })
            .collect();
        let cells: Vec<(&[u8], bool)> = stored.iter().map(|(bytes, raw)| (&bytes[..], *raw)).collect();
        let body = encode_data_body(log2, &cells, &[]);
        let table = decode_cell_table(&body, plain).unwrap();
        prop_assert_eq!(table.cells.len(), count);
        for (i, cell) in table.cells.iter().enumerate() {
            prop_assert_eq!(cell.raw, cells[i].1);
            prop_assert_eq!(cell.plain_length, plain_of(i));
            prop_assert_eq!(&body[cell.stored.clone()], cells[i].0);
        }
    }

    #[test]
    fn no_input_panics(bytes in any::<[u8; 48]>(), noise in noise(2000), damaged in mutated(body()), plain in any::<u32>(),
                       prologue in mutated(data_prologue().encode().to_vec())) {
        let _ = Prologue::decode(&bytes);
        if let Ok(prologue) = <[u8; 48]>::try_from(prologue) {
            let _ = Prologue::decode(&prologue);
        }
        let _ = Pointer::decode(&array_at(&bytes, 0));
        let _ = decode_cell_table(&noise, plain);
        let _ = decode_cell_table(&damaged, 5000);
    }
}
