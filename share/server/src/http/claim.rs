//! Claim handlers: one step of the store each, and one response to all requests without proof.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use lockbox_share_protocol::capsule::Capsule;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::{ClaimReply, ClaimRequest, ErrorCode, Lease, LookReply, LookRequest};
use lockbox_share_protocol::token::ClaimId;

use super::batch;
use super::daemon::Daemon;
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::request::{self, ONE};
use crate::limiter::ClientId;
use crate::store::{self, PendingReply, StoreError};

/// Handles `POST /v1/look`. It has the rate limits of a claim, and reveals the same.
pub(super) async fn look(daemon: &Daemon, client: ClientId, request: Request<Incoming>) -> Result<Reply, Refusal> {
    daemon.limiter.admit_claim(client, 1)?;
    let look: LookRequest = request::json(request, ONE, daemon.settings.body_timeout).await?;
    let expires = daemon.store.look(look.handle, &look.auth).await.map_err(|error| daemon.refused(client, error))?;
    Ok(reply::json(StatusCode::OK, &LookReply { expires_at: expires.0 / 1000 }))
}

/// `POST /v1/claim`
pub(super) async fn claim(daemon: &Daemon, client: ClientId, request: Request<Incoming>) -> Result<Reply, Refusal> {
    daemon.limiter.admit_claim(client, 1)?;
    let claim: ClaimRequest = request::json(request, ONE, daemon.settings.body_timeout).await?;
    let handle = claim.handle;
    let pending = begin(daemon, &claim);
    let claimed = finish(daemon, client, handle, pending).await?;
    Ok(reply::json(StatusCode::OK, &claimed))
}

/// `POST /v1/batch/claim`
pub(super) async fn batch(
    daemon: &Arc<Daemon>,
    client: ClientId,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    daemon.limiter.admit_claim(client, 0)?;
    let (beginning, ending) = (daemon.clone(), daemon.clone());
    let begin = move |claim: ClaimRequest| (claim.handle, begin(&beginning, &claim));
    let end = move |(handle, pending)| {
        let daemon = ending.clone();
        async move { finish(&daemon, client, handle, pending).await }
    };
    batch::serve(daemon, client, request, begin, end).await
}

fn begin(daemon: &Daemon, claim: &ClaimRequest) -> PendingReply<store::ClaimGrant> {
    daemon.store.claim(claim.handle, &claim.auth, ClaimId::new(*claim.claim.as_bytes()))
}

async fn finish(
    daemon: &Daemon,
    client: ClientId,
    handle: Handle,
    pending: PendingReply<store::ClaimGrant>,
) -> Result<ClaimReply, Refusal> {
    let claimed = pending.await.map_err(|error| {
        use StoreError::{Busy, Expired, Revoked, Used};
        if matches!(error, Expired { .. } | Revoked { .. } | Used { .. } | Busy { .. }) {
            daemon.metrics.conflicts.fetch_add(1, Relaxed);
        }
        daemon.refused(client, error)
    })?;
    if !claimed.repeated {
        daemon.metrics.claimed.fetch_add(1, Relaxed);
        if claimed.lease.is_none() {
            daemon.metrics.completed.fetch_add(1, Relaxed);
        }
        daemon.notifier.changed(handle);
    }
    // Only well-formed capsules were taken in, so this one was damaged since.
    let capsule = Capsule::decode(claimed.capsule.to_vec()).map_err(|error| {
        tracing::error!(%error, "a stored capsule is damaged");
        Refusal::new(ErrorCode::Internal, "what was stored is damaged")
    })?;
    let lease = claimed.lease.map(|lease| Lease {
        expires_in: lease.until.0.saturating_sub(daemon.clock.wall().0) / 1000,
        token: lease.token,
    });
    Ok(ClaimReply { capsule, lease })
}
