//! Inodes without a name that the kernel still knows: files replaced by a rename, and removed
//! directories (KERNEL-6, KERNEL-9).

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use lockbox::Result;
use lockbox::format::Ino;
use lockbox::fs::{Attributes, FileSystem, RenameMode, mode};
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
