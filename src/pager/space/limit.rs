//! Block counts of the archive file, and how far it may grow.

use super::region::Region;
use super::{GROW_BLOCKS, RESERVE_GROUPS, SpaceMap};

/// Block counts of the file by use.
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

    /// Sets the number of pages that the next commit has to list.
    pub(crate) fn set_list_entries(&mut self, entries: u64) {
        self.list_entries = entries;
    }

    /// Returns the groups that the next commit needs in addition to the reserved ones: a path of
    /// the space tree, one node and its splits for each changed region (they may all be far apart),
    /// and list pages of 2,000 entries.
    pub(super) fn commit_groups(&self) -> u64 {
        let regions = self.changed + self.unapplied.len() as u64;
        12 + regions + regions / 4 + self.list_entries / 1000
    }

    /// Returns the maximum number of groups for list pages of the next commit, 2,000 entries each
    /// in two lists: for pages listed so far, reserved pages, and pages of the calling operation.
    pub(super) fn list_groups(&self) -> u64 {
        3 + (self.list_entries + self.reserved) / 2000
    }

    /// Returns the number of blocks to grow by; 0 when the limit is reached.
    pub(super) fn growth(&self, missing: u64) -> u64 {
        let comfortable = (self.total / 16).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1).max((missing * 4).min(GROW_BLOCKS.1));
        let last_group = self.limit / 4 * 4;
        self.whole_groups(comfortable).min(last_group.saturating_sub(self.total))
    }

    /// Rounds a growth step so that the file ends with a whole group. Small pages fill broken
    /// groups first, so one at the end would hold a page permanently and the tail could never be
    /// truncated.
    pub(super) fn whole_groups(&self, step: u64) -> u64 {
        (self.total + step).next_multiple_of(4) - self.total
    }
}
