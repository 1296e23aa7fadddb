//! Specification section 6.1: nodes of the B+trees as bytes.

use super::ids::{Key, Pointer};
use crate::error::Result;

/// Bytes of an encoded key.
pub const KEY: usize = 17;
/// Bytes before the first entry.
pub const NODE_HEAD: usize = 42;
/// Bytes of a leaf entry beside its value.
pub const LEAF_ENTRY: usize = KEY + 2;
/// Bytes of an internal entry.
pub const INTERNAL_ENTRY: usize = KEY + 32;
/// Greatest level.
pub const MAX_LEVEL: u8 = 15;

/// Level, tree and fences of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeHead {
    pub level: u8,
    pub tree: u8,
    pub lower: Key,
    pub upper: Key,
}

/// A validated view of an encoded node; entries borrow the bytes.
pub struct NodeView<'a> {
    pub head: NodeHead,
    pub entries: NodeEntries<'a>,
}

/// Entries of a node, in order.
pub enum NodeEntries<'a> {
    Leaf(Vec<(Key, &'a [u8])>),
    Internal(Vec<(Key, Pointer)>),
}

/// Appends the encoded key.
pub fn put_key(out: &mut Vec<u8>, key: Key) {
    let _ = (out, key);
    todo!()
}

pub fn encode_leaf<'a>(head: &NodeHead, entries: impl ExactSizeIterator<Item = (Key, &'a [u8])>) -> Vec<u8> {
    let _ = (head, entries);
    todo!()
}

pub fn encode_internal(head: &NodeHead, entries: impl ExactSizeIterator<Item = (Key, Pointer)>) -> Vec<u8> {
    let _ = (head, entries);
    todo!()
}

/// Decodes and validates: level, count, ascending keys within the fences, first key of an internal node = lower fence,
/// value lengths, no null pointer, nothing left over.
pub fn decode(bytes: &[u8]) -> Result<NodeView<'_>> {
    let _ = bytes;
    todo!()
}
