//! Chooses the commit record that may be trusted, verified from the medium, and rebuilds the space map from the chain behind it.
//!
//! The order of a writable open (hazard: the host's page cache may show writes that never reached the medium):
//! barrier, evict ring and listed pages, read and verify; overwrite a rejected slot, barrier; only then write, erase or truncate anything.

use std::collections::BTreeMap;

use super::allocator::Allocator;
use super::commit::{Chain, read_lists};
use super::lineage::Mark;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::values::HistoryValue;
use crate::format::{BLOCK, Generation, Pointer, RESERVED, RING_SLOTS, Run, Tag, slot_block};
use crate::pager::{AuthenticRecord, Pager};

/// A record whose root may be returned, and what was learned on the way.
pub(super) struct Recovered {
    pub(super) record: CommitRecord,
    pub(super) tag: Tag,
    /// All authentic records, to follow the chain.
    pub(super) ring: Vec<AuthenticRecord>,
    /// First generation that was never used.
    pub(super) next_generation: Generation,
    /// A sentence when the newest record was rejected.
    pub(super) fallback: Option<String>,
}

/// Generations left for the session that opens: more than it can use, so that counting never overflows.
const LAST_OPENED: u64 = u64::MAX - (1 << 48);

/// Opens every page that the record lists, whole, and compares the length of the file; the first flaw is described.
///
/// # Errors
/// Only when something cannot be read: a transient fault must not look like a torn commit.
fn first_flaw(pager: &Pager, record: &CommitRecord, from_medium: bool) -> Result<Option<String>> {
    // The host may lose growth and keep the record. What is behind the end would be free space only, but a file must be what its record says.
    let length = pager.storage().len()?;
    if length / BLOCK < record.total_blocks {
        let wanted = record.total_blocks;
        return Ok(Some(format!("the file is truncated: length={length} blocks={wanted}")));
    }
    for (run, tag) in &record.allocated {
        if from_medium {
            pager.storage().evict(run.offset(), run.bytes())?;
        }
        let mut bytes = vec![0; run.bytes() as usize];
        match pager.storage().read_at(run.offset(), &mut bytes) {
            Ok(()) => {}
            Err(Error::Damaged(text)) => return Ok(Some(text)),
            Err(error) => return Err(error),
        }
        match open_listed(pager, *run, *tag, bytes) {
            Ok(()) => {}
            Err(Error::Damaged(text)) => return Ok(Some(text)),
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The list names no generation (early pages carry an older one), so it is taken from the prologue; the tag binds the rest.
fn open_listed(pager: &Pager, run: Run, tag: Tag, bytes: Vec<u8>) -> Result<()> {
    let prologue = pager.cipher().open_prologue(run.address, &bytes)?;
    let pointer = Pointer { run, generation: prologue.generation, tag };
    pager.cipher().open(&pointer, bytes).map(drop)
}

/// Specification 10.1; `seen` is a record that somebody remembers as durable (LINEAGE-2).
pub(super) fn choose(
    pager: &Pager,
    writable: bool,
    environment: &dyn Environment,
    seen: Option<&Mark>,
) -> Result<Recovered> {
    if writable {
        pager.storage().barrier()?;
        for slot in 0..RING_SLOTS {
            pager.storage().evict(slot_block(slot) * BLOCK, BLOCK)?;
        }
    }
    let ring = pager.read_ring()?;
    let Some(newest) = ring.last().cloned() else {
        return Err(Error::damaged("no commit record opens: every slot of the commit ring is destroyed"));
    };
    let generation = newest.record.generation.0;
    if generation > LAST_OPENED {
        // Only a holder of the key can have made it; no program counts that far.
        return Err(Error::damaged(format!("commit number is too great to go on from: {generation}")));
    }
    let next_generation = newest.record.generation.next();
    let Some(reason) = first_flaw(pager, &newest.record, writable)? else {
        return Ok(Recovered { record: newest.record, tag: newest.tag, ring, next_generation, fallback: None });
    };
    let remembered = seen.is_some_and(|seen| seen.tag == newest.tag && seen.generation == newest.record.generation);
    if newest.record.two_barrier || newest.record.closed || remembered {
        // It was durable: this is damage, never to be undone in silence.
        return Err(Error::damaged(format!("commit {generation} was durable, but {reason}")));
    }
    let before = ring.iter().rev().nth(1).filter(|r| r.tag == newest.record.previous_tag).cloned();
    let Some(before) = before else {
        return Err(Error::damaged(format!(
            "commit {generation} is incomplete ({reason}) and its predecessor is missing"
        )));
    };
    if let Some(reason) = first_flaw(pager, &before.record, writable)? {
        return Err(Error::damaged(format!(
            "commit {} was durable, but {reason} (commit {generation} is incomplete)",
            before.record.generation.0
        )));
    }
    let fallback = format!(
        "commit {generation} was interrupted before it was durable ({reason}); commit {} is used",
        before.record.generation.0
    );
    tracing::warn!("{fallback}");
    if writable {
        // The abandoned record must never win again.
        pager.scrub_slot(newest.record.generation.slot(), environment)?;
        pager.barrier()?;
    }
    Ok(Recovered { record: before.record, tag: before.tag, ring, next_generation, fallback: Some(fallback) })
}

/// Freed runs may be longer than a page.
pub(super) fn in_space(run: Run, total: u64) -> bool {
    run.end() <= total && RESERVED.iter().all(|&(start, end)| run.end() <= start || run.address >= end)
}

impl Recovered {
    /// The chosen record and those before it as far as the ring has them, newest first.
    pub(super) fn line(&self) -> Vec<Mark> {
        let mark = |record: &CommitRecord, tag| Mark {
            session: record.session,
            first: record.session_first,
            generation: record.generation,
            tag,
        };
        let mut line = vec![mark(&self.record, self.tag)];
        let mut previous = self.record.previous_tag;
        for older in self.ring.iter().rev().filter(|r| r.record.generation < self.record.generation) {
            if older.tag != previous {
                // Abandoned by an earlier recovery, or left over from before a gap that nothing crosses.
                continue;
            }
            line.push(mark(&older.record, older.tag));
            previous = older.record.previous_tag;
        }
        line
    }

    /// The records from the checkpoint to the chosen one, oldest first; None when one of them is lost, or there is no checkpoint.
    fn chain(&self) -> Option<Vec<&CommitRecord>> {
        if self.record.checkpoint == Generation(0) {
            return None; // TXN-7
        }
        let by_tag: BTreeMap<Tag, &CommitRecord> = self.ring.iter().map(|r| (r.tag, &r.record)).collect();
        let mut chain = vec![&self.record];
        while let Some(oldest) = chain.last()
            && oldest.generation > self.record.checkpoint
        {
            let before = by_tag.get(&oldest.previous_tag)?;
            if before.generation >= oldest.generation {
                return None;
            }
            chain.push(before);
        }
        chain.reverse();
        (chain.first()?.generation == self.record.checkpoint).then_some(chain)
    }

    /// Feeds the space map with what happened since the checkpoint; false when the chain is broken and the map has to be rebuilt.
    pub(super) fn restore_space(&self, allocator: &Allocator, pager: &Pager, chain: &mut Chain) -> Result<bool> {
        chain.tag = self.tag;
        chain.generation = self.record.generation;
        chain.checkpoint = self.record.checkpoint;
        chain.previous_session = Some((
            self.record.session_first,
            HistoryValue { session: self.record.session, last: self.record.generation, last_tag: self.tag },
        ));
        let Some(records) = self.chain() else { return Ok(false) };
        for record in records {
            let (allocated, mut freed, pages) = match read_lists(pager, record) {
                Ok(lists) => lists,
                Err(Error::Damaged(reason)) => {
                    tracing::warn!("the lists of commit {} are lost: {reason}", record.generation.0);
                    return Ok(false);
                }
                Err(error) => return Err(error),
            };
            allocator.recover_lists(allocated, &freed);
            chain.list_pages.extend(pages);
            if record.generation == self.record.generation {
                // TXN-1: they wait for the next commit, as they did before.
                // Never makes anything outside of the page space free.
                let total = allocator.total();
                freed.retain(|run| in_space(*run, total));
                allocator.recover_waiting(record.generation, freed);
            }
        }
        Ok(true)
    }
}
