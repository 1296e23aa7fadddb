//! What differs between two moments of one archive, by path.
//!
//! # Why nothing is missed, and nothing told twice
//! The trees tell which inodes differ and which entries came and went (`FileSystem::changes_since`). A path leads from the root through entries, so it
//! means another object in the two moments only when an entry on its way came, went or names another inode. The first such entry lies in a directory that
//! is reached by the same path in both: there the two objects are compared, with everything below them. So entries of a directory that has
//! another path now, or is only in one moment, need not be looked at: an entry further up speaks for them. A path that leads to one inode in both
//! differs only in what that inode's records say, and each inode that has some is compared once, for all paths that it has in both moments.
//! Results are kept by path, so what two ways lead to is told once.

use std::collections::{BTreeMap, BTreeSet};

use super::content::{Seen, Suspects, differ, kind};
use crate::error::{Error, Result};
use crate::exchange::Entries;
use crate::exchange::walk::join;
use crate::format::Ino;
use crate::fs::{Attributes, ChangedInode, FileSystem};

/// What became of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DifferingKind {
    Added,
    Removed,
    /// Content, owner, mode, modification time or extended attributes.
    Changed,
    /// What is there now is another kind of object.
    TypeChanged,
}

impl DifferingKind {
    pub const ALL: [DifferingKind; 4] =
        [DifferingKind::Added, DifferingKind::Removed, DifferingKind::Changed, DifferingKind::TypeChanged];

    /// One word, as programs are told.
    pub fn name(self) -> &'static str {
        match self {
            DifferingKind::Added => "added",
            DifferingKind::Removed => "removed",
            DifferingKind::Changed => "changed",
            DifferingKind::TypeChanged => "type-changed",
        }
    }

    /// The kind that is called so.
    pub fn of_name(name: &str) -> Option<DifferingKind> {
        DifferingKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// A path that means something else in two moments.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Differing {
    /// From the root, without a slash at its beginning; empty for the root.
    pub path: Vec<u8>,
    pub kind: DifferingKind,
}

/// What differs from `older` to `newer`, two moments of one open archive, by ascending path. What was renamed is removed and added. Takes time
/// and memory by what differs; `go_on` is asked now and then.
///
/// # Errors
/// `Invalid` for moments of different archives; what reading meets, and what `go_on` answers.
pub fn compare(
    older: &FileSystem,
    newer: &FileSystem,
    go_on: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<Differing>> {
    let mut changes = Vec::new();
    newer.changes_since(older, &mut |change| {
        changes.push(change);
        Ok(())
    })?;
    let mut comparison = Comparison { older, newer, go_on, found: BTreeMap::new() };
    comparison.inodes(changes)?;
    Ok(comparison.found.into_iter().map(|(path, kind)| Differing { path, kind }).collect())
}

struct Comparison<'a> {
    older: &'a FileSystem,
    newer: &'a FileSystem,
    go_on: &'a mut dyn FnMut() -> Result<()>,
    found: BTreeMap<Vec<u8>, DifferingKind>,
}

/// A path with what each moment has there.
type Pair = (Vec<u8>, Option<Attributes>, Option<Attributes>);

impl Comparison<'_> {
    fn inodes(&mut self, changes: Vec<ChangedInode>) -> Result<()> {
        let mut directories = Vec::new();
        let mut changed = Vec::new();
        let mut wanted = BTreeSet::new();
        for change in changes {
            (self.go_on)()?;
            let (old, new) = (attributes(self.older, change.ino)?, attributes(self.newer, change.ino)?);
            // What only one of them has, an entry tells.
            let (Some(old), Some(new)) = (old, new) else { continue };
            let suspects = Suspects { content: change.content, xattrs: change.xattrs };
            if kind(&old) != kind(&new) || self.differ(&old, &new, suspects)? {
                wanted.insert(change.ino);
                changed.push((old, new));
            }
            if !change.gone.is_empty() || !change.come.is_empty() {
                wanted.insert(change.ino);
                directories.push(change);
            }
        }
        let (old_paths, new_paths) = (self.older.paths_of(&wanted)?, self.newer.paths_of(&wanted)?);
        let in_both = |ino: Ino| -> Vec<Vec<u8>> {
            let (old, new) = (old_paths.get(&ino), new_paths.get(&ino));
            let both = old.into_iter().flatten().filter(|path| new.is_some_and(|new| new.contains(path)));
            both.cloned().collect()
        };
        for (old, new) in &changed {
            for path in in_both(old.ino) {
                let what = if kind(old) == kind(new) { DifferingKind::Changed } else { DifferingKind::TypeChanged };
                self.found.insert(path, what);
            }
        }
        for directory in directories {
            for path in in_both(directory.ino) {
                self.entries(&path, &directory)?;
            }
        }
        Ok(())
    }

    /// Compares what came and went in a directory that has the same path in both.
    fn entries(&mut self, path: &[u8], directory: &ChangedInode) -> Result<()> {
        let names = directory.gone.iter().chain(&directory.come).map(|(name, _)| name.clone());
        let mut waiting = Vec::new();
        for name in names.collect::<BTreeSet<_>>() {
            let old = entry(self.older, directory.ino, &name)?;
            let new = entry(self.newer, directory.ino, &name)?;
            waiting.push((below(path, &name), old, new));
        }
        self.pairs(waiting)
    }

    /// Compares the objects at paths, and what is below them.
    fn pairs(&mut self, mut waiting: Vec<Pair>) -> Result<()> {
        while let Some((path, old, new)) = waiting.pop() {
            (self.go_on)()?;
            let kind = match (&old, &new) {
                (None, None) => continue,
                (None, Some(_)) => DifferingKind::Added,
                (Some(_), None) => DifferingKind::Removed,
                // Its own records speak for it and what is in it.
                (Some(old), Some(new)) if old.ino == new.ino => continue,
                (Some(old), Some(new)) if kind(old) != kind(new) => DifferingKind::TypeChanged,
                (Some(old), Some(new)) => {
                    if self.differ(old, new, Suspects::ALL)? {
                        self.found.insert(path.clone(), DifferingKind::Changed);
                    }
                    self.descend(&path, Some(old), Some(new), &mut waiting)?;
                    continue;
                }
            };
            self.found.insert(path.clone(), kind);
            self.descend(&path, old.as_ref(), new.as_ref(), &mut waiting)?;
        }
        Ok(())
    }

    /// Has the entries of both compared, as far as these are directories.
    fn descend(
        &self,
        path: &[u8],
        old: Option<&Attributes>,
        new: Option<&Attributes>,
        waiting: &mut Vec<Pair>,
    ) -> Result<()> {
        let mut both: BTreeMap<Vec<u8>, (Option<Attributes>, Option<Attributes>)> = BTreeMap::new();
        if let Some(old) = old.filter(|old| old.is_directory()) {
            for entry in Entries::new(self.older, old.ino)? {
                let entry = entry?;
                both.entry(entry.name).or_default().0 = Some(entry.attributes);
            }
        }
        if let Some(new) = new.filter(|new| new.is_directory()) {
            for entry in Entries::new(self.newer, new.ino)? {
                let entry = entry?;
                both.entry(entry.name).or_default().1 = Some(entry.attributes);
            }
        }
        waiting.extend(both.into_iter().map(|(name, (old, new))| (below(path, &name), old, new)));
        Ok(())
    }

    fn differ(&self, old: &Attributes, new: &Attributes, suspects: Suspects) -> Result<bool> {
        let (old, new) = (Seen { fs: self.older, attributes: old }, Seen { fs: self.newer, attributes: new });
        differ(old, new, suspects)
    }
}

fn below(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut below = path.to_vec();
    join(&mut below, name);
    below
}

/// None for what is not there, or has no name any more and waits to be reclaimed.
fn attributes(fs: &FileSystem, ino: Ino) -> Result<Option<Attributes>> {
    match fs.attributes(ino) {
        Err(Error::Stale) => Ok(None),
        found => Ok(Some(found?).filter(|found| found.links > 0)),
    }
}

fn entry(fs: &FileSystem, directory: Ino, name: &[u8]) -> Result<Option<Attributes>> {
    crate::exchange::path::if_there(fs.lookup(directory, name))
}
