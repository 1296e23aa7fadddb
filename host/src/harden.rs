//! Keeps the memory of a program that holds secrets out of swap, core dumps and debuggers, and
//! keeps limits on sizes from ending it.

use std::fs;

use nix::libc::RLIM_INFINITY;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use rustix::mm::{MlockAllFlags, mlockall};

use crate::proc;

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
    proc::kib(&table, "MemAvailable").is_some_and(|kib| kib >= NEEDED_KIB) && lock_memory()
}

/// Returns whether the process has the capability in the initial user namespace. One of another
/// namespace does not count: the kernel requires the initial one, and shows either here.
fn is_privileged(status: &str, uid_map: &str) -> bool {
    uid_map.split_whitespace().eq(INITIAL_NAMESPACE)
        && proc::bits(status, "CapEff").is_some_and(|set| set >> IPC_LOCK & 1 == 1)
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

/// Restores the default for a program that replaces this one by exec.
pub fn undo_outliving_size_limits() {
    let _ = beyond_limit().thread_unblock();
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(proc::kib("MemTotal:  9 kB\nMemAvailable:   3145728 kB\n", "MemAvailable"), Some(3 << 20));
        assert_eq!(proc::kib("MemTotal:  9 kB\n", "MemAvailable"), None);
    }
}
