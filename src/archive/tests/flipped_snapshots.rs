//! Flipped bytes of an archive with snapshots: each snapshot has its content or returns an error,
//! and a full check reports every damaged page in use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::super::create::name_key;
use super::damage::pages;
use super::sample::{
    Expected, Listing, OWNER, cipher, expected, expected_in, fresh, noise, open_on, put, read_all, read_all_in,
};
use super::{ARCHIVE, key};
use crate::archive::check;
use crate::env::SeededEnvironment;
use crate::error::{Error, Result};
use crate::format::{BLOCK, Generation, RING_SLOTS, ROOT_INO, Run, slot_block};
use crate::fs::{Compression, FileSystem, FsOptions, RenameMode, SetAttributes, SyncProfile, XattrMode};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{OpenOptions, Volume};

const B: usize = BLOCK as usize;

/// Content after a commit: of the live tree, and of each snapshot by its name.
struct Moment {
    live: Expected,
    kept: BTreeMap<Vec<u8>, Expected>,
}

struct Sample {
    bytes: Vec<u8>,
    states: BTreeMap<Generation, Moment>,
    /// Authentic pages.
    pages: Vec<Run>,
}

/// Three snapshots with content in one or two of them, deleted and overwritten since, and the dead
/// lists of a removed fourth one.
fn sample() -> Sample {
    let (storage, fs) = fresh(81);
    let mut states = BTreeMap::new();
    let mut keep = |fs: &FileSystem| {
        fs.make_durable().unwrap();
        let kept = fs.list_snapshots().unwrap().into_iter();
        let kept = kept.map(|kept| (kept.name, expected_in(&fs.snapshot_view(kept.id)))).collect();
        states.insert(fs.volume.durable().generation, Moment { live: expected(fs), kept });
    };
    let mut take = |fs: &FileSystem, name: &[u8]| {
        keep(fs);
        fs.take_snapshot(name).unwrap();
        keep(fs);
    };
    let directory = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    put(&fs, directory, b"deleted", &noise(1, 6_000));
    for n in 0..3u64 {
        put(&fs, directory, format!("packed{n}").as_bytes(), &noise(2 + n, 700));
    }
    fs.make_symlink(directory, b"link", b"../overwritten", OWNER).unwrap();
    let overwritten = put(&fs, ROOT_INO, b"overwritten", &noise(9, 20_000));
    let text = put(&fs, ROOT_INO, b"text", &b"all work and no play makes jack a dull boy\n".repeat(400));
    put(&fs, ROOT_INO, b"inline", b"a few bytes");
    fs.set_xattr(text, b"user.long", &noise(7, 3_000), XattrMode::Set).unwrap();
    take(&fs, b"first");
    fs.unlink(directory, b"deleted").unwrap();
    fs.unlink(directory, b"packed1").unwrap();
    fs.write(overwritten, 7_000, &noise(10, 5_000)).unwrap();
    fs.set_attributes(text, &SetAttributes { size: Some(100), ..SetAttributes::default() }).unwrap();
    fs.set_xattr(text, b"user.long", b"short", XattrMode::Set).unwrap();
    fs.rename(ROOT_INO, b"directory", ROOT_INO, b"moved", RenameMode::NoReplace).unwrap();
    take(&fs, b"second");
    put(&fs, directory, b"deleted", &noise(11, 5_000));
    fs.unlink(ROOT_INO, b"inline").unwrap();
    take(&fs, b"gone");
    fs.write(overwritten, 0, &noise(12, 3_000)).unwrap();
    let gone = fs.snapshot_named(b"gone").unwrap();
    fs.remove_snapshots(&[gone.0]).unwrap();
    fs.finish_removals(&mut || Ok(())).unwrap();
    take(&fs, b"third");
    fs.unlink(ROOT_INO, b"overwritten").unwrap();
    fs.unlink(directory, b"packed0").unwrap();
    put(&fs, ROOT_INO, b"last", &noise(13, 4_500));
    fs.purge().unwrap();
    keep(&fs);
    fs.close().unwrap();
    let bytes = storage.contents();
    Sample { pages: pages(&bytes), bytes, states }
}

impl Sample {
    fn at(&self, generation: Generation) -> &Moment {
        self.states.range(..=generation).next_back().map(|(_, moment)| moment).expect("a state")
    }

    /// Reads everything, which is correct or an error; returns whether a full check reports damage.
    fn judge(&self, storage: &MemoryStorage, mounted: bool, what: &str) -> bool {
        let open = || open_on(Arc::new(storage.clone()), true, 3);
        let fs = match open() {
            Ok(fs) => fs,
            Err(Error::Damaged(_)) => return true,
            Err(error) => panic!("{what}: {error}"),
        };
        let moment = self.at(fs.volume.durable().generation);
        let mut lost = compare(read_all(&fs), &moment.live, what);
        match fs.list_snapshots() {
            Ok(all) => {
                let names: BTreeSet<&Vec<u8>> = all.iter().map(|kept| &kept.name).collect();
                assert_eq!(names, moment.kept.keys().collect(), "{what}");
                for kept in &all {
                    let what = format!("{what}, {}", String::from_utf8_lossy(&kept.name));
                    lost += compare(read_all_in(&fs.snapshot_view(kept.id)), &moment.kept[&kept.name], &what);
                }
            }
            Err(Error::Damaged(_)) => lost += 1,
            Err(error) => panic!("{what}: {error}"),
        }
        for (name, expected) in moment.kept.iter().filter(|_| mounted) {
            lost += show(storage.clone(), name).map_or(1, |found| compare(found, expected, what));
        }
        // Without caches.
        let told = !check(&open().unwrap(), true, &mut |_| {}).unwrap().findings.is_empty();
        assert!(told || lost == 0, "{what}: something is lost, and the archive is called sound");
        told
    }

    fn flip(&self, whole: &MemoryStorage, offset: usize, mounted: bool) -> bool {
        let flipped = whole.clone();
        flipped.write_at(offset as u64, &[self.bytes[offset] ^ 0x10]).unwrap();
        self.judge(&flipped, mounted, &format!("byte {} of block {}", offset % B, offset / B))
    }
}

/// Returns the number of unreadable objects.
fn compare(found: Listing, expected: &Expected, what: &str) -> usize {
    let (total, mut failed) = (found.len(), 0);
    for (path, seen) in found {
        let path = String::from_utf8_lossy(&path).into_owned();
        match seen {
            Ok(seen) => assert_eq!(Some(&seen), expected.get(path.as_bytes()), "{what}: {path}"),
            Err(Error::Damaged(message)) => {
                assert!(!message.is_empty());
                failed += 1;
            }
            Err(error) => panic!("{what}: {path}: {error}"),
        }
    }
    assert!(failed > 0 || total == expected.len(), "{what}: objects are missing without an error");
    failed
}

/// Returns the content of the snapshot, opened instead of the live tree; `None` when that is
/// refused as damaged.
fn show(storage: MemoryStorage, name: &[u8]) -> Option<Listing> {
    let environment = Arc::new(SeededEnvironment::new(900));
    let options = FsOptions {
        max_dirty_bytes: 8 << 20,
        sync: SyncProfile::Periodic,
        pack: true,
        compression: Compression::Default,
    };
    let opened = || -> Result<Listing> {
        let open = OpenOptions { read_only: true, memory: 32 << 20 };
        let volume = Volume::open(Arc::new(storage), cipher(), environment.clone(), 1, &open)?;
        volume.show_snapshot(name)?;
        Ok(read_all(&*FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), options)?))
    };
    match opened() {
        Ok(found) => Some(found),
        Err(Error::Damaged(_)) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Returns the slots of the newest records, each of which has the roots of all trees.
fn newest_slots(sample: &Sample) -> Vec<usize> {
    let fs = open_on(Arc::new(MemoryStorage::from_contents(sample.bytes.clone())), true, 3).unwrap();
    let newest = fs.volume.durable().generation.0;
    (newest - 2..=newest).map(|n| slot_block(Generation(n).slot()) as usize).collect()
}

/// The first and last bytes of each page and record, and one of each block.
#[test]
fn flipped_bytes_are_noticed_in_what_snapshots_show() {
    let sample = sample();
    let whole = MemoryStorage::from_contents(sample.bytes.clone());
    assert!(!sample.judge(&whole, true, "nothing"));
    let (mut flipped, mut told) = (0, 0);
    for run in &sample.pages {
        let (start, end) = (run.offset() as usize, (run.offset() + run.bytes()) as usize);
        let within = (start..end).step_by(B).map(|block| block + 1_777);
        let tries: Vec<usize> =
            [start, start + 12, start + 40, start + 90, end - 1].into_iter().chain(within).collect();
        let noticed = tries.iter().filter(|offset| sample.flip(&whole, **offset, true)).count();
        assert!(noticed == 0 || noticed == tries.len(), "page {}: {noticed} of {}", run.address, tries.len());
        flipped += tries.len();
        told += noticed;
    }
    for slot in newest_slots(&sample) {
        for offset in [0, 30, 200, 1_000, B - 1] {
            sample.flip(&whole, slot * B + offset, true);
            flipped += 1;
        }
    }
    println!("summary: {flipped} trials: bytes flipped in an archive with snapshots");
    assert!(told > 100 && flipped > told, "{told} of {flipped}");
}

/// The exhaustive run; `tests/RELIABILITY.md` has the command. All bytes of pages and of the newest
/// records are flipped one by one, those of all other blocks at once. Headers do not depend on
/// snapshots: their bytes are tested with the other archive.
#[test]
#[ignore = "takes minutes"]
fn every_flipped_byte_of_an_archive_with_snapshots_is_noticed() {
    let sample = sample();
    let slots = newest_slots(&sample);
    let all: Vec<Run> =
        sample.pages.iter().copied().chain(slots.iter().map(|slot| Run::new(*slot as u64, 1))).collect();
    let (next, needed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let every = || {
        let whole = MemoryStorage::from_contents(sample.bytes.clone());
        while let Some(run) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            let bytes = run.offset() as usize..(run.offset() + run.bytes()) as usize;
            let told = bytes.clone().filter(|offset| sample.flip(&whole, *offset, false)).count();
            if sample.pages.contains(run) {
                assert!(told == 0 || told == bytes.len(), "page {}: {told} of {}", run.address, bytes.len());
                needed.fetch_add(told, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(every))));
    let one_by_one: usize = all.iter().map(|run| run.bytes() as usize).sum();
    let is_page = |block: u64| all.iter().any(|run| (run.address..run.end()).contains(&block));
    let mut blocks = 0;
    for block in (0..(sample.bytes.len() / B) as u64).filter(|block| !is_page(*block)) {
        let flipped = MemoryStorage::from_contents(sample.bytes.clone());
        let at = block as usize * B;
        let bytes: Vec<u8> = sample.bytes[at..at + B].iter().map(|byte| byte ^ 0x10).collect();
        flipped.write_at(at as u64, &bytes).unwrap();
        assert!(!sample.judge(&flipped, true, &format!("all of block {block}")));
        blocks += 1;
    }
    let needed = needed.into_inner();
    println!(
        "summary: {} trials: bytes flipped in an archive with snapshots one by one ({needed} of pages that something needs, each told by a full check), and \
         the other {blocks} blocks as a whole",
        one_by_one + blocks
    );
    assert!(needed > 100_000 && slots.len() < RING_SLOTS as usize, "{needed}");
}
