//! The sealed side of one-time links: seals a file, speaks to the daemon, opens what was received.

#![forbid(unsafe_code)]

pub mod clock;
pub mod error;
pub mod link;
pub mod meta;
pub mod name;
pub mod seal;
pub mod secret;
pub mod source;

pub use error::{Error, Result};
