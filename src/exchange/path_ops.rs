//! Resolves paths within an archive; removes, creates, moves and copies objects by path, with file
//! data shared with the original; and deletes trees. All arguments are checked before the first
//! change, so a refused command changes nothing.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read};

use lockbox_terminal::display;

use super::attributes::split_names;
use super::walk::{ArchiveWalk, WalkDirectory, WalkStep};
use super::{CopyCounts, ListingEntry};
use crate::error::{Error, Refusal, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, Creator, FileSystem, RenameMode, SetAttributes, SetTime, XattrMode, mode};

/// Returns the object at `path`, relative to the root. Empty components and `.` are skipped; `..`
/// and symbolic links are not followed.
///
/// # Errors
/// `NotFound`, `NotDirectory`, `Invalid` for a path with `..`.
pub fn resolve(fs: &FileSystem, path: &[u8]) -> Result<Attributes> {
    let mut at = fs.attributes(ROOT_INO)?;
    for name in components(path)? {
        if !at.is_directory() {
            return Err(Error::NotDirectory);
        }
        at = fs.lookup(at.ino, name)?;
    }
    Ok(at)
}

/// Resolves a path from the command line; a missing one is reported as `Invalid` with its name.
pub(super) fn resolve_argument(fs: &FileSystem, path: &[u8]) -> Result<Attributes> {
    resolve(fs, path).map_err(|error| match error {
        Error::NotFound | Error::NotDirectory => Error::invalid(format!("the archive has no {}", display(path))),
        error => error,
    })
}

pub(super) fn none_if_missing<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Err(Error::NotFound) => Ok(None),
        found => found.map(Some),
    }
}

/// Returns the components of a path within the archive.
///
/// # Errors
/// `Invalid` for a path with `..`.
pub fn components(path: &[u8]) -> Result<Vec<&[u8]>> {
    let names: Vec<&[u8]> = path.split(|&b| b == b'/').filter(|name| !matches!(*name, b"" | b".")).collect();
    if names.contains(&&b".."[..]) {
        return Err(Error::invalid("a path within the archive must not contain '..'"));
    }
    Ok(names)
}

/// Returns the directory at `path`; creates missing directories.
pub(super) fn resolve_or_create(fs: &FileSystem, path: &[u8], creator: Creator) -> Result<Ino> {
    let mut directory = ROOT_INO;
    for name in components(path)? {
        let found = match none_if_missing(fs.lookup(directory, name))? {
            Some(found) => found,
            None => fs.make_directory(directory, name, 0o755, creator)?,
        };
        if !found.is_directory() {
            return Err(Error::NotDirectory);
        }
        directory = found.ino;
    }
    Ok(directory)
}

const ROOT_STAYS: &str = "the root of an archive stays where it is";

/// Target of a move or copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyDestination {
    /// Path of an existing directory.
    pub directory: Vec<u8>,
    /// New name of a single object in it; `None` to keep the names.
    pub name: Option<Vec<u8>>,
}

impl CopyDestination {
    /// Interprets `target`: an existing directory takes the objects, otherwise it is the new path
    /// of a single object. A symbolic link is not followed.
    ///
    /// # Errors
    /// `Invalid` when several objects cannot be placed there, or the parent directory does not
    /// exist.
    pub fn of(fs: &FileSystem, target: &[u8], several: bool) -> Result<CopyDestination> {
        let missing = |path: &[u8]| Error::invalid(format!("the archive has no {}", display(path)));
        let no_directory = |path: &[u8]| Error::invalid(format!("{} is not a directory", display(path)));
        match none_if_missing(resolve(fs, target)) {
            Ok(Some(found)) if found.is_directory() => {
                return Ok(CopyDestination { directory: target.to_vec(), name: None });
            }
            Ok(Some(_)) if several || target.ends_with(b"/") => return Err(no_directory(target)),
            Ok(None) if several || target.ends_with(b"/") => return Err(missing(target)),
            Ok(_) => {}
            Err(Error::NotDirectory) => return Err(no_directory(parent_of(target)?.0.as_slice())),
            Err(error) => return Err(error),
        }
        let (directory, name) = parent_of(target)?;
        match none_if_missing(resolve(fs, &directory))? {
            None => Err(missing(&directory)),
            Some(found) if !found.is_directory() => Err(no_directory(&directory)),
            Some(_) => Ok(CopyDestination { directory, name: Some(name) }),
        }
    }
}

fn parent_of(path: &[u8]) -> Result<(Vec<u8>, Vec<u8>)> {
    let mut names = components(path)?;
    let Some(name) = names.pop() else { return Err(Error::invalid(ROOT_STAYS)) };
    Ok((names.join(&b"/"[..]), name.to_vec()))
}

/// Object by parent directory and name.
struct EntryPosition {
    parent: Ino,
    name: Vec<u8>,
    attributes: Attributes,
}

impl EntryPosition {
    fn at(fs: &FileSystem, path: &[u8]) -> Result<EntryPosition> {
        let (directory, name) = parent_of(path)?;
        let attributes = resolve_argument(fs, path)?;
        Ok(EntryPosition { parent: resolve(fs, &directory)?.ino, name, attributes })
    }
}

/// Removes each of the paths recursively; returns the number of removed objects.
///
/// # Errors
/// `Invalid` for a missing path and for the root, with nothing removed. Other errors leave the
/// operation incomplete.
pub fn remove(fs: &FileSystem, paths: &[Vec<u8>]) -> Result<u64> {
    let doomed = paths.iter().map(|path| EntryPosition::at(fs, path)).collect::<Result<Vec<_>>>()?;
    doomed.iter().try_fold(0, |count, EntryPosition { parent, name, .. }| {
        // One of the paths may be below another one, or equal to it.
        let found = match fs.lookup(*parent, name) {
            Err(Error::NotFound | Error::Stale) => return Ok(count),
            found => found?,
        };
        Ok(count + delete_tree(fs, *parent, name, &found)?)
    })
}

/// Creates a directory at each of the paths; with `parents` also missing parents, and existing
/// directories are accepted.
///
/// # Errors
/// `Invalid` for existing objects and missing parents. Directories created before remain.
pub fn make_directories(fs: &FileSystem, paths: &[Vec<u8>], parents: bool, creator: Creator) -> Result<()> {
    paths.iter().try_for_each(|path| {
        let told = |error| match error {
            Error::Exists => Error::invalid(format!("{} already exists", display(path))),
            Error::NotDirectory => Error::invalid(format!("{}: a parent is not a directory", display(path))),
            error => error,
        };
        if parents {
            return resolve_or_create(fs, path, creator).map(drop).map_err(told);
        }
        // The root exists.
        let (above, name) = parent_of(path).map_err(|_| told(Error::Exists))?;
        let parent = resolve_argument(fs, &above)?.ino;
        fs.make_directory(parent, &name, 0o755, creator).map(drop).map_err(told)
    })
}

/// Moves each object to the destination.
///
/// # Errors
/// `Invalid` or `Refused`, with nothing moved, for a missing path, the root, a directory into
/// itself, two objects of one name, and an existing target (with `replace` only directories are
/// refused). Other errors leave the operation incomplete.
pub fn rename(fs: &FileSystem, paths: &[Vec<u8>], to: &CopyDestination, replace: bool) -> Result<()> {
    let (directory, moves) = check_targets(fs, paths, to, replace, ROOT_STAYS)?;
    let mode = if replace { RenameMode::Replace } else { RenameMode::NoReplace };
    moves.iter().try_for_each(|(from, name, _)| fs.rename(from.parent, &from.name, directory, name, mode))
}

/// Object, its name in the target, and whether it replaces another object there.
type CheckedMove = (EntryPosition, Vec<u8>, bool);

/// Checks a move or copy of all paths before the first change; returns the target directory with
/// the objects. `root` is the error for the root of the archive.
fn check_targets(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    to: &CopyDestination,
    replace: bool,
    root: &str,
) -> Result<(Ino, Vec<CheckedMove>)> {
    let directory = resolve_argument(fs, &to.directory)?.ino;
    let mut names = HashSet::new();
    let mut checked = Vec::new();
    for path in paths {
        let parts = components(path)?;
        if parts.is_empty() {
            return Err(Error::invalid(root));
        }
        let from = EntryPosition::at(fs, path)?;
        let name = to.name.clone().unwrap_or_else(|| from.name.clone());
        let shown = display(&name);
        if !names.insert(name.clone()) {
            return Err(Error::invalid(format!("two objects would get the name {shown}")));
        }
        // Links are not followed and directories have one name, so paths are sufficient.
        if from.attributes.is_directory() && components(&to.directory)?.starts_with(&parts) {
            return Err(Error::invalid(format!("{} would be below itself", display(path))));
        }
        let existing = none_if_missing(fs.lookup(directory, &name))?;
        if let Some(existing) = &existing {
            if existing.ino == from.attributes.ino {
                return Err(Error::invalid(format!("{} is that already", display(path))));
            }
            if existing.is_directory() {
                return Err(Error::invalid(format!("{shown} is a directory there, and those are not replaced")));
            }
            if !replace {
                return Err(Error::Refused(Refusal::ExistingObject { what: format!("{shown} already exists there") }));
            }
        }
        checked.push((from, name, existing.is_some()));
    }
    Ok((directory, checked))
}

/// Deletes a tree; returns the number of deleted objects. Memory depends on the depth only.
pub(super) fn delete_tree(fs: &FileSystem, parent: Ino, name: &[u8], found: &Attributes) -> Result<u64> {
    if !found.is_directory() {
        fs.unlink(parent, name)?;
        return Ok(1);
    }
    let mut count = 0;
    let mut tree = ArchiveWalk::below(fs, b"", found.ino, (parent, name.to_vec(), found.ino))?;
    let mut path = Vec::new(); // unused
    while let Some(step) = tree.next(&mut path) {
        match step? {
            WalkStep::Leave(WalkDirectory { state: (parent, name, _), .. }) => fs.remove_directory(parent, &name)?,
            WalkStep::Entry(ListingEntry { name, attributes, .. }, directory) => {
                let (parent, ino) = (directory.state.2, attributes.ino);
                if attributes.is_directory() {
                    let name = name.to_vec();
                    tree.descend(fs, b"", ino, (parent, name, ino))?;
                    continue;
                }
                fs.unlink(parent, name)?;
            }
        }
        count += 1;
    }
    Ok(count)
}

/// Maximum total of retries for directories in which another program created entries meanwhile.
const AGAIN: u32 = 64;

/// Deletes a tree like [`delete_tree`] although programs may still use it. Objects that were
/// deleted or moved meanwhile are skipped, because they belong to another place now; a directory
/// that is filled again and again is left, with its parents. Calls `on_other_link` for each file
/// that has another hard link, whether or not that is deleted later. `go_on` is called before each
/// object.
pub(super) fn delete_beside_users(
    fs: &FileSystem,
    (parent, name): (Ino, &[u8]),
    found: &Attributes,
    on_other_link: &mut dyn FnMut(Ino),
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<u64> {
    let mut unlink = |parent, name: &[u8], found: &Attributes| match fs.unlink(parent, name) {
        Err(Error::NotFound | Error::Stale) => Ok(0),
        unlinked => {
            unlinked?;
            if found.links > 1 {
                on_other_link(found.ino);
            }
            Ok(1)
        }
    };
    if !found.is_directory() {
        return unlink(parent, name, found);
    }
    let (mut count, mut again) = (0, 0);
    let mut tree = ArchiveWalk::below(fs, b"", found.ino, (parent, name.to_vec(), found.ino))?;
    let mut path = Vec::new(); // unused
    while let Some(step) = tree.next(&mut path) {
        go_on()?;
        match step? {
            WalkStep::Leave(WalkDirectory { state: (parent, name, ino), .. }) => {
                match fs.remove_directory(parent, &name) {
                    Err(Error::NotEmpty) if again < AGAIN => {
                        again += 1;
                        tree.descend(fs, b"", ino, (parent, name, ino))?;
                    }
                    Err(Error::NotEmpty | Error::NotFound | Error::Stale) => {}
                    removed => {
                        removed?;
                        count += 1;
                    }
                }
            }
            // Look up the current state: entries are listed in batches.
            WalkStep::Entry(ListingEntry { name, attributes, .. }, directory) => {
                let parent = directory.state.2;
                match fs.lookup(parent, name) {
                    Ok(now) if now.ino != attributes.ino => {}
                    Ok(now) if now.is_directory() => {
                        let name = name.to_vec();
                        tree.descend(fs, b"", now.ino, (parent, name, now.ino))?;
                    }
                    Ok(now) => count += unlink(parent, name, &now)?,
                    Err(Error::NotFound | Error::Stale) => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }
    Ok(count)
}

/// Prefix of the temporary name of a copy that replaces an object.
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
    let root = "the root of an archive cannot be copied into itself";
    let (directory, copies) = check_targets(fs, paths, to, replace, root)?;
    let mut builder = Builder::new(fs, fs, go_on);
    for (object, name, is_there) in &copies {
        let built = if *is_there { free_name(fs, directory, BESIDE)? } else { name.clone() };
        let placed = builder.tree(&object.attributes, directory, &built).and_then(|()| match is_there {
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
    let built = free_name(fs, directory, BESIDE)?;
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

/// Returns an unused name: the prefix and a number.
pub(super) fn free_name(fs: &FileSystem, directory: Ino, prefix: &str) -> Result<Vec<u8>> {
    let mut number = 0u32;
    loop {
        let name = format!("{prefix}{number}").into_bytes();
        match none_if_missing(fs.lookup(directory, &name))? {
            None => return Ok(name),
            // Left over from an interrupted copy.
            Some(_) => number += 1,
        }
    }
}

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
    pub(super) source_fs: &'a FileSystem,
    pub(super) go_on: &'a mut dyn FnMut() -> Result<()>,
    pub(super) copied: CopyCounts,
    /// New inodes of files with several hard links, by inode in the snapshot.
    links: HashMap<Ino, Ino>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(
        live: &'a FileSystem,
        source_fs: &'a FileSystem,
        go_on: &'a mut dyn FnMut() -> Result<()>,
    ) -> Builder<'a> {
        Builder { live, source_fs, go_on, copied: CopyCounts::default(), links: HashMap::new() }
    }

    /// Copies `source` recursively to an unused name.
    pub(super) fn tree(&mut self, source: &Attributes, parent: Ino, name: &[u8]) -> Result<()> {
        let copy = self.object(source, parent, name)?;
        if !source.is_directory() {
            return Ok(());
        }
        let mut path = Vec::new(); // unused
        // Inodes of a directory in the snapshot and in the copy.
        let mut tree = ArchiveWalk::below(self.source_fs, b"", source.ino, (source.ino, copy))?;
        while let Some(step) = tree.next(&mut path) {
            match step? {
                // Last, because every entry changes the times of its directory.
                WalkStep::Leave(WalkDirectory { state: (source, copy), .. }) => {
                    self.live.restore_inode(self.source_fs, source, copy)?;
                }
                WalkStep::Entry(ListingEntry { name, attributes, .. }, directory) => {
                    let (parent, ino) = (directory.state.1, attributes.ino);
                    let copy = self.object(attributes, parent, name)?;
                    if attributes.is_directory() {
                        tree.descend(self.source_fs, b"", ino, (ino, copy))?;
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
        // Other users cannot enter it before it is complete: its directory is closed to them.
        let creator = Creator { uid: source.uid, gid: source.gid, umask: None };
        let permissions = source.mode & mode::PERMISSIONS;
        let copy = match source.mode & mode::TYPE {
            mode::DIRECTORY => {
                self.copied.directories += 1;
                self.live.make_directory(parent, name, permissions, creator)?
            }
            mode::SYMLINK => {
                self.copied.symlinks += 1;
                self.live.make_symlink(parent, name, &self.source_fs.read_link(source.ino)?, creator)?
            }
            file_type => {
                let copy = self.live.make_node(parent, name, file_type | permissions, source.rdev, creator)?;
                if file_type == mode::REGULAR {
                    self.live.restore_storage_flags(self.source_fs, source.ino, copy.ino)?;
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
        self.live.restore_inode(self.source_fs, source.ino, copy.ino)?;
        if !source.is_directory() && source.links > 1 {
            self.links.insert(source.ino, copy.ino);
        }
        Ok(copy.ino)
    }

    fn content(&mut self, source: &Attributes, copy: Ino) -> Result<()> {
        if !std::ptr::eq(self.live, self.source_fs) {
            return self.live.restore_content(self.source_fs, source.ino, copy, self.go_on).map(drop);
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
        let wanted = self.source_fs.list_xattrs(source)?;
        let wanted: Vec<&[u8]> = split_names(&wanted).collect();
        for name in split_names(&self.live.list_xattrs(copy)?).filter(|name| !wanted.contains(name)) {
            match self.live.remove_xattr(copy, name) {
                // Removal of a list that was implied by another one.
                Ok(()) | Err(Error::NoAttribute) => {}
                Err(error) => return Err(error),
            }
        }
        for name in wanted {
            self.live.set_xattr(copy, name, &self.source_fs.xattr(source, name)?, XattrMode::Set)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_split_and_never_climbs() {
        assert_eq!(components(b"/a//./b/").unwrap(), [b"a", b"b"]);
        assert!(components(b"/").unwrap().is_empty());
        assert!(components(b"a/../b").is_err());
    }
}
