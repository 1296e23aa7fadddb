//! Archive in an ordinary file, locked against other processes.
//!
//! The file's directory is opened once, and the name is looked up there, never again by path. The
//! archive may be mounted over the directory that contains it; a lookup by path would then wait for
//! the daemon itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, PosixFadviseAdvice, fcntl, posix_fadvise};
use nix::libc;
use nix::unistd::{Whence, lseek};
use parking_lot::{Mutex, RwLock};
use rustix::fs::{AtFlags, FallocateFlags, FileType, OFlags};
use rustix::io::Errno as HostErrno;

use super::{BALLAST, FileIdentity, HostEntry, Storage, end_of, host_call, truncated};
use crate::error::{Error, Result};

/// Lock of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    Shared,
    Exclusive,
}

/// Attempts to open a path that is being replaced.
const OPEN_ATTEMPTS: usize = 5;

/// Alignment of cache eviction in bytes: the largest page size of a supported machine.
const EVICT_ALIGNMENT: u64 = 64 * 1024;

/// File system type that fstatfs(2) returns for btrfs.
const BTRFS: u64 = 0x9123_683E;
/// File system type that fstatfs(2) returns for NFS.
const NFS: u64 = 0x6969;
/// File system types of ext2 to ext4 and of XFS. There, a write with RWF_DSYNC waits for its own
/// pages and, like fdatasync(2), for the growth of the file.
const RANGE_SYNC_TYPES: [u64; 2] = [0xEF53, 0x5846_5342];

/// Unit of the ballast allocation in bytes: the minimum growth of an archive.
const BALLAST_PIECE: u64 = 1 << 20;

/// Source of zeros for hosts that cannot allocate.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

/// Locked host file. The lock belongs to the open file description and ends with it, however the
/// process ends.
pub struct FileStorage {
    file: File,
    path: PathBuf,
    /// Name of the file; `None` when another process checks the name.
    name: Option<FileName>,
    read_only: bool,
    /// Minimum length that the file must have: the last one set, or a greater one written or seen.
    min_length: AtomicU64,
    /// Set when a ballast is to be kept (STORAGE-6).
    ballast: AtomicBool,
    /// Held while the file grows, and while the ballast is cut: that sets the length that it read.
    growth: Mutex<()>,
    /// Type of the host's file system, by fstatfs(2); `None` if that fails.
    host_type: Option<u64>,
    has_range_sync: bool,
    lost_writes: LostWrites,
}

/// Failed syncs, and failed writes to NFS. The host reports the loss of a write to one caller: to
/// one of the syncs in progress, on NFS also to a write(2) (ENOSPC, EDQUOT, EFBIG). So no sync
/// succeeds after a call that failed.
///
/// A sync looks for one after its own call, when no call is in flight that has taken an error and
/// has not noted it yet. A call that begins later cannot take the error of a write that this sync
/// covered.
#[derive(Default)]
struct LostWrites {
    /// Held for reading during each call that may take an error. Held for writing by a caller that
    /// needs their results.
    in_flight: RwLock<()>,
    /// The first error.
    failed: OnceLock<String>,
}

const MAY_BE_LOST: &str =
    "an earlier write may be lost; check the disk, or the server and its free space, and open the archive again";

impl LostWrites {
    fn watch<T>(&self, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let _in_flight = self.in_flight.read();
        call().inspect_err(|error| self.set_failed(error))
    }

    fn set_failed(&self, error: &Error) {
        self.failed.get_or_init(|| error.with_cause());
    }

    /// Fails after a failed call, once those in flight have ended.
    fn check(&self) -> io::Result<()> {
        let _none_in_flight = self.in_flight.write();
        self.result()
    }

    fn result(&self) -> io::Result<()> {
        match self.failed.get() {
            Some(failed) => Err(io::Error::other(format!("{MAY_BE_LOST} ({failed})"))),
            None => Ok(()),
        }
    }
}

/// Name of a file in its opened directory, visible even if the directory is mounted over.
struct FileName {
    entry: HostEntry,
    /// Flags of the lookup: a symbolic link is followed only if it existed at open, since a later
    /// one may lead anywhere.
    flags: AtFlags,
}

impl FileName {
    fn of(entry: HostEntry) -> FileName {
        let found = entry.stat(AtFlags::SYMLINK_NOFOLLOW);
        let is_link = found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink);
        FileName { entry, flags: if is_link { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW } }
    }

    /// Errors: `NotFound` when the name does not exist.
    fn refers_to(&self, file: &File) -> io::Result<bool> {
        Ok(FileIdentity::from(&self.entry.stat(self.flags)?) == FileIdentity::of(file)?)
    }
}

impl FileStorage {
    fn new(file: File, path: &Path, name: Option<FileName>, mode: LockMode, length: u64) -> FileStorage {
        let host_type = rustix::fs::fstatfs(&file).ok().map(|host| host.f_type as u64);
        let device = rustix::fs::fstat(&file).map_or(0, |found| found.st_dev);
        FileStorage {
            file,
            path: path.into(),
            name,
            read_only: mode == LockMode::Shared,
            min_length: AtomicU64::new(length),
            ballast: AtomicBool::new(false),
            growth: Mutex::default(),
            host_type,
            has_range_sync: has_range_sync(host_type, device),
            lost_writes: LostWrites::default(),
        }
    }

    /// Creates a new file with mode 0600 (refusing an existing one) and locks it for writing.
    pub(crate) fn create(entry: &HostEntry) -> Result<FileStorage> {
        let path = entry.path();
        // Cloned before the file is created, so that a failure leaves no file.
        let name = entry.try_clone().map_err(|source| looking_up(path, source))?;
        let name = FileName { entry: name, flags: AtFlags::SYMLINK_NOFOLLOW };
        let file = entry.create().map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => Error::Io {
                context: format!("{} exists and is not overwritten", path.display()),
                source: Arc::new(source),
            },
            _ => Error::io(format!("creating {}", path.display()), source),
        })?;
        match lock(&file, LockMode::Exclusive, path) {
            Ok(()) => Ok(FileStorage::new(file, path, Some(name), LockMode::Exclusive, 0)),
            // Another process opened and locked the new file: it now belongs to that process.
            Err(error @ Error::InUse(_)) => Err(error),
            Err(error) => {
                // A file that cannot be locked would only be in the way; a failure to remove it
                // changes nothing.
                let _ = entry.remove(&file);
                Err(error)
            }
        }
    }

    /// Opens and locks a file (open-file-description lock), then checks that the path still names
    /// it.
    ///
    /// # Errors
    /// `InUse` when another process holds a conflicting lock (the message names the process id if
    /// the host reports it), `NotFound`, `Io`, `NotArchive` when it is not a regular file.
    pub fn open(path: &Path, mode: LockMode) -> Result<FileStorage> {
        let path = absolute(path)?;
        FileStorage::open_by(&path, mode, &|| open(&path, mode), &|| HostEntry::of(&path))
    }

    /// Like [`FileStorage::open`], by name in an opened directory; does not follow a link there.
    pub(crate) fn open_entry(entry: &HostEntry, mode: LockMode) -> Result<FileStorage> {
        FileStorage::open_by(entry.path(), mode, &|| entry.open(mode == LockMode::Exclusive), &|| entry.try_clone())
    }

    fn open_by(
        path: &Path,
        mode: LockMode,
        open: &dyn Fn() -> io::Result<File>,
        name: &dyn Fn() -> io::Result<HostEntry>,
    ) -> Result<FileStorage> {
        for _ in 0..OPEN_ATTEMPTS {
            let file = regular(open(), mode, path)?;
            lock(&file, mode, path)?;
            // Between open and lock another process may have replaced the file (`compact` does):
            // the lock would be on a file without a name.
            let opened = metadata(&file, path)?;
            match name().map(FileName::of).and_then(|name| Ok((name.refers_to(&file)?, name))) {
                Ok((true, name)) => return Ok(FileStorage::new(file, path, Some(name), mode, opened.len())),
                Ok((false, _)) => {}
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(looking_up(path, source)),
            }
        }
        Err(Error::InUse(format!("{} is being replaced again and again", path.display())))
    }

    /// Adopts a file that another process opened and locked; the lock lasts until both have closed
    /// it. `path` is for messages.
    ///
    /// # Errors
    /// `NotArchive` unless it is a regular file, `ReadOnly` when it cannot be written.
    pub(crate) fn adopt(file: OwnedFd, path: &Path) -> Result<FileStorage> {
        let file = regular(Ok(file.into()), LockMode::Exclusive, path)?;
        let flags =
            rustix::fs::fcntl_getfl(&file).map_err(|e| Error::io(format!("examining {}", path.display()), e.into()))?;
        if !flags.contains(OFlags::RDWR) {
            return Err(Error::ReadOnly(format!("{} was not opened for writing", path.display())));
        }
        let length = metadata(&file, path)?.len();
        Ok(FileStorage::new(file, path, None, LockMode::Exclusive, length))
    }

    /// Returns whether no process holds a lock that conflicts with `mode`. Another process may take
    /// one right afterwards.
    ///
    /// # Errors
    /// Same as [`FileStorage::open`], except `InUse`.
    pub(crate) fn is_free(path: &Path, mode: LockMode) -> Result<bool> {
        let path = absolute(path)?;
        let file = regular(open(&path, mode), mode, &path)?;
        match lock(&file, mode, &path) {
            Ok(()) => Ok(true),
            Err(Error::InUse(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Checks that no other program truncated the file. Writing past its end would extend it again
    /// and hide the loss. Takes half a microsecond.
    fn check_not_truncated(&self) -> Result<()> {
        check_length(&self.min_length, &mut || Ok(metadata(&self.file, &self.path)?.len()))
    }

    fn may_be_nfs(&self) -> bool {
        self.host_type.is_none_or(|host| host == NFS)
    }

    fn write_all_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        write_fully(&mut |data, at| self.file.write_at(data, at), offset, data).map_err(|source| {
            Error::io(format!("writing {}: offset={offset} length={}", self.path.display(), data.len()), source)
        })
    }

    /// Runs a sync of the host. Every error is final except EINTR (see `host_call`): the host
    /// reports a lost write once and may then mark the page as clean.
    fn sync(&self, sync: impl FnOnce() -> io::Result<()>) -> Result<()> {
        self.lost_writes.watch(|| sync().map_err(self.failed("syncing")))?;
        self.lost_writes.check().map_err(self.failed("syncing"))
    }

    fn failed<E: Into<io::Error>>(&self, what: &str) -> impl FnOnce(E) -> Error + use<E> {
        let context = format!("{what} {}", self.path.display());
        move |source| Error::io(context, source.into())
    }

    /// Allocates the ballast after `end` without extending the file. Each piece is a separate
    /// request, which the host turns into an extent. The host frees an extent when no part of it is
    /// left, so growth by less than a piece, as on an almost full host, costs one piece.
    fn allocate_ballast(&self, end: u64) -> rustix::io::Result<()> {
        (0..BALLAST / BALLAST_PIECE).try_for_each(|piece| {
            host_call::allocate(&self.file, FallocateFlags::KEEP_SIZE, end + piece * BALLAST_PIECE, BALLAST_PIECE)
        })
    }

    /// Extends the file with zeros on hosts that cannot allocate. Holes inside the file stay holes:
    /// they cannot be told from data that another thread is writing, and overwriting that would be
    /// worse than a late `NoSpace`.
    fn extend_with_zeros(&self, end: u64) -> Result<()> {
        let zeros = |from: u64| {
            let mut at = from;
            while at < end {
                let count = (end - at).min(ZEROS.len() as u64);
                self.write_all_at(at, &ZEROS[..count as usize])?;
                at += count;
            }
            Ok(())
        };
        if self.may_be_nfs() {
            // Between two syncs, without other writes and syncs, an error is that of the zeros:
            // nothing is lost, and the file gets its length back, so that they are written again.
            let _alone = self.lost_writes.in_flight.write();
            let before = self.len()?;
            if before >= end {
                return Ok(());
            }
            let sync = || host_call::sync_data(&self.file).map_err(self.failed("syncing"));
            sync().or_else(|error| {
                self.lost_writes.set_failed(&error);
                self.lost_writes.result().map_err(self.failed("syncing"))
            })?;
            zeros(before).and_then(|()| sync()).inspect_err(|error| {
                self.min_length.fetch_min(before, Ordering::SeqCst);
                if self.file.set_len(before).is_err() {
                    self.lost_writes.set_failed(error);
                }
            })?;
        } else {
            zeros(self.len()?)?;
        }
        self.min_length.fetch_max(end, Ordering::SeqCst);
        Ok(())
    }
}

/// Returns whether a write with RWF_DSYNC on this host syncs its own range. Without a block device
/// the type is that of a server (9p), and the flag may have no effect.
fn has_range_sync(host_type: Option<u64>, device: u64) -> bool {
    host_type.is_some_and(|host| RANGE_SYNC_TYPES.contains(&host)) && rustix::fs::major(device) != 0
}

/// Compares the length with its lower bound. The bound is read first, so that concurrent growth
/// does not look like a truncation, and read again when the length is short, because another thread
/// lowers the bound before it truncates the file.
fn check_length(min_length: &AtomicU64, look: &mut dyn FnMut() -> Result<u64>) -> Result<()> {
    loop {
        let bound = min_length.load(Ordering::SeqCst);
        let length = look()?;
        if length >= bound {
            return Ok(());
        }
        if min_length.load(Ordering::SeqCst) >= bound {
            return Err(truncated(length, bound));
        }
    }
}

/// Reads until `out` is full or the file ends; returns the count. Repeats short and interrupted
/// reads.
fn read_fully(
    read: &mut dyn FnMut(&mut [u8], u64) -> io::Result<usize>,
    offset: u64,
    out: &mut [u8],
) -> io::Result<usize> {
    let mut done = 0;
    while done < out.len() {
        match read(&mut out[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(source) if source.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(source),
        }
    }
    Ok(done)
}

/// Writes all of `data`, repeating short and interrupted writes; a write of 0 bytes is an error.
fn write_fully(write: &mut dyn FnMut(&[u8], u64) -> io::Result<usize>, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < data.len() {
        match write(&data[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => done += count,
            Err(source) if source.kind() == io::ErrorKind::Interrupted => {}
            Err(source) => return Err(source),
        }
    }
    Ok(())
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|source| Error::io(format!("finding {}", path.display()), source))
}

fn metadata(file: &File, path: &Path) -> Result<fs::Metadata> {
    file.metadata().map_err(|source| Error::io(format!("examining {}", path.display()), source))
}

fn looking_up(path: &Path, source: io::Error) -> Error {
    Error::io(format!("looking up {}", path.display()), source)
}

fn open(path: &Path, mode: LockMode) -> io::Result<File> {
    // O_NONBLOCK: a FIFO or device in place of an archive must be refused without waiting. It has
    // no effect on files.
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    OpenOptions::new().read(true).write(mode == LockMode::Exclusive).custom_flags(flags).open(path)
}

fn regular(file: io::Result<File>, mode: LockMode, path: &Path) -> Result<File> {
    let not_regular = || Error::NotArchive(format!("{} is not a regular file", path.display()));
    let file = file.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT) => Error::NotFound,
        Some(libc::EISDIR | libc::ENXIO | libc::ENODEV) => not_regular(),
        _ if mode == LockMode::Exclusive => Error::io(format!("opening {} for writing", path.display()), source),
        _ => Error::io(format!("opening {}", path.display()), source),
    })?;
    if metadata(&file, path)?.is_file() { Ok(file) } else { Err(not_regular()) }
}

fn range(mode: LockMode) -> libc::flock {
    let kind = if mode == LockMode::Exclusive { libc::F_WRLCK } else { libc::F_RDLCK };
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

fn lock(file: &File, mode: LockMode, path: &Path) -> Result<()> {
    let mut range = range(mode);
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range)) {
        Ok(_) => Ok(()),
        Err(Errno::EAGAIN | Errno::EACCES) => {
            // The host reports a process id only for classic locks; an open-file-description lock
            // shows as -1, and its holder is named by the control socket.
            let holder = match fcntl(file, FcntlArg::F_OFD_GETLK(&mut range)) {
                Ok(_) if range.l_type != libc::F_UNLCK as libc::c_short && range.l_pid > 0 => {
                    format!("process {}", range.l_pid)
                }
                _ => "another process".to_string(),
            };
            Err(Error::InUse(format!("{} is in use by {holder}", path.display())))
        }
        Err(errno) => Err(Error::io(format!("locking {}", path.display()), errno.into())),
    }
}

impl AsFd for FileStorage {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Storage for FileStorage {
    fn allocated(&self) -> Result<u64> {
        Ok(metadata(&self.file, &self.path)?.blocks() * 512)
    }

    fn len(&self) -> Result<u64> {
        let before = self.min_length.load(Ordering::SeqCst);
        let length = metadata(&self.file, &self.path)?.len();
        // Skipped after a concurrent change: the length seen may be from before our own truncation.
        let _ = self.min_length.compare_exchange(before, before.max(length), Ordering::SeqCst, Ordering::SeqCst);
        Ok(length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let end = end_of(offset, out.len() as u64)?;
        match read_fully(&mut |out, at| self.file.read_at(out, at), offset, out) {
            Ok(done) if done < out.len() => Err(truncated(offset + done as u64, end)),
            Ok(_) => Ok(()),
            Err(source) => {
                let context = format!("reading {}: offset={offset} length={}", self.path.display(), out.len());
                Err(Error::io(context, source))
            }
        }
    }

    fn will_need(&self, offset: u64, length: u64) {
        // The host takes a length of 0 as "to the end".
        if length == 0 || end_of(offset, length).is_err() {
            return;
        }
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        let _ = posix_fadvise(&self.file, offset as libc::off_t, length as libc::off_t, advice);
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let end = end_of(offset, data.len() as u64)?;
        self.check_not_truncated()?;
        match self.may_be_nfs() {
            true => self.lost_writes.watch(|| self.write_all_at(offset, data))?,
            false => self.write_all_at(offset, data)?,
        }
        self.min_length.fetch_max(end, Ordering::SeqCst);
        Ok(())
    }

    /// Allocates the range. Where the host cannot allocate, only writes zeros past the end; there
    /// must be no concurrent writes to that part.
    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        let end = end_of(offset, length)?;
        if length == 0 {
            return Ok(()); // the host answers EINVAL
        }
        self.check_not_truncated()?;
        let _growth = self.growth.lock();
        if self.ballast.load(Ordering::Acquire) && end > self.len()? {
            // Allocated before the growth, which takes the current ballast.
            self.allocate_ballast(end).map_err(self.failed("keeping a reserve for"))?;
        }
        match host_call::allocate(&self.file, FallocateFlags::empty(), offset, length) {
            Ok(()) => {}
            Err(HostErrno::OPNOTSUPP | HostErrno::NOSYS) => return self.extend_with_zeros(end),
            Err(errno) => return Err(self.failed("allocating space for")(errno)),
        }
        self.min_length.fetch_max(end, Ordering::SeqCst);
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        end_of(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        host_call::allocate(&self.file, flags, offset, length).map_err(|errno| match errno {
            HostErrno::OPNOTSUPP | HostErrno::NOSYS => {
                Error::Unsupported("the host's file system cannot punch holes".to_string())
            }
            errno => self.failed("punching")(errno),
        })
    }

    fn set_len(&self, length: u64) -> Result<()> {
        end_of(length, 0)?;
        self.check_not_truncated()?;
        // Lowered before the truncation, so that other threads do not take it for a foreign one.
        self.min_length.fetch_min(length, Ordering::SeqCst);
        let set = self.file.set_len(length);
        set.map_err(|source| Error::io(format!("setting the length of {}", self.path.display()), source))?;
        self.min_length.store(length, Ordering::SeqCst);
        if self.ballast.load(Ordering::Acquire) {
            // The truncation removed the ballast. If there is no space now, it is missing until the
            // file grows again.
            let _ = self.allocate_ballast(length);
        }
        Ok(())
    }

    /// Allocates the ballast on btrfs, where overwriting a file writes to other blocks. Other
    /// copy-on-write file systems (ZFS, bcachefs, XFS after a reflink) allocate nothing useful past
    /// the end, or were not tried.
    fn keep_ballast(&self) {
        if self.read_only || self.host_type != Some(BTRFS) {
            return;
        }
        self.ballast.store(true, Ordering::Release);
        if let Err(error) =
            self.len().and_then(|end| self.allocate_ballast(end).map_err(self.failed("keeping a reserve for")))
        {
            tracing::warn!("cannot allocate the reserve for a full disk: {error}");
        }
    }

    /// Frees the blocks allocated past the end by setting the current length again; such blocks
    /// exist if `blocks` reports more than the length needs.
    fn cut_ballast(&self) -> bool {
        if !self.ballast.load(Ordering::Acquire) {
            return false;
        }
        let _growth = self.growth.lock();
        let before = self.allocated();
        let cut = self
            .len()
            .and_then(|end| host_call::set_length(&self.file, end).map_err(self.failed("cutting the reserve of")));
        let is_less = matches!((before, self.allocated()), (Ok(before), Ok(after)) if after < before);
        match cut {
            Ok(()) if is_less => tracing::warn!("the reserve for a full disk was used"),
            Ok(()) => {}
            Err(error) => tracing::warn!("{error}"),
        }
        is_less
    }

    /// The advice starts the writeback of dirty pages, and drops clean ones from the cache.
    /// (sync_file_range(2) does only the first, and has no safe interface.) The next barrier
    /// or sync of a range reports an error of the writeback, except on NFS, where a write(2) may
    /// take it.
    fn start_writeback(&self, range: Range<u64>) {
        if self.may_be_nfs() {
            return;
        }
        let (start, length) = (range.start as libc::off_t, (range.end - range.start) as libc::off_t);
        let _ = posix_fadvise(&self.file, start, length, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
    }

    fn barrier(&self) -> Result<()> {
        self.sync(|| Ok(host_call::sync_data(&self.file)?))
    }

    /// Writes the data again, with RWF_DSYNC. ENOSPC of the first write loses nothing. Any error of
    /// this one, ENOSPC too, may be the loss of another page.
    fn sync_range(&self, offset: u64, data: &[u8]) -> Result<()> {
        if !self.has_range_sync {
            return self.barrier();
        }
        let mut write = |data: &[u8], at| Ok(host_call::write_synced(&self.file, at, data)?);
        let synced = |source: io::Error| match source.raw_os_error() {
            // A sandbox without this call, which has reported no loss by that.
            Some(libc::ENOSYS) => Ok(host_call::sync_data(&self.file)?),
            _ => Err(source),
        };
        self.sync(|| write_fully(&mut write, offset, data).or_else(synced))
    }

    fn has_range_sync(&self) -> bool {
        self.has_range_sync
    }

    /// Pages covered by a successful barrier are clean and are dropped, even if their writeback
    /// failed in an earlier process (they are clean but differ from the medium). A page that is
    /// mapped or being read may stay, and a host without a page cache (tmpfs) has nothing to drop.
    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        let end = end_of(offset, length)?;
        if length == 0 {
            return Ok(()); // zero means "to the end" to the host
        }
        let start = offset - offset % EVICT_ALIGNMENT;
        let length = (end - start).next_multiple_of(EVICT_ALIGNMENT);
        let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
        posix_fadvise(&self.file, start as libc::off_t, length as libc::off_t, advice)
            .map_err(self.failed("dropping cached pages of"))
    }

    // Seeking moves the offset of the shared descriptor, which is not used: every access has an
    // explicit offset.
    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        end_of(offset, 0)?;
        let start = match lseek(&self.file, offset as libc::off_t, Whence::SeekData) {
            Ok(start) => start as u64,
            Err(Errno::ENXIO) => return Ok(None),
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => {
                let length = self.len()?;
                return Ok((offset < length).then_some(offset..length));
            }
            Err(errno) => return Err(self.failed("seeking data in")(errno)),
        };
        match lseek(&self.file, start as libc::off_t, Whence::SeekHole) {
            Ok(end) => Ok(Some(start..end as u64)),
            Err(Errno::ENXIO) => Ok(None), // truncated in between
            Err(errno) => Err(self.failed("seeking a hole in")(errno)),
        }
    }

    fn check_identity(&self) -> Result<()> {
        self.check_not_truncated()?;
        let has_name = metadata(&self.file, &self.path)?.nlink() > 0;
        let lost = match self.name.as_ref().map(|name| name.refers_to(&self.file)) {
            Some(Ok(true)) => return Ok(()),
            Some(Ok(false)) => "was replaced by another file",
            Some(Err(source)) if source.kind() != io::ErrorKind::NotFound => {
                return Err(looking_up(&self.path, source));
            }
            Some(Err(_)) | None => "was removed",
        };
        // After a rename the file still has a name, and its data can be found.
        if has_name { Ok(()) } else { Err(Error::damaged(format!("{} {lost}", self.path.display()))) }
    }

    fn owner(&self) -> Result<Option<u32>> {
        Ok(Some(metadata(&self.file, &self.path)?.uid()))
    }

    fn is_unlinked(&self) -> bool {
        // A reader of a replaced file, such as an updated backup, has no data of its own to lose.
        let is_replaced = || self.name.as_ref().is_some_and(|name| name.refers_to(&self.file).is_ok());
        metadata(&self.file, &self.path).is_ok_and(|opened| opened.nlink() == 0) && !(self.read_only && is_replaced())
    }

    fn read_only(&self) -> bool {
        self.read_only
    }
}

#[cfg(test)]
mod tests;
