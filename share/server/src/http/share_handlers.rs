//! Handlers of existing shares: look and claim, info, watch, revoke and rearm.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use lockbox_share_protocol::api::{DEFAULT_WAIT, MAX_WAIT};
use lockbox_share_protocol::capsule::Capsule;
use lockbox_share_protocol::message::{
    Batch, BatchResults, ClaimInfo, ClaimReply, ClaimRequest, ErrorCode, ItemResult, Lease, LookReply, LookRequest,
    MAX_BATCH, ShareInfo, ShareState,
};
use lockbox_share_protocol::token::{ClaimId, Handle, OwnerToken};

use super::reply::{self, Reply};
use super::request::{self, HttpRefusal};
use super::{Daemon, see_through};
use crate::limiter::ClientId;
use crate::store::{self, StoreError};

/// Maximum delay before a watcher notices a change by time alone.
const TICK: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// `GET /v1/shares/HANDLE`
    Info,
    /// `POST /v1/shares/HANDLE/revoke`
    Revoke,
    /// `POST /v1/shares/HANDLE/rearm`
    Rearm,
}

impl Action {
    pub(super) async fn one(
        self,
        daemon: &Arc<Daemon>,
        client: ClientId,
        handle: Handle,
        request: &Request<Incoming>,
    ) -> Result<Reply, HttpRefusal> {
        let owner = request::bearer(request.headers())?;
        let pending = match self {
            Action::Info => daemon.store.info(handle, &owner),
            Action::Revoke => daemon.store.revoke(handle, &owner),
            Action::Rearm => daemon.store.rearm(handle, &owner),
        };
        let daemon = daemon.clone();
        let end = async move {
            let report = pending.await.map_err(|error| daemon.refused(client, error))?;
            let changes = match self {
                Action::Info => return Ok(message_of(handle, &report)),
                Action::Revoke => &daemon.metrics.revoked,
                Action::Rearm => &daemon.metrics.rearmed,
            };
            changes.fetch_add(1, Relaxed);
            daemon.notifier.withdraw(handle);
            Ok::<_, HttpRefusal>(message_of(handle, &report))
        };
        // A question changes nothing that would have to be noted.
        let info = if self == Action::Info { end.await } else { see_through(end).await }?;
        Ok(reply::json(StatusCode::OK, &info))
    }
}

/// `POST /v1/batch/info`
pub(super) async fn batch_info(
    daemon: &Daemon,
    client: ClientId,
    request: Request<Incoming>,
) -> Result<Reply, HttpRefusal> {
    let owner = request::bearer(request.headers())?;
    let Some(_place) = daemon.batches.take(client) else {
        return Err(HttpRefusal::unavailable("too many concurrent batches"));
    };
    let batch: Batch = request::json(request, daemon.settings.body_timeout).await?;
    if batch.items.is_empty() {
        return Err(HttpRefusal::malformed("the batch is empty"));
    }
    if batch.items.len() > MAX_BATCH {
        return Err(HttpRefusal::malformed("the batch has more than 100 items"));
    }
    daemon.limiter.admit(client, batch.items.len() as u32)?;
    // All are asked for before the first is awaited: a remote store answers them together.
    let pending: Vec<_> = batch.items.iter().map(|&handle| daemon.store.info(handle, &owner)).collect();
    let mut results = Vec::with_capacity(pending.len());
    for (handle, pending) in batch.items.into_iter().zip(pending) {
        results.push(match pending.await {
            Ok(info) => ItemResult::Done { ok: message_of(handle, &info) },
            Err(error) => ItemResult::Failed(daemon.refused(client, error).failure()),
        });
    }
    Ok(reply::json(StatusCode::OK, &BatchResults { results }))
}

/// `GET /v1/shares/HANDLE/watch?version=N&state=S&wait=SECONDS`
pub(super) async fn watch(
    daemon: &Daemon,
    client: ClientId,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, HttpRefusal> {
    let owner: OwnerToken = request::bearer(request.headers())?;
    let [version, state, wait] = request::parameters(request.uri().query(), ["version", "state", "wait"])?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| HttpRefusal::malformed("a parameter is not a number"));
    let version = version.map(number).transpose()?;
    let wait = wait.map(number).transpose()?.unwrap_or(DEFAULT_WAIT).min(MAX_WAIT);
    let state: Option<ShareState> = state
        .map(|word| serde_json::from_value(serde_json::Value::from(word)))
        .transpose()
        .map_err(|_| HttpRefusal::malformed("the state does not exist"))?;
    let Some(_place) = daemon.watchers.take(client) else {
        return Err(HttpRefusal::unavailable("too many clients are watching shares"));
    };
    let end = tokio::time::Instant::now() + Duration::from_secs(wait);
    loop {
        let change = daemon.notifier.slot(handle).changed.notified();
        tokio::pin!(change);
        // From here on a change wakes this watcher, also one between the question and the wait.
        change.as_mut().enable();
        let info = daemon.store.info(handle, &owner).await.map_err(|error| daemon.refused(client, error))?;
        let info = message_of(handle, &info);
        let news =
            version.is_none_or(|seen| u64::from(info.version) > seen) || state.is_some_and(|seen| seen != info.state);
        let now = tokio::time::Instant::now();
        if news || now >= end || daemon.is_stopping() {
            return Ok(reply::json(StatusCode::OK, &info));
        }
        let _ = tokio::time::timeout_at(end.min(now + TICK), change).await;
    }
}

fn message_of(handle: Handle, info: &store::ShareReport) -> ShareInfo {
    let claim = |event: &store::ClaimRecord| ClaimInfo {
        state: event.state,
        claimed_at: event.claimed.seconds(),
        ended_at: event.ended.seconds(),
    };
    ShareInfo {
        handle,
        state: info.state,
        created_at: info.created.seconds(),
        expires_at: info.expires.seconds(),
        revoked_at: info.revoked.map(store::WallTime::seconds),
        max_claims: info.claims_allowed,
        claims_left: info.claims_left,
        claims: info.events.iter().map(claim).collect(),
        size: info.payload_bytes,
        version: info.version,
    }
}

/// Handles `POST /v1/look`. It has the rate limits of a claim, and reveals the same.
pub(super) async fn look(daemon: &Daemon, client: ClientId, request: Request<Incoming>) -> Result<Reply, HttpRefusal> {
    daemon.limiter.admit_claim(client)?;
    let look: LookRequest = request::json(request, daemon.settings.body_timeout).await?;
    let expires = daemon.store.look(look.handle, &look.auth).await.map_err(|error| daemon.refused(client, error))?;
    Ok(reply::json(StatusCode::OK, &LookReply { expires_at: expires.seconds() }))
}

/// `POST /v1/claim`
pub(super) async fn claim(daemon: &Daemon, client: ClientId, request: Request<Incoming>) -> Result<Reply, HttpRefusal> {
    daemon.limiter.admit_claim(client)?;
    let claim: ClaimRequest = request::json(request, daemon.settings.body_timeout).await?;
    let handle = claim.handle;
    let pending = daemon.store.claim(handle, &claim.auth, ClaimId::new(*claim.claim.as_bytes()));
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
        HttpRefusal::new(ErrorCode::Internal, "the stored capsule is damaged")
    })?;
    let lease = claimed.lease.map(|lease| Lease {
        expires_in: lease.until.0.saturating_sub(daemon.clock.wall().0) / 1000,
        token: lease.token,
    });
    Ok(reply::json(StatusCode::OK, &ClaimReply { capsule, lease }))
}
