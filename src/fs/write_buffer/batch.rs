//! A set of staged files on its way into extents: written once, named by exactly one published operation.
//!
//! # Invariants
//! BATCH-1  A batch moves `Writing` -> `Written`, and is done when an operation that names it is published, which it is told (`txn::Publication`). An
//!     operation that is not published changes nothing of that: whoever next lands the batch under the writers' lock names it again. So a
//!     failed operation loses nothing.
//! BATCH-2  `Writing` never waits for the writers' lock. So the flusher, which holds it, may wait for `Written`.

use std::collections::HashSet;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::{extents, inode};
use crate::txn::{Operation, Publication, State, UnnamedPages, WrittenPiece};

/// What write-out made of one file's layer.
#[derive(Debug)]
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
    pub(crate) grows: bool,
    /// As it was planned for.
    inode: InodeValue,
}

impl Plan {
    /// Of a layer that ends before `end`; nothing of it is written yet.
    pub(crate) fn new(ino: Ino, end: u64, inode: InodeValue) -> Plan {
        Plan { ino, end, inline: None, pieces: Vec::new(), cuts: 0, grows: false, inode }
    }

    /// Upper bound of the records that applying it changes: inode and inline data beside the extents.
    pub(crate) fn records(&self) -> u64 {
        2 + self.pieces.len() as u64 * extents::RECORDS_PER_PIECE + self.cuts * extents::RECORDS_PER_CUT
    }
}

/// Where a batch is on its way.
enum Step {
    Writing,
    Written(Vec<Plan>, UnnamedPages),
    /// Nothing of it was named by an operation; its layers went back to where they came from. The error is for who waited for it.
    Failed(Error),
}

/// See the invariants above.
pub(crate) struct Batch {
    step: Mutex<Step>,
    changed: Condvar,
    publication: Publication,
}

impl Batch {
    pub(crate) fn new() -> Batch {
        Batch { step: Mutex::new(Step::Writing), changed: Condvar::new(), publication: Publication::default() }
    }

    pub(crate) fn written(&self, plans: Vec<Plan>, pages: UnnamedPages) {
        *self.step.lock() = Step::Written(plans, pages);
        self.changed.notify_all();
    }

    pub(crate) fn failed(&self, error: &Error) {
        *self.step.lock() = Step::Failed(error.clone());
        self.changed.notify_all();
    }

    /// Of the operation that names it.
    pub(crate) fn publication(&self) -> &Publication {
        &self.publication
    }

    /// Whether the state has what it names.
    pub(crate) fn is_in(&self, state: &State) -> bool {
        self.publication.is_in(state)
    }

    /// Returns when its pages are written or failed. Who is about to land it waits here, with nothing locked that others need, and not within an operation.
    pub(crate) fn await_pages(&self) {
        drop(self.step_after_writing());
    }

    fn step_after_writing(&self) -> MutexGuard<'_, Step> {
        let mut step = self.step.lock();
        while matches!(&*step, Step::Writing) {
            self.changed.wait(&mut step);
        }
        step
    }

    /// Names the batch's pages in `op` unless a published operation already did; waits while it is being written (BATCH-2).
    pub(crate) fn land(&self, op: &mut Operation<'_>) -> Result<()> {
        self.land_on(op, |op, plan| inode::find(op.view(), plan.ino))
    }

    /// As [`Self::land`] in the operation in which it was planned, and which has changed none of its files since.
    pub(crate) fn land_as_planned(&self, op: &mut Operation<'_>) -> Result<()> {
        self.land_on(op, |_, plan| Ok(Some(plan.inode)))
    }

    fn land_on(
        &self,
        op: &mut Operation<'_>,
        inode_of: impl Fn(&Operation<'_>, &Plan) -> Result<Option<InodeValue>>,
    ) -> Result<()> {
        if self.publication.is_set() {
            return Ok(());
        }
        if let Step::Written(plans, pages) = &mut *self.step_after_writing() {
            let inodes = plans.iter().map(|plan| inode_of(op, plan)).collect::<Result<Vec<_>>>()?;
            apply(op, plans, inodes, pages)?;
            // Of what is staged an entry of the log says only what is not in the trees.
            op.needs_commit();
            op.carry(&self.publication);
        }
        Ok(())
    }

    /// Why it could not be written, if so.
    pub(crate) fn failure(&self) -> Option<Error> {
        match &*self.step.lock() {
            Step::Failed(error) => Some(error.clone()),
            _ => None,
        }
    }

    /// Nothing is left to do with it.
    pub(crate) fn is_over(&self) -> bool {
        self.publication.is_set() || matches!(&*self.step.lock(), Step::Failed(_))
    }
}

/// Names the pages of the files that are there, which have an inode.
fn apply(
    op: &mut Operation<'_>,
    plans: &[Plan],
    inodes: Vec<Option<InodeValue>>,
    pages: &mut UnnamedPages,
) -> Result<()> {
    // Nobody will ever name what is written of files that were removed since: numbers are not used again.
    let there: HashSet<Ino> =
        plans.iter().zip(&inodes).filter(|(_, inode)| inode.is_some()).map(|(plan, _)| plan.ino).collect();
    pages.name(op, |piece| there.contains(&piece.ino))?;
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
