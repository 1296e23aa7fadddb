//! In-memory space map: regions loaded on demand, states of free blocks, and reservations.
//!
//! # Invariants
//! SPACE-1  A free block is in exactly one state: pending free -> free unerased (dirty) -> erasing
//!     -> free erased. Pending and erasing blocks are busy; the others can be allocated, unerased
//!     ones first, because overwriting erases them. A block that could not be erased is free
//!     unerased again.
//! SPACE-2  `reserved` groups of four free, host-allocated blocks exist at any time, in addition to
//!     the reserve. A page of n blocks consumes at most ceil(n / 4) groups. So reserved data can
//!     always be written.
//! SPACE-3  A run leaves `pending_frees` only when a commit after its freeing commit is
//!     durable and every reader that could see it is gone. Pages that no commit named wait only for
//!     readers.
//! SPACE-4  `used` is exactly the set of pages of the last durable commit. A checkpoint writes it
//!     before the running commit's lists are applied.

mod erase;
mod region;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::error::Result;
use crate::format::space::{REGION_WORDS, RegionBits};
use crate::format::{BLOCK, Generation, REGION_BLOCKS, Run};
use crate::storage::Storage;
use region::{Region, fill};

/// Groups of four blocks that only deletes, commits and unmount may use: 1 MiB.
pub(crate) const RESERVE_GROUPS: u64 = 64;
/// File growth per step in blocks: minimum 1 MiB, maximum 16 MiB.
const GROW_BLOCKS: (u64, u64) = (256, 4096);

/// Freed blocks that are not reusable yet.
struct PendingFree {
    /// Commit that freed the blocks; `None` for pages that no commit named.
    freed_by: Option<Generation>,
    /// Readers of states before this sequence number may still see the blocks.
    sequence: u64,
    runs: Vec<Run>,
}

/// Reason why a reservation or allocation is not possible yet. `txn::space_wait` waits for it to
/// pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocationFailure {
    /// The region is not loaded and may have free groups.
    Load(u64),
    /// The host has no more space; later commits may make freed blocks reusable.
    Full,
}

/// Space that a reservation must leave for others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Headroom {
    /// Reserve plus the maximum need of the next commit: for changes that consume space.
    Reserve,
    /// Minimum that the next commit cannot do without: for deletes and writeback of accepted data,
    /// which free space or use reserved space.
    Lists,
    /// No headroom: for the commit itself.
    Nothing,
}

#[derive(Default)]
pub(crate) struct SpaceMap {
    total: u64,
    used_blocks: u64,
    used_loaded: u64,
    regions: BTreeMap<u64, Box<Region>>,
    /// Loaded regions with at least one free backed group.
    with_free_groups: BTreeSet<u64>,
    /// Lists of recovered commits for unloaded regions, in order: (allocated, run).
    unapplied: HashMap<u64, Vec<(bool, Run)>>,
    pending_frees: VecDeque<PendingFree>,
    /// Unloaded regions in which blocks were freed. They hold old ciphertext that no other step
    /// would find.
    unscanned: BTreeSet<u64>,
    groups: u64,
    reserved: u64,
    /// Number of loaded regions that differ from the checkpoint.
    changed: u64,
    /// Set while a checkpoint is being written, before regions can be loaded from it.
    checkpointing: bool,
    /// Entries in the lists of the open transaction.
    list_entries: u64,
    /// Leaves that the flush of the next commit changes.
    dirty_leaves: u64,
    erasing: u64,
    sweep: Option<u64>,
    /// Set when neither the host nor the limit lets the file grow.
    host_full: bool,
    /// Maximum number of blocks of the file; a larger file does not grow.
    limit: u64,
    /// Blocks allocated to pages that no durable commit names yet.
    fresh: u64,
    /// Block after the most recently allocated node.
    next_node: u64,
    /// Block ranges that no page may touch.
    reserved_by_layout: &'static [(u64, u64)],
}

/// Splits a run at region boundaries into (region, start, end).
fn split_by_region(run: Run) -> impl Iterator<Item = (u64, u64, u64)> {
    let mut at = run.address;
    std::iter::from_fn(move || {
        if at >= run.end() {
            return None;
        }
        let number = at / REGION_BLOCKS;
        let start = at % REGION_BLOCKS;
        let end = (start + run.end() - at).min(REGION_BLOCKS);
        at += end - start;
        Some((number, start, end))
    })
}

impl SpaceMap {
    /// Creates the map of a file of `total` blocks with `used_blocks` in pages; no region is
    /// loaded. `sweep` is set when the last session did not close cleanly, so that free blocks may
    /// hold unreferenced pages.
    pub(crate) fn new(total: u64, used_blocks: u64, sweep: bool, reserved: &'static [(u64, u64)]) -> SpaceMap {
        SpaceMap {
            total,
            used_blocks,
            sweep: sweep.then_some(0),
            limit: u64::MAX,
            reserved_by_layout: reserved,
            ..SpaceMap::default()
        }
    }

    /// Reserves groups for a running commit; returns false when too few are free.
    pub(crate) fn try_reserve(&mut self, groups: u64) -> bool {
        let is_free = self.groups >= self.reserved + groups;
        if is_free {
            self.reserved += groups;
        }
        is_free
    }

    /// Reserves the maximum need of a checkpoint of all changes and returns the number of groups,
    /// or `None` when too few are free.
    pub(crate) fn reserve_checkpoint(&mut self) -> Option<u64> {
        let groups = self.checkpoint_groups();
        self.try_reserve(groups).then_some(groups)
    }

    fn recount(&mut self, number: u64) {
        if let Some(region) = self.regions.get_mut(&number) {
            self.groups = self.groups.wrapping_add_signed(region.recount());
            if region.groups > 0 {
                self.with_free_groups.insert(number);
            } else {
                self.with_free_groups.remove(&number);
            }
        }
    }

    // ---- loading ----

    /// Adds the lists of a recovered commit, oldest commit first, before any region is loaded.
    pub(crate) fn recover_lists(&mut self, allocated: impl Iterator<Item = Run>, freed: impl Iterator<Item = Run>) {
        let lists = allocated.map(|run| (true, run)).chain(freed.map(|run| (false, run)));
        for (set, run) in lists {
            for (number, start, end) in split_by_region(run) {
                self.add_unapplied(number, start, end, set);
            }
        }
    }

    fn add_unapplied(&mut self, number: u64, start: u64, end: u64, set: bool) {
        let run = Run::new(number * REGION_BLOCKS + start, end - start);
        self.unapplied.entry(number).or_default().push((set, run));
    }

    /// Adds the blocks that the newest recovered commit freed; they stay pending until the next
    /// commit.
    pub(crate) fn recover_pending_frees(&mut self, freed_by: Generation, runs: Vec<Run>) {
        if !runs.is_empty() {
            self.pending_frees.push_back(PendingFree { freed_by: Some(freed_by), sequence: 0, runs });
        }
    }

    pub(crate) fn is_loaded(&self, number: u64) -> bool {
        self.regions.contains_key(&number)
    }

    pub(crate) fn unapplied_regions(&self) -> Vec<u64> {
        self.unapplied.keys().copied().collect()
    }

    /// Returns the used blocks of an unloaded region: its checkpoint value with the recovered lists
    /// applied.
    fn recovered_bits(&self, number: u64, base: Option<&RegionBits>) -> RegionBits {
        let mut used = base.copied().unwrap_or([0; REGION_WORDS]);
        for (set, run) in self.unapplied.get(&number).into_iter().flatten() {
            let start = run.address % REGION_BLOCKS;
            fill(&mut used, start, start + run.blocks, *set);
        }
        used
    }

    /// Returns the first used block of a region past the end of the file; `base` is its checkpoint
    /// value.
    pub(crate) fn first_used_past_end(&self, number: u64, base: Option<&RegionBits>) -> Option<u64> {
        let used = self.regions.get(&number).map_or_else(|| self.recovered_bits(number, base), |region| region.used);
        let start = self.total.saturating_sub(number * REGION_BLOCKS);
        let is_used = |block: &u64| used[(block / 64) as usize] >> (block % 64) & 1 == 1;
        (start..REGION_BLOCKS).find(is_used).map(|block| number * REGION_BLOCKS + block)
    }

    /// Loads a region from its checkpoint value (`None`: no page in it): applies the recovered
    /// lists and queries the host for free blocks that hold data.
    pub(crate) fn install(&mut self, number: u64, base: Option<&RegionBits>, storage: &dyn Storage) -> Result<()> {
        if self.regions.contains_key(&number) {
            return Ok(());
        }
        let mut region = Box::new(Region::new(number, self.total, self.reserved_by_layout));
        region.used = self.recovered_bits(number, base);
        region.changed = self.unapplied.get(&number).is_some_and(|lists| !lists.is_empty());
        for w in 0..region.used.len() {
            region.busy[w] |= region.used[w];
        }
        for run in self.pending_frees.iter().flat_map(|w| &w.runs) {
            for (n, start, end) in split_by_region(*run) {
                if n == number {
                    fill(&mut region.busy, start, end, true);
                }
            }
        }
        let base_byte = region.base() * BLOCK;
        let end_byte = ((region.base() + REGION_BLOCKS).min(self.total)) * BLOCK;
        let mut at = base_byte;
        while at < end_byte {
            let Some(data) = storage.next_data(at)? else { break };
            if data.start >= end_byte {
                break;
            }
            let (start, end) = (data.start.max(base_byte) - base_byte, data.end.min(end_byte) - base_byte);
            // A block only partly allocated by the host, as a refused write leaves it where host
            // blocks are smaller, must be erased but does not count as allocated.
            fill(&mut region.dirty, start / BLOCK, end.div_ceil(BLOCK), true);
            fill(&mut region.backed, start.div_ceil(BLOCK), end / BLOCK, true);
            at = data.end.max(at + BLOCK);
        }
        for w in 0..region.dirty.len() {
            region.dirty[w] &= !region.busy[w];
            region.backed[w] &= region.dirty[w];
        }
        self.unapplied.remove(&number);
        self.unscanned.remove(&number);
        self.changed += u64::from(region.changed);
        self.used_loaded += region.count_used();
        self.regions.insert(number, region);
        self.recount(number);
        Ok(())
    }

    /// Loads a region whose pages were found by walking the trees; it differs from any checkpoint.
    pub(crate) fn install_rebuilt(&mut self, number: u64, bits: &RegionBits, storage: &dyn Storage) -> Result<()> {
        self.install(number, Some(bits), storage)?;
        if let Some(region) = self.regions.get_mut(&number).filter(|r| !r.changed) {
            region.changed = true;
            self.changed += 1;
        }
        Ok(())
    }

    pub(crate) fn drop_recovered_lists(&mut self, used_blocks: u64) {
        self.unapplied.clear();
        self.used_blocks = used_blocks;
    }

    /// Evicts loaded regions equal to the checkpoint until at most `max_loaded` are loaded; does
    /// nothing while a checkpoint is being written.
    pub(crate) fn evict(&mut self, max_loaded: usize) {
        if self.checkpointing {
            return;
        }
        let mut spare = self.groups.saturating_sub(self.reserved + self.commit_groups() + RESERVE_GROUPS);
        let mut excess = self.regions.len().saturating_sub(max_loaded);
        let numbers: Vec<u64> = self.regions.keys().copied().collect();
        for number in numbers {
            if excess == 0 {
                return;
            }
            let Some(region) = self.regions.get(&number) else { continue };
            let busy_only_by_use = Region::new(number, self.total, self.reserved_by_layout);
            let plain = (0..region.used.len())
                .all(|w| region.busy[w] == region.used[w] | busy_only_by_use.busy[w] && region.dirty[w] == 0);
            if region.changed || !plain || region.groups > spare {
                continue;
            }
            spare -= region.groups;
            self.groups -= region.groups;
            self.used_loaded -= region.count_used();
            self.with_free_groups.remove(&number);
            self.regions.remove(&number);
            excess -= 1;
        }
    }

    // ---- reservations and allocation ----

    /// Reserves `groups` groups of four blocks, growing the file if needed. Errors:
    /// `Ok(Err(failure))` when that is not possible now; the map is then unchanged.
    pub(crate) fn reserve(
        &mut self,
        groups: u64,
        headroom: Headroom,
        storage: &dyn Storage,
    ) -> Result<std::result::Result<(), AllocationFailure>> {
        let provided = self.ensure_free(groups, headroom, storage)?;
        if provided.is_ok() {
            self.reserved += groups;
        }
        Ok(provided)
    }

    /// Like [`Self::reserve`], but only ensures that the groups are free, without reserving them.
    pub(crate) fn ensure_free(
        &mut self,
        groups: u64,
        headroom: Headroom,
        storage: &dyn Storage,
    ) -> Result<std::result::Result<(), AllocationFailure>> {
        let (headroom, least) = match headroom {
            Headroom::Reserve => (self.commit_groups() + RESERVE_GROUPS, None),
            // These may use the space of a checkpoint: without space the checkpoint is postponed.
            Headroom::Lists => (self.commit_groups(), Some(self.list_groups() + self.dirty_leaves)),
            Headroom::Nothing => (0, None),
        };
        let wanted = self.reserved + groups + headroom;
        self.host_full = false;
        while self.groups < wanted {
            if let Err(shortage) = self.extend(wanted - self.groups, storage)? {
                if least.is_some_and(|least| self.groups >= self.reserved + groups + least) {
                    break;
                }
                return Ok(Err(shortage));
            }
        }
        Ok(Ok(()))
    }

    pub(crate) fn unreserve(&mut self, groups: u64) {
        debug_assert!(self.reserved >= groups);
        self.reserved = self.reserved.saturating_sub(groups);
    }

    /// Obtains more free backed groups: from holes of loaded regions, then unloaded regions, then
    /// growth.
    fn extend(&mut self, missing: u64, storage: &dyn Storage) -> Result<std::result::Result<(), AllocationFailure>> {
        if !self.host_full {
            if self.allocate_holes(missing, storage)? {
                return Ok(Ok(()));
            }
            if let Some(number) = self.region_to_load() {
                return Ok(Err(AllocationFailure::Load(number)));
            }
            // Includes a region entirely past the end: the checkpoint and later lists may still
            // name pages from before the file was truncated.
            let last = (self.total + self.growth(missing)).saturating_sub(1) / REGION_BLOCKS;
            if let Some(number) = (self.total / REGION_BLOCKS..=last).find(|n| !self.regions.contains_key(n)) {
                return Ok(Err(AllocationFailure::Load(number)));
            }
            if self.grow(missing, storage)? || self.allocate_unwritten(missing, storage)? {
                return Ok(Ok(()));
            }
            self.host_full = true;
        }
        Ok(Err(self.next_unloaded().map_or(AllocationFailure::Full, AllocationFailure::Load)))
    }

    fn next_unloaded(&self) -> Option<u64> {
        (0..self.total.div_ceil(REGION_BLOCKS)).find(|n| !self.regions.contains_key(n))
    }

    /// Returns an unloaded region if unloaded regions hold a significant number of free blocks.
    /// Reading a full map to find a few blocks does not pay.
    fn region_to_load(&self) -> Option<u64> {
        let count = self.total.div_ceil(REGION_BLOCKS);
        let loaded = self.regions.len() as u64;
        if loaded >= count {
            return None;
        }
        // Regions at and past the end of the file are partial and counted individually; the others
        // are complete.
        let at_end = self.regions.range(self.total / REGION_BLOCKS..);
        let lacking: u64 = at_end.map(|(_, r)| REGION_BLOCKS - self.total.saturating_sub(r.base())).sum();
        let unloaded_blocks = self.total.saturating_sub(loaded * REGION_BLOCKS - lacking);
        let unloaded_free = unloaded_blocks.saturating_sub(self.used_blocks.saturating_sub(self.used_loaded));
        if unloaded_free * 32 < unloaded_blocks { None } else { self.next_unloaded() }
    }

    /// Allocates free blocks that are holes on the host. Returns false when there are none or the
    /// host is full.
    fn allocate_holes(&mut self, missing: u64, storage: &dyn Storage) -> Result<bool> {
        let numbers: Vec<u64> = self.regions.keys().copied().collect();
        for number in numbers {
            let Some(region) = self.regions.get_mut(&number) else { continue };
            let Some((start, length)) = region.first_hole() else { continue };
            let end = start + length.min((missing * 4).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1));
            match storage.allocate((region.base() + start) * BLOCK, (end - start) * BLOCK) {
                Ok(()) => {}
                Err(crate::Error::NoSpace(_)) => return Ok(false),
                Err(error) => return Err(error),
            }
            fill(&mut region.backed, start, end, true);
            self.recount(number);
            return Ok(true);
        }
        Ok(false)
    }

    /// Allocates holes piecewise on a full host. A full host allocates nothing new, but reports
    /// blocks that are allocated and were never written as holes: a previous session left its
    /// reserve so. Only an allocation request distinguishes them from real holes. Each position is
    /// tried once, from the end of the file, where the reserve usually is; blocks that became holes
    /// later are real ones.
    fn allocate_unwritten(&mut self, missing: u64, storage: &dyn Storage) -> Result<bool> {
        let numbers: Vec<u64> = self.regions.keys().rev().copied().collect();
        for number in numbers {
            let mut most = missing.saturating_mul(4).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1);
            while let Some(region) = self.regions.get_mut(&number)
                && let Some((first, end)) = region.last_hole()
            {
                let start = first.max(end.saturating_sub(most));
                match storage.allocate((region.base() + start) * BLOCK, (end - start) * BLOCK) {
                    Ok(()) => {
                        region.refused_from = start;
                        fill(&mut region.backed, start, end, true);
                        self.recount(number);
                        return Ok(true);
                    }
                    Err(crate::Error::NoSpace(_)) if end - start > 4 => most = ((end - start) / 2).next_multiple_of(4),
                    Err(crate::Error::NoSpace(_)) => region.refused_from = start,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(false)
    }

    /// Grows the file by allocating blocks on the host and loads the regions reached. Returns false
    /// when the host is full or the limit is reached.
    fn grow(&mut self, missing: u64, storage: &dyn Storage) -> Result<bool> {
        let comfortable = self.growth(missing);
        if comfortable == 0 {
            return Ok(false);
        }
        for step in [comfortable, self.whole_groups(missing * 4 + 4).min(comfortable)] {
            match storage.allocate(self.total * BLOCK, step * BLOCK) {
                Ok(()) => {
                    let old = self.total;
                    let reserved = self.reserved_by_layout;
                    self.total += step;
                    for (number, start, end) in split_by_region(Run::new(old, step)) {
                        let new = || Box::new(Region::new(number, self.total, reserved));
                        let region = self.regions.entry(number).or_insert_with(new);
                        fill(&mut region.busy, start, end, false);
                        fill(&mut region.backed, start, end, true);
                        // A forcibly truncated file has pages of the map past its end.
                        for w in 0..region.used.len() {
                            region.busy[w] |= region.used[w];
                            region.backed[w] &= !region.used[w];
                        }
                        self.recount(number);
                    }
                    return Ok(true);
                }
                Err(crate::Error::NoSpace(_)) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(false)
    }

    /// Allocates a run of `blocks` free backed blocks, consuming up to `from_reserved` reserved
    /// groups. Prefers unerased blocks, because overwriting erases them. Returns `None` when no run
    /// is long enough; the caller then requests shorter ones.
    pub(crate) fn allocate(&mut self, blocks: u64, from_reserved: u64) -> Option<Run> {
        let found = self.first_fit(blocks)?;
        Some(self.take(found, blocks, from_reserved))
    }

    /// Like [`Self::allocate`], for tree nodes of commits: places each node after the previous one,
    /// because each separate place costs a disk request.
    ///
    /// A commit replaces about as many nodes as it writes, so groups filled with nodes are freed as
    /// whole groups and filled again. Where whole groups are scarce, blocks of broken groups are
    /// used first: reservations are counted in whole groups and fail without them.
    pub(crate) fn allocate_node(&mut self, blocks: u64, from_reserved: u64) -> Option<Run> {
        let next = self.next_node;
        let after_last_node = |map: &Self| {
            map.regions.get(&(next / REGION_BLOCKS)).filter(|r| r.fits_at(next % REGION_BLOCKS, blocks)).map(|_| next)
        };
        let group = |map: &Self, dirty| {
            let mut regions = map.with_free_groups.iter().filter_map(|n| map.regions.get(n));
            regions.find_map(|r| r.find(blocks.max(4), dirty).map(|start| r.base() + start))
        };
        let started = !next.is_multiple_of(4);
        let scarce = self.groups <= self.reserved + self.checkpoint_groups() + RESERVE_GROUPS;
        let found = started
            .then(|| after_last_node(self))
            .flatten()
            .or_else(|| scarce.then(|| self.first_fit(blocks)).flatten())
            .or_else(|| group(self, true))
            .or_else(|| after_last_node(self))
            .or_else(|| group(self, false))
            .or_else(|| self.first_fit(blocks))?;
        let run = self.take(found, blocks, from_reserved);
        self.next_node = run.end();
        Some(run)
    }

    fn first_fit(&self, blocks: u64) -> Option<u64> {
        [true, false].into_iter().find_map(|dirty| {
            // Broken groups also exist in regions without a whole free group, so small pages search
            // all regions.
            let numbers: Box<dyn Iterator<Item = &u64>> =
                if blocks < 4 { Box::new(self.regions.keys()) } else { Box::new(self.with_free_groups.iter()) };
            numbers
                .filter_map(|n| self.regions.get(n))
                .find_map(|r| r.find(blocks, dirty).map(|start| r.base() + start))
        })
    }

    fn take(&mut self, address: u64, blocks: u64, from_reserved: u64) -> Run {
        let (number, start) = (address / REGION_BLOCKS, address % REGION_BLOCKS);
        if let Some(region) = self.regions.get_mut(&number) {
            region.occupy(start, start + blocks);
        }
        self.recount(number);
        self.reserved = self.reserved.saturating_sub(from_reserved);
        self.fresh += blocks;
        Run::new(address, blocks)
    }

    // ---- freeing ----

    /// Frees blocks that no commit names (abandoned, or freed in the transaction that wrote them):
    /// reusable when readers from before `sequence` are gone.
    pub(crate) fn discard(&mut self, runs: Vec<Run>, sequence: u64) {
        self.fresh = self.fresh.saturating_sub(runs.iter().map(|run| run.blocks).sum());
        if !runs.is_empty() {
            self.pending_frees.push_back(PendingFree { freed_by: None, sequence, runs });
        }
    }

    /// Applies a durable commit: its allocated blocks become used, its freed blocks pending.
    pub(crate) fn apply_commit(
        &mut self,
        generation: Generation,
        allocated: impl Iterator<Item = Run>,
        freed: Vec<Run>,
        sequence: u64,
    ) {
        for run in allocated {
            self.used_blocks = self.used_blocks.saturating_add(run.blocks);
            self.fresh = self.fresh.saturating_sub(run.blocks);
            self.mark_used(run, true);
        }
        for run in &freed {
            self.used_blocks = self.used_blocks.saturating_sub(run.blocks);
            self.mark_used(*run, false);
        }
        if !freed.is_empty() {
            self.pending_frees.push_back(PendingFree { freed_by: Some(generation), sequence, runs: freed });
        }
    }

    fn mark_used(&mut self, run: Run, used: bool) {
        for (number, start, end) in split_by_region(run) {
            if let Some(region) = self.regions.get_mut(&number) {
                // Not an invariant: the archive states which blocks are used, and may lie. So the
                // actual changes are counted.
                self.used_loaded = self.used_loaded.wrapping_add_signed(region.set_used(start, end, used));
                self.changed += u64::from(!region.changed);
                region.changed = true;
            } else {
                self.add_unapplied(number, start, end, used);
            }
        }
    }

    /// Makes pending blocks reusable (SPACE-3). `durable` is the last durable commit, `oldest` the
    /// sequence of the oldest state in use.
    pub(crate) fn release_pending_frees(&mut self, durable: Generation, oldest: u64) {
        let mut remaining = VecDeque::with_capacity(self.pending_frees.len());
        while let Some(entry) = self.pending_frees.pop_front() {
            let passed = entry.freed_by.is_none_or(|generation| generation < durable);
            if !passed || entry.sequence > oldest {
                remaining.push_back(entry);
                continue;
            }
            let mut touched = BTreeSet::new();
            for (number, start, end) in entry.runs.iter().flat_map(|run| split_by_region(*run)) {
                // An unloaded region learns from the host that the blocks hold data when it is
                // loaded.
                let Some(region) = self.regions.get_mut(&number) else {
                    self.unscanned.insert(number);
                    continue;
                };
                fill(&mut region.busy, start, end, false);
                fill(&mut region.dirty, start, end, true);
                fill(&mut region.backed, start, end, true);
                touched.insert(number);
            }
            for number in touched {
                self.recount(number);
            }
        }
        self.pending_frees = remaining;
    }

    pub(crate) fn waits_for_commit(&self) -> bool {
        self.pending_frees.iter().any(|w| w.freed_by.is_some())
    }

    /// Returns whether blocks freed up to this version wait for commits or readers.
    pub(crate) fn has_pending_frees_until(&self, last: u64) -> bool {
        self.pending_frees.iter().any(|entry| entry.sequence <= last)
    }

    /// Returns whether blocks freed by commits up to `durable` are held only by readers.
    pub(crate) fn waits_for_readers(&self, durable: Generation) -> bool {
        self.pending_frees.iter().any(|w| w.freed_by.is_none_or(|generation| generation < durable))
    }

    // ---- checkpoint ----

    /// Returns the values to write at a checkpoint (SPACE-4), of regions changed since the last
    /// one, and marks them unchanged. Regions with recovered lists must be loaded before. Until
    /// [`Self::finish_checkpoint`] no region is evicted.
    pub(crate) fn take_checkpoint(&mut self) -> Vec<(u64, RegionBits)> {
        let mut values = Vec::new();
        self.changed = 0;
        self.checkpointing = true;
        for region in self.regions.values_mut().filter(|r| r.changed) {
            region.changed = false;
            values.push((region.number, region.used));
        }
        values
    }

    /// Marks the checkpoint as durable: regions can be loaded from it.
    pub(crate) fn finish_checkpoint(&mut self) {
        self.checkpointing = false;
    }

    /// Returns all blocks that belong to a page, for `check`; all regions must be loaded.
    pub(crate) fn used_bits(&self, number: u64) -> Option<&RegionBits> {
        self.regions.get(&number).map(|r| &r.used)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockCounts {
    pub(crate) total: u64,
    /// Blocks of pages, committed or not.
    pub(crate) used: u64,
    /// Blocks reserved for dirty data and dirty nodes.
    pub(crate) reserved: u64,
    /// Blocks held back for deletes, commits and unmount.
    pub(crate) headroom: u64,
    /// Blocks by which the file may still grow under its limit.
    pub(crate) growth: u64,
}

impl SpaceMap {
    /// Limits the length of the file. For reservations a file at its limit is equivalent to a full
    /// host.
    pub(crate) fn set_limit(&mut self, blocks: u64) {
        self.limit = blocks;
    }

    pub(crate) fn blocks(&self) -> BlockCounts {
        BlockCounts {
            total: self.total,
            used: self.used_blocks.saturating_add(self.fresh),
            reserved: self.reserved * 4,
            headroom: (RESERVE_GROUPS + self.commit_groups()) * 4,
            growth: self.limit.saturating_sub(self.total),
        }
    }

    /// Returns the memory used by loaded regions in bytes.
    pub(crate) fn memory(&self) -> u64 {
        (self.regions.len() * size_of::<Region>()) as u64
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn used_blocks(&self) -> u64 {
        self.used_blocks
    }

    pub(crate) fn set_commit_needs(&mut self, list_entries: u64, dirty_leaves: u64) {
        (self.list_entries, self.dirty_leaves) = (list_entries, dirty_leaves);
    }

    /// Returns the groups that the next commit needs in addition to the reserved ones: for the
    /// leaves that its flush changes, and for a checkpoint.
    fn commit_groups(&self) -> u64 {
        self.dirty_leaves + self.checkpoint_groups()
    }

    /// A path of the space tree, one node and its splits for each changed region (they may all be
    /// far apart), and list pages of 2,000 entries.
    fn checkpoint_groups(&self) -> u64 {
        let regions = self.changed + self.unapplied.len() as u64;
        12 + regions + regions / 4 + self.list_entries / 1000
    }

    /// Returns the maximum number of groups for list pages of the next commit, 2,000 entries each
    /// in two lists: for pages listed so far, reserved pages, and pages of the calling operation.
    fn list_groups(&self) -> u64 {
        3 + (self.list_entries + self.reserved) / 2000
    }

    /// Returns the number of blocks to grow by; 0 when the limit is reached.
    fn growth(&self, missing: u64) -> u64 {
        let comfortable = (self.total / 16).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1).max((missing * 4).min(GROW_BLOCKS.1));
        let last_group = self.limit / 4 * 4;
        self.whole_groups(comfortable).min(last_group.saturating_sub(self.total))
    }

    /// Rounds a growth step so that the file ends with a whole group. Small pages fill broken
    /// groups first, so one at the end would hold a page permanently and the tail could never be
    /// truncated.
    fn whole_groups(&self, step: u64) -> u64 {
        (self.total + step).next_multiple_of(4) - self.total
    }
}
