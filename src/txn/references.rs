//! Reference counts: the number of extents and dead-list entries that name each page, as run-length
//! records in the reference tree (specification section 8).

use std::ops::ControlFlow;

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

/// Returns the count of the page whose first block is `block`.
pub(crate) fn count(tree: &Tree, store: &NodeStore, block: u64) -> Result<u64> {
    Ok(match floor(tree, store, block)? {
        Some((start, value)) if start.saturating_add(u64::from(value.run_blocks)) > block => u64::from(value.count),
        _ => 1,
    })
}

/// The number after `number`. Only a hostile record has one that leaves none.
pub(super) fn following(number: u64) -> Result<u64> {
    number.checked_add(1).ok_or_else(|| Error::damaged("numbers of a counter are used up"))
}

/// Sets the count of every page in `blocks`, which are whole pages, to `of` its present count. The
/// number of record changes depends on the distinct counts there, not on the pages. Records are
/// split at both ends, and joined where they are equal, so that a cloned sequential file needs few.
/// A count of 1 has no record.
fn change(tree: &mut Tree, store: &NodeStore, edits: &mut Edits, blocks: Run, of: impl Fn(u64) -> u64) -> Result<()> {
    let (start, end) = (blocks.address, blocks.end());
    let old = records_around(tree, store, start, end)?;
    let mut new: Vec<CountedRun> = Vec::with_capacity(old.len() + 2);
    let mut at = start;
    for record in &old {
        let (from, to) = (record.start.max(start), record.end.min(end));
        if from >= to {
            // A neighbour, or a record outside of the range.
            if record.start >= end {
                push(&mut new, at, end, of(1))?;
                at = end;
            }
            push(&mut new, record.start, record.end, record.count)?;
            continue;
        }
        push(&mut new, record.start, from, record.count)?;
        push(&mut new, at, from, of(1))?;
        push(&mut new, from, to, of(record.count))?;
        at = to;
        push(&mut new, to, record.end, record.count)?;
    }
    // Behind a record that reaches beyond the range nothing is left of it.
    if at < end {
        push(&mut new, at, end, of(1))?;
    }
    let at_start = |records: &[CountedRun], start: u64| {
        records.binary_search_by_key(&start, |record| record.start).ok().map(|at| records[at])
    };
    for record in old.iter().filter(|record| at_start(&new, record.start).is_none()) {
        tree.remove(store, edits, key(record.start))?;
    }
    for record in new.iter().filter(|record| at_start(&old, record.start) != Some(**record)) {
        // `push` bounds both.
        let value = ReferenceValue { run_blocks: (record.end - record.start) as u32, count: record.count as u32 };
        tree.insert(store, edits, key(record.start), &value.encode())?;
    }
    Ok(())
}

/// A record as blocks from `start` to `end`.
#[derive(Clone, Copy, PartialEq, Eq)]
struct CountedRun {
    start: u64,
    end: u64,
    count: u64,
}

/// Appends a record that starts where the last one ends or later; joins the two when their counts
/// are equal.
fn push(records: &mut Vec<CountedRun>, start: u64, end: u64, count: u64) -> Result<()> {
    if start >= end || count < 2 {
        return Ok(());
    }
    if u32::try_from(count).is_err() {
        return Err(Error::TooManyLinks);
    }
    match records.last_mut() {
        Some(last) if last.end == start && last.count == count && end - last.start <= u64::from(u32::MAX) => {
            last.end = end;
        }
        _ => records.push(CountedRun { start, end, count }),
    }
    Ok(())
}

/// The records that overlap `start..end` or touch it, ascending.
fn records_around(tree: &Tree, store: &NodeStore, start: u64, end: u64) -> Result<Vec<CountedRun>> {
    let counted = |first: u64, value: ReferenceValue| CountedRun {
        start: first,
        end: first.saturating_add(u64::from(value.run_blocks)),
        count: value.count.into(),
    };
    let mut found = Vec::new();
    if let Some(before) = start.checked_sub(1)
        && let Some((first, value)) = floor(tree, store, before)?
        && first.saturating_add(u64::from(value.run_blocks)) >= start
    {
        found.push(counted(first, value));
    }
    tree.scan(store, key(start), key(end.saturating_add(1)), &mut |key, value| {
        found.push(counted(key.sub, ReferenceValue::decode(value)?));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

impl Operation<'_> {
    fn count_of(&self, run: Run) -> Result<u64> {
        count(&self.trees.references, self.store, run.address)
    }

    fn set_count_of(&mut self, run: Run, count: u64) -> Result<()> {
        change(&mut self.trees.references, self.store, &mut self.global_edits, run, |_| count)
    }

    /// Adopts a page just written (`UnreferencedPages`, `Volume::write_framed`), named by `extents`
    /// (>= 1) extents.
    pub(crate) fn adopt(&mut self, page: &Pointer, extents: u32) -> Result<()> {
        self.changed = true;
        self.needs_commit();
        self.adopted.push((page.run, page.tag));
        if extents > 1 {
            self.set_count_of(page.run, u64::from(extents))?;
        }
        Ok(())
    }

    /// Counts `more` further extents of the page (clone, split). Call before the `release` of the
    /// extents that they replace.
    pub(crate) fn share(&mut self, page: &Pointer, more: u32) -> Result<()> {
        if more == 0 {
            return Ok(());
        }
        self.changed = true;
        let count = self.count_of(page.run)?;
        self.set_count_of(page.run, count + u64::from(more))
    }

    /// Changes the number of extents that name the page by `more`, the sum of an operation's
    /// additions and removals. No removed extent may be shown by a snapshot.
    pub(crate) fn recount(&mut self, page: &Pointer, more: i64) -> Result<()> {
        // Parts of the extents have another `born`, even when there are as many as before.
        self.changed = true;
        if more == 0 {
            return Ok(());
        }
        let count = self.count_of(page.run)?;
        let left = count.checked_add_signed(more).ok_or_else(|| {
            Error::damaged(format!("more extents name a page than its count says: block={}", page.run.address))
        })?;
        if left == 0 {
            self.freed.push(page.run);
        }
        // A count of 1 has no record.
        if count > 1 || left > 1 { self.set_count_of(page.run, left) } else { Ok(()) }
    }

    /// Returns whether the newest snapshot still references a page of generation `born` after it
    /// leaves the live tree.
    pub(crate) fn is_shown_by_snapshot(&self, born: Generation) -> bool {
        born <= self.counters.newest_snapshot
    }

    /// Counts one further extent for each of the pages (a page may occur several times).
    /// Neighbouring pages are counted together, so that a clone of a file that lies in one piece
    /// changes few records. Call before the `release` of the pages that they replace.
    pub(crate) fn share_all(&mut self, pages: impl IntoIterator<Item = Run>) -> Result<()> {
        self.needs_commit();
        let mut runs: Vec<Run> = pages.into_iter().collect();
        runs.sort_unstable();
        let mut joined: Vec<(Run, u32)> = Vec::new();
        for same in runs.chunk_by(|a, b| a == b) {
            let more = u32::try_from(same.len()).map_err(|_| Error::TooManyLinks)?;
            match joined.last_mut() {
                Some((last, count)) if *count == more && last.end() == same[0].address => last.blocks += same[0].blocks,
                _ => joined.push((same[0], more)),
            }
        }
        for (blocks, more) in joined {
            self.changed = true;
            change(&mut self.trees.references, self.store, &mut self.global_edits, blocks, |count| {
                count + u64::from(more)
            })?;
        }
        Ok(())
    }

    /// An extent that named the page, born in `born`, left the live tree.
    pub(crate) fn release(&mut self, page: &Pointer, born: Generation) -> Result<()> {
        if self.is_shown_by_snapshot(born) {
            return self.bury(page.run, born);
        }
        self.drop_count(page.run)
    }

    /// Moves a reference to the newest snapshot's dead list, which then owns its count.
    pub(crate) fn bury(&mut self, run: Run, born: Generation) -> Result<()> {
        self.changed = true;
        let key = Key::new(self.counters.newest_snapshot_id, kind::DEAD, self.counters.next_dead);
        self.counters.next_dead = following(self.counters.next_dead)?;
        self.insert_dead(key, &DeadValue { run, born })
    }

    /// Inserts an entry into a dead list.
    ///
    /// # Errors
    /// `Damaged` when another one has its sequence: the page of that one would never be free, nor
    /// counted.
    pub(crate) fn insert_dead(&mut self, key: Key, dead: &DeadValue) -> Result<()> {
        if self.trees.references.insert(self.store, &mut self.global_edits, key, &dead.encode())? {
            let Key { object, sub, .. } = key;
            return Err(Error::damaged(format!("dead list of snapshot {object} has entry {sub} already")));
        }
        Ok(())
    }

    /// Decrements the count of a page; the last decrement frees it.
    pub(crate) fn drop_count(&mut self, run: Run) -> Result<()> {
        self.changed = true;
        match self.count_of(run)? {
            1 => self.freed.push(run),
            count => self.set_count_of(run, count - 1)?,
        }
        Ok(())
    }
}
