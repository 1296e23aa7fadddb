//! Single request orders that random schedules rarely reach.

use std::sync::Arc;

use parking_lot::Mutex;

use super::super::layout::{BLOCK, RecordKind};
use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::super::session::{InlinePages, WriterSession};
use super::super::store::ORDER;
use super::super::store::{BucketStore, CreateOutcome};
use super::super::version::{BucketVersion, VersionReader};
use super::GRACE;
use super::simulated::World;
use super::{options, somebody, store};
use crate::range_source::{RangeSource, RemoteError, RemoteResult};

type Hook = Box<dyn FnOnce() + Send>;

/// A store on which something happens before the next record is made, and perhaps its answer is
/// lost.
struct Hooked {
    objects: Box<dyn ObjectStore>,
    before: Mutex<Option<Hook>>,
    loses: Mutex<bool>,
}

impl ObjectStore for Hooked {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        if name.contains("/log/") {
            if let Some(hook) = self.before.lock().take() {
                hook();
            }
            let created = self.objects.create(name, bytes);
            return match std::mem::take(&mut *self.loses.lock()) {
                true => Err(RemoteError::Transient("no answer".into())),
                false => created,
            };
        }
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
}

fn hooked(world: &Arc<World>, before: Option<Hook>, loses: bool) -> Arc<BucketStore> {
    let objects = Hooked { objects: world.store(2), before: Mutex::new(before), loses: Mutex::new(loses) };
    Arc::new(BucketStore::new(Box::new(objects), "s3://b/p".into(), options().timeout))
}

fn commit(session: &mut WriterSession, byte: u8) -> lockbox::Result<()> {
    let inline = vec![InlinePages { block: 0, pages: vec![byte; BLOCK as usize] }];
    session.commit(session.map().clone(), inline, BLOCK, RecordKind::Commit)
}

#[test]
fn who_slept_for_a_day_before_its_record_begins_anew() {
    let world = World::new(1, 0);
    let mut one = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
    commit(&mut one, 1).unwrap();
    let one = Arc::new(Mutex::new(one));
    let (owner, other) = (one.clone(), world.clone());
    // The other one has looked for the newest record by now. Meanwhile the number behind that is
    // taken, dead, and free again.
    let meanwhile: Hook = Box::new(move || {
        let mut one = owner.lock();
        (2..=4).for_each(|byte| commit(&mut one, byte).unwrap());
        other.with(|state| state.clock += GRACE + 60);
        commit(&mut one, 5).unwrap();
        one.remove_expired();
    });
    let before = world.with(|state| state.objects.len());
    let mut two = WriterSession::open(hooked(&world, Some(meanwhile), false), somebody(), true).unwrap();
    assert!(world.with(|state| state.objects.len()) < before + 5, "nothing was removed");
    // What the first one was told is durable is there, and it is the one that is overtaken.
    assert!(commit(&mut one.lock(), 6).is_err());
    let reader = store(&world, 3);
    let incarnation = reader.read_incarnation().unwrap().unwrap().unwrap();
    let newest = |reader: &BucketStore| BucketVersion::load_newest(reader, &incarnation).unwrap().unwrap();
    let byte = |reader: &Arc<BucketStore>| {
        let moment = newest(reader);
        let reading = VersionReader::new(reader.clone(), incarnation, &moment);
        reading.read_start(BLOCK).unwrap().1[0]
    };
    assert_eq!(byte(&reader), 5);
    commit(&mut two, 7).unwrap();
    assert_eq!(byte(&reader), 7);
}

#[test]
fn a_commit_whose_answer_was_lost_is_one_and_is_told_as_one() {
    let world = World::new(1, 0);
    let mut one = WriterSession::open(hooked(&world, None, false), somebody(), true).unwrap();
    // The session's own store, so that the fault meets the commit.
    let store = hooked(&world, None, true);
    one.store = store;
    assert!(commit(&mut one, 1).is_err());
    assert!(one.is_in_doubt());
    // Nothing else before the store has said what became of it.
    assert!(matches!(commit(&mut one, 2), Err(lockbox::Error::Invalid(_))));
    one.resolve_pending().unwrap();
    assert!(!one.is_in_doubt());
    commit(&mut one, 3).unwrap();
}

#[test]
fn an_empty_object_or_the_end_of_ours_is_another_ones() {
    let world = World::new(1, 0);
    let store = store(&world, 1);
    for (there, ours) in [(&b""[..], false), (b"c", false), (b"abc", true), (b"xabc", true), (b"xbc", false)] {
        world.with(|state| state.objects.insert("name".into(), there.to_vec()));
        let outcome = store.create("name", &Arc::new(b"abc".to_vec())).unwrap();
        assert_eq!(outcome == CreateOutcome::Created(None), ours, "{there:?}");
    }
}

/// A store on which another writer makes a commit each time that the newest number was told, and as
/// often as it was set while what lies there is looked at.
struct Busy {
    objects: Box<dyn ObjectStore>,
    writer: Mutex<WriterSession>,
    commits: Mutex<usize>,
    while_read: usize,
}

impl Busy {
    fn go_on(&self) {
        // Not any more when it was overtaken.
        let _ = commit(&mut self.writer.lock(), 7);
    }
}

impl ObjectStore for Busy {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.objects.create(name, bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        let got = self.objects.get(name, part);
        let mut commits = self.commits.lock();
        if name.contains("/log/") && *commits > 0 {
            *commits -= 1;
            self.go_on();
        }
        got
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        let listed = self.objects.list(prefix, after, most);
        *self.commits.lock() = self.while_read;
        self.go_on();
        listed
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.objects.remove(name)
    }
}

/// Who takes over has to come between two commits: looking for the number and then for its record
/// are two ways to the store, in which a writer makes two.
#[test]
fn a_writer_that_makes_one_commit_after_the_other_can_be_taken_over_from() {
    // The records behind the newest are asked for at once, or one after the other from either end.
    for order in [Some(false), Some(true), None] {
        ORDER.set(order.map(|order| -> Box<dyn FnMut() -> bool> { Box::new(move || order) }));
        let take_over = |while_read| {
            let world = World::new(1, 0);
            let mut writer = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
            commit(&mut writer, 1).unwrap();
            let busy = Busy { objects: world.store(2), writer: Mutex::new(writer), commits: Mutex::new(0), while_read };
            let store = BucketStore::new(Box::new(busy), "s3://b/p".into(), options().timeout);
            WriterSession::open(Arc::new(store), somebody(), true)
        };
        assert!(take_over(1).is_ok());
        // Without any pause there is nothing between, and that is said.
        let message = take_over(usize::MAX).err().unwrap().to_string();
        assert!(message.contains("commit too often to take over"), "{message}");
    }
}
