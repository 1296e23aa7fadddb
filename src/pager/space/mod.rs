//! The space map in memory: regions loaded on demand, the states of free blocks, and reservations.
//!
//! # Invariants
//! SPACE-1  A free block is in exactly one state: waiting -> dirty-free -> erasing -> erased. Waiting and erasing blocks are busy; the others can be
//!     allocated, dirty-free ones first, since overwriting is erasing. What could not be erased is dirty-free again.
//! SPACE-2  `reserved` groups of four free, host-allocated blocks exist at any time, beside the reserve; a page of n blocks consumes at most
//!     ceil(n / 4) groups. So what was reserved can always be written.
//! SPACE-3  A run leaves `waiting` only when a later commit than the one that freed it is durable (a page that no commit named waits for none) and
//!     every reader that could see it is gone.
//! SPACE-4  `used` is exactly the set of pages of the last durable commit; a checkpoint writes it before the running commit's lists are applied.

mod erase;
mod limit;
mod region;

pub(crate) use limit::BlockCounts;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use crate::error::Result;
use crate::format::space::{REGION_WORDS, RegionBits};
use crate::format::{BLOCK, Generation, REGION_BLOCKS, Run};
use crate::storage::Storage;
use region::{Region, fill};

/// Groups of four blocks that only deletes, commits and the unmount may use: 1 MiB.
pub(crate) const RESERVE_GROUPS: u64 = 64;
/// Growth of the file in blocks: at least 1 MiB, at most 16 MiB at once.
const GROW_BLOCKS: (u64, u64) = (256, 4096);

/// Blocks freed and not yet reusable.
struct PendingFree {
    /// Commit that freed them; None for pages that no commit ever named.
    freed_by: Option<Generation>,
    /// Readers of states before this operation may still see them.
    sequence: u64,
    runs: Vec<Run>,
}

/// Why a reservation or allocation is not possible yet. (How callers wait then is `txn::shortage`.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AllocationFailure {
    /// This region is not loaded and may have free groups.
    Load(u64),
    /// Nothing more can be had from the host; freed blocks may become reusable by further commits.
    Full,
}

/// What a reservation has to leave to others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Headroom {
    /// The reserve, and what the next commit needs at most: for changes that ask for more space.
    Reserve,
    /// What the next commit cannot do without: for deletes and write-out of what was accepted, which free space or keep a promise.
    Lists,
    /// For the commit itself.
    Nothing,
}

/// The allocator's knowledge of one archive.
pub(crate) struct SpaceMap {
    total: u64,
    used_blocks: u64,
    /// Those of them that the loaded regions know.
    used_loaded: u64,
    regions: BTreeMap<u64, Box<Region>>,
    /// Loaded regions with at least one free backed group.
    with_free_groups: BTreeSet<u64>,
    /// Lists of recovered commits for regions that are not loaded: (allocated, run), in order.
    unapplied: HashMap<u64, Vec<(bool, Run)>>,
    pending_frees: VecDeque<PendingFree>,
    /// Regions that are not loaded and in which blocks came free: they hold old ciphertext, which nothing else would look for.
    unscanned: BTreeSet<u64>,
    groups: u64,
    reserved: u64,
    /// Loaded regions that differ from the checkpoint.
    changed: u64,
    /// A checkpoint is being written that nobody could load from yet.
    checkpointing: bool,
    /// Entries in the lists of the open transaction.
    list_entries: u64,
    erasing: u64,
    sweep: Option<u64>,
    /// Neither the host nor the limit lets the file grow any more.
    host_full: bool,
    /// Blocks that the file may have at most; one that has more already does not grow.
    limit: u64,
    /// Blocks allocated to pages that no durable commit names yet.
    fresh: u64,
    /// The block behind the newest node.
    next_node: u64,
    /// Block ranges that no page may touch.
    reserved_by_layout: &'static [(u64, u64)],
}

/// Splits a run at region borders.
fn parts(run: Run) -> impl Iterator<Item = (u64, u64, u64)> {
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
    /// The map of a file of `total` blocks with `used_blocks` in pages; no region is loaded.
    /// `sweep`: the last session did not close, so free blocks may hold pages that nobody names.
    pub(crate) fn new(total: u64, used_blocks: u64, sweep: bool, reserved: &'static [(u64, u64)]) -> SpaceMap {
        SpaceMap {
            total,
            used_blocks,
            used_loaded: 0,
            regions: BTreeMap::new(),
            with_free_groups: BTreeSet::new(),
            unapplied: HashMap::new(),
            pending_frees: VecDeque::new(),
            unscanned: BTreeSet::new(),
            groups: 0,
            reserved: 0,
            changed: 0,
            checkpointing: false,
            list_entries: 0,
            erasing: 0,
            sweep: sweep.then_some(0),
            host_full: false,
            limit: u64::MAX,
            fresh: 0,
            next_node: 0,
            reserved_by_layout: reserved,
        }
    }

    /// Promises groups that a commit is about to take, if they are there.
    pub(crate) fn promise(&mut self, groups: u64) -> bool {
        let there = self.groups >= self.reserved + groups;
        if there {
            self.reserved += groups;
        }
        there
    }

    /// Promises what a checkpoint of everything that changed takes at most, if that is there: nobody can take it away then.
    pub(crate) fn promise_checkpoint(&mut self) -> Option<u64> {
        let groups = self.commit_groups();
        self.promise(groups).then_some(groups)
    }

    /// Counts a region's free groups anew.
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

    /// Adds the lists of a recovered commit, oldest first, before any region is loaded.
    pub(crate) fn recover_lists(&mut self, allocated: impl Iterator<Item = Run>, freed: impl Iterator<Item = Run>) {
        let lists = allocated.map(|run| (true, run)).chain(freed.map(|run| (false, run)));
        for (number, entry) in lists.flat_map(|(set, run)| {
            parts(run)
                .map(move |(number, start, end)| (number, (set, Run::new(number * REGION_BLOCKS + start, end - start))))
        }) {
            self.unapplied.entry(number).or_default().push(entry);
        }
    }

    /// Blocks that the newest recovered commit freed: they wait for the next one.
    pub(crate) fn recover_waiting(&mut self, freed_by: Generation, runs: Vec<Run>) {
        if !runs.is_empty() {
            self.pending_frees.push_back(PendingFree { freed_by: Some(freed_by), sequence: 0, runs });
        }
    }

    pub(crate) fn is_loaded(&self, number: u64) -> bool {
        self.regions.contains_key(&number)
    }

    /// Regions with recovered lists that are not loaded yet.
    pub(crate) fn pending_regions(&self) -> Vec<u64> {
        self.unapplied.keys().copied().collect()
    }

    /// Returns which blocks of a region that is not loaded are used: its checkpoint value with the
    /// recovered lists applied.
    fn recovered(&self, number: u64, base: Option<&RegionBits>) -> RegionBits {
        let mut used = base.copied().unwrap_or([0; REGION_WORDS]);
        for (set, run) in self.unapplied.get(&number).into_iter().flatten() {
            let start = run.address % REGION_BLOCKS;
            fill(&mut used, start, start + run.blocks, *set);
        }
        used
    }

    /// Returns the first used block of a region behind the end of the file; `base` is its
    /// checkpoint value.
    pub(crate) fn first_used_past_end(&self, number: u64, base: Option<&RegionBits>) -> Option<u64> {
        let used = self.regions.get(&number).map_or_else(|| self.recovered(number, base), |region| region.used);
        let start = self.total.saturating_sub(number * REGION_BLOCKS);
        let is_used = |block: &u64| used[(block / 64) as usize] >> (block % 64) & 1 == 1;
        (start..REGION_BLOCKS).find(is_used).map(|block| number * REGION_BLOCKS + block)
    }

    /// Installs a region from its checkpoint value (None: no page in it): applies the recovered lists and asks the host which free blocks
    /// hold data.
    pub(crate) fn install(&mut self, number: u64, base: Option<&RegionBits>, storage: &dyn Storage) -> Result<()> {
        if self.regions.contains_key(&number) {
            return Ok(());
        }
        let mut region = Box::new(Region::new(number, self.total, self.reserved_by_layout));
        region.used = self.recovered(number, base);
        region.changed = self.unapplied.get(&number).is_some_and(|lists| !lists.is_empty());
        for w in 0..region.used.len() {
            region.busy[w] |= region.used[w];
        }
        for run in self.pending_frees.iter().flat_map(|w| &w.runs) {
            for (n, start, end) in parts(*run) {
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
            // A block of which the host has a part alone, as a refused write leaves it where the host's blocks are smaller, is to be erased, but not allocated.
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

    /// Installs a region whose pages were found by walking the trees; it differs from any checkpoint.
    pub(crate) fn install_rebuilt(&mut self, number: u64, bits: &RegionBits, storage: &dyn Storage) -> Result<()> {
        self.install(number, Some(bits), storage)?;
        if let Some(region) = self.regions.get_mut(&number).filter(|r| !r.changed) {
            region.changed = true;
            self.changed += 1;
        }
        Ok(())
    }

    /// Forgets the recovered lists, which a rebuild replaces.
    pub(crate) fn drop_pending(&mut self, used_blocks: u64) {
        self.unapplied.clear();
        self.used_blocks = used_blocks;
    }

    /// Drops loaded regions that hold nothing but what the checkpoint knows, until at most `keep` are loaded; none while one is being written.
    pub(crate) fn evict(&mut self, keep: usize) {
        if self.checkpointing {
            return;
        }
        let mut spare = self.groups.saturating_sub(self.reserved + self.commit_groups() + RESERVE_GROUPS);
        let mut excess = self.regions.len().saturating_sub(keep);
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

    /// Promises `groups` groups of four blocks, growing the file when needed.
    ///
    /// # Errors
    /// `Ok(Err(shortage))` when that is not possible now; nothing changed then.
    pub(crate) fn reserve(
        &mut self,
        groups: u64,
        keep: Headroom,
        storage: &dyn Storage,
    ) -> Result<std::result::Result<(), AllocationFailure>> {
        let provided = self.ensure_free(groups, keep, storage)?;
        if provided.is_ok() {
            self.reserved += groups;
        }
        Ok(provided)
    }

    /// As [`Self::reserve`], but promises nothing: who asks now is given so many groups.
    pub(crate) fn ensure_free(
        &mut self,
        groups: u64,
        keep: Headroom,
        storage: &dyn Storage,
    ) -> Result<std::result::Result<(), AllocationFailure>> {
        let (keep, least) = match keep {
            Headroom::Reserve => (self.commit_groups() + RESERVE_GROUPS, None),
            // They may use up what a checkpoint would take: without space it waits.
            Headroom::Lists => (self.commit_groups(), Some(self.list_groups())),
            Headroom::Nothing => (0, None),
        };
        let wanted = self.reserved + groups + keep;
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

    /// Gets more free backed groups: holes of loaded regions, then regions not loaded, then growth.
    fn extend(&mut self, missing: u64, storage: &dyn Storage) -> Result<std::result::Result<(), AllocationFailure>> {
        if !self.host_full {
            if self.back_holes(missing, storage)? {
                return Ok(Ok(()));
            }
            if let Some(number) = self.region_worth_loading() {
                return Ok(Err(AllocationFailure::Load(number)));
            }
            // Also a region that lies behind the end as a whole: pages that were there before the file was cut may still be known to the
            // checkpoint and the lists since then.
            let last = (self.total + self.growth(missing)).saturating_sub(1) / REGION_BLOCKS;
            if let Some(number) = (self.total / REGION_BLOCKS..=last).find(|n| !self.regions.contains_key(n)) {
                return Ok(Err(AllocationFailure::Load(number)));
            }
            if self.grow(missing, storage)? || self.back_kept(missing, storage)? {
                return Ok(Ok(()));
            }
            self.host_full = true;
        }
        match self.next_unloaded() {
            Some(number) => Ok(Err(AllocationFailure::Load(number))),
            None => Ok(Err(AllocationFailure::Full)),
        }
    }

    fn next_unloaded(&self) -> Option<u64> {
        (0..self.total.div_ceil(REGION_BLOCKS)).find(|n| !self.regions.contains_key(n))
    }

    /// A region that is not loaded, when those hold noticeably many free blocks: reading a full map to find crumbs does not pay.
    fn region_worth_loading(&self) -> Option<u64> {
        let count = self.total.div_ceil(REGION_BLOCKS);
        let loaded = self.regions.len() as u64;
        if loaded >= count {
            return None;
        }
        // What those at the end of the file and behind it lack is counted one by one; the others are whole.
        let at_end = self.regions.range(self.total / REGION_BLOCKS..);
        let lacking: u64 = at_end.map(|(_, r)| REGION_BLOCKS - self.total.saturating_sub(r.base())).sum();
        let unloaded_blocks = self.total.saturating_sub(loaded * REGION_BLOCKS - lacking);
        let unloaded_free = unloaded_blocks.saturating_sub(self.used_blocks.saturating_sub(self.used_loaded));
        if unloaded_free * 32 < unloaded_blocks { None } else { self.next_unloaded() }
    }

    /// Really allocates free blocks that are holes. False when there are none, or the host is full.
    fn back_holes(&mut self, missing: u64, storage: &dyn Storage) -> Result<bool> {
        let numbers: Vec<u64> = self.regions.keys().copied().collect();
        for number in numbers {
            let Some(region) = self.regions.get_mut(&number) else { continue };
            let Some((start, length)) = region.first_hole() else { continue };
            let end = start + length;
            let end = end.min(start + (missing * 4).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1));
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

    /// The same on a full host, which takes nothing more, but tells of what is allocated and was never written as if it were a hole: so did whoever had the
    /// archive open before leave the reserve. Only asking tells it from a hole, piece by piece. That is done once for each place, from the end of the
    /// file, where the reserve mostly lies; what has become a hole since is one.
    fn back_kept(&mut self, missing: u64, storage: &dyn Storage) -> Result<bool> {
        let numbers: Vec<u64> = self.regions.keys().rev().copied().collect();
        for number in numbers {
            let mut most = missing.saturating_mul(4).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1);
            while let Some(region) = self.regions.get_mut(&number)
                && let Some((first, end)) = region.last_hole()
            {
                let start = first.max(end.saturating_sub(most));
                match storage.allocate((region.base() + start) * BLOCK, (end - start) * BLOCK) {
                    Ok(()) => {
                        region.asked = start;
                        fill(&mut region.backed, start, end, true);
                        self.recount(number);
                        return Ok(true);
                    }
                    Err(crate::Error::NoSpace(_)) if end - start > 4 => most = ((end - start) / 2).next_multiple_of(4),
                    Err(crate::Error::NoSpace(_)) => region.asked = start,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(false)
    }

    /// Grows the file by real allocation. The regions that this reaches are loaded. False when the host is full or the limit reached.
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
                    for (number, start, end) in parts(Run::new(old, step)) {
                        let total = self.total;
                        let region = self
                            .regions
                            .entry(number)
                            .or_insert_with(|| Box::new(Region::new(number, total, reserved)));
                        fill(&mut region.busy, start, end, false);
                        fill(&mut region.backed, start, end, true);
                        // A file that was cut by force has pages of the map behind its end.
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

    /// Takes a run of `blocks` out of the free backed blocks, consuming up to `from_reserved` reserved groups.
    /// Dirty blocks first: overwriting is erasing. None when no run is long enough; the caller then asks for shorter ones.
    pub(crate) fn allocate(&mut self, blocks: u64, from_reserved: u64) -> Option<Run> {
        let found = self.first_fit(blocks)?;
        Some(self.take(found, blocks, from_reserved))
    }

    /// As [`Self::allocate`], for the nodes of commits: each behind the one before, since every place is a request to the disk.
    ///
    /// A commit replaces about as many nodes as it writes, so groups that nodes filled come back as whole groups and are filled again.
    /// Where whole groups are few, blocks of broken ones go first: reservations are counted in whole groups, and refused for want of them.
    pub(crate) fn allocate_node(&mut self, blocks: u64, from_reserved: u64) -> Option<Run> {
        let next = self.next_node;
        let behind = |map: &Self| {
            map.regions.get(&(next / REGION_BLOCKS)).filter(|r| r.fits_at(next % REGION_BLOCKS, blocks)).map(|_| next)
        };
        let group = |map: &Self, dirty| {
            let mut regions = map.with_free_groups.iter().filter_map(|n| map.regions.get(n));
            regions.find_map(|r| r.find(blocks.max(4), dirty).map(|start| r.base() + start))
        };
        let started = !next.is_multiple_of(4);
        let scarce = self.groups <= self.reserved + self.commit_groups() + RESERVE_GROUPS;
        let found = started
            .then(|| behind(self))
            .flatten()
            .or_else(|| scarce.then(|| self.first_fit(blocks)).flatten())
            .or_else(|| group(self, true))
            .or_else(|| behind(self))
            .or_else(|| group(self, false))
            .or_else(|| self.first_fit(blocks))?;
        let run = self.take(found, blocks, from_reserved);
        self.next_node = run.end();
        Some(run)
    }

    fn first_fit(&self, blocks: u64) -> Option<u64> {
        [true, false].into_iter().find_map(|dirty| {
            // Broken groups exist in regions without a whole free one, so small pages look everywhere.
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

    /// Blocks that no commit names (abandoned, or freed in the transaction that wrote them): reusable when readers from before `sequence`
    /// are gone.
    pub(crate) fn discard(&mut self, runs: Vec<Run>, sequence: u64) {
        self.fresh = self.fresh.saturating_sub(runs.iter().map(|run| run.blocks).sum());
        if !runs.is_empty() {
            self.pending_frees.push_back(PendingFree { freed_by: None, sequence, runs });
        }
    }

    /// Commit `generation` is durable: what it brought in is used, what it freed waits.
    pub(crate) fn committed(
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
        for (number, start, end) in parts(run) {
            if let Some(region) = self.regions.get_mut(&number) {
                // No invariant: which blocks are in use is the word of the archive, which may lie. So those that change are counted.
                self.used_loaded = self.used_loaded.wrapping_add_signed(region.set_used(start, end, used));
                self.changed += u64::from(!region.changed);
                region.changed = true;
            } else {
                let entry = (used, Run::new(number * REGION_BLOCKS + start, end - start));
                self.unapplied.entry(number).or_default().push(entry);
            }
        }
    }

    /// SPACE-3: makes waiting blocks reusable. `durable` is the last durable commit, `oldest` the sequence of the oldest state in use.
    pub(crate) fn release_waiting(&mut self, durable: Generation, oldest: u64) {
        let mut kept = VecDeque::with_capacity(self.pending_frees.len());
        while let Some(entry) = self.pending_frees.pop_front() {
            let passed = entry.freed_by.is_none_or(|generation| generation < durable);
            if !passed || entry.sequence > oldest {
                kept.push_back(entry);
                continue;
            }
            let mut touched = BTreeSet::new();
            for (number, start, end) in entry.runs.iter().flat_map(|run| parts(*run)) {
                // A region that is not loaded learns from the host that the blocks hold data when it is.
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
        self.pending_frees = kept;
    }

    /// Whether freed blocks wait for a further commit to become durable.
    pub(crate) fn waits_for_commit(&self) -> bool {
        self.pending_frees.iter().any(|w| w.freed_by.is_some())
    }

    /// Whether blocks that the commits up to `durable` let go are only held by readers.
    pub(crate) fn waits_for_readers(&self, durable: Generation) -> bool {
        self.pending_frees.iter().any(|w| w.freed_by.is_none_or(|generation| generation < durable))
    }

    // ---- checkpoint ----

    /// The values to write at a checkpoint (SPACE-4) of regions that changed since the last one; all are unchanged afterwards.
    /// Pending regions must be loaded before. Until [`Self::finish_checkpoint`] no region is dropped.
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

    /// What was taken is durable, and regions are loaded from it.
    pub(crate) fn finish_checkpoint(&mut self) {
        self.checkpointing = false;
    }

    /// Every block that belongs to a page, for `check`: all regions must be loaded.
    pub(crate) fn used_bits(&self, number: u64) -> Option<&RegionBits> {
        self.regions.get(&number).map(|r| &r.used)
    }
}
