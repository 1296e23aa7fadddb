//! Table of exit codes, and the failure that carries one to the end of a program.

use std::error::Error as _;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::path::Path;

use lockbox::Error;
use lockbox::error::Refusal;
use serde::{Deserialize, Serialize};

use crate::secrets;

pub const USAGE: u8 = 1;
pub const OTHER: u8 = 2;
pub const WRONG_KEY: u8 = 10;
pub const NOT_ARCHIVE: u8 = 11;
pub const DAMAGED: u8 = 12;
pub const IN_USE: u8 = 13;
pub const NO_SPACE: u8 = 14;
pub const MOUNT_FAILED: u8 = 15;
pub const OLDER: u8 = 16;
/// A server does not answer.
pub const UNREACHABLE: u8 = 17;
/// A server refuses the request, or may not be asked.
pub const DENIED: u8 = 18;
/// There is no archive, or no bucket, of this name.
pub const NO_ARCHIVE: u8 = 19;
/// A source that is to be copied or compared does not exist.
pub const NO_SOURCE: u8 = 22;

/// Returns the exit code for an error of the library.
pub fn code(error: &Error) -> u8 {
    match error {
        Error::WrongKey => WRONG_KEY,
        Error::NotArchive(_) | Error::UnsupportedVersion(_) => NOT_ARCHIVE,
        Error::Damaged(_) | Error::Refused(Refusal::DamagedBackup { .. }) => DAMAGED,
        Error::InUse(_) => IN_USE,
        // A file that is too large for its target: for that one file the host is full.
        Error::NoSpace(_) | Error::FileTooLarge => NO_SPACE,
        Error::OlderCopy(_) | Error::ForkedCopy(_) | Error::Replaced(_) => OLDER,
        // As shells show a program that a signal ended.
        Error::Interrupted(signal) => 128 + signal,
        // A missing file of this host is an archive, a source or a target: the command knows which.
        _ => match error.request_kind() {
            Some(io::ErrorKind::TimedOut) => UNREACHABLE,
            Some(io::ErrorKind::PermissionDenied) => DENIED,
            Some(io::ErrorKind::NotFound) => NO_ARCHIVE,
            _ => OTHER,
        },
    }
}

/// Returns whether the host has no space for a write: a limit on the size of files counts as a full
/// disk of its own.
pub fn is_full(error: &io::Error) -> bool {
    use nix::libc::{EDQUOT, EFBIG, ENOSPC};
    matches!(error.raw_os_error(), Some(ENOSPC | EDQUOT | EFBIG))
}

/// Parts of messages that differ between programs: the name, and remedies, which are commands and
/// options of the program.
pub trait Program: Sized + 'static {
    const NAME: &'static str;
    /// True if a message about an archive begins with the archive's path.
    const NAMES_ARCHIVE: bool;

    /// Returns the words of an error that are not just the library's; None for all others.
    fn words(_error: &Error) -> Option<String> {
        None
    }

    /// Returns the next step of the user with the punctuation that joins it to the words; empty
    /// when the program knows none.
    fn remedy(error: &Error) -> String;

    /// Returns the failure of unlocking the archive at `path`.
    fn failure(path: &Path, error: Error) -> Failure<Self> {
        Failure::at(path, &error)
    }
}

/// Why the program `P` ends without success: a sentence for the user and the exit code.
#[derive(Clone, Serialize, Deserialize)]
#[serde(bound = "")]
pub struct Failure<P> {
    pub code: u8,
    /// Whole sentence, with the next step if there is one.
    pub message: String,
    /// The next step of the user alone.
    #[serde(default)]
    pub advice: Option<String>,
    /// The machine is at fault, not the archive, the user or the mount point.
    #[serde(default)]
    pub system: bool,
    #[serde(skip)]
    program: PhantomData<fn() -> P>,
}

impl<P> Failure<P> {
    pub fn new(code: u8, message: impl Into<String>) -> Failure<P> {
        let message = lockbox_terminal::without_numbers(message.into());
        Failure { code, message, advice: None, system: false, program: PhantomData }
    }

    /// Adds the next step of the user, with the punctuation that joins it to the message; nothing
    /// when it is empty.
    #[must_use]
    pub fn advised(mut self, remedy: &str) -> Failure<P> {
        self.message.push_str(remedy);
        let advice = remedy.trim_start_matches([';', ':', ' ']);
        self.advice = Some(advice.to_owned()).filter(|advice| !advice.is_empty());
        self
    }

    pub fn usage(message: impl Into<String>) -> Failure<P> {
        Failure::new(USAGE, message)
    }

    pub fn other(message: impl Into<String>) -> Failure<P> {
        Failure::new(OTHER, message)
    }

    pub fn mount(message: impl Into<String>) -> Failure<P> {
        Failure::new(MOUNT_FAILED, message)
    }

    /// A process or thread could not be started.
    pub fn system(message: impl Into<String>) -> Failure<P> {
        Failure { system: true, ..Failure::other(message) }
    }

    /// An error of the host while something was done.
    pub fn host(context: impl fmt::Display, error: &io::Error) -> Failure<P> {
        let code = if is_full(error) { NO_SPACE } else { OTHER };
        Failure::new(code, format!("{context}: {error}"))
    }
}

impl<P: Program> Failure<P> {
    /// Returns the error with its causes, without the host's numbers for them.
    pub fn sentence(error: &Error) -> String {
        words::<P>(error) + &P::remedy(error)
    }

    /// Returns a failure that concerns the object with this name.
    pub fn of(name: impl fmt::Display, error: &Error) -> Failure<P> {
        Failure::new(code(error), format!("{name}: {}", words::<P>(error))).advised_on(error)
    }

    /// Returns a failure that concerns the archive at `path`. The path is named unless the error or
    /// the program already names the object.
    pub fn at(path: &Path, error: &Error) -> Failure<P> {
        let says_it = match error {
            Error::Refused(refusal) => !matches!(refusal, Refusal::KdfCost { .. }),
            Error::Io { .. } | Error::NoSpace(_) | Error::ReadOnly(_) | Error::Invalid(_) => true,
            _ => false,
        };
        let words = words::<P>(error);
        let words = if says_it { words } else { about::<P>(path, words) };
        Failure::new(code(error), words).advised_on(error)
    }

    /// Adds the next step after an error; that of a request is in its words already.
    fn advised_on(self, error: &Error) -> Failure<P> {
        match error.request_advice() {
            Some(advice) => Failure { advice: Some(advice.to_owned()), ..self },
            None => self.advised(&P::remedy(error)),
        }
    }
}

/// Returns the error with its causes, without its remedy.
fn words<P: Program>(error: &Error) -> String {
    let mut text = P::words(error).unwrap_or_else(|| error.to_string());
    let mut source = error.source().filter(|_| error.request_kind().is_none());
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    lockbox_terminal::without_numbers(text)
}

pub(crate) fn about<P: Program>(path: &Path, sentence: String) -> String {
    if P::NAMES_ARCHIVE { format!("{}: {sentence}", crate::shown(path)) } else { sentence }
}

impl<P> From<secrets::Error> for Failure<P> {
    fn from(error: secrets::Error) -> Failure<P> {
        match error.kind {
            secrets::Kind::Usage => Failure::usage(error.sentence),
            secrets::Kind::Source => Failure::other(error.sentence),
            // As when a signal of theirs ended it at a terminal.
            secrets::Kind::Left => Failure::new(128 + nix::libc::SIGINT as u8, error.sentence),
        }
    }
}

impl<P: Program> From<Error> for Failure<P> {
    fn from(error: Error) -> Failure<P> {
        Failure::new(code(&error), words::<P>(&error)).advised_on(&error)
    }
}

impl<P> fmt::Display for Failure<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl<P> fmt::Debug for Failure<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.message, self.code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Named;

    impl Program for Named {
        const NAME: &'static str = "named";
        const NAMES_ARCHIVE: bool = true;

        fn remedy(error: &Error) -> String {
            if matches!(error, Error::OlderCopy(_)) { "; accept it".into() } else { String::new() }
        }
    }

    #[test]
    fn a_sentence_has_the_causes_and_no_numbers() {
        let error = Error::io("cannot open a.lbx", io::Error::from_raw_os_error(13));
        assert_eq!(Failure::<Named>::sentence(&error), "cannot open a.lbx: Permission denied");
        let failure = Failure::<Named>::from(error);
        assert_eq!((failure.code, &*failure.message), (OTHER, "cannot open a.lbx: Permission denied"));
        let refused = Error::request("a server refuses; ask another", io::ErrorKind::PermissionDenied);
        assert_eq!(Failure::<Named>::sentence(&refused), "a server refuses; ask another");
        assert_eq!(code(&refused), DENIED);
        assert_eq!(code(&Error::request("no answer", io::ErrorKind::TimedOut)), UNREACHABLE);
        assert_eq!(code(&Error::request("no bucket", io::ErrorKind::NotFound)), NO_ARCHIVE);
        assert_eq!(code(&Error::io("cannot open a.lbx", io::Error::from_raw_os_error(2))), OTHER);
        assert_eq!(Failure::<Named>::from(Error::OlderCopy("facts".into())).message, "older copy: facts; accept it");
    }

    #[test]
    fn the_next_step_is_a_part_of_the_message_and_a_value_of_its_own() {
        let older = Failure::<Named>::from(Error::OlderCopy("facts".into()));
        assert_eq!(older.advice.as_deref(), Some("accept it"));
        let refused = Error::advised_request("a server refuses", "ask another", io::ErrorKind::PermissionDenied);
        let refused = Failure::<Named>::at(Path::new("a.lbx"), &refused);
        assert_eq!(
            (&*refused.message, refused.advice.as_deref()),
            ("a server refuses; ask another", Some("ask another"))
        );
        assert_eq!(Failure::<Named>::from(Error::WrongKey).advice, None);
    }

    #[test]
    fn the_archive_is_named_unless_the_error_says_what_it_is_about() {
        let at = |error: &Error| Failure::<Named>::at(Path::new("a.lbx"), error);
        assert_eq!(at(&Error::WrongKey).message, "a.lbx: wrong passphrase or key");
        assert_eq!(at(&Error::WrongKey).code, WRONG_KEY);
        assert_eq!(at(&Error::Invalid("x".into())).message, "invalid argument: x");
        assert_eq!(at(&Error::Interrupted(2)).code, 130);
    }
}
