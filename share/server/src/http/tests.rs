//! Tests: completes store operations after the client disconnected.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use lockbox_share_protocol::capsule::{Capsule, ContentLocation};
use lockbox_share_protocol::message::{CreateReply, CreateRequest};
use lockbox_share_protocol::token::{Auth, ClaimId, Digest, Handle, LeaseToken, OwnerToken, UploadToken, Verifier};
use parking_lot::Mutex;
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinHandle;

use super::client_addr::Peer;
use super::worker::Connection;
use super::{Daemon, DaemonSettings};
use crate::store::env::SystemClock;
use crate::store::simulated::MemoryStore;
use crate::store::spool::Spool;
use crate::store::{
    ClaimGrant, LeaseFinish, LeaseGrant, NewShare, PendingReply, Periods, Result, ShareReport, ShareStore, SpoolEntry,
    StoreError, StoreMaintenance, StoreStats, WallTime,
};

/// Store that makes changes durable only when the test releases them.
struct PausedStore {
    store: MemoryStore,
    barriers: Arc<Semaphore>,
    begun: Arc<Semaphore>,
    fails: AtomicBool,
    handles: Mutex<Vec<Handle>>,
}

impl PausedStore {
    fn hold<T: Send + Unpin + 'static>(&self, answer: PendingReply<T>) -> PendingReply<T> {
        self.begun.add_permits(1);
        let barriers = self.barriers.clone();
        PendingReply::remote(async move {
            barriers.acquire().await.expect("it is never closed").forget();
            answer.await
        })
    }
}

impl ShareStore for PausedStore {
    fn create(&self, handle: Handle, share: NewShare) -> PendingReply<crate::store::ShareTimes> {
        if self.fails.swap(false, SeqCst) {
            return self.hold(PendingReply::ready(Err(StoreError::Full)));
        }
        self.handles.lock().push(handle);
        self.hold(self.store.create(handle, share))
    }

    fn look(&self, handle: Handle, auth: &Auth) -> PendingReply<WallTime> {
        self.store.look(handle, auth)
    }

    fn claim(&self, handle: Handle, auth: &Auth, id: ClaimId) -> PendingReply<ClaimGrant> {
        self.store.claim(handle, auth, id)
    }

    fn lease(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant> {
        self.store.lease(handle, token)
    }

    fn payload(&self, handle: Handle, token: &LeaseToken) -> PendingReply<LeaseGrant> {
        self.store.payload(handle, token)
    }

    fn finish(&self, handle: Handle, token: &LeaseToken, how: LeaseFinish) -> PendingReply<bool> {
        self.store.finish(handle, token, how)
    }

    fn info(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        self.store.info(handle, owner)
    }

    fn revoke(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        self.hold(self.store.revoke(handle, owner))
    }

    fn rearm(&self, handle: Handle, owner: &OwnerToken) -> PendingReply<ShareReport> {
        self.store.rearm(handle, owner)
    }
}

impl StoreMaintenance for PausedStore {
    fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    fn ready(&self) -> Result<()> {
        self.store.ready()
    }

    fn flush(&self) -> PendingReply<()> {
        self.store.flush()
    }
}

struct TestDaemon {
    daemon: Arc<Daemon>,
    store: Arc<PausedStore>,
    _directory: TempDir,
}

const OWNER: [u8; 32] = [9; 32];
const UPLOAD: [u8; UploadToken::LENGTH] = [8; UploadToken::LENGTH];

impl TestDaemon {
    /// Creates a daemon with one pending upload.
    fn new() -> TestDaemon {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::open(directory.path(), 1 << 20).unwrap();
        let store = Arc::new(PausedStore {
            store: MemoryStore::new(Arc::new(SystemClock), Periods::default()).unwrap(),
            barriers: Arc::new(Semaphore::new(0)),
            begun: Arc::new(Semaphore::new(0)),
            fails: AtomicBool::new(false),
            handles: Mutex::default(),
        });
        let (settings, url) = (DaemonSettings::default(), "http://127.0.0.1:7377".to_owned());
        let daemon = Arc::new(Daemon::new(store.clone(), spool, settings, url, [7; 16]));
        let entry = SpoolEntry { id: [1; 16], length: 300, digest: Digest::new([2; 32]) };
        daemon.pending_uploads.add(UploadToken::new(UPLOAD), OwnerToken::new(OWNER).verifier(), entry);
        TestDaemon { daemon, store, _directory: directory }
    }

    fn connect(&self) -> (DuplexStream, JoinHandle<()>, watch::Sender<bool>) {
        let (near, far) = tokio::io::duplex(64 * 1024);
        let (stop, stopped) = watch::channel(false);
        let peer = Peer::Address(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let served = tokio::spawn(Connection::new(&self.daemon, peer, stopped).unwrap().serve(far));
        (near, served, stop)
    }

    /// Sends a request, waits until the store has it, and goes away.
    async fn ask_and_leave(&self, path: &str, body: &str) {
        let (mut near, served, _stop) = self.connect();
        near.write_all(&request(path, body)).await.unwrap();
        self.store.begun.acquire().await.unwrap().forget();
        drop(near);
        // The handler is gone with its connection.
        served.await.unwrap();
    }

    /// The head of the answer and its message.
    async fn ask(&self, path: &str, body: &str) -> (String, Value) {
        let (mut near, _served, _stop) = self.connect();
        near.write_all(&request(path, body)).await.unwrap();
        let mut answer = Vec::new();
        tokio::time::timeout(Duration::from_secs(60), near.read_to_end(&mut answer)).await.unwrap().unwrap();
        let text = String::from_utf8(answer).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), serde_json::from_str(body).unwrap())
    }
}

fn request(path: &str, body: &str) -> Vec<u8> {
    let owner = OwnerToken::new(OWNER).to_text().to_string();
    let length = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nauthorization: Bearer {owner}\r\n\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .into_bytes()
}

fn wanted() -> String {
    let seeds = super::fuzzing::seeds("capsule");
    let inside = Capsule::decode(seeds[0].clone()).unwrap();
    let content = ContentLocation::Spooled { size: 300, digest: Digest::new([2; 32]) };
    let create = CreateRequest {
        verifier: Verifier::new([3; 32]),
        expires_in: None,
        max_claims: 1,
        capsule: Capsule::new(content, inside.sealed()).unwrap(),
        upload: Some(UploadToken::new(UPLOAD)),
    };
    serde_json::to_string(&create).unwrap()
}

/// A repeat that overtakes the first is put off; after the barrier it gets the share that was made
/// for the connection that broke.
#[tokio::test]
async fn a_share_whose_client_went_away_is_made_once_and_told_when_it_asks_again() {
    let stage = TestDaemon::new();
    let create = wanted();
    stage.ask_and_leave("/v1/shares", &create).await;
    let (head, message) = stage.ask("/v1/shares", &create).await;
    assert!(head.starts_with("http/1.1 503") && head.contains("retry-after: "), "{head}");
    assert_eq!(message["error"], "unavailable");
    stage.store.barriers.add_permits(1);
    let until_made = async {
        while stage.daemon.metrics.created.load(SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), until_made).await.unwrap();
    let (head, created) = stage.ask("/v1/shares", &create).await;
    assert!(head.starts_with("http/1.1 20"), "{head}");
    let created: CreateReply = serde_json::from_value(created).unwrap();
    assert_eq!(*stage.store.handles.lock(), [created.handle]);
}

#[tokio::test]
async fn an_upload_whose_share_failed_after_its_client_went_away_waits_again() {
    let stage = TestDaemon::new();
    stage.store.fails.store(true, SeqCst);
    stage.ask_and_leave("/v1/shares", &wanted()).await;
    stage.store.barriers.add_permits(2);
    let mut answer = stage.ask("/v1/shares", &wanted()).await;
    while answer.0.starts_with("http/1.1 503") {
        answer = stage.ask("/v1/shares", &wanted()).await;
    }
    assert!(answer.0.starts_with("http/1.1 201"), "{answer:?}");
}

#[tokio::test]
async fn a_share_is_taken_back_for_its_downloads_also_when_its_owner_went_away() {
    let stage = TestDaemon::new();
    stage.store.barriers.add_permits(1);
    let (head, created) = stage.ask("/v1/shares", &wanted()).await;
    assert!(head.starts_with("http/1.1 201"), "{head}");
    stage.store.begun.acquire().await.unwrap().forget();
    let created: CreateReply = serde_json::from_value(created).unwrap();
    let before = stage.daemon.notifier.withdrawals(created.handle);
    stage.ask_and_leave(&format!("/v1/shares/{}/revoke", created.handle), "").await;
    assert_eq!(stage.daemon.notifier.withdrawals(created.handle), before);
    stage.store.barriers.add_permits(1);
    let until_withdrawn = async {
        while stage.daemon.notifier.withdrawals(created.handle) == before {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), until_withdrawn).await.unwrap();
}
