//! Tests of `check`: the pages that it reads, and its reports of damage: kind, severity, file,
//! position, loss.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::{Finding, FindingKind, Lost, Severity};
use super::sample::{fresh, noise, open_on, put, sample};
use crate::archive::{CheckReport, check};
use crate::format::values::Extent;
use crate::format::{BLOCK, Ino, Key, Pointer, ROOT_INO, kind};
use crate::fs::FileSystem;
use crate::storage::{CountingStorage, MemoryStorage};

const B: usize = BLOCK as usize;

/// Returns inode, offset and value of each extent.
fn extents(fs: &FileSystem) -> Vec<(Ino, u64, Extent)> {
    let mut all = Vec::new();
    let state = fs.volume.state();
    let keep = &mut |key: Key, value: &[u8]| {
        if key.kind == kind::EXTENT && key.object > 0 {
            all.push((Ino(key.object), key.sub, Extent::decode(value)?));
        }
        Ok(ControlFlow::Continue(()))
    };
    fs.volume.view(&state).scan(Key::MIN, Key::MAX, keep).unwrap();
    all
}

fn open(bytes: Vec<u8>) -> Arc<FileSystem> {
    open_on(Arc::new(MemoryStorage::from_contents(bytes)), true, 3).unwrap()
}

fn checked(bytes: &[u8], full: bool) -> CheckReport {
    check(&open(bytes.to_vec()), full, &mut |_| {}).unwrap()
}

/// Returns the paths of each inode.
fn paths() -> BTreeMap<u64, BTreeSet<Vec<u8>>> {
    let mut paths: BTreeMap<u64, BTreeSet<Vec<u8>>> = BTreeMap::new();
    for (path, seen) in sample().newest() {
        paths.entry(seen.ino.0).or_default().insert(path.clone());
    }
    paths
}

#[test]
fn a_full_check_reads_every_page_of_file_data_once_and_a_quick_one_none() {
    for (full, times) in [(true, 1), (false, 0)] {
        let bytes = sample().bytes;
        let storage = Arc::new(CountingStorage::from_contents(bytes));
        let fs = open_on(storage.clone(), true, 3).unwrap();
        let data: BTreeSet<u64> =
            extents(&fs).iter().flat_map(|(.., extent)| extent.page.run.address..extent.page.run.end()).collect();
        assert!(data.len() > 20, "only {} blocks of data", data.len());
        storage.take_blocks();
        assert_eq!(check(&fs, full, &mut |_| {}).unwrap().findings, []);
        let reads = storage.take_blocks();
        for block in data {
            assert_eq!(reads.get(&block).copied().unwrap_or(0), times, "block {block}, full={full}");
        }
    }
}

/// Damages each page of file data in turn: one finding for each extent on it, none for another
/// file, and none without a file.
#[test]
fn lost_data_is_told_once_with_file_place_and_bytes() {
    let sample = sample();
    let paths = paths();
    let all = extents(&open(sample.bytes.clone()));
    let pages: BTreeSet<(u64, u64)> = all.iter().map(|(.., e)| (e.page.run.address, e.page.run.blocks)).collect();
    let mut shared = 0;
    for (address, blocks) in pages {
        let mut bytes = sample.bytes.clone();
        bytes[address as usize * B..(address + blocks) as usize * B].fill(0xEE);
        // The pages of the newest commit are verified at opening.
        let Ok(fs) = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true, 3) else { continue };
        if fs.volume.fallback().is_some() {
            continue;
        }
        assert_eq!(checked(&bytes, false).findings, [], "a quick check reads no data");
        let found: Vec<Finding> = checked(&bytes, true).findings;
        let on_page: Vec<&(Ino, u64, Extent)> = all.iter().filter(|(.., e)| e.page.run.address == address).collect();
        shared += usize::from(on_page.len() > 1);
        assert_eq!(found.len(), on_page.len(), "page {address}: {found:#?}");
        for (ino, offset, extent) in on_page {
            let finding = found.iter().find(|finding| finding.inode == Some(*ino)).unwrap();
            assert_eq!((finding.kind, finding.severity), (FindingKind::DataLost, Severity::Lost));
            assert_eq!((finding.block, finding.generation), (Some(address), Some(extent.page.generation)));
            let length = u64::from(extent.length);
            let lost = Some(Lost::Bytes { offset: *offset, length });
            assert!(found.iter().any(|finding| finding.inode == Some(*ino) && finding.lost == lost), "{finding:?}");
            assert!(paths[&ino.0].contains(finding.path.as_ref().unwrap()), "{finding:?}");
        }
    }
    assert!(shared > 0, "no page of several files was damaged");
}

/// Damages each page that only a snapshot references, in turn: reported once, as a loss of the
/// snapshot; a page of the live tree is reported as its file's.
#[test]
fn a_full_check_reads_what_only_a_snapshot_shows() {
    let (storage, fs) = fresh(31);
    put(&fs, ROOT_INO, b"stays", &noise(1, 300_000));
    put(&fs, ROOT_INO, b"removed", &noise(2, 300_000));
    fs.sync().unwrap();
    fs.take_snapshot(b"kept").unwrap();
    let id = fs.snapshot_named(b"kept").unwrap().0;
    let removed = fs.lookup(ROOT_INO, b"removed").unwrap().ino;
    let pages: BTreeSet<(u64, u64, bool)> = extents(&fs)
        .iter()
        .map(|(ino, _, extent)| (extent.page.run.address, extent.page.run.blocks, *ino == removed))
        .collect();
    fs.unlink(ROOT_INO, b"removed").unwrap();
    fs.sync().unwrap();
    // Moves these pages out of the newest commit, whose pages are verified at each opening.
    put(&fs, ROOT_INO, b"later", b"later");
    fs.sync().unwrap();
    let whole = storage.contents();
    assert_eq!(checked(&whole, true).findings, []);
    assert!(pages.iter().filter(|page| page.2).count() > 1, "{pages:?}");
    for (address, blocks, only_kept) in pages {
        let mut bytes = whole.clone();
        bytes[(address + blocks) as usize * B - 1] ^= 1;
        bytes[address as usize * B + 5000] ^= 1;
        assert_eq!(checked(&bytes, false).findings, [], "a quick check reads no data");
        let found = checked(&bytes, true).findings;
        assert_eq!(found.len(), 1, "{found:#?}");
        let kind = if only_kept { FindingKind::Snapshot } else { FindingKind::DataLost };
        assert_eq!((found[0].kind, found[0].severity, found[0].block), (kind, Severity::Lost, Some(address)));
        assert_eq!(found[0].detail.starts_with(&format!("snapshot {id} shows file data")), only_kept, "{}", found[0]);
    }
}

/// A page that a snapshot keeps without referencing it is never freed while the snapshot exists:
/// even a quick check reports it.
#[test]
fn a_page_that_its_snapshot_does_not_show_is_told() {
    let (_, fs) = fresh(32);
    put(&fs, ROOT_INO, b"old", &noise(1, 300_000));
    fs.take_snapshot(b"one").unwrap();
    put(&fs, ROOT_INO, b"new", &noise(2, 300_000));
    fs.take_snapshot(b"two").unwrap();
    fs.unlink(ROOT_INO, b"new").unwrap();
    fs.make_durable().unwrap();
    assert_eq!(check(&fs, true, &mut |_| {}).unwrap().findings, []);
    let [one, two] = [&b"one"[..], b"two"].map(|name| fs.snapshot_named(name).unwrap().0);
    fs.volume.misplace_dead_entry(two, one).unwrap();
    fs.make_durable().unwrap();
    for full in [false, true] {
        let found = check(&fs, full, &mut |_| {}).unwrap().findings;
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!((found[0].kind, found[0].severity), (FindingKind::Snapshot, Severity::Minor));
        assert!(
            found[0].detail.starts_with(&format!("snapshot {one} keeps a page that it does not show")),
            "{}",
            found[0]
        );
    }
}

/// For a lost node its inodes are reported, and counts that could not be verified are not reported
/// as wrong.
#[test]
fn lost_records_are_told_with_their_inodes_and_nothing_is_blamed_on_what_is_left() {
    let (storage, fs) = fresh(22);
    for n in 0..400u64 {
        put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &noise(n, 600));
    }
    fs.sync().unwrap();
    put(&fs, ROOT_INO, b"one more", b"so that not every leaf is of the newest commit");
    fs.sync().unwrap();
    let whole = storage.contents();
    let fs = open(whole.clone());
    let mut nodes: Vec<Pointer> = Vec::new();
    let keep = &mut |pointer: &Pointer, level: u8| {
        nodes.extend((level == 0).then_some(*pointer));
        Ok(())
    };
    fs.volume.state().trees.live.visit_pages(fs.volume.store(), keep, &mut |lost| Err(lost.error)).unwrap();
    let newest: BTreeSet<u64> = fs.volume.durable().allocated.iter().map(|(run, _)| run.address).collect();
    let mut told = 0;
    for node in nodes.iter().filter(|node| !newest.contains(&node.run.address)) {
        let mut bytes = whole.clone();
        bytes[node.run.offset() as usize..][..node.run.bytes() as usize].fill(0xEE);
        for full in [false, true] {
            let found = checked(&bytes, full).findings;
            let lost: Vec<_> = found.iter().filter(|finding| finding.kind == FindingKind::RecordsLost).collect();
            assert_eq!(lost.len(), 1, "{found:#?}");
            assert_eq!((lost[0].block, lost[0].generation), (Some(node.run.address), Some(node.generation)));
            assert!(matches!(lost[0].lost, Some(Lost::Inodes(first, last)) if first <= last));
            let blamed = [FindingKind::Space, FindingKind::Count];
            assert!(found.iter().all(|finding| !blamed.contains(&finding.kind)), "{found:#?}");
        }
        told += 1;
    }
    println!("{told} of {} leaves", nodes.len());
    assert!(told > 0, "every leaf is of the newest commit");
}

/// Programs rely on these names: kinds and severities do not change, and each kind has its own.
#[test]
fn kinds_and_severities_have_the_names_that_the_manual_tells() {
    let page = include_str!("../../../man/lockbox-check.1");
    let kinds = [
        FindingKind::DataLost,
        FindingKind::RecordsLost,
        FindingKind::IndexLost,
        FindingKind::Record,
        FindingKind::Name,
        FindingKind::Entry,
        FindingKind::Inode,
        FindingKind::Attribute,
        FindingKind::Extent,
        FindingKind::Space,
        FindingKind::Count,
        FindingKind::Snapshot,
        FindingKind::Counter,
        FindingKind::Header,
        FindingKind::Length,
        FindingKind::Log,
        FindingKind::Commit,
        FindingKind::Object,
        FindingKind::More,
    ];
    let names: BTreeSet<&str> = kinds.iter().map(|kind| kind.name()).collect();
    assert_eq!(names.len(), kinds.len());
    let section = page.split(".It Cm check\n").nth(2).unwrap().split(".It Cm").next().unwrap();
    for name in names.into_iter().chain([Severity::Lost, Severity::Wrong, Severity::Minor].map(Severity::name)) {
        assert!(section.split([' ', ',', '\n']).any(|word| word == name), "{name} is not in the manual");
    }
}
