//! Power cuts and process deaths at any storage operation: recovery gives a commit no older than
//! the last acknowledged one, whole, with exact space, and nothing of a transaction that never
//! committed stays readable.

use std::collections::{BTreeMap, HashSet};
use std::io::ErrorKind;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::support::*;
use crate::env::seeds;
use crate::format::values::Extent;
use crate::format::{BLOCK, Generation, Key, MIN_BLOCKS, RESERVED, kind};
use crate::storage::Storage;
use crate::storage::simulated::{Fault, SimulatedStorage};
use crate::txn::Volume;
use crate::{Error, Result};

/// Content of the archive at each commit, by generation, and the last acknowledged one.
#[derive(Default)]
struct Log {
    states: BTreeMap<Generation, Content>,
    acknowledged: Generation,
}

/// Crash images taken while a workload runs, each with the contents that recovery may return.
struct Image {
    storage: Arc<SimulatedStorage>,
    acknowledged: Generation,
}

/// Runs random changes and takes an image before some of the storage operations.
fn workload(seed: u64, steps: u64, images_wanted: u64, images: &Arc<Mutex<Vec<Image>>>) -> (Dice, Log) {
    let dice = Dice::new(seed);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    let acknowledged = Arc::new(Mutex::new(volume.durable().generation));
    let mut log = Log::default();
    let mut live = Content::new();
    log.states.insert(*acknowledged.lock(), live.clone());

    let hook = {
        let (storage, images, acknowledged) = (Arc::downgrade(&storage), images.clone(), acknowledged.clone());
        let chance = Dice(Arc::new(crate::env::SeededEnvironment::new(seed ^ 0xC0FFEE)));
        move |_: &crate::storage::simulated::OpKind| {
            let Some(storage) = storage.upgrade() else { return };
            if chance.below(4) != 0 || images.lock().len() as u64 >= images_wanted {
                return;
            }
            let crashed = match chance.below(4) {
                // The process dies, the host's cache survives: only a later power cut would lose
                // something.
                0 => storage.process_death(),
                _ => storage.crash_random(&mut || chance.0.next_u64()),
            };
            images.lock().push(Image { storage: crashed, acknowledged: *acknowledged.lock() });
        }
    };
    storage.on_op(Box::new(hook));

    for _ in 0..steps {
        let target = (2 + dice.below(4), dice.below(10));
        match dice.below(20) {
            0..9 => {
                let (seed, length) = (dice.0.next_u64(), 1 + dice.below(30_000) as usize);
                put(&volume, target.0, target.1, seed, length).unwrap();
                live.insert(target, (seed, length));
            }
            9..12 => {
                delete(&volume, target.0, target.1).unwrap();
                live.remove(&target);
            }
            12..14 => {
                let from = (2 + dice.below(4), dice.below(10));
                let state = volume.state();
                if clone(&volume, volume.view(&state), from, target).unwrap() {
                    live.insert(target, live[&from]);
                }
            }
            14..18 => {
                // The next commit has this content, whether or not a crash precedes its
                // acknowledgement.
                let next = volume.open_generation();
                log.states.insert(next, live.clone());
                let generation = volume.commit().unwrap();
                log.states.insert(generation, live.clone());
                *acknowledged.lock() = generation;
            }
            _ => {
                let next = volume.open_generation();
                if !volume.writer().is_dirty() {
                    log.states.insert(next, live.clone());
                    volume.maintain().unwrap();
                    volume.erase_all().unwrap();
                    for n in next.0..volume.open_generation().0 {
                        log.states.insert(Generation(n), live.clone());
                    }
                    // No caller got an acknowledgement of each empty commit, but the content is the
                    // same.
                }
            }
        }
    }
    storage.on_op(Box::new(|_| {}));
    log.acknowledged = *acknowledged.lock();
    (dice, log)
}

/// Opens an image as a user would after the crash; everything promised must hold.
fn verify(dice: &Dice, log: &Log, image: &Image) -> Arc<Volume> {
    let volume = match try_open(image.storage.clone(), dice, false) {
        Ok(volume) => volume,
        Err(error) => panic!("archive does not open after a crash: {error}"),
    };
    let generation = volume.durable().generation;
    assert!(generation >= image.acknowledged, "commit {} acknowledged, {} found", image.acknowledged.0, generation.0);
    // An empty commit between two known ones has the content of the one before.
    let (_, expected) = log.states.range(..=generation).next_back().unwrap();
    assert_live(&volume, expected);
    assert_sound(&volume);
    volume
}

/// After the sweep no block outside of the accepted root opens as a page.
fn assert_nothing_else_readable(dice: &Dice, volume: &Volume) {
    volume.erase_all().unwrap();
    let state = volume.state();
    let mut used = HashSet::new();
    let view = volume.view(&state);
    view.scan(Key::MIN, Key::MAX, &mut |key, value| {
        if key.kind == kind::EXTENT {
            used.insert(Extent::decode(value)?.page.run.address);
        }
        Ok(std::ops::ControlFlow::Continue(()))
    })
    .unwrap();
    let cipher = cipher(&dice.0);
    let storage = volume.pager().storage();
    for block in RESERVED[0].1..storage.len().unwrap() / BLOCK {
        if block >= RESERVED[1].0 && block < MIN_BLOCKS {
            continue;
        }
        let mut bytes = vec![0; BLOCK as usize];
        storage.read_at(block * BLOCK, &mut bytes).unwrap();
        if let Ok(prologue) = cipher.open_prologue(block, &bytes)
            && prologue.kind == crate::format::page::PageKind::Data
        {
            assert!(used.contains(&block), "data page of no commit is readable: block={block}");
        }
    }
}

#[test]
fn every_crash_recovers_to_an_acknowledged_or_newer_commit() {
    for seed in seeds(1..=8) {
        let images = Arc::new(Mutex::new(Vec::new()));
        let (dice, log) = workload(seed, 150, 60, &images);
        let images = std::mem::take(&mut *images.lock());
        assert!(images.len() >= 30, "only {} images", images.len());
        for (index, image) in images.iter().enumerate() {
            let volume = verify(&dice, &log, image);
            if index % 5 == 0 {
                assert_nothing_else_readable(&dice, &volume);
            }
        }
    }
}

/// The process dies with its writes in the host's cache; the next session opens, works, and then
/// the power fails. Both the writes acknowledged before the death and those acknowledged to the new
/// session survive.
#[test]
fn process_death_followed_by_power_loss_during_or_after_recovery_loses_nothing() {
    for seed in seeds(20..=26) {
        let images = Arc::new(Mutex::new(Vec::new()));
        let (dice, log) = workload(seed, 120, 40, &images);
        let images = std::mem::take(&mut *images.lock());
        for image in images.iter().filter(|image| !image.storage.pending().is_empty()) {
            // During recovery: at each of its storage operations.
            let second: Arc<Mutex<Vec<Arc<SimulatedStorage>>>> = Arc::default();
            let hook = {
                let (weak, second) = (Arc::downgrade(&image.storage), second.clone());
                let chance = Dice(Arc::new(crate::env::SeededEnvironment::new(seed)));
                move |_: &crate::storage::simulated::OpKind| {
                    if let Some(storage) = weak.upgrade().filter(|_| second.lock().len() < 12) {
                        second.lock().push(storage.crash_random(&mut || chance.0.next_u64()));
                    }
                }
            };
            image.storage.on_op(Box::new(hook));
            let volume = verify(&dice, &log, image);
            let recovered = volume.durable().generation;
            let (_, expected) = log.states.range(..=recovered).next_back().unwrap();
            put(&volume, 9, 0, 4711, 9000).unwrap();
            let acknowledged = volume.commit().unwrap();
            image.storage.on_op(Box::new(|_| {}));
            let mut with_new = expected.clone();
            with_new.insert((9, 0), (4711, 9000));
            drop(volume);
            // After recovery and a promise.
            let last = image.storage.crash_random(&mut || dice.0.next_u64());
            let volume = open(last, &dice);
            assert!(volume.durable().generation >= acknowledged);
            assert_live(&volume, &with_new);
            assert_sound(&volume);
            for crashed in second.lock().iter() {
                let volume = open(crashed.clone(), &dice);
                assert!(volume.durable().generation >= image.acknowledged);
                assert_sound(&volume);
                let (_, before) = log.states.range(..=volume.durable().generation.min(recovered)).next_back().unwrap();
                if volume.durable().generation <= recovered {
                    assert_live(&volume, before);
                }
            }
        }
    }
}

/// EIO at any write, barrier, punch or growth latches with one error to every writer; the last
/// commit stays; a new session goes on.
#[test]
fn a_failed_write_or_barrier_latches_and_loses_nothing_that_was_acknowledged() {
    for count in 0..40 {
        let dice = Dice::new(300 + count);
        let storage = SimulatedStorage::new();
        let volume = create(storage.clone(), &dice);
        put(&volume, 2, 0, 1, 9000).unwrap();
        volume.commit().unwrap();
        let mut expected = Content::from([((2, 0), (1, 9000))]);
        storage.fail_after(count, Fault::Eio);
        let mut failed = None;
        let mut attempted = expected.clone();
        for slot in 1..10 {
            attempted.insert((2, slot), (slot, 9000));
            match put(&volume, 2, slot, slot, 9000).and_then(|()| volume.commit()) {
                Ok(_) => expected = attempted.clone(),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        let Some(error) = failed else { continue };
        assert!(matches!(error, Error::WriteFailed(_) | Error::Io { .. }), "{error}");
        if volume.pager().sticky_error().check().is_err() {
            assert!(matches!(put(&volume, 3, 0, 0, 10), Err(Error::WriteFailed(_))));
            assert!(volume.close().is_err());
        }
        drop(volume);
        let volume = open(storage.crash_random(&mut || dice.0.next_u64()), &dice);
        let found = volume.state();
        let slots: Vec<u64> = expected.keys().map(|key| key.1).collect();
        for slot in slots {
            assert!(volume.view(&found).get(extent_key(2, slot), Extent::decode).unwrap().is_some());
        }
        assert_sound(&volume);
    }
}

/// After a failed barrier the pages read well until the host evicts them; the next session must not
/// believe them.
#[test]
fn a_record_whose_barrier_failed_is_not_believed_from_the_cache() {
    let dice = Dice::new(400);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 9000).unwrap();
    volume.commit().unwrap();
    put(&volume, 2, 1, 2, 9000).unwrap();
    storage.fail_next_barrier();
    assert!(matches!(volume.commit(), Err(Error::Io { .. })));
    drop(volume);
    // The user mounts again at once, without a power cut.
    let volume = open(storage, &dice);
    assert_live(&volume, &Content::from([((2, 0), (1, 9000))]));
    assert_sound(&volume);
}

/// A transient read error aborts the open and changes nothing: it must not look like a torn commit.
#[test]
fn a_read_error_during_recovery_aborts_it() {
    let dice = Dice::new(500);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    put(&volume, 2, 0, 1, 9000).unwrap();
    volume.commit().unwrap();
    let page = volume.durable().allocated[0].0;
    drop(volume);
    for fail_at in [page.offset(), crate::format::slot_block(33) * BLOCK] {
        let before = storage.contents();
        storage.fail_reads(Some(Box::new(move |offset, length| offset <= fail_at && fail_at < offset + length as u64)));
        assert!(matches!(try_open(storage.clone(), &dice, false), Err(Error::Io { .. })));
        storage.fail_reads(None);
        assert!(storage.contents() == before);
    }
    let volume = open(storage, &dice);
    assert_live(&volume, &Content::from([((2, 0), (1, 9000))]));
}

/// Server that answers requests up to an offset.
struct SilentBehind {
    storage: Arc<SimulatedStorage>,
    offset: u64,
    unanswered: AtomicU64,
}

impl Storage for SilentBehind {
    fn len(&self) -> Result<u64> {
        self.storage.len()
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        if offset < self.offset {
            return self.storage.read_at(offset, out);
        }
        self.unanswered.fetch_add(1, Ordering::Relaxed);
        Err(Error::request("the server does not answer", ErrorKind::TimedOut))
    }

    fn evict(&self, offset: u64, length: u64) -> Result<()> {
        self.storage.evict(offset, length)
    }

    fn next_data(&self, offset: u64) -> Result<Option<Range<u64>>> {
        self.storage.next_data(offset)
    }

    fn read_only(&self) -> bool {
        true
    }
}

/// A reader reports that the server is away, after one request, and not that pages are lost.
#[test]
fn a_server_that_is_away_during_recovery_ends_it() {
    let dice = Dice::new(501);
    let storage = SimulatedStorage::new();
    let volume = create(storage.clone(), &dice);
    for slot in 0..20 {
        put(&volume, 2, slot, slot, 9000).unwrap();
    }
    volume.commit().unwrap();
    let pages = volume.durable().allocated.clone();
    drop(volume);
    let offset = pages.iter().map(|(run, _)| run.offset()).min().unwrap();
    let server = Arc::new(SilentBehind { storage, offset, unanswered: AtomicU64::new(0) });
    let opened = try_open(server.clone(), &dice, true).map(drop);
    assert!(matches!(&opened, Err(error) if error.is_server_unavailable()), "{opened:?}");
    assert!(pages.len() > 20 && server.unanswered.load(Ordering::Relaxed) == 1, "{pages:?}");
}
