//! Request path of the built-in store: find the share, decide, write the change.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use lockbox_share_protocol::handle::Handle;
use parking_lot::{Condvar, Mutex};

use super::meta_files;
use super::shard::{LocatedShare, Shard, ShardContext};
use crate::store::barrier_group::BarrierGroup;
use crate::store::claim_slots::ClaimSlot;
use crate::store::contract::{Durability, NewShare, ShareTimes};
use crate::store::disk::{Disk, DiskFile};
use crate::store::env::StoreTime;
use crate::store::error::{Result, StoreError};
use crate::store::pending::PendingReply;
use crate::store::random::random;
use crate::store::record::{RecordPosition, decode};
use crate::store::requests::StepReply;
use crate::store::share::{Key, Share, StoreTiming};
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
