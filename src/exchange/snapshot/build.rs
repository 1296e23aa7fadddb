//! Copies an object with its descendants from a snapshot, or within the live tree, into the live
//! tree.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::exchange::walk::{ArchiveWalk, WalkDirectory, WalkStep};
use crate::exchange::{CopyCounts, ListingEntry};
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

    /// Copies `source` recursively to an unused name.
    pub(in crate::exchange) fn tree(&mut self, source: &Attributes, parent: Ino, name: &[u8]) -> Result<()> {
        let copy = self.object(source, parent, name)?;
        if !source.is_directory() {
            return Ok(());
        }
        let mut path = Vec::new(); // unused
        let mut tree: ArchiveWalk<'_, InodePair> =
            ArchiveWalk::below(self.moment, b"", source.ino, (source.ino, copy))?;
        while let Some(step) = tree.next(&mut path) {
            match step? {
                // Last, because every entry changes the times of its directory.
                WalkStep::Leave(WalkDirectory { state: (source, copy), .. }) => {
                    self.live.restore_inode(self.moment, source, copy)?;
                }
                WalkStep::Entry(ListingEntry { name, attributes }, directory) => {
                    let parent = directory.state.1;
                    let copy = self.object(&attributes, parent, &name)?;
                    if attributes.is_directory() {
                        tree.descend(self.moment, b"", attributes.ino, (attributes.ino, copy))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Creates a directory of the snapshot without its entries; its times must be set after these.
    pub(in crate::exchange) fn object(&mut self, source: &Attributes, parent: Ino, name: &[u8]) -> Result<Ino> {
        (self.go_on)()?;
        if let Some(copy) = self.links.get(&source.ino) {
            self.live.link(*copy, parent, name)?;
            self.copied.links += 1;
            return Ok(*copy);
        }
        // Other users cannot enter it before it is complete: it is created within a directory that
        // is closed to them.
        let creator = Creator { uid: source.uid, gid: source.gid, umask: None };
        let permissions = source.mode & mode::PERMISSIONS;
        let copy = match source.mode & mode::TYPE {
            mode::DIRECTORY => {
                self.copied.directories += 1;
                self.live.make_directory(parent, name, permissions, creator)?
            }
            mode::SYMLINK => {
                self.copied.symlinks += 1;
                self.live.make_symlink(parent, name, &self.moment.read_link(source.ino)?, creator)?
            }
            file_type => {
                let copy = self.live.make_node(parent, name, file_type | permissions, source.rdev, creator)?;
                if file_type == mode::REGULAR {
                    self.live.restore_storage_flags(self.moment, source.ino, copy.ino)?;
                    self.content(source, copy.ino)?;
                    self.copied.files += 1;
                    self.copied.bytes += source.size;
                } else {
                    self.copied.others += 1;
                }
                copy
            }
        };
        self.xattrs(source.ino, copy.ino)?;
        self.live.restore_inode(self.moment, source.ino, copy.ino)?;
        if !source.is_directory() && source.links > 1 {
            self.links.insert(source.ino, copy.ino);
        }
        Ok(copy.ino)
    }

    fn content(&mut self, source: &Attributes, copy: Ino) -> Result<()> {
        if !std::ptr::eq(self.live, self.moment) {
            return self.live.restore_content(self.moment, source.ino, copy, self.go_on).map(drop);
        }
        let mut done = 0;
        while done < source.size {
            (self.go_on)()?;
            match self.live.copy_range(source.ino, done, copy, done, source.size - done, false)? {
                0 => return Err(Error::damaged(format!("the file ends early: size={} end={done}", source.size))),
                copied => done += copied,
            }
        }
        Ok(())
    }

    /// Sets exactly the extended attributes and access control lists of the snapshot. They change
    /// the mode, which must therefore be set later.
    pub(super) fn xattrs(&self, source: Ino, copy: Ino) -> Result<()> {
        let wanted = self.moment.list_xattrs(source)?;
        let wanted: Vec<&[u8]> = names(&wanted).collect();
        for name in names(&self.live.list_xattrs(copy)?).filter(|name| !wanted.contains(name)) {
            match self.live.remove_xattr(copy, name) {
                // Removal of a list that was implied by another one.
                Ok(()) | Err(Error::NoAttribute) => {}
                Err(error) => return Err(error),
            }
        }
        for name in wanted {
            self.live.set_xattr(copy, name, &self.moment.xattr(source, name)?, XattrMode::Set)?;
        }
        Ok(())
    }
}

fn names(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == 0).filter(|name| !name.is_empty())
}
