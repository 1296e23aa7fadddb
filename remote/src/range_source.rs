//! Range-read interface of remote files, its errors, and the metrics of its requests.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockbox::Error;
use lockbox_terminal::display;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

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
    /// The server asks for a pause before the next request.
    Busy {
        why: String,
        after: Duration,
    },
    /// The file was replaced by another version.
    Changed,
    /// The content cannot be the content that was written: a sentence about it.
    Damaged(String),
    NotFound,
    NoSpace(String),
    /// Access is denied before a store answers, or by a web server.
    Denied(String),
    Refused(StoreRefusal),
    NoBucket(String),
    /// The response is unusable, and a retry will not help.
    Unsupported(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StoreRefusal {
    pub(crate) why: String,
    pub(crate) remedy: &'static str,
    /// The object may not exist: a user without the right to list is refused missing objects.
    pub(crate) hides_missing: bool,
}

impl RemoteError {
    /// Returns whether the request may succeed later without a change by a user.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, RemoteError::Transient(_) | RemoteError::Busy { .. })
    }

    /// Returns the pause that the server asks for; None for zero, as of an invalid value or a past
    /// date: a wait of zero would never reach a time limit.
    pub(crate) fn retry_after(&self) -> Option<Duration> {
        if let RemoteError::Busy { after, .. } = self { Some(*after).filter(|after| !after.is_zero()) } else { None }
    }

    /// Returns whether the refusal may mean that the object does not exist.
    pub(crate) fn may_hide_missing(&self) -> bool {
        matches!(self, RemoteError::Refused(refusal) if refusal.hides_missing)
    }

    pub(crate) fn remedy(&self) -> &'static str {
        match self {
            RemoteError::Transient(_) | RemoteError::Busy { .. } => {
                "check that the server runs and is reachable from this machine"
            }
            RemoteError::Denied(_) => {
                "check the access rights there and the credentials in use; lockbox-remote(7) lists the sources of credentials"
            }
            RemoteError::Refused(refusal) => refusal.remedy,
            RemoteError::NoBucket(_) => "create it, or correct its name or the address of the store",
            RemoteError::NotFound => "check the name",
            RemoteError::NoSpace(_) => "free some space there",
            RemoteError::Changed | RemoteError::Damaged(_) | RemoteError::Unsupported(_) => {
                "use another server, or set this one up as lockbox-remote(7) says"
            }
        }
    }

    /// Returns a description with the server as its subject.
    pub(crate) fn message(&self) -> String {
        match self {
            RemoteError::Transient(why) | RemoteError::Busy { why, .. } => format!("it does not answer: {why}"),
            RemoteError::Changed => "the file changed during the read".into(),
            RemoteError::NotFound => "the name does not exist".into(),
            RemoteError::Refused(refusal) => refusal.why.clone(),
            RemoteError::Damaged(why)
            | RemoteError::NoSpace(why)
            | RemoteError::NoBucket(why)
            | RemoteError::Denied(why)
            | RemoteError::Unsupported(why) => why.clone(),
        }
    }

    /// Converts an error of an open: a missing file is `NotFound`.
    pub(crate) fn into_error(self, name: &str) -> Error {
        match self {
            RemoteError::NotFound => {
                Error::request(format!("cannot open {name}: No such file or directory"), io::ErrorKind::NotFound)
            }
            RemoteError::NoBucket(ref why) => {
                Error::advised_request(format!("cannot open {name}: {why}"), self.remedy(), io::ErrorKind::NotFound)
            }
            other => other.into_deferred_error(name),
        }
    }

    pub(crate) fn into_deferred_error(self, name: &str) -> Error {
        // A directory has none.
        let server = if name.starts_with("file:") { name.to_owned() } else { format!("the server of {name}") };
        let remedy = self.remedy();
        match self {
            RemoteError::Transient(why) | RemoteError::Busy { why, .. } => {
                Error::request(format!("{server} does not answer: {why}"), io::ErrorKind::TimedOut)
            }
            RemoteError::NoSpace(why) => Error::NoSpace(format!("{name}: {why}")),
            RemoteError::Refused(StoreRefusal { why, .. }) => {
                let sentence = format!("cannot access {server}: {why}");
                Error::advised_request(sentence, remedy, io::ErrorKind::PermissionDenied)
            }
            RemoteError::NoBucket(why) => stale(format!("{name} was removed from its server: {why}")),
            RemoteError::Denied(why) => {
                Error::request(format!("cannot access {server}: {why}"), io::ErrorKind::PermissionDenied)
            }
            RemoteError::Unsupported(why) => {
                Error::request(format!("{server} cannot be used: {why}"), io::ErrorKind::Unsupported)
            }
            RemoteError::Damaged(why) => Error::damaged(format!("{name}: {why}")),
            RemoteError::Changed => stale(format!("{name} changed on its server while it was read; open it again")),
            RemoteError::NotFound => stale(format!("{name} was removed from its server")),
        }
    }
}

fn stale(context: String) -> Error {
    Error::request(context, io::ErrorKind::StaleNetworkFileHandle)
}

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

/// Copies the bytes that two parts of a file share; each part begins at its offset.
pub(crate) fn copy_shared(from: &[u8], from_offset: u64, to: &mut [u8], to_offset: u64) {
    let start = from_offset.max(to_offset);
    let end = (from_offset + from.len() as u64).min(to_offset + to.len() as u64);
    if start < end {
        let shared = &from[(start - from_offset) as usize..(end - from_offset) as usize];
        to[(start - to_offset) as usize..(end - to_offset) as usize].copy_from_slice(shared);
    }
}

/// Request statistics since the open.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RequestStats {
    /// Requests for parts of files and objects, including failed ones.
    pub reads: u64,
    /// Requests for lists of objects.
    pub lists: u64,
    /// Received bytes of files and objects.
    pub bytes: u64,
    /// 64 KiB slots served from memory and from disk.
    pub memory_hits: u64,
    pub disk_hits: u64,
    /// Time since which no request succeeded, in seconds since 1970; None if the last one did.
    pub offline_since: Option<i64>,
    /// Bytes spooled on this host because the store did not take them.
    pub unsent: u64,
    /// Time since which the store refuses reads or writes, in seconds since 1970, and its reason.
    pub refused_since: Option<i64>,
    pub refusal: Option<String>,
}

/// Live counters behind [`RequestStats`].
#[derive(Debug, Default)]
pub(crate) struct RequestMetrics {
    reads: AtomicU64,
    lists: AtomicU64,
    bytes: AtomicU64,
    memory_hits: AtomicU64,
    /// Start of the outage in seconds since 1970; 0 while the server responds.
    offline: AtomicI64,
    /// Refusals of writes and of reads: a store that is full still serves reads.
    refused_writes: Mutex<Option<(i64, String)>>,
    refused_reads: Mutex<Option<(i64, String)>>,
}

impl RequestMetrics {
    pub(crate) fn count_hit(&self) {
        self.memory_hits.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self, disk_hits: u64) -> RequestStats {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let offline = self.offline.load(Ordering::Relaxed);
        let refusal = self.refused_writes.lock().clone().or_else(|| self.refused_reads.lock().clone());
        let (refused_since, refusal) = refusal.unzip();
        RequestStats {
            reads: of(&self.reads),
            lists: of(&self.lists),
            bytes: of(&self.bytes),
            memory_hits: of(&self.memory_hits),
            disk_hits,
            offline_since: (offline > 0).then_some(offline),
            unsent: 0,
            refused_since,
            refusal,
        }
    }

    pub(crate) fn count_write<T>(&self, answer: RemoteResult<T>) -> RemoteResult<T> {
        note_refusal(&self.refused_writes, &answer);
        self.record_outcome(answer)
    }

    pub(crate) fn count_read<T>(&self, answer: RemoteResult<T>, bytes: impl FnOnce(&T) -> usize) -> RemoteResult<T> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if let Ok(answer) = &answer {
            self.bytes.fetch_add(bytes(answer) as u64, Ordering::Relaxed);
        }
        note_refusal(&self.refused_reads, &answer);
        self.record_outcome(answer)
    }

    pub(crate) fn count_list<T>(&self, answer: RemoteResult<T>) -> RemoteResult<T> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.record_outcome(answer)
    }

    pub(crate) fn record_outcome<T>(&self, answer: RemoteResult<T>) -> RemoteResult<T> {
        if answer.as_ref().is_err_and(RemoteError::is_transient) {
            let _ = self.offline.compare_exchange(0, now(), Ordering::Relaxed, Ordering::Relaxed);
        } else {
            self.offline.store(0, Ordering::Relaxed);
        }
        answer
    }
}

/// Keeps the time of the first refusal until a request succeeds, with the last reason. A missing
/// object is an answer, and silence is an outage.
fn note_refusal<T>(noted: &Mutex<Option<(i64, String)>>, answer: &RemoteResult<T>) {
    let mut noted = noted.lock();
    match answer {
        Ok(_) => *noted = None,
        Err(
            error @ (RemoteError::Denied(_)
            | RemoteError::Refused(_)
            | RemoteError::NoBucket(_)
            | RemoteError::NoSpace(_)
            | RemoteError::Unsupported(_)),
        ) => {
            let since = noted.as_ref().map_or_else(now, |(since, _)| *since);
            *noted = Some((since, error.message()));
        }
        Err(_) => {}
    }
}

/// Returns the time in seconds since 1970, at least 1.
fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs() as i64).max(1)
}

/// Source or store that counts its requests.
pub(crate) struct Metered<T: ?Sized> {
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) inner: Arc<T>,
}

impl RangeSource for Metered<dyn RangeSource> {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        self.metrics.count_read(self.inner.read_start(count), |(_, bytes)| bytes.len())
    }

    fn is_atomic(&self) -> bool {
        self.inner.is_atomic()
    }

    fn cache_scope(&self) -> Option<&[u8]> {
        self.inner.cache_scope()
    }

    fn cache_key(&self, range: Range<u64>) -> RangeKey {
        self.inner.cache_key(range)
    }

    fn read_cached(&self, offset: u64, out: &mut [u8]) -> bool {
        self.inner.read_cached(offset, out)
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        self.metrics.count_read(self.inner.read_range(version, range), Vec::len)
    }
}

/// Strips type names and host error numbers, and escapes control characters of untrusted text.
pub(crate) fn printable(text: &str) -> String {
    let text = text.strip_prefix("io: ").unwrap_or(text);
    display(lockbox_terminal::without_numbers(text.to_owned()).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_lasts_from_its_first_request_to_a_success_of_its_kind() {
        let metrics = RequestMetrics::default();
        let reason = || metrics.stats(0).refusal;
        let full = || RemoteError::NoSpace("full (status 403 QuotaExceeded)".into());
        let read = |answer: RemoteResult<Vec<u8>>| drop(metrics.count_read(answer, Vec::len));
        drop(metrics.count_write::<()>(Err(full())));
        let first = metrics.stats(0);
        assert_eq!(first.refusal.as_deref(), Some("full (status 403 QuotaExceeded)"));
        // Reads go on, and an outage is not a change of mind.
        read(Ok(Vec::new()));
        drop(metrics.count_write::<()>(Err(RemoteError::Transient("no answer".into()))));
        let later = metrics.stats(0);
        assert_eq!((later.refused_since, later.refusal), (first.refused_since, first.refusal));
        assert!(metrics.count_write(Ok(())).is_ok() && reason().is_none());
        read(Err(RemoteError::Denied("status 403".into())));
        read(Err(RemoteError::NotFound));
        assert!(metrics.count_write(Ok(())).is_ok());
        assert_eq!(reason().as_deref(), Some("status 403"));
        read(Ok(Vec::new()));
        assert_eq!(reason(), None);
    }
}
