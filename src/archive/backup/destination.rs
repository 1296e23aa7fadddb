//! The file that a backup goes to: what has the name now, locked, or a new file beside it that takes the name when it is done.
//!
//! It belongs to whoever asks for the backup, and so do all names: who reads the archive is given open files alone.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::archive::compact::replace::{self, Old};
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::ArchiveId;
use crate::keys::header::{self, Header};
use crate::storage::{FileStorage, HostEntry, IpcStorage, Storage};

/// What the name of an unfinished file says.
const UNFINISHED: &str = "backup";

/// How long one answer of a lender may take.
const LENT: Duration = Duration::from_secs(600);
/// What the name of a file says that goes into a pipe.
const PASSING: &str = "pipe";

pub(super) const OTHER_ARCHIVE: &str = "it is, or is a backup of, another archive";
pub(super) const NO_ARCHIVE: &str = "it is no archive";

/// Where a backup goes.
pub struct Destination {
    entry: HostEntry,
    /// What has the name.
    old: Option<Old>,
}

/// A new file beside the destination, removed when it is dropped before it has the name.
pub struct Beside(replace::Beside);

impl Beside {
    pub fn file(&self) -> Arc<FileStorage> {
        self.0.shared()
    }

    /// Takes the name away: the file is gone once nobody has it open, whoever is killed meanwhile. Not before it is filled: nothing writes into a file that
    /// nobody could find.
    ///
    /// # Errors
    /// Those of the host.
    pub fn without_name(self) -> Result<Arc<FileStorage>> {
        self.0.without_name()
    }
}

impl Destination {
    /// `follow` says whether the name may be a link: who lets another user's daemon write there follows none that this user may have put there.
    ///
    /// # Errors
    /// `InUse` when somebody has it open, those of the host.
    pub fn open(path: &Path, follow: bool) -> Result<Destination> {
        let failed = |e| Error::io(format!("cannot look at {}", path.display()), e);
        let there = if follow { std::fs::canonicalize(path) } else { path.symlink_metadata().map(|_| path.into()) };
        match there {
            Ok(real) => {
                let old = Old::open(&real)?;
                Ok(Destination { entry: old.entry().try_clone().map_err(failed)?, old: Some(old) })
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                let entry = HostEntry::of(path).map_err(failed)?;
                Ok(Destination { entry, old: None })
            }
            Err(e) => Err(failed(e)),
        }
    }

    /// Whether a file is one of this archive, as far as its header tells without a key: who has others write into it asks before they do, and before it gets
    /// a name.
    ///
    /// # Errors
    /// `Refused` when it is not.
    pub fn check_archive(file: &dyn Storage, archive: &ArchiveId) -> Result<()> {
        match Header::read(file) {
            Ok(header) if header.framing().archive == *archive => Ok(()),
            Ok(_) => Err(Error::Refused(Refusal::Destination { why: OTHER_ARCHIVE })),
            Err(Error::NotArchive(_)) => Err(Error::Refused(Refusal::Destination { why: NO_ARCHIVE })),
            Err(error) => Err(super::in_backup(error)),
        }
    }

    /// The file that has the name.
    pub fn existing(&self) -> Option<&Arc<FileStorage>> {
        self.old.as_ref().map(Old::storage)
    }

    /// A file that another process opened and locked, and whose name is its work; or a socket on which it lends what is no file.
    ///
    /// # Errors
    /// As [`FileStorage::adopt`]; when nobody lends anything there.
    pub fn given(file: OwnedFd) -> Result<Arc<dyn Storage>> {
        let failed = |error: io::Error| Error::io("cannot look at where the backup goes", error);
        let stat = rustix::fs::fstat(&file).map_err(|error| failed(error.into()))?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::Socket {
            return Ok(Arc::new(FileStorage::adopt(file, Path::new("the backup"))?));
        }
        let socket = UnixStream::from(file);
        // Who lends it waits for a network, but not for ever: a mount that is to end waits for this.
        socket.set_read_timeout(Some(LENT)).and_then(|()| socket.set_write_timeout(Some(LENT))).map_err(failed)?;
        Ok(Arc::new(IpcStorage::new(vec![socket], true)?))
    }

    /// A new file for what goes into a pipe; it is removed when the answer is dropped, and what killed runs left of such files is removed now.
    ///
    /// # Errors
    /// Those of the host.
    pub fn temporary() -> Result<Beside> {
        Destination::temporary_in(&std::env::temp_dir())
    }

    fn temporary_in(directory: &Path) -> Result<Beside> {
        let entry = HostEntry::of(&directory.join("lockbox"))
            .map_err(|e| Error::io(format!("cannot look at {}", directory.display()), e))?;
        // Whole or not: nobody was to have it.
        replace::remove_leftovers(&entry, PASSING, &mut |_| Ok(true));
        Ok(Beside(replace::Beside::new(&entry, PASSING, &SystemEnvironment)?))
    }

    /// Makes a new file, and removes those that earlier runs left unfinished.
    ///
    /// # Errors
    /// Those of the host.
    pub fn beside(&self) -> Result<Beside> {
        self.old.as_ref().map_or(Ok(()), check_links)?;
        // Without a header it is nothing yet (BACKUP-3).
        let others = replace::remove_leftovers(&self.entry, UNFINISHED, &mut |left| Ok(!header::is_begun(&*left)?));
        for name in others {
            tracing::warn!(
                name,
                "this file lies beside the backup, and an earlier run may have left it: look at it, then remove it"
            );
        }
        Ok(Beside(replace::Beside::new(&self.entry, UNFINISHED, &SystemEnvironment)?))
    }

    /// Says when the name means another file by now than the one that was there.
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

    /// Gives the new file the name; the one that had it goes.
    ///
    /// # Errors
    /// `InUse` when the name means another file by now; then nothing was changed.
    pub fn take(self, beside: Beside) -> Result<()> {
        let Some(old) = self.old else { return beside.0.publish(&self.entry) };
        check_links(&old)?;
        beside.0.take_after(&old)?;
        if let Some(left) = beside.0.replace(&old)? {
            left.tell(&old, false)?;
        }
        Ok(())
    }
}

/// # Errors
/// `Refused` for a file that cannot be replaced under all its names.
fn check_links(old: &Old) -> Result<()> {
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
        let killed = Destination::temporary_in(directory.path()).unwrap();
        killed.file().write_at(0, &[7; 9000]).unwrap();
        let next = Destination::temporary_in(directory.path()).unwrap();
        assert_eq!(names(), 2, "somebody is about it");
        // Without its end; the lock goes with the process.
        let path = directory.path().join(".lockbox.pipe-0123456789abcdef");
        std::fs::copy(std::fs::read_dir(directory.path()).unwrap().next().unwrap().unwrap().path(), &path).unwrap();
        drop((killed, next));
        assert_eq!(names(), 1);
        let filled = Destination::temporary_in(directory.path()).unwrap();
        assert!(!path.exists() && names() == 1);
        filled.file().write_at(0, &[7; 9000]).unwrap();
        let file = filled.without_name().unwrap();
        assert_eq!(names(), 0);
        let mut back = [0; 9000];
        file.read_at(0, &mut back).unwrap();
        assert_eq!(back, [7; 9000]);
    }
}
