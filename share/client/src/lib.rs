//! Client of one-time links: seals files, uploads and downloads them, and opens them. It does not
//! depend on archives: the program `lockbox` passes it a source of bytes.

#![forbid(unsafe_code)]

mod download;
pub mod history;
pub mod http;
pub mod link;
pub mod meta;
mod partial;
pub mod receive;
pub mod seal;
pub mod shares;
pub mod source;

use std::io;

pub use lockbox_share_protocol as protocol;
use lockbox_share_protocol::message::{ErrorBody, ErrorCode};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot get random bytes from the system")]
    NoRandomness,
    #[error("this is not a one-time link: {0}")]
    NotALink(&'static str),
    #[error("damaged link: its secret, the part after '#', fails its checksum; ask the sender for the link once more")]
    DamagedLink,
    #[error("{0} changed while it was read; nothing was shared")]
    Changed(String),
    /// Something that is not shared, such as a directory; a whole sentence.
    #[error("{0}")]
    Invalid(String),
    /// No daemon answers. Without a connection nothing can have arrived there; with one, the
    /// request may have, and only its reply is lost.
    #[error("the share daemon at {server} cannot be reached: {reason}")]
    Unreachable { server: String, reason: String, may_have_arrived: bool },
    #[error("{}", refusal(.0, &utc))]
    Refused(ErrorBody),
    #[error("the server at {server} does not follow the share protocol: {reason}")]
    Foreign { server: String, reason: String },
    #[error("the download is damaged: {0}")]
    Damaged(String),
    #[error("the download was cut after {received} of {size} bytes: {reason}")]
    Cut { received: u64, size: u64, reason: String },
    #[error("{0} already exists and was not changed")]
    Exists(String),
    #[error("the download is kept as {tar} because it cannot be unpacked: {reason}")]
    NotUnpacked { tar: String, reason: String },
    #[error("{context}")]
    Io { context: String, source: io::Error },
}

impl Error {
    pub(crate) fn io(context: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
        let context = context.into();
        move |source| Error::Io { context, source }
    }

    pub fn code(&self) -> Option<ErrorCode> {
        match self {
            Error::Refused(failure) => Some(failure.error),
            _ => None,
        }
    }

    /// Returns whether the daemon refused for the moment only.
    pub(crate) fn is_temporary(&self) -> bool {
        matches!(self.code(), Some(ErrorCode::Limited | ErrorCode::Unavailable | ErrorCode::Timeout))
    }

    /// Returns whether the link has ended, so that a download cannot be resumed.
    pub(crate) fn is_final(&self) -> bool {
        use ErrorCode::{Consumed, Expired, Refused, Revoked};
        matches!(self.code(), Some(Refused | Consumed | Revoked | Expired))
    }
}

/// `2024-02-29 12:34:56 UTC` for seconds since 1970.
fn utc(seconds: u64) -> String {
    format!("{} UTC", lockbox_terminal::utc(i64::try_from(seconds).unwrap_or(i64::MAX)))
}

/// Describes the daemon's refusal for the user; `time` formats seconds since 1970.
pub fn refusal(failure: &ErrorBody, time: &dyn Fn(u64) -> String) -> String {
    let at = failure.at.map(|at| format!(" at {}", time(at))).unwrap_or_default();
    match failure.error {
        ErrorCode::Refused => {
            "this link is not valid: it was used, revoked or has expired, or it is not of this server".into()
        }
        ErrorCode::Consumed => format!("this link was used{at}: its content was removed from the server"),
        ErrorCode::Revoked => format!("this link was revoked by its owner{at}"),
        ErrorCode::Expired => format!("this link expired{at}"),
        ErrorCode::Leased => "this link is in use: another client is downloading the file".into(),
        ErrorCode::Limited => "the share daemon is overloaded: too many requests; try again later".into(),
        ErrorCode::NoSpace => "the share daemon has no space left".into(),
        _ => format!("the share daemon refused: {}", failure.message),
    }
}
