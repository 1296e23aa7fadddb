//! Errors of a store, by the response to the client.

use std::io;

/// Result of every operation of a store.
pub type Result<T> = std::result::Result<T, StoreError>;

/// Error of a store request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// There is no such share, or no proof (Store rule 5).
    #[error("there is no such share, or the proof is wrong")]
    Unknown,
    /// With proof: its time is over.
    #[error("the share has expired")]
    Expired { at: WallTime },
    /// With proof: its owner took it back.
    #[error("the share was revoked by its owner")]
    Revoked { at: WallTime },
    /// With proof: all claims were used, the last one ended then.
    #[error("the share was used")]
    Used { at: WallTime },
    /// With proof: all claims are taken, but one may come back when its lease ends without a byte
    /// sent.
    #[error("the share is being downloaded")]
    Busy { until: WallTime },
    /// The owner asked to rearm, and no slot ended early.
    #[error("no download of the share was interrupted")]
    NothingToRearm,
    /// The handle is in use: mint another one.
    #[error("the handle is taken")]
    Taken,
    /// The disk or the configured capacity is full. Nothing has changed.
    #[error("no space is left for shares")]
    Full,
    /// The medium takes no changes (read-only, failed, or latched by Store rule 9), or the remote
    /// store does not answer.
    #[error("the store takes no changes: {0}")]
    Unavailable(String),
    /// A value outside of its documented range.
    #[error("{0}")]
    Invalid(&'static str),
}

/// A point in time for people: milliseconds since 1970 by the wall clock. Nothing is decided by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct WallTime(pub u64);

impl WallTime {
    /// As messages have it.
    pub fn seconds(self) -> u64 {
        self.0 / 1000
    }
}

/// A write that did not happen changed nothing.
impl From<io::Error> for StoreError {
    fn from(error: io::Error) -> StoreError {
        if is_full(&error) { StoreError::Full } else { StoreError::Unavailable(error.to_string()) }
    }
}

/// Whether the disk or the quota has no space.
pub(crate) fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
