//! An archive in a bucket as a storage for writing, none of which anybody sees before a record names it.
//!
//! What is written gathers in memory and goes up in segments while more comes, which nothing names yet: garbage until a record does. One record makes everything
//! visible and durable at once, or nothing ever does (STORAGE-4). Who writes here decides when that is: with each barrier ([`super::living`]), or once at the end
//! ([`Staged::publish`]). Then a barrier has nothing to do, and whoever writes owes its user no answer before the end.
//!
//! # Invariants
//! STAGED-1  A record names what was written before it was cut off from what came later, all of it: segments that it names are up before it is sent, and what it has
//!     itself is no longer counted as written.
//! STAGED-2  Of a block the newest bytes are read, wherever they are: not sent, in the last record, on their way, in the store, or as they were at the beginning.
//! STAGED-3  After a failure nothing is sent any more: who writes on has lost what was to go with it.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};
use rangemap::RangeSet;

use super::layout::{self, BLOCK, Incarnation, Kind, LONGEST, MAX_BLOCKS};
use super::map::Map;
use super::moment::{Reading, fill};
use super::names::{hex, random};
use super::near::{Block, Near};
use super::place::{Entry, Id, Place};
use super::session::{Inline, Session, placed};
use super::store::Store;
use crate::Options;
use crate::file::{RemoteFile, START, told_later};

/// Blocks that gather before they go up: 8 MiB.
const SEGMENT: usize = 8 << 8;
/// Segments under way at once; each is in memory.
const SENDING: usize = 4;
/// Most blocks that a record itself has: 4 MiB.
const INLINE: usize = 4 << 8;

/// Blocks that the record with which a writer goes has again because they were written last, and as many because the writer before left them so: some nodes.
const LITTLE: usize = 48;
/// Blocks that are written before what is read ahead is that, too: 256 MiB.
const SINCE_BASE: u64 = 256 << 8;

/// See above.
pub(crate) struct Staged {
    shared: Arc<Shared>,
    options: Options,
    /// One after the other: a block of which a part is written is read before, and nothing goes up while the base is made anew.
    writing: Mutex<()>,
    /// Blocks that are written before the base is made anew.
    pub(super) most_since_base: u64,
}

struct Shared {
    store: Arc<Store>,
    incarnation: Incarnation,
    /// The newest record of this writer.
    sequence: Arc<AtomicU64>,
    state: Mutex<State>,
    sent: Condvar,
    near: Arc<Near>,
}

struct State {
    /// What has not gone up.
    dirty: BTreeMap<u64, Box<Block>>,
    /// What the last record has itself, sent or on its way, where nothing else has come since.
    last: BTreeMap<u64, Box<Block>>,
    /// Whether anything was changed that no record has.
    touched: bool,
    /// What who comes next reads first.
    first: RangeSet<u64>,
    /// The blocks that were written last, in their order.
    latest: VecDeque<u64>,
    /// Blocks that were written since the writer came, and how many of them the base has.
    written: u64,
    based: u64,
    /// What was laid into the map while a record was on its way.
    late: Option<RangeSet<u64>>,
    /// What is going up: segments, which begin with their pages.
    sending: HashMap<Id, Arc<Vec<u8>>>,
    /// What went up, or may have, and no record names yet.
    made: Vec<Id>,
    failed: Option<Error>,
    /// Where all is but what is dirty.
    map: Map,
    length: u64,
    /// For what is as it was there.
    base: Option<Arc<RemoteFile>>,
    /// What is not.
    changed: RangeSet<u64>,
}

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
    /// What the session's newest record names, or nothing at all.
    ///
    /// # Errors
    /// Those of requests.
    pub(super) fn new(session: &Session, options: &Options, empty: bool) -> Result<Staged> {
        let (map, length) = if empty {
            // What lies there now ends with the record that names what comes in its place.
            let mut map = session.map().clone();
            map.lay(&Entry { blocks: 0..map.end(), place: None });
            (map, 0)
        } else {
            (session.map().clone(), session.length())
        };
        let sequence = Arc::new(AtomicU64::new(session.sequence()));
        let shared = Arc::new(Shared {
            store: session.store.clone(),
            incarnation: session.incarnation,
            near: Arc::new(Near::new(session.store.clone(), session.incarnation, sequence.clone())),
            sequence,
            state: Mutex::new(State {
                dirty: BTreeMap::new(),
                last: BTreeMap::new(),
                touched: empty,
                first: RangeSet::new(),
                latest: VecDeque::new(),
                written: 0,
                based: 0,
                late: None,
                sending: HashMap::new(),
                made: Vec::new(),
                failed: None,
                map,
                length,
                base: None,
                changed: RangeSet::new(),
            }),
            sent: Condvar::new(),
        });
        let staged = Staged { shared, options: options.clone(), writing: Mutex::new(()), most_since_base: SINCE_BASE };
        staged.rebase()?;
        Ok(staged)
    }

    /// From now on all is read from the store, ahead of whoever reads one after the other. Nobody writes meanwhile.
    fn rebase(&self) -> Result<()> {
        self.settle(true)?;
        let (map, length, written) = {
            let state = self.shared.state.lock();
            if state.base.is_some() && state.changed.is_empty() {
                return Ok(());
            }
            (state.map.clone(), state.length, state.written)
        };
        let reading = Reading {
            store: self.shared.store.clone(),
            incarnation: self.shared.incarnation,
            map,
            length,
            sequence: self.shared.sequence.clone(),
            tag: hex(&random()?),
        };
        // Nobody comes back to a moment that is in the making.
        let options = Options { cache_bytes: Some(0), ..self.options.clone() };
        let base = match length {
            0 => None,
            _ => Some(Arc::new(RemoteFile::counting(Box::new(reading), self.shared.store.name.clone(), &options)?)),
        };
        let mut state = self.shared.state.lock();
        (state.base, state.based) = (base, written);
        state.changed = RangeSet::new();
        state.last.clear();
        Ok(())
    }

    /// Waits until what is under way is up; with `all`, what gathers goes up first.
    pub(super) fn settle(&self, all: bool) -> Result<()> {
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
    fn send(&self) -> Result<()> {
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
            let (bytes, hash) = layout::encode_segment(&self.shared.incarnation, &random()?, &blocks, &pages);
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
                let made = Session::make_segment(&shared.store, &shared.incarnation, &id, &bytes);
                let mut state = shared.state.lock();
                state.sending.remove(&id);
                state.made.push(id);
                if let Err(error) = made {
                    state.failed.get_or_insert(error);
                }
                shared.sent.notify_all();
            });
            if let Err(error) = sent {
                state.sending.remove(&id);
                let error = Error::io("cannot start a thread that sends", error);
                state.failed = Some(error.clone());
                return Err(error);
            }
        }
    }

    /// What every opening reads lies in two objects from then on, whatever number of commits there were: the file's start in the one that has most of it, and the rest in the
    /// record to come, which whoever comes reads first. So does what was written last and what the writer before left there so: the nodes that lead to everything else.
    pub(super) fn gather_first(&self) -> Result<()> {
        let mut chosen: RangeSet<u64> = RangeSet::new();
        // What a record has no room for goes up before, and without these.
        if self.shared.state.lock().dirty.len() > INLINE / 2 {
            self.send()?;
        }
        {
            let mut state = self.shared.state.lock();
            chosen.extend(state.latest.iter().map(|number| *number..number + 1));
            let before = self.shared.store.has_of();
            let left = |entry: &Entry| {
                entry.blocks.start >= START / BLOCK && entry.place.is_some_and(|place| Some(place.id) == before)
            };
            let left = state.map.entries().into_iter().filter(left).flat_map(|entry| entry.blocks);
            left.take(LITTLE).for_each(|number| chosen.insert(number..number + 1));
            let parts = state.map.parts(0..START / BLOCK);
            let mut objects: HashMap<Id, u64> = HashMap::new();
            for Entry { blocks, place } in &parts {
                if let Some(place) = place {
                    *objects.entry(place.id).or_default() += blocks.end - blocks.start;
                }
            }
            let most = objects.into_iter().max_by_key(|(id, blocks)| (*blocks, *id)).map(|(id, _)| id);
            let elsewhere = |part: &Entry| part.place.is_some_and(|place| Some(place.id) != most);
            chosen.extend(parts.into_iter().filter(elsewhere).map(|part| part.blocks));
            state.first = chosen.clone();
        }
        let chosen: Vec<Range<u64>> = chosen.into_iter().collect();
        self.write_anew(&chosen)
    }

    /// Writes blocks anew as they are. The store is asked for all of them at once, neighbours in an object together, and nobody writes meanwhile: what is newer stays.
    fn write_anew(&self, runs: &[Range<u64>]) -> Result<()> {
        let _writing = self.writing.lock();
        let (mut numbers, mut parts, mut near) = (Vec::new(), Vec::new(), Vec::new());
        {
            let state = self.shared.state.lock();
            // What was written since goes up by itself.
            let rest = runs.iter().flat_map(|run| run.clone()).filter(|number| !state.dirty.contains_key(number));
            for number in rest {
                let Some(place) = state.map.parts(number..number + 1).first().and_then(|part| part.place) else {
                    continue;
                };
                let from = (u64::from(place.at) * BLOCK) as usize;
                let start = (number * BLOCK) as usize;
                let base = state.base.as_ref().filter(|_| !state.changed.contains(&number));
                let known = base.and_then(|base| base.start().get(start..start + BLOCK as usize));
                if let Some(block) = known.or(state.last.get(&number).map(|block| &block[..])) {
                    near.push((number, block.to_vec()));
                    continue;
                }
                match state.sending.get(&place.id) {
                    Some(bytes) => near.push((number, bytes[from..from + BLOCK as usize].to_vec())),
                    None => {
                        // As if they were neighbours, which is where they are put.
                        let at = numbers.len() as u64;
                        parts.push(Entry { blocks: at..at + 1, place: Some(place) });
                        numbers.push(number);
                    }
                }
            }
        }
        let Shared { store, incarnation, sequence, .. } = &*self.shared;
        let (here, parts) = self.shared.near.take(parts);
        let mut brought = vec![0; numbers.len() * BLOCK as usize];
        let range = 0..brought.len() as u64;
        let filled = store.patiently(&mut || fill(store, incarnation, sequence, &parts, range.clone(), &mut brought));
        filled.map_err(|trouble| told_later(&store.name, trouble))?;
        for (at, block) in here {
            let at = (at * BLOCK) as usize;
            brought[at..at + BLOCK as usize].copy_from_slice(&*block);
        }
        let mut state = self.shared.state.lock();
        let far = numbers.into_iter().zip(brought.chunks_exact(BLOCK as usize));
        let near = near.iter().map(|(number, block)| (*number, &block[..]));
        for (number, block) in far.chain(near) {
            let mut whole = Box::new([0; BLOCK as usize]);
            whole.copy_from_slice(block);
            state.put(number, whole);
        }
        let is_full = state.dirty.len() >= SEGMENT;
        drop(state);
        if is_full { self.send() } else { Ok(()) }
    }

    /// Objects of which less than half is needed go: what is needed of them is written anew, of so many blocks at most, those first that have the least. With more than so
    /// many runs all is, in order. The pages are sealed, so nothing is opened.
    pub(super) fn gather_sparse(&self, most_runs: usize, most_blocks: u64) -> Result<()> {
        let sparse: RangeSet<u64> = {
            let mut state = self.shared.state.lock();
            // What is written again is needed no more where it was.
            let again: Vec<u64> = state.dirty.keys().copied().collect();
            again.into_iter().for_each(|number| state.lay(&Entry { blocks: number..number + 1, place: None }));
            let mut sparse = state.map.sparse();
            sparse.sort_by_key(|(_, live)| *live);
            let mut sum = 0;
            let fits = |(_, live): &(Id, u64)| {
                sum += live;
                sum <= most_blocks
            };
            let ids: HashMap<Id, u64> = sparse.into_iter().take_while(fits).collect();
            let is_scattered = state.is_scattered(most_runs);
            let named = state.map.entries().into_iter();
            named
                .filter(|entry| entry.place.is_some_and(|place| is_scattered || ids.contains_key(&place.id)))
                .map(|entry| entry.blocks)
                .collect()
        };
        // In parts that fit.
        let (mut runs, mut blocks) = (Vec::new(), 0);
        for run in sparse {
            for start in (run.start..run.end).step_by(SEGMENT) {
                let part = start..run.end.min(start + SEGMENT as u64);
                if blocks + part.end - part.start > SEGMENT as u64 {
                    self.write_anew(&std::mem::take(&mut runs))?;
                    blocks = 0;
                }
                blocks += part.end - part.start;
                runs.push(part);
            }
        }
        self.write_anew(&runs)
    }

    /// Makes the archive what was written here: durable when this returns, all of it or nothing. The writer is gone then.
    ///
    /// # Errors
    /// `InUse` when another writer took over; those of requests.
    pub(super) fn publish(&self, session: &mut Session) -> Result<()> {
        self.gather_sparse(session.most_runs(), u64::MAX)?;
        self.commit(session, Kind::Close)
    }

    /// Makes what was written before the call durable with one record, all of it or nothing. Without anything new no record is made, but the last one.
    ///
    /// # Errors
    /// As of [`Session::commit`]; what kept a segment from going up. Nothing is sent any more then.
    pub(super) fn commit(&self, session: &mut Session, kind: Kind) -> Result<()> {
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
        self.shared.sequence.store(session.sequence(), Ordering::Release);
        let is_old = state.written - state.based >= self.most_since_base && kind == Kind::Commit;
        drop(state);
        if is_old {
            self.look_ahead_again();
        }
        Ok(())
    }

    /// What was written by now is read ahead of, too, as far as nobody writes just now. Without that it is read all the same.
    fn look_ahead_again(&self) {
        let _writing = self.writing.lock();
        if self.shared.state.lock().dirty.is_empty()
            && let Err(error) = self.rebase()
        {
            tracing::debug!(%error, "what was written is not read ahead of yet");
        }
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

    /// Whether all that was written is in a record.
    pub(super) fn is_committed(&self) -> bool {
        let state = self.shared.state.lock();
        !state.touched && state.failed.is_none()
    }

    /// Blocks that were written since the writer came.
    pub(super) fn written(&self) -> u64 {
        self.shared.state.lock().written
    }

    pub(super) fn is_scattered(&self, most_runs: usize) -> bool {
        self.shared.state.lock().is_scattered(most_runs)
    }

    /// Something else has taken its place: it is only read (STAGED-3).
    pub(super) fn end(&self) {
        let ended = || Error::ReadOnly("the archive was written anew, and this is how it was before".into());
        self.shared.state.lock().failed.get_or_insert_with(ended);
    }

    /// Nothing of it is to be named: what went up, and what is on its way, which nobody waits for.
    pub(super) fn abandon(&self) -> (Vec<Id>, Vec<Id>) {
        let mut state = self.shared.state.lock();
        (std::mem::take(&mut state.made), state.sending.keys().copied().collect())
    }

    /// Zeros in a range.
    fn clear(&self, range: Range<u64>) -> Result<()> {
        let (first, last) = (range.start.div_ceil(BLOCK), range.end / BLOCK);
        if first > last {
            return self.write_part(range.start, &vec![0; (range.end - range.start) as usize]);
        }
        // The parts of blocks at both ends.
        self.write_part(range.start, &vec![0; (first * BLOCK - range.start) as usize])?;
        self.write_part(last * BLOCK, &vec![0; (range.end - last * BLOCK) as usize])?;
        let mut state = self.shared.state.lock();
        state.forget(first..last);
        Ok(())
    }

    /// Writes inside of one block.
    fn write_part(&self, offset: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let number = offset / BLOCK;
        let mut block = Box::new([0; BLOCK as usize]);
        let length = self.shared.state.lock().length;
        let there = BLOCK.min(length.saturating_sub(number * BLOCK)) as usize;
        if there > 0 {
            self.read_at(number * BLOCK, &mut block[..there])?;
        }
        let at = (offset - number * BLOCK) as usize;
        block[at..at + data.len()].copy_from_slice(data);
        self.shared.state.lock().put(number, block);
        Ok(())
    }
}

impl State {
    fn put(&mut self, number: u64, block: Box<Block>) {
        // Zeros need no place.
        if block.iter().all(|byte| *byte == 0) {
            return self.forget(number..number + 1);
        }
        self.dirty.insert(number, block);
        self.changed.insert(number..number + 1);
        self.touched = true;
        self.written += 1;
    }

    fn is_written(&mut self, number: u64) {
        if self.latest.len() == LITTLE {
            self.latest.pop_front();
        }
        self.latest.push_back(number);
    }

    fn forget(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let gone: Vec<u64> = self.dirty.range(blocks.clone()).map(|(number, _)| *number).collect();
        gone.iter().for_each(|number| drop(self.dirty.remove(number)));
        // Erasing what is erased already is no change.
        self.touched |= !gone.is_empty() || self.map.has(&blocks);
        self.lay(&Entry { blocks: blocks.clone(), place: None });
        self.changed.insert(blocks);
    }

    fn lay(&mut self, entry: &Entry) {
        let gone: Vec<u64> = self.last.range(entry.blocks.clone()).map(|(number, _)| *number).collect();
        gone.iter().for_each(|number| drop(self.last.remove(number)));
        self.map.lay(entry);
        if let Some(late) = self.late.as_mut().filter(|_| !entry.blocks.is_empty()) {
            late.insert(entry.blocks.clone());
        }
    }

    fn is_scattered(&self, most_runs: usize) -> bool {
        self.map.runs() + self.dirty.len() > most_runs
    }
}

impl Inline {
    fn blocks(&self) -> Range<u64> {
        self.block..self.block + self.pages.len() as u64 / BLOCK
    }
}

/// Whoever writes may be another user's daemon: a length that no reader takes would be durable.
fn end_of(offset: u64, length: u64) -> Result<u64> {
    let end = offset.checked_add(length).filter(|end| *end <= LONGEST);
    end.ok_or_else(|| Error::invalid(format!("range beyond the largest archive: offset={offset} length={length}")))
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

impl Storage for Staged {
    fn len(&self) -> Result<u64> {
        Ok(self.shared.state.lock().length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let state = self.shared.state.lock();
        let length = state.length;
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= length).ok_or_else(|| {
            Error::damaged(format!(
                "archive is truncated: length={length} needed={}",
                offset.saturating_add(out.len() as u64)
            ))
        })?;
        if out.is_empty() {
            return Ok(());
        }
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        let mut rest = RangeSet::from_iter([blocks.clone()]);
        // Those of the last record first: newer ones are laid over them.
        let near = state.last.range(blocks.clone()).chain(state.dirty.range(blocks.clone()));
        let dirty: Vec<(u64, Box<Block>)> = near.map(|(number, block)| (*number, block.clone())).collect();
        dirty.iter().for_each(|(number, _)| rest.remove(*number..number + 1));
        let (mut old, mut new): (Vec<Range<u64>>, Vec<Entry>) = (Vec::new(), Vec::new());
        for run in rest.iter() {
            old.extend(state.changed.gaps(run));
            let changed = state.changed.overlapping(run);
            new.extend(changed.flat_map(|other| state.map.parts(run.start.max(other.start)..run.end.min(other.end))));
        }
        let (near, far): (Vec<Entry>, Vec<Entry>) =
            new.into_iter().partition(|part| part.place.is_none_or(|place| state.sending.contains_key(&place.id)));
        let mut pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)> = Vec::new();
        for Entry { blocks, place } in &near {
            let count = ((blocks.end - blocks.start) * BLOCK) as usize;
            match place {
                None => pieces.push((blocks.start, Arc::new(vec![0; count]), 0..count)),
                Some(place) => {
                    let from = (u64::from(place.at) * BLOCK) as usize;
                    pieces.push((blocks.start, state.sending[&place.id].clone(), from..from + count));
                }
            }
        }
        pieces.extend(dirty.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        let base = state.base.clone();
        drop(state);
        for run in old {
            let part = (run.start * BLOCK).max(offset)..(run.end * BLOCK).min(end);
            let into = &mut out[(part.start - offset) as usize..(part.end - offset) as usize];
            // It ended where the archive did then.
            let there = base.as_ref().map_or(Ok(0), |base| base.len())?.clamp(part.start, part.end) - part.start;
            let (there, behind) = into.split_at_mut(there as usize);
            behind.fill(0);
            if let Some(base) = base.as_ref().filter(|_| !there.is_empty()) {
                base.read_at(part.start, there)?;
            }
        }
        let (here, far) = self.shared.near.take(far);
        pieces.extend(here.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        // All at once: what many records have is one round trip away, not one for each.
        if let (Some(first), Some(last)) = (far.first(), far.last()) {
            let range = (first.blocks.start * BLOCK).max(offset)..(last.blocks.end * BLOCK).min(end);
            let mut brought = vec![0; (range.end - range.start) as usize];
            let Shared { store, incarnation, sequence, .. } = &*self.shared;
            let filled = store.patiently(&mut || fill(store, incarnation, sequence, &far, range.clone(), &mut brought));
            filled.map_err(|trouble| told_later(&store.name, trouble))?;
            for part in &far {
                let part = (part.blocks.start * BLOCK).max(offset)..(part.blocks.end * BLOCK).min(end);
                let from = (part.start - range.start) as usize..(part.end - range.start) as usize;
                out[(part.start - offset) as usize..(part.end - offset) as usize].copy_from_slice(&brought[from]);
            }
        }
        for (number, bytes, from) in pieces {
            let start = number * BLOCK;
            let part = start.max(offset)..(start + from.len() as u64).min(end);
            let from = from.start + (part.start - start) as usize;
            let length = (part.end - part.start) as usize;
            let to = (part.start - offset) as usize;
            out[to..to + length].copy_from_slice(&bytes[from..from + length]);
        }
        Ok(())
    }

    fn is_far(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        let state = self.shared.state.lock();
        let end = offset.saturating_add(length).min(state.length);
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        if offset >= end {
            return;
        }
        // What was changed since has other bytes than the base: those that are in memory are known, and the others are brought by their places.
        let old: Vec<Range<u64>> = state.changed.gaps(&blocks).collect();
        let changed = state.changed.overlapping(&blocks);
        let changed = changed.flat_map(|run| run.start.max(blocks.start)..run.end.min(blocks.end));
        let is_far = |number: &u64| !state.dirty.contains_key(number) && !state.last.contains_key(number);
        let new =
            changed.take(MAX_BLOCKS as usize).filter(is_far).flat_map(|number| state.map.parts(number..number + 1));
        let is_up = |part: &Entry| part.place.is_some_and(|place| !state.sending.contains_key(&place.id));
        let new: Vec<Entry> = new.filter(is_up).collect();
        let base = state.base.clone();
        drop(state);
        self.shared.near.expect(&new);
        if let Some(base) = base {
            old.into_iter().for_each(|run| base.will_need(run.start * BLOCK, (run.end - run.start) * BLOCK));
        }
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let end = end_of(offset, data.len() as u64)?;
        let _writing = self.writing.lock();
        let mut at = offset;
        while at < end {
            let number = at / BLOCK;
            let next = end.min((number + 1) * BLOCK);
            let part = &data[(at - offset) as usize..(next - offset) as usize];
            match part.try_into() {
                Ok(block) => {
                    let block: &Block = block;
                    self.shared.state.lock().put(number, Box::new(*block));
                }
                Err(_) => self.write_part(at, part)?,
            }
            self.shared.state.lock().is_written(number);
            at = next;
        }
        let mut state = self.shared.state.lock();
        state.length = state.length.max(end);
        let is_full = state.dirty.len() >= SEGMENT;
        drop(state);
        if is_full { self.send() } else { Ok(()) }
    }

    /// Room is not scarce there: nothing is sent.
    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        let end = end_of(offset, length)?;
        let mut state = self.shared.state.lock();
        state.touched |= end > state.length;
        state.length = state.length.max(end);
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        let _writing = self.writing.lock();
        let end = offset.saturating_add(length).min(self.len()?);
        if offset < end { self.clear(offset..end) } else { Ok(()) }
    }

    fn set_len(&self, length: u64) -> Result<()> {
        end_of(0, length)?;
        let _writing = self.writing.lock();
        let now = self.len()?;
        if length < now {
            self.clear(length..now)?;
        }
        let mut state = self.shared.state.lock();
        if length < now {
            state.forget(length.div_ceil(BLOCK)..now.div_ceil(BLOCK));
        }
        state.touched |= length != now;
        state.length = length;
        Ok(())
    }

    /// Nothing is on the medium before [`Staged::publish`], and nothing is promised before.
    fn barrier(&self) -> Result<()> {
        self.shared.state.lock().failed.clone().map_or(Ok(()), Err)
    }

    fn ordered(&self) -> bool {
        true
    }

    /// Of all of it: from here on the store is read. Parts are not dropped: what the store gave was asked for by the hash in its name or is checked by whoever reads.
    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        let _writing = self.writing.lock();
        if offset == 0 && length >= self.len()? { self.rebase() } else { Ok(()) }
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        let state = self.shared.state.lock();
        let from = offset / BLOCK;
        let mut dirty = state.dirty.range(from..).map(|(number, _)| *number);
        let dirty = dirty.next().map(|first| {
            first..dirty.zip(first + 1..).take_while(|(a, b)| a == b).last().map_or(first, |(last, _)| last) + 1
        });
        let next = [dirty, state.map.next(from)].into_iter().flatten().min_by_key(|range| range.start);
        let bytes = next.map(|next| (next.start * BLOCK).max(offset)..(next.end * BLOCK).min(state.length));
        Ok(bytes.filter(|bytes| !bytes.is_empty()))
    }

    fn allocated(&self) -> Result<u64> {
        let state = self.shared.state.lock();
        Ok((state.map.live() + state.dirty.len() as u64) * BLOCK)
    }

    fn read_only(&self) -> bool {
        false
    }
}
