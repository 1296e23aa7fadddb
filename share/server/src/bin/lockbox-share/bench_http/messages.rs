//! The requests of the measurements, written once and then copied.

use lockbox_share_protocol::api;
use lockbox_share_protocol::capsule::{Capsule, Content};
use lockbox_share_protocol::message::{Batch, Create, MAX_BATCH};
use lockbox_share_protocol::token::{Auth, ClaimId, OwnerToken};

/// One claimant for all shares: the proof costs the daemon the same whatever it is.
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
        let mut sealed = b"age-encryption.org/v1\n\
            -> X25519 SVrzdFfkPxf0LPHOUGB1gNb9E5Vr8EUDa9kxk04iQ0o\n\
            0OrTkKHpE7klNLd0k+9Uam5hkQkzMxaqKcIPRIO1sNE\n\
            --- gxhoSa5BciRDt8lOpYNcx4EYtKpS0CJ06F3ZwN82VaM\n"
            .to_vec();
        // Nonce and tag of a payload of one part.
        sealed.resize(sealed.len() + payload_bytes + 32, 0xa5);
        let capsule = Capsule::new(Content::Inline, &sealed).map_err(|error| error.to_string())?;
        let auth = Auth::new(AUTH);
        let create = || Create {
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

    pub(super) fn batch(&self) -> String {
        post(api::BATCH_CREATE, &self.authorization, true, &self.batch)
    }

    pub(super) fn claim(&self, handle: &str, number: u64, keep_alive: bool) -> String {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        let id = ClaimId::new(id).to_text().to_string();
        let body = format!("{{\"handle\":\"{handle}\",\"auth\":\"{}\",\"claim\":\"{id}\"}}", self.auth);
        post(api::CLAIM, "", keep_alive, &body)
    }
}

fn post(path: &str, header: &str, keep_alive: bool, body: &str) -> String {
    let connection = if keep_alive { "" } else { "connection: close\r\n" };
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\n{header}content-type: application/json\r\n{connection}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}
