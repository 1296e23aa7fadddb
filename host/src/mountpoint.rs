//! Holds a mount point open, so that a user with write access to its path cannot redirect root.
//!
//! A path is resolved once, without following links: its links were resolved when the user named
//! it, so a link found now was put there since. Later calls use the descriptor, and the kernel does
//! not reuse the number of a mount while it is open. To unmount, the caller opens the directory,
//! reads the number of its mount, looks that number up in the table, compares, and then unmounts
//! the open directory.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, umount2};
use nix::unistd::geteuid;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat};
use rustix::io::Errno;

use crate::mounts::{self, Mounted};

/// Open directory, which no other process can replace.
pub struct Mountpoint(OwnedFd);

impl Mountpoint {
    /// Opens the topmost mount at an absolute path without links, without asking its file system.
    pub fn of(path: &Path) -> io::Result<Mountpoint> {
        Mountpoint::open(CWD, path)
    }

    /// Opens the topmost mount on one of its entries at this time.
    pub fn entry(&self, name: &OsStr) -> io::Result<Mountpoint> {
        Mountpoint::open(self.0.as_fd(), name.as_ref())
    }

    fn open(directory: BorrowedFd<'_>, path: &Path) -> io::Result<Mountpoint> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat2(directory, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS) {
            // A kernel before 5.6, or a container that does not know the call: links on the way are
            // followed there.
            Err(Errno::NOSYS | Errno::PERM) => Ok(Mountpoint(openat(directory, path, flags, Mode::empty())?)),
            opened => Ok(Mountpoint(opened?)),
        }
    }

    /// Returns a path of the open directory that no later mount on top of it changes.
    pub fn link(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }

    /// Returns the mount with this root, under the path at which it was opened.
    pub fn mounted_at(&self, path: &Path) -> io::Result<Option<Mounted>> {
        let id = self.mount()?;
        Ok(mounts::table()?.into_iter().find(|mounted| mounted.id == id && mounted.point == path))
    }

    /// Returns the kernel's number of the mount in which it is.
    fn mount(&self) -> io::Result<u64> {
        mount_number(self.0.as_fd())
    }

    /// Detaches the mount with this root, even when it is busy or covered by another mount.
    pub fn detach(&self) -> nix::Result<()> {
        umount2(&self.link(), MntFlags::MNT_DETACH)
    }

    /// Detaches the mount on an entry, even when it is busy; does not follow a link.
    pub fn detach_entry(&self, name: &OsStr) -> nix::Result<()> {
        self.unmount_entry(name, MntFlags::MNT_DETACH)
    }

    fn unmount_entry(&self, name: &OsStr, flags: MntFlags) -> nix::Result<()> {
        umount2(&self.link().join(name), flags | MntFlags::UMOUNT_NOFOLLOW)
    }

    /// Opens the same directory with full access: its file system is asked for that.
    pub fn reopen(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(openat(CWD, self.link(), flags, Mode::empty())?)
    }

    /// Returns the mode of the directory, asking its file system.
    pub fn mode(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstat(&self.0)?.st_mode)
    }

    /// Returns the uid of the directory, asking its file system.
    pub fn owner(&self) -> io::Result<u32> {
        Ok(rustix::fs::fstat(&self.0)?.st_uid)
    }

    /// Returns whether the directory has no entries, asking its file system.
    pub fn is_empty(&self) -> io::Result<bool> {
        for entry in rustix::fs::Dir::new(self.reopen()?)? {
            if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Directory created for a mount and removed with it. Its parent is held open, and only the created
/// directory is removed, by its number. So a user who may change the path can have an empty
/// directory removed at most.
pub struct CreatedMountpoint {
    parent: Mountpoint,
    name: OsString,
    number: (u64, u64),
}

impl CreatedMountpoint {
    /// Creates it, for its user alone; `path` is absolute, and its parent without links.
    ///
    /// # Errors
    /// `PermissionDenied` for root where another user could put another object in its place before
    /// it is mounted on; those of the host, also when the name exists.
    pub fn make(path: &Path) -> io::Result<CreatedMountpoint> {
        let parent = path.parent().ok_or(ErrorKind::InvalidInput)?;
        if geteuid().is_root() && others_exchange(parent) {
            let why = "other users may change its path, where root makes no directory: make one, and name it";
            return Err(io::Error::new(ErrorKind::PermissionDenied, why));
        }
        let parent = Mountpoint::of(parent)?;
        rustix::fs::mkdirat(&parent.0, path.file_name().ok_or(ErrorKind::InvalidInput)?, Mode::RWXU)?;
        CreatedMountpoint::found(parent, path)
    }

    /// One that was made before, while nothing is mounted on it.
    ///
    /// # Errors
    /// The host's.
    pub fn of(path: &Path) -> io::Result<CreatedMountpoint> {
        CreatedMountpoint::found(Mountpoint::of(path.parent().ok_or(ErrorKind::InvalidInput)?)?, path)
    }

    fn found(parent: Mountpoint, path: &Path) -> io::Result<CreatedMountpoint> {
        let name = path.file_name().ok_or(ErrorKind::InvalidInput)?.to_owned();
        let number = number_of(&parent, &name)?;
        Ok(CreatedMountpoint { parent, name, number })
    }

    /// Removes it, unless something is in it, is mounted on it, or has taken its place.
    pub fn remove(&self) {
        if number_of(&self.parent, &self.name).is_ok_and(|number| number == self.number) {
            let _ = rustix::fs::unlinkat(&self.parent.0, &self.name, AtFlags::REMOVEDIR);
        }
    }
}

fn number_of(parent: &Mountpoint, name: &OsStr) -> io::Result<(u64, u64)> {
    let found = rustix::fs::statat(&parent.0, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((found.st_dev, found.st_ino))
}

/// Returns whether users other than root and this one may exchange entries of this directory; the
/// path is absolute and without links.
pub fn others_exchange(directory: &Path) -> bool {
    directory.ancestors().any(|above| above.metadata().map_or(true, |found| others_change(&found)))
}

/// Returns whether users other than root and this one may exchange entries of a directory. In a
/// sticky one only the owner may.
fn others_change(directory: &fs::Metadata) -> bool {
    let owned = [0, geteuid().as_raw()].contains(&directory.uid());
    !owned || (directory.mode() & 0o022 != 0 && directory.mode() & 0o1000 == 0)
}

/// Returns the kernel's number of the mount in which something open is.
pub(crate) fn mount_number(open: BorrowedFd<'_>) -> io::Result<u64> {
    let told = fs::read_to_string(format!("/proc/self/fdinfo/{}", open.as_raw_fd()))?;
    let number = told.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
    number.ok_or_else(|| ErrorKind::InvalidData.into())
}

/// Returns the kernel's number of the mount to which a link leads.
pub fn mount_of(link: &Path) -> Option<u64> {
    Mountpoint(openat(CWD, link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?).mount().ok()
}

/// Mount of an archive, held open so that it stays the one found in the table.
pub struct PinnedMount {
    root: Mountpoint,
    /// The directory in which it lies, and its name there.
    parent: Mountpoint,
    name: OsString,
}

impl PinnedMount {
    /// Returns None when the path of `mounted` leads to another mount, or to none any more. Its
    /// daemon is not asked.
    ///
    /// # Errors
    /// When the path leads nowhere.
    pub fn of(mounted: &Mounted) -> io::Result<Option<PinnedMount>> {
        let (Some(above), Some(name)) = (mounted.point.parent(), mounted.point.file_name()) else { return Ok(None) };
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let parent = Mountpoint(openat(CWD, above, flags | OFlags::DIRECTORY, Mode::empty())?);
        let root = Mountpoint(openat(&parent.0, name, flags | OFlags::NOFOLLOW, Mode::empty())?);
        let id = root.mount()?;
        let same = |now: &Mounted| (now.id, now.device, now.user) == (id, mounted.device, mounted.user);
        let is_it = id == mounted.id && mounts::all().iter().any(|now| now.is_archive() && same(now));
        Ok(is_it.then(|| PinnedMount { root, parent, name: name.to_owned() }))
    }

    /// Returns whether its daemon is gone. Attributes may still be cached, a new handle cannot be.
    pub fn is_dead(&self) -> bool {
        // ENOTCONN: the daemon is gone; ECONNABORTED: it went during the request.
        fs::read_dir(self.root.link().join(""))
            .is_err_and(|e| matches!(e.kind(), ErrorKind::NotConnected | ErrorKind::ConnectionAborted))
    }

    /// Takes it away, also when it is busy.
    ///
    /// # Errors
    /// The kernel's.
    pub fn detach(&self) -> nix::Result<()> {
        self.root.detach()
    }

    /// Unmounts it unless it is busy. Our own descriptor of it would keep it busy, so that is
    /// closed before, and the mount is named by its entry in the open directory: no link is
    /// followed, a mount point cannot be renamed, and only its user and root unmount it.
    ///
    /// # Errors
    /// The kernel's, as when it is busy.
    pub fn unmount(self) -> nix::Result<()> {
        drop(self.root);
        self.parent.unmount_entry(&self.name, MntFlags::empty())
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
        let held = Mountpoint::of(&place.join("users/point")).unwrap();
        fs::rename(place.join("users"), place.join("away")).unwrap();
        symlink("victim", place.join("users")).unwrap();
        assert!(Mountpoint::of(&place.join("users/point")).is_err());
        assert_eq!(fs::read_link(held.link()).unwrap(), place.join("away/point"), "what is held stays what it is");
    }

    #[test]
    fn a_mount_is_told_by_what_is_open_and_by_its_path() {
        let held = Mountpoint::of(Path::new("/proc")).unwrap();
        assert_eq!(held.mounted_at(Path::new("/proc")).unwrap().unwrap().file_system, "proc");
        assert_eq!(held.mounted_at(Path::new("/sys")).unwrap(), None, "the path leads elsewhere by now");
        let below = Mountpoint::of(Path::new("/proc/self/fd").canonicalize().unwrap().as_path()).unwrap();
        assert_eq!(below.mounted_at(Path::new("/proc/self/fd")).unwrap(), None, "no root of a mount");
    }

    #[test]
    fn a_directory_that_was_made_is_removed_and_no_other() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let path = place.join("made");
        let made = CreatedMountpoint::make(&path).unwrap();
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o700);
        assert_eq!(CreatedMountpoint::make(&path).err().map(|e| e.kind()), Some(ErrorKind::AlreadyExists));
        fs::write(path.join("file"), b"somebody's").unwrap();
        made.remove();
        assert!(path.join("file").exists());
        fs::rename(&path, place.join("away")).unwrap();
        fs::create_dir(&path).unwrap();
        made.remove();
        assert!(path.exists(), "another one of that name");
        let again = CreatedMountpoint::of(&path).unwrap();
        again.remove();
        assert!(!path.exists());
        symlink(&place, &path).unwrap();
        assert!(CreatedMountpoint::make(&path).is_err());
        again.remove();
        assert!(path.is_symlink());
    }

    #[test]
    fn root_makes_nothing_where_others_may_exchange_it() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let set = |mode| fs::set_permissions(&place, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        for (mode, refused) in [(0o700, false), (0o755, false), (0o1777, false), (0o777, true), (0o775, true)] {
            set(mode);
            assert_eq!(others_change(&place.metadata().unwrap()), refused, "{mode:o}");
            if geteuid().is_root() {
                let made = CreatedMountpoint::make(&place.join("made"));
                assert_eq!(made.is_err(), refused, "{mode:o}");
                made.iter().for_each(CreatedMountpoint::remove);
            }
        }
        set(0o700);
        if geteuid().is_root() {
            std::os::unix::fs::chown(&place, Some(7), None).unwrap();
            let refused = CreatedMountpoint::make(&place.join("made")).err().map(|e| e.kind());
            assert_eq!(refused, Some(ErrorKind::PermissionDenied), "it is another user's");
            fs::create_dir(place.join("below")).unwrap();
            assert!(CreatedMountpoint::make(&place.join("below/made")).is_err(), "what is above it is another user's");
        }
    }

    fn mounted(line: &str) -> Mounted {
        mounts::parse(line.as_bytes()).unwrap()
    }

    #[test]
    fn what_is_not_the_mount_of_the_table_is_not_held() {
        let scratch = tempfile::tempdir().unwrap();
        let point = scratch.path().join("point");
        symlink("/proc", &point).unwrap();
        let proc = mounts::all().into_iter().rfind(|mounted| mounted.point == Path::new("/proc")).unwrap();
        let (major, minor) = (nix::sys::stat::major(proc.device), nix::sys::stat::minor(proc.device));
        let device = format!("{major}:{minor}");
        let claimed =
            |id: u64, at: &str| mounted(&format!("{id} 1 {} / {at} rw - fuse.lockbox /a.lbx rw,user_id=7", device));
        let at = point.to_str().unwrap();
        assert!(PinnedMount::of(&claimed(proc.id, at)).unwrap().is_none(), "a link");
        assert!(PinnedMount::of(&claimed(proc.id, "/proc")).unwrap().is_none(), "no archive in the table");
        assert!(PinnedMount::of(&claimed(proc.id + 1, "/proc")).unwrap().is_none(), "another mount");
        assert!(PinnedMount::of(&claimed(proc.id, "/")).unwrap().is_none());
        assert!(PinnedMount::of(&claimed(proc.id, "/proc/missing/point")).is_err());
    }
}
