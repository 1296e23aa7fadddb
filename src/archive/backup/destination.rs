//! Destination file of a backup: the existing file, locked, or a new file that gets the name when
//! it is complete.
//!
//! File and names belong to the requesting user; the daemon that reads the archive receives open
//! files only.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::archive::compact::replace::{self, OldArchive};
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::ArchiveId;
use crate::keys::header::{self, Header};
use crate::storage::{FileStorage, HostEntry, IpcStorage, Storage};

/// Word in the name of an unfinished backup.
const UNFINISHED: &str = "backup";

/// Timeout of one response over a lent socket.
const LENT: Duration = Duration::from_secs(600);
/// Word in the name of a temporary file for a pipe.
const PASSING: &str = "pipe";

pub(super) const OTHER_ARCHIVE: &str = "it is, or is a backup of, another archive";
pub(super) const NO_ARCHIVE: &str = "it is no archive";

/// Destination path of a backup.
pub struct BackupDestination {
    entry: HostEntry,
    /// Existing file with that name.
    old: Option<OldArchive>,
}

/// New file in the directory of the destination, removed on drop until it has the name.
pub struct NewBackupFile(replace::UnfinishedFile);

impl NewBackupFile {
    pub fn file(&self) -> Arc<FileStorage> {
        self.0.shared()
    }

    /// Unlinks the file, so that it is deleted when it is closed, even if the process is killed. To
    /// be called after the file is filled, so that no data is written to a file that the user
    /// cannot find.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn without_name(self) -> Result<Arc<FileStorage>> {
        self.0.without_name()
    }
}

impl BackupDestination {
    /// Opens the destination. With `follow` the path may be a symbolic link: a caller that lets
    /// another user's daemon write there must not follow links that this user may have created.
    ///
    /// # Errors
    /// `InUse` when another process has it open, failures of the host.
    pub fn open(path: &Path, follow: bool) -> Result<BackupDestination> {
        let failed = |e| Error::io(format!("cannot look at {}", path.display()), e);
        let there = if follow { std::fs::canonicalize(path) } else { path.symlink_metadata().map(|_| path.into()) };
        match there {
            Ok(real) => {
                let old = OldArchive::open(&real)?;
                Ok(BackupDestination { entry: old.entry().try_clone().map_err(failed)?, old: Some(old) })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let entry = HostEntry::of(path).map_err(failed)?;
                Ok(BackupDestination { entry, old: None })
            }
            Err(e) => Err(failed(e)),
        }
    }

    /// Checks by its header, without a key, that a file belongs to this archive. A caller that lets
    /// a daemon write the file calls this before that, and before the file gets a name.
    ///
    /// # Errors
    /// `Refused` for another archive or no archive.
    pub fn check_archive(file: &dyn Storage, archive: &ArchiveId) -> Result<()> {
        match Header::read(file) {
            Ok(header) if header.framing().archive == *archive => Ok(()),
            Ok(_) => Err(Error::Refused(Refusal::Destination { why: OTHER_ARCHIVE })),
            Err(Error::NotArchive(_)) => Err(Error::Refused(Refusal::Destination { why: NO_ARCHIVE })),
            Err(error) => Err(super::in_backup(error)),
        }
    }

    /// Returns the existing file with the name.
    pub fn existing(&self) -> Option<&Arc<FileStorage>> {
        self.old.as_ref().map(OldArchive::storage)
    }

    /// Returns the storage of a file, which another process opened, locked and names; or of a
    /// socket, over which it lends another kind of storage.
    ///
    /// # Errors
    /// As [`FileStorage::adopt`], and failures of the socket.
    pub fn adopt(file: OwnedFd) -> Result<Arc<dyn Storage>> {
        let failed = |error: io::Error| Error::io("cannot look at where the backup goes", error);
        let stat = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
            return Ok(Arc::new(FileStorage::adopt(file, Path::new("the backup"))?));
        }
        let socket = UnixStream::from(file);
        // The lender may wait for a network, but not without limit, because the end of the mount
        // waits for this.
        socket.set_read_timeout(Some(LENT)).and_then(|()| socket.set_write_timeout(Some(LENT))).map_err(failed)?;
        Ok(Arc::new(IpcStorage::new(vec![socket], true)?))
    }

    /// Creates a temporary file for a backup into a pipe, removed on drop. Leftovers of killed runs
    /// are removed now.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn temporary() -> Result<NewBackupFile> {
        BackupDestination::temporary_in(&std::env::temp_dir())
    }

    fn temporary_in(directory: &Path) -> Result<NewBackupFile> {
        let entry = HostEntry::of(&directory.join("lockbox"))
            .map_err(|e| Error::io(format!("cannot look at {}", directory.display()), e))?;
        // Complete or not: these files were never meant to be kept.
        replace::remove_leftovers(&entry, PASSING, &mut |_| Ok(true));
        Ok(NewBackupFile(replace::UnfinishedFile::new(&entry, PASSING, &SystemEnvironment)?))
    }

    /// Creates a new file, and removes leftovers of earlier runs.
    ///
    /// # Errors
    /// Failures of the host.
    pub fn create_new(&self) -> Result<NewBackupFile> {
        self.old.as_ref().map_or(Ok(()), check_links)?;
        // Without a header it is not an archive yet (BACKUP-3).
        let others =
            replace::remove_leftovers(&self.entry, UNFINISHED, &mut |retained| Ok(!header::is_begun(&*retained)?));
        for name in others {
            tracing::warn!(
                name,
                "this file lies beside the backup, and an earlier run may have left it: look at it, then remove it"
            );
        }
        Ok(NewBackupFile(replace::UnfinishedFile::new(&self.entry, UNFINISHED, &SystemEnvironment)?))
    }

    /// Checks that the name still denotes the file that was opened.
    ///
    /// # Errors
    /// `InUse`.
    pub fn check(&self) -> Result<()> {
        let Some(old) = &self.old else { return Ok(()) };
        match self.entry.refers_to(&**old.storage()) {
            Ok(true) => Ok(()),
            _ => Err(Error::InUse(format!(
                "the file that was brought up to date has not the name {} any more",
                self.entry.path().display()
            ))),
        }
    }

    /// Renames the new file over the existing one.
    ///
    /// # Errors
    /// `InUse` when the name denotes another file by now, with nothing changed.
    pub fn take(self, new_file: NewBackupFile) -> Result<()> {
        let Some(old) = self.old else { return new_file.0.publish(&self.entry) };
        check_links(&old)?;
        new_file.0.copy_metadata(&old)?;
        if let Some(retained) = new_file.0.replace(&old)? {
            retained.report(&old, false)?;
        }
        Ok(())
    }
}

/// Checks that the file has one name.
///
/// # Errors
/// `Refused` for a file that cannot be replaced under all its names.
fn check_links(old: &OldArchive) -> Result<()> {
    match old.links()? {
        0 | 1 => Ok(()),
        _ => Err(Error::Refused(Refusal::Destination {
            why: "it has several names (hard links), and the others would keep the old backup",
        })),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_into_a_pipe_has_no_name_when_it_is_filled_and_leaves_none() {
        let directory = tempfile::tempdir().unwrap();
        let names = || std::fs::read_dir(directory.path()).unwrap().count();
        let killed = BackupDestination::temporary_in(directory.path()).unwrap();
        killed.file().write_at(0, &[7; 9000]).unwrap();
        let next = BackupDestination::temporary_in(directory.path()).unwrap();
        assert_eq!(names(), 2, "somebody is about it");
        // Without its end; the lock goes with the process.
        let path = directory.path().join(".lockbox.pipe-0123456789abcdef");
        std::fs::copy(std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path(), &path).unwrap();
        drop((killed, next));
        assert_eq!(names(), 1);
        let filled = BackupDestination::temporary_in(directory.path()).unwrap();
        assert!(!path.exists() && names() == 1);
        filled.file().write_at(0, &[7; 9000]).unwrap();
        let file = filled.without_name().unwrap();
        assert_eq!(names(), 0);
        let mut back = [0; 9000];
        file.read_at(0, &mut back).unwrap();
        assert_eq!(back, [7; 9000]);
    }
}
