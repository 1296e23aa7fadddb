//! Failure messages and exit codes of the mount program.

use std::ffi::OsStr;
use std::path::Path;

use lockbox::Error;
use lockbox::error::Refusal;
use lockbox_host::{Program, USAGE};

/// Exit codes of mount(8): wrong usage, a system error, and a failed mount.
const MOUNT_8_USAGE: u8 = 1;
const MOUNT_8_SYSTEM: u8 = 2;
const MOUNT_8_FAILED: u8 = 32;

/// Directories in which mount(8), automount daemons and systemd look for mount programs.
const SYSTEM_DIRECTORIES: [&str; 2] = ["/sbin", "/usr/sbin"];

/// Returns whether the program was called as mount(8) calls it, by its path in a system directory.
/// It then uses the exit codes of mount(8), which passes them on as its own.
pub fn is_called_as_mount_8(name: Option<&OsStr>) -> bool {
    name.and_then(|name| Path::new(name).parent())
        .is_some_and(|directory| SYSTEM_DIRECTORIES.iter().any(|system| directory == Path::new(system)))
}

/// Converts to an exit code of mount(8).
pub fn mount_8_code(failure: &Failure) -> u8 {
    match failure.code {
        USAGE => MOUNT_8_USAGE,
        _ if failure.system => MOUNT_8_SYSTEM,
        _ => MOUNT_8_FAILED,
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
            lockbox_host::mount_options::MountOptions::parse(&[option.to_owned()]).unwrap();
        }
        let costly = Refusal::KdfCost { slot: 1, memory: 4, passes: 1, most_cost: 1, most_memory: 1 };
        let Failure { message, .. } = Failure::from(Error::Refused(costly));
        assert!(message.starts_with("deriving ") && message.contains("-o kdf-limit=N ") && !message.contains("--"));
        lockbox_host::mount_options::MountOptions::parse(&["kdf-limit=9".to_owned()]).unwrap();
    }

    #[test]
    fn a_call_by_a_path_of_mount_8_uses_its_codes() {
        for (name, expected) in [
            ("/sbin/mount.lockbox", true),
            ("/usr/sbin/mount.fuse.lockbox", true),
            ("mount.lockbox", false),
            ("./mount.lockbox", false),
            ("/usr/local/bin/mount-lockbox", false),
            ("/usr/sbin/x/mount.lockbox", false),
        ] {
            assert_eq!(is_called_as_mount_8(Some(OsStr::new(name))), expected, "{name}");
        }
        assert!(!is_called_as_mount_8(None));
        for (failure, code) in [
            (Failure::usage("x"), 1),
            (Failure::system("x"), 2),
            (Failure::other("x"), 32),
            (Failure::mount("x"), 32),
            (Failure::new(WRONG_KEY, "x"), 32),
        ] {
            assert_eq!(mount_8_code(&failure), code);
        }
    }
}
