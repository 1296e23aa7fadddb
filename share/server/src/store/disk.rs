//! Where the files of a store are: a directory, or something that stands in for one in tests.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::barrier_group::Syncable;

/// Flat directory of files. Writes are durable after the file's `sync`, names after the
/// directory's.
pub(crate) trait Disk: Send + Sync {
    fn list(&self) -> io::Result<Vec<String>>;
    /// A new file, or an empty one in place of an old one.
    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>>;
    fn remove(&self, name: &str) -> io::Result<()>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// A barrier over the names.
    fn names(&self) -> Arc<dyn Syncable>;
}

/// An open file. Its name may go meanwhile.
pub(crate) trait DiskFile: Syncable {
    /// Fewer bytes than asked for mean the end of the file.
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize>;
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()>;
    fn length(&self) -> io::Result<u64>;
}

/// A directory that only its owner reads.
pub(crate) struct DirectoryDisk {
    path: PathBuf,
}

impl DirectoryDisk {
    /// Makes the directory when it is missing.
    pub(crate) fn open(path: &Path) -> io::Result<DirectoryDisk> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(DirectoryDisk { path: path.into() })
    }
}

struct Names(PathBuf);

impl Syncable for Names {
    fn sync(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }
}

struct HostFile(File);

impl Syncable for HostFile {
    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}

impl DiskFile for HostFile {
    fn read_at(&self, out: &mut [u8], at: u64) -> io::Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            match self.0.read_at(&mut out[filled..], at + filled as u64) {
                Ok(0) => break,
                Ok(n) => filled += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(filled)
    }

    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        self.0.write_all_at(bytes, at)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }
}

impl Disk for DirectoryDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    }

    fn create(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        let path = self.path.join(name);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)?;
        Ok(Arc::new(HostFile(file)))
    }

    fn open(&self, name: &str) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(HostFile(OpenOptions::new().read(true).write(true).open(self.path.join(name))?)))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn names(&self) -> Arc<dyn Syncable> {
        Arc::new(Names(self.path.clone()))
    }
}
