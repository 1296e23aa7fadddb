//! statfs.

use crate::error::Result;
use crate::format::{BLOCK, MAX_DATA, MAX_INO, MAX_OFFSET};
use crate::fs::{FileSystem, Statistics};

/// Bytes that a new empty file takes in the leaves: inode 144, index and list about 30 each with keys of 17, leaves two thirds full.
const BYTES_PER_INODE: u64 = 384;

/// Blocks of a page of `MAX_DATA` bytes that cannot be compressed: its head takes one.
const FULL_PAGE: u64 = MAX_DATA as u64 / BLOCK + 1;

/// One part in so many for what describes such pages: an extent of 90 bytes in leaves that are half full at worst (0.14 %), and what a commit
/// keeps for the space map of each region that changed, five groups for four regions of 32 MiB (0.06 %).
const DESCRIBED: u64 = 256;

/// What the last request of all needs beside its own pages: reservations count whole groups of four blocks for each page (96 KiB for a MiB),
/// and nodes that were replaced come back two commits later.
const LAST_REQUEST: u64 = 768 << 10;

/// What making a file may take between the call that asked for the figure and the one that relies on it.
const NEW_FILE: u64 = 256 << 10;

/// Bytes of file data that certainly fit into free blocks of `room` bytes, for writes of whole frames of 128 KiB that cannot be compressed.
fn writable(room: u64) -> u64 {
    let pages = room / BLOCK;
    let data = (pages - pages / DESCRIBED).saturating_mul(MAX_DATA as u64 / BLOCK) / FULL_PAGE;
    data.saturating_mul(BLOCK)
}

impl FileSystem {
    /// Free is what the archive's free blocks and `host_free` (bytes that the host's file system has left) give together, within the
    /// limit of the file's size. Free blocks that are holes have to come from the host too, like growth. Blocks of headers and commit
    /// ring are nobody's; what is promised to staged data counts as taken. Available is less than free by what is kept for deletes and commits and
    /// by what pages and their description take: so much can be written, and asked of [`FileSystem::allocate`]. It holds where free blocks
    /// lie together. In fragments pages hold less, and so do those of small writes here and there.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        self.statistics_keeping(host_free, LAST_REQUEST + NEW_FILE)
    }

    /// Bytes of file data that can be written now: what statfs showed before the file was made.
    pub(super) fn writable_now(&self, host_free: u64) -> Result<u64> {
        Ok(self.statistics_keeping(host_free, LAST_REQUEST)?.available)
    }

    fn statistics_keeping(&self, host_free: u64, keep: u64) -> Result<Statistics> {
        let blocks = self.volume.blocks();
        let layout: u64 = self.volume.reserved_blocks().iter().map(|(start, end)| end - start).sum();
        // What is taken is the archive's word.
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
            available: writable(free.saturating_sub(blocks.headroom * BLOCK + keep)),
            // Like f_files of statfs(2): those in use and those that there is room for.
            inodes: inodes.saturating_add(free_inodes),
            free_inodes,
        })
    }
}
