//! Sandbox of the daemon and the fetcher: Landlock denies the files that they do not need once the
//! mount exists, and all capabilities but one are dropped.
//!
//! A daemon that was compromised by a hostile archive or request keeps its open files (archive,
//! connection, log). It can open no other file, run no program, make no TCP connection, reach no
//! abstract socket and signal no process outside. [`crate::filter`] refuses the rest. Landlock
//! binds a thread and its descendants, so the sandbox is entered before any other thread starts,
//! and before the mount answers. Allowed paths are given as descriptors that were opened before the
//! mount. Landlock also forbids unmounting, so the mount agent unmounts, and opens the root for
//! the periodic flush.
//!
//! # Capabilities
//! The daemon keeps CAP_IPC_LOCK, the fetcher keeps none. The others are replaced:
//! - Unmounting, syncfs(2) below the mount, /proc of callers, the bus: the mount agent, which is
//!   outside ([`crate::mount_agent`]).
//! - `mount -o remount`: the mount command, which requests only a flush from the daemon.
//! - An archive, log or backup of another user: opened before, or by the requesting command, and
//!   held as a descriptor.
//! - The files of fusectl that abort the connection and count its requests: the first is opened
//!   before, the second is the daemon's own, within reach by its directory, because it is opened
//!   for each read. The counts of connections of other users that hold the archive are out of
//!   reach: the deadlock watchdog then proves nothing. Read-ahead and write-back are root's own
//!   files, which need no capability.
//! - The control socket and the rollback state: directories of the daemon's own user.
//! - Locked memory: CAP_IPC_LOCK stays, because otherwise each new page would count against a
//!   limit. It gives no right over anything else.
//! - Blocks that ext4 reserves for root: they are bound to the user id 0, not to CAP_SYS_RESOURCE.
//! - Priorities, owners and modes of host files: the daemon changes none.
//!
//! Capabilities too belong to a thread and are inherited by its descendants.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope, make_bitflags,
};
use lockbox_host::remote::FetcherReach;
use rustix::io::Errno;
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities,
};

/// Paths that stay accessible, as descriptors, because the mount may cover the paths.
pub(crate) struct SandboxPaths<'a> {
    /// Directory of the control socket, which is removed at the end.
    pub(crate) sockets: &'a OwnedFd,
    /// Directory of the rollback state.
    pub(crate) seen: Option<&'a OwnedFd>,
    /// `/proc/self/task`.
    pub(crate) tasks: Option<&'a OwnedFd>,
    /// Directory of the mount's connection in fusectl(5).
    pub(crate) connection: Option<&'a OwnedFd>,
    /// Directories of the connections that hold files of the daemon.
    pub(crate) hosts: &'a [OwnedFd],
}

/// Restricted rights: files up to ABI 3, so that ioctls of the connection stay allowed, and TCP.
const FILES: ABI = ABI::V3;
const NETWORK: ABI = ABI::V4;
/// Abstract sockets of other processes, and signals to them.
const SCOPES: ABI = ABI::V6;

/// Denies all files, these uses of the network, and abstract sockets and processes outside.
fn deny_all(network: BitFlags<AccessNet>) -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(FILES))?
        .handle_access(network)?
        .scope(Scope::from_all(SCOPES))?
        .create()
}

/// Restricts this thread and its descendants. Returns whether the kernel enforces the rules.
/// Fails if the kernel has Landlock and refuses the rules: nothing is restricted then.
pub(crate) fn enter(paths: &SandboxPaths<'_>) -> Result<bool, RulesetError> {
    let mut rules = deny_all(AccessNet::from_all(NETWORK))?;
    let device = File::open(crate::mount::DEVICE).ok().map(OwnedFd::from);
    let remember = AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile;
    let allowed: [(Option<&OwnedFd>, BitFlags<AccessFs>); 5] = [
        (Some(paths.sockets), AccessFs::RemoveFile.into()),
        (paths.seen, remember),
        (paths.tasks, AccessFs::ReadFile | AccessFs::ReadDir),
        // The count of unanswered requests.
        (paths.connection, AccessFs::ReadFile.into()),
        // Each event loop has a descriptor of its own.
        (device.as_ref(), AccessFs::ReadFile | AccessFs::WriteFile),
    ];
    let counted = paths.hosts.iter().map(|host| (Some(host), AccessFs::ReadFile.into()));
    for (opened, access) in allowed.into_iter().chain(counted) {
        // A missing path needs no rule.
        if let Some(opened) = opened {
            rules = rules.add_rule(PathBeneath::new(opened.as_fd(), access))?;
        }
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

/// Access of the fetcher to files of its own directories.
const KEPT_FILES: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | ReadDir | WriteFile | Truncate | RemoveFile | RemoveDir | MakeReg | MakeDir | Refer
});

/// Restricts the fetcher to files of its own directories, the files that it reads, and connections
/// to ports of its servers. Errors: as of [`enter`].
pub(crate) fn enter_fetcher(paths: &FetcherReach) -> Result<bool, RulesetError> {
    let network = if paths.ports.is_some() { AccessNet::from_all(NETWORK) } else { AccessNet::BindTcp.into() };
    let mut rules = deny_all(network)?;
    let written = paths.written.iter().map(|path| (path, KEPT_FILES));
    let read = paths.read.iter().map(|path| {
        (path, if path.is_dir() { AccessFs::ReadFile | AccessFs::ReadDir } else { AccessFs::ReadFile.into() })
    });
    for (path, access) in written.chain(read) {
        if let Ok(opened) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(opened, access))?;
        }
    }
    for port in paths.ports.iter().flatten() {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

/// Keeps `kept` of the thread's capabilities, and drops the rest from all five sets. Errors: errors
/// of the kernel. A process that may not change its bounding set could gain nothing through it.
pub(crate) fn keep_capabilities(kept: CapabilitySet) -> rustix::io::Result<()> {
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
    use std::fs;

    use super::*;

    /// Runs in a thread of its own, because the sandbox cannot be left.
    #[test]
    fn only_what_is_within_reach_can_be_opened() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for name in ["host", "sockets", "state", "state/seen", "counts"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("host/a.lbx"), b"archive").unwrap();
        fs::write(at("sockets/own"), b"").unwrap();
        fs::write(at("counts/waiting"), b"0").unwrap();
        fs::write(at("state/token"), b"of the owner of a share").unwrap();
        let open = |name: &str| OwnedFd::from(File::open(at(name)).unwrap());
        let (sockets, seen, tasks) =
            (open("sockets"), open("state/seen"), File::open("/proc/self/task").unwrap().into());
        let paths = SandboxPaths {
            sockets: &sockets,
            seen: Some(&seen),
            tasks: Some(&tasks),
            connection: None,
            hosts: &[open("counts")],
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !enter(&paths).unwrap() {
                    // A kernel without Landlock: everything must work as before.
                    assert!(File::open("/etc/passwd").is_ok());
                    println!("this kernel has no Landlock");
                    return;
                }
                assert!(File::open("/etc/passwd").is_err());
                assert!(File::open(at("host/a.lbx")).is_err(), "what is needed of it is open");
                assert!(File::open("/proc/self/environ").is_err());
                assert!(fs::write(at("host/new"), b"").is_err());
                assert!(File::open(at("state/token")).is_err());
                assert!(fs::remove_file(at("state/token")).is_err());
                assert!(fs::write(at("sockets/new"), b"").is_err());
                assert!(fs::read(at("counts/waiting")).is_ok() && fs::write(at("counts/waiting"), b"").is_err());
                assert!(std::process::Command::new("/bin/true").status().is_err());
                assert!(std::net::TcpListener::bind("127.0.0.1:0").is_err());
                fs::write(at("state/seen/new"), b"seen").unwrap();
                fs::rename(at("state/seen/new"), at("state/seen/kept")).unwrap();
                fs::remove_file(at("sockets/own")).unwrap();
                assert!(fs::read(format!("/proc/self/task/{}/wchan", nix::unistd::gettid())).is_ok());
            });
        });
        assert!(File::open("/etc/passwd").is_ok(), "other threads keep their rights");
    }

    #[test]
    fn a_fetcher_has_its_own_directories_and_ports_alone() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for name in ["cache", "cache/a", "other", "read"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("read/bundle.pem"), b"certificates").unwrap();
        fs::write(at("other/file"), b"of the user").unwrap();
        let [server, stranger] = [0; 2].map(|port| std::net::TcpListener::bind(("127.0.0.1", port)).unwrap());
        let address = |listener: &std::net::TcpListener| listener.local_addr().unwrap();
        let paths = FetcherReach {
            written: vec![at("cache"), at("missing")],
            read: vec![at("read/bundle.pem")],
            ports: Some(vec![address(&server).port()]),
            ..FetcherReach::default()
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !enter_fetcher(&paths).unwrap() {
                    println!("this kernel has no Landlock");
                    return;
                }
                assert!(File::open("/etc/passwd").is_err() && File::open(at("other/file")).is_err());
                assert!(fs::write(at("other/new"), b"").is_err() && fs::read_dir(at("other")).is_err());
                assert!(fs::write(at("read/bundle.pem"), b"").is_err());
                assert_eq!(fs::read(at("read/bundle.pem")).unwrap(), b"certificates");
                fs::write(at("cache/new"), b"kept").unwrap();
                fs::rename(at("cache/new"), at("cache/a/kept")).unwrap();
                fs::create_dir(at("cache/b")).unwrap();
                fs::remove_file(at("cache/a/kept")).unwrap();
                assert!(std::process::Command::new("/bin/true").status().is_err());
                assert!(File::open(format!("/proc/{}/mem", nix::unistd::getppid())).is_err());
                std::net::TcpStream::connect(address(&server)).unwrap();
                // Kernels from 6.7 on restrict ports.
                if std::net::TcpListener::bind("127.0.0.1:0").is_err() {
                    assert!(std::net::TcpStream::connect(address(&stranger)).is_err());
                }
            });
        });
    }

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
                keep_capabilities(kept).unwrap();
                assert_eq!(std::thread::spawn(sets).join().unwrap(), sets(), "inherited");
                // Again, after which nothing is left to drop.
                keep_capabilities(kept).unwrap();
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
