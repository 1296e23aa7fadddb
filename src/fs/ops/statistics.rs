//! Space of an archive: statfs, and the figures for operators.

use crate::error::Result;
use crate::format::{BLOCK, MAX_DATA, MAX_INO, MAX_OFFSET};
use crate::fs::{FileSystem, Statistics};

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
fn writable(room: u64) -> u64 {
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
        let used = blocks.taken.saturating_add(blocks.promised).min(MAX_OFFSET / BLOCK) * BLOCK;
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
            available: writable(free.saturating_sub(blocks.kept * BLOCK + keep)),
            // Like f_files of statfs(2): used inodes and those that fit into the free space.
            inodes: inodes.saturating_add(free_inodes),
            free_inodes,
        })
    }
}
