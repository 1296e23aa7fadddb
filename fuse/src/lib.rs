//! FUSE front end of lockbox: the adapter between kernel requests and the file system, and the
//! mount daemon.

pub mod adapter;
mod auto_unmount;
mod control_handler;
mod convert;
pub mod daemon;
mod dbus;
mod deadlock_watchdog;
pub mod event_loop;
pub mod fetcher;
mod filter;
pub mod kernel;
pub mod kernel_cache;
pub mod logging;
pub mod mount;
pub mod mount8;
pub mod mount_agent;
mod replica;
mod sandbox;
pub mod session;
mod shutdown;
mod snapshot_requests;
mod ticker;

use std::ffi::OsString;
use std::path::Path;

use lockbox::Error;
use lockbox::error::Refusal;
use lockbox_host::Program;
use lockbox_host::mount_options::MountOptions;
use serde::{Deserialize, Serialize};

/// Configuration that the mount command passes to the daemon: the archive, its mount point and its
/// options. Paths are absolute and may have any encoding.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DaemonConfig {
    pub archive: OsString,
    pub point: OsString,
    pub options: MountOptions,
    pub verbose: bool,
    /// The mount point was created for this mount and is removed after the unmount.
    #[serde(default)]
    pub made: bool,
}

impl DaemonConfig {
    pub fn archive(&self) -> &Path {
        Path::new(&self.archive)
    }

    pub fn point(&self) -> &Path {
        Path::new(&self.point)
    }
}

/// The program `mount.lockbox`.
#[derive(Clone)]
pub struct MountProgram;

pub type Failure = lockbox_host::Failure<MountProgram>;

impl Program for MountProgram {
    const NAME: &'static str = "mount.lockbox";
    const NAMES_ARCHIVE: bool = false;

    fn remedy(error: &Error) -> String {
        let remedy = match error {
            Error::OlderCopy(_) => "; mount it with -o accept-older to accept it",
            Error::ForkedCopy(_) => "; mount this one with -o accept-fork to accept it",
            Error::Replaced(_) => "; mount this one with -o accept-other to accept it",
            // A mount meets no other refusals.
            Error::Refused(Refusal::KdfCost { .. }) => "; raise the limit with -o kdf-limit=N if you trust the archive",
            Error::Refused(Refusal::EncryptedIdentity { .. }) => {
                "; decrypt it with age into a pipe, such as --identity <(age -d FILE)"
            }
            _ => "",
        };
        remedy.to_owned()
    }
}

#[cfg(test)]
mod tests {
    use lockbox_host::{OTHER, WRONG_KEY};

    use super::*;

    /// Opens an archive for a test. A child process of a concurrent test inherits open
    /// descriptors, with their lock, until it executes.
    pub(crate) fn open_when_free(
        path: &Path,
        key: &lockbox::keys::UnlockedKey,
        options: &lockbox::archive::OpenOptions,
    ) -> lockbox::archive::Archive {
        loop {
            match lockbox::archive::Archive::open(path, key, options) {
                Err(Error::InUse(_)) => std::thread::yield_now(),
                opened => return opened.unwrap(),
            }
        }
    }

    #[test]
    fn a_failure_carries_the_source_of_a_host_error() {
        let failure = Failure::from(Error::io("open a.lbx", std::io::Error::from_raw_os_error(13)));
        assert_eq!(failure.code, OTHER);
        assert_eq!(failure.message, "open a.lbx: Permission denied");
        assert_eq!(Failure::from(Error::WrongKey).code, WRONG_KEY);
    }

    #[test]
    fn advice_names_options_of_this_program() {
        for (error, option) in [
            (Error::OlderCopy("facts".into()), "accept-older"),
            (Error::ForkedCopy("facts".into()), "accept-fork"),
            (Error::Replaced("facts".into()), "accept-other"),
        ] {
            let Failure { message, .. } = Failure::from(error);
            assert!(message.contains("facts; mount ") && message.contains(&format!("-o {option} ")), "{message}");
            assert!(!message.contains("--accept"), "{message}");
            MountOptions::parse(&[option.to_owned()]).unwrap();
        }
        let costly = Refusal::KdfCost { slot: 1, memory: 4, passes: 1, most_cost: 1, most_memory: 1 };
        let Failure { message, .. } = Failure::from(Error::Refused(costly));
        assert!(message.starts_with("deriving ") && message.contains("-o kdf-limit=N ") && !message.contains("--"));
        MountOptions::parse(&["kdf-limit=9".to_owned()]).unwrap();
    }
}
