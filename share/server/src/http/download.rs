//! Serves the ciphertext of a lease, whole or a range of it (RFC 9110, 13 and 14).

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hyper::body::Incoming;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Request, StatusCode};
use lockbox_share_protocol::message::ErrorCode;
use lockbox_share_protocol::token::{Handle, LeaseToken};

use super::Daemon;
use super::reply::{self, FileBody, Reply, ReplyBody, Transfer};
use super::request::{self, HttpRefusal};
use crate::limiter::ClientId;
use crate::store::LeaseFinish;

/// `GET` and `HEAD /v1/shares/HANDLE/ciphertext`
pub(super) async fn download(
    daemon: &Arc<Daemon>,
    client: ClientId,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, HttpRefusal> {
    daemon.limiter.admit(client, 1)?;
    let token: LeaseToken = request::bearer(request.headers())?;
    // HEAD, 304 and 416 tell of a lease and leave it as it is (Store rule 12).
    let lease = daemon.store.lease(handle, &token).await.map_err(|error| daemon.refused(client, error))?;
    // Many parts make one download: the holder of the lease is not slowed down.
    daemon.limiter.give_back(client, 1);
    let length = lease.payload.length;
    let tag = format!("\"{}\"", lease.payload.digest);
    let headers = request.headers();
    let wanted = RangeHeaders {
        range: request::only(headers, header::RANGE)?,
        if_range: request::only(headers, header::IF_RANGE)?,
        if_none_match: request::only(headers, header::IF_NONE_MATCH)?,
    };
    let (status, first, end) = match decide(&wanted, length, &tag) {
        RangeDecision::Whole => (StatusCode::OK, 0, length),
        RangeDecision::Part { first, last } => (StatusCode::PARTIAL_CONTENT, first, last + 1),
        RangeDecision::NotModified => {
            let mut reply = reply::empty(StatusCode::NOT_MODIFIED);
            describe(&mut reply, &tag);
            return Ok(reply);
        }
        RangeDecision::NotSatisfiable => {
            let mut reply = HttpRefusal::new(ErrorCode::Range, "the range is outside of the file").reply();
            set(&mut reply, header::CONTENT_RANGE, &format!("bytes */{length}"));
            return Ok(reply);
        }
    };
    let mut reply = reply::empty(status);
    describe(&mut reply, &tag);
    set(&mut reply, header::CONTENT_TYPE, "application/octet-stream");
    set(&mut reply, header::CONTENT_DISPOSITION, "attachment");
    set(&mut reply, header::CONTENT_LENGTH, &(end - first).to_string());
    if status == StatusCode::PARTIAL_CONTENT {
        set(&mut reply, header::CONTENT_RANGE, &format!("bytes {first}-{}/{length}", end - 1));
    }
    if request.method() == Method::HEAD {
        return Ok(reply);
    }
    let file = daemon.spool.read(&lease.payload)?;
    let transfer = Transfer::begin(daemon, handle, &token, first).await?;
    *reply.body_mut() = ReplyBody::file(FileBody::new(file, end, transfer));
    daemon.notifier.changed(handle);
    Ok(reply)
}

/// `POST /v1/shares/HANDLE/complete`
pub(super) async fn complete(
    daemon: &Daemon,
    client: ClientId,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, HttpRefusal> {
    let token: LeaseToken = request::bearer(request.headers())?;
    let finished = daemon.store.finish(handle, &token, LeaseFinish::Now).await;
    let complete = finished.map_err(|error| daemon.refused(client, error))?;
    // Not what was counted when its last byte went out, and nothing of which no byte did.
    if !daemon.leases.completed(&token) && complete {
        daemon.metrics.completed.fetch_add(1, Relaxed);
    }
    daemon.notifier.changed(handle);
    Ok(reply::empty(StatusCode::NO_CONTENT))
}

fn describe(reply: &mut Reply, tag: &str) {
    set(reply, header::ETAG, tag);
    set(reply, header::ACCEPT_RANGES, "bytes");
}

fn set(reply: &mut Reply, name: HeaderName, value: &str) {
    // Digits and base64url: always a header's value.
    if let Ok(value) = HeaderValue::from_str(value) {
        reply.headers_mut().insert(name, value);
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RangeHeaders<'a> {
    pub range: Option<&'a [u8]>,
    pub if_range: Option<&'a [u8]>,
    pub if_none_match: Option<&'a [u8]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RangeDecision {
    /// 200 with all bytes.
    Whole,
    /// 206 with the bytes from `first` to `last`, both included.
    Part { first: u64, last: u64 },
    /// 304: the client has it.
    NotModified,
    /// 416: no such bytes.
    NotSatisfiable,
}

/// Decides for a representation of `length` bytes with the strong entity tag `tag`; total.
pub(super) fn decide(wanted: &RangeHeaders<'_>, length: u64, tag: &str) -> RangeDecision {
    if wanted.if_none_match.is_some_and(|list| lists(list, tag.as_bytes())) {
        return RangeDecision::NotModified;
    }
    let Some(range) = wanted.range else { return RangeDecision::Whole };
    // A date, a weak tag or another tag: the client's part may be of something else.
    if wanted.if_range.is_some_and(|validator| validator.trim_ascii() != tag.as_bytes()) {
        return RangeDecision::Whole;
    }
    // Several ranges and other units are answered with the whole, which RFC 9110 14.2 allows.
    match parse(range, length) {
        None => RangeDecision::Whole,
        Some((first, _)) if first >= length => RangeDecision::NotSatisfiable,
        Some((first, last)) => RangeDecision::Part { first, last: last.min(length - 1) },
    }
}

/// First and last byte of one range, perhaps past the end of `length` bytes. `None` for several
/// ranges, for other units and for anything that is not understood.
fn parse(range: &[u8], length: u64) -> Option<(u64, u64)> {
    let text = std::str::from_utf8(range).ok()?.trim();
    let (unit, set) = text.split_once('=')?;
    if !unit.eq_ignore_ascii_case("bytes") {
        return None;
    }
    let (first, last) = match set.trim().split_once('-')? {
        ("", count) => (length.saturating_sub(number(count)?), u64::MAX),
        (first, "") => (number(first)?, u64::MAX),
        (first, last) => (number(first)?, number(last)?),
    };
    (first <= last).then_some((first, last))
}

/// Digits only. A number over 64 bits lies behind every end, as the largest one does.
fn number(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    Some(text.parse().unwrap_or(u64::MAX))
}

/// Returns whether a list of entity tags names this one; weak comparison, as If-None-Match asks.
fn lists(list: &[u8], tag: &[u8]) -> bool {
    if list.trim_ascii() == b"*" {
        return true;
    }
    // Our tags hold no comma.
    list.split(|&byte| byte == b',').any(|entry| {
        let entry = entry.trim_ascii();
        entry.strip_prefix(b"W/").unwrap_or(entry) == tag
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TAG: &str = "\"abc\"";

    fn ask(range: &str) -> RangeDecision {
        decide(&RangeHeaders { range: Some(range.as_bytes()), ..RangeHeaders::default() }, 1000, TAG)
    }

    #[test]
    fn single_ranges_are_cut_to_the_length() {
        let cases = [
            ("bytes=0-0", 0, 0),
            ("bytes=0-", 0, 999),
            ("bytes=999-", 999, 999),
            ("bytes=10-19", 10, 19),
            ("bytes=990-5000", 990, 999),
            ("bytes=-1", 999, 999),
            ("bytes=-1000", 0, 999),
            ("bytes=-5000", 0, 999),
            ("bytes=5-99999999999999999999999999", 5, 999),
            ("BYTES = 1-2", 1, 2),
        ];
        for (range, first, last) in cases {
            let range = range.replace(" = ", "=");
            assert_eq!(ask(&range), RangeDecision::Part { first, last }, "{range}");
        }
    }

    #[test]
    fn ranges_behind_the_end_are_refused() {
        for range in ["bytes=1000-", "bytes=1000-1001", "bytes=-0", "bytes=99999999999999999999999-"] {
            assert_eq!(ask(range), RangeDecision::NotSatisfiable, "{range}");
        }
    }

    #[test]
    fn several_ranges_other_units_and_nonsense_get_the_whole() {
        for range in [
            "bytes=0-1,5-6",
            "bytes=",
            "bytes=-",
            "bytes",
            "lines=0-1",
            "bytes=5-4",
            "bytes=a-b",
            "bytes=+1-2",
            "bytes=1--2",
            "bytes=0x1-2",
            "\u{fffd}",
            "",
        ] {
            assert_eq!(ask(range), RangeDecision::Whole, "{range}");
        }
    }

    #[test]
    fn if_range_lets_only_the_same_representation_be_resumed() {
        let part = RangeDecision::Part { first: 5, last: 999 };
        for (validator, expected) in [
            ("\"abc\"", part),
            ("\"other\"", RangeDecision::Whole),
            ("W/\"abc\"", RangeDecision::Whole),
            ("Sat, 21 Nov 2026 15:00:00 GMT", RangeDecision::Whole),
            ("", RangeDecision::Whole),
        ] {
            let wanted = RangeHeaders {
                range: Some(b"bytes=5-"),
                if_range: Some(validator.as_bytes()),
                ..RangeHeaders::default()
            };
            assert_eq!(decide(&wanted, 1000, TAG), expected, "{validator}");
        }
    }

    #[test]
    fn if_none_match_comes_before_ranges() {
        for (list, expected) in [
            ("\"abc\"", RangeDecision::NotModified),
            ("W/\"abc\"", RangeDecision::NotModified),
            ("\"x\", \"abc\"", RangeDecision::NotModified),
            ("*", RangeDecision::NotModified),
            ("\"x\"", RangeDecision::Part { first: 0, last: 0 }),
        ] {
            let wanted = RangeHeaders {
                range: Some(b"bytes=0-0"),
                if_none_match: Some(list.as_bytes()),
                ..RangeHeaders::default()
            };
            assert_eq!(decide(&wanted, 1000, TAG), expected, "{list}");
        }
    }

    proptest! {
        #[test]
        fn a_part_lies_within_the_length(text in "(bytes=)?[0-9]{0,21}-?[0-9]{0,21},?", length in 1u64..) {
            let wanted = RangeHeaders { range: Some(text.as_bytes()), ..RangeHeaders::default() };
            if let RangeDecision::Part { first, last } = decide(&wanted, length, TAG) {
                prop_assert!(first <= last && last < length);
            }
        }
    }
}
