//! The private directory beside an extraction's target, in which everything is made before it is renamed into place.
//!
//! # Invariants
//! Y1  Everything in it was made by this process: so no symbolic link of somebody else is on any path within, and every directory
//!     is entered by descriptor and without following links, so that none of the archive's own is followed either.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::host::host_error;
use crate::env::Environment;
use crate::error::{Error, Result};

/// Opens a directory and never what a symbolic link points to.
const DIRECTORY: OFlags = OFlags::DIRECTORY.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// Removed with all its content when dropped.
pub(super) struct Stage {
    target: OwnedFd,
    path: PathBuf,
    directory: OwnedFd,
}

impl Stage {
    /// Makes the stage in `target`, which is made when it is missing.
    pub(super) fn new(target: &Path, environment: &dyn Environment) -> Result<Stage> {
        let cannot = |e| Error::io(format!("cannot create {}", target.display()), e);
        fs::create_dir_all(target).map_err(cannot)?;
        let failed = |errno: Errno| Error::io(format!("cannot write to {}", target.display()), errno.into());
        // The target itself may well be a link: the user named it.
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, target, flags, Mode::empty()).map_err(failed)?;
        let mut random = [0; 8];
        environment.fill_random(&mut random)?;
        let name = format!(".lockbox-extract-{:016x}", u64::from_le_bytes(random));
        rustix::fs::mkdirat(&directory, &name, Mode::RWXU).map_err(failed)?;
        let path = target.join(&name);
        match rustix::fs::openat(&directory, &name, DIRECTORY, Mode::empty()) {
            Ok(stage) => {
                // Copies bring their own permissions, so nothing made here is to inherit any. Without a list there is nothing to remove.
                let _ = rustix::fs::fremovexattr(&stage, "system.posix_acl_default");
                Ok(Stage { target: directory, path, directory: stage })
            }
            Err(errno) => {
                // Nothing is in it yet.
                let _ = fs::remove_dir(&path);
                Err(failed(errno))
            }
        }
    }

    pub(super) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    pub(super) fn target(&self) -> &OwnedFd {
        &self.target
    }

    /// Whether the target has something of this name.
    pub(super) fn occupied(&self, name: &[u8]) -> Result<bool> {
        match rustix::fs::statat(&self.target, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Ok(true),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(host_error("cannot look into the target")(errno)),
        }
    }

    /// Renames a finished item into the target. With `replace`, as rename(2) does: a file takes a file's place, a directory only that of
    /// an empty one.
    pub(super) fn install(&self, name: &[u8], replace: bool) -> Result<()> {
        let from = &self.directory;
        let done = if replace {
            rustix::fs::renameat(from, name, &self.target, name)
        } else {
            match rustix::fs::renameat_with(from, name, &self.target, name, RenameFlags::NOREPLACE) {
                // A host file system that cannot promise it: looked at first, which leaves a moment's gap.
                Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => match self.occupied(name)? {
                    true => Err(Errno::EXIST),
                    false => rustix::fs::renameat(from, name, &self.target, name),
                },
                other => other,
            }
        };
        done.map_err(|errno| match errno {
            Errno::EXIST if !replace => Error::Exists,
            Errno::NOTEMPTY | Errno::EXIST => Error::NotEmpty,
            Errno::ISDIR => Error::IsDirectory,
            Errno::NOTDIR => Error::NotDirectory,
            errno => host_error("cannot move it into place")(errno),
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // The standard library removes by descriptor and does not follow links.
        if let Err(error) = fs::remove_dir_all(&self.path) {
            tracing::warn!(%error, path = %self.path.display(), "cannot remove the directory of the extraction");
        }
    }
}

/// Opens the directory `name` of a directory.
pub(super) fn open_directory(at: impl AsFd, name: &[u8]) -> Result<OwnedFd> {
    rustix::fs::openat(at, name, DIRECTORY, Mode::empty()).map_err(host_error("cannot open the directory"))
}

/// Opens the directory at the end of `path`, part by part: Y1 for each, and a path of any length.
pub(super) fn open_below(root: &OwnedFd, path: &[u8]) -> Result<OwnedFd> {
    let mut at = root.try_clone().map_err(|e| Error::io("cannot open the directory", e))?;
    for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
        at = open_directory(&at, name)?;
    }
    Ok(at)
}
