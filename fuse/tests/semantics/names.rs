//! Names, paths, depth.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, symlink};

use nix::libc::{ENAMETOOLONG, ENOENT};
use rustix::fs::{AtFlags, Mode, OFlags, mkdirat, openat, statat};

use crate::support::{Mount, code, create};

/// A name has 1 to 255 bytes, any but `/` and NUL; a longer one gets ENAMETOOLONG. Case and Unicode forms are
/// distinguished, and no name is reserved except .snapshots in the root.
#[test]
fn names_are_bytes() {
    let mut mount = Mount::new();
    let long = "n".repeat(255);
    let names: Vec<&[u8]> = vec![
        long.as_bytes(),
        b"a",
        b"A",
        "\u{e9}".as_bytes(),
        "e\u{301}".as_bytes(),
        b"\xff\xfe",
        b"\n",
        b"lost+found",
        b"...",
    ];
    for (number, name) in names.iter().enumerate() {
        fs::write(mount.root().join(OsStr::from_bytes(name)), number.to_string()).unwrap();
    }
    assert_eq!(code(fs::write(mount.path(&"n".repeat(256)), "")), ENAMETOOLONG);
    mount.remount();
    for (number, name) in names.iter().enumerate() {
        assert_eq!(fs::read_to_string(mount.root().join(OsStr::from_bytes(name))).unwrap(), number.to_string());
    }
    assert_eq!(fs::read_dir(mount.root()).unwrap().count(), names.len());
}

/// A path that is given to a system call has up to 4095 bytes, the limit of the system, and a symbolic link as many.
#[test]
fn paths_and_links_up_to_the_limit_of_the_system() {
    let mut mount = Mount::new();
    // Components that do not exist are not what is tested, so the path is filled with slashes.
    let path = |length: usize| {
        let head = mount.root().to_str().unwrap().to_owned();
        format!("{head}{}file", "/".repeat(length - head.len() - 4))
    };
    fs::write(path(4095), "x").unwrap();
    assert_eq!(fs::read_to_string(path(4095)).unwrap(), "x");
    assert_eq!(code(fs::read(path(4096))), ENAMETOOLONG);
    let target = format!("{}file", "./".repeat(2045));
    symlink(format!("{target}{}", "x"), mount.path("dangling")).unwrap();
    symlink(&target, mount.path("link")).unwrap();
    let longest = "t".repeat(4095);
    symlink(&longest, mount.path("longest")).unwrap();
    mount.remount();
    assert_eq!(fs::read_to_string(mount.path("link")).unwrap(), "x");
    assert_eq!(code(fs::read(mount.path("dangling"))), ENOENT);
    assert_eq!(fs::read_link(mount.path("longest")).unwrap().as_os_str(), longest.as_str());
    assert_eq!(fs::symlink_metadata(mount.path("longest")).unwrap().size(), 4095);
}

/// Trees can be deeper than any path is long; programs that walk relative to directories get everywhere.
#[test]
fn trees_can_be_deep() {
    const DEPTH: usize = 1500;
    let mut mount = Mount::new();
    let flags = OFlags::DIRECTORY | OFlags::RDONLY;
    let mut at = openat(rustix::fs::CWD, mount.root(), flags, Mode::empty()).unwrap();
    for _ in 0..DEPTH {
        mkdirat(&at, "directory", Mode::RWXU).unwrap();
        at = openat(&at, "directory", flags, Mode::empty()).unwrap();
    }
    drop(at);
    mount.remount();
    let mut at = openat(rustix::fs::CWD, mount.root(), flags, Mode::empty()).unwrap();
    let mut inos = Vec::new();
    for _ in 0..DEPTH {
        inos.push(statat(&at, ".", AtFlags::empty()).unwrap().st_ino);
        at = openat(&at, "directory", flags, Mode::empty()).unwrap();
    }
    // And back up by `..`, which the kernel has in memory only as long as it likes.
    while let Some(expected) = inos.pop() {
        at = openat(&at, "..", flags, Mode::empty()).unwrap();
        assert_eq!(statat(&at, ".", AtFlags::empty()).unwrap().st_ino, expected);
    }
    drop(at);
    let removed = std::process::Command::new("rm").arg("-r").arg(mount.path("directory")).status().unwrap();
    assert!(removed.success());
    assert_eq!(fs::read_dir(mount.root()).unwrap().count(), 0);
    mount.check();
}

/// Inode numbers have up to 48 bits and are never used again, not even after another mount or a crash: an equal number
/// always means the same file. They stay the same from mount to mount, except for those in .snapshots.
#[test]
fn inode_numbers_are_never_reused() {
    let mut mount = Mount::new();
    let mut used = std::collections::BTreeSet::new();
    let kept = create(mount.path("kept")).metadata().unwrap().ino();
    for round in 0..4 {
        for number in 0..50 {
            let name = mount.path(&format!("{number}"));
            assert!(used.insert(File::create(&name).unwrap().metadata().unwrap().ino()));
            fs::remove_file(name).unwrap();
        }
        if round % 2 == 0 {
            mount.remount()
        } else {
            mount.crash()
        }
        assert_eq!(fs::metadata(mount.path("kept")).unwrap().ino(), kept);
    }
    assert!(used.last().unwrap() >> 48 == 0 && !used.contains(&kept));
}
