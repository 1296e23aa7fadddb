//! The golden bucket (`tests/data/golden/bucket`): every later program reads what the first version
//! put into a store.
//!
//! It has the golden archive `objects`: a part in a segment, a part in a record with a checkpoint,
//! the rest in a record of changes; and records of a writer that came, went, and left something
//! dead.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::Storage;

use super::super::directory::DirectoryStore;
use super::super::layout::{self, BLOCK, RecordKind};
use super::super::map::{MapEntry, ObjectId, ObjectRef};
use super::super::objects::random_bytes;
use super::super::session::{InlinePages, WriterSession};
use super::super::store::BucketStore;
use super::super::{check_objects, open};
use super::{options, somebody};
use crate::DirectoryTrust;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/data/golden").join(name)
}

fn archive() -> Vec<u8> {
    zstd::decode_all(&*std::fs::read(golden("objects.lbx.zst")).unwrap()).unwrap()
}

fn directory(writer: Option<DirectoryTrust>) -> Box<DirectoryStore> {
    Box::new(DirectoryStore::open(&golden("bucket"), writer).unwrap())
}

/// Runs of blocks that are no zeros.
fn runs(bytes: &[u8]) -> Vec<InlinePages> {
    let mut runs: Vec<InlinePages> = Vec::new();
    for (block, page) in (0..).zip(bytes.chunks(BLOCK as usize)).filter(|(_, page)| page.iter().any(|byte| *byte != 0))
    {
        match runs.last_mut() {
            Some(run) if run.block + run.pages.len() as u64 / BLOCK == block => run.pages.extend_from_slice(page),
            _ => runs.push(InlinePages { block, pages: page.to_vec() }),
        }
    }
    runs
}

#[test]
#[ignore = "writes the golden bucket anew"]
fn write_golden_bucket() {
    let bytes = archive();
    assert!(bytes.len().is_multiple_of(BLOCK as usize));
    let store =
        || Arc::new(BucketStore::new(directory(Some(DirectoryTrust::Trusted)), "golden".into(), Some(Duration::ZERO)));
    let mut session = WriterSession::open(store(), somebody(), false).unwrap();
    let (mut runs, length) = (runs(&bytes), bytes.len() as u64);
    assert!(runs.len() >= 3, "{} runs", runs.len());
    let rest = runs.split_off(runs.len() * 2 / 3);
    let inline = runs.split_off(runs.len() / 2);
    // What the first third is made of goes into a segment.
    let (mut map, mut pages, mut blocks) = (session.map().clone(), Vec::new(), Vec::new());
    for run in &runs {
        blocks.push(run.block..run.block + run.pages.len() as u64 / BLOCK);
        pages.extend_from_slice(&run.pages);
    }
    let (segment, hash) = layout::encode_segment(&session.incarnation, &random_bytes().unwrap(), &blocks, &pages);
    let (id, segment) = (ObjectId::Segment(hash), Arc::new(segment));
    WriterSession::create_segment(&session.store, &session.incarnation, &id, &segment, false).unwrap();
    let mut at = 0;
    for run in blocks {
        let count = (run.end - run.start) as u32;
        let place = ObjectRef { id: ObjectId::Segment(hash), blocks: (pages.len() as u64 / BLOCK) as u32, at };
        map.assign(&MapEntry { blocks: run, place: Some(place) });
        at += count;
    }
    session.commit(map, inline, length, RecordKind::Commit).unwrap();
    let least = std::mem::take(&mut session.least_changes);
    // A checkpoint, which has all of before.
    session.commit(session.map().clone(), Vec::new(), length, RecordKind::Commit).unwrap();
    session.least_changes = least;
    session.commit(session.map().clone(), rest, length, RecordKind::Commit).unwrap();
    session.commit(session.map().clone(), Vec::new(), length, RecordKind::Close).unwrap();
}

#[test]
fn the_golden_bucket_has_the_bytes_of_its_archive_and_lacks_nothing() {
    let bytes = archive();
    let file = open(directory(None), "file:///golden".into(), &options()).unwrap().unwrap().file().clone();
    let mut read = vec![0; file.len().unwrap() as usize];
    file.read_at(0, &mut read).unwrap();
    assert!(read == bytes);
    let examined =
        check_objects(directory(None), "file:///golden".into(), &options(), true, &mut |_, _| Ok(())).unwrap();
    assert!(examined.faults.is_empty() && examined.unnamed.objects == 0, "{examined:?}");
    // Two records with pages, a segment, a checkpoint, and the newest record.
    assert!(
        examined.needed.objects >= 5 && examined.dead.objects >= 1 && examined.records.objects >= 1,
        "{examined:?}"
    );
    for part in ["log", "seg", "map"] {
        let found = std::fs::read_dir(golden("bucket")).unwrap().map(|entry| entry.unwrap().path().join(part));
        assert!(found.filter(|path| path.is_dir()).any(|path| path.read_dir().unwrap().next().is_some()), "no {part}");
    }
}
