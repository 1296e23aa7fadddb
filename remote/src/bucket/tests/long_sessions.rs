//! Writers that run for days, or have a store that refused data.

use std::sync::Arc;
use std::time::Duration;

use lockbox::storage::Storage;

use super::super::BucketWriter;
use super::super::session::WriterSession;
use super::simulated::World;
use super::writable::{found, living, made, published, spent, whole};
use super::{Compared, GRACE, options, somebody, store};

/// The base of what a writer reads has pieces of many objects: what of them it wrote anew dies, and
/// is removed while it stays.
#[test]
fn a_writer_that_stays_for_days_reads_what_lies_beside_what_was_removed() {
    let world = World::new(1, 0);
    // More than the start that is in memory, and than a record has itself.
    let mut now = vec![7; 1200 * 4096];
    published(&world, &now);
    let commit = |storage: &BucketWriter, now: &mut Vec<u8>, byte: u8| {
        for block in (450..650_u64).step_by(2) {
            Compared { storage, now: &mut *now }.write(block * 4096, &[byte; 4096]).unwrap();
        }
        storage.barrier().unwrap();
    };
    commit(&living(&world, 1).unwrap(), &mut now, 0xA0);
    let records = |world: &Arc<World>| -> Vec<String> {
        world.with(|state| state.objects.keys().filter(|name| name.contains("/log/")).cloned().collect())
    };
    let before = records(&world);
    let mut storage = living(&world, 1).unwrap();
    commit(&storage, &mut now, 0xB0);
    world.with(|state| state.clock += GRACE + 60);
    for byte in 0xC0..0xC4 {
        *storage.last_released.get_mut() -= Duration::from_secs(61);
        commit(&storage, &mut now, byte);
        storage.remove_expired();
    }
    world.with(|state| state.clock += GRACE + 60);
    for byte in 0xD0..0xD4 {
        *storage.last_released.get_mut() -= Duration::from_secs(61);
        commit(&storage, &mut now, byte);
        storage.remove_expired();
    }
    let after = records(&world);
    assert!(before.iter().any(|name| !after.contains(name)), "nothing was removed: {before:?} {after:?}");
    spent(&world);
    let mut block = [0; 4096];
    storage.read_at(501 * 4096, &mut block).unwrap();
    assert_eq!(block, [7; 4096]);
    let asked = spent(&world);
    // Each of them is there: nothing had to be looked for.
    assert!(asked.iter().all(|asked| asked.contains(" get ")), "{asked:?}");
    assert!(whole(&storage) == now);
}

#[test]
fn what_did_not_go_up_is_still_read_by_who_wrote_it() {
    let world = World::new(1, 0);
    let mut now = made(&world, 3);
    let storage = living(&world, 2).unwrap();
    world.with(|state| state.away = true);
    // Whether it is known by then that the first of it does not go up is up to chance.
    let _ = storage.write_at(4096, &vec![9; 9 << 20]);
    now.truncate(4096);
    now.resize(4096 + (9 << 20), 9);
    assert!(storage.buffer.wait_uploads(false).is_err());
    world.with(|state| state.away = false);
    assert!(storage.barrier().is_err());
    assert!(whole(&storage) == now);
}

/// A checkpoint stores each object, too: these have one run each, and none is sparse.
#[test]
fn an_archive_of_many_small_objects_is_repacked_before_its_checkpoint_is_too_long() {
    let world = World::new(1, 0);
    let mut now = made(&world, 3);
    let mut session = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
    (session.most_checkpoint, session.least_changes) = (4000, 0);
    let storage = BucketWriter::from_session(session, &options(), Arc::default()).unwrap();
    for block in (10..150).step_by(2) {
        Compared { storage: &storage, now: &mut now }.write(block * 4096, &[block as u8; 4096]).unwrap();
        storage.barrier().unwrap();
    }
    assert!(found(&world) == now);
}
