//! Reads pages of file data, and writes them ahead of the operation that names them.

use super::Volume;
use crate::error::{Error, Result};
use crate::format::data_head::PackedItem;
use crate::format::{BLOCK, Ino, Pointer, Run};
use crate::frame::{self, GROUP_DATA, OpenedPage, PlainPage};
use crate::txn::allocator::Reservation;
use crate::txn::unreferenced_pages::{UnreferencedPages, WrittenPiece};

/// Bytes requested in addition to a framed page when free space is fragmented: 1 MiB, the least by
/// which a file grows.
const MORE: u64 = 1 << 20;
/// So often, which is more than a file's growth can be in fragments.
const ATTEMPTS: usize = 32;

impl Volume {
    /// Fills `out` with the plain bytes of file data from `start` of a page; see
    /// [`Pager::read_data`].
    pub(crate) fn read_data(&self, page: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        self.medium.pager.read_data(page, start, out)
    }

    /// Prefetches the parts of pages that [`Self::read_data`] will read.
    pub(crate) fn prefetch_data<'a>(&self, parts: impl Iterator<Item = (&'a Pointer, u32, u32)>) {
        self.medium.pager.prefetch_data(parts);
    }

    /// Prefetches pages; see [`crate::pager::Pager::prefetch_pages`].
    pub(crate) fn prefetch_pages<'a>(&self, pages: impl Iterator<Item = &'a Pointer>) {
        self.medium.pager.prefetch_pages(pages);
    }

    /// Returns whether the archive is remote.
    pub(crate) fn is_remote(&self) -> bool {
        self.medium.pager.is_remote()
    }

    /// Returns the durable bytes that other readers cannot find yet, see
    /// [`crate::storage::Storage::pending_upload_bytes`].
    pub(crate) fn pending_upload_bytes(&self) -> Result<u64> {
        self.medium.pager.storage().pending_upload_bytes()
    }

    /// Returns the files whose parts lie in a packed page; None for a page of another kind.
    pub(crate) fn packed_items(&self, page: &Pointer) -> Result<Option<Vec<PackedItem>>> {
        self.medium.pager.packed_items(page)
    }

    /// A page of any kind, opened and verified whole.
    pub(crate) fn open_page(&self, page: &Pointer) -> Result<OpenedPage> {
        self.medium.pager.open_page(page)
    }

    fn seal_and_write(&self, page: &PlainPage<'_>, run: Run) -> Result<Pointer> {
        let generation = self.medium.versions.open_generation();
        let written = self.medium.pager.seal(page, run, generation).and_then(|sealed| {
            self.medium.pager.write_data_page(&sealed)?;
            Ok(sealed.pointer)
        });
        if written.is_err() {
            self.allocator.discard_unseen(vec![run]);
        }
        written
    }

    /// Limits the unsynced data that the next commit must wait for, if need be by waiting for the
    /// storage. Call it after writing file data when no caller waits for those pages.
    pub(crate) fn limit_unsynced(&self) -> Result<()> {
        self.medium.pager.limit_unsynced()
    }

    /// Seals and writes `data` (1..=128 KiB) at `offset` of `ino`, outside of any operation.
    /// Returns more than one piece only when free space is fragmented.
    pub(crate) fn write_data(
        &self,
        reservation: &mut Reservation,
        ino: Ino,
        offset: u64,
        data: &[u8],
        compress: bool,
    ) -> Result<UnreferencedPages> {
        let mut pages = UnreferencedPages::new(self);
        let page = frame::data_page(ino.0, offset, data, compress);
        if let Some(run) = reservation.allocate(page.blocks())? {
            let page = self.seal_and_write(&page, run)?;
            pages.push(WrittenPiece { ino, offset, length: data.len() as u32, page, start: 0 });
            return Ok(pages);
        }
        for (index, part) in data.chunks(GROUP_DATA).enumerate() {
            let offset = offset + (index * GROUP_DATA) as u64;
            let page = frame::data_page(ino.0, offset, part, compress);
            let run = reservation.allocate(page.blocks())?;
            let run = run.ok_or_else(|| Error::NoSpace("blocks kept for data are not there".into()))?;
            let page = self.seal_and_write(&page, run)?;
            pages.push(WrittenPiece { ino, offset, length: part.len() as u32, page, start: 0 });
        }
        Ok(pages)
    }

    /// Packs small files (or parts of them: inode, offset, bytes) into one shared page: at most 128
    /// KiB in all, 256 files. A single file gets a page of its own.
    pub(crate) fn write_packed(
        &self,
        reservation: &mut Reservation,
        files: &[(Ino, u64, &[u8])],
        compress: bool,
    ) -> Result<UnreferencedPages> {
        if let [(ino, offset, data)] = *files {
            return self.write_data(reservation, ino, offset, data, compress);
        }
        let mut data = Vec::with_capacity(files.iter().map(|(_, _, bytes)| bytes.len()).sum());
        let mut items = Vec::with_capacity(files.len());
        for (ino, offset, bytes) in files {
            items.push(PackedItem { ino: *ino, offset: *offset, start: data.len() as u32, length: bytes.len() as u32 });
            data.extend_from_slice(bytes);
        }
        let mut pages = UnreferencedPages::new(self);
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
    pub(crate) fn write_framed(&self, page: &PlainPage<'_>) -> Result<Pointer> {
        let mut promised = self.reserve_data(page.blocks() * BLOCK, 0)?;
        // Held together, or the same fragments would be promised again and again.
        let mut more: Vec<Reservation> = Vec::new();
        for _ in 0..ATTEMPTS {
            if let Some(run) = promised.allocate(page.blocks())? {
                let pointer = self.seal_and_write(page, run)?;
                return self.limit_unsynced().map(|()| pointer);
            }
            more.push(self.reserve_data(MORE, 0)?);
        }
        Err(Error::NoSpace("the free space of the new file is in fragments".into()))
    }
}

impl UnreferencedPages {
    /// None yet.
    pub(crate) fn new(volume: &Volume) -> UnreferencedPages {
        UnreferencedPages::none(&volume.allocator)
    }
}
