//! Exact costs of an archive in a store: requests and bytes. `bench/remote.sh` measures the rest.

use std::collections::HashSet;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use lockbox::archive::{Archive, CreateOptions, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::crypto::kdf::KdfCost;
use lockbox::exchange::{ExtractOptions, Filter, count_archive_files, export_tar, extract, resolve};
use lockbox::fs::ROOT_INO;
use lockbox::fs::{Creator, mode};
use lockbox::keys::{RollbackOptions, Secrets, UnlockLimits, UnlockedKey, unlock_with};
use lockbox::storage::Storage;
use parking_lot::{Condvar, Mutex};

use super::super::objects::{ListedObject, ObjectCreation, ObjectRange, ObjectStore};
use super::super::session::WriterSession;
use super::super::writable::BucketWriter;
use super::super::{Bucket, open, open_for_check, verify_objects};
use super::simulated::{Dice, World};
use super::writable::{NAME, published};
use super::{options, somebody, store};
use crate::RemoteOptions;
use crate::range_source::{FileVersion, RangeSource, RemoteError, RemoteResult};
use crate::remote_file::RemoteFile;

/// Of a page of file data: a head and 128 KiB.
const PAGE: u64 = 33 * 4096;
const CREATOR: Creator = Creator { uid: 1, gid: 1, umask: None };

fn passphrase() -> Passphrase {
    Passphrase::new(b"a passphrase".to_vec())
}

fn reader(world: &Arc<World>) -> Arc<dyn Storage> {
    open(world.store(9), NAME.into(), &options()).unwrap().unwrap().file().clone()
}

fn writer(world: &Arc<World>) -> Arc<dyn Storage> {
    Arc::new(BucketWriter::open(world.store(1), NAME.into(), &options(), true).unwrap())
}

/// Requests by their first word, and bytes to the store and from it, since the last call.
#[derive(Debug, Default, PartialEq)]
struct Spent {
    creations: usize,
    reads: usize,
    lists: usize,
    others: usize,
    sent: u64,
    came: u64,
}

fn spent(world: &World) -> Spent {
    world.with(|state| {
        let mut spent =
            Spent { sent: std::mem::take(&mut state.sent), came: std::mem::take(&mut state.came), ..Spent::default() };
        for line in std::mem::take(&mut state.requests) {
            match line.split(' ').nth(2) {
                Some("create") => spent.creations += 1,
                Some("get") => spent.reads += 1,
                Some("list") => spent.lists += 1,
                _ => spent.others += 1,
            }
        }
        spent
    })
}

/// A store that answers requests for some objects when so many are there together: whoever asks for
/// one after the other is not answered.
struct Together {
    objects: Box<dyn ObjectStore>,
    /// Whose answers wait, by name; a list by what the names begin with.
    which: Box<dyn Fn(&str) -> bool + Send + Sync>,
    gate: Arc<Gate>,
}

/// Opens when so many are there.
#[derive(Default)]
struct Gate {
    missing: Mutex<usize>,
    come: Condvar,
}

impl Gate {
    fn of(count: usize) -> Arc<Gate> {
        Arc::new(Gate { missing: Mutex::new(count), come: Condvar::new() })
    }

    fn close(&self, count: usize) {
        *self.missing.lock() = count;
    }
}

impl Together {
    fn these(
        objects: Box<dyn ObjectStore>,
        which: impl Fn(&str) -> bool + Send + Sync + 'static,
        gate: Arc<Gate>,
    ) -> Box<dyn ObjectStore> {
        Box::new(Together { objects, which: Box::new(which), gate })
    }

    fn wait(&self, name: &str) -> RemoteResult<()> {
        let mut missing = self.gate.missing.lock();
        if !(self.which)(name) || *missing == 0 {
            return Ok(());
        }
        *missing -= 1;
        self.gate.come.notify_all();
        let is_closed = |missing: &mut usize| *missing > 0;
        match self.gate.come.wait_while_for(&mut missing, is_closed, Duration::from_secs(20)).timed_out() {
            true => Err(RemoteError::Denied("the others did not come".into())),
            false => Ok(()),
        }
    }
}

impl ObjectStore for Together {
    fn create(&self, name: &str, bytes: &[u8]) -> RemoteResult<ObjectCreation> {
        self.objects.create(name, bytes)
    }

    fn get(&self, name: &str, part: ObjectRange) -> RemoteResult<Vec<u8>> {
        self.wait(name)?;
        self.objects.get(name, part)
    }

    fn list(&self, prefix: &str, after: &str, most: usize) -> RemoteResult<Vec<ListedObject>> {
        self.wait(prefix)?;
        self.objects.list(prefix, after, most)
    }

    fn remove(&self, name: &str) -> RemoteResult<()> {
        self.objects.remove(name)
    }
}

/// An archive in the store with one file of noise.
fn archive(world: &Arc<World>, bytes: usize) -> UnlockedKey {
    let mut bucket = Bucket::open(world.store(1), NAME.into(), &options(), true).unwrap();
    let storage = bucket.create_empty().unwrap();
    Archive::create_in(
        &storage,
        &passphrase(),
        &CreateOptions { kdf: KdfCost::FLOOR, creator: CREATOR },
        &RollbackOptions::default(),
    )
    .unwrap();
    drop(storage);
    bucket.publish().unwrap();
    let key = unlock_with(&reader(world), &Secrets::from(passphrase()), &UnlockLimits::default()).unwrap();
    let storage = writer(world);
    let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let file = fs.make_node(ROOT_INO, b"large", mode::REGULAR | 0o600, 0, CREATOR).unwrap();
    let mut dice = Dice::of(1);
    for at in (0..bytes).step_by(1 << 20) {
        fs.write(file.ino, at as u64, &dice.noise((bytes - at).min(1 << 20))).unwrap();
    }
    fs.sync().unwrap();
    archive.close().unwrap();
    drop(storage);
    spent(world);
    key
}

/// Goals: 5 requests at most and 4 round trips to open it, 4 for a page of a tree that nobody
/// knows, one for a page of a tree that is known.
#[test]
fn an_archive_in_a_store_is_opened_in_five_requests_and_a_page_costs_one() {
    let world = World::new(1, 0);
    let key = archive(&world, 64 << 20);
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let opened = |storage: &Arc<dyn Storage>| {
        let opening = spent(&world);
        let archive = Archive::open(storage, &key, &reading).unwrap();
        let ino = resolve(archive.file_system(), b"large").unwrap().ino;
        (opening, spent(&world), archive, ino)
    };
    let storage = reader(&world);
    let (.., archive, ino) = opened(&storage);
    let fs = archive.file_system();
    let mut bytes = Vec::new();
    let mut page = |at: u64| {
        bytes.clear();
        fs.read_into(ino, at, 4096, &mut bytes).unwrap();
        spent(&world)
    };
    let unknown = page(20 << 20);
    assert!(unknown.reads <= 4, "{unknown:?}");
    // 64 MiB lie in eight segments and some records: a page that ends in another one than it begins
    // in needs two requests, side by side.
    let known: Vec<usize> = [50, 3, 40, 11, 33, 58, 27].into_iter().map(|at| page(at << 20).reads).collect();
    assert!(
        known.iter().filter(|reads| **reads > 1).count() <= 2 && known.iter().all(|reads| *reads <= 3),
        "{known:?}"
    );
    // After one writer, after one with many commits, and after one that leaves more to be gathered
    // than a record has.
    for (commits, size) in [(0, 0), (70, 4096), (30, 1 << 20)] {
        let storage = writer(&world);
        let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
        let mut dice = Dice::of(7);
        for number in 0..commits {
            let ino = resolve(archive.file_system(), b"large").unwrap().ino;
            // Five MiB of eight.
            let at = if size > 4096 { number / 5 * 8 + number % 5 } else { number };
            archive.file_system().write(ino, at << 20, &dice.noise(size)).unwrap();
            archive.file_system().sync().unwrap();
        }
        archive.close().unwrap();
        drop(storage);
        spent(&world);
        // The marker beside a list, the newest record, and the object in which most of the file's
        // start lies with the rest of that record, when it is long. Then what of the tree the
        // record has not.
        let store = Together::these(world.store(9), |name| !name.contains('/'), Gate::of(2));
        let storage: Arc<dyn Storage> = open(store, NAME.into(), &options()).unwrap().unwrap().file().clone();
        let (opening, rest, ..) = opened(&storage);
        assert_eq!((opening.lists, opening.creations, opening.others), (1, 0, 0));
        assert!(opening.reads + rest.reads <= 4 && rest.reads <= 1, "{commits} commits: {opening:?}, {rest:?}");
    }
}

/// What a writer who goes brings together (the start of the archive, of which each of its records
/// has some) is asked for at once, not one after the other.
#[test]
fn who_goes_asks_for_all_of_the_start_at_once() {
    let gone = |count: usize| {
        let world = World::new(1, 0);
        let mut wanted = vec![1; 100 * 4096];
        published(&world, &wanted);
        let gate = Gate::of(0);
        let store = Together::these(world.store(1), |_| true, gate.clone());
        let storage = BucketWriter::open(store, NAME.into(), &options(), true).unwrap();
        for number in 0..20_usize {
            storage.write_at(number as u64 * 4096 * 2, &[number as u8 + 2; 4096]).unwrap();
            wanted[number * 8192..number * 8192 + 4096].fill(number as u8 + 2);
            storage.barrier().unwrap();
        }
        spent(&world);
        let mut found = vec![0; wanted.len()];
        storage.read_at(0, &mut found).unwrap();
        assert!(found == wanted);
        assert_eq!(spent(&world), Spent::default(), "what it wrote itself just now is in memory");
        // Until it writes more.
        for number in 1..3 {
            storage.write_at(number << 22, &vec![7; 4 << 20]).unwrap();
            storage.barrier().unwrap();
        }
        storage.write_at(3 << 22, &[7]).unwrap();
        storage.barrier().unwrap();
        spent(&world);
        gate.close(count);
        // What it wrote itself is read in the same way.
        let mut found = vec![0; wanted.len()];
        storage.read_at(0, &mut found).unwrap();
        assert!(found == wanted);
        let read = spent(&world);
        assert_eq!((read.reads, read.creations), (20, 0));
        drop(storage);
        let going = spent(&world);
        let storage = reader(&world);
        assert_eq!(spent(&world).reads, 3, "it was not brought together");
        let mut found = vec![0; wanted.len()];
        storage.read_at(0, &mut found).unwrap();
        assert!(found == wanted);
        going
    };
    let going = gone(0);
    // Twenty records; most of the start stays where it is.
    assert_eq!((going.creations, going.reads, going.lists, going.others), (1, 20, 0, 0));
    assert_eq!(gone(16), going);
}

/// Goal: 8 requests at most to open an archive that is one file of a server, and 5 round trips.
#[test]
fn an_archive_that_is_one_file_is_opened_with_few_requests() {
    struct Plain(Vec<u8>);
    impl RangeSource for Plain {
        fn read_start(&self, count: u64) -> RemoteResult<(FileVersion, Vec<u8>)> {
            let version = FileVersion { length: self.0.len() as u64, tag: None, modified: None };
            Ok((version, self.0[..self.0.len().min(count as usize)].to_vec()))
        }

        fn read_range(&self, _: &FileVersion, range: std::ops::Range<u64>) -> RemoteResult<Vec<u8>> {
            Ok(self.0[range.start as usize..range.end as usize].to_vec())
        }
    }
    let world = World::new(1, 0);
    let key = archive(&world, 16 << 20);
    let storage = reader(&world);
    let mut bytes = vec![0; storage.len().unwrap() as usize];
    storage.read_at(0, &mut bytes).unwrap();
    let file =
        Arc::new(RemoteFile::open_metered(Arc::new(Plain(bytes)), "https://host/a.lbx".into(), &options()).unwrap());
    assert_eq!(file.stats().reads, 1);
    let storage: Arc<dyn Storage> = file.clone();
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open(&storage, &key, &reading).unwrap();
    resolve(archive.file_system(), b"large").unwrap();
    let opened = file.stats().reads;
    // The start of the file, and what of the tree lies side by side.
    assert!(opened <= 3, "{opened}");
}

/// Goal: one request up to 4 MiB.
#[test]
fn a_sync_of_an_archive_is_one_request() {
    let world = World::new(1, 0);
    let key = archive(&world, 8 << 20);
    let storage = writer(&world);
    let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    let ino = resolve(fs, b"large").unwrap().ino;
    let mut dice = Dice::of(2);
    for size in [1, 4096, 4096, 4096, 1 << 20, 7 << 19] {
        // Whole pages, or a piece of one: of a page that is written in part the rest is read.
        let at = dice.below(((8 << 20) - size) >> 17) << 17;
        fs.write(ino, at, &dice.noise(size as usize)).unwrap();
        spent(&world);
        fs.sync().unwrap();
        let sync = spent(&world);
        assert_eq!((sync.creations, sync.reads, sync.lists, sync.others), (1, 0, 0, 0), "{size}: {sync:?}");
        assert!(sync.sent < size * 34 / 32 + (64 << 10), "{size}: {sync:?}");
    }
    fs.sync().unwrap();
    assert_eq!(spent(&world), Spent::default());
}

/// Goal: two round trips at most. A page of which pieces were written again and again is written as
/// a whole some time, and what writes begin or end within is read: by then these pieces lie in as
/// many records, and all of them are asked for together, beside what lies as it was.
#[test]
fn a_sync_that_needs_what_is_in_many_records_asks_for_all_of_it_at_once() {
    let pieces = |metrics: &[usize]| {
        let world = World::new(1, 0);
        let key = archive(&world, 8 << 20);
        let gate = Gate::of(0);
        // What lies as it was is read along with its neighbours, by whoever comes first.
        let known: HashSet<String> = world.with(|state| state.objects.keys().cloned().collect());
        let is_own = move |name: &str| !known.contains(name);
        let store = Together::these(world.store(1), is_own.clone(), gate.clone());
        let storage: Arc<dyn Storage> = Arc::new(BucketWriter::open(store, NAME.into(), &options(), true).unwrap());
        let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
        let fs = archive.file_system();
        let ino = resolve(fs, b"large").unwrap().ino;
        let mut dice = Dice::of(5);
        let mut content = Dice::of(1).noise(1 << 20);
        let mut asked = Vec::new();
        for round in 0..40 {
            // So many pieces of two pages, of which no two begin or end where one of the chunks
            // does.
            for page in [0, 3 << 17] {
                let at = page + (dice.below(31) << 12) + 1000;
                let piece = dice.noise(3000);
                content[at as usize..at as usize + piece.len()].copy_from_slice(&piece);
                fs.write(ino, at, &piece).unwrap();
            }
            spent(&world);
            gate.close(metrics.get(round).copied().unwrap_or(0));
            fs.sync().unwrap();
            gate.close(0);
            let own = |line: &&String| line.split(" get ").nth(1).is_some_and(&is_own);
            asked.push(world.with(|state| state.requests.iter().filter(own).count()));
            let sync = spent(&world);
            assert_eq!((sync.creations, sync.lists, sync.others), (1, 0, 0), "{sync:?}");
            // What others write is what is in memory of the last records.
            for _ in 0..5 {
                let page = dice.noise(1 << 20);
                fs.write(ino, (1 + dice.below(7)) << 20, &page).unwrap();
                fs.sync().unwrap();
            }
        }
        let mut found = Vec::new();
        fs.read_into(ino, 0, 1 << 20, &mut found).unwrap();
        assert!(found[..1 << 20] == content, "it has other bytes");
        asked
    };
    let asked = pieces(&[]);
    let most = asked.iter().copied().max().unwrap_or_default();
    assert!(most >= 8, "no page is written as a whole: {asked:?}");
    assert_eq!(pieces(&asked), asked);
}

/// Goal: 150 requests for a gigabyte, whose segments alone are 120.
#[test]
fn a_check_of_all_bytes_requests_each_object_once() {
    let world = World::new(1, 0);
    let key = archive(&world, 32 << 20);
    let storage = writer(&world);
    let written = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let ino = resolve(written.file_system(), b"large").unwrap().ino;
    let mut dice = Dice::of(7);
    for number in 0..20 {
        written.file_system().write(ino, number << 20, &dice.noise(300_000)).unwrap();
        written.file_system().sync().unwrap();
    }
    written.close().unwrap();
    drop(storage);
    let directory = tempfile::tempdir().unwrap();
    let checked = |cache_bytes| {
        spent(&world);
        let cache_directory = Some(directory.path().join("cache"));
        let with_cache = RemoteOptions { cache_directory, cache_bytes, ..options() };
        let (file, whole) = open_for_check(world.store(9), NAME.into(), &with_cache).unwrap().unwrap();
        let storage: Arc<dyn Storage> = Arc::new(file);
        let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
        let report = Archive::open(&storage, &key, &reading).unwrap().check(true, &mut |_| ()).unwrap();
        let compared =
            verify_objects(world.store(9), NAME.into(), &options(), Some(&whole), &mut |_, _| Ok(())).unwrap();
        (report.findings.len(), compared.unwrap(), spent(&world))
    };
    let (findings, compared, asked) = checked(None);
    assert_eq!((findings, compared.faults.len()), (0, 0));
    assert_eq!(compared.read, compared.needed.bytes);
    // To open and to compare, marker and newest record are read twice, and the start of the file.
    let objects = compared.needed.objects as usize;
    assert!(objects >= 20 && asked.reads <= objects + 8 && asked.lists <= 4, "{objects} objects: {asked:?}");
    assert!(asked.came < compared.needed.bytes * 5 / 4, "{asked:?}");
    // With space for one segment, parts of the others are requested again.
    let (findings, compared, little) = checked(Some(9 << 20));
    assert_eq!((findings, compared.faults.len()), (0, 0));
    assert!(little.reads > asked.reads, "{little:?}");
    // Without a cache on disk, memory keeps seven segments.
    assert_eq!(checked(Some(0)).2, asked);
    assert_eq!(fs::read_dir(directory.path().join("cache")).unwrap().count(), 0);
    // A byte of a segment that no page has.
    let name = world.with(|state| {
        let is_needed = |(name, bytes): &(&String, &Vec<u8>)| name.contains("/seg/") && bytes.len() > 8 << 20;
        let name = state.objects.iter().find(is_needed).unwrap().0.clone();
        *state.objects.get_mut(&name).unwrap().last_mut().unwrap() ^= 1;
        name
    });
    let (findings, compared, _) = checked(None);
    let digits = name.rsplit('/').next().unwrap();
    assert_eq!((findings, &compared.faults[..]), (0, &[format!("segment {digits} has altered content")][..]));
    world.with(|state| state.objects.remove(&name));
    let (_, compared, _) = checked(None);
    assert_eq!(compared.faults, [format!("segment {digits} is missing")]);
}

/// Creates an archive of `count` directories, each with a file of 1 MiB, and the file `large` of 1
/// byte.
fn archive_of_directories(world: &Arc<World>, count: usize) -> UnlockedKey {
    let key = archive(world, 1);
    let storage = writer(world);
    let written = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let (fs, mut dice) = (written.file_system(), Dice::of(3));
    for number in 0..count {
        let name = format!("directory{number:02}");
        let directory = fs.make_directory(ROOT_INO, name.as_bytes(), 0o700, CREATOR).unwrap();
        let file = fs.make_node(directory.ino, b"file", mode::REGULAR | 0o600, 0, CREATOR).unwrap();
        fs.write(file.ino, 0, &dice.noise(1 << 20)).unwrap();
    }
    written.close().unwrap();
    key
}

/// A store that is away is not asked for each further file, and what was extracted before remains.
#[test]
fn an_extraction_ends_when_its_store_is_away() {
    let world = World::new(1, 0);
    let key = archive_of_directories(&world, 40);
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open(&reader(&world), &key, &reading).unwrap();
    // Now its nodes are in memory.
    assert_eq!(count_archive_files(archive.file_system(), &[], &Filter::default(), &|| true).unwrap().files, 41);
    let target = tempfile::tempdir().unwrap();
    let to_target = ExtractOptions {
        to: target.path().to_path_buf(),
        name: None,
        replace: false,
        filter: Filter::default(),
        privileges: false,
    };
    let report = extract(archive.file_system(), &[], &to_target, &mut |progress| {
        world.with(|state| state.away = progress.files >= 4);
        Ok(())
    })
    .unwrap();
    let (path, error) = report.ended.expect("an error that ended it");
    assert_eq!(error.request_kind(), Some(std::io::ErrorKind::TimedOut), "{error}");
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    // What was requested ahead still arrived.
    let files = report.copied.files;
    assert!((4..36).contains(&files), "{files} files");
    let is_there = |number: &usize| target.path().join(format!("directory{number:02}/file")).exists();
    assert_eq!((0..40).filter(is_there).count() as u64, files);
    assert!(path.starts_with(format!("directory{files:02}/file").as_bytes()), "{}", String::from_utf8_lossy(&path));
}

/// A page does not count as lost because its store is away.
#[test]
fn a_check_ends_when_its_store_is_away() {
    let world = World::new(1, 0);
    let key = archive_of_directories(&world, 4);
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open(&reader(&world), &key, &reading).unwrap();
    world.with(|state| state.away = true);
    let error = archive.check(true, &mut |_| ()).unwrap_err();
    assert_eq!(error.request_kind(), Some(std::io::ErrorKind::TimedOut), "{error}");
}

/// Goal: files of directories that follow each other are under way together.
#[test]
fn files_of_many_directories_are_requested_side_by_side() {
    let world = World::new(1, 0);
    let key = archive_of_directories(&world, 16);
    let gate = Gate::of(0);
    let store = Together::these(world.store(9), |name| name.contains("/seg/"), gate.clone());
    let storage: Arc<dyn Storage> = open(store, NAME.into(), &options()).unwrap().unwrap().file().clone();
    let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
    let archive = Archive::open(&storage, &key, &reading).unwrap();
    let (fs, everything) = (archive.file_system(), Filter::default());
    // Now its nodes are in memory.
    assert_eq!(count_archive_files(fs, &[], &everything, &|| true).unwrap().files, 17);
    gate.close(4);
    let mut tar = Vec::new();
    export_tar(fs, &[], &everything, &mut tar, &mut |_| ()).unwrap();
    assert_eq!((*gate.missing.lock(), tar.len() >> 20), (0, 16));
}

/// Goal: one round trip for the pages from which small files were removed, not one for each.
#[test]
fn pages_to_repack_are_requested_side_by_side() {
    let world = World::new(1, 0);
    let key = archive(&world, 1);
    let gate = Gate::of(0);
    let mut dice = Dice::of(9);
    let open = || -> Arc<dyn Storage> {
        let store = Together::these(world.store(1), |name| name.contains("/log/"), gate.clone());
        Arc::new(BucketWriter::open(store, NAME.into(), &options(), true).unwrap())
    };
    let storage = open();
    let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    // Twenty pages of sixteen files.
    for number in 0..320 {
        let name = format!("small{number}");
        let fs = archive.file_system();
        let file = fs.make_node(ROOT_INO, name.as_bytes(), mode::REGULAR | 0o600, 0, CREATOR).unwrap();
        fs.write(file.ino, 0, &dice.noise(8192)).unwrap();
    }
    archive.close().unwrap();
    drop(storage);
    let storage = open();
    let archive = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
    let fs = archive.file_system();
    for number in [8, 72, 136, 200] {
        let file = resolve(fs, format!("small{number}").as_bytes()).unwrap();
        fs.write(file.ino, 0, &dice.noise(8192)).unwrap();
    }
    fs.sync().unwrap();
    gate.close(4);
    archive.close().unwrap();
    assert_eq!(*gate.missing.lock(), 0, "they were requested one after the other");
}

/// Goal: 12 requests at most, however many commits there were. A writer that was cut off leaves the
/// start of the file in as many records as its last commits: these are requested side by side.
#[test]
fn an_archive_is_opened_in_twelve_requests_after_thousands_of_commits() {
    for (is_closed, most) in [(true, 12), (false, 100)] {
        let world = World::new(1, 0);
        let key = archive(&world, 16 << 20);
        let storage = writer(&world);
        let written = Archive::open(&storage, &key, &OpenOptions::default()).unwrap();
        let fs = written.file_system();
        let ino = resolve(fs, b"large").unwrap().ino;
        let mut dice = Dice::of(8);
        for _ in 0..2500 {
            let at = dice.below(4000) << 12;
            fs.write(ino, at, &dice.noise(100)).unwrap();
            fs.sync().unwrap();
        }
        // Its last words are lost.
        world.with(|state| state.away = !is_closed);
        drop((written, storage));
        world.with(|state| state.away = false);
        spent(&world);
        let storage = reader(&world);
        let reading = OpenOptions { read_only: true, ..OpenOptions::default() };
        let archive = Archive::open(&storage, &key, &reading).unwrap();
        resolve(archive.file_system(), b"large").unwrap();
        let asked = spent(&world);
        assert!(asked.reads + asked.lists <= most, "closed: {is_closed}; {asked:?}");
    }
}

/// Goal: at most 1.02 times the data.
#[test]
fn what_is_written_goes_up_once_and_with_little_beside_it() {
    let world = World::new(1, 0);
    archive(&world, 1);
    let storage = writer(&world);
    let before = storage.len().unwrap();
    spent(&world);
    let mut dice = Dice::of(3);
    let data = 64 << 20;
    for at in (0..data).step_by(1 << 20) {
        storage.write_at(before + at, &dice.noise(1 << 20)).unwrap();
    }
    storage.barrier().unwrap();
    let written = spent(&world);
    assert!(written.sent * 1000 <= data * 1002, "{written:?}");
    // Segments of 8 MiB, and the record.
    assert_eq!((written.creations, written.reads, written.lists, written.others), (9, 0, 0, 0));
}

/// Goal for random overwrites, what goes up when writers go included: at most 2.2 times what was
/// written. Of what stays at least half is needed.
#[test]
fn random_overwrites_send_little_more_than_twice_what_was_written() {
    let world = World::new(1, 0);
    archive(&world, 1);
    let pages = 400;
    let storage = writer(&world);
    let mut dice = Dice::of(4);
    let page = dice.noise(PAGE as usize);
    let start = storage.len().unwrap();
    for number in 0..pages {
        storage.write_at(start + number * PAGE, &page).unwrap();
    }
    drop(storage);
    spent(&world);
    let mut written = 0;
    for _ in 0..12 {
        let storage = writer(&world);
        for _ in 0..pages / 4 {
            storage.write_at(start + dice.below(pages) * PAGE, &page).unwrap();
            written += PAGE;
        }
        storage.barrier().unwrap();
        drop(storage);
        let session = WriterSession::open(store(&world, 7), somebody(), true).unwrap();
        let needed: u64 = session.map().objects_with_sizes().map(|(_, blocks)| u64::from(blocks)).sum();
        assert!(needed <= session.map().live_blocks() * 2, "{needed} blocks for {}", session.map().live_blocks());
    }
    let sent = world.with(|state| state.sent);
    assert!(sent * 10 <= written * 22, "{sent} bytes for {written}");
}
