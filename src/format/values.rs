//! Specification sections 7 and 8: the values of tree records as bytes.

use super::ids::{Generation, Ino, Pointer, Run, SessionId, Tag, Timestamp};
use super::record::Root;
use crate::error::Result;

/// `InodeValue::trim` of an inode without a trim offset.
pub const NO_TRIM: u64 = u64::MAX;

/// Inode flag bits.
pub mod inode_flags {
    pub const HAS_XATTRS: u32 = 1;
    pub const NO_PACK: u32 = 2;
    pub const NO_COMPRESS: u32 = 4;
}

/// Section 7.1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InodeValue {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub size: u64,
    pub bytes: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    pub rdev: u32,
    pub flags: u32,
    pub parent: Ino,
    pub next_sequence: u64,
    pub trim: u64,
    pub next_piece: u32,
}

impl InodeValue {
    pub fn encode(&self) -> [u8; 144] {
        todo!()
    }

    pub fn decode(value: &[u8]) -> Result<InodeValue> {
        let _ = value;
        todo!()
    }
}

/// Section 7.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub page: Pointer,
    pub start: u32,
    pub length: u32,
    pub born: Generation,
}

impl Extent {
    pub fn encode(&self) -> [u8; 56] {
        todo!()
    }

    pub fn decode(value: &[u8]) -> Result<Extent> {
        let _ = value;
        todo!()
    }
}

/// One entry of a directory-index record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    pub name: Vec<u8>,
    pub file_type: u8,
    pub sequence: u64,
    pub ino: Ino,
}

pub fn encode_index(entries: &[IndexEntry]) -> Vec<u8> {
    let _ = entries;
    todo!()
}

pub fn decode_index(value: &[u8]) -> Result<Vec<IndexEntry>> {
    let _ = value;
    todo!()
}

/// Finds one name in a directory-index record without building the list.
pub fn find_in_index(value: &[u8], name: &[u8]) -> Result<Option<(Ino, u8, u64)>> {
    let _ = (value, name);
    todo!()
}

/// A directory-list record; the name borrows the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListEntry<'a> {
    pub name: &'a [u8],
    pub file_type: u8,
    pub ino: Ino,
}

pub fn encode_list(entry: &ListEntry<'_>) -> Vec<u8> {
    let _ = entry;
    todo!()
}

pub fn decode_list(value: &[u8]) -> Result<ListEntry<'_>> {
    let _ = value;
    todo!()
}

/// One entry of an xattr record; `piece == 0` means the value is here, else in pieces of 3,000 bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XattrEntry {
    pub name: Vec<u8>,
    pub length: u32,
    pub piece: u32,
    pub value: Vec<u8>,
}

pub fn encode_xattrs(entries: &[XattrEntry]) -> Vec<u8> {
    let _ = entries;
    todo!()
}

pub fn decode_xattrs(value: &[u8]) -> Result<Vec<XattrEntry>> {
    let _ = value;
    todo!()
}

/// Reference count record of a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceValue {
    pub run_blocks: u32,
    pub count: u32,
}

impl ReferenceValue {
    pub fn encode(&self) -> [u8; 8] {
        todo!()
    }

    pub fn decode(value: &[u8]) -> Result<ReferenceValue> {
        let _ = value;
        todo!()
    }
}

/// Dead-list record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeadValue {
    pub run: Run,
    pub born: Generation,
}

impl DeadValue {
    pub fn encode(&self) -> [u8; 16] {
        todo!()
    }

    pub fn decode(value: &[u8]) -> Result<DeadValue> {
        let _ = value;
        todo!()
    }
}

/// Snapshot record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotValue {
    pub generation: Generation,
    pub time: Timestamp,
    pub root: Root,
    pub inodes: u64,
    pub name: Vec<u8>,
}

impl SnapshotValue {
    pub fn encode(&self) -> Vec<u8> {
        todo!()
    }

    pub fn decode(value: &[u8]) -> Result<SnapshotValue> {
        let _ = value;
        todo!()
    }
}

/// History record of one ended session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryValue {
    pub session: SessionId,
    pub last: Generation,
    pub last_tag: Tag,
}

impl HistoryValue {
    pub fn encode(&self) -> [u8; 40] {
        todo!()
    }

    pub fn decode(value: &[u8]) -> Result<HistoryValue> {
        let _ = value;
        todo!()
    }
}
