//! In-memory cache of 64 KiB slots: LRU eviction, slots in flight, readahead detection, and the
//! measured throughput, which bounds prefetch.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lru::LruCache;
use parking_lot::Mutex;

/// Size of a slot in bytes.
pub(crate) const SLOT: u64 = 64 << 10;
/// Capacity in slots: 48 MiB, twice the readahead maximum.
pub(crate) const CAPACITY: NonZeroUsize = NonZeroUsize::new(768).unwrap();
/// Minimum and maximum readahead window in slots: 24 MiB are in flight on a link of two gigabits
/// with a round trip of a tenth of a second.
const MIN_WINDOW: u64 = 4;
const MAX_WINDOW: u64 = 384;
/// Maximum number of slots that a page of file data spans.
const PAGE_SLOTS: u64 = 4;

/// Slots of one readahead request: 2 MiB, so that its round trip costs little and several requests
/// run concurrently.
pub(crate) const REQUEST_SLOTS: u64 = 32;

/// Returns the slots of one readahead request where `most` may be in flight: small parts of slow
/// links, so that the first of them arrives soon.
pub(crate) fn request_slots(most: u64) -> u64 {
    (most / 2).clamp(1, REQUEST_SLOTS)
}

const MAX_STREAMS: usize = 16;

pub(crate) type CacheSlot = Arc<[u8]>;

/// Slots in memory and in flight, under one lock.
pub(crate) struct SlotCache {
    slots: LruCache<u64, CacheSlot>,
    in_flight: HashSet<u64>,
    streams: Vec<ReadStream>,
}

struct ReadStream {
    /// First slot of the stream, and the slot after the last read.
    began: u64,
    next: u64,
    /// Slot after the last readahead request.
    ahead: u64,
    window: u64,
}

impl SlotCache {
    pub(crate) fn new() -> SlotCache {
        SlotCache { slots: LruCache::new(CAPACITY), in_flight: HashSet::new(), streams: Vec::new() }
    }

    pub(crate) fn retain_copy(&self, keeps: impl Fn(u64) -> bool) -> SlotCache {
        let mut copy = SlotCache::new();
        // Inserting in LRU order preserves the order.
        for (slot, bytes) in self.slots.iter().rev().filter(|(slot, _)| keeps(**slot)) {
            copy.slots.put(*slot, Arc::clone(bytes));
        }
        copy
    }

    pub(crate) fn get(&mut self, slot: u64) -> Option<CacheSlot> {
        self.slots.get(&slot).cloned()
    }

    pub(crate) fn is_in_flight(&self, slot: u64) -> bool {
        self.in_flight.contains(&slot)
    }

    pub(crate) fn has_missing(&self, slots: &Range<u64>) -> bool {
        slots.clone().any(|slot| !self.slots.contains(&slot) && !self.in_flight.contains(&slot))
    }

    /// Marks the first run of missing slots of `wanted` as in flight and returns it.
    pub(crate) fn claim_missing(&mut self, wanted: Range<u64>) -> Range<u64> {
        let is_missing = |slot: &u64| self.has_missing(&(*slot..slot + 1));
        let start = wanted.clone().find(is_missing).unwrap_or(wanted.end);
        let end = (start..wanted.end).find(|slot| !is_missing(slot)).unwrap_or(wanted.end);
        self.in_flight.extend(start..end);
        start..end
    }

    /// Ends a claim: stores its slots, fewer of them after a failure.
    pub(crate) fn complete(&mut self, claimed: Range<u64>, slots: &[CacheSlot]) {
        for (slot, bytes) in claimed.clone().zip(slots) {
            self.slots.put(slot, Arc::clone(bytes));
        }
        self.in_flight.retain(|slot| !claimed.contains(slot));
    }

    pub(crate) fn forget(&mut self, slots: Range<u64>) {
        // An archive can have more slots than memory has.
        let gone: Vec<u64> = self.slots.iter().map(|(slot, _)| *slot).filter(|slot| slots.contains(slot)).collect();
        gone.iter().for_each(|slot| drop(self.slots.pop(slot)));
    }

    /// Returns the ranges to prefetch after a read of these slots, each one request, and at most
    /// `most` slots ahead. `end` is the slot after the last one of the file.
    pub(crate) fn plan_readahead(&mut self, read: Range<u64>, end: u64, most: u64) -> Vec<Range<u64>> {
        let follows = |stream: &ReadStream| (stream.next.saturating_sub(1)..=stream.next + 1).contains(&read.start);
        // Of two streams that met, the one with more readahead continues.
        let following = self.streams.iter().enumerate().filter(|(_, stream)| follows(stream));
        let Some((at, _)) = following.max_by_key(|(_, stream)| stream.ahead) else {
            if self.streams.len() == MAX_STREAMS {
                self.streams.remove(0);
            }
            self.streams.push(ReadStream { began: read.start, next: read.end, ahead: read.end, window: MIN_WINDOW });
            return Vec::new();
        };
        // The list is in the order of use: the first is evicted first.
        let mut stream = self.streams.remove(at);
        let mut parts = Vec::new();
        if read.end > stream.next {
            stream.next = read.end;
            stream.ahead = stream.ahead.max(read.end);
            let most = most.clamp(MIN_WINDOW, MAX_WINDOW);
            stream.window = stream.window.min(most);
            let until = (read.end + stream.window).min(end);
            // Head and chunks of one page are no stream. Not slot by slot: a request costs a round
            // trip.
            let is_due = stream.ahead + stream.window / 2 <= until || (until == end && stream.ahead < end);
            if is_due && stream.next - stream.began > PAGE_SLOTS {
                stream.window = (stream.window * 2).min(most);
                let until = (read.end + stream.window).min(end);
                while stream.ahead < until {
                    let part = stream.ahead..(stream.ahead + request_slots(most)).min(until);
                    stream.ahead = part.end;
                    parts.push(part);
                }
            }
        }
        self.streams.push(stream);
        parts
    }
}

/// Time for which prefetch occupies the link: more than the round trips of any link, less than an
/// idle reader notices.
const HORIZON: Duration = Duration::from_secs(4);
/// Duration of a measurement while requests follow each other.
const INTERVAL: Duration = Duration::from_millis(250);
/// Shortest duration that is measured: the clock of a local server.
const SHORTEST: Duration = Duration::from_millis(1);
/// Slots that any link is given: two requests, so that one is in progress while the other's data
/// is read.
const MIN_SLOTS: u64 = 8;

/// Throughput of all requests of a remote file together; unknown before the first response.
///
/// Prefetch that a fast link needs would occupy a slow one for minutes: reads wait for data that
/// comes before theirs, and a reader that stops has paid for it. So prefetch is bounded by the
/// bytes that the link carries in some seconds.
#[derive(Default)]
pub(crate) struct Throughput(Mutex<Measurement>);

#[derive(Default)]
struct Measurement {
    /// Requests in flight, and the start of the current interval if there are any.
    active: u32,
    since: Option<Instant>,
    arrived: u64,
    /// Bytes a second.
    rate: Option<u64>,
}

impl Throughput {
    pub(crate) fn begin_request(&self, now: Instant) {
        let mut measured = self.0.lock();
        if measured.active == 0 {
            (measured.since, measured.arrived) = (Some(now), 0);
        }
        measured.active += 1;
    }

    /// Records the end of a request with its bytes; None after a failure.
    pub(crate) fn end_request(&self, now: Instant, bytes: Option<u64>) {
        let measured = &mut *self.0.lock();
        measured.active = measured.active.saturating_sub(1);
        let Some(bytes) = bytes else {
            measured.rate = measured.rate.map(|rate| rate / 2);
            return;
        };
        measured.arrived += bytes;
        let elapsed = now.saturating_duration_since(measured.since.unwrap_or(now)).max(SHORTEST);
        if measured.active == 0 || elapsed >= INTERVAL {
            let sample = (measured.arrived as f64 / elapsed.as_secs_f64()) as u64;
            // Requests that end together arrived over a longer time: one sample doubles at most.
            measured.rate = Some(measured.rate.map_or(sample, |rate| match sample > rate {
                true => sample.min(rate.saturating_mul(2)),
                false => rate.midpoint(sample),
            }));
            (measured.since, measured.arrived) = (Some(now), 0);
        }
    }

    pub(crate) fn prefetch_slots(&self, most: u64) -> u64 {
        let rate = self.0.lock().rate;
        rate.map_or(most, |rate| (rate.saturating_mul(HORIZON.as_secs()) / SLOT).max(MIN_SLOTS).min(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl SlotCache {
        pub(crate) fn in_flight_count(&self) -> usize {
            self.in_flight.len()
        }
    }

    #[test]
    fn who_reads_on_is_read_ahead_of_and_who_jumps_is_not() {
        let mut cache = SlotCache::new();
        for slot in [500, 3, 900, 77] {
            assert_eq!(cache.plan_readahead(slot..slot + 1, 1000, u64::MAX), Vec::new());
        }
        // Head and chunks of a page.
        for read in [300..301, 300..302, 302..304] {
            assert_eq!(cache.plan_readahead(read, 1000, u64::MAX), Vec::new());
        }
        let mut requested = HashSet::new();
        for slot in 4..600 {
            for part in cache.plan_readahead(slot..slot + 1, 1000, u64::MAX) {
                assert!(part.end - part.start <= REQUEST_SLOTS && part.end <= 1000);
                part.for_each(|ahead| assert!(requested.insert(ahead), "{ahead} is asked for once"));
            }
            let most = requested.iter().max().copied().unwrap_or_default();
            assert!(most < slot + 1 + MAX_WINDOW + REQUEST_SLOTS);
        }
        assert!((610..780).all(|slot| requested.contains(&slot)));
    }

    #[test]
    fn readahead_on_a_slow_link_stays_within_its_bound() {
        let mut cache = SlotCache::new();
        let mut requested = HashSet::new();
        for slot in 4..600 {
            for part in cache.plan_readahead(slot..slot + 1, 1000, 8) {
                assert!(part.end - part.start <= 4 && part.end <= slot + 1 + 8, "{part:?} at {slot}");
                part.for_each(|ahead| assert!(requested.insert(ahead), "{ahead} is requested once"));
            }
        }
        assert!((20..600).all(|slot| requested.contains(&slot)));
    }

    #[test]
    fn what_is_kept_is_dropped_in_the_order_of_its_use() {
        let mut cache = SlotCache::new();
        let slot: CacheSlot = vec![0; 4].into();
        let all = 0..CAPACITY.get() as u64;
        assert_eq!(cache.claim_missing(all.clone()), all);
        cache.complete(all.clone(), &vec![slot.clone(); CAPACITY.get()]);
        assert!(cache.get(0).is_some());
        let mut copy = cache.retain_copy(|slot| slot != 7);
        assert!(copy.get(7).is_none() && copy.claim_missing(7..8) == (7..8));
        // One takes the place of the one that is not kept, the next one that of the least used.
        copy.complete(7..8, std::slice::from_ref(&slot));
        copy.complete(2000..2001, &[slot]);
        assert!(copy.get(0).is_some() && copy.get(1).is_none() && copy.get(2).is_some());
    }

    #[test]
    fn a_slot_is_fetched_by_one_at_a_time() {
        let mut cache = SlotCache::new();
        assert_eq!(cache.claim_missing(3..8), 3..8);
        assert_eq!(cache.claim_missing(1..6), 1..3);
        assert_eq!(cache.claim_missing(3..8), 8..8);
        let slot: CacheSlot = vec![0; 4].into();
        cache.complete(3..8, &[slot]);
        assert!(cache.get(3).is_some() && !cache.is_in_flight(4));
        assert_eq!(cache.claim_missing(3..8), 4..8);
    }

    #[test]
    fn prefetch_is_bounded_by_some_seconds_of_the_link() {
        let (throughput, mut now) = (Throughput::default(), Instant::now());
        assert_eq!(throughput.prefetch_slots(320), 320, "unknown");
        let mut request = |millis, bytes| {
            throughput.begin_request(now);
            now += Duration::from_millis(millis);
            throughput.end_request(now, bytes);
            throughput.prefetch_slots(320)
        };
        // A megabit a second.
        assert_eq!(request(2000, Some(250_000)), MIN_SLOTS);
        for _ in 0..100 {
            assert_eq!(request(2000, Some(250_000)), MIN_SLOTS);
        }
        // The link becomes a hundred times as fast.
        assert!(request(20, Some(250_000)) <= 2 * MIN_SLOTS);
        let after: Vec<u64> = (0..8).map(|_| request(20, Some(250_000))).collect();
        assert_eq!(after.last(), Some(&320), "{after:?}");
        // It carries nothing any more.
        assert_eq!((0..12).map(|_| request(20_000, None)).last(), Some(MIN_SLOTS));
    }

    #[test]
    fn concurrent_requests_are_measured_together() {
        let (throughput, start) = (Throughput::default(), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        (0..4).for_each(|_| throughput.begin_request(at(0)));
        throughput.end_request(at(100), Some(1 << 20));
        assert_eq!(throughput.prefetch_slots(10_000), 10_000, "no interval has ended");
        throughput.end_request(at(500), Some(1 << 20));
        // Four MiB a second.
        assert_eq!(throughput.prefetch_slots(10_000), 4 * 64);
        throughput.end_request(at(900), Some(1 << 20));
        throughput.end_request(at(1000), Some(1 << 20));
        assert!((4 * 64..=8 * 64).contains(&throughput.prefetch_slots(10_000)));
    }
}
