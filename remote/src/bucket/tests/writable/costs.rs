//! Costs of a writer in requests, bytes and stored objects.

use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::Storage;

use super::super::super::open;
use super::super::super::session::WriterSession;
use super::super::super::writable::BucketWriter;
use super::super::GRACE;
use super::super::simulated::World;
use super::super::{options, somebody};
use super::{NAME, found, living, made, spent};

#[test]
fn a_commit_of_4_mib_is_one_request_and_none_without_a_change() {
    let world = World::new(1, 0);
    made(&world, 200);
    spent(&world);
    let storage = living(&world, 1).unwrap();
    // Marker and probe, the newest record with its number, this writer's, the newest again; and the
    // start of the file.
    let coming = spent(&world);
    assert_eq!(coming.len(), 7, "{coming:?}");
    let cost = |expected: usize| {
        storage.barrier().unwrap();
        let asked = spent(&world);
        assert_eq!(asked.len(), expected, "{asked:?}");
    };
    cost(0);
    let block = |byte: u8, length: usize| vec![byte; length];
    storage.write_at(0, &block(1, 4096)).unwrap();
    cost(1);
    storage.write_at(0, &block(2, 4 << 20)).unwrap();
    cost(1);
    // Room that is kept, and erasing what is erased already: nothing is sent to say nothing.
    storage.allocate(0, 4 << 20).unwrap();
    storage.punch(100 << 20, 1 << 20).unwrap();
    cost(0);
    storage.punch(0, 1 << 20).unwrap();
    cost(1);
    // More goes up in segments of 16 MiB at most while it comes.
    storage.write_at(0, &block(3, 20 << 20)).unwrap();
    cost(2 + 1);
    storage.set_len(30 << 20).unwrap();
    cost(1);
    storage.set_len(30 << 20).unwrap();
    cost(0);
    drop(storage);
    // What was written last, which is in a segment, and this writer's last record, which has it
    // again.
    let going = spent(&world);
    assert_eq!(going.len(), 2, "{going:?}");
}

#[test]
fn erasing_and_keeping_room_make_no_bytes() {
    let world = World::new(1, 0);
    made(&world, 200);
    let storage = living(&world, 1).unwrap();
    let bytes = |world: &World| world.with(|state| state.objects.values().map(Vec::len).sum::<usize>());
    let before = bytes(&world);
    storage.allocate(0, 1 << 30).unwrap();
    storage.punch(0, 1 << 30).unwrap();
    storage.barrier().unwrap();
    assert!(bytes(&world) - before < 2048, "{}", bytes(&world) - before);
    assert_eq!((storage.len().unwrap(), storage.allocated().unwrap()), (1 << 30, 0));
    assert_eq!(storage.next_data(0).unwrap(), None);
    storage.write_at(8192, &[1; 8192]).unwrap();
    assert_eq!(storage.next_data(100).unwrap(), Some(8192..16384));
    storage.barrier().unwrap();
    assert_eq!(storage.next_data(10_000).unwrap(), Some(10_000..16384));
    assert_eq!((storage.next_data(16384).unwrap(), storage.allocated().unwrap()), (None, 8192));
}

#[test]
fn a_writer_that_goes_writes_sparse_objects_anew_within_bounds_and_the_next_one_finds_nobody() {
    let world = World::new(1, 0);
    made(&world, 1);
    let one = living(&world, 1).unwrap();
    let mut wanted = vec![5; 16 << 20];
    one.write_at(0, &wanted).unwrap();
    one.barrier().unwrap();
    // Most of each segment is written again.
    for at in [0, 8 << 20] {
        one.write_at(at as u64, &vec![6; 6 << 20]).unwrap();
        wanted[at..at + (6 << 20)].fill(6);
    }
    drop(one);
    // Not covered by a barrier.
    assert!(found(&world) == vec![5; 16 << 20]);
    let two = BucketWriter::open(world.store(2), NAME.into(), &options(), false).unwrap();
    for at in [0, 8 << 20] {
        two.write_at(at as u64, &vec![6; 6 << 20]).unwrap();
    }
    two.barrier().unwrap();
    let sparse = |world: &Arc<World>| {
        let session = WriterSession::open(super::super::store(world, 7), somebody(), true).unwrap();
        session.map().sparse_objects().len()
    };
    drop(two);
    assert!(found(&world) == wanted);
    assert_eq!(sparse(&world), 0);
}

#[test]
fn what_is_dead_for_a_day_is_removed_while_the_writer_stays() {
    let world = World::new(1, 0);
    made(&world, 3);
    let mut storage = living(&world, 1).unwrap();
    let records =
        |world: &World| world.with(|state| state.objects.keys().filter(|name| name.contains("/log/")).count());
    let commit = |storage: &BucketWriter, byte: u8| {
        storage.write_at(0, &[byte; 4096]).unwrap();
        storage.barrier().unwrap();
    };
    (1..=50).for_each(|byte| commit(&storage, byte));
    world.with(|state| state.clock += GRACE + 60);
    commit(&storage, 51);
    let before = records(&world);
    assert!(before > 50, "{before}");
    // As if a minute had passed.
    for byte in 52..56 {
        *storage.last_released.get_mut() -= Duration::from_secs(61);
        commit(&storage, byte);
        storage.remove_expired();
    }
    let after = records(&world);
    assert!(before - after > 40, "{before} {after}");
    drop(storage);
    assert_eq!(found(&world)[..4096], [55; 4096]);
}

#[test]
fn an_opening_asks_for_few_objects_however_many_commits_there_were() {
    let world = World::new(1, 0);
    let mut wanted = made(&world, 100);
    wanted.resize(400 * 4096, 0);
    let requests = |world: &Arc<World>| {
        spent(world);
        drop(open(world.store(9), NAME.into(), &options()).unwrap().unwrap());
        spent(world).len()
    };
    for session in 0..30_usize {
        let storage = living(&world, 1).unwrap();
        storage.set_len(400 * 4096).unwrap();
        for commit in 0..4 {
            let (block, byte) = ((session * 4 + commit) % 64, session as u8 + 100);
            storage.write_at(block as u64 * 4096, &[byte; 4096]).unwrap();
            wanted[block * 4096..(block + 1) * 4096].fill(byte);
            storage.barrier().unwrap();
        }
        drop(storage);
        // Marker, list and record.
        let asked = requests(&world);
        assert!(asked <= 3 + 16, "{asked} in session {session}");
        assert!(found(&world) == wanted);
    }
    // A writer who stays does not gather it, and whoever reads beside it asks for all at once.
    let storage = living(&world, 1).unwrap();
    for block in 0..64_usize {
        storage.write_at(block as u64 * 4096, &[77; 4096]).unwrap();
        wanted[block * 4096..(block + 1) * 4096].fill(77);
        storage.barrier().unwrap();
    }
    assert!(requests(&world) > 60 && found(&world) == wanted);
}
