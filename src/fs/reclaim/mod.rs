//! Frees unlinked and trimmed file content in bounded steps, once nobody has it open.

mod handles;
mod records;
mod removal;

#[cfg(test)]
pub(super) use records::removed;
pub(super) use records::{REMOVED_RECORDS, STEP};
pub(super) use removal::Removal;

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::inode;
use super::write_buffer::{LockedFile, StagedFile, Staging};
use super::writeback::WriteOut;
use crate::error::{Error, Result};
use crate::format::values::NO_TRIM;
use crate::format::{Ino, Key, kind};
use crate::txn::{Operation, Reclaimer, Volume};
use handles::OpenHandles;
use records::{is_nameless, orphan_key, orphan_step, trim_step};

/// First key of the records of orphans and trims, and the first one behind them.
const LEFT_OVER: (Key, Key) =
    (Key { object: 0, kind: kind::ORPHAN, sub: 0 }, Key { object: 0, kind: kind::TRIM + 1, sub: 0 });

/// Numbers of inodes that have something to be reclaimed.
#[derive(Default)]
struct Queue {
    waiting: Mutex<BTreeSet<Ino>>,
    /// The number after which the next one is taken, so that one that fails every time does not keep the others waiting.
    last: Mutex<Option<Ino>>,
    /// Those that were taken out and are being stepped.
    in_step: AtomicUsize,
}

/// An inode that was taken out of the queue for a step.
struct Taken<'a> {
    queue: &'a Queue,
    ino: Ino,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.queue.in_step.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Queue {
    fn take(&self) -> Option<Taken<'_>> {
        let mut last = self.last.lock();
        let mut waiting = self.waiting.lock();
        let next = waiting.iter().find(|ino| last.is_none_or(|last| **ino > last)).or(waiting.first()).copied();
        *last = next;
        next.and_then(|ino| self.take_from(&mut waiting, ino))
    }

    fn take_this(&self, ino: Ino) -> Option<Taken<'_>> {
        self.take_from(&mut self.waiting.lock(), ino)
    }

    fn take_from(&self, waiting: &mut BTreeSet<Ino>, ino: Ino) -> Option<Taken<'_>> {
        waiting.remove(&ino).then(|| {
            // Under the lock: whoever finds the inode gone from the queue finds it here.
            self.in_step.fetch_add(1, Ordering::AcqRel);
            Taken { queue: self, ino }
        })
    }
}

/// What became of an inode of the queue.
enum Step {
    Nothing,
    /// Somebody has it locked.
    Busy,
    More,
    Last,
}

impl Reclaimer for Weak<Reclaim> {
    fn step(&self) -> Result<bool> {
        self.upgrade().map_or(Ok(false), |reclaim| reclaim.step_for_room())
    }

    fn is_held(&self) -> Result<bool> {
        self.upgrade().map_or(Ok(false), |reclaim| reclaim.is_held())
    }
}

pub(super) struct Reclaim {
    volume: Arc<Volume>,
    staging: Arc<Staging>,
    write_out: Arc<WriteOut>,
    handles: OpenHandles,
    queue: Queue,
}

impl Reclaim {
    pub(super) fn new(volume: Arc<Volume>, staging: Arc<Staging>, write_out: Arc<WriteOut>) -> Reclaim {
        Reclaim { volume, staging, write_out, handles: OpenHandles::default(), queue: Queue::default() }
    }

    /// Counts a handle; false, and nothing counted, when the inode is being deleted.
    pub(super) fn open(&self, ino: Ino) -> bool {
        self.handles.open(ino)
    }

    /// Takes back a handle of an inode that turned out not to be there.
    pub(super) fn unopen(&self, ino: Ino) {
        self.handles.release(ino);
    }

    /// Ends a handle; the last one of an orphan has it reclaimed.
    pub(super) fn release(&self, ino: Ino) -> Result<()> {
        if self.handles.release(ino) {
            let state = self.volume.state();
            if self.volume.view(&state).get(orphan_key(ino), |_| Ok(()))?.is_some() {
                self.add(ino);
            }
        }
        Ok(())
    }

    /// `Volume::operate` for an `f` that may take the last name of an inode away; what follows from that happens after the publication.
    pub(super) fn operate_removing<R>(
        &self,
        records: u64,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>, &mut Removal<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut removal = Removal::new(&self.handles);
        let result = self.volume.operate(records + REMOVED_RECORDS, essential, |op| f(op, &mut removal));
        let Some((ino, gone)) = removal.end() else { return result };
        if result.is_ok() && gone {
            self.staging.forget(ino);
        } else if result.is_ok() && !self.handles.is_open(ino) {
            // Also when the last handle was released before the orphan was published: that release could not see it.
            self.add(ino);
        }
        result
    }

    /// Has the inode looked at by the next step.
    pub(super) fn add(&self, ino: Ino) {
        self.queue.waiting.lock().insert(ino);
    }

    /// A mount that ended without the last RELEASE leaves handles that nobody has: what was unlinked under them can go.
    pub(super) fn forget_handles(&self) -> Result<()> {
        self.handles.forget();
        self.add_left_over()
    }

    /// Queues what was left over; none of it can be open.
    pub(super) fn add_left_over(&self) -> Result<()> {
        let state = self.volume.state();
        let mut queue = self.queue.waiting.lock();
        self.volume.view(&state).scan(LEFT_OVER.0, LEFT_OVER.1, &mut |key, _| {
            queue.insert(Ino(key.sub));
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Whether anything is there to be queued by that.
    pub(super) fn has_left_over(&self) -> Result<bool> {
        let (state, mut found) = (self.volume.state(), false);
        self.volume.view(&state).scan(LEFT_OVER.0, LEFT_OVER.1, &mut |_, _| {
            found = true;
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }

    /// One step for the next inode of the queue; answers whether the queue had any.
    pub(super) fn step(&self) -> Result<bool> {
        let Some(taken) = self.queue.take() else { return Ok(false) };
        self.step_of(&taken, |file| Some(file.lock())).map(|_| true)
    }

    /// Reclaims what waits for it now; what comes meanwhile is left to others. What cannot be reclaimed, because it is damaged or the host is full, is left
    /// as well, and background work tells of it. `go_on` is asked before each step.
    ///
    /// # Errors
    /// Those of `go_on`, `Latched`.
    pub(super) fn what_waits(&self, go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        let waiting = self.queue.waiting.lock().clone();
        for ino in waiting {
            while let Some(taken) = self.queue.take_this(ino) {
                go_on().inspect_err(|_| self.add(ino))?;
                match self.step_of(&taken, |file| Some(file.lock())) {
                    // Nothing of it can go yet, or nothing is left.
                    Ok(false) => break,
                    Ok(true) => {}
                    Err(error @ Error::Latched(_)) => return Err(error),
                    Err(error) => {
                        tracing::debug!(%error, inode = ino.0, "what was deleted could not be reclaimed");
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// One step for the first inode of the queue that nobody is busy with, else for a snapshot that was removed; answers whether there was one. The caller
    /// may have files locked.
    pub(super) fn step_for_room(&self) -> Result<bool> {
        let waiting = self.queue.waiting.lock().len();
        for _ in 0..waiting {
            let Some(taken) = self.queue.take() else { break };
            if self.step_of(&taken, |file| file.try_lock())? {
                return Ok(true);
            }
        }
        self.volume.removal_step_for_room()
    }

    /// Whether there may be more for [`Self::step_for_room`] soon: somebody is at a step, or has an inode without a name open or its file locked.
    fn is_held(&self) -> Result<bool> {
        let mut held = self.queue.in_step.load(Ordering::Acquire) > 0;
        let state = self.volume.state();
        self.volume.view(&state).scan(orphan_key(Ino(0)), orphan_key(Ino(u64::MAX)), &mut |key, _| {
            let ino = Ino(key.sub);
            held = held
                || self.handles.is_open(ino)
                || self.staging.find(ino).is_some_and(|file| file.try_lock().is_none());
            Ok(if held { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(held)
    }

    /// One step for an inode that was taken out of the queue, and goes back to it when there is more to do; answers whether there was anything.
    fn step_of(&self, taken: &Taken<'_>, lock: impl Fn(&Arc<StagedFile>) -> Option<LockedFile<'_>>) -> Result<bool> {
        let step = self.try_step(taken.ino, lock);
        if !matches!(step, Ok(Step::Nothing | Step::Last)) {
            self.add(taken.ino);
        }
        Ok(matches!(step?, Step::Last | Step::More))
    }

    pub(super) fn is_pending(&self) -> bool {
        !self.queue.waiting.lock().is_empty()
    }

    fn try_step(&self, ino: Ino, lock: impl Fn(&Arc<StagedFile>) -> Option<LockedFile<'_>>) -> Result<Step> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::find(view, ino)?;
        let orphan = view.get(orphan_key(ino), |_| Ok(()))?.is_some() && is_nameless(ino, inode.as_ref());
        let trimmed = inode.is_some_and(|inode| inode.trim != NO_TRIM);
        drop(state);
        if orphan && !self.handles.is_open(ino) {
            return self.step_of_orphan(ino, lock);
        }
        if trimmed && !orphan {
            return self.trim_until(ino, None).map(|done| if done { Step::Last } else { Step::More });
        }
        Ok(Step::Nothing)
    }

    fn step_of_orphan(&self, ino: Ino, lock: impl Fn(&Arc<StagedFile>) -> Option<LockedFile<'_>>) -> Result<Step> {
        let gone = {
            let entry = self.staging.entry(ino);
            let Some(file) = lock(&entry) else { return Ok(Step::Busy) };
            // A batch that landed between two steps would put extents where the first one said there are none.
            file.discard_active();
            self.write_out.land_older(&file)?;
            // Nobody can stage more: there is neither a name nor a handle.
            self.volume.operate(REMOVED_RECORDS, true, |op| orphan_step(op, ino))?
        };
        if gone {
            self.staging.forget(ino);
        }
        Ok(if gone { Step::Last } else { Step::More })
    }

    /// Moves the trim offset on to `until` or, without it, by one step; answers whether nothing is hidden any more before that.
    fn trim_until(&self, ino: Ino, until: Option<u64>) -> Result<bool> {
        loop {
            // Each extent with the reference records around it, inode, trim record.
            let records = STEP * 5 + 2;
            let done = self.volume.operate(records, true, |op| {
                let mut inode = inode::load(op.view(), ino)?;
                let goal = until.unwrap_or(NO_TRIM);
                if inode.trim < goal {
                    trim_step(op, ino, &mut inode)?;
                }
                Ok(inode.trim >= goal)
            })?;
            if done || until.is_none() {
                return Ok(done);
            }
        }
    }

    /// Frees what is hidden before `end`, so that it can be written to.
    pub(super) fn complete_trim(&self, file: &LockedFile<'_>, end: u64) -> Result<()> {
        self.trim_until(file.ino(), Some(end)).map(drop)
    }
}
