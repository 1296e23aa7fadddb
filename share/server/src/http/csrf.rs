//! Rejects requests that name no host, and cross-site changes.
//!
//! A browser sends in `Origin` the site of the script or form that makes the request, and in
//! `Sec-Fetch-Site` the relation of that site to the target; no script can write either. Other
//! programs send neither. So a page of another site can neither use up nor create a share through
//! the browser of a user that may.

use hyper::http::uri::Authority;
use hyper::{HeaderMap, Method, Request, Version, header};
use lockbox_share_protocol::message::ErrorCode;

use super::request::{Refusal, only};

/// `public_url` begins the links: the page may have been loaded by that name when a proxy changed
/// `Host`.
pub(super) fn check<B>(request: &Request<B>, public_url: &str) -> Result<(), Refusal> {
    let host = host(request)?;
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return Ok(());
    }
    if is_of_another_site(request.headers(), host.as_ref(), public_url)? {
        return Err(Refusal::new(ErrorCode::Forbidden, "pages of other sites can change nothing here"));
    }
    Ok(())
}

/// Returns the host that the request names. It is named once, so that two programs in a row cannot
/// understand it differently.
fn host<B>(request: &Request<B>) -> Result<Option<Authority>, Refusal> {
    let named = match only(request.headers(), header::HOST)? {
        None if request.version() == Version::HTTP_10 => None,
        None => return Err(Refusal::malformed("the header host is missing")),
        Some(text) => {
            // RFC 3986 allows more, which no name has: a list could be read as one of its parts.
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:[]".contains(&byte);
            let authority = Authority::try_from(text).ok().filter(|_| text.iter().copied().all(is_plain));
            Some(authority.ok_or_else(|| Refusal::malformed("the header host names no host"))?)
        }
    };
    match (request.uri().authority(), &named) {
        (Some(asked), Some(named)) if asked != named => {
            Err(Refusal::malformed("the request is for another host than its header says"))
        }
        _ => Ok(named),
    }
}

fn is_of_another_site(headers: &HeaderMap, host: Option<&Authority>, public_url: &str) -> Result<bool, Refusal> {
    let relation = only(headers, header::HeaderName::from_static("sec-fetch-site"))?;
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

/// A scheme, a name and a port.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(method: Method, headers: &[(&'static str, &str)]) -> Result<(), ErrorCode> {
        let mut request = Request::builder().method(method).uri("/v1/claim");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        check(&request.body(()).unwrap(), "https://share.example.org/links").map_err(|refusal| refusal.code)
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
        assert!(check(&old, "http://127.0.0.1:7377").is_ok());
        for (asked, fine) in [("http://a:7377/v1/limits", true), ("http://b/v1/limits", false)] {
            let request = Request::builder().uri(asked).header("host", "a:7377").body(()).unwrap();
            assert_eq!(check(&request, "http://x").is_ok(), fine, "{asked}");
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
