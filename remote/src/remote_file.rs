//! A file of a server as a storage for reading.
//!
//! The start of the file, which names the newest commit, is fetched at the opening and stays in memory (REMOTE-2). All else comes in slots:
//! from memory, from the cache on disk, or by requests for as many neighbours as are wanted. Who reads one slot after the other is
//! read ahead of, by threads of its own, so that a distant server is waited for once and not for each request.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::{Condvar, Mutex};
use sha2::{Digest, Sha256};

use crate::Options;
use crate::address::Address;
use crate::cache::Cache;
use crate::http::Http;
use crate::metrics::{Counted, Counts, Traffic};
use crate::range_source::{Source, Trouble, Version};
use crate::slot_cache::{KEPT, PART, SLOT, Shelf, Slot};

/// Both copies of the header, both rings and the log have 385 blocks (specification, 3.1); to the end of a slot.
pub(crate) const START: u64 = (385u64 * 4096).next_multiple_of(SLOT);
/// Least slots of a request of somebody who waits: a page of file data has 33 blocks and begins anywhere.
const LEAST: u64 = 4;
/// Most slots of one request.
const MOST: u64 = 64;
/// Threads that fetch ahead, each at most [`PART`], and slots that all of them fetch at once: 20 MiB, half as much again as is under way on a link of a gigabit and a tenth of a
/// second. Neighbours are seldom as many as that, so that it takes more threads than full requests would.
const FETCHERS: usize = 64;
const FETCHED_AT_ONCE: u64 = 320;
/// Ranges that wait to be fetched ahead; more are passed over.
const WAITING: usize = 256;
const FIRST_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 100 });
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A file of a server, of the version that was there when it was opened (REMOTE-1).
pub(crate) struct RemoteFile {
    inner: Arc<Inner>,
}

struct Inner {
    source: Box<dyn Source>,
    /// For messages.
    name: String,
    timeout: Option<Duration>,
    version: Version,
    start: Vec<u8>,
    cache: Option<Arc<Cache>>,
    shelf: Mutex<Shelf>,
    arrived: Condvar,
    queue: Mutex<Queue>,
    queued: Condvar,
    counts: Arc<Counts>,
}

#[derive(Default)]
struct Queue {
    ranges: std::collections::VecDeque<Range<u64>>,
    threads: usize,
    idle: usize,
    /// Slots that are being fetched.
    fetched: u64,
    ended: bool,
}

impl Queue {
    /// The next range that is to be fetched now.
    fn next(&mut self) -> Option<Range<u64>> {
        let range = self.ranges.pop_front_if(|range| self.fetched + range.end - range.start <= FETCHED_AT_ONCE)?;
        self.fetched += range.end - range.start;
        Some(range)
    }
}

impl RemoteFile {
    /// # Errors
    /// As [`crate::open`].
    pub(crate) fn open(address: &Address, options: &Options) -> Result<RemoteFile> {
        RemoteFile::counting(Box::new(Http::new(address, options)?), address.to_string(), options)
    }

    /// What `source` has, each call of which is one request.
    pub(crate) fn counting(source: Box<dyn Source>, name: String, options: &Options) -> Result<RemoteFile> {
        let counts = Arc::new(Counts::default());
        let source = Counted { counts: counts.clone(), inner: source };
        RemoteFile::of(Box::new(source), name, options, counts)
    }

    /// What `source` has, which counts its requests.
    pub(crate) fn of(
        source: Box<dyn Source>,
        name: String,
        options: &Options,
        counts: Arc<Counts>,
    ) -> Result<RemoteFile> {
        let first = patiently(&|| options.timeout, &mut || source.first(START));
        let (version, start) = first.map_err(|trouble| told(&name, trouble))?;
        let cache = options.cache_directory.as_deref().filter(|_| {
            // Without a tag nobody knows whether what lies there is of this version.
            options.cache_bytes != Some(0) && version.tag.is_some()
        });
        let key = || key(&name, source.lineage(), &version, &start);
        let cache = cache.and_then(|directory| Cache::open(directory, &name, key(), options.cache_bytes));
        let (cache, timeout) = (cache.map(Arc::new), options.timeout);
        Ok(RemoteFile::with(Inner { cache, ..Inner::new(source, name, timeout, version, start, counts) }))
    }

    fn with(inner: Inner) -> RemoteFile {
        RemoteFile { inner: Arc::new(inner) }
    }

    /// The file in a later version of the same lineage, of which the start is known. What of it has the label that it had is not asked for again. Who reads this
    /// version goes on.
    pub(crate) fn succeeded(&self, source: Box<dyn Source>, version: Version, start: Vec<u8>) -> RemoteFile {
        let old = &*self.inner;
        let source = Box::new(Counted { counts: old.counts.clone(), inner: source });
        let name = old.name.clone();
        let new = Inner::new(source, name, old.timeout, version, start, old.counts.clone());
        let shelf = old.shelf.lock().kept(|slot| {
            let range = new.slot_bytes(&(slot..slot + 1));
            old.slot_bytes(&(slot..slot + 1)) == range && old.source.label(range.clone()) == new.source.label(range)
        });
        RemoteFile::with(Inner { cache: old.cache.clone(), shelf: Mutex::new(shelf), ..new })
    }

    /// What is in memory of the file's start.
    pub(crate) fn start(&self) -> &[u8] {
        &self.inner.start
    }

    #[cfg(test)]
    pub(crate) fn traffic(&self) -> Traffic {
        self.telling()()
    }

    /// Tells what was asked of the server for this file and those that succeed it, and keeps none of them.
    pub(crate) fn telling(&self) -> impl Fn() -> Traffic + use<> {
        let (counts, cache) = (self.inner.counts.clone(), self.inner.cache.clone());
        move || counts.traffic(cache.as_ref().map_or(0, |cache| cache.hits()))
    }

    /// Has slots fetched by the threads for that. A hint: what does not fit is passed over.
    fn expect(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut queue = self.inner.queue.lock();
        for range in ranges {
            if queue.ranges.len() < WAITING && !range.is_empty() {
                queue.ranges.push_back(range);
                // One for each: the others would wake for nothing, many times a read.
                self.inner.queued.notify_one();
                if queue.ranges.len() > queue.idle && queue.threads < FETCHERS {
                    let inner = Arc::downgrade(&self.inner);
                    let started = thread::Builder::new().name("fetch".into()).spawn(move || fetch_ahead(&inner));
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

/// A thread that fetches ahead, until the file is let go.
fn fetch_ahead(inner: &Weak<Inner>) {
    let mut done = 0;
    while let Some(inner) = inner.upgrade() {
        let mut queue = inner.queue.lock();
        queue.fetched -= std::mem::take(&mut done);
        let range = loop {
            if queue.ended {
                return;
            }
            if let Some(range) = queue.next() {
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
            // What is claimed at once is in memory at once.
            let part = left.start..left.end.min(left.start + MOST);
            let claimed = inner.shelf.lock().claim(part.clone());
            left.start = if claimed.is_empty() { part.end } else { claimed.end };
            if claimed.is_empty() {
                continue;
            }
            // Who reads it meets the trouble by itself.
            if inner.bring(claimed, Duration::ZERO.into()).is_err() {
                break;
            }
        }
    }
}

impl Inner {
    /// Without a cache on disk.
    fn new(
        source: Box<dyn Source>,
        name: String,
        timeout: Option<Duration>,
        version: Version,
        start: Vec<u8>,
        counts: Arc<Counts>,
    ) -> Inner {
        Inner {
            source,
            name,
            timeout,
            version,
            start,
            cache: None,
            shelf: Mutex::new(Shelf::new()),
            arrived: Condvar::new(),
            queue: Mutex::default(),
            queued: Condvar::new(),
            counts,
        }
    }

    /// Behind the last slot.
    fn end(&self) -> u64 {
        self.version.length.div_ceil(SLOT)
    }

    fn slot_bytes(&self, slots: &Range<u64>) -> Range<u64> {
        slots.start * SLOT..(slots.end * SLOT).min(self.version.length)
    }

    /// Fetches slots that were claimed, from the disk or the server, and lays them on the shelf. The claim ends, whatever becomes of it.
    fn bring(&self, claimed: Range<u64>, timeout: Option<Duration>) -> Result<Vec<Slot>> {
        let mut slots: Vec<Slot> = Vec::new();
        let mut at = claimed.start;
        let mut outcome = Ok(());
        while at < claimed.end && outcome.is_ok() {
            if let Some(slot) = self.kept(at) {
                slots.push(slot);
                at += 1;
                continue;
            }
            // As far as the disk has none either.
            let end = (at + 1..claimed.end.min(at + MOST)).find(|slot| self.seems_kept(*slot));
            let missing = at..end.unwrap_or(claimed.end.min(at + MOST));
            match self.request(&missing, timeout) {
                Ok(fetched) => {
                    slots.extend(fetched);
                    at = missing.end;
                }
                Err(error) => outcome = Err(error),
            }
        }
        self.shelf.lock().arrived(claimed, &slots);
        self.arrived.notify_all();
        outcome.map(|()| slots)
    }

    fn kept(&self, slot: u64) -> Option<Slot> {
        let cache = self.cache.as_ref()?;
        let place = self.slot_bytes(&(slot..slot + 1));
        // In its place at once.
        let mut bytes: Slot = std::iter::repeat_n(0, (place.end - place.start) as usize).collect();
        let out = Arc::get_mut(&mut bytes)?;
        cache.get(slot, &self.source.label(place), out).then_some(bytes)
    }

    /// Whether the disk seems to have it.
    fn seems_kept(&self, slot: u64) -> bool {
        self.cache.as_ref().is_some_and(|cache| cache.has(slot))
    }

    fn request(&self, slots: &Range<u64>, timeout: Option<Duration>) -> Result<Vec<Slot>> {
        let range = self.slot_bytes(slots);
        let answered = patiently(&|| timeout, &mut || self.source.range(&self.version, range.clone()));
        let bytes = answered.map_err(|trouble| told_later(&self.name, trouble))?;
        debug_assert_eq!(bytes.len() as u64, range.end - range.start);
        let fetched: Vec<Slot> = bytes.chunks(SLOT as usize).map(Slot::from).collect();
        if let Some(cache) = &self.cache {
            for (slot, bytes) in slots.clone().zip(&fetched) {
                cache.put(slot, &self.source.label(self.slot_bytes(&(slot..slot + 1))), bytes);
            }
        }
        Ok(fetched)
    }

    /// Whether what is gone may be something else than what is read: a slot, and more of them what is asked for at once, has pieces of many objects.
    fn may_be_beside(&self, error: &Error) -> bool {
        let is_gone = match error {
            Error::Damaged(_) => true,
            Error::Io { source, .. } => source.kind() == io::ErrorKind::StaleNetworkFileHandle,
            _ => false,
        };
        is_gone && self.source.whole()
    }

    /// These bytes and nothing beside them.
    fn just(&self, range: Range<u64>, out: &mut [u8]) -> Result<()> {
        let answered = patiently(&|| self.timeout, &mut || self.source.range(&self.version, range.clone()));
        out.copy_from_slice(&answered.map_err(|trouble| told_later(&self.name, trouble))?);
        Ok(())
    }

    /// The slot, from wherever it is. `wanted` is what its reader is going to read beside it.
    fn slot(&self, slot: u64, wanted: Range<u64>) -> Result<Slot> {
        let mut shelf = self.shelf.lock();
        loop {
            if let Some(found) = shelf.get(slot) {
                self.counts.hit();
                return Ok(found);
            }
            if shelf.is_coming(slot) {
                self.arrived.wait(&mut shelf);
                continue;
            }
            // From the disk the neighbours come as fast when they are read.
            let least = if self.seems_kept(slot) { slot + 1 } else { (slot + LEAST).min(self.end()) };
            let claimed = shelf.claim(slot..wanted.end.max(least).min(slot + MOST));
            drop(shelf);
            // Here and not from the shelf, which may have dropped it again.
            return self.bring(claimed, self.timeout)?.into_iter().next().ok_or(Error::Stale);
        }
    }
}

impl Storage for RemoteFile {
    fn len(&self) -> Result<u64> {
        Ok(self.inner.version.length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        let inner = &*self.inner;
        let length = inner.version.length;
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= length).ok_or_else(|| {
            Error::damaged(format!(
                "archive is truncated: length={length} needed={}",
                offset.saturating_add(out.len() as u64)
            ))
        })?;
        if end <= inner.start.len() as u64 {
            out.copy_from_slice(&inner.start[offset as usize..end as usize]);
            return Ok(());
        }
        if inner.source.has(offset, out) {
            inner.counts.hit();
            return Ok(());
        }
        let wanted = offset / SLOT..end.div_ceil(SLOT);
        let ahead = inner.shelf.lock().ahead(wanted.clone(), inner.end());
        self.expect(ahead);
        for number in wanted.clone() {
            let place = inner.slot_bytes(&(number..number + 1));
            let part = offset.max(place.start)..end.min(place.end);
            let into = &mut out[(part.start - offset) as usize..(part.end - offset) as usize];
            match inner.slot(number, wanted.clone()) {
                Ok(slot) => {
                    let from = (part.start - place.start) as usize..(part.end - place.start) as usize;
                    into.copy_from_slice(&slot[from]);
                }
                Err(error) if inner.may_be_beside(&error) => inner.just(part, into)?,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn is_far(&self) -> bool {
        true
    }

    fn will_need(&self, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.inner.version.length);
        if end > self.inner.start.len() as u64 && offset < end {
            let first = offset / SLOT;
            // More would not be there any more when it is read. In parts, for several threads.
            let end = end.div_ceil(SLOT).min(first + KEPT.get() as u64);
            let parts = (first..end).step_by(PART as usize).map(|start| start..end.min(start + PART));
            let missing: Vec<Range<u64>> = {
                let shelf = self.inner.shelf.lock();
                parts.filter(|part| shelf.lacks(part)).collect()
            };
            self.expect(missing);
        }
    }

    fn write_at(&self, _offset: u64, _data: &[u8]) -> Result<()> {
        Err(read_only())
    }

    fn allocate(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(read_only())
    }

    fn punch(&self, _offset: u64, _length: u64) -> Result<()> {
        Err(read_only())
    }

    fn set_len(&self, _length: u64) -> Result<()> {
        Err(read_only())
    }

    /// There is nothing that could be lost.
    fn barrier(&self) -> Result<()> {
        Ok(())
    }

    fn ordered(&self) -> bool {
        self.inner.source.whole()
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        let slots = offset / SLOT..offset.saturating_add(length).div_ceil(SLOT);
        self.inner.shelf.lock().forget(slots.clone());
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

pub(crate) fn read_only() -> Error {
    Error::ReadOnly("an archive on a server can only be read".into())
}

/// What a cache is for: the address, and the lineage of versions whose slots have labels. Of a file that has none, its version, and the commits that its start names: the last
/// is for servers whose tags stay the same when a file is changed twice within a second.
fn key(name: &str, lineage: Option<&[u8]>, version: &Version, start: &[u8]) -> crate::cache::Key {
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

/// How long somebody waits for what may pass, from its first failure on: an attempt that takes longer than that by itself, as with a large body on a slow line, is
/// repeated all the same.
struct Patience {
    failed: Option<Instant>,
    pause: Duration,
}

impl Patience {
    fn new() -> Patience {
        Patience { failed: None, pause: FIRST_PAUSE }
    }

    /// The pause after an attempt that failed `now`: they grow, and chance makes them unequal. None when the time is over.
    fn pause(&mut self, now: Instant, timeout: Option<Duration>) -> Option<Duration> {
        let failed = *self.failed.get_or_insert(now);
        let rest = self.pause.mul_f64(0.5 + chance() / 2.0);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        timeout.is_none_or(|timeout| now - failed + rest <= timeout).then_some(rest)
    }
}

/// Tries again what may pass, until the time is over, which may be another one after each attempt.
pub(crate) fn patiently<T>(
    timeout: &dyn Fn() -> Option<Duration>,
    attempt: &mut dyn FnMut() -> std::result::Result<T, Trouble>,
) -> std::result::Result<T, Trouble> {
    let mut patience = Patience::new();
    loop {
        match attempt() {
            Err(trouble @ Trouble::Passing(_)) => match patience.pause(Instant::now(), timeout()) {
                Some(pause) => thread::sleep(pause),
                None => return Err(trouble),
            },
            other => return other,
        }
    }
}

/// From 0 to 1.
fn chance() -> f64 {
    f64::from(getrandom::u32().unwrap_or(u32::MAX / 2)) / f64::from(u32::MAX)
}

/// What the opening says.
pub(crate) fn told(name: &str, trouble: Trouble) -> Error {
    match trouble {
        Trouble::Gone => Error::request(format!("cannot open {name}"), io::ErrorKind::NotFound),
        other => told_later(name, other),
    }
}

pub(crate) fn told_later(name: &str, trouble: Trouble) -> Error {
    // A directory has none.
    let server = if name.starts_with("file:") { name.to_owned() } else { format!("the server of {name}") };
    match trouble {
        Trouble::Passing(why) => Error::request(format!("{server} does not answer: {why}"), io::ErrorKind::TimedOut),
        Trouble::Full(why) => Error::NoSpace(format!("{name}: {why}")),
        Trouble::Refused(why) => {
            Error::request(format!("{server} cannot be asked: {why}"), io::ErrorKind::PermissionDenied)
        }
        Trouble::Unusable(why) => Error::request(format!("{server} cannot be used: {why}"), io::ErrorKind::Unsupported),
        Trouble::Damaged(why) => Error::damaged(format!("{name}: {why}")),
        Trouble::Changed => stale(format!(
            "{name} was changed on its server while it was read; what is there now has to be opened anew"
        )),
        Trouble::Gone => stale(format!("{name} was removed from its server")),
    }
}

fn stale(context: String) -> Error {
    Error::request(context, io::ErrorKind::StaleNetworkFileHandle)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of zeros that tells of each request how many slots it brings and how many are under way.
    struct Watched {
        inner: Arc<std::sync::OnceLock<Weak<Inner>>>,
        told: Mutex<std::sync::mpsc::Sender<(u64, usize)>>,
    }

    impl Source for Watched {
        fn first(&self, count: u64) -> std::result::Result<(Version, Vec<u8>), Trouble> {
            Ok((Version { length: 1 << 40, tag: None, modified: None }, vec![0; count as usize]))
        }

        fn range(&self, _: &Version, range: Range<u64>) -> std::result::Result<Vec<u8>, Trouble> {
            let coming = self.inner.get().and_then(Weak::upgrade).map_or(0, |inner| inner.shelf.lock().coming());
            let _ = self.told.lock().send(((range.end - range.start) / SLOT, coming));
            Ok(vec![0; (range.end - range.start) as usize])
        }
    }

    #[test]
    fn who_needs_everything_is_not_brought_it_at_once() {
        let (told, hears) = std::sync::mpsc::channel();
        let inner = Arc::new(std::sync::OnceLock::new());
        let source = Watched { inner: inner.clone(), told: Mutex::new(told) };
        let options = Options { cache_directory: None, cache_bytes: Some(0), ..Options::default() };
        let file = RemoteFile::counting(Box::new(source), "https://host/a".into(), &options).unwrap();
        inner.set(Arc::downgrade(&file.inner)).unwrap();
        file.will_need(0, u64::MAX);
        let mut brought = 0;
        while brought < KEPT.get() as u64 {
            let (slots, coming) = hears.recv().unwrap();
            brought += slots;
            assert!(coming <= FETCHED_AT_ONCE as usize, "{coming} slots are under way");
        }
        assert_eq!(brought, KEPT.get() as u64);
    }

    #[test]
    fn an_attempt_that_takes_long_is_repeated_all_the_same() {
        let (mut patience, limit) = (Patience::new(), Some(Duration::from_secs(30)));
        let first = Instant::now() + Duration::from_secs(54);
        assert!(patience.pause(first, limit).is_some(), "it had no second chance");
        assert!(patience.pause(first + Duration::from_secs(20), limit).is_some());
        assert_eq!(patience.pause(first + Duration::from_secs(31), limit), None);
        assert_eq!(Patience::new().pause(first, Some(Duration::ZERO)), None, "who has no patience asks once");
        let mut hard = Patience::new();
        for number in 0..100 {
            let pause = hard.pause(first + Duration::from_secs(1000 * number), None);
            assert!(pause.is_some_and(|pause| pause <= LONGEST_PAUSE));
        }
        // Whose time is over meanwhile does not begin again.
        assert_eq!(hard.pause(first + Duration::from_secs(100_000), Some(Duration::ZERO)), None);
    }
}
