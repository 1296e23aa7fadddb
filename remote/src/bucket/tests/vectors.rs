//! Byte layout of the objects as in format-spec/bucket-vectors.json, and malformed input.

use std::path::Path;

use serde_json::{Value, json};

use super::super::layout::{
    self, MAX_BLOCKS, RecordBody, RecordKind, TRAILER_BYTES, Tombstone, Trailer, WriterIdentity, decode_body,
    decode_checkpoint, decode_marker, encode_checkpoint, encode_marker, encode_record, encode_segment,
};
use super::super::map::{MapEntry, ObjectId, ObjectRef};
use super::seed;
use super::simulated::Dice;
use crate::hex;

const INCARNATION: [u8; 16] = [0x11; 16];

fn entries() -> Vec<MapEntry> {
    let (segment, record) = (ObjectId::Segment([0x22; 32]), ObjectId::Log(5));
    vec![
        MapEntry { blocks: 0..1, place: Some(ObjectRef { id: record, blocks: 3, at: 2 }) },
        MapEntry { blocks: 1..100, place: None },
        MapEntry { blocks: 100..4000, place: Some(ObjectRef { id: segment, blocks: 4096, at: 10 }) },
        MapEntry { blocks: 4000..4001, place: Some(ObjectRef { id: record, blocks: 3, at: 0 }) },
    ]
}

fn record(pages: &[u8]) -> (Vec<u8>, Trailer) {
    let trailer = Trailer {
        kind: RecordKind::Commit,
        incarnation: INCARNATION,
        sequence: 6,
        epoch: 2,
        writer: [0x33; 16],
        nonce: [0x44; 16],
        time: 1_700_000_000,
        previous: [0x55; 32],
        checkpoint: Some(([0x66; 32], 300)),
        length: 4001 * 4096,
        ..Trailer::default()
    };
    let dead = vec![
        Tombstone::new(ObjectId::Segment([0x77; 32]), 1_699_000_000),
        Tombstone::new(ObjectId::Checkpoint([0x88; 32]), 0),
        Tombstone { id: ObjectId::Log(2), extra: 2, since: 1_699_000_001 },
    ];
    let owner = WriterIdentity {
        host: "laptop".into(),
        machine: [0x99; 16],
        boot: [0xaa; 16],
        process: 1234,
        started: 5_678_901,
    };
    encode_record(&trailer, pages, &RecordBody { changes: entries(), tombstones: dead, writer: owner })
}

/// What this program writes.
fn written() -> Value {
    let pages: Vec<u8> = (0..3).flat_map(|byte| [byte; 4096]).collect();
    let (record, _) = record(&pages);
    let (segment, segment_name) = encode_segment(&INCARNATION, &[0xbb; 16], &[7..8, 20..22], &pages);
    let no_zeros: Vec<MapEntry> = entries().into_iter().filter(|entry| entry.place.is_some()).collect();
    let (checkpoint, checkpoint_name) = encode_checkpoint(&INCARNATION, &[0xcc; 16], 6, &no_zeros);
    json!({
        "about": "Objects of ../bucket.md; `pages` are three blocks of the bytes 00, 01 and 02, left out where an object begins with them",
        "incarnation": hex(&INCARNATION),
        "marker": hex(&encode_marker(&INCARNATION)),
        "record": {"number": 6, "behind_pages": hex(&record[pages.len()..])},
        "segment": {"name": hex(&segment_name), "behind_pages": hex(&segment[pages.len()..])},
        "checkpoint": {"name": hex(&checkpoint_name), "bytes": hex(&checkpoint)},
    })
}

/// `WRITE_VECTORS` writes them anew.
#[test]
fn objects_are_the_bytes_of_the_vectors() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../format-spec/bucket-vectors.json");
    if std::env::var_os("WRITE_VECTORS").is_some() {
        std::fs::write(&path, format!("{:#}\n", written())).unwrap();
    }
    let vectors: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    assert_eq!(written(), vectors);
}

#[test]
fn what_is_written_is_read() {
    let (bytes, trailer) = record(&[0; 8192]);
    let at = bytes.len() - TRAILER_BYTES;
    let read = Trailer::decode(&bytes[at..], &INCARNATION).unwrap();
    assert_eq!(read, trailer);
    let said = decode_body(&read, &bytes[8192..at]).unwrap();
    assert_eq!((said.changes, said.writer.host.as_str()), (entries(), "laptop"));
    assert_eq!(said.tombstones.iter().map(|dead| dead.ids().count()).collect::<Vec<_>>(), [1, 1, 3]);
    assert_eq!(said.tombstones[2].ids().collect::<Vec<_>>(), [ObjectId::Log(2), ObjectId::Log(3), ObjectId::Log(4)]);
    let (bytes, name) = encode_checkpoint(&INCARNATION, &[1; 16], 6, &entries());
    assert_eq!(decode_checkpoint(&INCARNATION, &name, &bytes).unwrap(), entries());
    assert!(decode_checkpoint(&[0; 16], &name, &bytes).is_err(), "of another incarnation");
    assert_eq!(decode_marker(&encode_marker(&INCARNATION)).unwrap(), INCARNATION);
}

#[test]
fn runs_of_dead_records_that_cannot_be_are_refused() {
    let (segment, most) = (ObjectId::Segment([1; 32]), MAX_BLOCKS);
    for (id, more, sequence, can_be) in [
        (ObjectId::Log(1), 4, 6, true),
        // The newest is never dead, and neither is what comes after it.
        (ObjectId::Log(1), 5, 6, false),
        (ObjectId::Log(7), 0, 6, false),
        (ObjectId::Log(u64::MAX), 1, 6, false),
        (ObjectId::Log(1), most, 10_000, true),
        (ObjectId::Log(1), most + 1, 10_000, false),
        (segment, 0, 6, true),
        (segment, 1, 6, false),
    ] {
        let said = RecordBody {
            changes: entries(),
            tombstones: vec![Tombstone { id, extra: more, since: 5 }],
            writer: WriterIdentity::default(),
        };
        let trailer = Trailer { incarnation: INCARNATION, sequence, epoch: 1, ..Trailer::default() };
        let (bytes, trailer) = encode_record(&trailer, &[], &said);
        let decoded = decode_body(&trailer, &bytes[..bytes.len() - TRAILER_BYTES]);
        assert_eq!(decoded.is_ok(), can_be, "{id:?} {more} {sequence}");
    }
}

#[test]
fn a_record_that_has_no_next_one_is_refused() {
    let (_, trailer) = record(&[]);
    let said = || RecordBody { changes: entries(), tombstones: Vec::new(), writer: WriterIdentity::default() };
    for (sequence, epoch, is_one) in
        [(1, 1, true), (u64::MAX - 1, u64::MAX - 1, true), (0, 1, false), (u64::MAX, 1, false), (1, u64::MAX, false)]
    {
        let (bytes, _) = encode_record(&Trailer { sequence, epoch, ..trailer.clone() }, &[], &said());
        let read = Trailer::decode(&bytes[bytes.len() - TRAILER_BYTES..], &INCARNATION);
        assert_eq!(read.is_ok(), is_one, "{sequence} {epoch}");
    }
}

/// A store that is an enemy knows the hashes, so what it changes has right ones.
#[test]
fn objects_of_an_enemy_are_refused_or_harmless() {
    use sha2::{Digest, Sha256};
    let first = seed(1);
    for seed in first..first + 20_000 {
        let mut dice = Dice::of(seed);
        let (bytes, name) = encode_checkpoint(&INCARNATION, &[1; 16], 6, &entries());
        let mut wrong = bytes.clone();
        for _ in 0..=dice.below(4) {
            let at = dice.below(wrong.len() as u64) as usize;
            wrong[at] = [0, 1, 0x7f, 0x80, 0xff, dice.below(256) as u8][dice.below(6) as usize];
        }
        assert!(wrong == bytes || decode_checkpoint(&INCARNATION, &name, &wrong).is_err(), "seed {seed}");
        let name = Sha256::digest(&wrong).into();
        if let Ok(entries) = decode_checkpoint(&INCARNATION, &name, &wrong) {
            let mut behind = 0;
            for MapEntry { blocks, place } in entries {
                assert!(behind <= blocks.start && blocks.start < blocks.end && blocks.end <= 1 << 51, "seed {seed}");
                let count = blocks.end - blocks.start;
                assert!(place.is_none_or(|place| u64::from(place.at) + count <= place.blocks.into()), "seed {seed}");
                assert!(place.is_none_or(|place| place.blocks <= layout::MAX_BLOCKS), "seed {seed}");
                behind = blocks.end;
            }
        }
        let (bytes, _) = record(&[]);
        let mut trailer = bytes[bytes.len() - TRAILER_BYTES..].to_vec();
        let at = dice.below(TRAILER_BYTES as u64 - 32) as usize;
        trailer[at] = dice.below(256) as u8;
        let hash = Sha256::digest(&trailer[..TRAILER_BYTES - 32]);
        trailer[TRAILER_BYTES - 32..].copy_from_slice(&hash);
        if let Ok(trailer) = Trailer::decode(&trailer, &INCARNATION) {
            assert!(trailer.body_bytes() <= layout::MAX_BODY, "seed {seed}");
            // Whatever it says of lengths, nothing is read beyond what is there.
            let _ = decode_body(&trailer, &bytes[..bytes.len() - TRAILER_BYTES]);
        }
    }
}
