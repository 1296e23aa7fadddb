//! The server half of the control socket: a thread that accepts, and one short-lived thread per request.
//!
//! The socket is bound before the archive is mounted, and taken away by its directory's descriptor: the mount may lie over that directory.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::geteuid;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, fstat, openat, statat, unlinkat};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown};

use super::{Carried, MAX_LINE, NOT_UNDERSTOOD, Request, Response, SocketName, directory, socket_path};
use crate::error::{Error, Result};

/// A client writes its line at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How often somebody who waits looks whether to go on.
const LOOK: Duration = Duration::from_millis(200);
/// More connections at a time than any set of commands opens; beyond it new ones are dropped.
const MAX_CONNECTIONS: usize = 64;

/// A socket that waits for a daemon to answer; dropping it takes it away.
pub struct Listening {
    socket: Socket,
    listener: Arc<UnixListener>,
}

/// The open socket of a daemon. Dropping it takes the socket away.
pub struct Server {
    socket: Socket,
    listener: Arc<UnixListener>,
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

/// A name in the directory of sockets, which goes when this is dropped.
struct Socket {
    path: PathBuf,
    directory: OwnedFd,
    name: OsString,
    /// Device and inode of the socket as bound, so that a successor's socket is never removed.
    bound: (u64, u64),
}

impl Socket {
    fn identity(directory: &OwnedFd, name: &OsString) -> rustix::io::Result<(u64, u64)> {
        statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map(|found: Stat| (found.st_dev, found.st_ino))
    }

    fn remove(&self) {
        if Socket::identity(&self.directory, &self.name) == Ok(self.bound) {
            let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.remove();
    }
}

struct Shared {
    stopping: AtomicBool,
    connections: AtomicUsize,
    /// Requests that were read and not yet answered.
    unanswered: Mutex<usize>,
    answered: Condvar,
}

/// Listens on the socket of this name: who connects waits until it is served. A socket file that nobody answers on is replaced.
///
/// # Errors
/// `InUse` when a daemon answers on the socket, `NotPermitted` when the directory is not ours alone, `Io`.
pub fn listen(runtime: &Path, name: &SocketName) -> Result<Listening> {
    let directory = prepare_directory(&directory(runtime))?;
    let path = socket_path(runtime, name);
    let at = |what: &str| format!("{what} control socket: path={}", path.display());
    let name = path.file_name().unwrap_or_default().to_owned();
    let listener = Arc::new(bind(&path)?);
    fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(|e| Error::io(at("protect"), e))?;
    let bound = Socket::identity(&directory, &name).map_err(|e| Error::io(at("inspect"), e.into()))?;
    Ok(Listening { socket: Socket { path, directory, name, bound }, listener })
}

impl Listening {
    /// The directory that the socket lies in.
    pub fn directory(&self) -> &OwnedFd {
        &self.socket.directory
    }

    /// `handler` runs in a thread of its own for each request and may take its time.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub fn serve<H>(self, handler: H) -> Result<Server>
    where
        H: Fn(Request, Client) -> Response + Send + Sync + 'static,
    {
        let shared = Arc::new(Shared {
            stopping: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            unanswered: Mutex::new(0),
            answered: Condvar::new(),
        });
        let acceptor = {
            let (shared, listener) = (Arc::clone(&shared), Arc::clone(&self.listener));
            let handler: Arc<Handler> = Arc::new(handler);
            thread::Builder::new()
                .name("control".into())
                .spawn(move || accept(&listener, &shared, &handler))
                .map_err(|e| Error::io("start thread for control socket", e))?
        };
        Ok(Server { socket: self.socket, listener: self.listener, shared, acceptor: Some(acceptor) })
    }
}

type Handler = dyn Fn(Request, Client) -> Response + Send + Sync;

/// Who asks.
pub struct Client {
    stream: Option<UnixStream>,
    /// The file that came with the request.
    pub file: Option<OwnedFd>,
}

impl Client {
    /// Whether nobody waits for the answer any more.
    pub fn is_gone(&self) -> bool {
        let Some(stream) = &self.stream else { return false };
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(stream, &mut [0; 1], flags), Ok((_, 0)))
    }
}

fn line(what: &Response) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    if line.len() as u64 > MAX_LINE { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(line) }
}

fn not_told(error: io::Error) -> Error {
    tracing::debug!(%error, "a client was not told");
    Error::Interrupted(0)
}

impl Client {
    /// Says something before the answer.
    ///
    /// # Errors
    /// `Interrupted` when nobody listens, or what is said has no place.
    pub fn tell(&self, what: &Response) -> Result<()> {
        let told = line(what).and_then(|line| {
            let mut stream = self.stream.as_ref().ok_or(io::ErrorKind::NotConnected)?;
            stream.write_all(&line)
        });
        told.map_err(not_told)
    }

    /// The same to a client that may read slowly: it is waited for as long as `go_on` says so.
    ///
    /// # Errors
    /// As there, and that of `go_on`.
    pub fn tell_patiently(&self, what: &Response, go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        let line = line(what).map_err(not_told)?;
        let Some(mut stream) = self.stream.as_ref() else { return Err(Error::Interrupted(0)) };
        let mut left = &line[..];
        while !left.is_empty() {
            match stream.write(left) {
                Ok(count) => left = &left[count..],
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    go_on()?
                }
                Err(error) => return Err(not_told(error)),
            }
        }
        Ok(())
    }

    /// Has the client do something, and waits for `limit` until it has; `go_on` is asked meanwhile.
    ///
    /// # Errors
    /// That of the host, with what `said` says of it, when it could not; `Interrupted` when it is gone or says nothing in time; that of `go_on`.
    pub fn have_done(
        &self,
        what: &Response,
        said: &dyn Fn() -> String,
        limit: Duration,
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        self.tell(what)?;
        let Some(stream) = &self.stream else { return Err(Error::Interrupted(0)) };
        stream.set_read_timeout(Some(LOOK)).map_err(|_| Error::Interrupted(0))?;
        let until = Instant::now() + limit;
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            go_on()?;
            if Instant::now() > until || line.len() as u64 > MAX_LINE {
                return Err(Error::Interrupted(0));
            }
            let mut part = [0; 256];
            match (&*stream).read(&mut part) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Ok(0) | Err(_) => return Err(Error::Interrupted(0)),
                Ok(count) => line.extend_from_slice(&part[..count]),
            }
        }
        let carried: Carried = serde_json::from_slice(&line).map_err(|_| Error::Interrupted(0))?;
        match carried.errno {
            None => Ok(()),
            Some(errno) => Err(Error::io(said(), io::Error::from_raw_os_error(errno))),
        }
    }
}

impl Server {
    pub fn socket(&self) -> &Path {
        &self.socket.path
    }

    /// Takes the socket away, so that no new client comes; requests under way still get their answers.
    pub fn close(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.socket.remove();
        // Ends the wait in accept(2), also when somebody removed the socket.
        if rustix::net::shutdown(&self.listener, Shutdown::Both).is_ok() {
            let _ = acceptor.join();
        }
    }

    /// Waits until every request that was read has its answer.
    pub fn finish(mut self) {
        self.close();
        let mut unanswered = self.shared.unanswered.lock();
        while *unanswered > 0 {
            self.shared.answered.wait(&mut unanswered);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.close();
    }
}

/// Makes the directory, mode 0700, or verifies that it is ours alone: in a shared parent another user may have made it.
fn prepare_directory(path: &Path) -> Result<OwnedFd> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Error::io(format!("create {}", path.display()), e));
        }
        _ => {}
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = openat(CWD, path, flags, Mode::empty()).and_then(|opened| Ok((fstat(&opened)?, opened)));
    let (metadata, opened) = opened.map_err(|e| Error::io(format!("inspect {}", path.display()), e.into()))?;
    if metadata.st_uid != geteuid().as_raw() || metadata.st_mode & 0o077 != 0 {
        tracing::error!(path = %path.display(), "the runtime directory must be of mode 0700 and belong to this user");
        return Err(Error::NotPermitted);
    }
    Ok(opened)
}

fn bind(socket: &Path) -> Result<UnixListener> {
    for _ in 0..3 {
        match UnixListener::bind(socket) {
            Ok(listener) => return Ok(listener),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => {
                if UnixStream::connect(socket).is_ok() {
                    return Err(Error::InUse(format!("a daemon answers on {}", socket.display())));
                }
                let _ = fs::remove_file(socket);
            }
            Err(e) => return Err(Error::io(format!("bind control socket: path={}", socket.display()), e)),
        }
    }
    Err(Error::InUse(format!("another process keeps taking {}", socket.display())))
}

fn accept(listener: &UnixListener, shared: &Arc<Shared>, handler: &Arc<Handler>) {
    for stream in listener.incoming() {
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else {
            // Out of descriptors, most likely: give others time to close theirs.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if shared.connections.load(Ordering::SeqCst) >= MAX_CONNECTIONS {
            continue;
        }
        shared.connections.fetch_add(1, Ordering::SeqCst);
        let (for_thread, handler) = (Arc::clone(shared), Arc::clone(handler));
        let started = thread::Builder::new().name("control-request".into()).spawn(move || {
            if let Err(error) = answer(stream, &for_thread, &handler) {
                tracing::debug!(%error, "control connection failed");
            }
            for_thread.connections.fetch_sub(1, Ordering::SeqCst);
        });
        if started.is_err() {
            shared.connections.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// The line that a client sends, and the file that comes with it; what comes behind the line is none of ours.
fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let (mut line, mut file) = (Vec::new(), None);
    let mut part = [0; 4096];
    while (line.len() as u64) < MAX_LINE && !line.ends_with(b"\n") {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let slices = &mut [io::IoSliceMut::new(&mut part)];
        let received = rustix::net::recvmsg(stream, slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(files) = message {
                file = files.last().or(file);
            }
        }
        if received.bytes == 0 {
            break;
        }
        line.extend_from_slice(&part[..received.bytes]);
    }
    Ok((line, file))
}

fn answer(mut stream: UnixStream, shared: &Shared, handler: &Arc<Handler>) -> io::Result<()> {
    let peer = getsockopt(&stream, PeerCredentials)?.uid();
    if peer != 0 && peer != geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let (line, file) = receive(&stream)?;

    *shared.unanswered.lock() += 1;
    let response = match serde_json::from_slice::<Request>(&line) {
        Ok(request) => handler(request, Client { stream: stream.try_clone().ok(), file }),
        Err(e) => Response::Failed { message: format!("{NOT_UNDERSTOOD}: {e}") },
    };
    let written = serde_json::to_vec(&response).map_err(io::Error::from).and_then(|mut bytes| {
        bytes.push(b'\n');
        stream.write_all(&bytes)
    });
    *shared.unanswered.lock() -= 1;
    shared.answered.notify_all();
    written
}
