//! The storage whose barriers are records: what a barrier said is durable is what a fresh reader finds, whoever dies or comes between any two requests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use lockbox::storage::Storage;
use lockbox::{Error, Result};
use parking_lot::Mutex;

use super::super::living::Living;
use super::super::objects::{Created, Listed, Objects, Part};
use super::super::session::{GRACE, Session};
use super::super::store::Store;
use super::super::{Bucket, Directory, open};
use super::simulated::{Dice, World};
use super::{Compared, options, seed, somebody};
use crate::Names;
use crate::source::Trouble;

pub(super) const NAME: &str = "s3://b/p";

pub(super) fn whole(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(0, &mut bytes).unwrap();
    bytes
}

/// What somebody finds who has nothing but the bucket.
pub(super) fn found(world: &Arc<World>) -> Vec<u8> {
    whole(&**open(world.store(9), NAME.into(), &options()).unwrap().unwrap().file())
}

pub(super) fn living(world: &Arc<World>, actor: u64) -> Result<Living> {
    Living::open(world.store(actor), NAME.into(), &options(), true)
}

/// An archive of so many blocks, each of its number.
pub(super) fn made(world: &Arc<World>, blocks: u8) -> Vec<u8> {
    let bytes: Vec<u8> = (1..=blocks).flat_map(|number| [number; 4096]).collect();
    let mut bucket = Bucket::open(world.store(1), NAME.into(), &options(), true).unwrap();
    bucket.fresh().unwrap().write_at(0, &bytes).unwrap();
    bucket.publish().unwrap();
    bytes
}

/// The same that a writer came to and went from: what who comes next finds in the newest record is nothing, whoever came before.
fn left(world: &Arc<World>, blocks: u8) -> Vec<u8> {
    let bytes = made(world, blocks);
    drop(living(world, 1).unwrap());
    bytes
}

pub(super) fn spent(world: &World) -> Vec<String> {
    world.with(|state| std::mem::take(&mut state.requests))
}

/// Changes the storage and the model alike.
fn change(dice: &mut Dice, storage: &dyn Storage, now: &mut Vec<u8>) -> Result<()> {
    let length = 1 + if dice.one_in(8) { dice.below(6 << 20) } else { dice.below(30_000) };
    let aligned = if dice.one_in(3) { 1 } else { 4096 };
    let offset = dice.below(3 << 20) / aligned * aligned;
    let mut compared = Compared { storage, now };
    match dice.below(10) {
        0 => compared.punch(offset, length),
        1 => compared.set_len(offset + 4096),
        2 => compared.allocate(offset, length),
        _ => {
            let data: Vec<u8> = (0..length).map(|_| dice.below(256) as u8).collect();
            compared.write(offset, &data)
        }
    }
}

#[test]
fn what_a_barrier_said_is_read_by_a_fresh_machine_and_nothing_else_is() {
    let first = seed(1);
    for seed in first..first + 12 {
        let mut dice = Dice::of(seed);
        let world = World::new(seed, 0);
        let mut durable = made(&world, 3);
        for _ in 0..3 {
            let mut session = Session::open(super::store(&world, 1), somebody(), true).unwrap();
            // Checkpoints now and then.
            session.least_changes = 20 * dice.below(30) as usize;
            session.clean();
            let mut storage = Living::of(session, &options(), Arc::default()).unwrap();
            storage.staged.most_since_base = dice.below(4) * 500;
            let mut now = durable.clone();
            for _ in 0..4 + dice.below(8) {
                for _ in 0..dice.below(12) {
                    change(&mut dice, &storage, &mut now).unwrap();
                }
                assert!(whole(&storage) == now, "seed {seed}: the writer");
                assert!(found(&world) == durable, "seed {seed}: before the barrier");
                storage.barrier().unwrap();
                durable.clone_from(&now);
                assert!(found(&world) == durable, "seed {seed}: after it");
                assert!(whole(&storage) == now, "seed {seed}: the writer after it");
                if dice.one_in(4) {
                    storage.evict(0, u64::MAX).unwrap();
                    assert!(whole(&storage) == now, "seed {seed}: the writer by the store");
                }
            }
            // What no barrier covered goes with the writer.
            change(&mut dice, &storage, &mut now).unwrap();
            drop(storage);
            assert!(found(&world) == durable, "seed {seed}: afterwards");
            world.with(|state| state.clock += dice.below(2 * GRACE));
        }
    }
}

/// A store that carries out so many requests and no more, the last of them perhaps without an answer; or on which something happens before one of them.
struct Counting {
    objects: Box<dyn Objects>,
    asked: Arc<AtomicU64>,
    end: u64,
    how: How,
}

pub(super) enum How {
    /// The process was killed before the request.
    Dies,
    /// It was carried out, and nobody heard the answer any more.
    Silent,
    /// Somebody else came in between.
    Meets(Mutex<Option<Box<dyn FnOnce() + Send>>>),
    /// Nobody answers for the time of so many requests, which are carried out (or not).
    Away(u64, bool),
}

impl Counting {
    fn ask<T>(&self, ask: impl Fn(&dyn Objects) -> std::result::Result<T, Trouble>) -> std::result::Result<T, Trouble> {
        let number = self.asked.fetch_add(1, Ordering::Relaxed);
        let killed = || Err(Trouble::Refused("it was killed".into()));
        match &self.how {
            How::Dies if number >= self.end => killed(),
            How::Silent if number > self.end => killed(),
            How::Silent if number == self.end => {
                let _ = ask(&*self.objects);
                killed()
            }
            How::Meets(other) if number == self.end => {
                let other = other.lock().take();
                other.into_iter().for_each(|meet| meet());
                ask(&*self.objects)
            }
            How::Away(count, carried_out) if (self.end..self.end + count).contains(&number) => {
                if *carried_out {
                    let _ = ask(&*self.objects);
                }
                Err(Trouble::Passing("no answer".into()))
            }
            _ => ask(&*self.objects),
        }
    }
}

impl Objects for Counting {
    fn create(&self, name: &str, bytes: &[u8]) -> std::result::Result<Created, Trouble> {
        self.ask(|objects| objects.create(name, bytes))
    }

    fn get(&self, name: &str, part: Part) -> std::result::Result<Vec<u8>, Trouble> {
        self.ask(|objects| objects.get(name, part))
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> std::result::Result<Vec<Listed>, Trouble> {
        self.ask(|objects| objects.list(prefix, after, most))
    }

    fn remove(&self, name: &str) -> std::result::Result<(), Trouble> {
        self.ask(|objects| objects.remove(name))
    }
}

pub(super) fn counting(world: &Arc<World>, end: u64, how: How) -> (Box<dyn Objects>, Arc<AtomicU64>) {
    let asked = Arc::new(AtomicU64::new(0));
    (Box::new(Counting { objects: world.store(2), asked: asked.clone(), end, how }), asked)
}

/// Three commits: within a record, with segments, and of holes. Gives what the archive is to be after each that was begun, and how many succeeded.
fn work(storage: &dyn Storage, base: &[u8]) -> (Vec<Vec<u8>>, usize, Result<()>) {
    let mut states = vec![base.to_vec()];
    let mut now = base.to_vec();
    let mut acknowledged = 0;
    let write = |now: &mut Vec<u8>, offset: usize, byte: u8, length: usize| {
        now.resize(now.len().max(offset + length), 0);
        now[offset..offset + length].fill(byte);
        storage.write_at(offset as u64, &vec![byte; length])
    };
    let mut commit = |now: &Vec<u8>| {
        states.push(now.clone());
        storage.barrier()?;
        acknowledged += 1;
        Ok(())
    };
    let mut all = || -> Result<()> {
        write(&mut now, 4096, 0xA1, 5000)?;
        commit(&now)?;
        write(&mut now, 8192, 0xA2, 10 << 20)?;
        write(&mut now, 0, 0xA3, 4096)?;
        commit(&now)?;
        storage.punch(4096, 5 << 20)?;
        now[4096..4096 + (5 << 20)].fill(0);
        storage.set_len(6 << 20)?;
        now.resize(6 << 20, 0);
        commit(&now)
    };
    let done = all();
    (states, acknowledged, done)
}

/// Requests of a writer that nobody disturbs.
fn undisturbed() -> u64 {
    let world = World::new(1, 0);
    let base = made(&world, 3);
    let (objects, asked) = counting(&world, u64::MAX, How::Dies);
    let storage = Living::open(objects, NAME.into(), &options(), true).unwrap();
    let (states, acknowledged, done) = work(&storage, &base);
    done.unwrap();
    drop(storage);
    assert!(acknowledged == 3 && found(&world) == states[3]);
    asked.load(Ordering::Relaxed)
}

#[test]
fn who_dies_between_any_two_requests_leaves_the_last_commit_or_the_one_that_it_was_at() {
    let all = undisturbed();
    let (mut old, mut new) = (0, 0);
    for end in 0..all {
        for how in [How::Dies, How::Silent] {
            let world = World::new(1, 0);
            let base = made(&world, 3);
            let (objects, _) = counting(&world, end, how);
            let opened = Living::open(objects, NAME.into(), &options(), true);
            let (states, acknowledged) = match &opened {
                Ok(storage) => {
                    let (states, acknowledged, _) = work(storage, &base);
                    (states, acknowledged)
                }
                Err(_) => (vec![base], 0),
            };
            let there = found(&world);
            let is_old = there == states[acknowledged];
            assert!(is_old || states.get(acknowledged + 1) == Some(&there), "request {end} of {all}");
            if is_old {
                old += 1
            } else {
                new += 1
            }
            // Nothing of what a dead process still does is found, and the next one goes on.
            drop(opened);
            assert!(found(&world) == there, "request {end}");
            let next = living(&world, 3).unwrap();
            next.write_at(0, &[7; 4096]).unwrap();
            next.barrier().unwrap();
            assert!(found(&world)[..4096] == [7; 4096] && found(&world)[4096..] == there[4096..], "request {end}");
        }
    }
    assert!(old > 10 && new > 2, "{old} {new}");
}

/// Another writer comes there and stays; and what it made of the archive, when it came.
pub(super) fn overtaken(world: &Arc<World>) -> (Arc<Mutex<Option<Vec<u8>>>>, How) {
    let theirs = Arc::new(Mutex::new(None));
    let (other, left) = (world.clone(), theirs.clone());
    let meet = Box::new(move || {
        let storage = living(&other, 3).unwrap();
        storage.write_at(4096, &[0xBB; 4096]).unwrap();
        storage.barrier().unwrap();
        *left.lock() = Some(found(&other));
        std::mem::forget(storage);
    });
    (theirs, How::Meets(Mutex::new(Some(meet))))
}

#[test]
fn who_was_taken_over_from_between_any_two_requests_commits_nothing_more() {
    let all = undisturbed();
    let mut fenced = 0;
    for end in 0..all {
        let world = World::new(1, 0);
        let base = made(&world, 3);
        let (theirs, how) = overtaken(&world);
        let (objects, _) = counting(&world, end, how);
        let opened = Living::open(objects, NAME.into(), &options(), true);
        let done = match &opened {
            Ok(storage) => {
                let (states, acknowledged, done) = work(storage, &base);
                if let Some(theirs) = &*theirs.lock() {
                    // It built upon a commit of the one before, and upon all that were acknowledged until then.
                    let mut before = theirs.clone();
                    let is_of = |state: &Vec<u8>| {
                        before.clone_from(state);
                        before.resize(before.len().max(8192), 0);
                        before[4096..8192].fill(0xBB);
                        before == *theirs
                    };
                    let built_on = states.iter().position(is_of);
                    assert!(
                        done.is_ok() || built_on == Some(acknowledged),
                        "request {end}: {built_on:?} {acknowledged}"
                    );
                }
                let again = storage.barrier();
                assert!(done.is_ok() || again.is_err(), "request {end}: it writes on");
                done
            }
            Err(error) => Err(error.clone()),
        };
        let theirs = theirs.lock().clone();
        drop(opened);
        if let Some(theirs) = theirs {
            // Else the other one came when nothing was left to commit, or before this one, which took over.
            if let Err(error) = done {
                assert!(matches!(error, Error::InUse(_)), "request {end}: {error}");
                fenced += 1;
                assert!(found(&world) == theirs, "request {end}: it wrote over the other one");
            }
        }
    }
    assert!(fenced >= 4, "{fenced} of {all}");
}

#[test]
fn a_barrier_that_nobody_answers_fails_with_what_is_known_and_nothing_is_written_after_it() {
    for carried_out in [false, true] {
        let world = World::new(1, 0);
        let base = left(&world, 3);
        let coming = {
            let (objects, asked) = counting(&world, u64::MAX, How::Dies);
            let storage = Living::open(objects, NAME.into(), &options(), true).unwrap();
            let coming = asked.load(Ordering::Relaxed);
            drop(storage);
            coming
        };
        let (objects, _) = counting(&world, coming, How::Away(1, carried_out));
        let storage = Living::open(objects, NAME.into(), &options(), true).unwrap();
        storage.write_at(0, &[9; 4096]).unwrap();
        let told = storage.barrier().unwrap_err();
        let Error::Io { source, .. } = &told else { panic!("{told}") };
        assert_eq!(source.kind(), std::io::ErrorKind::TimedOut);
        assert!(told.to_string().contains("whether the last change is in the archive is not known"), "{told}");
        // The store answers again: what was not acknowledged is there or not, and nothing builds upon it.
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
        let patient = crate::Options { timeout: None, ..options() };
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(Living::open(objects, NAME.into(), &patient, true).unwrap());
        // One less: it did not go.
        let coming = asked.load(Ordering::Relaxed) - 1;
        let (objects, _) = counting(&world, coming, How::Away(1, carried_out));
        let storage = Living::open(objects, NAME.into(), &patient, true).unwrap();
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
fn a_commit_of_4_mib_is_one_request_and_none_without_a_change() {
    let world = World::new(1, 0);
    made(&world, 200);
    spent(&world);
    let storage = living(&world, 1).unwrap();
    // Marker and probe, the newest record with its number, this writer's, the newest again; and the start of the file.
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
    // What was written last, which is in a segment, and this writer's last record, which has it again.
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
    let two = Living::open(world.store(2), NAME.into(), &options(), false).unwrap();
    for at in [0, 8 << 20] {
        two.write_at(at as u64, &vec![6; 6 << 20]).unwrap();
    }
    two.barrier().unwrap();
    let sparse = |world: &Arc<World>| {
        let session = Session::open(super::store(world, 7), somebody(), true).unwrap();
        session.map().sparse().len()
    };
    drop(two);
    assert!(found(&world) == wanted);
    assert_eq!(sparse(&world), 0);
}

#[test]
fn only_what_is_there_is_changed() {
    let world = World::new(1, 0);
    let none = living(&world, 1).err().unwrap();
    assert!(matches!(&none, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound), "{none}");
    assert_eq!(world.with(|state| state.objects.len()), 0, "nothing is made where nothing is");
    drop(Bucket::open(world.store(1), NAME.into(), &options(), false).unwrap());
    let none = living(&world, 1).err().unwrap();
    assert!(matches!(none, Error::NotArchive(_)), "{none}");
    made(&world, 1);
    let one = living(&world, 1).unwrap();
    let told = Living::open(world.store(2), NAME.into(), &options(), false).err().unwrap();
    assert!(matches!(&told, Error::InUse(why) if why.contains("a writer on")), "{told}");
    drop(one);
    drop(Living::open(world.store(2), NAME.into(), &options(), false).unwrap());
}

/// An archive with keys, trees and recovery, made and changed in a directory of objects.
#[test]
fn what_an_archive_synced_is_read_by_a_fresh_machine_in_a_directory() {
    use lockbox::archive::{Archive, CreateOptions, OpenOptions};
    use lockbox::crypto::Passphrase;
    use lockbox::crypto::kdf::KdfCost;
    use lockbox::exchange::resolve;
    use lockbox::format::ROOT_INO;
    use lockbox::fs::{Creator, mode};
    use lockbox::keys::{Secrets, UnlockLimits, unlock_with};

    let place = tempfile::tempdir().unwrap();
    let objects = || -> Box<dyn Objects> { Box::new(Directory::open(place.path(), Some(Names::Ours)).unwrap()) };
    let creator = Creator { uid: 1, gid: 1, umask: None };
    let passphrase = || Passphrase::new(b"a passphrase".to_vec());
    let mut bucket = Bucket::open(objects(), NAME.into(), &options(), false).unwrap();
    let storage = bucket.fresh().unwrap();
    Archive::create_in(&storage, &passphrase(), &CreateOptions { kdf: KdfCost::FLOOR, creator }).unwrap();
    assert!(matches!(
        Archive::create_in(&storage, &passphrase(), &CreateOptions { kdf: KdfCost::FLOOR, creator }),
        Err(Error::Exists)
    ));
    drop(storage);
    bucket.publish().unwrap();
    let read = || -> Arc<dyn Storage> { open(objects(), NAME.into(), &options()).unwrap().unwrap().file().clone() };
    // Neither log nor ring is sent before it says something.
    let sent: u64 = {
        let listed = objects().list("", "", 1000).unwrap();
        listed.iter().map(|object| object.bytes).sum()
    };
    assert!(sent < 400 << 10, "{sent}");
    let key = unlock_with(&read(), &Secrets::from(passphrase()), &UnlockLimits::default()).unwrap();
    let content = |number: u64| vec![number as u8; 30_000];
    let check = |synced: u64| {
        let archive = Archive::open(&read(), &key, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
        let fs = archive.file_system();
        for number in 0..synced {
            let found = resolve(fs, format!("file{number}").as_bytes()).unwrap();
            assert_eq!(found.size, 30_000);
            let mut bytes = Vec::new();
            fs.read_into(found.ino, 0, 30_000, &mut bytes).unwrap();
            assert!(bytes == content(number), "{number} of {synced}");
        }
        assert!(resolve(fs, format!("file{synced}").as_bytes()).is_err());
    };
    let mut synced = 0;
    for round in 0..3 {
        let living = Living::open(objects(), NAME.into(), &options(), true).unwrap();
        let storage: Arc<dyn Storage> = Arc::new(living);
        let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
        for _ in 0..5 {
            let name = format!("file{synced}");
            let fs = archive.file_system();
            let made = fs.make_node(ROOT_INO, name.as_bytes(), mode::REGULAR | 0o600, 0, creator).unwrap();
            fs.write(made.ino, 0, &content(synced)).unwrap();
            check(synced);
            fs.sync().unwrap();
            synced += 1;
            check(synced);
        }
        if round == 1 {
            // As if it were killed.
            std::mem::forget((archive, storage));
        } else {
            archive.close().unwrap();
            drop(storage);
        }
        check(synced);
    }
    let archive = Archive::open(&read(), &key, &OpenOptions { read_only: true, ..OpenOptions::default() }).unwrap();
    let report = archive.check(true, &mut |_| {}).unwrap();
    assert!(report.findings.is_empty(), "{:?}", report.findings);
}

#[test]
fn who_insists_waits_for_the_stores_word_and_who_hurries_does_not() {
    for carried_out in [false, true] {
        let world = World::new(1, 0);
        left(&world, 3);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(Living::open(objects, NAME.into(), &options(), true).unwrap());
        let coming = asked.load(Ordering::Relaxed) - 1;
        // An outage of so many attempts, of which the first carries segments.
        let (objects, asked) = counting(&world, coming, How::Away(40, carried_out));
        let storage = Living::open(objects, NAME.into(), &options(), true).unwrap();
        storage.insist();
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
            storage.go();
            let told = waiting.join().unwrap().unwrap_err();
            assert!(told.to_string().contains("is not known"), "{told}");
        });
        world.with(|state| state.away = false);
        assert!(storage.barrier().is_err());
        assert!(found(&world) == vec![9; 20 << 20]);
    }
}

#[test]
fn what_is_written_while_a_record_is_on_its_way_goes_with_the_next_one() {
    for least_changes in [0, 1 << 20] {
        let world = World::new(1, 0);
        let mut now = left(&world, 64);
        let (objects, asked) = counting(&world, u64::MAX, How::Dies);
        drop(Living::open(objects, NAME.into(), &options(), true).unwrap());
        // Its last request was that it goes.
        let record = asked.load(Ordering::Relaxed) - 1 + u64::from(least_changes == 0);
        let cell: Arc<OnceLock<Weak<Living>>> = Arc::default();
        let inner = cell.clone();
        // Nobody holds anything that a write needs; a part of it, more than a record has, goes up at once.
        let meet = Box::new(move || {
            let storage = inner.get().unwrap().upgrade().unwrap();
            storage.write_at(8 * 4096, &[0xC1; 4096]).unwrap();
            storage.punch(20 * 4096, 4096).unwrap();
            storage.write_at(64 * 4096, &vec![0xC2; 9 << 20]).unwrap();
        });
        let (objects, _) = counting(&world, record, How::Meets(Mutex::new(Some(meet))));
        let store = Arc::new(Store::new(objects, NAME.into(), options().timeout));
        let mut session = Session::open_known(store, somebody(), true).unwrap();
        session.least_changes = least_changes;
        let storage = Arc::new(Living::of(session, &options(), Arc::default()).unwrap());
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
    objects: Box<dyn Objects>,
    meet: Meet,
}

impl Objects for Meeting {
    fn create(&self, name: &str, bytes: &[u8]) -> std::result::Result<Created, Trouble> {
        self.objects.create(name, bytes)
    }

    fn get(&self, name: &str, part: Part) -> std::result::Result<Vec<u8>, Trouble> {
        let got = self.objects.get(name, part);
        if matches!(part, Part::Range(..)) {
            let meet = self.meet.lock().take();
            meet.into_iter().for_each(|meet| meet());
        }
        got
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> std::result::Result<Vec<Listed>, Trouble> {
        self.objects.list(prefix, after, most)
    }

    fn remove(&self, name: &str) -> std::result::Result<(), Trouble> {
        self.objects.remove(name)
    }
}

/// A barrier of an archive in too many pieces writes blocks anew as they are, beside whoever writes.
#[test]
fn what_is_written_anew_takes_nothing_back() {
    let world = World::new(1, 0);
    // Longer than the start that is in memory.
    let mut now = vec![7; 600 * 4096];
    let mut bucket = Bucket::open(world.store(1), NAME.into(), &options(), true).unwrap();
    bucket.fresh().unwrap().write_at(0, &now).unwrap();
    bucket.publish().unwrap();
    let meet = Meet::default();
    let objects = Box::new(Meeting { objects: world.store(2), meet: meet.clone() });
    let store = Arc::new(Store::new(objects, NAME.into(), options().timeout));
    let mut session = Session::open_known(store, somebody(), true).unwrap();
    // Eight runs are too many.
    session.most_checkpoint = 8 * 2 * 20;
    let storage = Arc::new(Living::of(session, &options(), Arc::default()).unwrap());
    for block in (0..20_usize).step_by(2) {
        storage.write_at(block as u64 * 4096, &[0xA0; 4096]).unwrap();
        now[block * 4096..(block + 1) * 4096].fill(0xA0);
    }
    let (writes, written) = std::sync::mpsc::channel();
    let writer = storage.clone();
    *meet.lock() = Some(Box::new(move || {
        let (done, is_done) = std::sync::mpsc::channel();
        let writing = std::thread::spawn(move || {
            writer.write_at(551 * 4096, &[0xB0; 4096]).unwrap();
            let _ = done.send(());
        });
        // Before the old bytes are written again, if it can.
        let _ = is_done.recv_timeout(Duration::from_millis(300));
        writes.send(writing).unwrap();
    }));
    storage.barrier().unwrap();
    written.try_recv().expect("nothing was written anew").join().unwrap();
    now[551 * 4096..552 * 4096].fill(0xB0);
    assert!(whole(&*storage) == now);
    storage.barrier().unwrap();
    assert!(found(&world) == now);
}

#[test]
fn what_is_dead_for_a_day_is_removed_while_the_writer_stays() {
    let world = World::new(1, 0);
    made(&world, 3);
    let mut storage = living(&world, 1).unwrap();
    let records =
        |world: &World| world.with(|state| state.objects.keys().filter(|name| name.contains("/log/")).count());
    let commit = |storage: &Living, byte: u8| {
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
        *storage.cleaned.get_mut() -= Duration::from_secs(61);
        commit(&storage, byte);
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

/// The store itself is not asked before somebody asks the storage.
#[test]
fn a_store_that_is_away_at_the_end_is_asked_once() {
    let world = World::new(1, 0);
    made(&world, 3);
    let patient = crate::Options { timeout: Some(Duration::from_secs(600)), ..options() };
    let storage = Living::open(world.store(1), NAME.into(), &patient, true).unwrap();
    storage.write_at(0, &[1; 4096]).unwrap();
    world.with(|state| state.away = true);
    spent(&world);
    drop(storage);
    assert_eq!(spent(&world).len(), 1);
}
