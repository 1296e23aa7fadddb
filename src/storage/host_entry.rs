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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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
    pub fn sibling(&self, name: OsString) -> io::Result<HostEntry> {
        Ok(HostEntry { directory: self.directory.try_clone()?, path: self.path.with_file_name(&name), name })
    }

    /// The same, held once more.
    pub fn try_clone(&self) -> io::Result<HostEntry> {
        self.sibling(self.name.clone())
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
            Ok(named) => Ok(FileIdentity::from(&named) == FileIdentity::of(file)?),
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
        let (from, to) = (self.directory.as_fd(), other.directory.as_fd());
        Ok(rename_to_free_name(from, self.name.as_bytes(), to, other.name.as_bytes())?)
    }

    /// All names of the directory but `.` and `..`.
    pub fn names(&self) -> io::Result<Vec<OsString>> {
        Ok(names(self.open_directory()?)?.into_iter().map(OsString::from_vec).collect())
    }

    /// Makes the directory's names durable.
    pub fn sync_directory(&self) -> io::Result<()> {
        Ok(host_call::sync_directory(self.open_directory()?)?)
    }

    /// The very directory, opened for reading.
    fn open_directory(&self) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(&self.directory, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// Moves `name` of the directory `from` to the name `free` of the directory `to`, both of one file
/// system, unless something has that.
///
/// File systems differ in their abilities, so three ways are tried: a rename that replaces
/// nothing; a second name, which is refused when something has it, before the first one goes; and a
/// look before an ordinary rename. Only the last has a gap, in which another program can make a
/// file of the name that the rename replaces. It is for file systems without the flag and without
/// hard links, such as exFAT and many in user space, and for directories on those without the flag.
///
/// # Errors
/// `EXIST` when something has the name.
pub fn rename_to_free_name(
    from: BorrowedFd<'_>,
    name: &[u8],
    to: BorrowedFd<'_>,
    free: &[u8],
) -> rustix::io::Result<()> {
    RenameStep { from, name, to, free }.carry_out(&KernelCalls)
}

/// A file or directory on its way to a name that nothing has.
struct RenameStep<'a> {
    from: BorrowedFd<'a>,
    name: &'a [u8],
    to: BorrowedFd<'a>,
    free: &'a [u8],
}

/// The two calls that file systems lack.
trait ExclusiveCalls {
    fn rename(&self, step: &RenameStep<'_>) -> rustix::io::Result<()>;
    fn link(&self, step: &RenameStep<'_>) -> rustix::io::Result<()>;
}

struct KernelCalls;

impl ExclusiveCalls for KernelCalls {
    fn rename(&self, step: &RenameStep<'_>) -> rustix::io::Result<()> {
        rustix::fs::renameat_with(step.from, step.name, step.to, step.free, RenameFlags::NOREPLACE)
    }

    fn link(&self, step: &RenameStep<'_>) -> rustix::io::Result<()> {
        rustix::fs::linkat(step.from, step.name, step.to, step.free, AtFlags::empty())
    }
}

impl RenameStep<'_> {
    fn carry_out(&self, calls: &impl ExclusiveCalls) -> rustix::io::Result<()> {
        match calls.rename(self) {
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            other => return other,
        }
        match calls.link(self) {
            Ok(()) => return rustix::fs::unlinkat(self.from, self.name, AtFlags::empty()),
            // PERM is also the answer to a directory; MLINK that of file systems that count one name at most.
            Err(Errno::PERM | Errno::NOSYS | Errno::NOTSUP | Errno::INVAL | Errno::MLINK) => {}
            Err(errno) => return Err(errno),
        }
        match rustix::fs::statat(self.to, self.free, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) => Err(Errno::EXIST),
            Err(Errno::NOENT) => rustix::fs::renameat(self.from, self.name, self.to, self.free),
            Err(errno) => Err(errno),
        }
    }
}

/// What tells a file from every other one that exists at the same time: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity(u64, u64);

impl FileIdentity {
    pub fn of(file: impl AsFd) -> rustix::io::Result<FileIdentity> {
        Ok(FileIdentity::from(&rustix::fs::fstat(file)?))
    }
}

impl From<&Stat> for FileIdentity {
    fn from(stat: &Stat) -> FileIdentity {
        FileIdentity(stat.st_dev, stat.st_ino)
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

    /// A file system without the flag, with or without hard links.
    struct Lacking {
        flag: Errno,
        links: Option<Errno>,
    }

    impl ExclusiveCalls for Lacking {
        fn rename(&self, _: &RenameStep<'_>) -> rustix::io::Result<()> {
            Err(self.flag)
        }

        fn link(&self, step: &RenameStep<'_>) -> rustix::io::Result<()> {
            self.links.map_or_else(|| KernelCalls.link(step), Err)
        }
    }

    #[test]
    fn a_free_name_is_given_on_every_file_system_and_a_taken_one_on_none() {
        let (inval, links) = (Errno::INVAL, [Errno::PERM, Errno::NOSYS, Errno::NOTSUP, Errno::MLINK]);
        let mut hosts = vec![Lacking { flag: inval, links: None }, Lacking { flag: Errno::NOSYS, links: None }];
        hosts.extend(links.map(|errno| Lacking { flag: inval, links: Some(errno) }));
        for (number, host) in hosts.iter().enumerate() {
            for is_directory in [false, true] {
                let place = tempfile::tempdir().unwrap();
                let path = |name: &str| place.path().join(name);
                match is_directory {
                    true => fs::create_dir(path("made")).unwrap(),
                    false => fs::write(path("made"), "made").unwrap(),
                }
                fs::write(path("taken"), "precious").unwrap();
                symlink("nowhere", path("link")).unwrap();
                let directory = File::open(place.path()).unwrap();
                let step = |free| {
                    RenameStep { from: directory.as_fd(), name: b"made", to: directory.as_fd(), free }.carry_out(host)
                };
                for taken in [&b"taken"[..], b"link"] {
                    assert_eq!(step(taken), Err(Errno::EXIST), "{number}");
                }
                assert_eq!(step(b"free"), Ok(()), "{number} {is_directory}");
                assert_eq!(fs::read(path("taken")).unwrap(), b"precious");
                assert!(!path("made").exists() && path("free").is_dir() == is_directory && path("free").exists());
            }
        }
    }

    #[test]
    fn an_entry_has_a_name() {
        for path in ["/", "..", "some/directory/", "directory/.."] {
            assert!(HostEntry::of(Path::new(path)).is_err(), "{path}");
        }
    }
}
