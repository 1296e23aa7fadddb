//! Room for changes: reservations, regions loaded on demand, and data pages written ahead of the operation that names them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use super::commit::Purpose;
use super::{UnnamedPages, Volume, WrittenPiece};
use crate::error::{Error, Result};
use crate::format::data_head::PackedItem;
use crate::format::{BLOCK, Generation, Ino, Key, Pointer, Run, kind, space};
use crate::frame::{self, PlainPage, QUAD_DATA};
use crate::pager::space::{Keep, Shortage, SpaceMap};

/// Written bytes that no barrier covered, at most: what an fsync of a small file may have to wait for.
const UNSYNCED_LIMIT: u64 = 16 << 20;
/// Groups of four blocks that `bytes` of file data take in `pages` pages at worst: a page of n groups holds n * `QUAD_DATA` bytes at least, raw
/// and whole or cut into parts of one group each. With 0 pages the bytes are those of the groups themselves.
pub(crate) const fn quads_for(bytes: u64, pages: u64) -> u64 {
    match pages {
        0 => bytes.div_ceil(4 * BLOCK),
        1 => bytes.div_ceil(QUAD_DATA as u64),
        _ => bytes / QUAD_DATA as u64 + pages,
    }
}

/// Blocks promised to data that is not yet written; given back when dropped. In units of 4 blocks (quads).
pub(crate) struct Reservation {
    space: Arc<Mutex<SpaceMap>>,
    quads: u64,
}

impl Reservation {
    /// Adds another reservation of the same volume to this one.
    pub(crate) fn absorb(&mut self, mut other: Reservation) {
        self.quads += std::mem::take(&mut other.quads);
    }

    /// Takes `quads` out into a reservation of its own (fewer when it holds fewer).
    pub(crate) fn split(&mut self, quads: u64) -> Reservation {
        let quads = quads.min(self.quads);
        self.quads -= quads;
        Reservation { space: self.space.clone(), quads }
    }

    pub(crate) fn quads(&self) -> u64 {
        self.quads
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.quads > 0 {
            self.space.lock().unreserve(self.quads);
        }
    }
}

impl Volume {
    /// Promises room for `bytes` of file data in `pages` pages, at worst case; 0 pages promise `bytes` of whole quads.
    ///
    /// # Errors
    /// `NoSpace` (nothing else is disturbed), `Latched`, `ReadOnly`.
    pub(crate) fn reserve_data(&self, bytes: u64, pages: u64) -> Result<Reservation> {
        self.check_writable()?;
        self.open_session()?;
        let quads = quads_for(bytes, pages);
        if !self.have_room(&|| self.try_reserve(quads, false))? {
            return Err(Error::NoSpace("the archive cannot grow".into()));
        }
        Ok(Reservation { space: self.space.clone(), quads })
    }

    /// Promises groups of four blocks if they can be had without a commit, also to who holds the writers' lock.
    pub(crate) fn reserve_spare(&self, quads: u64) -> Option<Reservation> {
        self.reserve_quads(quads, false).ok()?;
        Some(Reservation { space: self.space.clone(), quads })
    }

    /// Before anything is written on top of a closed record an empty commit takes its place: otherwise a crash before the first commit
    /// would look like a clean end, and the pages written until then would not be swept. On top of the record of a session that crashed it
    /// makes the inode numbers durable that this one begins with, so that a second crash does not go back behind them.
    pub(super) fn open_session(&self) -> Result<()> {
        let begins = {
            let durable = self.durable.load();
            durable.closed || (durable.session != self.session && durable.generation != Generation(0))
        };
        if begins {
            self.commit_for(Purpose::Drain)?;
        }
        Ok(())
    }

    /// Promises groups of four blocks (P2), loading regions and growing the file as needed.
    pub(super) fn reserve_quads(&self, quads: u64, essential: bool) -> Result<()> {
        self.reserve_keeping(quads, if essential { Keep::Lists } else { Keep::Reserve })
    }

    pub(super) fn reserve_keeping(&self, quads: u64, keep: Keep) -> Result<()> {
        loop {
            let entries = self.list_entries.load(Ordering::Relaxed);
            let shortage = {
                let mut space = self.space.lock();
                space.set_list_entries(entries);
                match space.reserve(quads, keep, &**self.pager.storage()) {
                    // The file was cut: nothing more may be promised.
                    Err(error @ Error::Damaged(_)) => {
                        return Err(self.pager.latch().set("growing the archive", error));
                    }
                    reserved => reserved?,
                }
            };
            match shortage {
                Ok(()) => return Ok(()),
                Err(Shortage::Load(number)) => self.load_region(number)?,
                Err(Shortage::Full) => return Err(Error::NoSpace("the archive cannot grow".into())),
            }
        }
    }

    /// Regions kept in memory beside those that have to be: their share of the memory budget, at about 5 KiB each.
    pub(super) fn region_limit(&self) -> usize {
        (self.memory / 16 / 5120).max(16) as usize
    }

    /// Loads a region of the space map. Waits for no commit: what was read counts when the tree is still the one of the newest checkpoint at the
    /// moment of installing, and is read again otherwise, also when it could not be read, since a later commit may have taken its blocks.
    pub(super) fn load_region(&self, number: u64) -> Result<()> {
        loop {
            if self.space.lock().is_loaded(number) {
                return Ok(());
            }
            let tree = self.space_tree.load_full();
            let base = tree.get(&self.store, Key::new(number, kind::SPACE, 0), space::decode);
            let mut space = self.space.lock();
            if Arc::ptr_eq(&tree, &self.space_tree.load()) {
                return space.install(number, base?.as_deref(), &**self.pager.storage());
            }
        }
    }

    /// Blocks out of the reservation; None when no run is long enough.
    ///
    /// # Errors
    /// `Invalid` for more than was reserved: the rest would be taken from what others were promised (P2).
    pub(super) fn allocate(&self, blocks: u64, reservation: &mut Reservation) -> Result<Option<Run>> {
        let quads = blocks.div_ceil(4);
        if quads > reservation.quads {
            debug_assert!(false, "{blocks} blocks of a reservation of {} groups", reservation.quads);
            return Err(Error::invalid(format!(
                "data beyond its reservation: blocks={blocks} groups={}",
                reservation.quads
            )));
        }
        let Some(run) = self.space.lock().allocate(blocks, quads) else { return Ok(None) };
        reservation.quads -= quads;
        Ok(Some(run))
    }

    pub(super) fn seal_and_write(&self, page: &PlainPage<'_>, run: Run) -> Result<Pointer> {
        let generation = Generation(self.open_generation.load(Ordering::Acquire));
        let written = self.pager.seal(page, run, generation).and_then(|sealed| {
            self.pager.write_page(&sealed)?;
            Ok(sealed.pointer)
        });
        if written.is_err() {
            self.discard_runs(vec![run]);
        }
        let pointer = written?;
        self.bound_unsynced(run.bytes())?;
        Ok(pointer)
    }

    /// Keeps the bytes that the next barrier has to wait for bounded, so that one file's fsync never waits for gigabytes of another.
    fn bound_unsynced(&self, bytes: u64) -> Result<()> {
        let unsynced = self.unsynced.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if unsynced < UNSYNCED_LIMIT {
            return Ok(());
        }
        // One thread waits for the medium; others go on until twice the bound.
        let guard =
            if unsynced < 2 * UNSYNCED_LIMIT { self.early_barrier.try_lock() } else { Some(self.early_barrier.lock()) };
        if guard.is_some() && self.unsynced.load(Ordering::Relaxed) >= UNSYNCED_LIMIT {
            self.barrier()?;
        }
        Ok(())
    }

    /// Seals and writes `data` (1..=128 KiB) at `offset` of `ino`, outside of any operation. More than one piece comes back only when free space is in
    /// fragments.
    pub(crate) fn write_data(
        self: &Arc<Self>,
        reservation: &mut Reservation,
        ino: Ino,
        offset: u64,
        data: &[u8],
        compress: bool,
    ) -> Result<UnnamedPages> {
        let mut pages = UnnamedPages::new(self);
        let page = frame::data_page(ino.0, offset, data, compress);
        if let Some(run) = self.allocate(page.blocks(), reservation)? {
            let page = self.seal_and_write(&page, run)?;
            pages.push(WrittenPiece { ino, offset, length: data.len() as u32, page, start: 0 });
            return Ok(pages);
        }
        for (index, part) in data.chunks(QUAD_DATA).enumerate() {
            let offset = offset + (index * QUAD_DATA) as u64;
            let page = frame::data_page(ino.0, offset, part, compress);
            let run = self.allocate(page.blocks(), reservation)?;
            let run = run.ok_or_else(|| Error::NoSpace("blocks kept for data are not there".into()))?;
            let page = self.seal_and_write(&page, run)?;
            pages.push(WrittenPiece { ino, offset, length: part.len() as u32, page, start: 0 });
        }
        Ok(pages)
    }

    /// Packs small files (or parts of them: inode, offset, bytes) into one shared page; at most 128 KiB in all, 256 files. One alone gets a page of
    /// its own.
    pub(crate) fn write_packed(
        self: &Arc<Self>,
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
        let mut pages = UnnamedPages::new(self);
        let page = frame::packed_page(&data, &items, compress);
        if let Some(run) = self.allocate(page.blocks(), reservation)? {
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

    /// Gives back pages that no operation named.
    pub(super) fn discard_runs(&self, runs: Vec<Run>) {
        // Nobody ever saw them, but a reader of the present state may not be older than the pages that lay there before: wait for it.
        let sequence = self.published.load().sequence;
        self.space.lock().discard(runs, sequence);
        self.release_waiting();
    }
}
