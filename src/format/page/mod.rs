//! Page prologue and pointer, and the head of a data page: location and tag of its chunks
//! (specification 5.1 to 5.3).

#[cfg(test)]
mod data_head_tests;
#[cfg(test)]
mod tests;

use super::ids::{
    BLOCK, Generation, Ino, MAX_DATA, MAX_INO, MAX_LEVEL, MAX_OFFSET, MAX_PAGE_BLOCKS, NODE_BLOCKS, NODE_CAPACITY,
    PAGE_OVERHEAD, Pointer, Run, Tag, TreeId,
};
use super::{array_at, check_zero, ends_early, put, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// Length of the prologue's plaintext in bytes.
pub(crate) const PROLOGUE: usize = 48;
/// Length of an encoded pointer in bytes.
pub(crate) const POINTER: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PageKind {
    Node = 1,
    Data = 2,
    Packed = 3,
    DeltaList = 4,
}

impl PageKind {
    fn from_byte(byte: u8) -> Result<PageKind> {
        match byte {
            1 => Ok(PageKind::Node),
            2 => Ok(PageKind::Data),
            3 => Ok(PageKind::Packed),
            4 => Ok(PageKind::DeltaList),
            _ => Err(Error::damaged(format!("prologue has an unknown kind: {byte}"))),
        }
    }
}

/// Sealed description at the start of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prologue {
    pub kind: PageKind,
    /// Set when the whole body is one zstd frame (nodes only).
    pub compressed: bool,
    pub blocks: u16,
    /// Bytes of the body before its padding; for a data page the bytes of all chunks.
    pub stored_length: u32,
    pub plain_length: u32,
    pub generation: Generation,
    /// Tree number of a node, inode of a data page, otherwise 0.
    pub owner: u64,
    /// Level of a node, file offset of a data page, otherwise 0.
    pub position: u64,
}

impl Prologue {
    pub(crate) fn encode(&self) -> [u8; PROLOGUE] {
        let mut out = [0; PROLOGUE];
        out[0] = self.kind as u8;
        out[1] = u8::from(self.compressed);
        put(&mut out, 2, self.blocks.to_le_bytes());
        put(&mut out, 4, self.stored_length.to_le_bytes());
        put(&mut out, 8, self.plain_length.to_le_bytes());
        put(&mut out, 16, self.generation.0.to_le_bytes());
        put(&mut out, 24, self.owner.to_le_bytes());
        put(&mut out, 32, self.position.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for an unknown kind, lengths beyond the page, or compression of a kind that has
    /// none.
    pub(crate) fn decode(bytes: &[u8; PROLOGUE]) -> Result<Prologue> {
        check_zero(&bytes[12..16], "prologue")?;
        check_zero(&bytes[40..48], "prologue")?;
        if bytes[1] > 1 {
            return Err(Error::damaged(format!("prologue has an unknown compression: {}", bytes[1])));
        }
        let prologue = Prologue {
            kind: PageKind::from_byte(bytes[0])?,
            compressed: bytes[1] == 1,
            blocks: u16_at(bytes, 2),
            stored_length: u32_at(bytes, 4),
            plain_length: u32_at(bytes, 8),
            generation: Generation(u64_at(bytes, 16)),
            owner: u64_at(bytes, 24),
            position: u64_at(bytes, 32),
        };
        prologue.check()?;
        Ok(prologue)
    }

    /// Returns whether the page holds file data: a sealed head and separately sealed chunks,
    /// instead of one sealed body.
    pub(crate) fn has_chunks(&self) -> bool {
        matches!(self.kind, PageKind::Data | PageKind::Packed)
    }

    /// Returns the length of the message that the pointer's tag authenticates: the head of a data
    /// page, otherwise the body with its padding.
    pub(crate) fn main_length(&self) -> usize {
        let room = usize::from(self.blocks) * BLOCK as usize - PAGE_OVERHEAD;
        if self.has_chunks() { room - self.stored_length as usize } else { room }
    }

    /// Checks the relations between fields required by section 5.1.
    fn check(&self) -> Result<()> {
        let blocks_fit = match self.kind {
            PageKind::Node if self.compressed => 1..NODE_BLOCKS,
            PageKind::Node => NODE_BLOCKS..NODE_BLOCKS + 1,
            _ => 1..MAX_PAGE_BLOCKS + 1,
        };
        if !blocks_fit.contains(&u64::from(self.blocks)) {
            return Err(Error::damaged(format!("prologue has a wrong number of blocks: {}", self.blocks)));
        }
        let room = usize::from(self.blocks) * BLOCK as usize - PAGE_OVERHEAD;
        let (stored, plain) = (self.stored_length as usize, self.plain_length as usize);
        let lengths_fit = stored <= room
            && match self.kind {
                PageKind::Node if self.compressed => stored > 0 && plain <= NODE_CAPACITY,
                PageKind::Node | PageKind::DeltaList => stored == plain,
                PageKind::Data | PageKind::Packed => {
                    (1..=MAX_DATA).contains(&plain) && stored > 0 && room - stored >= head_length(1, 0)
                }
            };
        if !lengths_fit {
            return Err(Error::damaged(format!(
                "prologue has lengths that do not fit: blocks={} stored={stored} plain={plain}",
                self.blocks
            )));
        }
        if self.compressed && self.kind != PageKind::Node {
            return Err(Error::damaged("prologue compresses a body that is not a node"));
        }
        let place_fits = match self.kind {
            PageKind::Node => {
                (1..=TreeId::ALL.len() as u64).contains(&self.owner) && self.position <= u64::from(MAX_LEVEL)
            }
            PageKind::Data => {
                (1..=MAX_INO).contains(&self.owner)
                    && self.position.checked_add(plain as u64).is_some_and(|end| end <= MAX_OFFSET)
            }
            PageKind::Packed | PageKind::DeltaList => self.owner == 0 && self.position == 0,
        };
        if !place_fits {
            return Err(Error::damaged(format!(
                "prologue names a wrong owner: owner={} position={}",
                self.owner, self.position
            )));
        }
        Ok(())
    }
}

impl Pointer {
    pub(crate) fn encode(&self) -> [u8; POINTER] {
        let mut out = [0; POINTER];
        put(&mut out, 0, self.run.pack().to_le_bytes());
        put(&mut out, 8, self.generation.0.to_le_bytes());
        put(&mut out, 16, self.tag);
        out
    }

    /// # Errors
    /// `Damaged` for a page of more than 64 blocks, or a null pointer that is not all zero.
    #[inline]
    pub(crate) fn decode(bytes: &[u8; POINTER]) -> Result<Pointer> {
        let run = Run::unpack(u64_at(bytes, 0));
        if run.blocks == 0 {
            check_zero(bytes, "null pointer")?;
            return Ok(Pointer::NULL);
        }
        if run.blocks > MAX_PAGE_BLOCKS {
            return Err(Error::damaged(format!("pointer to a page that is too long: blocks={}", run.blocks)));
        }
        Ok(Pointer { run, generation: Generation(u64_at(bytes, 8)), tag: array_at(bytes, 16) })
    }
}

/// Bytes of a head before its chunk entries.
const FIXED: usize = 8;
/// Length of a chunk's entry in bytes: stored length and tag.
const ENTRY: usize = 20;
/// Length of an encoded packed item in bytes.
pub(crate) const ITEM: usize = 24;
/// Maximum number of chunks of a data page: the longest data in the smallest chunks.
pub(crate) const MAX_CHUNKS: usize = MAX_DATA / BLOCK as usize;
const MAX_ITEMS: usize = 4096;
/// Flag in a chunk's stored length: the chunk is not compressed.
const RAW_BIT: u32 = 1 << 31;

/// Returns the minimum length of a head in bytes; it is longer where the page must be filled.
pub(crate) const fn head_length(chunks: usize, items: usize) -> usize {
    FIXED + ENTRY * chunks + ITEM * items
}

/// Part of a packed page that belongs to one small file, for `rescue`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PackedItem {
    pub ino: Ino,
    pub offset: u64,
    pub start: u32,
    pub length: u32,
}

impl PackedItem {
    fn decode(bytes: &[u8]) -> PackedItem {
        PackedItem {
            ino: Ino(u64_at(bytes, 0)),
            offset: u64_at(bytes, 8),
            start: u32_at(bytes, 16),
            length: u32_at(bytes, 20),
        }
    }

    fn fits(&self, plain_length: u32) -> bool {
        (1..=MAX_INO).contains(&self.ino.0)
            && self.length > 0
            && self.start.checked_add(self.length).is_some_and(|end| end <= plain_length)
            && self.offset.checked_add(u64::from(self.length)).is_some_and(|end| end <= MAX_OFFSET)
    }
}

/// Decoded head of a data page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkTable {
    pub chunk_size: u32,
    pub plain_length: u32,
    pub chunks: Vec<Chunk>,
    pub items: Vec<PackedItem>,
}

/// Independently compressed and sealed piece of a data page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// Offset of the stored bytes from the first chunk.
    pub at: u32,
    pub stored: u32,
    pub plain_length: u32,
    pub raw: bool,
    pub tag: Tag,
}

/// Encodes a head of `length` bytes, zero-padded, for `chunks` of (stored length, raw, tag).
///
/// # Panics
/// When `length` is below [`head_length`].
pub(crate) fn encode_head(chunk_log2: u8, chunks: &[(u32, bool, Tag)], items: &[PackedItem], length: usize) -> Vec<u8> {
    debug_assert!(
        (1..=MAX_CHUNKS).contains(&chunks.len()) && items.len() <= MAX_ITEMS && (12..=17).contains(&chunk_log2)
    );
    assert!(head_length(chunks.len(), items.len()) <= length, "a head of {length} bytes is too short");
    let mut out = Vec::with_capacity(length);
    out.extend_from_slice(&(chunks.len() as u16).to_le_bytes());
    out.extend_from_slice(&[chunk_log2, 0]);
    out.extend_from_slice(&(items.len() as u16).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    for (stored, raw, tag) in chunks {
        let flag = if *raw { RAW_BIT } else { 0 };
        out.extend_from_slice(&(stored | flag).to_le_bytes());
        out.extend_from_slice(tag);
    }
    for item in items {
        out.extend_from_slice(&item.ino.0.to_le_bytes());
        out.extend_from_slice(&item.offset.to_le_bytes());
        out.extend_from_slice(&item.start.to_le_bytes());
        out.extend_from_slice(&item.length.to_le_bytes());
    }
    out.resize(length, 0);
    out
}

/// Decodes the head of a page with `stored_length` and `plain_length` from its prologue.
///
/// # Errors
/// `Damaged` when counts, lengths or items are inconsistent; allocations are bounded by the counts'
/// limits (32 chunks, 4,096 items).
pub(crate) fn decode_chunk_table(head: &[u8], stored_length: u32, plain_length: u32) -> Result<ChunkTable> {
    let short = || ends_early("data head");
    let (fixed, rest) = head.split_first_chunk::<FIXED>().ok_or_else(short)?;
    let (chunk_count, log2, item_count) = (usize::from(u16_at(fixed, 0)), fixed[2], usize::from(u16_at(fixed, 4)));
    check_zero(&[fixed[3], fixed[6], fixed[7]], "data head")?;
    if !(12..=17).contains(&log2) {
        return Err(Error::damaged(format!("data head has a wrong chunk size: log2={log2}")));
    }
    let chunk_size = 1u32 << log2;
    if plain_length == 0
        || plain_length as usize > MAX_DATA
        || chunk_count > MAX_CHUNKS
        || chunk_count != plain_length.div_ceil(chunk_size) as usize
    {
        return Err(Error::damaged(format!(
            "data head has a wrong number of chunks: chunks={chunk_count} plain={plain_length}"
        )));
    }
    if item_count > MAX_ITEMS {
        return Err(Error::damaged(format!("data head has too many items: {item_count}")));
    }
    let (entries, rest) = rest.split_at_checked(ENTRY * chunk_count).ok_or_else(short)?;
    let (items, padding) = rest.split_at_checked(ITEM * item_count).ok_or_else(short)?;
    check_zero(padding, "data head")?;
    Ok(ChunkTable {
        chunk_size,
        plain_length,
        chunks: decode_chunks(entries, stored_length, chunk_size, plain_length)?,
        items: decode_items(items, plain_length)?,
    })
}

/// Computes the offsets of the chunks, which must fill exactly `stored_length`.
fn decode_chunks(entries: &[u8], stored_length: u32, chunk_size: u32, mut remaining: u32) -> Result<Vec<Chunk>> {
    let mut chunks = Vec::with_capacity(entries.len() / ENTRY);
    let mut at = 0;
    for entry in entries.chunks_exact(ENTRY) {
        let field = u32_at(entry, 0);
        let (raw, stored) = (field & RAW_BIT != 0, field & !RAW_BIT);
        let plain_length = remaining.min(chunk_size);
        let length_fits = if raw { stored == plain_length } else { stored > 0 };
        if !length_fits || stored > stored_length - at {
            return Err(Error::damaged(format!("chunk has a wrong length: stored={stored} plain={plain_length}")));
        }
        chunks.push(Chunk { at, stored, plain_length, raw, tag: array_at(entry, 4) });
        at += stored;
        remaining -= plain_length;
    }
    if at != stored_length {
        return Err(Error::damaged(format!("chunks take another length than their page says: {at} {stored_length}")));
    }
    Ok(chunks)
}

fn decode_items(bytes: &[u8], plain_length: u32) -> Result<Vec<PackedItem>> {
    let items: Vec<PackedItem> = bytes.chunks_exact(ITEM).map(PackedItem::decode).collect();
    if let Some(item) = items.iter().find(|item| !item.fits(plain_length)) {
        return Err(Error::damaged(format!(
            "packed item does not fit: inode={} start={} length={}",
            item.ino.0, item.start, item.length
        )));
    }
    // `fits` bounded the sums. Writers store items in order, so the sort is only for damage and
    // foreign writers.
    let apart = |pair: &[PackedItem]| pair[0].start + pair[0].length <= pair[1].start;
    if !items.windows(2).all(apart) {
        let mut sorted = items.clone();
        sorted.sort_unstable_by_key(|item| item.start);
        if !sorted.windows(2).all(apart) {
            return Err(Error::damaged("packed items overlap"));
        }
    }
    Ok(items)
}
