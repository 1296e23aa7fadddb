//! Concurrent callers that need durability share a commit, and none waits for the gigabytes of
//! another.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::support::*;
use crate::crypto::SecretKey;
use crate::error::Error;
use crate::format::log::{LogEntry, LogPiece};
use crate::format::{BLOCK, Ino, Key, kind};
use crate::frame::PageCipher;
use crate::storage::MemoryStorage;
use crate::storage::simulated::{OpKind, SimulatedStorage};
use crate::txn::allocator::keep_of;
use crate::txn::operation::Logged;
use crate::txn::{Compression, Operation, Volume};

/// Maximum of written bytes that no barrier covered: the bound of one writer, and of
/// several.
const BOUND: u64 = 16 << 20;
/// A page, and the nodes and record of a commit.
const SLACK: u64 = 1 << 20;

/// One commit is at its barrier while seven callers come: one more commit serves them all.
#[test]
fn concurrent_callers_share_a_commit() {
    const CALLERS: u64 = 8;
    let dice = Dice::new(1);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    volume.commit().unwrap();
    let held = AtomicBool::new(false);
    let weak = Arc::downgrade(&volume);
    storage.on_op(Box::new(move |op| {
        if !matches!(op, OpKind::Barrier) || held.swap(true, Ordering::Relaxed) {
            return;
        }
        let Some(volume) = weak.upgrade() else { return };
        while volume.committer().waiting_callers() < CALLERS - 1 {
            std::thread::yield_now();
        }
    }));
    let before = (storage.barriers(), volume.durable().generation);
    std::thread::scope(|scope| {
        for slot in 1..=CALLERS {
            let volume = &volume;
            scope.spawn(move || {
                put(volume, 2, slot, slot, 3000).unwrap();
                volume.commit().unwrap();
            });
        }
    });
    storage.on_op(Box::new(|_| {}));
    assert_eq!(storage.barriers() - before.0, 2, "barriers of {CALLERS} callers");
    assert_eq!(volume.durable().generation.0 - before.1.0, 2);
    // Every one of them is on the medium.
    let expected = (0..=CALLERS).map(|slot| ((2, slot), (slot.max(1), 3000))).collect();
    assert_live(&open(storage.crash(&mut |_| crate::storage::simulated::Fate::Drop), &dice), &expected);
}

/// A caller counted in before a commit began is served by it, regardless of the leader; a later
/// caller needs another one.
#[test]
fn a_caller_that_was_counted_in_is_served_by_the_next_commit() {
    let dice = Dice::new(3);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    let early = volume.want_commit().unwrap();
    let late = Arc::new(std::sync::Mutex::new(None));
    let (weak, kept) = (Arc::downgrade(&volume), Arc::clone(&late));
    storage.on_op(Box::new(move |op| {
        let Some(volume) = weak.upgrade().filter(|_| matches!(op, OpKind::Barrier)) else { return };
        kept.lock().unwrap().get_or_insert_with(|| {
            put(&volume, 2, 1, 2, 3000).unwrap();
            volume.want_commit().unwrap()
        });
    }));
    let generation = volume.commit().unwrap();
    storage.on_op(Box::new(|_| {}));
    let barriers = storage.barriers();
    assert_eq!(volume.commit_wanted(early).unwrap(), generation);
    assert_eq!(storage.barriers(), barriers, "it was durable already");
    let late = late.lock().unwrap().take().unwrap();
    assert_eq!(volume.commit_wanted(late).unwrap(), generation.next());
    let expected = [((2, 0), (1, 3000)), ((2, 1), (2, 3000))].into_iter().collect();
    assert_live(&open(storage.crash(&mut |_| crate::storage::simulated::Fate::Drop), &dice), &expected);
}

/// The flush of a commit holds the writers' lock: however much was written, the barriers follow its
/// release.
#[test]
fn no_writer_waits_for_a_barrier_while_staged_data_is_flushed() {
    let dice = Dice::new(4);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let data = bytes_of(1, 128 * 1024);
    let length = data.len() as u64;
    let write = move |volume: &Arc<Volume>, bytes: u64| {
        for n in 0..bytes / length {
            let mut reservation = volume.reserve_spare(9).unwrap();
            drop(volume.write_data(&mut reservation, Ino(10), n << 17, &data, Compression::Default).unwrap());
        }
    };
    let (weak, flush, flushed) = (Arc::downgrade(&volume), write.clone(), Arc::new(AtomicU64::new(0)));
    let bytes = flushed.clone();
    volume.set_owner(TestOwner::new(move |operation| {
        flush(&weak.upgrade().unwrap(), bytes.load(Ordering::Relaxed));
        operation.insert(extent_key(3, 0), &[1]).map(drop)
    }));
    let (weak, waited) = (Arc::downgrade(&volume), Arc::new(AtomicBool::new(false)));
    let seen = waited.clone();
    storage.on_op(Box::new(move |op| {
        if let (OpKind::Barrier, Some(volume)) = (op, weak.upgrade()) {
            seen.fetch_or(volume.writer().is_locked(), Ordering::Relaxed);
        }
    }));
    // Beyond the bound of one writer, and beyond that of all.
    for most in [4 << 20, 2 * BOUND] {
        put(&volume, 2, most, 1, 3000).unwrap();
        volume.commit().unwrap();
        write(&volume, BOUND - SLACK);
        flushed.store(most, Ordering::Relaxed);
        volume.writer().mark_staged();
        let before = storage.barriers();
        volume.commit().unwrap();
        assert!(!waited.load(Ordering::Relaxed), "a barrier under the writers' lock");
        assert_eq!(storage.barriers() - before, 1, "the commit's own");
        assert!(storage.max_pending() > BOUND - SLACK + most, "only {} bytes were written", storage.max_pending());
    }
}

/// The data that a barrier has to wait for is bounded, however much is written concurrently.
#[test]
fn a_commit_never_waits_for_more_than_the_bound_of_early_pages() {
    let dice = Dice::new(2);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    // One writer, then four.
    for (round, writers, bound) in [(0, 1, BOUND + SLACK), (1, 4, 2 * BOUND + SLACK)] {
        std::thread::scope(|scope| {
            for writer in 0..writers {
                let volume = &volume;
                scope.spawn(move || {
                    let data = bytes_of(writer, 128 * 1024);
                    for n in 0..(48 << 20) / data.len() as u64 / writers {
                        let mut room = volume.reserve_data(data.len() as u64, 1).unwrap();
                        let ino = Ino(10 + writer);
                        drop(volume.write_data(&mut room, ino, n << 17, &data, Compression::Default).unwrap());
                        volume.limit_unsynced().unwrap();
                    }
                });
            }
        });
        assert!(storage.max_pending() <= bound, "{writers} writers left {} bytes unsynced", storage.max_pending());
        assert!(storage.max_pending() > BOUND / 2, "the test wrote too little");
        let before = storage.barriers();
        put(&volume, 2, round, 1, 3000).unwrap();
        volume.commit().unwrap();
        assert!(storage.barriers() - before <= 2, "the commit of a small file took more than its own barriers");
        assert!(storage.max_pending() <= bound);
    }
    assert_sound(&volume);
}

/// Pages sealed ahead are synced in steps only for a single caller, and not together with the data of
/// a stream, which would take long.
#[test]
fn pages_sealed_ahead_are_synced_in_steps_for_a_single_caller() {
    let dice = Dice::new(5);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let barriers_after = |bytes: usize| {
        let data = bytes_of(bytes as u64, bytes);
        for part in data.chunks(128 << 10) {
            let mut reservation = volume.reserve_spare(9).unwrap();
            drop(volume.write_data(&mut reservation, Ino(10), 0, part, Compression::Default).unwrap());
        }
        let before = storage.barriers();
        volume.sync_ahead_in_steps().unwrap();
        storage.barriers() - before
    };
    assert_eq!(barriers_after(96 << 10), 0, "it is not known yet that one caller commits");
    for slot in 0..16 {
        put(&volume, 2, slot, slot, 3000).unwrap();
        volume.commit().unwrap();
    }
    assert_eq!(barriers_after(32 << 10), 0);
    assert_eq!(barriers_after(64 << 10), 1, "a step");
    assert_eq!(barriers_after(32 << 10), 0, "the step was synced");
    assert_eq!(barriers_after(1 << 20), 0, "a stream");
}

fn with_log(dice: &Dice) -> Arc<Volume> {
    let cipher = PageCipher::new(&SecretKey::new([9; 32]), ARCHIVE, true, dice.0.clone());
    let volume = Volume::create_for_records(Arc::new(MemoryStorage::new()), cipher, dice.0.clone(), 1).unwrap();
    volume.commit().unwrap();
    volume
}

/// Data sealed by a failed flush is in no entry of the log, although it counted as logged: the next
/// caller gets a commit.
#[test]
fn an_fsync_after_a_failed_flush_is_no_empty_entry() {
    let volume = with_log(&Dice::new(41));
    let fails = Arc::new(AtomicBool::new(true));
    let flusher = fails.clone();
    volume.set_owner(TestOwner::new(move |op| {
        if flusher.swap(false, Ordering::Relaxed) {
            return Err(Error::NoSpace("a test".into()));
        }
        op.insert(Key::new(5, kind::INLINE, 0), b"flushed").map(drop)
    }));
    volume.writer().mark_staged();
    assert!(matches!(volume.commit(), Err(Error::NoSpace(_))));
    let before = volume.durable().generation;
    let wanted = volume.want_commit().unwrap();
    volume.sync_wanted(wanted).unwrap();
    assert!(volume.durable().generation > before, "it was told that all is durable");
    assert!(volume.view(&volume.state()).get(Key::new(5, kind::INLINE, 0), |_| Ok(())).unwrap().is_some());
}

/// When all other space is taken, also in the middle of the flush, the nodes for data that only an
/// entry has find the space that was promised with it (LOG-5).
#[test]
fn what_an_entry_has_can_be_committed_by_a_full_archive() {
    const LEAVES: u64 = 300;
    let volume = with_log(&Dice::new(42));
    let key = |object| Key::new(object, kind::INLINE, 0);
    // One in each leaf, about.
    for object in 2..2 + LEAVES {
        volume.operate(4, false, |op| op.insert(key(object), &[1; 3000])).unwrap();
    }
    volume.commit().unwrap();
    let taken = Arc::new(Mutex::new(Vec::new()));
    let take = {
        let (volume, taken) = (Arc::downgrade(&volume), taken.clone());
        move || {
            let volume = volume.upgrade().unwrap();
            taken.lock().extend(std::iter::from_fn(|| volume.reserve_spare(1)));
        }
    };
    let takes = take.clone();
    let piece = |object| LogPiece { ino: Ino(object), offset: 0, data: vec![2; 5] };
    let flush = move |op: &mut Operation<'_>| {
        takes();
        (2..2 + LEAVES).try_for_each(|object| op.insert(key(object), &[2; 3000]).map(drop))
    };
    volume.set_owner(TestOwner { flush, pieces: (2..2 + LEAVES).map(piece).collect() });
    let before = volume.durable().generation;
    volume.writer().mark_staged();
    let wanted = volume.want_commit().unwrap();
    volume.sync_wanted(wanted).unwrap();
    assert_eq!(volume.durable().generation, before, "no entry");
    volume.allocator().limit_size(volume.allocator().space().0 * BLOCK);
    take();
    volume.commit().unwrap();
    assert!(volume.durable().generation > before);
    // The rest of the promise was given back.
    taken.lock().clear();
    assert_eq!(volume.allocator().blocks().reserved, 0);
}

/// Replayed records wait for pending space, and hold the space promised to their nodes.
#[test]
fn what_is_laid_waits_for_the_room_of_its_nodes() {
    let mut laid = 0;
    for deleted in 0..40 {
        let volume = with_log(&Dice::new(43));
        (0..40).for_each(|slot| put(&volume, 2, slot, slot, 60_000).unwrap());
        volume.commit().unwrap();
        volume.allocator().limit_size(volume.allocator().space().0 * BLOCK);
        (0..deleted).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
        volume.commit().unwrap();
        // Deleted data is freed by the next commit.
        while volume.allocator().reserve(1, keep_of(true)).unwrap() {}
        let promised = volume.allocator().blocks().reserved;
        let logged = Logged::of(vec![LogEntry { next_ino: 10, inodes: 1, ..LogEntry::default() }]).unwrap();
        match volume.replay(&logged, 10, &mut |_| Ok(())) {
            Ok(()) => assert!(volume.allocator().blocks().reserved >= promised + 20 * 4, "{deleted}"),
            Err(Error::NoSpace(_)) => continue,
            Err(error) => panic!("{error}"),
        }
        laid += 1;
    }
    assert!((5..35).contains(&laid), "{laid}");
}
