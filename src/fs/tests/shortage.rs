//! A full archive that was emptied takes new data at once: a write without space waits for pending
//! frees.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};

use super::support::{CREATOR, NAME_KEY, OPTIONS, assert_sound, fresh_with, reopen};
use crate::env::{Environment, SeededEnvironment};
use crate::error::Error;
use crate::format::{BLOCK, Ino, ROOT_INO};
use crate::fs::extents::FRAME;
use crate::fs::{FileSystem, mode};

const LIMIT: u64 = 14 << 20;

/// How an archive is filled: bytes of each write, the distance from one to the next, writes of each
/// file, writes between two fsyncs.
#[derive(Clone, Copy, Debug)]
struct Pattern {
    request: usize,
    stride: u64,
    writes: u64,
    sync_every: u64,
}

const PATTERNS: [Pattern; 6] = [
    Pattern { request: 131_072, stride: 131_072, writes: 1000, sync_every: 1000 },
    Pattern { request: 131_072, stride: 131_072, writes: 3, sync_every: 7 },
    Pattern { request: 4096, stride: 131_072, writes: 10_000, sync_every: 100 },
    Pattern { request: 4096, stride: 4096, writes: 10_000, sync_every: 1 },
    Pattern { request: 20_000, stride: 50_000, writes: 40, sync_every: 1 },
    Pattern { request: 3000, stride: 3000, writes: 1, sync_every: 50 },
];

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    SeededEnvironment::new(seed).fill_random(&mut bytes).unwrap();
    bytes
}

/// Writes until there is no space; returns the files and the accepted bytes.
fn fill(fs: &FileSystem, pattern: Pattern, round: u64) -> (Vec<(Vec<u8>, Ino)>, u64) {
    let (mut files, mut accepted, mut writes) = (Vec::new(), 0, 0);
    for number in 0.. {
        let name = format!("fill-{number}").into_bytes();
        let made = match fs.make_node(ROOT_INO, &name, mode::REGULAR | 0o600, 0, CREATOR) {
            Ok(made) => made,
            Err(Error::NoSpace(_)) => break,
            Err(error) => panic!("{error}"),
        };
        files.push((name, made.ino));
        for n in 0..pattern.writes {
            let content = noise(round << 32 | writes, pattern.request);
            let mut done = fs.write(made.ino, n * pattern.stride, &content);
            writes += 1;
            if done.is_ok() && writes % pattern.sync_every == 0 {
                done = fs.sync();
            }
            match done {
                Ok(()) => accepted += pattern.request as u64,
                Err(Error::NoSpace(_)) => return (files, accepted),
                Err(error) => panic!("{error}"),
            }
        }
    }
    (files, accepted)
}

#[test]
fn what_was_deleted_and_synced_can_be_written_at_once() {
    for (seed, pattern) in PATTERNS.into_iter().enumerate() {
        for held in [false, true] {
            println!("{pattern:?} held={held}");
            let (_, fs) = fresh_with(seed as u64, NAME_KEY, OPTIONS);
            fs.volume.allocator().limit_size(LIMIT);
            for round in 0..4 {
                let (files, accepted) = fill(&fs, pattern, round);
                assert!(accepted > 1 << 20, "only {accepted} bytes were taken");
                for (name, ino) in &files {
                    // An open file is freed when it is closed.
                    if held {
                        fs.open(*ino).unwrap();
                    }
                    fs.unlink(ROOT_INO, name).unwrap();
                    if held {
                        fs.release(*ino).unwrap();
                    }
                }
                fs.sync().unwrap();
                let content = noise(round, (accepted / 2) as usize);
                let ino = fs.make_node(ROOT_INO, b"new", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
                for (n, part) in content.chunks(131_072).enumerate() {
                    let offset = n as u64 * 131_072;
                    let written = fs.write(ino, offset, part);
                    assert!(written.is_ok(), "round {round} at {offset} of {accepted}: {written:?}");
                }
                fs.sync().unwrap();
                assert!(fs.read(ino, 0, content.len()).unwrap() == content);
                fs.unlink(ROOT_INO, b"new").unwrap();
            }
            fs.volume.pager().sticky_error().check().unwrap();
            assert_sound(&fs);
        }
    }
}

/// A program returns from close before the file system gets the release, and reclaiming a file may
/// take a while: a writer without space waits for both.
#[test]
fn what_is_about_to_be_closed_or_reclaimed_can_be_written_to() {
    for locked in [false, true] {
        println!("locked={locked}");
        let (_, fs) = fresh_with(31, NAME_KEY, OPTIONS);
        fs.volume.allocator().limit_size(LIMIT);
        let (files, accepted) = fill(&fs, PATTERNS[0], 0);
        for (name, ino) in &files {
            fs.open(*ino).unwrap();
            fs.unlink(ROOT_INO, name).unwrap();
        }
        fs.sync().unwrap();
        let let_go = |of: &[(Vec<u8>, Ino)]| of.iter().for_each(|(_, ino)| fs.release(*ino).unwrap());
        let (content, held) = (noise(1, (accepted / 2) as usize), Barrier::new(2));
        let refused = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let entries: Vec<_> = files.iter().map(|(_, ino)| fs.write_buffer.file(*ino)).collect();
                let locks: Vec<_> =
                    if locked { entries.iter().map(|entry| entry.lock()).collect() } else { Vec::new() };
                if locked {
                    let_go(&files);
                }
                held.wait();
                while !fs.volume.space_waiter().is_short() && !refused.load(Ordering::Acquire) {
                    std::thread::yield_now();
                }
                drop(locks);
                if !locked {
                    let_go(&files);
                }
            });
            held.wait();
            let made = fs.make_node(ROOT_INO, b"new", mode::REGULAR | 0o600, 0, CREATOR);
            refused.store(made.is_err(), Ordering::Release);
            let ino = made.unwrap().ino;
            let write = |(n, part): (usize, &[u8])| fs.write(ino, n as u64 * 131_072, part);
            let written = content.chunks(131_072).enumerate().try_for_each(write);
            refused.store(written.is_err(), Ordering::Release);
            written.unwrap();
            fs.sync().unwrap();
            assert!(fs.read(ino, 0, content.len()).unwrap() == content);
        });
        assert_sound(&fs);
    }
}

/// Space is reserved for the pages of dirty data, not for the nodes that reference them: an fsync
/// without space for those releases pending frees, too.
#[test]
fn an_fsync_without_room_for_nodes_lets_go_what_was_freed() {
    const ANCHORS: u64 = 200;
    let (_, fs) = fresh_with(20, NAME_KEY, OPTIONS);
    fs.volume.allocator().limit_size(64 << 20);
    let make = |name: String| fs.make_node(ROOT_INO, name.as_bytes(), mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    // Each in a leaf of its own.
    let anchors: Vec<Ino> = (0..ANCHORS)
        .map(|n| {
            for m in 0..100 {
                make(format!("between-{n}-{m}"));
            }
            let ino = make(format!("anchor-{n}"));
            fs.write(ino, 0, &noise(n, 9000)).unwrap();
            ino
        })
        .collect();
    // Room for the pages, and for as many nodes as the reserve has.
    fs.write(make("room".into()), 0, &noise(1, 230 << 14)).unwrap();
    fs.sync().unwrap();
    let (filler, _) = fill(&fs, PATTERNS[0], 1);
    fs.sync().unwrap();
    fs.unlink(ROOT_INO, b"room").unwrap();
    while fs.is_dirty() || fs.maintain().unwrap() {
        fs.sync().unwrap();
    }
    for _ in 0..3 {
        fs.maintain().unwrap();
    }
    filler.iter().for_each(|(name, _)| fs.unlink(ROOT_INO, name).unwrap());
    fs.sync().unwrap();
    for (n, ino) in anchors.iter().enumerate() {
        fs.write(*ino, 0, &noise(500 + n as u64, 9000)).unwrap();
    }
    fs.sync().unwrap();
    for (n, ino) in anchors.iter().enumerate() {
        assert!(fs.read(*ino, 0, 9000).unwrap() == noise(500 + n as u64, 9000));
    }
    assert_sound(&fs);
}

/// Where nothing comes free the answer is final, and asking costs no commit.
#[test]
fn a_full_archive_with_nothing_to_free_refuses_without_a_commit() {
    let (_, fs) = fresh_with(21, NAME_KEY, OPTIONS);
    fs.volume.allocator().limit_size(LIMIT);
    let (files, _) = fill(&fs, PATTERNS[0], 0);
    for _ in 0..3 {
        fs.sync().unwrap();
        fs.maintain().unwrap();
    }
    let content = noise(1, 1 << 20);
    assert!(matches!(fs.write(files[0].1, 60 << 20, &content), Err(Error::NoSpace(_))));
    let before = fs.generation();
    for _ in 0..20 {
        assert!(matches!(fs.write(files[0].1, 60 << 20, &content), Err(Error::NoSpace(_))));
    }
    assert_eq!(fs.generation(), before);
}

/// Several writers without space share the wait, and get the space of a delete in the middle of a
/// commit.
#[test]
fn several_writers_without_room_share_what_comes_free() {
    let (_, fs) = fresh_with(22, NAME_KEY, OPTIONS);
    fs.volume.allocator().limit_size(LIMIT);
    for round in 0..6 {
        let (files, accepted) = fill(&fs, PATTERNS[1], round);
        std::thread::scope(|scope| {
            // The commits of others run all the time.
            let syncs = scope.spawn(|| (0..30).for_each(|_| fs.sync().unwrap()));
            files.iter().for_each(|(name, _)| fs.unlink(ROOT_INO, name).unwrap());
            let writers: Vec<_> = (0..3_u64)
                .map(|writer| {
                    let fs = &fs;
                    scope.spawn(move || {
                        let name = format!("writer-{writer}").into_bytes();
                        let ino = fs.make_node(ROOT_INO, &name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
                        let content = noise(writer, (accepted / 5) as usize);
                        for (n, part) in content.chunks(131_072).enumerate() {
                            fs.write(ino, n as u64 * 131_072, part).unwrap();
                        }
                        fs.sync().unwrap();
                        assert!(fs.read(ino, 0, content.len()).unwrap() == content);
                        fs.unlink(ROOT_INO, &name).unwrap();
                    })
                })
                .collect();
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            syncs.join().unwrap();
        });
    }
    assert_sound(&fs);
}

/// Parts of deleted files on shared pages are removed at the end of a mount also if only the
/// reserve for deletes is free: a page of many parts would take more than that.
#[test]
fn closing_a_full_archive_repacks_out_of_what_is_kept() {
    for files in [30, 250_u64] {
        let (storage, fs) = fresh_with(files, NAME_KEY, OPTIONS);
        let name = |n: u64| format!("small-{n}").into_bytes();
        let content = |n: u64| noise(n, 500);
        for n in 0..files {
            let made = fs.make_node(ROOT_INO, &name(n), mode::REGULAR | 0o600, 0, CREATOR).unwrap();
            fs.write(made.ino, 0, &content(n)).unwrap();
        }
        fs.sync().unwrap();
        fs.volume.allocator().limit_size(LIMIT);
        let large = fs.make_node(ROOT_INO, b"large", mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
        let mut end = 0;
        for request in [131_072, 131_072, 4096, 4096] {
            while fs.write(large, end, &noise(end, request)).is_ok() {
                end += request as u64;
            }
            fs.sync().unwrap();
        }
        (0..files).filter(|n| n % 5 == 0).for_each(|n| fs.unlink(ROOT_INO, &name(n)).unwrap());
        let fs = reopen(&storage, fs);
        for n in (0..files).filter(|n| n % 5 != 0) {
            let ino = fs.lookup(ROOT_INO, &name(n)).unwrap().ino;
            assert!(fs.read(ino, 0, 501).unwrap() == content(n));
        }
        assert_sound(&fs);
        fs.repack.begin_search();
        while fs.repack.step().unwrap() {}
        assert!(fs.volume.stale_pages().is_empty(), "something was left on a shared page");
    }
}

/// The same if nothing else is free: removing a snapshot is durable, and the space that only it
/// used belongs to the next writer, which waits until it is freed.
#[test]
fn a_full_archive_removes_a_snapshot_and_writes_into_what_it_held() {
    for (seed, pattern) in PATTERNS.into_iter().enumerate() {
        println!("{pattern:?}");
        let (storage, fs) = fresh_with(70 + seed as u64, NAME_KEY, OPTIONS);
        let put = |name: &[u8], seed: u64, length: usize| {
            let ino = fs.make_node(ROOT_INO, name, mode::REGULAR | 0o600, 0, CREATOR)?.ino;
            let content = noise(seed, length);
            for (n, part) in content.chunks(131_072).enumerate() {
                fs.write(ino, n as u64 * 131_072, part)?;
            }
            fs.sync().map(|()| (ino, content))
        };
        put(b"held", 1, 4 << 20).unwrap();
        fs.take_snapshot(b"kept").unwrap();
        fs.unlink(ROOT_INO, b"held").unwrap();
        fs.sync().unwrap();
        fs.volume.allocator().limit_size(LIMIT);
        fill(&fs, pattern, 9);
        assert!(matches!(put(b"refused", 2, 1 << 20), Err(Error::NoSpace(_))));
        let _ = fs.unlink(ROOT_INO, b"refused");
        assert!(matches!(fs.take_snapshot(b"another"), Ok(()) | Err(Error::NoSpace(_))));
        let ids: Vec<u64> = fs.snapshots().unwrap().iter().map(|(id, ..)| *id).collect();
        fs.remove_snapshots(&ids).unwrap();
        let (ino, content) = put(b"new", 3, 2 << 20).unwrap();
        assert!(fs.read(ino, 0, content.len()).unwrap() == content);
        assert_sound(&fs);
        let fs = reopen(&storage, fs);
        assert!(fs.read(ino, 0, content.len()).unwrap() == content);
        fs.finish_removals(&mut || Ok(())).unwrap();
        assert!(fs.volume.snapshots().unwrap().is_empty());
        assert_eq!(fs.volume.check_space(true, &mut |_, _| {}).unwrap(), []);
    }
}

/// Scattered overwrites of a large file change a leaf of its extents each. A full archive takes no
/// more of them than a commit finds space for, and what is deleted meanwhile comes back.
#[test]
fn scattered_writes_leave_a_full_archive_the_space_to_commit_them() {
    const EXTENTS: u64 = 24_000;
    const SPARE: u64 = 5;
    // Fills the blocks of its reservation, so that none are left for leaves.
    const GROUP_BYTES: usize = 14_000;
    let (_, fs) = fresh_with(37, NAME_KEY, OPTIONS);
    let make = |name: &[u8]| fs.make_node(ROOT_INO, name, mode::REGULAR | 0o600, 0, CREATOR).unwrap().ino;
    let (ino, spare, filler) = (make(b"scattered"), make(b"spare"), make(b"filler"));
    for n in 0..EXTENTS {
        fs.write(ino, n * FRAME, &n.to_le_bytes()).unwrap();
    }
    let noise = noise(37, 1 << 20);
    (0..SPARE).for_each(|n| fs.write(spare, n << 20, &noise).unwrap());
    fs.sync().unwrap();
    let (total, used) = fs.volume.allocator().space();
    fs.volume.allocator().limit_size(total * BLOCK);
    println!("{used} of {total} blocks are used");
    let full = (0..).find_map(|n| fs.write(filler, n << 16, &noise[..1 << 16]).err());
    assert!(matches!(full, Some(Error::NoSpace(_))), "{full:?}");
    fs.unlink(ROOT_INO, b"spare").unwrap();
    fs.sync().unwrap();
    fs.sync().unwrap();
    let mut accepted = Vec::new();
    for n in (0..EXTENTS).step_by(70) {
        match fs.write(ino, n * FRAME, &noise[n as usize..][..GROUP_BYTES]) {
            Ok(()) => accepted.push(n),
            Err(Error::NoSpace(_)) => break,
            Err(error) => panic!("{error}"),
        }
    }
    println!("{} writes were accepted", accepted.len());
    fs.sync().unwrap();
    fs.unlink(ROOT_INO, b"filler").unwrap();
    fs.sync().unwrap();
    fs.write(make(b"filler"), 0, &noise).unwrap();
    fs.sync().unwrap();
    for n in accepted {
        assert!(fs.read(ino, n * FRAME, GROUP_BYTES).unwrap() == noise[n as usize..][..GROUP_BYTES]);
    }
    assert_sound(&fs);
}
