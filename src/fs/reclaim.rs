//! Frees trimmed file content, and unlinked files after the last handle is released, in bounded
//! steps.
//!
//! The operation that drops the last name of an object deletes the inode at once if its records are
//! few; otherwise the inode becomes an orphan that waits for its last handle and for reclaim.

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::{Condvar, Mutex};

use super::directory::has_records;
use super::types::mode;
use super::write_buffer::{DirtyFile, LockedFile, WriteBuffer};
use super::writeback::Writeback;
use super::{extents, inode};
use crate::error::{Error, Result, Timestamp};
use crate::format::values::{Extent, InodeValue, NO_TRIM};
use crate::format::{Ino, Key, MAX_INO, ROOT_INO, kind};
use crate::txn::{Operation, View, Volume};

/// Bounds of the keys of orphan and trim records.
const RECLAIM_RECORDS: (Key, Key) =
    (Key { object: 0, kind: kind::ORPHAN, sub: 0 }, Key { object: 0, kind: kind::TRIM + 1, sub: 0 });

/// Inodes with content to be reclaimed.
#[derive(Default)]
struct ReclaimQueue {
    state: Mutex<QueueState>,
    step_ended: Condvar,
}

#[derive(Default)]
struct QueueState {
    waiting: BTreeSet<Ino>,
    /// Number of the last inode dequeued; the next greater one follows, so that an inode that
    /// always fails does not block the others.
    last: Option<Ino>,
    /// Inodes that a thread runs a step for, each as often as threads do. Work that is left is
    /// queued before the step ends, so it is always in the queue or here.
    in_step: Vec<Ino>,
}

struct DequeuedInode<'a> {
    queue: &'a ReclaimQueue,
    ino: Ino,
}

impl Drop for DequeuedInode<'_> {
    fn drop(&mut self) {
        let mut state = self.queue.state.lock();
        if let Some(at) = state.in_step.iter().position(|ino| *ino == self.ino) {
            state.in_step.swap_remove(at);
        }
        self.queue.step_ended.notify_all();
    }
}

impl ReclaimQueue {
    fn dequeue(&self) -> Option<DequeuedInode<'_>> {
        let mut state = self.state.lock();
        let QueueState { waiting, last, .. } = &mut *state;
        let next = waiting.iter().find(|ino| last.is_none_or(|last| **ino > last)).or(waiting.first()).copied();
        *last = next;
        next.and_then(|ino| self.remove_from(&mut state, ino))
    }

    fn dequeue_inode(&self, ino: Ino) -> Option<DequeuedInode<'_>> {
        self.remove_from(&mut self.state.lock(), ino)
    }

    /// Like [`Self::dequeue_inode`], after the steps of other threads for this inode.
    fn dequeue_after_steps(&self, ino: Ino) -> Option<DequeuedInode<'_>> {
        let mut state = self.state.lock();
        loop {
            let taken = self.remove_from(&mut state, ino);
            if taken.is_some() || !state.in_step.contains(&ino) {
                return taken;
            }
            self.step_ended.wait(&mut state);
        }
    }

    fn remove_from(&self, state: &mut QueueState, ino: Ino) -> Option<DequeuedInode<'_>> {
        state.waiting.remove(&ino).then(|| {
            state.in_step.push(ino);
            DequeuedInode { queue: self, ino }
        })
    }
}

enum ReclaimStep {
    Nothing,
    /// Another thread has it locked.
    Busy,
    More,
    Last,
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

    pub(super) fn open(&self, ino: Ino) -> bool {
        self.handles.open(ino)
    }

    /// Releases a handle of an inode that turned out not to exist.
    pub(super) fn cancel_open(&self, ino: Ino) {
        self.handles.release(ino);
    }

    /// Releases a handle. The last one of an orphan queues it and runs one step of its reclaim,
    /// which is all of it up to 64 MiB. So the backlog stays small, however fast programs replace
    /// files.
    pub(super) fn release(&self, ino: Ino) -> Result<()> {
        if !self.handles.release(ino) {
            return Ok(());
        }
        if self.volume.view(&self.volume.state()).get(orphan_key(ino), |_| Ok(()))?.is_none() {
            return Ok(());
        }
        self.enqueue(ino);
        if let Some(taken) = self.queue.dequeue_inode(ino)
            && let Err(error) = self.run_step(&taken, |file| file.try_lock())
        {
            // It is queued again, and background work reports the error.
            tracing::debug!(%error, inode = ino.0, "cannot reclaim a released file yet");
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
        let mut removal = NameRemoval { handles: &self.handles, last: None };
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

    pub(super) fn enqueue(&self, ino: Ino) {
        self.queue.state.lock().waiting.insert(ino);
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
        let mut queue = self.queue.state.lock();
        self.volume.view(&state).scan(RECLAIM_RECORDS.0, RECLAIM_RECORDS.1, &mut |key, _| {
            queue.waiting.insert(Ino(key.sub));
            Ok(ControlFlow::Continue(()))
        })
    }

    /// Returns whether [`Self::queue_leftovers`] would queue anything.
    pub(super) fn has_pending_reclaim(&self) -> Result<bool> {
        has_records(self.volume.view(&self.volume.state()), RECLAIM_RECORDS.0..RECLAIM_RECORDS.1)
    }

    /// Runs one step for the next inode of the queue; returns whether there was one.
    pub(super) fn step(&self) -> Result<bool> {
        let Some(taken) = self.queue.dequeue() else { return Ok(false) };
        self.run_step(&taken, |file| Some(file.lock())).map(|_| true)
    }

    /// Reclaims the inodes that are queued or in a step of another thread now; later ones are left
    /// to others. Inodes that cannot be reclaimed, because of damage or a full host, are left too,
    /// and background work reports them: the inner result has the first such error. `go_on` runs
    /// before each step. Errors of `go_on`, `WriteFailed`.
    pub(super) fn run_queued(&self, go_on: &dyn Fn() -> Result<()>) -> Result<Result<()>> {
        let mut left = Ok(());
        let now: BTreeSet<Ino> = {
            let state = self.queue.state.lock();
            state.waiting.iter().chain(&state.in_step).copied().collect()
        };
        for ino in now {
            while let Some(taken) = self.queue.dequeue_after_steps(ino) {
                go_on().inspect_err(|_| self.enqueue(ino))?;
                match self.run_step(&taken, |file| Some(file.lock())) {
                    // Blocked for now, or finished.
                    Ok(false) => break,
                    Ok(true) => {}
                    Err(error @ Error::WriteFailed(_)) => return Err(error),
                    Err(error) => {
                        tracing::debug!(%error, inode = ino.0, "cannot reclaim a deleted object");
                        left = left.and(Err(error));
                        break;
                    }
                }
            }
        }
        Ok(left)
    }

    /// Runs one step for the first queued inode that no other thread uses, else for a removed
    /// snapshot; returns whether there was one. The caller may have files locked.
    pub(super) fn step_for_space(&self) -> Result<bool> {
        let waiting = self.queue.state.lock().waiting.len();
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
    pub(super) fn has_blocked_work(&self) -> Result<bool> {
        let mut held = !self.queue.state.lock().in_step.is_empty();
        self.volume.view(&self.volume.state()).scan(orphan_key(Ino(0)), orphan_key(Ino(u64::MAX)), &mut |key, _| {
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
        !self.queue.state.lock().waiting.is_empty()
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
        if trimmed {
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
                // An orphan may have been released and deleted meanwhile.
                let Some(mut inode) = inode::find(op.view(), ino)? else { return Ok(true) };
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

/// Number of shards, so that opens of different files rarely share a lock; opens are short, so a
/// few times the number of threads is enough.
const SHARDS: usize = 16;
/// Count of an inode that an operation is about to delete: it can no longer be opened.
const RETIRED: u64 = u64::MAX;

/// Number of open handles of each inode.
///
/// The operation that drops the last name of an inode decides by `retire` whether the inode is
/// deleted or kept. An `open` between that decision and the publication is refused, so it cannot
/// hold a deleted inode.
#[derive(Default)]
struct OpenHandles {
    shards: [Mutex<HashMap<Ino, u64>>; SHARDS],
}

impl OpenHandles {
    fn shard(&self, ino: Ino) -> &Mutex<HashMap<Ino, u64>> {
        &self.shards[(ino.0 % SHARDS as u64) as usize]
    }

    /// Counts a handle; returns false, and counts nothing, when the inode is being deleted.
    fn open(&self, ino: Ino) -> bool {
        let mut counts = self.shard(ino).lock();
        let count = counts.entry(ino).or_insert(0);
        if *count == RETIRED {
            return false;
        }
        *count += 1;
        true
    }

    /// Releases a handle; returns whether it was the last one.
    fn release(&self, ino: Ino) -> bool {
        let mut counts = self.shard(ino).lock();
        let Entry::Occupied(mut count) = counts.entry(ino) else { return false };
        match *count.get() {
            RETIRED => false,
            0 | 1 => {
                count.remove();
                true
            }
            _ => {
                *count.get_mut() -= 1;
                false
            }
        }
    }

    fn clear(&self) {
        for shard in &self.shards {
            shard.lock().retain(|_, count| *count == RETIRED);
        }
    }

    fn is_open(&self, ino: Ino) -> bool {
        self.shard(ino).lock().get(&ino).is_some_and(|&count| count != RETIRED)
    }

    /// Refuses opens of the inode until `revive`; returns false, and does nothing, if it is open.
    fn retire(&self, ino: Ino) -> bool {
        *self.shard(ino).lock().entry(ino).or_insert(RETIRED) == RETIRED
    }

    /// Ends `retire`: either the inode is deleted, which a later open sees in the tree, or the
    /// deletion failed.
    fn revive(&self, ino: Ino) {
        let mut counts = self.shard(ino).lock();
        if counts.get(&ino) == Some(&RETIRED) {
            counts.remove(&ino);
        }
    }
}

/// Inode that loses its last name in an operation, if any.
pub(super) struct NameRemoval<'r> {
    handles: &'r OpenHandles,
    last: Option<UnlinkedInode>,
}

struct UnlinkedInode {
    ino: Ino,
    /// Not open, and protected from opens by `OpenHandles::retire`.
    retired: bool,
    /// All its records are removed.
    gone: bool,
}

impl NameRemoval<'_> {
    /// Removes a name of `inode` (of a directory: the only one) and stores it. Changes 1 record,
    /// and at most REMOVAL_RECORDS.
    pub(super) fn drop_name(
        &mut self,
        op: &mut Operation<'_>,
        ino: Ino,
        inode: &mut InodeValue,
        now: Timestamp,
    ) -> Result<()> {
        inode.links = if inode.mode & mode::TYPE == mode::DIRECTORY { 0 } else { inode.links.saturating_sub(1) };
        inode.ctime = now;
        inode::store(op, ino, inode)?;
        if inode.links == 0 {
            let retired = self.handles.retire(ino);
            let last = self.last.insert(UnlinkedInode { ino, retired, gone: false });
            last.gone = remove_unlinked(op, ino, inode, !retired)?;
        }
        Ok(())
    }

    /// Ends the protection after the operation. Returns the inode that lost its last name, and
    /// whether all its records were removed.
    fn end(self) -> Option<(Ino, bool)> {
        let UnlinkedInode { ino, retired, gone } = self.last?;
        if retired {
            self.handles.revive(ino);
        }
        Some((ino, gone))
    }
}

/// Maximum records of an object that one operation removes: about a hundred leaves, well under a
/// tenth of a second.
pub(super) const STEP: u64 = 512;

/// Records that an operation has to reserve for `remove_unlinked`: each record, and for extents the
/// reference records around it.
pub(super) const REMOVAL_RECORDS: u64 = STEP * 5;

fn orphan_key(ino: Ino) -> Key {
    Key::new(0, kind::ORPHAN, ino.0)
}

fn trim_key(ino: Ino) -> Key {
    Key::new(0, kind::TRIM, ino.0)
}

/// Returns the first records of the object without its inode value, at most `limit`; extents with
/// their value.
fn first_records(view: View<'_>, ino: Ino, limit: u64) -> Result<Vec<(Key, Option<Extent>)>> {
    let mut found = Vec::new();
    view.scan(Key::new(ino.0, kind::INODE, 1), Key::new(ino.0 + 1, 0, 0), &mut |key, value| {
        let extent = if key.kind == kind::EXTENT { Some(Extent::decode(value)?) } else { None };
        found.push((key, extent));
        Ok(if found.len() as u64 >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(found)
}

fn remove_records(op: &mut Operation<'_>, records: &[(Key, Option<Extent>)]) -> Result<()> {
    for (key, extent) in records {
        op.remove(*key)?;
        if let Some(extent) = extent {
            extents::note_stale_if_packed(op, key.sub, extent);
            op.release(&extent.page, extent.born)?;
        }
    }
    Ok(())
}

/// Removes an inode in the operation that dropped its last link. A small inode that is not open is
/// deleted at once: the result is true and, once the operation is published, the caller discards
/// its dirty data. Otherwise it becomes an orphan and the result is false; the caller queues it
/// unless it is open.
pub(super) fn remove_unlinked(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue, open: bool) -> Result<bool> {
    if !open {
        let records = first_records(op.view(), ino, STEP + 1)?;
        if records.len() as u64 <= STEP {
            remove_records(op, &records)?;
            op.remove(inode::key(ino))?;
            if inode.trim != NO_TRIM {
                op.remove(trim_key(ino))?;
            }
            op.inode_gone();
            return Ok(true);
        }
    }
    op.insert(orphan_key(ino), &[])?;
    Ok(false)
}

/// Frees up to `STEP` extents from the trim offset on and advances the offset past them.
fn trim_step(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue) -> Result<()> {
    let mut found = Vec::new();
    op.view().scan(extents::key(ino, inode.trim), extents::end_key(ino), &mut |key, value| {
        found.push((key, Some(Extent::decode(value)?)));
        Ok(if found.len() as u64 > STEP { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    let next = found.get(STEP as usize).map(|(key, _)| key.sub);
    found.truncate(STEP as usize);
    remove_records(op, &found)?;
    inode.trim = next.unwrap_or(NO_TRIM);
    if next.is_none() {
        op.remove(trim_key(ino))?;
    }
    inode::store(op, ino, inode)
}

/// Returns whether an orphan record is plausible: an inode with names, or the root, is never
/// reclaimed because of a forged record.
fn is_unlinked(ino: Ino, inode: Option<&InodeValue>) -> bool {
    ino != ROOT_INO && ino.0 <= MAX_INO && inode.is_none_or(|inode| inode.links == 0)
}

/// Runs one step for an orphan; returns whether it is deleted.
fn orphan_step(op: &mut Operation<'_>, ino: Ino) -> Result<bool> {
    let Some(mut inode) = inode::find(op.view(), ino)? else {
        op.remove(orphan_key(ino))?;
        return Ok(true);
    };
    let mut records = first_records(op.view(), ino, STEP + 1)?;
    let all = records.len() as u64 <= STEP;
    records.truncate(STEP as usize);
    remove_records(op, &records)?;
    if all {
        op.remove(inode::key(ino))?;
        op.remove(orphan_key(ino))?;
        op.remove(trim_key(ino))?;
        op.inode_gone();
    } else if inode.trim != 0 {
        // The rest is hidden, so the inode stays consistent with its extents between the steps.
        inode.size = 0;
        inode.bytes = 0;
        inode.trim = 0;
        op.drop_staged(ino, 0..u64::MAX);
        op.insert(trim_key(ino), &[])?;
        inode::store(op, ino, &inode)?;
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A purge promises that what was deleted before is gone, also what another thread just reclaims.
    #[test]
    fn the_steps_of_other_threads_are_waited_for() {
        let queue = ReclaimQueue::default();
        let (one, other) = (Ino(5), Ino(6));
        queue.state.lock().waiting.extend([one, other]);
        let (first, second) = (queue.dequeue_inode(one).unwrap(), queue.dequeue_inode(one));
        assert!(second.is_none());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| queue.dequeue_after_steps(one).map(|taken| taken.ino));
            assert!(queue.dequeue_after_steps(other).is_some(), "those of other inodes are not waited for");
            // What is left of the work is queued before the step ends.
            queue.state.lock().waiting.insert(one);
            drop(first);
            assert_eq!(waiting.join().unwrap(), Some(one));
        });
        assert!(queue.dequeue_after_steps(one).is_none() && queue.state.lock().in_step.is_empty());
    }

    #[test]
    fn a_retired_inode_cannot_be_opened_and_an_open_one_not_retired() {
        let handles = OpenHandles::default();
        assert!(handles.open(Ino(5)) && handles.open(Ino(5)));
        assert!(!handles.retire(Ino(5)));
        assert!(!handles.release(Ino(5)));
        assert!(handles.is_open(Ino(5)));
        assert!(handles.release(Ino(5)));
        assert!(!handles.release(Ino(5)) && !handles.is_open(Ino(5)));
        assert!(handles.retire(Ino(5)));
        assert!(!handles.open(Ino(5)) && !handles.is_open(Ino(5)));
        handles.revive(Ino(5));
        assert!(handles.open(Ino(5)));
    }
}
