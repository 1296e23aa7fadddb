//! An archive in an ordinary file, locked against other processes.
//!
//! The file's name is looked up in its directory, which is opened once, never again by path: an archive may be mounted over the directory
//! that holds it, and the daemon, which answers every lookup below its mount, would wait for itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, PosixFadviseAdvice, fcntl, posix_fadvise};
use nix::libc;
use nix::unistd::{Whence, lseek};
use rustix::fs::{AtFlags, FallocateFlags, FileType, OFlags};
use rustix::io::Errno as HostErrno;

use super::{BALLAST, FileIdentity, HostEntry, Storage, end_of, host_call, truncated};
use crate::error::{Error, Result};

/// How a file is locked while it is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// Reading: several at once.
    Shared,
    /// Writing: alone.
    Exclusive,
}

/// How often a path that is being replaced is opened again.
const OPEN_ATTEMPTS: usize = 5;

/// Cached copies are dropped in whole pages of the machine; 64 KiB is the largest page of a supported one.
const EVICT_ALIGNMENT: u64 = 64 * 1024;

/// File system type that fstatfs(2) returns for btrfs.
const BTRFS: u64 = 0x9123_683E;

/// The ballast is allocated in pieces of this size, the least by which an archive grows.
const PIECE: u64 = 1 << 20;

/// Zeros are written in pieces of this size where the host cannot allocate.
static ZEROS: [u8; 64 * 1024] = [0; 64 * 1024];

/// A locked file. The lock belongs to the open file description and ends with it, however the process ends.
pub struct FileStorage {
    file: File,
    /// For messages.
    path: PathBuf,
    /// None where somebody else sees to it.
    name: Option<Name>,
    read_only: bool,
    /// Length that the file must have at least: the last one set, or a greater one written or seen.
    least: AtomicU64,
    /// A ballast is to be kept (STORAGE-6).
    ballast: AtomicBool,
}

/// A file's name, which whatever is mounted over its directory does not hide.
struct Name {
    entry: HostEntry,
    /// None but a link that was there at first is followed: a later one may lead anywhere.
    how: AtFlags,
}

impl Name {
    /// The file need not exist.
    fn of(entry: HostEntry) -> Name {
        let found = entry.stat(AtFlags::SYMLINK_NOFOLLOW);
        let is_link = found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::Symlink);
        Name { entry, how: if is_link { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW } }
    }

    /// Whether it names the file with this metadata now.
    ///
    /// # Errors
    /// `NotFound` when there is no such name.
    fn names(&self, file: &File) -> io::Result<bool> {
        Ok(FileIdentity::from(&self.entry.stat(self.how)?) == FileIdentity::of(file)?)
    }
}

impl FileStorage {
    /// Creates a new file with mode 0600 (refusing an existing one) and locks it for writing.
    pub fn create(entry: &HostEntry) -> Result<FileStorage> {
        let path = entry.path();
        // Before there is a file that a failure would leave behind.
        let name = entry.try_clone().map_err(|source| looking_up(path, source))?;
        let name = Name { entry: name, how: AtFlags::SYMLINK_NOFOLLOW };
        let file = entry.create().map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => Error::Io {
                context: format!("{} exists and is not overwritten", path.display()),
                source: Arc::new(source),
            },
            _ => Error::io(format!("creating {}", path.display()), source),
        })?;
        match lock(&file, LockMode::Exclusive, path) {
            Ok(()) => Ok(FileStorage {
                file,
                path: path.into(),
                name: Some(name),
                read_only: false,
                least: AtomicU64::new(0),
                ballast: AtomicBool::new(false),
            }),
            // Somebody opened the new file at once: it is in their hands.
            Err(error @ Error::InUse(_)) => Err(error),
            Err(error) => {
                // A file that cannot be locked would only stand in the way; failing to remove it changes nothing.
                let _ = entry.remove(&file);
                Err(error)
            }
        }
    }

    /// Opens and locks (open-file-description lock), then checks that the path still names the file.
    ///
    /// # Errors
    /// `InUse` when another process holds it in a conflicting way (the message names the process id when the host tells it),
    /// `NotFound`, `Io`, `NotArchive` when it is no regular file.
    pub fn open(path: &Path, mode: LockMode) -> Result<FileStorage> {
        let path = absolute(path)?;
        FileStorage::open_by(&path, mode, &|| open(&path, mode), &|| HostEntry::of(&path))
    }

    /// The same by the name in a directory that is held open; a link there is not followed.
    pub fn open_entry(entry: &HostEntry, mode: LockMode) -> Result<FileStorage> {
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
            // Between open and lock somebody may have put another file in place (`compact` does): the lock would be on a
            // file without a name.
            let opened = metadata(&file, path)?;
            match name().map(Name::of).and_then(|name| Ok((name.names(&file)?, name))) {
                Ok((true, name)) => {
                    let least = AtomicU64::new(opened.len());
                    return Ok(FileStorage {
                        file,
                        path: path.into(),
                        name: Some(name),
                        read_only: mode == LockMode::Shared,
                        least,
                        ballast: AtomicBool::new(false),
                    });
                }
                Ok((false, _)) => {}
                Err(source) if source.kind() == io::ErrorKind::NotFound => {}
                Err(source) => return Err(looking_up(path, source)),
            }
        }
        Err(Error::InUse(format!("{} is being replaced again and again", path.display())))
    }

    /// A file that another process opened, locked and gave to this one; the lock lasts as long as one of the two has it. `path` is for messages.
    ///
    /// # Errors
    /// `NotArchive` unless it is a regular file, `ReadOnly` when it cannot be written.
    pub fn adopt(file: OwnedFd, path: &Path) -> Result<FileStorage> {
        let file = regular(Ok(file.into()), LockMode::Exclusive, path)?;
        let flags =
            rustix::fs::fcntl_getfl(&file).map_err(|e| Error::io(format!("examining {}", path.display()), e.into()))?;
        if !flags.contains(OFlags::RDWR) {
            return Err(Error::ReadOnly(format!("{} was not opened for writing", path.display())));
        }
        let least = AtomicU64::new(metadata(&file, path)?.len());
        Ok(FileStorage {
            file,
            path: path.into(),
            name: None,
            read_only: false,
            least,
            ballast: AtomicBool::new(false),
        })
    }

    /// Whether nobody holds the file in a way that conflicts with `mode`. Somebody may take it right after.
    ///
    /// # Errors
    /// As [`FileStorage::open`], without `InUse`.
    pub fn is_free(path: &Path, mode: LockMode) -> Result<bool> {
        let path = absolute(path)?;
        let file = regular(open(&path, mode), mode, &path)?;
        match lock(&file, mode, &path) {
            Ok(()) => Ok(true),
            Err(Error::InUse(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writing behind the end of a file that somebody cut would make it long again and hide what is lost. (Half a microsecond.)
    fn check_uncut(&self) -> Result<()> {
        check_length(&self.least, &mut || Ok(metadata(&self.file, &self.path)?.len()))
    }

    fn failed<E: Into<io::Error>>(&self, what: &str) -> impl FnOnce(E) -> Error + use<E> {
        let context = format!("{what} {}", self.path.display());
        move |source| Error::io(context, source.into())
    }

    /// Allocates the ballast behind `end` without making the file longer. Each piece is a request,
    /// which the host makes an extent of: it gives one back when nothing of it is left, so growth
    /// by less than a piece, as on a host that is nearly full, costs one.
    fn allocate_ballast(&self, end: u64) -> rustix::io::Result<()> {
        (0..BALLAST / PIECE).try_for_each(|piece| {
            host_call::allocate(&self.file, FallocateFlags::KEEP_SIZE, end + piece * PIECE, PIECE)
        })
    }

    /// Writes zeros behind the end, on hosts that cannot allocate. Holes inside the file stay holes there: they cannot be
    /// told from data that another thread is just writing, and overwriting that would be worse than a late NoSpace.
    fn extend_with_zeros(&self, end: u64) -> Result<()> {
        let mut at = self.len()?;
        while at < end {
            let count = (end - at).min(ZEROS.len() as u64);
            self.write_at(at, &ZEROS[..count as usize])?;
            at += count;
        }
        Ok(())
    }
}

/// The bound is read before the length: a file that another thread makes longer between the two is not a cut one. And again when the
/// length is short: another thread lowers the bound before it cuts the file.
fn check_length(least: &AtomicU64, look: &mut dyn FnMut() -> Result<u64>) -> Result<()> {
    loop {
        let bound = least.load(Ordering::SeqCst);
        let length = look()?;
        if length >= bound {
            return Ok(());
        }
        if least.load(Ordering::SeqCst) >= bound {
            return Err(truncated(length, bound));
        }
    }
}

/// Reads until `out` is full or the file ends; answers how much there was. The host may read less than asked for, or be interrupted.
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

/// Writes all of `data`, however little the host takes at once. A host that takes nothing has failed.
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
    // O_NONBLOCK: a FIFO or device in place of an archive must be refused, not waited for. It means nothing for files.
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

/// The whole file.
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

/// Locks the whole file without waiting.
fn lock(file: &File, mode: LockMode, path: &Path) -> Result<()> {
    let mut range = range(mode);
    match fcntl(file, FcntlArg::F_OFD_SETLK(&range)) {
        Ok(_) => Ok(()),
        Err(Errno::EAGAIN | Errno::EACCES) => {
            // The host tells a process id only of classic locks; a lock of ours shows as -1, and its holder is named by
            // the control socket.
            let holder = match fcntl(file, FcntlArg::F_OFD_GETLK(&mut range)) {
                Ok(_) if range.l_type != libc::F_UNLCK as libc::c_short && range.l_pid > 0 => {
                    format!("process {}", range.l_pid)
                }
                _ => "another process".to_string(),
            };
            Err(Error::InUse(format!("{} is held by {holder}", path.display())))
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
        let before = self.least.load(Ordering::SeqCst);
        let length = metadata(&self.file, &self.path)?.len();
        // Not when it was changed meanwhile: what was seen may be the length before a cut of ours.
        let _ = self.least.compare_exchange(before, before.max(length), Ordering::SeqCst, Ordering::SeqCst);
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
        // A length of 0 means "to the end" to the host.
        if length == 0 || end_of(offset, length).is_err() {
            return;
        }
        let advice = PosixFadviseAdvice::POSIX_FADV_WILLNEED;
        let _ = posix_fadvise(&self.file, offset as libc::off_t, length as libc::off_t, advice);
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let end = end_of(offset, data.len() as u64)?;
        self.check_uncut()?;
        write_fully(&mut |data, at| self.file.write_at(data, at), offset, data).map_err(|source| {
            Error::io(format!("writing {}: offset={offset} length={}", self.path.display(), data.len()), source)
        })?;
        self.least.fetch_max(end, Ordering::SeqCst);
        Ok(())
    }

    /// Where the host cannot allocate, only what lies behind the end becomes real, by writing zeros; nobody else may be
    /// writing there at the same time.
    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        let end = end_of(offset, length)?;
        if length == 0 {
            return Ok(()); // the host answers EINVAL
        }
        self.check_uncut()?;
        if self.ballast.load(Ordering::Acquire) && end > self.len()? {
            // Before the growth, which takes what lies behind the end now.
            self.allocate_ballast(end).map_err(self.failed("keeping a reserve for"))?;
        }
        match host_call::allocate(&self.file, FallocateFlags::empty(), offset, length) {
            Ok(()) => {}
            Err(HostErrno::OPNOTSUPP | HostErrno::NOSYS) => return self.extend_with_zeros(end),
            Err(errno) => return Err(self.failed("allocating space for")(errno)),
        }
        self.least.fetch_max(end, Ordering::SeqCst);
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
        self.check_uncut()?;
        // Before the cut, so that no other thread takes it for somebody else's.
        self.least.fetch_min(length, Ordering::SeqCst);
        let set = self.file.set_len(length);
        set.map_err(|source| Error::io(format!("setting the length of {}", self.path.display()), source))?;
        self.least.store(length, Ordering::SeqCst);
        if self.ballast.load(Ordering::Acquire) {
            // It was cut with the rest. Without room there is none until the file grows again.
            let _ = self.allocate_ballast(length);
        }
        Ok(())
    }

    /// On btrfs: a file there is overwritten by writing to other blocks. Other file systems that do
    /// so (ZFS, bcachefs, XFS after a reflink) allocate nothing behind an end that would help, or
    /// were not tried.
    fn keep_ballast(&self) {
        if self.read_only || !rustix::fs::fstatfs(&self.file).is_ok_and(|host| host.f_type as u64 == BTRFS) {
            return;
        }
        self.ballast.store(true, Ordering::Release);
        if let Err(error) =
            self.len().and_then(|end| self.allocate_ballast(end).map_err(self.failed("keeping a reserve for")))
        {
            tracing::warn!("there is no reserve for a full disk: {error}");
        }
    }

    /// Cuts the blocks that are allocated behind the end by setting the length that it has; there
    /// are such blocks as long as `blocks` tells of more.
    fn cut_ballast(&self) -> bool {
        if !self.ballast.load(Ordering::Acquire) {
            return false;
        }
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

    fn barrier(&self) -> Result<()> {
        // Every error is final but EINTR, which is none (see `host_call`): the host reports a lost write once and may then call the page clean.
        host_call::sync_data(&self.file).map_err(self.failed("syncing"))
    }

    /// What may be trusted: pages that a good barrier covered are clean and are dropped, also such whose write-back failed
    /// in an earlier process (they are clean but hold what the medium does not). A page that somebody maps or reads at
    /// this moment may stay, and a host without a cache of its own (tmpfs) has nothing to drop.
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

    // Seeking moves the offset of the shared descriptor, which nothing uses: every access names its own offset.
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
        self.check_uncut()?;
        let opened = metadata(&self.file, &self.path)?;
        let Some(name) = &self.name else {
            return match opened.nlink() {
                0 => Err(Error::damaged(format!("{} was removed", self.path.display()))),
                _ => Ok(()),
            };
        };
        match name.names(&self.file) {
            // Moved away, the file still has a name, and what is written to it can be found.
            Ok(false) if opened.nlink() == 0 => {
                return Err(Error::damaged(format!("{} was replaced by another file", self.path.display())));
            }
            Err(source) if source.kind() == io::ErrorKind::NotFound && opened.nlink() == 0 => {
                return Err(Error::damaged(format!("{} was removed", self.path.display())));
            }
            Ok(_) => {}
            Err(source) if source.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(looking_up(&self.path, source)),
        }
        Ok(())
    }

    fn owner(&self) -> Result<Option<u32>> {
        Ok(Some(metadata(&self.file, &self.path)?.uid()))
    }

    fn is_unlinked(&self) -> bool {
        // A reader of a file that was replaced, such as a backup that was brought up to date, has nothing of its own.
        let is_replaced = || self.name.as_ref().is_some_and(|name| name.names(&self.file).is_ok());
        metadata(&self.file, &self.path).is_ok_and(|opened| opened.nlink() == 0) && !(self.read_only && is_replaced())
    }

    fn read_only(&self) -> bool {
        self.read_only
    }
}

#[cfg(test)]
mod tests;
