//! Renames and creates directories inside a mount for a restore; path resolution never leaves the
//! mount.
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use lockbox_host::shown;
use rustix::fs::{Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Result;

use crate::exit::Failure;

/// File system type that fstatfs(2) reports for every FUSE file system.
const FUSE: rustix::fs::FsWord = 0x6573_5546;
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// The root of a mount.
pub(crate) struct MountedTree(OwnedFd);

impl MountedTree {
    /// # Errors
    /// When nothing of a program's is mounted there, as this process sees it.
    pub(crate) fn open(point: &Path) -> std::result::Result<MountedTree, Failure> {
        let root = rustix::fs::open(point, DIRECTORY | OFlags::NOFOLLOW, Mode::empty());
        let found = root.and_then(|root| Ok((rustix::fs::fstatfs(&root)?.f_type, root)));
        let cannot = |why: &str| Failure::other(format!("cannot work in {}: {why}", shown(point)));
        match found {
            Ok((FUSE, root)) => Ok(MountedTree(root)),
            Ok(_) => Err(cannot("the archive is not mounted there for this process")),
            Err(errno) => Err(cannot(&lockbox_terminal::without_numbers(std::io::Error::from(errno).to_string()))),
        }
    }

    /// Renames an object to a path that must not exist or, with `exchange`, to one whose object
    /// gets its path.
    pub(crate) fn rename(&self, from: &[u8], to: &[u8], exchange: bool) -> Result<()> {
        let flags = if exchange { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        let ((from, name), (to, new_name)) = (self.parent(from)?, self.parent(to)?);
        rustix::fs::renameat_with(&from, name, &to, new_name, flags)
    }

    pub(crate) fn make_directory(&self, path: &[u8]) -> Result<()> {
        let (directory, name) = self.parent(path)?;
        rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755))
    }

    /// Returns the directory of a path, and its name there.
    fn parent<'p>(&self, path: &'p [u8]) -> Result<(OwnedFd, &'p OsStr)> {
        let slash = path.iter().rposition(|&byte| byte == b'/');
        let (directory, name) = slash.map_or((&b"."[..], path), |at| (&path[..at], &path[at + 1..]));
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let opened = rustix::fs::openat2(&self.0, OsStr::from_bytes(directory), DIRECTORY, Mode::empty(), within)?;
        Ok((opened, OsStr::from_bytes(name)))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rustix::io::Errno;

    use super::*;

    fn tree(path: &Path) -> MountedTree {
        MountedTree(rustix::fs::open(path, DIRECTORY, Mode::empty()).unwrap())
    }

    #[test]
    fn names_change_below_the_root_and_lead_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let (root, outside) = (place.path().join("root"), place.path().join("outside"));
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(root.join("a/b/file"), "new").unwrap();
        fs::write(root.join("file"), "old").unwrap();
        std::os::unix::fs::symlink(&outside, root.join("link")).unwrap();
        let tree = tree(&root);
        tree.rename(b"a/b/file", b"file", true).unwrap();
        assert_eq!(fs::read_to_string(root.join("file")).unwrap(), "new");
        assert_eq!(fs::read_to_string(root.join("a/b/file")).unwrap(), "old");
        assert_eq!(tree.rename(b"a/b/file", b"file", false), Err(Errno::EXIST));
        assert_eq!(tree.rename(b"a/b/file", b"other", true), Err(Errno::NOENT));
        tree.make_directory(b"a/c").unwrap();
        for away in [&b"link/x"[..], b"../outside/x", b"/etc/x"] {
            assert!(tree.make_directory(away).is_err() && tree.rename(b"file", away, false).is_err());
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_directory_that_is_no_mount_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let refused = MountedTree::open(place.path()).map(drop).unwrap_err();
        assert!(refused.message.contains("not mounted there"), "{}", refused.message);
    }
}
