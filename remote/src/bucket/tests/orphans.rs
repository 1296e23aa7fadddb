//! Objects that no record names, and writers that abandon a backup.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use lockbox::Error;
use parking_lot::Mutex;

use super::super::Bucket;
use super::super::layout::{
    BLOCK, MAX_BLOCKS, MAX_TOMBSTONES, RecordBody, RecordKind, Tombstone, Trailer, encode_record,
};
use super::super::map::ObjectId;
use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore, object_path};
use super::super::session::{InlinePages, WriterSession};
use super::super::store::BucketStore;
use super::GRACE;
use super::options;
use super::simulated::World;
use super::somebody;
use super::store;
use crate::RemoteOptions;
use crate::hex;
use crate::range_source::{RemoteError, RemoteResult};

fn bucket(world: &Arc<World>) -> Bucket {
    Bucket::open(world.store(1), "s3://b/p".into(), &options(), true).unwrap()
}

fn count(world: &World, part: &str) -> usize {
    world.with(|state| state.objects.keys().filter(|name| name.contains(part)).count())
}

fn spent(world: &World) -> Vec<String> {
    world.with(|state| std::mem::take(&mut state.requests))
}

/// Has so many segments sent that nothing names.
fn send(bucket: &mut Bucket, segments: u64) {
    bucket.create_empty().unwrap().write_at(0, &vec![7; (segments * (8 << 20)) as usize]).unwrap();
    bucket.wait_settled();
}

/// A day passes, and a writer comes and goes.
fn a_day_later(world: &Arc<World>) {
    world.with(|state| state.clock += GRACE + 60);
    drop(bucket(world));
}

#[test]
fn who_leaves_without_a_network_asks_once() {
    let world = World::new(1, 0);
    // Patience that would be spent on each request.
    let options = RemoteOptions { timeout: Some(Duration::from_millis(500)), ..options() };
    let mut one = Bucket::open(world.store(1), "s3://b/p".into(), &options, true).unwrap();
    send(&mut one, 5);
    world.with(|state| state.away = true);
    spent(&world);
    drop(one);
    let asked = spent(&world);
    assert_eq!(asked.len(), 1, "{asked:?}");
    world.with(|state| state.away = false);
    // No record said that it went, so the next one looks for what it left.
    assert!(count(&world, "/seg/") >= 2);
    drop(bucket(&world));
    a_day_later(&world);
    a_day_later(&world);
    assert_eq!(count(&world, "/seg/"), 0);
}

#[test]
fn a_writer_that_may_not_remove_asks_once_and_what_it_leaves_goes_later() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    send(&mut one, 5);
    world.with(|state| state.keeps = true);
    spent(&world);
    drop(one);
    let asked = spent(&world);
    assert_eq!(asked.iter().filter(|what| what.contains("remove")).count(), 1, "{asked:?}");
    let left = count(&world, "/seg/");
    assert!(left >= 2);
    // It said that it went, and what is dead: nobody has to look for that.
    world.with(|state| state.clock += GRACE + 60);
    spent(&world);
    drop(bucket(&world));
    world.with(|state| state.clock += GRACE + 60);
    drop(bucket(&world));
    let asked = spent(&world);
    assert!(!asked.iter().any(|what| what.contains("list") && what.contains("/seg/")), "{asked:?}");
    assert_eq!(asked.iter().filter(|what| what.contains("remove")).count(), 1, "one for what is due: {asked:?}");
    assert_eq!(count(&world, "/seg/"), left);
    world.with(|state| state.keeps = false);
    drop(bucket(&world));
    assert_eq!(count(&world, "/seg/"), 0);
}

#[test]
fn who_has_no_time_left_removes_nothing_and_calls_it_dead() {
    let world = World::new(1, 0);
    let mut one = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
    let name = format!("{}/seg/{}", hex(&one.incarnation), hex(&[1; 32]));
    world.with(|state| state.objects.insert(name.clone(), vec![]));
    let id = super::super::map::ObjectId::Segment([1; 32]);
    assert!(one.discard_uploads(vec![id], Vec::new(), std::time::Instant::now()));
    let map = one.map().clone();
    one.commit(map, Vec::new(), 0, RecordKind::Close).unwrap();
    assert!(world.with(|state| state.objects.contains_key(&name)));
    a_day_later(&world);
    a_day_later(&world);
    assert!(!world.with(|state| state.objects.contains_key(&name)));
}

#[test]
fn who_was_overtaken_takes_back_what_it_sent() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    send(&mut one, 3);
    one.session.least_changes = 0;
    let two = bucket(&world);
    assert!(matches!(one.publish(), Err(Error::InUse(_))));
    assert_eq!((count(&world, "/seg/"), count(&world, "/map/")), (0, 0));
    drop(two);
}

#[test]
fn what_does_not_fit_into_a_list_of_the_dead_is_found_by_the_next_writer() {
    let world = World::new(1, 0);
    let mut one = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
    let map = one.map().clone();
    // A record that is not needed any more has to fit before all that can be listed.
    one.commit(map.clone(), Vec::new(), BLOCK, RecordKind::Commit).unwrap();
    let prefix = hex(&one.incarnation);
    drop(one);
    world.with(|state| {
        for number in 0..(MAX_TOMBSTONES + 1500) as u64 {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&number.to_le_bytes());
            state.objects.insert(format!("{prefix}/seg/{}", hex(&hash)), Vec::new());
        }
    });
    // It finds them, and the next but one removes what it called dead.
    drop(bucket(&world));
    (0..5).for_each(|_| a_day_later(&world));
    assert_eq!(count(&world, "/seg/"), 0);
    // The records of those who came stay, the newest one, and that of before, which is dead since a
    // moment ago.
    assert_eq!(count(&world, "/log/"), 7 + 2);
}

/// Removes one object and no more.
struct Grudging {
    objects: Box<dyn ObjectStore>,
    removed: AtomicBool,
}

impl ObjectStore for Grudging {
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
        match self.removed.swap(true, Ordering::Relaxed) {
            false => self.objects.remove(name),
            true => Err(RemoteError::Denied("you may not".into())),
        }
    }
}

/// An enemy's list of runs that lie over each other is not taken apart into all that they name.
#[test]
fn what_a_list_of_the_dead_names_many_times_is_dead_once() {
    let world = World::new(1, 0);
    let incarnation = WriterSession::open(store(&world, 1), somebody(), true).unwrap().incarnation;
    let run = |first| Tombstone { id: ObjectId::Log(first), extra: MAX_BLOCKS, since: 5 };
    let dead: Vec<Tombstone> = (0..100).map(|number| run(1 + number % 3)).collect();
    let trailer = Trailer { kind: RecordKind::Close, incarnation, sequence: 10_000, epoch: 1, ..Trailer::default() };
    let (bytes, _) =
        encode_record(&trailer, &[], &RecordBody { changes: Vec::new(), tombstones: dead, writer: somebody() });
    world.with(|state| state.objects.insert(object_path(&incarnation, &ObjectId::Log(10_000)), bytes));
    let objects = Grudging { objects: world.store(1), removed: AtomicBool::new(false) };
    let grudging = Arc::new(BucketStore::new(Box::new(objects), "s3://b/p".into(), options().timeout));
    let mut session = WriterSession::open(grudging, somebody(), true).unwrap();
    assert_eq!(session.remove_expired().0, 1);
    session.close().unwrap();
    let (_, said) = store(&world, 1).read_record(&incarnation, session.newest.sequence).unwrap().unwrap();
    assert!(said.tombstones.len() < 10, "{} entries", said.tombstones.len());
    let named: Vec<ObjectId> = said.tombstones.iter().flat_map(|dead| dead.ids()).collect();
    assert_eq!(named.iter().collect::<std::collections::HashSet<_>>().len(), named.len());
}

#[test]
fn what_an_overtaken_writer_sent_late_is_found_some_day() {
    let world = World::new(1, 0);
    drop(bucket(&world));
    let prefix = world.with(|state| state.objects.keys().next().unwrap()[..32].to_owned());
    let late = format!("{prefix}/seg/{}", hex(&[9; 32]));
    world.with(|state| state.objects.insert(late.clone(), vec![]));
    (0..18).for_each(|_| a_day_later(&world));
    assert!(!world.with(|state| state.objects.contains_key(&late)));
}

#[test]
fn a_writer_that_commits_all_day_makes_small_records_and_leaves_none_of_them() {
    let world = World::new(1, 0);
    let mut one = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
    let largest = |world: &World| {
        world.with(|state| {
            state.objects.iter().filter(|(name, _)| name.contains("/log/")).map(|(_, bytes)| bytes.len()).max()
        })
    };
    let commits = MAX_TOMBSTONES as u64 + 5000;
    for number in 0..commits {
        world.with(|state| state.clock += GRACE / commits);
        // One of a hundred is needed for longer.
        let block = if number % 100 == 0 { 1 + number / 100 } else { 0 };
        let inline = vec![InlinePages { block, pages: vec![1; BLOCK as usize] }];
        one.commit(one.map().clone(), inline, BLOCK * (commits / 100 + 2), RecordKind::Commit).unwrap();
    }
    let live = commits / 100;
    assert!(largest(&world).unwrap() < 40 << 10, "{:?}", largest(&world));
    assert!(count(&world, "/log/") as u64 > commits, "nothing is dead for a day");
    for _ in 0..2 {
        world.with(|state| state.clock += GRACE + 3600);
        one.commit(one.map().clone(), Vec::new(), one.newest.length, RecordKind::Commit).unwrap();
        assert!(one.remove_expired().1.is_none());
    }
    // Its first record stays, what is needed, and what died since.
    let stays = count(&world, "/log/") as u64 - live;
    assert!((2..10).contains(&stays), "{stays}");
    // What is removed in parts leaves the rest to be removed.
    let mut two = WriterSession::open(store(&world, 2), somebody(), true).unwrap();
    for _ in 0..300 {
        let inline = vec![InlinePages { block: 0, pages: vec![1; BLOCK as usize] }];
        two.commit(two.map().clone(), inline, BLOCK, RecordKind::Commit).unwrap();
    }
    world.with(|state| state.clock += GRACE + 3600);
    two.commit(two.map().clone(), Vec::new(), BLOCK, RecordKind::Commit).unwrap();
    let mut removed = 0;
    loop {
        match two.remove_objects(&two.expired(37)).0 {
            0 => break,
            some => removed += some,
        }
    }
    assert!(removed >= 298, "{removed}");
}

/// A store that does not answer, and says when it is asked.
struct Silent(mpsc::Sender<()>);

impl ObjectStore for Silent {
    fn create(&self, _name: &str, _bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        let _ = self.0.send(());
        Err(RemoteError::Transient("no answer".into()))
    }

    fn get(&self, _name: &str, _part: ObjectRange) -> RemoteResult<Vec<u8>> {
        let _ = self.0.send(());
        Err(RemoteError::Transient("no answer".into()))
    }

    fn list(&self, _prefix: &str, _after: &str, _most: usize) -> RemoteResult<Vec<ListedObject>> {
        Err(RemoteError::Transient("no answer".into()))
    }

    fn remove(&self, _name: &str) -> RemoteResult<()> {
        Err(RemoteError::Transient("no answer".into()))
    }
}

/// A daemon that was killed while its store was away, with a mount that waits for ever: the process
/// that asks for it is not to stay for ever.
#[test]
fn who_waits_without_end_goes_when_it_has_to() {
    let calls: [fn(&BucketStore) -> bool; 2] = [
        |store| store.create("name", &Arc::new(vec![1])).is_err(),
        |store| store.get("name", ObjectRange::All(1)).is_err(),
    ];
    for call in calls {
        let (sender, asked) = mpsc::channel();
        let store = BucketStore::new(Box::new(Silent(sender)), "s3://b/p".into(), None);
        store.retry_forever();
        let (sender, ended) = mpsc::channel();
        let waiting = store.clone();
        thread::spawn(move || sender.send(call(&waiting)));
        (0..2).for_each(|_| asked.recv().unwrap());
        assert!(ended.try_recv().is_err(), "it waits");
        store.retry_once();
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(true));
    }
}

/// A store that lists by a function of its own.
struct Lists<F>(Box<dyn ObjectStore>, F);

impl<F> ObjectStore for Lists<F>
where
    F: Fn(&dyn ObjectStore, &str, &str, usize) -> RemoteResult<Vec<ListedObject>> + Send + Sync,
{
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.0.create(name, bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.0.get(name, part)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        (self.1)(&*self.0, prefix, after, most)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.0.remove(name)
    }
}

#[test]
fn a_store_that_lists_for_ever_is_not_followed() {
    let world = World::new(1, 0);
    drop(WriterSession::open(store(&world, 1), somebody(), true).unwrap());
    let pages = Mutex::new(0);
    // It has a name behind each name.
    let endless = Lists(world.store(2), move |inner: &dyn ObjectStore, prefix: &str, after: &str, most| {
        if prefix.ends_with("/log/") {
            return inner.list(prefix, after, most);
        }
        let mut pages = pages.lock();
        *pages += 1;
        assert!(*pages < 100, "it is followed for ever");
        let named = |name| ListedObject { name: format!("{prefix}x{:08}{name:04}", *pages), bytes: 0, time: None };
        Ok((0..most).map(named).collect())
    });
    let endless = BucketStore::new(Box::new(endless), "s3://b/p".into(), options().timeout);
    WriterSession::open(Arc::new(endless), somebody(), true).unwrap();
}

#[test]
fn records_are_no_orphans_whatever_a_store_lists() {
    let world = World::new(1, 0);
    // It does not close, so the next writer looks for orphans.
    drop(WriterSession::open(store(&world, 1), somebody(), true).unwrap());
    // The store lists records among all objects, also one that no writer wrote.
    let lying = Lists(world.store(2), |inner: &dyn ObjectStore, prefix: &str, after: &str, most| {
        let mut listed = inner.list(prefix, after, most)?;
        if let Some(archive) = prefix.strip_suffix("/seg/").or(prefix.strip_suffix("/map/")) {
            let record = |number: u64| format!("{archive}/log/{:016x}", u64::MAX - number);
            listed.extend([1, 1 << 40].map(|number| ListedObject { name: record(number), bytes: 0, time: None }));
        }
        Ok(listed)
    });
    drop(Bucket::open(Box::new(lying), "s3://b/p".into(), &options(), true).unwrap());
    // The record of the close has a list of dead objects that readers accept, and no record is in it.
    let records = count(&world, "/log/");
    a_day_later(&world);
    a_day_later(&world);
    assert!(count(&world, "/log/") > records);
}
