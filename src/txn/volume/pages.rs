//! Reads pages of file data, and writes them ahead of the operation that names them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::Volume;
use crate::error::{Error, Result};
use crate::format::page::{PackedItem, PageKind};
use crate::format::{BLOCK, Ino, Pointer, Run};
use crate::frame::{self, Compression, GROUP_DATA, OpenedPage, PlainPage, SealedPage};
use crate::txn::allocator::{Allocator, Reservation};
use crate::txn::operation::Operation;
use crate::txn::state::{Publication, VolumeContext};

/// Unsynced bytes with which a step of pages sealed ahead is synced: the lower end is the step, by
/// measurement (bench/results/2026-12-01.md). More than a few steps are the data of a stream.
const AHEAD_STEP: Range<u64> = 64 << 10..512 << 10;

/// Bytes requested in addition to a framed page when free space is fragmented: 1 MiB, the least by
/// which a file grows.
const MORE: u64 = 1 << 20;
/// So often, which is more than a file's growth can be in fragments.
const ATTEMPTS: usize = 32;

impl Volume {
    pub(crate) fn read_data(&self, page: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        self.medium.pager.read_data(page, start, out)
    }

    pub(crate) fn read_all_data(&self, page: &Pointer, buffer: &mut Vec<u8>) -> Result<usize> {
        self.medium.pager.read_all_data(page, buffer)
    }

    pub(crate) fn prefetch_data<'a>(&self, parts: impl Iterator<Item = (&'a Pointer, u32, u32)>) {
        self.medium.pager.prefetch_data(parts);
    }

    pub(crate) fn prefetch_pages<'a>(&self, pages: impl Iterator<Item = &'a Pointer>) {
        self.medium.pager.prefetch_pages(pages);
    }

    pub(crate) fn is_remote(&self) -> bool {
        self.medium.pager.is_remote()
    }

    pub(crate) fn pending_upload_bytes(&self) -> Result<u64> {
        self.medium.pager.storage().pending_upload_bytes()
    }

    pub(crate) fn page_items(&self, page: &Pointer) -> Result<(PageKind, Vec<PackedItem>)> {
        self.medium.pager.page_items(page)
    }

    pub(crate) fn open_page(&self, page: &Pointer) -> Result<OpenedPage> {
        self.medium.pager.open_page(page)
    }

    fn seal(&self, page: &PlainPage<'_>, run: Run) -> Result<SealedPage> {
        let sealed = self.medium.pager.seal(page, run, self.medium.versions.open_generation());
        if sealed.is_err() {
            self.allocator.discard_unseen(vec![run]);
        }
        sealed
    }

    /// Limits the unsynced data that the next commit must wait for, if need be by waiting for the
    /// storage. Call it after writing file data when no caller waits for those pages.
    pub(crate) fn limit_unsynced(&self) -> Result<()> {
        self.medium.pager.limit_unsynced()
    }

    pub(crate) fn has_range_sync(&self) -> bool {
        self.medium.pager.storage().has_range_sync()
    }

    /// Makes written pages durable, so that the next commit does not wait for them.
    pub(crate) fn sync_data_ahead(&self) -> Result<()> {
        self.medium.pager.barrier()
    }

    /// Makes pages durable that were just written ahead of a commit, a few at a time, if callers of
    /// a sync come one at a time: the next entry waits for a sync in progress, and then only for
    /// this amount. With several callers the additional flushes cost more than they gain. If there
    /// are more pages, of a stream, none are synced here.
    pub(crate) fn sync_ahead_in_steps(&self) -> Result<()> {
        let is_due = AHEAD_STEP.contains(&self.medium.pager.unsynced_bytes());
        if is_due && self.committer.has_single_caller() { self.sync_data_ahead() } else { Ok(()) }
    }

    pub(crate) fn write_data(
        &self,
        reservation: &mut Reservation,
        ino: Ino,
        offset: u64,
        data: &[u8],
        compression: Compression,
    ) -> Result<UnreferencedPages> {
        self.seal_data(reservation, ino, offset, data, compression)?.written()
    }

    /// Seals `data` (1..=128 KiB) at `offset` of `ino`, outside of any operation. Returns more than
    /// one piece only when free space is fragmented.
    pub(crate) fn seal_data(
        &self,
        reservation: &mut Reservation,
        ino: Ino,
        offset: u64,
        data: &[u8],
        compression: Compression,
    ) -> Result<UnreferencedPages> {
        let mut pages = UnreferencedPages::new(self);
        let page = frame::data_page(ino.0, offset, data, compression);
        if let Some(run) = reservation.allocate(page.blocks())? {
            let page = pages.keep(self.seal(&page, run)?);
            pages.pieces.push(WrittenPiece { ino, offset, length: data.len() as u32, page, start: 0 });
            return Ok(pages);
        }
        for (index, part) in data.chunks(GROUP_DATA).enumerate() {
            let offset = offset + (index * GROUP_DATA) as u64;
            let page = frame::data_page(ino.0, offset, part, compression);
            let run = reservation.allocate(page.blocks())?;
            let run = run.ok_or_else(|| Error::NoSpace("blocks kept for data are not there".into()))?;
            let page = pages.keep(self.seal(&page, run)?);
            pages.pieces.push(WrittenPiece { ino, offset, length: part.len() as u32, page, start: 0 });
        }
        Ok(pages)
    }

    pub(crate) fn write_packed(
        &self,
        reservation: &mut Reservation,
        files: &[(Ino, u64, &[u8])],
        compression: Compression,
    ) -> Result<UnreferencedPages> {
        self.pack(reservation, files, compression)?.written()
    }

    /// Packs small files (or parts of them: inode, offset, bytes) into one shared page: at most 128
    /// KiB in all, 256 files. A single file gets a page of its own.
    pub(crate) fn pack(
        &self,
        reservation: &mut Reservation,
        files: &[(Ino, u64, &[u8])],
        compression: Compression,
    ) -> Result<UnreferencedPages> {
        if files.len() > 1
            && let Some(pages) = self.seal_shared(reservation, files, compression)?
        {
            return Ok(pages);
        }
        let mut pages = UnreferencedPages::new(self);
        for (ino, offset, bytes) in files {
            pages.absorb(self.seal_data(reservation, *ino, *offset, bytes, compression)?);
        }
        Ok(pages)
    }

    /// Seals parts of files (inode, offset, bytes) on one page; None when free space is fragmented.
    pub(crate) fn seal_shared(
        &self,
        reservation: &mut Reservation,
        parts: &[(Ino, u64, &[u8])],
        compression: Compression,
    ) -> Result<Option<UnreferencedPages>> {
        let mut data = Vec::with_capacity(parts.iter().map(|(_, _, bytes)| bytes.len()).sum());
        let mut items = Vec::with_capacity(parts.len());
        for (ino, offset, bytes) in parts {
            items.push(PackedItem { ino: *ino, offset: *offset, start: data.len() as u32, length: bytes.len() as u32 });
            data.extend_from_slice(bytes);
        }
        let page = frame::packed_page(&data, &items, compression);
        let Some(run) = reservation.allocate(page.blocks())? else { return Ok(None) };
        let mut pages = UnreferencedPages::new(self);
        let page = pages.keep(self.seal(&page, run)?);
        for PackedItem { ino, offset, start, length } in items {
            pages.pieces.push(WrittenPiece { ino, offset, length, page, start });
        }
        Ok(Some(pages))
    }

    /// Seals and writes a framed page of file data; the caller names it in an operation (`adopt`).
    pub(crate) fn write_framed(&self, page: &PlainPage<'_>) -> Result<Pointer> {
        let mut promised = self.reserve_data(page.blocks() * BLOCK, 0)?;
        // Held together, or the same fragments would be promised again and again.
        let mut more: Vec<Reservation> = Vec::new();
        for _ in 0..ATTEMPTS {
            if let Some(run) = promised.allocate(page.blocks())? {
                let sealed = self.seal(page, run)?;
                if let Err(error) = self.medium.pager.write_data_page(&sealed) {
                    self.allocator.discard_unseen(vec![run]);
                    return Err(error);
                }
                return self.limit_unsynced().map(|()| sealed.pointer);
            }
            more.push(self.reserve_data(MORE, 0)?);
        }
        Err(Error::NoSpace("the free space of the new file is in fragments".into()))
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenPiece {
    pub(crate) ino: Ino,
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) page: Pointer,
    /// First plain byte within the page.
    pub(crate) start: u32,
}

/// Owner of sealed pages that no tree references yet, until an operation that names them is
/// published; dropped before, they are given back. So a failure between the two leaves nothing
/// behind, and a failed operation can be repeated with the same pages. They are written when they
/// are named, at the latest.
///
/// Its [`Publication`] tells whether the operation was published: published pages are not given
/// back. The owner outlives the operation, so `name` borrows the pages.
#[must_use = "unreferenced pages are freed on drop"]
pub(crate) struct UnreferencedPages {
    allocator: Arc<Allocator>,
    medium: Arc<VolumeContext>,
    pieces: Vec<WrittenPiece>,
    unwritten: Vec<SealedPage>,
    publication: Publication,
}

impl UnreferencedPages {
    pub(crate) fn new(volume: &Volume) -> UnreferencedPages {
        let (allocator, medium) = (volume.allocator.clone(), volume.medium.clone());
        let (pieces, unwritten) = (Vec::new(), Vec::new());
        UnreferencedPages { allocator, medium, pieces, unwritten, publication: Publication::default() }
    }

    fn keep(&mut self, page: SealedPage) -> Pointer {
        let pointer = page.pointer;
        self.unwritten.push(page);
        pointer
    }

    fn written(mut self) -> Result<UnreferencedPages> {
        self.write()?;
        Ok(self)
    }

    /// Writes the pages that are not written yet. After an error it can be called again.
    pub(crate) fn write(&mut self) -> Result<()> {
        self.unwritten.iter().try_for_each(|page| self.medium.pager.write_data_page(page))?;
        self.unwritten = Vec::new();
        Ok(())
    }

    pub(crate) fn unwritten_bytes(&self) -> usize {
        self.unwritten.iter().map(|page| page.bytes.len()).sum()
    }

    /// Adopts pages that no operation has named.
    pub(crate) fn absorb(&mut self, mut other: UnreferencedPages) {
        debug_assert!(!self.publication.is_set() && !other.publication.is_set(), "they are named");
        self.pieces.append(&mut other.pieces);
        self.unwritten.append(&mut other.unwritten);
    }

    pub(crate) fn pieces(&self) -> &[WrittenPiece] {
        &self.pieces
    }

    /// The pieces of one file, once they are `sorted`.
    pub(crate) fn of(&self, ino: Ino) -> &[WrittenPiece] {
        let from = self.pieces.partition_point(|piece| piece.ino < ino);
        let behind = self.pieces.partition_point(|piece| piece.ino <= ino);
        &self.pieces[from..behind]
    }

    /// By file and offset.
    pub(crate) fn sorted(mut self) -> UnreferencedPages {
        self.pieces.sort_unstable_by_key(|piece| (piece.ino, piece.offset));
        self
    }

    /// Has `op` count each page once for each of its pieces that is named; the caller inserts the
    /// extents. A page without a named piece is given back at once; one that is named in part is
    /// noted by the operation.
    pub(crate) fn name(&mut self, op: &mut Operation<'_>, has_file: impl Fn(&WrittenPiece) -> bool) -> Result<()> {
        // By address: the page, and how many of its pieces are named and how many are not.
        let mut pages: BTreeMap<u64, (Pointer, u32, u32)> = BTreeMap::new();
        for piece in &self.pieces {
            let (_, named, lost) = pages.entry(piece.page.run.address).or_insert((piece.page, 0, 0));
            *(if has_file(piece) { named } else { lost }) += 1;
        }
        let is_named = |page: &Pointer| pages.get(&page.run.address).is_some_and(|(_, named, _)| *named > 0);
        self.unwritten.retain(|page| is_named(&page.pointer));
        self.write()?;
        for (page, named, lost) in pages.values().filter(|(_, named, _)| *named > 0) {
            op.adopt(page, *named)?;
            if *lost > 0 {
                op.note_stale(page);
            }
        }
        let lost: Vec<WrittenPiece> = self.pieces.extract_if(.., |piece| !is_named(&piece.page)).collect();
        self.give_back(&lost);
        op.carry(&self.publication);
        Ok(())
    }

    fn give_back(&self, pieces: &[WrittenPiece]) {
        if !pieces.is_empty() {
            let mut runs: Vec<Run> = pieces.iter().map(|piece| piece.page.run).collect();
            runs.sort_unstable();
            runs.dedup();
            self.allocator.discard_unseen(runs);
        }
    }
}

impl Drop for UnreferencedPages {
    fn drop(&mut self) {
        if !self.publication.is_set() {
            self.give_back(&self.pieces);
        }
    }
}
