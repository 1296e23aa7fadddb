//! Rebuilds the index from the segment files, also after a crash.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::Ordering;

use super::engine::SegmentEngine;
use super::index::Location;
use super::scan::{HEAD, RecordScanner, SegmentHeader};
use super::shard::{Shard, name};
use crate::store::record::Record;

impl SegmentEngine {
    /// Reads all segments. Applying a record twice, or an older one after a newer one, changes
    /// nothing.
    pub(super) fn replay(&self) -> io::Result<()> {
        let mut ids: Vec<u32> = Vec::new();
        for file in self.shared.disk.list()? {
            if let Some(id) = file.strip_prefix("segment-").and_then(|id| u32::from_str_radix(id, 16).ok()) {
                ids.push(id);
            }
        }
        ids.sort_unstable();
        if ids.last() == Some(&u32::MAX) {
            return Err(io::Error::other("segment numbers are used up"));
        }
        self.shared.ids.store(ids.last().map_or(0, |id| id + 1), Ordering::Relaxed);
        for id in ids {
            self.replay_segment(id)?;
        }
        self.after_replay()
    }

    fn replay_segment(&self, id: u32) -> io::Result<()> {
        let file = self.shared.disk.open(&name(id))?;
        let length = file.length()?;
        let mut bytes = [0; HEAD as usize];
        let read = file.read_at(&mut bytes, 0)?;
        let Some(head) =
            SegmentHeader::decode(&bytes[..read]).filter(|head| usize::from(head.shard) < self.shards.len())
        else {
            if length <= HEAD {
                // A crash while the file was made: nothing in it was ever acknowledged.
                return self.shared.disk.remove(&name(id));
            }
            tracing::error!(segment = id, "the head of a segment is damaged; the file is set aside");
            return self.shared.disk.rename(&name(id), &format!("damaged-{id:08x}"));
        };
        let mut shard = self.shards[usize::from(head.shard)].lock();
        shard.add_segment(id, head, HEAD);
        let mut scanner = RecordScanner::new(file, head.nonce);
        while let Some((at, record)) = scanner.next()? {
            if record.key.shard(self.shards.len()) == usize::from(head.shard) {
                apply(&mut shard, Location { segment: id, at }, &record)?;
            }
        }
        if let Some(segment) = shard.segments.get_mut(&id) {
            // What lies behind was never acknowledged, and the next record goes over it.
            segment.length = scanner.end;
            // Repeats of claims from before the start are over at the latest then.
            segment.quiet = self.timing.clock.now().after(self.timing.periods.repeat);
        }
        if scanner.damaged > 0 {
            tracing::warn!(segment = id, bytes = scanner.damaged, "a segment is torn or damaged in between");
        }
        Ok(())
    }

    /// Removes payloads without a share, and schedules those that end by time alone.
    fn after_replay(&self) -> io::Result<()> {
        let Some(spool) = &self.spool else { return Ok(()) };
        let now = self.timing.clock.now();
        let mut needed = HashSet::new();
        for mutex in &self.shards {
            let mut shard = mutex.lock();
            let ids: Vec<u32> = shard.segments.keys().copied().collect();
            for id in ids {
                let Some(segment) = shard.segments.get(&id) else { continue };
                let nonce = segment.head.nonce;
                let mut scanner = RecordScanner::new(shard.file(id)?, nonce);
                while let Some((at, record)) = scanner.next()? {
                    let location = Location { segment: id, at };
                    let mut share = record.share;
                    let Some(payload) = share.payload else { continue };
                    if !shard.index.find(record.key.hash())?.iter().any(|place| place == location) {
                        continue;
                    }
                    share.claims.end_overdue(now);
                    if share.content_until(&self.timing.periods) > now {
                        needed.insert(payload.id);
                        self.schedule_payload(&mut shard, &record.key, &share, now);
                    }
                }
            }
        }
        spool.retain(&needed)
    }
}

/// Adds a record to the index if it is newer than the indexed one.
fn apply(shard: &mut Shard, location: Location, record: &Record<'_>) -> io::Result<()> {
    let age = |version: u32, place: Location| (version, place.segment, place.at);
    let old = shard.find(&record.key)?;
    if let Some(old) = old {
        if age(record.share.version, location) > age(old.share.version, old.location) {
            shard.index.replace(record.key.hash(), old.location, Some(location))?;
            shard.count(old.location.segment, &old.share, false);
            shard.count(location.segment, &record.share, true);
        }
        return Ok(());
    }
    shard.index.reserve(record.key.hash())?;
    shard.index.insert(record.key.hash(), location)?;
    shard.count(location.segment, &record.share, true);
    Ok(())
}
