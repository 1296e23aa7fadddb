//! Specification section 5: prologue, pointer, and the body of data pages.

use std::ops::Range;

use super::ids::{BLOCK, Generation, Ino, MAX_DATA, MAX_PAGE_BLOCKS, NODE_CAPACITY, PAGE_OVERHEAD, Pointer, Run};
use super::reader::Reader;
use crate::error::{Error, Result};

/// Cells of a data page at most.
const MAX_CELLS: usize = 64;
/// Items of a packed page at most.
const MAX_ITEMS: usize = 4096;
/// Stored length bit of a raw cell.
const RAW_CELL: u32 = 1 << 31;

/// Bytes of the prologue's plaintext.
pub const PROLOGUE: usize = 48;
/// Bytes of an encoded pointer.
pub const POINTER: usize = 32;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageKind {
    Node = 1,
    Data = 2,
    Packed = 3,
    DeltaList = 4,
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
        out[2..4].copy_from_slice(&self.blocks.to_le_bytes());
        out[4..8].copy_from_slice(&self.stored_length.to_le_bytes());
        out[8..12].copy_from_slice(&self.plain_length.to_le_bytes());
        out[16..24].copy_from_slice(&self.generation.0.to_le_bytes());
        out[24..32].copy_from_slice(&self.owner.to_le_bytes());
        out[32..40].copy_from_slice(&self.position.to_le_bytes());
        out
    }

    /// # Errors
    /// `Damaged` for an unknown kind, lengths beyond the page, compression of a kind that has none.
    pub fn decode(bytes: &[u8; PROLOGUE]) -> Result<Prologue> {
        let mut reader = Reader::new(bytes, "page prologue");
        let kind = match reader.u8()? {
            1 => PageKind::Node,
            2 => PageKind::Data,
            3 => PageKind::Packed,
            4 => PageKind::DeltaList,
            other => return Err(Error::damaged(format!("unknown page kind {other}"))),
        };
        let compressed = match reader.u8()? {
            0 => false,
            1 if kind == PageKind::Node => true,
            other => return Err(Error::damaged(format!("unknown page compression {other}"))),
        };
        let (blocks, stored_length, plain_length) = (reader.u16()?, reader.u32()?, reader.u32()?);
        reader.zero(4)?;
        let (generation, owner, position) = (Generation(reader.u64()?), reader.u64()?, reader.u64()?);
        reader.zero(8)?;
        let capacity = u64::from(blocks) * BLOCK - PAGE_OVERHEAD.min(usize::from(blocks) * BLOCK as usize) as u64;
        let bound = match kind {
            PageKind::Node => NODE_CAPACITY as u64,
            PageKind::Data | PageKind::Packed => MAX_DATA as u64,
            PageKind::DeltaList => capacity,
        };
        if blocks == 0
            || u64::from(blocks) > MAX_PAGE_BLOCKS
            || u64::from(stored_length) > capacity
            || u64::from(plain_length) > bound
            || (kind == PageKind::Node && !compressed && stored_length != plain_length)
        {
            return Err(Error::damaged("page prologue has impossible lengths"));
        }
        Ok(Prologue { kind, compressed, blocks, stored_length, plain_length, generation, owner, position })
    }
}

impl Pointer {
    pub fn encode(&self) -> [u8; POINTER] {
        let mut out = [0; POINTER];
        out[..8].copy_from_slice(&self.run.pack().to_le_bytes());
        out[8..16].copy_from_slice(&self.generation.0.to_le_bytes());
        out[16..].copy_from_slice(&self.tag);
        out
    }

    pub fn decode(bytes: &[u8; POINTER]) -> Result<Pointer> {
        let mut reader = Reader::new(bytes, "pointer");
        let pointer =
            Pointer { run: Run::unpack(reader.u64()?), generation: Generation(reader.u64()?), tag: reader.array()? };
        if pointer.run.blocks > MAX_PAGE_BLOCKS || (pointer.is_null() && pointer != Pointer::NULL) {
            return Err(Error::damaged("impossible pointer"));
        }
        Ok(pointer)
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
    let stored: usize = cells.iter().map(|(bytes, _)| bytes.len()).sum();
    let mut out = Vec::with_capacity(8 + 4 * cells.len() + 24 * items.len() + stored);
    out.extend_from_slice(&(cells.len() as u16).to_le_bytes());
    out.extend_from_slice(&[cell_log2, 0]);
    out.extend_from_slice(&(items.len() as u16).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    for (bytes, raw) in cells {
        let length = bytes.len() as u32 | if *raw { RAW_CELL } else { 0 };
        out.extend_from_slice(&length.to_le_bytes());
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
/// `Damaged` when counts, lengths or items do not fit; nothing is allocated beyond the counts' bounds (64 cells, 4,096 items).
pub fn decode_cell_table(body: &[u8], plain_length: u32) -> Result<CellTable> {
    let mut reader = Reader::new(body, "data page");
    let (count, log2) = (usize::from(reader.u16()?), reader.u8()?);
    reader.zero(1)?;
    let item_count = usize::from(reader.u16()?);
    reader.zero(2)?;
    if !(12..=17).contains(&log2) || count > MAX_CELLS || item_count > MAX_ITEMS {
        return Err(Error::damaged("data page has impossible counts"));
    }
    let cell_size = 1u32 << log2;
    if plain_length == 0 || plain_length as usize > MAX_DATA || count != plain_length.div_ceil(cell_size) as usize {
        return Err(Error::damaged("data page has a wrong number of cells"));
    }
    let mut at = 8 + 4 * count + 24 * item_count;
    let mut cells = Vec::with_capacity(count);
    for index in 0..count {
        let word = reader.u32()?;
        let (stored, raw) = ((word & !RAW_CELL) as usize, word & RAW_CELL != 0);
        let cell_plain = (plain_length - index as u32 * cell_size).min(cell_size);
        let end = at.saturating_add(stored);
        if end > body.len() || stored == 0 || (raw && stored != cell_plain as usize) {
            return Err(Error::damaged("data page has a cell of impossible length"));
        }
        cells.push(Cell { stored: at..end, raw, plain_length: cell_plain });
        at = end;
    }
    if at != body.len() {
        return Err(Error::damaged("data page has bytes behind its cells"));
    }
    let mut items = Vec::with_capacity(item_count);
    for _ in 0..item_count {
        let item =
            PackedItem { ino: Ino(reader.u64()?), offset: reader.u64()?, start: reader.u32()?, length: reader.u32()? };
        if u64::from(item.start) + u64::from(item.length) > u64::from(plain_length) {
            return Err(Error::damaged("data page has an item behind its data"));
        }
        items.push(item);
    }
    Ok(CellTable { cell_size, plain_length, cells, items })
}
