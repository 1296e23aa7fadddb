//! Sticky write error: after a failed barrier or a failed commit write the archive rejects all
//! writes.
//!
//! # Failures that set it
//! - A failed barrier: the state of all writes before it is unknown.
//! - A failed write with an I/O error: the content of those blocks is unknown, and the next write
//!   is likely to fail too.
//! - A page, list or record that a commit cannot write for any reason except lack of space: the
//!   open transaction builds on the lost one.
//!
//! # Failures that do not set it
//! - A commit write rejected for lack of space (ENOSPC, EDQUOT). The commit was not acknowledged,
//!   its pages stay in place, and it is finished when there is space (TXN-9). Its checkpoint is
//!   skipped. A commit without changes, which only releases freed blocks, is dropped: nothing
//!   builds on either.
//! - A page of file data rejected for lack of space although the host had allocated its blocks
//!   (copy-on-write, thin provisioning, quotas). No operation references it yet, so its blocks are
//!   released; the data stays dirty in memory or was never accepted.
//! - A single rejection for lack of space: the ballast is cut (STORAGE-6) and the same bytes are
//!   written to the same place again, as if the first attempt had not happened. The seal covers
//!   bytes and address, and no record references the page before its barrier, so a partial first
//!   attempt has no effect.
//!
//! # Reporting
//! The caller that hits the failure gets its cause; later callers get [`Error::WriteFailed`]. If
//! background work hit it, the next caller that hands over data or requests durability gets the
//! cause, once: data accepted before the failure is lost, and no program has received an error for
//! it. (Over FUSE both happen in one fsync(2): the kernel first writes back the file's cached
//! data.)

use std::mem::discriminant;
use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// First write failure of an archive, and whether it was reported.
#[derive(Default)]
pub(crate) struct StickyError {
    /// Suppresses the log line.
    is_unlogged: bool,
    reason: OnceLock<String>,
    /// Cause that no caller has received yet.
    unreported: Mutex<Option<Error>>,
}

impl StickyError {
    pub(crate) fn without_log() -> StickyError {
        StickyError { is_unlogged: true, ..StickyError::default() }
    }

    /// Errors: `WriteFailed` with the first failure, for every later writer.
    pub(crate) fn check(&self) -> Result<()> {
        match self.reason.get() {
            None => Ok(()),
            Some(reason) => Err(Error::WriteFailed(reason.clone())),
        }
    }

    pub(crate) fn reason(&self) -> Option<&str> {
        self.reason.get().map(String::as_str)
    }

    /// Records `error` unless an earlier failure was recorded, and returns it for the failing
    /// caller.
    pub(crate) fn record(&self, doing: &str, error: Error) -> Error {
        let mut first = false;
        let reason = self.reason.get_or_init(|| {
            first = true;
            // Set before the reason becomes visible and a caller can ask for the cause.
            *self.unreported.lock() = Some(error.clone());
            let mut text = format!("{doing}: {error}");
            if let Some(source) = std::error::Error::source(&error) {
                text.push_str(&format!(": {source}"));
            }
            text
        });
        if first && !self.is_unlogged {
            tracing::error!("archive is read-only from now on: {reason}");
        }
        error
    }

    /// Returns the error for a caller that handed over data or requested durability and got
    /// `error`: the unreported cause, once, instead of `WriteFailed`.
    pub(crate) fn error_for(&self, error: Error) -> Error {
        if self.reason.get().is_none() {
            return error;
        }
        let mut unreported = self.unreported.lock();
        match (&error, &*unreported) {
            (Error::WriteFailed(_), Some(_)) => unreported.take().unwrap_or(error),
            // An unrelated failure, such as lack of space, does not report the cause.
            (_, Some(cause)) if discriminant(cause) == discriminant(&error) => {
                *unreported = None;
                error
            }
            _ => error,
        }
    }
}
