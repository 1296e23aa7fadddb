//! Files and ports that a fetcher needs once it is confined.

use std::path::{Path, PathBuf};

use url::Url;

use crate::Options;
use crate::address::{Address, Cloud};
use crate::cache::make;
use crate::credentials::{self, variable};

/// Where the libraries of TLS look for certificates of authorities; they are read, and are no
/// secret. `/etc/ssl/private` is not below.
const AUTHORITIES: [&str; 10] = [
    "/etc/ssl/certs",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/tls/certs",
    "/etc/pki/tls/cert.pem",
    "/etc/pki/ca-trust/extracted",
    "/etc/ca-certificates/extracted",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/var/lib/ca-certificates",
];
/// By which a writer knows whether another one of this machine is alive. Of other processes /proc
/// tells a confined one no memory.
const OWNERS: [&str; 2] = ["/proc", "/etc/machine-id"];

/// Files and ports that stay within reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetcherReach {
    /// Directories in which files are made, written and removed.
    pub written: Vec<PathBuf>,
    /// Files, and directories with all below them, that are read.
    pub read: Vec<PathBuf>,
    /// TCP ports of servers; None for all, since a web server may redirect anywhere.
    pub ports: Option<Vec<u16>>,
}

impl FetcherReach {
    /// Makes the directories of caches where they are missing: nothing above them can be made
    /// later.
    pub(crate) fn of(address: &str, options: &Options, writes: bool) -> FetcherReach {
        let address = Address::parse(address.as_ref()).ok().flatten();
        let cache = options.cache_directory.clone().filter(|_| options.cache_bytes != Some(0));
        let spool = options.spool_directory.clone().filter(|_| writes || options.unsent);
        let mut written: Vec<PathBuf> = cache.into_iter().chain(spool).collect();
        for directory in &written {
            // Whoever needs it says why it is missing.
            let _ = make(directory);
        }
        let mut read: Vec<PathBuf> = OWNERS.iter().map(PathBuf::from).collect();
        match &address {
            Some(Address::Directory(url)) => written.extend(url.to_file_path()),
            _ => {
                let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter_map(variable);
                let named = named.flat_map(|list| list.split(':').map(PathBuf::from).collect::<Vec<_>>());
                read.extend(AUTHORITIES.iter().map(PathBuf::from).chain(named));
            }
        }
        read.retain(|path| Path::new(path).exists());
        let ports = address.and_then(|address| ports(&address, options));
        FetcherReach { written, read, ports }
    }
}

/// None for all: where the port is unknown, the opening reports the reason.
fn ports(address: &Address, options: &Options) -> Option<Vec<u16>> {
    let endpoint = match address {
        Address::Web(_) => return None,
        Address::Directory(_) => return Some(Vec::new()),
        Address::Bucket { cloud: Cloud::S3, .. } => credentials::place(options.broker.as_ref()).ok()?.endpoint,
        Address::Bucket { cloud: Cloud::Google, .. } => variable("STORAGE_EMULATOR_HOST"),
        Address::Bucket { cloud: Cloud::Azure, .. } => Some(crate::azure::endpoint(options.broker.as_ref()).ok()?),
    };
    let server = match endpoint {
        Some(endpoint) => Url::parse(&endpoint).ok()?.port_or_known_default()?,
        None => 443,
    };
    let proxy = ureq::Proxy::try_from_env();
    Some([server].into_iter().chain(proxy.map(|proxy| proxy.port())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_needs_no_port_and_a_cache_is_made() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        let options = Options {
            cache_directory: Some(at("a/cache")),
            spool_directory: Some(at("a/unsent")),
            ..Options::default()
        };
        let reach = |address: &str, options: &Options, writes| FetcherReach::of(address, options, writes);
        let directory = format!("file://{}", at("objects").display());
        let found = reach(&directory, &options, true);
        assert_eq!(found.written, [at("a/cache"), at("a/unsent"), at("objects")]);
        assert_eq!(found.ports, Some(Vec::new()));
        assert!(at("a/cache").is_dir() && at("a/unsent").is_dir() && !at("objects").exists());
        let reading = reach("https://host.example/a.lbx", &Options { cache_bytes: Some(0), ..options }, false);
        assert_eq!((reading.written, reading.ports), (Vec::new(), None));
        assert!(reading.read.contains(&PathBuf::from("/proc")));
    }
}
