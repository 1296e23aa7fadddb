//! Counters of the daemon, in the text format of Prometheus. No handle, name or address is a label.

use std::fmt::{self, Display, Write};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::store::StoreStats;

macro_rules! routes {
    ($($route:ident $label:literal,)*) => {
        /// Route label of a request. `Other` is not a path of the daemon.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(usize)]
        pub enum Route {
            $($route,)*
        }

        impl Route {
            const ALL: &[(Route, &str)] = &[$((Route::$route, $label),)*];
        }
    };
}

routes! {
    Limits "limits",
    Upload "upload",
    Create "create",
    Look "look",
    Claim "claim",
    Download "download",
    Complete "complete",
    Info "info",
    Watch "watch",
    Revoke "revoke",
    Rearm "rearm",
    Batch "batch",
    Page "page",
    Other "other",
}

/// Statuses that the daemon answers; the last place counts any other.
const STATUSES: [u16; 24] = [
    200, 201, 204, 206, 304, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 416, 422, 429, 431, 500, 501, 503, 507,
    0,
];

/// Upper bounds of latencies in microseconds; an in-memory answer takes tens, a commit hundreds.
const BOUNDS: [u64; 14] =
    [50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 2_500_000, 10_000_000];

#[derive(Default)]
struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

/// Counters with the names and the explanations that Prometheus reads.
macro_rules! counters {
    ($($field:ident $name:literal $meaning:literal,)*) => {
        /// Counters of the HTTP side. The store's counters are passed when the text is written.
        #[derive(Default)]
        pub struct Metrics {
            requests: [[AtomicU64; STATUSES.len()]; Route::ALL.len()],
            latency: [Histogram; Route::ALL.len()],
            pub connections: AtomicI64,
            $(#[doc = $meaning] pub $field: AtomicU64,)*
        }

        impl Metrics {
            fn write_counters(&self, out: &mut String) -> fmt::Result {
                $(write_row(out, $name, "counter", $meaning, self.$field.load(Relaxed))?;)*
                Ok(())
            }
        }
    };
}

counters! {
    received_bytes "received_bytes_total" "Bytes of ciphertext received.",
    sent_bytes "sent_bytes_total" "Bytes of ciphertext sent.",
    accepted "connections_accepted_total" "Connections that were accepted.",
    connections_refused "connections_refused_total" "Connections over the limit.",
    connections_slow "connections_slow_total" "Connections of too slow clients.",
    accept_failures "accept_failures_total" "Failed calls of accept(2).",
    created "created_total" "Shares made.",
    claimed "claimed_total" "Claims granted.",
    completed "completed_total" "Claims sent completely.",
    stopped "downloads_stopped_total" "Answers stopped because their lease ended.",
    revoked "revoked_total" "Shares taken back by their owner.",
    rearmed "rearmed_total" "Shares armed again by their owner.",
    conflicts "conflicts_total" "Claims with proof that were too late.",
    misses "misses_total" "Claims without proof.",
    limited "limited_total" "Requests refused by the limiter.",
}

/// Values counted outside of [`Metrics`], at the time of the text.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauges {
    pub store: StoreStats,
    pub limiter_bytes: u64,
    pub downloads: u64,
    pub ready: bool,
}

impl Metrics {
    pub fn answered(&self, route: Route, status: u16, took: Duration) {
        let place = STATUSES.iter().position(|&known| known == status).unwrap_or(STATUSES.len() - 1);
        self.requests[route as usize][place].fetch_add(1, Relaxed);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let histogram = &self.latency[route as usize];
        histogram.counts[BOUNDS.partition_point(|&bound| bound < micros)].fetch_add(1, Relaxed);
        histogram.micros.fetch_add(micros, Relaxed);
    }

    /// Returns the text that Prometheus reads.
    pub fn text(&self, gauges: &Gauges) -> String {
        let mut out = String::with_capacity(16 * 1024);
        // Writing to a text cannot fail.
        let _ = self.write(&mut out, gauges);
        out
    }

    fn write(&self, out: &mut String, gauges: &Gauges) -> fmt::Result {
        self.write_requests(out)?;
        self.write_latency(out)?;
        self.write_counters(out)?;
        let Gauges { store, limiter_bytes, downloads, ready } = *gauges;
        let connections = u64::try_from(self.connections.load(Relaxed)).unwrap_or(0);
        let pending = store.expired_bytes_pending;
        for (name, kind, meaning, value) in [
            ("connections", "gauge", "Connections that are open.", connections),
            ("live", "gauge", "Shares with stored content.", store.live),
            ("downloads", "gauge", "Answers with ciphertext that run.", downloads),
            ("expired_total", "counter", "Shares that expired unused.", store.expired),
            ("limiter_bytes", "gauge", "Memory of the limiter's table.", limiter_bytes),
            ("segments", "gauge", "Segment files of the store.", store.segment_files),
            ("segment_bytes", "gauge", "Bytes of the segment files.", store.segment_bytes),
            ("index_bytes", "gauge", "Bytes of the index on disk.", store.index_bytes),
            ("spool_bytes", "gauge", "Bytes of ciphertext in the spool.", store.spool_bytes),
            ("expired_bytes_pending", "gauge", "Bytes of expired shares, not removed yet.", pending),
            ("fsyncs_total", "counter", "Calls of fdatasync by the store.", store.barriers),
            ("ready", "gauge", "1 when shares can be made.", u64::from(ready)),
        ] {
            write_row(out, name, kind, meaning, value)?;
        }
        write_row(out, "fsync_seconds_total", "counter", "Seconds in fdatasync.", seconds(store.barrier_micros))
    }

    fn write_requests(&self, out: &mut String) -> fmt::Result {
        head(out, "requests_total", "counter", "Answered requests.")?;
        for &(route, label) in Route::ALL {
            for (place, status) in STATUSES.iter().enumerate() {
                let count = self.requests[route as usize][place].load(Relaxed);
                if count > 0 {
                    writeln!(out, "lockbox_share_requests_total{{route=\"{label}\",status=\"{status}\"}} {count}")?;
                }
            }
        }
        Ok(())
    }

    fn write_latency(&self, out: &mut String) -> fmt::Result {
        head(out, "request_seconds", "histogram", "From the request's head to the answer's head.")?;
        for &(route, label) in Route::ALL {
            let histogram = &self.latency[route as usize];
            let mut sum = 0;
            for (count, bound) in histogram.counts.iter().zip(BOUNDS) {
                sum += count.load(Relaxed);
                let bound = seconds(bound);
                writeln!(out, "lockbox_share_request_seconds_bucket{{route=\"{label}\",le=\"{bound}\"}} {sum}")?;
            }
            sum += histogram.counts[BOUNDS.len()].load(Relaxed);
            writeln!(out, "lockbox_share_request_seconds_bucket{{route=\"{label}\",le=\"+Inf\"}} {sum}")?;
            let total = seconds(histogram.micros.load(Relaxed));
            writeln!(out, "lockbox_share_request_seconds_sum{{route=\"{label}\"}} {total}")?;
            writeln!(out, "lockbox_share_request_seconds_count{{route=\"{label}\"}} {sum}")?;
        }
        Ok(())
    }
}

fn head(out: &mut String, name: &str, kind: &str, meaning: &str) -> fmt::Result {
    writeln!(out, "# HELP lockbox_share_{name} {meaning}\n# TYPE lockbox_share_{name} {kind}")
}

fn write_row(out: &mut String, name: &str, kind: &str, meaning: &str, value: impl Display) -> fmt::Result {
    head(out, name, kind, meaning)?;
    writeln!(out, "lockbox_share_{name} {value}")
}

fn seconds(micros: u64) -> f64 {
    micros as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_listed_in_their_order() {
        for (place, (route, _)) in Route::ALL.iter().enumerate() {
            assert_eq!(*route as usize, place);
        }
    }

    #[test]
    fn requests_are_counted_by_route_and_status() {
        let metrics = Metrics::default();
        metrics.answered(Route::Claim, 200, Duration::from_micros(60));
        metrics.answered(Route::Claim, 404, Duration::from_micros(2_000));
        metrics.answered(Route::Claim, 599, Duration::from_secs(100));
        let store = StoreStats { live: 7, barrier_micros: 1_500_000, ..StoreStats::default() };
        let text = metrics.text(&Gauges { store, ..Gauges::default() });
        for line in [
            "lockbox_share_requests_total{route=\"claim\",status=\"200\"} 1",
            "lockbox_share_requests_total{route=\"claim\",status=\"0\"} 1",
            "lockbox_share_request_seconds_bucket{route=\"claim\",le=\"0.00005\"} 0",
            "lockbox_share_request_seconds_bucket{route=\"claim\",le=\"0.0001\"} 1",
            "lockbox_share_request_seconds_bucket{route=\"claim\",le=\"0.0025\"} 2",
            "lockbox_share_request_seconds_bucket{route=\"claim\",le=\"+Inf\"} 3",
            "lockbox_share_request_seconds_count{route=\"claim\"} 3",
            "lockbox_share_live 7",
            "lockbox_share_fsync_seconds_total 1.5",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn every_series_has_its_type_once() {
        let text = Metrics::default().text(&Gauges::default());
        let mut names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(all > 25);
    }
}
