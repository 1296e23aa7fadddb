//! The client half of the control socket: one question to one daemon, or the status of all.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::libc::pid_t;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use nix::unistd::geteuid;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::Serialize;

use super::{Carried, MAX_LINE, Place, Request, Response, Status, directory};
use crate::error::{Error, Result};

/// A daemon answers a status request at once; one that does not is not worth waiting for. It takes a connection and a request as soon.
const STATUS_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// What the daemons of one place may take together, so that nobody can keep root's questions waiting for long.
const PLACE_TIMEOUT: Duration = Duration::from_secs(20);
/// It reads and writes as much as there is, 10 TiB in this time at a usual disk's speed.
const BACKUP_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// How often somebody who waits looks whether to go on.
const LOOK: Duration = Duration::from_millis(200);
/// Another user's daemon that ends closes an archive, most of which is writing 256 MiB at a usual size of its memory.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// Another user's daemon that erases overwrites what is free, 100 GiB at a usual disk's speed.
const ERASE_TIMEOUT: Duration = Duration::from_secs(600);

/// Sends one request to a daemon of the user `owner` and waits for the answer (one line of JSON each way). Nothing is said to a process
/// of somebody else, and only a daemon of this process's user may take as long as its work lasts.
///
/// # Errors
/// `Io` when nobody answers at `socket` in time, `NotPermitted` when somebody else listens there, `Invalid` when the answer is not understood.
pub fn ask(socket: &Path, owner: u32, request: &Request) -> Result<Response> {
    ask_within(socket, owner, request, patience(owner, request))
}

/// How long the answer may take; None for as long as the daemon works.
pub(super) fn patience(owner: u32, request: &Request) -> Option<Duration> {
    match request {
        Request::Status => Some(STATUS_TIMEOUT),
        _ if owner == geteuid().as_raw() => None,
        Request::Stop { .. } => Some(END_TIMEOUT),
        Request::Sync | Request::Purge => Some(ERASE_TIMEOUT),
        Request::Backup { .. } => Some(BACKUP_TIMEOUT),
        // They wait for commits, and a creation for what is left of deleted files to be reclaimed.
        Request::SnapshotCreate { .. }
        | Request::SnapshotList { .. }
        | Request::SnapshotHeld { .. }
        | Request::SnapshotRemove { .. }
        | Request::SnapshotDiff { .. }
        | Request::SnapshotRestore { .. } => Some(ERASE_TIMEOUT),
    }
}

/// As [`ask`], with an open file for the daemon; `go_on` is asked while it works.
///
/// # Errors
/// As [`ask`]; that of `go_on`, after which nobody waits for the answer.
pub fn ask_with_file(
    socket: &Path,
    owner: u32,
    request: &Request,
    file: BorrowedFd<'_>,
    go_on: &dyn Fn() -> Result<()>,
) -> Result<Response> {
    let answer = exchange(socket, owner, request, &[file], patience(owner, request), go_on);
    // What ended the wait says more than that it ended.
    go_on().and(answer)
}

/// As [`ask`] of a daemon that has more to say than one answer: `heard` is called with all that it says, and answers what it is told then, or ends this.
/// `go_on` is asked meanwhile.
///
/// # Errors
/// As [`ask`]; those of `heard` and `go_on`, after which the daemon knows that nobody listens.
pub fn converse<T>(
    socket: &Path,
    owner: u32,
    request: &Request,
    go_on: &dyn Fn() -> Result<()>,
    heard: &mut dyn FnMut(Response) -> Result<ControlFlow<T, Option<Carried>>>,
) -> Result<T> {
    let mut talk = || {
        let mut conversation = begin(socket, owner, request, &[], patience(owner, request), go_on)?;
        loop {
            match heard(conversation.hear()?)? {
                ControlFlow::Continue(None) => {}
                ControlFlow::Continue(Some(carried)) => conversation.say(&carried)?,
                ControlFlow::Break(end) => return Ok(end),
            }
        }
    };
    let talked = talk();
    // What ended the wait says more than that it ended.
    go_on().and(talked)
}

pub(super) fn ask_within(socket: &Path, owner: u32, request: &Request, limit: Option<Duration>) -> Result<Response> {
    exchange(socket, owner, request, &[], limit, &|| Ok(()))
}

fn exchange(
    socket: &Path,
    owner: u32,
    request: &Request,
    files: &[BorrowedFd<'_>],
    limit: Option<Duration>,
    go_on: &dyn Fn() -> Result<()>,
) -> Result<Response> {
    begin(socket, owner, request, files, limit, go_on)?.hear()
}

/// A connection over which a daemon was asked something.
pub(super) struct Conversation<'a> {
    pub(super) reader: BufReader<Patient<'a>>,
    socket: &'a Path,
    limit: Option<Duration>,
    /// Process and user that listen.
    peer: (pid_t, u32),
}

pub(super) fn begin<'a>(
    socket: &'a Path,
    owner: u32,
    request: &Request,
    files: &[BorrowedFd<'_>],
    limit: Option<Duration>,
    go_on: &'a dyn Fn() -> Result<()>,
) -> Result<Conversation<'a>> {
    let at = |what: &str| format!("{what} control socket: path={}", socket.display());
    let address = SocketAddrUnix::new(socket).map_err(|e| Error::io(at("connect to"), e.into()))?;
    let mut stream = connect_within(&address, STATUS_TIMEOUT).map_err(|e| Error::io(at("connect to"), e))?;
    let peer = getsockopt(&stream, PeerCredentials).map_err(|e| Error::io(at("inspect"), e.into()))?;
    if owner != peer.uid() {
        return Err(Error::NotPermitted);
    }
    let until = limit.map(|limit| Instant::now() + limit);
    let line = line_of(request)?;
    let sent = if files.is_empty() {
        0
    } else {
        send_with(&stream, &line, files).map_err(|e| Error::io(at("write to"), e.into()))?
    };
    stream.write_all(&line[sent..]).map_err(|e| Error::io(at("write to"), e))?;
    let reader = BufReader::new(Patient { stream, until, go_on });
    Ok(Conversation { reader, socket, limit, peer: (peer.pid(), peer.uid()) })
}

fn line_of(what: &impl Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what).map_err(|e| Error::invalid(format!("control request: {e}")))?;
    line.push(b'\n');
    // A daemon reads no more.
    if line.len() as u64 > MAX_LINE {
        return Err(Error::invalid("these are more names than a mounted archive is asked about at once"));
    }
    Ok(line)
}

impl Conversation<'_> {
    pub(super) fn hear(&mut self) -> Result<Response> {
        let at = |what: &str| format!("{what} control socket: path={}", self.socket.display());
        let mut answer = String::new();
        let read = self.reader.by_ref().take(MAX_LINE).read_line(&mut answer);
        read.map_err(|e| match (e.kind(), self.limit) {
            (io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut, Some(limit)) => {
                Error::io(format!("no answer within {} s on {}", limit.as_secs(), self.socket.display()), e)
            }
            _ => Error::io(at("read from"), e),
        })?;
        if answer.is_empty() {
            return Err(Error::io(at("no answer on"), io::ErrorKind::UnexpectedEof.into()));
        }
        let mut response: Response =
            serde_json::from_str(&answer).map_err(|e| Error::invalid(format!("answer on control socket: {e}")))?;
        response.shorten();
        if let Response::Status(status) = &mut response {
            vouch(status, self.peer.0, self.peer.1);
        }
        Ok(response)
    }

    fn say(&mut self, what: &Carried) -> Result<()> {
        let failed = |e| Error::io(format!("write to control socket: path={}", self.socket.display()), e);
        self.reader.get_mut().stream.write_all(&line_of(what)?).map_err(failed)
    }
}

/// Sends the beginning of a line, and files with its first byte; answers how much of it.
fn send_with(stream: &UnixStream, line: &[u8], files: &[BorrowedFd<'_>]) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(rustix::io::Errno::NOBUFS);
    }
    rustix::net::sendmsg(stream, &[io::IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)
}

/// Connects to a socket, but not for ever, as when the one who listens takes no connections. The limit stays that of each write.
///
/// # Errors
/// `WouldBlock` when the time is over.
pub fn connect_within(address: &SocketAddrUnix, limit: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    rustix::net::connect(&socket, address)?;
    Ok(socket.into())
}

/// Reads until a point in time, however slowly the bytes come, and as long as `go_on` says so.
pub(super) struct Patient<'a> {
    stream: UnixStream,
    pub(super) until: Option<Instant>,
    go_on: &'a dyn Fn() -> Result<()>,
}

impl Read for Patient<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            (self.go_on)().map_err(|_| io::Error::from(io::ErrorKind::ConnectionAborted))?;
            let left = self.until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(left.min(LOOK)))?;
            match self.stream.read(buffer) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                read => return read,
            }
        }
    }
}

/// The kernel knows who listens; a daemon outside of our process namespace has no number here but its own.
fn vouch(status: &mut Status, pid: pid_t, uid: u32) {
    status.uid = uid;
    if let Ok(pid @ 1..) = u32::try_from(pid) {
        status.pid = pid;
    }
}

/// Every daemon that answers at `place`, with its socket, by mount point; dead sockets and those of other users are skipped. A place of
/// another user may be a file system whose daemon never answers, so that nothing but a thread of its own is kept waiting there.
pub fn running(place: &Place) -> Result<Vec<(PathBuf, Status)>> {
    if place.owner == geteuid().as_raw() {
        return list(place);
    }
    let (sender, listed) = mpsc::channel();
    let (theirs, longest) = (place.clone(), PLACE_TIMEOUT + STATUS_TIMEOUT);
    thread::Builder::new()
        .name("place".into())
        .spawn(move || sender.send(list(&theirs)))
        .map_err(|e| Error::io("start a thread", e))?;
    listed.recv_timeout(longest).unwrap_or_else(|_| {
        Err(Error::io(format!("list {}", directory(&place.runtime).display()), io::ErrorKind::TimedOut.into()))
    })
}

fn list(place: &Place) -> Result<Vec<(PathBuf, Status)>> {
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
        if let Ok(Response::Status(status)) = ask(&socket, place.owner, &Request::Status) {
            found.push((socket, *status));
        }
    }
    found.sort_by(|a, b| a.1.mount_point.cmp(&b.1.mount_point));
    Ok(found)
}
