//! The open archive as transactions see it: published state, reservations, and commits shared by concurrent callers.

use std::sync::Arc;

use super::{Operation, View};
use crate::btree::{NodeStore, Tree};
use crate::env::Environment;
use crate::error::Result;
use crate::format::record::CommitRecord;
use crate::format::{Generation, Ino, Pointer};
use crate::frame::PageCipher;
use crate::pager::Pager;
use crate::storage::Storage;

/// How to open a volume.
pub(crate) struct OpenOptions {
    pub(crate) read_only: bool,
    /// Bytes for frame cache, node cache, dirty nodes and space map together.
    pub(crate) memory: u64,
}

/// One published version; holding it pins every block that it can see.
pub(crate) struct State {
    pub(crate) live: Tree,
    pub(crate) inodes: u64,
    /// Number of the operation that published it, ascending.
    pub(crate) sequence: u64,
}

/// Blocks promised to data that is not yet written; given back when dropped. In units of 4 blocks (quads).
pub(crate) struct Reservation {}

impl Reservation {
    /// Adds another reservation of the same volume to this one.
    pub(crate) fn absorb(&mut self, other: Reservation) {
        let _ = other;
        todo!()
    }

    /// Takes `quads` out into a reservation of its own (fewer when it holds fewer).
    pub(crate) fn split(&mut self, quads: u64) -> Reservation {
        let _ = quads;
        todo!()
    }

    pub(crate) fn quads(&self) -> u64 {
        todo!()
    }
}

/// Where a piece of file data was written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenPiece {
    pub(crate) ino: Ino,
    /// File offset of the first byte.
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) page: Pointer,
    /// First plain byte within the page.
    pub(crate) start: u32,
}

/// The open archive.
pub(crate) struct Volume {}

impl Volume {
    /// Makes a new, empty volume in a storage whose headers are written: random ring slots, empty trees. Nothing is durable
    /// before the first `commit`.
    pub(crate) fn create(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
    ) -> Result<Arc<Volume>> {
        let _ = (storage, cipher, environment, header_sequence);
        todo!()
    }

    /// Recovers (writable) or just reads (read-only) the newest trustworthy commit.
    ///
    /// # Errors
    /// `Damaged` naming what is missing, `ReadOnly` when a writable open meets a read-only storage.
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        options: &OpenOptions,
    ) -> Result<Arc<Volume>> {
        let _ = (storage, cipher, environment, header_sequence, options);
        todo!()
    }

    /// A sentence when recovery rejected the newest record and took the one before.
    pub(crate) fn fallback(&self) -> Option<String> {
        todo!()
    }

    /// The newest durable record (generation, time, counters).
    pub(crate) fn durable(&self) -> Arc<CommitRecord> {
        todo!()
    }

    pub(crate) fn read_only(&self) -> bool {
        todo!()
    }

    /// Recomputes from the live tree, snapshots and dead lists which blocks are in use and every page's count, and compares with the
    /// space map and reference records; `full` opens every page. Findings are sentences; empty means sound.
    pub(crate) fn check_space(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<String>> {
        let _ = (full, progress);
        todo!()
    }

    /// The current published version. Never waits.
    pub(crate) fn state(&self) -> Arc<State> {
        todo!()
    }

    pub(crate) fn view<'a>(&'a self, state: &'a State) -> View<'a> {
        View { tree: &state.live, store: self.store() }
    }

    pub(crate) fn store(&self) -> &NodeStore {
        todo!()
    }

    pub(crate) fn pager(&self) -> &Pager {
        todo!()
    }

    /// Promises room for `bytes` of file data in `pages` pages, at worst case.
    ///
    /// # Errors
    /// `NoSpace` (nothing else is disturbed), `Latched`, `ReadOnly`.
    pub(crate) fn reserve_data(&self, bytes: u64, pages: u64) -> Result<Reservation> {
        let _ = (bytes, pages);
        todo!()
    }

    /// Runs `f` alone among writers on a working copy and publishes the result when it is `Ok`; readers never wait.
    /// `records` bounds the number of tree records that `f` may insert or remove (nodes are reserved for them).
    /// `essential` operations (delete, truncate, reclaim, write-out of accepted data) may use the reserve.
    /// May commit first when too many nodes are dirty. Returns the sequence number that `f` published with its result.
    pub(crate) fn operate<R>(
        &self,
        records: u64,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>) -> Result<R>,
    ) -> Result<R> {
        let _ = (records, essential, f);
        todo!()
    }

    /// Seals and writes `data` (1..=128 KiB) at `offset` of `ino`, outside of any operation; the caller names the pieces in an operation
    /// (`adopt`) or calls `abandon`. More than one piece comes back only when free space is in fragments.
    pub(crate) fn write_data(
        &self,
        reservation: &mut Reservation,
        ino: Ino,
        offset: u64,
        data: &[u8],
        compress: bool,
    ) -> Result<Vec<WrittenPiece>> {
        let _ = (reservation, ino, offset, data, compress);
        todo!()
    }

    /// Packs whole small files (offset 0) into one shared page; at most 128 KiB in all, 256 files.
    pub(crate) fn write_packed(
        &self,
        reservation: &mut Reservation,
        files: &[(Ino, &[u8])],
        compress: bool,
    ) -> Result<Vec<WrittenPiece>> {
        let _ = (reservation, files, compress);
        todo!()
    }

    /// Gives back pages that no operation adopted.
    pub(crate) fn abandon(&self, pieces: &[WrittenPiece]) {
        let _ = pieces;
        todo!()
    }

    /// Sets what runs at the start of every commit, under the writers' lock, to move staged data into the transaction.
    /// It may write data and change trees through the operation it gets; called once per commit, before the freeze.
    pub(crate) fn set_flusher(&self, flusher: Box<dyn Fn(&mut Operation<'_>) -> Result<()> + Send + Sync>) {
        let _ = flusher;
        todo!()
    }

    /// Returns when everything published (and staged, through the flusher) before the call is durable. Concurrent callers share commits.
    pub(crate) fn commit(&self) -> Result<Generation> {
        todo!()
    }

    /// Whether something was published or staged since the last commit began.
    pub(crate) fn is_dirty(&self) -> bool {
        todo!()
    }

    /// One background step: drains freed blocks of an idle archive by empty commits, erases dirty-free blocks older than about 5 s,
    /// sweeps after an unclean open. Called every second or so by whoever owns the volume. Returns whether work is left.
    pub(crate) fn maintain(&self) -> Result<bool> {
        todo!()
    }

    /// Commits, drains, erases every free block, truncates the tail and writes the closed record. No call may follow.
    pub(crate) fn close(&self) -> Result<()> {
        todo!()
    }

    /// (blocks of the file, blocks in use by pages, blocks the host could still give or None when unknown)
    pub(crate) fn space(&self) -> (u64, u64) {
        todo!()
    }
}
