//! Transfers per lease: number of running responses, and byte ranges sent so far.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use lockbox_share_protocol::token::LeaseToken;
use parking_lot::Mutex;

/// Maximum concurrent ciphertext responses. Each holds a descriptor and at most two parts of 128
/// KiB, so all of them hold 256 MiB: a quarter of the limit in the service's unit.
pub(super) const MAX_BODIES: usize = 1024;
/// Maximum concurrent responses per lease (browser connections plus parallel ranges). Filling all
/// places takes over a hundred claims with proof.
pub(super) const MAX_BODIES_OF_LEASE: usize = 8;
/// Maximum leases with remembered byte ranges; 100 bytes each.
const MAX_REMEMBERED: usize = 16 * 1024;
/// No lease lasts longer.
const LONGEST: Duration = Duration::from_secs(24 * 3600);
/// Maximum disjoint byte ranges per lease. Beyond that a download does not count as complete until
/// its claimant reports it.
const MAX_RUNS: usize = 64;

/// The table of running and remembered downloads.
#[derive(Default)]
pub(super) struct LeaseTransfers(Mutex<Table>);

#[derive(Default)]
struct Table {
    bodies: usize,
    entries: HashMap<[u8; LeaseToken::LENGTH], LeaseEntry>,
}

struct LeaseEntry {
    bodies: usize,
    /// Bytes that were handed to a connection, sorted and apart.
    runs: Vec<Range<u64>>,
    /// The last byte went out in one of the answers that run or ran together.
    reached_end: bool,
    /// Everything went out, which was counted.
    whole: bool,
    touched: Instant,
}

/// Limit that prevents a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferLimit {
    Daemon,
    Lease,
}

/// Effect of the end of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TransferEnd {
    /// No answer of the lease runs any more, and the last byte, or everything, went out.
    pub(super) finishes: bool,
    /// Everything went out now, for the first time.
    pub(super) whole: bool,
}

impl LeaseTransfers {
    /// Takes a place for an answer. [`LeaseTransfers::end`] gives it back.
    pub(super) fn begin(&self, token: &LeaseToken) -> Result<(), TransferLimit> {
        let mut table = self.0.lock();
        if table.bodies >= MAX_BODIES {
            return Err(TransferLimit::Daemon);
        }
        table.make_room();
        let entry = table.entries.entry(*token.as_bytes()).or_insert_with(LeaseEntry::new);
        if entry.bodies >= MAX_BODIES_OF_LEASE {
            return Err(TransferLimit::Lease);
        }
        if entry.bodies == 0 {
            entry.reached_end = false;
        }
        entry.bodies += 1;
        table.bodies += 1;
        Ok(())
    }

    /// An answer is over that handed out these bytes of `length`.
    pub(super) fn end(&self, token: &LeaseToken, sent: Range<u64>, length: u64) -> TransferEnd {
        let mut table = self.0.lock();
        table.bodies = table.bodies.saturating_sub(1);
        let Some(entry) = table.entries.get_mut(token.as_bytes()) else { return TransferEnd::default() };
        entry.bodies = entry.bodies.saturating_sub(1);
        entry.touched = Instant::now();
        entry.reached_end |= sent.end == length && (sent.start < sent.end || length == 0);
        entry.add(sent);
        let whole = !entry.whole && (length == 0 || entry.runs.first().is_some_and(|run| *run == (0..length)));
        entry.whole |= whole;
        TransferEnd { finishes: entry.bodies == 0 && (entry.reached_end || entry.whole), whole }
    }

    /// The claimant said that it has everything. Whether that was counted before.
    pub(super) fn completed(&self, token: &LeaseToken) -> bool {
        let mut table = self.0.lock();
        match table.entries.get_mut(token.as_bytes()) {
            // An answer that runs still gives its place back under its entry.
            Some(entry) if entry.bodies > 0 => std::mem::replace(&mut entry.whole, true),
            Some(_) => table.entries.remove(token.as_bytes()).is_some_and(|entry| entry.whole),
            None => false,
        }
    }

    /// Forgets leases that are over.
    pub(super) fn forget_old(&self) {
        self.0.lock().entries.retain(|_, entry| entry.bodies > 0 || entry.touched.elapsed() < LONGEST);
    }

    /// Answers that run.
    pub(super) fn running(&self) -> usize {
        self.0.lock().bodies
    }
}

impl Table {
    /// Forgets the older half at a time, so that this is rare. Only the sent ranges are lost.
    fn make_room(&mut self) {
        if self.entries.len() < MAX_REMEMBERED {
            return;
        }
        let mut times: Vec<Instant> = self.entries.values().map(|entry| entry.touched).collect();
        let middle = times.len() / 2;
        let (_, median, _) = times.select_nth_unstable(middle);
        let median = *median;
        self.entries.retain(|_, entry| entry.bodies > 0 || entry.touched > median);
    }
}

impl LeaseEntry {
    fn new() -> LeaseEntry {
        LeaseEntry { bodies: 0, runs: Vec::new(), reached_end: false, whole: false, touched: Instant::now() }
    }

    fn add(&mut self, mut sent: Range<u64>) {
        if sent.is_empty() {
            return;
        }
        self.runs.retain(|run| {
            let apart = run.end < sent.start || sent.end < run.start;
            if !apart {
                sent = sent.start.min(run.start)..sent.end.max(run.end);
            }
            apart
        });
        if self.runs.len() < MAX_RUNS {
            let place = self.runs.partition_point(|run| run.start < sent.start);
            self.runs.insert(place, sent);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: LeaseToken = LeaseToken::new([1; 16]);

    fn sent(leases: &LeaseTransfers, bytes: Range<u64>) -> TransferEnd {
        leases.begin(&TOKEN).unwrap();
        leases.end(&TOKEN, bytes, 100)
    }

    const NOTHING: TransferEnd = TransferEnd { finishes: false, whole: false };
    const FINISHES: TransferEnd = TransferEnd { finishes: true, whole: false };
    const WHOLE: TransferEnd = TransferEnd { finishes: true, whole: true };

    #[test]
    fn a_download_is_whole_once_all_of_its_bytes_went_out() {
        let leases = LeaseTransfers::default();
        assert_eq!(sent(&leases, 0..40), NOTHING);
        assert_eq!(sent(&leases, 60..80), NOTHING);
        assert_eq!(sent(&leases, 30..60), NOTHING);
        assert_eq!(sent(&leases, 80..80), NOTHING);
        assert_eq!(sent(&leases, 79..100), WHOLE);
        assert_eq!(sent(&leases, 0..100), FINISHES, "counted once");
        assert!(leases.completed(&TOKEN));
        assert!(!leases.completed(&TOKEN), "forgotten");
    }

    #[test]
    fn the_last_byte_alone_is_no_whole_download() {
        let leases = LeaseTransfers::default();
        assert_eq!(sent(&leases, 99..100), FINISHES);
        assert_eq!(sent(&leases, 0..50), NOTHING, "the claimant lacks something");
        assert_eq!(sent(&leases, 50..99), WHOLE, "although it does not end at the last byte");
    }

    #[test]
    fn a_lease_finishes_with_the_last_of_the_answers_that_run_together() {
        let leases = LeaseTransfers::default();
        leases.begin(&TOKEN).unwrap();
        leases.begin(&TOKEN).unwrap();
        assert_eq!(leases.end(&TOKEN, 50..100, 100), NOTHING);
        assert_eq!(leases.end(&TOKEN, 0..20, 100), FINISHES);
        leases.begin(&TOKEN).unwrap();
        assert!(!leases.completed(&TOKEN), "while an answer runs");
        assert!(!leases.end(&TOKEN, 20..50, 100).whole, "counted by the claimant's word");
        assert_eq!(leases.running(), 0);
    }

    #[test]
    fn places_are_bounded_for_each_lease_and_for_all() {
        let leases = LeaseTransfers::default();
        for _ in 0..MAX_BODIES_OF_LEASE {
            leases.begin(&TOKEN).unwrap();
        }
        assert_eq!(leases.begin(&TOKEN), Err(TransferLimit::Lease));
        let other = |number: usize| LeaseToken::new((number as u128 + 1000).to_le_bytes());
        for number in 0..MAX_BODIES - MAX_BODIES_OF_LEASE {
            leases.begin(&other(number)).unwrap();
        }
        assert_eq!(leases.begin(&other(MAX_BODIES)), Err(TransferLimit::Daemon));
        leases.end(&TOKEN, 0..1, 100);
        leases.begin(&other(MAX_BODIES)).unwrap();
    }

    #[test]
    fn memory_is_bounded_however_many_leases_and_runs_there_are() {
        let leases = LeaseTransfers::default();
        for number in 0..40_000u128 {
            let token = LeaseToken::new(number.to_le_bytes());
            leases.begin(&token).unwrap();
            leases.end(&token, 0..1, 100);
        }
        assert!(leases.0.lock().entries.len() <= MAX_REMEMBERED + 1);
        for number in 0..1000 {
            leases.begin(&TOKEN).unwrap();
            leases.end(&TOKEN, number * 2..number * 2 + 1, 10_000);
        }
        assert_eq!(leases.0.lock().entries[TOKEN.as_bytes()].runs.len(), MAX_RUNS);
    }
}
