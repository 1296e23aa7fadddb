//! Seals frames into pages and opens pages into frames: cells compressed, prologue and body bound to their place.

use std::sync::Arc;

use crate::crypto::SecretKey;
use crate::crypto::aead::XaesKey;
use crate::env::Environment;
use crate::error::Result;
use crate::format::page::{CellTable, PackedItem, PageKind, Prologue};
use crate::format::{ArchiveId, Generation, Pointer, Run, Tag};

/// log2 of the cell size; decided by measurement (bench/README.md).
pub(crate) const CELL_LOG2: u8 = 15;

/// Seals and opens the pages and commit records of one archive.
pub(crate) struct PageCipher {
    pages: XaesKey,
    records: XaesKey,
    archive: ArchiveId,
    environment: Arc<dyn Environment>,
}

/// A frame before sealing: its body without padding and what the prologue will say of it.
pub(crate) struct PlainPage {
    pub kind: PageKind,
    pub compressed: bool,
    pub plain_length: u32,
    pub owner: u64,
    pub position: u64,
    pub body: Vec<u8>,
}

impl PlainPage {
    /// Blocks that the sealed page takes.
    pub(crate) fn blocks(&self) -> u64 {
        todo!()
    }
}

/// A page ready to be written at `run`.
pub(crate) struct SealedPage {
    pub pointer: Pointer,
    pub bytes: Vec<u8>,
}

/// An opened and authenticated page; `body` is without padding and, for nodes, decompressed.
pub(crate) struct OpenedPage {
    pub prologue: Prologue,
    pub body: Vec<u8>,
}

/// A node's page: raw, or one zstd frame when that saves a block.
pub(crate) fn node_page(tree: u8, level: u8, encoded: Vec<u8>) -> PlainPage {
    let _ = (tree, level, encoded);
    todo!()
}

/// A data page of `data` (1..=128 KiB) at `offset` of inode `ino`, compressed cell by cell when `compress` and a probe says that it pays
/// (at least one block is saved).
pub(crate) fn data_page(ino: u64, offset: u64, data: &[u8], compress: bool) -> PlainPage {
    let _ = (ino, offset, data, compress);
    todo!()
}

/// A packed page; `items` name the parts of `data`.
pub(crate) fn packed_page(data: &[u8], items: &[PackedItem], compress: bool) -> PlainPage {
    let _ = (data, items, compress);
    todo!()
}

/// A delta list page.
pub(crate) fn delta_page(encoded: Vec<u8>) -> PlainPage {
    let _ = encoded;
    todo!()
}

/// Upper bound of the blocks of a data page of `length` plain bytes, stored raw.
pub(crate) fn worst_case_blocks(length: usize) -> u64 {
    let _ = length;
    todo!()
}

/// Decompresses one cell of an opened data body.
pub(crate) fn read_cell(body: &[u8], table: &CellTable, cell: usize) -> Result<Vec<u8>> {
    let _ = (body, table, cell);
    todo!()
}

impl PageCipher {
    /// `volume_key` is only used to derive the page and commit keys.
    pub(crate) fn new(volume_key: &SecretKey, archive: ArchiveId, environment: Arc<dyn Environment>) -> PageCipher {
        let _ = (volume_key, archive, environment);
        todo!()
    }

    /// Seals `page` for the blocks `run` (exactly `page.blocks()` long) under a fresh random nonce.
    ///
    /// # Errors
    /// `Io` when there is no randomness.
    pub(crate) fn seal(&self, page: &PlainPage, run: Run, generation: Generation) -> Result<SealedPage> {
        let _ = (page, run, generation);
        todo!()
    }

    /// Opens a whole page read from `pointer.run` and checks it against the pointer.
    ///
    /// # Errors
    /// `Damaged("page failed authentication: block=.. generation=..")`, or naming the field that differs from the pointer.
    pub(crate) fn open(&self, pointer: &Pointer, bytes: Vec<u8>) -> Result<OpenedPage> {
        let _ = (pointer, bytes);
        todo!()
    }

    /// Opens only the prologue of a page that may start at `address`; for scanners. `first_block` has at least 88 bytes.
    pub(crate) fn open_prologue(&self, address: u64, first_block: &[u8]) -> Result<Prologue> {
        let _ = (address, first_block);
        todo!()
    }

    /// Seals a record's 4,056 plain bytes for ring slot `slot`; returns the 4,096 bytes and the tag.
    pub(crate) fn seal_record(&self, slot: u64, plain: Vec<u8>) -> Result<(Vec<u8>, Tag)> {
        let _ = (slot, plain);
        todo!()
    }

    /// Opens the content of ring slot `slot`; None when it is not authentic (random, torn, of another place).
    pub(crate) fn open_record(&self, slot: u64, bytes: &[u8]) -> Option<(Vec<u8>, Tag)> {
        let _ = (slot, bytes);
        todo!()
    }
}
