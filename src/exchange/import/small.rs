//! Batches small files and adds them in one step.
//!
//! The completion of their directories is deferred with them. Nothing else depends on the order:
//! when a pending name is needed, the pending files are added first.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use rustix::fs::{SeekFrom, Stat};
use rustix::io::Errno;

use super::{ImportDirectory, Importer, ends_import};
use crate::error::Result;
use crate::exchange::attributes::{self, XattrObject, host_error, read_at, timestamps, version};
use crate::exchange::path_ops::none_if_missing;
use crate::exchange::{Problem, ProblemCause};
use crate::format::Ino;
use crate::fs::{FileSystem, MAX_SMALL_FILE, NewFile, mode};

/// Maximum number and total bytes of files in a batch: as many as the file system accepts in one
/// step.
const MOST_FILES: usize = 1024;
const MOST_BYTES: usize = 2 << 20;
/// Maximum number of deferred directories: each holds a descriptor.
const MOST_DIRECTORIES: usize = 64;
/// Smallest hole that a host file system can represent.
const LEAST_HOLE: u64 = 4096;

struct SmallFile {
    path: Vec<u8>,
    directory: Ino,
    name: Vec<u8>,
    stat: Stat,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    content: Vec<u8>,
    changed: bool,
}

/// Batch of files and their deferred directories.
#[derive(Default)]
pub(super) struct PendingFiles {
    files: Vec<SmallFile>,
    bytes: usize,
    names: HashSet<(Ino, Vec<u8>)>,
    /// With their paths for messages.
    directories: Vec<(Vec<u8>, ImportDirectory)>,
}

impl PendingFiles {
    pub(super) fn has(&self, directory: Ino, name: &[u8]) -> bool {
        !self.files.is_empty() && self.names.contains(&(directory, name.to_vec()))
    }

    pub(super) fn finish_later(&mut self, path: &[u8], directory: ImportDirectory) {
        self.directories.push((path.to_vec(), directory));
    }
}

impl Importer<'_> {
    /// Reads a small file into the batch; returns false for a file that must be copied directly.
    pub(super) fn read_small(&mut self, host: &OwnedFd, stat: &Stat, parent: Ino, name: &[u8]) -> Result<bool> {
        let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        if stat.st_nlink != 1 || size > MAX_SMALL_FILE || has_holes(host, stat, size)? {
            return Ok(false);
        }
        if none_if_missing(self.fs.lookup(parent, name))?.is_some() {
            // Replaced, compared or refused individually.
            return Ok(false);
        }
        let xattrs: Vec<_> = attributes::read(&XattrObject::open(host))?.into_iter().collect();
        if !xattrs.iter().all(|(name, _)| FileSystem::is_plain_xattr(name)) {
            return Ok(false);
        }
        let mut content = content(host, size as usize)?;
        let after = rustix::fs::fstat(host).map_err(host_error("cannot read"))?;
        if after.st_size != stat.st_size {
            // Growth since stat is not copied, as for large files.
            content.truncate(size as usize);
        }
        if content.len() as u64 > MAX_SMALL_FILE {
            // Longer than reported.
            return Ok(false);
        }
        let changed = (content.len() as u64) < size || version(stat) != version(&after);
        // Memory in use: attributes may be much larger than the content.
        self.pending.bytes +=
            content.len() + xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        self.pending.names.insert((parent, name.to_vec()));
        let (path, name) = (self.path.clone(), name.to_vec());
        self.pending.files.push(SmallFile { path, directory: parent, name, stat: *stat, xattrs, content, changed });
        if self.pending.files.len() >= MOST_FILES || self.pending.bytes >= MOST_BYTES {
            self.add_pending()?;
        }
        Ok(true)
    }

    /// Finishes a directory, after its files.
    pub(super) fn leave_directory(&mut self, directory: ImportDirectory) -> Result<()> {
        if self.pending.files.is_empty() {
            let done = self.finish_directory(&directory);
            return self.note(done);
        }
        self.pending.finish_later(&self.path, directory);
        if self.pending.directories.len() >= MOST_DIRECTORIES { self.add_pending() } else { Ok(()) }
    }

    /// Adds the pending files, and finishes the directories even if that fails: the mode of an
    /// unfinished directory may grant its group access that its access control list denies. Returns
    /// the first error that ends the import.
    pub(super) fn add_pending(&mut self) -> Result<()> {
        let PendingFiles { files, directories, .. } = std::mem::take(&mut self.pending);
        let path = std::mem::take(&mut self.path);
        let mut done = if files.is_empty() { Ok(()) } else { self.add_small(&files) };
        for (path, directory) in directories {
            self.path = path;
            let finished = self.finish_directory(&directory);
            let noted = self.note(finished);
            done = done.and(noted);
        }
        self.path = path;
        done
    }

    /// Adds a batch. If some of the files fail, each is retried individually, so that failures are
    /// reported per file and the other files are added.
    fn add_small(&mut self, files: &[SmallFile]) -> Result<()> {
        let new: Vec<NewFile<'_>> = files.iter().map(new_file).collect();
        let mut added = Vec::with_capacity(files.len());
        let done = self.fs.add_files(&new, &mut added);
        let (there, missing) = files.split_at(added.len());
        for (file, added) in there.iter().zip(added) {
            self.path.clone_from(&file.path);
            if self.tolerate(added.map(Some))?.is_none() {
                continue;
            }
            self.report.copied.files += 1;
            self.report.copied.bytes += file.content.len() as u64;
            if file.changed {
                self.report.problems.push(Problem { path: self.path.clone(), cause: ProblemCause::Changed });
            }
        }
        match done {
            Err(error) if !ends_import(&error) && missing.len() > 1 => {
                tracing::warn!(%error, "cannot add files together, trying one by one");
                missing.iter().try_for_each(|file| self.add_small(std::slice::from_ref(file)))
            }
            done => {
                if let Some(file) = missing.first() {
                    self.path.clone_from(&file.path);
                }
                self.note(done)
            }
        }
    }
}

fn new_file(file: &SmallFile) -> NewFile<'_> {
    let (atime, mtime) = timestamps(&file.stat);
    NewFile {
        directory: file.directory,
        name: &file.name,
        mode: file.stat.st_mode & mode::PERMISSIONS,
        uid: file.stat.st_uid,
        gid: file.stat.st_gid,
        atime: Some(atime),
        mtime: Some(mtime),
        xattrs: &file.xattrs,
        content: &file.content,
    }
}

/// Returns whether a part of the file is a hole. Usually the block count tells; on a compressing
/// file system SEEK_HOLE is used.
fn has_holes(host: &OwnedFd, stat: &Stat, size: u64) -> Result<bool> {
    let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
    if size <= LEAST_HOLE || blocks * 512 >= size {
        return Ok(false);
    }
    match rustix::fs::seek(host, SeekFrom::Hole(0)) {
        Ok(hole) => Ok(hole < size),
        // The host file system does not support SEEK_HOLE, or the file shrank.
        Err(Errno::INVAL | Errno::NXIO) => Ok(false),
        Err(errno) => Err(host_error("cannot read")(errno)),
    }
}

/// Returns the content of a file of reported size `size`: all of it, or one byte more than a small
/// file may have.
fn content(host: &OwnedFd, size: usize) -> Result<Vec<u8>> {
    // One byte more, for the read that detects the end.
    let mut content = vec![0; size + 1];
    let mut end = 0;
    loop {
        if end == content.len() {
            if end as u64 > MAX_SMALL_FILE {
                break;
            }
            content.resize(MAX_SMALL_FILE as usize + 1, 0);
        }
        match read_at(host, &mut content[end..], end as u64)? {
            0 => break,
            length => end += length,
        }
    }
    content.truncate(end);
    Ok(content)
}
