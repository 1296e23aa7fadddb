//! Errors, in few kinds chosen by how the caller reacts; timestamps and statistics shared by all
//! layers.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fmt, io};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

/// Result of every fallible operation of the crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Error of the library. The mount program maps file-system kinds one to one to an errno; the
/// command line maps archive kinds to exit codes.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("no such file or directory")]
    NotFound,
    #[error("file exists")]
    Exists,
    #[error("not a directory")]
    NotDirectory,
    #[error("is a directory")]
    IsDirectory,
    #[error("directory not empty")]
    NotEmpty,
    #[error("name too long")]
    NameTooLong,
    #[error("invalid argument: {0}")]
    Invalid(String),
    /// Invalid request for which the calling program can suggest a remedy.
    #[error("{0}")]
    Refused(Refusal),
    #[error("permission denied")]
    PermissionDenied,
    #[error("operation not permitted")]
    NotPermitted,
    #[error("file too large")]
    FileTooLarge,
    #[error("too many links")]
    TooManyLinks,
    #[error("no such attribute")]
    NoAttribute,
    #[error("attribute too large")]
    AttributeTooLarge,
    #[error("result does not fit")]
    RangeTooSmall,
    #[error("stale handle")]
    Stale,
    #[error("no such data or hole")]
    NoSuchRange,
    #[error("not supported: {0}")]
    Unsupported(String),
    #[error("no space left: {0}")]
    NoSpace(String),
    #[error("read-only: {0}")]
    ReadOnly(String),

    #[error("not a lockbox archive: {0}")]
    NotArchive(String),
    /// The archive needs a newer program.
    #[error("unsupported archive: {0}")]
    UnsupportedVersion(String),
    /// No key slot opens with the given credentials.
    #[error("wrong passphrase or key")]
    WrongKey,
    /// Authentic content is missing or altered; the message names the page.
    #[error("damaged archive: {0}")]
    Damaged(String),
    /// The archive is older than a version seen before. The message has the facts; the program adds
    /// how to accept it.
    #[error("older copy: {0}")]
    OlderCopy(String),
    /// The archive has diverged from a version seen before: neither descends from the other. The
    /// message has the facts.
    #[error("diverged copies: {0}")]
    ForkedCopy(String),
    /// Another archive was seen at this path before. The message has the facts.
    #[error("another archive: {0}")]
    Replaced(String),
    /// Another process holds the archive; the message names it.
    #[error("archive in use: {0}")]
    InUse(String),
    /// An earlier write or barrier failed; all writes are rejected.
    #[error("archive is read-only after a failed write: {0}")]
    WriteFailed(String),
    /// The operation was interrupted by the signal of this number.
    #[error("interrupted")]
    Interrupted(u8),
    /// A system call of the host failed.
    #[error("{context}")]
    Io {
        context: String,
        #[source]
        source: Arc<io::Error>,
    },
}

impl Error {
    /// Wraps a host error; a full disk becomes [`Error::NoSpace`].
    pub fn io(context: impl Into<String>, source: io::Error) -> Self {
        let context = context.into();
        match Errno::from_io_error(&source) {
            // FBIG: a file size limit of the host file system is treated like a full disk.
            Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Error::NoSpace(format!("{context}: {source}")),
            Some(Errno::ROFS) => Error::ReadOnly(format!("{context}: {source}")),
            _ => Error::Io { context, source: Arc::new(source) },
        }
    }

    /// Returns the message, followed by that of the cause.
    pub(crate) fn with_cause(&self) -> String {
        match std::error::Error::source(self) {
            Some(source) => format!("{self}: {source}"),
            None => self.to_string(),
        }
    }

    /// Creates the error of a request to a server. `context` is the whole sentence.
    pub fn request(context: impl Into<String>, kind: io::ErrorKind) -> Self {
        Error::Io { context: context.into(), source: Arc::new(io::Error::new(kind, FailedRequest { advice: None })) }
    }

    /// Like [`Error::request`], for a sentence that ends with `advice`, the next step of the user.
    pub fn advised_request(sentence: impl fmt::Display, advice: &'static str, kind: io::ErrorKind) -> Self {
        let source = Arc::new(io::Error::new(kind, FailedRequest { advice: Some(advice) }));
        Error::Io { context: format!("{sentence}; {advice}"), source }
    }

    /// Returns the kind of a failed request to a server; None for any error of this host.
    pub fn request_kind(&self) -> Option<io::ErrorKind> {
        self.failed_request().map(|(kind, _)| kind)
    }

    /// Returns whether a server does not answer or refuses access, so that further requests would
    /// fail as well, each after the same wait.
    pub(crate) fn is_server_unavailable(&self) -> bool {
        matches!(self.request_kind(), Some(io::ErrorKind::TimedOut | io::ErrorKind::PermissionDenied))
    }

    /// Returns whether a page is lost while others may be readable.
    pub(crate) fn is_page_loss(&self) -> bool {
        matches!(self, Error::Damaged(_) | Error::Io { .. }) && !self.is_server_unavailable()
    }

    /// Returns the next step after a failed request to a server, if there is one.
    pub fn request_advice(&self) -> Option<&'static str> {
        self.failed_request().and_then(|(_, request)| request.advice)
    }

    fn failed_request(&self) -> Option<(io::ErrorKind, &FailedRequest)> {
        match self {
            Error::Io { source, .. } => Some((source.kind(), source.get_ref()?.downcast_ref()?)),
            _ => None,
        }
    }

    /// Creates the error of a structure that failed to decode or authenticate.
    pub fn damaged(detail: impl Into<String>) -> Self {
        Error::Damaged(detail.into())
    }

    pub fn invalid(detail: impl Into<String>) -> Self {
        Error::Invalid(detail.into())
    }
}

/// Source of the errors of [`Error::request`], which distinguishes them from errors of this host.
#[derive(Debug, thiserror::Error)]
#[error("the request failed")]
struct FailedRequest {
    advice: Option<&'static str>,
}

/// Request that was refused although there is a remedy. Carries the facts; the calling program
/// words the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Trying a key slot costs more than the caller allows; memory in MiB, cost in MiB times
    /// passes.
    #[error(
        "deriving the key of slot {slot} costs more than the limit: memory={memory} MiB passes={passes} limit={most_cost} MiB x passes, \
         {most_memory} MiB"
    )]
    KdfCost { slot: usize, memory: u32, passes: u32, most_cost: u64, most_memory: u32 },
    #[error("{name}: the identity file is encrypted")]
    EncryptedIdentity { name: String },
    /// The file to be replaced has other hard links.
    #[error("{path} has {links} hard links, and the others would still have the old file")]
    Links { path: String, links: u64 },
    #[error("the archive's passphrase goes with a key file")]
    PassphraseWithKeyFile,
    /// An existing object must not be replaced; the clause names object and path.
    #[error("{what}")]
    ExistingObject { what: String },
    #[error("several key slots have a passphrase")]
    SeveralPassphrases,
    #[error("key slot {slot} has no passphrase that could be changed: it is a {kind}")]
    NoPassphrase { slot: usize, kind: &'static str },
    #[error("key slot {slot} has an unknown kind and cannot be preserved")]
    UnknownKey { slot: usize },
    #[error("key slot {slot} was created by an older program and cannot be preserved without its secret")]
    UndescribedKey { slot: usize },
    #[error("key slot {slot} cannot be preserved: {reason}")]
    UnkeptKey { slot: usize, reason: String },
    #[error("the archive has no snapshot '{name}'")]
    NoSnapshot { name: String },
    #[error("the archive has a snapshot '{name}' already")]
    SnapshotExists { name: String },
    #[error("{why}; it was left unchanged")]
    Destination { why: &'static str },
    /// The earlier backup cannot be read, while the archive can.
    #[error("damaged backup: {detail}; make one under another name, and keep this one until then")]
    DamagedBackup { detail: String },
    /// The backup's medium failed, while the archive is usable.
    #[error("{detail}")]
    FailedBackup { detail: String },
    #[error("'{name}' looks like a name of a scheduled snapshot, which mounts remove automatically")]
    NameOfSchedule { name: String },
}

/// Point in time: seconds since 1970-01-01T00:00:00Z (may be negative) and nanoseconds below 10^9.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    pub seconds: i64,
    pub nanos: u32,
}

impl Timestamp {
    /// Formats the time in UTC as `2026-11-21 09:30:00`.
    pub fn utc(self) -> String {
        lockbox_terminal::utc(self.seconds)
    }

    /// Returns the time since `earlier`; zero if the clock was set back.
    pub(crate) fn since(self, earlier: Timestamp) -> Duration {
        let seconds = u64::try_from(self.seconds.saturating_sub(earlier.seconds)).unwrap_or(0);
        let end = Duration::from_secs(seconds) + Duration::from_nanos(self.nanos.into());
        if self.seconds < earlier.seconds {
            Duration::ZERO
        } else {
            end.saturating_sub(Duration::from_nanos(earlier.nanos.into()))
        }
    }

    pub fn from_system(time: SystemTime) -> Self {
        match time.duration_since(UNIX_EPOCH) {
            Ok(d) => Timestamp { seconds: d.as_secs() as i64, nanos: d.subsec_nanos() },
            Err(before) => {
                let d = before.duration();
                let (mut seconds, mut nanos) = (-(d.as_secs() as i64), d.subsec_nanos());
                if nanos > 0 {
                    seconds -= 1;
                    nanos = 1_000_000_000 - nanos;
                }
                Timestamp { seconds, nanos }
            }
        }
    }
}

/// Size and hit counts of a cache since the archive was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStats {
    pub bytes: u64,
    pub hits: u64,
    pub misses: u64,
}

/// Snapshots of an archive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotStats {
    pub count: u64,
    /// Creation time of the newest snapshot.
    pub newest: Option<Timestamp>,
}

/// Log writes by fsync since the archive was opened; all zero without a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogStats {
    pub entries: u64,
    pub bytes: u64,
    /// Bytes of entries that are not part of a commit yet.
    pub used_bytes: u64,
}
