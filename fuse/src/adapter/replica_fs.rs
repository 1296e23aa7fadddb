//! Replica of a remote archive: serves it while new versions of it appear.
//!
//! # Invariants
//! VERSION-1  A request is answered from one version, from its beginning to its end.
//! VERSION-2  A later request is answered from the same version or a newer one, whichever process
//!     makes it. So an open file shows the remote writes to it, as a local file shows the writes of
//!     other programs. For several files only this is promised: none goes back.
//! VERSION-3  An open inode that was removed from the newest version is answered from the last
//!     version that had it, as an unlinked file can be read through its open handles. At most
//!     [`MAX_RETAINED`] such versions are retained, because each has memory of its own; open inodes
//!     of older ones are stale (ESTALE). While it is unknown whether the newest version has the
//!     inode, it stays at its version.
//! VERSION-4  The first request after an idle period waits for a poll of the store that began after
//!     it, for [`FIRST_ANSWER_LIMIT`] at most. Polls of an idle mount are rare, so without this the
//!     first answer could be as old as the time between two of them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileHandle, INodeNo, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags,
    ReplyAttr, ReplyCreate, ReplyData, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use lockbox::Error;
use lockbox::fs::FileSystem;
use lockbox_host::mount_options::SnapshotDir;
use parking_lot::{Condvar, Mutex, RwLock};

use super::context::{Adapter, RemovedCapabilities, ServeOptions};
use super::snapshots::effective_snapshot_dir;
use crate::convert::{errno, ino};
use crate::kernel;
use crate::kernel_cache::snapshot_inodes::is_live;

/// Maximum number of old versions that are retained for open, removed inodes.
const MAX_RETAINED: usize = 4;

/// Time limit of the first answer after an idle period: a store that does not answer delays it
/// once. Some round trips of a distant store, with a new connection.
const FIRST_ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// Holds requests after an idle period until the store was polled (VERSION-4).
#[derive(Default)]
pub(crate) struct IdleGate {
    /// Set in all phases but [`IdlePhase::Open`], so that requests of a mount in use take no lock.
    is_closed: AtomicBool,
    phase: Mutex<IdlePhase>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum IdlePhase {
    #[default]
    Open,
    /// No request came for a period.
    Closed,
    /// A request waits for a poll to begin.
    Requested,
    /// A poll began after the request.
    Polling,
}

impl IdleGate {
    fn set(&self, phase: &mut IdlePhase, to: IdlePhase) {
        *phase = to;
        self.is_closed.store(to != IdlePhase::Open, Ordering::Release);
        self.changed.notify_all();
    }

    /// Has the next request wait.
    pub(crate) fn close(&self) {
        let mut phase = self.phase.lock();
        if *phase == IdlePhase::Open {
            self.set(&mut phase, IdlePhase::Closed);
        }
    }

    /// Waits until a request needs a poll, which then begins; returns false after `timeout`.
    pub(crate) fn wait_for_request(&self, timeout: Duration) -> bool {
        let mut phase = self.phase.lock();
        self.changed.wait_while_for(&mut phase, |phase| *phase != IdlePhase::Requested, timeout);
        let is_requested = *phase == IdlePhase::Requested;
        if is_requested {
            self.set(&mut phase, IdlePhase::Polling);
        }
        is_requested
    }

    /// Ends the wait after the requested poll, also after a failed one.
    pub(crate) fn open(&self) {
        self.set(&mut self.phase.lock(), IdlePhase::Open);
    }

    /// Waits for the poll, if one is needed. After `limit` this and later requests go on without.
    fn pass(&self, limit: Duration) {
        if !self.is_closed.load(Ordering::Acquire) {
            return;
        }
        let mut phase = self.phase.lock();
        if *phase == IdlePhase::Closed {
            self.set(&mut phase, IdlePhase::Requested);
        }
        if self.changed.wait_while_for(&mut phase, |phase| *phase != IdlePhase::Open, limit).timed_out() {
            self.set(&mut phase, IdlePhase::Open);
        }
    }
}

impl Adapter {
    /// Returns an adapter for another version of the archive. Everything except the file system is
    /// shared; only for read-only remote archives.
    fn with_file_system(&self, fs: Arc<FileSystem>, option: SnapshotDir) -> Adapter {
        Adapter {
            options: ServeOptions { snapshot_dir: effective_snapshot_dir(&fs, option), ..self.options },
            fs,
            cache: Arc::clone(&self.cache),
            activity: Arc::clone(&self.activity),
            host: None,
            process_info: Arc::clone(&self.process_info),
            open_directories: Arc::clone(&self.open_directories),
            scheduler: Arc::clone(&self.scheduler),
            reads: Arc::clone(&self.reads),
            sync_queue: None,
            removed_capabilities: RemovedCapabilities::default(),
        }
    }
}

/// Version of the archive; numbers increase.
struct Version {
    adapter: Adapter,
    number: u64,
}

#[derive(Default)]
struct OpenInode {
    handles: u64,
    /// Last version that had the inode; None after it was evicted.
    last: Option<Arc<Version>>,
}

impl OpenInode {
    fn set_last(&mut self, version: &Arc<Version>) {
        if self.last.as_ref().is_none_or(|last| last.number < version.number) {
            self.last = Some(Arc::clone(version));
        }
    }
}

/// Versions of the archive that a mount serves.
pub struct CurrentVersion {
    newest: RwLock<Arc<Version>>,
    open: Mutex<HashMap<u64, OpenInode>>,
    /// Value of the mount option.
    snapshot_dir: SnapshotDir,
    /// Holds the first request after an idle period.
    pub(crate) idle: IdleGate,
}

impl CurrentVersion {
    pub fn new(adapter: Adapter, snapshot_dir: SnapshotDir) -> CurrentVersion {
        let newest = RwLock::new(Arc::new(Version { adapter, number: 0 }));
        CurrentVersion { newest, open: Mutex::default(), snapshot_dir, idle: IdleGate::default() }
    }

    /// Returns the version that answers a request of the kernel about this inode (VERSION-4).
    fn requested_version(&self, number: INodeNo) -> Arc<Version> {
        self.idle.pass(FIRST_ANSWER_LIMIT);
        self.version_for(number)
    }

    fn newest(&self) -> Arc<Version> {
        Arc::clone(&self.newest.read())
    }

    /// Serves requests from this version from now on.
    pub fn publish(&self, fs: Arc<FileSystem>) {
        let before = self.newest();
        let adapter = before.adapter.with_file_system(fs, self.snapshot_dir);
        *self.newest.write() = Arc::new(Version { adapter, number: before.number + 1 });
        let open: Vec<u64> = self.open.lock().keys().copied().collect();
        for number in open {
            self.version_for(INodeNo(number));
        }
        self.evict_old_versions();
    }

    /// Evicts the oldest versions retained for removed inodes, beyond [`MAX_RETAINED`].
    fn evict_old_versions(&self) {
        let newest = self.newest().number;
        let mut open = self.open.lock();
        let lasts = open.values().filter_map(|opened| opened.last.as_ref());
        let mut held: Vec<u64> = lasts.map(|last| last.number).filter(|number| *number < newest).collect();
        held.sort_unstable();
        held.dedup();
        if let Some(least) = held.len().checked_sub(MAX_RETAINED).and_then(|at| held.get(at)) {
            let is_old = |last: &mut Arc<Version>| last.number < *least;
            open.values_mut().for_each(|opened| drop(opened.last.take_if(is_old)));
        }
    }

    pub(crate) fn file_systems(&self) -> Vec<Arc<FileSystem>> {
        let newest = self.newest();
        let open = self.open.lock();
        let lasts = open.values().filter_map(|opened| opened.last.as_ref());
        let mut versions: Vec<&Arc<Version>> = lasts.chain([&newest]).collect();
        versions.sort_unstable_by_key(|version| version.number);
        versions.dedup_by_key(|version| version.number);
        versions.iter().map(|version| Arc::clone(&version.adapter.fs)).collect()
    }

    /// Returns the version that answers requests about this inode.
    fn version_for(&self, number: INodeNo) -> Arc<Version> {
        let newest = self.newest();
        let last = self.open.lock().get(&number.0).and_then(|opened| opened.last.clone());
        let Some(last) = last.filter(|last| last.number < newest.number) else { return newest };
        // Without the lock, because this may fetch data. If the fetch fails the answer is unknown,
        // and the next request tries again.
        if let Err(Error::NotFound | Error::Stale | Error::Io { .. }) = newest.adapter.fs.attributes(ino(number)) {
            return last;
        }
        if let Some(opened) = self.open.lock().get_mut(&number.0) {
            opened.set_last(&newest);
        }
        newest
    }

    fn add_handle(&self, number: INodeNo, version: &Arc<Version>) {
        let mut open = self.open.lock();
        let opened = open.entry(number.0).or_default();
        opened.handles += 1;
        opened.set_last(version);
    }

    fn remove_handle(&self, number: INodeNo) {
        let mut open = self.open.lock();
        if let Some(opened) = open.get_mut(&number.0) {
            opened.handles -= 1;
            if opened.handles == 0 {
                open.remove(&number.0);
            }
        }
    }
}

/// Request handler of a replica mount.
pub struct ReplicaFs(pub Arc<CurrentVersion>);

/// Delegates requests whose first argument is an inode.
macro_rules! delegate {
    ($($request:ident($($argument:ident: $type:ty),*);)*) => {$(
        #[allow(clippy::too_many_arguments)]
        fn $request(&self, request: &Request, number: INodeNo, $($argument: $type),*) {
            self.0.requested_version(number).adapter.$request(request, number, $($argument),*);
        }
    )*};
}

impl fuser::Filesystem for ReplicaFs {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        kernel::negotiate(config, true);
        Ok(())
    }

    fn open(&self, request: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let version = self.0.requested_version(number);
        if !is_live(number.0) {
            return version.adapter.open(request, number, flags, reply);
        }
        let _in_flight = version.adapter.begin_request();
        match version.adapter.open_file(number, flags) {
            Ok((handle, flags)) => {
                self.0.add_handle(number, &version);
                // KERNEL-13
                version.adapter.cache.invalidate_attributes(number);
                reply.opened(handle, flags);
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn release(
        &self,
        request: &Request,
        number: INodeNo,
        handle: FileHandle,
        flags: OpenFlags,
        owner: Option<LockOwner>,
        flush: bool,
        reply: ReplyEmpty,
    ) {
        let version = self.0.requested_version(number);
        if is_live(number.0) {
            self.0.remove_handle(number);
        }
        version.adapter.release(request, number, handle, flags, owner, flush, reply);
    }

    fn opendir(&self, _: &Request, number: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let version = self.0.requested_version(number);
        let _in_flight = version.adapter.begin_request();
        match version.adapter.begin_listing(number, flags) {
            Ok(handle) => {
                if is_live(number.0) {
                    self.0.add_handle(number, &version);
                }
                reply.opened(handle, fuser::FopenFlags::empty());
            }
            Err(error) => reply.error(errno(&error)),
        }
    }

    fn releasedir(&self, request: &Request, number: INodeNo, handle: FileHandle, flags: OpenFlags, reply: ReplyEmpty) {
        if is_live(number.0) {
            self.0.remove_handle(number);
        }
        self.0.newest().adapter.releasedir(request, number, handle, flags, reply);
    }

    delegate! {
        lookup(name: &OsStr, reply: ReplyEntry);
        forget(lookups: u64);
        getattr(handle: Option<FileHandle>, reply: ReplyAttr);
        readlink(reply: ReplyData);
        read(handle: FileHandle, offset: u64, size: u32, flags: OpenFlags, owner: Option<LockOwner>, reply: ReplyData);
        flush(handle: FileHandle, owner: LockOwner, reply: ReplyEmpty);
        fsync(handle: FileHandle, only_data: bool, reply: ReplyEmpty);
        readdirplus(handle: FileHandle, offset: u64, reply: ReplyDirectoryPlus);
        fsyncdir(handle: FileHandle, only_data: bool, reply: ReplyEmpty);
        statfs(reply: ReplyStatfs);
        getxattr(name: &OsStr, size: u32, reply: ReplyXattr);
        listxattr(size: u32, reply: ReplyXattr);
        lseek(handle: FileHandle, offset: i64, whence: i32, reply: ReplyLseek);
        ioctl(handle: FileHandle, flags: IoctlFlags, order: u32, input: &[u8], size: u32, reply: ReplyIoctl);
        copy_file_range(
            source: FileHandle, from: u64, target: INodeNo, to_handle: FileHandle, to: u64, length: u64,
            flags: CopyFileRangeFlags, reply: ReplyWrite
        );
        // All of these are refused, with the same errors as on any read-only mount.
        setattr(
            mode: Option<u32>, uid: Option<u32>, gid: Option<u32>, size: Option<u64>, atime: Option<TimeOrNow>,
            mtime: Option<TimeOrNow>, ctime: Option<SystemTime>, handle: Option<FileHandle>, crtime: Option<SystemTime>,
            chgtime: Option<SystemTime>, bkuptime: Option<SystemTime>, flags: Option<BsdFileFlags>, reply: ReplyAttr
        );
        mknod(name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry);
        mkdir(name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry);
        symlink(name: &OsStr, target: &Path, reply: ReplyEntry);
        unlink(name: &OsStr, reply: ReplyEmpty);
        rmdir(name: &OsStr, reply: ReplyEmpty);
        rename(name: &OsStr, to: INodeNo, new_name: &OsStr, flags: RenameFlags, reply: ReplyEmpty);
        link(parent: INodeNo, name: &OsStr, reply: ReplyEntry);
        create(name: &OsStr, mode: u32, umask: u32, flags: i32, reply: ReplyCreate);
        write(
            handle: FileHandle, offset: u64, data: &[u8], how: WriteFlags, flags: OpenFlags, owner: Option<LockOwner>,
            reply: ReplyWrite
        );
        setxattr(name: &OsStr, value: &[u8], flags: i32, position: u32, reply: ReplyEmpty);
        removexattr(name: &OsStr, reply: ReplyEmpty);
        fallocate(handle: FileHandle, offset: u64, length: u64, mode: i32, reply: ReplyEmpty);
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::thread;

    use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::fs::SyncProfile;
    use lockbox::fs::{Ino, ROOT_INO};
    use lockbox::keys::{self, UnlockedKey};
    use lockbox::storage::{FileStorage, LockMode, Storage};

    use super::*;
    use crate::adapter::{Activity, ServeOptions};
    use crate::event_loop::LoopScheduler;
    use crate::kernel_cache::KernelCache;
    use crate::mount_agent::ProcessInfoClient;
    use crate::snapshot_requests::tests::CREATOR;

    /// Archive with copies of its earlier states.
    struct Written {
        place: tempfile::TempDir,
        key: UnlockedKey,
        copies: u32,
    }

    fn opened(path: &Path, key: &UnlockedKey, read_only: bool) -> Archive {
        crate::tests::open_when_free(path, key, &OpenOptions { read_only, ..OpenOptions::default() })
    }

    impl Written {
        fn new() -> Written {
            let place = tempfile::tempdir().unwrap();
            let (path, passphrase) = (place.path().join("a.lbx"), Passphrase::new(b"a passphrase".to_vec()));
            Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator: CREATOR }).unwrap();
            Written { key: keys::unlock(&path, &passphrase).unwrap(), place, copies: 0 }
        }

        fn change(&self, change: impl FnOnce(&FileSystem)) {
            let archive = opened(&self.place.path().join("a.lbx"), &self.key, false);
            change(archive.file_system());
            archive.close().unwrap();
        }

        fn copy(&mut self) -> std::path::PathBuf {
            let path = self.place.path().join(format!("{}.lbx", self.copies));
            std::fs::copy(self.place.path().join("a.lbx"), &path).unwrap();
            self.copies += 1;
            path
        }

        fn version(&mut self) -> Arc<FileSystem> {
            Arc::clone(opened(&self.copy(), &self.key, true).file_system())
        }

        /// Opens a version whose storage can be made unreachable.
        fn far(&mut self) -> (Arc<Far>, Arc<FileSystem>) {
            let file = FileStorage::open(&self.copy(), LockMode::Shared).unwrap();
            let far = Arc::new(Far { file, away: AtomicBool::new(false) });
            let storage: Arc<dyn Storage> = far.clone();
            let options = OpenOptions { read_only: true, ..OpenOptions::default() };
            let archive = Archive::open(&storage, &self.key, &options).unwrap();
            (far, Arc::clone(archive.file_system()))
        }
    }

    struct Far {
        file: FileStorage,
        away: AtomicBool,
    }

    impl Storage for Far {
        fn len(&self) -> lockbox::Result<u64> {
            self.file.len()
        }

        fn read_at(&self, offset: u64, out: &mut [u8]) -> lockbox::Result<()> {
            match self.away.load(Ordering::Relaxed) {
                false => self.file.read_at(offset, out),
                true => Err(Error::request("the server does not answer", io::ErrorKind::TimedOut)),
            }
        }

        fn write_at(&self, offset: u64, data: &[u8]) -> lockbox::Result<()> {
            self.file.write_at(offset, data)
        }

        fn allocate(&self, offset: u64, length: u64) -> lockbox::Result<()> {
            self.file.allocate(offset, length)
        }

        fn punch(&self, offset: u64, length: u64) -> lockbox::Result<()> {
            self.file.punch(offset, length)
        }

        fn set_len(&self, length: u64) -> lockbox::Result<()> {
            self.file.set_len(length)
        }

        fn barrier(&self) -> lockbox::Result<()> {
            self.file.barrier()
        }

        fn evict(&self, offset: u64, length: u64) -> lockbox::Result<()> {
            self.file.evict(offset, length)
        }

        fn next_data(&self, offset: u64) -> lockbox::Result<Option<Range<u64>>> {
            self.file.next_data(offset)
        }

        fn read_only(&self) -> bool {
            true
        }
    }

    fn make(fs: &FileSystem, name: &str) -> INodeNo {
        let file = fs.create_and_open(ROOT_INO, name.as_bytes(), 0o644, CREATOR).unwrap().ino;
        fs.write(file, 0, name.as_bytes()).unwrap();
        fs.release(file).unwrap();
        INodeNo(file.0)
    }

    fn shown(fs: Arc<FileSystem>) -> CurrentVersion {
        let (cache, activity) = (Arc::new(KernelCache::new(true)), Arc::new(Activity::default()));
        let manner =
            ServeOptions { profile: SyncProfile::Periodic, access_times: false, snapshot_dir: SnapshotDir::Hidden };
        let (nobody, queue) = UnixStream::pair().unwrap();
        let scheduler = LoopScheduler::new(1, OwnedFd::from(queue));
        let adapter =
            Adapter::new(fs, cache, activity, None, ProcessInfoClient::new(nobody), manner, scheduler).unwrap();
        CurrentVersion::new(adapter, SnapshotDir::Hidden)
    }

    impl CurrentVersion {
        fn open(&self, number: INodeNo) {
            self.add_handle(number, &self.version_for(number));
        }

        /// Returns the number of the version that answers, and the content there.
        fn read(&self, number: INodeNo) -> (u64, Option<Vec<u8>>) {
            let version = self.version_for(number);
            let mut content = Vec::new();
            let read = version.adapter.fs.read_into(Ino(number.0), 0, 100, &mut content);
            (version.number, read.ok().map(|length| content[..length].to_vec()))
        }
    }

    #[test]
    fn existing_inodes_are_of_the_newest_version_and_removed_ones_of_their_last() {
        let mut written = Written::new();
        let (mut stays, mut goes) = (INodeNo(0), INodeNo(0));
        written.change(|fs| (stays, goes) = (make(fs, "stays"), make(fs, "goes")));
        let shown = shown(written.version());
        [stays, goes, goes].iter().for_each(|number| shown.open(*number));
        written.change(|fs| fs.write(Ino(goes.0), 0, b"more of it").unwrap());
        shown.publish(written.version());
        assert_eq!(shown.read(goes), (1, Some(b"more of it".to_vec())));
        written.change(|fs| {
            fs.unlink(ROOT_INO, b"goes").unwrap();
            fs.write(Ino(stays.0), 0, b"STAYS").unwrap();
        });
        shown.publish(written.version());
        shown.publish(written.version());
        assert_eq!(shown.read(stays), (3, Some(b"STAYS".to_vec())));
        assert_eq!(shown.read(goes), (1, Some(b"more of it".to_vec())), "it is open, and was last there in that");
        assert_eq!(shown.file_systems().len(), 2);
        shown.remove_handle(goes);
        assert_eq!(shown.read(goes).0, 1, "one handle is left");
        shown.remove_handle(goes);
        assert_eq!(shown.read(goes), (3, None));
        assert_eq!(shown.file_systems().len(), 1, "nobody keeps the moments that were");
    }

    /// While the server is unreachable it is unknown whether a version has a file.
    #[test]
    fn an_open_removed_inode_survives_a_server_outage() {
        let mut written = Written::new();
        let mut files = Vec::new();
        written.change(|fs| files.extend((0..2000).map(|number| make(fs, &number.to_string()))));
        let (goes, stays) = (files[1000], files[1200]);
        let shown = shown(written.version());
        [goes, stays].iter().for_each(|number| shown.open(*number));
        written.change(|fs| fs.unlink(ROOT_INO, b"1000").unwrap());
        let (far, fs) = written.far();
        far.away.store(true, Ordering::Relaxed);
        assert!(matches!(fs.attributes(Ino(goes.0)), Err(Error::Io { .. })), "it is in memory");
        shown.publish(fs);
        far.away.store(false, Ordering::Relaxed);
        assert_eq!(shown.read(goes), (0, Some(b"1000".to_vec())));
        assert_eq!(shown.read(stays), (1, Some(b"1200".to_vec())));
    }

    #[test]
    fn the_first_requests_after_an_idle_period_wait_for_one_poll() {
        const LONG: Duration = Duration::from_secs(600);
        let gate = IdleGate::default();
        gate.pass(LONG);
        gate.close();
        assert!(!gate.wait_for_request(Duration::ZERO));
        let is_polled = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    gate.pass(LONG);
                    assert!(is_polled.load(Ordering::Relaxed));
                });
            }
            assert!(gate.wait_for_request(LONG));
            is_polled.store(true, Ordering::Relaxed);
            gate.open();
        });
        assert!(!gate.wait_for_request(Duration::ZERO), "one poll is enough");
        // A store that does not answer delays the first request and no later one.
        gate.close();
        gate.pass(Duration::ZERO);
        gate.pass(LONG);
        assert!(!gate.wait_for_request(Duration::ZERO));
    }

    #[test]
    fn the_oldest_retained_version_is_evicted() {
        let mut written = Written::new();
        let count = MAX_RETAINED as u64 + 2;
        let mut files = Vec::new();
        written.change(|fs| files.extend((0..count).map(|number| make(fs, &number.to_string()))));
        let shown = shown(written.version());
        files.iter().for_each(|file| shown.open(*file));
        for number in 0..count {
            written.change(|fs| fs.unlink(ROOT_INO, number.to_string().as_bytes()).unwrap());
            shown.publish(written.version());
            assert!(shown.file_systems().len() <= MAX_RETAINED + 1);
        }
        for (number, file) in (0..).zip(&files) {
            // The file of this number was last in the version of this number.
            let wanted = if number < count - MAX_RETAINED as u64 {
                (count, None)
            } else {
                (number, Some(number.to_string().into_bytes()))
            };
            assert_eq!(shown.read(*file), wanted);
        }
    }
}
