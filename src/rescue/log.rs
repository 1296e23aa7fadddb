//! What is left of the log, and over which leaves its entries are laid (specification 9.4, 9.5, 10.4).
//!
//! # Invariants
//! LAID-1  Only entries count that lead from the first block of the log on, each naming the one before it, and none behind one that does not open: each
//!     says what changed since the one before, so without it the rest is no moment of the archive. They name the generation g and the tag of the
//!     record that they extend. When that record is left with another tag, or is closed, they are another history's.
//! LAID-2  Entries say what the tree of g became before any commit after g: g + 1 contains it. So they are laid over leaves that are known to be part of
//!     the tree at g, which gives a newer version than these leaves, and an older one than any leaves of a commit after g: those are tried
//!     first, and an entry never takes the place of what they say. A record after g that names these very entries as pending
//!     contains none of them and has the tree of g: then they are laid over its leaves.
//! LAID-3  Where no leaves are known to be part of the tree at g, entries are laid over those of the newest version before it. Mostly that is the same
//!     tree, since a commit of an archive at rest writes no node; but commits between the two may have been destroyed without a trace, and then
//!     a file may have bytes of an older commit beside those of entries. So what comes of it is called unproved, as everything is when the
//!     log shows that the newest commit is lost (RESCUE-3).

use std::collections::BTreeMap;

use super::scan::as_damage;
use crate::error::{Error, Result};
use crate::format::log::{LOG_BLOCKS, LogEntry, LogMark};
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, Ino, Key, LOG, Tag, kind};
use crate::frame::PageCipher;
use crate::fs::LogPieces;
use crate::storage::Storage;

/// The entries that lead from the first block on, and what else the log shows.
#[derive(Default)]
pub(super) struct FoundLog {
    entries: Vec<LogEntry>,
    /// The last of them.
    last: Option<LogMark>,
    /// The highest generation that any entry extends.
    newest: Generation,
    /// Entries of one record are left of which one before is lost.
    lost: bool,
}

impl FoundLog {
    /// Blocks that cannot be read have no entries.
    pub(super) fn read(storage: &dyn Storage, cipher: &PageCipher) -> Result<FoundLog> {
        let mut found = FoundLog::default();
        if !cipher.has_log() {
            return Ok(found);
        }
        let mut bytes = vec![0; (LOG_BLOCKS * BLOCK) as usize];
        for (block, bytes) in (LOG.0..LOG.1).zip(bytes.chunks_exact_mut(BLOCK as usize)) {
            match storage.read_at(block * BLOCK, bytes).map_err(as_damage) {
                Err(Error::Damaged(_)) => bytes.fill(0),
                read => read?,
            }
        }
        let from = |block: u64| &bytes[((block - LOG.0) * BLOCK) as usize..];
        let (mut block, mut extends) = (LOG.0, None);
        while block < LOG.1
            && let Some(begun) = ignoring_damage(cipher.open_entry_head(block, from(block)))?.flatten()
        {
            let (head, number) = (begun.head, found.last.map_or(0, |last| last.number) + 1);
            let end = block + u64::from(head.blocks);
            let record = *extends.get_or_insert((head.generation, head.record));
            let previous = found.last.map_or(Tag::default(), |last| last.entry);
            if (head.generation, head.record) != record || (head.number, head.previous) != (number, previous) {
                break;
            }
            let whole = from(block)[..((end - block) * BLOCK) as usize].to_vec();
            let Some((body, entry)) = ignoring_damage(cipher.open_entry_body(&begun, block, whole))?.flatten() else {
                break;
            };
            let Some(decoded) = ignoring_damage(LogEntry::decode(&body))? else { break };
            found.entries.push(decoded);
            found.last = Some(LogMark { generation: record.0, record: record.1, number, entry });
            block = end;
        }
        found.look_behind(block, cipher, &from)?;
        Ok(found)
    }

    /// Heads behind the last entry that counts.
    fn look_behind<'a>(&mut self, block: u64, cipher: &PageCipher, from: &dyn Fn(u64) -> &'a [u8]) -> Result<()> {
        let last = self.last;
        self.newest = last.map_or(Generation(0), |last| last.generation);
        for block in block..LOG.1 {
            let Some(begun) = ignoring_damage(cipher.open_entry_head(block, from(block)))?.flatten() else { continue };
            let head = begun.head;
            // The next one may never have been whole; one behind that was written when it was durable. What is left of an older log is no loss.
            let whole_to = last.filter(|last| last.is_of(head.generation, head.record)).map_or(0, |last| last.number);
            self.lost |= head.generation >= self.newest && head.number > whole_to + 1;
            self.newest = self.newest.max(head.generation);
        }
        Ok(())
    }

    /// Whether the archive is known to have a log.
    pub(super) fn is_there(&self) -> bool {
        self.newest > Generation(0)
    }

    pub(super) fn newest(&self) -> Generation {
        self.newest
    }

    /// Decides by the records that are left (LAID-1, LAID-2).
    pub(super) fn laid(mut self, records: &[(CommitRecord, Tag)]) -> LaidLog {
        let newest = records.iter().map(|(record, _)| record).max_by_key(|record| record.generation);
        // What a later commit contains is no loss.
        let lost = self.lost && newest.is_none_or(|record| record.generation <= self.newest);
        // What a commit names as pending was durable.
        let has = |pending: LogMark| {
            let last = self.last.filter(|last| last.is_of(pending.generation, pending.record));
            last.is_some_and(|last| last.number >= pending.number)
        };
        let lost = lost || newest.and_then(|record| record.pending).is_some_and(|pending| !has(pending));
        let none = LaidLog { lost, ..LaidLog::default() };
        let Some(last) = self.last else { return none };
        let own = records.iter().find(|(record, _)| record.generation == last.generation);
        if own.is_some_and(|(record, tag)| *tag != last.record || record.closed) {
            return none;
        }
        let pending = newest.filter(|record| record.generation > last.generation).and_then(|record| {
            let own = record.pending.filter(|log| log.is_of(last.generation, last.record))?;
            Some((record.generation, own.number))
        });
        if let Some((_, number)) = pending {
            self.entries.truncate(number as usize);
        }
        let mut laid = LaidLog { over: pending.map_or(last.generation, |(generation, _)| generation), ..none };
        for entry in &self.entries {
            laid.records.extend(entry.records.iter().cloned());
        }
        laid.pieces = LogPieces::of(&self.entries);
        laid.entries = self.entries.len() as u64;
        laid
    }
}

/// None for what only a holder of the key can have made, and does not decode.
fn ignoring_damage<T>(opened: Result<T>) -> Result<Option<T>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(Error::Damaged(_)) => Ok(None),
        Err(error) => Err(error),
    }
}

/// What entries say beyond the leaves of a generation.
#[derive(Default)]
pub(super) struct LaidLog {
    /// The last generation whose tree they may be laid over.
    pub(super) over: Generation,
    pub(super) records: BTreeMap<Key, Option<Vec<u8>>>,
    pieces: LogPieces,
    pub(super) entries: u64,
    pub(super) lost: bool,
}

impl LaidLog {
    /// Numbers of inodes that entries have a record of.
    pub(super) fn inodes(&self) -> impl Iterator<Item = u64> {
        self.records.iter().filter(|(key, value)| key.kind == kind::INODE && value.is_some()).map(|(key, _)| key.object)
    }

    pub(super) fn has(&self, ino: Ino) -> bool {
        let mut records = self.records.range(Key::new(ino.0, 0, 0)..Key::new(ino.0.saturating_add(1), 0, 0));
        records.next().is_some() || self.pieces.of_file(ino).next().is_some()
    }

    /// Bytes of the file with their offsets, ascending.
    pub(super) fn pieces(&self, ino: Ino) -> Vec<(u64, Vec<u8>)> {
        self.pieces.of_file(ino).map(|(offset, data)| (offset, data.to_vec())).collect()
    }
}
