//! Snapshots after a compaction and a change of the volume key: equal content, and shared data
//! remains shared.

use std::collections::HashSet;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::create::name_key;
use super::super::{Archive, CompactOptions, CompactReport, KeepKeys};
use super::key_changes::Case;
use super::sample::{Expected, OWNER, expected, expected_in, fresh, noise, put};
use super::snapshots::change;
use super::{ARCHIVE, key, secrets};
use crate::archive::compact::versions::NameRehash;
use crate::archive::compact::versions::compare;
use crate::env::{SeededEnvironment, seeds};
use crate::error::{Error, Result};
use crate::format::record::Root;
use crate::format::values::{DeadValue, Extent, SnapshotValue};
use crate::format::{BLOCK, Generation, Key, Pointer, ROOT_INO, Timestamp, kind};
use crate::fs::{FileSystem, RenameMode, SetAttributes, XattrMode};
use crate::keys::{self, RollbackOptions};
use crate::txn::ReadView;

impl Case {
    fn open(&self) -> Archive {
        self.try_open(&secrets("first"), &RollbackOptions::default()).unwrap()
    }

    fn compact(&self) -> CompactReport {
        self.try_compact().unwrap()
    }

    fn try_compact(&self) -> Result<CompactReport> {
        let key = keys::unlock(&self.path(), &super::passphrase("first")).unwrap();
        Archive::compact(&self.path(), &key, &CompactOptions::default(), &mut |_| Ok(()))
    }
}

/// Snapshots with their content; the live tree is the entry without snapshot.
type Shown = Vec<(Option<SnapshotValue>, Expected)>;

fn shown(fs: &FileSystem) -> Shown {
    let kept = fs.volume.readable_snapshots().unwrap().into_iter();
    let mut all: Shown = kept
        .map(|(_, kept)| {
            let id = fs.snapshot_named(&kept.name).unwrap();
            (Some(kept), expected_in(&fs.snapshot_view(id)))
        })
        .collect();
    all.push((None, expected(fs)));
    all
}

fn assert_same(found: &Shown, wanted: &Shown, what: &str) {
    let told = |kept: &Option<SnapshotValue>| kept.as_ref().map(|kept| (kept.name.clone(), kept.time, kept.inodes));
    assert_eq!(found.len(), wanted.len(), "{what}");
    for ((kept, content), (other, expected)) in found.iter().zip(wanted) {
        assert_eq!(told(kept), told(other), "{what}");
        assert!(content == expected, "{what}: {:?} shows something else", told(kept));
    }
}

fn assert_sound(archive: &Archive, what: &str) {
    let report = archive.check(true, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty(), "{what}: {:?}", report.findings);
}

/// Runs rounds of changes with a snapshot after each, including moved files in a directory, and
/// files unlinked while open.
fn live_on(fs: &FileSystem, dice: &SeededEnvironment, rounds: std::ops::Range<u64>) {
    let directory = match fs.lookup(ROOT_INO, b"directory") {
        Ok(found) => found.ino,
        Err(_) => fs.make_directory(ROOT_INO, b"directory", 0o755, OWNER).unwrap().ino,
    };
    for round in rounds {
        (0..30).for_each(|_| change(fs, dice));
        let name = format!("of round {round}").into_bytes();
        let made = put(fs, ROOT_INO, &name, &noise(round, 150_000));
        fs.set_xattr(made, b"user.round", &noise(round, 10 + 1000 * round as usize), XattrMode::Set).unwrap();
        fs.rename(ROOT_INO, &name, directory, b"moved", RenameMode::Replace).unwrap();
        fs.link(made, directory, &name).unwrap();
        let open = put(fs, ROOT_INO, b"open", &noise(round, 300_000));
        fs.open(open).unwrap();
        fs.unlink(ROOT_INO, b"open").unwrap();
        fs.take_snapshot(format!("round {round}").as_bytes()).unwrap();
        if round % 2 == 0 {
            fs.release(open).unwrap();
        }
        if round % 3 == 0 {
            fs.take_snapshot(format!("again {round}").as_bytes()).unwrap();
        }
    }
    (0..20).for_each(|_| change(fs, dice));
}

/// Files unlinked while open are in the trees, also in those of the snapshots.
fn assert_leaves_orphans(fs: &FileSystem) {
    let orphans = |reading: ReadView<'_>| {
        let mut found = 0;
        let count = &mut |_: Key, _: &[u8]| {
            found += 1;
            Ok(ControlFlow::Continue(()))
        };
        reading.view().scan(Key::new(0, kind::ORPHAN, 0), Key::new(0, kind::TRIM, 0), count).unwrap();
        found
    };
    let kept = fs.volume.readable_snapshots().unwrap();
    let of_kept = kept.iter().map(|(id, _)| orphans(ReadView::of_snapshot(&fs.volume, *id).unwrap()));
    assert!(of_kept.filter(|found| *found > 0).count() > 2);
    assert!(orphans(ReadView::of(&fs.volume, fs.volume.state())) > 0);
}

#[test]
fn snapshots_show_the_same_in_a_new_file_and_can_be_removed_there() {
    for seed in seeds(1..=2) {
        let dice = SeededEnvironment::new(seed);
        let case = Case::new();
        let archive = case.open();
        live_on(archive.file_system(), &dice, 0..4);
        archive.file_system().sync().unwrap();
        assert_leaves_orphans(archive.file_system());
        let before = shown(archive.file_system());
        // Killed with log entries and open files, or not.
        if seed % 2 == 0 {
            archive.close().unwrap()
        } else {
            drop(archive)
        }
        case.compact();
        let archive = case.open();
        assert_same(&shown(archive.file_system()), &before, "compacted");
        assert_sound(&archive, "compacted");
        assert_kept_are_shown(archive.file_system(), "compacted");

        // The archive is changed further, and compacted again.
        live_on(archive.file_system(), &dice, 4..7);
        let all = archive.snapshots().unwrap();
        let gone = all[(dice.next_u64() % all.len() as u64) as usize].name.clone();
        remove_snapshot(&archive, &gone);
        assert_sound(&archive, "changed");
        archive.file_system().sync().unwrap();
        let before = shown(archive.file_system());
        if seed % 2 == 0 {
            drop(archive)
        } else {
            archive.close().unwrap()
        }
        case.rekey(&secrets("first"), KeepKeys::All).unwrap();
        let archive = case.open();
        assert_same(&shown(archive.file_system()), &before, "under another key");
        assert_sound(&archive, "under another key");
        for (kept, content) in &before {
            assert_found_by_name(archive.file_system(), kept.as_ref(), content);
        }

        remove_all(&archive, before, &dice);
        archive.close().unwrap();
    }
}

/// Looks up the names of the root, because the compared listings do not use the name hashes.
fn assert_found_by_name(fs: &FileSystem, kept: Option<&SnapshotValue>, content: &Expected) {
    let mut looked_up = 0;
    for (path, seen) in content {
        let Some(name) = path.strip_prefix(b"/").filter(|name| !name.contains(&b'/')) else { continue };
        let found = match kept {
            Some(kept) => fs.snapshot_view(fs.snapshot_named(&kept.name).unwrap()).lookup(ROOT_INO, name),
            None => fs.lookup(ROOT_INO, name),
        };
        assert_eq!(found.unwrap().ino, seen.ino);
        looked_up += 1;
    }
    assert!(looked_up > 3, "{looked_up}");
}

/// Removes the snapshots in random order, and checks the archive and the others after each.
/// Removes a snapshot and frees what only it held.
fn remove_snapshot(archive: &Archive, name: &[u8]) {
    let id = archive.snapshots().unwrap().into_iter().find(|snapshot| snapshot.name == name).unwrap().id;
    archive.snapshot_manager().remove(&mut |_| Ok(vec![id])).unwrap();
    archive.finish_removals(&mut || Ok(())).unwrap();
}

fn remove_all(archive: &Archive, mut left: Shown, dice: &SeededEnvironment) {
    while left.len() > 1 {
        let (kept, _) = left.remove((dice.next_u64() % (left.len() - 1) as u64) as usize);
        let name = kept.unwrap().name;
        let told = format!("without {}", String::from_utf8_lossy(&name));
        remove_snapshot(archive, &name);
        archive.file_system().purge().unwrap();
        assert_same(&shown(archive.file_system()), &left, &told);
        assert_sound(archive, &told);
        assert_kept_are_shown(archive.file_system(), &told);
    }
}

/// Pages on the dead list of a snapshot are in that snapshot, so nothing is kept longer than it is
/// referenced. The check covers premature frees and pages in use without reference.
fn assert_kept_are_shown(fs: &FileSystem, what: &str) {
    let volume = &fs.volume;
    let mut shown = HashSet::new();
    for (id, _) in volume.readable_snapshots().unwrap() {
        let reading = ReadView::of_snapshot(volume, id).unwrap();
        let node = &mut |pointer: &Pointer, _: u8| {
            shown.insert((id, pointer.run));
            Ok(())
        };
        reading.view().tree.visit_pages(volume.store(), node, &mut |_| Ok(())).unwrap();
        let extent = &mut |key: Key, value: &[u8]| {
            if key.kind == kind::EXTENT {
                shown.insert((id, Extent::decode(value)?.page.run));
            }
            Ok(ControlFlow::Continue(()))
        };
        reading.view().scan(Key::MIN, Key::MAX, extent).unwrap();
    }
    let listed = &mut |key: Key, value: &[u8]| {
        if key.kind == kind::DEAD {
            let dead = DeadValue::decode(value)?;
            assert!(shown.contains(&(key.object, dead.run)), "{what}: {key:?} {dead:?}");
        }
        Ok(ControlFlow::Continue(()))
    };
    volume.state().trees.references.scan(volume.store(), Key::MIN, Key::MAX, listed).unwrap();
}

/// The same data ten times, and once under other names and truncated, in versions that do not have
/// both.
#[test]
fn what_snapshots_share_is_written_once() {
    const SIZE: u64 = 6 << 20;
    let case = Case::new();
    let archive = case.open();
    let fs = archive.file_system();
    put(fs, ROOT_INO, b"large", &noise(1, SIZE as usize));
    for n in 0..300 {
        put(fs, ROOT_INO, format!("small{n}").as_bytes(), &noise(n, 1_000));
    }
    archive.close().unwrap();
    let alone = case.compact().length_after;

    let archive = case.open();
    let fs = archive.file_system();
    for n in 0..10u64 {
        archive.snapshot_manager().create(format!("same {n}").as_bytes()).unwrap();
        put(fs, ROOT_INO, format!("new{n}").as_bytes(), b"new");
    }
    let mut name = b"large".to_vec();
    for n in 0..4u64 {
        let source = fs.lookup(ROOT_INO, &name).unwrap().ino;
        let next = format!("copy{n}").into_bytes();
        let copy = put(fs, ROOT_INO, &next, b"");
        let mut done = 0;
        while done < SIZE - 1000 * n {
            done += fs.copy_range(source, done, copy, done, SIZE - 1000 * n - done, false).unwrap();
        }
        fs.zero_range(copy, 500_000 * n + 20_000, 70_000, true, false).unwrap();
        fs.unlink(ROOT_INO, &name).unwrap();
        archive.snapshot_manager().create(&next).unwrap();
        name = next;
    }
    fs.unlink(ROOT_INO, &name).unwrap();
    archive.close().unwrap();
    let archive = case.open();
    let before = shown(archive.file_system());
    archive.close().unwrap();
    let report = case.compact();
    // Nodes of 14 versions, and the padding of the file's pages.
    assert!(report.length_after < alone + (2 << 20), "alone={alone} {report:?}");
    let archive = case.open();
    assert_same(&shown(archive.file_system()), &before, "compacted");
    assert_sound(&archive, "compacted");
    // Pages with a count that is too high would remain, with one that is too low would be freed too
    // early.
    remove_all(&archive, before, &SeededEnvironment::new(9));
    assert!(archive.file_system().volume.allocator().space().1 * BLOCK < 2 << 20, "the large file is not freed");
    archive.close().unwrap();
}

/// Damages the removed file's first page, which is only in the snapshot.
fn damage_of_kept(case: &Case) {
    let archive = case.open();
    let fs = archive.file_system();
    let file = put(fs, ROOT_INO, b"file", &noise(1, 200_000));
    archive.snapshot_manager().create(b"mon\x1bday").unwrap();
    fs.unlink(ROOT_INO, b"file").unwrap();
    put(fs, ROOT_INO, b"other", &noise(2, 200_000));
    archive.snapshot_manager().create(b"tuesday").unwrap();
    let id = fs.snapshot_named(b"mon\x1bday").unwrap();
    let reading = ReadView::of_snapshot(&fs.volume, id.0).unwrap();
    let page = reading.view().get(Key::new(file.0, kind::EXTENT, 0), Extent::decode).unwrap().unwrap().page;
    drop(reading);
    archive.close().unwrap();
    let mut bytes = std::fs::read(case.path()).unwrap();
    bytes[(page.run.address * BLOCK) as usize + 5000] ^= 1;
    std::fs::write(case.path(), bytes).unwrap();
}

#[test]
fn a_damaged_snapshot_is_named_and_nothing_is_changed() {
    let case = Case::new();
    damage_of_kept(&case);
    let before = std::fs::read(case.path()).unwrap();
    let refused = case.try_compact();
    assert!(matches!(&refused, Err(Error::Damaged(text)) if text.starts_with("snapshot mon\\x1bday: ")), "{refused:?}");
    assert!(std::fs::read(case.path()).unwrap() == before);
    assert_eq!(std::fs::read_dir(case.path().parent().unwrap()).unwrap().count(), 1);
    // Without the snapshot there is no conflict.
    let archive = case.open();
    remove_snapshot(&archive, b"mon\x1bday");
    archive.close().unwrap();
    case.compact();
    assert_eq!(case.open().snapshots().unwrap().len(), 1);
}

/// Difference between the compared histories.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Other {
    Nothing,
    /// In a snapshot only; the live tree is equal again.
    Byte,
    Mode,
    Name,
    Missing,
    Snapshot,
    Time,
    /// After the snapshots.
    Live,
}

/// Two snapshots and the live tree.
fn history(other: Other) -> Arc<FileSystem> {
    let (_, fs) = fresh(5);
    let a = put(&fs, ROOT_INO, b"a", &noise(1, 200_000));
    let small = put(&fs, ROOT_INO, b"small", &noise(2, 5_000));
    fs.make_durable().unwrap();
    take(&fs, b"one", 100);
    fs.write(a, 70_000, &noise(3 + u64::from(other == Other::Byte), 1)).unwrap();
    fs.write(small, 0, b"changed").unwrap();
    let mode = if other == Other::Mode { 0o600 } else { 0o640 };
    fs.set_attributes(small, &SetAttributes { mode: Some(mode), ..Default::default() }).unwrap();
    let name: &[u8] = if other == Other::Name { b"again" } else { b"other" };
    fs.link(a, ROOT_INO, name).unwrap();
    if other != Other::Missing {
        fs.set_xattr(a, b"user.note", b"note", XattrMode::Set).unwrap();
    }
    fs.make_durable().unwrap();
    let (called, time) = if other == Other::Snapshot { (&b"three"[..], 200) } else { (&b"two"[..], 200) };
    take(&fs, called, time + i64::from(other == Other::Time));
    // Everything before is equal.
    fs.write(a, 70_000, &noise(8, 1)).unwrap();
    fs.unlink(ROOT_INO, name).unwrap();
    if other != Other::Missing {
        fs.remove_xattr(a, b"user.note").unwrap();
    }
    fs.unlink(ROOT_INO, b"small").unwrap();
    put(&fs, ROOT_INO, b"late", &noise(4 + u64::from(other == Other::Live), 90_000));
    fs.make_durable().unwrap();
    fs
}

fn take(fs: &FileSystem, name: &[u8], seconds: i64) {
    let time = Timestamp { seconds, nanos: 0 };
    let kept = SnapshotValue { name: name.to_vec(), time, generation: Generation(0), root: Root::default(), inodes: 0 };
    fs.volume.take_snapshot_again(&kept).unwrap();
}

#[test]
fn a_comparison_finds_whatever_is_another_in_any_moment() {
    let same = NameRehash::new(&name_key(&key(), &ARCHIVE), &name_key(&key(), &ARCHIVE));
    let one = history(Other::Nothing);
    let compared = |other: &FileSystem| compare(&one.volume, &other.volume, &same, &mut |_| Ok(()));
    compared(&history(Other::Nothing)).unwrap();
    use Other::*;
    for other in [Byte, Mode, Name, Missing, Snapshot, Time, Live] {
        let found = compared(&history(other));
        assert!(matches!(found, Err(Error::Damaged(_))), "{other:?}: {found:?}");
        let backwards = compare(&history(other).volume, &one.volume, &same, &mut |_| Ok(()));
        assert!(matches!(backwards, Err(Error::Damaged(_))), "{other:?}: {backwards:?}");
    }
}
