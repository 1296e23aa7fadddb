//! The client half of the control socket: one question to one daemon, or the status of all.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{MAX_LINE, Request, Response, Status, directory};
use crate::error::{Error, Result};

/// A daemon answers a status request at once; one that does not is not worth waiting for.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);

/// Sends one request to a daemon and waits for the answer (one line of JSON each way).
///
/// # Errors
/// `Io` when nobody answers at `socket`, `Invalid` when the answer is not understood.
pub fn ask(socket: &Path, request: &Request) -> Result<Response> {
    let at = |what: &str| format!("{what} control socket: path={}", socket.display());
    let mut stream = UnixStream::connect(socket).map_err(|e| Error::io(at("connect to"), e))?;
    // Stop, Sync and Purge last as long as the work that they wait for.
    if matches!(request, Request::Status) {
        stream.set_read_timeout(Some(STATUS_TIMEOUT)).map_err(|e| Error::io(at("set up"), e))?;
    }
    let mut line = serde_json::to_vec(request).map_err(|e| Error::invalid(format!("control request: {e}")))?;
    line.push(b'\n');
    stream.write_all(&line).map_err(|e| Error::io(at("write to"), e))?;

    let mut answer = String::new();
    BufReader::new(stream.take(MAX_LINE)).read_line(&mut answer).map_err(|e| Error::io(at("read from"), e))?;
    if answer.is_empty() {
        return Err(Error::io(at("no answer on"), std::io::ErrorKind::UnexpectedEof.into()));
    }
    serde_json::from_str(&answer).map_err(|e| Error::invalid(format!("answer on control socket: {e}")))
}

/// Every daemon that answers in `runtime/lockbox`, with its socket; dead sockets are skipped.
pub fn running(runtime: &Path) -> Result<Vec<(PathBuf, Status)>> {
    let directory = directory(runtime);
    let listing = match directory.read_dir() {
        Ok(listing) => listing,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(format!("list {}", directory.display()), e)),
    };
    let mut found = Vec::new();
    for entry in listing {
        let socket = entry.map_err(|e| Error::io(format!("list {}", directory.display()), e))?.path();
        if socket.extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        if let Ok(Response::Status(status)) = ask(&socket, &Request::Status) {
            found.push((socket, status));
        }
    }
    found.sort_by(|a, b| a.1.mount_point.cmp(&b.1.mount_point));
    Ok(found)
}
