//! Accepts connections and serves them, on one event loop for each core.

use std::convert::Infallible;
use std::fs::File;
use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::header::{HeaderValue, STRICT_TRANSPORT_SECURITY};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::SockRef;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::admission::Seat;
use super::client_addr::Peer;
use super::daemon::Daemon;
use super::guard::Guarded;
use super::refusal::Refusal;
use super::route;

/// What is read and written at a time on a connection, and the most that the head of a request may have.
const BUFFER: usize = 8 * 1024;
/// Over TLS: browsers ask for this host by TLS alone, for a year.
const STRICT: &str = "max-age=31536000";
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: 69\r\n\
    retry-after: 5\r\nconnection: close\r\n\r\n{\"error\":\"unavailable\",\"message\":\"too many connections are open now\"}";

/// What one worker accepts on.
#[derive(Default)]
pub(super) struct Sockets {
    /// HTTP, or HTTPS where there is an acceptor.
    pub tcp: Vec<(std::net::TcpListener, Option<TlsAcceptor>)>,
    /// HTTP for this user.
    pub unix: Option<std::os::unix::net::UnixListener>,
    /// HTTP for proxies, which these users run.
    pub proxies: Option<(std::os::unix::net::UnixListener, Arc<[u32]>)>,
}

/// Tells the workers when they are to stop.
pub(super) type Stop = watch::Receiver<bool>;

async fn stop_requested(stop: &mut Stop) {
    // Without a sender nobody could say it any more.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Serves until `stop`, and then until the running requests have ended or their time is over. To be called in a runtime of its own.
pub(super) async fn run(daemon: Arc<Daemon>, sockets: Sockets, stop: Stop) -> io::Result<()> {
    let mut accepting = JoinSet::new();
    for (listener, acceptor) in sockets.tcp {
        let listener = TcpListener::from_std(listener)?;
        accepting.spawn(accept(daemon.clone(), Source::Tcp(listener, acceptor), stop.clone()));
    }
    if let Some(listener) = sockets.unix {
        accepting.spawn(accept(daemon.clone(), Source::Unix(UnixListener::from_std(listener)?), stop.clone()));
    }
    if let Some((listener, users)) = sockets.proxies {
        let source = Source::Proxies(UnixListener::from_std(listener)?, users);
        accepting.spawn(accept(daemon.clone(), source, stop.clone()));
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

enum Source {
    Tcp(TcpListener, Option<TlsAcceptor>),
    Unix(UnixListener),
    Proxies(UnixListener, Arc<[u32]>),
}

enum Accepted {
    Tcp(TcpStream, SocketAddr, Option<TlsAcceptor>),
    Unix(UnixStream, Peer),
}

impl Source {
    /// The next connection. Readiness is asked for again only when none waits, so a burst is drained in one turn.
    async fn next(&self) -> io::Result<Accepted> {
        match self {
            Source::Tcp(listener, tls) => {
                let (stream, address) = listener.accept().await?;
                Ok(Accepted::Tcp(stream, address, tls.clone()))
            }
            Source::Unix(listener) => Ok(Accepted::Unix(listener.accept().await?.0, Peer::Local)),
            Source::Proxies(listener, users) => {
                let stream = listener.accept().await?.0;
                // Whoever else connects would write X-Forwarded-For itself.
                match users.contains(&stream.peer_cred()?.uid()) {
                    true => Ok(Accepted::Unix(stream, Peer::Proxy)),
                    false => Err(io::ErrorKind::ConnectionRefused.into()),
                }
            }
        }
    }
}

/// Accepts until `stop`; gives back the connections that are still open.
async fn accept(daemon: Arc<Daemon>, source: Source, stop: Stop) -> JoinSet<()> {
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
                    turn_away_at_once(&accepted);
                }
                // Connections that end give descriptors back; asking again at once would only burn the processor.
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

/// Counts an open connection for as long as it lives.
struct Counted(Arc<Daemon>);

impl Counted {
    fn new(daemon: &Arc<Daemon>) -> Counted {
        daemon.metrics.connections.fetch_add(1, Relaxed);
        Counted(daemon.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.metrics.connections.fetch_sub(1, Relaxed);
    }
}

fn begin(daemon: &Arc<Daemon>, accepted: Accepted, stop: &Stop, connections: &mut JoinSet<()>) {
    daemon.metrics.accepted.fetch_add(1, Relaxed);
    let peer = match &accepted {
        Accepted::Tcp(_, address, _) => Peer::Address(address.ip()),
        Accepted::Unix(_, peer) => *peer,
    };
    let Some(connection) = Connection::new(daemon, peer, stop.clone()) else {
        daemon.metrics.connections_refused.fetch_add(1, Relaxed);
        let counted = Counted::new(daemon);
        match (daemon.lingering.clone().try_acquire_owned(), accepted) {
            (Ok(place), Accepted::Tcp(stream, ..)) => connections.spawn(turn_away(stream, (place, counted))),
            (Ok(place), Accepted::Unix(stream, _)) => connections.spawn(turn_away(stream, (place, counted))),
            (Err(_), accepted) => return turn_away_at_once(&accepted),
        };
        return;
    };
    match accepted {
        Accepted::Tcp(stream, _, None) => {
            tune(&stream);
            connections.spawn(connection.serve(stream))
        }
        Accepted::Tcp(stream, _, Some(acceptor)) => {
            tune(&stream);
            connections.spawn(connection.serve_tls(stream, acceptor))
        }
        Accepted::Unix(stream, _) => connections.spawn(connection.serve(stream)),
    };
}

/// Bytes that the kernel takes of an answer beyond what it may send.
const UNSENT: u32 = 32 * 1024;

/// By itself the kernel takes up to 4 MiB (net.ipv4.tcp_wmem) for a connection, and asks for more only when a third of it is gone: a slow
/// but honest client would seem to take nothing for minutes, and [`Guarded`] would end it, while many of them held gigabytes. With a
/// bound on what is not sent yet, writes follow what the client takes.
fn tune(stream: &TcpStream) {
    // Neither can fail on a socket that TCP accepted, and the connection works without.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_tcp_notsent_lowat(UNSENT);
}

fn slow(daemon: &Daemon) {
    daemon.metrics.connections_slow.fetch_add(1, Relaxed);
}

/// A connection that has a place.
pub(super) struct Connection {
    counted: Counted,
    seat: Arc<Seat>,
    peer: Peer,
    is_tls: bool,
    stop: Stop,
}

impl Connection {
    /// None when no place is free.
    pub(super) fn new(daemon: &Arc<Daemon>, peer: Peer, stop: Stop) -> Option<Connection> {
        let seat = daemon.seat(peer)?;
        Some(Connection { counted: Counted::new(daemon), seat, peer, is_tls: false, stop })
    }

    async fn serve_tls(mut self, stream: TcpStream, acceptor: TlsAcceptor) {
        let accepting = tokio::time::timeout(self.counted.0.settings.head_timeout, acceptor.accept(stream));
        let accepted = tokio::select! {
            accepted = accepting => accepted,
            () = self.seat.is_needed() => return slow(&self.counted.0),
        };
        match accepted {
            Ok(Ok(stream)) => {
                self.is_tls = true;
                self.serve(stream).await;
            }
            Ok(Err(_)) => {}
            Err(_) => slow(&self.counted.0),
        }
    }

    /// Until its end, or until another needs its place.
    pub(super) async fn serve<S: AsyncRead + AsyncWrite + Unpin>(self, stream: S) {
        let Connection { counted, seat, peer, is_tls, mut stop } = self;
        let (daemon, seat) = (&counted.0, &seat);
        let service = service_fn(|request: Request<Incoming>| async move {
            let under_way = seat.request();
            let reply = match &under_way {
                Some(_) => route::answer(daemon, peer, request).await,
                // The head was whole a moment too late, and the connection ends now.
                None => Refusal::unavailable("too many connections are open now").reply(),
            };
            let mut reply = reply.map(|body| body.of(under_way));
            if is_tls {
                reply.headers_mut().insert(STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(STRICT));
            }
            Ok::<_, Infallible>(reply)
        });
        let stream = TokioIo::new(Guarded::new(stream, daemon.settings.stall_timeout, Some(seat.clone())));
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
            () = seat.is_needed() => return slow(daemon),
            () = stop_requested(&mut stop) => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if result.is_err_and(|error| error.is_timeout() || is_stalled(&error)) {
            slow(daemon);
        }
    }
}

fn is_stalled(error: &hyper::Error) -> bool {
    use std::error::Error;
    error
        .source()
        .and_then(|source| source.downcast_ref::<io::Error>())
        .is_some_and(|e| e.kind() == io::ErrorKind::TimedOut)
}

/// Says that too many connections are open, and waits until the client has seen it: closing a socket with unread bytes would
/// throw the answer away.
async fn turn_away<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S, _held: (OwnedSemaphorePermit, Counted)) {
    let answered = async {
        stream.write_all(BUSY).await?;
        stream.shutdown().await?;
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await? > 0 {}
        io::Result::Ok(())
    };
    let _ = tokio::time::timeout(Duration::from_secs(1), answered).await;
}

fn turn_away_at_once(accepted: &Accepted) {
    let _ = match accepted {
        Accepted::Tcp(stream, ..) => stream.try_write(BUSY),
        Accepted::Unix(stream, _) => stream.try_write(BUSY),
    };
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
        assert!(serde_json::from_str::<lockbox_share_protocol::message::Failure>(body).is_ok());
    }
}
