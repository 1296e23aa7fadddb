//! Shared state of the request handlers, the choice between the live tree and snapshots, and the
//! replies that many requests have in common.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};

use fuser::{FileHandle, FopenFlags, INodeNo, OpenFlags, ReplyAttr, ReplyEmpty, ReplyEntry, Request};
use lockbox::fs::{Attributes, FileSystem, SyncProfile};
use lockbox::fs::{Ino, ROOT_INO};
use lockbox::{Error, Result};
use lockbox_host::mount_options::SnapshotDir;
use parking_lot::Mutex;

use super::handle_for;
use super::sync::SyncQueue;
use crate::convert::{GENERATION, errno, ino, may_write, updates_atime};
use crate::event_loop::{InFlight, LoopScheduler, ReadQueue};
use crate::kernel_cache::KernelCache;
use crate::kernel_cache::snapshot_inodes::is_live;
use crate::mount_agent::ProcessInfoClient;

/// Mount options that affect how requests are served.
#[derive(Clone, Copy)]
pub struct ServeOptions {
    pub profile: SyncProfile,
    /// Update atime when a file is opened for reading.
    pub access_times: bool,
    /// Whether the root contains `.snapshots`, and lists it.
    pub snapshot_dir: SnapshotDir,
}

/// Name of the directory of snapshots, in the root.
pub(super) const SNAPSHOT_DIR_NAME: &[u8] = b".snapshots";
/// Free space of a store: a PiB, which all programs display and can add to.
const STORE_FREE: u64 = 1 << 50;

/// Serves one archive to the kernel.
pub struct Adapter {
    pub(super) fs: Arc<FileSystem>,
    pub(super) cache: Arc<KernelCache>,
    pub(super) activity: Arc<Activity>,
    /// Directory of the archive file, opened before mounting because a path could lead through the
    /// mount itself. None for a remote archive, which needs no space of the host.
    pub(super) host: Option<OwnedFd>,
    pub(super) process_info: Arc<ProcessInfoClient>,
    pub(super) options: ServeOptions,
    pub(super) open_directories: Arc<OpenDirectories>,
    pub(super) scheduler: Arc<LoopScheduler>,
    pub(super) reads: Arc<ReadQueue>,
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
        let scheduler = Arc::new(scheduler);
        let process_info = Arc::new(process_info);
        let sync_queue = match fs.read_only() {
            true => None,
            false => {
                let callers = host.is_none().then(|| Arc::clone(&process_info));
                Some(SyncQueue::start(Arc::clone(&fs), Arc::clone(&scheduler), callers)?)
            }
        };
        Ok(Adapter {
            fs,
            cache,
            activity,
            host,
            process_info,
            options,
            open_directories: Arc::default(),
            scheduler,
            reads: Arc::default(),
            sync_queue,
            removed_capabilities: RemovedCapabilities::default(),
        })
    }

    /// Returns the inode to change. Errors: `ReadOnly` for inodes in `.snapshots`.
    pub(super) fn live_inode(&self, number: INodeNo) -> Result<Ino> {
        if is_live(number.0) { Ok(Ino(number.0)) } else { Err(Error::ReadOnly("the content of a snapshot".into())) }
    }

    /// Returns the directory in which a name is to be created. Errors: as of
    /// [`Adapter::live_inode`]; `Exists` for `.snapshots`.
    pub(super) fn create_parent(&self, parent: INodeNo, name: &OsStr) -> Result<Ino> {
        if self.is_snapshot_dir(parent, name) { Err(Error::Exists) } else { self.live_inode(parent) }
    }

    /// Returns the directory in which a name is to be removed or replaced. Errors: as of
    /// [`Adapter::live_inode`], also for `.snapshots`.
    pub(super) fn change_parent(&self, parent: INodeNo, name: &OsStr) -> Result<Ino> {
        if self.is_snapshot_dir(parent, name) {
            return Err(Error::ReadOnly("the directory of the snapshots".into()));
        }
        self.live_inode(parent)
    }

    /// Returns whether the name is `.snapshots` of the root.
    pub(super) fn is_snapshot_dir(&self, parent: INodeNo, name: &OsStr) -> bool {
        parent.0 == ROOT_INO.0 && self.options.snapshot_dir != SnapshotDir::Off && name.as_bytes() == SNAPSHOT_DIR_NAME
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

    /// Replies when all previous changes are durable. Snapshots always are.
    pub(super) fn reply_fsync(&self, request: &Request, number: INodeNo, reply: ReplyEmpty) {
        let in_flight = self.begin_request();
        match &self.sync_queue {
            Some(sync_queue) if is_live(number.0) => sync_queue.submit(request, &in_flight, reply),
            _ => reply.ok(),
        }
    }

    /// Updates atime. Reading continues if that fails (full disk, latch); damage is logged by
    /// `errno`.
    pub(super) fn note_access(&self, number: INodeNo) {
        if !self.options.access_times {
            return;
        }
        match self.fs.note_access(ino(number)) {
            Ok(false) => {}
            // The kernel caches attributes without expiry, and this reply carries no new ones.
            Ok(true) => self.cache.invalidate_attributes(number),
            Err(error) => drop(errno(&error)),
        }
    }
}

/// Returns the free space of the archive's host. If the host does not report it, only the archive's
/// own free blocks can be promised. A store (None) has no free space to report, so that of
/// `size-limit=` alone counts.
pub(super) fn free_bytes(host: Option<&OwnedFd>) -> u64 {
    let Some(host) = host else { return STORE_FREE };
    nix::sys::statvfs::fstatvfs(host).map_or(0, |s| s.blocks_available() * s.fragment_size())
}

/// Flags of the consumers of [`Activity`]: the idle timer and the replica poller.
const IDLE: u8 = 1;
const REPLICA: u8 = 2;
const ALL: u8 = IDLE | REPLICA;

/// Use of one mount: requests since the last check, and the number of open handles. Recording a
/// request costs one load, unless a consumer has checked since the last request.
#[derive(Default)]
pub struct Activity {
    /// Flags of the consumers that have not seen the last request yet.
    used: AtomicU8,
    files: AtomicU64,
    directories: AtomicU64,
    commands: AtomicU64,
}

/// A command on the control socket that uses the archive, such as a backup.
pub(crate) struct RunningCommand<'a>(&'a Activity);

impl Drop for RunningCommand<'_> {
    fn drop(&mut self) {
        self.0.record_request();
        self.0.commands.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Activity {
    pub(crate) fn begin_command(&self) -> RunningCommand<'_> {
        self.commands.fetch_add(1, Ordering::Relaxed);
        RunningCommand(self)
    }

    /// Returns whether a file, a directory or a command is open.
    pub(crate) fn is_open(&self) -> bool {
        self.open_files() + self.open_directories() + self.commands.load(Ordering::Relaxed) > 0
    }

    fn record_request(&self) {
        if self.used.load(Ordering::Relaxed) != ALL {
            self.used.store(ALL, Ordering::Relaxed);
        }
    }

    /// Returns whether a request came since the last call.
    pub(crate) fn take_idle_flag(&self) -> bool {
        self.take_flag(IDLE)
    }

    /// Returns the same for the replica poller.
    pub(crate) fn take_replica_flag(&self) -> bool {
        self.take_flag(REPLICA)
    }

    fn take_flag(&self, bit: u8) -> bool {
        self.used.fetch_and(!bit, Ordering::Relaxed) & bit != 0
    }

    pub fn open_files(&self) -> u64 {
        self.files.load(Ordering::Relaxed)
    }

    pub fn open_directories(&self) -> u64 {
        self.directories.load(Ordering::Relaxed)
    }

    pub(super) fn file_opened(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn file_closed(&self) {
        self.files.fetch_sub(1, Ordering::Relaxed);
    }

    pub(super) fn directory_opened(&self) {
        self.directories.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn directory_closed(&self) {
        self.directories.fetch_sub(1, Ordering::Relaxed);
    }
}

const SHARDS: usize = 16;

/// End of the listing of each open directory, by handle.
#[derive(Default)]
pub(crate) struct OpenDirectories {
    last: AtomicU64,
    shards: [Mutex<HashMap<u64, u64>>; SHARDS],
}

impl OpenDirectories {
    fn shard(&self, handle: u64) -> &Mutex<HashMap<u64, u64>> {
        &self.shards[handle as usize % SHARDS]
    }

    /// Opens a listing that ends before `bound`.
    pub(crate) fn open(&self, bound: u64) -> u64 {
        let handle = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        self.shard(handle).lock().insert(handle, bound);
        handle
    }

    pub(crate) fn bound(&self, handle: u64) -> Option<u64> {
        self.shard(handle).lock().get(&handle).copied()
    }

    /// Sets a new end: rewinddir(3) must see entries created since opendir(3).
    pub(crate) fn rewind(&self, handle: u64, bound: u64) {
        self.shard(handle).lock().insert(handle, bound);
    }

    pub(crate) fn close(&self, handle: u64) {
        self.shard(handle).lock().remove(&handle);
    }
}

/// Maximum number of threads between the two requests, far more than there are event loops.
const MAX_REMEMBERED: usize = 64;

/// File capabilities that the kernel removed for a chown(2) that may still be refused, so that they
/// can be restored.
///
/// If set-id bits are to be cleared, the kernel removes `security.capability` before it requests
/// the change of the inode: REMOVEXATTR, then SETATTR, both by the calling thread under the inode's
/// lock. A `chown(-1, -1)` by a user other than the owner is refused only in the second step
/// (`privileges.rs`). Other file systems refuse before anything has changed.
///
/// # Scope
/// 1. Only capabilities removed for a thread without CAP_SETFCAP: the thread cannot remove them
///    itself, so the kernel did.
/// 2. Only for the very next change of the inode, by the same thread. Any other change drops the
///    remembered capabilities, except the kernel's own flush of the times that the removal changed.
///    So a reused thread number finds nothing, unless the file was not changed meanwhile.
/// 3. Nothing after a crash between the two requests: fewer privileges are the safe side.
#[derive(Default)]
pub(super) struct RemovedCapabilities {
    removed: Mutex<VecDeque<RemovedCapability>>,
    /// Length of the queue; lets writes skip the lock.
    count: AtomicUsize,
}

struct RemovedCapability {
    file: Ino,
    thread: u32,
    value: Vec<u8>,
}

impl RemovedCapabilities {
    pub(super) fn record(&self, file: Ino, thread: u32, value: Vec<u8>) {
        let mut removed = self.removed.lock();
        removed.retain(|other| other.file != file);
        if removed.len() == MAX_REMEMBERED {
            removed.pop_front();
        }
        removed.push_back(RemovedCapability { file, thread, value });
        self.count.store(removed.len(), Ordering::Release);
    }

    /// Returns the value removed from the file for this thread, and forgets the values removed from
    /// it for any thread.
    pub(super) fn take(&self, file: Ino, thread: u32) -> Option<Vec<u8>> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut removed = self.removed.lock();
        let at = removed.iter().position(|removed| removed.file == file)?;
        let found = removed.remove(at)?;
        self.count.store(removed.len(), Ordering::Release);
        (found.thread == thread && thread != 0).then_some(found.value)
    }

    pub(super) fn forget(&self, file: Ino) {
        drop(self.take(file, 0));
    }
}

#[cfg(test)]
mod tests {
    use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::fs::mode;
    use lockbox::keys;

    use super::*;
    use crate::snapshot_requests::tests::CREATOR;

    #[test]
    fn a_store_has_the_room_that_the_size_limit_leaves() {
        let place = tempfile::tempdir().unwrap();
        let (path, passphrase) = (place.path().join("a.lbx"), Passphrase::new(b"a passphrase".to_vec()));
        Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator: CREATOR }).unwrap();
        let key = keys::unlock(&path, &passphrase).unwrap();
        for (size_limit, fits, exceeds) in
            [(None, 1 << 40, u64::from(u32::MAX) << 30), (Some(1 << 30), 900 << 20, 1 << 30)]
        {
            let options = OpenOptions { size_limit, ..OpenOptions::default() };
            let archive = crate::tests::open_when_free(&path, &key, &options);
            let fs = archive.file_system();
            let available = fs.statistics(free_bytes(None)).unwrap().available;
            assert!(available > fits && available < exceeds, "{size_limit:?}: {available}");
            let file = fs.make_node(ROOT_INO, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
            let allocate = |length| fs.allocate(file, 0, length, false, false, free_bytes(None));
            allocate(fits).unwrap();
            assert!(matches!(allocate(exceeds), Err(Error::NoSpace(_))));
            fs.unlink(ROOT_INO, b"file").unwrap();
            archive.close().unwrap();
        }
    }

    #[test]
    fn each_handle_has_its_bound() {
        let directories = OpenDirectories::default();
        let (a, b) = (directories.open(10), directories.open(20));
        assert_eq!((directories.bound(a), directories.bound(b)), (Some(10), Some(20)));
        directories.rewind(a, 30);
        assert_eq!(directories.bound(a), Some(30));
        directories.close(a);
        assert_eq!(directories.bound(a), None);
    }

    #[test]
    fn only_the_next_change_of_the_file_by_the_same_thread_gets_it_back() {
        let removed = RemovedCapabilities::default();
        let record = |thread| removed.record(Ino(7), thread, vec![1]);
        record(5);
        assert_eq!(removed.take(Ino(8), 5), None, "another file");
        assert_eq!(removed.take(Ino(7), 5), Some(vec![1]));
        assert_eq!(removed.take(Ino(7), 5), None, "once");
        record(5);
        assert_eq!(removed.take(Ino(7), 6), None, "another thread");
        assert_eq!(removed.take(Ino(7), 5), None, "whose change came first");
        record(5);
        removed.forget(Ino(7));
        assert_eq!(removed.take(Ino(7), 5), None, "it was written");
        record(0);
        assert_eq!(removed.take(Ino(7), 0), None, "a thread that has no number here");
        (0..100).for_each(|number| removed.record(Ino(number), 5, vec![]));
        assert_eq!(removed.removed.lock().len(), MAX_REMEMBERED);
        assert_eq!((removed.take(Ino(0), 5), removed.take(Ino(99), 5)), (None, Some(vec![])));
    }
}
