//! Keeps shares in memory: for trials and tests, and the simplest thing that obeys the rules. Nothing survives the process.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use parking_lot::Mutex;

use super::clock::{Clock, StoreClock};
use super::share::{Key, Share};
use super::{
    Auth, ClaimId, Claimed, Created, Figures, Finish, Info, Lease, LeaseToken, NewShare, OwnerToken, Pending, Periods,
    Result, ShareStore, StoreError, check, random,
};

/// Shares in a map. Everything is as durable as it gets when a call returns.
pub struct MemoryStore {
    shares: Mutex<HashMap<Key, (Share, Bytes)>>,
    secret: [u8; 16],
    decoy: Share,
    clock: StoreClock,
    periods: Periods,
}

impl MemoryStore {
    /// # Errors
    /// `Unavailable` without randomness.
    pub fn new(clock: Arc<dyn Clock>, periods: Periods) -> Result<MemoryStore> {
        Ok(MemoryStore {
            shares: Mutex::new(HashMap::new()),
            secret: random()?,
            decoy: Share::decoy(random()?),
            clock: StoreClock::fresh(clock),
            periods,
        })
    }

    fn with<T>(&self, handle: Handle, step: impl FnOnce(&mut Share, &Bytes) -> Result<T>) -> Pending<T> {
        let mut shares = self.shares.lock();
        let answer = match shares.get_mut(&Key::of(handle, &self.secret)) {
            Some((share, capsule)) => {
                let answer = step(share, capsule);
                if self.clock.now() >= share.content_until(&self.periods) {
                    *capsule = Bytes::new();
                }
                answer
            }
            None => step(&mut self.decoy.clone(), &Bytes::new()),
        };
        Pending::ready(answer)
    }

    /// Forgets what nobody may ask for any more.
    pub fn sweep(&self) {
        let now = self.clock.now();
        self.shares.lock().retain(|_, (share, _)| now < share.audit_until(&self.periods));
    }
}

impl ShareStore for MemoryStore {
    fn create(&self, handle: Handle, share: NewShare) -> Pending<Created> {
        if let Err(error) = check(&share) {
            return Pending::ready(Err(error));
        }
        let kept = Share::new(&share, self.clock.now());
        Pending::ready(match self.shares.lock().entry(Key::of(handle, &self.secret)) {
            Entry::Occupied(_) => Err(StoreError::Taken),
            Entry::Vacant(free) => {
                free.insert((kept, share.capsule));
                Ok(Created { at: self.clock.wall(kept.created), expires: self.clock.wall(kept.expires) })
            }
        })
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> Pending<Claimed> {
        self.with(handle, |share, capsule| {
            let step = share.claim(auth, id, &self.clock, &self.periods, || random().map(LeaseToken))?;
            Ok(share.claimed(&step, capsule.clone(), &self.clock))
        })
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        self.with(handle, |share, _| share.lease(token, &self.clock))
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        self.with(handle, |share, _| share.payload(token, &self.clock, &self.periods))
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: Finish) -> Pending<bool> {
        self.with(handle, |share, _| share.finish(token, how, &self.clock))
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        self.with(handle, |share, _| share.info(owner, &self.clock))
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        self.with(handle, |share, _| share.revoke(owner, &self.clock))
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        self.with(handle, |share, _| share.rearm(owner, &self.clock))
    }

    fn figures(&self) -> Figures {
        let now = self.clock.now();
        let live = self.shares.lock().values().filter(|(share, _)| now < share.content_until(&self.periods)).count();
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
    use super::super::clock::manual::ManualClock;
    use super::super::conformance::{Subject, suite};
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
