//! What differs between two moments of one archive, by path.
//!
//! # Why nothing is missed, and nothing told twice
//! The trees tell which inodes differ and which entries came and went (`FileSystem::changes_since`); a number means one inode for ever. An entry is a
//! directory's number and a name, so it stays the same whatever becomes of the directories above it.
//!
//! 1. Of an inode that is there in both, an entry that went and one that came are one that was renamed, as many as there are of both. It is told as
//!    such, unless its directory was put in the place of the other one under the same name (3): then its path says the same as before.
//! 2. All other entries of a directory that is there in both are compared where they differ: the object of the one that went with that of the
//!    one that came under the same name. What has no counterpart is added or removed, with everything below it.
//! 3. Where both are directories, the new one was put in the place of the old one, and their entries are compared in the same way.
//! 4. What an inode's own records say is compared once, and told for each name that stayed or was renamed.
//!
//! So a path of the newer moment that is not told comes from the older one: from the path that the longest renamed beginning of it had. What is told stands
//! under its path in the newer moment, and what was removed under that in the older one.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::content::{Seen, Suspects, differ, kind};
use crate::error::{Error, Result};
use crate::exchange::Entries;
use crate::exchange::walk::join;
use crate::format::Ino;
use crate::fs::{Attributes, ChangedInode, FileSystem};

/// What became of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DifferingKind {
    Removed,
    Added,
    /// Content, owner, mode, modification time or extended attributes.
    Changed,
    /// What is there now is another kind of object.
    TypeChanged,
    /// It had another path, with everything below it; and whether it is changed as well.
    Renamed {
        changed: bool,
    },
}

impl DifferingKind {
    /// One word, as programs are told.
    pub fn name(self) -> &'static str {
        match self {
            DifferingKind::Added => "added",
            DifferingKind::Removed => "removed",
            DifferingKind::Changed => "changed",
            DifferingKind::TypeChanged => "type-changed",
            DifferingKind::Renamed { .. } => "renamed",
        }
    }

    /// The kind that is called so; `changed` of what was renamed.
    pub fn of_name(name: &str, changed: bool) -> Option<DifferingKind> {
        use DifferingKind::{Added, Changed, Removed, Renamed, TypeChanged};
        [Added, Removed, Changed, TypeChanged, Renamed { changed }].into_iter().find(|kind| kind.name() == name)
    }
}

/// A path that means something else in two moments.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Differing {
    /// From the root, without a slash at its beginning; empty for the root. In the newer moment, but for what was removed.
    pub path: Vec<u8>,
    pub kind: DifferingKind,
    /// The path in the older moment of what was renamed.
    pub from: Option<Vec<u8>>,
}

/// What differs from `older` to `newer`, two moments of one open archive, by ascending path. Takes time and memory by what differs: `go_on` is asked now and
/// then, and told how many objects, entries and paths are held, some hundred bytes each.
///
/// # Errors
/// `Invalid` for moments of different archives; what reading meets, and what `go_on` answers.
pub fn compare(
    older: &FileSystem,
    newer: &FileSystem,
    go_on: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Vec<Differing>> {
    let (mut changes, mut held) = (Vec::new(), 0);
    newer.changes_since(older, &mut |change| {
        held += 1 + change.gone.len() + change.come.len();
        changes.push(change);
        go_on(held)
    })?;
    let mut comparison = Comparison {
        older,
        newer,
        go_on,
        held,
        renamed: Vec::new(),
        gone: HashSet::new(),
        come: HashSet::new(),
        replaced: HashMap::new(),
        found: BTreeSet::new(),
    };
    comparison.run(&changes)?;
    Ok(comparison.found.into_iter().collect())
}

/// Where an inode is named: directory and name.
type Entry = (Ino, Vec<u8>);

struct Comparison<'a> {
    older: &'a FileSystem,
    newer: &'a FileSystem,
    go_on: &'a mut dyn FnMut(usize) -> Result<()>,
    /// What the trees tell, beside what is found.
    held: usize,
    /// What was renamed: the entries that went and came.
    renamed: Vec<(Ino, Entry, Entry)>,
    gone: HashSet<Entry>,
    come: HashSet<Entry>,
    /// Directories that are only in the older moment, with that which is in the place of each.
    replaced: HashMap<Ino, Ino>,
    found: BTreeSet<Differing>,
}

/// An object of one moment, with its path there.
type There = Option<(Vec<u8>, Attributes)>;

impl Comparison<'_> {
    fn run(&mut self, changes: &[ChangedInode]) -> Result<()> {
        let mut both = BTreeMap::new();
        let mut changed = BTreeSet::new();
        for change in changes {
            self.go_on(0)?;
            let (old, new) = (attributes(self.older, change.ino)?, attributes(self.newer, change.ino)?);
            // What only one of them has, an entry tells.
            let (Some(old), Some(new)) = (old, new) else { continue };
            let suspects = Suspects { content: change.content, xattrs: change.xattrs };
            if kind(&old) != kind(&new) || self.differ(&old, &new, suspects)? {
                changed.insert(change.ino);
            }
            both.insert(change.ino, (old, new));
        }
        let entries = Entered::of(changes);
        self.pair(&entries)?;

        // Directories alone have to be named in the older moment, and tell by themselves where they are.
        let of_both = |ino: &Ino| both.get(ino).is_some_and(|(old, new)| old.is_directory() && new.is_directory());
        let directories: Vec<&ChangedInode> = changes.iter().filter(|change| of_both(&change.ino)).collect();
        let mut old: BTreeSet<Ino> = self.renamed.iter().map(|(_, (directory, _), _)| *directory).collect();
        let mut new: BTreeSet<Ino> = self.renamed.iter().map(|(.., (directory, _))| *directory).collect();
        old.extend(directories.iter().map(|directory| directory.ino));
        new.extend(directories.iter().map(|directory| directory.ino));
        for ino in &changed {
            let come = entries.come.get(ino).map_or(0, BTreeSet::len);
            new.extend(entries.come.get(ino).into_iter().flatten().map(|(directory, _)| *directory));
            // A file that has no name but new ones need not be looked for.
            if both.get(ino).is_some_and(|(_, new)| new.is_directory() || u64::from(new.links) > come as u64) {
                new.insert(*ino);
            }
        }
        let held = self.held;
        let go_on = &mut || (self.go_on)(held);
        let (old, new) = (self.older.paths_of(&old, go_on)?, self.newer.paths_of(&new, go_on)?);
        let one = |paths: &HashMap<Ino, Vec<Vec<u8>>>, ino| paths.get(&ino).and_then(|paths| paths.first()).cloned();

        for directory in directories {
            let (Some(old), Some(new)) = (one(&old, directory.ino), one(&new, directory.ino)) else { continue };
            self.entries(directory, &old, &new)?;
        }
        let mut told = HashSet::new();
        for (ino, from, to) in std::mem::take(&mut self.renamed) {
            let (Some(old), Some(new)) = (one(&old, from.0), one(&new, to.0)) else { continue };
            let new = below(&new, &to.1);
            told.insert((ino, new.clone()));
            let changed = changed.contains(&ino);
            let stands_for = self.replaced.get(&from.0).unwrap_or(&from.0);
            if (*stands_for, &from.1) != (to.0, &to.1) {
                let from = below(&old, &from.1);
                // Of a directory that took the place of the one before it nothing is left to be told.
                if from == new {
                    continue;
                }
                let from = Some(from);
                self.found.insert(Differing { path: new, kind: DifferingKind::Renamed { changed }, from });
            } else if changed {
                self.tell(new, DifferingKind::Changed);
            }
        }
        for ino in changed {
            let Some((before, after)) = both.get(&ino) else { continue };
            let what = if kind(before) == kind(after) { DifferingKind::Changed } else { DifferingKind::TypeChanged };
            let come = entries.come.get(&ino).into_iter().flatten();
            told.extend(come.filter_map(|(directory, name)| Some((ino, below(&one(&new, *directory)?, name)))));
            for path in new.get(&ino).into_iter().flatten() {
                if !told.contains(&(ino, path.clone())) {
                    self.tell(path.clone(), what);
                }
            }
        }
        Ok(())
    }

    /// Finds what was renamed.
    fn pair(&mut self, entries: &Entered) -> Result<()> {
        for (ino, gone) in &entries.gone {
            let Some(come) = entries.come.get(ino) else { continue };
            self.go_on(0)?;
            let (old, new) = (attributes(self.older, *ino)?, attributes(self.newer, *ino)?);
            let is_one_object = old.zip(new).is_some_and(|(old, new)| kind(&old) == kind(&new));
            if !is_one_object {
                continue;
            }
            // Of several names, those that went to another directory as they were.
            let (mut gone, mut left): (Vec<&Entry>, Vec<&Entry>) = (gone.iter().collect(), Vec::new());
            let mut pairs = Vec::new();
            for to in come {
                match gone.iter().position(|from| from.1 == to.1) {
                    Some(at) => pairs.push((gone.remove(at), to)),
                    None => left.push(to),
                }
            }
            pairs.extend(gone.into_iter().zip(left));
            for (from, to) in pairs {
                self.gone.insert(from.clone());
                self.come.insert(to.clone());
                self.renamed.push((*ino, from.clone(), to.clone()));
            }
        }
        Ok(())
    }

    fn go_on(&mut self, waiting: usize) -> Result<()> {
        (self.go_on)(self.held + waiting + self.found.len())
    }

    fn tell(&mut self, path: Vec<u8>, kind: DifferingKind) {
        self.found.insert(Differing { path, kind, from: None });
    }

    /// Compares what came and went in a directory that is in both, with its paths there.
    fn entries(&mut self, directory: &ChangedInode, old: &[u8], new: &[u8]) -> Result<()> {
        let names = |entries: &[(Vec<u8>, Ino)]| entries.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>();
        let (gone, come) = (names(&directory.gone), names(&directory.come));
        let mut waiting = Vec::new();
        for name in gone.union(&come) {
            let there = |fs: &FileSystem, is_there: bool, path: &[u8]| -> Result<There> {
                let found = if is_there { entry(fs, directory.ino, name)? } else { None };
                Ok(found.map(|found| (below(path, name), found)))
            };
            let at = (directory.ino, name.clone());
            let before = there(self.older, gone.contains(name) && !self.gone.contains(&at), old)?;
            let after = there(self.newer, come.contains(name) && !self.come.contains(&at), new)?;
            waiting.push((before, after));
        }
        self.pairs(waiting)
    }

    /// Compares objects in the same place, and what is below them.
    fn pairs(&mut self, mut waiting: Vec<(There, There)>) -> Result<()> {
        while let Some((old, new)) = waiting.pop() {
            self.go_on(waiting.len())?;
            match (&old, &new) {
                (None, None) => continue,
                (None, Some((path, _))) => self.tell(path.clone(), DifferingKind::Added),
                (Some((path, _)), None) => self.tell(path.clone(), DifferingKind::Removed),
                // Its own records speak for it and what is in it.
                (Some((_, old)), Some((_, new))) if old.ino == new.ino => continue,
                (Some((_, old)), Some((path, new))) if kind(old) != kind(new) => {
                    self.tell(path.clone(), DifferingKind::TypeChanged);
                }
                (Some((_, old)), Some((path, new))) => {
                    if self.differ(old, new, Suspects::ALL)? {
                        self.tell(path.clone(), DifferingKind::Changed);
                    }
                    if old.is_directory() {
                        self.replaced.insert(old.ino, new.ino);
                    }
                }
            }
            self.descend(old, new, &mut waiting)?;
        }
        Ok(())
    }

    /// Has the entries of both compared, as far as these are directories, and nothing that was renamed.
    fn descend(&self, old: There, new: There, waiting: &mut Vec<(There, There)>) -> Result<()> {
        let mut both: BTreeMap<Vec<u8>, (There, There)> = BTreeMap::new();
        let mut list = |fs, there: There, renamed: &HashSet<Entry>, is_new: bool| -> Result<()> {
            let Some((path, directory)) = there.filter(|(_, there)| there.is_directory()) else { return Ok(()) };
            for entry in Entries::new(fs, directory.ino)? {
                let entry = entry?;
                let at = (directory.ino, entry.name);
                if renamed.contains(&at) {
                    continue;
                }
                let there = Some((below(&path, &at.1), entry.attributes));
                let pair = both.entry(at.1).or_default();
                *(if is_new { &mut pair.1 } else { &mut pair.0 }) = there;
            }
            Ok(())
        };
        list(self.older, old, &self.gone, false)?;
        list(self.newer, new, &self.come, true)?;
        waiting.extend(both.into_values());
        Ok(())
    }

    fn differ(&self, old: &Attributes, new: &Attributes, suspects: Suspects) -> Result<bool> {
        let (old, new) = (Seen { fs: self.older, attributes: old }, Seen { fs: self.newer, attributes: new });
        differ(old, new, suspects)
    }
}

/// The entries that went and came, by what they name, without those that stayed and have another place in the list.
struct Entered {
    gone: BTreeMap<Ino, BTreeSet<Entry>>,
    come: BTreeMap<Ino, BTreeSet<Entry>>,
}

impl Entered {
    fn of(changes: &[ChangedInode]) -> Entered {
        let mut entered = Entered { gone: BTreeMap::new(), come: BTreeMap::new() };
        for change in changes {
            let come: BTreeSet<&(Vec<u8>, Ino)> = change.come.iter().collect();
            let moved: BTreeSet<&(Vec<u8>, Ino)> = change.gone.iter().filter(|gone| come.contains(gone)).collect();
            for (list, entries) in [(&change.gone, &mut entered.gone), (&change.come, &mut entered.come)] {
                for entry @ (name, ino) in list {
                    if !moved.contains(entry) {
                        entries.entry(*ino).or_default().insert((change.ino, name.clone()));
                    }
                }
            }
        }
        entered
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
