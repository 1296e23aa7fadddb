//! Entries of the log: round trips and every refusal of 9.4.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::format::tests::{mutated, noise};

fn head() -> EntryHead {
    EntryHead {
        generation: Generation(9),
        record: [1; 16],
        number: 3,
        length: 100,
        previous: [2; 16],
        time: Timestamp { seconds: -1, nanos: 999_999_999 },
        blocks: 2,
    }
}

fn entry() -> LogEntry {
    LogEntry {
        next_ino: 12,
        inodes: 7,
        dropped: vec![DroppedRange { ino: Ino(5), start: 100, end: u64::MAX }],
        records: vec![
            (Key::new(0, kind::ORPHAN, 9), Some(Vec::new())),
            (Key::new(5, kind::INODE, 0), Some(vec![7; 144])),
            (Key::new(5, kind::EXTENT, 131_072), None),
        ],
        pieces: vec![
            LogPiece { ino: Ino(5), offset: 0, data: vec![1, 2, 3] },
            LogPiece { ino: Ino(5), offset: 3, data: vec![4] },
            LogPiece { ino: Ino(6), offset: 0, data: vec![5] },
        ],
    }
}

fn changed_head(at: usize, bytes: &[u8]) -> Result<EntryHead> {
    let mut encoded = head().encode();
    encoded[at..at + bytes.len()].copy_from_slice(bytes);
    EntryHead::decode(&encoded)
}

fn refused(change: impl FnOnce(&mut LogEntry)) -> bool {
    let mut entry = entry();
    change(&mut entry);
    LogEntry::decode(&entry.encode()).is_err()
}

#[test]
fn a_head_decodes_to_what_was_encoded_and_its_fields_are_bounded() {
    assert_eq!(EntryHead::decode(&head().encode()).unwrap(), head());
    assert!(EntryHead::decode(&head().encode()[1..]).is_err());
    assert!(changed_head(24, &0u32.to_le_bytes()).is_err(), "numbers begin at 1");
    assert!(changed_head(24, &1u32.to_le_bytes()).is_err(), "nothing is before the first");
    assert!(changed_head(0, &0u64.to_le_bytes()).is_err(), "generations begin at 1");
    assert!(changed_head(60, &0u16.to_le_bytes()).is_err(), "no blocks");
    assert!(changed_head(60, &256u16.to_le_bytes()).is_err(), "more blocks than the log");
    assert!(changed_head(60, &255u16.to_le_bytes()).is_ok());
    assert!(changed_head(28, &(8192 - 120u32).to_le_bytes()).is_ok());
    assert!(changed_head(28, &(8192 - 119u32).to_le_bytes()).is_err(), "longer than its blocks");
    assert!(changed_head(62, &[1]).is_err() && changed_head(63, &[1]).is_err(), "a zero field");
    assert!(changed_head(56, &1_000_000_000u32.to_le_bytes()).is_err(), "a time beyond its second");
}

#[test]
fn a_body_decodes_to_what_was_encoded_and_fills_its_length() {
    let encoded = entry().encode();
    assert_eq!(encoded.len(), entry().length());
    assert_eq!(LogEntry::decode(&encoded).unwrap(), entry());
    assert!(LogEntry::decode(&[&encoded[..], &[0]].concat()).is_err());
    assert!(LogEntry::decode(&encoded[..encoded.len() - 1]).is_err());
    for at in [16, 20, 24, 28] {
        let mut counts = encoded.clone();
        counts[at..at + 4].fill(0xff);
        assert!(LogEntry::decode(&counts).is_err(), "at={at}");
    }
}

#[test]
fn records_are_those_of_the_live_tree_in_their_order() {
    for (object, kind, sub) in [(0, 32, 65), (1, 33, 1), (1, 34, 0), (0, 35, 1), (1, 36, 0), (1, 8, 0), (1, 0, 0)] {
        assert!(refused(|entry| entry.records = vec![(Key::new(object, kind, sub), Some(Vec::new()))]), "kind={kind}");
    }
    for (object, kind, sub) in [(0, kind::INODE, 0), (5, kind::INODE, 1), (0, kind::EXTENT, 0), (1, kind::TRIM, 5)] {
        assert!(refused(|entry| entry.records = vec![(Key::new(object, kind, sub), None)]), "a stray: kind={kind}");
    }
    assert!(refused(|entry| entry.records.swap(0, 1)));
    assert!(refused(|entry| entry.records[1].0 = entry.records[0].0));
    assert!(refused(|entry| entry.records[1].1 = Some(vec![0; MAX_VALUE + 1])));
    assert!(!refused(|entry| entry.records[1].1 = Some(vec![0; MAX_VALUE])));
}

#[test]
fn pieces_lie_within_a_file_in_their_order_and_do_not_overlap() {
    assert!(refused(|entry| entry.pieces.swap(1, 2)));
    assert!(refused(|entry| entry.pieces[1].offset = 2), "an overlap");
    assert!(refused(|entry| entry.pieces[1].data.clear()), "an empty piece");
    assert!(refused(|entry| entry.pieces[2].offset = MAX_OFFSET), "beyond the end of every file");
    assert!(!refused(|entry| entry.pieces[2].offset = MAX_OFFSET - 1));
    for ino in [0, MAX_INO + 1] {
        assert!(refused(|entry| entry.pieces = vec![LogPiece { ino: Ino(ino), offset: 0, data: vec![1] }]));
        assert!(refused(|entry| entry.dropped[0].ino = Ino(ino)));
    }
    assert!(refused(|entry| entry.dropped[0].end = 100), "an empty range");
    assert!(refused(|entry| entry.next_ino = MAX_INO + 2));
    assert!(!refused(|entry| entry.next_ino = MAX_INO + 1));
}

#[test]
fn blocks_and_capacity_agree() {
    for body in [0, 1, 3976, 3977, 8072, 8073] {
        let blocks = entry_blocks(body);
        assert!(body <= entry_capacity(blocks) && (blocks == 1 || body > entry_capacity(blocks - 1)), "body={body}");
    }
}

proptest! {
    #[test]
    fn pieces_of_any_bytes_round_trip(data in vec(vec(any::<u8>(), 1..50), 0..20), inodes in any::<u64>()) {
        let pieces: Vec<LogPiece> =
            data.into_iter().zip(1..).map(|(data, ino)| LogPiece { ino: Ino(ino), offset: 7 * ino, data }).collect();
        let want = LogEntry { inodes, pieces, ..entry() };
        prop_assert_eq!(LogEntry::decode(&want.encode()).unwrap(), want);
    }

    #[test]
    fn no_input_panics(noise in noise(300), body in mutated(entry().encode()), head in mutated(head().encode().to_vec())) {
        for input in [&noise, &body, &head] {
            let _ = LogEntry::decode(input);
            let _ = EntryHead::decode(input);
        }
    }
}
