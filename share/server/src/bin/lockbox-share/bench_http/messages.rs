//! The requests of the measurements, written once and then copied.

use lockbox_share_protocol::capsule::{Capsule, ContentLocation};
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::{Batch, CreateRequest, Lease, MAX_BATCH, UploadReply};
use lockbox_share_protocol::token::{Auth, ClaimId, OwnerToken};
use lockbox_share_protocol::{age, api};

/// Proof of all shares: its value does not change the daemon's work.
const AUTH: [u8; 32] = [0x51; 32];
const OWNER: [u8; 32] = [0x52; 32];

#[derive(Clone)]
pub(super) struct Messages {
    create: String,
    batch: String,
    auth: String,
    authorization: String,
}

impl Messages {
    pub(super) fn new(payload_bytes: usize) -> Result<Messages, String> {
        // Nonce and tag of a payload of one part.
        let sealed = age_file(payload_bytes + 32);
        let capsule = Capsule::new(ContentLocation::Inline, &sealed).map_err(|error| error.to_string())?;
        let auth = Auth::new(AUTH);
        let create = || CreateRequest {
            capsule: capsule.clone(),
            verifier: auth.verifier(),
            expires_in: Some(3600),
            max_claims: 1,
            upload: None,
        };
        let text = |error: serde_json::Error| error.to_string();
        let batch = Batch { items: (0..MAX_BATCH).map(|_| create()).collect() };
        Ok(Messages {
            create: serde_json::to_string(&create()).map_err(text)?,
            batch: serde_json::to_string(&batch).map_err(text)?,
            auth: auth.to_text().to_string(),
            authorization: format!("authorization: Bearer {}\r\n", *OwnerToken::new(OWNER).to_text()),
        })
    }

    pub(super) fn create(&self, keep_alive: bool) -> String {
        post(api::SHARES, &self.authorization, keep_alive, &self.create)
    }

    /// [`MAX_BATCH`] shares.
    pub(super) fn batch(&self, keep_alive: bool) -> String {
        post(api::BATCH_CREATE, &self.authorization, keep_alive, &self.batch)
    }

    /// The simplest question.
    pub(super) fn get(keep_alive: bool) -> String {
        let connection = if keep_alive { "" } else { "connection: close\r\n" };
        format!("GET {} HTTP/1.1\r\nhost: localhost\r\n{connection}\r\n", api::LIMITS)
    }

    /// Uploads `ciphertext`.
    pub(super) fn upload(&self, ciphertext: &[u8]) -> Vec<u8> {
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: localhost\r\n{}content-type: application/octet-stream\r\ncontent-length: {}\r\n\r\n",
            api::UPLOADS,
            self.authorization,
            ciphertext.len()
        );
        [head.as_bytes(), ciphertext].concat()
    }

    /// Makes the share of an upload.
    pub(super) fn create_of(&self, uploaded: UploadReply) -> Result<String, String> {
        let content = ContentLocation::Spooled { size: uploaded.size, digest: uploaded.digest };
        let create = CreateRequest {
            capsule: Capsule::new(content, &age_file(100)).map_err(|error| error.to_string())?,
            verifier: Auth::new(AUTH).verifier(),
            expires_in: Some(3600),
            max_claims: 1,
            upload: Some(uploaded.upload),
        };
        let body = serde_json::to_string(&create).map_err(|error| error.to_string())?;
        Ok(post(api::SHARES, &self.authorization, true, &body))
    }

    /// Asks for `length` bytes of the ciphertext from `start`.
    pub(super) fn range(handle: Handle, lease: &Lease, start: u64, length: u64) -> String {
        format!(
            "GET {} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\nrange: bytes={start}-{}\r\n\r\n",
            api::ShareEndpoint::Ciphertext.path(handle),
            *lease.token.to_text(),
            start + length - 1
        )
    }

    pub(super) fn claim(&self, handle: &str, number: u64, keep_alive: bool) -> String {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        let id = ClaimId::new(id).to_text().to_string();
        let body = format!("{{\"handle\":\"{handle}\",\"auth\":\"{}\",\"claim\":\"{id}\"}}", self.auth);
        post(api::CLAIM, "", keep_alive, &body)
    }
}

/// Looks like an age v1 file, which is all that a daemon can tell.
pub(super) fn age_file(payload: usize) -> Vec<u8> {
    let mut file = age::SAMPLE_HEADER.as_bytes().to_vec();
    file.resize(file.len() + payload, 0xa5);
    file
}

fn post(path: &str, header: &str, keep_alive: bool, body: &str) -> String {
    let connection = if keep_alive { "" } else { "connection: close\r\n" };
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\n{header}content-type: application/json\r\n{connection}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}
