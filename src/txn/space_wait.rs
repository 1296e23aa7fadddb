//! Waits for pending frees before a change fails with `NoSpace`.
//!
//! # The argument
//! Space is pending when one of these is true; nothing else ever frees a block:
//!
//! - (a) Free blocks are being erased.
//! - (b) Pages were freed, and the commits that release them have not ended (TXN-1, SPACE-3).
//! - (c) Unreachable objects, or snapshots that were removed, still have pages.
//! - (d) A reader that is about to end can see freed pages.
//! - (e) Another thread is at a step of (c), or an object without a name is about to be closed: a
//!   kernel reports a close only after the program saw it end.
//!
//! Each of these waits ends:
//!
//! - (a) ends without help: erasing waits for no other thread.
//! - (b) takes two commits at most. A page that was freed before the call was freed by the commit
//!   in flight, N, or by the open transaction, N + 1 at the latest, and can be allocated once N + 2
//!   is durable. The second of two commits that begin after the call is no earlier than that. No
//!   commit is made when nothing was freed.
//! - (c) is finite: each step removes records of an object that gets no new ones, or entries of a
//!   dead list that gets no new ones. The number of steps between two attempts doubles, so that a
//!   large object costs few commits.
//! - (d) and (e) have a time limit, since a reader may take any time, and a program may keep an
//!   unlinked file open.
//!
//! So a change is refused only when no space that was freed before the call is still pending. The
//! wait is shared: one writer frees the space while the others wait in the queue, and then try
//! first.
//!
//! # The order
//! Freed space belongs to the writers that waited for it. `waiting` counts the writers that hold
//! `first` or wait for it. While there are any, every other call that needs more space goes to the
//! end of the queue, even when there is space. `first` is passed on in the order of arrival.
//!
//! So a writer is overtaken only by calls that had read `waiting` before it arrived, once each, and
//! by changes that free space or keep a promise, which do not wait. An operation keeps its position
//! in the queue until it is published, because its space is promised only by then.
//!
//! No lock that a commit needs is held during a wait: the caller has no operation open.
//!
//! - `first` is taken while a caller may hold the lock of a dirty file. The holder of `first` waits
//!   for no such lock: a commit's flusher takes none, and reclaim skips an object with a locked
//!   file.
//! - The holder waits for the writers' lock only after operations, which end.
//! - Changes that free space do not take `first`, so that reclaim may be such a change.
//! - Nor does the timer (`Allocator::erase_aged`), so that the periodic commit does not queue after
//!   it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use super::allocator::{Allocator, Reservation, keep_of};
use super::commit::{CommitReason, GroupCommit};
use super::writer::Writer;
use crate::error::{Error, Result};

/// Pause between two checks for space that others release.
const PAUSE: Duration = Duration::from_millis(2);
/// Looks at readers that can see freed pages: a request of some MiB is read in less.
const READER_LOOKS: u32 = 50;
/// The same before an error: ten seconds, in which a slow medium answers.
const SLOW_READER_LOOKS: u32 = if cfg!(test) { READER_LOOKS } else { 5000 };
/// Checks for files about to be closed or reclaimed: enough for the closing thread to be scheduled
/// on a busy machine. More in tests, which run concurrently and do not reach the last check.
const CLOSE_LOOKS: u32 = if cfg!(test) { 5000 } else { 150 };

/// Returns whether the freed space suffices.
type Enough<'a> = &'a dyn Fn() -> Result<bool>;

/// Groups that an operation requests in addition to those of its records.
const LEAST: u64 = 16;

/// Queue of changes without space, in order of arrival. The outermost part of a volume: the holder
/// of its lock commits.
pub(crate) struct SpaceWaiter {
    committer: Arc<GroupCommit>,
    writer: Arc<Writer>,
    allocator: Arc<Allocator>,
    /// Held by the writer that frees space for all waiting ones.
    first: Mutex<()>,
    waiting: AtomicU64,
}

/// Position in the queue of waiting changes; the first position holds the lock.
pub(super) struct WaitPosition<'a> {
    shortage: &'a SpaceWaiter,
    first: Option<MutexGuard<'a, ()>>,
}

impl Drop for WaitPosition<'_> {
    fn drop(&mut self) {
        if let Some(first) = self.first.take() {
            MutexGuard::unlock_fair(first);
        }
        self.shortage.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl SpaceWaiter {
    pub(super) fn new(committer: Arc<GroupCommit>, writer: Arc<Writer>, allocator: Arc<Allocator>) -> SpaceWaiter {
        SpaceWaiter { committer, writer, allocator, first: Mutex::new(()), waiting: AtomicU64::new(0) }
    }

    pub(crate) fn is_short(&self) -> bool {
        self.waiting.load(Ordering::Acquire) > 0
    }

    /// Frees space for an operation before the writers' lock is taken, so that commits can release
    /// freed blocks. After a wait, the caller excludes others until the returned value is dropped.
    pub(super) fn await_operation(&self, records: u64, essential: bool) -> Result<Option<WaitPosition<'_>>> {
        // When this does not suffice the operation itself finds out exactly.
        let groups = (records * 3 + LEAST).min(256);
        let enough = || self.allocator.has_groups(groups, keep_of(essential));
        if !essential {
            return self.in_turn(&enough).map(|(_, queued)| queued);
        }
        let _ = enough()? || self.await_commits(&enough)?;
        Ok(None)
    }

    /// Promises groups for data that comes in addition.
    pub(super) fn reserve(&self, groups: u64, essential: bool) -> Result<Reservation> {
        if !self.have_room(&|| self.allocator.reserve(groups, keep_of(essential)))? {
            return Err(Error::NoSpace("the archive cannot grow".into()));
        }
        Ok(self.allocator.reserved(groups))
    }

    /// Returns whether `enough` reports success, which may itself reserve; waits for pending space.
    pub(crate) fn have_room(&self, enough: Enough<'_>) -> Result<bool> {
        self.in_turn(enough).map(|(there, _)| there)
    }

    /// Like [`Self::have_room`]; after a wait, the caller keeps the first position until the
    /// returned value is dropped.
    fn in_turn(&self, enough: Enough<'_>) -> Result<(bool, Option<WaitPosition<'_>>)> {
        if !self.is_short() && enough()? {
            return Ok((true, None));
        }
        let mut queued = self.queue();
        queued.first = Some(self.first.lock());
        let there =
            enough()? || self.await_commits(enough)? || self.await_reclaim(enough)? || self.await_others(enough)?;
        Ok((there, Some(queued)))
    }

    /// Counts the caller as waiting for space until the returned value is dropped.
    pub(super) fn queue(&self) -> WaitPosition<'_> {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        WaitPosition { shortage: self, first: None }
    }

    /// (a) and (b).
    fn await_commits(&self, enough: Enough<'_>) -> Result<bool> {
        self.allocator.await_erasing();
        if enough()? {
            return Ok(true);
        }
        for _ in 0..2 {
            if !self.commit_may_free() {
                break;
            }
            match self.committer.commit_for(CommitReason::FreeSpace) {
                // Dirty data finds no space for its nodes; the error is reported to callers of
                // fsync.
                Err(Error::NoSpace(_)) => break,
                committed => committed?,
            };
            if enough()? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn commit_may_free(&self) -> bool {
        // Blocks freed by a commit in flight are in neither of the other two.
        self.committer.is_running() || self.writer.is_dirty() || self.allocator.waits_for_commit()
    }

    /// (c)
    fn await_reclaim(&self, enough: Enough<'_>) -> Result<bool> {
        let Some(owner) = self.writer.owner() else { return Ok(false) };
        for round in 0.. {
            let mut reclaimed = false;
            for _ in 0..1_u64 << round.min(10) {
                match owner.reclaim_step() {
                    Ok(true) => reclaimed = true,
                    Ok(false) => break,
                    Err(error @ Error::WriteFailed(_)) => return Err(error),
                    // It stays queued, and background work tells.
                    Err(error) => {
                        tracing::debug!(%error, "cannot reclaim deleted data for lack of room");
                        return Ok(false);
                    }
                }
            }
            if !reclaimed {
                break;
            }
            if self.await_commits(enough)? {
                return Ok(true);
            }
            if self.allocator.waits_for_readers() {
                // More of it would wait for them as well: (d).
                break;
            }
        }
        Ok(false)
    }

    /// Waits for readers that can see pages freed up to version `last`. Returns false if some are
    /// left after the time of a slow request.
    pub(super) fn await_readers_until(&self, last: u64) -> bool {
        for _ in 0..SLOW_READER_LOOKS {
            self.allocator.release_pending_frees();
            if !self.allocator.has_pending_frees_until(last) {
                return true;
            }
            std::thread::sleep(PAUSE);
        }
        false
    }

    /// Waits for (d) and (e). A check commits only for its own reclaim; commits for the steps of
    /// others come once, at the end, also for steps that ended before the first check.
    fn await_others(&self, enough: Enough<'_>) -> Result<bool> {
        for look in 0..CLOSE_LOOKS {
            let readers = look < READER_LOOKS && self.allocator.waits_for_readers();
            let held = self.writer.owner().map_or(Ok(false), |owner| owner.is_reclaim_blocked())?;
            if !readers && !held {
                break;
            }
            std::thread::sleep(PAUSE);
            self.allocator.release_pending_frees();
            if enough()? || (held && self.await_reclaim(enough)?) {
                return Ok(true);
            }
        }
        // A step that another thread ended since the commits of this call left its pages to others.
        self.await_commits(enough)
    }

    #[cfg(test)]
    pub(super) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Acquire)
    }

    #[cfg(test)]
    pub(super) fn first(&self) -> &Mutex<()> {
        &self.first
    }
}
