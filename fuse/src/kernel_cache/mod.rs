//! The kernel's caches of a mount (attributes, names, pages, unlinked inodes) and the rules that
//! replies must follow.
//!
//! The kernel asks once and then trusts its caches, because only the mount changes an archive. So
//! it is notified of every change that it did not request ([`KernelCache`]), and its unwritten
//! state is taken into account.
//!
//! # Rules of the writeback cache
//! KERNEL-1  The kernel owns size, mtime and ctime of regular files: a WRITE changes no times,
//!     SETATTR stores the times that it carries.
//! KERNEL-2  A cached WRITE carries any open handle and no credentials: handle modes and O_APPEND
//!     are never checked, and a handle opened only for writing receives READs.
//! KERNEL-3  The kernel holds dirty pages of an inode, or WRITEs of it in flight, only while the
//!     inode has a writer: each WRITE holds a writable handle, and the handle's RELEASE follows the
//!     last reply.
//! KERNEL-4  After the unlink of the last name the kernel still sends the times of the deleted
//!     file. They are accepted: it would keep an error for the next syncfs(2), which would fail
//!     although nothing is wrong.
//! KERNEL-5  Name replies never expire, not even for a missing name, because only the kernel
//!     changes names. If a missing name could expire, a concurrent lookup would drop it while
//!     another process creates the file. The new file's inode would then go with its last close,
//!     and a LOOKUP reply from before the last WRITE would restore it with its old size, which the
//!     kernel trusts (KERNEL-1): the next append would overwrite data. Attributes expire on their
//!     own.
//! KERNEL-6  An open looks up the name first and then opens the inode. A rename in between must not
//!     delete the file that was found: after ESTALE the kernel looks up once more, but the next
//!     rename may be as quick. So a file that lost its last name to a rename is held open until
//!     FORGET, which the kernel sends when it drops the inode. A FORGET from before the last lookup
//!     may release it early. The second lookup then serves the open, unless such a FORGET meets the
//!     next file too.
//! KERNEL-7  A count of 0 blocks means that a file has no data, and backup programs rely on it (GNU
//!     tar -S stores zeros). Only the kernel knows of dirty pages (KERNEL-3), and it does not count
//!     them: so an inode with a writer reports at least one block. Blocks added by WRITEs are
//!     reported by the ticker.
//! KERNEL-8  The kernel stamps mtime and ctime of a regular file in memory when it requests a
//!     change of content, and stores them later if they differ from the last stored times. So they
//!     are not stamped here as well: such a stamp could contradict times that the kernel has
//!     already stored. The kernel reads the times before it sends them, without waiting for a
//!     concurrent truncate(2) or touch(1), so older times may arrive after newer ones and are
//!     ignored. It stores them by a handle; utimensat(2) sets times without one. Times that are
//!     stamped here are ordered with the kernel's (`Environment::stamp`).
//! KERNEL-9  A removed directory still exists for processes that work in it, have it open or hold a
//!     path to it. Of these the kernel reports nothing but FORGET. So the directory is held open
//!     until then, as in KERNEL-6. A FORGET counts only if the kernel has no inode of that number:
//!     it may be from before the last lookup, which another loop answered first. Only the
//!     attributes of the directory can be requested; the kernel itself answers that it is empty and
//!     that nothing can be created in it.
//! KERNEL-10  The content of a snapshot never changes, so its names, attributes and pages stay
//!     valid while the snapshot exists. It can be removed without a request of the kernel. So a
//!     name in `.snapshots` expires after a second: then the kernel asks, learns that the snapshot
//!     is gone, and drops everything cached below it. A process inside the snapshot meets the end
//!     with the next request that the caches cannot answer: names and attributes there expire after
//!     a minute, which costs a tree walk nothing. Pages of open files, and of links, can be read
//!     until the kernel drops them: they are the content of the snapshot. A missing name in
//!     `.snapshots` is not cached. KERNEL-5 concerns names that are created; in a snapshot none
//!     are.
//! KERNEL-11  The kernel keeps size and times of a file from its first reply on (KERNEL-1). So it
//!     must not see the files that a restore builds before they are complete: the directory in
//!     which they are built rejects all requests. Names that other processes may use are changed by
//!     the kernel on behalf of the restore (KERNEL-5). The kernel is notified of the restore's own
//!     names, of files that lose one of several names, and of the root's attributes. Directories
//!     and files below a replaced path are ESTALE once they are deleted, unless they are open;
//!     inode numbers are never reused, so no name ever leads to another file.
//! KERNEL-12  Data in the kernel's cache was acknowledged to its writer before a WRITE that may
//!     fail. The kernel reports such a failure with fsync(2) and close(2) only, so a program that
//!     calls neither would write on for ever and lose all of it. But for each write(2) the kernel
//!     needs the file's mode, through the writer's handle. So after a failed WRITE its attributes
//!     are invalidated, and a write-only handle is answered with the error for as long as it
//!     persists. Handles that also read are passed over: read(2) asks in the same way.
//! KERNEL-13  Remote writes change a replica mount without a request of the kernel, and no event
//!     says which inodes changed. So there names, missing names and attributes expire after a
//!     second, and the daemon owns size and times, unlike KERNEL-1: nothing is written in the
//!     mount, so 2, 3, 5 and 8 do not apply. Cached pages of a file are dropped when its size or
//!     mtime is seen to differ, and by each open(2), since both can be set back. The cached size is
//!     dropped then too, or new content would be cut to the length of the old. An inode number
//!     names the same file in all versions, because numbers are never reused.
//!
//! # Invalidation of attributes
//! Mode and access control lists need no invalidation: SETATTR replies with the new mode, and after
//! it, as after setting or removing a list, the kernel drops both by itself.
//!
//! # Invalidation of names
//! With `sync=always` an operation is published first and committed then. If the commit fails the
//! caller gets the error, but the name exists, or is gone. The kernel caches names without expiry
//! and would keep the old state. A restore also changes names without requests of the kernel
//! (KERNEL-11).
//!
//! # Invalidation of pages
//! Dropping the cached pages of an inode writes the dirty ones first, by WRITE requests that the
//! event loops answer. So pages are never dropped from an event loop. An error means that the
//! kernel has dropped the inode and its pages, or that the connection is closed.
//!
//! Since Linux 6.16 a drop also waits for WRITEs in flight. Earlier kernels count a page as clean
//! once its WRITE is queued, and drop it at once. There [`KernelCache::finish_writeback`] polls the
//! kernel's count of unanswered requests. The count includes a request from before it is queued
//! until it is answered, so a count without requests other than LSEEKs proves that every earlier
//! WRITE has arrived. At its limit nothing is proved, and each caller documents the result.

pub(crate) mod snapshot_inodes;
mod writers;

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fuser::{FileAttr, FopenFlags, INodeNo, Notifier};
use lockbox::fs::Ino;
use lockbox::fs::{Attributes, FileSystem, RenameMode, SyncProfile, mode};
use lockbox::{Error, Result};
use parking_lot::Mutex;
use snapshot_inodes::ViewTable;
use writers::Writers;

use crate::{convert, kernel};

/// Effectively no expiry: only the mount itself changes an archive. 34 years, because the kernel
/// computes in jiffies.
pub(crate) const FOR_EVER: Duration = Duration::from_secs(1 << 30);

/// Timeout of entries that change without a request of the kernel (KERNEL-13).
const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);

/// Time for WRITEs in flight to arrive.
pub(crate) const ARRIVAL: Duration = Duration::from_secs(1);

/// Polling interval while WRITEs arrive.
const POLL: Duration = Duration::from_millis(2);

/// Code of the notification that drops pages or attributes of an inode (fuse_notify_code).
const INVAL_INODE: i32 = 2;

/// State of one mount's caches in the kernel, and the channel that invalidates them.
#[derive(Default)]
pub struct KernelCache {
    pub(crate) writers: Writers,
    pub(crate) unlinked: UnlinkedInodes,
    pub(crate) views: ViewTable,
    /// Directory that rejects all requests; 0 for none (KERNEL-11).
    hidden: AtomicU64,
    /// The mount shows remote writes (KERNEL-13).
    pub(crate) is_replica: bool,
    /// Dropping pages waits for WRITEs in flight ("Invalidation of pages").
    drop_waits: bool,
    /// Directory of the connection in fusectl(5); unset if it cannot be opened.
    connection_dir: OnceLock<OwnedFd>,
    /// Number of LSEEKs that wait for writeback. Locked while the unanswered requests are counted,
    /// so that all of them are unanswered then.
    seeks: Mutex<usize>,
    /// Set once the session exists.
    notifier: OnceLock<Notifier>,
    /// The connection, for the result that fuser hides; set with `notifier`.
    connection: OnceLock<OwnedFd>,
}

impl KernelCache {
    pub(crate) fn new(is_replica: bool) -> KernelCache {
        KernelCache { is_replica, drop_waits: kernel::drop_waits_for_writes(), ..KernelCache::default() }
    }

    /// Returns the timeout of names, missing names and attributes.
    pub(crate) fn entry_timeout(&self) -> Duration {
        if self.is_replica { REPLICA_TIMEOUT } else { FOR_EVER }
    }

    pub(crate) fn open_flags(&self) -> FopenFlags {
        if self.is_replica { FopenFlags::empty() } else { FopenFlags::FOPEN_KEEP_CACHE }
    }

    pub(crate) fn set_notifier(&self, notifier: Notifier, connection: OwnedFd) {
        let _ = self.notifier.set(notifier);
        let _ = self.connection.set(connection);
    }

    pub(crate) fn set_connection_dir(&self, directory: OwnedFd) {
        let _ = self.connection_dir.set(directory);
    }

    /// Returns the directory of the connection in fusectl(5), unless the kernel's count of
    /// unanswered requests is out of reach.
    pub(crate) fn connection_dir(&self) -> Option<&OwnedFd> {
        self.connection_dir.get()
    }

    /// Converts attributes for a reply (KERNEL-7).
    pub(crate) fn to_file_attr(&self, a: &Attributes) -> FileAttr {
        FileAttr { blocks: self.writers.reported_blocks(a.ino.0, a.blocks), ..convert::to_file_attr(a) }
    }

    /// Returns how long the kernel may cache attributes that come with another reply: for an inode
    /// with writers it requests them when needed.
    pub(crate) fn attribute_timeout(&self, ino: u64) -> Duration {
        if self.writers.has_writer(ino) { Duration::ZERO } else { self.entry_timeout() }
    }

    /// Returns attributes and timeout for GETATTR; an invalidation ends the timeout.
    pub(crate) fn getattr(&self, fs: &FileSystem, ino: INodeNo) -> Result<(FileAttr, Duration)> {
        self.writers.begin_getattr(ino.0);
        let a = fs.attributes(Ino(ino.0))?;
        let (blocks, keeps) = self.writers.finish_getattr(ino.0, a.blocks);
        if !keeps {
            self.invalidate_attributes(ino);
        }
        let timeout = if keeps { self.entry_timeout() } else { Duration::ZERO };
        Ok((FileAttr { blocks, ..convert::to_file_attr(&a) }, timeout))
    }

    /// Returns the attributes for CREATE, of a file that it created, or found, and opened.
    pub(crate) fn created_attributes(&self, a: &Attributes, writes: bool) -> FileAttr {
        if writes {
            self.writers.add_created(a.ino.0, a.blocks);
        }
        self.to_file_attr(a)
    }

    /// Registers a writer: from now on the block count changes without the kernel's knowledge, so
    /// its cached attributes are invalidated.
    pub(crate) fn begin_writing(&self, ino: INodeNo) {
        if self.writers.add(ino.0) {
            self.invalidate_attributes(ino);
        }
    }

    /// Removes a writer. KERNEL-7: a reported block that does not exist is invalidated.
    pub(crate) fn end_writing(&self, fs: &FileSystem, ino: INodeNo) {
        if let Some(cached) = self.writers.remove(ino.0)
            && fs.attributes(Ino(ino.0)).is_ok_and(|a| !cached.matches(a.blocks))
        {
            self.invalidate_attributes(ino);
        }
    }

    /// Records a WRITE before its reply; with `kill` the mode may have changed too.
    pub(crate) fn content_written(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill { self.content_changed(fs, ino, kill) } else { self.writers.record_write(ino.0) }
    }

    /// Records a failed WRITE of `bytes` before its reply, so that the writer learns of it
    /// (KERNEL-12).
    pub(crate) fn record_refused_write(&self, ino: INodeNo, bytes: usize) {
        self.writers.set_refused(ino.0, bytes);
        self.invalidate_blocks(Ino(ino.0));
    }

    /// Invalidates block counts changed by WRITEs since the last call. Call it without a lock of
    /// the file system, as `invalidate_blocks`.
    pub(crate) fn invalidate_written(&self, fs: &FileSystem) {
        for ino in self.writers.take_written() {
            self.content_changed(fs, INodeNo(ino), false);
        }
    }

    /// Records another change of the content before its reply; with `kill` the mode may have
    /// changed too.
    pub(crate) fn content_changed(&self, fs: &FileSystem, ino: INodeNo, kill: bool) {
        if kill {
            self.writers.forget_wrong_blocks(ino.0, None);
            self.invalidate_attributes(ino);
        } else if self.writers.has_cached_blocks(ino.0) {
            let blocks = fs.attributes(Ino(ino.0)).ok().map(|a| a.blocks);
            if self.writers.forget_wrong_blocks(ino.0, blocks) {
                self.invalidate_attributes(ino);
            }
        }
    }

    /// Invalidates a block count that changed without a request, whether or not the inode has
    /// writers. Call it without a lock of the file system: the kernel may first wait for the reply
    /// to a request about the inode.
    pub(crate) fn invalidate_blocks(&self, ino: Ino) {
        self.writers.forget_wrong_blocks(ino.0, None);
        self.invalidate_attributes(INodeNo(ino.0));
    }

    /// Makes the kernel request the attributes again.
    pub(crate) fn invalidate_attributes(&self, ino: INodeNo) {
        // A negative offset invalidates attributes only. The kernel may not know the inode, which
        // is harmless.
        self.drop_pages(ino, -1);
    }

    /// Invalidates the names of a failed operation; call it before the reply. The kernel holds the
    /// directory's lock until the reply, so the invalidation runs in a thread: here it would
    /// deadlock.
    pub(crate) fn invalidate_uncertain_names<T>(
        &self,
        profile: SyncProfile,
        result: &Result<T>,
        names: &[(INodeNo, &OsStr)],
    ) {
        let Err(error) = result else { return };
        if !may_be_published(profile, error) {
            return;
        }
        let Some(notifier) = self.notifier.get().cloned() else { return };
        let names: Vec<_> = names.iter().map(|&(parent, name)| (parent, name.to_owned())).collect();
        let spawned = thread::Builder::new().name("names".into()).spawn(move || {
            for (parent, name) in names {
                // The kernel may not know the name.
                let _ = notifier.inval_entry(parent, &name);
            }
        });
        if let Err(error) = spawned {
            tracing::warn!(%error, "the kernel may keep a stale name in its cache");
        }
    }

    /// Writes and drops the pages of one inode from `offset` on.
    pub(crate) fn drop_pages(&self, ino: INodeNo, offset: i64) {
        if let Some(notifier) = self.notifier.get() {
            let _ = notifier.inval_inode(ino, offset, 0);
        }
    }

    /// Returns whether the kernel has the inode. Waits while the kernel drops it: not to be called
    /// from an event loop for a file, because its writeback may need the loop.
    pub(crate) fn is_known(&self, ino: INodeNo) -> bool {
        let Some(connection) = self.connection.get() else { return false };
        // fuse_out_header (length, code, 0), then fuse_notify_inval_inode_out. A negative offset
        // drops attributes only.
        let mut message = [0; 40];
        message[..4].copy_from_slice(&40_u32.to_ne_bytes());
        message[4..8].copy_from_slice(&INVAL_INODE.to_ne_bytes());
        message[16..24].copy_from_slice(&ino.0.to_ne_bytes());
        message[24..32].copy_from_slice(&(-1_i64).to_ne_bytes());
        rustix::io::write(connection, &message).is_ok()
    }

    /// Writes and drops the pages of one inode from `offset` on, for an LSEEK that is answered
    /// afterwards. Returns whether all data written before the call has arrived; false if that is
    /// unknown after [`ARRIVAL`].
    pub(crate) fn write_back_for_seek(&self, ino: INodeNo, offset: i64) -> bool {
        *self.seeks.lock() += 1;
        self.drop_pages(ino, offset);
        let has_arrived = self.finish_writeback(Instant::now() + ARRIVAL);
        *self.seeks.lock() -= 1;
        has_arrived
    }

    /// Waits for the WRITEs that a drop of pages does not wait for. Returns false if it is unknown
    /// at `until` whether all have arrived.
    pub(crate) fn finish_writeback(&self, until: Instant) -> bool {
        self.drop_waits || self.await_writes(until)
    }

    /// Returns whether [`KernelCache::finish_writeback`] can prove that all WRITEs have arrived.
    pub(crate) fn can_prove_arrival(&self) -> bool {
        self.drop_waits || self.connection_dir().is_some()
    }

    /// Waits until no WRITE is in flight. Returns false if that was not seen until `until`: the
    /// kernel may not report its count, or requests never end while other programs work. At the end
    /// of the connection, which has no count any more, it returns false at once.
    pub(crate) fn await_writes(&self, until: Instant) -> bool {
        // KERNEL-3.
        while self.writers.has_any() {
            match self.has_only_seeks() {
                Some(Ok(true)) => return true,
                Some(Err(_)) => return false,
                Some(Ok(false)) | None if Instant::now() >= until => return false,
                Some(Ok(false)) | None => thread::sleep(POLL),
            }
        }
        true
    }

    /// Returns whether the kernel reports no unanswered request but LSEEKs; None if its count is
    /// out of reach.
    fn has_only_seeks(&self) -> Option<io::Result<bool>> {
        let directory = self.connection_dir()?;
        let seeks = self.seeks.lock();
        Some(kernel::unanswered_requests(directory).map(|count| count <= *seeks))
    }

    /// Writes and drops the pages of every inode up to `newest`, then of the snapshot inodes that
    /// the kernel knows, starting with views that were read. Returns whether that finished before
    /// `until`. Newer inodes come first: they are likelier to be cached, and time is short.
    pub(crate) fn drop_all_pages(&self, newest: u64, until: Instant) -> bool {
        if self.notifier.get().is_none() {
            return true;
        }
        for (view, newest) in std::iter::once((0, newest)).chain(self.views.known_to_kernel()) {
            for number in (1..=newest).rev() {
                self.drop_pages(INodeNo(view | number), 0);
                if number % 256 == 0 && Instant::now() > until {
                    return false;
                }
            }
        }
        self.finish_writeback(until)
    }

    /// Hides the content of this directory from the kernel, and shows the directory that was hidden
    /// before.
    pub(crate) fn hide_directory(&self, directory: Ino) {
        self.hidden.store(directory.0, Ordering::SeqCst);
    }

    /// Errors: `PermissionDenied` for the hidden directory.
    pub(crate) fn check_visible(&self, directory: INodeNo) -> Result<()> {
        if self.hidden.load(Ordering::SeqCst) == directory.0 { Err(Error::PermissionDenied) } else { Ok(()) }
    }

    /// Makes the kernel drop a name, existing or missing. No other thread may create, remove or
    /// rename it meanwhile. Not to be called from an event loop: the kernel may hold the
    /// directory's lock for a request that waits for us.
    pub(crate) fn invalidate_name(&self, directory: Ino, name: &[u8]) {
        if let Some(notifier) = self.notifier.get() {
            // The kernel may not know the directory or the name.
            let _ = notifier.inval_entry(INodeNo(directory.0), OsStr::from_bytes(name));
        }
    }
}

/// Returns whether the operation may have been published. Errors about the names themselves come
/// before that.
fn may_be_published(profile: SyncProfile, error: &Error) -> bool {
    let refused = matches!(
        error,
        Error::Exists
            | Error::NotFound
            | Error::NotDirectory
            | Error::IsDirectory
            | Error::NotEmpty
            | Error::NameTooLong
            | Error::Invalid(_)
    );
    profile == SyncProfile::Always && !refused
}

/// Inodes without a name that the kernel still knows: files replaced by a rename, and removed
/// directories. They are held open until the kernel forgets them (KERNEL-6, KERNEL-9).
#[derive(Default)]
pub(crate) struct UnlinkedInodes(Mutex<HashSet<u64>>);

impl UnlinkedInodes {
    /// Renames, and holds the inode that loses its last name.
    pub(crate) fn rename(
        &self,
        fs: &FileSystem,
        (directory, name): (Ino, &OsStr),
        (new_directory, new_name): (Ino, &OsStr),
        how: RenameMode,
    ) -> Result<()> {
        let replaces = matches!(how, RenameMode::Replace | RenameMode::Whiteout(_));
        let last = |a: &Attributes| match a.mode & mode::TYPE {
            mode::REGULAR => a.links == 1,
            kind => kind == mode::DIRECTORY,
        };
        let held = if replaces { open_if_matching(fs, new_directory, new_name, last) } else { None };
        let renamed = fs.rename(directory, name.as_bytes(), new_directory, new_name.as_bytes(), how);
        self.retain(fs, held, renamed)
    }

    pub(crate) fn remove_directory(&self, fs: &FileSystem, directory: Ino, name: &OsStr) -> Result<()> {
        let held = open_if_matching(fs, directory, name, |a| a.mode & mode::TYPE == mode::DIRECTORY);
        let removed = fs.remove_directory(directory, name.as_bytes());
        self.retain(fs, held, removed)
    }

    /// Retains the held inode if its name was removed, and releases it otherwise.
    fn retain(&self, fs: &FileSystem, held: Option<Ino>, taken: Result<()>) -> Result<()> {
        let Some(held) = held else { return taken };
        if taken.is_ok() && self.0.lock().insert(held.0) {
            return taken;
        }
        taken.and(fs.release(held))
    }

    /// Releases the inode at a FORGET; a directory only if the kernel does not have it (KERNEL-9).
    pub(crate) fn forget(&self, fs: &FileSystem, inode: Ino, is_known: impl FnOnce() -> bool) -> Result<()> {
        if !self.0.lock().contains(&inode.0) {
            return Ok(());
        }
        let is_directory = fs.attributes(inode).is_ok_and(|a| a.mode & mode::TYPE == mode::DIRECTORY);
        if is_directory && is_known() {
            return Ok(());
        }
        if self.0.lock().remove(&inode.0) { fs.release(inode) } else { Ok(()) }
    }
}

/// Looks up a name and opens its inode if it matches. The kernel keeps the directory locked, so the
/// name means the same inode until the request is answered.
fn open_if_matching(
    fs: &FileSystem,
    directory: Ino,
    name: &OsStr,
    must_hold: impl FnOnce(&Attributes) -> bool,
) -> Option<Ino> {
    let found = fs.lookup(directory, name.as_bytes()).ok()?;
    (must_hold(&found) && fs.open(found.ino).is_ok()).then_some(found.ino)
}

#[cfg(test)]
mod tests {
    use lockbox::fs::ROOT_INO;

    use super::*;
    use crate::snapshot_requests::tests::{CREATOR, opened};

    impl KernelCache {
        /// Returns the cache of a kernel with one writer and this directory of the connection.
        pub(crate) fn of_kernel(drop_waits: bool, connection_dir: Option<&std::path::Path>) -> KernelCache {
            let cache = KernelCache { drop_waits, ..KernelCache::default() };
            if let Some(directory) = connection_dir {
                cache.set_connection_dir(std::fs::File::open(directory).unwrap().into());
            }
            cache.writers.add(5);
            cache
        }
    }

    #[test]
    fn a_name_is_uncertain_when_its_commit_may_have_failed() {
        let failed = Error::WriteFailed(String::new());
        assert!(may_be_published(SyncProfile::Always, &failed));
        assert!(!may_be_published(SyncProfile::Periodic, &failed));
        for refused in [Error::Exists, Error::NotFound, Error::NotEmpty] {
            assert!(!may_be_published(SyncProfile::Always, &refused), "{refused}");
        }
    }

    #[test]
    fn before_linux_6_16_an_lseek_waits_until_no_other_request_is_in_flight() {
        let connection = tempfile::tempdir().unwrap();
        let seeks = |drop_waits, count: &str| {
            std::fs::write(connection.path().join("waiting"), count).unwrap();
            KernelCache::of_kernel(drop_waits, Some(connection.path())).write_back_for_seek(INodeNo(5), 0)
        };
        assert!(seeks(false, "1\n"), "the LSEEK itself");
        assert!(!seeks(false, "2\n"), "a WRITE may be in flight");
        assert!(!seeks(false, ""), "unreadable");
        assert!(seeks(true, "2\n"));
        let cache = KernelCache::of_kernel(false, None);
        assert!(!cache.write_back_for_seek(INodeNo(5), 0), "unknown");
        cache.writers.remove(5);
        assert!(cache.write_back_for_seek(INodeNo(5), 0), "KERNEL-3");
    }

    /// KERNEL-9.
    #[test]
    fn a_forget_from_before_the_last_lookup_releases_no_removed_directory() {
        let (_directory, archive) = opened();
        let (fs, unlinked) = (archive.file_system(), UnlinkedInodes::default());
        let directory = fs.make_directory(ROOT_INO, b"dir", 0o755, CREATOR).unwrap().ino;
        unlinked.remove_directory(fs, ROOT_INO, OsStr::new("dir")).unwrap();
        unlinked.forget(fs, directory, || true).unwrap();
        assert!(fs.attributes(directory).is_ok());
        unlinked.forget(fs, directory, || false).unwrap();
        assert!(matches!(fs.attributes(directory), Err(Error::Stale)));
        unlinked.forget(fs, directory, || panic!("it is not held")).unwrap();
    }

    #[test]
    fn one_directory_is_hidden_and_at_first_none() {
        let cache = KernelCache::default();
        let is_open = |ino| cache.check_visible(INodeNo(ino)).is_ok();
        assert!(is_open(1) && is_open(7) && is_open(9));
        cache.hide_directory(Ino(7));
        assert!(is_open(1) && !is_open(7));
        cache.hide_directory(Ino(9));
        assert!(is_open(7) && !is_open(9), "it is deleted by then");
    }
}
