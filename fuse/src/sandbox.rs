//! Takes from the daemon the files that it does not need once the mount is there (Landlock, as far as the kernel has it).
//!
//! A program that is led astray by a hostile archive or a hostile request keeps what it holds open (the archive, the connection, the log)
//! and can open nothing else of the machine, run no program, and connect nowhere by TCP. Landlock binds a thread and those that it starts,
//! so this comes before any other thread does, and before the mount answers: its own root must not be named here, since looking at it would
//! wait for this very thread. Landlock also forbids unmounting. So a second process unmounts and opens the root for the periodic flush.

use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, RestrictionStatus,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus,
};

/// What stays within reach.
pub(crate) struct Reach {
    pub(crate) archive: PathBuf,
    pub(crate) runtime: PathBuf,
    pub(crate) state: Option<PathBuf>,
}

/// Rights that are taken away at all: those of files up to ABI 3, so that ioctls of the connection stay, and TCP.
const FILES: ABI = ABI::V3;
const NETWORK: ABI = ABI::V4;

/// Restricts this thread and all that it starts. The answer says how much of it the kernel does.
///
/// # Errors
/// When the kernel has Landlock and refuses it: nothing is restricted then.
pub(crate) fn enter(reach: &Reach) -> Result<bool, RulesetError> {
    let status: RestrictionStatus = rules(reach)?.restrict_self()?;
    Ok(status.ruleset != RulesetStatus::NotEnforced)
}

fn rules(reach: &Reach) -> Result<RulesetCreated, RulesetError> {
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(FILES))?
        .handle_access(AccessNet::from_all(NETWORK))?
        .create()?;
    let file = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
    // Names of neighbours, for syncing the directory; nothing of what they contain.
    let parent = reach.archive.parent().unwrap_or(Path::new("/"));
    let names = AccessFs::ReadDir | AccessFs::MakeSock | AccessFs::MakeDir | AccessFs::RemoveFile;
    let mut wanted: Vec<(&Path, BitFlags<AccessFs>)> = vec![
        (&reach.archive, file),
        (parent, AccessFs::ReadDir.into()),
        (&reach.runtime, names),
        // Each event loop has a descriptor of its own.
        (Path::new(crate::mount::DEVICE), AccessFs::ReadFile | AccessFs::WriteFile),
        // Aborting a connection whose users do not let go, and the read-ahead of the mount.
        (Path::new("/sys/fs/fuse/connections"), AccessFs::WriteFile.into()),
        (Path::new("/sys/devices/virtual/bdi"), AccessFs::WriteFile.into()),
    ];
    if let Some(state) = &reach.state {
        wanted.push((state, file | AccessFs::ReadDir | AccessFs::MakeReg | AccessFs::RemoveFile));
    }
    for (path, access) in wanted {
        // What is not there cannot be opened either way.
        if let Ok(opened) = PathFd::new(path) {
            rules = rules.add_rule(PathBeneath::new(opened, access))?;
        }
    }
    Ok(rules)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::*;

    /// In a thread of its own: what is given up does not come back.
    #[test]
    fn only_what_is_within_reach_can_be_opened() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for name in ["host", "runtime", "state"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("host/a.lbx"), b"archive").unwrap();
        fs::write(at("host/other"), b"other").unwrap();
        let reach = Reach { archive: at("host/a.lbx"), runtime: at("runtime"), state: Some(at("state")) };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if !enter(&reach).unwrap() {
                    // A kernel without Landlock: everything must go on as before.
                    assert!(File::open("/etc/passwd").is_ok());
                    println!("this kernel has no Landlock");
                    return;
                }
                assert!(File::open("/etc/passwd").is_err());
                assert!(File::open(at("host/other")).is_err());
                assert!(fs::write(at("host/new"), b"").is_err());
                assert!(std::process::Command::new("/bin/true").status().is_err());
                assert!(std::net::TcpListener::bind("127.0.0.1:0").is_err());
                assert!(fs::OpenOptions::new().read(true).write(true).open(at("host/a.lbx")).is_ok());
                assert!(File::open(at("host")).is_ok());
                fs::write(at("state/new"), b"seen").unwrap();
                fs::rename(at("state/new"), at("state/seen")).unwrap();
                let socket = std::os::unix::net::UnixListener::bind(at("runtime/socket")).unwrap();
                drop(socket);
                fs::remove_file(at("runtime/socket")).unwrap();
            });
        });
        assert!(File::open("/etc/passwd").is_ok(), "other threads keep their rights");
    }
}
