//! Encoding of log entries, which make changes durable without a commit, so that an fsync is one
//! write (specification 9.4).

use super::ids::{BLOCK, Generation, Ino, Key, LOG, MAX_INO, MAX_OFFSET, MAX_VALUE, Tag, Timestamp, kind};
use super::node::{KEY, key_at, put_key};
use super::{ByteReader, array_at, check_zero, exact_array, put, put_time, time_at, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// Length of an entry's head in bytes.
pub(crate) const ENTRY_HEAD: usize = 64;
/// Bytes of an entry outside its body: nonce 24, head 64 + 16, tag of the body 16.
pub(crate) const ENTRY_OVERHEAD: usize = 120;
/// Blocks of the log, and of its longest possible entry.
pub(crate) const LOG_BLOCKS: u64 = LOG.1 - LOG.0;

const FIXED: usize = 32;
const RANGE: usize = 24;
const RECORD: usize = KEY + 2;
const PIECE: usize = 20;
/// Length value of a removed record.
const REMOVED: u16 = u16::MAX;

/// Position in the log: all entries up to number `number` of the record with this generation and
/// tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LogMark {
    /// Generation of the record that the entries extend.
    pub generation: Generation,
    pub record: Tag,
    /// Number of the last entry, from 1.
    pub number: u32,
    pub entry: Tag,
}

impl LogMark {
    pub(crate) fn is_of(&self, generation: Generation, record: Tag) -> bool {
        (self.generation, self.record) == (generation, record)
    }
}

/// Head of an entry, readable before its body is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryHead {
    /// Generation of the record that the entry extends.
    pub generation: Generation,
    pub record: Tag,
    /// Number of the entry, from 1.
    pub number: u32,
    /// Bytes of the body before its padding.
    pub length: u32,
    /// Tag of the previous entry; zero for the first.
    pub previous: Tag,
    pub time: Timestamp,
    pub blocks: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogPiece {
    pub ino: Ino,
    pub offset: u64,
    pub data: Vec<u8>,
}

/// Range in which pieces of earlier entries are void.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DroppedRange {
    pub ino: Ino,
    pub start: u64,
    /// First offset after the range; all bits set for the end of every file.
    pub end: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LogEntry {
    pub next_ino: u64,
    pub inodes: u64,
    pub dropped: Vec<DroppedRange>,
    /// Records in ascending order; `None` for a removed record.
    pub records: Vec<(Key, Option<Vec<u8>>)>,
    /// Pieces in ascending order of inode and offset, disjoint.
    pub pieces: Vec<LogPiece>,
}

pub(crate) fn entry_blocks(body: usize) -> u64 {
    ((body + ENTRY_OVERHEAD) as u64).div_ceil(BLOCK)
}

/// Returns the maximum length of a body in `blocks` blocks.
pub(crate) fn entry_capacity(blocks: u64) -> usize {
    (blocks * BLOCK) as usize - ENTRY_OVERHEAD
}

impl EntryHead {
    pub(crate) fn encode(&self) -> [u8; ENTRY_HEAD] {
        let mut out = [0; ENTRY_HEAD];
        put(&mut out, 0, self.generation.0.to_le_bytes());
        put(&mut out, 8, self.record);
        put(&mut out, 24, self.number.to_le_bytes());
        put(&mut out, 28, self.length.to_le_bytes());
        put(&mut out, 32, self.previous);
        put_time(&mut out, 48, self.time);
        put(&mut out, 60, self.blocks.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for another length, number or generation 0, a first entry with a previous tag, no
    /// blocks or more than the log has, or a body longer than its blocks.
    pub(crate) fn decode(bytes: &[u8]) -> Result<EntryHead> {
        let bytes: &[u8; ENTRY_HEAD] = exact_array(bytes, "head of a log entry")?;
        check_zero(&bytes[62..], "head of a log entry")?;
        let head = EntryHead {
            generation: Generation(u64_at(bytes, 0)),
            record: array_at(bytes, 8),
            number: u32_at(bytes, 24),
            length: u32_at(bytes, 28),
            previous: array_at(bytes, 32),
            time: time_at(bytes, 48, "head of a log entry")?,
            blocks: u16_at(bytes, 60),
        };
        let blocks = u64::from(head.blocks);
        if head.generation.0 == 0 || (head.number == 1 && head.previous != Tag::default()) {
            return Err(Error::damaged(format!(
                "log entry follows nothing that there is: number={} generation={}",
                head.number, head.generation.0
            )));
        }
        if head.number == 0 || !(1..=LOG_BLOCKS).contains(&blocks) || head.length as usize > entry_capacity(blocks) {
            return Err(Error::damaged(format!(
                "log entry is out of bounds: number={} blocks={blocks} length={}",
                head.number, head.length
            )));
        }
        Ok(head)
    }
}

impl LogEntry {
    pub(crate) fn is_empty(&self) -> bool {
        self.dropped.is_empty() && self.records.is_empty() && self.pieces.is_empty()
    }

    /// Returns the length of the body in bytes.
    pub(crate) fn length(&self) -> usize {
        let records = self.records.iter().map(|(_, value)| record_length(value.as_ref().map_or(0, Vec::len)));
        let pieces = self.pieces.iter().map(|piece| piece_length(piece.data.len()));
        FIXED + RANGE * self.dropped.len() + records.sum::<usize>() + pieces.sum::<usize>()
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.length());
        out.extend_from_slice(&self.next_ino.to_le_bytes());
        out.extend_from_slice(&self.inodes.to_le_bytes());
        for count in [self.dropped.len(), self.records.len(), self.pieces.len(), 0] {
            out.extend_from_slice(&(count as u32).to_le_bytes()); // bounded by the log
        }
        for DroppedRange { ino, start, end } in &self.dropped {
            [ino.0, *start, *end].iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        }
        for (key, value) in &self.records {
            put_key(&mut out, *key);
            let length = value.as_ref().map_or(REMOVED, |value| value.len() as u16); // values of a tree are shorter
            out.extend_from_slice(&length.to_le_bytes());
            out.extend_from_slice(value.as_deref().unwrap_or_default());
        }
        for LogPiece { ino, offset, data } in &self.pieces {
            out.extend_from_slice(&ino.0.to_le_bytes());
            out.extend_from_slice(&offset.to_le_bytes());
            out.extend_from_slice(&(data.len() as u32).to_le_bytes());
            out.extend_from_slice(data);
        }
        out
    }

    /// # Errors
    /// `Damaged` for counts that do not fill the bytes, records that tree 1 cannot have, and values
    /// out of order or bounds.
    pub(crate) fn decode(bytes: &[u8]) -> Result<LogEntry> {
        let mut reader = ByteReader::new(bytes, "log entry");
        let (next_ino, inodes) = (reader.u64()?, reader.u64()?);
        let (dropped, records, pieces) = (reader.u32()?, reader.u32()?, reader.u32()?);
        reader.skip_zeros(4)?;
        if next_ino > MAX_INO + 1 {
            return Err(Error::damaged(format!("log entry has a wrong next inode: {next_ino}")));
        }
        let mut entry = LogEntry { next_ino, inodes, ..LogEntry::default() };
        // Each range takes bytes, so an excessive count exhausts the reader and not the memory.
        for _ in 0..dropped {
            entry.dropped.push(decode_range(&mut reader)?);
        }
        for _ in 0..records {
            let record = decode_record(&mut reader)?;
            if entry.records.last().is_some_and(|(last, _)| *last >= record.0) {
                return Err(Error::damaged("log entry has records out of order"));
            }
            entry.records.push(record);
        }
        for _ in 0..pieces {
            let piece = decode_piece(&mut reader)?;
            let after = |last: &LogPiece| last.ino < piece.ino || (last.ino == piece.ino && last.end() <= piece.offset);
            if !entry.pieces.last().is_none_or(after) {
                return Err(Error::damaged("log entry has pieces out of order"));
            }
            entry.pieces.push(piece);
        }
        reader.finish()?;
        Ok(entry)
    }
}

impl LogPiece {
    pub(crate) fn end(&self) -> u64 {
        self.offset + self.data.len() as u64
    }
}

pub(crate) fn record_length(value: usize) -> usize {
    RECORD + value
}

pub(crate) fn piece_length(data: usize) -> usize {
    PIECE + data
}

fn decode_ino(reader: &mut ByteReader<'_>) -> Result<Ino> {
    let ino = reader.u64()?;
    if !(1..=MAX_INO).contains(&ino) {
        return Err(Error::damaged(format!("log entry has a wrong inode: {ino}")));
    }
    Ok(Ino(ino))
}

fn decode_range(reader: &mut ByteReader<'_>) -> Result<DroppedRange> {
    let range = DroppedRange { ino: decode_ino(reader)?, start: reader.u64()?, end: reader.u64()? };
    if range.start >= range.end {
        return Err(Error::damaged(format!("log entry has an empty range: {}..{}", range.start, range.end)));
    }
    Ok(range)
}

/// Returns whether tree 1 has records with this key (specification 6.2); entries contain no others.
pub(crate) fn is_record_of_files(key: Key) -> bool {
    match key.kind {
        kind::INODE | kind::INLINE => key.object != 0 && key.sub == 0,
        kind::XATTR..=kind::EXTENT => key.object != 0,
        kind::ORPHAN | kind::TRIM => key.object == 0,
        _ => false,
    }
}

fn decode_record(reader: &mut ByteReader<'_>) -> Result<(Key, Option<Vec<u8>>)> {
    let key = key_at(reader.take(KEY)?, 0);
    if !is_record_of_files(key) {
        return Err(Error::damaged(format!("log entry has a record that no tree of files has: kind={}", key.kind)));
    }
    let value = match reader.u16()? {
        REMOVED => None,
        length if usize::from(length) <= MAX_VALUE => Some(reader.take(length.into())?.to_vec()),
        length => return Err(Error::damaged(format!("log entry has a value of {length} bytes"))),
    };
    Ok((key, value))
}

fn decode_piece(reader: &mut ByteReader<'_>) -> Result<LogPiece> {
    let (ino, offset, length) = (decode_ino(reader)?, reader.u64()?, reader.u32()?);
    let in_file = offset.checked_add(length.into()).is_some_and(|end| end <= MAX_OFFSET);
    if length == 0 || !in_file {
        return Err(Error::damaged(format!("log entry has an impossible piece: offset={offset} length={length}")));
    }
    Ok(LogPiece { ino, offset, data: reader.take(length as usize)?.to_vec() })
}

#[cfg(test)]
mod tests;
