//! Commit history of an archive: the records in the ring, and one history record per earlier
//! writing session.
//!
//! # Invariants
//! LINEAGE-1  A record that is reported as durable outside of the file is durable. A writer reports
//!     its own newest one (its last barrier has returned, or recovery verified it from the medium).
//!     A reader reports only the one before the newest (by TXN-3 the newest was written after the
//!     barrier of that one returned), because a reader may see a record that so far is in the
//!     host's cache alone. The same holds for entries of the log. A writer names the last one
//!     that is durable, or that recovery read from the medium. A reader names the one before the
//!     last that it sees, as each is written once the one before is durable (10.3 rule 8), and the
//!     first one once the record is; and all that the newest record names as
//!     pending, as they were read from the medium before it was written.
//! LINEAGE-2  A recovery never undoes a record that was named by LINEAGE-1: handed in as `seen`, a
//!     bad page of it is damage (specification 10.1).
//! LINEAGE-3  So a record that was named and is not in this line was never undone by a crash: the
//!     file is older, or has diverged.
//! LINEAGE-4  An entry that was named is never missing from its record either, as long as that is
//!     the newest: nothing is written over it before a later record is durable (LOG-4). The record
//!     after it contains it, when the same session wrote that one, or names it as pending, when it
//!     is the first of another session (10.3 rule 12). While the ring has both, a later record that
//!     does neither was written to a copy without that entry. Once the ring has them no more,
//!     entries cannot be judged.
//!
//! The history is bounded: beyond [`MOST_SESSIONS`] the oldest records go. The time before the
//! oldest record is unknown, and the result is [`Ancestry::Unknown`]: never a false alarm, but also
//! no alarm for a fork that old.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use super::operation::Operation;
use crate::btree::{NodeStore, Tree};
use crate::error::Result;
use crate::format::log::LogMark;
use crate::format::values::HistoryValue;
use crate::format::{Generation, Key, SessionId, Tag, kind};

/// Sessions that the history keeps: 59 bytes each, so 240 KB and some 30 leaves, which the first
/// commit of a session counts in a few milliseconds. Ten sessions a day fill it in more than a
/// year.
pub(super) const MOST_SESSIONS: usize = 4096;
/// Surplus records that one session removes: an archive with more than that (of another writer) is
/// brought down in steps.
const PRUNED_AT_ONCE: usize = 64;

/// One commit record as others may remember it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) session: SessionId,
    pub(crate) first: Generation,
    pub(crate) generation: Generation,
    pub(crate) tag: Tag,
}

/// An entry of the log of a record, as others may remember it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryMark {
    /// From 1.
    pub(crate) number: u32,
    pub(crate) tag: Tag,
}

/// A durable record and its last log entry: the most that may be remembered (LINEAGE-1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Durable {
    pub(crate) mark: Mark,
    pub(crate) entry: Option<EntryMark>,
}

impl Durable {
    /// `log` counts when it is that of this record.
    pub(super) fn new(mark: Mark, log: Option<LogMark>) -> Durable {
        let own = log.filter(|log| log.is_of(mark.generation, mark.tag));
        Durable { mark, entry: own.map(|log| EntryMark { number: log.number, tag: log.entry }) }
    }
}

pub(super) struct OpenedLog {
    /// Generation of the record that it extends.
    pub(super) generation: Generation,
    pub(super) record: Tag,
    /// Tags of the valid entries.
    pub(super) tags: Vec<Tag>,
    /// One is lost that others came after.
    pub(super) damaged: bool,
}

impl OpenedLog {
    fn extends(&self, mark: &Mark) -> bool {
        (self.generation, self.record) == (mark.generation, mark.tag)
    }
}

/// Relation of the present commit to one that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ancestry {
    /// It is that one, or one that came after it.
    Descendant,
    /// It has a lower number.
    Older,
    /// It has the same number or a higher one, and that one is not among those before it.
    Diverged,
    /// The history does not reach back that far.
    Unknown,
}

pub(super) struct History<'a> {
    /// The record that was opened and those before it that the ring had, newest first.
    pub(super) line: &'a [Mark],
    /// Pending log mark of each record.
    pub(super) carried: &'a [Option<LogMark>],
    pub(super) log: Option<&'a OpenedLog>,
    pub(super) history: &'a Tree,
    pub(super) store: &'a NodeStore,
}

impl History<'_> {
    /// Returns whether the opened commit is `seen` or one of its descendants.
    pub(super) fn descent_from(&self, seen: &Mark) -> Result<Ancestry> {
        let Some(newest) = self.line.first().copied() else { return Ok(Ancestry::Unknown) };
        if seen.generation > newest.generation {
            return Ok(Ancestry::Older);
        }
        // The ring answers exactly, also for two machines that went on with one session from the
        // same memory image.
        if self.line.last().is_some_and(|oldest| oldest.generation <= seen.generation) {
            let known = self.line.iter().any(|mark| mark == seen);
            return Ok(if known { Ancestry::Descendant } else { Ancestry::Diverged });
        }
        if newest.session == seen.session && newest.first == seen.first {
            return Ok(Ancestry::Descendant);
        }
        Ok(match self.session_at(seen.generation)? {
            // The first session begins with generation 1: this one has no other before it.
            None if newest.first <= Generation(1) => Ancestry::Diverged,
            None => Ancestry::Unknown,
            // A session is one process that extends its own records: all up to its last are in one
            // line.
            Some(past) if past.session != seen.session || past.first != seen.first => Ancestry::Diverged,
            Some(past) if past.generation == seen.generation && past.tag != seen.tag => Ancestry::Diverged,
            Some(past) if past.generation < seen.generation => Ancestry::Diverged,
            Some(_) => Ancestry::Descendant,
        })
    }

    /// Returns the same for an entry of `seen`, a record known to continue here (LINEAGE-4).
    pub(super) fn descent_from_entry(&self, seen: &Mark, entry: &EntryMark) -> Ancestry {
        let Some(at) = self.line.iter().position(|mark| mark == seen) else { return Ancestry::Descendant };
        if let Some(log) = self.log.filter(|log| log.extends(seen)) {
            return match log.tags.get((entry.number as usize).saturating_sub(1)) {
                // Entries after a lost one prove that the file is not an older copy: it is reported
                // as damage.
                _ if log.damaged => Ancestry::Descendant,
                Some(tag) if *tag == entry.tag => Ancestry::Descendant,
                None if at == 0 => Ancestry::Older,
                Some(_) | None => Ancestry::Diverged,
            };
        }
        let Some(next) = at.checked_sub(1) else { return Ancestry::Older };
        let of_session = (self.line[next].session, self.line[next].first) == (seen.session, seen.first);
        let carries = |log: &LogMark| {
            let at_least = log.number > entry.number || (log.number == entry.number && log.entry == entry.tag);
            log.is_of(seen.generation, seen.tag) && at_least
        };
        if of_session || self.carried[next].as_ref().is_some_and(carries) {
            Ancestry::Descendant
        } else {
            Ancestry::Diverged
        }
    }

    /// Returns the durable point that a reader may remember.
    pub(super) fn durable_to_reader(&self) -> Option<Durable> {
        let newest = self.line.first()?;
        if let Some(log) = self.log.filter(|log| log.extends(newest))
            && let Some(before) = log.tags.len().checked_sub(1)
        {
            let entry = before.checked_sub(1).map(|at| EntryMark { number: before as u32, tag: log.tags[at] });
            return Some(Durable { mark: *newest, entry });
        }
        self.line.get(1).map(|before| Durable::new(*before, self.carried[0]))
    }

    /// `mark` and the last records of the sessions before it, newest first, `most` at most.
    pub(super) fn trail(&self, mark: Mark, most: usize) -> Result<Vec<Mark>> {
        let mut trail = vec![mark];
        let mut first = mark.first;
        while trail.len() < most && first > Generation(1) {
            let Some(past) = self.session_at(Generation(first.0 - 1))? else { break };
            // A history that does not go down would lead in circles.
            if past.first >= first {
                break;
            }
            first = past.first;
            trail.push(past);
        }
        Ok(trail)
    }

    /// Returns the last record of the ended session that began at `generation` or before; None when
    /// there is no such record (any more).
    fn session_at(&self, generation: Generation) -> Result<Option<Mark>> {
        let found = self.history.floor(self.store, Key::new(0, kind::HISTORY, generation.0), |key, value| {
            Ok((key, HistoryValue::decode(value)?))
        })?;
        Ok(found.filter(|(key, _)| key.object == 0 && key.kind == kind::HISTORY).map(|(key, value)| Mark {
            session: value.session,
            first: Generation(key.sub),
            generation: value.last,
            tag: value.last_tag,
        }))
    }
}

impl Operation<'_> {
    /// Writes the record of the session before this one, and removes the oldest ones beyond the
    /// bound.
    pub(super) fn record_session(&mut self, first: Generation, value: &HistoryValue) -> Result<()> {
        self.changed = true;
        self.of_commit = true;
        let store = self.store;
        let history = &mut self.trees.history;
        let edits = &mut self.global_edits;
        history.insert(store, edits, Key::new(0, kind::HISTORY, first.0), &value.encode())?;
        let (mut count, mut oldest) = (0, Vec::new());
        history.scan(store, Key::MIN, Key::MAX, &mut |key, _| {
            count += 1;
            if oldest.len() < PRUNED_AT_ONCE {
                oldest.push(key);
            }
            Ok(ControlFlow::Continue(()))
        })?;
        let surplus = usize::saturating_sub(count, MOST_SESSIONS);
        for key in oldest.into_iter().take(surplus) {
            history.remove(store, edits, key)?;
        }
        Ok(())
    }

    /// Makes this volume's history that of another one.
    pub(super) fn replace_history(&mut self, records: &[(Key, Vec<u8>)]) -> Result<()> {
        let mut there = BTreeMap::new();
        self.trees.history.scan(self.store, Key::MIN, Key::MAX, &mut |key, value| {
            there.insert(key, value.to_vec());
            Ok(ControlFlow::Continue(()))
        })?;
        for (key, value) in records {
            if there.remove(key).as_ref() != Some(value) {
                self.insert_history(*key, value)?;
            }
        }
        for key in there.into_keys() {
            self.trees.history.remove(self.store, &mut self.global_edits, key)?;
        }
        Ok(())
    }

    pub(crate) fn insert_history(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.changed = true;
        self.trees.history.insert(self.store, &mut self.global_edits, key, value)?;
        Ok(())
    }
}
