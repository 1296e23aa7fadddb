//! Temporary archive in a directory of its own, removed on drop.

use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions};
use lockbox::crypto::Passphrase;
use lockbox::format::{Ino, ROOT_INO};
use lockbox::fs::{Creator, FileSystem, NewFile};
use lockbox::keys::{self, UnlockedKey};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::{Outcome, Place};

pub(crate) const CREATOR: Creator = Creator { uid: 0, gid: 0, umask: None };

/// Files of one directory in the scenarios with many.
pub(crate) const PER_DIRECTORY: usize = 1000;

/// Temporary archive, open except between `make_cold` and `open`.
pub(crate) struct BenchBox {
    directory: PathBuf,
    key: UnlockedKey,
    options: OpenOptions,
    archive: Option<Archive>,
}

impl BenchBox {
    pub(crate) fn new(place: &Place, name: &str) -> Outcome<BenchBox> {
        let directory = place.work.join(format!("lockbox-{name}.{}", std::process::id()));
        fs::create_dir(&directory)?;
        let path = directory.join("box.lbx");
        let passphrase = Passphrase::new(b"a passphrase of the measurements".to_vec());
        // Key derivation happens once per archive and is not measured.
        Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator: CREATOR })?;
        let key = keys::unlock(&path, &passphrase)?;
        let options = OpenOptions { memory: place.memory << 20, ..OpenOptions::default() };
        let archive = Some(Archive::open(&path, &key, &options)?);
        Ok(BenchBox { directory, key, options, archive })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(crate) fn archive(&self) -> Outcome<&Archive> {
        self.archive.as_ref().ok_or_else(|| "the archive is closed".into())
    }

    pub(crate) fn fs(&self) -> Outcome<Arc<FileSystem>> {
        Ok(Arc::clone(self.archive()?.file_system()))
    }

    fn path(&self) -> PathBuf {
        self.directory.join("box.lbx")
    }

    pub(crate) fn close(&mut self) -> Outcome<()> {
        Ok(self.archive.take().map_or(Ok(()), Archive::close)?)
    }

    /// Closes the archive and drops the host's page cache of it.
    pub(crate) fn make_cold(&mut self) -> Outcome<()> {
        self.close()?;
        forget(&self.path())
    }

    pub(crate) fn open(&mut self) -> Outcome<()> {
        self.archive = Some(Archive::open(&self.path(), &self.key, &self.options)?);
        Ok(())
    }

    /// Returns the allocated bytes of the file.
    pub(crate) fn bytes(&self) -> Outcome<u64> {
        use std::os::unix::fs::MetadataExt;
        Ok(fs::metadata(self.path())?.blocks() * 512)
    }
}

impl Drop for BenchBox {
    fn drop(&mut self) {
        drop(self.archive.take());
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Syncs a file and drops the host's page cache of it.
pub(crate) fn forget(path: &Path) -> Outcome<()> {
    let file = File::open(path)?;
    file.sync_all()?;
    Ok(posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?)
}

pub(crate) fn name(number: usize) -> Vec<u8> {
    format!("f{number:07}").into_bytes()
}

pub(crate) fn add(fs: &FileSystem, directory: Ino, name: &[u8], content: &[u8]) -> Outcome<()> {
    let ino = fs.create_and_open(directory, name, 0o644, CREATOR)?.ino;
    fs.write(ino, 0, content)?;
    Ok(fs.release(ino)?)
}

/// Adds files one at a time, in directories of [`PER_DIRECTORY`], and returns the directories.
pub(crate) fn add_each(fs: &FileSystem, files: Range<usize>, content: &dyn Fn(usize) -> Vec<u8>) -> Outcome<Vec<Ino>> {
    let mut directories = Vec::new();
    for numbers in by_directory(files) {
        let directory = make_directory(fs, numbers.start)?;
        directories.push(directory);
        numbers.into_iter().try_for_each(|number| add(fs, directory, &name(number), &content(number)))?;
    }
    Ok(directories)
}

/// Adds files in bulk, in directories of [`PER_DIRECTORY`], and returns the directories.
pub(crate) fn add_many(fs: &FileSystem, files: Range<usize>, content: &dyn Fn(usize) -> Vec<u8>) -> Outcome<Vec<Ino>> {
    let mut directories = Vec::new();
    for numbers in by_directory(files) {
        let directory = make_directory(fs, numbers.start)?;
        directories.push(directory);
        let made: Vec<(Vec<u8>, Vec<u8>)> = numbers.map(|number| (name(number), content(number))).collect();
        let new: Vec<NewFile<'_>> = made.iter().map(|(name, content)| new_file(directory, name, content)).collect();
        fs.add_files(&new)?.into_iter().collect::<Result<Vec<Ino>, _>>()?;
    }
    Ok(directories)
}

fn new_file<'a>(directory: Ino, name: &'a [u8], content: &'a [u8]) -> NewFile<'a> {
    let Creator { uid, gid, .. } = CREATOR;
    NewFile { directory, name, mode: 0o644, uid, gid, atime: None, mtime: None, xattrs: &[], content }
}

fn by_directory(files: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let mut next = files.start;
    std::iter::from_fn(move || {
        let first = next;
        next = (first / PER_DIRECTORY + 1).saturating_mul(PER_DIRECTORY).min(files.end);
        (first < files.end).then_some(first..next)
    })
}

fn make_directory(fs: &FileSystem, first: usize) -> Outcome<Ino> {
    let name = format!("d{:05}", first / PER_DIRECTORY).into_bytes();
    Ok(fs.make_directory(ROOT_INO, &name, 0o755, CREATOR)?.ino)
}
