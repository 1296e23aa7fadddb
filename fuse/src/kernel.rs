//! What lockbox asks of the kernel when a FUSE connection starts; the benchmark's yardstick asks the same.

use std::io::Write;
use std::{fs, io};

use fuser::{Config, InitFlags, KernelConfig};
use nix::sys::stat::{major, minor};

/// Size of one READ or WRITE: with 128 KiB requests streaming lost 10-20 % here.
const MAX_REQUEST: u32 = 1 << 20;

/// Bytes that the kernel may hold back, decided by measurement (bench/README.md).
const WRITE_BACK: u64 = 16 << 20;

/// Background requests in flight, enough that every event loop has work; the kernel's default is 12.
const MAX_BACKGROUND: u16 = 64;

/// The allow-list. Anything else that a kernel offers stays off: SETXATTR_EXT would make fuser misread names,
/// ALLOW_IDMAP and OVER_IO_URING need code that does not exist here, ATOMIC_O_TRUNC needs an open that truncates,
/// the lock flags would replace the kernel's local locks, which are right for one mount.
/// POSIX_ACL and DONT_MASK belong together: a default list replaces the umask, so whoever inherits lists applies the umask too.
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

/// Answers the kernel's INIT. `follows`: what is shown changes without the kernel's doing (KERNEL-13).
pub fn negotiate(config: &mut KernelConfig, is_replica: bool) {
    let capabilities = CAPABILITIES.map(|flags| match flags {
        InitFlags::FUSE_WRITEBACK_CACHE if is_replica => InitFlags::FUSE_AUTO_INVAL_DATA,
        flags => flags,
    });
    for flags in capabilities {
        // An error says that this kernel does not offer it: then it goes without.
        let _ = config.add_capabilities(flags);
    }
    // On refusal these three return the nearest value that is accepted.
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

/// How many event loops serve the connection, each with its own descriptor where this process may open the device.
pub fn session_config(threads: usize) -> Config {
    let mut config = Config::default();
    config.n_threads = Some(threads.max(1));
    config.clone_fd = fs::OpenOptions::new().read(true).write(true).open(crate::mount::DEVICE).is_ok();
    config
}

/// Two loops at least: an fsync keeps one of them. More would let more programs share a commit, but each costs some 10 MiB beside
/// `memory=` (4 loops made 110 MiB of 64, 2 made 89), which is promised to stay within 32.
///
/// Of an archive that is elsewhere each read of what is not here and each fsync keeps one for as long as its server takes, and the others are for what is here.
pub fn default_threads(is_remote: bool) -> usize {
    let least = if is_remote { REMOTE_LOOPS } else { 2 };
    std::thread::available_parallelism().map_or(least, |n| n.get().max(least))
}

const REMOTE_LOOPS: usize = 8;

/// How far the kernel reads ahead on a mount. Only root may change it.
pub struct ReadAhead(fs::File);

impl ReadAhead {
    /// Opens it, before a sandbox takes it out of reach.
    pub fn of(device: u64) -> io::Result<ReadAhead> {
        fs::OpenOptions::new().write(true).open(setting(device, "read_ahead_kb")).map(ReadAhead)
    }

    /// Raises it from the kernel's 128 KiB to a request, once the kernel has had its answer to INIT, which sets it back.
    pub fn raise(mut self) -> io::Result<()> {
        self.0.write_all((MAX_REQUEST >> 10).to_string().as_bytes())
    }
}

/// Bounds what programs have written to the mount and the kernel has not yet handed over: an fsync of a small file waits behind all of it, since
/// the daemon gets requests in their order. The kernel's own bound grows with the machine's memory (49 MiB on one of 24 GiB). Only root may.
pub fn bound_write_back(device: u64) -> io::Result<()> {
    fs::write(setting(device, "max_bytes"), WRITE_BACK.to_string())
}

/// Path of a setting of the kernel's cache of a mount.
fn setting(device: u64, name: &str) -> String {
    format!("/sys/class/bdi/{}:{}/{name}", major(device), minor(device))
}

/// Opens the file that tells how many requests of a connection nobody has answered yet. Where fusectl is not mounted there is none.
pub fn open_waiting(device: u64) -> io::Result<fs::File> {
    fs::File::open(format!("/sys/fs/fuse/connections/{}/waiting", minor(device)))
}

/// Opens the file by which a connection is aborted: every request under way and every later one then fails at once.
pub fn open_abort(device: u64) -> io::Result<fs::File> {
    fs::OpenOptions::new().write(true).open(format!("/sys/fs/fuse/connections/{}/abort", minor(device)))
}
