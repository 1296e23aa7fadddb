//! Reads the secrets that open archives from their sources.
//!
//! This module does not depend on archives: it returns bytes that are wiped when dropped, or one
//! sentence with the reason of a failure. No sentence contains any part of a secret.

pub mod desktop;
mod error;
mod keyring;
mod new_passphrase;
mod passphrase;
mod program;
mod prompt;
mod read;
mod sources;

pub use error::{Error, Kind, Result};
pub use keyring::{Cache, Keyring, parse_timeout};
pub(crate) use passphrase::is_marked;
pub use passphrase::{PassphraseSources, checked, inherited, withhold};
pub use prompt::{ask as ask_secretly, ask_openly, confirm_openly, is_yes};
pub use read::{value, without_line_end};
pub use sources::Sources;

/// A secret, wiped when it is dropped.
pub type Bytes = zeroize::Zeroizing<Vec<u8>>;
