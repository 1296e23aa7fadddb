//! Writes answers: messages, failures and the headers that all of them have.

use std::borrow::Cow;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use lockbox_share_protocol::message::{ErrorCode, Failure};
use serde::Serialize;

use super::file::FileBody;
use crate::store::StoreError;

/// The body of an answer.
pub(super) enum ReplyBody {
    /// None.
    Empty,
    /// A message or a page.
    Whole(Bytes),
    /// A ciphertext, or a part of one.
    File(Box<FileBody>),
}

/// An answer.
pub(super) type Reply = Response<ReplyBody>;

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        match self.get_mut() {
            ReplyBody::Empty => Poll::Ready(None),
            ReplyBody::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            ReplyBody::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            ReplyBody::File(file) => file.poll(cx).map(|part| part.map(|result| result.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.left() == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left())
    }
}

impl ReplyBody {
    fn left(&self) -> u64 {
        match self {
            ReplyBody::Empty => 0,
            ReplyBody::Whole(bytes) => bytes.len() as u64,
            ReplyBody::File(file) => file.left(),
        }
    }
}

/// Why a request is not served: one code, one sentence.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    message: Cow<'static, str>,
    /// Seconds since 1970.
    at: Option<u64>,
    /// Seconds.
    retry_after: Option<u64>,
    /// The methods that the path has.
    allow: Option<&'static str>,
}

impl Refusal {
    pub(super) fn new(code: ErrorCode, message: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal { code, message: message.into(), at: None, retry_after: None, allow: None }
    }

    pub(super) fn malformed(message: impl Into<Cow<'static, str>>) -> Refusal {
        Refusal::new(ErrorCode::Malformed, message)
    }

    pub(super) fn method(allow: &'static str) -> Refusal {
        Refusal { allow: Some(allow), ..Refusal::new(ErrorCode::Method, "the path has other methods") }
    }

    pub(super) fn limited(wait: std::time::Duration) -> Refusal {
        let seconds = wait.as_secs() + 1;
        Refusal { retry_after: Some(seconds), ..Refusal::new(ErrorCode::Limited, "too many requests, try again later") }
    }

    /// The daemon is there and cannot do it at this time.
    pub(super) fn unavailable(message: &'static str) -> Refusal {
        Refusal { retry_after: Some(5), ..Refusal::new(ErrorCode::Unavailable, message) }
    }

    /// As the body of a failure, or as one result of a batch.
    pub(super) fn failure(self) -> Failure {
        Failure { error: self.code, message: self.message.into_owned(), at: self.at }
    }

    /// As the whole answer.
    pub(super) fn reply(self) -> Reply {
        let status = StatusCode::from_u16(self.code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let (retry_after, allow, code) = (self.retry_after, self.allow, self.code);
        let mut reply = json(status, &self.failure());
        let headers = reply.headers_mut();
        if let Some(seconds) = retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if let Some(methods) = allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        if code == ErrorCode::Unauthorized {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        reply
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        let told =
            |code, message: &'static str, at: u64| Refusal { at: Some(at / 1000), ..Refusal::new(code, message) };
        match error {
            StoreError::Unknown => Refusal::new(ErrorCode::Refused, "there is no such share, or the proof is wrong"),
            StoreError::Expired { at } => told(ErrorCode::Expired, "the share has expired", at.0),
            StoreError::Revoked { at } => told(ErrorCode::Revoked, "the share was taken back by its owner", at.0),
            StoreError::Used { at } => told(ErrorCode::Consumed, "the share was used", at.0),
            StoreError::Busy { until } => told(ErrorCode::Leased, "the share is being downloaded by another", until.0),
            StoreError::NothingToRearm => {
                Refusal::new(ErrorCode::NotInterrupted, "no download of the share was interrupted")
            }
            StoreError::Full => Refusal::new(ErrorCode::NoSpace, "no space is left for shares"),
            StoreError::Invalid(message) => Refusal::malformed(message),
            StoreError::Taken => {
                tracing::error!("no free handle was found: more digits are needed for so many shares");
                Refusal::new(ErrorCode::Internal, "no free handle was found")
            }
            StoreError::Unavailable(reason) => {
                tracing::warn!(reason, "the store takes no changes");
                Refusal::unavailable("the daemon can change nothing at this time")
            }
        }
    }
}

/// A message.
pub(super) fn json(status: StatusCode, message: &impl Serialize) -> Reply {
    // The messages have text keys and no failing serializers, so this cannot fail; an empty body would be noticed.
    let bytes = serde_json::to_vec(message).unwrap_or_default();
    with_type(status, "application/json", Bytes::from(bytes))
}

/// Bytes of a type.
pub(super) fn with_type(status: StatusCode, content_type: &'static str, bytes: Bytes) -> Reply {
    let mut reply = empty(status);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    *reply.body_mut() = ReplyBody::Whole(bytes);
    reply
}

/// No body. Nothing that the daemon says may be kept by a cache, unless its handler says otherwise.
pub(super) fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(ReplyBody::Empty);
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    reply
}
