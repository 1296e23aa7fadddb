//! Lockbox: an encrypted archive in one ordinary file.
//!
//! ARCHITECTURE.md lists the layers, lowest first, and their allowed imports; a test enforces the
//! table.

#![forbid(unsafe_code)]

pub mod error;

pub mod archive;
pub(crate) mod btree;
pub mod control;
pub mod crypto;
pub(crate) mod env;
pub mod exchange;
pub(crate) mod format;
pub(crate) mod frame;
pub mod fs;
pub mod keys;
pub(crate) mod pager;
pub mod rescue;
pub mod storage;
pub(crate) mod txn;

pub use error::{Error, Result};

/// Codecs of the specification for the micro benchmarks of this repository, not for programs.
#[doc(hidden)]
pub mod codecs {
    pub use crate::format::data_head::head_length;
    pub use crate::format::node::{LEAF_ENTRY, NODE_HEAD, NodeHead, decode, encode_leaf};
    pub use crate::format::values::{InodeValue, NO_TRIM};
    pub use crate::format::{Key, NODE_CAPACITY, kind};
}
