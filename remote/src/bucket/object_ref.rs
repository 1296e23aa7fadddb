//! What objects are named by, and where in one a run of an archive's blocks is.

use std::ops::Range;

pub(crate) type Hash = [u8; 32];

/// What an object is named by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Id {
    /// A record of the log, by its number.
    Log(u64),
    /// By the hash of its content.
    Segment(Hash),
    Checkpoint(Hash),
}

/// Where a run of blocks begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) id: Id,
    /// Blocks of pages that the object has.
    pub(crate) blocks: u32,
    /// The block in the object.
    pub(crate) at: u32,
}

/// Blocks of the archive, and where they are; None for blocks of zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) blocks: Range<u64>,
    pub(crate) place: Option<Place>,
}
