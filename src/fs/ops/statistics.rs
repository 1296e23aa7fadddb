//! statfs.

use crate::error::Result;
use crate::format::{BLOCK, MAX_INO, RESERVED};
use crate::fs::{FileSystem, Statistics};

impl FileSystem {
    /// Free is what the archive's free blocks and `host_free` (bytes that the host's file system has left) give together.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        let (total, used) = self.volume.space();
        let layout: u64 = RESERVED.iter().map(|(start, end)| end - start).sum();
        let free = (total - layout).saturating_sub(used) * BLOCK + host_free;
        let inodes = self.volume.state().inodes();
        Ok(Statistics {
            total: used * BLOCK + free,
            free,
            inodes: MAX_INO.min(inodes + free / BLOCK),
            free_inodes: free / BLOCK,
        })
    }
}
