//! Measures the daemon over HTTP, compared with a server of fixed responses: same client, same
//! sockets. Each server has a process of its own.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use lockbox_share::http::server::{TcpListeners, listen_tcp};
use lockbox_share_protocol::message::{ClaimReply, CreateReply, Lease, UploadReply};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::client::{self, BenchClient, Load, LoadResult, Messages, Workload, age_file, event_loop, is_whole};
use super::{Mode, StateDirectory, processor_seconds, processors};

/// Options of the measurements
#[derive(Args)]
pub(super) struct BenchHttp {
    /// State directory of the daemon; without one a temporary directory, removed at the end
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Requests, or flows
    #[arg(long, default_value_t = 50_000, value_name = "N")]
    requests: u64,
    /// Bytes sealed into each capsule
    #[arg(long, default_value_t = 512, value_name = "BYTES")]
    payload_bytes: usize,
    /// Connections at a time
    #[arg(long, default_value_t = 128, value_name = "N")]
    concurrency: usize,
    /// Shares that live in the store before the measurement begins
    #[arg(long, default_value_t = 0, value_name = "N")]
    preload_shares: u64,
    /// Random digits of a handle, 6 to 12
    #[arg(long, default_value_t = 12, value_name = "N", value_parser = clap::value_parser!(u32).range(6..=12))]
    share_code_digits: u32,
    /// When the daemon replies
    #[arg(long, value_enum, default_value_t = Mode::Commit)]
    durability: Mode,
    /// Use each connection for many requests
    #[arg(long)]
    keep_alive: bool,
    /// Begin so many a second, whether or not answers have come, instead of as many as can be
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    rate: Option<u64>,
    /// Leave out the comparison with ready-made answers
    #[arg(long)]
    no_floor: bool,
}

/// Runs one measurement and prints `name=value` lines.
pub(super) fn run(arguments: &BenchHttp, workload: Workload) -> Result<(), String> {
    let directory = StateDirectory::new(arguments.state_dir.as_deref())?;
    let mut command = serve(&directory.path, arguments.durability);
    command.args(["--share-code-digits", &arguments.share_code_digits.to_string()]);
    let daemon = Server::start(command, None)?;
    let messages = Messages::new(arguments.payload_bytes)?;
    let began = Instant::now();
    client::preload(daemon.address, &messages, arguments.preload_shares)?;
    let preload = began.elapsed();
    let handles = match workload {
        Workload::Fetch => client::preload(daemon.address, &messages, arguments.requests)?,
        _ => Vec::new(),
    };
    let load_of = |workload, server: &Server, handles: &[String], requests| Load {
        address: server.address,
        messages: messages.clone(),
        handles: handles.to_vec(),
        workload,
        requests,
        concurrency: arguments.concurrency,
        keep_alive: arguments.keep_alive,
        rate: arguments.rate,
        begin: Instant::now(),
    };
    // What the ready-made answer is made of: one real answer.
    let sample = client::sample(daemon.address, &messages)?;
    let floor = |handles: &[String]| -> Result<Option<CpuResult>, String> {
        // There is one ready-made answer, of a kind that closes the connection.
        if arguments.no_floor || arguments.keep_alive || arguments.rate.is_some() || workload == Workload::Get {
            return Ok(None);
        }
        let program = std::env::current_exe().map_err(|error| format!("the program cannot be found: {error}"))?;
        let mut command = Command::new(program);
        command.args(["--bench", "floor"]);
        let answer = if workload == Workload::Fetch { &sample.claimed } else { &sample.created };
        let server = Server::start(command, Some(answer))?;
        measure(&server, load_of(workload, &server, handles, arguments.requests)).map(Some)
    };
    let before = floor(&handles)?;
    let result = measure(&daemon, load_of(workload, &daemon, &handles, arguments.requests))?;
    let after = floor(&handles)?;
    report(arguments, workload, preload, &result, before.zip(after));
    Ok(())
}

struct CpuResult {
    measured: LoadResult,
    server_cpu: f64,
    client_cpu: f64,
}

impl CpuResult {
    fn rate(&self) -> f64 {
        self.measured.done as f64 / self.measured.took.as_secs_f64()
    }
}

fn measure(server: &Server, load: Load) -> Result<CpuResult, String> {
    let (server_before, client_before) = (server.cpu(), processor_seconds());
    let measured = client::run(load)?;
    let (server_cpu, client_cpu) = (server.cpu() - server_before, processor_seconds() - client_before);
    Ok(CpuResult { measured, server_cpu, client_cpu })
}

fn report(
    arguments: &BenchHttp,
    workload: Workload,
    preload: Duration,
    result: &CpuResult,
    floors: Option<(CpuResult, CpuResult)>,
) {
    let requests = (result.measured.done * workload.requests_each()) as f64;
    println!("benchmark=http-{}", workload.word());
    println!("durability={}", arguments.durability.word());
    println!("payload_bytes={}", arguments.payload_bytes);
    println!("concurrency={}", arguments.concurrency);
    println!("connections={}", if arguments.keep_alive { "kept" } else { "one per request" });
    if let Some(rate) = arguments.rate {
        println!("rate={rate}");
    }
    println!("preload_shares={}", arguments.preload_shares);
    println!("preload_seconds={:.3}", preload.as_secs_f64());
    println!("done={}", result.measured.done);
    println!("failed={}", result.measured.failed);
    println!("seconds={:.3}", result.measured.took.as_secs_f64());
    println!("per_second={:.0}", result.rate());
    println!("requests_per_server_cpu_second={:.0}", requests / result.server_cpu.max(0.01));
    println!("requests_per_cpu_second={:.0}", requests / (result.server_cpu + result.client_cpu).max(0.01));
    println!("p50_us={}", result.measured.percentile(50.0));
    println!("p99_us={}", result.measured.percentile(99.0));
    if let Some((before, after)) = floors {
        let floor = (before.rate() + after.rate()) / 2.0;
        println!("floor_per_second={floor:.0}");
        println!("floor_per_second_before={:.0}", before.rate());
        println!("floor_per_second_after={:.0}", after.rate());
        println!("part_of_floor={:.3}", result.rate() / floor);
    }
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    println!("load_average={}", load.split(' ').next().unwrap_or("?"));
}

/// Leases allow so many bodies at a time.
const MOST: usize = 8;

/// Measure how fast ranges of one ciphertext are downloaded over HTTP
///
/// The daemon has one event loop, so that the rate is that of one processor.
#[derive(Args)]
pub(super) struct BenchRange {
    /// State directory of the daemon; without one a temporary directory, removed at the end
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Requests
    #[arg(long, default_value_t = 4096, value_name = "N")]
    requests: u64,
    /// Size of the ciphertext in MiB
    #[arg(long, default_value_t = 256, value_name = "MIB", value_parser = clap::value_parser!(u64).range(2..=65_536))]
    file_mib: u64,
    /// Bytes of each range
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    range_bytes: u64,
    /// Connections at a time, at most 8: a lease allows no more
    #[arg(long, default_value_t = 4, value_name = "N")]
    concurrency: usize,
}

pub(super) fn run_range(arguments: &BenchRange) -> Result<(), String> {
    let directory = StateDirectory::new(arguments.state_dir.as_deref())?;
    let mut command = serve(&directory.path, Mode::None);
    command.args(["--workers", "1"]);
    let daemon = Server::start(command, None)?;
    let messages = Messages::new(64)?;
    let ciphertext = age_file((arguments.file_mib << 20) as usize);
    let size = ciphertext.len() as u64;
    let connections = arguments.concurrency.clamp(1, MOST) as u64;
    let (done, seconds, server, client) = event_loop()?.block_on(async {
        let (created, lease) = offer(&daemon, &messages, &ciphertext).await?;
        let (server, client, began) = (daemon.cpu(), processor_seconds(), Instant::now());
        // Not to the last byte, which would complete the download.
        let last = size - 1 - arguments.range_bytes;
        let range = |number: u64| {
            let start = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % last;
            Messages::range(created.handle, &lease, start, arguments.range_bytes)
        };
        let tasks: Vec<_> = (0..connections)
            .map(|place| {
                let requests = (0..64).map(|number| range(number * connections + place)).collect();
                let count = arguments.requests / connections + u64::from(place < arguments.requests % connections);
                let client_connection = BenchClient::new(daemon.address, true);
                tokio::spawn(ranges(client_connection, requests, count, arguments.range_bytes))
            })
            .collect();
        let mut done = 0;
        for task in tasks {
            done += task.await.map_err(|error| error.to_string())??;
        }
        Ok::<_, String>((done, began.elapsed().as_secs_f64(), daemon.cpu() - server, processor_seconds() - client))
    })?;
    let bytes = (done * arguments.range_bytes) as f64;
    println!("benchmark=http-range");
    println!("file_bytes={size}");
    println!("range_bytes={}", arguments.range_bytes);
    println!("concurrency={connections}");
    println!("done={done}");
    println!("seconds={seconds:.3}");
    println!("megabytes_per_second={:.0}", bytes / seconds / 1e6);
    println!("megabytes_per_server_cpu_second={:.0}", bytes / server.max(0.01) / 1e6);
    println!("megabytes_per_cpu_second={:.0}", bytes / (server + client).max(0.01) / 1e6);
    Ok(())
}

/// Uploads, shares and claims.
async fn offer(daemon: &Server, messages: &Messages, ciphertext: &[u8]) -> Result<(CreateReply, Lease), String> {
    let mut client_connection = BenchClient::new(daemon.address, true);
    let text = |error: serde_json::Error| format!("the daemon's response is malformed: {error}");
    client_connection.ask(&messages.upload(ciphertext)).await?;
    let uploaded: UploadReply = serde_json::from_slice(client_connection.body()).map_err(text)?;
    client_connection.ask(messages.create_of(uploaded)?.as_bytes()).await?;
    let created: CreateReply = serde_json::from_slice(client_connection.body()).map_err(text)?;
    client_connection.ask(messages.claim(&created.handle.to_string(), 0, true).as_bytes()).await?;
    let claimed: ClaimReply = serde_json::from_slice(client_connection.body()).map_err(text)?;
    Ok((created, claimed.lease.ok_or("the daemon gave no lease")?))
}

/// Asks `count` times, one request after the other; the number of whole answers.
async fn ranges(
    mut client_connection: BenchClient,
    requests: Vec<String>,
    count: u64,
    bytes: u64,
) -> Result<u64, String> {
    for request in requests.iter().cycle().take(usize::try_from(count).unwrap_or(usize::MAX)) {
        client_connection.ask(request.as_bytes()).await?;
        let answer = &client_connection.answer;
        if !answer.starts_with(b"HTTP/1.1 206") || client_connection.body().len() as u64 != bytes {
            let head = String::from_utf8_lossy(&answer[..answer.len().min(200)]);
            return Err(format!("the daemon does not answer with the range: {head}"));
        }
    }
    Ok(count)
}

/// A server in a process of its own, ended with the measurement.
struct Server {
    child: Child,
    address: SocketAddr,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    fn start(mut command: Command, input: Option<&[u8]>) -> Result<Server, String> {
        command.stdin(if input.is_some() { Stdio::piped() } else { Stdio::null() }).stdout(Stdio::piped());
        let mut child = command.spawn().map_err(|error| format!("the server does not start: {error}"))?;
        if let (Some(bytes), Some(mut stdin)) = (input, child.stdin.take()) {
            stdin.write_all(bytes).map_err(|error| format!("the server does not listen to its input: {error}"))?;
        }
        let stdout = child.stdout.take().ok_or("the server has no output")?;
        let mut address = None;
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(|error| error.to_string())?;
            match line.split_once('=') {
                Some(("http", text)) => address = text.parse().ok(),
                Some(("ready", _)) => break,
                _ => {}
            }
        }
        let Some(address) = address else {
            let _ = child.wait();
            return Err("the server ended before it was ready".into());
        };
        Ok(Server { child, address })
    }

    /// Seconds of processor time that the process has used.
    fn cpu(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // Behind the name, which is in brackets and may hold anything: fields 14 and 15 of proc(5),
        // in ticks of 10 ms.
        let fields: Vec<&str> = text.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        let ticks = |place: usize| fields.get(place).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
    }
}

/// Returns the command of a daemon without rate limits.
fn serve(state: &Path, durability: Mode) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockbox-share"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--unix-socket", "none", "--metrics-listen", "none"]);
    command.args(["--requests-per-minute", "0", "--max-connections", "100000", "--durability"]);
    command.arg(durability.word()).arg("--state-dir").arg(state).env("LOCKBOX_LOG", "warn");
    command
}

/// Baseline server in a process of its own: the daemon's sockets and event loops, and one fixed
/// response, read from standard input, to every request.
pub(super) fn run_floor() -> Result<(), String> {
    let mut answer = Vec::new();
    io::stdin().read_to_end(&mut answer).map_err(|error| format!("cannot read the answer: {error}"))?;
    // For as long as the process lives.
    let answer: &'static [u8] = answer.leak();
    let TcpListeners { address, listeners } = listen_tcp(SocketAddr::from(([127, 0, 0, 1], 0)), processors())?;
    let serve = move |listener| -> io::Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(answer_all(listener, answer))
    };
    let threads: Vec<_> = listeners.into_iter().map(|listener| std::thread::spawn(move || serve(listener))).collect();
    let mut out = io::stdout().lock();
    writeln!(out, "http={address}\nready=1").and_then(|()| out.flush()).map_err(|error| error.to_string())?;
    for thread in threads {
        thread.join().map_err(|_| "an event loop ended by a panic")?.map_err(|error| error.to_string())?;
    }
    Ok(())
}

async fn answer_all(listener: std::net::TcpListener, answer: &'static [u8]) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    loop {
        if let Ok((stream, _)) = listener.accept().await {
            let _ = stream.set_nodelay(true);
            tokio::spawn(answer_one(stream, answer));
        }
    }
}

async fn answer_one(mut stream: TcpStream, answer: &'static [u8]) -> io::Result<()> {
    let mut request = Vec::with_capacity(8 * 1024);
    while !is_whole(&request) {
        if stream.read_buf(&mut request).await? == 0 {
            return Ok(());
        }
    }
    stream.write_all(answer).await?;
    stream.shutdown().await
}
