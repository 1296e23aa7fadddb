//! Ranges of a file over HTTP, from a web server or a bucket.
//!
//! What is asked of a server: to serve ranges, to honour `If-Match`, to answer uncompressed. One that does not is told from a file that is
//! damaged before its answer's body is read. Requests that are signed follow no redirection; others follow three, over TLS alone.

use std::io::{ErrorKind, Read};
use std::net::{IpAddr, Ipv4Addr};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lockbox::{Error, Result};
use lockbox_terminal::display;
use parking_lot::Mutex;
use ureq::config::Config;
use ureq::http::{HeaderMap, Response, StatusCode, Uri, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::unversioned::resolver::{DefaultResolver, ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::{DefaultConnector, NextTimeout};
use ureq::{Agent, Body};
use url::Url;

use crate::Options;
use crate::address::{Address, Cloud, check_scheme};
use crate::azure::{Container, Request};
use crate::broker::Broker;
use crate::provenance::{self, Asked};
use crate::range_source::{Source, Trouble, Version};
use crate::s3::{self, Signer};
use crate::signing::Header;

const CONNECT: Duration = Duration::from_secs(10);
/// A whole request takes at most this, and longer by what the slowest link that is served needs for its body.
pub(crate) const REQUEST: Duration = Duration::from_secs(20);
/// Bytes a second.
pub(crate) const SLOWEST: u64 = 64 << 10;
const MAX_REDIRECTIONS: usize = 3;
/// Connections that wait for the next request: as many as there are who read ahead, and some readers.
const CONNECTIONS: usize = 72;
/// Buffers of each connection.
const RECEIVED: usize = 128 << 10;
const SENT: usize = 64 << 10;
/// Longest entity tag that is sent back.
const MAX_TAG: usize = 512;

pub(crate) struct Http {
    agent: Agent,
    place: Target,
    allow_http: bool,
}

enum Target {
    Web {
        address: Url,
        /// Where its redirections led to.
        current: Mutex<Url>,
    },
    Bucket {
        signer: Signer,
        key: String,
    },
    Container {
        container: Container,
        name: String,
    },
}

impl Http {
    /// Connects nowhere yet.
    pub(crate) fn new(address: &Address, options: &Options) -> Result<Http> {
        let place = match address {
            Address::Web(url) => {
                check_scheme(url, options.allow_http)?;
                Target::Web { address: url.clone(), current: Mutex::new(url.clone()) }
            }
            Address::Directory(_) => return Err(Error::invalid("a directory is asked for nothing over a network")),
            Address::Bucket { cloud: Cloud::Azure, bucket, key } => {
                Target::Container { container: Container::new(bucket, options)?, name: key.clone() }
            }
            Address::Bucket { cloud, bucket, key } => {
                Target::Bucket { signer: Signer::new(*cloud, bucket, options)?, key: key.clone() }
            }
        };
        Ok(Http { agent: agent(options), place, allow_http: options.allow_http })
    }

    /// An object of a bucket that is known already.
    #[cfg(test)]
    pub(crate) fn of_bucket(signer: Signer, key: &str, options: &Options) -> Http {
        let place = Target::Bucket { signer, key: key.to_owned() };
        Http { agent: agent(options), place, allow_http: options.allow_http }
    }

    /// Sends a request for a range, on condition when there is a version, and gives the answer behind all redirections.
    pub(crate) fn ask(
        &self,
        range: &Range<u64>,
        version: Option<&Version>,
    ) -> std::result::Result<Response<Body>, Trouble> {
        let headers = asked(range, version);
        let length = range.end - range.start;
        match &self.place {
            Target::Bucket { signer, key } => {
                let response = signer.with(|asker| {
                    let (url, mut signed) = asker.get(key);
                    signed.extend(headers.iter().cloned());
                    let response = self.send(&url, &signed, length)?;
                    let response = asker.own(Asked::Read, response)?;
                    // Any other answer is for whoever asks.
                    match refusal(&response) {
                        Some(trouble) => Err(trouble),
                        None if response.status() == StatusCode::BAD_REQUEST => Err(s3::bad_request(response)),
                        None => Ok(response),
                    }
                })?;
                if response.status().is_redirection() {
                    return Err(Trouble::Refused(
                        "the bucket is in another region; AWS_REGION names the one to ask".into(),
                    ));
                }
                Ok(response)
            }
            Target::Container { container, name } => container.with(|asker| {
                let Request { url, headers } = asker.request("GET", name, &[], &headers, 0);
                let response = provenance::azure(Asked::Read, self.send(&url, &headers, length)?)?;
                refusal(&response).map_or(Ok(response), Err)
            }),
            Target::Web { address, current } => {
                let known = current.lock().clone();
                let response = self.follow(&known, &headers, length, current);
                let is_good = response.as_ref().is_ok_and(|response| response.status() == StatusCode::PARTIAL_CONTENT);
                // What a redirection led to may be for a time only, and who served there be gone.
                if known != *address && !is_good {
                    current.lock().clone_from(address);
                    return self.follow(address, &headers, length, current);
                }
                response
            }
        }
    }

    fn follow(
        &self,
        from: &Url,
        headers: &[Header],
        length: u64,
        current: &Mutex<Url>,
    ) -> std::result::Result<Response<Body>, Trouble> {
        let mut url = from.clone();
        for _ in 0..=MAX_REDIRECTIONS {
            let response = self.send(&url, headers, length)?;
            if !response.status().is_redirection() {
                *current.lock() = url;
                return provenance::web(response);
            }
            let next = response.headers().get(header::LOCATION).and_then(|value| value.to_str().ok());
            let next = next.and_then(|next| url.join(next).ok());
            url = next.ok_or_else(|| Trouble::Unusable("it redirects to no address".into()))?;
            if check_scheme(&url, self.allow_http).is_err() {
                return Err(Trouble::Unusable("it redirects to an address that is not https".into()));
            }
        }
        Err(Trouble::Unusable("it redirects again and again".into()))
    }

    fn send(&self, url: &Url, headers: &[Header], length: u64) -> std::result::Result<Response<Body>, Trouble> {
        let mut request = self.agent.get(url.as_str());
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let limit = REQUEST + Duration::from_secs(length / SLOWEST);
        request.config().timeout_global(Some(limit)).build().call().map_err(|error| trouble(&error))
    }
}

/// What asks for a range, of a version.
fn asked(range: &Range<u64>, version: Option<&Version>) -> Vec<Header> {
    let mut headers =
        vec![("range", format!("bytes={}-{}", range.start, range.end - 1)), ("accept-encoding", "identity".to_owned())];
    // Times are no condition: some servers compare fractions of a second that they do not tell. What the answer says is compared.
    if let Some(Version { tag: Some(tag), .. }) = version {
        headers.push(("if-match", tag.clone()));
    }
    headers
}

impl Source for Http {
    fn first(&self, count: u64) -> std::result::Result<(Version, Vec<u8>), Trouble> {
        let response = self.ask(&(0..count), None)?;
        let answer = Answer::of(&response, 0, count)?;
        if answer.end < count.min(answer.version.length) {
            return Err(Trouble::Unusable("it sends less than it was asked for".into()));
        }
        let mut bytes = vec![0; usize::try_from(answer.end).unwrap_or_default()];
        fill(response, &mut bytes)?;
        Ok((answer.version, bytes))
    }

    fn range(&self, version: &Version, range: Range<u64>) -> std::result::Result<Vec<u8>, Trouble> {
        let response = self.ask(&range, Some(version))?;
        let answer = Answer::of(&response, range.start, range.end)?;
        // Some servers do not know the conditions.
        if answer.version != *version {
            return Err(Trouble::Changed);
        }
        if answer.end != range.end {
            return Err(Trouble::Unusable("it sends less than it was asked for".into()));
        }
        // Not before there is something to be read: many wait for their answers at once.
        let mut bytes = vec![0; usize::try_from(range.end - range.start).unwrap_or_default()];
        fill(response, &mut bytes).map(|()| bytes)
    }
}

/// What the head of a response promises.
pub(crate) struct Answer {
    pub(crate) version: Version,
    /// End of the bytes that follow, in the file.
    end: u64,
}

impl Answer {
    pub(crate) fn of(response: &Response<Body>, start: u64, most: u64) -> std::result::Result<Answer, Trouble> {
        let (status, headers) = (response.status(), response.headers());
        if let Some(trouble) = refusal(response) {
            return Err(trouble);
        }
        match status {
            StatusCode::PARTIAL_CONTENT => {}
            StatusCode::OK => {
                let why = "it does not serve parts of files (ranges), without which an archive there cannot be read";
                return Err(Trouble::Unusable(why.into()));
            }
            StatusCode::PRECONDITION_FAILED => return Err(Trouble::Changed),
            StatusCode::RANGE_NOT_SATISFIABLE if start > 0 => return Err(Trouble::Changed),
            StatusCode::RANGE_NOT_SATISFIABLE => return Err(Trouble::Unusable("the file there is empty".into())),
            StatusCode::NOT_FOUND | StatusCode::GONE => return Err(Trouble::Gone),
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
                return Err(Trouble::Passing(format!("status {}", status.as_u16())));
            }
            _ if status.is_server_error() => return Err(Trouble::Passing(format!("status {}", status.as_u16()))),
            _ => return Err(Trouble::Unusable(format!("it answers with status {}", status.as_u16()))),
        }
        if headers.get(header::CONTENT_ENCODING).is_some_and(|encoding| encoding != "identity") {
            return Err(Trouble::Unusable(
                "it compresses what it sends, so that parts of the file cannot be asked for".into(),
            ));
        }
        let wrong = || Trouble::Unusable("its answer is not about the range that it was asked for".into());
        let (first, last, length) = text(headers, header::CONTENT_RANGE).and_then(content_range).ok_or_else(wrong)?;
        let end = last + 1;
        if first != start || end > most || end > length || end <= start {
            return Err(wrong());
        }
        // A weak tag stays what it is while bytes change.
        let is_strong =
            |tag: &&str| tag.len() >= 2 && tag.len() <= MAX_TAG && tag.starts_with('"') && tag.ends_with('"');
        let version = Version {
            length,
            tag: text(headers, header::ETAG).filter(is_strong).map(str::to_owned),
            modified: text(headers, header::LAST_MODIFIED).filter(|time| time.len() <= MAX_TAG).map(str::to_owned),
        };
        Ok(Answer { version, end })
    }
}

/// When the answer is that this user may not.
fn refusal(response: &Response<Body>) -> Option<Trouble> {
    let status = response.status();
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN | StatusCode::PROXY_AUTHENTICATION_REQUIRED)
        .then(|| Trouble::Refused(format!("it refuses to serve the file (status {})", status.as_u16())))
}

pub(crate) fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Seconds since 1970 of a time as HTTP writes it.
pub(crate) fn date(text: &str) -> Option<u64> {
    let time = httpdate::parse_http_date(text).ok()?;
    time.duration_since(std::time::UNIX_EPOCH).ok().map(|time| time.as_secs())
}

/// The same of a time as lists of objects have it (RFC 3339).
pub(crate) fn list_date(text: &str) -> Option<u64> {
    text.parse::<jiff::Timestamp>().ok().and_then(|time| time.as_second().try_into().ok())
}

/// First and last byte and the whole length of `bytes 0-9/100`; the numbers are below 2^63.
pub(crate) fn content_range(text: &str) -> Option<(u64, u64, u64)> {
    let (range, length) = text.strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let number = |text: &str| text.trim().parse::<u64>().ok().filter(|number| *number < 1 << 63);
    Some((number(first)?, number(last)?, number(length)?))
}

/// Reads just what `out` takes: a body that goes on is cut off with its connection.
fn fill(response: Response<Body>, out: &mut [u8]) -> std::result::Result<(), Trouble> {
    let mut body = response.into_body().into_reader();
    body.read_exact(out).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Trouble::Passing("its answer was cut off".into()),
        _ => Trouble::Passing(plain(&error.to_string())),
    })?;
    // The connection is used again only when its response was read to the end.
    let _ = body.read(&mut [0]);
    Ok(())
}

pub(crate) fn agent(options: &Options) -> Agent {
    agent_by(options, ureq::Proxy::try_from_env())
}

fn agent_by(options: &Options, proxy: Option<ureq::Proxy>) -> Agent {
    let tls = TlsConfig::builder()
        .root_certs(RootCerts::PlatformVerifier)
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::aws_lc_rs::default_provider()))
        .build();
    let config = Agent::config_builder()
        .http_status_as_error(false)
        .max_redirects(0)
        .user_agent(concat!("lockbox/", env!("CARGO_PKG_VERSION")))
        .timeout_connect(Some(CONNECT))
        .input_buffer_size(RECEIVED)
        .output_buffer_size(SENT)
        .max_idle_connections(CONNECTIONS)
        .max_idle_connections_per_host(CONNECTIONS)
        .tls_config(tls)
        .proxy(proxy)
        .build();
    let resolver =
        Public { check: !options.allow_private, inner: DefaultResolver::default(), broker: options.broker.clone() };
    Agent::with_parts(config, DefaultConnector::default(), resolver)
}

/// Looks names up and refuses addresses that are no public ones: a server must not lead requests into the house of its reader.
#[derive(Debug)]
struct Public {
    check: bool,
    inner: DefaultResolver,
    /// Where this process may not look names up itself.
    broker: Option<Broker>,
}

impl Public {
    fn by_broker(
        &self,
        broker: &Broker,
        uri: &Uri,
        timeout: NextTimeout,
    ) -> std::result::Result<ResolvedSocketAddrs, ureq::Error> {
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("http") { 80 } else { 443 });
        let host = uri.host().ok_or(ureq::Error::HostNotFound)?;
        let limit = (!timeout.after.is_not_happening()).then(|| *timeout.after);
        let looked = broker.addresses(host.trim_matches(['[', ']']), port, limit);
        let looked = looked.map_err(|error| match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => ureq::Error::Timeout(timeout.reason),
            _ => error.into(),
        })?;
        let mut found = self.empty();
        for address in looked.into_iter().take(MAX_ADDRESSES) {
            found.push(address);
        }
        if found.is_empty() { Err(ureq::Error::HostNotFound) } else { Ok(found) }
    }
}

/// As many as a list of them has room for.
const MAX_ADDRESSES: usize = 16;

/// Stands in the error that [`trouble`] looks for.
const PRIVATE: &str = "a private address";

impl Resolver for Public {
    fn resolve(
        &self,
        uri: &Uri,
        config: &Config,
        timeout: NextTimeout,
    ) -> std::result::Result<ResolvedSocketAddrs, ureq::Error> {
        let found = match &self.broker {
            Some(broker) => self.by_broker(broker, uri, timeout)?,
            None => self.inner.resolve(uri, config, timeout)?,
        };
        // A proxy looks the names up, and is its user's choice; those that it is not asked for (`NO_PROXY`) are looked at here.
        let by_proxy = config.proxy().is_some_and(|proxy| !proxy.is_no_proxy(uri) || proxy.uri() == uri);
        if self.check && !by_proxy && found.iter().any(|address| is_private(address.ip())) {
            return Err(ureq::Error::Io(std::io::Error::new(std::io::ErrorKind::PermissionDenied, PRIVATE)));
        }
        Ok(found)
    }
}

/// Of this machine, its links and the networks of a house or a firm (the IANA registries of special-purpose addresses).
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
            // What has an address of the fourth version in it is at that one: behind NAT64, and 6to4.
            match segments {
                [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] if inner(high, low) => return true,
                _ => {}
            }
            v6.is_loopback()
                || v6.is_unspecified()
                || v6.is_unique_local()
                || v6.is_unicast_link_local()
                || v6.is_multicast()
                || segments[0] & 0xffc0 == 0xfec0
                || segments[..3] == [0x64, 0xff9b, 1]
        }
    }
}

pub(crate) fn trouble(error: &ureq::Error) -> Trouble {
    use rustls::Error::{General, InvalidCertRevocationList, InvalidCertificate, NoCertificatesPresented};
    let inner = match error {
        ureq::Error::Io(error) => error.get_ref(),
        _ => None,
    };
    if inner.is_some_and(|inner| inner.to_string() == PRIVATE) {
        return Trouble::Refused("it is at a private address, which needs allow-private".into());
    }
    let tls = match error {
        ureq::Error::Rustls(error) => Some(error),
        _ => inner.and_then(|inner| inner.downcast_ref()),
    };
    match tls {
        // `General` is what the verifier says when it finds no certificates on this system.
        Some(InvalidCertificate(_) | InvalidCertRevocationList(_) | NoCertificatesPresented | General(_)) => {
            Trouble::Refused("its certificate is not trusted here; SSL_CERT_FILE names one that is".into())
        }
        // Its words have the address, and that may be a secret.
        _ if matches!(error, ureq::Error::BadUri(_)) => Trouble::Unusable("its address cannot be asked".into()),
        _ => Trouble::Passing(plain(&error.to_string())),
    }
}

/// Without the names of types and the host's numbers of errors; what a stranger wrote is made harmless.
pub(crate) fn plain(text: &str) -> String {
    let text = text.strip_prefix("io: ").unwrap_or(text);
    display(lockbox_terminal::without_numbers(text.to_owned()).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let agent = agent_by(&Options::default(), Some(proxy.build().unwrap()));
        let asked = |url: &str| trouble(&agent.get(url).call().unwrap_err());
        assert!(matches!(asked("http://localhost:9/"), Trouble::Refused(why) if why.contains("allow-private")));
        // The proxy itself may be at home.
        assert!(matches!(asked("https://example.org/"), Trouble::Passing(_)));
    }

    #[test]
    fn what_a_stranger_wrote_is_harmless_on_a_terminal() {
        let error = ureq::Error::Io(std::io::Error::other("\u{1b}]0;title\u{7}\u{1b}[31m"));
        let Trouble::Passing(told) = trouble(&error) else { panic!("{error}") };
        assert!(told.contains("title") && !told.contains(['\u{1b}', '\u{7}']), "{told:?}");
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
