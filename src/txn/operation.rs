//! One atomic change of the archive: works on its own copy of the trees, published whole or
//! dropped; and the reference counts of pages, as run-length records in the reference tree
//! (specification section 8): a count is the number of extents and dead-list entries that name a
//! page.
//!
//! Its changes are recorded in log entries, and replayed from them (specification 9.4, 9.5).
//!
//! # Invariants
//! LOG-1  Entry k together with the entries before it and the record that they extend is exactly
//!     the content that a commit at that moment would have made durable: it is gathered under the
//!     writers' lock, with the gate of the write buffer exclusive, from published and dirty
//!     changes. It leaves out only changes that a commit, or an earlier entry, contains.
//! LOG-2  All changes that follow from records of tree 1 are derived from them on replay: the
//!     extents before and after give the references that a page loses and gains. So an operation
//!     that brings pages in, or takes dirty data into the trees, is made durable by a commit.
//! LOG-3  An entry is written by the leader, in the place after the previous one, once that one is
//!     durable; and only on top of the newest record, of this session, when that has no log
//!     pending.
//! LOG-4  No block of the log that an entry of the newest durable record takes is written. A record
//!     that does not contain the log of the one before it names that log as pending, and no entry
//!     is written until one contains it.
//! LOG-5  Dirty data in an entry can always be committed: space for the data is promised before it
//!     is accepted (STAGE-4), space for the nodes that name it before the entry is written. Other
//!     changes are published concurrently, and no commit may leave the dirty data out. Without
//!     space for its nodes there would be no commit at all, and nothing that is deleted would ever
//!     be free.
//! LOG-6  Where the tree is damaged, a reader sees the content of the log, or an error, never an
//!     older state. A record belongs to one leaf, by its key. Where a node on the way to that is
//!     damaged the record has no place, and all that lies below this node is lost with it until the
//!     archive is opened again, even if a second read of the node succeeds: together with the log
//!     it would be an older state. Records of other leaves are replayed all the same, which needs
//!     only the nodes on their own paths. Pieces of a file with a damaged inode, in the tree or in
//!     the log, count as damaged too. No writer continues on top of that: the commit would have to
//!     cover the records without place, and the pages that they name.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use super::state::{Counters, Publication, State, Trees, View};
use crate::btree::{Edits, NodeStore, Tree};
use crate::error::{Error, Result};
use crate::format::log::{DroppedRange, LogEntry, is_record_of_files};
use crate::format::values::{DeadValue, Extent, ReferenceValue};
use crate::format::{Generation, Ino, Key, MAX_INO, Pointer, Run, Tag, kind};

/// The working copy of an operation; see `Volume::operate`.
pub(crate) struct Operation<'v> {
    pub(super) store: &'v NodeStore,
    pub(super) generation: Generation,
    pub(super) trees: Trees,
    pub(super) counters: Counters,
    /// Anything at all was changed: otherwise nothing is published.
    pub(super) changed: bool,
    /// Edits of the live tree: its superseded nodes may belong to a snapshot.
    pub(super) live_edits: Edits,
    /// Edits of the global trees, which no snapshot contains.
    pub(super) global_edits: Edits,
    /// Pages that this operation brings in.
    pub(super) adopted: Vec<(Run, Tag)>,
    /// Pages whose last reference this operation removed.
    pub(super) freed: Vec<Run>,
    /// Part of the commit itself: may use all space, including the reserve of commits.
    pub(super) of_commit: bool,
    /// Packed pages that lost some of their references.
    pub(super) stale: Vec<Pointer>,
    /// Cells that get the number of the state when the operation is published.
    pub(super) carried: Vec<Publication>,
    pub(super) log: Changes,
}

impl<'v> Operation<'v> {
    pub(super) fn new(store: &'v NodeStore, generation: Generation, base: &State) -> Operation<'v> {
        Operation {
            store,
            generation,
            trees: base.trees.clone(),
            counters: base.counters,
            changed: false,
            live_edits: Edits::new(generation),
            global_edits: Edits::new(generation),
            adopted: Vec::new(),
            freed: Vec::new(),
            of_commit: false,
            stale: Vec::new(),
            carried: Vec::new(),
            log: Changes::default(),
        }
    }

    pub(crate) fn view(&self) -> View<'_> {
        View { tree: &self.trees.live, store: self.store, finger: None }
    }

    /// The open transaction: `born` of every new extent.
    pub(crate) fn generation(&self) -> Generation {
        self.generation
    }

    /// Inserts or replaces a record of the live tree; returns whether it was there.
    pub(crate) fn insert(&mut self, key: Key, value: &[u8]) -> Result<bool> {
        self.changed = true;
        self.log.record(key);
        self.trees.live.insert(self.store, &mut self.live_edits, key, value)
    }

    pub(crate) fn remove(&mut self, key: Key) -> Result<bool> {
        let removed = self.trees.live.remove(self.store, &mut self.live_edits, key)?;
        self.changed |= removed;
        self.log.record(key);
        Ok(removed)
    }

    /// A number never used before; counts the inode as in use.
    pub(crate) fn allocate_ino(&mut self) -> Result<Ino> {
        let ino = self.set_aside_inos(1)?;
        self.inode_made();
        Ok(ino)
    }

    /// Allocates `count` inode numbers and returns the first. They are never reused, even if
    /// unused; `inode_made` counts used ones.
    pub(crate) fn set_aside_inos(&mut self, count: u64) -> Result<Ino> {
        let first = self.counters.next_ino;
        match first.checked_add(count) {
            Some(next) if next <= MAX_INO + 1 => self.counters.next_ino = next,
            _ => return Err(Error::NoSpace("inode numbers are used up".into())),
        }
        self.changed = true;
        Ok(Ino(first))
    }

    /// A number that was set aside is in use now.
    pub(crate) fn inode_made(&mut self) {
        self.changed = true;
        self.counters.inodes = self.counters.inodes.saturating_add(1);
    }

    /// Counts an inode as deleted: its last record is removed.
    pub(crate) fn inode_gone(&mut self) {
        self.changed = true;
        self.counters.inodes = self.counters.inodes.saturating_sub(1);
    }

    pub(crate) fn carry(&mut self, publication: &Publication) {
        debug_assert!(!publication.is_set(), "it was published before");
        self.carried.push(publication.clone());
    }

    /// Drops the dirty bytes of the range once this operation is published (specification 9.5).
    pub(crate) fn drop_staged(&mut self, ino: Ino, range: Range<u64>) {
        self.log.drop_range(DroppedRange { ino, start: range.start, end: range.end });
    }

    /// Marks the operation as durable by a commit only: it brings pages in, takes staged data into
    /// the trees, or makes changes that a log entry cannot express.
    pub(crate) fn needs_commit(&mut self) {
        self.log.need_commit();
    }

    /// Notes a page that loses some of its references in this operation, and may hold other files.
    pub(crate) fn note_stale(&mut self, page: &Pointer) {
        if self.stale.last() != Some(page) {
            self.stale.push(*page);
        }
    }

    /// Nodes that the next commit has to write because of this operation, net.
    pub(super) fn dirtied(&self) -> i64 {
        self.live_edits.dirtied + self.global_edits.dirtied
    }

    /// Moves nodes of the live tree that the newest snapshot still shows to its dead list instead
    /// of freeing them.
    pub(super) fn bury_snapshot_nodes(&mut self) -> Result<()> {
        let newest = self.counters.newest_snapshot;
        if newest == Generation(0) {
            return Ok(());
        }
        let (theirs, ours): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.live_edits.superseded).into_iter().partition(|node| {
                // A node that is not stored yet belongs to the commit in flight, which is newer
                // than any snapshot.
                node.stored.get().is_some_and(|pointer| pointer.generation <= newest)
            });
        self.live_edits.superseded = ours;
        for pointer in theirs.iter().filter_map(|node| node.stored.get()) {
            self.bury(pointer.run, pointer.generation)?;
        }
        Ok(())
    }
}

impl Operation<'_> {
    /// Applies the records and the counters to tree 1, and derives their effect on pages (LOG-2).
    /// Idempotent. Errors: `Damaged` where a record has no place, or does not decode: no writer
    /// continues with a part of them.
    pub(super) fn replay(&mut self, logged: &Logged) -> Result<()> {
        self.needs_commit();
        self.count(logged);
        let mut released: Vec<(Pointer, Generation)> = Vec::new();
        for (key, value) in &logged.records {
            if key.kind == kind::EXTENT {
                let old = self.view().get(*key, Extent::decode)?;
                let new = value.as_deref().map(Extent::decode).transpose()?;
                let name = |extent: &Extent| (extent.page, extent.born);
                if old.as_ref().map(name) != new.as_ref().map(name) {
                    if let Some(new) = &new {
                        self.share(&new.page, 1)?;
                    }
                    released.extend(old.as_ref().map(name));
                }
            }
            let _there = match value {
                Some(value) => self.insert(*key, value)?,
                None => self.remove(*key)?,
            };
        }
        // After all new references are counted, so that no page loses its last count in between.
        for (page, born) in released {
            self.release(&page, born)?;
            self.note_stale(&page);
        }
        Ok(())
    }

    /// Like [`Self::replay`], for read-only volumes. Skips records of a damaged node; that node is
    /// lost with all its records (LOG-6).
    pub(super) fn replay_read_only(&mut self, logged: &Logged) -> Result<()> {
        self.count(logged);
        let mut damage = Vec::new();
        for (key, value) in &logged.records {
            match self.trees.live.overlay(self.store, &mut self.live_edits, *key, value.as_deref()) {
                Err(Error::Damaged(reason)) => damage.push(reason),
                laid => laid?,
            }
        }
        if let Some(first) = damage.first() {
            tracing::warn!("log records on damaged nodes: {}; the first one: {first}", damage.len());
        }
        Ok(())
    }

    fn count(&mut self, logged: &Logged) {
        self.changed = true;
        self.counters.next_ino = self.counters.next_ino.max(logged.next_ino);
        self.counters.inodes = logged.inodes;
    }
}

fn reference_key(block: u64) -> Key {
    Key::new(0, kind::REFERENCE, block)
}

/// The record that covers or precedes `block`: (first block, value).
fn reference_floor(tree: &Tree, store: &NodeStore, block: u64) -> Result<Option<(u64, ReferenceValue)>> {
    let found = tree.floor(store, reference_key(block), |key, value| {
        Ok((key.kind == kind::REFERENCE && key.object == 0).then_some((key.sub, value.to_vec())))
    })?;
    match found.flatten() {
        Some((start, value)) => Ok(Some((start, ReferenceValue::decode(&value)?))),
        None => Ok(None),
    }
}

/// Returns the count of the page whose first block is `block`.
pub(crate) fn reference_count(tree: &Tree, store: &NodeStore, block: u64) -> Result<u64> {
    Ok(match reference_floor(tree, store, block)? {
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
fn change_references(
    tree: &mut Tree,
    store: &NodeStore,
    edits: &mut Edits,
    blocks: Run,
    of: impl Fn(u64) -> u64,
) -> Result<()> {
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
        tree.remove(store, edits, reference_key(record.start))?;
    }
    for record in new.iter().filter(|record| at_start(&old, record.start) != Some(**record)) {
        // `push` bounds both.
        let value = ReferenceValue { run_blocks: (record.end - record.start) as u32, count: record.count as u32 };
        tree.insert(store, edits, reference_key(record.start), &value.encode())?;
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
        && let Some((first, value)) = reference_floor(tree, store, before)?
        && first.saturating_add(u64::from(value.run_blocks)) >= start
    {
        found.push(counted(first, value));
    }
    tree.scan(store, reference_key(start), reference_key(end.saturating_add(1)), &mut |key, value| {
        found.push(counted(key.sub, ReferenceValue::decode(value)?));
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(found)
}

impl Operation<'_> {
    fn count_of(&self, run: Run) -> Result<u64> {
        reference_count(&self.trees.references, self.store, run.address)
    }

    fn set_count_of(&mut self, run: Run, count: u64) -> Result<()> {
        change_references(&mut self.trees.references, self.store, &mut self.global_edits, run, |_| count)
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
            change_references(&mut self.trees.references, self.store, &mut self.global_edits, blocks, |count| {
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

    /// Inserts an entry into a dead list. Errors: `Damaged` when another one has its sequence: the
    /// page of that one would never be free, nor counted.
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

/// Records beyond which a commit costs less than naming them.
const MOST_RECORDS: usize = 4096;
/// Ranges likewise.
const MOST_RANGES: usize = 256;

/// Changes of tree 1, by key, and of dirty data.
#[derive(Default)]
pub(super) struct Changes {
    keys: Vec<Key>,
    dropped: Vec<DroppedRange>,
    needs_commit: bool,
}

impl Changes {
    pub(super) fn record(&mut self, key: Key) {
        if self.keys.last() == Some(&key) {
            return;
        }
        if !is_record_of_files(key) {
            // Records of a later program, or invalid ones, that are removed.
            self.need_commit();
        }
        if self.keys.len() == MOST_RECORDS {
            // Often the same ones.
            self.sort();
        }
        if self.keys.len() >= MOST_RECORDS {
            self.need_commit();
        }
        if !self.needs_commit {
            self.keys.push(key);
        }
    }

    pub(super) fn drop_range(&mut self, range: DroppedRange) {
        if self.dropped.len() >= MOST_RANGES {
            self.need_commit();
        }
        if !self.needs_commit {
            self.dropped.push(range);
        }
    }

    pub(super) fn need_commit(&mut self) {
        *self = Changes { needs_commit: true, ..Changes::default() };
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty() && self.dropped.is_empty() && !self.needs_commit
    }

    pub(super) fn absorb(&mut self, later: Changes) {
        if later.needs_commit {
            self.need_commit();
        }
        later.keys.into_iter().for_each(|key| self.record(key));
        later.dropped.into_iter().for_each(|range| self.drop_range(range));
    }

    fn sort(&mut self) {
        self.keys.sort_unstable();
        self.keys.dedup();
    }

    /// Returns an entry with the records as in `state`; None when it takes too many bytes, or needs
    /// a commit.
    pub(super) fn entry(&mut self, state: &State, store: &NodeStore, capacity: usize) -> Result<Option<LogEntry>> {
        if self.needs_commit {
            return Ok(None);
        }
        self.sort();
        let mut entry = LogEntry {
            next_ino: state.counters.next_ino,
            inodes: state.counters.inodes,
            dropped: self.dropped.clone(),
            ..LogEntry::default()
        };
        for key in &self.keys {
            entry.records.push((*key, state.trees.live.get(store, *key, |value| Ok(value.to_vec()))?));
        }
        Ok((entry.length() <= capacity).then_some(entry))
    }
}

/// Entries of the log after a record; their records, the later over the earlier ones, and the
/// counters of the last.
pub(crate) struct Logged {
    pub(crate) entries: Vec<LogEntry>,
    pub(super) records: BTreeMap<Key, Option<Vec<u8>>>,
    pub(super) next_ino: u64,
    inodes: u64,
}

impl Logged {
    /// None without an entry.
    pub(super) fn of(entries: Vec<LogEntry>) -> Option<Logged> {
        let LogEntry { next_ino, inodes, .. } = *entries.last()?;
        let mut records = BTreeMap::new();
        for entry in &entries {
            records.extend(entry.records.iter().cloned());
        }
        Some(Logged { entries, records, next_ino, inodes })
    }

    /// Greatest inode number that a record has; 0 without any.
    pub(super) fn last_ino(&self) -> u64 {
        let there = self.records.iter().rev().find(|(_, value)| value.is_some());
        there.map_or(0, |(key, _)| key.object)
    }
}
