//! Client of one-time links: seals files, uploads and downloads them, and opens them. It does not
//! depend on archives: the program `lockbox` passes it a source of bytes.

#![forbid(unsafe_code)]

mod download;
pub mod error;
pub mod history;
pub mod http;
pub mod link;
pub mod meta;
pub mod name;
mod partial;
pub mod receive;
pub mod seal;
pub mod shares;
pub mod source;

pub use error::{Error, Result};
pub use lockbox_share_protocol as protocol;
