//! What a client can send, for the fuzzer: whole connections, ranges, capsules, messages, paths and
//! forwarded addresses. Compiled for the fuzzer and for the tests of hostile clients only.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use bytes::Bytes;
use clap::{Args, FromArgMatches};
use hyper::HeaderMap;
use hyper::header::HeaderValue;
use lockbox_share_protocol::api::ShareEndpoint;
use lockbox_share_protocol::capsule::{Capsule, SAMPLE_AGE_HEADER};
use lockbox_share_protocol::message::{Batch, ClaimRequest, CreateRequest, ShareState};
use lockbox_share_protocol::token::{Handle, LeaseToken, OwnerToken, Verifier};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::Runtime;
use tokio::sync::{Notify, watch};

use super::client_addr::{self, Peer};
use super::download::{RangeDecision, RangeHeaders, decide};
use super::worker::Connection;
use super::{Daemon, DaemonSettings, Network, request};
use crate::limiter::Rates;
use crate::store::env::SystemClock;
use crate::store::simulated::MemoryStore;
use crate::store::spool::Spool;
use crate::store::{NewShare, Periods, ShareStore};

/// Connections that one daemon serves: what hostile but valid messages make stays in its memory.
const RUNS: u32 = 1000;

/// Turns of the event loop for the requests of one input.
const TURNS: u32 = 50;

/// For the answers that an input is known to have, however busy the disk is.
const PATIENCE: Duration = Duration::from_secs(120);

const ANSWER: &[u8] = b"HTTP/1.1 ";

thread_local! {
    static STAGE: RefCell<Option<Stage>> = const { RefCell::new(None) };
}

/// A daemon with one share of which no input has proof.
struct Stage {
    runtime: Runtime,
    daemon: Arc<Daemon>,
    handle: Handle,
    owner: OwnerToken,
    directory: PathBuf,
    runs: u32,
}

impl Default for DaemonSettings {
    /// Returns the settings of a command line without options.
    fn default() -> DaemonSettings {
        let command = DaemonSettings::augment_args(clap::Command::new("serve"));
        let matches = command.try_get_matches_from(["serve"]).expect("no option is required");
        DaemonSettings::from_arg_matches(&matches).expect("the defaults are valid")
    }
}

impl Stage {
    fn new() -> Stage {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Relaxed);
        let directory = std::env::temp_dir().join(format!("lockbox-share-fuzz-{}-{number}", std::process::id()));
        let spool = Spool::open(&directory, 1 << 20).expect("a directory for the spool");
        let store = MemoryStore::new(Arc::new(SystemClock), Periods::default()).expect("a store");
        let handle = "1482719382210".parse().expect("a handle");
        let owner = OwnerToken::new([9; 32]);
        let share = NewShare {
            auth: Verifier::new([1; 32]),
            owner: owner.verifier(),
            ttl: Duration::from_secs(900),
            claims: 1,
            capsule: Bytes::from_static(b"content"),
            payload: None,
        };
        store.create(handle, share).wait().expect("a share");
        let settings =
            DaemonSettings { rates: Rates { per_minute: 0, ..Rates::default() }, ..DaemonSettings::default() };
        let daemon = Arc::new(Daemon::new(Arc::new(store), spool, settings, "http://127.0.0.1:7377".into(), [7; 16]));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("an event loop");
        Stage { runtime, daemon, handle, owner, directory, runs: 0 }
    }

    /// Sends bytes over one connection and returns what came back. The daemon takes the end of what
    /// is sent for the client's end, so answers that need a thread are missing unless that waits
    /// for as many as are `expected`.
    fn run(&mut self, peer: Peer, bytes: &[u8], expected: usize) -> Vec<u8> {
        self.runs += 1;
        let daemon = &self.daemon;
        self.runtime.block_on(async {
            let (near, far) = tokio::io::duplex(64 * 1024);
            let (_stop, stopped) = watch::channel(false);
            let served = tokio::spawn(Connection::new(daemon, peer, stopped).expect("a place").serve(far));
            let (mut answers, mut requests) = tokio::io::split(near);
            let mut received = Vec::new();
            let answered = Notify::new();
            let send = async {
                // The daemon may end the connection before it has read everything.
                let _ = requests.write_all(bytes).await;
                for _ in 0..TURNS {
                    tokio::task::yield_now().await;
                }
                if expected > 0 {
                    let _ = tokio::time::timeout(PATIENCE, answered.notified()).await;
                }
                let _ = requests.shutdown().await;
            };
            let read = async {
                let mut part = [0; 4096];
                loop {
                    let length = answers.read(&mut part).await.expect("memory fails no read");
                    received.extend_from_slice(&part[..length]);
                    if length == 0 || received.windows(ANSWER.len()).filter(|text| *text == ANSWER).count() >= expected
                    {
                        answered.notify_one();
                    }
                    if length == 0 {
                        return;
                    }
                }
            };
            tokio::join!(send, read);
            served.await.expect("a connection ends without a panic");
            received
        })
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Everything that comes over one connection: heads, bodies, requests in a row. The first byte says
/// from where.
///
/// # Panics
/// When the answer is no HTTP or a failure of the daemon, or when a share was changed without
/// proof: that is the finding.
pub fn connection(data: &[u8]) {
    let Some((&from, bytes)) = data.split_first() else { return };
    let peer = match from % 3 {
        0 => Peer::Local,
        1 => Peer::Address(IpAddr::V4(Ipv4Addr::LOCALHOST)),
        _ => Peer::Address(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1))),
    };
    STAGE.with_borrow_mut(|stage| {
        if stage.as_ref().is_some_and(|stage| stage.runs >= RUNS) {
            *stage = None;
        }
        let stage = stage.get_or_insert_with(Stage::new);
        let answer = stage.run(peer, bytes, 0);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "an answer that is no HTTP");
        assert!(!answer.windows(12).any(|text| text == b"HTTP/1.1 500"), "the daemon failed");
        let info = stage.daemon.store.info(stage.handle, &stage.owner).wait().expect("the share is there");
        assert!(info.state == ShareState::Armed && info.version == 1, "a share was changed without proof");
        assert!(stage.daemon.leases.running() == 0 && stage.daemon.metrics.connections.load(Relaxed) == 0);
        stage.daemon.discard_waiting();
    });
}

/// A range, `If-Range` and `If-None-Match` on three lines, behind eight bytes of length.
pub fn ranges(data: &[u8]) {
    let Some((length, rest)) = data.split_first_chunk::<8>() else { return };
    let length = u64::from_le_bytes(*length);
    let mut fields = rest.split(|&byte| byte == b'\n');
    let wanted = RangeHeaders { range: fields.next(), if_range: fields.next(), if_none_match: fields.next() };
    if let RangeDecision::Part { first, last } = decide(&wanted, length, "\"tag\"") {
        assert!(first <= last && last < length);
    }
}

/// The bytes of a capsule: refused, or the same when they are put together again.
pub fn capsule(data: &[u8]) {
    if let Ok(capsule) = Capsule::decode(data.to_vec()) {
        let again = Capsule::new(capsule.content(), capsule.sealed()).expect("a capsule that was read is one");
        assert_eq!(again.as_bytes(), data);
    }
}

/// The text of a request: its message, its path and query, its headers.
pub fn request(data: &[u8]) {
    let _ = serde_json::from_slice::<ClaimRequest>(data);
    let _ = serde_json::from_slice::<Batch>(data);
    if let Ok(create) = serde_json::from_slice::<CreateRequest>(data) {
        let text = serde_json::to_vec(&create).expect("a message is text");
        assert!(serde_json::from_slice::<CreateRequest>(&text).is_ok());
    }
    let mut headers = HeaderMap::new();
    if let Ok(value) = HeaderValue::from_bytes(data) {
        headers.insert("x-forwarded-for", value.clone());
        headers.insert("authorization", value);
    }
    let trusted: [Network; 1] = ["192.0.2.0/24".parse().expect("a network")];
    let peer = client_addr::Peer::Address(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)));
    let _ = client_addr::client(peer, &headers, &trusted);
    let _ = request::bearer::<LeaseToken>(&headers);
    if let Ok(text) = std::str::from_utf8(data) {
        let _ = request::parameters(Some(text), ["version", "state", "wait"]);
        if let Some((which, handle)) = ShareEndpoint::parse(text) {
            assert_eq!(which.path(handle).to_string(), text);
        }
    }
}

pub fn seeds(name: &str) -> Vec<Vec<u8>> {
    let head = SAMPLE_AGE_HEADER;
    match name {
        "range" => vec![b"\x00\x10\0\0\0\0\0\0bytes=5-9\n\"tag\"\n\"x\"".to_vec()],
        "capsule" => {
            let mut bytes = b"lbxs\x01\x01".to_vec();
            bytes.extend_from_slice(&((head.len() + 40) as u16).to_le_bytes());
            bytes.extend_from_slice(head.as_bytes());
            bytes.extend_from_slice(&[7; 40]);
            vec![bytes]
        }
        "connection" => connections(head),
        "request" => vec![
            br#"{"handle":"1482719382210","auth":"AAAA","claim":"AAAA"}"#.to_vec(),
            b"/v1/shares/1482719382210/ciphertext".to_vec(),
            b"version=3&wait=5&state=armed".to_vec(),
            b"203.0.113.9, [2001:db8::1]:80, 192.0.2.7".to_vec(),
        ],
        _ => Vec::new(),
    }
}

fn connections(age_head: &str) -> Vec<Vec<u8>> {
    let (long, short) = ("A".repeat(43), "A".repeat(22));
    let ask = |method: &str, path: &str, more: &str, body: &str| {
        let length = if method == "POST" { format!("content-length: {}\r\n", body.len()) } else { String::new() };
        format!("{method} {path} HTTP/1.1\r\nhost: localhost\r\n{more}{length}\r\n{body}")
    };
    let of_share = "/v1/shares/1482719382210";
    let owner = format!("authorization: Bearer {long}\r\n");
    let range = format!("range: bytes=5-\r\nif-range: \"x\"\r\nauthorization: Bearer {short}\r\n");
    let forwarded = format!("{owner}x-forwarded-for: 192.0.2.7\r\n");
    let json = "content-type: application/json\r\n";
    let claim = format!(r#"{{"handle":"1482719382210","auth":"{long}","claim":"{short}"}}"#);
    let sealed = format!("{age_head}{}", "x".repeat(40));
    let upload = format!(
        "POST /v1/uploads HTTP/1.1\r\nhost: localhost\r\n{owner}content-type: application/octet-stream\r\n\
         transfer-encoding: chunked\r\n\r\n{:x}\r\n{sealed}\r\n0\r\n\r\n",
        sealed.len()
    );
    let texts = [
        [ask("GET", "/v1/limits", "", ""), ask("HEAD", "/s/1482719382210", "", "")].concat(),
        ask("GET", &format!("{of_share}/ciphertext"), &range, ""),
        ask("POST", "/v1/claim", json, &claim),
        [ask("POST", &format!("{of_share}/revoke"), &owner, ""), ask("OPTIONS", "/v1/uploads", "", "")].concat(),
        upload,
        ask("POST", "/v1/batch/info", &format!("{owner}{json}"), r#"{"items":["1482719382210"]}"#),
        ask("GET", &format!("{of_share}/watch?version=3&wait=0"), &forwarded, ""),
    ];
    texts.iter().enumerate().map(|(number, text)| [&[number as u8][..], text.as_bytes()].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statuses(answer: &[u8]) -> Vec<String> {
        let text = String::from_utf8_lossy(answer).into_owned();
        text.split("HTTP/1.1 ").skip(1).map(|rest| rest[..3].to_owned()).collect()
    }

    #[test]
    fn the_first_inputs_reach_their_handlers() {
        let mut stage = Stage::new();
        let expected: [&[&str]; 7] =
            [&["200", "200"], &["404"], &["404"], &["404", "204"], &["201"], &["200"], &["404"]];
        let inputs = seeds("connection");
        assert_eq!(inputs.len(), expected.len());
        for (seed, expected) in inputs.iter().zip(expected) {
            assert_eq!(statuses(&stage.run(Peer::Local, &seed[1..], expected.len())), expected);
        }
    }

    #[test]
    fn hostile_connections_change_nothing_without_proof() {
        let mut random = crate::seeded::fresh_numbers();
        for input in seeds("connection") {
            connection(&input);
            for _ in 0..100 {
                let mut changed = input.clone();
                for _ in 0..1 + random() % 4 {
                    let at = random() % changed.len();
                    match random() % 4 {
                        0 => changed[at] = [0, b' ', b'\r', b'\n', b'0', 0xff][random() % 6],
                        1 => changed[at] = random() as u8,
                        2 => changed.truncate(at.max(1)),
                        _ => changed.extend_from_within(at..),
                    }
                    changed.truncate(4096);
                }
                connection(&changed);
            }
        }
    }
}
