//! Dirty data of one file under its two locks: one for whole changes, one for the content.
//!
//! Also the layers that a batch seals of several files, and the size of a file, dirty and published
//! data together.

use std::ops::{Deref, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::batch::WritebackBatch;
use super::dirty_content::DirtyContent;
use super::layer::Layer;
use crate::error::Result;
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::extents;
use crate::txn::{Operation, Reservation, View, Volume};

pub(in crate::fs) struct DirtyFile {
    ino: Ino,
    lock: Mutex<()>,
    content: Mutex<DirtyContent>,
    /// Sum over all files of the file system.
    total: Arc<AtomicU64>,
    /// Bytes of the active layer, for choosing files to write back.
    active_bytes: AtomicU64,
}

/// Exclusive right to make whole changes (write, truncate) of a file and to seal its layers; only
/// commits do so without it. Layers sealed before may be written and published meanwhile.
///
/// The holder may wait for space and for commits, but neither for a second file nor for the lock of
/// `DirtyThrottle`.
pub(in crate::fs) struct LockedFile<'f> {
    file: &'f Arc<DirtyFile>,
    _lock: MutexGuard<'f, ()>,
}

impl Deref for LockedFile<'_> {
    type Target = Arc<DirtyFile>;

    fn deref(&self) -> &Arc<DirtyFile> {
        self.file
    }
}

impl DirtyFile {
    pub(super) fn new(ino: Ino, total: Arc<AtomicU64>) -> DirtyFile {
        DirtyFile { ino, lock: Mutex::default(), content: Mutex::default(), total, active_bytes: AtomicU64::new(0) }
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

    /// Runs `f` on the content and updates the totals.
    pub(super) fn with_content<R>(&self, f: impl FnOnce(&mut DirtyContent) -> R) -> R {
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

    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.with_content(|content| content.drop_published(&volume.state()));
    }

    pub(in crate::fs) fn active_bytes(&self) -> u64 {
        self.active_bytes.load(Ordering::Relaxed)
    }
}

impl LockedFile<'_> {
    /// Returns the end of the last dirty byte.
    pub(in crate::fs) fn end(&self) -> u64 {
        self.with_content(|content| content.end())
    }

    /// Returns the batches of the sealed layers that are not published yet.
    pub(in crate::fs) fn sealed_batches(&self, volume: &Volume) -> Vec<Arc<WritebackBatch>> {
        self.with_content(|content| {
            content.drop_published(&volume.state());
            content.sealed_batches()
        })
    }

    /// Returns whether the active layer has bytes of the range.
    pub(in crate::fs) fn has_active(&self, range: &Range<u64>) -> bool {
        self.with_content(|content| content.has_active(range))
    }

    /// Returns whether the file has no sealed layer, so that its extents may be changed in `op`
    /// (STAGE-2). The answer is definite, because `op` holds the writers' lock.
    pub(in crate::fs) fn is_unsealed(&self, volume: &Volume, _op: &Operation<'_>) -> bool {
        self.with_content(|content| {
            content.drop_published(&volume.state());
            !content.has_sealed()
        })
    }

    /// Removes the range from the active layer once `op` is published. The caller calls
    /// `drop_published` afterwards; when `op` fails, the data stays.
    pub(in crate::fs) fn supersede(&self, op: &mut Operation<'_>, range: Range<u64>) {
        self.with_content(|content| content.supersede(op, self.ino, range));
    }

    /// Drops all data that no batch has sealed.
    pub(in crate::fs) fn discard_active(&self) {
        self.with_content(DirtyContent::discard_active);
    }
}

/// Layers sealed for one batch.
#[derive(Default)]
pub(in crate::fs) struct SealedLayers {
    layers: Vec<(Ino, Arc<Layer>)>,
    files: Vec<Arc<DirtyFile>>,
    reserved: Option<Reservation>,
}

impl SealedLayers {
    pub(super) fn add(
        &mut self,
        file: &Arc<DirtyFile>,
        seal: impl FnOnce(&mut DirtyContent) -> Option<(Arc<Layer>, Option<Reservation>)>,
    ) {
        let Some((layer, reserved)) = file.with_content(seal) else { return };
        self.layers.push((file.ino(), layer));
        self.files.push(file.clone());
        if let Some(more) = reserved {
            more.join(&mut self.reserved);
        }
    }

    /// Returns the layers in the order of the files' numbers, and the space for writing them.
    pub(in crate::fs) fn parts(&mut self) -> (&[(Ino, Arc<Layer>)], &mut Option<Reservation>) {
        (&self.layers, &mut self.reserved)
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|(_, layer)| layer.bytes()).sum()
    }

    pub(in crate::fs) fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    pub(in crate::fs) fn drop_published(&self, volume: &Volume) {
        self.files.iter().for_each(|file| file.drop_published(volume));
    }

    /// Puts the layers back under newer data, because the batch could not be written.
    pub(in crate::fs) fn unseal(&mut self, batch: &Arc<WritebackBatch>) {
        for file in &self.files {
            file.with_content(|content| content.unseal(batch, &mut self.reserved));
        }
    }
}

/// Size of a file, and its bytes that are not in holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) struct ContentSize {
    pub(in crate::fs) size: u64,
    pub(in crate::fs) bytes: u64,
}

/// The published inode, and the size of the file including dirty data.
pub(in crate::fs) type InodeAndSize = (InodeValue, ContentSize);

impl ContentSize {
    /// Returns the size of a file without dirty data.
    pub(in crate::fs) fn published(inode: &InodeValue) -> ContentSize {
        ContentSize { size: inode.size, bytes: inode.bytes }
    }
}

/// Published ranges of a file.
pub(super) struct PublishedRanges<'a> {
    view: View<'a>,
    ino: Ino,
    bytes: u64,
    /// End of the visible extents.
    visible: u64,
    inline: Option<u64>,
}

impl PublishedRanges<'_> {
    pub(super) fn new<'a>(view: View<'a>, ino: Ino, inode: &InodeValue) -> Result<PublishedRanges<'a>> {
        let inline = extents::load_inline(view, ino, inode)?.map(|content| content.len() as u64);
        Ok(PublishedRanges { view, ino, bytes: inode.bytes, visible: inode.trim.min(inode.size), inline })
    }

    /// Returns the bytes of the range that are holes in the published file.
    pub(super) fn hole_bytes(&self, range: &Range<u64>) -> Result<u64> {
        let covered = match self.inline {
            Some(length) => length.min(range.end).saturating_sub(range.start),
            None if self.bytes == 0 => 0,
            None => {
                let visible = range.start..range.end.min(self.visible).max(range.start);
                extents::measure(self.view, self.ino, visible, u64::MAX)?.1
            }
        };
        Ok(range.end - range.start - covered)
    }
}
