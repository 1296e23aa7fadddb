//! Specification section 6.1: nodes of the B+trees as bytes.

use super::ids::{Key, MAX_VALUE, NODE_CAPACITY, Pointer};
use super::reader::Reader;
use crate::error::{Error, Result};

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
    out.extend_from_slice(&key.object.to_le_bytes());
    out.push(key.kind);
    out.extend_from_slice(&key.sub.to_le_bytes());
}

fn read_key(reader: &mut Reader<'_>) -> Result<Key> {
    Ok(Key { object: reader.u64()?, kind: reader.u8()?, sub: reader.u64()? })
}

fn begin(head: &NodeHead, count: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(NODE_CAPACITY);
    out.extend_from_slice(&[head.level, head.tree]);
    out.extend_from_slice(&(count as u16).to_le_bytes());
    out.extend_from_slice(&[0; 4]);
    put_key(&mut out, head.lower);
    put_key(&mut out, head.upper);
    out
}

pub fn encode_leaf<'a>(head: &NodeHead, entries: impl ExactSizeIterator<Item = (Key, &'a [u8])>) -> Vec<u8> {
    let mut out = begin(head, entries.len());
    for (key, value) in entries {
        put_key(&mut out, key);
        out.extend_from_slice(&(value.len() as u16).to_le_bytes());
        out.extend_from_slice(value);
    }
    out
}

pub fn encode_internal(head: &NodeHead, entries: impl ExactSizeIterator<Item = (Key, Pointer)>) -> Vec<u8> {
    let mut out = begin(head, entries.len());
    for (key, pointer) in entries {
        put_key(&mut out, key);
        out.extend_from_slice(&pointer.encode());
    }
    out
}

/// Decodes and validates: level, count, ascending keys within the fences, first key of an internal node = lower fence,
/// value lengths, no null pointer, nothing left over.
pub fn decode(bytes: &[u8]) -> Result<NodeView<'_>> {
    if bytes.len() > NODE_CAPACITY {
        return Err(Error::damaged("node is too long"));
    }
    let mut reader = Reader::new(bytes, "node");
    let (level, tree, count) = (reader.u8()?, reader.u8()?, usize::from(reader.u16()?));
    reader.zero(4)?;
    let head = NodeHead { level, tree, lower: read_key(&mut reader)?, upper: read_key(&mut reader)? };
    if level > MAX_LEVEL || head.lower >= head.upper {
        return Err(Error::damaged("node has impossible fences or level"));
    }
    let smallest = if level == 0 { LEAF_ENTRY } else { INTERNAL_ENTRY };
    if count > reader.remaining() / smallest || (level > 0 && count == 0) {
        return Err(Error::damaged("node has an impossible number of entries"));
    }
    let mut before = None;
    let mut check = |key: Key| {
        let ascending = before.is_none_or(|before| before < key);
        before = Some(key);
        if ascending && key >= head.lower && key < head.upper {
            Ok(())
        } else {
            Err(Error::damaged("node has keys out of order or outside of its fences"))
        }
    };
    let entries = if level == 0 {
        let mut entries = Vec::with_capacity(count);
        for _ in 0..count {
            let key = read_key(&mut reader)?;
            check(key)?;
            let length = usize::from(reader.u16()?);
            if length > MAX_VALUE {
                return Err(Error::damaged("node has a value that is too long"));
            }
            entries.push((key, reader.take(length)?));
        }
        NodeEntries::Leaf(entries)
    } else {
        let mut entries = Vec::with_capacity(count);
        for index in 0..count {
            let key = read_key(&mut reader)?;
            check(key)?;
            let pointer = Pointer::decode(&reader.array()?)?;
            if pointer.is_null() || (index == 0 && key != head.lower) {
                return Err(Error::damaged("internal node has a null child or a wrong first key"));
            }
            entries.push((key, pointer));
        }
        NodeEntries::Internal(entries)
    };
    reader.finish()?;
    Ok(NodeView { head, entries })
}
