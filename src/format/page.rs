//! Specification section 5: prologue, pointer, and the body of data pages.

use std::ops::Range;

use super::fixed::{array_at, put, u16_at, u32_at, u64_at, zero};
use super::ids::{
    BLOCK, Generation, Ino, MAX_DATA, MAX_INO, MAX_OFFSET, MAX_PAGE_BLOCKS, NODE_BLOCKS, NODE_CAPACITY, PAGE_OVERHEAD,
    Pointer, Run, TreeId,
};
use super::node::MAX_LEVEL;
use crate::error::{Error, Result};

/// Bytes of the prologue's plaintext.
pub const PROLOGUE: usize = 48;
/// Bytes of an encoded pointer.
pub const POINTER: usize = 32;

/// Bytes of a data body before the cell lengths.
const BODY_HEAD: usize = 8;
/// Bytes of an encoded packed item.
const ITEM: usize = 24;
/// Cells of one data page, at most: the longest data in the smallest cells.
const MAX_CELLS: usize = MAX_DATA / BLOCK as usize;
/// Items of one packed page, at most.
const MAX_ITEMS: usize = 4096;
/// In a cell's stored length: the cell is not compressed.
const RAW_BIT: u32 = 1 << 31;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageKind {
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

/// The sealed description at the head of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prologue {
    pub kind: PageKind,
    /// The whole body is one zstd frame (nodes only).
    pub compressed: bool,
    pub blocks: u16,
    pub stored_length: u32,
    pub plain_length: u32,
    pub generation: Generation,
    /// Tree number of a node, inode of a data page, else 0.
    pub owner: u64,
    /// Level of a node, file offset of a data page, else 0.
    pub position: u64,
}

impl Prologue {
    pub fn encode(&self) -> [u8; PROLOGUE] {
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
    /// `Damaged` for an unknown kind, lengths beyond the page, compression of a kind that has none.
    pub fn decode(bytes: &[u8; PROLOGUE]) -> Result<Prologue> {
        zero(&bytes[12..16], "prologue")?;
        zero(&bytes[40..48], "prologue")?;
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

    /// The relations between the fields that section 5.1 demands.
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
                PageKind::Data | PageKind::Packed => (1..=MAX_DATA).contains(&plain),
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
    pub fn encode(&self) -> [u8; POINTER] {
        let mut out = [0; POINTER];
        put(&mut out, 0, self.run.pack().to_le_bytes());
        put(&mut out, 8, self.generation.0.to_le_bytes());
        put(&mut out, 16, self.tag);
        out
    }

    /// # Errors
    /// `Damaged` for a page of more than 64 blocks, or a null pointer that is not zero throughout.
    #[inline]
    pub fn decode(bytes: &[u8; POINTER]) -> Result<Pointer> {
        let run = Run::unpack(u64_at(bytes, 0));
        if run.blocks == 0 {
            zero(bytes, "null pointer")?;
            return Ok(Pointer::NULL);
        }
        if run.blocks > MAX_PAGE_BLOCKS {
            return Err(Error::damaged(format!("pointer to a page that is too long: blocks={}", run.blocks)));
        }
        Ok(Pointer { run, generation: Generation(u64_at(bytes, 8)), tag: array_at(bytes, 16) })
    }
}

/// One small file's part of a packed page, for `rescue`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedItem {
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

/// Where the cells of a data body lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellTable {
    pub cell_size: u32,
    pub plain_length: u32,
    pub cells: Vec<Cell>,
    pub items: Vec<PackedItem>,
}

/// One independently compressed piece of a data page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Stored bytes within the body.
    pub stored: Range<usize>,
    pub raw: bool,
    pub plain_length: u32,
}

/// Assembles a data body from already compressed cells.
/// `cells` holds (bytes, raw); the plain lengths follow from `cell_log2` and `plain_length`.
pub fn encode_data_body(cell_log2: u8, cells: &[(&[u8], bool)], items: &[PackedItem]) -> Vec<u8> {
    debug_assert!((1..=MAX_CELLS).contains(&cells.len()) && items.len() <= MAX_ITEMS && (12..=17).contains(&cell_log2));
    let stored: usize = cells.iter().map(|(bytes, _)| bytes.len()).sum();
    let mut out = Vec::with_capacity(BODY_HEAD + 4 * cells.len() + ITEM * items.len() + stored);
    out.extend_from_slice(&(cells.len() as u16).to_le_bytes());
    out.extend_from_slice(&[cell_log2, 0]);
    out.extend_from_slice(&(items.len() as u16).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    for &(bytes, raw) in cells {
        let flag = if raw { RAW_BIT } else { 0 };
        out.extend_from_slice(&(bytes.len() as u32 | flag).to_le_bytes());
    }
    for item in items {
        out.extend_from_slice(&item.ino.0.to_le_bytes());
        out.extend_from_slice(&item.offset.to_le_bytes());
        out.extend_from_slice(&item.start.to_le_bytes());
        out.extend_from_slice(&item.length.to_le_bytes());
    }
    for (bytes, _) in cells {
        out.extend_from_slice(bytes);
    }
    out
}

/// Decodes the head of a data body (without its padding) of `plain_length` file bytes.
///
/// # Errors
/// `Damaged` when counts, lengths or items do not fit; nothing is allocated beyond the counts' bounds (32 cells, 4,096 items).
pub fn decode_cell_table(body: &[u8], plain_length: u32) -> Result<CellTable> {
    let Some((head, rest)) = body.split_first_chunk::<BODY_HEAD>() else {
        return Err(Error::damaged("data body ends early"));
    };
    let (cell_count, log2, item_count) = (usize::from(u16_at(head, 0)), head[2], usize::from(u16_at(head, 4)));
    zero(&[head[3], head[6], head[7]], "data body")?;
    if !(12..=17).contains(&log2) {
        return Err(Error::damaged(format!("data body has a wrong cell size: log2={log2}")));
    }
    let cell_size = 1u32 << log2;
    if plain_length == 0
        || plain_length as usize > MAX_DATA
        || cell_count > MAX_CELLS
        || cell_count != plain_length.div_ceil(cell_size) as usize
    {
        return Err(Error::damaged(format!(
            "data body has a wrong number of cells: cells={cell_count} plain={plain_length}"
        )));
    }
    if item_count > MAX_ITEMS {
        return Err(Error::damaged(format!("data body has too many items: {item_count}")));
    }
    let Some((lengths, rest)) = rest.split_at_checked(4 * cell_count) else {
        return Err(Error::damaged("data body ends early"));
    };
    let Some((items, cells)) = rest.split_at_checked(ITEM * item_count) else {
        return Err(Error::damaged("data body ends early"));
    };
    let first = body.len() - cells.len();
    Ok(CellTable {
        cell_size,
        plain_length,
        cells: decode_cells(lengths, first, body.len(), cell_size, plain_length)?,
        items: decode_items(items, plain_length)?,
    })
}

/// Lays out the cells from offset `at`; they must end exactly at `end`.
fn decode_cells(lengths: &[u8], mut at: usize, end: usize, cell_size: u32, mut left: u32) -> Result<Vec<Cell>> {
    let mut cells = Vec::with_capacity(lengths.len() / 4);
    for field in lengths.chunks_exact(4) {
        let field = u32_at(field, 0);
        let (raw, stored) = (field & RAW_BIT != 0, (field & !RAW_BIT) as usize);
        let plain_length = left.min(cell_size);
        let length_fits = if raw { stored == plain_length as usize } else { stored > 0 };
        if !length_fits || stored > end - at {
            return Err(Error::damaged(format!("cell has a wrong length: stored={stored} plain={plain_length}")));
        }
        cells.push(Cell { stored: at..at + stored, raw, plain_length });
        at += stored;
        left -= plain_length;
    }
    if at != end {
        return Err(Error::damaged("data body is too long"));
    }
    Ok(cells)
}

fn decode_items(bytes: &[u8], plain_length: u32) -> Result<Vec<PackedItem>> {
    let items: Vec<PackedItem> = bytes.chunks_exact(ITEM).map(PackedItem::decode).collect();
    if let Some(item) = items.iter().find(|item| !item.fits(plain_length)) {
        return Err(Error::damaged(format!(
            "packed item does not fit: inode={} start={} length={}",
            item.ino.0, item.start, item.length
        )));
    }
    // `fits` bounded the sums. Writers lay items out in order, so the sort is for damage and strange writers only.
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

#[cfg(test)]
mod tests;
