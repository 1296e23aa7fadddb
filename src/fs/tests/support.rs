//! File systems in memory, replayable by a seed.

use std::cell::Cell;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::archive::tests::sample::header_bytes;
use crate::crypto::SecretKey;
use crate::env::{Environment, SeededEnvironment};
use crate::error::Result;
use crate::format::Ino;
use crate::frame::PageCipher;
use crate::fs::{Attributes, Compression, Creator, FileSystem, FsOptions, NewFile, SyncProfile};
use crate::storage::simulated::SimulatedStorage;
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{OpenOptions, Volume};

pub(super) const OPTIONS: FsOptions =
    FsOptions { max_dirty_bytes: 8 << 20, sync: SyncProfile::Periodic, pack: true, compression: Compression::Default };
pub(super) const NAME_KEY: [u8; 16] = [3; 16];
pub(super) const CREATOR: Creator = Creator { uid: 1000, gid: 100, umask: None };
pub(super) const KEY: [u8; 32] = [9; 32];
const ARCHIVE: [u8; 16] = [7; 16];
const MEMORY: u64 = 32 << 20;

thread_local! {
    /// The archives of this thread have a log. Without one an fsync is a commit, which most of
    /// these tests examine.
    pub(in crate::fs) static HAS_LOG: Cell<bool> = const { Cell::new(false) };
    /// Whether their storage makes each barrier a whole (STORAGE-4).
    pub(in crate::fs) static ORDERED: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn cipher(environment: Arc<dyn Environment>) -> PageCipher {
    PageCipher::new(&SecretKey::new(KEY), ARCHIVE, HAS_LOG.get(), environment)
}

/// A new file system with nothing but its root directory.
pub(in crate::fs) fn fresh(seed: u64) -> (Arc<MemoryStorage>, Arc<FileSystem>) {
    fresh_with(seed, NAME_KEY, OPTIONS)
}

pub(super) fn fresh_with(seed: u64, name_key: [u8; 16], options: FsOptions) -> (Arc<MemoryStorage>, Arc<FileSystem>) {
    println!("seed {seed}");
    let storage = Arc::new(MemoryStorage::new());
    let environment: Arc<dyn Environment> = Arc::new(SeededEnvironment::new(seed));
    let volume = Volume::create(storage.clone(), cipher(environment.clone()), environment.clone(), 1).unwrap();
    let fs = FileSystem::new(volume, environment, name_key, options).unwrap();
    fs.format(CREATOR).unwrap();
    (storage, fs)
}

/// A storage with the header of an archive, as a backup asks for, and nothing else.
pub(super) fn header_alone() -> Arc<SimulatedStorage> {
    let storage = SimulatedStorage::from_contents(&header_bytes());
    if ORDERED.get() {
        storage.make_barriers_atomic();
    }
    storage
}

/// A new file system on a storage of the test's, durable as it is.
pub(super) fn create_with(
    storage: Arc<dyn Storage>,
    environment: Arc<dyn Environment>,
    options: FsOptions,
) -> Arc<FileSystem> {
    try_create_with(storage, environment, options).unwrap()
}

pub(super) fn try_create_with(
    storage: Arc<dyn Storage>,
    environment: Arc<dyn Environment>,
    options: FsOptions,
) -> Result<Arc<FileSystem>> {
    let volume = Volume::create(storage, cipher(environment.clone()), environment.clone(), 1)?;
    let fs = FileSystem::new(volume, environment, NAME_KEY, options)?;
    fs.format(CREATOR)?;
    fs.sync()?;
    Ok(fs)
}

/// Opens the archive after a crash.
pub(super) fn try_open_on(storage: Arc<dyn Storage>, environment: Arc<dyn Environment>) -> Result<Arc<FileSystem>> {
    try_open_with(storage, environment, MEMORY)
}

/// Opens like [`try_open_on`], and must succeed.
pub(super) fn open_on(storage: Arc<dyn Storage>, environment: Arc<dyn Environment>) -> Arc<FileSystem> {
    try_open_on(storage, environment).unwrap()
}

/// With a cap of memory of the test's.
pub(super) fn open_within(
    memory: u64,
    storage: Arc<dyn Storage>,
    environment: Arc<dyn Environment>,
) -> Arc<FileSystem> {
    try_open_with(storage, environment, memory).unwrap()
}

pub(super) fn try_open_with(
    storage: Arc<dyn Storage>,
    environment: Arc<dyn Environment>,
    memory: u64,
) -> Result<Arc<FileSystem>> {
    open_as(&OpenOptions { read_only: false, memory }, storage, environment)
}

pub(super) fn open_to_read(storage: Arc<dyn Storage>, environment: Arc<dyn Environment>) -> Result<Arc<FileSystem>> {
    open_as(&OpenOptions { read_only: true, memory: MEMORY }, storage, environment)
}

fn open_as(
    options: &OpenOptions,
    storage: Arc<dyn Storage>,
    environment: Arc<dyn Environment>,
) -> Result<Arc<FileSystem>> {
    let volume = Volume::open(storage, cipher(environment.clone()), environment.clone(), 1, options)?;
    FileSystem::new(volume, environment, NAME_KEY, OPTIONS)
}

/// Closes and opens again.
pub(super) fn reopen(storage: &Arc<MemoryStorage>, fs: Arc<FileSystem>) -> Arc<FileSystem> {
    fs.close().unwrap();
    open_again(storage, fs)
}

/// Reopens the durable version, without a close.
pub(super) fn crash(storage: &Arc<MemoryStorage>, fs: Arc<FileSystem>) -> Arc<FileSystem> {
    open_again(storage, fs)
}

fn open_again(storage: &Arc<MemoryStorage>, fs: Arc<FileSystem>) -> Arc<FileSystem> {
    let (environment, name_key, options) = (fs.environment.clone(), fs.name_key, fs.options);
    drop(fs);
    let open = OpenOptions { read_only: false, memory: MEMORY };
    let volume = Volume::open(storage.clone(), cipher(environment.clone()), environment.clone(), 1, &open).unwrap();
    FileSystem::new(volume, environment, name_key, options).unwrap()
}

impl FileSystem {
    /// Repacks all noted pages; with `search` also finds others.
    pub(crate) fn repack_all(&self, search: bool) -> Result<()> {
        self.repack.run_all(search.then_some(&self.shutdown_gate))
    }
}

/// The live tree and the space it takes are sound.
pub(super) fn assert_sound(fs: &FileSystem) {
    let findings = fs.check_structure(true).unwrap();
    assert!(findings.is_empty(), "{findings:#?}");
}

pub(super) fn add_files(fs: &FileSystem, files: &[NewFile<'_>]) -> Result<Vec<Result<Ino>>> {
    let mut added = Vec::new();
    fs.add_files(files, &mut added).map(|()| added)
}

/// Returns names, inodes and cookies after `cookie`, without `.` and `..`, in the order of the
/// listing.
pub(super) fn list(fs: &FileSystem, directory: Ino, cookie: u64) -> Result<Vec<(Vec<u8>, Ino, u64)>> {
    let bound = fs.directory_bound(directory)?;
    let mut entries = Vec::new();
    fs.list_directory(directory, cookie.max(2), bound, true, &mut |entry, attributes| {
        let attributes: &Attributes = attributes.unwrap();
        assert_eq!((entry.ino, u32::from(entry.file_type)), (attributes.ino, attributes.mode >> 12));
        entries.push((entry.name.to_vec(), entry.ino, entry.cookie));
        ControlFlow::Continue(())
    })?;
    Ok(entries)
}
