//! Measurements of the share daemon: `cargo bench -p lockbox-share --bench measure -- KIND
//! OPTIONS`. This file measures the store alone: deposits, claims, and both in turn, on a store
//! that may hold many shares already.

#![allow(clippy::print_stdout)] // the results

mod client;
mod http;

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::{Args, Parser, ValueEnum};
use lockbox_share::store::segments::{SegmentSettings, SegmentStore};
use lockbox_share::store::{
    Durability, NewShare, PendingReply, Result, ShareStore, ShareTimes, StoreError, StoreMaintenance, random_handle,
};
use lockbox_share_protocol::capsule::MAX_CAPSULE;
use lockbox_share_protocol::token::{Auth, ClaimId, Handle, Verifier};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeVal;

use self::client::Workload;
use self::http::{BenchHttp, BenchRange};

/// Measure the store and the daemon
#[derive(Parser)]
#[command(name = "measure")]
enum Bench {
    Store(BenchStore),
    /// Measure how many shares are made each second over HTTP
    Http(BenchHttp),
    /// Measure how many shares are fetched each second over HTTP
    HttpFetch(BenchHttp),
    /// Measure how many shares are made and then fetched each second over HTTP
    HttpFlow(BenchHttp),
    /// Measure how many simple questions are answered each second over HTTP, and how soon
    HttpGet(BenchHttp),
    HttpRange(BenchRange),
    /// Answer every request with the content of standard input, for the other benchmarks
    #[command(hide = true)]
    Floor,
}

fn main() -> ExitCode {
    // `cargo bench` adds the option; `cargo test` does not, and may add names of other tests.
    let (bench, mut arguments): (Vec<_>, Vec<_>) = std::env::args().partition(|argument| argument == "--bench");
    let result = if !bench.is_empty() {
        run(&Bench::parse_from(arguments))
    } else if arguments.split_off(1).iter().all(|argument| argument.starts_with('-')) {
        check_counts()
    } else {
        Ok(())
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            lockbox_terminal::complain("measure", &message);
            ExitCode::FAILURE
        }
    }
}

fn run(bench: &Bench) -> std::result::Result<(), String> {
    match bench {
        Bench::Store(arguments) => run_store(arguments),
        Bench::Http(arguments) => http::run(arguments, Workload::Share),
        Bench::HttpFetch(arguments) => http::run(arguments, Workload::Fetch),
        Bench::HttpFlow(arguments) => http::run(arguments, Workload::Flow),
        Bench::HttpGet(arguments) => http::run(arguments, Workload::Get),
        Bench::HttpRange(arguments) => http::run_range(arguments),
        Bench::Floor => http::run_floor(),
    }
}

/// Runs each measurement to its end and compares its counts with the options; rates are not judged.
fn check_counts() -> std::result::Result<(), String> {
    assert!(client::is_whole(b"GET / HTTP/1.1\r\n\r\n") && !client::is_whole(b"GET / HTTP/1.1\r\n"));
    let post = b"POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc";
    assert!(client::is_whole(post) && !client::is_whole(&post[..post.len() - 1]));
    for (kind, more) in [
        ("http", &["--payload-bytes", "100"][..]),
        ("http-fetch", &["--preload-shares", "200"]),
        ("http-flow", &["--keep-alive"]),
        ("http-get", &["--keep-alive", "--rate", "1000"]),
    ] {
        let all = [&[kind, "--requests", "60", "--concurrency", "8", "--durability", "none"], more].concat();
        let result = results(&all)?;
        assert_eq!((result["done"].as_str(), result["failed"].as_str()), ("60", "0"), "{kind}: {result:?}");
        assert!(result["per_second"].parse::<f64>().is_ok_and(|rate| rate > 0.0), "{kind}");
        assert_eq!(result.contains_key("part_of_floor"), matches!(kind, "http" | "http-fetch"), "{kind}");
    }
    let result = results(&["http-range", "--requests", "30", "--file-mib", "2", "--range-bytes", "70000"])?;
    assert_eq!(result["done"], "30");
    let result = results(&["store", "--requests", "500", "--durability", "none"])?;
    assert!(result.len() > 5, "{result:?}");
    Ok(())
}

/// Returns the lines that a measurement prints.
fn results(arguments: &[&str]) -> std::result::Result<BTreeMap<String, String>, String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let output = Command::new(program).arg("--bench").args(arguments).output().map_err(|error| error.to_string())?;
    if !output.status.success() {
        return Err(format!("{arguments:?}: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8(output.stdout).map_err(|error| error.to_string())?;
    let lines = text.lines().map(|line| line.split_once('=').ok_or_else(|| format!("{arguments:?}: {line}")));
    lines.map(|line| line.map(|(name, value)| (name.into(), value.into()))).collect()
}

/// Time of the reply, an option of the daemon.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Commit,
    Periodic,
    None,
}

impl Mode {
    fn word(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }
}

impl From<Mode> for Durability {
    fn from(mode: Mode) -> Durability {
        match mode {
            Mode::Commit => Durability::Commit,
            Mode::Periodic => Durability::Periodic,
            Mode::None => Durability::None,
        }
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Measure how many shares the store creates and serves each second
#[derive(Args)]
struct BenchStore {
    /// Directory of the store; without one a temporary directory, removed at the end
    #[arg(long, value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Shares to create, to fetch, and to create and fetch in turn
    #[arg(long, default_value_t = 200_000, value_name = "N")]
    requests: u64,
    /// Bytes of each capsule, at most 8192
    #[arg(long, default_value_t = 512, value_name = "BYTES")]
    payload_bytes: usize,
    /// Requests under way at a time, over all threads
    #[arg(long, default_value_t = 128, value_name = "N")]
    concurrency: usize,
    /// Shares that live in the store before the measurement begins
    #[arg(long, default_value_t = 0, value_name = "N")]
    preload_shares: u64,
    /// Random digits of a handle, 6 to 12
    #[arg(long, default_value_t = 12, value_name = "N")]
    share_code_digits: u32,
    /// When a reply is given
    #[arg(long, value_enum, default_value_t = Mode::Commit)]
    durability: Mode,
    /// Threads that ask; by default one for each processor
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
}

const TTL: Duration = Duration::from_secs(900);

/// One kind of work, done by several threads.
struct Part<'a> {
    store: &'a SegmentStore,
    arguments: &'a BenchStore,
    threads: usize,
}

fn run_store(arguments: &BenchStore) -> std::result::Result<(), String> {
    if arguments.payload_bytes > MAX_CAPSULE || arguments.concurrency == 0 || arguments.requests == 0 {
        return Err("--payload-bytes is at most 8192, --requests and --concurrency are at least 1".into());
    }
    let room = 10u64.saturating_pow(arguments.share_code_digits) / 2;
    if arguments.preload_shares + 2 * arguments.requests > room {
        return Err("--share-code-digits leaves too few handles for so many shares".into());
    }
    let directory = StateDirectory::new(arguments.state_dir.as_deref())?;
    let settings = SegmentSettings { durability: arguments.durability.into(), ..SegmentSettings::default() };
    let store = SegmentStore::open(&directory.path, &settings).map_err(|e| e.to_string())?;
    let threads = arguments.threads.unwrap_or_else(processors).clamp(1, arguments.concurrency);
    let part = Part { store: &store, arguments, threads };
    let failed = |error: StoreError| error.to_string();
    print("durability", arguments.durability.word());
    print("requests", arguments.requests);
    print("payload_bytes", arguments.payload_bytes);
    print("concurrency", arguments.concurrency);
    print("threads", threads);
    print("preload_shares", arguments.preload_shares);
    if arguments.preload_shares > 0 {
        part.create(arguments.preload_shares).map_err(failed)?;
    }
    print("live_before", store.stats().live);
    print("rss_bytes_before", resident());
    let created = timed("create", arguments.requests, || part.create(arguments.requests)).map_err(failed)?;
    timed("fetch", arguments.requests, || part.fetch(&created)).map_err(failed)?;
    timed("flow", arguments.requests, || part.flow()).map_err(failed)?;
    store.flush().wait().map_err(failed)?;
    let figures = store.stats();
    print("live_after", figures.live);
    print("segment_bytes", figures.segment_bytes);
    print("index_bytes", figures.index_bytes);
    print("barriers", figures.barriers);
    print("barrier_seconds", format!("{:.3}", figures.barrier_micros as f64 / 1e6));
    print("rss_bytes", resident());
    Ok(())
}

/// Runs a part and prints its rate, raw and for each second of processor time.
fn timed<T>(name: &str, requests: u64, run: impl FnOnce() -> Result<T>) -> Result<T> {
    let (begun, cpu) = (Instant::now(), processor_seconds());
    let done = run()?;
    let (wall, cpu) = (begun.elapsed().as_secs_f64(), processor_seconds() - cpu);
    print(&format!("{name}_per_second"), format!("{:.0}", requests as f64 / wall));
    print(&format!("{name}_cpu_seconds"), format!("{cpu:.3}"));
    print(&format!("{name}_per_cpu_second"), format!("{:.0}", requests as f64 / cpu.max(0.001)));
    Ok(done)
}

fn auth(number: u64) -> Auth {
    let mut bytes = [0x5a; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Auth::new(bytes)
}

fn claim_id(number: u64) -> ClaimId {
    ClaimId::new(u128::from(number).to_le_bytes())
}

impl Part<'_> {
    fn share(&self, number: u64, capsule: &Bytes) -> NewShare {
        let owner = Verifier::new([3; 32]);
        let auth = auth(number).verifier();
        NewShare { auth, owner, ttl: TTL, claims: 1, capsule: capsule.clone(), payload: None }
    }

    fn deposit(&self, number: u64, capsule: &Bytes) -> Result<(Handle, PendingReply<ShareTimes>)> {
        let handle = random_handle(0, self.arguments.share_code_digits)?;
        Ok((handle, self.store.create(handle, self.share(number, capsule))))
    }

    fn create(&self, count: u64) -> Result<Vec<(u64, Handle)>> {
        let created = self.each(count, |range, slots| {
            let capsule = Bytes::from(vec![0x61; self.arguments.payload_bytes]);
            let mut handles = Vec::with_capacity((range.end - range.start) as usize);
            let mut under_way = UnderWay::new(slots);
            for number in range {
                let (handle, pending) = self.deposit(number, &capsule)?;
                handles.push((number, handle));
                under_way.add(handle, pending)?;
            }
            let mut taken = under_way.finish()?;
            handles.retain(|(_, handle)| !taken.contains(handle));
            // A handle that was taken is drawn again.
            for number in 0..taken.len() as u64 {
                let (handle, pending) = self.deposit(u64::MAX - number, &capsule)?;
                match pending.wait() {
                    Ok(_) => handles.push((u64::MAX - number, handle)),
                    Err(StoreError::Taken) => taken.push(handle),
                    Err(error) => return Err(error),
                }
            }
            Ok(handles)
        })?;
        Ok(created.into_iter().flatten().collect())
    }

    fn fetch(&self, created: &[(u64, Handle)]) -> Result<()> {
        self.each(created.len() as u64, |range, slots| {
            let mut under_way = UnderWay::new(slots);
            for (number, handle) in &created[range.start as usize..range.end as usize] {
                under_way.add(*handle, self.store.claim(*handle, &auth(*number), claim_id(*number)))?;
            }
            under_way.finish().map(|_| ())
        })?;
        Ok(())
    }

    /// Deposits and claims in turn, as many under way as asked for.
    fn flow(&self) -> Result<()> {
        self.each(self.arguments.requests, |range, slots| {
            let capsule = Bytes::from(vec![0x61; self.arguments.payload_bytes]);
            let mut number = range.start;
            while number < range.end {
                let batch = range.end.min(number + slots as u64);
                let mut deposits = Vec::with_capacity(slots);
                for number in number..batch {
                    let (handle, pending) = self.deposit(number, &capsule)?;
                    deposits.push((number, handle, pending));
                }
                let mut claims = Vec::with_capacity(slots);
                for (number, handle, pending) in deposits {
                    match pending.wait() {
                        Ok(_) => claims.push(self.store.claim(handle, &auth(number), claim_id(number))),
                        Err(StoreError::Taken) => {}
                        Err(error) => return Err(error),
                    }
                }
                for claim in claims {
                    claim.wait()?;
                }
                number = batch;
            }
            Ok(())
        })?;
        Ok(())
    }

    /// Divides `count` among the threads; each has its part of the requests that are under way.
    fn each<T: Send>(
        &self,
        count: u64,
        work: impl Fn(std::ops::Range<u64>, usize) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        let threads = self.threads as u64;
        let slots = (self.arguments.concurrency / self.threads).max(1);
        let next = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads)
                .map(|_| {
                    scope.spawn(|| {
                        let thread = next.fetch_add(1, Ordering::Relaxed);
                        work(count * thread / threads..count * (thread + 1) / threads, slots)
                    })
                })
                .collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined.map(|done| done.unwrap_or_else(|_| Err(StoreError::Unavailable("a thread failed".into())))).collect()
        })
    }
}

/// Requests of one thread that wait for their answer, oldest first.
struct UnderWay<T> {
    pending: VecDeque<(Handle, PendingReply<T>)>,
    slots: usize,
    taken: Vec<Handle>,
}

impl<T: Unpin> UnderWay<T> {
    fn new(slots: usize) -> Self {
        UnderWay { pending: VecDeque::with_capacity(slots), slots, taken: Vec::new() }
    }

    fn add(&mut self, handle: Handle, mut pending: PendingReply<T>) -> Result<()> {
        // Most answers are ready at once when no barrier is waited for.
        let mut context = Context::from_waker(Waker::noop());
        if let Poll::Ready(answer) = std::pin::Pin::new(&mut pending).poll(&mut context) {
            return self.answered(handle, answer);
        }
        self.pending.push_back((handle, pending));
        if self.pending.len() >= self.slots { self.wait_for_oldest() } else { Ok(()) }
    }

    fn wait_for_oldest(&mut self) -> Result<()> {
        match self.pending.pop_front() {
            Some((handle, pending)) => self.answered(handle, pending.wait()),
            None => Ok(()),
        }
    }

    fn answered(&mut self, handle: Handle, answer: Result<T>) -> Result<()> {
        match answer {
            Err(StoreError::Taken) => self.taken.push(handle),
            other => drop(other?),
        }
        Ok(())
    }

    /// Waits for all, and gives the handles that were taken before.
    fn finish(mut self) -> Result<Vec<Handle>> {
        while !self.pending.is_empty() {
            self.wait_for_oldest()?;
        }
        Ok(self.taken)
    }
}

fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map_or(0, |kib| kib * 1024)
}

fn print(name: &str, value: impl std::fmt::Display) {
    println!("{name}={value}");
}

/// The daemon's state, temporary unless it was named.
struct StateDirectory {
    path: PathBuf,
    temporary: bool,
}

impl StateDirectory {
    fn new(named: Option<&Path>) -> std::result::Result<StateDirectory, String> {
        if let Some(path) = named {
            return Ok(StateDirectory { path: path.into(), temporary: false });
        }
        let path = std::env::temp_dir().join(format!("lockbox-share-bench-{}", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
        Ok(StateDirectory { path, temporary: true })
    }
}

impl Drop for StateDirectory {
    fn drop(&mut self) {
        if self.temporary {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

/// Seconds of processor time that this process has used.
fn processor_seconds() -> f64 {
    let seconds = |time: TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
}
