//! Specification section 9: commit records and delta lists as bytes.

use super::ids::Timestamp;
use super::ids::{Generation, Pointer, Run, SessionId, Tag};
use crate::error::Result;

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
        todo!()
    }

    pub fn decode(bytes: &[u8; 40]) -> Result<Root> {
        let _ = bytes;
        todo!()
    }
}

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
        todo!()
    }

    pub fn decode(bytes: &[u8]) -> Result<CommitRecord> {
        let _ = bytes;
        todo!()
    }
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
        todo!()
    }

    pub fn decode(bytes: &[u8]) -> Result<DeltaList> {
        let _ = bytes;
        todo!()
    }
}
