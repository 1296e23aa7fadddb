//! Takes away a mount that was found in the kernel's table, and no other, wherever its path leads meanwhile.
//!
//! Whoever may write to a directory on the way of a path decides where the path leads at each moment, so a path names a mount only in the
//! table. What a descriptor names cannot change, and while it is open the kernel gives the mount's number to no other. So the order is:
//! open, read the number of what is open, look that number up in the table, compare, and then unmount what is open.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use nix::libc::{O_DIRECTORY, O_NOFOLLOW, O_PATH};
use nix::mount::{MntFlags, umount2};

use crate::mounts::{self, Mounted};

/// A mount that stays the one that was found.
pub(crate) struct Held {
    root: File,
    /// The directory in which it lies, and its name there.
    parent: File,
    name: OsString,
}

impl Held {
    /// None when what lies at the path of `mounted` is not that mount, or no more. The daemon is not asked.
    pub(crate) fn of(mounted: &Mounted) -> io::Result<Option<Held>> {
        let (Some(above), Some(name)) = (mounted.point.parent(), mounted.point.file_name()) else { return Ok(None) };
        let parent = open(above.into(), O_DIRECTORY)?;
        let root = open(below(&parent).join(name), O_NOFOLLOW)?;
        let id = number(&root)?;
        let same = |now: &Mounted| (now.id, &now.device, now.user) == (id, &mounted.device, mounted.user);
        let is_it = id == mounted.id && mounts::all().iter().any(|now| now.is_archive() && same(now));
        Ok(is_it.then(|| Held { root, parent, name: name.to_owned() }))
    }

    /// Whether nobody serves it. The attributes may still be cached, a new handle cannot be.
    pub(crate) fn is_dead(&self) -> bool {
        // ENOTCONN: nobody serves it; ECONNABORTED: not since the question.
        fs::read_dir(below(&self.root))
            .is_err_and(|e| matches!(e.kind(), ErrorKind::NotConnected | ErrorKind::ConnectionAborted))
    }

    /// Takes it away, also when it is busy. The link of the descriptor leads to the mount itself, over whatever lies on it.
    pub(crate) fn detach(&self) -> nix::Result<()> {
        umount2(&link(&self.root), MntFlags::MNT_DETACH)
    }

    /// Takes it away unless it is busy, which it would be by our own descriptor of it. So that goes before, and the mount is named by its
    /// entry in the directory that is open: no link is followed, a mount point cannot be renamed, and only its user and root unmount it.
    pub(crate) fn unmount(self) -> nix::Result<()> {
        drop(self.root);
        umount2(&below(&self.parent).join(self.name), MntFlags::UMOUNT_NOFOLLOW)
    }
}

/// Without asking the file system, and so without waiting for it.
fn open(path: PathBuf, flags: i32) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(O_PATH | flags).open(path)
}

fn link(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// A path that leads on from what is open.
fn below(directory: &File) -> PathBuf {
    link(directory).join("")
}

/// The kernel's number of the mount to which a link leads.
pub(crate) fn mount_of(link: &Path) -> Option<u64> {
    number(&open(link.into(), 0).ok()?).ok()
}

/// The kernel's number of the mount in which an open file is.
fn number(file: &File) -> io::Result<u64> {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", file.as_raw_fd()))?;
    let number = told.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    number.ok_or_else(|| ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounted(line: &str) -> Mounted {
        mounts::parse(line.as_bytes()).unwrap()
    }

    #[test]
    fn what_is_not_the_mount_of_the_table_is_not_held() {
        let scratch = tempfile::tempdir().unwrap();
        let point = scratch.path().join("point");
        std::os::unix::fs::symlink("/proc", &point).unwrap();
        let proc = mounts::all().into_iter().rfind(|mounted| mounted.point == std::path::Path::new("/proc")).unwrap();
        let claimed = |id: u64, at: &str| {
            mounted(&format!("{id} 1 {} / {at} rw - fuse.lockbox /a.lbx rw,user_id=7", proc.device))
        };
        let at = point.to_str().unwrap();
        assert!(Held::of(&claimed(proc.id, at)).unwrap().is_none(), "a link");
        assert!(Held::of(&claimed(proc.id, "/proc")).unwrap().is_none(), "no archive in the table");
        assert!(Held::of(&claimed(proc.id + 1, "/proc")).unwrap().is_none(), "another mount");
        assert!(Held::of(&claimed(proc.id, "/")).unwrap().is_none());
        assert!(Held::of(&claimed(proc.id, "/proc/missing/point")).is_err());
    }
}
