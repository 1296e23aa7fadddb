//! An archive in a bucket as a storage for writing, none of which anybody sees before a record names it.
//!
//! What is written gathers in memory and goes up in segments while more comes, which nothing names yet: garbage until a record does. One record makes everything
//! visible and durable at once, or nothing ever does (STORAGE-4). Who writes here decides when that is: with each barrier ([`super::writable`]), or once at the end
//! ([`Staged::publish`]). Then a barrier has nothing to do, and whoever writes owes its user no answer before the end.
//!
//! # Invariants
//! STAGED-1  A record names what was written before it was cut off from what came later, all of it: segments that it names are up before it is sent, and what it has
//!     itself is no longer counted as written.
//! STAGED-2  Of a block the newest bytes are read, wherever they are: not sent, in the last record, on their way, in the store, or as they were at the beginning.
//!     The base, which has it as it was at the beginning, is asked for pieces with many blocks: so it names no object that this writer removes, needed or not.
//! STAGED-3  After a failure nothing is sent any more: who writes on has lost what was to go with it. It is read all the same.

mod read;
mod repack;
mod send;
mod state;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};

use self::state::State;
use super::block_cache::{Block, Near};
use super::blocks::Blocks;
use super::layout::{BLOCK, LONGEST};
use super::object_ref::Entry;
use super::session::Session;
use crate::Options;

/// Blocks that gather before they go up: 8 MiB.
const SEGMENT: usize = 8 << 8;
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
    /// As of this writer's newest record.
    blocks: Blocks,
    state: Mutex<State>,
    sent: Condvar,
    near: Arc<Near>,
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
        let blocks = Blocks {
            store: session.store.clone(),
            incarnation: session.incarnation,
            sequence: Arc::new(AtomicU64::new(session.sequence())),
        };
        let shared = Arc::new(Shared {
            near: Arc::new(Near::new(blocks.clone())),
            blocks,
            state: Mutex::new(State::new(map, length, empty)),
            sent: Condvar::new(),
        });
        let staged = Staged { shared, options: options.clone(), writing: Mutex::new(()), most_since_base: SINCE_BASE };
        staged.rebase()?;
        Ok(staged)
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

/// Whoever writes may be another user's daemon: a length that no reader takes would be durable.
fn end_of(offset: u64, length: u64) -> Result<u64> {
    let end = offset.checked_add(length).filter(|end| *end <= LONGEST);
    end.ok_or_else(|| Error::invalid(format!("range beyond the largest archive: offset={offset} length={length}")))
}

impl Storage for Staged {
    fn len(&self) -> Result<u64> {
        Ok(self.shared.state.lock().length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.read(offset, out)
    }

    fn is_far(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.expect(offset, length);
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
