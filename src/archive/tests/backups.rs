//! Backups: they contain their recorded version despite concurrent writes, and the old or the new
//! one after every crash.

use std::sync::Arc;

use parking_lot::Mutex;

use super::super::{
    Archive, BackupDestination, BackupReport, BackupSource, BackupStep, Backups, CompactOptions, CreateOptions,
    OpenOptions,
};
use super::sample::{Expected, expected, fresh, open_on, put};
use super::snapshots::change;
use crate::crypto::kdf::KdfCost;
use crate::env::{SeededEnvironment, seeds};
use crate::error::{Error, Refusal, Result};
use crate::format::{BLOCK, RING_SLOTS, ROOT_INO, slot_block};
use crate::fs::FileSystem;
use crate::keys::header::Header;
use crate::keys::{self, RollbackOptions};
use crate::storage::simulated::{OpKind, SimulatedStorage};
use crate::storage::{CountingStorage, MemoryStorage, Storage};

pub(super) fn source(fs: &Arc<FileSystem>, storage: &Arc<MemoryStorage>) -> BackupSource {
    Backups::of(fs.clone(), storage.clone()).pin().unwrap()
}

pub(super) fn on(_: BackupStep) -> Result<()> {
    Ok(())
}

pub(super) fn filled(source: &BackupSource) -> Arc<MemoryStorage> {
    let file = Arc::new(MemoryStorage::new());
    let done = source.fill(&(file.clone() as Arc<dyn Storage>), &mut on).unwrap();
    assert!(done.whole);
    file
}

fn next(source: &BackupSource, file: &Arc<MemoryStorage>) -> Result<Option<BackupReport>> {
    source.bring_up_to_date(&(file.clone() as Arc<dyn Storage>), &mut on)
}

fn verify(source: &BackupSource, file: &Arc<MemoryStorage>) {
    source.verify(&(file.clone() as Arc<dyn Storage>), 100, &mut on).unwrap();
}

/// Returns the content of a backup, read as a backup and as an archive opened for writing.
pub(super) fn shown(file: &dyn Storage) -> Expected {
    let mut bytes = vec![0; file.len().unwrap() as usize];
    file.read_at(0, &mut bytes).unwrap();
    let read = open_on(Arc::new(MemoryStorage::from_contents(bytes.clone())), true, 901).unwrap();
    assert!(read.volume.origin().is_some());
    let seen = expected(&read);
    assert_eq!(read.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
    let copy = Arc::new(MemoryStorage::from_contents(bytes));
    let written = open_on(copy.clone(), false, 902).unwrap();
    assert!(expected(&written) == seen);
    put(&written, ROOT_INO, b"more", b"of it");
    written.close().unwrap();
    let again = open_on(copy, true, 903).unwrap();
    assert_eq!(again.volume.origin(), None, "it was written to");
    let findings = again.check_structure(true).unwrap();
    assert_eq!(findings.len(), 0, "{findings:?}");
    assert_eq!(again.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
    seen
}

/// Any changes between two backups, in one session and over several, with snapshots.
#[test]
fn a_backup_shows_each_moment_that_it_is_brought_to() {
    for seed in seeds(1..=4) {
        let (storage, mut fs) = fresh(seed);
        let dice = SeededEnvironment::new(seed);
        let mut file = None;
        for round in 0..14u64 {
            for _ in 0..dice.next_u64() % 40 {
                change(&fs, &dice);
            }
            match dice.next_u64() % 5 {
                0 => fs.purge().unwrap(),
                1 => {
                    fs.close().unwrap();
                    fs = open_on(storage.clone(), false, 100 * seed + round).unwrap();
                }
                2 => fs.take_snapshot(format!("round {round}").as_bytes()).unwrap(),
                3 => {
                    let all = fs.snapshots().unwrap();
                    fs.remove_snapshots(&all.iter().map(|(id, ..)| *id).collect::<Vec<_>>()).unwrap();
                    fs.finish_removals(&mut || Ok(())).unwrap();
                }
                _ => {}
            }
            let (now, moment) = (expected(&fs), source(&fs, &storage));
            // Later changes are not in the backup.
            for _ in 0..dice.next_u64() % 20 {
                change(&fs, &dice);
            }
            let file = file.get_or_insert_with(|| filled(&moment));
            let done = next(&moment, file).unwrap().unwrap();
            assert!(!done.whole);
            verify(&moment, file);
            assert!(shown(&**file) == now, "seed {seed}, round {round}");
        }
        fs.close().unwrap();
    }
}

#[test]
fn what_did_not_change_is_not_copied() {
    let (storage, fs) = fresh(7);
    for n in 0..50u64 {
        put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &super::sample::noise(n, 100_000));
    }
    let file = filled(&source(&fs, &storage));
    let before = file.contents();
    let done = next(&source(&fs, &storage), &file).unwrap().unwrap();
    assert_eq!(done.copied_bytes, 0);
    assert!(file.contents() == before, "nothing was written");
    let one = fs.lookup(ROOT_INO, b"file7").unwrap().ino;
    fs.write(one, 5_000, &[1; 10_000]).unwrap();
    fs.rename(ROOT_INO, b"file8", ROOT_INO, b"moved", crate::fs::RenameMode::Replace).unwrap();
    let moment = source(&fs, &storage);
    let done = next(&moment, &file).unwrap().unwrap();
    assert!(!done.whole && (10_000..150_000).contains(&done.copied_bytes), "{done:?}");
    verify(&moment, &file);
    // A log of a file's clones is not copied for each of them.
    for n in 0..20 {
        let clone = put(&fs, ROOT_INO, format!("clone{n}").as_bytes(), b"");
        fs.copy_range(one, 0, clone, 0, 100_000, false).unwrap();
    }
    let fresh_copy = filled(&source(&fs, &storage));
    assert!(fresh_copy.contents().len() < 8 << 20, "{}", fresh_copy.contents().len());
    fs.close().unwrap();
}

/// On a remote storage each node read costs a round trip, so the nodes of a level are prefetched
/// together.
#[test]
fn the_nodes_of_a_backup_elsewhere_are_named_before_they_are_read() {
    let (storage, fs) = fresh(17);
    let files: Vec<_> = (0..6000u64).map(|n| put(&fs, ROOT_INO, format!("file{n}").as_bytes(), b"content")).collect();
    let file = filled(&source(&fs, &storage));
    for ino in files.iter().step_by(40) {
        fs.write(*ino, 0, b"changed").unwrap();
    }
    let moment = source(&fs, &storage);
    let measured = |far: bool| {
        let there = Arc::new(CountingStorage::new(far));
        there.write_at(0, &file.contents()).unwrap();
        moment.bring_up_to_date(&(there.clone() as Arc<dyn Storage>), &mut on).unwrap().unwrap();
        let unexpected = there.take_unexpected();
        moment.verify(&(there as Arc<dyn Storage>), 100, &mut on).unwrap();
        unexpected
    };
    let (far, near) = (measured(true), measured(false));
    assert!(near > 60, "{near} nodes are too few to show anything");
    assert!(far * 4 < near, "{far} of {near} nodes were read that nobody had named");
    fs.close().unwrap();
}

fn refused(result: Result<Option<BackupReport>>) -> &'static str {
    match result {
        Err(Error::Refused(Refusal::Destination { why })) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_that_has_what_the_archive_lacks_is_left() {
    let (storage, fs) = fresh(8);
    put(&fs, ROOT_INO, b"one", b"1");
    fs.make_durable().unwrap();
    let file = filled(&source(&fs, &storage));
    let apart = storage.contents();
    let left = |file: &Arc<MemoryStorage>, fs: &Arc<FileSystem>, storage: &Arc<MemoryStorage>, why: &str| {
        let before = file.contents();
        let said = refused(next(&source(fs, storage), file));
        assert!(said.contains(why), "{said}");
        assert!(file.contents() == before);
    };
    // Written to since the backup.
    let mine = Arc::new(MemoryStorage::from_contents(file.contents()));
    let written = open_on(mine.clone(), false, 11).unwrap();
    put(&written, ROOT_INO, b"mine", b"3");
    written.close().unwrap();
    left(&mine, &fs, &storage, "written to since");
    // The archive itself.
    left(&Arc::new(MemoryStorage::from_contents(storage.contents())), &fs, &storage, "an archive of its own");
    // Newer than the archive.
    put(&fs, ROOT_INO, b"two", b"2");
    let newer = filled(&source(&fs, &storage));
    fs.close().unwrap();
    let older = Arc::new(MemoryStorage::from_contents(apart));
    let fs = open_on(older.clone(), true, 12).unwrap();
    left(&newer, &fs, &older, "newer");
    // Diverged: further than the backup, without its changes.
    let fs = open_on(older.clone(), false, 13).unwrap();
    for n in 0..20 {
        put(&fs, ROOT_INO, format!("other{n}").as_bytes(), b"4");
        fs.make_durable().unwrap();
    }
    left(&newer, &fs, &older, "diverged");
    // The version before both belongs to either history.
    next(&source(&fs, &older), &file).unwrap().unwrap();
    assert!(shown(&*file) == expected(&fs));
    fs.close().unwrap();
}

#[test]
fn more_than_one_commit_can_hold_is_copied_anew() {
    let (storage, fs) = fresh(9);
    let file = filled(&source(&fs, &storage));
    let before = shown(&*file);
    for n in 0..40_000 {
        fs.make_node(ROOT_INO, format!("{n}").as_bytes(), crate::fs::mode::REGULAR | 0o600, 0, super::sample::OWNER)
            .unwrap();
    }
    assert_eq!(next(&source(&fs, &storage), &file).unwrap(), None);
    assert!(shown(&*file) == before);
    let moment = source(&fs, &storage);
    verify(&moment, &filled(&moment));
    fs.close().unwrap();
}

/// Power fails at any time during an update, with any subset of the writes since the last barrier
/// on the medium.
#[test]
fn a_crash_leaves_the_old_or_the_new_moment() {
    let (mut old, mut new) = (0, 0);
    for seed in seeds(1..=6) {
        let (storage, fs) = fresh(seed);
        let dice = Arc::new(SeededEnvironment::new(seed));
        (0..60).for_each(|_| change(&fs, &dice));
        let file = filled(&source(&fs, &storage));
        let mut before = expected(&fs);
        let mut bytes = file.contents();
        for _ in 0..3 {
            (0..20).for_each(|_| change(&fs, &dice));
            let (now, moment) = (expected(&fs), source(&fs, &storage));
            let simulated = SimulatedStorage::from_contents(&bytes);
            simulated.record(1 << 20);
            let brought = moment.bring_up_to_date(&(simulated.clone() as Arc<dyn Storage>), &mut on).unwrap();
            assert!(brought.is_some());
            let trace = simulated.recorded().unwrap();
            let mut replay = trace.replay();
            while replay.advance() {
                if !dice.next_u64().is_multiple_of(4) && !replay.at_barrier() {
                    continue;
                }
                let lost = replay.process_death().crash_random(&mut || dice.next_u64());
                let seen = shown(&*lost);
                if seen == now {
                    new += 1;
                } else {
                    assert!(seen == before, "seed {seed}: something between two moments");
                    old += 1;
                }
            }
            bytes = simulated.contents();
            assert!(shown(&*simulated) == now);
            before = now;
        }
        fs.close().unwrap();
    }
    assert!(old > 100 && new > 20, "old={old} new={new}");
}

/// The generation of the archive determines the slot of the backup's next record. That slot may
/// hold the newest record, which is needed until the next one is durable.
#[test]
fn the_record_of_the_old_moment_is_not_the_one_that_is_written_over() {
    let (storage, fs) = fresh(31);
    let file = filled(&source(&fs, &storage));
    let last = open_on(file.clone(), true, 32).unwrap().volume.durable().generation;
    let mut n = 0;
    while fs.volume.durable().generation.next().slot() != last.slot() {
        n += 1;
        put(&fs, ROOT_INO, format!("file{n}").as_bytes(), b"1");
        fs.make_durable().unwrap();
    }
    let moment = source(&fs, &storage);
    assert_eq!(moment.generation().next().slot(), last.slot());
    let simulated = SimulatedStorage::from_contents(&file.contents());
    let written = Arc::new(Mutex::new(Vec::new()));
    let noted = written.clone();
    simulated.on_op(Box::new(move |op| {
        if let OpKind::Write { offset, .. } = op {
            noted.lock().push(offset / BLOCK);
        }
    }));
    moment.bring_up_to_date(&(simulated.clone() as Arc<dyn Storage>), &mut on).unwrap().unwrap();
    let first = written.lock().iter().copied().find(|block| (0..RING_SLOTS).any(|slot| slot_block(slot) == *block));
    assert_eq!(first, Some(slot_block(moment.generation().next().next().slot())));
    assert!(shown(&*simulated) == expected(&fs));
    fs.close().unwrap();
}

/// Two alternating backups, one of which replaces the archive: its nodes have generations that the
/// other backup knows from a different history.
#[test]
fn a_backup_that_took_the_archives_place_is_backed_up_right() {
    for seed in seeds(41..=44) {
        let (mut storage, mut fs) = fresh(seed);
        let dice = SeededEnvironment::new(seed);
        for n in 0..200 {
            put(&fs, ROOT_INO, format!("{n:04}{}", "x".repeat(200)).as_bytes(), b"1");
        }
        let (one, other) = (filled(&source(&fs, &storage)), filled(&source(&fs, &storage)));
        for round in 0..12u64 {
            for _ in 0..1 + dice.next_u64() % 4 {
                // Entries are added and removed between two versions, at random positions of a
                // large directory.
                let name = format!("{:04}between", dice.next_u64() % 200).into_bytes();
                match fs.lookup(ROOT_INO, &name) {
                    Ok(_) => fs.unlink(ROOT_INO, &name).unwrap(),
                    Err(_) => drop(put(&fs, ROOT_INO, &name, &super::sample::noise(round, 9_000))),
                }
                fs.make_durable().unwrap();
            }
            let turn = if dice.next_u64().is_multiple_of(2) { &one } else { &other };
            let moment = source(&fs, &storage);
            next(&moment, turn).unwrap().unwrap();
            verify(&moment, turn);
            if round % 4 == 3 {
                // The archive is lost, and the newer backup continues it. The other one is from
                // before.
                fs.close().unwrap();
                storage = Arc::new(MemoryStorage::from_contents(turn.contents()));
                // As a backup it can be copied too.
                let read = open_on(storage.clone(), true, 100 * seed + round).unwrap();
                let moment = source(&read, &storage);
                let behind = if Arc::ptr_eq(turn, &one) { &other } else { &one };
                next(&moment, behind).unwrap().unwrap();
                verify(&moment, behind);
                fs = open_on(storage.clone(), false, 200 * seed + round).unwrap();
            }
        }
        fs.close().unwrap();
    }
}

/// BACKUP-1: no page of the pinned version is reused, despite overwriting, erasing and repacking
/// before and during the copy.
#[test]
fn nothing_that_a_backup_copies_is_used_again_before_it_ends() {
    let (storage, fs) = fresh(61);
    let name = |n: u64| format!("file{n}").into_bytes();
    for n in 0..30 {
        put(&fs, ROOT_INO, &name(n), &super::sample::noise(n, if n % 2 == 0 { 60_000 } else { 900 }));
    }
    let (now, moment) = (expected(&fs), source(&fs, &storage));
    let used = fs.usage().used_bytes.unwrap();
    let churn = |round: u64, is_read: bool| {
        for n in 0..30 {
            let ino = fs.lookup(ROOT_INO, &name(n)).unwrap().ino;
            fs.write(ino, 0, &super::sample::noise(100 * round + n, 900)).unwrap();
            fs.truncate(ino, 700, &mut |_| {}).unwrap();
        }
        fs.make_durable().unwrap();
        while fs.maintain().unwrap() {}
        let purged = fs.purge();
        assert_eq!(matches!(purged, Err(Error::InUse(_))), is_read, "{purged:?}");
    };
    churn(1, true);
    churn(2, true);
    let file = Arc::new(MemoryStorage::new());
    let mut steps = 0;
    let done = moment.fill(&(file.clone() as Arc<dyn Storage>), &mut |_| {
        steps += 1;
        if steps < 4 {
            churn(2 + steps, true);
        }
        Ok(())
    });
    assert!(done.unwrap().whole && steps > 1, "{steps} steps");
    assert!(shown(&*file) == now);
    // A completed backup pins nothing.
    let pinned = fs.usage().used_bytes.unwrap();
    drop(moment);
    churn(9, false);
    fs.purge().unwrap();
    let left = fs.usage().used_bytes.unwrap();
    assert!(left < used && left <= pinned, "{used} before, {pinned} with the backup, {left} after it");
    fs.close().unwrap();
}

/// Archive on the host, its key, and the destination of its backup.
pub(super) struct OnHost {
    directory: tempfile::TempDir,
    pub(super) key: keys::UnlockedKey,
    pub(super) seen: RollbackOptions,
}

impl OnHost {
    pub(super) fn new() -> OnHost {
        let directory = tempfile::tempdir().unwrap();
        let creator = crate::fs::Creator { uid: 0, gid: 0, umask: None };
        let passphrase = super::passphrase("p");
        let path = directory.path().join("a.lbx");
        Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
        let key = keys::unlock(&path, &passphrase).unwrap();
        let seen = RollbackOptions { directory: Some(directory.path().join("seen")), ..RollbackOptions::default() };
        OnHost { directory, key, seen }
    }

    pub(super) fn path(&self, name: &str) -> std::path::PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn open(&self, name: &str, read_only: bool) -> Archive {
        let options = OpenOptions { read_only, ..OpenOptions::default() };
        Archive::open_seen(&self.path(name), &self.key, &options, &self.seen).unwrap()
    }

    /// Runs a backup like the command and checks that it equals the archive; returns its content.
    pub(super) fn back_up(&self) -> Expected {
        let backed = Archive::open_for_backup(&self.path("a.lbx"), &self.key, &self.seen).unwrap();
        let moment = backed.backups().pin().unwrap();
        let destination = BackupDestination::open(&self.path("backup.lbx"), true).unwrap();
        let updated = match destination.existing() {
            Some(file) => moment.bring_up_to_date(&(file.clone() as Arc<dyn Storage>), &mut on).unwrap().is_some(),
            None => false,
        };
        if updated {
            drop(destination);
        } else {
            let beside = destination.create_new().unwrap();
            let file: Arc<dyn Storage> = beside.file();
            moment.fill(&file, &mut on).unwrap();
            moment.verify(&file, 100, &mut on).unwrap();
            drop(file);
            destination.take(beside).unwrap();
        }
        drop((moment, backed));
        expected(self.open("backup.lbx", true).file_system())
    }
}

/// Data that a killed writer synced is only in the log, and belongs to the version.
#[test]
fn what_only_the_log_of_a_killed_writer_has_is_backed_up() {
    let host = OnHost::new();
    let archive = host.open("a.lbx", false);
    let fs = archive.file_system();
    let old = put(fs, ROOT_INO, b"old", &super::sample::noise(1, 200_000));
    fs.make_durable().unwrap();
    let entries = fs.usage().log.entries;
    fs.write(old, 70_000, b"synced").unwrap();
    put(fs, ROOT_INO, b"new", b"synced too");
    fs.sync().unwrap();
    assert!(fs.usage().log.entries > entries);
    let now = expected(fs);
    // The current state on the host is the state after a kill.
    std::fs::copy(host.path("a.lbx"), host.path("killed.lbx")).unwrap();
    archive.close().unwrap();
    std::fs::rename(host.path("killed.lbx"), host.path("a.lbx")).unwrap();
    let host = OnHost { seen: RollbackOptions { accept_older: true, ..host.seen.clone() }, ..host };
    assert!(host.back_up() == now);
}

/// A compacted archive has other pages with other births: the unchanged data is nevertheless
/// recognized.
#[test]
fn a_backup_goes_on_over_compactions_of_its_archive() {
    let host = OnHost::new();
    let dice = SeededEnvironment::new(71);
    for round in 0..6u64 {
        let archive = host.open("a.lbx", false);
        let fs = archive.file_system();
        for _ in 0..30 {
            change(fs, &dice);
        }
        if round % 2 == 1 {
            archive.snapshot_manager().create(format!("round {round}").as_bytes()).unwrap();
        }
        let now = expected(fs);
        archive.close().unwrap();
        assert!(host.back_up() == now, "round {round}");
        if round % 2 == 0 {
            let options = CompactOptions { seen: host.seen.clone(), ..CompactOptions::default() };
            Archive::compact(&host.path("a.lbx"), &host.key, &options, &mut |_| Ok(())).unwrap();
            if round == 2 {
                // Nothing changed since.
                assert!(host.back_up() == now, "round {round}, compacted");
            }
        }
    }
}

/// A reader gets a notice, not an alarm. A writer gets an alarm in any case: the backup is an older
/// copy for it.
#[test]
fn a_backup_in_the_archives_place_alarms_whoever_writes() {
    let directory = tempfile::tempdir().unwrap();
    let (path, copy) = (directory.path().join("a.lbx"), directory.path().join("b.lbx"));
    let creator = crate::fs::Creator { uid: 0, gid: 0, umask: None };
    let passphrase = super::passphrase("p");
    Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
    let key = keys::unlock(&path, &passphrase).unwrap();
    let seen = RollbackOptions { directory: Some(directory.path().join("seen")), ..RollbackOptions::default() };
    let backed = Archive::open_for_backup(&path, &key, &seen).unwrap();
    let destination = BackupDestination::open(&copy, true).unwrap();
    let beside = destination.create_new().unwrap();
    let file: Arc<dyn Storage> = beside.file();
    let moment = backed.backups().pin().unwrap();
    moment.fill(&file, &mut on).unwrap();
    moment.verify(&file, 100, &mut on).unwrap();
    drop((moment, file));
    destination.take(beside).unwrap();
    drop(backed);
    let write = |path: &std::path::Path, seen: &RollbackOptions| {
        let archive = Archive::open_seen(path, &key, &OpenOptions::default(), seen)?;
        put(archive.file_system(), ROOT_INO, format!("{}", archive.info()?.generation.0).as_bytes(), b"1");
        archive.close()
    };
    write(&path, &seen).unwrap();
    std::fs::copy(&copy, &path).unwrap();
    let read = Archive::open_seen(&path, &key, &OpenOptions { read_only: true, ..OpenOptions::default() }, &seen);
    assert!(read.unwrap().info().unwrap().notices()[0].starts_with("this is a backup"));
    let alarmed = |result: Result<()>| assert!(matches!(result, Err(Error::OlderCopy(_))), "{result:?}");
    alarmed(write(&path, &seen));
    let compaction = CompactOptions { seen: seen.clone(), ..CompactOptions::default() };
    alarmed(Archive::compact(&path, &key, &compaction, &mut |_| Ok(())).map(drop));
    alarmed(keys::repair_header(&path, &key, &seen).map(drop));
    // Nothing of this was remembered.
    alarmed(write(&path, &seen));
    write(&path, &RollbackOptions { accept_older: true, ..seen.clone() }).unwrap();
    write(&path, &seen).unwrap();
}

/// Interrupted before the records change: the header is that of the archive by then, without a
/// record that refers to it.
#[test]
fn an_interruption_with_new_keys_leaves_a_backup_that_is_read() {
    let (storage, fs) = fresh(51);
    let file = filled(&source(&fs, &storage));
    fs.close().unwrap();
    let header = Header::read(&*storage).unwrap();
    header.replace_slots(&*storage, &[(3, (9, [7; 4096]))], &super::key()).unwrap();
    let fs = open_on(storage.clone(), false, 52).unwrap();
    for n in 0..40u64 {
        put(&fs, ROOT_INO, format!("{n}").as_bytes(), &super::sample::noise(n, 90_000));
    }
    let (moment, bytes) = (source(&fs, &storage), file.contents());
    for last in 0..60 {
        let file = Arc::new(MemoryStorage::from_contents(bytes.clone()));
        let mut left = last;
        let stopped = moment.bring_up_to_date(&(file.clone() as Arc<dyn Storage>), &mut |_| match left {
            0 => Err(Error::Interrupted(2)),
            _ => {
                left -= 1;
                Ok(())
            }
        });
        let sequence = Header::read(&*file).unwrap().framing().sequence;
        let read = open_on(file, true, 53).unwrap();
        assert!(read.volume.durable().header_sequence <= sequence, "after {last} steps: {stopped:?}");
    }
    fs.close().unwrap();
}

/// A failing or full host, and an interrupt, leave the backup unchanged.
#[test]
fn a_failure_leaves_the_old_moment() {
    let (storage, fs) = fresh(21);
    let dice = SeededEnvironment::new(21);
    (0..60).for_each(|_| change(&fs, &dice));
    let file = filled(&source(&fs, &storage));
    let before = expected(&fs);
    (0..30).for_each(|_| change(&fs, &dice));
    let moment = source(&fs, &storage);
    let bytes = file.contents();
    let mut steps = 0;
    moment
        .bring_up_to_date(&(Arc::new(MemoryStorage::from_contents(bytes.clone())) as Arc<dyn Storage>), &mut |_| {
            steps += 1;
            Ok(())
        })
        .unwrap();
    assert!(steps > 10);
    for last in 0..steps {
        let file: Arc<dyn Storage> = Arc::new(MemoryStorage::from_contents(bytes.clone()));
        let mut left = last;
        let stopped = moment.bring_up_to_date(&file, &mut |_| match left {
            0 => Err(Error::Interrupted(2)),
            _ => {
                left -= 1;
                Ok(())
            }
        });
        assert!(matches!(stopped, Err(Error::Interrupted(_))), "{stopped:?}");
        assert!(shown(&*file) == before);
    }
    let full = Arc::new(MemoryStorage::from_contents(bytes.clone()));
    full.set_capacity(Some(full.allocated() + 8192));
    put(&fs, ROOT_INO, b"large", &super::sample::noise(5, 3 << 20));
    let moment = source(&fs, &storage);
    let result = next(&moment, &full);
    assert!(matches!(result, Err(Error::NoSpace(_))), "{result:?}");
    full.set_capacity(None);
    assert!(shown(&*full) == before);
    next(&moment, &full).unwrap().unwrap();
    assert!(shown(&*full) == expected(&fs));
    fs.close().unwrap();
}

/// A damage report about the archive would be misleading.
#[test]
fn damage_of_the_backup_is_not_said_of_the_archive() {
    let (storage, fs) = fresh(12);
    for n in 0..4u64 {
        put(&fs, ROOT_INO, format!("file{n}").as_bytes(), &super::sample::noise(n, 30_000));
    }
    let moment = source(&fs, &storage);
    let whole = filled(&moment).contents();
    put(&fs, ROOT_INO, b"later", b"what came then");
    let later = source(&fs, &storage);
    let (mut unsound, mut unequal) = (0, 0);
    for block in 0..whole.len() as u64 / BLOCK {
        let mut bytes = whole.clone();
        bytes[(block * BLOCK + 1000) as usize] ^= 4;
        let flipped = || Arc::new(MemoryStorage::from_contents(bytes.clone()));
        match next(&later, &flipped()) {
            Ok(_) => {}
            Err(Error::Refused(Refusal::DamagedBackup { .. })) => unsound += 1,
            Err(error) => panic!("block {block}: {error:?}"),
        }
        match moment.verify(&(flipped() as Arc<dyn Storage>), 100, &mut on) {
            Ok(_) => {}
            Err(Error::Refused(Refusal::DamagedBackup { .. })) => unequal += 1,
            Err(error) => panic!("block {block}: {error:?}"),
        }
    }
    assert!(unsound > 0 && unequal > unsound, "{unsound} {unequal}");
    drop((moment, later));
    fs.close().unwrap();
}

/// Data that the archive has lost cannot be backed up, and the backup is unchanged.
#[test]
fn damage_of_the_archive_is_said_of_it() {
    let (storage, fs) = fresh(13);
    put(&fs, ROOT_INO, b"one", &super::sample::noise(1, 30_000));
    let moment = source(&fs, &storage);
    let file = filled(&moment);
    let before = storage.contents();
    put(&fs, ROOT_INO, b"two", &super::sample::noise(2, 30_000));
    fs.sync().unwrap();
    let later = source(&fs, &storage);
    // Data added since, which is not cached.
    let after = storage.contents();
    let old = |block: usize| before.get(block..block + BLOCK as usize);
    for block in (0..after.len()).step_by(BLOCK as usize) {
        let new = &after[block..block + BLOCK as usize];
        if block as u64 >= 16 * BLOCK && old(block) != Some(new) {
            storage.write_at(block as u64 + 2000, &[!new[2000]]).unwrap();
        }
    }
    let backup = file.contents();
    let error = next(&later, &file).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)), "{error:?}");
    assert!(file.contents() == backup);
}

/// The backup gets the header of the archive, each time.
#[test]
fn keys_that_were_changed_are_changed_in_the_backup() {
    let (storage, fs) = fresh(22);
    let file = filled(&source(&fs, &storage));
    fs.close().unwrap();
    let header = Header::read(&*storage).unwrap();
    header.replace_slots(&*storage, &[(3, (9, [7; 4096]))], &super::key()).unwrap();
    let fs = open_on(storage.clone(), false, 23).unwrap();
    put(&fs, ROOT_INO, b"one", b"1");
    let moment = source(&fs, &storage);
    next(&moment, &file).unwrap().unwrap();
    let there = Header::read(&*file).unwrap();
    there.authenticate(&super::key()).unwrap();
    assert_eq!((there.framing().sequence, there.framing().slots[3]), (2, 9));
    verify(&moment, &file);
    fs.close().unwrap();
}

/// On a full disk keys are changed without the commit that records it, which is left to the next
/// writer: the backup already contains that version, and has the old keys.
#[test]
fn keys_that_were_changed_without_a_commit_are_changed_in_the_backup() {
    let (storage, fs) = fresh(24);
    put(&fs, ROOT_INO, b"one", b"1");
    fs.close().unwrap();
    let fs = open_on(storage.clone(), true, 25).unwrap();
    let file = filled(&source(&fs, &storage));
    let header = Header::read(&*storage).unwrap();
    header.replace_slots(&*storage, &[(3, (9, [7; 4096]))], &super::key()).unwrap();
    let fs = open_on(storage.clone(), true, 26).unwrap();
    let moment = source(&fs, &storage);
    let done = next(&moment, &file).unwrap().unwrap();
    assert_eq!((done.whole, done.copied_bytes), (false, 0));
    let there = Header::read(&*file).unwrap();
    there.authenticate(&super::key()).unwrap();
    assert_eq!((there.framing().sequence, there.framing().slots[3]), (2, 9));
    verify(&moment, &file);
}

/// Two machines continue from one memory image, like a machine that was set back while the archive
/// was mounted: both write in one session, with the same generations.
#[test]
fn a_machine_that_was_set_back_does_not_go_on_with_a_backup_of_what_it_lost() {
    let (storage, fs) = fresh(81);
    for n in 0..200 {
        put(&fs, ROOT_INO, format!("{n:04}{}", "x".repeat(200)).as_bytes(), b"1");
    }
    fs.close().unwrap();
    let other = Arc::new(MemoryStorage::from_contents(storage.contents()));
    // The same seed gives the same session.
    let lost = open_on(storage.clone(), false, 82).unwrap();
    let fs = open_on(other.clone(), false, 82).unwrap();
    put(&lost, ROOT_INO, b"lost", &super::sample::noise(1, 9_000));
    let file = filled(&source(&lost, &storage));
    let before = filled(&source(&fs, &other));
    for n in 0..5 {
        put(&fs, ROOT_INO, format!("new{n}").as_bytes(), &super::sample::noise(n, 9_000));
        fs.make_durable().unwrap();
    }
    let moment = source(&fs, &other);
    let (one, two) = (lost.volume.durable(), fs.volume.durable());
    assert_eq!((one.session, one.session_first), (two.session, two.session_first));
    assert!(one.generation < two.generation);
    let bytes = file.contents();
    let brought = next(&moment, &file);
    assert!(matches!(brought, Ok(None) | Err(Error::Refused(Refusal::Destination { .. }))), "{brought:?}");
    assert!(file.contents() == bytes);
    // The backup of this machine's own version is continued.
    assert!(next(&moment, &before).unwrap().is_some());
    verify(&moment, &before);
    for fs in [lost, fs] {
        fs.close().unwrap();
    }
}
