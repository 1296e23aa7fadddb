//! Compaction: the same content in less space, the old file unchanged until the rename, and one of
//! the two at every step.

use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::super::{Archive, CompactOptions, CompactStep, CreateOptions, OpenOptions};
use super::passphrase;
use super::sample::{Expected, expected, expected_in, noise, put};
use crate::crypto::kdf::KdfCost;
use crate::error::{Error, Refusal, Result};
use crate::format::header::HEADER_BYTES;
use crate::format::values::{Extent, InodeValue, NO_TRIM};
use crate::format::{BLOCK, Generation, HEADER_START, Ino, Key, ROOT_INO, kind};
use crate::fs::{Compression, Creator, FileSystem};
use crate::keys::{self, RollbackOptions, Secrets, UnlockLimits, UnlockedKey};
use crate::storage::{FileStorage, LockMode, MemoryStorage, Storage};

struct Place {
    directory: tempfile::TempDir,
    key: UnlockedKey,
    content: Expected,
    /// Content of the archive's snapshot.
    kept: Expected,
    generation: Generation,
}

impl Place {
    /// Creates an archive with holes: half of the added files are deleted.
    fn new() -> Place {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.lbx");
        let creator = Creator { uid: 1000, gid: 1000, umask: None };
        Archive::create(&path, &passphrase("p"), &CreateOptions { kdf: KdfCost::TEST, creator }).unwrap();
        let key = keys::unlock(&path, &passphrase("p")).unwrap();
        let archive = Archive::open(&path, &key, &OpenOptions::default()).unwrap();
        let fs = archive.file_system();
        for n in 0..40u64 {
            put(fs, ROOT_INO, format!("large{n}").as_bytes(), &noise(n, 100_000));
            put(fs, ROOT_INO, format!("small{n}").as_bytes(), &noise(n, 700));
        }
        fs.sync().unwrap();
        for n in (0..40).filter(|n| n % 2 == 0) {
            fs.unlink(ROOT_INO, format!("large{n}").as_bytes()).unwrap();
            fs.unlink(ROOT_INO, format!("small{n}").as_bytes()).unwrap();
        }
        archive.snapshot_manager().create(b"kept").unwrap();
        let kept = expected(fs);
        let cut = fs.lookup(ROOT_INO, b"large1").unwrap().ino;
        fs.write(cut, 30_000, &noise(3, 5000)).unwrap();
        let content = expected(fs);
        archive.close().unwrap();
        let archive = Archive::open(&path, &key, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
        let generation = archive.info().unwrap().generation;
        Place { directory, key, content, kept, generation }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("a.lbx")
    }

    fn compact(&self, options: CompactOptions, step: &mut dyn FnMut(CompactStep) -> Result<()>) -> Result<()> {
        Archive::compact(&self.path(), &self.key, &options, step).map(drop)
    }

    /// Opens for writing like after a crash, compares and checks.
    fn assert_whole(&self, path: &Path) -> Generation {
        let archive = Archive::open(path, &self.key, &OpenOptions::default()).unwrap();
        let fs = archive.file_system();
        assert!(expected(fs) == self.content);
        assert!(expected_in(&fs.snapshot_view(fs.snapshot_named(b"kept").unwrap())) == self.kept);
        let report = archive.check(true, &mut |_| {}).unwrap();
        assert!(report.findings.is_empty(), "{:?}", report.findings);
        let generation = archive.info().unwrap().generation;
        archive.close().unwrap();
        generation
    }

    fn names(&self) -> usize {
        fs::read_dir(self.directory.path()).unwrap().count()
    }
}

#[test]
fn a_compacted_archive_is_smaller_and_goes_on_from_the_old_one() {
    let place = Place::new();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o640)).unwrap();
    let report = Archive::compact(&place.path(), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(report.length_after < report.length_before, "{report:?}");
    assert_eq!(place.names(), 1);
    assert_eq!(place.path().metadata().unwrap().permissions().mode() & 0o777, 0o640);
    // The passphrase still opens it.
    assert!(keys::unlock(&place.path(), &passphrase("p")).is_ok());
    assert!(place.assert_whole(&place.path()) > place.generation);
}

/// Each level is applied to all pages, those of the snapshot and those that files share included.
#[test]
fn compaction_compresses_all_data_again_when_a_level_is_chosen() {
    let mut place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let text = include_bytes!("compaction.rs");
    put(archive.file_system(), ROOT_INO, b"text", &text.repeat(40));
    for n in 0..40 {
        put(archive.file_system(), ROOT_INO, format!("text{n}").as_bytes(), &text[n..n + 9000]);
    }
    place.content = expected(archive.file_system());
    archive.close().unwrap();
    let lengths = [Compression::Off, Compression::Fast, Compression::Default, Compression::Best].map(|level| {
        place
            .compact(CompactOptions { compression: Some(level), ..CompactOptions::default() }, &mut |_| Ok(()))
            .unwrap();
        place.assert_whole(&place.path());
        place.path().metadata().unwrap().len()
    });
    assert!(lengths.is_sorted_by(|more, less| more > less), "{lengths:?}");
    // Without a level, the larger chunks stay.
    place.compact(CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(place.path().metadata().unwrap().len() <= lengths[3]);
}

/// Storage other than a file: in memory, with a log and an orphan of an unfinished session.
#[test]
fn an_archive_that_is_no_file_is_compacted_by_its_storage_or_shows_what_it_did() {
    let place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let orphan = put(fs, ROOT_INO, b"orphan", &noise(91, 1 << 20));
    fs.open(orphan).unwrap();
    fs.unlink(ROOT_INO, b"orphan").unwrap();
    put(fs, ROOT_INO, b"synced", b"1");
    fs.sync().unwrap();
    let content = expected(fs);
    drop(archive);
    let memory = Arc::new(MemoryStorage::from_contents(fs::read(place.path()).unwrap()));
    let storage: Arc<dyn Storage> = memory.clone();
    let whole = || {
        let archive = Archive::open(&storage, &place.key, &OpenOptions::default()).unwrap();
        assert!(expected(archive.file_system()) == content);
        assert!(archive.check(true, &mut |_| {}).unwrap().findings.is_empty());
        archive.close().unwrap();
    };
    let compact = |options: &CompactOptions, step: &mut dyn FnMut(CompactStep) -> Result<()>| {
        Archive::compact(&storage, &place.key, options, step)
    };
    let before = memory.contents();
    compact(&CompactOptions { dry_run: true, ..CompactOptions::default() }, &mut |_| panic!("a step")).unwrap();
    assert!(memory.contents() == before);
    let mut all = 0;
    let mut stop = |at: usize| {
        let mut steps = 0;
        let stopped = compact(&CompactOptions::default(), &mut |step| {
            steps += 1;
            (steps < at || step == CompactStep::Replaced).then_some(()).ok_or(Error::Interrupted(2))
        });
        all = steps;
        stopped
    };
    // The unfinished session is recovered, and nothing else is done.
    assert!(matches!(stop(1), Err(Error::Interrupted(2))));
    let settled = memory.contents();
    for at in [2, 3, 20, 60] {
        assert!(matches!(stop(at), Err(Error::Interrupted(2))), "{at}");
        assert!(memory.contents() == settled, "{at}");
    }
    let report = stop(usize::MAX).unwrap();
    assert!(all > 60 && report.length_after < report.length_before, "{all} {report:?}");
    assert_eq!(report.length_after, storage.len().unwrap());
    whole();
    assert!(keys::unlock_with(&storage, &Secrets::from(passphrase("p")), &UnlockLimits::default()).is_ok());
    // A storage that cannot be replaced reports that, and is unchanged.
    let file: Arc<dyn Storage> = Arc::new(FileStorage::open(&place.path(), LockMode::Exclusive).unwrap());
    let refused = Archive::compact(&file, &place.key, &CompactOptions::default(), &mut |_| Ok(()));
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
}

/// Synced and uncommitted data is in the new file, whose log is empty like that of a new archive.
#[test]
fn what_only_the_log_of_a_killed_writer_has_is_compacted_too() {
    let mut place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    put(fs, ROOT_INO, b"first", b"1");
    fs.make_durable().unwrap();
    let before = fs.generation();
    let cut = fs.lookup(ROOT_INO, b"large1").unwrap().ino;
    fs.write(cut, 10_000, &noise(4, 5000)).unwrap();
    put(fs, ROOT_INO, b"second", b"2");
    fs.sync().unwrap();
    assert_eq!(fs.generation(), before, "no commit");
    place.content = expected(fs);
    drop(archive);
    place.compact(CompactOptions { dry_run: true, ..CompactOptions::default() }, &mut |_| Ok(())).unwrap();
    place.compact(CompactOptions::default(), &mut |_| Ok(())).unwrap();
    place.assert_whole(&place.path());
}

/// At every step the directory is copied as a killed process would leave it.
#[test]
fn a_kill_at_any_step_leaves_the_old_or_the_new_archive() {
    let place = Place::new();
    let copies = tempfile::tempdir().unwrap();
    let mut steps = Vec::new();
    let mut last = None;
    place
        .compact(CompactOptions::default(), &mut |step| {
            // One step of each kind, and every eighth during the copy.
            let kind = std::mem::discriminant(&step);
            if last != Some(kind) || steps.len() % 8 == 0 {
                let copy = copies.path().join(steps.len().to_string());
                fs::create_dir(&copy).unwrap();
                for entry in fs::read_dir(place.directory.path()).unwrap() {
                    let entry = entry.unwrap();
                    fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
                }
            }
            last = Some(kind);
            steps.push(step);
            Ok(())
        })
        .unwrap();
    assert!(steps.contains(&CompactStep::Prepared) && steps.last() == Some(&CompactStep::Replaced));
    let mut looked_at = 0;
    for entry in fs::read_dir(copies.path()).unwrap() {
        let copy = entry.unwrap().path();
        place.assert_whole(&copy.join("a.lbx"));
        // The next run removes the leftovers of this one.
        Archive::compact(&copy.join("a.lbx"), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
        assert_eq!(fs::read_dir(&copy).unwrap().count(), 1);
        looked_at += 1;
    }
    assert!(looked_at >= 7, "only {looked_at} steps");
}

/// A crash between the exchange of two names and their comparison, or a program that copies
/// archives, can leave any file under such a name.
#[test]
fn only_what_is_unfinished_or_in_the_archive_already_is_swept() {
    let place = Place::new();
    let left = place.directory.path().join(".a.lbx.compact-0123456789abcdef");
    let older = fs::read(place.path()).unwrap();
    let go_on = |path: &Path, seed| {
        let archive = Archive::open(path, &place.key, &OpenOptions::default()).unwrap();
        let ino = archive.file_system().lookup(ROOT_INO, b"large1").unwrap().ino;
        archive.file_system().write(ino, 0, &noise(seed, 5000)).unwrap();
        archive.close().unwrap();
    };
    go_on(&place.path(), 1);
    let archive = fs::read(place.path()).unwrap();
    go_on(&place.path(), 2);
    let newer = fs::read(place.path()).unwrap();
    fs::write(place.path(), &older).unwrap();
    go_on(&place.path(), 3);
    let apart = fs::read(place.path()).unwrap();
    let other = fs::read(Place::new().path()).unwrap();
    let mut damaged = newer.clone();
    damaged[..1 << 20].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(place.path(), &archive).unwrap();
    place.compact(CompactOptions::default(), &mut |_| Ok(())).unwrap();
    let finished = fs::read(place.path()).unwrap();
    go_on(&place.path(), 4);
    let worked_in = fs::read(place.path()).unwrap();
    // Two blocks of the first copy were written when the process was killed.
    let mut torn = finished.clone();
    torn[8192..HEADER_BYTES].fill(0);
    let second = (HEADER_START[1] * BLOCK) as usize;
    torn[second..second + HEADER_BYTES].fill(0);
    let mut without_magic = torn.clone();
    without_magic[0] ^= 1;
    for (what, content, swept) in [
        ("killed within its header", &torn[..], true),
        ("something else of the same shape", &without_magic[..], false),
        ("finished, and not put in the archive's place", &finished[..], true),
        ("finished, and worked in since", &worked_in[..], false),
        ("empty", &[][..], true),
        ("without its header", &vec![0; 4 << 20][..], true),
        ("older", &older[..], true),
        ("the same", &archive[..], true),
        ("newer", &newer[..], false),
        ("written apart", &apart[..], false),
        ("another archive", &other[..], false),
        ("damaged", &damaged[..], false),
        ("no archive", &b"text"[..], false),
    ] {
        fs::write(place.path(), &archive).unwrap();
        fs::write(&left, content).unwrap();
        place.compact(CompactOptions::default(), &mut |_| Ok(())).unwrap();
        assert_eq!(left.exists(), !swept, "{what}");
        assert!(swept || fs::read(&left).unwrap() == content, "{what}");
    }
}

#[test]
fn a_compaction_that_is_stopped_leaves_everything_as_it_was() {
    let place = Place::new();
    let before = fs::read(place.path()).unwrap();
    for stop in [CompactStep::Created, CompactStep::Copied, CompactStep::Verified, CompactStep::Prepared] {
        let stopped = place.compact(CompactOptions::default(), &mut |step| {
            if step == stop { Err(Error::invalid("stopped")) } else { Ok(()) }
        });
        assert!(matches!(stopped, Err(Error::Invalid(_))), "{stop:?}");
        assert_eq!(place.names(), 1, "{stop:?}");
        assert!(fs::read(place.path()).unwrap() == before, "{stop:?}");
    }
    place.compact(CompactOptions { dry_run: true, ..CompactOptions::default() }, &mut |_| panic!("a step")).unwrap();
    assert!(fs::read(place.path()).unwrap() == before);
}

#[test]
fn links_are_followed_and_further_names_refused() {
    let place = Place::new();
    let (link, name) = (place.directory.path().join("link"), place.directory.path().join("name"));
    std::os::unix::fs::symlink("a.lbx", &link).unwrap();
    Archive::compact(&link, &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(link.symlink_metadata().unwrap().is_symlink());
    fs::hard_link(place.path(), &name).unwrap();
    let refused = place.compact(CompactOptions::default(), &mut |_| Ok(()));
    assert!(matches!(&refused, Err(Error::Refused(Refusal::Links { links: 2, .. }))), "{refused:?}");
    place.compact(CompactOptions { break_links: true, ..CompactOptions::default() }, &mut |_| Ok(())).unwrap();
    place.assert_whole(&name);
    place.assert_whole(&place.path());
}

#[test]
fn an_open_archive_is_refused() {
    let place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    assert!(matches!(place.compact(CompactOptions::default(), &mut |_| Ok(())), Err(Error::InUse(_))));
    archive.close().unwrap();
    assert_eq!(place.names(), 1);
}

fn seen_in(home: &Path) -> RollbackOptions {
    RollbackOptions { directory: Some(home.to_owned()), ..RollbackOptions::default() }
}

fn look(place: &Place, path: &Path, seen: &RollbackOptions) -> Result<()> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    Archive::open_seen(path, &place.key, &options, seen).map(drop)
}

/// Also when the last session ended without closing.
#[test]
fn nobody_who_remembers_the_archive_takes_the_compacted_one_for_older_or_another() {
    for closed in [true, false] {
        println!("closed={closed}");
        let place = Place::new();
        let homes = tempfile::tempdir().unwrap();
        let [writer, reader, early] = ["writer", "reader", "early"].map(|name| seen_in(&homes.path().join(name)));
        look(&place, &place.path(), &early).unwrap();
        for n in 0..3 {
            let archive = Archive::open_seen(&place.path(), &place.key, &OpenOptions::default(), &writer).unwrap();
            let ino = archive.file_system().lookup(ROOT_INO, b"large1").unwrap().ino;
            archive.file_system().write(ino, 0, &noise(n, 5000)).unwrap();
            archive.file_system().sync().unwrap();
            archive.witness().remember();
            if closed || n < 2 {
                archive.close().unwrap();
            }
        }
        look(&place, &place.path(), &reader).unwrap();
        let older = place.directory.path().join("older.lbx");
        fs::copy(place.path(), &older).unwrap();
        place.compact(CompactOptions { seen: writer.clone(), ..CompactOptions::default() }, &mut |_| Ok(())).unwrap();
        // The compacting user has the new state at once, the others after their next opening.
        assert!(matches!(look(&place, &older, &writer), Err(Error::OlderCopy(_))));
        for user in [&writer, &reader, &early] {
            look(&place, &place.path(), user).unwrap();
            assert!(matches!(look(&place, &older, user), Err(Error::OlderCopy(_))));
            look(&place, &place.path(), user).unwrap();
        }
        // The history of sessions continues in the compacted file, for any next writer.
        let archive = Archive::open_seen(&place.path(), &place.key, &OpenOptions::default(), &reader).unwrap();
        archive.file_system().unlink(ROOT_INO, b"large1").unwrap();
        archive.close().unwrap();
        for user in [&writer, &reader, &early] {
            look(&place, &place.path(), user).unwrap();
        }
        // A copy from before is not compacted by mistake.
        let before = fs::read(&older).unwrap();
        let mut options = CompactOptions { seen: writer.clone(), ..CompactOptions::default() };
        let refused = Archive::compact(&older, &place.key, &options, &mut |_| Ok(()));
        assert!(matches!(refused, Err(Error::OlderCopy(_))), "{refused:?}");
        assert!(fs::read(&older).unwrap() == before);
        options.seen.accept_older = true;
        Archive::compact(&older, &place.key, &options, &mut |_| Ok(())).unwrap();
    }
}

#[test]
fn copies_of_a_file_stay_shared() {
    let mut place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let source = put(fs, ROOT_INO, b"source", &noise(90, 3 << 20));
    for n in 0..10 {
        let copy = put(fs, ROOT_INO, format!("copy{n}").as_bytes(), b"");
        let mut at = 0;
        while at < 3 << 20 {
            at += fs.copy_range(source, at, copy, at, (3 << 20) - at, false).unwrap();
        }
        // Truncated in the middle: extents that name parts of shared pages.
        fs.write(copy, 200_000 + n * 7, b"another").unwrap();
    }
    place.content = expected(fs);
    archive.close().unwrap();
    let report = Archive::compact(&place.path(), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(report.length_after < 12 << 20, "{report:?}");
    place.assert_whole(&place.path());
    // The counts are correct: the pages are freed with the last of the names.
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    for name in expected(archive.file_system()).keys() {
        archive.file_system().unlink(ROOT_INO, name.rsplit(|&b| b == b'/').next().unwrap()).unwrap();
    }
    place.content = Expected::new();
    archive.close().unwrap();
    place.assert_whole(&place.path());
}

/// A session that ended with a deleted but open file, and with a truncated one whose pages are not
/// freed yet.
#[test]
fn what_was_left_to_be_freed_is_left_behind() {
    let mut place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let orphan = put(fs, ROOT_INO, b"orphan", &noise(91, 4 << 20));
    fs.open(orphan).unwrap();
    let cut = put(fs, ROOT_INO, b"cut", b"");
    for n in 0..700 {
        fs.write(cut, n << 18, &noise(n, 4096)).unwrap();
    }
    fs.sync().unwrap();
    fs.unlink(ROOT_INO, b"orphan").unwrap();
    fs.set_attributes(cut, &crate::fs::SetAttributes { size: Some(5000), ..Default::default() }).unwrap();
    fs.sync().unwrap();
    place.content = expected(fs);
    let inodes = archive.info().unwrap().inodes;
    drop(archive);
    let report = Archive::compact(&place.path(), &place.key, &CompactOptions::default(), &mut |_| Ok(())).unwrap();
    assert!(report.length_after < report.length_before - (6 << 20), "{report:?}");
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let compacted = Archive::open(&place.path(), &place.key, &options).unwrap();
    assert_eq!(compacted.info().unwrap().inodes, inodes - 1);
    drop(compacted);
    place.assert_whole(&place.path());
}

/// Returns every record of the live tree.
fn records(fs: &FileSystem) -> Vec<(Key, Vec<u8>)> {
    let mut all = Vec::new();
    let state = fs.volume.state();
    let keep = &mut |key: Key, value: &[u8]| {
        all.push((key, value.to_vec()));
        Ok(ControlFlow::Continue(()))
    };
    fs.volume.view(&state).scan(Key::MIN, Key::MAX, keep).unwrap();
    all
}

/// Compared record by record: a tree with these records would be valid as well, and readers of
/// files would not see a difference.
#[test]
fn no_record_of_an_orphan_or_behind_a_cut_is_carried_over_and_inode_numbers_go_on() {
    let place = Place::new();
    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let orphan = put(fs, ROOT_INO, b"orphan", &noise(91, 1 << 20));
    fs.open(orphan).unwrap();
    let cut = put(fs, ROOT_INO, b"cut", b"");
    (0..700).for_each(|n| fs.write(cut, n << 18, &noise(n, 4096)).unwrap());
    // The greatest inode numbers belong to deleted files.
    let last = (0..50).map(|n| put(fs, ROOT_INO, format!("gone{n}").as_bytes(), b"x").0).max().unwrap();
    (0..50).for_each(|n| fs.unlink(ROOT_INO, format!("gone{n}").as_bytes()).unwrap());
    fs.sync().unwrap();
    fs.unlink(ROOT_INO, b"orphan").unwrap();
    fs.set_attributes(cut, &crate::fs::SetAttributes { size: Some(5000), ..Default::default() }).unwrap();
    // In the trees, so that the log requires no session.
    fs.make_durable().unwrap();
    let before = records(fs);
    let marked = |mark: u8, ino: Ino| before.iter().any(|(key, _)| *key == Key::new(0, mark, ino.0));
    assert!(marked(kind::ORPHAN, orphan) && marked(kind::TRIM, cut), "nothing was left to be freed");
    drop(archive);
    place.compact(CompactOptions::default(), &mut |_| Ok(())).unwrap();

    let archive = Archive::open(&place.path(), &place.key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let after = records(fs);
    assert!(after.iter().all(|(key, _)| key.object != 0 && key.object != orphan.0), "the orphan was carried over");
    let of_cut = |wanted: u8| after.iter().filter(move |(key, _)| key.object == cut.0 && key.kind == wanted);
    let extents: Vec<(u64, u32)> =
        of_cut(kind::EXTENT).map(|(key, value)| (key.sub, Extent::decode(value).unwrap().length)).collect();
    assert_eq!(extents, [(0, 4096)], "something behind the cut was carried over");
    let inode = InodeValue::decode(&of_cut(kind::INODE).next().unwrap().1).unwrap();
    assert_eq!((inode.trim, inode.size, inode.bytes), (NO_TRIM, 5000, 4096));
    let made = put(fs, ROOT_INO, b"made", b"x").0;
    assert!(made > last, "inode {made} was given before: the last one was {last}");
    archive.close().unwrap();
}

#[test]
fn the_file_keeps_owner_mode_attributes_and_list() {
    let place = Place::new();
    let path = place.path();
    // user 1234 may read: version 2; user object, user 1234, group object, mask, others.
    let entry =
        |tag: u16, perm: u16, id: u32| [&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat();
    let list = [
        2u32.to_le_bytes().to_vec(),
        entry(1, 6, u32::MAX),
        entry(2, 4, 1234),
        entry(4, 4, u32::MAX),
        entry(0x10, 4, u32::MAX),
        entry(0x20, 0, u32::MAX),
    ]
    .concat();
    let set = |name: &str, value: &[u8]| rustix::fs::setxattr(&path, name, value, rustix::fs::XattrFlags::empty());
    let get = |name: &str| {
        let mut buffer = vec![0; 200];
        let length = rustix::fs::getxattr(&path, name, &mut buffer[..]).unwrap();
        buffer.truncate(length);
        buffer
    };
    set("user.note", b"kept").unwrap();
    set("system.posix_acl_access", &list).unwrap();
    let root = fs::metadata(&path).unwrap().uid() == 0;
    if root {
        std::os::unix::fs::chown(&path, Some(4321), Some(4322)).unwrap();
    }
    let before = fs::metadata(&path).unwrap();
    place.compact(CompactOptions::default(), &mut |_| Ok(())).unwrap();
    let after = fs::metadata(&path).unwrap();
    assert_ne!(before.ino(), after.ino());
    assert_eq!((before.uid(), before.gid(), before.mode()), (after.uid(), after.gid(), after.mode()));
    assert_eq!(after.mode() & 0o777, 0o640);
    assert_eq!(get("user.note"), b"kept");
    assert_eq!(get("system.posix_acl_access"), list);
}
