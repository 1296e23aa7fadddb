//! A mount point that is held open, so that whoever may change its path leads what root does there nowhere else.
//!
//! A path is resolved once, without following links: its links were resolved when the user named it, so one that is found now was put there
//! since. What follows goes to the descriptor, and a mount is known by the number that the kernel gives no other one while it is open.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::mountinfo::{self, Mounted};

pub struct Point(OwnedFd);

impl Point {
    /// Opens what lies on top at an absolute path without links, without asking its file system.
    pub fn of(path: &Path) -> io::Result<Point> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            // A kernel before 5.6, or a container that does not know the call: links on the way are followed there.
            Err(Errno::NOSYS | Errno::PERM) => Ok(Point(rustix::fs::openat(CWD, path, flags, Mode::empty())?)),
            opened => Ok(Point(opened?)),
        }
    }

    /// A path of what is open, whatever lies on top of it by now.
    pub fn link(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// The mount whose root this is, under the path at which it was opened.
    pub fn mounted_at(&self, path: &Path) -> io::Result<Option<Mounted>> {
        let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", self.0.as_raw_fd()))?;
        let id = told.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse::<u64>().ok());
        let id = id.ok_or(io::ErrorKind::InvalidData)?;
        Ok(mountinfo::table()?.into_iter().find(|mounted| mounted.id == id && mounted.point == path))
    }

    /// The mode of the directory.
    pub fn mode(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstat(&self.0)?.st_mode)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_that_was_put_on_the_way_is_not_followed() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        for directory in ["users/point", "victim/point"] {
            fs::create_dir_all(place.join(directory)).unwrap();
        }
        let held = Point::of(&place.join("users/point")).unwrap();
        fs::rename(place.join("users"), place.join("away")).unwrap();
        symlink("victim", place.join("users")).unwrap();
        assert!(Point::of(&place.join("users/point")).is_err());
        assert_eq!(fs::read_link(held.link()).unwrap(), place.join("away/point"), "what is held stays what it is");
    }

    #[test]
    fn a_mount_is_told_by_what_is_open_and_by_its_path() {
        let held = Point::of(Path::new("/proc")).unwrap();
        assert_eq!(held.mounted_at(Path::new("/proc")).unwrap().unwrap().file_system, "proc");
        assert_eq!(held.mounted_at(Path::new("/sys")).unwrap(), None, "the path leads elsewhere by now");
        let below = Point::of(Path::new("/proc/self/fd").canonicalize().unwrap().as_path()).unwrap();
        assert_eq!(below.mounted_at(Path::new("/proc/self/fd")).unwrap(), None, "no root of a mount");
    }
}
