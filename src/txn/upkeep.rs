//! What an open archive does in the background and at its end: drain, erase, sweep, truncate, close.

use super::Volume;
use super::commit::Purpose;
use crate::error::{Error, Result};
use crate::format::{BLOCK, Run};

/// Seconds that a free block keeps its old ciphertext at least, and at most twice that plus the time to drain.
const ERASE_AFTER: i64 = 5;
/// Bytes of random data written at once where the host does not punch.
const OVERWRITE_STEP: u64 = 1 << 20;

impl Volume {
    /// One background step: drains freed blocks of an idle archive by empty commits, every 5 s erases blocks that were free 5 s before,
    /// sweeps a region after an unclean open. Returns whether there is more to do at once.
    pub(crate) fn maintain(&self) -> Result<bool> {
        self.check_writable()?;
        self.check_host().map_err(|error| self.pager.latch().set("looking after the archive's file", error))?;
        self.release_waiting();
        let drained = if !self.is_dirty() && self.space.lock().waits_for_commit() {
            self.commit_for(Purpose::Drain).map(drop)
        } else {
            Ok(())
        };
        let drained = match drained {
            // Erasing what is free already may give the host the room that the record lacks.
            Err(Error::NoSpace(reason)) if self.pager.latch().reason().is_none() => Err(Error::NoSpace(reason)),
            drained => Ok(drained?),
        };
        let swept = self.sweep_step()? | self.look_step()?;
        if self.erase_is_due() {
            if self.space.lock().has_dirty() {
                self.grow_spare()?;
            }
            self.erase_step(false)?;
        }
        drained.map(|()| swept)
    }

    /// Loads a region in which blocks came free unseen, so that they are erased with the others; answers whether there is one more. While
    /// memory for regions is short the others wait for their turn, at the latest until the end.
    fn look_step(&self) -> Result<bool> {
        let next = || self.space.lock().next_unlooked();
        let Some(number) = next() else { return Ok(false) };
        if self.space.lock().has_loaded(self.region_limit()) {
            self.space.lock().evict(self.region_limit() / 2);
            if self.space.lock().has_loaded(self.region_limit()) {
                return Ok(false);
            }
        }
        self.load_region(number)?;
        Ok(next().is_some())
    }

    /// Another program cut, replaced or removed the file: what is written to it from here on would be lost, or hide the damage.
    pub(super) fn check_host(&self) -> Result<()> {
        match self.pager.storage().still_there() {
            Err(Error::Damaged(reason)) => Err(Error::Damaged(reason)),
            // That nobody can tell at this moment is no reason to stop.
            Err(error) => {
                tracing::warn!("the archive's file cannot be examined: {error}");
                Ok(())
            }
            Ok(()) => Ok(()),
        }
    }

    /// Recycled blocks need no erasing, so what was freed gets this long to be recycled.
    fn erase_is_due(&self) -> bool {
        let now = self.environment.now().seconds;
        let mut last = self.last_erase.lock();
        // A clock that was set back must not stop erasing.
        let due = now < *last || now - *last >= ERASE_AFTER;
        if due {
            *last = now;
        }
        due
    }

    /// As [`Self::erase_all`], and looks for old ciphertext in all free space, also where no session that is remembered freed anything.
    pub(crate) fn erase_everything(&self) -> Result<()> {
        self.check_writable()?;
        self.space.lock().sweep_everything();
        self.erase_all()
    }

    /// Erases everything that was freed until now, without waiting for its age (unmount).
    pub(crate) fn erase_all(&self) -> Result<()> {
        self.check_writable()?;
        while self.sweep_step()? {}
        for _ in 0..3 {
            if !self.is_dirty() && !self.space.lock().waits_for_commit() {
                break;
            }
            self.commit_for(Purpose::Drain)?;
        }
        self.release_waiting();
        // What is being erased is out of reach for a moment, so something else has to be there.
        drop(self.make_room(0, false)?);
        loop {
            let more = self.look_at_some()?;
            while self.erase_step(true)? {}
            let mut space = self.space.lock();
            space.overwrite_dirty(&mut |run| self.overwrite(run)).map_err(|error| self.erasing_failed(error))?;
            if !more {
                return Ok(());
            }
            space.evict(self.region_limit() / 2);
        }
    }

    /// Loads some of the regions in which blocks came free unseen; answers whether there are more.
    fn look_at_some(&self) -> Result<bool> {
        for _ in 0..self.region_limit() {
            let Some(number) = self.space.lock().next_unlooked() else { return Ok(false) };
            self.load_region(number)?;
        }
        Ok(self.space.lock().next_unlooked().is_some())
    }

    /// After an unclean open: loads the next region, whose free blocks the host says hold data may be pages of a transaction that never
    /// committed.
    fn sweep_step(&self) -> Result<bool> {
        let Some(number) = self.space.lock().sweep_next() else { return Ok(false) };
        self.load_region(number)?;
        let mut space = self.space.lock();
        space.swept(number);
        // The sweep visits the whole map, which is larger than the memory that it may take.
        space.evict(self.region_limit());
        Ok(space.sweep_next().is_some())
    }

    /// Erases one batch; answers whether there was anything.
    fn erase_step(&self, all: bool) -> Result<bool> {
        let _erasing = self.erasing.lock();
        let runs = self.space.lock().start_erasing(all);
        for (index, (run, keep)) in runs.iter().enumerate() {
            match self.erase(*run, *keep) {
                Ok(backed) => self.space.lock().erased(*run, backed),
                Err(error) => {
                    // They hold old ciphertext as before, for the next attempt.
                    let mut space = self.space.lock();
                    for (run, _) in &runs[index..] {
                        space.not_erased(*run);
                    }
                    drop(space);
                    return Err(self.erasing_failed(error));
                }
            }
        }
        Ok(!runs.is_empty())
    }

    /// Punches the blocks, or overwrites them where they have to stay allocated or the host refuses. Answers whether they are still allocated.
    fn erase(&self, run: Run, keep: bool) -> Result<bool> {
        self.pager.latch().check()?;
        if !keep {
            match self.pager.storage().punch(run.offset(), run.bytes()) {
                Ok(()) => return Ok(false),
                // Punching may need room for the host's own lists; overwriting does not.
                Err(Error::Unsupported(_) | Error::NoSpace(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.overwrite(run)?;
        Ok(true)
    }

    fn erasing_failed(&self, error: Error) -> Error {
        match error {
            Error::NoSpace(_) | Error::Latched(_) => error,
            error => self.pager.latch().set("erasing freed blocks", error),
        }
    }

    fn overwrite(&self, run: Run) -> Result<()> {
        self.pager.latch().check()?;
        let mut at = run.offset();
        let end = at + run.bytes();
        let mut noise = vec![0; OVERWRITE_STEP.min(run.bytes()) as usize];
        while at < end {
            let count = (end - at).min(OVERWRITE_STEP) as usize;
            self.environment.fill_random(&mut noise[..count])?;
            self.pager.storage().write_at(at, &noise[..count])?;
            at += count as u64;
        }
        Ok(())
    }

    /// A commit without changes, whose record carries the number of the header; the archive is left as it was: closed, or to be swept by
    /// the next session. No call may follow.
    pub(crate) fn record_header(&self) -> Result<()> {
        let closed = self.durable.load().closed;
        self.open_session()?;
        if closed { self.close() } else { Ok(()) }
    }

    /// Loads the regions at the end that may be free, so that they can be cut off.
    fn load_tail(&self) -> Result<()> {
        loop {
            let unknown = self.space.lock().unknown_tail();
            let Some(number) = unknown else { return Ok(()) };
            self.load_region(number)?;
        }
    }

    /// Commits, drains, erases every free block, truncates the tail and writes the closed record. No call may follow.
    pub(crate) fn close(&self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.check_writable()?;
        let untouched = !self.is_dirty() && {
            let unbroken = self.durable.load().closed;
            unbroken && self.commits.lock().chain.session_first.is_none()
        };
        if untouched {
            return Ok(());
        }
        self.commit()?;
        self.load_tail()?;
        self.erase_all()?;
        // Erasing may have put regions away again.
        self.load_tail()?;
        let total = {
            let mut space = self.space.lock();
            space.trim_tail()
        };
        if self.pager.storage().len()? > total * BLOCK {
            if self.durable.load().total_blocks > total {
                // The file must never be shorter than a record that may be trusted says.
                self.commit_for(Purpose::Shorten)?;
            }
            self.pager.storage().set_len(total * BLOCK)?;
        }
        self.commit_for(Purpose::Close)?;
        Ok(())
    }
}
