//! Shared state of the request handlers, and the replies that many requests have in common.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use fuser::{FileHandle, FopenFlags, INodeNo, OpenFlags, ReplyAttr, ReplyEntry};
use lockbox::Result;
use lockbox::fs::{Attributes, FileSystem, SyncProfile};

use super::activity::Activity;
use super::handle_for;
use super::open_directories::OpenDirectories;
use super::removed_capabilities::RemovedCapabilities;
use super::sync::SyncQueue;
use crate::convert::{GENERATION, ino, may_write, updates_atime};
use crate::errno::errno;
use crate::event_loop::{InFlight, LoopScheduler};
use crate::kernel_cache::KernelCache;
use crate::options::SnapshotDir;
use crate::process_info::ProcessInfoClient;

/// Mount options that affect how requests are served.
#[derive(Clone, Copy)]
pub struct ServeOptions {
    pub profile: SyncProfile,
    /// Update atime when a file is opened for reading.
    pub access_times: bool,
    /// Whether the root contains `.snapshots`, and lists it.
    pub snapshot_dir: SnapshotDir,
}

/// Serves one archive to the kernel.
pub struct Adapter {
    pub(super) fs: Arc<FileSystem>,
    pub(super) cache: Arc<KernelCache>,
    pub(super) activity: Arc<Activity>,
    /// Directory of the archive file, opened before mounting because a path could lead through the
    /// mount itself. None for a remote archive, for which the host's free space does not matter.
    pub(super) host: Option<OwnedFd>,
    pub(super) process_info: Arc<ProcessInfoClient>,
    pub(super) profile: SyncProfile,
    pub(super) access_times: bool,
    pub(super) snapshot_dir: SnapshotDir,
    pub(super) open_directories: Arc<OpenDirectories>,
    pub(super) scheduler: Arc<LoopScheduler>,
    /// None for a read-only mount.
    pub(super) sync_queue: Option<SyncQueue>,
    pub(super) removed_capabilities: RemovedCapabilities,
}

impl Adapter {
    /// # Errors
    /// Fails if a thread cannot be started.
    pub fn new(
        fs: Arc<FileSystem>,
        cache: Arc<KernelCache>,
        activity: Arc<Activity>,
        host: Option<OwnedFd>,
        process_info: ProcessInfoClient,
        options: ServeOptions,
        scheduler: LoopScheduler,
    ) -> std::io::Result<Adapter> {
        let open_directories = Arc::default();
        let scheduler = Arc::new(scheduler);
        let writes = !fs.read_only();
        let sync_queue =
            writes.then(|| SyncQueue::start(Arc::clone(&fs), Arc::clone(&scheduler), host.is_none())).transpose()?;
        let ServeOptions { profile, access_times, snapshot_dir } = options;
        Ok(Adapter {
            fs,
            cache,
            activity,
            host,
            process_info: Arc::new(process_info),
            profile,
            access_times,
            snapshot_dir,
            open_directories,
            scheduler,
            sync_queue,
            removed_capabilities: RemovedCapabilities::default(),
        })
    }

    /// Opens a file of the live tree for open(2).
    pub(super) fn open_file(&self, number: INodeNo, flags: OpenFlags) -> Result<(FileHandle, FopenFlags)> {
        self.fs.open(ino(number))?;
        self.activity.file_opened();
        if may_write(flags) {
            self.cache.begin_writing(number);
        }
        if updates_atime(flags) {
            self.note_access(number);
        }
        Ok((handle_for(flags), self.cache.open_flags()))
    }

    /// Starts a request that counts as use of the mount.
    pub(super) fn begin_request(&self) -> InFlight<'_> {
        self.activity.record_request();
        self.scheduler.begin_request()
    }

    /// Starts a request that changes something and may have to wait for a commit.
    pub(super) fn begin_change(&self) -> InFlight<'_> {
        let in_flight = self.begin_request();
        if self.fs.may_wait() {
            in_flight.mark_long();
        }
        in_flight
    }

    pub(super) fn reply_entry(&self, result: Result<Attributes>, reply: ReplyEntry) {
        match result {
            Ok(a) => {
                let (attributes, name) = (self.cache.attribute_timeout(a.ino.0), self.cache.entry_timeout());
                reply.entry_with_ttls(&attributes, &name, &self.cache.to_file_attr(&a), GENERATION);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    pub(super) fn reply_attributes(&self, result: Result<Attributes>, reply: ReplyAttr) {
        match result {
            Ok(a) => reply.attr(&self.cache.attribute_timeout(a.ino.0), &self.cache.to_file_attr(&a)),
            Err(error) => reply.error(errno(&error)),
        }
    }

    /// Updates atime. Reading continues if that fails (full disk, latch); damage is logged by
    /// `errno`.
    pub(super) fn note_access(&self, number: INodeNo) {
        if !self.access_times {
            return;
        }
        match self.fs.note_access(ino(number)) {
            Ok(false) => {}
            // The kernel caches attributes without expiry, and this reply carries no new ones.
            Ok(true) => self.cache.invalidate_attributes(number),
            Err(error) => drop(errno(&error)),
        }
    }

    /// Returns the host's free space. If the host does not report it, only the archive's own free
    /// blocks can be promised.
    pub(super) fn host_free(&self) -> u64 {
        let host = self.host.as_ref().and_then(|host| nix::sys::statvfs::fstatvfs(host).ok());
        host.map_or(0, |s| s.blocks_available() * s.fragment_size())
    }
}
