//! What comes from an object store: marker, records of the log, checkpoints. The decoders are those of `remote/`, taken from its sources: the crate around
//! them brings TLS, which has nothing to do here.
//!
//! Each stands behind a hash, which whoever owns the store makes as they like, and no fuzzer finds: it is made right first.

// The other halves are for writers.
#[allow(dead_code)]
#[path = "../../remote/src/bucket/layout.rs"]
mod layout;
#[allow(dead_code)]
#[path = "../../remote/src/bucket/map.rs"]
mod map;

use sha2::{Digest, Sha256};

use layout::{
    BLOCK, MARKER_BYTES, MAX_ARCHIVE_BYTES, RecordBody, RecordKind, TRAILER_BYTES, Tombstone, Trailer, WriterIdentity,
};
use map::{BlockMap, Hash, MapEntry, ObjectId, ObjectRef};

const INCARNATION: [u8; 16] = [0x11; 16];

/// The bytes, cut or filled to a length, with the hash of the others at their end.
fn hashed(data: &[u8], length: usize) -> Vec<u8> {
    let mut bytes = data[..data.len().min(length)].to_vec();
    bytes.resize(length, 0);
    let hash = Sha256::digest(&bytes[..length - 32]);
    bytes[length - 32..].copy_from_slice(&hash);
    bytes
}

/// A map of these entries says what they say, and has as many live blocks as it names.
fn lay(entries: &[MapEntry]) {
    let mut map = BlockMap::default();
    entries.iter().for_each(|entry| map.assign(entry));
    let end = map.end();
    assert!(end <= MAX_ARCHIVE_BYTES / BLOCK);
    for entry in entries.iter().take(64) {
        // A window of what may be half of the address space.
        let window = entry.blocks.start..entry.blocks.end.min(entry.blocks.start + 4096);
        let parts = map.parts(window.clone());
        assert_eq!(parts.first().map(|part| part.blocks.start), Some(window.start));
        assert_eq!(parts.last().map(|part| part.blocks.end), Some(window.end));
        assert!(parts.windows(2).all(|two| two[0].blocks.end == two[1].blocks.start));
        for part in &parts {
            if let (Some(of), Some(place)) = (&entry.place, &part.place) {
                assert_eq!(
                    (place.id, u64::from(place.at)),
                    (of.id, u64::from(of.at) + part.blocks.start - entry.blocks.start)
                );
            }
        }
    }
    let mut again = BlockMap::default();
    map.entries().iter().for_each(|entry| again.assign(entry));
    assert_eq!(again.entries(), map.entries());
    map.reset_changes(Default::default());
    assert!(map.changes().is_empty());
    map.take_unreferenced();
    let places = map.entries().into_iter().filter_map(|entry| entry.place);
    assert!(places.into_iter().all(|place| map.references(&place.id)));
}

/// The first object of a prefix.
pub(crate) fn marker(data: &[u8]) {
    if let Ok(incarnation) = layout::decode_marker(&hashed(data, MARKER_BYTES)) {
        assert_eq!(layout::decode_marker(&layout::encode_marker(&incarnation)).ok(), Some(incarnation));
    }
    let _ = layout::decode_marker(data);
}

/// The end of a record: what it says, and its trailer behind that.
pub(crate) fn log(data: &[u8]) {
    let _ = Trailer::decode(data, &INCARNATION);
    let at = data.len().saturating_sub(TRAILER_BYTES);
    let (said, trailer) = data.split_at(at);
    let Ok(mut trailer) = Trailer::decode(&hashed(trailer, TRAILER_BYTES), &INCARNATION) else { return };
    assert!(trailer.bytes() >= TRAILER_BYTES as u64);
    let _ = layout::decode_body(&trailer, said);
    if trailer.body_bytes() != said.len() as u64 {
        return;
    }
    trailer.body_hash = Sha256::digest(said).into();
    let Ok(said) = layout::decode_body(&trailer, said) else { return };
    lay(&said.changes);
    // What was understood is written and understood as the same.
    let (again, written) = layout::encode_record(&trailer, &[], &said);
    let read =
        Trailer::decode(&again[again.len() - TRAILER_BYTES..], &INCARNATION).expect("a record that was written reads");
    assert_eq!(read, written);
    let read =
        layout::decode_body(&read, &again[..again.len() - TRAILER_BYTES]).expect("a record that was written reads");
    assert!(read.changes == said.changes && read.tombstones == said.tombstones);
}

/// The map of a version.
pub(crate) fn checkpoint(data: &[u8]) {
    let name: Hash = Sha256::digest(data).into();
    let Ok(entries) = layout::decode_checkpoint(&INCARNATION, &name, data) else { return };
    lay(&entries);
    let (again, name) = layout::encode_checkpoint(&INCARNATION, &[0; 16], 1, &entries);
    assert_eq!(layout::decode_checkpoint(&INCARNATION, &name, &again).ok(), Some(entries));
}

fn entries() -> Vec<MapEntry> {
    let place = |id, blocks, at| Some(ObjectRef { id, blocks, at });
    vec![
        MapEntry { blocks: 0..1, place: place(ObjectId::Log(5), 3, 2) },
        MapEntry { blocks: 1..100, place: None },
        MapEntry { blocks: 100..4000, place: place(ObjectId::Segment([0x22; 32]), 4096, 10) },
        MapEntry { blocks: 4000..4001, place: place(ObjectId::Log(5), 3, 0) },
    ]
}

pub(crate) fn seeds(name: &str) -> Vec<Vec<u8>> {
    let record = |kind, changes: Vec<MapEntry>| {
        let trailer = Trailer {
            kind,
            incarnation: INCARNATION,
            sequence: 6,
            epoch: 2,
            checkpoint: Some(([0x66; 32], 300)),
            length: 4001 * BLOCK,
            ..Trailer::default()
        };
        let dead = vec![
            Tombstone::new(ObjectId::Segment([0x77; 32]), 1_699_000_000),
            Tombstone::new(ObjectId::Checkpoint([0x88; 32]), 0),
            Tombstone { id: ObjectId::Log(2), extra: 2, since: 1 },
        ];
        let owner = WriterIdentity { host: "laptop".into(), process: 1234, ..WriterIdentity::default() };
        layout::encode_record(&trailer, &[], &RecordBody { changes, tombstones: dead, writer: owner }).0
    };
    match name {
        "marker" => vec![layout::encode_marker(&INCARNATION)],
        "storelog" => {
            vec![
                record(RecordKind::Commit, entries()),
                record(RecordKind::Open, Vec::new()),
                record(RecordKind::Close, Vec::new()),
            ]
        }
        "checkpoint" => vec![layout::encode_checkpoint(&INCARNATION, &[0x33; 16], 6, &entries()).0],
        _ => Vec::new(),
    }
}
