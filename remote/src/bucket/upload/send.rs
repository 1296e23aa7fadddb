//! What was written goes up: segments while more comes, and the records that name them.

use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;

use lockbox::{Error, Result};
use rangemap::RangeSet;

use super::super::block_cache::Block;
use super::super::layout::{self, BLOCK, Kind, MAX_BLOCKS};
use super::super::map::Map;
use super::super::object_names::random;
use super::super::object_ref::{Entry, Id, Place};
use super::super::session::{Inline, Session, placed};
use super::Staged;

/// Segments under way at once; each is in memory.
const SENDING: usize = 4;
/// Most blocks that a record itself has: 4 MiB.
pub(super) const INLINE: usize = 4 << 8;

/// What goes with one record.
struct Cut {
    map: Map,
    inline: Vec<Inline>,
    length: u64,
    /// Segments that have to be up before it.
    sending: Vec<Id>,
    /// Those that are named from then on, or dead.
    made: HashSet<Id>,
}

impl Staged {
    /// Waits until what is under way is up; with `all`, what gathers goes up first.
    pub(in super::super) fn settle(&self, all: bool) -> Result<()> {
        if all {
            self.send()?;
        }
        let mut state = self.shared.state.lock();
        while !state.sending.is_empty() {
            self.shared.sent.wait(&mut state);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Has what gathered go up as segments.
    pub(super) fn send(&self) -> Result<()> {
        loop {
            let mut state = self.shared.state.lock();
            while state.sending.len() >= SENDING {
                self.shared.sent.wait(&mut state);
            }
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let mut gathered = std::mem::take(&mut state.dirty);
            if let Some(rest) = gathered.keys().nth(MAX_BLOCKS as usize).copied() {
                state.dirty = gathered.split_off(&rest);
            }
            if gathered.is_empty() {
                return Ok(());
            }
            let runs = runs(&gathered);
            let blocks: Vec<Range<u64>> = runs.iter().map(Inline::blocks).collect();
            let pages: Vec<u8> = runs.into_iter().flat_map(|run| run.pages).collect();
            let (bytes, hash) = layout::encode_segment(&self.shared.blocks.incarnation, &random()?, &blocks, &pages);
            let id = Id::Segment(hash);
            let (count, mut at) = ((pages.len() as u64 / BLOCK) as u32, 0);
            for run in blocks {
                let length = (run.end - run.start) as u32;
                state.lay(&Entry { blocks: run, place: Some(Place { id, blocks: count, at }) });
                at += length;
            }
            drop(pages);
            let bytes = Arc::new(bytes);
            state.sending.insert(id, bytes.clone());
            let shared = self.shared.clone();
            let sent = thread::Builder::new().name("send".into()).spawn(move || {
                let made = Session::make_segment(&shared.blocks.store, &shared.blocks.incarnation, &id, &bytes);
                let mut state = shared.state.lock();
                state.sending.remove(&id);
                state.made.push(id);
                if let Err(error) = made {
                    state.lost.insert(id, bytes);
                    state.failed.get_or_insert(error);
                }
                shared.sent.notify_all();
            });
            if let Err(error) = sent {
                let bytes = state.sending.remove(&id);
                state.lost.extend(bytes.map(|bytes| (id, bytes)));
                let error = Error::io("cannot start a thread that sends", error);
                state.failed = Some(error.clone());
                return Err(error);
            }
        }
    }

    /// Makes the archive what was written here: durable when this returns, all of it or nothing. The writer is gone then.
    ///
    /// # Errors
    /// `InUse` when another writer took over; those of requests.
    pub(in super::super) fn publish(&self, session: &mut Session) -> Result<()> {
        self.gather_sparse(session.most_runs(), u64::MAX)?;
        self.commit(session, Kind::Close)
    }

    /// Makes what was written before the call durable with one record, all of it or nothing. Without anything new no record is made, but the last one.
    ///
    /// # Errors
    /// As of [`Session::commit`]; what kept a segment from going up. Nothing is sent any more then.
    pub(in super::super) fn commit(&self, session: &mut Session, kind: Kind) -> Result<()> {
        let Some(cut) = self.cut(session.sequence() + 1, kind)? else { return Ok(()) };
        let checkpoint = session.checkpoint();
        let sent = self.await_sent(&cut.sending);
        let done = sent.and_then(|()| session.commit(cut.map, cut.inline, cut.length, kind));
        let mut state = self.shared.state.lock();
        let late = state.late.take().unwrap_or_default();
        if let Err(error) = done {
            state.failed.get_or_insert(error.clone());
            return Err(error);
        }
        if session.checkpoint() != checkpoint {
            state.map.checkpointed_but(late);
        }
        state.made.retain(|id| !cut.made.contains(id));
        self.shared.blocks.sequence.store(session.sequence(), Ordering::Release);
        let is_old = state.written - state.based >= self.most_since_base && kind == Kind::Commit;
        drop(state);
        if is_old {
            self.look_ahead_again();
        }
        Ok(())
    }

    /// STAGED-1
    fn cut(&self, sequence: u64, kind: Kind) -> Result<Option<Cut>> {
        let _writing = self.writing.lock();
        if self.shared.state.lock().dirty.len() > INLINE {
            self.send()?;
        }
        let mut state = self.shared.state.lock();
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if !state.touched && kind == Kind::Commit {
            return Ok(None);
        }
        state.touched = false;
        let dirty = std::mem::take(&mut state.dirty);
        let mut inline = runs(&dirty);
        // What comes with a record's end is what stands last in it.
        let is_first = |run: &Inline| state.first.overlaps(&run.blocks());
        inline.sort_by_key(is_first);
        placed(&inline, sequence).iter().for_each(|entry| state.lay(entry));
        // What the record before has is up, and may be wanted again where nothing newer is.
        for (number, block) in std::mem::replace(&mut state.last, dirty) {
            if let Some(place) = state.map.parts(number..number + 1).first().and_then(|part| part.place) {
                self.shared.near.keep(&place, &block);
            }
        }
        let map = state.map.clone();
        // The record says that they are dead.
        state.map.forget_dead();
        state.late = Some(RangeSet::new());
        let sending: Vec<Id> = state.sending.keys().copied().collect();
        let made = state.made.iter().chain(&sending).copied().collect();
        Ok(Some(Cut { map, inline, length: state.length, sending, made }))
    }

    /// Waits until these segments are up.
    fn await_sent(&self, ids: &[Id]) -> Result<()> {
        let mut state = self.shared.state.lock();
        while ids.iter().any(|id| state.sending.contains_key(id)) {
            self.shared.sent.wait(&mut state);
        }
        state.failed.clone().map_or(Ok(()), Err)
    }

    /// Nothing of it is to be named: what went up, and what is on its way, which nobody waits for.
    pub(in super::super) fn abandon(&self) -> (Vec<Id>, Vec<Id>) {
        let mut state = self.shared.state.lock();
        (std::mem::take(&mut state.made), state.sending.keys().copied().collect())
    }
}

impl Inline {
    fn blocks(&self) -> Range<u64> {
        self.block..self.block + self.pages.len() as u64 / BLOCK
    }
}

/// Neighbours together.
fn runs(blocks: &BTreeMap<u64, Box<Block>>) -> Vec<Inline> {
    let mut runs: Vec<Inline> = Vec::new();
    for (number, block) in blocks {
        match runs.last_mut() {
            Some(run) if run.blocks().end == *number => run.pages.extend_from_slice(&**block),
            _ => runs.push(Inline { block: *number, pages: block.to_vec() }),
        }
    }
    runs
}
