//! Micro benchmarks of the layers below the archive: sealing, and the codecs that every lookup and
//! commit passes.
//!
//! `cargo bench --package lockbox-bench` compares with the run before; `-- --save-baseline NAME`
//! keeps one.

// A failed measurement stops.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockbox::codecs::{data_head_length, leaf_workloads};
use lockbox::crypto::SecretKey;
use lockbox::crypto::aead::XaesKey;

fn seal(c: &mut Criterion) {
    let key = XaesKey::new(&SecretKey::new([7; 32]));
    let mut group = c.benchmark_group("seal");
    group.bench_function("derive a page key", |b| b.iter(|| drop(black_box(key.page_key(black_box(&[1; 24]))))));
    for size in [4096, 128 * 1024] {
        let mut data = vec![5; size];
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(format!("{size} bytes"), |b| {
            b.iter(|| key.page_key(&[1; 24]).seal_body(b"place", black_box(&mut data)));
        });
    }
    group.finish();
}

fn nodes(c: &mut Criterion) {
    let mut group = c.benchmark_group("node");
    for (name, run) in leaf_workloads() {
        group.bench_function(name, |b| b.iter(&run));
    }
    group.finish();
}

/// Trade-off of the chunk size: space, and the cost of a small and a long read. See
/// bench/README.md.
fn chunks(c: &mut Criterion) {
    let key = XaesKey::new(&SecretKey::new([7; 32]));
    let mut group = c.benchmark_group("chunks");
    for (name, level, data) in [("text", 1, text()), ("half", -3, half()), ("noise", 1, noise(8 * PAGE))] {
        for log2 in [12, 13, 14, 15, 16, 17] {
            let size = 1 << log2;
            let mut blocks = 0;
            let mut sealed = Vec::new();
            for page in data.chunks_exact(PAGE) {
                let stored: Vec<Vec<u8>> = page.chunks(size).map(|chunk| stored(chunk, level)).collect();
                let length: usize = stored.iter().map(Vec::len).sum();
                blocks += (104 + data_head_length(stored.len(), 0) + length).div_ceil(4096);
                sealed = stored;
            }
            let plain = data.len() / PAGE * PAGE;
            println!("chunks of {size} bytes, {name}: {:.3} of the plain size", blocks as f64 * 4096.0 / plain as f64);
            // Opening costs what sealing does: both pass over the bytes once.
            let seal = |index: usize, chunk: &mut [u8], out: &mut [u8]| {
                key.page_key(&[1; 24]).seal_chunk(index, &[0; 92], chunk);
                if chunk.len() < size {
                    zstd::bulk::decompress_to_buffer(&sealed[index], out).unwrap();
                }
            };
            let mut work = sealed.clone();
            let mut out = vec![0; size];
            group.throughput(Throughput::Bytes(4096));
            group.bench_function(format!("{name}, 4 KiB out of a chunk of {size}"), |b| {
                b.iter(|| seal(0, black_box(&mut work[0]), &mut out));
            });
            group.throughput(Throughput::Bytes(PAGE as u64));
            group.bench_function(format!("{name}, a page in chunks of {size}"), |b| {
                b.iter(|| work.iter_mut().enumerate().for_each(|(index, chunk)| seal(index, chunk, &mut out)));
            });
        }
    }
    group.finish();
}

const PAGE: usize = 128 * 1024;

/// Compresses a chunk as the writer does: raw unless a sixteenth is saved.
fn stored(chunk: &[u8], level: i32) -> Vec<u8> {
    let smaller = zstd::bulk::compress(chunk, level).unwrap();
    if smaller.len() <= chunk.len() - chunk.len() / 16 { smaller } else { chunk.to_vec() }
}

/// The sources of lockbox, one after the other.
fn text() -> Vec<u8> {
    let mut out = Vec::new();
    let mut folders = vec![concat!(env!("CARGO_MANIFEST_DIR"), "/../src").into()];
    while let Some(folder) = folders.pop() {
        let mut paths: Vec<std::path::PathBuf> =
            std::fs::read_dir::<std::path::PathBuf>(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if path.is_dir() {
                folders.push(path);
            } else {
                out.extend(std::fs::read(path).unwrap());
            }
        }
    }
    out.truncate(out.len() / PAGE * PAGE);
    out
}

/// In every 4 KiB half noise, half zeros.
fn half() -> Vec<u8> {
    let mut out = noise(8 * PAGE);
    out.chunks_mut(4096).for_each(|block| block[2048..].fill(0));
    out
}

fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    (0..length).map(|_| next()).collect()
}

criterion_group!(layers, seal, nodes, chunks);
criterion_main!(layers);
