//! Settings of the daemon, which are options of `lockbox-share serve`.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use clap::{Args, ValueEnum};
use lockbox_share_protocol::message::{Limits, MAX_BATCH, MAX_CLAIMS};
use lockbox_terminal::quantity;

use super::client_addr::{Network, is_loopback_authority};
use crate::limiter::Rates;
use crate::store::Durability;

#[derive(Args, Clone, Debug)]
pub struct DaemonSettings {
    /// Beginning of the links, when clients reach the daemon by another name
    #[arg(long, value_name = "URL")]
    pub public_url: Option<String>,
    /// First digit of the handles: names this server in a fleet
    #[arg(long, value_name = "DIGIT", default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=9))]
    pub routing_digit: u8,
    /// Random digits of the handles
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u32).range(6..=12))]
    pub share_code_digits: u32,
    /// When a reply is given
    #[arg(long, value_enum, default_value_t = Durability::Commit)]
    pub durability: Durability,
    /// Lifetime of shares that name none
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time)]
    pub default_expiry: Duration,
    /// Longest lifetime that a share may ask for
    #[arg(long, value_name = "TIME", default_value = "7d", value_parser = time)]
    pub max_expiry: Duration,
    /// Largest ciphertext of one share
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = size)]
    pub max_file: u64,
    /// Largest sum of all ciphertexts
    #[arg(long, value_name = "SIZE", default_value = "64G", value_parser = size)]
    pub spool_size: u64,
    #[command(flatten)]
    pub rates: Rates,
    /// Address or network of a proxy with a trusted X-Forwarded-For header; may be repeated
    #[arg(long = "trusted-proxy", value_name = "NETWORK")]
    pub trusted_proxies: Vec<Network>,
    /// Unix socket for proxies (X-Forwarded-For is believed); only the users of --proxy-user may
    /// connect
    #[arg(long, value_name = "PATH", requires = "proxy_user")]
    pub proxy_socket: Option<PathBuf>,
    /// User, by name or number, that runs a proxy; may be repeated
    #[arg(long, value_name = "USER", requires = "proxy_socket")]
    pub proxy_user: Vec<String>,
    /// Clients that may make shares; default `local`, `socket` with a public URL or trusted proxies
    #[arg(long, value_enum)]
    pub creators: Option<CreatorPolicy>,
    /// Connections of the network that may be open at a time; one address (IPv6: one /64) has a quarter of them at most
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    pub max_connections: usize,
    /// Time for the head of a request
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time)]
    pub head_timeout: Duration,
    /// Time for a message, and between two parts of an upload
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub body_timeout: Duration,
    /// Time for which a client may receive less than 1 KiB/s
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub stall_timeout: Duration,
    /// Time after the last byte in which a download may be resumed
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time)]
    pub grace: Duration,
    /// Time for running requests when the daemon stops
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time)]
    pub stop_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CreatorPolicy {
    /// All clients that reach the daemon
    #[value(name = "everybody")]
    Anyone,
    /// All clients on this machine: over its Unix socket or a loopback address, not through a proxy
    #[value(name = "local")]
    ThisMachine,
    /// All clients that reach its Unix socket
    #[value(name = "socket")]
    UnixSocket,
}

fn time(text: &str) -> Result<Duration, String> {
    quantity::time(text).ok_or_else(|| "a number with s, m, h or d is expected".into())
}

fn size(text: &str) -> Result<u64, String> {
    quantity::size(text).ok_or_else(|| "a number with K, M, G or T is expected".into())
}

impl DaemonSettings {
    pub fn creator_policy(&self) -> CreatorPolicy {
        let has_proxies = !self.trusted_proxies.is_empty() || self.proxy_socket.is_some();
        creators(self.creators, self.public_url.as_deref(), has_proxies)
    }

    pub(super) fn limits(&self, public_url: &str) -> Bytes {
        let limits = Limits {
            protocol: 1,
            default_expiry: self.default_expiry.as_secs(),
            max_expiry: self.max_expiry.as_secs(),
            max_ciphertext: self.max_file,
            max_claims: MAX_CLAIMS,
            max_batch: MAX_BATCH,
            public_url: public_url.to_owned(),
        };
        Bytes::from(serde_json::to_vec(&limits).unwrap_or_default())
    }
}

/// Chooses the default policy for creating shares: no remote clients unless the option allows them.
/// With a public name or a listed proxy there is a proxy in front of the daemon, and its requests
/// over loopback need show no trace of it; then only the Unix socket proves that a client is local.
fn creators(said: Option<CreatorPolicy>, public_url: Option<&str>, has_proxies: bool) -> CreatorPolicy {
    let is_proxied = has_proxies || public_url.is_some_and(|url| !is_loopback_url(url));
    said.unwrap_or(if is_proxied { CreatorPolicy::UnixSocket } else { CreatorPolicy::ThisMachine })
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
        assert_eq!(creators(Some(CreatorPolicy::ThisMachine), public, true), CreatorPolicy::ThisMachine);
        assert_eq!(creators(Some(CreatorPolicy::UnixSocket), None, false), CreatorPolicy::UnixSocket);
        assert_eq!(creators(Some(CreatorPolicy::Anyone), public, true), CreatorPolicy::Anyone);
    }
}
