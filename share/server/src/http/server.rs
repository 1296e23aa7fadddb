//! Runs the daemon from its sockets to its end: event loops on threads, health and metrics,
//! signals, the last flush.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use lockbox_share_protocol::message::ErrorCode;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

use super::admission::{ConnectionSlots, SlotOwner};
use super::daemon::{Daemon, MAX_UPLOADS};
use super::listen::{Tcp, UnixSocket};
use super::reply::{self, Reply};
use super::request::Refusal;
use super::worker::{self, StallGuard, WorkerSockets};
use crate::limiter::ClientId;

/// Interval of the search for expired pending uploads.
const SWEEP_INTERVAL: Duration = Duration::from_secs(30);
/// Interval of the search for slow request heads.
const SLOW_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Threads of one worker that wait for the disk: as many as uploads may run, and some for cold
/// reads.
const BLOCKING: usize = MAX_UPLOADS + 32;

/// Where the daemon listens. All of it is open before the daemon is made: its links name the ports.
pub struct ListeningSockets {
    /// HTTP, or HTTPS where there is an acceptor.
    pub tcp: Vec<(Tcp, Option<TlsAcceptor>)>,
    /// This machine's own programs.
    pub unix: Option<UnixSocket>,
    /// Proxies, which these users run.
    pub proxies: Option<(UnixSocket, Vec<u32>)>,
    /// Health and metrics.
    pub admin: Option<SocketAddr>,
}

/// A daemon that answers.
pub struct RunningServer {
    daemon: Arc<Daemon>,
    stop: watch::Sender<bool>,
    threads: Vec<JoinHandle<io::Result<()>>>,
    unix: Option<UnixSocket>,
    proxies: Option<UnixSocket>,
    /// Addresses with the ports that the kernel chose, and whether they are for HTTPS.
    pub tcp: Vec<(SocketAddr, bool)>,
    /// The same for health and metrics.
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
    let workers = workers.max(1);
    let refused = |address: SocketAddr| move |error: io::Error| format!("cannot listen on {address}: {error}");
    let ListeningSockets { tcp: open, unix, proxies, admin: figures } = open;
    let mut sockets: Vec<WorkerSockets> = (0..workers).map(|_| WorkerSockets::default()).collect();
    let mut tcp = Vec::new();
    for (Tcp { address, listeners }, acceptor) in open {
        tcp.push((address, acceptor.is_some()));
        for (sockets, listener) in sockets.iter_mut().zip(listeners) {
            sockets.tcp.push((listener, acceptor.clone()));
        }
    }
    if let Some(socket) = &unix {
        let listeners = socket.listeners(workers).map_err(|error| format!("cannot share the Unix socket: {error}"))?;
        for (sockets, listener) in sockets.iter_mut().zip(listeners) {
            sockets.unix = Some(listener);
        }
    }
    let proxies = proxies.map(|(socket, users)| (socket, Arc::<[u32]>::from(users)));
    if let Some((socket, users)) = &proxies {
        let listeners =
            socket.listeners(workers).map_err(|error| format!("cannot share the proxies' socket: {error}"))?;
        for (sockets, listener) in sockets.iter_mut().zip(listeners) {
            sockets.proxies = Some((listener, Arc::clone(users)));
        }
    }
    let proxies = proxies.map(|(socket, _)| socket);
    let mut admin = None;
    let mut admin_listener = None;
    if let Some(address) = figures {
        let listener = std::net::TcpListener::bind(address).map_err(refused(address))?;
        listener.set_nonblocking(true).map_err(refused(address))?;
        admin = Some(listener.local_addr().map_err(refused(address))?);
        admin_listener = Some(listener);
    }
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
    let (keeper, stopped) = (daemon.clone(), stopped);
    let runtime = event_loop(4)?;
    let work = move || runtime.block_on(keep(keeper, admin_listener, stopped));
    threads.push(spawn("keeper".into(), work)?);
    Ok(RunningServer { daemon, stop, threads, unix, proxies, tcp, admin })
}

fn spawn(
    name: String,
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
) -> Result<JoinHandle<io::Result<()>>, String> {
    std::thread::Builder::new().name(name).spawn(work).map_err(|error| format!("cannot start a thread: {error}"))
}

/// Serves health and metrics, and runs periodic maintenance.
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
    /// Returns the path of the Unix socket.
    pub fn unix(&self) -> Option<&std::path::Path> {
        self.unix.as_ref().map(UnixSocket::path)
    }

    /// Returns the path of the Unix socket for proxies.
    pub fn proxies(&self) -> Option<&std::path::Path> {
        self.proxies.as_ref().map(UnixSocket::path)
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
        self.daemon.store.flush().wait().map_err(|error| format!("the last changes were not made durable: {error}"))?;
        result
    }
}

/// Connections at a time; a scraper needs one.
const ADMIN_CONNECTIONS: usize = 32;
const ADMIN_HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers for as long as it is polled. A connection without a request makes room, as on the other
/// sockets (`admission`, rule 3): a probe that had to wait for idle connections would take the
/// daemon for dead.
async fn serve_admin(daemon: Arc<Daemon>, listener: TcpListener) {
    let slots = ConnectionSlots::new(ADMIN_CONNECTIONS, ADMIN_CONNECTIONS, ADMIN_HEAD_TIMEOUT);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(_) => {
                // No descriptors: others will be closed.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
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
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return Refusal::method("GET, HEAD").reply();
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
        _ => Refusal::new(ErrorCode::NotFound, "there is no such path").reply(),
    }
}
