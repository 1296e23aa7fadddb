//! Reservations, the states of freed blocks, reader epochs, erasing and bounded memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::support::*;
use crate::Error;
use crate::format::values::Extent;
use crate::format::{BLOCK, REGION_BLOCKS, Run};
use crate::storage::simulated::{Fault, FaultClass, FaultPlan, OpKind, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::Compression;
use crate::txn::Volume;
use crate::txn::allocator::keep_of;
use crate::txn::commit::CommitReason;

fn run_of(volume: &Volume, file: u64, slot: u64) -> Run {
    let state = volume.state();
    volume.view(&state).get(extent_key(file, slot), Extent::decode).unwrap().unwrap().page.run
}

fn block(storage: &MemoryStorage, run: Run) -> Vec<u8> {
    let mut bytes = vec![0; BLOCK as usize];
    storage.read_at(run.offset(), &mut bytes).unwrap();
    bytes
}

/// TXN-1: blocks freed by commit N stay whole until N + 1 is durable.
#[test]
fn freed_blocks_wait_for_the_commit_after_the_one_that_freed_them() {
    let dice = Dice::new(1);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 3000).unwrap();
    volume.commit().unwrap();
    let run = run_of(&volume, 2, 0);
    let sealed = block(&storage, run);
    delete(&volume, 2, 0).unwrap();
    volume.commit().unwrap();
    for slot in 1..20 {
        put(&volume, 2, slot, slot, 3000).unwrap();
        assert_ne!(run_of(&volume, 2, slot), run, "reused while the commit before may still be the root");
    }
    assert_eq!(block(&storage, run), sealed);
    volume.commit().unwrap();
    // Now two commits are past it: the allocator prefers it.
    let reused = (20..60).any(|slot| {
        put(&volume, 2, slot, slot, 3000).unwrap();
        run_of(&volume, 2, slot) == run
    });
    assert!(reused);
    assert_sound(&volume);
}

/// TXN-1: a reader that took its state before the deletion can read on, after any later commit.
#[test]
fn blocks_that_a_reader_can_see_are_not_reused_or_erased() {
    let dice = Dice::new(2);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    let mut expected = Content::new();
    for slot in 0..8 {
        put(&volume, 2, slot, slot, 20_000).unwrap();
        expected.insert((2, slot), (slot, 20_000));
    }
    // Not even committed: pages that were born and freed in one transaction are as visible to the
    // reader.
    let reader = volume.state();
    for slot in 0..8 {
        delete(&volume, 2, slot).unwrap();
    }
    for round in 0..4 {
        for slot in 0..8 {
            put(&volume, 3, slot, 100 * round + slot, 20_000).unwrap();
        }
        volume.commit().unwrap();
        volume.maintain().unwrap();
        volume.erase_all().unwrap();
        assert_content(&volume, volume.view(&reader), &expected);
    }
    let before = volume.pager().storage().len().unwrap();
    drop(reader);
    volume.erase_all().unwrap();
    for slot in 0..8 {
        put(&volume, 4, slot, slot, 20_000).unwrap();
    }
    assert_eq!(volume.pager().storage().len().unwrap(), before, "freed blocks were not reused");
    assert_sound(&volume);
}

/// TXN-5: a full host refuses the one request, leaves the rest alone, and deletion makes room
/// again.
#[test]
fn a_full_host_refuses_changes_but_not_deletion_commit_and_close() {
    let dice = Dice::new(3);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    storage.set_capacity(Some(8 << 20));
    let mut expected = Content::new();
    let mut slot = 0;
    let refused = loop {
        match put(&volume, 2, slot, slot, 30_000) {
            Ok(()) => expected.insert((2, slot), (slot, 30_000)),
            Err(error) => break error,
        };
        slot += 1;
        if slot % 7 == 0 {
            volume.commit().unwrap();
        }
    };
    assert!(matches!(refused, Error::NoSpace(_)), "{refused}");
    assert!(slot > 50, "only {slot} pages fit");
    volume.pager().sticky_error().check().unwrap();
    volume.commit().unwrap();
    assert_live(&volume, &expected);
    // Deletion works on the full archive, and commits make the blocks usable again.
    for slot in 0..slot / 2 {
        delete(&volume, 2, slot).unwrap();
        expected.remove(&(2, slot));
        volume.commit().unwrap();
    }
    put(&volume, 3, 0, 77, 30_000).unwrap();
    expected.insert((3, 0), (77, 30_000));
    assert_sound(&volume);
    volume.close().unwrap();
    drop(volume);
    let volume = open(storage, &dice);
    assert_live(&volume, &expected);
    assert_sound(&volume);
}

/// The size limit acts like a full host for writers: a request is refused, nothing latches, and
/// deletion frees space again.
#[test]
fn the_size_limit_refuses_changes_but_not_deletion_commit_and_close() {
    const LIMIT: u64 = 10 << 20;
    let dice = Dice::new(12);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    volume.allocator().limit_size(LIMIT);
    let mut expected = Content::new();
    for round in 0..3 {
        let room = volume.allocator().blocks();
        let promised = (room.total - room.used + room.growth - room.headroom) * BLOCK;
        let mut accepted = 0;
        let refused = loop {
            let slot = expected.len() as u64 + 1000 * round;
            match put(&volume, 2, slot, slot, 30_000) {
                Ok(()) => expected.insert((2, slot), (slot, 30_000)),
                Err(error) => break error,
            };
            accepted += 32_768;
        };
        assert!(matches!(refused, Error::NoSpace(_)), "{refused}");
        volume.pager().sticky_error().check().unwrap();
        volume.commit().unwrap();
        assert!(storage.len().unwrap() <= LIMIT);
        if round == 0 {
            assert!(accepted > 5 << 20 && accepted <= promised, "{accepted} bytes were accepted of {promised}");
        }
        for key in expected.keys().copied().collect::<Vec<_>>().iter().step_by(2) {
            delete(&volume, key.0, key.1).unwrap();
            expected.remove(key);
            volume.commit().unwrap();
        }
        assert_live(&volume, &expected);
    }
    assert_eq!(volume.allocator().blocks().growth, 0);
    volume.close().unwrap();
    drop(volume);
    // An archive that is longer than the limit does not grow; its existing space is used.
    let volume = open(storage.clone(), &dice);
    let length = storage.len().unwrap();
    volume.allocator().limit_size(1 << 20);
    for (file, slot) in expected.keys() {
        delete(&volume, *file, *slot).unwrap();
    }
    volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    put(&volume, 3, 0, 1, 30_000).unwrap();
    assert!(storage.len().unwrap() <= length);
    assert_sound(&volume);
}

/// Pages count as taken from their writing on, and no longer when nothing references them.
#[test]
fn blocks_of_pages_that_are_not_committed_are_taken() {
    let dice = Dice::new(13);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    let before = volume.allocator().blocks();
    let mut reservation = volume.reserve_data(30_000, 1).unwrap();
    assert_eq!(volume.allocator().blocks().reserved, before.reserved + 8);
    let pages = volume.write_data(&mut reservation, crate::format::Ino(2), 0, &[7; 30_000], Compression::Off).unwrap();
    assert_eq!(volume.allocator().blocks().used, before.used + 8);
    assert_eq!(volume.allocator().blocks().reserved, before.reserved);
    drop(pages);
    assert_eq!(volume.allocator().blocks().used, before.used);
    for slot in 0..50 {
        put(&volume, 2, slot, slot, 30_000).unwrap();
        put(&volume, 2, slot, slot, 3_000).unwrap();
    }
    volume.commit().unwrap();
    assert_eq!(volume.allocator().blocks().used, volume.allocator().space().1);
    assert_eq!(volume.allocator().blocks().reserved, 0);
}

/// SPACE-2 under fragmentation: every accepted reservation can be written although no long run is
/// free.
#[test]
fn reservations_hold_when_free_space_is_in_fragments() {
    let dice = Dice::new(4);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    storage.set_capacity(Some(10 << 20));
    let mut slots = 0;
    while put(&volume, 2, slots, slots, 60_000).is_ok() {
        slots += 1;
    }
    for slot in (0..slots).step_by(2) {
        delete(&volume, 2, slot).unwrap();
    }
    volume.commit().unwrap();
    volume.erase_all().unwrap();
    let data = bytes_of(5, 128 * 1024);
    let mut written = Vec::new();
    // The reserve may be one long run; it is used up first and the fragments take its place.
    while let Ok(mut reservation) = volume.reserve_data(data.len() as u64, 1) {
        written.push(volume.write_data(&mut reservation, crate::format::Ino(9), 0, &data, Compression::Off).unwrap());
    }
    let counts: Vec<usize> = written.iter().map(|pages| pages.pieces().len()).collect();
    assert!(counts.iter().any(|count| *count > 1), "expected fragments among {counts:?} with {slots} slots");
    for pages in written {
        let pieces = pages.pieces();
        assert_eq!(pieces.iter().map(|p| p.length as usize).sum::<usize>(), data.len());
        for piece in pieces {
            let mut back = vec![0; piece.length as usize];
            volume.pager().read_data(&piece.page, piece.start, &mut back).unwrap();
            assert_eq!(back, data[piece.offset as usize..][..back.len()]);
        }
    }
    assert_sound(&volume);
}

/// The nodes of a commit are contiguous, and the nodes that it frees return as groups for the next:
/// each place is a request to the disk.
#[test]
fn the_nodes_of_a_commit_lie_side_by_side() {
    let dice = Dice::new(9);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    for slot in 0..2000 {
        put(&volume, 2, slot, slot, 3000).unwrap();
    }
    volume.commit().unwrap();
    let (mut nodes, mut places) = (0, 0);
    for round in 0..200_u64 {
        let slot = round * 7919 % 2000;
        put(&volume, 2, slot, round, 3000).unwrap();
        let data = run_of(&volume, 2, slot);
        volume.commit().unwrap();
        let durable = volume.durable();
        let mut runs: Vec<Run> = durable.allocated.iter().map(|(run, _)| *run).filter(|run| *run != data).collect();
        runs.sort_unstable();
        nodes += runs.len();
        places += 1 + runs.windows(2).filter(|pair| pair[0].end() != pair[1].address).count();
    }
    assert!(nodes >= 400, "{nodes} nodes in 200 commits");
    assert!(places * 4 <= 200 * 5, "{nodes} nodes at {places} places in 200 commits");
    assert_sound(&volume);
}

/// Deleted data is gone from the host after the archive is closed, and the file is short again.
#[test]
fn closing_erases_and_gives_back() {
    let dice = Dice::new(5);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    volume.close().unwrap();
    drop(volume);
    let empty = storage.allocated();
    let volume = open(storage.clone(), &dice);
    for slot in 0..100 {
        put(&volume, 2, slot, slot, 60_000).unwrap();
    }
    volume.commit().unwrap();
    let run = run_of(&volume, 2, 50);
    let sealed = block(&storage, run);
    assert!(storage.allocated() > empty + 5_000_000);
    for slot in 0..100 {
        delete(&volume, 2, slot).unwrap();
    }
    volume.close().unwrap();
    assert!(storage.allocated() <= empty + (1 << 20), "{} after, {empty} when empty", storage.allocated());
    let contents = storage.contents();
    let at = run.offset() as usize;
    assert!(contents.len() <= at || contents[at..at + 64] != sealed[..64], "ciphertext survived its deletion");
}

/// However the file grows it ends with a whole group of four blocks: a small page in a broken one
/// at the end would keep the tail for ever.
#[test]
fn the_file_ends_with_a_whole_group_however_it_grows() {
    const ODD: u64 = (10 << 20) + 3 * BLOCK;
    for (limit, capacity) in [(u64::MAX, None), (ODD, None), (u64::MAX, Some(ODD))] {
        let dice = Dice::new(14);
        let storage = Arc::new(MemoryStorage::new());
        let volume = create(storage.clone(), &dice);
        volume.allocator().limit_size(limit);
        storage.set_capacity(capacity);
        let mut lengths = std::collections::BTreeSet::new();
        for slot in 0..300 {
            let written = put(&volume, 2, slot, slot, 60_000);
            let blocks = volume.allocator().space().0;
            assert_eq!(blocks % 4, 0, "{blocks} blocks, limit={limit} capacity={capacity:?}");
            lengths.insert(blocks);
            if written.is_err() {
                break;
            }
        }
        assert!(lengths.len() > 3, "it grew to {lengths:?} only");
    }
}

/// The tail is given back although the regions there were never looked at in the session that freed
/// the last page before them.
#[test]
fn a_free_tail_is_cut_whichever_session_freed_it() {
    let dice = Dice::new(8);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    for slot in 0..600 {
        put(&volume, 2, slot, slot, 120_000).unwrap();
    }
    let reader = volume.state();
    for slot in 1..600 {
        delete(&volume, 2, slot).unwrap();
    }
    // The reader keeps the blocks from being cut in this session.
    volume.close().unwrap();
    drop(reader);
    assert!(storage.len().unwrap() > 64 << 20);
    let volume = open(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 10).unwrap();
    volume.close().unwrap();
    assert!(storage.len().unwrap() < 8 << 20, "{} bytes are left", storage.len().unwrap());
    let volume = open(storage, &dice);
    assert_sound(&volume);
}

/// Regions are loaded when needed, not at opening; opening reads a bounded number of nodes.
#[test]
fn opening_loads_no_region() {
    let dice = Dice::new(6);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    for slot in 0..600 {
        put(&volume, 2, slot, slot, 120_000).unwrap();
    }
    volume.commit().unwrap();
    // The checkpoint that follows a commit with list pages would load the regions of their runs.
    volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    volume.close().unwrap();
    assert!(storage.len().unwrap() > 64 << 20);
    drop(volume);
    let volume = open(storage, &dice);
    assert!((0..3).all(|number| !volume.allocator().map().is_loaded(number)));
    put(&volume, 3, 0, 1, 10).unwrap();
    let loaded: Vec<u64> = (0..4).filter(|number| volume.allocator().map().is_loaded(*number)).collect();
    assert_eq!(loaded, [2], "{:?}", volume.allocator().space());
    assert_sound(&volume);
}

/// An archive of three regions, opened again: none is loaded.
fn of_three_regions(dice: &Dice) -> (Arc<SimulatedStorage>, Arc<Volume>) {
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), dice);
    (0..600).for_each(|slot| put(&volume, 2, slot, slot, 120_000).unwrap());
    volume.commit().unwrap();
    // The checkpoint that follows a commit with list pages would load the regions of their runs.
    volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    volume.close().unwrap();
    drop(volume);
    let volume = open(storage.clone(), dice);
    (storage, volume)
}

/// A writer that grows into a region that is not loaded does not wait for the barrier of a commit.
#[test]
fn a_region_is_loaded_while_a_commit_waits_for_the_medium() {
    let dice = Dice::new(21);
    let (storage, volume) = of_three_regions(&dice);
    put(&volume, 3, 0, 1, 10).unwrap();
    assert!(!volume.allocator().map().is_loaded(0));
    let loaded = Arc::new(AtomicBool::new(false));
    let (weak, told) = (Arc::downgrade(&volume), loaded.clone());
    storage.on_op(Box::new(move |op| {
        let Some(volume) = weak.upgrade().filter(|_| matches!(op, OpKind::Barrier)) else { return };
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(volume.allocator().load_region(0).is_ok()));
        // Longer than any machine takes, so that a wait for this commit fails instead of hanging.
        told.store(receiver.recv_timeout(std::time::Duration::from_secs(60)) == Ok(true), Ordering::Relaxed);
    }));
    volume.commit().unwrap();
    storage.on_op(Box::new(|_| {}));
    assert!(loaded.load(Ordering::Relaxed), "the load waited for the commit");
    assert_sound(&volume);
}

/// Regions taken by a checkpoint stay loaded until they can be loaded from it.
#[test]
fn nothing_is_loaded_from_behind_a_checkpoint_that_is_being_written() {
    let dice = Dice::new(22);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    // Two regions that are full, of which no checkpoint knows.
    (0..600).for_each(|slot| put(&volume, 2, slot, slot, 120_000).unwrap());
    volume.commit().unwrap();
    let before = volume.durable().checkpoint;
    let barriers = Arc::new(AtomicU64::new(0));
    let (weak, seen) = (Arc::downgrade(&volume), barriers.clone());
    storage.on_op(Box::new(move |op| {
        let Some(volume) = weak.upgrade().filter(|_| matches!(op, OpKind::Barrier)) else { return };
        volume.allocator().map().evict(0);
        (0..3).for_each(|number| volume.allocator().load_region(number).unwrap());
        seen.fetch_add(1, Ordering::Relaxed);
    }));
    while volume.durable().checkpoint == before {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    storage.on_op(Box::new(|_| {}));
    assert!(barriers.load(Ordering::Relaxed) > 0);
    assert_sound(&volume);
    drop(volume);
    assert_sound(&open(storage, &dice));
}

/// SPACE-4: growth over a region that was cut off when the archive was closed keeps the content of
/// the records since the checkpoint.
#[test]
fn growing_again_after_a_close_cut_the_file_keeps_the_map_exact() {
    let dice = Dice::new(8);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    let fill = |volume: &Arc<Volume>| (0..300).for_each(|slot| put(volume, 2, slot, slot, 120_000).unwrap());
    fill(&volume);
    volume.commit().unwrap();
    put(&volume, 3, 0, 1, 10).unwrap();
    volume.commit().unwrap();
    let checkpoint = volume.durable().checkpoint;
    assert_eq!(checkpoint, volume.durable().generation);
    assert!(storage.len().unwrap() / BLOCK > REGION_BLOCKS + 1000);
    (0..300).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    volume.close().unwrap();
    assert_eq!(volume.durable().checkpoint, checkpoint, "the deletions are in no checkpoint");
    drop(volume);
    assert!(storage.len().unwrap() / BLOCK < REGION_BLOCKS);
    let volume = open(storage.clone(), &dice);
    fill(&volume);
    for _ in 0..3 {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    // Changes that stay pending would be applied once more to a later state when the region is
    // loaded again.
    assert!(volume.allocator().map().unapplied_regions().is_empty());
    assert_sound(&volume);
    volume.allocator().map().evict(0);
    assert_sound(&volume);
    drop(volume);
    assert_sound(&open(storage, &dice));
}

/// Pages written before a session's first commit are swept after a crash like all others that no
/// root names.
#[test]
fn early_pages_of_a_session_that_never_committed_do_not_survive() {
    let dice = Dice::new(9);
    let storage = Arc::new(MemoryStorage::new());
    let volume = create(storage.clone(), &dice);
    (0..50).for_each(|slot| put(&volume, 2, slot, slot, 100_000).unwrap());
    volume.commit().unwrap();
    (0..49).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    volume.close().unwrap();
    drop(volume);
    let volume = open(storage.clone(), &dice);
    put(&volume, 3, 0, 5, 100_000).unwrap();
    let run = run_of(&volume, 3, 0);
    let sealed = block(&storage, run);
    drop(volume);
    let volume = open(storage.clone(), &dice);
    assert!(volume.allocator().map().next_unswept().is_some(), "free blocks are not swept after a crash");
    volume.erase_all().unwrap();
    assert_ne!(block(&storage, run), sealed, "ciphertext of a transaction that never committed survived");
    assert_sound(&volume);
}

/// A host that refuses to erase for want of space leaves the blocks dirty, so that the next attempt
/// erases them; nothing latches.
#[test]
fn erasing_that_is_refused_is_done_later() {
    let dice = Dice::new(10);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    (0..20).for_each(|slot| put(&volume, 2, slot, slot, 100_000).unwrap());
    volume.commit().unwrap();
    let run = run_of(&volume, 2, 3);
    let mut sealed = vec![0; BLOCK as usize];
    storage.read_at(run.offset(), &mut sealed).unwrap();
    (0..20).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    for _ in 0..3 {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    volume.allocator().release_pending_frees();
    for count in 0..2 {
        storage.fail_after(count, Fault::NoSpace);
        let _ = volume.erase_all();
        volume.pager().sticky_error().check().unwrap();
    }
    volume.erase_all().unwrap();
    let mut now = vec![0; BLOCK as usize];
    storage.read_at(run.offset(), &mut now).unwrap();
    assert!(now != sealed, "ciphertext was never erased");
    assert!(!volume.allocator().map().has_dirty());
    assert_sound(&volume);
}

/// A caller that needs a record gets one, also while another caller waits that has nothing to
/// commit.
#[test]
fn a_drain_is_not_satisfied_by_a_commit_of_nothing() {
    let dice = Dice::new(11);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    for _ in 0..20 {
        let before = volume.durable().generation;
        std::thread::scope(|scope| {
            let mut drain = None;
            volume
                .committer()
                .as_leader(|_| {
                    let until_waiting = |callers| {
                        while volume.committer().waiting_callers() < callers {
                            std::thread::yield_now();
                        }
                    };
                    scope.spawn(|| volume.commit().unwrap());
                    until_waiting(1);
                    drain = Some(scope.spawn(|| volume.committer().commit_for(CommitReason::FreeSpace).unwrap()));
                    until_waiting(2);
                    Ok(())
                })
                .unwrap();
            assert!(drain.unwrap().join().unwrap() > before);
        });
    }
}

/// Too many dirty nodes force a commit in the middle of a long run of operations.
#[test]
fn dirty_nodes_are_bounded() {
    let dice = Dice::new(7);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    let before = volume.durable().generation;
    for n in 0..60_000u64 {
        let key = crate::format::Key::new(n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20, 1, 0);
        volume.operate(1, false, |op| op.insert(key, &[1; 140])).unwrap();
        let dirty = volume.writer().dirty_nodes();
        assert!(dirty < 200, "{dirty} dirty nodes");
    }
    assert!(volume.durable().generation > before);
    assert_sound(&volume);
}

/// Reservations are counted in whole groups: where those are few, nodes fill broken ones.
#[test]
fn nodes_fill_broken_groups_where_whole_ones_are_few() {
    let dice = Dice::new(14);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    (0..400).for_each(|slot| put(&volume, 2, slot, slot, 3000).unwrap());
    volume.commit().unwrap();
    (0..400).filter(|slot| slot % 4 > 0).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    for _ in 0..3 {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    volume.allocator().limit_size(0);
    let mut taken = 0;
    while volume.allocator().reserve(1, keep_of(false)).unwrap() {
        taken += 1;
    }
    let mut space = volume.allocator().map();
    let groups = |space: &mut crate::pager::space::SpaceMap| {
        let count = (0..).take_while(|_| space.try_reserve(1)).count() as u64;
        space.unreserve(count);
        count
    };
    let before = groups(&mut space);
    let nodes: Vec<Run> = (0..40).map(|_| space.allocate_node(1, 0).unwrap()).collect();
    assert_eq!(groups(&mut space), before, "nodes took whole groups while blocks of broken ones were free");
    space.discard(nodes, 0);
    space.unreserve(taken);
    drop(space);
    assert_sound(&volume);
}

/// Blocks being erased cannot be allocated, so a writer without other space waits until they can.
#[test]
fn a_writer_without_room_waits_for_what_is_being_erased() {
    const WANTED: u64 = 4 << 20;
    let dice = Dice::new(15);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    volume.allocator().limit_size(12 << 20);
    let filled = (0..).take_while(|slot| put(&volume, 2, *slot, *slot, 60_000).is_ok()).count() as u64;
    (0..filled).for_each(|slot| assert!(delete(&volume, 2, slot).unwrap()));
    for _ in 0..3 {
        volume.committer().commit_for(CommitReason::FreeSpace).unwrap();
    }
    let (writer, waited) = (parking_lot::Mutex::new(None), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let (weak, seen) = (Arc::downgrade(&volume), waited.clone());
    let writer = Arc::new(writer);
    let slot = writer.clone();
    storage.on_op(Box::new(move |_| {
        let Some(volume) = weak.upgrade().filter(|volume| volume.allocator().is_erasing()) else { return };
        let mut slot = slot.lock();
        if slot.is_some() {
            return;
        }
        let writer = std::thread::spawn({
            let volume = volume.clone();
            move || volume.reserve_data(WANTED, 0).map(drop)
        });
        while !writer.is_finished() && !volume.space_waiter().first().is_locked() {
            std::thread::yield_now();
        }
        seen.store(!writer.is_finished(), std::sync::atomic::Ordering::SeqCst);
        *slot = Some(writer);
    }));
    volume.erase_all().unwrap();
    let writer = writer.lock().take().expect("nothing was erased");
    writer.join().unwrap().unwrap();
    assert!(waited.load(std::sync::atomic::Ordering::SeqCst), "there was room all the time");
}

/// A host reports allocated space without content as a hole. On a full host, the reserve that the
/// session before left is found by a request for it; otherwise nothing could be deleted.
#[test]
fn who_opens_an_archive_on_a_full_host_finds_the_reserve() {
    let dice = Dice::new(21);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    (0..40).for_each(|slot| put(&volume, 2, slot, slot, 100_000).unwrap());
    volume.commit().unwrap();
    // Blocks before the reserve, which are real holes.
    for slot in (0..40).step_by(2) {
        assert!(delete(&volume, 2, slot).unwrap());
        volume.commit().unwrap();
    }
    volume.erase_all().unwrap();
    volume.close().unwrap();
    drop(volume);
    storage.inject(Some(FaultPlan { class: FaultClass::Room, count: 0, fault: Fault::NoSpace, lasting: true }));
    let volume = open(storage.clone(), &dice);
    assert!(matches!(put(&volume, 2, 100, 1, 2_000_000), Err(Error::NoSpace(_))));
    for slot in (1..40).step_by(2) {
        assert!(delete(&volume, 2, slot).unwrap());
        volume.commit().unwrap();
    }
    volume.pager().sticky_error().check().unwrap();
    assert_sound(&volume);
    volume.close().unwrap();
    drop(volume);
    let volume = open(storage, &dice);
    assert_live(&volume, &Content::new());
    assert_sound(&volume);
}
