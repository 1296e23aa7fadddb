//! Encoding of B+tree nodes (specification 6.1).

use super::ids::{Key, MAX_LEVEL, MAX_VALUE, NODE_CAPACITY, Pointer, TreeId};
use super::{array_at, check_zero, ends_early, put, u16_at, u64_at};
use crate::error::{Error, Result};

/// Length of an encoded key in bytes.
pub(crate) const KEY: usize = 17;
/// Bytes before the first entry.
pub(crate) const NODE_HEAD: usize = 42;
/// Bytes of a leaf entry without its value.
pub(crate) const LEAF_ENTRY: usize = KEY + 2;
pub(crate) const INTERNAL_ENTRY: usize = KEY + 32;

/// Level, tree and fences of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeHead {
    pub(crate) level: u8,
    pub(crate) tree: u8,
    pub(crate) lower: Key,
    pub(crate) upper: Key,
}

/// Validated view of an encoded node; entries borrow the bytes.
#[derive(Debug)]
pub(crate) struct NodeView<'a> {
    pub(crate) head: NodeHead,
    pub(crate) entries: NodeEntries<'a>,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NodeEntries<'a> {
    Leaf(Vec<(Key, &'a [u8])>),
    Internal(Vec<(Key, Pointer)>),
}

#[inline]
pub(crate) fn put_key(out: &mut Vec<u8>, key: Key) {
    let mut bytes = [0; KEY];
    put(&mut bytes, 0, key.object.to_le_bytes());
    bytes[8] = key.kind;
    put(&mut bytes, 9, key.sub.to_le_bytes());
    out.extend_from_slice(&bytes);
}

/// Decodes the key at a verified offset.
#[inline]
pub(super) fn key_at(bytes: &[u8], at: usize) -> Key {
    Key { object: u64_at(bytes, at), kind: bytes[at + 8], sub: u64_at(bytes, at + 9) }
}

fn put_head(out: &mut Vec<u8>, head: &NodeHead, count: usize) {
    debug_assert!(head.level <= MAX_LEVEL && count <= NODE_CAPACITY / LEAF_ENTRY);
    out.extend_from_slice(&[head.level, head.tree]);
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    put_key(out, head.lower);
    put_key(out, head.upper);
}

pub(crate) fn encode_leaf<'a>(head: &NodeHead, entries: impl ExactSizeIterator<Item = (Key, &'a [u8])>) -> Vec<u8> {
    let mut out = Vec::with_capacity(NODE_CAPACITY);
    put_head(&mut out, head, entries.len());
    for (key, value) in entries {
        debug_assert!(value.len() <= MAX_VALUE);
        put_key(&mut out, key);
        out.extend_from_slice(&(value.len() as u16).to_le_bytes());
        out.extend_from_slice(value);
    }
    debug_assert!(out.len() <= NODE_CAPACITY);
    out
}

pub(crate) fn encode_internal(head: &NodeHead, entries: impl ExactSizeIterator<Item = (Key, Pointer)>) -> Vec<u8> {
    let mut out = Vec::with_capacity(NODE_HEAD + entries.len() * INTERNAL_ENTRY);
    put_head(&mut out, head, entries.len());
    for (key, pointer) in entries {
        put_key(&mut out, key);
        out.extend_from_slice(&pointer.encode());
    }
    debug_assert!(out.len() <= NODE_CAPACITY);
    out
}

/// Decodes and validates a node: level, count, ascending keys within the fences, first key of an
/// internal node equal to the lower fence, value lengths, no null pointer, no trailing bytes.
pub(crate) fn decode(bytes: &[u8]) -> Result<NodeView<'_>> {
    if bytes.len() > NODE_CAPACITY {
        return Err(Error::damaged(format!("node is too long: bytes={}", bytes.len())));
    }
    let (head, rest) = bytes.split_first_chunk::<NODE_HEAD>().ok_or_else(|| ends_early("node"))?;
    check_zero(&head[4..8], "node")?;
    let count = usize::from(u16_at(head, 2));
    let head = NodeHead { level: head[0], tree: head[1], lower: key_at(head, 8), upper: key_at(head, 25) };
    if head.level > MAX_LEVEL {
        return Err(Error::damaged(format!("node has a wrong level: {}", head.level)));
    }
    if head.tree == 0 || usize::from(head.tree) > TreeId::ALL.len() {
        return Err(Error::damaged(format!("node has a wrong tree: {}", head.tree)));
    }
    if head.lower >= head.upper {
        return Err(Error::damaged("node has fences out of order"));
    }
    let entries = if head.level == 0 {
        NodeEntries::Leaf(decode_leaf(&head, count, rest)?)
    } else {
        NodeEntries::Internal(decode_internal(&head, count, rest)?)
    };
    Ok(NodeView { head, entries })
}

fn decode_leaf<'a>(head: &NodeHead, count: usize, mut rest: &'a [u8]) -> Result<Vec<(Key, &'a [u8])>> {
    if count == 0 && (head.lower, head.upper) != (Key::MIN, Key::MAX) {
        return Err(Error::damaged("leaf is empty and not a root"));
    }
    let short = || ends_early("leaf");
    if count * LEAF_ENTRY > rest.len() {
        return Err(short());
    }
    let mut entries = Vec::with_capacity(count);
    let mut least = head.lower;
    for position in 0..count {
        let (start, tail) = rest.split_first_chunk::<LEAF_ENTRY>().ok_or_else(short)?;
        let (key, length) = (key_at(start, 0), usize::from(u16_at(start, KEY)));
        if key < least || (key == least && position > 0) {
            return Err(key_order(key));
        }
        if length > MAX_VALUE {
            return Err(Error::damaged(format!("leaf has a value that is too long: bytes={length}")));
        }
        let (value, tail) = tail.split_at_checked(length).ok_or_else(short)?;
        entries.push((key, value));
        (least, rest) = (key, tail);
    }
    if !rest.is_empty() {
        return Err(Error::damaged("leaf is too long"));
    }
    below_upper(head, least)?;
    Ok(entries)
}

fn decode_internal(head: &NodeHead, count: usize, rest: &[u8]) -> Result<Vec<(Key, Pointer)>> {
    if count == 0 {
        return Err(Error::damaged("internal node is empty"));
    }
    if count * INTERNAL_ENTRY != rest.len() {
        return Err(Error::damaged(format!("internal node has a wrong length: entries={count} bytes={}", rest.len())));
    }
    let mut entries = Vec::with_capacity(count);
    let mut last = head.lower;
    for entry in rest.chunks_exact(INTERNAL_ENTRY) {
        let key = key_at(entry, 0);
        let ascends = if entries.is_empty() { key == last } else { key > last };
        if !ascends {
            return Err(key_order(key));
        }
        let pointer = Pointer::decode(&array_at(entry, KEY))?;
        if pointer.is_null() {
            return Err(Error::damaged("internal node has a null pointer"));
        }
        entries.push((key, pointer));
        last = key;
    }
    below_upper(head, last)?;
    Ok(entries)
}

/// Checks the upper fence. Keys ascend, so the last one suffices.
fn below_upper(head: &NodeHead, last: Key) -> Result<()> {
    if last < head.upper { Ok(()) } else { Err(key_order(last)) }
}

#[cold]
fn key_order(key: Key) -> Error {
    Error::damaged(format!("node has a key out of order: object={} kind={} sub={}", key.object, key.kind, key.sub))
}

#[cfg(test)]
mod tests;
