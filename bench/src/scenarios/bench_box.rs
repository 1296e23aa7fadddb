//! An archive in a directory of its own, which goes with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use lockbox::archive::{Archive, CreateOptions, KdfCost, OpenOptions, UnlockedKey};
use lockbox::crypto::Passphrase;
use lockbox::format::{Ino, ROOT_INO};
use lockbox::fs::{Creator, FileSystem};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use crate::{Outcome, Place};

pub(crate) const CREATOR: Creator = Creator { uid: 0, gid: 0, umask: None };

/// Files of one directory in the scenarios with many.
pub(crate) const PER_DIRECTORY: usize = 1000;

/// See the module. The archive is open unless it is being opened again.
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
        // Key derivation is paid once for an archive and is not what is measured.
        Archive::create(&path, &passphrase, &CreateOptions { kdf: KdfCost::TEST, creator: CREATOR })?;
        let key = Archive::unlock(&path, &passphrase)?;
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

    /// Closes it and lets the host forget what it cached of it.
    pub(crate) fn make_cold(&mut self) -> Outcome<()> {
        self.close()?;
        forget(&self.path())
    }

    pub(crate) fn open(&mut self) -> Outcome<()> {
        self.archive = Some(Archive::open(&self.path(), &self.key, &self.options)?);
        Ok(())
    }

    /// Bytes that the file takes on the host.
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

/// Drops what the host caches of a file, which must be synced for that.
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

/// Adds files `first..last` in directories of [`PER_DIRECTORY`], which come into being with their first file; answers the directories.
pub(crate) fn add_many(
    fs: &FileSystem,
    files: std::ops::Range<usize>,
    content: &dyn Fn(usize) -> Vec<u8>,
) -> Outcome<Vec<Ino>> {
    let mut directories = Vec::new();
    for number in files {
        if number % PER_DIRECTORY == 0 || directories.is_empty() {
            let name = format!("d{:05}", number / PER_DIRECTORY).into_bytes();
            directories.push(fs.make_directory(ROOT_INO, &name, 0o755, CREATOR)?.ino);
        }
        if let Some(directory) = directories.last() {
            add(fs, *directory, &name(number), &content(number))?;
        }
    }
    Ok(directories)
}
