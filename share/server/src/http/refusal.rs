//! Refusal of a request: an error code, one sentence, and optional headers.

use std::borrow::Cow;

use lockbox_share_protocol::message::{ErrorBody, ErrorCode};

use crate::limiter::RateLimited;
use crate::store::StoreError;

/// A request that is not served.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) code: ErrorCode,
    message: Cow<'static, str>,
    /// Seconds since 1970.
    at: Option<u64>,
    /// Seconds.
    pub(super) retry_after: Option<u64>,
    /// The methods that the path has.
    pub(super) allow: Option<&'static str>,
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

    /// The daemon is there and cannot do it at this time.
    pub(super) fn unavailable(message: &'static str) -> Refusal {
        Refusal { retry_after: Some(5), ..Refusal::new(ErrorCode::Unavailable, message) }
    }

    /// As the body of a failure, or as one result of a batch.
    pub(super) fn failure(self) -> ErrorBody {
        ErrorBody { error: self.code, message: self.message.into_owned(), at: self.at }
    }
}

impl From<RateLimited> for Refusal {
    fn from(RateLimited(wait): RateLimited) -> Refusal {
        let seconds = wait.as_secs() + 1;
        Refusal { retry_after: Some(seconds), ..Refusal::new(ErrorCode::Limited, "too many requests, try again later") }
    }
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Refusal {
        let since =
            |code, message: &'static str, at: u64| Refusal { at: Some(at / 1000), ..Refusal::new(code, message) };
        match error {
            StoreError::Unknown => Refusal::new(ErrorCode::Refused, "there is no such share, or the proof is wrong"),
            StoreError::Expired { at } => since(ErrorCode::Expired, "the share has expired", at.0),
            StoreError::Revoked { at } => since(ErrorCode::Revoked, "the share was taken back by its owner", at.0),
            StoreError::Used { at } => since(ErrorCode::Consumed, "the share was used", at.0),
            StoreError::Busy { until } => since(ErrorCode::Leased, "the share is being downloaded by another", until.0),
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
