//! POSIX objects on transactions: inodes, directories, xattrs and file data; no kernel types.

pub(crate) mod acl;
mod batch;
mod check;
mod directory;
mod extents;
mod inode;
mod layer;
mod ops;
mod plan;
mod presence;
mod reclaim;
mod staging;
#[cfg(test)]
mod tests;
mod truncate;
mod types;
mod writeout;

pub use types::*;

use std::sync::Arc;

use crate::env::Environment;
use crate::error::Result;
use crate::txn::Volume;

/// How a file system is opened.
#[derive(Clone, Copy, Debug)]
pub struct FsOptions {
    /// Bytes of staged file data at most.
    pub staged_bytes: u64,
    pub sync: SyncProfile,
    /// Pack small files into shared pages.
    pub pack: bool,
    pub compress: bool,
}

/// The mounted (or otherwise used) file system of one open archive. All methods may be called from several threads.
pub struct FileSystem {
    pub(crate) volume: Arc<Volume>,
    pub(crate) environment: Arc<dyn Environment>,
    pub(crate) options: FsOptions,
    /// Key of the directory and xattr name hashes.
    name_key: [u8; 16],
    staging: staging::Staging,
    handles: inode::OpenHandles,
    reclaim: reclaim::Queue,
}

impl FileSystem {
    /// Takes over an open volume: registers the flusher and queues orphans and trims of the last session for reclaim.
    pub(crate) fn new(
        volume: Arc<Volume>,
        environment: Arc<dyn Environment>,
        name_key: [u8; 16],
        options: FsOptions,
    ) -> Result<Arc<FileSystem>> {
        let fs = Arc::new(FileSystem {
            volume,
            environment,
            options,
            name_key,
            staging: staging::Staging::new(),
            handles: inode::OpenHandles::default(),
            reclaim: reclaim::Queue::default(),
        });
        if fs.volume.read_only() {
            return Ok(fs);
        }
        // Weak: the volume belongs to the file system, not the other way round.
        let flusher = Arc::downgrade(&fs);
        fs.volume.set_flusher(Box::new(move |op| flusher.upgrade().map_or(Ok(()), |fs| fs.flush(op))));
        fs.queue_left_over()?;
        Ok(fs)
    }

    /// Writes the root directory of a new archive (mode 0755, owned by `creator`).
    pub(crate) fn format(&self, creator: Creator) -> Result<()> {
        self.make_root(creator)
    }

    /// Makes everything durable, reclaims what is unlinked, erases free space and writes the closed record.
    ///
    /// # Errors
    /// That of closing the volume, else that of reclaim: what cannot be reclaimed stays for the next session.
    pub fn close(&self) -> Result<()> {
        let mut reclaimed = Ok(true);
        while !self.volume.read_only() && matches!(reclaimed, Ok(true)) {
            reclaimed = self.reclaim_step();
        }
        self.volume.close()?;
        reclaimed.map(drop)
    }

    /// Makes everything durable, reclaims what is unlinked and erases all free space, without waiting for its age. What is deleted while it
    /// runs may be erased only later.
    ///
    /// # Errors
    /// `ReadOnly`, `NoSpace`, `Latched`.
    pub fn purge(&self) -> Result<()> {
        while self.reclaim_step()? {}
        self.volume.commit()?;
        self.staging.sweep(&self.volume)?;
        self.volume.erase_all()
    }

    /// One background step: reclaim of orphans and trims, then [`Volume::maintain`]. Returns whether work is left.
    pub fn maintain(&self) -> Result<bool> {
        if self.volume.read_only() {
            return Ok(false);
        }
        let reclaimed = self.reclaim_step();
        let left = self.volume.maintain()?;
        reclaimed?;
        Ok(left || self.reclaim_pending())
    }
}
