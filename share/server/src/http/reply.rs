//! Writes answers: messages, failures and the headers that all of them have.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use lockbox_share_protocol::message::ErrorCode;
use serde::Serialize;

use super::admission::ActiveRequest;
use super::request::Refusal;
use super::transfer::FileBody;

/// Response body; its request is in flight until the body's end.
#[derive(Default)]
pub(super) struct ReplyBody {
    content: ContentLocation,
    _under_way: Option<ActiveRequest>,
}

#[derive(Default)]
enum ContentLocation {
    #[default]
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
        match &mut self.get_mut().content {
            ContentLocation::Empty => Poll::Ready(None),
            ContentLocation::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            ContentLocation::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            ContentLocation::File(file) => file.poll(cx).map(|part| part.map(|result| result.map(Frame::data))),
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
    /// The bytes of a file.
    pub(super) fn file(file: FileBody) -> ReplyBody {
        ReplyBody { content: ContentLocation::File(Box::new(file)), _under_way: None }
    }

    /// Binds the body to its request's slot.
    pub(super) fn of(self, request: Option<ActiveRequest>) -> ReplyBody {
        ReplyBody { _under_way: request, ..self }
    }

    fn left(&self) -> u64 {
        match &self.content {
            ContentLocation::Empty => 0,
            ContentLocation::Whole(bytes) => bytes.len() as u64,
            ContentLocation::File(file) => file.left(),
        }
    }
}

impl Refusal {
    /// Converts the refusal to a response.
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

/// A message.
pub(super) fn json(status: StatusCode, message: &impl Serialize) -> Reply {
    // The messages have text keys and no failing serializers, so this cannot fail; an empty body
    // would be noticed.
    let bytes = serde_json::to_vec(message).unwrap_or_default();
    with_type(status, "application/json", Bytes::from(bytes))
}

/// Bytes of a type.
pub(super) fn with_type(status: StatusCode, content_type: &'static str, bytes: Bytes) -> Reply {
    let mut reply = empty(status);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply.body_mut().content = ContentLocation::Whole(bytes);
    reply
}

/// No body. Nothing that the daemon says may be kept by a cache, unless its handler says otherwise.
pub(super) fn empty(status: StatusCode) -> Reply {
    let mut reply = Response::new(ReplyBody::default());
    *reply.status_mut() = status;
    let headers = reply.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    reply
}
