//! Edge cases: no space for a checkpoint, failed leaders, hostile counters, insufficient
//! reservations, lost growth.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::support::*;
use crate::Error;
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, Ino, Run};
use crate::pager::Pager;
use crate::storage::simulated::{Fate, Fault, FaultClass, FaultPlan, OpKind, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::Compression;
use crate::txn::Volume;
use crate::txn::allocator::keep_of;
use crate::txn::commit::CommitReason;

/// Reserves all remaining space but some groups.
fn leave_room(volume: &Volume, groups: u64) -> u64 {
    let mut taken = 0;
    while volume.allocator().reserve(1, keep_of(true)).unwrap() {
        taken += 1;
    }
    assert!(taken > groups);
    volume.allocator().map().unreserve(groups);
    taken - groups
}

/// Allocates groups that were promised, so that they are no longer free; their promise has no
/// holder.
fn take_promised(volume: &Volume, groups: u64) -> Vec<Run> {
    let mut space = volume.allocator().map();
    (0..groups).map(|_| space.allocate(4, 1).unwrap()).collect()
}

fn drain(volume: &Volume, times: u64) {
    for _ in 0..times {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
}

/// The host takes nothing more.
fn full() -> FaultPlan {
    FaultPlan { class: FaultClass::Room, count: 0, fault: Fault::NoSpace, lasting: true }
}

/// TXN-7, specification 9.3: without space a checkpoint waits as long as the ring lasts, then the
/// records name none. Nothing latches, and once there is space a checkpoint is written at once.
#[test]
fn a_checkpoint_without_room_waits_and_never_latches() {
    for groups in [0, 8] {
        let dice = Dice::new(1);
        let storage = SimulatedStorage::new();
        let volume = create(storage.clone(), &dice);
        let expected: Content = (0..20).map(|slot| ((2, slot), (slot, 3000))).collect();
        (0..20).for_each(|slot| put(&volume, 2, slot, slot, 3000).unwrap());
        drain(&volume, 3);
        storage.inject(Some(full()));
        let taken = leave_room(&volume, groups);
        let mut oldest = 0;
        for _ in 0..120 {
            volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
            let record = volume.durable();
            if record.checkpoint != Generation(0) {
                oldest = oldest.max(record.generation.0 - record.checkpoint.0);
            }
        }
        assert_eq!(oldest, 62, "the chain was {oldest} commits long");
        assert_eq!(volume.durable().checkpoint, Generation(0));
        // The crash image is opened on the full host, and used while there still is no space.
        let crashed = storage.crash(&mut |_| Fate::Keep);
        crashed.inject(Some(full()));
        let again = open(crashed.clone(), &dice);
        leave_room(&again, groups);
        for _ in 0..70 {
            again.committer().commit_for(CommitReason::FreeSpace).unwrap();
            assert_eq!(again.durable().checkpoint, Generation(0), "no checkpoint was written");
        }
        assert_live(&again, &expected);
        drop(again);
        let again = open(crashed, &dice);
        again.committer().commit_for(CommitReason::FreeSpace).unwrap();
        assert_eq!(again.durable().checkpoint, again.durable().generation);
        assert_live(&again, &expected);
        assert_sound(&again);

        volume.allocator().map().unreserve(taken);
        for _ in 0..30 {
            volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
            let record = volume.durable();
            assert!(record.generation.0 - record.checkpoint.0 <= 24);
        }
        assert_sound(&volume);
        drop(volume);
        storage.inject(None);
        assert_sound(&open(storage, &dice));
    }
}

/// TXN-5: however much of a full host deletes took, the lists of the commit that makes them durable
/// have space.
#[test]
fn a_long_commit_of_deletes_on_a_full_host_never_latches() {
    let dice = Dice::new(13);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    (0..2500).for_each(|slot| put(&volume, 2, slot, slot, 500).unwrap());
    drain(&volume, 3);
    storage.inject(Some(full()));
    (0..2500).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    let promised = leave_room(&volume, 0);
    let taken = take_promised(&volume, promised);
    volume.commit().unwrap();
    assert!(volume.durable().two_barrier, "the lists fit into the record");
    volume.pager().sticky_error().check().unwrap();
    volume.allocator().map().discard(taken, 0);
    assert_sound(&volume);
}

/// A caller that waits for a commit that failed gets the reason, in the same kind of error as its
/// leader.
#[test]
fn who_waits_for_a_failed_commit_gets_the_leaders_error() {
    const CALLERS: u64 = 8;
    let dice = Dice::new(2);
    for number in [5, 28] {
        let volume = create(Arc::new(MemoryStorage::new()), &dice);
        let led = Arc::new(AtomicU64::new(0));
        let count = led.clone();
        volume.set_owner(TestOwner::new(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            Err(Error::io("reading what is staged", std::io::Error::from_raw_os_error(number)))
        }));
        volume.writer().mark_staged();
        let arrived = AtomicU64::new(0);
        let errors: Vec<Error> = std::thread::scope(|scope| {
            let mut callers = Vec::new();
            volume
                .committer()
                .as_leader(|_| {
                    callers.extend((0..CALLERS).map(|_| {
                        scope.spawn(|| {
                            arrived.fetch_add(1, Ordering::Relaxed);
                            volume.commit().unwrap_err()
                        })
                    }));
                    // They wait for this leader, or come after it and lead themselves: either is
                    // right, and most wait.
                    while arrived.load(Ordering::Relaxed) < CALLERS {
                        std::thread::yield_now();
                    }
                    Ok(())
                })
                .unwrap();
            callers.into_iter().map(|caller| caller.join().unwrap()).collect()
        });
        for error in errors {
            match number {
                5 => {
                    let same = matches!(&error, Error::Io { source, .. } if source.raw_os_error() == Some(5));
                    assert!(same, "{error:?}");
                }
                _ => assert!(matches!(error, Error::NoSpace(_)), "{error:?}"),
            }
        }
        println!("{} of {CALLERS} callers led", led.load(Ordering::Relaxed));
        volume.pager().sticky_error().check().unwrap();
    }
}

/// Seals a record that only a holder of the key can make into its slot.
fn forge(storage: &Arc<MemoryStorage>, dice: &Dice, record: &CommitRecord) {
    Pager::new(storage.clone(), cipher(&dice.0), 1 << 20).write_record(record).unwrap();
}

/// Counters at the end of their range are an error of the change that needs the next number, never
/// a wrapped number.
#[test]
fn counters_of_a_hostile_record_do_not_wrap() {
    let dice = Dice::new(3);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    volume.commit().unwrap();
    let newest = (*volume.durable()).clone();
    drop(volume);
    for generation in [u64::MAX, u64::MAX - 1, u64::MAX - (1 << 40)] {
        let storage = Arc::new(MemoryStorage::from_contents(storage.contents()));
        forge(&storage, &dice, &CommitRecord { generation: Generation(generation), ..newest.clone() });
        for read_only in [false, true] {
            let opened = try_open(storage.clone(), &dice, read_only);
            assert!(matches!(opened, Err(Error::Damaged(_))), "generation {generation}");
        }
    }
    let hostile = CommitRecord {
        generation: newest.generation.next(),
        inodes: u64::MAX,
        used_blocks: u64::MAX,
        next_dead: u64::MAX,
        next_snapshot: u64::MAX,
        ..newest
    };
    forge(&storage, &dice, &hostile);
    let volume = open(storage, &dice);
    assert!(matches!(volume.take_snapshot(b"one"), Err(Error::Damaged(_))));
    volume.operate(1, false, |op| op.allocate_ino()).unwrap();
    volume.operate(1, false, |op| op.bury(Run::new(400, 1), Generation(1))).unwrap_err();
    put(&volume, 2, 1, 1, 3000).unwrap();
    volume.commit().unwrap();
    let findings = volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.iter().any(|finding| finding.detail.contains("counted wrong")), "{findings:?}");
}

/// SPACE-2: a writer that reserved too little fails; it does not take groups promised to others.
#[test]
#[cfg_attr(debug_assertions, should_panic(expected = "of a reservation of 1 groups"))]
fn data_beyond_its_reservation_is_refused() {
    let dice = Dice::new(4);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    let other = volume.reserve_data(100_000, 1).unwrap();
    let mut small = volume.reserve_data(100, 1).unwrap();
    let refused = volume.write_data(&mut small, Ino(2), 0, &bytes_of(1, 60_000), Compression::Off);
    assert!(matches!(refused, Err(Error::Invalid(_))));
    assert_eq!((small.groups(), other.groups()), (1, 7));
}

/// A rebuilt map believes a record's list of freed runs only where no tree has a page and the file
/// has blocks.
#[test]
fn a_rebuilt_space_map_does_not_free_what_is_in_use() {
    let dice = Dice::new(5);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    let first = volume.durable().generation;
    put(&volume, 2, 0, 1, 30_000).unwrap();
    volume.commit().unwrap();
    let state = volume.state();
    let extent = crate::format::values::Extent::decode;
    let page = volume.view(&state).get(extent_key(2, 0), extent).unwrap().unwrap().page.run;
    let newest = (*volume.durable()).clone();
    drop((state, volume));
    let freed = vec![page, Run::new(33, 4), Run::new(newest.total_blocks - 1, 60_000)];
    forge(&storage, &dice, &CommitRecord { generation: newest.generation.next(), freed, ..newest });
    storage.write_at(crate::format::slot_block(first.slot()) * BLOCK, &[0xA5; BLOCK as usize]).unwrap();
    let volume = open(storage.clone(), &dice);
    for slot in 1..60 {
        put(&volume, 2, slot, slot, 3000).unwrap();
        volume.commit().unwrap();
    }
    let expected = (1..60).map(|slot| ((2, slot), (slot, 3000))).chain([((2, 0), (1, 30_000))]).collect();
    assert_live(&volume, &expected);
    assert_sound(&volume);
    drop(volume);
    assert_live(&open(storage, &dice), &expected);
}

/// On a host so full that no block can be withheld, old ciphertext is overwritten in place; when
/// that is refused it stays to be done.
#[test]
fn overwriting_in_place_that_is_refused_is_done_later() {
    let dice = Dice::new(6);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    (0..20).for_each(|slot| put(&volume, 2, slot, slot, 30_000).unwrap());
    volume.commit().unwrap();
    (0..20).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    for _ in 0..3 {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    volume.allocator().release_pending_frees();
    storage.set_capacity(Some(storage.allocated()));
    let taken = leave_room(&volume, 0);
    assert!(volume.allocator().map().begin_erase(true).is_empty(), "there is room to erase in the usual way");
    storage.inject(Some(FaultPlan { class: FaultClass::Write, count: 0, fault: Fault::NoSpace, lasting: true }));
    assert!(matches!(volume.erase_all(), Err(Error::NoSpace(_))));
    assert!(storage.injected() > 0);
    volume.pager().sticky_error().check().unwrap();
    assert!(volume.allocator().map().has_dirty());
    storage.inject(None);
    volume.erase_all().unwrap();
    assert!(!volume.allocator().map().has_dirty());
    volume.allocator().map().unreserve(taken);
    assert_sound(&volume);
}

fn assert_as_long_as_its_record(crashed: &Arc<SimulatedStorage>, dice: &Dice) -> Arc<Volume> {
    let volume = open(crashed.clone(), dice);
    let blocks = volume.durable().total_blocks;
    assert!(crashed.len().unwrap() >= blocks * BLOCK, "the record says {blocks} blocks");
    assert_sound(&volume);
    volume
}

/// Found by the crash campaign (seed 1): the growth of the file is lost, the record that counts on
/// it is not. It was never acknowledged.
#[test]
fn a_commit_whose_growth_was_lost_is_not_trusted() {
    let dice = Dice::new(7);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    let acknowledged = volume.commit().unwrap();
    put(&volume, 2, 1, 2, 3000).unwrap();
    let before = volume.allocator().space().0;
    let more = volume.reserve_data(64 << 20, 0).unwrap();
    assert!(volume.allocator().space().0 > before);
    drop(more);
    let images: Arc<Mutex<Vec<Arc<SimulatedStorage>>>> = Arc::default();
    let (weak, taken) = (Arc::downgrade(&storage), images.clone());
    storage.on_op(Box::new(move |op| {
        if let (OpKind::Barrier, Some(storage)) = (op, weak.upgrade()) {
            let lost = |op: &crate::storage::simulated::PendingOp| match op.kind {
                OpKind::Allocate { .. } => Fate::Drop,
                _ => Fate::Keep,
            };
            taken.lock().push(storage.crash(&mut { lost }));
        }
    }));
    volume.commit().unwrap();
    storage.on_op(Box::new(|_| {}));
    let images = std::mem::take(&mut *images.lock());
    assert!(!images.is_empty());
    for crashed in images {
        let volume = assert_as_long_as_its_record(&crashed, &dice);
        assert!(volume.fallback().is_some_and(|text| text.contains("truncated")));
        assert_eq!(volume.durable().generation, acknowledged);
    }
}

/// Found by the crash campaign: the file is cut only when a durable record says that it is shorter.
#[test]
fn closing_cuts_the_file_behind_a_record_that_says_so() {
    let dice = Dice::new(8);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    (0..100).for_each(|slot| put(&volume, 2, slot, slot, 60_000).unwrap());
    volume.commit().unwrap();
    (0..100).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    let images: Arc<Mutex<Vec<Arc<SimulatedStorage>>>> = Arc::default();
    let (weak, taken) = (Arc::downgrade(&storage), images.clone());
    storage.on_op(Box::new(move |_| {
        let Some(storage) = weak.upgrade() else { return };
        if storage.pending().iter().any(|op| matches!(op.kind, OpKind::SetLen(_))) {
            let cut_only = |op: &crate::storage::simulated::PendingOp| match op.kind {
                OpKind::SetLen(_) => Fate::Keep,
                _ => Fate::Drop,
            };
            taken.lock().push(storage.crash(&mut { cut_only }));
        }
    }));
    volume.close().unwrap();
    storage.on_op(Box::new(|_| {}));
    let images = std::mem::take(&mut *images.lock());
    assert!(!images.is_empty(), "the file was not cut");
    images.iter().for_each(|crashed| drop(assert_as_long_as_its_record(crashed, &dice)));
}

/// A caller that arrives while a commit runs has nothing left to commit when it takes the lead;
/// after a failed one that is no success.
#[test]
fn who_finds_nothing_to_do_after_a_failed_commit_is_not_told_that_all_is_durable() {
    let dice = Dice::new(11);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    volume.commit().unwrap();
    put(&volume, 2, 1, 2, 3000).unwrap();
    let told = std::thread::scope(|scope| {
        let mut caller = None;
        let led = volume.committer().as_leader(|chain| {
            caller = Some(scope.spawn(|| volume.commit()));
            while volume.committer().waiting_callers() == 0 {
                std::thread::yield_now();
            }
            storage.inject(Some(FaultPlan { class: FaultClass::Barrier, count: 0, fault: Fault::Eio, lasting: false }));
            let mut writer = volume.writer().lock();
            volume.committer().commit_locked(CommitReason::Changes, chain, &mut writer)
        });
        assert!(matches!(led, Err(Error::Io { .. })), "{led:?}");
        caller.unwrap().join().unwrap()
    });
    assert!(matches!(told, Err(Error::WriteFailed(_))), "{told:?}");
}

/// TXN-2: the record of a commit too long to list its pages is written only behind a barrier that
/// covers them, and acknowledged behind another.
#[test]
fn the_record_of_a_long_commit_stands_between_two_barriers() {
    let dice = Dice::new(12);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    (0..400).for_each(|slot| put(&volume, 2, slot, slot, 500).unwrap());
    let asked: Arc<Mutex<String>> = Arc::default();
    let log = asked.clone();
    storage.on_op(Box::new(move |op| {
        log.lock().push(match op {
            OpKind::Barrier => 'b',
            OpKind::Write { offset, .. } if matches!(offset / BLOCK, 33..=64 | 353..=384) => 'r',
            _ => 'w',
        });
    }));
    volume.commit().unwrap();
    storage.on_op(Box::new(|_| {}));
    assert!(volume.durable().two_barrier);
    let asked = asked.lock();
    assert!(asked.ends_with("wbrb") && asked.matches('r').count() == 1, "{asked}");
}
