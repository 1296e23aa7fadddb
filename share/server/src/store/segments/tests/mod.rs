//! The built-in store against the suite, on disks that are full, read-only or failing, and over
//! restarts.

mod crash;

use bytes::Bytes;
use lockbox_share_protocol::message::ShareState;

use super::*;
use crate::store::share::Key;
use crate::store::simulated::{ManualClock, SimulatedDisk};
use crate::store::tests::conformance::{DAY_MS, MINUTE, Subject, auth, handle, id, large, owner, small, suite};
use crate::store::{ClaimGrant, LeaseFinish, ShareStore};

impl SegmentStore {
    fn unsynced(&self) -> usize {
        self.inner.shared.group.unsynced()
    }

    /// Times at which shares are looked at.
    fn due(&self) -> usize {
        self.inner.shards.iter().map(|shard| shard.lock().due.len()).sum()
    }
}

struct Rig {
    disk: Arc<SimulatedDisk>,
    clock: Arc<ManualClock>,
    settings: SegmentSettings,
}

impl Rig {
    fn new(durability: Durability) -> Rig {
        let clock = Arc::new(ManualClock::new());
        let settings = SegmentSettings {
            durability,
            background: None,
            clock: clock.clone(),
            cache: 1,
            ..SegmentSettings::default()
        };
        Rig { disk: Arc::new(SimulatedDisk::new()), clock, settings }
    }

    fn open(&self) -> SegmentStore {
        SegmentStore::open_on(self.disk.clone(), None, &self.settings).unwrap()
    }

    /// The same, over another disk.
    fn on(&self, disk: SimulatedDisk) -> Rig {
        Rig { disk: Arc::new(disk), clock: self.clock.clone(), settings: self.settings.clone() }
    }
}

fn claim(store: &SegmentStore, number: u64, attempt: u64) -> Result<ClaimGrant> {
    store.claim(handle(number), &auth(number), id(attempt)).wait()
}

#[test]
fn the_segment_store_conforms_in_every_mode() {
    for durability in [Durability::None, Durability::Periodic, Durability::Commit] {
        suite(&|periods| {
            let mut rig = Rig::new(durability);
            rig.settings.periods = periods;
            let store = Arc::new(rig.open());
            let swept = Arc::clone(&store);
            Subject { store, clock: rig.clock, sweep: Box::new(move || swept.compact().unwrap()), counts: true }
        });
    }
}

#[test]
fn the_segment_store_conforms_on_a_real_disk() {
    suite(&|periods| {
        let clock = Arc::new(ManualClock::new());
        let directory = tempfile::tempdir().unwrap();
        let settings =
            SegmentSettings { periods, background: None, clock: clock.clone(), ..SegmentSettings::default() };
        let store = Arc::new(SegmentStore::open(directory.path(), &settings).unwrap());
        let swept = Arc::clone(&store);
        // The directory lives as long as the store.
        let sweep = Box::new(move || {
            assert!(directory.path().exists());
            swept.sweep().unwrap();
        });
        Subject { store, clock, sweep, counts: true }
    });
}

#[test]
fn shares_are_what_they_were_after_a_restart() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    for number in 0..300 {
        store.create(handle(number), small(number)).wait().unwrap();
    }
    for number in 100..200 {
        claim(&store, number, number).unwrap();
    }
    for number in 200..250 {
        store.revoke(handle(number), &owner(number)).wait().unwrap();
    }
    drop(store);
    let store = rig.open();
    assert_eq!(store.stats().live, 150);
    for number in 0..300 {
        let claimed = claim(&store, number, number + 1000);
        match number {
            100..200 => assert!(matches!(claimed.err(), Some(StoreError::Used { .. }))),
            200..250 => assert!(matches!(claimed.err(), Some(StoreError::Revoked { .. }))),
            _ => assert_eq!(claimed.unwrap().capsule, format!("capsule of {number}")),
        }
    }
    // The answer that was lost with the process is given again.
    assert!(claim(&store, 100, 100).unwrap().repeated);
}

#[test]
fn a_consumed_backlog_shrinks_to_nothing() {
    let mut rig = Rig::new(Durability::Periodic);
    rig.settings.periods.audit = Duration::ZERO;
    let store = rig.open();
    for number in 0..2000 {
        store.create(handle(number), NewShare { ttl: MINUTE * 2, ..small(number) }).wait().unwrap();
        claim(&store, number, number).unwrap();
    }
    assert!(rig.disk.bytes("segment-") > 500_000);
    rig.clock.pass(MINUTE);
    store.compact().unwrap();
    // What is left tells until the expiry that the shares were used.
    assert_eq!(store.stats().live, 0);
    assert!(matches!(claim(&store, 7, 9999).err(), Some(StoreError::Used { .. })));
    let content = rig.disk.bytes("segment-");
    rig.clock.pass(MINUTE * 60);
    store.compact().unwrap();
    assert_eq!(rig.disk.bytes("segment-"), 0, "{content} before");
    let figures = store.stats();
    assert_eq!((figures.segment_files, figures.segment_bytes, figures.expired_bytes_pending), (0, 0, 0));
    assert!(figures.index_bytes <= 4 * 64 * 1024);
    drop(store);
    assert_eq!(rig.open().stats().live, 0);
}

#[test]
fn expired_bytes_are_pending_until_they_are_gone() {
    let rig = Rig::new(Durability::Periodic);
    let store = rig.open();
    for number in 0..50 {
        store.create(handle(number), small(number)).wait().unwrap();
    }
    assert_eq!(store.stats().expired_bytes_pending, 0);
    rig.clock.pass(MINUTE * 17);
    assert!(store.stats().expired_bytes_pending > 50 * 136);
    store.sweep().unwrap();
    let figures = store.stats();
    assert_eq!((figures.expired_bytes_pending, figures.live, figures.expired), (0, 0, 50));
    // Their audit is no life, whoever reads it.
    drop(store);
    let store = rig.open();
    assert_eq!(store.stats().live, 0);
    rig.clock.pass(MINUTE * 60 * 26);
    store.sweep().unwrap();
    assert_eq!((rig.disk.bytes("segment-"), store.stats().expired), (0, 0));
}

#[test]
fn mostly_dead_segments_are_compacted_in_the_background() {
    let rig = Rig::new(Durability::Periodic);
    let store = rig.open();
    let share =
        |number| NewShare { capsule: Bytes::from(vec![number as u8; 4000]), ttl: MINUTE * 600, ..small(number) };
    for number in 0..1000 {
        store.create(handle(number), share(number)).wait().unwrap();
        if number % 10 != 0 {
            claim(&store, number, number).unwrap();
        }
    }
    let before = rig.disk.bytes("segment-");
    store.sweep().unwrap();
    assert!(rig.disk.bytes("segment-") >= before, "claims of the last minute may still be repeated");
    rig.clock.pass(MINUTE);
    store.sweep().unwrap();
    let after = rig.disk.bytes("segment-");
    assert!(after < before / 4, "{before} -> {after}");
    for number in 0..1000 {
        let claimed = claim(&store, number, 5000 + number);
        assert_eq!(claimed.is_ok(), number % 10 == 0);
    }
}

#[test]
fn content_that_is_over_leaves_the_disk_where_little_lives_as_well() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    for number in 0..3 {
        store.create(handle(number), NewShare { ttl: MINUTE * 600, ..small(number) }).wait().unwrap();
    }
    let kept = |number: u64| {
        let wanted = format!("capsule of {number}");
        rig.disk.list().unwrap().iter().any(|name| {
            let mut bytes = vec![0; 1 << 20];
            let read = rig.disk.open(name).unwrap().read_at(&mut bytes, 0).unwrap();
            bytes[..read].windows(wanted.len()).any(|part| part == wanted.as_bytes())
        })
    };
    claim(&store, 0, 0).unwrap();
    store.revoke(handle(1), &owner(1)).wait().unwrap();
    store.sweep().unwrap();
    assert!(kept(0) && kept(2));
    assert_eq!(claim(&store, 0, 0).unwrap().capsule, "capsule of 0", "repeated within a minute");
    rig.clock.pass(MINUTE);
    store.sweep().unwrap();
    assert_eq!([0, 1, 2].map(kept), [false, false, true]);
    assert!(matches!(claim(&store, 0, 9).err(), Some(StoreError::Used { .. })));
    assert!(matches!(claim(&store, 1, 9).err(), Some(StoreError::Revoked { .. })));
    assert_eq!(claim(&store, 2, 9).unwrap().capsule, "capsule of 2");
}

#[test]
fn time_goes_on_over_restarts_whatever_the_clock_says() {
    for step in [DAY_MS, -DAY_MS] {
        let rig = Rig::new(Durability::Commit);
        let store = rig.open();
        store.create(handle(1), small(1)).wait().unwrap();
        drop(store);
        rig.clock.step(step);
        let store = rig.open();
        store.sweep().unwrap();
        rig.clock.pass(MINUTE * 14);
        assert_eq!(store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
        rig.clock.pass(MINUTE);
        assert_eq!(store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Expired);
    }
    // The machine was off: that time has gone by as well.
    let rig = Rig::new(Durability::Commit);
    rig.open().create(handle(1), small(1)).wait().unwrap();
    rig.clock.reboot(MINUTE * 16);
    assert_eq!(rig.open().info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Expired);
}

#[test]
fn a_full_disk_refuses_deposits_and_still_serves() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    let mut deposited = 0;
    rig.disk.set_room(Some(40_000));
    let refused = loop {
        match store.create(handle(deposited), small(deposited)).wait() {
            Ok(_) => deposited += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(refused, StoreError::Full);
    assert!(deposited > 20);
    for number in 0..deposited {
        assert_eq!(claim(&store, number, number).unwrap().capsule, format!("capsule of {number}"));
    }
    drop(store);
    let store = rig.open();
    assert_eq!(store.stats().live, 0);
    assert!(matches!(claim(&store, 0, 999).err(), Some(StoreError::Used { .. })));
    assert_eq!(claim(&store, deposited, 999).err(), Some(StoreError::Unknown));
}

/// The segment from which a share moved stays when the disk is full, and still has it armed.
#[test]
fn a_full_disk_drops_no_tombstone_before_the_expiry() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    let mut identity = [0; 24];
    rig.disk.open("store").unwrap().read_at(&mut identity, 0).unwrap();
    let secret = identity[8..].try_into().unwrap();
    let mut same_shard = (0..).filter(|number| Key::of(handle(*number), &secret).shard(files::SHARDS) == 0);
    let [used, moved, large] = [(); 3].map(|()| same_shard.next().unwrap());
    for number in [used, moved] {
        store.create(handle(number), NewShare { ttl: MINUTE * 600, ..small(number) }).wait().unwrap();
    }
    let capsule = Bytes::from(vec![5; 7000]);
    store.create(handle(large), NewShare { ttl: MINUTE * 600, capsule, ..small(large) }).wait().unwrap();
    claim(&store, used, 1).unwrap();
    rig.clock.pass(MINUTE);
    rig.disk.remove(files::RESERVE).unwrap();
    // Room for the head of a segment and one small share.
    rig.disk.set_room(Some(300));
    assert_eq!(store.sweep().err(), Some(StoreError::Full));
    rig.disk.set_room(Some(300));
    claim(&store, moved, 1).unwrap();
    rig.clock.pass(MINUTE);
    rig.disk.set_room(Some(0));
    assert_eq!(store.sweep().err(), Some(StoreError::Full));
    drop(store);
    let store = rig.on(rig.disk.after_kill()).open();
    assert!(matches!(claim(&store, moved, 2).err(), Some(StoreError::Used { .. })));
}

#[test]
fn a_read_only_disk_gives_nothing_away() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    store.create(handle(1), small(1)).wait().unwrap();
    rig.disk.set_read_only(true);
    assert!(matches!(claim(&store, 1, 1).err(), Some(StoreError::Unavailable(_))));
    assert!(matches!(store.create(handle(2), small(2)).wait().err(), Some(StoreError::Unavailable(_))));
    assert_eq!(store.info(handle(1), &owner(1)).wait().unwrap().state, ShareState::Armed);
    rig.disk.set_read_only(false);
    assert!(claim(&store, 1, 1).is_ok());
}

#[test]
fn a_failed_barrier_ends_all_changes() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    store.create(handle(1), small(1)).wait().unwrap();
    store.create(handle(2), small(2)).wait().unwrap();
    rig.disk.fail_barriers();
    assert!(matches!(claim(&store, 1, 1).err(), Some(StoreError::Unavailable(_))));
    assert!(matches!(store.ready(), Err(StoreError::Unavailable(_))));
    assert!(matches!(claim(&store, 2, 1).err(), Some(StoreError::Unavailable(_))));
    assert!(matches!(claim(&store, 1, 1).err(), Some(StoreError::Unavailable(_))), "nor is the lost answer repeated");
}

#[test]
fn one_process_has_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let settings = SegmentSettings { background: None, ..SegmentSettings::default() };
    let store = SegmentStore::open(directory.path(), &settings).unwrap();
    let second = SegmentStore::open(directory.path(), &settings).err().unwrap();
    assert!(second.to_string().contains("another lockbox-share uses this state directory"), "{second}");
    drop(store);
    SegmentStore::open(directory.path(), &settings).unwrap();
}

/// The end of the daemon saves the clock, as the sweep in the background does.
#[test]
fn the_clock_is_saved_by_several_threads() {
    let directory = tempfile::tempdir().unwrap();
    let settings = SegmentSettings { background: None, ..SegmentSettings::default() };
    let store = SegmentStore::open(directory.path(), &settings).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| store.flush().wait().unwrap()));
        }
    });
}

/// Records of the share that had the handle before are still there at the next start.
#[test]
fn a_handle_that_is_used_again_outlives_the_records_of_before() {
    for claims in [0, 3] {
        let rig = Rig::new(Durability::Commit);
        let store = rig.open();
        store.create(handle(1), NewShare { claims: 8, ..small(1) }).wait().unwrap();
        for attempt in 0..claims {
            claim(&store, 1, attempt).unwrap();
        }
        let before = store.info(handle(1), &owner(1)).wait().unwrap().version;
        rig.clock.pass(MINUTE * 60 * 26);
        // No sweep came in between.
        store.create(handle(1), small(2)).wait().unwrap();
        assert!(store.info(handle(1), &owner(2)).wait().unwrap().version > before);
        drop(store);
        let store = rig.on(rig.disk.after_kill()).open();
        let claimed = store.claim(handle(1), &auth(2), id(9)).wait().unwrap();
        assert_eq!(claimed.capsule, "capsule of 2");
        assert_eq!(store.claim(handle(1), &auth(1), id(10)).wait().err(), Some(StoreError::Unknown));
    }
}

#[test]
fn payloads_go_with_their_share() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new());
    let settings = SegmentSettings { background: None, clock: clock.clone(), ..SegmentSettings::default() };
    let open = || SegmentStore::open(directory.path(), &settings).unwrap();
    let store = open();
    let payload = || {
        let mut deposit = store.spool().unwrap().begin().unwrap();
        deposit.write(&[4; 1000]).unwrap();
        Some(deposit.finish().wait().unwrap())
    };
    for number in 0..6 {
        let ttl = if number == 3 { MINUTE } else { MINUTE * 200 };
        store.create(handle(number), NewShare { payload: payload(), ttl, ..large(number) }).wait().unwrap();
    }
    let orphan = payload().unwrap();
    assert_eq!(store.stats().spool_bytes, 7000);
    store.revoke(handle(0), &owner(0)).wait().unwrap();
    assert_eq!(store.stats().spool_bytes, 6000, "revoked: at once");
    let lease = |number| store.claim(handle(number), &auth(number), id(1)).wait().unwrap().lease.unwrap();
    let (one, two) = (lease(1), lease(2));
    store.payload(handle(1), &one.token).wait().unwrap();
    store.finish(handle(1), &one.token, LeaseFinish::Now).wait().unwrap();
    store.payload(handle(2), &two.token).wait().unwrap();
    store.finish(handle(2), &two.token, LeaseFinish::After(MINUTE / 2)).wait().unwrap();
    clock.pass(MINUTE * 2);
    store.sweep().unwrap();
    assert_eq!(store.stats().spool_bytes, 4000, "completed, expired; unconfirmed stays");
    drop(store);
    let store = open();
    assert_eq!(store.stats().spool_bytes, 3000, "the orphan goes at the start");
    assert!(store.spool().unwrap().read(&orphan).is_err());
    clock.pass(MINUTE * 300);
    store.sweep().unwrap();
    assert_eq!(store.stats().spool_bytes, 0);
}

/// Whoever holds a lease may ask for the last byte again and again, and is not counted by the
/// limiter.
#[test]
fn a_receiver_that_asks_for_the_end_over_and_over_takes_no_memory() {
    let directory = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::new());
    let durability = Durability::None;
    let settings = SegmentSettings { durability, background: None, clock: clock.clone(), ..SegmentSettings::default() };
    let store = SegmentStore::open(directory.path(), &settings).unwrap();
    let mut deposit = store.spool().unwrap().begin().unwrap();
    deposit.write(&[4; 1000]).unwrap();
    let payload = Some(deposit.finish().wait().unwrap());
    store.create(handle(1), NewShare { payload, ttl: MINUTE, ..large(1) }).wait().unwrap();
    let lease = claim(&store, 1, 1).unwrap().lease.unwrap();
    for _ in 0..30 {
        for _ in 0..100 {
            store.payload(handle(1), &lease.token).wait().unwrap();
            store.finish(handle(1), &lease.token, LeaseFinish::After(MINUTE)).wait().unwrap();
        }
        clock.pass(MINUTE / 2);
        store.sweep().unwrap();
    }
    assert!(store.due() < 64, "{}", store.due());
    assert_eq!(store.stats().spool_bytes, 1000);
    // The end is found although it was moved behind what was known.
    clock.pass(MINUTE * 3);
    store.sweep().unwrap();
    assert_eq!(store.stats().spool_bytes, 0);
}

#[test]
fn no_step_of_the_wall_clock_removes_a_payload() {
    let directory = tempfile::tempdir().unwrap();
    let settings =
        SegmentSettings { background: None, clock: Arc::new(ManualClock::new()), ..SegmentSettings::default() };
    let store = SegmentStore::open(directory.path(), &settings).unwrap();
    let mut deposit = store.spool().unwrap().begin().unwrap();
    deposit.write(&[4; 1000]).unwrap();
    let payload = deposit.finish().wait().unwrap();
    store.create(handle(1), NewShare { payload: Some(payload), ..large(1) }).wait().unwrap();
    // As the file looks after the clock was set forward.
    let long_ago = std::time::SystemTime::now() - Duration::from_secs(40 * 24 * 3600);
    let path = directory.path().join("spool").join(crate::store::spool::name(&payload.id));
    std::fs::File::options().write(true).open(path).unwrap().set_modified(long_ago).unwrap();
    store.sweep().unwrap();
    assert!(store.spool().unwrap().read(&payload).is_ok());
}

#[test]
fn expired_content_goes_from_a_full_disk_as_well() {
    let rig = Rig::new(Durability::Commit);
    let store = rig.open();
    for number in 0..50 {
        store.create(handle(number), small(number)).wait().unwrap();
    }
    rig.disk.remove(files::RESERVE).unwrap();
    rig.disk.set_room(Some(0));
    rig.clock.pass(MINUTE * 17);
    store.sweep().unwrap();
    // The first files that went made room for the audit of the others.
    assert_eq!(store.stats().expired_bytes_pending, 0);
    let told = (0..50).filter(|number| store.info(handle(*number), &owner(*number)).wait().is_ok()).count();
    assert!((1..50).contains(&told), "{told} audits");
}

#[test]
fn what_a_kill_left_survives_a_power_cut_after_the_next_start() {
    for durability in [Durability::Periodic, Durability::Commit] {
        let rig = Rig::new(durability);
        let store = rig.open();
        store.create(handle(1), small(1)).wait().unwrap();
        let killed = rig.on(rig.disk.after_kill());
        let _started = killed.open();
        // Nothing that no barrier covered is there.
        let cut = killed.on(killed.disk.after_power_cut(&mut || 3));
        assert!(claim(&cut.open(), 1, 1).is_ok(), "{durability:?}");
    }
}

#[test]
fn the_saved_time_is_whole_after_a_power_cut() {
    let rig = Rig::new(Durability::Commit);
    let _store = rig.open();
    // Every change of a name is there, and no content that no barrier covered.
    let cut = rig.disk.after_power_cut(&mut || 0);
    assert!(cut.open("clock").unwrap().length().unwrap() > 0);
}

#[test]
fn one_damaged_segment_does_not_keep_the_others() {
    let mut number = 0;
    loop {
        let rig = Rig::new(Durability::Commit);
        let store = rig.open();
        for number in 0..50 {
            store.create(handle(number), small(number)).wait().unwrap();
        }
        drop(store);
        // Opened anew, no file is held open.
        let store = rig.open();
        let names = rig.disk.list().unwrap().into_iter().filter(|name| name.starts_with("segment-"));
        let Some(victim) = names.clone().nth(number) else { break };
        assert!(names.count() > 2);
        rig.disk.remove(&victim).unwrap();
        rig.clock.pass(MINUTE * 17);
        let before = store.stats().expired_bytes_pending;
        assert!(store.sweep().is_err(), "{victim}");
        let after = store.stats().expired_bytes_pending;
        assert!(after * 2 < before, "{victim}: {before} -> {after}");
        number += 1;
    }
    assert!(number > 2);
}

#[test]
fn files_do_not_stay_open_in_mode_none() {
    let rig = Rig::new(Durability::None);
    let store = rig.open();
    for number in 0..400 {
        let ttl = MINUTE * (1 + number as u32);
        store.create(handle(number), NewShare { ttl, ..small(number) }).wait().unwrap();
    }
    assert!(store.unsynced() > 300);
    store.sweep().unwrap();
    assert_eq!(store.unsynced(), 0);
    for number in 0..400 {
        claim(&store, number, number).unwrap();
    }
}
