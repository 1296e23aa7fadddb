//! Inventory without a key, removals of a garbage collection, and the costs of both.

use std::sync::Arc;

use lockbox::{Error, Result};

use super::super::Bucket;
use super::super::check_objects;
use super::super::collect_garbage;
use super::super::inventory::{CollectReport, ObjectCheck, ObjectTotals, PrefixedStore, StoredArchive};
use super::super::layout::{BLOCK, RecordBody, RecordKind, Tombstone, Trailer, encode_record};
use super::super::list_archives;
use super::super::map::ObjectId;
use super::super::objects::{MAX_LIST_ENTRIES, ObjectStore, object_path, parse_path};
use super::super::session::WriterSession;
use super::super::store::{BucketStore, MARKER};
use super::super::version::BucketVersion;
use super::GRACE;
use super::options;
use super::simulated::{State, World};
use super::somebody;
use super::store;
use crate::hex;

fn below(world: &Arc<World>, prefix: &str) -> Box<dyn ObjectStore> {
    Box::new(PrefixedStore { objects: world.store(1).into(), prefix: prefix.into() })
}

/// An archive of some segments below a prefix, with a record that its writer went, and one that has
/// pages.
fn back_up(world: &Arc<World>, prefix: &str) {
    let come = || Bucket::open(below(world, prefix), "s3://b/p".into(), &options(), true).unwrap();
    let mut one = come();
    one.session.least_changes = 0;
    one.create_empty().unwrap().write_at(0, &vec![7; 20 << 20]).unwrap();
    one.publish().unwrap();
    let mut two = come();
    two.open_existing().unwrap().unwrap().write_at(1 << 20, &[8; 5 << 10]).unwrap();
    two.publish().unwrap();
}

fn below_b(name: &str) -> String {
    format!("s3://b/{name}")
}

fn listed(world: &Arc<World>) -> Vec<StoredArchive> {
    list_archives(world.store(1), &below_b, &options(), &mut |_, _| Ok(())).unwrap()
}

fn examined(world: &Arc<World>, whole: bool) -> Result<ObjectCheck> {
    check_objects(world.store(1), "s3://b/p".into(), &options(), whole, &mut |_, _| Ok(()))
}

fn all(world: &World, prefix: &str) -> ObjectTotals {
    world.with(|state| {
        let objects = state.objects.iter().filter(|(name, _)| name.starts_with(prefix));
        objects.fold(ObjectTotals::default(), |sum, (_, bytes)| ObjectTotals {
            objects: sum.objects + 1,
            bytes: sum.bytes + bytes.len() as u64,
        })
    })
}

fn spent(world: &World) -> Vec<String> {
    world.with(|state| std::mem::take(&mut state.requests))
}

#[test]
fn archives_are_listed_wherever_they_lie_with_what_they_have() {
    let world = World::new(1, 0);
    assert_eq!(listed(&world).len(), 0);
    back_up(&world, "a/");
    back_up(&world, "b/c/");
    let (a, c) = (all(&world, "a/"), all(&world, "b/c/"));
    // A writer that has come and nothing more, a marker that is none, and what is no archive's.
    std::mem::forget(WriterSession::open(
        Arc::new(BucketStore::new(below(&world, "d/"), "d".into(), options().timeout)),
        somebody(),
        true,
    ));
    world.with(|state| {
        for name in ["e/lockbox", "a/notes", "a/lockbox-x", "f/00000000000000000000000000000000/log/1", "g/log/x"] {
            state.objects.insert(name.into(), b"something".to_vec());
        }
        // Of a prefix that was emptied but for this, and made anew.
        state.objects.insert(format!("a/{}/seg/old", "0".repeat(32)), vec![0; 1000]);
    });
    spent(&world);
    let found = listed(&world);
    // One list, and of each archive its marker and its newest record, which is listed once more.
    assert_eq!(spent(&world).len(), 1 + 3 * 3 + 1);
    let names: Vec<_> = found.iter().map(|stored| stored.address.strip_prefix("s3://b/").unwrap()).collect();
    assert_eq!(names, ["a", "b/c", "d", "e"]);
    assert_eq!((found[0].amount, found[1].amount), (a, c));
    let newest = found[0].newest.as_ref().unwrap().as_ref().unwrap();
    assert_eq!((newest.length, &newest.writer), (20 << 20, &None));
    let came = found[2].newest.as_ref().unwrap().as_ref().unwrap();
    assert_eq!((came.length, came.writer.as_deref()), (0, Some("host")));
    assert!(matches!(found[3].newest, Err(Error::Damaged(_))));
    // One that is the place itself.
    let own = list_archives(below(&world, "a/"), &|_| "s3://b/a".into(), &options(), &mut |_, _| Ok(())).unwrap();
    assert_eq!((&*own[0].address, own[0].amount, own.len()), ("s3://b/a", a, 1));
    let stops = list_archives(world.store(1), &below_b, &options(), &mut |_, _| Err(Error::Interrupted(2)));
    assert!(matches!(stops, Err(Error::Interrupted(2))));
}

#[test]
fn each_object_that_is_gone_cut_or_altered_is_named_and_the_sound_archive_costs_few_requests() {
    let world = World::new(1, 0);
    assert!(matches!(examined(&world, false), Err(Error::Io { .. })));
    back_up(&world, "");
    spent(&world);
    let sound = examined(&world, false).unwrap();
    // The marker, the newest record's number and itself, the checkpoint, one list.
    let asked = spent(&world);
    assert_eq!(asked.len(), 5, "{asked:?}");
    assert!(sound.faults.is_empty() && sound.read == 0, "{sound:?}");
    let whole = examined(&world, true).unwrap();
    assert!(whole.faults.is_empty() && whole.read == whole.needed.bytes && whole.needed == sound.needed, "{whole:?}");
    let total = all(&world, "");
    let parts = [sound.needed, sound.dead, sound.unnamed, sound.records];
    assert_eq!(parts.iter().map(|part| part.objects).sum::<u64>() + 1, total.objects, "{sound:?}");
    assert!(sound.needed.bytes > 20 << 20 && sound.needed.objects >= 4 && sound.records.objects >= 1);
    let names: Vec<String> = world.with(|state| state.objects.keys().filter(|name| *name != MARKER).cloned().collect());
    let (mut gone, mut cut, mut altered) = (0, 0, 0);
    for name in names {
        let kept = world.with(|state| state.objects.remove(&name).unwrap());
        let last = &name[name.len() - 8..];
        let is_told = |examined: Result<ObjectCheck>| match examined {
            Ok(examined) => examined
                .faults
                .iter()
                .any(|fault| fault.contains(&name[name.len() - 64.min(name.len())..]) || fault.starts_with("record ")),
            // What cannot even be opened.
            Err(Error::Damaged(_) | Error::NotArchive(_)) => true,
            Err(error) => panic!("{last}: {error}"),
        };
        gone += usize::from(is_told(examined(&world, false)));
        world.with(|state| state.objects.insert(name.clone(), kept[..kept.len() - 1].to_vec()));
        cut += usize::from(is_told(examined(&world, false)));
        let mut other = kept.clone();
        other[0] ^= 1;
        world.with(|state| state.objects.insert(name.clone(), other));
        altered += usize::from(is_told(examined(&world, true)));
        world.with(|state| state.objects.insert(name, kept));
    }
    // Of the newest record, an older one is what an observer sees: it is the newest then, and
    // misses what was removed for it.
    let needed = sound.needed.objects as usize;
    assert_eq!(altered, needed);
    assert_eq!(cut, needed);
    assert!(gone >= needed - 1, "{gone} of {needed}");
    assert_eq!(examined(&world, true).unwrap(), whole);
}

#[test]
fn a_collection_removes_what_was_dead_for_a_day_and_finds_what_nobody_named() {
    let world = World::new(1, 0);
    let collected = || collect_garbage(world.store(1), "s3://b/p".into(), &options(), false);
    // Where there is no archive none is made.
    assert!(matches!(collected(), Err(Error::Io { .. })));
    assert_eq!(all(&world, ""), ObjectTotals::default());
    back_up(&world, "");
    let prefix = world.with(|state| state.objects.keys().next().unwrap()[..32].to_owned());
    let left = format!("{prefix}/seg/{}", hex(&[9; 32]));
    world.with(|state| state.objects.insert(left.clone(), vec![1; 5000]));
    assert_eq!(examined(&world, false).unwrap().unnamed, ObjectTotals { objects: 1, bytes: 5000 });
    let first = collected().unwrap();
    assert_eq!((first.removed, first.found), (0, 1), "nothing is dead for a day");
    assert!(first.waiting >= 1 && world.with(|state| state.objects.contains_key(&left)));
    let before = examined(&world, true).unwrap();
    assert!(before.dead.objects >= 1 && before.unnamed.objects == 0, "{before:?}");
    world.with(|state| state.clock += GRACE - 60);
    assert_eq!(collected().unwrap().removed, 0);
    world.with(|state| state.clock += 120);
    let second = collected().unwrap();
    assert!(second.removed >= 1 && second.found == 0, "{second:?}");
    assert!(!world.with(|state| state.objects.contains_key(&left)));
    let after = examined(&world, true).unwrap();
    assert!(after.faults.is_empty() && after.needed.bytes > 20 << 20, "{after:?}");
    // It is a writer as any: one that is there is told, and one that may not remove is.
    let mut owner = WriterSession::open(store(&world, 2), somebody(), true).unwrap();
    assert!(matches!(collected(), Err(Error::InUse(_))));
    world.with(|state| state.clock += GRACE + 60);
    let taken = collect_garbage(world.store(1), "s3://b/p".into(), &options(), true).unwrap();
    assert!(taken != CollectReport::default());
    let map = owner.map().clone();
    assert!(matches!(owner.commit(map, Vec::new(), BLOCK, RecordKind::Commit), Err(Error::InUse(_))));
    world.with(|state| {
        state.clock += GRACE + 60;
        state.keeps = true;
    });
    assert!(collected().is_err());
    // It has said that it went all the same.
    world.with(|state| state.keeps = false);
    collected().unwrap();
}

/// Adds a record after the newest one, as a thief of a key does that may only add objects: it calls
/// all needed objects dead since 1970, and needs none of them any more or all. Returns its name.
fn forge(world: &Arc<World>, needs_all: bool) -> String {
    let thief = store(world, 2);
    let incarnation = thief.existing_incarnation().unwrap();
    let BucketVersion { trailer, map, changes, .. } =
        BucketVersion::load_newest(&thief, &incarnation).unwrap().unwrap();
    let tombstones = map.objects_with_sizes().map(|(id, _)| Tombstone::new(id, 1)).collect();
    let (sequence, previous) = (trailer.sequence + 1, trailer.hash);
    let trailer = Trailer { kind: RecordKind::Close, sequence, previous, ..trailer };
    let (trailer, changes) = match needs_all {
        true => (trailer, changes),
        false => (Trailer { checkpoint: None, length: 0, ..trailer }, Vec::new()),
    };
    let (bytes, _) = encode_record(&trailer, &[], &RecordBody { changes, tombstones, writer: somebody() });
    let name = object_path(&incarnation, &ObjectId::Log(sequence));
    thief.create(&name, &Arc::new(bytes)).unwrap();
    name
}

/// The store dates the record itself, so a collection leaves what was needed before, and without
/// the later objects the archive is what it was.
#[test]
fn a_collection_does_not_take_dates_from_records() {
    let world = World::new(1, 0);
    back_up(&world, "");
    let needed = examined(&world, true).unwrap().needed;
    world.with(|state| state.clock += 2 * GRACE);
    let begun = world.with(|state| state.clock);
    forge(&world, false);
    let collected = || collect_garbage(world.store(1), "s3://b/p".into(), &options(), false).unwrap();
    let report = collected();
    assert!(report.removed == 0 && report.waiting >= needed.objects, "{report:?}");
    world.with(|state| state.clock += GRACE - 3600);
    assert_eq!(collected().removed, 0);
    // The owner deletes what was written since.
    world.with(|state| {
        let State { objects, times, .. } = state;
        objects.retain(|name, _| times[name] < begun);
    });
    assert_eq!(examined(&world, true).unwrap().needed, needed);
}

/// However long nobody notices it.
#[test]
fn objects_that_are_needed_and_called_dead_stay() {
    let world = World::new(1, 0);
    back_up(&world, "");
    let needed = examined(&world, true).unwrap().needed;
    forge(&world, true);
    for _ in 0..3 {
        world.with(|state| state.clock += GRACE + 60);
        collect_garbage(world.store(1), "s3://b/p".into(), &options(), false).unwrap();
        drop(Bucket::open(below(&world, ""), "s3://b/p".into(), &options(), true).unwrap());
    }
    let found = examined(&world, true).unwrap();
    assert!(found.faults.is_empty() && found.needed.bytes >= needed.bytes, "{found:?}");
}

#[test]
fn objects_that_died_since_the_checkpoint_are_not_needed_and_are_declared_dead_once() {
    let world = World::new(1, 0);
    let come = || Bucket::open(below(&world, ""), "s3://b/p".into(), &options(), true).unwrap();
    let mut one = come();
    one.session.least_changes = 0;
    one.create_empty().unwrap().write_at(0, &vec![7; 20 << 20]).unwrap();
    one.publish().unwrap();
    let mut two = come();
    two.open_existing().unwrap().unwrap().write_at(0, &vec![8; 20 << 20]).unwrap();
    two.publish().unwrap();
    let dead_segments = || {
        let store = store(&world, 9);
        let newest = BucketVersion::load_newest(&store, &store.existing_incarnation().unwrap()).unwrap().unwrap();
        assert!(newest.trailer.checkpoint.is_some());
        newest.tombstones.iter().filter(|dead| matches!(dead.id, ObjectId::Segment(_))).count()
    };
    let declared = dead_segments();
    assert!(declared > 0);
    drop(come());
    assert_eq!(dead_segments(), declared);
    for _ in 0..2 {
        world.with(|state| state.clock += GRACE + 60);
        drop(come());
    }
    assert_eq!(dead_segments(), 0, "they are removed");
    let found = examined(&world, true).unwrap();
    assert!(found.faults.is_empty(), "{found:?}");
}

#[test]
fn a_store_that_lists_for_ever_is_looked_through_to_a_bound() {
    let world = World::new(1, 0);
    back_up(&world, "");
    let prefix = world.with(|state| state.objects.keys().next().unwrap()[..32].to_owned());
    world.with(|state| {
        for number in 0..21 * MAX_LIST_ENTRIES as u64 {
            state.objects.insert(format!("{prefix}/seg/{number:064x}"), Vec::new());
        }
    });
    assert!(matches!(examined(&world, false), Err(Error::Unsupported(_))));
    assert!(matches!(
        list_archives(world.store(1), &below_b, &options(), &mut |_, _| Ok(())),
        Err(Error::Unsupported(_))
    ));
}

#[test]
fn an_object_has_one_name() {
    let incarnation = [0xab; 16];
    for id in [ObjectId::Log(u64::MAX - 0xabc), ObjectId::Segment([0x0f; 32]), ObjectId::Checkpoint([0xab; 32])] {
        let name = object_path(&incarnation, &id);
        assert_eq!(parse_path(&incarnation, &name), Some(id));
        let (directory, digits) = name.rsplit_once('/').unwrap();
        let others =
            [digits.to_uppercase(), format!("+{}", &digits[1..]), digits.replace("0f", "+f"), digits[1..].to_string()];
        for other in others.iter().filter(|other| *other != digits) {
            assert_eq!(parse_path(&incarnation, &format!("{directory}/{other}")), None, "{other}");
        }
    }
}
