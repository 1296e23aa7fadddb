//! Measured throughput of a remote file, which bounds its prefetch.
//!
//! Prefetch that a fast link needs would occupy a slow one for minutes: reads wait for data that
//! comes before theirs, and a reader that stops has paid for it. So prefetch is bounded by the
//! bytes that the link carries in some seconds.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::slot_cache::SLOT;

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

/// Throughput of all requests together; unknown before the first response.
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

    /// Returns the slots that prefetch may occupy, at most `most`.
    pub(crate) fn prefetch_slots(&self, most: u64) -> u64 {
        let rate = self.0.lock().rate;
        rate.map_or(most, |rate| (rate.saturating_mul(HORIZON.as_secs()) / SLOT).max(MIN_SLOTS).min(most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
