//! Keeps the amount of staged data under its bound: who stages much writes some of it out, beside those who go on.
//!
//! While somebody waits for a commit, staged bytes have a lower bound (`AWAITED_BYTES`), so that the flusher holds the writers' lock for some
//! milliseconds, not for all that may be staged: who waits for the commit, and whoever stages more meanwhile, writes out the rest before.

use std::cmp::Reverse;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::write_buffer::{LockedFile, StagedFile, Staging};
use super::writeback::{BATCH_PIECES, WriteOut};
use crate::error::Result;
use crate::format::MAX_DATA;
use crate::txn::Volume;

/// A file with this much staged is written out alone; others are collected, so that small files are packed.
const ALONE: u64 = MAX_DATA as u64;

/// Bytes collected of small files at once: several packed pages.
const COLLECT: u64 = 8 * MAX_DATA as u64;

/// Staged bytes at most while somebody waits for a commit. The commit's flush seals them under the writers' lock, beside which nothing can be
/// changed: with one request of each serving thread on top, that is what it can hold the lock for. At 400 MiB/s, what one processor
/// compresses, 10 ms.
pub(super) const AWAITED_BYTES: u64 = 4 << 20;

/// Attempts in a row that find every file taken by a commit or locked, before the writer goes on all the same.
const FRUITLESS: u32 = 8;
/// How soon who waits for a file looks whether its holder may wait for space: longer than most writes take.
const LOOK: Duration = Duration::from_millis(5);

pub(super) struct Pressure {
    volume: Arc<Volume>,
    staging: Arc<Staging>,
    write_out: Arc<WriteOut>,
    /// Staged bytes at most, while nobody waits for a commit.
    most: u64,
    /// Held by the thread that brings the total under its bound. It only tries to lock files: one whose writer waits for space holds up nobody else.
    lock: Mutex<()>,
    /// Callers that wait for a commit.
    awaited: AtomicU64,
}

/// While it lives somebody waits for a commit.
pub(super) struct Awaited<'a>(&'a AtomicU64);

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pressure {
    pub(super) fn new(volume: Arc<Volume>, staging: Arc<Staging>, write_out: Arc<WriteOut>, most: u64) -> Pressure {
        Pressure { volume, staging, write_out, most, lock: Mutex::new(()), awaited: AtomicU64::new(0) }
    }

    pub(super) fn await_commit(&self) -> Awaited<'_> {
        self.awaited.fetch_add(1, Ordering::Relaxed);
        Awaited(&self.awaited)
    }

    /// Staged bytes at most.
    fn bound(&self) -> u64 {
        if self.awaited.load(Ordering::Relaxed) > 0 { self.most.min(AWAITED_BYTES) } else { self.most }
    }

    /// Whether a write may have to write some of what is staged out.
    pub(super) fn is_near(&self) -> bool {
        self.staging.total() >= self.bound() / 8 * 7
    }

    fn is_much_staged(&self) -> bool {
        self.staging.total() > self.bound() / 4 * 3
    }

    /// Brings the staged bytes under three quarters of their bound when they come near it: one writer does, and the others go on until
    /// the bound is reached. The caller has no file locked.
    ///
    /// Where every file with much in it is locked, a writer waits for the largest, holding nothing: otherwise two that lock one file in turn would
    /// stage without bound.
    pub(super) fn relieve(&self) -> Result<()> {
        self.relieve_by(|busy| Some(busy.lock()))
    }

    /// As [`Self::relieve`], for who asks for durability. It waits for a writer, who is soon done, because the flusher holds the writers' lock and
    /// is to seal little (`AWAITED_BYTES`); but not while anybody waits for space, since that writer may. What he is busy with is left to the
    /// flusher then, which locks no file.
    pub(super) fn relieve_before_commit(&self) -> Result<()> {
        self.relieve_by(|busy| {
            loop {
                match busy.try_lock_for(LOOK) {
                    Some(locked) => return Some(locked),
                    None if self.volume.is_short() => return None,
                    None => {}
                }
            }
        })
    }

    /// `lock` waits for a file, or gives up.
    fn relieve_by(&self, lock: impl Fn(&Arc<StagedFile>) -> Option<LockedFile<'_>>) -> Result<()> {
        while let Some(busy) = self.relieve_unless_busy()? {
            if self.staging.total() <= self.bound() {
                break;
            }
            let Some(locked) = lock(&busy) else { break };
            if !self.is_much_staged() || !self.write_out.write_out_beside(vec![locked])? {
                break;
            }
        }
        Ok(())
    }

    /// Answers the largest file when there is still much to do and nothing that nobody has locked.
    fn relieve_unless_busy(&self) -> Result<Option<Arc<StagedFile>>> {
        let total = self.staging.total();
        let held = if total > self.bound() {
            Some(self.lock.lock())
        } else if total > self.bound() / 8 * 7 {
            self.lock.try_lock()
        } else {
            None
        };
        let Some(_held) = held else { return Ok(None) };
        let mut fruitless = 0;
        while self.is_much_staged() && fruitless < FRUITLESS {
            self.staging.sweep();
            if !self.is_much_staged() {
                break;
            }
            let files = self.staging.files();
            let mut large: Vec<_> = files.iter().filter(|file| file.active_bytes() >= ALONE).collect();
            large.sort_by_key(|file| Reverse(file.active_bytes()));
            let chosen = match large.iter().find_map(|file| file.try_lock()) {
                Some(free) => vec![free],
                None => lock_small(&files),
            };
            if chosen.is_empty() {
                return Ok(large.first().map(|file| Arc::clone(file)));
            }
            fruitless = if self.write_out.write_out_beside(chosen)? { 0 } else { fruitless + 1 };
        }
        Ok(None)
    }
}

/// The first files that nobody has locked, in the order of creation, to be written out together.
fn lock_small(files: &[Arc<StagedFile>]) -> Vec<LockedFile<'_>> {
    let mut chosen = Vec::new();
    let mut bytes = 0;
    for file in files.iter().filter(|file| file.active_bytes() > 0) {
        if bytes >= COLLECT || chosen.len() as u64 >= BATCH_PIECES {
            break;
        }
        // Waiting for a second one while holding the first could be a cycle.
        if let Some(locked) = file.try_lock() {
            bytes += file.active_bytes();
            chosen.push(locked);
        }
    }
    chosen
}
