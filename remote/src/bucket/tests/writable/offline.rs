//! Behaviour and messages while the store does not respond.

use std::sync::atomic::Ordering;
use std::time::Duration;

use lockbox::Error;
use lockbox::storage::Storage;

use super::super::super::writable::BucketWriter;
use super::super::nth_request::{How, counting};
use super::super::options;
use super::super::simulated::World;
use super::{NAME, found, left, made, spent};

#[test]
fn a_barrier_that_nobody_answers_fails_with_what_is_known_and_nothing_is_written_after_it() {
    for carried_out in [false, true] {
        let world = World::new(1, 0);
        let base = left(&world, 3);
        let coming = {
            let (objects, asked) = counting(&world, u64::MAX, How::Dies);
            let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
            let coming = asked.load(Ordering::Relaxed);
            drop(storage);
            coming
        };
        let (objects, _) = counting(&world, coming, How::Away(1, carried_out));
        let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
        storage.write_at(0, &[9; 4096]).unwrap();
        let message = storage.barrier().unwrap_err();
        let Error::Io { source, .. } = &message else { panic!("{message}") };
        assert_eq!(source.kind(), std::io::ErrorKind::TimedOut);
        assert!(message.to_string().contains("the last change may or may not be in the archive"), "{message}");
        // The store answers again: what was not acknowledged is there or not, and nothing builds
        // upon it.
        storage.write_at(4096, &[9; 4096]).unwrap();
        assert!(storage.barrier().is_err());
        drop(storage);
        let mut wanted = base.clone();
        if carried_out {
            wanted[..4096].fill(9);
        }
        assert!(found(&world) == wanted, "{carried_out}");
    }
}

#[test]
fn the_same_bytes_are_sent_while_there_is_time_and_that_makes_one_commit() {
    for carried_out in [false, true] {
        let world = World::new(1, 0);
        left(&world, 3);
        let patient = crate::RemoteOptions { timeout: None, ..options() };
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(BucketWriter::open(objects, NAME.into(), &patient, true).unwrap());
        // One less: it did not go.
        let coming = asked.load(Ordering::Relaxed) - 1;
        let (objects, _) = counting(&world, coming, How::Away(1, carried_out));
        let storage = BucketWriter::open(objects, NAME.into(), &patient, true).unwrap();
        storage.write_at(0, &[9; 4096]).unwrap();
        spent(&world);
        storage.barrier().unwrap();
        let creations: Vec<String> = spent(&world).into_iter().filter(|what| what.contains("create")).collect();
        assert_eq!(creations.len(), 1 + usize::from(carried_out), "{creations:?}");
        assert!(creations.iter().all(|one| one.ends_with(creations[0].split(' ').next_back().unwrap())));
        storage.barrier().unwrap();
        assert!(spent(&world).is_empty());
        assert_eq!(found(&world)[..4096], [9; 4096]);
    }
}

#[test]
fn who_insists_waits_for_the_stores_word_and_who_hurries_does_not() {
    for carried_out in [false, true] {
        let world = World::new(1, 0);
        left(&world, 3);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(BucketWriter::open(objects, NAME.into(), &options(), true).unwrap());
        let coming = asked.load(Ordering::Relaxed) - 1;
        // An outage of so many attempts, of which the first carries segments.
        let (objects, asked) = counting(&world, coming, How::Away(40, carried_out));
        let storage = BucketWriter::open(objects, NAME.into(), &options(), true).unwrap();
        storage.retry_forever();
        storage.write_at(0, &vec![9; 20 << 20]).unwrap();
        storage.barrier().unwrap();
        assert!(asked.load(Ordering::Relaxed) >= coming + 40 && found(&world) == vec![9; 20 << 20]);
        // Without an end to the outage: whoever goes makes the last attempts.
        world.with(|state| state.away = true);
        storage.write_at(0, &[7; 4096]).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| storage.barrier());
            let before = asked.load(Ordering::Relaxed);
            while asked.load(Ordering::Relaxed) < before + 3 {
                std::thread::yield_now();
            }
            storage.close();
            let message = waiting.join().unwrap().unwrap_err();
            assert!(message.to_string().contains("may or may not be in the archive"), "{message}");
        });
        world.with(|state| state.away = false);
        assert!(storage.barrier().is_err());
        assert!(found(&world) == vec![9; 20 << 20]);
    }
}

/// The store itself is not asked before somebody asks the storage.
#[test]
fn a_store_that_is_away_at_the_end_is_asked_once() {
    let world = World::new(1, 0);
    made(&world, 3);
    let patient = crate::RemoteOptions { timeout: Some(Duration::from_secs(600)), ..options() };
    let storage = BucketWriter::open(world.store(1), NAME.into(), &patient, true).unwrap();
    storage.write_at(0, &[1; 4096]).unwrap();
    world.with(|state| state.away = true);
    spent(&world);
    drop(storage);
    assert_eq!(spent(&world).len(), 1);
}
