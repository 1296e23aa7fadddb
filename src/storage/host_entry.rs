//! Directory entry of the host in an opened directory, safe against concurrent changes of the path.
//!
//! A user with write access to the directory can still exchange the entry at any moment. Created
//! and opened files are therefore identified by their descriptor: owner, mode and attributes are
//! set there, and the name is only touched while it refers to that file. Between this check and the
//! following call the name may come to refer to another file. The call then changes an entry that
//! this user could have changed directly; it never affects an entry of another directory, or
//! another file's content, owner or mode. Where such a race must not lose data
//! (`archive/compact/replace.rs`), entries are exchanged instead of replaced, and checked again.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, RenameFlags, Stat};
use rustix::io::Errno;

use super::host_call;

/// Directory entry; the file need not exist.
pub struct HostEntry {
    /// Opened with O_PATH: search permission suffices, as for a path.
    directory: OwnedFd,
    name: OsString,
    /// Absolute path, for messages.
    path: PathBuf,
}

impl HostEntry {
    /// Opens the parent directory of `path`. Follows links in the parent path, never in the entry
    /// itself.
    pub fn of(path: &Path) -> io::Result<HostEntry> {
        let path = std::path::absolute(path)?;
        let name = match path.file_name() {
            Some(name) if path.as_os_str().as_bytes().ends_with(name.as_bytes()) => name.to_owned(),
            _ => return Err(Errno::ISDIR.into()),
        };
        // A path with a file name has a parent.
        let parent = path.parent().unwrap_or(Path::new("/"));
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::openat(CWD, parent, flags, Mode::empty())?;
        Ok(HostEntry { directory, name, path })
    }

    /// Returns another entry of the same directory.
    pub fn sibling(&self, name: OsString) -> io::Result<HostEntry> {
        Ok(HostEntry { directory: self.directory.try_clone()?, path: self.path.with_file_name(&name), name })
    }

    pub(crate) fn try_clone(&self) -> io::Result<HostEntry> {
        self.sibling(self.name.clone())
    }

    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// Returns the path from when the directory was opened, for messages.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a file with mode 0600; fails if the name exists.
    pub fn create(&self) -> io::Result<File> {
        self.open_with(OFlags::RDWR | OFlags::CREATE | OFlags::EXCL)
    }

    /// Opens the file without waiting for the other end of a FIFO.
    pub fn open(&self, write: bool) -> io::Result<File> {
        let access = if write { OFlags::RDWR } else { OFlags::RDONLY };
        self.open_with(access | OFlags::NONBLOCK | OFlags::NOCTTY)
    }

    fn open_with(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(rustix::fs::openat(&self.directory, &self.name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Creates a durable file of mode 0600 with this content; removes it after a failure.
    pub fn write_new(&self, content: &[u8]) -> io::Result<()> {
        let mut file = self.create()?;
        let written = file.write_all(content).and_then(|()| file.sync_all()).and_then(|()| self.sync_directory());
        written.inspect_err(|_| {
            // The first failure is reported.
            let _ = self.remove(&file);
        })
    }

    pub(crate) fn refers_to(&self, file: impl AsFd) -> io::Result<bool> {
        match self.stat(AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok(FileIdentity::from(&named) == FileIdentity::of(file)?),
            Err(Errno::NOENT) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(super) fn stat(&self, how: AtFlags) -> std::result::Result<Stat, Errno> {
        rustix::fs::statat(&self.directory, &self.name, how)
    }

    /// Removes the name if it refers to `file`; returns whether it did.
    pub fn remove(&self, file: impl AsFd) -> io::Result<bool> {
        let ours = self.refers_to(file)?;
        if ours {
            rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty())?;
        }
        Ok(ours)
    }

    /// Atomically exchanges the files of two names in one directory.
    ///
    /// # Errors
    /// `Unsupported` where the host's file system cannot exchange names.
    pub(crate) fn exchange(&self, other: &HostEntry) -> io::Result<()> {
        rustix::fs::renameat_with(&self.directory, &self.name, &self.directory, &other.name, RenameFlags::EXCHANGE)
            .map_err(|errno| match errno {
                Errno::INVAL | Errno::NOSYS | Errno::NOTSUP => io::ErrorKind::Unsupported.into(),
                errno => errno.into(),
            })
    }

    /// Renames the entry to another name of the directory, replacing its file.
    pub fn rename(&self, other: &HostEntry) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.directory, &self.name, &self.directory, &other.name)?)
    }

    /// Renames the entry to an unused name of the directory.
    ///
    /// # Errors
    /// `AlreadyExists`.
    pub(crate) fn rename_new(&self, other: &HostEntry) -> io::Result<()> {
        let (from, to) = (self.directory.as_fd(), other.directory.as_fd());
        Ok(rename_to_free_name(from, self.name.as_bytes(), to, other.name.as_bytes())?)
    }

    pub(crate) fn names(&self) -> io::Result<Vec<OsString>> {
        Ok(names(self.open_directory()?)?.into_iter().map(OsString::from_vec).collect())
    }

    /// Makes the directory's names durable.
    pub(crate) fn sync_directory(&self) -> io::Result<()> {
        Ok(host_call::sync_directory(self.open_directory()?)?)
    }

    fn open_directory(&self) -> io::Result<OwnedFd> {
        Ok(rustix::fs::openat(&self.directory, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
    }
}

/// Renames `name` of directory `from` to the unused name `free` of directory `to` on the same file
/// system.
///
/// File systems differ in their abilities, so three ways are tried: a rename that never replaces; a
/// hard link, which fails if the name exists, followed by removal of the old name; and a check
/// before an ordinary rename. Only the last one has a race, in which the rename replaces a file
/// that another program creates at that moment. It is used on file systems without the rename flag
/// and without hard links, such as exFAT and many in user space, and for directories on those
/// without the flag.
///
/// # Errors
/// `EXIST` when the name exists.
pub fn rename_to_free_name(
    from: BorrowedFd<'_>,
    name: &[u8],
    to: BorrowedFd<'_>,
    free: &[u8],
) -> rustix::io::Result<()> {
    RenameStep { from, name, to, free }.carry_out(&KernelCalls)
}

struct RenameStep<'a> {
    from: BorrowedFd<'a>,
    name: &'a [u8],
    to: BorrowedFd<'a>,
    free: &'a [u8],
}

/// Exclusive rename calls, which some file systems lack.
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
            // PERM is also the error for a directory; MLINK that of file systems with at most one
            // name per file.
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

/// Identity of a file among all that exist at the same time: device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity(u64, u64);

impl FileIdentity {
    pub(crate) fn of(file: impl AsFd) -> rustix::io::Result<FileIdentity> {
        Ok(FileIdentity::from(&rustix::fs::fstat(file)?))
    }
}

impl From<&Stat> for FileIdentity {
    fn from(stat: &Stat) -> FileIdentity {
        FileIdentity(stat.st_dev, stat.st_ino)
    }
}

/// Returns all names of an opened directory except `.` and `..`.
pub(crate) fn names(directory: impl AsFd) -> rustix::io::Result<Vec<Vec<u8>>> {
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

    /// Creates a directory with the entry `in/file`, opened.
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

    /// File system without the rename flag, with or without hard links.
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
