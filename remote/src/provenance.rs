//! Decides whether an answer is that of the store that was asked.
//!
//! Something between this machine and a store may answer in the store's place: a captive portal,
//! the block page of a proxy, the maintenance page of a load balancer. It needs plain http, or
//! something on the way that ends TLS with a certificate that is trusted here. Its pages come with
//! any status, and some know neither methods nor conditions.
//!
//! # Invariants
//! PROOF-1  An answer counts only when it carries the proof of the store that was asked: success,
//!     refusal, conflict and the word that nothing is there alike. Any other answer is a passing
//!     failure: the request is repeated as after a lost answer (OBJECTS-3), and nothing is
//!     concluded from it, neither that an object is durable, gone or damaged, nor the time.
//!
//! # Proofs
//! A portal cannot know the marks that the store's interface gives each answer, and no page of it
//! has a value that depends on the bytes sent.
//!
//! S3.  A creation succeeded when the entity tag is the MD5 of the bytes sent: every store gives
//!     that for an object that came in one request and is not encrypted with a key of its user.
//!     Amazon under SSE-KMS, SSE-C and in directory buckets, and MinIO under SSE, give another one:
//!     there a quoted tag counts together with a request id, with an answer that has no body, as
//!     the interface has it and no page does. Any other answer counts when it has a request id
//!     (`x-amz-request-id`, `x-amz-id-2`): Amazon, MinIO, Ceph, Wasabi, B2, SeaweedFS and versitygw
//!     send one with each. CloudFront's `x-amz-cf-id` is no such id: portals and maintenance pages
//!     are hosted there. R2, and any other store that sends none, is known by the documents of the
//!     interface: a list is a `ListBucketResult`, a failure an `Error` with its `Code`, and a
//!     response to a read has a tag of the form that the interface gives (32 hexadecimal digits)
//!     and is no page of HTML. A removal has no document, so there a read decides (`bucket/s3.rs`).
//! Google.  A creation succeeded when `x-goog-hash` or the entity tag has the MD5 of the bytes
//!     sent, under any key with which the object is encrypted. Each answer has
//!     `x-guploader-uploadid`, and those about an object `x-goog-generation`; else the documents
//!     count.
//! Azure.  Each answer has `x-ms-request-id`, that of the emulator too. A creation succeeded when
//!     it has an entity tag in addition to that, and no `Content-MD5` of other bytes.
//! A web server (https, WebDAV) proves nothing: its answers look like the answers of any other one.
//!     The rule is that a page of HTML, and a success that has no bytes, is no part of an archive;
//!     all other bytes are of the version that the opening found (REMOTE-1), and nothing is written
//!     there. That a file is not there or was replaced is believed, for an error alone follows: the
//!     next read asks again.
//! A directory (`file://`, WebDAV that is mounted) has no answers of others: the host's file system
//!     reports the result of a call.
//!
//! An attacker that changes the traffic can forge all of these; over plain http nothing keeps them
//! from it (THREATS).

use std::io::{Cursor, Read};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ureq::Body;
use ureq::http::{HeaderMap, Response, StatusCode, header};

use crate::hex::hex;
use crate::range_source::Trouble;

/// Bytes of a document in which its first element and the code of an error stand.
const LOOKED_AT: u64 = 16 << 10;
/// Request ids of stores that speak S3.
const OF_S3: [&str; 2] = ["x-amz-request-id", "x-amz-id-2"];
const OF_GOOGLE: [&str; 3] = ["x-guploader-uploadid", "x-goog-generation", "x-goog-hash"];
const OF_AZURE: [&str; 1] = ["x-ms-request-id"];

/// The request that an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked<'a> {
    /// An object of this hash (MD5 in Base64) is to be made.
    Create(&'a str),
    Read,
    List,
    Remove,
}

type Judged = Result<Response<Body>, Trouble>;

/// Returns the answer when it is that of a store that speaks S3.
///
/// # Errors
/// `Passing` for any other one (PROOF-1).
pub(crate) fn s3(asked: Asked<'_>, response: Response<Body>) -> Judged {
    let is_named = has_any(response.headers(), &OF_S3);
    match asked {
        Asked::Create(hash) if response.status().is_success() => {
            if has_tag_of(response.headers(), hash) {
                return Ok(response);
            }
            let is_quoted = tag(response.headers()).is_some_and(|tag| tag.len() > 2 && unquoted(tag) != tag);
            if !is_named || !is_quoted {
                return Err(unproven(response.status(), is_named));
            }
            // How an answer without a body says so is for its server: by its length, in pieces, or by its end.
            let (response, begin) = begin(response)?;
            if begin.is_empty() { Ok(response) } else { Err(unproven(response.status(), true)) }
        }
        _ => interface(asked, is_named, response),
    }
}

/// Returns the answer when it is that of Google's store.
///
/// # Errors
/// `Passing` for any other one (PROOF-1).
pub(crate) fn google(asked: Asked<'_>, response: Response<Body>) -> Judged {
    let is_named = has_any(response.headers(), &OF_GOOGLE);
    match asked {
        Asked::Create(hash) if response.status().is_success() => {
            let said = response.headers().get_all("x-goog-hash").iter().filter_map(|value| value.to_str().ok());
            let mut said = said.flat_map(|value| value.split(',')).filter_map(|part| part.trim().strip_prefix("md5="));
            match said.any(|said| said == hash) || has_tag_of(response.headers(), hash) {
                true => Ok(response),
                false => Err(unproven(response.status(), is_named)),
            }
        }
        _ => interface(asked, is_named, response),
    }
}

/// Returns the answer when it is that of Azure's store.
///
/// # Errors
/// `Passing` for any other one (PROOF-1).
pub(crate) fn azure(asked: Asked<'_>, response: Response<Body>) -> Judged {
    let headers = response.headers();
    let is_named = has_any(headers, &OF_AZURE);
    if let (Asked::Create(hash), true, true) = (asked, is_named, response.status().is_success()) {
        let is_other = headers.get("content-md5").is_some_and(|said| said != hash);
        if tag(headers).is_none() || is_other {
            return Err(unproven(response.status(), true));
        }
    }
    if is_named { in_time(response) } else { Err(strange(response.status())) }
}

/// Returns the answer of a web server unless it cannot be about a part of a file.
///
/// # Errors
/// `Passing` for a page in place of the file.
pub(crate) fn web(response: Response<Body>) -> Judged {
    let status = response.status();
    let is_about_a_file = match status {
        StatusCode::OK | StatusCode::PARTIAL_CONTENT => !is_page(response.headers()),
        _ => !status.is_success() && status != StatusCode::NETWORK_AUTHENTICATION_REQUIRED,
    };
    match is_about_a_file {
        true => in_time(response),
        false => Err(Trouble::Passing(format!(
            "status {} with a page in place of the file: a portal or proxy on the way sends it",
            status.as_u16()
        ))),
    }
}

/// Judges all but successful creations by the marks that Amazon's and Google's interfaces have in
/// common.
fn interface(asked: Asked<'_>, is_named: bool, response: Response<Body>) -> Judged {
    let status = response.status();
    if is_named {
        return in_time(response);
    }
    let wanted = match (status.is_success(), asked) {
        (false, _) => "Error",
        (true, Asked::List) => "ListBucketResult",
        (true, Asked::Read) if has_tag_of_a_hash(response.headers()) && !is_page(response.headers()) => {
            return Ok(response);
        }
        (true, _) => return Err(strange(status)),
    };
    let (response, begin) = begin(response)?;
    let is_document = first_element(&begin) == Some(wanted) && (status.is_success() || begin.contains("<Code>"));
    if is_document { in_time(response) } else { Err(strange(status)) }
}

/// Judges a failure with a time after which to ask again as passing, with any status.
fn in_time(response: Response<Body>) -> Judged {
    let status = response.status();
    let is_failure = status.is_client_error() || status.is_server_error();
    match is_failure && response.headers().contains_key(header::RETRY_AFTER) {
        true => Err(Trouble::Passing(format!("status {}, and that it can be asked again later", status.as_u16()))),
        false => Ok(response),
    }
}

fn strange(status: StatusCode) -> Trouble {
    let status = status.as_u16();
    Trouble::Passing(format!(
        "the response is not an answer of this store (status {status}); a portal or proxy on the way sends it"
    ))
}

fn unproven(status: StatusCode, is_named: bool) -> Trouble {
    match is_named {
        true => Trouble::Passing(format!(
            "the response is not an answer of this store that proves that it has the bytes sent (status {})",
            status.as_u16()
        )),
        false => strange(status),
    }
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

fn is_page(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    ["text/html", "application/xhtml+xml"].contains(&&*kind)
}

/// The answer, and the text that its body begins with.
fn begin(response: Response<Body>) -> Result<(Response<Body>, String), Trouble> {
    let (parts, body) = response.into_parts();
    let mut rest = body.into_reader();
    let mut bytes = Vec::new();
    let read = rest.by_ref().take(LOOKED_AT).read_to_end(&mut bytes);
    read.map_err(|_| Trouble::Passing("its answer was cut off".into()))?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let body = Body::builder().reader(Cursor::new(bytes).chain(rest));
    Ok((Response::from_parts(parts, body), text))
}

/// The name of the first element of an XML document, without its namespace's prefix.
fn first_element(text: &str) -> Option<&str> {
    let mut text = text.trim_start_matches('\u{feff}').trim_start();
    while let Some(rest) = text.strip_prefix("<?") {
        text = rest.split_once("?>")?.1.trim_start();
    }
    let name = text.strip_prefix('<')?;
    let name = &name[..name.find(|end: char| end == '>' || end == '/' || end.is_whitespace())?];
    Some(name.rsplit(':').next().unwrap_or(name))
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

    type Judge = fn(Asked<'_>, Response<Body>) -> Judged;

    fn response(status: u16, headers: &[(&str, &str)], body: &str) -> Response<Body> {
        let builder = headers.iter().fold(Response::builder(), |builder, (name, value)| builder.header(*name, *value));
        builder.status(status).body(Body::builder().data(body)).unwrap()
    }

    fn counts(judge: Judge, asked: Asked<'_>, status: u16, headers: &[(&str, &str)], body: &str) -> bool {
        match judge(asked, response(status, headers, body)) {
            Ok(response) => {
                assert_eq!(response.into_body().read_to_string().unwrap(), body, "what was looked at is lost");
                true
            }
            Err(Trouble::Passing(why)) => {
                assert!(why.contains(&format!("status {status}")), "{why}");
                false
            }
            Err(trouble) => panic!("{trouble:?}"),
        }
    }

    #[test]
    fn a_creation_succeeds_by_the_hash_of_what_was_sent() {
        let made = |judge: Judge, headers: &[(&str, &str)]| counts(judge, Asked::Create(HASH), 200, headers, "");
        for tag in [TAG, "W/\"D41D8CD98F00B204E9800998ECF8427E\"", "d41d8cd98f00b204e9800998ecf8427e"] {
            assert!(made(s3, &[("etag", tag)]) && made(google, &[("etag", tag)]), "{tag}");
        }
        let id = ("x-amz-request-id", "1");
        // An encrypted bucket.
        assert!(made(s3, &[id, ("etag", "\"0f343b0931126a20f133d67c2b018a3b\"")]));
        for other in [&[id][..], &[id, ("etag", "0f343b")], &[id, ("etag", "\"\"")], &[("etag", "\"5f3c-1a\"")], &[]] {
            assert!(!made(s3, other), "{other:?}");
        }
        // A page on a network that is built upon such a store.
        let page = [id, ("etag", "\"5f3c-1a\"")];
        assert!(!counts(s3, Asked::Create(HASH), 200, &page, PAGE));
        assert!(!counts(s3, Asked::Create(HASH), 200, &[("x-amz-cf-id", "1"), ("etag", "\"5f3c-1a\"")], ""));
        let upload = ("x-guploader-uploadid", "1");
        let hash = format!("md5={HASH}");
        assert!(made(google, &[upload, ("x-goog-hash", "crc32c=AAAAAA=="), ("x-goog-hash", &hash)]));
        assert!(made(google, &[("x-goog-hash", &format!("crc32c=AAAAAA==, {hash}"))]));
        assert!(!made(google, &[upload, ("x-goog-hash", "md5=AAAA"), ("etag", "\"x\"")]) && !made(google, &[upload]));
        let (id, tag) = (("x-ms-request-id", "1"), ("etag", "\"0x8D\""));
        assert!(made(azure, &[id, tag]) && made(azure, &[id, tag, ("content-md5", HASH)]));
        assert!(!made(azure, &[id, tag, ("content-md5", "AAAA")]) && !made(azure, &[id]) && !made(azure, &[tag]));
    }

    #[test]
    fn every_other_answer_counts_by_its_request_id_or_its_document() {
        let ids: [(Judge, &str); 4] = [
            (s3, "x-amz-request-id"),
            (s3, "x-amz-id-2"),
            (google, "X-GUploader-UploadID"),
            (azure, "x-ms-request-id"),
        ];
        let asked = [Asked::Create(HASH), Asked::Read, Asked::List, Asked::Remove];
        for (judge, id) in ids {
            for status in [301, 400, 403, 404, 409, 412, 416, 503] {
                for asked in asked {
                    assert!(counts(judge, asked, status, &[(id, "1")], ""), "{id} {status} {asked:?}");
                    assert!(!counts(judge, asked, status, &[(id, "")], PAGE), "{status} {asked:?}");
                    assert!(!counts(judge, asked, status, &[("cf-ray", "1"), ("server", "cloudflare")], PAGE));
                }
            }
            for asked in [Asked::Read, Asked::List, Asked::Remove] {
                assert!(counts(judge, asked, 200, &[(id, "1")], ""), "{id} {asked:?}");
                assert!(!counts(judge, asked, 200, &[("etag", "\"5f3c-1a\"")], PAGE), "{asked:?}");
                assert!(!counts(judge, asked, 204, &[], ""), "{asked:?}");
            }
        }
        // R2 sends no id.
        for judge in [s3 as Judge, google] {
            for status in [403, 404, 412, 416] {
                assert!(counts(judge, Asked::Read, status, &[], MISSING), "{status}");
            }
            assert!(counts(judge, Asked::List, 200, &[], LIST) && !counts(judge, Asked::List, 200, &[], MISSING));
            assert!(!counts(judge, Asked::Remove, 204, &[], "") && !counts(judge, Asked::Remove, 200, &[], LIST));
            for tag in [TAG, "\"d41d8cd98f00b204e9800998ecf8427e-12\""] {
                assert!(counts(judge, Asked::Read, 206, &[("etag", tag)], "bytes"), "{tag}");
                assert!(!counts(judge, Asked::Read, 206, &[("etag", tag), ("content-type", "Text/HTML; x")], PAGE));
            }
        }
    }

    #[test]
    fn what_can_be_asked_again_later_passes() {
        let later = [("x-amz-request-id", "1"), ("x-ms-request-id", "1"), ("x-goog-hash", "1"), ("retry-after", "9")];
        for status in [403, 404, 429, 503] {
            for judge in [s3 as Judge, google, azure, |_, response| web(response)] {
                assert!(!counts(judge, Asked::Read, status, &later, ""), "{status}");
            }
        }
        assert!(counts(s3, Asked::Read, 206, &later, ""));
    }

    #[test]
    fn a_page_in_place_of_a_file_of_a_web_server_passes() {
        let judge: Judge = |_, response| web(response);
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
            assert_eq!(counts(judge, Asked::Read, status, &[("content-type", kind)], ""), is_file, "{status} {kind}");
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
