//! `lockbox-share serve`: one conversion of the options, one daemon, one end.

use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lockbox_share::http::listen::UnixSocket;
use lockbox_share::http::running::{self, Addresses, Running};
use lockbox_share::http::{Creators, Daemon, Network, Settings, tls};
use lockbox_share::limiter::Rates;
use lockbox_share::spool::Spool;
use lockbox_share::store::clock::SystemClock;
use lockbox_share::store::segments::{self, Durability, SegmentStore};
use lockbox_share::store::valkey::{ValkeySettings, ValkeyStore};
use lockbox_share::store::{Periods, ShareStore};
use lockbox_share_protocol::api::{DEFAULT_PORT, SOCKET_NAME};
use zeroize::Zeroizing;

/// The daemon's own figures are beside its port.
const ADMIN_PORT: u16 = DEFAULT_PORT + 1;

/// Serve one-time links until SIGTERM
///
/// Without further options it listens on 127.0.0.1:7377 and on a Unix socket in the runtime directory, and shows health and metrics on 127.0.0.1:7378.
#[derive(Args)]
pub(crate) struct Serve {
    /// Directory of the shares, made if it is missing
    #[arg(long, value_name = "DIR")]
    pub(crate) state_dir: PathBuf,
    /// Keep the shares in a Valkey server instead, valkey://HOST:PORT/DB; ciphertext stays in the state directory
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// File with the password of that server
    #[arg(long, value_name = "FILE", requires = "store")]
    store_password_file: Option<PathBuf>,
    /// Address for HTTP; may be repeated, `none` for no address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Vec<String>,
    /// Unix socket, `none` for no socket
    #[arg(long, value_name = "PATH")]
    pub(crate) unix_socket: Option<PathBuf>,
    /// Address for HTTPS; may be repeated
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["tls_cert", "tls_key"])]
    tls_listen: Vec<SocketAddr>,
    /// Certificate chain for HTTPS, PEM
    #[arg(long, value_name = "FILE")]
    tls_cert: Option<PathBuf>,
    /// Private key for HTTPS, PEM
    #[arg(long, value_name = "FILE")]
    tls_key: Option<PathBuf>,
    /// Address for health and metrics, `none` for no address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) metrics_listen: Option<String>,
    /// What the links begin with, when clients reach the daemon by another name
    #[arg(long, value_name = "URL")]
    public_url: Option<String>,
    /// First digit of the handles: names this server in a fleet
    #[arg(long, value_name = "DIGIT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=9))]
    routing_digit: u8,
    /// Random digits of the handles
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(6..=12))]
    pub(crate) share_code_digits: u32,
    /// When a reply is given
    #[arg(long, value_enum, default_value_t = Mode::Commit)]
    pub(crate) durability: Mode,
    /// Lifetime of shares that name none
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time)]
    default_expiry: Duration,
    /// Longest lifetime that a share may ask for
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = time)]
    max_expiry: Duration,
    /// Largest ciphertext of one share
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = size)]
    max_file: u64,
    /// Largest sum of all ciphertexts
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = size)]
    spool_size: u64,
    /// Requests in a minute that one address (IPv6: one /64) may make; 0 for no limit
    #[arg(long, value_name = "N", default_value_t = Rates::default().per_minute)]
    pub(crate) requests_per_minute: u32,
    /// Requests that one address may make at once
    #[arg(long, value_name = "N", default_value_t = Rates::default().burst, value_parser = clap::value_parser!(u32).range(1..))]
    burst: u32,
    /// Wrong claims in a minute, of all together, until those who made one must wait
    #[arg(long, value_name = "N", default_value_t = Rates::default().misses_per_minute)]
    misses_per_minute: u32,
    /// Address or network whose X-Forwarded-For is believed; may be repeated
    #[arg(long, value_name = "NETWORK")]
    trusted_proxy: Vec<Network>,
    /// Who may make shares
    #[arg(long, value_enum, default_value_t = Who::Everybody)]
    creators: Who,
    /// Connections that may be open at a time
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    max_connections: usize,
    /// Time for the head of a request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    head_timeout: Duration,
    /// Time for a message, and between two parts of an upload
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    body_timeout: Duration,
    /// Time that a client may take nothing of what is sent
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    stall_timeout: Duration,
    /// Time after the last byte in which a download may be resumed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    grace: Duration,
    /// Time for running requests when the daemon stops
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    stop_timeout: Duration,
    /// Event loops; without it one for each processor
    #[arg(long, value_name = "N")]
    pub(crate) workers: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Mode {
    /// After its change is durable
    Commit,
    /// At once; a power cut loses or repeats 50 ms
    Periodic,
    /// At once; a power cut loses or repeats what the kernel had not written
    None,
}

#[derive(Clone, Copy, ValueEnum)]
enum Who {
    /// All who reach the daemon
    Everybody,
    /// All who reach its Unix socket
    Local,
}

/// `90s`, `15m`, `2h`, `7d`, or seconds.
fn time(text: &str) -> Result<Duration, String> {
    let (digits, unit) = match text.strip_suffix(['s', 'm', 'h', 'd']) {
        Some(digits) => (digits, text.as_bytes()[text.len() - 1]),
        None => (text, b's'),
    };
    let number: u64 = digits.parse().map_err(|_| "a number with s, m, h or d is expected".to_owned())?;
    let factor = match unit {
        b'm' => 60,
        b'h' => 3600,
        b'd' => 86400,
        _ => 1,
    };
    number.checked_mul(factor).map(Duration::from_secs).ok_or_else(|| "the time is too long".into())
}

/// `512`, `8K`, `64M`, `16G`, `1T`, in powers of 1,024.
fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.strip_suffix(['K', 'M', 'G', 'T']) {
        Some(digits) => (digits, 10 * (1 + "KMGT".find(&text[text.len() - 1..]).unwrap_or(0))),
        None => (text, 0),
    };
    let number: u64 = digits.parse().map_err(|_| "a number with K, M, G or T is expected".to_owned())?;
    number.checked_mul(1 << shift).ok_or_else(|| "the size is too large".into())
}

/// Starts the daemon, says where it is, and serves until a signal.
pub(crate) fn run(arguments: &Serve) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOCKBOX_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    raise_descriptors();
    let signals = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot wait for signals: {error}"))?;
    // Before the daemon answers: a signal that comes early must not end it without its flush.
    let mut stop = signals.block_on(async { Signals::new() })?;
    let running = start(arguments)?;
    announce(&running);
    notify("READY=1");
    signals.block_on(stop.next());
    notify("STOPPING=1");
    tracing::info!("stopping");
    running.stop()
}

struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Signals {
    fn new() -> Result<Signals, String> {
        use tokio::signal::unix::{SignalKind, signal};
        let caught = |kind| signal(kind).map_err(|error| format!("cannot wait for signals: {error}"));
        Ok(Signals { terminate: caught(SignalKind::terminate())?, interrupt: caught(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

fn start(arguments: &Serve) -> Result<Running, String> {
    let tcp = addresses(&arguments.listen, SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)))?;
    let tcp = tcp.into_iter().map(with_port).collect::<Result<Vec<_>, _>>()?;
    let admin: Vec<String> = arguments.metrics_listen.iter().cloned().collect();
    let admin = addresses(&admin, SocketAddr::from(([127, 0, 0, 1], ADMIN_PORT)))?.first().copied();
    let tls = match (&arguments.tls_cert, &arguments.tls_key) {
        (Some(certificate), Some(key)) => {
            let acceptor = tls::acceptor(certificate, key)?;
            let bound = arguments.tls_listen.iter().map(|address| with_port(*address));
            bound.map(|address| Ok((address?, acceptor.clone()))).collect::<Result<Vec<_>, String>>()?
        }
        _ => Vec::new(),
    };
    let unix = match &arguments.unix_socket {
        Some(path) if path.as_os_str() == "none" => None,
        Some(path) => Some(path.clone()),
        None => Some(runtime_directory()?.join(SOCKET_NAME)),
    };
    let unix = unix
        .map(|path| UnixSocket::bind(&path).map_err(|error| format!("cannot listen on {}: {error}", path.display())))
        .transpose()?;
    let (store, spool) = open(arguments)?;
    let encrypted: Vec<SocketAddr> = tls.iter().map(|(address, _)| *address).collect();
    let settings = settings(arguments, &tcp, &encrypted);
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(|error| format!("no randomness: {error}"))?;
    let daemon = Arc::new(Daemon::new(store, spool, settings, secret));
    let workers =
        arguments.workers.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    running::start(daemon, Addresses { tcp, tls, admin }, unix, workers)
}

type Stores = (Arc<dyn ShareStore>, Arc<Spool>);

fn open(arguments: &Serve) -> Result<Stores, String> {
    let state = &arguments.state_dir;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .map_err(|error| format!("cannot create {}: {error}", state.display()))?;
    let durability = match arguments.durability {
        Mode::Commit => Durability::Commit,
        Mode::Periodic => Durability::Periodic,
        Mode::None => Durability::None,
    };
    if let Some(url) = &arguments.store {
        return open_valkey(url, arguments, durability);
    }
    let settings =
        segments::Settings { durability, spool_capacity: arguments.spool_size, ..segments::Settings::default() };
    let store = SegmentStore::open(state, &settings).map_err(|error| error.to_string())?;
    let spool = store.spool().cloned().ok_or("the store has no spool")?;
    let store: Arc<dyn ShareStore> = Arc::new(store);
    Ok((store, spool))
}

fn open_valkey(url: &str, arguments: &Serve, durability: Durability) -> Result<Stores, String> {
    let password = arguments
        .store_password_file
        .as_ref()
        .map(|path| {
            let text = std::fs::read_to_string(path).map(Zeroizing::new);
            let text = text.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            Ok::<_, String>(Zeroizing::new(text.trim_end_matches('\n').to_owned()))
        })
        .transpose()?;
    let settings = ValkeySettings {
        url: url.to_owned(),
        password,
        durability,
        periods: Periods::default(),
        clock: Arc::new(SystemClock),
    };
    let mut store = ValkeyStore::connect(&settings).map_err(|error| error.to_string())?;
    let directory = arguments.state_dir.join("spool");
    let spool = Spool::open(&directory, arguments.spool_size)
        .map_err(|error| format!("cannot open {}: {error}", directory.display()))?;
    store.look_after(spool.clone()).map_err(|error| error.to_string())?;
    let store: Arc<dyn ShareStore> = Arc::new(store);
    Ok((store, spool))
}

/// Links name the port, so one that the host is to choose is chosen before.
fn with_port(address: SocketAddr) -> Result<SocketAddr, String> {
    if address.port() != 0 {
        return Ok(address);
    }
    let free = std::net::TcpListener::bind(address).and_then(|listener| listener.local_addr());
    free.map_err(|error| format!("cannot listen on {address}: {error}"))
}

fn addresses(given: &[String], default: SocketAddr) -> Result<Vec<SocketAddr>, String> {
    match given {
        [] => Ok(vec![default]),
        [none] if none == "none" => Ok(Vec::new()),
        _ => given
            .iter()
            .map(|text| text.parse().map_err(|_| format!("{text} is no address with a port, such as 127.0.0.1:7377")))
            .collect(),
    }
}

fn settings(arguments: &Serve, tcp: &[SocketAddr], tls: &[SocketAddr]) -> Settings {
    let local = || match (tls.first(), tcp.first()) {
        (Some(address), _) => format!("https://{address}"),
        (None, Some(address)) => format!("http://{address}"),
        (None, None) => format!("http://127.0.0.1:{DEFAULT_PORT}"),
    };
    let public_url = arguments.public_url.clone().unwrap_or_else(local);
    Settings {
        public_url: public_url.trim_end_matches('/').to_owned(),
        routing: arguments.routing_digit,
        digits: arguments.share_code_digits,
        default_expiry: arguments.default_expiry.min(arguments.max_expiry),
        max_expiry: arguments.max_expiry.min(lockbox_share::store::MAX_TTL),
        max_ciphertext: arguments.max_file,
        rates: Rates {
            per_minute: arguments.requests_per_minute,
            burst: arguments.burst,
            misses_per_minute: arguments.misses_per_minute,
        },
        trusted_proxies: arguments.trusted_proxy.clone(),
        creators: match arguments.creators {
            Who::Everybody => Creators::Everybody,
            Who::Local => Creators::UnixSocket,
        },
        max_connections: arguments.max_connections,
        head_timeout: arguments.head_timeout,
        body_timeout: arguments.body_timeout,
        stall_timeout: arguments.stall_timeout,
        grace: arguments.grace,
        stop_timeout: arguments.stop_timeout,
    }
}

/// Every connection takes a descriptor, and the usual soft limit is 1,024.
fn raise_descriptors() {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE)
        && soft < hard
        && let Err(error) = setrlimit(Resource::RLIMIT_NOFILE, hard, hard)
    {
        tracing::warn!(%error, "the limit of descriptors stays as it is");
    }
}

/// `$XDG_RUNTIME_DIR`, else `/run` for root, else `/tmp/lockbox-UID`, which must be this user's alone.
pub(crate) fn runtime_directory() -> Result<PathBuf, String> {
    if let Some(path) = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from)
        && path.is_absolute()
        && path.is_dir()
    {
        return Ok(path);
    }
    let uid = nix::unistd::geteuid();
    if uid.is_root() {
        return Ok(PathBuf::from("/run"));
    }
    let path = PathBuf::from(format!("/tmp/lockbox-{uid}"));
    match std::fs::DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(format!("cannot create {}: {error}", path.display()));
        }
        _ => {}
    }
    // Anybody may make a name in /tmp first: a directory of somebody else, or a link to one, is not taken.
    let metadata =
        std::fs::symlink_metadata(&path).map_err(|error| format!("cannot inspect {}: {error}", path.display()))?;
    if !metadata.is_dir() || metadata.uid() != uid.as_raw() || metadata.mode() & 0o077 != 0 {
        return Err(format!("{} is not a private directory of this user", path.display()));
    }
    Ok(path)
}

/// One `name=value` line for each listener, for people and for programs that start the daemon.
fn announce(running: &Running) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let mut lines: Vec<String> = running.tcp.iter().map(|address| format!("http={address}")).collect();
    lines.extend(running.tls.iter().map(|address| format!("https={address}")));
    lines.extend(running.unix().map(|path| format!("unix={}", path.display())));
    lines.extend(running.admin.map(|address| format!("metrics={address}")));
    lines.push("ready=1".into());
    // Nobody may be listening, which is no reason not to serve.
    let _ = writeln!(out, "{}", lines.join("\n"));
    let _ = out.flush();
}

/// Tells the service manager, when there is one.
fn notify(state: &str) {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(rest) => SocketAddr::from_abstract_name(rest),
        None => SocketAddr::from_pathname(&name),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(state.as_bytes(), &address));
    if let Err(error) = sent {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_sizes_are_read() {
        assert_eq!(time("15m"), Ok(Duration::from_secs(900)));
        assert_eq!(time("7d"), Ok(Duration::from_secs(604_800)));
        assert_eq!(time("90"), Ok(Duration::from_secs(90)));
        assert!(
            time("").is_err() && time("x").is_err() && time("m").is_err() && time("99999999999999999999d").is_err()
        );
        assert_eq!(size("16G"), Ok(16 << 30));
        assert_eq!(size("512"), Ok(512));
        assert!(size("").is_err() && size("G").is_err() && size("99999999999T").is_err());
    }

    #[test]
    fn none_means_no_address_and_nothing_means_the_default() {
        let default = "127.0.0.1:7377".parse().unwrap();
        assert_eq!(addresses(&[], default), Ok(vec![default]));
        assert_eq!(addresses(&["none".into()], default), Ok(vec![]));
        assert!(addresses(&["localhost".into()], default).is_err());
    }
}
