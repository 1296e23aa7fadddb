//! Writable storage compared with a byte array, and its costs in requests.

use std::sync::Arc;

use lockbox::storage::Storage;
use lockbox::{Error, Result};

use super::super::layout::WriterIdentity;
use super::super::session::WriterSession;
use super::super::{Bucket, open};
use super::GRACE;
use super::simulated::{Dice, World};
use super::{Compared, options, seed, somebody, store};

fn bucket(world: &Arc<World>) -> Bucket {
    Bucket::open(world.store(1), "s3://b/p".into(), &options(), true).unwrap()
}

fn whole(storage: &dyn Storage) -> Vec<u8> {
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(0, &mut bytes).unwrap();
    bytes
}

fn published(world: &Arc<World>) -> Vec<u8> {
    whole(&**open(world.store(1), "s3://b/p".into(), &options()).unwrap().unwrap().file())
}

#[test]
fn a_bucket_has_the_bytes_that_were_written() {
    let first = seed(1);
    for seed in first..first + 40 {
        let mut dice = Dice::of(seed);
        let world = World::new(seed, 0);
        let mut model: Vec<u8> = Vec::new();
        for _ in 0..4 {
            let mut bucket = bucket(&world);
            let buffer = match bucket.open_existing().unwrap() {
                Some(buffer) if !dice.one_in(4) => buffer,
                _ => bucket.create_empty().unwrap(),
            };
            let mut now = whole(&*buffer);
            assert!(now.is_empty() || now == model, "seed {seed}");
            for _ in 0..dice.below(60) {
                change(&mut dice, &*buffer, &mut now);
            }
            assert!(whole(&*buffer) == now, "seed {seed}");
            if dice.one_in(4) {
                drop(bucket);
            } else {
                bucket.publish().unwrap();
                model = now;
            }
            if !model.is_empty() {
                assert!(published(&world) == model, "seed {seed}");
            }
            world.with(|state| state.clock += dice.below(2 * GRACE));
        }
    }
}

fn change(dice: &mut Dice, buffer: &dyn Storage, now: &mut Vec<u8>) {
    let length = 1 + match dice.below(3) {
        0 => dice.below(100),
        1 => dice.below(40_000),
        // Several segments.
        _ => dice.below(1 << 20) * 4096 / 1000,
    };
    let aligned = if dice.one_in(2) { 4096 } else { 1 };
    let offset = dice.below(6 << 20) / aligned * aligned;
    let mut compared = Compared { storage: buffer, now };
    match dice.below(12) {
        0 => compared.punch(offset, length).unwrap(),
        1 => compared.set_len(offset).unwrap(),
        2 => compared.allocate(offset, length).unwrap(),
        3 => buffer.evict(0, u64::MAX).unwrap(),
        4 => {
            let now = compared.now;
            let mut bytes = vec![1; (length as usize).min(now.len().saturating_sub(offset as usize))];
            if !bytes.is_empty() {
                buffer.read_at(offset, &mut bytes).unwrap();
                assert!(bytes == now[offset as usize..offset as usize + bytes.len()]);
            }
        }
        _ => {
            let length = length as usize;
            let data = if dice.one_in(5) { vec![0; length] } else { dice.noise(length) };
            compared.write(offset, &data).unwrap();
        }
    }
}

/// The names of objects, by what they are.
fn metrics(world: &World) -> (usize, usize) {
    world.with(|state| {
        let count = |part: &str| state.objects.keys().filter(|name| name.contains(part)).count();
        (count("/log/"), count("/seg/"))
    })
}

#[test]
fn what_is_dead_goes_after_a_day_and_what_is_sparse_is_written_anew() {
    let world = World::new(1, 0);
    let fill = |bucket: &mut Bucket, byte: u8, blocks: std::ops::Range<u64>| {
        let buffer = bucket.open_existing().unwrap().unwrap_or_else(|| bucket.create_empty().unwrap());
        for number in blocks {
            buffer.write_at(number * 4096, &[byte; 4096]).unwrap();
        }
    };
    let mut one = bucket(&world);
    fill(&mut one, 1, 0..2048);
    one.publish().unwrap();
    assert_eq!(metrics(&world), (2, 1));
    // Most of the segment is written again: the rest of it moves along.
    let mut two = bucket(&world);
    fill(&mut two, 2, 0..1500);
    two.publish().unwrap();
    assert_eq!(metrics(&world), (4, 2));
    let mut wanted = vec![2; 1500 * 4096];
    wanted.resize(2048 * 4096, 1);
    assert!(published(&world) == wanted);
    for _ in 0..2 {
        // The first of them finds out since when.
        world.with(|state| state.clock += GRACE + 60);
        drop(bucket(&world));
    }
    let (records, segments) = metrics(&world);
    assert_eq!(segments, 1, "the first segment was dead for a day");
    // The records of those who came stay.
    assert_eq!(records, 4 + 2, "{:?}", world.with(|state| state.requests.split_off(0)));
    assert!(published(&world) == wanted);
}

#[test]
fn what_a_killed_writer_left_goes_and_what_is_needed_stays() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    one.create_empty().unwrap().write_at(0, &vec![1; 9 << 20]).unwrap();
    one.publish().unwrap();
    let wanted = published(&world);
    let needed = metrics(&world).1;
    let mut two = bucket(&world);
    two.create_empty().unwrap().write_at(0, &vec![2; 40 << 20]).unwrap();
    two.wait_settled();
    assert!(metrics(&world).1 > needed, "nothing went up");
    // As if it were killed: nothing is taken back.
    std::mem::forget(two);
    for _ in 0..2 {
        drop(bucket(&world));
        world.with(|state| state.clock += GRACE + 60);
        assert!(published(&world) == wanted);
    }
    drop(bucket(&world));
    assert_eq!(metrics(&world).1, needed);
    assert!(published(&world) == wanted);
}

#[test]
fn an_archive_in_more_pieces_than_a_checkpoint_takes_is_written_anew_or_refused_and_the_one_before_stays() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    one.create_empty().unwrap().write_at(0, &vec![1; 100 * 4096]).unwrap();
    one.publish().unwrap();
    let mut wanted = vec![1; 100 * 4096];
    let runs = |world: &Arc<World>| {
        let session = WriterSession::open(store(world, 7), somebody(), true).unwrap();
        session.map().runs()
    };
    // Every other block comes from another object.
    let scatter = |most: u64, byte: u8, wanted: &mut [u8]| {
        let mut next = bucket(&world);
        (next.session.most_checkpoint, next.session.least_changes) = (most, 0);
        let buffer = next.open_existing().unwrap().unwrap();
        for block in (0..80_usize).step_by(2) {
            buffer.write_at(block as u64 * 4096, &[byte; 4096]).unwrap();
            wanted[block * 4096..(block + 1) * 4096].fill(byte);
        }
        next.publish()
    };
    scatter(1 << 20, 2, &mut wanted).unwrap();
    assert!(published(&world) == wanted && runs(&world) > 60, "{}", runs(&world));
    scatter(2000, 3, &mut wanted).unwrap();
    assert!(published(&world) == wanted && runs(&world) == 1, "{}", runs(&world));
    // Not even that fits.
    let before = wanted.clone();
    let made = world.with(|state| state.objects.keys().filter(|name| name.contains("/map/")).count());
    let message = scatter(100, 4, &mut wanted).unwrap_err();
    assert!(matches!(&message, Error::Invalid(why) if why.contains("too fragmented")), "{message}");
    assert_eq!(world.with(|state| state.objects.keys().filter(|name| name.contains("/map/")).count()), made);
    assert!(published(&world) == before);
}

#[test]
fn no_length_that_readers_refuse_is_made_durable() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    let buffer = one.create_empty().unwrap();
    buffer.write_at(0, &[7; 5000]).unwrap();
    let longest = i64::MAX as u64 / 4096 * 4096;
    for length in [u64::MAX, 1 << 63, i64::MAX as u64, longest + 1] {
        assert!(matches!(buffer.set_len(length), Err(Error::Invalid(_))), "{length}");
        assert!(matches!(buffer.allocate(1, length - 1), Err(Error::Invalid(_))), "{length}");
        assert!(matches!(buffer.allocate(1, length), Err(Error::Invalid(_))), "{length}");
        assert!(matches!(buffer.write_at(length - 1, &[1]), Err(Error::Invalid(_))), "{length}");
    }
    buffer.write_at(longest - 1, &[1]).unwrap();
    buffer.set_len(longest).unwrap();
    one.publish().unwrap();
    let file = open(world.store(1), "s3://b/p".into(), &options()).unwrap().unwrap().file().clone();
    let mut last = [0];
    file.read_at(longest - 1, &mut last).unwrap();
    assert_eq!((file.len().unwrap(), last), (longest, [1]));
    let mut session = WriterSession::open(store(&world, 1), somebody(), true).unwrap();
    let map = session.map().clone();
    assert!(session.commit(map, Vec::new(), 1 << 63, super::super::layout::RecordKind::Close).is_err());
    assert!(open(world.store(1), "s3://b/p".into(), &options()).is_ok());
}

#[test]
fn requests_are_counted() {
    let world = World::new(1, 0);
    let spent = |world: &World| world.with(|state| std::mem::take(&mut state.requests));
    let mut one = bucket(&world);
    let buffer = one.create_empty().unwrap();
    buffer.write_at(0, &vec![7; 2 << 20]).unwrap();
    let coming = spent(&world);
    // Marker looked for and made, probed; the newest looked for, the record, the newest again.
    assert_eq!(coming.len(), 6, "{coming:?}");
    one.publish().unwrap();
    let commit = spent(&world);
    assert_eq!(commit.len(), 1, "{commit:?}");
    published(&world);
    let opening = spent(&world);
    // Marker, list, the record's end, and its pages: the start of the file, and the rest.
    assert_eq!(opening.len(), 5, "{opening:?}");
}

#[test]
fn another_writer_is_told_of_and_can_be_taken_over_from() {
    let world = World::new(1, 0);
    let mut one = WriterSession::open(store(&world, 1), somebody(), false).unwrap();
    let message = WriterSession::open(store(&world, 2), somebody(), false).err().unwrap();
    assert!(matches!(&message, Error::InUse(why) if why.contains("host")), "{message}");
    let mut two = WriterSession::open(store(&world, 2), somebody(), true).unwrap();
    let commit = |session: &mut WriterSession| -> Result<()> {
        let map = session.map().clone();
        session.commit(map, Vec::new(), 4096, super::super::layout::RecordKind::Close)
    };
    assert!(matches!(commit(&mut one), Err(Error::InUse(_))));
    assert!(matches!(commit(&mut one), Err(Error::InUse(_))), "for ever");
    commit(&mut two).unwrap();
    WriterSession::open(store(&world, 3), somebody(), false).unwrap();
}

#[test]
fn a_writer_that_was_killed_is_followed_on_its_own_machine() {
    let world = World::new(1, 0);
    let gone = WriterIdentity { machine: [1; 16], boot: [2; 16], started: 1, process: u32::MAX, ..somebody() };
    drop(WriterSession::open(store(&world, 1), gone, false).unwrap());
    let here = WriterIdentity { machine: [1; 16], boot: [2; 16], ..WriterIdentity::current() };
    WriterSession::open(store(&world, 2), here, false).unwrap();
}

#[test]
fn a_store_that_overwrites_is_refused_before_anything_is_written() {
    let world = World::new(1, 0);
    world.with(|state| state.overwrites = true);
    let message = WriterSession::open(store(&world, 1), somebody(), true).err().unwrap();
    assert!(matches!(message, Error::Unsupported(_)), "{message}");
    assert_eq!(world.with(|state| state.objects.len()), 1, "the marker alone");
}

#[test]
fn an_object_that_is_missing_cut_or_another_is_damage_by_its_name() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    let buffer = one.create_empty().unwrap();
    buffer.write_at(0, &vec![7; 12 << 20]).unwrap();
    one.publish().unwrap();
    let names: Vec<String> = world.with(|state| state.objects.keys().cloned().collect());
    let (mut records, mut others, mut segments) = (0, 0, 0);
    for name in &names {
        let kept = world.with(|state| state.objects[name].clone());
        let opened = |world: &Arc<World>| open(world.store(1), "s3://b/p".into(), &options());
        // The newest record has no pages; those of segments are for the tags of the archive.
        let is_said = name == "lockbox" || *name == newest(&names);
        for at in (0..kept.len()).filter(|_| is_said) {
            world.with(|state| state.objects.get_mut(name).unwrap()[at] ^= 1);
            assert!(matches!(opened(&world), Err(Error::Damaged(_))), "{name} {at}");
            world.with(|state| state.objects.insert(name.clone(), kept.clone()));
            records += 1;
        }
        world.with(|state| state.objects.get_mut(name).unwrap().truncate(kept.len() / 2));
        let read = opened(&world).and_then(|file| {
            let mut all = vec![0; 12 << 20];
            file.map_or(Ok(()), |follower| follower.file().read_at(0, &mut all))
        });
        world.with(|state| state.objects.remove(name));
        let missing = opened(&world).and_then(|file| {
            let mut all = vec![0; 12 << 20];
            file.map_or(Ok(()), |follower| follower.file().read_at(0, &mut all))
        });
        if *name != oldest(&names) {
            assert!(matches!(read, Err(Error::Damaged(_))), "{name} {read:?}");
            others += 1;
        }
        if let Some((_, hash)) = name.split_once("/seg/") {
            for (message, how) in [(&read, "truncated"), (&missing, "missing")] {
                let message = format!("{message:?}");
                assert!(
                    message.contains("Damaged") && message.contains(hash) && message.contains(how),
                    "{name} {message}"
                );
                segments += 1;
            }
        }
        world.with(|state| state.objects.insert(name.clone(), kept));
    }
    assert!(records > 400 && others >= 3 && segments >= 2, "{records} {others} {segments} {names:?}");
}

/// What is asked for together is not lost together.
#[test]
fn what_lies_beside_a_missing_object_is_read() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    one.create_empty().unwrap().write_at(0, &vec![7; 1200 * 4096]).unwrap();
    one.publish().unwrap();
    let living = super::writable::living(&world, 1).unwrap();
    (450..650).step_by(2).for_each(|block| living.write_at(block * 4096, &[8; 4096]).unwrap());
    living.barrier().unwrap();
    drop(living);
    let record = format!("/log/{:016x}", u64::MAX - 4);
    let name = world.with(|state| state.objects.keys().find(|name| name.ends_with(&record)).unwrap().clone());
    world.with(|state| state.objects.remove(&name));
    let file = open(world.store(1), "s3://b/p".into(), &options()).unwrap().unwrap().file().clone();
    let mut block = [0; 4096];
    file.read_at(501 * 4096, &mut block).unwrap();
    assert_eq!(block, [7; 4096]);
    let message = file.read_at(500 * 4096, &mut block).unwrap_err().to_string();
    assert!(message.contains("record 4 is missing"), "{message}");
    let mut part = [0; 5000];
    file.read_at(501 * 4096, &mut part).unwrap_err();
    file.read_at(501 * 4096 + 1, &mut part[..4095]).unwrap();
    assert_eq!(part[..4095], [7; 4095]);
}

fn newest(names: &[String]) -> &str {
    names.iter().find(|name| name.contains("/log/")).unwrap()
}

/// Of two records the one that says that a writer came.
fn oldest(names: &[String]) -> &str {
    names.iter().rfind(|name| name.contains("/log/")).unwrap()
}

#[test]
fn a_record_of_another_incarnation_is_damage() {
    let world = World::new(1, 0);
    let mut one = bucket(&world);
    let buffer = one.create_empty().unwrap();
    buffer.write_at(0, &[7; 4096]).unwrap();
    one.publish().unwrap();
    let other = World::new(2, 0);
    drop(bucket(&other));
    // The prefix was emptied and made anew; a record of before is put under the new one's name.
    let name =
        |world: &World| world.with(|state| newest(&state.objects.keys().cloned().collect::<Vec<_>>()).to_owned());
    let old = world.with(|state| state.objects[&name_of(state)].clone());
    let new = name(&other);
    other.with(|state| state.objects.insert(new, old));
    assert!(matches!(open(other.store(1), "s3://b/p".into(), &options()), Err(Error::Damaged(_))));
}

fn name_of(state: &super::simulated::State) -> String {
    newest(&state.objects.keys().cloned().collect::<Vec<_>>()).to_owned()
}
