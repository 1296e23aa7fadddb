//! Access control lists, times of birth and of access.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::process::Command;

use nix::libc::{ENODATA, ENOSPC, EOPNOTSUPP, EPERM};
use rustix::fs::{
    AtFlags, CWD, Timespec, Timestamps, XattrFlags, getxattr, listxattr, removexattr, setxattr, utimensat,
};

use crate::support::{Mount, code, create};

fn run(program: &str, arguments: &[&str], path: &std::path::Path) -> String {
    let output = Command::new(program).args(arguments).arg(path).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// POSIX access control lists work as on ext4: the kernel checks them, chmod(1) and the mask follow each other, and a default
/// list of a directory is inherited and takes the place of the umask. Symbolic links have none.
#[test]
fn access_control_lists() {
    let mut mount = Mount::with("allow_other");
    create(mount.path("file"));
    fs::set_permissions(mount.path("file"), fs::Permissions::from_mode(0o640)).unwrap();
    run("setfacl", &["-m", "u:65534:rw"], &mount.path("file"));
    fs::create_dir(mount.path("directory")).unwrap();
    run("setfacl", &["-d", "-m", "u:65534:rwx,g::rwx,o::---"], &mount.path("directory"));
    fs::create_dir(mount.path("directory/below")).unwrap();
    create(mount.path("directory/new"));
    for _ in 0..2 {
        assert!(run("getfacl", &["-cnp"], &mount.path("file")).contains("user:65534:rw-"));
        assert_eq!(fs::metadata(mount.path("file")).unwrap().mode() & 0o777, 0o660);
        assert!(run("getfacl", &["-cnp"], &mount.path("directory/new")).contains("user:65534:rwx"));
        assert!(run("getfacl", &["-cnp"], &mount.path("directory/below")).contains("default:user:65534:rwx"));
        // Other users come in through the mount's parent only when it lets them.
        mount.remount();
    }
    fs::set_permissions(mount.path("file"), fs::Permissions::from_mode(0o600)).unwrap();
    assert!(run("getfacl", &["-cnp"], &mount.path("file")).contains("mask::---"));
    run("setfacl", &["-b"], &mount.path("file"));
    assert!(!run("getfacl", &["-cnp"], &mount.path("file")).contains("65534"));
    mount.check();
}

/// Attributes outside of the namespaces user, trusted and security are refused (EOPNOTSUPP), and so is an attribute when
/// the names of the file would take more than 65,536 bytes (ENOSPC), so that each can be listed.
#[test]
fn attributes_are_limited_to_what_can_be_listed() {
    let mount = Mount::new();
    let path = mount.path("file");
    create(&path);
    let none = XattrFlags::empty();
    assert_eq!(code(setxattr(&path, "other.z", b"", none)), EOPNOTSUPP);
    let refused = (0..400).find_map(|number| {
        let name = format!("user.{number:03}{}", "n".repeat(240));
        setxattr(&path, name, b"", none).err()
    });
    assert_eq!(refused.map(|error| error.raw_os_error()), Some(ENOSPC));
    let mut names = vec![0; 65_536];
    assert!(listxattr(&path, &mut names[..]).unwrap() > 65_000);
}

/// The creation time of a file is in its attribute `user.lockbox.btime` (seconds, a dot, nine digits), because the
/// library between the kernel and this file system does not support the request of statx(2) for it. It is not listed
/// and cannot be changed.
#[test]
fn the_time_of_birth_is_an_attribute() {
    let mut mount = Mount::new();
    let path = mount.path("file");
    // By the clock that stamps files: the precise one runs some milliseconds ahead of it.
    let seconds = |name: &str| create(mount.outside(name)).metadata().unwrap().mtime();
    let before = seconds("before");
    create(&path);
    fs::create_dir(mount.path("directory")).unwrap();
    let after = seconds("after");
    let old = Timespec { tv_sec: 5, tv_nsec: 0 };
    let stamps = Timestamps { last_access: old, last_modification: old };
    utimensat(CWD, &path, &stamps, AtFlags::empty()).unwrap();
    let mut kept = [None, None];
    for _ in 0..2 {
        for (path, kept) in [&path, &mount.path("directory")].into_iter().zip(&mut kept) {
            let mut value = [0; 64];
            let length = getxattr(path, "user.lockbox.btime", &mut value[..]).unwrap();
            let text = std::str::from_utf8(&value[..length]).unwrap().to_owned();
            let (whole, nanos) = text.split_once('.').unwrap();
            assert!((before..=after).contains(&whole.parse().unwrap()) && nanos.len() == 9, "{text}");
            assert_eq!(kept.get_or_insert(text.clone()), &text);
            assert_eq!(listxattr(path, &mut value[..]).unwrap(), 0);
            assert_eq!(code(setxattr(path, "user.lockbox.btime", b"0.000000000", XattrFlags::empty())), EPERM);
            assert_eq!(code(removexattr(path, "user.lockbox.btime")), EPERM);
        }
        mount.remount();
    }
    assert_eq!(code(getxattr(&path, "user.other", &mut [0; 8][..])), ENODATA);
}

/// Reading does not update the access time, as with `noatime` on ext4; programs can set it. With `atime=open`, opening
/// a file for reading updates it by the rule of relatime.
#[test]
fn access_times_are_noted_on_request() {
    let mut mount = Mount::new();
    fs::write(mount.path("file"), "x").unwrap();
    let old = Timespec { tv_sec: 1000, tv_nsec: 0 };
    let stamps = Timestamps { last_access: old, last_modification: Timespec { tv_sec: 2000, tv_nsec: 0 } };
    utimensat(CWD, mount.path("file"), &stamps, AtFlags::empty()).unwrap();
    fs::read(mount.path("file")).unwrap();
    mount.remount();
    assert_eq!(fs::metadata(mount.path("file")).unwrap().atime(), 1000);
    mount.remount_with("atime=open");
    fs::read(mount.path("file")).unwrap();
    mount.remount();
    assert!(fs::metadata(mount.path("file")).unwrap().atime() > 2000);
}
