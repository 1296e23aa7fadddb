//! Pages by pointer: reads through a bounded frame cache, write-once pages, the commit ring, barriers, the latch and the space map.

mod cells;
mod latch;
mod ring;
pub(crate) mod space;

use std::sync::Arc;

pub(crate) use latch::Latch;
pub(crate) use ring::AuthenticRecord;

use crate::error::Result;
use crate::format::page::PageKind;
use crate::format::{Generation, Pointer, Run};
use crate::frame::{OpenedPage, PageCipher, PlainPage, SealedPage};
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
        let _ = (storage, cipher, cache_bytes);
        todo!()
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    pub(crate) fn latch(&self) -> &Latch {
        &self.latch
    }

    /// Reads, opens and checks one page of the kind that the caller expects.
    pub(crate) fn read_page(&self, pointer: &Pointer, kind: PageKind) -> Result<OpenedPage> {
        let _ = (pointer, kind);
        todo!()
    }

    /// Copies plain file bytes `start..start + out.len()` of a data or packed page, decompressing only the cells they touch.
    pub(crate) fn read_data(&self, pointer: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        let _ = (pointer, start, out);
        todo!()
    }

    /// Seals `page` for `run`.
    pub(crate) fn seal(&self, page: &PlainPage, run: Run, generation: Generation) -> Result<SealedPage> {
        self.cipher.seal(page, run, generation)
    }

    /// Writes a sealed page to its (reserved) blocks; a failure latches.
    pub(crate) fn write_page(&self, page: &SealedPage) -> Result<()> {
        let _ = page;
        todo!()
    }
}
