//! What tests look at or hold.

use std::ops::ControlFlow;

use parking_lot::Mutex;

use super::Volume;
use crate::error::Result;
use crate::format::{Key, REGION_BLOCKS, kind};
use crate::pager::Pager;
use crate::txn::allocator::Allocator;
use crate::txn::commit::Committer;
use crate::txn::shortage::Shortage;
use crate::txn::writer::Writer;

impl Volume {
    pub(crate) fn pager(&self) -> &Pager {
        &self.medium.pager
    }

    pub(in crate::txn) fn committer(&self) -> &Committer {
        &self.committer
    }

    pub(in crate::txn) fn writer(&self) -> &Writer {
        &self.writer
    }

    pub(in crate::txn) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    pub(in crate::txn) fn shortage(&self) -> &Shortage {
        &self.shortage
    }

    pub(in crate::txn) fn last_erase(&self) -> &Mutex<i64> {
        &self.last_erase
    }

    /// Removes a snapshot, and everything that it alone shows.
    pub(crate) fn destroy_snapshot(&self, id: u64) -> Result<()> {
        self.forget_snapshot(id)?;
        while self.removal_step()? {}
        self.commit().map(drop)
    }

    /// How many entries the dead list of a snapshot has.
    pub(crate) fn dead_entries(&self, id: u64) -> Result<u64> {
        let mut entries = 0;
        let (from, to) = (Key::new(id, kind::DEAD, 0), Key::new(id, kind::DEAD, u64::MAX));
        self.state().trees.references.scan(&self.medium.store, from, to, &mut |_, _| {
            entries += 1;
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(entries)
    }

    /// A commit of what is published alone, as one that makes room for what is staged.
    pub(crate) fn commit_without_staged(&self) -> Result<()> {
        self.committer.between_commits(|chain| self.committer.commit_without_staged(chain))
    }

    /// As somebody who waits for room, until the answer is dropped.
    pub(crate) fn be_short(&self) -> impl Sized {
        self.shortage.queue()
    }

    /// Whether the block belongs to a page of the last commit.
    pub(crate) fn uses_block(&self, block: u64) -> Result<bool> {
        let (number, at) = (block / REGION_BLOCKS, block % REGION_BLOCKS);
        Ok(self.allocator.used_bits(number)?[(at / 64) as usize] >> (at % 64) & 1 == 1)
    }
}
