//! Power failures and killed processes at every operation of a recorded run.
//!
//! - The recovered tree is that after a change no older than the last fsync that returned, sound in
//!   structure, counts and space, and unlinked files are reclaimed.
//! - Each snapshot has the tree of its time.
//! - During a restore each path is in the old state or in the snapshot's state, and the same
//!   restore completes it.
//! - The file of a backup, whose host crashes as well, has the previous version or the new one, and
//!   the next backup continues from there.
//!
//! `SEED=17 cargo test -p lockbox --lib fs::tests::crash` runs all states of one seed; a violation
//! names its seed, and the same seed gives the same states in the same order. The long campaign is
//! `STATES=1000000 tests/campaign/crash.sh`.

mod copies;
mod history;
mod judge;
mod seen;
mod states;
mod workload;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub(super) use seen::{Seen, see};
use states::{Plan, Tally, explore};

use crate::env::variable;

/// Checks at least `wanted` states, seed after seed on two threads. `plan` returns the plan of a
/// seed.
fn campaign(first_seed: u64, wanted: u64, plan: Plan) -> Tally {
    let next = AtomicU64::new(first_seed);
    let done = AtomicU64::new(0);
    let started = Instant::now();
    let mut total = Tally::default();
    std::thread::scope(|scope| {
        let worker = || {
            let mut tally = Tally::default();
            while done.load(Ordering::Relaxed) < wanted {
                let seed = next.fetch_add(1, Ordering::Relaxed);
                let found = explore(seed, plan);
                let now = done.fetch_add(found.states, Ordering::Relaxed) + found.states;
                if now / 100_000 != (now - found.states) / 100_000 {
                    println!("{now} states after seed {seed}, {} s", started.elapsed().as_secs());
                }
                tally.add(&found);
            }
            tally
        };
        let workers: Vec<_> = (0..2).map(|_| scope.spawn(worker)).collect();
        for worker in workers {
            match worker.join() {
                Ok(tally) => total.add(&tally),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
    });
    let last = next.load(Ordering::Relaxed) - 1;
    println!("seeds {first_seed}..={last}, {} s: {total:?}", started.elapsed().as_secs());
    println!("summary: {total}");
    total
}

#[test]
fn every_crash_gives_the_tree_of_a_moment_no_older_than_the_last_fsync() {
    if let Some(seed) = variable("SEED") {
        let tally = explore(seed, Plan { states: variable("STATES").unwrap_or(u64::MAX), ordered: false });
        println!("seed {seed}: {tally:?}");
        return;
    }
    // Many seeds with a few states each find more than a few seeds with many, for less time.
    let states = variable("STATES").unwrap_or(6_000);
    let tally = campaign(1, states, Plan { states: 120, ordered: false });
    assert!(tally.states >= states && tally.doubles >= 1000, "{tally:?}");
    // All possible events occurred.
    assert!(tally.snapshots > states / 10, "{tally:?}");
    assert!(tally.completed > 100 && tally.restored > tally.completed + 10, "{tally:?}");
    assert!(tally.copies_old > 100 && tally.copies_new > 100 && tally.copies_begun > 100, "{tally:?}");
    assert!(tally.backed_up > 100, "{tally:?}");
    assert!(tally.fallbacks > 0 && tally.closed > 0 && tally.read_errors > 0 && tally.failed_barriers > 0, "{tally:?}");
}

#[test]
fn where_each_barrier_is_a_whole_every_crash_gives_the_last_one_and_nothing_is_ever_undone() {
    let tally = campaign(1, 2_000, Plan { states: 100, ordered: true });
    assert!(tally.states >= 2_000 && tally.doubles > 50 && tally.snapshots > 100 && tally.closed > 0, "{tally:?}");
    assert_eq!(tally.fallbacks, 0, "{tally:?}");
}

#[test]
#[ignore = "hours: the campaign of tests/RELIABILITY.md"]
fn crash_campaign() {
    let wanted = variable("STATES").unwrap_or(1_000_000);
    let tally = campaign(variable("SEED").unwrap_or(1000), wanted, Plan { states: 4000, ordered: false });
    assert!(tally.states >= wanted);
}
