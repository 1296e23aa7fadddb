//! What requests are served with: the file system, what the threads share, and the answers that many requests have in common.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuser::{Generation, INodeNo, ReplyAttr, ReplyEntry};
use lockbox::Result;
use lockbox::format::Ino;
use lockbox::fs::{Attributes, FileSystem, SyncProfile};

use super::Activity;
use super::listings::Listings;
use super::syncs::Syncs;
use crate::callers::Callers;
use crate::errno::errno;
use crate::kernel_cache::{FOR_EVER, KernelCache};
use crate::pace::{Pace, Turn};

pub(super) const GENERATION: Generation = Generation(0);

/// Serves one archive to the kernel.
pub struct Adapter {
    pub(super) fs: Arc<FileSystem>,
    pub(super) cache: Arc<KernelCache>,
    pub(super) activity: Arc<Activity>,
    /// The directory of the archive file, opened before mounting: a path could lead through the mount itself.
    host: OwnedFd,
    pub(super) callers: Callers,
    pub(super) profile: SyncProfile,
    /// Opening for reading is noted as access.
    pub(super) access_times: bool,
    pub(super) listings: Listings,
    pub(super) pace: Arc<Pace>,
    pub(super) syncs: Syncs,
}

impl Adapter {
    /// # Errors
    /// Those of starting a thread.
    pub fn new(
        fs: Arc<FileSystem>,
        cache: Arc<KernelCache>,
        activity: Arc<Activity>,
        host: OwnedFd,
        callers: Callers,
        profile: SyncProfile,
        access_times: bool,
        pace: Pace,
    ) -> std::io::Result<Adapter> {
        let listings = Listings::default();
        let pace = Arc::new(pace);
        let syncs = Syncs::start(Arc::clone(&fs), Arc::clone(&pace))?;
        Ok(Adapter { fs, cache, activity, host, callers, profile, access_times, listings, pace, syncs })
    }

    /// A request that somebody's use of the mount makes.
    pub(super) fn begin(&self) -> Turn<'_> {
        self.activity.note();
        self.pace.begin()
    }

    /// A request that changes something, which may have to wait for a commit.
    pub(super) fn begin_change(&self) -> Turn<'_> {
        let turn = self.begin();
        if self.fs.may_wait() {
            turn.long();
        }
        turn
    }

    pub(super) fn reply_entry(&self, result: Result<Attributes>, reply: ReplyEntry) {
        match result {
            Ok(a) => reply.entry_with_ttls(&self.cache.lifetime(a.ino.0), &FOR_EVER, &self.cache.told(&a), GENERATION),
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn reply_attributes(&self, result: Result<Attributes>, reply: ReplyAttr) {
        match result {
            Ok(a) => reply.attr(&self.cache.lifetime(a.ino.0), &self.cache.told(&a)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Reading goes on when its time cannot be noted (full disk, latch); damage is logged by `errno`.
    pub(super) fn note_access(&self, number: INodeNo) {
        if !self.access_times {
            return;
        }
        match self.fs.note_access(Ino(number.0)) {
            Ok(false) => {}
            // The kernel keeps attributes for ever and no reply here carries new ones.
            Ok(true) => self.cache.invalidate_attributes(number),
            Err(error) => drop(errno(&error)),
        }
    }

    /// Without an answer of the host nothing can be promised beyond the archive's own free blocks.
    pub(super) fn host_free(&self) -> u64 {
        nix::sys::statvfs::fstatvfs(&self.host).map_or(0, |s| s.blocks_available() * s.fragment_size())
    }
}
