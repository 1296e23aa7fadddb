//! The options of `lockbox-share serve`, and the daemon's settings that they come to.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use lockbox_share::http::{CreatorPolicy, DaemonSettings, Network, is_loopback_authority};
use lockbox_share::limiter::Rates;
use lockbox_share::store::{Durability, MAX_TTL};
use lockbox_share_protocol::api::DEFAULT_PORT;
use lockbox_terminal::quantity;

/// Serve one-time links until SIGTERM
///
/// Without further options it listens on 127.0.0.1:7377 and on a Unix socket in the runtime directory, and shows health and metrics on 127.0.0.1:7378.
#[derive(Args)]
pub(crate) struct Serve {
    /// Directory of the shares, made if it is missing
    #[arg(long, value_name = "DIR")]
    pub(super) state_dir: PathBuf,
    /// Keep the shares in a Valkey server instead, valkey://HOST:PORT/DB; ciphertext stays in the state directory
    #[arg(long, value_name = "URL")]
    pub(super) store: Option<String>,
    /// File with the password of that server
    #[arg(long, value_name = "FILE", requires = "store")]
    pub(super) store_password_file: Option<PathBuf>,
    /// Address for HTTP; may be repeated, `none` for no address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(super) listen: Vec<String>,
    /// Unix socket, `none` for no socket
    #[arg(long, value_name = "PATH")]
    pub(super) unix_socket: Option<PathBuf>,
    /// Address for HTTPS; may be repeated
    #[arg(long, value_name = "ADDRESS:PORT", requires_all = ["tls_cert", "tls_key"])]
    pub(super) tls_listen: Vec<SocketAddr>,
    /// Certificate chain for HTTPS, PEM
    #[arg(long, value_name = "FILE")]
    pub(super) tls_cert: Option<PathBuf>,
    /// Private key for HTTPS, PEM
    #[arg(long, value_name = "FILE")]
    pub(super) tls_key: Option<PathBuf>,
    /// Address for health and metrics, `none` for no address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(super) metrics_listen: Option<String>,
    /// Beginning of the links, when clients reach the daemon by another name
    #[arg(long, value_name = "URL")]
    pub(super) public_url: Option<String>,
    /// First digit of the handles: names this server in a fleet
    #[arg(long, value_name = "DIGIT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=9))]
    pub(super) routing_digit: u8,
    /// Random digits of the handles
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(6..=12))]
    pub(super) share_code_digits: u32,
    /// When a reply is given
    #[arg(long, value_enum, default_value_t = Mode::Commit)]
    pub(super) durability: Mode,
    /// Lifetime of shares that name none
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time)]
    pub(super) default_expiry: Duration,
    /// Longest lifetime that a share may ask for
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = time)]
    pub(super) max_expiry: Duration,
    /// Largest ciphertext of one share
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = size)]
    pub(super) max_file: u64,
    /// Largest sum of all ciphertexts
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = size)]
    pub(super) spool_size: u64,
    /// Requests in a minute that one address (IPv6: one /64) may make; 0 for no limit
    #[arg(long, value_name = "N", default_value_t = Rates::default().per_minute)]
    pub(super) requests_per_minute: u32,
    /// Requests that one address may make at once
    #[arg(long, value_name = "N", default_value_t = Rates::default().burst, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) burst: u32,
    /// Wrong claims in a minute, of all clients, until the clients that made one must wait
    #[arg(long, value_name = "N", default_value_t = Rates::default().misses_per_minute)]
    pub(super) misses_per_minute: u32,
    /// Address or network of a proxy with a trusted X-Forwarded-For header; may be repeated
    #[arg(long, value_name = "NETWORK")]
    pub(super) trusted_proxy: Vec<Network>,
    /// Unix socket for proxies (X-Forwarded-For is believed); only the users of --proxy-user may
    /// connect
    #[arg(long, value_name = "PATH", requires = "proxy_user")]
    pub(super) proxy_socket: Option<PathBuf>,
    /// User, by name or number, that runs a proxy; may be repeated
    #[arg(long, value_name = "USER", requires = "proxy_socket")]
    pub(super) proxy_user: Vec<String>,
    /// Clients that may make shares; default `local`, `socket` with a public URL or trusted proxies
    #[arg(long, value_enum)]
    pub(super) creators: Option<CreatorsOption>,
    /// Connections of the network that may be open at a time; one address (IPv6: one /64) has a quarter of them at most
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub(super) max_connections: usize,
    /// Time for the head of a request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub(super) head_timeout: Duration,
    /// Time for a message, and between two parts of an upload
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub(super) body_timeout: Duration,
    /// Time for which a client may receive less than 1 KiB/s
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(super) stall_timeout: Duration,
    /// Time after the last byte in which a download may be resumed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub(super) grace: Duration,
    /// Time for running requests when the daemon stops
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub(super) stop_timeout: Duration,
    /// Event loops; without it one for each processor
    #[arg(long, value_name = "N")]
    pub(super) workers: Option<usize>,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Mode {
    /// After its change is durable
    Commit,
    /// At once; a power cut loses or repeats 50 ms
    Periodic,
    /// At once; a power cut loses or repeats changes that the kernel had not written
    None,
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum CreatorsOption {
    /// All clients that reach the daemon
    Everybody,
    /// All clients on this machine: over its Unix socket or a loopback address, not through a proxy
    Local,
    /// All clients that reach its Unix socket
    Socket,
}

fn time(text: &str) -> Result<Duration, String> {
    quantity::time(text).ok_or_else(|| "a number with s, m, h or d is expected".into())
}

fn size(text: &str) -> Result<u64, String> {
    quantity::size(text).ok_or_else(|| "a number with K, M, G or T is expected".into())
}

/// The daemon's settings, for one that has these addresses of the network, each with whether it is for HTTPS.
pub(super) fn settings(arguments: &Serve, open: &[(SocketAddr, bool)]) -> DaemonSettings {
    let local = || match open.iter().find(|(_, is_tls)| *is_tls).or(open.first()) {
        Some((address, true)) => format!("https://{address}"),
        Some((address, false)) => format!("http://{address}"),
        None => format!("http://127.0.0.1:{DEFAULT_PORT}"),
    };
    let public_url = arguments.public_url.clone().unwrap_or_else(local);
    DaemonSettings {
        public_url: public_url.trim_end_matches('/').to_owned(),
        routing: arguments.routing_digit,
        digits: arguments.share_code_digits,
        default_expiry: arguments.default_expiry.min(arguments.max_expiry),
        max_expiry: arguments.max_expiry.min(MAX_TTL),
        max_ciphertext: arguments.max_file,
        rates: Rates {
            per_minute: arguments.requests_per_minute,
            burst: arguments.burst,
            misses_per_minute: arguments.misses_per_minute,
        },
        trusted_proxies: arguments.trusted_proxy.clone(),
        creators: creators(
            arguments.creators,
            arguments.public_url.as_deref(),
            !arguments.trusted_proxy.is_empty() || arguments.proxy_socket.is_some(),
        ),
        max_connections: arguments.max_connections,
        head_timeout: arguments.head_timeout,
        body_timeout: arguments.body_timeout,
        stall_timeout: arguments.stall_timeout,
        grace: arguments.grace,
        stop_timeout: arguments.stop_timeout,
    }
}

/// Chooses the default policy for creating shares: no remote clients unless the option allows them.
/// With a public name or a listed proxy there is a proxy in front of the daemon, and its requests
/// over loopback need show no trace of it; then only the Unix socket proves that a client is local.
fn creators(said: Option<CreatorsOption>, public_url: Option<&str>, has_proxies: bool) -> CreatorPolicy {
    match said {
        Some(CreatorsOption::Everybody) => CreatorPolicy::Anyone,
        Some(CreatorsOption::Local) => CreatorPolicy::ThisMachine,
        Some(CreatorsOption::Socket) => CreatorPolicy::UnixSocket,
        None if has_proxies || public_url.is_some_and(|url| !is_loopback_url(url)) => CreatorPolicy::UnixSocket,
        None => CreatorPolicy::ThisMachine,
    }
}

fn is_loopback_url(url: &str) -> bool {
    let behind = url.split_once("://").map_or(url, |(_, behind)| behind);
    is_loopback_authority(behind.split(['/', '?', '#']).next().unwrap_or_default().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_make_shares_only_when_somebody_said_so() {
        assert_eq!(creators(None, None, false), CreatorPolicy::ThisMachine);
        for url in ["http://127.0.0.1:7377", "https://localhost", "http://[::1]:7377/x"] {
            assert_eq!(creators(None, Some(url), false), CreatorPolicy::ThisMachine, "{url}");
        }
        let public = Some("https://share.example.org");
        for url in ["https://share.example.org", "http://192.0.2.1:7377", "http://127.0.0.1.example.org", "x"] {
            assert_eq!(creators(None, Some(url), false), CreatorPolicy::UnixSocket, "{url}");
        }
        assert_eq!(creators(None, None, true), CreatorPolicy::UnixSocket);
        assert_eq!(creators(Some(CreatorsOption::Local), public, true), CreatorPolicy::ThisMachine);
        assert_eq!(creators(Some(CreatorsOption::Socket), None, false), CreatorPolicy::UnixSocket);
        assert_eq!(creators(Some(CreatorsOption::Everybody), public, true), CreatorPolicy::Anyone);
    }
}
