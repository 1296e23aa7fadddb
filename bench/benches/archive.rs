//! Benchmarks of the library: trees, cache, commits, key slots, import and extraction, without a
//! mount.
//!
//! `bench/criterion.sh` keeps a baseline and compares with it.

// A failed measurement stops.
#![allow(clippy::unwrap_used)]

use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::exchange::{self, Entries, ExtractOptions, Filter, ImportOptions};
use lockbox::fs::{Creator, FileSystem};
use lockbox::fs::{Ino, ROOT_INO};
use lockbox::keys;

const CREATOR: Creator = Creator { uid: 0, gid: 0, umask: None };
const MIB: usize = 1 << 20;

/// Temporary archive in a directory of its own, removed on drop.
struct Made {
    directory: PathBuf,
    archive: Option<Archive>,
}

impl Made {
    fn new(name: &str) -> Made {
        let directory = std::env::temp_dir().join(format!("lockbox-bench-{name}.{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        let path = directory.join("box.lbx");
        create(&path, KdfCost::TEST);
        let key = keys::unlock(&path, &passphrase()).unwrap();
        let archive = Some(Archive::open(&path, &key, &OpenOptions::default()).unwrap());
        Made { directory, archive }
    }

    fn archive(&self) -> &Archive {
        self.archive.as_ref().unwrap()
    }

    fn fs(&self) -> &FileSystem {
        self.archive().file_system()
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        drop(self.archive.take());
        let _ = fs::remove_dir_all(&self.directory);
    }
}

fn passphrase() -> Passphrase {
    Passphrase::new(b"a passphrase of the measurements".to_vec())
}

fn create(path: &Path, kdf: KdfCost) {
    Archive::create(path, &passphrase(), &CreateOptions { kdf, creator: CREATOR }).unwrap();
}

fn add(fs: &FileSystem, name: &str, content: &[u8]) -> Ino {
    let ino = fs.create_and_open(ROOT_INO, name.as_bytes(), 0o644, CREATOR).unwrap().ino;
    fs.write(ino, 0, content).unwrap();
    fs.release(ino).unwrap();
    ino
}

/// Every other byte differs from its neighbours, so that half of it compresses.
fn half(length: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    };
    (0..length).map(|at| if at / 2048 % 2 == 0 { next() } else { 0 }).collect()
}

fn trees(c: &mut Criterion) {
    const FILES: usize = 20_000;
    let made = Made::new("trees");
    let fs = made.fs();
    for number in 0..FILES {
        add(fs, &format!("f{number}"), b"");
    }
    fs.make_durable().unwrap();
    let mut group = c.benchmark_group("tree");
    let mut number = 0;
    group.bench_function(format!("look up one of {FILES} names"), |b| {
        b.iter(|| {
            number = (number + 7919) % FILES;
            fs.lookup(ROOT_INO, format!("f{number}").as_bytes()).unwrap()
        });
    });
    group.bench_function(format!("list {FILES} names with attributes"), |b| {
        b.iter(|| {
            let (mut sum, mut entries) = (0, Entries::new(fs, ROOT_INO).unwrap());
            while let Some(entry) = entries.next_entry() {
                sum += entry.unwrap().attributes.size;
            }
            sum
        });
    });
    let mut fresh = 0;
    group.bench_function("create an empty file and remove it", |b| {
        b.iter(|| {
            fresh += 1;
            let name = format!("n{fresh}");
            add(fs, &name, b"");
            fs.unlink(ROOT_INO, name.as_bytes()).unwrap();
        });
    });
    group.finish();
}

fn cache(c: &mut Criterion) {
    let made = Made::new("cache");
    let fs = made.fs();
    let ino = add(fs, "large", &half(16 * MIB));
    fs.make_durable().unwrap();
    let mut group = c.benchmark_group("cache");
    let (mut at, mut buffer) = (0, Vec::new());
    for length in [4096, 128 << 10] {
        group.throughput(Throughput::Bytes(length as u64));
        group.bench_function(format!("read {length} bytes of a file that was read before"), |b| {
            b.iter(|| {
                at = (at + 37 * 4096) % (15 * MIB as u64);
                black_box(fs.read_into(ino, at, length, &mut buffer).unwrap())
            });
        });
    }
    group.finish();
}

fn commits(c: &mut Criterion) {
    let made = Made::new("commits");
    let fs = made.fs();
    let large = add(fs, "large", &half(64 * MIB));
    fs.make_durable().unwrap();
    let block = half(4096);
    let mut group = c.benchmark_group("commit");
    group.sample_size(20);
    let mut at = 0;
    for pieces in [1, 1000] {
        group.bench_function(format!("overwrite {pieces} x 4 KiB here and there, and commit"), |b| {
            b.iter(|| {
                for _ in 0..pieces {
                    at = (at + 4099 * 4096) % (64 * MIB as u64);
                    fs.write(large, at, &block).unwrap();
                }
                fs.make_durable().unwrap();
            });
        });
    }
    let mut number = 0;
    group.bench_function("create 500 x 1 KiB and commit", |b| {
        b.iter(|| {
            for _ in 0..500 {
                number += 1;
                add(fs, &format!("f{number}"), &block[..1024]);
            }
            fs.make_durable().unwrap();
        });
    });
    group.finish();
}

fn key_slots(c: &mut Criterion) {
    let made = Made::new("slots");
    let mut group = c.benchmark_group("key slots");
    group.sample_size(10);
    for (name, kdf) in [("the least derivation of tests", KdfCost::TEST), ("64 MiB and 3 passes", KdfCost::FLOOR)] {
        let path = made.directory.join(format!("{}.lbx", kdf.memory_kib));
        create(&path, kdf);
        group.bench_function(format!("unlock, {name}"), |b| b.iter(|| keys::unlock(&path, &passphrase()).is_ok()));
    }
    group.finish();
}

fn import_and_extract(c: &mut Criterion) {
    let made = Made::new("copies");
    let sources = [made.directory.join("many"), made.directory.join("large")];
    fs::create_dir(&sources[0]).unwrap();
    for number in 0..1000 {
        fs::write(sources[0].join(format!("f{number}")), half(1024)).unwrap();
    }
    fs::write(&sources[1], half(64 * MIB)).unwrap();
    let mut group = c.benchmark_group("import and extract");
    group.sample_size(10);
    for (name, source) in [("1,000 x 1 KiB", &sources[0]), ("64 MiB", &sources[1])] {
        let options = ImportOptions {
            to: Vec::new(),
            name: None,
            follow: false,
            replace: true,
            creator: CREATOR,
            filter: Filter::default(),
            one_file_system: false,
            mirror: None,
        };
        group.bench_function(format!("import and commit {name}"), |b| {
            b.iter(|| {
                exchange::import(
                    made.archive().file_system(),
                    made.archive().identity(),
                    std::slice::from_ref(source),
                    &options,
                    &mut |_| Ok(()),
                )
                .unwrap();
                made.fs().make_durable().unwrap();
            });
        });
        let item = source.file_name().unwrap().as_encoded_bytes().to_vec();
        let to = made.directory.join("out");
        group.bench_function(format!("extract {name}"), |b| {
            let extract = || {
                let options = ExtractOptions {
                    to: to.clone(),
                    name: None,
                    replace: true,
                    filter: Filter::default(),
                    privileges: false,
                };
                exchange::extract(made.archive().file_system(), std::slice::from_ref(&item), &options, &mut |_| Ok(()))
                    .unwrap()
            };
            b.iter_batched(|| drop(fs::remove_dir_all(&to)), |()| extract(), BatchSize::PerIteration);
        });
    }
    group.finish();
}

criterion_group!(archive, trees, cache, commits, key_slots, import_and_extract);
criterion_main!(archive);
