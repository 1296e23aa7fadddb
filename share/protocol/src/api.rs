//! Paths of version 1 with their requests and responses.
//!
//! Messages are the types of [`crate::message`] as JSON; ids and tokens are base64url without
//! padding. Every failure has a [`ErrorBody`](crate::message::ErrorBody) as its body and the status
//! of its code. `Owner` below stands for the header `Authorization: Bearer OWNER_TOKEN`, `Lease`
//! for `Authorization: Bearer LEASE_TOKEN`. Unknown query parameters are refused. Every path may
//! also answer 400, 405, 408, 413, 429 (with `Retry-After`), 500 and 503.
//!
//! | request | takes | answers |
//! |---|---|---|
//! | `GET /v1/limits` | | 200 `Limits` |
//! | `POST /v1/uploads` | Owner; the ciphertext (an age v1 file) as `application/octet-stream`, with a length or in parts | 201 `UploadReply`; 401, 403, 413, 415, 422, 507 |
//! | `POST /v1/shares` | Owner; `CreateRequest` | 201 `CreateReply`; 401, 403, 413, 415, 422, 507 |
//! | `POST /v1/look` | `LookRequest` | 200 `LookReply`; the failures of a claim |
//! | `POST /v1/claim` | `ClaimRequest` | 200 `ClaimReply`; 404 without proof; with it 409 leased, 410 consumed, revoked or expired |
//! | `GET`, `HEAD /v1/shares/HANDLE/ciphertext` | Lease; `Range`, `If-Range`, `If-None-Match` | 200, 206 the ciphertext; 304, 404 no such lease, 410 the lease ended, 416 |
//! | `POST /v1/shares/HANDLE/complete` | Lease | 204, again as often as it is sent; 404, 410 the lease ended otherwise |
//! | `GET /v1/shares/HANDLE` | Owner | 200 `ShareInfo`; 404 |
//! | `GET /v1/shares/HANDLE/watch?version=N&wait=SECONDS` | Owner | 200 `ShareInfo`, as soon as its version is above N or its state is not `state` (`&state=armed`, when given), at the latest after `wait` (default 30, at most 60); 404 |
//! | `POST /v1/shares/HANDLE/revoke` | Owner | 200 `ShareInfo`, again as often as it is sent; 404 |
//! | `POST /v1/shares/HANDLE/rearm` | Owner | 200 `ShareInfo`; 404, 409, 410 when it expired or was revoked |
//! | `POST /v1/batch/info` | Owner; `Batch` | 200 `BatchResults`: how an owner lists shares, for the daemon keeps no handles |
//! | `GET`, `HEAD /s/ANYTHING` | | 200 the page, the same for every path |
//!
//! - No `GET`, `HEAD` or `OPTIONS` changes the state of a share, with the one exception that a
//!   download under a lease counts as opened with its first byte, and its lease ends some seconds
//!   after its last. Only `complete` confirms it. `HEAD`, 304 and 416 leave the lease as it is.
//! - **Upload.** Larger content is uploaded first, then `create` names the token and its capsule
//!   says the same size and digest. A ciphertext that no share took within 15 minutes is discarded.
//!   Both may be sent again when their response was lost: the same ciphertext of the same owner is
//!   the same upload while it waits, and the same owner and verifier get the share of an upload for
//!   60 s.
//! - **Look.** Answers as a claim would now, with the same proof and limits; changes nothing.
//! - **Claim.** A repeat with the same `claim` id within 60 s gets the same reply. A share with
//!   inline content is consumed by its last claim. One with ciphertext is leased: no other client
//!   is served until the lease ends.
//! - **Download.** The entity tag is the ciphertext's digest, strong. One range is answered by 206
//!   with `Content-Range`; several ranges, and ranges that are not understood, are answered by 200
//!   with the whole. A body that ends early is to be resumed with `Range: bytes=N-` and `If-Range`.
//!   After `complete`, or the last byte and some seconds, the share is consumed. A body ends early
//!   when its lease does. At most 8 run under one lease.
//! - **Links.** `CreateReply::url` is `PUBLIC_URL/s/HANDLE`; the client puts `#` and the secret
//!   behind it.

use crate::token::Handle;

pub const LIMITS: &str = "/v1/limits";
pub const UPLOADS: &str = "/v1/uploads";
pub const SHARES: &str = "/v1/shares";
pub const LOOK: &str = "/v1/look";
pub const CLAIM: &str = "/v1/claim";
pub const BATCH_INFO: &str = "/v1/batch/info";
/// The page's path begins so; a handle follows.
pub const PAGE: &str = "/s/";

/// Name of the daemon's Unix socket in the runtime directory.
pub const SOCKET_NAME: &str = "lockbox-share.sock";
/// The daemon's TCP port on the loopback address.
pub const DEFAULT_PORT: u16 = 7377;
/// Longest `wait` of a watch, in seconds.
pub const MAX_WAIT: u64 = 60;
/// `wait` when none is given, in seconds.
pub const DEFAULT_WAIT: u64 = 30;
/// The same claim gets the same reply for so many seconds.
pub const REPEAT_SECONDS: u64 = 60;
/// An upload that no share takes is kept for so many seconds.
pub const UPLOAD_SECONDS: u64 = 15 * 60;

/// A path below one share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShareEndpoint {
    Info,
    Watch,
    Revoke,
    Rearm,
    Complete,
    Ciphertext,
}

impl ShareEndpoint {
    pub const ALL: [ShareEndpoint; 6] = [
        ShareEndpoint::Info,
        ShareEndpoint::Watch,
        ShareEndpoint::Revoke,
        ShareEndpoint::Rearm,
        ShareEndpoint::Complete,
        ShareEndpoint::Ciphertext,
    ];

    fn ending(self) -> &'static str {
        match self {
            ShareEndpoint::Info => "",
            ShareEndpoint::Watch => "/watch",
            ShareEndpoint::Revoke => "/revoke",
            ShareEndpoint::Rearm => "/rearm",
            ShareEndpoint::Complete => "/complete",
            ShareEndpoint::Ciphertext => "/ciphertext",
        }
    }

    pub fn path(self, handle: Handle) -> String {
        format!("{SHARES}/{handle}{}", self.ending())
    }

    /// Parses a path; total.
    pub fn parse(path: &str) -> Option<(ShareEndpoint, Handle)> {
        let rest = path.strip_prefix(SHARES)?.strip_prefix('/')?;
        let (handle, ending) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let which = ShareEndpoint::ALL.into_iter().find(|which| which.ending() == ending)?;
        Some((which, handle.parse().ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_as_they_are_written() {
        for which in ShareEndpoint::ALL {
            let handle: Handle = "1482719382210".parse().unwrap();
            assert_eq!(ShareEndpoint::parse(&which.path(handle).to_string()), Some((which, handle)));
        }
    }

    #[test]
    fn other_paths_are_none() {
        for path in [
            "",
            "/v1/shares",
            "/v1/shares/",
            "/v1/shares/14",
            "/v1/shares/1482719382210/",
            "/v1/shares/1482719382210/x",
        ] {
            assert_eq!(ShareEndpoint::parse(path), None, "{path}");
        }
    }
}
