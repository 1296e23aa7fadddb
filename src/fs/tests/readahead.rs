//! Prefetch requests for a remote archive.

use std::ops::Range;
use std::sync::Arc;

use super::support::{CREATOR, OPTIONS, create_with, open_on};
use crate::env::{Environment, SeededEnvironment};
use crate::format::{BLOCK, ROOT_INO};
use crate::fs::extents::FRAME;
use crate::storage::CountingStorage;

/// Pages of a file are in the archive in the order in which they were written back.
#[test]
fn who_reads_a_file_of_another_machine_is_read_ahead_of_by_its_extents_and_nobody_else_is() {
    const FRAMES: u64 = 160;
    for far in [true, false] {
        let storage = Arc::new(CountingStorage::new(far));
        let environment = Arc::new(SeededEnvironment::new(77));
        let fs = create_with(storage.clone(), environment.clone(), OPTIONS);
        let file = fs.create_and_open(ROOT_INO, b"file", 0o644, CREATOR).unwrap().ino;
        let dice = SeededEnvironment::new(78);
        let mut order: Vec<(u64, u64)> = (0..FRAMES).map(|number| (dice.next_u64(), number)).collect();
        order.sort_unstable();
        for (at, (_, number)) in order.into_iter().enumerate() {
            let mut page = vec![0; FRAME as usize];
            dice.fill_random(&mut page).unwrap();
            fs.write(file, number * FRAME, &page).unwrap();
            // Nodes are between the pages of each commit.
            if at % 16 == 15 {
                fs.sync().unwrap();
            }
        }
        fs.release(file).unwrap();
        fs.close().unwrap();
        drop(fs);
        let fs = open_on(storage.clone(), environment);
        storage.take_hints();
        let mut named: Vec<Range<u64>> = Vec::new();
        let (mut expected, mut unexpected) = (0, 0);
        for number in 0..FRAMES {
            storage.take_blocks();
            fs.read(file, number * FRAME, FRAME as usize).unwrap();
            // The first reads show that the access is sequential.
            for block in storage.take_blocks().keys().filter(|_| number >= 4) {
                let is_known = named.iter().any(|range| range.contains(&(block * BLOCK)));
                *if is_known { &mut expected } else { &mut unexpected } += 1;
            }
            named.extend(storage.take_hints());
        }
        let total: u64 = named.iter().map(|range| range.end - range.start).sum();
        let page = FRAME + 2 * BLOCK;
        if far {
            assert!(unexpected * 20 < expected, "{unexpected} blocks came unexpected, {expected} expected");
            // Each page ahead of its read, and once more with it.
            assert!(total <= 2 * FRAMES * page, "{total} bytes were named");
            assert!(named.iter().any(|range| range.end - range.start >= 2 * FRAME), "neighbours are named together");
        } else {
            assert!(expected == 0 && total <= FRAMES * page, "{expected} blocks were expected, {total} bytes named");
        }
    }
}

/// Old pages that stay in part are read when new data becomes pages: inside an fsync, where each
/// round trip to a remote archive adds latency.
#[test]
fn what_a_commit_reads_of_old_pages_is_named_as_a_whole_before() {
    let storage = Arc::new(CountingStorage::new(true));
    let environment = Arc::new(SeededEnvironment::new(79));
    let fs = create_with(storage.clone(), environment.clone(), OPTIONS);
    let file = fs.create_and_open(ROOT_INO, b"file", 0o644, CREATOR).unwrap().ino;
    let mut content = vec![0; 8 * FRAME as usize];
    environment.fill_random(&mut content).unwrap();
    fs.write(file, 0, &content).unwrap();
    fs.release(file).unwrap();
    fs.close().unwrap();
    drop(fs);
    let fs = open_on(storage.clone(), environment);
    // The nodes, and the head of the first page.
    fs.read(file, 0, 1).unwrap();
    // More than half of some pages, of which both ends stay.
    for frame in [0, 3, 4, 7] {
        fs.write(file, frame * FRAME + 20_000, &vec![7; 90_000]).unwrap();
    }
    storage.take_blocks();
    storage.take_hints();
    fs.sync().unwrap();
    let named = storage.take_hints();
    let read: Vec<u64> = storage.take_blocks().into_keys().map(|block| block * BLOCK).collect();
    assert!(read.len() >= 4 * 6, "{read:?} was read");
    for place in read {
        assert!(named.iter().any(|range| range.contains(&place)), "{place} is none of {named:?}");
    }
}
