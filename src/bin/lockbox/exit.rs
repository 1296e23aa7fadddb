//! The one table of exit codes, and the failure that carries one to the end of the program.

use std::error::Error as _;
use std::path::Path;

use lockbox::Error;
use lockbox::error::Refusal;
use lockbox::exchange::{Cause, Problem};
use lockbox_terminal::display;

use crate::advice;

pub(crate) const USAGE: u8 = 1;
pub(crate) const OTHER: u8 = 2;
pub(crate) const WRONG_KEY: u8 = 10;
pub(crate) const NOT_ARCHIVE: u8 = 11;
pub(crate) const DAMAGED: u8 = 12;
pub(crate) const IN_USE: u8 = 13;
pub(crate) const NO_SPACE: u8 = 14;
pub(crate) const MOUNT_FAILED: u8 = 15;
pub(crate) const OLDER: u8 = 16;
pub(crate) const NO_LINK: u8 = 20;
pub(crate) const NO_DAEMON: u8 = 21;

/// Shown under the list of commands.
pub(crate) const HELP: &str = "\
Exit codes: 0 success, 1 usage, 2 other error, 10 wrong passphrase, 11 not an archive or unsupported version, \
12 damaged, 13 in use, 14 no space, 15 mount failed, 16 older copy or copies written apart, \
20 a link that opens nothing, 21 no share daemon, 128 and the signal's number when interrupted";

pub(crate) fn code(error: &Error) -> u8 {
    match error {
        Error::WrongKey => WRONG_KEY,
        Error::NotArchive(_) | Error::UnsupportedVersion(_) => NOT_ARCHIVE,
        Error::Damaged(_) => DAMAGED,
        Error::InUse(_) => IN_USE,
        Error::NoSpace(_) => NO_SPACE,
        Error::Older(_) | Error::Forked(_) => OLDER,
        Error::Interrupted(signal) => by_signal(*signal),
        _ => OTHER,
    }
}

/// As shells show a program that a signal ended.
pub(crate) fn by_signal(signal: u8) -> u8 {
    128 + signal
}

/// What umount(8) passes on as its own when it calls this program as umount.lockbox: 1 for wrong usage, 32 for a failure.
pub(crate) fn umount_8_code(code: u8) -> u8 {
    if code == USAGE { USAGE } else { 32 }
}

/// Why the program ends without success: a sentence for the user and the exit code.
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(code: u8, message: impl Into<String>) -> Failure {
        Failure { code, message: message.into() }
    }

    pub(crate) fn other(message: impl Into<String>) -> Failure {
        Failure::new(OTHER, message)
    }

    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure::new(USAGE, message)
    }

    /// A failure that concerns `path`, which is named unless the error does so itself.
    pub(crate) fn at(path: &Path, error: &Error) -> Failure {
        let message = match error {
            Error::Refused(Refusal::Costly { .. }) => format!("{}: {}", shown(path), sentence(error)),
            Error::Io { .. } | Error::NoSpace(_) | Error::ReadOnly(_) | Error::Invalid(_) | Error::Refused(_) => {
                sentence(error)
            }
            _ => format!("{}: {}", shown(path), sentence(error)),
        };
        Failure::new(code(error), message)
    }

    /// The gravest of the failures of single objects, which were shown one by one; None without any.
    pub(crate) fn of_problems(problems: &[Problem]) -> Option<Failure> {
        let worst = problems
            .iter()
            .map(|problem| match &problem.cause {
                Cause::Changed | Cause::Itself => OTHER,
                Cause::Failed(error) => code(error),
            })
            .max()?;
        let count = problems.len();
        let objects = if count == 1 { "1 object was" } else { &format!("{count} objects were") };
        Some(Failure::new(worst, format!("{objects} not copied in full; see above")))
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
        Failure::new(code(&error), sentence(&error))
    }
}

/// The error with its causes, without the host's numbers for them.
pub(crate) fn sentence(error: &Error) -> String {
    let mut text = match error {
        // The detail is a sentence of its own.
        Error::Invalid(detail) => detail.clone(),
        Error::Refused(refusal) => advice::sentence(refusal),
        Error::Older(_) => format!("{error}; use --accept-older to go on with it"),
        Error::Forked(_) => format!("{error}; use --accept-fork to go on with this one"),
        error => error.to_string(),
    };
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    lockbox_terminal::without_numbers(text)
}

/// An error of the host while something was done.
pub(crate) fn host(context: impl AsRef<str>, error: &std::io::Error) -> Failure {
    Failure::other(lockbox_terminal::without_numbers(format!("{}: {error}", context.as_ref())))
}

/// A path for messages.
pub(crate) fn shown(path: &Path) -> String {
    display(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sentence_has_the_causes_and_no_numbers() {
        let error = Error::io("cannot open a.lbx", std::io::Error::from_raw_os_error(13));
        assert_eq!(sentence(&error), "cannot open a.lbx: Permission denied");
        assert_eq!(sentence(&Error::Older("facts".into())), "older copy: facts; use --accept-older to go on with it");
        assert!(sentence(&Error::Forked("facts".into())).ends_with("facts; use --accept-fork to go on with this one"));
        assert_eq!(Failure::at(Path::new("a.lbx"), &Error::WrongKey).message, "a.lbx: wrong passphrase or key");
    }
}
