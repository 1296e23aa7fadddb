//! The log: an fsync that is one write, and its replay (LOG-1 to LOG-6).

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;

use super::crash::see;
use super::support::{CREATOR, HAS_LOG, OPTIONS, assert_sound, cipher, create_with, open_on, try_open_on};
use crate::env::{Environment, SeededEnvironment, seeds};
use crate::error::Error;
use crate::format::{BLOCK, Ino, Key, LOG, MIN_BLOCKS, Pointer, ROOT_INO, TreeId, kind, slot_block};
use crate::fs::extents::FRAME;
use crate::fs::{FileSystem, RenameMode, SetAttributes, mode};
use crate::storage::simulated::{Fate, Fault, FaultClass, FaultPlan, OpKind, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{OpenOptions, Volume};

/// An archive with a log and a first session that has committed, so that its next fsync is an
/// entry.
fn with_log(seed: u64) -> (Arc<SimulatedStorage>, Arc<SeededEnvironment>, Arc<FileSystem>) {
    println!("seed {seed}");
    HAS_LOG.set(true);
    let storage = SimulatedStorage::new();
    let dice = Arc::new(SeededEnvironment::new(seed));
    let fs = create_with(storage.clone(), dice.clone(), OPTIONS);
    (storage, dice, fs)
}

fn file(fs: &FileSystem, name: &[u8]) -> Ino {
    fs.make_node(ROOT_INO, name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino
}

fn generation(fs: &FileSystem) -> u64 {
    fs.volume.durable().generation.0
}

/// Returns the storage after a power failure in which no write since the last barrier reached the
/// medium.
fn cut(storage: &SimulatedStorage) -> Arc<SimulatedStorage> {
    storage.crash(&mut |_| Fate::Drop)
}

/// Opens the archive after a power failure.
fn after_a_cut(storage: &SimulatedStorage, dice: &Arc<SeededEnvironment>) -> Arc<FileSystem> {
    open_on(cut(storage), Arc::new(SeededEnvironment::new(dice.next_u64())))
}

fn open_for_reading(storage: Arc<dyn Storage>) -> crate::Result<Arc<FileSystem>> {
    let environment = Arc::new(SeededEnvironment::new(3));
    let open = OpenOptions { read_only: true, memory: 32 << 20 };
    let volume = Volume::open(storage, cipher(environment.clone()), environment.clone(), 1, &open)?;
    FileSystem::new(volume, environment, super::support::NAME_KEY, OPTIONS)
}

fn assert_space(fs: &FileSystem) {
    assert_sound(fs);
    let findings = fs.volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "{findings:?}");
}

#[test]
fn a_small_fsync_is_one_write_into_the_log_and_a_sync_of_its_range() {
    let (storage, dice, fs) = with_log(1);
    let ino = file(&fs, b"file");
    fs.write(ino, 0, &vec![7; 1 << 20]).unwrap();
    fs.make_durable().unwrap();
    // The file grows for the first ones, for the commit that is to come. Each of them takes one
    // block.
    for _ in 0..3 {
        fs.write(ino, 0, &[7; 100]).unwrap();
        fs.sync().unwrap();
    }
    let before = generation(&fs);
    let seen: Arc<Mutex<Vec<(u64, usize)>>> = Arc::default();
    let ops = seen.clone();
    storage.on_op(Box::new(move |op| match op {
        OpKind::Write { offset, data } => ops.lock().push((*offset, data.len())),
        OpKind::SyncRange { offset, data } => ops.lock().push((u64::MAX - offset, data.len())),
        _ => ops.lock().push((0, 0)),
    }));
    for turn in 0..3 {
        fs.write(ino, 4096 * turn, &[turn as u8; 4096]).unwrap();
        fs.sync().unwrap();
        let ops = std::mem::take(&mut *seen.lock());
        let at = (LOG.0 + 3 + 2 * turn) * BLOCK;
        assert_eq!(ops, [(at, 8192), (u64::MAX - at, 8192)]);
    }
    // Nothing is left to make durable.
    fs.sync().unwrap();
    assert!(seen.lock().is_empty());
    assert_eq!(generation(&fs), before);
    let back = after_a_cut(&storage, &dice);
    for turn in 0..3_u64 {
        assert_eq!(back.read(ino, 4096 * turn, 4096).unwrap(), vec![turn as u8; 4096]);
    }
    assert_space(&back);
}

/// Sealing ahead writes and syncs its pages, in steps, if the sync of an entry does not wait for
/// them, and otherwise keeps them in memory. Entries follow, and the commit seals only later writes.
#[test]
fn a_commit_names_what_was_sealed_ahead_of_it() {
    [true, false].into_iter().for_each(names_what_was_sealed_ahead);
}

fn names_what_was_sealed_ahead(syncs_ranges: bool) {
    let (storage, dice, fs) = with_log(3);
    if !syncs_ranges {
        storage.sync_by_barriers();
    }
    let ino = file(&fs, b"file");
    let noise = |length: usize| {
        let mut bytes = vec![0; length];
        dice.fill_random(&mut bytes).unwrap();
        bytes
    };
    let mut want = noise(1 << 20);
    fs.write(ino, 0, &want).unwrap();
    fs.make_durable().unwrap();
    let before = generation(&fs);
    let mut write = |block: usize| {
        let (at, data) = (block % 256 * 4096, noise(4096));
        want[at..at + 4096].copy_from_slice(&data);
        fs.write(ino, at as u64, &data).unwrap();
        fs.sync().unwrap();
        want.clone()
    };
    let unsealed = || fs.write_buffer.files().iter().map(|file| file.active_bytes()).sum::<u64>();
    let mut entries = 0;
    while !fs.should_seal_ahead() {
        write(entries * 5);
        entries += 1;
    }
    assert_eq!(unsealed(), entries as u64 * 4096);
    let (written, unsynced): (Arc<Mutex<usize>>, Arc<Mutex<Vec<usize>>>) = Default::default();
    let (sum, parts) = (written.clone(), unsynced.clone());
    storage.on_op(Box::new(move |op| match op {
        OpKind::Write { data, .. } => *sum.lock() += data.len(),
        OpKind::Barrier => parts.lock().push(*sum.lock()),
        _ => {}
    }));
    fs.seal_ahead();
    let (ahead, unsynced) = (std::mem::take(&mut *written.lock()), std::mem::take(&mut *unsynced.lock()));
    let steps = unsynced.iter().scan(0, |before, sum| Some(sum - std::mem::replace(before, *sum)));
    assert!(steps.max().unwrap_or_default() <= ahead / 3, "the next entry would wait: {unsynced:?}");
    assert_eq!((unsealed(), ahead >= entries * 4096), (0, syncs_ranges), "{ahead} bytes");
    assert!(syncs_ranges || ahead == 0, "{ahead} bytes");
    assert!(storage.pending().is_empty(), "an entry or a commit would wait for it");
    assert!(!fs.should_seal_ahead(), "it would be sealed again after each later entry");
    // Over a sealed page, next to one, and elsewhere.
    let want = (0..8).map(|number| write(number * 3)).last().unwrap();
    assert_eq!(generation(&fs), before, "an entry no longer suffices");
    let back = after_a_cut(&storage, &dice);
    assert!(back.read(ino, 0, 1 << 20).unwrap() == want);
    assert_space(&back);

    assert_eq!(unsealed(), 8 * 4096);
    *written.lock() = 0;
    fs.make_durable().unwrap();
    assert_eq!(*written.lock() >= entries * 4096, !syncs_ranges, "{} bytes", *written.lock());
    let back = after_a_cut(&storage, &dice);
    assert!(back.read(ino, 0, 1 << 20).unwrap() == want);
    assert_space(&back);
    assert!(fs.read(ino, 0, 1 << 20).unwrap() == want);
    assert_space(&fs);
}

/// Each kind of change is logged in entries of its own. After each, a power failure leaves exactly
/// the logged state, for readers and writers, and once more after a power failure of the session
/// that replayed it.
#[test]
fn every_kind_of_change_comes_back_from_entries() {
    let (storage, dice, fs) = with_log(2);
    let [a, b, c] = [b"a", b"b", b"c"].map(|name| file(&fs, name));
    fs.write(a, 0, &vec![1; 300_000]).unwrap();
    fs.write(b, 0, &vec![2; 1000]).unwrap();
    fs.write(c, 0, &vec![3; 9000]).unwrap();
    fs.make_durable().unwrap();
    let base = generation(&fs);
    let size = |size| SetAttributes { size: Some(size), ..SetAttributes::default() };
    let steps: &[&dyn Fn()] = &[
        &|| fs.write(a, 1000, &[9; 5000]).unwrap(),
        &|| fs.rename(ROOT_INO, b"b", ROOT_INO, b"renamed", RenameMode::Replace).unwrap(),
        // Over inline data, and over data of an earlier entry.
        &|| fs.write(b, 500, &[8; 10]).unwrap(),
        &|| fs.write(a, 3000, &[7; 10]).unwrap(),
        // Cuts pages, and pieces of earlier entries.
        &|| fs.set_attributes(a, &size(2000)).map(|_| ()).unwrap(),
        &|| fs.set_attributes(a, &size(4000)).map(|_| ()).unwrap(),
        &|| fs.set_attributes(b, &size(0)).map(|_| ()).unwrap(),
        &|| fs.write(b, 3, b"again").unwrap(),
        &|| fs.make_directory(ROOT_INO, b"d", 0o755, CREATOR).map(|_| ()).unwrap(),
        &|| fs.write(file(&fs, b"new"), 0, b"new content").unwrap(),
        &|| fs.unlink(ROOT_INO, b"c").unwrap(),
        &|| fs.make_symlink(ROOT_INO, b"link", b"target", CREATOR).map(|_| ()).unwrap(),
    ];
    for (number, step) in steps.iter().enumerate() {
        step();
        fs.sync().unwrap();
        assert_eq!(generation(&fs), base, "step {number} took a commit");
        let want = see(&fs).0;
        let left = cut(&storage);
        let reader = open_for_reading(left.clone()).unwrap();
        assert_eq!(see(&reader).0, want, "step {number}, read");
        assert_space(&reader);
        let first = try_open_on(left.clone(), Arc::new(SeededEnvironment::new(dice.next_u64()))).unwrap();
        assert_eq!(see(&first).0, want, "step {number}");
        assert_space(&first);
        // Only its first commit is there, which names the log as pending.
        let second = after_a_cut(&left, &dice);
        assert_eq!(see(&second).0, want, "step {number}, after two cuts");
        second.close().unwrap();
        let third = open_on(left_by(&second), dice.clone());
        assert_eq!(see(&third).0, want, "step {number}, closed");
        assert_space(&third);
    }
}

/// The bytes that a file system works on.
fn left_by(fs: &FileSystem) -> Arc<MemoryStorage> {
    let storage = fs.volume.pager().storage();
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(0, &mut bytes).unwrap();
    Arc::new(MemoryStorage::from_contents(bytes))
}

#[test]
fn what_a_new_page_holds_and_what_the_log_cannot_hold_takes_a_commit() {
    let (_, _, fs) = with_log(3);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    let commits = |f: &dyn Fn()| {
        let before = generation(&fs);
        f();
        fs.sync().unwrap();
        generation(&fs) - before
    };
    assert_eq!(commits(&|| fs.write(ino, 0, &vec![1; 200_000]).unwrap()), 1, "whole frames have their pages");
    assert_eq!(commits(&|| fs.write(ino, 1 << 20, &vec![1; 100_000]).unwrap()), 0);
    // Deleting much frees the space soon.
    let large = file(&fs, b"large");
    assert_eq!(commits(&|| fs.write(large, 0, &[1; 100]).unwrap()), 0);
    let mut noise = vec![0; 2 << 20];
    fs.environment.fill_random(&mut noise).unwrap();
    assert_eq!(commits(&|| fs.write(large, 0, &noise).unwrap()), 1);
    assert_eq!(commits(&|| fs.unlink(ROOT_INO, b"large").unwrap()), 1);
    assert_eq!(commits(&|| (0..4).for_each(|n| fs.write(ino, n << 21, &vec![1; 100_000]).unwrap())), 1, "too long");
    let mut entries = 0;
    while commits(&|| fs.write(ino, entries * 4096, &[2; 4096]).unwrap()) == 0 {
        entries += 1;
    }
    assert_eq!(entries, (LOG.1 - LOG.0) / 2, "until the log is full");
    assert_eq!(commits(&|| fs.write(ino, 0, &[3; 10]).unwrap()), 0, "a commit empties it");
}

/// Data written back since an entry is in the tree; the pieces of that entry must not be replayed
/// over later data.
#[test]
fn pieces_that_were_written_out_meanwhile_do_not_come_back() {
    let (storage, dice, fs) = with_log(4);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    fs.write(ino, 0, &[1; 3000]).unwrap();
    fs.sync().unwrap();
    // Small enough to go into the tree itself, and then changed there.
    fs.zero_range(ino, 100, 1000, true, true).unwrap();
    fs.sync().unwrap();
    let want = see(&fs).0;
    let back = after_a_cut(&storage, &dice);
    assert_eq!(see(&back).0, want);
    assert_space(&back);
}

/// A record without the dirty data names the log as pending, so that data acknowledged through the
/// log stays.
#[test]
fn a_commit_that_only_makes_room_does_not_lose_what_the_log_has() {
    let (storage, dice, fs) = with_log(5);
    let ino = file(&fs, b"file");
    fs.write(ino, 0, &vec![5; 100_000]).unwrap();
    fs.make_durable().unwrap();
    fs.write(ino, 4096, &[6; 100]).unwrap();
    fs.sync().unwrap();
    let want = see(&fs).0;
    let before = generation(&fs);
    fs.volume.commit_without_staged().unwrap();
    assert_eq!(generation(&fs), before + 1);
    for _ in 0..2 {
        let back = after_a_cut(&storage, &dice);
        assert_eq!(see(&back).0, want);
        assert_space(&back);
        // No entry is written before a commit has all of it.
        fs.write(ino, 50_000, &[7; 100]).unwrap();
        fs.volume.commit_without_staged().unwrap();
        assert_eq!(see(&after_a_cut(&storage, &dice)).0, want);
        fs.write(ino, 50_000, &[5; 100]).unwrap();
    }
    let before = generation(&fs);
    fs.sync().unwrap();
    assert_eq!(generation(&fs), before + 1);
    fs.write(ino, 0, &[8; 100]).unwrap();
    fs.sync().unwrap();
    assert_eq!(generation(&fs), before + 1, "the log is used again");
    assert_eq!(see(&after_a_cut(&storage, &dice)).0, see(&fs).0);
}

/// Every bit of a full log counts: a flipped one is reported as damage, or looks like an
/// interrupted write of the last entry, which is reported too unless its very beginning is lost.
#[test]
fn an_altered_entry_is_told_or_was_the_last_one() {
    let (storage, _, fs) = with_log(6);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    let mut moments = vec![see(&fs).0];
    for turn in 0..6 {
        fs.write(ino, turn * 5000, &[turn as u8; 3000]).unwrap();
        fs.sync().unwrap();
        moments.push(see(&fs).0);
    }
    let whole = cut(&storage).contents();
    let dice = SeededEnvironment::new(60);
    let mut last_lost = 0;
    for at in (LOG.0 * BLOCK..(LOG.0 + 6) * BLOCK).step_by(509) {
        let mut bytes = whole.clone();
        bytes[at as usize] ^= 1 << (dice.next_u64() % 8);
        let altered = SimulatedStorage::from_contents(&bytes);
        let reader = open_for_reading(altered.clone()).unwrap();
        let writer = try_open_on(altered.clone(), Arc::new(SeededEnvironment::new(1)));
        if at >= (LOG.0 + 5) * BLOCK {
            last_lost += 1;
            assert_eq!(see(&reader).0, moments[5], "at={at}");
            let writer = writer.unwrap();
            assert_eq!(see(&writer).0, moments[5], "at={at}");
            for fs in [&reader, &writer] {
                let told = fs.volume.fallback().is_some_and(|told| told.starts_with("entry 6 of the log (commit "));
                assert_eq!((told, fs.volume.lost()), (at % BLOCK >= BEGINNING, None), "at={at}");
            }
            continue;
        }
        let entry = ((at / BLOCK) - LOG.0) as usize;
        let told = reader.volume.fallback().unwrap();
        assert!(told.contains(&format!("entry {} of the log is lost", entry + 1)), "at={at}: {told}");
        assert_eq!(reader.volume.lost(), Some(&*told), "at={at}");
        assert_eq!(see(&reader).0, moments[entry], "at={at}");
        let error = writer.err().unwrap();
        assert!(matches!(&error, Error::Damaged(text) if text.contains("of the log is lost")), "at={at}: {error}");
        assert!(altered.contents() == bytes, "a writer that refuses writes nothing");
    }
    assert!(last_lost > 4);
}

/// Runs fsyncs of one to twelve blocks until no more fit, and records the tree after each; the last
/// one is the newest.
fn full_log(seed: u64) -> (Vec<u8>, Vec<Arc<str>>) {
    let (storage, dice, fs) = with_log(seed);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    let began = generation(&fs);
    let (mut moments, mut whole) = (vec![see(&fs).0], Vec::new());
    loop {
        let length = 1 + (dice.next_u64() % 40_000) as usize;
        let mut bytes = vec![moments.len() as u8; length];
        dice.fill_random(&mut bytes[length / 2..]).unwrap();
        fs.write(ino, dice.next_u64() % 100_000, &bytes).unwrap();
        fs.sync().unwrap();
        if generation(&fs) != began {
            return (whole, moments);
        }
        whole = cut(&storage).contents();
        moments.push(see(&fs).0);
    }
}

/// Nonce, head and tag of the head: without them the start of an entry cannot be recognized.
const BEGINNING: u64 = 104;

/// Range of the flips: the log, and the blocks after it up to the first page (the second header,
/// and half of the ring). A flip that loses an entry is in it.
const FLIPPED: Range<u64> = LOG.0..MIN_BLOCKS;

/// Flips a byte at `at`, and answers which entry that lost; one more than there are when it lost
/// none.
fn judge_flip(whole: &MemoryStorage, at: u64, moments: &[Arc<str>]) -> usize {
    let flipped = whole.clone();
    let mut byte = [0];
    flipped.read_at(at, &mut byte).unwrap();
    flipped.write_at(at, &[byte[0] ^ 0x10]).unwrap();
    let reader = open_for_reading(Arc::new(flipped)).unwrap();
    let last = moments.len() - 1;
    let seen = see(&reader).0;
    let Some(told) = reader.volume.fallback() else {
        // Part of the beginning of the last entry, which then looks unwritten, or after its end.
        assert!(seen == moments[last] || seen == moments[last - 1], "at={at}: nothing is told");
        return if seen == moments[last] { last + 1 } else { last };
    };
    let entry = told.split("entry ").nth(1).and_then(|told| told.split(' ').next()).and_then(|n| n.parse().ok());
    let entry: usize = entry.unwrap_or_else(|| panic!("at={at}: {told}"));
    let lost = told.contains("of the log is lost");
    assert!(
        lost || entry == last && told.contains("is incomplete: it was interrupted, or damaged since"),
        "at={at}: {told}"
    );
    assert_eq!((seen, reader.volume.lost().is_some()), (moments[entry - 1].clone(), lost), "at={at}: {told}");
    entry
}

/// The exhaustive run; `tests/RELIABILITY.md` has the command.
#[test]
#[ignore = "takes half an hour"]
fn every_flipped_byte_of_a_full_log_is_told() {
    let (whole, moments) = full_log(61);
    let next = std::sync::atomic::AtomicU64::new(FLIPPED.start);
    let judge_all = || {
        HAS_LOG.set(true);
        let whole = MemoryStorage::from_contents(whole.clone());
        let mut entries = Vec::new();
        loop {
            let block = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            if block >= FLIPPED.end {
                return entries;
            }
            for at in block * BLOCK..(block + 1) * BLOCK {
                entries.push((at, judge_flip(&whole, at, &moments)));
            }
        }
    };
    let mut entries: Vec<(u64, usize)> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2).map(|_| scope.spawn(judge_all)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    entries.sort_unstable();
    assert_eq!(entries.len() as u64, (FLIPPED.end - FLIPPED.start) * BLOCK);
    assert!(entries.is_sorted_by_key(|(_, entry)| *entry), "an entry is told to be lost where another one lies");
    assert!((1..moments.len()).all(|n| entries.iter().any(|(_, entry)| *entry == n)), "an entry could be altered");
    println!(
        "summary: {} trials: bytes of a full log of {} entries, and of the blocks behind it, flipped one by one",
        entries.len(),
        moments.len() - 1
    );
}

/// Flips some bytes of each block; [`every_flipped_byte_of_a_full_log_is_told`] flips all.
#[test]
fn flipped_bytes_of_a_full_log_are_told() {
    let (whole, moments) = full_log(62);
    let whole = MemoryStorage::from_contents(whole);
    let mut before = 1;
    for at in (FLIPPED.start * BLOCK..FLIPPED.end * BLOCK).step_by(3001) {
        let entry = judge_flip(&whole, at, &moments);
        assert!(entry >= before, "entry {entry} is told to be lost where {before} lies");
        before = entry;
    }
    assert!(moments.len() > 20 && before >= moments.len() - 1, "{} entries, {before}", moments.len() - 1);
}

/// A page of a record that entries extend was durable: its loss is damage and no interrupted
/// commit.
#[test]
fn a_commit_that_an_entry_extends_is_never_undone() {
    let (storage, _, fs) = with_log(7);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    fs.write(ino, 0, &[1; 100]).unwrap();
    fs.make_durable().unwrap();
    let page = fs.volume.durable().allocated[0].0;
    let broken = |storage: &SimulatedStorage| {
        let mut bytes = cut(storage).contents();
        bytes[page.offset() as usize + 100] ^= 1;
        try_open_on(SimulatedStorage::from_contents(&bytes), Arc::new(SeededEnvironment::new(1)))
    };
    assert!(broken(&storage).unwrap().volume.fallback().is_some(), "without an entry it may have been interrupted");
    fs.write(ino, 0, &[2; 100]).unwrap();
    fs.sync().unwrap();
    let error = broken(&storage).err().unwrap();
    assert!(error.to_string().contains("was durable, but"), "{error}");
    // Also one that was torn: it was begun when the record was durable.
    let mut bytes = cut(&storage).contents();
    bytes[page.offset() as usize + 100] ^= 1;
    bytes[(LOG.0 * BLOCK) as usize + 2000] ^= 1;
    let torn = try_open_on(SimulatedStorage::from_contents(&bytes), Arc::new(SeededEnvironment::new(1)));
    assert!(torn.err().unwrap().to_string().contains("was durable, but"));
}

/// LOG-6: a damaged leaf costs its records, and no more when the log has newer ones; the rest
/// agrees with the log.
#[test]
fn a_damaged_leaf_costs_a_reader_what_lies_in_it() {
    let (storage, _, fs) = with_log(71);
    let names: Vec<String> = (0..400).map(|n| format!("file {n}")).collect();
    let files: Vec<Ino> = names.iter().map(|name| file(&fs, name.as_bytes())).collect();
    files.iter().for_each(|ino| fs.write(*ino, 0, &[1; 300]).unwrap());
    fs.make_durable().unwrap();
    // Without a page of the newest commit there would be no opening at all.
    file(&fs, b"last");
    fs.make_durable().unwrap();
    let began = generation(&fs);
    // Whole leaves are removed next to others.
    let gone = 100..200;
    gone.clone().for_each(|n| fs.unlink(ROOT_INO, names[n].as_bytes()).unwrap());
    files
        .iter()
        .enumerate()
        .filter(|(n, _)| !gone.contains(n))
        .for_each(|(_, ino)| fs.write(*ino, 0, &[2; 300]).unwrap());
    fs.sync().unwrap();
    assert_eq!(generation(&fs), began, "it was a commit");
    let whole = cut(&storage).contents();
    let mut leaves = Vec::new();
    let reader = open_for_reading(SimulatedStorage::from_contents(&whole)).unwrap();
    let trees = crate::btree::Tree::from_root(TreeId::Live, &reader.volume.durable().roots[TreeId::Live]);
    let mut found = |pointer: &Pointer, level| {
        leaves.extend((level == 0).then_some(pointer.run));
        Ok(())
    };
    trees.visit_pages(reader.volume.store(), &mut found, &mut |lost| Err(lost.error)).unwrap();
    leaves.retain(|run| reader.volume.durable().allocated.iter().all(|(other, _)| other != run));
    assert!(leaves.len() > 5, "{} leaves", leaves.len());
    for leaf in leaves {
        let mut bytes = whole.clone();
        bytes[leaf.offset() as usize + 100] ^= 1;
        let altered = SimulatedStorage::from_contents(&bytes);
        let reader = open_for_reading(altered.clone()).unwrap();
        let mut lost = 0;
        for (n, (ino, name)) in files.iter().zip(&names).enumerate() {
            let answers = (reader.lookup(ROOT_INO, name.as_bytes()).map(drop), reader.read(*ino, 0, 1000));
            lost += u32::from(matches!(answers.0, Err(Error::Damaged(_))))
                + u32::from(matches!(answers.1, Err(Error::Damaged(_))));
            match answers.0 {
                Err(Error::Damaged(_)) => {}
                Err(Error::NotFound) => assert!(gone.contains(&n), "{name}"),
                named => assert!(named.is_ok() && !gone.contains(&n), "{name}: {named:?}"),
            }
            match answers.1 {
                Err(Error::Damaged(_)) => {}
                Err(Error::Stale) => assert!(gone.contains(&n), "{name}"),
                read => assert!(read.unwrap() == [2; 300] && !gone.contains(&n), "{name}"),
            }
        }
        assert!((1..500).contains(&lost), "{leaf:?}: {lost} answers are lost");
        let findings = reader.check_structure(false).unwrap();
        let named = |finding: &_| format!("{finding:?}").contains(&format!("block={}", leaf.address));
        assert!(findings.iter().any(named), "{leaf:?} is not named: {findings:#?}");
        let refused = try_open_on(altered, Arc::new(SeededEnvironment::new(1))).err().unwrap().to_string();
        assert!(refused.contains("can be read but not written"), "{refused}");
    }
}

/// LOG-6: the same of one file whose inode in the log does not decode.
#[test]
fn a_damaged_inode_in_the_log_costs_a_reader_that_file() {
    let (storage, _, fs) = with_log(72);
    let [broken, beside] = [b"broken", b"beside"].map(|name| file(&fs, name));
    fs.make_durable().unwrap();
    let began = generation(&fs);
    for ino in [broken, beside] {
        fs.write(ino, 0, b"of the log").unwrap();
    }
    let key = Key::new(broken.0, kind::INODE, 0);
    fs.volume.operate(1, false, |operation| operation.insert(key, &[0xff; 144])).unwrap();
    fs.sync().unwrap();
    assert_eq!(generation(&fs), began, "it was a commit");
    let left = cut(&storage);
    let reader = open_for_reading(left.clone()).unwrap();
    assert_eq!(reader.read(beside, 0, 100).unwrap(), b"of the log");
    assert!(matches!(reader.read(broken, 0, 100), Err(Error::Damaged(_))));
    assert!(matches!(reader.attributes(broken), Err(Error::Damaged(_))));
    let refused = try_open_on(left, Arc::new(SeededEnvironment::new(1))).err().unwrap().to_string();
    assert!(refused.contains("can be read but not written"), "{refused}");
}

/// After a commit its entries are obsolete: they are overwritten on the clock, by a purge and at
/// the end, and nothing of them opens then.
#[test]
fn obsolete_entries_are_erased() {
    let (storage, dice, fs) = with_log(8);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    let readable = || {
        let cipher = cipher(Arc::new(SeededEnvironment::new(1)));
        let bytes = storage.contents();
        let block = |block: u64| &bytes[(block * BLOCK) as usize..][..BLOCK as usize];
        (LOG.0..LOG.1).filter(|at| cipher.open_entry_head(*at, block(*at)).unwrap().is_some()).count()
    };
    let write = || {
        for _ in 0..5 {
            fs.write(ino, dice.next_u64() % 10_000, &[7; 100]).unwrap();
            fs.sync().unwrap();
        }
    };
    write();
    assert_eq!(readable(), 5);
    fs.purge().unwrap();
    assert_eq!(readable(), 0);
    write();
    // Needed records are kept.
    fs.volume.maintain().unwrap();
    dice.advance(10);
    fs.volume.maintain().unwrap();
    assert_eq!(readable(), 5);
    fs.make_durable().unwrap();
    dice.advance(10);
    fs.maintain().unwrap();
    assert_eq!(readable(), 0);
    write();
    fs.close().unwrap();
    assert_eq!(readable(), 0);
}

#[test]
fn a_refused_entry_is_tried_again_and_a_failed_one_latches() {
    let (storage, dice, fs) = with_log(9);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    let before = generation(&fs);
    fs.write(ino, 0, &[1; 100]).unwrap();
    // The write, and the second attempt at it.
    // The write, and the second attempt at it; the next one is that of the commit.
    storage.inject(Some(FaultPlan { class: FaultClass::Write, count: 0, fault: Fault::NoSpace, lasting: false }));
    fs.sync().unwrap();
    assert_eq!((storage.injected(), generation(&fs)), (1, before), "the second attempt does");
    fs.write(ino, 0, &[2; 100]).unwrap();
    storage.fail_next_barrier();
    let told = fs.sync().unwrap_err();
    assert!(matches!(told, Error::Io { .. }), "{told}");
    assert!(matches!(fs.sync(), Err(Error::WriteFailed(_))));
    let back = after_a_cut(&storage, &dice);
    let content = back.read(ino, 0, 100).unwrap();
    assert!(content == [1; 100] || content == [2; 100]);
    assert_space(&back);
}

/// The newest record that is lost itself leaves a trace in the entries that extend it.
#[test]
fn a_lost_record_is_told_by_its_entries() {
    let (storage, _, fs) = with_log(13);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    fs.write(ino, 0, &[1; 100]).unwrap();
    fs.make_durable().unwrap();
    let slot = fs.volume.durable().generation.slot();
    let without_record = |storage: &SimulatedStorage| {
        let mut bytes = cut(storage).contents();
        bytes[(slot_block(slot) * BLOCK) as usize + 1000] ^= 4;
        SimulatedStorage::from_contents(&bytes)
    };
    assert!(try_open_on(without_record(&storage), Arc::new(SeededEnvironment::new(1))).is_ok(), "nothing tells");
    fs.write(ino, 0, &[2; 100]).unwrap();
    fs.sync().unwrap();
    let error = try_open_on(without_record(&storage), Arc::new(SeededEnvironment::new(1))).err().unwrap();
    assert!(error.to_string().contains("although the log has an entry that extends it"), "{error}");
    let reader = open_for_reading(without_record(&storage)).unwrap();
    assert!(reader.volume.fallback().unwrap().contains("although the log has an entry that extends it"));
}

/// A flush that fails after it took the dirty data has logged nothing: the next fsync must not find
/// everything logged.
#[test]
fn what_a_failed_flush_took_is_not_called_durable() {
    let (storage, dice, fs) = with_log(14);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    for count in 0..12 {
        fs.write(ino, 10_000 * count, &[count as u8 + 1; 3000]).unwrap();
        storage.inject(Some(FaultPlan { class: FaultClass::Change, count, fault: Fault::NoSpace, lasting: true }));
        let refused = fs.make_durable();
        storage.inject(None);
        if fs.volume.latched().is_some() {
            println!("latched at {count}");
            return;
        }
        let before = see(&fs).0;
        let again = fs.sync();
        if again.is_ok() {
            assert_eq!(see(&after_a_cut(&storage, &dice)).0, before, "count={count} refused={refused:?}");
        }
    }
}

/// On a full archive the entries of a large file find the space that its writes reserved.
#[test]
fn replay_needs_no_space_for_inline_data_of_large_files() {
    const FRAMES: u64 = 200;
    let (storage, dice, fs) = with_log(15);
    let ino = file(&fs, b"file");
    (0..FRAMES).for_each(|number| fs.write(ino, number * FRAME, &[1; FRAME as usize]).unwrap());
    fs.make_durable().unwrap();
    let before = generation(&fs);
    (0..FRAMES).for_each(|number| fs.write(ino, number * FRAME + 50_000, &[2; 10]).unwrap());
    fs.set_attributes(ino, &SetAttributes { mode: Some(0o640), ..SetAttributes::default() }).unwrap();
    fs.sync().unwrap();
    assert_eq!(generation(&fs), before, "it was a commit");
    drop(fs);
    let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
    let open = OpenOptions { read_only: false, memory: 32 << 20 };
    let volume = Volume::open(cut(&storage), cipher(environment.clone()), environment.clone(), 1, &open).unwrap();
    volume.allocator().limit_size(volume.allocator().space().0 * BLOCK + (16 << 20));
    // A page for each piece, and the nodes that the commit of the entry changes (LOG-5).
    let promised = volume.reserve_accepted(FRAMES + 64 + 2 * FRAMES).unwrap();
    let taken: Vec<_> = std::iter::from_fn(|| volume.reserve_spare(1)).collect();
    drop(promised);
    let fs = FileSystem::new(volume, environment, super::support::NAME_KEY, OPTIONS).unwrap();
    fs.make_durable().unwrap();
    drop(taken);
    for number in 0..FRAMES {
        assert_eq!(fs.read(ino, number * FRAME + 49_999, 12).unwrap(), [1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1]);
    }
    assert_space(&fs);
}

/// Changing keys commits without a file system: its record names the log as pending, so that the
/// next mount has all synced data.
#[test]
fn a_change_of_the_header_keeps_what_the_log_has() {
    let (storage, dice, fs) = with_log(11);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    fs.write(ino, 0, &[1; 3000]).unwrap();
    fs.sync().unwrap();
    let want = see(&fs).0;
    let left = cut(&storage);
    for _ in 0..2 {
        let environment = Arc::new(SeededEnvironment::new(dice.next_u64()));
        let open = OpenOptions { read_only: false, memory: 32 << 20 };
        let volume = Volume::open(left.clone(), cipher(environment.clone()), environment, 2, &open).unwrap();
        volume.record_header().unwrap();
        assert_eq!(volume.durable().header_sequence, 2);
    }
    let back = after_a_cut(&left, &dice);
    assert_eq!(see(&back).0, want);
    assert_space(&back);
}

/// Ranges that are overwritten repeatedly between two commits take bounded memory, and are logged
/// whole all the same.
#[test]
fn many_places_that_no_entry_has_are_remembered_as_one() {
    let (storage, dice, fs) = with_log(12);
    let ino = file(&fs, b"file");
    fs.write(ino, 0, &vec![1; 131_072]).unwrap();
    fs.make_durable().unwrap();
    let before = generation(&fs);
    for place in 0..3000 {
        fs.write(ino, place * 40, &[place as u8; 7]).unwrap();
    }
    fs.sync().unwrap();
    let want = see(&fs).0;
    assert_eq!(see(&after_a_cut(&storage, &dice)).0, want);
    fs.write(ino, 5, &[9; 7]).unwrap();
    fs.sync().unwrap();
    assert_eq!(see(&after_a_cut(&storage, &dice)).0, see(&fs).0);
    assert!(generation(&fs) <= before + 1);
}

/// Entries are invalid on another branch: a record of the same number there has another tag.
#[test]
fn entries_of_another_record_are_nothing() {
    let (storage, dice, fs) = with_log(10);
    let ino = file(&fs, b"file");
    fs.make_durable().unwrap();
    fs.write(ino, 0, &[1; 100]).unwrap();
    fs.sync().unwrap();
    let with_entry = cut(&storage).contents();
    fs.write(ino, 0, &[2; 200]).unwrap();
    fs.make_durable().unwrap();
    let want = see(&fs).0;
    let mut bytes = cut(&storage).contents();
    let log = (LOG.0 * BLOCK) as usize..(LOG.1 * BLOCK) as usize;
    bytes[log.clone()].copy_from_slice(&with_entry[log]);
    let back = open_on(SimulatedStorage::from_contents(&bytes), dice.clone());
    assert_eq!(see(&back).0, want);
    assert!(back.volume.fallback().is_none());
}

/// An endless file, written and synced at random, against a model, through power failures:
/// acknowledged data survives.
#[test]
fn synced_writes_survive_cuts_and_reopenings_without_end() {
    for seed in seeds(20..=23) {
        let (storage, dice, fs) = with_log(seed);
        let ino = file(&fs, b"file");
        let mut model = vec![0; 200_000];
        fs.write(ino, 0, &model).unwrap();
        fs.make_durable().unwrap();
        let (mut storage, mut fs) = (storage, fs);
        for _ in 0..120 {
            for _ in 0..dice.next_u64() % 4 {
                let (at, length) = ((dice.next_u64() % 190_000) as usize, 1 + (dice.next_u64() % 9000) as usize);
                let mut data = vec![0; length];
                dice.fill_random(&mut data).unwrap();
                model[at..at + length].copy_from_slice(&data);
                fs.write(ino, at as u64, &data).unwrap();
            }
            if dice.next_u64() % 9 == 0 { fs.make_durable() } else { fs.sync() }.unwrap();
            if dice.next_u64().is_multiple_of(5) {
                storage = cut(&storage);
                fs = open_on(storage.clone(), Arc::new(SeededEnvironment::new(dice.next_u64())));
            }
            assert!(fs.read(ino, 0, model.len()).unwrap() == model);
        }
        assert_space(&fs);
    }
}
