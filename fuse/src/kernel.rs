//! Negotiation of a FUSE connection, and the kernel's settings of a mount; shared with the
//! benchmark's reference file system.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io};

use fuser::{Config, InitFlags, KernelConfig};
use nix::sys::stat::{major, minor};
use nix::sys::utsname::uname;
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

/// Size of one READ or WRITE: with 128 KiB requests streaming was 10-20 % slower here.
const MAX_REQUEST: u32 = 1 << 20;

/// Limits of dirty bytes in the kernel, decided by measurement (bench/README.md).
const WRITE_BACK: u64 = 16 << 20;
const SYNCED_WRITE_BACK: u64 = 4 << 20;

/// Background requests in flight, enough that every event loop has work; the kernel's default is
/// 12.
const MAX_BACKGROUND: u16 = 64;

/// Requested capabilities; all others stay off. SETXATTR_EXT would make fuser misread names.
/// Without READDIRPLUS_AUTO the kernel never sends READDIR, so no file system here implements it.
/// ALLOW_IDMAP and OVER_IO_URING need code that does not exist here. ATOMIC_O_TRUNC needs an open
/// that truncates. The lock flags would replace the kernel's local locks, which are right for one
/// mount. POSIX_ACL and DONT_MASK belong together: a default list replaces the umask, so a file
/// system that applies inherited lists must apply the umask too.
const CAPABILITIES: [InitFlags; 9] = [
    InitFlags::FUSE_WRITEBACK_CACHE,
    InitFlags::FUSE_DO_READDIRPLUS,
    InitFlags::FUSE_PARALLEL_DIROPS,
    InitFlags::FUSE_CACHE_SYMLINKS,
    InitFlags::FUSE_EXPORT_SUPPORT,
    InitFlags::FUSE_ASYNC_DIO,
    InitFlags::FUSE_HANDLE_KILLPRIV_V2,
    InitFlags::FUSE_POSIX_ACL,
    InitFlags::FUSE_DONT_MASK,
];

/// Answers the kernel's INIT. `is_replica`: content changes without requests of the kernel
/// (KERNEL-13).
pub fn negotiate(config: &mut KernelConfig, is_replica: bool) {
    let capabilities = CAPABILITIES.map(|flags| match flags {
        InitFlags::FUSE_WRITEBACK_CACHE if is_replica => InitFlags::FUSE_AUTO_INVAL_DATA,
        flags => flags,
    });
    for flags in capabilities {
        // An error means that this kernel does not offer it; it is then not used.
        let _ = config.add_capabilities(flags);
    }
    // On refusal these three return the nearest accepted value.
    if let Err(nearest) = config.set_max_write(MAX_REQUEST) {
        let _ = config.set_max_write(nearest);
    }
    if let Err(nearest) = config.set_max_readahead(MAX_REQUEST) {
        let _ = config.set_max_readahead(nearest);
    }
    if let Err(nearest) = config.set_max_background(MAX_BACKGROUND) {
        let _ = config.set_max_background(nearest);
    }
}

/// Returns the configuration for this number of event loops, each with its own descriptor if this
/// process may open the device.
pub fn session_config(threads: usize) -> Config {
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    config.clone_fd = fs::OpenOptions::new().read(true).write(true).open(crate::mount::DEVICE).is_ok();
    config
}

/// Returns the default number of event loops.
///
/// At least two, because an fsync occupies one. Each costs some 10 MiB in addition to `memory=` (4
/// loops made 110 MiB of 64, 2 made 89), which is guaranteed to stay within 32.
///
/// For a remote archive each fetch and each fsync occupies a loop for as long as the server takes;
/// the other loops serve cached data.
pub fn default_threads(is_remote: bool) -> usize {
    let least = if is_remote { REMOTE_LOOPS } else { 2 };
    std::thread::available_parallelism().map_or(least, |n| n.get().max(least))
}

const REMOTE_LOOPS: usize = 8;

/// Read-ahead setting of a mount. Changing it needs root.
pub struct ReadAhead(fs::File);

impl ReadAhead {
    /// Opens it, before the sandbox denies access.
    pub fn of(device: u64) -> io::Result<ReadAhead> {
        fs::OpenOptions::new().write(true).open(bdi_setting_path(device, "read_ahead_kb")).map(ReadAhead)
    }

    /// Raises it from the kernel's 128 KiB to the request size. Call it after the reply to INIT,
    /// which resets it.
    pub fn raise(mut self) -> io::Result<()> {
        self.0.write_all((MAX_REQUEST >> 10).to_string().as_bytes())
    }
}

/// Limit of dirty bytes of a mount in the kernel: an fsync of a small file waits for all of them,
/// since the daemon gets requests in order. The kernel's own limit grows with the machine's memory
/// (49 MiB with 24 GiB). Changing it needs root.
pub(crate) struct WriteBackLimit {
    setting: fs::File,
    bytes: AtomicU64,
}

impl WriteBackLimit {
    /// Opens it, before the sandbox denies access, and sets it.
    pub(crate) fn of(device: u64) -> io::Result<WriteBackLimit> {
        let setting = fs::OpenOptions::new().write(true).open(bdi_setting_path(device, "max_bytes"))?;
        let limit = WriteBackLimit { setting, bytes: AtomicU64::new(0) };
        limit.set(false).map(|()| limit)
    }

    /// Lower while programs sync, at the cost of a fifth of a stream's rate.
    pub(crate) fn set(&self, programs_sync: bool) -> io::Result<()> {
        let bytes = if programs_sync { SYNCED_WRITE_BACK } else { WRITE_BACK };
        if self.bytes.swap(bytes, Ordering::Relaxed) == bytes {
            return Ok(());
        }
        self.setting.write_all_at(bytes.to_string().as_bytes(), 0)
    }
}

fn bdi_setting_path(device: u64, name: &str) -> String {
    format!("/sys/class/bdi/{}:{}/{name}", major(device), minor(device))
}

/// Returns whether dropping the pages of an inode waits for WRITEs in flight; an unreadable release
/// counts as an old kernel.
pub(crate) fn drop_waits_for_writes() -> bool {
    uname().is_ok_and(|names| names.release().to_str().is_some_and(release_waits_for_writes))
}

/// Linux 6.16 and later ("fuse: remove tmp folio for writebacks", 0c58a97f919c): earlier kernels
/// copy the pages into the request and count them as clean at once.
fn release_waits_for_writes(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) >= (6, 16))
}

/// Opens the directory of a connection in fusectl(5), where that is mounted or, as in most
/// containers it is not, on a mount without a place in the tree. That needs root.
pub(crate) fn open_connection_dir(device: u64) -> io::Result<OwnedFd> {
    let path = minor(device).to_string();
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let open = |directory: BorrowedFd<'_>| openat(directory, &path, flags, Mode::empty());
    let mounted = openat(CWD, "/sys/fs/fuse/connections", flags, Mode::empty());
    if let Ok(directory) = mounted.and_then(|mounted| open(mounted.as_fd())) {
        return Ok(directory);
    }
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let unattached = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
    Ok(open(unattached.as_fd())?)
}

/// Opens the file that aborts a connection: every request in flight and every later one then fails
/// at once.
pub(crate) fn open_abort(connection: &OwnedFd) -> io::Result<fs::File> {
    Ok(openat(connection, "abort", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?.into())
}

/// Returns the number of unanswered requests of a connection. The file is opened for each read: it
/// can neither seek nor be read at an offset.
pub(crate) fn unanswered_requests(connection: &OwnedFd) -> io::Result<usize> {
    let waiting = openat(connection, "waiting", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let count = io::read_to_string(fs::File::from(waiting))?;
    count.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_tells_whether_dropping_pages_waits() {
        for release in ["6.16.0", "6.16-rc1", "6.18.44-fc-v857", "7.0.1", "10.2"] {
            assert!(release_waits_for_writes(release), "{release}");
        }
        for release in ["6.8.0-45-generic", "6.15.9", "5.10", "5.10.0-33-amd64", "2.6.78", "6", "6.x", "", "unknown"] {
            assert!(!release_waits_for_writes(release), "{release}");
        }
    }
}
