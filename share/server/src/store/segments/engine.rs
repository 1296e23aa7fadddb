//! Engine of the built-in store: find the share, decide, write the change; the replay of the
//! segments at a start, also after a crash; and the sweep, which expires and compacts.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use lockbox_share_protocol::message::ShareState;
use lockbox_share_protocol::token::Handle;
use parking_lot::{Condvar, Mutex};

use super::files::{self, HEAD, RecordScanner, SegmentClass, SegmentHeader};
use super::index::Location;
use super::shard::{LocatedShare, Shard, ShardContext, name};
use crate::store::barrier_group::{BarrierGroup, PendingReply};
use crate::store::contract::{Durability, NewShare, ShareTimes};
use crate::store::env::{Disk, DiskFile, StoreTime, random};
use crate::store::record::{Record, RecordPosition, decode};
use crate::store::share::{Key, Share, StepReply, StoreTiming};
use crate::store::spool::Spool;
use crate::store::{Result, StoreError};

/// Dead bytes below this are left alone in the background.
const WORTHWHILE: u64 = 256 * 1024;

/// Live bytes below which a segment is compacted as soon as no repeated claim needs its dead
/// records: moving the rest costs little, and a text that was read or revoked would otherwise stay
/// on disk until its expiry, days perhaps, readable for an attacker with the disk and the link.
const LITTLE: u64 = 64 * 1024;

/// Files that wait for a barrier, before the sweep makes one.
const MAX_UNSYNCED: usize = 32;

pub(super) struct SegmentEngine {
    pub(super) shared: Arc<ShardContext>,
    pub(super) shards: Vec<Mutex<Shard>>,
    secret: [u8; 16],
    decoy: Share,
    decoy_file: Arc<dyn DiskFile>,
    timing: StoreTiming,
    durability: Durability,
    pub(super) spool: Option<Arc<Spool>>,
    /// Held while the clock is saved: of two threads that replace its file, one would find the new
    /// file renamed already.
    clock_file: Mutex<()>,
    stopped: Mutex<bool>,
    wake: Condvar,
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
            pages: cache / files::SHARDS / 1040,
            group: BarrierGroup::new(),
            disk,
        });
        let secret = files::identity(&*shared.disk, &*shared.names)?;
        let shards = (0..files::SHARDS).map(|number| Ok(Mutex::new(Shard::new(number as u8, Arc::clone(&shared))?)));
        let shards = shards.collect::<Result<_>>()?;
        let decoy = Share::decoy(random()?);
        Ok(SegmentEngine {
            decoy_file: files::decoy(&*shared.disk, &decoy)?,
            decoy,
            shards,
            secret,
            timing,
            durability,
            spool,
            clock_file: Mutex::default(),
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
        let _alone = self.clock_file.lock();
        files::save_clock(&*self.shared.disk, &self.timing.clock)
    }

    /// Makes records durable that a kill left without a barrier, before any client hears of them.
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
        // No client has proof of the decoy, which is noise of this process.
        step(&self.timing, &mut decoy).and(Err(StoreError::Unknown))
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
    fn schedule_payload(&self, shard: &mut Shard, key: &Key, share: &Share, now: StoreTime) {
        if share.payload.is_none() {
            return;
        }
        let until = share.content_until(&self.timing.periods);
        if until <= now {
            self.drop_payload(share);
        } else {
            // A lease that ends may end the share; otherwise its expiry does, which the segment
            // brings.
            if let Some(due) = share.claims.first_lease_end().or((!share.live()).then_some(until)) {
                shard.schedule_check(*key, due);
            }
        }
    }

    fn drop_payload(&self, share: &Share) {
        if let (Some(spool), Some(payload)) = (&self.spool, &share.payload) {
            spool.remove(&payload.id);
        }
    }
}

impl SegmentEngine {
    /// Reads all segments. A record that is applied twice, or after a newer one, changes nothing.
    pub(super) fn replay(&self) -> io::Result<()> {
        let files = self.shared.disk.list()?;
        let numbers = files.iter().filter_map(|file| file.strip_prefix("segment-"));
        let mut ids: Vec<_> = numbers.filter_map(|id| u32::from_str_radix(id, 16).ok()).collect();
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
        let head = SegmentHeader::decode(&bytes[..read]);
        let Some(head) = head.filter(|head| usize::from(head.shard) < self.shards.len()) else {
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
                    let mut share = record.share;
                    let Some(payload) = share.payload else { continue };
                    if !shard.is_current(&record.key, Location { segment: id, at })? {
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

/// Expiry and compaction: live records move out of a segment, then the file is removed.
///
/// A copy carries the version of its original, and its barrier comes before the unlink. So after a
/// crash at any step a record is in one file or in both, and replay accepts either.
impl SegmentEngine {
    /// Removes expired shares, and compacts: with `all` every segment with dead records, else only
    /// mostly dead ones. Errors: the first error. Completed steps are not undone.
    pub(super) fn sweep(&self, all: bool) -> Result<()> {
        self.shared.group.check()?;
        let now = self.timing.clock.now();
        let saved = self.save_clock();
        if self.shared.group.unsynced() > MAX_UNSYNCED {
            // In mode none nobody else asks for a barrier, and what waits for one holds its file
            // open.
            self.shared.group.barrier()?;
        }
        let mut removed = false;
        let mut outcome = Ok(());
        // One damaged file must not keep what is over in all the others.
        let mut note = |done: Result<()>| {
            if outcome.is_ok() {
                outcome = done;
            }
        };
        note(saved);
        for number in 0..self.shards.len() {
            note(self.drop_ended_payloads(number, now));
            for id in self.sweep_candidates(number, now, all) {
                let emptied = self.evacuate_segment(number, id, now);
                removed |= !matches!(emptied, Ok(false));
                note(emptied.map(drop));
            }
            note(self.shards[number].lock().shrink().map_err(Into::into));
        }
        if removed {
            // Before the next unlink this one is durable: an older file must not come back after a
            // newer one went.
            note(self.shared.names.sync().map_err(Into::into));
        }
        files::restore_reserve(&*self.shared.disk);
        outcome
    }

    fn sweep_candidates(&self, number: usize, now: StoreTime, all: bool) -> Vec<u32> {
        let shard = self.shards[number].lock();
        let mut found = Vec::new();
        for (id, segment) in &shard.segments {
            let over = segment.head.end() <= now;
            let dead = segment.length.saturating_sub(segment.live_bytes);
            let worthwhile = dead >= WORTHWHILE && dead * 2 >= segment.length && segment.quiet <= now;
            // Zero until something in it died.
            let settled = StoreTime(0) < segment.quiet && segment.quiet <= now;
            let little = settled && segment.live_bytes <= LITTLE;
            let overhead = HEAD + segment.live * 8;
            let content = segment.head.class == SegmentClass::Content;
            if over || (content && (worthwhile || ((all || little) && dead > overhead))) {
                found.push(*id);
            }
        }
        found.sort_unstable();
        found
    }

    /// Moves live records out of a segment and removes its file.
    fn evacuate_segment(&self, number: usize, id: u32, now: StoreTime) -> Result<bool> {
        let mut scanner = {
            let mut shard = self.shards[number].lock();
            shard.active.retain(|_, active| *active != id);
            let Some(segment) = shard.segments.get(&id) else { return Ok(false) };
            let nonce = segment.head.nonce;
            RecordScanner::new(shard.file(id)?, nonce)
        };
        let mut seen = 0;
        loop {
            while let Some((at, record)) = scanner.next()? {
                let mut shard = self.shards[number].lock();
                let location = Location { segment: id, at };
                if shard.is_current(&record.key, location)? {
                    self.move_share(&mut shard, location, now)?;
                }
            }
            // Meanwhile something may have been noted of shares that had not moved yet.
            let length = self.shards[number].lock().segments.get(&id).map_or(0, |segment| segment.length);
            if length <= scanner.end || length == seen {
                break;
            }
            seen = length;
            scanner.again();
        }
        self.shared.group.barrier()?;
        self.shards[number].lock().forget(id);
        self.shared.disk.remove(&name(id))?;
        Ok(true)
    }

    /// Takes one current share out of its segment: with content, without, or for good.
    fn move_share(&self, shard: &mut Shard, location: Location, now: StoreTime) -> Result<()> {
        let Some(mut found) = shard.read(location)? else { return Ok(()) };
        let before = found.share;
        found.share.claims.end_overdue(now);
        let content_until = found.share.content_until(&self.timing.periods);
        let audit_until = found.share.audit_until(&self.timing.periods);
        let capsule = if content_until > now { shard.capsule(&found)? } else { None };
        let moved = match capsule {
            Some(capsule) => {
                let kept = Share { claims: before.claims, ..found.share };
                Some(shard.put(&found.key, &kept, &capsule, content_until)?)
            }
            None => {
                let class = shard.segments.get(&location.segment).map(|segment| segment.head.class);
                if found.share.state(now) == ShareState::Expired && class == Some(SegmentClass::Content) {
                    shard.expired += 1;
                }
                self.drop_payload(&found.share);
                let audit =
                    if audit_until > now { shard.put_audit(&found.key, &found.share, audit_until)? } else { None };
                // Until the expiry it is the tombstone: an older segment may still have the share
                // armed, which a replay without the tombstone would bring back.
                if audit.is_none() && found.share.expires > now {
                    return Err(StoreError::Full);
                }
                audit
            }
        };
        shard.count(location.segment, &before, false);
        shard.update_index(&found.key, location, moved)
    }

    /// Removes payloads of shares that ended by time alone or have no more repeats.
    fn drop_ended_payloads(&self, number: usize, now: StoreTime) -> Result<()> {
        loop {
            let mut shard = self.shards[number].lock();
            let Some(key) = shard.take_due(now) else { return Ok(()) };
            let Some(mut found) = shard.find(&key)? else { continue };
            found.share.claims.end_overdue(now);
            self.schedule_payload(&mut shard, &found.key, &found.share, now);
        }
    }

    pub(super) fn expired_bytes(&self, shard: &Shard) -> u64 {
        let now = self.timing.clock.now();
        let over = shard.segments.values().filter(|segment| segment.head.end() <= now);
        over.filter(|segment| segment.head.class == SegmentClass::Content).map(|segment| segment.length).sum()
    }

    pub(super) fn background(&self, every: Duration) {
        let mut failed = false;
        loop {
            {
                let mut stopped = self.stopped.lock();
                self.wake.wait_while_for(&mut stopped, |stopped| !*stopped, every);
                if *stopped {
                    return;
                }
            }
            let swept = self.sweep(false);
            // Logged once for each time that it begins.
            if let (Err(error), false) = (&swept, failed) {
                tracing::warn!("sweeping failed: {error}");
            }
            failed = swept.is_err();
        }
    }
}

/// Adds a record to the index if it is newer than the indexed one.
fn apply_record(shard: &mut Shard, location: Location, record: &Record<'_>) -> io::Result<()> {
    let age = |version: u32, place: Location| (version, place.segment, place.at);
    if let Some(old) = shard.find(&record.key)? {
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
