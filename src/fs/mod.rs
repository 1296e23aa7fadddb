//! POSIX objects on transactions: inodes, directories, xattrs and file data; no kernel types.

mod check;
mod directory;
mod extents;
mod inode;
mod ops;
mod reclaim;
mod staging;
#[cfg(test)]
mod tests;
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
}

impl FileSystem {
    /// Takes over an open volume: registers the flusher and queues orphans and trims of the last session for reclaim.
    pub(crate) fn new(
        volume: Arc<Volume>,
        environment: Arc<dyn Environment>,
        name_key: [u8; 16],
        options: FsOptions,
    ) -> Result<Arc<FileSystem>> {
        let (staging, handles) = (staging::Staging, inode::OpenHandles::default());
        Ok(Arc::new(FileSystem { volume, environment, options, name_key, staging, handles }))
    }

    /// Writes the root directory of a new archive (mode 0755, owned by `creator`).
    pub(crate) fn format(&self, creator: Creator) -> Result<()> {
        self.make_root(creator)
    }

    /// Makes everything durable, reclaims what is unlinked, erases free space and writes the closed record.
    pub fn close(&self) -> Result<()> {
        self.volume.close()
    }

    /// One background step: reclaim of orphans and trims, then [`Volume::maintain`]. Returns whether work is left.
    pub fn maintain(&self) -> Result<bool> {
        self.volume.maintain()
    }
}
