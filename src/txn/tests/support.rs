//! A volume on a test storage, and small files made of extents to fill it with.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use crate::crypto::SecretKey;
use crate::env::SeededEnvironment;
use crate::error::Result;
use crate::format::log::LogPiece;
use crate::format::values::Extent;
use crate::format::{Ino, Key, kind};
use crate::frame::PageCipher;
use crate::storage::Storage;
use crate::txn::{Compression, OpenOptions, Operation, State, View, Volume, VolumeOwner};

pub(super) const ARCHIVE: [u8; 16] = [7; 16];
pub(super) const MEMORY: u64 = 32 << 20;

/// Randomness of a test, replayable by its seed.
pub(super) struct Dice(pub(super) Arc<SeededEnvironment>);

impl Dice {
    pub(super) fn new(seed: u64) -> Dice {
        println!("seed {seed}");
        Dice(Arc::new(SeededEnvironment::new(seed)))
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }
}

/// Owner with a flush of its own, and the same pieces for each log entry.
pub(super) struct TestOwner<F> {
    pub(super) flush: F,
    pub(super) pieces: Vec<LogPiece>,
}

impl<F: Fn(&mut Operation<'_>) -> Result<()> + Send + Sync> TestOwner<F> {
    pub(super) fn new(flush: F) -> TestOwner<F> {
        TestOwner { flush, pieces: Vec::new() }
    }
}

impl<F: Fn(&mut Operation<'_>) -> Result<()> + Send + Sync> VolumeOwner for TestOwner<F> {
    fn flush(&self, operation: &mut Operation<'_>) -> Result<()> {
        (self.flush)(operation)
    }

    fn take_log_pieces(&self, _: usize) -> Option<Vec<LogPiece>> {
        Some(self.pieces.clone())
    }

    fn reclaim_step(&self) -> Result<bool> {
        Ok(false)
    }

    fn is_reclaim_blocked(&self) -> Result<bool> {
        Ok(false)
    }
}

pub(super) fn cipher(environment: &Arc<SeededEnvironment>) -> PageCipher {
    PageCipher::new(&SecretKey::new([9; 32]), ARCHIVE, false, environment.clone())
}

pub(super) fn create(storage: Arc<dyn Storage>, dice: &Dice) -> Arc<Volume> {
    let volume = Volume::create_for_records(storage, cipher(&dice.0), dice.0.clone(), 1).unwrap();
    volume.commit().unwrap();
    volume
}

pub(super) fn try_open(storage: Arc<dyn Storage>, dice: &Dice, read_only: bool) -> Result<Arc<Volume>> {
    let options = OpenOptions { read_only, memory: MEMORY };
    Volume::open(storage, cipher(&dice.0), dice.0.clone(), 1, &options)
}

pub(super) fn open(storage: Arc<dyn Storage>, dice: &Dice) -> Arc<Volume> {
    try_open(storage, dice, false).unwrap()
}

/// Content of extents: (file, slot) -> the seed that its bytes are made of, and their length.
pub(super) type Content = BTreeMap<(u64, u64), (u64, usize)>;

pub(super) fn bytes_of(seed: u64, length: usize) -> Vec<u8> {
    let source = SeededEnvironment::new(seed);
    let mut bytes = vec![0; length];
    crate::env::Environment::fill_random(&source, &mut bytes).unwrap();
    bytes
}

pub(super) fn extent_key(file: u64, slot: u64) -> Key {
    Key::new(file, kind::EXTENT, slot << 17)
}

/// Writes new content for one slot of a file, replacing the old content.
pub(super) fn put(volume: &Arc<Volume>, file: u64, slot: u64, seed: u64, length: usize) -> Result<()> {
    let mut reservation = volume.reserve_data(length as u64, 1)?;
    let data = bytes_of(seed, length);
    let mut pages = volume.write_data(&mut reservation, Ino(file), slot << 17, &data, Compression::Default)?;
    let [piece] = *pages.pieces() else {
        // Fragmented: these tests keep one extent a slot, so they write it smaller.
        return Err(crate::Error::NoSpace("fragmented".into()));
    };
    let done = volume.operate(8, true, |op| {
        let old = op.view().get(extent_key(file, slot), Extent::decode)?;
        pages.name(op, |_| true)?;
        if let Some(old) = old {
            op.release(&old.page, old.born)?;
        }
        let extent = Extent { page: piece.page, start: 0, length: piece.length, born: op.generation() };
        op.insert(extent_key(file, slot), &extent.encode())
    });
    done.map(drop)
}

/// Makes one slot of a file name the page of another (a clone); the source may lie in a snapshot's
/// view.
pub(super) fn clone(volume: &Volume, source: View<'_>, from: (u64, u64), to: (u64, u64)) -> Result<bool> {
    let Some(extent) = source.get(extent_key(from.0, from.1), Extent::decode)? else { return Ok(false) };
    volume.operate(8, false, |op| {
        let old = op.view().get(extent_key(to.0, to.1), Extent::decode)?;
        op.share(&extent.page, 1)?;
        if let Some(old) = old {
            op.release(&old.page, old.born)?;
        }
        op.insert(extent_key(to.0, to.1), &Extent { born: op.generation(), ..extent }.encode())
    })?;
    Ok(true)
}

pub(super) fn delete(volume: &Volume, file: u64, slot: u64) -> Result<bool> {
    volume.operate(8, true, |op| {
        let Some(old) = op.view().get(extent_key(file, slot), Extent::decode)? else { return Ok(false) };
        op.release(&old.page, old.born)?;
        op.remove(extent_key(file, slot))
    })
}

/// All extents of a view, each page read and compared with the seed that the caller expects.
pub(super) fn assert_content(volume: &Volume, view: View<'_>, expected: &Content) {
    let mut found = BTreeMap::new();
    view.scan(Key::MIN, Key::MAX, &mut |key, value| {
        if key.kind == kind::EXTENT {
            found.insert((key.object, key.sub >> 17), Extent::decode(value)?);
        }
        Ok(ControlFlow::Continue(()))
    })
    .unwrap();
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (key, extent) in found {
        let (seed, length) = expected[&key];
        let mut bytes = vec![0; extent.length as usize];
        volume.pager().read_data(&extent.page, extent.start, &mut bytes).unwrap();
        assert_eq!(bytes, bytes_of(seed, length), "content of {key:?}");
    }
}

pub(super) fn assert_live(volume: &Volume, expected: &Content) {
    let state: Arc<State> = volume.state();
    assert_content(volume, volume.view(&state), expected);
}

pub(super) fn assert_sound(volume: &Volume) {
    let findings = volume.check_space(true, &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "{findings:?}");
}

/// Runs `work` in another thread, and returns when that has ended or sleeps, as a thread does that
/// waits for a lock of the caller's thread.
///
/// A thread that sleeps for a moment for another reason changes the order of the two; that order
/// must be right as well.
pub(super) fn run_until_it_waits(work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        work();
    });
    let status = Path::new("/proc").join(told.recv().unwrap()).join("status");
    // Some when it sleeps: how often it went to sleep by itself.
    let sleeps = || {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name).map(|it| it.trim().to_owned()));
        field("State:").filter(|state| state.starts_with('S')).and_then(|_| field("voluntary_ctxt_switches:"))
    };
    let mut before = None;
    while !thread.is_finished() {
        let now = sleeps();
        if now.is_some() && now == before {
            break;
        }
        before = now;
        std::thread::yield_now();
    }
    thread
}
