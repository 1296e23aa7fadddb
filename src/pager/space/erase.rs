//! Free blocks that still hold old ciphertext: sweep, erase and truncation of the tail.

use super::region::{Region, any, fill};
use super::{RESERVE_GROUPS, SpaceMap, split_by_region};
use crate::error::Result;
use crate::format::{MIN_BLOCKS, REGION_BLOCKS, Run};

/// Maximum number of blocks erased in one step: 64 MiB.
const ERASE_STEP: u64 = 16_384;

impl SpaceMap {
    /// Returns the next region to load in the sweep after an unclean shutdown.
    pub(crate) fn next_unswept(&self) -> Option<u64> {
        self.sweep.filter(|n| n * REGION_BLOCKS < self.total)
    }

    /// Marks a region as swept after it was loaded; its dirty blocks need no ageing.
    pub(crate) fn mark_swept(&mut self, number: u64) {
        if let Some(region) = self.regions.get_mut(&number) {
            region.aged = region.dirty;
        }
        self.sweep = Some(number + 1).filter(|n| n * REGION_BLOCKS < self.total);
    }

    /// Restarts the sweep for all regions, whatever the last session recorded.
    pub(crate) fn restart_sweep(&mut self) {
        self.sweep = Some(0);
    }

    /// Returns a region in which blocks were freed while it was not loaded.
    pub(crate) fn next_unscanned(&mut self) -> Option<u64> {
        let total = self.total;
        // Regions past the end of the file no longer exist.
        while self.unscanned.last().is_some_and(|number| number * REGION_BLOCKS >= total) {
            self.unscanned.pop_last();
        }
        self.unscanned.first().copied()
    }

    pub(crate) fn has_loaded_regions(&self, regions: usize) -> bool {
        self.regions.len() >= regions
    }

    /// Moves free unerased blocks to `erasing` and returns their runs. The flag of a run is set
    /// when it must stay allocated on the host: then it is overwritten, otherwise punched. Takes
    /// only blocks that were already dirty at the previous call, unless `all` is set.
    pub(crate) fn begin_erase(&mut self, all: bool) -> Vec<(Run, bool)> {
        let mut runs = Vec::new();
        let mut left = ERASE_STEP;
        // Blocks being erased cannot be allocated. They may come temporarily from the reserve,
        // never from reserved groups.
        let mut spare = self.groups.saturating_sub(self.reserved + self.commit_groups());
        let numbers: Vec<u64> = self.regions.keys().copied().collect();
        for number in numbers {
            let Some(region) = self.regions.get_mut(&number) else { continue };
            for (start, length) in Region::runs(|w| region.dirty[w] & if all { u64::MAX } else { region.aged[w] }) {
                // A run may break a group at either end.
                let fits = spare.saturating_sub(1) * 4;
                let length = length.min(left).min(fits);
                if length == 0 {
                    continue;
                }
                let groups = length.div_ceil(4) + 1;
                left -= length;
                spare -= groups;
                fill(&mut region.busy, start, start + length, true);
                fill(&mut region.dirty, start, start + length, false);
                fill(&mut region.aged, start, start + length, false);
                runs.push((Run::new(region.base() + start, length), spare < RESERVE_GROUPS));
            }
            if !all && left > 0 {
                region.aged = region.dirty;
            }
            self.recount(number);
        }
        self.erasing += runs.iter().map(|(run, _)| run.blocks).sum::<u64>();
        runs
    }

    /// Marks a run as erased; `backed` when it is still allocated on the host.
    pub(crate) fn finish_erase(&mut self, run: Run, backed: bool) {
        self.erasing -= run.blocks;
        for (number, start, end) in split_by_region(run) {
            let Some(region) = self.regions.get_mut(&number) else { continue };
            fill(&mut region.busy, start, end, false);
            fill(&mut region.backed, start, end, backed);
            self.recount(number);
        }
    }

    /// Returns a run that could not be erased to the free unerased state.
    pub(crate) fn abort_erase(&mut self, run: Run) {
        // Mark as dirty before the blocks are counted as free.
        for (number, start, end) in split_by_region(run) {
            let Some(region) = self.regions.get_mut(&number) else { continue };
            fill(&mut region.dirty, start, end, true);
        }
        self.finish_erase(run, true);
    }

    /// Overwrites free unerased blocks in place while allocation is blocked. Used on a host so full
    /// that no block can be made temporarily unavailable.
    pub(crate) fn overwrite_dirty(&mut self, overwrite: &mut dyn FnMut(Run) -> Result<()>) -> Result<()> {
        for region in self.regions.values_mut() {
            for (start, length) in Region::runs(|w| region.dirty[w]) {
                overwrite(Run::new(region.base() + start, length))?;
                fill(&mut region.dirty, start, start + length, false);
                fill(&mut region.aged, start, start + length, false);
            }
        }
        Ok(())
    }

    pub(crate) fn has_dirty(&self) -> bool {
        self.erasing > 0 || self.regions.values().any(|r| r.dirty.iter().any(|w| *w != 0))
    }

    /// Returns the last unloaded region that may hold a page when everything after it is free. It
    /// must be loaded before the tail is truncated.
    pub(crate) fn unloaded_tail_region(&self) -> Option<u64> {
        for number in (0..self.total.div_ceil(REGION_BLOCKS)).rev() {
            let Some(region) = self.regions.get(&number) else { return Some(number) };
            let blocks = (self.total - region.base()).min(REGION_BLOCKS);
            if any(&region.busy, 0, blocks) {
                return None;
            }
        }
        None
    }

    /// Truncates free blocks at the end of the map and returns the new file length in blocks; the
    /// caller truncates the file. Keeps enough backed blocks for the reserve.
    pub(crate) fn trim_tail(&mut self) -> u64 {
        let mut end = self.total;
        while end > MIN_BLOCKS {
            let number = (end - 1) / REGION_BLOCKS;
            let Some(region) = self.regions.get(&number) else { break };
            let limit = end - number * REGION_BLOCKS;
            let last_busy = (0..limit).rev().find(|&i| region.busy[(i / 64) as usize] >> (i % 64) & 1 == 1);
            match last_busy {
                Some(i) => {
                    end = number * REGION_BLOCKS + i + 1;
                    break;
                }
                None => end = number * REGION_BLOCKS,
            }
        }
        let keep_groups = self.reserved + self.commit_groups() + RESERVE_GROUPS;
        // Truncation must not take reserved groups: count the groups after the cut.
        let mut cut = end.max(MIN_BLOCKS).next_multiple_of(4);
        let free = |r: &Region| Region::runs(|w| !r.busy[w] & r.backed[w]);
        let runs = self.regions.values().flat_map(|r| free(r).into_iter().map(move |(s, l)| (r.base() + s, l)));
        let after = runs.filter(|(s, l)| s + l > cut);
        let groups_after: u64 = after.map(|(s, l)| ((s + l) / 4).saturating_sub(s.max(cut).div_ceil(4))).sum();
        let left = self.groups.saturating_sub(groups_after);
        if left < keep_groups {
            cut = (cut + (keep_groups - left) * 4).min(self.total);
        }
        if cut >= self.total {
            return self.total;
        }
        self.total = cut;
        let numbers: Vec<u64> = self.regions.keys().copied().filter(|n| (n + 1) * REGION_BLOCKS > cut).collect();
        for number in numbers {
            if let Some(region) = self.regions.get_mut(&number) {
                let from = cut.saturating_sub(region.base());
                region.occupy(from, REGION_BLOCKS);
            }
            self.recount(number);
        }
        cut
    }
}
