//! Creates shares and queries their state.

use std::thread;
use std::time::Duration;

use lockbox_share_protocol::api::{self, ShareEndpoint};
use lockbox_share_protocol::capsule::{Capsule, ContentLocation};
use lockbox_share_protocol::message::{
    Batch, BatchResults, CreateReply, CreateRequest, ErrorCode, ItemResult, Limits, MAX_BATCH, ShareInfo, ShareState,
    UploadReply,
};
use lockbox_share_protocol::token::{Handle, OwnerToken, UploadToken};
use lockbox_terminal::quantity::Span;

use crate::http::ShareClient;
use crate::link::{Link, Secret};
use crate::meta::Meta;
use crate::seal::{self, SealingReader};
use crate::source::Source;
use crate::{Error, Result};

const PROTOCOL: u32 = 1;

/// Between attempts to get an answer; the server remembers it for a minute.
const PAUSES: [Duration; 3] = [Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(5)];

/// Lifetime and number of claims of a share.
#[derive(Clone, Copy, Debug)]
pub struct ShareTerms {
    /// Lifetime as the user wrote it; by default the server's.
    pub expires_in: Option<Span>,
    pub max_claims: u8,
}

pub struct CreatedShare {
    pub link: Link,
    pub created: CreateReply,
    pub meta: Meta,
    pub lifetime: Span,
}

/// Seals `source` with a new secret, uploads it and creates a share. `progress` is called with the
/// number of content bytes sealed.
///
/// # Errors
/// When the source fails or changes, the terms exceed the server's limits, or the server
/// refuses or is out of reach.
pub fn share(
    client: &ShareClient,
    owner: &OwnerToken,
    source: &mut dyn Source,
    terms: ShareTerms,
    progress: &dyn Fn(u64),
) -> Result<CreatedShare> {
    let limits: Limits = client.get(api::LIMITS, None)?;
    check_terms(client, &limits, terms)?;
    let secret = Secret::generate()?;
    let (capsule, meta, upload) = match seal::seal_inline(&secret, source)? {
        Some((capsule, meta)) => (capsule, meta, None),
        None => upload(client, owner, &limits, &secret, source, progress)?,
    };
    let message = CreateRequest {
        capsule,
        verifier: secret.auth().verifier(),
        expires_in: terms.expires_in.map(|span| span.time().as_secs()),
        max_claims: terms.max_claims,
        upload,
    };
    let created = create(client, owner, &message)?;
    let link = Link::new(&created.url, secret)?;
    if link.handle() != created.handle {
        return Err(client.protocol_error("its link names another share".into()));
    }
    let lifetime = terms.expires_in.unwrap_or_else(|| Span::of_seconds(limits.default_expiry));
    Ok(CreatedShare { link, created, meta, lifetime })
}

/// Repeats a request for an upload if its reply was lost: the server repeats the reply.
fn create(client: &ShareClient, owner: &OwnerToken, message: &CreateRequest) -> Result<CreateReply> {
    let post = || client.post(api::SHARES, Some(&owner.to_text()), Some(message));
    let pauses = if message.upload.is_some() { &PAUSES[..] } else { &[] };
    for pause in pauses {
        match post() {
            Err(Error::Unreachable { .. }) => thread::sleep(*pause),
            // The message whose answer was lost may be under way at the daemon.
            Err(error) if error.code() == Some(ErrorCode::Unavailable) => thread::sleep(*pause),
            answer => return answer,
        }
    }
    post()
}

fn check_terms(client: &ShareClient, limits: &Limits, terms: ShareTerms) -> Result<()> {
    if limits.protocol != PROTOCOL {
        let reason = format!("it speaks version {} and this program version {PROTOCOL}", limits.protocol);
        return Err(client.protocol_error(reason));
    }
    if let Some(wanted) = terms.expires_in
        && wanted.time().as_secs() > limits.max_expiry
    {
        let (longest, wanted) = (Span::of_seconds(limits.max_expiry).words(), wanted.words());
        return Err(Error::Invalid(format!(
            "this server keeps shares for at most {longest}, and {wanted} were requested"
        )));
    }
    if terms.max_claims > limits.max_claims {
        let most = limits.max_claims;
        return Err(Error::Invalid(format!("this server allows at most {most} downloads of a share")));
    }
    Ok(())
}

fn upload(
    client: &ShareClient,
    owner: &OwnerToken,
    limits: &Limits,
    secret: &Secret,
    source: &mut dyn Source,
    progress: &dyn Fn(u64),
) -> Result<(Capsule, Meta, Option<UploadToken>)> {
    let mut sealing = SealingReader::new(secret, source, limits.max_ciphertext)?;
    let length = sealing.length();
    let mut reported = ProgressReader { sealing: &mut sealing, progress };
    let uploaded = client.upload::<UploadReply>(api::UPLOADS, &owner.to_text(), length, &mut reported);
    // The library reports a reader that failed as a connection that did.
    let uploaded = uploaded.map_err(|error| sealing.take_error().unwrap_or(error))?;
    let (meta, length, digest) = sealing.finish();
    if uploaded.size != length || uploaded.digest != digest {
        return Err(client.protocol_error("it received other bytes than were sent".into()));
    }
    let capsule = seal::seal_spooled(secret, &meta, length, digest)?;
    debug_assert!(matches!(capsule.content(), ContentLocation::Spooled { .. }));
    Ok((capsule, meta, Some(uploaded.upload)))
}

struct ProgressReader<'a, 'b> {
    sealing: &'a mut SealingReader<'b>,
    progress: &'a dyn Fn(u64),
}

impl std::io::Read for ProgressReader<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.sealing.read(buffer)?;
        (self.progress)(self.sealing.content_bytes());
        Ok(count)
    }
}

/// Returns the state of shares, in the order of `handles`; `None` for shares that are unknown.
///
/// # Errors
/// When the server refuses or is out of reach.
pub fn fetch_all(client: &ShareClient, owner: &OwnerToken, handles: &[Handle]) -> Result<Vec<Option<ShareInfo>>> {
    let mut infos = Vec::with_capacity(handles.len());
    for part in handles.chunks(MAX_BATCH) {
        let batch = Batch { items: part.to_vec() };
        let answer: BatchResults = client.post(api::BATCH_INFO, Some(&owner.to_text()), Some(&batch))?;
        if answer.results.len() != part.len() {
            return Err(client.protocol_error("it answered for other shares than requested".into()));
        }
        infos.extend(answer.results.into_iter().map(|outcome| match outcome {
            ItemResult::Done { ok } => Some(ok),
            ItemResult::Failed(_) => None,
        }));
    }
    Ok(infos)
}

/// Returns the state of a share.
///
/// # Errors
/// When the server does not know it, refuses or is out of reach.
pub fn fetch(client: &ShareClient, owner: &OwnerToken, handle: Handle) -> Result<ShareInfo> {
    client.get(&ShareEndpoint::Info.path(handle), Some(&owner.to_text())).map_err(map_unknown)
}

/// Waits until a share is newer than `last` or in another state, or for `seconds`.
///
/// # Errors
/// As for [`fetch`].
pub fn watch(client: &ShareClient, owner: &OwnerToken, last: &ShareInfo, seconds: u64) -> Result<ShareInfo> {
    let state = match last.state {
        ShareState::Armed => "armed",
        ShareState::Leased => "leased",
        ShareState::Consumed => "consumed",
        ShareState::Revoked => "revoked",
        ShareState::Expired => "expired",
    };
    let path = ShareEndpoint::Watch.path(last.handle);
    let path = format!("{path}?version={}&state={state}&wait={seconds}", last.version);
    client.get(&path, Some(&owner.to_text())).map_err(map_unknown)
}

/// Takes a share back.
///
/// # Errors
/// As for [`fetch`].
pub fn revoke(client: &ShareClient, owner: &OwnerToken, handle: Handle) -> Result<ShareInfo> {
    post_action(client, owner, ShareEndpoint::Revoke, handle)
}

/// Rearms a share after an interrupted download.
///
/// # Errors
/// As for [`fetch`]; also when no download was interrupted.
pub fn rearm(client: &ShareClient, owner: &OwnerToken, handle: Handle) -> Result<ShareInfo> {
    post_action(client, owner, ShareEndpoint::Rearm, handle)
}

fn post_action(client: &ShareClient, owner: &OwnerToken, what: ShareEndpoint, handle: Handle) -> Result<ShareInfo> {
    client.post(&what.path(handle), Some(&owner.to_text()), None::<&()>).map_err(map_unknown)
}

/// Maps "refused" to "unknown share": for an owner it has no other cause.
fn map_unknown(error: Error) -> Error {
    match error {
        Error::Refused(failure) if failure.error == ErrorCode::Refused => {
            Error::Invalid("the server no longer has this share: it ended more than a day ago".into())
        }
        other => other,
    }
}
