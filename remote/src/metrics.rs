//! What was asked of a server so far, and whether it answers: for those who want to know what a mount costs, and why it waits.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::range_source::{Label, Source, Trouble, Version};

type Answer<T> = Result<T, Trouble>;

/// What was asked since the opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Requests for parts of files and objects, those that failed as well.
    pub reads: u64,
    /// Requests for lists of objects.
    pub lists: u64,
    /// Bytes of files and objects that came.
    pub bytes: u64,
    /// Pieces of 64 KiB that were in memory or on disk when they were wanted.
    pub memory_hits: u64,
    pub disk_hits: u64,
    /// Since when no request was answered, in seconds since 1970; None when the last one was.
    pub offline_since: Option<u64>,
    /// Bytes that are kept on this host because the store did not take them.
    pub unsent: u64,
}

/// The same while it grows.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    reads: AtomicU64,
    lists: AtomicU64,
    bytes: AtomicU64,
    memory_hits: AtomicU64,
    /// 0 while the server answers.
    offline: AtomicU64,
}

impl Counts {
    pub(crate) fn hit(&self) {
        self.memory_hits.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn traffic(&self, disk_hits: u64) -> Traffic {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let offline = of(&self.offline);
        Traffic {
            reads: of(&self.reads),
            lists: of(&self.lists),
            bytes: of(&self.bytes),
            memory_hits: of(&self.memory_hits),
            disk_hits,
            offline_since: (offline > 0).then_some(offline),
            unsent: 0,
        }
    }

    /// A request for a part of a file or an object, which had so many bytes.
    pub(crate) fn read<T>(&self, answer: Answer<T>, bytes: impl FnOnce(&T) -> usize) -> Answer<T> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        if let Ok(answer) = &answer {
            self.bytes.fetch_add(bytes(answer) as u64, Ordering::Relaxed);
        }
        self.answered(answer)
    }

    /// A request for a list of objects.
    pub(crate) fn list<T>(&self, answer: Answer<T>) -> Answer<T> {
        self.lists.fetch_add(1, Ordering::Relaxed);
        self.answered(answer)
    }

    /// Any other request.
    pub(crate) fn answered<T>(&self, answer: Answer<T>) -> Answer<T> {
        if matches!(answer, Err(Trouble::Passing(_))) {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()).max(1);
            let _ = self.offline.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed);
        } else {
            self.offline.store(0, Ordering::Relaxed);
        }
        answer
    }
}

/// Who is asked, and counts it.
pub(crate) struct Counted<T: ?Sized> {
    pub(crate) counts: Arc<Counts>,
    pub(crate) inner: Box<T>,
}

impl<T: Source + ?Sized> Source for Counted<T> {
    fn first(&self, count: u64) -> Answer<(Version, Vec<u8>)> {
        self.counts.read(self.inner.first(count), |(_, bytes)| bytes.len())
    }

    fn whole(&self) -> bool {
        self.inner.whole()
    }

    fn lineage(&self) -> Option<&[u8]> {
        self.inner.lineage()
    }

    fn label(&self, range: Range<u64>) -> Label {
        self.inner.label(range)
    }

    fn has(&self, offset: u64, out: &mut [u8]) -> bool {
        self.inner.has(offset, out)
    }

    fn range(&self, version: &Version, range: Range<u64>) -> Answer<Vec<u8>> {
        self.counts.read(self.inner.range(version, range), Vec::len)
    }
}
