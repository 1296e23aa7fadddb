//! statfs.

use crate::error::Result;
use crate::format::{BLOCK, MAX_INO, MAX_OFFSET, RESERVED};
use crate::fs::{FileSystem, Statistics};

/// Bytes that a new empty file takes in the leaves: inode 144, index and list about 30 each with keys of 17, leaves two thirds full.
const BYTES_PER_INODE: u64 = 384;

impl FileSystem {
    /// Free is what the archive's free blocks and `host_free` (bytes that the host's file system has left) give together, within the
    /// limit of the file's size. Free blocks that are holes have to come from the host too, like growth. Blocks of headers and commit
    /// ring are nobody's; what is promised to staged data counts as taken.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        let blocks = self.volume.blocks();
        let layout: u64 = RESERVED.iter().map(|(start, end)| end - start).sum();
        // What is taken is the archive's word.
        let used = blocks.taken.saturating_add(blocks.promised).min(MAX_OFFSET / BLOCK) * BLOCK;
        let inside = blocks.total.saturating_mul(BLOCK).saturating_sub(layout * BLOCK + used);
        let allocated = self.volume.pager().storage().allocated()?;
        let backed = allocated.saturating_sub(layout * BLOCK + used).min(inside);
        let from_host = (inside - backed).saturating_add(blocks.growth.saturating_mul(BLOCK)).min(host_free);
        let free = backed.saturating_add(from_host);
        let inodes = self.volume.state().inodes();
        let free_inodes = (free / BYTES_PER_INODE).min(MAX_INO.saturating_sub(inodes));
        Ok(Statistics {
            total: used.saturating_add(free),
            free,
            available: free.saturating_sub(blocks.kept * BLOCK),
            // Like f_files of statfs(2): those in use and those that there is room for.
            inodes: inodes.saturating_add(free_inodes),
            free_inodes,
        })
    }
}
