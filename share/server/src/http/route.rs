//! Routes each request to its handler, and counts the responses.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, StatusCode};
use lockbox_share_protocol::api::{self, ShareEndpoint};
use lockbox_share_protocol::message::ErrorCode;
use lockbox_share_protocol::token::Handle;

use super::client_addr::{self, Peer};
use super::reply::{self, Reply};
use super::request::{self, HttpRefusal};
use super::share_handlers::{self, Action};
use super::{Daemon, create, download};
use crate::metrics::Route;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endpoint {
    Limits,
    Uploads,
    Shares,
    Look,
    Claim,
    BatchInfo,
    Share(ShareEndpoint, Handle),
    Page(Asset),
}

impl Endpoint {
    fn of(path: &str) -> Option<Endpoint> {
        Some(match path {
            api::LIMITS => Endpoint::Limits,
            api::UPLOADS => Endpoint::Uploads,
            api::SHARES => Endpoint::Shares,
            api::LOOK => Endpoint::Look,
            api::CLAIM => Endpoint::Claim,
            api::BATCH_INFO => Endpoint::BatchInfo,
            _ => match Asset::of(path) {
                Some(file) => Endpoint::Page(file),
                None => ShareEndpoint::parse(path).map(|(which, handle)| Endpoint::Share(which, handle))?,
            },
        })
    }

    fn route(self) -> Route {
        match self {
            Endpoint::Limits => Route::Limits,
            Endpoint::Uploads => Route::Upload,
            Endpoint::Shares => Route::Create,
            Endpoint::Look => Route::Look,
            Endpoint::Claim => Route::Claim,
            Endpoint::BatchInfo => Route::Batch,
            Endpoint::Share(ShareEndpoint::Info, _) => Route::Info,
            Endpoint::Share(ShareEndpoint::Watch, _) => Route::Watch,
            Endpoint::Share(ShareEndpoint::Revoke, _) => Route::Revoke,
            Endpoint::Share(ShareEndpoint::Rearm, _) => Route::Rearm,
            Endpoint::Share(ShareEndpoint::Complete, _) => Route::Complete,
            Endpoint::Share(ShareEndpoint::Ciphertext, _) => Route::Download,
            Endpoint::Page(_) => Route::Page,
        }
    }

    fn methods(self) -> &'static str {
        match self {
            Endpoint::Share(ShareEndpoint::Ciphertext, _) | Endpoint::Page(_) => "GET, HEAD, OPTIONS",
            Endpoint::Limits | Endpoint::Share(ShareEndpoint::Info | ShareEndpoint::Watch, _) => "GET, OPTIONS",
            _ => "POST, OPTIONS",
        }
    }

    /// Returns whether the handler asks the limiter itself.
    fn limits_itself(self) -> bool {
        matches!(
            self,
            Endpoint::Look | Endpoint::Claim | Endpoint::BatchInfo | Endpoint::Share(ShareEndpoint::Ciphertext, _)
        )
    }
}

pub(super) async fn answer(daemon: &Arc<Daemon>, peer: Peer, request: Request<Incoming>) -> Reply {
    let started = Instant::now();
    let target = Endpoint::of(request.uri().path());
    let checked = request::check_site(&request, &daemon.public_url)
        .and_then(|()| target.ok_or_else(|| HttpRefusal::new(ErrorCode::NotFound, "the path does not exist")));
    let result = match checked {
        Ok(target) => serve(daemon, peer, target, request).await,
        Err(refusal) => {
            let client = client_addr::client(peer, request.headers(), &daemon.settings.trusted_proxies);
            daemon.limiter.admit(client, 1).map_err(HttpRefusal::from).and(Err(refusal))
        }
    };
    let reply = result.unwrap_or_else(|refusal| {
        if refusal.code == ErrorCode::Limited {
            daemon.metrics.limited.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        refusal.reply()
    });
    daemon.metrics.answered(target.map_or(Route::Other, Endpoint::route), reply.status().as_u16(), started.elapsed());
    reply
}

async fn serve(
    daemon: &Arc<Daemon>,
    peer: Peer,
    target: Endpoint,
    request: Request<Incoming>,
) -> Result<Reply, HttpRefusal> {
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
        return Err(HttpRefusal::method(target.methods()));
    }
    if !target.limits_itself() {
        daemon.limiter.admit(client, 1)?;
    }
    if request.uri().query().is_some_and(|query| !query.is_empty())
        && !matches!(target, Endpoint::Share(ShareEndpoint::Watch, _) | Endpoint::Page(_))
    {
        return Err(HttpRefusal::malformed("the path takes no parameters"));
    }
    match target {
        Endpoint::Limits => Ok(reply::with_type(StatusCode::OK, "application/json", daemon.limits.clone())),
        Endpoint::Uploads => create::upload(daemon, peer, client, request).await,
        Endpoint::Shares => create::create(daemon, peer, request).await,
        Endpoint::Look => share_handlers::look(daemon, client, request).await,
        Endpoint::Claim => share_handlers::claim(daemon, client, request).await,
        Endpoint::BatchInfo => share_handlers::batch_info(daemon, client, request).await,
        Endpoint::Share(ShareEndpoint::Info, handle) => Action::Info.one(daemon, client, handle, &request).await,
        Endpoint::Share(ShareEndpoint::Watch, handle) => share_handlers::watch(daemon, client, handle, &request).await,
        Endpoint::Share(ShareEndpoint::Revoke, handle) => Action::Revoke.one(daemon, client, handle, &request).await,
        Endpoint::Share(ShareEndpoint::Rearm, handle) => Action::Rearm.one(daemon, client, handle, &request).await,
        Endpoint::Share(ShareEndpoint::Complete, handle) => download::complete(daemon, client, handle, &request).await,
        Endpoint::Share(ShareEndpoint::Ciphertext, handle) => {
            download::download(daemon, client, handle, &request).await
        }
        Endpoint::Page(file) => Ok(file.reply()),
    }
}

/// Loads only scripts and styles of this host; no frames or forms, no text as script or element.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'";

/// One of the embedded files, made by `share/page/build.mjs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asset {
    /// The page, for every path below `/s/`: it repairs a `%23` that a mail program made of `#`.
    Page,
    Script,
    Style,
}

impl Asset {
    fn of(path: &str) -> Option<Asset> {
        match path {
            "/assets/page.js" => Some(Asset::Script),
            "/assets/page.css" => Some(Asset::Style),
            _ => path.starts_with(api::PAGE).then_some(Asset::Page),
        }
    }

    fn reply(self) -> Reply {
        let (content_type, bytes): (_, &'static [u8]) = match self {
            Asset::Page => ("text/html; charset=utf-8", include_bytes!("../../../page/dist/index.html")),
            Asset::Script => ("text/javascript; charset=utf-8", include_bytes!("../../../page/dist/page.js")),
            Asset::Style => ("text/css; charset=utf-8", include_bytes!("../../../page/dist/page.css")),
        };
        let mut reply = reply::with_type(StatusCode::OK, content_type, Bytes::from_static(bytes));
        let headers = reply.headers_mut();
        headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        headers.insert("x-robots-tag", HeaderValue::from_static("noindex, nofollow, noarchive"));
        headers.insert("cross-origin-opener-policy", HeaderValue::from_static("same-origin"));
        headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
        headers.insert(header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        reply
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_its_target() {
        let handle: Handle = "1482719382210".parse().unwrap();
        assert_eq!(Endpoint::of("/v1/shares"), Some(Endpoint::Shares));
        for which in ShareEndpoint::ALL {
            assert_eq!(Endpoint::of(&which.path(handle).to_string()), Some(Endpoint::Share(which, handle)));
        }
        for path in ["/", "/v1", "/v2/claim", "/v1/claim/", "/v1/shares/x", "//v1/claim", "/metrics", "/s"] {
            assert_eq!(Endpoint::of(path), None, "{path}");
        }
    }
}
