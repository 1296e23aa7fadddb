//! Writes while a record is in flight, or while blocks are rewritten.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};

use lockbox::storage::Storage;
use parking_lot::Mutex;

use super::super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::super::super::session::WriterSession;
use super::super::super::store::BucketStore;
use super::super::super::writable::BucketWriter;
use super::super::nth_request::{How, counting};
use super::super::simulated::World;
use super::super::{options, run_until_it_waits, somebody};
use super::{NAME, found, left, published, whole};
use crate::range_source::RemoteResult;

#[test]
fn what_is_written_while_a_record_is_on_its_way_goes_with_the_next_one() {
    for least_changes in [0, 1 << 20] {
        let world = World::new(1, 0);
        let mut now = left(&world, 64);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(BucketWriter::open(objects, NAME.into(), &options(), true).unwrap());
        // Its last request was that it goes.
        let record = asked.load(Ordering::Relaxed) - 1 + u64::from(least_changes == 0);
        let cell: Arc<OnceLock<Weak<BucketWriter>>> = Arc::default();
        let inner = cell.clone();
        // Nobody holds anything that a write needs; a part of it, more than a record has, goes up
        // at once.
        let meet = Box::new(move || {
            let storage = inner.get().unwrap().upgrade().unwrap();
            storage.write_at(8 * 4096, &[0xC1; 4096]).unwrap();
            storage.punch(20 * 4096, 4096).unwrap();
            storage.write_at(64 * 4096, &vec![0xC2; 9 << 20]).unwrap();
        });
        let (objects, _) = counting(&world, record, How::Meets(Mutex::new(Some(meet))));
        let store = Arc::new(BucketStore::new(objects, NAME.into(), options().timeout));
        let mut session = WriterSession::open_existing(store, somebody(), true).unwrap();
        session.least_changes = least_changes;
        let storage = Arc::new(BucketWriter::from_session(session, &options(), Arc::default()).unwrap());
        cell.set(Arc::downgrade(&storage)).unwrap();
        storage.write_at(0, &[0xC0; 4096]).unwrap();
        storage.barrier().unwrap();
        now[..4096].fill(0xC0);
        assert!(found(&world) == now, "what came later is in it");
        now[8 * 4096..9 * 4096].fill(0xC1);
        now[20 * 4096..21 * 4096].fill(0);
        now.resize(now.len() + (9 << 20), 0xC2);
        assert!(whole(&*storage) == now);
        storage.barrier().unwrap();
        assert!(found(&world) == now, "what came later is in none");
        // And with records that count from that one.
        storage.write_at(4096, &[0xC3; 4096]).unwrap();
        now[4096..8192].fill(0xC3);
        storage.barrier().unwrap();
        assert!(found(&world) == now);
    }
}

type Meet = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// A store in which something happens while somebody waits for a part of an object.
struct Meeting {
    objects: Box<dyn ObjectStore>,
    meet: Meet,
}

impl ObjectStore for Meeting {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.objects.create(name, bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        let got = self.objects.get(name, part);
        if matches!(part, ObjectRange::Range(..)) {
            let meet = self.meet.lock().take();
            meet.into_iter().for_each(|meet| meet());
        }
        got
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.objects.list(prefix, after, most)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.objects.remove(name)
    }
}

/// A barrier of an archive in too many pieces writes blocks anew as they are, beside whoever
/// writes.
#[test]
fn what_is_written_anew_takes_nothing_back() {
    let world = World::new(1, 0);
    // Longer than the start that is in memory.
    let mut now = vec![7; 600 * 4096];
    published(&world, &now);
    let meet = Meet::default();
    let objects = Box::new(Meeting { objects: world.store(2), meet: meet.clone() });
    let store = Arc::new(BucketStore::new(objects, NAME.into(), options().timeout));
    let mut session = WriterSession::open_existing(store, somebody(), true).unwrap();
    // Eight runs are too many.
    session.most_checkpoint = 8 * 2 * 20;
    let storage = Arc::new(BucketWriter::from_session(session, &options(), Arc::default()).unwrap());
    for block in (0..20_usize).step_by(2) {
        storage.write_at(block as u64 * 4096, &[0xA0; 4096]).unwrap();
        now[block * 4096..(block + 1) * 4096].fill(0xA0);
    }
    let (writes, written) = std::sync::mpsc::channel();
    let writer = storage.clone();
    *meet.lock() = Some(Box::new(move || {
        // Before the old bytes are written again, if it can.
        let write = move || writer.write_at(551 * 4096, &[0xB0; 4096]).unwrap();
        writes.send(run_until_it_waits(write)).unwrap();
    }));
    storage.barrier().unwrap();
    written.try_recv().expect("nothing was written anew").join().unwrap();
    now[551 * 4096..552 * 4096].fill(0xB0);
    assert!(whole(&*storage) == now);
    storage.barrier().unwrap();
    assert!(found(&world) == now);
}
