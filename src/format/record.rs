//! Specification section 9: commit records and delta lists as bytes.

use super::ids::Timestamp;
use super::ids::{Generation, Pointer, Run, SessionId, Tag};
use super::node::MAX_LEVEL;
use super::page::POINTER;
use super::reader::Reader;
use crate::error::{Error, Result};

/// Bytes of a record's plaintext.
pub const RECORD_PLAIN: usize = 4056;
/// Plain bytes left for the allocated (24 each) and freed (8 each) lists.
pub const RECORD_LISTS: usize = RECORD_PLAIN - 384;

/// Root of one tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Root {
    pub pointer: Pointer,
    pub level: u8,
}

impl Root {
    /// 40 bytes: pointer, level, zero.
    pub fn encode(&self) -> [u8; 40] {
        let mut out = [0; 40];
        out[..POINTER].copy_from_slice(&self.pointer.encode());
        out[POINTER] = self.level;
        out
    }

    pub fn decode(bytes: &[u8; 40]) -> Result<Root> {
        let mut reader = Reader::new(bytes, "root");
        let root = Root { pointer: Pointer::decode(&reader.array()?)?, level: reader.u8()? };
        reader.zero(7)?;
        if root.level > MAX_LEVEL || (root.pointer.is_null() && root.level != 0) {
            return Err(Error::damaged("root has an impossible level"));
        }
        Ok(root)
    }
}

const TWO_BARRIER: u32 = 1;
const CLOSED: u32 = 2;

/// Everything that a commit publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitRecord {
    pub generation: Generation,
    pub previous_tag: Tag,
    pub session: SessionId,
    pub session_first: Generation,
    pub header_sequence: u64,
    pub time: Timestamp,
    pub two_barrier: bool,
    pub closed: bool,
    /// Indexed by tree number - 1.
    pub roots: [Root; 5],
    pub next_ino: u64,
    pub inodes: u64,
    pub used_blocks: u64,
    pub total_blocks: u64,
    pub next_dead: u64,
    pub next_snapshot: u64,
    pub newest_snapshot: Generation,
    pub newest_snapshot_id: u64,
    pub checkpoint: Generation,
    pub delta_list: Pointer,
    pub allocated: Vec<(Run, Tag)>,
    pub freed: Vec<Run>,
}

impl CommitRecord {
    /// Whether both lists fit into the record itself.
    pub fn lists_fit(allocated: usize, freed: usize) -> bool {
        allocated * 24 + freed * 8 <= RECORD_LISTS
    }

    /// # Panics
    /// When the lists do not fit: ask [`CommitRecord::lists_fit`] first.
    pub fn encode(&self) -> Vec<u8> {
        assert!(Self::lists_fit(self.allocated.len(), self.freed.len()), "lists of a commit record overflow");
        let mut out = Vec::with_capacity(RECORD_PLAIN);
        let put = |out: &mut Vec<u8>, value: u64| out.extend_from_slice(&value.to_le_bytes());
        put(&mut out, self.generation.0);
        out.extend_from_slice(&self.previous_tag);
        out.extend_from_slice(&self.session);
        put(&mut out, self.session_first.0);
        put(&mut out, self.header_sequence);
        out.extend_from_slice(&self.time.seconds.to_le_bytes());
        out.extend_from_slice(&self.time.nanos.to_le_bytes());
        let flags = if self.two_barrier { TWO_BARRIER } else { 0 } | if self.closed { CLOSED } else { 0 };
        out.extend_from_slice(&flags.to_le_bytes());
        for root in &self.roots {
            out.extend_from_slice(&root.encode());
        }
        for value in [
            self.next_ino,
            self.inodes,
            self.used_blocks,
            self.total_blocks,
            self.next_dead,
            self.next_snapshot,
            self.newest_snapshot.0,
            self.checkpoint.0,
            self.newest_snapshot_id,
        ] {
            put(&mut out, value);
        }
        out.extend_from_slice(&self.delta_list.encode());
        out.extend_from_slice(&(self.allocated.len() as u16).to_le_bytes());
        out.extend_from_slice(&(self.freed.len() as u16).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        for (run, tag) in &self.allocated {
            put(&mut out, run.pack());
            out.extend_from_slice(tag);
        }
        for run in &self.freed {
            put(&mut out, run.pack());
        }
        out.resize(RECORD_PLAIN, 0);
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<CommitRecord> {
        let mut reader = Reader::new(bytes, "commit record");
        let mut record = CommitRecord {
            generation: Generation(reader.u64()?),
            previous_tag: reader.array()?,
            session: reader.array()?,
            session_first: Generation(reader.u64()?),
            header_sequence: reader.u64()?,
            time: read_time(&mut reader)?,
            ..CommitRecord::default()
        };
        let flags = reader.u32()?;
        if flags & !(TWO_BARRIER | CLOSED) != 0 {
            return Err(Error::damaged(format!("commit record has unknown flags {flags:#x}")));
        }
        record.two_barrier = flags & TWO_BARRIER != 0;
        record.closed = flags & CLOSED != 0;
        for root in &mut record.roots {
            *root = Root::decode(&reader.array()?)?;
        }
        record.next_ino = reader.u64()?;
        record.inodes = reader.u64()?;
        record.used_blocks = reader.u64()?;
        record.total_blocks = reader.u64()?;
        record.next_dead = reader.u64()?;
        record.next_snapshot = reader.u64()?;
        record.newest_snapshot = Generation(reader.u64()?);
        record.checkpoint = Generation(reader.u64()?);
        record.newest_snapshot_id = reader.u64()?;
        record.delta_list = Pointer::decode(&reader.array()?)?;
        let (allocated, freed) = (usize::from(reader.u16()?), usize::from(reader.u16()?));
        reader.zero(4)?;
        if !Self::lists_fit(allocated, freed) {
            return Err(Error::damaged("commit record has impossible counts"));
        }
        for _ in 0..allocated {
            record.allocated.push((read_run(&mut reader, record.total_blocks)?, reader.array()?));
        }
        for _ in 0..freed {
            record.freed.push(read_run(&mut reader, u64::MAX)?);
        }
        reader.zero(reader.remaining())?;
        if record.generation == Generation(0) || record.checkpoint > record.generation {
            return Err(Error::damaged("commit record has impossible generations"));
        }
        Ok(record)
    }
}

pub(super) fn read_time(reader: &mut Reader<'_>) -> Result<Timestamp> {
    let time = Timestamp { seconds: reader.i64()?, nanos: reader.u32()? };
    if time.nanos >= 1_000_000_000 {
        return Err(Error::damaged("time has more than a second of nanoseconds"));
    }
    Ok(time)
}

/// A run within page space; `total` bounds it when the reader knows the length of the file.
fn read_run(reader: &mut Reader<'_>, total: u64) -> Result<Run> {
    let run = Run::unpack(reader.u64()?);
    if !run.is_page_space(total) {
        return Err(Error::damaged(format!("impossible run of blocks: block={} blocks={}", run.address, run.blocks)));
    }
    Ok(run)
}

/// One page of a long commit's lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeltaList {
    pub next: Pointer,
    pub allocated: Vec<Run>,
    pub freed: Vec<Run>,
}

impl DeltaList {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(POINTER + 8 + 8 * (self.allocated.len() + self.freed.len()));
        out.extend_from_slice(&self.next.encode());
        out.extend_from_slice(&(self.allocated.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.freed.len() as u32).to_le_bytes());
        for run in self.allocated.iter().chain(&self.freed) {
            out.extend_from_slice(&run.pack().to_le_bytes());
        }
        out
    }

    pub fn decode(bytes: &[u8]) -> Result<DeltaList> {
        let mut reader = Reader::new(bytes, "list page");
        let next = Pointer::decode(&reader.array()?)?;
        let (allocated, freed) = (reader.u32()? as usize, reader.u32()? as usize);
        if allocated.saturating_add(freed) != reader.remaining() / 8 {
            return Err(Error::damaged("list page has impossible counts"));
        }
        let mut list = DeltaList { next, allocated: Vec::with_capacity(allocated), freed: Vec::with_capacity(freed) };
        for _ in 0..allocated {
            list.allocated.push(read_run(&mut reader, u64::MAX)?);
        }
        for _ in 0..freed {
            list.freed.push(read_run(&mut reader, u64::MAX)?);
        }
        reader.finish()?;
        Ok(list)
    }
}
