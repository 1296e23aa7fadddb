//! Measures how fast ranges of a ciphertext come out of the spool.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use lockbox_share_protocol::message::{ClaimReply, CreateReply, Lease, UploadReply};

use super::client::{BenchClient, event_loop};
use super::messages::{Messages, age_file};
use super::server::{Server, serve};
use crate::bench_store::{StateDirectory, processor_seconds};
use crate::serve::Mode;

/// Leases allow so many bodies at a time.
const MOST: usize = 8;

/// Measure how fast ranges of one ciphertext are downloaded over HTTP
///
/// The daemon has one event loop, so that the rate is that of one processor.
#[derive(Args)]
pub(crate) struct BenchRange {
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

#[allow(clippy::print_stdout)] // the result
pub(crate) fn run(arguments: &BenchRange) -> Result<(), String> {
    let directory = StateDirectory::new(arguments.state_dir.as_deref())?;
    let program = std::env::current_exe().map_err(|error| format!("the program cannot be found: {error}"))?;
    let mut command = serve(&program, &directory.path, Mode::None);
    command.args(["--workers", "1"]);
    let daemon = Server::start(command, None)?;
    let messages = Messages::new(64)?;
    let ciphertext = age_file((arguments.file_mib << 20) as usize);
    let size = ciphertext.len() as u64;
    let connections = arguments.concurrency.clamp(1, MOST);
    let (done, seconds, server, client) = event_loop()?.block_on(async {
        let (created, lease) = offer(&daemon, &messages, &ciphertext).await?;
        let (server, client, began) = (daemon.cpu(), processor_seconds(), Instant::now());
        let share = |place: usize| {
            arguments.requests / connections as u64
                + u64::from((place as u64) < arguments.requests % connections as u64)
        };
        let tasks: Vec<_> = (0..connections)
            .map(|place| {
                // Not to the last byte, which would complete the download.
                let last = size - 1 - arguments.range_bytes;
                let requests: Vec<String> = (0..64u64)
                    .map(|number| {
                        let start =
                            (number * connections as u64 + place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) % last;
                        Messages::range(created.handle, &lease, start, arguments.range_bytes)
                    })
                    .collect();
                tokio::spawn(ranges(
                    BenchClient::new(daemon.address, true),
                    requests,
                    share(place),
                    arguments.range_bytes,
                ))
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
    let silent = |error: std::io::Error| format!("the daemon does not answer: {error}");
    let text = |error: serde_json::Error| format!("the daemon's answer is not understood: {error}");
    client_connection.ask(&messages.upload(ciphertext)).await.map_err(silent)?;
    let uploaded: UploadReply = serde_json::from_slice(client_connection.body()).map_err(text)?;
    client_connection.ask(messages.create_of(uploaded)?.as_bytes()).await.map_err(silent)?;
    let created: CreateReply = serde_json::from_slice(client_connection.body()).map_err(text)?;
    client_connection.ask(messages.claim(&created.handle.to_string(), 0, true).as_bytes()).await.map_err(silent)?;
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
        client_connection
            .ask(request.as_bytes())
            .await
            .map_err(|error| format!("the daemon does not answer: {error}"))?;
        if !client_connection.answer.starts_with(b"HTTP/1.1 206") || client_connection.body().len() as u64 != bytes {
            let head = String::from_utf8_lossy(&client_connection.answer[..client_connection.answer.len().min(200)])
                .into_owned();
            return Err(format!("the daemon does not answer with the range: {head}"));
        }
    }
    Ok(count)
}
