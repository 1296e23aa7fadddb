//! Listing and linking of directories.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use nix::libc::ENOENT;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, RawDir, RenameFlags, SeekFrom, Timespec, Timestamps, Uid, XattrFlags, fchmod,
    fchown, fgetxattr, fsetxattr, futimens, mkdirat, renameat_with, seek, statat,
};

use crate::support::{Mount, awaited, code, create, python};

/// A name, the cookie behind it, and its type.
type Entry = (String, u64, FileType);

/// What one getdents64(2) with a buffer of this size tells.
fn some(directory: &File, size: usize) -> Vec<Entry> {
    let mut buffer = vec![MaybeUninit::uninit(); size];
    let mut listing = RawDir::new(directory, &mut buffer);
    let mut found = Vec::new();
    while let Some(entry) = listing.next() {
        let entry = entry.unwrap();
        let name = entry.file_name().to_str().unwrap().to_owned();
        found.push((name, entry.next_entry_cookie(), entry.file_type()));
        if listing.is_buffer_empty() {
            break;
        }
    }
    found
}

/// The rest of a listing, without `.` and `..`.
fn rest(directory: &File) -> Vec<Entry> {
    let mut all = Vec::new();
    loop {
        let found = some(directory, 4096);
        if found.is_empty() {
            return all;
        }
        all.extend(found.into_iter().filter(|(name, ..)| name != "." && name != ".."));
    }
}

fn names(entries: &[Entry]) -> Vec<&str> {
    entries.iter().map(|(name, ..)| name.as_str()).collect()
}

/// A directory lists ., .. and then its entries in the order in which they were made, each with its type. Renaming
/// within a directory, and replacing the file of a name, do not move an entry.
#[test]
fn listings_are_in_the_order_of_creation() {
    let mut mount = Mount::new();
    for name in ["zebra", "ape", "mouse", "cow"] {
        create(mount.path(name));
    }
    fs::create_dir(mount.path("directory")).unwrap();
    std::os::unix::fs::symlink("zebra", mount.path("link")).unwrap();
    fs::rename(mount.path("ape"), mount.path("monkey")).unwrap();
    fs::rename(mount.path("cow"), mount.path("mouse")).unwrap();
    for _ in 0..2 {
        let directory = File::open(mount.root()).unwrap();
        let first = some(&directory, 4096);
        assert_eq!(names(&first), [".", "..", "zebra", "monkey", "mouse", "directory", "link"]);
        let types: Vec<_> = first[2..].iter().map(|(.., kind)| *kind).collect();
        use FileType::{Directory, RegularFile, Symlink};
        assert_eq!(types, [RegularFile, RegularFile, RegularFile, Directory, Symlink]);
        drop(directory);
        mount.remount();
    }
}

/// The cookie of an entry (telldir(3)) never changes and is never used again in its directory: seekdir(3) continues
/// after the entry of the cookie, regardless of later changes of the directory, also after another opendir(3) and
/// another mount.
#[test]
fn cookies_are_stable() {
    let mut mount = Mount::new();
    let path = mount.path("directory");
    fs::create_dir(&path).unwrap();
    for number in 0..300 {
        create(path.join(format!("{number:03}")));
    }
    let before = rest(&File::open(&path).unwrap());
    for number in (0..300).step_by(3) {
        fs::remove_file(path.join(format!("{number:03}"))).unwrap();
        create(path.join(format!("new{number:03}")));
    }
    for _ in 0..2 {
        let directory = File::open(&path).unwrap();
        for (number, (_, cookie, _)) in before.iter().enumerate().step_by(37) {
            seek(&directory, SeekFrom::Start(*cookie)).unwrap();
            let after = rest(&directory);
            let expected: Vec<_> = (number + 1..300).filter(|n| n % 3 != 0).map(|n| format!("{n:03}")).collect();
            assert_eq!(names(&after)[..expected.len()], expected);
            assert_eq!(after.len(), expected.len() + 100);
        }
        let used: BTreeSet<_> = before.iter().map(|(_, cookie, _)| *cookie).collect();
        seek(&directory, SeekFrom::Start(0)).unwrap();
        for (name, cookie, _) in rest(&directory) {
            assert_eq!(used.contains(&cookie), !name.starts_with("new"), "{name}");
        }
        drop(directory);
        mount.remount();
    }
}

/// A listing shows each entry that exists all the time exactly once, regardless of concurrent changes, and it ends:
/// entries that are created after opendir(3) are not in it before rewinddir(3), which restarts the listing.
#[test]
fn listing_while_entries_come_and_go() {
    let mount = Mount::new();
    let path = mount.path("directory");
    fs::create_dir(&path).unwrap();
    for number in 0..600 {
        create(path.join(format!("{number:03}")));
    }
    let directory = File::open(&path).unwrap();
    let (mut seen, mut later) = (BTreeMap::new(), 0);
    loop {
        let found = some(&directory, 1024);
        if found.is_empty() {
            break;
        }
        for (name, ..) in found.iter().filter(|(name, ..)| name != "." && name != "..") {
            *seen.entry(name.clone()).or_insert(0) += 1;
            create(path.join(format!("later{later}")));
            later += 1;
            match name.parse::<u32>() {
                Ok(number) if number % 3 == 0 => fs::remove_file(path.join(name)).unwrap(),
                Ok(number) if number % 3 == 1 => {
                    fs::rename(path.join(name), path.join(format!("renamed{name}"))).unwrap()
                }
                _ => {}
            }
        }
        assert!(later < 5000, "the listing does not end");
    }
    assert!(seen.values().all(|times| *times == 1));
    assert!(seen.keys().all(|name| !name.starts_with("later")), "{seen:?}");
    for number in (2..600).step_by(3) {
        assert!(seen.contains_key(&format!("{number:03}")));
    }
    seek(&directory, SeekFrom::Start(0)).unwrap();
    let now = rest(&directory);
    assert_eq!(now.len(), 400 + later);
    assert_eq!(now.iter().filter(|(name, ..)| name.starts_with("later")).count(), later);
}

/// Directories may be large: with 100,000 names each can be found, and the listing is complete. A file can have that many
/// names, too: the limit is 2^32 - 2 for the links of a file as for the subdirectories of a directory; one more gets
/// EMLINK.
#[test]
fn a_hundred_thousand_names() {
    const NAMES: u32 = 100_000;
    let mut mount = Mount::new();
    let path = mount.path("directory");
    fs::create_dir(&path).unwrap();
    create(mount.path("file"));
    let directory = File::open(&path).unwrap();
    let root = File::open(mount.root()).unwrap();
    for number in 0..NAMES {
        rustix::fs::linkat(&root, "file", &directory, format!("{number}"), rustix::fs::AtFlags::empty()).unwrap();
    }
    drop((directory, root));
    mount.remount();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().nlink(), u64::from(NAMES) + 1);
    let listed = rest(&File::open(&path).unwrap());
    assert_eq!(listed.len(), NAMES as usize);
    assert!(listed.iter().enumerate().all(|(number, (name, ..))| *name == number.to_string()));
    let ino = fs::metadata(mount.path("file")).unwrap().ino();
    for number in (0..NAMES).step_by(977) {
        assert_eq!(fs::metadata(path.join(number.to_string())).unwrap().ino(), ino);
    }
}

/// st_nlink of a directory is 2 and one more for each subdirectory, and `..` is the directory that it is in, after every
/// mkdir(2), rmdir(2) and rename(2), also when two directories are exchanged.
#[test]
fn link_counts_and_parents_follow_every_change() {
    let mut mount = Mount::new();
    for name in ["a", "b", "a/x", "a/y", "b/z", "a/x/deep"] {
        fs::create_dir(mount.path(name)).unwrap();
    }
    create(mount.path("b/file"));
    let ino = |mount: &Mount, name: &str| fs::metadata(mount.path(name)).unwrap().ino();
    let look = |mount: &mut Mount, counts: &[(&str, u64)], parents: &[(&str, &str)]| {
        for round in 0..3 {
            for (name, links) in counts {
                assert_eq!(fs::metadata(mount.path(name)).unwrap().nlink(), *links, "{name}");
            }
            for (child, parent) in parents {
                assert_eq!(ino(mount, &format!("{child}/..")), ino(mount, parent), "{child}");
            }
            if round == 0 { mount.drop_caches() } else { mount.remount() }
        }
    };
    look(&mut mount, &[("", 4), ("a", 4), ("b", 3), ("a/x", 3)], &[("a/x", "a"), ("b/z", "b"), ("a", "")]);
    fs::rename(mount.path("a/x"), mount.path("b/x")).unwrap();
    look(&mut mount, &[("a", 3), ("b", 4), ("b/x", 3)], &[("b/x", "b"), ("b/x/deep", "b/x")]);
    let here = File::open(mount.root()).unwrap();
    renameat_with(&here, "a/y", &here, "b/x", RenameFlags::EXCHANGE).unwrap();
    look_exchange(&mount);
    renameat_with(&here, "a/y", &here, "b/file", RenameFlags::EXCHANGE).unwrap();
    drop(here);
    look(&mut mount, &[("a", 2), ("b", 5), ("b/file", 3)], &[("b/file", "b"), ("b/file/deep", "b/file"), ("b/x", "b")]);
    fs::remove_dir(mount.path("b/file/deep")).unwrap();
    fs::rename(mount.path("b/file"), mount.path("b/z")).unwrap();
    look(&mut mount, &[("", 4), ("a", 2), ("b", 4), ("b/z", 2)], &[("b/z", "b")]);
    mount.check();
}

fn look_exchange(mount: &Mount) {
    let ino = |name: &str| fs::metadata(mount.path(name)).unwrap().ino();
    assert_eq!((ino("a/y/.."), ino("b/x/..")), (ino("a"), ino("b")));
    let links = |name: &str| fs::metadata(mount.path(name)).unwrap().nlink();
    assert_eq!((links("a"), links("b"), links("a/y"), links("b/x")), (3, 4, 3, 2));
}

/// Works in a directory, and once told to says what it sees of it.
const INSIDE: &str = "import os, sys
os.chdir(sys.argv[1])
print('inside', flush=True)
sys.stdin.readline()
print(os.stat('.').st_nlink, os.listdir('.'), os.path.samefile('..', sys.argv[2]))
print(os.readlink('/proc/self/cwd').endswith('directory (deleted)'))
os.chdir('.')
os.chmod('.', 0o750)
for make in (lambda: open('new', 'w'), lambda: os.mkdir('new'), lambda: os.link(sys.argv[3], 'new')):
    try:
        make()
    except FileNotFoundError:
        print('ENOENT')
";

/// A directory that was removed, or replaced by a rename, still exists for processes that work in
/// it, have it open, or hold a descriptor of it (O_PATH): it has 0 links, lists nothing, nothing
/// can be made in it (ENOENT), and its attributes can be read and changed. With the last of them,
/// or after a crash, it is gone.
#[test]
fn removed_directories_live_as_long_as_they_are_used() {
    let mut mount = Mount::new();
    create(mount.path("file"));
    let inodes = |mount: &Mount| {
        let s = rustix::fs::statvfs(mount.root()).unwrap();
        s.f_files - s.f_ffree
    };
    let before = inodes(&mount);
    for replaced in [false, true] {
        let path = mount.path("directory");
        fs::create_dir(&path).unwrap();
        let (directory, by_path) = (File::open(&path).unwrap(), rustix::fs::open(&path, OFlags::PATH, Mode::empty()));
        let by_path = by_path.unwrap();
        let mut child = python(INSIDE, &[&path, &mount.root(), &mount.path("file")]);
        let mut said = BufReader::new(child.stdout.take().unwrap());
        let mut inside = String::new();
        said.read_line(&mut inside).unwrap();
        if replaced {
            fs::create_dir(mount.path("other")).unwrap();
            fs::rename(mount.path("other"), &path).unwrap();
            fs::remove_dir(&path).unwrap();
        } else {
            fs::remove_dir(&path).unwrap();
        }
        mount.drop_caches();
        child.stdin.take().unwrap().write_all(b"now\n").unwrap();
        inside.clear();
        said.read_to_string(&mut inside).unwrap();
        assert_eq!(inside, "0 [] True\nTrue\nENOENT\nENOENT\nENOENT\n");
        assert!(child.wait().unwrap().success());
        let listed =
            |directory: &dyn AsRawFd| fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd())).unwrap().count();
        assert_eq!((listed(&directory), listed(&by_path)), (0, 0));
        assert_eq!(code(mkdirat(&directory, "new", Mode::RWXU)), ENOENT);
        assert_eq!(code(statat(&directory, "file", AtFlags::empty())), ENOENT);
        let is = directory.metadata().unwrap();
        assert_eq!((is.nlink(), is.mode()), (0, 0o040_750));
        fchmod(&directory, Mode::from_raw_mode(0o1700)).unwrap();
        fchown(&directory, Some(Uid::from_raw(3)), Some(Gid::from_raw(4))).unwrap();
        let time = Timespec { tv_sec: 5, tv_nsec: 6 };
        futimens(&directory, &Timestamps { last_access: time, last_modification: time }).unwrap();
        fsetxattr(&directory, "user.a", b"value", XattrFlags::empty()).unwrap();
        directory.sync_all().unwrap();
        mount.drop_caches();
        let again = File::open(format!("/proc/self/fd/{}", by_path.as_raw_fd())).unwrap();
        let is = again.metadata().unwrap();
        assert_eq!((is.nlink(), is.mode(), is.uid(), is.gid(), is.mtime()), (0, 0o041_700, 3, 4, 5));
        assert_eq!(fgetxattr(&again, "user.a", &mut [0; 9][..]).unwrap(), 5);
        if replaced {
            mount.kill();
        }
        drop((directory, by_path, again));
        if replaced {
            mount.mount();
        }
        // The daemon hears of the last close a moment later, and after a crash it has to look.
        assert!(awaited(|| inodes(&mount) == before), "{} inodes of {before}", inodes(&mount));
    }
    mount.check();
}
