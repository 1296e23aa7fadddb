//! Pages by pointer: reads through bounded caches of cells and heads, write-once pages, the commit ring, barriers, the latch and the space map.

mod buffer_pool;
mod cache;
mod data;
mod log;
mod ring;
pub(crate) mod space;
mod sticky_error;
mod unsynced;

use std::sync::Arc;

pub(crate) use buffer_pool::BufferPool;
pub(crate) use cache::Cache;
pub(crate) use ring::AuthenticRecord;
pub(crate) use sticky_error::StickyError;

use unsynced::UnsyncedBytes;

use crate::env::Environment;
use crate::error::{CacheStats, Error, Result};
use crate::format::page::PageKind;
use crate::format::{BLOCK, Generation, Pointer, Run, reserved};
use crate::frame::{DataHead, OpenedPage, PageCipher, PlainPage, SealedPage, wrong_kind};
use crate::storage::Storage;

/// Reads and writes the pages of one open archive.
pub(crate) struct Pager {
    storage: Arc<dyn Storage>,
    cipher: Arc<PageCipher>,
    /// Decompressed cells of which a part was read, by page and number.
    cells: Cache<(Pointer, u32), Arc<Vec<u8>>>,
    heads: Cache<Pointer, Arc<DataHead>>,
    /// Sealed bytes of pages that were read, and the place where they are opened.
    scratch: BufferPool,
    /// For callers that read file data again and again.
    reads: BufferPool,
    sticky_error: StickyError,
    unsynced: UnsyncedBytes,
}

impl Pager {
    /// `cache_bytes` bounds what is kept of data pages: decompressed cells, and a quarter of it heads.
    pub(crate) fn new(storage: Arc<dyn Storage>, cipher: impl Into<Arc<PageCipher>>, cache_bytes: usize) -> Pager {
        let heads = cache_bytes / 4;
        Pager {
            storage,
            cipher: cipher.into(),
            cells: Cache::new(cache_bytes - heads),
            heads: Cache::new(heads),
            scratch: BufferPool::default(),
            reads: BufferPool::default(),
            sticky_error: StickyError::default(),
            unsynced: UnsyncedBytes::default(),
        }
    }

    /// Of what is written beside an archive, such as a backup: whoever meets its failure is told, and no log, which is that of the archive.
    pub(crate) fn without_error_log(self) -> Pager {
        Pager { sticky_error: StickyError::without_log(), ..self }
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    pub(crate) fn cipher(&self) -> &Arc<PageCipher> {
        &self.cipher
    }

    /// Block ranges that no page of this archive touches.
    pub(crate) fn reserved(&self) -> &'static [(u64, u64)] {
        reserved(self.cipher.has_log())
    }

    /// Only a hostile holder of the key can have sealed a pointer into header, ring or log; behind the end of a truncated file lies damage.
    fn check_address(&self, pointer: &Pointer) -> Result<()> {
        if pointer.run.is_page_space(u64::MAX) && pointer.run.avoids(self.reserved()) {
            return Ok(());
        }
        Err(Error::damaged(format!("page lies in header, ring or log: block={}", pointer.run.address)))
    }

    pub(crate) fn sticky_error(&self) -> &StickyError {
        &self.sticky_error
    }

    /// What the caches of cells and of heads hold and how often they had what was asked for.
    pub(crate) fn cache_use(&self) -> (CacheStats, CacheStats) {
        (self.cells.usage(), self.heads.usage())
    }

    /// Forgets what was decrypted of data pages.
    pub(crate) fn clear_data_caches(&self) {
        self.cells.clear();
        self.heads.clear();
        self.wipe_buffers();
    }

    /// The buffers for callers that read file data.
    pub(crate) fn read_buffers(&self) -> &BufferPool {
        &self.reads
    }

    /// Wipes the remains of reads.
    pub(crate) fn wipe_buffers(&self) {
        self.scratch.wipe();
        self.reads.wipe();
    }

    /// Reads, opens and checks one page of the kind that the caller expects.
    pub(crate) fn read_page(&self, pointer: &Pointer, kind: PageKind) -> Result<OpenedPage> {
        let opened = self.open_page(pointer)?;
        if opened.prologue.kind != kind {
            return Err(wrong_kind(pointer));
        }
        Ok(opened)
    }

    /// Reads and opens a page of any kind, whole: padding and every cell are verified.
    pub(crate) fn open_page(&self, pointer: &Pointer) -> Result<OpenedPage> {
        self.check_address(pointer)?;
        self.retry_evicted(pointer, || {
            let mut bytes = vec![0; (pointer.run.blocks * BLOCK) as usize];
            self.storage.read_at(pointer.run.offset(), &mut bytes)?;
            self.cipher.open(pointer, bytes)
        })
    }

    /// Reads a page again, when it is not as it should be, from where it lies: of an archive of another machine what is kept here may be of another history of it, as when its
    /// store was set back to an older state and written on, or the file of a web server was replaced within the second that its tag tells.
    fn retry_evicted<T>(&self, pointer: &Pointer, mut read: impl FnMut() -> Result<T>) -> Result<T> {
        match read() {
            Err(Error::Damaged(_)) if self.is_remote() => {
                self.storage.evict(pointer.run.offset(), pointer.run.bytes())?;
                read()
            }
            done => done,
        }
    }

    /// Seals `page` for `run`.
    pub(crate) fn seal(&self, page: &PlainPage<'_>, run: Run, generation: Generation) -> Result<SealedPage> {
        self.cipher.seal(page, run, generation)
    }

    /// Writes a sealed page of file data ahead of the commit that names it; see [`Self::write_page`].
    pub(crate) fn write_data_page(&self, page: &SealedPage) -> Result<()> {
        self.write_page(page)?;
        self.unsynced.count(page.pointer.run.bytes());
        Ok(())
    }

    /// Writes a sealed page to its (reserved) blocks; a failure latches, but for want of space.
    pub(crate) fn write_page(&self, page: &SealedPage) -> Result<()> {
        self.write(page.pointer.run.offset(), &page.bytes, "writing a page")
    }

    /// Writes once more when the host says that it is full, since it had allocated these blocks;
    /// where that is no promise the ballast gives it the room (STORAGE-6).
    fn write(&self, at: u64, bytes: &[u8], doing: &str) -> Result<()> {
        self.sticky_error.check()?;
        let written = match self.storage.write_at(at, bytes) {
            Err(Error::NoSpace(reason)) => {
                tracing::warn!("the host refused a write into blocks that it had allocated: {reason}");
                self.storage.cut_ballast();
                self.storage.write_at(at, bytes)
            }
            written => written,
        };
        written.map_err(|error| match error {
            Error::NoSpace(_) => error,
            error => self.sticky_error.record(doing, error),
        })
    }

    /// Overwrites blocks with random bytes. Where each barrier is a whole they become a hole, which is no write in parts there: nothing is sent to say nothing.
    fn erase_blocks(&self, start: u64, blocks: u64, environment: &dyn Environment, doing: &str) -> Result<()> {
        if self.storage.has_atomic_barrier() {
            self.sticky_error.check()?;
            let punched = self.storage.punch(start * BLOCK, blocks * BLOCK);
            return punched.map_err(|error| self.sticky_error.record(doing, error));
        }
        let mut noise = vec![0; (blocks * BLOCK) as usize];
        environment.fill_random(&mut noise)?;
        self.write(start * BLOCK, &noise, doing)
    }

    /// Waits until everything written before is on the medium; a failure latches.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.unsynced.reset();
        self.sticky_error.check()?;
        self.storage.barrier().map_err(|e| self.sticky_error.record("making writes durable", e))
    }

    /// Bounds what the next barrier has to wait for, if need be with an early one.
    pub(crate) fn limit_unsynced(&self) -> Result<()> {
        if self.storage.has_atomic_barrier() {
            // What is written ahead is on its way already, and a barrier would name it.
            return Ok(());
        }
        self.unsynced.limit(|| self.barrier())
    }

    /// Fails when another program cut, replaced or removed the file: what is written to it from then on would be lost, or hide the damage.
    pub(crate) fn check_identity(&self) -> Result<()> {
        match self.storage.check_identity() {
            Err(Error::Damaged(reason)) => Err(Error::Damaged(reason)),
            // That nobody can tell at this moment is no reason to stop.
            Err(error) => {
                tracing::warn!("the archive's file cannot be examined: {error}");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}
