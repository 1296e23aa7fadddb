//! Inodes without a name that the kernel still knows: unlinked files, files replaced by a rename,
//! and removed directories (KERNEL-4, KERNEL-6, KERNEL-9).

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use lockbox::format::{self, Ino};
use lockbox::fs::{Attributes, FileSystem, RenameMode, SetAttributes, mode};
use lockbox::{Error, Result};
use parking_lot::Mutex;

/// Inodes held open until the kernel forgets them.
#[derive(Default)]
pub(crate) struct UnlinkedInodes(Mutex<HashSet<u64>>);

impl UnlinkedInodes {
    /// Renames, and holds the inode that loses its last name.
    pub(crate) fn rename(
        &self,
        fs: &FileSystem,
        (directory, name): (Ino, &OsStr),
        (new_directory, new_name): (Ino, &OsStr),
        how: RenameMode,
    ) -> Result<()> {
        let replaces = matches!(how, RenameMode::Replace | RenameMode::Whiteout(_));
        let last = |a: &Attributes| match a.mode & mode::TYPE {
            mode::REGULAR => a.links == 1,
            kind => kind == mode::DIRECTORY,
        };
        let held = if replaces { open_if_matching(fs, new_directory, new_name, last) } else { None };
        let renamed = fs.rename(directory, name.as_bytes(), new_directory, new_name.as_bytes(), how);
        self.retain(fs, held, renamed)
    }

    pub(crate) fn remove_directory(&self, fs: &FileSystem, directory: Ino, name: &OsStr) -> Result<()> {
        let held = open_if_matching(fs, directory, name, |a| a.mode & mode::TYPE == mode::DIRECTORY);
        let removed = fs.remove_directory(directory, name.as_bytes());
        self.retain(fs, held, removed)
    }

    /// Retains the held inode if its name was removed, and releases it otherwise.
    fn retain(&self, fs: &FileSystem, held: Option<Ino>, taken: Result<()>) -> Result<()> {
        let Some(held) = held else { return taken };
        if taken.is_ok() && self.0.lock().insert(held.0) {
            return taken;
        }
        taken.and(fs.release(held))
    }

    /// Releases the inode when the kernel drops it.
    pub(crate) fn forget(&self, fs: &FileSystem, inode: Ino) -> Result<()> {
        if self.0.lock().remove(&inode.0) { fs.release(inode) } else { Ok(()) }
    }
}

/// Looks up a name and opens its inode if it matches. The kernel keeps the directory locked, so the
/// name means the same inode until the request is answered.
fn open_if_matching(
    fs: &FileSystem,
    directory: Ino,
    name: &OsStr,
    must_hold: impl FnOnce(&Attributes) -> bool,
) -> Option<Ino> {
    let found = fs.lookup(directory, name.as_bytes()).ok()?;
    (must_hold(&found) && fs.open(found.ino).is_ok()).then_some(found.ino)
}

/// Accepts cached times of a deleted inode; every other result is passed through. The kernel sends
/// a ctime only for regular files, and ignores the reply; a utimensat(2) that raced with the unlink
/// came before it.
pub(super) fn accept_times(result: Result<Attributes>, ino: format::Ino, set: &SetAttributes) -> Result<Attributes> {
    let times_only = SetAttributes { atime: None, mtime: None, ctime: None, ..*set } == SetAttributes::default();
    match result {
        Err(Error::Stale) if times_only && set.ctime.is_some() => {
            Ok(Attributes { ino, mode: mode::REGULAR, ..Attributes::default() })
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use lockbox::fs::SetTime;

    use super::*;

    const INO: format::Ino = format::Ino(7);

    #[test]
    fn cached_times_of_a_file_that_is_gone_are_accepted() {
        let times = SetAttributes { mtime: Some(SetTime::Now), ctime: Some(SetTime::Now), ..SetAttributes::default() };
        let accepted = accept_times(Err(Error::Stale), INO, &times).unwrap();
        assert_eq!((accepted.ino, accepted.mode, accepted.links), (INO, mode::REGULAR, 0));
    }

    #[test]
    fn every_other_change_of_it_is_refused() {
        let ctime = Some(SetTime::Now);
        for set in [
            SetAttributes { mtime: ctime, ..SetAttributes::default() },
            SetAttributes { ctime, mode: Some(0o600), ..SetAttributes::default() },
            SetAttributes { ctime, size: Some(0), ..SetAttributes::default() },
            SetAttributes { ctime, kill_set_id: true, ..SetAttributes::default() },
        ] {
            assert!(matches!(accept_times(Err(Error::Stale), INO, &set), Err(Error::Stale)), "{set:?}");
        }
        let times = SetAttributes { ctime, ..SetAttributes::default() };
        assert!(matches!(
            accept_times(Err(Error::WriteFailed(String::new())), INO, &times),
            Err(Error::WriteFailed(_))
        ));
    }
}
