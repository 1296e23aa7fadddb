//! What a change without room waits for before it is refused: room that is on its way.
//!
//! # The argument
//! Room is on its way when (a) free blocks are being erased, (b) pages were freed and the commits that let them go have not ended (T1, P3),
//! (c) objects that nobody can reach have pages yet, (d) a reader that is about to end can see freed pages. Nothing else ever frees a block.
//!
//! - (a) ends by itself: who erases waits for nobody.
//! - (b) takes two commits at most. A page that was freed before the call was freed by the commit in flight, N, or by the open transaction,
//!   N + 1 at the latest, and can be taken once N + 2 is durable. The second of two commits that begin after the call is no earlier than that.
//!   None is made when nothing was freed.
//! - (c) is finite: each step removes records of an object that gets no new ones. The steps between two attempts double, so that a large object costs
//!   few commits.
//! - (d) has a limit of time, since a reader may take as long as it likes.
//!
//! So every wait ends, and one that is refused afterwards was refused with nothing on its way that was freed before the call. The wait is
//! shared: one writer brings it about while the others wait for `shortage`, and then try first.
//!
//! # The order
//! What comes free belongs to who waited for it. `short` counts those who hold `shortage` or wait for it; while there are any, whoever else wants
//! room for more goes to the end of that queue, also when there is room, and `shortage` is handed on in the order of arrival. So a writer is
//! overtaken at most by the calls that had looked at `short` before it came, once each, and by changes that free room or keep a promise, which
//! are not asked to wait. An operation keeps its place in the queue until it is published, for its promise is made anew by then.
//!
//! No lock that a commit needs is held while somebody waits: the caller has no operation open. `shortage` is taken while a caller may hold the
//! turn of a file; who has it waits for no turn (a commit's flusher takes none, and reclaim passes over an object whose turn is taken), and the
//! writers' lock only behind operations, which end. Changes that free room do not take it, so that reclaim may be such a change; nor does the
//! clock (`grow_spare`), so that the periodic commit does not queue behind it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::MutexGuard;

use super::Volume;
use super::commit::{Chain, Frozen, Purpose};
use crate::error::{Error, Result};

/// Waits for readers that can see freed pages: a request of some MiB is read in less.
const READER_WAIT: (u32, Duration) = (50, Duration::from_millis(2));

/// Removes some of what nobody can reach; answers whether it did.
pub(super) type Reclaimer = Box<dyn Fn() -> Result<bool> + Send + Sync>;

/// Whether what came free suffices.
type Enough<'a> = &'a dyn Fn() -> Result<bool>;

/// Groups that an operation asks for before it begins, beside those of its records.
const LEAST: u64 = 16;

/// A place in the queue of those who have no room; once it holds the lock, the first one.
pub(super) struct Turn<'a> {
    volume: &'a Volume,
    shortage: Option<MutexGuard<'a, ()>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(shortage) = self.shortage.take() {
            MutexGuard::unlock_fair(shortage);
        }
        self.volume.short.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Volume {
    /// Sets what frees the pages of objects that nobody can reach, one bounded step with each call. It may only make essential operations.
    pub(crate) fn set_reclaimer(&self, reclaimer: Reclaimer) {
        // Only the first counts: one file system owns a volume.
        let _ = self.reclaimer.set(reclaimer);
    }

    /// Makes room before the writers' lock is taken, so that freed blocks can be had by committing. Who had to wait for it keeps others out
    /// until the answer is dropped.
    pub(super) fn make_room(&self, records: u64, essential: bool) -> Result<Option<Turn<'_>>> {
        // When this does not suffice the operation itself finds out exactly.
        let quads = (records * 3 + LEAST).min(256);
        let promised = || self.try_reserve(quads, essential);
        let (there, turn) =
            if essential { (promised()? || self.await_commits(&promised)?, None) } else { self.in_turn(&promised)? };
        if there {
            self.space.lock().unreserve(quads);
        }
        Ok(turn)
    }

    /// Whether anybody waits for room.
    pub(crate) fn is_short(&self) -> bool {
        self.short.load(Ordering::Acquire) > 0
    }

    /// As somebody who waits for room, until the answer is dropped.
    #[cfg(test)]
    pub(crate) fn be_short(&self) -> impl Sized {
        self.short.fetch_add(1, Ordering::AcqRel);
        Turn { volume: self, shortage: None }
    }

    /// Has the file grow, if it can, until something may be taken out of reach for a moment; waits for nobody.
    pub(super) fn grow_spare(&self) -> Result<()> {
        if self.try_reserve(LEAST, false)? {
            self.space.lock().unreserve(LEAST);
        }
        Ok(())
    }

    /// Whether there is `enough`, which may take of it; waits for room that is on its way.
    pub(crate) fn have_room(&self, enough: Enough<'_>) -> Result<bool> {
        self.in_turn(enough).map(|(there, _)| there)
    }

    /// As [`Self::have_room`]; who had to wait has the first place until the answer's is dropped.
    fn in_turn(&self, enough: Enough<'_>) -> Result<(bool, Option<Turn<'_>>)> {
        if self.short.load(Ordering::Acquire) == 0 && enough()? {
            return Ok((true, None));
        }
        self.short.fetch_add(1, Ordering::AcqRel);
        let mut turn = Turn { volume: self, shortage: None };
        turn.shortage = Some(self.shortage.lock());
        let there =
            enough()? || self.await_commits(enough)? || self.await_reclaim(enough)? || self.await_readers(enough)?;
        Ok((there, Some(turn)))
    }

    /// Promises groups of four blocks, if there are so many.
    pub(super) fn try_reserve(&self, quads: u64, essential: bool) -> Result<bool> {
        match self.reserve_quads(quads, essential) {
            Ok(()) => Ok(true),
            Err(Error::NoSpace(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// (a) and (b).
    fn await_commits(&self, enough: Enough<'_>) -> Result<bool> {
        drop(self.erasing.lock());
        if enough()? {
            return Ok(true);
        }
        for _ in 0..2 {
            if !self.commit_may_free() {
                break;
            }
            match self.commit_for(Purpose::Drain) {
                // What is staged finds no room for its nodes; whoever asks for durability is told.
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
        // What a commit in flight frees is in neither of the other two.
        self.commits.lock().is_running() || self.is_dirty() || self.space.lock().waits_for_commit()
    }

    /// Where what is staged finds no room for its nodes, commits without it let go what was freed before: two at most. While nothing else is
    /// changed they are the same moment as the commit before them, so nothing overtakes what is staged (D3). They write their record and nothing
    /// else, whatever commit it is that lacks room: a checkpoint would free blocks after the last erasing of a close. When the host
    /// refuses one there is no room, as without it, and nothing latches.
    pub(super) fn freeze_with_room(&self, purpose: Purpose, chain: &mut Chain) -> Result<Option<Frozen>> {
        for _ in 0..2 {
            let mut writer = self.writer.lock();
            let refused = match self.freeze(purpose, chain, &mut writer) {
                Err(error @ Error::NoSpace(_)) if !writer.changed && self.space.lock().waits_for_commit() => error,
                frozen => return frozen,
            };
            let frozen = self.freeze_changes(chain, &mut writer)?;
            drop(writer);
            match self.write_commit(Purpose::Shorten, chain, frozen) {
                Err(Error::NoSpace(_)) if self.pager.latch().reason().is_none() => return Err(refused),
                written => written?,
            }
            self.settle(&mut self.writer.lock());
        }
        self.freeze(purpose, chain, &mut self.writer.lock())
    }

    /// (c)
    fn await_reclaim(&self, enough: Enough<'_>) -> Result<bool> {
        let Some(reclaimer) = self.reclaimer.get() else { return Ok(false) };
        for round in 0.. {
            let mut reclaimed = false;
            for _ in 0..1_u64 << round.min(10) {
                match reclaimer() {
                    Ok(true) => reclaimed = true,
                    Ok(false) => break,
                    Err(error @ Error::Latched(_)) => return Err(error),
                    // It stays queued, and background work tells.
                    Err(error) => {
                        tracing::debug!(%error, "what was deleted could not be reclaimed for want of room");
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
            let durable = self.durable.load().generation;
            if self.space.lock().waits_for_readers(durable) {
                // More of it would wait for them as well: (d).
                break;
            }
        }
        Ok(false)
    }

    /// (d)
    fn await_readers(&self, enough: Enough<'_>) -> Result<bool> {
        let (attempts, pause) = READER_WAIT;
        for _ in 0..attempts {
            let durable = self.durable.load().generation;
            if !self.space.lock().waits_for_readers(durable) {
                break;
            }
            std::thread::sleep(pause);
            self.release_waiting();
            if enough()? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
