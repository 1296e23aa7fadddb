//! Remote archives: reads sealed bytes from web servers and object stores as one [`Storage`].
//!
//! This crate has no key and trusts no server: the layer that opens the archive authenticates every
//! page against the tree above it. This crate adds properties that a tag cannot: it never mixes
//! bytes of two versions of a file, bounds the size and duration of every response, distinguishes
//! an unreachable server from a damaged file, and sends requests only where the user sent them.
//!
//! # Invariants
//! REMOTE-1  All bytes of a [`RemoteFile`] belong to the version found at open: each request names
//!     its length and its entity tag, and a response about another version is rejected.
//! REMOTE-2  The bytes that name the newest commit (headers and rings) come from the server at each
//!     open, never from the cache.
//! REMOTE-3  A failed request is never reported as damage, and damage never as a failed request.
//! REMOTE-4  Memory and disk use, the size of one response and its duration have bounds that no
//!     server can raise.

mod address;
mod azure;
mod broker;
mod bucket;
mod cache;
mod credentials;
mod diagnostics;
mod fetcher;
mod http;
mod identity;
mod provenance;
mod range_source;
mod remote_file;
mod retry;
mod s3;
mod signing;
mod slot_cache;
mod store_failure;
#[cfg(test)]
mod tests;
mod transport;
mod web_login;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use lockbox_terminal::hex;
use serde::{Deserialize, Serialize};

pub use address::{Address, Cloud};
pub use broker::Broker;
use bucket::{AzureStore, BucketWriter, DirectoryStore, Follower, ObjectStore, S3Store};
pub use bucket::{
    Bucket, CollectReport, GRACE, MIN_GRACE, NewestRecord, ObjectCheck, ObjectTotals, PendingUpload, ProgressFn,
    StoredArchive, WholeObjects,
};
pub use cache::{CacheEntry, cache_directory, cache_entries, remove_cache_entries};
pub use diagnostics::{ProbeFinding, probe_address};
pub use fetcher::{
    Access, FetcherConnection, FetcherControl, FetcherReach, VersionPoller, open_in_fetcher, serve_broker,
    serve_fetcher,
};
use range_source::RemoteError;
pub use range_source::RequestStats;
use remote_file::RemoteFile;

/// Options for requests to servers. Their JSON has no directories: a path may not be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteOptions {
    /// Timeout of a read while the server does not respond; None waits forever.
    pub timeout: Option<Duration>,
    /// Maximum size of the disk cache in bytes: 0 disables it, None means a tenth of the free
    /// space, at most 20 GiB.
    pub cache_bytes: Option<u64>,
    /// Directory of the caches; None disables them.
    #[serde(skip)]
    pub cache_directory: Option<PathBuf>,
    /// Directory of the upload spool; None disables it.
    #[serde(skip)]
    pub spool_directory: Option<PathBuf>,
    /// Read the latest spooled state on this host instead of the state in the store.
    pub unsent: bool,
    /// Time that objects stay in the store after the archive stopped needing them, for readers of
    /// an older version; at least [`MIN_GRACE`].
    pub grace: Duration,
    /// Allow plain http, which every hop can read and change.
    pub allow_http: bool,
    /// Allow requests to this machine and to private networks.
    pub allow_private: bool,
    /// Looks up names and credentials for a sandboxed process.
    #[serde(skip)]
    pub broker: Option<Broker>,
}

impl Default for RemoteOptions {
    fn default() -> RemoteOptions {
        RemoteOptions {
            timeout: Some(Duration::from_secs(30)),
            cache_bytes: None,
            cache_directory: None,
            spool_directory: None,
            unsent: false,
            grace: GRACE,
            allow_http: false,
            allow_private: false,
            broker: None,
        }
    }
}

impl RemoteOptions {
    /// Returns these options without the cache on disk.
    pub fn without_cache(&self) -> RemoteOptions {
        RemoteOptions { cache_bytes: Some(0), ..self.clone() }
    }
}

/// Opens the archive for reading.
///
/// # Errors
/// `Invalid` for an address that needs an option; `Io` when there is no archive (of the kind
/// `NotFound`), and when the server refuses, cannot do what is needed, or does not answer in time;
/// `Damaged` for objects in a bucket that do not belong together.
pub fn open(address: &Address, options: &RemoteOptions) -> Result<Arc<dyn Storage>> {
    Ok(open_with_follower(address, options)?.0)
}

/// Opens the archive, with a [`Follower`] if it can gain newer versions: single files and spooled
/// uploads cannot.
fn open_with_follower(address: &Address, options: &RemoteOptions) -> Result<(Arc<RemoteFile>, Option<Follower>)> {
    if options.unsent {
        let file = bucket::open_pending_upload(require_store(address, options)?, address.to_string(), options)?;
        return Ok((Arc::new(file), None));
    }
    if let Some(objects) = object_store(address, options, None)?
        && let Some(follower) = bucket::open(objects, address.to_string(), options)?
    {
        return Ok((follower.file().clone(), Some(follower)));
    }
    match address {
        Address::Directory(_) => Err(RemoteError::NotFound.into_error(&address.to_string())),
        Address::Web(_) | Address::Bucket { .. } => Ok((Arc::new(RemoteFile::open(address, options)?), None)),
    }
}

/// Archive that is open for a check of all bytes.
pub struct ArchiveToCheck {
    pub storage: Arc<dyn Storage>,
    /// Objects that the check reads; None for an archive without objects.
    pub received: Option<Arc<WholeObjects>>,
}

/// Opens the archive for a check of all bytes. The objects of an archive in a store are read once,
/// for the check and for [`verify_objects`].
///
/// # Errors
/// As of [`open`].
pub fn open_for_check(address: &Address, options: &RemoteOptions) -> Result<ArchiveToCheck> {
    if !options.unsent
        && let Some(objects) = object_store(address, options, None)?
        && let Some((file, whole)) = bucket::open_for_check(objects, address.to_string(), options)?
    {
        return Ok(ArchiveToCheck { storage: Arc::new(file), received: Some(whole) });
    }
    Ok(ArchiveToCheck { storage: open(address, options)?, received: None })
}

/// Opens the current version of an archive with missing objects, which read as zeros.
///
/// # Errors
/// As of [`open`]: the newest record and its checkpoint must exist.
pub fn open_partial(address: &Address, options: &RemoteOptions) -> Result<Arc<dyn Storage>> {
    if let Some(objects) = object_store(address, options, None)?
        && let Some(file) = bucket::open_partial(objects, address.to_string(), options)?
    {
        return Ok(Arc::new(file));
    }
    open(address, options)
}

/// Acquires the archive, or an empty prefix, as its writer; see [`Bucket`].
///
/// # Errors
/// As of [`open`]; `Invalid` for an address without objects; `InUse` when another writer appears to
/// be active and `take_over` is not set; `Unsupported` for a store on which two writers could
/// destroy each other's work.
pub fn open_upload(
    address: &Address,
    options: &RemoteOptions,
    take_over: bool,
    trust: DirectoryTrust,
) -> Result<Bucket> {
    let objects = writable_store(address, options, Some(trust))?;
    Bucket::open(objects, address.to_string(), options, take_over)
}

/// Acquires the archive as its writer: each barrier of the storage is one record, durable and
/// visible to all readers once it succeeds. Dropping the storage releases the archive. Also returns
/// a notice for the user.
///
/// # Errors
/// As of [`open_upload`]; `Io` of the kind `NotFound` where there is no archive, `NotArchive` where
/// none was ever committed.
pub fn open_writable(
    address: &Address,
    options: &RemoteOptions,
    take_over: bool,
) -> Result<(Arc<dyn Storage>, Option<String>)> {
    let writer = open_writer(address, options, take_over)?;
    while writer.remove_expired() {}
    let notice = writer.notice();
    Ok((Arc::new(writer), notice))
}

fn open_writer(address: &Address, options: &RemoteOptions, take_over: bool) -> Result<BucketWriter> {
    let objects = writable_store(address, options, None)?;
    BucketWriter::acquire(objects, address.to_string(), options, take_over)
}

/// Checks that an archive at the address can be written to.
///
/// # Errors
/// `Invalid` for an address of a web server.
pub fn check_writable(address: &Address) -> Result<()> {
    match address {
        Address::Web(_) => Err(read_only_error(address)),
        Address::Bucket { .. } | Address::Directory(_) => Ok(()),
    }
}

fn writable_store(
    address: &Address,
    options: &RemoteOptions,
    trust: Option<DirectoryTrust>,
) -> Result<Box<dyn ObjectStore>> {
    if options.unsent {
        return Err(Error::invalid(format!("{address}: unsent data is read-only")));
    }
    object_store(address, options, trust)?.ok_or_else(|| read_only_error(address))
}

/// Lists the uploads spooled on this host.
///
/// # Errors
/// I/O errors of the host; rejects a directory that other users own or can write to.
pub fn pending_uploads(options: &RemoteOptions) -> Result<Vec<PendingUpload>> {
    options.spool_directory.as_deref().map_or(Ok(Vec::new()), bucket::pending_uploads)
}

/// Deletes the spooled uploads of the archive at `address` and returns them.
///
/// # Errors
/// As of [`pending_uploads`]; `InUse` when an active writer may still send them: then nothing is
/// removed.
pub fn discard_pending_uploads(address: &Address, options: &RemoteOptions) -> Result<Vec<PendingUpload>> {
    let name = address.to_string();
    options.spool_directory.as_deref().map_or(Ok(Vec::new()), |directory| bucket::discard(directory, &name))
}

fn read_only_error(address: &Address) -> Error {
    Error::invalid(format!(
        "{address}: a web server can only be read; s3://, gs://, az:// and file:// can be written to"
    ))
}

/// Lists the archives made of objects at and below an address ([`Address::place`]).
///
/// # Errors
/// Errors of requests and of `step`. The error of one archive is stored in its entry.
pub fn list_archives(
    place: &Address,
    options: &RemoteOptions,
    step: &mut ProgressFn<'_>,
) -> Result<Vec<StoredArchive>> {
    bucket::list_archives(require_store(place, options)?, &|name| place.below(name), options, step)
}

/// Checks that all objects named by the newest record exist; with `whole`, also their content.
///
/// # Errors
/// As of [`open`]; that of `step`.
pub fn check_objects(
    address: &Address,
    options: &RemoteOptions,
    whole: bool,
    step: &mut ProgressFn<'_>,
) -> Result<ObjectCheck> {
    bucket::check_objects(require_store(address, options)?, address.to_string(), options, whole, step)
}

/// Compares the content of all objects named by the newest record with their hashes, without
/// another request for the objects in `received`. Returns None for an archive without objects: on
/// a web server, or as one object.
///
/// # Errors
/// As of [`open`]; that of `step`.
pub fn verify_objects(
    address: &Address,
    options: &RemoteOptions,
    received: Option<&WholeObjects>,
    step: &mut ProgressFn<'_>,
) -> Result<Option<ObjectCheck>> {
    let Some(objects) = object_store(address, options, None)? else { return Ok(None) };
    bucket::verify_objects(objects, address.to_string(), options, received, step)
}

/// Garbage-collects objects of an archive: acquires it as a writer, cleans and releases it.
///
/// # Errors
/// As of [`open_upload`]; `Io` of the kind `NotFound` where there is no archive.
pub fn collect_garbage(address: &Address, options: &RemoteOptions, take_over: bool) -> Result<CollectReport> {
    bucket::collect_garbage(require_store(address, options)?, address.to_string(), options, take_over)
}

fn require_store(address: &Address, options: &RemoteOptions) -> Result<Box<dyn ObjectStore>> {
    let none = || {
        Error::invalid(format!(
            "{address}: a web server has no objects of archives; s3://, gs://, az:// and file:// may have"
        ))
    };
    object_store(address, options, None)?.ok_or_else(none)
}

/// Trust in the users that can create names where a directory of objects is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DirectoryTrust {
    /// Only trusted users can: a symbolic link at the last component is followed.
    Trusted,
    /// Untrusted users can: a symbolic link at the last component is refused.
    Untrusted,
}

/// Returns the object store of an address, if it has one. With `writer`, creates a missing
/// directory.
fn object_store(
    address: &Address,
    options: &RemoteOptions,
    writer: Option<DirectoryTrust>,
) -> Result<Option<Box<dyn ObjectStore>>> {
    match address {
        Address::Web(_) => Ok(None),
        Address::Bucket { cloud: Cloud::Azure, bucket, key } => {
            Ok(Some(Box::new(AzureStore::new(bucket, key, options)?)))
        }
        Address::Bucket { cloud, bucket, key } => Ok(Some(Box::new(S3Store::new(*cloud, bucket, key, options)?))),
        Address::Directory(url) => {
            let path = url.to_file_path().map_err(|()| Error::invalid("an address of a directory is file:///PATH"))?;
            Ok(Some(Box::new(DirectoryStore::open(&path, writer)?)))
        }
    }
}
