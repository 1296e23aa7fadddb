//! Owner handlers: info, watch, revoke and rearm.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::{Request, StatusCode};
use lockbox_share_protocol::api::{DEFAULT_WAIT, MAX_WAIT};
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::{ClaimInfo, ShareInfo, ShareState};
use lockbox_share_protocol::token::OwnerToken;

use super::daemon::{Daemon, see_through};
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::{batch, request};
use crate::limiter::ClientId;
use crate::store::{self, PendingReply};

/// How long a change by time alone may stay unnoticed by a watcher.
const TICK: Duration = Duration::from_secs(1);

/// Owner request on one share or on a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// `GET /v1/shares/HANDLE`, `POST /v1/batch/info`
    Info,
    /// `POST /v1/shares/HANDLE/revoke`, `POST /v1/batch/revoke`
    Revoke,
    /// `POST /v1/shares/HANDLE/rearm`
    Rearm,
}

impl Action {
    fn begin(self, daemon: &Daemon, handle: Handle, owner: &OwnerToken) -> PendingReply<store::ShareReport> {
        match self {
            Action::Info => daemon.store.info(handle, owner),
            Action::Revoke => daemon.store.revoke(handle, owner),
            Action::Rearm => daemon.store.rearm(handle, owner),
        }
    }

    async fn end(
        self,
        daemon: Arc<Daemon>,
        client: ClientId,
        handle: Handle,
        pending: PendingReply<store::ShareReport>,
    ) -> Result<ShareInfo, Refusal> {
        let info = pending.await.map_err(|error| daemon.refused(client, error))?;
        let counter = match self {
            Action::Info => return Ok(message_of(handle, &info)),
            Action::Revoke => &daemon.metrics.revoked,
            Action::Rearm => &daemon.metrics.rearmed,
        };
        counter.fetch_add(1, Relaxed);
        daemon.notifier.withdraw(handle);
        Ok(message_of(handle, &info))
    }

    /// Serves one share.
    pub(super) async fn one(
        self,
        daemon: &Arc<Daemon>,
        client: ClientId,
        handle: Handle,
        request: &Request<Incoming>,
    ) -> Result<Reply, Refusal> {
        let owner = request::bearer(request.headers())?;
        let pending = self.begin(daemon, handle, &owner);
        let end = self.end(daemon.clone(), client, handle, pending);
        // A question changes nothing that would have to be noted.
        let info = if self == Action::Info { end.await } else { see_through(end).await }?;
        Ok(reply::json(StatusCode::OK, &info))
    }

    /// Serves many shares.
    pub(super) async fn many(
        self,
        daemon: &Arc<Daemon>,
        client: ClientId,
        request: Request<Incoming>,
    ) -> Result<Reply, Refusal> {
        let owner = request::bearer(request.headers())?;
        let (beginning, ending) = (daemon.clone(), daemon.clone());
        let begin = move |handle| (handle, self.begin(&beginning, handle, &owner));
        let end = move |(handle, pending)| self.end(ending.clone(), client, handle, pending);
        batch::serve(daemon, client, request, begin, end).await
    }
}

/// `GET /v1/shares/HANDLE/watch?version=N&state=S&wait=SECONDS`
pub(super) async fn watch(
    daemon: &Daemon,
    client: ClientId,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner: OwnerToken = request::bearer(request.headers())?;
    let [version, state, wait] = request::parameters(request.uri().query(), ["version", "state", "wait"])?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| Refusal::malformed("a parameter is no number"));
    let version = version.map(number).transpose()?;
    let wait = wait.map(number).transpose()?.unwrap_or(DEFAULT_WAIT).min(MAX_WAIT);
    let state: Option<ShareState> = state
        .map(|word| serde_json::from_value(serde_json::Value::from(word)))
        .transpose()
        .map_err(|_| Refusal::malformed("there is no such state"))?;
    let Some(_place) = daemon.watchers.take(client) else {
        return Err(Refusal::unavailable("too many watch at this time"));
    };
    let end = tokio::time::Instant::now() + Duration::from_secs(wait);
    loop {
        let change = daemon.notifier.next(handle);
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

/// Converts the store's report to the protocol's message.
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
