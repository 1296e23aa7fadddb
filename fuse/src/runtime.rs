//! Chooses the runtime directory, where control sockets live.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;

use lockbox::control::{self, Place};
use nix::unistd::geteuid;

use crate::exit::Failure;

/// Where daemons of this user may be; those of other users are not asked.
pub fn places() -> Vec<Place> {
    let user = geteuid().as_raw();
    let mut places = control::places(std::env::var_os("XDG_RUNTIME_DIR").as_deref(), user);
    places.retain(|place| place.owner == user);
    places
}

/// `$XDG_RUNTIME_DIR` when it is ours (su(1) and sudo(8) may keep that of another user), else `/run` for root, else `/tmp/lockbox-UID`, which must be ours alone.
pub fn directory() -> Result<PathBuf, Failure> {
    if let Some(path) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && path.is_absolute()
        && path.metadata().is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == geteuid().as_raw())
    {
        return Ok(path);
    }
    let uid = geteuid();
    if uid.is_root() {
        return Ok(PathBuf::from("/run"));
    }
    let path = PathBuf::from(format!("/tmp/lockbox-{uid}"));
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Failure::other(format!("cannot create {}: {e}", path.display())));
        }
        _ => {}
    }
    // Anybody may make a name in /tmp first: a directory of somebody else, or a link to one, is not taken.
    let metadata =
        fs::symlink_metadata(&path).map_err(|e| Failure::other(format!("cannot inspect {}: {e}", path.display())))?;
    if !metadata.is_dir() || metadata.uid() != uid.as_raw() || metadata.mode() & 0o077 != 0 {
        return Err(Failure::other(format!("{} is not a private directory of this user", path.display())));
    }
    Ok(path)
}
