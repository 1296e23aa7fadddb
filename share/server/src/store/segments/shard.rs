//! One shard of the store: its segments, its index, and the single way in which a share changes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::files::{self, HEAD, SegmentClass, SegmentHeader};
use super::index::{Index, Location};
use crate::store::barrier_group::{BarrierGroup, Syncable};
use crate::store::env::{Disk, DiskFile, StoreTime, random};
use crate::store::record::{CapsuleRef, FIXED, MAX_RECORD, RecordPosition, decode, encode, record_length};
use crate::store::share::{Key, Share};
use crate::store::{Result, StoreError, is_full};

/// No more shares are added to a segment of this size, so that compaction works on pieces.
const FULL: u64 = 64 * 1024 * 1024;
/// Segment length beyond which changed shares move to another segment: positions are 32 bits.
const END: u64 = 1 << 30;
/// Segment files that are open at a time in each shard.
const OPEN: usize = 64;
/// A record with a capsule of usual size is read at once.
const GUESS: usize = 1024;

pub(super) struct ShardContext {
    pub(super) disk: Arc<dyn Disk>,
    pub(super) group: Arc<BarrierGroup>,
    pub(super) names: Arc<dyn Syncable>,
    pub(super) ids: AtomicU32,
    /// Pages of cache for each index.
    pub(super) pages: usize,
}

pub(super) struct Segment {
    pub(super) head: SegmentHeader,
    file: Option<Arc<dyn DiskFile>>,
    pub(super) length: u64,
    pub(super) live: u64,
    /// Bytes of their content.
    pub(super) live_bytes: u64,
    /// Epoch of the newest barrier that a reader of this segment may have to wait for.
    noted: u64,
    /// End of the time in which repeated claims may need dead records.
    pub(super) quiet: StoreTime,
}

/// A share as its newest record says. The buffer of the shard holds the record.
pub(super) struct LocatedShare {
    pub(super) key: Key,
    pub(super) location: Location,
    pub(super) share: Share,
    capsule: CapsuleLocation,
}

#[derive(Clone)]
enum CapsuleLocation {
    Buffer(Range<usize>),
    At(u32),
    Nowhere,
}

pub(super) struct Shard {
    pub(super) number: u8,
    pub(super) shared: Arc<ShardContext>,
    pub(super) index: Index,
    pub(super) segments: HashMap<u32, Segment>,
    /// Active segment per class and minute.
    pub(super) active: HashMap<(SegmentClass, u64), u32>,
    opened: VecDeque<u32>,
    buffer: Vec<u8>,
    out: Vec<u8>,
    /// When the shares of payloads may have ended by time alone.
    pub(super) due: BinaryHeap<Reverse<(StoreTime, Key)>>,
    /// Earliest time in `due` for each share; the others are stale.
    due_of: HashMap<Key, StoreTime>,
    pub(super) expired: u64,
}

impl Shard {
    pub(super) fn new(number: u8, shared: Arc<ShardContext>) -> io::Result<Shard> {
        Ok(Shard {
            index: empty_index(number, &shared)?,
            number,
            shared,
            segments: HashMap::new(),
            active: HashMap::new(),
            opened: VecDeque::new(),
            buffer: Vec::new(),
            out: Vec::new(),
            due: BinaryHeap::new(),
            due_of: HashMap::new(),
            expired: 0,
        })
    }

    pub(super) fn shrink(&mut self) -> io::Result<()> {
        if self.segments.is_empty() && self.index.entries() == 0 && self.index.bytes() > 64 * 1024 {
            self.index = empty_index(self.number, &self.shared)?;
        }
        Ok(())
    }

    /// Schedules a check at the time at which a share may have ended. A later time than the
    /// scheduled one is found by that check: the holder of a lease moves its end with each request,
    /// and must not fill the memory by that.
    pub(super) fn schedule_check(&mut self, key: Key, due: StoreTime) {
        if self.due_of.get(&key).is_none_or(|known| due < *known) {
            self.due_of.insert(key, due);
            self.due.push(Reverse((due, key)));
        }
    }

    pub(super) fn take_due(&mut self, now: StoreTime) -> Option<Key> {
        while let Some(Reverse((due, key))) = self.due.peek().copied().filter(|Reverse((due, _))| *due <= now) {
            self.due.pop();
            if self.due_of.get(&key) == Some(&due) {
                self.due_of.remove(&key);
                return Some(key);
            }
        }
        None
    }

    pub(super) fn add_segment(&mut self, id: u32, head: SegmentHeader, length: u64) {
        let segment = Segment { head, file: None, length, live: 0, live_bytes: 0, noted: 0, quiet: StoreTime(0) };
        self.segments.insert(id, segment);
    }

    pub(super) fn find(&mut self, key: &Key) -> io::Result<Option<LocatedShare>> {
        for location in self.index.find(key.hash())?.iter() {
            if let Some(found) = self.read(location)?.filter(|found| found.key == *key) {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Returns whether the index names the record of a share at this place.
    pub(super) fn is_current(&mut self, key: &Key, location: Location) -> io::Result<bool> {
        Ok(self.index.find(key.hash())?.iter().any(|place| place == location))
    }

    /// The record at a place; None when it is not sound there.
    pub(super) fn read(&mut self, location: Location) -> io::Result<Option<LocatedShare>> {
        let Some(segment) = self.segments.get(&location.segment) else { return Ok(None) };
        let place = RecordPosition { nonce: segment.head.nonce, at: u64::from(location.at) };
        let file = self.file(location.segment)?;
        self.buffer.resize(MAX_RECORD, 0);
        let mut filled = file.read_at(&mut self.buffer[..GUESS], place.at)?;
        let length = record_length(&self.buffer[..filled]);
        if let Some(length) = length.filter(|length| *length > filled && filled == GUESS) {
            filled += file.read_at(&mut self.buffer[GUESS..length], place.at + GUESS as u64)?;
        }
        let Some(record) = decode(&self.buffer[..filled], place) else {
            let Location { segment, at } = location;
            tracing::error!(segment, at, "a record is damaged; its share is not served");
            return Ok(None);
        };
        let capsule = match record.content {
            CapsuleRef::Here(capsule) => {
                let start = capsule.as_ptr().addr() - self.buffer.as_ptr().addr();
                CapsuleLocation::Buffer(start..start + capsule.len())
            }
            CapsuleRef::At(at) => CapsuleLocation::At(at),
            CapsuleRef::Nowhere => CapsuleLocation::Nowhere,
        };
        Ok(Some(LocatedShare { key: record.key, location, share: record.share, capsule }))
    }

    /// The capsule of the share that was found last; None when it is gone.
    pub(super) fn capsule(&mut self, found: &LocatedShare) -> io::Result<Option<bytes::Bytes>> {
        let range = match &found.capsule {
            CapsuleLocation::Buffer(range) => range.clone(),
            CapsuleLocation::Nowhere => return Ok(None),
            // What somebody forged may name the content of another share, or content of another
            // length: a copy of the record with it would be no record, and the share would be lost
            // with the segment.
            CapsuleLocation::At(at) => match self.read(Location { at: *at, ..found.location })? {
                Some(LocatedShare { capsule: CapsuleLocation::Buffer(range), key, .. })
                    if key == found.key && range.len() == found.share.capsule_bytes as usize =>
                {
                    range
                }
                _ => return Ok(None),
            },
        };
        Ok(Some(bytes::Bytes::copy_from_slice(&self.buffer[range])))
    }

    pub(super) fn insert(&mut self, key: &Key, share: &Share, capsule: &[u8], until: StoreTime) -> Result<Location> {
        self.index.reserve(key.hash())?;
        let location = self.put(key, share, capsule, until)?;
        self.index.insert(key.hash(), location).map_err(|error| self.latch_index_error(error))?;
        Ok(location)
    }

    /// Writes a complete record to the segment with the expiry `until`, and counts it as live.
    pub(super) fn put(&mut self, key: &Key, share: &Share, capsule: &[u8], until: StoreTime) -> io::Result<Location> {
        let id = self.active(SegmentClass::Content, until.0.div_ceil(60_000))?;
        let location = self.append(id, key, share, CapsuleRef::Here(capsule))?;
        self.count(location.segment, share, true);
        Ok(location)
    }

    /// Appends the new state of a share to its segment. The reply waits for the barrier `noted`.
    pub(super) fn change(
        &mut self,
        found: &LocatedShare,
        before: &Share,
        drop_content: bool,
        quiet: StoreTime,
    ) -> Result<Location> {
        let home = found.location.segment;
        let content = match &found.capsule {
            _ if drop_content => CapsuleRef::Nowhere,
            CapsuleLocation::Buffer(_) => CapsuleRef::At(found.location.at),
            CapsuleLocation::At(at) => CapsuleRef::At(*at),
            CapsuleLocation::Nowhere => CapsuleRef::Nowhere,
        };
        if self.segments.get(&home).is_some_and(|segment| segment.length > END) {
            return self.change_in_new_segment(found, before);
        }
        let mut written = self.append(home, &found.key, &found.share, content);
        if written.as_ref().is_err_and(is_full) && files::give_up_reserve(&*self.shared.disk) {
            written = self.append(home, &found.key, &found.share, content);
        }
        let location = written?;
        self.update_index(&found.key, found.location, Some(location))?;
        if before.live() && !found.share.live() {
            self.count(home, before, false);
            if let Some(segment) = self.segments.get_mut(&home) {
                segment.quiet = segment.quiet.max(quiet);
            }
        }
        Ok(location)
    }

    /// A segment that grew to the end of its places hands the share on.
    fn change_in_new_segment(&mut self, found: &LocatedShare, before: &Share) -> Result<Location> {
        let capsule = self.capsule(found)?.unwrap_or_default();
        let end = self.segments.get(&found.location.segment).map_or(StoreTime(0), |segment| segment.head.end());
        let location = self.put(&found.key, &found.share, &capsule, end)?;
        self.update_index(&found.key, found.location, Some(location))?;
        self.count(found.location.segment, before, false);
        Ok(location)
    }

    pub(super) fn update_index(&mut self, key: &Key, old: Location, new: Option<Location>) -> Result<()> {
        match self.index.replace(key.hash(), old, new) {
            Ok(true) => Ok(()),
            Ok(false) => Err(self.latch_index_error(io::Error::other("an entry of the index is missing"))),
            Err(error) => Err(self.latch_index_error(error)),
        }
    }

    /// Latches the store (Store rule 9): disk and index differ until a restart rebuilds the index.
    fn latch_index_error(&self, error: io::Error) -> StoreError {
        let why = format!("the index failed: {error}");
        self.shared.group.latch(why.clone());
        StoreError::Unavailable(why)
    }

    /// Writes an audit record without content. `None` when the disk has no space even without
    /// the reserve: the content of an expired share must be removed nevertheless, and its audit
    /// is lost.
    pub(super) fn put_audit(&mut self, key: &Key, share: &Share, until: StoreTime) -> io::Result<Option<Location>> {
        match self.try_put_audit(key, share, until) {
            Err(error) if is_full(&error) => {}
            other => return other.map(Some),
        }
        files::give_up_reserve(&*self.shared.disk);
        match self.try_put_audit(key, share, until) {
            Err(error) if is_full(&error) => Ok(None),
            other => other.map(Some),
        }
    }

    fn try_put_audit(&mut self, key: &Key, share: &Share, until: StoreTime) -> io::Result<Location> {
        // One file for each hour: nobody needs the end of an audit on the minute.
        let id = self.active(SegmentClass::Audit, until.0.div_ceil(3_600_000) * 60)?;
        self.append(id, key, share, CapsuleRef::Nowhere)
    }

    fn append(&mut self, id: u32, key: &Key, share: &Share, content: CapsuleRef<'_>) -> io::Result<Location> {
        let file = self.file(id)?;
        let segment = self.segments.get_mut(&id).ok_or_else(missing_segment)?;
        let at = segment.length;
        self.out.clear();
        encode(key, share, content, RecordPosition { nonce: segment.head.nonce, at }, &mut self.out);
        // A failed write leaves its traces behind the end: the next one goes over them, and no part
        // of them can pass for a record.
        file.write_at(&self.out, at)?;
        segment.length += self.out.len() as u64;
        let target: Arc<dyn Syncable> = file;
        segment.noted = self.shared.group.note(&target, segment.noted);
        Ok(Location { segment: id, at: at as u32 })
    }

    /// The barrier that covers everything that can be read in a segment.
    pub(super) fn noted(&self, id: u32) -> u64 {
        self.segments.get(&id).map_or(0, |segment| segment.noted)
    }

    /// The segment that takes new records of this class and minute.
    fn active(&mut self, class: SegmentClass, minute: u64) -> io::Result<u32> {
        if let Some(id) = self.active.get(&(class, minute))
            && self.segments.get(id).is_some_and(|segment| segment.length < FULL)
        {
            return Ok(*id);
        }
        let nonce = u64::from_le_bytes(random().map_err(io::Error::other)?);
        let head = SegmentHeader { nonce, minute, class, shard: self.number };
        let id = self.shared.ids.fetch_add(1, Ordering::Relaxed);
        let file = self.shared.disk.create(&name(id))?;
        if let Err(error) = file.write_at(&head.encode(), 0) {
            // Without its head the file is nothing; the next start removes it if this fails as
            // well.
            let _ = self.shared.disk.remove(&name(id));
            return Err(error);
        }
        self.shared.group.note(&self.shared.names, 0);
        self.add_segment(id, head, HEAD);
        self.cache_file(id, &file);
        self.active.insert((class, minute), id);
        Ok(id)
    }

    pub(super) fn file(&mut self, id: u32) -> io::Result<Arc<dyn DiskFile>> {
        let segment = self.segments.get(&id).ok_or_else(missing_segment)?;
        if let Some(file) = &segment.file {
            return Ok(Arc::clone(file));
        }
        let file = self.shared.disk.open(&name(id))?;
        self.cache_file(id, &file);
        Ok(file)
    }

    fn cache_file(&mut self, id: u32, file: &Arc<dyn DiskFile>) {
        if self.opened.len() >= OPEN
            && let Some(old) = self.opened.pop_front()
            && let Some(segment) = self.segments.get_mut(&old)
        {
            // The group keeps what is not durable yet.
            segment.file = None;
        }
        self.opened.push_back(id);
        if let Some(segment) = self.segments.get_mut(&id) {
            segment.file = Some(Arc::clone(file));
        }
    }

    /// Counts a share that lives in a segment, or no longer does.
    pub(super) fn count(&mut self, id: u32, share: &Share, add: bool) {
        // A share that expired unused is in the audit as it was, and lives no more.
        let content = self.segments.get_mut(&id).filter(|segment| segment.head.class == SegmentClass::Content);
        let Some(segment) = content.filter(|_| share.live()) else { return };
        let bytes = whole_length(share);
        if add {
            segment.live += 1;
            segment.live_bytes += bytes;
        } else {
            segment.live = segment.live.saturating_sub(1);
            segment.live_bytes = segment.live_bytes.saturating_sub(bytes);
        }
    }

    pub(super) fn forget(&mut self, id: u32) {
        self.opened.retain(|open| *open != id);
        self.active.retain(|_, active| *active != id);
        self.segments.remove(&id);
    }
}

fn empty_index(number: u8, shared: &ShardContext) -> io::Result<Index> {
    let file = |kind| shared.disk.create(&format!("index-{number:02x}-{kind}"));
    Index::new([file("pages")?, file("overflow")?], shared.pages)
}

pub(super) fn name(id: u32) -> String {
    format!("segment-{id:08x}")
}

/// Bytes of a record with its content and without claims.
fn whole_length(share: &Share) -> u64 {
    let payload = if share.payload.is_some() { 56 } else { 0 };
    (FIXED + payload + 2 * usize::from(share.claims.allowed) + share.capsule_bytes as usize).next_multiple_of(8) as u64
}

impl Key {
    pub(super) fn hash(&self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|n| self.0[n]))
    }

    /// Not a part of the hash, or the pages of each index would be used unevenly.
    pub(super) fn shard(&self, shards: usize) -> usize {
        usize::from(self.0[15]) % shards
    }
}

fn missing_segment() -> io::Error {
    io::Error::other("a segment is gone")
}
