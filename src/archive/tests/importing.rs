//! Imports with batched small files: failures are reported per file and leave no directory
//! unfinished; an interrupted import or copy keeps complete objects.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use super::sample::{create_on, header_bytes, noise, open_on};
use crate::error::{Error, Result};
use crate::exchange::{
    CopyDestination, DiffRoot, Entries, Filter, ImportOptions, Problem, ProblemCause, TreeDifference, compare_trees,
    copy, import, plan_mirror,
};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Creator, FileSystem, MAX_SMALL_FILE, XattrMode};
use crate::storage::simulated::{Fault, FaultClass, FaultPlan, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};

const DIRECTORIES: usize = 4;
const FILES: usize = 60;
const TIME: u64 = 1_000_000;

fn options() -> ImportOptions {
    let creator = Creator { uid: 0, gid: 0, umask: None };
    ImportOptions {
        to: b"/".to_vec(),
        name: None,
        follow: false,
        replace: false,
        creator,
        filter: Filter::default(),
        one_file_system: false,
        mirror: None,
    }
}

/// Creates directories of incompressible small files, all with one old time.
fn source(directory: &Path) -> PathBuf {
    let top = directory.join("top");
    for d in 0..DIRECTORIES {
        let below = top.join(format!("{d}"));
        std::fs::create_dir_all(&below).unwrap();
        for n in 0..FILES {
            std::fs::write(below.join(format!("{n}")), noise((d * FILES + n) as u64, 12_000)).unwrap();
        }
        File::open(&below).unwrap().set_modified(UNIX_EPOCH + Duration::from_secs(TIME)).unwrap();
    }
    File::open(&top).unwrap().set_modified(UNIX_EPOCH + Duration::from_secs(TIME)).unwrap();
    top
}

/// Returns the host paths of the archive's files, and of its directories with their times.
fn copied(fs: &FileSystem, top: &Path) -> (BTreeSet<PathBuf>, BTreeMap<PathBuf, i64>) {
    let (mut files, mut times) = (BTreeSet::new(), BTreeMap::new());
    let Ok(root) = fs.lookup(ROOT_INO, b"top") else { return (files, times) };
    times.insert(top.to_owned(), root.mtime.seconds);
    for d in 0..DIRECTORIES {
        let Ok(below) = fs.lookup(root.ino, format!("{d}").as_bytes()) else { continue };
        times.insert(top.join(format!("{d}")), below.mtime.seconds);
        for n in 0..FILES {
            let Ok(file) = fs.lookup(below.ino, format!("{n}").as_bytes()) else { continue };
            assert!(fs.read(file.ino, 0, 1 << 20).unwrap() == noise((d * FILES + n) as u64, 12_000));
            files.insert(top.join(format!("{d}/{n}")));
        }
    }
    (files, times)
}

#[test]
fn no_file_is_missing_of_which_nothing_is_told() {
    let host = tempfile::tempdir().unwrap();
    let top = source(host.path());
    let mut met = 0;
    for (count, lasting) in [(0, false), (1, false), (2, false), (0, true), (1, true), (2, true)] {
        let storage = SimulatedStorage::from_contents(&{
            let memory = Arc::new(MemoryStorage::from_contents(header_bytes()));
            let fs = create_on(memory.clone(), 1);
            fs.make_directory(ROOT_INO, b"other", 0o755, options().creator).unwrap();
            fs.close().unwrap();
            memory.contents()
        });
        let fs = open_on(storage.clone(), false, 2).unwrap();
        storage.inject(Some(FaultPlan { class: FaultClass::Allocate, count, fault: Fault::Eio, lasting }));
        let report = import(&fs, None, std::slice::from_ref(&top), &options(), &mut |_| Ok(())).unwrap();
        met += storage.injected();
        storage.inject(None);
        let (files, times) = copied(&fs, &top);
        let told: BTreeSet<&[u8]> = report.problems.iter().map(|problem| &problem.path[..]).collect();
        let is_told = |path: &Path| told.contains(path.as_os_str().as_bytes());
        assert!(told.iter().all(|path| path.starts_with(top.as_os_str().as_bytes())));
        // A permanent failure also prevents setting the directories' times, and is reported for
        // each.
        let settled = |(path, time): (&PathBuf, &i64)| *time == TIME as i64 || (lasting && is_told(path));
        assert!(times.iter().all(settled), "{times:?}");
        let mut missing = 0;
        for (d, n) in (0..DIRECTORIES).flat_map(|d| (0..FILES).map(move |n| (d, n))) {
            let path = top.join(format!("{d}/{n}"));
            // An existing directory does not imply any of its files, regardless of its reports.
            let above = path.ancestors().any(|path| !times.contains_key(path) && is_told(path));
            assert!(above || files.contains(&path), "{path:?} is missing: {count} {lasting}");
            missing += u64::from(!files.contains(&path));
        }
        assert_eq!(report.copied.files, files.len() as u64);
        println!("{count} {lasting}: {missing} missing, {} problems", told.len());
    }
    assert!(met > 6);
}

#[test]
fn an_import_that_meets_a_full_archive_finishes_its_directories() {
    let host = tempfile::tempdir().unwrap();
    let top = source(host.path());
    let storage = SimulatedStorage::from_contents(&header_bytes());
    let fs = create_on(storage.clone(), 1);
    fs.volume.allocator().limit_size(storage.len().unwrap() + (2 << 20));
    let failed = import(&fs, None, std::slice::from_ref(&top), &options(), &mut |_| Ok(()));
    assert!(matches!(failed, Err(Error::NoSpace(_))), "{failed:?}");
    let (files, times) = copied(&fs, &top);
    assert!(!files.is_empty() && files.len() < DIRECTORIES * FILES, "{} files", files.len());
    assert!(times.len() > 1 && times.values().all(|time| *time == TIME as i64), "{times:?}");
}

/// One write of all of it would reserve 9 MiB, as if it did not compress.
#[test]
fn a_file_that_fits_only_compressed_is_added_to_a_nearly_full_archive() {
    let host = tempfile::tempdir().unwrap();
    let text = host.path().join("text");
    std::fs::write(&text, b"the same words again ".repeat(400_000)).unwrap();
    let storage = SimulatedStorage::from_contents(&header_bytes());
    let fs = create_on(storage.clone(), 1);
    fs.volume.allocator().limit_size(storage.len().unwrap() + (5 << 20));
    let report = import(&fs, None, std::slice::from_ref(&text), &options(), &mut |_| Ok(())).unwrap();
    assert_eq!((report.copied.bytes, report.problems.len()), (21 * 400_000, 0));
}

/// Returns a callback that fails at call number `end`.
fn ending(end: u64) -> impl FnMut() -> Result<()> {
    let mut asked = 0;
    move || {
        asked += 1;
        if asked == end { Err(Error::Interrupted(2)) } else { Ok(()) }
    }
}

#[test]
fn an_import_that_is_ended_keeps_what_was_read_and_takes_back_what_was_on_its_way() {
    let host = tempfile::tempdir().unwrap();
    let top = source(host.path());
    let large = host.path().join("large");
    std::fs::write(&large, noise(7, 9 << 20)).unwrap();
    let sources = [top.clone(), large];
    let objects = (1 + DIRECTORIES + DIRECTORIES * FILES) as u64;
    // Before each seventh object, and within the large file, which has a call before it and after
    // each of two reads.
    for end in (1..=objects).step_by(7).chain(objects + 1..objects + 4) {
        let fs = create_on(SimulatedStorage::from_contents(&header_bytes()), 1);
        let mut go_on = ending(end);
        let mut begun = 0;
        let ended = import(&fs, None, &sources, &options(), &mut |progress| {
            go_on()?;
            begun += u64::from(progress.path.starts_with(top.as_os_str().as_bytes()));
            Ok(())
        });
        assert!(matches!(ended, Err(Error::Interrupted(2))), "{end}: {ended:?}");
        let (files, times) = copied(&fs, &top);
        assert_eq!((files.len() + times.len()) as u64, begun, "{end}: all that was begun is there");
        assert!(times.values().all(|time| *time == TIME as i64), "{end}: {times:?}");
        let expected: &[&[u8]] = if begun == 0 { &[] } else { &[b"top"] };
        assert_eq!(names(&fs, ROOT_INO), expected, "{end}");
    }
}

#[test]
fn a_copy_that_is_ended_keeps_the_paths_before_and_takes_back_the_one_on_its_way() {
    let host = tempfile::tempdir().unwrap();
    let top = source(host.path());
    let mut kept = Vec::new();
    // One call for a directory, and two for each file: before it and for its content.
    let asked = (1 + 2 * FILES) as u64;
    for end in [1, 2, asked, asked + 1, asked + 2, 2 * asked] {
        let fs = create_on(SimulatedStorage::from_contents(&header_bytes()), 1);
        import(&fs, None, std::slice::from_ref(&top), &options(), &mut |_| Ok(())).unwrap();
        let paths = [b"top/0".to_vec(), b"top/1".to_vec()];
        let to = CopyDestination::of(&fs, b"/", true).unwrap();
        let ended = copy(&fs, &paths, &to, false, &mut ending(end));
        assert!(matches!(ended, Err(Error::Interrupted(2))), "{end}: {ended:?}");
        kept.push(
            names(&fs, ROOT_INO)
                .iter()
                .map(|name| String::from_utf8_lossy(name).into_owned())
                .collect::<Vec<_>>()
                .join(" "),
        );
        if let Ok(first) = fs.lookup(ROOT_INO, b"0") {
            assert_eq!(names(&fs, first.ino).len(), FILES, "{end}: it is whole");
        }
    }
    assert_eq!(kept, ["top", "top", "top", "0 top", "0 top", "0 top"]);
}

/// Returns the names in a directory, sorted.
fn names(fs: &FileSystem, directory: Ino) -> Vec<Vec<u8>> {
    let (mut names, mut entries) = (Vec::new(), Entries::new(fs, directory).unwrap());
    while let Some(entry) = entries.next_entry() {
        names.push(entry.unwrap().name.to_vec());
    }
    names.sort();
    names
}

/// Files of /proc report 0 bytes and have content: one that is batched with other small files, one
/// that replaces, one that is larger than small.
#[test]
fn content_that_a_file_does_not_state_is_copied() {
    let fs = create_on(Arc::new(MemoryStorage::from_contents(header_bytes())), 1);
    let stored = |name: &[u8]| {
        let file = fs.lookup(ROOT_INO, name).unwrap();
        fs.read(file.ino, 0, file.size as usize + 1).unwrap()
    };
    let host = |path: &str| {
        assert_eq!(std::fs::metadata(path).unwrap().len(), 0);
        std::fs::read(path).unwrap()
    };
    for replace in [false, true] {
        let options = ImportOptions { replace, ..options() };
        let report = import(&fs, None, &["/proc/version".into()], &options, &mut |_| Ok(())).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        let content = host("/proc/version");
        assert!(!content.is_empty() && stored(b"version") == content, "{replace}");
        assert_eq!(report.copied.bytes, content.len() as u64);
    }
    let large = host("/proc/kallsyms");
    assert!(large.len() as u64 > MAX_SMALL_FILE, "{}", large.len());
    let report = import(&fs, None, &["/proc/kallsyms".into()], &options(), &mut |_| Ok(())).unwrap();
    assert!(report.problems.is_empty() && stored(b"kallsyms") == large);
    let unlike = compared(&fs, b"version", "/proc/version");
    assert!(unlike.is_empty(), "{unlike:?}");
    assert_eq!(compared(&fs, b"version", "/proc/kallsyms").len(), 1);
}

fn compared(fs: &FileSystem, path: &[u8], host: &str) -> Vec<TreeDifference> {
    let mut found = Vec::new();
    let problems =
        compare_trees(DiffRoot::Archive(fs, path), DiffRoot::Host(Path::new(host)), false, &mut |_, unlike| {
            found.push(unlike);
            ControlFlow::Continue(())
        });
    assert!(problems.unwrap().is_empty());
    found
}

/// A file of /sys reports a page and has a few bytes.
#[test]
fn less_content_than_a_file_states_is_copied_and_reported() {
    let path = "/sys/devices/system/cpu/possible";
    let content = std::fs::read(path).unwrap();
    assert!(std::fs::metadata(path).unwrap().len() > content.len() as u64);
    let fs = create_on(Arc::new(MemoryStorage::from_contents(header_bytes())), 1);
    let report = import(&fs, None, &[path.into()], &options(), &mut |_| Ok(())).unwrap();
    assert!(matches!(&report.problems[..], [Problem { cause: ProblemCause::Changed, .. }]), "{:?}", report.problems);
    let file = fs.lookup(ROOT_INO, b"possible").unwrap();
    assert_eq!(fs.read(file.ino, 0, 1 << 20).unwrap(), content);
}

/// A later file may have the inode number of a removed one, or its modification time.
#[test]
fn a_file_is_the_hard_link_of_no_other_version() {
    let host = tempfile::tempdir().unwrap();
    let (first, out) = (host.path().join("one/file"), host.path().join("out"));
    let second = host.path().join("two/file");
    let (old, new) = (noise(1, 100_000), noise(2, 100_000));
    for renames in [true, false] {
        for directory in ["one", "two"] {
            std::fs::create_dir_all(host.path().join(directory)).unwrap();
        }
        std::fs::write(&first, &old).unwrap();
        std::fs::hard_link(&first, &out).unwrap();
        let time = std::fs::metadata(&first).unwrap().modified().unwrap();
        let fs = create_on(Arc::new(MemoryStorage::from_contents(header_bytes())), 1);
        let mut changed = false;
        let report =
            import(&fs, None, &[host.path().join("one"), host.path().join("two")], &options(), &mut |progress| {
                if progress.path.ends_with(b"/two") && !changed {
                    changed = true;
                    if renames {
                        std::fs::rename(&out, &second).unwrap();
                        std::fs::remove_file(&first).unwrap();
                    } else {
                        std::fs::hard_link(&first, &second).unwrap();
                    }
                    // Until the clock of the host has advanced.
                    let ctime = |path: &Path| std::fs::metadata(path).map(|found| (found.ctime(), found.ctime_nsec()));
                    let before = ctime(&second).unwrap();
                    while ctime(&second).unwrap() == before {
                        std::fs::write(&second, &new).unwrap();
                    }
                    File::options().write(true).open(&second).unwrap().set_modified(time).unwrap();
                }
                Ok(())
            })
            .unwrap();
        assert!(changed && report.problems.is_empty());
        let content = |directory: &[u8]| {
            let file = fs.lookup(fs.lookup(ROOT_INO, directory).unwrap().ino, b"file").unwrap();
            (file.links, fs.read(file.ino, 0, 1 << 20).unwrap())
        };
        assert!(content(b"one") == (1, old.clone()) && content(b"two") == (1, new.clone()), "renames: {renames}");
        std::fs::remove_dir_all(host.path().join("one")).unwrap();
        std::fs::remove_dir_all(host.path().join("two")).unwrap();
        let _ = std::fs::remove_file(&out);
    }
}

/// As root in a service or a container, which has no CAP_SYS_ADMIN.
#[test]
fn a_mirror_that_cannot_list_trusted_attributes_keeps_them_with_changed_content() {
    let place = tempfile::tempdir().unwrap();
    let top = place.path().join("top");
    std::fs::create_dir(&top).unwrap();
    let fs = create_on(Arc::new(MemoryStorage::from_contents(header_bytes())), 1);
    let mirror = || {
        let plan = plan_mirror(&fs, std::slice::from_ref(&top), &options(), None).unwrap();
        let options = ImportOptions { mirror: Some(plan), ..options() };
        let report = import(&fs, None, std::slice::from_ref(&top), &options, &mut |_| Ok(())).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    };
    let found = |name: &[u8]| {
        let directory = fs.lookup(ROOT_INO, b"top").unwrap().ino;
        fs.lookup(directory, name).unwrap().ino
    };
    for name in ["changed", "replaced"] {
        std::fs::write(top.join(name), name).unwrap();
    }
    mirror();
    for name in [&b"changed"[..], b"replaced"] {
        fs.set_xattr(found(name), b"trusted.mark", b"y", XattrMode::Set).unwrap();
        fs.set_xattr(found(name), b"user.mark", b"y", XattrMode::Set).unwrap();
    }
    std::fs::write(top.join("changed"), "longer than before").unwrap();
    std::fs::remove_file(top.join("replaced")).unwrap();
    std::os::unix::fs::symlink("changed", top.join("replaced")).unwrap();
    // The kernel keeps capabilities for each thread.
    let without_capability = || {
        let mut sets = rustix::thread::capabilities(None).unwrap();
        sets.effective.remove(rustix::thread::CapabilitySet::SYS_ADMIN);
        rustix::thread::set_capabilities(None, sets).unwrap();
        mirror();
    };
    std::thread::scope(|scope| scope.spawn(without_capability).join().unwrap());
    assert_eq!(fs.read(found(b"changed"), 0, 100).unwrap(), b"longer than before");
    assert_eq!(fs.list_xattrs(found(b"changed")).unwrap(), b"trusted.mark\0");
    assert_eq!(fs.list_xattrs(found(b"replaced")).unwrap(), b"", "another type is another object");
}
