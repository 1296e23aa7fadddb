//! Remote archives: calls `lockbox_remote`, which implements access to an address, with the options
//! and directories of this user.

use std::ffi::OsStr;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use lockbox::keys::state_directory;
use lockbox::storage::{ArchiveSource, Storage};
use lockbox::{Error, Result};
pub use lockbox_remote::{Access, Bucket, FetcherReach, RemoteOptions};
use lockbox_remote::{
    Address, ArchiveToCheck, Broker, CacheEntry, CollectReport, DirectoryTrust, MIN_GRACE, ObjectCheck, PendingUpload,
    ProbeFinding, ProgressFn, RequestStats, StoredArchive, WholeObjects,
};
use lockbox_terminal::quantity;
use nix::unistd::geteuid;

use crate::list_option::{self, ListOption, OptionValue, set};

/// Options for requests to servers, which commands and mounts of this user have without typing
/// them.
const VARIABLE: &str = "LOCKBOX_REMOTE";

type Row = ListOption<RemoteOptions>;

/// Options for requests to servers, of `--remote` and of `-o`.
pub const REMOTE: &[Row] = &[
    Row::new("allow-http", OptionValue::Nothing, |o, _| set(&mut o.allow_http, true)),
    Row::new("allow-private", OptionValue::Nothing, |o, _| set(&mut o.allow_private, true)),
    Row::new("cache-size", OptionValue::Text("SIZE", &[]), |o, v| {
        v.parsed(quantity::size(v.text), "a size, such as 4G or 0").map(|size| o.cache_bytes = Some(size))
    }),
    Row::new("grace", OptionValue::Text("TIME", &["1h", "1d", "7d"]), |o, v| {
        let time = quantity::time(v.text).filter(|time| *time >= MIN_GRACE);
        v.parsed(time, "a time of at least an hour, such as 12h").map(|time| o.grace = time)
    }),
    Row::new("timeout", OptionValue::Text("TIME", &["30s", "5m", "hard"]), |o, v| {
        let time = quantity::time(v.text).filter(|time| !time.is_zero()).map(Some);
        let timeout = if v.text == "hard" { Some(None) } else { time };
        v.parsed(timeout, "a time, such as 30s, or hard").map(|timeout| o.timeout = timeout)
    }),
    Row::new("unsent", OptionValue::Nothing, |o, _| set(&mut o.unsent, true)),
];

/// Returns the options of the environment variable `LOCKBOX_REMOTE`, a list as of `--remote`.
/// Errors: a sentence about a wrong list.
pub(crate) fn from_environment() -> std::result::Result<RemoteOptions, String> {
    from_variable(std::env::var_os(VARIABLE).as_deref())
}

fn from_variable(list: Option<&OsStr>) -> std::result::Result<RemoteOptions, String> {
    let Some(list) = list else { return Ok(RemoteOptions::default()) };
    let list = list.to_str().ok_or_else(|| format!("{VARIABLE} is not valid UTF-8"))?;
    add_list(RemoteOptions::default(), list).map_err(|why| format!("{VARIABLE}: {why}"))
}

fn add_list(mut options: RemoteOptions, list: &str) -> std::result::Result<RemoteOptions, String> {
    for option in list.split(',').filter(|option| !option.is_empty()) {
        if !list_option::apply(REMOTE, option, &mut options)? {
            return Err(format!("'{option}' is not an option for requests to servers"));
        }
    }
    Ok(options)
}

/// Adds this user's directories of caches and of pending uploads.
fn with_directories(options: &RemoteOptions) -> RemoteOptions {
    let variable = std::env::var_os;
    let state = state_directory(variable("XDG_STATE_HOME"), variable("HOME"), geteuid().is_root());
    RemoteOptions {
        cache_directory: lockbox_remote::cache_directory(),
        spool_directory: state.map(|state| state.join("unsent")),
        ..options.clone()
    }
}

/// Returns the request metrics of a server, or `None` at once.
pub type TrafficQuery = Arc<dyn Fn() -> Option<RequestStats> + Send + Sync>;

/// Ends the fetcher process, which reports to the store that the writer is gone.
pub type FetcherShutdown = Arc<dyn Fn() + Send + Sync>;

/// Spools on this host the uploads that the store does not accept in time; `true` for a mount that
/// ends by force, which gives it a second.
pub type SpoolRequest = Arc<dyn Fn(bool) + Send + Sync>;

/// Passes the newest version of an archive that is open for reading to the callback, and returns
/// whether there was one. A version that the callback refuses is reported again by the next call.
pub type VersionFollower = Box<dyn FnMut(&mut dyn FnMut(&ArchiveLocation) -> Result<()>) -> Result<bool> + Send>;

/// Location of an archive, and the open storage of a remote one.
#[derive(Default)]
pub struct ArchiveLocation {
    path: PathBuf,
    storage: Option<Arc<dyn Storage>>,
    pub traffic_query: Option<TrafficQuery>,
    pub spool_request: Option<SpoolRequest>,
    pub fetcher_shutdown: Option<FetcherShutdown>,
    pub version_follower: Option<VersionFollower>,
    notice: Option<String>,
    /// Set for a check of all bytes.
    received: Option<Arc<WholeObjects>>,
}

impl ArchiveLocation {
    /// Location of a file; the caller opens it.
    pub fn file(path: &Path) -> ArchiveLocation {
        ArchiveLocation { path: path.to_owned(), ..ArchiveLocation::default() }
    }

    /// Opens an address for reading.
    ///
    /// # Errors
    /// As of [`lockbox_remote::open`].
    pub fn open(address: &Path, how: &RemoteOptions) -> Result<ArchiveLocation> {
        let storage = lockbox_remote::open(&parsed(address)?, &with_directories(how))?;
        Ok(ArchiveLocation { storage: Some(storage), ..ArchiveLocation::file(address) })
    }

    /// Opens an address for a check of all bytes.
    ///
    /// # Errors
    /// As of [`lockbox_remote::open_for_check`].
    pub fn open_for_check(address: &Path, how: &RemoteOptions) -> Result<ArchiveLocation> {
        let ArchiveToCheck { storage, received } =
            lockbox_remote::open_for_check(&parsed(address)?, &with_directories(how))?;
        Ok(ArchiveLocation { storage: Some(storage), received, ..ArchiveLocation::file(address) })
    }

    /// Opens a possibly damaged archive at an address, for a rescue.
    ///
    /// # Errors
    /// As of [`lockbox_remote::open_partial`].
    pub fn open_damaged(address: &Path, how: &RemoteOptions) -> Result<ArchiveLocation> {
        let storage = lockbox_remote::open_partial(&parsed(address)?, &with_directories(how))?;
        Ok(ArchiveLocation { storage: Some(storage), ..ArchiveLocation::file(address) })
    }

    /// Opens an address as its writer, until the location is dropped.
    ///
    /// # Errors
    /// As of [`lockbox_remote::open_writable`].
    pub fn open_writable(address: &Path, how: &RemoteOptions, take_over: bool) -> Result<ArchiveLocation> {
        let (storage, notice) = lockbox_remote::open_writable(&parsed(address)?, &with_directories(how), take_over)?;
        Ok(ArchiveLocation { storage: Some(storage), notice, ..ArchiveLocation::file(address) })
    }

    /// The same by a process of its own, which `command` starts and [`fetch`] is.
    ///
    /// # Errors
    /// As of [`ArchiveLocation::open`], and of starting the process.
    pub fn open_in_fetcher(
        command: &mut Command,
        address: &Path,
        how: &RemoteOptions,
        access: Access,
    ) -> Result<ArchiveLocation> {
        // Buffers of megabytes pass through each of its threads, and an allocator with one arena per
        // thread keeps them all: 350 MiB instead of 60. Set independently of the daemon's own value.
        command.env("MALLOC_ARENA_MAX", "1");
        let opened = lockbox_remote::open_in_fetcher(command, &parsed(address)?, &with_directories(how), access)?;
        let lockbox_remote::FetcherConnection { storage, control, versions, notice } = opened;
        let control = Arc::new(control);
        let (spooling, shutdown) = (control.clone(), control.clone());
        let name = address.to_owned();
        let version_follower = versions.map(|mut versions| -> VersionFollower {
            Box::new(move |take| {
                versions.poll(&mut |storage| {
                    take(&ArchiveLocation { storage: Some(storage), ..ArchiveLocation::file(&name) })
                })
            })
        });
        Ok(ArchiveLocation {
            storage: Some(Arc::new(storage)),
            traffic_query: Some(Arc::new(move || control.stats())),
            spool_request: Some(Arc::new(move |is_forced| spooling.spool_on_timeout(is_forced))),
            fetcher_shutdown: Some(Arc::new(move || shutdown.stop())),
            version_follower,
            notice,
            ..ArchiveLocation::file(address)
        })
    }

    /// Notice for the user about the opening.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Returns whether the archive can be changed; a single file of a server cannot.
    pub fn can_be_changed(&self) -> bool {
        self.storage.as_ref().is_none_or(|storage| storage.has_atomic_barrier())
    }

    /// Name of the archive as the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn source(&self) -> ArchiveSource<'_> {
        self.storage.as_ref().map_or(ArchiveSource::File(&self.path), ArchiveSource::Storage)
    }

    pub fn is_remote(&self) -> bool {
        self.storage.is_some()
    }

    /// Verifies the objects of the archive by their hashes; None when it has none. After a check of
    /// all bytes, reads only the others.
    ///
    /// # Errors
    /// As of [`lockbox_remote::verify_objects`].
    pub fn verify_objects(&self, how: &RemoteOptions, step: &mut ProgressFn<'_>) -> Result<Option<ObjectCheck>> {
        lockbox_remote::verify_objects(&parsed(&self.path)?, &with_directories(how), self.received.as_deref(), step)
    }
}

/// `--remote LIST`, as a program's command line has it.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct RemoteArgs {
    #[arg(long, value_name = "LIST", help = help(), value_parser = parse_list, default_value = "", hide_default_value = true)]
    pub remote: RemoteOptions,
}

fn help() -> String {
    format!("How the server of an archive at an address is asked: {}", list_option::usage(REMOTE))
}

/// Parses a list, which adds to that of the environment and goes before it.
fn parse_list(list: &str) -> std::result::Result<RemoteOptions, String> {
    add_list(from_environment()?, list)
}

/// Returns whether the name is an address rather than a path.
pub fn is_remote(name: &Path) -> bool {
    Address::is_meant(name.as_os_str())
}

fn parsed(name: &Path) -> Result<Address> {
    Address::parse(name.as_os_str())?.ok_or_else(|| {
        Error::invalid(format!("{}: addresses begin with https://, s3://, gs://, az:// or file://", crate::shown(name)))
    })
}

/// Opens the archive at an address, or a place for one, as a writer. `is_ours`: no other user gives
/// names there.
///
/// # Errors
/// Those of [`lockbox_remote::open_upload`].
pub fn write(name: &Path, how: &RemoteOptions, take_over: bool, is_ours: bool) -> Result<Bucket> {
    let names = if is_ours { DirectoryTrust::Trusted } else { DirectoryTrust::Untrusted };
    lockbox_remote::open_upload(&parsed(name)?, &with_directories(how), take_over, names)
}

/// Checks that the address accepts writes.
///
/// # Errors
/// As of [`lockbox_remote::check_writable`].
pub fn check_writable(name: &Path) -> Result<()> {
    lockbox_remote::check_writable(&parsed(name)?)
}

/// Returns the directory of a `file://` address.
pub fn directory(name: &Path) -> Option<PathBuf> {
    match parsed(name) {
        Ok(Address::Directory(url)) => url.to_file_path().ok(),
        _ => None,
    }
}

/// Returns the canonical spelling of an address.
pub fn spelled(name: &Path) -> Option<String> {
    parsed(name).ok().map(|address| address.text())
}

/// Serves [`ArchiveLocation::open_in_fetcher`] of the process at the other end, until that is gone.
/// `confine` is called before the first request; from then on the process at the other end of
/// `broker`, which [`answer_fetcher`] is, looks up names and credentials.
///
/// # Errors
/// When nothing asks there that can be understood.
pub fn fetch(control: UnixStream, broker: Option<UnixStream>, confine: impl FnOnce(&FetcherReach)) -> io::Result<()> {
    lockbox_remote::serve_fetcher(control, broker.map(Broker::new), confine)
}

/// Answers the lookups of a fetcher until it ends.
///
/// # Errors
/// The errors of starting a thread.
pub fn answer_fetcher(control: UnixStream) -> io::Result<()> {
    lockbox_remote::serve_broker(control)
}

/// Lists the local cache of remote archives.
///
/// # Errors
/// As of [`lockbox_remote::cache_entries`].
pub fn kept() -> Result<Vec<CacheEntry>> {
    lockbox_remote::cache_entries(&with_directories(&RemoteOptions::default()))
}

/// Removes the cache of these archives, or of all. Returns the removed entries, each with whether
/// it is still in use.
///
/// # Errors
/// Those of [`lockbox_remote::remove_cache_entries`]; `Invalid` for a name that is not an address,
/// before anything is removed.
pub fn remove_kept(of: Option<&[PathBuf]>) -> Result<Vec<(CacheEntry, bool)>> {
    let options = with_directories(&RemoteOptions::default());
    let Some(names) = of else { return lockbox_remote::remove_cache_entries(&options, None) };
    let addresses = names.iter().map(|name| parsed(name)).collect::<Result<Vec<_>>>()?;
    let mut removed = Vec::new();
    for address in &addresses {
        removed.append(&mut lockbox_remote::remove_cache_entries(&options, Some(address))?);
    }
    Ok(removed)
}

/// Lists the pending uploads of this host.
///
/// # Errors
/// As of [`lockbox_remote::pending_uploads`].
pub fn unsent() -> Result<Vec<PendingUpload>> {
    lockbox_remote::pending_uploads(&with_directories(&RemoteOptions::default()))
}

/// Discards the pending uploads of one archive.
///
/// # Errors
/// As of [`lockbox_remote::discard_pending_uploads`].
pub fn forget_unsent(name: &Path) -> Result<Vec<PendingUpload>> {
    lockbox_remote::discard_pending_uploads(&parsed(name)?, &with_directories(&RemoteOptions::default()))
}

/// Probes the server at an address. `goes_on` is called between requests, to cancel.
///
/// # Errors
/// As of [`lockbox_remote::probe_address`].
pub fn probe(name: &Path, how: &RemoteOptions, goes_on: &mut dyn FnMut() -> Result<()>) -> Result<Vec<ProbeFinding>> {
    lockbox_remote::probe_address(&parsed(name)?, &with_directories(how), goes_on)
}

/// Lists the archives at and below an address.
///
/// # Errors
/// As of [`lockbox_remote::list_archives`].
pub fn archives(place: &Path, how: &RemoteOptions, step: &mut ProgressFn<'_>) -> Result<Vec<StoredArchive>> {
    lockbox_remote::list_archives(&Address::place(place.as_os_str())?, &with_directories(how), step)
}

/// Checks that all objects of an archive exist; with `whole`, verifies their content.
///
/// # Errors
/// As of [`lockbox_remote::check_objects`].
pub fn examine(name: &Path, how: &RemoteOptions, whole: bool, step: &mut ProgressFn<'_>) -> Result<ObjectCheck> {
    lockbox_remote::check_objects(&parsed(name)?, &with_directories(how), whole, step)
}

/// Garbage-collects the objects of an archive.
///
/// # Errors
/// As of [`lockbox_remote::collect_garbage`].
pub fn collect(name: &Path, how: &RemoteOptions, take_over: bool) -> Result<CollectReport> {
    lockbox_remote::collect_garbage(&parsed(name)?, &with_directories(how), take_over)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn lists_say_how_servers_are_asked() {
        let all = parse_list("allow-http,allow-private,cache-size=4G,grace=12h,timeout=2m").unwrap();
        let wanted = RemoteOptions {
            allow_http: true,
            allow_private: true,
            cache_bytes: Some(4 << 30),
            grace: Duration::from_secs(12 * 3600),
            timeout: Some(Duration::from_secs(120)),
            ..RemoteOptions::default()
        };
        assert_eq!(all, wanted);
        assert!(parse_list("unsent").unwrap().unsent);
        assert_eq!(parse_list("timeout=hard").unwrap().timeout, None);
        assert_eq!(parse_list("").unwrap(), RemoteOptions::default());
        for wrong in [
            "allow-all",
            "unsent=yes",
            "timeout=0",
            "timeout=x",
            "cache-size=-1",
            "allow-http=yes",
            "grace=59m",
            "grace=x",
        ] {
            assert!(parse_list(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_variable_is_a_list_that_the_command_line_adds_to() {
        let variable = |list: &str| from_variable(Some(list.as_ref()));
        let named = variable("allow-http,timeout=2m").unwrap();
        assert_eq!(named, parse_list("allow-http,timeout=2m").unwrap());
        let both = add_list(named, "allow-private,timeout=hard").unwrap();
        assert_eq!(both, parse_list("allow-http,allow-private,timeout=hard").unwrap());
        assert_eq!(from_variable(None), Ok(RemoteOptions::default()));
        assert!(variable("allow-all").unwrap_err().starts_with("LOCKBOX_REMOTE: 'allow-all' is not an option"));
    }
}
