//! Upload buffer: writable storage over an archive in a bucket; readers see nothing before a record
//! names it.
//!
//! Writes are buffered in memory and uploaded in segments, which are garbage until a record names
//! them. One record makes all of them visible and durable, or none (STORAGE-4). The owner decides
//! when: with each barrier ([`super::writable`]), or once at the end ([`UploadBuffer::publish`]).
//! In the second case barriers do nothing: the writer owes its user no durability before the end.
//!
//! # Invariants
//! STAGED-1  A record names exactly the writes before its batch was taken: its segments are
//!     uploaded before it is sent, and its inline pages are no longer dirty.
//! STAGED-2  A read returns the newest bytes of a block, wherever they are: dirty, in the last
//!     record, in flight, in the store, or in the base. The base, which has the state at its
//!     creation, reads long ranges: so it must name no object that this writer removes, needed or
//!     not.
//! STAGED-3  After a failure nothing is sent any more: writes since the last record are lost, but
//!     can be read.

mod segment;
mod send;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};
use rangemap::RangeSet;

use self::segment::{DividedSegment, UploadPace};
use super::block_cache::{BlockBytes, BlockCache, BlockFetcher};
use super::layout::{BLOCK, MAX_ARCHIVE_BYTES, MAX_BLOCKS, OBJECT_RUNS};
use super::map::{BlockMap, MapEntry, ObjectId};
use super::objects::random_bytes;
use super::session::WriterSession;
use super::version::VersionReader;
use crate::RemoteOptions;
use crate::hex;
use crate::range_source::copy_shared;
use crate::remote_file::{RemoteFile, read_end};

/// Dirty blocks that trigger an upload: 8 MiB.
const SEGMENT_BLOCKS: usize = 8 << 8;
/// Written blocks after which a commit refreshes the base, for readahead of them: 256 MiB.
const REBASE_BLOCKS: u64 = 256 << 8;

/// Writable storage over an archive in a bucket.
pub(crate) struct UploadBuffer {
    shared: Arc<Shared>,
    options: RemoteOptions,
    /// Serializes writes: a partial write reads its block first, and no upload may run while the
    /// base is replaced.
    writing: Mutex<()>,
    /// Written blocks after which the base is refreshed.
    pub(super) rebase_after: u64,
}

struct Shared {
    /// Fetches blocks as of this writer's newest record.
    blocks: BlockFetcher,
    state: Mutex<UploadState>,
    sent: Condvar,
    cache: Arc<BlockCache>,
}

impl UploadBuffer {
    /// Creates a buffer over the session's newest record, or over an empty archive.
    pub(super) fn new(session: &WriterSession, options: &RemoteOptions, empty: bool) -> Result<UploadBuffer> {
        let (map, length) = if empty {
            // The old content ends with the record that names the new one.
            let mut map = session.map().clone();
            map.assign(&MapEntry { blocks: 0..map.end(), place: None });
            (map, 0)
        } else {
            (session.map().clone(), session.newest.length)
        };
        let blocks = BlockFetcher {
            store: session.store.clone(),
            incarnation: session.incarnation,
            sequence: Arc::new(AtomicU64::new(session.newest.sequence)),
            whole: None,
        };
        let shared = Arc::new(Shared {
            cache: Arc::new(BlockCache::new(blocks.clone())),
            blocks,
            state: Mutex::new(UploadState { map, length, touched: empty, ..UploadState::default() }),
            sent: Condvar::new(),
        });
        let buffer =
            UploadBuffer { shared, options: options.clone(), writing: Mutex::new(()), rebase_after: REBASE_BLOCKS };
        buffer.rebase()?;
        Ok(buffer)
    }

    pub(super) fn is_committed(&self) -> bool {
        let state = self.shared.state.lock();
        !state.touched && state.failed.is_none()
    }

    pub(super) fn written(&self) -> u64 {
        self.shared.state.lock().written
    }

    pub(super) fn is_scattered(&self, most_runs: usize) -> bool {
        self.shared.state.lock().is_scattered(most_runs)
    }

    /// Makes the buffer read-only after its content was replaced (STAGED-3).
    pub(super) fn end(&self) {
        let why = "the archive was replaced by a new one, and this is its last state; open it again";
        self.shared.state.lock().failed.get_or_insert_with(|| Error::ReadOnly(why.into()));
    }

    fn zero_range(&self, range: Range<u64>) -> Result<()> {
        let (first, last) = (range.start.div_ceil(BLOCK), range.end / BLOCK);
        if first > last {
            return self.write_part(range.start, &vec![0; (range.end - range.start) as usize]);
        }
        // The parts of blocks at both ends.
        self.write_part(range.start, &vec![0; (first * BLOCK - range.start) as usize])?;
        self.write_part(last * BLOCK, &vec![0; (range.end - last * BLOCK) as usize])?;
        self.shared.state.lock().zero_blocks(first..last);
        Ok(())
    }

    fn write_part(&self, offset: u64, data: &[u8]) -> Result<()> {
        if data.is_empty() {
            return Ok(());
        }
        let number = offset / BLOCK;
        let mut block = Box::new([0; BLOCK as usize]);
        let there = BLOCK.min(self.len()?.saturating_sub(number * BLOCK)) as usize;
        if there > 0 {
            self.read_at(number * BLOCK, &mut block[..there])?;
        }
        let at = (offset - number * BLOCK) as usize;
        block[at..at + data.len()].copy_from_slice(data);
        self.shared.state.lock().put(number, block);
        Ok(())
    }
}

/// Returns the end of a range, if a reader accepts that length. The caller may be the daemon of
/// another user, and an excessive length would be durable.
fn checked_end(offset: u64, length: u64) -> Result<u64> {
    let end = offset.checked_add(length).filter(|end| *end <= MAX_ARCHIVE_BYTES);
    end.ok_or_else(|| Error::invalid(format!("range beyond the largest archive: offset={offset} length={length}")))
}

impl Storage for UploadBuffer {
    fn len(&self) -> Result<u64> {
        Ok(self.shared.state.lock().length)
    }

    /// Reads the newest bytes (STAGED-2).
    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let state = self.shared.state.lock();
        let end = read_end(offset, out, state.length)?;
        if out.is_empty() {
            return Ok(());
        }
        let ReadPlan { unchanged, base, remote, mut pieces } = state.plan_read(offset / BLOCK..end.div_ceil(BLOCK));
        drop(state);
        for run in unchanged {
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
        let began = Instant::now();
        let (cached, remote) = self.shared.cache.get_or_wait(remote);
        pieces.extend(cached.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        // Concurrently: blocks of many records take one round trip, not one each.
        if let (Some(first), Some(last)) = (remote.first(), remote.last()) {
            let range = (first.blocks.start * BLOCK).max(offset)..(last.blocks.end * BLOCK).min(end);
            let fetched =
                self.shared.fetch_ranges(&remote, range.clone(), self.shared.cache.progress.silent_since(began))?;
            for part in &remote {
                let part = (part.blocks.start * BLOCK).max(offset)..(part.blocks.end * BLOCK).min(end);
                let from = (part.start - range.start) as usize..(part.end - range.start) as usize;
                copy_shared(&fetched[from], part.start, out, offset);
            }
        }
        for (number, bytes, from) in pieces {
            copy_shared(&bytes[from], number * BLOCK, out, offset);
        }
        Ok(())
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        let state = self.shared.state.lock();
        let end = offset.saturating_add(length).min(state.length);
        let blocks = offset / BLOCK..end.div_ceil(BLOCK);
        if offset >= end {
            return;
        }
        // Blocks changed since differ from the base: those in memory need no request, and the
        // others are fetched by location.
        let unchanged: Vec<Range<u64>> = state.changed.gaps(&blocks).collect();
        let changed = state.changed.overlapping(&blocks);
        let changed = changed.flat_map(|run| run.start.max(blocks.start)..run.end.min(blocks.end));
        let is_remote = |number: &u64| !state.dirty.contains_key(number) && !state.last_inline.contains_key(number);
        let new =
            changed.take(MAX_BLOCKS as usize).filter(is_remote).flat_map(|number| state.map.parts(number..number + 1));
        let is_up = |part: &MapEntry| part.place.is_some_and(|place| state.local_object(&place.id).is_none());
        let new: Vec<MapEntry> = new.filter(is_up).collect();
        let base = state.base.clone();
        drop(state);
        self.shared.cache.prefetch(&new);
        if let Some(base) = base {
            unchanged.into_iter().for_each(|run| base.will_need(run.start * BLOCK, (run.end - run.start) * BLOCK));
        }
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        let end = checked_end(offset, data.len() as u64)?;
        let _writing = self.writing.lock();
        let mut at = offset;
        while at < end {
            let number = at / BLOCK;
            let next = end.min((number + 1) * BLOCK);
            let part = &data[(at - offset) as usize..(next - offset) as usize];
            match BlockBytes::try_from(part) {
                Ok(block) => self.shared.state.lock().put(number, Box::new(block)),
                Err(_) => self.write_part(at, part)?,
            }
            self.shared.state.lock().note_write(number);
            at = next;
        }
        let mut state = self.shared.state.lock();
        state.length = state.length.max(end);
        let is_full = state.dirty.len() >= state.pace.segment_blocks;
        drop(state);
        if is_full { self.send_dirty() } else { Ok(()) }
    }

    /// Extends the length; a store needs no allocation.
    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        let end = checked_end(offset, length)?;
        let mut state = self.shared.state.lock();
        state.touched |= end > state.length;
        state.length = state.length.max(end);
        Ok(())
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        let _writing = self.writing.lock();
        let end = offset.saturating_add(length).min(self.len()?);
        if offset < end { self.zero_range(offset..end) } else { Ok(()) }
    }

    fn set_len(&self, length: u64) -> Result<()> {
        checked_end(0, length)?;
        let _writing = self.writing.lock();
        let now = self.len()?;
        if length < now {
            self.zero_range(length..now)?;
        }
        let mut state = self.shared.state.lock();
        if length < now {
            state.zero_blocks(length.div_ceil(BLOCK)..now.div_ceil(BLOCK));
        }
        state.touched |= length != now;
        state.length = length;
        Ok(())
    }

    /// Reports an earlier failure. Nothing is durable before a commit.
    fn barrier(&self) -> Result<()> {
        self.shared.state.lock().check_failure()
    }

    fn has_atomic_barrier(&self) -> bool {
        true
    }

    /// Refreshes the base if the range covers the whole archive: later reads go to the store.
    /// Smaller ranges are ignored: bytes from the store are checked by the hash in the object's
    /// name, or by the caller.
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
        Ok((state.map.live_blocks() + state.dirty.len() as u64) * BLOCK)
    }

    fn read_only(&self) -> bool {
        false
    }
}

impl UploadBuffer {
    /// Replaces the base by the current state, so that all reads use readahead. Writes must not run
    /// concurrently.
    pub(super) fn rebase(&self) -> Result<()> {
        self.wait_uploads(true)?;
        let (map, length, written) = {
            let state = self.shared.state.lock();
            if state.base.is_some() && state.changed.is_empty() {
                return Ok(());
            }
            (state.map.clone(), state.length, state.written)
        };
        let reader =
            Arc::new(VersionReader { blocks: self.shared.blocks.clone(), map, length, tag: hex(&random_bytes()?) });
        // The state has no name to which a later mount could return.
        let options = self.options.without_cache();
        let base = match length {
            0 => None,
            _ => {
                let name = self.shared.blocks.store.name.clone();
                Some(Arc::new(RemoteFile::open_metered(reader.clone(), name, &options)?))
            }
        };
        let mut state = self.shared.state.lock();
        (state.base, state.base_reader, state.written_at_rebase) = (base, Some(reader), written);
        state.changed = RangeSet::new();
        state.last_inline.clear();
        Ok(())
    }

    /// Refreshes the base, so that readahead covers recent writes, unless there are dirty blocks. A
    /// failure only costs readahead.
    pub(super) fn refresh_base(&self) {
        let _writing = self.writing.lock();
        if self.shared.state.lock().dirty.is_empty()
            && let Err(error) = self.rebase()
        {
            tracing::debug!(%error, "cannot prefetch written blocks yet");
        }
    }

    /// Removes the objects from `ids` that reads may still use.
    pub(super) fn retain_unused(&self, ids: &mut Vec<ObjectId>) {
        if let Some(reader) = &self.shared.state.lock().base_reader {
            ids.retain(|id| !reader.map.references(id));
        }
    }

    /// Refreshes the base if it names any of these objects, which are about to be removed. Returns
    /// whether it names none of them (STAGED-2).
    pub(super) fn release_objects(&self, ids: &[ObjectId]) -> bool {
        let _writing = self.writing.lock();
        let names = |reader: &Arc<VersionReader>| ids.iter().any(|id| reader.map.references(id));
        let is_named = self.shared.state.lock().base_reader.as_ref().is_some_and(names);
        !is_named || self.rebase().is_ok()
    }
}

impl Shared {
    /// Fetches a range from the locations in `parts`, concurrently and with retries, for a caller
    /// that has waited since `since`.
    pub(super) fn fetch_ranges(&self, parts: &[MapEntry], range: Range<u64>, since: Instant) -> Result<Vec<u8>> {
        let mut fetched = vec![0; (range.end - range.start) as usize];
        let store = &self.blocks.store;
        let filled = store.with_retry_within(Some(since), store.timeout, &mut || {
            self.blocks.fill(parts, range.clone(), &mut fetched)
        });
        filled.map_err(|error| error.into_deferred_error(&store.name))?;
        Ok(fetched)
    }
}

/// Blocks repeated in the closing record because they were written last, and as many because the
/// previous writer left them so: some tree nodes.
const RECENT_BLOCKS: usize = 48;

/// State under one lock.
#[derive(Default)]
struct UploadState {
    /// Blocks not uploaded yet.
    dirty: BTreeMap<u64, Box<BlockBytes>>,
    /// Inline blocks of the last record, sent or in flight, unless overwritten since.
    last_inline: BTreeMap<u64, Box<BlockBytes>>,
    /// Set if there are changes that no record has.
    touched: bool,
    /// Blocks that the next open reads first.
    read_first: RangeSet<u64>,
    /// Last written blocks, in order.
    latest: VecDeque<u64>,
    /// Blocks written since the acquisition, and their number at the last rebase.
    written: u64,
    written_at_rebase: u64,
    /// Blocks assigned while a record is in flight.
    changed_since_cut: Option<RangeSet<u64>>,
    /// Segments in flight; their bytes begin with the pages.
    in_flight: HashMap<ObjectId, Arc<Vec<u8>>>,
    /// Segments with a failed upload: at most those in flight at the time, since nothing is sent
    /// after.
    failed_uploads: HashMap<ObjectId, Arc<Vec<u8>>>,
    /// Number and size of uploads.
    pace: UploadPace,
    /// Divided segments that a batch may name, oldest first.
    divided: Vec<DividedSegment>,
    /// Segments that are uploaded, or may be, and that no record names yet.
    uploaded: Vec<ObjectId>,
    failed: Option<Error>,
    /// Locations of all blocks that are not dirty.
    map: BlockMap,
    length: u64,
    /// Source of unchanged blocks, and its reader.
    base: Option<Arc<RemoteFile>>,
    base_reader: Option<Arc<VersionReader>>,
    /// Blocks changed since the base.
    changed: RangeSet<u64>,
}

/// Sources of a range of blocks, determined without a request (STAGED-2).
struct ReadPlan {
    /// Runs to read from the base.
    unchanged: Vec<Range<u64>>,
    base: Option<Arc<RemoteFile>>,
    /// Runs to fetch from the store.
    remote: Vec<MapEntry>,
    /// Bytes in memory with their first block; a later piece overrides an earlier one.
    pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)>,
}

impl UploadState {
    fn check_failure(&self) -> Result<()> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    fn put(&mut self, number: u64, block: Box<BlockBytes>) {
        // Zeros need no place.
        if block.iter().all(|byte| *byte == 0) {
            return self.zero_blocks(number..number + 1);
        }
        self.dirty.insert(number, block);
        self.changed.insert(number..number + 1);
        self.touched = true;
        self.written += 1;
    }

    fn local_object(&self, id: &ObjectId) -> Option<&Arc<Vec<u8>>> {
        self.in_flight.get(id).or_else(|| self.failed_uploads.get(id))
    }

    fn note_write(&mut self, number: u64) {
        if self.latest.len() == RECENT_BLOCKS {
            self.latest.pop_front();
        }
        self.latest.push_back(number);
    }

    fn zero_blocks(&mut self, blocks: Range<u64>) {
        if blocks.is_empty() {
            return;
        }
        let gone = self.dirty.extract_if(blocks.clone(), |_, _| true).count();
        // Erasing zeros is not a change.
        self.touched |= gone > 0 || self.map.has(&blocks);
        self.assign(&MapEntry { blocks: blocks.clone(), place: None });
        self.changed.insert(blocks);
    }

    fn assign(&mut self, entry: &MapEntry) {
        self.last_inline.extract_if(entry.blocks.clone(), |_, _| true).for_each(drop);
        self.map.assign(entry);
        if let Some(late) = self.changed_since_cut.as_mut().filter(|_| !entry.blocks.is_empty()) {
            late.insert(entry.blocks.clone());
        }
    }

    fn is_scattered(&self, most_runs: usize) -> bool {
        let runs = self.map.runs() + self.map.object_count() * OBJECT_RUNS + self.dirty.len();
        runs > most_runs
    }

    /// Determines the source of the newest bytes of each block.
    fn plan_read(&self, blocks: Range<u64>) -> ReadPlan {
        let mut rest = RangeSet::from_iter([blocks.clone()]);
        // Blocks of the last record first: dirty ones override them.
        let local = self.last_inline.range(blocks.clone()).chain(self.dirty.range(blocks.clone()));
        let dirty: Vec<(u64, Box<BlockBytes>)> = local.map(|(number, block)| (*number, block.clone())).collect();
        dirty.iter().for_each(|(number, _)| rest.remove(*number..number + 1));
        let (mut unchanged, mut new): (Vec<Range<u64>>, Vec<MapEntry>) = (Vec::new(), Vec::new());
        for run in rest.iter() {
            unchanged.extend(self.changed.gaps(run));
            let changed = self.changed.overlapping(run);
            new.extend(changed.flat_map(|other| self.map.parts(run.start.max(other.start)..run.end.min(other.end))));
        }
        let (local, remote): (Vec<MapEntry>, Vec<MapEntry>) =
            new.into_iter().partition(|part| part.place.is_none_or(|place| self.local_object(&place.id).is_some()));
        let mut pieces: Vec<(u64, Arc<Vec<u8>>, Range<usize>)> = Vec::new();
        for MapEntry { blocks, place } in &local {
            let count = ((blocks.end - blocks.start) * BLOCK) as usize;
            match place.and_then(|place| Some((self.local_object(&place.id)?, place.at))) {
                None => pieces.push((blocks.start, Arc::new(vec![0; count]), 0..count)),
                Some((bytes, at)) => {
                    let from = (u64::from(at) * BLOCK) as usize;
                    pieces.push((blocks.start, bytes.clone(), from..from + count));
                }
            }
        }
        pieces.extend(dirty.into_iter().map(|(number, block)| (number, Arc::new(block.to_vec()), 0..BLOCK as usize)));
        ReadPlan { unchanged, base: self.base.clone(), remote, pieces }
    }
}
