//! Frees unlinked and trimmed file content in bounded steps, after the last handle is released.

mod removal;

pub(super) use removal::NameRemoval;
#[cfg(test)]
pub(super) use removal::remove_unlinked;
pub(super) use removal::{REMOVAL_RECORDS, STEP};

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::inode;
use super::write_buffer::{DirtyFile, LockedFile, WriteBuffer};
use super::writeback::Writeback;
use crate::error::{Error, Result};
use crate::format::values::NO_TRIM;
use crate::format::{Ino, Key, kind};
use crate::txn::{Operation, Reclaimer, Volume};
use removal::{OpenHandles, is_unlinked, orphan_key, orphan_step, trim_step};

/// Bounds of the keys of orphan and trim records.
const RECLAIM_RECORDS: (Key, Key) =
    (Key { object: 0, kind: kind::ORPHAN, sub: 0 }, Key { object: 0, kind: kind::TRIM + 1, sub: 0 });

/// Inodes with content to be reclaimed.
#[derive(Default)]
struct ReclaimQueue {
    waiting: Mutex<BTreeSet<Ino>>,
    /// Number of the last inode dequeued; the next greater one follows, so that an inode that
    /// always fails does not block the others.
    last: Mutex<Option<Ino>>,
    /// Number of inodes that are dequeued and in a step.
    in_step: AtomicUsize,
}

/// An inode that was dequeued for a step.
struct DequeuedInode<'a> {
    queue: &'a ReclaimQueue,
    ino: Ino,
}

impl Drop for DequeuedInode<'_> {
    fn drop(&mut self) {
        self.queue.in_step.fetch_sub(1, Ordering::AcqRel);
    }
}

impl ReclaimQueue {
    fn dequeue(&self) -> Option<DequeuedInode<'_>> {
        let mut last = self.last.lock();
        let mut waiting = self.waiting.lock();
        let next = waiting.iter().find(|ino| last.is_none_or(|last| **ino > last)).or(waiting.first()).copied();
        *last = next;
        next.and_then(|ino| self.remove_from(&mut waiting, ino))
    }

    fn dequeue_inode(&self, ino: Ino) -> Option<DequeuedInode<'_>> {
        self.remove_from(&mut self.waiting.lock(), ino)
    }

    fn remove_from(&self, waiting: &mut BTreeSet<Ino>, ino: Ino) -> Option<DequeuedInode<'_>> {
        waiting.remove(&ino).then(|| {
            // Under the lock, so that a thread that misses the inode in the queue sees it counted
            // here.
            self.in_step.fetch_add(1, Ordering::AcqRel);
            DequeuedInode { queue: self, ino }
        })
    }
}

/// Result of one step for an inode.
enum ReclaimStep {
    Nothing,
    /// Another thread has it locked.
    Busy,
    More,
    Last,
}

impl Reclaimer for Weak<Reclaim> {
    fn step(&self) -> Result<bool> {
        self.upgrade().map_or(Ok(false), |reclaim| reclaim.step_for_space())
    }

    fn is_held(&self) -> Result<bool> {
        self.upgrade().map_or(Ok(false), |reclaim| reclaim.has_blocked_work())
    }
}

pub(super) struct Reclaim {
    volume: Arc<Volume>,
    write_buffer: Arc<WriteBuffer>,
    writeback: Arc<Writeback>,
    handles: OpenHandles,
    queue: ReclaimQueue,
}

impl Reclaim {
    pub(super) fn new(volume: Arc<Volume>, write_buffer: Arc<WriteBuffer>, writeback: Arc<Writeback>) -> Reclaim {
        Reclaim { volume, write_buffer, writeback, handles: OpenHandles::default(), queue: ReclaimQueue::default() }
    }

    /// Counts a handle; returns false, and counts nothing, when the inode is being deleted.
    pub(super) fn open(&self, ino: Ino) -> bool {
        self.handles.open(ino)
    }

    /// Releases a handle of an inode that turned out not to exist.
    pub(super) fn cancel_open(&self, ino: Ino) {
        self.handles.release(ino);
    }

    /// Releases a handle; the last one of an orphan queues it for reclaim.
    pub(super) fn release(&self, ino: Ino) -> Result<()> {
        if self.handles.release(ino) {
            let state = self.volume.state();
            if self.volume.view(&state).get(orphan_key(ino), |_| Ok(()))?.is_some() {
                self.enqueue(ino);
            }
        }
        Ok(())
    }

    /// Runs `Volume::operate` with an `f` that may remove the last name of an inode; queueing or
    /// discarding the inode follows after the publication.
    pub(super) fn operate_removing<R>(
        &self,
        records: u64,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>, &mut NameRemoval<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut removal = NameRemoval::new(&self.handles);
        let result = self.volume.operate(records + REMOVAL_RECORDS, essential, |op| f(op, &mut removal));
        let Some((ino, gone)) = removal.end() else { return result };
        if result.is_ok() && gone {
            self.write_buffer.discard(ino);
        } else if result.is_ok() && !self.handles.is_open(ino) {
            // Also if the last handle was released before the orphan was published: that release
            // could not see it.
            self.enqueue(ino);
        }
        result
    }

    /// Queues the inode for the next step.
    pub(super) fn enqueue(&self, ino: Ino) {
        self.queue.waiting.lock().insert(ino);
    }

    /// Drops handles that were never released because the mount ended without the last RELEASE, and
    /// queues the inodes unlinked under them.
    pub(super) fn forget_handles(&self) -> Result<()> {
        self.handles.clear();
        self.queue_leftovers()
    }

    /// Queues the orphans and trims of the last session; none of them can be open.
    pub(super) fn queue_leftovers(&self) -> Result<()> {
        let state = self.volume.state();
        let mut queue = self.queue.waiting.lock();
        self.volume.view(&state).scan(RECLAIM_RECORDS.0, RECLAIM_RECORDS.1, &mut |key, _| {
            queue.insert(Ino(key.sub));
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Returns whether `queue_leftovers` would queue anything.
    pub(super) fn has_pending_reclaim(&self) -> Result<bool> {
        let (state, mut found) = (self.volume.state(), false);
        self.volume.view(&state).scan(RECLAIM_RECORDS.0, RECLAIM_RECORDS.1, &mut |_, _| {
            found = true;
            Ok(ControlFlow::Break(()))
        })?;
        Ok(found)
    }

    /// Runs one step for the next inode of the queue; returns whether there was one.
    pub(super) fn step(&self) -> Result<bool> {
        let Some(taken) = self.queue.dequeue() else { return Ok(false) };
        self.run_step(&taken, |file| Some(file.lock())).map(|_| true)
    }

    /// Reclaims the inodes that are queued now; later ones are left to others. Inodes that cannot
    /// be reclaimed, because of damage or a full host, are left too, and background work reports
    /// them. `go_on` runs before each step.
    ///
    /// # Errors
    /// Errors of `go_on`, `WriteFailed`.
    pub(super) fn run_queued(&self, go_on: &dyn Fn() -> Result<()>) -> Result<()> {
        let waiting = self.queue.waiting.lock().clone();
        for ino in waiting {
            while let Some(taken) = self.queue.dequeue_inode(ino) {
                go_on().inspect_err(|_| self.enqueue(ino))?;
                match self.run_step(&taken, |file| Some(file.lock())) {
                    // Blocked for now, or finished.
                    Ok(false) => break,
                    Ok(true) => {}
                    Err(error @ Error::WriteFailed(_)) => return Err(error),
                    Err(error) => {
                        tracing::debug!(%error, inode = ino.0, "what was deleted could not be reclaimed");
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Runs one step for the first queued inode that no other thread uses, else for a removed
    /// snapshot; returns whether there was one. The caller may have files locked.
    pub(super) fn step_for_space(&self) -> Result<bool> {
        let waiting = self.queue.waiting.lock().len();
        for _ in 0..waiting {
            let Some(taken) = self.queue.dequeue() else { break };
            if self.run_step(&taken, |file| file.try_lock())? {
                return Ok(true);
            }
        }
        self.volume.removal_step_for_room()
    }

    /// Returns whether [`Self::step_for_space`] may find more soon: a step is in progress, or an
    /// orphan is open or its file locked.
    fn has_blocked_work(&self) -> Result<bool> {
        let mut held = self.queue.in_step.load(Ordering::Acquire) > 0;
        let state = self.volume.state();
        self.volume.view(&state).scan(orphan_key(Ino(0)), orphan_key(Ino(u64::MAX)), &mut |key, _| {
            let ino = Ino(key.sub);
            held = held
                || self.handles.is_open(ino)
                || self.write_buffer.find(ino).is_some_and(|file| file.try_lock().is_none());
            Ok(if held { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        })?;
        Ok(held)
    }

    /// Runs one step for a dequeued inode and queues it again if work is left; returns whether it
    /// did anything.
    fn run_step(
        &self,
        taken: &DequeuedInode<'_>,
        lock: impl Fn(&Arc<DirtyFile>) -> Option<LockedFile<'_>>,
    ) -> Result<bool> {
        let step = self.try_step(taken.ino, lock);
        if !matches!(step, Ok(ReclaimStep::Nothing | ReclaimStep::Last)) {
            self.enqueue(taken.ino);
        }
        Ok(matches!(step?, ReclaimStep::Last | ReclaimStep::More))
    }

    pub(super) fn is_pending(&self) -> bool {
        !self.queue.waiting.lock().is_empty()
    }

    fn try_step(&self, ino: Ino, lock: impl Fn(&Arc<DirtyFile>) -> Option<LockedFile<'_>>) -> Result<ReclaimStep> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::find(view, ino)?;
        let orphan = view.get(orphan_key(ino), |_| Ok(()))?.is_some() && is_unlinked(ino, inode.as_ref());
        let trimmed = inode.is_some_and(|inode| inode.trim != NO_TRIM);
        drop(state);
        if orphan && !self.handles.is_open(ino) {
            return self.step_orphan(ino, lock);
        }
        if trimmed && !orphan {
            return self.trim_until(ino, None).map(|done| if done { ReclaimStep::Last } else { ReclaimStep::More });
        }
        Ok(ReclaimStep::Nothing)
    }

    fn step_orphan(&self, ino: Ino, lock: impl Fn(&Arc<DirtyFile>) -> Option<LockedFile<'_>>) -> Result<ReclaimStep> {
        let gone = {
            let entry = self.write_buffer.file(ino);
            let Some(file) = lock(&entry) else { return Ok(ReclaimStep::Busy) };
            // A batch applied between two steps would add extents after the first step found none.
            file.discard_active();
            self.writeback.finish_older_batches(&file)?;
            // No thread can write more: the inode has neither a name nor a handle.
            self.volume.operate(REMOVAL_RECORDS, true, |op| orphan_step(op, ino))?
        };
        if gone {
            self.write_buffer.discard(ino);
        }
        Ok(if gone { ReclaimStep::Last } else { ReclaimStep::More })
    }

    /// Advances the trim offset to `until` or, without it, by one step; returns whether nothing
    /// before the target is hidden any more.
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

    /// Frees the hidden extents before `end`, so that the range can be written.
    pub(super) fn complete_trim(&self, file: &LockedFile<'_>, end: u64) -> Result<()> {
        self.trim_until(file.ino(), Some(end)).map(drop)
    }
}
