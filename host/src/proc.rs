//! Memory and limits of this process: reads the kernel's tables in /proc, keeps secrets out of
//! swap, core dumps and debuggers, and keeps limits on sizes from ending the program.

use std::fs;
use std::path::Path;

use nix::libc::RLIM_INFINITY;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use rustix::mm::{MlockAllFlags, mlockall};

/// Returns the value of a field: each is a line of a name, a colon and a value.
fn field<'a>(table: &'a str, name: &str) -> Option<&'a str> {
    table.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// Parses a set of bits in hex digits.
pub fn bits(table: &str, name: &str) -> Option<u64> {
    u64::from_str_radix(field(table, name)?, 16).ok()
}

pub fn kib(table: &str, name: &str) -> Option<u64> {
    field(table, name)?.trim_end_matches("kB").trim_end().parse().ok()
}

/// Memory controller of control groups v1 and v2: its name in the table, its directory, limit and
/// use.
const GROUPS: [[&str; 4]; 2] = [
    ["", "sys/fs/cgroup", "memory.max", "memory.current"],
    ["memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"],
];

/// Returns the KiB that this process may take without swapping or ending other processes: the
/// unused ones, on the machine and below the limits of the control groups. Returns 0 if the process
/// has a limit of its own: that makes allocations fail instead of ending programs, and its user
/// chose it.
pub(crate) fn available_kib() -> u64 {
    let limits = [Resource::RLIMIT_AS, Resource::RLIMIT_DATA];
    if limits.into_iter().any(|limit| getrlimit(limit).is_ok_and(|(soft, _)| soft != RLIM_INFINITY)) {
        return 0;
    }
    of_host(Path::new("/"))
}

fn of_host(root: &Path) -> u64 {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let free = kib(&read("proc/meminfo"), "MemAvailable").unwrap_or(0);
    let table = read("proc/self/cgroup");
    let groups = table.lines().filter_map(|line| {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>().try_into().ok()?;
        let layout = GROUPS.iter().find(|[name, ..]| controllers.split(',').any(|controller| controller == *name))?;
        // A group's limit applies to all groups below it. Those above the root of a container are
        // not visible, but neither is its name then.
        Path::new(path).ancestors().filter_map(|group| left_in(root, layout, group)).min()
    });
    groups.min().map_or(free, |left| left.min(free))
}

/// Returns the KiB left below the limit of a group; None without a limit.
fn left_in(root: &Path, [_, directory, limit, used]: &[&str; 4], group: &Path) -> Option<u64> {
    let directory = root.join(directory).join(group.strip_prefix("/").ok()?);
    let read = |name: &str| fs::read_to_string(directory.join(name)).ok()?.trim().parse::<u64>().ok();
    Some(read(limit)?.saturating_sub(read(used)?) / 1024)
}

/// Largest memory of a key derivation unless the user raised it, plus the amount that everything
/// else needs: with less, the machine would have to end programs instead of swapping.
const NEEDED_KIB: u64 = (1024 + 256) << 10;

/// The capability CAP_IPC_LOCK, which root of a container may lack.
const IPC_LOCK: u32 = 14;

/// The map of users of the initial namespace: all of them, each as itself.
const INITIAL_NAMESPACE: [&str; 3] = ["0", "0", "4294967295"];

/// Locks all memory of this process, page by page as it is touched, and returns whether that
/// succeeded. Nothing is locked in a process with a limit on locked memory: the limit would make
/// later allocations fail.
pub fn lock_memory() -> bool {
    let unlimited = getrlimit(Resource::RLIMIT_MEMLOCK).is_ok_and(|(soft, _)| soft == RLIM_INFINITY);
    (unlimited || may_lock_beyond_the_limit())
        && mlockall(MlockAllFlags::CURRENT | MlockAllFlags::FUTURE | MlockAllFlags::ONFAULT).is_ok()
}

/// Returns whether a limit on locked memory does not count for this process.
pub fn may_lock_beyond_the_limit() -> bool {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    is_privileged(&read("/proc/self/status"), &read("/proc/self/uid_map"))
}

/// Locks memory in a program that derives keys, if memory is plenty. Programs that replace this one
/// by exec start without the lock.
pub fn lock_memory_if_plenty() -> bool {
    let table = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    kib(&table, "MemAvailable").is_some_and(|kib| kib >= NEEDED_KIB) && lock_memory()
}

/// Returns whether the process has the capability in the initial user namespace. One of another
/// namespace does not count: the kernel requires the initial one, and shows either here.
fn is_privileged(status: &str, uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(INITIAL_NAMESPACE)
        && bits(status, "CapEff").is_some_and(|set| set >> IPC_LOCK & 1 == 1)
}

/// Previous limit of core dumps.
#[derive(Clone, Copy)]
pub struct CoreLimit(Option<(u64, u64)>);

impl CoreLimit {
    /// Restores the limit for a program that replaces this one by exec.
    pub fn restore(self) {
        if let Some((soft, hard)) = self.0 {
            let _ = setrlimit(Resource::RLIMIT_CORE, soft, hard);
        }
    }
}

/// Hides the memory from core dumps and debuggers. If the host refuses, this protection is lost,
/// and the work goes on.
pub fn keep_out_of_core_dumps() -> CoreLimit {
    let before = getrlimit(Resource::RLIMIT_CORE).ok();
    // The hard limit stays, because only root could undo the change.
    let _ = setrlimit(Resource::RLIMIT_CORE, 0, before.map_or(0, |(_, hard)| hard));
    let _ = nix::sys::prctl::set_dumpable(false);
    CoreLimit(before)
}

fn beyond_limit() -> SigSet {
    SigSet::from(Signal::SIGXFSZ)
}

/// Makes a write beyond a limit on the size of files fail as on a full disk, instead of ending the
/// program. Called before any other thread exists.
pub fn outlive_size_limits() {
    let _ = beyond_limit().thread_block();
}

/// Undoes [`outlive_size_limits`] for programs that this one starts. A signal of an earlier write
/// that failed is still pending and would end this program, so it is discarded.
#[allow(unsafe_code)]
pub fn undo_outliving_size_limits() {
    // SAFETY: to ignore a signal runs no code of this program; it discards a pending one.
    let former = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    let _ = beyond_limit().thread_unblock();
    if let Ok(former) = former {
        // SAFETY: the action that the program had before.
        let _ = unsafe { signal(Signal::SIGXFSZ, former) };
    }
}

/// Restores the default of signals that this program blocks or ignores for itself (SIGXFSZ, and
/// SIGPIPE in the Rust runtime), for a program that replaces this one by exec.
#[allow(unsafe_code)]
pub fn restore_signals() {
    undo_outliving_size_limits();
    // SAFETY: the default action runs no code of this program.
    let _ = unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_of_all_groups_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let spare = || of_host(root.path());
        assert_eq!(spare(), 0);
        write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n");
        assert_eq!(spare(), 8000);
        write("proc/self/cgroup", "4:cpu,memory:/job\n0::/user.slice/app:1.scope\n");
        assert_eq!(spare(), 8000, "groups without limits");
        let group = |name: &str, limit: &str, used: &str| {
            write(&format!("sys/fs/cgroup/{name}memory.max"), limit);
            write(&format!("sys/fs/cgroup/{name}memory.current"), used);
        };
        group("user.slice/app:1.scope/", "max\n", "1048576\n");
        assert_eq!(spare(), 8000);
        group("user.slice/", "7168000\n", "1024000\n");
        assert_eq!(spare(), 6000);
        group("user.slice/app:1.scope/", "2048000\n", "1024000\n");
        assert_eq!(spare(), 1000);
        group("user.slice/app:1.scope/", "1024000\n", "2048000\n");
        assert_eq!(spare(), 0, "beyond its limit");
        group("user.slice/app:1.scope/", "max\n", "1048576\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3072000\n");
        write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1024000\n");
        assert_eq!(spare(), 2000, "of the older version, at the root of a container");
    }

    #[test]
    fn the_signal_of_an_earlier_failed_write_does_not_end_the_program() {
        outlive_size_limits();
        nix::sys::signal::raise(Signal::SIGXFSZ).unwrap();
        undo_outliving_size_limits();
        assert!(!SigSet::thread_get_mask().unwrap().contains(Signal::SIGXFSZ));
    }

    #[test]
    fn what_proc_says_is_understood() {
        let initial = "         0          0 4294967295\n";
        let able = "Name:\tx\nCapEff:\t0000000000004000\n";
        assert!(is_privileged(able, initial));
        for map in ["         0       1000          1\n", "0 0 65536\n", "0 0 1\n1 100000 65536\n", ""] {
            assert!(!is_privileged(able, map), "{map}");
        }
        for status in ["CapEff:\t00000000ffffbfff\n", "CapEff:\tnothing\n", "CapPrm:\t0000000000004000\n", ""] {
            assert!(!is_privileged(status, initial), "{status}");
        }
        assert_eq!(kib("MemTotal:  9 kB\nMemAvailable:   3145728 kB\n", "MemAvailable"), Some(3 << 20));
        assert_eq!(kib("MemTotal:  9 kB\n", "MemAvailable"), None);
    }
}
