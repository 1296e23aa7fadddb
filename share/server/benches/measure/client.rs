//! Client of the measurements: asks as fast as answers come, over a fixed number of connections at
//! a time, and keeps the latencies. Its requests are written once and then copied.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use lockbox_share_protocol::api;
use lockbox_share_protocol::capsule::{Capsule, ContentLocation, SAMPLE_AGE_HEADER};
use lockbox_share_protocol::message::{CreateRequest, Lease, UploadReply};
use lockbox_share_protocol::token::{Auth, ClaimId, Handle, OwnerToken};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::processors;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Workload {
    /// Shares are made.
    Share,
    /// Shares that were made before are claimed.
    Fetch,
    /// Each share is made and then claimed.
    Flow,
    /// Requests of the server's limits.
    Get,
}

impl Workload {
    pub(super) fn word(self) -> &'static str {
        match self {
            Workload::Share => "share",
            Workload::Fetch => "fetch",
            Workload::Flow => "flow",
            Workload::Get => "get",
        }
    }

    pub(super) fn requests_each(self) -> u64 {
        if self == Workload::Flow { 2 } else { 1 }
    }
}

pub(super) struct Load {
    pub(super) address: SocketAddr,
    pub(super) messages: Messages,
    /// Handles to claim, for `Fetch`.
    pub(super) handles: Vec<String>,
    pub(super) workload: Workload,
    pub(super) requests: u64,
    pub(super) concurrency: usize,
    pub(super) keep_alive: bool,
    /// Requests, or flows, a second; None asks again as soon as an answer came.
    pub(super) rate: Option<u64>,
    /// The first one is due then.
    pub(super) begin: Instant,
}

pub(super) struct LoadResult {
    pub(super) done: u64,
    pub(super) failed: u64,
    pub(super) took: Duration,
    /// Microseconds of each, in order of size.
    latencies: Vec<u32>,
}

impl LoadResult {
    pub(super) fn percentile(&self, percent: f64) -> u32 {
        let place = (self.latencies.len() as f64 * percent / 100.0) as usize;
        self.latencies.get(place.min(self.latencies.len().saturating_sub(1))).copied().unwrap_or(0)
    }
}

/// Real answers, head and body.
pub(super) struct Sample {
    pub(super) created: Vec<u8>,
    pub(super) claimed: Vec<u8>,
}

pub(super) fn event_loop() -> Result<tokio::runtime::Runtime, String> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| error.to_string())
}

/// One share made and claimed.
pub(super) fn sample(address: SocketAddr, messages: &Messages) -> Result<Sample, String> {
    event_loop()?.block_on(async {
        let mut client_connection = BenchClient::new(address, false);
        client_connection.ask(messages.create(false).as_bytes()).await?;
        let created = client_connection.answer.clone();
        let handle = handles_in(&created).next().ok_or("the daemon made no share")?;
        client_connection.ask(messages.claim(&handle, 0, false).as_bytes()).await?;
        Ok(Sample { created, claimed: client_connection.answer })
    })
}

/// Connections that make shares before a measurement: they share the barriers of the store.
const PRELOAD_CONNECTIONS: u64 = 100;

/// Makes shares over many connections; their handles.
pub(super) fn preload(address: SocketAddr, messages: &Messages, shares: u64) -> Result<Vec<String>, String> {
    let create: Arc<str> = messages.create(true).into();
    let make = |create: Arc<str>, count: u64| async move {
        let mut connection = BenchClient::new(address, true);
        let mut handles = Vec::new();
        for _ in 0..count {
            connection.ask(create.as_bytes()).await?;
            handles.push(handles_in(&connection.answer).next().ok_or("the daemon made no share")?);
        }
        Ok::<_, String>(handles)
    };
    event_loop()?.block_on(async {
        let counts = (0..PRELOAD_CONNECTIONS).map(|number| (shares + number) / PRELOAD_CONNECTIONS);
        let making: Vec<_> = counts.map(|count| tokio::spawn(make(create.clone(), count))).collect();
        let mut handles = Vec::new();
        for part in making {
            handles.extend(part.await.map_err(|error| error.to_string())??);
        }
        Ok(handles)
    })
}

fn handles_in(answer: &[u8]) -> impl Iterator<Item = String> {
    let text = std::str::from_utf8(answer).unwrap_or_default();
    text.split("\"handle\":\"").skip(1).filter_map(|rest| rest.split('"').next()).map(str::to_owned)
}

pub(super) fn run(load: Load) -> Result<LoadResult, String> {
    let threads = processors().min(load.concurrency);
    let load = Arc::new(load);
    let (next, failed) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let began = Instant::now();
    let running: Vec<_> = (0..threads)
        .map(|thread| {
            let (load, next, failed) = (load.clone(), next.clone(), failed.clone());
            let tasks = load.concurrency / threads + usize::from(thread < load.concurrency % threads);
            std::thread::spawn(move || -> Result<Vec<u32>, String> {
                let runtime = event_loop()?;
                runtime.block_on(async {
                    let tasks: Vec<_> =
                        (0..tasks).map(|_| tokio::spawn(ask_on(load.clone(), next.clone(), failed.clone()))).collect();
                    let mut latencies = Vec::new();
                    for task in tasks {
                        latencies.extend(task.await.map_err(|error| error.to_string())?);
                    }
                    Ok(latencies)
                })
            })
        })
        .collect();
    let mut latencies = Vec::new();
    for thread in running {
        latencies.extend(thread.join().map_err(|_| "a thread of the client ended by a panic")??);
    }
    let took = began.elapsed();
    latencies.sort_unstable();
    Ok(LoadResult { done: latencies.len() as u64, failed: failed.load(Relaxed), took, latencies })
}

/// One connection's worth of the load. A failure is counted and not repeated.
async fn ask_on(load: Arc<Load>, next: Arc<AtomicU64>, failed: Arc<AtomicU64>) -> Vec<u32> {
    let mut latencies = Vec::new();
    let mut client_connection = BenchClient::new(load.address, load.keep_alive);
    let create = load.messages.create(load.keep_alive);
    let get = Messages::get(load.keep_alive);
    loop {
        let number = next.fetch_add(1, Relaxed);
        if number >= load.requests {
            return latencies;
        }
        let began = match load.rate {
            // From the time that it was due: what an answer that is late holds up counts.
            Some(rate) => {
                let due = load.begin + Duration::from_nanos(number * 1_000_000_000 / rate);
                tokio::time::sleep_until(due.into()).await;
                due
            }
            None => Instant::now(),
        };
        let claim = |handle: &str| load.messages.claim(handle, number, load.keep_alive);
        let done = match load.workload {
            Workload::Share => client_connection.succeeds(create.as_bytes()).await,
            Workload::Get => client_connection.succeeds(get.as_bytes()).await,
            Workload::Fetch => match load.handles.get(usize::try_from(number).unwrap_or(usize::MAX)) {
                Some(handle) => client_connection.succeeds(claim(handle).as_bytes()).await,
                None => false,
            },
            Workload::Flow => {
                let made = client_connection.succeeds(create.as_bytes()).await;
                let handle = handles_in(&client_connection.answer).next();
                match handle.filter(|_| made) {
                    Some(handle) => client_connection.succeeds(claim(&handle).as_bytes()).await,
                    None => false,
                }
            }
        };
        if done {
            latencies.push(u32::try_from(began.elapsed().as_micros()).unwrap_or(u32::MAX));
        } else {
            failed.fetch_add(1, Relaxed);
        }
    }
}

/// One connection, or one after the other.
pub(super) struct BenchClient {
    address: SocketAddr,
    stream: Option<TcpStream>,
    keep_alive: bool,
    pub(super) answer: Vec<u8>,
}

impl BenchClient {
    pub(super) fn new(address: SocketAddr, keep_alive: bool) -> BenchClient {
        BenchClient { address, stream: None, keep_alive, answer: Vec::new() }
    }

    pub(super) fn body(&self) -> &[u8] {
        let end = self.answer.windows(4).position(|window| window == b"\r\n\r\n");
        end.map_or(&[], |end| &self.answer[end + 4..])
    }

    async fn succeeds(&mut self, request: &[u8]) -> bool {
        let done = self.ask(request).await.is_ok();
        done && (self.answer.starts_with(b"HTTP/1.1 200") || self.answer.starts_with(b"HTTP/1.1 201"))
    }

    /// Sends a request, and reads the answer to its end or, with keep-alive, to its length.
    pub(super) async fn ask(&mut self, request: &[u8]) -> Result<(), String> {
        self.exchange(request).await.map_err(|error| format!("the daemon does not answer: {error}"))
    }

    async fn exchange(&mut self, request: &[u8]) -> std::io::Result<()> {
        let mut stream = match self.stream.take() {
            Some(stream) => stream,
            None => {
                let stream = TcpStream::connect(self.address).await?;
                stream.set_nodelay(true)?;
                stream
            }
        };
        stream.write_all(request).await?;
        self.answer.clear();
        loop {
            if stream.read_buf(&mut self.answer).await? == 0 {
                return Ok(());
            }
            if self.keep_alive && is_whole(&self.answer) {
                self.stream = Some(stream);
                return Ok(());
            }
        }
    }
}

/// Returns whether head and body of a message have arrived; `content-length` is in lower case.
pub(super) fn is_whole(request: &[u8]) -> bool {
    let Some(end) = request.windows(4).position(|window| window == b"\r\n\r\n") else { return false };
    const NAME: &[u8] = b"content-length: ";
    let Some(at) = request[..end].windows(NAME.len()).position(|window| window == NAME) else { return true };
    let digits = request[at + NAME.len()..end].iter().take_while(|byte| byte.is_ascii_digit());
    let length = digits.fold(0usize, |sum, digit| sum.saturating_mul(10).saturating_add(usize::from(digit - b'0')));
    request.len() - end - 4 >= length
}

/// Proof of all shares: its value does not change the daemon's work.
const AUTH: [u8; 32] = [0x51; 32];
const OWNER: [u8; 32] = [0x52; 32];

#[derive(Clone)]
pub(super) struct Messages {
    create: String,
    auth: String,
    authorization: String,
}

impl Messages {
    pub(super) fn new(payload_bytes: usize) -> Result<Messages, String> {
        // Nonce and tag of a payload of one part.
        let sealed = age_file(payload_bytes + 32);
        let capsule = Capsule::new(ContentLocation::Inline, &sealed).map_err(|error| error.to_string())?;
        let auth = Auth::new(AUTH);
        let create =
            CreateRequest { capsule, verifier: auth.verifier(), expires_in: Some(3600), max_claims: 1, upload: None };
        Ok(Messages {
            create: serde_json::to_string(&create).map_err(|error| error.to_string())?,
            auth: auth.to_text().to_string(),
            authorization: format!("authorization: Bearer {}\r\n", *OwnerToken::new(OWNER).to_text()),
        })
    }

    pub(super) fn create(&self, keep_alive: bool) -> String {
        post(api::SHARES, &self.authorization, keep_alive, &self.create)
    }

    /// The simplest question.
    pub(super) fn get(keep_alive: bool) -> String {
        let connection = if keep_alive { "" } else { "connection: close\r\n" };
        format!("GET {} HTTP/1.1\r\nhost: localhost\r\n{connection}\r\n", api::LIMITS)
    }

    pub(super) fn upload(&self, ciphertext: &[u8]) -> Vec<u8> {
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: localhost\r\n{}content-type: application/octet-stream\r\ncontent-length: {}\r\n\r\n",
            api::UPLOADS,
            self.authorization,
            ciphertext.len()
        );
        [head.as_bytes(), ciphertext].concat()
    }

    /// Makes the share of an upload.
    pub(super) fn create_of(&self, uploaded: UploadReply) -> Result<String, String> {
        let content = ContentLocation::Spooled { size: uploaded.size, digest: uploaded.digest };
        let create = CreateRequest {
            capsule: Capsule::new(content, &age_file(100)).map_err(|error| error.to_string())?,
            verifier: Auth::new(AUTH).verifier(),
            expires_in: Some(3600),
            max_claims: 1,
            upload: Some(uploaded.upload),
        };
        let body = serde_json::to_string(&create).map_err(|error| error.to_string())?;
        Ok(post(api::SHARES, &self.authorization, true, &body))
    }

    /// Asks for `length` bytes of the ciphertext from `start`.
    pub(super) fn range(handle: Handle, lease: &Lease, start: u64, length: u64) -> String {
        format!(
            "GET {} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\nrange: bytes={start}-{}\r\n\r\n",
            api::ShareEndpoint::Ciphertext.path(handle),
            *lease.token.to_text(),
            start + length - 1
        )
    }

    pub(super) fn claim(&self, handle: &str, number: u64, keep_alive: bool) -> String {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        let id = ClaimId::new(id).to_text().to_string();
        let body = format!("{{\"handle\":\"{handle}\",\"auth\":\"{}\",\"claim\":\"{id}\"}}", self.auth);
        post(api::CLAIM, "", keep_alive, &body)
    }
}

/// Looks like an age v1 file, which is all that a daemon can tell.
pub(super) fn age_file(payload: usize) -> Vec<u8> {
    let mut file = SAMPLE_AGE_HEADER.as_bytes().to_vec();
    file.resize(file.len() + payload, 0xa5);
    file
}

fn post(path: &str, header: &str, keep_alive: bool, body: &str) -> String {
    let connection = if keep_alive { "" } else { "connection: close\r\n" };
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\n{header}content-type: application/json\r\n{connection}\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}
