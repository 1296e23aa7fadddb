//! Small files wait until there are many, and are then added at once.
//!
//! What is to be done after the files of a directory waits with them. Nothing else depends on the order: who wants a name that waits has the
//! waiting files added first.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use rustix::fs::{FileType, SeekFrom, Stat};
use rustix::io::Errno;

use super::{Directory, Import, ends_import};
use crate::error::Result;
use crate::exchange::attributes::{self, Object};
use crate::exchange::host::{host_error, read_at, timestamps, was_written};
use crate::exchange::path::if_there;
use crate::exchange::{Cause, Problem};
use crate::format::Ino;
use crate::fs::{FileSystem, MAX_SMALL_FILE, NewFile, mode};

/// Files that are added at once at most, and their bytes: what the file system takes in one step.
const MOST_FILES: usize = 1024;
const MOST_BYTES: usize = 2 << 20;
/// Directories that wait for their files at most: each keeps a descriptor.
const MOST_DIRECTORIES: usize = 64;
/// What a host file system can leave out as a hole at least.
const LEAST_HOLE: u64 = 4096;

/// A file that was read.
struct Small {
    path: Vec<u8>,
    directory: Ino,
    name: Vec<u8>,
    stat: Stat,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    content: Vec<u8>,
    changed: bool,
}

/// See the module.
#[derive(Default)]
pub(super) struct Waiting {
    files: Vec<Small>,
    bytes: usize,
    names: HashSet<(Ino, Vec<u8>)>,
    /// With the paths for messages.
    directories: Vec<(Vec<u8>, Directory)>,
}

impl Waiting {
    pub(super) fn has(&self, directory: Ino, name: &[u8]) -> bool {
        !self.files.is_empty() && self.names.contains(&(directory, name.to_vec()))
    }

    pub(super) fn finish_later(&mut self, path: &[u8], directory: Directory) {
        self.directories.push((path.to_vec(), directory));
    }
}

impl Import<'_> {
    /// Reads a small file that is to be added later; false for one that has to be copied at once.
    pub(super) fn read_small(&mut self, host: &OwnedFd, parent: Ino, name: &[u8]) -> Result<bool> {
        let stat = rustix::fs::fstat(host).map_err(host_error("cannot read"))?;
        let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
            || size > MAX_SMALL_FILE
            || has_holes(host, &stat, size)?
        {
            return Ok(false);
        }
        if if_there(self.fs.lookup(parent, name))?.is_some() {
            // Replaced, compared or refused, one by one.
            return Ok(false);
        }
        let xattrs: Vec<_> = attributes::read(&Object::open(host))?.into_iter().collect();
        if !xattrs.iter().all(|(name, _)| FileSystem::is_plain_xattr(name)) {
            return Ok(false);
        }
        let mut content = content(host, size as usize)?;
        let after = rustix::fs::fstat(host).map_err(host_error("cannot read"))?;
        if after.st_size != stat.st_size {
            // What it grew by is not copied, as of a large file.
            content.truncate(size as usize);
        }
        if content.len() as u64 > MAX_SMALL_FILE {
            // More than it stated.
            return Ok(false);
        }
        let changed = (content.len() as u64) < size || was_written(&stat, &after);
        // What is held in memory: attributes may be much more than the content.
        self.waiting.bytes +=
            content.len() + xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        self.waiting.names.insert((parent, name.to_vec()));
        let (path, name) = (self.path.clone(), name.to_vec());
        self.waiting.files.push(Small { path, directory: parent, name, stat, xattrs, content, changed });
        if self.waiting.files.len() >= MOST_FILES || self.waiting.bytes >= MOST_BYTES {
            self.add_waiting()?;
        }
        Ok(true)
    }

    /// Finishes a directory, after its files.
    pub(super) fn leave_directory(&mut self, directory: Directory) -> Result<()> {
        if self.waiting.files.is_empty() {
            let done = self.finish_directory(&directory);
            return self.note(done);
        }
        self.waiting.finish_later(&self.path, directory);
        if self.waiting.directories.len() >= MOST_DIRECTORIES { self.add_waiting() } else { Ok(()) }
    }

    /// Adds what waits, and finishes the directories even when that fails: the mode of an unfinished one may give its group rights that
    /// its access list takes away. Returns the first error that ends the import.
    pub(super) fn add_waiting(&mut self) -> Result<()> {
        let Waiting { files, directories, .. } = std::mem::take(&mut self.waiting);
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

    /// An error that concerns some of the files only does not end the import: then each is tried by itself, so that each one that is
    /// missing is told of and the others are not missing.
    fn add_small(&mut self, files: &[Small]) -> Result<()> {
        let new: Vec<NewFile<'_>> = files.iter().map(new_file).collect();
        let mut added = Vec::with_capacity(files.len());
        let done = self.fs.add_files_to(&new, &mut added);
        let (there, missing) = files.split_at(added.len());
        for (file, added) in there.iter().zip(added) {
            self.path.clone_from(&file.path);
            if self.tolerate(added.map(Some))?.is_none() {
                continue;
            }
            self.report.copied.files += 1;
            self.report.copied.bytes += file.content.len() as u64;
            if file.changed {
                self.report.problems.push(Problem { path: self.path.clone(), cause: Cause::Changed });
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

fn new_file(file: &Small) -> NewFile<'_> {
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

/// Whether a part of the file is a hole. Blocks tell mostly; a file system that compresses has to be asked.
fn has_holes(host: &OwnedFd, stat: &Stat, size: u64) -> Result<bool> {
    let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
    if size <= LEAST_HOLE || blocks * 512 >= size {
        return Ok(false);
    }
    match rustix::fs::seek(host, SeekFrom::Hole(0)) {
        Ok(hole) => Ok(hole < size),
        // A host file system without the notion, or the file shrank.
        Err(Errno::INVAL | Errno::NXIO) => Ok(false),
        Err(errno) => Err(host_error("cannot read")(errno)),
    }
}

/// Returns the content of the file, which states `size` bytes: all of it, or one byte more than a
/// small file has.
fn content(host: &OwnedFd, size: usize) -> Result<Vec<u8>> {
    // With room for the read that meets the end.
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
