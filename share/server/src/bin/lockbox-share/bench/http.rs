//! Measures the daemon over HTTP, compared with a server of fixed responses: same client, same
//! sockets.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

mod client;
pub(crate) mod floor;
mod messages;
pub(crate) mod range;
mod server;

pub(crate) use client::Workload;
use client::{Load, LoadResult};
use lockbox_share_protocol::message::MAX_BATCH;
use messages::Messages;
use server::{Server, serve};

use crate::bench_store::{StateDirectory, processor_seconds};
use crate::serve::Mode;

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
#[allow(clippy::print_stdout)] // the result
pub(crate) fn run(arguments: &BenchHttp, workload: Workload) -> Result<(), String> {
    let directory = StateDirectory::new(arguments.state_dir.as_deref())?;
    let program = std::env::current_exe().map_err(|error| format!("the program cannot be found: {error}"))?;
    let mut command = serve(&program, &directory.path, arguments.durability);
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
        if arguments.no_floor
            || arguments.keep_alive
            || arguments.rate.is_some()
            || matches!(workload, Workload::Get | Workload::Batch)
        {
            return Ok(None);
        }
        let mut command = Command::new(&program);
        command.args(["bench", "floor"]);
        let answer = if workload == Workload::Fetch { &sample.claimed } else { &sample.created };
        let server = Server::start(command, Some(answer))?;
        measure(&server, load_of(workload, &server, handles, arguments.requests)).map(Some)
    };
    let before = floor(&handles)?;
    let result = measure(&daemon, load_of(workload, &daemon, &handles, arguments.requests))?;
    let after = floor(&handles)?;
    report(arguments, workload, preload, &result, before.zip(after));
    if workload == Workload::Batch {
        let shares = MAX_BATCH as f64;
        let singly = measure(&daemon, load_of(Workload::Share, &daemon, &[], arguments.requests * MAX_BATCH as u64))?;
        println!("shares_per_second={:.0}", result.rate() * shares);
        println!("shares_per_second_singly={:.0}", singly.rate());
        println!("times_singly={:.2}", result.rate() * shares / singly.rate());
    }
    Ok(())
}

/// One run against one server.
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
    Ok(CpuResult {
        measured,
        server_cpu: server.cpu() - server_before,
        client_cpu: processor_seconds() - client_before,
    })
}

#[allow(clippy::print_stdout)] // the result
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
