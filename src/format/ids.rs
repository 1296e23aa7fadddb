//! Ids, units, geometry and limits shared by all layers (specification sections 1, 2, 5.2 and 6).

use std::fmt;

use crate::error::Error;
pub(crate) use crate::error::Timestamp;

/// Block size in bytes, the unit of allocation.
pub(crate) const BLOCK: u64 = 4096;
/// Format version that this program writes and reads.
pub const FORMAT_VERSION: u32 = 1;
pub(crate) const KEY_SLOTS: usize = 32;
/// First block of each header copy.
pub(crate) const HEADER_START: [u64; 2] = [0, 320];
/// First block of each ring area.
pub(crate) const RING_START: [u64; 2] = [33, 353];
pub(crate) const RING_SLOTS: u64 = 64;
/// Blocks of an archive without pages.
pub(crate) const MIN_BLOCKS: u64 = 385;
/// Block ranges `[start, end)` that never belong to a page.
pub(crate) const RESERVED: [(u64, u64); 2] = [(0, 65), (320, 385)];
/// Block range `[start, end)` of the log, in archives that have one.
pub(crate) const LOG: (u64, u64) = (65, 320);
/// [`RESERVED`] for archives with a log: header, ring and log are adjacent.
const RESERVED_WITH_LOG: [(u64, u64); 1] = [(0, 385)];
/// Bytes of a page outside body, or head and chunks: nonce 24, prologue 48 + 16, tag of body or
/// head 16.
pub(crate) const PAGE_OVERHEAD: usize = 104;
pub(crate) const MAX_PAGE_BLOCKS: u64 = 64;
/// Maximum plain file data of one page in bytes.
pub(crate) const MAX_DATA: usize = 128 * 1024;
/// Blocks of a raw node.
pub(crate) const NODE_BLOCKS: u64 = 4;
pub(crate) const MAX_LEVEL: u8 = 15;
/// Maximum length of an encoded node in bytes.
pub(crate) const NODE_CAPACITY: usize = NODE_BLOCKS as usize * BLOCK as usize - PAGE_OVERHEAD;
/// Maximum length of a leaf entry's value in bytes.
pub(crate) const MAX_VALUE: usize = 3500;
/// Blocks covered by one space map value.
pub(crate) const REGION_BLOCKS: u64 = 8192;
/// Maximum inode number: the upper 16 bits of the kernel's inode number identify the view.
pub const MAX_INO: u64 = (1 << 48) - 1;
/// Maximum file offset: that of `off_t`.
pub(crate) const MAX_OFFSET: u64 = i64::MAX as u64;
/// Maximum length in bytes of the name of a directory entry, an xattr or a snapshot.
pub(crate) const MAX_NAME: usize = 255;

/// Number of a commit, from 1; 0 means "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Generation(pub u64);

impl Generation {
    pub(crate) fn next(self) -> Generation {
        Generation(self.0 + 1)
    }

    /// Returns the ring slot of this generation's record, 0..64.
    pub(crate) fn slot(self) -> u64 {
        32 * (self.0 & 1) + (self.0 >> 1) % 32
    }
}

pub(crate) fn reserved(has_log: bool) -> &'static [(u64, u64)] {
    if has_log { &RESERVED_WITH_LOG } else { &RESERVED }
}

pub(crate) fn slot_block(slot: u64) -> u64 {
    RING_START[(slot / 32) as usize] + slot % 32
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ino(pub u64);

pub const ROOT_INO: Ino = Ino(1);

/// 128-bit authentication tag of a page body or record.
pub(crate) type Tag = [u8; 16];

/// Random id of an archive.
pub type ArchiveId = [u8; 16];

/// Random id of a writing session.
pub(crate) type SessionId = [u8; 16];

/// Run of blocks: address (48 bits) and length in blocks (16 bits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Run {
    pub address: u64,
    pub blocks: u64,
}

impl Run {
    pub(crate) fn new(address: u64, blocks: u64) -> Run {
        Run { address, blocks }
    }

    pub(crate) fn pack(self) -> u64 {
        self.address | (self.blocks << 48)
    }

    pub(crate) fn unpack(packed: u64) -> Run {
        Run { address: packed & ((1 << 48) - 1), blocks: packed >> 48 }
    }

    pub(crate) fn end(self) -> u64 {
        self.address + self.blocks
    }

    pub(crate) fn offset(self) -> u64 {
        self.address * BLOCK
    }

    pub(crate) fn bytes(self) -> u64 {
        self.blocks * BLOCK
    }

    /// Returns whether every block may belong to a page of a file of `total` blocks.
    pub(crate) fn is_page_space(self, total: u64) -> bool {
        self.blocks > 0 && self.blocks <= MAX_PAGE_BLOCKS && self.end() <= total && self.avoids(&RESERVED)
    }

    pub(crate) fn avoids(self, ranges: &[(u64, u64)]) -> bool {
        ranges.iter().all(|&(start, end)| self.end() <= start || self.address >= end)
    }
}

/// Location and expected tag of a page; `run.blocks == 0` is null.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Pointer {
    pub(crate) run: Run,
    pub(crate) generation: Generation,
    pub(crate) tag: Tag,
}

impl Pointer {
    pub(crate) const NULL: Pointer =
        Pointer { run: Run { address: 0, blocks: 0 }, generation: Generation(0), tag: [0; 16] };

    pub(crate) fn is_null(&self) -> bool {
        self.run.blocks == 0
    }

    /// Returns the error of a damaged page: its flaw, block and generation.
    pub(crate) fn damaged(&self, flaw: impl fmt::Display) -> Error {
        Error::damaged(format!("{flaw}: block={} generation={}", self.run.address, self.generation.0))
    }
}

/// Key of every tree, ordered as a tuple.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) object: u64,
    pub(crate) kind: u8,
    pub(crate) sub: u64,
}

impl Key {
    pub(crate) const MIN: Key = Key { object: 0, kind: 0, sub: 0 };
    /// Greatest key; only an upper fence, never an entry.
    pub(crate) const MAX: Key = Key { object: u64::MAX, kind: u8::MAX, sub: u64::MAX };

    pub(crate) const fn new(object: u64, kind: u8, sub: u64) -> Key {
        Key { object, kind, sub }
    }

    pub(crate) fn next(self) -> Option<Key> {
        if let Some(sub) = self.sub.checked_add(1) {
            return Some(Key { sub, ..self });
        }
        match self.kind.checked_add(1) {
            Some(kind) => Some(Key::new(self.object, kind, 0)),
            None => self.object.checked_add(1).map(|object| Key::new(object, 0, 0)),
        }
    }
}

/// Record kinds (the `kind` of a key), specification sections 6.2 and 7.
pub(crate) mod kind {
    pub(crate) const INODE: u8 = 1;
    pub(crate) const INLINE: u8 = 2;
    pub(crate) const XATTR: u8 = 3;
    pub(crate) const XATTR_PIECE: u8 = 4;
    pub(crate) const DIR_INDEX: u8 = 5;
    pub(crate) const DIR_LIST: u8 = 6;
    pub(crate) const EXTENT: u8 = 7;
    pub(crate) const ORPHAN: u8 = 16;
    pub(crate) const TRIM: u8 = 17;
    pub(crate) const REFERENCE: u8 = 32;
    pub(crate) const DEAD: u8 = 33;
    pub(crate) const SNAPSHOT: u8 = 34;
    pub(crate) const HISTORY: u8 = 35;
    pub(crate) const SPACE: u8 = 36;
}

/// Trees by number, specification section 6.2.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub(crate) enum TreeId {
    Live = 1,
    References = 2,
    Snapshots = 3,
    History = 4,
    Space = 5,
}

impl TreeId {
    pub(crate) const ALL: [TreeId; 5] =
        [TreeId::Live, TreeId::References, TreeId::Snapshots, TreeId::History, TreeId::Space];
}
