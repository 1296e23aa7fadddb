//! Test access to parts of a volume.

use std::collections::HashMap;
use std::ops::ControlFlow;

use parking_lot::Mutex;

use super::Volume;
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{BLOCK, Key, Pointer, REGION_BLOCKS, kind};
use crate::pager::Pager;
use crate::txn::commit::GroupCommit;
use crate::txn::operation::Operation;
use crate::txn::state::snapshot_tree;

impl Volume {
    pub(crate) fn pager(&self) -> &Pager {
        &self.medium.pager
    }

    pub(in crate::txn) fn committer(&self) -> &GroupCommit {
        &self.committer
    }

    pub(in crate::txn) fn last_erase(&self) -> &Mutex<i64> {
        &self.last_erase
    }

    /// Returns whether free blocks may have old content.
    pub(crate) fn has_unerased_blocks(&self) -> bool {
        self.allocator.map().has_dirty()
    }

    /// Like [`Self::forget_snapshots`], for one snapshot. Errors: `NotFound` when no snapshot has
    /// this id, or it has no name any more.
    pub(crate) fn forget_snapshot(&self, id: u64) -> Result<()> {
        self.forget_snapshots(&mut |all| {
            if all.iter().any(|(other, _)| *other == id) { Ok(vec![id]) } else { Err(Error::NotFound) }
        })
    }

    /// Removes a snapshot, and everything that it alone shows.
    pub(crate) fn destroy_snapshot(&self, id: u64) -> Result<()> {
        self.forget_snapshot(id)?;
        while self.removal_step()? {}
        self.commit().map(drop)
    }

    /// Makes every session before this one older than the history reaches.
    pub(crate) fn forget_history(&self) -> Result<()> {
        self.operate(1, true, |operation| {
            operation.changed = true;
            operation.needs_commit();
            operation.replace_history(&[])
        })
    }

    /// Returns the number of entries in the dead list of a snapshot.
    pub(crate) fn dead_entries(&self, id: u64) -> Result<u64> {
        let mut entries = 0;
        let (from, to) = (Key::new(id, kind::DEAD, 0), Key::new(id, kind::DEAD, u64::MAX));
        self.state().trees.references.scan(&self.medium.store, from, to, &mut |_, _| {
            entries += 1;
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(entries)
    }

    /// Moves the first entry of the dead list of one snapshot to another one, whether that shows
    /// its page or not.
    pub(crate) fn misplace_dead_entry(&self, from: u64, to: u64) -> Result<()> {
        self.operate(2, true, |operation| operation.misplace_dead_entry(from, to))
    }

    /// Returns the bytes of all pages, nodes and file data, that the live tree or a readable
    /// snapshot reaches. All changes of the volume must be committed.
    pub(crate) fn shown_bytes(&self) -> Result<u64> {
        let (state, store) = (self.state(), &self.medium.store);
        let mut pages = HashMap::new();
        let kept = self.readable_snapshots()?;
        for tree in kept.iter().map(|(_, snapshot)| snapshot_tree(snapshot)).chain([state.trees.live.clone()]) {
            let visit = &mut |pointer: &Pointer, _| {
                pages.insert(pointer.run.address, pointer.run.blocks);
                Ok(())
            };
            tree.visit_pages(store, visit, &mut |lost| Err(lost.error.clone()))?;
            tree.scan(store, Key::MIN, Key::MAX, &mut |key, value| {
                if key.kind == kind::EXTENT {
                    let run = Extent::decode(value)?.page.run;
                    pages.insert(run.address, run.blocks);
                }
                Ok(ControlFlow::Continue(()))
            })?;
        }
        Ok(pages.values().sum::<u64>() * BLOCK)
    }

    /// Commits only published changes, like a commit that frees space for dirty data.
    pub(crate) fn commit_without_staged(&self) -> Result<()> {
        self.committer.between_commits(|chain| self.committer.commit_without_staged(chain))
    }

    /// Counts the caller as waiting for space until the result is dropped.
    pub(crate) fn be_short(&self) -> impl Sized {
        self.space_waiter.queue()
    }

    /// Returns whether the block belongs to a page of the last commit.
    pub(crate) fn uses_block(&self, block: u64) -> Result<bool> {
        let (number, at) = (block / REGION_BLOCKS, block % REGION_BLOCKS);
        Ok(self.allocator.used_bits(number)?[(at / 64) as usize] >> (at % 64) & 1 == 1)
    }
}

impl Operation<'_> {
    fn misplace_dead_entry(&mut self, from: u64, to: u64) -> Result<()> {
        let mut first = None;
        let (lower, upper) = (Key::new(from, kind::DEAD, 0), Key::new(from, kind::DEAD, u64::MAX));
        self.trees.references.scan(self.store, lower, upper, &mut |key, value| {
            first = Some((key, value.to_vec()));
            Ok(ControlFlow::Break(()))
        })?;
        let (key, value) = first.expect("an entry");
        self.needs_commit();
        self.changed = true;
        self.trees.references.remove(self.store, &mut self.global_edits, key)?;
        let key = Key::new(to, kind::DEAD, key.sub);
        self.trees.references.insert(self.store, &mut self.global_edits, key, &value).map(drop)
    }
}
