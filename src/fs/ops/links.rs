//! link, unlink, rmdir.

use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::directory::{self, DirectoryEditor, EntryTarget, MAX_LINKS, check_name, is_dot};
use crate::fs::{Attributes, FileSystem, inode};

impl FileSystem {
    /// Adds a name, up to 2^32 - 2 links; directories are refused with `NotPermitted`, an inode
    /// without any name with `NotFound`.
    pub fn link(&self, ino: Ino, directory: Ino, name: &[u8]) -> Result<Attributes> {
        check_name(name)?;
        if is_dot(name) {
            return Err(Error::Exists);
        }
        // The directory's inode, index and list; the linked inode.
        self.volume.operate(4, false, |op| {
            let now = self.environment.stamp();
            let mut linked = inode::find(op.view(), ino)?.ok_or(Error::NotFound)?;
            let target = EntryTarget::of(ino, &linked);
            if target.is_directory() {
                return Err(Error::NotPermitted);
            }
            let mut parent = DirectoryEditor::load(op.view(), directory)?;
            if directory::find(op.view(), &self.name_key, directory, name)?.is_some() {
                return Err(Error::Exists);
            }
            match linked.links {
                0 => return Err(Error::NotFound),
                MAX_LINKS.. => return Err(Error::TooManyLinks),
                _ => linked.links += 1,
            }
            linked.ctime = now;
            parent.insert(op, &self.name_key, name, target)?;
            parent.store(op, now)?;
            inode::store(op, ino, &linked)
        })?;
        self.finish_change()?;
        self.attributes(ino)
    }

    /// Removes a name. The last link of a file that is not open frees it at once when small, else
    /// in steps.
    pub fn unlink(&self, directory: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        match name {
            b"." => return Err(Error::invalid("`.` cannot be unlinked")),
            b".." => return Err(Error::IsDirectory),
            _ => {}
        }
        self.remove_name(directory, name, false)
    }

    pub fn remove_directory(&self, directory: Ino, name: &[u8]) -> Result<()> {
        check_name(name)?;
        match name {
            b"." => return Err(Error::invalid("`.` cannot be removed")),
            b".." => return Err(Error::NotEmpty),
            _ => {}
        }
        self.remove_name(directory, name, true)
    }

    fn remove_name(&self, directory: Ino, name: &[u8], want_directory: bool) -> Result<()> {
        // The directory's inode, index and list; the removed inode.
        self.reclaim.operate_removing(4, true, |op, removal| {
            let now = self.environment.stamp();
            let mut parent = DirectoryEditor::load(op.view(), directory)?;
            let found = directory::find(op.view(), &self.name_key, directory, name)?.ok_or(Error::NotFound)?;
            match (found.target.is_directory(), want_directory) {
                (true, false) => return Err(Error::IsDirectory),
                (false, true) => return Err(Error::NotDirectory),
                _ => {}
            }
            let mut removed = directory::load_target(op.view(), directory, found.target)?;
            if want_directory && directory::has_entries(op.view(), found.target.ino, &removed)? {
                return Err(Error::NotEmpty);
            }
            parent.remove(op, &self.name_key, name, found)?;
            parent.store(op, now)?;
            removal.drop_name(op, found.target.ino, &mut removed, now)
        })?;
        self.finish_change()
    }
}
