//! Rescue from archives whose newest state is in the log: the last durable data is rescued, and
//! obsolete data is not.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use super::super::fuzzing::{OWNER, create_on, open_on};
use super::sample::{Expected, expected, noise, put};
use super::{ARCHIVE, archive, key};
use crate::env::SeededEnvironment;
use crate::format::{BLOCK, LOG, RING_SLOTS, ROOT_INO, slot_block};
use crate::frame::PageCipher;
use crate::fs::{FileSystem, RenameMode, SetAttributes, XattrMode, mode};
use crate::rescue::{RescueOptions, RescueReport, RescueState, rescue_from};
use crate::storage::{MemoryStorage, Storage};

/// Writes a commit, and then each kind of change in an entry of its own; returns the number of
/// entries.
fn filled(fs: &FileSystem) -> u64 {
    let below = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    let large = put(fs, ROOT_INO, b"large", &noise(1, 200_000));
    let cut = put(fs, below, b"cut", &noise(2, 30_000));
    let inline = put(fs, ROOT_INO, b"inline", b"a few bytes");
    for name in [&b"named"[..], b"replaced", b"removed", b"untouched"] {
        put(fs, ROOT_INO, name, name);
    }
    fs.make_durable().unwrap();
    let size = |size| SetAttributes { size: Some(size), ..SetAttributes::default() };
    let steps: [&dyn Fn(); 9] = [
        &|| fs.write(large, 70_000, &noise(3, 5000)).unwrap(),
        &|| assert_ne!(put(fs, below, b"created", b"known to the log alone"), below),
        &|| fs.rename(ROOT_INO, b"named", below, b"renamed", RenameMode::Replace).unwrap(),
        &|| fs.set_attributes(cut, &size(9000)).map(|_| ()).unwrap(),
        &|| fs.write(cut, 12_000, b"behind a hole").unwrap(),
        &|| fs.unlink(ROOT_INO, b"removed").unwrap(),
        &|| fs.set_xattr(below, b"user.logged", b"value", XattrMode::Set).unwrap(),
        &|| fs.write(inline, 2, b"FEW").unwrap(),
        &|| fs.write(large, 70_100, b"once more").unwrap(),
    ];
    for step in steps {
        step();
        fs.sync().unwrap();
    }
    assert_eq!(fs.volume.log_use().entries, steps.len() as u64);
    steps.len() as u64
}

fn logged() -> (Arc<MemoryStorage>, Arc<FileSystem>, u64) {
    let storage = Arc::new(archive(&[]));
    let fs = create_on(storage.clone(), 31).unwrap();
    let entries = filled(&fs);
    (storage, fs, entries)
}

fn without_records(mut bytes: Vec<u8>) -> Vec<u8> {
    for slot in 0..RING_SLOTS {
        let at = (slot_block(slot) * BLOCK) as usize;
        bytes[at..at + BLOCK as usize].fill(0xEE);
    }
    bytes
}

/// Rescues, and asserts that exactly `want` is there; returns the number of unproved objects.
fn rescue(bytes: Vec<u8>, want: &Expected, what: &str) -> (RescueReport, u64) {
    let target = tempfile::tempdir().unwrap();
    let to = target.path().join("to");
    let options = RescueOptions { to: to.clone(), partial: false, privileges: false, snapshot: None };
    let environment = Arc::new(SeededEnvironment::new(4));
    let cipher = PageCipher::new(&key(), ARCHIVE, true, environment.clone());
    let mut doubted = 0;
    let item = &mut |item: &crate::rescue::RescuedObject<'_>| {
        assert_eq!(item.state, RescueState::Whole, "{what}: {}", item.reason);
        doubted += u64::from(item.older || item.unproved);
        Ok(())
    };
    let storage = Arc::new(MemoryStorage::from_contents(bytes));
    let report = rescue_from(storage, cipher, &*environment, &options, item, &mut |_| Ok(())).unwrap();
    assert!(report.problems.is_empty(), "{what}: {:?}", report.problems);
    for (path, seen) in want {
        let host = to.join(Path::new(std::ffi::OsStr::from_bytes(&path[1..])));
        let shown = host.display();
        if seen.mode & mode::TYPE == mode::REGULAR {
            let found = std::fs::read(&host).unwrap_or_else(|error| panic!("{what}: {shown}: {error}"));
            assert!(found == seen.content, "{what}: {shown}");
        } else {
            assert!(host.is_dir(), "{what}: {shown}");
        }
    }
    assert_eq!(report.files + report.directories - 1, want.len() as u64, "{what}");
    (report, doubted)
}

#[test]
fn what_the_log_says_comes_back_without_any_record() {
    let (storage, fs, entries) = logged();
    let want = expected(&fs);
    let bytes = storage.contents();
    let mut newest_lost = bytes.clone();
    let newest = (slot_block(fs.volume.durable().generation.slot()) * BLOCK) as usize;
    newest_lost[newest + 100] ^= 1;
    for (what, bytes) in
        [("no records", without_records(bytes.clone())), ("no newest record", newest_lost), ("undamaged", bytes)]
    {
        let (report, doubted) = rescue(bytes, &want, what);
        assert_eq!((report.entries, doubted, report.complete()), (entries, 0, true), "{what}");
    }
}

/// The record that the entries extend wrote no node: those of its tree are older, and it is not
/// proved that there were none in between.
#[test]
fn entries_are_laid_over_the_newest_leaves_that_are_left_of_before_and_that_is_told() {
    let (storage, fs, _) = logged();
    fs.close().unwrap();
    let fs = open_on(storage.clone(), false).unwrap();
    let large = fs.lookup(ROOT_INO, b"large").unwrap().ino;
    fs.write(large, 5, b"in a second session").unwrap();
    fs.sync().unwrap();
    assert_eq!(fs.volume.log_use().entries, 1);
    let want = expected(&fs);
    let (report, doubted) = rescue(without_records(storage.contents()), &want, "no records");
    assert_eq!((report.entries, report.complete()), (1, false));
    assert_eq!(doubted, want.len() as u64 + 1);
    let (report, doubted) = rescue(storage.contents(), &want, "undamaged");
    assert_eq!((doubted, report.complete()), (0, true));
}

#[test]
fn entries_that_a_commit_contains_do_not_come_back_over_what_it_has() {
    let (storage, fs, entries) = logged();
    let large = fs.lookup(ROOT_INO, b"large").unwrap().ino;
    let inline = fs.lookup(ROOT_INO, b"inline").unwrap().ino;
    fs.write(large, 70_000, &noise(9, 6000)).unwrap();
    fs.write(inline, 0, b"newer than the log").unwrap();
    fs.unlink(ROOT_INO, b"untouched").unwrap();
    fs.make_durable().unwrap();
    let want = expected(&fs);
    for (what, bytes) in [("no records", without_records(storage.contents())), ("undamaged", storage.contents())] {
        let (report, doubted) = rescue(bytes, &want, what);
        // They still exist, and would be applied over leaves of their own record.
        assert_eq!((report.entries, doubted, report.complete()), (entries, 0, true), "{what}");
    }
}

/// The first commit after a crash keeps the log as pending.
#[test]
fn a_log_that_is_pending_is_laid_over_the_record_that_names_it() {
    let (storage, fs, entries) = logged();
    let want = expected(&fs);
    // Each takes one or two blocks.
    let used = LOG.0 + fs.volume.log_use().used_bytes / BLOCK - 1;
    let killed = Arc::new(MemoryStorage::from_contents(storage.contents()));
    let fs = open_on(killed.clone(), false).unwrap();
    // Opens the session, and is not made durable.
    put(&fs, ROOT_INO, b"lost", b"lost");
    assert!(fs.volume.durable().pending.is_some());
    for (what, bytes) in [("no records", without_records(killed.contents())), ("undamaged", killed.contents())] {
        let (report, _) = rescue(bytes, &want, what);
        assert_eq!(report.entries, entries, "{what}");
        assert!(!report.entries_lost, "{what}");
    }
    // It was durable as a whole, although no entry after the lost one proves it.
    for (what, from) in [("all of the log lost", LOG.0), ("the last entry lost", used)] {
        let spoiled = |mut bytes: Vec<u8>| {
            bytes[(from * BLOCK) as usize..(LOG.1 * BLOCK) as usize].fill(0);
            bytes
        };
        let before = Arc::new(MemoryStorage::from_contents(spoiled(storage.contents())));
        let want = expected(&open_on(before, true).unwrap());
        let (report, _) = rescue(spoiled(killed.contents()), &want, what);
        assert!(report.entries_lost && !report.complete(), "{what}");
    }
}

#[test]
fn a_lost_entry_is_told_and_what_came_after_it_is_not_laid() {
    let (storage, fs, entries) = logged();
    drop(fs);
    let record = {
        let mut bytes = storage.contents();
        bytes[(LOG.0 * BLOCK) as usize..(LOG.1 * BLOCK) as usize].fill(0);
        expected(&open_on(Arc::new(MemoryStorage::from_contents(bytes)), true).unwrap())
    };
    storage.write_at(LOG.0 * BLOCK + 200, &[0; 8]).unwrap();
    let (report, _) = rescue(storage.contents(), &record, "the first entry lost");
    assert_eq!((report.entries, report.entries_lost, report.complete()), (0, true, false));
    assert!(entries > 1);
}
