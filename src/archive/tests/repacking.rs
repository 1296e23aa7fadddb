//! Small files share pages; the bytes of a deleted one are erased nevertheless, and those of the
//! others remain.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::erasure::recoverable;
use super::sample::{Expected, cipher, create_on, expected, fresh, header_bytes, noise, open_on, put};
use crate::env::SeededEnvironment;
use crate::error::Error;
use crate::format::page::ChunkTable;
use crate::format::values::Extent;
use crate::format::{BLOCK, Ino, Key, MAX_DATA, Pointer, ROOT_INO, Run, TreeId, kind};
use crate::frame::OpenedPage;
use crate::fs::FileSystem;
use crate::pager::Pager;
use crate::rescue::scan::{open_found, scan};
use crate::storage::simulated::{Fate, OpKind, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};

/// End of a test: with or without waiting for the delay.
#[derive(Clone, Copy, Debug)]
enum Ending {
    Delay,
    Purge,
    Close,
}

const FRAME: u64 = MAX_DATA as u64;

const ENDINGS: [Ending; 3] = [Ending::Delay, Ending::Purge, Ending::Close];

fn name(n: u64) -> Vec<u8> {
    format!("small{n}").into_bytes()
}

/// Creates small files of two owners, all packed.
fn small_files(fs: &FileSystem, count: u64) -> Vec<Ino> {
    let files = (0..count).map(|n| put(fs, ROOT_INO, &name(n), &noise(n, 700 + (n % 9) as usize * 400))).collect();
    fs.sync().unwrap();
    files
}

/// Runs background steps and periodic commits for so many seconds of the test's clock.
fn wait(fs: &FileSystem, seconds: i64) {
    let start = fs.environment.now().seconds;
    while fs.environment.now().seconds < start + seconds {
        if fs.is_dirty() {
            fs.sync().unwrap();
        }
        while fs.maintain().unwrap() {}
        for _ in 0..100_000 {
            fs.environment.now();
        }
    }
}

fn end(fs: &FileSystem, ending: Ending) {
    match ending {
        Ending::Delay => {
            fs.sync().unwrap();
            wait(fs, 22);
        }
        Ending::Purge => fs.purge().unwrap(),
        Ending::Close => fs.close().unwrap(),
    }
}

fn of(storage: &Arc<MemoryStorage>) -> BTreeSet<Ino> {
    recoverable(&(storage.clone() as Arc<dyn Storage>))
}

/// Checks that the content is as expected, and that structure, counts and space are exact.
fn assert_whole(storage: Arc<dyn Storage>, content: &Expected) {
    let fs = open_on(storage, true, 900).unwrap();
    assert!(expected(&fs) == *content);
    let findings = fs.check_structure(true).unwrap();
    assert_eq!(findings.len(), 0, "{findings:?}");
    assert_eq!(fs.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
}

#[test]
fn a_deleted_file_is_gone_from_the_page_that_it_shared() {
    for ending in ENDINGS {
        println!("{ending:?}");
        let (storage, fs) = fresh(1);
        let files = small_files(&fs, 300);
        let all: BTreeSet<Ino> = files.iter().copied().collect();
        assert!(of(&storage).is_superset(&all));
        let mut gone = BTreeSet::new();
        for n in (0..300).filter(|n| n % 3 == 0) {
            fs.unlink(ROOT_INO, &name(n)).unwrap();
            gone.insert(files[n as usize]);
        }
        let content = expected(&fs);
        end(&fs, ending);
        let left: BTreeSet<Ino> = all.difference(&gone).copied().collect();
        assert_eq!(of(&storage), left);
        drop(fs);
        assert_whole(storage, &content);
    }
}

#[test]
fn content_that_was_cut_or_replaced_on_a_shared_page_is_gone() {
    for ending in ENDINGS {
        println!("{ending:?}");
        let (storage, fs) = fresh(2);
        let files = small_files(&fs, 60);
        let before = items(&storage);
        // One becomes inline, one is shortened, one is completely overwritten, one in the middle,
        // one grows to a page of its own.
        fs.truncate(files[1], 50, &mut |_| {}).unwrap();
        fs.truncate(files[2], 800, &mut |_| {}).unwrap();
        fs.write(files[3], 0, &noise(77, 1900)).unwrap();
        fs.sync().unwrap();
        fs.write(files[4], 300, &noise(78, 100)).unwrap();
        fs.write(files[5], 0, &noise(79, 60_000)).unwrap();
        let content = expected(&fs);
        end(&fs, ending);
        let after = items(&storage);
        // Truncated to 50 bytes and to 800: the rest is on no page.
        let held = |items: &[(Ino, u64, u32)], ino: Ino| -> u64 {
            items.iter().filter(|(other, ..)| *other == ino).map(|(_, _, length)| u64::from(*length)).sum()
        };
        assert_eq!((held(&before, files[1]), held(&before, files[2])), (1100, 1500));
        assert!(held(&after, files[1]) <= 50 && held(&after, files[2]) <= 800, "{after:?}");
        assert!(held(&after, files[3]) <= 1900, "{after:?}");
        assert_eq!(held(&after, files[5]), 0);
        drop(fs);
        assert_whole(storage, &content);
    }
}

/// Returns every item of every packed page in the file.
fn items(storage: &Arc<MemoryStorage>) -> Vec<(Ino, u64, u32)> {
    packed_pages(storage).concat()
}

/// Returns the items of each packed page in the file.
fn packed_pages(storage: &Arc<MemoryStorage>) -> Vec<Vec<(Ino, u64, u32)>> {
    let mut found = Vec::new();
    visit_data_pages(storage, &mut |_, _, table| {
        let items: Vec<_> = table.items.iter().map(|item| (item.ino, item.offset, item.length)).collect();
        // Another data page has none.
        found.extend((!items.is_empty()).then_some(items));
        Ok(())
    });
    found
}

/// Calls `f` with each data page of the file that can be opened.
fn visit_data_pages(
    storage: &Arc<MemoryStorage>,
    f: &mut dyn FnMut(Run, &OpenedPage, &ChunkTable) -> crate::error::Result<()>,
) {
    let pager = Pager::new(storage.clone(), cipher(), 1 << 20);
    scan(&**storage, pager.cipher(), &mut |_, _| Ok(()), &mut |run, _| {
        let Ok((_, opened)) = open_found(&pager, run) else { return Ok(()) };
        opened.table().map_or(Ok(()), |table| f(run, &opened, table))
    })
    .unwrap();
}

/// A copy puts a gathered piece of a large file at the beginning of another file, where it looks
/// like a packed one.
#[test]
fn gathered_pieces_never_come_to_a_page_of_several_files() {
    let (storage, fs) = fresh(1);
    let small = small_files(&fs, 40);
    let large = put(&fs, ROOT_INO, b"large", &noise(1, 512 << 10));
    let copy = put(&fs, ROOT_INO, b"copy", b"");
    fs.volume.commit().unwrap();
    let at = |piece: u64| (128 << 10) + piece * 8192;
    for piece in 0..4 {
        fs.write(large, at(piece), &noise(10 + piece, 4096)).unwrap();
    }
    fs.volume.commit().unwrap();
    let gathered = |page: &Vec<(Ino, u64, u32)>| page.iter().any(|(ino, ..)| *ino == large);
    assert_eq!(packed_pages(&storage).iter().find(|page| gathered(page)).unwrap().len(), 4);
    assert_eq!(fs.copy_range(large, at(0), copy, 0, 4096, false).unwrap(), 4096);
    // Parts of that page die, and of the pages of small files.
    fs.write(copy, 0, &noise(20, 4096)).unwrap();
    fs.write(large, at(1), &noise(21, 4096)).unwrap();
    fs.volume.commit().unwrap();
    for n in 0..small.len() as u64 / 2 {
        fs.unlink(ROOT_INO, &name(n)).unwrap();
    }
    fs.purge().unwrap();
    for page in packed_pages(&storage).iter().filter(|page| gathered(page)) {
        assert!(page.iter().all(|(ino, ..)| *ino == large), "{page:?}");
    }
    let content = expected(&fs);
    fs.close().unwrap();
    assert_whole(storage, &content);
}

/// Returns the content of each data page that can be opened, by its first block.
fn data_pages(storage: &Arc<MemoryStorage>) -> BTreeMap<u64, Vec<u8>> {
    let mut pages = BTreeMap::new();
    visit_data_pages(storage, &mut |run, opened, table| {
        let chunks = (0..table.chunks.len()).map(|chunk| opened.read_chunk(chunk));
        pages.insert(run.address, chunks.collect::<Result<Vec<_>, _>>()?.concat());
        Ok(())
    });
    pages
}

fn is_there(pages: &BTreeMap<u64, Vec<u8>>, part: &[u8]) -> bool {
    pages.values().any(|page| page.windows(64).any(|bytes| bytes == &part[..64]))
}

/// REPACK-5
#[test]
fn a_purge_erases_the_replaced_parts_of_large_files() {
    let (storage, fs) = fresh(5);
    let content = noise(1, 6 * FRAME as usize);
    let file = put(&fs, ROOT_INO, b"file", &content);
    put(&fs, ROOT_INO, b"small", &noise(2, 3000));
    fs.sync().unwrap();
    fs.write(file, 50_000, &noise(3, 5000)).unwrap();
    fs.zero_range(file, FRAME + 70_000, 8192, true, false).unwrap();
    for piece in [0, 9] {
        fs.write(file, 2 * FRAME + 40_000 + piece * 8192, &noise(4 + piece, 4096)).unwrap();
    }
    fs.sync().unwrap();
    // One of the two gathered pieces.
    fs.write(file, 2 * FRAME + 40_000, &noise(6, 4096)).unwrap();
    fs.truncate(file, 4 * FRAME + 60_000, &mut |_| {}).unwrap();
    fs.sync().unwrap();
    wait(&fs, 22);
    let replaced = [50_100, FRAME as usize + 71_000, 2 * FRAME as usize + 40_100, 4 * FRAME as usize + 61_000];
    let mut replaced: Vec<Vec<u8>> = replaced.iter().map(|at| content[*at..at + 64].to_vec()).collect();
    replaced.push(noise(4, 4096));
    let before = data_pages(&storage);
    assert!(replaced.iter().all(|part| is_there(&before, part)), "nothing is left to erase");
    let wanted = expected(&fs);
    fs.purge().unwrap();
    let after = data_pages(&storage);
    assert_eq!(replaced.iter().map(|part| is_there(&after, part)).collect::<Vec<_>>(), [false; 5]);
    fs.purge().unwrap();
    assert!(data_pages(&storage).keys().eq(after.keys()), "a second purge finds nothing to rewrite");
    fs.close().unwrap();
    drop(fs);
    assert_whole(storage, &wanted);
}

/// REPACK-5
#[test]
fn a_purge_leaves_large_pages_that_a_copy_or_a_snapshot_names() {
    let (storage, fs) = fresh(6);
    let file = put(&fs, ROOT_INO, b"file", &noise(1, 2 * FRAME as usize));
    let copy = put(&fs, ROOT_INO, b"copy", b"");
    fs.sync().unwrap();
    assert_eq!(fs.copy_range(file, 0, copy, 0, FRAME, false).unwrap(), FRAME);
    fs.zero_range(file, 40_000, 8192, true, false).unwrap();
    fs.sync().unwrap();
    let before = data_pages(&storage);
    fs.purge().unwrap();
    assert!(data_pages(&storage).keys().eq(before.keys()), "the copy names the whole page");
    fs.take_snapshot(b"kept").unwrap();
    fs.zero_range(file, FRAME + 40_000, 8192, true, false).unwrap();
    fs.sync().unwrap();
    fs.purge().unwrap();
    assert!(data_pages(&storage).keys().eq(before.keys()), "the snapshot names the whole page");
    let wanted = expected(&fs);
    fs.close().unwrap();
    drop(fs);
    assert_whole(storage, &wanted);
}

/// Data deleted before a crash is erased by the next session, however that ends.
#[test]
fn what_a_crash_kept_from_being_repacked_is_gone_after_the_next_session() {
    for ending in ENDINGS {
        println!("{ending:?}");
        let storage = SimulatedStorage::new();
        storage.write_at(0, &header_bytes()).unwrap();
        let fs = create_on(storage.clone(), 3);
        let files = small_files(&fs, 100);
        for n in (0..100).filter(|n| n % 2 == 0) {
            fs.unlink(ROOT_INO, &name(n)).unwrap();
        }
        fs.sync().unwrap();
        let content = expected(&fs);
        let crashed = storage.crash(&mut |_| Fate::Keep);
        let kept: BTreeSet<Ino> = files.iter().copied().skip(1).step_by(2).collect();
        let found = recoverable(&(crashed.clone() as Arc<dyn Storage>));
        assert!(found.len() > kept.len(), "nothing was left to look for");
        let again = open_on(crashed.clone(), false, 103).unwrap();
        if matches!(ending, Ending::Delay) {
            // The stale pages wait for their delay as in the first session.
            wait(&again, 25);
        }
        end(&again, ending);
        assert_eq!(recoverable(&(crashed.clone() as Arc<dyn Storage>)), kept);
        drop(again);
        assert_whole(crashed, &content);
    }
}

/// Small files, of which every second one is deleted, after a crash: no page is noted. The last
/// commit rewrote few pages, so that damage to the others is no interrupted commit.
fn with_remains(seed: u64, count: u64) -> (Vec<u8>, Vec<Ino>) {
    let storage = SimulatedStorage::new();
    storage.write_at(0, &header_bytes()).unwrap();
    let fs = create_on(storage.clone(), seed);
    let files = small_files(&fs, count);
    (0..count).step_by(2).for_each(|n| fs.unlink(ROOT_INO, &name(n)).unwrap());
    fs.sync().unwrap();
    put(&fs, ROOT_INO, b"last", b"");
    fs.sync().unwrap();
    (storage.crash(&mut |_| Fate::Keep).contents(), files)
}

fn purge_damaged(bytes: &[u8], at: u64) -> (Arc<SimulatedStorage>, Arc<FileSystem>) {
    let mut bytes = bytes.to_vec();
    bytes[at as usize] ^= 1;
    let storage = SimulatedStorage::from_contents(&bytes);
    let fs = open_on(storage.clone(), false, 109).unwrap();
    let purged = fs.purge().unwrap_err();
    assert!(matches!(&purged, Error::Damaged(why) if why.contains("cannot search all pages")), "{purged}");
    (storage, fs)
}

/// REPACK-4
#[test]
fn a_purge_erases_remains_after_a_damaged_leaf_and_reports_it() {
    let (bytes, files) = with_remains(8, 1200);
    let reader = |bytes: &[u8]| open_on(SimulatedStorage::from_contents(bytes), true, 108).unwrap();
    let newest = reader(&bytes);
    let mut leaves = Vec::new();
    let durable = newest.volume.durable();
    let tree = crate::btree::Tree::from_root(TreeId::Live, &durable.roots[TreeId::Live]);
    let mut found = |pointer: &Pointer, level| {
        leaves.extend(
            (level == 0 && durable.allocated.iter().all(|(run, _)| *run != pointer.run)).then_some(pointer.run),
        );
        Ok(())
    };
    tree.visit_pages(newest.volume.store(), &mut found, &mut |lost| Err(lost.error)).unwrap();
    // The first leaf with inodes; those of names come before it.
    let lost = leaves.iter().find_map(|leaf| {
        let mut bytes = bytes.clone();
        bytes[leaf.offset() as usize + 100] ^= 1;
        let reader = reader(&bytes);
        let last = files.iter().rposition(|ino| matches!(reader.attributes(*ino), Err(Error::Damaged(_))))?;
        Some((leaf, last))
    });
    let (leaf, last) = lost.unwrap();
    assert!(last < 400, "{last}");
    let (storage, fs) = purge_damaged(&bytes, leaf.offset() + 100);
    let left = recoverable(&(storage as Arc<dyn Storage>));
    // A page with a file of that leaf is not examined.
    let far = files.iter().enumerate().skip(last + 200);
    far.for_each(|(n, ino)| assert_eq!(left.contains(ino), n % 2 == 1, "{n}, {last}"));
    fs.close().unwrap();
}

/// REPACK-4. The list of its files, or the content of one, cannot be read.
#[test]
fn a_purge_reports_a_damaged_page_that_may_have_remains() {
    let (bytes, files) = with_remains(9, 120);
    let newest = open_on(SimulatedStorage::from_contents(&bytes), true, 108).unwrap();
    let state = newest.volume.state();
    let key = Key::new(files[1].0, kind::EXTENT, 0);
    let page = newest.volume.view(&state).get(key, Extent::decode).unwrap().unwrap().page.run;
    for at in [100, page.blocks * BLOCK / 2] {
        purge_damaged(&bytes, page.offset() + at);
    }
}

/// A crash at every barrier of a purge preserves all files, and the next purge completes the work.
#[test]
fn a_crash_while_pages_are_repacked_loses_nothing() {
    let storage = SimulatedStorage::new();
    storage.write_at(0, &header_bytes()).unwrap();
    let fs = create_on(storage.clone(), 4);
    let files = small_files(&fs, 200);
    for n in (0..200).filter(|n| n % 4 != 0) {
        fs.unlink(ROOT_INO, &name(n)).unwrap();
    }
    fs.sync().unwrap();
    let content = expected(&fs);
    let images: Arc<parking_lot::Mutex<Vec<Arc<SimulatedStorage>>>> = Arc::default();
    let (weak, kept) = (Arc::downgrade(&storage), images.clone());
    storage.on_op(Box::new(move |_| {
        let Some(storage) = weak.upgrade() else { return };
        let mut number = 0;
        for every in [1, 2] {
            kept.lock().push(storage.crash(&mut |_| {
                number += 1;
                if number % every == 0 { Fate::Keep } else { Fate::Drop }
            }));
        }
    }));
    fs.purge().unwrap();
    storage.on_op(Box::new(|_| {}));
    let images = std::mem::take(&mut *images.lock());
    assert!(images.len() > 10, "{}", images.len());
    let left: BTreeSet<Ino> = files.iter().copied().step_by(4).collect();
    for image in images {
        let again = open_on(image.clone(), false, 104).unwrap();
        assert!(expected(&again) == content);
        again.purge().unwrap();
        assert_eq!(recoverable(&(image.clone() as Arc<dyn Storage>)), left);
        again.close().unwrap();
        drop(again);
        assert_whole(image, &content);
    }
}

/// A tree that is deleted as a whole is not repacked first, and of other files only the remaining
/// data is.
#[test]
fn repacking_writes_what_is_left_once() {
    let written = |delete: fn(u64) -> bool| {
        let storage = SimulatedStorage::new();
        storage.write_at(0, &header_bytes()).unwrap();
        let fs = create_on(storage.clone(), 5);
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = bytes.clone();
        storage.on_op(Box::new(move |op| {
            if let OpKind::Write { data, .. } = op {
                counted.fetch_add(data.len() as u64, Ordering::Relaxed);
            }
        }));
        for n in 0..10_000 {
            put(&fs, ROOT_INO, &name(n), &noise(n, 1024));
        }
        fs.sync().unwrap();
        wait(&fs, 11);
        let before = bytes.load(Ordering::Relaxed);
        for n in (0..10_000).filter(|n| delete(*n)) {
            fs.unlink(ROOT_INO, &name(n)).unwrap();
        }
        fs.sync().unwrap();
        let deleted = bytes.load(Ordering::Relaxed) - before;
        wait(&fs, 30);
        let total = bytes.load(Ordering::Relaxed) - before;
        println!("bytes written: by deleting {deleted}, with repacking {total}");
        total - deleted
    };
    // 5,000 KiB remain of 10,000, in addition to the leaves that name them.
    let half = written(|n| n % 2 == 0);
    assert!((5_000 << 10..12_000 << 10).contains(&half), "{half}");
    let all = written(|_| true);
    assert!(all < 1 << 20, "{all}");
}

/// Concurrent writes, deletes and repacking: live files have their content, deleted ones are
/// erased.
#[test]
fn repacking_meets_writers_and_deletes() {
    let (storage, fs) = fresh(6);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let repacker = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                fs.repack_all(true).unwrap();
                fs.sync().unwrap();
            }
        });
        let writers: Vec<_> = (0..3u64)
            .map(|writer| {
                let fs = &fs;
                scope.spawn(move || {
                    let random = SeededEnvironment::new(writer + 40);
                    let below = |limit: u64| random.next_u64() % limit;
                    let mut files: Vec<(Vec<u8>, Ino, Vec<u8>)> = Vec::new();
                    for n in 0..600u64 {
                        let name = format!("w{writer}-{n}").into_bytes();
                        let content = noise(writer * 1000 + n, 300 + below(3000) as usize);
                        let ino = put(fs, ROOT_INO, &name, &content);
                        files.push((name, ino, content));
                        if n % 5 == 0 {
                            fs.sync().unwrap();
                        }
                        let at = below(files.len() as u64) as usize;
                        match below(3) {
                            0 if files.len() > 20 => {
                                let (name, ..) = files.swap_remove(at);
                                fs.unlink(ROOT_INO, &name).unwrap();
                            }
                            1 => {
                                let (_, ino, content) = &mut files[at];
                                let from = below(content.len() as u64 + 1) as usize;
                                let new = noise(n + 7, (content.len() - from).min(200));
                                fs.write(*ino, from as u64, &new).unwrap();
                                content[from..from + new.len()].copy_from_slice(&new);
                            }
                            _ => {
                                let (_, ino, content) = &mut files[at];
                                let size = below(content.len() as u64 + 1);
                                fs.truncate(*ino, size, &mut |_| {}).unwrap();
                                content.truncate(size as usize);
                            }
                        }
                        let at = below(files.len() as u64) as usize;
                        let (_, ino, content) = &files[at];
                        assert!(&fs.read(*ino, 0, 4000).unwrap() == content, "writer {writer} step {n}");
                    }
                    files
                        .iter()
                        .filter(|(_, _, content)| !content.is_empty())
                        .map(|(_, ino, _)| *ino)
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, Ordering::Relaxed);
        repacker.join().unwrap();
        let alive: BTreeSet<Ino> = ended.into_iter().flat_map(|alive| alive.unwrap()).collect();
        let content = expected(&fs);
        fs.close().unwrap();
        let left: Vec<Ino> = of(&storage).difference(&alive).copied().collect();
        assert_eq!(left, []);
        assert_whole(storage.clone(), &content);
    });
}

/// On an archive that cannot grow, closing uses the reserve for deletes. If that is exhausted too
/// the bytes remain, closing reports that, and a purge with space erases them.
#[test]
fn without_room_closing_tells_and_a_later_purge_finds_what_is_left() {
    [false, true].into_iter().for_each(close_without_room);
}

/// REPACK-5
#[test]
fn a_purge_without_room_for_large_pages_erases_the_remains_of_small_files() {
    let (crashed, fs) = fresh(8);
    let content = noise(1, FRAME as usize);
    let large = put(&fs, ROOT_INO, b"large", &content);
    let files = small_files(&fs, 100);
    for hole in 0..200 {
        fs.zero_range(large, 40_000 + 400 * hole, 100, true, false).unwrap();
    }
    for n in (0..100).filter(|n| n % 2 == 0) {
        fs.unlink(ROOT_INO, &name(n)).unwrap();
    }
    fs.sync().unwrap();
    let storage = Arc::new(MemoryStorage::from_contents(crashed.contents()));
    let fs = open_on(storage.clone(), false, 108).unwrap();
    fs.sync().unwrap();
    fs.volume.allocator().limit_size(storage.len().unwrap());
    let mut fillers = Vec::new();
    // The 201 parts of the large page reserve 3.2 MiB, the small files 0.9 MiB.
    while fs.volume.reserve_data(1_600_000, 1).is_ok() {
        fillers.push(format!("fill{}", fillers.len()));
        put(&fs, ROOT_INO, fillers[fillers.len() - 1].as_bytes(), &noise(fillers.len() as u64, 100_000));
        fs.sync().unwrap();
    }
    let gone: BTreeSet<Ino> = files.iter().copied().step_by(2).collect();
    assert!(!of(&storage).is_disjoint(&gone));
    let purged = fs.purge();
    assert!(matches!(purged, Err(Error::NoSpace(_))), "{purged:?}");
    assert!(of(&storage).is_disjoint(&gone));
    assert!(is_there(&data_pages(&storage), &content[40_400..40_464]));
    fillers.iter().for_each(|name| fs.unlink(ROOT_INO, name.as_bytes()).unwrap());
    fs.purge().unwrap();
    assert!(!is_there(&data_pages(&storage), &content[40_400..40_464]));
    let wanted = expected(&fs);
    fs.close().unwrap();
    drop(fs);
    assert_whole(storage, &wanted);
}

fn close_without_room(nothing_is_kept: bool) {
    let (storage, fs) = fresh(7);
    let files = small_files(&fs, 200);
    fs.volume.allocator().limit_size(storage.len().unwrap());
    let mut n = 0;
    while fs.volume.reserve_data(1 << 20, 0).is_ok() && n < 64 {
        put(&fs, ROOT_INO, format!("fill{n}").as_bytes(), &noise(n, 200_000));
        n += 1;
        if fs.sync().is_err() {
            break;
        }
    }
    for n in (0..200).filter(|n| n % 2 == 0) {
        fs.unlink(ROOT_INO, &name(n)).unwrap();
    }
    let content = expected(&fs);
    let gone: BTreeSet<Ino> = files.iter().copied().step_by(2).collect();
    if nothing_is_kept {
        let taken: Vec<_> = std::iter::from_fn(|| fs.volume.reserve_accepted(1).ok()).collect();
        let closed = fs.close();
        drop(taken);
        drop(fs);
        assert!(matches!(closed, Err(Error::NoSpace(_))), "{closed:?}");
        assert!(!of(&storage).is_disjoint(&gone));
        let again = open_on(storage.clone(), false, 107).unwrap();
        again.purge().unwrap();
        again.close().unwrap();
    } else {
        fs.close().unwrap();
    }
    assert!(of(&storage).is_disjoint(&gone));
    assert_whole(storage, &content);
}
