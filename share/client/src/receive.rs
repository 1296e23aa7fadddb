//! Receives a share: claims it, opens it while it is downloaded, and names the file when it is
//! whole.

use std::fs;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use lockbox_share_protocol::api::{self, ShareEndpoint};
use lockbox_share_protocol::capsule::{Capsule, ContentLocation};
use lockbox_share_protocol::message::{ClaimReply, ClaimRequest, ErrorCode, LookReply, LookRequest};
use lockbox_share_protocol::token::{ClaimId, Digest, LeaseToken};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::download::{self, CiphertextSource, ContentDecryptor, Download};
use crate::http::ShareClient;
use crate::link::Link;
use crate::meta::{ContentKind, Meta};
use crate::partial::{self, PartialFile};
pub use crate::partial::{ReceiveTarget, Unpack};
use crate::seal::CHUNK_LEN;
use crate::{Error, Result, history};

/// Time for which a claim is repeated after a lost reply: the daemon repeats its reply for a
/// minute.
const REPEAT: Duration = Duration::from_secs(api::REPEAT_SECONDS - 10);
const MIN_RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// A server may say anything; a lease ends a day after the claim.
const MAX_RETRY_TIMEOUT: Duration = Duration::from_secs(86_400);
/// Attempts to report the end of a download; after them the lease's time ends it.
const COMPLETIONS: u32 = 3;

/// State of an interrupted download, stored under a name that reveals nothing of the link: enough
/// to resume, not enough to decrypt.
#[derive(Serialize, Deserialize)]
struct ResumeNote {
    claim: ClaimId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    leased: Option<LeaseNote>,
    /// Capsule with inline content: its claim is used up, so no server has it any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    given: Option<Capsule>,
}

#[derive(Serialize, Deserialize)]
struct LeaseNote {
    token: LeaseToken,
    expires_in: u64,
    capsule: Capsule,
}

/// Gets the bytes of a text.
pub type TextSink<'a> = dyn Fn(&[u8]) -> Result<()> + 'a;

/// Options of a download.
pub struct ReceiveOptions<'a> {
    /// Directory of resume notes; without it a cut download cannot be resumed.
    pub state: Option<&'a Path>,
    /// Resumes an earlier download; without it the earlier file is kept until the new one is
    /// complete.
    pub resume: bool,
    /// Keeps the age file as it is instead of opening it.
    pub ciphertext: bool,
    /// Retry time-out without a new byte; by default the lease's time.
    pub retry_timeout: Option<Duration>,
    /// Told how many bytes of the ciphertext passed, and how many there are.
    pub progress: &'a dyn Fn(u64, u64),
    /// Called with the path of the partial file as soon as this program has locked it. After a
    /// failure the file exists if the download can be resumed.
    pub on_partial: &'a dyn Fn(&Path),
    /// Told before anything is received that this many bytes of the same link arrived before, and
    /// are not gone on with.
    pub on_unresumed: &'a dyn Fn(&Path, u64),
    /// Takes a text that is meant to be read at once; without it a text is a file like any other.
    pub text: Option<&'a TextSink<'a>>,
    /// Unpacks the tar of a directory and tells where it is; without it the tar is a file like any
    /// other.
    pub unpack: Option<&'a Unpack<'a>>,
}

/// Result of a download.
#[derive(Debug)]
pub struct ReceiveSummary {
    /// Path of the file; `None` when it was written to a stream.
    pub path: Option<PathBuf>,
    /// The sender's name for it, not made safe.
    pub name: String,
    /// Bytes that were written.
    pub size: u64,
    /// SHA-256 of the written bytes.
    pub sha256: Digest,
    /// Content kind set by the sender.
    pub kind: ContentKind,
    /// Set if the daemon confirmed completion.
    pub confirmed: bool,
}

struct ContentSummary {
    name: String,
    kind: ContentKind,
    size: u64,
    sha256: Digest,
}

impl ContentSummary {
    fn of_content(meta: Meta) -> ContentSummary {
        ContentSummary { kind: meta.kind(), size: meta.size, sha256: meta.sha256, name: meta.name }
    }

    /// The age file itself, which is no text and no tar.
    fn of_ciphertext(meta: &Meta, size: u64, sha256: Digest) -> ContentSummary {
        ContentSummary { name: format!("{}.age", meta.name), kind: ContentKind::File, size, sha256 }
    }

    fn receipt(self, path: Option<PathBuf>, confirmed: bool) -> ReceiveSummary {
        ReceiveSummary { path, name: self.name, size: self.size, sha256: self.sha256, kind: self.kind, confirmed }
    }
}

fn notes_directory(state: &Path) -> PathBuf {
    state.join("receiving")
}

/// Removes files of other links' downloads in the directory of `target` that cannot be resumed.
/// Returns those that can, from this state directory or another.
pub fn sweep(target: &ReceiveTarget, link: &Link) -> Vec<PathBuf> {
    partial::sweep(&target.directory(), &link.secret().note_name())
}

/// Receives into a file. The claim is sent only after the file was opened for writing.
///
/// # Errors
/// When the link is used up or unknown, the server is out of reach, the received content is
/// damaged, or the host fails. After [`Error::Cut`] the same call with `resume` goes on.
pub fn to_file(
    client: &ShareClient,
    link: &Link,
    target: &ReceiveTarget,
    options: &ReceiveOptions<'_>,
) -> Result<ReceiveSummary> {
    if let ReceiveTarget::File { path, replace: false } = target
        && path.symlink_metadata().is_ok()
    {
        return Err(Error::Exists(path.display().to_string()));
    }
    if let ReceiveTarget::File { path, .. } = target
        && path.is_dir()
    {
        return Err(Error::Invalid(format!("{} is a directory", path.display())));
    }
    let mut partial = PartialFile::open(&target.directory(), &link.secret().note_name(), options.resume)?;
    if let Some(remembered) = AcceptedClaim::from_note(client, link, options)?
        && let Some(written) = remembered.find_complete(&partial, options)
    {
        let partial = partial.into_previous();
        (options.on_partial)(partial.path());
        return publish(&remembered, partial, written, target, options);
    }
    if let Some((path, length)) = partial.previous() {
        (options.on_unresumed)(path, length);
    }
    (options.on_partial)(partial.path());
    let claimed = match AcceptedClaim::begin(client, link, options) {
        Ok(claimed) => claimed,
        Err(error) => {
            // What was received under a lease that ended cannot be gone on with.
            if error.is_final() {
                partial.discard_all();
            }
            return Err(error);
        }
    };
    if let Some(read) = options.text
        && let Some((meta, text)) = claimed.inline_text(options)?
    {
        read(&text)?;
        partial.discard_all();
        return Ok(ContentSummary::of_content(meta).receipt(None, claimed.complete()));
    }
    let received = claimed.receive(&mut partial, options);
    let written = match received {
        Ok(received) => received,
        Err(error) => {
            if matches!(error, Error::Damaged(_)) {
                partial.discard();
            }
            return Err(error);
        }
    };
    publish(&claimed, partial, written, target, options)
}

/// Renames the complete file, unpacks a directory if requested, and reports completion to the
/// daemon.
fn publish(
    claimed: &AcceptedClaim<'_>,
    partial: PartialFile,
    written: ContentSummary,
    target: &ReceiveTarget,
    options: &ReceiveOptions<'_>,
) -> Result<ReceiveSummary> {
    match options.unpack {
        Some(unpack) if written.kind == ContentKind::Directory => {
            // By the time that it is unpacked the link is used up: whatever happens then, the tar
            // is whole and has a name.
            let beside = ReceiveTarget::Directory { path: target.directory(), replace: false };
            let mut tar = partial.finish(&beside, &written.name)?;
            let confirmed = claimed.complete();
            (options.on_partial)(&tar.path);
            match tar.unpack(unpack, &written.name) {
                Ok(path) => {
                    tar.remove();
                    Ok(written.receipt(Some(path), confirmed))
                }
                Err(error) => {
                    Err(Error::NotUnpacked { tar: tar.path.display().to_string(), reason: error.to_string() })
                }
            }
        }
        _ => {
            let path = partial.finish(target, &written.name)?.path;
            let confirmed = claimed.complete();
            Ok(written.receipt(Some(path), confirmed))
        }
    }
}

/// Asks whether a link still opens something, and uses nothing up; the second since 1970 until
/// which it does.
///
/// # Errors
/// When it does not, or the server is out of reach or of before this question.
pub fn look(client: &ShareClient, link: &Link) -> Result<u64> {
    let message = LookRequest { handle: link.handle(), auth: link.secret().auth() };
    let looked: LookReply = client.post(api::LOOK, None, Some(&message))?;
    Ok(looked.expires_at)
}

/// Receives into a stream. Bytes written before an error are authentic but incomplete.
///
/// # Errors
/// As for [`to_file`].
pub fn to_stream(
    client: &ShareClient,
    link: &Link,
    output: &mut dyn Write,
    options: &ReceiveOptions<'_>,
) -> Result<ReceiveSummary> {
    let claimed = AcceptedClaim::begin(client, link, options)?;
    let written = claimed.stream(output, options)?;
    output.flush().map_err(Error::io("cannot write the download"))?;
    let confirmed = claimed.complete();
    Ok(written.receipt(None, confirmed))
}

struct AcceptedClaim<'a> {
    client: &'a ShareClient,
    link: &'a Link,
    note_path: Option<PathBuf>,
    capsule: Capsule,
    lease: Option<(LeaseToken, u64)>,
    retry_timeout: Option<Duration>,
}

impl<'a> AcceptedClaim<'a> {
    /// Restores the lease of an earlier call from its note; sends no request.
    fn from_note(
        client: &'a ShareClient,
        link: &'a Link,
        options: &ReceiveOptions<'_>,
    ) -> Result<Option<AcceptedClaim<'a>>> {
        let Some(path) = note_path(link, options) else { return Ok(None) };
        let Some(ResumeNote { leased: Some(leased), .. }) = history::read_json::<ResumeNote>(&path)? else {
            return Ok(None);
        };
        let LeaseNote { token, expires_in, capsule } = leased;
        let lease = Some((token, expires_in));
        Ok(Some(AcceptedClaim {
            client,
            link,
            note_path: Some(path),
            capsule,
            lease,
            retry_timeout: options.retry_timeout,
        }))
    }

    fn begin(client: &'a ShareClient, link: &'a Link, options: &ReceiveOptions<'_>) -> Result<AcceptedClaim<'a>> {
        if let Some(directory) = &options.state.map(notes_directory) {
            history::create_private_directory(directory)?;
            history::sweep(directory, history::NOTE_RETENTION);
        }
        let note_path = note_path(link, options);
        let note = match &note_path {
            Some(path) => history::read_json::<ResumeNote>(path)?,
            None => None,
        };
        let retry_timeout = options.retry_timeout;
        let claimant = |capsule, lease| AcceptedClaim {
            client,
            link,
            note_path: note_path.clone(),
            capsule,
            lease,
            retry_timeout,
        };
        let claim = match note {
            Some(ResumeNote { given: Some(capsule), .. }) => return Ok(claimant(capsule, None)),
            Some(ResumeNote { leased: Some(leased), .. }) => {
                let path = ShareEndpoint::Ciphertext.path(link.handle()).to_string();
                if client.probe_lease(&path, &leased.token.to_text())? {
                    return Ok(claimant(leased.capsule, Some((leased.token, leased.expires_in))));
                }
                // That lease ended; the share may have been armed again.
                random_claim_id()?
            }
            Some(ResumeNote { claim, .. }) => claim,
            None => random_claim_id()?,
        };
        let mut note = ResumeNote { claim, leased: None, given: None };
        if let Some(path) = &note_path {
            history::write_json(path, &note)?;
        }
        let claimed = send_claim(client, link, &note.claim);
        let claimed = claimed.inspect_err(|error| {
            if let (true, Some(path)) = (error.is_final(), &note_path) {
                // The note has done its work.
                let _ = fs::remove_file(path);
            }
        })?;
        let Some(lease) = claimed.lease else {
            let claimant = claimant(claimed.capsule, None);
            claimant.save_inline(note);
            return Ok(claimant);
        };
        let (token, expires_in) = (lease.token, lease.expires_in);
        let kept = LeaseToken::new(*token.as_bytes());
        note.leased = Some(LeaseNote { token, expires_in, capsule: claimed.capsule.clone() });
        if let Some(path) = &note_path {
            history::write_json(path, &note)?;
        }
        Ok(claimant(claimed.capsule, Some((kept, expires_in))))
    }

    /// Saves content that came with the claim: the link is used up, and processing the content may
    /// still fail. If it cannot be saved, the content is in memory nevertheless.
    fn save_inline(&self, note: ResumeNote) {
        let Some(path) = &self.note_path else { return };
        let opens =
            || self.open_capsule().and_then(|(meta, content)| download::verify_content(&meta, &content)).is_ok();
        // What is damaged would be found so for ever, and the server never asked again.
        if self.capsule.content() == ContentLocation::Inline && opens() {
            let _ = history::write_json(path, &ResumeNote { given: Some(self.capsule.clone()), ..note });
        }
    }

    /// Returns the summary of a file that an earlier call received completely but did not rename.
    /// The server may no longer have it.
    fn find_complete(&self, partial: &PartialFile, options: &ReceiveOptions<'_>) -> Option<ContentSummary> {
        let ContentLocation::Spooled { size, digest } = self.capsule.content() else { return None };
        let (meta, _) = self.open_capsule().ok()?;
        let (length, expected) = if options.ciphertext { (size, digest) } else { (meta.size, meta.sha256) };
        // Nothing at all is what every file begins with.
        if length == 0 || partial.digest_if_complete(length)?.as_bytes() != expected.as_bytes() {
            return None;
        }
        (options.progress)(size, size);
        Some(if options.ciphertext {
            ContentSummary::of_ciphertext(&meta, size, digest)
        } else {
            ContentSummary::of_content(meta)
        })
    }

    /// The description, and the content when it is in the capsule.
    fn open_capsule(&self) -> Result<(Meta, Zeroizing<Vec<u8>>)> {
        let (meta, content) = download::open_capsule(self.link.secret(), &self.capsule)?;
        // What is sealed is longer than its content. No room is kept for what a sender only says.
        if let ContentLocation::Spooled { size, .. } = self.capsule.content()
            && meta.size > size
        {
            return Err(Error::Damaged(format!("{size} bytes cannot hold the {} of its description", meta.size)));
        }
        Ok((meta, content))
    }

    fn download<'b>(&'b self, size: u64, digest: Digest, progress: &'b dyn Fn(u64)) -> Result<Download<'b>> {
        let Some((token, expires_in)) = &self.lease else {
            return Err(self.client.protocol_error("it gave no lease for a download".into()));
        };
        let retry_timeout =
            self.retry_timeout.unwrap_or(Duration::from_secs(*expires_in).clamp(MIN_RETRY_TIMEOUT, MAX_RETRY_TIMEOUT));
        let ciphertext =
            CiphertextSource { client: self.client, handle: self.link.handle(), token, size, digest, retry_timeout };
        Ok(Download::new(ciphertext, progress))
    }

    fn receive(&self, partial: &mut PartialFile, options: &ReceiveOptions<'_>) -> Result<ContentSummary> {
        let ContentLocation::Spooled { size, digest } = self.capsule.content() else {
            let written = self.stream(partial.file(), options)?;
            // What arrived before, perhaps sealed, may have been longer.
            partial.truncate(written.size)?;
            return Ok(written);
        };
        let (meta, _) = self.open_capsule()?;
        let progress = |position| (options.progress)(position, size);
        let download = self.download(size, digest, &progress)?;
        if options.ciphertext {
            partial.reserve(size)?;
            let before = partial.truncate_to_multiple(1, size)?;
            let hash = partial.hash_prefix(before)?;
            return copy_ciphertext(download, &meta, before, hash, partial.file());
        }
        partial.reserve(meta.size)?;
        let before = partial.truncate_to_multiple(CHUNK_LEN as u64, meta.size)?;
        let mut opening = ContentDecryptor::new(self.link.secret(), download)?;
        if before > 0 {
            opening.skip(partial.file(), before)?;
        }
        opening.copy(&meta, partial.file())?;
        Ok(ContentSummary::of_content(meta))
    }

    fn stream(&self, output: &mut dyn Write, options: &ReceiveOptions<'_>) -> Result<ContentSummary> {
        let (meta, content) = self.open_capsule()?;
        let failed = || Error::io("cannot write the download");
        match self.capsule.content() {
            ContentLocation::Inline if options.ciphertext => {
                let sealed = self.capsule.sealed();
                output.write_all(sealed).map_err(failed())?;
                Ok(ContentSummary::of_ciphertext(
                    &meta,
                    sealed.len() as u64,
                    Digest::new(Sha256::digest(sealed).into()),
                ))
            }
            ContentLocation::Inline => {
                download::verify_content(&meta, &content)?;
                output.write_all(&content).map_err(failed())?;
                Ok(ContentSummary::of_content(meta))
            }
            ContentLocation::Spooled { size, digest } => {
                let progress = |position| (options.progress)(position, size);
                let download = self.download(size, digest, &progress)?;
                if options.ciphertext {
                    return copy_ciphertext(download, &meta, 0, Sha256::new(), output);
                }
                ContentDecryptor::new(self.link.secret(), download)?.copy(&meta, output)?;
                Ok(ContentSummary::of_content(meta))
            }
        }
    }

    /// The content, when it came with the claim and is a text to be read.
    fn inline_text(&self, options: &ReceiveOptions<'_>) -> Result<Option<(Meta, Zeroizing<Vec<u8>>)>> {
        if options.ciphertext || self.capsule.content() != ContentLocation::Inline {
            return Ok(None);
        }
        let (meta, content) = self.open_capsule()?;
        download::verify_content(&meta, &content)?;
        Ok((meta.kind() == ContentKind::Text).then_some((meta, content)))
    }

    /// Tells the daemon that everything arrived, and forgets the link.
    fn complete(&self) -> bool {
        if let Some(path) = &self.note_path {
            // A note that stays tells nothing and opens nothing.
            let _ = fs::remove_file(path);
        }
        let Some((token, _)) = &self.lease else { return true };
        let path = ShareEndpoint::Complete.path(self.link.handle()).to_string();
        (0..COMPLETIONS).any(|attempt| {
            thread::sleep(Duration::from_millis(u64::from(attempt) * 300));
            self.client.post_empty(&path, &token.to_text()).is_ok()
        })
    }
}

fn note_path(link: &Link, options: &ReceiveOptions<'_>) -> Option<PathBuf> {
    options.state.map(|state| notes_directory(state).join(format!("{}.json", link.secret().note_name())))
}

fn random_claim_id() -> Result<ClaimId> {
    let mut claim = Zeroizing::new([0; ClaimId::LENGTH]);
    getrandom::fill(&mut claim[..]).map_err(|_| Error::NoRandomness)?;
    Ok(ClaimId::new(*claim))
}

/// Sends the same claim until there is a reply: a reply that was lost does not burn the link.
fn send_claim(client: &ShareClient, link: &Link, claim: &ClaimId) -> Result<ClaimReply> {
    let message =
        ClaimRequest { handle: link.handle(), auth: link.secret().auth(), claim: ClaimId::new(*claim.as_bytes()) };
    let begun = Instant::now();
    let mut wait = Duration::from_millis(200);
    let mut is_lost = false;
    loop {
        match client.post(api::CLAIM, None, Some(&message)) {
            Err(error) if begun.elapsed() < REPEAT && should_retry(&error, &mut is_lost) => {
                tracing::info!("no response to the claim; sending it again: {error}");
                thread::sleep(wait);
                wait = (wait * 2).min(Duration::from_secs(5));
            }
            other => return other,
        }
    }
}

/// Returns whether the reply may have been lost, or the daemon is temporarily busy. `is_lost` is
/// set when a reply was lost: a restarted daemon repeats it.
fn should_retry(error: &Error, is_lost: &mut bool) -> bool {
    match error {
        Error::Unreachable { may_have_arrived, .. } => {
            *is_lost |= *may_have_arrived;
            *is_lost
        }
        other => {
            matches!(other.code(), Some(ErrorCode::Limited | ErrorCode::Unavailable | ErrorCode::Timeout))
        }
    }
}

/// Writes the ciphertext from offset `before` on and verifies its digest; `hash` covers the bytes
/// before the offset.
fn copy_ciphertext(
    mut download: Download<'_>,
    meta: &Meta,
    before: u64,
    mut hash: Sha256,
    output: &mut dyn Write,
) -> Result<ContentSummary> {
    let fault = download.fault();
    let failed = |error: io::Error| fault.borrow_mut().take().unwrap_or_else(|| Error::Damaged(error.to_string()));
    download.seek(SeekFrom::Start(before)).map_err(failed)?;
    let mut buffer = vec![0; CHUNK_LEN];
    loop {
        let count = download.read(&mut buffer).map_err(failed)?;
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
        output.write_all(&buffer[..count]).map_err(Error::io("cannot write the download"))?;
    }
    let (size, digest) = download.size_and_digest();
    if hash.finalize()[..] != digest.as_bytes()[..] {
        return Err(Error::Damaged("its digest differs from the sealed one".into()));
    }
    Ok(ContentSummary::of_ciphertext(meta, size, digest))
}
