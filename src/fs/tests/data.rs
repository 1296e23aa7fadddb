//! File content against a model: buffered, written back, truncated, reopened, removed.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::Arc;

use super::support::HAS_LOG;
use crate::crypto::SecretKey;
use crate::env::{Environment, SeededEnvironment, seeds};
use crate::error::Error;
use crate::format::values::{InodeValue, NO_TRIM};
use crate::format::{Ino, Key, kind};
use crate::frame::PageCipher;
use crate::fs::extents::FRAME;
use crate::fs::write_buffer::ContentSize;
use crate::fs::{Compression, FileSystem, FsOptions, SyncProfile, extents, inode, mode, reclaim};
use crate::storage::MemoryStorage;
use crate::txn::{OpenOptions, Volume};

const ARCHIVE: [u8; 16] = [7; 16];
pub(super) const OPTIONS: FsOptions =
    FsOptions { max_dirty_bytes: 1 << 20, sync: SyncProfile::Periodic, pack: true, compression: Compression::Default };

/// A file system in memory that can be closed, or dropped as in a crash, and opened again.
pub(super) struct Bench {
    dice: Arc<SeededEnvironment>,
    storage: Arc<MemoryStorage>,
    options: FsOptions,
    pub(super) fs: Arc<FileSystem>,
}

impl Bench {
    pub(super) fn new(seed: u64, options: FsOptions) -> Bench {
        println!("seed {seed}");
        let dice = Arc::new(SeededEnvironment::new(seed));
        let storage = Arc::new(MemoryStorage::new());
        let volume = Volume::create(storage.clone(), Bench::cipher(&dice), dice.clone(), 1).unwrap();
        volume.commit().unwrap();
        let fs = FileSystem::new(volume, dice.clone(), [3; 16], options).unwrap();
        Bench { dice, storage, options, fs }
    }

    fn cipher(dice: &Arc<SeededEnvironment>) -> PageCipher {
        PageCipher::new(&SecretKey::new([9; 32]), ARCHIVE, HAS_LOG.get(), dice.clone())
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.dice.next_u64() % bound
    }

    pub(super) fn bytes(&self, length: usize) -> Vec<u8> {
        let mut bytes = vec![self.dice.next_u64() as u8; length];
        if self.below(2) == 0 {
            self.dice.fill_random(&mut bytes).unwrap();
        }
        bytes
    }

    pub(super) fn reopen(self) -> Bench {
        let Bench { dice, storage, options, fs } = self;
        drop(fs);
        let open = OpenOptions { read_only: false, memory: 32 << 20 };
        let volume = Volume::open(storage.clone(), Bench::cipher(&dice), dice.clone(), 1, &open).unwrap();
        let fs = FileSystem::new(volume, dice.clone(), [3; 16], options).unwrap();
        Bench { dice, storage, options, fs }
    }

    /// Compares the files with the model, now and after closing and opening; after their deletion
    /// nothing is left.
    pub(super) fn ends_as(self, files: &BTreeMap<Ino, Vec<u8>>) {
        let inos: Vec<Ino> = files.keys().copied().collect();
        self.assert_holds(files);
        self.audit(&inos);
        let bench = self.reopen_closed();
        bench.assert_holds(files);
        bench.audit(&inos);
        for ino in inos {
            if !bench.unlink(ino, false) {
                bench.fs.reclaim.enqueue(ino);
            }
        }
        let bench = bench.reopen_closed();
        bench.audit(&[]);
        assert_eq!(bench.fs.volume.state().inodes(), 0);
    }

    fn assert_holds(&self, files: &BTreeMap<Ino, Vec<u8>>) {
        for (ino, model) in files {
            assert!(self.fs.read(*ino, 0, model.len() + 1).unwrap() == *model);
        }
    }

    pub(super) fn reopen_closed(self) -> Bench {
        self.fs.close().unwrap();
        self.reopen()
    }

    pub(super) fn make(&self) -> Ino {
        make(&self.fs)
    }

    pub(super) fn unlink(&self, ino: Ino, open: bool) -> bool {
        let gone = self
            .fs
            .volume
            .operate(reclaim::REMOVAL_RECORDS, true, |op| {
                let mut inode = inode::load(op.view(), ino)?;
                inode.links = 0;
                inode::store(op, ino, &inode)?;
                reclaim::remove_unlinked(op, ino, &inode, open)
            })
            .unwrap();
        if gone {
            self.fs.write_buffer.discard(ino);
        }
        gone
    }

    pub(super) fn inode(&self, ino: Ino) -> InodeValue {
        let state = self.fs.volume.state();
        inode::load(self.fs.volume.view(&state), ino).unwrap()
    }

    pub(super) fn extents(&self, ino: Ino) -> Vec<extents::MappedExtent> {
        let state = self.fs.volume.state();
        extents::find_overlapping(self.fs.volume.view(&state), ino, 0..u64::MAX, usize::MAX).unwrap()
    }

    pub(super) fn has_inline(&self, ino: Ino) -> bool {
        let state = self.fs.volume.state();
        self.fs.volume.view(&state).get(extents::inline_key(ino), |_| Ok(())).unwrap().is_some()
    }

    fn pending(&self, record: u8, ino: Ino) -> bool {
        let state = self.fs.volume.state();
        self.fs.volume.view(&state).get(Key::new(0, record, ino.0), |_| Ok(())).unwrap().is_some()
    }

    /// Counts, space map and inode sizes agree with the extents.
    pub(super) fn audit(&self, files: &[Ino]) {
        self.fs.volume.commit().unwrap();
        let findings = self.fs.volume.check_space(true, &mut |_, _| {}).unwrap();
        assert!(findings.is_empty(), "{findings:?}");
        for &ino in files {
            let inode = self.inode(ino);
            let mapped = self.extents(ino);
            assert!(mapped.windows(2).all(|pair| pair[0].end() <= pair[1].offset), "extents overlap: {mapped:?}");
            assert!(!self.has_inline(ino) || mapped.is_empty(), "inline data beside extents");
            let state = self.fs.volume.state();
            let view = self.fs.volume.view(&state);
            let inline = extents::load_inline(view, ino, &inode).unwrap().map_or(0, |value| value.len() as u64);
            let visible: u64 = mapped.iter().map(|m| m.overlap(&(0..inode.trim))).sum();
            assert_eq!(inode.bytes, inline + visible, "ino {}", ino.0);
            assert!(mapped.iter().all(|m| m.end() <= inode.size || m.offset >= inode.trim));
            assert_eq!(inode.trim != NO_TRIM, self.pending(kind::TRIM, ino));
        }
    }
}

pub(super) fn make(fs: &FileSystem) -> Ino {
    fs.volume
        .operate(1, false, |op| {
            let ino = op.allocate_ino()?;
            let inode = InodeValue { mode: mode::REGULAR | 0o644, links: 1, trim: NO_TRIM, ..Default::default() };
            inode::store(op, ino, &inode)?;
            Ok(ino)
        })
        .unwrap()
}

pub(super) fn write_model(model: &mut Vec<u8>, offset: usize, data: &[u8]) {
    if model.len() < offset + data.len() {
        model.resize(offset + data.len(), 0);
    }
    model[offset..offset + data.len()].copy_from_slice(data);
}

pub(super) fn read_model(model: &[u8], offset: usize, length: usize) -> &[u8] {
    &model[offset.min(model.len())..(offset + length).min(model.len())]
}

/// Lengths and places that meet the borders: bytes, blocks, inline size, frames.
pub(super) fn place(bench: &Bench, size: u64) -> Range<u64> {
    let unit = [1, 100, 256, 4096, FRAME][bench.below(5) as usize];
    let from = bench.below(size / unit + 1) * unit;
    let length = match bench.below(6) {
        0 => bench.below(300),
        1 => 4096,
        2 => bench.below(3 * FRAME),
        3 => FRAME,
        4 => bench.below(20_000),
        _ => bench.below(4096),
    };
    from..from + length
}

/// Names the content of all files together.
pub(super) fn digest(files: &BTreeMap<Ino, Vec<u8>>) -> u64 {
    let mut hasher = DefaultHasher::new();
    files.hash(&mut hasher);
    hasher.finish()
}

fn run_model(seed: u64, steps: u64, options: FsOptions) {
    let mut bench = Bench::new(seed, options);
    let mut files: BTreeMap<Ino, Vec<u8>> = (0..4).map(|_| (bench.make(), Vec::new())).collect();
    bench.fs.sync().unwrap();
    // Every content since the last sync: after a crash one of them must be there, whole.
    let mut moments = vec![digest(&files)];
    for step in 0..steps {
        let ino = *files.keys().nth(bench.below(files.len() as u64) as usize).unwrap();
        let size = files[&ino].len() as u64;
        match bench.below(40) {
            0..16 => {
                let range = place(&bench, size.min(5 * FRAME));
                let data = bench.bytes((range.end - range.start) as usize);
                bench.fs.write(ino, range.start, &data).unwrap();
                if !data.is_empty() {
                    write_model(files.get_mut(&ino).unwrap(), range.start as usize, &data);
                }
            }
            16..19 => {
                let data = bench.bytes(1 + bench.below(200) as usize);
                bench.fs.write(ino, size, &data).unwrap();
                write_model(files.get_mut(&ino).unwrap(), size as usize, &data);
            }
            19..32 => {
                let range = place(&bench, size);
                let length = (range.end - range.start) as usize;
                let read = bench.fs.read(ino, range.start, length).unwrap();
                assert!(read == read_model(&files[&ino], range.start as usize, length), "step {step} {range:?}");
            }
            32..35 => {
                let to = if bench.below(3) == 0 { bench.below(400) } else { place(&bench, size.min(6 * FRAME)).start };
                let inode = bench.fs.truncate(ino, to, &mut |inode| inode.uid = 7).unwrap();
                assert_eq!((inode.size, inode.uid), (to, 7));
                files.get_mut(&ino).unwrap().resize(to as usize, 0);
            }
            35..37 => {
                bench.fs.sync().unwrap();
                moments.clear();
            }
            37 if bench.below(4) == 0 => {
                if bench.below(2) == 0 {
                    bench.fs.close().unwrap();
                    moments = vec![digest(&files)];
                }
                bench = bench.reopen();
                for (ino, model) in &mut files {
                    let size = bench.fs.attributes(*ino).unwrap().size as usize;
                    *model = bench.fs.read(*ino, 0, size + 10).unwrap();
                    assert_eq!(model.len(), size);
                }
                assert!(moments.contains(&digest(&files)), "step {step}: not the content of one moment");
                moments.clear();
            }
            38 => {
                bench.fs.maintain().unwrap();
            }
            39 if bench.below(2) == 0 => bench.fs.repack_all(bench.below(2) == 0).unwrap(),
            _ => {
                let (_, content_size) = bench.fs.write_buffer.load_inode(ino).unwrap();
                assert_eq!(content_size.size, size, "step {step}");
            }
        }
        for ino in files.keys() {
            let (_, content_size) = bench.fs.write_buffer.load_inode(*ino).unwrap();
            assert_eq!(content_size, bench.fs.write_buffer.recount_size(*ino).unwrap(), "step {step}: {ino:?}");
        }
        moments.push(digest(&files));
        assert!(
            bench.fs.write_buffer.total_bytes() <= options.max_dirty_bytes + 3 * FRAME,
            "{}",
            bench.fs.write_buffer.total_bytes()
        );
    }
    bench.ends_as(&files);
}

#[test]
fn content_equals_the_model_through_writes_cuts_commits_and_reopening() {
    for seed in seeds(1..=8) {
        HAS_LOG.set(seed % 2 == 0);
        run_model(seed, 600, OPTIONS);
    }
}

#[test]
fn content_equals_the_model_when_nearly_nothing_may_be_staged() {
    run_model(11, 300, FsOptions { max_dirty_bytes: 20_000, pack: false, compression: Compression::Off, ..OPTIONS });
}

#[test]
fn an_open_after_a_sync_shows_what_was_synced_even_without_a_close() {
    let bench = Bench::new(5, OPTIONS);
    let (small, large) = (bench.make(), bench.make());
    let content = bench.bytes(300_000);
    bench.fs.write(small, 0, b"tiny").unwrap();
    bench.fs.write(large, 1000, &content).unwrap();
    bench.fs.sync().unwrap();
    let bench = bench.reopen();
    assert_eq!(bench.fs.read(small, 0, 100).unwrap(), b"tiny");
    assert!(bench.has_inline(small));
    assert_eq!(bench.fs.read(large, 1000, 400_000).unwrap(), content);
    assert_eq!(bench.fs.read(large, 0, 1000).unwrap(), vec![0; 1000]);
    bench.audit(&[small, large]);
}

#[test]
fn the_order_to_make_durable_counts_under_every_profile() {
    for sync in [SyncProfile::Never, SyncProfile::Periodic, SyncProfile::Always] {
        let bench = Bench::new(50, FsOptions { sync, ..OPTIONS });
        let ino = bench.make();
        bench.fs.write(ino, 0, b"kept").unwrap();
        assert!(bench.fs.write_buffer.total_bytes() > 0);
        bench.fs.make_durable().unwrap();
        assert_eq!(bench.fs.write_buffer.total_bytes(), 0);
        let bench = bench.reopen();
        assert_eq!(bench.fs.read(ino, 0, 100).unwrap(), b"kept", "{sync:?}");
    }
}

#[test]
fn inline_data_turns_into_extents_when_the_file_grows() {
    let bench = Bench::new(6, OPTIONS);
    let (staged, direct) = (bench.make(), bench.make());
    for ino in [staged, direct] {
        bench.fs.write(ino, 0, &[1; 100]).unwrap();
    }
    bench.fs.sync().unwrap();
    assert!(bench.has_inline(staged) && bench.has_inline(direct));
    bench.fs.write(staged, 500_000, b"far").unwrap();
    bench.fs.write(direct, FRAME, &vec![2; FRAME as usize]).unwrap();
    bench.fs.sync().unwrap();
    for ino in [staged, direct] {
        assert!(!bench.has_inline(ino));
        assert_eq!(bench.fs.read(ino, 0, 101).unwrap(), [vec![1; 100], vec![0]].concat());
    }
    bench.audit(&[staged, direct]);
}

#[test]
fn small_files_share_pages_but_not_with_another_owner() {
    let bench = Bench::new(7, OPTIONS);
    let files: Vec<Ino> = (0..30).map(|_| bench.make()).collect();
    bench.fs.truncate(files[29], 0, &mut |inode| inode.uid = 5).unwrap();
    for (index, ino) in files.iter().enumerate() {
        bench.fs.write(*ino, 0, &vec![index as u8; 1000]).unwrap();
    }
    bench.fs.sync().unwrap();
    let page = |ino: Ino| bench.extents(ino)[0].extent.page;
    assert!(files[1..29].iter().all(|ino| page(*ino) == page(files[0])));
    assert!(page(files[29]) != page(files[0]));
    for (index, ino) in files.iter().enumerate() {
        assert_eq!(bench.fs.read(*ino, 0, 2000).unwrap(), vec![index as u8; 1000]);
    }
    bench.audit(&files);
    for ino in &files[..29] {
        assert!(bench.unlink(*ino, false));
    }
    bench.audit(&files[29..]);
}

#[test]
fn a_cut_with_many_extents_hides_them_at_once_and_frees_them_in_steps() {
    let mut bench = Bench::new(8, OPTIONS);
    let ino = bench.make();
    let frames = 700;
    for frame in 0..frames {
        bench.fs.write(ino, frame * FRAME, &[frame as u8; 300]).unwrap();
    }
    bench.fs.sync().unwrap();
    assert_eq!(bench.extents(ino).len() as u64, frames);
    let inode = bench.fs.truncate(ino, 10 * FRAME + 100, &mut |_| {}).unwrap();
    assert_eq!((inode.bytes, inode.trim), (10 * 300 + 100, 10 * FRAME + 100));
    bench.fs.truncate(ino, frames * FRAME, &mut |_| {}).unwrap();
    assert_eq!(bench.fs.read(ino, 10 * FRAME, 400).unwrap(), [vec![10; 100], vec![0; 300]].concat());
    assert_eq!(bench.fs.read(ino, 500 * FRAME, 400).unwrap(), [0; 400]);
    bench.audit(&[ino]);
    bench = bench.reopen();
    // A write after the trim offset first frees the hidden extents before its end.
    bench.fs.write(ino, 20 * FRAME, &[9; 10]).unwrap();
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.read(ino, 20 * FRAME, 300).unwrap(), [vec![9; 10], vec![0; 290]].concat());
    bench.audit(&[ino]);
    while bench.fs.reclaim.step().unwrap() {}
    assert!(!bench.pending(kind::TRIM, ino));
    assert_eq!(bench.extents(ino).len(), 12);
    bench.audit(&[ino]);
}

#[test]
fn an_orphan_lives_while_it_is_open_and_goes_in_steps_afterwards() {
    let mut bench = Bench::new(9, OPTIONS);
    // The first stands for the root directory, which no orphan record takes to pieces.
    let (root, open, large) = (bench.make(), bench.make(), bench.make());
    bench.fs.open(open).unwrap();
    bench.fs.write(open, 0, &[4; 5000]).unwrap();
    for frame in 0..1300 {
        bench.fs.write(large, frame * FRAME, &[frame as u8; 300]).unwrap();
    }
    assert!(!bench.unlink(open, true));
    bench.fs.sync().unwrap();
    assert!(!bench.unlink(large, false));
    bench.fs.reclaim.enqueue(large);
    assert_eq!(bench.fs.read(open, 0, 9000).unwrap(), [4; 5000]);
    bench.fs.write(open, 5000, &[5; 10]).unwrap();
    let mut steps = 0;
    while bench.fs.reclaim.step().unwrap() {
        steps += 1;
        bench.audit(&[root, open]);
    }
    assert!(steps >= 3, "{steps}");
    assert_eq!(bench.fs.read(open, 4999, 9000).unwrap(), [[4].as_slice(), &[5; 10]].concat());
    assert_eq!(bench.fs.volume.state().inodes(), 2);
    bench.fs.sync().unwrap();
    // A crash closes every handle.
    bench = bench.reopen();
    assert!(bench.fs.reclaim.step().unwrap());
    assert_eq!(bench.fs.volume.state().inodes(), 1);
    assert!(matches!(bench.fs.open(open), Err(Error::Stale)));
    bench.audit(&[root]);
}

#[test]
fn a_full_host_refuses_writes_and_loses_nothing_accepted() {
    let bench = Bench::new(10, OPTIONS);
    bench.storage.set_capacity(Some(8 << 20));
    let ino = bench.make();
    let mut accepted = Vec::new();
    let mut refused = 0;
    for step in 0..3000 {
        let mut data = vec![0; if step % 5 == 0 { 200_000 } else { 3000 }];
        bench.dice.fill_random(&mut data).unwrap();
        match bench.fs.write(ino, accepted.len() as u64, &data) {
            Ok(()) => accepted.extend(data),
            Err(Error::NoSpace(_)) => refused += 1,
            Err(error) => panic!("{error}"),
        }
        if refused > 20 {
            break;
        }
    }
    assert!(refused > 0 && accepted.len() > 2 << 20, "{}", accepted.len());
    bench.fs.sync().unwrap();
    assert!(bench.fs.read(ino, 0, accepted.len() + 1).unwrap() == accepted);
    bench.fs.truncate(ino, 0, &mut |_| {}).unwrap();
    bench.fs.sync().unwrap();
    bench.fs.sync().unwrap();
    bench.fs.write(ino, 0, &accepted[..1 << 20]).unwrap();
    bench.audit(&[ino]);
}

#[test]
fn writes_beyond_the_greatest_size_and_to_other_objects_are_refused() {
    let bench = Bench::new(12, OPTIONS);
    let ino = bench.make();
    let last = i64::MAX as u64;
    assert!(matches!(bench.fs.write(ino, last, &[1]), Err(Error::FileTooLarge)));
    assert!(matches!(bench.fs.truncate(ino, last + 1, &mut |_| {}), Err(Error::FileTooLarge)));
    bench.fs.write(ino, last - 1, &[1]).unwrap();
    assert_eq!(bench.fs.write_buffer.load_inode(ino).unwrap().1, ContentSize { size: last, bytes: 1 });
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.read(ino, last - 2, 100).unwrap(), [0, 1]);
    bench.fs.truncate(ino, last, &mut |inode| inode.mode = mode::DIRECTORY).unwrap();
    assert!(matches!(bench.fs.write(ino, 0, &[1]), Err(Error::IsDirectory)));
    assert!(matches!(bench.fs.write(Ino(99), 0, &[1]), Err(Error::Stale)));
    assert!(bench.fs.write_buffer.files().is_empty());
}

#[test]
fn a_flush_whose_operation_is_not_published_is_made_again_and_nothing_twice() {
    let bench = Bench::new(15, OPTIONS);
    let files: Vec<Ino> = (0..6).map(|_| bench.make()).collect();
    let mut models: Vec<Vec<u8>> = Vec::new();
    for (index, ino) in files.iter().enumerate() {
        let content = bench.bytes([10, 1000, 2000, 50_000, 300_000, 3000][index]);
        bench.fs.write(*ino, 0, &content).unwrap();
        models.push(content);
    }
    for round in 0..3_u8 {
        let failed = bench.fs.volume.operate(100, true, |op| {
            bench.fs.writeback.flush(op)?;
            Err::<(), _>(Error::Stale)
        });
        assert!(matches!(failed, Err(Error::Stale)));
        // Something else is published meanwhile.
        bench.make();
        for (ino, model) in files.iter().zip(&mut models) {
            assert!(bench.fs.read(*ino, 0, 400_000).unwrap() == *model);
            bench.fs.write(*ino, 5, &[round; 20]).unwrap();
            write_model(model, 5, &[round; 20]);
        }
        bench.fs.truncate(files[4], 150_000, &mut |_| {}).unwrap();
        models[4].truncate(150_000);
        bench.fs.write(files[3], 0, &vec![round; FRAME as usize + 1]).unwrap();
        models[3] = vec![round; FRAME as usize + 1];
    }
    assert!(bench.unlink(files[5], false));
    for (ino, model) in files.iter().zip(&models).take(5) {
        assert!(bench.fs.read(*ino, 0, 400_000).unwrap() == *model);
    }
    bench.audit(&files[..5]);
    let bench = bench.reopen();
    for (ino, model) in files.iter().zip(&models).take(5) {
        assert!(bench.fs.read(*ino, 0, 400_000).unwrap() == *model);
    }
    bench.audit(&files[..5]);
}

/// The second flush has new data of both files, the first one old data of one of them.
#[test]
fn publishing_the_batches_of_one_file_keeps_the_order_of_another() {
    let bench = Bench::new(34, OPTIONS);
    let (first, second) = (bench.make(), bench.make());
    let fail = || {
        let failed = bench.fs.volume.operate(100, true, |op| {
            bench.fs.writeback.flush(op)?;
            Err::<(), _>(Error::Stale)
        });
        assert!(matches!(failed, Err(Error::Stale)));
    };
    bench.fs.write(first, 0, &[1; 50_000]).unwrap();
    fail();
    bench.fs.write(first, 0, &[2; 50_000]).unwrap();
    bench.fs.write(second, 0, &[3; 50_000]).unwrap();
    fail();
    bench.fs.truncate(second, 10, &mut |_| {}).unwrap();
    assert!(bench.fs.read(first, 0, 60_000).unwrap() == [2; 50_000]);
    bench.fs.sync().unwrap();
    bench.audit(&[first, second]);
    let bench = bench.reopen();
    assert!(bench.fs.read(first, 0, 60_000).unwrap() == [2; 50_000]);
    assert!(bench.fs.read(second, 0, 60_000).unwrap() == [3; 10]);
}

/// Never referenced: inode numbers are not reused.
#[test]
fn pages_of_files_that_were_removed_after_a_failed_flush_are_given_back() {
    let bench = Bench::new(33, OPTIONS);
    let files: Vec<Ino> = [50_000, 2000, 2000]
        .map(|length| (bench.make(), bench.bytes(length)))
        .map(|(ino, content)| {
            bench.fs.write(ino, 0, &content).unwrap();
            ino
        })
        .into();
    let failed = bench.fs.volume.operate(100, true, |op| {
        bench.fs.writeback.flush(op)?;
        Err::<(), _>(Error::Stale)
    });
    assert!(matches!(failed, Err(Error::Stale)));
    for ino in files {
        assert!(bench.unlink(ino, false));
    }
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.volume.allocator().blocks().used, bench.fs.volume.allocator().space().1);
    bench.audit(&[]);
}

#[test]
fn staged_bytes_are_cut_off_by_one_operation_even_where_the_size_that_is_published_stays() {
    let bench = Bench::new(34, OPTIONS);
    let ino = bench.make();
    bench.fs.write(ino, 0, &[1; 1000]).unwrap();
    bench.fs.sync().unwrap();
    bench.fs.write(ino, 500, &[2; 1000]).unwrap();
    let before = bench.fs.volume.state().sequence;
    bench.fs.truncate(ino, 1000, &mut |_| {}).unwrap();
    assert_eq!(bench.fs.volume.state().sequence, before + 1);
    assert_eq!(bench.fs.read(ino, 0, 3000).unwrap(), [[1; 500], [2; 500]].concat());
    bench.fs.write(ino, 1500, &[3]).unwrap();
    let cut = [&[1; 500][..], &[2; 500], &[0; 500], &[3]].concat();
    assert_eq!(bench.fs.read(ino, 0, 3000).unwrap(), cut);
    bench.ends_as(&BTreeMap::from([(ino, cut)]));
}

#[test]
fn files_that_write_out_filled_are_told_once_and_then_count_as_they_will_for_ever() {
    let bench = Bench::new(31, FsOptions { pack: false, ..OPTIONS });
    let (cut, whole, sparse) = (bench.make(), bench.make(), bench.make());
    let blocks = |ino: Ino| bench.fs.attributes(ino).unwrap().blocks;
    // Too often for pages of their own; without a hole; and with one hole that stays.
    for at in (0..40_u64).map(|piece| piece * 3000) {
        bench.fs.write(cut, at, &[1; 100]).unwrap();
    }
    bench.fs.write(whole, 0, &[2; 120_000]).unwrap();
    bench.fs.write(sparse, 0, &[3; 512]).unwrap();
    bench.fs.write(sparse, 100_000, &[3; 512]).unwrap();
    let before = [cut, whole, sparse].map(blocks);
    assert_eq!(before, [8, 235, 2]);
    assert_eq!(bench.fs.take_block_count_changes(), [], "nothing is written out");
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.take_block_count_changes(), [cut]);
    assert_eq!(bench.fs.take_block_count_changes(), []);
    let after = [cut, whole, sparse].map(blocks);
    assert_eq!(after, [(39 * 3000_u64 + 100).div_ceil(512), 235, 2]);
    let bench = bench.reopen();
    assert_eq!([cut, whole, sparse].map(|ino| bench.fs.attributes(ino).unwrap().blocks), after);
}

#[test]
fn a_file_is_told_to_be_filled_only_after_it_is() {
    let bench = Bench::new(32, FsOptions { pack: false, ..OPTIONS });
    let ino = bench.make();
    for at in (0..40_u64).map(|piece| piece * 3000) {
        bench.fs.write(ino, at, &[1; 100]).unwrap();
    }
    let failed = bench.fs.volume.operate(100, true, |op| {
        bench.fs.writeback.flush(op)?;
        assert_eq!(bench.fs.take_block_count_changes(), [], "the operation may yet fail");
        Err::<(), _>(Error::Stale)
    });
    assert!(matches!(failed, Err(Error::Stale)));
    assert_eq!(bench.fs.take_block_count_changes(), []);
    assert_eq!(bench.fs.attributes(ino).unwrap().blocks, 8);
    bench.fs.sync().unwrap();
    assert_eq!(bench.fs.take_block_count_changes(), [ino]);
    assert!(bench.fs.attributes(ino).unwrap().blocks > 200);
}

#[test]
fn small_writes_here_and_there_count_as_their_bytes_and_not_as_what_merging_them_may_take() {
    let bench =
        Bench::new(21, FsOptions { max_dirty_bytes: 1 << 20, pack: false, compression: Compression::Off, ..OPTIONS });
    let ino = bench.make();
    let frames = 100;
    let mut model = vec![1; frames * FRAME as usize];
    bench.fs.write(ino, 0, &model).unwrap();
    let file = bench.fs.write_buffer.file(ino);
    let mut staged = 0;
    for piece in 0..3_usize {
        for frame in 0..70 {
            let at = frame * FRAME as usize + piece * 40_000;
            model[at..at + 4096].fill(frame as u8);
            bench.fs.write(ino, at as u64, &model[at..at + 4096]).unwrap();
            staged += 4096;
            assert_eq!(file.active_bytes(), staged, "written out early");
            // Attributes show that there are no holes, whether dirty data is counted range by range
            // or in sum.
            assert_eq!(bench.fs.attributes(ino).unwrap().blocks, (model.len() / 512) as u64);
        }
    }
    bench.fs.sync().unwrap();
    assert!(bench.fs.read(ino, 0, model.len()).unwrap() == model);
    bench.audit(&[ino]);
}

#[test]
fn a_write_looks_for_its_inode_once_and_its_commit_once_more() {
    let bench = Bench::new(35, OPTIONS);
    let ino = bench.make();
    bench.fs.write(ino, 0, &bench.bytes(4 * FRAME as usize)).unwrap();
    bench.fs.sync().unwrap();
    let lookups = |f: &dyn Fn()| {
        let before = inode::LOOKUPS.get();
        f();
        inode::LOOKUPS.get() - before
    };
    assert_eq!(lookups(&|| bench.fs.write(ino, 8192, &[1; 4096]).unwrap()), 1);
    assert_eq!(lookups(&|| bench.fs.sync().unwrap()), 1, "in the flush");
    // A head, whole frames and a tail: before their pages are sealed, and in the operation that
    // names them.
    assert_eq!(lookups(&|| bench.fs.write(ino, FRAME - 100, &vec![2; 2 * FRAME as usize + 200]).unwrap()), 2);
    assert_eq!(lookups(&|| drop(bench.fs.read(ino, 8192, 4096).unwrap())), 1);
    bench.fs.sync().unwrap();
    bench.audit(&[ino]);
}
