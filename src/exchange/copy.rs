//! Copies objects within an archive, with file data shared with the original, or from a snapshot
//! into the live tree.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read};

use lockbox_terminal::display;

use super::path_ops::{
    CopyDestination, components, delete_tree, none_if_missing, refuse_below, refuse_in_the_way, resolve_argument,
};
use super::walk::{ArchiveWalk, WalkDirectory, WalkStep};
use super::{CopyCounts, ListingEntry};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem, RenameMode, SetAttributes, SetTime, XattrMode, mode};

/// Prefix of the temporary name of a copy that replaces an object; a number follows.
const BESIDE: &str = ".lockbox-copy-";
/// Size of one read of new content, in bytes.
const PIECE: usize = 1 << 20;

/// Copies each path recursively to the destination, with owners, modes, times and attributes. Hard
/// links among the copies are preserved. `go_on` is called before each object and periodically
/// within it. On failure the incomplete copy of one path is removed; completed ones remain.
///
/// # Errors
/// `Invalid` or `Refused`, with nothing copied, for a missing path, the root, a directory into
/// itself, two objects of one name, and an existing target (with `replace` only directories are
/// refused).
pub fn copy(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    to: &CopyDestination,
    replace: bool,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<CopyCounts> {
    let directory = resolve_argument(fs, &to.directory)?.ino;
    let mut names = HashSet::new();
    let mut copies = Vec::new();
    for path in paths {
        let object = resolve_argument(fs, path)?;
        let Some(&own) = components(path)?.last() else {
            return Err(Error::invalid("the root of an archive cannot be copied into itself"));
        };
        let name = to.name.clone().unwrap_or_else(|| own.to_vec());
        if !names.insert(name.clone()) {
            return Err(Error::invalid(format!("two objects would get the name {}", display(&name))));
        }
        if object.is_directory() {
            refuse_below(path, &to.directory)?;
        }
        let existing = none_if_missing(fs.lookup(directory, &name))?;
        if let Some(existing) = &existing {
            if existing.ino == object.ino {
                return Err(Error::invalid(format!("{} is that already", display(path))));
            }
            refuse_in_the_way(&name, existing, replace)?;
        }
        copies.push((object, name, existing.is_some()));
    }
    let mut builder = Builder::new(fs, fs, go_on);
    for (object, name, is_there) in &copies {
        let built = if *is_there { free_name(fs, directory)? } else { name.clone() };
        let placed = builder.tree(object, directory, &built).and_then(|()| match is_there {
            true => fs.rename(directory, &built, directory, name, RenameMode::Replace),
            false => Ok(()),
        });
        placed.map_err(|error| remove_incomplete(fs, directory, &built, error))?;
    }
    Ok(builder.copied)
}

/// Replaces the content of a regular file with the remaining bytes of `content` and sets its
/// modification time to the present; other metadata is unchanged. After a crash the file has its
/// old content or all of the new one. For a file with several hard links, which are preserved, this
/// holds only for the part that one commit contains.
///
/// # Errors
/// As for a missing path. The file then has its old content, unless it has several hard links.
pub fn rewrite(fs: &FileSystem, path: &[u8], content: &mut dyn Read) -> Result<()> {
    let file = resolve_argument(fs, path)?;
    if file.links > 1 {
        return fill(fs, file.ino, content);
    }
    let mut names = components(path)?;
    let name = names.pop().ok_or(Error::IsDirectory)?;
    let directory = resolve_argument(fs, &names.join(&b"/"[..]))?.ino;
    let built = free_name(fs, directory)?;
    let mut nothing = || Ok(());
    let made = Builder::new(fs, fs, &mut nothing).object(&file, directory, &built);
    let placed = made.and_then(|made| {
        fill(fs, made, content)?;
        fs.rename(directory, &built, directory, name, RenameMode::Replace)
    });
    placed.map_err(|error| remove_incomplete(fs, directory, &built, error))
}

fn fill(fs: &FileSystem, ino: Ino, content: &mut dyn Read) -> Result<()> {
    fs.open(ino)?;
    let filled = write_all(fs, ino, content);
    fs.release(ino)?;
    filled
}

fn write_all(fs: &FileSystem, ino: Ino, content: &mut dyn Read) -> Result<()> {
    fs.set_attributes(ino, &SetAttributes { size: Some(0), ..SetAttributes::default() })?;
    let (mut offset, mut piece) = (0, vec![0; PIECE]);
    loop {
        match content.read(&mut piece) {
            Ok(0) => break,
            Ok(length) => {
                fs.write(ino, offset, &piece[..length])?;
                offset += length as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Error::io("cannot read the new content", error)),
        }
    }
    let now = SetAttributes { mtime: Some(SetTime::Now), ..SetAttributes::default() };
    fs.set_attributes(ino, &now).map(drop)
}

/// Returns an unused name in the directory.
fn free_name(fs: &FileSystem, directory: Ino) -> Result<Vec<u8>> {
    let mut number = 0u32;
    loop {
        let name = format!("{BESIDE}{number}").into_bytes();
        match none_if_missing(fs.lookup(directory, &name))? {
            None => return Ok(name),
            // Left over from an interrupted copy.
            Some(_) => number += 1,
        }
    }
}

/// Removes an incomplete object, and returns the error.
fn remove_incomplete(fs: &FileSystem, directory: Ino, name: &[u8], error: Error) -> Error {
    let delete = |found: Attributes| delete_tree(fs, directory, name, &found).map(drop);
    let removed = none_if_missing(fs.lookup(directory, name)).and_then(|found| found.map_or(Ok(()), delete));
    if let Err(second) = removed {
        tracing::warn!(error = %second, "cannot remove an unfinished copy");
    }
    error
}

/// Copies objects of one snapshot, or of the live tree itself. Hard links among all copies of one
/// builder are preserved.
pub(super) struct Builder<'a> {
    pub(super) live: &'a FileSystem,
    pub(super) moment: &'a FileSystem,
    pub(super) go_on: &'a mut dyn FnMut() -> Result<()>,
    pub(super) copied: CopyCounts,
    /// New inodes of files with several hard links, by inode in the snapshot.
    links: HashMap<Ino, Ino>,
}

/// Inodes of a directory in the snapshot and in the copy.
type InodePair = (Ino, Ino);

impl<'a> Builder<'a> {
    pub(super) fn new(
        live: &'a FileSystem,
        moment: &'a FileSystem,
        go_on: &'a mut dyn FnMut() -> Result<()>,
    ) -> Builder<'a> {
        Builder { live, moment, go_on, copied: CopyCounts::default(), links: HashMap::new() }
    }

    /// Copies `source` recursively to an unused name.
    pub(super) fn tree(&mut self, source: &Attributes, parent: Ino, name: &[u8]) -> Result<()> {
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
    pub(super) fn object(&mut self, source: &Attributes, parent: Ino, name: &[u8]) -> Result<Ino> {
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
