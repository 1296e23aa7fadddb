//! What other file systems have and this one has not.

use std::fs;
use std::os::unix::fs::FileExt;

use nix::libc::{ENOTTY, EOPNOTSUPP, O_TMPFILE};
use rustix::fs::{IFlags, ioctl_ficlone, ioctl_setflags};

use crate::support::{Mount, code, create, open_with};

/// The kernel does not pass some calls to a FUSE daemon, and answers EOPNOTSUPP itself: the ioctl(2) FICLONE, and
/// FALLOC_FL_COLLAPSE_RANGE and FALLOC_FL_INSERT_RANGE of fallocate(2). O_TMPFILE gets EOPNOTSUPP too: the kernel does
/// pass it on, in a request that the library between it and this file system does not support. chattr(1) has no flags
/// to set (ENOTTY).
#[test]
fn what_fuse_lacks_is_refused() {
    let mount = Mount::new();
    let (from, to) = (create(mount.path("from")), create(mount.path("to")));
    from.write_all_at(&[1; 8192], 0).unwrap();
    assert_eq!(code(open_with(mount.root(), O_TMPFILE)), EOPNOTSUPP);
    assert_eq!(code(ioctl_ficlone(&to, &from)), EOPNOTSUPP);
    for flags in [rustix::fs::FallocateFlags::COLLAPSE_RANGE, rustix::fs::FallocateFlags::INSERT_RANGE] {
        assert_eq!(code(rustix::fs::fallocate(&from, flags, 0, 4096)), EOPNOTSUPP);
    }
    assert_eq!(code(ioctl_setflags(&from, IFlags::IMMUTABLE)), ENOTTY);
    assert_eq!(fs::read(mount.path("from")).unwrap(), [1; 8192]);
}

/// One process serves an archive for writing: a second mount of it is refused, so all changes pass through the kernel,
/// and names and attributes are cached for as long as they are used.
#[test]
fn a_second_mount_is_refused() {
    let mount = Mount::new();
    let second = mount.outside("second");
    fs::create_dir(&second).unwrap();
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_mount-lockbox"))
        .args(["-o", &format!("passfile={}", mount.outside("passphrase").display())])
        .args([mount.archive(), second.clone()])
        .env("XDG_RUNTIME_DIR", mount.outside("run"))
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(13));
    assert!(String::from_utf8_lossy(&output.stderr).contains(mount.root().to_str().unwrap()));
    assert_eq!(fs::read_dir(second).unwrap().count(), 0);
}
