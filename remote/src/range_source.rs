//! Range-read interface of remote files, and its errors.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use lockbox::Error;

/// Version of a file as reported by its server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FileVersion {
    /// Length in bytes.
    pub(crate) length: u64,
    /// Strong entity tag with its quotes, if the server sends one.
    pub(crate) tag: Option<String>,
    /// Modification time as the server formats it.
    pub(crate) modified: Option<String>,
}

/// Error of a request to a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RemoteError {
    /// Temporary failure: no connection, no response, a truncated one, an overloaded server.
    Transient(String),
    /// The file was replaced by another version.
    Changed,
    /// The content cannot be the content that was written: a sentence about it.
    Damaged(String),
    /// The file does not exist.
    NotFound,
    /// The store has no space.
    NoSpace(String),
    /// The server denies access.
    Denied(String),
    /// The response is unusable, and a retry will not help.
    Unsupported(String),
}

impl RemoteError {
    /// Returns a description with the server as its subject.
    pub(crate) fn message(&self) -> String {
        match self {
            RemoteError::Transient(why) => format!("it does not answer: {why}"),
            RemoteError::Changed => "the file was changed meanwhile".into(),
            RemoteError::NotFound => "there is nothing of this name".into(),
            RemoteError::Damaged(why)
            | RemoteError::NoSpace(why)
            | RemoteError::Denied(why)
            | RemoteError::Unsupported(why) => why.clone(),
        }
    }

    /// Converts an error of an open: a missing file is `NotFound`.
    pub(crate) fn into_error(self, name: &str) -> Error {
        match self {
            RemoteError::NotFound => Error::request(format!("cannot open {name}"), io::ErrorKind::NotFound),
            other => other.into_deferred_error(name),
        }
    }

    pub(crate) fn into_deferred_error(self, name: &str) -> Error {
        // A directory has none.
        let server = if name.starts_with("file:") { name.to_owned() } else { format!("the server of {name}") };
        match self {
            RemoteError::Transient(why) => {
                Error::request(format!("{server} does not answer: {why}"), io::ErrorKind::TimedOut)
            }
            RemoteError::NoSpace(why) => Error::NoSpace(format!("{name}: {why}")),
            RemoteError::Denied(why) => {
                Error::request(format!("{server} cannot be asked: {why}"), io::ErrorKind::PermissionDenied)
            }
            RemoteError::Unsupported(why) => {
                Error::request(format!("{server} cannot be used: {why}"), io::ErrorKind::Unsupported)
            }
            RemoteError::Damaged(why) => Error::damaged(format!("{name}: {why}")),
            RemoteError::Changed => stale(format!(
                "{name} was changed on its server while it was read; what is there now has to be opened anew"
            )),
            RemoteError::NotFound => stale(format!("{name} was removed from its server")),
        }
    }
}

fn stale(context: String) -> Error {
    Error::request(context, io::ErrorKind::StaleNetworkFileHandle)
}

/// Result of a request to a server.
pub(crate) type RemoteResult<T> = Result<T, RemoteError>;

/// Identifies the content of a range: equal keys of equal ranges mean equal bytes.
pub(crate) type RangeKey = [u8; 32];

/// Remote file that is read by ranges.
pub(crate) trait RangeSource: Send + Sync {
    /// Reads the first `count` bytes, or all of a shorter file, of the current version.
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)>;

    /// Returns whether each version was created atomically: then missing parts mean damage.
    fn is_atomic(&self) -> bool {
        false
    }

    /// Returns the scope in which cache keys of different versions can be compared. None if no
    /// content is known to be shared between versions: then all keys are equal.
    fn cache_scope(&self) -> Option<&[u8]> {
        None
    }

    /// Returns the cache key of a range.
    fn cache_key(&self, _range: Range<u64>) -> RangeKey {
        RangeKey::default()
    }

    /// Fills `out` with bytes in memory from `offset` on, without a request. Returns false if any
    /// byte is missing; `out` is undefined then.
    fn read_cached(&self, _offset: u64, _out: &mut [u8]) -> bool {
        false
    }

    /// Reads exactly a range inside of the file, if the file still has this version.
    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>>;
}

impl<S: RangeSource + ?Sized> RangeSource for Arc<S> {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        (**self).read_start(count)
    }

    fn is_atomic(&self) -> bool {
        (**self).is_atomic()
    }

    fn cache_scope(&self) -> Option<&[u8]> {
        (**self).cache_scope()
    }

    fn cache_key(&self, range: Range<u64>) -> RangeKey {
        (**self).cache_key(range)
    }

    fn read_cached(&self, offset: u64, out: &mut [u8]) -> bool {
        (**self).read_cached(offset, out)
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        (**self).read_range(version, range)
    }
}
