//! Heads of data pages: round trips and every refusal of section 5.3.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, noise};

const STORED: u32 = 300 + 904;

fn head() -> Vec<u8> {
    let items = [
        PackedItem { ino: Ino(5), offset: 0, start: 0, length: 4000 },
        PackedItem { ino: Ino(6), offset: 0, start: 4000, length: 1000 },
    ];
    encode_head(12, &[(300, false, [1; 16]), (904, true, [2; 16])], &items, 120)
}

#[test]
fn a_cell_table_tells_where_each_cell_lies_and_its_tag() {
    let table = decode_chunk_table(&head(), STORED, 5000).unwrap();
    assert_eq!(table.chunk_size, 4096);
    assert_eq!(table.chunks[0], Chunk { at: 0, stored: 300, plain_length: 4096, raw: false, tag: [1; 16] });
    assert_eq!(table.chunks[1], Chunk { at: 300, stored: 904, plain_length: 904, raw: true, tag: [2; 16] });
    assert_eq!(table.items[1], PackedItem { ino: Ino(6), offset: 0, start: 4000, length: 1000 });
}

#[test]
fn a_head_that_does_not_fit_its_page_is_refused() {
    let good = head();
    for stored in [0, 300, STORED - 1, STORED + 1, u32::MAX] {
        assert!(decode_chunk_table(&good, stored, 5000).is_err(), "stored={stored}");
    }
    let least = head_length(2, 2);
    for length in 0..least {
        assert!(decode_chunk_table(&good[..length], STORED, 5000).is_err(), "length={length}");
    }
    assert!(decode_chunk_table(&good[..least], STORED, 5000).is_ok(), "no padding");
    for plain in [0, 4096, 4999, 5001, 8193, 131073, u32::MAX] {
        assert!(decode_chunk_table(&good, STORED, plain).is_err(), "plain={plain}");
    }
    for (at, value) in
        [(0, 1), (0, 65), (1, 1), (2, 11), (2, 18), (3, 1), (5, 255), (6, 1), (7, 1), (least, 1), (119, 1)]
    {
        let mut bytes = good.clone();
        bytes[at] = value;
        assert!(decode_chunk_table(&bytes, STORED, 5000).is_err(), "at={at}");
    }
    let one = |stored, raw| encode_head(12, &[(stored, raw, [0; 16])], &[], 28);
    assert!(decode_chunk_table(&one(0, false), 0, 10).is_err(), "empty chunk");
    assert!(decode_chunk_table(&one(9, true), 9, 10).is_err(), "raw chunk of another length");
    assert!(decode_chunk_table(&one(10, true), 10, 10).is_ok());
}

#[test]
fn packed_items_lie_within_the_data_and_apart() {
    let item = |start, length| PackedItem { ino: Ino(3), offset: 0, start, length };
    let decode = |items: &[PackedItem]| {
        decode_chunk_table(&encode_head(12, &[(100, true, [0; 16])], items, head_length(1, items.len())), 100, 100)
    };
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
    fn chunk_tables_round_trip(plain in 1..=131072u32, log2 in 12..=17u8, sizes in vec(1..2000u32, 32), raw in any::<u32>(),
                              tags in vec(any::<[u8; 16]>(), 32), padding in 0..5000usize) {
        let chunk_size = 1u32 << log2;
        let count = plain.div_ceil(chunk_size) as usize;
        let plain_of = |i: usize| (plain - i as u32 * chunk_size).min(chunk_size);
        let chunks: Vec<(u32, bool, Tag)> = (0..count)
            .map(|i| if raw >> i & 1 == 1 { (plain_of(i), true, tags[i]) } else { (sizes[i], false, tags[i]) })
            .collect();
        let stored = chunks.iter().map(|chunk| chunk.0).sum();
        let head = encode_head(log2, &chunks, &[], head_length(count, 0) + padding);
        prop_assert_eq!(head.len(), head_length(count, 0) + padding);
        let table = decode_chunk_table(&head, stored, plain).unwrap();
        prop_assert_eq!(table.chunks.len(), count);
        let mut at = 0;
        for (i, chunk) in table.chunks.iter().enumerate() {
            prop_assert_eq!((chunk.stored, chunk.raw, chunk.tag), chunks[i]);
            prop_assert_eq!((chunk.at, chunk.plain_length), (at, plain_of(i)));
            at += chunk.stored;
        }
    }

    #[test]
    fn no_input_panics(noise in noise(2000), damaged in mutated(head()), stored in any::<u32>(), plain in any::<u32>()) {
        let _ = decode_chunk_table(&noise, stored, plain);
        let _ = decode_chunk_table(&damaged, STORED, 5000);
    }
}
