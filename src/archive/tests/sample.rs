//! A small archive in memory with every kind of content, and the expected content after each
//! commit.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use super::super::create::name_key;
use super::{ARCHIVE, key};
use crate::env::{Environment, SeededEnvironment};
use crate::error::{Error, Result};
use crate::format::header::Framing;
use crate::format::{BLOCK, Generation, Ino, MIN_BLOCKS, ROOT_INO};
use crate::frame::PageCipher;
use crate::fs::{
    Attributes, Compression, Creator, FileSystem, FsOptions, SetAttributes, SnapshotView, SyncProfile, XattrMode, mode,
};
use crate::keys::header::{self, Header, empty_slots};
use crate::storage::{MemoryStorage, Storage};
use crate::txn::{OpenOptions, Volume};

const OPTIONS: FsOptions =
    FsOptions { max_dirty_bytes: 8 << 20, sync: SyncProfile::Periodic, pack: true, compression: Compression::Default };
pub(super) const OWNER: Creator = Creator { uid: 1000, gid: 1000, umask: None };

/// Everything that a reader sees of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) ino: Ino,
    pub(super) mode: u32,
    pub(super) links: u32,
    pub(super) size: u64,
    pub(super) content: Vec<u8>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Objects by path; an unreadable object has its error.
pub(super) type Listing = BTreeMap<Vec<u8>, Result<Seen>>;
/// Expected objects by path.
pub(super) type Expected = BTreeMap<Vec<u8>, Seen>;

pub(super) struct Sample {
    pub(super) bytes: Vec<u8>,
    /// The file after an earlier commit.
    pub(super) earlier: Vec<u8>,
    pub(super) states: BTreeMap<Generation, Expected>,
}

pub(super) fn cipher() -> PageCipher {
    PageCipher::new(&key(), ARCHIVE, false, Arc::new(SeededEnvironment::new(77)))
}

fn with_header() -> MemoryStorage {
    let storage = MemoryStorage::new();
    storage.set_len(MIN_BLOCKS * BLOCK).unwrap();
    let mut blocks = empty_slots();
    for block in blocks.iter_mut() {
        SeededEnvironment::new(5).fill_random(block).unwrap();
    }
    let commitment = header::commitment(&key(), &ARCHIVE);
    let framing =
        Framing { copy: 0, features: 0, archive: ARCHIVE, sequence: 1, commitment, slots: [0; 32], mac: [0; 32] };
    for copy in 0..2 {
        header::write_copy(&storage, &framing, &blocks, copy, &key()).unwrap();
    }
    storage
}

/// Returns an archive's file before its first page.
pub(crate) fn header_bytes() -> Vec<u8> {
    with_header().contents()
}

/// Creates a file system in memory, after a header.
pub(super) fn fresh(seed: u64) -> (Arc<MemoryStorage>, Arc<FileSystem>) {
    println!("seed {seed}");
    let storage = Arc::new(with_header());
    let fs = create_on(storage.clone(), seed);
    (storage, fs)
}

pub(super) fn create_on(storage: Arc<dyn Storage>, seed: u64) -> Arc<FileSystem> {
    let environment: Arc<dyn Environment> = Arc::new(SeededEnvironment::new(seed));
    let cipher = PageCipher::new(&key(), ARCHIVE, false, environment.clone());
    let volume = Volume::create(storage, cipher, environment.clone(), 1).unwrap();
    let fs = FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), OPTIONS).unwrap();
    fs.format(OWNER).unwrap();
    fs.sync().unwrap();
    fs
}

/// Opens a storage like `Archive::open`, without the lock.
pub(super) fn open_on(storage: Arc<dyn Storage>, read_only: bool, seed: u64) -> Result<Arc<FileSystem>> {
    let mut header = Header::read(&*storage)?;
    header.authenticate(&key())?;
    if !read_only {
        header.repair(&*storage, &key())?;
    }
    let environment: Arc<dyn Environment> = Arc::new(SeededEnvironment::new(seed));
    let cipher = PageCipher::new(&key(), ARCHIVE, header.framing().has_log(), environment.clone());
    let volume = Volume::open(
        storage,
        cipher,
        environment.clone(),
        header.framing().sequence,
        &OpenOptions { read_only, memory: 32 << 20 },
    )?;
    FileSystem::new(volume, environment, name_key(&key(), &ARCHIVE), OPTIONS)
}

pub(super) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    SeededEnvironment::new(seed).fill_random(&mut bytes).unwrap();
    bytes
}

pub(super) fn put(fs: &FileSystem, directory: Ino, name: &[u8], content: &[u8]) -> Ino {
    let made = fs.make_node(directory, name, mode::REGULAR | 0o640, 0, OWNER).unwrap();
    fs.write(made.ino, 0, content).unwrap();
    made.ino
}

/// Reader of a tree of files.
trait Reads {
    /// Returns names with their inodes, without `.` and `..`; entries read before an error are
    /// included.
    fn children(&self, directory: Ino, into: &mut Vec<(Ino, Vec<u8>)>) -> Result<()>;
    fn attributes(&self, ino: Ino) -> Result<Attributes>;
    fn read(&self, ino: Ino, length: usize) -> Result<Vec<u8>>;
    fn read_link(&self, ino: Ino) -> Result<Vec<u8>>;
    fn xattr_names(&self, ino: Ino) -> Result<Vec<u8>>;
    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>>;
}

impl Reads for FileSystem {
    fn children(&self, directory: Ino, into: &mut Vec<(Ino, Vec<u8>)>) -> Result<()> {
        self.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
            into.push((entry.ino, entry.name.to_vec()));
            ControlFlow::Continue(())
        })
    }

    fn attributes(&self, ino: Ino) -> Result<Attributes> {
        FileSystem::attributes(self, ino)
    }

    fn read(&self, ino: Ino, length: usize) -> Result<Vec<u8>> {
        FileSystem::read(self, ino, 0, length)
    }

    fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        FileSystem::read_link(self, ino)
    }

    fn xattr_names(&self, ino: Ino) -> Result<Vec<u8>> {
        self.list_xattrs(ino)
    }

    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        FileSystem::xattr(self, ino, name)
    }
}

impl Reads for SnapshotView<'_> {
    fn children(&self, directory: Ino, into: &mut Vec<(Ino, Vec<u8>)>) -> Result<()> {
        let bound = self.directory_bound(directory)?;
        self.list_directory(directory, 2, bound, true, &mut |entry, attributes| {
            // `None` if the record of the inode is damaged.
            assert!(attributes.is_none_or(|found| found.ino == entry.ino));
            into.push((entry.ino, entry.name.to_vec()));
            ControlFlow::Continue(())
        })
    }

    fn attributes(&self, ino: Ino) -> Result<Attributes> {
        SnapshotView::attributes(self, ino)
    }

    fn read(&self, ino: Ino, length: usize) -> Result<Vec<u8>> {
        let mut out = vec![0xEE; 100];
        let count = self.read_into(ino, 0, length, &mut out)?;
        out.truncate(count);
        Ok(out)
    }

    fn read_link(&self, ino: Ino) -> Result<Vec<u8>> {
        SnapshotView::read_link(self, ino)
    }

    fn xattr_names(&self, ino: Ino) -> Result<Vec<u8>> {
        self.list_xattrs_for(ino, &|| true)
    }

    fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        SnapshotView::xattr(self, ino, name)
    }
}

/// Reads every object below the root. A directory that cannot be listed is an error of its own.
pub(super) fn read_all(fs: &FileSystem) -> Listing {
    read_tree(fs)
}

/// Reads every object of a snapshot.
pub(super) fn read_all_in(view: &SnapshotView<'_>) -> Listing {
    read_tree(view)
}

fn read_tree(fs: &impl Reads) -> Listing {
    let mut all = Listing::new();
    read_below(fs, ROOT_INO, b"", &mut all);
    all
}

fn read_below(fs: &impl Reads, directory: Ino, path: &[u8], into: &mut Listing) {
    let mut children = Vec::new();
    let listed = fs.children(directory, &mut children);
    if let Err(error) = listed {
        into.insert([path, b"/"].concat(), Err(error));
    }
    for (ino, name) in children {
        let path = [path, b"/", &name].concat();
        let seen = read_one(fs, ino);
        let below = seen.as_ref().is_ok_and(|seen| seen.mode & mode::TYPE == mode::DIRECTORY);
        into.insert(path.clone(), seen);
        if below {
            read_below(fs, ino, &path, into);
        }
    }
}

fn read_one(fs: &impl Reads, ino: Ino) -> Result<Seen> {
    let attributes = fs.attributes(ino)?;
    let content = match attributes.mode & mode::TYPE {
        mode::REGULAR => fs.read(ino, attributes.size as usize)?,
        mode::SYMLINK => fs.read_link(ino)?,
        _ => Vec::new(),
    };
    let mut xattrs = Vec::new();
    for name in fs.xattr_names(ino)?.split(|&b| b == 0).filter(|name| !name.is_empty()) {
        xattrs.push((name.to_vec(), fs.xattr(ino, name)?));
    }
    let size = if attributes.mode & mode::TYPE == mode::DIRECTORY { 0 } else { attributes.size };
    Ok(Seen { ino, mode: attributes.mode, links: attributes.links, size, content, xattrs })
}

pub(super) fn expected(fs: &FileSystem) -> Expected {
    read_tree(fs).into_iter().map(|(path, seen)| (path, seen.unwrap())).collect()
}

/// Returns the content of a snapshot.
pub(super) fn expected_in(view: &SnapshotView<'_>) -> Expected {
    read_tree(view).into_iter().map(|(path, seen)| (path, seen.unwrap())).collect()
}

/// Creates every kind of object and page, several versions of some, and a deleted one.
pub(super) fn sample() -> Sample {
    let (storage, fs) = fresh(1);
    let mut states = BTreeMap::new();
    let keep = |fs: &FileSystem, states: &mut BTreeMap<Generation, Expected>| {
        fs.sync().unwrap();
        states.insert(fs.volume.durable().generation, expected(fs));
    };
    keep(&fs, &mut states);
    let directory = fs.make_directory(ROOT_INO, b"directory", 0o750, OWNER).unwrap().ino;
    let inline = put(&fs, ROOT_INO, b"inline", b"a few bytes");
    for n in 0..6u64 {
        put(&fs, directory, format!("packed{n}").as_bytes(), &noise(n, 900 + 100 * n as usize));
    }
    let text = put(&fs, ROOT_INO, b"text", &b"all work and no play makes jack a dull boy\n".repeat(900));
    let blocks = put(&fs, ROOT_INO, b"noise", &noise(99, 140_000));
    fs.set_xattr(inline, b"user.short", b"value", XattrMode::Set).unwrap();
    fs.set_xattr(text, b"user.long", &noise(7, 3600), XattrMode::Set).unwrap();
    fs.make_symlink(directory, b"link", b"../noise", OWNER).unwrap();
    fs.link(text, directory, b"text too").unwrap();
    keep(&fs, &mut states);
    let earlier = storage.contents();
    fs.write(blocks, 70_000, &noise(5, 5000)).unwrap();
    fs.write(text, 0, b"ALL").unwrap();
    let sparse = put(&fs, directory, b"sparse", b"begin");
    fs.write(sparse, 400_000, b"end").unwrap();
    keep(&fs, &mut states);
    fs.unlink(directory, b"packed3").unwrap();
    fs.set_attributes(blocks, &SetAttributes { size: Some(100_001), ..SetAttributes::default() }).unwrap();
    while fs.maintain().unwrap() {}
    keep(&fs, &mut states);
    fs.write(inline, 0, b"A FEW").unwrap();
    keep(&fs, &mut states);
    Sample { bytes: storage.contents(), earlier, states }
}

impl Sample {
    /// Returns the content of the archive as of a generation.
    pub(super) fn at(&self, generation: Generation) -> &Expected {
        self.states.range(..=generation).next_back().map(|(_, state)| state).expect("a state")
    }

    pub(super) fn newest(&self) -> &Expected {
        self.states.values().next_back().expect("a state")
    }

    /// Opens and reads everything, which must be correct or an error. Returns the number of
    /// unreadable objects.
    pub(super) fn judge(&self, bytes: Vec<u8>, what: &str) -> usize {
        self.judge_storage(MemoryStorage::from_contents(bytes), what)
    }

    pub(super) fn judge_storage(&self, storage: MemoryStorage, what: &str) -> usize {
        let fs = match open_on(Arc::new(storage), true, 3) {
            Ok(fs) => fs,
            Err(Error::Damaged(_) | Error::NotArchive(_) | Error::UnsupportedVersion(_)) => return self.newest().len(),
            Err(error) => panic!("{what}: {error}"),
        };
        let state = self.at(fs.volume.durable().generation);
        let found = read_all(&fs);
        let failed = found.values().filter(|seen| seen.is_err()).count();
        let listed = found.iter().all(|(path, seen)| seen.is_ok() || !path.ends_with(b"/"));
        for (path, seen) in &found {
            match seen {
                Ok(seen) => assert_eq!(Some(seen), state.get(path), "{what}: {}", String::from_utf8_lossy(path)),
                Err(Error::Damaged(message)) => assert!(!message.is_empty()),
                Err(error) => panic!("{what}: {}: {error}", String::from_utf8_lossy(path)),
            }
        }
        if failed == 0 && listed {
            assert_eq!(found.len(), state.len(), "{what}: objects are missing without an error");
        }
        failed
    }
}
