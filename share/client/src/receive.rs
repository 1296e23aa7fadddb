//! Receives a share: claims it, opens it while it is downloaded, and names the file when it is
//! whole.

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use lockbox_share_protocol::api::{self, ShareEndpoint};
use lockbox_share_protocol::capsule::{Capsule, ContentLocation};
use lockbox_share_protocol::message::{ClaimReply, ClaimRequest, Lease, LookReply, LookRequest};
use lockbox_share_protocol::token::{ClaimId, Digest, LeaseToken};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use zeroize::Zeroizing;

use crate::download::{self, CiphertextSource, ContentDecryptor, Download, read_error};
use crate::http::ShareClient;
use crate::link::Link;
use crate::meta::{ContentKind, Meta};
use crate::partial::{self, PartialFile};
pub use crate::partial::{ReceiveTarget, Unpack};
use crate::seal::CHUNK_LEN;
use crate::{Error, Result, history};

/// Time for which a claim is repeated after a lost reply; the daemon repeats its reply longer.
const REPEAT: Duration = Duration::from_secs(api::REPEAT_SECONDS - 10);
const MIN_RETRY_TIMEOUT: Duration = Duration::from_secs(10);
/// A server may say anything; a lease ends a day after the claim.
const MAX_RETRY_TIMEOUT: Duration = Duration::from_secs(86_400);
/// Attempts to report the end of a download; after them the lease's time ends it.
const COMPLETIONS: u32 = 3;

/// State of an interrupted download, under a name that does not reveal the link: enough to resume,
/// not enough to decrypt.
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

pub struct ReceiveOptions<'a> {
    /// Directory of resume notes; without it a cut download cannot be resumed.
    pub state: Option<&'a Path>,
    /// Resumes an earlier download; otherwise its file is kept until the new one is complete.
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
    /// Called before the download if so many bytes of an earlier one are not resumed.
    pub on_unresumed: &'a dyn Fn(&Path, u64),
    /// Takes a text that is meant to be read at once; without it a text is a file like any other.
    pub text: Option<&'a TextSink<'a>>,
    /// Unpacks the tar of a directory; without it the tar is a file like any other.
    pub unpack: Option<&'a Unpack<'a>>,
}

#[derive(Debug)]
pub struct ReceiveSummary {
    /// Path of the file; `None` when it was written to a stream.
    pub path: Option<PathBuf>,
    /// The sender's name for it, not made safe.
    pub name: String,
    /// Bytes that were written.
    pub size: u64,
    pub sha256: Digest,
    pub kind: ContentKind,
    /// Set if the daemon confirmed completion.
    pub confirmed: bool,
}

impl ReceiveSummary {
    fn new(written: Meta, path: Option<PathBuf>, confirmed: bool) -> ReceiveSummary {
        let kind = written.kind();
        ReceiveSummary { path, name: written.name, size: written.size, sha256: written.sha256, kind, confirmed }
    }
}

/// Describes the age file itself, which is neither a text nor a tar.
fn describe_ciphertext(content: &Meta, size: u64, sha256: Digest) -> Meta {
    Meta::new(format!("{}.age", content.name), ContentKind::File, size, sha256)
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
    if let ReceiveTarget::File { path, replace } = target {
        if !replace && path.symlink_metadata().is_ok() {
            return Err(Error::Exists(path.display().to_string()));
        }
        if path.is_dir() {
            return Err(Error::Invalid(format!("{} is a directory", path.display())));
        }
    }
    let mut partial = PartialFile::open(&target.directory(), &link.secret().note_name(), options.resume)?;
    if let Some(remembered) = AcceptedClaim::from_note(client, link, options)?
        && let Some(written) = remembered.find_complete(&partial, options)
    {
        let partial = partial.into_previous();
        (options.on_partial)(&partial.path);
        return publish(&remembered, partial, written, target, options);
    }
    if let Some((path, length)) = partial.previous() {
        (options.on_unresumed)(path, length);
    }
    (options.on_partial)(&partial.path);
    let claimed = match AcceptedClaim::begin(client, link, options) {
        Ok(claimed) => claimed,
        Err(error) => {
            // A download under a lease that ended cannot be resumed.
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
        return Ok(ReceiveSummary::new(meta, None, claimed.complete()));
    }
    match claimed.receive(&mut partial, options) {
        Ok(written) => publish(&claimed, partial, written, target, options),
        Err(error) => {
            if matches!(error, Error::Damaged(_)) {
                partial.discard();
            }
            Err(error)
        }
    }
}

/// Renames the complete file, unpacks a directory if requested, and reports completion.
fn publish(
    claimed: &AcceptedClaim<'_>,
    partial: PartialFile,
    written: Meta,
    target: &ReceiveTarget,
    options: &ReceiveOptions<'_>,
) -> Result<ReceiveSummary> {
    let Some(unpack) = options.unpack.filter(|_| written.kind() == ContentKind::Directory) else {
        let path = partial.finish(target, &written.name)?.path;
        return Ok(ReceiveSummary::new(written, Some(path), claimed.complete()));
    };
    // By the time that it is unpacked the link is used up: whatever happens then, the tar is whole
    // and has a name.
    let tar_target = ReceiveTarget::Directory { path: target.directory(), replace: false };
    let mut tar = partial.finish(&tar_target, &written.name)?;
    let confirmed = claimed.complete();
    (options.on_partial)(&tar.path);
    match tar.unpack(unpack, &written.name) {
        Ok(path) => {
            tar.remove();
            Ok(ReceiveSummary::new(written, Some(path), confirmed))
        }
        Err(error) => Err(Error::NotUnpacked { tar: tar.path.display().to_string(), reason: error.to_string() }),
    }
}

/// Returns the expiry of a link that can be claimed, in seconds since 1970; claims nothing.
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
    Ok(ReceiveSummary::new(written, None, claimed.complete()))
}

struct AcceptedClaim<'a> {
    client: &'a ShareClient,
    link: &'a Link,
    note_path: Option<PathBuf>,
    capsule: Capsule,
    lease: Option<Lease>,
    retry_timeout: Option<Duration>,
}

impl<'a> AcceptedClaim<'a> {
    fn new(
        client: &'a ShareClient,
        link: &'a Link,
        options: &ReceiveOptions<'_>,
        capsule: Capsule,
        lease: Option<Lease>,
    ) -> AcceptedClaim<'a> {
        let note_path = note_path(link, options);
        AcceptedClaim { client, link, note_path, capsule, lease, retry_timeout: options.retry_timeout }
    }

    /// Restores the lease of an earlier call from its note; sends no request.
    fn from_note(
        client: &'a ShareClient,
        link: &'a Link,
        options: &ReceiveOptions<'_>,
    ) -> Result<Option<AcceptedClaim<'a>>> {
        let leased = read_note(note_path(link, options).as_deref())?.and_then(|note| note.leased);
        Ok(leased.map(|LeaseNote { token, expires_in, capsule }| {
            AcceptedClaim::new(client, link, options, capsule, Some(Lease { token, expires_in }))
        }))
    }

    fn begin(client: &'a ShareClient, link: &'a Link, options: &ReceiveOptions<'_>) -> Result<AcceptedClaim<'a>> {
        if let Some(directory) = &options.state.map(notes_directory) {
            history::create_private_directory(directory)?;
            history::sweep(directory, history::NOTE_RETENTION);
        }
        let note_path = note_path(link, options);
        let claimant = |capsule, lease| AcceptedClaim::new(client, link, options, capsule, lease);
        let claim = match read_note(note_path.as_deref())? {
            Some(ResumeNote { given: Some(capsule), .. }) => return Ok(claimant(capsule, None)),
            Some(ResumeNote { leased: Some(LeaseNote { token, expires_in, capsule }), .. }) => {
                let path = ShareEndpoint::Ciphertext.path(link.handle());
                if client.probe_lease(&path, &token.to_text())? {
                    return Ok(claimant(capsule, Some(Lease { token, expires_in })));
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
        if let Some(path) = &note_path {
            let token = LeaseToken::new(*lease.token.as_bytes());
            note.leased = Some(LeaseNote { token, expires_in: lease.expires_in, capsule: claimed.capsule.clone() });
            history::write_json(path, &note)?;
        }
        Ok(claimant(claimed.capsule, Some(lease)))
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

    /// Describes a file that an earlier call received completely but did not rename. The server may
    /// no longer have it.
    fn find_complete(&self, partial: &PartialFile, options: &ReceiveOptions<'_>) -> Option<Meta> {
        let ContentLocation::Spooled { size, digest } = self.capsule.content() else { return None };
        let (meta, _) = self.open_capsule().ok()?;
        let written = if options.ciphertext { describe_ciphertext(&meta, size, digest) } else { meta };
        // Nothing at all is what every file begins with.
        if written.size == 0 || partial.digest_if_complete(written.size)? != written.sha256 {
            return None;
        }
        (options.progress)(size, size);
        Some(written)
    }

    /// The description, and the content when it is in the capsule.
    fn open_capsule(&self) -> Result<(Meta, Zeroizing<Vec<u8>>)> {
        let plain = age::decrypt(&self.link.secret().identity()?, self.capsule.sealed()).map(Zeroizing::new);
        let plain = plain.map_err(|error| download::damaged(&error))?;
        let (meta, content) = Meta::decode(&plain)?;
        // What is sealed is longer than its content. No room is kept for what a sender only says.
        if let ContentLocation::Spooled { size, .. } = self.capsule.content()
            && meta.size > size
        {
            return Err(Error::Damaged(format!("{size} bytes cannot hold the {} of its description", meta.size)));
        }
        Ok((meta, Zeroizing::new(content.to_vec())))
    }

    fn download<'b>(&'b self, size: u64, digest: Digest, progress: &'b dyn Fn(u64)) -> Result<Download<'b>> {
        let Some(Lease { token, expires_in }) = &self.lease else {
            return Err(self.client.protocol_error("it gave no lease for a download".into()));
        };
        let retry_timeout =
            self.retry_timeout.unwrap_or(Duration::from_secs(*expires_in).clamp(MIN_RETRY_TIMEOUT, MAX_RETRY_TIMEOUT));
        let ciphertext =
            CiphertextSource { client: self.client, handle: self.link.handle(), token, size, digest, retry_timeout };
        Ok(Download::new(ciphertext, progress))
    }

    /// Receives into the partial file. If the result is damaged, the cause may be the bytes of
    /// an earlier call, damaged themselves or of the other form: all of it is downloaded again
    /// while the lease stands.
    fn receive(&self, partial: &mut PartialFile, options: &ReceiveOptions<'_>) -> Result<Meta> {
        let is_resumed = partial.length()? > 0;
        match self.resume(partial, options) {
            Err(Error::Damaged(reason)) if is_resumed => {
                tracing::info!("the resumed download is damaged; starting over: {reason}");
                partial.truncate(0)?;
                self.resume(partial, options)
            }
            other => other,
        }
    }

    fn resume(&self, partial: &mut PartialFile, options: &ReceiveOptions<'_>) -> Result<Meta> {
        let ContentLocation::Spooled { size, digest } = self.capsule.content() else {
            let written = self.stream(&mut partial.file, options)?;
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
            return copy_ciphertext(download, &meta, before, hash, &mut partial.file);
        }
        partial.reserve(meta.size)?;
        let before = partial.truncate_to_multiple(CHUNK_LEN as u64, meta.size)?;
        let mut opening = ContentDecryptor::new(self.link.secret(), download)?;
        if before > 0 {
            opening.skip(&mut partial.file, before)?;
        }
        opening.copy(&meta, &mut partial.file)?;
        Ok(meta)
    }

    fn stream(&self, output: &mut dyn Write, options: &ReceiveOptions<'_>) -> Result<Meta> {
        let (meta, content) = self.open_capsule()?;
        let failed = || Error::io("cannot write the download");
        match self.capsule.content() {
            ContentLocation::Inline if options.ciphertext => {
                let sealed = self.capsule.sealed();
                output.write_all(sealed).map_err(failed())?;
                let digest = Digest::new(Sha256::digest(sealed).into());
                Ok(describe_ciphertext(&meta, sealed.len() as u64, digest))
            }
            ContentLocation::Inline => {
                download::verify_content(&meta, &content)?;
                output.write_all(&content).map_err(failed())?;
                Ok(meta)
            }
            ContentLocation::Spooled { size, digest } => {
                let progress = |position| (options.progress)(position, size);
                let download = self.download(size, digest, &progress)?;
                if options.ciphertext {
                    return copy_ciphertext(download, &meta, 0, Sha256::new(), output);
                }
                ContentDecryptor::new(self.link.secret(), download)?.copy(&meta, output)?;
                Ok(meta)
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
        let Some(lease) = &self.lease else { return true };
        let path = ShareEndpoint::Complete.path(self.link.handle());
        (0..COMPLETIONS).any(|attempt| {
            thread::sleep(Duration::from_millis(u64::from(attempt) * 300));
            self.client.post_empty(&path, &lease.token.to_text()).is_ok()
        })
    }
}

fn note_path(link: &Link, options: &ReceiveOptions<'_>) -> Option<PathBuf> {
    options.state.map(|state| notes_directory(state).join(format!("{}.json", link.secret().note_name())))
}

fn read_note(path: Option<&Path>) -> Result<Option<ResumeNote>> {
    path.map_or(Ok(None), history::read_json)
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
        match client.post_within(client.claim_patience, api::CLAIM, None, Some(&message)) {
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
        other => other.is_temporary(),
    }
}

/// Writes the ciphertext from `before` on and verifies its digest; `hash` covers the earlier bytes.
fn copy_ciphertext(
    mut download: Download<'_>,
    meta: &Meta,
    before: u64,
    mut hash: Sha256,
    output: &mut dyn Write,
) -> Result<Meta> {
    download.seek(SeekFrom::Start(before)).map_err(|error| read_error(&download.fault, &error))?;
    let mut buffer = vec![0; CHUNK_LEN];
    loop {
        let count = download.read(&mut buffer).map_err(|error| read_error(&download.fault, &error))?;
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
        output.write_all(&buffer[..count]).map_err(Error::io("cannot write the download"))?;
    }
    let CiphertextSource { size, digest, .. } = download.ciphertext;
    if hash.finalize()[..] != digest.as_bytes()[..] {
        return Err(Error::Damaged("its digest differs from the sealed one".into()));
    }
    Ok(describe_ciphertext(meta, size, digest))
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::sync::mpsc;

    use super::*;
    use crate::http::ServerAddress;
    use crate::link::Secret;

    /// Reads a request to the end of its message.
    fn read_claim(stream: &mut TcpStream) -> String {
        let (mut heard, mut part) = (Vec::new(), [0; 4096]);
        while heard.last() != Some(&b'}') {
            let count = stream.read(&mut part).unwrap();
            assert!(count > 0, "the request ends early");
            heard.extend_from_slice(&part[..count]);
        }
        String::from_utf8(heard).unwrap().split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    /// A NAT that lost its table: the connection stays open, and no reply arrives.
    #[test]
    fn a_claim_without_a_reply_is_sent_again_while_the_daemon_repeats_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let (sender, claims) = mpsc::channel();
        thread::spawn(move || {
            let (mut silent, _) = listener.accept().unwrap();
            sender.send(read_claim(&mut silent)).unwrap();
            let body = r#"{"error":"consumed","message":"used"}"#;
            let head = format!("HTTP/1.1 410 Gone\r\ncontent-length: {}\r\n\r\n", body.len());
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                sender.send(read_claim(&mut stream)).unwrap();
                // On a busy machine the client may have given up, and sends the claim again.
                let _ = stream.write_all(format!("{head}{body}").as_bytes());
            }
        });
        let mut client = ShareClient::new(ServerAddress::parse(&base).unwrap(), None);
        assert!(client.claim_patience + REPEAT <= Duration::from_secs(api::REPEAT_SECONDS));
        client.claim_patience = Duration::from_millis(500);
        let link = Link::parse(&format!("{base}/s/1000000000001#{}", *Secret::generate().unwrap().fragment())).unwrap();
        let told = send_claim(&client, &link, &random_claim_id().unwrap());
        assert!(matches!(told, Err(Error::Refused(_))));
        let claims: Vec<String> = claims.try_iter().collect();
        assert!(claims.len() >= 2 && claims.iter().all(|claim| *claim == claims[0]), "{claims:?}");
    }
}
