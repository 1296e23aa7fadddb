//! Request metrics of one server: the cost of a mount, and whether the server responds.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::range_source::{FileVersion, RangeKey, RangeSource, RemoteError, RemoteResult};

/// Request statistics since the open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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
    pub offline_since: Option<u64>,
    /// Bytes spooled on this host because the store did not take them.
    pub unsent: u64,
}

/// Live counters behind [`RequestStats`].
#[derive(Debug, Default)]
pub(crate) struct RequestMetrics {
    reads: AtomicU64,
    lists: AtomicU64,
    bytes: AtomicU64,
    memory_hits: AtomicU64,
    /// Start of the outage in seconds since 1970; 0 while the server responds.
    offline: AtomicU64,
}

impl RequestMetrics {
    pub(crate) fn count_hit(&self) {
        self.memory_hits.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn stats(&self, disk_hits: u64) -> RequestStats {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let offline = of(&self.offline);
        RequestStats {
            reads: of(&self.reads),
            lists: of(&self.lists),
            bytes: of(&self.bytes),
            memory_hits: of(&self.memory_hits),
            disk_hits,
            offline_since: (offline > 0).then_some(offline),
            unsent: 0,
        }
    }

    /// Counts a read request and its bytes.
    pub(crate) fn count_read<T>(&self, answer: RemoteResult<T>, bytes: impl FnOnce(&T) -> usize) -> RemoteResult<T> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if let Ok(answer) = &answer {
            self.bytes.fetch_add(bytes(answer) as u64, Ordering::Relaxed);
        }
        self.record_outcome(answer)
    }

    /// Counts a list request.
    pub(crate) fn count_list<T>(&self, answer: RemoteResult<T>) -> RemoteResult<T> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.record_outcome(answer)
    }

    /// Records whether the server responded.
    pub(crate) fn record_outcome<T>(&self, answer: RemoteResult<T>) -> RemoteResult<T> {
        if matches!(answer, Err(RemoteError::Transient(_))) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()).max(1);
            let _ = self.offline.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        } else {
            self.offline.store(0, Ordering::Relaxed);
        }
        answer
    }
}

/// Source or store that counts its requests.
pub(crate) struct Metered<T: ?Sized> {
    pub(crate) metrics: Arc<RequestMetrics>,
    pub(crate) inner: Box<T>,
}

impl<T: RangeSource + ?Sized> RangeSource for Metered<T> {
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
