//! Writes a frozen transaction with its record, and tells the allocator when both are durable.

use std::sync::Arc;

use super::chain::{Chain, Purpose};
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
}

impl RecordWriter {
    /// Everything between the freeze and the acknowledgement. Any failure latches, for the next transaction is built on this one. Only a
    /// commit without changes, on which nothing is built, may be refused for want of space.
    pub(super) fn write(&self, purpose: Purpose, chain: &mut Chain, frozen: Frozen) -> Result<()> {
        let generation = frozen.generation;
        let written = self.try_write(purpose, chain, frozen);
        let refused = chain.refused == Some(generation);
        written.map_err(|error| match error {
            Error::Latched(_) => error,
            Error::NoSpace(_) if refused => error,
            error => self.pages.medium.pager.latch().set("committing", error),
        })
    }

    fn try_write(&self, purpose: Purpose, chain: &mut Chain, frozen: Frozen) -> Result<()> {
        let Frozen { state, generation, mut allocated, mut freed, superseded, lists: mut promised, empty, with_staged } =
            frozen;
        let ReservedPages { allocator, medium } = &self.pages;
        let (pager, store) = (&medium.pager, &medium.store);
        pager.check_host()?;
        let mut roots = self.write_trees(&state.trees, generation, &mut allocated)?;
        freed.extend(lists::pages_of(&superseded)?);
        // Nobody but readers of older versions asks for them again.
        superseded.iter().filter_map(|node| node.stored.get()).for_each(|pointer| store.forget(pointer));
        drop(superseded);

        let session_first = chain.session_first.unwrap_or(generation);
        let mut next =
            Chain { previous_session: None, refused: None, session_first: Some(session_first), ..chain.clone() };
        let mut checkpoint = Checkpoint::write_if_due(&self.pages, purpose, chain, generation, empty)?;
        roots[TreeId::Space] = match &mut checkpoint {
            Some(made) => {
                // Its nodes may be what makes the lists too long for the record.
                promised += made.promised;
                allocated.append(&mut made.allocated);
                freed.append(&mut made.freed);
                freed.append(&mut next.list_pages);
                next.checkpoint = generation;
                next.force_checkpoint = false;
                made.root
            }
            None => self.pages.flush_tree(&allocator.tree(), TreeId::Space, generation, 0, &mut allocated)?,
        };
        if next.checkpoint == Generation(0) && !next.force_checkpoint {
            // The first commit of a volume: no page was there before.
            next.checkpoint = generation;
        }
        // STORAGE-4: record and pages are there together, or neither is.
        let together = pager.storage().ordered();
        let mut record = CommitRecord {
            generation,
            two_barrier: together,
            previous_tag: chain.tag,
            session_first,
            closed: purpose == Purpose::Close,
            roots,
            used_blocks: self.used_with(&allocated, &freed),
            checkpoint: next.told_checkpoint(generation),
            pending: chain.log.pending(with_staged),
            allocated,
            freed,
            ..self.record_of(&state)
        };
        // TXN-2
        let (allocated, freed) = if record.fits() {
            if record.closed && !together {
                pager.barrier()?;
            }
            (record.allocated.iter().map(|(run, _)| *run).collect(), record.freed.clone())
        } else {
            let written = lists::write_lists(&self.pages, &mut record, &mut next, &mut promised)?;
            if !together {
                pager.barrier()?;
            }
            written
        };
        // TXN-3: only one leader, and it returns after its last barrier.
        next.tag = match pager.write_record(&record) {
            Err(Error::NoSpace(reason)) if empty => {
                // All pages that it brought in are the checkpoint's.
                let regions = checkpoint.map(|made| made.regions).unwrap_or_default();
                allocator.undo_checkpoint(regions, allocated, promised)?;
                chain.refused = Some(generation);
                return Err(Error::NoSpace(reason));
            }
            written => written?,
        };
        next.generation = generation;
        let may_log = pager.cipher().has_log() && !record.closed;
        next.log = chain.log.after(generation, next.tag, record.pending, may_log);
        pager.barrier()?;
        allocator.committed(record, allocated, freed, state.sequence, promised);
        if let Some(made) = checkpoint {
            allocator.end_checkpoint(made.tree);
        }
        *chain = next;
        // Or it would hold what older readers let go.
        drop(state);
        allocator.release_waiting();
        Ok(())
    }

    /// Every tree but that of the space map.
    fn write_trees(&self, trees: &Trees, generation: Generation, allocated: &mut Vec<(Run, Tag)>) -> Result<Roots> {
        let mut roots = Roots::default();
        let before = allocated.len();
        for (tree, id) in trees.each() {
            roots[id] = self.pages.flush_tree(tree, id, generation, 1, allocated)?;
        }
        self.writer.nodes_written((allocated.len() - before) as i64);
        Ok(roots)
    }

    fn used_with(&self, allocated: &[(Run, Tag)], freed: &[Run]) -> u64 {
        // The newest record may lie about it: only a holder of the key can make one, and that must not end the process.
        let used =
            allocated.iter().fold(self.pages.allocator.used_blocks(), |sum, (run, _)| sum.saturating_add(run.blocks));
        freed.iter().fold(used, |sum, run| sum.saturating_sub(run.blocks))
    }

    /// What a record says whatever the commit did.
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
