//! Snapshots that are taken and removed while others are, and removals that a crash interrupts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use super::support::*;
use crate::error::Error;
use crate::format::{Key, kind};
use crate::storage::simulated::{Fate, Fault, FaultClass, FaultPlan, OpKind, SimulatedStorage};
use crate::txn::state::snapshot_tree;
use crate::txn::{OpenOptions, View, Volume};

/// Runs `first`, and `second` in another thread as soon as `first` reads from the storage. `first`
/// continues when `second` has ended or waits for it.
fn interleave(
    storage: &SimulatedStorage,
    volume: &Arc<Volume>,
    first: impl FnOnce(&Volume),
    second: impl Fn(&Volume) + Clone + Send + Sync + 'static,
) {
    let began = AtomicBool::new(false);
    let (weak, (running, run)) = (Arc::downgrade(volume), mpsc::channel());
    storage.fail_reads(Some(Box::new(move |_, _| {
        if !began.swap(true, Ordering::Relaxed)
            && let Some(volume) = weak.upgrade()
        {
            let second = second.clone();
            running.send(run_until_it_waits(move || second(&volume))).unwrap();
        }
        false
    })));
    first(volume);
    run.try_recv().expect("the first one read nothing").join().unwrap();
    storage.fail_reads(None);
}

fn assert_kept(volume: &Volume, name: &[u8], expected: &Content) {
    let listed = volume.snapshots().unwrap();
    let (_, kept) = listed.iter().find(|(_, kept)| kept.name == name).unwrap();
    let tree = snapshot_tree(kept);
    assert_content(volume, View { tree: &tree, store: volume.store(), finger: None }, expected);
}

/// Entries of all dead lists.
fn dead(volume: &Volume) -> usize {
    let mut count = 0;
    let state = volume.state();
    let scanned = state.trees.references.scan(volume.store(), Key::MIN, Key::MAX, &mut |key, _| {
        count += usize::from(key.kind == kind::DEAD);
        Ok(std::ops::ControlFlow::Continue(()))
    });
    scanned.unwrap();
    count
}

#[test]
fn a_snapshot_that_is_taken_while_the_newest_is_removed_keeps_its_pages() {
    let dice = Dice::new(1);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    let first = volume.take_snapshot(b"first").unwrap();
    put(&volume, 2, 1, 2, 3000).unwrap();
    volume.close().unwrap();
    drop(volume);
    let volume = open(storage.clone(), &dice);
    // Opening compares counters with the last records. Without them in memory a query for snapshots
    // reads.
    volume.forget_plaintext();
    interleave(
        &storage,
        &volume,
        |volume| volume.destroy_snapshot(first).unwrap(),
        |volume| {
            volume.take_snapshot(b"second").unwrap();
        },
    );
    for slot in 0..2 {
        assert!(delete(&volume, 2, slot).unwrap());
    }
    volume.commit().unwrap();
    assert_kept(&volume, b"second", &[((2, 0), (1, 3000)), ((2, 1), (2, 3000))].into_iter().collect());
    assert_sound(&volume);
}

#[test]
fn a_snapshot_whose_predecessor_is_removed_meanwhile_leaves_nothing_behind() {
    let dice = Dice::new(2);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    let first = volume.take_snapshot(b"first").unwrap();
    let second = volume.take_snapshot(b"second").unwrap();
    assert!(delete(&volume, 2, 0).unwrap());
    volume.close().unwrap();
    drop(volume);
    let volume = open(storage.clone(), &dice);
    volume.forget_plaintext();
    interleave(
        &storage,
        &volume,
        |volume| volume.destroy_snapshot(second).unwrap(),
        move |volume| volume.destroy_snapshot(first).unwrap(),
    );
    assert_eq!(volume.snapshots().unwrap().len(), 0);
    assert_eq!(dead(&volume), 0);
    assert_sound(&volume);
}

/// The process is killed in the middle of a removal: background work of the next session continues
/// it.
#[test]
fn a_removal_that_a_crash_interrupted_is_ended_in_the_background() {
    let dice = Dice::new(3);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let mut kept = Content::new();
    for slot in 0..1000 {
        put(&volume, 2, slot, slot + 1, 3000).unwrap();
        kept.insert((2, slot), (slot + 1, 3000));
    }
    volume.take_snapshot(b"first").unwrap();
    let expected = kept.clone();
    for slot in 1000..1300 {
        put(&volume, 2, slot, slot + 1, 3000).unwrap();
    }
    let second = volume.take_snapshot(b"second").unwrap();
    for slot in 0..1300 {
        assert!(delete(&volume, 2, slot).unwrap());
    }
    volume.forget_snapshot(second).unwrap();
    assert!(volume.removal_step().unwrap());
    volume.commit().unwrap();
    let crashed = storage.crash(&mut |_| Fate::Drop);
    drop(volume);
    let volume = open(crashed, &dice);
    let names = |volume: &Volume| -> Vec<Vec<u8>> {
        volume.snapshots().unwrap().into_iter().map(|(_, snapshot)| snapshot.name).collect()
    };
    assert_eq!(names(&volume), [b"first".to_vec(), Vec::new()], "it was not ended before the crash");
    assert_kept(&volume, b"first", &expected);
    assert_sound(&volume);
    for _ in 0..100 {
        volume.maintain().unwrap();
    }
    assert_eq!(names(&volume), [b"first"]);
    assert_kept(&volume, b"first", &expected);
    assert_sound(&volume);
    let first = volume.snapshots().unwrap()[0].0;
    assert_nothing_is_left_without(&volume, first);
}

/// Removes the last snapshot, and closes.
fn assert_nothing_is_left_without(volume: &Volume, last: u64) {
    volume.destroy_snapshot(last).unwrap();
    assert_eq!(dead(volume), 0);
    volume.close().unwrap();
    assert!(volume.allocator().space().1 <= 16, "blocks leaked: {:?}", volume.allocator().space());
}

/// Two snapshots lose their names together, one after the other or in one operation: their pages go
/// to the snapshot before both.
#[test]
fn removals_of_neighbours_do_not_mix() {
    for one_operation in [false, true] {
        let dice = Dice::new(4);
        let volume = create(SimulatedStorage::new(), &dice);
        let mut kept = Content::new();
        let mut ids = Vec::new();
        for slot in 0..3u64 {
            put(&volume, 2, slot, slot + 1, 3000).unwrap();
            ids.push(volume.take_snapshot(format!("{slot}").as_bytes()).unwrap());
            if slot == 0 {
                kept.insert((2, 0), (1, 3000));
            }
        }
        assert!(delete(&volume, 2, 2).unwrap());
        if one_operation {
            // One that there is not is passed over.
            let mut chosen = ids[1..].to_vec();
            chosen.push(1 << 40);
            volume.forget_snapshots(&mut |_| Ok(chosen.clone())).unwrap();
        } else {
            volume.forget_snapshot(ids[1]).unwrap();
            assert!(matches!(volume.forget_snapshot(ids[1]), Err(Error::NotFound)));
            volume.forget_snapshot(ids[2]).unwrap();
        }
        assert_eq!(volume.snapshot_use().unwrap().count, 1);
        assert!(delete(&volume, 2, 1).unwrap());
        while volume.removal_step().unwrap() {}
        assert!(delete(&volume, 2, 0).unwrap());
        volume.commit().unwrap();
        assert_kept(&volume, b"0", &kept);
        assert_sound(&volume);
        assert_nothing_is_left_without(&volume, ids[0]);
    }
}

/// The host has no room for each write of it in turn.
#[test]
fn a_snapshot_that_is_refused_for_want_of_space_is_not_there_and_a_retry_takes_it() {
    for taken in 0.. {
        let dice = Dice::new(taken);
        let storage = SimulatedStorage::new();
        let volume = create(storage.clone(), &dice);
        put(&volume, 2, 0, 1, 3000).unwrap();
        volume.take_snapshot(b"old").unwrap();
        put(&volume, 2, 1, 2, 3000).unwrap();
        let names = |volume: &Volume| -> Vec<Vec<u8>> {
            volume.readable_snapshots().unwrap().into_iter().map(|(_, snapshot)| snapshot.name).collect()
        };
        let plan = FaultPlan { class: FaultClass::Write, count: taken, fault: Fault::NoSpace, lasting: true };
        storage.inject(Some(plan));
        let made = volume.take_snapshot(b"new");
        let was_refused = storage.injected() > 0;
        storage.inject(None);
        if !was_refused {
            assert!(made.is_ok() && taken > 3, "{taken} {made:?}");
            return;
        }
        assert!(matches!(made, Err(Error::NoSpace(_))), "{taken} {made:?}");
        assert_eq!(names(&volume), [b"old"], "{taken}");
        assert!(delete(&volume, 2, 0).unwrap());
        volume.take_snapshot(b"new").unwrap();
        while volume.removal_step().unwrap() {}
        volume.commit().unwrap();
        let again = open(storage.crash(&mut |_| Fate::Keep), &dice);
        for volume in [volume, again] {
            assert_eq!(names(&volume), [&b"old"[..], b"new"]);
            assert_kept(&volume, b"old", &[((2, 0), (1, 3000))].into_iter().collect());
            assert_kept(&volume, b"new", &[((2, 1), (2, 3000))].into_iter().collect());
            assert_sound(&volume);
        }
    }
}

/// A commit is due while the names are removed: there are nearly as many dirty nodes as are
/// allowed.
#[test]
fn a_crash_leaves_all_names_of_a_removal_or_none() {
    let dice = Dice::new(6);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    for number in 0..300 {
        volume.take_snapshot(format!("{number:0>200}").as_bytes()).unwrap();
    }
    volume.close().unwrap();
    drop(volume);
    let options = OpenOptions { read_only: false, memory: 1 << 20 };
    let volume = Volume::open(storage.clone(), cipher(&dice.0), dice.0.clone(), 1, &options).unwrap();
    for object in 2.. {
        if volume.writer().dirty_nodes() >= 62 {
            break;
        }
        volume.operate(1, false, |op| op.insert(Key::new(object, kind::INLINE, 0), &[1; 1000])).unwrap();
    }
    let (weak, images) = (Arc::downgrade(&storage), Arc::new(parking_lot::Mutex::new(Vec::new())));
    let crashed = images.clone();
    storage.on_op(Box::new(move |op| {
        if let (OpKind::Barrier, Some(storage)) = (op, weak.upgrade()) {
            crashed.lock().push(storage.crash(&mut |_| Fate::Keep));
        }
    }));
    volume.forget_snapshots(&mut |all| Ok(all.iter().map(|(id, _)| *id).collect())).unwrap();
    volume.commit().unwrap();
    storage.on_op(Box::new(|_| {}));
    assert!(volume.readable_snapshots().unwrap().is_empty());
    let images = std::mem::take(&mut *images.lock());
    assert!(!images.is_empty());
    for image in images {
        let left = open(image, &dice).readable_snapshots().unwrap().len();
        assert!([0, 300].contains(&left), "{left}");
    }
}

/// Changes made by commits alone do not count; dirty data, deletion and removal of the newest
/// snapshot do.
#[test]
fn the_live_tree_differs_from_the_newest_snapshot_after_a_change_only() {
    let volume = create(SimulatedStorage::new(), &Dice::new(5));
    put(&volume, 2, 0, 1, 3000).unwrap();
    volume.commit().unwrap();
    let differs = || volume.differs_from_newest_snapshot().unwrap();
    assert!(differs(), "there is none");
    volume.take_snapshot(b"first").unwrap();
    assert!(!differs(), "its own commit");
    for _ in 0..5 {
        volume.maintain().unwrap();
        volume.commit().unwrap();
    }
    volume.erase_all().unwrap();
    assert!(!differs(), "commits without a change");
    assert!(delete(&volume, 2, 0).unwrap());
    volume.commit().unwrap();
    assert!(differs());
    let second = volume.take_snapshot(b"second").unwrap();
    assert!(!differs());
    volume.destroy_snapshot(second).unwrap();
    volume.commit().unwrap();
    assert!(differs(), "the newest is the first again");
}

#[test]
fn a_name_is_one_that_a_directory_could_have_and_is_given_once() {
    let dice = Dice::new(5);
    let volume = create(SimulatedStorage::new(), &dice);
    for name in [&b""[..], &[b'a'; 256], b"a/b", b"a\0b", b".", b".."] {
        assert!(matches!(volume.take_snapshot(name), Err(Error::Invalid(_))), "{name:?}");
    }
    for name in [&b"..."[..], &[0xff; 255], b"new\nline"] {
        volume.take_snapshot(name).unwrap();
        assert!(matches!(volume.take_snapshot(name), Err(Error::Exists)), "{name:?}");
    }
    let id = volume.snapshots().unwrap()[0].0;
    volume.destroy_snapshot(id).unwrap();
    volume.take_snapshot(b"...").unwrap();
    assert_eq!(volume.snapshots().unwrap().len(), 3);
}
