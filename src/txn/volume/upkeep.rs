//! What an open archive does in the background and at its end: drain, erase, sweep, truncate, close.

use super::Volume;
use crate::error::{Error, Result};
use crate::format::BLOCK;
use crate::txn::commit::Purpose;

/// Seconds that a free block keeps its old ciphertext at least, and at most twice that plus the time to drain.
const ERASE_AFTER: i64 = 5;

impl Volume {
    /// One background step: drains freed blocks of an idle archive by empty commits, every 5 s erases blocks that were free 5 s before,
    /// sweeps a region after an unclean open. Returns whether there is more to do at once.
    pub(crate) fn maintain(&self) -> Result<bool> {
        self.committer.check_writable()?;
        let latch = self.pager.latch();
        self.pager.check_host().map_err(|error| latch.set("looking after the archive's file", error))?;
        self.allocator.release_waiting();
        let drained = if !self.is_dirty() && self.allocator.waits_for_commit() {
            self.committer.commit_for(Purpose::Drain).map(drop)
        } else {
            Ok(())
        };
        let drained = match drained {
            // Erasing what is free already may give the host the room that the record lacks.
            Err(Error::NoSpace(reason)) if latch.reason().is_none() => Err(Error::NoSpace(reason)),
            drained => Ok(drained?),
        };
        let swept = self.allocator.sweep_step()? | self.allocator.look_step()?;
        if self.erase_is_due() {
            self.allocator.erase_aged(&*self.environment)?;
        }
        drained.map(|()| swept)
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
        self.committer.check_writable()?;
        self.allocator.sweep_everything();
        self.erase_all()
    }

    /// Erases everything that was freed until now, without waiting for its age (unmount).
    pub(crate) fn erase_all(&self) -> Result<()> {
        self.committer.check_writable()?;
        while self.allocator.sweep_step()? {}
        for _ in 0..3 {
            if !self.is_dirty() && !self.allocator.waits_for_commit() {
                break;
            }
            self.committer.commit_for(Purpose::Drain)?;
        }
        self.allocator.release_waiting();
        // What is being erased is out of reach for a moment, so something else has to be there.
        drop(self.shortage.await_operation(0, false)?);
        self.allocator.erase_all(&*self.environment)
    }

    /// A commit without changes, whose record carries the number of the header; the archive is left as it was: closed, or to be swept by
    /// the next session. No call may follow.
    pub(crate) fn record_header(&self) -> Result<()> {
        let closed = self.durable().closed;
        self.committer.open_session()?;
        if closed { self.close() } else { Ok(()) }
    }

    /// Commits, drains, erases every free block, truncates the tail and writes the closed record. No call may follow.
    pub(crate) fn close(&self) -> Result<()> {
        if self.read_only() {
            return Ok(());
        }
        self.committer.check_writable()?;
        if !self.is_dirty() && self.durable().closed && self.chain().session_first.is_none() {
            return Ok(());
        }
        self.commit()?;
        self.allocator.load_tail()?;
        self.erase_all()?;
        // Erasing may have put regions away again.
        self.allocator.load_tail()?;
        let length = self.allocator.trim_tail();
        let storage = self.pager.storage();
        if storage.len()? > length {
            if self.durable().total_blocks * BLOCK > length {
                // The file must never be shorter than a record that may be trusted says.
                self.committer.commit_for(Purpose::Shorten)?;
            }
            storage.set_len(length)?;
        }
        self.committer.commit_for(Purpose::Close).map(drop)
    }
}
