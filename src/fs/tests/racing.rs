//! File content while threads concurrently read, write, truncate and commit it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::data::{Bench, OPTIONS, make, read_model, write_model};
use crate::env::SeededEnvironment;
use crate::format::Ino;
use crate::fs::writeback::COMMIT_WAIT_BYTES;
use crate::fs::{Compression, FsOptions};

/// A block with its version in every word.
fn block(version: u64) -> Vec<u8> {
    version.to_le_bytes().repeat(512)
}

#[test]
fn readers_see_whole_blocks_that_never_go_back_in_time() {
    const BLOCKS: u64 = 64;
    let bench = Bench::new(13, FsOptions { max_dirty_bytes: 100_000, ..OPTIONS });
    let ino = bench.make();
    let fs = &bench.fs;
    fs.write(ino, 0, &block(1).repeat(BLOCKS as usize)).unwrap();
    let acknowledged: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(1)).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (acknowledged, stop) = (&acknowledged, &stop);
            scope.spawn(move || {
                let dice = SeededEnvironment::new(100 + reader);
                while !stop.load(Ordering::Relaxed) {
                    let at = dice.next_u64() % BLOCKS;
                    let count = 1 + dice.next_u64() % (BLOCKS - at).min(8);
                    let least: Vec<u64> =
                        (at..at + count).map(|b| acknowledged[b as usize].load(Ordering::Acquire)).collect();
                    let found = fs.read(ino, at * 4096, (count * 4096) as usize).unwrap();
                    assert_eq!(found.len() as u64, count * 4096);
                    for (index, found) in found.chunks(4096).enumerate() {
                        let version = u64::from_le_bytes(found[..8].try_into().unwrap());
                        assert!(found == block(version), "torn block");
                        assert!(
                            version >= least[index],
                            "block {} shows {version} after {}",
                            at + index as u64,
                            least[index]
                        );
                    }
                }
            });
        }
        let committer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                fs.sync().unwrap();
            }
        });
        let writer = scope.spawn(|| {
            let dice = SeededEnvironment::new(99);
            for version in 2..1500 {
                if version % 50 == 0 {
                    let from = if dice.next_u64().is_multiple_of(2) { 0 } else { 32 };
                    fs.write(ino, from * 4096, &block(version).repeat(32)).unwrap();
                    (from..from + 32).for_each(|b| acknowledged[b as usize].store(version, Ordering::Release));
                } else {
                    let at = dice.next_u64() % BLOCKS;
                    fs.write(ino, at * 4096, &block(version)).unwrap();
                    acknowledged[at as usize].store(version, Ordering::Release);
                }
            }
        });
        // The flag is set before a failure of the writer is passed on, or the scope would wait forever.
        let written = writer.join();
        stop.store(true, Ordering::Relaxed);
        committer.join().unwrap();
        written.unwrap();
    });
    bench.audit(&[ino]);
}

#[test]
fn threads_that_write_cut_and_commit_leave_each_file_as_its_owner_made_it() {
    let bench = Bench::new(14, FsOptions { max_dirty_bytes: 200_000, ..OPTIONS });
    let fs = &bench.fs;
    let stop = AtomicBool::new(false);
    let done: Vec<(Ino, Vec<u8>)> = std::thread::scope(|scope| {
        let committer = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                fs.writeback.seal_ahead(fs.volume.durable().generation).unwrap();
                fs.sync().unwrap();
                fs.maintain().unwrap();
            }
        });
        let owners: Vec<_> = (0..3_u64)
            .map(|owner| {
                scope.spawn(move || {
                    let dice = SeededEnvironment::new(200 + owner);
                    let files: Vec<Ino> = (0..3).map(|_| make(fs)).collect();
                    let mut models = vec![Vec::new(); files.len()];
                    for step in 0..400_u64 {
                        let index = (dice.next_u64() % 3) as usize;
                        let (ino, model): (Ino, &mut Vec<u8>) = (files[index], &mut models[index]);
                        let offset = (dice.next_u64() % 400_000) as usize % (model.len() + 5000);
                        if dice.next_u64().is_multiple_of(8) {
                            fs.truncate(ino, offset as u64, &mut |_| {}).unwrap();
                            model.resize(offset, 0);
                        } else {
                            let longest = if step % 20 == 0 { 300_000 } else { 9000 };
                            let data = vec![step as u8; 1 + (dice.next_u64() % longest) as usize];
                            fs.write(ino, offset as u64, &data).unwrap();
                            write_model(model, offset, &data);
                        }
                        let length = 20_000;
                        let from = (dice.next_u64() % (model.len() as u64 + 1)) as usize;
                        let found = fs.read(ino, from as u64, length).unwrap();
                        assert!(found == read_model(model, from, length), "owner {owner} step {step}");
                    }
                    files.into_iter().zip(models).collect::<Vec<_>>()
                })
            })
            .collect();
        // Stopped before a failure of an owner is passed on, or the scope would wait for ever.
        let joined: Vec<_> = owners.into_iter().map(|owner| owner.join()).collect();
        stop.store(true, Ordering::Relaxed);
        committer.join().unwrap();
        joined.into_iter().flat_map(|files| files.unwrap()).collect()
    });
    bench.fs.sync().unwrap();
    let bench = bench.reopen();
    for (ino, model) in &done {
        assert!(bench.fs.read(*ino, 0, model.len() + 1).unwrap() == *model);
    }
    bench.audit(&done.iter().map(|(ino, _)| *ino).collect::<Vec<_>>());
}

/// A flush holds the writers' lock: it seals a bounded amount, despite much dirty data and
/// concurrent writers.
#[test]
fn a_flush_seals_a_bounded_part_of_what_is_staged() {
    const PIECE: u64 = 8000;
    const WRITERS: u64 = 3;
    let bench = Bench::new(31, FsOptions { max_dirty_bytes: 16 << 20, compression: Compression::Off, ..OPTIONS });
    let fs = &bench.fs;
    let stop = AtomicBool::new(false);
    let begun = std::time::Instant::now();
    // Longer than any machine takes: the test fails if the writers buffer too little, since its
    // bound would prove nothing then.
    let late = || begun.elapsed().as_secs() >= 300;
    std::thread::scope(|scope| {
        for number in 0..WRITERS {
            let (ino, stop) = (bench.make(), &stop);
            scope.spawn(move || {
                let data = vec![number as u8; PIECE as usize];
                let mut at = 0;
                while !stop.load(Ordering::Relaxed) && !late() {
                    fs.write(ino, at % (64 << 20), &data).unwrap();
                    at += 20_011;
                }
            });
        }
        for _ in 0..6 {
            // Much more than a flush may seal.
            while fs.write_buffer.total_bytes() < 10 << 20 && !late() {
                std::thread::yield_now();
            }
            fs.sync().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(!late(), "the writers did not stage enough");
    let most = fs.write_buffer.max_flushed();
    assert!(most > 0 && most <= COMMIT_WAIT_BYTES + WRITERS * PIECE, "{most} bytes were sealed under the lock");
}
