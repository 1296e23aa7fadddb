//! Files whose last name a rename gave to another file: they live as long as the kernel knows them (F6).

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use lockbox::format::Ino;
use lockbox::fs::{FileSystem, RenameMode, mode};
use parking_lot::Mutex;

/// Inodes that are held open for the kernel until it forgets them.
#[derive(Default)]
pub(super) struct Replaced(Mutex<HashSet<u64>>);

impl Replaced {
    /// The file that a rename to `name` will take the last name of, held open; None when there is none. To be told of the outcome.
    pub(super) fn hold(&self, fs: &FileSystem, directory: Ino, name: &OsStr, how: RenameMode) -> Option<Ino> {
        if !matches!(how, RenameMode::Replace | RenameMode::Whiteout(_)) {
            return None;
        }
        // The kernel keeps both directories locked: the name means the same file until the rename is answered.
        let found = fs.lookup(directory, name.as_bytes()).ok()?;
        let last = found.mode & mode::TYPE == mode::REGULAR && found.links == 1;
        (last && fs.open(found.ino).is_ok()).then_some(found.ino)
    }

    /// The rename has taken the name, or not.
    pub(super) fn settle(&self, fs: &FileSystem, held: Ino, renamed: bool) -> lockbox::Result<()> {
        if renamed && self.0.lock().insert(held.0) { Ok(()) } else { fs.release(held) }
    }

    /// The kernel drops the inode.
    pub(super) fn forget(&self, fs: &FileSystem, inode: Ino) -> lockbox::Result<()> {
        if self.0.lock().remove(&inode.0) { fs.release(inode) } else { Ok(()) }
    }
}
