//! Archives in an object store: below one prefix, a log of records, and the segments and
//! checkpoints that they name.
//!
//! # Invariants
//! BUCKET-1  Every object is created once, under a name that is never reused, and never changes. So
//!     a response that is late, duplicated or of a dead process does no harm, and data once read is
//!     never stale.
//! BUCKET-2  The archive is defined by its newest record, which is one object: a commit exists as a
//!     whole or not at all. It succeeded if the store confirmed that object; no other response
//!     counts (PROOF-1).
//! BUCKET-3  The commits of at most one writer follow each other: each number is taken once,
//!     records of acquisitions are never removed, and a writer that lost its number commits
//!     nothing more.
//! BUCKET-4  A named object is removed only after a durable record has declared it dead for as long
//!     as a reader may use an older record, and no name is reused. An object that no record names
//!     is removed by its creator, or declared dead by the next record.
//! BUCKET-5  Data from the store is bounded and compared with the hash in its name before it is
//!     considered complete; its authenticity is for the tags of the archive.

mod azure_store;
mod block_cache;
mod directory;
mod inventory;
mod layout;
mod map;
mod objects;
mod owner;
mod s3_store;
mod session;
mod spool;
mod store;
#[cfg(test)]
mod tests;
mod upload;
mod version;
mod writable;

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use lockbox::storage::Storage;
use lockbox::{Error, Result};

pub(crate) use self::azure_store::AzureStore;
pub use self::block_cache::WholeObjects;
pub(crate) use self::directory::DirectoryStore;
pub use self::inventory::{CollectReport, NewestRecord, ObjectCheck, ObjectTotals, ProgressFn, StoredArchive};
pub(crate) use self::inventory::{check_objects, list_archives, verify_objects};
use self::layout::WriterIdentity;
pub(crate) use self::objects::random_bytes;
pub(crate) use self::objects::{ListedObject, MAX_LIST_ENTRIES, ObjectCreation, ObjectRange, ObjectStore};
pub(crate) use self::s3_store::S3Store;
use self::session::WriterSession;
pub use self::spool::PendingUpload;
use self::spool::{SpoolOverlay, UploadSpool};
pub(crate) use self::spool::{discard, pending_uploads};
use self::store::BucketStore;
pub use self::store::{GRACE, MIN_GRACE};
use self::upload::UploadBuffer;
pub(crate) use self::version::Follower;
use self::version::{BucketVersion, PartialReader, VersionReader};
pub(crate) use self::writable::{BucketWriter, CLEAN_INTERVAL};
use crate::RemoteOptions;
use crate::cache;
use crate::range_source::{Metered, RequestMetrics};
use crate::remote_file::RemoteFile;

/// Time limit of removing uploads when a backup is abandoned.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens the archive at its newest record, with a [`Follower`] for later ones. Returns None if
/// there is no archive. Errors: as [`crate::open`].
pub(crate) fn open(objects: Box<dyn ObjectStore>, name: String, options: &RemoteOptions) -> Result<Option<Follower>> {
    let Some(OpenedVersion { version, reader, metrics, listed }) = open_newest(objects, name, options)? else {
        return Ok(None);
    };
    let (name, reader) = (reader.blocks.store.name.clone(), Arc::new(reader));
    let file = RemoteFile::open_source(reader.clone(), name, options, metrics)?;
    Ok(Some(Follower::new(version, reader, file, listed)))
}

/// Opens the archive at its newest record for a check of all bytes, which reads each object once.
/// None and errors as of [`open`].
pub(crate) fn open_for_check(
    objects: Box<dyn ObjectStore>,
    name: String,
    options: &RemoteOptions,
) -> Result<Option<(RemoteFile, Arc<WholeObjects>)>> {
    // The store is checked, not the copy on this host.
    let uncached = options.without_cache();
    let Some(OpenedVersion { mut reader, metrics, .. }) = open_newest(objects, name, &uncached)? else {
        return Ok(None);
    };
    let (unnamed, capacity) =
        cache::unnamed_file(options).map_err(|error| Error::io("cannot create a temporary file", error))?;
    let (name, whole) = (reader.blocks.store.name.clone(), Arc::new(WholeObjects::new(unnamed, capacity)));
    reader.blocks.whole = Some(whole.clone());
    let file = RemoteFile::open_source(Arc::new(reader), name, &uncached, metrics)?;
    Ok(Some((file, whole)))
}

/// Opens the current version with missing objects as zeros: see [`PartialReader`].
pub(crate) fn open_partial(
    objects: Box<dyn ObjectStore>,
    name: String,
    options: &RemoteOptions,
) -> Result<Option<RemoteFile>> {
    // A later open of the archive must not find these zeros in the cache.
    let options = options.without_cache();
    let Some(OpenedVersion { reader, metrics, .. }) = open_newest(objects, name, &options)? else { return Ok(None) };
    let name = reader.blocks.store.name.clone();
    RemoteFile::open_source(Arc::new(PartialReader::new(reader)), name, &options, metrics).map(Some)
}

/// Opens the archive as spooled by a writer of this host. Errors: as of [`open`]; `Io` of the kind
/// `NotFound` when nothing is spooled for this archive.
pub(crate) fn open_pending_upload(
    objects: Box<dyn ObjectStore>,
    name: String,
    options: &RemoteOptions,
) -> Result<RemoteFile> {
    let nothing = || Error::request(format!("{name}: no unsent data on this machine"), std::io::ErrorKind::NotFound);
    let directory = options.spool_directory.as_deref().ok_or_else(nothing)?;
    let store = BucketStore::new(objects, name.clone(), options.timeout);
    let spool = UploadSpool::open_latest(directory, &name, &store.existing_incarnation()?)?;
    // The cache has the store's content under the same record numbers.
    let options = options.without_cache();
    let objects = SpoolOverlay { inner: store.objects, spool: Arc::new(OnceLock::from(spool)) };
    let found = open_newest(Box::new(objects), name.clone(), &options)?.ok_or_else(nothing)?;
    RemoteFile::open_source(Arc::new(found.reader), name, &options, found.metrics)
}

/// Newest version of an archive, with its reader.
struct OpenedVersion {
    version: BucketVersion,
    reader: VersionReader,
    metrics: Arc<RequestMetrics>,
    /// Time of the list.
    listed: Duration,
}

fn open_newest(objects: Box<dyn ObjectStore>, name: String, options: &RemoteOptions) -> Result<Option<OpenedVersion>> {
    let metrics = Arc::new(RequestMetrics::default());
    let objects = Metered::<dyn ObjectStore> { metrics: metrics.clone(), inner: objects.into() };
    let store = Arc::new(BucketStore::new(Box::new(objects), name, options.timeout));
    let listed = version::now();
    let Some((incarnation, number)) = store.find_archive()? else { return Ok(None) };
    let version =
        BucketVersion::load_newest_from(&store, &incarnation, number)?.filter(|version| version.trailer.length > 0);
    let version = version.ok_or_else(|| store.nothing_committed())?;
    let reader = VersionReader::new(store, incarnation, &version);
    Ok(Some(OpenedVersion { version, reader, metrics, listed }))
}

/// Implements [`crate::collect_garbage`].
pub(crate) fn collect_garbage(
    objects: Box<dyn ObjectStore>,
    name: String,
    options: &RemoteOptions,
    take_over: bool,
) -> Result<CollectReport> {
    let store = open_store(objects, name, options);
    WriterSession::open_existing(store, WriterIdentity::current(), take_over)?.collect_garbage()
}

/// Opens a store for writing, with the spool of this host.
fn open_store(objects: Box<dyn ObjectStore>, name: String, options: &RemoteOptions) -> Arc<BucketStore> {
    let store = BucketStore::new(objects, name, options.timeout).with_grace(options.grace);
    Arc::new(store.with_spool_directory(options.spool_directory.as_deref()))
}

/// Writer of a backup in a bucket: readers see nothing of it before [`Bucket::publish`].
pub struct Bucket {
    session: WriterSession,
    options: RemoteOptions,
    buffer: Option<Arc<UploadBuffer>>,
    /// Set once there is nothing to clean up.
    is_finished: bool,
}

impl Bucket {
    /// Acquires the archive, or the empty prefix, as its writer.
    pub(crate) fn open(
        objects: Box<dyn ObjectStore>,
        name: String,
        options: &RemoteOptions,
        take_over: bool,
    ) -> Result<Bucket> {
        let mut session =
            WriterSession::open(open_store(objects, name, options), WriterIdentity::current(), take_over)?;
        session.remove_expired();
        Ok(Bucket { session, options: options.clone(), buffer: None, is_finished: false })
    }

    /// Returns a message for the user about the acquisition.
    pub fn notice(&self) -> Option<&str> {
        self.session.notice.as_deref()
    }

    /// Opens the current content for writing; returns None for an empty prefix.
    ///
    /// # Errors
    /// Errors of requests.
    pub fn open_existing(&mut self) -> Result<Option<Arc<dyn Storage>>> {
        if self.session.newest.length == 0 {
            return Ok(None);
        }
        self.start_upload(false).map(Some)
    }

    /// Starts an empty archive and discards earlier writes.
    ///
    /// # Errors
    /// Errors of requests.
    pub fn create_empty(&mut self) -> Result<Arc<dyn Storage>> {
        self.start_upload(true)
    }

    fn start_upload(&mut self, empty: bool) -> Result<Arc<dyn Storage>> {
        self.discard_uploads();
        let buffer = Arc::new(UploadBuffer::new(&self.session, &self.options, empty)?);
        self.buffer = Some(buffer.clone());
        Ok(buffer)
    }

    /// Discards all writes. Returns whether the store responds.
    fn discard_uploads(&mut self) -> bool {
        let Some(buffer) = self.buffer.take() else { return true };
        let (uploaded, sending) = buffer.abandon();
        self.session.discard_uploads(uploaded, sending, Instant::now() + CLEANUP_TIMEOUT)
    }

    /// Commits all writes and releases the archive; atomic, and durable on return.
    ///
    /// # Errors
    /// `InUse` when another writer took over; errors of requests. Then the archive has its old
    /// content, or the new one if the response was lost.
    pub fn publish(mut self) -> Result<()> {
        let Some(buffer) = self.buffer.take() else { return Ok(()) };
        let done = buffer.publish(&mut self.session);
        // A record in doubt may name the uploaded objects.
        self.is_finished = done.is_ok() || self.session.is_in_doubt();
        self.buffer = Some(buffer);
        done
    }
}

/// Releases the archive without a commit. The user may be waiting without a network: each request
/// is made once, and none after one without a response. If the last record is missing, the next
/// writer finds the leftovers.
impl Drop for Bucket {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        self.session.store.retry_once();
        if self.discard_uploads() {
            let _ = self.session.close();
        }
    }
}
