//! What an open archive holds in memory and on the host, told without waiting for either.

use crate::error::{CacheStats, Result};
use crate::format::{BLOCK, Ino};
use crate::fs::{FileSystem, Usage};

impl FileSystem {
    /// Figures for an operator. Asks nothing of the host and waits for no lock that is held while the host works.
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

    /// Reads what [`Usage`] tells of snapshots from then on.
    ///
    /// # Errors
    /// `Damaged`, those of the host.
    pub fn look_at_snapshots(&self) -> Result<()> {
        self.volume.look_at_snapshots()
    }

    /// The highest inode number that was ever given out.
    pub fn newest_inode(&self) -> Ino {
        Ino(self.volume.state().counters.next_ino.saturating_sub(1))
    }

    /// Forgets what was decrypted and is not changed: pages of files, heads and nodes of trees.
    pub fn forget_plaintext(&self) {
        self.volume.forget_plaintext();
    }

    /// Runs `f` with a buffer for [`FileSystem::read_into`] that is kept for the next caller, and
    /// wiped with [`FileSystem::wipe_buffers`], by `purge` and by `forget_plaintext`.
    pub fn with_read_buffer<R>(&self, f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.volume.with_read_buffer(f)
    }

    /// Wipes the data of reads that is left in buffers: deleted content does not stay there until
    /// the next read overwrites it.
    pub fn wipe_buffers(&self) {
        self.volume.wipe_buffers();
    }
}

impl Usage {
    /// What counts against the cap of memory, in bytes.
    pub fn memory(&self) -> u64 {
        let cache = |cache: &CacheStats| cache.bytes;
        cache(&self.cells) + cache(&self.heads) + cache(&self.nodes) + self.dirty_bytes + self.map_bytes
    }
}
