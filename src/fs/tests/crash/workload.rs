//! Random changes of a file system on a recording storage, and what a user saw after each of them.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hasher};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use super::super::acl;
use super::super::support::{OPTIONS, create_with};
use crate::env::SeededEnvironment;
use crate::error::Error;
use crate::format::{Generation, Ino, ROOT_INO};
use crate::fs::{Creator, FileSystem, FsOptions, NewFile, RenameMode, SetAttributes, XattrMode, mode};
use crate::storage::simulated::{SimulatedStorage, Trace};

const OWNER: Creator = Creator { uid: 1000, gid: 1000, umask: Some(0o022) };
/// Memory that the recording of one run may take.
const TRACE_LIMIT: u64 = 512 << 20;

/// Everything that a user can see, one line an object: path, attributes, digests of content and extended attributes.
pub(in crate::fs::tests) type Seen = Arc<str>;

pub(super) fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

fn entries(fs: &FileSystem, directory: Ino) -> Vec<(Ino, Vec<u8>)> {
    let mut children = Vec::new();
    fs.list_directory(directory, 2, u64::MAX, false, &mut |entry, _| {
        children.push((entry.ino, entry.name.to_vec()));
        ControlFlow::Continue(())
    })
    .unwrap();
    children
}

fn describe(fs: &FileSystem, directory: Ino, path: &str, inodes: &mut BTreeSet<Ino>, into: &mut String) {
    for (ino, name) in entries(fs, directory) {
        let is = fs.attributes(ino).unwrap();
        let path = format!("{path}/{}", String::from_utf8_lossy(&name));
        let is_directory = is.mode & mode::TYPE == mode::DIRECTORY;
        let content = match is.mode & mode::TYPE {
            mode::REGULAR => fs.read(ino, 0, is.size as usize).unwrap(),
            mode::SYMLINK => fs.read_link(ino).unwrap(),
            _ => Vec::new(),
        };
        into.push_str(&format!(
            "{path} ino={} mode={:o} links={} owner={}:{} rdev={} size={} times={:?} {:?} {:?} content={:016x}",
            ino.0,
            is.mode,
            is.links,
            is.uid,
            is.gid,
            is.rdev,
            is.size,
            is.mtime,
            is.ctime,
            is.btime,
            digest(&content)
        ));
        for name in fs.list_xattrs(ino).unwrap().split(|&b| b == 0).filter(|name| !name.is_empty()) {
            let value = fs.xattr(ino, name).unwrap();
            into.push_str(&format!(" {}={:016x}", String::from_utf8_lossy(name), digest(&value)));
        }
        into.push('\n');
        inodes.insert(ino);
        if is_directory {
            describe(fs, ino, &path, inodes, into);
        }
    }
}

/// The whole tree as a user sees it with the names of the snapshots, and the inodes that it reaches.
pub(in crate::fs::tests) fn see(fs: &FileSystem) -> (Seen, BTreeSet<Ino>) {
    let (mut text, inodes) = see_tree(fs);
    for (_, snapshot) in fs.volume.readable_snapshots().unwrap() {
        text.push_str(&format!("snapshot {}\n", String::from_utf8_lossy(&snapshot.name)));
    }
    (text.into(), inodes)
}

/// What a snapshot that is taken now has to show for ever.
pub(super) fn see_tree(fs: &FileSystem) -> (String, BTreeSet<Ino>) {
    let mut text = String::new();
    let mut inodes = BTreeSet::from([ROOT_INO]);
    describe(fs, ROOT_INO, "", &mut inodes, &mut text);
    (text, inodes)
}

/// A promise: from this operation of the storage on, nothing older than this state may come back.
#[derive(Clone, Copy, Debug)]
struct Promise {
    position: usize,
    state: usize,
    generation: Generation,
}

/// A recorded run.
pub(super) struct Run {
    pub(super) trace: Trace,
    /// What was seen after each change, and how many operations of the storage had returned by then.
    pub(super) states: Vec<(usize, Seen)>,
    /// What each snapshot that was ever taken shows; no name is given twice.
    pub(super) kept: Kept,
    promises: Vec<Promise>,
}

pub(super) type Kept = BTreeMap<Vec<u8>, String>;

impl Run {
    /// States that recovery may return when the storage stopped after `position` operations, and the least generation: the promised one
    /// up to what the change that was interrupted would have made.
    pub(super) fn allowed(&self, position: usize) -> (Range<usize>, Generation) {
        let kept = self.promises.partition_point(|promise| promise.position <= position);
        let promise = self.promises[kept - 1];
        let current = self.states.partition_point(|(at, _)| *at <= position);
        (promise.state..(current + 1).min(self.states.len()), promise.generation)
    }

    pub(super) fn promises(&self) -> usize {
        self.promises.len()
    }
}

/// What the changes need to know.
struct Changes<'a> {
    fs: &'a FileSystem,
    dice: &'a SeededEnvironment,
    directories: Vec<Ino>,
    open: Vec<Ino>,
    kept: Kept,
    bursts: bool,
}

impl Changes<'_> {
    fn below(&self, bound: u64) -> u64 {
        self.dice.next_u64() % bound
    }

    fn name(&self) -> Vec<u8> {
        format!("n{}", self.below(8)).into_bytes()
    }

    fn directory(&self) -> Ino {
        self.directories[self.below(self.directories.len() as u64) as usize]
    }

    /// Half of it compresses.
    fn bytes(&self, length: usize) -> Vec<u8> {
        let value = self.below(256) as u8;
        let source = SeededEnvironment::new(self.dice.next_u64());
        let mut bytes = vec![value; length];
        crate::env::Environment::fill_random(&source, &mut bytes[..length / 2]).unwrap();
        bytes
    }

    fn create(&self, directory: Ino, name: &[u8], length: usize) {
        if let Ok(made) = self.fs.make_node(directory, name, mode::REGULAR | 0o640, 0, OWNER) {
            self.fs.write(made.ino, 0, &self.bytes(length)).unwrap();
        }
    }

    /// Several at once, into two directories, some under names that are taken: all that are not refused appear together.
    fn add_files(&self, directory: Ino) {
        let other = self.directory();
        let made: Vec<(Ino, Vec<u8>, Vec<u8>)> = (0..2 + self.below(12))
            .map(|n| {
                let name = if n % 3 == 0 { self.name() } else { format!("small{n}").into_bytes() };
                let length = [0, 10, 300, 3000, 9000, 30_000][self.below(6) as usize];
                (if n % 2 == 0 { directory } else { other }, name, self.bytes(length))
            })
            .collect();
        let note = [(b"user.note".to_vec(), self.bytes(2000))];
        let files: Vec<NewFile<'_>> = made
            .iter()
            .enumerate()
            .map(|(n, (directory, name, content))| NewFile {
                directory: *directory,
                name,
                mode: 0o640,
                uid: OWNER.uid + n as u32 % 2,
                gid: OWNER.gid,
                atime: None,
                mtime: None,
                xattrs: if n == 1 { &note } else { &[] },
                content,
            })
            .collect();
        for added in self.fs.add_files(&files).unwrap() {
            assert!(matches!(added, Ok(_) | Err(Error::Exists)), "{added:?}");
        }
    }

    /// Directories that are no more are forgotten.
    fn forget_gone(&mut self) {
        let fs = self.fs;
        self.directories.retain(|ino| fs.attributes(*ino).is_ok_and(|is| is.links > 0));
    }

    /// One random change; refusals are fine, they are part of it. True when it ended with an fsync.
    fn step(&mut self) -> bool {
        let fs = self.fs;
        let (directory, name) = (self.directory(), self.name());
        let file = fs.lookup(directory, &name).ok().filter(|a| a.mode & mode::TYPE == mode::REGULAR).map(|a| a.ino);
        match self.below(30) {
            0..3 => self.create(directory, &name, [0, 10, 300, 3000, 9000, 140_000][self.below(6) as usize]),
            3 => {
                for n in 0..if self.bursts && self.below(3) == 0 { 180 } else { 5 } {
                    self.create(directory, format!("small{n}").as_bytes(), 400 + self.below(3000) as usize);
                }
            }
            25 => self.add_files(directory),
            4 => return self.nested(directory),
            5..8 => self.overwrite(file),
            8 => {
                if let Some(ino) = file {
                    let set = SetAttributes { size: Some(self.below(150_000)), ..SetAttributes::default() };
                    fs.set_attributes(ino, &set).unwrap();
                }
            }
            9 => {
                if let Ok(made) = fs.make_directory(directory, &name, 0o755, OWNER) {
                    self.directories.push(made.ino);
                    if self.below(2) == 0 {
                        fs.set_xattr(made.ino, acl::DEFAULT, &acl::named(7, 5), XattrMode::Set).unwrap();
                    }
                }
            }
            10 => {
                let _ = fs.make_symlink(directory, &name, b"../somewhere", OWNER);
            }
            11..13 => self.unlink(directory, &name, file),
            13 => {
                if let Some(ino) = self.open.pop() {
                    fs.release(ino).unwrap();
                }
            }
            14 => {
                let _ = fs.remove_directory(directory, &name);
                self.forget_gone();
            }
            15..17 => self.rename(directory, &name),
            17 => {
                if let Some(ino) = file {
                    let _ = fs.link(ino, self.directory(), &self.name());
                }
            }
            18 => self.xattr(file),
            19 => {
                fs.maintain().unwrap();
            }
            20 => {
                // A program that clears up after itself.
                for n in 0..8 {
                    let _ = fs.unlink(directory, format!("small{n}").as_bytes());
                }
            }
            21..25 => self.ranges(file),
            26 | 27 => return self.take_snapshot(),
            28 => return self.remove_snapshot(),
            _ => {
                if let Some(ino) = file {
                    let mode = Some(0o600 + self.below(64) as u32);
                    fs.set_attributes(ino, &SetAttributes { mode, ..SetAttributes::default() }).unwrap();
                }
            }
        }
        false
    }

    /// Durable when it returns, as after an fsync.
    fn take_snapshot(&mut self) -> bool {
        if self.fs.snapshots().unwrap().len() == 4 {
            return false;
        }
        let name = format!("s{}", self.kept.len()).into_bytes();
        self.kept.insert(name.clone(), see_tree(self.fs).0);
        self.fs.take_snapshot(&name).unwrap();
        true
    }

    /// Of what it alone showed some is freed at once, and the rest beside what follows.
    fn remove_snapshot(&self) -> bool {
        let all = self.fs.snapshots().unwrap();
        if all.is_empty() {
            return false;
        }
        let (id, ..) = all[self.below(all.len() as u64) as usize];
        self.fs.remove_snapshots(&[id]).unwrap();
        for _ in 0..self.below(3) {
            self.fs.volume.removal_step().unwrap();
        }
        true
    }

    /// The case that loses files elsewhere: a new file in a new directory in a new directory, and an fsync of the file alone.
    fn nested(&mut self, directory: Ino) -> bool {
        let Ok(outer) = self.fs.make_directory(directory, &self.name(), 0o755, OWNER) else { return false };
        let inner = self.fs.make_directory(outer.ino, b"inner", 0o700, OWNER).unwrap();
        self.create(inner.ino, b"file", 2000);
        self.directories.extend([outer.ino, inner.ino]);
        true
    }

    fn overwrite(&self, file: Option<Ino>) {
        let Some(ino) = file else { return };
        let size = self.fs.attributes(ino).unwrap().size;
        let length = 1 + self.below([50, 5000, 40_000][self.below(3) as usize]) as usize;
        self.fs.write(ino, self.below(size + 10_000).min(300_000), &self.bytes(length)).unwrap();
    }

    fn unlink(&mut self, directory: Ino, name: &[u8], file: Option<Ino>) {
        let Some(ino) = file else { return };
        // Unlinked while open: the content must go after the crash.
        if self.open.len() < 4 && self.below(2) == 0 {
            self.fs.open(ino).unwrap();
            self.open.push(ino);
        }
        self.fs.unlink(directory, name).unwrap();
    }

    fn rename(&mut self, directory: Ino, name: &[u8]) {
        let how = [RenameMode::Replace, RenameMode::Replace, RenameMode::Exchange, RenameMode::NoReplace]
            [self.below(4) as usize];
        let (to, new_name) = (self.directory(), self.name());
        let _ = self.fs.rename(directory, name, to, &new_name, how);
        self.forget_gone();
    }

    fn ranges(&self, file: Option<Ino>) {
        let Some(ino) = file else { return };
        match self.below(4) {
            0 => self.fs.punch_hole(ino, self.below(300_000), 1 + self.below(100_000), false).unwrap(),
            1 => {
                let keep_size = self.below(2) == 0;
                self.fs.zero_range(ino, self.below(300_000), 1 + self.below(50_000), keep_size, false).unwrap();
            }
            _ => {
                let other = self.fs.lookup(self.directory(), &self.name()).ok();
                if let Some(to) = other.filter(|a| a.mode & mode::TYPE == mode::REGULAR) {
                    let aligned = [1, 4096, 131_072][self.below(3) as usize];
                    let (from_at, to_at) = (self.below(3) * aligned, self.below(3) * aligned);
                    // Refused where the ranges overlap within one file.
                    let _ = self.fs.copy_range(ino, from_at, to.ino, to_at, 1 + self.below(400_000), false);
                }
            }
        }
    }

    fn xattr(&self, file: Option<Ino>) {
        let Some(ino) = file else { return };
        match self.below(6) {
            0 => drop(self.fs.remove_xattr(ino, b"user.note")),
            // A mode and a list that disagree are a finding of the check.
            1 => {
                let list = acl::named(self.below(8) as u16, 4);
                self.fs.set_xattr(ino, acl::ACCESS, &list, XattrMode::Set).unwrap();
            }
            2 => {
                let set = SetAttributes { mode: Some(self.below(0o1000) as u32), ..SetAttributes::default() };
                self.fs.set_attributes(ino, &set).unwrap();
            }
            _ => {
                let value = self.bytes([5, 900, 9000][self.below(3) as usize]);
                self.fs.set_xattr(ino, b"user.note", &value, XattrMode::Set).unwrap();
            }
        }
    }
}

/// Runs a workload on a recording storage; the same seed gives the same run.
pub(super) fn run(seed: u64) -> Run {
    let dice = Arc::new(SeededEnvironment::new(seed));
    let storage = SimulatedStorage::new();
    let options = FsOptions {
        // Sometimes data is written out long before its commit.
        staged_bytes: if seed.is_multiple_of(3) { 64 << 10 } else { OPTIONS.staged_bytes },
        pack: !seed.is_multiple_of(4),
        ..OPTIONS
    };
    let fs = create_with(storage.clone(), dice.clone(), options);
    storage.record(TRACE_LIMIT);
    let promise = |state| Promise { position: storage.position(), state, generation: fs.volume.durable().generation };
    let mut states = vec![(storage.position(), see(&fs).0)];
    let mut promises = vec![promise(0)];
    let mut changes = Changes {
        fs: &fs,
        dice: &dice,
        directories: vec![ROOT_INO],
        open: Vec::new(),
        kept: Kept::new(),
        bursts: seed.is_multiple_of(5),
    };
    // Long runs pass checkpoints (every 24 commits), short ones let recovery begin from many different chains.
    for _ in 0..30 + 40 * (seed % 4) {
        let wants_fsync = changes.step();
        states.push((storage.position(), see(&fs).0));
        if wants_fsync || changes.below(4) == 0 {
            fs.sync().unwrap();
            // The fsync's own operations lie before this position, so both states are allowed while it runs.
            states.push((storage.position(), see(&fs).0));
            promises.push(promise(states.len() - 1));
        }
    }
    if changes.below(2) == 0 {
        for ino in std::mem::take(&mut changes.open) {
            fs.release(ino).unwrap();
        }
        fs.close().unwrap();
        states.push((storage.position(), see(&fs).0));
        promises.push(promise(states.len() - 1));
    }
    let trace = storage.recorded().expect("the storage records");
    assert!(trace.is_complete(), "the recording took too much memory");
    Run { trace, states, kept: changes.kept, promises }
}
