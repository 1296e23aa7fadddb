//! Parses requests (host, message, bearer token, query parameters), rejects cross-site changes, and
//! describes the refusal of a request.
//!
//! A browser sends in `Origin` the site of the script or form that makes the request, and in
//! `Sec-Fetch-Site` the relation of that site to the target; no script can write either. Other
//! programs send neither. So a page of another site can neither use up nor create a share through
//! the browser of a user that may.

use std::borrow::Cow;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{self, HeaderName};
use hyper::http::uri::Authority;
use hyper::{HeaderMap, Method, Request, Version};
use lockbox_share_protocol::message::{ErrorBody, ErrorCode};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use zeroize::Zeroizing;

use crate::limiter::RateLimited;
use crate::store::StoreError;

/// Longest message: a capsule in base64 has 11 KiB.
const MAX_MESSAGE: usize = 16 * 1024;

/// Rejects requests that name no host, and cross-site changes. `public_url` begins the links: the
/// page may have been loaded by that name when a proxy changed `Host`.
pub(super) fn check_site<B>(request: &Request<B>, public_url: &str) -> Result<(), HttpRefusal> {
    let host = host(request)?;
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    if is_of_another_site(request.headers(), host.as_ref(), public_url)? {
        return Err(HttpRefusal::new(ErrorCode::Forbidden, "cross-site request rejected"));
    }
    Ok(())
}

/// Returns the host that the request names, once: two programs in a row must agree on it.
fn host<B>(request: &Request<B>) -> Result<Option<Authority>, HttpRefusal> {
    let named = match only(request.headers(), header::HOST)? {
        None if request.version() == Version::HTTP_10 => None,
        None => return Err(HttpRefusal::malformed("the header host is missing")),
        Some(text) => {
            // RFC 3986 allows more, which no name has: a list could be read as one of its parts.
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
            let authority = Authority::try_from(text).ok().filter(|_| text.iter().copied().all(is_plain));
            Some(authority.ok_or_else(|| HttpRefusal::malformed("the header host names no host"))?)
        }
    };
    match (request.uri().authority(), &named) {
        (Some(asked), Some(named)) if asked != named => {
            Err(HttpRefusal::malformed("the request is for another host than its header says"))
        }
        _ => Ok(named),
    }
}

fn is_of_another_site(headers: &HeaderMap, host: Option<&Authority>, public_url: &str) -> Result<bool, HttpRefusal> {
    let relation = only(headers, HeaderName::from_static("sec-fetch-site"))?;
    if relation.is_some_and(|relation| !matches!(relation, b"same-origin" | b"none")) {
        return Ok(true);
    }
    let Some(origin) = only(headers, header::ORIGIN)? else { return Ok(false) };
    let Some(origin) = std::str::from_utf8(origin).ok().and_then(WebOrigin::of) else { return Ok(true) };
    let is_public = WebOrigin::of(public_url).is_some_and(|public| public == origin);
    // Without a proxy's word it is not known whether the browser came by TLS, so the scheme is the
    // origin's.
    let is_host = host.is_some_and(|host| WebOrigin::new(origin.scheme, host) == origin);
    Ok(!is_public && !is_host)
}

#[derive(PartialEq, Eq)]
struct WebOrigin<'a> {
    scheme: &'a str,
    name: String,
    port: u16,
}

impl<'a> WebOrigin<'a> {
    /// Parses an origin, or a URL with a path.
    fn of(text: &'a str) -> Option<WebOrigin<'a>> {
        let (scheme, rest) = text.split_once("://")?;
        let authority = rest.split('/').next().unwrap_or_default().parse().ok()?;
        matches!(scheme, "http" | "https").then(|| WebOrigin::new(scheme, &authority))
    }

    fn new(scheme: &'a str, authority: &Authority) -> WebOrigin<'a> {
        let usual = if scheme == "https" { 443 } else { 80 };
        let port = authority.port_u16().unwrap_or(usual);
        WebOrigin { scheme, name: authority.host().to_ascii_lowercase(), port }
    }
}

/// The next part of a body; None at its end.
pub(super) async fn part(body: &mut Incoming, patience: Duration) -> Result<Option<Bytes>, HttpRefusal> {
    loop {
        match timeout(patience, body.frame()).await {
            Err(_) => return Err(HttpRefusal::too_slow()),
            Ok(None) => return Ok(None),
            Ok(Some(Err(_))) => return Err(HttpRefusal::malformed("the request ended early")),
            // Trailers say nothing here.
            Ok(Some(Ok(frame))) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

/// Reads a message of at most [`MAX_MESSAGE`] bytes, and wipes its text, which may hold a proof.
pub(super) async fn json<T: DeserializeOwned>(
    request: Request<Incoming>,
    patience: Duration,
) -> Result<T, HttpRefusal> {
    expect_type(request.headers(), "application/json")?;
    let too_large = || HttpRefusal::new(ErrorCode::TooLarge, "the message is too large");
    let mut body = request.into_body();
    let announced = usize::try_from(body.size_hint().lower()).unwrap_or(usize::MAX);
    if announced > MAX_MESSAGE {
        return Err(too_large());
    }
    let mut text = Zeroizing::new(Vec::with_capacity(announced));
    let read = async {
        while let Some(bytes) = part(&mut body, patience).await? {
            if text.len() + bytes.len() > MAX_MESSAGE {
                return Err(too_large());
            }
            text.extend_from_slice(&bytes);
        }
        Ok(())
    };
    // The whole message has one time, or a client could send a byte now and then for ever.
    timeout(patience, read).await.map_err(|_| HttpRefusal::too_slow())??;
    // Only the position of the fault is reported: the parser's message could repeat a secret.
    serde_json::from_slice(&text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        HttpRefusal::malformed(format!(
            "the message does not have the format of this path: line {line}, column {column}"
        ))
    })
}

pub(super) fn expect_type(headers: &HeaderMap, expected: &'static str) -> Result<(), HttpRefusal> {
    let given = headers.get(header::CONTENT_TYPE).map(|value| value.as_bytes()).unwrap_or_default();
    let essence = given.split(|&byte| byte == b';').next().unwrap_or_default().trim_ascii();
    if essence.eq_ignore_ascii_case(expected.as_bytes()) {
        return Ok(());
    }
    Err(HttpRefusal::new(ErrorCode::MediaType, format!("the body must be of the type {expected}")))
}

pub(super) fn bearer<T: std::str::FromStr>(headers: &HeaderMap) -> Result<T, HttpRefusal> {
    let missing = || HttpRefusal::new(ErrorCode::Unauthorized, "a bearer token is needed");
    let value = only(headers, header::AUTHORIZATION)?.ok_or_else(missing)?;
    let (scheme, token) = std::str::from_utf8(value).ok().and_then(|text| text.split_once(' ')).ok_or_else(missing)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(missing());
    }
    token.trim().parse().map_err(|_| HttpRefusal::new(ErrorCode::Unauthorized, "the bearer token has a wrong form"))
}

/// Returns the only value of a header: two programs in a row could pick different ones of several.
pub(super) fn only(headers: &HeaderMap, name: HeaderName) -> Result<Option<&[u8]>, HttpRefusal> {
    let mut values = headers.get_all(&name).iter();
    let first = values.next().map(|value| value.as_bytes());
    if values.next().is_some() {
        return Err(HttpRefusal::malformed(format!("the header {name} is repeated")));
    }
    Ok(first)
}

/// Reads `a=1&b=2` with these names only, each at most once.
pub(super) fn parameters<'a, const N: usize>(
    query: Option<&'a str>,
    names: [&str; N],
) -> Result<[Option<&'a str>; N], HttpRefusal> {
    let mut values = [None; N];
    for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        match names.iter().position(|known| *known == name) {
            Some(place) if values[place].is_none() => values[place] = Some(value),
            _ => return Err(HttpRefusal::malformed("a parameter is unknown or repeated")),
        }
    }
    Ok(values)
}

#[derive(Debug)]
pub(super) struct HttpRefusal {
    pub(super) code: ErrorCode,
    message: Cow<'static, str>,
    /// Seconds since 1970.
    at: Option<u64>,
    /// Seconds.
    pub(super) retry_after: Option<u64>,
    pub(super) allow: Option<&'static str>,
}

impl HttpRefusal {
    pub(super) fn new(code: ErrorCode, message: impl Into<Cow<'static, str>>) -> HttpRefusal {
        HttpRefusal { code, message: message.into(), at: None, retry_after: None, allow: None }
    }

    pub(super) fn malformed(message: impl Into<Cow<'static, str>>) -> HttpRefusal {
        HttpRefusal::new(ErrorCode::Malformed, message)
    }

    pub(super) fn method(allow: &'static str) -> HttpRefusal {
        let refusal = HttpRefusal::new(ErrorCode::Method, "the path does not support this method");
        HttpRefusal { allow: Some(allow), ..refusal }
    }

    fn too_slow() -> HttpRefusal {
        HttpRefusal::new(ErrorCode::Timeout, "the request came too slowly")
    }

    /// The daemon is there and cannot do it at this time.
    pub(super) fn unavailable(message: &'static str) -> HttpRefusal {
        HttpRefusal { retry_after: Some(5), ..HttpRefusal::new(ErrorCode::Unavailable, message) }
    }

    /// Converts the refusal to an error body or one result of a batch.
    pub(super) fn failure(self) -> ErrorBody {
        ErrorBody { error: self.code, message: self.message.into_owned(), at: self.at }
    }
}

impl From<RateLimited> for HttpRefusal {
    fn from(RateLimited(wait): RateLimited) -> HttpRefusal {
        let refusal = HttpRefusal::new(ErrorCode::Limited, "too many requests, try again later");
        HttpRefusal { retry_after: Some(wait.as_secs() + 1), ..refusal }
    }
}

impl From<StoreError> for HttpRefusal {
    fn from(error: StoreError) -> HttpRefusal {
        let since = |code, message: &'static str, at: u64| HttpRefusal {
            at: Some(at / 1000),
            ..HttpRefusal::new(code, message)
        };
        match error {
            StoreError::Unknown => {
                HttpRefusal::new(ErrorCode::Refused, "there is no such share, or the proof is wrong")
            }
            StoreError::Expired { at } => since(ErrorCode::Expired, "the share has expired", at.0),
            StoreError::Revoked { at } => since(ErrorCode::Revoked, "the share was revoked by its owner", at.0),
            StoreError::Used { at } => since(ErrorCode::Consumed, "the share was used", at.0),
            StoreError::Busy { until } => since(ErrorCode::Leased, "another client is downloading the share", until.0),
            StoreError::NothingToRearm => {
                HttpRefusal::new(ErrorCode::NotInterrupted, "no download of the share was interrupted")
            }
            StoreError::Full => HttpRefusal::new(ErrorCode::NoSpace, "no space is left for shares"),
            StoreError::Invalid(message) => HttpRefusal::malformed(message),
            StoreError::Taken => {
                tracing::error!("no free handle was found: more digits are needed for so many shares");
                HttpRefusal::new(ErrorCode::Internal, "no free handle was found")
            }
            StoreError::Unavailable(reason) => {
                tracing::warn!(reason, "the store takes no changes");
                HttpRefusal::unavailable("the server is read-only right now")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockbox_share_protocol::token::LeaseToken;

    #[test]
    fn parameters_are_known_and_there_once() {
        assert_eq!(parameters(Some("wait=3&version=7"), ["version", "wait"]).unwrap(), [Some("7"), Some("3")]);
        assert_eq!(parameters(None, ["version"]).unwrap(), [None]);
        assert!(parameters(Some("version=1&version=2"), ["version"]).is_err());
        assert!(parameters(Some("verson=1"), ["version"]).is_err());
    }

    #[test]
    fn a_bearer_token_is_there_once_and_well_formed() {
        let text = LeaseToken::new([3; 16]).to_text().to_string();
        let ask = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, value.parse().unwrap());
            }
            bearer::<LeaseToken>(&headers).map(|token| token.to_text().to_string()).map_err(|refusal| refusal.code)
        };
        assert_eq!(ask(&[&format!("Bearer {text}")]), Ok(text.clone()));
        assert_eq!(ask(&[&format!("bearer  {text}")]), Ok(text.clone()));
        assert_eq!(ask(&[]), Err(ErrorCode::Unauthorized));
        assert_eq!(ask(&[&format!("Basic {text}")]), Err(ErrorCode::Unauthorized));
        assert_eq!(ask(&["Bearer short"]), Err(ErrorCode::Unauthorized));
        assert_eq!(ask(&[&format!("Bearer {text}"), "Bearer x"]), Err(ErrorCode::Malformed));
    }

    fn ask(method: Method, headers: &[(&'static str, &str)]) -> Result<(), ErrorCode> {
        let mut request = Request::builder().method(method).uri("/v1/claim");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check_site(&request.body(()).unwrap(), "https://share.example.org/links").map_err(|refusal| refusal.code)
    }

    #[test]
    fn the_host_is_said_once() {
        assert_eq!(ask(Method::GET, &[("host", "share.example.org:443")]), Ok(()));
        assert_eq!(ask(Method::GET, &[]), Err(ErrorCode::Malformed));
        for host in ["", "a b", "a,b", "user@a", "a/b"] {
            assert_eq!(ask(Method::GET, &[("host", host)]), Err(ErrorCode::Malformed), "{host}");
        }
        assert_eq!(ask(Method::GET, &[("host", "a"), ("host", "a")]), Err(ErrorCode::Malformed));
        let old = Request::builder().version(Version::HTTP_10).uri("/v1/limits").body(()).unwrap();
        assert!(check_site(&old, "http://127.0.0.1:7377").is_ok());
        for (asked, fine) in [("http://a:7377/v1/limits", true), ("http://b/v1/limits", false)] {
            let request = Request::builder().uri(asked).header("host", "a:7377").body(()).unwrap();
            assert_eq!(check_site(&request, "http://x").is_ok(), fine, "{asked}");
        }
    }

    #[test]
    fn changes_come_from_programs_and_from_the_daemons_own_page() {
        let host = ("host", "a.example:7377");
        for own in [
            &[host][..],
            &[host, ("origin", "http://a.example:7377"), ("sec-fetch-site", "same-origin")],
            &[host, ("origin", "https://A.example:7377")],
            &[host, ("origin", "https://share.example.org")],
            &[("host", "b.example"), ("origin", "https://b.example:443")],
            &[host, ("sec-fetch-site", "none")],
        ] {
            assert_eq!(ask(Method::POST, own), Ok(()), "{own:?}");
        }
        for other in [
            ("origin", "http://a.example"),
            ("origin", "http://a.example:7377.evil.example"),
            ("origin", "http://evil.example/a.example:7377"),
            ("origin", "http://a.example:7377@evil.example"),
            ("origin", "http://share.example.org"),
            ("origin", "null"),
            ("origin", ""),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-site", ""),
        ] {
            for method in [Method::POST, Method::PUT, Method::PATCH, Method::DELETE] {
                assert_eq!(ask(method, &[host, other]), Err(ErrorCode::Forbidden), "{other:?}");
            }
            // Looking changes nothing.
            assert_eq!(ask(Method::GET, &[host, other]), Ok(()), "{other:?}");
        }
    }
}
