//! A set of staged files on its way into extents: written once, named by exactly one published operation.
//!
//! # Invariants
//! W1  A batch moves `Writing` -> `Written` -> `Applied` -> `Done`. When the operation that applied it was not published, whoever next
//!     lands it under the writers' lock sees that and applies it again; so a failed operation loses nothing.
//! W2  Whether the operation was published is read from the tree and from nothing else: a page is named by one batch only, so a file of
//!     the batch that still exists shows the batch's extent if and only if the operation was published. Nobody changes the extents of
//!     a file before all its older batches are `Done`, except by removing its inode whole.
//! W3  `Writing` never waits for the writers' lock. So the flusher, which holds it, may wait for `Written`.

use std::collections::{HashMap, HashSet};

use parking_lot::{Condvar, Mutex};

use super::{extents, inode};
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, Pointer};
use crate::txn::{Operation, View, Volume, WrittenPiece};

/// What write-out made of one file's layer.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) ino: Ino,
    /// First offset behind the layer: the least size of the file afterwards.
    pub(crate) end: u64,
    /// The whole file's content when it goes into the tree itself; then there are no pieces.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) pieces: Vec<WrittenPiece>,
    /// Extents that the pieces will cut or replace.
    pub(crate) cuts: u64,
    /// A piece covers what was a hole: the file gets more blocks than its staged data said.
    pub(crate) fills: bool,
    /// The file was removed before the batch was applied.
    pub(crate) gone: bool,
}

impl Plan {
    /// Of a layer that ends before `end`; nothing of it is written yet.
    pub(crate) fn new(ino: Ino, end: u64) -> Plan {
        Plan { ino, end, inline: None, pieces: Vec::new(), cuts: 0, fills: false, gone: false }
    }

    /// Upper bound of the records that applying it changes: inode and inline data beside the extents.
    pub(crate) fn records(&self) -> u64 {
        2 + self.pieces.len() as u64 * extents::RECORDS_PER_PIECE + self.cuts * extents::RECORDS_PER_CUT
    }
}

/// Where a batch is on its way.
enum Step {
    Writing,
    Written(Vec<Plan>),
    Applied(Vec<Plan>),
    Done,
    /// Nothing of it was named by an operation; its layers went back to where they came from. The error is for who waited for it.
    Failed(Error),
}

/// See the invariants above.
pub(crate) struct Batch {
    step: Mutex<Step>,
    changed: Condvar,
}

impl Batch {
    pub(crate) fn new() -> Batch {
        Batch { step: Mutex::new(Step::Writing), changed: Condvar::new() }
    }

    pub(crate) fn written(&self, plans: Vec<Plan>) {
        *self.step.lock() = Step::Written(plans);
        self.changed.notify_all();
    }

    pub(crate) fn failed(&self, error: &Error) {
        *self.step.lock() = Step::Failed(error.again());
        self.changed.notify_all();
    }

    /// Whether an operation that named the batch was published in `view` or before.
    /// Readers ask too, so this does not wait for whoever is applying it: that is "not yet".
    pub(crate) fn is_done(&self, volume: &Volume, view: View<'_>) -> Result<bool> {
        let Some(mut step) = self.step.try_lock() else { return Ok(false) };
        match &*step {
            Step::Done => Ok(true),
            Step::Applied(plans) => {
                if !published(plans, view)? {
                    return Ok(false);
                }
                abandon_unnamed(volume, plans);
                *step = Step::Done;
                Ok(true)
            }
            Step::Writing | Step::Written(_) | Step::Failed(_) => Ok(false),
        }
    }

    /// Names the batch's pages in `op` unless a published operation already did; waits while it is being written (W3).
    /// Answers whether there is nothing more to do with it.
    pub(crate) fn land(&self, volume: &Volume, op: &mut Operation<'_>) -> Result<bool> {
        let mut step = self.step.lock();
        while matches!(&*step, Step::Writing) {
            self.changed.wait(&mut step);
        }
        let mut plans = match &*step {
            Step::Done | Step::Failed(_) => return Ok(true),
            Step::Applied(plans) if published(plans, op.view())? => {
                abandon_unnamed(volume, plans);
                *step = Step::Done;
                return Ok(true);
            }
            Step::Applied(plans) | Step::Written(plans) => plans.clone(),
            // The loop above ends only when the step is another one.
            Step::Writing => return Ok(false),
        };
        apply(op, &mut plans)?;
        if plans.iter().all(|plan| plan.gone) {
            // No operation names the pages, and none ever will.
            abandon_unnamed(volume, &plans);
            *step = Step::Done;
            return Ok(true);
        }
        *step = Step::Applied(plans);
        Ok(false)
    }

    /// Why it could not be written, if so.
    pub(crate) fn failure(&self) -> Option<Error> {
        match &*self.step.lock() {
            Step::Failed(error) => Some(error.again()),
            _ => None,
        }
    }

    /// Nothing is left to do with it.
    pub(crate) fn is_over(&self) -> bool {
        matches!(&*self.step.lock(), Step::Done | Step::Failed(_))
    }
}

/// The inode, or None when it is gone.
pub(crate) fn existing(view: View<'_>, ino: Ino) -> Result<Option<InodeValue>> {
    match inode::load(view, ino) {
        Ok(value) => Ok(Some(value)),
        Err(Error::Stale | Error::NotFound) => Ok(None),
        Err(error) => Err(error),
    }
}

/// W2. Batches without pages, or whose files with pages are all gone, are published when the tree says what they would have said.
/// (Pages of files that were removed after a failed publication stay allocated in memory until the archive is closed; no record names them.)
fn published(plans: &[Plan], view: View<'_>) -> Result<bool> {
    for plan in plans {
        if let Some(piece) = plan.pieces.first()
            && existing(view, plan.ino)?.is_some()
        {
            return names(view, piece);
        }
    }
    for plan in plans {
        let Some(value) = &plan.inline else { continue };
        if let Some(inode) = existing(view, plan.ino)?
            && (inode.size < plan.end || extents::inline(view, plan.ino, &inode)?.as_ref() != Some(value))
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Whether the extent at the piece's offset is the piece.
pub(crate) fn names(view: View<'_>, piece: &WrittenPiece) -> Result<bool> {
    let found = extents::overlapping(view, piece.ino, piece.offset..piece.offset + 1, 1)?;
    Ok(found.first().is_some_and(|mapped| mapped.extent.page == piece.page))
}

/// Gives back the pages that only removed files would have named.
fn abandon_unnamed(volume: &Volume, plans: &[Plan]) {
    let named: HashSet<u64> =
        plans.iter().filter(|plan| !plan.gone).flat_map(|plan| &plan.pieces).map(|p| p.page.run.address).collect();
    let unnamed: Vec<WrittenPiece> = plans
        .iter()
        .filter(|plan| plan.gone)
        .flat_map(|plan| plan.pieces.iter().copied())
        .filter(|piece| !named.contains(&piece.page.run.address))
        .collect();
    if !unnamed.is_empty() {
        volume.abandon(&unnamed);
    }
}

fn apply(op: &mut Operation<'_>, plans: &mut [Plan]) -> Result<()> {
    let mut adopted: HashMap<u64, (Pointer, u32)> = HashMap::new();
    let mut inodes = Vec::with_capacity(plans.len());
    for plan in plans.iter_mut() {
        let inode = existing(op.view(), plan.ino)?;
        plan.gone = inode.is_none();
        inodes.push(inode);
        for piece in plan.pieces.iter().filter(|_| !plan.gone) {
            adopted.entry(piece.page.run.address).or_insert((piece.page, 0)).1 += 1;
        }
    }
    for (page, extents) in adopted.values() {
        op.adopt(page, *extents)?;
    }
    // What was removed since it was packed lies on the pages of the others.
    for piece in plans.iter().filter(|plan| plan.gone).flat_map(|plan| &plan.pieces) {
        if adopted.contains_key(&piece.page.run.address) {
            op.note_partly(&piece.page);
        }
    }
    for (plan, inode) in plans.iter().zip(inodes) {
        let Some(mut inode) = inode else { continue };
        if let Some(value) = &plan.inline {
            extents::remove_range(op, plan.ino, &mut inode, 0..u64::MAX)?;
            extents::set_inline(op, plan.ino, &mut inode, value)?;
        } else {
            // The planner put it under the layer.
            extents::set_inline(op, plan.ino, &mut inode, &[])?;
            extents::replace(op, &mut inode, &plan.pieces)?;
        }
        inode.size = inode.size.max(plan.end);
        inode::store(op, plan.ino, &inode)?;
    }
    Ok(())
}
