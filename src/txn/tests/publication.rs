//! The publication that an operation carries tells for every state whether it contains the
//! operation, and for pages whether anything names them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::support::*;
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Ino, Key, kind};
use crate::storage::MemoryStorage;
use crate::storage::simulated::{Fate, Fault, SimulatedStorage};
use crate::txn::Compression;
use crate::txn::{Publication, State, UnreferencedPages, Volume};

fn key(number: u64) -> Key {
    Key::new(9, kind::XATTR, number)
}

fn has(volume: &Volume, state: &State, number: u64) -> bool {
    volume.view(state).get(key(number), |_| Ok(())).unwrap().is_some()
}

/// Inserts records with consecutive keys.
fn insert(volume: &Volume, publication: &Publication, numbers: std::ops::Range<u64>) -> Result<()> {
    volume.operate(1, false, |op| {
        op.carry(publication);
        numbers.into_iter().try_for_each(|number| op.insert(key(number), &[7; 400]).map(drop))
    })
}

#[test]
fn an_operation_that_fails_is_never_taken_for_published() {
    let dice = Dice::new(1);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    let publication = Publication::default();
    let failed = volume.operate(1, false, |op| {
        op.carry(&publication);
        op.insert(key(1), &[7; 400])?;
        Err::<(), _>(Error::Stale)
    });
    assert!(matches!(failed, Err(Error::Stale)));
    assert!(!publication.is_set() && !publication.is_in(&volume.state()));
    // All that the operation itself can do succeeds; its nodes find no room.
    volume.allocator().limit_size(volume.allocator().blocks().total * 4096);
    let mut held = Vec::new();
    while let Ok(room) = volume.reserve_data(16 << 10, 0) {
        held.push(room);
    }
    assert!(matches!(insert(&volume, &publication, 0..3000), Err(Error::NoSpace(_))));
    assert!(!publication.is_set() && !publication.is_in(&volume.state()));
    assert!(!has(&volume, &volume.state(), 0));
    drop(held);
    volume.allocator().limit_size(u64::MAX);
    // A failed operation may be repeated, and then it is done.
    insert(&volume, &publication, 0..3000).unwrap();
    assert!(publication.is_in(&volume.state()) && has(&volume, &volume.state(), 2999));
}

#[test]
fn the_cells_are_written_before_the_state_can_be_seen() {
    let cells = [Publication::default(), Publication::default()];
    let mut seen = None;
    Publication::announce(&cells, 7, || seen = Some(cells.each_ref().map(Publication::is_set)));
    assert_eq!(seen, Some([true; 2]));
}

#[test]
fn what_was_published_is_in_every_later_state_and_in_none_before() {
    let dice = Dice::new(2);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let before = volume.state();
    let (first, second, nothing) = (Publication::default(), Publication::default(), Publication::default());
    insert(&volume, &first, 1..2).unwrap();
    let between = volume.state();
    insert(&volume, &second, 2..3).unwrap();
    let found = |state: &State| [&first, &second].map(|publication| publication.is_in(state));
    assert_eq!([found(&before), found(&between), found(&volume.state())], [[false; 2], [true, false], [true; 2]]);
    // It changes nothing, so its result is that of the present state, and there is no other state
    // for it.
    let unchanged = volume.operate(1, false, |op| {
        op.carry(&nothing);
        Ok(())
    });
    unchanged.unwrap();
    assert!(nothing.is_in(&volume.state()) && !nothing.is_in(&before));
    // The same trees, stored again by the commit.
    volume.commit().unwrap();
    assert_eq!([found(&before), found(&between), found(&volume.state())], [[false; 2], [true, false], [true; 2]]);
    // A commit that fails takes nothing back: it is in the state, and durable never.
    insert(&volume, &Publication::default(), 3..4).unwrap();
    storage.fail_after(0, Fault::Eio);
    assert!(volume.commit().is_err());
    assert_eq!(found(&volume.state()), [true; 2]);
    assert!(has(&volume, &volume.state(), 3));
    let crashed = open(storage.crash(&mut |_| Fate::Drop), &dice);
    assert_eq!([1, 2, 3].map(|number| has(&crashed, &crashed.state(), number)), [true, true, false]);
}

/// A reader concurrent with publications finds in each state exactly the announced operations.
#[test]
fn readers_find_in_each_state_what_it_is_said_to_have() {
    const OPERATIONS: u64 = 20_000;
    let dice = Dice::new(3);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    let publications: Vec<Publication> = (0..OPERATIONS).map(|_| Publication::default()).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = || {
            let mut from = 0;
            while !stop.load(Ordering::Relaxed) {
                let state = volume.state();
                // The next one may be published just now.
                while from < OPERATIONS && publications[from as usize].is_in(&state) {
                    assert!(has(&volume, &state, from % 100), "operation {from} is said to be in a state without it");
                    from += 1;
                }
                let next =
                    volume.view(&state).get(key(1000), |value| Ok(u64::from_le_bytes(value.try_into().unwrap())));
                assert_eq!(next.unwrap().unwrap_or(0), from, "operations of the state");
            }
        };
        let readers: Vec<_> = (0..2).map(|_| scope.spawn(reader)).collect();
        let published = (0..OPERATIONS).try_for_each(|number| {
            volume.operate(1, false, |op| {
                op.carry(&publications[number as usize]);
                op.insert(key(number % 100), &[])?;
                op.insert(key(1000), &(number + 1).to_le_bytes()).map(drop)
            })
        });
        // Before any failure is passed on, or the scope would wait for ever.
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        published.unwrap();
    });
}

/// Two files on one page, and one on another.
fn write(volume: &Arc<Volume>) -> UnreferencedPages {
    let mut room = volume.reserve_data(90_000, 3).unwrap();
    let (first, second) = (bytes_of(1, 3000), bytes_of(2, 4000));
    let mut pages =
        volume.write_packed(&mut room, &[(Ino(2), 0, &first), (Ino(3), 0, &second)], Compression::Off).unwrap();
    pages.absorb(volume.write_data(&mut room, Ino(4), 0, &bytes_of(3, 70_000), Compression::Off).unwrap());
    pages
}

fn name(volume: &Volume, pages: &mut UnreferencedPages, files: &[u64]) -> Result<()> {
    volume.operate(8, true, |op| {
        pages.name(op, |piece| files.contains(&piece.ino.0))?;
        for piece in pages.pieces().iter().filter(|piece| files.contains(&piece.ino.0)) {
            let extent = Extent { page: piece.page, start: piece.start, length: piece.length, born: op.generation() };
            op.insert(extent_key(piece.ino.0, 0), &extent.encode())?;
        }
        Ok(())
    })
}

#[test]
fn pages_of_an_operation_that_fails_are_given_back_or_named_by_the_next_one() {
    let dice = Dice::new(4);
    let volume = create(Arc::new(MemoryStorage::new()), &dice);
    let before = volume.allocator().blocks().used;
    drop(write(&volume));
    assert_eq!(volume.allocator().blocks().used, before, "nobody named them");
    let fail = |pages: &mut UnreferencedPages| {
        let failed = volume.operate(8, true, |op| {
            pages.name(op, |_| true)?;
            Err::<(), _>(Error::Stale)
        });
        assert!(matches!(failed, Err(Error::Stale)));
    };
    let mut pages = write(&volume);
    fail(&mut pages);
    drop(pages);
    assert_eq!(volume.allocator().blocks().used, before, "the operation that named them failed");
    let mut pages = write(&volume);
    fail(&mut pages);
    // In between one of the files was deleted: its page has no reference, and that of another one
    // is referenced in part.
    name(&volume, &mut pages, &[3]).unwrap();
    assert_eq!(pages.pieces().len(), 2);
    let held: u64 = pages.pieces()[..1].iter().map(|piece| piece.page.run.blocks).sum();
    assert_eq!(volume.allocator().blocks().used, before + held);
    assert!(!volume.stale_pages().is_empty());
    drop(pages);
    assert_eq!(volume.allocator().blocks().used, before + held, "what was published is given back by nobody");
    volume.commit().unwrap();
    assert_live(&volume, &[((3, 0), (2, 4000))].into());
    assert_sound(&volume);
}
