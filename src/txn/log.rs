//! Log entries: changes of the open transaction, recorded and replayed (specification 9.4, 9.5).
//!
//! # Invariants
//! LOG-1  Entry k together with the entries before it and the record that they extend is exactly
//!     the content that a commit at that moment would have made durable: it is gathered under the
//!     writers' lock, with the gate of the write buffer exclusive, from published and dirty
//!     changes. It leaves out only changes that a commit, or an earlier entry, contains.
//! LOG-2  All changes that follow from records of tree 1 are derived from them on replay: the
//!     extents before and after give the references that a page loses and gains. So an operation
//!     that brings pages in, or takes dirty data into the trees, is made durable by a commit.
//! LOG-3  An entry is written by the leader, in the place after the previous one, after that one's
//!     barrier; and only on top of the newest record, of this session, when that has no log
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
//!     no node but those on their own way. Pieces of a file whose inode is damaged, in the tree or
//!     in the log, count as damaged too. No writer continues on top of that: the commit would have
//!     to cover the records without place, and the pages that they name.

use std::collections::BTreeMap;

use super::state::State;
use crate::btree::NodeStore;
use crate::error::Result;
use crate::format::Key;
use crate::format::log::{DroppedRange, LogEntry, is_record_of_files};

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

pub(crate) struct Logged {
    pub(crate) entries: Vec<LogEntry>,
    pub(super) records: LoggedRecords,
}

impl Logged {
    /// None without an entry.
    pub(super) fn of(entries: Vec<LogEntry>) -> Option<Logged> {
        (!entries.is_empty()).then(|| Logged { records: LoggedRecords::of(&entries), entries })
    }

    pub(super) fn next_ino(&self) -> u64 {
        self.records.next_ino
    }

    /// Greatest inode number that a record has; 0 without any.
    pub(super) fn last_ino(&self) -> u64 {
        let there = self.records.records.iter().rev().find(|(_, value)| value.is_some());
        there.map_or(0, |(key, _)| key.object)
    }
}

/// The records of several entries, the later over the earlier ones, and the counters of the last.
#[derive(Default)]
pub(super) struct LoggedRecords {
    pub(super) records: BTreeMap<Key, Option<Vec<u8>>>,
    pub(super) next_ino: u64,
    pub(super) inodes: u64,
}

impl LoggedRecords {
    fn of(entries: &[LogEntry]) -> LoggedRecords {
        let mut all = LoggedRecords::default();
        for entry in entries {
            all.records.extend(entry.records.iter().cloned());
            (all.next_ino, all.inodes) = (entry.next_ino, entry.inodes);
        }
        all
    }

    pub(super) fn len(&self) -> u64 {
        self.records.len() as u64
    }
}
