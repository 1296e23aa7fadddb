//! Engine of the built-in store: find the share, decide, write the change; and the replay of the
//! segments at a start, also after a crash.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use lockbox_share_protocol::handle::Handle;
use parking_lot::{Condvar, Mutex};

use super::index::Location;
use super::meta_files;
use super::scan::{HEAD, RecordScanner, SegmentHeader};
use super::shard::{LocatedShare, Shard, ShardContext, name};
use crate::store::barrier_group::{BarrierGroup, PendingReply};
use crate::store::claim_slots::ClaimSlot;
use crate::store::contract::{Durability, NewShare, ShareTimes};
use crate::store::disk::{Disk, DiskFile};
use crate::store::env::{StoreTime, random};
use crate::store::error::{Result, StoreError};
use crate::store::record::{Record, RecordPosition, decode};
use crate::store::share::{Key, Share, StepReply, StoreTiming};
use crate::store::spool::Spool;

pub(super) struct SegmentEngine {
    pub(super) shared: Arc<ShardContext>,
    pub(super) shards: Vec<Mutex<Shard>>,
    secret: [u8; 16],
    decoy: Share,
    decoy_file: Arc<dyn DiskFile>,
    pub(super) timing: StoreTiming,
    durability: Durability,
    pub(super) spool: Option<Arc<Spool>>,
    pub(super) stopped: Mutex<bool>,
    pub(super) wake: Condvar,
}

impl SegmentEngine {
    pub(super) fn new(
        disk: Arc<dyn Disk>,
        spool: Option<Arc<Spool>>,
        cache: usize,
        durability: Durability,
        timing: StoreTiming,
    ) -> Result<SegmentEngine> {
        let shared = Arc::new(ShardContext {
            names: disk.names(),
            ids: AtomicU32::new(0),
            pages: cache / meta_files::SHARDS / 1040,
            group: BarrierGroup::new(),
            disk,
        });
        let secret = meta_files::identity(&*shared.disk, &*shared.names)?;
        let shards =
            (0..meta_files::SHARDS).map(|number| Ok(Mutex::new(Shard::new(number as u8, Arc::clone(&shared))?)));
        let shards = shards.collect::<Result<_>>()?;
        let decoy = Share::decoy(random()?);
        Ok(SegmentEngine {
            decoy_file: meta_files::decoy(&*shared.disk, &decoy)?,
            decoy,
            shards,
            secret,
            timing,
            durability,
            spool,
            stopped: Mutex::new(false),
            wake: Condvar::new(),
            shared,
        })
    }

    pub(super) fn stop(&self) {
        *self.stopped.lock() = true;
        self.wake.notify_all();
    }

    pub(super) fn save_clock(&self) -> Result<()> {
        meta_files::save_clock(&*self.shared.disk, &self.timing.clock)
    }

    /// A kill may have left records that no barrier covers: they are made durable before any client
    /// hears of them.
    pub(super) fn sync_replayed(&self) -> Result<()> {
        if self.durability == Durability::None {
            return Ok(());
        }
        for shard in &self.shards {
            let mut shard = shard.lock();
            let ids: Vec<u32> = shard.segments.keys().copied().collect();
            for id in ids {
                shard.file(id)?.sync()?;
            }
        }
        Ok(self.shared.names.sync()?)
    }

    fn shard(&self, key: &Key) -> &Mutex<Shard> {
        &self.shards[key.shard(self.shards.len())]
    }

    /// One request: `step` decides, and the change is written.
    pub(super) fn step<T: StepReply>(
        &self,
        handle: Handle,
        step: impl FnOnce(&StoreTiming, &mut Share) -> Result<T>,
    ) -> PendingReply<T> {
        let key = Key::of(handle, &self.secret);
        let mut shard = self.shard(&key).lock();
        let found = match shard.find(&key) {
            Ok(Some(found)) => found,
            Ok(None) => {
                drop(shard);
                return PendingReply::ready(self.missed(step));
            }
            Err(error) => return PendingReply::ready(Err(error.into())),
        };
        let mut segment = found.location.segment;
        let answer = self.decide(&mut shard, found, step, &mut segment);
        // Without proof nothing may be learned, not even whether a barrier is under way (Store rule
        // 5).
        if self.durability != Durability::Commit || matches!(answer, Err(StoreError::Unknown)) {
            return PendingReply::ready(answer);
        }
        let noted = shard.noted(segment);
        drop(shard);
        PendingReply::after(answer, self.shared.group.ticket(noted))
    }

    fn decide<T: StepReply>(
        &self,
        shard: &mut Shard,
        mut found: LocatedShare,
        step: impl FnOnce(&StoreTiming, &mut Share) -> Result<T>,
        segment: &mut u32,
    ) -> Result<T> {
        let before = found.share;
        let mut answer = step(&self.timing, &mut found.share)?;
        if T::HAS_CAPSULE {
            let lost = || StoreError::Unavailable("the content of the share is damaged".into());
            answer.add_capsule(shard.capsule(&found)?.ok_or_else(lost)?);
        }
        if found.share.version != before.version {
            self.shared.group.check()?;
            let StoreTiming { clock, periods } = &self.timing;
            let now = clock.now();
            let over = found.share.content_until(periods) <= now;
            *segment = shard.change(&found, &before, over, now.after(periods.repeat))?.segment;
            self.schedule_payload(shard, &found.key, &found.share, now);
        }
        Ok(answer)
    }

    /// The same work as for a share that is there, up to the proof (Store rule 5).
    fn missed<T>(&self, step: impl FnOnce(&StoreTiming, &mut Share) -> Result<T>) -> Result<T> {
        let mut bytes = [0; 1024];
        let read = self.decoy_file.read_at(&mut bytes, 0)?;
        let mut decoy =
            decode(&bytes[..read], RecordPosition { nonce: 0, at: 0 }).map_or(self.decoy, |record| record.share);
        match step(&self.timing, &mut decoy) {
            Err(error) => Err(error),
            // Nobody has proof of the decoy, which is noise of this process.
            Ok(_) => Err(StoreError::Unknown),
        }
    }

    pub(super) fn deposit(&self, handle: Handle, share: &NewShare) -> PendingReply<ShareTimes> {
        match self.insert(handle, share) {
            Ok((created, noted)) if self.durability == Durability::Commit => {
                PendingReply::after(Ok(created), self.shared.group.ticket(noted))
            }
            other => PendingReply::ready(other.map(|(created, _)| created)),
        }
    }

    fn insert(&self, handle: Handle, share: &NewShare) -> Result<(ShareTimes, u64)> {
        self.shared.group.check()?;
        let StoreTiming { clock, periods } = &self.timing;
        let key = Key::of(handle, &self.secret);
        let mut shard = self.shard(&key).lock();
        let now = clock.now();
        let mut kept = Share::new(share, now);
        if let Some(found) = shard.find(&key)? {
            if found.share.audit_until(periods) > now {
                return Err(StoreError::Taken);
            }
            // The old share's records may still be there at the next start, where of one handle's
            // records the highest version counts: the new share's are above all of them.
            kept.version = found.share.version.saturating_add(1);
            shard.update_index(&key, found.location, None)?;
            shard.count(found.location.segment, &found.share, false);
        }
        let location = shard.insert(&key, &kept, &share.capsule, kept.expires)?;
        Ok((kept.created(clock), shard.noted(location.segment)))
    }

    /// Removes the payload of a share that needs it no more, or looks again when it may have ended.
    pub(super) fn schedule_payload(&self, shard: &mut Shard, key: &Key, share: &Share, now: StoreTime) {
        if share.payload.is_none() {
            return;
        }
        let until = share.content_until(&self.timing.periods);
        if until <= now {
            self.drop_payload(share);
        } else {
            // A lease that ends may end the share; otherwise its expiry does, which the segment
            // brings.
            let leases = share.claims.slots().iter().filter_map(|slot| match slot {
                ClaimSlot::Leased(lease) => Some(lease.until),
                _ => None,
            });
            if let Some(due) = leases.min().or((!share.live()).then_some(until)) {
                shard.schedule_check(*key, due);
            }
        }
    }

    pub(super) fn drop_payload(&self, share: &Share) {
        if let (Some(spool), Some(payload)) = (&self.spool, &share.payload) {
            spool.remove(&payload.id);
        }
    }
}

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
                apply_record(&mut shard, Location { segment: id, at }, &record)?;
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
fn apply_record(shard: &mut Shard, location: Location, record: &Record<'_>) -> io::Result<()> {
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
