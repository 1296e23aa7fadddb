//! Private directory in an extraction's target, in which everything is built before it is renamed
//! into place.
//!
//! # Invariants
//! EXTRACT-1  A created object is identified by its descriptor from then on, even if another user
//!     can modify the directory around it. A created directory is entered only while it is empty,
//!     so that a directory put in its place is not filled, given away or modified. Every path is
//!     walked component by component without following links, of the host or of the archive; and an
//!     object that is looked up again must be the same file. The staging directory itself, of mode
//!     0700, excludes other users until its content is complete.
//! EXTRACT-2  A staging directory is locked while it is in use. An unlocked one was left by a
//!     killed process, and the next extraction into the same directory removes it, unless other
//!     users may rename there: they could give its name to another directory of ours. Mounts within
//!     it are not emptied: nothing is removed across a mount boundary.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use lockbox_terminal::display;

use super::attributes::{descriptor_path, host_error, split_device_number};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::fs::Attributes;
use crate::storage::{FileIdentity, host_call, names, rename_to_free_name};

/// Opens a directory without following a symbolic link.
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Prefix of a staging directory's name, and number of random digits after it.
const PREFIX: &str = ".lockbox-extract-";
const DIGITS: usize = 16;
/// Maximum attempts with another name when another process removes the new directory.
const ATTEMPTS: usize = 5;

/// Staging directory, removed with its content on drop.
pub(crate) struct StagingDir {
    target: OwnedFd,
    name: String,
    path: PathBuf,
    directory: OwnedFd,
    /// The host refused the name of a finished item.
    name_refused: AtomicBool,
}

impl StagingDir {
    /// Creates the staging directory in `target`, which is created if missing, and removes
    /// leftovers of killed processes.
    pub(crate) fn new(target: &Path, environment: &dyn Environment) -> Result<StagingDir> {
        let cannot = |e| Error::io(format!("cannot create {}", target.display()), e);
        fs::create_dir_all(target).map_err(cannot)?;
        sweep(target);
        StagingDir::make(target, environment, &mut |_| {})
    }

    /// Calls `created` with the name as soon as the directory exists.
    fn make(target: &Path, environment: &dyn Environment, created: &mut dyn FnMut(&str)) -> Result<StagingDir> {
        let failed = |errno: Errno| Error::io(format!("cannot write to {}", target.display()), errno.into());
        // The target itself may be a symbolic link: the user named it.
        let directory = rustix::fs::openat(CWD, target, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let directory = directory.map_err(failed)?;
        for _ in 0..ATTEMPTS {
            let mut random = [0; DIGITS / 2];
            environment.fill_random(&mut random)?;
            let name = format!("{PREFIX}{:016x}", u64::from_le_bytes(random));
            rustix::fs::mkdirat(&directory, &name, Mode::RWXU).map_err(failed)?;
            created(&name);
            let stage = match open_empty(&directory, name.as_bytes()) {
                Ok(Some(stage)) => stage,
                Ok(None) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => {
                    // It is empty, if it still exists.
                    let _ = rustix::fs::unlinkat(&directory, &name, AtFlags::REMOVEDIR);
                    return Err(failed(errno));
                }
            };
            // If the host does not support locks, nothing is ever swept. A process that holds this
            // lock is about to remove the directory.
            if rustix::fs::flock(&stage, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
                || !is_named(&directory, name.as_bytes(), &stage)
            {
                continue;
            }
            // Copies set their own permissions, so objects created here must not inherit any.
            // Without a default list there is nothing to remove.
            let _ = rustix::fs::fremovexattr(&stage, "system.posix_acl_default");
            let (path, name_refused) = (target.join(&name), AtomicBool::default());
            return Ok(StagingDir { target: directory, path, name, directory: stage, name_refused });
        }
        Err(Error::InUse(format!("another process repeatedly removed the staging directory in {}", target.display())))
    }

    pub(crate) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    pub(crate) fn target(&self) -> &OwnedFd {
        &self.target
    }

    pub(crate) fn has_entry(&self, name: &[u8]) -> Result<bool> {
        match rustix::fs::statat(&self.target, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(host_error("cannot read the target directory")(errno)),
        }
    }

    /// Renames a finished item into the target. With `replace`, rename(2) applies: a file replaces
    /// a file, a directory only an empty one. A new file is durable before the old one goes.
    pub(crate) fn install(&self, name: &[u8], replace: bool) -> Result<()> {
        if replace && self.has_entry(name)? {
            self.sync_file(name).map_err(host_error("cannot make it durable"))?;
        }
        let done = match replace {
            true => rustix::fs::renameat(&self.directory, name, &self.target, name),
            false => self.place(name, &self.target, name),
        };
        done.map_err(|errno| match errno {
            Errno::EXIST if !replace => Error::Exists,
            Errno::NOTEMPTY | Errno::EXIST => Error::NotEmpty,
            Errno::ISDIR => Error::IsDirectory,
            Errno::NOTDIR => Error::NotDirectory,
            errno => host_error("cannot move it into place")(errno),
        })
    }

    fn sync_file(&self, name: &[u8]) -> rustix::io::Result<()> {
        let item = rustix::fs::statat(&self.directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(item.st_mode) != FileType::RegularFile {
            return Ok(());
        }
        match rustix::fs::openat(&self.directory, name, OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
            Ok(file) => host_call::sync(file),
            // The mode of the item does not let its owner read it.
            Err(Errno::ACCESS) => host_call::sync_file_system(&self.directory),
            Err(errno) => Err(errno),
        }
    }

    /// Renames a finished item to an unused name.
    pub(crate) fn place(&self, from: &[u8], at: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
        let placed = rename_to_free_name(self.directory.as_fd(), from, at.as_fd(), name);
        self.name_refused.fetch_or(placed.is_err(), Ordering::Relaxed);
        placed
    }

    /// Returns whether [`Self::place`] failed since the last call.
    pub(crate) fn take_name_refused(&self) -> bool {
        self.name_refused.swap(false, Ordering::Relaxed)
    }
}

impl Drop for StagingDir {
    fn drop(&mut self) {
        if let Err(errno) = remove(&self.target, self.name.as_bytes(), &self.directory) {
            tracing::warn!(%errno, path = %self.path.display(), "cannot remove the directory of the extraction");
        }
    }
}

/// Removes staging directories of killed processes in `path` (EXTRACT-2); unreadable ones remain.
pub(crate) fn sweep(path: &Path) {
    let target = rustix::fs::openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let Ok(target) = target else { return };
    let own = nix::unistd::geteuid().as_raw();
    for name in names(&target).unwrap_or_default() {
        let random = name.strip_prefix(PREFIX.as_bytes());
        if !random.is_some_and(|random| random.len() == DIGITS && random.iter().all(u8::is_ascii_hexdigit)) {
            continue;
        }
        let Ok(leftover) = rustix::fs::openat(&target, &name[..], DIRECTORY, Mode::empty()) else { continue };
        if !rustix::fs::fstat(&leftover).is_ok_and(|stat| stat.st_uid == own)
            || check_same_mount(&target, &leftover).is_err()
            || rustix::fs::flock(&leftover, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            continue;
        }
        let shown = path.join(display(&name));
        let path = shown.display();
        if !rustix::fs::fstat(&target).is_ok_and(|stat| is_rename_private(&stat)) {
            tracing::warn!(%path, "an earlier extraction may have left this; other users can rename entries there, so remove it yourself");
        } else if let Err(errno) = remove(&target, &name, &leftover) {
            tracing::warn!(%errno, %path, "cannot remove a leftover of an earlier extraction");
        }
    }
}

/// Returns whether no other user can give the name of a directory of ours to another one (the group
/// bits include the access control list).
fn is_rename_private(directory: &Stat) -> bool {
    let (own, root) = (nix::unistd::geteuid().as_raw(), 0);
    let others_write = directory.st_mode & 0o022 != 0 && directory.st_mode & 0o1000 == 0;
    (directory.st_uid == own || directory.st_uid == root) && !others_write
}

/// Removes the directory with its content, and its name in `at` if that still denotes it.
fn remove(at: &OwnedFd, name: &[u8], directory: &OwnedFd) -> rustix::io::Result<()> {
    clear(directory)?;
    match is_named(at, name, directory) {
        true => rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR),
        false => Ok(()),
    }
}

/// Removes the content of a directory; nested ones are moved up first, so depth does not matter.
fn clear(directory: &OwnedFd) -> rustix::io::Result<()> {
    let mut moved = 0u64;
    loop {
        let top = names(directory)?;
        if top.is_empty() {
            return Ok(());
        }
        for name in top.iter().filter_map(|name| remove_unless_directory(directory, name).transpose()) {
            let name = name?;
            let below = enter(directory, name)?;
            for child in names(&below)? {
                let Some(child) = remove_unless_directory(&below, &child)? else { continue };
                // To be moved, it must be writable for its owner.
                enter(&below, child)?;
                while rustix::fs::statat(directory, moved.to_string(), AtFlags::SYMLINK_NOFOLLOW).is_ok() {
                    moved += 1;
                }
                rustix::fs::renameat(&below, child, directory, moved.to_string())?;
            }
            rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR)?;
        }
    }
}

fn remove_unless_directory<'a>(directory: &OwnedFd, name: &'a [u8]) -> rustix::io::Result<Option<&'a [u8]>> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) => Ok(None),
        Err(Errno::ISDIR) => Ok(Some(name)),
        Err(errno) => Err(errno),
    }
}

/// Opens a directory that is to be removed; its mode may deny access to its owner. Errors: `XDEV`
/// for a mount point.
fn enter(at: &OwnedFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let directory = rustix::fs::openat(at, name, DIRECTORY | OFlags::PATH, Mode::empty())?;
    check_same_mount(at, &directory)?;
    if rustix::fs::fstat(&directory)?.st_mode & 0o700 != 0o700 {
        rustix::fs::chmod(descriptor_path(&directory), Mode::RWXU)?;
    }
    rustix::fs::openat(&directory, ".", DIRECTORY, Mode::empty())
}

/// Checks that both are on one mount. Device numbers do not suffice when a directory of the same
/// file system is mounted.
fn check_same_mount(one: &OwnedFd, other: &OwnedFd) -> rustix::io::Result<()> {
    let mount = |of: &OwnedFd| {
        let found = rustix::fs::statx(of, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
        // A kernel without mount ids (before 5.8) returns 0.
        Ok((found.stx_dev_major, found.stx_dev_minor, found.stx_mnt_id))
    };
    if mount(one)? == mount(other)? { Ok(()) } else { Err(Errno::XDEV) }
}

/// Returns the identity by which a created file is recognized.
pub(crate) fn identity_of(file: impl AsFd) -> Result<FileIdentity> {
    FileIdentity::of(file).map_err(host_error("cannot examine it"))
}

fn is_named(at: &OwnedFd, name: &[u8], file: &OwnedFd) -> bool {
    let named = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| FileIdentity::from(&stat));
    named.is_ok_and(|named| FileIdentity::of(file).is_ok_and(|opened| opened == named))
}

/// Opens an empty directory; `None` for one with entries.
fn open_empty(at: impl AsFd, name: &[u8]) -> rustix::io::Result<Option<OwnedFd>> {
    let directory = rustix::fs::openat(at, name, DIRECTORY, Mode::empty())?;
    for entry in Dir::read_from(&directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(None);
        }
    }
    Ok(Some(directory))
}

fn replaced_error() -> Error {
    Error::InUse("another process replaced it".into())
}

/// Creates a directory and opens it (EXTRACT-1).
pub(crate) fn make_directory(at: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::mkdirat(&at, name, Mode::RWXU).map_err(host_error("cannot create the directory"))?;
    open_empty(at, name).map_err(host_error("cannot open the directory"))?.ok_or_else(replaced_error)
}

/// Opens a link or special file that was just created with `O_PATH` (EXTRACT-1).
fn open_created(at: impl AsFd, name: &[u8], kind: FileType) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let created =
        rustix::fs::openat(at, name, flags, Mode::empty()).map_err(host_error("cannot inspect the new entry"))?;
    let stat = rustix::fs::fstat(&created).map_err(host_error("cannot inspect the new entry"))?;
    match FileType::from_raw_mode(stat.st_mode) == kind && stat.st_nlink == 1 {
        true => Ok(created),
        false => Err(replaced_error()),
    }
}

/// Creates a symbolic link to `target`, or a special file, and opens it with `O_PATH`.
pub(crate) fn make_special(
    at: impl AsFd,
    name: &[u8],
    attributes: &Attributes,
    target: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<OwnedFd> {
    let kind = FileType::from_raw_mode(attributes.mode);
    if kind == FileType::Symlink {
        rustix::fs::symlinkat(&target()?[..], &at, name).map_err(host_error("cannot create the link"))?;
    } else {
        let (major, minor) = split_device_number(attributes.rdev);
        let device = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(&at, name, kind, Mode::RUSR | Mode::WUSR, device)
            .map_err(host_error("cannot create the special file"))?;
    }
    open_created(at, name, kind)
}

/// Opens the directory `name` without an identity check.
pub(crate) fn open_directory(at: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::openat(at, name, DIRECTORY, Mode::empty()).map_err(host_error("cannot open the directory"))
}

/// Opens the directory at the end of `path`, component by component: EXTRACT-1 for each, and no
/// limit of the path's length.
fn open_below(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    let mut at = root.try_clone().map_err(|e| Error::io("cannot open the directory", e))?;
    for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
        at = open_directory(&at, name)?;
    }
    Ok(at)
}

/// Reopens a directory that was created before (EXTRACT-1).
pub(crate) fn open_again(root: &OwnedFd, path: &[u8], created: FileIdentity) -> Result<OwnedFd> {
    let directory = open_below(root, path)?;
    if identity_of(&directory)? == created { Ok(directory) } else { Err(replaced_error()) }
}

/// Creates a further hard link of a file that was created before (EXTRACT-1).
pub(crate) fn link_again(root: &OwnedFd, path: &[u8], created: FileIdentity, at: &OwnedFd, name: &[u8]) -> Result<()> {
    let failed = host_error("cannot link");
    let (directory, file) = match path.iter().rposition(|&b| b == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&b""[..], path),
    };
    let directory = open_below(root, directory)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, file, flags, Mode::empty()).map_err(&failed)?;
    if identity_of(&file)? != created {
        return Err(replaced_error());
    }
    rustix::fs::linkat(CWD, descriptor_path(&file), at, name, AtFlags::SYMLINK_FOLLOW).map_err(failed)
}

#[cfg(test)]
mod tests;
