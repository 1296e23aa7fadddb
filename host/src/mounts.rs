//! Mounts: the kernel's table of them, and mount points that are held open, so that a user with
//! write access to their path cannot redirect root.
//!
//! # Mount points held open
//! A path is resolved once, without following links: its links were resolved when the user named
//! it, so a link found now was put there since. Later calls use the descriptor, and the kernel does
//! not reuse the number of a mount while it is open. To unmount, the caller opens the directory,
//! reads the number of its mount, looks that number up in the table, compares, and then unmounts
//! the open directory.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::control::Status;
use nix::mount::{MntFlags, umount2};
use nix::sys::stat::makedev;
use nix::unistd::{geteuid, getpgrp};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, openat};
use rustix::io::Errno;

/// The file system type of an archive as the kernel shows it.
pub const TYPE: &str = "fuse.lockbox";

/// One line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    /// The kernel's number of the mount, which another one gets when this one is gone.
    pub id: u64,
    /// Number of the mount that contains this one.
    pub parent: u64,
    /// The file system's device number: that of a bind mount is the same.
    pub device: u64,
    pub point: PathBuf,
    /// Options of the mount itself, such as `nosuid`, without those of its file system.
    pub words: Vec<String>,
    /// The archive, as it was named at mounting.
    pub source: PathBuf,
    /// User that created a FUSE mount.
    pub user: Option<u32>,
    /// Process group of the automounter of an autofs mount.
    pub automounter: Option<i32>,
    pub file_system: String,
}

impl Mounted {
    pub fn is_archive(&self) -> bool {
        self.file_system == TYPE
    }

    pub fn numbers(&self) -> Numbers {
        Numbers { id: self.id, device: self.device }
    }
}

/// Numbers that tell a mount from every other one, even when it is moved or a directory above it is
/// renamed. The kernel gives the id of a mount that is gone to another one, but the device number
/// not before the file system has ended too, with which its daemon ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    pub id: u64,
    pub device: u64,
}

/// Returns the mount that a daemon serves, at its current place.
///
/// In the daemon's own mount namespace it is known by its numbers. In another one a mount that was
/// copied into it has another id, so the device number alone counts there, and of several mounts
/// the one at the daemon's path. A daemon that reports no numbers is an older one, which is found
/// by its path.
pub fn of_daemon<'a>(table: &'a [Mounted], status: &Status, namespace: u64) -> Option<&'a Mounted> {
    let point = status.mount_point_path();
    let of_it = |mounted: &&Mounted| mounted.is_archive() && mounted.device == status.mount_device;
    if status.mount_device == 0 {
        return table.iter().rfind(|mounted| mounted.point == point).filter(|mounted| mounted.is_archive());
    }
    if [0, namespace].contains(&status.mount_namespace) {
        return table.iter().filter(of_it).find(|mounted| mounted.id == status.mount_id);
    }
    let mut there = table.iter().filter(of_it);
    there.clone().find(|mounted| mounted.point == point).or_else(|| there.next_back())
}

/// Returns all mounts of this process's namespace, a later one over an earlier one at the same
/// point.
///
/// # Errors
/// When /proc is not there.
pub fn table() -> io::Result<Vec<Mounted>> {
    let table = fs::read("/proc/self/mountinfo")?;
    Ok(table.split(|&b| b == b'\n').filter_map(parse).collect())
}

/// The same, empty if /proc is missing.
pub fn all() -> Vec<Mounted> {
    table().unwrap_or_default()
}

/// Returns the mounts of archives that this user created; for root, those of all users.
pub fn mine() -> Vec<Mounted> {
    let me = geteuid();
    let mine = |mounted: &Mounted| mounted.is_archive() && (me.is_root() || mounted.user == Some(me.as_raw()));
    all().into_iter().filter(mine).collect()
}

/// Returns the mount on top at `point`, which must be an absolute path without links.
///
/// # Errors
/// As [`table`].
pub fn at(point: &Path) -> io::Result<Option<Mounted>> {
    Ok(table()?.into_iter().rfind(|mounted| mounted.point == point))
}

/// Returns whether this process is in the process group of an automounter on the path of `point`,
/// which is absolute and without links: the automounter is mounting `point` through this process.
/// While a mount or an expiry is pending, autofs blocks the processes of all other groups there.
pub fn is_called_by_automounter(point: &Path) -> bool {
    let group = Some(getpgrp().as_raw());
    all().iter().any(|mounted| mounted.automounter == group && point.starts_with(&mounted.point))
}

/// Returns another mount of the same file system, such as the original of a bind mount.
pub fn twin<'a>(table: &'a [Mounted], mounted: &Mounted) -> Option<&'a Mounted> {
    table.iter().find(|other| other.is_archive() && other.device == mounted.device && other.id != mounted.id)
}

/// Parses a line of the table.
pub fn parse(line: &[u8]) -> Option<Mounted> {
    let mut fields = line.split(|&b| b == b' ');
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let (id, parent, device) = (text()?.parse().ok()?, text()?.parse().ok()?, text()?);
    let (major, minor) = device.split_once(':')?;
    let device = makedev(major.parse().ok()?, minor.parse().ok()?);
    let point = path(fields.nth(1)?);
    let words = String::from_utf8_lossy(fields.next()?).split(',').map(str::to_owned).collect();
    // Optional fields end at a dash; type, source and the file system's options follow.
    let mut rest = fields.skip_while(|&field| field != b"-").skip(1);
    let file_system = String::from_utf8_lossy(rest.next()?).into_owned();
    let source = path(rest.next()?);
    let options = String::from_utf8_lossy(rest.next().unwrap_or_default()).into_owned();
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id=")?.parse().ok());
    let group = options.split(',').find_map(|option| option.strip_prefix("pgrp=")?.parse().ok());
    // A group of another PID namespace is shown as 0.
    let automounter = group.filter(|&group| file_system == "autofs" && group > 0);
    Some(Mounted { id, parent, device, point, words, source, user, automounter, file_system })
}

fn path(field: &[u8]) -> PathBuf {
    PathBuf::from(OsString::from_vec(unescape(field)))
}

/// Undoes the `\ooo` for space, tab, newline and backslash that the kernel and fstab write.
pub fn unescape(field: &[u8]) -> Vec<u8> {
    let mut parts = field.split(|&b| b == b'\\');
    let mut bytes = parts.next().unwrap_or_default().to_vec();
    for part in parts {
        match part {
            [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', rest @ ..] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                bytes.extend_from_slice(rest);
            }
            _ => {
                bytes.push(b'\\');
                bytes.extend_from_slice(part);
            }
        }
    }
    bytes
}

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
        let id = mount_number(self.0.as_fd())?;
        Ok(table()?.into_iter().find(|mounted| mounted.id == id && mounted.point == path))
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
            let why =
                "other users may change its path, so root does not create a directory there; create one, and name it";
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
    mount_number(openat(CWD, link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?.as_fd()).ok()
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
        let id = mount_number(root.0.as_fd())?;
        let same = |now: &Mounted| (now.id, now.device, now.user) == (id, mounted.device, mounted.user);
        let is_it = id == mounted.id && all().iter().any(|now| now.is_archive() && same(now));
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
    fn a_line_with_escapes_and_optional_fields_is_read() {
        let line = br"36 35 0:42 / /mnt/a\040b\134c rw,nosuid shared:1 master:2 - fuse.lockbox /x\040y.lbx rw,user_id=7,group_id=0";
        let mounted = parse(line).unwrap();
        assert_eq!(mounted.point, Path::new("/mnt/a b\\c"));
        assert_eq!(mounted.source, Path::new("/x y.lbx"));
        assert_eq!(mounted.user, Some(7));
        assert_eq!((mounted.id, mounted.parent, mounted.device), (36, 35, makedev(0, 42)));
        assert!(mounted.is_archive());
    }

    #[test]
    fn an_automounter_is_known_by_its_process_group() {
        let automounter = |file_system: &str, options: &str| {
            let line = format!("71 43 0:45 / /mnt/diary rw,relatime shared:3 - {file_system} x {options}");
            parse(line.as_bytes()).unwrap().automounter
        };
        let options = "rw,fd=44,pgrp=1,timeout=0,minproto=5,maxproto=5,direct,pipe_ino=2194";
        assert_eq!(automounter("autofs", options), Some(1));
        assert_eq!(automounter("autofs", &options.replace("pgrp=1", "pgrp=0")), None, "of another namespace");
        assert_eq!(automounter(TYPE, options), None);
    }

    #[test]
    fn the_words_of_a_mount_are_told_from_those_of_its_file_system() {
        let table = b"3\n6 1 0:41 / /mnt rw,noexec - tmpfs x rw\n36 6 0:42 / /mnt/a ro,nosuid,nodev shared:1 - fuse.lockbox /x rw,user_id=7\n";
        let words = |id| {
            table.split(|&b| b == b'\n').filter_map(parse).find(|mounted| mounted.id == id).map(|mounted| mounted.words)
        };
        assert_eq!(words(36).unwrap(), ["ro", "nosuid", "nodev"]);
        assert_eq!(words(3), None);
        assert_eq!(words(42), None);
    }

    #[test]
    fn other_and_short_lines_are_no_archives() {
        assert!(!parse(b"36 35 0:42 / /mnt rw - fuse.lockboxfs x rw").unwrap().is_archive());
        assert_eq!(parse(b"36 35 0:42 / /mnt"), None);
        assert_eq!(parse(b""), None);
    }

    #[test]
    fn a_daemon_is_found_by_its_numbers_wherever_its_mount_is() {
        let line = |id: u64, minor: u64, point: &str| {
            format!("{id} 1 0:{minor} / {point} rw - fuse.lockbox /a.lbx rw,user_id=7")
        };
        let table: Vec<Mounted> = [line(36, 42, "/new/a"), line(37, 43, "/old/a"), line(38, 42, "/bind")]
            .iter()
            .filter_map(|line| parse(line.as_bytes()))
            .collect();
        let status = Status {
            mount_point: "/old/a".into(),
            mount_id: 36,
            mount_device: makedev(0, 42),
            mount_namespace: 5,
            ..Status::default()
        };
        let found = |status: &Status, namespace| of_daemon(&table, status, namespace).map(|mounted| mounted.id);
        assert_eq!(found(&status, 5), Some(36), "a directory above it was renamed, and another mount has its path");
        assert_eq!(
            found(&Status { mount_id: 39, ..status.clone() }, 5),
            None,
            "it was taken away, and its bind is another one"
        );
        assert_eq!(found(&Status { mount_id: 9, ..status.clone() }, 6), Some(38), "copied into another namespace");
        let copied = Status { mount_id: 9, mount_point: "/new/a".into(), ..status.clone() };
        assert_eq!(found(&copied, 6), Some(36));
        assert_eq!(found(&Status { mount_device: 0, ..status }, 5), Some(37), "an older daemon tells its path alone");
    }

    #[test]
    fn what_is_no_escape_stays() {
        assert_eq!(unescape(br"\\040\400\04\x\"), br"\ \400\04\x\");
    }

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
        parse(line.as_bytes()).unwrap()
    }

    #[test]
    fn what_is_not_the_mount_of_the_table_is_not_held() {
        let scratch = tempfile::tempdir().unwrap();
        let point = scratch.path().join("point");
        symlink("/proc", &point).unwrap();
        let proc = all().into_iter().rfind(|mounted| mounted.point == Path::new("/proc")).unwrap();
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
