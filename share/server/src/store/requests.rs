//! The requests of the contract, decided the same way whatever keeps the shares.
//!
//! A store says how it deposits a share and how it runs one step on a share that is there, or on a decoy. What each step is stands
//! here and in `share`, once for all stores.

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::token::{Auth, ClaimId, LeaseToken, OwnerToken};

use super::contract::{Claimed, Created, Finish, Info, Lease, NewShare, ShareStore, Upkeep};
use super::error::{Result, WallTime};
use super::pending::Pending;
use super::random::random;
use super::share::{Rules, Share};

/// What a step tells, to which the store may have to add the capsule.
pub(crate) trait Answer: Send + Unpin + 'static {
    /// Whether the capsule is given away with the answer.
    const HAS_CAPSULE: bool = false;

    fn add_capsule(&mut self, _: Bytes) {}
}

impl Answer for Claimed {
    const HAS_CAPSULE: bool = true;

    fn add_capsule(&mut self, capsule: Bytes) {
        self.capsule = capsule;
    }
}

impl Answer for Lease {}
impl Answer for Info {}
impl Answer for bool {}
impl Answer for WallTime {}

/// How a store keeps shares.
pub(crate) trait Keeper: Upkeep {
    /// Deposits a share that was checked.
    fn deposit(&self, handle: Handle, share: NewShare) -> Pending<Created>;

    /// Runs `step` on the share of this name, or on a decoy for which nobody has proof (Store rule 5), and keeps what it changed.
    /// A store that finds the share changed by another meanwhile runs it again.
    fn step<T: Answer>(
        &self,
        handle: Handle,
        step: impl FnMut(&Rules, &mut Share) -> Result<T> + Send + 'static,
    ) -> Pending<T>;
}

impl<K: Keeper> ShareStore for K {
    fn create(&self, handle: Handle, share: NewShare) -> Pending<Created> {
        match share.check() {
            Ok(()) => self.deposit(handle, share),
            Err(error) => Pending::ready(Err(error)),
        }
    }

    fn look(&self, handle: Handle, auth: &Auth) -> Pending<WallTime> {
        let auth = auth.verifier();
        self.step(handle, move |rules, share| share.look(&auth, rules))
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> Pending<Claimed> {
        let auth = auth.verifier();
        self.step(handle, move |rules, share| share.claim(&auth, &id, rules, random))
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |rules, share| share.lease(&token, rules))
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> Pending<Lease> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |rules, share| share.payload(&token, rules))
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: Finish) -> Pending<bool> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |rules, share| share.finish(&token, how, rules))
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        let owner = owner.verifier();
        self.step(handle, move |rules, share| share.info(&owner, rules))
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        let owner = owner.verifier();
        self.step(handle, move |rules, share| share.revoke(&owner, rules))
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> Pending<Info> {
        let owner = owner.verifier();
        self.step(handle, move |rules, share| share.rearm(&owner, rules))
    }
}
