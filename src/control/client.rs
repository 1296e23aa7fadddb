//! The client half of the control socket: one question to one daemon, or the status of all.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::libc::pid_t;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::{MAX_LINE, Place, Request, Response, Status, directory};
use crate::error::{Error, Result};

/// A daemon answers a status request at once; one that does not is not worth waiting for.
const STATUS_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 5 });
/// What the daemons of one place may take together, so that nobody can keep root's questions waiting for long.
const PLACE_TIMEOUT: Duration = Duration::from_secs(20);

/// Sends one request to a daemon and waits for the answer (one line of JSON each way).
///
/// # Errors
/// `Io` when nobody answers at `socket`, `Invalid` when the answer is not understood.
pub fn ask(socket: &Path, request: &Request) -> Result<Response> {
    ask_of(socket, request, None)
}

/// Nothing is said to a process of another user than `owner`.
fn ask_of(socket: &Path, request: &Request, owner: Option<u32>) -> Result<Response> {
    let at = |what: &str| format!("{what} control socket: path={}", socket.display());
    let mut stream = UnixStream::connect(socket).map_err(|e| Error::io(at("connect to"), e))?;
    let peer = getsockopt(&stream, PeerCredentials).map_err(|e| Error::io(at("inspect"), e.into()))?;
    if owner.is_some_and(|owner| owner != peer.uid()) {
        return Err(Error::NotPermitted);
    }
    // Stop, Sync and Purge last as long as the work that they wait for.
    let until = matches!(request, Request::Status).then(|| Instant::now() + STATUS_TIMEOUT);
    let mut line = serde_json::to_vec(request).map_err(|e| Error::invalid(format!("control request: {e}")))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(|e| Error::io(at("write to"), e))?;

    let mut answer = String::new();
    BufReader::new(Patient { stream, until }.take(MAX_LINE))
        .read_line(&mut answer)
        .map_err(|e| Error::io(at("read from"), e))?;
    if answer.is_empty() {
        return Err(Error::io(at("no answer on"), io::ErrorKind::UnexpectedEof.into()));
    }
    let mut response =
        serde_json::from_str(&answer).map_err(|e| Error::invalid(format!("answer on control socket: {e}")))?;
    if let Response::Status(status) = &mut response {
        vouch(status, peer.pid(), peer.uid());
    }
    Ok(response)
}

/// Reads until a point in time, however slowly the bytes come.
struct Patient {
    stream: UnixStream,
    until: Option<Instant>,
}

impl Read for Patient {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if let Some(until) = self.until {
            let left = until.saturating_duration_since(Instant::now());
            self.stream.set_read_timeout(Some(left)).map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?;
        }
        self.stream.read(buffer)
    }
}

/// The kernel knows who listens; a daemon outside of our process namespace has no number here but its own.
fn vouch(status: &mut Status, pid: pid_t, uid: u32) {
    status.uid = uid;
    if let Ok(pid @ 1..) = u32::try_from(pid) {
        status.pid = pid;
    }
}

/// Every daemon that answers at `place`, with its socket, by mount point; dead sockets and those of other users are skipped.
pub fn running(place: &Place) -> Result<Vec<(PathBuf, Status)>> {
    let directory = directory(&place.runtime);
    let listing = match directory.read_dir() {
        Ok(listing) => listing,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(format!("list {}", directory.display()), e)),
    };
    let mut found = Vec::new();
    if !place.is_genuine(&directory) {
        return Ok(found);
    }
    let began = Instant::now();
    for entry in listing {
        if began.elapsed() > PLACE_TIMEOUT {
            break;
        }
        let entry = entry.map_err(|e| Error::io(format!("list {}", directory.display()), e))?;
        let socket = entry.path();
        // A link could lead to the socket of another service.
        let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
        if !is_socket || socket.extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        if let Ok(Response::Status(status)) = ask_of(&socket, &Request::Status, Some(place.owner)) {
            found.push((socket, *status));
        }
    }
    found.sort_by(|a, b| a.1.mount_point.cmp(&b.1.mount_point));
    Ok(found)
}
