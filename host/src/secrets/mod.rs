//! Reads the secrets that open archives from their sources.
//!
//! This module does not depend on archives: it returns bytes that are wiped when dropped, or one
//! sentence with the reason of a failure. No sentence contains any part of a secret.

pub mod desktop;
mod keyring;
mod prompt;
mod read;
mod sources;

use std::fmt;
use std::io;

pub(crate) use keyring::parse_timeout;
pub use keyring::{Cache, Keyring};
pub(crate) use prompt::confirm_openly;
pub use prompt::{Spinner, ask as ask_secretly, ask_openly, is_yes};
pub use read::{checked, value, without_line_end};
pub(crate) use sources::is_marked;
pub use sources::{PassphraseSources, Sources, inherited, last_line, withhold};

/// A secret, wiped when it is dropped.
pub type Bytes = zeroize::Zeroizing<Vec<u8>>;

pub type Result<T> = std::result::Result<T, Error>;

/// Party that can fix the error; programs choose the exit code by this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The command line combines options that exclude each other.
    Usage,
    /// A source failed, or has nothing that could be a secret.
    Source,
    /// The user cancelled the prompt; no message is shown.
    Left,
}

/// A sentence without any secret in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    pub kind: Kind,
    pub sentence: String,
}

impl Error {
    pub(crate) fn usage(sentence: impl Into<String>) -> Error {
        Error { kind: Kind::Usage, sentence: sentence.into() }
    }

    pub(crate) fn source(sentence: impl Into<String>) -> Error {
        Error { kind: Kind::Source, sentence: sentence.into() }
    }

    pub(crate) fn left() -> Error {
        Error { kind: Kind::Left, sentence: String::new() }
    }

    /// The host refused something.
    pub(crate) fn host(context: impl fmt::Display, error: &io::Error) -> Error {
        Error::source(lockbox_terminal::without_numbers(format!("{context}: {error}")))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Error {}
