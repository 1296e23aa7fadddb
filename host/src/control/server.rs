//! Server of the control socket: an accept thread, and one short-lived thread for each request.
//!
//! The socket is bound before the archive is mounted, and removed through the descriptor of its
//! directory, because the mount may cover that directory.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::geteuid;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, fstat, openat, statat, unlinkat};
use rustix::io::retry_on_intr;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, Shutdown, recvmsg};

use super::{
    ActionResult, MAX_DESCRIPTORS, MAX_LINE, NOT_UNDERSTOOD, Request, Response, SocketName, directory, socket_path,
};
use lockbox::error::{Error, Result};

/// Time for a client to send its line.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// Interval at which a waiting server calls `go_on`.
const LOOK: Duration = Duration::from_millis(200);
/// Maximum concurrent connections: more than any set of commands opens. Further ones are dropped.
const MAX_CONNECTIONS: usize = 64;

/// Bound socket that does not accept connections yet. Removed on drop.
pub struct ControlListener {
    socket: BoundSocket,
    listener: Arc<UnixListener>,
}

/// Running control server of a daemon. Dropping it removes the socket.
pub struct ControlServer {
    socket: BoundSocket,
    listener: Arc<UnixListener>,
    shared: Arc<ServerState>,
    acceptor: Option<JoinHandle<()>>,
}

/// Directory entry of the socket, removed on drop.
struct BoundSocket {
    directory: OwnedFd,
    name: OsString,
    /// Device and inode of the socket as bound, so that a successor's socket is never removed.
    bound: (u64, u64),
}

impl BoundSocket {
    fn identity(directory: &OwnedFd, name: &OsString) -> rustix::io::Result<(u64, u64)> {
        statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).map(|found: Stat| (found.st_dev, found.st_ino))
    }

    fn remove(&self) {
        if BoundSocket::identity(&self.directory, &self.name) == Ok(self.bound) {
            let _ = unlinkat(&self.directory, &self.name, AtFlags::empty());
        }
    }
}

impl Drop for BoundSocket {
    fn drop(&mut self) {
        self.remove();
    }
}

#[derive(Default)]
struct ServerState {
    stopping: AtomicBool,
    connections: AtomicUsize,
    /// Requests that were read and not yet answered.
    unanswered: Mutex<usize>,
    answered: Condvar,
}

/// Binds the socket of this name and listens; connections wait until they are served. A stale
/// socket file is replaced.
///
/// # Errors
/// `InUse` when a daemon answers on the socket, `NotPermitted` when other users can access the
/// directory, `Io`.
pub fn listen(runtime: &Path, name: &SocketName) -> Result<ControlListener> {
    let directory = prepare_directory(&directory(runtime))?;
    let path = socket_path(runtime, name);
    let at = |action: &str| format!("{action} control socket: path={}", path.display());
    let name = path.file_name().unwrap_or_default().to_owned();
    let listener = Arc::new(bind(&path)?);
    fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(|e| Error::io(at("protect"), e))?;
    let bound = BoundSocket::identity(&directory, &name).map_err(|e| Error::io(at("inspect"), e.into()))?;
    Ok(ControlListener { socket: BoundSocket { directory, name, bound }, listener })
}

impl ControlListener {
    /// Returns the directory that contains the socket.
    pub fn directory(&self) -> &OwnedFd {
        &self.socket.directory
    }

    /// Starts to serve. `handler` runs on a thread of its own for each request and may block.
    ///
    /// # Errors
    /// Failure to start a thread.
    pub fn serve<H>(self, handler: H) -> Result<ControlServer>
    where
        H: Fn(Request, ClientConnection) -> Response + Send + Sync + 'static,
    {
        let shared = Arc::<ServerState>::default();
        let acceptor = {
            let (shared, listener) = (Arc::clone(&shared), Arc::clone(&self.listener));
            let handler: Arc<Handler> = Arc::new(handler);
            thread::Builder::new()
                .name("control".into())
                .spawn(move || accept(&listener, &shared, &handler))
                .map_err(|e| Error::io("start thread for control socket", e))?
        };
        Ok(ControlServer { socket: self.socket, listener: self.listener, shared, acceptor: Some(acceptor) })
    }
}

type Handler = dyn Fn(Request, ClientConnection) -> Response + Send + Sync;

/// Connection of the client that sent a request.
pub struct ClientConnection {
    stream: Arc<UnixStream>,
    /// File attached to the request.
    pub file: Option<OwnedFd>,
}

fn line(what: &Response) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    if line.len() as u64 > MAX_LINE { Err(io::ErrorKind::InvalidInput.into()) } else { Ok(line) }
}

fn send_failure(error: io::Error) -> Error {
    tracing::debug!(%error, "a client was not told");
    Error::Interrupted(0)
}

impl ClientConnection {
    /// Returns whether the client has disconnected.
    pub fn is_gone(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        matches!(rustix::net::recv(&self.stream, &mut [0; 1], flags), Ok((_, 0)))
    }

    /// Sends a response before the final one.
    ///
    /// # Errors
    /// `Interrupted` when the client has disconnected, or the response is too long.
    pub fn send(&self, what: &Response) -> Result<()> {
        line(what).and_then(|line| (&*self.stream).write_all(&line)).map_err(send_failure)
    }

    /// Sends a response like [`Self::send`] to a slow reader, and calls `go_on` while it waits.
    ///
    /// # Errors
    /// As [`Self::send`], and that of `go_on`.
    pub fn send_interruptible(&self, what: &Response, go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        let line = line(what).map_err(send_failure)?;
        let mut unsent = &line[..];
        while !unsent.is_empty() {
            match (&*self.stream).write(unsent) {
                Ok(count) => unsent = &unsent[count..],
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    go_on()?
                }
                Err(error) => return Err(send_failure(error)),
            }
        }
        Ok(())
    }

    /// Requests an action from the client and waits up to `limit` for its result; `go_on` is called
    /// while it waits.
    ///
    /// # Errors
    /// The client's I/O error with the context of `said`; `Interrupted` when the client has
    /// disconnected or does not answer in time; that of `go_on`.
    pub fn request_action(
        &self,
        what: &Response,
        said: &dyn Fn() -> String,
        limit: Duration,
        go_on: &dyn Fn() -> Result<()>,
    ) -> Result<()> {
        self.send(what)?;
        self.stream.set_read_timeout(Some(LOOK)).map_err(|_| Error::Interrupted(0))?;
        let until = Instant::now() + limit;
        let mut line = Vec::new();
        while !line.ends_with(b"\n") {
            go_on()?;
            if Instant::now() > until || line.len() as u64 > MAX_LINE {
                return Err(Error::Interrupted(0));
            }
            let mut part = [0; 256];
            match (&*self.stream).read(&mut part) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Ok(0) | Err(_) => return Err(Error::Interrupted(0)),
                Ok(count) => line.extend_from_slice(&part[..count]),
            }
        }
        let carried: ActionResult = serde_json::from_slice(&line).map_err(|_| Error::Interrupted(0))?;
        match carried.errno {
            None => Ok(()),
            Some(errno) => Err(Error::io(said(), io::Error::from_raw_os_error(errno))),
        }
    }
}

impl ControlServer {
    /// Removes the socket, so that no new client connects; requests in progress are still answered.
    pub fn close(&mut self) {
        let Some(acceptor) = self.acceptor.take() else { return };
        self.shared.stopping.store(true, Ordering::SeqCst);
        self.socket.remove();
        // Ends the wait in accept(2), also when another process removed the socket.
        if rustix::net::shutdown(&self.listener, Shutdown::Both).is_ok() {
            let _ = acceptor.join();
        }
    }

    /// Waits until every request that was read is answered.
    pub fn finish(mut self) {
        self.close();
        let mut unanswered = self.shared.unanswered.lock();
        self.shared.answered.wait_while(&mut unanswered, |unanswered| *unanswered > 0);
    }
}

impl Drop for ControlServer {
    fn drop(&mut self) {
        self.close();
    }
}

/// Creates the directory with mode 0700, or verifies that it is private: in a shared parent,
/// another user may have created it.
fn prepare_directory(path: &Path) -> Result<OwnedFd> {
    if let Err(e) = DirBuilder::new().mode(0o700).create(path)
        && e.kind() != io::ErrorKind::AlreadyExists
    {
        return Err(Error::io(format!("create {}", path.display()), e));
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

fn accept(listener: &UnixListener, shared: &Arc<ServerState>, handler: &Arc<Handler>) {
    for stream in listener.incoming() {
        if shared.stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok(stream) = stream else {
            // Most likely out of descriptors: give other threads time to close theirs.
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

/// Receives bytes, and up to four descriptors attached to them. Returns the number of bytes, which
/// is 0 when the other end is gone.
///
/// # Errors
/// Errors of recvmsg(2).
pub fn receive_with_descriptors(socket: &UnixStream, buffer: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags))?;
    let rights = control.drain().filter_map(|part| match part {
        RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
        _ => None,
    });
    Ok((received.bytes, rights.flatten().collect()))
}

/// Reads a client's line and the file attached to it. Bytes after the line are ignored.
fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let (mut line, mut file) = (Vec::new(), None);
    let mut part = [0; 4096];
    while (line.len() as u64) < MAX_LINE && !line.ends_with(b"\n") {
        let (count, mut files) = receive_with_descriptors(stream, &mut part)?;
        file = files.pop().or(file);
        if count == 0 {
            break;
        }
        line.extend_from_slice(&part[..count]);
    }
    Ok((line, file))
}

fn answer(stream: UnixStream, shared: &ServerState, handler: &Arc<Handler>) -> io::Result<()> {
    let peer = getsockopt(&stream, PeerCredentials)?.uid();
    if peer != 0 && peer != geteuid().as_raw() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    stream.set_read_timeout(Some(REQUEST_TIMEOUT))?;
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    let (line, file) = receive(&stream)?;

    let stream = Arc::new(stream);
    *shared.unanswered.lock() += 1;
    let response = match serde_json::from_slice::<Request>(&line) {
        Ok(request) => handler(request, ClientConnection { stream: Arc::clone(&stream), file }),
        Err(e) => Response::Failed { message: format!("{NOT_UNDERSTOOD}: {e}") },
    };
    let written = serde_json::to_vec(&response).map_err(io::Error::from).and_then(|mut bytes| {
        bytes.push(b'\n');
        (&*stream).write_all(&bytes)
    });
    *shared.unanswered.lock() -= 1;
    shared.answered.notify_all();
    written
}
