//! Takes from the daemon the files that it does not need once the mount is there (Landlock, as far as the kernel has it).
//!
//! A program that is led astray by a hostile archive or a hostile request keeps what it holds open (the archive, the connection, the log)
//! and can open nothing else of the machine, run no program, connect nowhere by TCP, and reach no abstract socket and signal nobody outside;
//! the rest is refused by [`crate::filter`]. Landlock binds a thread and those that it starts, so this comes before any other thread does, and
//! before the mount answers. What is within reach is named by descriptors, opened before the mount was there. Landlock also forbids
//! unmounting. So a second process unmounts and opens the root for the periodic flush.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
    make_bitflags,
};
use lockbox_host::remote::FetcherReach;

/// What stays within reach, by descriptors: the mount may hide the paths.
pub(crate) struct Reach<'a> {
    /// The directory of the control socket, which is to be removed.
    pub(crate) sockets: &'a OwnedFd,
    /// The directory in which archives are remembered.
    pub(crate) seen: Option<&'a OwnedFd>,
    /// What /proc has of this process's own threads.
    pub(crate) tasks: Option<&'a OwnedFd>,
}

/// Rights that are taken away at all: those of files up to ABI 3, so that ioctls of the connection stay, and TCP.
const FILES: ABI = ABI::V3;
const NETWORK: ABI = ABI::V4;
/// Abstract sockets of others, and signals to them.
const SCOPES: ABI = ABI::V6;

/// Restricts this thread and all that it starts. The answer says how much of it the kernel does.
///
/// # Errors
/// When the kernel has Landlock and refuses it: nothing is restricted then.
pub(crate) fn enter(reach: &Reach<'_>) -> Result<bool, RulesetError> {
    let status: RestrictionStatus = rules(reach)?.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

/// Refuses all files, these uses of the network, and abstract sockets and processes outside.
fn nothing(network: BitFlags<AccessNet>) -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(FILES))?
        .handle_access(network)?
        .scope(Scope::from_all(SCOPES))?
        .create()
}

fn rules(reach: &Reach<'_>) -> Result<RulesetCreated, RulesetError> {
    let mut rules = nothing(AccessNet::from_all(NETWORK))?;
    let device = File::open(crate::mount::DEVICE).ok().map(OwnedFd::from);
    let remember = AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile;
    let wanted: [(Option<&OwnedFd>, BitFlags<AccessFs>); 4] = [
        (Some(reach.sockets), AccessFs::RemoveFile.into()),
        (reach.seen, remember),
        (reach.tasks, AccessFs::ReadFile | AccessFs::ReadDir),
        // Each event loop has a descriptor of its own.
        (device.as_ref(), AccessFs::ReadFile | AccessFs::WriteFile),
    ];
    for (opened, access) in wanted {
        // What is not there cannot be opened either way.
        if let Some(opened) = opened {
            rules = rules.add_rule(PathBeneath::new(opened.as_fd(), access))?;
        }
    }
    Ok(rules)
}

/// Access of a fetcher to files of its own directories.
const KEPT_FILES: BitFlags<AccessFs> = make_bitflags!(AccessFs::{
    ReadFile | ReadDir | WriteFile | Truncate | RemoveFile | RemoveDir | MakeReg | MakeDir | Refer
});

/// Restricts the fetcher: files of its own directories, the files that it reads, and connections to
/// ports of its servers.
///
/// # Errors
/// As of [`enter`].
pub(crate) fn enter_fetcher(reach: &FetcherReach) -> Result<bool, RulesetError> {
    let network = if reach.ports.is_some() { AccessNet::from_all(NETWORK) } else { AccessNet::BindTcp.into() };
    let mut rules = nothing(network)?;
    for path in &reach.written {
        if let Ok(opened) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(opened, KEPT_FILES))?;
        }
    }
    for path in &reach.read {
        let access = if path.is_dir() { AccessFs::ReadFile | AccessFs::ReadDir } else { AccessFs::ReadFile.into() };
        if let Ok(opened) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(opened, access))?;
        }
    }
    for port in reach.ports.iter().flatten() {
        rules = rules.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
    }
    Ok(rules.restrict_self()?.ruleset != RulesetStatus::NotEnforced)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// In a thread of its own: what is given up does not come back.
    #[test]
    fn only_what_is_within_reach_can_be_opened() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for name in ["host", "sockets", "state", "state/seen"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("host/a.lbx"), b"archive").unwrap();
        fs::write(at("sockets/own"), b"").unwrap();
        fs::write(at("state/token"), b"of the owner of a share").unwrap();
        let open = |name: &str| OwnedFd::from(File::open(at(name)).unwrap());
        let (sockets, seen, tasks) =
            (open("sockets"), open("state/seen"), File::open("/proc/self/task").unwrap().into());
        let reach = Reach { sockets: &sockets, seen: Some(&seen), tasks: Some(&tasks) };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !enter(&reach).unwrap() {
                    // A kernel without Landlock: everything must go on as before.
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
        let reach = FetcherReach {
            written: vec![at("cache"), at("missing")],
            read: vec![at("read/bundle.pem")],
            ports: Some(vec![address(&server).port()]),
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !enter_fetcher(&reach).unwrap() {
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
                // Kernels from 6.7 on bind ports.
                if std::net::TcpListener::bind("127.0.0.1:0").is_err() {
                    assert!(std::net::TcpStream::connect(address(&stranger)).is_err());
                }
            });
        });
    }
}
