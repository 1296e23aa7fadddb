//! Writeback at its limits: with exactly the reserved space, over damage, and concurrent with
//! closing.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::support::{CREATOR, OPTIONS, assert_sound, crash, create_with, fresh, reopen};
use crate::env::{Environment, SeededEnvironment};
use crate::error::Error;
use crate::format::values::NO_TRIM;
use crate::format::{Ino, ROOT_INO};
use crate::fs::extents::FRAME;
use crate::fs::reclaim::STEP;
use crate::fs::writeback::{COMMIT_WAIT_BYTES, SYNCED_BYTES};
use crate::fs::{Compression, FileSystem, FsOptions, SetAttributes, extents, inode, mode};
use crate::storage::simulated::{OpKind, SimulatedStorage};
use crate::storage::{CountingStorage, MemoryStorage, Storage};
use crate::txn::Reservation;

const BLOCK: usize = 4096;
/// How long a test that hangs waits before it fails.
const HANGS: Duration = Duration::from_secs(60);

fn make(fs: &FileSystem, name: &[u8]) -> Ino {
    fs.make_node(ROOT_INO, name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    SeededEnvironment::new(seed).fill_random(&mut bytes).unwrap();
    bytes
}

/// Data hidden by a truncation is freed in steps, and a small file may be written before that: a
/// file never has inline data and extents.
#[test]
fn inline_data_beside_extents_that_are_hidden_is_sound() {
    let (storage, fs) = fresh(1);
    let file = make(&fs, b"file");
    for number in 0..2 * STEP {
        fs.write(file, number * 2 * FRAME, &noise(number, 5000)).unwrap();
    }
    fs.sync().unwrap();
    fs.set_attributes(file, &SetAttributes { size: Some(0), ..SetAttributes::default() }).unwrap();
    fs.write(file, 0, b"few").unwrap();
    fs.sync().unwrap();
    let inode = inode::load(fs.volume.view(&fs.volume.state()), file).unwrap();
    assert!(inode.trim != NO_TRIM && inode.bytes == 3, "all is hidden, and the content is inline: {inode:?}");
    assert_sound(&fs);
    let fs = reopen(&storage, fs);
    assert_eq!(fs.read(file, 0, 10).unwrap(), b"few");
    while fs.maintain().unwrap() {}
    assert_sound(&fs);
}

/// A file with inline data gets pieces in its first frame, in another one, or in both, and no other
/// dirty data brings additional space: writeback gets by with the reservation.
#[test]
fn pieces_beside_inline_data_find_the_room_that_was_promised() {
    for frames in [&[0][..], &[1], &[0, 1], &[1, 2]] {
        for pieces in 1..=20 {
            let (storage, fs) = fresh(pieces);
            let file = make(&fs, b"file");
            let mut content = noise(1, 200);
            fs.write(file, 0, &content).unwrap();
            fs.sync().unwrap();
            content.resize(3 * FRAME as usize, 0);
            let mut end = 200;
            for frame in frames {
                for piece in 0..pieces.min(15) {
                    let at = (frame * FRAME) as usize + BLOCK + piece as usize * 2 * BLOCK;
                    content[at..at + BLOCK].copy_from_slice(&noise(at as u64, BLOCK));
                    fs.write(file, at as u64, &content[at..at + BLOCK]).unwrap();
                    end = at + BLOCK;
                }
            }
            fs.sync().unwrap();
            let fs = reopen(&storage, fs);
            assert!(fs.read(file, 0, content.len()).unwrap() == content[..end], "{pieces} pieces in {frames:?}");
            assert_sound(&fs);
        }
    }
}

/// Flips a bit in the page that holds the start of the file.
fn damage(storage: &MemoryStorage, fs: &FileSystem, file: Ino) {
    let state = fs.volume.state();
    let mapped = extents::find_overlapping(fs.volume.view(&state), file, 0..1, 1).unwrap();
    let at = mapped[0].extent.page.run.offset() + 3000;
    let mut byte = [0];
    storage.read_at(at, &mut byte).unwrap();
    storage.write_at(at, &[byte[0] ^ 4]).unwrap();
}

/// Stops the growth of the archive and reserves all space that writes may use.
fn take_space(fs: &FileSystem) -> Vec<Reservation> {
    fs.volume.allocator().limit_size(0);
    std::iter::from_fn(|| fs.volume.reserve_spare(1)).collect()
}

/// Small content is merged with data written over it, and many pieces are merged with the data
/// between them: when that cannot be read, the pieces become pages of their own. On a full archive
/// these use the reserve of deletes.
#[test]
fn a_damaged_page_stops_no_commit() {
    let one = vec![(BLOCK, BLOCK)];
    let many: Vec<_> = (1..16).map(|i| (i * 8000, 100)).collect();
    let whole = FRAME as usize;
    for (size, pieces, full) in [(3 * BLOCK, one, false), (whole, many.clone(), false), (whole, many, true)] {
        let (storage, fs) = fresh(1);
        let (file, other) = (make(&fs, b"file"), make(&fs, b"other"));
        fs.write(file, 0, &noise(2, size)).unwrap();
        let fs = reopen(&storage, fs);
        damage(&storage, &fs, file);
        for (at, length) in &pieces {
            fs.write(file, *at as u64, &noise(3, *length)).unwrap();
        }
        fs.write(other, 0, b"of somebody else").unwrap();
        let taken: Vec<Reservation> = if full { take_space(&fs) } else { Vec::new() };
        fs.sync().unwrap();
        drop(taken);
        let fs = reopen(&storage, fs);
        assert_eq!(fs.read(other, 0, 100).unwrap(), b"of somebody else");
        for (at, length) in pieces {
            assert!(fs.read(file, at as u64, length).unwrap() == noise(3, length));
        }
        assert!(matches!(fs.read(file, 0, 1), Err(Error::Damaged(_))), "what was damaged stays so");
    }
}

#[test]
fn nothing_follows_a_closed_record() {
    let (storage, fs) = fresh(1);
    make(&fs, b"file");
    fs.close().unwrap();
    assert!(matches!(fs.purge(), Err(Error::Invalid(_))));
    assert!(matches!(fs.make_durable(), Err(Error::Invalid(_))));
    assert!(fs.volume.durable().closed);
    let fs = reopen(&storage, fs);
    assert_sound(&fs);
}

/// A purge that is under way has the file grow while closing cuts its end off.
#[test]
fn closing_waits_for_who_works_beside_it() {
    let (_, fs) = fresh(1);
    make(&fs, b"file");
    let work = fs.shutdown_gate.enter().unwrap();
    let closing = std::thread::spawn({
        let fs = Arc::clone(&fs);
        move || fs.close()
    });
    while fs.shutdown_gate.check_open().is_ok() {
        std::thread::yield_now();
    }
    assert!(!fs.volume.durable().closed);
    drop(work);
    closing.join().unwrap().unwrap();
    assert!(fs.volume.durable().closed);
}

/// A backup that blocks on its file keeps the archive from being closed, until the program is
/// killed.
#[test]
fn what_was_accepted_is_durable_before_closing_waits() {
    let (_, fs) = fresh(1);
    make(&fs, b"file");
    assert!(fs.is_dirty());
    let before = fs.generation();
    let work = fs.shutdown_gate.enter().unwrap();
    let closing = std::thread::spawn({
        let fs = Arc::clone(&fs);
        move || fs.close()
    });
    let began = Instant::now();
    while fs.generation() == before && began.elapsed() < HANGS {
        std::thread::yield_now();
    }
    assert!(fs.generation() != before && !fs.volume.durable().closed);
    drop(work);
    closing.join().unwrap().unwrap();
    assert!(fs.volume.durable().closed);
}

/// A file's writer may hold the file's lock while it waits long for space: an fsync of another file
/// does not wait for it, and the commit includes the accepted data of both.
#[test]
fn an_fsync_does_not_wait_for_who_writes_another_file() {
    let (storage, fs) = fresh(1);
    let (slow, other) = (make(&fs, b"slow"), make(&fs, b"other"));
    let content = noise(1, FRAME as usize - 1);
    let parts = 7 * OPTIONS.max_dirty_bytes / 8 / FRAME;
    (0..parts).for_each(|part| fs.write(slow, part * FRAME, &content).unwrap());
    assert!(fs.write_buffer.total_bytes() > COMMIT_WAIT_BYTES, "too little is staged");
    let busy = fs.write_buffer.file(slow);
    let locked = (busy.lock(), fs.volume.be_short());
    let (done, told) = std::sync::mpsc::channel();
    let asking = std::thread::spawn({
        let fs = Arc::clone(&fs);
        move || {
            fs.write(other, 0, b"of another file").unwrap();
            fs.sync().unwrap();
            done.send(()).unwrap();
        }
    });
    let ended = told.recv_timeout(std::time::Duration::from_secs(60));
    drop(locked);
    asking.join().unwrap();
    assert!(ended.is_ok(), "the fsync waited for a writer of another file");
    drop(busy);
    let fs = crash(&storage, fs);
    assert_eq!(fs.read(other, 0, 100).unwrap(), b"of another file");
    assert!(fs.read(slow, (parts - 1) * FRAME, content.len()).unwrap() == content);
    assert_sound(&fs);
}

/// Frames are written back in turn: one that was written once does not keep its memory while others
/// are rewritten for each piece.
#[test]
fn no_frame_stays_dirty_while_others_are_written_back_again_and_again() {
    let storage = Arc::new(MemoryStorage::new());
    let options = FsOptions { max_dirty_bytes: 1 << 20, ..OPTIONS };
    let fs = create_with(storage, Arc::new(SeededEnvironment::new(30)), options);
    let file = make(&fs, b"file");
    let (frames, content) = (32, noise(30, BLOCK));
    fs.write(file, frames * FRAME, &content).unwrap();
    let dice = SeededEnvironment::new(31);
    for _ in 0..4 * options.max_dirty_bytes / BLOCK as u64 {
        fs.write(file, dice.next_u64() % (frames * 32) * BLOCK as u64, &content).unwrap();
    }
    let (_, dirty) = fs.write_buffer.dirty_ranges(file);
    assert!(dirty.iter().all(|range| range.end <= frames * FRAME), "the oldest piece is dirty: {:?}", dirty.last());
    assert_sound(&fs);
}

/// A program that syncs may have to wait for all dirty data.
#[test]
fn less_is_dirty_while_programs_sync() {
    let storage = Arc::new(MemoryStorage::new());
    let options = FsOptions { max_dirty_bytes: 64 << 20, compression: Compression::Off, ..OPTIONS };
    let fs = create_with(storage, Arc::new(SeededEnvironment::new(32)), options);
    let (file, content) = (make(&fs, b"file"), noise(32, FRAME as usize - 1));
    let fill = || {
        (0..400).for_each(|part| fs.write(file, part * FRAME, &content).unwrap());
        fs.write_buffer.total_bytes()
    };
    let all = 400 * content.len() as u64;
    // The support's own sync, when the archive was created, is followed by periodic commits.
    (0..2).for_each(|_| fs.sync_in_background().unwrap());
    assert_eq!(fill(), all, "no program syncs");
    fs.sync().unwrap();
    assert!(fill() <= SYNCED_BYTES);
    (0..2).for_each(|_| fs.sync_in_background().unwrap());
    assert_eq!(fill(), all, "none syncs any more");
    fs.sync().unwrap();
    assert!(fs.programs_sync() && !fs.is_dirty());
    (0..2).for_each(|_| fs.sync_in_background().unwrap());
    assert!(!fs.programs_sync(), "without a change as well");
}

/// While a batch of a file is being written, the file takes writes, and a change of the data below
/// waits for the batch alone: the batch is applied first, and the change after it.
#[test]
fn a_file_takes_writes_while_a_layer_of_it_is_written_out() {
    let storage = SimulatedStorage::new();
    let options = FsOptions { max_dirty_bytes: 1 << 20, ..OPTIONS };
    let fs = create_with(storage.clone(), Arc::new(SeededEnvironment::new(29)), options);
    let file = make(&fs, b"file");
    let (at_work, is_at_work) = mpsc::channel();
    let (accepted, was_accepted) = mpsc::channel();
    let armed = AtomicBool::new(true);
    let was_accepted = Mutex::new(was_accepted);
    let write_waited = Arc::new(AtomicBool::new(true));
    let waited = write_waited.clone();
    storage.on_op(Box::new(move |op| {
        if matches!(op, OpKind::Write { .. }) && armed.swap(false, Ordering::Relaxed) {
            at_work.send(()).unwrap();
            waited.store(was_accepted.lock().recv_timeout(HANGS).is_err(), Ordering::Relaxed);
        }
    }));
    let mut content = noise(1, 1 << 20);
    std::thread::scope(|scope| {
        let fs = &fs;
        // It changes data written before the first batch begins.
        scope.spawn(move || {
            is_at_work.recv().unwrap();
            fs.write_buffered(file, 5000, &[7; 300]).unwrap();
            // The receiver may be dropped.
            let _ = accepted.send(());
            // Whole frames between two ends, and a hole: both change extents.
            fs.write_buffered(file, 3 * FRAME - 9, &[8; 2 * FRAME as usize]).unwrap();
            fs.zero_range(file, FRAME, 10_000, true, false).unwrap();
        });
        for (turn, part) in content.chunks(8192).enumerate() {
            fs.write(file, turn as u64 * 8192, part).unwrap();
        }
    });
    assert!(!write_waited.load(Ordering::Relaxed), "the write waited for the batch, or there was none");
    content[5000..5300].fill(7);
    content[3 * FRAME as usize - 9..][..2 * FRAME as usize].fill(8);
    content[FRAME as usize..][..10_000].fill(0);
    assert!(fs.read(file, 0, content.len() + 1).unwrap() == content);
    fs.sync().unwrap();
    assert!(fs.read(file, 0, content.len() + 1).unwrap() == content);
    assert_sound(&fs);
}

/// Read data is in the reused buffers, of which the next read overwrites only its own length.
#[test]
fn nothing_that_was_read_stays_in_a_buffer_after_a_purge() {
    let (_storage, fs) = fresh(7);
    let file = make(&fs, b"file");
    let content = noise(7, 200_000);
    fs.write(file, 0, &content).unwrap();
    fs.make_durable().unwrap();
    type Forget = (&'static str, fn(&FileSystem));
    let forget: [Forget; 3] = [
        ("wipe_buffers", FileSystem::wipe_buffers),
        ("forget_plaintext", FileSystem::forget_plaintext),
        ("purge", |fs| fs.purge().unwrap()),
    ];
    for (how, forget) in forget {
        fs.with_read_buffer(|buffer| {
            assert_eq!(fs.read_into(file, 0, content.len(), buffer).unwrap(), content.len());
        });
        fs.with_read_buffer(|buffer| {
            assert_eq!(&buffer[..content.len()], content, "{how}: it is kept for the next read")
        });
        forget(&fs);
        fs.with_read_buffer(|buffer| assert_eq!(buffer.capacity(), 0, "{how}"));
    }
}

/// A commit that waits for the medium has little of a stream left to wait for, and single pages are
/// left to it.
#[test]
fn the_host_writes_a_stream_before_the_commit() {
    let storage = Arc::new(CountingStorage::new(false));
    let fs = create_with(storage.clone(), Arc::new(SeededEnvironment::new(5)), OPTIONS);
    let file = make(&fs, b"stream");
    let data = noise(6, 1 << 20);
    for part in 0..8u64 {
        fs.write(file, part << 20, &data).unwrap();
    }
    let started = storage.take_started();
    let bytes: u64 = started.iter().map(|range| range.end - range.start).sum();
    assert!(bytes >= 7 << 20, "{started:?}");
    let end = storage.len().unwrap();
    assert!(started.iter().all(|range| range.start >= FRAME && range.end <= end), "{started:?}");
    fs.sync().unwrap();
    for number in 0..400u64 {
        fs.write(file, number * 16384, &data[..BLOCK]).unwrap();
    }
    fs.sync().unwrap();
    assert_eq!(storage.take_started(), []);
}
