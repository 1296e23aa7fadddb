//! Carries HTTP over a Unix socket, for the client library that knows TCP and TLS, after a look at
//! the user that listens there.
//!
//! # Accepted listeners
//! A request carries the owner token, or the proof of a link. The path of a socket is remembered
//! for as long as a share lives, and longer than the socket: /tmp is emptied, and another user may
//! make the name again. So the kernel is asked for the user of the process at the other end
//! (SO_PEERCRED) before a byte is sent. It is sent to
//!
//! 1. this user and root;
//! 2. the user noted when this user named the socket, and to no other one there;
//! 3. where none is noted, the user that root gave the socket's directory to, as a service manager
//!    does: below directories that belong to root and in which no other user makes names, there is
//!    no other process that could have put its socket there. Links count as another user's, root's
//!    links too.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport, time};

/// Connects to the socket at a path and ignores the address of the request.
#[derive(Debug)]
pub(super) struct UnixConnector {
    pub(super) path: PathBuf,
    /// The user noted for the socket.
    pub(super) expected_uid: Option<u32>,
}

/// Returns the user that listens at a socket.
///
/// # Errors
/// When no process does.
pub fn listener_uid(path: &Path) -> io::Result<u32> {
    peer_uid(&UnixStream::connect(path)?)
}

fn peer_uid(stream: &UnixStream) -> io::Result<u32> {
    Ok(getsockopt(stream, PeerCredentials)?.uid())
}

/// Returns whether secrets may be sent to `user`, the listener at the socket.
pub fn is_trusted_listener(path: &Path, user: u32, expected_uid: Option<u32>) -> bool {
    [0, geteuid().as_raw()].contains(&user)
        || expected_uid.map_or_else(|| is_in_root_directory(path, user), |noted| noted == user)
}

/// Rule 3.
fn is_in_root_directory(path: &Path, user: u32) -> bool {
    let found = |path: &Path| fs::symlink_metadata(path).ok();
    let Some(directory) = path.parent().filter(|_| path.is_absolute()) else { return false };
    let is_theirs = found(path).is_some_and(|socket| socket.uid() == user);
    let is_closed = |directory: &Path, owners: &[u32]| {
        found(directory).is_some_and(|it| it.is_dir() && owners.contains(&it.uid()) && it.mode() & 0o022 == 0)
    };
    is_theirs && is_closed(directory, &[0, user]) && directory.ancestors().skip(1).all(|above| is_closed(above, &[0]))
}

impl<In: Transport> Connector<In> for UnixConnector {
    type Out = UnixTransport;

    fn connect(&self, details: &ConnectionDetails, _: Option<In>) -> Result<Option<UnixTransport>, ureq::Error> {
        let stream = UnixStream::connect(&self.path)?;
        let user = peer_uid(&stream)?;
        if !is_trusted_listener(&self.path, user, self.expected_uid) {
            let or_noted =
                self.expected_uid.map_or_else(String::new, |noted| format!(", nor user {noted}, the earlier listener"));
            let why = format!(
                "user {user} listens there, neither this user nor root{or_noted}; naming the socket with --socket trusts its user, unless one is noted"
            );
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why).into());
        }
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(UnixTransport { stream, buffers }))
    }
}

#[derive(Debug)]
pub(super) struct UnixTransport {
    stream: UnixStream,
    buffers: LazyBuffers,
}

fn to_duration(timeout: NextTimeout) -> Option<Duration> {
    timeout.not_zero().map(|left: time::Duration| *left)
}

/// Maps a socket time-out to the error kind that the library expects.
fn timeout_or_failure(error: io::Error, timeout: NextTimeout) -> ureq::Error {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ureq::Error::Timeout(timeout.reason),
        _ => ureq::Error::Io(error),
    }
}

impl Transport for UnixTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), ureq::Error> {
        let timeout = timeout.for_write();
        self.stream.set_write_timeout(to_duration(timeout))?;
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output).map_err(|error| timeout_or_failure(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, ureq::Error> {
        let timeout = timeout.for_read();
        self.stream.set_read_timeout(to_duration(timeout))?;
        let amount = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(|error| timeout_or_failure(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    fn is_open(&mut self) -> bool {
        // Between two requests nothing may be there to read, not even the end.
        let silent = |stream: &UnixStream| -> io::Result<bool> {
            stream.set_nonblocking(true)?;
            let heard = (&*stream).read(&mut [0]);
            stream.set_nonblocking(false)?;
            Ok(heard.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock))
        };
        silent(&self.stream).unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, chown, symlink};
    use std::os::unix::net::UnixListener;

    use super::*;

    const OTHER: u32 = 1234;

    #[test]
    fn a_socket_of_another_user_gets_no_secret_unless_that_user_is_noted_or_root_put_it_there() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().canonicalize().unwrap().join("x.sock");
        let _listening = UnixListener::bind(&path).unwrap();
        let own = geteuid().as_raw();
        assert_eq!(listener_uid(&path).unwrap(), own);
        assert!(
            is_trusted_listener(&path, own, None)
                && is_trusted_listener(&path, 0, None)
                && is_trusted_listener(&path, own, Some(OTHER))
        );
        let other = own + OTHER;
        assert!(!is_trusted_listener(&path, other, None) && !is_trusted_listener(&path, other, Some(other + 1)));
        assert!(is_trusted_listener(&path, other, Some(other)));
    }

    #[test]
    fn what_root_gave_to_a_user_is_told_from_what_that_user_made() {
        if !geteuid().is_root() {
            println!("not tested: only root gives directories away");
            return;
        }
        // Not in /tmp, where every user makes names.
        let place = tempfile::tempdir_in("/run").unwrap();
        let set_mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        set_mode(place.path(), 0o755);
        let given = place.path().join("given");
        fs::create_dir(&given).unwrap();
        let path = given.join("x.sock");
        let _listening = UnixListener::bind(&path).unwrap();
        for path in [&given, &path] {
            chown(path, Some(OTHER), None).unwrap();
        }
        assert!(is_trusted_listener(&path, OTHER, None), "as a service manager does");
        assert!(!is_trusted_listener(&path, OTHER + 1, None), "another one at the same path");
        // Root's own link leads to what a user made elsewhere.
        let link = place.path().join("link");
        symlink(&given, &link).unwrap();
        assert!(!is_trusted_listener(&link.join("x.sock"), OTHER, None));
        // As /tmp: sticky, and open to all.
        set_mode(place.path(), 0o1777);
        assert!(!is_trusted_listener(&path, OTHER, None));
        set_mode(place.path(), 0o755);
        set_mode(&given, 0o777);
        assert!(!is_trusted_listener(&path, OTHER, None));
    }
}
