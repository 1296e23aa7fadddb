//! statfs.

use crate::error::Result;
use crate::format::{BLOCK, MAX_INO, RESERVED};
use crate::fs::{FileSystem, Statistics};

/// Bytes that a new empty file takes in the leaves: inode 144, index and list about 30 each with keys of 17, leaves two thirds full.
const BYTES_PER_INODE: u64 = 384;

impl FileSystem {
    /// Free is what the archive's free blocks and `host_free` (bytes that the host's file system has left) give together.
    /// Blocks of headers and commit ring are nobody's.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        let (blocks, used) = self.volume.space();
        let layout: u64 = RESERVED.iter().map(|(start, end)| end - start).sum();
        let free = (blocks.saturating_sub(layout + used) * BLOCK).saturating_add(host_free);
        let inodes = self.volume.state().inodes();
        let free_inodes = (free / BYTES_PER_INODE).min(MAX_INO.saturating_sub(inodes));
        Ok(Statistics {
            total: (used * BLOCK).saturating_add(free),
            free,
            // Like f_files of statfs(2): those in use and those that there is room for.
            inodes: inodes + free_inodes,
            free_inodes,
        })
    }
}
