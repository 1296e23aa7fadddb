//! Seals and writes pages of file data ahead of the operation that names them.

use std::sync::Arc;

use super::allocator::{Allocator, Reservation};
use super::state::Versions;
use super::unnamed::{UnnamedPages, WrittenPiece};
use crate::error::{Error, Result};
use crate::format::data_head::PackedItem;
use crate::format::{BLOCK, Ino, Pointer, Run};
use crate::frame::{self, PlainPage, QUAD_DATA};
use crate::pager::Pager;

/// Room asked for beyond a framed page when free space is in fragments: 1 MiB, what a file grows by at least.
const MORE: u64 = 1 << 20;
/// So often, which is more than a file's growth can be in fragments.
const ATTEMPTS: usize = 32;

pub(super) struct PageWriter<'a> {
    pub(super) allocator: &'a Arc<Allocator>,
    pub(super) versions: &'a Versions,
    pub(super) pager: &'a Pager,
}

impl PageWriter<'_> {
    fn seal_and_write(&self, page: &PlainPage<'_>, run: Run) -> Result<Pointer> {
        let generation = self.versions.open_generation();
        let written = self.pager.seal(page, run, generation).and_then(|sealed| {
            self.pager.write_page(&sealed)?;
            Ok(sealed.pointer)
        });
        if written.is_err() {
            self.allocator.discard_unseen(vec![run]);
        }
        let pointer = written?;
        self.pager.bound_unsynced(run.bytes())?;
        Ok(pointer)
    }

    /// Seals and writes `data` (1..=128 KiB) at `offset` of `ino`, outside of any operation. More than one piece comes back only when free space is in
    /// fragments.
    pub(super) fn write_data(
        &self,
        reservation: &mut Reservation,
        ino: Ino,
        offset: u64,
        data: &[u8],
        compress: bool,
    ) -> Result<UnnamedPages> {
        let mut pages = UnnamedPages::none(self.allocator);
        let page = frame::data_page(ino.0, offset, data, compress);
        if let Some(run) = reservation.allocate(page.blocks())? {
            let page = self.seal_and_write(&page, run)?;
            pages.push(WrittenPiece { ino, offset, length: data.len() as u32, page, start: 0 });
            return Ok(pages);
        }
        for (index, part) in data.chunks(QUAD_DATA).enumerate() {
            let offset = offset + (index * QUAD_DATA) as u64;
            let page = frame::data_page(ino.0, offset, part, compress);
            let run = reservation.allocate(page.blocks())?;
            let run = run.ok_or_else(|| Error::NoSpace("blocks kept for data are not there".into()))?;
            let page = self.seal_and_write(&page, run)?;
            pages.push(WrittenPiece { ino, offset, length: part.len() as u32, page, start: 0 });
        }
        Ok(pages)
    }

    /// Packs small files (or parts of them: inode, offset, bytes) into one shared page; at most 128 KiB in all, 256 files. One alone gets a page of
    /// its own.
    pub(super) fn write_packed(
        &self,
        reservation: &mut Reservation,
        files: &[(Ino, u64, &[u8])],
        compress: bool,
    ) -> Result<UnnamedPages> {
        if let [(ino, offset, data)] = *files {
            return self.write_data(reservation, ino, offset, data, compress);
        }
        let mut data = Vec::with_capacity(files.iter().map(|(_, _, bytes)| bytes.len()).sum());
        let mut items = Vec::with_capacity(files.len());
        for (ino, offset, bytes) in files {
            items.push(PackedItem { ino: *ino, offset: *offset, start: data.len() as u32, length: bytes.len() as u32 });
            data.extend_from_slice(bytes);
        }
        let mut pages = UnnamedPages::none(self.allocator);
        let page = frame::packed_page(&data, &items, compress);
        if let Some(run) = reservation.allocate(page.blocks())? {
            let page = self.seal_and_write(&page, run)?;
            for PackedItem { ino, offset, start, length } in items {
                pages.push(WrittenPiece { ino, offset, length, page, start });
            }
            return Ok(pages);
        }
        for (ino, offset, bytes) in files {
            pages.absorb(self.write_data(reservation, *ino, *offset, bytes, compress)?);
        }
        Ok(pages)
    }

    /// Seals and writes a framed page of file data; the caller names it in an operation (`adopt`).
    ///
    /// `reserve` promises bytes of whole groups.
    pub(super) fn write_framed(
        &self,
        page: &PlainPage<'_>,
        reserve: impl Fn(u64) -> Result<Reservation>,
    ) -> Result<Pointer> {
        let mut promised = reserve(page.blocks() * BLOCK)?;
        // Held together, or the same fragments would be promised again and again.
        let mut more: Vec<Reservation> = Vec::new();
        for _ in 0..ATTEMPTS {
            if let Some(run) = promised.allocate(page.blocks())? {
                return self.seal_and_write(page, run);
            }
            more.push(reserve(MORE)?);
        }
        Err(Error::NoSpace("the free space of the new file is in fragments".into()))
    }
}
