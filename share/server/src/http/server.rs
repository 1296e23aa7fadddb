//! Runs the daemon from its sockets to its end: listening sockets and certificate, event loops on
//! threads, health and metrics, the last flush.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fs, io};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use lockbox_share_protocol::message::ErrorCode;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::admission::{ConnectionSlots, SlotOwner};
use super::reply::{self, Reply};
use super::request::HttpRefusal;
use super::worker::{self, StallGuard, WorkerSockets};
use super::{Daemon, MAX_UPLOADS};
use crate::limiter::ClientId;

const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
const SLOW_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Threads of one worker that wait for the disk: one per upload, and some for cold reads.
const BLOCKING: usize = MAX_UPLOADS + 32;

/// Sockets of the daemon. All are open before the daemon is made: its links name the ports.
pub struct ListeningSockets {
    /// HTTP, or HTTPS where there is an acceptor.
    pub tcp: Vec<(TcpListeners, Option<TlsAcceptor>)>,
    pub unix: Option<UnixSocket>,
    /// Proxies, which these users run.
    pub proxies: Option<(UnixSocket, Vec<u32>)>,
    pub admin: Option<SocketAddr>,
}

pub struct RunningServer {
    daemon: Arc<Daemon>,
    stop: watch::Sender<bool>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    unix: Option<UnixSocket>,
    proxies: Option<UnixSocket>,
    /// Addresses with the ports that the kernel chose, and whether they are for HTTPS.
    pub tcp: Vec<(SocketAddr, bool)>,
    pub admin: Option<SocketAddr>,
}

/// Creates an event loop for this thread, with a pool of `blocking` threads for disk I/O.
fn event_loop(blocking: usize) -> Result<tokio::runtime::Runtime, String> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(blocking)
        .thread_keep_alive(Duration::from_secs(10))
        .build()
        .map_err(|error| format!("cannot start an event loop: {error}"))
}

/// Starts `workers` event loops, one per listener of each socket in `open`.
///
/// # Errors
/// One sentence that names the address or the missing resource.
pub fn start(daemon: Arc<Daemon>, open: ListeningSockets, workers: usize) -> Result<RunningServer, String> {
    let ListeningSockets { tcp: open, unix, proxies, admin } = open;
    let mut sockets: Vec<WorkerSockets> = (0..workers.max(1)).map(|_| WorkerSockets::default()).collect();
    let mut tcp = Vec::new();
    for (TcpListeners { address, listeners }, acceptor) in open {
        tcp.push((address, acceptor.is_some()));
        for (sockets, listener) in sockets.iter_mut().zip(listeners) {
            sockets.tcp.push((listener, acceptor.clone()));
        }
    }
    let share = |socket: &UnixSocket, name: &str| {
        socket.listener.try_clone().map_err(|error| format!("cannot share the {name}: {error}"))
    };
    if let Some(socket) = &unix {
        for sockets in &mut sockets {
            sockets.unix = Some(share(socket, "Unix socket")?);
        }
    }
    let (proxies, users) = proxies.unzip();
    if let (Some(socket), Some(users)) = (&proxies, users) {
        let users = Arc::<[u32]>::from(users);
        for sockets in &mut sockets {
            sockets.proxies = Some((share(socket, "proxies' socket")?, Arc::clone(&users)));
        }
    }
    let (admin_listener, admin) = admin.map(listen_admin).transpose()?.unzip();
    let (stop, stopped) = watch::channel(false);
    let mut threads = Vec::new();
    for (place, sockets) in sockets.into_iter().enumerate() {
        let (daemon, stopped) = (daemon.clone(), stopped.clone());
        // Made here and not on its thread: a client that hears that the daemon is ready finds all
        // of its loops.
        let runtime = event_loop(BLOCKING)?;
        let work = move || runtime.block_on(worker::run(daemon, sockets, stopped));
        threads.push(spawn(format!("http-{place}"), work)?);
    }
    let keeper = daemon.clone();
    let runtime = event_loop(4)?;
    let work = move || runtime.block_on(keep(keeper, admin_listener, stopped));
    threads.push(spawn("keeper".into(), work)?);
    Ok(RunningServer { daemon, stop, threads, unix, proxies, tcp, admin })
}

fn listen_admin(address: SocketAddr) -> Result<(std::net::TcpListener, SocketAddr), String> {
    let listen = || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    listen().map_err(|error: io::Error| format!("cannot listen on {address}: {error}"))
}

fn spawn(
    name: String,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<JoinHandle<io::Result<()>>, String> {
    std::thread::Builder::new().name(name).spawn(work).map_err(|error| format!("cannot start a thread: {error}"))
}

async fn keep(
    daemon: Arc<Daemon>,
    listener: Option<std::net::TcpListener>,
    mut stop: watch::Receiver<bool>,
) -> io::Result<()> {
    if let Some(listener) = listener {
        tokio::spawn(serve_admin(daemon.clone(), TcpListener::from_std(listener)?));
    }
    let mut sweep = tokio::time::interval(SWEEP_INTERVAL);
    let mut look = tokio::time::interval(SLOW_CHECK_INTERVAL);
    loop {
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => return Ok(()),
            _ = look.tick() => daemon.end_slow(),
            _ = sweep.tick() => {
                let daemon = daemon.clone();
                let _ = tokio::task::spawn_blocking(move || daemon.discard_overdue()).await;
            }
        }
    }
}

impl RunningServer {
    pub fn unix(&self) -> Option<&Path> {
        self.unix.as_ref().map(|socket| &*socket.path)
    }

    pub fn proxies(&self) -> Option<&Path> {
        self.proxies.as_ref().map(|socket| &*socket.path)
    }

    /// Stops accepting, lets running requests end, makes everything durable.
    ///
    /// # Errors
    /// One sentence when the store could not be flushed or an event loop failed.
    pub fn stop(self) -> Result<(), String> {
        self.daemon.stopping.store(true, Relaxed);
        let _ = self.stop.send(true);
        self.daemon.notifier.wake_all();
        drop((self.unix, self.proxies));
        let mut result = Ok(());
        for thread in self.threads {
            match thread.join() {
                Ok(Ok(())) => {}
                Ok(Err(error)) => result = Err(format!("an event loop failed: {error}")),
                Err(_) => result = Err("an event loop ended by a panic".into()),
            }
        }
        self.daemon.discard_waiting();
        self.daemon.store.flush().wait().map_err(|error| format!("cannot make the last changes durable: {error}"))?;
        result
    }
}

/// Connections at a time; a scraper needs one.
const ADMIN_CONNECTIONS: usize = 32;
const ADMIN_HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Serves health and metrics while it is polled. A connection without a request makes room, as on
/// the other sockets (`admission`, rule 3): a probe that had to wait for idle connections would
/// take the daemon for dead.
async fn serve_admin(daemon: Arc<Daemon>, listener: TcpListener) {
    let slots = ConnectionSlots::new(ADMIN_CONNECTIONS, ADMIN_CONNECTIONS, ADMIN_HEAD_TIMEOUT);
    loop {
        let Ok((stream, address)) = listener.accept().await else {
            // No descriptors: others will be closed.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let Some(slot) = slots.take(SlotOwner::Client(ClientId::at(address.ip()))) else { continue };
        let daemon = daemon.clone();
        tokio::spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let active = slot.request();
                let reply = answer_admin(&daemon, &request).map(|body| body.of(active));
                async move { Ok::<_, Infallible>(reply) }
            });
            let stream = StallGuard::new(stream, ADMIN_HEAD_TIMEOUT, Some(slot.clone()));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(ADMIN_HEAD_TIMEOUT)
                .max_buf_size(8192)
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                _ = tokio::time::timeout(Duration::from_secs(60), connection) => {}
                () = slot.evicted() => {}
            }
        });
    }
}

fn answer_admin(daemon: &Daemon, request: &Request<Incoming>) -> Reply {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return HttpRefusal::method("GET, HEAD").reply();
    }
    let text = |status, text: String| reply::with_type(status, "text/plain; version=0.0.4", Bytes::from(text));
    match request.uri().path() {
        "/healthz" => text(StatusCode::OK, "ok\n".into()),
        "/readyz" if daemon.is_stopping() => text(StatusCode::SERVICE_UNAVAILABLE, "the daemon stops\n".into()),
        "/readyz" => match daemon.store.ready() {
            Ok(()) => text(StatusCode::OK, "ready\n".into()),
            Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
        },
        "/metrics" => text(StatusCode::OK, daemon.metrics_text()),
        _ => HttpRefusal::new(ErrorCode::NotFound, "the path does not exist").reply(),
    }
}

/// Connections that wait to be accepted; the kernel cuts it to net.core.somaxconn.
const BACKLOG: i32 = 4096;

/// One listener for each worker on the same address: the kernel spreads connections over them, and
/// no two workers wake for one.
pub struct TcpListeners {
    /// Bound address, with the port chosen by the kernel if none was requested.
    pub address: SocketAddr,
    pub listeners: Vec<std::net::TcpListener>,
}

/// Listens at `address` for so many workers.
///
/// # Errors
/// When the address is taken or not this machine's; the sentence names it.
pub fn listen_tcp(address: SocketAddr, workers: usize) -> Result<TcpListeners, String> {
    spread(address, workers.max(1)).map_err(|error| format!("cannot listen on {address}: {error}"))
}

fn spread(mut address: SocketAddr, workers: usize) -> io::Result<TcpListeners> {
    // Without SO_REUSEPORT first: with it a second daemon of the same user would share the address
    // in silence.
    drop(bind(address, false)?);
    let mut listeners = Vec::with_capacity(workers);
    for _ in 0..workers {
        let socket = bind(address, true)?;
        socket.listen(BACKLOG)?;
        let listener = std::net::TcpListener::from(socket);
        // The port that the kernel chose for the first is the port of all.
        address = listener.local_addr()?;
        listeners.push(listener);
    }
    Ok(TcpListeners { address, listeners })
}

fn bind(address: SocketAddr, shared: bool) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    if shared {
        socket.set_reuse_port(true)?;
    }
    socket.bind(&address.into())?;
    // Until it listens, an address that was bound with SO_REUSEADDR only can be bound again.
    if !shared {
        socket.listen(1)?;
    }
    Ok(socket)
}

/// The Unix socket of the daemon, removed when it is dropped.
pub struct UnixSocket {
    path: PathBuf,
    listener: UnixListener,
}

impl UnixSocket {
    /// Listens at `path` for this user alone. The socket of a dead daemon is replaced.
    ///
    /// # Errors
    /// When another daemon serves there, or the path is not a socket.
    pub fn bind(path: &Path) -> io::Result<UnixSocket> {
        UnixSocket::bind_for(path, 0o600)
    }

    /// Listens for all users: the kernel names the user of each connection.
    ///
    /// # Errors
    /// As of [`UnixSocket::bind`].
    pub fn bind_for_all(path: &Path) -> io::Result<UnixSocket> {
        UnixSocket::bind_for(path, 0o666)
    }

    fn bind_for(path: &Path, mode: u32) -> io::Result<UnixSocket> {
        if let Ok(metadata) = fs::symlink_metadata(path) {
            if !metadata.file_type().is_socket() {
                return Err(io::Error::other("another file has this name"));
            }
            if UnixStream::connect(path).is_ok() {
                return Err(io::Error::new(io::ErrorKind::AddrInUse, "another daemon serves there"));
            }
            fs::remove_file(path)?;
        }
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        socket.bind(&SockAddr::unix(path)?)?;
        // No client can connect before it listens, so none slips in before the mode.
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
        socket.listen(BACKLOG)?;
        Ok(UnixSocket { path: path.into(), listener: socket.into() })
    }
}

impl Drop for UnixSocket {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Accepts TLS 1.2 and 1.3 with this certificate chain and key, both in PEM.
///
/// # Errors
/// One sentence that names the file.
pub fn tls_acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, String> {
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(|error| format!("cannot read certificates from {}: {error}", certificate.display()))?;
    if chain.is_empty() {
        return Err(format!("{} has no certificate", certificate.display()));
    }
    let secret = PrivateKeyDer::from_pem_file(key)
        .map_err(|error| format!("cannot read a private key from {}: {error}", key.display()))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_no_client_auth()
        .with_single_cert(chain, secret)
        .map_err(|error| format!("the certificate and the key do not serve TLS: {error}"))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_an_address_and_a_second_daemon_does_not() {
        let TcpListeners { address, listeners } = listen_tcp("127.0.0.1:0".parse().unwrap(), 3).unwrap();
        assert_ne!(address.port(), 0);
        assert_eq!(listeners.len(), 3);
        assert!(listeners.iter().all(|listener| listener.local_addr().unwrap() == address));
        assert_eq!(spread(address, 1).err().unwrap().kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn the_unix_socket_is_private_and_replaces_only_a_dead_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        let socket = UnixSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(UnixSocket::bind(&path).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        drop(socket);
        assert!(!path.exists());
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        drop(UnixSocket::bind(&path).unwrap());
        fs::write(&path, "precious").unwrap();
        assert!(UnixSocket::bind(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
