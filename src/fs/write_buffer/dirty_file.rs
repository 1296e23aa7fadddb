//! One file's staged data behind its two locks: that of a whole change, and that of the content.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::batch::Batch;
use super::dirty_content::Content;
use crate::format::Ino;
use crate::txn::{Operation, Volume};

pub(in crate::fs) struct StagedFile {
    ino: Ino,
    lock: Mutex<()>,
    content: Mutex<Content>,
    /// Of all files of the file system.
    total: Arc<AtomicU64>,
    /// Bytes of the active layer, for choosing what to write out.
    active_bytes: AtomicU64,
}

/// A file of which nobody else makes a whole change (write, truncate) or seals a layer meanwhile, but for commits. What was sealed before may be
/// written and published.
///
/// Who holds one may wait for space and for commits, but not for a second one, and not for the lock of `Pressure`.
pub(in crate::fs) struct LockedFile<'f> {
    file: &'f Arc<StagedFile>,
    _lock: MutexGuard<'f, ()>,
}

impl Deref for LockedFile<'_> {
    type Target = Arc<StagedFile>;

    fn deref(&self) -> &Arc<StagedFile> {
        self.file
    }
}

impl StagedFile {
    pub(super) fn new(ino: Ino, total: Arc<AtomicU64>) -> StagedFile {
        StagedFile { ino, lock: Mutex::default(), content: Mutex::default(), total, active_bytes: AtomicU64::new(0) }
    }

    pub(in crate::fs) fn ino(&self) -> Ino {
        self.ino
    }

    pub(in crate::fs) fn lock(self: &Arc<Self>) -> LockedFile<'_> {
        LockedFile { file: self, _lock: self.lock.lock() }
    }

    pub(in crate::fs) fn try_lock(self: &Arc<Self>) -> Option<LockedFile<'_>> {
        self.lock.try_lock().map(|lock| LockedFile { file: self, _lock: lock })
    }

    pub(in crate::fs) fn try_lock_for(self: &Arc<Self>, time: Duration) -> Option<LockedFile<'_>> {
        self.lock.try_lock_for(time).map(|lock| LockedFile { file: self, _lock: lock })
    }

    /// Runs `f` on the content and keeps the totals right.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut Content) -> R) -> R {
        let mut content = self.content.lock();
        let before = content.weight();
        let result = f(&mut content);
        let after = content.weight();
        if after > before {
            self.total.fetch_add(after - before, Ordering::Relaxed);
        } else {
            self.total.fetch_sub(before - after, Ordering::Relaxed);
        }
        self.active_bytes.store(content.active_bytes(), Ordering::Relaxed);
        result
    }

    pub(super) fn is_empty(&self) -> bool {
        self.content.lock().is_empty()
    }

    /// Drops what is published by now.
    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.with(|content| content.drop_published(&volume.state()));
    }

    pub(in crate::fs) fn active_bytes(&self) -> u64 {
        self.active_bytes.load(Ordering::Relaxed)
    }
}

impl LockedFile<'_> {
    /// First offset behind all staged bytes.
    pub(in crate::fs) fn end(&self) -> u64 {
        self.with(|content| content.end())
    }

    /// The batches of the sealed layers that are not published yet.
    pub(in crate::fs) fn sealed_batches(&self, volume: &Volume) -> Vec<Arc<Batch>> {
        self.with(|content| {
            content.drop_published(&volume.state());
            content.sealed_batches()
        })
    }

    /// Whether the active layer has bytes of the range.
    pub(in crate::fs) fn has_active(&self, range: &Range<u64>) -> bool {
        self.with(|content| content.has_active(range))
    }

    /// Whether the file has no sealed layer, so that its extents may be changed in `op` (STAGE-2); a definite answer, for `op` holds the writers' lock.
    pub(in crate::fs) fn is_unsealed(&self, volume: &Volume, _op: &Operation<'_>) -> bool {
        self.with(|content| {
            content.drop_published(&volume.state());
            !content.has_sealed()
        })
    }

    /// Lets the active layer lose the range when `op` is published. The caller calls `drop_published` afterwards; when `op` fails, nothing is lost.
    pub(in crate::fs) fn supersede(&self, op: &mut Operation<'_>, range: Range<u64>) {
        self.with(|content| content.supersede(op, self.ino, range));
    }

    /// Drops what no batch has sealed.
    pub(in crate::fs) fn discard_active(&self) {
        self.with(Content::discard_active);
    }
}
