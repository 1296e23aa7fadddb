//! Times, owners and modes, extended attributes.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use nix::libc::{E2BIG, EEXIST, ENODATA, EPERM, ERANGE};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use rustix::fs::{
    AtFlags, CWD, Timespec, Timestamps, XattrFlags, getxattr, listxattr, removexattr, setxattr, utimensat,
};

use crate::support::{Mount, code, create};

/// Times have nanoseconds and 64-bit seconds: those before 1970 and beyond 2038 or 2446 are kept exactly.
#[test]
fn times_are_kept_exactly() {
    let mut mount = Mount::new();
    let times = [
        (0, 0),
        (1, 999_999_999),
        (-1, 1),
        (-2, 200_000_000),
        (-2_208_988_800, 5),
        (2_147_483_648, 7),
        (16_725_225_600, 123_456_789),
    ];
    for (number, (seconds, nanos)) in times.into_iter().enumerate() {
        let path = mount.path(&number.to_string());
        create(&path);
        let time = Timespec { tv_sec: seconds, tv_nsec: nanos };
        utimensat(CWD, &path, &Timestamps { last_access: time, last_modification: time }, AtFlags::empty()).unwrap();
    }
    for _ in 0..2 {
        for (number, (seconds, nanos)) in times.into_iter().enumerate() {
            let metadata = fs::metadata(mount.path(&number.to_string())).unwrap();
            assert_eq!((metadata.mtime(), metadata.mtime_nsec()), (seconds, nanos));
            assert_eq!((metadata.atime(), metadata.atime_nsec()), (seconds, nanos));
        }
        mount.remount();
    }
}

/// Writing a file changes its times of modification and change, also through a memory map and in every process; changing
/// its attributes or its names changes the time of change, and changes in a directory change both of that.
#[test]
fn times_follow_the_changes() {
    let mut mount = Mount::new();
    fs::create_dir(mount.path("directory")).unwrap();
    let file = create(mount.path("directory/file"));
    let past = Timespec { tv_sec: 1000, tv_nsec: 0 };
    let stamps = Timestamps { last_access: past, last_modification: past };
    let set = |name: &str| utimensat(CWD, mount.path(name), &stamps, AtFlags::empty()).unwrap();
    let look = |name: &str| fs::metadata(mount.path(name)).unwrap();
    set("directory/file");
    std::os::unix::fs::FileExt::write_all_at(&file, b"x", 0).unwrap();
    assert!(look("directory/file").mtime() > 1000);
    set("directory/file");
    let before = look("directory/file");
    let ctime = |m: &fs::Metadata| (m.ctime(), m.ctime_nsec());
    // The kernel's clock for this goes in steps of some milliseconds.
    let later = |change: &dyn Fn(), than: &fs::Metadata| {
        (0..1_000_000).any(|_| {
            change();
            ctime(&look("directory/file")) > ctime(than)
        })
    };
    let change_mode = || {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        fs::set_permissions(mount.path("directory/file"), mode).unwrap();
    };
    assert!(later(&change_mode, &before));
    let after = look("directory/file");
    assert_eq!(after.mtime(), 1000);
    set("directory");
    let link = || {
        let _ = fs::remove_file(mount.path("directory/link"));
        fs::hard_link(mount.path("directory/file"), mount.path("directory/link")).unwrap();
    };
    assert!(later(&link, &after));
    assert!(look("directory").mtime() > 1000);
    let linked = look("directory/file");
    drop(file);
    let kept = (linked.mtime(), linked.ctime(), linked.ctime_nsec());
    mount.remount();
    let now = fs::metadata(mount.path("directory/file")).unwrap();
    assert_eq!((now.mtime(), now.ctime(), now.ctime_nsec()), kept);
}

/// All types of files, owners and groups of 32 bits, and all twelve bits of the mode are kept. Devices work only with the
/// mount option `dev`, and set-id bits have effect only with `suid`.
#[test]
fn types_owners_and_modes_are_kept() {
    let mut mount = Mount::new();
    let devices = [("null", SFlag::S_IFCHR, makedev(1, 3)), ("disk", SFlag::S_IFBLK, makedev(4095, 0xF_FFFF))];
    for (name, kind, device) in devices {
        mknod(&mount.path(name), kind, Mode::from_bits_truncate(0o640), device).unwrap();
    }
    for (name, kind) in [("fifo", SFlag::S_IFIFO), ("socket", SFlag::S_IFSOCK)] {
        mknod(&mount.path(name), kind, Mode::from_bits_truncate(0o600), 0).unwrap();
    }
    symlink("target", mount.path("link")).unwrap();
    std::os::unix::fs::lchown(mount.path("link"), Some(7), Some(8)).unwrap();
    std::os::unix::fs::chown(mount.path("fifo"), Some(4_000_000_000), Some(3_999_999_999)).unwrap();
    fs::set_permissions(mount.path("socket"), std::os::unix::fs::PermissionsExt::from_mode(0o7531)).unwrap();
    for _ in 0..2 {
        let look = |name: &str| fs::symlink_metadata(mount.path(name)).unwrap();
        assert_eq!((look("null").mode(), look("null").rdev()), (0o020_640, makedev(1, 3)));
        assert_eq!((look("disk").mode(), look("disk").rdev()), (0o060_640, makedev(4095, 0xF_FFFF)));
        assert_eq!((look("fifo").uid(), look("fifo").gid()), (4_000_000_000, 3_999_999_999));
        assert_eq!(look("socket").mode(), 0o147_531);
        assert_eq!((look("link").uid(), look("link").gid()), (7, 8));
        assert!(fs::write(mount.path("null"), "x").is_err());
        mount.remount();
    }
    mount.remount_with("dev");
    fs::write(mount.path("null"), "x").unwrap();
}

/// Extended attributes of the namespaces user, trusted and security are kept on files and directories, and on symbolic
/// links except those of user (EPERM). A value has up to 65,536 bytes (E2BIG) and a name up to 255 (ERANGE); their number is
/// limited only by the 65,536 bytes that listxattr(2) can return.
#[test]
fn extended_attributes() {
    let mut mount = Mount::new();
    create(mount.path("file"));
    symlink("file", mount.path("link")).unwrap();
    let path = mount.path("file");
    let none = XattrFlags::empty();
    for name in ["user.a", "trusted.b", "security.c"] {
        setxattr(&path, name, &[7; 65_536], none).unwrap();
    }
    assert_eq!(code(setxattr(&path, "user.big", &[7; 65_537], none)), E2BIG);
    assert_eq!(code(setxattr(&path, format!("user.{}", "n".repeat(251)), b"", none)), ERANGE);
    setxattr(&path, format!("user.{}", "n".repeat(250)), b"", none).unwrap();
    assert_eq!(code(setxattr(&path, "user.a", b"", XattrFlags::CREATE)), EEXIST);
    assert_eq!(code(setxattr(&path, "user.z", b"", XattrFlags::REPLACE)), ENODATA);
    assert_eq!(code(rustix::fs::lsetxattr(mount.path("link"), "user.a", b"", none)), EPERM);
    rustix::fs::lsetxattr(mount.path("link"), "trusted.a", b"link", none).unwrap();
    for number in 0..500 {
        setxattr(mount.root(), format!("user.{number}"), &[1; 100], none).unwrap();
    }
    removexattr(&path, "trusted.b").unwrap();
    for _ in 0..2 {
        let mut value = vec![0; 65_537];
        assert_eq!(getxattr(&path, "user.a", &mut value[..]).unwrap(), 65_536);
        assert_eq!(code(getxattr(&path, "trusted.b", &mut value[..])), ENODATA);
        let length = listxattr(&path, &mut value[..]).unwrap();
        let mut names: Vec<_> = value[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
        names.sort();
        assert_eq!((names.len(), names[0], names[1]), (3, &b"security.c"[..], &b"user.a"[..]));
        assert_eq!(
            listxattr(mount.root(), &mut value[..]).unwrap(),
            (0..500).map(|n| format!("user.{n}").len() + 1).sum::<usize>()
        );
        mount.remount();
    }
    mount.check();
}
