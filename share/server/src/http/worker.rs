//! Accepts connections and serves them, on one event loop for each core.

use std::convert::Infallible;
use std::fs::File;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::header::{HeaderValue, STRICT_TRANSPORT_SECURITY};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinSet;
use tokio::time::{Sleep, sleep};
use tokio_rustls::TlsAcceptor;

use super::admission::ConnectionSlot;
use super::client_addr::Peer;
use super::request::HttpRefusal;
use super::{Daemon, route};

/// Buffer size of a connection, and maximum size of a request head.
const BUFFER: usize = 8 * 1024;
/// Over TLS: browsers ask for this host by TLS alone, for a year.
const STRICT: &str = "max-age=31536000";
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 69\r\n\
    retry-after: 5\r\nconnection: close\r\n\r\n{\"error\":\"unavailable\",\"message\":\"too many connections are open now\"}";

#[derive(Default)]
pub(super) struct WorkerSockets {
    /// HTTP, or HTTPS where there is an acceptor.
    pub tcp: Vec<(std::net::TcpListener, Option<TlsAcceptor>)>,
    pub unix: Option<std::os::unix::net::UnixListener>,
    /// HTTP for proxies, which these users run.
    pub proxies: Option<(std::os::unix::net::UnixListener, Arc<[u32]>)>,
}

pub(super) type StopSignal = watch::Receiver<bool>;

async fn stop_requested(stop: &mut StopSignal) {
    // Without a sender nobody could say it any more.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Serves until `stop`, and then until the requests in flight end or time out. It needs a runtime
/// of its own.
pub(super) async fn run(daemon: Arc<Daemon>, sockets: WorkerSockets, stop: StopSignal) -> io::Result<()> {
    let mut accepting = JoinSet::new();
    let mut listen = |source| accepting.spawn(accept(daemon.clone(), source, stop.clone()));
    for (listener, acceptor) in sockets.tcp {
        listen(WorkerListener::Tcp(TcpListener::from_std(listener)?, acceptor));
    }
    if let Some(listener) = sockets.unix {
        listen(WorkerListener::Unix(UnixListener::from_std(listener)?));
    }
    if let Some((listener, users)) = sockets.proxies {
        listen(WorkerListener::Proxies(UnixListener::from_std(listener)?, users));
    }
    let mut running = JoinSet::new();
    while let Some(connections) = accepting.join_next().await {
        if let Ok(mut connections) = connections {
            running.spawn(async move { while connections.join_next().await.is_some() {} });
        }
    }
    let rest = daemon.settings.stop_timeout;
    let _ = tokio::time::timeout(rest, async { while running.join_next().await.is_some() {} }).await;
    Ok(())
}

enum WorkerListener {
    Tcp(TcpListener, Option<TlsAcceptor>),
    Unix(UnixListener),
    Proxies(UnixListener, Arc<[u32]>),
}

enum AcceptedStream {
    Tcp(TcpStream, SocketAddr, Option<TlsAcceptor>),
    Unix(UnixStream, Peer),
}

impl WorkerListener {
    /// Accepts a connection. Polls readiness only when none waits: a burst is drained in one turn.
    async fn next(&self) -> io::Result<AcceptedStream> {
        match self {
            WorkerListener::Tcp(listener, tls) => {
                let (stream, address) = listener.accept().await?;
                Ok(AcceptedStream::Tcp(stream, address, tls.clone()))
            }
            WorkerListener::Unix(listener) => Ok(AcceptedStream::Unix(listener.accept().await?.0, Peer::Local)),
            WorkerListener::Proxies(listener, users) => {
                let stream = listener.accept().await?.0;
                // Any other user would write X-Forwarded-For itself.
                if !users.contains(&stream.peer_cred()?.uid()) {
                    return Err(io::ErrorKind::ConnectionRefused.into());
                }
                Ok(AcceptedStream::Unix(stream, Peer::Proxy))
            }
        }
    }
}

/// Accepts until `stop`; gives back the connections that are still open.
async fn accept(daemon: Arc<Daemon>, source: WorkerListener, stop: StopSignal) -> JoinSet<()> {
    let mut connections = JoinSet::new();
    // Given up when no descriptor is left, so that one client can be answered.
    let mut spare = File::open("/dev/null").ok();
    let mut in_need = false;
    let mut stopped = stop.clone();
    loop {
        let next = tokio::select! {
            biased;
            () = stop_requested(&mut stopped) => return connections,
            next = source.next() => next,
        };
        while connections.try_join_next().is_some() {}
        match next {
            Ok(accepted) => {
                in_need = false;
                begin(&daemon, accepted, &stop, &mut connections);
            }
            Err(error) if is_of_the_connection(&error) => {}
            Err(error) => {
                daemon.metrics.accept_failures.fetch_add(1, Relaxed);
                // Once for each time of need, not fifty times a second.
                if !std::mem::replace(&mut in_need, true) {
                    tracing::warn!(%error, "a connection cannot be accepted");
                }
                if spare.take().is_some()
                    && let Ok(Ok(accepted)) = tokio::time::timeout(Duration::from_millis(1), source.next()).await
                {
                    reject_now(&accepted);
                }
                // Connections that end give descriptors back; asking again at once would only burn
                // the processor.
                tokio::time::sleep(Duration::from_millis(20)).await;
                spare = File::open("/dev/null").ok();
            }
        }
    }
}

/// A connection that broke before it was accepted says nothing about the listener.
fn is_of_the_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

struct ConnectionCount(Arc<Daemon>);

impl ConnectionCount {
    fn new(daemon: &Arc<Daemon>) -> ConnectionCount {
        daemon.metrics.connections.fetch_add(1, Relaxed);
        ConnectionCount(daemon.clone())
    }
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        self.0.metrics.connections.fetch_sub(1, Relaxed);
    }
}

fn begin(daemon: &Arc<Daemon>, accepted: AcceptedStream, stop: &StopSignal, connections: &mut JoinSet<()>) {
    daemon.metrics.accepted.fetch_add(1, Relaxed);
    let peer = match &accepted {
        AcceptedStream::Tcp(_, address, _) => Peer::Address(address.ip()),
        AcceptedStream::Unix(_, peer) => *peer,
    };
    let Some(connection) = Connection::new(daemon, peer, stop.clone()) else {
        daemon.metrics.connections_refused.fetch_add(1, Relaxed);
        let Ok(place) = daemon.lingering.clone().try_acquire_owned() else { return reject_now(&accepted) };
        let held = (place, ConnectionCount::new(daemon));
        match accepted {
            AcceptedStream::Tcp(stream, ..) => connections.spawn(reject_connection(stream, held)),
            AcceptedStream::Unix(stream, _) => connections.spawn(reject_connection(stream, held)),
        };
        return;
    };
    match accepted {
        AcceptedStream::Tcp(stream, _, None) => {
            tune(&stream);
            connections.spawn(connection.serve(stream))
        }
        AcceptedStream::Tcp(stream, _, Some(acceptor)) => {
            tune(&stream);
            connections.spawn(connection.serve_tls(stream, acceptor))
        }
        AcceptedStream::Unix(stream, _) => connections.spawn(connection.serve(stream)),
    };
}

const UNSENT: u32 = 32 * 1024;

/// Bounds the unsent bytes in the kernel's send buffer. By default the kernel buffers up to 4 MiB
/// (net.ipv4.tcp_wmem) per connection, and accepts more only when a third of it is sent: a slow but
/// honest client would seem to accept nothing for minutes, and [`StallGuard`] would end it, while
/// many of them held gigabytes. With a bound on unsent bytes, writes follow the client's pace.
fn tune(stream: &TcpStream) {
    // Neither can fail on a socket that TCP accepted, and the connection works without.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT);
}

fn count_slow(daemon: &Daemon) {
    daemon.metrics.connections_slow.fetch_add(1, Relaxed);
}

pub(super) struct Connection {
    counted: ConnectionCount,
    slot: Arc<ConnectionSlot>,
    peer: Peer,
    is_tls: bool,
    stop: StopSignal,
}

impl Connection {
    /// Takes a slot; `None` when none is free.
    pub(super) fn new(daemon: &Arc<Daemon>, peer: Peer, stop: StopSignal) -> Option<Connection> {
        let slot = daemon.slot(peer)?;
        Some(Connection { counted: ConnectionCount::new(daemon), slot, peer, is_tls: false, stop })
    }

    async fn serve_tls(mut self, stream: TcpStream, acceptor: TlsAcceptor) {
        let accepting = tokio::time::timeout(self.counted.0.settings.head_timeout, acceptor.accept(stream));
        let accepted = tokio::select! {
            accepted = accepting => accepted,
            () = self.slot.evicted() => return count_slow(&self.counted.0),
        };
        match accepted {
            Ok(Ok(stream)) => {
                self.is_tls = true;
                self.serve(stream).await;
            }
            Ok(Err(_)) => {}
            Err(_) => count_slow(&self.counted.0),
        }
    }

    pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, stream: S) {
        let Connection { counted, slot, peer, is_tls, mut stop } = self;
        let (daemon, slot) = (&counted.0, &slot);
        let service = service_fn(|request: Request<Incoming>| async move {
            let active = slot.request();
            let reply = match &active {
                Some(_) => route::answer(daemon, peer, request).await,
                // The head was whole a moment too late, and the connection ends now.
                None => HttpRefusal::unavailable("too many connections are open now").reply(),
            };
            let mut reply = reply.map(|body| body.of(active));
            if is_tls {
                reply.headers_mut().insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(STRICT));
            }
            Ok::<_, Infallible>(reply)
        });
        let stream = TokioIo::new(StallGuard::new(stream, daemon.settings.stall_timeout, Some(slot.clone())));
        let mut connection = pin!(
            http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(daemon.settings.head_timeout)
                .max_buf_size(BUFFER)
                .max_headers(64)
                .serve_connection(stream, service)
        );
        let result = tokio::select! {
            result = connection.as_mut() => result,
            () = slot.evicted() => return count_slow(daemon),
            () = stop_requested(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if result.is_err_and(|error| error.is_timeout() || is_stalled(&error)) {
            count_slow(daemon);
        }
    }
}

fn is_stalled(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|error| error.kind() == io::ErrorKind::TimedOut)
}

/// Answers that too many connections are open, and waits until the client has read it: closing a
/// socket with unread bytes would discard the answer.
async fn reject_connection<S: AsyncRead + AsyncWrite + Unpin>(
    mut stream: S,
    _held: (OwnedSemaphorePermit, ConnectionCount),
) {
    let answered = async {
        stream.write_all(BUSY).await?;
        stream.shutdown().await?;
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), answered).await;
}

fn reject_now(accepted: &AcceptedStream) {
    let _ = match accepted {
        AcceptedStream::Tcp(stream, ..) => stream.try_write(BUSY),
        AcceptedStream::Unix(stream, _) => stream.try_write(BUSY),
    };
}

/// A client that takes less in a second, over the time that a write may wait, counts as taking
/// nothing: otherwise a byte now and then would hold a download's place for ever.
const LEAST_RATE: u64 = 1024;

/// Stream whose writes fail when the client does not accept enough of them in time. Reads may wait:
/// hyper and the handlers have timers for them.
pub(super) struct StallGuard<S> {
    stream: S,
    patience: Duration,
    /// Runs from the first write that waits until enough was taken; idle connections have no timer.
    waiting: Option<Pin<Box<Sleep>>>,
    taken: u64,
    /// Is notified when everything was handed over.
    slot: Option<Arc<ConnectionSlot>>,
}

impl<S> StallGuard<S> {
    pub(super) fn new(stream: S, patience: Duration, slot: Option<Arc<ConnectionSlot>>) -> StallGuard<S> {
        StallGuard { stream, patience, waiting: None, taken: 0, slot }
    }

    fn wrote(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let (Poll::Ready(Ok(bytes)), true) = (&result, self.waiting.is_some()) {
            self.taken += *bytes as u64;
            if self.taken >= LEAST_RATE * self.patience.as_secs() {
                self.waiting = None;
            }
        }
        self.judge(cx, result)
    }

    /// Everything that was written is gone, or the stream is over.
    fn flushed(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<()>>) -> Poll<io::Result<()>> {
        if result.is_ready() {
            self.waiting = None;
            if let Some(slot) = &self.slot {
                slot.flushed();
            }
        }
        self.judge(cx, result)
    }

    fn judge<T>(&mut self, cx: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_ready() {
            return result;
        }
        let timer = self.waiting.get_or_insert_with(|| {
            self.taken = 0;
            Box::pin(sleep(self.patience))
        });
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallGuard<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallGuard<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.wrote(cx, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.wrote(cx, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(cx);
        self.flushed(cx, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.flushed(cx, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of what is written to a client that reads nothing, the kernel takes little.
    #[tokio::test]
    async fn writes_follow_what_the_client_takes() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(16 * 1024).unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(socket.connect(address), listener.accept());
        let (_client, (mut stream, _)) = (client.unwrap(), accepted.unwrap());
        tune(&stream);
        let mut taken = 0;
        let part = vec![0; 128 * 1024];
        while let Ok(Ok(length)) = tokio::time::timeout(Duration::from_millis(500), stream.write(&part)).await {
            taken += length;
            assert!(taken < 256 * 1024, "{taken} bytes were taken");
        }
        assert!(taken > 0);
    }

    #[test]
    fn the_ready_made_answer_has_the_length_that_it_says() {
        let text = std::str::from_utf8(BUSY).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())), "{}", body.len());
        assert!(serde_json::from_str::<lockbox_share_protocol::message::ErrorBody>(body).is_ok());
    }
}

#[cfg(test)]
mod guard_tests {
    use super::*;
    use tokio::io::AsyncWriteExt;

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_left_after_its_time() {
        let (mine, _theirs) = tokio::io::duplex(16);
        let mut guarded = StallGuard::new(mine, Duration::from_secs(60), None);
        let error = guarded.write_all(&[0; 100]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    /// Takes `bytes` every 5 seconds while 1 MiB is written to it.
    async fn taking(bytes: usize) -> io::Result<()> {
        use tokio::io::AsyncReadExt;
        let (mine, mut theirs) = tokio::io::duplex(16 * 1024);
        let reader = tokio::spawn(async move {
            let mut taken = vec![0; bytes];
            loop {
                sleep(Duration::from_secs(5)).await;
                if theirs.read_exact(&mut taken).await.is_err() {
                    return;
                }
            }
        });
        let mut guarded = StallGuard::new(mine, Duration::from_secs(60), None);
        let written = guarded.write_all(&[0; 1 << 20]).await;
        drop(guarded);
        reader.await.unwrap();
        written
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_served_and_one_that_only_holds_its_place_is_not() {
        taking(8 * 1024).await.unwrap();
        assert_eq!(taking(100).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
    }

    /// A pause between two answers is no slowness.
    #[tokio::test(start_paused = true)]
    async fn the_time_ends_when_everything_was_taken() {
        use tokio::io::AsyncReadExt;
        let (mine, mut theirs) = tokio::io::duplex(16);
        let mut guarded = StallGuard::new(mine, Duration::from_secs(60), None);
        let mut taken = [0; 20];
        for _ in 0..5 {
            let (written, read) = tokio::join!(
                async {
                    guarded.write_all(&[0; 20]).await?;
                    guarded.flush().await
                },
                theirs.read_exact(&mut taken)
            );
            written.unwrap();
            read.unwrap();
            sleep(Duration::from_secs(50)).await;
        }
    }
}
