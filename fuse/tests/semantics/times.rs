//! Who gives files their times, and that they stay.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc::{O_DIRECT, O_SYNC};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, RenameFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, XattrFlags,
    copy_file_range, fallocate, removexattr, renameat_with, setxattr, utimensat,
};

use crate::support::{Map, Mount, StopGuard, create, noise};

/// mtime and ctime.
type Times = ((i64, i64), (i64, i64));

fn times(path: &Path) -> Times {
    let m = fs::symlink_metadata(path).unwrap();
    ((m.mtime(), m.mtime_nsec()), (m.ctime(), m.ctime_nsec()))
}

fn set_times(path: &Path, access: i64, modification: i64) {
    let at = |nanos| Timespec { tv_sec: 1000, tv_nsec: nanos };
    let both = Timestamps { last_access: at(access), last_modification: at(modification) };
    utimensat(CWD, path, &both, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// What gives a time, and how that is seen.
type Stamp<'a> = (&'a str, &'a dyn Fn(), &'a dyn Fn() -> (i64, i64));

/// What changes a file, named by its path; it is closed when the call returns.
type Change = (&'static str, fn(&Path));

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn allocate(path: &Path, flags: FallocateFlags, offset: u64) {
    fallocate(open(path), flags, offset, 5000).unwrap();
}

fn beside(path: &Path, suffix: &str) -> std::path::PathBuf {
    path.with_extension(suffix)
}

/// Everything that gives a regular file a time.
const CHANGES: [Change; 28] = [
    ("write", |path| open(path).write_all_at(&noise(1, 5000), 0).unwrap()),
    ("append", |path| OpenOptions::new().append(true).open(path).unwrap().write_all(b"more").unwrap()),
    ("write of two", |path| {
        let (one, other) = (open(path), open(path));
        one.write_all_at(b"one", 0).unwrap();
        drop(one);
        other.write_all_at(b"other", 1000).unwrap();
    }),
    ("write, fsync, write", |path| {
        let file = open(path);
        file.write_all_at(b"one", 0).unwrap();
        file.sync_all().unwrap();
        file.write_all_at(b"other", 1000).unwrap();
    }),
    ("O_DIRECT", |path| {
        crate::support::open_with(path, O_DIRECT).unwrap().write_all_at(&noise(2, 4096), 0).unwrap();
    }),
    ("O_SYNC", |path| crate::support::open_with(path, O_SYNC).unwrap().write_all_at(b"durable", 10).unwrap()),
    ("map", |path| {
        let file = open(path);
        file.set_len(9000).unwrap();
        Map::new(&file, 9000).set(8000, 7);
    }),
    ("O_TRUNC", |path| drop(File::create(path).unwrap())),
    ("O_TRUNC and write", |path| fs::write(path, noise(3, 200_000)).unwrap()),
    ("truncate to the same", |path| {
        let size = fs::metadata(path).unwrap().len();
        nix::unistd::truncate(path, size as i64).unwrap();
    }),
    ("truncate to more", |path| nix::unistd::truncate(path, 70_000).unwrap()),
    ("ftruncate to less", |path| open(path).set_len(100).unwrap()),
    ("write and ftruncate", |path| {
        let file = open(path);
        file.write_all_at(&noise(4, 9000), 0).unwrap();
        file.set_len(8000).unwrap();
    }),
    ("fallocate", |path| allocate(path, FallocateFlags::empty(), 200)),
    ("fallocate that keeps the size", |path| allocate(path, FallocateFlags::KEEP_SIZE, 1 << 20)),
    ("punch", |path| allocate(path, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0)),
    ("zero", |path| allocate(path, FallocateFlags::ZERO_RANGE, 100)),
    ("copy_file_range", |path| {
        let source = beside(path, "source");
        fs::write(&source, noise(5, 300_000)).unwrap();
        copy_file_range(open(&source), None, open(path), None, 300_000).unwrap();
    }),
    ("chmod", |path| fs::set_permissions(path, fs::Permissions::from_mode(0o751)).unwrap()),
    ("chown", |path| chown(path, Some(3), Some(4)).unwrap()),
    ("chown of nobody", |path| chown(path, None, None).unwrap()),
    ("utimensat", |path| set_times(path, 5, 6)),
    ("utimensat of now", |path| {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        utimensat(CWD, path, &Timestamps { last_access: now, last_modification: now }, AtFlags::empty()).unwrap();
    }),
    ("utimensat of the access", |path| {
        let (now, keep) = (Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }, Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT });
        utimensat(CWD, path, &Timestamps { last_access: now, last_modification: keep }, AtFlags::empty()).unwrap();
    }),
    ("attributes", |path| {
        setxattr(path, "user.a", b"value", XattrFlags::empty()).unwrap();
        setxattr(path, "user.b", b"value", XattrFlags::empty()).unwrap();
        removexattr(path, "user.a").unwrap();
    }),
    ("link and unlink", |path| {
        fs::hard_link(path, beside(path, "link")).unwrap();
        fs::remove_file(beside(path, "link")).unwrap();
    }),
    ("rename", |path| {
        fs::rename(path, beside(path, "moved")).unwrap();
        fs::rename(beside(path, "moved"), path).unwrap();
    }),
    ("exchange", |path| {
        let other = beside(path, "other");
        create(&other);
        renameat_with(CWD, path, CWD, &other, RenameFlags::EXCHANGE).unwrap();
        renameat_with(CWD, path, CWD, &other, RenameFlags::EXCHANGE).unwrap();
    }),
];

/// What every file below a directory says of itself, by its path.
fn look(directory: &Path) -> BTreeMap<String, (Times, (i64, i64), u64, u32)> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut all: BTreeMap<_, _> = files
        .map(|path| {
            let m = fs::symlink_metadata(&path).unwrap();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, (times(&path), (m.atime(), m.atime_nsec()), m.size(), m.mode()))
        })
        .collect();
    let m = fs::metadata(directory).unwrap();
    all.insert(".".into(), (times(directory), (m.atime(), m.atime_nsec()), m.size(), m.mode()));
    all
}

/// Times are final when the last descriptor is closed, regardless of the change that set them: every later mount shows
/// the same, to the nanosecond. So a program that compares times with recorded ones detects the changed files.
#[test]
fn times_stay_as_they_are_told_after_a_close() {
    let mut mount = Mount::new();
    let directory = mount.path("directory");
    fs::create_dir(&directory).unwrap();
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _ended = StopGuard(&ended);
        // Others write meanwhile, and the kernel stores what it holds of all files at any moment.
        scope.spawn(|| {
            let root = File::open(mount.root()).unwrap();
            let mut number = 0;
            while !ended.load(Ordering::Relaxed) {
                fs::write(mount.path("other"), noise(number, 50_000)).unwrap();
                rustix::fs::syncfs(&root).unwrap();
                number += 1;
            }
        });
        for (first, change) in CHANGES {
            for (second, next) in CHANGES {
                let path = directory.join(format!("{first}, then {second}"));
                fs::write(&path, noise(0, 6000)).unwrap();
                change(&path);
                next(&path);
            }
        }
    });
    symlink("target", directory.join("link")).unwrap();
    let told = look(&directory);
    mount.remount();
    let kept = look(&directory);
    let differ: Vec<_> = told.iter().filter(|(name, is)| kept.get(*name) != Some(is)).map(|(name, _)| name).collect();
    assert!(
        differ.is_empty(),
        "{} of {}: {differ:?}, the first {:?} and then {:?}",
        differ.len(),
        told.len(),
        told[differ[0]],
        kept.get(differ[0])
    );
}

/// Times are in the order of the changes: a later change of any kind, of a file or directory, sets the same time or a
/// later one. So make(1) detects outdated files.
#[test]
fn times_are_in_the_order_of_the_changes() {
    let mount = Mount::new();
    fs::create_dir(mount.path("directory")).unwrap();
    create(mount.path("file"));
    create(mount.path("linked"));
    let file = |name: &str| mount.path(name);
    // What stamps, and where its time is seen: of the modification or of the change.
    let stamps: [Stamp<'_>; 8] = [
        ("create", &|| drop(File::create(file("made")).unwrap()), &|| times(&file("made")).0),
        ("write", &|| fs::write(file("file"), "x").unwrap(), &|| times(&file("file")).0),
        (
            "mkdir",
            &|| {
                let _ = fs::remove_dir(file("directory/new"));
                fs::create_dir(file("directory/new")).unwrap();
            },
            &|| times(&file("directory")).0,
        ),
        (
            "link",
            &|| {
                let _ = fs::remove_file(file("link"));
                fs::hard_link(file("linked"), file("link")).unwrap();
            },
            &|| times(&file("linked")).1,
        ),
        (
            "utimensat of a directory",
            &|| {
                let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
                let both = Timestamps { last_access: now, last_modification: now };
                utimensat(CWD, file("directory"), &both, AtFlags::empty()).unwrap();
            },
            &|| times(&file("directory")).0,
        ),
        (
            "attributes of a directory",
            &|| setxattr(file("directory"), "user.a", b"x", XattrFlags::empty()).unwrap(),
            &|| times(&file("directory")).1,
        ),
        ("chmod", &|| fs::set_permissions(file("linked"), fs::Permissions::from_mode(0o600)).unwrap(), &|| {
            times(&file("linked")).1
        }),
        (
            "symlink",
            &|| {
                let _ = fs::remove_file(file("symlink"));
                symlink("target", file("symlink")).unwrap();
            },
            &|| times(&file("symlink")).0,
        ),
    ];
    // A file that was looked at is given the precise time since Linux 6.13, and what changes after it no earlier one.
    let elsewhere = create(mount.outside("elsewhere"));
    let look_and_write = || {
        elsewhere.metadata().unwrap();
        elsewhere.write_all_at(b"x", 0).unwrap();
    };
    for round in 0..10 {
        for (first, before, seen) in &stamps {
            for (second, after, seen_after) in &stamps {
                let _ = fs::remove_file(file("made"));
                look_and_write();
                before();
                let earlier = seen();
                after();
                let later = seen_after();
                assert!(earlier <= later, "round {round}: {first} at {earlier:?}, and then {second} at {later:?}");
            }
        }
    }
}
