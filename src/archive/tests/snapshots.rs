//! Snapshots of whole archives: what one shows never changes, and what is removed is gone.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::create::name_key;
use super::super::{Archive, CompactOptions, CreateOptions, OpenOptions};
use super::erasure::recoverable;
use super::passphrase;
use super::sample::{Expected, Listing, OWNER, cipher, expected, fresh, noise, put, read_all};
use super::{ARCHIVE, key};
use crate::crypto::kdf::KdfCost;
use crate::env::SeededEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::{BLOCK, Ino, ROOT_INO};
use crate::fs::{FileSystem, FsOptions, RenameMode, SyncProfile, XattrMode, mode};
use crate::keys::{self, SeenOptions, UnlockedKey};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{self, Volume};

/// What the snapshot shows in a copy of the archive as it lies there.
fn shown(storage: &MemoryStorage, name: &[u8]) -> Expected {
    let copy = Arc::new(MemoryStorage::from_contents(storage.contents()));
    let environment = Arc::new(SeededEnvironment::new(900));
    let options = txn::OpenOptions { read_only: true, memory: 32 << 20 };
    let volume = Volume::open(copy, cipher(), environment.clone(), 1, &options).unwrap();
    volume.show_snapshot(name).unwrap();
    let options = FsOptions { staged_bytes: 8 << 20, sync: SyncProfile::Periodic, pack: true, compress: true };
    expected(&FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), options).unwrap())
}

fn assert_sound(fs: &FileSystem) {
    let (_, findings) = fs.check_structure(true, &mut |_, _| {}).unwrap();
    assert_eq!(findings.len(), 0, "{findings:?}");
    assert_eq!(fs.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
}

/// One change of something, whichever it is.
fn change(fs: &FileSystem, dice: &SeededEnvironment) {
    let below = |bound: u64| dice.next_u64() % bound;
    let name = |n: u64| format!("file{n}").into_bytes();
    let (one, other) = (name(below(24)), name(below(24)));
    let Ok(found) = fs.lookup(ROOT_INO, &one) else {
        let size = [500, 3_000, 90_000, 400_000][below(4) as usize];
        put(fs, ROOT_INO, &one, &noise(dice.next_u64(), size));
        return;
    };
    let (ino, size) = (found.ino, found.size);
    let done = match below(9) {
        0 => fs.unlink(ROOT_INO, &one),
        1 => fs.rename(ROOT_INO, &one, ROOT_INO, &other, RenameMode::Replace).map(drop),
        2 => fs.truncate(ino, below(size + 1), &mut |_| {}).map(drop),
        3 => fs.punch_hole(ino, below(size + 1), 1 + below(50_000), false),
        4 => fs.set_xattr(ino, b"user.note", &noise(dice.next_u64(), 1 + below(5_000) as usize), XattrMode::Set),
        5 => match fs.lookup(ROOT_INO, &other) {
            Ok(target) if target.ino == ino => Ok(()),
            Ok(target) => fs.copy_range(ino, 0, target.ino, 0, size, false).map(drop),
            Err(_) => fs.link(ino, ROOT_INO, &other).map(drop),
        },
        _ => fs.write(ino, below(size + 1), &noise(dice.next_u64(), 1 + below(70_000) as usize)),
    };
    done.unwrap();
}

fn work_aside(fs: &FileSystem, dice: &SeededEnvironment) {
    match dice.next_u64() % 6 {
        0 => fs.sync().unwrap(),
        1 => drop(fs.maintain().unwrap()),
        2 => fs.purge().unwrap(),
        _ => {}
    }
}

/// Whatever is changed, repacked, purged and removed around it.
#[test]
fn what_a_snapshot_shows_never_changes() {
    for seed in 1..=3 {
        let (storage, fs) = fresh(seed);
        let dice = SeededEnvironment::new(seed);
        let mut kept: Vec<(Vec<u8>, Expected)> = Vec::new();
        for round in 0..12u64 {
            for _ in 0..40 {
                change(&fs, &dice);
            }
            work_aside(&fs, &dice);
            if kept.len() == 5 {
                let (gone, _) = kept.remove((dice.next_u64() % 5) as usize);
                let all = fs.snapshots().unwrap();
                let (id, ..) = all.iter().find(|(_, snapshot, _)| snapshot.name == gone).unwrap();
                fs.remove_snapshots(&[*id]).unwrap();
                fs.finish_removals(&mut || Ok(())).unwrap();
                fs.make_durable().unwrap();
            }
            let name = format!("round {round}").into_bytes();
            let now = expected(&fs);
            fs.take_snapshot(&name).unwrap();
            kept.push((name, now));
            for _ in 0..20 {
                change(&fs, &dice);
            }
            fs.make_durable().unwrap();
            for (name, expected) in &kept {
                assert!(shown(&storage, name) == *expected, "round {round}: {}", String::from_utf8_lossy(name));
            }
            assert_sound(&fs);
        }
        // What each one alone holds is what removing it frees.
        while let Some((name, _)) = kept.pop() {
            fs.purge().unwrap();
            let all = fs.snapshots().unwrap();
            let (id, _, held) = all.iter().find(|(_, snapshot, _)| snapshot.name == name).unwrap();
            let before = fs.volume.space().1 * 4096;
            fs.remove_snapshots(&[*id]).unwrap();
            fs.finish_removals(&mut || Ok(())).unwrap();
            fs.purge().unwrap();
            let freed = before.saturating_sub(fs.volume.space().1 * 4096);
            // Nodes of the trees that list it come and go beside.
            assert!(freed.abs_diff(*held) <= 200_000, "held={held} freed={freed}");
            assert_sound(&fs);
        }
        fs.close().unwrap();
    }
}

/// A snapshot shows what it did, or an error that says so, wherever a byte is altered.
#[test]
fn flipped_bytes_are_noticed_in_what_a_snapshot_shows() {
    let (storage, fs) = fresh(5);
    let dice = SeededEnvironment::new(5);
    let mut kept = Vec::new();
    for round in 0..3 {
        for _ in 0..40 {
            change(&fs, &dice);
        }
        let name = format!("round {round}").into_bytes();
        fs.take_snapshot(&name).unwrap();
        kept.push((name, expected(&fs)));
    }
    fs.close().unwrap();
    let whole = storage.contents();
    let (mut lost, mut altered) = (0, 0);
    for block in (0..whole.len() as u64 / BLOCK).filter(|block| block % 3 == dice.next_u64() % 3) {
        let at = (block * BLOCK + dice.next_u64() % BLOCK) as usize;
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (dice.next_u64() % 8);
        altered += 1;
        for (name, expected) in &kept {
            let Some(seen) = try_shown(&bytes, name) else {
                lost += expected.len();
                continue;
            };
            let named = String::from_utf8_lossy(name);
            for (path, found) in &seen {
                match found {
                    Ok(found) => assert_eq!(Some(found), expected.get(path), "{named}, byte {at}"),
                    Err(Error::Damaged(_)) => lost += 1,
                    Err(error) => panic!("{named}, byte {at}: {error}"),
                }
            }
            let unread = seen.values().any(Result::is_err);
            assert!(unread || seen.len() == expected.len(), "{named}, byte {at}: objects are missing without an error");
        }
    }
    assert!(altered > 300 && lost > 100, "altered={altered} lost={lost}");
}

/// As [`shown`], of what may be damaged.
fn try_shown(bytes: &[u8], name: &[u8]) -> Option<Listing> {
    let copy = Arc::new(MemoryStorage::from_contents(bytes.to_vec()));
    let environment = Arc::new(SeededEnvironment::new(900));
    let options = txn::OpenOptions { read_only: true, memory: 32 << 20 };
    let damaged = |error: Error| assert!(matches!(error, Error::Damaged(_)), "{error}");
    let volume = Volume::open(copy, cipher(), environment.clone(), 1, &options).map_err(damaged).ok()?;
    volume.show_snapshot(name).map_err(damaged).ok()?;
    let options = FsOptions { staged_bytes: 8 << 20, sync: SyncProfile::Periodic, pack: true, compress: true };
    FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), options)
        .map_err(damaged)
        .ok()
        .map(|fs| read_all(&fs))
}

#[test]
fn deleted_content_stays_as_long_as_a_snapshot_shows_it() {
    let (storage, fs) = fresh(1);
    let of = || recoverable(&(storage.clone() as Arc<dyn Storage>));
    let large = put(&fs, ROOT_INO, b"large", &noise(1, 200_000));
    let small = put(&fs, ROOT_INO, b"small", &noise(2, 3_000));
    let neighbour = put(&fs, ROOT_INO, b"neighbour", &noise(3, 3_000));
    fs.take_snapshot(b"kept").unwrap();
    fs.unlink(ROOT_INO, b"large").unwrap();
    fs.unlink(ROOT_INO, b"small").unwrap();
    fs.purge().unwrap();
    assert_eq!(of(), BTreeSet::from([large, small, neighbour]));
    let ids: Vec<u64> = fs.snapshots().unwrap().iter().map(|(id, ..)| *id).collect();
    fs.remove_snapshots(&ids).unwrap();
    fs.purge().unwrap();
    assert_eq!(of(), BTreeSet::from([neighbour]));
}

/// Small files share pages, and a snapshot keeps whole ones.
#[test]
fn a_snapshot_keeps_nothing_of_what_was_deleted_before() {
    let (storage, fs) = fresh(2);
    let of = || recoverable(&(storage.clone() as Arc<dyn Storage>));
    let files: Vec<Ino> = (0..100).map(|n| put(&fs, ROOT_INO, format!("{n}").as_bytes(), &noise(n, 1_500))).collect();
    fs.make_durable().unwrap();
    for n in 0..50 {
        fs.unlink(ROOT_INO, format!("{n}").as_bytes()).unwrap();
    }
    fs.take_snapshot(b"kept").unwrap();
    fs.purge().unwrap();
    assert_eq!(of(), files[50..].iter().copied().collect());
}

struct Place {
    directory: tempfile::TempDir,
    key: UnlockedKey,
}

impl Place {
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lbx");
        Archive::create(&path, &passphrase("p"), &CreateOptions { kdf: KdfCost::TEST, creator: OWNER }).unwrap();
        let key = keys::unlock(&path, &passphrase("p")).unwrap();
        Place { directory, key }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("a.lbx")
    }

    fn open(&self) -> Archive {
        Archive::open(&self.path(), &self.key, &OpenOptions::default()).unwrap()
    }

    fn open_snapshot(&self, name: &[u8]) -> Result<Archive> {
        let options = OpenOptions { read_only: true, ..OpenOptions::default() };
        Archive::open_snapshot(&self.path(), &self.key, &options, &SeenOptions::default(), name)
    }
}

/// After a crash the log says what came after the snapshot: new bytes, records, sizes.
#[test]
fn the_log_is_not_laid_over_a_snapshot() {
    let place = Place::new();
    let archive = place.open();
    let fs = archive.file_system();
    let ino = put(fs, ROOT_INO, b"file", b"before");
    archive.take_snapshot(b"kept").unwrap();
    fs.write(ino, 0, b"after!").unwrap();
    fs.make_node(ROOT_INO, b"new", mode::REGULAR | 0o600, 0, OWNER).unwrap();
    fs.sync().unwrap();
    assert!(fs.usage().log.entries > 0);
    drop(archive);
    let archive = place.open_snapshot(b"kept").unwrap();
    let fs = archive.file_system();
    assert_eq!(fs.read(ino, 0, 100).unwrap(), b"before");
    assert!(matches!(fs.lookup(ROOT_INO, b"new"), Err(Error::NotFound)));
    drop(archive);
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open(&place.path(), &place.key, &options).unwrap();
    assert_eq!(archive.file_system().read(ino, 0, 100).unwrap(), b"after!");
}

#[test]
fn only_snapshots_with_names_are_read_and_removed_and_only_once_each() {
    let place = Place::new();
    let archive = place.open();
    archive.take_snapshot(b"one").unwrap();
    archive.take_snapshot(b"two").unwrap();
    assert!(matches!(archive.take_snapshot(b"one"), Err(Error::Refused(Refusal::SnapshotExists { .. }))));
    let missing = archive.remove_snapshots(&[b"one".to_vec(), b"three".to_vec()], &mut || Ok(()));
    assert!(matches!(missing, Err(Error::Refused(Refusal::NoSnapshot { name })) if name == "three"));
    assert_eq!(archive.snapshots().unwrap().len(), 2, "all or none");
    // As if it was killed before anything was freed.
    let ids: Vec<u64> = archive.file_system().snapshots().unwrap().iter().map(|(id, ..)| *id).collect();
    archive.file_system().remove_snapshots(&ids[..1]).unwrap();
    drop(archive);
    for name in [&b"one"[..], b""] {
        assert!(matches!(place.open_snapshot(name), Err(Error::Refused(Refusal::NoSnapshot { .. }))));
    }
    let options = OpenOptions::default();
    let writable = Archive::open_snapshot(&place.path(), &place.key, &options, &SeenOptions::default(), b"two");
    assert!(matches!(writable, Err(Error::Invalid(_))));
    let read = place.open_snapshot(b"two").unwrap();
    let named: Vec<Vec<u8>> = read.snapshots().unwrap().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(named, [b"two"]);
    assert!(matches!(read.take_snapshot(b"three"), Err(Error::ReadOnly(_))));
}

/// What is only half removed holds nobody up: nothing of it can be lost.
#[test]
fn a_compaction_ends_a_removal_that_was_interrupted() {
    let place = Place::new();
    let archive = place.open();
    put(archive.file_system(), ROOT_INO, b"kept", b"content");
    put(archive.file_system(), ROOT_INO, b"gone", &noise(1, 100_000));
    archive.take_snapshot(b"monday").unwrap();
    archive.file_system().unlink(ROOT_INO, b"gone").unwrap();
    let ids: Vec<u64> = archive.file_system().snapshots().unwrap().iter().map(|(id, ..)| *id).collect();
    archive.file_system().remove_snapshots(&ids).unwrap();
    archive.close().unwrap();
    Archive::compact(&place.path(), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    let archive = place.open();
    assert_eq!(archive.file_system().volume.snapshots().unwrap(), []);
    assert_eq!(archive.check(true, &mut |_, _| {}).unwrap().findings, []);
}
