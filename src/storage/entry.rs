//! A name in a directory of the host that is held open, so that nobody who changes the path can lead what is done to it elsewhere.
//!
//! Whoever may write the directory can still exchange what has the name, at any moment. So what was made or opened is known by its
//! descriptor: owner, mode and attributes are set there, and the name is touched only while it names that very file. Between such a look and
//! the call that follows, the name can come to mean another file; then the call changes an entry of that directory, which whoever
//! exchanged it could have changed alone: no entry of another directory, and no file's content, owner or mode. What must not be lost
//! by that (`archive/compact/replace.rs`) is exchanged instead of replaced, and looked at again.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::host_call;

/// The entry, whether there is a file or not.
pub struct HostEntry {
    /// O_PATH: search permission is enough, as for a path.
    directory: OwnedFd,
    name: OsString,
    /// For messages; absolute.
    path: PathBuf,
}

impl HostEntry {
    /// Opens the directory of `path`; links on the way there are followed, one in the entry itself never is.
    pub fn of(path: &Path) -> io::Result<HostEntry> {
        let path = std::path::absolute(path)?;
        let name = match path.file_name() {
            Some(name) if path.as_os_str().as_bytes().ends_with(name.as_bytes()) => name.to_owned(),
            _ => return Err(Errno::ISDIR.into()),
        };
        // A path that has a name has a parent.
        let parent = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, parent, flags, Mode::empty())?;
        Ok(HostEntry { directory, name, path })
    }

    /// Another name in the same directory.
    pub fn beside(&self, name: OsString) -> io::Result<HostEntry> {
        Ok(HostEntry { directory: self.directory.try_clone()?, path: self.path.with_file_name(&name), name })
    }

    /// The same, held once more.
    pub fn try_clone(&self) -> io::Result<HostEntry> {
        self.beside(self.name.clone())
    }

    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// The path that it had when it was opened, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a file with mode 0600, refusing whatever has the name.
    pub fn create(&self) -> io::Result<File> {
        self.open_with(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)
    }

    /// Opens what has the name, without waiting for a FIFO's other end.
    pub fn open(&self, write: bool) -> io::Result<File> {
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        self.open_with(access | OFlags::NONBLOCK | OFlags::NOCTTY)
    }

    fn open_with(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.directory, &self.name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Makes a file of mode 0600 with this content, durable under its name; after a failure there is none.
    pub fn write_new(&self, content: &[u8]) -> io::Result<()> {
        let mut file = self.create()?;
        let written = file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| self.sync_directory());
        written.inspect_err(|_| {
            // The first failure is the one to tell.
            let _ = self.remove(&file);
        })
    }

    /// Whether the name is that of `file` now.
    pub fn is(&self, file: impl AsFd) -> io::Result<bool> {
        match self.stat(AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok(Identity::from(&named) == Identity::of(file)?),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    /// What has the name.
    pub(super) fn stat(&self, how: AtFlags) -> std::result::Result<Stat, Errno> {
        rustix::fs::statat(&self.directory, &self.name, how)
    }

    /// Removes the name if it is that of `file`; whether it was.
    pub fn remove(&self, file: impl AsFd) -> io::Result<bool> {
        let ours = self.is(file)?;
        if ours {
            rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty())?;
        }
        Ok(ours)
    }

    /// Gives each of two names of one directory the other's file, at one moment.
    ///
    /// # Errors
    /// `Unsupported` where the host's file system does not know how.
    pub fn exchange(&self, other: &HostEntry) -> io::Result<()> {
        rustix::fs::renameat_with(&self.directory, &self.name, &self.directory, &other.name, RenameFlags::EXCHANGE)
            .map_err(|errno| match errno {
                Errno::INVAL | Errno::NOSYS | Errno::NOTSUP => io::ErrorKind::Unsupported.into(),
                errno => errno.into(),
            })
    }

    /// Moves what has the name to another one of the directory, in place of what has that.
    pub fn rename(&self, other: &HostEntry) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.directory, &self.name, &self.directory, &other.name)?)
    }

    /// Moves what has the name to another one of the directory, which nothing has.
    ///
    /// # Errors
    /// `AlreadyExists`.
    pub fn rename_new(&self, other: &HostEntry) -> io::Result<()> {
        let (from, to) = (&self.directory, &other.directory);
        match rustix::fs::renameat_with(from, &self.name, to, &other.name, RenameFlags::NOREPLACE) {
            // Where the host cannot, a second name is refused when there is one, and the first one goes after that.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {
                rustix::fs::linkat(from, &self.name, to, &other.name, AtFlags::empty())?;
                Ok(rustix::fs::unlinkat(from, &self.name, AtFlags::empty())?)
            }
            renamed => Ok(renamed?),
        }
    }

    /// All names of the directory but `.` and `..`.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        Ok(names(self.opened()?)?.into_iter().map(OsString::from_vec).collect())
    }

    /// Makes the directory's names durable.
    pub fn sync_directory(&self) -> io::Result<()> {
        Ok(host_call::sync_directory(self.opened()?)?)
    }

    /// The very directory, opened for reading.
    fn opened(&self) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(&self.directory, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// What tells a file from every other one that exists at the same time: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity(u64, u64);

impl Identity {
    pub fn of(file: impl AsFd) -> rustix::io::Result<Identity> {
        Ok(Identity::from(&rustix::fs::fstat(file)?))
    }
}

impl From<&Stat> for Identity {
    fn from(stat: &Stat) -> Identity {
        Identity(stat.st_dev, stat.st_ino)
    }
}

/// All names of a directory that is open for reading, but `.` and `..`.
pub fn names(directory: impl AsFd) -> rustix::io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(name);
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    /// A directory with the entry `in/file`, which is opened.
    fn place() -> (tempfile::TempDir, HostEntry) {
        let place = tempfile::tempdir().unwrap();
        fs::create_dir(place.path().join("in")).unwrap();
        let entry = HostEntry::of(&place.path().join("in/file")).unwrap();
        (place, entry)
    }

    #[test]
    fn a_new_file_is_private_and_goes_nowhere_else() {
        let (place, entry) = place();
        symlink("../elsewhere", entry.path()).unwrap();
        assert_eq!(entry.write_new(b"text").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert!(!place.path().join("elsewhere").exists());
        fs::remove_file(entry.path()).unwrap();
        entry.write_new(b"text").unwrap();
        assert_eq!(fs::read(entry.path()).unwrap(), b"text");
        assert_eq!(fs::metadata(entry.path()).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn only_the_file_itself_is_removed_whatever_the_path_means_by_now() {
        let (place, entry) = place();
        let file = entry.create().unwrap();
        fs::rename(place.path().join("in"), place.path().join("moved")).unwrap();
        fs::create_dir(place.path().join("in")).unwrap();
        fs::write(place.path().join("in/file"), "precious").unwrap();
        assert!(entry.remove(&file).unwrap());
        assert!(!place.path().join("moved/file").exists());
        fs::write(place.path().join("moved/file"), "somebody's").unwrap();
        assert!(!entry.remove(&file).unwrap());
        for kept in ["in/file", "moved/file"] {
            assert!(place.path().join(kept).exists(), "{kept}");
        }
    }

    #[test]
    fn an_entry_has_a_name() {
        for path in ["/", "..", "some/directory/", "directory/.."] {
            assert!(HostEntry::of(Path::new(path)).is_err(), "{path}");
        }
    }
}
