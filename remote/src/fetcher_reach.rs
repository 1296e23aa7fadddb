//! Files and ports that a confined fetcher may access.

use std::path::{Path, PathBuf};

use url::Url;

use crate::RemoteOptions;
use crate::address::{Address, Cloud};
use crate::cache::create_private_dir;
use crate::credentials::{self, variable};

/// CA certificate paths of TLS libraries: readable and not secret. `/etc/ssl/private` is not below
/// them.
const CA_PATHS: [&str; 10] = [
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
/// Paths that show whether another writer of this machine is alive. A confined process cannot read
/// the memory of others through /proc.
const LIVENESS_PATHS: [&str; 2] = ["/proc", "/etc/machine-id"];

/// Files and ports that the sandbox must allow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FetcherReach {
    /// Directories in which files are created, written and removed.
    pub written: Vec<PathBuf>,
    /// Files and directory trees that are read.
    pub read: Vec<PathBuf>,
    /// TCP ports of servers; None for all, since a web server may redirect anywhere.
    pub ports: Option<Vec<u16>>,
}

impl FetcherReach {
    /// Lists the accessible paths and creates missing cache directories, which a confined process
    /// cannot.
    pub(crate) fn of(address: &str, options: &RemoteOptions, writes: bool) -> FetcherReach {
        let address = Address::parse(address.as_ref()).ok().flatten();
        let cache = options.cache_directory.clone().filter(|_| options.cache_bytes != Some(0));
        let spool = options.spool_directory.clone().filter(|_| writes || options.unsent);
        let mut written: Vec<PathBuf> = cache.into_iter().chain(spool).collect();
        for directory in &written {
            // The code that needs the directory reports the error.
            let _ = create_private_dir(directory);
        }
        let mut read: Vec<PathBuf> = LIVENESS_PATHS.iter().map(PathBuf::from).collect();
        match &address {
            Some(Address::Directory(url)) => written.extend(url.to_file_path()),
            _ => {
                let named = ["SSL_CERT_FILE", "SSL_CERT_DIR"].into_iter().filter_map(variable);
                let named = named.flat_map(|list| list.split(':').map(PathBuf::from).collect::<Vec<_>>());
                read.extend(CA_PATHS.iter().map(PathBuf::from).chain(named));
            }
        }
        read.retain(|path| Path::new(path).exists());
        let ports = address.and_then(|address| ports(&address, options));
        FetcherReach { written, read, ports }
    }
}

/// Returns the allowed ports; None for all, if the port is unknown: the open reports the reason.
fn ports(address: &Address, options: &RemoteOptions) -> Option<Vec<u16>> {
    let endpoint = match address {
        Address::Web(_) => return None,
        Address::Directory(_) => return Some(Vec::new()),
        Address::Bucket { cloud: Cloud::S3, .. } => {
            credentials::region_endpoint(options.broker.as_ref()).ok()?.endpoint
        }
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
        let options = RemoteOptions {
            cache_directory: Some(at("a/cache")),
            spool_directory: Some(at("a/unsent")),
            ..RemoteOptions::default()
        };
        let reach = |address: &str, options: &RemoteOptions, writes| FetcherReach::of(address, options, writes);
        let directory = format!("file://{}", at("objects").display());
        let found = reach(&directory, &options, true);
        assert_eq!(found.written, [at("a/cache"), at("a/unsent"), at("objects")]);
        assert_eq!(found.ports, Some(Vec::new()));
        assert!(at("a/cache").is_dir() && at("a/unsent").is_dir() && !at("objects").exists());
        let reading = reach("https://host.example/a.lbx", &RemoteOptions { cache_bytes: Some(0), ..options }, false);
        assert_eq!((reading.written, reading.ports), (Vec::new(), None));
        assert!(reading.read.contains(&PathBuf::from("/proc")));
    }
}
