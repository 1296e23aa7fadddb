//! Writeback batch: dirty layers of several files, written once and referenced by exactly one
//! published operation.
//!
//! # Invariants
//! BATCH-1  A batch moves from `Writing` to `Written`. It is done when an operation that references
//!     it is published, which `txn::Publication` records. An operation that is not published
//!     changes nothing of that: the next caller that applies the batch under the writers' lock
//!     references it again. So a failed operation loses nothing.
//! BATCH-2  `Writing` never waits for the writers' lock. So the flusher, which holds it, may wait
//!     for `Written`.

use std::collections::HashSet;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::{extents, inode};
use crate::txn::{Operation, Publication, State, UnreferencedPages, WrittenPiece};

/// Pages written for one file's layer, and the change of the file that references them.
#[derive(Debug)]
pub(crate) struct FilePlan {
    pub(crate) ino: Ino,
    /// End of the layer: the minimum size of the file afterwards.
    pub(crate) end: u64,
    /// Content of the whole file if it is stored inline; then there are no pieces.
    pub(crate) inline: Option<Vec<u8>>,
    pub(crate) pieces: Vec<WrittenPiece>,
    /// Number of extents that the pieces will cut or replace.
    pub(crate) cuts: u64,
    /// A piece covers a former hole: the file gets more blocks than its dirty data counted.
    pub(crate) fills_holes: bool,
    /// The inode at the time of planning.
    inode: InodeValue,
}

impl FilePlan {
    /// Creates the plan of a layer that ends at `end`, with nothing written yet.
    pub(crate) fn new(ino: Ino, end: u64, inode: InodeValue) -> FilePlan {
        FilePlan { ino, end, inline: None, pieces: Vec::new(), cuts: 0, fills_holes: false, inode }
    }

    /// Upper bound of the records that applying it changes: inode and inline data in addition to
    /// the extents.
    pub(crate) fn records(&self) -> u64 {
        2 + self.pieces.len() as u64 * extents::RECORDS_PER_PIECE + self.cuts * extents::RECORDS_PER_CUT
    }
}

/// Progress of a batch.
enum BatchState {
    Writing,
    Written(Vec<FilePlan>, UnreferencedPages),
    /// No operation referenced the batch, and its layers were unsealed. Threads that wait for the
    /// batch get the error.
    Failed(Error),
}

/// Dirty layers written together (BATCH-1).
pub(crate) struct WritebackBatch {
    state: Mutex<BatchState>,
    changed: Condvar,
    publication: Publication,
}

impl WritebackBatch {
    pub(crate) fn new() -> WritebackBatch {
        WritebackBatch {
            state: Mutex::new(BatchState::Writing),
            changed: Condvar::new(),
            publication: Publication::default(),
        }
    }

    pub(crate) fn set_written(&self, plans: Vec<FilePlan>, pages: UnreferencedPages) {
        *self.state.lock() = BatchState::Written(plans, pages);
        self.changed.notify_all();
    }

    pub(crate) fn set_failed(&self, error: &Error) {
        *self.state.lock() = BatchState::Failed(error.clone());
        self.changed.notify_all();
    }

    /// Returns the publication of the operation that references the batch.
    pub(crate) fn publication(&self) -> &Publication {
        &self.publication
    }

    /// Returns whether the state includes the batch.
    pub(crate) fn is_in(&self, state: &State) -> bool {
        self.publication.is_in(state)
    }

    /// Waits until its pages are written or failed. A caller that is about to apply the batch waits
    /// here, without locks that others need and outside of an operation.
    pub(crate) fn await_pages(&self) {
        drop(self.wait_until_written());
    }

    fn wait_until_written(&self) -> MutexGuard<'_, BatchState> {
        let mut step = self.state.lock();
        while matches!(&*step, BatchState::Writing) {
            self.changed.wait(&mut step);
        }
        step
    }

    /// References the batch's pages in `op` unless a published operation already did; waits while
    /// it is being written (BATCH-2).
    pub(crate) fn apply(&self, op: &mut Operation<'_>) -> Result<()> {
        self.apply_with(op, |op, plan| inode::find(op.view(), plan.ino))
    }

    /// Like [`Self::apply`], in the operation in which the batch was planned, and which has not
    /// changed its files since.
    pub(crate) fn apply_as_planned(&self, op: &mut Operation<'_>) -> Result<()> {
        self.apply_with(op, |_, plan| Ok(Some(plan.inode)))
    }

    fn apply_with(
        &self,
        op: &mut Operation<'_>,
        inode_of: impl Fn(&Operation<'_>, &FilePlan) -> Result<Option<InodeValue>>,
    ) -> Result<()> {
        if self.publication.is_set() {
            return Ok(());
        }
        if let BatchState::Written(plans, pages) = &mut *self.wait_until_written() {
            let inodes = plans.iter().map(|plan| inode_of(op, plan)).collect::<Result<Vec<_>>>()?;
            apply_plans(op, plans, inodes, pages)?;
            // A log entry contains only the dirty data that is not in the trees.
            op.needs_commit();
            op.carry(&self.publication);
        }
        Ok(())
    }

    /// Returns the error of a failed batch.
    pub(crate) fn error(&self) -> Option<Error> {
        match &*self.state.lock() {
            BatchState::Failed(error) => Some(error.clone()),
            _ => None,
        }
    }

    /// Returns whether the batch is published or failed.
    pub(crate) fn is_finished(&self) -> bool {
        self.publication.is_set() || matches!(&*self.state.lock(), BatchState::Failed(_))
    }
}

/// References the pages of the files that still have an inode.
fn apply_plans(
    op: &mut Operation<'_>,
    plans: &[FilePlan],
    inodes: Vec<Option<InodeValue>>,
    pages: &mut UnreferencedPages,
) -> Result<()> {
    // Pages of files that were removed since are never referenced: inode numbers are not reused.
    let there: HashSet<Ino> =
        plans.iter().zip(&inodes).filter(|(_, inode)| inode.is_some()).map(|(plan, _)| plan.ino).collect();
    pages.name(op, |piece| there.contains(&piece.ino))?;
    for (plan, inode) in plans.iter().zip(inodes) {
        let Some(mut inode) = inode else { continue };
        if let Some(value) = &plan.inline {
            extents::remove_range(op, plan.ino, &mut inode, 0..u64::MAX)?;
            extents::set_inline(op, plan.ino, &mut inode, value)?;
        } else {
            // The planner merged the inline data into the layer.
            extents::set_inline(op, plan.ino, &mut inode, &[])?;
            extents::replace(op, &mut inode, &plan.pieces)?;
        }
        inode.size = inode.size.max(plan.end);
        inode::store(op, plan.ino, &inode)?;
    }
    Ok(())
}
