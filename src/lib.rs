//! Lockbox: an encrypted archive in one ordinary file.
//!
//! ARCHITECTURE.md lists the layers, lowest first, and their allowed imports; a test enforces the
//! table.

#![forbid(unsafe_code)]

pub mod error;

pub mod archive;
pub(crate) mod btree;
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
    use std::hint::black_box;

    use crate::format::node::{LEAF_ENTRY, NODE_HEAD, NodeHead, decode, encode_leaf};
    use crate::format::values::{InodeValue, NO_TRIM};
    use crate::format::{Key, NODE_CAPACITY, kind, page};

    type Workload = (&'static str, Box<dyn Fn()>);

    /// Returns the workloads on a full leaf of inodes, with their names.
    pub fn leaf_workloads() -> [Workload; 3] {
        let head = NodeHead { level: 0, tree: 1, lower: Key::MIN, upper: Key::MAX };
        let value = InodeValue { trim: NO_TRIM, ..InodeValue::default() }.encode();
        let count = (NODE_CAPACITY - NODE_HEAD) / (LEAF_ENTRY + value.len());
        let keys: Vec<Key> = (1..=count as u64).map(|ino| Key::new(ino, kind::INODE, 0)).collect();
        let encode = move || encode_leaf(&head, keys.iter().map(|key| (*key, &value[..])));
        let encoded = encode();
        [
            ("encode a leaf of inodes", Box::new(move || drop(black_box(encode())))),
            ("decode a leaf of inodes", Box::new(move || drop(black_box(decode(black_box(&encoded)))))),
            ("decode an inode", Box::new(move || drop(black_box(InodeValue::decode(black_box(&value)))))),
        ]
    }

    /// Returns the length of the head of a data page.
    pub fn data_head_length(chunks: usize, items: usize) -> usize {
        page::head_length(chunks, items)
    }
}
