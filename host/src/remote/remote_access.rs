//! Remote archives: calls `lockbox_remote` with the options and directories of this user.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use lockbox::control::RemoteTraffic;
use lockbox::keys::state_directory;
use lockbox::storage::Storage;
use lockbox::{Error, Result};
pub use lockbox_remote::{Access, Bucket, FetcherReach};
use lockbox_remote::{
    Address, Broker, CacheEntry, CollectReport, DirectoryTrust, ObjectCheck, PendingUpload, ProbeFinding, ProgressFn,
    RemoteOptions, StoredArchive,
};
use nix::unistd::geteuid;

use super::{ArchiveLocation, FetcherHandle, Remote, ServerTimeout, VersionFollower};

impl Remote {
    fn options(&self) -> RemoteOptions {
        let default = RemoteOptions::default();
        RemoteOptions {
            allow_http: self.allow_http,
            allow_private: self.allow_private,
            cache_bytes: self.cache_bytes,
            unsent: self.unsent,
            spool_directory: spool_directory(),
            timeout: match self.timeout {
                None => default.timeout,
                Some(ServerTimeout::Until(time)) => Some(time),
                Some(ServerTimeout::ForEver) => None,
            },
            ..default
        }
    }
}

/// Directory of pending uploads, in the state directory of the user.
fn spool_directory() -> Option<PathBuf> {
    let variable = std::env::var_os;
    let state = state_directory(variable("XDG_STATE_HOME"), variable("HOME"), geteuid().is_root());
    state.map(|state| state.join("unsent"))
}

/// Returns whether the name is an address rather than a path.
pub fn is_remote(name: &Path) -> bool {
    Address::is_meant(name.as_os_str())
}

fn address(name: &Path) -> Result<Address> {
    Address::parse(name.as_os_str())?.ok_or_else(|| {
        Error::invalid(format!("{}: addresses begin with https://, s3://, gs://, az:// or file://", crate::shown(name)))
    })
}

pub(super) fn open(name: &Path, how: &Remote) -> Result<Arc<dyn Storage>> {
    lockbox_remote::open(&address(name)?, &how.options())
}

pub(super) fn salvage(name: &Path, how: &Remote) -> Result<Arc<dyn Storage>> {
    lockbox_remote::open_partial(&address(name)?, &how.options())
}

pub(super) fn change(name: &Path, how: &Remote, take_over: bool) -> Result<(Arc<dyn Storage>, Option<String>)> {
    lockbox_remote::open_writable(&address(name)?, &how.options(), take_over)
}

pub(super) fn open_apart(command: &mut Command, name: &Path, how: &Remote, access: Access) -> Result<FetcherHandle> {
    // Buffers of megabytes pass through each of its threads, and an allocator with one arena per
    // thread keeps them all: 350 MiB instead of 60. Set independently of the daemon's own value.
    command.env("MALLOC_ARENA_MAX", "1");
    let opened = lockbox_remote::open_in_fetcher(command, &address(name)?, &how.options(), access)?;
    let lockbox_remote::FetcherConnection { storage, control: asking, versions: news, notice } = opened;
    let asking = Arc::new(asking);
    let (leaving, ending) = (asking.clone(), asking.clone());
    let telling = move || {
        let told = asking.stats()?;
        Some(RemoteTraffic {
            reads: told.reads,
            lists: told.lists,
            bytes: told.bytes,
            memory_hits: told.memory_hits,
            disk_hits: told.disk_hits,
            offline_since: told.offline_since.and_then(|since| since.try_into().ok()),
            unsent: told.unsent,
        })
    };
    let name = name.to_owned();
    let following = news.map(|mut news| -> VersionFollower {
        Box::new(move |take| {
            news.poll(&mut |storage| take(&ArchiveLocation { storage: Some(storage), ..ArchiveLocation::file(&name) }))
        })
    });
    Ok(FetcherHandle {
        storage: Arc::new(storage),
        telling: Arc::new(telling),
        leaving: Arc::new(move || leaving.spool_on_timeout()),
        ending: Arc::new(move || ending.stop()),
        following,
        notice,
    })
}

/// Opens the archive at an address, or a place for one, as a writer. `is_ours`: no other user gives
/// names there.
///
/// # Errors
/// Those of [`lockbox_remote::write`].
pub fn write(name: &Path, how: &Remote, take_over: bool, is_ours: bool) -> Result<Bucket> {
    let names = if is_ours { DirectoryTrust::Trusted } else { DirectoryTrust::Untrusted };
    lockbox_remote::open_upload(&address(name)?, &how.options(), take_over, names)
}

/// Checks that the address accepts writes.
///
/// # Errors
/// As of [`lockbox_remote::check_writable`].
pub fn check_writable(name: &Path) -> Result<()> {
    lockbox_remote::check_writable(&address(name)?)
}

/// Returns the directory of a `file://` address.
pub fn directory(name: &Path) -> Option<PathBuf> {
    match address(name) {
        Ok(Address::Directory(url)) => url.to_file_path().ok(),
        _ => None,
    }
}

/// Returns the canonical spelling of an address.
pub fn spelled(name: &Path) -> Option<String> {
    address(name).ok().map(|address| address.text())
}

/// Serves [`ArchiveLocation::apart`] of the process at the other end, until that is gone. `confine`
/// is called before the first request; from then on the process at the other end of `broker`, which
/// [`answer_fetcher`] is, looks up names and credentials.
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
/// As of [`lockbox_remote::kept`].
pub fn kept() -> Result<Vec<CacheEntry>> {
    lockbox_remote::cache_entries(&RemoteOptions::default())
}

/// Removes the cache of these archives, or of all. Returns the removed entries, each with whether
/// it is still in use.
///
/// # Errors
/// Those of [`lockbox_remote::remove_kept`]; `Invalid` for a name that is not an address, before
/// anything is removed.
pub fn remove_kept(of: Option<&[PathBuf]>) -> Result<Vec<(CacheEntry, bool)>> {
    let options = RemoteOptions::default();
    let Some(names) = of else { return lockbox_remote::remove_cache_entries(&options, None) };
    let addresses = names.iter().map(|name| address(name)).collect::<Result<Vec<_>>>()?;
    let mut removed = Vec::new();
    for address in &addresses {
        removed.append(&mut lockbox_remote::remove_cache_entries(&options, Some(address))?);
    }
    Ok(removed)
}

/// Lists the pending uploads of this host.
///
/// # Errors
/// As of [`lockbox_remote::unsent`].
pub fn unsent() -> Result<Vec<PendingUpload>> {
    lockbox_remote::pending_uploads(&Remote::default().options())
}

/// Discards the pending uploads of one archive.
///
/// # Errors
/// As of [`lockbox_remote::forget_unsent`].
pub fn forget_unsent(name: &Path) -> Result<Vec<PendingUpload>> {
    lockbox_remote::discard_pending_uploads(&address(name)?, &Remote::default().options())
}

/// Probes the server at an address. `goes_on` is called between requests, to cancel.
///
/// # Errors
/// As of [`lockbox_remote::probe`].
pub fn probe(name: &Path, how: &Remote, goes_on: &mut dyn FnMut() -> Result<()>) -> Result<Vec<ProbeFinding>> {
    lockbox_remote::probe_address(&address(name)?, &how.options(), goes_on)
}

/// Lists the archives at and below an address.
///
/// # Errors
/// As of [`lockbox_remote::archives`].
pub fn archives(place: &Path, how: &Remote, step: &mut ProgressFn<'_>) -> Result<Vec<StoredArchive>> {
    lockbox_remote::list_archives(&Address::place(place.as_os_str())?, &how.options(), step)
}

/// Checks that all objects of an archive exist; with `whole`, verifies their content.
///
/// # Errors
/// As of [`lockbox_remote::examine`].
pub fn examine(name: &Path, how: &Remote, whole: bool, step: &mut ProgressFn<'_>) -> Result<ObjectCheck> {
    lockbox_remote::check_objects(&address(name)?, &how.options(), whole, step)
}

/// Verifies the objects of an archive by their hashes; None when it has none.
///
/// # Errors
/// As of [`lockbox_remote::compare`].
pub fn compare(name: &Path, how: &Remote, step: &mut ProgressFn<'_>) -> Result<Option<ObjectCheck>> {
    lockbox_remote::verify_objects(&address(name)?, &how.options(), step)
}

/// Garbage-collects the objects of an archive.
///
/// # Errors
/// As of [`lockbox_remote::collect`].
pub fn collect(name: &Path, how: &Remote, take_over: bool) -> Result<CollectReport> {
    lockbox_remote::collect_garbage(&address(name)?, &how.options(), take_over)
}
