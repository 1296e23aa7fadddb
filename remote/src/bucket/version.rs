//! Version of an archive in a bucket: the state that one record names, its readers, and the
//! follower that moves to newer versions as the writer commits. A version never changes, and its
//! objects exist for a day after newer records stopped needing them.
//!
//! # Invariants
//! FOLLOW-1  Each version is a file of its own, with the map of one record: a read never mixes
//!     versions. Readers of an old version can continue as long as its objects exist: a day after
//!     newer records stopped needing them (BUCKET-4).
//! FOLLOW-2  Versions appear in the order of their records, none twice. A record that directly
//!     follows the last one read must name it as its predecessor, or it belongs to another archive.
//! FOLLOW-3  Content that one version shares with another is at the same position of the same
//!     object (BUCKET-1).
//!
//! The absence of the next number is conclusive only for a limited time: its record may have been
//! written and removed again. A follower that last listed half an hour ago asks for the newest
//! number. The clock includes suspended time, because a remote writer continues while this machine
//! sleeps.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use lockbox::{Error, Result};
use parking_lot::Mutex;
use rustix::time::{ClockId, clock_gettime};
use sha2::{Digest, Sha256};

use super::block_cache::{BlockFetcher, split_blocks};
use super::layout::{BLOCK, Incarnation, RecordBody, RecordParts, Tombstone, Trailer, WriterIdentity};
use super::map::{BlockMap, Hash, MapEntry, ObjectId, ObjectRef};
use super::store::{BucketStore, MIN_GRACE, OPEN_TAIL_BYTES};
use crate::hex;
use crate::range_source::{FileVersion, RangeKey, RangeSource, RemoteError, RemoteResult, copy_shared};
use crate::remote_file::{RemoteFile, START_BYTES};

/// Maximum restarts when a concurrent writer commits during an open.
const MAX_ATTEMPTS: usize = 8;

/// Content of a record, with its map.
pub(crate) struct BucketVersion {
    pub(super) trailer: Trailer,
    /// Map of the checkpoint, and the changes since.
    pub(super) checkpoint: BlockMap,
    pub(super) changes: Vec<MapEntry>,
    pub(super) map: BlockMap,
    pub(super) tombstones: Vec<Tombstone>,
    pub(super) writer: WriterIdentity,
}

impl BucketVersion {
    /// Loads the newest version; None before the first record. Errors: failures of requests;
    /// `Damaged`.
    pub(super) fn load_newest(store: &BucketStore, incarnation: &Incarnation) -> Result<Option<BucketVersion>> {
        BucketVersion::load_newest_from(store, incarnation, None)
    }

    /// Loads the newest version, starting with a sequence that was just listed.
    pub(super) fn load_newest_from(
        store: &BucketStore,
        incarnation: &Incarnation,
        mut found: Option<u64>,
    ) -> Result<Option<BucketVersion>> {
        for _ in 0..MAX_ATTEMPTS {
            let number = found.take().map_or_else(|| store.newest_sequence(incarnation), |number| Ok(Some(number)));
            let Some(sequence) = number? else { return Ok(None) };
            // The newest record is never removed, so it was not the newest any more.
            let Some(record) = store.read_record_with(incarnation, sequence, OPEN_TAIL_BYTES)? else { continue };
            let checkpoint = store.read_checkpoint(incarnation, record.0.checkpoint);
            match checkpoint.and_then(|checkpoint| BucketVersion::new(store, checkpoint, record)) {
                // After a suspend of a day, the objects may have been removed.
                Err(Error::Damaged(_)) if store.newest_sequence(incarnation)? != Some(sequence) => {}
                version => return version.map(Some),
            }
        }
        Err(Error::damaged(format!("{}: the newest listed record is missing", store.name)))
    }

    /// Loads the newest version while another writer commits continuously. A list and then a read
    /// return the newest record of two round trips ago, and the writer has committed since; this
    /// reads the newest one of one round trip ago. Errors: as of [`BucketVersion::load_newest`].
    pub(super) fn load_newest_racing(store: &BucketStore, incarnation: &Incarnation) -> Result<Option<BucketVersion>> {
        let Some(version) = BucketVersion::load_newest(store, incarnation)? else { return Ok(None) };
        let Some(record) = store.read_newest_after(incarnation, version.trailer.sequence)? else {
            return Ok(Some(version));
        };
        let known = (version.trailer.checkpoint, &version.checkpoint);
        BucketVersion::load_reusing(store, incarnation, known, record).map(Some)
    }

    /// Loads the version of a record, reusing the map of the checkpoint `known` if the record names
    /// it. Errors: as of [`BucketVersion::load_newest`].
    fn load_reusing(
        store: &BucketStore,
        incarnation: &Incarnation,
        known: (Option<(Hash, u64)>, &BlockMap),
        record: RecordParts,
    ) -> Result<BucketVersion> {
        let wanted = record.0.checkpoint;
        let checkpoint =
            if wanted == known.0 { known.1.clone() } else { store.read_checkpoint(incarnation, wanted)? };
        BucketVersion::new(store, checkpoint, record)
    }

    /// Builds the version of a record from the map of its checkpoint. Errors: `Damaged`.
    fn new(store: &BucketStore, checkpoint: BlockMap, (trailer, body): RecordParts) -> Result<BucketVersion> {
        let mut map = checkpoint.clone();
        for entry in &body.changes {
            map.assign(entry);
        }
        // A commit since the checkpoint replaced their last blocks, and its record declared them
        // dead. Objects that its full list omitted are found as orphans.
        map.take_unreferenced();
        if map.end() > trailer.length.div_ceil(BLOCK) {
            return Err(Error::damaged(format!("{}: the block map is longer than the archive", store.name)));
        }
        let RecordBody { changes, tombstones, writer } = body;
        Ok(BucketVersion { trailer, checkpoint, changes, map, tombstones, writer })
    }
}

pub(crate) struct VersionReader {
    pub(super) blocks: BlockFetcher,
    pub(super) map: BlockMap,
    pub(super) length: u64,
    /// Hash of the version's record.
    pub(super) tag: String,
}

impl VersionReader {
    pub(super) fn new(store: Arc<BucketStore>, incarnation: Incarnation, version: &BucketVersion) -> VersionReader {
        let (length, tag) = (version.trailer.length, hex(&version.trailer.hash));
        let sequence = Arc::new(AtomicU64::new(version.trailer.sequence));
        let blocks = BlockFetcher { store, incarnation, sequence, whole: None };
        VersionReader { blocks, map: version.map.clone(), length, tag }
    }

    pub(super) fn version(&self) -> FileVersion {
        FileVersion { length: self.length, tag: Some(self.tag.clone()), modified: None }
    }

    /// Reads the start of the file, like [`RangeSource::read_start`]; blocks at an unchanged
    /// location are copied from `old`, the start at an earlier version.
    pub(super) fn start_reusing(&self, before: &VersionReader, old: &[u8]) -> RemoteResult<Vec<u8>> {
        let mut start = vec![0; usize::try_from(START_BYTES.min(self.length)).unwrap_or_default()];
        let count = start.len().div_ceil(BLOCK as usize) as u64;
        let (here, there) = (block_locations(&self.map, count), block_locations(&before.map, count));
        let mut missing = Vec::new();
        for (number, bytes) in (0..).zip(start.chunks_mut(BLOCK as usize)) {
            let at = number as usize * BLOCK as usize;
            match old.get(at..at + bytes.len()) {
                Some(known) if here[number as usize] == there[number as usize] => bytes.copy_from_slice(known),
                _ => missing.extend(self.map.parts(number..number + 1)),
            }
        }
        let all = 0..start.len() as u64;
        self.blocks.fill(&missing, all, &mut start)?;
        Ok(start)
    }

    fn read_bytes(&self, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        // The file's last block may be a part of one.
        let parts = self.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK));
        let length = range.end - range.start;
        match &parts[..] {
            // A contiguous run of one object is returned as it arrived.
            [MapEntry { place: Some(place), .. }]
                if range.start.is_multiple_of(BLOCK) && length.is_multiple_of(BLOCK) =>
            {
                self.blocks.fetch(place, length)
            }
            _ => {
                let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
                self.blocks.fill(&parts, range, &mut bytes)?;
                Ok(bytes)
            }
        }
    }
}

/// Returns the location of each of the first blocks; None for zeros.
fn block_locations(map: &BlockMap, count: u64) -> Vec<Option<(ObjectId, u32)>> {
    let each = |MapEntry { blocks, place }: MapEntry| {
        let first = blocks.start;
        blocks.map(move |block| place.map(|place| (place.id, place.at + (block - first) as u32)))
    };
    map.parts(0..count).into_iter().flat_map(each).collect()
}

impl RangeSource for VersionReader {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        Ok((self.version(), self.read_bytes(0..count.min(self.length))?))
    }

    fn is_atomic(&self) -> bool {
        true
    }

    fn cache_scope(&self) -> Option<&[u8]> {
        Some(&self.blocks.incarnation)
    }

    /// Derived from the locations of the blocks: an object never changes.
    fn cache_key(&self, range: Range<u64>) -> RangeKey {
        let mut hash = Sha256::new();
        hash.update((range.end - range.start).to_le_bytes());
        for MapEntry { blocks, place } in self.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK)) {
            hash.update((blocks.end - blocks.start).to_le_bytes());
            match place.map(|place| place.id) {
                None => hash.update([0]),
                Some(ObjectId::Log(sequence)) => hash.update([&[1][..], &sequence.to_le_bytes()].concat()),
                Some(ObjectId::Segment(name) | ObjectId::Checkpoint(name)) => hash.update([&[2][..], &name].concat()),
            }
            if let Some(place) = place {
                hash.update(place.at.to_le_bytes());
            }
        }
        hash.finalize().into()
    }

    fn read_cached(&self, offset: u64, out: &mut [u8]) -> bool {
        let end = offset + out.len() as u64;
        let mut block = [0; BLOCK as usize];
        let mut copy = |(number, place): (u64, ObjectRef)| {
            let is_here = self.blocks.store.copy_cached(&place, &mut block);
            if is_here {
                copy_shared(&block, number * BLOCK, out, offset);
            }
            is_here
        };
        let parts = self.map.parts(offset / BLOCK..end.div_ceil(BLOCK));
        parts.iter().all(|part| part.place.is_some() && split_blocks(part).all(&mut copy))
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        if *version != self.version() {
            return Err(RemoteError::Changed);
        }
        self.read_bytes(range)
    }
}

/// Reads a version with missing or truncated objects block by block, for a rescue.
///
/// Missing blocks read as zeros, in which no page of the archive begins; the other blocks of the
/// same request are still read. A failed request is reported as an error (REMOTE-3).
pub(super) struct PartialReader {
    reader: VersionReader,
    /// First missing block of each damaged object.
    missing_from: Mutex<HashMap<ObjectId, u32>>,
}

impl PartialReader {
    pub(super) fn new(reader: VersionReader) -> PartialReader {
        PartialReader { reader, missing_from: Mutex::default() }
    }

    /// Copies a range to `out`, which has zeros.
    fn fill(&self, range: Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        let parts = self.reader.map.parts(range.start / BLOCK..range.end.div_ceil(BLOCK));
        let parts: Vec<MapEntry> = parts.iter().filter_map(|part| self.readable_part(part)).collect();
        match self.reader.blocks.fill(&parts, range.clone(), out) {
            Err(RemoteError::Damaged(_)) => {}
            other => return other,
        }
        parts.iter().try_for_each(|part| self.bisect(part, &range, out))
    }

    /// Returns the blocks of a part that are not known to be missing.
    fn readable_part(&self, part: &MapEntry) -> Option<MapEntry> {
        let place = part.place?;
        let missing_from = self.missing_from.lock().get(&place.id).copied().unwrap_or(u32::MAX);
        let end = part.blocks.end.min(part.blocks.start + u64::from(missing_from.saturating_sub(place.at)));
        (part.blocks.start < end).then(|| MapEntry { blocks: part.blocks.start..end, ..part.clone() })
    }

    /// Reads a part by bisection: an object has no blocks after its first missing one.
    fn bisect(&self, part: &MapEntry, all: &Range<u64>, out: &mut [u8]) -> RemoteResult<()> {
        let Some(part) = self.readable_part(part) else { return Ok(()) };
        let range = (part.blocks.start * BLOCK).max(all.start)..(part.blocks.end * BLOCK).min(all.end);
        let into = &mut out[(range.start - all.start) as usize..(range.end - all.start) as usize];
        let (why, place) = match (self.reader.blocks.fill(std::slice::from_ref(&part), range, into), part.place) {
            (Err(RemoteError::Damaged(why)), Some(place)) => (why, place),
            (other, _) => return other,
        };
        let count = part.blocks.end - part.blocks.start;
        if count == 1 {
            tracing::warn!("{}: {why}; missing blocks are skipped", self.reader.blocks.store.name);
            self.missing_from.lock().insert(place.id, place.at);
            return Ok(());
        }
        let middle = part.blocks.start + count / 2;
        let later = ObjectRef { at: place.at + (count / 2) as u32, ..place };
        self.bisect(&MapEntry { blocks: part.blocks.start..middle, ..part.clone() }, all, out)?;
        self.bisect(&MapEntry { blocks: middle..part.blocks.end, place: Some(later) }, all, out)
    }
}

impl RangeSource for PartialReader {
    fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
        let mut bytes = vec![0; usize::try_from(count.min(self.reader.length)).unwrap_or_default()];
        self.fill(0..bytes.len() as u64, &mut bytes)?;
        Ok((self.reader.version(), bytes))
    }

    fn read_range(&self, version: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        if *version != self.reader.version() {
            return Err(RemoteError::Changed);
        }
        let mut bytes = vec![0; (range.end - range.start) as usize];
        self.fill(range, &mut bytes).map(|()| bytes)
    }
}

/// Interval after which the newest number is listed again: no record is written and removed within
/// it.
const LIST_INTERVAL: Duration = Duration::from_secs(MIN_GRACE.as_secs() / 2);

pub(crate) struct Follower {
    /// Newest record read.
    trailer: Trailer,
    /// The checkpoint of that record with its map, and the changes since.
    checkpoint: (Option<(Hash, u64)>, BlockMap),
    changes: Vec<MapEntry>,
    reader: Arc<VersionReader>,
    file: Arc<RemoteFile>,
    /// Sequence of the record that the file shows.
    sequence: u64,
    /// Time of the last list.
    listed: Duration,
}

/// Returns the time since boot, including suspended time.
pub(super) fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.try_into().unwrap_or_default(), time.tv_nsec.try_into().unwrap_or_default())
}

impl Follower {
    /// Creates a follower of an open `file` with its `reader` of a version. `listed` is the time
    /// of the list before.
    pub(super) fn new(
        version: BucketVersion,
        reader: Arc<VersionReader>,
        file: RemoteFile,
        listed: Duration,
    ) -> Follower {
        let BucketVersion { trailer, checkpoint, changes, .. } = version;
        let (checkpoint, sequence) = ((trailer.checkpoint, checkpoint), trailer.sequence);
        Follower { checkpoint, trailer, changes, reader, file: Arc::new(file), sequence, listed }
    }

    /// Returns the archive at the version of the last poll.
    pub(crate) fn file(&self) -> &Arc<RemoteFile> {
        &self.file
    }

    /// Returns the sequence of that version; it increases.
    pub(crate) fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Polls for a newer version, which [`Follower::file`] returns from then on. Costs one request
    /// if there is none. Errors: failures of requests, after which a later call may succeed;
    /// `Damaged` for an invalid record, or one of another archive.
    pub(crate) fn poll(&mut self) -> Result<()> {
        self.poll_by(&now)
    }

    /// Polls with a given clock. The clock is read after each response, because the machine may
    /// have been suspended before the request.
    pub(super) fn poll_by(&mut self, now: &dyn Fn() -> Duration) -> Result<()> {
        let (store, incarnation) = (self.reader.blocks.store.clone(), self.reader.blocks.incarnation);
        let next = store.read_record(&incarnation, self.trailer.sequence + 1)?;
        if let Some((trailer, _)) = &next
            && trailer.previous != self.trailer.hash
        {
            return Err(self.inconsistent("a record that does not chain to its predecessor"));
        }
        let (sequence, hash) = match &next {
            None if now().saturating_sub(self.listed) < LIST_INTERVAL => return Ok(()),
            None => (self.trailer.sequence, self.trailer.hash),
            Some((trailer, _)) => (trailer.sequence, trailer.hash),
        };
        let listed = now();
        let done = match store.newest_sequence(&incarnation)? {
            Some(newest) if newest > sequence => {
                let version = BucketVersion::load_newest(&store, &incarnation)?;
                let version = version.ok_or_else(|| self.inconsistent("no record any more"))?;
                if version.trailer.sequence == sequence + 1 && version.trailer.previous != hash {
                    return Err(self.inconsistent("a record that does not chain to its predecessor"));
                }
                self.switch_to(version)
            }
            Some(newest) if newest == sequence => match next {
                None => Ok(()),
                Some(record) => {
                    let known = (self.checkpoint.0, &self.checkpoint.1);
                    let version = BucketVersion::load_reusing(&store, &incarnation, known, record)?;
                    self.switch_to(version)
                }
            },
            _ => Err(self.inconsistent("an older state than before")),
        };
        // A failed switch does not count as a list: the record after this version may be gone by
        // the next poll.
        if done.is_ok() {
            self.listed = listed;
        }
        done
    }

    fn inconsistent(&self, flaw: &str) -> Error {
        Error::damaged(format!("{}: it has {flaw}", self.reader.blocks.store.name))
    }

    fn switch_to(&mut self, version: BucketVersion) -> Result<()> {
        let is_same = version.trailer.checkpoint == self.checkpoint.0
            && version.trailer.length == self.trailer.length
            && version.changes == self.changes;
        // Record of an open, a close or an empty commit.
        if is_same {
            self.reader.blocks.sequence.store(version.trailer.sequence, Ordering::Release);
            self.trailer = version.trailer;
            return Ok(());
        }
        if version.trailer.length == 0 {
            return Err(self.inconsistent("no archive any more"));
        }
        let blocks = &self.reader.blocks;
        let reader = Arc::new(VersionReader::new(blocks.store.clone(), blocks.incarnation, &version));
        let start = reader.start_reusing(&self.reader, self.file.start());
        let start = start.map_err(|error| error.into_deferred_error(&blocks.store.name))?;
        let file = self.file.with_version(reader.clone(), reader.version(), start);
        let BucketVersion { trailer, checkpoint, changes, .. } = version;
        self.checkpoint = (trailer.checkpoint, checkpoint);
        (self.reader, self.file, self.changes, self.sequence) = (reader, Arc::new(file), changes, trailer.sequence);
        self.trailer = trailer;
        Ok(())
    }
}
