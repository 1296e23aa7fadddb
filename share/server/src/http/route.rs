//! Sends each request to its handler, and counts what was answered.

use std::sync::Arc;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, StatusCode};
use lockbox_share_protocol::api::{self, OfShare};
use lockbox_share_protocol::handle::Handle;
use lockbox_share_protocol::message::ErrorCode;

use super::client_addr::{self, Peer};
use super::daemon::Daemon;
use super::refusal::Refusal;
use super::reply::{self, Reply};
use super::share_handlers::{self, Action};
use super::{claim, create, csrf, download, page, upload};
use crate::metrics::Route;

/// What a path names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    Limits,
    Uploads,
    Shares,
    Look,
    Claim,
    BatchCreate,
    BatchClaim,
    BatchInfo,
    BatchRevoke,
    OfShare(OfShare, Handle),
    Page(page::File),
}

impl Target {
    fn of(path: &str) -> Option<Target> {
        Some(match path {
            api::LIMITS => Target::Limits,
            api::UPLOADS => Target::Uploads,
            api::SHARES => Target::Shares,
            api::LOOK => Target::Look,
            api::CLAIM => Target::Claim,
            api::BATCH_CREATE => Target::BatchCreate,
            api::BATCH_CLAIM => Target::BatchClaim,
            api::BATCH_INFO => Target::BatchInfo,
            api::BATCH_REVOKE => Target::BatchRevoke,
            _ => match page::File::of(path) {
                Some(file) => Target::Page(file),
                None => OfShare::parse(path).map(|(which, handle)| Target::OfShare(which, handle))?,
            },
        })
    }

    fn route(self) -> Route {
        match self {
            Target::Limits => Route::Limits,
            Target::Uploads => Route::Upload,
            Target::Shares => Route::Create,
            Target::Look => Route::Look,
            Target::Claim => Route::Claim,
            Target::BatchCreate | Target::BatchClaim | Target::BatchInfo | Target::BatchRevoke => Route::Batch,
            Target::OfShare(OfShare::Info, _) => Route::Info,
            Target::OfShare(OfShare::Watch, _) => Route::Watch,
            Target::OfShare(OfShare::Revoke, _) => Route::Revoke,
            Target::OfShare(OfShare::Rearm, _) => Route::Rearm,
            Target::OfShare(OfShare::Complete, _) => Route::Complete,
            Target::OfShare(OfShare::Ciphertext, _) => Route::Download,
            Target::Page(_) => Route::Page,
        }
    }

    /// As the header `Allow`.
    fn methods(self) -> &'static str {
        match self {
            Target::OfShare(OfShare::Ciphertext, _) | Target::Page(_) => "GET, HEAD, OPTIONS",
            Target::Limits | Target::OfShare(OfShare::Info | OfShare::Watch, _) => "GET, OPTIONS",
            _ => "POST, OPTIONS",
        }
    }

    /// The limiter's share of this path is taken by its handler.
    fn limits_itself(self) -> bool {
        matches!(
            self,
            Target::Look
                | Target::Claim
                | Target::BatchCreate
                | Target::BatchClaim
                | Target::BatchInfo
                | Target::BatchRevoke
                | Target::OfShare(OfShare::Ciphertext, _)
        )
    }
}

/// Answers one request.
pub(super) async fn answer(daemon: &Arc<Daemon>, peer: Peer, request: Request<Incoming>) -> Reply {
    let started = Instant::now();
    let target = Target::of(request.uri().path());
    let checked = csrf::check(&request, &daemon.settings.public_url)
        .and_then(|()| target.ok_or_else(|| Refusal::new(ErrorCode::NotFound, "there is no such path")));
    let result = match checked {
        Ok(target) => serve(daemon, peer, target, request).await,
        Err(refusal) => {
            let client = client_addr::client(peer, request.headers(), &daemon.settings.trusted_proxies);
            daemon.limiter.admit(client, 1).map_err(Refusal::from).and(Err(refusal))
        }
    };
    let reply = result.unwrap_or_else(|refusal| {
        if refusal.code == ErrorCode::Limited {
            daemon.metrics.limited.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        refusal.reply()
    });
    daemon.metrics.answered(target.map_or(Route::Other, Target::route), reply.status().as_u16(), started.elapsed());
    reply
}

async fn serve(daemon: &Arc<Daemon>, peer: Peer, target: Target, request: Request<Incoming>) -> Result<Reply, Refusal> {
    let client = client_addr::client(peer, request.headers(), &daemon.settings.trusted_proxies);
    let method = request.method();
    if method == Method::OPTIONS {
        daemon.limiter.admit(client, 1)?;
        let mut reply = reply::empty(StatusCode::NO_CONTENT);
        reply.headers_mut().insert(header::ALLOW, HeaderValue::from_static(target.methods()));
        return Ok(reply);
    }
    if !target.methods().split(", ").any(|allowed| allowed == method.as_str()) {
        daemon.limiter.admit(client, 1)?;
        return Err(Refusal::method(target.methods()));
    }
    if !target.limits_itself() {
        daemon.limiter.admit(client, 1)?;
    }
    if request.uri().query().is_some_and(|query| !query.is_empty())
        && !matches!(target, Target::OfShare(OfShare::Watch, _) | Target::Page(_))
    {
        return Err(Refusal::malformed("the path takes no parameters"));
    }
    match target {
        Target::Limits => Ok(reply::with_type(StatusCode::OK, "application/json", daemon.limits.clone())),
        Target::Uploads => upload::upload(daemon, peer, client, request).await,
        Target::Shares => create::create(daemon, peer, request).await,
        Target::Look => claim::look(daemon, client, request).await,
        Target::Claim => claim::claim(daemon, client, request).await,
        Target::BatchCreate => create::batch_create(daemon, peer, client, request).await,
        Target::BatchClaim => claim::batch(daemon, client, request).await,
        Target::BatchInfo => Action::Info.many(daemon, client, request).await,
        Target::BatchRevoke => Action::Revoke.many(daemon, client, request).await,
        Target::OfShare(OfShare::Info, handle) => Action::Info.one(daemon, client, handle, &request).await,
        Target::OfShare(OfShare::Watch, handle) => share_handlers::watch(daemon, client, handle, &request).await,
        Target::OfShare(OfShare::Revoke, handle) => Action::Revoke.one(daemon, client, handle, &request).await,
        Target::OfShare(OfShare::Rearm, handle) => Action::Rearm.one(daemon, client, handle, &request).await,
        Target::OfShare(OfShare::Complete, handle) => download::complete(daemon, client, handle, &request).await,
        Target::OfShare(OfShare::Ciphertext, handle) => download::download(daemon, client, handle, &request).await,
        Target::Page(file) => Ok(file.reply()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_its_target() {
        let handle: Handle = "1482719382210".parse().unwrap();
        assert_eq!(Target::of("/v1/shares"), Some(Target::Shares));
        for which in OfShare::ALL {
            assert_eq!(Target::of(&which.path(handle).to_string()), Some(Target::OfShare(which, handle)));
        }
        for path in ["/", "/v1", "/v2/claim", "/v1/claim/", "/v1/shares/x", "//v1/claim", "/metrics", "/s"] {
            assert_eq!(Target::of(path), None, "{path}");
        }
    }
}
