//! Speaks HTTP with owners and claimants: one call of the store and one reply for each request.
//!
//! `listen` makes the sockets, `worker` accepts on them, `seats` says who may stay, `route` sends each request to its handler (`shares`, `claim`, `upload`,
//! `download`, `page`, each alone or by `batch`), `reply` writes the answer, `transfer` holds it to its lease while it goes out.
//! Handlers decide nothing about shares: the store does.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use lockbox_share_protocol::message::ErrorCode;
use tokio::sync::{Notify, Semaphore};

use crate::limiter::{Limiter, Rates};
use crate::metrics::{Metrics, StoreFigures};
use crate::store::ShareStore;
use crate::store::clock::{Clock, SystemClock};
use crate::store::spool::Spool;

pub mod admin;
mod batch;
mod claim;
mod download;
mod file;
pub mod floor;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guard;
mod leases;
pub mod listen;
mod message;
mod origin;
mod page;
mod places;
pub mod range;
mod refusal;
mod reply;
mod route;
pub mod running;
mod seats;
mod shares;
mod site;
pub mod tls;
mod transfer;
mod upload;
mod waiting;
pub mod worker;

#[cfg(test)]
mod lost;

pub use origin::{Network, is_loopback_authority};

/// Connections of the Unix socket that may be open at a time, beside those of the network (`places`, rule 1).
pub const LOCAL_CONNECTIONS: usize = 1024;
/// Refused connections that may linger at a time so that their clients see the answer; of few places a quarter as many.
pub const LINGERING: usize = 256;
/// Watchers that may wait at a time; each holds a connection.
const MAX_WATCHERS: usize = 1024;
/// Of these, watchers of one client: one that only waits does not keep the others from waiting.
const MAX_WATCHERS_OF_CLIENT: usize = 128;
/// Uploads that may run at a time; each has a thread that writes.
const MAX_UPLOADS: usize = 64;
/// Of these, uploads of one client, for the same reason as with batches.
const MAX_UPLOADS_OF_CLIENT: usize = 16;
/// Owners who watch are woken by changes of shares whose handles fall into the same place.
const CHANGE_PLACES: usize = 64;

/// Who may make shares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Creators {
    /// Everybody who reaches the daemon.
    Everybody,
    /// Those on the same machine: over the Unix socket, or over a loopback address without a trace of a proxy.
    ThisMachine,
    /// Those who reach its Unix socket.
    UnixSocket,
}

/// What the operator chose.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Begins the links, without a slash at its end.
    pub public_url: String,
    /// First digit of the handles, 0..=9.
    pub routing: u8,
    /// Random digits of the handles, 6..=12.
    pub digits: u32,
    /// Lifetime of shares that name none.
    pub default_expiry: Duration,
    /// Longest lifetime.
    pub max_expiry: Duration,
    /// Most bytes of one ciphertext.
    pub max_ciphertext: u64,
    /// How often clients may ask.
    pub rates: Rates,
    /// Whose forwarded addresses are believed.
    pub trusted_proxies: Vec<Network>,
    /// Who may make shares.
    pub creators: Creators,
    /// Connections of the network that may be open at a time.
    pub max_connections: usize,
    /// For the head of a request, also for the next one on the same connection.
    pub head_timeout: Duration,
    /// For a message, and between two parts of an upload.
    pub body_timeout: Duration,
    /// For a client that does not take what is sent to it.
    pub stall_timeout: Duration,
    /// How long a claimant may ask again after the last byte was sent.
    pub grace: Duration,
    /// How long running requests may go on when the daemon stops.
    pub stop_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            public_url: format!("http://127.0.0.1:{}", lockbox_share_protocol::api::DEFAULT_PORT),
            routing: 0,
            digits: 12,
            default_expiry: Duration::from_secs(15 * 60),
            max_expiry: Duration::from_secs(7 * 24 * 3600),
            max_ciphertext: 16 << 30,
            rates: Rates::default(),
            trusted_proxies: Vec::new(),
            creators: Creators::ThisMachine,
            max_connections: 20_000,
            head_timeout: Duration::from_secs(10),
            body_timeout: Duration::from_secs(30),
            stall_timeout: Duration::from_secs(60),
            grace: Duration::from_secs(60),
            stop_timeout: Duration::from_secs(30),
        }
    }
}

/// Runs what changes shares until it is done, also when the client goes away meanwhile: hyper then drops the future of the request, and
/// with it everything between a change of the store and what the daemon has to note of it.
async fn see_through<T: Send + 'static>(
    work: impl Future<Output = Result<T, reply::Refusal>> + Send + 'static,
) -> Result<T, reply::Refusal> {
    tokio::spawn(work).await.unwrap_or_else(|error| {
        tracing::error!(%error, "a change was not seen through");
        Err(reply::Refusal::new(ErrorCode::Internal, "the change was not seen through"))
    })
}

/// Everything that the workers share.
pub struct Daemon {
    store: Arc<dyn ShareStore>,
    spool: Arc<Spool>,
    settings: Settings,
    limiter: Limiter,
    metrics: Metrics,
    waiting: waiting::Waiting,
    changes: [Notify; CHANGE_PLACES],
    /// Revocations and rearmings, by the same places: answers that go out look here before each part.
    withdrawn: [AtomicU64; CHANGE_PLACES],
    leases: leases::Leases,
    network: Arc<seats::Seats>,
    local: Arc<seats::Seats>,
    lingering: Arc<Semaphore>,
    watchers: Arc<places::Places>,
    uploads: Arc<places::Places>,
    batches: Arc<places::Places>,
    clock: Arc<dyn Clock>,
    limits: bytes::Bytes,
    stopping: std::sync::atomic::AtomicBool,
}

impl Daemon {
    /// A daemon that serves what `store` and `spool` keep. `secret` is random and keys the limiter's table.
    pub fn new(store: Arc<dyn ShareStore>, spool: Arc<Spool>, settings: Settings, secret: [u8; 16]) -> Daemon {
        Daemon::by(Arc::new(SystemClock), store, spool, settings, secret)
    }

    /// The same by a clock that tests turn.
    pub(crate) fn by(
        clock: Arc<dyn Clock>,
        store: Arc<dyn ShareStore>,
        spool: Arc<Spool>,
        settings: Settings,
        secret: [u8; 16],
    ) -> Daemon {
        let connections = settings.max_connections;
        Daemon {
            network: seats::Seats::new(connections, (connections / 4).max(1), settings.head_timeout),
            local: seats::Seats::new(LOCAL_CONNECTIONS, LOCAL_CONNECTIONS, settings.head_timeout),
            lingering: Arc::new(Semaphore::new(LINGERING.min(connections / 4))),
            limiter: Limiter::new(settings.rates, secret),
            metrics: Metrics::default(),
            waiting: waiting::Waiting::default(),
            changes: std::array::from_fn(|_| Notify::new()),
            withdrawn: std::array::from_fn(|_| AtomicU64::new(0)),
            leases: leases::Leases::default(),
            batches: places::Places::new(batch::MAX_BATCHES, batch::MAX_BATCHES_OF_CLIENT),
            clock,
            watchers: places::Places::new(MAX_WATCHERS, MAX_WATCHERS_OF_CLIENT),
            uploads: places::Places::new(MAX_UPLOADS, MAX_UPLOADS_OF_CLIENT),
            limits: shares::limits(&settings),
            stopping: std::sync::atomic::AtomicBool::new(false),
            store,
            spool,
            settings,
        }
    }

    /// Throws away what was uploaded and taken by no share in time, and forgets downloads that are over. To be called every some
    /// seconds, on a thread that may block.
    pub fn discard_overdue(&self) {
        self.waiting.discard_overdue(&self.spool);
        self.leases.forget_old();
    }

    /// Throws away everything that was uploaded and taken by no share: the process ends, and its tokens with it.
    pub fn discard_waiting(&self) {
        self.waiting.discard_all(&self.spool);
    }

    /// A place for a connection, when there is one.
    fn seat(&self, peer: origin::Peer) -> Option<Arc<seats::Seat>> {
        let seats = if peer == origin::Peer::Local { &self.local } else { &self.network };
        seats.take(origin::guest(peer, &self.settings.trusted_proxies))
    }

    /// Ends connections that take too long for a head, when places are scarce. To be called every second.
    fn end_slow(&self) {
        let now = Instant::now();
        self.network.end_slow(now);
        self.local.end_slow(now);
    }

    fn figures(&self) -> StoreFigures {
        let store = self.store.figures();
        StoreFigures {
            live: store.live,
            expired: store.expired,
            segments: store.segment_files,
            segment_bytes: store.segment_bytes,
            index_bytes: store.index_bytes,
            spool_bytes: self.spool.bytes(),
            expired_bytes_pending: store.expired_bytes_pending,
            fsyncs: store.barriers,
            fsync_micros: store.barrier_micros,
            limiter_bytes: self.limiter.bytes() as u64,
            downloads: self.leases.running() as u64,
            ready: self.store.ready().is_ok(),
        }
    }

    fn is_stopping(&self) -> bool {
        self.stopping.load(std::sync::atomic::Ordering::Relaxed)
    }
}
