//! Replacement of a whole archive: the old or the new content exists after a crash or a takeover at
//! any request, and no garbage stays forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lockbox::storage::Storage;
use lockbox::{Error, Result};

use super::super::writable::BucketWriter;
use super::super::{ObjectCheck, check_objects, open};
use super::GRACE;
use super::nth_request::{How, counting};
use super::options;
use super::simulated::World;
use super::writable::{NAME, found, living, made, overtaken, spent, whole};

fn examined(world: &Arc<World>) -> ObjectCheck {
    let examined = check_objects(world.store(9), NAME.into(), &options(), true, &mut |_, _| Ok(())).unwrap();
    assert_eq!(examined.faults, Vec::<String>::new());
    examined
}

/// What is to be there: segments, holes, and pages that the record has itself.
fn new_bytes() -> Vec<u8> {
    let mut bytes = vec![0xC1; 17 << 20];
    bytes[3 << 20..5 << 20].fill(0);
    bytes
}

/// Writes the archive anew, reads that back from the store, and puts it in the place of what is
/// there.
fn renew(storage: &dyn Storage) -> Result<()> {
    let (next, bytes) = (storage.begin_replace()?, new_bytes());
    let fresh = next.storage();
    assert_eq!(fresh.len()?, 0);
    fresh.write_at(0, &bytes[..16 << 20])?;
    fresh.barrier()?;
    fresh.evict(0, fresh.len()?)?;
    fresh.write_at(16 << 20, &bytes[16 << 20..])?;
    let mut read = vec![0; bytes.len()];
    fresh.read_at(0, &mut read)?;
    assert!(read == bytes);
    drop(fresh);
    next.publish()
}

/// A day passes, and a writer comes and goes.
fn a_day_later(world: &Arc<World>) {
    world.with(|state| state.clock += GRACE + 60);
    drop(living(world, 4).unwrap());
}

fn undisturbed() -> u64 {
    let world = World::new(1, 0);
    made(&world, 3);
    let (objects, asked) = counting(&world, u64::MAX, How::Dies);
    let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
    renew(&storage).unwrap();
    drop(storage);
    asked.load(Ordering::Relaxed)
}

#[test]
fn what_takes_the_place_of_all_is_one_commit_and_what_was_there_stays_for_a_day() {
    let world = World::new(1, 0);
    let old = made(&world, 3);
    let reader = open(world.store(9), NAME.into(), &options()).unwrap().unwrap();
    let storage = living(&world, 1).unwrap();
    storage.write_at(0, &[9; 4096]).unwrap();
    spent(&world);
    renew(&storage).unwrap();
    let records = spent(&world).iter().filter(|asked| asked.contains("create") && asked.contains("/log/")).count();
    assert_eq!(records, 2, "what was written before, and the new one");
    // It shows what it showed, and takes nothing more.
    let mut before = old.clone();
    before[..4096].fill(9);
    assert!(whole(&storage) == before);
    let late = storage.write_at(0, &[8; 4096]).and_then(|()| storage.barrier());
    assert!(matches!(late, Err(Error::ReadOnly(_))), "{late:?}");
    drop(storage);
    assert!(spent(&world).iter().all(|asked| !asked.contains("create")), "it said with its commit that it goes");
    assert!(found(&world) == new_bytes());
    assert!(whole(&**reader.file()) == old);
    assert!(examined(&world).dead.objects > 0);
    // Nobody is in the way of the next one.
    drop(BucketWriter::open(world.store(5), NAME.into(), &options(), false).unwrap());
    (0..3).for_each(|_| a_day_later(&world));
    assert!(found(&world) == new_bytes());
    assert_eq!(examined(&world).unnamed.objects, 0);
    let segments = world.with(|state| state.objects.keys().filter(|name| name.contains("/seg/")).count() as u64);
    assert!(segments <= examined(&world).needed.objects);
}

#[test]
fn who_dies_between_any_two_requests_leaves_the_archive_or_what_takes_its_place() {
    let all = undisturbed();
    let (mut old, mut new) = (0, 0);
    for end in 0..all {
        for how in [How::Dies, How::Silent] {
            let world = World::new(1, 0);
            let base = made(&world, 3);
            let (objects, _) = counting(&world, end, how);
            let opened = BucketWriter::open(objects, NAME.into(), &options(), true);
            let done = opened.as_ref().map_err(Error::clone).and_then(|storage| renew(storage));
            let there = found(&world);
            assert!(there == base || there == new_bytes(), "request {end} of {all}");
            assert!(done.is_err() || there == new_bytes(), "request {end} of {all}");
            if there == base {
                old += 1
            } else {
                new += 1
            }
            drop(opened);
            assert!(found(&world) == there, "request {end}");
            // What is not needed goes, and nothing else.
            (0..4).for_each(|_| a_day_later(&world));
            assert!(found(&world) == there, "request {end}");
            assert_eq!(examined(&world).unnamed.objects, 0, "request {end}");
        }
    }
    assert!(old > 10 && new > 0, "{old} {new}");
}

#[test]
fn who_was_taken_over_from_replaces_nothing_and_takes_back_what_went_up() {
    let all = undisturbed();
    let mut fenced = 0;
    for end in 0..all {
        let world = World::new(1, 0);
        made(&world, 3);
        let (theirs, how) = overtaken(&world);
        let (objects, _) = counting(&world, end, how);
        let opened = BucketWriter::open(objects, NAME.into(), &options(), true);
        let done = opened.as_ref().map_err(Error::clone).and_then(|storage| renew(storage));
        drop(opened);
        if let (Err(error), Some(theirs)) = (done, theirs.lock().clone()) {
            assert!(matches!(error, Error::InUse(_)), "request {end}: {error}");
            assert!(found(&world) == theirs, "request {end}");
            fenced += 1;
            assert_eq!(examined(&world).unnamed.objects, 0, "request {end}");
        }
    }
    assert!(fenced >= 5, "{fenced} of {all}");
}

#[test]
fn what_is_given_up_goes_with_its_writer_and_without_a_network_one_request_is_lost() {
    for away in [false, true] {
        let world = World::new(1, 0);
        let old = made(&world, 3);
        let storage = living(&world, 1).unwrap();
        let next = storage.begin_replace().unwrap();
        next.storage().write_at(0, &new_bytes()).unwrap();
        next.storage().evict(0, u64::MAX).unwrap();
        assert!(examined(&world).unnamed.objects > 0);
        drop(next);
        // It can be tried again, or something else be done.
        storage.write_at(0, &old[..4096]).unwrap();
        storage.barrier().unwrap();
        world.with(|state| state.away = away);
        spent(&world);
        drop(storage);
        let asked = spent(&world);
        world.with(|state| state.away = false);
        assert!(found(&world) == old);
        match away {
            true => assert_eq!(asked.len(), 1, "{asked:?}"),
            false => assert_eq!(examined(&world).unnamed.objects, 0, "{asked:?}"),
        }
        (0..3).for_each(|_| a_day_later(&world));
        assert_eq!(examined(&world).unnamed.objects, 0);
    }
}

#[test]
fn when_nobody_answers_the_last_request_that_is_told_and_nothing_of_the_new_is_taken_back() {
    for carried_out in [false, true] {
        let world = World::new(1, 0);
        let old = made(&world, 3);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
        renew(&storage).unwrap();
        let last = asked.load(Ordering::Relaxed) - 1;
        drop(storage);
        let world = {
            drop(world);
            World::new(1, 0)
        };
        made(&world, 3);
        let (objects, _): (_, Arc<AtomicU64>) = counting(&world, last, How::Away(1, carried_out));
        let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
        let message = renew(&storage).unwrap_err();
        assert!(message.to_string().contains("the last change may or may not be in the archive"), "{message}");
        drop(storage);
        assert!(found(&world) == if carried_out { new_bytes() } else { old });
        assert_eq!(examined(&world).faults.len(), 0);
    }
}
