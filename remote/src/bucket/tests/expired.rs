//! Removal of expired objects: in batches, and concurrently with the commits of a mount.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use lockbox::storage::Storage;
use parking_lot::Mutex;

use super::super::objects::{BatchReply, ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::super::writable::BucketWriter;
use super::GRACE;
use super::options;
use super::simulated::World;
use super::writable::{NAME, found, living, made, spent};
use crate::RemoteOptions;
use crate::range_source::RemoteResult;

fn acquired(objects: Box<dyn ObjectStore>) -> BucketWriter {
    BucketWriter::acquire(objects, NAME.into(), &options(), true).unwrap()
}

fn records(world: &World) -> Vec<String> {
    world.with(|state| state.objects.keys().filter(|name| name.contains("/log/")).cloned().collect())
}

/// An archive with so many records that expired.
fn expired(commits: usize) -> Arc<World> {
    dead_for(GRACE + 60, commits)
}

/// An archive with so many records that are dead for this number of seconds.
fn dead_for(seconds: u64, commits: usize) -> Arc<World> {
    let world = World::new(1, 0);
    made(&world, 3);
    let storage = living(&world, 1).unwrap();
    for commit in 0..commits {
        storage.write_at(0, &[commit as u8; 4096]).unwrap();
        storage.barrier().unwrap();
    }
    storage.write_at(0, &[200; 4096]).unwrap();
    storage.barrier().unwrap();
    drop(storage);
    world.with(|state| {
        state.clock += seconds;
        state.batches = true;
    });
    spent(&world);
    world
}

fn removals(world: &World) -> Vec<String> {
    let removals = |line: &String| line.find("remove").map(|at| line[at..].to_owned());
    spent(world).iter().filter_map(removals).collect()
}

#[test]
fn a_mount_answers_before_it_removes_anything_and_asks_for_a_thousand_at_once() {
    let world = expired(1100);
    let storage = acquired(world.store(1));
    assert!(removals(&world).is_empty());
    assert!(storage.remove_expired(), "more are due");
    assert_eq!(removals(&world), ["remove batch of 1000"]);
    assert!(!storage.remove_expired());
    let rest = removals(&world);
    assert!(rest.len() == 1 && rest[0].starts_with("remove batch of 1"), "{rest:?}");
    assert!(records(&world).len() < 10, "{:?}", records(&world));
    assert!(!storage.remove_expired() && removals(&world).is_empty(), "nothing is left to do");
    storage.barrier().unwrap();
    drop(storage);
    assert_eq!(found(&world)[..4096], [200; 4096]);
}

/// A user may choose another time than a day, but not less than an hour.
#[test]
fn the_grace_period_is_an_option_of_the_writer() {
    let (day, hours) = (Duration::from_secs(GRACE), |hours: u64| Duration::from_secs(hours * 3600));
    let removed = |seconds, grace| {
        let world = dead_for(seconds, 10);
        let options = RemoteOptions { grace, ..options() };
        let storage = BucketWriter::acquire(world.store(1), NAME.into(), &options, true).unwrap();
        spent(&world);
        assert!(!storage.remove_expired());
        !removals(&world).is_empty()
    };
    assert!(!removed(3 * 3600, day) && removed(3 * 3600, hours(2)));
    assert!(!removed(GRACE + 60, hours(48)) && removed(GRACE + 60, day));
    assert!(!removed(1800, Duration::ZERO) && removed(3660, Duration::ZERO));
}

#[test]
fn an_object_that_cannot_be_removed_keeps_no_other_and_goes_later() {
    let world = expired(10);
    // Names of records descend.
    let name = records(&world)[6].clone();
    world.with(|state| state.locked = vec![name.clone()]);
    let storage = acquired(world.store(1));
    assert!(!storage.remove_expired());
    assert_eq!(removals(&world).len(), 1);
    let left = records(&world);
    assert!(left.contains(&name) && left.len() < 9, "{left:?}");
    drop(storage);
    world.with(|state| state.locked.clear());
    // The next writer has it in its list.
    drop(living(&world, 1).unwrap());
    assert!(!records(&world).contains(&name));
    assert_eq!(found(&world)[..4096], [200; 4096]);
}

#[test]
fn a_store_without_batches_is_asked_once() {
    let world = expired(10);
    world.with(|state| state.batches = false);
    let storage = acquired(world.store(1));
    storage.remove_expired();
    let removed = removals(&world);
    assert!(removed.len() > 8 && removed.iter().all(|line| !line.contains("batch")), "{removed:?}");
    assert_eq!(found(&world)[..4096], [200; 4096]);
}

/// Azure responds with 409 for a blob with a snapshot.
#[test]
fn without_batches_objects_that_cannot_be_removed_keep_no_other() {
    let world = expired(10);
    let mut locked = records(&world);
    let free = locked.remove(6);
    world.with(|state| {
        state.batches = false;
        state.locked = locked.clone();
    });
    let storage = acquired(world.store(1));
    assert!(!storage.remove_expired());
    let left = records(&world);
    assert!(locked.iter().all(|name| left.contains(name)) && !left.contains(&free), "{left:?}");
    drop(storage);
    assert_eq!(found(&world)[..4096], [200; 4096]);
}

#[test]
fn a_rejected_batch_is_removed_object_by_object_and_the_next_one_is_a_batch() {
    let world = expired(1100);
    world.with(|state| state.rejected_batches = 1);
    let storage = acquired(world.store(1));
    assert!(storage.remove_expired(), "more are due");
    let removed = removals(&world);
    assert_eq!((removed.len(), &removed[0][..]), (1001, "remove batch of 1000 REJECTED"));
    assert!(removed[1..].iter().all(|line| !line.contains("batch")), "{:?}", &removed[..3]);
    assert!(!storage.remove_expired());
    let rest = removals(&world);
    assert!(rest.len() == 1 && rest[0].starts_with("remove batch of 1"), "{rest:?}");
    assert!(records(&world).len() < 10, "{:?}", records(&world));
    drop(storage);
    assert_eq!(found(&world)[..4096], [200; 4096]);
}

/// Announces each batch, and answers none before it is allowed to.
struct Held {
    objects: Box<dyn ObjectStore>,
    entered: Mutex<Sender<()>>,
    allowed: Mutex<Receiver<()>>,
}

impl ObjectStore for Held {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.objects.create(name, bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.objects.get(name, part)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.objects.list(prefix, after, most)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.objects.remove(name)
    }

    fn remove_batch(&self, names: &[String]) -> RemoteResult<BatchReply> {
        let _ = self.entered.lock().send(());
        let _ = self.allowed.lock().recv();
        self.objects.remove_batch(names)
    }
}

#[test]
fn commits_and_the_end_of_a_mount_do_not_wait_for_a_removal() {
    let world = expired(10);
    let ((entered, has_entered), (allow, allowed)) = (mpsc::channel(), mpsc::channel());
    let held = Held { objects: world.store(1), entered: Mutex::new(entered), allowed: Mutex::new(allowed) };
    let storage = Arc::new(acquired(Box::new(held)));
    let removing = storage.clone();
    let removal = thread::spawn(move || removing.remove_expired());
    has_entered.recv_timeout(Duration::from_secs(60)).unwrap();
    let (done, is_done) = mpsc::channel();
    let committing = storage.clone();
    thread::spawn(move || {
        committing.write_at(0, &[201; 4096]).unwrap();
        committing.barrier().unwrap();
        committing.close();
        done.send(()).unwrap();
    });
    is_done.recv_timeout(Duration::from_secs(60)).expect("it waits for the removal");
    let before = records(&world).len();
    assert_eq!(found(&world)[..4096], [201; 4096]);
    // What was asked for before the end is carried out after it, and does no harm.
    drop(allow);
    removal.join().unwrap();
    assert!(records(&world).len() < before);
    assert_eq!(found(&world)[..4096], [201; 4096]);
}
