//! Erases free blocks that still hold old ciphertext, and cuts free blocks off the end of the file.

use super::{Allocator, keep_of};
use crate::error::{Error, Result};
use crate::format::{BLOCK, Run};

/// Bytes of random data written at once where the host does not punch.
const OVERWRITE_STEP: u64 = 1 << 20;
/// Free groups required before others are withheld for erasing.
const SPARE: u64 = 16;

impl Allocator {
    /// Waits until no erase is in progress; blocks that were being erased can be taken then.
    pub(in crate::txn) fn await_erasing(&self) {
        drop(self.erasing.lock());
    }

    /// Loads the next region with unscanned free blocks, so that they are erased with the others;
    /// returns whether another one is left. While memory for regions is short the others wait, at
    /// the latest until the end.
    pub(in crate::txn) fn look_step(&self) -> Result<bool> {
        let next = || self.space.lock().next_unscanned();
        let Some(number) = next() else { return Ok(false) };
        {
            let mut space = self.space.lock();
            if space.has_loaded_regions(self.region_limit) {
                space.evict(self.region_limit / 2);
                if space.has_loaded_regions(self.region_limit) {
                    return Ok(false);
                }
            }
        }
        self.load_region(number)?;
        Ok(next().is_some())
    }

    /// Loads the next region after an unclean open. Its free blocks for which the host reports data
    /// may be pages of a transaction that never committed. Returns whether more regions are left.
    pub(in crate::txn) fn sweep_step(&self) -> Result<bool> {
        let Some(number) = self.space.lock().next_unswept() else { return Ok(false) };
        self.load_region(number)?;
        let mut space = self.space.lock();
        space.mark_swept(number);
        // The sweep visits the whole map, which is larger than the memory that it may take.
        space.evict(self.region_limit);
        Ok(space.next_unswept().is_some())
    }

    /// Makes the sweep visit every region, regardless of the last session's state.
    pub(in crate::txn) fn restart_sweep(&self) {
        self.space.lock().restart_sweep();
    }

    /// Erases a batch of blocks that were free for a while. Blocks cannot be allocated while they
    /// are erased, so the file first grows, if it can, until `SPARE` groups are free.
    pub(in crate::txn) fn erase_aged(&self) -> Result<()> {
        if self.space.lock().has_dirty() {
            self.has_groups(SPARE, keep_of(false))?;
        }
        self.erase_step(false).map(drop)
    }

    /// Erases every free block that holds old ciphertext.
    pub(in crate::txn) fn erase_all(&self) -> Result<()> {
        loop {
            let more = self.look_at_some()?;
            while self.erase_step(true)? {}
            let mut space = self.space.lock();
            let overwritten = space.overwrite_dirty(&mut |run| self.overwrite(run));
            overwritten.map_err(|error| self.erasing_failed(error))?;
            if !more {
                return Ok(());
            }
            space.evict(self.region_limit / 2);
        }
    }

    /// Loads some of the regions in which blocks came free unseen; returns whether there are more.
    fn look_at_some(&self) -> Result<bool> {
        for _ in 0..self.region_limit {
            let Some(number) = self.space.lock().next_unscanned() else { return Ok(false) };
            self.load_region(number)?;
        }
        Ok(self.space.lock().next_unscanned().is_some())
    }

    /// Erases one batch; returns whether there was anything.
    fn erase_step(&self, all: bool) -> Result<bool> {
        let _erasing = self.erasing.lock();
        let runs = self.space.lock().begin_erase(all);
        for (index, (run, keep)) in runs.iter().enumerate() {
            match self.erase(*run, *keep) {
                Ok(backed) => self.space.lock().finish_erase(*run, backed),
                Err(error) => {
                    // They hold old ciphertext as before, for the next attempt.
                    let mut space = self.space.lock();
                    for (run, _) in &runs[index..] {
                        space.abort_erase(*run);
                    }
                    drop(space);
                    return Err(self.erasing_failed(error));
                }
            }
        }
        Ok(!runs.is_empty())
    }

    /// Punches the blocks, or overwrites them where they must stay allocated or the host refuses.
    /// Returns whether they are still allocated.
    fn erase(&self, run: Run, keep: bool) -> Result<bool> {
        self.medium.pager.sticky_error().check()?;
        if self.storage().has_atomic_barrier() {
            // No host must keep space for later writes here.
            return self.storage().punch(run.offset(), run.bytes()).map(|()| keep);
        }
        if !keep {
            match self.storage().punch(run.offset(), run.bytes()) {
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
            Error::NoSpace(_) | Error::WriteFailed(_) => error,
            error => self.medium.pager.sticky_error().record("erasing freed blocks", error),
        }
    }

    fn overwrite(&self, run: Run) -> Result<()> {
        self.medium.pager.sticky_error().check()?;
        if self.storage().has_atomic_barrier() {
            return self.storage().punch(run.offset(), run.bytes());
        }
        let mut at = run.offset();
        let end = at + run.bytes();
        let mut noise = vec![0; OVERWRITE_STEP.min(run.bytes()) as usize];
        while at < end {
            let count = (end - at).min(OVERWRITE_STEP) as usize;
            self.medium.environment.fill_random(&mut noise[..count])?;
            self.storage().write_at(at, &noise[..count])?;
            at += count as u64;
        }
        Ok(())
    }

    /// Loads the regions at the end that may be free, so that they can be cut off.
    pub(in crate::txn) fn load_tail(&self) -> Result<()> {
        loop {
            let unknown = self.space.lock().unloaded_tail_region();
            let Some(number) = unknown else { return Ok(()) };
            self.load_region(number)?;
        }
    }

    /// Cuts free blocks off the end of the map; returns the bytes that the file has to keep.
    pub(in crate::txn) fn trim_tail(&self) -> u64 {
        self.space.lock().trim_tail() * BLOCK
    }

    #[cfg(test)]
    pub(in crate::txn) fn is_erasing(&self) -> bool {
        self.erasing.is_locked()
    }
}
