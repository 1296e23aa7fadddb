//! Makes changes durable with one log write instead of a commit's pages and record (LOG-1 to
//! LOG-5).

use std::sync::atomic::Ordering;

use super::chain_tail::{CommitTail, LogState, LogTail};
use super::group_commit::GroupCommit;
use crate::error::{Error, Result};
use crate::format::log::{EntryHead, LogEntry, entry_blocks, entry_capacity};
use crate::format::{BLOCK, LOG};

/// Longest entry in blocks; more data is cheaper to write once, by a commit.
const LONGEST: u64 = 64;
impl GroupCommit {
    /// Writes an entry of all published and dirty changes, and waits for its barrier. Returns false
    /// when a commit is needed: there is no log or no space in it, or a change that log entries
    /// cannot record.
    pub(super) fn append(&self, chain: &mut CommitTail) -> Result<bool> {
        let LogState::Open(tail) = chain.log else { return Ok(false) };
        if self.medium.pager.storage().has_atomic_barrier() {
            // A commit takes one barrier as well, and an entry would be written twice.
            return Ok(false);
        }
        let blocks = LONGEST.min(LOG.1 - tail.block);
        if blocks == 0 {
            return Ok(false);
        }
        let pager = &self.medium.pager;
        pager.check_identity().map_err(|error| pager.sticky_error().record("writing into the log", error))?;
        let Some(entry) = self.writer.lock().log_entry(entry_capacity(blocks))? else { return Ok(false) };
        if entry.is_empty() {
            // A failed commit may have taken the changes: then they are not durable.
            pager.sticky_error().check()?;
            return Ok(true);
        }
        // Without space, or when the host fails, each fsync takes its own commit, which reports the
        // error.
        if !self.promise_nodes(entry.pieces.len() as u64, false).unwrap_or(false) {
            self.writer.lock().leave_log();
            return Ok(false);
        }
        chain.log_end = chain.log_end.max(tail.block + entry_blocks(entry.length()));
        let written = self.write_entry(&tail, &entry);
        if written.is_err() {
            // It counts as logged by now.
            self.writer.lock().leave_log();
        }
        let after = match written {
            Err(Error::NoSpace(reason)) => {
                tracing::warn!("the host refused a write into the log: {reason}");
                return Ok(false);
            }
            written => written?,
        };
        pager.barrier()?;
        self.logged.0.fetch_add(1, Ordering::Relaxed);
        self.logged.1.fetch_add((after.block - tail.block) * BLOCK, Ordering::Relaxed);
        chain.log = LogState::Open(after);
        Ok(true)
    }

    /// Reserves space for `pieces` more (LOG-5); returns whether there is enough. The next commit
    /// releases it.
    pub(in crate::txn) fn promise_nodes(&self, pieces: u64, essential: bool) -> Result<bool> {
        self.nodes.lock().promise(&self.allocator, pieces, essential)
    }

    /// Answers the place behind it.
    fn write_entry(&self, tail: &LogTail, entry: &LogEntry) -> Result<LogTail> {
        let body = entry.encode();
        let blocks = entry_blocks(body.len());
        let head = EntryHead {
            generation: tail.generation,
            record: tail.record,
            number: tail.number + 1, // fewer than the log has blocks
            length: body.len() as u32,
            previous: tail.entry,
            time: self.medium.environment.now(),
            blocks: blocks as u16,
        };
        let tag = self.medium.pager.write_entry(&head, tail.block, &body)?;
        Ok(LogTail { block: tail.block + blocks, number: head.number, entry: tag, ..*tail })
    }
}
