//! Makes the open transaction durable: one leader at a time, concurrent callers share its commit.
//!
//! The order of writes, and why it suffices:
//! 1. Under the writers' lock staged data moves into the transaction, which is then frozen; the next transaction opens.
//! 2. Nodes are written bottom-up, then (sometimes) the space map's checkpoint.
//! 3. When the lists fit into the record: record, one barrier. A crash before the barrier returns may leave a record whose pages are not all
//!    there; recovery opens each listed page and falls back to the record before, which T1 kept whole.
//!    Otherwise: list pages, barrier, record, barrier; the record is then only there when its pages are.
//! 4. Only after the last barrier: acknowledge, and let what the *previous* commit freed be reused (T1).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use super::Volume;
use super::gather::Gather;
use super::state::State;
use super::volume::Writer;
use crate::btree::{Node, Tree};
use crate::error::{Error, Result};
use crate::format::record::{CommitRecord, Root};
use crate::format::values::HistoryValue;
use crate::format::{Generation, Pointer, Run, Tag, TreeId};
use crate::frame::{self, PlainPage, SealedPage};

/// A checkpoint that has no room waits for deletions to make some. So long the ring has all records since the last one, also for a writer that
/// falls back by one (specification 9.3: c is at least g - 62); from then on records name no checkpoint, and the next opening makes the map anew.
const LONGEST_CHAIN: u64 = 62;

/// What the leader knows of the chain of records, and who waits for whom.
#[derive(Default)]
pub(super) struct CommitState {
    running: bool,
    /// Callers that wait for the commit in flight to end.
    waiting: u64,
    /// Number of commits begun and finished; a caller needs one that begins after its call.
    started: u64,
    finished: u64,
    /// Number of the last one that wrote a record.
    recorded: u64,
    /// The last commit that failed, with its reason.
    failed: Option<(u64, Error)>,
    /// Callers for which the next commit is needed.
    pub(super) joined: u64,
    pub(super) gather: Gather,
    pub(super) chain: Chain,
}

impl CommitState {
    /// A commit is in flight.
    pub(super) fn is_running(&self) -> bool {
        self.running
    }

    /// Whoever calls from now on needs a later commit. Answers the number of this one and how many it serves.
    fn start(&mut self) -> (u64, u64) {
        self.started += 1;
        (self.started, std::mem::take(&mut self.joined))
    }
}

/// The tail of the chain of durable records.
#[derive(Clone, Default)]
pub(super) struct Chain {
    pub(super) tag: Tag,
    pub(super) generation: Generation,
    pub(super) checkpoint: Generation,
    /// List pages of the records since the checkpoint.
    pub(super) list_pages: Vec<Run>,
    /// First generation of this session, once it has committed.
    pub(super) session_first: Option<Generation>,
    /// The space map was rebuilt, and no checkpoint has been written since.
    pub(super) force_checkpoint: bool,
    /// What the first commit of this session writes about the session before: its first generation and record.
    pub(super) previous_session: Option<(Generation, HistoryValue)>,
    /// The number of a commit without changes whose record the host refused for want of space; the next one without changes takes it.
    pub(super) refused: Option<Generation>,
}

impl Chain {
    /// T7: the checkpoint that the record of `generation` names, 0 when no chain of records leads from one to it.
    fn told_checkpoint(&self, generation: Generation) -> Generation {
        let broken = self.force_checkpoint || generation.0.saturating_sub(self.checkpoint.0) > LONGEST_CHAIN;
        if broken { Generation(0) } else { self.checkpoint }
    }
}

/// Why a commit is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// When there is something to commit.
    Changes,
    /// Even when there is nothing: lets the blocks that the last commit freed go.
    Drain,
    /// As `Drain` without a checkpoint: after free space was erased for the last time nothing may be freed, and on a host without room nothing be
    /// written but the record.
    Shorten,
    /// The closed record of a clean end.
    Close,
}

/// The number of the commit that a caller needs.
#[derive(Debug)]
#[must_use = "nobody else may lead the commit"]
pub(crate) struct WantedCommit(u64);

/// A transaction that takes no more operations.
pub(super) struct Frozen {
    pub(super) state: Arc<State>,
    pub(super) generation: Generation,
    pub(super) allocated: Vec<(Run, Tag)>,
    pub(super) freed: Vec<Run>,
    pub(super) superseded: Vec<Arc<Node>>,
    /// Groups promised to its list pages.
    pub(super) lists: u64,
    /// Nothing was changed since the commit before, so that its record is all there is to write.
    pub(super) empty: bool,
}

impl Volume {
    /// Returns when everything published (and staged, through the flusher) before the call is durable. Concurrent callers share commits.
    pub(crate) fn commit(&self) -> Result<Generation> {
        self.commit_for(Purpose::Changes)
    }

    pub(super) fn commit_for(&self, purpose: Purpose) -> Result<Generation> {
        let wanted = self.want_commit()?;
        self.wait_for_commit(wanted, purpose)
    }

    /// Counts a caller in: the commit that it needs begins after this. Somebody has to wait for it, or nobody leads it.
    ///
    /// # Errors
    /// `Latched`, `ReadOnly`.
    pub(crate) fn want_commit(&self) -> Result<WantedCommit> {
        self.check_writable()?;
        let mut state = self.commits.lock();
        // A commit that is running may have frozen already, so the next one is needed.
        let needed = state.started + 1;
        state.joined += 1;
        self.commit_joined.notify_one();
        Ok(WantedCommit(needed))
    }

    /// [`Self::commit`], by a caller that was counted in before.
    pub(crate) fn commit_wanted(&self, wanted: WantedCommit) -> Result<Generation> {
        self.wait_for_commit(wanted, Purpose::Changes)
    }

    /// Leads commits until the one that is wanted has ended, or waits for those who do.
    fn wait_for_commit(&self, WantedCommit(needed): WantedCommit, purpose: Purpose) -> Result<Generation> {
        let mut state = self.commits.lock();
        // A commit for changes alone writes nothing when there are none, and only that of a close says so.
        let served = |state: &CommitState| match purpose {
            Purpose::Changes => state.finished >= needed,
            Purpose::Drain | Purpose::Shorten => state.recorded >= needed,
            Purpose::Close => state.recorded >= needed && self.durable.load().closed,
        };
        while !served(&state) {
            if state.running {
                state.waiting += 1;
                self.commit_done.wait(&mut state);
                state.waiting -= 1;
                continue;
            }
            state.running = true;
            self.gather(&mut state);
            let (number, served) = state.start();
            let mut chain = state.chain.clone();
            drop(state);
            let (before, began) = (chain.tag, self.environment.now());
            let result = self.run_commit(purpose, &mut chain, None);
            let took = self.environment.now().since(began);
            state = self.commits.lock();
            state.running = false;
            state.finished = number;
            let came = state.joined;
            state.gather.ended(served, came, took);
            if chain.tag != before {
                state.recorded = number;
            }
            state.chain = chain;
            match result {
                Ok(()) => {}
                Err(error) => {
                    // Who waits for changes has none in a commit that was empty and refused.
                    let empty = matches!(error, Error::NoSpace(_)) && state.chain.refused.is_some();
                    if !empty || self.staged.load(Ordering::Acquire) {
                        state.failed = Some((number, error.clone()));
                    }
                    self.commit_done.notify_all();
                    return Err(error);
                }
            }
            self.commit_done.notify_all();
        }
        // The commit that covered this caller is `needed` or a later one.
        if let Some((number, error)) = &state.failed
            && *number >= needed
        {
            return Err(error.clone());
        }
        Ok(self.durable.load().generation)
    }

    /// Callers that wait for the commit in flight.
    #[cfg(test)]
    pub(super) fn waiting_callers(&self) -> u64 {
        self.commits.lock().waiting
    }

    /// Waits for the commit in flight, then runs `f` as the only leader, with the chain.
    pub(super) fn as_leader<R>(&self, f: impl FnOnce(&mut Chain) -> Result<R>) -> Result<R> {
        let mut state = self.commits.lock();
        while state.running {
            self.commit_done.wait(&mut state);
        }
        state.running = true;
        let (number, _) = state.start();
        let mut chain = state.chain.clone();
        drop(state);
        let before = chain.tag;
        let result = f(&mut chain);
        let mut state = self.commits.lock();
        state.running = false;
        state.finished = number;
        if chain.tag != before {
            state.recorded = number;
        }
        // Also after an error: `f` may have committed before it failed, and a commit that fails leaves the chain as it was.
        state.chain = chain;
        if let Err(error) = &result {
            state.failed = Some((number, error.clone()));
        }
        self.commit_done.notify_all();
        result
    }

    /// One commit by the leader. With `held` the writers' lock is kept throughout, so that nothing can be published meanwhile.
    pub(super) fn run_commit(
        &self,
        purpose: Purpose,
        chain: &mut Chain,
        held: Option<&mut MutexGuard<'_, Writer>>,
    ) -> Result<()> {
        let frozen = match held {
            Some(writer) => {
                let frozen = self.freeze(purpose, chain, writer)?;
                let Some(frozen) = frozen else { return Ok(()) };
                self.write_commit(purpose, chain, frozen)?;
                self.settle(writer);
                return Ok(());
            }
            None => self.freeze_with_room(purpose, chain)?,
        };
        let Some(frozen) = frozen else { return Ok(()) };
        self.write_commit(purpose, chain, frozen)?;
        self.settle(&mut self.writer.lock());
        Ok(())
    }

    pub(super) fn freeze(
        &self,
        purpose: Purpose,
        chain: &Chain,
        writer: &mut MutexGuard<'_, Writer>,
    ) -> Result<Option<Frozen>> {
        if self.staged.swap(false, Ordering::AcqRel)
            && let Some(flusher) = self.flusher.get()
            && let Err(error) = self.operate_locked(writer, true, |operation| flusher(operation))
        {
            self.staged.store(true, Ordering::Release);
            return Err(error);
        }
        if !writer.changed && purpose == Purpose::Changes {
            // What there was may have been taken by a commit that failed: then nothing is durable that waited for it.
            self.pager.latch().check()?;
            return Ok(None);
        }
        self.freeze_changes(chain, writer).map(Some)
    }

    /// Takes what is published, also when that is nothing new.
    pub(super) fn freeze_changes(&self, chain: &Chain, writer: &mut MutexGuard<'_, Writer>) -> Result<Frozen> {
        if let Some((first, value)) = chain.previous_session {
            self.operate_locked(writer, true, |operation| operation.record_session(first, &value))?;
        }
        let empty = !writer.changed;
        let generation = match chain.refused.filter(|_| empty) {
            // T4: nobody was told of it, and what was sealed for the open transaction keeps its number.
            Some(refused) => refused,
            None => {
                let generation = writer.generation;
                writer.generation = generation.next();
                generation
            }
        };
        writer.changed = false;
        self.open_generation.store(writer.generation.0, Ordering::Release);
        let mut frozen = Frozen {
            state: self.published.load_full(),
            generation,
            allocated: std::mem::take(&mut writer.born).into_values().collect(),
            freed: std::mem::take(&mut writer.freed),
            superseded: std::mem::take(&mut writer.superseded),
            lists: 0,
            empty,
        };
        self.promise_lists(&mut frozen, chain);
        self.list_entries.store(0, Ordering::Relaxed);
        Ok(frozen)
    }

    /// Everything between the freeze and the acknowledgement. Any failure latches, for the next transaction is built on this one. Only a
    /// commit without changes, on which nothing is built, may be refused for want of space.
    pub(super) fn write_commit(&self, purpose: Purpose, chain: &mut Chain, frozen: Frozen) -> Result<()> {
        let generation = frozen.generation;
        let written = self.try_write_commit(purpose, chain, frozen);
        let refused = chain.refused == Some(generation);
        written.map_err(|error| match error {
            Error::Latched(_) => error,
            Error::NoSpace(_) if refused => error,
            error => self.pager.latch().set("committing", error),
        })
    }

    fn try_write_commit(&self, purpose: Purpose, chain: &mut Chain, frozen: Frozen) -> Result<()> {
        let Frozen { state, generation, mut allocated, mut freed, superseded, mut lists, empty } = frozen;
        self.check_host()?;
        let mut nodes = 0;
        let trees = &state.trees;
        let mut roots = [Root::default(); 5];
        for (tree, id) in [
            (&trees.live, TreeId::Live),
            (&trees.references, TreeId::References),
            (&trees.snapshots, TreeId::Snapshots),
            (&trees.history, TreeId::History),
        ] {
            roots[id as usize - 1] = self.flush_tree(tree, id, generation, 1, &mut allocated, &mut nodes)?;
        }
        freed.extend(pages_of(&superseded)?);
        // Nobody but readers of older versions asks for them again.
        superseded.iter().filter_map(|node| node.stored.get()).for_each(|pointer| self.store.forget(pointer));
        drop(superseded);
        self.dirty_nodes.fetch_sub(nodes, Ordering::Relaxed);

        let mut next = chain.clone();
        next.previous_session = None;
        next.refused = None;
        next.session_first = Some(chain.session_first.unwrap_or(generation));
        let space_tree = self.space_tree.load_full();
        let checkpoint = self.checkpoint_if_due(purpose, chain, &space_tree, generation, empty)?;
        let checkpoint = match checkpoint {
            Some(made) => {
                roots[4] = made.root;
                // Its nodes may be what makes the lists too long for the record.
                lists += made.promised;
                allocated.extend(made.allocated);
                freed.extend(made.freed);
                freed.append(&mut next.list_pages);
                next.checkpoint = generation;
                next.force_checkpoint = false;
                Some((made.tree, made.taken))
            }
            None => {
                roots[4] = self.flush_tree(&space_tree, TreeId::Space, generation, 0, &mut allocated, &mut 0)?;
                None
            }
        };
        if next.checkpoint == Generation(0) && !next.force_checkpoint {
            // The first commit of a volume: no page was there before.
            next.checkpoint = generation;
        }

        let used = {
            let in_use = self.space.lock().used_blocks();
            // A record may lie about it: only a holder of the key can make one, and that must not end the process.
            in_use
                .saturating_add(blocks(allocated.iter().map(|(run, _)| *run)))
                .saturating_sub(blocks(freed.iter().copied()))
        };
        let mut record = CommitRecord {
            generation,
            previous_tag: chain.tag,
            session: self.session,
            session_first: next.session_first.unwrap_or(generation),
            header_sequence: self.header_sequence,
            time: self.environment.now(),
            two_barrier: false,
            closed: purpose == Purpose::Close,
            roots,
            next_ino: state.counters.next_ino,
            inodes: state.counters.inodes,
            used_blocks: used,
            total_blocks: self.space.lock().total(),
            next_dead: state.counters.next_dead,
            next_snapshot: state.counters.next_snapshot,
            newest_snapshot: state.counters.newest_snapshot,
            newest_snapshot_id: state.counters.newest_snapshot_id,
            checkpoint: next.told_checkpoint(generation),
            delta_list: Pointer::NULL,
            allocated,
            freed,
        };
        // T2
        let (allocated, freed) = if CommitRecord::lists_fit(record.allocated.len(), record.freed.len()) {
            let listed = (record.allocated.iter().map(|(run, _)| *run).collect::<Vec<_>>(), record.freed.clone());
            if purpose == Purpose::Close {
                self.barrier()?;
            }
            listed
        } else {
            let written = self.write_lists(&mut record, &mut next, &mut lists)?;
            self.barrier()?;
            written
        };
        // T3: only one leader, and it returns after its last barrier.
        next.tag = match self.pager.write_record(&record) {
            Err(Error::NoSpace(reason)) if empty => {
                // All pages that it brought in are the checkpoint's.
                let taken = checkpoint.map(|(_, taken)| taken).unwrap_or_default();
                self.take_back(taken, allocated, lists)?;
                chain.refused = Some(generation);
                return Err(Error::NoSpace(reason));
            }
            written => written?,
        };
        next.generation = generation;
        self.barrier()?;

        {
            let mut space = self.space.lock();
            space.unreserve(lists);
            space.committed(generation, allocated.into_iter(), freed, state.sequence);
            space.set_list_entries(0);
        }
        self.durable.store(Arc::new(record));
        if let Some((tree, _)) = checkpoint {
            let mut space = self.space.lock();
            self.space_tree.store(Arc::new(tree));
            space.finish_checkpoint();
            space.evict(self.region_limit());
        }
        *chain = next;
        drop(state);
        self.release_waiting();
        Ok(())
    }

    pub(super) fn flush_tree(
        &self,
        tree: &Tree,
        id: TreeId,
        generation: Generation,
        from_reserved: u64,
        allocated: &mut Vec<(Run, Tag)>,
        nodes: &mut i64,
    ) -> Result<Root> {
        tree.flush(&self.store, &mut |level, encoded| {
            let page = frame::node_page(id as u8, level, encoded);
            let sealed = self.seal_reserved(&page, generation, from_reserved)?;
            allocated.push((sealed.pointer.run, sealed.pointer.tag));
            self.pager.write_page(&sealed)?;
            *nodes += 1;
            Ok(sealed.pointer)
        })
    }

    /// Writes a page of at most four blocks for which room is kept, beside the one before it.
    pub(super) fn write_reserved(
        &self,
        page: &PlainPage<'_>,
        generation: Generation,
        from_reserved: u64,
    ) -> Result<Pointer> {
        let sealed = self.seal_reserved(page, generation, from_reserved)?;
        self.pager.write_page(&sealed)?;
        Ok(sealed.pointer)
    }

    fn seal_reserved(&self, page: &PlainPage<'_>, generation: Generation, from_reserved: u64) -> Result<SealedPage> {
        let run = self
            .space
            .lock()
            .allocate_node(page.blocks(), from_reserved)
            .ok_or_else(|| Error::NoSpace("blocks kept for a commit are not there".into()))?;
        self.pager.seal(page, run, generation)
    }

    pub(super) fn barrier(&self) -> Result<()> {
        self.unsynced.store(0, Ordering::Relaxed);
        self.pager.barrier()
    }

    /// Lets the memory of written nodes go: the published trees name them by pointer again.
    pub(super) fn settle(&self, _writer: &mut Writer) {
        let base = self.published.load_full();
        let mut trees = base.trees.clone();
        trees.live.settle();
        trees.references.settle();
        trees.snapshots.settle();
        trees.history.settle();
        let state = Arc::new(State { trees, counters: base.counters, sequence: base.sequence });
        self.epochs.add(&state);
        self.published.store(state);
    }
}

fn blocks(runs: impl Iterator<Item = Run>) -> u64 {
    runs.map(|run| run.blocks).sum()
}

/// The pages of nodes that a transaction replaced. Every one is stored: it belongs to a commit before this one, and commits do not overlap.
pub(super) fn pages_of(nodes: &[Arc<Node>]) -> Result<Vec<Run>> {
    nodes
        .iter()
        .map(|node| {
            let pointer = node.stored.get();
            pointer.map(|p| p.run).ok_or_else(|| Error::damaged("a replaced node was never written"))
        })
        .collect()
}
