//! Decides whether a response is from the store that was asked.
//!
//! A device between this machine and a store may respond in the store's place: a captive portal,
//! the block page of a proxy, the maintenance page of a load balancer. It needs plain http, or a
//! TLS endpoint on the way with a certificate that is trusted here. Its pages have any status, and
//! some ignore methods and conditions.
//!
//! # Invariants
//! PROOF-1  A response counts only if it carries the proof of the store that was asked: success,
//!     denial, conflict and absence alike. Any other response is a transient failure: the request
//!     is repeated as after a lost response (OBJECTS-3), and nothing is concluded from it, neither
//!     that an object is durable, missing or damaged, nor the time.
//!
//! # Proofs
//! A portal cannot know the marks that the store's interface gives each response, and no page of it
//! has a value that depends on the bytes sent.
//!
//! S3.  A create succeeded if the entity tag is the MD5 of the bytes sent: every store returns that
//!     for an object that was sent in one request and is not encrypted with a key of its user.
//!     Amazon under SSE-KMS, SSE-C and in directory buckets, and MinIO under SSE, return another
//!     tag: there a quoted tag counts together with a request id, in a response without a body, as
//!     the interface has it and no page does. Any other response counts if it has a request id
//!     (`x-amz-request-id`, `x-amz-id-2`): Amazon, MinIO, Ceph, Wasabi, B2, SeaweedFS and versitygw
//!     send one with each. CloudFront's `x-amz-cf-id` is not such an id: portals and maintenance
//!     pages are hosted there. R2, and any other store that sends none, is recognised by the
//!     documents of the interface: a list is a `ListBucketResult`, a failure an `Error` with its
//!     `Code`, and a response to a read has a tag of the form that the interface defines (32
//!     hexadecimal digits) and is not an HTML page. A removal has no document, so there a read
//!     decides (`bucket/s3_store.rs`).
//! Google.  A create succeeded if `x-goog-hash` or the entity tag has the MD5 of the bytes sent,
//!     under any key with which the object is encrypted. Each response has `x-guploader-uploadid`,
//!     and those about an object `x-goog-generation`; else the documents count.
//! Azure.  Each response has `x-ms-request-id`, that of the emulator too. A create succeeded if it
//!     has an entity tag in addition to that, and no `Content-MD5` of other bytes.
//! Web.  A web server (https, WebDAV) proves nothing: its responses look like the responses of any
//!     other one. The rule is that an HTML page, and a success without bytes, is not part of an
//!     archive; all other bytes belong to the version found at open (REMOTE-1), and nothing is
//!     written there. A missing or replaced file is believed, because it only causes an error: the
//!     next read asks again.
//! Local.  A directory (`file://`, WebDAV that is mounted) has no foreign responses: the host's
//!     file system reports the result of a call.
//!
//! An attacker that changes the traffic can forge all of these; over plain http nothing prevents it
//! (THREATS).

use std::io::{Cursor, Read};
use std::time::{Duration, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ureq::Body;
use ureq::http::{HeaderMap, Response, StatusCode, header};

use crate::hex;
use crate::range_source::{RemoteError, RemoteResult};

/// Bytes of a document that contain its first element and the code of an error.
const MAX_PREFIX: u64 = 16 << 10;
/// Longest pause that a server can ask for: a wrong clock there does not stop a mount for days.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(3600);
const S3_IDS: [&str; 2] = ["x-amz-request-id", "x-amz-id-2"];
const GOOGLE_IDS: [&str; 3] = ["x-guploader-uploadid", "x-goog-generation", "x-goog-hash"];
const AZURE_IDS: [&str; 1] = ["x-ms-request-id"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestKind<'a> {
    /// Create of an object with this hash (MD5 in Base64).
    Create(&'a str),
    Read,
    List,
    Remove,
    RemoveBatch,
}

/// Returns the answer when it is that of a store that speaks S3. Errors: `Transient` for any other
/// one (PROOF-1).
pub(crate) fn check_s3(kind: RequestKind<'_>, response: Response<Body>) -> RemoteResult<Response<Body>> {
    let has_id = has_any(response.headers(), &S3_IDS);
    match kind {
        RequestKind::Create(hash) if response.status().is_success() => {
            if has_tag_of(response.headers(), hash) {
                return Ok(response);
            }
            let is_quoted = tag(response.headers()).is_some_and(|tag| tag.len() > 2 && unquoted(tag) != tag);
            if !has_id || !is_quoted {
                return Err(unproven(response.status(), has_id));
            }
            // How an answer without a body says so is for its server: by its length, in pieces, or
            // by its end.
            let (response, prefix) = read_prefix(response)?;
            if prefix.is_empty() { Ok(response) } else { Err(unproven(response.status(), true)) }
        }
        _ => check_s3_interface(kind, has_id, response),
    }
}

/// Returns the answer when it is that of Google's store. Errors: `Transient` for any other one
/// (PROOF-1).
pub(crate) fn check_google(kind: RequestKind<'_>, response: Response<Body>) -> RemoteResult<Response<Body>> {
    let has_id = has_any(response.headers(), &GOOGLE_IDS);
    match kind {
        RequestKind::Create(hash) if response.status().is_success() => {
            let declared = response.headers().get_all("x-goog-hash").iter().filter_map(|value| value.to_str().ok());
            let mut declared =
                declared.flat_map(|value| value.split(',')).filter_map(|part| part.trim().strip_prefix("md5="));
            let is_proved = declared.any(|declared| declared == hash) || has_tag_of(response.headers(), hash);
            if is_proved { Ok(response) } else { Err(unproven(response.status(), has_id)) }
        }
        _ => check_s3_interface(kind, has_id, response),
    }
}

/// Returns the answer when it is that of Azure's store. Errors: `Transient` for any other one
/// (PROOF-1).
pub(crate) fn check_azure(kind: RequestKind<'_>, response: Response<Body>) -> RemoteResult<Response<Body>> {
    let headers = response.headers();
    let has_id = has_any(headers, &AZURE_IDS);
    if let (RequestKind::Create(hash), true, true) = (kind, has_id, response.status().is_success()) {
        let is_other = headers.get("content-md5").is_some_and(|declared| declared != hash);
        if tag(headers).is_none() || is_other {
            return Err(unproven(response.status(), true));
        }
    }
    if has_id { check_retry_after(response) } else { Err(foreign_response(response.status())) }
}

/// Returns the answer of a web server unless it cannot be about a part of a file. Errors:
/// `Transient` for a page in place of the file.
pub(crate) fn check_web(response: Response<Body>) -> RemoteResult<Response<Body>> {
    let status = response.status();
    let is_about_a_file = match status {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => !is_html(response.headers()),
        _ => !status.is_success() && status != StatusCode::NETWORK_AUTHENTICATION_REQUIRED,
    };
    if is_about_a_file {
        return check_retry_after(response);
    }
    let status = status.as_u16();
    let why = format!("status {status} with a page in place of the file: a portal or proxy in between sent it");
    Err(RemoteError::Transient(why))
}

/// Checks all but successful creates by the marks that Amazon's and Google's interfaces share.
fn check_s3_interface(kind: RequestKind<'_>, has_id: bool, response: Response<Body>) -> RemoteResult<Response<Body>> {
    let status = response.status();
    if has_id {
        return check_retry_after(response);
    }
    let wanted = match (status.is_success(), kind) {
        (false, _) => "Error",
        (true, RequestKind::List) => "ListBucketResult",
        (true, RequestKind::RemoveBatch) => "DeleteResult",
        (true, RequestKind::Read) if has_tag_of_a_hash(response.headers()) && !is_html(response.headers()) => {
            return Ok(response);
        }
        (true, _) => return Err(foreign_response(status)),
    };
    let (response, prefix) = read_prefix(response)?;
    let is_document = first_element(&prefix) == Some(wanted) && (status.is_success() || prefix.contains("<Code>"));
    if is_document { check_retry_after(response) } else { Err(foreign_response(status)) }
}

/// Treats a failure with a `Retry-After` header as transient, with any status.
fn check_retry_after(response: Response<Body>) -> RemoteResult<Response<Body>> {
    let status = response.status();
    let is_failure = status.is_client_error() || status.is_server_error();
    let Some(value) = response.headers().get(header::RETRY_AFTER).filter(|_| is_failure) else { return Ok(response) };
    let now = text(response.headers(), header::DATE).and_then(date);
    let now = now.unwrap_or_else(|| UNIX_EPOCH.elapsed().map_or(0, |now| now.as_secs()));
    let after = parse_retry_after(value.to_str().unwrap_or_default(), now);
    let why = format!("status {}, with a retry after {} seconds", status.as_u16(), after.as_secs());
    Err(RemoteError::Busy { why, after })
}

/// Parses seconds or an HTTP date; `now` is the server's time in seconds since 1970. Zero for an
/// invalid value.
fn parse_retry_after(value: &str, now: u64) -> Duration {
    let seconds = value.trim().parse().ok().or_else(|| date(value.trim()).map(|date| date.saturating_sub(now)));
    Duration::from_secs(seconds.unwrap_or(0)).min(MAX_RETRY_AFTER)
}

fn foreign_response(status: StatusCode) -> RemoteError {
    let status = status.as_u16();
    RemoteError::Transient(format!(
        "the response is not from this store (status {status}); a portal or proxy in between sent it"
    ))
}

fn unproven(status: StatusCode, has_id: bool) -> RemoteError {
    if !has_id {
        return foreign_response(status);
    }
    let status = status.as_u16();
    RemoteError::Transient(format!("the response does not prove that the store has the bytes sent (status {status})"))
}

fn has_any(headers: &HeaderMap, names: &[&str]) -> bool {
    names.iter().any(|name| headers.get(*name).is_some_and(|value| !value.is_empty()))
}

fn tag(headers: &HeaderMap) -> Option<&str> {
    headers.get(header::ETAG).and_then(|tag| tag.to_str().ok()).map(str::trim).filter(|tag| !tag.is_empty())
}

/// Returns the tag without quotes and without the mark of a weak tag, which a compressing proxy
/// adds.
fn unquoted(tag: &str) -> &str {
    let tag = tag.strip_prefix("W/").unwrap_or(tag);
    tag.strip_prefix('"').and_then(|tag| tag.strip_suffix('"')).unwrap_or(tag)
}

fn has_tag_of(headers: &HeaderMap, hash: &str) -> bool {
    let hash = STANDARD.decode(hash).map(|hash| hex(&hash)).unwrap_or_default();
    !hash.is_empty() && tag(headers).is_some_and(|tag| unquoted(tag).eq_ignore_ascii_case(&hash))
}

/// Returns whether the tag is a hash: that of an object that was sent in one request, or in
/// several, with their number.
fn has_tag_of_a_hash(headers: &HeaderMap) -> bool {
    let Some(tag) = tag(headers).map(unquoted) else { return false };
    let (hash, parts) = tag.split_once('-').unwrap_or((tag, "1"));
    hash.len() == 32 && hash.bytes().all(|digit| digit.is_ascii_hexdigit()) && parts.parse::<u32>().is_ok()
}

fn is_html(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    ["text/html", "application/xhtml+xml"].contains(&&*kind)
}

/// Returns the response and the text that its body begins with.
fn read_prefix(response: Response<Body>) -> RemoteResult<(Response<Body>, String)> {
    let (parts, body) = response.into_parts();
    let mut rest = body.into_reader();
    let mut bytes = Vec::new();
    let read = rest.by_ref().take(MAX_PREFIX).read_to_end(&mut bytes);
    read.map_err(|_| RemoteError::Transient("its response was truncated".into()))?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let body = Body::builder().reader(Cursor::new(bytes).chain(rest));
    Ok((Response::from_parts(parts, body), text))
}

/// Returns the name of the first element of an XML document, without its namespace prefix.
fn first_element(text: &str) -> Option<&str> {
    let mut text = text.trim_start_matches('\u{feff}').trim_start();
    while let Some(rest) = text.strip_prefix("<?") {
        text = rest.split_once("?>")?.1.trim_start();
    }
    let name = text.strip_prefix('<')?;
    let name = &name[..name.find(|end: char| end == '>' || end == '/' || end.is_whitespace())?];
    Some(name.rsplit(':').next().unwrap_or(name))
}

pub(crate) fn text(headers: &HeaderMap, name: header::HeaderName) -> Option<&str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

/// Parses an HTTP date to seconds since 1970.
pub(crate) fn date(text: &str) -> Option<u64> {
    let time = httpdate::parse_http_date(text).ok()?;
    time.duration_since(UNIX_EPOCH).ok().map(|time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// MD5 of nothing.
    const HASH: &str = "1B2M2Y8AsgTpgAmY7PhCfg==";
    const TAG: &str = "\"d41d8cd98f00b204e9800998ecf8427e\"";
    const LIST: &str = "<?xml version=\"1.0\"?>\n<ListBucketResult xmlns=\"x\"/>";
    const MISSING: &str = "\u{feff}<?xml version='1.0'?><Error><Code>NoSuchKey</Code></Error>";
    const PAGE: &str = "<!DOCTYPE html><html><body>ListBucketResult &lt;Error> <Code>NoSuchKey</Code></body></html>";

    type CheckFn = fn(RequestKind<'_>, Response<Body>) -> RemoteResult<Response<Body>>;

    fn response(status: u16, headers: &[(&str, &str)], body: &str) -> Response<Body> {
        let builder = headers.iter().fold(Response::builder(), |builder, (name, value)| builder.header(*name, *value));
        builder.status(status).body(Body::builder().data(body)).unwrap()
    }

    fn is_accepted(check: CheckFn, kind: RequestKind<'_>, status: u16, headers: &[(&str, &str)], body: &str) -> bool {
        match check(kind, response(status, headers, body)) {
            Ok(response) => {
                assert_eq!(response.into_body().read_to_string().unwrap(), body, "what was looked at is lost");
                true
            }
            Err(RemoteError::Transient(why) | RemoteError::Busy { why, .. }) => {
                assert!(why.contains(&format!("status {status}")), "{why}");
                false
            }
            Err(error) => panic!("{error:?}"),
        }
    }

    #[test]
    fn a_creation_succeeds_by_the_hash_of_what_was_sent() {
        let creates =
            |check: CheckFn, headers: &[(&str, &str)]| is_accepted(check, RequestKind::Create(HASH), 200, headers, "");
        for tag in [TAG, "W/\"D41D8CD98F00B204E9800998ECF8427E\"", "d41d8cd98f00b204e9800998ecf8427e"] {
            assert!(creates(check_s3, &[("etag", tag)]) && creates(check_google, &[("etag", tag)]), "{tag}");
        }
        let id = ("x-amz-request-id", "1");
        // An encrypted bucket.
        assert!(creates(check_s3, &[id, ("etag", "\"0f343b0931126a20f133d67c2b018a3b\"")]));
        for other in [&[id][..], &[id, ("etag", "0f343b")], &[id, ("etag", "\"\"")], &[("etag", "\"5f3c-1a\"")], &[]] {
            assert!(!creates(check_s3, other), "{other:?}");
        }
        // A page on a network that is built upon such a store.
        let page = [id, ("etag", "\"5f3c-1a\"")];
        assert!(!is_accepted(check_s3, RequestKind::Create(HASH), 200, &page, PAGE));
        assert!(!is_accepted(
            check_s3,
            RequestKind::Create(HASH),
            200,
            &[("x-amz-cf-id", "1"), ("etag", "\"5f3c-1a\"")],
            ""
        ));
        let upload = ("x-guploader-uploadid", "1");
        let hash = format!("md5={HASH}");
        assert!(creates(check_google, &[upload, ("x-goog-hash", "crc32c=AAAAAA=="), ("x-goog-hash", &hash)]));
        assert!(creates(check_google, &[("x-goog-hash", &format!("crc32c=AAAAAA==, {hash}"))]));
        assert!(
            !creates(check_google, &[upload, ("x-goog-hash", "md5=AAAA"), ("etag", "\"x\"")])
                && !creates(check_google, &[upload])
        );
        let (id, tag) = (("x-ms-request-id", "1"), ("etag", "\"0x8D\""));
        assert!(creates(check_azure, &[id, tag]) && creates(check_azure, &[id, tag, ("content-md5", HASH)]));
        assert!(
            !creates(check_azure, &[id, tag, ("content-md5", "AAAA")])
                && !creates(check_azure, &[id])
                && !creates(check_azure, &[tag])
        );
    }

    #[test]
    fn every_other_answer_counts_by_its_request_id_or_its_document() {
        let ids: [(CheckFn, &str); 4] = [
            (check_s3, "x-amz-request-id"),
            (check_s3, "x-amz-id-2"),
            (check_google, "X-GUploader-UploadID"),
            (check_azure, "x-ms-request-id"),
        ];
        let kind = [RequestKind::Create(HASH), RequestKind::Read, RequestKind::List, RequestKind::Remove];
        for (check, id) in ids {
            for status in [301, 400, 403, 404, 409, 412, 416, 503] {
                for kind in kind {
                    assert!(is_accepted(check, kind, status, &[(id, "1")], ""), "{id} {status} {kind:?}");
                    assert!(!is_accepted(check, kind, status, &[(id, "")], PAGE), "{status} {kind:?}");
                    assert!(!is_accepted(check, kind, status, &[("cf-ray", "1"), ("server", "cloudflare")], PAGE));
                }
            }
            for kind in [RequestKind::Read, RequestKind::List, RequestKind::Remove] {
                assert!(is_accepted(check, kind, 200, &[(id, "1")], ""), "{id} {kind:?}");
                assert!(!is_accepted(check, kind, 200, &[("etag", "\"5f3c-1a\"")], PAGE), "{kind:?}");
                assert!(!is_accepted(check, kind, 204, &[], ""), "{kind:?}");
            }
        }
        // R2 sends no id.
        for check in [check_s3 as CheckFn, check_google] {
            for status in [403, 404, 412, 416] {
                assert!(is_accepted(check, RequestKind::Read, status, &[], MISSING), "{status}");
            }
            assert!(
                is_accepted(check, RequestKind::List, 200, &[], LIST)
                    && !is_accepted(check, RequestKind::List, 200, &[], MISSING)
            );
            assert!(
                !is_accepted(check, RequestKind::Remove, 204, &[], "")
                    && !is_accepted(check, RequestKind::Remove, 200, &[], LIST)
            );
            for tag in [TAG, "\"d41d8cd98f00b204e9800998ecf8427e-12\""] {
                assert!(is_accepted(check, RequestKind::Read, 206, &[("etag", tag)], "bytes"), "{tag}");
                assert!(!is_accepted(
                    check,
                    RequestKind::Read,
                    206,
                    &[("etag", tag), ("content-type", "Text/HTML; x")],
                    PAGE
                ));
            }
        }
    }

    #[test]
    fn what_can_be_asked_again_later_passes() {
        let later = [("x-amz-request-id", "1"), ("x-ms-request-id", "1"), ("x-goog-hash", "1"), ("retry-after", "9")];
        for status in [403, 404, 429, 503] {
            for check in [check_s3 as CheckFn, check_google, check_azure, |_, response| check_web(response)] {
                assert!(!is_accepted(check, RequestKind::Read, status, &later, ""), "{status}");
            }
        }
        assert!(is_accepted(check_s3, RequestKind::Read, 206, &later, ""));
    }

    #[test]
    fn a_pause_is_seconds_or_a_date_by_the_clock_of_the_server() {
        let date = ("date", "Thu, 26 Nov 2026 01:00:00 GMT");
        for (value, seconds) in [
            ("60", 60),
            ("Thu, 26 Nov 2026 01:02:00 GMT", 120),
            ("Thu, 26 Nov 2026 00:00:00 GMT", 0),
            ("x", 0),
            ("86400", 3600),
        ] {
            let busy = check_web(response(503, &[date, ("retry-after", value)], "")).unwrap_err();
            assert_eq!(busy.retry_after().map_or(0, |pause| pause.as_secs()), seconds, "{value}");
            assert_eq!(busy.retry_after().is_some(), seconds > 0, "{value}");
            assert!(busy.message().contains(&format!("a retry after {seconds} seconds")), "{busy:?}");
        }
        assert_eq!(parse_retry_after("Thu, 26 Nov 2026 01:00:07 GMT", 1_795_654_800), Duration::from_secs(7));
    }

    #[test]
    fn a_page_in_place_of_a_file_of_a_web_server_passes() {
        let check: CheckFn = |_, response| check_web(response);
        for (status, kind, is_file) in [
            (200, "text/html; charset=utf-8", false),
            (206, "application/xhtml+xml", false),
            (204, "", false),
            (511, "text/html", false),
            (200, "application/octet-stream", true),
            (206, "", true),
            (404, "text/html", true),
            (412, "", true),
        ] {
            assert_eq!(
                is_accepted(check, RequestKind::Read, status, &[("content-type", kind)], ""),
                is_file,
                "{status} {kind}"
            );
        }
    }

    #[test]
    fn the_first_element_of_a_document_is_found_and_of_nothing_else() {
        for (text, name) in [
            (LIST, Some("ListBucketResult")),
            (MISSING, Some("Error")),
            ("<s3:Error>", Some("Error")),
            (PAGE, Some("!DOCTYPE")),
            ("<Error", None),
            ("<?xml", None),
            ("Error", None),
            ("", None),
        ] {
            assert_eq!(first_element(text), name, "{text}");
        }
    }
}
