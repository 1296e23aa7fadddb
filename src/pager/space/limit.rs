//! What the file's blocks are taken for, and how far it may grow.

use super::region::Region;
use super::{GROW_BLOCKS, RESERVE_GROUPS, SpaceMap};

/// Blocks of the file and what they are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockCounts {
    pub(crate) total: u64,
    /// By pages, committed or not.
    pub(crate) taken: u64,
    /// Promised to data that is staged and nodes that are dirty.
    pub(crate) promised: u64,
    /// Kept for deletes, commits and the unmount.
    pub(crate) kept: u64,
    /// What the file may still grow by as far as its limit goes.
    pub(crate) growth: u64,
}

impl SpaceMap {
    /// Bounds the length of the file from now on. To whoever reserves, a file at its limit is the same as a full host.
    pub(crate) fn set_limit(&mut self, blocks: u64) {
        self.limit = blocks;
    }

    pub(crate) fn blocks(&self) -> BlockCounts {
        BlockCounts {
            total: self.total,
            taken: self.used_blocks.saturating_add(self.fresh),
            promised: self.reserved * 4,
            kept: (RESERVE_GROUPS + self.commit_groups()) * 4,
            growth: self.limit.saturating_sub(self.total),
        }
    }

    /// Bytes of memory that the loaded regions take.
    pub(crate) fn memory(&self) -> u64 {
        (self.regions.len() * size_of::<Region>()) as u64
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn used_blocks(&self) -> u64 {
        self.used_blocks
    }

    /// Tells how many pages the next commit has to list.
    pub(crate) fn set_list_entries(&mut self, entries: u64) {
        self.list_entries = entries;
    }

    /// Groups that the next commit needs beside the reserved ones: a path of the space tree, one node for each changed region
    /// (they may all be far apart) and its splits, and list pages of 2,000 entries.
    pub(super) fn commit_groups(&self) -> u64 {
        let regions = self.changed + self.unapplied.len() as u64;
        12 + regions + regions / 4 + self.list_entries / 1000
    }

    /// Groups that the list pages of the next commit take at most, 2,000 entries each in two lists: for the pages listed so far, those that
    /// are promised, and those of the operation that asks.
    pub(super) fn list_groups(&self) -> u64 {
        3 + (self.list_entries + self.reserved) / 2000
    }

    /// Blocks to grow by when the host has them; none when the limit is reached.
    pub(super) fn growth(&self, missing: u64) -> u64 {
        let comfortable = (self.total / 16).clamp(GROW_BLOCKS.0, GROW_BLOCKS.1).max((missing * 4).min(GROW_BLOCKS.1));
        let last_group = self.limit / 4 * 4;
        self.whole_groups(comfortable).min(last_group.saturating_sub(self.total))
    }

    /// The step that makes the file end with a whole group: small pages look for broken ones first, so one at the end would hold a page
    /// for ever and the tail could never be cut.
    pub(super) fn whole_groups(&self, step: u64) -> u64 {
        (self.total + step).next_multiple_of(4) - self.total
    }
}
