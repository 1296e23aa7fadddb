//! Chooses the commit record that may be trusted, verified from the medium, and rebuilds the space
//! map from the chain before it.
//!
//! The order of a writable open (hazard: the host's page cache may show writes that never reached
//! the medium): barrier, evict ring and listed pages, read and verify; overwrite a rejected slot,
//! barrier; only then write, erase or truncate anything. With an atomic barrier (STORAGE-4) none of
//! that is needed, and nothing is ever rejected.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::allocator::{Allocator, in_space};
use super::ancestry::{Mark, OpenedLog};
use super::commit::{CommitTail, LogState, read_lists};
use super::operation::Logged;
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::log::LogMark;
use crate::format::record::CommitRecord;
use crate::format::values::HistoryValue;
use crate::format::{BLOCK, Generation, LOG, Pointer, RING_SLOTS, Run, Tag, slot_block};
use crate::frame::PageCipher;
use crate::pager::{AuthenticRecord, Pager};
use crate::storage::Storage;

/// A record whose root may be returned, with facts learned during its verification.
pub(super) struct Recovered {
    pub(super) record: CommitRecord,
    pub(super) tag: Tag,
    /// All authentic records, to follow the chain.
    pub(super) ring: Vec<AuthenticRecord>,
    /// First generation that was never used.
    pub(super) next_generation: Generation,
    /// The newest record, when it was left out.
    rejected: Option<Generation>,
    /// Without its line.
    pub(super) opened: OpenedRecord,
    /// Log entries after the record, and the last valid one.
    pub(super) logged: Laid,
}

/// Facts about the record that a volume opened.
#[derive(Default)]
pub(super) struct OpenedRecord {
    /// The record and its predecessors in the ring, newest first.
    pub(super) line: Vec<Mark>,
    /// Pending log mark of each of these records.
    pub(super) carried: Vec<Option<LogMark>>,
    pub(super) log: Option<OpenedLog>,
    /// A sentence when the newest record was left out, an entry of the log is lost or incomplete,
    /// or pages of the record are lost.
    pub(super) fallback: Option<String>,
    /// A sentence when something is lost that the log proves to have been durable: an entry, or the
    /// record that entries extend. Only readers continue then.
    pub(super) lost: Option<String>,
    /// Pages that the record lists and that do not open (specification 10.1 rule 7). Only readers
    /// go on then.
    pub(super) lost_pages: Vec<LostPage>,
}

/// Generations left for the session that opens: more than it can use, so that counting never
/// overflows.
const LAST_OPENED: u64 = u64::MAX - (1 << 48);

fn cut_short(pager: &Pager, record: &CommitRecord) -> Result<Option<Flaw>> {
    let (length, wanted) = (pager.storage().len()?, record.total_blocks);
    let is_short = length / BLOCK < wanted;
    Ok(is_short.then(|| Flaw::Short(format!("the file is truncated: length={length} blocks={wanted}"))))
}

/// A page that a record lists and that does not open whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LostPage {
    pub(crate) run: Run,
    pub(crate) reason: String,
}

enum Flaw {
    Short(String),
    /// At least one; whether any of them could not even be read, which proves nothing about the
    /// commit.
    Pages {
        lost: Vec<LostPage>,
        unread: bool,
    },
}

impl Flaw {
    fn reason(&self) -> String {
        match self {
            Flaw::Short(reason) => reason.clone(),
            Flaw::Pages { lost, .. } => {
                let first = lost.first().map_or("", |page| page.reason.as_str());
                if lost.len() > 1 {
                    format!("{} pages are lost, the first one: {first}", lost.len())
                } else {
                    first.to_owned()
                }
            }
        }
    }
}

/// Opens every page that the record lists, whole, and compares the length of the file. Errors: for
/// a writer when something cannot be read: a transient fault must not look like a torn commit; for
/// a reader when a server does not answer, which each further page would wait for.
fn flaw_of(pager: &Pager, record: &CommitRecord, writable: bool) -> Result<Option<Flaw>> {
    // The host may lose growth and keep the record. Only free space could lie past the end, but a
    // file must match its record.
    if let Some(flaw) = cut_short(pager, record)? {
        return Ok(Some(flaw));
    }
    let (mut lost, mut unread) = (Vec::new(), false);
    for (run, tag) in &record.allocated {
        if writable {
            pager.storage().evict(run.offset(), run.bytes())?;
        }
        let mut bytes = vec![0; run.bytes() as usize];
        let opened =
            pager.storage().read_at(run.offset(), &mut bytes).and_then(|()| open_listed(pager, *run, *tag, bytes));
        let reason = match opened {
            Ok(()) => continue,
            Err(Error::Damaged(text)) => text,
            Err(error @ Error::Io { .. }) if !writable && error.is_page_loss() => {
                unread = true;
                error.to_string()
            }
            Err(error) => return Err(error),
        };
        lost.push(LostPage { run: *run, reason });
    }
    Ok((!lost.is_empty()).then_some(Flaw::Pages { lost, unread }))
}

/// Opens a listed page. The list names no generation (early pages carry an older one), so it is
/// taken from the prologue; the tag binds the rest.
fn open_listed(pager: &Pager, run: Run, tag: Tag, bytes: Vec<u8>) -> Result<()> {
    let prologue = pager.cipher().open_prologue(run.address, &bytes)?;
    let pointer = Pointer { run, generation: prologue.generation, tag };
    pager.cipher().open(&pointer, bytes).map(drop)
}

/// Chooses the record to trust (specification 10.1); `seen` is a record that a user remembers as
/// durable (LINEAGE-2).
pub(super) fn choose(pager: &Pager, writable: bool, seen: Option<&Mark>) -> Result<Recovered> {
    // STORAGE-4: either the newest record is complete with all its pages, or it is damaged. No
    // other one replaces it, and its pages are read only on demand.
    let together = pager.storage().has_atomic_barrier();
    if writable && !together {
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
    let recovered = |chosen: AuthenticRecord, ring: Vec<AuthenticRecord>, fallback: Option<String>| {
        let LogFindings { laid, log, lost, torn } = read_log(pager, &chosen, Generation(generation), writable)?;
        let told = [fallback, lost.clone(), torn];
        let fallback = told.into_iter().flatten().reduce(|one, other| format!("{one}; {other}"));
        let AuthenticRecord { record, tag } = chosen;
        let opened = OpenedRecord { log, fallback, lost, ..OpenedRecord::default() };
        Ok(Recovered { record, tag, ring, next_generation, rejected: None, opened, logged: laid })
    };
    let flaw = if together { cut_short(pager, &newest.record)? } else { flaw_of(pager, &newest.record, writable)? };
    let Some(flaw) = flaw else { return recovered(newest, ring, None) };
    let reason = flaw.reason();
    // 10.1 rule 7: this is damage, never to be undone. A reader continues with the newest record
    // all the same. A writer does not: until the next commit is durable, all pages that this one
    // replaced are still whole (TXN-1), and may be the only copy of lost content.
    let go_on = |sentence: String, flaw: Flaw, newest, ring| -> Result<Recovered> {
        let lost_pages = match flaw {
            Flaw::Pages { lost, .. } if !writable => lost,
            Flaw::Pages { .. } => {
                let sentence = format!("{sentence}; it can be read, checked and rescued, but not written to");
                return Err(Error::damaged(sentence));
            }
            Flaw::Short(_) => return Err(Error::damaged(sentence)),
        };
        let sentence = format!("{sentence}; these pages' content is missing, and nothing can be added to the archive");
        tracing::warn!("{sentence}");
        let mut recovered = recovered(newest, ring, Some(sentence))?;
        recovered.opened.lost_pages = lost_pages;
        Ok(recovered)
    };
    let remembered = seen.is_some_and(|seen| seen.tag == newest.tag && seen.generation == newest.record.generation);
    let record = &newest.record;
    if together || record.two_barrier || record.closed || remembered || is_extended(pager, &newest)? {
        return go_on(format!("commit {generation} was durable, but {reason}"), flaw, newest, ring);
    }
    if matches!(flaw, Flaw::Pages { unread: true, .. }) {
        return go_on(format!("commit {generation} cannot be read whole: {reason}"), flaw, newest, ring);
    }
    let before = ring.iter().rev().nth(1).filter(|r| r.tag == newest.record.previous_tag).cloned();
    let Some(before) = before else {
        let sentence = format!("commit {generation} is incomplete ({reason}) and its predecessor is missing");
        return go_on(sentence, flaw, newest, ring);
    };
    if let Some(other) = flaw_of(pager, &before.record, writable)? {
        let (number, reason) = (before.record.generation.0, other.reason());
        let sentence = format!("commit {number} was durable, but {reason} (commit {generation} is incomplete)");
        return go_on(sentence, flaw, newest, ring);
    }
    let fallback = left_out(&newest.record, &before.record, &reason);
    tracing::warn!("{fallback}");
    Ok(Recovered { rejected: Some(newest.record.generation), ..recovered(before, ring, Some(fallback))? })
}

/// Returns whether the storage itself proves that there is a log, when no header is left: a block
/// in the place of the log begins an entry. The cipher has a log.
pub(crate) fn has_entries(storage: Arc<dyn Storage>, cipher: PageCipher) -> Result<bool> {
    Ok(storage.len()? >= LOG.1 * BLOCK && Pager::new(storage, cipher, 0).has_entries()?)
}

/// Returns whether an entry of the log extends the record: then its last barrier had returned.
fn is_extended(pager: &Pager, record: &AuthenticRecord) -> Result<bool> {
    if !pager.cipher().has_log() {
        return Ok(false);
    }
    let generation = record.record.generation;
    Ok(pager.read_log(generation, record.tag, u32::MAX, generation)?.has_entries)
}

type Laid = Option<(Logged, LogMark)>;

#[derive(Default)]
struct LogFindings {
    /// Beyond the record.
    laid: Laid,
    /// Which entries it has.
    log: Option<OpenedLog>,
    /// A sentence when some of it is lost that was durable.
    lost: Option<String>,
    /// A sentence when its last entry was interrupted, or damaged since.
    torn: Option<String>,
}

/// Reads the log after the chosen record (specification 10.2). Errors: `Damaged` for a writer when
/// some of it is lost: new writes would bury that.
fn read_log(pager: &Pager, chosen: &AuthenticRecord, newest: Generation, writable: bool) -> Result<LogFindings> {
    let record = &chosen.record;
    if !pager.cipher().has_log() {
        // An older header was put back.
        return match record.pending {
            Some(_) => Err(Error::damaged("the newest commit needs a log, and the header says that there is none")),
            None => Ok(LogFindings::default()),
        };
    }
    if writable && !pager.storage().has_atomic_barrier() {
        pager.evict_log()?;
    }
    let (generation, tag) = record.pending.map_or((record.generation, chosen.tag), |log| (log.generation, log.record));
    let most = match record.pending {
        Some(pending) => pending.number,
        None if record.closed => 0,
        None => u32::MAX,
    };
    let log = pager.read_log(generation, tag, most, newest)?;
    let short = record.pending.filter(|pending| log.last != Some(*pending)).map(|pending| {
        format!("the log lacks the {} entries that commit {} names as pending", pending.number, record.generation.0)
    });
    let lost = log.lost.or(short);
    if let Some(lost) = lost.as_ref().filter(|_| writable) {
        return Err(Error::damaged(format!("durable data is lost: {lost}")));
    }
    let torn = log.torn.filter(|_| lost.is_none()).map(|(number, time)| {
        let sentence = format!(
            "entry {number} of the log (commit {}) is incomplete: it was interrupted, or damaged since; data synced at {} UTC may be missing",
            record.generation.0,
            time.utc()
        );
        tracing::warn!("{sentence}");
        sentence
    });
    let opened = OpenedLog { generation, record: tag, tags: log.tags, damaged: lost.is_some() };
    Ok(LogFindings { laid: Logged::of(log.entries).zip(log.last), log: Some(opened), lost, torn })
}

/// Describes a record that was left out. An interrupted commit cannot be distinguished from one
/// that lost a page since, so the text names both, with the time of its changes.
fn left_out(newest: &CommitRecord, used: &CommitRecord, reason: &str) -> String {
    format!(
        "commit {} is incomplete ({reason}): it was interrupted, or damaged since; commit {} is used, and changes made between {} and {} UTC may be missing",
        newest.generation.0,
        used.generation.0,
        used.time.utc(),
        newest.time.utc()
    )
}

/// TXN-8: whether this record is left out when it is the newest and a page is lost.
pub(super) fn may_be_undone(record: &CommitRecord) -> bool {
    !(record.two_barrier || record.closed || record.allocated.is_empty())
}

impl Recovered {
    /// Overwrites the record that was left out, which must never win again, behind a barrier
    /// (TXN-4).
    pub(super) fn scrub_rejected(&self, pager: &Pager, environment: &dyn Environment) -> Result<()> {
        let Some(rejected) = self.rejected else { return Ok(()) };
        pager.scrub_slot(rejected.slot(), environment)?;
        pager.barrier()
    }

    pub(super) fn next_ino(&self) -> u64 {
        self.record.next_ino.max(self.logged.as_ref().map_or(0, |(logged, _)| logged.next_ino))
    }

    /// Returns the chosen record and its predecessors in the ring, newest first, each with its
    /// pending log mark.
    pub(super) fn line(&self) -> Vec<(Mark, Option<LogMark>)> {
        let mark = |record: &CommitRecord, tag| {
            let (session, first) = (record.session, record.session_first);
            (Mark { session, first, generation: record.generation, tag }, record.pending)
        };
        let mut line = vec![mark(&self.record, self.tag)];
        let mut previous = self.record.previous_tag;
        for older in self.ring.iter().rev().filter(|r| r.record.generation < self.record.generation) {
            if older.tag != previous {
                // Abandoned by an earlier recovery, or left over from before a gap that nothing
                // crosses.
                continue;
            }
            line.push(mark(&older.record, older.tag));
            previous = older.record.previous_tag;
        }
        line
    }

    /// Returns the first generation that was never used, is higher than `other`, and does not use
    /// the slot of the chosen record: until the next record is durable, that one is needed.
    pub(super) fn generation_after(&self, other: Generation) -> Generation {
        let next = self.next_generation.max(other.next());
        if next.slot() == self.record.generation.slot() { next.next() } else { next }
    }

    /// Returns the records from the checkpoint to the chosen one, oldest first; None when one of
    /// them is lost, or there is no checkpoint.
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

    /// Applies the commits since the checkpoint to the space map; returns false when the chain is
    /// broken and the map must be rebuilt.
    pub(super) fn restore_space(&self, allocator: &Allocator, pager: &Pager, chain: &mut CommitTail) -> Result<bool> {
        chain.tag = self.tag;
        chain.generation = self.record.generation;
        chain.checkpoint = self.record.checkpoint;
        chain.log =
            self.logged.as_ref().map_or(LogState::Idle, |(_, mark)| LogState::Pending { mark: *mark, laid: false });
        if pager.cipher().has_log() {
            chain.log_end = if self.record.closed { LOG.0 } else { LOG.1 };
        }
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
                freed.retain(|run| in_space(*run, total, pager));
                allocator.recover_pending_frees(record.generation, freed);
            }
        }
        Ok(true)
    }
}
