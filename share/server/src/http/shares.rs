//! What owners do: make shares, ask about them, wait for changes, take them back and arm them again.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Request, StatusCode};
use lockbox_share_protocol::api::{self, DEFAULT_WAIT, MAX_WAIT};
use lockbox_share_protocol::capsule::Content;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::{
    ClaimInfo, ClaimState, Create, Created, ErrorCode, Info, Limits, MAX_BATCH, MAX_CLAIMS, State,
};
use lockbox_share_protocol::token;

use super::message::{self, ONE};
use super::origin::{self, Peer};
use super::reply::{self, Refusal, Reply};
use super::waiting::Taken;
use super::{CHANGE_PLACES, Creators, Daemon, Settings, batch, claim, see_through};
use crate::limiter::Client;
use crate::store::{self, NewShare, OwnerToken, Pending, SpoolEntry, StoreError, Verifier, WallTime};

/// How long a change by time alone may stay unnoticed by a watcher.
const TICK: Duration = Duration::from_secs(1);

/// The answer of `GET /v1/limits`, which never changes.
pub(super) fn limits(settings: &Settings) -> Bytes {
    let limits = Limits {
        protocol: 1,
        default_expiry: settings.default_expiry.as_secs(),
        max_expiry: settings.max_expiry.as_secs(),
        max_ciphertext: settings.max_ciphertext,
        max_claims: MAX_CLAIMS,
        max_batch: MAX_BATCH,
        public_url: settings.public_url.clone(),
    };
    Bytes::from(serde_json::to_vec(&limits).unwrap_or_default())
}

/// The owner's token, from somebody who may make shares.
pub(super) fn creator(daemon: &Daemon, peer: Peer, headers: &HeaderMap) -> Result<Verifier, Refusal> {
    let owner = owner(headers)?;
    let refusal = match daemon.settings.creators {
        Creators::Everybody => None,
        Creators::ThisMachine => (!origin::is_of_this_machine(peer, headers))
            .then_some("only programs on the server's own machine may make shares here (--creators local)"),
        Creators::UnixSocket => {
            (peer != Peer::Local).then_some("shares are made through the server's Unix socket only (--creators socket)")
        }
    };
    refusal.map_or(Ok(Verifier::of(&owner.0)), |message| Err(Refusal::new(ErrorCode::Forbidden, message)))
}

fn owner(headers: &HeaderMap) -> Result<OwnerToken, Refusal> {
    message::bearer::<token::OwnerToken>(headers).map(|token| OwnerToken(*token.as_bytes()))
}

/// A share that was asked for and checked, with the upload that it takes.
struct Wanted {
    share: NewShare,
    upload: Option<(token::UploadToken, SpoolEntry)>,
}

/// What a message to make a share comes to.
enum Prepared {
    New(Box<Wanted>),
    /// It was made before, and the answer was lost.
    Again(Created),
}

/// `POST /v1/shares`
pub(super) async fn create(daemon: &Arc<Daemon>, peer: Peer, request: Request<Incoming>) -> Result<Reply, Refusal> {
    let owner = creator(daemon, peer, request.headers())?;
    let create: Create = message::json(request, ONE, daemon.settings.body_timeout).await?;
    let maker = daemon.clone();
    let created = see_through(async move {
        match prepare(&maker, owner, create)? {
            Prepared::New(wanted) => mint(&maker, *wanted).await,
            Prepared::Again(created) => Ok(created),
        }
    })
    .await?;
    let mut reply = reply::json(StatusCode::CREATED, &created);
    if let Ok(place) = HeaderValue::from_str(&format!("{}/{}", api::SHARES, created.handle)) {
        reply.headers_mut().insert(header::LOCATION, place);
    }
    Ok(reply)
}

/// `POST /v1/batch/create`
pub(super) async fn batch_create(
    daemon: &Arc<Daemon>,
    peer: Peer,
    client: Client,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = creator(daemon, peer, request.headers())?;
    let (beginning, ending) = (daemon.clone(), daemon.clone());
    let begin = move |item| match prepare(&beginning, owner, item)? {
        Prepared::New(wanted) => begin(&beginning, wanted),
        Prepared::Again(created) => Ok(Begun::Again(created)),
    };
    let end = move |begun: Result<Begun, Refusal>| {
        let daemon = ending.clone();
        async move {
            match begun? {
                Begun::Again(created) => Ok(created),
                Begun::New(handle, wanted, pending) => match pending.await {
                    Ok(created) => Ok(made(&daemon, handle, &wanted, created)),
                    Err(StoreError::Taken) => mint(&daemon, *wanted).await,
                    Err(error) => Err(give_back(&daemon, &wanted, error)),
                },
            }
        }
    };
    batch::serve(daemon, client, request, begin, end).await
}

/// Takes the upload last. From then on only [`made`] or [`give_back`] may end it: to be called within [`see_through`].
fn prepare(daemon: &Daemon, owner: Verifier, create: Create) -> Result<Prepared, Refusal> {
    let settings = &daemon.settings;
    let ttl = create.expires_in.map_or(settings.default_expiry, Duration::from_secs);
    if ttl.is_zero() || ttl > settings.max_expiry {
        let longest = settings.max_expiry.as_secs();
        return Err(Refusal::malformed(format!("a share lives for 1 to {longest} seconds here")));
    }
    if !(1..=MAX_CLAIMS).contains(&create.max_claims) {
        return Err(Refusal::malformed("a share allows 1 to 8 claims"));
    }
    let auth = Verifier(*create.verifier.as_bytes());
    let wrong = |message: &'static str| Refusal::new(ErrorCode::Upload, message);
    let upload = match (create.capsule.content(), create.upload) {
        (Content::Inline, None) => None,
        (Content::Inline, Some(_)) => return Err(wrong("the capsule has the content inside, and takes no upload")),
        (Content::Spooled { .. }, None) => return Err(wrong("the capsule needs an upload")),
        (Content::Spooled { size, digest }, Some(token)) => {
            let entry = match daemon.waiting.take(&token, &owner, &auth) {
                Taken::Entry(entry) => entry,
                Taken::Made(created) => return Ok(Prepared::Again(created)),
                Taken::BeingMade => return Err(Refusal::unavailable("a share of this upload is being made")),
                Taken::Unknown => return Err(wrong("there is no such upload")),
            };
            if entry.length != size || entry.digest != *digest.as_bytes() {
                daemon.waiting.put_back(&token);
                return Err(wrong("the upload is not what the capsule says"));
            }
            Some((token, entry))
        }
    };
    let share = NewShare {
        auth,
        owner,
        ttl,
        claims: create.max_claims,
        capsule: Bytes::from(create.capsule.into_bytes()),
        payload: upload.as_ref().map(|(_, entry)| *entry),
    };
    Ok(Prepared::New(Box::new(Wanted { share, upload })))
}

/// A share under way in a batch.
enum Begun {
    New(Handle, Box<Wanted>, Pending<store::Created>),
    Again(Created),
}

fn begin(daemon: &Daemon, wanted: Box<Wanted>) -> Result<Begun, Refusal> {
    match store::random_handle(daemon.settings.routing, daemon.settings.digits) {
        Ok(handle) => {
            let pending = daemon.store.create(handle, wanted.share.clone());
            Ok(Begun::New(handle, wanted, pending))
        }
        Err(error) => Err(give_back(daemon, &wanted, error)),
    }
}

async fn mint(daemon: &Daemon, wanted: Wanted) -> Result<Created, Refusal> {
    let (routing, digits) = (daemon.settings.routing, daemon.settings.digits);
    match store::mint(&*daemon.store, routing, digits, wanted.share.clone()).await {
        Ok((handle, created)) => Ok(made(daemon, handle, &wanted, created)),
        Err(error) => Err(give_back(daemon, &wanted, error)),
    }
}

fn made(daemon: &Daemon, handle: Handle, wanted: &Wanted, created: store::Created) -> Created {
    daemon.metrics.created.fetch_add(1, Relaxed);
    let url = format!("{}{}{handle}", daemon.settings.public_url, api::PAGE);
    let created = Created { handle, url, expires_at: seconds(created.expires) };
    if let Some((token, _)) = &wanted.upload {
        daemon.waiting.remember(token, wanted.share.owner, wanted.share.auth, created.clone());
    }
    created
}

/// The upload of a share that could not be made waits for another attempt.
fn give_back(daemon: &Daemon, wanted: &Wanted, error: StoreError) -> Refusal {
    if let Some((token, _)) = &wanted.upload {
        daemon.waiting.put_back(token);
    }
    Refusal::from(error)
}

/// `GET /v1/shares/HANDLE`
pub(super) async fn info(
    daemon: &Daemon,
    client: Client,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = owner(request.headers())?;
    of_owner(daemon, client, handle, daemon.store.info(handle, &owner)).await
}

/// `POST /v1/shares/HANDLE/revoke`
pub(super) async fn revoke(
    daemon: &Arc<Daemon>,
    client: Client,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = owner(request.headers())?;
    let daemon = daemon.clone();
    see_through(async move {
        let reply = of_owner(&daemon, client, handle, daemon.store.revoke(handle, &owner)).await?;
        revoked(&daemon, handle);
        Ok(reply)
    })
    .await
}

fn revoked(daemon: &Daemon, handle: Handle) {
    daemon.metrics.revoked.fetch_add(1, Relaxed);
    daemon.withdrawn(handle);
}

/// `POST /v1/shares/HANDLE/rearm`
pub(super) async fn rearm(
    daemon: &Arc<Daemon>,
    client: Client,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = owner(request.headers())?;
    let daemon = daemon.clone();
    see_through(async move {
        let reply = of_owner(&daemon, client, handle, daemon.store.rearm(handle, &owner)).await?;
        daemon.metrics.rearmed.fetch_add(1, Relaxed);
        daemon.withdrawn(handle);
        Ok(reply)
    })
    .await
}

async fn of_owner(
    daemon: &Daemon,
    client: Client,
    handle: Handle,
    pending: Pending<store::Info>,
) -> Result<Reply, Refusal> {
    let info = known(daemon, client, pending).await?;
    Ok(reply::json(StatusCode::OK, &told(handle, &info)))
}

async fn known(daemon: &Daemon, client: Client, pending: Pending<store::Info>) -> Result<store::Info, Refusal> {
    pending.await.map_err(|error| {
        if error == StoreError::Unknown {
            claim::missed(daemon, client);
        }
        Refusal::from(error)
    })
}

/// `GET /v1/shares/HANDLE/watch?version=N&state=S&wait=SECONDS`
pub(super) async fn watch(
    daemon: &Daemon,
    client: Client,
    handle: Handle,
    request: &Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = owner(request.headers())?;
    let [version, state, wait] = message::parameters(request.uri().query(), ["version", "state", "wait"])?;
    let number = |text: &str| text.parse::<u64>().map_err(|_| Refusal::malformed("a parameter is no number"));
    let version = version.map(number).transpose()?;
    let wait = wait.map(number).transpose()?.unwrap_or(DEFAULT_WAIT).min(MAX_WAIT);
    let state: Option<State> = state
        .map(|word| serde_json::from_value(serde_json::Value::from(word)))
        .transpose()
        .map_err(|_| Refusal::malformed("there is no such state"))?;
    let Some(_place) = daemon.watchers.take(client) else {
        return Err(Refusal::unavailable("too many watch at this time"));
    };
    let end = tokio::time::Instant::now() + Duration::from_secs(wait);
    loop {
        let change = daemon.changes[place(handle)].notified();
        tokio::pin!(change);
        // From here on a change wakes this watcher, also one between the question and the wait.
        change.as_mut().enable();
        let info = known(daemon, client, daemon.store.info(handle, &owner)).await?;
        let info = told(handle, &info);
        let news =
            version.is_none_or(|seen| u64::from(info.version) > seen) || state.is_some_and(|seen| seen != info.state);
        let now = tokio::time::Instant::now();
        if news || now >= end || daemon.is_stopping() {
            return Ok(reply::json(StatusCode::OK, &info));
        }
        let _ = tokio::time::timeout_at(end.min(now + TICK), change).await;
    }
}

/// `POST /v1/batch/info`
pub(super) async fn batch_info(
    daemon: &Arc<Daemon>,
    client: Client,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let step: Step = |daemon, handle, owner| daemon.store.info(handle, owner);
    batch_of_owner(daemon, client, request, step, |_, _| {}).await
}

/// `POST /v1/batch/revoke`
pub(super) async fn batch_revoke(
    daemon: &Arc<Daemon>,
    client: Client,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let step: Step = |daemon, handle, owner| daemon.store.revoke(handle, owner);
    batch_of_owner(daemon, client, request, step, revoked).await
}

type Step = fn(&Daemon, Handle, &OwnerToken) -> Pending<store::Info>;

async fn batch_of_owner(
    daemon: &Arc<Daemon>,
    client: Client,
    request: Request<Incoming>,
    step: Step,
    done: fn(&Daemon, Handle),
) -> Result<Reply, Refusal> {
    let owner = owner(request.headers())?;
    let (beginning, ending) = (daemon.clone(), daemon.clone());
    let begin = move |handle| (handle, step(&beginning, handle, &owner));
    let end = move |(handle, pending)| {
        let daemon = ending.clone();
        async move {
            let info = known(&daemon, client, pending).await?;
            done(&daemon, handle);
            Ok::<_, Refusal>(told(handle, &info))
        }
    };
    batch::serve(daemon, client, request, begin, end).await
}

/// What the store told, in the words of the protocol.
fn told(handle: Handle, info: &store::Info) -> Info {
    let state = match info.state {
        store::State::Armed => State::Armed,
        store::State::Leased => State::Leased,
        store::State::Consumed => State::Consumed,
        store::State::Revoked => State::Revoked,
        store::State::Expired => State::Expired,
    };
    let claim = |event: &store::ClaimEvent| ClaimInfo {
        state: match event.state {
            store::ClaimState::Leased => ClaimState::Leased,
            store::ClaimState::Sending => ClaimState::Sending,
            store::ClaimState::Completed => ClaimState::Completed,
            store::ClaimState::Interrupted => ClaimState::Interrupted,
        },
        claimed_at: seconds(event.claimed),
        ended_at: seconds(event.ended),
    };
    Info {
        handle,
        state,
        created_at: seconds(info.created),
        expires_at: seconds(info.expires),
        revoked_at: info.revoked.map(seconds),
        max_claims: info.claims_allowed,
        claims_left: info.claims_left,
        claims: info.events.iter().map(claim).collect(),
        size: info.payload_bytes,
        version: info.version,
    }
}

fn seconds(time: WallTime) -> u64 {
    time.0 / 1000
}

/// Handles are random, so their own digits spread them.
fn place(handle: Handle) -> usize {
    handle.to_string().bytes().fold(0, |sum: usize, digit| sum.wrapping_mul(10).wrapping_add(usize::from(digit - b'0')))
        % CHANGE_PLACES
}

impl Daemon {
    /// Wakes whoever watches the share.
    pub(super) fn changed(&self, handle: Handle) {
        self.changes[place(handle)].notify_waiters();
    }

    /// Takes the leases of a share from the answers that run under them, and wakes whoever watches it.
    pub(super) fn withdrawn(&self, handle: Handle) {
        self.withdrawn[place(handle)].fetch_add(1, Relaxed);
        self.changed(handle);
    }

    /// Grows when leases of this share were taken back. Others may have the same number.
    pub(super) fn withdrawals(&self, handle: Handle) -> u64 {
        self.withdrawn[place(handle)].load(Relaxed)
    }

    /// Wakes all watchers, because the daemon stops.
    pub(super) fn wake_watchers(&self) {
        for change in &self.changes {
            change.notify_waiters();
        }
    }
}
