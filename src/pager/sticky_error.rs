//! The sticky write error: once a barrier or the write of a commit failed, nothing more is written.
//!
//! # What latches, and what does not
//! - A barrier that fails: nobody knows what of the writes before it is on the medium.
//! - A write that fails as writes to a broken host do: what lies there now is unknown, and the next one will fare no better.
//! - A page, list or record that a commit cannot write, but for want of space: the open transaction
//!   is built on the one that is lost.
//! - Not what a commit writes and is refused for want of space (ENOSPC, EDQUOT): nobody was told of
//!   it, its pages stay where they are, and it is finished when there is room (TXN-9). Its
//!   checkpoint is left out, and a commit without changes, which only lets freed blocks go, is
//!   forgotten: nothing is built on either.
//! - Not a page of file data that is refused for want of space, in blocks that the host had allocated (copy-on-write, thin provisioning,
//!   quotas): no operation names it yet, so its blocks are given back, and the data stays staged or was never accepted.
//! - No single refusal for want of space: the ballast is cut (STORAGE-6), and the same bytes are
//!   written to the same place once more, which is as if the first attempt had not been. The seal
//!   covers bytes and place, and no record tells of the page before its barrier, so a part of the
//!   first attempt means nothing.
//!
//! # Who is told
//! Whoever meets the failure gets its cause, and everybody later the latch. When that was background work, the next one who hands over data
//! or asks for its durability gets the cause, once: what was accepted from programs before the failure is lost, and none of them has
//! heard why. (Over FUSE both are one fsync(2): the kernel first writes what it holds of the file.)

use std::mem::discriminant;
use std::sync::OnceLock;

use parking_lot::Mutex;

use crate::error::{Error, Result};

/// It is set at most once; the first reason stays.
#[derive(Default)]
pub(crate) struct StickyError {
    /// Nothing is logged.
    is_unlogged: bool,
    reason: OnceLock<String>,
    /// The cause, until somebody who handed over data or asked for its durability was told.
    unreported: Mutex<Option<Error>>,
}

impl StickyError {
    pub(crate) fn without_log() -> StickyError {
        StickyError { is_unlogged: true, ..StickyError::default() }
    }

    /// # Errors
    /// `WriteFailed` with the first failure, for every later writer.
    pub(crate) fn check(&self) -> Result<()> {
        match self.reason.get() {
            None => Ok(()),
            Some(reason) => Err(Error::WriteFailed(reason.clone())),
        }
    }

    /// Why nothing is written any more.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.reason.get().map(String::as_str)
    }

    /// Latches because of `error`, unless something did before, and returns it: what the failing caller shall see.
    pub(crate) fn record(&self, doing: &str, error: Error) -> Error {
        let mut first = false;
        let reason = self.reason.get_or_init(|| {
            first = true;
            // Before anybody can see the reason and ask for the cause.
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

    /// What to tell somebody who handed over data, or asked for its durability, and got `error`.
    pub(crate) fn error_for(&self, error: Error) -> Error {
        if self.reason.get().is_none() {
            return error;
        }
        let mut unreported = self.unreported.lock();
        match (&error, &*unreported) {
            (Error::WriteFailed(_), Some(_)) => unreported.take().unwrap_or(error),
            // Another failure on the way, such as a want of space, does not tell why.
            (_, Some(cause)) if discriminant(cause) == discriminant(&error) => {
                *unreported = None;
                error
            }
            _ => error,
        }
    }
}
