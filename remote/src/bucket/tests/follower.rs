//! Followers: each version existed, versions appear in order, and shared content is right.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lockbox::Error;
use lockbox::storage::Storage;

use super::super::version::now;
use super::super::{BucketWriter, Follower, open};
use super::GRACE;
use super::nth_request::{How, counting};
use super::simulated::{Dice, World};
use super::writable::{self, NAME, published, whole};
use super::{Compared, options, seed};
use crate::RemoteOptions;
use crate::remote_file::RemoteFile;

const MIB: u64 = 1 << 20;

fn living(world: &Arc<World>) -> BucketWriter {
    writable::living(world, 1).unwrap()
}

fn follower(world: &Arc<World>, options: &RemoteOptions) -> Follower {
    open(world.store(2), NAME.into(), options).unwrap().unwrap()
}

fn change(dice: &mut Dice, compared: &mut Compared<'_>) {
    // Above and below the end of what is fetched at the opening.
    let (offset, length) = (dice.below(4 * MIB) & !4095, 1 + dice.below(40_000));
    match dice.below(10) {
        0 => compared.punch(offset, length).unwrap(),
        1 => compared.set_len(offset.max(64 << 10)).unwrap(),
        2 => compared.allocate(offset, length).unwrap(),
        _ => {
            let data: Vec<u8> = (0..length).map(|_| dice.below(256) as u8).collect();
            compared.write(offset, &data).unwrap();
        }
    }
}

#[test]
fn each_moment_is_what_its_writer_made_durable_and_older_ones_stay_what_they_were() {
    let first = seed(1);
    for seed in first..first + 12 {
        let place = tempfile::tempdir().unwrap();
        let cached = RemoteOptions {
            cache_directory: Some(place.path().to_owned()),
            cache_bytes: Some([0, MIB, 16 * MIB][(seed % 3) as usize]),
            ..options()
        };
        let mut dice = Dice::of(seed);
        let world = World::new(seed, 0);
        let mut now = vec![3; 3 * MIB as usize];
        published(&world, &now);
        let mut follower = follower(&world, &cached);
        let mut seen: Vec<(Arc<RemoteFile>, Vec<u8>)> = Vec::new();
        for _ in 0..3 {
            let living = living(&world);
            for _ in 0..dice.below(20) {
                for _ in 0..1 + dice.below(4) {
                    change(&mut dice, &mut Compared { storage: &living, now: &mut now });
                }
                living.barrier().unwrap();
                // Some are passed over.
                if dice.one_in(3) {
                    continue;
                }
                follower.poll().unwrap();
                assert!(whole(&**follower.file()) == now, "SEED={seed}");
                seen.push((follower.file().clone(), now.clone()));
                let (file, was) = &seen[dice.below(seen.len() as u64) as usize];
                assert!(whole(&**file) == *was, "SEED={seed}: a moment that was");
            }
        }
        drop(follower);
        // The next reader has what was kept on disk of moments before.
        assert!(whole(&**self::follower(&world, &cached).file()) == now, "SEED={seed}");
    }
}

fn asked(world: &World) -> Vec<String> {
    let all: Vec<String> = world.with(|state| std::mem::take(&mut state.requests));
    let words = |line: &String| line.split(' ').nth(2).map(str::to_owned);
    all.iter().filter(|line| line.split(' ').nth(1) == Some("2")).filter_map(words).collect()
}

#[test]
fn nothing_new_costs_one_request_and_what_did_not_change_none() {
    let world = World::new(1, 0);
    let mut now = vec![3; 6 * MIB as usize];
    published(&world, &now);
    let mut follower = follower(&world, &options());
    assert!(whole(&**follower.file()) == now);
    asked(&world);
    follower.poll().unwrap();
    assert_eq!(asked(&world), ["get"]);
    let living = living(&world);
    // A record that says only that somebody came is no new moment.
    let (before, moment) = (follower.file().clone(), follower.sequence());
    follower.poll().unwrap();
    assert!(Arc::ptr_eq(&before, follower.file()) && follower.sequence() == moment);
    assert_eq!(asked(&world), ["get", "list"]);
    // One page at the file's start, which is fetched at once; one behind it, which is fetched when
    // it is read.
    let mut compared = Compared { storage: &living, now: &mut now };
    compared.write(4096, &[5; 4096]).unwrap();
    compared.write(5 * MIB, &[6; 4096]).unwrap();
    living.barrier().unwrap();
    asked(&world);
    follower.poll().unwrap();
    assert!(follower.sequence() > moment);
    // What it has itself comes with the record.
    assert_eq!(asked(&world), ["get", "list"]);
    let behind = |file: &RemoteFile| {
        let mut bytes = vec![0; 4 * MIB as usize];
        file.read_at(2 * MIB, &mut bytes).unwrap();
        bytes
    };
    let reads = follower.file().stats().reads;
    assert!(behind(follower.file()) == now[2 * MIB as usize..]);
    assert_eq!(follower.file().stats().reads - reads, 1, "a read of a later version counts once");
    // The piece of 64 KiB in which the second one lies is of two objects now, of which one is that
    // record.
    assert_eq!(asked(&world), ["get"]);
    // Who reads the moment before has what it had.
    assert!(behind(&before) == vec![3; 4 * MIB as usize]);
    assert_eq!(asked(&world), Vec::<String>::new());
}

#[test]
fn who_slept_for_days_goes_on_with_the_newest_and_what_is_gone_is_stale() {
    let world = World::new(1, 0);
    let mut now = vec![3; 6 * MIB as usize];
    published(&world, &now);
    let living = living(&world);
    let mut follower = follower(&world, &options());
    let before = follower.file().clone();
    for day in 1..4 {
        Compared { storage: &living, now: &mut now }.write(0, &vec![day; 6 * MIB as usize]).unwrap();
        living.barrier().unwrap();
        world.with(|state| state.clock += GRACE + 60);
    }
    drop(living);
    drop(self::living(&world));
    // It does not see that the next number was taken.
    follower.poll_by(&|| now_plus(60)).unwrap();
    assert!(Arc::ptr_eq(&before, follower.file()), "the record behind the one that it read is still there");
    follower.poll_by(&|| now_plus(4 * GRACE)).unwrap();
    assert!(whole(&**follower.file()) == now);
    let stale = before.read_at(5 * MIB, &mut [0; 4096]).unwrap_err();
    let is_stale = |error: &Error| matches!(error, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::StaleNetworkFileHandle);
    assert!(is_stale(&stale), "{stale}");
}

fn now_plus(seconds: u64) -> Duration {
    now() + Duration::from_secs(seconds)
}

#[test]
fn a_record_of_another_history_and_a_store_that_went_back_are_told_and_not_followed() {
    let world = World::new(1, 0);
    let mut now = vec![3; 2 * MIB as usize];
    published(&world, &now);
    let living = living(&world);
    let mut step = |byte: u8| {
        Compared { storage: &living, now: &mut now }.write(MIB, &[byte; 4096]).unwrap();
        living.barrier().unwrap();
    };
    step(4);
    let old = world.with(|state| state.objects.clone());
    step(5);
    let mut follower = follower(&world, &options());
    step(6);
    let newest = |objects: &std::collections::BTreeMap<String, Vec<u8>>| {
        objects.keys().find(|name| name.contains("/log/")).unwrap().clone()
    };
    let new = world.with(|state| state.objects.clone());
    let moment = follower.sequence();
    // The store of before this follower's moment, where another writer goes on.
    world.with(|state| state.objects = old.clone());
    assert!(matches!(follower.poll_by(&|| now_plus(2 * 3600)), Err(Error::Damaged(_))));
    let other_one = self::living(&world);
    Compared { storage: &other_one, now: &mut vec![0; MIB as usize] }.write(MIB, &[7; 4096]).unwrap();
    other_one.barrier().unwrap();
    let other = world.with(|state| state.objects[&newest(&state.objects)].clone());
    // Its record under a number that follows.
    world.with(|state| {
        state.objects = new.clone();
        state.objects.insert(newest(&new), other);
    });
    assert!(matches!(follower.poll(), Err(Error::Damaged(_))));
    assert_eq!(follower.sequence(), moment);
    world.with(|state| state.objects = new);
    follower.poll().unwrap();
    assert!(follower.sequence() > moment);
}

#[test]
fn who_slept_and_is_not_answered_at_once_is_not_told_that_nothing_is_new() {
    // Any request of the first look after it may fail, and what followed upon its moment is gone.
    let (mut failed, mut ended) = (0, false);
    for fault in 0.. {
        let world = World::new(1, 0);
        let mut bytes = vec![3; 3 * MIB as usize];
        published(&world, &bytes);
        let living = living(&world);
        let mut commit = |byte: u8| {
            living.write_at(0, &[byte; 4096]).unwrap();
            bytes[..4096].fill(byte);
            *living.last_released.lock() = Instant::now() - Duration::from_secs(3600);
            living.barrier().unwrap();
            living.remove_expired();
            world.with(|state| state.clock += GRACE + 60);
        };
        commit(1);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(open(objects, NAME.into(), &options()).unwrap());
        let opening = asked.load(Ordering::Relaxed);
        let (objects, asked) = counting(&world, opening + fault, How::Away(1, false));
        let mut follower = open(objects, NAME.into(), &options()).unwrap().unwrap();
        let awake = now();
        (2..7).for_each(&mut commit);
        let later = awake + Duration::from_secs(5 * (GRACE + 60));
        if follower.poll_by(&|| later).is_ok() {
            assert!(asked.load(Ordering::Relaxed) <= opening + fault, "request {fault} was told as answered");
            ended = true;
            break;
        }
        failed += 1;
        follower.poll_by(&|| later + Duration::from_secs(1)).unwrap();
        assert!(whole(&**follower.file()) == bytes, "request {fault}");
    }
    assert!(ended && failed > 2, "{failed}");
}

/// Records have numbers, which are given again when a store is set back to an older state and
/// written on.
#[test]
fn what_is_kept_of_another_history_is_forgotten_when_it_is_told() {
    let world = World::new(1, 0);
    let place = tempfile::tempdir().unwrap();
    let cached = RemoteOptions { cache_directory: Some(place.path().into()), cache_bytes: Some(32 << 20), ..options() };
    let mut now = vec![3; 6 * MIB as usize];
    published(&world, &now);
    let one = living(&world);
    let commit = |living: &BucketWriter, now: &mut Vec<u8>, at: u64, byte: u8| {
        Compared { storage: living, now }.write(at, &[byte; 4096]).unwrap();
        living.barrier().unwrap();
    };
    commit(&one, &mut now, 5 * MIB, 4);
    let (old, mut then) = (world.with(|state| state.objects.clone()), now.clone());
    commit(&one, &mut now, 5 * MIB, 5);
    commit(&one, &mut now, 5 * MIB, 6);
    commit(&one, &mut now, 0, 9);
    assert!(whole(&**follower(&world, &cached).file()) == now);
    world.with(|state| state.objects = old);
    let other = living(&world);
    commit(&other, &mut then, 5 * MIB, 7);
    commit(&other, &mut then, 0, 9);
    // A thread of the previous file, or a child process of another test before its exec, may hold
    // the lock of the cache.
    let begun = Instant::now();
    let follower = loop {
        let follower = follower(&world, &cached);
        if follower.file().has_disk_cache() {
            break follower;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "the cache is locked");
        std::thread::yield_now();
    };
    assert!(whole(&**follower.file()) != then, "nothing is of another history, and this test shows nothing");
    // As who opens a page does that is not what it should be.
    follower.file().evict(5 * MIB, 4096).unwrap();
    assert!(whole(&**follower.file()) == then);
}
