//! Deletes from an archive: whole trees, and what a plan of mirroring says when everything else is done.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use super::Entry;
use super::walk::{Directory, Step, Tree};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, SetAttributes, SetTime};

/// What mirroring will delete. Made before the copying, carried out after it.
#[derive(Clone, Debug, Default)]
pub struct MirrorPlan {
    /// What goes as a whole, in no particular order.
    pub deletions: Vec<Deletion>,
    /// Objects that these are, with everything below them.
    pub deleted: u64,
    /// Objects that the archive has in the places of the sources, without what the filter leaves out.
    pub entries: u64,
    /// Sources that are empty directories although the archive has something in their places.
    pub empty: Vec<PathBuf>,
    doomed: HashMap<(Ino, Vec<u8>), Doomed>,
    /// Directories in whose places the sources have something else.
    replaceable: HashSet<Ino>,
}

/// An object of the archive that is to go.
#[derive(Clone, Debug)]
pub struct Deletion {
    /// From the root of the archive.
    pub path: Vec<u8>,
    /// With everything below it.
    pub entries: u64,
}

#[derive(Clone, Debug)]
struct Doomed {
    ino: Ino,
    path: Vec<u8>,
}

impl MirrorPlan {
    /// Plans to delete an object, the name of a directory, with what is below it: so many objects.
    pub(super) fn delete(&mut self, name: (Ino, Vec<u8>), ino: Ino, path: Vec<u8>, below: u64) {
        self.count(path.clone(), below);
        self.doomed.insert(name, Doomed { ino, path });
    }

    /// Plans that a directory makes way for something else of the sources.
    pub(super) fn replace(&mut self, directory: Ino, path: Vec<u8>, below: u64) {
        self.count(path, below);
        self.replaceable.insert(directory);
    }

    fn count(&mut self, path: Vec<u8>, below: u64) {
        self.entries += below;
        self.deleted += below + 1;
        self.deletions.push(Deletion { path, entries: below + 1 });
    }

    /// An object that is in the source after all is not deleted.
    pub(super) fn spare(&mut self, parent: Ino, name: &[u8]) {
        if !self.doomed.is_empty() {
            self.doomed.remove(&(parent, name.to_vec()));
        }
    }

    /// What is still to go, each with everything below.
    pub(super) fn still_to_go(&self) -> u64 {
        self.doomed.len() as u64
    }

    /// Whether an object of the archive may make way for one of the source. A directory only if its deletion was planned, and so counted.
    ///
    /// # Errors
    /// `Invalid` when it may not.
    pub(super) fn may_replace(&self, existing: &Attributes) -> Result<()> {
        if existing.is_directory() && !self.replaceable.contains(&existing.ino) {
            return Err(Error::invalid("it became another kind of object since the plan was made"));
        }
        Ok(())
    }

    /// Deletes what is still to go, and calls `deleted` with each path and the result: how many objects it was.
    pub(super) fn carry_out(
        &mut self,
        fs: &FileSystem,
        mut deleted: impl FnMut(&[u8], Result<u64>) -> Result<()>,
    ) -> Result<()> {
        for ((parent, name), doomed) in std::mem::take(&mut self.doomed) {
            let result = match fs.lookup(parent, &name) {
                // Replaced or gone since.
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

/// The directory has got its times from the source already.
fn delete_keeping_time(fs: &FileSystem, parent: Ino, name: &[u8], found: &Attributes) -> Result<u64> {
    let before = fs.attributes(parent)?;
    let count = delete_tree(fs, parent, name, found)?;
    let set = SetAttributes { mtime: Some(SetTime::To(before.mtime)), ..SetAttributes::default() };
    fs.set_attributes(parent, &set)?;
    Ok(count)
}

/// Deletes an object with everything below it, and returns how many objects that was. Takes memory by depth only.
pub(super) fn delete_tree(fs: &FileSystem, parent: Ino, name: &[u8], found: &Attributes) -> Result<u64> {
    if !found.is_directory() {
        fs.unlink(parent, name)?;
        return Ok(1);
    }
    let mut count = 0;
    let mut tree = Tree::below(fs, b"", found.ino, (parent, name.to_vec(), found.ino))?;
    let mut path = Vec::new(); // of no use here
    while let Some(step) = tree.next(&mut path) {
        match step? {
            Step::Leave(Directory { kept: (parent, name, _), .. }) => fs.remove_directory(parent, &name)?,
            Step::Entry(Entry { name, attributes }, directory) => {
                let parent = directory.kept.2;
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

/// How often directories that are not empty, for somebody made something in them meanwhile, are begun again, all together.
const AGAIN: u32 = 64;

/// The same of a tree that programs may still stand in: what went or moved meanwhile is passed by, for it is somebody's elsewhere, and what comes again and again
/// stays with the directories above it. Calls `left` for each file that has another name, which stays or is still to be deleted; `go_on` is asked before each object.
pub(super) fn delete_beside_users(
    fs: &FileSystem,
    (parent, name): (Ino, &[u8]),
    found: &Attributes,
    left: &mut dyn FnMut(Ino),
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<u64> {
    let mut unlink = |parent, name: &[u8], found: &Attributes| match fs.unlink(parent, name) {
        Err(Error::NotFound | Error::Stale) => Ok(0),
        unlinked => {
            unlinked?;
            if found.links > 1 {
                left(found.ino);
            }
            Ok(1)
        }
    };
    if !found.is_directory() {
        return unlink(parent, name, found);
    }
    let (mut count, mut again) = (0, 0);
    let mut tree = Tree::below(fs, b"", found.ino, (parent, name.to_vec(), found.ino))?;
    let mut path = Vec::new(); // of no use here
    while let Some(step) = tree.next(&mut path) {
        go_on()?;
        match step? {
            Step::Leave(Directory { kept: (parent, name, ino), .. }) => match fs.remove_directory(parent, &name) {
                Err(Error::NotEmpty) if again < AGAIN => {
                    again += 1;
                    tree.descend(fs, b"", ino, (parent, name, ino))?;
                }
                Err(Error::NotEmpty | Error::NotFound | Error::Stale) => {}
                removed => {
                    removed?;
                    count += 1;
                }
            },
            // As it is now: entries are listed many at a time.
            Step::Entry(Entry { name, attributes }, directory) => {
                let parent = directory.kept.2;
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
