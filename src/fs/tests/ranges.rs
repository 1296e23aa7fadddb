//! Punching, zeroing, allocating, seeking and copying of ranges against a model, and their costs.

use std::collections::BTreeMap;

use super::data::{Bench, OPTIONS, digest, place, read_model, write_model};
use super::support::HAS_LOG;
use crate::env::seeds;
use crate::error::Error;
use crate::format::values::inode_flags;
use crate::format::{BLOCK, Ino};
use crate::fs::extents::{self, FRAME};
use crate::fs::reclaim::STEP;
use crate::fs::{Compression, FsOptions, SetAttributes, SetTime, inode, mode};

const HOST_FREE: u64 = 1 << 40;

type Files = BTreeMap<Ino, Vec<u8>>;

fn some_file(bench: &Bench, files: &Files) -> Ino {
    *files.keys().nth(bench.below(files.len() as u64) as usize).unwrap()
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Reported holes have no data, and data and holes alternate up to the end.
fn check_layout(bench: &Bench, ino: Ino, content: &[u8]) {
    let size = content.len() as u64;
    let mut at = 0;
    let mut data = 0;
    while at < size {
        let next = match bench.fs.next_data(ino, at) {
            Err(Error::NoSuchRange) => size,
            next => next.unwrap(),
        };
        assert!(next >= at && next <= size);
        assert!(is_zero(&content[at as usize..next as usize]), "data in the hole {at}..{next} of {size}");
        if next == size {
            break;
        }
        assert_eq!(bench.fs.next_data(ino, next).unwrap(), next);
        at = bench.fs.next_hole(ino, next).unwrap();
        assert!(at > next && at <= size && (at % BLOCK == 0 || at == size), "{next} {at} {size}");
        data += at - next;
    }
    assert!(matches!(bench.fs.next_data(ino, size), Err(Error::NoSuchRange)));
    assert!(matches!(bench.fs.next_hole(ino, size), Err(Error::NoSuchRange)));
    let blocks = bench.fs.attributes(ino).unwrap().blocks;
    assert!(blocks * 512 < data + 512 + BLOCK, "blocks={blocks} data={data} size={size}");
    assert!(blocks > 0 || is_zero(content), "a file with data has no blocks");
}

fn copy_in_model(files: &mut Files, source: Ino, from: u64, target: Ino, to: u64, length: u64) {
    let copied = read_model(&files[&source], from as usize, length as usize).to_vec();
    if !copied.is_empty() {
        write_model(files.get_mut(&target).unwrap(), to as usize, &copied);
    }
}

fn copy(bench: &Bench, files: &mut Files) {
    let (source, target) = (some_file(bench, files), some_file(bench, files));
    let size = files[&source].len() as u64;
    let range = if bench.below(3) == 0 { 0..size } else { place(bench, size) };
    let to = place(bench, (files[&target].len() as u64).min(4 * FRAME)).start;
    let mut length = range.end - range.start;
    let expected = length.min(size.saturating_sub(range.start));
    if source == target && range.start < to + expected && to < range.start + expected {
        if expected > 0 {
            let refused = bench.fs.copy_range(source, range.start, target, to, length, false);
            assert!(matches!(refused, Err(Error::Invalid(_))));
        }
        length = length.min(range.start.abs_diff(to));
    }
    let copied = bench.fs.copy_range(source, range.start, target, to, length, false).unwrap();
    assert_eq!(copied, length.min(expected));
    copy_in_model(files, source, range.start, target, to, copied);
}

fn empty(bench: &Bench, files: &mut Files, keep_size: bool, punch: bool) {
    let ino = some_file(bench, files);
    let content = files.get_mut(&ino).unwrap();
    let range = place(bench, (content.len() as u64).min(6 * FRAME));
    let length = (range.end - range.start).max(1);
    if punch {
        bench.fs.zero_range(ino, range.start, length, true, false).unwrap();
    } else {
        bench.fs.zero_range(ino, range.start, length, keep_size, false).unwrap();
    }
    if !keep_size && content.len() < (range.start + length) as usize {
        content.resize((range.start + length) as usize, 0);
    }
    let end = content.len().min((range.start + length) as usize);
    content[end.min(range.start as usize)..end].fill(0);
}

fn allocate(bench: &Bench, files: &mut Files) {
    let ino = some_file(bench, files);
    let content = files.get_mut(&ino).unwrap();
    let range = place(bench, (content.len() as u64).min(5 * FRAME));
    let (length, keep_size) = ((range.end - range.start).max(1), bench.below(2) == 0);
    bench.fs.allocate(ino, range.start, length, keep_size, false, HOST_FREE).unwrap();
    if !keep_size && content.len() < (range.start + length) as usize {
        content.resize((range.start + length) as usize, 0);
    }
}

/// Removes a file and makes another one in its place.
fn replace(bench: &Bench, files: &mut Files) {
    let ino = some_file(bench, files);
    files.remove(&ino);
    if !bench.unlink(ino, false) {
        bench.fs.reclaim.enqueue(ino);
    }
    files.insert(bench.make(), Vec::new());
}

fn reopened(bench: Bench, files: &mut Files, moments: &mut Vec<u64>, step: u64) -> Bench {
    if bench.below(2) == 0 {
        bench.fs.close().unwrap();
        *moments = vec![digest(files)];
    }
    let bench = bench.reopen();
    for (ino, model) in &mut *files {
        let size = bench.fs.attributes(*ino).unwrap().size as usize;
        *model = bench.fs.read(*ino, 0, size + 10).unwrap();
        assert_eq!(model.len(), size);
    }
    assert!(moments.contains(&digest(files)), "step {step}: not the content of one moment");
    moments.clear();
    bench
}

fn run_model(seed: u64, steps: u64, options: FsOptions) {
    let mut bench = Bench::new(seed, options);
    let mut files: Files = (0..4).map(|_| (bench.make(), Vec::new())).collect();
    bench.fs.sync().unwrap();
    // Every content since the last sync: after a crash one of them must be there, whole.
    let mut moments = vec![digest(&files)];
    for step in 0..steps {
        match bench.below(40) {
            0..12 => {
                let ino = some_file(&bench, &files);
                let range = place(&bench, (files[&ino].len() as u64).min(5 * FRAME));
                let data = bench.bytes((range.end - range.start) as usize);
                bench.fs.write(ino, range.start, &data).unwrap();
                if !data.is_empty() {
                    write_model(files.get_mut(&ino).unwrap(), range.start as usize, &data);
                }
            }
            12..15 => {
                let ino = some_file(&bench, &files);
                let to = place(&bench, (files[&ino].len() as u64).min(6 * FRAME)).start;
                bench.fs.truncate(ino, to, &mut |_| {}).unwrap();
                files.get_mut(&ino).unwrap().resize(to as usize, 0);
            }
            15..24 => copy(&bench, &mut files),
            24..27 => empty(&bench, &mut files, true, true),
            27..29 => empty(&bench, &mut files, step % 2 == 0, false),
            29 => allocate(&bench, &mut files),
            30..33 => {
                bench.fs.sync().unwrap();
                moments.clear();
            }
            33 if bench.below(2) == 0 => {
                // The set of files is not compared after a crash.
                bench.fs.sync().unwrap();
                replace(&bench, &mut files);
                bench.fs.sync().unwrap();
                moments.clear();
            }
            34 if bench.below(3) == 0 => bench = reopened(bench, &mut files, &mut moments, step),
            35 => {
                bench.fs.maintain().unwrap();
            }
            _ => {
                let ino = some_file(&bench, &files);
                let content = &files[&ino];
                assert!(bench.fs.read(ino, 0, content.len() + 1).unwrap() == *content, "step {step}");
                check_layout(&bench, ino, content);
            }
        }
        moments.push(digest(&files));
    }
    for (ino, model) in &files {
        check_layout(&bench, *ino, model);
    }
    bench.ends_as(&files);
}

#[test]
fn content_equals_the_model_through_changes_of_ranges_commits_and_crashes() {
    for seed in seeds(1..=5) {
        HAS_LOG.set(seed % 2 == 0);
        run_model(seed, 500, OPTIONS);
    }
}

#[test]
fn content_equals_the_model_when_nearly_nothing_may_be_staged() {
    for seed in seeds(21..=23) {
        run_model(
            seed,
            300,
            FsOptions { max_dirty_bytes: 20_000, pack: false, compression: Compression::Off, ..OPTIONS },
        );
    }
}

/// `count` frames that compression cannot shorten.
fn large(bench: &Bench, count: u64) -> (Ino, Vec<u8>) {
    let ino = bench.make();
    let mut content = vec![0; (count * FRAME) as usize];
    bench.fs.environment.fill_random(&mut content).unwrap();
    bench.fs.write(ino, 0, &content).unwrap();
    bench.fs.sync().unwrap();
    (ino, content)
}

#[test]
fn a_copy_shares_pages_and_survives_what_happens_to_its_source() {
    let bench = Bench::new(31, OPTIONS);
    let (source, mut content) = large(&bench, 64);
    let copy = bench.make();
    // Later records follow those of the copy, as in any archive that is in use.
    bench.make();
    let used = bench.fs.volume.allocator().space().1;
    assert_eq!(bench.fs.copy_range(source, 0, copy, 0, u64::MAX, false).unwrap(), 64 * FRAME);
    bench.audit(&[source, copy]);
    let pages = |ino: Ino| bench.extents(ino).iter().map(|m| m.extent.page).collect::<Vec<_>>();
    assert_eq!(pages(source), pages(copy));
    assert!(bench.fs.volume.allocator().space().1 < used + 16, "data was copied");
    assert_eq!(bench.fs.attributes(copy).unwrap().blocks, 64 * FRAME / 512);

    bench.fs.zero_range(source, 10, 5 * FRAME, true, false).unwrap();
    bench.fs.write(source, 9 * FRAME + 1, &[7; 5000]).unwrap();
    bench.fs.truncate(source, 40 * FRAME + 3, &mut |_| {}).unwrap();
    bench.audit(&[source, copy]);
    assert!(bench.fs.read(copy, 0, content.len() + 1).unwrap() == content);
    assert!(bench.unlink(source, false));
    bench.audit(&[copy]);
    assert!(bench.fs.read(copy, 0, content.len() + 1).unwrap() == content);
    // Punching the copy frees the pages that only the copy references.
    bench.fs.zero_range(copy, 0, 63 * FRAME, true, false).unwrap();
    content[..63 * FRAME as usize].fill(0);
    let bench = bench.reopen_closed();
    assert!(bench.fs.read(copy, 0, content.len() + 1).unwrap() == content);
    assert!(bench.fs.volume.allocator().space().1 < 100, "{:?}", bench.fs.volume.allocator().space());
    bench.audit(&[copy]);
}

#[test]
fn a_large_copy_writes_little_because_nodes_are_filled() {
    let bench = Bench::new(32, OPTIONS);
    let source = bench.make();
    // A small page for every frame: 8192 extents, as a file of one gigabyte has.
    for number in 0..8192 {
        bench.fs.write(source, number * FRAME, &vec![number as u8; FRAME as usize]).unwrap();
    }
    let copy = bench.make();
    for _ in 0..50 {
        bench.make();
    }
    bench.fs.sync().unwrap();
    let used = bench.fs.volume.allocator().space().1;
    let mut done = 0;
    while done < 8192 * FRAME {
        done += bench.fs.copy_range(source, done, copy, done, u64::MAX, false).unwrap();
    }
    bench.fs.sync().unwrap();
    let nodes = (bench.fs.volume.allocator().space().1 - used) * BLOCK;
    // 8192 extents of 73 bytes are 598,016 bytes.
    assert!(nodes < 700 << 10, "bytes of nodes: {nodes}");
    bench.audit(&[source, copy]);
}

#[test]
fn small_inline_and_packed_data_is_copied_not_shared() {
    let bench = Bench::new(33, OPTIONS);
    let (inline, packed, other, target) = (bench.make(), bench.make(), bench.make(), bench.make());
    bench.fs.write(inline, 0, b"tiny").unwrap();
    bench.fs.write(packed, 0, &[1; 3000]).unwrap();
    bench.fs.write(other, 0, &[2; 3000]).unwrap();
    bench.fs.sync().unwrap();
    assert!(bench.has_inline(inline));
    assert_eq!(bench.extents(packed)[0].extent.page, bench.extents(other)[0].extent.page);
    assert_eq!(bench.fs.copy_range(inline, 0, target, 0, 100, false).unwrap(), 4);
    assert_eq!(bench.fs.copy_range(packed, 0, target, 10, 5000, false).unwrap(), 3000);
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.read(target, 0, 12).unwrap(), b"tiny\0\0\0\0\0\0\x01\x01");
    let packed_page = bench.extents(packed)[0].extent.page;
    assert!(bench.extents(target).iter().all(|mapped| mapped.extent.page != packed_page));
    bench.audit(&[inline, packed, other, target]);
}

#[test]
fn what_must_not_be_compressed_takes_no_compressed_page() {
    let bench = Bench::new(34, OPTIONS);
    let (source, _) = large(&bench, 2);
    let target = bench.make();
    bench.fs.truncate(target, 0, &mut |inode| inode.flags |= inode_flags::NO_COMPRESS).unwrap();
    assert_eq!(bench.fs.copy_range(source, 0, target, 0, u64::MAX, false).unwrap(), 2 * FRAME);
    bench.fs.sync().unwrap();
    assert_ne!(bench.extents(source)[0].extent.page, bench.extents(target)[0].extent.page);
    let all = |ino: Ino| bench.fs.read(ino, 0, 2 * FRAME as usize).unwrap();
    assert!(all(source) == all(target));
}

#[test]
fn a_huge_sparse_file_costs_what_its_extents_cost() {
    let bench = Bench::new(35, OPTIONS);
    let (ino, copy) = (bench.make(), bench.make());
    let far = (1 << 62) + 12_345;
    bench.fs.write(ino, 5, b"near").unwrap();
    bench.fs.write(ino, far, b"far").unwrap();
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.next_hole(ino, 0).unwrap(), BLOCK);
    assert_eq!(bench.fs.next_data(ino, BLOCK).unwrap(), far / BLOCK * BLOCK);
    assert_eq!(bench.fs.copy_range(ino, 0, copy, 0, u64::MAX, false).unwrap(), far + 3);
    assert_eq!(bench.fs.read(copy, far, 10).unwrap(), b"far");
    bench.fs.zero_range(ino, 0, far, true, false).unwrap();
    assert_eq!(bench.fs.next_data(ino, 0).unwrap(), far / BLOCK * BLOCK);
    assert_eq!(bench.fs.attributes(ino).unwrap().blocks, 1);
    let last = i64::MAX as u64;
    bench.fs.zero_range(ino, 0, last, false, false).unwrap();
    assert!(matches!(bench.fs.next_data(ino, 0), Err(Error::NoSuchRange)));
    let attributes = bench.fs.attributes(ino).unwrap();
    assert_eq!((attributes.size, attributes.blocks), (last, 0));
    bench.audit(&[ino, copy]);
}

/// Writers wait for the operation, and the file may have millions of extents on a slow host.
#[test]
fn a_truncation_counts_the_extents_of_a_large_file_before_its_operation() {
    let bench = Bench::new(37, OPTIONS);
    let ino = bench.make();
    for number in 0..10 * STEP {
        bench.fs.write(ino, number * FRAME, &[1; 300]).unwrap();
    }
    bench.fs.sync().unwrap();
    // The extents after the new end are fewer, then the ones before it.
    for left in [7 * STEP, 2 * STEP] {
        let mut visits = 0;
        let inode = bench.fs.truncate(ino, left * FRAME + 100, &mut |_| visits = extents::VISITS.get().1).unwrap();
        assert_eq!((inode.bytes, inode.trim), (left * 300 + 100, left * FRAME + 100));
        assert!((1..=2 * STEP).contains(&visits), "{visits} extents were visited in the operation");
        bench.audit(&[ino]);
    }
}

#[test]
fn more_extents_than_a_step_are_punched_whole() {
    let bench = Bench::new(36, OPTIONS);
    let ino = bench.make();
    for number in 0..1200_u64 {
        bench.fs.write(ino, number * 2 * FRAME, &[1; 4096]).unwrap();
    }
    bench.fs.sync().unwrap();
    bench.fs.zero_range(ino, 100, 1199 * 2 * FRAME, true, false).unwrap();
    assert_eq!(bench.extents(ino).len(), 2);
    assert_eq!(bench.fs.read(ino, 99, 2).unwrap(), [1, 0]);
    assert_eq!(bench.fs.read(ino, 1199 * 2 * FRAME + 99, 2).unwrap(), [0, 1]);
    bench.audit(&[ino]);
}

#[test]
fn staged_bytes_over_extents_are_counted_once() {
    let bench = Bench::new(37, OPTIONS);
    let ino = bench.make();
    let content = bench.bytes(3 * 4096);
    bench.fs.write(ino, 1 << 30, &content).unwrap();
    assert_eq!(bench.fs.attributes(ino).unwrap().blocks, 24);
    bench.fs.sync().unwrap();
    bench.fs.write(ino, (1 << 30) + 4096, &content).unwrap();
    assert_eq!(bench.fs.attributes(ino).unwrap().blocks, 32);
    bench.fs.write(ino, 0, b"x").unwrap();
    assert_eq!(bench.fs.attributes(ino).unwrap().blocks, 33);
}

#[test]
fn set_id_bits_go_times_stay_and_errors_change_nothing() {
    let bench = Bench::new(38, OPTIONS);
    let (ino, other) = (bench.make(), bench.make());
    bench.fs.write(other, 0, &[1; 50_000]).unwrap();
    let long_ago = SetAttributes {
        mode: Some(0o4755),
        mtime: Some(SetTime::To(Default::default())),
        ctime: Some(SetTime::To(Default::default())),
        ..SetAttributes::default()
    };
    let changes: [&dyn Fn(bool) -> crate::error::Result<()>; 4] = [
        &|kill| bench.fs.zero_range(ino, 0, 1, true, kill),
        &|kill| bench.fs.zero_range(ino, 0, 1, true, kill),
        &|kill| bench.fs.allocate(ino, 0, 1, true, kill, HOST_FREE),
        &|kill| bench.fs.copy_range(other, 0, ino, 0, 10, kill).map(drop),
    ];
    for (index, change) in changes.iter().enumerate() {
        for kill in [false, true] {
            bench.fs.set_attributes(ino, &long_ago).unwrap();
            change(kill).unwrap();
            let is = bench.fs.attributes(ino).unwrap();
            assert_eq!((is.mtime, is.ctime), Default::default(), "change {index}");
            assert_eq!(is.mode & mode::PERMISSIONS, if kill { 0o755 } else { 0o4755 }, "change {index}");
        }
    }
    let last = i64::MAX as u64;
    let before = bench.fs.attributes(ino).unwrap();
    assert!(matches!(bench.fs.zero_range(ino, 0, 0, true, false), Err(Error::Invalid(_))));
    assert!(matches!(bench.fs.zero_range(ino, last, 1, true, false), Err(Error::FileTooLarge)));
    assert!(matches!(bench.fs.zero_range(ino, u64::MAX, 1, false, false), Err(Error::FileTooLarge)));
    assert!(matches!(bench.fs.allocate(ino, 0, last, false, false, 1 << 30), Err(Error::NoSpace(_))));
    assert!(matches!(bench.fs.copy_range(other, 0, ino, last, 1, false), Err(Error::FileTooLarge)));
    assert_eq!(bench.fs.copy_range(other, 50_000, ino, 0, 1, false).unwrap(), 0);
    assert_eq!(bench.fs.attributes(ino).unwrap(), before);
    let directory = bench.make();
    bench
        .fs
        .volume
        .operate(1, false, |op| {
            let mut value = inode::load(op.view(), directory)?;
            value.mode = mode::DIRECTORY | 0o755;
            inode::store(op, directory, &value)
        })
        .unwrap();
    assert!(matches!(bench.fs.zero_range(directory, 0, 1, true, false), Err(Error::IsDirectory)));
    assert!(matches!(bench.fs.next_data(directory, 0), Err(Error::IsDirectory)));
    assert!(matches!(bench.fs.copy_range(directory, 0, ino, 0, 1, false), Err(Error::IsDirectory)));
    assert!(matches!(bench.fs.copy_range(ino, 0, directory, 0, 1, false), Err(Error::IsDirectory)));
}
