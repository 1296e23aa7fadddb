//! Tests: stops the disk at every step of a history, as a kill and as a power cut, and checks the
//! surviving state. Then real kills.

use std::collections::BTreeMap;

use super::*;
use crate::seeded::{fresh_seed, numbers};

/// State of a share as its clients observed it.
#[derive(Clone, Copy, Default)]
struct Told {
    created: bool,
    /// A claim, a revocation or a rearm was requested, with any result.
    touched: bool,
    consumed: bool,
    revoked: bool,
}

/// A history from a seed. It goes on to its end although the disk stands still from some step on.
fn history(rig: &Rig, seed: u64) -> BTreeMap<u64, Told> {
    let mut told: BTreeMap<u64, Told> = BTreeMap::new();
    let Ok(store) = SegmentStore::open_on(rig.disk.clone(), None, &rig.settings) else { return told };
    let mut random = numbers(seed);
    for step in 0..45 {
        let number = random() % 12;
        let entry = told.entry(number).or_default();
        match random() % 10 {
            0..5 => {
                let share = NewShare { claims: 1, ttl: MINUTE * 60, ..small(number) };
                entry.created |= store.create(handle(number), share).wait().is_ok();
            }
            5..8 => {
                entry.touched = true;
                entry.consumed |= store.claim(handle(number), &auth(number), id(step)).wait().is_ok();
            }
            8 => {
                entry.touched = true;
                let revoked = store.revoke(handle(number), &owner(number)).wait();
                entry.revoked |= revoked.is_ok_and(|info| info.revoked.is_some());
            }
            _ => {
                rig.clock.pass(MINUTE + Duration::from_secs(1));
                let _ = store.compact();
            }
        }
    }
    told
}

fn check(rig: &Rig, told: &BTreeMap<u64, Told>, context: &str) {
    let store = rig.open();
    for (number, told) in told {
        let claimed = store.claim(handle(*number), &auth(*number), id(9999)).wait();
        if told.consumed || told.revoked {
            assert!(claimed.is_err(), "{context}: share {number} was served again");
        } else if told.created && !told.touched {
            assert!(claimed.is_ok(), "{context}: share {number} is lost: {:?}", claimed.err());
        }
        if let Ok(claimed) = claimed {
            assert_eq!(claimed.capsule, format!("capsule of {number}"), "{context}");
        }
    }
}

fn every_stop(audit: Duration, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let rig = |disk| {
            let mut rig = Rig::new(Durability::Commit);
            rig.settings.periods.audit = audit;
            rig.on(disk)
        };
        let whole = rig(SimulatedDisk::new());
        history(&whole, seed);
        let steps = whole.disk.steps();
        assert!(steps > 60, "the history is too short: {steps}");
        for stop in 1..=steps {
            let stopped = rig(SimulatedDisk::new());
            stopped.disk.stop_at(stop);
            let told = history(&stopped, seed);
            let context = format!("seed {seed}, stopped at step {stop} of {steps}");
            let killed = stopped.on(stopped.disk.after_kill());
            check(&killed, &told, &format!("{context}, killed"));
            // A kill, and a power cut after the next start has told what it found.
            let mut random = numbers(seed ^ stop);
            let twice = killed.on(killed.disk.after_power_cut(&mut random));
            check_consumed_again(&twice, &told, &format!("{context}, killed, then a power cut"));
            let cut = stopped.on(stopped.disk.after_power_cut(&mut random));
            check(&cut, &told, &format!("{context}, power cut"));
            check_consumed_again(&cut, &told, &format!("{context}, power cut and a second start"));
        }
    }
}

/// After `check` everything is consumed or unknown.
fn check_consumed_again(rig: &Rig, told: &BTreeMap<u64, Told>, context: &str) {
    let store = rig.open();
    for number in told.keys() {
        let claimed = store.claim(handle(*number), &auth(*number), id(8888)).wait();
        assert!(claimed.is_err(), "{context}: share {number} was served again");
    }
}

#[test]
fn nothing_consumed_is_served_again_wherever_the_disk_stops() {
    every_stop(Duration::from_secs(24 * 3600), 1..4);
}

#[test]
fn nor_when_tombstones_go_with_their_segments() {
    every_stop(Duration::ZERO, 10..12);
}

/// Where a real process keeps its store, when this test is to be that process.
const CHILD: &str = "LOCKBOX_SHARE_TEST_CHILD";

#[test]
fn a_killed_process_has_given_nothing_away_twice() {
    use std::io::{BufRead, BufReader};
    let directory = tempfile::tempdir().unwrap();
    let mut random = numbers(fresh_seed());
    let (mut created, mut consumed) = (0u64, 0u64);
    for round in 0..20u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "store::segments::tests::crash::the_process_that_is_killed", "--nocapture", "--ignored"])
            .env(CHILD, format!("{}:{round}", directory.path().display()))
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut told: BTreeMap<u64, Told> = BTreeMap::new();
        let lines = 20 + random() % 400;
        let mut reader = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut note = |line: String| {
            let Some((what, number)) = line.split_once(' ').and_then(|(w, n)| Some((w, n.parse::<u64>().ok()?))) else {
                return;
            };
            let entry = told.entry(number).or_default();
            match what {
                "created" => entry.created = true,
                "asked" => entry.touched = true,
                "consumed" => entry.consumed = true,
                _ => {}
            }
        };
        reader.by_ref().take(lines as usize).for_each(|line| note(line.unwrap()));
        child.kill().unwrap();
        // What it had said before the kill still counts.
        reader.for_each(|line| note(line.unwrap_or_default()));
        child.wait().unwrap();
        let settings = SegmentSettings { background: None, ..SegmentSettings::default() };
        let store = SegmentStore::open(directory.path(), &settings).unwrap();
        for (number, told) in &told {
            let claimed = store.claim(handle(*number), &auth(*number), id(u64::MAX - 1)).wait();
            if told.consumed {
                assert!(claimed.is_err(), "round {round}: share {number} was served again");
                consumed += 1;
            } else if told.created && !told.touched {
                assert!(claimed.is_ok(), "round {round}: share {number} is lost");
                created += 1;
            }
        }
    }
    assert!(created > 20 && consumed > 20, "{created} created, {consumed} consumed");
}

#[test]
#[ignore = "is the process that another test kills"]
fn the_process_that_is_killed() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (directory, round) = told.rsplit_once(':').unwrap();
    let round: u64 = round.parse().unwrap();
    let settings = SegmentSettings { background: Some(Duration::from_millis(5)), ..SegmentSettings::default() };
    let store = Arc::new(SegmentStore::open(Path::new(directory), &settings).unwrap());
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let store = &store;
            scope.spawn(move || {
                for n in 0.. {
                    let number = (round * 4 + thread) * 1_000_000 + n;
                    store.create(handle(number), small(number)).wait().unwrap();
                    println!("\ncreated {number}");
                    if n % 2 == 0 {
                        println!("\nasked {number}");
                        store.claim(handle(number), &auth(number), id(n)).wait().unwrap();
                        println!("\nconsumed {number}");
                    }
                }
            });
        }
    });
}
