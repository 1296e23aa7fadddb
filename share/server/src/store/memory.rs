//! Keeps shares in memory: the simplest store that obeys the rules, for tests and the fuzzer.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use parking_lot::Mutex;

use super::barrier_group::PendingReply;
use super::contract::{NewShare, Periods, ShareTimes, StoreMaintenance, StoreStats};
use super::env::{Clock, StoreClock, random};
use super::error::{Result, StoreError};
use super::share::{Key, Share, ShareBackend, StepReply, StoreTiming};

/// Shares in a map. Everything is as durable as it gets when a call returns.
pub(crate) struct MemoryStore {
    shares: Mutex<HashMap<Key, (Share, Bytes)>>,
    secret: [u8; 16],
    decoy: Share,
    timing: StoreTiming,
}

impl MemoryStore {
    pub(crate) fn new(clock: Arc<dyn Clock>, periods: Periods) -> Result<MemoryStore> {
        Ok(MemoryStore {
            shares: Mutex::new(HashMap::new()),
            secret: random()?,
            decoy: Share::decoy(random()?),
            timing: StoreTiming { clock: StoreClock::fresh(clock), periods },
        })
    }

    /// Removes shares after their audit period.
    #[cfg(test)]
    pub(crate) fn sweep(&self) {
        let now = self.timing.clock.now();
        self.shares.lock().retain(|_, (share, _)| now < share.audit_until(&self.timing.periods));
    }
}

impl ShareBackend for MemoryStore {
    fn deposit(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes> {
        let kept = Share::new(&share, self.timing.clock.now());
        PendingReply::ready(match self.shares.lock().entry(Key::of(handle, &self.secret)) {
            Entry::Occupied(_) => Err(StoreError::Taken),
            Entry::Vacant(free) => {
                free.insert((kept, share.capsule));
                Ok(kept.created(&self.timing.clock))
            }
        })
    }

    fn step<T: StepReply>(
        &self,
        handle: Handle,
        mut step: impl FnMut(&StoreTiming, &mut Share) -> Result<T> + Send + 'static,
    ) -> PendingReply<T> {
        let mut shares = self.shares.lock();
        let Some((share, capsule)) = shares.get_mut(&Key::of(handle, &self.secret)) else {
            return PendingReply::ready(step(&self.timing, &mut self.decoy.clone()));
        };
        let mut answer = step(&self.timing, share);
        if let Ok(answer) = &mut answer {
            answer.add_capsule(capsule.clone());
        }
        if self.timing.clock.now() >= share.content_until(&self.timing.periods) {
            *capsule = Bytes::new();
        }
        PendingReply::ready(answer)
    }
}

impl StoreMaintenance for MemoryStore {
    fn stats(&self) -> StoreStats {
        let now = self.timing.clock.now();
        let live =
            self.shares.lock().values().filter(|(share, _)| now < share.content_until(&self.timing.periods)).count();
        StoreStats { live: live as u64, ..StoreStats::default() }
    }

    fn ready(&self) -> Result<()> {
        Ok(())
    }

    fn flush(&self) -> PendingReply<()> {
        PendingReply::ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Subject, suite};
    use super::super::simulated::ManualClock;
    use super::*;

    #[test]
    fn the_memory_store_conforms() {
        suite(&|periods| {
            let clock = Arc::new(ManualClock::new());
            let store = MemoryStore::new(clock.clone(), periods).unwrap();
            let store = Arc::new(store);
            Subject { store: store.clone(), clock, sweep: Box::new(move || store.sweep()), counts: true }
        });
    }
}
