//! Object ids, and references from blocks of an archive to objects.

use std::ops::Range;

pub(crate) type Hash = [u8; 32];

/// Id of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ObjectId {
    /// Log record, by its number.
    Log(u64),
    /// Segment, by the hash of its content.
    Segment(Hash),
    Checkpoint(Hash),
}

/// Position of a run of blocks in an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ObjectRef {
    pub(crate) id: ObjectId,
    /// Size of the object in blocks of pages.
    pub(crate) blocks: u32,
    /// First block in the object.
    pub(crate) at: u32,
}

/// Run of blocks of the archive and its location; None for zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MapEntry {
    pub(crate) blocks: Range<u64>,
    pub(crate) place: Option<ObjectRef>,
}
