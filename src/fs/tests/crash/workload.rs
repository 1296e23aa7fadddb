//! Random changes of a file system on a recording storage, and the visible tree after each of them.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::super::acl;
use super::super::support::{OPTIONS, add_files, create_with, header_alone};
use super::copies::{BackupTarget, Copying};
use super::history::{History, Recorder, TRACE_LIMIT, Wanted, some_paths};
use super::seen::{directories, see_tree};
use crate::env::SeededEnvironment;
use crate::error::Error;
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Creator, FileSystem, FsOptions, NewFile, RenameMode, SetAttributes, XattrMode, mode};
use crate::storage::simulated::Trace;

const OWNER: Creator = Creator { uid: 1000, gid: 1000, umask: Some(0o022) };
/// Maximum number of snapshots at a time.
const SNAPSHOTS: usize = 4;

/// A recorded run.
pub(super) struct Run {
    pub(super) trace: Trace,
    pub(super) history: History,
    /// Content of each snapshot that was ever taken; names are not reused.
    pub(super) kept: Kept,
    pub(super) copies: Vec<Copying>,
}

pub(super) type Kept = BTreeMap<Vec<u8>, String>;

/// State of the random workload.
struct Changes<'a> {
    recorder: &'a Recorder<'a>,
    fs: &'a FileSystem,
    directories: Vec<Ino>,
    open: Vec<Ino>,
    kept: Kept,
    bursts: bool,
    /// Target of the next backup; `None` for a new file.
    target: Option<BackupTarget>,
    copies: Vec<Copying>,
    /// A backup is in progress.
    copying: bool,
}

impl Changes<'_> {
    fn below(&self, bound: u64) -> u64 {
        self.recorder.below(bound)
    }

    fn name(&self) -> Vec<u8> {
        format!("n{}", self.below(8)).into_bytes()
    }

    fn directory(&self) -> Ino {
        self.directories[self.below(self.directories.len() as u64) as usize]
    }

    /// Half of the data is compressible.
    fn bytes(&self, length: usize) -> Vec<u8> {
        let value = self.below(256) as u8;
        let source = SeededEnvironment::new(self.recorder.dice.next_u64());
        let mut bytes = vec![value; length];
        crate::env::Environment::fill_random(&source, &mut bytes[..length / 2]).unwrap();
        bytes
    }

    fn create(&self, directory: Ino, name: &[u8], length: usize) {
        if let Ok(made) = self.fs.make_node(directory, name, mode::REGULAR | 0o640, 0, OWNER) {
            self.fs.write(made.ino, 0, &self.bytes(length)).unwrap();
        }
    }

    /// Adds several files at once, into two directories, some under existing names: all that are
    /// not refused appear together.
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
        for added in add_files(self.fs, &files).unwrap() {
            assert!(matches!(added, Ok(_) | Err(Error::Exists)), "{added:?}");
        }
    }

    /// Removed directories are dropped.
    fn forget_gone(&mut self) {
        let fs = self.fs;
        self.directories.retain(|ino| fs.attributes(*ino).is_ok_and(|is| is.links > 0));
    }

    /// Makes one random change; refusals are allowed. Returns true if it ended with an fsync.
    fn step(&mut self) -> bool {
        let fs = self.fs;
        let (directory, name) = (self.directory(), self.name());
        let file = fs.lookup(directory, &name).ok().filter(|a| a.mode & mode::TYPE == mode::REGULAR).map(|a| a.ino);
        match self.below(36) {
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
                // A program that cleans up after itself.
                for n in 0..8 {
                    let _ = fs.unlink(directory, format!("small{n}").as_bytes());
                }
            }
            21..25 => self.ranges(file),
            26 | 27 => self.take_snapshot(),
            28 => self.remove_snapshot(),
            29 | 30 => self.restore(),
            31 | 32 => self.back_up(),
            33 | 34 => {
                // Entries may come before the sync of its pages, or a crash without it.
                if fs.writeback.seal_ahead(fs.volume.durable().generation).unwrap() && self.below(2) == 0 {
                    fs.volume.sync_data_ahead().unwrap();
                }
            }
            _ => {
                if let Some(ino) = file {
                    let mode = Some(0o600 + self.below(64) as u32);
                    fs.set_attributes(ino, &SetAttributes { mode, ..SetAttributes::default() }).unwrap();
                }
            }
        }
        false
    }

    /// Durable when it returns, like an fsync.
    fn take_snapshot(&mut self) {
        if self.fs.snapshots().unwrap().len() == SNAPSHOTS {
            return;
        }
        let name = format!("s{}", self.kept.len()).into_bytes();
        self.kept.insert(name.clone(), see_tree(self.fs).0);
        self.fs.take_snapshot(&name).unwrap();
        self.recorder.promise();
    }

    /// Some of the space that only it used is freed at once, and the rest during later changes.
    fn remove_snapshot(&self) {
        let all = self.fs.snapshots().unwrap();
        if all.is_empty() {
            return;
        }
        let (id, ..) = all[self.below(all.len() as u64) as usize];
        self.fs.remove_snapshots(&[id]).unwrap();
        self.recorder.promise();
        for _ in 0..self.below(3) {
            self.fs.volume.removal_step().unwrap();
        }
    }

    /// Picks paths of a snapshot, or everything in it.
    fn restore(&mut self) {
        let all = self.fs.volume.readable_snapshots().unwrap();
        if all.is_empty() || self.copying {
            return;
        }
        let (_, snapshot) = &all[self.below(all.len() as u64) as usize];
        let kept = &self.kept[&snapshot.name];
        let mut wanted = Wanted::everything(&snapshot.name);
        if self.below(2) == 0 {
            wanted.paths = some_paths(kept, &|bound| self.below(bound));
        }
        self.recorder.restore(&wanted, kept);
        self.directories = directories(self.fs);
    }

    /// Backs up to the file of the last backup or a new one, concurrently with changes.
    fn back_up(&mut self) {
        if self.copying {
            return;
        }
        let target = self.target.take().filter(|_| self.below(4) > 0).unwrap_or_else(BackupTarget::new);
        self.copying = true;
        let recorder = self.recorder;
        let (copying, target) = target.back_up(recorder, &mut || {
            if self.step() {
                recorder.sync();
            }
            recorder.note();
        });
        self.copying = false;
        self.copies.push(copying);
        self.target = target;
    }

    /// A case that loses files in other file systems: a new file in a new directory in a new
    /// directory, and an fsync of the file alone.
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
        // Unlinked while open: the content must be removed after the crash.
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
            0 => self.fs.zero_range(ino, self.below(300_000), 1 + self.below(100_000), true, false).unwrap(),
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
            // A mode that disagrees with a list is a finding of the check.
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

/// Runs a workload on a recording storage. The same seed gives the same run, except for the files
/// of backups, which two threads write with randomness of the system.
pub(super) fn run(seed: u64) -> Run {
    let dice = Arc::new(SeededEnvironment::new(seed));
    let storage = header_alone();
    let options = FsOptions {
        // Sometimes data is written back long before its commit.
        max_dirty_bytes: if seed.is_multiple_of(3) { 64 << 10 } else { OPTIONS.max_dirty_bytes },
        pack: !seed.is_multiple_of(4),
        ..OPTIONS
    };
    if seed % 5 == 1 {
        storage.sync_by_barriers();
    }
    let fs = create_with(storage.clone(), dice.clone(), options);
    storage.record(TRACE_LIMIT);
    let recorder = Recorder::new(&fs, &storage, &dice);
    let mut changes = Changes {
        recorder: &recorder,
        fs: &fs,
        directories: vec![ROOT_INO],
        open: Vec::new(),
        kept: Kept::new(),
        bursts: seed.is_multiple_of(5),
        target: None,
        copies: Vec::new(),
        copying: false,
    };
    // Long runs pass checkpoints (every 24 commits), short ones let recovery begin from many
    // different chains.
    for _ in 0..30 + 40 * (seed % 4) {
        let wants_fsync = changes.step();
        if wants_fsync || changes.below(4) == 0 {
            recorder.sync();
        } else {
            recorder.note();
        }
    }
    if changes.below(2) == 0 {
        for ino in std::mem::take(&mut changes.open) {
            fs.release(ino).unwrap();
        }
        fs.close().unwrap();
        recorder.promise();
    }
    let Changes { kept, copies, .. } = changes;
    let trace = storage.recorded().expect("the storage records");
    assert!(trace.is_complete(), "the recording took too much memory");
    Run { trace, history: recorder.ended(), kept, copies }
}
