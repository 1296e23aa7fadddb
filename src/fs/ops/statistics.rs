//! Space and memory of an archive: statfs, and the figures for operators.

use crate::error::{CacheStats, Result};
use crate::format::{BLOCK, Ino, MAX_DATA, MAX_INO, MAX_OFFSET};
use crate::fs::{FileSystem, Statistics, Usage};

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
    pub(super) fn writable_now(&self, host_free: u64) -> Result<u64> {
        Ok(self.statistics_keeping(host_free, LAST_REQUEST)?.available)
    }

    fn statistics_keeping(&self, host_free: u64, keep: u64) -> Result<Statistics> {
        let blocks = self.volume.blocks();
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
}

impl FileSystem {
    /// Returns figures for an operator. Does not access the host and waits for no lock that is held
    /// during host I/O.
    pub fn usage(&self) -> Usage {
        let [cells, heads, nodes] = self.volume.cache_use();
        let blocks = self.volume.blocks_unless_busy();
        Usage {
            cells,
            heads,
            nodes,
            dirty_bytes: self.dirty_bytes(),
            volatile_bytes: self.volatile_bytes(),
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
        let cache = |cache: &CacheStats| cache.bytes;
        cache(&self.cells) + cache(&self.heads) + cache(&self.nodes) + self.dirty_bytes + self.map_bytes
    }
}
