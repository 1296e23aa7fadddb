//! Gets the secrets that open archives from where their owners keep them, for every program of lockbox in the same way.
//!
//! Knows nothing of archives: it hands out bytes that are wiped when dropped, or one sentence that says why there are none.
//! No sentence contains any part of a secret.

#![deny(unsafe_code)] // but for taking a descriptor over by its number

mod error;
mod keyring;
mod memory;
mod opening;
mod passphrase;
mod program;
mod prompt;
mod read;
mod sources;

pub use error::{Error, Kind, Result};
pub use keyring::{Cache, Keyring, parse_timeout};
pub use memory::{lock_memory, lock_memory_if_plenty};
pub use opening::{Lock, ask, gather, open};
pub use passphrase::PassphraseSources;
pub use read::{value, without_line_end};
pub use sources::{Sources, ask_openly, ask_secretly, confirm_openly};

/// A secret, wiped when it is dropped.
pub type Bytes = zeroize::Zeroizing<Vec<u8>>;
