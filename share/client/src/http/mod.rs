//! Speaks HTTP/1.1 with a daemon over a Unix socket, TCP or TLS, and turns its answers into values
//! or errors.

mod unix;

use std::fmt;
use std::io::{self, Read};
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockbox_share_protocol::message::ErrorBody;
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::http::{self, Method, Request, Response, StatusCode, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::{Agent, AsSendBody, Body, SendBody};
use zeroize::Zeroizing;

use self::unix::UnixConnector;
pub use self::unix::{is_trusted_listener, listener_uid};
use crate::{Error, Result};

/// Maximum length of a refusal's message, in bytes: a sentence.
const MAX_MESSAGE: usize = 400;

/// Longest JSON answer: a batch of a hundred shares with their claims has about 100 KiB.
const MAX_ANSWER: u64 = 4 << 20;
const CONNECT: Duration = Duration::from_secs(10);
/// Silence on a connection, time of a head and of a JSON answer: more than the longest watch.
const SILENCE: Duration = Duration::from_secs(75);
/// Time of the head of a claim's reply, and of its body: a lost reply is requested again while the
/// daemon repeats it.
const CLAIM_SILENCE: Duration = Duration::from_secs(10);
/// Time after which a server gets the body without having asked for it, which HTTP allows.
const WANTED: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 5 });
/// Silence within a download, after which another connection is tried.
const DOWNLOAD_SILENCE: Duration = Duration::from_secs(20);
/// Fewer and larger reads: a download of gigabytes passes through this buffer.
const BUFFER: usize = 128 << 10;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerAddress {
    /// `http://` or `https://`, a host, perhaps a port and a path; without a slash at its end.
    Url(String),
    /// A Unix socket of this machine.
    Socket(PathBuf),
}

impl ServerAddress {
    /// Parses a server URL entered by the user.
    ///
    /// # Errors
    /// When it is not an `http` or `https` URL.
    pub fn parse(text: &str) -> Result<ServerAddress> {
        let url = text.trim().trim_end_matches('/');
        let known = ["http://", "https://"].iter().any(|scheme| url.len() > scheme.len() && url.starts_with(scheme));
        if !known || url.contains(['#', '?', ' ']) || url.parse::<http::Uri>().is_err() {
            return Err(Error::Invalid(format!(
                "{text} is not a URL of a share daemon, such as https://share.example.org"
            )));
        }
        Ok(ServerAddress::Url(url.to_owned()))
    }

    /// The beginning of every request's address. A socket needs one as well, which is not resolved.
    fn base(&self) -> &str {
        match self {
            ServerAddress::Url(url) => url,
            ServerAddress::Socket(_) => "http://127.0.0.1",
        }
    }

    /// Returns whether the connection is encrypted or does not leave this machine.
    pub fn is_private(&self) -> bool {
        let ServerAddress::Url(url) = self else { return true };
        if !url.starts_with("http://") {
            return true;
        }
        // The host as the connection takes it: a name may begin as an address does, and a user
        // stands before it.
        let Ok(address) = url.parse::<http::Uri>() else { return false };
        let host = address.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerAddress::Url(url) => f.write_str(url),
            ServerAddress::Socket(path) => write!(f, "{}", path.display()),
        }
    }
}

pub struct ShareClient {
    agent: Agent,
    server: ServerAddress,
    /// Longest silence, and longest time of a head and of a JSON answer.
    patience: Duration,
    /// [`CLAIM_SILENCE`], which tests shorten.
    pub(crate) claim_patience: Duration,
}

impl ShareClient {
    /// Does not connect yet. At a socket, the listener has to be this user, root, the user that
    /// root gave the directory to, or the user `expected_uid` that is noted for the socket.
    pub fn new(server: ServerAddress, expected_uid: Option<u32>) -> ShareClient {
        ShareClient::with_patience(server, expected_uid, SILENCE)
    }

    fn with_patience(server: ServerAddress, expected_uid: Option<u32>, patience: Duration) -> ShareClient {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .user_agent(concat!("lockbox/", env!("CARGO_PKG_VERSION")))
            .timeout_connect(Some(CONNECT))
            .timeout_per_read(Some(patience))
            .timeout_per_write(Some(patience))
            // A server that sends a byte now and then is never silent.
            .timeout_recv_response(Some(patience))
            .timeout_await_100(Some(WANTED))
            .input_buffer_size(BUFFER)
            .output_buffer_size(BUFFER);
        let agent = match &server {
            ServerAddress::Socket(path) => {
                let connector = UnixConnector { path: path.clone(), expected_uid };
                Agent::with_parts(config.proxy(None).build(), connector, DefaultResolver::default())
            }
            ServerAddress::Url(url) => {
                // The certificates that the system trusts; SSL_CERT_FILE names others.
                let tls = TlsConfig::builder()
                    .root_certs(RootCerts::PlatformVerifier)
                    .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
                    .build();
                let config = config.tls_config(tls);
                // What does not leave the machine needs no proxy.
                let direct = url.starts_with("http://") && server.is_private();
                let config = if direct { config.proxy(None) } else { config };
                config.build().new_agent()
            }
        };
        ShareClient { agent, server, patience, claim_patience: CLAIM_SILENCE }
    }

    pub fn server(&self) -> &ServerAddress {
        &self.server
    }

    pub(crate) fn get<T: DeserializeOwned>(&self, path: &str, bearer: Option<&str>) -> Result<T> {
        self.parse_response(self.send(Method::GET, path, bearer, None, self.patience)?)
    }

    pub(crate) fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        bearer: Option<&str>,
        message: Option<&impl Serialize>,
    ) -> Result<T> {
        self.post_within(self.patience, path, bearer, message)
    }

    /// Posts a message. The head of the response may take `patience`, and its body as well.
    pub(crate) fn post_within<T: DeserializeOwned>(
        &self,
        patience: Duration,
        path: &str,
        bearer: Option<&str>,
        message: Option<&impl Serialize>,
    ) -> Result<T> {
        let body = message.map(serde_json::to_vec).transpose();
        let body = body.map_err(|error| Error::Invalid(error.to_string()))?.map(Zeroizing::new);
        self.parse_response(self.send(Method::POST, path, bearer, body, patience)?)
    }

    pub(crate) fn post_empty(&self, path: &str, bearer: &str) -> Result<()> {
        self.send(Method::POST, path, Some(bearer), None, self.patience).map(drop)
    }

    fn send(
        &self,
        method: Method,
        path: &str,
        bearer: Option<&str>,
        body: Option<Zeroizing<Vec<u8>>>,
        patience: Duration,
    ) -> Result<Response<Body>> {
        let mut request = self.request(method, path, bearer)?;
        let response = match body {
            Some(body) => {
                let json = header::HeaderValue::from_static("application/json");
                request.headers_mut().insert(header::CONTENT_TYPE, json);
                self.run(request.map(|()| &body[..]), patience)
            }
            None if *request.method() == Method::POST => self.run(request.map(|()| &b""[..]), patience),
            None => self.run(request, patience),
        };
        self.check_status(response)
    }

    fn run(
        &self,
        request: Request<impl AsSendBody>,
        patience: Duration,
    ) -> std::result::Result<Response<Body>, ureq::Error> {
        let config = self.agent.configure_request(request);
        let config = config.timeout_recv_response(Some(patience)).timeout_recv_body(Some(patience));
        self.agent.run(config.build())
    }

    /// Sends a body that is read piece by piece, once the server wants it: a server that refuses
    /// closes the connection, and a body that is being sent then would fail before the refusal is
    /// read. A body without a known length goes in chunks, of which a reader that fails sends no
    /// last one.
    pub(crate) fn upload<T: DeserializeOwned>(
        &self,
        path: &str,
        bearer: &str,
        length: Option<u64>,
        body: &mut dyn Read,
    ) -> Result<T> {
        let mut request = self.request(Method::POST, path, Some(bearer))?;
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/octet-stream"));
        headers.insert(header::EXPECT, header::HeaderValue::from_static("100-continue"));
        if let Some(length) = length {
            headers.insert(header::CONTENT_LENGTH, header::HeaderValue::from(length));
        }
        let response = self.agent.run(request.map(|()| SendBody::from_reader(body)));
        self.parse_response(self.check_status(response)?)
    }

    /// Bytes of a file from `start` on, under an entity tag that must still be the same.
    pub(crate) fn range(&self, path: &str, bearer: &str, start: u64, tag: &str) -> Result<Response<Body>> {
        let mut request = self.request(Method::GET, path, Some(bearer))?;
        if start > 0 {
            let headers = request.headers_mut();
            headers.insert(header::RANGE, header_value(&format!("bytes={start}-"))?);
            headers.insert(header::IF_RANGE, header_value(&format!("\"{tag}\""))?);
        }
        let request = self.agent.configure_request(request).timeout_per_read(Some(DOWNLOAD_SILENCE)).build();
        self.check_status(self.agent.run(request))
    }

    /// Returns whether a lease still stands. The answer has no body, so only a clear status ends a
    /// lease, and only from a daemon, which refuses in JSON: a proxy that does not find the daemon
    /// answers 404 as well.
    pub(crate) fn probe_lease(&self, path: &str, bearer: &str) -> Result<bool> {
        let request = self.request(Method::HEAD, path, Some(bearer))?;
        let response = self.agent.run(request).map_err(|error| self.unreachable_error(&error))?;
        let kind = response.headers().get(header::CONTENT_TYPE);
        let is_json = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"));
        match response.status() {
            status if status.is_success() => Ok(true),
            StatusCode::NOT_FOUND | StatusCode::GONE if is_json => Ok(false),
            status @ (StatusCode::NOT_FOUND | StatusCode::GONE) => Err(self.protocol_error(format!("status {status}"))),
            status => Err(self.interrupted_error(format!("status {status}"))),
        }
    }

    fn request(&self, method: Method, path: &str, bearer: Option<&str>) -> Result<Request<()>> {
        let request = Request::builder().method(method).uri(format!("{}{path}", self.server.base())).body(());
        let mut request =
            request.map_err(|_| Error::Invalid(format!("{} is not an address of a server", self.server)))?;
        if let Some(bearer) = bearer {
            let text = Zeroizing::new(format!("Bearer {bearer}"));
            let mut secret = header_value(&text)?;
            secret.set_sensitive(true);
            request.headers_mut().insert(header::AUTHORIZATION, secret);
        }
        Ok(request)
    }

    /// Returns the response if it is a success, else the refusal in its body.
    fn check_status(&self, response: std::result::Result<Response<Body>, ureq::Error>) -> Result<Response<Body>> {
        let response = response.map_err(|error| self.unreachable_error(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = read_body(response.into_body().into_reader(), self.patience).unwrap_or_default();
        match serde_json::from_slice::<ErrorBody>(&body) {
            Ok(mut failure) => {
                failure.message.truncate(failure.message.floor_char_boundary(MAX_MESSAGE));
                Err(Error::Refused(failure))
            }
            // A proxy in front of the daemon, when it is stopped or slow.
            Err(_) if status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS => {
                Err(self.interrupted_error(format!("status {status}")))
            }
            Err(_) => Err(self.protocol_error(format!("status {status}"))),
        }
    }

    fn parse_response<T: DeserializeOwned>(&self, response: Response<Body>) -> Result<T> {
        let body = read_body(response.into_body().into_reader(), self.patience);
        let body = body.map_err(|error| self.interrupted_error(plain_reason(&error.to_string())))?;
        // The message of the parser may repeat parts of what it read.
        serde_json::from_slice(&body).map_err(|_| self.protocol_error("its response is malformed".into()))
    }

    pub(crate) fn protocol_error(&self, reason: String) -> Error {
        Error::Foreign { server: self.server.to_string(), reason }
    }

    /// Error of an established connection without a response.
    pub(crate) fn interrupted_error(&self, reason: String) -> Error {
        Error::Unreachable { server: self.server.to_string(), reason, may_have_arrived: true }
    }

    fn unreachable_error(&self, error: &ureq::Error) -> Error {
        let reason = if is_untrusted(error) {
            // The library's sentence is about algorithms and object identifiers.
            "its certificate is not trusted; set SSL_CERT_FILE to a trusted one".into()
        } else {
            plain_reason(&error.to_string())
        };
        Error::Unreachable { server: self.server.to_string(), reason, may_have_arrived: !is_before_connection(error) }
    }
}

/// Reads a JSON answer of bounded length. Errors: `TimedOut` after `patience`.
fn read_body(body: impl Read, patience: Duration) -> io::Result<Zeroizing<Vec<u8>>> {
    let (mut bytes, begun) = (Zeroizing::new(Vec::with_capacity(16 << 10)), Instant::now());
    let (mut body, mut part) = (body.take(MAX_ANSWER), Zeroizing::new([0; 4096]));
    loop {
        match body.read(&mut part[..]) {
            Ok(0) => return Ok(bytes),
            Ok(length) => bytes.extend_from_slice(&part[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        if begun.elapsed() > patience {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "its response does not end"));
        }
    }
}

fn header_value(text: &str) -> Result<header::HeaderValue> {
    text.parse().map_err(|_| Error::Invalid("a token has letters that HTTP does not allow".into()))
}

/// Returns whether the connection failed before a request was sent.
fn is_before_connection(error: &ureq::Error) -> bool {
    use io::ErrorKind::{ConnectionRefused, NetworkUnreachable, NotFound, PermissionDenied};
    // `NotFound` and `PermissionDenied` are about the path of a Unix socket.
    let is_refusal = |kind| matches!(kind, ConnectionRefused | NetworkUnreachable | NotFound | PermissionDenied);
    match error {
        ureq::Error::HostNotFound | ureq::Error::Timeout(ureq::Timeout::Resolve) => true,
        ureq::Error::Io(error) if is_refusal(error.kind()) => true,
        other => is_untrusted(other),
    }
}

/// Returns whether the handshake failed because of the server's certificate, or because no
/// certificate is trusted.
fn is_untrusted(error: &ureq::Error) -> bool {
    use rustls::Error::{General, InvalidCertRevocationList, InvalidCertificate, NoCertificatesPresented};
    let error = match error {
        ureq::Error::Rustls(error) => Some(error),
        ureq::Error::Io(error) => error.get_ref().and_then(|inner| inner.downcast_ref()),
        _ => None,
    };
    // `General` is what the verifier says when it finds no certificates on this system.
    matches!(error, Some(InvalidCertificate(_) | InvalidCertRevocationList(_) | NoCertificatesPresented | General(_)))
}

/// Removes type names and error numbers from a message.
fn plain_reason(text: &str) -> String {
    let text = text.strip_prefix("io: ").unwrap_or(text);
    lockbox_terminal::without_numbers(text.to_owned())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io::Write;
    use std::net::TcpListener;
    use std::thread;

    use lockbox_share_protocol::api;

    use super::*;

    #[test]
    fn servers_are_named_by_urls() {
        for (text, shown) in [
            ("https://share.example.org/", "https://share.example.org"),
            (" http://127.0.0.1:7377", "http://127.0.0.1:7377"),
            ("https://example.org/share", "https://example.org/share"),
        ] {
            assert_eq!(ServerAddress::parse(text).unwrap().to_string(), shown);
        }
        for text in ["", "share.example.org", "ftp://x", "https://", "https://x/#y", "https://a b", "https://x/?q"] {
            assert!(ServerAddress::parse(text).is_err(), "{text}");
        }
    }

    /// A body that notes whether it was read.
    struct Watched<'a>(&'a Cell<bool>);

    impl Read for Watched<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.set(true);
            buffer.fill(b'x');
            Ok(buffer.len())
        }
    }

    /// A daemon whose limit is reached closes the connection: a client that was still sending would
    /// read nothing of the refusal.
    #[test]
    fn a_refusal_that_comes_before_the_body_is_read_and_the_body_is_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = ServerAddress::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
        let refusing = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                head.push(byte[0]);
            }
            let body = r#"{"error":"limited","message":"too many requests"}"#;
            let answer = format!(
                "HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            stream.write_all(answer.as_bytes()).unwrap();
            String::from_utf8(head).unwrap().to_ascii_lowercase()
        });
        let was_read = Cell::new(false);
        let mut body = Watched(&was_read);
        let refused =
            ShareClient::new(server, None).upload::<serde_json::Value>("/v1/x", "token", Some(3_000_000), &mut body);
        assert!(refusing.join().unwrap().contains("expect: 100-continue"));
        assert!(
            matches!(&refused, Err(Error::Refused(failure)) if failure.message == "too many requests"),
            "{refused:?}"
        );
        assert!(!was_read.get());
    }

    /// Without a limit of the whole answer, the client would wait until the server is tired of it.
    #[test]
    fn an_answer_that_comes_in_drops_is_given_up() {
        for begin in ["HTTP/1.1 200 OK\r\nX: ", "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let server = ServerAddress::parse(&format!("http://{}", listener.local_addr().unwrap())).unwrap();
            let dripping = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(begin.as_bytes()).unwrap();
                while stream.write_all(b" ").is_ok() {
                    thread::sleep(Duration::from_millis(1));
                }
            });
            let client = ShareClient::with_patience(server, None, Duration::from_millis(200));
            let given_up = client.get::<serde_json::Value>("/v1/x", None);
            assert!(matches!(given_up, Err(Error::Unreachable { may_have_arrived: true, .. })), "{given_up:?}");
            drop(client);
            dripping.join().unwrap();
        }
    }

    #[test]
    fn only_what_stays_on_this_machine_is_private_without_https() {
        let is_private = |url: &str| ServerAddress::parse(url).unwrap().is_private();
        for url in [
            "https://share.example.org",
            "http://localhost",
            "http://localhost:7377",
            "http://localhost/share",
            "http://127.0.0.1:7377",
            "http://127.1.2.3",
            "http://[::1]:7377/share",
        ] {
            assert!(is_private(url), "{url}");
        }
        for url in [
            "http://share.example.org",
            "http://127.0.0.1.example.org",
            "http://127.example.org:7377",
            "http://localhost.example.org",
            "http://localhost:7377@example.org",
            "http://127.0.0.1@example.org/share",
            "http://[::1]@example.org",
            "http://192.0.2.1",
        ] {
            assert!(ServerAddress::parse(url).is_err() || !is_private(url), "{url}");
        }
    }

    #[test]
    fn what_was_never_connected_cannot_have_arrived() {
        let io = |kind: io::ErrorKind| ureq::Error::Io(kind.into());
        let tls = |error: rustls::Error| ureq::Error::Io(io::Error::new(io::ErrorKind::InvalidData, error));
        let untrusted = tls(rustls::Error::InvalidCertificate(rustls::CertificateError::UnknownIssuer));
        let client = ShareClient::new(ServerAddress::Socket("/nonexistent/lockbox.sock".into()), None);
        let told = |error: &ureq::Error| match client.unreachable_error(error) {
            Error::Unreachable { reason, may_have_arrived, .. } => (may_have_arrived, reason),
            other => panic!("{other}"),
        };
        for error in [
            io(io::ErrorKind::ConnectionRefused),
            io(io::ErrorKind::NotFound),
            io(io::ErrorKind::PermissionDenied),
            io(io::ErrorKind::NetworkUnreachable),
            ureq::Error::HostNotFound,
            untrusted,
        ] {
            assert!(!told(&error).0, "{error}");
        }
        for error in [
            io(io::ErrorKind::ConnectionReset),
            io(io::ErrorKind::UnexpectedEof),
            ureq::Error::Timeout(ureq::Timeout::RecvResponse),
            tls(rustls::Error::DecryptError),
        ] {
            assert!(told(&error).0, "{error}");
        }
        let untrusted = tls(rustls::Error::NoCertificatesPresented);
        assert_eq!(told(&untrusted).1, "its certificate is not trusted; set SSL_CERT_FILE to a trusted one");
        let nobody = client.get::<()>(api::LIMITS, None);
        assert!(matches!(nobody, Err(Error::Unreachable { may_have_arrived: false, .. })));
    }

    #[test]
    fn only_plain_http_to_other_machines_can_be_read_on_the_way() {
        let private = |text: &str| ServerAddress::parse(text).unwrap().is_private();
        assert!(private("https://example.org") && private("http://127.0.0.1:1") && private("http://localhost"));
        assert!(private("http://[::1]:7377") && private("http://localhost:80"));
        assert!(
            !private("http://example.org") && !private("http://localhost.example.org") && !private("http://10.0.0.1")
        );
    }
}
