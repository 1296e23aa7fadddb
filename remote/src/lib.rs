//! Archives of other machines: their sealed bytes from web servers and buckets, as one [`Storage`] for reading.
//!
//! Nothing here has a key, and nothing that comes from a server is believed: whoever opens the archive checks every page against the
//! tree above it. What this crate owes is what a tag cannot give: that bytes of two versions of a file are not mixed, that an answer has a
//! bound in size and time, that a server which is away is told from a file that is damaged, and that no request goes where its user did
//! not send it.
//!
//! # Invariants
//! REMOTE-1  All bytes of a [`RemoteFile`] are of the version that its opening found: each request names its length and its entity tag, and an
//!     answer about another one is refused.
//! REMOTE-2  The bytes that name the newest commit (headers and rings) come from the server at each opening, never from the cache.
//! REMOTE-3  A request that failed is never told as damage, and damage never as a failed request.
//! REMOTE-4  What is kept in memory and on disk, how much one answer may have, and how long one may take, have bounds that no server moves.

mod address;
mod azure;
mod broker;
mod broker_server;
mod bucket;
mod cache;
mod cache_admin;
mod credentials;
mod diagnostics;
mod fd_passing;
mod fetcher;
mod fetcher_reach;
mod google;
mod hex;
mod http;
mod metrics;
mod probe;
mod provenance;
mod range_source;
mod remote_file;
mod s3;
mod settings_file;
mod signing;
mod slot_cache;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use serde::{Deserialize, Serialize};

pub use address::{Address, Cloud};
pub use broker::Broker;
pub use broker_server::answer;
pub use bucket::{Amount, Bucket, Collected, Examined, Newest, Step, Stored, Unsent};
use bucket::{Azure, Directory, Follower, Living, Objects, S3};
pub use cache_admin::{Kept, kept, remove_kept};
pub use diagnostics::Finding;
pub use fetcher::{Access, Apart, Asking, News, open_apart, serve};
pub use fetcher_reach::FetcherReach;
pub use metrics::Traffic;
pub use probe::probe;
use remote_file::RemoteFile;

/// How archives of other machines are read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// How long a read waits for a server that does not answer; None for ever.
    pub timeout: Option<Duration>,
    /// Most bytes of the cache on disk; 0 for none, None for a tenth of what is free, and 20 GiB at most.
    pub cache_bytes: Option<u64>,
    /// Where caches lie; None for none.
    pub cache_directory: Option<PathBuf>,
    /// Where what a store does not take is kept; None for nowhere.
    pub spool_directory: Option<PathBuf>,
    /// What this host kept last of the archive is read, and not what its store has.
    pub unsent: bool,
    /// Requests may go over connections that anybody on the way can read and change.
    pub allow_http: bool,
    /// Requests may go to this machine and to networks of the house.
    pub allow_private: bool,
    /// Looks up for a process that may not do so itself.
    #[serde(skip)]
    pub broker: Option<Broker>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            timeout: Some(Duration::from_secs(30)),
            cache_bytes: None,
            cache_directory: cache::directory(),
            spool_directory: None,
            unsent: false,
            allow_http: false,
            allow_private: false,
            broker: None,
        }
    }
}

/// Opens the archive there for reading.
///
/// # Errors
/// `Invalid` for an address that needs an option; `Io` when there is no archive (of the kind `NotFound`), and when the server refuses,
/// cannot do what is needed, or does not answer in time; `Damaged` for objects in a bucket that do not belong together.
pub fn open(address: &Address, options: &Options) -> Result<Arc<dyn Storage>> {
    Ok(open_file(address, options)?.0)
}

/// With who goes on when the archive's writer does: that of a single file never does, and neither does what was not sent.
fn open_file(address: &Address, options: &Options) -> Result<(Arc<RemoteFile>, Option<Follower>)> {
    if options.unsent {
        let file = bucket::open_unsent(of_objects(address, options)?, address.to_string(), options)?;
        return Ok((Arc::new(file), None));
    }
    if let Some(objects) = objects(address, options, None)?
        && let Some(follower) = bucket::open(objects, address.to_string(), options)?
    {
        return Ok((follower.file().clone(), Some(follower)));
    }
    match address {
        Address::Directory(_) => Err(Error::request(format!("cannot open {address}"), std::io::ErrorKind::NotFound)),
        Address::Web(_) | Address::Bucket { .. } => Ok((Arc::new(RemoteFile::open(address, options)?), None)),
    }
}

/// The archive there of which objects may be gone, as it is now: where they were are zeros.
///
/// # Errors
/// As of [`open`]: what says where its objects are has to be there.
pub fn salvage(address: &Address, options: &Options) -> Result<Arc<dyn Storage>> {
    if let Some(objects) = objects(address, options, None)?
        && let Some(file) = bucket::salvage(objects, address.to_string(), options)?
    {
        return Ok(Arc::new(file));
    }
    open(address, options)
}

/// Comes as a writer to the archive whose objects are there, or to a place that has none yet: see [`Bucket`].
///
/// # Errors
/// As of [`open`]; `Invalid` for a place that holds no objects; `InUse` when another writer is there, as far as is known, unless `take_over` is said;
/// `Unsupported` for a store on which two writers could destroy each other's work.
pub fn write(address: &Address, options: &Options, take_over: bool, names: Names) -> Result<Bucket> {
    refuse_unsent(address, options)?;
    let objects = objects(address, options, Some(names))?.ok_or_else(|| only_read(address))?;
    Bucket::open(objects, address.to_string(), options, take_over)
}

/// Comes as a writer to the archive whose objects are there: each barrier of the storage is one record, which is durable and seen by all when that succeeds. The writer goes
/// when the storage is let go. With what its user should know.
///
/// # Errors
/// As of [`write`]; `Io` of the kind `NotFound` where there is no archive, `NotArchive` where none was ever committed.
pub fn change(address: &Address, options: &Options, take_over: bool) -> Result<(Arc<dyn Storage>, Option<String>)> {
    let living = open_living(address, options, take_over)?;
    let notice = living.notice();
    Ok((Arc::new(living), notice))
}

fn open_living(address: &Address, options: &Options, take_over: bool) -> Result<Living> {
    refuse_unsent(address, options)?;
    let objects = objects(address, options, None)?.ok_or_else(|| only_read(address))?;
    Living::open(objects, address.to_string(), options, take_over)
}

/// Whether an archive there could be written to.
///
/// # Errors
/// `Invalid` for an address of a web server.
pub fn check_writable(address: &Address) -> Result<()> {
    match address {
        Address::Web(_) => Err(only_read(address)),
        Address::Bucket { .. } | Address::Directory(_) => Ok(()),
    }
}

fn refuse_unsent(address: &Address, options: &Options) -> Result<()> {
    if options.unsent {
        return Err(Error::invalid(format!("{address}: what was not sent can only be read")));
    }
    Ok(())
}

/// What this host keeps of archives whose stores do not have it.
///
/// # Errors
/// Those of the host; a directory that others own or can write to is none of ours.
pub fn unsent(options: &Options) -> Result<Vec<Unsent>> {
    options.spool_directory.as_deref().map_or(Ok(Vec::new()), bucket::unsent)
}

/// Throws away what this host keeps of the archive at `address`. Gives what it was.
///
/// # Errors
/// As of [`unsent`]; `InUse` when a writer is there that may still send it: then nothing is removed.
pub fn forget_unsent(address: &Address, options: &Options) -> Result<Vec<Unsent>> {
    let name = address.to_string();
    options.spool_directory.as_deref().map_or(Ok(Vec::new()), |directory| bucket::forget(directory, &name))
}

fn only_read(address: &Address) -> Error {
    Error::invalid(format!(
        "{address}: a web server can only be read; s3://, gs://, az:// and file:// can be written to"
    ))
}

/// The archives of many objects that lie at a place ([`Address::place`]) and below it.
///
/// # Errors
/// Those of requests and of `step`. What is wrong with one archive stands with it.
pub fn archives(place: &Address, options: &Options, step: &mut Step<'_>) -> Result<Vec<Stored>> {
    bucket::archives(of_objects(place, options)?, &|name| place.below(name), options, step)
}

/// Whether all is there that the newest record of an archive names; with `whole`, with the bytes that it was made with.
///
/// # Errors
/// As of [`open`]; that of `step`.
pub fn examine(address: &Address, options: &Options, whole: bool, step: &mut Step<'_>) -> Result<Examined> {
    bucket::examine(of_objects(address, options)?, address.to_string(), options, whole, step)
}

/// Compares all objects that the newest record of an archive names with the bytes that they were
/// made with. None where an archive has no objects: on a web server, or as one object.
///
/// # Errors
/// As of [`open`]; that of `step`.
pub fn compare(address: &Address, options: &Options, step: &mut Step<'_>) -> Result<Option<Examined>> {
    let Some(objects) = objects(address, options, None)? else { return Ok(None) };
    bucket::compare(objects, address.to_string(), options, step)
}

/// Removes objects of an archive that are needed no more, as a writer does that comes, cleans and goes.
///
/// # Errors
/// As of [`write`]; `Io` of the kind `NotFound` where there is no archive.
pub fn collect(address: &Address, options: &Options, take_over: bool) -> Result<Collected> {
    bucket::collect(of_objects(address, options)?, address.to_string(), options, take_over)
}

fn of_objects(address: &Address, options: &Options) -> Result<Box<dyn Objects>> {
    let none = || {
        Error::invalid(format!(
            "{address}: a web server has no objects of archives; s3://, gs://, az:// and file:// may have"
        ))
    };
    objects(address, options, None)?.ok_or_else(none)
}

/// Who else may give names where a directory of objects is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// Nobody who is not trusted: a link at the last name is the user's own.
    Ours,
    /// Somebody for whom nothing is written elsewhere.
    Theirs,
}

/// The objects at an address that may have some; for `writer`, the directory is made when it is missing.
fn objects(address: &Address, options: &Options, writer: Option<Names>) -> Result<Option<Box<dyn Objects>>> {
    match address {
        Address::Web(_) => Ok(None),
        Address::Bucket { cloud: Cloud::Azure, bucket, key } => Ok(Some(Box::new(Azure::new(bucket, key, options)?))),
        Address::Bucket { cloud, bucket, key } => Ok(Some(Box::new(S3::new(*cloud, bucket, key, options)?))),
        Address::Directory(url) => {
            let path = url.to_file_path().map_err(|()| Error::invalid("an address of a directory is file:///PATH"))?;
            Ok(Some(Box::new(Directory::open(&path, writer)?)))
        }
    }
}
