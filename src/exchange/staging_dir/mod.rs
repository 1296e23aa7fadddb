//! The private directory beside an extraction's target, in which everything is made before it is renamed into place.
//!
//! # Invariants
//! EXTRACT-1  What is made is known by descriptor from then on, also where somebody else may change the directory around it. A directory that was
//!     made is entered only while it is empty, so that no other one that was put in its place is filled, given away or changed; every path is
//!     walked part by part without following links, of the host or of the archive; and what is looked up again later must be the very file.
//!     The stage itself, of mode 0700, keeps everybody else out until its content is complete.
//! EXTRACT-2  A stage is locked while it is in use. One that nobody holds was left by a process that was killed, and the next extraction into the
//!     same directory removes it, unless others may rename there: they could give its name to another directory of ours. What is mounted
//!     in a stage is not ours to empty: nothing is removed across a border of mounts.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, FileType, FlockOperation, Mode, OFlags, Stat, StatxFlags};
use rustix::io::Errno;

use lockbox_terminal::display;

use super::host::{descriptor_path, host_error, split_device_number};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::fs::Attributes;
use crate::storage::{Identity, names, rename_to_free_name};

/// Opens a directory and never what a symbolic link points to.
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// What the name of a stage begins with, and how many digits follow.
const PREFIX: &str = ".lockbox-extract-";
const DIGITS: usize = 16;
/// How often another name is tried when somebody takes the new directory away.
const ATTEMPTS: usize = 5;

/// Removed with all its content when dropped.
pub(crate) struct Stage {
    target: OwnedFd,
    name: String,
    path: PathBuf,
    directory: OwnedFd,
}

impl Stage {
    /// Makes the stage in `target`, which is made when it is missing, and removes those that killed processes left there.
    pub(crate) fn new(target: &Path, environment: &dyn Environment) -> Result<Stage> {
        let cannot = |e| Error::io(format!("cannot create {}", target.display()), e);
        fs::create_dir_all(target).map_err(cannot)?;
        sweep(target);
        Stage::make(target, environment, &mut |_| {})
    }

    /// `made` is told the name as soon as there is a directory.
    fn make(target: &Path, environment: &dyn Environment, made: &mut dyn FnMut(&str)) -> Result<Stage> {
        let failed = |errno: Errno| Error::io(format!("cannot write to {}", target.display()), errno.into());
        // The target itself may well be a link: the user named it.
        let directory = rustix::fs::openat(CWD, target, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
        let directory = directory.map_err(failed)?;
        for _ in 0..ATTEMPTS {
            let mut random = [0; DIGITS / 2];
            environment.fill_random(&mut random)?;
            let name = format!("{PREFIX}{:016x}", u64::from_le_bytes(random));
            rustix::fs::mkdirat(&directory, &name, Mode::RWXU).map_err(failed)?;
            made(&name);
            let stage = match open_empty(&directory, name.as_bytes()) {
                Ok(Some(stage)) => stage,
                Ok(None) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => continue,
                Err(errno) => {
                    // It is empty, if it is still there.
                    let _ = rustix::fs::unlinkat(&directory, &name, AtFlags::REMOVEDIR);
                    return Err(failed(errno));
                }
            };
            // Where the host knows no locks, nothing is ever swept either. Who holds this one is about to remove it.
            if rustix::fs::flock(&stage, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK)
                || !is_named(&directory, name.as_bytes(), &stage)
            {
                continue;
            }
            // Copies bring their own permissions, so nothing made here is to inherit any. Without a list there is nothing to remove.
            let _ = rustix::fs::fremovexattr(&stage, "system.posix_acl_default");
            return Ok(Stage { target: directory, path: target.join(&name), name, directory: stage });
        }
        Err(Error::InUse(format!("somebody keeps taking away what is made in {}", target.display())))
    }

    pub(crate) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    pub(crate) fn target(&self) -> &OwnedFd {
        &self.target
    }

    /// Whether the target has something of this name.
    pub(crate) fn occupied(&self, name: &[u8]) -> Result<bool> {
        match rustix::fs::statat(&self.target, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(host_error("cannot look into the target")(errno)),
        }
    }

    /// Renames a finished item into the target. With `replace`, as rename(2) does: a file takes a file's place, a directory only that of
    /// an empty one.
    pub(crate) fn install(&self, name: &[u8], replace: bool) -> Result<()> {
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

    /// Renames a finished item to a name that nothing has.
    pub(crate) fn place(&self, from: &[u8], at: &OwnedFd, name: &[u8]) -> rustix::io::Result<()> {
        rename_to_free_name(self.directory.as_fd(), from, at.as_fd(), name)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(errno) = remove(&self.target, self.name.as_bytes(), &self.directory) {
            tracing::warn!(%errno, path = %self.path.display(), "cannot remove the directory of the extraction");
        }
    }
}

/// Removes what killed processes left in `path` (EXTRACT-2); what cannot be looked at is left.
pub(crate) fn sweep(path: &Path) {
    let target = rustix::fs::openat(CWD, path, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    let Ok(target) = target else { return };
    let own = nix::unistd::geteuid().as_raw();
    for name in names(&target).unwrap_or_default() {
        let random = name.strip_prefix(PREFIX.as_bytes());
        if !random.is_some_and(|random| random.len() == DIGITS && random.iter().all(u8::is_ascii_hexdigit)) {
            continue;
        }
        let Ok(left) = rustix::fs::openat(&target, &name[..], DIRECTORY, Mode::empty()) else { continue };
        if !rustix::fs::fstat(&left).is_ok_and(|stat| stat.st_uid == own)
            || same_mount(&target, &left).is_err()
            || rustix::fs::flock(&left, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            continue;
        }
        let shown = path.join(display(&name));
        let path = shown.display();
        if !rustix::fs::fstat(&target).is_ok_and(|stat| only_we_rename(&stat)) {
            tracing::warn!(%path, "an earlier extraction may have left this; others can rename there, so remove it yourself");
        } else if let Err(errno) = remove(&target, &name, &left) {
            tracing::warn!(%errno, %path, "cannot remove what an earlier extraction left");
        }
    }
}

/// Whether nobody else can give the name of a directory of ours to another one (the group's bits include what access lists allow).
fn only_we_rename(directory: &Stat) -> bool {
    let (own, root) = (nix::unistd::geteuid().as_raw(), 0);
    let others_write = directory.st_mode & 0o022 != 0 && directory.st_mode & 0o1000 == 0;
    (directory.st_uid == own || directory.st_uid == root) && !others_write
}

/// Removes the directory with all that is in it, and its name in `at` if it still is its own.
fn remove(at: &OwnedFd, name: &[u8], directory: &OwnedFd) -> rustix::io::Result<()> {
    clear(directory)?;
    match is_named(at, name, directory) {
        true => rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR),
        false => Ok(()),
    }
}

/// Removes everything in a directory. Directories in directories are moved up first, so that the depth of a tree does not matter.
fn clear(directory: &OwnedFd) -> rustix::io::Result<()> {
    let mut moved = 0u64;
    loop {
        let top = names(directory)?;
        if top.is_empty() {
            return Ok(());
        }
        for name in top.iter().filter_map(|name| unless_removed(directory, name).transpose()) {
            let name = name?;
            let below = enter(directory, name)?;
            for child in names(&below)? {
                let Some(child) = unless_removed(&below, &child)? else { continue };
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

/// Removes what is no directory; the name of one that is.
fn unless_removed<'a>(directory: &OwnedFd, name: &'a [u8]) -> rustix::io::Result<Option<&'a [u8]>> {
    match rustix::fs::unlinkat(directory, name, AtFlags::empty()) {
        Ok(()) => Ok(None),
        Err(Errno::ISDIR) => Ok(Some(name)),
        Err(errno) => Err(errno),
    }
}

/// Opens a directory that is to be removed; it may have a mode that keeps its owner out.
///
/// # Errors
/// `XDEV` for one on which something is mounted.
fn enter(at: &OwnedFd, name: &[u8]) -> rustix::io::Result<OwnedFd> {
    let directory = rustix::fs::openat(at, name, DIRECTORY | OFlags::PATH, Mode::empty())?;
    same_mount(at, &directory)?;
    if rustix::fs::fstat(&directory)?.st_mode & 0o700 != 0o700 {
        rustix::fs::chmod(descriptor_path(&directory), Mode::RWXU)?;
    }
    rustix::fs::openat(&directory, ".", DIRECTORY, Mode::empty())
}

/// Whether both are of one mount, which device numbers do not tell when a directory of the same file system is mounted.
fn same_mount(one: &OwnedFd, other: &OwnedFd) -> rustix::io::Result<()> {
    let mount = |of: &OwnedFd| {
        let found = rustix::fs::statx(of, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
        // A kernel that knows no ids of mounts (before 5.8) says 0.
        Ok((found.stx_dev_major, found.stx_dev_minor, found.stx_mnt_id))
    };
    if mount(one)? == mount(other)? { Ok(()) } else { Err(Errno::XDEV) }
}

/// What tells a file that was made from another one in its place.
pub(crate) fn identity_of(file: impl AsFd) -> Result<Identity> {
    Identity::of(file).map_err(host_error("cannot examine it"))
}

fn is_named(at: &OwnedFd, name: &[u8], file: &OwnedFd) -> bool {
    let named = rustix::fs::statat(at, name, AtFlags::SYMLINK_NOFOLLOW).map(|stat| Identity::from(&stat));
    named.is_ok_and(|named| Identity::of(file).is_ok_and(|opened| opened == named))
}

/// Opens a directory that has no entries; None for one that has.
fn open_empty(at: impl AsFd, name: &[u8]) -> rustix::io::Result<Option<OwnedFd>> {
    let directory = rustix::fs::openat(at, name, DIRECTORY, Mode::empty())?;
    for entry in Dir::read_from(&directory)? {
        if !matches!(entry?.file_name().to_bytes(), b"." | b"..") {
            return Ok(None);
        }
    }
    Ok(Some(directory))
}

fn exchanged() -> Error {
    Error::InUse("somebody put something else in its place".into())
}

/// Makes a directory and opens it (EXTRACT-1).
pub(crate) fn make_directory(at: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::mkdirat(&at, name, Mode::RWXU).map_err(host_error("cannot make the directory"))?;
    open_empty(at, name).map_err(host_error("cannot open the directory"))?.ok_or_else(exchanged)
}

/// Takes hold of a link or special file that was just made, without opening it (EXTRACT-1).
fn hold_made(at: impl AsFd, name: &[u8], kind: FileType) -> Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let made =
        rustix::fs::openat(at, name, flags, Mode::empty()).map_err(host_error("cannot look at what was made"))?;
    let stat = rustix::fs::fstat(&made).map_err(host_error("cannot look at what was made"))?;
    match FileType::from_raw_mode(stat.st_mode) == kind && stat.st_nlink == 1 {
        true => Ok(made),
        false => Err(exchanged()),
    }
}

/// Makes a symbolic link, whose target is asked for, or a special file, and takes hold of it.
pub(crate) fn make_special(
    at: impl AsFd,
    name: &[u8],
    attributes: &Attributes,
    target: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<OwnedFd> {
    let kind = FileType::from_raw_mode(attributes.mode);
    if kind == FileType::Symlink {
        rustix::fs::symlinkat(&target()?[..], &at, name).map_err(host_error("cannot make the link"))?;
    } else {
        let (major, minor) = split_device_number(attributes.rdev);
        let device = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(&at, name, kind, Mode::RUSR | Mode::WUSR, device)
            .map_err(host_error("cannot make the special file"))?;
    }
    hold_made(at, name, kind)
}

/// Opens the directory `name` of a directory, whichever it is.
pub(crate) fn open_directory(at: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::openat(at, name, DIRECTORY, Mode::empty()).map_err(host_error("cannot open the directory"))
}

/// Opens the directory at the end of `path`, part by part: EXTRACT-1 for each, and a path of any length.
fn open_below(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    let mut at = root.try_clone().map_err(|e| Error::io("cannot open the directory", e))?;
    for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
        at = open_directory(&at, name)?;
    }
    Ok(at)
}

/// Opens a directory that was made before, again (EXTRACT-1).
pub(crate) fn open_again(root: &OwnedFd, path: &[u8], made: Identity) -> Result<OwnedFd> {
    let directory = open_below(root, path)?;
    if identity_of(&directory)? == made { Ok(directory) } else { Err(exchanged()) }
}

/// Gives a file that was made before a further name (EXTRACT-1).
pub(crate) fn link_again(root: &OwnedFd, path: &[u8], made: Identity, at: &OwnedFd, name: &[u8]) -> Result<()> {
    let failed = host_error("cannot link");
    let (directory, file) = match path.iter().rposition(|&b| b == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&b""[..], path),
    };
    let directory = open_below(root, directory)?;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, file, flags, Mode::empty()).map_err(&failed)?;
    if identity_of(&file)? != made {
        return Err(exchanged());
    }
    rustix::fs::linkat(CWD, descriptor_path(&file), at, name, AtFlags::SYMLINK_FOLLOW).map_err(failed)
}

#[cfg(test)]
mod tests;
