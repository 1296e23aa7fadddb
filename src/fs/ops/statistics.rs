//! statfs.

use crate::error::Result;
use crate::format::{BLOCK, MAX_INO};
use crate::fs::{FileSystem, Statistics};

/// Bytes that a new empty file takes in the leaves: inode 144, index and list about 30 each with keys of 17, leaves two thirds full.
const BYTES_PER_INODE: u64 = 384;

impl FileSystem {
    /// Free is what the archive's free blocks and `host_free` (bytes that the host's file system has left) give together.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        let (blocks, used) = self.volume.space();
        let free = (blocks.saturating_sub(used) * BLOCK).saturating_add(host_free);
        let inodes = self.volume.state().inodes();
        Ok(Statistics {
            total: (used * BLOCK).saturating_add(free),
            free,
            inodes,
            free_inodes: (free / BYTES_PER_INODE).min(MAX_INO.saturating_sub(inodes)),
        })
    }
}
