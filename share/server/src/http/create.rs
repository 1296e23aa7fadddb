//! Handlers of uploads and of new shares, one by one and in batches.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Request, StatusCode};
use lockbox_share_protocol::age::{self, Prefix};
use lockbox_share_protocol::api::{self, UPLOAD_SECONDS};
use lockbox_share_protocol::capsule::ContentLocation;
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::{CreateReply, CreateRequest, ErrorCode, MAX_CLAIMS, UploadReply};
use lockbox_share_protocol::token::{OwnerToken, UploadToken, Verifier};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::client_addr::{self, Peer};
use super::daemon::{CreatorPolicy, Daemon, see_through};
use super::pending_uploads::{AddedUpload, TakeOutcome};
use super::reply::{self, Reply};
use super::request::{self, ONE, Refusal};
use super::share_handlers;
use crate::limiter::ClientId;
use crate::store::spool::{Deposit, Spool};
use crate::store::{self, NewShare, PendingReply, StoreError};

/// Returns the owner's token if the client may create shares.
fn creator(daemon: &Daemon, peer: Peer, headers: &HeaderMap) -> Result<Verifier, Refusal> {
    let owner: OwnerToken = request::bearer(headers)?;
    let refusal = match daemon.settings.creators {
        CreatorPolicy::Anyone => None,
        CreatorPolicy::ThisMachine => (!client_addr::is_of_this_machine(peer, headers))
            .then_some("only programs on the server's own machine may make shares here (--creators local)"),
        CreatorPolicy::UnixSocket => {
            (peer != Peer::Local).then_some("shares are made through the server's Unix socket only (--creators socket)")
        }
    };
    refusal.map_or(Ok(owner.verifier()), |message| Err(Refusal::new(ErrorCode::Forbidden, message)))
}

/// A share that was asked for and checked, with the upload that it takes.
struct ShareRequest {
    share: NewShare,
    upload: Option<UploadToken>,
}

/// A share under way.
enum PendingCreate {
    New(Handle, Box<ShareRequest>, PendingReply<store::ShareTimes>),
    /// Created by an earlier request with a lost response.
    Again(CreateReply),
}

/// `POST /v1/shares`
pub(super) async fn create(daemon: &Arc<Daemon>, peer: Peer, request: Request<Incoming>) -> Result<Reply, Refusal> {
    let owner = creator(daemon, peer, request.headers())?;
    let create: CreateRequest = request::json(request, ONE, daemon.settings.body_timeout).await?;
    let maker = daemon.clone();
    let created = see_through(async move { end(&maker, begin(&maker, owner, create)).await }).await?;
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
    client: ClientId,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = creator(daemon, peer, request.headers())?;
    let (beginning, ending) = (daemon.clone(), daemon.clone());
    let begin = move |item| begin(&beginning, owner, item);
    let end = move |begun| {
        let daemon = ending.clone();
        async move { end(&daemon, begun).await }
    };
    share_handlers::serve_batch(daemon, client, request, begin, end).await
}

/// Checks a message and begins to make its share. An upload is taken last: from then on only
/// [`end`] may say how that ends, so this is to be called within [`see_through`].
fn begin(daemon: &Daemon, owner: Verifier, create: CreateRequest) -> Result<PendingCreate, Refusal> {
    let settings = &daemon.settings;
    let ttl = create.expires_in.map_or(settings.default_expiry, Duration::from_secs);
    if ttl.is_zero() || ttl > settings.max_expiry {
        let longest = settings.max_expiry.as_secs();
        return Err(Refusal::malformed(format!("a share lives for 1 to {longest} seconds here")));
    }
    if !(1..=MAX_CLAIMS).contains(&create.max_claims) {
        return Err(Refusal::malformed("a share allows 1 to 8 claims"));
    }
    let auth = create.verifier;
    let wrong = |message: &'static str| Refusal::new(ErrorCode::Upload, message);
    let upload = match (create.capsule.content(), create.upload) {
        (ContentLocation::Inline, None) => None,
        (ContentLocation::Inline, Some(_)) => {
            return Err(wrong("the capsule has the content inside, and takes no upload"));
        }
        (ContentLocation::Spooled { .. }, None) => return Err(wrong("the capsule needs an upload")),
        (ContentLocation::Spooled { size, digest }, Some(token)) => {
            let entry = match daemon.pending_uploads.take(&token, &owner, &auth) {
                TakeOutcome::Entry(entry) => entry,
                TakeOutcome::Made(created) => return Ok(PendingCreate::Again(created)),
                TakeOutcome::InProgress => return Err(Refusal::unavailable("a share of this upload is being made")),
                TakeOutcome::Unknown => return Err(wrong("there is no such upload")),
            };
            if entry.length != size || entry.digest != digest {
                daemon.pending_uploads.release(&token);
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
    let wanted = Box::new(ShareRequest { share, upload: upload.map(|(token, _)| token) });
    match store::random_handle(settings.routing, settings.digits) {
        Ok(handle) => {
            let pending = daemon.store.create(handle, wanted.share.clone());
            Ok(PendingCreate::New(handle, wanted, pending))
        }
        Err(error) => Err(give_back(daemon, &wanted, error)),
    }
}

async fn end(daemon: &Daemon, begun: Result<PendingCreate, Refusal>) -> Result<CreateReply, Refusal> {
    let (handle, wanted, pending) = match begun? {
        PendingCreate::Again(created) => return Ok(created),
        PendingCreate::New(handle, wanted, pending) => (handle, wanted, pending),
    };
    let made = match pending.await {
        Err(StoreError::Taken) => {
            let (routing, digits) = (daemon.settings.routing, daemon.settings.digits);
            store::create_random(&*daemon.store, routing, digits, wanted.share.clone()).await
        }
        other => other.map(|created| (handle, created)),
    };
    let (handle, created) = made.map_err(|error| give_back(daemon, &wanted, error))?;
    daemon.metrics.created.fetch_add(1, Relaxed);
    let url = format!("{}{}{handle}", daemon.settings.public_url, api::PAGE);
    let created = CreateReply { handle, url, expires_at: created.expires.seconds() };
    if let Some(token) = &wanted.upload {
        daemon.pending_uploads.complete(token, wanted.share.owner, wanted.share.auth, created.clone());
    }
    Ok(created)
}

/// The upload of a share that could not be made waits for another attempt.
fn give_back(daemon: &Daemon, wanted: &ShareRequest, error: StoreError) -> Refusal {
    if let Some(token) = &wanted.upload {
        daemon.pending_uploads.release(token);
    }
    Refusal::from(error)
}

/// Parts that wait for the disk; hyper's parts have at most its buffer.
const AHEAD: usize = 16;
/// After a minute an upload must have come at so many bytes a second on the average, or it holds
/// its place for ever.
const LEAST_RATE: u64 = 1024;

/// `POST /v1/uploads`
pub(super) async fn upload(
    daemon: &Daemon,
    peer: Peer,
    client: ClientId,
    request: Request<Incoming>,
) -> Result<Reply, Refusal> {
    let owner = creator(daemon, peer, request.headers())?;
    request::expect_type(request.headers(), "application/octet-stream")?;
    let most = daemon.settings.max_ciphertext;
    if request.body().size_hint().lower() > most {
        return Err(too_large());
    }
    let Some(_place) = daemon.uploads.take(client) else {
        return Err(Refusal::unavailable("too many uploads run at this time"));
    };
    if !daemon.pending_uploads.has_room() {
        return Err(Refusal::unavailable("too many uploads wait for their shares"));
    }
    let (parts, taken) = channel(AHEAD);
    let spool = daemon.spool.clone();
    let writing = tokio::task::spawn_blocking(move || write(&spool, taken));
    let received = receive(daemon, request.into_body(), parts, most).await;
    let written = writing.await;
    received?;
    let entry = match written {
        Ok(Ok(Some(deposit))) => deposit.finish().await?,
        Ok(Ok(None)) => return Err(Refusal::malformed("the upload ended early")),
        Ok(Err(error)) => return Err(Refusal::from(error)),
        Err(error) => {
            tracing::error!(%error, "an upload was not written");
            return Err(Refusal::new(ErrorCode::Internal, "the upload was not written"));
        }
    };
    let mut random = [0; UploadToken::LENGTH];
    if getrandom::fill(&mut random).is_err() {
        daemon.spool.remove(&entry.id);
        return Err(Refusal::unavailable("the daemon has no randomness"));
    }
    let AddedUpload { token, entry, surplus } = daemon.pending_uploads.add(UploadToken::new(random), owner, entry);
    if let Some(surplus) = surplus {
        let spool = daemon.spool.clone();
        let _ = tokio::task::spawn_blocking(move || spool.remove(&surplus)).await;
    }
    let uploaded = UploadReply { upload: token, size: entry.length, digest: entry.digest, expires_in: UPLOAD_SECONDS };
    Ok(reply::json(StatusCode::CREATED, &uploaded))
}

fn too_large() -> Refusal {
    Refusal::new(ErrorCode::TooLarge, "the ciphertext is larger than this server takes")
}

/// Part of an upload; `None` ends the file, and a writer that never receives it discards the file.
type Part = Option<Bytes>;

async fn receive(daemon: &Daemon, mut body: Incoming, parts: Sender<Part>, most: u64) -> Result<(), Refusal> {
    let started = Instant::now();
    let not_sealed = || Refusal::new(ErrorCode::NotSealed, "the upload is no age v1 file");
    let mut start: Option<Vec<u8>> = Some(Vec::new());
    let mut received = 0u64;
    while let Some(bytes) = request::part(&mut body, daemon.settings.body_timeout).await? {
        received += bytes.len() as u64;
        daemon.metrics.received_bytes.fetch_add(bytes.len() as u64, Relaxed);
        if received > most {
            return Err(too_large());
        }
        let seconds = started.elapsed().as_secs();
        if seconds > 60 && received / seconds < LEAST_RATE {
            return Err(Refusal::new(ErrorCode::Timeout, "the upload came too slowly"));
        }
        if let Some(seen) = &mut start {
            let room = age::MAX_HEADER.saturating_sub(seen.len());
            seen.extend_from_slice(&bytes[..bytes.len().min(room)]);
            match age::prefix(seen) {
                Prefix::Header(_) => start = None,
                Prefix::Unfinished if seen.len() < age::MAX_HEADER => {}
                _ => return Err(not_sealed()),
            }
        }
        // A writer that has ended says why itself.
        if parts.send(Some(bytes)).await.is_err() {
            return Ok(());
        }
    }
    if start.is_some() {
        return Err(not_sealed());
    }
    let _ = parts.send(None).await;
    Ok(())
}

fn write(spool: &Arc<Spool>, mut parts: Receiver<Part>) -> Result<Option<Deposit>, StoreError> {
    let mut deposit = spool.begin()?;
    while let Some(part) = parts.blocking_recv() {
        match part {
            Some(bytes) => deposit.write(&bytes)?,
            None => return Ok(Some(deposit)),
        }
    }
    Ok(None)
}
