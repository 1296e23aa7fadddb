//! JSON messages of `/v1`, one type each. [`crate::api`] documents the request and response of each
//! path.

use serde::{Deserialize, Serialize};

use crate::capsule::Capsule;
use crate::token::{Auth, ClaimId, Digest, Handle, LeaseToken, UploadToken, Verifier};

pub const MAX_BATCH: usize = 100;
/// Maximum number of claims of one share.
pub const MAX_CLAIMS: u8 = 8;

/// Seconds since 1970 in UTC, by the daemon's clock.
pub type UnixSeconds = u64;

/// Server limits; requested before a share is created.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Version of this protocol, 1.
    pub protocol: u32,
    /// Lifetime of a share that names none, in seconds.
    pub default_expiry: u64,
    /// Longest lifetime of a share, in seconds.
    pub max_expiry: u64,
    /// Most bytes of one ciphertext.
    pub max_ciphertext: u64,
    pub max_claims: u8,
    pub max_batch: usize,
    /// Begins the links of this server, without a slash at its end.
    pub public_url: String,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UploadReply {
    pub upload: UploadToken,
    /// Bytes received.
    pub size: u64,
    /// SHA-256 of these bytes.
    pub digest: Digest,
    /// Seconds until it is thrown away if no share takes it.
    pub expires_in: u64,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CreateRequest {
    pub capsule: Capsule,
    pub verifier: Verifier,
    /// Lifetime in seconds, at least 1; without it the server's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in: Option<u64>,
    /// Maximum number of claims, 1 to [`MAX_CLAIMS`].
    #[serde(default = "default_max_claims")]
    pub max_claims: u8,
    /// The ciphertext, when the capsule says that it is in the spool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<UploadToken>,
}

fn default_max_claims() -> u8 {
    1
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreateReply {
    /// Handle for the link, info, watch, revoke and rearm.
    pub handle: Handle,
    /// The link without its fragment: `#` and the secret are the client's.
    pub url: String,
    pub expires_at: UnixSeconds,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookRequest {
    pub handle: Handle,
    /// Derived from the link's secret.
    pub auth: Auth,
}

/// A claim would be accepted now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookReply {
    pub expires_at: UnixSeconds,
}

/// Claims a share: one atomic step.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClaimRequest {
    pub handle: Handle,
    /// Derived from the link's secret.
    pub auth: Auth,
    /// Chosen by the claimant at random. The same one within 60 s gets the same reply.
    pub claim: ClaimId,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimReply {
    pub capsule: Capsule,
    /// Lease of the ciphertext; `None` for inline content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease: Option<Lease>,
}

/// Leave to download the ciphertext of one share.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    pub token: LeaseToken,
    /// Seconds left; every download that makes progress extends it.
    pub expires_in: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ShareState {
    /// Waits for a claim.
    Armed,
    /// Claimed; its ciphertext may be downloaded by the claimant alone.
    Leased,
    /// Given away as often as it was allowed.
    Consumed,
    /// Taken back by its owner.
    Revoked,
    /// Not claimed in time.
    Expired,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ClaimState {
    /// The lease runs and no byte was sent.
    Leased,
    /// The lease runs and bytes were sent.
    Sending,
    /// The claimant confirmed that it has everything.
    Completed,
    /// The lease ended after some bytes, or all, and was not confirmed; `rearm` gives the claim
    /// back.
    Interrupted,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClaimInfo {
    pub state: ClaimState,
    /// Time at which the proof was accepted.
    pub claimed_at: UnixSeconds,
    /// Time of the end, or of the running lease's expiry.
    pub ended_at: UnixSeconds,
}

/// State of a share for its owner; kept for a day after the share's end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareInfo {
    pub handle: Handle,
    pub state: ShareState,
    pub created_at: UnixSeconds,
    pub expires_at: UnixSeconds,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub revoked_at: Option<UnixSeconds>,
    pub max_claims: u8,
    pub claims_left: u8,
    /// Every claim that took or holds one.
    pub claims: Vec<ClaimInfo>,
    /// Bytes of the ciphertext in the spool; 0 when the content is in the capsule.
    pub size: u64,
    /// Grows with every change; for `watch`.
    pub version: u32,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Batch {
    /// 1 to [`MAX_BATCH`].
    pub items: Vec<Handle>,
}

/// Results of a batch, in the order of its items.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchResults {
    pub results: Vec<ItemResult>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ItemResult {
    /// Success, as for a single request.
    Done { ok: ShareInfo },
    /// Failure, as for a single request.
    Failed(ErrorBody),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: ErrorCode,
    /// Message for people: one sentence, without names, handles or addresses.
    pub message: String,
    /// Time of consumption, revocation or expiry; only in replies to a valid proof.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<UnixSeconds>,
}

/// Cause of a failure. Each has one HTTP status, [`ErrorCode::status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// The message, a parameter or a header is not understood.
    Malformed,
    /// No owner token, or one of the wrong form.
    Unauthorized,
    /// This owner may not make shares here.
    Forbidden,
    /// Missing, or no proof: the answer is the same for both.
    Refused,
    NotFound,
    Method,
    /// The client was too slow to send its request.
    Timeout,
    /// Claimed by another client, and its lease has not ended. Only with a valid proof.
    Leased,
    /// Rearm of a share that has no interrupted download.
    NotInterrupted,
    /// Given away already. With proof only.
    Consumed,
    /// Taken back. With proof only.
    Revoked,
    /// Too late. With proof only.
    Expired,
    /// The body, the ciphertext or the batch is too large.
    TooLarge,
    /// The body is of another type than the path takes.
    MediaType,
    /// The upload is unknown, or its size or digest differs from the capsule.
    Upload,
    /// The upload is not an age v1 file.
    NotSealed,
    /// None of the bytes asked for exist.
    Range,
    /// Asked too often; `Retry-After` says when again.
    Limited,
    /// The daemon cannot serve now: stopping, out of descriptors, or its disk is read-only.
    Unavailable,
    /// No space for the upload or the share.
    NoSpace,
    /// The daemon failed; its log says how.
    Internal,
}

impl ErrorCode {
    pub fn status(self) -> u16 {
        match self {
            ErrorCode::Malformed => 400,
            ErrorCode::Unauthorized => 401,
            ErrorCode::Forbidden => 403,
            ErrorCode::Refused | ErrorCode::NotFound => 404,
            ErrorCode::Method => 405,
            ErrorCode::Timeout => 408,
            ErrorCode::Leased | ErrorCode::NotInterrupted => 409,
            ErrorCode::Consumed | ErrorCode::Revoked | ErrorCode::Expired => 410,
            ErrorCode::TooLarge => 413,
            ErrorCode::MediaType => 415,
            ErrorCode::Range => 416,
            ErrorCode::Upload | ErrorCode::NotSealed => 422,
            ErrorCode::Limited => 429,
            ErrorCode::Internal => 500,
            ErrorCode::Unavailable => 503,
            ErrorCode::NoSpace => 507,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_tells_success_from_failure() {
        let info = r#"{"handle":"1482719382210","state":"armed","created_at":1,"expires_at":2,"max_claims":1,"claims_left":1,"claims":[],"size":0,"version":1}"#;
        let text = format!(r#"{{"results":[{{"ok":{info}}},{{"error":"refused","message":"no"}}]}}"#);
        let results: BatchResults = serde_json::from_str(&text).unwrap();
        assert!(matches!(&results.results[..], [ItemResult::Done { .. }, ItemResult::Failed(_)]));
        assert_eq!(serde_json::to_string(&results).unwrap(), text);
    }

    #[test]
    fn a_claim_has_three_fields_and_no_other() {
        let text = format!(
            r#"{{"handle":"1482719382210","auth":"{}","claim":"{}"}}"#,
            *Auth::new([2; 32]).to_text(),
            *ClaimId::new([3; 16]).to_text()
        );
        assert!(serde_json::from_str::<ClaimRequest>(&text).is_ok());
        assert!(serde_json::from_str::<ClaimRequest>(&text.replace("\"handle\"", "\"x\":1,\"handle\"")).is_err());
        assert!(serde_json::from_str::<ClaimRequest>(&text.replace("\"1482719382210\"", "1482719382210")).is_err());
    }

    #[test]
    fn states_and_codes_are_words() {
        assert_eq!(serde_json::to_string(&ShareState::Armed).unwrap(), "\"armed\"");
        assert_eq!(serde_json::to_string(&ClaimState::Interrupted).unwrap(), "\"interrupted\"");
        assert_eq!(serde_json::to_string(&ErrorCode::NotInterrupted).unwrap(), "\"not_interrupted\"");
    }
}
