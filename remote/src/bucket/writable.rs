//! Bucket writer: an archive in a bucket, open for writing, in which each barrier is one record.
//!
//! # Invariants
//! LIVING-1  A barrier succeeds only when the store has confirmed its record. Any reader then finds
//!     its content, from anywhere and with nothing but the bucket.
//! LIVING-2  A failed barrier leaves the archive as of the last barrier, or as of this one. The
//!     second is possible only if the store did not confirm or reject the record while the same
//!     bytes were sent repeatedly until the timeout; the error says so. In both cases nothing is
//!     written from then on, so no later record builds on an unknown one. In the mode
//!     `retry_forever` (a mount) there is no such end: the barrier waits with the frozen record
//!     until the store has decided, or until this process ends, and then the record is spooled on
//!     this host.
//! LIVING-3  After another writer acquired the archive no barrier succeeds; the old content can
//!     still be read.
//! LIVING-4  Closing removes objects that no record names, and commits a final record that releases
//!     the archive. If that is lost, the next writer on another machine only has to confirm the
//!     takeover.
//! LIVING-5  A replacement of the whole content is uploaded unnamed, and one record names it and
//!     closes the writer (STORAGE-5): before that record the uploads are garbage and the old
//!     objects are needed; from then on the old ones are dead and stay for the grace period of
//!     their readers.
//! LIVING-6  After `spool_on_timeout` (a mount that ends) a barrier waits for the store once more.
//!     Objects that the store does not take are then spooled in replay order (SPOOL-1 to 3), and
//!     the barrier succeeds: the mount has ended all successful replies to syncs before
//!     (`FileSystem::end_syncs`). The rollback state does not count them
//!     ([`Storage::pending_upload_bytes`]). Such a barrier does not repack, which reads the store.
//! LIVING-7  Expired objects are removed without a lock, while commits go on: BUCKET-4 holds for
//!     them under every later action of any writer, since a durable record declared them dead a
//!     grace period ago, and neither reads nor later records use them. Their tombstones
//!     stay in the records until the store has confirmed the removal. So a removal may end at any
//!     request, as at the end of the mount, and its repetition does no harm.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lockbox::storage::{Replacement, Storage};
use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::CLEANUP_TIMEOUT;
use super::layout::{RecordKind, WriterIdentity};
use super::map::ObjectId;
use super::objects::{MAX_BATCH, ObjectStore};
use super::open_store;
use super::session::WriterSession;
use super::spool::UploadSpool;
use super::store::BucketStore;
use super::upload::UploadBuffer;
use crate::RemoteOptions;
use crate::range_source::{Metered, RequestMetrics, RequestStats};

/// Interval of removing expired objects, [`MAX_BATCH`] at a time: fifty times the garbage of a
/// writer that commits each second.
pub(crate) const CLEAN_INTERVAL: Duration = Duration::from_secs(20);

/// Maximum blocks of sparse objects rewritten at close, in addition to as many as were written: 64
/// MiB.
const REPACK_BLOCKS: u64 = 64 << 8;

/// Archive in a bucket, open for writing.
pub(crate) struct BucketWriter {
    pub(super) buffer: UploadBuffer,
    options: RemoteOptions,
    store: Arc<BucketStore>,
    session: Mutex<WriterSession>,
    /// Objects of an abandoned replacement: uploaded ones, and those in flight.
    abandoned: Mutex<(Vec<ObjectId>, Vec<ObjectId>)>,
    /// Time of the last release of expired objects.
    pub(super) last_released: Mutex<Instant>,
    metrics: Arc<RequestMetrics>,
}

impl BucketWriter {
    /// Acquires the archive as its writer; expired objects are for [`Self::remove_expired`].
    pub(crate) fn acquire(
        objects: Box<dyn ObjectStore>,
        name: String,
        options: &RemoteOptions,
        take_over: bool,
    ) -> Result<BucketWriter> {
        let metrics = Arc::new(RequestMetrics::default());
        let objects = Metered::<dyn ObjectStore> { metrics: metrics.clone(), inner: objects.into() };
        let store = open_store(Box::new(objects), name, options);
        let mut session = WriterSession::open_existing(store.clone(), WriterIdentity::current(), take_over)?;
        if session.newest.length == 0 {
            session.close()?;
            return Err(store.nothing_committed());
        }
        BucketWriter::from_session(session, options, metrics)
    }

    pub(super) fn from_session(
        session: WriterSession,
        options: &RemoteOptions,
        metrics: Arc<RequestMetrics>,
    ) -> Result<BucketWriter> {
        let buffer = UploadBuffer::new(&session, options, false)?;
        let (store, last_released) = (session.store.clone(), Mutex::new(Instant::now()));
        Ok(BucketWriter {
            buffer,
            options: options.clone(),
            store,
            session: Mutex::new(session),
            abandoned: Mutex::default(),
            last_released,
            metrics,
        })
    }

    /// Makes barriers, and writes, wait until the store responds: a failure that is reported could
    /// turn into a success later. Reads are not affected.
    pub(crate) fn retry_forever(&self) {
        self.store.retry_forever();
    }

    /// Makes barriers wait for the store once more and then spool on this host: no caller is left
    /// to which durable means more. The next writer on this host sends the objects (SPOOL-2).
    /// With `limit` it is the longest wait.
    pub(crate) fn spool_on_timeout(&self, limit: Option<Duration>) {
        self.store.spool_on_timeout(limit);
    }

    /// Removes some of the expired objects (LIVING-7). Returns whether more are due.
    pub(crate) fn remove_expired(&self) -> bool {
        let (incarnation, due) = {
            let session = self.session.lock();
            if session.is_over() || self.store.spool().is_some_and(UploadSpool::is_spooling) {
                return false;
            }
            let mut due = session.expired(MAX_BATCH);
            self.buffer.retain_unused(&mut due);
            (session.incarnation, due)
        };
        if due.is_empty() {
            return false;
        }
        let (left, error) = self.store.remove(&incarnation, &due, None);
        if let Some(error) = &error {
            tracing::debug!("{}: expired objects could not be removed yet: {}", self.store.name, error.message());
        }
        self.session.lock().forget_removed(&due, &left);
        // The next removal meets the same error.
        due.len() == MAX_BATCH && error.is_none()
    }

    pub(crate) fn notice(&self) -> Option<String> {
        self.session.lock().notice.clone()
    }

    pub(crate) fn stats(&self) -> RequestStats {
        RequestStats { unsent: self.spooled_bytes(), ..self.metrics.stats(0) }
    }

    fn spooled_bytes(&self) -> u64 {
        self.store.spool().map_or(0, UploadSpool::bytes)
    }

    /// Adds the state of the archive after a failure to the error (LIVING-2).
    fn explain_failure(session: &WriterSession, error: Error) -> Error {
        match error {
            Error::Io { context, source } if session.is_in_doubt() => {
                let known = "the last change may or may not be in the archive; all earlier changes are";
                Error::Io { context: format!("{context}; {known}"), source }
            }
            error => error,
        }
    }

    /// Closes the archive (LIVING-4). A waiting barrier makes its last attempts.
    pub(crate) fn close(&self) {
        self.store.retry_once();
        let session = &mut *self.session.lock();
        // The replay of the spool commits the final record, too.
        if self.store.spool().is_some_and(UploadSpool::is_spooling) {
            return;
        }
        // A record in doubt may name the last uploads.
        if session.is_in_doubt() {
            return;
        }
        let (uploaded, sending) = std::mem::take(&mut *self.abandoned.lock());
        if !session.discard_uploads(uploaded, sending, Instant::now() + CLEANUP_TIMEOUT) || session.is_over() {
            return;
        }
        if self.buffer.is_committed() {
            let most = REPACK_BLOCKS + self.buffer.written();
            let repacked = self.buffer.repack_sparse(session.most_runs(), most);
            let repacked = repacked.and_then(|()| self.buffer.repack_start());
            let closed = repacked.and_then(|()| self.buffer.commit(session, RecordKind::Close));
            if closed.is_ok() || session.is_over() {
                return;
            }
            if let Err(error) = closed {
                tracing::info!("{}: the archive keeps its last committed state: {error}", self.store.name);
            }
        }
        let (uploaded, sending) = self.buffer.abandon();
        if session.discard_uploads(uploaded, sending, Instant::now() + CLEANUP_TIMEOUT) {
            let _ = session.close();
        }
    }
}

impl Drop for BucketWriter {
    fn drop(&mut self) {
        self.close();
    }
}

/// Replacement of the whole content (LIVING-5).
struct BucketReplacement<'a> {
    writer: &'a BucketWriter,
    buffer: Arc<UploadBuffer>,
    /// Set if a record may name the uploads.
    is_published: bool,
}

impl Replacement for BucketReplacement<'_> {
    fn storage(&self) -> Arc<dyn Storage> {
        self.buffer.clone()
    }

    fn publish(mut self: Box<Self>) -> Result<()> {
        let writer = self.writer;
        let mut session = writer.session.lock();
        let done = self.buffer.publish(&mut session);
        self.is_published = done.is_ok() || session.is_in_doubt();
        if self.is_published {
            writer.buffer.end();
        }
        done.map_err(|error| BucketWriter::explain_failure(&session, error))
    }
}

impl Drop for BucketReplacement<'_> {
    fn drop(&mut self) {
        if !self.is_published {
            let (mut uploaded, mut sending) = self.buffer.abandon();
            let abandoned = &mut *self.writer.abandoned.lock();
            abandoned.0.append(&mut uploaded);
            abandoned.1.append(&mut sending);
        }
    }
}

impl Storage for BucketWriter {
    fn len(&self) -> Result<u64> {
        self.buffer.len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        self.buffer.read_at(offset, out)
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        self.buffer.will_need(offset, length);
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> Result<()> {
        self.buffer.write_at(offset, data)
    }

    fn allocate(&self, offset: u64, length: u64) -> Result<()> {
        self.buffer.allocate(offset, length)
    }

    fn punch(&self, offset: u64, length: u64) -> Result<()> {
        self.buffer.punch(offset, length)
    }

    fn set_len(&self, length: u64) -> Result<()> {
        self.buffer.set_len(length)
    }

    /// LIVING-1
    fn barrier(&self) -> Result<()> {
        let mut session = self.session.lock();
        // A map that no reader takes would be durable. If the store cannot be read, the commit waits
        // or is spooled like any other: half of a checkpoint is left for it, the session refuses a
        // longer one, and the next barrier repacks. A mount that ends does not read (LIVING-6).
        if self.buffer.is_scattered(session.most_runs()) && !self.store.is_leaving() {
            match self.buffer.repack_sparse(session.most_runs(), u64::MAX) {
                Err(error) if error.request_kind().is_some() => {
                    tracing::debug!("{}: a later barrier repacks the archive: {error}", self.store.name);
                }
                repacked => repacked?,
            }
        }
        let done = self.buffer.commit(&mut session, RecordKind::Commit);
        done.map_err(|error| BucketWriter::explain_failure(&session, error))?;
        let mut last_released = self.last_released.lock();
        if last_released.elapsed() >= CLEAN_INTERVAL && !self.store.spool().is_some_and(UploadSpool::is_spooling) {
            *last_released = Instant::now();
            // Otherwise they stay until a later release.
            let _ = self.buffer.release_objects(&session.expired(MAX_BATCH));
        }
        Ok(())
    }

    fn has_atomic_barrier(&self) -> bool {
        true
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        // Objects in flight cannot be read from the store yet.
        let _session = self.session.lock();
        self.buffer.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.buffer.next_data(offset)
    }

    fn allocated(&self) -> Result<u64> {
        self.buffer.allocated()
    }

    fn pending_upload_bytes(&self) -> Result<u64> {
        Ok(self.spooled_bytes())
    }

    /// LIVING-5
    fn begin_replace(&self) -> Result<Box<dyn Replacement + '_>> {
        // Pending writes are committed as part of the old content, or they would become orphans.
        self.barrier()?;
        let session = self.session.lock();
        let buffer = Arc::new(UploadBuffer::new(&session, &self.options, true)?);
        Ok(Box::new(BucketReplacement { writer: self, buffer, is_published: false }))
    }

    fn read_only(&self) -> bool {
        false
    }
}
