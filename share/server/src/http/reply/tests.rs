//! Answers that go out, by a clock that the tests turn: what ends them, what renews their lease,
//! what they count.

use std::io::Write;

use lockbox_share_protocol::message::{ClaimState, ShareState};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use super::super::DaemonSettings;
use super::*;
use crate::store::segments::{self, SegmentStore};
use crate::store::simulated::{ManualClock, MemoryStore, SimulatedDisk};
use crate::store::spool::Spool;
use crate::store::tests::conformance::{MINUTE, auth, handle, id, large, owner};
use crate::store::{Durability, NewShare, Periods, ShareStore, SpoolEntry};

struct Rig {
    daemon: Arc<Daemon>,
    clock: Arc<ManualClock>,
    content: Vec<u8>,
    entry: SpoolEntry,
    token: LeaseToken,
    runtime: Runtime,
    _directory: TempDir,
}

impl Rig {
    fn new(length: usize) -> Rig {
        let clock = Arc::new(ManualClock::new());
        let store = Arc::new(MemoryStore::new(clock.clone(), Periods::default()).unwrap());
        Rig::on(store, clock, length)
    }

    /// A claimed share of so many bytes.
    fn on(store: Arc<dyn ShareStore>, clock: Arc<ManualClock>, length: usize) -> Rig {
        let directory = tempfile::tempdir().unwrap();
        let spool = Spool::open(directory.path(), 1 << 30).unwrap();
        let content: Vec<u8> = (0..length).map(|n| (n % 251) as u8).collect();
        let mut deposit = spool.begin().unwrap();
        deposit.write(&content).unwrap();
        let entry = deposit.finish().wait().unwrap();
        let share = NewShare { payload: Some(entry), ttl: 24 * 60 * MINUTE, ..large(1) };
        store.create(handle(1), share).wait().unwrap();
        let token = store.claim(handle(1), &auth(1), id(1)).wait().unwrap().lease.unwrap().token;
        let (settings, url) = (DaemonSettings::default(), "http://127.0.0.1:7377".to_owned());
        let daemon = Arc::new(Daemon { clock: clock.clone(), ..Daemon::new(store, spool, settings, url, [1; 16]) });
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        Rig { daemon, clock, content, entry, token, runtime, _directory: directory }
    }

    fn begin(&self, bytes: Range<usize>) -> FileBody {
        self.begin_on(self.daemon.spool.read(&self.entry).unwrap(), bytes)
    }

    fn begin_on(&self, file: File, bytes: Range<usize>) -> FileBody {
        let transfer = Transfer::begin(&self.daemon, handle(1), &self.token, bytes.start as u64);
        FileBody::new(file, bytes.end as u64, self.runtime.block_on(transfer).unwrap())
    }

    fn next(&self, body: &mut FileBody) -> Option<io::Result<Bytes>> {
        self.runtime.block_on(std::future::poll_fn(|cx| body.poll(cx)))
    }

    /// A part must come.
    fn part(&self, body: &mut FileBody) -> Bytes {
        self.next(body).unwrap().unwrap()
    }

    /// The answer must end here, and not at its end.
    fn stops(&self, body: &mut FileBody) {
        let left = body.left();
        let error = self.next(body).unwrap().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(left > 0 && body.left() == left, "something was handed over");
    }

    /// Reads on to the end.
    fn rest(&self, body: &mut FileBody) -> Vec<u8> {
        let mut bytes = Vec::new();
        while let Some(part) = self.next(body) {
            bytes.extend_from_slice(&part.unwrap());
        }
        bytes
    }

    /// Drops an answer where the daemon would, and lets what it left behind come to its end.
    fn ends(&self, body: FileBody) {
        self.runtime.block_on(async {
            drop(body);
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        });
    }

    fn state(&self) -> (ShareState, Option<ClaimState>) {
        let info = self.daemon.store.info(handle(1), &owner(1)).wait().unwrap();
        (info.state, info.events.first().map(|event| event.state))
    }

    fn completed(&self) -> u64 {
        self.daemon.metrics.completed.load(Relaxed)
    }
}

#[test]
fn any_part_of_a_file_is_sent() {
    let rig = Rig::new(PART * 2 + 100);
    let length = rig.content.len();
    let mut sent = 0;
    for (first, end) in [(1, 2), (PART - 1, PART + 1), (PART, length), (5, 5), (0, length)] {
        let mut body = rig.begin(first..end);
        assert!(rig.rest(&mut body) == rig.content[first..end], "{first}..{end}");
        rig.ends(body);
        sent += (end - first) as u64;
        assert_eq!(rig.daemon.metrics.sent_bytes.load(Relaxed), sent);
    }
    assert_eq!(rig.completed(), 1);
}

#[test]
fn a_file_that_was_cut_is_an_error_and_no_end() {
    let rig = Rig::new(2000);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[7; 1000]).unwrap();
    let mut body = rig.begin_on(file, 0..2000);
    assert_eq!(rig.part(&mut body), vec![7; 1000]);
    assert!(rig.next(&mut body).unwrap().is_err());
    rig.ends(body);
    rig.clock.pass(2 * MINUTE);
    assert_eq!(rig.state(), (ShareState::Leased, Some(ClaimState::Sending)));
    assert_eq!(rig.completed(), 0);
}

/// Without renewal the lease would end after an hour, with most of the bytes still to come.
#[test]
fn a_lease_is_renewed_while_bytes_flow_and_ends_after_the_last() {
    let rig = Rig::new(PART * 40);
    let mut body = rig.begin(0..rig.content.len());
    let mut received = Vec::new();
    for _ in 0..40 {
        received.extend_from_slice(&rig.part(&mut body));
        rig.clock.pass(10 * MINUTE);
        assert_eq!(rig.state(), (ShareState::Leased, Some(ClaimState::Sending)));
        let other = rig.daemon.store.claim(handle(1), &auth(1), id(2)).wait();
        assert!(matches!(other.err(), Some(StoreError::Busy { .. })));
    }
    assert!(received == rig.content && rig.next(&mut body).is_none());
    rig.ends(body);
    assert_eq!((rig.state().0, rig.completed()), (ShareState::Leased, 1));
    rig.clock.pass(MINUTE);
    assert_eq!(rig.state(), (ShareState::Consumed, Some(ClaimState::Interrupted)));
}

#[test]
fn a_day_after_the_claim_every_lease_ends() {
    let rig = Rig::new(PART * 40);
    let mut body = rig.begin(0..rig.content.len());
    for _ in 0..28 {
        rig.part(&mut body);
        rig.clock.pass(50 * MINUTE);
    }
    rig.part(&mut body);
    rig.clock.pass(45 * MINUTE);
    rig.stops(&mut body);
}

/// Another daemon on the same store, or another process, is not heard at once.
#[test]
fn ten_seconds_after_its_lease_is_gone_an_answer_hands_nothing_over() {
    for rearmed in [false, true] {
        let rig = Rig::new(PART * 10);
        let mut body = rig.begin(0..rig.content.len());
        rig.part(&mut body);
        let store = &rig.daemon.store;
        let taken_back = if rearmed { store.rearm(handle(1), &owner(1)) } else { store.revoke(handle(1), &owner(1)) };
        taken_back.wait().unwrap();
        rig.clock.pass(Duration::from_millis(9_999));
        rig.part(&mut body);
        rig.clock.pass(Duration::from_millis(1));
        rig.stops(&mut body);
        rig.stops(&mut body);
        rig.ends(body);
        assert_eq!(rig.state().0, if rearmed { ShareState::Armed } else { ShareState::Revoked });
        assert_eq!((rig.completed(), rig.daemon.leases.running()), (0, 0));
    }
}

#[test]
fn what_this_daemon_took_back_stops_at_the_next_part() {
    let rig = Rig::new(PART * 10);
    let mut body = rig.begin(0..rig.content.len());
    rig.part(&mut body);
    rig.daemon.store.revoke(handle(1), &owner(1)).wait().unwrap();
    rig.daemon.notifier.withdraw(handle(1));
    rig.stops(&mut body);
    // Of another share with the same number: it is asked, and goes on.
    let rig = Rig::new(PART * 3);
    let mut body = rig.begin(0..rig.content.len());
    rig.part(&mut body);
    rig.daemon.notifier.withdraw(handle(1));
    assert_eq!(rig.rest(&mut body).len(), PART * 2);
}

#[test]
fn no_answer_is_whole_whose_lease_ended_before_its_last_part() {
    let rig = Rig::new(PART * 3);
    let mut body = rig.begin(0..rig.content.len());
    rig.part(&mut body);
    rig.daemon.store.revoke(handle(1), &owner(1)).wait().unwrap();
    rig.part(&mut body);
    rig.stops(&mut body);
    // The same for a part of the file.
    let rig = Rig::new(PART * 3);
    let mut body = rig.begin(0..PART * 2);
    rig.part(&mut body);
    rig.daemon.store.rearm(handle(1), &owner(1)).wait().unwrap();
    rig.stops(&mut body);
}

#[test]
fn an_answer_that_stands_still_renews_nothing() {
    let rig = Rig::new(PART * 10);
    let mut body = rig.begin(0..rig.content.len());
    rig.part(&mut body);
    rig.clock.pass(60 * MINUTE);
    assert_eq!(rig.state(), (ShareState::Consumed, Some(ClaimState::Interrupted)));
    rig.stops(&mut body);
}

#[test]
fn a_store_that_cannot_renew_takes_no_lease_away_before_its_time() {
    let clock = Arc::new(ManualClock::new());
    let settings = segments::SegmentSettings {
        durability: Durability::None,
        background: None,
        clock: clock.clone(),
        cache: 1,
        ..segments::SegmentSettings::default()
    };
    let disk = Arc::new(SimulatedDisk::new());
    let store = Arc::new(SegmentStore::open_on(disk.clone(), None, &settings).unwrap());
    let rig = Rig::on(store, clock, PART * 20);
    let mut body = rig.begin(0..rig.content.len());
    rig.part(&mut body);
    disk.set_read_only(true);
    // A renewal is due from half an hour on.
    for _ in 0..5 {
        rig.clock.pass(11 * MINUTE);
        rig.part(&mut body);
    }
    rig.clock.pass(5 * MINUTE);
    rig.stops(&mut body);
}

/// A download in parallel ranges: the one with the last byte ends first.
#[test]
fn a_lease_stands_until_the_last_of_the_answers_that_run_together_ends() {
    let rig = Rig::new(PART * 10);
    let length = rig.content.len();
    let (mut first, mut second) = (rig.begin(0..PART * 8), rig.begin(PART * 8..length));
    assert_eq!(rig.rest(&mut second).len(), PART * 2);
    rig.ends(second);
    for _ in 0..8 {
        rig.part(&mut first);
        rig.clock.pass(2 * MINUTE);
        assert_eq!(rig.state(), (ShareState::Leased, Some(ClaimState::Sending)));
    }
    assert_eq!(rig.completed(), 0);
    rig.ends(first);
    assert_eq!(rig.completed(), 1);
    rig.clock.pass(MINUTE);
    assert_eq!(rig.state(), (ShareState::Consumed, Some(ClaimState::Interrupted)));
}

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
