//! Head of a data page: location and tag of its cells (specification 5.3).

use super::ids::{BLOCK, Ino, MAX_DATA, MAX_INO, MAX_OFFSET, Tag};
use super::{array_at, check_zero, u16_at, u32_at, u64_at};
use crate::error::{Error, Result};

/// Bytes of a head before its cell entries.
const FIXED: usize = 8;
/// Length of a cell's entry in bytes: stored length and tag.
const ENTRY: usize = 20;
/// Length of an encoded packed item in bytes.
const ITEM: usize = 24;
/// Maximum number of cells of a data page: the longest data in the smallest cells.
pub const MAX_CELLS: usize = MAX_DATA / BLOCK as usize;
/// Maximum number of items of a packed page.
const MAX_ITEMS: usize = 4096;
/// Flag in a cell's stored length: the cell is not compressed.
const RAW_BIT: u32 = 1 << 31;

/// Returns the minimum length of a head in bytes; it is longer where the page must be filled.
pub const fn head_length(cells: usize, items: usize) -> usize {
    FIXED + ENTRY * cells + ITEM * items
}

/// Part of a packed page that belongs to one small file, for `rescue`.
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

/// Decoded head of a data page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CellTable {
    pub cell_size: u32,
    pub plain_length: u32,
    pub cells: Vec<Cell>,
    pub items: Vec<PackedItem>,
}

/// Independently compressed and sealed piece of a data page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    /// Offset of the stored bytes from the first cell.
    pub at: u32,
    pub stored: u32,
    pub plain_length: u32,
    pub raw: bool,
    pub tag: Tag,
}

/// Encodes a head of `length` bytes, zero-padded, for `cells` of (stored length, raw, tag).
///
/// # Panics
/// When `length` is below [`head_length`].
pub fn encode_head(cell_log2: u8, cells: &[(u32, bool, Tag)], items: &[PackedItem], length: usize) -> Vec<u8> {
    debug_assert!((1..=MAX_CELLS).contains(&cells.len()) && items.len() <= MAX_ITEMS && (12..=17).contains(&cell_log2));
    assert!(head_length(cells.len(), items.len()) <= length, "a head of {length} bytes is too short");
    let mut out = Vec::with_capacity(length);
    out.extend_from_slice(&(cells.len() as u16).to_le_bytes());
    out.extend_from_slice(&[cell_log2, 0]);
    out.extend_from_slice(&(items.len() as u16).to_le_bytes());
    out.extend_from_slice(&[0; 2]);
    for (stored, raw, tag) in cells {
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
/// limits (32 cells, 4,096 items).
pub fn decode_cell_table(head: &[u8], stored_length: u32, plain_length: u32) -> Result<CellTable> {
    let Some((fixed, rest)) = head.split_first_chunk::<FIXED>() else {
        return Err(Error::damaged("data head ends early"));
    };
    let (cell_count, log2, item_count) = (usize::from(u16_at(fixed, 0)), fixed[2], usize::from(u16_at(fixed, 4)));
    check_zero(&[fixed[3], fixed[6], fixed[7]], "data head")?;
    if !(12..=17).contains(&log2) {
        return Err(Error::damaged(format!("data head has a wrong cell size: log2={log2}")));
    }
    let cell_size = 1u32 << log2;
    if plain_length == 0
        || plain_length as usize > MAX_DATA
        || cell_count > MAX_CELLS
        || cell_count != plain_length.div_ceil(cell_size) as usize
    {
        return Err(Error::damaged(format!(
            "data head has a wrong number of cells: cells={cell_count} plain={plain_length}"
        )));
    }
    if item_count > MAX_ITEMS {
        return Err(Error::damaged(format!("data head has too many items: {item_count}")));
    }
    let Some((entries, rest)) = rest.split_at_checked(ENTRY * cell_count) else {
        return Err(Error::damaged("data head ends early"));
    };
    let Some((items, padding)) = rest.split_at_checked(ITEM * item_count) else {
        return Err(Error::damaged("data head ends early"));
    };
    check_zero(padding, "data head")?;
    Ok(CellTable {
        cell_size,
        plain_length,
        cells: decode_cells(entries, stored_length, cell_size, plain_length)?,
        items: decode_items(items, plain_length)?,
    })
}

/// Computes the offsets of the cells, which must fill exactly `stored_length`.
fn decode_cells(entries: &[u8], stored_length: u32, cell_size: u32, mut remaining: u32) -> Result<Vec<Cell>> {
    let mut cells = Vec::with_capacity(entries.len() / ENTRY);
    let mut at = 0;
    for entry in entries.chunks_exact(ENTRY) {
        let field = u32_at(entry, 0);
        let (raw, stored) = (field & RAW_BIT != 0, field & !RAW_BIT);
        let plain_length = remaining.min(cell_size);
        let length_fits = if raw { stored == plain_length } else { stored > 0 };
        if !length_fits || stored > stored_length - at {
            return Err(Error::damaged(format!("cell has a wrong length: stored={stored} plain={plain_length}")));
        }
        cells.push(Cell { at, stored, plain_length, raw, tag: array_at(entry, 4) });
        at += stored;
        remaining -= plain_length;
    }
    if at != stored_length {
        return Err(Error::damaged(format!("cells take another length than their page says: {at} {stored_length}")));
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

#[cfg(test)]
mod tests;
