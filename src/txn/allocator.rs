//! Free blocks: promised to changes, allocated for pages, and freed when no commit and no reader
//! needs their content.
//!
//! Only this module takes the lock of the space map, and takes no other while it holds that one,
//! but for locks of the file: work under it touches memory and the file alone. So a holder of any
//! other lock of a volume may call here.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;

use super::findings::{Finding, FindingKind, Severity, known};
use super::state::VolumeContext;
use crate::btree::Tree;
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::space::{REGION_WORDS, RegionBits};
use crate::format::{BLOCK, Generation, Key, REGION_BLOCKS, Run, TreeId, kind, space};
use crate::frame::GROUP_DATA;
use crate::pager::Pager;
use crate::pager::space::{AllocationFailure, BlockCounts, Headroom, SpaceMap};
use crate::storage::Storage;

/// Bytes of random data written at once where the host does not punch.
const OVERWRITE_STEP: u64 = 1 << 20;
/// Free groups required before others are withheld for erasing.
const SPARE: u64 = 16;

const MAX_BLOCK: u64 = (1 << 48) - 1;

/// Returns the groups of four blocks that `bytes` of file data take in `pages` pages in the worst
/// case. A page of n groups holds at least n * `GROUP_DATA` bytes, raw and whole or cut into parts
/// of one group each. With 0 pages `bytes` is the size of the groups themselves.
pub(crate) const fn groups_for(bytes: u64, pages: u64) -> u64 {
    match pages {
        0 => bytes.div_ceil(4 * BLOCK),
        1 => bytes.div_ceil(GROUP_DATA as u64),
        _ => bytes / GROUP_DATA as u64 + pages,
    }
}

/// Groups of four blocks promised to data that is not yet written; given back when dropped.
pub(crate) struct Reservation {
    allocator: Arc<Allocator>,
    groups: u64,
}

impl Reservation {
    /// Adds another reservation of the same volume to this one.
    pub(crate) fn absorb(&mut self, mut other: Reservation) {
        self.groups += std::mem::take(&mut other.groups);
    }

    /// Merges this reservation into the held one, or becomes it.
    pub(crate) fn join(self, held: &mut Option<Reservation>) {
        match held {
            Some(held) => held.absorb(self),
            None => *held = Some(self),
        }
    }

    /// Moves `groups`, or all if it holds fewer, into a separate reservation.
    pub(crate) fn split(&mut self, groups: u64) -> Reservation {
        let groups = groups.min(self.groups);
        self.groups -= groups;
        Reservation { allocator: self.allocator.clone(), groups }
    }

    pub(crate) fn groups(&self) -> u64 {
        self.groups
    }

    /// Removes `groups` from this reservation without unreserving them: their new holder does that.
    pub(super) fn hand_over(&mut self, groups: u64) {
        self.groups -= groups;
    }

    /// Allocates a run of `blocks` out of the reservation; None when no run is long enough. Errors:
    /// `Invalid` for more than was reserved: the rest would come from other reservations (SPACE-2).
    pub(super) fn allocate(&mut self, blocks: u64) -> Result<Option<Run>> {
        let groups = blocks.div_ceil(4);
        if groups > self.groups {
            debug_assert!(false, "{blocks} blocks of a reservation of {} groups", self.groups);
            return Err(Error::invalid(format!("data beyond its reservation: blocks={blocks} groups={}", self.groups)));
        }
        let run = self.allocator.space.lock().allocate(blocks, groups);
        if run.is_some() {
            self.groups -= groups;
        }
        Ok(run)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.groups > 0 {
            self.allocator.unreserve(self.groups);
        }
    }
}

/// Returns the reserve that an operation must leave: one that frees space or keeps a promise is
/// essential.
pub(super) fn keep_of(essential: bool) -> Headroom {
    if essential { Headroom::Lists } else { Headroom::Reserve }
}

/// Bits of the used blocks of regions, by number.
pub(super) type Regions = Vec<(u64, RegionBits)>;

/// Space map with its loader, and the return path of free blocks.
pub(crate) struct Allocator {
    medium: Arc<VolumeContext>,
    space: Mutex<SpaceMap>,
    /// Space tree of the newest durable checkpoint. A region that is not loaded has the state of
    /// this tree: the leader of a commit replaces the tree under the lock of `space`, and keeps the
    /// regions that it wrote loaded until then.
    tree: ArcSwap<Tree>,
    /// Entries in the open transaction's lists of pages.
    list_entries: AtomicU64,
    /// Number of leaves that the flush of the next commit changes, as the owner of the dirty data
    /// counts them.
    dirty_leaves: Arc<AtomicU64>,
    /// Held while free blocks are erased; they cannot be taken meanwhile.
    erasing: Mutex<()>,
    /// Regions kept in memory in addition to the required ones.
    region_limit: usize,
}

/// Returns whether all blocks are for pages. Freed runs may be longer than a page.
pub(super) fn in_space(run: Run, total: u64, pager: &Pager) -> bool {
    run.end() <= total && run.avoids(pager.reserved())
}

impl Allocator {
    /// `memory` is that of the volume; regions take their share of it, at about 5 KiB each.
    pub(super) fn new(medium: Arc<VolumeContext>, space: SpaceMap, memory: u64) -> Allocator {
        let root = medium.versions.durable().roots[TreeId::Space];
        Allocator {
            medium,
            space: Mutex::new(space),
            tree: ArcSwap::from_pointee(Tree::from_root(TreeId::Space, &root)),
            list_entries: AtomicU64::new(0),
            dirty_leaves: Arc::default(),
            erasing: Mutex::new(()),
            region_limit: (memory / 16 / 5120).max(16) as usize,
        }
    }

    fn storage(&self) -> &dyn Storage {
        &**self.medium.pager.storage()
    }

    // ---- figures ----

    /// Limits the length of the archive's file from now on, like a quota; a file that is already
    /// longer does not grow.
    pub(crate) fn limit_size(&self, bytes: u64) {
        self.space.lock().set_limit(bytes / BLOCK);
    }

    /// Blocks of the file, and those in use by pages of the last commit.
    pub(crate) fn space(&self) -> (u64, u64) {
        let space = self.space.lock();
        (space.total(), space.used_blocks())
    }

    pub(super) fn total(&self) -> u64 {
        self.space().0
    }

    pub(super) fn used_blocks(&self) -> u64 {
        self.space().1
    }

    /// Returns the blocks of the file by use, including the blocks of the open transaction.
    pub(crate) fn blocks(&self) -> BlockCounts {
        self.space.lock().blocks()
    }

    /// Like [`Self::blocks`], with the memory of the map in bytes; None while the map is locked.
    pub(crate) fn blocks_unless_busy(&self) -> Option<(BlockCounts, u64)> {
        let space = self.space.try_lock()?;
        Some((space.blocks(), space.memory()))
    }

    pub(super) fn set_list_entries(&self, entries: u64) {
        self.list_entries.store(entries, Ordering::Relaxed);
    }

    pub(super) fn list_entries(&self) -> u64 {
        self.list_entries.load(Ordering::Relaxed)
    }

    pub(crate) fn dirty_leaves(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.dirty_leaves)
    }

    // ---- promises (SPACE-2) ----

    /// Promises groups of four blocks, loading regions and growing the file as needed; returns
    /// false when there are too few.
    pub(super) fn reserve(&self, groups: u64, keep: Headroom) -> Result<bool> {
        self.bring(|space| space.reserve(groups, keep, self.storage()))
    }

    /// Returns whether `groups` could be promised now, loading regions and growing the file as
    /// needed; promises none.
    pub(super) fn has_groups(&self, groups: u64, keep: Headroom) -> Result<bool> {
        self.bring(|space| space.ensure_free(groups, keep, self.storage()))
    }

    fn bring(&self, ask: impl Fn(&mut SpaceMap) -> Result<std::result::Result<(), AllocationFailure>>) -> Result<bool> {
        loop {
            let asked = {
                let mut space = self.space.lock();
                space.set_commit_needs(self.list_entries(), self.dirty_leaves.load(Ordering::Relaxed));
                ask(&mut space)
            };
            let shortage = match asked {
                // The file was cut: nothing more may be promised.
                Err(error @ Error::Damaged(_)) => {
                    return Err(self.medium.pager.sticky_error().record("growing the archive", error));
                }
                Err(Error::NoSpace(_)) => return Ok(false),
                asked => asked?,
            };
            match shortage {
                Ok(()) => return Ok(true),
                Err(AllocationFailure::Load(number)) => self.load_region(number)?,
                Err(AllocationFailure::Full) => return Ok(false),
            }
        }
    }

    /// Promises groups that a commit is about to take, if they are there.
    pub(super) fn promise(&self, groups: u64) -> bool {
        self.space.lock().try_reserve(groups)
    }

    pub(super) fn unreserve(&self, groups: u64) {
        self.space.lock().unreserve(groups);
    }

    pub(super) fn reserved(self: &Arc<Self>, groups: u64) -> Reservation {
        Reservation { allocator: self.clone(), groups }
    }

    /// Allocates a page of at most four blocks, after the previous node where possible.
    /// `from_reserved` groups of it were promised before and are used up.
    pub(super) fn allocate_node(&self, blocks: u64, from_reserved: u64) -> Result<Run> {
        let run = self.space.lock().allocate_node(blocks, from_reserved);
        run.ok_or_else(|| Error::NoSpace("blocks kept for a commit are not there".into()))
    }

    // ---- regions ----

    /// Loads a region of the space map without waiting for a commit. The region is installed only
    /// if the tree is still that of the newest checkpoint. Otherwise it is read again, also after a
    /// failed read, since a later commit may have reused the blocks.
    pub(super) fn load_region(&self, number: u64) -> Result<()> {
        loop {
            if self.space.lock().is_loaded(number) {
                return Ok(());
            }
            let tree = self.tree.load_full();
            let base = tree.get(&self.medium.store, Key::new(number, kind::SPACE, 0), space::decode);
            let mut space = self.space.lock();
            if Arc::ptr_eq(&tree, &self.tree.load()) {
                return space.install(number, base?.as_deref(), self.storage());
            }
        }
    }

    /// Returns the bits of the blocks of a region that belong to pages of the last commit.
    pub(super) fn used_bits(&self, number: u64) -> Result<RegionBits> {
        self.load_region(number)?;
        Ok(self.space.lock().used_bits(number).copied().unwrap_or([0; REGION_WORDS]))
    }

    pub(super) fn tree(&self) -> Arc<Tree> {
        self.tree.load_full()
    }

    // ---- the way back (TXN-1, SPACE-3) ----

    /// Hands freed blocks out again when no commit and no reader needs them.
    pub(super) fn release_pending_frees(&self) {
        let oldest = self.medium.versions.oldest();
        let durable = self.medium.versions.durable().generation;
        self.space.lock().release_pending_frees(durable, oldest);
    }

    /// Frees pages that no commit named, and that readers of versions before `sequence` may see.
    pub(super) fn discard(&self, runs: Vec<Run>, sequence: u64) {
        self.space.lock().discard(runs, sequence);
        self.release_pending_frees();
    }

    /// Frees pages that no operation named.
    pub(super) fn discard_unseen(&self, runs: Vec<Run>) {
        // No reader ever saw these pages, but a reader of the present version may still see the
        // pages that had the same blocks before: wait for it.
        self.discard(runs, self.medium.versions.sequence());
    }

    pub(super) fn waits_for_commit(&self) -> bool {
        self.space.lock().waits_for_commit()
    }

    /// Returns whether pages that were freed up to this version are not free yet.
    pub(super) fn has_pending_frees_until(&self, last: u64) -> bool {
        self.space.lock().has_pending_frees_until(last)
    }

    pub(super) fn waits_for_readers(&self) -> bool {
        let durable = self.medium.versions.durable().generation;
        self.space.lock().waits_for_readers(durable)
    }

    // ---- steps of the leader of a commit ----

    /// Applies a commit after the last barrier of `record`: its pages are in use, and its freed
    /// blocks are pending. `promised` groups of its list pages are left and are given back.
    pub(super) fn committed(
        &self,
        record: CommitRecord,
        allocated: Vec<Run>,
        mut freed: Vec<Run>,
        sequence: u64,
        promised: u64,
    ) {
        {
            let mut space = self.space.lock();
            space.unreserve(promised);
            // An extent may name any blocks, also those of the header.
            freed.retain(|run| in_space(*run, space.total(), &self.medium.pager));
            space.apply_commit(record.generation, allocated.into_iter(), freed, sequence);
            space.set_commit_needs(0, self.dirty_leaves.load(Ordering::Relaxed));
        }
        self.medium.versions.set_durable(record);
    }

    /// Takes the regions that differ from the newest checkpoint for the next one (SPACE-4) and
    /// promises the groups to write them; returns None when there are too few.
    pub(super) fn begin_checkpoint(&self) -> Result<Option<(u64, Regions)>> {
        let Some(promised) = self.space.lock().reserve_checkpoint() else { return Ok(None) };
        let pending = self.space.lock().unapplied_regions();
        for number in pending {
            self.load_region(number).inspect_err(|_| self.space.lock().unreserve(promised))?;
        }
        Ok(Some((promised, self.space.lock().take_checkpoint())))
    }

    pub(super) fn end_checkpoint(&self, tree: Tree) {
        let mut space = self.space.lock();
        self.tree.store(Arc::new(tree));
        space.finish_checkpoint();
        space.evict(self.region_limit);
    }

    /// Undoes a checkpoint that no record names: marks its regions as changed again, and gives back
    /// its pages and the rest of its promise. None of its regions was evicted meanwhile.
    pub(super) fn undo_checkpoint(&self, regions: Regions, pages: Vec<Run>, promised: u64) -> Result<()> {
        let sequence = self.medium.versions.sequence();
        let mut space = self.space.lock();
        for (number, bits) in &regions {
            space.install_rebuilt(*number, bits, self.storage())?;
        }
        space.finish_checkpoint();
        space.unreserve(promised);
        space.discard(pages, sequence);
        Ok(())
    }

    // ---- opening ----

    pub(super) fn recover_lists(&self, allocated: Vec<Run>, freed: &[Run]) {
        self.space.lock().recover_lists(allocated.into_iter(), freed.iter().copied());
    }

    /// Finds a page that the map has behind the end of the file, as the newest record gives it: a
    /// writer would cut it off. An unreadable part of the map proves nothing.
    pub(super) fn find_behind_end(&self) -> Result<Option<Finding>> {
        let tree = self.tree();
        let last = known(tree.floor(&self.medium.store, Key::MAX, |key, _| Ok(key.object)))?.flatten();
        let (total, mut numbers) = {
            let space = self.space.lock();
            (space.total(), BTreeSet::from_iter(space.unapplied_regions()))
        };
        numbers.extend(last.into_iter().chain([total / REGION_BLOCKS]));
        let behind = numbers.range(total / REGION_BLOCKS..).take_while(|number| **number <= MAX_BLOCK / REGION_BLOCKS);
        for number in behind {
            let base = tree.get(&self.medium.store, Key::new(*number, kind::SPACE, 0), space::decode);
            let base = known(base)?.flatten();
            if let Some(block) = self.space.lock().first_used_past_end(*number, base.as_deref()) {
                let text = format!("the commit is of a file of {total} blocks, but a page has block {block}");
                return Ok(Some(Finding::new(FindingKind::Counter, Severity::Wrong, text).at_block(block)));
            }
        }
        Ok(None)
    }

    pub(super) fn recover_pending_frees(&self, generation: Generation, freed: Vec<Run>) {
        self.space.lock().recover_pending_frees(generation, freed);
    }

    /// Drops the map, to be rebuilt from the trees; returns its tree.
    pub(super) fn give_up_map(&self) -> Arc<Tree> {
        self.tree.swap(Arc::new(Tree::empty(TreeId::Space)))
    }

    /// Rebuilds the map: `used` has the used blocks of each region, `used_blocks` their total.
    pub(super) fn rebuild(&self, used_blocks: u64, used: impl Fn(u64) -> RegionBits) -> Result<()> {
        let mut space = self.space.lock();
        space.drop_recovered_lists(used_blocks);
        for number in 0..space.total().div_ceil(REGION_BLOCKS) {
            space.install_rebuilt(number, &used(number), self.storage())?;
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn map(&self) -> parking_lot::MutexGuard<'_, SpaceMap> {
        self.space.lock()
    }
}

impl Allocator {
    /// Waits until no erase is in progress; blocks that were being erased can be taken then.
    pub(super) fn await_erasing(&self) {
        drop(self.erasing.lock());
    }

    /// Loads the next region with unscanned free blocks, so that they are erased with the others;
    /// returns whether another one is left. While memory for regions is short the others wait, at
    /// the latest until the end.
    pub(super) fn look_step(&self) -> Result<bool> {
        let next = || self.space.lock().next_unscanned();
        let Some(number) = next() else { return Ok(false) };
        {
            let mut space = self.space.lock();
            if space.has_loaded_regions(self.region_limit) {
                space.evict(self.region_limit / 2);
                if space.has_loaded_regions(self.region_limit) {
                    return Ok(false);
                }
            }
        }
        self.load_region(number)?;
        Ok(next().is_some())
    }

    /// Loads the next region after an unclean open. Its free blocks for which the host reports data
    /// may be pages of a transaction that never committed. Returns whether more regions are left.
    pub(super) fn sweep_step(&self) -> Result<bool> {
        let Some(number) = self.space.lock().next_unswept() else { return Ok(false) };
        self.load_region(number)?;
        let mut space = self.space.lock();
        space.mark_swept(number);
        // The sweep visits the whole map, which is larger than the memory that it may take.
        space.evict(self.region_limit);
        Ok(space.next_unswept().is_some())
    }

    pub(super) fn restart_sweep(&self) {
        self.space.lock().restart_sweep();
    }

    /// Erases a batch of blocks that were free for a while. Blocks cannot be allocated while they
    /// are erased, so the file first grows, if it can, until `SPARE` groups are free.
    pub(super) fn erase_aged(&self) -> Result<()> {
        if self.space.lock().has_dirty() {
            self.has_groups(SPARE, keep_of(false))?;
        }
        self.erase_step(false).map(drop)
    }

    /// Erases every free block that holds old ciphertext.
    pub(super) fn erase_all(&self) -> Result<()> {
        loop {
            let more = self.look_at_some()?;
            while self.erase_step(true)? {}
            let mut space = self.space.lock();
            let overwritten = space.overwrite_dirty(&mut |run| self.overwrite(run));
            overwritten.map_err(|error| self.erasing_failed(error))?;
            if !more {
                return Ok(());
            }
            space.evict(self.region_limit / 2);
        }
    }

    /// Loads some of the regions in which blocks came free unseen; returns whether there are more.
    fn look_at_some(&self) -> Result<bool> {
        for _ in 0..self.region_limit {
            let Some(number) = self.space.lock().next_unscanned() else { return Ok(false) };
            self.load_region(number)?;
        }
        Ok(self.space.lock().next_unscanned().is_some())
    }

    /// Erases one batch; returns whether there was anything.
    fn erase_step(&self, all: bool) -> Result<bool> {
        let _erasing = self.erasing.lock();
        let runs = self.space.lock().begin_erase(all);
        for (index, (run, keep)) in runs.iter().enumerate() {
            match self.erase(*run, *keep) {
                Ok(backed) => self.space.lock().finish_erase(*run, backed),
                Err(error) => {
                    // They hold old ciphertext as before, for the next attempt.
                    let mut space = self.space.lock();
                    for (run, _) in &runs[index..] {
                        space.abort_erase(*run);
                    }
                    drop(space);
                    return Err(self.erasing_failed(error));
                }
            }
        }
        Ok(!runs.is_empty())
    }

    /// Punches the blocks, or overwrites them where they must stay allocated or the host refuses.
    /// Returns whether they are still allocated.
    fn erase(&self, run: Run, keep: bool) -> Result<bool> {
        self.medium.pager.sticky_error().check()?;
        if self.storage().has_atomic_barrier() {
            // No host must keep space for later writes here.
            return self.storage().punch(run.offset(), run.bytes()).map(|()| keep);
        }
        if !keep {
            match self.storage().punch(run.offset(), run.bytes()) {
                Ok(()) => return Ok(false),
                // Punching may need room for the host's own lists; overwriting does not.
                Err(Error::Unsupported(_) | Error::NoSpace(_)) => {}
                Err(error) => return Err(error),
            }
        }
        self.overwrite(run)?;
        Ok(true)
    }

    fn erasing_failed(&self, error: Error) -> Error {
        match error {
            Error::NoSpace(_) | Error::WriteFailed(_) => error,
            error => self.medium.pager.sticky_error().record("erasing freed blocks", error),
        }
    }

    fn overwrite(&self, run: Run) -> Result<()> {
        self.medium.pager.sticky_error().check()?;
        if self.storage().has_atomic_barrier() {
            return self.storage().punch(run.offset(), run.bytes());
        }
        let mut at = run.offset();
        let end = at + run.bytes();
        let mut noise = vec![0; OVERWRITE_STEP.min(run.bytes()) as usize];
        while at < end {
            let count = (end - at).min(OVERWRITE_STEP) as usize;
            self.medium.environment.fill_random(&mut noise[..count])?;
            self.storage().write_at(at, &noise[..count])?;
            at += count as u64;
        }
        Ok(())
    }

    /// Loads the regions at the end that may be free, so that they can be cut off.
    pub(super) fn load_tail(&self) -> Result<()> {
        loop {
            let unknown = self.space.lock().unloaded_tail_region();
            let Some(number) = unknown else { return Ok(()) };
            self.load_region(number)?;
        }
    }

    /// Cuts free blocks off the end of the map; returns the bytes that the file has to keep.
    pub(super) fn trim_tail(&self) -> u64 {
        self.space.lock().trim_tail() * BLOCK
    }

    #[cfg(test)]
    pub(super) fn is_erasing(&self) -> bool {
        self.erasing.is_locked()
    }
}
