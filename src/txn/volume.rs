//! The open archive as transactions see it: published state, the writers' lock, and operations.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex, MutexGuard};

use super::commit::CommitState;
use super::partly::PartlyNamed;
use super::shortage::Reclaimer;
use super::state::{Epochs, State};
use super::{Mark, Operation, Publication, View};
use crate::btree::{Edits, Node, NodeStore, Tree};
use crate::env::Environment;
use crate::error::{CacheUse, Error, Result};
use crate::format::data_head::PackedItem;
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, Pointer, Run, SessionId, Tag};
use crate::frame::OpenedPage;
use crate::pager::Pager;
use crate::pager::space::{Blocks, Keep, SpaceMap};

/// How to open a volume.
pub(crate) struct OpenOptions {
    pub(crate) read_only: bool,
    /// Bytes for frame cache, node cache, dirty nodes and space map together.
    pub(crate) memory: u64,
}

/// Estimated bytes of a dirty node in memory: encoded form, entries, allocation headers.
const DIRTY_NODE_BYTES: u64 = 24 * 1024;

/// Pages brought in or freed by one transaction beyond which it is committed: bounds memory and the record's lists.
const LIST_LIMIT: u64 = 16_384;

pub(super) type Flusher = Box<dyn Fn(&mut Operation<'_>) -> Result<()> + Send + Sync>;

/// What writers share under their lock: the open transaction beside the published trees.
pub(super) struct Writer {
    pub(super) generation: Generation,
    pub(super) next_sequence: u64,
    /// Pages that the open transaction brought in.
    pub(super) born: HashMap<u64, (Run, Tag)>,
    /// Pages of older transactions that it freed.
    pub(super) freed: Vec<Run>,
    /// Nodes of older transactions that it replaced; their pages are known once the commit in flight is done.
    pub(super) superseded: Vec<Arc<Node>>,
    /// Something was published since the last freeze.
    pub(super) changed: bool,
}

/// The open archive. Lock order: commit leader, writer, space, epochs.
pub(crate) struct Volume {
    pub(super) pager: Arc<Pager>,
    pub(super) store: NodeStore,
    pub(super) environment: Arc<dyn Environment>,
    pub(super) published: ArcSwap<State>,
    pub(super) epochs: Epochs,
    pub(super) writer: Mutex<Writer>,
    pub(super) space: Arc<Mutex<SpaceMap>>,
    /// The tree of the newest checkpoint that is durable. A region that is not loaded is as this tree has it: the commit leader replaces it under
    /// the lock of `space`, and until then keeps what it wrote loaded.
    pub(super) space_tree: ArcSwap<Tree>,
    pub(super) commits: Mutex<CommitState>,
    pub(super) commit_done: Condvar,
    /// Somebody needs the commit that has not begun.
    pub(super) commit_joined: Condvar,
    pub(super) durable: ArcSwap<CommitRecord>,
    pub(super) flusher: OnceLock<Flusher>,
    pub(super) reclaimer: OnceLock<Reclaimer>,
    /// Held by the writer that brings room about for all who have none.
    pub(super) shortage: Mutex<()>,
    /// Writers that hold `shortage` or wait for it.
    pub(super) short: AtomicU64,
    /// Held while free blocks are erased, which nobody can take meanwhile.
    pub(super) erasing: Mutex<()>,
    /// Set by whoever stages data that the flusher will publish.
    pub(super) staged: AtomicBool,
    pub(super) dirty_nodes: AtomicI64,
    /// Entries in the open transaction's lists of pages.
    pub(super) list_entries: AtomicU64,
    /// Bytes written since the last barrier.
    pub(super) unsynced: AtomicU64,
    pub(super) early_barrier: Mutex<()>,
    /// Second of the last background erase.
    pub(super) last_erase: Mutex<i64>,
    pub(super) partly_named: PartlyNamed,
    pub(super) open_generation: AtomicU64,
    pub(super) session: SessionId,
    pub(super) header_sequence: u64,
    pub(super) read_only: bool,
    pub(super) fallback: Option<String>,
    /// The record that was opened and those before it that the ring had, newest first.
    pub(super) line: Vec<Mark>,
    pub(super) memory: u64,
}

impl Volume {
    /// The current published version. Never waits.
    pub(crate) fn state(&self) -> Arc<State> {
        self.published.load_full()
    }

    pub(crate) fn view<'a>(&'a self, state: &'a State) -> View<'a> {
        View { tree: &state.trees.live, store: self.store(), finger: None }
    }

    pub(crate) fn store(&self) -> &NodeStore {
        &self.store
    }

    #[cfg(test)]
    pub(crate) fn pager(&self) -> &Pager {
        &self.pager
    }

    /// Fills `out` with the plain bytes of file data from `start` of a page; see [`Pager::read_data`].
    pub(crate) fn read_data(&self, page: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        self.pager.read_data(page, start, out)
    }

    /// Tells the medium which parts of pages [`Self::read_data`] is going to be asked for.
    pub(crate) fn expect_data<'a>(&self, parts: impl Iterator<Item = (&'a Pointer, u32, u32)>) {
        self.pager.expect_data(parts);
    }

    /// The files whose parts lie in a packed page; None when it is a page of another kind.
    pub(crate) fn packed_items(&self, page: &Pointer) -> Result<Option<Vec<PackedItem>>> {
        self.pager.packed_items(page)
    }

    /// A page of any kind, opened and verified whole.
    pub(crate) fn open_page(&self, page: &Pointer) -> Result<OpenedPage> {
        self.pager.open_page(page)
    }

    /// What the caches of cells, heads and nodes hold and how often they had what was asked for.
    pub(crate) fn cache_use(&self) -> [CacheUse; 3] {
        let (cells, heads) = self.pager.cache_use();
        [cells, heads, self.store.usage()]
    }

    /// Forgets what was decrypted and is not changed: pages of files, heads and nodes of trees.
    pub(crate) fn forget_plaintext(&self) {
        self.pager.forget_data();
        self.store.clear();
    }

    /// Bytes that the host has allocated to the archive's file.
    pub(crate) fn allocated_on_host(&self) -> Result<u64> {
        self.pager.storage().allocated()
    }

    /// Why nothing is written any more.
    pub(crate) fn latched(&self) -> Option<&str> {
        self.pager.latch().reason()
    }

    /// What somebody who handed over data, or asked for its durability, is told of an error: a failure that only background work has met so far
    /// is told with its cause.
    pub(crate) fn told(&self, error: Error) -> Error {
        self.pager.latch().tell(error)
    }

    /// Of the transaction that takes operations now: nothing in the trees can have been made by a later one.
    pub(crate) fn open_generation(&self) -> Generation {
        Generation(self.open_generation.load(Ordering::Acquire))
    }

    /// A sentence when recovery rejected the newest record and took the one before.
    pub(crate) fn fallback(&self) -> Option<String> {
        self.fallback.clone()
    }

    /// The newest durable record (generation, time, counters).
    pub(crate) fn durable(&self) -> Arc<CommitRecord> {
        self.durable.load_full()
    }

    pub(crate) fn read_only(&self) -> bool {
        self.read_only
    }

    /// (blocks of the file, blocks in use by pages of the last commit)
    pub(crate) fn space(&self) -> (u64, u64) {
        let space = self.space.lock();
        (space.total(), space.used_blocks())
    }

    /// Bounds the length of the archive's file from now on, like a quota; one that is longer already does not grow.
    pub(crate) fn limit_size(&self, bytes: u64) {
        self.space.lock().set_limit(bytes / BLOCK);
    }

    /// The blocks of the file and what they are taken for, those of the open transaction included.
    pub(crate) fn blocks(&self) -> Blocks {
        self.space.lock().blocks()
    }

    /// The same with the bytes of memory that the map takes, or None while somebody works on it.
    pub(crate) fn blocks_unless_busy(&self) -> Option<(Blocks, u64)> {
        let space = self.space.try_lock()?;
        Some((space.blocks(), space.memory()))
    }

    /// Sets what runs at the start of every commit, under the writers' lock, to move staged data into the transaction.
    /// It may write data and change trees through the operation it gets; called once per commit, before the freeze.
    pub(crate) fn set_flusher(&self, flusher: Flusher) {
        // Only the first counts: one file system owns a volume.
        let _ = self.flusher.set(flusher);
    }

    /// Says that the flusher has something to publish, so that the next `commit` is not skipped as empty.
    pub(crate) fn mark_staged(&self) {
        self.staged.store(true, Ordering::Release);
    }

    /// Whether something was published or staged since the last commit began.
    pub(crate) fn is_dirty(&self) -> bool {
        // Under the writers' lock: a flusher that fails puts its mark back before it lets go of that.
        let writer = self.writer.lock();
        self.staged.load(Ordering::Acquire) || writer.changed
    }

    /// What changed nodes take in memory, roughly.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_nodes.load(Ordering::Relaxed).max(0).unsigned_abs() * DIRTY_NODE_BYTES
    }

    /// The next operation commits before it begins.
    pub(crate) fn commit_is_due(&self) -> bool {
        self.dirty_nodes.load(Ordering::Relaxed) > self.dirty_limit()
            || self.list_entries.load(Ordering::Relaxed) > LIST_LIMIT
    }

    pub(super) fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly("the archive is opened for reading".into()));
        }
        self.pager.latch().check()
    }

    /// Dirty nodes beyond which an operation first waits for a commit.
    fn dirty_limit(&self) -> i64 {
        (self.memory / 8 / DIRTY_NODE_BYTES).max(64) as i64
    }

    /// Runs `f` alone among writers on a working copy and publishes the result when it is `Ok`; readers never wait.
    /// The nodes that `f` dirtied are reserved before publication, so a full disk is an error of this operation alone (T5, T6).
    /// `records` is about how many tree records `f` changes; `essential` operations (delete, truncate, reclaim, write-out of accepted
    /// data) may use the reserve. Commits first when too many nodes are dirty or freed space waits for a commit.
    pub(crate) fn operate<R>(
        &self,
        records: u64,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>) -> Result<R>,
    ) -> Result<R> {
        self.check_writable()?;
        self.open_session()?;
        if self.commit_is_due() {
            self.commit()?;
        }
        let _turn = self.make_room(records, essential)?;
        let mut writer = self.writer.lock();
        self.operate_locked(&mut writer, essential, f)
    }

    /// `operate` for a caller that holds the writers' lock.
    pub(super) fn operate_locked<R>(
        &self,
        writer: &mut MutexGuard<'_, Writer>,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>) -> Result<R>,
    ) -> Result<R> {
        let base = self.published.load_full();
        let mut operation = Operation {
            volume: self,
            generation: writer.generation,
            trees: base.trees.clone(),
            counters: base.counters,
            changed: false,
            live_edits: Edits::new(writer.generation),
            global_edits: Edits::new(writer.generation),
            adopted: Vec::new(),
            freed: Vec::new(),
            of_commit: false,
            partly: Vec::new(),
            carried: Vec::new(),
        };
        drop(base);
        let result = f(&mut operation)?;
        operation.bury_snapshot_nodes()?;
        self.publish(writer, operation, essential)?;
        Ok(result)
    }

    fn publish(&self, writer: &mut Writer, operation: Operation<'_>, essential: bool) -> Result<()> {
        if !operation.changed {
            Publication::announce(&operation.carried, self.published.load().sequence, || ());
            return Ok(());
        }
        let dirtied = operation.dirtied();
        if dirtied > 0 && operation.of_commit {
            self.reserve_keeping(dirtied as u64, Keep::Nothing)?;
        } else if dirtied > 0 {
            self.reserve_quads(dirtied as u64, essential)?;
        } else {
            self.space.lock().unreserve(dirtied.unsigned_abs());
        }
        self.dirty_nodes.fetch_add(dirtied, Ordering::Relaxed);

        let sequence = writer.next_sequence;
        writer.next_sequence += 1;
        writer.changed = true;
        writer.superseded.extend(operation.live_edits.superseded);
        writer.superseded.extend(operation.global_edits.superseded);
        for (run, tag) in operation.adopted {
            writer.born.insert(run.address, (run, tag));
        }
        self.partly_named.published(&operation.partly, &operation.freed);
        let mut unnamed = Vec::new();
        for run in operation.freed {
            // A page that this transaction brought in was never named by a commit: only readers can still see it.
            match writer.born.remove(&run.address) {
                Some((born, _)) => unnamed.push(born),
                None => writer.freed.push(run),
            }
        }
        let entries = writer.born.len() + writer.freed.len() + writer.superseded.len();
        self.list_entries.store(entries as u64, Ordering::Relaxed);
        let state = Arc::new(State { trees: operation.trees, counters: operation.counters, sequence });
        Publication::announce(&operation.carried, sequence, || {
            self.epochs.add(&state);
            self.published.store(state);
        });
        if !unnamed.is_empty() {
            self.space.lock().discard(unnamed, sequence);
            self.release_waiting();
        }
        Ok(())
    }

    /// T1: hands freed blocks back to the allocator when no commit and no reader needs them.
    pub(super) fn release_waiting(&self) {
        let oldest = self.epochs.oldest();
        let durable = self.durable.load().generation;
        self.space.lock().release_waiting(durable, oldest);
    }
}
