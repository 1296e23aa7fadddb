//! Requests of the contract, decided identically for all stores.
//!
//! A store implements the insertion of a share, and the execution of one step on an existing share
//! or on a decoy. The steps are defined here and in `share`, once for all stores.

use bytes::Bytes;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::token::{Auth, ClaimId, LeaseToken, OwnerToken};

use super::contract::{
    ClaimGrant, LeaseFinish, LeaseGrant, NewShare, ShareReport, ShareStore, ShareTimes, StoreMaintenance,
};
use super::error::{Result, WallTime};
use super::pending::PendingReply;
use super::random::random;
use super::share::{Share, StoreTiming};

/// Result of a step, to which the store may have to add the capsule.
pub(crate) trait StepReply: Send + Unpin + 'static {
    /// Whether the capsule is given away with the answer.
    const HAS_CAPSULE: bool = false;

    fn add_capsule(&mut self, _: Bytes) {}
}

impl StepReply for ClaimGrant {
    const HAS_CAPSULE: bool = true;

    fn add_capsule(&mut self, capsule: Bytes) {
        self.capsule = capsule;
    }
}

impl StepReply for LeaseGrant {}
impl StepReply for ShareReport {}
impl StepReply for bool {}
impl StepReply for WallTime {}

/// How a store keeps shares.
pub(crate) trait ShareBackend: StoreMaintenance {
    /// Deposits a share that was checked.
    fn deposit(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes>;

    /// Runs `step` on the share of this handle, or on a decoy that accepts no proof (Store rule 5),
    /// and stores its change. Runs it again if the share was changed concurrently.
    fn step<T: StepReply>(
        &self,
        handle: Handle,
        step: impl FnMut(&StoreTiming, &mut Share) -> Result<T> + Send + 'static,
    ) -> PendingReply<T>;
}

impl<K: ShareBackend> ShareStore for K {
    fn create(&self, handle: Handle, share: NewShare) -> PendingReply<ShareTimes> {
        match share.check() {
            Ok(()) => self.deposit(handle, share),
            Err(error) => PendingReply::ready(Err(error)),
        }
    }

    fn look(&self, handle: Handle, auth: &Auth) -> PendingReply<WallTime> {
        let auth = auth.verifier();
        self.step(handle, move |timing, share| share.look(&auth, timing))
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> PendingReply<ClaimGrant> {
        let auth = auth.verifier();
        self.step(handle, move |timing, share| share.claim(&auth, &id, timing, random))
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |timing, share| share.lease(&token, timing))
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |timing, share| share.payload(&token, timing))
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: LeaseFinish) -> PendingReply<bool> {
        let token = LeaseToken::new(*token.as_bytes());
        self.step(handle, move |timing, share| share.finish(&token, how, timing))
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        let owner = owner.verifier();
        self.step(handle, move |timing, share| share.info(&owner, timing))
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        let owner = owner.verifier();
        self.step(handle, move |timing, share| share.revoke(&owner, timing))
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        let owner = owner.verifier();
        self.step(handle, move |timing, share| share.rearm(&owner, timing))
    }
}
