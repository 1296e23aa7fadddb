//! Recovery: the trusted record after damage, the repair of a broken chain, and commits that are
//! never undone.

use std::sync::Arc;

use super::support::*;
use crate::Error;
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, TreeId, slot_block};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::commit::CommitReason;
use crate::txn::{Volume, recovery};

fn destroy(storage: &MemoryStorage, block: u64) {
    storage.write_at(block * BLOCK, &[0xA5; BLOCK as usize]).unwrap();
}

/// An archive with three committed slots, not closed.
fn three_commits(dice: &Dice) -> (Arc<MemoryStorage>, Vec<Arc<CommitRecord>>, Content) {
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), dice);
    let mut records = Vec::new();
    let mut expected = Content::new();
    for slot in 0..3 {
        put(&volume, 2, slot, slot, 5000).unwrap();
        expected.insert((2, slot), (slot, 5000));
        volume.commit().unwrap();
        records.push(volume.durable());
    }
    (storage, records, expected)
}

/// A torn one-barrier commit was never acknowledged: the one before is whole and is used, and the
/// number is not used again.
#[test]
fn an_incomplete_newest_commit_falls_back_one_step() {
    let dice = Dice::new(1);
    let (storage, records, mut expected) = three_commits(&dice);
    destroy(&storage, records[2].allocated[0].0.address);
    let volume = open(storage.clone(), &dice);
    let said = format!("commit {} is incomplete", records[2].generation.0);
    assert!(volume.fallback().unwrap().starts_with(&said), "{:?}", volume.fallback());
    expected.remove(&(2, 2));
    assert_live(&volume, &expected);
    assert_sound(&volume);
    put(&volume, 2, 9, 9, 100).unwrap();
    expected.insert((2, 9), (9, 100));
    volume.commit().unwrap();
    // Not even the first one of the session has the number of the rejected one (TXN-4).
    let first = volume.chain().session_first.unwrap();
    assert!(first > records[2].generation);
    drop(volume);
    // The abandoned record cannot come back.
    let volume = open(storage, &dice);
    assert!(volume.fallback().is_none());
    assert_live(&volume, &expected);
    assert_sound(&volume);
}

/// TXN-8: a loss in a page of the last commit after the archive came to rest is damage, also where
/// no block waited to be released.
#[test]
fn a_commit_that_came_to_rest_is_not_undone() {
    let dice = Dice::new(16);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 5000).unwrap();
    volume.commit().unwrap();
    let acknowledged = volume.durable();
    assert!(acknowledged.freed.is_empty() && !acknowledged.two_barrier);
    let interrupted = MemoryStorage::from_contents(storage.contents());
    volume.maintain().unwrap();
    let confirming = volume.durable();
    assert_eq!((confirming.allocated.len(), confirming.roots), (0, acknowledged.roots));
    drop(volume);
    let root = acknowledged.roots[TreeId::Live].pointer.run;
    let lost = |storage: MemoryStorage, read_only| {
        let mut byte = [0];
        storage.read_at(root.offset() + 100, &mut byte).unwrap();
        storage.write_at(root.offset() + 100, &[byte[0] ^ 1]).unwrap();
        try_open(Arc::new(storage), &dice, read_only).unwrap()
    };
    for read_only in [true, false] {
        assert!(lost(interrupted.clone(), read_only).fallback().is_some());
        let volume = lost((*storage).clone(), read_only);
        assert!(volume.fallback().is_none());
        let state = volume.state();
        let error = volume.view(&state).get(extent_key(2, 0), crate::format::values::Extent::decode).unwrap_err();
        assert!(error.to_string().contains(&format!("block={}", root.address)), "{error}");
        assert!(!volume.check_space(false, &mut |_, _| {}).unwrap().is_empty());
    }
}

/// TXN-8: after any last commit, some empty ones follow and then nothing at all is written, however
/// long the archive stays open.
#[test]
fn an_archive_at_rest_is_not_written() {
    let dice = Dice::new(17);
    for pages in [1, 400] {
        let storage = Arc::new(MemoryStorage::new());
        let mut volume = create(storage.clone(), &dice);
        for round in 0..60 {
            (0..pages).for_each(|slot| put(&volume, 2, slot, round, 500).unwrap());
            volume.commit().unwrap();
            assert_eq!(volume.durable().two_barrier, pages > 1);
            assert_rest(&volume, &storage);
            if round % 7 == 0 {
                drop(volume);
                volume = open(storage.clone(), &dice);
                assert_rest(&volume, &storage);
            }
        }
    }
}

fn assert_rest(volume: &Volume, storage: &MemoryStorage) {
    let steps = |count| {
        for _ in 0..count {
            // Erasing is always due.
            *volume.last_erase().lock() = 0;
            volume.maintain().unwrap();
        }
        volume.durable().generation
    };
    let last = steps(4);
    assert!(!recovery::may_be_undone(&volume.durable()));
    let erased = (0..500).find(|_| {
        steps(1);
        !volume.allocator().map().has_dirty()
    });
    let bytes = storage.contents();
    assert_eq!((steps(20), erased.is_some()), (last, true));
    assert!(storage.contents() == bytes);
}

/// Only the record that the incomplete one extends may take its place: commits between it and an
/// older one were acknowledged.
#[test]
fn an_incomplete_commit_without_its_predecessor_is_damage() {
    let dice = Dice::new(13);
    let (storage, records, _) = three_commits(&dice);
    destroy(&storage, records[2].allocated[0].0.address);
    destroy(&storage, slot_block(records[1].generation.slot()));
    let before = storage.contents();
    let error = try_open(storage.clone(), &dice, false).err().unwrap();
    assert!(error.to_string().contains("its predecessor is missing"), "{error}");
    assert_read_all_the_same(&storage, &dice, &records[2], "its predecessor is missing");
    assert!(storage.contents() == before);
}

/// A reader continues with the newest record, reports that, and never goes back to another one.
fn assert_read_all_the_same(storage: &Arc<MemoryStorage>, dice: &Dice, record: &CommitRecord, told: &str) {
    let volume = try_open(storage.clone(), dice, true).unwrap();
    assert_eq!(volume.durable().generation, record.generation);
    let said = volume.fallback().unwrap();
    assert!(said.contains(told) && said.contains("nothing can be added to the archive"), "{said}");
    let lost: Vec<_> = volume.lost_pages().iter().map(|page| page.run).collect();
    assert_eq!(lost, [record.allocated[0].0]);
}

/// A record of two barriers, or of a clean end, was written after its pages were durable: a flaw in
/// them is damage.
#[test]
fn a_flaw_of_a_record_of_two_barriers_or_a_closed_one_is_damage() {
    let dice = Dice::new(14);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 1000, 1, 500).unwrap();
    volume.commit().unwrap();
    (0..400).for_each(|slot| put(&volume, 2, slot, slot, 500).unwrap());
    volume.commit().unwrap();
    let record = volume.durable();
    assert!(record.two_barrier && !record.closed);
    drop(volume);
    let whole = storage.contents();
    destroy(&storage, record.allocated[0].0.address);
    assert_durable_but_flawed(&storage, &dice, record.generation);
    assert_read_all_the_same(&storage, &dice, &record, "was durable, but");

    let storage = Arc::new(MemoryStorage::from_contents(whole));
    let volume = open(storage.clone(), &dice);
    volume.close().unwrap();
    let record = volume.durable();
    assert!(record.closed && !record.two_barrier);
    drop(volume);
    storage.set_len((record.total_blocks - 1) * BLOCK).unwrap();
    assert_durable_but_flawed(&storage, &dice, record.generation);
    // 9.1 rule 5: data past the new end is not read.
    let error = try_open(storage, &dice, true).err().unwrap();
    assert!(error.to_string().contains("the file is truncated"), "{error}");
}

fn assert_durable_but_flawed(storage: &Arc<MemoryStorage>, dice: &Dice, generation: Generation) {
    let before = storage.contents();
    let error = try_open(storage.clone(), dice, false).err().unwrap();
    let wanted = format!("commit {} was durable, but", generation.0);
    assert!(error.to_string().contains(&wanted), "{error}");
    assert!(storage.contents() == before);
}

#[test]
fn two_incomplete_commits_are_damage_and_stay_untouched() {
    let dice = Dice::new(2);
    let (storage, records, _) = three_commits(&dice);
    destroy(&storage, records[2].allocated[0].0.address);
    destroy(&storage, records[1].allocated[0].0.address);
    let before = storage.contents();
    assert!(matches!(try_open(storage.clone(), &dice, false), Err(Error::Damaged(_))));
    assert_read_all_the_same(&storage, &dice, &records[2], "is incomplete)");
    assert!(storage.contents() == before);
}

/// A closed record says that everything before it was durable: a bad page of the commit before is
/// damage, never undone.
#[test]
fn a_durable_commit_is_never_undone() {
    let dice = Dice::new(3);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 50_000).unwrap();
    volume.close().unwrap();
    let state = volume.state();
    let extent = volume.view(&state).get(extent_key(2, 0), crate::format::values::Extent::decode).unwrap().unwrap();
    drop((state, volume));
    destroy(&storage, extent.page.run.address + 1);
    let volume = open(storage, &dice);
    assert!(volume.fallback().is_none());
    let mut out = vec![0; 50_000];
    let error = volume.pager().read_data(&extent.page, 0, &mut out).unwrap_err();
    assert!(error.to_string().contains(&format!("block={}", extent.page.run.address)), "{error}");
    let findings = volume.check_space(true, &mut |_, _| {}).unwrap();
    assert_eq!(findings.len(), 1, "{findings:?}");
}

/// A record that lies between the checkpoint and the newest one is lost: the space map is rebuilt
/// from the trees.
#[test]
fn a_lost_record_of_the_chain_rebuilds_the_space_map() {
    let dice = Dice::new(4);
    let (storage, records, mut expected) = three_commits(&dice);
    destroy(&storage, slot_block(records[1].generation.slot()));
    let volume = open(storage.clone(), &dice);
    assert_live(&volume, &expected);
    assert_sound(&volume);
    for slot in 10..30 {
        put(&volume, 2, slot, slot, 5000).unwrap();
        expected.insert((2, slot), (slot, 5000));
        volume.commit().unwrap();
    }
    assert_sound(&volume);
    drop(volume);
    let volume = open(storage, &dice);
    assert_live(&volume, &expected);
    assert_sound(&volume);
}

#[test]
fn a_ring_without_any_record_is_damage() {
    let dice = Dice::new(5);
    let (storage, _, _) = three_commits(&dice);
    for slot in 0..64 {
        destroy(&storage, slot_block(slot));
    }
    let error = try_open(storage, &dice, false).err().unwrap();
    assert!(error.to_string().contains("commit ring"), "{error}");
}

/// TXN-3: work that fails after its commit was durable (a snapshot on a full host) does not cut
/// that commit out of the chain.
#[test]
fn a_leader_that_fails_after_its_commit_keeps_the_commit_in_the_chain() {
    let dice = Dice::new(9);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 20_000).unwrap();
    let failed = volume.committer().as_leader(|chain| {
        let mut writer = volume.writer().lock();
        volume.committer().commit_locked(CommitReason::FreeSpace, chain, &mut writer)?;
        Err::<(), _>(Error::NoSpace("no room for what follows the commit".into()))
    });
    assert!(matches!(failed, Err(Error::NoSpace(_))));
    put(&volume, 2, 1, 2, 20_000).unwrap();
    volume.commit().unwrap();
    drop(volume);
    let volume = open(storage, &dice);
    assert_sound(&volume);
    assert_live(&volume, &Content::from([((2, 0), (1, 20_000)), ((2, 1), (2, 20_000))]));
}

/// The list pages of the newest record are read at every opening, so a rebuilt map does not
/// allocate them before the next commit.
#[test]
fn a_rebuilt_space_map_keeps_what_the_newest_record_lists() {
    let dice = Dice::new(10);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    let first = volume.durable().generation;
    let mut expected = Content::new();
    for slot in 0..400 {
        put(&volume, 2, slot, slot, 500).unwrap();
        expected.insert((2, slot), (slot, 500));
    }
    volume.commit().unwrap();
    assert!(!volume.durable().delta_list.is_null());
    drop(volume);
    destroy(&storage, slot_block(first.slot()));
    let volume = open(storage.clone(), &dice);
    // Written, but the process dies before it commits.
    for slot in 0..20 {
        put(&volume, 3, slot, slot, 15_000).unwrap();
    }
    drop(volume);
    let volume = open(storage, &dice);
    assert_live(&volume, &expected);
    volume.commit().unwrap();
    assert_sound(&volume);
}

/// Reading needs no space map: damage that keeps it from being rebuilt does not keep a reader out.
#[test]
fn a_reader_opens_although_the_space_map_cannot_be_rebuilt() {
    let dice = Dice::new(11);
    let (storage, records, expected) = three_commits(&dice);
    destroy(&storage, slot_block(records[0].generation.slot()));
    let volume = try_open(storage.clone(), &dice, true).unwrap();
    let references = volume.durable().roots[TreeId::History];
    assert!(references.pointer.is_null());
    drop(volume);
    let volume = open(storage.clone(), &dice);
    for n in 0..2000 {
        volume.operate(1, false, |op| op.insert(crate::format::Key::new(1 << 30, 1, n), &[7; 100])).unwrap();
    }
    volume.commit().unwrap();
    let newest = volume.durable();
    let last_leaf = newest.roots[TreeId::Live];
    assert!(last_leaf.level > 0);
    put(&volume, 9, 0, 1, 10).unwrap();
    volume.commit().unwrap();
    put(&volume, 9, 0, 1, 10).unwrap();
    volume.commit().unwrap();
    let state = volume.state();
    let mut leaves = Vec::new();
    let visit = &mut |p: &crate::format::Pointer, level| {
        leaves.push((*p, level));
        Ok(())
    };
    state.trees.live.visit_pages(volume.store(), visit, &mut |lost| Err(lost.error)).unwrap();
    let listed: Vec<_> = volume.durable().allocated.iter().map(|(run, _)| *run).collect();
    let victim = leaves.iter().rev().find(|(p, level)| *level == 0 && !listed.contains(&p.run)).unwrap().0;
    let lost = volume.durable().checkpoint;
    assert!(lost < volume.durable().generation);
    drop((state, volume));
    destroy(&storage, victim.run.address);
    destroy(&storage, slot_block(lost.slot()));
    assert!(matches!(try_open(storage.clone(), &dice, false), Err(Error::Damaged(_))));
    let volume = try_open(storage, &dice, true).unwrap();
    let state = volume.state();
    for slot in expected.keys().map(|key| key.1) {
        let found = volume.view(&state).get(extent_key(2, slot), crate::format::values::Extent::decode).unwrap();
        assert!(found.is_some());
    }
}

/// More commits than the ring has slots, reopened at every distance from a checkpoint.
#[test]
fn the_ring_wraps_and_every_distance_from_a_checkpoint_reopens() {
    let dice = Dice::new(6);
    let storage = Arc::new(MemoryStorage::new());
    let mut volume = create(storage.clone(), &dice);
    let mut expected = Content::new();
    for round in 0..150u64 {
        put(&volume, 2, round % 17, round, 3000).unwrap();
        expected.insert((2, round % 17), (round, 3000));
        volume.commit().unwrap();
        if round % 3 == 0 {
            drop(volume);
            volume = open(storage.clone(), &dice);
            assert_live(&volume, &expected);
            assert_sound(&volume);
        }
    }
}

/// A commit whose lists do not fit the record takes two barriers and list pages, which the next
/// checkpoint frees.
#[test]
fn long_commits_use_list_pages() {
    let dice = Dice::new(7);
    let storage = Arc::new(MemoryStorage::new());
    let mut volume = create(storage.clone(), &dice);
    let mut expected = Content::new();
    for round in 0..4 {
        for slot in 0..400 {
            put(&volume, 2, slot, round * 1000 + slot, 500).unwrap();
            expected.insert((2, slot), (round * 1000 + slot, 500));
        }
        volume.commit().unwrap();
        assert!(volume.durable().two_barrier);
        assert!(!volume.durable().delta_list.is_null());
        drop(volume);
        volume = open(storage.clone(), &dice);
        assert_live(&volume, &expected);
        assert_sound(&volume);
    }
}

/// The history keeps one record for each writing session that ended; a session that wrote nothing
/// leaves no trace.
#[test]
fn the_history_names_every_writing_session() {
    let dice = Dice::new(8);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    volume.close().unwrap();
    let mut lasts = vec![volume.durable().generation];
    drop(volume);
    for session in 0..3 {
        let volume = open(storage.clone(), &dice);
        volume.close().unwrap();
        drop(volume);
        let volume = open(storage.clone(), &dice);
        put(&volume, 2, session, session, 10).unwrap();
        volume.close().unwrap();
        lasts.push(volume.durable().generation);
    }
    let volume = open(storage, &dice);
    let state = volume.state();
    let mut found = Vec::new();
    let all = (crate::format::Key::MIN, crate::format::Key::MAX);
    state
        .trees
        .history
        .scan(volume.store(), all.0, all.1, &mut |_, value| {
            found.push(crate::format::values::HistoryValue::decode(value)?.last);
            Ok(std::ops::ControlFlow::Continue(()))
        })
        .unwrap();
    lasts.pop();
    assert_eq!(found, lasts);
    assert_ne!(found[0], Generation(0));
}

/// TXN-4: a number may be reused after a crash, so no two sessions may write live nodes under one:
/// otherwise a rescue would find a mixture.
#[test]
fn the_first_commit_of_a_session_changes_no_live_node() {
    for closed in [false, true] {
        let dice = Dice::new(12);
        let storage = Arc::new(MemoryStorage::new());
        let volume = create(storage.clone(), &dice);
        put(&volume, 2, 0, 1, 5000).unwrap();
        volume.commit().unwrap();
        if closed {
            volume.close().unwrap();
        }
        let before = volume.durable();
        drop(volume);
        let volume = open(storage, &dice);
        put(&volume, 2, 1, 2, 5000).unwrap();
        volume.commit().unwrap();
        let ring = volume.pager().read_ring().unwrap();
        let mut session = ring.iter().filter(|found| found.record.session == volume.durable().session);
        let first = &session.next().unwrap().record;
        assert_eq!((first.generation, first.previous_tag), (first.session_first, volume.opened_at().unwrap().tag));
        assert_eq!(first.roots[TreeId::Live], before.roots[TreeId::Live]);
        assert_ne!(session.next().unwrap().record.roots[TreeId::Live], before.roots[TreeId::Live]);
    }
}

/// A crash may take all of a file but its number: that never refers to another file for the holder
/// of a handle, not even when session after session crashes before its first commit of anything.
#[test]
fn inode_numbers_that_a_lost_transaction_gave_out_are_not_given_again() {
    let dice = Dice::new(41);
    let storage = Arc::new(MemoryStorage::new());
    let mut volume = create(storage.clone(), &dice);
    let mut last = 0;
    for session in 0..4 {
        for _ in 0..1000 {
            let given = volume.operate(1, false, |op| op.allocate_ino()).unwrap().0;
            assert!(given > last, "session {session} gave {given} again, {last} was given before");
            last = given;
        }
        assert!(volume.durable().next_ino <= last, "the numbers are durable: nothing was lost");
        drop(volume);
        volume = open(storage.clone(), &dice);
    }
}
