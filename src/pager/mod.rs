//! Page I/O by pointer: cached reads, write-once pages, commit ring and log (specification 9,
//! 10.2), barriers, sticky write error and space map.

mod cache;
mod data;
pub(crate) mod space;

pub(crate) use cache::{BufferPool, ShardedCache};

use std::mem::discriminant;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::env::Environment;
use crate::error::{CacheStats, Error, Result, Timestamp};
use crate::format::log::{EntryHead, LOG_BLOCKS, LogEntry, LogMark};
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, RECORD_PLAIN};
use crate::format::{BLOCK, Generation, LOG, Pointer, RING_SLOTS, Run, Tag, reserved, slot_block};
use crate::frame::{DataHead, EntryStart, OpenedPage, PageCipher, PlainPage, SealedPage, WRONG_KIND};
use crate::storage::Storage;

/// Unsynced bytes, excluding batches in flight, that a commit of a small file may have to wait for.
const UNSYNCED_LIMIT: u64 = 16 << 20;

/// Bytes of file data after which their writeback is started: a few milliseconds of most media.
const WRITEBACK_BYTES: u64 = 1 << 20;
/// Shorter ranges are left to the barrier, because each costs a system call.
const MIN_WRITEBACK: u64 = 64 << 10;

/// Reads and writes the pages of one open archive.
pub(crate) struct Pager {
    storage: Arc<dyn Storage>,
    cipher: Arc<PageCipher>,
    /// Decompressed chunks of which only a part was read, by page and chunk number.
    chunks: ShardedCache<(Pointer, u32), Arc<Vec<u8>>>,
    heads: ShardedCache<Pointer, Arc<DataHead>>,
    /// Buffers for sealed bytes, which are decrypted in place.
    scratch: BufferPool,
    /// Buffers that callers reuse for file data.
    reads: BufferPool,
    sticky_error: StickyError,
    unsynced: UnsyncedBytes,
}

impl Pager {
    /// Creates a pager; `cache_bytes` bounds its caches: three quarters for decompressed chunks,
    /// one quarter for heads.
    pub(crate) fn new(storage: Arc<dyn Storage>, cipher: impl Into<Arc<PageCipher>>, cache_bytes: usize) -> Pager {
        let heads = cache_bytes / 4;
        Pager {
            storage,
            cipher: cipher.into(),
            chunks: ShardedCache::new(cache_bytes - heads),
            heads: ShardedCache::new(heads),
            scratch: BufferPool::default(),
            reads: BufferPool::default(),
            sticky_error: StickyError::default(),
            unsynced: UnsyncedBytes::default(),
        }
    }

    /// Turns off the log line of the first failure. For storage other than the archive, such as a
    /// backup: its caller reports the failure, and the log is that of the archive.
    pub(crate) fn without_error_log(self) -> Pager {
        Pager { sticky_error: StickyError { is_unlogged: true, ..StickyError::default() }, ..self }
    }

    pub(crate) fn storage(&self) -> &Arc<dyn Storage> {
        &self.storage
    }

    pub(crate) fn cipher(&self) -> &Arc<PageCipher> {
        &self.cipher
    }

    pub(crate) fn reserved(&self) -> &'static [(u64, u64)] {
        reserved(self.cipher.has_log())
    }

    /// Rejects pointers into header, ring or log: only a malicious key holder can have sealed one.
    /// A pointer past the end of a truncated file is damage and fails in the read.
    fn check_address(&self, pointer: &Pointer) -> Result<()> {
        if pointer.run.is_page_space(u64::MAX) && pointer.run.avoids(self.reserved()) {
            return Ok(());
        }
        Err(Error::damaged(format!("page lies in header, ring or log: block={}", pointer.run.address)))
    }

    pub(crate) fn sticky_error(&self) -> &StickyError {
        &self.sticky_error
    }

    pub(crate) fn cache_use(&self) -> (CacheStats, CacheStats) {
        (self.chunks.usage(), self.heads.usage())
    }

    pub(crate) fn clear_data_caches(&self) {
        self.chunks.clear();
        self.heads.clear();
        self.wipe_buffers();
    }

    pub(crate) fn read_buffers(&self) -> &BufferPool {
        &self.reads
    }

    pub(crate) fn wipe_buffers(&self) {
        self.scratch.wipe();
        self.reads.wipe();
    }

    pub(crate) fn read_page(&self, pointer: &Pointer, kind: PageKind) -> Result<OpenedPage> {
        let opened = self.open_page(pointer)?;
        if opened.prologue.kind != kind {
            return Err(pointer.damaged(WRONG_KIND));
        }
        Ok(opened)
    }

    /// Reads and decrypts a whole page of any kind; verifies padding and every chunk.
    pub(crate) fn open_page(&self, pointer: &Pointer) -> Result<OpenedPage> {
        self.check_address(pointer)?;
        self.retry_evicted(pointer, || {
            let mut bytes = vec![0; (pointer.run.blocks * BLOCK) as usize];
            self.storage.read_at(pointer.run.offset(), &mut bytes)?;
            self.cipher.open(pointer, bytes)
        })
    }

    /// Retries a failed read once from the origin of a remote archive. The locally cached copy may
    /// belong to another history of the archive: its store may have been reset to an older state
    /// and written on, or the file on a web server may have been replaced within the one-second
    /// resolution of its tag.
    fn retry_evicted<T>(&self, pointer: &Pointer, mut read: impl FnMut() -> Result<T>) -> Result<T> {
        match read() {
            Err(Error::Damaged(_)) if self.is_remote() => {
                self.storage.evict(pointer.run.offset(), pointer.run.bytes())?;
                read()
            }
            done => done,
        }
    }

    pub(crate) fn seal(&self, page: &PlainPage<'_>, run: Run, generation: Generation) -> Result<SealedPage> {
        self.cipher.seal(page, run, generation)
    }

    /// Writes a sealed page of file data before the commit that references it, and counts its bytes
    /// as unsynced; see [`Self::write_page`].
    pub(crate) fn write_data_page(&self, page: &SealedPage) -> Result<()> {
        self.write_page(page)?;
        if !self.storage.has_atomic_barrier() {
            let start = page.pointer.run.offset();
            self.unsynced.count(start..start + page.pointer.run.bytes());
        }
        Ok(())
    }

    /// Writes a sealed page to its reserved blocks. Any failure except `NoSpace` sets the sticky
    /// error.
    pub(crate) fn write_page(&self, page: &SealedPage) -> Result<()> {
        self.write(page.pointer.run.offset(), &page.bytes, "writing a page")
    }

    /// Writes once more when the host reports a full disk, although it had allocated these blocks.
    /// Where allocation is no guarantee, cutting the ballast frees space for the retry (STORAGE-6).
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

    /// Overwrites blocks with random bytes. On storage with atomic barriers (STORAGE-4) the blocks
    /// are punched instead, which sends no data.
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

    /// Waits until all earlier writes are durable; a failure sets the sticky error.
    pub(crate) fn barrier(&self) -> Result<()> {
        // The barrier covers all counted bytes.
        self.unsynced.reset();
        self.sticky_error.check()?;
        self.storage.barrier().map_err(|e| self.sticky_error.record("making writes durable", e))
    }

    /// Starts the writeback of long ranges, and issues an early barrier when the next one would
    /// have too much to wait for. Both may wait for the medium.
    pub(crate) fn limit_unsynced(&self) -> Result<()> {
        if self.storage.has_atomic_barrier() {
            // Written-ahead pages are already in flight, and a barrier would reference them.
            return Ok(());
        }
        for range in self.unsynced.take_due() {
            self.storage.start_writeback(range);
        }
        self.unsynced.limit(|| self.barrier())
    }

    /// Returns the bytes of file data written since the last barrier.
    pub(crate) fn unsynced_bytes(&self) -> u64 {
        self.unsynced.bytes.load(Ordering::Relaxed)
    }

    /// Checks that the archive's file was not truncated, replaced or removed. Otherwise later
    /// writes would be lost or would hide the damage.
    pub(crate) fn check_identity(&self) -> Result<()> {
        match self.storage.check_identity() {
            Err(Error::Damaged(reason)) => Err(Error::Damaged(reason)),
            // A failure to examine the file is no reason to stop.
            Err(error) => {
                tracing::warn!("the archive's file cannot be examined: {error}");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }
}

/// Bytes written since the last barrier. Limits what the next barrier has to wait for, so that a
/// commit of one file never waits for gigabytes of another: the host writes complete ranges to the
/// medium early, and a barrier is issued when more than the limit may be left.
///
/// Writers only count; [`Pager::limit_unsynced`] alone may wait for the medium. Writers of file
/// data call it after the last use of their pages. A commit therefore never waits for an early
/// barrier while it blocks other writers, except for that of a step of pages sealed ahead
/// (`Volume::sync_ahead_in_steps`), which is short unless freed blocks are overwritten meanwhile.
/// The flush of a commit waits for pages in flight and issues its own barriers. A barrier waits for
/// an early one that began during it (`LostWrites`).
#[derive(Default)]
struct UnsyncedBytes {
    bytes: AtomicU64,
    /// Ranges not yet given to the host's writeback, and their sum.
    unstarted: Mutex<(Vec<Range<u64>>, u64)>,
    /// Held by the writer that issues an early barrier.
    early: Mutex<()>,
}

impl UnsyncedBytes {
    fn count(&self, written: Range<u64>) {
        let bytes = written.end - written.start;
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut unstarted = self.unstarted.lock();
        unstarted.0.push(written);
        unstarted.1 += bytes;
    }

    /// Takes the long ranges for [`Storage::start_writeback`] once there are [`WRITEBACK_BYTES`].
    fn take_due(&self) -> Vec<Range<u64>> {
        let mut unstarted = self.unstarted.lock();
        if unstarted.1 < WRITEBACK_BYTES {
            return Vec::new();
        }
        let (mut ranges, _) = std::mem::take(&mut *unstarted);
        drop(unstarted);
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, range| {
            let joins = next.start <= range.end;
            if joins {
                range.end = range.end.max(next.end);
            }
            joins
        });
        ranges.retain(|range| range.end - range.start >= MIN_WRITEBACK);
        ranges
    }

    /// Forgets all ranges before a barrier that covers them.
    fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        *self.unstarted.lock() = Default::default();
    }

    fn limit(&self, barrier: impl FnOnce() -> Result<()>) -> Result<()> {
        let sum = self.bytes.load(Ordering::Relaxed);
        if sum < UNSYNCED_LIMIT {
            return Ok(());
        }
        // One thread waits for the medium; the others continue until twice the limit.
        let guard = if sum < 2 * UNSYNCED_LIMIT { self.early.try_lock() } else { Some(self.early.lock()) };
        if guard.is_some() && self.bytes.load(Ordering::Relaxed) >= UNSYNCED_LIMIT { barrier() } else { Ok(()) }
    }
}

/// Record that was decrypted with the commit key at its slot. Its pages are not verified yet.
#[derive(Clone, Debug)]
pub(crate) struct AuthenticRecord {
    pub(crate) record: CommitRecord,
    pub(crate) tag: Tag,
}

/// Chain of log entries that extend one record, from the first up to the first gap.
#[derive(Debug, Default)]
pub(crate) struct LogChain {
    pub(crate) entries: Vec<LogEntry>,
    /// Tags of `entries`, in the same order.
    pub(crate) tags: Vec<Tag>,
    /// Position after the last entry.
    pub(crate) last: Option<LogMark>,
    /// Set when the log has any entry of this record, complete or torn: then the record was
    /// durable.
    pub(crate) has_entries: bool,
    /// Number and time of the entry after the chain when its head decrypts and its body does not:
    /// torn by a crash or damaged later.
    pub(crate) torn: Option<(u32, Timestamp)>,
    /// Description of a lost entry that a later one followed, or of a lost record that an entry
    /// extends.
    pub(crate) lost: Option<String>,
}

impl Pager {
    /// Returns all authentic records by ascending generation. Slots that do not decrypt are random,
    /// torn or foreign, and are skipped: a torn write cannot be mistaken for a record. Errors: `Io`
    /// when a slot cannot be read: a transient fault must not look like a missing record. `Damaged`
    /// for an authentic record that does not decode.
    pub(crate) fn read_ring(&self) -> Result<Vec<AuthenticRecord>> {
        let mut records = Vec::new();
        for slot in 0..RING_SLOTS {
            let mut bytes = vec![0; BLOCK as usize];
            self.storage.read_at(slot_block(slot) * BLOCK, &mut bytes)?;
            let Some((plain, tag)) = self.cipher.open_record(slot, &bytes) else { continue };
            let record = CommitRecord::decode(&plain)?;
            if record.generation.slot() != slot {
                return Err(Error::damaged(format!("commit record in a foreign slot: slot={slot}")));
            }
            records.push(AuthenticRecord { record, tag });
        }
        records.sort_by_key(|r| r.record.generation);
        Ok(records)
    }

    /// Seals a record and writes it into its slot. Any failure except `NoSpace` sets the sticky
    /// error.
    pub(crate) fn write_record(&self, record: &CommitRecord) -> Result<Tag> {
        let plain = record.encode();
        debug_assert_eq!(plain.len(), RECORD_PLAIN);
        let slot = record.generation.slot();
        let (bytes, tag) = self.cipher.seal_record(slot, plain)?;
        self.write(slot_block(slot) * BLOCK, &bytes, "writing a commit record")?;
        Ok(tag)
    }

    pub(crate) fn scrub_slot(&self, slot: u64, environment: &dyn Environment) -> Result<()> {
        self.erase_blocks(slot_block(slot), 1, environment, "scrubbing a commit slot")
    }

    /// Seals an entry, writes it at block `address`, and waits until it is durable; earlier writes
    /// need not be ([`Storage::sync_range`]). The blocks hold no live entry. Any failure except
    /// `NoSpace` of the write sets the sticky error.
    pub(crate) fn write_entry(&self, head: &EntryHead, address: u64, body: &[u8]) -> Result<Tag> {
        let sealed = self.cipher.seal_entry(head, address, body)?;
        let at = address * BLOCK;
        self.write(at, &sealed.bytes, "writing an entry of the log")?;
        if self.storage.has_range_sync() {
            let synced = self.storage.sync_range(at, &sealed.bytes);
            synced.map_err(|error| self.sticky_error.record("making an entry of the log durable", error))?;
        } else {
            self.barrier()?;
        }
        Ok(sealed.tag)
    }

    pub(crate) fn erase_log(&self, start: u64, end: u64, environment: &dyn Environment) -> Result<()> {
        debug_assert!(LOG.0 <= start && start <= end && end <= LOG.1);
        self.erase_blocks(start, end - start, environment, "erasing entries of the log")
    }

    /// Drops cached copies, so that the log is next read from the medium.
    pub(crate) fn evict_log(&self) -> Result<()> {
        self.storage.evict(LOG.0 * BLOCK, LOG_BLOCKS * BLOCK)
    }

    /// Returns whether any block of the log area starts an entry of this archive, of any record.
    /// The cipher must have a log key.
    pub(crate) fn has_entries(&self) -> Result<bool> {
        let mut bytes = vec![0; (LOG_BLOCKS * BLOCK) as usize];
        self.storage.read_at(LOG.0 * BLOCK, &mut bytes)?;
        for (address, block) in (LOG.0..LOG.1).zip(bytes.chunks(BLOCK as usize)) {
            if self.cipher.open_entry_head(address, block)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads the entries that extend the record of this `generation` and tag, at most `most`.
    /// `newest` is the highest generation of any record. Errors: `Io` when the log cannot be read:
    /// a transient fault must not look like its end. `Damaged` for an authentic entry that does not
    /// decode.
    pub(crate) fn read_log(
        &self,
        generation: Generation,
        record: Tag,
        most: u32,
        newest: Generation,
    ) -> Result<LogChain> {
        let mut bytes = vec![0; (LOG_BLOCKS * BLOCK) as usize];
        self.storage.read_at(LOG.0 * BLOCK, &mut bytes)?;
        let block = |address: u64| &bytes[((address - LOG.0) * BLOCK) as usize..];
        let extends = |start: &EntryStart| start.head.generation == generation && start.head.record == record;
        let begin = |address: u64| self.cipher.open_entry_head(address, block(address));
        let mut log = LogChain::default();
        let (mut address, mut number, mut previous) = (LOG.0, 1, Tag::default());
        while address < LOG.1
            && number <= most
            && let Some(start) = begin(address)?.filter(extends)
            && (start.head.number, start.head.previous) == (number, previous)
        {
            let end = address + u64::from(start.head.blocks);
            let whole = block(address)[..((end - address) * BLOCK) as usize].to_vec();
            let Some((body, tag)) = self.cipher.open_entry_body(&start, address, whole)? else {
                log.torn = Some((number, start.head.time));
                break;
            };
            log.entries.push(LogEntry::decode(&body)?);
            log.tags.push(tag);
            log.last = Some(LogMark { generation, record, number, entry: tag });
            (address, number, previous) = (end, number + 1, tag);
        }
        // Includes blocks of the chain: a record may list a pending log that extends a missing
        // commit.
        for block in LOG.0..LOG.1 {
            let Some(start) = begin(block)? else { continue };
            let head = &start.head;
            log.has_entries |= extends(&start);
            if head.generation > newest {
                log.lost = Some(format!(
                    "commit {} is lost, although the log has an entry that extends it",
                    head.generation.0
                ));
            } else if block < address || !extends(&start) {
                continue;
            } else if most == 0 {
                log.lost =
                    Some(format!("the log has an entry behind the end of its session (commit {})", generation.0));
            } else if head.number > number && number <= most && log.lost.is_none() {
                // The next entry may have been torn before its fsync returned; a later one was only
                // written after that entry was durable.
                log.lost = Some(format!(
                    "entry {number} of the log is lost, although entry {} came after it (commit {})",
                    head.number, generation.0
                ));
            }
        }
        Ok(log)
    }
}

/// Sticky write error: the first write failure of an archive, after which it rejects all writes,
/// and whether it was reported.
///
/// # Failures that set it
/// - A failed barrier, or a failed sync of a log entry, also for lack of space: the state of all
///   writes before it is unknown.
/// - A failed write with an I/O error: the content of those blocks is unknown, and the next write
///   is likely to fail too.
/// - A page, list or record that a commit cannot write for any reason except lack of space: the
///   open transaction builds on the lost one.
///
/// # Failures that do not set it
/// - A commit write rejected for lack of space (ENOSPC, EDQUOT). The commit was not acknowledged,
///   its pages stay in place, and it is finished when there is space (TXN-9). Its checkpoint is
///   skipped. A commit without changes, which only releases freed blocks, is dropped: nothing
///   builds on either.
/// - A page of file data rejected for lack of space although the host had allocated its blocks
///   (copy-on-write, thin provisioning, quotas). No operation references it yet, so its blocks are
///   released; the data stays dirty in memory or was never accepted.
/// - A single rejection for lack of space: the ballast is cut (STORAGE-6) and the same bytes are
///   written to the same place again, as if the first attempt had not happened. The seal covers
///   bytes and address, and no record references the page before its barrier, so a partial first
///   attempt has no effect. On NFS such a rejection may be of an earlier write: the next barrier
///   fails (`LostWrites` of the file storage).
///
/// # Reporting
/// The caller that hits the failure gets its cause; later callers get [`Error::WriteFailed`]. If
/// background work hit it, the next caller that hands over data or requests durability gets the
/// cause, once: data accepted before the failure is lost, and no program has received an error for
/// it. (Over FUSE both happen in one fsync(2): the kernel first writes back the file's cached
/// data.)
#[derive(Default)]
pub(crate) struct StickyError {
    is_unlogged: bool,
    reason: OnceLock<String>,
    /// Cause that no caller has received yet.
    unreported: Mutex<Option<Error>>,
}

impl StickyError {
    /// Errors: `WriteFailed` with the first failure, for every later writer.
    pub(crate) fn check(&self) -> Result<()> {
        match self.reason.get() {
            None => Ok(()),
            Some(reason) => Err(Error::WriteFailed(reason.clone())),
        }
    }

    pub(crate) fn reason(&self) -> Option<&str> {
        self.reason.get().map(String::as_str)
    }

    /// Records `error` unless an earlier failure was recorded, and returns it for the failing
    /// caller.
    pub(crate) fn record(&self, doing: &str, error: Error) -> Error {
        let mut first = false;
        let reason = self.reason.get_or_init(|| {
            first = true;
            // Set before the reason becomes visible and a caller can ask for the cause.
            *self.unreported.lock() = Some(error.clone());
            format!("{doing}: {}", error.with_cause())
        });
        if first && !self.is_unlogged {
            tracing::error!("archive is read-only from now on: {reason}");
        }
        error
    }

    /// Returns the error for a caller that handed over data or requested durability and got
    /// `error`: the unreported cause, once, instead of `WriteFailed`.
    pub(crate) fn error_for(&self, error: Error) -> Error {
        if self.reason.get().is_none() {
            return error;
        }
        let mut unreported = self.unreported.lock();
        match (&error, &*unreported) {
            (Error::WriteFailed(_), Some(_)) => unreported.take().unwrap_or(error),
            // An unrelated failure, such as lack of space, does not report the cause.
            (_, Some(cause)) if discriminant(cause) == discriminant(&error) => {
                *unreported = None;
                error
            }
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writeback_starts_once_for_each_long_range() {
        const PAGE: u64 = 128 << 10;
        let unsynced = UnsyncedBytes::default();
        let mut started = Vec::new();
        // Two threads write the pages of one stream in no order, and single blocks between them.
        for at in [1, 0, 3, 2, 5, 4, 7, 6, 8] {
            unsynced.count(at * PAGE..(at + 1) * PAGE);
            started.extend(unsynced.take_due());
            unsynced.count((100 + at) * PAGE..(100 + at) * PAGE + BLOCK);
        }
        assert_eq!(started, std::slice::from_ref(&(0..8 * PAGE)));
        assert_eq!(unsynced.bytes.load(Ordering::Relaxed), 9 * (PAGE + BLOCK));
        // A barrier has written the rest: it would be dropped from the host's cache.
        unsynced.reset();
        (9..17).for_each(|at| unsynced.count(at * PAGE..(at + 1) * PAGE));
        assert_eq!(unsynced.take_due(), std::slice::from_ref(&(9 * PAGE..17 * PAGE)));
        assert!(unsynced.take_due().is_empty());
    }
}
