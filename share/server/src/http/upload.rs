//! Takes ciphertext in: checked to be sealed, hashed and written on a thread that may wait for the
//! disk.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::{Request, StatusCode};
use lockbox_share_protocol::age::{self, Prefix};
use lockbox_share_protocol::api::UPLOAD_SECONDS;
use lockbox_share_protocol::message::{ErrorCode, UploadReply};
use lockbox_share_protocol::token::UploadToken;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::client_addr::Peer;
use super::daemon::Daemon;
use super::pending_uploads::AddedUpload;
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::{create, request};
use crate::limiter::ClientId;
use crate::store::StoreError;
use crate::store::spool::{Deposit, Spool};

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
    let owner = create::creator(daemon, peer, request.headers())?;
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
