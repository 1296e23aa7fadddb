//! Claims: one step of the store each, and the same answer for everybody without proof.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use lockbox_share_protocol::capsule::Capsule;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::{Claim, Claimed, ErrorCode, Lease};
use lockbox_share_protocol::token::LeaseToken;

use super::message::{self, ONE};
use super::reply::{self, Refusal, Reply};
use super::{Daemon, batch};
use crate::limiter::Client;
use crate::store::{self, Auth, ClaimId, Pending, StoreError};

/// `POST /v1/claim`
pub(super) async fn claim(daemon: &Daemon, client: Client, request: Request<Incoming>) -> Result<Reply, Refusal> {
    daemon.limiter.admit_claim(client, 1).map_err(|wait| Refusal::limited(wait.0))?;
    let claim: Claim = message::json(request, ONE, daemon.settings.body_timeout).await?;
    let handle = claim.handle;
    let pending = begin(daemon, &claim);
    let claimed = finish(daemon, client, handle, pending).await?;
    Ok(reply::json(StatusCode::OK, &claimed))
}

/// `POST /v1/batch/claim`
pub(super) async fn batch(daemon: &Arc<Daemon>, client: Client, request: Request<Incoming>) -> Result<Reply, Refusal> {
    daemon.limiter.admit_claim(client, 0).map_err(|wait| Refusal::limited(wait.0))?;
    let (beginning, ending) = (daemon.clone(), daemon.clone());
    let begin = move |claim: Claim| (claim.handle, begin(&beginning, &claim));
    let end = move |(handle, pending)| {
        let daemon = ending.clone();
        async move { finish(&daemon, client, handle, pending).await }
    };
    batch::serve(daemon, client, request, begin, end).await
}

fn begin(daemon: &Daemon, claim: &Claim) -> Pending<store::Claimed> {
    daemon.store.claim(claim.handle, &Auth(*claim.auth.as_bytes()), ClaimId(*claim.claim.as_bytes()))
}

async fn finish(
    daemon: &Daemon,
    client: Client,
    handle: Handle,
    pending: Pending<store::Claimed>,
) -> Result<Claimed, Refusal> {
    let claimed = pending.await.map_err(|error| {
        match error {
            StoreError::Unknown => missed(daemon, client),
            StoreError::Expired { .. }
            | StoreError::Revoked { .. }
            | StoreError::Used { .. }
            | StoreError::Busy { .. } => {
                daemon.metrics.conflicts.fetch_add(1, Relaxed);
            }
            _ => {}
        }
        Refusal::from(error)
    })?;
    if !claimed.repeated {
        daemon.metrics.claimed.fetch_add(1, Relaxed);
        if claimed.lease.is_none() {
            daemon.metrics.completed.fetch_add(1, Relaxed);
        }
        daemon.changed(handle);
    }
    // Only well-formed capsules were taken in, so this one was damaged since.
    let capsule = Capsule::decode(claimed.capsule.to_vec()).map_err(|error| {
        tracing::error!(%error, "a stored capsule is damaged");
        Refusal::new(ErrorCode::Internal, "what was stored is damaged")
    })?;
    let lease = claimed.lease.map(|lease| Lease {
        token: LeaseToken::new(lease.token.0),
        expires_in: lease.until.0.saturating_sub(wall_millis()) / 1000,
    });
    Ok(Claimed { capsule, lease })
}

/// Counts a request without proof.
pub(super) fn missed(daemon: &Daemon, client: Client) {
    daemon.metrics.misses.fetch_add(1, Relaxed);
    daemon.limiter.missed(client);
}

/// The wall clock, by which the store tells times.
fn wall_millis() -> u64 {
    let since: Duration = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
