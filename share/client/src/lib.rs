//! The sealed side of one-time links: seals a file, speaks to the daemon, opens what was received.

#![forbid(unsafe_code)]

pub mod clock;
pub mod error;
pub mod link;
pub mod name;
pub mod secret;

pub use error::{Error, Result};
