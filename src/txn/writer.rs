//! The open transaction: operations change it one at a time under the writers' lock, and the leader
//! of a commit freezes it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::{Mutex, MutexGuard};

use super::allocator::{Allocator, Reservation, keep_of};
use super::operation::{Changes, Operation};
use super::state::{Publication, State, VolumeContext};
use crate::btree::Node;
use crate::error::{Error, Result};
use crate::format::log::{LogEntry, LogMark, LogPiece};
use crate::format::record::CommitRecord;
use crate::format::{Generation, Pointer, Run, Tag};
use crate::pager::space::Headroom;

/// Estimated bytes of a dirty node in memory: encoded form, entries, allocation headers.
const DIRTY_NODE_BYTES: u64 = 24 * 1024;

/// Pages brought in or freed by one transaction beyond which it is committed: bounds memory and the
/// record's lists.
const LIST_LIMIT: u64 = 16_384;

/// Inode numbers that are skipped after a crash, so that numbers of lost files are not reused. A
/// transaction that has given out half as many is committed.
pub(super) const INODES_OF_TRANSACTION: u64 = 1 << 22;

/// Freed blocks beyond which an fsync commits, so that freed space becomes usable: 1 MiB.
const MOST_FREED: u64 = 256;

/// Entries of one list page of four blocks: (16,280 - 40) / 8.
pub(super) const LIST_PAGE_ENTRIES: usize = 2000;

/// Owner of a volume: has dirty data that no tree names yet, and unreachable objects.
pub(crate) trait VolumeOwner: Send + Sync {
    /// Moves all dirty data into the transaction, at the start of a commit and once in it, if
    /// [`Writer::mark_staged`] was called since the last success. Runs under the writers'
    /// lock: it may write data, and changes trees through `operation` alone.
    ///
    /// # Errors
    /// The commit fails, and the next one calls it again.
    fn flush(&self, operation: &mut Operation<'_>) -> Result<()>;

    /// Returns the dirty pieces that no log entry has, in the order of a [`LogEntry`], or None when
    /// they take more than `capacity` bytes there. Runs under the writers' lock. Returned pieces
    /// count as logged until a commit that fails gives them back.
    fn take_log_pieces(&self, capacity: usize) -> Option<Vec<LogPiece>>;

    /// Frees pages of unreachable objects, a bounded number; returns whether there were any. Runs
    /// without the writers' lock, makes essential operations alone and waits for no lock that a
    /// caller of [`super::Volume::operate`] may hold.
    ///
    /// # Errors
    /// The errors of an operation. All but `WriteFailed` end the attempt to get space.
    fn reclaim_step(&self) -> Result<bool>;

    /// Returns whether a later [`VolumeOwner::reclaim_step`] may free more, once other threads no
    /// longer block it.
    ///
    /// # Errors
    /// The errors of a read.
    fn is_reclaim_blocked(&self) -> Result<bool>;
}

/// Changes of operations since the last freeze.
#[derive(Default)]
struct Open {
    generation: Generation,
    next_sequence: u64,
    /// Pages that the transaction brought in.
    born: HashMap<u64, (Run, Tag)>,
    /// Pages of older transactions that it freed.
    freed: Vec<Run>,
    /// Nodes of older transactions that this one replaced; their pages are known once the commit in
    /// flight is done.
    superseded: Vec<Arc<Node>>,
    changed: bool,
    /// Changes published since the last log entry.
    unlogged: Changes,
}

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
    /// The log that its record names as pending (LOG-4).
    pub(super) pending: Option<LogMark>,
}

pub(crate) struct Writer {
    medium: Arc<VolumeContext>,
    allocator: Arc<Allocator>,
    open: Mutex<Open>,
    owner: OnceLock<Box<dyn VolumeOwner>>,
    /// Set by writers of dirty data that the owner will flush.
    staged: AtomicBool,
    /// A commit waits for space on the host (TXN-9).
    is_commit_deferred: AtomicBool,
    dirty_nodes: AtomicI64,
    /// Dirty nodes beyond which an operation first waits for a commit.
    dirty_limit: i64,
    /// Blocks of the pages in [`Open::freed`].
    freed_blocks: AtomicU64,
    stale_pages: StalePages,
}

impl Writer {
    pub(super) fn new(medium: Arc<VolumeContext>, allocator: Arc<Allocator>, memory: u64) -> Writer {
        Writer {
            open: Mutex::new(Open {
                generation: medium.versions.open_generation(),
                next_sequence: medium.versions.sequence() + 1,
                ..Open::default()
            }),
            medium,
            allocator,
            owner: OnceLock::new(),
            staged: AtomicBool::new(false),
            is_commit_deferred: AtomicBool::new(false),
            dirty_nodes: AtomicI64::new(0),
            dirty_limit: (memory / 8 / DIRTY_NODE_BYTES).max(64) as i64,
            freed_blocks: AtomicU64::new(0),
            stale_pages: StalePages::default(),
        }
    }

    pub(super) fn lock(&self) -> OpenTransaction<'_> {
        OpenTransaction { writer: self, open: self.open.lock() }
    }

    pub(super) fn set_owner(&self, owner: Box<dyn VolumeOwner>) {
        // Only the first counts: one file system owns a volume.
        let _ = self.owner.set(owner);
    }

    pub(super) fn owner(&self) -> Option<&dyn VolumeOwner> {
        self.owner.get().map(Box::as_ref)
    }

    /// Marks that the owner has something to flush: the next commit is not skipped as empty.
    pub(crate) fn mark_staged(&self) {
        self.staged.store(true, Ordering::Release);
    }

    pub(super) fn set_commit_deferred(&self, is_deferred: bool) {
        self.is_commit_deferred.store(is_deferred, Ordering::Release);
    }

    /// Returns whether anything was published or became dirty since the last commit began, or
    /// whether that commit waits for space.
    pub(crate) fn is_dirty(&self) -> bool {
        // Under the writers' lock: a flusher that fails puts its mark back before it lets go of
        // that.
        let open = self.open.lock();
        self.staged.load(Ordering::Acquire) || open.changed || self.is_commit_deferred.load(Ordering::Acquire)
    }

    /// Returns whether everything published is in a commit or a log entry; false while the writers'
    /// lock is held, or a commit waits for space.
    pub(crate) fn is_logged(&self) -> bool {
        let is_deferred = self.is_commit_deferred.load(Ordering::Acquire);
        !is_deferred && self.open.try_lock().is_some_and(|open| open.unlogged.is_empty())
    }

    /// Returns the approximate memory of dirty nodes in bytes.
    pub(crate) fn dirty_bytes(&self) -> u64 {
        self.dirty_nodes() * DIRTY_NODE_BYTES
    }

    pub(super) fn dirty_nodes(&self) -> u64 {
        self.dirty_nodes.load(Ordering::Relaxed).max(0).unsigned_abs()
    }

    pub(super) fn nodes_written(&self, nodes: i64) {
        self.dirty_nodes.fetch_sub(nodes, Ordering::Relaxed);
    }

    /// Returns whether the next operation commits before it begins.
    pub(super) fn commit_is_due(&self) -> bool {
        let versions = &self.medium.versions;
        let inodes = versions.next_ino().saturating_sub(versions.durable().next_ino);
        self.dirty_nodes.load(Ordering::Relaxed) > self.dirty_limit
            || self.allocator.list_entries() > LIST_LIMIT
            || inodes > INODES_OF_TRANSACTION / 2
    }

    /// Returns whether a commit is due soon, at three quarters of that. A caller that locks nothing
    /// makes one then, of little dirty data; one that is due is made by any operation, of all there
    /// is.
    pub(crate) fn commit_is_near(&self) -> bool {
        self.dirty_nodes.load(Ordering::Relaxed) > self.dirty_limit / 4 * 3
            || self.allocator.list_entries() > LIST_LIMIT / 4 * 3
    }

    /// Returns the blocks of pages that only the next commit begins to give back.
    pub(super) fn freed_blocks(&self) -> u64 {
        self.freed_blocks.load(Ordering::Relaxed)
    }

    pub(super) fn stale_pages(&self) -> &StalePages {
        &self.stale_pages
    }
}

pub(super) struct OpenTransaction<'w> {
    writer: &'w Writer,
    open: MutexGuard<'w, Open>,
}

impl OpenTransaction<'_> {
    pub(super) fn is_changed(&self) -> bool {
        self.open.changed
    }

    pub(super) fn mark_changed(&mut self) {
        self.open.changed = true;
    }

    /// Runs `f` on a working copy and publishes the result when it is `Ok`; readers never wait. The
    /// nodes that `f` dirtied are promised before publication, so a full disk is an error of this
    /// operation alone (TXN-5, TXN-6).
    pub(super) fn operate<R>(&mut self, essential: bool, f: impl FnOnce(&mut Operation<'_>) -> Result<R>) -> Result<R> {
        self.operate_on(&mut None, essential, f)
    }

    /// Like [`Self::operate`]; first takes space for nodes that was promised before.
    fn operate_on<R>(
        &mut self,
        nodes: &mut Option<Reservation>,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>) -> Result<R>,
    ) -> Result<R> {
        let base = self.writer.medium.versions.published();
        let mut operation = Operation::new(&self.writer.medium.store, self.open.generation, &base);
        drop(base);
        let result = f(&mut operation)?;
        operation.bury_snapshot_nodes()?;
        self.publish(operation, nodes, essential)?;
        Ok(result)
    }

    fn publish(&mut self, operation: Operation<'_>, nodes: &mut Option<Reservation>, essential: bool) -> Result<()> {
        let Writer { allocator, medium, .. } = self.writer;
        let versions = &medium.versions;
        if !operation.changed {
            Publication::announce(&operation.carried, versions.sequence(), || ());
            return Ok(());
        }
        let dirtied = operation.dirtied();
        let keep = if operation.of_commit { Headroom::Nothing } else { keep_of(essential) };
        if dirtied <= 0 {
            allocator.unreserve(dirtied.unsigned_abs());
        } else {
            let wanted = dirtied.unsigned_abs();
            let promised = nodes.as_ref().map_or(0, Reservation::groups).min(wanted);
            if wanted > promised && !allocator.reserve(wanted - promised, keep)? {
                return Err(Error::NoSpace("the archive cannot grow".into()));
            }
            nodes.iter_mut().for_each(|nodes| nodes.hand_over(promised));
        }
        self.writer.dirty_nodes.fetch_add(dirtied, Ordering::Relaxed);

        let open = &mut *self.open;
        let sequence = open.next_sequence;
        open.next_sequence += 1;
        open.changed = true;
        open.unlogged.absorb(operation.log);
        open.superseded.extend(operation.live_edits.superseded);
        open.superseded.extend(operation.global_edits.superseded);
        for (run, tag) in operation.adopted {
            open.born.insert(run.address, (run, tag));
        }
        self.writer.stale_pages.published(&operation.stale, &operation.freed);
        let mut unnamed = Vec::new();
        for run in operation.freed {
            // A page that this transaction brought in was never named by a commit: only readers can
            // still see it.
            match open.born.remove(&run.address) {
                Some((born, _)) => unnamed.push(born),
                None => {
                    self.writer.freed_blocks.fetch_add(run.blocks, Ordering::Relaxed);
                    open.freed.push(run);
                }
            }
        }
        allocator.set_list_entries((open.born.len() + open.freed.len() + open.superseded.len()) as u64);
        let state = Arc::new(State { trees: operation.trees, counters: operation.counters, sequence });
        Publication::announce(&operation.carried, sequence, || versions.publish(state));
        if !unnamed.is_empty() {
            allocator.discard(unnamed, sequence);
        }
        Ok(())
    }

    /// Moves staged data into the transaction, using the space of `nodes` first. Its writes are
    /// bounded, and covered by the barriers of their commit: it makes none.
    pub(super) fn flush_staged(&mut self, nodes: &mut Option<Reservation>) -> Result<()> {
        let writer = self.writer;
        if writer.staged.swap(false, Ordering::AcqRel)
            && let Some(owner) = writer.owner()
        {
            let flushed = self.operate_on(nodes, true, |operation| owner.flush(operation));
            if flushed.is_err() {
                writer.mark_staged();
                // Its sealed data counts as logged, and is in no entry.
                self.leave_log();
            }
            return flushed;
        }
        Ok(())
    }

    /// Returns a log entry of at most `capacity` bytes with all changes published and staged since
    /// the last one (LOG-1); None when only a commit can make them durable. A caller that does not
    /// write the entry calls [`Self::leave_log`].
    pub(super) fn log_entry(&mut self, capacity: usize) -> Result<Option<LogEntry>> {
        let medium = &self.writer.medium;
        // Freed blocks return by commits alone.
        if self.writer.freed_blocks() > MOST_FREED {
            return Ok(None);
        }
        let state = medium.versions.published();
        let Some(mut entry) = self.open.unlogged.entry(&state, &medium.store, capacity)? else { return Ok(None) };
        if let Some(owner) = self.writer.owner() {
            let Some(pieces) = owner.take_log_pieces(capacity - entry.length()) else { return Ok(None) };
            entry.pieces = pieces;
        }
        self.open.unlogged = Changes::default();
        Ok(Some(entry))
    }

    /// Handles changes taken for a log entry that was not written: the next commit makes them
    /// durable, and no entry precedes it.
    pub(super) fn leave_log(&mut self) {
        self.open.unlogged.need_commit();
    }

    /// Takes the published changes, even if there are none, and opens the next transaction. An
    /// empty one gets the number `unused`, if there is one: that number was never reported, and
    /// data sealed for the open transaction keeps its number (TXN-4).
    ///
    /// `old_lists` is the number of list pages that a checkpoint would free. Space for the new ones
    /// is promised while no operation can intervene: from now on others reserve against the next
    /// transaction's lists. `SpaceMap::reserve` left that space; should it be missing all the same,
    /// the commit takes the space that it finds. `with_staged` is true when no dirty data is left
    /// out.
    pub(super) fn freeze(
        &mut self,
        unused: Option<Generation>,
        old_lists: usize,
        with_staged: bool,
        pending: Option<LogMark>,
    ) -> Frozen {
        let Writer { allocator, medium, .. } = self.writer;
        let versions = &medium.versions;
        let open = &mut *self.open;
        let empty = !std::mem::take(&mut open.changed);
        self.writer.freed_blocks.store(0, Ordering::Relaxed);
        let generation = unused.filter(|_| empty).unwrap_or_else(|| {
            let generation = open.generation;
            open.generation = generation.next();
            generation
        });
        versions.set_open_generation(open.generation);
        let mut frozen = Frozen {
            state: versions.published(),
            generation,
            allocated: std::mem::take(&mut open.born).into_values().collect(),
            freed: std::mem::take(&mut open.freed),
            superseded: std::mem::take(&mut open.superseded),
            lists: 0,
            empty,
            pending,
        };
        if with_staged {
            open.unlogged = Changes::default();
        }
        let allocated = frozen.allocated.len() + self.writer.dirty_nodes() as usize;
        // A checkpoint frees the list pages since the last one, and as many nodes of its tree at
        // most as it makes.
        let freed = frozen.freed.len() + frozen.superseded.len() + old_lists;
        let pages = (allocated.div_ceil(LIST_PAGE_ENTRIES) + freed.div_ceil(LIST_PAGE_ENTRIES)) as u64;
        if !CommitRecord::lists_fit(allocated, freed) && allocator.promise(pages) {
            frozen.lists = pages;
        }
        allocator.set_list_entries(0);
        frozen
    }

    pub(super) fn forget_written(&mut self) {
        let versions = &self.writer.medium.versions;
        versions.publish(Arc::new(versions.published().without_written_nodes()));
    }
}

/// Pages noted at once: about 1 MiB of memory.
const LIMIT: usize = 8192;

/// Ticks after which a page is due: noted just before the first, it is one interval old at the
/// second.
const DUE: u8 = 2;

/// Packed pages with a part that is no longer referenced, noted in memory. Notes are hints: a page
/// that is noted without need is checked and dropped. A page must not be missing, so
/// STALE-1  a page is noted by the publication of the operation that took a part away, and dropped
///     by the one that freed it;
/// STALE-2  a caller that takes a page out to check it notes it again unless it is whole, gone, or
///     replaced;
/// STALE-3  notes that find no space, and those of a session that ended without closing, are
///     recovered by a search of the tree.
#[derive(Default)]
pub(crate) struct StalePages {
    pages: Mutex<Pages>,
}

#[derive(Default)]
struct Pages {
    /// By address: the page, and ticks since it was noted.
    noted: BTreeMap<u64, (Pointer, u8)>,
    /// STALE-3
    overflowed: bool,
}

impl StalePages {
    pub(crate) fn note(&self, page: Pointer) {
        let mut pages = self.pages.lock();
        let known = pages.noted.get(&page.run.address).map(|(known, _)| *known);
        if known.is_none() && pages.noted.len() >= LIMIT {
            pages.overflowed = true;
        } else if known != Some(page) {
            // For a page that is noted already the time runs from the first removed part.
            pages.noted.insert(page.run.address, (page, 0));
        }
    }

    /// Notes a page again that was taken out, or that was found in a possibly outdated state: an
    /// existing note for the same place is newer and stays.
    pub(crate) fn note_again(&self, page: Pointer) {
        let mut pages = self.pages.lock();
        if pages.noted.len() < LIMIT {
            pages.noted.entry(page.run.address).or_insert((page, 0));
        } else {
            pages.overflowed = true;
        }
    }

    pub(crate) fn has_room(&self, more: usize) -> bool {
        self.pages.lock().noted.len() + more <= LIMIT
    }

    pub(crate) fn tick(&self) {
        for (_, ticks) in self.pages.lock().noted.values_mut() {
            *ticks = ticks.saturating_add(1);
        }
    }

    /// All that is noted now is due.
    pub(crate) fn hurry(&self) {
        for (_, ticks) in self.pages.lock().noted.values_mut() {
            *ticks = DUE;
        }
    }

    pub(crate) fn take_due(&self, limit: usize) -> Vec<Pointer> {
        let mut pages = self.pages.lock();
        let due: Vec<Pointer> =
            pages.noted.values().filter(|(_, ticks)| *ticks >= DUE).map(|(page, _)| *page).take(limit).collect();
        for page in &due {
            pages.noted.remove(&page.run.address);
        }
        due
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pages.lock().noted.is_empty()
    }

    /// Returns whether notes found no space since the last call.
    pub(crate) fn take_overflow(&self) -> bool {
        std::mem::take(&mut self.pages.lock().overflowed)
    }

    /// STALE-1
    pub(super) fn published(&self, stale: &[Pointer], freed: &[Run]) {
        for page in stale {
            self.note(*page);
        }
        let mut pages = self.pages.lock();
        for run in freed {
            pages.noted.remove(&run.address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Writer {
        pub(in crate::txn) fn is_locked(&self) -> bool {
            self.open.is_locked()
        }
    }

    fn page(address: u64) -> Pointer {
        Pointer { run: Run::new(address, 1), ..Pointer::NULL }
    }

    #[test]
    fn a_page_is_due_after_two_ticks_and_dropped_when_it_is_freed() {
        let notes = StalePages::default();
        notes.published(&[page(100), page(200)], &[]);
        notes.tick();
        notes.note(page(100));
        assert!(notes.take_due(8).is_empty());
        notes.tick();
        notes.published(&[page(300)], &[page(200).run]);
        assert_eq!(notes.take_due(8), [page(100)]);
        notes.published(&[page(400)], &[page(400).run]);
        notes.hurry();
        assert_eq!(notes.take_due(8), [page(300)]);
        assert!(notes.is_empty());
    }

    #[test]
    fn notes_beyond_the_limit_are_told() {
        let notes = StalePages::default();
        for address in 0..=LIMIT as u64 {
            assert!(!notes.take_overflow());
            notes.note(page(address));
        }
        assert!(notes.take_overflow() && !notes.take_overflow() && !notes.has_room(1));
    }
}
