//! What the archive knows of its own past: the records in the ring, and one history record per writing session before them.
//!
//! # Invariants
//! LINEAGE-1  A record that is named as durable to somebody outside of the file is durable: to a writer its own newest one (its last barrier has
//!     returned, or recovery verified it from the medium), to a reader only the one before the newest (by TXN-3 the newest was written after
//!     the barrier of that one returned), because a reader may see a record that so far is in the host's cache alone.
//! LINEAGE-2  A recovery never undoes a record that was named by LINEAGE-1: handed in as `seen`, a bad page of it is damage (specification 10.1).
//! LINEAGE-3  So a record that was named and is not in this line was never undone by a crash: the file is older, or was written apart.
//!
//! The history is bounded: beyond [`MOST_SESSIONS`] the oldest records go. Of what lies before the oldest record nothing can be said any
//! more, and that is what is answered ([`Descent::Unknown`]): never a false alarm, but also no alarm for a fork that old.

use std::ops::ControlFlow;

use super::operation::Operation;
use crate::btree::{NodeStore, Tree};
use crate::error::Result;
use crate::format::values::HistoryValue;
use crate::format::{Generation, Key, SessionId, Tag, kind};

/// Sessions that the history keeps: 59 bytes each, so 240 KB and some 30 leaves, which the first commit of a session counts in a few
/// milliseconds. Ten sessions a day fill it in more than a year.
pub(super) const MOST_SESSIONS: usize = 4096;
/// Surplus records that one session removes: an archive with more than that (of another writer) is brought down in steps.
const PRUNED_AT_ONCE: usize = 64;

/// One commit record as others may remember it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) session: SessionId,
    /// First generation of the session.
    pub(crate) first: Generation,
    pub(crate) generation: Generation,
    pub(crate) tag: Tag,
}

/// How the present commit relates to one that was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Descent {
    /// It is that one, or one that came after it.
    Continues,
    /// It has a lower number.
    Earlier,
    /// It has the same number or a higher one, and that one is not among those before it.
    Apart,
    /// The history does not reach back that far.
    Unknown,
}

/// What an open archive knows of the commits before it.
pub(super) struct Past<'a> {
    /// The record that was opened and those before it that the ring had, newest first.
    pub(super) line: &'a [Mark],
    pub(super) history: &'a Tree,
    pub(super) store: &'a NodeStore,
}

impl Past<'_> {
    /// Whether what was opened is `seen` or came after it.
    pub(super) fn descent_from(&self, seen: &Mark) -> Result<Descent> {
        let Some(newest) = self.line.first().copied() else { return Ok(Descent::Unknown) };
        if seen.generation > newest.generation {
            return Ok(Descent::Earlier);
        }
        // The ring answers exactly, also for two machines that went on with one session from the same memory image.
        if self.line.last().is_some_and(|oldest| oldest.generation <= seen.generation) {
            let known = self.line.iter().any(|mark| mark == seen);
            return Ok(if known { Descent::Continues } else { Descent::Apart });
        }
        if newest.session == seen.session && newest.first == seen.first {
            return Ok(Descent::Continues);
        }
        Ok(match self.session_at(seen.generation)? {
            // The first session begins with generation 1: this one has no other before it.
            None if newest.first <= Generation(1) => Descent::Apart,
            None => Descent::Unknown,
            // A session is one process that extends its own records: all up to its last are in one line.
            Some(past) if past.session != seen.session || past.first != seen.first => Descent::Apart,
            Some(past) if past.generation == seen.generation && past.tag != seen.tag => Descent::Apart,
            Some(past) if past.generation < seen.generation => Descent::Apart,
            Some(_) => Descent::Continues,
        })
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

    /// The last record of the ended session that began at `generation` or before; None when there is no such record (any more).
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
    /// Writes the record of the session before this one, and removes the oldest ones beyond the bound.
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

    /// Puts a record of another volume's history into this one's.
    pub(crate) fn insert_history(&mut self, key: Key, value: &[u8]) -> Result<()> {
        self.changed = true;
        self.trees.history.insert(self.store, &mut self.global_edits, key, value)?;
        Ok(())
    }
}
