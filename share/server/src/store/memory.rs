//! Keeps shares in memory: the simplest store that obeys the rules, for tests and the fuzzer.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use parking_lot::Mutex;

use super::contract::{Created, Figures, NewShare, Periods, Upkeep};
use super::env::{Clock, StoreClock};
use super::error::{Result, StoreError};
use super::pending::Pending;
use super::random::random;
use super::requests::{Answer, Keeper};
use super::share::{Key, Rules, Share};

/// Shares in a map. Everything is as durable as it gets when a call returns.
pub(crate) struct MemoryStore {
    shares: Mutex<HashMap<Key, (Share, Bytes)>>,
    secret: [u8; 16],
    decoy: Share,
    rules: Rules,
}

impl MemoryStore {
    pub(crate) fn new(clock: Arc<dyn Clock>, periods: Periods) -> Result<MemoryStore> {
        Ok(MemoryStore {
            shares: Mutex::new(HashMap::new()),
            secret: random()?,
            decoy: Share::decoy(random()?),
            rules: Rules { clock: StoreClock::fresh(clock), periods },
        })
    }

    /// Forgets what nobody may ask for any more.
    #[cfg(test)]
    pub(crate) fn sweep(&self) {
        let now = self.rules.clock.now();
        self.shares.lock().retain(|_, (share, _)| now < share.audit_until(&self.rules.periods));
    }
}

impl Keeper for MemoryStore {
    fn deposit(&self, handle: Handle, share: NewShare) -> Pending<Created> {
        let kept = Share::new(&share, self.rules.clock.now());
        Pending::ready(match self.shares.lock().entry(Key::of(handle, &self.secret)) {
            Entry::Occupied(_) => Err(StoreError::Taken),
            Entry::Vacant(free) => {
                free.insert((kept, share.capsule));
                Ok(kept.created(&self.rules.clock))
            }
        })
    }

    fn step<T: Answer>(
        &self,
        handle: Handle,
        mut step: impl FnMut(&Rules, &mut Share) -> Result<T> + Send + 'static,
    ) -> Pending<T> {
        let mut shares = self.shares.lock();
        let Some((share, capsule)) = shares.get_mut(&Key::of(handle, &self.secret)) else {
            return Pending::ready(step(&self.rules, &mut self.decoy.clone()));
        };
        let mut answer = step(&self.rules, share);
        if let Ok(answer) = &mut answer {
            answer.add_capsule(capsule.clone());
        }
        if self.rules.clock.now() >= share.content_until(&self.rules.periods) {
            *capsule = Bytes::new();
        }
        Pending::ready(answer)
    }
}

impl Upkeep for MemoryStore {
    fn figures(&self) -> Figures {
        let now = self.rules.clock.now();
        let live =
            self.shares.lock().values().filter(|(share, _)| now < share.content_until(&self.rules.periods)).count();
        Figures { live: live as u64, ..Figures::default() }
    }

    fn ready(&self) -> Result<()> {
        Ok(())
    }

    fn flush(&self) -> Pending<()> {
        Pending::ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::{Subject, suite};
    use super::super::manual_clock::ManualClock;
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
