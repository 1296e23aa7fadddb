//! Handlers of uploads and of new shares, and the table of uploaded ciphertext that no share uses
//! yet.
//!
//! A request can be repeated after its response was lost, and gets the same response: a pending
//! upload is identified by its owner and its digest, and for a minute a share by its upload, its
//! owner and its verifier.
//!
//! At any time an upload is in one state: it is pending, or a share is being created from it, or
//! the share exists. The request that takes an upload must report its result afterwards, also when
//! its client has disconnected; until then other requests for the upload are asked to retry.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Request, StatusCode};
use lockbox_share_protocol::api::{self, REPEAT_SECONDS, UPLOAD_SECONDS};
use lockbox_share_protocol::capsule::{AgePrefix, ContentLocation, MAX_AGE_HEADER, age_prefix};
use lockbox_share_protocol::message::{CreateReply, CreateRequest, ErrorCode, MAX_CLAIMS, UploadReply};
use lockbox_share_protocol::token::{OwnerToken, UploadToken, Verifier};
use parking_lot::Mutex;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::client_addr::{self, Peer};
use super::reply::{self, Reply};
use super::request::{self, HttpRefusal};
use super::{CreatorPolicy, Daemon, see_through};
use crate::limiter::ClientId;
use crate::store::spool::{Deposit, Spool};
use crate::store::{self, NewShare, SpoolEntry, StoreError};

/// Returns the hash of the owner's token if the client may create shares.
fn creator(daemon: &Daemon, peer: Peer, headers: &HeaderMap) -> Result<Verifier, HttpRefusal> {
    let owner: OwnerToken = request::bearer(headers)?;
    let message = match daemon.creators {
        CreatorPolicy::ThisMachine if !client_addr::is_of_this_machine(peer, headers) => {
            "only programs on the server's own machine may make shares here (--creators local)"
        }
        CreatorPolicy::UnixSocket if peer != Peer::Local => {
            "shares are made through the server's Unix socket only (--creators socket)"
        }
        CreatorPolicy::Anyone | CreatorPolicy::ThisMachine | CreatorPolicy::UnixSocket => return Ok(owner.verifier()),
    };
    Err(HttpRefusal::new(ErrorCode::Forbidden, message))
}

/// `POST /v1/shares`
pub(super) async fn create(daemon: &Arc<Daemon>, peer: Peer, request: Request<Incoming>) -> Result<Reply, HttpRefusal> {
    let owner = creator(daemon, peer, request.headers())?;
    let create: CreateRequest = request::json(request, daemon.settings.body_timeout).await?;
    let maker = daemon.clone();
    let created = see_through(async move { make(&maker, owner, create).await }).await?;
    let mut reply = reply::json(StatusCode::CREATED, &created);
    if let Ok(place) = HeaderValue::from_str(&format!("{}/{}", api::SHARES, created.handle)) {
        reply.headers_mut().insert(header::LOCATION, place);
    }
    Ok(reply)
}

/// Checks a message and makes its share. Once an upload is taken, its outcome must be reported to
/// [`PendingUploads`], so this is to be called within [`see_through`].
async fn make(daemon: &Daemon, owner: Verifier, create: CreateRequest) -> Result<CreateReply, HttpRefusal> {
    let settings = &daemon.settings;
    let ttl = create.expires_in.map_or(settings.default_expiry, Duration::from_secs);
    if ttl.is_zero() || ttl > settings.max_expiry {
        let longest = settings.max_expiry.as_secs();
        return Err(HttpRefusal::malformed(format!("a share on this server lasts 1 to {longest} seconds")));
    }
    if !(1..=MAX_CLAIMS).contains(&create.max_claims) {
        return Err(HttpRefusal::malformed("a share allows 1 to 8 claims"));
    }
    let auth = create.verifier;
    let wrong = |message: &'static str| HttpRefusal::new(ErrorCode::Upload, message);
    let upload = match (create.capsule.content(), create.upload) {
        (ContentLocation::Inline, None) => None,
        (ContentLocation::Inline, Some(_)) => {
            return Err(wrong("the capsule has the content inside, and takes no upload"));
        }
        (ContentLocation::Spooled { .. }, None) => return Err(wrong("the capsule needs an upload")),
        (ContentLocation::Spooled { size, digest }, Some(token)) => {
            let entry = match daemon.pending_uploads.take(&token, &owner, &auth) {
                TakeOutcome::Entry(entry) => entry,
                TakeOutcome::Made(created) => return Ok(created),
                TakeOutcome::InProgress => {
                    return Err(HttpRefusal::unavailable("a share of this upload is being created"));
                }
                TakeOutcome::Unknown => return Err(wrong("the upload does not exist")),
            };
            if entry.length != size || entry.digest != digest {
                daemon.pending_uploads.release(&token);
                return Err(wrong("the upload does not match the capsule"));
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
    let made = store::create_random(&*daemon.store, settings.routing_digit, settings.share_code_digits, share).await;
    let (handle, times) = made.map_err(|error| {
        if let Some((token, _)) = &upload {
            daemon.pending_uploads.release(token);
        }
        HttpRefusal::from(error)
    })?;
    daemon.metrics.created.fetch_add(1, Relaxed);
    let url = format!("{}{}{handle}", daemon.public_url, api::PAGE);
    let created = CreateReply { handle, url, expires_at: times.expires.seconds() };
    if let Some((token, _)) = &upload {
        daemon.pending_uploads.complete(token, owner, auth, created.clone());
    }
    Ok(created)
}

/// Parts that wait for the disk; hyper's parts have at most its buffer.
const AHEAD: usize = 16;
/// Least bytes a second, on the average after a minute: an upload must not hold its place for ever.
const LEAST_RATE: u64 = 1024;

/// `POST /v1/uploads`
pub(super) async fn upload(
    daemon: &Daemon,
    peer: Peer,
    client: ClientId,
    request: Request<Incoming>,
) -> Result<Reply, HttpRefusal> {
    let owner = creator(daemon, peer, request.headers())?;
    request::expect_type(request.headers(), "application/octet-stream")?;
    let most = daemon.settings.max_file;
    if request.body().size_hint().lower() > most {
        return Err(too_large());
    }
    let Some(_place) = daemon.uploads.take(client) else {
        return Err(HttpRefusal::unavailable("too many concurrent uploads"));
    };
    if !daemon.pending_uploads.has_room() {
        return Err(HttpRefusal::unavailable("too many uploads wait for their shares"));
    }
    let (parts, taken) = channel(AHEAD);
    let spool = daemon.spool.clone();
    let writing = tokio::task::spawn_blocking(move || write(&spool, taken));
    let received = receive(daemon, request.into_body(), parts, most).await;
    let written = writing.await;
    received?;
    let entry = match written {
        Ok(Ok(Some(deposit))) => deposit.finish().await?,
        Ok(Ok(None)) => return Err(HttpRefusal::malformed("the upload ended early")),
        Ok(Err(error)) => return Err(HttpRefusal::from(error)),
        Err(error) => {
            tracing::error!(%error, "cannot write an upload");
            return Err(HttpRefusal::new(ErrorCode::Internal, "cannot write the upload"));
        }
    };
    let mut random = [0; UploadToken::LENGTH];
    if getrandom::fill(&mut random).is_err() {
        daemon.spool.remove(&entry.id);
        return Err(HttpRefusal::unavailable("the daemon has no randomness"));
    }
    let (upload, pending) = daemon.pending_uploads.add(UploadToken::new(random), owner, entry);
    if pending.id != entry.id {
        let spool = daemon.spool.clone();
        let _ = tokio::task::spawn_blocking(move || spool.remove(&entry.id)).await;
    }
    let uploaded = UploadReply { upload, size: entry.length, digest: entry.digest, expires_in: UPLOAD_SECONDS };
    Ok(reply::json(StatusCode::CREATED, &uploaded))
}

fn too_large() -> HttpRefusal {
    HttpRefusal::new(ErrorCode::TooLarge, "the ciphertext is larger than this server takes")
}

/// Part of an upload; `None` ends the file, and a writer that never receives it discards the file.
type Part = Option<Bytes>;

async fn receive(daemon: &Daemon, mut body: Incoming, parts: Sender<Part>, most: u64) -> Result<(), HttpRefusal> {
    let started = Instant::now();
    let not_sealed = || HttpRefusal::new(ErrorCode::NotSealed, "the upload is not an age v1 file");
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
            return Err(HttpRefusal::new(ErrorCode::Timeout, "the upload came too slowly"));
        }
        if let Some(seen) = &mut start {
            let room = MAX_AGE_HEADER.saturating_sub(seen.len());
            seen.extend_from_slice(&bytes[..bytes.len().min(room)]);
            match age_prefix(seen) {
                AgePrefix::Header(_) => start = None,
                AgePrefix::Unfinished if seen.len() < MAX_AGE_HEADER => {}
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

/// Uploads that may wait at a time; the spool's own limit bounds their bytes.
const MOST: usize = 4096;

type Token = [u8; UploadToken::LENGTH];

#[derive(Default)]
pub(super) struct PendingUploads(Mutex<Table>);

#[derive(Default)]
struct Table {
    uploads: HashMap<Token, PendingUpload>,
    making: HashMap<Token, PendingUpload>,
    made: HashMap<Token, CreatedUpload>,
}

struct PendingUpload {
    owner: Verifier,
    entry: SpoolEntry,
    since: Instant,
}

enum TakeOutcome {
    /// Taken: the caller must call [`PendingUploads::complete`] or [`PendingUploads::release`].
    Entry(SpoolEntry),
    /// Taken by an earlier message; its outcome is not known yet.
    InProgress,
    /// Used for a share by an earlier message within the last minute.
    Made(CreateReply),
    /// Missing, another owner's, or used by another share.
    Unknown,
}

struct CreatedUpload {
    owner: Verifier,
    auth: Verifier,
    created: CreateReply,
    since: Instant,
}

impl PendingUploads {
    fn has_room(&self) -> bool {
        let table = self.0.lock();
        table.uploads.len() + table.making.len() < MOST
    }

    /// Keeps an upload for 15 minutes under `token`, or under the token of the same owner's same
    /// ciphertext. Returns the kept token and file; the caller removes another file of `entry`.
    pub(super) fn add(&self, token: UploadToken, owner: Verifier, entry: SpoolEntry) -> (UploadToken, SpoolEntry) {
        let mut table = self.0.lock();
        let same = table.uploads.iter_mut().find(|(_, known)| {
            known.entry.digest == entry.digest && known.entry.length == entry.length && known.owner == owner
        });
        if let Some((token, known)) = same {
            known.since = Instant::now();
            return (UploadToken::new(*token), known.entry);
        }
        table.uploads.insert(*token.as_bytes(), PendingUpload { owner, entry, since: Instant::now() });
        (token, entry)
    }

    /// Hands an upload of `owner` to the share that has the verifier `auth`.
    fn take(&self, token: &UploadToken, owner: &Verifier, auth: &Verifier) -> TakeOutcome {
        let key = token.as_bytes();
        let mut table = self.0.lock();
        if table.uploads.get(key).is_some_and(|upload| upload.owner.accepts(owner))
            && let Some(upload) = table.uploads.remove(key)
        {
            let entry = upload.entry;
            table.making.insert(*key, upload);
            return TakeOutcome::Entry(entry);
        }
        if table.making.get(key).is_some_and(|upload| upload.owner.accepts(owner)) {
            return TakeOutcome::InProgress;
        }
        let made = table.made.get(key).filter(|made| made.is_fresh());
        let same = made.filter(|made| made.owner.accepts(owner) && made.auth.accepts(auth));
        same.map_or(TakeOutcome::Unknown, |made| TakeOutcome::Made(made.created.clone()))
    }

    /// Keeps an upload that a share did not take after all, for its owner.
    fn release(&self, token: &UploadToken) {
        let mut table = self.0.lock();
        if let Some(upload) = table.making.remove(token.as_bytes()) {
            table.uploads.insert(*token.as_bytes(), PendingUpload { since: Instant::now(), ..upload });
        }
    }

    fn complete(&self, token: &UploadToken, owner: Verifier, auth: Verifier, created: CreateReply) {
        let mut table = self.0.lock();
        table.making.remove(token.as_bytes());
        if table.made.len() >= MOST {
            table.made.retain(|_, made| made.is_fresh());
        }
        // More than that in a minute are not remembered: a repeated request is refused, as a late
        // one is.
        if table.made.len() < MOST {
            table.made.insert(*token.as_bytes(), CreatedUpload { owner, auth, created, since: Instant::now() });
        }
    }

    /// Blocks for as long as files are removed.
    pub(super) fn discard_overdue(&self, spool: &Spool) {
        self.0.lock().made.retain(|_, made| made.is_fresh());
        self.discard_older(spool, Duration::from_secs(UPLOAD_SECONDS));
    }

    pub(super) fn discard_older(&self, spool: &Spool, age: Duration) {
        let overdue: Vec<_> = self.0.lock().uploads.extract_if(|_, upload| upload.since.elapsed() >= age).collect();
        for (_, upload) in overdue {
            spool.remove(&upload.entry.id);
        }
    }
}

impl CreatedUpload {
    fn is_fresh(&self) -> bool {
        self.since.elapsed() < Duration::from_secs(REPEAT_SECONDS)
    }
}

#[cfg(test)]
mod tests {
    use lockbox_share_protocol::token::Digest;

    use super::*;

    const OWNER: Verifier = Verifier::new([1; 32]);
    const AUTH: Verifier = Verifier::new([2; 32]);
    const OTHER: Verifier = Verifier::new([3; 32]);

    #[test]
    fn an_upload_is_given_to_its_owner_alone_and_to_one_share_at_a_time() {
        let pending_uploads = PendingUploads::default();
        let entry = SpoolEntry { id: [4; 16], length: 5, digest: Digest::new([6; 32]) };
        let token = UploadToken::new([7; UploadToken::LENGTH]);
        pending_uploads.add(UploadToken::new([7; UploadToken::LENGTH]), OWNER, entry);
        let take = |owner, auth| pending_uploads.take(&token, owner, auth);
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::Entry(taken) if taken == entry));
        // Of any share: which one has it is not known before it is there.
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::InProgress));
        assert!(matches!(take(&OWNER, &OTHER), TakeOutcome::InProgress));
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        pending_uploads.release(&token);
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::Entry(taken) if taken == entry));
        let handle = "1482719382210".parse().unwrap();
        pending_uploads.complete(&token, OWNER, AUTH, CreateReply { handle, url: String::new(), expires_at: 8 });
        assert!(matches!(take(&OWNER, &AUTH), TakeOutcome::Made(made) if made.handle == handle));
        assert!(matches!(take(&OWNER, &OTHER), TakeOutcome::Unknown));
        assert!(matches!(take(&OTHER, &AUTH), TakeOutcome::Unknown));
        // It is spent.
        pending_uploads.release(&token);
        assert!(matches!(take(&OWNER, &OTHER), TakeOutcome::Unknown));
    }
}
