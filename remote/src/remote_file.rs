//! Remote file as a read-only storage.
//!
//! The start of the file, which names the newest commit, is fetched at open and stays in memory
//! (REMOTE-2). All other bytes are read in slots: from memory, from the disk cache, or by requests
//! that span adjacent slots. Sequential reads are prefetched by background threads, so that the
//! latency of a distant server is paid once and not for each request.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use crate::RemoteOptions;
use crate::address::Address;
use crate::cache::DiskCache;
use crate::http::HttpSource;
use crate::range_source::{FileVersion, Metered, RangeSource, RemoteResult, RequestMetrics, RequestStats, copy_shared};
use crate::retry::{HostClock, with_retry, with_retry_on};
use crate::slot_cache::{CAPACITY, CacheSlot, SLOT, SlotCache, Throughput, request_slots};
use crate::transport::{self, AttemptClock, LastProgress};

/// Both copies of the header, both rings and the log have 385 blocks (specification, 3.1); rounded
/// up to a slot.
pub(crate) const START_BYTES: u64 = (385u64 * 4096).next_multiple_of(SLOT);
/// Minimum slots of a demand request: a page of file data has 33 blocks and begins anywhere.
const MIN_SLOTS: u64 = 4;
/// Maximum slots of one request.
const MAX_SLOTS: u64 = 64;
/// Prefetch threads, each with at most [`request_slots`], and slots that all of them fetch
/// concurrently: 20 MiB, 1.5 times the bandwidth-delay product of a gigabit link with a tenth of a
/// second. Adjacent runs are usually shorter than a full request, so more threads are needed than
/// full requests would take.
const MAX_THREADS: usize = 64;
const MAX_PREFETCH_SLOTS: u64 = 320;
/// Maximum queued prefetch ranges; more are dropped.
const MAX_QUEUED: usize = 256;

/// Remote file at the version found when it was opened (REMOTE-1).
pub(crate) struct RemoteFile {
    inner: Arc<Inner>,
}

struct Inner {
    source: Arc<dyn RangeSource>,
    /// For messages.
    name: String,
    timeout: Option<Duration>,
    version: FileVersion,
    start: Vec<u8>,
    cache: Option<Arc<DiskCache>>,
    slots: Mutex<SlotCache>,
    arrived: Condvar,
    progress: LastProgress,
    /// Shared by all versions of the file.
    throughput: Arc<Throughput>,
    queue: Mutex<PrefetchQueue>,
    queued: Condvar,
    metrics: Arc<RequestMetrics>,
}

#[derive(Default)]
struct PrefetchQueue {
    ranges: std::collections::VecDeque<Range<u64>>,
    threads: usize,
    idle: usize,
    /// Slots being fetched.
    in_flight: u64,
    ended: bool,
}

impl PrefetchQueue {
    /// Returns the next range to fetch, while at most `most` slots are in flight or one range is.
    fn next(&mut self, most: u64) -> Option<Range<u64>> {
        let range = self
            .ranges
            .pop_front_if(|range| self.in_flight == 0 || self.in_flight + range.end - range.start <= most)?;
        self.in_flight += range.end - range.start;
        Some(range)
    }
}

impl RemoteFile {
    pub(crate) fn open(address: &Address, options: &RemoteOptions) -> Result<RemoteFile> {
        RemoteFile::open_metered(Arc::new(HttpSource::new(address, options)?), address.to_string(), options)
    }

    /// Opens `source` and counts each of its calls as one request.
    pub(crate) fn open_metered(
        source: Arc<dyn RangeSource>,
        name: String,
        options: &RemoteOptions,
    ) -> Result<RemoteFile> {
        let metrics = Arc::new(RequestMetrics::default());
        let source = Metered { metrics: metrics.clone(), inner: source };
        RemoteFile::open_source(Arc::new(source), name, options, metrics)
    }

    /// Opens `source`, which counts its own requests.
    pub(crate) fn open_source(
        source: Arc<dyn RangeSource>,
        name: String,
        options: &RemoteOptions,
        metrics: Arc<RequestMetrics>,
    ) -> Result<RemoteFile> {
        let (throughput, before) = (Arc::new(Throughput::default()), metrics.stats(0).bytes);
        let first = with_retry(&|| options.timeout, &mut || {
            throughput.begin_request(Instant::now());
            let answer = source.read_start(START_BYTES);
            // Without the bytes that were in memory.
            let bytes = Some(metrics.stats(0).bytes - before).filter(|bytes| answer.is_ok() && *bytes > 0);
            throughput.end_request(Instant::now(), bytes);
            answer
        });
        let (version, start) = first.map_err(|error| error.into_error(&name))?;
        let cache = options.cache_directory.as_deref().filter(|_| {
            // Without a tag, cached bytes cannot be matched to this version.
            options.cache_bytes != Some(0) && version.tag.is_some()
        });
        let identity = || cache_identity(&name, source.cache_scope(), &version, &start);
        let cache = cache.and_then(|directory| DiskCache::open(directory, &name, identity(), options.cache_bytes));
        let (cache, timeout) = (cache.map(Arc::new), options.timeout);
        let inner = Inner { cache, throughput, ..Inner::new(source, name, timeout, version, start, metrics) };
        Ok(RemoteFile { inner: Arc::new(inner) })
    }

    /// Returns the file at a later version with a known start. `source` counts its own requests, as
    /// the one of `self` does. Slots with an unchanged cache key are not fetched again. Readers of
    /// the old version are not affected.
    pub(crate) fn with_version(
        &self,
        source: Arc<dyn RangeSource>,
        version: FileVersion,
        start: Vec<u8>,
    ) -> RemoteFile {
        let old = &*self.inner;
        let name = old.name.clone();
        let new = Inner::new(source, name, old.timeout, version, start, old.metrics.clone());
        let slots = old.slots.lock().retain_copy(|slot| {
            let range = new.slot_bytes(&(slot..slot + 1));
            old.slot_bytes(&(slot..slot + 1)) == range
                && old.source.cache_key(range.clone()) == new.source.cache_key(range)
        });
        let (cache, throughput) = (old.cache.clone(), old.throughput.clone());
        RemoteFile { inner: Arc::new(Inner { cache, throughput, slots: Mutex::new(slots), ..new }) }
    }

    pub(crate) fn start(&self) -> &[u8] {
        &self.inner.start
    }

    /// Returns a function that reads the statistics of this file and its later versions, without
    /// keeping them open.
    pub(crate) fn stats_fn(&self) -> impl Fn() -> RequestStats + use<> {
        let (metrics, cache) = (self.inner.metrics.clone(), self.inner.cache.clone());
        move || metrics.stats(cache.as_ref().map_or(0, |cache| cache.hits()))
    }

    /// Queues slots for the prefetch threads. A hint: excess ranges are dropped.
    fn queue_prefetch(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let most = self.inner.prefetch_slots();
        let mut queue = self.inner.queue.lock();
        let mut waiting = queue.in_flight + queue.ranges.iter().map(|range| range.end - range.start).sum::<u64>();
        for range in ranges {
            // On a slow link a queue would delay the requests of readers for minutes.
            let has_room = most == MAX_PREFETCH_SLOTS || waiting + range.end - range.start <= most;
            if queue.ranges.len() < MAX_QUEUED && !range.is_empty() && has_room {
                waiting += range.end - range.start;
                queue.ranges.push_back(range);
                // One for each: the others would wake for nothing, many times a read.
                self.inner.queued.notify_one();
                if queue.ranges.len() > queue.idle && queue.threads < MAX_THREADS {
                    let inner = Arc::downgrade(&self.inner);
                    let started = thread::Builder::new().name("fetch".into()).spawn(move || run_prefetch(&inner));
                    queue.threads += usize::from(started.is_ok());
                }
            }
        }
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        self.inner.queue.lock().ended = true;
        self.inner.queued.notify_all();
    }
}

/// Runs a prefetch thread until the file is dropped.
fn run_prefetch(inner: &Weak<Inner>) {
    let mut done = 0;
    while let Some(inner) = inner.upgrade() {
        let mut queue = inner.queue.lock();
        queue.in_flight -= std::mem::take(&mut done);
        let range = loop {
            if queue.ended {
                return;
            }
            if let Some(range) = queue.next(inner.prefetch_slots()) {
                // There may be room for more.
                inner.queued.notify_one();
                break range;
            }
            queue.idle += 1;
            inner.queued.wait(&mut queue);
            queue.idle -= 1;
        };
        drop(queue);
        done = range.end - range.start;
        let mut left = range;
        while !left.is_empty() {
            // A claim is held in memory as a whole.
            let part = left.start..left.end.min(left.start + MAX_SLOTS);
            let claimed = inner.slots.lock().claim_missing(part.clone());
            left.start = if claimed.is_empty() { part.end } else { claimed.end };
            // The reader of the slot gets the error of its own request.
            if !claimed.is_empty() && inner.fetch_claimed(claimed, None).is_err() {
                break;
            }
        }
    }
}

impl Inner {
    /// Creates the state without a disk cache.
    fn new(
        source: Arc<dyn RangeSource>,
        name: String,
        timeout: Option<Duration>,
        version: FileVersion,
        start: Vec<u8>,
        metrics: Arc<RequestMetrics>,
    ) -> Inner {
        Inner {
            source,
            name,
            timeout,
            version,
            start,
            cache: None,
            slots: Mutex::new(SlotCache::new()),
            arrived: Condvar::new(),
            progress: LastProgress::default(),
            throughput: Arc::default(),
            queue: Mutex::default(),
            queued: Condvar::new(),
            metrics,
        }
    }

    /// Returns the slots that all prefetch may occupy, queued or in flight.
    fn prefetch_slots(&self) -> u64 {
        self.throughput.prefetch_slots(MAX_PREFETCH_SLOTS)
    }

    fn read_range(&self, range: Range<u64>) -> RemoteResult<Vec<u8>> {
        self.throughput.begin_request(Instant::now());
        let answer = self.source.read_range(&self.version, range);
        self.throughput.end_request(Instant::now(), answer.as_ref().ok().map(|bytes| bytes.len() as u64));
        answer
    }

    fn end(&self) -> u64 {
        self.version.length.div_ceil(SLOT)
    }

    fn slot_bytes(&self, slots: &Range<u64>) -> Range<u64> {
        slots.start * SLOT..(slots.end * SLOT).min(self.version.length)
    }

    /// Fetches claimed slots from the disk or the server and stores them in the slot cache. Ends
    /// the claim in every case. `waiting_since` is the time since which a reader waits for them; a
    /// prefetch is tried once.
    fn fetch_claimed(&self, claimed: Range<u64>, waiting_since: Option<Instant>) -> Result<Vec<CacheSlot>> {
        let mut slots: Vec<CacheSlot> = Vec::new();
        let mut at = claimed.start;
        let mut outcome = Ok(());
        while at < claimed.end && outcome.is_ok() {
            if let Some(slot) = self.read_disk_cache(at) {
                slots.push(slot);
                at += 1;
                continue;
            }
            // Up to the next slot that the disk has.
            let end = (at + 1..claimed.end.min(at + MAX_SLOTS)).find(|slot| self.may_be_on_disk(*slot));
            let missing = at..end.unwrap_or(claimed.end.min(at + MAX_SLOTS));
            let since = waiting_since.map(|since| self.progress.silent_since(since));
            match self.fetch_slots(&missing, since) {
                Ok(fetched) => {
                    slots.extend(fetched);
                    at = missing.end;
                }
                Err(error) => outcome = Err(error),
            }
        }
        self.slots.lock().complete(claimed, &slots);
        self.arrived.notify_all();
        outcome.map(|()| slots)
    }

    fn read_disk_cache(&self, slot: u64) -> Option<CacheSlot> {
        let cache = self.cache.as_ref()?;
        let place = self.slot_bytes(&(slot..slot + 1));
        // In its place at once.
        let mut bytes: CacheSlot = std::iter::repeat_n(0, (place.end - place.start) as usize).collect();
        let out = Arc::get_mut(&mut bytes)?;
        cache.get(slot, &self.source.cache_key(place), out).then_some(bytes)
    }

    fn may_be_on_disk(&self, slot: u64) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.may_contain(slot))
    }

    fn fetch_slots(&self, slots: &Range<u64>, waiting_since: Option<Instant>) -> Result<Vec<CacheSlot>> {
        let range = self.slot_bytes(slots);
        let mut read = || self.read_range(range.clone());
        let answered = match waiting_since {
            Some(since) => with_retry_on(Some(since), &HostClock::default(), &|| self.timeout, &mut read),
            None => {
                let clock = AttemptClock::new(transport::deadline(Instant::now(), self.timeout));
                let answered = AttemptClock::run(Some(clock.clone()), read);
                self.progress.note(clock.silent_since());
                answered
            }
        };
        let bytes = answered.map_err(|error| error.into_deferred_error(&self.name))?;
        self.progress.note(Instant::now());
        let wanted = range.end - range.start;
        if bytes.len() as u64 != wanted {
            return Err(Error::damaged(format!("{}: {} bytes in place of {wanted}", self.name, bytes.len())));
        }
        let fetched: Vec<CacheSlot> = bytes.chunks(SLOT as usize).map(CacheSlot::from).collect();
        if let Some(cache) = &self.cache {
            for (slot, bytes) in slots.clone().zip(&fetched) {
                cache.put(slot, &self.source.cache_key(self.slot_bytes(&(slot..slot + 1))), bytes);
            }
        }
        Ok(fetched)
    }

    /// Returns whether the failed object may lie outside of the requested range: a slot, and a
    /// request of several slots, span many objects.
    fn may_be_outside_range(&self, error: &Error) -> bool {
        let is_gone = match error {
            Error::Damaged(_) => true,
            Error::Io { source, .. } => source.kind() == io::ErrorKind::StaleNetworkFileHandle,
            _ => false,
        };
        is_gone && self.source.is_atomic()
    }

    fn read_exactly(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let answered = with_retry(&|| self.timeout, &mut || self.read_range(range.clone()));
        out.copy_from_slice(&answered.map_err(|error| error.into_deferred_error(&self.name))?);
        Ok(())
    }

    /// Returns a slot from any source. `wanted` is the range that its reader needs.
    fn read_slot(&self, slot: u64, wanted: Range<u64>) -> Result<CacheSlot> {
        let mut slots = self.slots.lock();
        let began = Instant::now();
        loop {
            if let Some(found) = slots.get(slot) {
                self.metrics.count_hit();
                return Ok(found);
            }
            if slots.is_in_flight(slot) {
                self.arrived.wait(&mut slots);
                continue;
            }
            // From the disk the neighbours come as fast when they are read.
            let least = if self.may_be_on_disk(slot) { slot + 1 } else { (slot + MIN_SLOTS).min(self.end()) };
            let claimed = slots.claim_missing(slot..wanted.end.max(least).min(slot + MAX_SLOTS));
            drop(slots);
            // Returned directly: the slot cache may have evicted it already.
            return self.fetch_claimed(claimed, Some(began))?.into_iter().next().ok_or(Error::Stale);
        }
    }
}

/// Returns the end of a read of `out` from an archive of this length.
pub(crate) fn read_end(offset: u64, out: &[u8], length: u64) -> Result<u64> {
    let needed = offset.saturating_add(out.len() as u64);
    if needed > length {
        return Err(Error::damaged(format!("archive is truncated: length={length} needed={needed}")));
    }
    Ok(needed)
}

impl Storage for RemoteFile {
    fn len(&self) -> Result<u64> {
        Ok(self.inner.version.length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let inner = &*self.inner;
        let end = read_end(offset, out, inner.version.length)?;
        if end <= inner.start.len() as u64 {
            out.copy_from_slice(&inner.start[offset as usize..end as usize]);
            return Ok(());
        }
        if inner.source.read_cached(offset, out) {
            inner.metrics.count_hit();
            return Ok(());
        }
        let wanted = offset / SLOT..end.div_ceil(SLOT);
        let ahead = inner.slots.lock().plan_readahead(wanted.clone(), inner.end(), inner.prefetch_slots());
        self.queue_prefetch(ahead);
        for number in wanted.clone() {
            let place = inner.slot_bytes(&(number..number + 1));
            let part = offset.max(place.start)..end.min(place.end);
            let into = &mut out[(part.start - offset) as usize..(part.end - offset) as usize];
            match inner.read_slot(number, wanted.clone()) {
                Ok(slot) => copy_shared(&slot, place.start, into, part.start),
                Err(error) if inner.may_be_outside_range(&error) => inner.read_exactly(part, into)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn is_remote(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.inner.version.length);
        if end > self.inner.start.len() as u64 && offset < end {
            let first = offset / SLOT;
            // More would not be there any more when it is read. In parts, for several threads.
            let end = end.div_ceil(SLOT).min(first + CAPACITY.get() as u64);
            let count = request_slots(self.inner.prefetch_slots());
            let parts = (first..end).step_by(count as usize).map(|start| start..end.min(start + count));
            let missing: Vec<Range<u64>> = {
                let slots = self.inner.slots.lock();
                parts.filter(|part| slots.has_missing(part)).collect()
            };
            self.queue_prefetch(missing);
        }
    }

    /// Does nothing: the storage is read-only.
    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn has_atomic_barrier(&self) -> bool {
        self.inner.source.is_atomic()
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        let slots = offset / SLOT..offset.saturating_add(length).div_ceil(SLOT);
        self.inner.slots.lock().forget(slots.clone());
        self.inner.cache.iter().for_each(|cache| cache.forget(&slots));
        Ok(())
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        let length = self.inner.version.length;
        Ok((offset < length).then_some(offset..length))
    }

    fn read_only(&self) -> bool {
        true
    }
}

/// Computes the identity of a disk cache: the address and the cache scope. For a file without a
/// scope, its version and the commits named by its start: some servers keep the tag if a file
/// changes twice within a second.
fn cache_identity(
    name: &str,
    lineage: Option<&[u8]>,
    version: &FileVersion,
    start: &[u8],
) -> crate::cache::CacheIdentity {
    let mut hash = Sha256::new();
    let mut part = |part: &[u8]| {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    };
    part(name.as_bytes());
    if let Some(lineage) = lineage {
        part(b"lineage");
        part(lineage);
    } else {
        part(version.tag.as_deref().unwrap_or_default().as_bytes());
        part(start);
        part(&version.length.to_le_bytes());
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl RemoteFile {
        pub(crate) fn has_disk_cache(&self) -> bool {
            self.inner.cache.is_some()
        }

        pub(crate) fn stats(&self) -> RequestStats {
            self.stats_fn()()
        }
    }

    /// A file of zeros that tells of each request how many slots it brings and how many are under
    /// way.
    struct ProbeSource {
        inner: Arc<std::sync::OnceLock<Weak<Inner>>>,
        sender: Mutex<std::sync::mpsc::Sender<(u64, usize)>>,
    }

    impl RangeSource for ProbeSource {
        fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
            Ok((FileVersion { length: 1 << 40, tag: None, modified: None }, vec![0; count as usize]))
        }

        fn read_range(&self, _: &FileVersion, range: Range<u64>) -> RemoteResult<Vec<u8>> {
            let coming =
                self.inner.get().and_then(Weak::upgrade).map_or(0, |inner| inner.slots.lock().in_flight_count());
            let _ = self.sender.lock().send(((range.end - range.start) / SLOT, coming));
            Ok(vec![0; (range.end - range.start) as usize])
        }
    }

    #[test]
    fn who_needs_everything_is_not_brought_it_at_once() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let inner = Arc::new(std::sync::OnceLock::new());
        let source = ProbeSource { inner: inner.clone(), sender: Mutex::new(sender) };
        let options = RemoteOptions { cache_directory: None, cache_bytes: Some(0), ..RemoteOptions::default() };
        let file = RemoteFile::open_metered(Arc::new(source), "https://host/a".into(), &options).unwrap();
        inner.set(Arc::downgrade(&file.inner)).unwrap();
        file.will_need(0, u64::MAX);
        let mut brought = 0;
        while brought < CAPACITY.get() as u64 {
            let (slots, coming) = receiver.recv().unwrap();
            brought += slots;
            assert!(coming <= MAX_PREFETCH_SLOTS as usize, "{coming} slots are under way");
        }
        assert_eq!(brought, CAPACITY.get() as u64);
    }

    #[test]
    fn a_slow_link_is_not_occupied_by_prefetch_for_long() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let inner = Arc::new(std::sync::OnceLock::new());
        let source = ProbeSource { inner: inner.clone(), sender: Mutex::new(sender) };
        let options = RemoteOptions { cache_directory: None, cache_bytes: Some(0), ..RemoteOptions::default() };
        let file = RemoteFile::open_metered(Arc::new(source), "https://host/a".into(), &options).unwrap();
        inner.set(Arc::downgrade(&file.inner)).unwrap();
        let mut now = Instant::now();
        for _ in 0..40 {
            // A megabit a second.
            file.inner.throughput.begin_request(now);
            now += Duration::from_secs(2);
            file.inner.throughput.end_request(now, Some(250_000));
        }
        let bound = file.inner.prefetch_slots();
        file.will_need(64 * SLOT, 24 << 20);
        let mut brought = 0;
        while brought < bound {
            brought += receiver.recv().unwrap().0;
        }
        assert_eq!(brought, bound);
        assert!(file.inner.queue.lock().ranges.is_empty(), "more is queued");
    }
}
