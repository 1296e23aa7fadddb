//! Expiry and compaction: what is still needed moves out of a segment, then the file goes.
//!
//! Copies carry the version of what they copy, and their barrier comes before the unlink. So a crash at any step leaves a record in
//! one file or in both, and replay takes either.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Inner;
use super::index::Location;
use super::scan::{Class, Scanner};
use super::shard::{RESERVE, RESERVE_NAME, Shard, name, refused};
use crate::store::clock::Time;
use crate::store::share::Share;
use crate::store::{Result, State, StoreError};

/// Dead bytes below this are left alone in the background.
const WORTHWHILE: u64 = 256 * 1024;

/// Files that wait for a barrier, before the sweep makes one.
const GATHERED: usize = 32;

impl Inner {
    /// Removes what is over, and with `all` everything that is dead; else only segments that are mostly dead.
    ///
    /// # Errors
    /// The first one that was met. What was done until then stays done.
    pub(super) fn sweep(&self, all: bool) -> Result<()> {
        self.group.check()?;
        let now = self.clock.now();
        let saved = self.save_clock();
        if self.group.gathered() > GATHERED {
            // In mode none nobody else asks for a barrier, and what waits for one holds its file open.
            self.group.barrier()?;
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
            for id in self.candidates(number, now, all) {
                let emptied = self.empty_segment(number, id, now);
                removed |= !matches!(emptied, Ok(false));
                note(emptied.map(drop));
            }
            note(self.shards[number].lock().shrink().map_err(refused));
        }
        if removed {
            // Before the next unlink this one is durable: an older file must not come back after a newer one went.
            note(self.shared.names.sync().map_err(refused));
        }
        self.restore_reserve();
        outcome
    }

    fn candidates(&self, number: usize, now: Time, all: bool) -> Vec<u32> {
        let shard = self.shards[number].lock();
        let mut found: Vec<u32> = Vec::new();
        for (id, segment) in &shard.segments {
            let over = segment.head.minute * 60_000 <= now.0;
            let dead = segment.length.saturating_sub(segment.live_bytes);
            let worthwhile = dead >= WORTHWHILE && dead * 2 >= segment.length && segment.quiet <= now;
            let overhead = super::scan::HEAD + segment.live * 8;
            if over || (segment.head.class == Class::Content && (worthwhile || (all && dead > overhead))) {
                found.push(*id);
            }
        }
        found.sort_unstable();
        found
    }

    /// Moves what is needed out of a segment and removes its file.
    fn empty_segment(&self, number: usize, id: u32, now: Time) -> Result<bool> {
        let (file, nonce) = {
            let mut shard = self.shards[number].lock();
            shard.active.retain(|_, active| *active != id);
            let Some(segment) = shard.segments.get(&id) else { return Ok(false) };
            let nonce = segment.head.nonce;
            (shard.file(id).map_err(refused)?, nonce)
        };
        let mut scanner = Scanner::new(file, nonce);
        let mut seen = 0;
        loop {
            while let Some((at, record)) = scanner.next().map_err(refused)? {
                let key = record.key;
                let mut shard = self.shards[number].lock();
                let location = Location { segment: id, at };
                let current = shard.index.find(key.hash()).map_err(refused)?.iter().any(|place| place == location);
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
        self.group.barrier()?;
        self.shards[number].lock().forget(id);
        self.shared.disk.remove(&name(id)).map_err(refused)?;
        Ok(true)
    }

    /// Takes one current share out of its segment: with content, without, or for good.
    fn move_share(&self, shard: &mut Shard, location: Location, now: Time) -> Result<()> {
        let Some(mut found) = shard.read(location).map_err(refused)? else { return Ok(()) };
        let before = found.share;
        found.share.cell.settle(now);
        let content_until = found.share.content_until(&self.periods);
        let audit_until = found.share.audit_until(&self.periods);
        let capsule = if content_until > now { shard.capsule(&found).map_err(refused)? } else { None };
        let moved = match capsule {
            Some(capsule) => {
                let kept = Share { cell: before.cell, ..found.share };
                Some(shard.put(&found.key, &kept, &capsule, content_until).map_err(refused)?)
            }
            None => {
                let class = shard.segments.get(&location.segment).map(|segment| segment.head.class);
                if found.share.state(now) == State::Expired && class == Some(Class::Content) {
                    shard.expired += 1;
                }
                self.drop_payload(&found.share);
                if audit_until > now {
                    shard.put_audit(&found.key, &found.share, audit_until).map_err(refused)?
                } else {
                    None
                }
            }
        };
        shard.count(location.segment, &before, false);
        shard.moved(&found.key, location, moved)
    }

    /// Removes payloads of shares that ended by time alone, or whose repeats are over.
    fn drop_ended_payloads(&self, number: usize, now: Time) -> Result<()> {
        loop {
            let mut shard = self.shards[number].lock();
            match shard.due.peek() {
                Some(std::cmp::Reverse((due, _))) if *due <= now => {}
                _ => return Ok(()),
            }
            let Some(std::cmp::Reverse((_, key))) = shard.due.pop() else { return Ok(()) };
            let Some(mut found) = shard.find(&key).map_err(refused)? else { continue };
            found.share.cell.settle(now);
            self.look_after(&mut shard, &found.key, &found.share, now);
        }
    }

    /// Removes the payload of a share that needs it no more, or looks again when it may have ended.
    pub(super) fn look_after(&self, shard: &mut Shard, key: &crate::store::share::Key, share: &Share, now: Time) {
        if share.payload.is_none() {
            return;
        }
        let until = share.content_until(&self.periods);
        if until <= now {
            self.drop_payload(share);
        } else {
            // A lease that ends may end the share; otherwise its expiry does, which the segment brings.
            let leases = share.cell.slots().iter().filter_map(|slot| match slot {
                crate::store::cell::Slot::Leased(lease) => Some(lease.until),
                _ => None,
            });
            if let Some(due) = leases.min().or((!share.live()).then_some(until)) {
                shard.due.push(std::cmp::Reverse((due, *key)));
            }
        }
    }

    pub(super) fn drop_payload(&self, share: &Share) {
        if let (Some(spool), Some(payload)) = (&self.spool, &share.payload) {
            spool.remove(&payload.id);
        }
    }

    /// A full disk took the reserve; when there is room again it comes back.
    pub(super) fn restore_reserve(&self) {
        if self.reserve_bytes == 0 || self.shared.disk.open(RESERVE_NAME).is_ok() {
            return;
        }
        let file = self.shared.disk.create(RESERVE_NAME);
        if file.and_then(|file| file.write_at(&vec![0x5a; self.reserve_bytes.min(RESERVE)], 0)).is_err() {
            // No room yet: half a reserve would stand in the way of what it is kept for.
            let _ = self.shared.disk.remove(RESERVE_NAME);
        }
    }

    pub(super) fn save_clock(&self) -> Result<()> {
        let file = self.shared.disk.create("clock.new").map_err(refused);
        let saved = file.and_then(|file| {
            file.write_at(self.clock.saved().as_bytes(), 0).map_err(refused)?;
            // A name without its content would be a store without time.
            file.sync().map_err(refused)?;
            self.shared.disk.rename("clock.new", "clock").map_err(refused)
        });
        match saved {
            // On a full disk the older file tells the time well enough.
            Err(StoreError::Full) => Ok(()),
            other => other,
        }
    }

    /// Bytes on disk of content whose time is over.
    pub(super) fn expired_bytes(&self, shard: &Shard) -> u64 {
        let now = self.clock.now();
        let over = shard.segments.values().filter(|segment| segment.head.minute * 60_000 <= now.0);
        over.filter(|segment| segment.head.class == Class::Content).map(|segment| segment.length).sum()
    }

    /// What the background thread does until it is stopped.
    pub(super) fn background(self: &Arc<Self>, every: std::time::Duration) {
        loop {
            {
                let mut stopped = self.stopped.lock();
                if !*stopped {
                    self.stop.wait_for(&mut stopped, every);
                }
                if *stopped {
                    return;
                }
            }
            match self.sweep(false) {
                Ok(()) => self.trouble.store(false, Ordering::Relaxed),
                // Said once for each time that it begins.
                Err(error) if !self.trouble.swap(true, Ordering::Relaxed) => tracing::warn!("sweeping failed: {error}"),
                Err(_) => {}
            }
        }
    }
}
