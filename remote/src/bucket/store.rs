//! Object store operations with retries, concurrent requests, and record reads of one archive.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::{Error, Result};
use parking_lot::Mutex;
use rangemap::RangeSet;

use super::layout::{self, Incarnation, MAX_BODY, RecordParts, TRAILER_BYTES, Trailer};
use super::map::{BlockMap, Hash, ObjectId, ObjectRef};
use super::objects::{
    BatchReply, ListedObject, MAX_BATCH, MAX_LIST_ENTRIES, ObjectCreation, ObjectRange, ObjectStore, UnreadableDir,
    describe, object_path, parse_path,
};
use super::spool::{SpoolOverlay, UploadSpool};
use crate::hex;
use crate::range_source::{RemoteError, RemoteResult};
use crate::retry::{Backoff, HostClock, RetryClock, with_retry_on};
use crate::transport::AttemptClock;

pub(super) const MARKER: &str = "lockbox";
/// Bytes requested from the end of a record, and more at open: the previous writer left there the
/// blocks that an open reads first (cheaper than two extra round trips on most links).
const TAIL_BYTES: u64 = 256 << 10;
pub(super) const OPEN_TAIL_BYTES: u64 = 768 << 10;
/// Maximum objects walked: four thousand lists, which take some minutes.
const MAX_LISTED: usize = if cfg!(test) { 20_000 } else { 4_000_000 };
/// First pause between rounds of attempts in the mode `forever`.
const RETRY_INTERVAL: Duration = if cfg!(test) { Duration::from_millis(1) } else { Duration::from_secs(1) };
/// Interval for checking whether spooling has started.
const TIMEOUT_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum records that a writer commits while another one looks for the newest: each commit takes
/// two round trips, and so does the look.
const MAX_RECORDS_AHEAD: u64 = 4;
/// Maximum concurrent removals, and removals per thread.
const MAX_REMOVE_THREADS: usize = 8;
const REMOVALS_PER_THREAD: usize = 4;

/// Default grace period before dead objects are removed: readers of an older version may use them.
pub const GRACE: Duration = Duration::from_secs(24 * 3600);
/// Minimum grace period: a reader notices a newer version within minutes.
pub const MIN_GRACE: Duration = Duration::from_secs(3600);

/// Objects of one archive in a store.
#[derive(Clone)]
pub(crate) struct BucketStore {
    pub(super) objects: Arc<dyn ObjectStore>,
    /// For messages.
    pub(super) name: String,
    pub(super) timeout: Option<Duration>,
    retry_mode: Arc<RetryMode>,
    clock: Arc<dyn RetryClock>,
    /// Spool, once the archive's incarnation is known.
    spool: Arc<OnceLock<UploadSpool>>,
    spool_directory: Option<PathBuf>,
    /// Time that a writer of this store leaves dead objects there.
    pub(super) grace: Duration,
    /// Pages that came with the last record read.
    tail: Arc<Mutex<Option<RecordTail>>>,
    /// The store has no batch removals.
    lacks_batches: Arc<AtomicBool>,
}

#[derive(Default)]
struct RetryMode {
    /// The caller is closing: nothing is tried twice.
    once: AtomicBool,
    /// Creates are repeated until the store has decided.
    forever: AtomicBool,
    /// Time from which creates are spooled that the store has not decided about.
    spool_at: OnceLock<Instant>,
    /// Time until which the store asked for no requests.
    quiet_until: Mutex<Option<Instant>>,
}

/// Incarnation of an archive, and the sequence of its newest record if it is known.
type FoundArchive = (Incarnation, Option<u64>);

struct RecordTail {
    sequence: u64,
    /// First of these blocks, as a block number in the record, and their bytes.
    at: u32,
    bytes: Vec<u8>,
}

impl RecordTail {
    /// Extracts the pages from the end of a record, in which `behind` bytes follow them.
    fn of(trailer: &Trailer, end: &[u8], behind: usize) -> Option<RecordTail> {
        let before = trailer.bytes().checked_sub(end.len() as u64)?;
        let at = before.div_ceil(layout::BLOCK);
        let pages = end.get((at * layout::BLOCK - before) as usize..end.len() - behind)?;
        let is_so = pages.len() as u64 == u64::from(trailer.blocks).checked_sub(at)? * layout::BLOCK;
        let at = u32::try_from(at).ok().filter(|_| is_so && !pages.is_empty())?;
        Some(RecordTail { sequence: trailer.sequence, at, bytes: pages.to_vec() })
    }

    /// Returns `length` bytes from a position on, if the tail has them.
    fn part(&self, place: &ObjectRef, length: u64) -> Option<&[u8]> {
        let behind = place.at.checked_sub(self.at).filter(|_| place.id == ObjectId::Log(self.sequence))?;
        let from = u64::from(behind) * layout::BLOCK;
        self.bytes.get(usize::try_from(from).ok()?..usize::try_from(from + length).ok()?)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CreateOutcome {
    /// The object is durable; with the store's time, if it was sent.
    Created(Option<u64>),
    /// The name has other content.
    Conflict,
}

impl BucketStore {
    pub(super) fn new(objects: Box<dyn ObjectStore>, name: String, timeout: Option<Duration>) -> BucketStore {
        BucketStore {
            objects: objects.into(),
            name,
            timeout,
            retry_mode: Arc::default(),
            clock: Arc::new(HostClock::default()),
            spool: Arc::default(),
            spool_directory: None,
            grace: GRACE,
            tail: Arc::default(),
            lacks_batches: Arc::default(),
        }
    }

    #[cfg(test)]
    pub(super) fn with_clock(self, clock: Arc<dyn RetryClock>) -> BucketStore {
        BucketStore { clock, ..self }
    }

    pub(super) fn with_grace(self, grace: Duration) -> BucketStore {
        BucketStore { grace: grace.max(MIN_GRACE), ..self }
    }

    pub(super) fn with_spool_directory(self, directory: Option<&Path>) -> BucketStore {
        let objects = Arc::new(SpoolOverlay { inner: self.objects, spool: self.spool.clone() });
        BucketStore { objects, spool_directory: directory.map(Path::to_owned), ..self }
    }

    /// Opens the spool of this archive, if there is a directory for it.
    pub(super) fn open_spool(&self, incarnation: &Incarnation) -> Result<()> {
        let Some(directory) = self.spool_directory.as_deref() else { return Ok(()) };
        if let Some(spool) = UploadSpool::open(directory, &self.name, incarnation)? {
            self.spool.get_or_init(|| spool);
        }
        Ok(())
    }

    pub(super) fn spool(&self) -> Option<&UploadSpool> {
        self.spool.get()
    }

    pub(super) fn retry_once(&self) {
        self.retry_mode.once.store(true, Ordering::Relaxed);
        self.clock.wake();
    }

    /// Repeats creates until the store has decided, or [`Self::retry_once`] is called.
    pub(super) fn retry_forever(&self) {
        self.retry_mode.forever.store(true, Ordering::Relaxed);
    }

    /// Spools objects that the store does not take within the timeout, or within `limit` if that is
    /// less, for the next writer to send (SPOOL-2). Without either limit or a spool, creates keep
    /// waiting.
    pub(super) fn spool_on_timeout(&self, limit: Option<Duration>) {
        if let Some(limit) = self.timeout.into_iter().chain(limit).min().filter(|_| self.spool().is_some()) {
            self.retry_mode.spool_at.get_or_init(|| Instant::now() + limit);
            self.clock.wake();
        }
    }

    /// Returns whether [`Self::spool_on_timeout`] has set a time.
    pub(super) fn is_leaving(&self) -> bool {
        self.retry_mode.spool_at.get().is_some()
    }

    fn is_retrying_once(&self) -> bool {
        self.retry_mode.once.load(Ordering::Relaxed)
    }

    /// Makes an idempotent request with retries.
    fn request<T>(&self, call: &mut dyn FnMut(&dyn ObjectStore) -> RemoteResult<T>) -> RemoteResult<T> {
        self.request_within(self.timeout, call)
    }

    fn request_within<T>(
        &self,
        timeout: Option<Duration>,
        call: &mut dyn FnMut(&dyn ObjectStore) -> RemoteResult<T>,
    ) -> RemoteResult<T> {
        self.with_retry_within(None, timeout, &mut || call(&*self.objects))
    }

    /// Retries transient errors, for a caller that has waited without a response since
    /// `silent_since`. After [`Self::retry_once`], the running attempt is the last, even within the
    /// timeout. A pause that the store asked for in any response holds for all requests of this
    /// store. The last attempt of a writer that closes is made all the same.
    pub(super) fn with_retry_within<T>(
        &self,
        silent_since: Option<Instant>,
        timeout: Option<Duration>,
        attempt: &mut dyn FnMut() -> RemoteResult<T>,
    ) -> RemoteResult<T> {
        let quiet_until = &self.retry_mode.quiet_until;
        let timeout = || if self.is_retrying_once() { Some(Duration::ZERO) } else { timeout };
        with_retry_on(silent_since, &*self.clock, &timeout, &mut || {
            let now = self.clock.now();
            let left = quiet_until.lock().and_then(|until| until.checked_duration_since(now));
            if let Some(after) = left.filter(|left| !left.is_zero() && !self.is_retrying_once()) {
                let why = format!("it requested a pause, with {} seconds left", after.as_secs());
                return Err(RemoteError::Busy { why, after });
            }
            let answer = attempt();
            if let Err(RemoteError::Busy { after, .. }) = &answer {
                let until = Some(self.clock.now() + *after);
                let mut quiet_until = quiet_until.lock();
                *quiet_until = until.max(*quiet_until);
            }
            answer
        })
    }

    pub(super) fn to_error(&self, error: RemoteError) -> Error {
        error.into_error(&self.name)
    }

    /// Reads the incarnation of the archive; None if there is none.
    pub(super) fn read_incarnation(&self) -> RemoteResult<Option<Result<Incarnation>>> {
        match self.request(&mut |objects| objects.get(MARKER, ObjectRange::All(layout::MARKER_BYTES as u64))) {
            Ok(bytes) => Ok(Some(layout::decode_marker(&bytes))),
            Err(RemoteError::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads the incarnation, and concurrently lists the newest record: no other name of an archive
    /// sorts before its own, unless foreign objects exist. None if there is no archive, or if the
    /// store may hide that.
    pub(super) fn find_archive(&self) -> Result<Option<FoundArchive>> {
        // A failure is reported by the later request.
        let list = || self.objects.list("", "", 1).ok().and_then(|listed| listed.into_iter().next());
        let (incarnation, first) = run_both(|| self.read_incarnation(), "list", list);
        let incarnation = match incarnation {
            Ok(Some(incarnation)) => incarnation?,
            Ok(None) => return Ok(None),
            Err(error) if error.may_hide_missing() && self.objects.can_hide_missing() => return Ok(None),
            Err(error) => return Err(self.to_error(error)),
        };
        let number = first.flatten().and_then(|first| parse_path(&incarnation, &first.name)?.sequence());
        Ok(Some((incarnation, number)))
    }

    pub(super) fn nothing_committed(&self) -> Error {
        Error::NotArchive(format!("{}: a writer has started, but not committed anything yet", self.name))
    }

    /// Creates an object, repeating the same bytes until the store has decided. An existing name
    /// does not decide: it may be ours, of a lost response. After [`Self::spool_on_timeout`], a
    /// spooled object counts as created. Errors: failures of requests. After one, the object may or
    /// may not exist, or appear later.
    pub(super) fn create(&self, name: &str, bytes: &Arc<Vec<u8>>) -> Result<CreateOutcome> {
        loop {
            if let Some(outcome) = self.create_with(name, bytes, false)? {
                return Ok(outcome);
            }
        }
    }

    /// Like [`Self::create`]. If the object `is_divisible`, returns None if a part of it was sent
    /// and the connection failed then: sending smaller objects loses less. It may exist
    /// nevertheless.
    pub(super) fn create_with(
        &self,
        name: &str,
        bytes: &Arc<Vec<u8>>,
        is_divisible: bool,
    ) -> Result<Option<CreateOutcome>> {
        let is_forever = self.retry_mode.forever.load(Ordering::Relaxed);
        match self.spool() {
            Some(spool) if spool.is_spooling() => {
                spool.append(name, bytes, true).map(|()| Some(CreateOutcome::Created(None)))
            }
            Some(spool) if is_forever => self.create_on_thread(spool, name, bytes, is_divisible),
            _ => self.try_create(name, bytes, is_divisible),
        }
    }

    /// Creates an object on a thread of its own: the request may take minutes for a large object,
    /// and a mount that ends does not wait for it. If it succeeds later, a replay does the same.
    fn create_on_thread(
        &self,
        spool: &UploadSpool,
        name: &str,
        bytes: &Arc<Vec<u8>>,
        is_divisible: bool,
    ) -> Result<Option<CreateOutcome>> {
        let (sender, answer) = mpsc::channel();
        let (store, named, object) = (self.clone(), name.to_owned(), bytes.clone());
        let started = thread::Builder::new().name("create".into()).spawn(move || {
            // The caller may have stopped waiting.
            let _ = sender.send(store.try_create(&named, &object, is_divisible));
        });
        started.map_err(|error| Error::io("cannot start a thread that sends", error))?;
        loop {
            match answer.recv_timeout(TIMEOUT_CHECK_INTERVAL) {
                Ok(outcome) => return outcome,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::request("a thread that sends has ended", io::ErrorKind::Other));
                }
            }
            if self.retry_mode.spool_at.get().is_some_and(|at| Instant::now() >= *at) {
                return spool.append(name, bytes, true).map(|()| Some(CreateOutcome::Created(None)));
            }
        }
    }

    fn try_create(&self, name: &str, bytes: &[u8], is_divisible: bool) -> Result<Option<CreateOutcome>> {
        let (mut backoff, mut timeout) = (Backoff::from_pause(RETRY_INTERVAL), self.timeout);
        loop {
            match self.create_once(name, bytes, is_divisible, timeout) {
                // No error is final. Access may be granted again, a full store may get space, and
                // an expired token, a slow connection or a bucket in migration can look like a
                // permanent failure.
                Err(error) if self.retry_mode.forever.load(Ordering::Relaxed) => {
                    if self.spool_object(name, bytes)? {
                        return Ok(Some(CreateOutcome::Created(None)));
                    }
                    if self.is_retrying_once() {
                        return Err(self.to_error(error));
                    }
                    let why = error.message();
                    tracing::warn!("{}: new writes are not durable until the store accepts them: {why}", self.name);
                    let pause = backoff.next_pause(error.retry_after());
                    self.clock.sleep(pause, &|| self.is_retrying_once() || self.is_leaving());
                    // One attempt a round, unless the mount ends and waits once more.
                    timeout = if self.is_leaving() { self.timeout } else { Some(Duration::ZERO) };
                }
                outcome => return outcome.map_err(|error| self.to_error(error)),
            }
        }
    }

    fn create_once(
        &self,
        name: &str,
        bytes: &[u8],
        is_divisible: bool,
        timeout: Option<Duration>,
    ) -> RemoteResult<Option<CreateOutcome>> {
        let created = self.request_within(timeout, &mut |objects| match objects.create(name, bytes) {
            Err(RemoteError::Transient(_)) if is_divisible && AttemptClock::is_interrupted() => Ok(None),
            created => created.map(Some),
        })?;
        let Some(created) = created else { return Ok(None) };
        if let ObjectCreation::Created(date) = created {
            return Ok(Some(CreateOutcome::Created(date)));
        }
        // The end of each object has a hash or a nonce, and the hash of a record's pages.
        let most = bytes.len().min(TRAILER_BYTES) as u64;
        let there = self.request_within(timeout, &mut |objects| objects.get(name, ObjectRange::Last(most)))?;
        // A shorter object ends as any does that it is the end of.
        let is_ours = there.len() as u64 == most && bytes.ends_with(&there);
        Ok(Some(if is_ours { CreateOutcome::Created(None) } else { CreateOutcome::Conflict }))
    }

    /// Spools an object that the store has not taken yet, for the next writer after a crash.
    /// Returns whether that completes the create.
    fn spool_object(&self, name: &str, bytes: &[u8]) -> Result<bool> {
        let Some(spool) = self.spool() else { return Ok(false) };
        let is_closing = self.is_leaving();
        match spool.append(name, bytes, is_closing) {
            Err(error) if is_closing => return Err(error),
            Err(error) => tracing::debug!(%error, "it is in memory alone"),
            Ok(()) => {}
        }
        Ok(is_closing)
    }

    /// Checks that the store rejects a second object of a name: without that, two writers are
    /// indistinguishable. Errors: `Unsupported`; errors of requests.
    pub(super) fn check_conditional_create(&self, name: &str, bytes: &[u8]) -> Result<()> {
        match self.request(&mut |objects| objects.create(name, bytes)).map_err(|error| self.to_error(error))? {
            ObjectCreation::Exists => Ok(()),
            ObjectCreation::Created(_) => Err(Error::Unsupported(format!(
                "{}: the store ignores If-None-Match and overwrites objects, so two writers could destroy each other's data; use another store",
                self.name
            ))),
        }
    }

    pub(super) fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.request(&mut |objects| objects.get(name, part))
    }

    /// Removes objects until the deadline, in batches, or concurrently where the store takes no
    /// batch. Each is requested once. A failed request stops the rest, which would fail as slowly,
    /// except with `Unsupported`: that error is about one object, such as an Azure blob with a
    /// snapshot. Returns the objects that may remain, and an error: preferably the one that stopped
    /// the rest.
    pub(super) fn remove(
        &self,
        incarnation: &Incarnation,
        ids: &[ObjectId],
        until: Option<Instant>,
    ) -> (HashSet<ObjectId>, Option<RemoteError>) {
        let (kept, ids, error) = self.remove_batches(incarnation, ids, until);
        let left = Mutex::new((kept.iter().chain(&ids).copied().collect::<HashSet<ObjectId>>(), error));
        let next = AtomicUsize::new(0);
        let is_stopped = |error: &Option<RemoteError>| !matches!(error, None | Some(RemoteError::Unsupported(_)));
        let work = || {
            while !is_stopped(&left.lock().1) && until.is_none_or(|until| Instant::now() < until) {
                let Some(id) = ids.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
                let clock = Some(AttemptClock::new(until));
                let removed = AttemptClock::run(clock, || self.objects.remove(&object_path(incarnation, id)));
                let (left, error) = &mut *left.lock();
                match removed {
                    Ok(()) => drop(left.remove(id)),
                    Err(why) if !is_stopped(error) => *error = Some(why),
                    Err(_) => {}
                }
            }
        };
        run_on_threads("remove", (ids.len() / REMOVALS_PER_THREAD).min(MAX_REMOVE_THREADS), work);
        left.into_inner()
    }

    /// Removes objects in batches. Returns the objects of which a batch may have left some, the
    /// objects to remove one by one, and the first error. Remembers a store without batches; after
    /// a rejected batch the next one is tried.
    fn remove_batches(
        &self,
        incarnation: &Incarnation,
        ids: &[ObjectId],
        until: Option<Instant>,
    ) -> (Vec<ObjectId>, Vec<ObjectId>, Option<RemoteError>) {
        let (mut left, mut single, mut error) = (Vec::new(), Vec::new(), None);
        let mut chunks = ids.chunks(MAX_BATCH);
        while !self.lacks_batches.load(Ordering::Relaxed) && until.is_none_or(|until| Instant::now() < until) {
            let Some(chunk) = chunks.next() else { break };
            let names: Vec<String> = chunk.iter().map(|id| object_path(incarnation, id)).collect();
            let clock = Some(AttemptClock::new(until));
            match AttemptClock::run(clock, || self.objects.remove_batch(&names)) {
                // Objects that stay, as under a lock, do not keep the others.
                Ok(BatchReply::Done(batch)) => {
                    let named = chunk.iter().zip(&names).filter(|(_, name)| !batch.removed.contains(*name));
                    left.extend(named.map(|(id, _)| *id));
                    error = error.or(batch.error);
                }
                Ok(BatchReply::Rejected) => single.extend(chunk),
                Ok(BatchReply::Unsupported) => {
                    self.lacks_batches.store(true, Ordering::Relaxed);
                    single.extend(chunk);
                }
                Err(why) => {
                    left.extend(chunk);
                    error = Some(why);
                    break;
                }
            }
        }
        let rest = if self.lacks_batches.load(Ordering::Relaxed) { &mut single } else { &mut left };
        rest.extend(chunks.flatten());
        (left, single, error)
    }

    /// Removes the temporary objects of overtaken writers.
    pub(super) fn sweep(&self, incarnation: &Incarnation) -> Result<()> {
        ["log", "seg", "map"].iter().try_for_each(|part| {
            let above = format!("{}/{part}", hex(incarnation));
            self.request(&mut |objects| objects.sweep(&above)).map_err(|error| self.to_error(error))
        })
    }

    pub(super) fn list(&self, prefix: &str, after: &str, most: usize) -> Result<Vec<ListedObject>> {
        self.request(&mut |objects| objects.list(prefix, after, most)).map_err(|error| self.to_error(error))
    }

    /// Visits all objects with a prefix. Errors: failures of requests and of `visit`; a store that
    /// repeats names or exceeds the limit.
    pub(super) fn walk(&self, prefix: &str, visit: &mut dyn FnMut(ListedObject) -> Result<()>) -> Result<()> {
        self.walk_tolerant(prefix, &mut |_, error| Err(error), visit)
    }

    /// Visits all objects except those in unreadable directories; see
    /// [`ObjectStore::list_tolerant`].
    pub(super) fn walk_tolerant(
        &self,
        prefix: &str,
        on_unreadable: &mut UnreadableDir<'_>,
        visit: &mut dyn FnMut(ListedObject) -> Result<()>,
    ) -> Result<()> {
        let (mut after, mut seen) = (String::new(), 0);
        loop {
            let listed =
                self.request(&mut |objects| objects.list_tolerant(prefix, &after, MAX_LIST_ENTRIES, on_unreadable));
            let listed = listed.map_err(|error| self.to_error(error))?;
            seen += listed.len();
            if seen > MAX_LISTED {
                return Err(Error::Unsupported(format!("{}: it has too many objects to list", self.name)));
            }
            let is_full = listed.len() == MAX_LIST_ENTRIES;
            for object in listed {
                if object.name <= after {
                    return Err(self.to_error(RemoteError::Unsupported("its lists are not sorted by bytes".into())));
                }
                after.clone_from(&object.name);
                visit(object)?;
            }
            if !is_full {
                return Ok(());
            }
        }
    }

    /// Reads the incarnation of an existing archive. Errors: `Io` of the kind `NotFound` when there
    /// is none; errors of requests; `Damaged`.
    pub(super) fn existing_incarnation(&self) -> Result<Incarnation> {
        match self.read_incarnation().map_err(|error| self.to_error(error))? {
            Some(incarnation) => incarnation,
            None => Err(self.to_error(RemoteError::NotFound)),
        }
    }

    /// Finds the sequence of the newest record; None if there is none. Errors: failures of
    /// requests; `Damaged` for an invalid name.
    pub(super) fn newest_sequence(&self, incarnation: &Incarnation) -> Result<Option<u64>> {
        self.request(&mut |objects| find_newest(objects, incarnation)).map_err(|error| self.to_error(error))
    }

    /// Finds the sequence of the newest record that the store dates at or before `time`, in seconds
    /// since 1970; None if there is none among the first millions. Errors: failures of requests.
    pub(super) fn newest_sequence_before(&self, incarnation: &Incarnation, time: u64) -> Result<Option<u64>> {
        let prefix = format!("{}/log/", hex(incarnation));
        let mut after = String::new();
        for _ in 0..MAX_LISTED / MAX_LIST_ENTRIES {
            let listed = self.list(&prefix, &after, MAX_LIST_ENTRIES)?;
            let old = listed.iter().filter(|object| object.time.is_some_and(|created| created <= time));
            let mut records = old.filter_map(|object| parse_path(incarnation, &object.name)?.sequence());
            if let Some(sequence) = records.next() {
                return Ok(Some(sequence));
            }
            match listed.last() {
                Some(last) if listed.len() == MAX_LIST_ENTRIES => after.clone_from(&last.name),
                _ => break,
            }
        }
        Ok(None)
    }

    /// Reads a record without its pages; None if the number does not exist.
    pub(super) fn read_record(&self, incarnation: &Incarnation, sequence: u64) -> Result<Option<RecordParts>> {
        self.read_record_with(incarnation, sequence, TAIL_BYTES)
    }

    /// Reads the last existing one of the next few records, requested concurrently: unless there
    /// are more, it was the newest one half a round trip ago.
    pub(super) fn read_newest_after(&self, incarnation: &Incarnation, sequence: u64) -> Result<Option<RecordParts>> {
        let answers = collect_all("record", MAX_RECORDS_AHEAD as usize, |number| {
            self.read_record(incarnation, sequence + 1 + number as u64)
        });
        Ok(answers.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().next_back())
    }

    /// Like [`Self::read_record`], with the pages among the last `most` bytes: an open needs
    /// [`OPEN_TAIL_BYTES`].
    pub(super) fn read_record_with(
        &self,
        incarnation: &Incarnation,
        sequence: u64,
        most: u64,
    ) -> Result<Option<RecordParts>> {
        let name = object_path(incarnation, &ObjectId::Log(sequence));
        let tail = match self.get(&name, ObjectRange::Last(most)) {
            Ok(tail) => tail,
            Err(RemoteError::NotFound) => return Ok(None),
            Err(error) => return Err(self.to_error(error)),
        };
        let short = || Error::damaged(format!("{}: a record is truncated", self.name));
        let at = tail.len().checked_sub(TRAILER_BYTES).ok_or_else(short)?;
        let trailer = Trailer::decode(&tail[at..], incarnation)?;
        if trailer.sequence != sequence {
            return Err(Error::damaged(format!("{}: a record has the name of another one", self.name)));
        }
        let needed = trailer.body_bytes() as usize + TRAILER_BYTES;
        let whole;
        let tail = if needed <= tail.len() {
            *self.tail.lock() = RecordTail::of(&trailer, &tail, needed);
            &tail[tail.len() - needed..]
        } else {
            debug_assert!(needed as u64 <= MAX_BODY + TRAILER_BYTES as u64);
            whole = self.get(&name, ObjectRange::Last(needed as u64)).map_err(|error| self.to_error(error))?;
            if whole.len() != needed {
                return Err(short());
            }
            &whole[..]
        };
        let body = layout::decode_body(&trailer, &tail[..needed - TRAILER_BYTES])?;
        Ok(Some((trailer, body)))
    }

    /// Reads the map of a checkpoint. Errors: failures of requests; `Damaged`.
    pub(super) fn read_checkpoint(
        &self,
        incarnation: &Incarnation,
        checkpoint: Option<(Hash, u64)>,
    ) -> Result<BlockMap> {
        let Some((hash, length)) = checkpoint else { return Ok(BlockMap::default()) };
        let bytes = match self.get(&object_path(incarnation, &ObjectId::Checkpoint(hash)), ObjectRange::All(length)) {
            Ok(bytes) => bytes,
            Err(RemoteError::NotFound) => {
                return Err(Error::damaged(format!("{}: {}", self.name, missing_message(&ObjectId::Checkpoint(hash)))));
            }
            Err(error) => return Err(self.to_error(error)),
        };
        let mut map = BlockMap::default();
        layout::decode_checkpoint(incarnation, &hash, &bytes)?.iter().for_each(|entry| map.assign(entry));
        map.reset_changes(RangeSet::new());
        Ok(map)
    }

    /// Returns the last record read with pages.
    pub(super) fn tail_record(&self) -> Option<ObjectId> {
        self.tail.lock().as_ref().map(|tail| ObjectId::Log(tail.sequence))
    }

    /// Fills `out` with blocks of the cached record tail; returns whether it has them.
    pub(super) fn copy_cached(&self, place: &ObjectRef, out: &mut [u8]) -> bool {
        let tail = self.tail.lock();
        let cached = tail.as_ref().and_then(|tail| tail.part(place, out.len() as u64));
        if let Some(cached) = cached {
            out.copy_from_slice(cached);
        }
        cached.is_some()
    }

    /// Reads `length` bytes of an object's blocks, which the record `sequence` needs.
    pub(super) fn read_blocks(
        &self,
        incarnation: &Incarnation,
        sequence: &AtomicU64,
        place: &ObjectRef,
        length: u64,
    ) -> RemoteResult<Vec<u8>> {
        let cached = self.tail.lock().as_ref().and_then(|tail| tail.part(place, length).map(<[u8]>::to_vec));
        if let Some(cached) = cached {
            return Ok(cached);
        }
        let part = ObjectRange::Range(u64::from(place.at) * layout::BLOCK, length);
        match self.objects.get(&object_path(incarnation, &place.id), part) {
            Ok(bytes) if bytes.len() as u64 == length => Ok(bytes),
            Ok(_) => Err(RemoteError::Damaged(format!("{} is truncated", describe(&place.id)))),
            // The newest record and its objects are never removed.
            Err(RemoteError::NotFound)
                if find_newest(&*self.objects, incarnation)? == Some(sequence.load(Ordering::Acquire)) =>
            {
                Err(RemoteError::Damaged(missing_message(&place.id)))
            }
            // It was needed no more for a day.
            Err(RemoteError::NotFound) => Err(RemoteError::Changed),
            Err(error) => Err(error),
        }
    }
}

/// Finds the sequence of the newest record; None if there is none.
fn find_newest(objects: &dyn ObjectStore, incarnation: &Incarnation) -> RemoteResult<Option<u64>> {
    let listed = objects.list(&format!("{}/log/", hex(incarnation)), "", 1)?;
    let Some(first) = listed.first() else { return Ok(None) };
    let sequence = parse_path(incarnation, &first.name).and_then(ObjectId::sequence);
    sequence.map(Some).ok_or_else(|| RemoteError::Damaged("an object in the log is not a record".into()))
}

fn missing_message(id: &ObjectId) -> String {
    format!("{} is missing, and the newest record needs it", describe(id))
}

#[cfg(test)]
thread_local! {
    /// Deterministic mode of tests: requests run one after the other on this thread, and the
    /// function decides the order of each pair that could run concurrently.
    pub(super) static ORDER: std::cell::RefCell<Option<Box<dyn FnMut() -> bool>>> = const { std::cell::RefCell::new(None) };
}

/// Runs `work` on several threads, including the caller's; on fewer if threads cannot be started.
pub(super) fn run_on_threads(name: &str, threads: usize, work: impl Fn() + Sync) {
    #[cfg(test)]
    let threads = ORDER.with_borrow(|order| if order.is_some() { 1 } else { threads });
    thread::scope(|scope| {
        let clock = AttemptClock::current();
        for _ in 1..threads {
            let (clock, work) = (clock.clone(), &work);
            let _ =
                thread::Builder::new().name(name.into()).spawn_scoped(scope, move || AttemptClock::run(clock, work));
        }
        work();
    });
}

/// Runs both concurrently. The second result is None if no thread could be started.
pub(super) fn run_both<A, B: Send>(
    one: impl FnOnce() -> A,
    name: &str,
    other: impl FnOnce() -> B + Send,
) -> (A, Option<B>) {
    #[cfg(test)]
    if let Some(is_first) = ORDER.with_borrow_mut(|order| order.as_mut().map(|order| order())) {
        if is_first {
            let other = other();
            return (one(), Some(other));
        }
        let one = one();
        return (one, Some(other()));
    }
    thread::scope(|scope| {
        let clock = AttemptClock::current();
        let other = move || AttemptClock::run(clock, other);
        let other = thread::Builder::new().name(name.into()).spawn_scoped(scope, other);
        let one = one();
        (one, other.ok().and_then(|other| other.join().ok()))
    })
}

/// Calls `ask` with each number below `count` concurrently and collects the results.
pub(super) fn collect_all<T: Send + Sync>(name: &str, count: usize, ask: impl Fn(usize) -> T + Sync) -> Vec<T> {
    #[cfg(test)]
    let is_last_first = ORDER.with_borrow_mut(|order| order.as_mut().is_some_and(|order| order()));
    #[cfg(not(test))]
    let is_last_first = false;
    let (answers, next): (Vec<OnceLock<T>>, _) = ((0..count).map(|_| OnceLock::new()).collect(), AtomicUsize::new(0));
    run_on_threads(name, count, || {
        while let Some(behind) = count.checked_sub(next.fetch_add(1, Ordering::Relaxed) + 1) {
            let number = if is_last_first { behind } else { count - 1 - behind };
            let _ = answers[number].set(ask(number));
        }
    });
    answers.into_iter().filter_map(OnceLock::into_inner).collect()
}
