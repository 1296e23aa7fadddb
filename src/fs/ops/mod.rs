//! File system operations, one file per family; each is one core call of an adapter. This one has
//! fsync, the periodic commit, statfs, and the figures for operators.

mod attributes;
mod bulk;
mod bulk_read;
mod copy;
mod file_data;
mod names;
mod paths;
mod snapshots;
mod xattr;

pub(crate) use bulk::MAX_SMALL_FILE;
pub use bulk::NewFile;
pub(super) use names::MAX_TARGET;
pub(crate) use snapshots::ChangedInode;
pub use snapshots::SnapshotView;
pub(super) use xattr::{BIRTH, load_value};

use std::sync::atomic::Ordering;

use super::extents::FRAME;
use super::writeback::FREED_BYTES;
use super::{FileSystem, Statistics, SyncProfile, Usage, inode};
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{BLOCK, Generation, Ino, MAX_DATA, MAX_INO, MAX_OFFSET, Timestamp};
use crate::txn::{CommitTicket, Volume};
#[cfg(test)]
pub(super) use xattr::put_entry;

impl FileSystem {
    fn published_inode(&self, ino: Ino) -> Result<InodeValue> {
        inode::load(self.volume.view(&self.volume.state()), ino)
    }

    /// Ends every successful change of the namespace: under `sync=always` it is durable before it
    /// returns.
    fn finish_change(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Always {
            self.volume.commit()?;
            return self.check_syncs();
        }
        Ok(())
    }

    /// Fails after [`FileSystem::end_syncs`].
    fn check_syncs(&self) -> Result<()> {
        match self.syncs_ended.load(Ordering::Acquire) {
            false => Ok(()),
            true => Err(Error::io("the mount ends before the store has the data", rustix::io::Errno::IO.into())),
        }
    }
}

/// A caller of [`FileSystem::sync`] that is counted in and waits for its result.
#[derive(Debug)]
#[must_use = "its commit may have no leader"]
pub struct PendingSync(Option<CommitTicket>);

impl FileSystem {
    /// Returns when everything done so far, for all files, is durable; with `SyncProfile::Never` at
    /// once.
    pub fn sync(&self) -> Result<()> {
        self.finish_sync(self.begin_sync()?)
    }

    /// Counts in a caller of [`FileSystem::sync`] without waiting: everything done until now is
    /// covered, and a commit that is about to begin serves the caller too. The caller, or another
    /// thread, waits with [`FileSystem::finish_sync`].
    ///
    /// # Errors
    /// Errors of [`FileSystem::sync`].
    pub fn begin_sync(&self) -> Result<PendingSync> {
        if self.options.sync == SyncProfile::Never {
            return Ok(PendingSync(None));
        }
        self.dirty_throttle.record_sync();
        self.begin_commit().map_err(|error| self.volume.error_for(error))
    }

    /// Waits until that caller's commit is durable, and leads it if no thread does.
    pub fn finish_sync(&self, begun: PendingSync) -> Result<()> {
        let waited = begun.0.is_some();
        self.wait_commit(begun, Volume::sync_wanted).map_err(|error| self.volume.error_for(error))?;
        if waited { self.check_syncs() } else { Ok(()) }
    }

    /// Returns whether [`FileSystem::seal_ahead`] has something to do, at the cost of a lock.
    pub fn should_seal_ahead(&self) -> bool {
        self.record_with_full_log().is_some()
    }

    fn record_with_full_log(&self) -> Option<Generation> {
        self.volume.nearly_full_log().filter(|record| !self.writeback.has_sealed_ahead(*record))
    }

    /// Seals dirty data once the log is nearly full, and syncs its pages where they are written, so
    /// that callers wait less for the commit that empties it. For a thread for which no caller
    /// waits.
    pub fn seal_ahead(&self) {
        let Some(record) = self.record_with_full_log() else { return };
        // The batch is marked as written before the last sync: a commit that waits for the batch
        // makes its own.
        let sealed = self.writeback.seal_ahead(record);
        let synced = sealed.and_then(|is_written| if is_written { self.volume.sync_data_ahead() } else { Ok(()) });
        if let Err(error) = synced {
            tracing::debug!(%error, "cannot seal and sync dirty data ahead of the commit, which reports the reason");
        }
    }

    /// Makes every later [`FileSystem::sync`] fail, before a barrier may succeed with data that the
    /// store does not have (LIVING-6). [`FileSystem::make_durable`] and the close of the archive
    /// still work.
    pub fn end_syncs(&self) {
        self.syncs_ended.store(true, Ordering::Release);
    }

    /// Makes accepted changes durable, periodically and without a caller to report errors to: the
    /// next caller of `sync` or `write` gets them. A commit and no log entry, so that the log stays
    /// short.
    ///
    /// # Errors
    /// Errors of [`FileSystem::sync`].
    pub fn sync_in_background(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Never {
            return Ok(());
        }
        self.dirty_throttle.record_period();
        // A change counts from its acceptance on, even during a commit.
        if !self.is_dirty() {
            return Ok(());
        }
        self.wait_commit(self.begin_commit()?, Volume::commit_wanted)
    }

    /// Returns whether a program synced lately: until [`FileSystem::sync_in_background`] was called
    /// twice afterwards.
    pub fn programs_sync(&self) -> bool {
        self.dirty_throttle.programs_sync()
    }

    /// Throttles, then waits with the volume's function `wait` for the commit.
    fn wait_commit(&self, begun: PendingSync, wait: fn(&Volume, CommitTicket) -> Result<Generation>) -> Result<()> {
        let Some(wanted) = begun.0 else { return Ok(()) };
        // Most dirty data is sealed before the commit takes the writers' lock, and writers add
        // little until then.
        let _awaited = self.dirty_throttle.begin_commit_wait();
        if let Err(error) = self.dirty_throttle.throttle_before_commit() {
            tracing::debug!(%error, "staged data could not be written out before the commit, which tells why");
        }
        wait(&self.volume, wanted)?;
        self.write_buffer.drop_published();
        Ok(())
    }

    /// Makes a commit when much replaced data waits for one, so that the archive grows with the
    /// live data and not with the rate of writes; also when a commit is nearly due, before an
    /// operation makes it and flushes all dirty data. One caller commits, the others continue. The
    /// next caller of `sync` or `write` gets the error.
    pub(super) fn release_freed(&self) {
        let is_due = self.volume.has_freed(FREED_BYTES) || self.volume.writer().commit_is_near();
        if !is_due || self.volume.is_committing() || self.volume.space_waiter().is_short() {
            return;
        }
        let released = self.begin_commit().and_then(|begun| self.wait_commit(begun, Volume::commit_wanted));
        if let Err(error) = released {
            tracing::debug!(%error, "replaced data is not free yet");
        }
    }

    /// Commits like [`FileSystem::sync`] but under every profile: for the end of a mount, and on
    /// request of an operator.
    ///
    /// # Errors
    /// Errors of [`FileSystem::sync`]; `Invalid` when the archive is being closed.
    pub fn make_durable(&self) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.commit_all()
    }

    pub(in crate::fs) fn commit_all(&self) -> Result<()> {
        self.begin_commit()
            .and_then(|begun| self.wait_commit(begun, Volume::commit_wanted))
            .map_err(|error| self.volume.error_for(error))
    }

    /// Counts in a caller. A read-only archive has only durable data.
    fn begin_commit(&self) -> Result<PendingSync> {
        Ok(PendingSync(if self.volume.read_only() { None } else { Some(self.volume.want_commit()?) }))
    }

    /// Returns the bytes of memory with data that no commit has begun to make durable: dirty file
    /// data and changed nodes, both estimated.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.write_buffer.total_bytes() + self.volume.writer().dirty_bytes()
    }

    /// Checks that a write of this many bytes could be accepted, and waits for space like one.
    ///
    /// # Errors
    /// `NoSpace`, `WriteFailed`, `ReadOnly`.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        self.volume.reserve_data(bytes, bytes.div_ceil(FRAME)).map(drop)
    }

    /// Returns whether a change may have to wait for a commit or for writeback: an estimate for
    /// scheduling threads.
    pub fn may_wait(&self) -> bool {
        self.options.sync == SyncProfile::Always
            || self.dirty_throttle.is_near_limit()
            || self.volume.writer().commit_is_near()
            || self.volume.has_freed(FREED_BYTES)
    }

    /// Returns the generation of the newest durable commit.
    pub fn generation(&self) -> Generation {
        self.volume.durable().generation
    }

    /// Returns the time of the newest durable commit.
    pub fn commit_time(&self) -> Timestamp {
        self.volume.durable().time
    }

    /// Returns whether data was accepted that no commit has begun to make durable.
    pub(crate) fn is_dirty(&self) -> bool {
        self.volume.writer().is_dirty()
    }
}

/// Bytes of a new empty file in the leaves: inode 144, index and list about 30 each with keys of
/// 17, leaves two thirds full.
const BYTES_PER_INODE: u64 = 384;

/// Blocks of a page of `MAX_DATA` incompressible bytes: its head takes one.
const FULL_PAGE: u64 = MAX_DATA as u64 / BLOCK + 1;

/// Divisor for the metadata of such pages: an extent of 90 bytes in leaves that are half full at
/// worst (0.14 %), and the reserve of a commit for the space map of each changed region, five
/// groups for four regions of 32 MiB (0.06 %).
const DESCRIBED: u64 = 256;

/// Space that the last request needs in addition to its own pages: reservations count whole groups
/// of four blocks for each page (96 KiB for a MiB), and replaced nodes are freed two commits later.
const LAST_REQUEST: u64 = 768 << 10;

/// Space that creating a file may take between the statfs call and the write that relies on it.
const NEW_FILE: u64 = 256 << 10;

/// Returns the bytes of file data that certainly fit into free blocks of `room` bytes, for writes
/// of whole frames of 128 KiB of incompressible data.
fn writable_bytes(room: u64) -> u64 {
    let pages = room / BLOCK;
    let data = (pages - pages / DESCRIBED).saturating_mul(MAX_DATA as u64 / BLOCK) / FULL_PAGE;
    data.saturating_mul(BLOCK)
}

impl FileSystem {
    /// Returns the space of the archive.
    ///
    /// `free` is the sum of the archive's free blocks and of `host_free` (bytes free on the host's
    /// file system), within the limit of the file's size. Free blocks that are holes need space on
    /// the host too, like growth. Blocks of headers and commit ring are excluded; space reserved
    /// for dirty data counts as taken.
    ///
    /// `available` is less than `free` by the reserve for deletes and commits and by the overhead
    /// of pages and their metadata: so much can be written, and passed to [`FileSystem::allocate`].
    /// It holds if free blocks are contiguous. Pages in fragments hold less, and so do pages of
    /// small scattered writes.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        self.statistics_keeping(host_free, LAST_REQUEST + NEW_FILE)
    }

    /// Returns the bytes of file data that can be written now: the available space of statfs before
    /// the file was created.
    fn writable_now(&self, host_free: u64) -> Result<u64> {
        Ok(self.statistics_keeping(host_free, LAST_REQUEST)?.available)
    }

    fn statistics_keeping(&self, host_free: u64, keep: u64) -> Result<Statistics> {
        let blocks = self.volume.allocator().blocks();
        let layout: u64 = self.volume.reserved_blocks().iter().map(|(start, end)| end - start).sum();
        // The number of used blocks is read from the archive.
        let used = blocks.used.saturating_add(blocks.reserved).min(MAX_OFFSET / BLOCK) * BLOCK;
        let inside = blocks.total.saturating_mul(BLOCK).saturating_sub(layout * BLOCK + used);
        let allocated = self.volume.allocated_on_host()?;
        let backed = allocated.saturating_sub(layout * BLOCK + used).min(inside);
        let from_host = (inside - backed).saturating_add(blocks.growth.saturating_mul(BLOCK)).min(host_free);
        let free = backed.saturating_add(from_host);
        let inodes = self.volume.state().inodes();
        let free_inodes = (free / BYTES_PER_INODE).min(MAX_INO.saturating_sub(inodes));
        Ok(Statistics {
            total: used.saturating_add(free),
            free,
            available: writable_bytes(free.saturating_sub(blocks.headroom * BLOCK + keep)),
            // Like f_files of statfs(2): used inodes and those that fit into the free space.
            inodes: inodes.saturating_add(free_inodes),
            free_inodes,
        })
    }

    /// Returns figures for an operator. Does not access the host and waits for no lock that is held
    /// during host I/O.
    pub fn usage(&self) -> Usage {
        let [chunks, heads, nodes] = self.volume.cache_use();
        let blocks = self.volume.allocator().blocks_unless_busy();
        let dirty_bytes = self.dirty_bytes();
        let is_logged = self.volume.writer().is_logged() && self.write_buffer.is_logged();
        Usage {
            chunks,
            heads,
            nodes,
            dirty_bytes,
            volatile_bytes: if is_logged { 0 } else { dirty_bytes },
            log: self.volume.log_use(),
            snapshots: self.volume.snapshot_use(),
            map_bytes: blocks.as_ref().map_or(0, |(_, memory)| *memory),
            file_bytes: blocks.as_ref().map(|(blocks, _)| blocks.total.saturating_mul(BLOCK)),
            used_bytes: blocks.as_ref().map(|(blocks, _)| blocks.used.saturating_mul(BLOCK)),
            latched: self.volume.latched().map(str::to_owned),
            fallback: self.volume.fallback(),
        }
    }

    /// Reads the snapshot part of [`Usage`], which is reported from then on.
    ///
    /// # Errors
    /// `Damaged`, errors of the host.
    pub fn look_at_snapshots(&self) -> Result<()> {
        self.volume.look_at_snapshots()
    }

    /// Returns the highest inode number that was ever allocated.
    pub fn newest_inode(&self) -> Ino {
        Ino(self.volume.state().counters.next_ino.saturating_sub(1))
    }

    /// Drops decrypted data that is not changed from memory: pages of files, heads and nodes of
    /// trees.
    pub fn forget_plaintext(&self) {
        self.volume.forget_plaintext();
    }

    /// Runs `f` with a buffer for [`FileSystem::read_into`] that is reused, and wiped with
    /// [`FileSystem::wipe_buffers`], by `purge` and by `forget_plaintext`.
    pub fn with_read_buffer<R>(&self, f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.volume.with_read_buffer(f)
    }

    /// Wipes the data of reads in reused buffers, so that deleted content does not stay there until
    /// the next read overwrites it.
    pub fn wipe_buffers(&self) {
        self.volume.wipe_buffers();
    }
}

impl Usage {
    /// Returns the bytes that count against the memory limit.
    pub fn memory(&self) -> u64 {
        self.chunks.bytes + self.heads.bytes + self.nodes.bytes + self.dirty_bytes + self.map_bytes
    }
}
