//! Drops capabilities: the daemon keeps CAP_IPC_LOCK, the fetcher keeps none.
//!
//! # Replacements of dropped capabilities
//! - Unmounting, syncfs(2) below the mount, /proc of callers, the bus: the mount agent, which is
//!   outside ([`crate::mount_agent`]).
//! - `mount -o remount`: the mount command, which requests only a flush from the daemon.
//! - An archive, log or backup of another user: opened before, or by the requesting command, and
//!   held as a descriptor.
//! - The files of /sys that abort the connection and count its requests: opened before. Read-ahead
//!   and write-back are root's own files, which need no capability.
//! - The control socket and the rollback state: directories of the daemon's own user.
//! - Locked memory: CAP_IPC_LOCK stays, because otherwise each new page would count against a
//!   limit. It gives no right over anything else.
//! - Blocks that ext4 reserves for root: they are bound to the user id 0, not to CAP_SYS_RESOURCE.
//! - Priorities, owners and modes of host files: the daemon changes none.
//!
//! Capabilities belong to a thread and are inherited by its descendants: drop them before any other
//! thread starts.

use rustix::io::{Errno, Result};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities,
};

/// Keeps `kept` of the thread's capabilities, and drops the rest from all five sets.
///
/// # Errors
/// Errors of the kernel. A process that may not change its bounding set could gain nothing through
/// it.
pub(crate) fn keep_only(kept: CapabilitySet) -> Result<()> {
    let before = capabilities(None)?;
    // First, because it needs a capability that is dropped below.
    if before.effective.contains(CapabilitySet::SETPCAP) {
        for number in 0..u64::BITS {
            let capability = CapabilitySet::from_bits_retain(1 << number);
            if kept.contains(capability) {
                continue;
            }
            match remove_capability_from_bounding_set(capability) {
                Ok(()) => {}
                // The kernel has no capability of this or a higher number.
                Err(Errno::INVAL) => break,
                Err(error) => return Err(error),
            }
        }
    }
    match clear_ambient_capability_set() {
        // Kernels before 4.3 have no such set.
        Ok(()) | Err(Errno::INVAL) => {}
        Err(error) => return Err(error),
    }
    set_capabilities(
        None,
        CapabilitySets {
            effective: before.effective & kept,
            permitted: before.permitted & kept,
            inheritable: CapabilitySet::empty(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the five sets, in the order of /proc: inheritable, permitted, effective, bounding,
    /// ambient.
    fn sets() -> Vec<u64> {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let lines = status.lines().filter_map(|line| line.strip_prefix("Cap"));
        lines.map(|line| u64::from_str_radix(line.split_once('\t').unwrap().1, 16).unwrap()).collect()
    }

    /// Runs in a thread of its own, because dropped capabilities do not come back.
    #[test]
    fn a_thread_and_those_that_it_starts_keep_what_is_named_alone() {
        let before = sets();
        let dropped = |kept: CapabilitySet| {
            std::thread::spawn(move || {
                keep_only(kept).unwrap();
                assert_eq!(std::thread::spawn(sets).join().unwrap(), sets(), "inherited");
                // Again, after which nothing is left to drop.
                keep_only(kept).unwrap();
                sets()
            })
            .join()
            .unwrap()
        };
        let after = dropped(CapabilitySet::IPC_LOCK);
        let lock = CapabilitySet::IPC_LOCK.bits();
        assert_eq!(after[..3], [0, before[1] & lock, before[2] & lock]);
        let may_bound = before[2] & CapabilitySet::SETPCAP.bits() != 0;
        assert_eq!(after[3..], [if may_bound { before[3] & lock } else { before[3] }, 0]);
        assert_eq!(dropped(CapabilitySet::empty())[..3], [0, 0, 0]);
        assert_eq!(sets(), before, "other threads keep theirs");
    }
}
