//! Pages by pointer: reads through a bounded frame cache, write-once pages, the commit ring, barriers, the latch and the space map.

mod cells;
mod latch;
mod ring;
pub(crate) mod space;

use std::sync::Arc;

pub(crate) use latch::Latch;
pub(crate) use ring::AuthenticRecord;

use crate::error::{Error, Result};
use crate::format::page::{self, PageKind};
use crate::format::{BLOCK, Generation, Pointer, Run};
use crate::frame::{self, OpenedPage, PageCipher, PlainPage, SealedPage};
use crate::storage::Storage;

/// Reads and writes the pages of one open archive.
pub(crate) struct Pager {
    storage: Arc<dyn Storage>,
    cipher: PageCipher,
    cells: cells::CellCache,
    latch: Latch,
}

impl Pager {
    /// `cache_bytes` bounds the decompressed file data kept in memory.
    pub(crate) fn new(storage: Arc<dyn Storage>, cipher: PageCipher, cache_bytes: usize) -> Pager {
        Pager { storage, cipher, cells: cells::CellCache::new(cache_bytes), latch: Latch::default() }
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    pub(crate) fn cipher(&self) -> &PageCipher {
        &self.cipher
    }

    pub(crate) fn latch(&self) -> &Latch {
        &self.latch
    }

    /// Reads, opens and checks one page of the kind that the caller expects.
    pub(crate) fn read_page(&self, pointer: &Pointer, kind: PageKind) -> Result<OpenedPage> {
        let opened = self.open_page(pointer)?;
        if opened.prologue.kind != kind {
            return Err(wrong_kind(pointer));
        }
        Ok(opened)
    }

    /// Reads and opens a page of any kind.
    pub(crate) fn open_page(&self, pointer: &Pointer) -> Result<OpenedPage> {
        // Only a hostile holder of the key can have sealed a pointer into header or ring; behind the end of a truncated file lies damage.
        if !pointer.run.is_page_space(u64::MAX) {
            return Err(Error::damaged(format!("page lies in header or ring: block={}", pointer.run.address)));
        }
        let mut bytes = vec![0; (pointer.run.blocks * BLOCK) as usize];
        self.storage.read_at(pointer.run.offset(), &mut bytes)?;
        self.cipher.open(pointer, bytes)
    }

    /// Copies plain file bytes `start..start + out.len()` of a data or packed page, decompressing only the cells they touch.
    pub(crate) fn read_data(&self, pointer: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        let cell_size = 1usize << frame::CELL_LOG2;
        let mut opened = None;
        let mut at = start as usize;
        let end = at + out.len();
        while at < end {
            let cell = (at / cell_size) as u32;
            let within = at % cell_size;
            let count = (cell_size - within).min(end - at);
            let target = &mut out[at - start as usize..][..count];
            if let Some(plain) = self.cells.get(pointer, cell) {
                copy_part(pointer, &plain, within, target)?;
            } else {
                if opened.is_none() {
                    opened = Some(self.open_data(pointer)?);
                }
                let Some((opened_page, table)) = &opened else { continue };
                if table.cell_size as usize != cell_size {
                    // Written with another cell size: right, only not cached.
                    return read_uncached(pointer, opened_page, table, start as usize, out);
                }
                if cell as usize >= table.cells.len() {
                    return Err(beyond_page(pointer));
                }
                let plain: Arc<[u8]> = frame::read_cell(opened_page.body(), table, cell as usize)?.into();
                copy_part(pointer, &plain, within, target)?;
                self.cells.put(pointer, cell, plain);
            }
            at += count;
        }
        Ok(())
    }

    fn open_data(&self, pointer: &Pointer) -> Result<(OpenedPage, page::CellTable)> {
        let opened = self.open_page(pointer)?;
        if !matches!(opened.prologue.kind, PageKind::Data | PageKind::Packed) {
            return Err(wrong_kind(pointer));
        }
        let table = page::decode_cell_table(opened.body(), opened.prologue.plain_length)?;
        if (opened.prologue.kind == PageKind::Packed) == table.items.is_empty() {
            return Err(Error::damaged(format!("page has items of another kind: block={}", pointer.run.address)));
        }
        Ok((opened, table))
    }

    /// Seals `page` for `run`.
    pub(crate) fn seal(&self, page: &PlainPage, run: Run, generation: Generation) -> Result<SealedPage> {
        self.cipher.seal(page, run, generation)
    }

    /// Writes a sealed page to its (reserved) blocks; a failure latches.
    pub(crate) fn write_page(&self, page: &SealedPage) -> Result<()> {
        self.latch.check()?;
        self.storage.write_at(page.pointer.run.offset(), &page.bytes).map_err(|e| self.latch.set("writing a page", &e))
    }

    /// Waits until everything written before is on the medium; a failure latches.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.latch.check()?;
        self.storage.barrier().map_err(|e| self.latch.set("making writes durable", &e))
    }
}

fn wrong_kind(pointer: &Pointer) -> Error {
    Error::damaged(format!("page of another kind: block={} generation={}", pointer.run.address, pointer.generation.0))
}

fn beyond_page(pointer: &Pointer) -> Error {
    Error::damaged(format!(
        "extent reaches beyond its page: block={} generation={}",
        pointer.run.address, pointer.generation.0
    ))
}

fn copy_part(pointer: &Pointer, plain: &[u8], within: usize, out: &mut [u8]) -> Result<()> {
    match plain.get(within..within + out.len()) {
        Some(part) => {
            out.copy_from_slice(part);
            Ok(())
        }
        None => Err(beyond_page(pointer)),
    }
}

fn read_uncached(
    pointer: &Pointer,
    opened: &OpenedPage,
    table: &page::CellTable,
    start: usize,
    out: &mut [u8],
) -> Result<()> {
    let cell_size = table.cell_size as usize;
    let mut done = 0;
    while done < out.len() {
        let at = start + done;
        let cell = at / cell_size;
        if cell >= table.cells.len() {
            return Err(beyond_page(pointer));
        }
        let plain = frame::read_cell(opened.body(), table, cell)?;
        let count = (cell_size - at % cell_size).min(out.len() - done);
        copy_part(pointer, &plain, at % cell_size, &mut out[done..done + count])?;
        done += count;
    }
    Ok(())
}
