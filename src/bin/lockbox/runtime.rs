//! The runtime directory, where the sockets of mounted archives are, and who holds an archive.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use lockbox::control::{self, Request, Response, Status};
use nix::unistd::geteuid;

/// `$XDG_RUNTIME_DIR`, else `/run` for root, else `/tmp/lockbox-UID` when it is this user's alone. None when there is none yet.
pub(crate) fn directory() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && path.is_absolute()
        && path.is_dir()
    {
        return Some(path);
    }
    let uid = geteuid();
    if uid.is_root() {
        return Some(PathBuf::from("/run"));
    }
    let path = PathBuf::from(format!("/tmp/lockbox-{uid}"));
    // Anybody may make a name in /tmp first.
    let metadata = fs::symlink_metadata(&path).ok()?;
    let private = metadata.is_dir() && metadata.uid() == uid.as_raw() && metadata.mode() & 0o077 == 0;
    private.then_some(path)
}

/// The daemon that serves the archive with this id.
pub(crate) fn holder(archive: &[u8; 16]) -> Option<Status> {
    let socket = control::socket_path(&directory()?, archive);
    match control::ask(&socket, &Request::Status) {
        Ok(Response::Status(status)) => Some(status),
        _ => None,
    }
}

/// The path as a daemon that was started elsewhere knows it. The last part is not looked at: it may be a mount whose daemon is dead.
pub(crate) fn canonical(path: &Path) -> PathBuf {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => match parent.canonicalize() {
            Ok(parent) => parent.join(name),
            Err(_) => absolute,
        },
        _ => absolute,
    }
}
