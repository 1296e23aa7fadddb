//! Commits that the host has no room for (TXN-9), and hosts on which overwriting takes room
//! (STORAGE-6).

use std::sync::Arc;

use super::support::*;
use crate::Error;
use crate::crypto::SecretKey;
use crate::format::{BLOCK, Key, TreeId, kind};
use crate::frame::PageCipher;
use crate::storage::simulated::{Fate, Fault, FaultClass, FaultPlan, SimulatedStorage};
use crate::storage::{BALLAST, Storage};
use crate::txn::commit::{CommitReason, CommitTail};
use crate::txn::{OpenOptions, Volume};

/// Makes the host accept `count` more writes into blocks that it had allocated.
fn refuse_writes(storage: &SimulatedStorage, count: u64) {
    storage.inject(Some(FaultPlan { class: FaultClass::Write, count, fault: Fault::NoSpace, lasting: true }));
}

fn put_all(volume: &Arc<Volume>, count: u64, seed: u64, expected: &mut Content) {
    for slot in 0..count {
        put(volume, 2, slot, slot + seed, 3000).unwrap();
        expected.insert((2, slot), (slot + seed, 3000));
    }
}

/// Refuses every write of a commit in turn: nodes, a checkpoint, list pages, the record. Returns
/// the number of turns.
fn refuse_each(count: u64, due: bool) -> u64 {
    for taken in 0.. {
        let dice = Dice::new(taken);
        let storage = SimulatedStorage::new();
        let volume = create(storage.clone(), &dice);
        let mut before = Content::new();
        put_all(&volume, count, 1, &mut before);
        volume.commit().unwrap();
        let mut expected = before.clone();
        put_all(&volume, count, 5000, &mut expected);
        volume.committer().set_chain(CommitTail { force_checkpoint: due, ..volume.chain() });
        let durable = volume.durable().generation;
        refuse_writes(&storage, taken);
        let refused = volume.commit();
        if storage.injected() == 0 {
            refused.unwrap();
            return taken;
        }
        if refused.is_ok() {
            assert!(due, "only a checkpoint is left out: {taken}");
        } else {
            assert!(matches!(refused, Err(Error::NoSpace(_))), "{taken} {refused:?}");
            assert!(matches!(volume.commit(), Err(Error::NoSpace(_))), "what was refused is forgotten: {taken}");
            assert!(volume.writer().is_dirty() && volume.durable().generation == durable);
            assert_live(&open(storage.crash(&mut |_| Fate::Keep), &dice), &before);
        }
        volume.pager().sticky_error().check().unwrap();
        storage.inject(None);
        // Later commits build on it.
        put(&volume, 2, 0, 77, 3000).unwrap();
        assert!(delete(&volume, 2, 1).unwrap());
        expected.insert((2, 0), (77, 3000));
        expected.remove(&(2, 1));
        volume.commit().unwrap();
        assert!(!volume.writer().is_dirty());
        assert_eq!(volume.durable().generation.0, durable.0 + 2, "{taken}");
        assert_live(&volume, &expected);
        assert_sound(&volume);
        for _ in 0..2 {
            volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
        }
        volume.allocator().release_pending_frees();
        assert!(!volume.allocator().map().waits_for_commit(), "what was freed is let go: {taken}");
        let again = open(storage.crash(&mut |_| Fate::Keep), &dice);
        assert_live(&again, &expected);
        assert_sound(&again);
    }
    unreachable!("every commit ends")
}

#[test]
fn a_commit_that_is_refused_for_want_of_space_is_finished_by_the_next_one() {
    let short = refuse_each(10, false);
    let with_checkpoint = refuse_each(10, true);
    let with_lists = refuse_each(400, false);
    println!("{short} {with_checkpoint} {with_lists}");
    assert!(short >= 2 && with_checkpoint > short && with_lists > short, "nodes and a record are written");
    refuse_each(400, true);
}

/// Every caller that waits for a refused commit gets an error, and no entry of a later one is lost
/// with it.
#[test]
fn every_caller_of_a_refused_commit_is_told() {
    let dice = Dice::new(3);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let mut expected = Content::new();
    put_all(&volume, 5, 1, &mut expected);
    let wanted = [volume.want_commit().unwrap(), volume.want_commit().unwrap()];
    refuse_writes(&storage, 1);
    for wanted in wanted {
        assert!(matches!(volume.commit_wanted(wanted), Err(Error::NoSpace(_))));
    }
    storage.inject(None);
    volume.commit().unwrap();
    assert_live(&open(storage.process_death(), &dice), &expected);
}

/// A commit that failed in another way latches as ever, also one that was refused before.
#[test]
fn a_refused_commit_that_fails_then_latches() {
    let dice = Dice::new(4);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let mut expected = Content::new();
    put_all(&volume, 5, 1, &mut expected);
    refuse_writes(&storage, 1);
    assert!(matches!(volume.commit(), Err(Error::NoSpace(_))));
    storage.inject(None);
    storage.fail_next_barrier();
    assert!(matches!(volume.commit(), Err(Error::Io { .. })));
    assert!(matches!(volume.commit(), Err(Error::WriteFailed(_))));
}

/// Fills a volume on a copy-on-write host and returns its number of slots. Then other programs take
/// the rest of the host.
fn full_host(storage: &Arc<SimulatedStorage>, dice: &Dice) -> (Arc<Volume>, u64) {
    storage.set_room(Some(24 << 20));
    let volume = create(storage.clone(), dice);
    let mut slots = 0;
    while put(&volume, 2, slots, slots, 100_000).is_ok() {
        slots += 1;
        if slots % 10 == 0 {
            volume.commit().unwrap();
        }
        assert!(slots < 1000, "the host is not full");
    }
    volume.commit().unwrap();
    volume.pager().sticky_error().check().unwrap();
    storage.set_room(Some(BALLAST));
    storage.keep_ballast();
    storage.set_room(Some(0));
    (volume, slots)
}

fn empty(volume: &Volume, slots: u64) {
    for slot in 0..slots {
        assert!(delete(volume, 2, slot).unwrap());
    }
}

#[test]
fn an_archive_on_a_full_host_that_copies_on_write_is_emptied_with_its_ballast() {
    let dice = Dice::new(5);
    let storage = SimulatedStorage::new();
    let (volume, slots) = full_host(&storage, &dice);
    assert!(slots > 50, "{slots}");
    empty(&volume, slots);
    volume.commit().unwrap();
    // The deletion is durable. The rest of the ballast need not suffice to erase the deleted data,
    // and nothing latches.
    assert!(matches!(volume.close(), Ok(()) | Err(Error::NoSpace(_))));
    volume.pager().sticky_error().check().unwrap();
    storage.set_room(Some(64 << 20));
    volume.close().unwrap();
    drop(volume);
    assert!(storage.len().unwrap() < 4 << 20, "nothing came back");
    // The ballast that it gave away is reserved again for the next time.
    assert!(storage.cut_ballast());
}

#[test]
fn an_archive_without_ballast_waits_for_room_and_latches_nothing() {
    let dice = Dice::new(6);
    let storage = SimulatedStorage::new();
    let (volume, slots) = full_host(&storage, &dice);
    storage.cut_ballast();
    storage.set_room(Some(0));
    empty(&volume, slots);
    for _ in 0..3 {
        assert!(matches!(volume.commit(), Err(Error::NoSpace(_))));
    }
    assert!(matches!(volume.close(), Err(Error::NoSpace(_))));
    volume.pager().sticky_error().check().unwrap();
    // A user deletes another file.
    storage.set_room(Some(1 << 20));
    volume.commit().unwrap();
    // And one more: erasing takes room, too.
    storage.set_room(Some(64 << 20));
    volume.close().unwrap();
    assert_live(&open(storage.process_death(), &dice), &Content::new());
}

/// The commit was frozen before the log was replayed into the transaction after it. Its record must
/// name the log as pending, whichever write the host refuses next.
#[test]
fn a_refused_commit_keeps_the_log_that_is_replayed_after_it() {
    let key = Key::new(5, kind::INLINE, 0);
    for taken in 0.. {
        let dice = Dice::new(taken);
        let cipher = || PageCipher::new(&SecretKey::new([9; 32]), ARCHIVE, true, dice.0.clone());
        let open = |storage: Arc<SimulatedStorage>| {
            let options = OpenOptions { read_only: false, memory: MEMORY };
            Volume::open(storage, cipher(), dice.0.clone(), 1, &options).unwrap()
        };
        let storage = SimulatedStorage::new();
        let volume = Volume::create_for_records(storage.clone(), cipher(), dice.0.clone(), 1).unwrap();
        volume.commit().unwrap();
        volume.operate(4, false, |op| op.insert(key, b"logged")).unwrap();
        let wanted = volume.want_commit().unwrap();
        volume.sync_wanted(wanted).unwrap();

        let storage = storage.process_death();
        let volume = open(storage.clone());
        let logged = volume.take_logged().unwrap();
        volume.committer().open_session().unwrap();
        volume.forget_history().unwrap();
        refuse_writes(&storage, 0);
        assert!(matches!(volume.commit(), Err(Error::NoSpace(_))));
        storage.inject(None);
        volume.replay(&logged, 0, &mut |_| Ok(())).unwrap();
        refuse_writes(&storage, taken);
        let committed = volume.commit();
        let was_refused = storage.injected() > 0;
        assert_eq!(committed.is_err(), was_refused, "{committed:?}");

        let back = open(storage.crash(&mut |_| Fate::Keep));
        let is_in_tree = back.view(&back.state()).get(key, |_| Ok(())).unwrap().is_some();
        assert!(is_in_tree || back.opened_entries() == 1, "the log is lost: {taken}");
        if !was_refused {
            assert!(is_in_tree && taken > 2, "{taken}");
            return;
        }
    }
}

/// A part of the old space map is needed for a checkpoint alone, which waits until it can be read.
#[test]
fn a_commit_needs_no_node_of_the_space_map() {
    let dice = Dice::new(8);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let mut expected = Content::new();
    // A checkpoint has the pages of the commits before it.
    for seed in [1, 50] {
        put_all(&volume, 5, seed, &mut expected);
        volume.committer().set_chain(CommitTail { force_checkpoint: true, ..volume.chain() });
        volume.commit().unwrap();
    }
    let checkpoint = volume.chain().checkpoint;
    let node = volume.durable().roots[TreeId::Space].pointer;
    let reserved = volume.allocator().blocks().reserved;
    let bytes = node.run.address * BLOCK..node.run.end() * BLOCK;
    storage.fail_reads(Some(Box::new(move |offset, _| bytes.contains(&offset))));
    for seed in [100, 200] {
        put_all(&volume, 5, seed, &mut expected);
        volume.forget_plaintext();
        volume.committer().set_chain(CommitTail { force_checkpoint: true, ..volume.chain() });
        volume.commit().unwrap();
        assert_eq!(volume.chain().checkpoint, checkpoint);
    }
    assert_eq!(volume.allocator().blocks().reserved, reserved);
    volume.pager().sticky_error().check().unwrap();
    storage.fail_reads(None);
    volume.committer().set_chain(CommitTail { force_checkpoint: true, ..volume.chain() });
    put_all(&volume, 5, 300, &mut expected);
    volume.commit().unwrap();
    assert!(volume.chain().checkpoint > checkpoint);
    assert_sound(&volume);
    assert_live(&open(storage.process_death(), &dice), &expected);
}
