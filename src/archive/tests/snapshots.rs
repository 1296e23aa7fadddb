//! Snapshots of whole archives: the content of one never changes, and that of a removed one is
//! erased.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use super::super::create::name_key;
use super::super::{
    Archive, CompactOptions, CreateOptions, OpenOptions, RetentionPolicy, RetentionRule, SnapshotManager,
};
use super::erasure::recoverable;
use super::passphrase;
use super::sample::{Expected, OWNER, cipher, expected, expected_in, fresh, noise, put};
use super::{ARCHIVE, key};
use crate::crypto::kdf::KdfCost;
use crate::env::{SeededEnvironment, seeds};
use crate::error::{Error, Refusal, Result};
use crate::format::values::Extent;
use crate::format::{Ino, Key, ROOT_INO, Timestamp, kind};
use crate::fs::{
    Attributes, Compression, DirectoryEntry, FileSystem, FsOptions, RenameMode, SnapshotId, SyncProfile, XattrMode,
    mode,
};
use crate::keys::{self, RollbackOptions, UnlockedKey};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{self, ReadView, Volume};

/// Returns the content of the snapshot in a copy of the archive's current bytes.
fn shown(storage: &MemoryStorage, name: &[u8]) -> Expected {
    let copy = Arc::new(MemoryStorage::from_contents(storage.contents()));
    let environment = Arc::new(SeededEnvironment::new(900));
    let options = txn::OpenOptions { read_only: true, memory: 32 << 20 };
    let volume = Volume::open(copy, cipher(), environment.clone(), 1, &options).unwrap();
    volume.show_snapshot(name).unwrap();
    let options = FsOptions {
        max_dirty_bytes: 8 << 20,
        sync: SyncProfile::Periodic,
        pack: true,
        compression: Compression::Default,
    };
    expected(&FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), options).unwrap())
}

fn assert_sound(fs: &FileSystem) {
    let findings = fs.check_structure(true).unwrap();
    assert_eq!(findings.len(), 0, "{findings:?}");
    assert_eq!(fs.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
}

/// Makes a random change.
pub(super) fn change(fs: &FileSystem, dice: &SeededEnvironment) {
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
        3 => fs.zero_range(ino, below(size + 1), 1 + below(50_000), true, false),
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

/// Despite changes, repacking, purges and removals.
#[test]
fn what_a_snapshot_shows_never_changes() {
    for seed in seeds(1..=2) {
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
            // With dirty data over the live tree, and in the log.
            for (name, expected) in &kept {
                let id = fs.snapshot_named(name).unwrap();
                assert!(
                    expected_in(&fs.snapshot_view(id)) == *expected,
                    "round {round}: {}",
                    String::from_utf8_lossy(name)
                );
            }
            fs.make_durable().unwrap();
            for (name, expected) in &kept {
                assert!(shown(&storage, name) == *expected, "round {round}: {}", String::from_utf8_lossy(name));
            }
            assert_sound(&fs);
        }
        // Removing each one frees the bytes that it holds alone.
        while let Some((name, _)) = kept.pop() {
            fs.purge().unwrap();
            let all = fs.snapshots().unwrap();
            let (id, _, held) = all.iter().find(|(_, snapshot, _)| snapshot.name == name).unwrap();
            let before = fs.volume.allocator().space().1 * 4096;
            fs.remove_snapshots(&[*id]).unwrap();
            fs.finish_removals(&mut || Ok(())).unwrap();
            // Not by a purge, which also rewrites pages that the snapshot shared.
            fs.make_durable().unwrap();
            let freed = before.saturating_sub(fs.volume.allocator().space().1 * 4096);
            // Nodes of the trees that list it are changed in addition.
            assert!(freed.abs_diff(*held) <= 200_000, "held={held} freed={freed}");
            assert_sound(&fs);
        }
        fs.close().unwrap();
    }
}

/// Compared by the pages reachable from the trees, before and after, without using dead lists; the
/// audit proves that nothing else is in use. With other removals in progress.
#[test]
fn what_a_set_of_snapshots_holds_is_what_removing_it_frees() {
    for seed in seeds(1..=8) {
        let (_, fs) = fresh(seed);
        let dice = SeededEnvironment::new(seed);
        let below = |bound: u64| dice.next_u64() % bound;
        let ids = || -> Vec<u64> { fs.volume.readable_snapshots().unwrap().iter().map(|(id, _)| *id).collect() };
        let mut several = 0;
        for round in 0..24u64 {
            for _ in 0..below(30) {
                change(&fs, &dice);
            }
            fs.take_snapshot(format!("round {round}").as_bytes()).unwrap();
            if round % 4 != 3 {
                continue;
            }
            for _ in 0..below(40) {
                change(&fs, &dice);
            }
            if below(2) == 0 {
                let all = ids();
                fs.volume.forget_snapshot(all[below(all.len() as u64) as usize]).unwrap();
                for _ in 0..below(2) {
                    fs.volume.removal_step().unwrap();
                }
            }
            fs.make_durable().unwrap();
            let before = fs.volume.shown_bytes().unwrap();
            let alone: u64 = fs.snapshots().unwrap().iter().map(|(_, _, held)| held).sum();
            assert!(alone <= fs.volume.held_by_snapshots(&|_| true).unwrap());
            let set: Vec<u64> = ids().into_iter().filter(|_| below(5) < 3).collect();
            let held = fs.volume.held_by_snapshots(&|id| set.contains(&id)).unwrap();
            let each: Vec<u64> = set.iter().map(|one| fs.volume.held_by_snapshots(&|id| id == *one).unwrap()).collect();
            several += u64::from(held > each.iter().sum());
            fs.remove_snapshots(&set).unwrap();
            // A snapshot without name is in no result; the steps that free it do not change any
            // number of the others.
            if below(2) == 0 {
                fs.finish_removals(&mut || Ok(())).unwrap();
                fs.make_durable().unwrap();
            }
            let freed = before - fs.volume.shown_bytes().unwrap();
            assert_eq!(held, freed, "seed {seed}, round {round}: {set:?} of {:?}", ids());
            fs.finish_removals(&mut || Ok(())).unwrap();
            fs.purge().unwrap();
            assert_sound(&fs);
        }
        assert!(several > 0, "no set held more than its snapshots did one by one");
    }
}

#[test]
fn nothing_that_lies_over_the_live_tree_shows_in_a_view() {
    let place = Place::new();
    let archive = place.open();
    let fs = archive.file_system();
    let directory = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    let (small, large) = (put(fs, directory, b"small", b"before"), put(fs, ROOT_INO, b"large", &noise(4, 400_000)));
    fs.zero_range(large, 131_072, 65_536, true, false).unwrap();
    fs.set_xattr(small, b"user.note", b"old", XattrMode::Set).unwrap();
    fs.take_snapshot(b"kept").unwrap();
    let view = fs.snapshot_view(fs.snapshot_named(b"kept").unwrap());
    let (before, attributes) = (expected_in(&view), view.attributes(small).unwrap());
    assert_eq!(before[&b"/directory/small"[..]].content, b"before");
    let unchanged = |step: &str| {
        assert!(expected_in(&view) == before, "{step}");
        assert_eq!(view.attributes(small).unwrap(), attributes, "{step}");
        assert_eq!(view.lookup(directory, b"small").unwrap(), attributes, "{step}");
        assert_eq!(view.lookup(directory, b"..").unwrap().ino, ROOT_INO, "{step}");
        assert_eq!((view.next_hole(large, 0).unwrap(), view.next_data(large, 131_072).unwrap()), (131_072, 196_608));
        assert!(matches!(view.next_data(small, 6), Err(Error::NoSuchRange)), "{step}");
    };
    fs.write(small, 0, &noise(9, 20_000)).unwrap();
    fs.write(large, 140_000, b"into the hole").unwrap();
    fs.set_xattr(small, b"user.note", b"new", XattrMode::Set).unwrap();
    put(fs, directory, b"later", b"later");
    unchanged("staged");
    fs.sync().unwrap();
    assert!(fs.usage().log.entries > 0);
    unchanged("in the log");
    fs.truncate(large, 10, &mut |_| {}).unwrap();
    fs.rename(directory, b"small", ROOT_INO, b"moved", RenameMode::Replace).unwrap();
    fs.unlink(ROOT_INO, b"large").unwrap();
    assert!(matches!(fs.attributes(large), Err(Error::Stale)));
    unchanged("gone");
    fs.purge().unwrap();
    unchanged("purged");
    assert!(matches!(view.lookup(directory, b"later"), Err(Error::NotFound)));
    assert!(matches!(view.lookup(small, b"x"), Err(Error::NotDirectory)));
    let later = fs.lookup(directory, b"later").unwrap().ino;
    assert!(matches!(view.attributes(later), Err(Error::Stale)), "its number was given later");
    assert_sound(fs);
}

#[test]
fn a_view_of_a_removed_snapshot_is_stale_and_keeps_nothing() {
    let (storage, fs) = fresh(4);
    let large = put(&fs, ROOT_INO, b"large", &noise(1, 300_000));
    fs.take_snapshot(b"kept").unwrap();
    fs.unlink(ROOT_INO, b"large").unwrap();
    let id = fs.snapshot_named(b"kept").unwrap();
    let view = fs.snapshot_view(id);
    assert_eq!(view.attributes(large).unwrap().size, 300_000);
    let mut buffer = Vec::new();
    assert_eq!(view.read_into(large, 299_000, 5_000, &mut buffer).unwrap(), 1_000);
    // A reader at the time of the removal can read to the end.
    let reading = ReadView::of_snapshot(&fs.volume, id.0).unwrap();
    fs.remove_snapshots(&[id.0]).unwrap();
    let stale = |what: &str, result: Result<()>| assert!(matches!(result, Err(Error::Stale)), "{what}: {result:?}");
    stale("lookup", view.lookup(ROOT_INO, b"large").map(drop));
    stale("attributes", view.attributes(large).map(drop));
    stale("read_link", view.read_link(large).map(drop));
    stale("read", view.read_into(large, 0, 10, &mut buffer).map(drop));
    stale("next_data", view.next_data(large, 0).map(drop));
    stale("next_hole", view.next_hole(large, 0).map(drop));
    stale("xattr", view.xattr(large, b"user.a").map(drop));
    stale("list_xattrs", view.list_xattrs_for(large, &|| true).map(drop));
    stale("directory_bound", view.directory_bound(ROOT_INO).map(drop));
    let nothing = &mut |_: &DirectoryEntry<'_>, _: Option<&Attributes>| ControlFlow::Continue(());
    stale("list_directory", view.list_directory(ROOT_INO, 0, 9, true, nothing));
    assert!(matches!(fs.snapshot_named(b"kept"), Err(Error::NotFound)));
    assert_eq!(fs.list_snapshots().unwrap(), []);
    fs.finish_removals(&mut || Ok(())).unwrap();
    assert!(matches!(fs.purge(), Err(Error::InUse(_))), "a reader of that version is left");
    for n in 0..20 {
        put(&fs, ROOT_INO, format!("new{n}").as_bytes(), &noise(n, 100_000));
    }
    fs.make_durable().unwrap();
    let mut extents = Vec::new();
    reading
        .view()
        .scan(Key::new(large.0, kind::EXTENT, 0), Key::new(large.0, kind::EXTENT + 1, 0), &mut |key, value| {
            extents.push((key.sub, Extent::decode(value)?));
            Ok(ControlFlow::Continue(()))
        })
        .unwrap();
    fs.forget_plaintext();
    let mut content = vec![0; 300_000];
    for (offset, extent) in extents {
        let place = offset as usize..offset as usize + extent.length as usize;
        fs.volume.read_data(&extent.page, extent.start, &mut content[place]).unwrap();
    }
    assert!(content == noise(1, 300_000), "what the reader saw was used again under it");
    drop(reading);
    let held = || recoverable(&(storage.clone() as Arc<dyn Storage>)).contains(&large);
    assert!(held());
    fs.purge().unwrap();
    assert!(!held(), "the view, which is still there, keeps nothing");
    stale("after all", view.attributes(large).map(drop));
    assert_sound(&fs);
}

/// Without the pin, pages freed meanwhile would be overwritten, and the versions damaged.
#[test]
fn what_was_there_when_it_was_asked_for_is_read_while_all_of_it_goes() {
    for seed in seeds(1..=4) {
        let (_, fs) = fresh(seed);
        let dice = SeededEnvironment::new(seed);
        (0..60).for_each(|_| change(&fs, &dice));
        let moments = SnapshotManager::of(Arc::clone(&fs));
        moments.create(b"old").unwrap();
        (0..60).for_each(|_| change(&fs, &dice));
        let (old, there) = (expected(&moments.snapshot_view(b"old").unwrap()), expected(&fs));
        let now = moments.pin_current().unwrap();
        let older = moments.snapshot_view(b"old").unwrap();
        moments.remove(&mut |all| Ok(all.iter().map(|one| one.id).collect())).unwrap();
        for round in 0..6 {
            (0..40).for_each(|_| change(&fs, &dice));
            fs.finish_removals(&mut || Ok(())).unwrap();
            fs.make_durable().unwrap();
            while fs.maintain().unwrap() {}
            assert_eq!(expected(now.file_system()), there, "seed {seed}, round {round}");
        }
        assert_eq!(expected(&older), old, "seed {seed}");
        drop((now, older));
        fs.purge().unwrap();
        assert_sound(&fs);
    }
}

/// A name can be reused: a view of the first snapshot does not become one of the second.
#[test]
fn a_view_is_of_a_snapshot_and_not_of_a_name() {
    let (_, fs) = fresh(5);
    let file = put(&fs, ROOT_INO, b"file", b"first");
    fs.take_snapshot(b"kept").unwrap();
    let first = fs.snapshot_named(b"kept").unwrap();
    fs.remove_snapshots(&[first.0]).unwrap();
    fs.write(file, 0, b"other").unwrap();
    fs.take_snapshot(b"kept").unwrap();
    let second = fs.snapshot_named(b"kept").unwrap();
    assert_ne!(first, second);
    assert!(matches!(fs.snapshot_view(first).attributes(file), Err(Error::Stale)));
    assert_eq!(expected_in(&fs.snapshot_view(second))[&b"/file"[..]].content, b"other");
    let kept = fs.list_snapshots().unwrap();
    assert_eq!(kept.iter().map(|kept| (kept.id, &kept.name[..])).collect::<Vec<_>>(), [(second, &b"kept"[..])]);
    assert!(matches!(fs.snapshot_view(SnapshotId(99)).attributes(ROOT_INO), Err(Error::Stale)));
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
        Archive::open_snapshot(&self.path(), &self.key, &options, &RollbackOptions::default(), name)
    }
}

/// After a crash the log has the changes after the snapshot: new bytes, records, sizes.
#[test]
fn the_log_is_not_laid_over_a_snapshot() {
    let place = Place::new();
    let archive = place.open();
    let fs = archive.file_system();
    let ino = put(fs, ROOT_INO, b"file", b"before");
    archive.snapshot_manager().create(b"kept").unwrap();
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
fn a_removed_snapshot_is_not_found() {
    let place = Place::new();
    let archive = place.open();
    archive.snapshot_manager().create(b"one").unwrap();
    archive.snapshot_manager().create(b"two").unwrap();
    assert!(matches!(archive.snapshot_manager().create(b"one"), Err(Error::Refused(Refusal::SnapshotExists { .. }))));
    // Like a kill before anything was freed.
    let ids: Vec<u64> = archive.file_system().snapshots().unwrap().iter().map(|(id, ..)| *id).collect();
    archive.file_system().remove_snapshots(&ids[..1]).unwrap();
    drop(archive);
    for name in [&b"one"[..], b""] {
        assert!(matches!(place.open_snapshot(name), Err(Error::Refused(Refusal::NoSnapshot { .. }))));
    }
    let options = OpenOptions::default();
    let writable = Archive::open_snapshot(&place.path(), &place.key, &options, &RollbackOptions::default(), b"two");
    assert!(matches!(writable, Err(Error::Invalid(_))));
    let read = place.open_snapshot(b"two").unwrap();
    let named: Vec<Vec<u8>> = read.snapshots().unwrap().into_iter().map(|snapshot| snapshot.name).collect();
    assert_eq!(named, [b"two"]);
    assert!(matches!(read.snapshot_manager().create(b"three"), Err(Error::ReadOnly(_))));
}

/// A half removed snapshot prevents nothing: nothing of it can be lost.
#[test]
fn a_compaction_ends_a_removal_that_was_interrupted() {
    let place = Place::new();
    let archive = place.open();
    put(archive.file_system(), ROOT_INO, b"kept", b"content");
    put(archive.file_system(), ROOT_INO, b"gone", &noise(1, 100_000));
    archive.snapshot_manager().create(b"monday").unwrap();
    archive.file_system().unlink(ROOT_INO, b"gone").unwrap();
    let ids: Vec<u64> = archive.file_system().snapshots().unwrap().iter().map(|(id, ..)| *id).collect();
    archive.file_system().remove_snapshots(&ids).unwrap();
    archive.close().unwrap();
    Archive::compact(&place.path(), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    let archive = place.open();
    assert_eq!(archive.file_system().volume.snapshots().unwrap(), []);
    assert_eq!(archive.check(true, &mut |_| {}).unwrap().findings, []);
}

#[test]
fn pruning_backups_removes_no_other_snapshot() {
    let (_, fs) = fresh(47);
    let moments = SnapshotManager::of(Arc::clone(&fs));
    let now = Timestamp { seconds: 1, nanos: 0 };
    for name in ["monday", "backup-monday", "2026-11-27T03-00-00Z"] {
        moments.create(name.as_bytes()).unwrap();
    }
    moments.create_scheduled(now).unwrap();
    // All in one second.
    let made: Vec<Vec<u8>> = (0..3).map(|_| moments.create_backup(now, true).unwrap()).collect();
    assert_eq!(made[2], b"backup-1970-01-01T00-00-01Z-3");
    let keep = RetentionPolicy::default().with(RetentionRule::Last, 1);
    let incomplete: Vec<Vec<u8>> = (0..2).map(|_| moments.create_backup(now, false).unwrap()).collect();
    assert_eq!(moments.prune_backups(&keep).unwrap(), [&made[..2], &incomplete[..1]].concat());
    assert_eq!(moments.prune_backups(&keep).unwrap(), Vec::<Vec<u8>>::new());
    let left: Vec<Vec<u8>> = moments.list().unwrap().into_iter().map(|one| one.name).collect();
    let others: [&[u8]; 4] = [b"monday", b"backup-monday", b"2026-11-27T03-00-00Z", b"auto-1970-01-01T00-00-01Z"];
    assert_eq!(left, [&others[..], &[&made[2], &incomplete[1]]].concat());
    assert_sound(&fs);
}

#[test]
fn the_newest_snapshots_before_restores_are_kept_and_the_one_that_is_restored() {
    let (_, fs) = fresh(46);
    let moments = SnapshotManager::of(Arc::clone(&fs));
    moments.create(b"before-restore-monday").unwrap();
    let names = || -> Vec<String> {
        moments.list().unwrap().into_iter().map(|one| String::from_utf8(one.name).unwrap()).collect()
    };
    // Two in each second.
    let made: Vec<Vec<u8>> = (0..12)
        .map(|number| {
            put(&fs, ROOT_INO, format!("{number}").as_bytes(), b"content");
            let now = Timestamp { seconds: number / 2, nanos: 0 };
            moments.create_before_restore(b"before-restore-1970-01-01T00-00-01Z", now).unwrap()
        })
        .collect();
    let expected: Vec<String> = ["before-restore-monday", "before-restore-1970-01-01T00-00-01Z"]
        .map(str::to_owned)
        .into_iter()
        .chain(made[7..].iter().map(|name| String::from_utf8(name.clone()).unwrap()))
        .collect();
    assert_eq!(names(), expected);
    assert_sound(&fs);
}
