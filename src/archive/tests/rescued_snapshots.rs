//! Rescue from archives with snapshots: each can be rescued on its own, its exclusive data is not
//! rescued as live data, and a lost snapshot is reported.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::super::fuzzing::{OWNER, create_on};
use super::sample::{Expected, expected, noise, put};
use super::{ARCHIVE, archive, key};
use crate::env::SeededEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::page::PageKind;
use crate::format::{BLOCK, Ino, RING_SLOTS, ROOT_INO, Run, TreeId, slot_block};
use crate::frame::PageCipher;
use crate::fs::{FileSystem, mode};
use crate::rescue::scan::scan;
use crate::rescue::{RescueOptions, RescueReport, RescueState, rescue_from};
use crate::storage::MemoryStorage;

const B: usize = BLOCK as usize;

/// Content by path.
type Files = BTreeMap<Vec<u8>, Vec<u8>>;

/// Archive with its live content, and that of its snapshots by name.
struct Kept {
    fs: Arc<FileSystem>,
    storage: Arc<MemoryStorage>,
    live: Expected,
    shown: BTreeMap<&'static str, Expected>,
}

impl Kept {
    fn bytes(&self) -> Vec<u8> {
        self.storage.contents()
    }
}

/// Leaves of one snapshot, leaves shared by all, and content of each kind, with log entries after
/// that.
fn kept() -> Kept {
    let storage = Arc::new(archive(&[]));
    let fs = create_on(storage.clone(), 41).unwrap();
    let below = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    let small: Vec<Ino> = (0..120).map(|n| put(&fs, below, format!("small{n}").as_bytes(), &noise(n, 60))).collect();
    let changed = put(&fs, ROOT_INO, b"changed", &noise(50, 20_000));
    put(&fs, ROOT_INO, b"deleted", &noise(51, 20_000));
    let logged = put(&fs, ROOT_INO, b"logged", &noise(52, 20_000));
    let mut shown = BTreeMap::new();
    let mut take = |name: &'static str| {
        shown.insert(name, expected(&fs));
        fs.take_snapshot(name.as_bytes()).unwrap();
    };
    take("first");
    fs.unlink(ROOT_INO, b"deleted").unwrap();
    fs.write(changed, 5_000, &noise(53, 9_000)).unwrap();
    fs.write(small[3], 0, b"changed too").unwrap();
    put(&fs, ROOT_INO, b"brief", &noise(54, 5_000));
    take("second");
    fs.unlink(ROOT_INO, b"brief").unwrap();
    fs.unlink(below, b"small20").unwrap();
    fs.write(changed, 0, b"live").unwrap();
    fs.make_durable().unwrap();
    fs.write(logged, 100, b"of an entry").unwrap();
    fs.sync().unwrap();
    let live = expected(&fs);
    Kept { fs, storage, live, shown }
}

fn own_cipher() -> PageCipher {
    PageCipher::new(&key(), ARCHIVE, true, Arc::new(SeededEnvironment::new(4)))
}

/// Report of one object.
struct Told {
    state: RescueState,
    path: Vec<u8>,
    doubted: bool,
}

/// Returns the reports, and the files by path.
fn rescue(bytes: Vec<u8>, snapshot: Option<&str>) -> Result<(RescueReport, Vec<Told>, Files)> {
    let target = tempfile::tempdir().unwrap();
    let to = target.path().join("to");
    let snapshot = snapshot.map(|name| name.as_bytes().to_vec());
    let options = RescueOptions { to: to.clone(), partial: false, privileges: false, snapshot };
    let mut told = Vec::new();
    let item = &mut |item: &crate::rescue::RescuedObject<'_>| {
        told.push(Told { state: item.state, path: item.path.to_vec(), doubted: item.older || item.unproved });
        Ok(())
    };
    let storage = Arc::new(MemoryStorage::from_contents(bytes));
    let report = rescue_from(storage, own_cipher(), &SeededEnvironment::new(4), &options, item, &mut |_| Ok(()));
    let report = report.inspect_err(|_| assert!(!to.exists(), "a directory was made for nothing"))?;
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let mut files = BTreeMap::new();
    read_files(&to, b"", &mut files);
    Ok((report, told, files))
}

fn read_files(directory: &Path, path: &[u8], files: &mut Files) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let path = [path, b"/", entry.file_name().as_bytes()].concat();
        if entry.file_type().unwrap().is_dir() {
            read_files(&entry.path(), &path, files);
        } else {
            files.insert(path, std::fs::read(entry.path()).unwrap());
        }
    }
}

fn files_of(expected: &Expected) -> Files {
    let files = expected.iter().filter(|(_, seen)| seen.mode & mode::TYPE == mode::REGULAR);
    files.map(|(path, seen)| (path.clone(), seen.content.clone())).collect()
}

fn names(report: &RescueReport) -> Vec<&str> {
    report.snapshots.iter().map(|one| std::str::from_utf8(&one.name).unwrap()).collect()
}

fn without_records(mut bytes: Vec<u8>) -> Vec<u8> {
    for slot in 0..RING_SLOTS {
        let at = (slot_block(slot) * BLOCK) as usize;
        bytes[at..at + B].fill(0xEE);
    }
    bytes
}

#[test]
fn each_snapshot_comes_back_by_itself_and_the_live_tree_without_them() {
    let kept = kept();
    let (report, _, files) = rescue(kept.bytes(), None).unwrap();
    assert!(files == files_of(&kept.live));
    assert_eq!((names(&report), report.snapshots_proved, report.complete()), (vec!["first", "second"], true, true));
    for (name, shown) in &kept.shown {
        let (report, told, files) = rescue(kept.bytes(), Some(name)).unwrap();
        assert!(files == files_of(shown), "{name}");
        assert_eq!((names(&report), report.complete(), report.entries), (vec![*name], true, 0), "{name}");
        assert!(told.iter().all(|one| one.state == RescueState::Whole && !one.doubted), "{name}");
        assert_eq!(report.newest, kept.fs.volume.snapshot_named(name.as_bytes()).unwrap().1.generation);
    }
}

/// The list is that of the newest root that opens, without proof that no snapshot was removed
/// since.
#[test]
fn snapshots_come_back_without_any_record_and_are_not_called_proved() {
    let kept = kept();
    let bytes = without_records(kept.bytes());
    let (report, _, files) = rescue(bytes.clone(), None).unwrap();
    assert!(files == files_of(&kept.live), "what is deleted comes back, or something is missing");
    assert_eq!((names(&report), report.snapshots_proved, report.complete()), (vec!["first", "second"], false, false));
    for (name, shown) in &kept.shown {
        let (report, _, files) = rescue(bytes.clone(), Some(name)).unwrap();
        assert!(files == files_of(shown), "{name}");
        assert!(!report.complete() && report.index_whole, "{name}");
    }
}

#[test]
fn a_removed_snapshot_is_neither_told_of_nor_rescued() {
    let kept = kept();
    let (id, _) = kept.fs.volume.snapshot_named(b"first").unwrap();
    kept.fs.remove_snapshots(&[id]).unwrap();
    let (report, _, files) = rescue(kept.bytes(), None).unwrap();
    assert!(files == files_of(&kept.live));
    assert_eq!((names(&report), report.snapshots_proved, report.complete()), (vec!["second"], true, true));
    for name in ["first", "", "secon"] {
        let refused = rescue(kept.bytes(), Some(name)).err();
        assert!(matches!(refused, Some(Error::Refused(Refusal::NoSnapshot { .. }))), "{name}: {refused:?}");
    }
}

/// If the snapshot tree is lost, older roots of it are used; without any, that is reported.
#[test]
fn a_list_of_snapshots_that_is_lost_is_told() {
    let kept = kept();
    let mut bytes = kept.bytes();
    for run in nodes_of(&bytes, TreeId::Snapshots) {
        bytes[run.offset() as usize + 200] ^= 1;
    }
    for bytes in [bytes.clone(), without_records(bytes)] {
        let (report, _, files) = rescue(bytes.clone(), None).unwrap();
        assert!(files == files_of(&kept.live));
        assert!(report.snapshots.is_empty() && report.snapshots_lost.is_some() && !report.complete());
        assert!(matches!(rescue(bytes, Some("first")).err(), Some(Error::Damaged(_))));
    }
    let newest = kept.fs.volume.durable().roots[TreeId::Snapshots].pointer.run.offset() as usize;
    let mut bytes = kept.bytes();
    bytes[newest + 200] ^= 1;
    let (report, ..) = rescue(bytes, None).unwrap();
    assert!(report.snapshots_lost.is_some() && !report.snapshots_proved && !report.complete());
}

fn nodes_of(bytes: &[u8], tree: TreeId) -> Vec<Run> {
    let mut runs = Vec::new();
    let storage = MemoryStorage::from_contents(bytes.to_vec());
    scan(&storage, &own_cipher(), &mut |_, _| Ok(()), &mut |run, prologue| {
        if prologue.kind == PageKind::Node && prologue.owner == tree as u64 {
            runs.push(run);
        }
        Ok(())
    })
    .unwrap();
    runs
}

/// For each lost page: only a snapshot's own content is rescued from it; exclusive data of
/// snapshots is rescued as live only as unproved; a complete rescue is complete, with both
/// snapshots known.
#[test]
fn a_lost_page_mixes_nothing_and_hides_nothing() {
    let kept = kept();
    let whole = kept.bytes();
    let mut runs = Vec::new();
    let storage = MemoryStorage::from_contents(whole.clone());
    scan(&storage, &own_cipher(), &mut |_, _| Ok(()), &mut |run, _| {
        runs.push(run);
        Ok(())
    })
    .unwrap();
    let live = files_of(&kept.live);
    let versions: Vec<Files> = kept.shown.values().map(files_of).collect();
    let (mut incomplete, mut doubted, mut partial, mut unknown, mut index_lost) = (0, 0, 0, 0, 0);
    for run in &runs {
        let mut bytes = whole.clone();
        bytes[run.offset() as usize..][..B].fill(0xEE);
        let at = run.address;
        let (report, told, files) = rescue(bytes.clone(), None).unwrap();
        for one in told.iter().filter(|one| one.state == RescueState::Whole && !one.doubted) {
            let path = [b"/", &one.path[..]].concat();
            assert_eq!(files.get(&path), live.get(&path), "block {at}: {}", String::from_utf8_lossy(&path));
        }
        for (path, content) in files.iter().filter(|(path, _)| !path.starts_with(b"/unnamed/")) {
            let of_one = live.get(path) == Some(content) || versions.iter().any(|one| one.get(path) == Some(content));
            // LAID-3: a log entry may be applied over an older version.
            assert!(of_one || path == b"/logged", "block {at}: {}", String::from_utf8_lossy(path));
        }
        if report.complete() {
            assert!(files == live, "block {at}");
            assert_eq!((names(&report), report.snapshots_proved), (vec!["first", "second"], true), "block {at}");
        }
        incomplete += usize::from(!report.complete());
        doubted += told.iter().filter(|one| one.doubted).count();
        for (name, shown) in &kept.shown {
            let shown = files_of(shown);
            let beside = report.snapshots.iter().find(|one| one.name == name.as_bytes()).map(|one| one.state);
            let (report, _, files) = match rescue(bytes.clone(), Some(name)) {
                Err(Error::Damaged(reason)) => {
                    assert!(report.snapshots_lost.is_some() && !names(&report).contains(name), "block {at}: {reason}");
                    unknown += 1;
                    continue;
                }
                rescued => rescued.unwrap(),
            };
            let same = |(path, content): (&Vec<u8>, &Vec<u8>)| {
                path.starts_with(b"/unnamed/") || shown.get(path) == Some(content)
            };
            assert_eq!(beside == Some(RescueState::Whole), report.index_whole, "block {at}: {name}");
            index_lost += usize::from(!report.index_whole);
            assert!(files.iter().all(same), "block {at}: {name} has something of another moment");
            assert!(!report.complete() || files == shown, "block {at}: {name}");
            partial += usize::from(files != shown);
        }
    }
    let told =
        format!("incomplete={incomplete} doubted={doubted} partial={partial} unknown={unknown} index={index_lost}");
    assert!(incomplete > 5 && doubted > 5 && partial > 5 && unknown > 0 && index_lost > 4, "{told}");
}
