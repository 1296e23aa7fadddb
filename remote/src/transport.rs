//! Connections with waits that end by lack of progress, not by total time.
//!
//! A large object takes minutes on a slow link and succeeds; a link that carries nothing is given
//! up soon. A request fails when nothing moves for the stall limit. The kernel accepts bytes long
//! before a slow link carries them, so acceptance alone is not progress: a connection holds at most
//! [`UNSENT`] unsent bytes, and more than that is accepted only as fast as the link drains.
//!
//! # Invariants
//! PROGRESS-1  A wait on a connection lasts at most the stall limit. After a body the response may
//!     take as long as the body in addition: the kernel and the link buffer its end, and a window
//!     that doubles in each round trip has drained at least as much before.
//! PROGRESS-2  Before the first byte of an attempt moves, its waits end at the attempt's deadline:
//!     the rest of the operation's `timeout` (`crate::retry::with_retry`).

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::SockRef;
use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::transport::{
    Buffers, ConnectProxyConnector, ConnectionDetails, Connector, Either, LazyBuffers, NextTimeout, RustlsConnector,
    Transport,
};
use ureq::{Error, Proxy, ProxyProtocol, Timeout};

/// Default stall limit. A mobile link that changes its cell is silent for some seconds, and TCP
/// resends up to about ten seconds after it is back.
pub(crate) const STALL: Duration = Duration::from_secs(20);
/// Unsent bytes that the kernel accepts for one connection; it wakes the sender at half of it. At
/// 16 kbit/s that half leaves within the stall limit, and a gigabit link needs 0.3 ms for it.
const UNSENT: u32 = 64 << 10;
/// Bytes of a body that the kernel and the peer may have accepted without a link that carries
/// anything: [`UNSENT`], one piece more, and the initial window of the peer.
const ACCEPTED_AT_ONCE: u64 = 256 << 10;

/// Progress of one attempt of an operation, shared by all threads that make its requests.
pub(crate) struct AttemptClock {
    began: Instant,
    /// Time until which the first byte has to move; None for no limit but the stall limit.
    deadline: Option<Instant>,
    /// Milliseconds from `began` to the last byte that moved, plus one; 0 before the first.
    last_moved: AtomicU64,
    /// Set by the first byte of a response.
    is_answered: AtomicBool,
}

thread_local! {
    /// Attempt for which this thread makes requests.
    static CURRENT: RefCell<Option<Arc<AttemptClock>>> = const { RefCell::new(None) };
}

/// Returns the time at which a caller gives up that has waited since `since`. None without a
/// timeout, and for a timeout of zero, with which one attempt is made.
pub(crate) fn deadline(since: Instant, timeout: Option<Duration>) -> Option<Instant> {
    since.checked_add(timeout.filter(|timeout| !timeout.is_zero())?)
}

/// Last progress of requests that many readers wait for.
#[derive(Default)]
pub(crate) struct LastProgress(Mutex<Option<Instant>>);

impl LastProgress {
    pub(crate) fn note(&self, at: Instant) {
        let mut last = self.0.lock();
        *last = (*last).max(Some(at));
    }

    /// Returns the start of the silence for a reader that has waited since `began`.
    pub(crate) fn silent_since(&self, began: Instant) -> Instant {
        self.0.lock().map_or(began, |last| last.max(began))
    }
}

impl AttemptClock {
    pub(crate) fn new(deadline: Option<Instant>) -> Arc<AttemptClock> {
        Arc::new(AttemptClock {
            began: Instant::now(),
            deadline,
            last_moved: AtomicU64::new(0),
            is_answered: AtomicBool::new(false),
        })
    }

    pub(crate) fn current() -> Option<Arc<AttemptClock>> {
        CURRENT.with_borrow(Clone::clone)
    }

    pub(crate) fn run<T>(clock: Option<Arc<AttemptClock>>, work: impl FnOnce() -> T) -> T {
        struct Restore(Option<Arc<AttemptClock>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        let _restore = Restore(CURRENT.replace(clock));
        work()
    }

    pub(crate) fn silent_since(&self) -> Instant {
        self.began + Duration::from_millis(self.last_moved.load(Ordering::Relaxed).saturating_sub(1))
    }

    pub(crate) fn has_moved(&self) -> bool {
        self.last_moved.load(Ordering::Relaxed) > 0
    }

    /// Returns whether the attempt of this thread sent a part of a body and got no response.
    pub(crate) fn is_interrupted() -> bool {
        AttemptClock::current().is_some_and(|clock| clock.has_moved() && !clock.is_answered.load(Ordering::Relaxed))
    }

    fn note_moved(&self) {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX - 1);
        self.last_moved.fetch_max(millis + 1, Ordering::Relaxed);
    }

    /// Returns the time until the deadline, if it still counts.
    fn left(&self) -> Option<Duration> {
        let deadline = self.deadline.filter(|_| !self.has_moved())?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }
}

fn note_moved() {
    CURRENT.with_borrow(|clock| clock.iter().for_each(|clock| clock.note_moved()));
}

/// Returns `most`, or the rest of the attempt's time if that is less (PROGRESS-2).
fn wait_limit(most: Duration) -> Duration {
    let left = CURRENT.with_borrow(|clock| clock.as_ref().and_then(|clock| clock.left()));
    left.map_or(most, |left| left.min(most))
}

fn capped(timeout: NextTimeout, limit: Duration) -> NextTimeout {
    if *timeout.after > limit { NextTimeout { after: limit.into(), ..timeout } } else { timeout }
}

/// Returns the connectors of an agent; each wait lasts at most `stall`.
pub(crate) fn connector(stall: Duration) -> impl Connector<(), Out = impl Transport> {
    ().chain(ConnectProxyConnector::default())
        .chain(BoundedTcpConnector { stall })
        .chain(RustlsConnector::default())
        .chain(ProgressConnector { stall })
}

/// Message that `http::transport_error` recognizes.
pub(crate) const SOCKS_PROXY: &str =
    "a SOCKS proxy is set, and lockbox supports only HTTP proxies; correct ALL_PROXY, HTTPS_PROXY or NO_PROXY";

/// Refuses a request through a SOCKS proxy: without the connector for it, the connection would
/// bypass the proxy.
pub(crate) fn check_proxy(config: &Config, uri: &Uri) -> Result<(), Error> {
    let has_connector = |proxy: &Proxy| matches!(proxy.protocol(), ProxyProtocol::Http | ProxyProtocol::Https);
    match config.proxy() {
        Some(proxy) if !has_connector(proxy) && !proxy.is_no_proxy(uri) => {
            Err(std::io::Error::new(ErrorKind::Unsupported, SOCKS_PROXY).into())
        }
        _ => Ok(()),
    }
}

/// Connects over TCP, and bounds the unsent bytes of the connection.
#[derive(Debug)]
struct BoundedTcpConnector {
    stall: Duration,
}

impl<In: Transport> Connector<In> for BoundedTcpConnector {
    type Out = Either<In, TcpTransport>;

    fn connect(&self, details: &ConnectionDetails, chained: Option<In>) -> Result<Option<Self::Out>, Error> {
        if chained.is_some() {
            return Ok(chained.map(Either::A));
        }
        check_proxy(details.config, details.uri)?;
        let limit = capped(details.timeout, wait_limit(self.stall));
        let deadline = Instant::now() + *limit.after;
        let mut outcome = Err(Error::HostNotFound);
        for (number, address) in details.addrs.iter().enumerate() {
            // Half of the rest each: an address that swallows packets leaves time for the others.
            let left = deadline.saturating_duration_since(Instant::now());
            let left = if number + 1 < details.addrs.len() { left / 2 } else { left };
            if left.is_zero() {
                return Err(Error::Timeout(limit.reason));
            }
            match TcpStream::connect_timeout(address, left) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    SockRef::from(&stream).set_tcp_notsent_lowat(UNSENT)?;
                    let (input, output) = (details.config.input_buffer_size(), details.config.output_buffer_size());
                    let buffers = LazyBuffers::new(input, output);
                    return Ok(Some(Either::B(TcpTransport { stream, buffers, read_limit: None, write_limit: None })));
                }
                Err(error) if is_timeout(&error) => outcome = Err(Error::Timeout(Timeout::Connect)),
                Err(error) => outcome = Err(error.into()),
            }
        }
        outcome
    }
}

#[derive(Debug)]
pub(crate) struct TcpTransport {
    stream: TcpStream,
    buffers: LazyBuffers,
    /// Limits that the socket has.
    read_limit: Option<Duration>,
    write_limit: Option<Duration>,
}

fn socket_limit(timeout: NextTimeout) -> Result<Option<Duration>, Error> {
    match *timeout.after {
        limit if limit.is_zero() => Err(Error::Timeout(timeout.reason)),
        _ if timeout.after.is_not_happening() => Ok(None),
        limit => Ok(Some(limit)),
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

fn io_error(error: std::io::Error, timeout: NextTimeout) -> Error {
    if is_timeout(&error) { Error::Timeout(timeout.reason) } else { error.into() }
}

impl Transport for TcpTransport {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        // A handshake calls this without the limit of a request.
        let timeout = capped(timeout, wait_limit(Duration::MAX));
        let limit = socket_limit(timeout)?;
        if self.write_limit != limit {
            self.stream.set_write_timeout(limit)?;
            self.write_limit = limit;
        }
        self.stream.write_all(&self.buffers.output()[..amount]).map_err(|error| io_error(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        // A handshake calls this without the limit of a request.
        let timeout = capped(timeout, wait_limit(Duration::MAX));
        let limit = socket_limit(timeout)?;
        if self.read_limit != limit {
            self.stream.set_read_timeout(limit)?;
            self.read_limit = limit;
        }
        let amount = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => break outcome.map_err(|error| io_error(error, timeout))?,
            }
        };
        self.buffers.input_appended(amount);
        Ok(amount > 0)
    }

    /// Returns whether the peer has neither closed the idle connection nor sent anything.
    fn is_open(&mut self) -> bool {
        let is_silent = self.stream.set_nonblocking(true).is_ok()
            && matches!(self.stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        self.stream.set_nonblocking(false).is_ok() && is_silent
    }
}

/// Bounds the waits of a connection and measures its progress, above TLS: a handshake is not the
/// progress of a request.
#[derive(Debug)]
struct ProgressConnector {
    stall: Duration,
}

impl<In: Transport> Connector<In> for ProgressConnector {
    type Out = ProgressTransport<In>;

    fn connect(&self, _: &ConnectionDetails, chained: Option<In>) -> Result<Option<Self::Out>, Error> {
        Ok(chained.map(|inner| ProgressTransport { inner, stall: self.stall, sent: 0, send_began: Instant::now() }))
    }
}

#[derive(Debug)]
struct ProgressTransport<T> {
    inner: T,
    stall: Duration,
    /// Bytes sent since the last response byte, and the time of the first of them.
    sent: u64,
    send_began: Instant,
}

impl<T: Transport> Transport for ProgressTransport<T> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        self.inner.buffers()
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        if self.sent == 0 {
            self.send_began = Instant::now();
        }
        self.inner.transmit_output(amount, capped(timeout, wait_limit(self.stall)))?;
        self.sent += amount as u64;
        if self.sent > ACCEPTED_AT_ONCE {
            note_moved();
        }
        Ok(())
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        // PROGRESS-1
        let buffered = if self.sent > ACCEPTED_AT_ONCE { self.send_began.elapsed() } else { Duration::ZERO };
        let is_input = self.inner.await_input(capped(timeout, wait_limit(self.stall + buffered)))?;
        if is_input {
            self.sent = 0;
            CURRENT
                .with_borrow(|clock| clock.iter().for_each(|clock| clock.is_answered.store(true, Ordering::Relaxed)));
            note_moved();
        }
        Ok(is_input)
    }

    fn is_open(&mut self) -> bool {
        self.inner.is_open()
    }

    fn is_tls(&self) -> bool {
        self.inner.is_tls()
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::mpsc::{self, Receiver};
    use std::thread;

    use ureq::unversioned::transport::time;

    use super::*;
    use crate::RemoteOptions;
    use crate::address::Address;
    use crate::http::{HttpSource, MIN_BYTES_PER_SECOND, REQUEST_TIMEOUT};
    use crate::range_source::{RangeSource, RemoteError};
    use crate::retry::with_retry;

    /// Connection that records the limit of each wait.
    #[derive(Debug)]
    struct RecordingTransport {
        buffers: LazyBuffers,
        limits: Vec<Duration>,
        has_input: bool,
    }

    impl Transport for RecordingTransport {
        fn buffers(&mut self) -> &mut dyn Buffers {
            &mut self.buffers
        }

        fn transmit_output(&mut self, _: usize, timeout: NextTimeout) -> Result<(), Error> {
            self.limits.push(*timeout.after);
            Ok(())
        }

        fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
            self.limits.push(*timeout.after);
            Ok(self.has_input)
        }

        fn is_open(&mut self) -> bool {
            true
        }
    }

    #[test]
    fn a_wait_ends_with_the_attempt_before_the_first_byte_and_by_silence_after_it() {
        let inner = RecordingTransport { buffers: LazyBuffers::new(1, 1), limits: Vec::new(), has_input: false };
        let mut connection = ProgressTransport { inner, stall: STALL, sent: 0, send_began: Instant::now() };
        let unlimited = NextTimeout { after: time::Duration::NotHappening, ..NextTimeout::default() };
        let short = Duration::from_secs(6);
        let clock = AttemptClock::new(deadline(Instant::now(), Some(short)));
        AttemptClock::run(Some(clock.clone()), || {
            connection.transmit_output(1000, unlimited).unwrap();
            connection.await_input(unlimited).unwrap();
            assert!(!clock.has_moved(), "the kernel accepts a request without a link");
            connection.inner.has_input = true;
            connection.await_input(unlimited).unwrap();
            assert!(clock.has_moved());
            connection.await_input(unlimited).unwrap();
            connection.transmit_output(ACCEPTED_AT_ONCE as usize + 1, unlimited).unwrap();
            connection.await_input(unlimited).unwrap();
        });
        let limits = &connection.inner.limits;
        assert!(limits[..3].iter().all(|limit| *limit <= short), "{limits:?}");
        assert_eq!(limits[3..5], [STALL; 2]);
        assert!(limits[5] >= STALL, "the end of a body is in buffers: {limits:?}");
        assert_eq!(wait_limit(STALL), STALL, "no attempt any more");
        let sent = AttemptClock::new(deadline(Instant::now(), Some(short)));
        AttemptClock::run(Some(sent.clone()), || connection.transmit_output(2 << 20, unlimited)).unwrap();
        assert!(sent.has_moved());
    }

    /// 128 kbit/s, shared by four uploads.
    #[test]
    fn the_total_time_of_a_request_suffices_on_the_slowest_link() {
        let (segment, rate) = (8 << 20, (16 << 10) / 4);
        let most = REQUEST_TIMEOUT + Duration::from_secs(segment / MIN_BYTES_PER_SECOND);
        assert!(most > 2 * Duration::from_secs(segment / rate), "{most:?}");
    }

    /// Serves one connection after the other with `serve`.
    fn server(mut serve: impl FnMut(&mut TcpStream) + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        thread::spawn(move || listener.incoming().for_each(|stream| serve(&mut stream.unwrap())));
        address
    }

    fn options(timeout: Duration) -> RemoteOptions {
        RemoteOptions {
            timeout: Some(timeout),
            cache_directory: None,
            allow_http: true,
            allow_private: true,
            ..RemoteOptions::default()
        }
    }

    /// Waits until the test is over, or so long that a request without a limit would get its
    /// response.
    fn hold(is_over: &Receiver<()>) {
        let _ = is_over.recv_timeout(Duration::from_secs(30));
    }

    #[test]
    fn a_server_that_never_answers_ends_an_operation_with_its_timeout() {
        let (over, is_over) = mpsc::channel::<()>();
        let (asked, requests) = mpsc::channel();
        let address = server(move |stream| {
            let _ = stream.read(&mut [0; 4096]);
            asked.send(()).unwrap();
            hold(&is_over);
            let head =
                "HTTP/1.1 206 x\r\nx-amz-request-id: 1\r\ncontent-range: bytes 0-0/1\r\ncontent-length: 1\r\n\r\nx";
            let _ = stream.write_all(head.as_bytes());
        });
        let limit = Duration::from_secs(2);
        // The stall limit of the connections is longer than what is left.
        let options = options(Duration::from_secs(3600));
        let address = Address::parse(format!("{address}/a.lbx").as_ref()).unwrap().unwrap();
        let source = HttpSource::new(&address, &options).unwrap();
        let read = with_retry(&|| Some(limit), &mut || source.read_start(1));
        assert!(matches!(read, Err(RemoteError::Transient(_))), "{read:?}");
        requests.recv_timeout(Duration::from_secs(60)).unwrap();
        assert_eq!(requests.try_iter().count(), 0);
        drop(over);
    }
}
