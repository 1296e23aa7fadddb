//! Expiry and compaction: live records move out of a segment, then the file is removed.
//!
//! A copy carries the version of its original, and its barrier comes before the unlink. So after a
//! crash at any step a record is in one file or in both, and replay accepts either.

use std::time::Duration;

use lockbox_share_protocol::message::ShareState;

use super::engine::SegmentEngine;
use super::index::Location;
use super::meta_files;
use super::scan::{HEAD, RecordScanner, SegmentClass};
use super::shard::{Shard, name};
use crate::store::env::StoreTime;
use crate::store::error::Result;
use crate::store::share::Share;

/// Dead bytes below this are left alone in the background.
const WORTHWHILE: u64 = 256 * 1024;

/// Live bytes below which a segment is compacted as soon as no repeated claim needs its dead
/// records: moving the rest costs little, and a text that was read or revoked would otherwise stay
/// on disk until its expiry, days perhaps, readable for an attacker with the disk and the link.
const LITTLE: u64 = 64 * 1024;

/// Files that wait for a barrier, before the sweep makes one.
const MAX_UNSYNCED: usize = 32;

impl SegmentEngine {
    /// Removes expired shares, and compacts: with `all` every segment with dead records, else only
    /// mostly dead ones.
    ///
    /// # Errors
    /// The first error. Completed steps are not undone.
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
        meta_files::restore_reserve(&*self.shared.disk);
        outcome
    }

    fn sweep_candidates(&self, number: usize, now: StoreTime, all: bool) -> Vec<u32> {
        let shard = self.shards[number].lock();
        let mut found: Vec<u32> = Vec::new();
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
        let (file, nonce) = {
            let mut shard = self.shards[number].lock();
            shard.active.retain(|_, active| *active != id);
            let Some(segment) = shard.segments.get(&id) else { return Ok(false) };
            let nonce = segment.head.nonce;
            (shard.file(id)?, nonce)
        };
        let mut scanner = RecordScanner::new(file, nonce);
        let mut seen = 0;
        loop {
            while let Some((at, record)) = scanner.next()? {
                let key = record.key;
                let mut shard = self.shards[number].lock();
                let location = Location { segment: id, at };
                let current = shard.index.find(key.hash())?.iter().any(|place| place == location);
                if current {
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
                if audit_until > now { shard.put_audit(&found.key, &found.share, audit_until)? } else { None }
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

    /// Returns the bytes on disk of expired content.
    pub(super) fn expired_bytes(&self, shard: &Shard) -> u64 {
        let now = self.timing.clock.now();
        let over = shard.segments.values().filter(|segment| segment.head.end() <= now);
        over.filter(|segment| segment.head.class == SegmentClass::Content).map(|segment| segment.length).sum()
    }

    /// Runs the background sweeper until the store is stopped.
    pub(super) fn background(&self, every: Duration) {
        let mut failed = false;
        loop {
            {
                let mut stopped = self.stopped.lock();
                if !*stopped {
                    self.wake.wait_for(&mut stopped, every);
                }
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
