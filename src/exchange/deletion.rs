//! Deletes trees from an archive, and executes the deletions of a mirror plan.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use super::ListingEntry;
use super::walk::{ArchiveWalk, WalkDirectory, WalkStep};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, SetAttributes, SetTime};

/// Deletions of a mirror operation. Planned before the copying, executed after it.
#[derive(Clone, Debug, Default)]
pub struct MirrorPlan {
    /// Subtrees to delete, unordered.
    pub deletions: Vec<Deletion>,
    /// Number of objects in these subtrees.
    pub deleted: u64,
    /// Objects of the archive below the sources' targets, without excluded ones.
    pub entries: u64,
    /// Sources that are empty directories although their target has entries.
    pub empty: Vec<PathBuf>,
    doomed: HashMap<(Ino, Vec<u8>), PlannedDeletion>,
    /// Directories that the sources replace with objects of another type.
    replaceable: HashSet<Ino>,
}

/// Subtree of the archive that is to be deleted.
#[derive(Clone, Debug)]
pub struct Deletion {
    /// Path from the root of the archive.
    pub path: Vec<u8>,
    /// Number of objects in the subtree.
    pub entries: u64,
}

#[derive(Clone, Debug)]
struct PlannedDeletion {
    ino: Ino,
    path: Vec<u8>,
}

impl MirrorPlan {
    /// Plans the deletion of an object by parent and name, with its `below` descendants.
    pub(super) fn delete(&mut self, name: (Ino, Vec<u8>), ino: Ino, path: Vec<u8>, below: u64) {
        self.count(path.clone(), below);
        self.doomed.insert(name, PlannedDeletion { ino, path });
    }

    /// Plans the replacement of a directory by an object of another type.
    pub(super) fn replace(&mut self, directory: Ino, path: Vec<u8>, below: u64) {
        self.count(path, below);
        self.replaceable.insert(directory);
    }

    fn count(&mut self, path: Vec<u8>, below: u64) {
        self.entries += below;
        self.deleted += below + 1;
        self.deletions.push(Deletion { path, entries: below + 1 });
    }

    /// Cancels the deletion of an object that exists in the source.
    pub(super) fn keep(&mut self, parent: Ino, name: &[u8]) {
        if !self.doomed.is_empty() {
            self.doomed.remove(&(parent, name.to_vec()));
        }
    }

    /// Returns the number of subtrees that are still to be deleted.
    pub(super) fn remaining(&self) -> u64 {
        self.doomed.len() as u64
    }

    /// Checks that an object of the archive may be replaced by one of the source. A directory may
    /// be replaced only if its deletion was planned, and so counted.
    ///
    /// # Errors
    /// `Invalid` if it may not be replaced.
    pub(super) fn check_replaceable(&self, existing: &Attributes) -> Result<()> {
        if existing.is_directory() && !self.replaceable.contains(&existing.ino) {
            return Err(Error::invalid("it became another kind of object since the plan was made"));
        }
        Ok(())
    }

    /// Executes the remaining deletions; calls `deleted` with each path and the number of deleted
    /// objects or the error.
    pub(super) fn execute(
        &mut self,
        fs: &FileSystem,
        mut deleted: impl FnMut(&[u8], Result<u64>) -> Result<()>,
    ) -> Result<()> {
        for ((parent, name), doomed) in std::mem::take(&mut self.doomed) {
            let result = match fs.lookup(parent, &name) {
                // Replaced or deleted since.
                Err(Error::NotFound) => Ok(0),
                Ok(found) if found.ino != doomed.ino => Ok(0),
                Ok(found) => delete_keeping_time(fs, parent, &name, &found),
                Err(error) => Err(error),
            };
            deleted(&doomed.path, result)?;
        }
        Ok(())
    }
}

/// Deletes an object and restores the times of its directory, which were already copied from the
/// source.
fn delete_keeping_time(fs: &FileSystem, parent: Ino, name: &[u8], found: &Attributes) -> Result<u64> {
    let before = fs.attributes(parent)?;
    let count = delete_tree(fs, parent, name, found)?;
    let set = SetAttributes { mtime: Some(SetTime::To(before.mtime)), ..SetAttributes::default() };
    fs.set_attributes(parent, &set)?;
    Ok(count)
}

/// Deletes an object recursively and returns the number of deleted objects. Memory depends on the
/// depth only.
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
            WalkStep::Entry(ListingEntry { name, attributes }, directory) => {
                let parent = directory.state.2;
                if attributes.is_directory() {
                    tree.descend(fs, b"", attributes.ino, (parent, name, attributes.ino))?;
                    continue;
                }
                fs.unlink(parent, &name)?;
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
/// that is filled again and again is left, with its parents. Calls `on_other_link` for each file that has
/// another hard link, whether or not that is deleted later. `go_on` is called before each object.
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
            WalkStep::Entry(ListingEntry { name, attributes }, directory) => {
                let parent = directory.state.2;
                match fs.lookup(parent, &name) {
                    Ok(now) if now.ino != attributes.ino => {}
                    Ok(now) if now.is_directory() => tree.descend(fs, b"", now.ino, (parent, name, now.ino))?,
                    Ok(now) => count += unlink(parent, &name, &now)?,
                    Err(Error::NotFound | Error::Stale) => {}
                    Err(error) => return Err(error),
                }
            }
        }
    }
    Ok(count)
}
