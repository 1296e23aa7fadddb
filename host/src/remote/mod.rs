//! Remote archives: their names in programs, and access to them.
//!
//! `lockbox_remote` implements access to an address.

mod remote_access;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lockbox::Result;
use lockbox::control::RemoteTraffic;
use lockbox::storage::{ArchiveSource, Storage};
use lockbox_terminal::quantity;
use serde::{Deserialize, Serialize};

/// Options for requests to servers (`--remote`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Remote {
    allow_http: bool,
    allow_private: bool,
    /// Most bytes that are kept on disk.
    cache_bytes: Option<u64>,
    timeout: Option<ServerTimeout>,
    /// True to read the data that this host caches of it.
    #[serde(default)]
    unsent: bool,
}

/// Time that a read waits for a server that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum ServerTimeout {
    Until(Duration),
    ForEver,
}

impl Remote {
    /// Returns these options without the cache on disk, for a process that starts another one,
    /// which uses the cache.
    pub fn without_cache(&self) -> Remote {
        Remote { cache_bytes: Some(0), ..self.clone() }
    }

    /// Returns whether pending uploads of this host are read.
    pub fn is_unsent(&self) -> bool {
        self.unsent
    }

    /// Takes a word of a list of options; whether it is one of these.
    ///
    /// # Errors
    /// A sentence about a value that cannot be.
    pub fn set(&mut self, name: &str, value: Option<&str>) -> std::result::Result<bool, String> {
        match (name, value) {
            ("allow-http" | "allow_http", None) => self.allow_http = true,
            ("allow-private" | "allow_private", None) => self.allow_private = true,
            ("unsent", None) => self.unsent = true,
            ("cache-size" | "cache_size", Some(value)) => {
                let bytes = quantity::size(value)
                    .ok_or_else(|| format!("{name}= takes a size, such as 4G or 0, not '{value}'"))?;
                self.cache_bytes = Some(bytes);
            }
            ("timeout", Some("hard")) => self.timeout = Some(ServerTimeout::ForEver),
            ("timeout", Some(value)) => {
                let time = quantity::time(value).filter(|time| !time.is_zero());
                let time = time.ok_or_else(|| format!("timeout= takes a time, such as 30s, or hard, not '{value}'"))?;
                self.timeout = Some(ServerTimeout::Until(time));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Returns the request metrics of a server, or `None` at once.
pub type TrafficQuery = Arc<dyn Fn() -> Option<RemoteTraffic> + Send + Sync>;

/// Ends the fetcher process, which reports to the store that the writer is gone.
pub type FetcherShutdown = Arc<dyn Fn() + Send + Sync>;

/// Spools on this host the uploads that the store does not accept in time.
pub type SpoolRequest = Arc<dyn Fn() + Send + Sync>;

/// Passes the newest version of an archive that is open for reading to the callback, and returns
/// whether there was one. A version that the callback refuses is reported again by the next call.
pub type VersionFollower = Box<dyn FnMut(&mut dyn FnMut(&ArchiveLocation) -> Result<()>) -> Result<bool> + Send>;

/// Storage opened by a fetcher process, and the handles to control that process.
struct FetcherHandle {
    storage: Arc<dyn Storage>,
    telling: TrafficQuery,
    leaving: SpoolRequest,
    ending: FetcherShutdown,
    following: Option<VersionFollower>,
    notice: Option<String>,
}

/// Location of an archive, and the open storage of a remote one.
pub struct ArchiveLocation {
    path: PathBuf,
    storage: Option<Arc<dyn Storage>>,
    telling: Option<TrafficQuery>,
    leaving: Option<SpoolRequest>,
    ending: Option<FetcherShutdown>,
    following: Option<VersionFollower>,
    notice: Option<String>,
}

impl ArchiveLocation {
    /// Location of a file; the caller opens it.
    pub fn file(path: &Path) -> ArchiveLocation {
        let path = path.to_owned();
        ArchiveLocation {
            path,
            storage: None,
            telling: None,
            leaving: None,
            ending: None,
            following: None,
            notice: None,
        }
    }

    /// Opens an address for reading.
    ///
    /// # Errors
    /// As of [`lockbox_remote::open`].
    pub fn at(address: &Path, how: &Remote) -> Result<ArchiveLocation> {
        open(address, how).map(|storage| ArchiveLocation { storage: Some(storage), ..ArchiveLocation::file(address) })
    }

    /// Opens a possibly damaged archive at an address, for a rescue.
    ///
    /// # Errors
    /// As of [`lockbox_remote::salvage`].
    pub fn damaged(address: &Path, how: &Remote) -> Result<ArchiveLocation> {
        salvage(address, how)
            .map(|storage| ArchiveLocation { storage: Some(storage), ..ArchiveLocation::file(address) })
    }

    /// Opens an address as its writer, until the location is dropped.
    ///
    /// # Errors
    /// As of [`lockbox_remote::change`].
    pub fn changed(address: &Path, how: &Remote, take_over: bool) -> Result<ArchiveLocation> {
        let (storage, notice) = change(address, how, take_over)?;
        Ok(ArchiveLocation { storage: Some(storage), notice, ..ArchiveLocation::file(address) })
    }

    /// The same by a process of its own, which `command` starts and [`fetch`] is.
    ///
    /// # Errors
    /// As of [`ArchiveLocation::at`], and of starting the process.
    pub fn apart(command: &mut Command, address: &Path, how: &Remote, access: Access) -> Result<ArchiveLocation> {
        let FetcherHandle { storage, telling, leaving, ending, following, notice } =
            open_apart(command, address, how, access)?;
        let (storage, telling) = (Some(storage), Some(telling));
        let (leaving, ending) = (Some(leaving), Some(ending));
        Ok(ArchiveLocation { storage, telling, leaving, ending, following, notice, ..ArchiveLocation::file(address) })
    }

    /// Notice for the user about the opening.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Returns the request to keep pending uploads on this host.
    pub fn leaving(&self) -> Option<SpoolRequest> {
        self.leaving.clone()
    }

    /// Takes the poller for newer versions; `None` after the first call.
    pub fn take_following(&mut self) -> Option<VersionFollower> {
        self.following.take()
    }

    /// Returns the handle that ends the fetcher.
    pub fn ending(&self) -> Option<FetcherShutdown> {
        self.ending.clone()
    }

    /// Returns whether the archive can be changed; a single file of a server cannot.
    pub fn can_be_changed(&self) -> bool {
        self.storage.as_ref().is_none_or(|storage| storage.has_atomic_barrier())
    }

    /// Returns the metrics query of the fetcher.
    pub fn telling(&self) -> Option<TrafficQuery> {
        self.telling.clone()
    }

    /// Name of the archive as the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn site(&self) -> ArchiveSource<'_> {
        self.storage.as_ref().map_or(ArchiveSource::File(&self.path), ArchiveSource::Storage)
    }

    pub fn is_remote(&self) -> bool {
        self.storage.is_some()
    }
}

/// `--remote LIST`, as a program's command line has it.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct RemoteArgs {
    /// How the server of an archive at an address is asked: allow-http, allow-private, cache-size=SIZE, timeout=TIME, unsent
    #[arg(long, value_name = "LIST", value_parser = parse_list, default_value = "", hide_default_value = true)]
    pub remote: Remote,
}

fn parse_list(list: &str) -> std::result::Result<Remote, String> {
    let mut remote = Remote::default();
    for option in list.split(',').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
        if !remote.set(name, value)? {
            return Err(format!("'{option}' says nothing about how servers are asked"));
        }
    }
    Ok(remote)
}

pub use remote_access::{
    Access, Bucket, FetcherReach, answer_fetcher, archives, check_writable, collect, compare, directory, examine,
    fetch, forget_unsent, is_remote, kept, probe, remove_kept, spelled, unsent, write,
};
use remote_access::{change, open, open_apart, salvage};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_say_how_servers_are_asked() {
        let all = parse_list("allow-http,allow-private,cache-size=4G,timeout=2m").unwrap();
        let wanted = Remote {
            allow_http: true,
            allow_private: true,
            cache_bytes: Some(4 << 30),
            timeout: Some(ServerTimeout::Until(Duration::from_secs(120))),
            unsent: false,
        };
        assert_eq!(all, wanted);
        assert!(parse_list("unsent").unwrap().is_unsent());
        assert_eq!(parse_list("timeout=hard").unwrap().timeout, Some(ServerTimeout::ForEver));
        assert_eq!(parse_list("").unwrap(), Remote::default());
        for wrong in ["allow-all", "unsent=yes", "timeout=0", "timeout=x", "cache-size=-1", "allow-http=yes"] {
            assert!(parse_list(wrong).is_err(), "{wrong}");
        }
    }
}
