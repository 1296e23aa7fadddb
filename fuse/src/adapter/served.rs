//! What requests are served with: the file system, what the threads share, and the answers that many requests have in common.

use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fuser::{Generation, Notifier, ReplyAttr, ReplyEntry};
use lockbox::Result;
use lockbox::fs::{Attributes, FileSystem, SyncProfile};

use super::listings::Listings;
use super::nameless::Nameless;
use super::syncs::Syncs;
use super::{Activity, Writers};
use crate::callers::Callers;
use crate::errno::errno;
use crate::pace::{Pace, Turn};

/// As good as for ever: nothing changes an archive but the mount itself. 34 years; the kernel computes in jiffies.
pub(super) const FOR_EVER: Duration = Duration::from_secs(1 << 30);
pub(super) const GENERATION: Generation = Generation(0);

/// What the adapter shares with the threads around it.
#[derive(Default)]
pub struct Shared {
    pub writers: Writers,
    pub activity: Activity,
    /// Set once the session is there.
    pub notifier: OnceLock<Notifier>,
}

/// Serves one archive to the kernel.
pub struct Adapter {
    pub(super) fs: Arc<FileSystem>,
    pub(super) shared: Arc<Shared>,
    /// The directory of the archive file, opened before mounting: a path could lead through the mount itself.
    host: OwnedFd,
    pub(super) callers: Callers,
    pub(super) profile: SyncProfile,
    /// Opening for reading is noted as access.
    pub(super) access_times: bool,
    pub(super) listings: Listings,
    pub(super) nameless: Nameless,
    pub(super) pace: Arc<Pace>,
    pub(super) syncs: Syncs,
}

impl Adapter {
    /// # Errors
    /// Those of starting a thread.
    pub fn new(
        fs: Arc<FileSystem>,
        shared: Arc<Shared>,
        host: OwnedFd,
        callers: Callers,
        profile: SyncProfile,
        access_times: bool,
        pace: Pace,
    ) -> std::io::Result<Adapter> {
        let listings = Listings::default();
        let pace = Arc::new(pace);
        let syncs = Syncs::start(Arc::clone(&fs), Arc::clone(&pace))?;
        let nameless = Nameless::default();
        Ok(Adapter { fs, shared, host, callers, profile, access_times, listings, nameless, pace, syncs })
    }

    /// A request that somebody's use of the mount makes.
    pub(super) fn begin(&self) -> Turn<'_> {
        self.shared.activity.note();
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

    /// Of attributes that come with another answer: the kernel asks for those of an inode with writers when it wants them.
    pub(super) fn attribute_time(&self, ino: u64) -> Duration {
        if self.shared.writers.has(ino) { Duration::ZERO } else { FOR_EVER }
    }

    pub(super) fn reply_entry(&self, result: Result<Attributes>, reply: ReplyEntry) {
        match result {
            Ok(a) => reply.entry_with_ttls(&self.attribute_time(a.ino.0), &FOR_EVER, &self.shared.told(&a), GENERATION),
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn reply_attributes(&self, result: Result<Attributes>, reply: ReplyAttr) {
        match result {
            Ok(a) => reply.attr(&self.attribute_time(a.ino.0), &self.shared.told(&a)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Without an answer of the host nothing can be promised beyond the archive's own free blocks.
    pub(super) fn host_free(&self) -> u64 {
        nix::sys::statvfs::fstatvfs(&self.host).map_or(0, |s| s.blocks_available() * s.fragment_size())
    }
}
