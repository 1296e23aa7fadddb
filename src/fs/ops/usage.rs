//! Memory and host space of an open archive, read without waiting for either.

use crate::error::{CacheUse, Result};
use crate::format::{BLOCK, Ino};
use crate::fs::{FileSystem, Usage};

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
            used_bytes: blocks.as_ref().map(|(blocks, _)| blocks.taken.saturating_mul(BLOCK)),
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
        let cache = |cache: &CacheUse| cache.bytes;
        cache(&self.cells) + cache(&self.heads) + cache(&self.nodes) + self.dirty_bytes + self.map_bytes
    }
}
