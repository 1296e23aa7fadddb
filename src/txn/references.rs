//! How many extents and dead-list entries name each page, as run-length records in the reference tree (specification section 8).

use super::operation::Operation;
use crate::btree::{Edits, NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::values::{DeadValue, ReferenceValue};
use crate::format::{Generation, Key, Pointer, Run, kind};

fn key(block: u64) -> Key {
    Key::new(0, kind::REFERENCE, block)
}

/// The record that covers or precedes `block`: (first block, value).
fn floor(tree: &Tree, store: &NodeStore, block: u64) -> Result<Option<(u64, ReferenceValue)>> {
    let found = tree.floor(store, key(block), |key, value| {
        Ok((key.kind == kind::REFERENCE && key.object == 0).then_some((key.sub, value.to_vec())))
    })?;
    match found.flatten() {
        Some((start, value)) => Ok(Some((start, ReferenceValue::decode(&value)?))),
        None => Ok(None),
    }
}

/// The count of the page whose first block is `block`.
pub(crate) fn count(tree: &Tree, store: &NodeStore, block: u64) -> Result<u64> {
    Ok(match floor(tree, store, block)? {
        Some((start, value)) if start.saturating_add(u64::from(value.run_blocks)) > block => u64::from(value.count),
        _ => 1,
    })
}

/// Sets the count of the page at `run` (1 = no record), splitting and joining the records around it.
fn set_count(tree: &mut Tree, store: &NodeStore, edits: &mut Edits, run: Run, count: u64) -> Result<()> {
    let count = u32::try_from(count).map_err(|_| Error::TooManyLinks)?;
    let mut put = |tree: &mut Tree, start: u64, end: u64, count: u32| -> Result<()> {
        if end > start && count >= 2 {
            let value = ReferenceValue { run_blocks: (end - start) as u32, count };
            tree.insert(store, edits, key(start), &value.encode())?;
        }
        Ok(())
    };
    let (mut start, mut end) = (run.address, run.end());
    if let Some((first, value)) = floor(tree, store, run.address)? {
        let last = first.saturating_add(u64::from(value.run_blocks));
        if last > run.address {
            // Cut the covering record; what is left of it keeps its count.
            if first < run.address {
                put(tree, first, run.address, value.count)?;
            }
            put(tree, run.end(), last, value.count)?;
        }
    }
    tree.remove(store, edits, key(run.address))?;
    if count < 2 {
        return Ok(());
    }
    // Join with equal neighbours, so that a cloned sequential file needs few records.
    if start > 0
        && let Some((first, value)) = floor(tree, store, start - 1)?
        && first.checked_add(u64::from(value.run_blocks)) == Some(start)
        && value.count == count
        && end - first <= u64::from(u32::MAX)
    {
        start = first;
    }
    let after = tree.get(store, key(end), ReferenceValue::decode)?;
    if let Some(value) = after
        && value.count == count
        && end - start + u64::from(value.run_blocks) <= u64::from(u32::MAX)
    {
        tree.remove(store, edits, key(end))?;
        end += u64::from(value.run_blocks);
    }
    let value = ReferenceValue { run_blocks: (end - start) as u32, count };
    tree.insert(store, edits, key(start), &value.encode())?;
    Ok(())
}

/// The number after `number`. Only a hostile record has one that leaves none.
pub(super) fn following(number: u64) -> Result<u64> {
    number.checked_add(1).ok_or_else(|| Error::damaged("numbers of a counter are used up"))
}

impl Operation<'_> {
    fn count_of(&self, run: Run) -> Result<u64> {
        count(&self.trees.references, self.volume.store(), run.address)
    }

    fn set_count_of(&mut self, run: Run, count: u64) -> Result<()> {
        set_count(&mut self.trees.references, self.volume.store(), &mut self.global_edits, run, count)
    }

    /// A page just written by `Volume::write_data` or `write_packed` is now named by `extents` (>= 1) extents.
    pub(crate) fn adopt(&mut self, page: &Pointer, extents: u32) -> Result<()> {
        self.changed = true;
        self.adopted.push((page.run, page.tag));
        if extents > 1 {
            self.set_count_of(page.run, u64::from(extents))?;
        }
        Ok(())
    }

    /// `more` further extents name the page (clone, split). Call before the `release` of what they replace.
    pub(crate) fn share(&mut self, page: &Pointer, more: u32) -> Result<()> {
        if more == 0 {
            return Ok(());
        }
        self.changed = true;
        let count = self.count_of(page.run)?;
        self.set_count_of(page.run, count + u64::from(more))
    }

    /// An extent that named the page, born in `born`, left the live tree.
    pub(crate) fn release(&mut self, page: &Pointer, born: Generation) -> Result<()> {
        if born <= self.counters.newest_snapshot {
            return self.bury(page.run, born);
        }
        self.drop_count(page.run)
    }

    /// Moves a reference to the newest snapshot's dead list, which then owns its count.
    pub(crate) fn bury(&mut self, run: Run, born: Generation) -> Result<()> {
        self.changed = true;
        let key = Key::new(self.counters.newest_snapshot_id, kind::DEAD, self.counters.next_dead);
        self.counters.next_dead = following(self.counters.next_dead)?;
        let value = DeadValue { run, born }.encode();
        self.trees.references.insert(self.volume.store(), &mut self.global_edits, key, &value)?;
        Ok(())
    }

    /// Takes one count away; the last one frees the page.
    pub(crate) fn drop_count(&mut self, run: Run) -> Result<()> {
        self.changed = true;
        match self.count_of(run)? {
            1 => self.freed.push(run),
            count => self.set_count_of(run, count - 1)?,
        }
        Ok(())
    }
}
