//! Frees unlinked and trimmed file content in bounded steps.

use std::collections::BTreeSet;
use std::ops::ControlFlow;

use parking_lot::{Mutex, MutexGuard};

use super::staging::StagedFile;
use super::{FileSystem, extents, inode};
use crate::error::Result;
use crate::format::values::{Extent, InodeValue, NO_TRIM};
use crate::format::{Ino, Key, MAX_INO, ROOT_INO, kind};
use crate::txn::{Operation, View};

/// Records of an object that one operation removes at most: about a hundred leaves, well under a tenth of a second.
pub(crate) const STEP: u64 = 512;

/// What an operation that calls `removed` has to count for it: each record, and for extents the reference records around it.
pub(crate) const REMOVED_RECORDS: u64 = STEP * 5;

/// Numbers of inodes that have something to be reclaimed.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Mutex<BTreeSet<Ino>>,
    /// The number after which the next one is taken, so that one that fails every time does not keep the others waiting.
    last: Mutex<Option<Ino>>,
}

impl Queue {
    fn take(&self) -> Option<Ino> {
        let mut last = self.last.lock();
        let mut waiting = self.waiting.lock();
        let next = waiting.iter().find(|ino| last.is_none_or(|last| **ino > last)).or(waiting.first()).copied();
        *last = next;
        next.filter(|ino| waiting.remove(ino))
    }
}

/// What became of an inode of the queue.
enum Step {
    Nothing,
    /// Somebody has its turn.
    Busy,
    More,
    Last,
}

fn orphan_key(ino: Ino) -> Key {
    Key::new(0, kind::ORPHAN, ino.0)
}

fn trim_key(ino: Ino) -> Key {
    Key::new(0, kind::TRIM, ino.0)
}

/// The first records of the object but its inode value, at most `limit`; extents with their value.
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
            extents::note_packed(op, key.sub, extent);
            op.release(&extent.page, extent.born)?;
        }
    }
    Ok(())
}

/// To be called when the last link went, in the same operation. A small inode that nobody has open goes at once: then the answer is true
/// and, once the operation is published, the caller calls `forget_staged`. Else it becomes an orphan and the answer is false; unless it
/// is open the caller then calls `queue_reclaim`.
pub(crate) fn removed(op: &mut Operation<'_>, ino: Ino, inode: &InodeValue, open: bool) -> Result<bool> {
    if !open {
        let records = first_records(op.view(), ino, STEP + 1)?;
        if records.len() as u64 <= STEP {
            remove_records(op, &records)?;
            op.remove(Key::new(ino.0, kind::INODE, 0))?;
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

/// Frees up to `STEP` extents from the trim offset on and moves it behind them.
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

/// Whether what an orphan record says can be true: what has names, and the root, is not taken to pieces for it, whoever wrote that.
fn is_nameless(ino: Ino, inode: Option<&InodeValue>) -> bool {
    ino != ROOT_INO && ino.0 <= MAX_INO && inode.is_none_or(|inode| inode.links == 0)
}

/// One step for an orphan; answers whether it is gone.
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
        op.remove(Key::new(ino.0, kind::INODE, 0))?;
        op.remove(orphan_key(ino))?;
        op.remove(trim_key(ino))?;
        op.inode_gone();
    } else if inode.trim != 0 {
        // What is left of it is hidden, so the inode stays true to its extents between the steps.
        inode.size = 0;
        inode.bytes = 0;
        inode.trim = 0;
        op.insert(trim_key(ino), &[])?;
        inode::store(op, ino, &inode)?;
    }
    Ok(all)
}

impl FileSystem {
    /// Has the inode looked at by the next `maintain` or `close`.
    pub(crate) fn queue_reclaim(&self, ino: Ino) {
        self.reclaim.waiting.lock().insert(ino);
    }

    /// A mount that ended without the last RELEASE leaves handles that nobody has: what was unlinked under them can go.
    pub(super) fn forget_handles(&self) -> Result<()> {
        self.handles.forget();
        self.queue_left_over()
    }

    /// Queues what was left over; none of it can be open.
    pub(super) fn queue_left_over(&self) -> Result<()> {
        let state = self.volume.state();
        let mut queue = self.reclaim.waiting.lock();
        let to = Key::new(0, kind::TRIM + 1, 0);
        self.volume.view(&state).scan(Key::new(0, kind::ORPHAN, 0), to, &mut |key, _| {
            queue.insert(Ino(key.sub));
            Ok(ControlFlow::Continue(()))
        })
    }

    /// One step for the next inode of the queue; answers whether the queue had any.
    pub(super) fn reclaim_step(&self) -> Result<bool> {
        let Some(ino) = self.reclaim.take() else { return Ok(false) };
        self.reclaim_queued(ino, |file| Some(file.turn.lock())).map(|_| true)
    }

    /// One step for the first inode of the queue that nobody is busy with; answers whether there was one. The caller may hold turns.
    pub(super) fn reclaim_for_room(&self) -> Result<bool> {
        let waiting = self.reclaim.waiting.lock().len();
        for _ in 0..waiting {
            let Some(ino) = self.reclaim.take() else { break };
            if self.reclaim_queued(ino, |file| file.turn.try_lock())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// One step for an inode that was taken out of the queue, and goes back to it when there is more to do; answers whether there was anything.
    fn reclaim_queued(&self, ino: Ino, turn: impl Fn(&StagedFile) -> Option<MutexGuard<'_, ()>>) -> Result<bool> {
        let step = self.reclaim_one(ino, turn);
        if !matches!(step, Ok(Step::Nothing | Step::Last)) {
            self.queue_reclaim(ino);
        }
        Ok(matches!(step?, Step::Last | Step::More))
    }

    pub(super) fn reclaim_pending(&self) -> bool {
        !self.reclaim.waiting.lock().is_empty()
    }

    fn reclaim_one(&self, ino: Ino, turn: impl Fn(&StagedFile) -> Option<MutexGuard<'_, ()>>) -> Result<Step> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::find(view, ino)?;
        let orphan = view.get(orphan_key(ino), |_| Ok(()))?.is_some() && is_nameless(ino, inode.as_ref());
        let trimmed = inode.is_some_and(|inode| inode.trim != NO_TRIM);
        drop(state);
        if orphan && !self.handles.is_open(ino) {
            return self.reclaim_orphan(ino, turn);
        }
        if trimmed && !orphan {
            return self.trim_until(ino, None).map(|done| if done { Step::Last } else { Step::More });
        }
        Ok(Step::Nothing)
    }

    fn reclaim_orphan(&self, ino: Ino, turn: impl Fn(&StagedFile) -> Option<MutexGuard<'_, ()>>) -> Result<Step> {
        let file = self.staging.entry(ino);
        let gone = {
            let Some(_turn) = turn(&file) else { return Ok(Step::Busy) };
            // A batch that landed between two steps would put extents where the first one said there are none.
            file.with(|content| content.discard());
            self.land_older(&file)?;
            // Nobody can stage more: there is neither a name nor a handle.
            self.volume.operate(REMOVED_RECORDS, true, |op| orphan_step(op, ino))?
        };
        self.staging.leave(file);
        if gone {
            self.forget_staged(ino);
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

    /// Frees what is hidden before `end`, so that it can be written to. The caller holds the turn.
    pub(super) fn complete_trim(&self, ino: Ino, end: u64) -> Result<()> {
        self.trim_until(ino, Some(end)).map(drop)
    }
}
