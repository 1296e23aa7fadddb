//! Specification sections 7 and 8: the values of tree records as bytes.

use super::ids::{Generation, Ino, MAX_DATA, Pointer, Run, SessionId, Tag, Timestamp};
use super::reader::Reader;
use super::record::{Root, read_time};
use crate::error::{Error, Result};

/// `InodeValue::trim` of an inode without a trim offset.
pub const NO_TRIM: u64 = u64::MAX;

/// Inode flag bits.
pub mod inode_flags {
    pub const HAS_XATTRS: u32 = 1;
    pub const NO_PACK: u32 = 2;
    pub const NO_COMPRESS: u32 = 4;
}

fn put_time(out: &mut Vec<u8>, time: Timestamp) {
    out.extend_from_slice(&time.seconds.to_le_bytes());
    out.extend_from_slice(&time.nanos.to_le_bytes());
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
        let mut out = Vec::with_capacity(144);
        for value in [self.mode, self.uid, self.gid, self.links] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&self.bytes.to_le_bytes());
        for time in [self.atime, self.mtime, self.ctime, self.btime] {
            put_time(&mut out, time);
        }
        out.extend_from_slice(&self.rdev.to_le_bytes());
        out.extend_from_slice(&self.flags.to_le_bytes());
        for value in [self.parent.0, self.next_sequence, self.trim] {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out.extend_from_slice(&self.next_piece.to_le_bytes());
        let mut value = [0; 144];
        value[..out.len()].copy_from_slice(&out);
        value
    }

    pub fn decode(value: &[u8]) -> Result<InodeValue> {
        let mut reader = Reader::new(value, "inode");
        let inode = InodeValue {
            mode: reader.u32()?,
            uid: reader.u32()?,
            gid: reader.u32()?,
            links: reader.u32()?,
            size: reader.u64()?,
            bytes: reader.u64()?,
            atime: read_time(&mut reader)?,
            mtime: read_time(&mut reader)?,
            ctime: read_time(&mut reader)?,
            btime: read_time(&mut reader)?,
            rdev: reader.u32()?,
            flags: reader.u32()?,
            parent: Ino(reader.u64()?),
            next_sequence: reader.u64()?,
            trim: reader.u64()?,
            next_piece: reader.u32()?,
        };
        reader.zero(28)?;
        reader.finish()?;
        Ok(inode)
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
        let mut value = [0; 56];
        value[..32].copy_from_slice(&self.page.encode());
        value[32..36].copy_from_slice(&self.start.to_le_bytes());
        value[36..40].copy_from_slice(&self.length.to_le_bytes());
        value[40..48].copy_from_slice(&self.born.0.to_le_bytes());
        value
    }

    pub fn decode(value: &[u8]) -> Result<Extent> {
        let mut reader = Reader::new(value, "extent");
        let extent = Extent {
            page: Pointer::decode(&reader.array()?)?,
            start: reader.u32()?,
            length: reader.u32()?,
            born: Generation(reader.u64()?),
        };
        reader.zero(8)?;
        reader.finish()?;
        let end = u64::from(extent.start) + u64::from(extent.length);
        if extent.page.is_null() || extent.length == 0 || end > MAX_DATA as u64 {
            return Err(Error::damaged("extent has impossible lengths"));
        }
        Ok(extent)
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

fn next_in_index<'a>(reader: &mut Reader<'a>) -> Result<(&'a [u8], u8, u64, Ino)> {
    let (length, file_type) = (usize::from(reader.u8()?), reader.u8()?);
    let (sequence, ino) = (reader.u64()?, Ino(reader.u64()?));
    Ok((checked_name(reader.take(length)?)?, file_type, sequence, ino))
}

/// A name as POSIX allows it: what a hostile archive puts into a name must not become a path.
fn checked_name(name: &[u8]) -> Result<&[u8]> {
    if name.is_empty() || name == b"." || name == b".." || name.iter().any(|&b| b == b'/' || b == 0) {
        return Err(Error::damaged("directory entry has an impossible name"));
    }
    Ok(name)
}

pub fn encode_index(entries: &[IndexEntry]) -> Vec<u8> {
    let mut out = Vec::with_capacity(entries.iter().map(|e| 18 + e.name.len()).sum());
    for entry in entries {
        out.extend_from_slice(&[entry.name.len() as u8, entry.file_type]);
        out.extend_from_slice(&entry.sequence.to_le_bytes());
        out.extend_from_slice(&entry.ino.0.to_le_bytes());
        out.extend_from_slice(&entry.name);
    }
    out
}

pub fn decode_index(value: &[u8]) -> Result<Vec<IndexEntry>> {
    let mut reader = Reader::new(value, "directory index");
    let mut entries = Vec::new();
    while reader.remaining() > 0 {
        let (name, file_type, sequence, ino) = next_in_index(&mut reader)?;
        entries.push(IndexEntry { name: name.to_vec(), file_type, sequence, ino });
    }
    Ok(entries)
}

/// Finds one name in a directory-index record without building the list.
pub fn find_in_index(value: &[u8], name: &[u8]) -> Result<Option<(Ino, u8, u64)>> {
    let mut reader = Reader::new(value, "directory index");
    while reader.remaining() > 0 {
        let (found, file_type, sequence, ino) = next_in_index(&mut reader)?;
        if found == name {
            return Ok(Some((ino, file_type, sequence)));
        }
    }
    Ok(None)
}

/// A directory-list record; the name borrows the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListEntry<'a> {
    pub name: &'a [u8],
    pub file_type: u8,
    pub ino: Ino,
}

pub fn encode_list(entry: &ListEntry<'_>) -> Vec<u8> {
    let mut out = Vec::with_capacity(10 + entry.name.len());
    out.extend_from_slice(&[entry.name.len() as u8, entry.file_type]);
    out.extend_from_slice(&entry.ino.0.to_le_bytes());
    out.extend_from_slice(entry.name);
    out
}

pub fn decode_list(value: &[u8]) -> Result<ListEntry<'_>> {
    let mut reader = Reader::new(value, "directory list entry");
    let (length, file_type, ino) = (usize::from(reader.u8()?), reader.u8()?, Ino(reader.u64()?));
    let name = checked_name(reader.take(length)?)?;
    reader.finish()?;
    Ok(ListEntry { name, file_type, ino })
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
    let mut out = Vec::new();
    for entry in entries {
        out.extend_from_slice(&[entry.name.len() as u8, u8::from(entry.piece != 0)]);
        out.extend_from_slice(&entry.length.to_le_bytes());
        out.extend_from_slice(&entry.piece.to_le_bytes());
        out.extend_from_slice(&entry.name);
        out.extend_from_slice(&entry.value);
    }
    out
}

pub fn decode_xattrs(value: &[u8]) -> Result<Vec<XattrEntry>> {
    let mut reader = Reader::new(value, "xattr record");
    let mut entries = Vec::new();
    while reader.remaining() > 0 {
        let (name_length, flags) = (usize::from(reader.u8()?), reader.u8()?);
        let (length, piece) = (reader.u32()?, reader.u32()?);
        if flags != u8::from(piece != 0) || length > 65_536 {
            return Err(Error::damaged("xattr record has impossible flags or length"));
        }
        let name = reader.take(name_length)?.to_vec();
        let value = if piece == 0 { reader.take(length as usize)?.to_vec() } else { Vec::new() };
        entries.push(XattrEntry { name, length, piece, value });
    }
    Ok(entries)
}

/// Reference count record of a run of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReferenceValue {
    pub run_blocks: u32,
    pub count: u32,
}

impl ReferenceValue {
    pub fn encode(&self) -> [u8; 8] {
        let mut value = [0; 8];
        value[..4].copy_from_slice(&self.run_blocks.to_le_bytes());
        value[4..].copy_from_slice(&self.count.to_le_bytes());
        value
    }

    pub fn decode(value: &[u8]) -> Result<ReferenceValue> {
        let mut reader = Reader::new(value, "reference record");
        let found = ReferenceValue { run_blocks: reader.u32()?, count: reader.u32()? };
        reader.finish()?;
        if found.run_blocks == 0 || found.count < 2 {
            return Err(Error::damaged("reference record has an impossible run or count"));
        }
        Ok(found)
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
        let mut value = [0; 16];
        value[..8].copy_from_slice(&self.run.pack().to_le_bytes());
        value[8..].copy_from_slice(&self.born.0.to_le_bytes());
        value
    }

    pub fn decode(value: &[u8]) -> Result<DeadValue> {
        let mut reader = Reader::new(value, "dead-list record");
        let found = DeadValue { run: Run::unpack(reader.u64()?), born: Generation(reader.u64()?) };
        reader.finish()?;
        if !found.run.is_page_space(u64::MAX) {
            return Err(Error::damaged("dead-list record has an impossible run"));
        }
        Ok(found)
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
        let mut out = Vec::with_capacity(73 + self.name.len());
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        put_time(&mut out, self.time);
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.root.encode());
        out.extend_from_slice(&self.inodes.to_le_bytes());
        out.push(self.name.len() as u8);
        out.extend_from_slice(&self.name);
        out
    }

    pub fn decode(value: &[u8]) -> Result<SnapshotValue> {
        let mut reader = Reader::new(value, "snapshot record");
        let generation = Generation(reader.u64()?);
        let time = read_time(&mut reader)?;
        reader.zero(4)?;
        let (root, inodes, length) = (Root::decode(&reader.array()?)?, reader.u64()?, reader.u8()?);
        let name = reader.take(usize::from(length))?.to_vec();
        reader.finish()?;
        Ok(SnapshotValue { generation, time, root, inodes, name })
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
        let mut value = [0; 40];
        value[..16].copy_from_slice(&self.session);
        value[16..24].copy_from_slice(&self.last.0.to_le_bytes());
        value[24..].copy_from_slice(&self.last_tag);
        value
    }

    pub fn decode(value: &[u8]) -> Result<HistoryValue> {
        let mut reader = Reader::new(value, "history record");
        let found =
            HistoryValue { session: reader.array()?, last: Generation(reader.u64()?), last_tag: reader.array()? };
        reader.finish()?;
        Ok(found)
    }
}
