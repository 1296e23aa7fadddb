//! Writes a frozen transaction: nodes, sometimes a checkpoint, lists, and the record; notifies the
//! allocator when all are durable. Also the tail of the chain of records, passed from leader to
//! leader.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::btree::{Edits, Node, Tree};
use crate::error::{Error, Result};
use crate::format::log::LogMark;
use crate::format::page::PageKind;
use crate::format::record::{CommitRecord, DeltaList, Root, Roots};
use crate::format::space;
use crate::format::values::HistoryValue;
use crate::format::{Generation, Key, LOG, Run, SessionId, Tag, TreeId, kind};
use crate::frame;
use crate::pager::Pager;
use crate::txn::allocator::{Allocator, Regions};
use crate::txn::state::{State, Trees, VolumeContext};
use crate::txn::writer::{Frozen, LIST_PAGE_ENTRIES, Writer};

/// A checkpoint is due after this many commits; the ring holds 64, recovery may need one more than
/// this many.
const EVERY: u64 = 24;

pub(super) struct RecordWriter {
    pub(super) allocator: Arc<Allocator>,
    pub(super) medium: Arc<VolumeContext>,
    pub(super) writer: Arc<Writer>,
    pub(super) session: SessionId,
    pub(super) header_sequence: u64,
    /// TXN-9
    pub(super) deferred: Mutex<Option<DeferredCommit>>,
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
    /// transaction is built on this one; for want of space it is left to [`Self::finish_deferred`],
    /// unless it was without changes, so that nothing is built on it.
    pub(super) fn write(&self, purpose: CommitReason, chain: &mut CommitTail, frozen: Frozen) -> Result<()> {
        debug_assert!(self.deferred.lock().is_none(), "a commit before this one is not finished");
        self.attempt(purpose, chain, DeferredCommit { frozen, unwritten: None, is_logged: false })
    }

    /// Goes on with the commit that the host had no room for, which comes before every other one
    /// (TXN-9). It writes no checkpoint. Errors: `NoSpace` when there is no space yet; then nothing
    /// was lost.
    pub(super) fn finish_deferred(&self, chain: &mut CommitTail) -> Result<()> {
        let deferred = self.deferred.lock().take();
        deferred.map_or(Ok(()), |deferred| self.attempt(CommitReason::Truncate, chain, deferred))
    }

    fn attempt(&self, purpose: CommitReason, chain: &mut CommitTail, mut commit: DeferredCommit) -> Result<()> {
        let generation = commit.frozen.generation;
        let sticky_error = self.medium.pager.sticky_error();
        let written = self.try_write(purpose, chain, &mut commit);
        let is_deferred = match &written {
            Err(Error::NoSpace(_)) if sticky_error.reason().is_none() => chain.unused_generation != Some(generation),
            _ => false,
        };
        self.writer.set_commit_deferred(is_deferred);
        match written {
            Ok(()) => {
                // Otherwise it would keep pages that older readers have released.
                drop(commit);
                self.allocator.release_pending_frees();
                Ok(())
            }
            Err(Error::NoSpace(reason)) if sticky_error.reason().is_none() => {
                if is_deferred {
                    if !std::mem::replace(&mut commit.is_logged, true) {
                        tracing::warn!("a commit waits for room on the host, and is tried again: {reason}");
                    }
                    *self.deferred.lock() = Some(commit);
                }
                Err(Error::NoSpace(reason))
            }
            Err(error @ Error::WriteFailed(_)) => Err(error),
            Err(error) => Err(sticky_error.record("committing", error)),
        }
    }

    fn try_write(&self, purpose: CommitReason, chain: &mut CommitTail, commit: &mut DeferredCommit) -> Result<()> {
        let DeferredCommit { frozen, unwritten, .. } = commit;
        let (generation, empty) = (frozen.generation, frozen.empty);
        let RecordWriter { allocator, medium, .. } = self;
        let (pager, store) = (&medium.pager, &medium.store);
        pager.check_identity()?;
        let mut roots = self.write_trees(&frozen.state.trees, generation, &mut frozen.allocated, unwritten)?;
        let (mut allocated, mut freed, mut promised) = (frozen.allocated.clone(), frozen.freed.clone(), frozen.lists);
        freed.extend(pages_of(&frozen.superseded)?);
        // Only readers of older versions use them again.
        frozen.superseded.iter().filter_map(|node| node.stored.get()).for_each(|pointer| store.forget(pointer));

        let session_first = chain.session_first.unwrap_or(generation);
        let mut next = CommitTail {
            previous_session: None,
            unused_generation: None,
            session_first: Some(session_first),
            ..chain.clone()
        };
        let checkpoint = Checkpoint::write_if_due(self, purpose, chain, generation, empty)?;
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
            None => self.flush_tree(&allocator.tree(), TreeId::Space, generation, 0, &mut allocated, &mut None)?,
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
            pending: frozen.pending,
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
                    chain.unused_generation = Some(generation);
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
        let pager = &self.medium.pager;
        let together = pager.storage().has_atomic_barrier();
        // TXN-2
        let listed = if fits {
            if record.closed && !together {
                pager.barrier()?;
            }
            (record.allocated.iter().map(|(run, _)| *run).collect(), record.freed.clone())
        } else {
            let written = self.write_lists(record, next, promised)?;
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
            roots[id] = self.flush_tree(tree, id, generation, 1, allocated, unwritten)?;
            Ok(())
        });
        self.writer.nodes_written((allocated.len() - before) as i64);
        written.map(|()| roots)
    }

    fn used_with(&self, allocated: &[(Run, Tag)], freed: &[Run]) -> u64 {
        // The newest record may lie about it: only a holder of the key can make one, and that must
        // not end the process.
        let used = allocated.iter().fold(self.allocator.used_blocks(), |sum, (run, _)| sum.saturating_add(run.blocks));
        freed.iter().fold(used, |sum, run| sum.saturating_sub(run.blocks))
    }

    fn record_of(&self, state: &State) -> CommitRecord {
        CommitRecord {
            session: self.session,
            header_sequence: self.header_sequence,
            time: self.medium.environment.now(),
            total_blocks: self.allocator.total(),
            ..state.counters.to_record()
        }
    }

    // ---- pages of the commit itself, nodes and lists, for which space is reserved ----

    /// Writes the nodes that are not stored yet, children first, each next to the one before it;
    /// they are added to `allocated`. The blocks of the first one that the host has no room for are
    /// left in `unwritten`: the next attempt begins with that node, and takes them (TXN-9).
    fn flush_tree(
        &self,
        tree: &Tree,
        id: TreeId,
        generation: Generation,
        from_reserved: u64,
        allocated: &mut Vec<(Run, Tag)>,
        unwritten: &mut Option<Run>,
    ) -> Result<Root> {
        tree.flush(&self.medium.store, &mut |level, encoded| {
            let page = frame::node_page(id as u8, level, encoded);
            let run = match unwritten.take().filter(|run| run.blocks == page.blocks()) {
                Some(run) => run,
                None => self.allocator.allocate_node(page.blocks(), from_reserved)?,
            };
            let sealed = self.medium.pager.seal(&page, run, generation)?;
            match self.medium.pager.write_page(&sealed) {
                Err(error @ Error::NoSpace(_)) => {
                    *unwritten = Some(run);
                    Err(error)
                }
                written => {
                    written?;
                    allocated.push((sealed.pointer.run, sealed.pointer.tag));
                    Ok(sealed.pointer)
                }
            }
        })
    }

    /// Moves the lists of a long commit into list pages, last first since each names the next;
    /// the record names the pages, also after a failure.
    fn write_lists(
        &self,
        record: &mut CommitRecord,
        next: &mut CommitTail,
        promised: &mut u64,
    ) -> Result<(Vec<Run>, Vec<Run>)> {
        let allocated: Vec<Run> = std::mem::take(&mut record.allocated).into_iter().map(|(run, _)| run).collect();
        let freed = std::mem::take(&mut record.freed);
        let of_allocated = |part: &[Run]| DeltaList { allocated: part.to_vec(), ..DeltaList::default() };
        let of_freed = |part: &[Run]| DeltaList { freed: part.to_vec(), ..DeltaList::default() };
        let lists = allocated.chunks(LIST_PAGE_ENTRIES).map(of_allocated);
        let mut lists: Vec<DeltaList> = lists.chain(freed.chunks(LIST_PAGE_ENTRIES).map(of_freed)).collect();
        while let Some(mut list) = lists.pop() {
            list.next = record.delta_list;
            let page = frame::delta_page(list.encode());
            let from_promised = (*promised).min(1);
            let run = self.allocator.allocate_node(page.blocks(), from_promised)?;
            let sealed = self.medium.pager.seal(&page, run, record.generation)?;
            let pointer = sealed.pointer;
            // Before the write, so that a partly written page is known.
            record.allocated.push((run, pointer.tag));
            *promised -= from_promised;
            self.medium.pager.write_page(&sealed)?;
            record.delta_list = pointer;
            record.used_blocks = record.used_blocks.saturating_add(pointer.run.blocks);
            next.list_pages.push(pointer.run);
        }
        record.two_barrier = true;
        let mut all = allocated;
        all.extend(record.allocated.iter().map(|(run, _)| *run));
        Ok((all, freed))
    }
}

// ---- checkpoint ----

/// A checkpoint that is written and that no record names yet: the space map written into its tree,
/// as a part of a commit that may always be left out.
///
/// ENOSPC must not latch, so a checkpoint takes only space that is free. One that the host refuses
/// all the same (copy-on-write, thin provisioning, quotas) is undone: no record names it yet, and
/// the checkpoint before it counts until another one is made (TXN-7).
struct Checkpoint {
    tree: Tree,
    root: Root,
    allocated: Vec<(Run, Tag)>,
    freed: Vec<Run>,
    /// Groups left of its promise.
    promised: u64,
    /// The regions that it wrote, which differ from the checkpoint before.
    regions: Regions,
}

impl Checkpoint {
    /// Writes a checkpoint if one is due and there is space for it. The checkpoint of a commit
    /// without changes (`empty`) must fit into the record, so that only the checkpoint has to be
    /// undone with the record.
    fn write_if_due(
        writer: &RecordWriter,
        purpose: CommitReason,
        chain: &CommitTail,
        generation: Generation,
        empty: bool,
    ) -> Result<Option<Checkpoint>> {
        let age = generation.0.saturating_sub(chain.checkpoint.0);
        let wanted = chain.force_checkpoint || age >= EVERY || !chain.list_pages.is_empty();
        if !wanted || matches!(purpose, CommitReason::Truncate | CommitReason::Close) {
            return Ok(None);
        }
        // A node of the old map that cannot be read is no reason to fail the commit.
        let left_out = |error: Error| match writer.medium.pager.sticky_error().reason() {
            Some(_) => Err(error),
            None => {
                if age.is_multiple_of(EVERY) {
                    tracing::warn!(%error, "the space map is not brought up to date: a part of it cannot be read");
                }
                Ok(None)
            }
        };
        let (promised, regions) = match writer.allocator.begin_checkpoint() {
            Ok(Some(begun)) => begun,
            Ok(None) => return Ok(None),
            Err(error) => return left_out(error),
        };
        let mut made = Checkpoint {
            tree: (*writer.allocator.tree()).clone(),
            root: Root::default(),
            allocated: Vec::new(),
            freed: Vec::new(),
            promised,
            regions,
        };
        let written = made.write(writer, generation);
        made.promised = promised.saturating_sub(made.allocated.len() as u64);
        let fits = CommitRecord::lists_fit(made.allocated.len(), made.freed.len() + chain.list_pages.len());
        match written {
            Ok(()) if !empty || fits => {
                made.tree.forget_written();
                Ok(Some(made))
            }
            written => {
                let left_out = written.map_or_else(left_out, |()| Ok(None))?;
                let taken = made.allocated.into_iter().map(|(run, _)| run).collect();
                writer.allocator.undo_checkpoint(made.regions, taken, made.promised)?;
                Ok(left_out)
            }
        }
    }

    /// Updates the space tree to the state after the previous commit (SPACE-4).
    fn write(&mut self, writer: &RecordWriter, generation: Generation) -> Result<()> {
        let mut edits = Edits::new(generation);
        for (number, bits) in &self.regions {
            let key = Key::new(*number, kind::SPACE, 0);
            if bits.iter().all(|word| *word == 0) {
                self.tree.remove(&writer.medium.store, &mut edits, key)?;
            } else {
                self.tree.insert(&writer.medium.store, &mut edits, key, &space::encode(bits))?;
            }
        }
        self.freed = pages_of(&edits.superseded)?;
        let mut unwritten = None;
        let flushed = writer.flush_tree(&self.tree, TreeId::Space, generation, 1, &mut self.allocated, &mut unwritten);
        // Pages that may be written in part are given back with the rest.
        self.allocated.extend(unwritten.map(|run| (run, Tag::default())));
        self.root = flushed?;
        Ok(())
    }
}

// ---- reading of page lists, and the chain of records ----

/// Reads the lists of a record, its list pages included.
pub(in crate::txn) fn read_lists(pager: &Pager, record: &CommitRecord) -> Result<(Vec<Run>, Vec<Run>, Vec<Run>)> {
    let mut allocated: Vec<Run> = record.allocated.iter().map(|(run, _)| *run).collect();
    let mut freed = record.freed.clone();
    let mut pages = Vec::new();
    let mut pointer = record.delta_list;
    // The record lists every list page, so a longer chain is damage.
    while !pointer.is_null() {
        if pages.len() >= record.allocated.len() {
            return Err(Error::damaged(format!("list pages of commit {} do not end", record.generation.0)));
        }
        let list = DeltaList::decode(pager.read_page(&pointer, PageKind::DeltaList)?.body())?;
        pages.push(pointer.run);
        allocated.extend(list.allocated);
        freed.extend(list.freed);
        pointer = list.next;
    }
    Ok((allocated, freed, pages))
}

/// Returns the pages of nodes that a transaction replaced. All are stored: they belong to earlier
/// commits, and commits do not overlap.
fn pages_of(nodes: &[Arc<Node>]) -> Result<Vec<Run>> {
    let pages: Option<_> = nodes.iter().map(|node| node.stored.get().map(|pointer| pointer.run)).collect();
    pages.ok_or_else(|| Error::damaged("a replaced node was never written"))
}

/// A checkpoint without space waits for deletions to free some. Until then the ring has all records
/// since the last checkpoint, also for a writer that falls back by one (specification 9.3: c is at
/// least g - 62). After that records name no checkpoint, and the next opening rebuilds the map.
const LONGEST_CHAIN: u64 = 62;

#[derive(Clone, Default)]
pub(in crate::txn) struct CommitTail {
    pub(in crate::txn) tag: Tag,
    pub(in crate::txn) generation: Generation,
    pub(in crate::txn) checkpoint: Generation,
    /// List pages of the records since the checkpoint.
    pub(in crate::txn) list_pages: Vec<Run>,
    /// First generation of this session, once it has committed.
    pub(in crate::txn) session_first: Option<Generation>,
    /// The space map was rebuilt, and no checkpoint has been written since.
    pub(in crate::txn) force_checkpoint: bool,
    /// First generation and history record of the previous session, written by the first commit of
    /// this one.
    pub(in crate::txn) previous_session: Option<(Generation, HistoryValue)>,
    /// Generation of an empty commit whose record the host refused for lack of space; the next
    /// empty commit reuses it.
    pub(in crate::txn) unused_generation: Option<Generation>,
    pub(in crate::txn) log: LogState,
    /// The first block of the log behind all that may hold entries.
    pub(in crate::txn) log_end: u64,
}

impl CommitTail {
    /// Returns the checkpoint that the record of `generation` names (TXN-7); 0 when no chain of
    /// records leads from one to it.
    pub(super) fn recorded_checkpoint(&self, generation: Generation) -> Generation {
        let broken = self.force_checkpoint || generation.0.saturating_sub(self.checkpoint.0) > LONGEST_CHAIN;
        if broken { Generation(0) } else { self.checkpoint }
    }
}

/// State of the log relative to the newest record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::txn) enum LogState {
    /// Nothing, and nothing may be written: there is no log, or its record is none of this session.
    #[default]
    Idle,
    /// The entries up to this place (LOG-3).
    Open(LogTail),
    /// The entries of an older record, which no record contains yet (LOG-4). `laid` is true when
    /// they are in the open transaction and the dirty data.
    Pending { mark: LogMark, laid: bool },
}

/// Position of the next log entry, and the predecessor that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::txn) struct LogTail {
    pub(in crate::txn) generation: Generation,
    pub(in crate::txn) record: Tag,
    pub(in crate::txn) block: u64,
    /// Number of the last entry, 0 before the first.
    pub(in crate::txn) number: u32,
    pub(in crate::txn) entry: Tag,
}

impl LogTail {
    fn mark(self) -> Option<LogMark> {
        let LogTail { generation, record, number, entry, .. } = self;
        (number > 0).then_some(LogMark { generation, record, number, entry })
    }
}

impl LogState {
    /// Returns the pending mark for a record written in this state, which contains all published
    /// changes and, `with_staged`, all staged data.
    pub(super) fn pending(self, with_staged: bool) -> Option<LogMark> {
        match self {
            LogState::Idle => None,
            LogState::Open(tail) => tail.mark().filter(|_| !with_staged),
            LogState::Pending { mark, laid } => Some(mark).filter(|_| !(laid && with_staged)),
        }
    }

    /// After the record of this generation and tag, that named `pending`.
    pub(super) fn after(self, generation: Generation, record: Tag, pending: Option<LogMark>, usable: bool) -> LogState {
        match (self, pending) {
            (LogState::Pending { laid, .. }, Some(mark)) => LogState::Pending { mark, laid },
            // The session that wrote the entries contains them already.
            (_, Some(mark)) => LogState::Pending { mark, laid: true },
            (_, None) if usable => {
                LogState::Open(LogTail { generation, record, block: LOG.0, number: 0, entry: Tag::default() })
            }
            (_, None) => LogState::Idle,
        }
    }

    /// The last entry that is durable and in no record, whichever record it extends.
    pub(super) fn last(self) -> Option<LogMark> {
        match self {
            LogState::Idle => None,
            LogState::Open(tail) => tail.mark(),
            LogState::Pending { mark, .. } => Some(mark),
        }
    }

    /// Blocks of entries that no record contains.
    pub(super) fn used_blocks(self) -> u64 {
        self.needed_to().unwrap_or(LOG.1) - LOG.0
    }

    /// The first block from which on nothing is needed; None while all of the log may be.
    pub(in crate::txn) fn needed_to(self) -> Option<u64> {
        match self {
            LogState::Idle => Some(LOG.0),
            LogState::Open(tail) => Some(tail.block),
            LogState::Pending { .. } => None,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::txn) enum CommitReason {
    /// When there is something to make durable; an entry of the log will do.
    Sync,
    /// When there is something to commit.
    Changes,
    /// Even when there is nothing: lets the blocks that the last commit freed go.
    FreeSpace,
    /// Like `FreeSpace` without a checkpoint. After the last erasing of free space nothing may be
    /// freed, and on a full host nothing but the record may be written.
    Truncate,
    /// The closed record of a clean end.
    Close,
}
