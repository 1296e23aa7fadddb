//! Micro benchmarks of the layers below the archive: sealing, and the codecs that every lookup and commit passes.
//!
//! `cargo bench --package lockbox-bench` compares with the run before; `-- --save-baseline NAME` keeps one.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use lockbox::crypto::SecretKey;
use lockbox::crypto::aead::XaesKey;
use lockbox::format::node::{self, NodeHead};
use lockbox::format::values::{InodeValue, NO_TRIM};
use lockbox::format::{Key, NODE_CAPACITY, kind};

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
    let head = NodeHead { level: 0, tree: 1, lower: Key::MIN, upper: Key::MAX };
    let value = InodeValue { trim: NO_TRIM, ..InodeValue::default() }.encode();
    let count = (NODE_CAPACITY - node::NODE_HEAD) / (node::LEAF_ENTRY + value.len());
    let keys: Vec<Key> = (1..=count as u64).map(|ino| Key::new(ino, kind::INODE, 0)).collect();
    let entries = || keys.iter().map(|key| (*key, &value[..]));
    let encoded = node::encode_leaf(&head, entries());
    let mut group = c.benchmark_group("node");
    group.bench_function("encode a leaf of inodes", |b| b.iter(|| black_box(node::encode_leaf(&head, entries()))));
    group.bench_function("decode a leaf of inodes", |b| b.iter(|| node::decode(black_box(&encoded)).is_ok()));
    group.bench_function("decode an inode", |b| b.iter(|| InodeValue::decode(black_box(&value)).is_ok()));
    group.finish();
}

criterion_group!(layers, seal, nodes);
criterion_main!(layers);
