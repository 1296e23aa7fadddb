//! The sticky write error: once a barrier or a reserved write failed, nothing more is written.

use std::sync::OnceLock;

use crate::error::{Error, Result};

/// Set at most once; the first reason stays.
#[derive(Default)]
pub(crate) struct Latch(OnceLock<String>);

impl Latch {
    /// # Errors
    /// `Latched` with the first failure, for every later writer.
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.get() {
            None => Ok(()),
            Some(reason) => Err(Error::Latched(reason.clone())),
        }
    }

    /// Why nothing is written any more.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.0.get().map(String::as_str)
    }

    /// Latches because of `error` and returns what the failing caller shall see.
    pub(crate) fn set(&self, doing: &str, error: &Error) -> Error {
        let mut first = false;
        let reason = self.0.get_or_init(|| {
            first = true;
            let mut text = format!("{doing}: {error}");
            if let Some(source) = std::error::Error::source(error) {
                text.push_str(&format!(": {source}"));
            }
            text
        });
        if first {
            tracing::error!("archive is read-only from now on: {reason}");
        }
        Error::Latched(reason.clone())
    }
}
