//! The one table of the mount program's exit codes; `lockbox` uses the same numbers.

use std::fmt;

use lockbox::Error;
use serde::{Deserialize, Serialize};

pub const USAGE: u8 = 1;
pub const OTHER: u8 = 2;
pub const WRONG_KEY: u8 = 10;
pub const NOT_ARCHIVE: u8 = 11;
pub const DAMAGED: u8 = 12;
pub const IN_USE: u8 = 13;
pub const NO_SPACE: u8 = 14;
pub const MOUNT_FAILED: u8 = 15;
pub const OLDER: u8 = 16;

pub fn exit_code(error: &Error) -> u8 {
    match error {
        Error::WrongKey => WRONG_KEY,
        Error::NotArchive(_) | Error::UnsupportedVersion(_) => NOT_ARCHIVE,
        Error::Damaged(_) => DAMAGED,
        Error::InUse(_) => IN_USE,
        Error::NoSpace(_) => NO_SPACE,
        Error::Older(_) | Error::Forked(_) => OLDER,
        _ => OTHER,
    }
}

/// Why the program ends without success: a sentence for the user and the exit code.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub code: u8,
    pub message: String,
}

impl Failure {
    pub fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }

    pub fn usage(message: impl Into<String>) -> Failure {
        Failure::new(USAGE, message)
    }

    pub fn other(message: impl Into<String>) -> Failure {
        Failure::new(OTHER, message)
    }

    pub fn mount(message: impl Into<String>) -> Failure {
        Failure::new(MOUNT_FAILED, message)
    }
}

impl From<lockbox_secrets::Error> for Failure {
    fn from(error: lockbox_secrets::Error) -> Failure {
        match error.kind {
            lockbox_secrets::Kind::Usage => Failure::usage(error.sentence),
            lockbox_secrets::Kind::Source => Failure::other(error.sentence),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let message = match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        };
        Failure::new(exit_code(&error), message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_carries_the_source_of_a_host_error() {
        let failure = Failure::from(Error::io("open a.lbx", std::io::Error::from_raw_os_error(13)));
        assert_eq!(failure.code, OTHER);
        assert!(failure.message.starts_with("open a.lbx: Permission denied"), "{failure}");
        assert_eq!(Failure::from(Error::WrongKey).code, WRONG_KEY);
    }
}
