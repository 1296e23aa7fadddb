//! Measures the daemon over HTTP beside a server that answers everything with ready-made bytes: same client, same sockets.

use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};

mod client;
pub(crate) mod floor;
mod messages;
pub(crate) mod range;

use client::{Load, Measured};
use lockbox_share_protocol::message::MAX_BATCH;
use messages::Messages;

/// Options of the measurements
#[derive(Args)]
pub(crate) struct BenchHttp {
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
    #[arg(long, value_enum, default_value_t = Durable::Commit)]
    durability: Durable,
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

#[derive(Clone, Copy, ValueEnum)]
enum Durable {
    Commit,
    Periodic,
    None,
}

impl Durable {
    fn word(self) -> &'static str {
        match self {
            Durable::Commit => "commit",
            Durable::Periodic => "periodic",
            Durable::None => "none",
        }
    }
}

/// What is asked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    /// Shares are made.
    Share,
    /// Shares that were made before are claimed.
    Fetch,
    /// Each share is made and then claimed.
    Flow,
    /// The server is asked what it allows.
    Get,
    /// A hundred shares are made by each request, beside the same number one by one.
    Batch,
}

impl What {
    fn word(self) -> &'static str {
        match self {
            What::Share => "share",
            What::Fetch => "fetch",
            What::Flow => "flow",
            What::Get => "get",
            What::Batch => "batch",
        }
    }

    fn requests_each(self) -> u64 {
        if self == What::Flow { 2 } else { 1 }
    }
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
        match address {
            Some(address) => Ok(Server { child, address }),
            None => {
                let _ = child.wait();
                Err("the server ended before it was ready".into())
            }
        }
    }

    /// Seconds of processor time that the process has used.
    fn cpu(&self) -> f64 {
        let text = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id())).unwrap_or_default();
        // Behind the name, which is in brackets and may hold anything: fields 14 and 15 of proc(5), in ticks of 10 ms.
        let fields: Vec<&str> = text.rsplit_once(") ").map(|(_, rest)| rest.split(' ').collect()).unwrap_or_default();
        let ticks = |place: usize| fields.get(place).and_then(|text| text.parse::<f64>().ok()).unwrap_or(0.0);
        (ticks(11) + ticks(12)) / 100.0
    }
}

/// A daemon that refuses nobody.
fn serve(program: &Path, state: &Path, durability: Durable) -> Command {
    let mut command = Command::new(program);
    command.args(["serve", "--listen", "127.0.0.1:0", "--unix-socket", "none", "--metrics-listen", "none"]);
    command.args(["--requests-per-minute", "0", "--max-connections", "100000", "--durability"]);
    command.arg(durability.word()).arg("--state-dir").arg(state).env("LOCKBOX_LOG", "warn");
    command
}

/// Runs one measurement and prints `name=value` lines.
#[allow(clippy::print_stdout)] // the result
pub(crate) fn run(arguments: &BenchHttp, what: What) -> Result<(), String> {
    let directory = State::new(arguments.state_dir.as_deref())?;
    let program = std::env::current_exe().map_err(|error| format!("the program cannot be found: {error}"))?;
    let mut command = serve(&program, &directory.path, arguments.durability);
    command.args(["--share-code-digits", &arguments.share_code_digits.to_string()]);
    let daemon = Server::start(command, None)?;
    let messages = Messages::new(arguments.payload_bytes)?;
    let began = Instant::now();
    client::preload(daemon.address, &messages, arguments.preload_shares)?;
    let preload = began.elapsed();
    let handles = match what {
        What::Fetch => client::preload(daemon.address, &messages, arguments.requests)?,
        _ => Vec::new(),
    };
    let load_of = |what, server: &Server, handles: &[String], requests| Load {
        address: server.address,
        messages: messages.clone(),
        handles: handles.to_vec(),
        what,
        requests,
        concurrency: arguments.concurrency,
        keep_alive: arguments.keep_alive,
        rate: arguments.rate,
        begin: Instant::now(),
    };
    // What the ready-made answer is made of: one real answer.
    let sample = client::sample(daemon.address, &messages)?;
    let floor = |handles: &[String]| -> Result<Option<Figures>, String> {
        // There is one ready-made answer, of a kind that closes the connection.
        if arguments.no_floor
            || arguments.keep_alive
            || arguments.rate.is_some()
            || matches!(what, What::Get | What::Batch)
        {
            return Ok(None);
        }
        let mut command = Command::new(&program);
        command.arg("bench-floor");
        let answer = if what == What::Fetch { &sample.claimed } else { &sample.created };
        let server = Server::start(command, Some(answer))?;
        measure(&server, load_of(what, &server, handles, arguments.requests)).map(Some)
    };
    let before = floor(&handles)?;
    let result = measure(&daemon, load_of(what, &daemon, &handles, arguments.requests))?;
    let after = floor(&handles)?;
    report(arguments, what, preload, &result, before.zip(after));
    if what == What::Batch {
        let shares = MAX_BATCH as f64;
        let singly = measure(&daemon, load_of(What::Share, &daemon, &[], arguments.requests * MAX_BATCH as u64))?;
        println!("shares_per_second={:.0}", result.rate() * shares);
        println!("shares_per_second_singly={:.0}", singly.rate());
        println!("times_singly={:.2}", result.rate() * shares / singly.rate());
    }
    Ok(())
}

/// One run against one server.
struct Figures {
    measured: Measured,
    server_cpu: f64,
    client_cpu: f64,
}

impl Figures {
    fn rate(&self) -> f64 {
        self.measured.done as f64 / self.measured.took.as_secs_f64()
    }
}

fn measure(server: &Server, load: Load) -> Result<Figures, String> {
    let (server_before, client_before) = (server.cpu(), own_cpu());
    let measured = client::run(load)?;
    Ok(Figures { measured, server_cpu: server.cpu() - server_before, client_cpu: own_cpu() - client_before })
}

fn own_cpu() -> f64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
}

#[allow(clippy::print_stdout)] // the result
fn report(arguments: &BenchHttp, what: What, preload: Duration, result: &Figures, floors: Option<(Figures, Figures)>) {
    let requests = (result.measured.done * what.requests_each()) as f64;
    println!("benchmark=http-{}", what.word());
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

/// The daemon's state, temporary unless it was named.
struct State {
    path: PathBuf,
    temporary: bool,
}

impl State {
    fn new(named: Option<&Path>) -> Result<State, String> {
        if let Some(path) = named {
            return Ok(State { path: path.into(), temporary: false });
        }
        let path = std::env::temp_dir().join(format!("lockbox-share-bench-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(State { path, temporary: true })
    }
}

impl Drop for State {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
