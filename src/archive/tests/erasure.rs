//! Deleted data cannot be recovered from the file, even with the key: every block is tried as the
//! beginning of a page.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::sample::{cipher, create_on, fresh, noise, open_on, put};
use crate::env::{SeededEnvironment, seeds};
use crate::error::Error;
use crate::format::page::PageKind;
use crate::format::{BLOCK, Ino, MIN_BLOCKS, ROOT_INO, Run};
use crate::pager::Pager;
use crate::rescue::scan::{open_found, scan};
use crate::storage::simulated::{Fate, OpKind, SimulatedStorage};
use crate::storage::{MemoryStorage, Storage};

/// Returns the inodes of which any data page can be opened.
pub(super) fn recoverable(storage: &Arc<dyn Storage>) -> BTreeSet<Ino> {
    let pager = Pager::new(storage.clone(), cipher(), 1 << 20);
    let mut inodes = BTreeSet::new();
    scan(&**storage, pager.cipher(), &mut |_, _| Ok(()), &mut |run, prologue| {
        let Ok((_, opened)) = open_found(&pager, run) else { return Ok(()) };
        match prologue.kind {
            PageKind::Data => drop(inodes.insert(Ino(prologue.owner))),
            PageKind::Packed => {
                opened.read_chunk(0)?;
                inodes.extend(opened.table()?.items.iter().map(|item| item.ino));
            }
            PageKind::Node | PageKind::DeltaList => {}
        }
        Ok(())
    })
    .unwrap();
    inodes
}

fn of(storage: &Arc<MemoryStorage>) -> BTreeSet<Ino> {
    recoverable(&(storage.clone() as Arc<dyn Storage>))
}

#[test]
fn deleted_content_is_gone_after_a_purge_and_after_closing() {
    for close in [false, true] {
        let (storage, fs) = fresh(1);
        let kept = put(&fs, ROOT_INO, b"kept", &noise(1, 200_000));
        let secret = put(&fs, ROOT_INO, b"secret", &noise(2, 300_000));
        fs.sync().unwrap();
        assert!(of(&storage).is_superset(&BTreeSet::from([kept, secret])));
        fs.unlink(ROOT_INO, b"secret").unwrap();
        if close {
            fs.close().unwrap()
        } else {
            fs.purge().unwrap()
        }
        assert_eq!(of(&storage), BTreeSet::from([kept]), "close={close}");
    }
}

/// An aborted mount receives no RELEASE.
#[test]
fn what_was_unlinked_while_open_is_gone_after_closing() {
    let (storage, fs) = fresh(1);
    let kept = put(&fs, ROOT_INO, b"kept", &noise(1, 200_000));
    let secret = put(&fs, ROOT_INO, b"secret", &noise(2, 300_000));
    fs.sync().unwrap();
    fs.open(secret).unwrap();
    fs.unlink(ROOT_INO, b"secret").unwrap();
    fs.close().unwrap();
    assert_eq!(of(&storage), BTreeSet::from([kept]));
}

/// The documented delay: ten seconds of the clock, in background steps.
#[test]
fn deleted_content_is_gone_after_the_delay() {
    let (storage, fs) = fresh(2);
    put(&fs, ROOT_INO, b"secret", &noise(2, 300_000));
    fs.sync().unwrap();
    fs.unlink(ROOT_INO, b"secret").unwrap();
    fs.sync().unwrap();
    // The test's clock advances by a microsecond with each call.
    let start = fs.environment.now().seconds;
    while fs.environment.now().seconds < start + 11 {
        fs.maintain().unwrap();
        for _ in 0..100_000 {
            fs.environment.now();
        }
    }
    assert_eq!(of(&storage), BTreeSet::new());
}

#[test]
fn overwritten_and_cut_content_is_gone_after_a_purge() {
    let (storage, fs) = fresh(3);
    let ino = put(&fs, ROOT_INO, b"file", &noise(2, 131_072));
    fs.sync().unwrap();
    let before = storage.contents();
    let old: Vec<&[u8]> = before.chunks(BLOCK as usize).skip(65).collect();
    fs.write(ino, 0, &noise(3, 131_072)).unwrap();
    fs.purge().unwrap();
    let after = storage.contents();
    let pager = Pager::new(Arc::new(MemoryStorage::from_contents(before.clone())), cipher(), 1 << 20);
    let mut pages = 0;
    scan(&**pager.storage(), pager.cipher(), &mut |_, _| Ok(()), &mut |run, prologue| {
        if prologue.kind == PageKind::Data {
            pages += 1;
            let block = old[run.address as usize - 65];
            assert!(!after.windows(64).step_by(64).any(|w| w == &block[..64]), "old page at {}", run.address);
        }
        Ok(())
    })
    .unwrap();
    assert!(pages > 0);
}

/// A gigabyte that was streamed when the power failed was never referenced by a root; a sweep after
/// the crash must erase it.
#[test]
fn what_a_crash_left_of_a_stream_is_gone_after_the_next_session() {
    for seed in seeds(1..=4) {
        let storage = SimulatedStorage::new();
        let fs = create_with_header(&storage, seed);
        let kept = put(&fs, ROOT_INO, b"kept", &noise(1, 50_000));
        fs.sync().unwrap();
        let stream = put(&fs, ROOT_INO, b"stream", b"");
        for n in 0..40u64 {
            fs.write(stream, n * 262_144, &noise(n, 262_144)).unwrap();
        }
        // Written early, without a commit: all of it survives, or every other write.
        let mut number = 0;
        let crashed = storage.crash(&mut |_| {
            number += 1;
            if seed % 2 == 0 || number % 2 == 0 { Fate::Keep } else { Fate::Drop }
        });
        let found = recoverable(&(crashed.clone() as Arc<dyn Storage>));
        assert!(found.contains(&stream), "the crash left nothing to look for");
        let again = open_on(crashed.clone(), false, seed + 100).unwrap();
        again.purge().unwrap();
        assert_eq!(recoverable(&(crashed.clone() as Arc<dyn Storage>)), BTreeSet::from([kept]));
        again.close().unwrap();
        assert_eq!(recoverable(&(crashed as Arc<dyn Storage>)), BTreeSet::from([kept]));
    }
}

/// The commit that added the file was torn, so recovery rejects it and uses the previous one.
#[test]
fn what_a_rejected_commit_wrote_is_gone_after_the_next_session() {
    let storage = SimulatedStorage::new();
    let fs = create_with_header(&storage, 5);
    let kept = put(&fs, ROOT_INO, b"kept", &noise(1, 50_000));
    fs.sync().unwrap();
    let images: Arc<parking_lot::Mutex<Vec<Arc<SimulatedStorage>>>> = Arc::default();
    let hook = {
        let (weak, images) = (Arc::downgrade(&storage), images.clone());
        move |op: &OpKind| {
            let Some(storage) = weak.upgrade().filter(|_| matches!(op, OpKind::Barrier)) else { return };
            // The record and all of its pages but one reached the medium.
            let pending = storage.pending();
            let writes: Vec<u64> = pending
                .iter()
                .filter(|op| matches!(&op.kind, OpKind::Write { offset, .. } if Run::new(offset / BLOCK, 1).is_page_space(u64::MAX)))
                .map(|op| op.number)
                .collect();
            for lost in writes {
                images.lock().push(storage.crash(&mut |op| if op.number == lost { Fate::Drop } else { Fate::Keep }));
            }
        }
    };
    storage.on_op(Box::new(hook));
    let secret = put(&fs, ROOT_INO, b"secret", &noise(2, 300_000));
    fs.sync().unwrap();
    storage.on_op(Box::new(|_| {}));
    let images = std::mem::take(&mut *images.lock());
    let mut rejected = 0;
    for image in images {
        let again = open_on(image.clone(), false, 200).unwrap();
        rejected += u64::from(again.volume.fallback().is_some());
        let there = again.lookup(ROOT_INO, b"secret").is_ok();
        again.close().unwrap();
        let found = recoverable(&(image as Arc<dyn Storage>));
        assert_eq!(found.contains(&secret), there);
        assert!(found.contains(&kept));
    }
    assert!(rejected > 0, "no commit was rejected");
}

fn create_with_header(storage: &Arc<SimulatedStorage>, seed: u64) -> Arc<crate::fs::FileSystem> {
    storage.write_at(0, &super::sample::header_bytes()).unwrap();
    create_on(storage.clone(), seed)
}

#[test]
fn freed_space_goes_back_to_the_host() {
    let (storage, fs) = fresh(6);
    let empty = storage.allocated();
    for n in 0..20u64 {
        put(&fs, ROOT_INO, format!("f{n}").as_bytes(), &noise(n, 1 << 20));
    }
    fs.sync().unwrap();
    assert!(storage.allocated() > empty + (20 << 20));
    for n in 0..20 {
        fs.unlink(ROOT_INO, format!("f{n}").as_bytes()).unwrap();
    }
    fs.purge().unwrap();
    assert!(storage.allocated() < empty + (4 << 20), "allocated={}", storage.allocated());
    fs.close().unwrap();
    assert!(storage.len().unwrap() < MIN_BLOCKS * BLOCK + (4 << 20), "length={}", storage.len().unwrap());
}

/// Concurrent erasing and writing: written data stays readable, so no erase hits a block in use.
#[test]
fn an_erase_never_meets_a_block_in_use() {
    let (storage, fs) = fresh(7);
    let stop = std::sync::atomic::AtomicBool::new(false);
    let contents = std::thread::scope(|scope| {
        let eraser = scope.spawn(|| {
            let mut rounds = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) || rounds == 0 {
                // A reader on a busy machine may keep its pages in use; all others are erased.
                let purged = fs.purge();
                assert!(matches!(purged, Ok(()) | Err(Error::InUse(_))), "{purged:?}");
                rounds += 1;
            }
        });
        let writers: Vec<_> = (0..2u64)
            .map(|writer| {
                let fs = &fs;
                scope.spawn(move || {
                    let random = SeededEnvironment::new(writer);
                    let mut files: Vec<(Vec<u8>, Ino, Vec<u8>)> = Vec::new();
                    for n in 0..120u64 {
                        let name = format!("w{writer}-{n}").into_bytes();
                        let content = noise(writer * 1000 + n, 1 + (random.next_u64() % 150_000) as usize);
                        let ino = put(fs, ROOT_INO, &name, &content);
                        files.push((name, ino, content));
                        if n % 3 == 0 {
                            fs.sync().unwrap();
                        }
                        if files.len() > 12 {
                            let (name, ..) = files.remove((random.next_u64() % 12) as usize);
                            fs.unlink(ROOT_INO, &name).unwrap();
                        }
                        let (_, ino, content) = &files[(random.next_u64() % files.len() as u64) as usize];
                        assert!(&fs.read(*ino, 0, content.len()).unwrap() == content);
                    }
                    files
                })
            })
            .collect();
        // The flag is set before a failure of a writer is passed on, or the scope would wait forever.
        let ended: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        eraser.join().unwrap();
        ended.into_iter().flat_map(|files| files.unwrap()).collect::<Vec<_>>()
    });
    fs.close().unwrap();
    let again = open_on(storage.clone(), true, 8).unwrap();
    for (name, ino, content) in &contents {
        assert!(&again.read(*ino, 0, content.len()).unwrap() == content, "{}", String::from_utf8_lossy(name));
    }
    assert!(again.volume.check_space(true, &mut |_, _| {}).unwrap().is_empty());
    let alive: BTreeSet<Ino> = contents.iter().map(|(_, ino, _)| *ino).collect();
    assert_eq!(of(&storage).difference(&alive).copied().collect::<Vec<_>>(), []);
}

/// All data that each block after headers and ring ever had, by address, without holes and zeros.
#[derive(Default)]
struct Held(std::collections::HashMap<u64, std::collections::HashSet<u64>>);

impl Held {
    fn blocks(storage: &dyn Storage, mut each: impl FnMut(u64, u64)) {
        let length = storage.len().unwrap();
        let mut bytes = vec![0; BLOCK as usize];
        for address in (0..length / BLOCK).filter(|address| Run::new(*address, 1).is_page_space(u64::MAX)) {
            storage.read_at(address * BLOCK, &mut bytes).unwrap();
            if bytes.iter().any(|byte| *byte != 0) {
                let mut hash = std::hash::DefaultHasher::new();
                std::hash::Hash::hash(&bytes, &mut hash);
                each(address, std::hash::Hasher::finish(&hash));
            }
        }
    }

    fn note(&mut self, storage: &dyn Storage) {
        Held::blocks(storage, |address, hash| {
            self.0.entry(address).or_default().insert(hash);
        });
    }

    /// Returns blocks with former content that no page of the last commit has, with the page that
    /// opens there.
    fn left(&self, storage: &Arc<dyn Storage>, fs: &crate::fs::FileSystem) -> Vec<String> {
        let mut left = Vec::new();
        Held::blocks(&**storage, |address, hash| {
            if self.0.get(&address).is_some_and(|held| held.contains(&hash)) && !fs.volume.uses_block(address).unwrap()
            {
                let mut bytes = vec![0; BLOCK as usize];
                storage.read_at(address * BLOCK, &mut bytes).unwrap();
                left.push(format!("block={address} {:?}", cipher().open_prologue(address, &bytes)));
            }
        });
        left
    }
}

/// No block of any unreferenced page survives a purge or an unmount: neither of deleted content,
/// nor of nodes of any previous commit, nor of the space map, regardless of the number of commits
/// since the last checkpoint.
#[test]
fn no_block_of_any_former_page_is_left() {
    for seed in seeds(0..=59) {
        let close = seed % 4 < 3;
        let (storage, mut fs) = fresh(seed);
        let shared: Arc<dyn Storage> = storage.clone();
        let mut held = Held::default();
        // After the first checkpoint, so that the next one replaces nodes of the space map.
        for n in 0..26_u64 {
            put(&fs, ROOT_INO, format!("tiny-{n}").as_bytes(), b"tiny");
            fs.sync().unwrap();
        }
        if seed % 3 == 1 {
            put(&fs, ROOT_INO, b"earlier", &noise(seed, 900_000));
            held.note(&*shared);
            fs.close().unwrap();
            fs = open_on(storage.clone(), false, seed + 1000).unwrap();
        }
        for n in 0..12_u64 {
            put(&fs, ROOT_INO, format!("small-{n}").as_bytes(), &noise(seed + n, 300 + 700 * n as usize));
        }
        put(&fs, ROOT_INO, b"large", &noise(seed, 700_000));
        fs.sync().unwrap();
        held.note(&*shared);
        for n in 0..seed / 2 {
            put(&fs, ROOT_INO, format!("more-{n}").as_bytes(), &noise(n, 20_000));
            fs.sync().unwrap();
            held.note(&*shared);
        }
        for name in ["large", "small-3", "small-7", "more-0", "more-5", "earlier"] {
            let _ = fs.unlink(ROOT_INO, name.as_bytes());
        }
        if seed % 2 == 0 {
            fs.sync().unwrap();
            held.note(&*shared);
        }
        if close {
            fs.close().unwrap();
        } else {
            fs.purge().unwrap();
        }
        let image: Arc<dyn Storage> = Arc::new(MemoryStorage::from_contents(storage.contents()));
        let opened = open_on(image, true, seed + 2000).unwrap();
        let left = held.left(&shared, &opened);
        assert!(left.is_empty(), "{} blocks, close={close}: {left:?}", left.len());
    }
}

/// The same for regions of the space map that the session did not load.
#[test]
fn no_block_is_left_where_the_session_never_looked() {
    for close in [true, false] {
        let (storage, fs) = fresh(90);
        let shared: Arc<dyn Storage> = storage.clone();
        for name in ["first", "middle", "last"] {
            put(&fs, ROOT_INO, name.as_bytes(), &noise(name.len() as u64, 36 << 20));
            fs.sync().unwrap();
        }
        fs.close().unwrap();
        let mut held = Held::default();
        held.note(&*shared);
        let fs = open_on(storage.clone(), false, 91).unwrap();
        fs.unlink(ROOT_INO, b"middle").unwrap();
        if close {
            fs.close().unwrap();
        } else {
            fs.purge().unwrap();
        }
        let image: Arc<dyn Storage> = Arc::new(MemoryStorage::from_contents(storage.contents()));
        let opened = open_on(image, true, 92).unwrap();
        let left = held.left(&shared, &opened);
        assert!(left.is_empty(), "{} blocks, close={close}, first {:?}", left.len(), left.first());
    }
}
