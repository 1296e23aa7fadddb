//! `lockbox-share serve`: one conversion of the options, one daemon, one end.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lockbox_share::http::listen::{self, Tcp, UnixSocket};
use lockbox_share::http::running::{self, Open, Running};
use lockbox_share::http::{Creators, Daemon, Network, Settings, is_loopback_authority, tls};
use lockbox_share::limiter::Rates;
use lockbox_share_protocol::api::{DEFAULT_PORT, SOCKET_NAME};

mod host;
mod stores;
mod values;

pub(crate) use host::{close_inherited, processors, runtime_directory};
use host::{connections_that_fit, notify, raise_descriptors};
use values::{size, time};

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
    /// Who may make shares; without it `local`, and `socket` with a public URL or trusted proxies
    #[arg(long, value_enum)]
    creators: Option<Who>,
    /// Connections of the network that may be open at a time; one address (IPv6: one /64) has a quarter of them at most
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    max_connections: usize,
    /// Time for the head of a request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    head_timeout: Duration,
    /// Time for a message, and between two parts of an upload
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    body_timeout: Duration,
    /// Time that a client may take less than 1 KiB/s of what is sent
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Who {
    /// All who reach the daemon
    Everybody,
    /// All on this machine: over its Unix socket or a loopback address, not through a proxy
    Local,
    /// All who reach its Unix socket
    Socket,
}

/// Starts the daemon, says where it is, and serves until a signal.
pub(crate) fn run(arguments: &Serve) -> Result<(), String> {
    let filter = tracing_subscriber::EnvFilter::try_from_env("LOCKBOX_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let descriptors = raise_descriptors();
    let signals = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("cannot wait for signals: {error}"))?;
    // Before the daemon answers: a signal that comes early must not end it without its flush.
    let mut stop = signals.block_on(async { Signals::new() })?;
    let (running, creators) = start(arguments, descriptors)?;
    announce(&running, creators);
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

fn start(arguments: &Serve, descriptors: usize) -> Result<(Running, Creators), String> {
    let workers = arguments.workers.unwrap_or_else(processors);
    let tcp = addresses(&arguments.listen, SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)))?;
    let tcp = tcp.into_iter().map(|address| listen::tcp(address, workers)).collect::<Result<Vec<_>, _>>()?;
    let admin: Vec<String> = arguments.metrics_listen.iter().cloned().collect();
    let admin = addresses(&admin, SocketAddr::from(([127, 0, 0, 1], ADMIN_PORT)))?.first().copied();
    let tls = match (&arguments.tls_cert, &arguments.tls_key) {
        (Some(certificate), Some(key)) => {
            let acceptor = tls::acceptor(certificate, key)?;
            let bound = arguments.tls_listen.iter().map(|address| listen::tcp(*address, workers));
            bound.map(|bound| Ok((bound?, acceptor.clone()))).collect::<Result<Vec<_>, String>>()?
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
    let (store, spool) = stores::open(arguments)?;
    let mut settings = settings(arguments, tcp.first(), tls.first().map(|(bound, _)| bound));
    settings.max_connections = connections_that_fit(arguments.max_connections, descriptors);
    if settings.max_connections < arguments.max_connections {
        let most = settings.max_connections;
        tracing::warn!("{descriptors} descriptors are enough for {most} connections: raise LimitNOFILE for more");
    }
    let creators = settings.creators;
    let open: Vec<SocketAddr> =
        tcp.iter().chain(tls.iter().map(|(bound, _)| bound)).map(|bound| bound.address).collect();
    if !somebody_may(creators, unix.is_some(), &open) {
        return Err("nobody could reach the daemon and make shares there: say who may, with --creators".into());
    }
    if creators == Creators::Everybody
        && let Some(address) = open.iter().find(|address| !address.ip().is_loopback())
    {
        tracing::warn!("everybody who reaches {address} may make shares");
    }
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(|error| format!("no randomness: {error}"))?;
    let daemon = Arc::new(Daemon::new(store, spool, settings, secret));
    Ok((running::start(daemon, Open { tcp, tls, unix, admin }, workers)?, creators))
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

fn settings(arguments: &Serve, tcp: Option<&Tcp>, tls: Option<&Tcp>) -> Settings {
    let local = || match (tls, tcp) {
        (Some(bound), _) => format!("https://{}", bound.address),
        (None, Some(bound)) => format!("http://{}", bound.address),
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
        creators: creators(arguments.creators, arguments.public_url.as_deref(), !arguments.trusted_proxy.is_empty()),
        max_connections: arguments.max_connections,
        head_timeout: arguments.head_timeout,
        body_timeout: arguments.body_timeout,
        stall_timeout: arguments.stall_timeout,
        grace: arguments.grace,
        stop_timeout: arguments.stop_timeout,
    }
}

/// Who may make shares: no strangers, unless somebody said so. With a public name or a listed proxy there is a proxy in front of the
/// daemon, of which a request over loopback need show no trace, and then the Unix socket alone tells who is on this machine.
fn creators(said: Option<Who>, public_url: Option<&str>, has_proxies: bool) -> Creators {
    match said {
        Some(Who::Everybody) => Creators::Everybody,
        Some(Who::Local) => Creators::ThisMachine,
        Some(Who::Socket) => Creators::UnixSocket,
        None if has_proxies || public_url.is_some_and(|url| !is_loopback_url(url)) => Creators::UnixSocket,
        None => Creators::ThisMachine,
    }
}

/// Whether anybody who may make shares can connect.
fn somebody_may(creators: Creators, has_socket: bool, open: &[SocketAddr]) -> bool {
    let near = |address: &SocketAddr| address.ip().is_loopback() || address.ip().is_unspecified();
    has_socket
        || match creators {
            Creators::Everybody => true,
            Creators::ThisMachine => open.iter().any(near),
            Creators::UnixSocket => false,
        }
}

fn is_loopback_url(url: &str) -> bool {
    let behind = url.split_once("://").map_or(url, |(_, behind)| behind);
    is_loopback_authority(behind.split(['/', '?', '#']).next().unwrap_or_default().as_bytes())
}

/// One `name=value` line for each listener and for who may make shares, for people and for programs that start the daemon.
fn announce(running: &Running, creators: Creators) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let mut lines: Vec<String> = running.tcp.iter().map(|address| format!("http={address}")).collect();
    lines.extend(running.tls.iter().map(|address| format!("https={address}")));
    lines.extend(running.unix().map(|path| format!("unix={}", path.display())));
    lines.extend(running.admin.map(|address| format!("metrics={address}")));
    let creators = match creators {
        Creators::Everybody => "everybody",
        Creators::ThisMachine => "local",
        Creators::UnixSocket => "socket",
    };
    lines.push(format!("creators={creators}"));
    lines.push("ready=1".into());
    // Nobody may be listening, which is no reason not to serve.
    let _ = writeln!(out, "{}", lines.join("\n"));
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_make_shares_only_when_somebody_said_so() {
        assert_eq!(creators(None, None, false), Creators::ThisMachine);
        for url in ["http://127.0.0.1:7377", "https://localhost", "http://[::1]:7377/x"] {
            assert_eq!(creators(None, Some(url), false), Creators::ThisMachine, "{url}");
        }
        let public = Some("https://share.example.org");
        for url in ["https://share.example.org", "http://192.0.2.1:7377", "http://127.0.0.1.example.org", "x"] {
            assert_eq!(creators(None, Some(url), false), Creators::UnixSocket, "{url}");
        }
        assert_eq!(creators(None, None, true), Creators::UnixSocket);
        assert_eq!(creators(Some(Who::Local), public, true), Creators::ThisMachine);
        assert_eq!(creators(Some(Who::Socket), None, false), Creators::UnixSocket);
        assert_eq!(creators(Some(Who::Everybody), public, true), Creators::Everybody);
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (near, any, far) = (address("127.0.0.1:1"), address("0.0.0.0:1"), address("192.0.2.1:1"));
        assert!(
            somebody_may(Creators::UnixSocket, true, &[far]) && !somebody_may(Creators::UnixSocket, false, &[near])
        );
        assert!(
            somebody_may(Creators::ThisMachine, false, &[far, near])
                && somebody_may(Creators::ThisMachine, false, &[any])
        );
        assert!(
            !somebody_may(Creators::ThisMachine, false, &[far]) && somebody_may(Creators::Everybody, false, &[far])
        );
    }

    #[test]
    fn none_means_no_address_and_nothing_means_the_default() {
        let default = "127.0.0.1:7377".parse().unwrap();
        assert_eq!(addresses(&[], default), Ok(vec![default]));
        assert_eq!(addresses(&["none".into()], default), Ok(vec![]));
        assert!(addresses(&["localhost".into()], default).is_err());
    }
}
