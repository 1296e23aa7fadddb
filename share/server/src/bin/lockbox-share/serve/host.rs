//! Host resources of the daemon: descriptors, processors, the runtime directory, the service
//! manager.

use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;

use lockbox_share::http::{LINGERING, LOCAL_CONNECTIONS};

/// Every connection takes a descriptor, and the usual soft limit is 1,024. How many there may be
/// now.
pub(super) fn raise_descriptors() -> usize {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return USUAL_DESCRIPTORS };
    let mut most = soft;
    if soft < hard {
        match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => most = hard,
            Err(error) => tracing::warn!(%error, "the limit of descriptors stays as it is"),
        }
    }
    usize::try_from(most).unwrap_or(usize::MAX)
}

/// Assumed limit when it cannot be read.
const USUAL_DESCRIPTORS: usize = 1024;
/// Descriptors not available to network connections: the Unix socket, refused connections
/// that linger, running downloads and uploads with their files, the store.
const BESIDE: usize = LOCAL_CONNECTIONS + LINGERING + 1024 + 64 + 256;

/// Connections of the network that leave descriptors to all else, so that no number of them keeps
/// the Unix socket from being served.
pub(super) fn connections_that_fit(wanted: usize, descriptors: usize) -> usize {
    wanted.min(descriptors.saturating_sub(BESIDE).max(descriptors / 2))
}

/// Closes inherited descriptors: they could keep a file, a pipe or a lock open for the daemon's
/// lifetime. Call it before anything is opened. A service manager passes only the three standard
/// descriptors and a name in `NOTIFY_SOCKET`.
pub(crate) fn close_inherited() {
    let most = std::fs::read_dir("/proc/self/fd").map_or_else(
        |_| (3..USUAL_DESCRIPTORS as i32).collect::<Vec<_>>(),
        |open| open.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect(),
    );
    for descriptor in most.into_iter().filter(|descriptor| *descriptor > 2) {
        // That of the listing itself is closed already.
        let _ = nix::unistd::close(descriptor);
    }
}

/// As many as this process may run on.
pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// `$XDG_RUNTIME_DIR`, else `/run` for root, else `/tmp/lockbox-UID`, which must be this user's
/// alone.
pub(crate) fn runtime_directory() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && path.is_absolute()
        && path.is_dir()
    {
        return Ok(path);
    }
    let uid = nix::unistd::geteuid();
    if uid.is_root() {
        return Ok(PathBuf::from("/run"));
    }
    let path = PathBuf::from(format!("/tmp/lockbox-{uid}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(format!("cannot create {}: {error}", path.display()));
        }
        _ => {}
    }
    // Anybody may make a name in /tmp first: a directory of somebody else, or a link to one, is not
    // taken.
    let metadata =
        std::fs::symlink_metadata(&path).map_err(|error| format!("cannot inspect {}: {error}", path.display()))?;
    if !metadata.is_dir() || metadata.uid() != uid.as_raw() || metadata.mode() & 0o077 != 0 {
        return Err(format!(
            "{} is not a private directory of this user: set XDG_RUNTIME_DIR to one, or name a socket with --unix-socket",
            path.display()
        ));
    }
    Ok(path)
}

/// Tells the service manager, when there is one.
pub(super) fn notify(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(rest) => SocketAddr::from_abstract_name(rest),
        None => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_leave_descriptors_to_all_else() {
        assert_eq!(connections_that_fit(20_000, 524_288), 20_000);
        assert_eq!(connections_that_fit(20_000, 20_000), 20_000 - BESIDE);
        assert_eq!(connections_that_fit(20_000, 4096), 2048);
        assert_eq!(connections_that_fit(8, 96), 8);
    }
}
