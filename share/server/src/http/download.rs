//! Serves the ciphertext of a lease.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hyper::body::Incoming;
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Method, Request, StatusCode};
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::ErrorCode;
use lockbox_share_protocol::token::LeaseToken;

use super::daemon::Daemon;
use super::file::FileBody;
use super::range::{self, RangeDecision, RangeHeaders};
use super::refusal::Refusal;
use super::reply::{self, Reply, ReplyBody};
use super::request;
use super::transfer::Transfer;
use crate::limiter::ClientId;
use crate::store::LeaseFinish;

/// `GET` and `HEAD /v1/shares/HANDLE/ciphertext`
pub(super) async fn download(
    daemon: &Arc<Daemon>,
    client: ClientId,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    daemon.limiter.admit(client, 1)?;
    let token: LeaseToken = request::bearer(request.headers())?;
    // HEAD, 304 and 416 tell of a lease and leave it as it is (Store rule 12).
    let lease = daemon.store.lease(handle, &token).await.map_err(|error| daemon.refused(client, error))?;
    // Many parts make one download: the holder of the lease is not slowed down.
    daemon.limiter.give_back(client, 1);
    let length = lease.payload.length;
    let tag = range::entity_tag(&lease.payload.digest);
    let headers = request.headers();
    let wanted = RangeHeaders {
        range: request::only(headers, header::RANGE)?,
        if_range: request::only(headers, header::IF_RANGE)?,
        if_none_match: request::only(headers, header::IF_NONE_MATCH)?,
    };
    let (status, first, end) = match range::decide(&wanted, length, &tag) {
        RangeDecision::Whole => (StatusCode::OK, 0, length),
        RangeDecision::Part { first, last } => (StatusCode::PARTIAL_CONTENT, first, last + 1),
        RangeDecision::NotModified => {
            let mut reply = reply::empty(StatusCode::NOT_MODIFIED);
            describe(&mut reply, &tag);
            return Ok(reply);
        }
        RangeDecision::NotSatisfiable => {
            let mut reply = Refusal::new(ErrorCode::Range, "there are no such bytes").reply();
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
) -> Result<Reply, Refusal> {
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
