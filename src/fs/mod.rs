//! POSIX objects on transactions: inodes, directories, xattrs and file data; no kernel types.

pub(crate) mod acl;
mod batch;
mod check;
mod closing;
mod directory;
mod extents;
mod filled;
mod inode;
mod layer;
mod ops;
mod packing;
mod plan;
mod presence;
pub(crate) mod ranges;
mod reclaim;
mod repack;
mod sealers;
mod staging;
#[cfg(test)]
mod tests;
mod truncate;
mod types;
mod writeout;

pub(crate) use check::{Reading, Structure};
pub(crate) use directory::name_hash;
#[cfg(test)]
pub(crate) use directory::{index_key, list_key};
pub use ops::{BegunSync, MAX_SMALL_FILE, NewFile};
pub use types::*;

use std::sync::Arc;

use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::Generation;
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
    pub(crate) name_key: [u8; 16],
    staging: staging::Staging,
    filled: filled::Filled,
    handles: inode::OpenHandles,
    reclaim: reclaim::Queue,
    repack: repack::Repack,
    closing: closing::Closing,
    /// How many write staged data out at once.
    threads: usize,
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
            filled: filled::Filled::default(),
            handles: inode::OpenHandles::default(),
            reclaim: reclaim::Queue::default(),
            repack: repack::Repack::default(),
            closing: closing::Closing::default(),
            threads: sealers::processors(),
        });
        if fs.volume.read_only() {
            return Ok(fs);
        }
        // Weak: the volume belongs to the file system, not the other way round.
        let flusher = Arc::downgrade(&fs);
        fs.volume.set_flusher(Box::new(move |op| flusher.upgrade().map_or(Ok(()), |fs| fs.flush(op))));
        let reclaimer = Arc::downgrade(&fs);
        fs.volume.set_reclaimer(Box::new(move || reclaimer.upgrade().map_or(Ok(false), |fs| fs.reclaim_for_room())));
        fs.queue_left_over()?;
        let durable = fs.volume.durable();
        if !durable.closed && durable.generation != Generation(0) {
            fs.search_partly_named();
        }
        Ok(fs)
    }

    /// Writes the root directory of a new archive (mode 0755, owned by `creator`).
    pub(crate) fn format(&self, creator: Creator) -> Result<()> {
        self.make_root(creator)
    }

    /// Makes everything durable, reclaims what is unlinked, erases free space and writes the closed record. Nobody has anything open by now,
    /// whoever did not say so is gone. Waits for calls of [`FileSystem::purge`] and [`FileSystem::make_durable`]; later ones fail.
    ///
    /// # Errors
    /// That of closing the volume, else that of reclaim: what cannot be reclaimed stays for the next session; else that of repacking: what
    /// deleted files left on shared pages then stays until `purge` finds it.
    pub fn close(&self) -> Result<()> {
        let _closing = self.closing.begin();
        let mut reclaimed = if self.volume.read_only() { Ok(true) } else { self.forget_handles().map(|()| true) };
        while !self.volume.read_only() && matches!(reclaimed, Ok(true)) {
            reclaimed = self.reclaim_step();
        }
        let repacked = if self.volume.read_only() { Ok(()) } else { self.repack_at_the_end() };
        self.volume.close().map_err(|error| self.told(error))?;
        reclaimed.map(drop).and(repacked)
    }

    fn repack_at_the_end(&self) -> Result<()> {
        // What is staged may take the place of packed files.
        if self.volume.is_dirty() {
            self.volume.commit()?;
            self.staging.sweep(&self.volume);
        }
        match self.repack_all(false) {
            // For `check` to report; closing need not fail for it.
            Err(Error::Damaged(reason)) => {
                tracing::warn!("not all pages of small files could be looked at: {reason}");
                Ok(())
            }
            repacked => repacked,
        }
    }

    /// Makes everything durable, reclaims what is unlinked and erases all free space, without waiting for its age. What is deleted while it
    /// runs may be erased only later.
    ///
    /// # Errors
    /// `ReadOnly`, `NoSpace`, `Latched`; `Invalid` when the archive is being closed.
    pub fn purge(&self) -> Result<()> {
        let _work = self.closing.work()?;
        while self.reclaim_step()? {
            self.closing.check()?;
        }
        self.commit_all()?;
        let repacked = self.repack_all(true);
        self.volume.commit()?;
        // What could not be repacked keeps nothing else from being erased.
        self.volume.erase_everything()?;
        repacked
    }

    /// One background step: reclaim of orphans and trims, repacking of pages that deleted files left bytes on, then [`Volume::maintain`]. Returns whether work is left.
    pub fn maintain(&self) -> Result<bool> {
        if self.volume.read_only() {
            return Ok(false);
        }
        let reclaimed = self.reclaim_step();
        let repacked = self.repack_step();
        let left = self.volume.maintain();
        // What went wrong first is the cause of the others.
        reclaimed?;
        Ok(left? || repacked? || self.reclaim_pending())
    }
}
