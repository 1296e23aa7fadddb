//! HTTP interface for owners and claimants: one store call and one response per request.
//!
//! `server` opens the sockets, `worker` accepts connections, `admission` limits them, `route`
//! passes each request to its handler (`create`, `share_handlers`, `download`), and `reply` builds
//! the response and binds it to its lease. Handlers decide nothing about shares: the store does.
//! [`Daemon`] is the state that all of them share.

mod admission;
mod client_addr;
mod create;
mod download;
#[cfg(any(test, debug_assertions))]
pub mod fuzzing;
mod reply;
mod request;
mod route;
pub mod server;
mod settings;
mod share_handlers;
#[cfg(test)]
mod tests;
mod worker;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use bytes::Bytes;
use lockbox_share_protocol::message::ErrorCode;
use lockbox_share_protocol::token::Handle;
use tokio::sync::{Notify, Semaphore};

use self::admission::{ConcurrencyLimit, ConnectionSlot, ConnectionSlots};
use self::client_addr::Peer;
use self::create::PendingUploads;
use self::reply::LeaseTransfers;
use self::request::HttpRefusal;
use crate::limiter::{ClientId, Limiter};
use crate::metrics::{Gauges, Metrics};
use crate::store::env::{Clock, SystemClock};
use crate::store::spool::Spool;
use crate::store::{ShareStore, StoreError};

pub use client_addr::Network;
pub use settings::{CreatorPolicy, DaemonSettings};

/// Maximum connections of the Unix socket, in addition to the network's (`admission`, rule 1).
pub const LOCAL_CONNECTIONS: usize = 1024;
/// Refused connections that linger so that clients read the answer, at most a quarter of all.
pub const LINGERING: usize = 256;
/// Watchers that may wait at a time; each holds a connection.
const MAX_WATCHERS: usize = 1024;
/// Of these, watchers of one client: one that only waits does not keep the others from waiting.
const MAX_WATCHERS_OF_CLIENT: usize = 128;
/// Uploads that may run at a time; each has a thread that writes.
const MAX_UPLOADS: usize = 64;
/// Of these, uploads of one client, for the same reason as with batches.
const MAX_UPLOADS_OF_CLIENT: usize = 16;
/// Concurrent batches. The answer of one has up to 100 KiB: 64 of them hold at most 6.3 MiB, where
/// 20,000 connections could ask for 2 GB.
const MAX_BATCHES: usize = 64;
/// Of these, batches of one client: a slow one keeps its permits for the time of a message.
const MAX_BATCHES_OF_CLIENT: usize = 16;

/// Completes a change also after the client disconnected: hyper then drops the future of the
/// request, and with it all steps between the store's change and the daemon's own bookkeeping.
async fn see_through<T: Send + 'static>(
    work: impl Future<Output = Result<T, HttpRefusal>> + Send + 'static,
) -> Result<T, HttpRefusal> {
    tokio::spawn(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a change was not completed");
        Err(HttpRefusal::new(ErrorCode::Internal, "the change was not completed"))
    })
}

pub struct Daemon {
    store: Arc<dyn ShareStore>,
    spool: Arc<Spool>,
    settings: DaemonSettings,
    /// Begins the links, without a slash at its end.
    public_url: String,
    creators: CreatorPolicy,
    limiter: Limiter,
    metrics: Metrics,
    pending_uploads: PendingUploads,
    notifier: ShareNotifier,
    leases: LeaseTransfers,
    network: Arc<ConnectionSlots>,
    local: Arc<ConnectionSlots>,
    lingering: Arc<Semaphore>,
    watchers: Arc<ConcurrencyLimit>,
    uploads: Arc<ConcurrencyLimit>,
    batches: Arc<ConcurrencyLimit>,
    clock: Arc<dyn Clock>,
    limits: Bytes,
    stopping: AtomicBool,
}

impl Daemon {
    /// Creates a daemon over `store` and `spool`. `secret` is random and keys the limiter's table.
    pub fn new(
        store: Arc<dyn ShareStore>,
        spool: Arc<Spool>,
        settings: DaemonSettings,
        public_url: String,
        secret: [u8; 16],
    ) -> Daemon {
        let connections = settings.max_connections;
        Daemon {
            network: ConnectionSlots::new(connections, (connections / 4).max(1), settings.head_timeout),
            local: ConnectionSlots::new(LOCAL_CONNECTIONS, LOCAL_CONNECTIONS, settings.head_timeout),
            lingering: Arc::new(Semaphore::new(LINGERING.min(connections / 4))),
            limiter: Limiter::new(settings.rates, secret),
            metrics: Metrics::default(),
            pending_uploads: PendingUploads::default(),
            notifier: ShareNotifier::new(),
            leases: LeaseTransfers::default(),
            batches: ConcurrencyLimit::new(MAX_BATCHES, MAX_BATCHES_OF_CLIENT),
            clock: Arc::new(SystemClock),
            watchers: ConcurrencyLimit::new(MAX_WATCHERS, MAX_WATCHERS_OF_CLIENT),
            uploads: ConcurrencyLimit::new(MAX_UPLOADS, MAX_UPLOADS_OF_CLIENT),
            limits: settings.limits(&public_url),
            public_url,
            creators: settings.creator_policy(),
            stopping: AtomicBool::new(false),
            store,
            spool,
            settings,
        }
    }

    /// Discards expired uploads and ended downloads, every few seconds on a thread that may block.
    pub(crate) fn discard_overdue(&self) {
        self.pending_uploads.discard_overdue(&self.spool);
        self.leases.forget_old();
    }

    /// Discards all pending uploads: the process ends, and its tokens with it.
    pub(crate) fn discard_waiting(&self) {
        self.pending_uploads.discard_older(&self.spool, Duration::ZERO);
    }

    fn slot(&self, peer: Peer) -> Option<Arc<ConnectionSlot>> {
        let slots = if peer == Peer::Local { &self.local } else { &self.network };
        slots.take(client_addr::slot_owner(peer, &self.settings.trusted_proxies))
    }

    /// Ends connections that take too long for a head, when slots are scarce. Call it every second.
    fn end_slow(&self) {
        let now = Instant::now();
        self.network.end_slow(now);
        self.local.end_slow(now);
    }

    fn metrics_text(&self) -> String {
        let mut store = self.store.stats();
        // Valkey's spool is this daemon's own, and not the store's.
        store.spool_bytes = self.spool.bytes();
        self.metrics.text(&Gauges {
            store,
            limiter_bytes: self.limiter.bytes() as u64,
            downloads: self.leases.running() as u64,
            ready: self.store.ready().is_ok(),
        })
    }

    /// Maps a store error to a refusal. A request without proof is counted as a guess.
    fn refused(&self, client: ClientId, error: StoreError) -> HttpRefusal {
        if error == StoreError::Unknown {
            self.metrics.misses.fetch_add(1, Relaxed);
            self.limiter.missed(client);
        }
        HttpRefusal::from(error)
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(Relaxed)
    }
}

/// Number of notification slots; shares in the same slot wake each other's watchers.
const SLOTS: usize = 64;

struct ShareNotifier([NotifierSlot; SLOTS]);

#[derive(Default)]
struct NotifierSlot {
    changed: Notify,
    withdrawals: AtomicU64,
}

impl ShareNotifier {
    fn new() -> ShareNotifier {
        ShareNotifier(std::array::from_fn(|_| NotifierSlot::default()))
    }

    fn slot(&self, handle: Handle) -> &NotifierSlot {
        // Handles are random, so their own digits spread them.
        &self.0[handle.number() as usize % SLOTS]
    }

    fn changed(&self, handle: Handle) {
        self.slot(handle).changed.notify_waiters();
    }

    /// Withdraws a share's leases from its running responses, and wakes its watchers.
    fn withdraw(&self, handle: Handle) {
        self.slot(handle).withdrawals.fetch_add(1, Relaxed);
        self.changed(handle);
    }

    /// Grows when leases of this share were withdrawn. Other shares may have the same number.
    fn withdrawals(&self, handle: Handle) -> u64 {
        self.slot(handle).withdrawals.load(Relaxed)
    }

    /// Wakes all watchers, because the daemon stops.
    fn wake_all(&self) {
        self.0.iter().for_each(|slot| slot.changed.notify_waiters());
    }
}
