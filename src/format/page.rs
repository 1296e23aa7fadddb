//! Specification section 5: prologue, pointer, and the body of data pages.

use std::ops::Range;

use super::ids::{Generation, Ino, Pointer};
use crate::error::Result;

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
        todo!()
    }

    /// # Errors
    /// `Damaged` for an unknown kind, lengths beyond the page, compression of a kind that has none.
    pub fn decode(bytes: &[u8; PROLOGUE]) -> Result<Prologue> {
        let _ = bytes;
        todo!()
    }
}

impl Pointer {
    pub fn encode(&self) -> [u8; POINTER] {
        todo!()
    }

    pub fn decode(bytes: &[u8; POINTER]) -> Result<Pointer> {
        let _ = bytes;
        todo!()
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
    let _ = (cell_log2, cells, items);
    todo!()
}

/// Decodes the head of a data body (without its padding) of `plain_length` file bytes.
///
/// # Errors
/// `Damaged` when counts, lengths or items do not fit; nothing is allocated beyond the counts' bounds (64 cells, 4,096 items).
pub fn decode_cell_table(body: &[u8], plain_length: u32) -> Result<CellTable> {
    let _ = (body, plain_length);
    todo!()
}
