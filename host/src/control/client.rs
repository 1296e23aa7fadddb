//! Client of the control socket: requests to one daemon, and the status of all daemons.

use std::io::{self, BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{UnixCredentials, getsockopt};
use nix::unistd::geteuid;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    sendmsg,
};
use serde::{Deserialize, Serialize};

use super::{ActionResult, MAX_DESCRIPTORS, MAX_LINE, Request, Response, RuntimeDir, SnapshotName, Status, directory};
use lockbox::error::{Error, Result, Timestamp};

/// Time within which a daemon accepts a connection, reads a request, and answers a status request.
/// Slower daemons are skipped.
const STATUS_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// Total time for all daemons of one runtime directory, so that another user cannot delay root's
/// commands for long.
const PLACE_TIMEOUT: Duration = Duration::from_secs(20);
/// A backup reads and writes everything: 10 TiB in this time at the usual speed of a disk.
const BACKUP_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Interval at which a waiting client calls `go_on`.
const LOOK: Duration = Duration::from_millis(200);
/// Time for another user's daemon to close its archive: mostly writing 256 MiB at the usual memory
/// limit.
const END_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for another user's daemon to erase free space: 100 GiB at the usual speed of a disk.
const ERASE_TIMEOUT: Duration = Duration::from_secs(600);

/// Sends one request to a daemon of the user `owner` and waits for the response. Nothing is sent to
/// a process of another user, and only a daemon of the caller's own user may take unlimited time.
///
/// # Errors
/// `Io` when no daemon answers at `socket` in time, `NotPermitted` when a process of another user
/// listens there, `Invalid` for a malformed response.
pub fn send_request(socket: &Path, owner: u32, request: &Request) -> Result<Response> {
    send_request_within(socket, owner, request, response_timeout(owner, request))
}

/// Returns the time limit of a response; `None` for no limit.
pub(super) fn response_timeout(owner: u32, request: &Request) -> Option<Duration> {
    match request {
        Request::Status => Some(STATUS_TIMEOUT),
        _ if owner == geteuid().as_raw() => None,
        Request::Stop { .. } => Some(END_TIMEOUT),
        Request::Sync | Request::Purge => Some(ERASE_TIMEOUT),
        Request::Backup { .. } => Some(BACKUP_TIMEOUT),
        // These wait for commits; a creation also waits until deleted files are reclaimed.
        Request::SnapshotCreate { .. }
        | Request::SnapshotList { .. }
        | Request::SnapshotHeld { .. }
        | Request::SnapshotRemove { .. }
        | Request::SnapshotDiff { .. }
        | Request::SnapshotRestore { .. } => Some(ERASE_TIMEOUT),
    }
}

/// Sends a request like [`send_request`], with an open file; `go_on` is called while the daemon
/// works.
///
/// # Errors
/// As [`send_request`]; that of `go_on`, which stops waiting for the response.
pub fn send_request_with_file(
    socket: &Path,
    owner: u32,
    request: &Request,
    file: BorrowedFd<'_>,
    go_on: &dyn Fn() -> Result<()>,
) -> Result<Response> {
    let connected = connect(socket, owner, request, &[file], response_timeout(owner, request), go_on);
    let answer = connected.and_then(|mut connection| connection.receive());
    // The error of `go_on` explains the aborted wait better than the I/O error.
    go_on().and(answer)
}

/// Sends a request like [`send_request`] to a daemon that sends several responses. `on_response` is
/// called with each one; it returns the result of a requested action, or ends the exchange. `go_on`
/// is called while the client waits.
///
/// # Errors
/// As [`send_request`]; errors of `on_response` and `go_on`, which close the connection.
pub fn exchange_messages<T>(
    socket: &Path,
    owner: u32,
    request: &Request,
    go_on: &dyn Fn() -> Result<()>,
    on_response: &mut dyn FnMut(Response) -> Result<ControlFlow<T, Option<ActionResult>>>,
) -> Result<T> {
    let mut talk = || {
        let mut conversation = connect(socket, owner, request, &[], response_timeout(owner, request), go_on)?;
        loop {
            match on_response(conversation.receive()?)? {
                ControlFlow::Continue(None) => {}
                ControlFlow::Continue(Some(carried)) => conversation.send(&carried)?,
                ControlFlow::Break(end) => return Ok(end),
            }
        }
    };
    let talked = talk();
    // The error of `go_on` explains the aborted wait better than the I/O error.
    go_on().and(talked)
}

pub(super) fn send_request_within(
    socket: &Path,
    owner: u32,
    request: &Request,
    limit: Option<Duration>,
) -> Result<Response> {
    connect(socket, owner, request, &[], limit, &|| Ok(()))?.receive()
}

/// Connection to a daemon after the request was sent.
pub(super) struct DaemonConnection<'a> {
    pub(super) reader: BufReader<DeadlineReader<'a>>,
    socket: &'a Path,
    limit: Option<Duration>,
    /// Process and user id of the listener.
    peer: UnixCredentials,
}

pub(super) fn connect<'a>(
    socket: &'a Path,
    owner: u32,
    request: &Request,
    files: &[BorrowedFd<'_>],
    limit: Option<Duration>,
    go_on: &'a dyn Fn() -> Result<()>,
) -> Result<DaemonConnection<'a>> {
    let at = |action: &str| format!("{action} control socket: path={}", socket.display());
    let address = SocketAddrUnix::new(socket).map_err(|e| Error::io(at("connect to"), e.into()))?;
    let patience = limit.map_or(STATUS_TIMEOUT, |limit| limit.min(STATUS_TIMEOUT));
    let mut stream = connect_within(&address, patience).map_err(|e| Error::io(at("connect to"), e))?;
    let peer = getsockopt(&stream, PeerCredentials).map_err(|e| Error::io(at("inspect"), e.into()))?;
    if owner != peer.uid() {
        return Err(Error::NotPermitted);
    }
    let until = limit.map(|limit| Instant::now() + limit);
    let line = encode_line(request)?;
    let sent = send_with_descriptors(&stream, &line, files).map_err(|e| Error::io(at("write to"), e))?;
    stream.write_all(&line[sent..]).map_err(|e| Error::io(at("write to"), e))?;
    let reader = BufReader::new(DeadlineReader { stream, until, go_on });
    Ok(DaemonConnection { reader, socket, limit, peer })
}

fn encode_line(what: &impl Serialize) -> Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what).map_err(|e| Error::invalid(format!("control request: {e}")))?;
    line.push(b'\n');
    // A daemon reads no longer lines.
    if line.len() as u64 > MAX_LINE {
        return Err(Error::invalid("too many names for one request to a mounted archive"));
    }
    Ok(line)
}

impl DaemonConnection<'_> {
    pub(super) fn receive(&mut self) -> Result<Response> {
        let at = |action: &str| format!("{action} control socket: path={}", self.socket.display());
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
        response.truncate_texts();
        if let Response::Status(status) = &mut response {
            status.uid = self.peer.uid();
            // A daemon outside our process namespace has no pid here; then its own is kept.
            if let Ok(pid @ 1..) = u32::try_from(self.peer.pid()) {
                status.pid = pid;
            }
        }
        Ok(response)
    }

    fn send(&mut self, what: &ActionResult) -> Result<()> {
        let failed = |e| Error::io(format!("write to control socket: path={}", self.socket.display()), e);
        self.reader.get_mut().stream.write_all(&encode_line(what)?).map_err(failed)
    }
}

/// Sends the beginning of `bytes`, with up to four descriptors attached to the first byte. Returns
/// the number of bytes sent.
///
/// # Errors
/// When the other end is gone.
pub fn send_with_descriptors(socket: &UnixStream, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::NOBUFS.into());
    }
    Ok(retry_on_intr(|| sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL))?)
}

/// Connects to a socket with a timeout, because a listener may accept no connections. The timeout
/// also applies to each later write.
///
/// # Errors
/// `WouldBlock` when the time has passed.
pub fn connect_within(address: &SocketAddrUnix, limit: Duration) -> io::Result<UnixStream> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_timeout(&socket, Timeout::Send, Some(limit))?;
    rustix::net::connect(&socket, address)?;
    Ok(socket.into())
}

/// Reader with a total deadline for slow peers, which stops when `go_on` fails.
pub(super) struct DeadlineReader<'a> {
    stream: UnixStream,
    pub(super) until: Option<Instant>,
    go_on: &'a dyn Fn() -> Result<()>,
}

impl Read for DeadlineReader<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            (self.go_on)().map_err(|_| io::Error::from(io::ErrorKind::ConnectionAborted))?;
            let remaining = self.until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
            if remaining.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.stream.set_read_timeout(Some(remaining.min(LOOK)))?;
            match self.stream.read(buffer) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                read => return read,
            }
        }
    }
}

/// Returns the status of every daemon that answers in `place`, with its socket, sorted by mount
/// point. Dead and foreign sockets are skipped.
///
/// The runtime directory of another user may be a hanging file system; it is therefore read on a
/// thread of its own.
pub fn list_daemons(place: &RuntimeDir) -> Result<Vec<(PathBuf, Status)>> {
    if place.owner == geteuid().as_raw() {
        return list_daemons_in(place);
    }
    let (sender, listed) = mpsc::channel();
    let (foreign, longest) = (place.clone(), PLACE_TIMEOUT + STATUS_TIMEOUT);
    thread::Builder::new()
        .name("place".into())
        .spawn(move || sender.send(list_daemons_in(&foreign)))
        .map_err(|e| Error::io("start a thread", e))?;
    listed.recv_timeout(longest).unwrap_or_else(|_| {
        Err(Error::io(format!("list {}", directory(&place.runtime).display()), io::ErrorKind::TimedOut.into()))
    })
}

fn list_daemons_in(place: &RuntimeDir) -> Result<Vec<(PathBuf, Status)>> {
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
        // A symbolic link could lead to the socket of another service.
        let is_socket = entry.file_type().is_ok_and(|kind| kind.is_socket());
        if !is_socket || socket.extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        if let Ok(Response::Status(status)) = send_request(&socket, place.owner, &Request::Status) {
            found.push((socket, *status));
        }
    }
    found.sort_by(|a, b| a.1.mount_point.cmp(&b.1.mount_point));
    Ok(found)
}

/// Snapshots per response: with names of 255 bytes they are 45 KiB.
pub const PAGE: usize = 64;
/// Maximum number of snapshots that a client reads: several for each hour of a year, and 20 MiB.
const MOST: usize = 65_536;
/// Maximum ranges of ids in a request: with 20 digits for each end they fit into one line.
const MOST_RANGES: usize = 1400;
/// Time for another user's daemon to list all snapshots.
const LIST_TIMEOUT: Duration = Duration::from_secs(60);

/// Snapshot as a daemon lists it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListedSnapshot {
    pub id: u64,
    pub name: SnapshotName,
    pub seconds: i64,
    pub nanos: u32,
    pub inodes: u64,
    /// `None` if not requested.
    pub held_bytes: Option<u64>,
}

impl ListedSnapshot {
    pub fn time(&self) -> Timestamp {
        Timestamp { seconds: self.seconds, nanos: self.nanos.min(999_999_999) }
    }
}

/// Fingerprint of the set of snapshots that a client chose from: the highest id and the number of
/// snapshots up to it. Ids are never reused, so an equal number means that none was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedSnapshots {
    pub up_to: u64,
    pub count: u64,
}

impl ExpectedSnapshots {
    /// Returns the fingerprint of ascending ids.
    pub fn of(ids: impl Iterator<Item = u64>) -> ExpectedSnapshots {
        ids.fold(ExpectedSnapshots { up_to: 0, count: 0 }, |among, id| ExpectedSnapshots {
            up_to: id,
            count: among.count + 1,
        })
    }

    /// Returns whether none of the set is missing among `ids`.
    pub fn is_whole(&self, ids: impl Iterator<Item = u64>) -> bool {
        ids.filter(|id| *id <= self.up_to).count() as u64 == self.count
    }
}

/// Returns all snapshots of a mounted archive, oldest first; with `held`, including the bytes that
/// each one holds.
///
/// # Errors
/// As [`super::send_request`]; `Invalid` when the daemon is too old for the request, refuses it, or
/// exceeds the bounds.
pub fn list_snapshots(socket: &Path, owner: u32, held: bool) -> Result<Vec<ListedSnapshot>> {
    let until = (owner != geteuid().as_raw()).then(|| Instant::now() + LIST_TIMEOUT);
    let mut all: Vec<ListedSnapshot> = Vec::new();
    loop {
        let after = all.last().map_or(0, |last| last.id);
        let remaining =
            until.map(|until| until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)));
        match send_request_within(socket, owner, &Request::SnapshotList { after, held }, remaining)? {
            Response::Snapshots { snapshots, more } => {
                if !append_page(&mut all, snapshots, more) {
                    return Err(Error::invalid("the daemon's list of snapshots has no end"));
                }
                if !more {
                    return Ok(all);
                }
            }
            other => return Err(Error::invalid(other.failure_message())),
        }
    }
}

/// Returns the bytes that removing the snapshots with ids in these inclusive `ranges` would free.
/// The time limit is `limit`, or that of [`super::send_request`].
///
/// # Errors
/// As [`super::send_request`]; `Invalid` when the daemon is too old for the request or refuses it,
/// and when the set does not fit into a request.
pub fn query_held_bytes(socket: &Path, owner: u32, ranges: Vec<(u64, u64)>, limit: Option<Duration>) -> Result<u64> {
    if ranges.len() > MOST_RANGES {
        return Err(Error::invalid(format!(
            "a daemon measures at most {MOST_RANGES} groups of neighbouring snapshots at once; name fewer snapshots"
        )));
    }
    let request = Request::SnapshotHeld { ranges };
    let limit = limit.or_else(|| response_timeout(owner, &request));
    match send_request_within(socket, owner, &request, limit)? {
        Response::Held { bytes } => Ok(bytes),
        other => Err(Error::invalid(other.failure_message())),
    }
}

/// Appends a page; returns whether it is valid as the next one.
fn append_page(all: &mut Vec<ListedSnapshot>, page: Vec<ListedSnapshot>, more: bool) -> bool {
    let mut last = all.last().map_or(0, |last| last.id);
    let rises = page.iter().all(|one| std::mem::replace(&mut last, one.id) < one.id);
    let follows = rises && page.len() <= PAGE && all.len() + page.len() <= MOST && (!more || !page.is_empty());
    all.extend(page);
    follows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::MAX_NAME;

    #[test]
    fn every_name_goes_and_comes() {
        let all: Vec<u8> = (1..=255).filter(|byte| *byte != b'/').collect();
        for name in [&b"monday"[..], b"\xff\n\"\\", "für dich".as_bytes(), &all, &[0xfe; 255]] {
            let line = serde_json::to_string(&SnapshotName(name.to_vec())).unwrap();
            assert!(line.len() <= 2 * name.len() + 2);
            assert_eq!(serde_json::from_str::<SnapshotName>(&line).unwrap().0, name);
        }
        for line in ["\"a\"", "\"zz\"", "\"é\"", "7", &format!("\"{}\"", "00".repeat(256))] {
            assert!(serde_json::from_str::<SnapshotName>(line).is_err(), "{line}");
        }
    }

    #[test]
    fn the_longest_page_fits_into_a_line() {
        let one = ListedSnapshot {
            id: u64::MAX,
            name: SnapshotName(vec![0xff; MAX_NAME]),
            seconds: i64::MIN,
            nanos: u32::MAX,
            inodes: u64::MAX,
            held_bytes: Some(u64::MAX),
        };
        let page = Response::Snapshots { snapshots: vec![one; PAGE], more: true };
        assert!((serde_json::to_vec(&page).unwrap().len() as u64) < MAX_LINE);
    }

    #[test]
    fn pages_that_do_not_rise_or_do_not_end_are_refused() {
        let page =
            |ids: &[u64]| ids.iter().map(|&id| ListedSnapshot { id, ..ListedSnapshot::default() }).collect::<Vec<_>>();
        let mut all = Vec::new();
        assert!(append_page(&mut all, page(&[1, 4]), true) && append_page(&mut all, page(&[5]), true));
        assert!(append_page(&mut all, page(&[]), false));
        assert!(!append_page(&mut all.clone(), page(&[]), true), "for ever");
        assert!(
            !append_page(&mut all.clone(), page(&[5]), true) && !append_page(&mut all.clone(), page(&[7, 6]), true)
        );
        assert!(!append_page(&mut all.clone(), page(&(6..80).collect::<Vec<_>>()), true), "too long a page");
        let mut full = page(&(1..=MOST as u64).collect::<Vec<_>>());
        assert!(!append_page(&mut full, page(&[1 << 20]), true), "too many");
    }

    #[test]
    fn the_longest_request_for_held_bytes_fits_into_a_line() {
        let longest = Request::SnapshotHeld { ranges: vec![(u64::MAX, u64::MAX); MOST_RANGES] };
        assert!((serde_json::to_vec(&longest).unwrap().len() as u64) < MAX_LINE);
    }

    #[test]
    fn what_a_choice_was_made_among_is_whole_while_none_of_it_is_gone() {
        let among = ExpectedSnapshots::of([2, 5, 9].into_iter());
        assert!(among.is_whole([2, 5, 9].into_iter()) && among.is_whole([2, 5, 9, 10].into_iter()));
        assert!(!among.is_whole([2, 9].into_iter()) && !among.is_whole([2, 5, 10].into_iter()));
        assert!(ExpectedSnapshots::of(std::iter::empty()).is_whole([1].into_iter()));
    }
}
