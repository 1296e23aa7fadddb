//! Copies an object with its descendants from a snapshot, or within the live tree, into the live
//! tree.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::exchange::walk::{Directory, Step, Tree};
use crate::exchange::{CopyCounts, Entry};
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem, XattrMode, mode};

/// Copies objects of one snapshot, or of the live tree itself. Hard links among all copies of one
/// builder are preserved.
pub(in crate::exchange) struct Builder<'a> {
    pub(super) live: &'a FileSystem,
    pub(super) moment: &'a FileSystem,
    pub(super) go_on: &'a mut dyn FnMut() -> Result<()>,
    pub(in crate::exchange) copied: CopyCounts,
    /// New inodes of files with several hard links, by inode in the snapshot.
    links: HashMap<Ino, Ino>,
}

/// Inodes of a directory in the snapshot and in the copy.
type InodePair = (Ino, Ino);

impl<'a> Builder<'a> {
    pub(in crate::exchange) fn new(
        live: &'a FileSystem,
        moment: &'a FileSystem,
        go_on: &'a mut dyn FnMut() -> Result<()>,
    ) -> Builder<'a> {
        Builder { live, moment, go_on, copied: CopyCounts::default(), links: HashMap::new() }
    }

    /// Copies `kept` recursively to an unused name.
    pub(in crate::exchange) fn tree(&mut self, kept: &Attributes, parent: Ino, name: &[u8]) -> Result<()> {
        let made = self.object(kept, parent, name)?;
        if !kept.is_directory() {
            return Ok(());
        }
        let mut path = Vec::new(); // unused
        let mut tree: Tree<'_, InodePair> = Tree::below(self.moment, b"", kept.ino, (kept.ino, made))?;
        while let Some(step) = tree.next(&mut path) {
            match step? {
                // Last, because every entry changes the times of its directory.
                Step::Leave(Directory { kept: (kept, made), .. }) => {
                    self.live.restore_inode(self.moment, kept, made)?;
                }
                Step::Entry(Entry { name, attributes }, directory) => {
                    let parent = directory.kept.1;
                    let made = self.object(&attributes, parent, &name)?;
                    if attributes.is_directory() {
                        tree.descend(self.moment, b"", attributes.ino, (attributes.ino, made))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Creates a directory of the snapshot without its entries; its times must be set after these.
    pub(in crate::exchange) fn object(&mut self, kept: &Attributes, parent: Ino, name: &[u8]) -> Result<Ino> {
        (self.go_on)()?;
        if let Some(made) = self.links.get(&kept.ino) {
            self.live.link(*made, parent, name)?;
            self.copied.links += 1;
            return Ok(*made);
        }
        // Other users cannot enter it before it is complete: it is created within a directory that
        // is closed to them.
        let creator = Creator { uid: kept.uid, gid: kept.gid, umask: None };
        let permissions = kept.mode & mode::PERMISSIONS;
        let made = match kept.mode & mode::TYPE {
            mode::DIRECTORY => {
                self.copied.directories += 1;
                self.live.make_directory(parent, name, permissions, creator)?
            }
            mode::SYMLINK => {
                self.copied.symlinks += 1;
                self.live.make_symlink(parent, name, &self.moment.read_link(kept.ino)?, creator)?
            }
            file_type => {
                let made = self.live.make_node(parent, name, file_type | permissions, kept.rdev, creator)?;
                if file_type == mode::REGULAR {
                    self.live.restore_storing(self.moment, kept.ino, made.ino)?;
                    self.content(kept, made.ino)?;
                    self.copied.files += 1;
                    self.copied.bytes += kept.size;
                } else {
                    self.copied.others += 1;
                }
                made
            }
        };
        self.xattrs(kept.ino, made.ino)?;
        self.live.restore_inode(self.moment, kept.ino, made.ino)?;
        if !kept.is_directory() && kept.links > 1 {
            self.links.insert(kept.ino, made.ino);
        }
        Ok(made.ino)
    }

    fn content(&mut self, kept: &Attributes, made: Ino) -> Result<()> {
        if !std::ptr::eq(self.live, self.moment) {
            return self.live.restore_content(self.moment, kept.ino, made, self.go_on).map(drop);
        }
        let mut done = 0;
        while done < kept.size {
            (self.go_on)()?;
            match self.live.copy_range(kept.ino, done, made, done, kept.size - done, false)? {
                0 => return Err(Error::damaged(format!("the file ends early: size={} end={done}", kept.size))),
                copied => done += copied,
            }
        }
        Ok(())
    }

    /// Sets exactly the extended attributes and access control lists of the snapshot. They change
    /// the mode, which must therefore be set later.
    pub(super) fn xattrs(&self, kept: Ino, made: Ino) -> Result<()> {
        let wanted = self.moment.list_xattrs(kept)?;
        let wanted: Vec<&[u8]> = names(&wanted).collect();
        for name in names(&self.live.list_xattrs(made)?).filter(|name| !wanted.contains(name)) {
            match self.live.remove_xattr(made, name) {
                // Removal of a list that was implied by another one.
                Ok(()) | Err(Error::NoAttribute) => {}
                Err(error) => return Err(error),
            }
        }
        for name in wanted {
            self.live.set_xattr(made, name, &self.moment.xattr(kept, name)?, XattrMode::Set)?;
        }
        Ok(())
    }
}

fn names(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == 0).filter(|name| !name.is_empty())
}
