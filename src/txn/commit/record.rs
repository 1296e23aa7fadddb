//! Writes a frozen transaction with its record, and notifies the allocator when both are durable.

use std::sync::Arc;

use parking_lot::Mutex;

use super::chain_tail::{CommitReason, CommitTail};
use super::checkpoint::Checkpoint;
use super::lists;
use super::reserved::ReservedPages;
use crate::error::{Error, Result};
use crate::format::record::{CommitRecord, Roots};
use crate::format::{Generation, Run, SessionId, Tag, TreeId};
use crate::txn::state::{State, Trees};
use crate::txn::writer::{Frozen, Writer};

pub(super) struct RecordWriter {
    pub(super) pages: ReservedPages,
    pub(super) writer: Arc<Writer>,
    pub(super) session: SessionId,
    pub(super) header_sequence: u64,
    /// TXN-9
    pub(super) refused: Mutex<Option<DeferredCommit>>,
}

/// A commit for which the host had no space before its record was written; retried (TXN-9).
pub(super) struct DeferredCommit {
    /// With the pages of its trees that are written.
    frozen: Frozen,
    /// Blocks of the node that was not.
    unwritten: Option<Run>,
    /// The log has it.
    is_logged: bool,
}

impl RecordWriter {
    /// Everything between the freeze and the acknowledgement. A failure latches, for the next
    /// transaction is built on this one; for want of space it is left to [`Self::finish_refused`],
    /// unless it was without changes, so that nothing is built on it.
    pub(super) fn write(&self, purpose: CommitReason, chain: &mut CommitTail, frozen: Frozen) -> Result<()> {
        debug_assert!(self.refused.lock().is_none(), "a commit before this one is not finished");
        self.attempt(purpose, chain, DeferredCommit { frozen, unwritten: None, is_logged: false })
    }

    /// Goes on with the commit that the host had no room for, which comes before every other one
    /// (TXN-9). It writes no checkpoint.
    ///
    /// # Errors
    /// `NoSpace` when there is no space yet; then nothing was lost.
    pub(super) fn finish_refused(&self, chain: &mut CommitTail) -> Result<()> {
        let refused = self.refused.lock().take();
        refused.map_or(Ok(()), |refused| self.attempt(CommitReason::Truncate, chain, refused))
    }

    fn attempt(&self, purpose: CommitReason, chain: &mut CommitTail, mut refused: DeferredCommit) -> Result<()> {
        let generation = refused.frozen.generation;
        let sticky_error = self.pages.medium.pager.sticky_error();
        let written = self.try_write(purpose, chain, &mut refused);
        let is_held = match &written {
            Err(Error::NoSpace(_)) if sticky_error.reason().is_none() => chain.refused != Some(generation),
            _ => false,
        };
        self.writer.set_refused(is_held);
        match written {
            Ok(()) => {
                // Otherwise it would keep pages that older readers have released.
                drop(refused);
                self.pages.allocator.release_pending_frees();
                Ok(())
            }
            Err(Error::NoSpace(reason)) if sticky_error.reason().is_none() => {
                if is_held {
                    if !std::mem::replace(&mut refused.is_logged, true) {
                        tracing::warn!("a commit waits for room on the host, and is tried again: {reason}");
                    }
                    *self.refused.lock() = Some(refused);
                }
                Err(Error::NoSpace(reason))
            }
            Err(error @ Error::WriteFailed(_)) => Err(error),
            Err(error) => Err(sticky_error.record("committing", error)),
        }
    }

    fn try_write(&self, purpose: CommitReason, chain: &mut CommitTail, refused: &mut DeferredCommit) -> Result<()> {
        let DeferredCommit { frozen, unwritten, .. } = refused;
        let (generation, empty) = (frozen.generation, frozen.empty);
        let ReservedPages { allocator, medium } = &self.pages;
        let (pager, store) = (&medium.pager, &medium.store);
        pager.check_identity()?;
        let mut roots = self.write_trees(&frozen.state.trees, generation, &mut frozen.allocated, unwritten)?;
        let (mut allocated, mut freed, mut promised) = (frozen.allocated.clone(), frozen.freed.clone(), frozen.lists);
        freed.extend(lists::pages_of(&frozen.superseded)?);
        // Only readers of older versions use them again.
        frozen.superseded.iter().filter_map(|node| node.stored.get()).for_each(|pointer| store.forget(pointer));

        let session_first = chain.session_first.unwrap_or(generation);
        let mut next =
            CommitTail { previous_session: None, refused: None, session_first: Some(session_first), ..chain.clone() };
        let checkpoint = Checkpoint::write_if_due(&self.pages, purpose, chain, generation, empty)?;
        roots[TreeId::Space] = match &checkpoint {
            Some(made) => {
                // The checkpoint's nodes may make the lists too long for the record.
                promised += made.promised;
                allocated.extend_from_slice(&made.allocated);
                freed.extend_from_slice(&made.freed);
                freed.append(&mut next.list_pages);
                next.checkpoint = generation;
                next.force_checkpoint = false;
                made.root
            }
            None => {
                self.pages.flush_tree(&allocator.tree(), TreeId::Space, generation, 0, &mut allocated, &mut None)?
            }
        };
        if next.checkpoint == Generation(0) && !next.force_checkpoint {
            // The first commit of a volume: no page was there before.
            next.checkpoint = generation;
        }
        let mut record = CommitRecord {
            generation,
            // STORAGE-4: record and pages are there together, or neither is.
            two_barrier: pager.storage().has_atomic_barrier(),
            previous_tag: chain.tag,
            session_first,
            closed: purpose == CommitReason::Close,
            roots,
            used_blocks: self.used_with(&allocated, &freed),
            checkpoint: next.recorded_checkpoint(generation),
            pending: chain.log.pending(frozen.with_staged),
            allocated,
            freed,
            ..self.record_of(&frozen.state)
        };
        let fits = record.fits();
        let (allocated, freed) = match self.write_record(&mut record, &mut next, &mut promised, fits) {
            Err(Error::NoSpace(reason)) if pager.sticky_error().reason().is_none() => {
                // No record names the checkpoint and the list pages: they are given back. Pages of
                // the trees stay.
                let lists: &[(Run, Tag)] = if fits { &[] } else { &record.allocated };
                let made = checkpoint.as_ref().map_or(&[][..], |made| made.allocated.as_slice());
                let pages = lists.iter().chain(made).map(|(run, _)| *run).collect();
                allocator.undo_checkpoint(checkpoint.map(|made| made.regions).unwrap_or_default(), pages, promised)?;
                if empty {
                    chain.refused = Some(generation);
                } else if !allocator.promise(frozen.lists) {
                    frozen.lists = 0;
                }
                return Err(Error::NoSpace(reason));
            }
            written => written?,
        };
        next.generation = generation;
        let may_log = pager.cipher().has_log() && !record.closed;
        next.log = chain.log.after(generation, next.tag, record.pending, may_log);
        pager.barrier()?;
        allocator.committed(record, allocated, freed, frozen.state.sequence, promised);
        if let Some(made) = checkpoint {
            allocator.end_checkpoint(made.tree);
        }
        *chain = next;
        Ok(())
    }

    /// Writes the record, and before it the lists that it has no place for. Returns the allocated
    /// and the freed blocks of the commit.
    fn write_record(
        &self,
        record: &mut CommitRecord,
        next: &mut CommitTail,
        promised: &mut u64,
        fits: bool,
    ) -> Result<(Vec<Run>, Vec<Run>)> {
        let pager = &self.pages.medium.pager;
        let together = pager.storage().has_atomic_barrier();
        // TXN-2
        let listed = if fits {
            if record.closed && !together {
                pager.barrier()?;
            }
            (record.allocated.iter().map(|(run, _)| *run).collect(), record.freed.clone())
        } else {
            let written = lists::write_lists(&self.pages, record, next, promised)?;
            if !together {
                pager.barrier()?;
            }
            written
        };
        // TXN-3: only one leader, and it returns after its last barrier.
        next.tag = pager.write_record(record)?;
        Ok(listed)
    }

    /// Writes every tree except the space map.
    fn write_trees(
        &self,
        trees: &Trees,
        generation: Generation,
        allocated: &mut Vec<(Run, Tag)>,
        unwritten: &mut Option<Run>,
    ) -> Result<Roots> {
        let mut roots = Roots::default();
        let before = allocated.len();
        let written = trees.each().into_iter().try_for_each(|(tree, id)| {
            roots[id] = self.pages.flush_tree(tree, id, generation, 1, allocated, unwritten)?;
            Ok(())
        });
        self.writer.nodes_written((allocated.len() - before) as i64);
        written.map(|()| roots)
    }

    fn used_with(&self, allocated: &[(Run, Tag)], freed: &[Run]) -> u64 {
        // The newest record may lie about it: only a holder of the key can make one, and that must
        // not end the process.
        let used =
            allocated.iter().fold(self.pages.allocator.used_blocks(), |sum, (run, _)| sum.saturating_add(run.blocks));
        freed.iter().fold(used, |sum, run| sum.saturating_sub(run.blocks))
    }

    /// Returns the record fields that do not depend on the commit's pages.
    fn record_of(&self, state: &State) -> CommitRecord {
        CommitRecord {
            session: self.session,
            header_sequence: self.header_sequence,
            time: self.pages.medium.environment.now(),
            total_blocks: self.pages.allocator.total(),
            next_ino: state.counters.next_ino,
            inodes: state.counters.inodes,
            next_dead: state.counters.next_dead,
            next_snapshot: state.counters.next_snapshot,
            newest_snapshot: state.counters.newest_snapshot,
            newest_snapshot_id: state.counters.newest_snapshot_id,
            origin: state.counters.origin,
            ..CommitRecord::default()
        }
    }
}
