//! Range reads over HTTP, from a web server or a bucket.
//!
//! A server must serve ranges, honour `If-Match` and respond uncompressed. One that does not is
//! distinguished from a damaged file before its response body is read. Signed requests follow no
//! redirect; others follow three, over TLS only.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lockbox::{Error, Result};
use parking_lot::Mutex;
use ureq::config::Config;
use ureq::http::{Response, StatusCode, Uri, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::typestate::{WithBody, WithoutBody};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;
use ureq::{Agent, Body, RequestBuilder};
use url::Url;

use crate::RemoteOptions;
use crate::address::{Address, Cloud, check_scheme};
use crate::azure::AzureContainer;
use crate::broker::Broker;
use crate::credentials::CredentialCache;
use crate::provenance::{self, RequestKind};
pub(crate) use crate::provenance::{date, text};
pub(crate) use crate::range_source::printable;
use crate::range_source::{FileVersion, RangeSource, RemoteError, RemoteResult};
use crate::s3::S3Bucket;
use crate::signing::HttpHeader;
use crate::transport::{self, SOCKS_PROXY, STALL};
use crate::web_login::{self, WebLogin};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Total time limit of a request (REMOTE-4); [`MIN_BYTES_PER_SECOND`] adds the time for its body. A
/// request without progress ends long before (`crate::transport`).
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Slowest supported connection: 8 kbit/s.
pub(crate) const MIN_BYTES_PER_SECOND: u64 = 1 << 10;
const MAX_REDIRECTIONS: usize = 3;
/// Idle connections in the pool: one per prefetch thread, and some readers.
const MAX_IDLE_CONNECTIONS: usize = 72;
/// Buffer sizes of each connection in bytes.
const RECEIVE_BUFFER: usize = 128 << 10;
const SEND_BUFFER: usize = 16 << 10;
/// Maximum length of an entity tag that is sent back.
const MAX_TAG: usize = 512;

pub(crate) struct HttpSource {
    agent: Agent,
    target: Target,
    allow_http: bool,
}

enum Target {
    Web {
        address: Url,
        /// Target of the last successful redirects.
        current: Mutex<Url>,
        logins: CredentialCache<WebLogin>,
    },
    Bucket {
        signer: S3Bucket,
        key: String,
    },
    Container {
        container: AzureContainer,
        name: String,
    },
}

impl HttpSource {
    /// Creates the source without connecting.
    pub(crate) fn new(address: &Address, options: &RemoteOptions) -> Result<HttpSource> {
        let target = match address {
            Address::Web(url) => {
                check_scheme(url, options.allow_http)?;
                let host = url.host_str().unwrap_or_default().to_owned();
                let logins = CredentialCache::new(web_login::login_lookup(host, options.broker.clone()));
                Target::Web { address: url.clone(), current: Mutex::new(url.clone()), logins }
            }
            Address::Directory(_) => return Err(Error::invalid("a directory needs no network requests")),
            Address::Bucket { cloud: Cloud::Azure, bucket, key } => {
                Target::Container { container: AzureContainer::new(bucket, options)?, name: key.clone() }
            }
            Address::Bucket { cloud, bucket, key } => {
                Target::Bucket { signer: S3Bucket::new(*cloud, bucket, options)?, key: key.clone() }
            }
        };
        let roots = match &target {
            Target::Bucket { signer, .. } => signer.roots.clone(),
            Target::Web { .. } | Target::Container { .. } => RootCerts::PlatformVerifier,
        };
        Ok(HttpSource { agent: agent(options, roots), target, allow_http: options.allow_http })
    }

    /// Requests a range, conditional on `version` if it is given, and returns the response after
    /// all redirects.
    pub(crate) fn request_range(
        &self,
        range: &Range<u64>,
        version: Option<&FileVersion>,
    ) -> RemoteResult<Response<Body>> {
        let headers = range_headers(range, version);
        let length = range.end - range.start;
        match &self.target {
            Target::Bucket { signer, key } => signer.with(|signer| {
                let (url, mut signed) = signer.get(key);
                signed.extend(headers.iter().cloned());
                let response = self.get(&url, &signed, length)?;
                let response = signer.check_provenance(RequestKind::Read, response)?;
                if is_about_the_object(response.status()) { Ok(response) } else { Err(signer.failure(response)) }
            }),
            Target::Container { container, name } => container.with(|signer| {
                let (url, headers) = signer.request("GET", name, &[], &headers, 0);
                let response = provenance::check_azure(RequestKind::Read, self.get(&url, &headers, length)?)?;
                if is_about_the_object(response.status()) { Ok(response) } else { Err(signer.failure(&response)) }
            }),
            Target::Web { address, current, logins } => logins.with(|login| {
                let known = current.lock().clone();
                let ask = |from: &Url| self.follow(from, address, login, &headers, length, current);
                let mut response = ask(&known);
                let is_good = response.as_ref().is_ok_and(|response| response.status() == StatusCode::PARTIAL_CONTENT);
                // The target of a redirect may be temporary and no longer valid.
                if known != *address && !is_good {
                    current.lock().clone_from(address);
                    response = ask(address);
                }
                let response = response?;
                match refusal(&response) {
                    Some(_) if login.is_none() && response.status() == StatusCode::UNAUTHORIZED => {
                        Err(RemoteError::Denied("it asks for a login, and ~/.netrc has none for it".into()))
                    }
                    Some(error) => Err(error),
                    None => Ok(response),
                }
            }),
        }
    }

    fn follow(
        &self,
        from: &Url,
        address: &Url,
        login: Option<&WebLogin>,
        headers: &[HttpHeader],
        length: u64,
        current: &Mutex<Url>,
    ) -> RemoteResult<Response<Body>> {
        let mut url = from.clone();
        for _ in 0..=MAX_REDIRECTIONS {
            let mut headers = headers.to_vec();
            // Another server, or a host on the way, does not see it.
            if let Some(login) = login.filter(|_| url.scheme() == "https" && url.origin() == address.origin()) {
                headers.push(("authorization", login.header().to_owned()));
            }
            let response = self.get(&url, &headers, length)?;
            if !response.status().is_redirection() {
                *current.lock() = url;
                return provenance::check_web(response);
            }
            let next = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = next.and_then(|next| url.join(next).ok());
            url = next.ok_or_else(|| RemoteError::Unsupported("it redirects to no address".into()))?;
            if check_scheme(&url, self.allow_http).is_err() {
                return Err(RemoteError::Unsupported("it redirects to an address that is not https".into()));
            }
        }
        Err(RemoteError::Unsupported("it redirects again and again".into()))
    }

    fn get(&self, url: &Url, headers: &[HttpHeader], length: u64) -> RemoteResult<Response<Body>> {
        call(self.agent.get(url.as_str()), headers, length)
    }
}

/// Makes a request without a body; `bytes` is the maximum length of the response.
pub(crate) fn call(
    request: RequestBuilder<WithoutBody>,
    headers: &[HttpHeader],
    bytes: u64,
) -> RemoteResult<Response<Body>> {
    prepared(request, headers, bytes).call().map_err(|error| transport_error(&error))
}

/// Makes a request with a body; `bytes` is the maximum length of that or of the response.
pub(crate) fn send(
    request: RequestBuilder<WithBody>,
    headers: &[HttpHeader],
    body: &[u8],
    bytes: u64,
) -> RemoteResult<Response<Body>> {
    prepared(request, headers, bytes).send(body).map_err(|error| transport_error(&error))
}

fn prepared<B>(mut request: RequestBuilder<B>, headers: &[HttpHeader], bytes: u64) -> RequestBuilder<B> {
    for (name, value) in headers {
        request = request.header(*name, value);
    }
    let limit = REQUEST_TIMEOUT + Duration::from_secs(bytes / MIN_BYTES_PER_SECOND);
    request.config().timeout_global(Some(limit)).build()
}

fn range_headers(range: &Range<u64>, version: Option<&FileVersion>) -> Vec<HttpHeader> {
    let mut headers =
        vec![("range", format!("bytes={}-{}", range.start, range.end - 1)), ("accept-encoding", "identity".to_owned())];
    // Modification times are not used as a condition: some servers compare fractions of a second
    // that they do not send. The response is compared instead.
    if let Some(FileVersion { tag: Some(tag), .. }) = version {
        headers.push(("if-match", tag.clone()));
    }
    headers
}

impl RangeSource for HttpSource {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        let response = self.request_range(&(0..count), None)?;
        let answer = RangeResponse::of(&response, 0, count)?;
        if answer.end < count.min(answer.version.length) {
            return Err(RemoteError::Unsupported("it sends fewer bytes than were requested".into()));
        }
        let mut bytes = vec![0; usize::try_from(answer.end).unwrap_or_default()];
        fill(response, &mut bytes)?;
        Ok((answer.version, bytes))
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        let response = self.request_range(&range, Some(version))?;
        let answer = RangeResponse::of(&response, range.start, range.end)?;
        // Some servers do not know the conditions.
        if answer.version != *version {
            return Err(RemoteError::Changed);
        }
        if answer.end != range.end {
            return Err(RemoteError::Unsupported("it sends fewer bytes than were requested".into()));
        }
        // Not before there is something to be read: many wait for their answers at once.
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or_default()];
        fill(response, &mut bytes).map(|()| bytes)
    }
}

pub(crate) struct RangeResponse {
    pub(crate) version: FileVersion,
    /// End of the following bytes, as a file offset.
    end: u64,
}

impl RangeResponse {
    pub(crate) fn of(response: &Response<Body>, start: u64, most: u64) -> RemoteResult<RangeResponse> {
        let (status, headers) = (response.status(), response.headers());
        if let Some(error) = refusal(response) {
            return Err(error);
        }
        match status {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::OK => {
                let why = "it does not serve parts of files (ranges), without which an archive there cannot be read";
                return Err(RemoteError::Unsupported(why.into()));
            }
            StatusCode::PRECONDITION_FAILED => return Err(RemoteError::Changed),
            StatusCode::RANGE_NOT_SATISFIABLE if start > 0 => return Err(RemoteError::Changed),
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(RemoteError::Unsupported("the file there is empty".into()));
            }
            StatusCode::NOT_FOUND | StatusCode::GONE => return Err(RemoteError::NotFound),
            _ if status.is_server_error()
                || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status) =>
            {
                return Err(RemoteError::Transient(format!("status {}", status.as_u16())));
            }
            _ => return Err(RemoteError::Unsupported(format!("it responds with status {}", status.as_u16()))),
        }
        if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            return Err(RemoteError::Unsupported(
                "it compresses its responses, so parts of the file cannot be requested".into(),
            ));
        }
        let wrong = || RemoteError::Unsupported("its response is not for the requested range".into());
        let (first, last, length) = text(headers, header::CONTENT_RANGE).and_then(content_range).ok_or_else(wrong)?;
        let end = last + 1;
        if first != start || end > most || end > length || end <= start {
            return Err(wrong());
        }
        // A weak tag does not change with the bytes.
        let is_strong =
            |tag: &&str| tag.len() >= 2 && tag.len() <= MAX_TAG && tag.starts_with('"') && tag.ends_with('"');
        let version = FileVersion {
            length,
            tag: text(headers, header::ETAG).filter(is_strong).map(str::to_owned),
            modified: text(headers, header::LAST_MODIFIED).filter(|time| time.len() <= MAX_TAG).map(str::to_owned),
        };
        Ok(RangeResponse { version, end })
    }
}

/// Returns whether the caller of a range request interprets a store's response itself.
fn is_about_the_object(status: StatusCode) -> bool {
    status.is_success() || [StatusCode::PRECONDITION_FAILED, StatusCode::RANGE_NOT_SATISFIABLE].contains(&status)
}

fn refusal(response: &Response<Body>) -> Option<RemoteError> {
    let status = response.status();
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED)
        .then(|| RemoteError::Denied(format!("it refuses to serve the file (status {})", status.as_u16())))
}

/// Parses a date of an object list (RFC 3339) to seconds since 1970.
pub(crate) fn list_date(text: &str) -> Option<u64> {
    text.parse::<jiff::Timestamp>().ok().and_then(|time| time.as_second().try_into().ok())
}

/// Parses `bytes 0-9/100` to first byte, last byte and total length, all below 2^63.
pub(crate) fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| text.trim().parse::<u64>().ok().filter(|number| *number < 1 << 63);
    Some((number(first)?, number(last)?, number(length)?))
}

/// Reads exactly `out.len()` bytes: a longer body is cut off by closing its connection.
fn fill(response: Response<Body>, out: &mut [u8]) -> RemoteResult<()> {
    let mut body = response.into_body().into_reader();
    body.read_exact(out).map_err(|error| match error.kind() {
        ErrorKind::UnexpectedEof => RemoteError::Transient("its response was truncated".into()),
        _ => RemoteError::Transient(printable(&error.to_string())),
    })?;
    // The connection is used again only when its response was read to the end.
    let _ = body.read(&mut [0]);
    Ok(())
}

/// Creates the HTTP client of one archive. `roots`: CA certificates of its server.
pub(crate) fn agent(options: &RemoteOptions, roots: RootCerts) -> Agent {
    agent_with_proxy(options, roots, ureq::Proxy::try_from_env())
}

fn agent_with_proxy(options: &RemoteOptions, roots: RootCerts, proxy: Option<ureq::Proxy>) -> Agent {
    let tls = TlsConfig::builder()
        .root_certs(roots)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .build();
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent(concat!("lockbox/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .input_buffer_size(RECEIVE_BUFFER)
        .output_buffer_size(SEND_BUFFER)
        .max_idle_connections(MAX_IDLE_CONNECTIONS)
        .max_idle_connections_per_host(MAX_IDLE_CONNECTIONS)
        .tls_config(tls)
        .proxy(proxy)
        .build();
    let resolver = PublicResolver {
        check: !options.allow_private,
        inner: DefaultResolver::default(),
        broker: options.broker.clone(),
    };
    // A request that may be made only once has the stall limit nevertheless.
    let stall = options.timeout.filter(|timeout| !timeout.is_zero()).map_or(STALL, |timeout| timeout.min(STALL));
    Agent::with_parts(config, transport::connector(stall), resolver)
}

/// DNS resolver that rejects non-public addresses (SSRF protection).
#[derive(Debug)]
struct PublicResolver {
    check: bool,
    inner: DefaultResolver,
    /// Resolves names in a sandboxed process.
    broker: Option<Broker>,
}

/// Capacity of [`ResolvedSocketAddrs`].
const MAX_ADDRESSES: usize = 16;

/// Message that [`transport_error`] recognises.
const PRIVATE_ADDRESS: &str = "a private address";

impl Resolver for PublicResolver {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> std::result::Result<ResolvedSocketAddrs, ureq::Error> {
        transport::check_proxy(config, uri)?;
        let found = match &self.broker {
            Some(broker) => {
                let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
                let host = uri.host().ok_or(ureq::Error::HostNotFound)?;
                let limit = (!timeout.after.is_not_happening()).then(|| *timeout.after);
                let looked = broker.addresses(host.trim_matches(['[', ']']), port, limit);
                let looked = looked.map_err(|error| match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => ureq::Error::Timeout(timeout.reason),
                    _ => error.into(),
                })?;
                let mut found = self.empty();
                looked.into_iter().take(MAX_ADDRESSES).for_each(|address| found.push(address));
                if found.is_empty() {
                    return Err(ureq::Error::HostNotFound);
                }
                found
            }
            None => self.inner.resolve(uri, config, timeout)?,
        };
        // A proxy, which its user chose, resolves names itself; hosts that bypass it (`NO_PROXY`)
        // are checked here.
        let by_proxy = config.proxy().is_some_and(|proxy| !proxy.is_no_proxy(uri) || proxy.uri() == uri);
        if self.check && !by_proxy && found.iter().any(|address| is_private(address.ip())) {
            return Err(ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, PRIVATE_ADDRESS)));
        }
        Ok(found)
    }
}

/// Returns whether the address is of this machine, a local link or a private network (the IANA
/// registries of special-purpose addresses).
fn is_private(address: IpAddr) -> bool {
    match address.to_canonical() {
        IpAddr::V4(v4) => {
            let [a, b, c, _] = v4.octets();
            v4.is_private()
                || v4.is_loopback()
                || v4.is_link_local()
                || a == 0
                || a >= 224
                || (a == 100 && (64..128).contains(&b))
                || (a, b, c) == (192, 0, 0)
        }
        IpAddr::V6(v6) => {
            let segments = v6.segments();
            let inner = |high: u16, low: u16| is_private(Ipv4Addr::from(u32::from(high) << 16 | u32::from(low)).into());
            // An embedded IPv4 address (NAT64, 6to4) leads to that address.
            matches!(segments,
                [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] if inner(high, low))
                || v6.is_loopback()
                || v6.is_unspecified()
                || v6.is_unique_local()
                || v6.is_unicast_link_local()
                || v6.is_multicast()
                || segments[0] & 0xffc0 == 0xfec0
                || segments[..3] == [0x64, 0xff9b, 1]
        }
    }
}

pub(crate) fn transport_error(error: &ureq::Error) -> RemoteError {
    use rustls::Error::{General, InvalidCertRevocationList, InvalidCertificate, NoCertificatesPresented};
    let inner = if let ureq::Error::Io(error) = error { error.get_ref() } else { None };
    if inner.is_some_and(|inner| inner.to_string() == PRIVATE_ADDRESS) {
        return RemoteError::Denied(
            "it is at a private address, which needs allow-private (in --remote, -o or LOCKBOX_REMOTE)".into(),
        );
    }
    if inner.is_some_and(|inner| inner.to_string() == SOCKS_PROXY) {
        return RemoteError::Unsupported(SOCKS_PROXY.into());
    }
    let tls = match error {
        ureq::Error::Rustls(error) => Some(error),
        _ => inner.and_then(|inner| inner.downcast_ref()),
    };
    match tls {
        // The verifier returns `General` if it finds no certificates on this system.
        Some(InvalidCertificate(_) | InvalidCertRevocationList(_) | NoCertificatesPresented | General(_)) => {
            RemoteError::Denied(
                "its certificate is not trusted; SSL_CERT_FILE, or for s3:// AWS_CA_BUNDLE, names a file of trusted ones"
                    .into(),
            )
        }
        // Its words have the address, and that may be a secret.
        _ if matches!(error, ureq::Error::BadUri(_)) => {
            RemoteError::Unsupported("its address cannot be requested".into())
        }
        _ => RemoteError::Transient(printable(&error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use ureq::ProxyProtocol;

    use super::*;

    impl HttpSource {
        pub(crate) fn of_bucket(signer: S3Bucket, key: &str, options: &RemoteOptions) -> HttpSource {
            let target = Target::Bucket { signer, key: key.to_owned() };
            HttpSource { agent: agent(options, RootCerts::PlatformVerifier), target, allow_http: options.allow_http }
        }
    }

    #[test]
    fn addresses_of_the_house_are_told_from_public_ones() {
        for private in [
            "127.0.0.1",
            "10.1.2.3",
            "192.168.0.1",
            "172.16.0.1",
            "169.254.169.254",
            "0.0.0.0",
            "100.64.0.1",
            "::1",
            "fe80::1",
            "fd00::1",
            "::ffff:10.0.0.1",
            // What translates addresses of the sixth version leads there, too.
            "64:ff9b::192.168.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::1",
            "2002:c0a8:1::1",
            "fec0::1",
            "192.0.0.2",
            "240.0.0.1",
        ] {
            assert!(is_private(private.parse().unwrap()), "{private}");
        }
        for public in ["1.1.1.1", "100.128.0.1", "172.32.0.1", "2606:4700::1111", "64:ff9b::1.1.1.1", "2002:101:101::1"]
        {
            assert!(!is_private(public.parse().unwrap()), "{public}");
        }
    }

    /// Where a proxy is passed by, its looking up is, too.
    #[test]
    fn addresses_that_no_proxy_is_asked_for_are_looked_at_here() {
        let proxy = ureq::Proxy::builder(ureq::ProxyProtocol::Http).host("127.0.0.1").port(9).no_proxy("localhost");
        let agent =
            agent_with_proxy(&RemoteOptions::default(), RootCerts::PlatformVerifier, Some(proxy.build().unwrap()));
        let request = |url: &str| transport_error(&agent.get(url).call().unwrap_err());
        assert!(matches!(request("http://localhost:9/"), RemoteError::Denied(why) if why.contains("allow-private")));
        // The proxy itself may be at home.
        assert!(matches!(request("https://example.org/"), RemoteError::Transient(_)));
    }

    /// A direct connection would reveal to the server the address that the user's proxy hides.
    #[test]
    fn a_socks_proxy_is_refused_and_not_bypassed() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let url = format!("http://localhost:{}/", listener.local_addr().unwrap().port());
        for protocol in [ProxyProtocol::Socks5, ProxyProtocol::Socks5h] {
            let proxy = ureq::Proxy::builder(protocol).host("127.0.0.1").port(9).build().unwrap();
            for allow_private in [false, true] {
                let timeout = Some(Duration::from_secs(60));
                let options = RemoteOptions { allow_private, timeout, ..RemoteOptions::default() };
                let agent = agent_with_proxy(&options, RootCerts::PlatformVerifier, Some(proxy.clone()));
                let error = transport_error(&agent.get(&url).call().unwrap_err());
                assert!(matches!(&error, RemoteError::Unsupported(why) if why.contains("SOCKS")), "{error:?}");
            }
        }
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }

    #[test]
    fn what_a_stranger_wrote_is_harmless_on_a_terminal() {
        let error = ureq::Error::Io(std::io::Error::other("\u{1b}]0;title\u{7}\u{1b}[31m"));
        let RemoteError::Transient(message) = transport_error(&error) else { panic!("{error}") };
        assert!(message.contains("title") && !message.contains(['\u{1b}', '\u{7}']), "{message:?}");
    }

    #[test]
    fn content_ranges_are_read_with_bounds() {
        assert_eq!(content_range("bytes 0-9/100"), Some((0, 9, 100)));
        for wrong in
            ["bytes */100", "bytes 0-9/*", "0-9/100", "bytes 9/100", "bytes 0-18446744073709551615/100", "bytes a-b/c"]
        {
            assert_eq!(content_range(wrong), None, "{wrong}");
        }
    }
}
