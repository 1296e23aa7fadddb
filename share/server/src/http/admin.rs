//! Health and metrics, on a listener of their own.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use lockbox_share_protocol::message::ErrorCode;
use tokio::net::TcpListener;

use super::admission::{ConnectionSlots, SlotOwner};
use super::daemon::Daemon;
use super::guard::StallGuard;
use super::refusal::Refusal;
use super::reply::{self, Reply};
use crate::limiter::ClientId;

/// Connections at a time; a scraper needs one.
const CONNECTIONS: usize = 32;
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Answers for as long as it is polled. A connection without a request makes room, as on the other
/// sockets (`permits`, rule 3): a probe that had to wait for idle connections would take the daemon
/// for dead.
pub async fn serve(daemon: Arc<Daemon>, listener: TcpListener) {
    let slots = ConnectionSlots::new(CONNECTIONS, CONNECTIONS, HEAD_TIMEOUT);
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(_) => {
                // No descriptors: others will be closed.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let Some(slot) = slots.take(SlotOwner::Client(ClientId::at(address.ip()))) else { continue };
        let daemon = daemon.clone();
        tokio::spawn(async move {
            let service = service_fn(|request: Request<Incoming>| {
                let active = slot.request();
                let reply = answer(&daemon, &request).map(|body| body.of(active));
                async move { Ok::<_, Infallible>(reply) }
            });
            let stream = StallGuard::new(stream, HEAD_TIMEOUT, Some(slot.clone()));
            let connection = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_TIMEOUT)
                .max_buf_size(8192)
                .serve_connection(TokioIo::new(stream), service);
            tokio::select! {
                _ = tokio::time::timeout(Duration::from_secs(60), connection) => {}
                () = slot.evicted() => {}
            }
        });
    }
}

fn answer(daemon: &Daemon, request: &Request<Incoming>) -> Reply {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return Refusal::method("GET, HEAD").reply();
    }
    let text = |status, text: String| reply::with_type(status, "text/plain; version=0.0.4", Bytes::from(text));
    match request.uri().path() {
        "/healthz" => text(StatusCode::OK, "ok\n".into()),
        "/readyz" if daemon.is_stopping() => text(StatusCode::SERVICE_UNAVAILABLE, "the daemon stops\n".into()),
        "/readyz" => match daemon.store.ready() {
            Ok(()) => text(StatusCode::OK, "ready\n".into()),
            Err(error) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n")),
        },
        "/metrics" => text(StatusCode::OK, daemon.metrics_text()),
        _ => Refusal::new(ErrorCode::NotFound, "there is no such path").reply(),
    }
}
