//! `lockbox-share serve`: starts the daemon that the options ask for, says where it is, and stops
//! it at a signal; and the host resources that it needs (descriptors, processors, the runtime
//! directory, the service manager).

use std::net::SocketAddr;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::{Args, ValueEnum};
use lockbox_share::http::server::{self, ListeningSockets, RunningServer, UnixSocket};
use lockbox_share::http::{CreatorPolicy, Daemon, DaemonSettings, LINGERING, LOCAL_CONNECTIONS};
use lockbox_share::store::env::SystemClock;
use lockbox_share::store::segments::{self, SegmentStore};
use lockbox_share::store::spool::Spool;
use lockbox_share::store::valkey::{ValkeySettings, ValkeyStore};
use lockbox_share::store::{MAX_TTL, Periods, ShareStore};
use lockbox_share_protocol::api::{DEFAULT_PORT, SOCKET_NAME};
use lockbox_share_protocol::link_scope::LinkScope;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;
use zeroize::Zeroizing;

const ADMIN_PORT: u16 = DEFAULT_PORT + 1;

/// Serve one-time links until SIGTERM
///
/// Without further options it listens on 127.0.0.1:7377 and on a Unix socket in the runtime directory, and shows health and metrics on 127.0.0.1:7378.
#[derive(Args)]
pub(crate) struct Serve {
    /// Directory of the shares, made if it is missing
    #[arg(long, value_name = "DIR")]
    state_dir: PathBuf,
    /// Keep the shares in a Valkey server instead, valkey://HOST:PORT/DB; ciphertext stays in the state directory
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// File with the password of that server
    #[arg(long, value_name = "FILE", requires = "store")]
    store_password_file: Option<PathBuf>,
    /// Address for HTTP; may be repeated, `none` for no address
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Vec<String>,
    /// Unix socket, `none` for no socket
    #[arg(long, value_name = "PATH")]
    unix_socket: Option<PathBuf>,
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
    metrics_listen: Option<String>,
    #[command(flatten)]
    settings: DaemonSettings,
    /// Event loops; without it one for each processor
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
}

pub(crate) fn run(arguments: &Serve) -> Result<(), String> {
    let filter = EnvFilter::try_from_env("LOCKBOX_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
    let descriptors = raise_descriptors();
    let failed = |error: std::io::Error| format!("cannot wait for signals: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    // Before the daemon answers: a signal that comes early must not end it without its flush.
    let signals = runtime.enter();
    let mut terminate = signal(SignalKind::terminate()).map_err(failed)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(failed)?;
    drop(signals);
    let (running, creators) = start(arguments, descriptors)?;
    announce(&running, creators);
    notify("READY=1");
    runtime.block_on(async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    });
    notify("STOPPING=1");
    tracing::info!("stopping");
    running.stop()
}

fn start(arguments: &Serve, descriptors: usize) -> Result<(RunningServer, CreatorPolicy), String> {
    let processors = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let workers = arguments.workers.unwrap_or_else(processors);
    let mut tcp = Vec::new();
    for address in addresses(&arguments.listen, SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)))? {
        tcp.push((server::listen_tcp(address, workers)?, None));
    }
    let admin = arguments.metrics_listen.as_slice();
    let admin = addresses(admin, SocketAddr::from(([127, 0, 0, 1], ADMIN_PORT)))?.first().copied();
    if let (Some(certificate), Some(key)) = (&arguments.tls_cert, &arguments.tls_key) {
        let acceptor = server::tls_acceptor(certificate, key)?;
        for address in &arguments.tls_listen {
            tcp.push((server::listen_tcp(*address, workers)?, Some(acceptor.clone())));
        }
    }
    let open: Vec<_> = tcp.iter().map(|(bound, acceptor)| (bound.address, acceptor.is_some())).collect();
    let unix = match &arguments.unix_socket {
        Some(path) if path.as_os_str() == "none" => None,
        Some(path) => Some(path.clone()),
        None => Some(runtime_directory()?.join(SOCKET_NAME)),
    };
    let refused = |path: &Path, error: std::io::Error| format!("cannot listen on {}: {error}", path.display());
    let unix = unix.map(|path| UnixSocket::bind(&path).map_err(|error| refused(&path, error))).transpose()?;
    let proxies = match &arguments.settings.proxy_socket {
        None => None,
        Some(path) => {
            let users =
                arguments.settings.proxy_user.iter().map(|user| number_of(user)).collect::<Result<Vec<_>, _>>()?;
            Some((UnixSocket::bind_for_all(path).map_err(|error| refused(path, error))?, users))
        }
    };
    let (store, spool) = open_store(arguments)?;
    let mut settings = arguments.settings.clone();
    settings.default_expiry = settings.default_expiry.min(settings.max_expiry);
    settings.max_expiry = settings.max_expiry.min(MAX_TTL);
    settings.max_connections = connections_that_fit(settings.max_connections, descriptors);
    if settings.max_connections < arguments.settings.max_connections {
        let most = settings.max_connections;
        tracing::warn!("{descriptors} descriptors are enough for {most} connections: raise LimitNOFILE for more");
    }
    let local = || match open.iter().find(|(_, is_tls)| *is_tls).or(open.first()) {
        Some((address, true)) => format!("https://{address}"),
        Some((address, false)) => format!("http://{address}"),
        None => format!("http://127.0.0.1:{DEFAULT_PORT}"),
    };
    let public_url = settings.public_url.clone().unwrap_or_else(local).trim_end_matches('/').to_owned();
    if let Some(told) = LinkScope::warning(&public_url) {
        tracing::warn!("{told}");
    }
    let creators = settings.creator_policy();
    let open: Vec<SocketAddr> = open.into_iter().map(|(address, _)| address).collect();
    if !somebody_may(creators, unix.is_some(), &open) {
        return Err("no client could make shares with this daemon; allow some with --creators".into());
    }
    if creators == CreatorPolicy::Anyone
        && let Some(address) = open.iter().find(|address| !address.ip().is_loopback())
    {
        tracing::warn!("any client that reaches {address} may make shares");
    }
    let mut secret = [0; 16];
    getrandom::fill(&mut secret).map_err(|error| format!("no randomness: {error}"))?;
    let daemon = Arc::new(Daemon::new(store, spool, settings, public_url, secret));
    Ok((server::start(daemon, ListeningSockets { tcp, unix, proxies, admin }, workers)?, creators))
}

/// Returns the number of a user, given by name or number.
fn number_of(user: &str) -> Result<u32, String> {
    if let Ok(number) = user.parse() {
        return Ok(number);
    }
    match nix::unistd::User::from_name(user) {
        Ok(Some(found)) => Ok(found.uid.as_raw()),
        Ok(None) => Err(format!("cannot find user {user} of --proxy-user on this machine")),
        Err(errno) => Err(format!("cannot look up the user {user}: {}", errno.desc())),
    }
}

fn addresses(given: &[String], default: SocketAddr) -> Result<Vec<SocketAddr>, String> {
    match given {
        [] => Ok(vec![default]),
        [none] if none == "none" => Ok(Vec::new()),
        _ => given
            .iter()
            .map(|text| text.parse().map_err(|_| format!("expected ADDRESS:PORT, such as 127.0.0.1:7377, got {text}")))
            .collect(),
    }
}

/// Returns whether any client that may create shares can connect.
fn somebody_may(creators: CreatorPolicy, has_socket: bool, open: &[SocketAddr]) -> bool {
    let near = |address: &SocketAddr| address.ip().is_loopback() || address.ip().is_unspecified();
    has_socket
        || match creators {
            CreatorPolicy::Anyone => true,
            CreatorPolicy::ThisMachine => open.iter().any(near),
            CreatorPolicy::UnixSocket => false,
        }
}

/// Prints `name=value` lines of listeners and creator policy, for people and parent processes.
fn announce(running: &RunningServer, creators: CreatorPolicy) {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    let name = |is_tls: &bool| if *is_tls { "https" } else { "http" };
    let tcp = running.tcp.iter().map(|(address, is_tls)| format!("{}={address}", name(is_tls)));
    let mut lines: Vec<String> = tcp.collect();
    lines.extend(running.unix().map(|path| format!("unix={}", path.display())));
    lines.extend(running.proxies().map(|path| format!("proxies={}", path.display())));
    lines.extend(running.admin.map(|address| format!("metrics={address}")));
    lines.extend(creators.to_possible_value().map(|value| format!("creators={}", value.get_name())));
    lines.push("ready=1".into());
    // No program may be listening, which is no reason not to serve.
    let _ = writeln!(out, "{}", lines.join("\n"));
    let _ = out.flush();
}

type Stores = (Arc<dyn ShareStore>, Arc<Spool>);

fn open_store(arguments: &Serve) -> Result<Stores, String> {
    let state = &arguments.state_dir;
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .map_err(|error| format!("cannot create {}: {error}", state.display()))?;
    if let Some(url) = &arguments.store {
        return open_valkey(url, arguments);
    }
    let settings = segments::SegmentSettings {
        durability: arguments.settings.durability,
        spool_capacity: arguments.settings.spool_size,
        ..segments::SegmentSettings::default()
    };
    let store = SegmentStore::open(state, &settings).map_err(|error| error.to_string())?;
    let spool = store.spool().cloned().ok_or("the store has no spool")?;
    Ok((Arc::new(store), spool))
}

fn open_valkey(url: &str, arguments: &Serve) -> Result<Stores, String> {
    let mut password = None;
    if let Some(path) = &arguments.store_password_file {
        let text = std::fs::read_to_string(path).map(Zeroizing::new);
        let text = text.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        password = Some(Zeroizing::new(text.trim_end_matches('\n').to_owned()));
    }
    let settings = ValkeySettings {
        url: url.to_owned(),
        password,
        durability: arguments.settings.durability,
        periods: Periods::default(),
        clock: Arc::new(SystemClock),
    };
    let mut store = ValkeyStore::connect(&settings).map_err(|error| error.to_string())?;
    let directory = arguments.state_dir.join("spool");
    // Daemons that serve the same links may share it.
    let spool = Spool::open_shared(&directory, arguments.settings.spool_size)
        .map_err(|error| format!("cannot open {}: {error}", directory.display()))?;
    store.sweep_in_background(spool.clone()).map_err(|error| error.to_string())?;
    Ok((Arc::new(store), spool))
}

/// Raises and returns the limit of descriptors: a connection takes one, and 1,024 are usual.
fn raise_descriptors() -> usize {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return USUAL_DESCRIPTORS };
    let mut most = soft;
    if soft < hard {
        match setrlimit(Resource::RLIMIT_NOFILE, hard, hard) {
            Ok(()) => most = hard,
            Err(error) => tracing::warn!(%error, "cannot raise the limit of descriptors"),
        }
    }
    usize::try_from(most).unwrap_or(usize::MAX)
}

/// Assumed limit when it cannot be read.
const USUAL_DESCRIPTORS: usize = 1024;
/// Descriptors not available to network connections: the Unix socket, refused connections
/// that linger, running downloads and uploads with their files, the store.
const BESIDE: usize = LOCAL_CONNECTIONS + LINGERING + 1024 + 64 + 256;

/// Connections of the network that leave descriptors to all else, so that no number of them keeps
/// the Unix socket from being served.
fn connections_that_fit(wanted: usize, descriptors: usize) -> usize {
    wanted.min(descriptors.saturating_sub(BESIDE).max(descriptors / 2))
}

/// Closes inherited descriptors: they could keep a file, a pipe or a lock open for the daemon's
/// lifetime. Call it before anything is opened. A service manager passes only the three standard
/// descriptors and a name in `NOTIFY_SOCKET`.
pub(crate) fn close_inherited() {
    let most = std::fs::read_dir("/proc/self/fd").map_or_else(
        |_| (3..USUAL_DESCRIPTORS as i32).collect::<Vec<_>>(),
        |open| open.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect(),
    );
    for descriptor in most.into_iter().filter(|descriptor| *descriptor > 2) {
        // That of the listing itself is closed already.
        let _ = nix::unistd::close(descriptor);
    }
}

/// `$XDG_RUNTIME_DIR`, else `/run` for root, else `/tmp/lockbox-UID`, private to this user.
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
    if let Err(error) = std::fs::DirBuilder::new().mode(0o700).create(&path)
        && error.kind() != std::io::ErrorKind::AlreadyExists
    {
        return Err(format!("cannot create {}: {error}", path.display()));
    }
    // Any user may make a name in /tmp first: another user's directory, or a link to one, is
    // refused.
    let metadata =
        std::fs::symlink_metadata(&path).map_err(|error| format!("cannot inspect {}: {error}", path.display()))?;
    if !metadata.is_dir() || metadata.uid() != uid.as_raw() || metadata.mode() & 0o077 != 0 {
        return Err(format!(
            "{} is not a private directory of this user: set XDG_RUNTIME_DIR to one, or name a socket with --unix-socket",
            path.display()
        ));
    }
    Ok(path)
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
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn somebody_must_be_able_to_make_shares() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (near, any, far) = (address("127.0.0.1:1"), address("0.0.0.0:1"), address("192.0.2.1:1"));
        assert!(
            somebody_may(CreatorPolicy::UnixSocket, true, &[far])
                && !somebody_may(CreatorPolicy::UnixSocket, false, &[near])
        );
        assert!(
            somebody_may(CreatorPolicy::ThisMachine, false, &[far, near])
                && somebody_may(CreatorPolicy::ThisMachine, false, &[any])
        );
        assert!(
            !somebody_may(CreatorPolicy::ThisMachine, false, &[far])
                && somebody_may(CreatorPolicy::Anyone, false, &[far])
        );
    }

    #[test]
    fn none_means_no_address_and_nothing_means_the_default() {
        let default = "127.0.0.1:7377".parse().unwrap();
        assert_eq!(addresses(&[], default), Ok(vec![default]));
        assert_eq!(addresses(&["none".into()], default), Ok(vec![]));
        assert!(addresses(&["localhost".into()], default).is_err());
    }

    #[test]
    fn connections_leave_descriptors_to_all_else() {
        assert_eq!(connections_that_fit(20_000, 524_288), 20_000);
        assert_eq!(connections_that_fit(20_000, 20_000), 20_000 - BESIDE);
        assert_eq!(connections_that_fit(20_000, 4096), 2048);
        assert_eq!(connections_that_fit(8, 96), 8);
    }
}
