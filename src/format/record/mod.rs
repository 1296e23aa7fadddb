//! Encoding of commit records and delta lists (specification section 9).

use std::ops::{Index, IndexMut};

use super::ids::{Generation, MAX_INO, MAX_LEVEL, MAX_PAGE_BLOCKS, Pointer, Run, SessionId, Tag, Timestamp, TreeId};
use super::log::LogMark;
use super::page::POINTER;
use super::{array_at, check_zero, ends_early, exact_array, put, put_time, time_at, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// Length of a record's plaintext in bytes.
pub(crate) const RECORD_PLAIN: usize = 4056;
/// Plain bytes left for the allocated (24 each) and freed (8 each) lists.
pub(crate) const RECORD_LISTS: usize = RECORD_PLAIN - LISTS_AT;

const ROOT: usize = 40;
const ROOTS_AT: usize = 72;
const LISTS_AT: usize = 384;
const ALLOCATED: usize = 24;
const FREED: usize = 8;
const TWO_BARRIER: u32 = 1;
const CLOSED: u32 = 2;
const LOG_PENDING: u32 = 4;
const BACKUP: u32 = 8;
/// Length of the pending log in bytes: generation and tag of the record, number of the last entry,
/// zero, its tag.
const PENDING: usize = 48;
/// Length of a backup's origin in bytes: session, its first generation, generation, tag, time,
/// zero.
const ORIGIN: usize = 64;
/// Bytes of a delta list before its runs.
const DELTA_HEAD: usize = POINTER + 8;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Root {
    pub pointer: Pointer,
    pub level: u8,
}

impl Root {
    pub(crate) fn encode(&self) -> [u8; 40] {
        let mut out = [0; ROOT];
        put(&mut out, 0, self.pointer.encode());
        out[POINTER] = self.level;
        out
    }

    /// # Errors
    /// `Damaged` for a level beyond 15, or above 0 without a page.
    pub(crate) fn decode(bytes: &[u8; 40]) -> Result<Root> {
        check_zero(&bytes[POINTER + 1..], "root")?;
        let root = Root { pointer: Pointer::decode(&array_at(bytes, 0))?, level: bytes[POINTER] };
        if root.level > MAX_LEVEL || (root.pointer.is_null() && root.level != 0) {
            return Err(Error::damaged(format!("root has a wrong level: {}", root.level)));
        }
        Ok(root)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Roots([Root; TreeId::ALL.len()]);

impl Index<TreeId> for Roots {
    type Output = Root;

    fn index(&self, tree: TreeId) -> &Root {
        &self.0[tree as usize - 1]
    }
}

impl IndexMut<TreeId> for Roots {
    fn index_mut(&mut self, tree: TreeId) -> &mut Root {
        &mut self.0[tree as usize - 1]
    }
}

/// Commit whose content a backup has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BackupOrigin {
    pub session: SessionId,
    /// First generation of the session.
    pub first: Generation,
    pub generation: Generation,
    pub tag: Tag,
    pub time: Timestamp,
}

/// Commit record: everything that a commit publishes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CommitRecord {
    pub generation: Generation,
    pub previous_tag: Tag,
    pub session: SessionId,
    pub session_first: Generation,
    pub header_sequence: u64,
    pub time: Timestamp,
    pub two_barrier: bool,
    pub closed: bool,
    pub roots: Roots,
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
    /// Last entry of an older record's log that this record does not contain.
    pub pending: Option<LogMark>,
    /// Origin of the content, if the file is a backup.
    pub origin: Option<BackupOrigin>,
    pub allocated: Vec<(Run, Tag)>,
    pub freed: Vec<Run>,
}

impl CommitRecord {
    /// Returns whether both lists fit into a record without pending log and backup origin.
    pub(crate) fn lists_fit(allocated: usize, freed: usize) -> bool {
        allocated * ALLOCATED + freed * FREED <= RECORD_LISTS
    }

    pub(crate) fn fits(&self) -> bool {
        let trailer = trailer_bytes(self.pending.is_some(), self.origin.is_some());
        Self::lists_fit(self.allocated.len(), self.freed.len() + trailer / FREED)
    }

    /// # Panics
    /// When the lists do not fit, see [`CommitRecord::fits`].
    pub(crate) fn encode(&self) -> Vec<u8> {
        assert!(self.fits(), "the lists of a record must fit");
        let mut out = vec![0; RECORD_PLAIN];
        put(&mut out, 0, self.generation.0.to_le_bytes());
        put(&mut out, 8, self.previous_tag);
        put(&mut out, 24, self.session);
        put(&mut out, 40, self.session_first.0.to_le_bytes());
        put(&mut out, 48, self.header_sequence.to_le_bytes());
        put_time(&mut out, 56, self.time);
        let flags = [
            (self.two_barrier, TWO_BARRIER),
            (self.closed, CLOSED),
            (self.pending.is_some(), LOG_PENDING),
            (self.origin.is_some(), BACKUP),
        ];
        let flags = flags.iter().fold(0, |all, (set, flag)| if *set { all | flag } else { all });
        put(&mut out, 68, u32::to_le_bytes(flags));
        for (index, root) in self.roots.0.iter().enumerate() {
            put(&mut out, ROOTS_AT + ROOT * index, root.encode());
        }
        let counters = [
            (272, self.next_ino),
            (280, self.inodes),
            (288, self.used_blocks),
            (296, self.total_blocks),
            (304, self.next_dead),
            (312, self.next_snapshot),
            (320, self.newest_snapshot.0),
            (328, self.checkpoint.0),
            (336, self.newest_snapshot_id),
        ];
        for (at, value) in counters {
            put(&mut out, at, value.to_le_bytes());
        }
        put(&mut out, 344, self.delta_list.encode());
        put(&mut out, 376, (self.allocated.len() as u16).to_le_bytes());
        put(&mut out, 378, (self.freed.len() as u16).to_le_bytes());
        let mut at = LISTS_AT;
        for (run, tag) in &self.allocated {
            put(&mut out, at, run.pack().to_le_bytes());
            put(&mut out, at + 8, *tag);
            at += ALLOCATED;
        }
        for run in &self.freed {
            put(&mut out, at, run.pack().to_le_bytes());
            at += FREED;
        }
        if let Some(pending) = &self.pending {
            put(&mut out, at, pending.generation.0.to_le_bytes());
            put(&mut out, at + 8, pending.record);
            put(&mut out, at + 24, pending.number.to_le_bytes());
            put(&mut out, at + 32, pending.entry);
            at += PENDING;
        }
        if let Some(origin) = &self.origin {
            put(&mut out, at, origin.session);
            put(&mut out, at + 16, origin.first.0.to_le_bytes());
            put(&mut out, at + 24, origin.generation.0.to_le_bytes());
            put(&mut out, at + 32, origin.tag);
            put_time(&mut out, at + 48, origin.time);
        }
        out
    }

    /// # Errors
    /// `Damaged` for another length, unknown flags, lists beyond the record, or runs that no page
    /// can have.
    pub(crate) fn decode(bytes: &[u8]) -> Result<CommitRecord> {
        let bytes: &[u8; RECORD_PLAIN] = exact_array(bytes, "commit record")?;
        let generation = Generation(u64_at(bytes, 0));
        let flags = u32_at(bytes, 68);
        if generation.0 == 0 || flags & !(TWO_BARRIER | CLOSED | LOG_PENDING | BACKUP) != 0 {
            return Err(Error::damaged(format!(
                "commit record has unknown flags: generation={} flags={flags}",
                generation.0
            )));
        }
        let next_ino = u64_at(bytes, 272);
        if next_ino > MAX_INO + 1 {
            return Err(Error::damaged(format!("commit record has a wrong next inode: {next_ino}")));
        }
        let mut roots = Roots::default();
        for (index, root) in roots.0.iter_mut().enumerate() {
            *root = Root::decode(&array_at(bytes, ROOTS_AT + ROOT * index))?;
        }
        check_zero(&bytes[380..LISTS_AT], "commit record")?;
        let (has_pending, has_origin) = (flags & LOG_PENDING != 0, flags & BACKUP != 0);
        let (allocated, freed, pending, origin) = decode_lists(bytes, has_pending, has_origin)?;
        Ok(CommitRecord {
            generation,
            previous_tag: array_at(bytes, 8),
            session: array_at(bytes, 24),
            session_first: Generation(u64_at(bytes, 40)),
            header_sequence: u64_at(bytes, 48),
            time: time_at(bytes, 56, "commit record")?,
            two_barrier: flags & TWO_BARRIER != 0,
            closed: flags & CLOSED != 0,
            roots,
            next_ino,
            inodes: u64_at(bytes, 280),
            used_blocks: u64_at(bytes, 288),
            total_blocks: u64_at(bytes, 296),
            next_dead: u64_at(bytes, 304),
            next_snapshot: u64_at(bytes, 312),
            newest_snapshot: Generation(u64_at(bytes, 320)),
            newest_snapshot_id: u64_at(bytes, 336),
            checkpoint: Generation(u64_at(bytes, 328)),
            delta_list: Pointer::decode(&array_at(bytes, 344))?,
            pending,
            origin,
            allocated,
            freed,
        })
    }
}

/// Returns the length of the optional parts after the lists.
fn trailer_bytes(has_pending: bool, has_origin: bool) -> usize {
    usize::from(has_pending) * PENDING + usize::from(has_origin) * ORIGIN
}

/// Allocated pages, freed runs, pending log, and backup origin.
type Lists = (Vec<(Run, Tag)>, Vec<Run>, Option<LogMark>, Option<BackupOrigin>);

/// Decodes the two lists at the end of a record and the optional parts after them; the rest must be
/// zero.
fn decode_lists(bytes: &[u8; RECORD_PLAIN], has_pending: bool, has_origin: bool) -> Result<Lists> {
    let (allocated, freed) = (usize::from(u16_at(bytes, 376)), usize::from(u16_at(bytes, 378)));
    if !CommitRecord::lists_fit(allocated, freed + trailer_bytes(has_pending, has_origin) / FREED) {
        return Err(Error::damaged(format!(
            "commit record has lists beyond its end: allocated={allocated} freed={freed}"
        )));
    }
    // Cannot fail: the sum was checked against the bytes from LISTS_AT on.
    let (pages, rest) = bytes[LISTS_AT..].split_at(allocated * ALLOCATED);
    let (runs, rest) = rest.split_at(freed * FREED);
    let (pending, rest) = rest.split_at(usize::from(has_pending) * PENDING);
    let (origin, rest) = rest.split_at(usize::from(has_origin) * ORIGIN);
    check_zero(rest, "commit record")?;
    let pending = has_pending.then(|| decode_pending(pending)).transpose()?;
    let origin = has_origin.then(|| decode_origin(origin)).transpose()?;
    let pages = pages
        .chunks_exact(ALLOCATED)
        .map(|entry| Ok((run_at(entry, MAX_PAGE_BLOCKS)?, array_at(entry, 8))))
        .collect::<Result<_>>()?;
    Ok((pages, decode_runs(runs)?, pending, origin))
}

fn decode_origin(bytes: &[u8]) -> Result<BackupOrigin> {
    check_zero(&bytes[60..], "commit record")?;
    let origin = BackupOrigin {
        session: array_at(bytes, 0),
        first: Generation(u64_at(bytes, 16)),
        generation: Generation(u64_at(bytes, 24)),
        tag: array_at(bytes, 32),
        time: time_at(bytes, 48, "commit record")?,
    };
    if origin.generation.0 == 0 {
        return Err(Error::damaged("commit record is of a backup of no commit"));
    }
    Ok(origin)
}

fn decode_pending(bytes: &[u8]) -> Result<LogMark> {
    check_zero(&bytes[28..32], "commit record")?;
    let pending = LogMark {
        generation: Generation(u64_at(bytes, 0)),
        record: array_at(bytes, 8),
        number: u32_at(bytes, 24),
        entry: array_at(bytes, 32),
    };
    if pending.number == 0 {
        return Err(Error::damaged("commit record has a log pending without an entry"));
    }
    Ok(pending)
}

fn decode_runs(bytes: &[u8]) -> Result<Vec<Run>> {
    bytes.chunks_exact(FREED).map(|entry| run_at(entry, u64::from(u16::MAX))).collect()
}

fn run_at(entry: &[u8], longest: u64) -> Result<Run> {
    let run = Run::unpack(u64_at(entry, 0));
    if run.blocks == 0 || run.blocks > longest {
        return Err(Error::damaged(format!(
            "list names a run of a wrong length: block={} blocks={}",
            run.address, run.blocks
        )));
    }
    Ok(run)
}

/// One page of a long commit's lists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeltaList {
    pub next: Pointer,
    pub allocated: Vec<Run>,
    pub freed: Vec<Run>,
}

impl DeltaList {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(DELTA_HEAD + FREED * (self.allocated.len() + self.freed.len()));
        out.extend_from_slice(&self.next.encode());
        out.extend_from_slice(&(self.allocated.len() as u32).to_le_bytes());
        out.extend_from_slice(&(self.freed.len() as u32).to_le_bytes());
        for run in self.allocated.iter().chain(&self.freed) {
            out.extend_from_slice(&run.pack().to_le_bytes());
        }
        out
    }

    /// # Errors
    /// `Damaged` when the counts do not fill the bytes exactly, or for an empty run.
    pub(crate) fn decode(bytes: &[u8]) -> Result<DeltaList> {
        let (head, rest) = bytes.split_first_chunk::<DELTA_HEAD>().ok_or_else(|| ends_early("delta list"))?;
        let (allocated, freed) = (u64::from(u32_at(head, POINTER)), u64::from(u32_at(head, POINTER + 4)));
        if (allocated + freed) * FREED as u64 != rest.len() as u64 {
            return Err(Error::damaged(format!("delta list has a wrong length: allocated={allocated} freed={freed}")));
        }
        // Cannot fail: both counts together fill `rest`.
        let (first, second) = rest.split_at(allocated as usize * FREED);
        Ok(DeltaList {
            next: Pointer::decode(&array_at(head, 0))?,
            allocated: decode_runs(first)?,
            freed: decode_runs(second)?,
        })
    }
}

#[cfg(test)]
mod tests;
