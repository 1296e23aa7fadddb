//! Dirty-data throttling: writers over the limit help with writeback.
//!
//! While a caller waits for a commit, the limit is lower (`COMMIT_WAIT_BYTES`), so that the flusher
//! holds the writers' lock for some milliseconds and not for all dirty data: the waiting caller and
//! the other writers write back the rest before the commit.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::write_buffer::{DirtyFile, LockedFile, WriteBuffer};
use super::writeback::{BATCH_PIECES, Writeback};
use crate::error::Result;
use crate::format::MAX_DATA;
use crate::txn::Volume;

/// Dirty bytes from which a file is written back alone; smaller ones are collected, so that small
/// files are packed.
const LARGE_FILE_BYTES: u64 = MAX_DATA as u64;

/// Dirty bytes of small files collected for one batch: several packed pages.
const SMALL_FILES_BYTES: u64 = 8 * MAX_DATA as u64;

/// Maximum dirty bytes while a caller waits for a commit. The commit's flush seals them under the
/// writers' lock, which excludes all other changes: this amount, and one request of each serving
/// thread, bounds the time that the lock is held. At 400 MiB/s, the compression rate of one
/// processor, 10 ms.
pub(super) const COMMIT_WAIT_BYTES: u64 = 4 << 20;

/// Consecutive attempts that find every file taken by a commit or locked, after which the writer
/// continues without writing back.
const MAX_FRUITLESS: u32 = 8;
/// Interval at which a thread that waits for a file's lock checks whether the holder may wait for
/// space: longer than most writes take.
const LOCK_POLL: Duration = Duration::from_millis(5);

pub(super) struct DirtyThrottle {
    volume: Arc<Volume>,
    write_buffer: Arc<WriteBuffer>,
    writeback: Arc<Writeback>,
    /// Maximum dirty bytes while no caller waits for a commit.
    most: u64,
    /// Held by the thread that brings the total under its limit. It only tries to lock files: a
    /// file with a writer that waits for space delays no other file.
    lock: Mutex<()>,
    /// Number of callers that wait for a commit.
    awaited: AtomicU64,
}

/// Guard of one caller that waits for a commit.
pub(super) struct CommitWait<'a>(&'a AtomicU64);

impl Drop for CommitWait<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl DirtyThrottle {
    pub(super) fn new(
        volume: Arc<Volume>,
        write_buffer: Arc<WriteBuffer>,
        writeback: Arc<Writeback>,
        most: u64,
    ) -> DirtyThrottle {
        DirtyThrottle { volume, write_buffer, writeback, most, lock: Mutex::new(()), awaited: AtomicU64::new(0) }
    }

    pub(super) fn begin_commit_wait(&self) -> CommitWait<'_> {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        CommitWait(&self.awaited)
    }

    /// Returns the current limit of dirty bytes.
    fn bound(&self) -> u64 {
        if self.awaited.load(Ordering::Relaxed) > 0 { self.most.min(COMMIT_WAIT_BYTES) } else { self.most }
    }

    /// Returns whether a write may have to write back dirty data first.
    pub(super) fn is_near_limit(&self) -> bool {
        self.write_buffer.total_bytes() >= self.bound() / 8 * 7
    }

    fn is_above_target(&self) -> bool {
        self.write_buffer.total_bytes() > self.bound() / 4 * 3
    }

    /// Writes back until dirty bytes are under three quarters of the limit, when they come near it.
    /// One writer does the work, and the others continue until the limit is reached. The caller has
    /// no file locked.
    ///
    /// If every file with much dirty data is locked, a writer waits for the largest without holding
    /// any lock: otherwise two writers that lock one file in turn would add dirty data without
    /// bound.
    pub(super) fn throttle(&self) -> Result<()> {
        self.throttle_with(|busy| Some(busy.lock()))
    }

    /// Like [`Self::throttle`], for a caller that asks for durability. It waits for a file's
    /// writer, which soon ends, because the flusher holds the writers' lock and should seal little
    /// (`COMMIT_WAIT_BYTES`). It does not wait while any thread waits for space, since that writer
    /// may be the one; the flusher, which locks no file, then writes back the file that this writer
    /// holds.
    pub(super) fn throttle_before_commit(&self) -> Result<()> {
        self.throttle_with(|busy| {
            loop {
                match busy.try_lock_for(LOCK_POLL) {
                    Some(locked) => return Some(locked),
                    None if self.volume.is_short() => return None,
                    None => {}
                }
            }
        })
    }

    /// Throttles; `lock` waits for a file's lock or gives up.
    fn throttle_with(&self, lock: impl Fn(&Arc<DirtyFile>) -> Option<LockedFile<'_>>) -> Result<()> {
        while let Some(busy) = self.throttle_unlocked_files()? {
            if self.write_buffer.total_bytes() <= self.bound() {
                break;
            }
            let Some(locked) = lock(&busy) else { break };
            if !self.is_above_target() || !self.writeback.write_back_unlocked(vec![locked])? {
                break;
            }
        }
        Ok(())
    }

    /// Writes back files that are not locked. Returns the largest file when much is left to do and
    /// all such files are locked.
    fn throttle_unlocked_files(&self) -> Result<Option<Arc<DirtyFile>>> {
        let total = self.write_buffer.total_bytes();
        let held = if total > self.bound() {
            Some(self.lock.lock())
        } else if total > self.bound() / 8 * 7 {
            self.lock.try_lock()
        } else {
            None
        };
        let Some(_held) = held else { return Ok(None) };
        let mut fruitless = 0;
        while self.is_above_target() && fruitless < MAX_FRUITLESS {
            self.write_buffer.drop_published();
            if !self.is_above_target() {
                break;
            }
            let files = self.write_buffer.files();
            let mut large: Vec<_> = files.iter().filter(|file| file.active_bytes() >= LARGE_FILE_BYTES).collect();
            large.sort_by_key(|file| Reverse(file.active_bytes()));
            let chosen = match large.iter().find_map(|file| file.try_lock()) {
                Some(free) => vec![free],
                None => lock_small(&files),
            };
            if chosen.is_empty() {
                return Ok(large.first().map(|file| Arc::clone(file)));
            }
            fruitless = if self.writeback.write_back_unlocked(chosen)? { 0 } else { fruitless + 1 };
        }
        Ok(None)
    }
}

/// Returns the first unlocked files in the order of creation, to be written back together.
fn lock_small(files: &[Arc<DirtyFile>]) -> Vec<LockedFile<'_>> {
    let mut chosen = Vec::new();
    let mut bytes = 0;
    for file in files.iter().filter(|file| file.active_bytes() > 0) {
        if bytes >= SMALL_FILES_BYTES || chosen.len() as u64 >= BATCH_PIECES {
            break;
        }
        // Waiting for a second lock while holding the first could deadlock.
        if let Some(locked) = file.try_lock() {
            bytes += file.active_bytes();
            chosen.push(locked);
        }
    }
    chosen
}
