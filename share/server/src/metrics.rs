//! Counts what the daemon does, and writes it in the text format of Prometheus. No handle, name or address is a label.

use std::fmt::Write;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What a request was for: the whole set of labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum Route {
    /// `/v1/limits`
    Limits,
    /// `/v1/uploads`
    Upload,
    /// `/v1/shares`
    Create,
    /// `/v1/claim`
    Claim,
    /// A ciphertext.
    Download,
    /// The end of a download.
    Complete,
    /// One share's state.
    Info,
    /// The same, later.
    Watch,
    /// A share taken back.
    Revoke,
    /// A share armed again.
    Rearm,
    /// Any of the batches.
    Batch,
    /// The page and what it loads.
    Page,
    /// No path of the daemon.
    Other,
}

impl Route {
    const ALL: [(Route, &'static str); 13] = [
        (Route::Limits, "limits"),
        (Route::Upload, "upload"),
        (Route::Create, "create"),
        (Route::Claim, "claim"),
        (Route::Download, "download"),
        (Route::Complete, "complete"),
        (Route::Info, "info"),
        (Route::Watch, "watch"),
        (Route::Revoke, "revoke"),
        (Route::Rearm, "rearm"),
        (Route::Batch, "batch"),
        (Route::Page, "page"),
        (Route::Other, "other"),
    ];
}

/// Statuses that the daemon answers; the last place counts any other.
const STATUSES: [u16; 24] = [
    200, 201, 204, 206, 304, 400, 401, 403, 404, 405, 408, 409, 410, 413, 415, 416, 422, 429, 431, 500, 501, 503, 507,
    0,
];

/// Upper bounds of the latency histogram in microseconds; an in-memory answer takes tens, a commit hundreds.
const BOUNDS: [u64; 14] =
    [50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 500_000, 2_500_000, 10_000_000];

#[derive(Default)]
struct Histogram {
    counts: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

/// Everything that is counted on the HTTP side. What the store counts is given when the text is written.
#[derive(Default)]
pub struct Metrics {
    requests: [[AtomicU64; STATUSES.len()]; Route::ALL.len()],
    latency: [Histogram; Route::ALL.len()],
    /// Bytes of ciphertext that came in.
    pub received_bytes: AtomicU64,
    /// Bytes of ciphertext that went out.
    pub sent_bytes: AtomicU64,
    /// Connections that are open.
    pub connections: AtomicI64,
    /// Connections that were accepted.
    pub accepted: AtomicU64,
    /// Connections refused because too many were open.
    pub connections_refused: AtomicU64,
    /// Connections ended because the client was too slow.
    pub connections_slow: AtomicU64,
    /// Failed calls of accept(2) for want of descriptors or memory.
    pub accept_failures: AtomicU64,
    /// Shares made.
    pub created: AtomicU64,
    /// Claims that were given.
    pub claimed: AtomicU64,
    /// Claims of which everything went out, each once.
    pub completed: AtomicU64,
    /// Answers with ciphertext that ended early because their lease was over.
    pub stopped: AtomicU64,
    /// Shares taken back.
    pub revoked: AtomicU64,
    /// Shares armed again by their owner.
    pub rearmed: AtomicU64,
    /// Claims with proof that came too late or while another had the lease.
    pub conflicts: AtomicU64,
    /// Claims without proof.
    pub misses: AtomicU64,
    /// Requests refused by the limiter.
    pub limited: AtomicU64,
}

/// What the store and the spool count.
#[derive(Clone, Copy, Debug, Default)]
pub struct StoreFigures {
    /// Shares whose content is kept.
    pub live: u64,
    /// Shares that expired unused.
    pub expired: u64,
    /// Files of the store.
    pub segments: u64,
    /// Bytes of these files.
    pub segment_bytes: u64,
    /// Bytes of the index on disk.
    pub index_bytes: u64,
    /// Bytes of ciphertext.
    pub spool_bytes: u64,
    /// Bytes on disk whose time is over.
    pub expired_bytes_pending: u64,
    /// Calls of fdatasync.
    pub fsyncs: u64,
    /// Microseconds that they took.
    pub fsync_micros: u64,
    /// Bytes of the limiter's table.
    pub limiter_bytes: u64,
    /// Answers with ciphertext that run.
    pub downloads: u64,
    /// Whether the store takes changes.
    pub ready: bool,
}

impl Metrics {
    /// Counts one answered request.
    pub fn answered(&self, route: Route, status: u16, took: Duration) {
        let place = STATUSES.iter().position(|&known| known == status).unwrap_or(STATUSES.len() - 1);
        self.requests[route as usize][place].fetch_add(1, Relaxed);
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        let histogram = &self.latency[route as usize];
        histogram.counts[BOUNDS.partition_point(|&bound| bound < micros)].fetch_add(1, Relaxed);
        histogram.micros.fetch_add(micros, Relaxed);
    }

    /// Everything as Prometheus reads it.
    pub fn text(&self, store: &StoreFigures) -> String {
        let mut out = String::with_capacity(16 * 1024);
        // Writing to a text cannot fail.
        let _ = self.write(&mut out, store);
        out
    }

    fn write(&self, out: &mut String, store: &StoreFigures) -> std::fmt::Result {
        self.write_requests(out)?;
        self.write_latency(out)?;
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let connections = u64::try_from(self.connections.load(Relaxed)).unwrap_or(0);
        let rows: [(&str, &str, &str, u64); 27] = [
            ("received_bytes_total", "counter", "Bytes of ciphertext that came in.", read(&self.received_bytes)),
            ("sent_bytes_total", "counter", "Bytes of ciphertext that went out.", read(&self.sent_bytes)),
            ("connections", "gauge", "Connections that are open.", connections),
            ("connections_accepted_total", "counter", "Connections that were accepted.", read(&self.accepted)),
            ("connections_refused_total", "counter", "Connections over the limit.", read(&self.connections_refused)),
            ("connections_slow_total", "counter", "Connections of too slow clients.", read(&self.connections_slow)),
            ("accept_failures_total", "counter", "Failed calls of accept(2).", read(&self.accept_failures)),
            ("live", "gauge", "Shares whose content is kept.", store.live),
            ("created_total", "counter", "Shares made.", read(&self.created)),
            ("claimed_total", "counter", "Claims that were given.", read(&self.claimed)),
            ("completed_total", "counter", "Claims of which everything went out.", read(&self.completed)),
            ("downloads", "gauge", "Answers with ciphertext that run.", store.downloads),
            ("downloads_stopped_total", "counter", "Answers whose lease ended first.", read(&self.stopped)),
            ("expired_total", "counter", "Shares that expired unused.", store.expired),
            ("revoked_total", "counter", "Shares taken back by their owner.", read(&self.revoked)),
            ("rearmed_total", "counter", "Shares armed again by their owner.", read(&self.rearmed)),
            ("conflicts_total", "counter", "Claims with proof that were too late.", read(&self.conflicts)),
            ("misses_total", "counter", "Claims without proof.", read(&self.misses)),
            ("limited_total", "counter", "Requests refused by the limiter.", read(&self.limited)),
            ("limiter_bytes", "gauge", "Memory of the limiter's table.", store.limiter_bytes),
            ("segments", "gauge", "Segment files of the store.", store.segments),
            ("segment_bytes", "gauge", "Bytes of the segment files.", store.segment_bytes),
            ("index_bytes", "gauge", "Bytes of the index on disk.", store.index_bytes),
            ("spool_bytes", "gauge", "Bytes of ciphertext in the spool.", store.spool_bytes),
            ("expired_bytes_pending", "gauge", "Bytes whose time is over.", store.expired_bytes_pending),
            ("fsyncs_total", "counter", "Calls of fdatasync by the store.", store.fsyncs),
            ("ready", "gauge", "1 when shares can be made.", u64::from(store.ready)),
        ];
        for (name, kind, meaning, value) in rows {
            head(out, name, kind, meaning)?;
            writeln!(out, "lockbox_share_{name} {value}")?;
        }
        head(out, "fsync_seconds_total", "counter", "Seconds in fdatasync.")?;
        writeln!(out, "lockbox_share_fsync_seconds_total {}", seconds(store.fsync_micros))
    }

    fn write_requests(&self, out: &mut String) -> std::fmt::Result {
        head(out, "requests_total", "counter", "Answered requests.")?;
        for (route, label) in Route::ALL {
            for (place, status) in STATUSES.iter().enumerate() {
                let count = self.requests[route as usize][place].load(Relaxed);
                if count > 0 {
                    writeln!(out, "lockbox_share_requests_total{{route=\"{label}\",status=\"{status}\"}} {count}")?;
                }
            }
        }
        Ok(())
    }

    fn write_latency(&self, out: &mut String) -> std::fmt::Result {
        head(out, "request_seconds", "histogram", "From the request's head to the answer's head.")?;
        for (route, label) in Route::ALL {
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

fn head(out: &mut String, name: &str, kind: &str, meaning: &str) -> std::fmt::Result {
    writeln!(out, "# HELP lockbox_share_{name} {meaning}\n# TYPE lockbox_share_{name} {kind}")
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
        let text = metrics.text(&StoreFigures { live: 7, fsync_micros: 1_500_000, ..StoreFigures::default() });
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
        let text = Metrics::default().text(&StoreFigures::default());
        let mut names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(all > 25);
    }
}
