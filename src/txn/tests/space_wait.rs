//! Waiting for space: the order of the waiting writers, commits that only free space on a host that
//! refuses them, and the timer running concurrently.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::support::*;
use crate::Error;
use crate::error::Result;
use crate::format::Generation;
use crate::format::log::LogPiece;
use crate::storage::simulated::{Fate, Fault, FaultClass, FaultPlan, SimulatedStorage};
use crate::txn::allocator::keep_of;
use crate::txn::commit::{CommitReason, CommitTail};
use crate::txn::{Operation, Volume, VolumeOwner};

/// Time after which a hanging test fails.
const HANGS: Duration = Duration::from_secs(60);

/// Makes the host accept `count` more writes into blocks that it had allocated.
fn refuse_writes(storage: &SimulatedStorage, count: u64) {
    storage.inject(Some(FaultPlan { class: FaultClass::Write, count, fault: Fault::NoSpace, lasting: true }));
}

/// A volume with twenty extents, and pending frees of a deleted one.
fn freed(storage: &Arc<SimulatedStorage>, dice: &Dice) -> (Arc<Volume>, Content) {
    let volume = create(storage.clone(), dice);
    (0..21).for_each(|slot| put(&volume, 2, slot, slot, 3000).unwrap());
    volume.commit().unwrap();
    assert!(delete(&volume, 2, 20).unwrap());
    volume.commit().unwrap();
    assert!(volume.allocator().map().waits_for_commit());
    (volume, (0..20).map(|slot| ((2, slot), (slot, 3000))).collect())
}

/// However often the host refuses a commit that only releases freed blocks, with a checkpoint or
/// without, nothing is latched, lost or leaked, and the ring's records stay where they are.
#[test]
fn a_commit_without_changes_that_is_refused_for_want_of_space_latches_nothing() {
    let dice = Dice::new(1);
    for due in [false, true] {
        for taken in 0..4 {
            let storage = SimulatedStorage::new();
            let (volume, mut expected) = freed(&storage, &dice);
            volume.committer().set_chain(CommitTail { force_checkpoint: due, ..volume.chain() });
            let before = volume.durable().generation;
            for _ in 0..70 {
                refuse_writes(&storage, taken);
                match volume.committer().commit_for(CommitReason::FreeSpace) {
                    Err(Error::NoSpace(_)) => {}
                    drained => assert!(taken > 0 && drained.is_ok(), "{taken} {drained:?}"),
                }
                volume.pager().sticky_error().check().unwrap();
                // A caller with nothing to commit gets no error.
                volume.commit().unwrap();
            }
            storage.inject(None);
            let crashed = storage.crash(&mut |_| Fate::Keep);
            assert_live(&open(crashed, &dice), &expected);
            if taken == 0 {
                assert_eq!(volume.durable().generation, before);
            }
            let last = volume.durable().generation;
            put(&volume, 2, 30, 30, 3000).unwrap();
            expected.insert((2, 30), (30, 3000));
            volume.commit().unwrap();
            assert!(volume.durable().generation.0 - last.0 <= 2, "numbers were used up");
            volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
            if due {
                assert_ne!(volume.durable().checkpoint, Generation(0));
            }
            volume.allocator().map().evict(0);
            assert_sound(&volume);
            volume.allocator().release_pending_frees();
            assert!(!volume.allocator().map().waits_for_commit(), "what was freed is let go");
            drop(volume);
            let again = open(storage, &dice);
            assert_live(&again, &expected);
            assert_sound(&again);
        }
    }
}

/// A refused empty commit proves nothing about the next one: a caller that shares the next, with
/// changes in it, gets its error.
#[test]
fn who_shares_a_commit_that_failed_is_told_also_after_an_empty_one_was_refused() {
    let dice = Dice::new(1);
    let storage = SimulatedStorage::new();
    let (volume, _) = freed(&storage, &dice);
    refuse_writes(&storage, 0);
    assert!(matches!(volume.committer().commit_for(CommitReason::FreeSpace), Err(Error::NoSpace(_))));
    storage.inject(None);
    put(&volume, 2, 30, 30, 3000).unwrap();
    let (first, second) = (volume.want_commit().unwrap(), volume.want_commit().unwrap());
    refuse_writes(&storage, 0);
    volume.commit_wanted(first).unwrap_err();
    volume.commit_wanted(second).unwrap_err();
}

/// A flusher that finds no room the first `times`.
fn short_of_room(volume: &Volume, times: u64) -> Arc<AtomicU64> {
    let calls = Arc::new(AtomicU64::new(0));
    let count = calls.clone();
    volume.set_owner(TestOwner::new(move |_| match count.fetch_add(1, Ordering::Relaxed) {
        call if call < times => Err(Error::NoSpace("no room for nodes".into())),
        _ => Ok(()),
    }));
    volume.writer().mark_staged();
    calls
}

/// Dirty data finds no space for its nodes, and the host refuses the commit that was to free some.
#[test]
fn a_commit_for_room_that_is_refused_leaves_the_want_of_room() {
    let dice = Dice::new(2);
    let storage = SimulatedStorage::new();
    let (volume, expected) = freed(&storage, &dice);
    short_of_room(&volume, u64::MAX);
    refuse_writes(&storage, 0);
    match volume.commit() {
        Err(Error::NoSpace(reason)) => assert!(reason.contains("room for nodes"), "{reason}"),
        done => panic!("{done:?}"),
    }
    volume.pager().sticky_error().check().unwrap();
    storage.inject(None);
    assert!(matches!(volume.commit(), Err(Error::NoSpace(_))));
    assert_live(&volume, &expected);
}

/// After the last erasing of a close nothing is freed, also when the commit needs others before it
/// for space.
#[test]
fn commits_for_room_make_no_checkpoint() {
    let dice = Dice::new(3);
    let (volume, _) = freed(&SimulatedStorage::new(), &dice);
    volume.committer().set_chain(CommitTail { force_checkpoint: true, ..volume.chain() });
    let before = volume.chain().checkpoint;
    let calls = short_of_room(&volume, 1);
    volume.committer().commit_for(CommitReason::Truncate).unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 2);
    assert_eq!(volume.chain().checkpoint, before, "a commit for room wrote a checkpoint");
}

/// Space goes to the first writer in the queue: a later one that needs little waits until an
/// earlier one that needs much has it.
#[test]
fn a_newcomer_does_not_overtake_who_waits_for_room() {
    let dice = Dice::new(4);
    let volume = create(SimulatedStorage::new(), &dice);
    volume.allocator().limit_size(12 << 20);
    let waits = |count: u64, done: &std::thread::ScopedJoinHandle<'_, bool>| {
        while volume.space_waiter().waiting() < count && !done.is_finished() {
            std::thread::yield_now();
        }
        volume.space_waiter().waiting() >= count
    };
    std::thread::scope(|scope| {
        let first = volume.space_waiter().first().lock();
        let much = scope.spawn(|| volume.reserve_data(64 << 20, 0).is_ok());
        assert!(waits(1, &much), "there is room for much");
        let little = scope.spawn(|| volume.reserve_data(100, 1).is_ok());
        let data_waits = waits(2, &little);
        let operation = scope.spawn(|| volume.operate(1, false, |_| Ok(())).is_ok());
        let operation_waits = waits(3, &operation);
        // A change that frees room passes.
        volume.operate(1, true, |_| Ok(())).unwrap();
        drop(first);
        assert!(!much.join().unwrap());
        assert!(little.join().unwrap());
        assert!(operation.join().unwrap());
        assert!(data_waits && operation_waits, "it was overtaken");
    });
    assert_eq!(volume.space_waiter().waiting(), 0);
}

/// The timer makes the periodic commits, so it does not queue with writers that wait for space.
#[test]
fn background_erasing_does_not_queue_for_room() {
    let dice = Dice::new(5);
    let volume = create(SimulatedStorage::new(), &dice);
    volume.allocator().limit_size(12 << 20);
    (0..40).for_each(|slot| put(&volume, 2, slot, slot, 60_000).unwrap());
    (0..40).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    for _ in 0..3 {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    while volume.allocator().reserve(1, keep_of(false)).unwrap() {}
    assert!(volume.allocator().map().has_dirty());
    *volume.last_erase().lock() = i64::MAX;
    let shortage = volume.space_waiter().first().lock();
    let (done, told) = mpsc::channel();
    let clock = std::thread::spawn({
        let volume = volume.clone();
        move || {
            let _ = done.send(volume.maintain().map(drop));
        }
    });
    let ended = told.recv_timeout(HANGS);
    drop(shortage);
    clock.join().unwrap();
    ended.expect("the clock waited for room").unwrap();
}

/// Another thread frees everything between the caller's own commits and its look at that thread.
struct LateStep {
    volume: Weak<Volume>,
    slots: Mutex<Range<u64>>,
}

impl VolumeOwner for LateStep {
    fn flush(&self, _: &mut Operation<'_>) -> Result<()> {
        Ok(())
    }

    fn take_log_pieces(&self, _: usize) -> Option<Vec<LogPiece>> {
        Some(Vec::new())
    }

    fn reclaim_step(&self) -> Result<bool> {
        Ok(false)
    }

    fn is_reclaim_blocked(&self) -> Result<bool> {
        let volume = self.volume.upgrade().unwrap();
        for slot in std::mem::take(&mut *self.slots.lock()) {
            assert!(delete(&volume, 2, slot)?);
        }
        Ok(false)
    }
}

#[test]
fn pages_that_others_freed_during_the_wait_are_waited_for() {
    let dice = Dice::new(6);
    let volume = create(SimulatedStorage::new(), &dice);
    volume.allocator().limit_size(12 << 20);
    let full = (0..).find(|slot| put(&volume, 2, *slot, *slot, 128 << 10).is_err()).unwrap();
    assert!(volume.reserve_data(4 << 20, 32).is_err());
    volume.set_owner(LateStep { volume: Arc::downgrade(&volume), slots: Mutex::new(0..full) });
    volume.reserve_data(4 << 20, 32).unwrap();
}
