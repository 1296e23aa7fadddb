//! Compares two versions of one archive by path.
//!
//! # Why nothing is missed, and nothing reported twice
//!
//! The trees give the inodes that differ and the entries that were added and removed
//! (`FileSystem::changes_since`); inode numbers are never reused. An entry is a directory's inode
//! number and a name, so it stays the same when its parent directories change.
//!
//! 1. Removed and added entries of an inode that exists in both versions are paired as renames, as
//!    many as there are of both. A pair is reported, unless its directory replaced the other
//!    directory under the same name (3): then its path is unchanged.
//! 2. All other entries of a directory in both versions are compared where they differ: the removed
//!    object with the added object of the same name. An object without counterpart is added or
//!    removed, with all its descendants.
//! 3. If both are directories, the new one replaced the old one, and their entries are compared in
//!    the same way.
//! 4. The records of an inode itself are compared once, and reported for each name that stayed or
//!    was renamed.
//!
//! A path of the newer version that is not reported therefore existed in the older version: at the
//! old path of its longest renamed prefix. Differences are reported with their path in the newer
//! version, removals with that in the older one.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::Entries;
use super::attributes::split_names;
use super::path_ops::none_if_missing;
use super::walk::join;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, ChangedInode, FileSystem, mode};

/// Kind of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathChangeKind {
    Removed,
    Added,
    /// Content, owner, mode, modification time or extended attributes.
    Changed,
    /// The object was replaced by one of another type.
    TypeChanged,
    /// The object was moved with its descendants; `changed` if its own records differ too.
    Renamed {
        changed: bool,
    },
}

impl PathChangeKind {
    /// Returns the word for machine-readable output.
    pub fn name(self) -> &'static str {
        match self {
            PathChangeKind::Added => "added",
            PathChangeKind::Removed => "removed",
            PathChangeKind::Changed => "changed",
            PathChangeKind::TypeChanged => "type-changed",
            PathChangeKind::Renamed { .. } => "renamed",
        }
    }

    /// Parses such a word; `changed` applies to renames.
    pub fn of_name(name: &str, changed: bool) -> Option<PathChangeKind> {
        use PathChangeKind::{Added, Changed, Removed, Renamed, TypeChanged};
        [Added, Removed, Changed, TypeChanged, Renamed { changed }].into_iter().find(|kind| kind.name() == name)
    }
}

/// Difference at one path.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PathChange {
    /// Path relative to the root, without a leading slash; empty for the root. In the newer
    /// version, except for removals.
    pub path: Vec<u8>,
    pub kind: PathChangeKind,
    /// Path in the older version, for renames.
    pub from: Option<Vec<u8>>,
}

/// Returns the differences from `older` to `newer`, two versions of one open archive, sorted by
/// path. Time and memory grow with the number of differences: `go_on` is called periodically with
/// the number of objects, entries and paths in memory, some hundred bytes each.
///
/// # Errors
/// `Invalid` for versions of different archives; errors of reading, and of `go_on`.
pub fn compare(
    older: &FileSystem,
    newer: &FileSystem,
    go_on: &mut dyn FnMut(usize) -> Result<()>,
) -> Result<Vec<PathChange>> {
    let (mut changes, mut held) = (Vec::new(), 0);
    newer.changes_since(older, &mut |change| {
        if !change.is_only_repacked() {
            held += 1 + change.removed_entries.len() + change.added_entries.len();
            changes.push(change);
        }
        go_on(held)
    })?;
    let mut comparison = Comparison {
        older,
        newer,
        go_on,
        held,
        renamed: Vec::new(),
        removed_entries: HashSet::new(),
        added_entries: HashSet::new(),
        replaced: HashMap::new(),
        found: BTreeSet::new(),
    };
    comparison.run(&changes)?;
    Ok(comparison.found.into_iter().collect())
}

/// Directory entry: inode of the directory, and name.
type Entry = (Ino, Vec<u8>);

struct Comparison<'a> {
    older: &'a FileSystem,
    newer: &'a FileSystem,
    go_on: &'a mut dyn FnMut(usize) -> Result<()>,
    /// Number of items in memory from the trees, without the results.
    held: usize,
    /// Renames: inode, removed entry and added entry.
    renamed: Vec<(Ino, Entry, Entry)>,
    removed_entries: HashSet<Entry>,
    added_entries: HashSet<Entry>,
    /// Directories only in the older version, with the directory that replaced each.
    replaced: HashMap<Ino, Ino>,
    found: BTreeSet<PathChange>,
}

/// Object of one version, with its path there.
type PathObject = Option<(Vec<u8>, Attributes)>;

impl Comparison<'_> {
    fn run(&mut self, changes: &[ChangedInode]) -> Result<()> {
        let mut both = BTreeMap::new();
        let mut changed = BTreeSet::new();
        for change in changes {
            self.go_on(0)?;
            let (old, new) = (attributes(self.older, change.ino)?, attributes(self.newer, change.ino)?);
            // Inodes in only one version are found by their entries.
            let (Some(old), Some(new)) = (old, new) else { continue };
            if kind(&old) != kind(&new) || self.differ(&old, &new, change.content, change.xattrs)? {
                changed.insert(change.ino);
            }
            both.insert(change.ino, (old, new));
        }
        let removed = entries_by_inode(changes, |change| [&change.removed_entries, &change.added_entries]);
        let added = entries_by_inode(changes, |change| [&change.added_entries, &change.removed_entries]);
        self.pair(&removed, &added)?;

        // Only directories must be located in the older version; they record their own parents.
        let of_both = |ino: &Ino| both.get(ino).is_some_and(|(old, new)| old.is_directory() && new.is_directory());
        let directories: Vec<&ChangedInode> = changes.iter().filter(|change| of_both(&change.ino)).collect();
        let mut old: BTreeSet<Ino> = self.renamed.iter().map(|(_, (directory, _), _)| *directory).collect();
        let mut new: BTreeSet<Ino> = self.renamed.iter().map(|(.., (directory, _))| *directory).collect();
        old.extend(directories.iter().map(|directory| directory.ino));
        new.extend(directories.iter().map(|directory| directory.ino));
        for ino in &changed {
            let come = added.get(ino).map_or(0, BTreeSet::len);
            new.extend(added.get(ino).into_iter().flatten().map(|(directory, _)| *directory));
            // A file with only new names need not be located.
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
        let mut reported = HashSet::new();
        for (ino, from, to) in std::mem::take(&mut self.renamed) {
            let (Some(old), Some(new)) = (one(&old, from.0), one(&new, to.0)) else { continue };
            let new = below(&new, &to.1);
            reported.insert((ino, new.clone()));
            let changed = changed.contains(&ino);
            let stands_for = self.replaced.get(&from.0).unwrap_or(&from.0);
            if (*stands_for, &from.1) != (to.0, &to.1) {
                let from = below(&old, &from.1);
                // Nothing remains to be reported about a directory that replaced the previous one.
                if from == new {
                    continue;
                }
                let from = Some(from);
                self.found.insert(PathChange { path: new, kind: PathChangeKind::Renamed { changed }, from });
            } else if changed {
                self.tell(new, PathChangeKind::Changed);
            }
        }
        for ino in changed {
            let Some((before, after)) = both.get(&ino) else { continue };
            let what = if kind(before) == kind(after) { PathChangeKind::Changed } else { PathChangeKind::TypeChanged };
            let come = added.get(&ino).into_iter().flatten();
            reported.extend(come.filter_map(|(directory, name)| Some((ino, below(&one(&new, *directory)?, name)))));
            for path in new.get(&ino).into_iter().flatten() {
                if !reported.contains(&(ino, path.clone())) {
                    self.tell(path.clone(), what);
                }
            }
        }
        Ok(())
    }

    /// Pairs removed and added entries as renames.
    fn pair(&mut self, removed: &EntriesByInode, added: &EntriesByInode) -> Result<()> {
        for (ino, gone) in removed {
            let Some(come) = added.get(ino) else { continue };
            self.go_on(0)?;
            let (old, new) = (attributes(self.older, *ino)?, attributes(self.newer, *ino)?);
            let is_one_object = old.zip(new).is_some_and(|(old, new)| kind(&old) == kind(&new));
            if !is_one_object {
                continue;
            }
            // For several names, first those that moved to another directory under the same name.
            let (mut gone, mut unpaired): (Vec<&Entry>, Vec<&Entry>) = (gone.iter().collect(), Vec::new());
            let mut pairs = Vec::new();
            for to in come {
                match gone.iter().position(|from| from.1 == to.1) {
                    Some(at) => pairs.push((gone.remove(at), to)),
                    None => unpaired.push(to),
                }
            }
            pairs.extend(gone.into_iter().zip(unpaired));
            for (from, to) in pairs {
                self.removed_entries.insert(from.clone());
                self.added_entries.insert(to.clone());
                self.renamed.push((*ino, from.clone(), to.clone()));
            }
        }
        Ok(())
    }

    fn go_on(&mut self, waiting: usize) -> Result<()> {
        (self.go_on)(self.held + waiting + self.found.len())
    }

    fn tell(&mut self, path: Vec<u8>, kind: PathChangeKind) {
        self.found.insert(PathChange { path, kind, from: None });
    }

    /// Compares added and removed entries of a directory in both versions, with its paths there.
    fn entries(&mut self, directory: &ChangedInode, old: &[u8], new: &[u8]) -> Result<()> {
        let names = |entries: &[(Vec<u8>, Ino)]| entries.iter().map(|(name, _)| name.clone()).collect::<BTreeSet<_>>();
        let (gone, come) = (names(&directory.removed_entries), names(&directory.added_entries));
        let mut waiting = Vec::new();
        for name in gone.union(&come) {
            let there = |fs: &FileSystem, is_there: bool, path: &[u8]| -> Result<PathObject> {
                let found = if is_there { none_if_missing(fs.lookup(directory.ino, name))? } else { None };
                Ok(found.map(|found| (below(path, name), found)))
            };
            let at = (directory.ino, name.clone());
            let before = there(self.older, gone.contains(name) && !self.removed_entries.contains(&at), old)?;
            let after = there(self.newer, come.contains(name) && !self.added_entries.contains(&at), new)?;
            waiting.push((before, after));
        }
        self.pairs(waiting)
    }

    /// Compares objects at the same path, and their descendants.
    fn pairs(&mut self, mut waiting: Vec<(PathObject, PathObject)>) -> Result<()> {
        while let Some((old, new)) = waiting.pop() {
            self.go_on(waiting.len())?;
            match (&old, &new) {
                (None, None) => continue,
                (None, Some((path, _))) => self.tell(path.clone(), PathChangeKind::Added),
                (Some((path, _)), None) => self.tell(path.clone(), PathChangeKind::Removed),
                // Compared by its own records and entries.
                (Some((_, old)), Some((_, new))) if old.ino == new.ino => continue,
                (Some((_, old)), Some((path, new))) if kind(old) != kind(new) => {
                    self.tell(path.clone(), PathChangeKind::TypeChanged);
                }
                (Some((_, old)), Some((path, new))) => {
                    if self.differ(old, new, true, true)? {
                        self.tell(path.clone(), PathChangeKind::Changed);
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

    /// Queues the entries of both objects for comparison if these are directories, without renames.
    fn descend(&self, old: PathObject, new: PathObject, waiting: &mut Vec<(PathObject, PathObject)>) -> Result<()> {
        let mut both: BTreeMap<Vec<u8>, (PathObject, PathObject)> = BTreeMap::new();
        let mut list = |fs, there: PathObject, renamed: &HashSet<Entry>, is_new: bool| -> Result<()> {
            let Some((path, directory)) = there.filter(|(_, there)| there.is_directory()) else { return Ok(()) };
            let mut entries = Entries::new(fs, directory.ino)?;
            while let Some(entry) = entries.next_entry() {
                let entry = entry?;
                let at = (directory.ino, entry.name.to_vec());
                if renamed.contains(&at) {
                    continue;
                }
                let there = Some((below(&path, &at.1), *entry.attributes));
                let pair = both.entry(at.1).or_default();
                *(if is_new { &mut pair.1 } else { &mut pair.0 }) = there;
            }
            Ok(())
        };
        list(self.older, old, &self.removed_entries, false)?;
        list(self.newer, new, &self.added_entries, true)?;
        waiting.extend(both.into_values());
        Ok(())
    }

    /// Returns whether two objects of one type differ. Owner, mode, device number, extended
    /// attributes (with `xattrs`), content (with `content`) and the modification time are compared.
    /// Ignored are the access time, the times that cannot be set (change and birth), the number of
    /// links, and the modification time of a directory, which shows only that an entry was added or
    /// removed. Content is compared by bytes, so relocated or rewritten equal content does not
    /// differ.
    fn differ(&self, old: &Attributes, new: &Attributes, content: bool, xattrs: bool) -> Result<bool> {
        let (older, newer) = (self.older, self.newer);
        if (old.mode, old.uid, old.gid, old.rdev) != (new.mode, new.uid, new.gid, new.rdev) {
            return Ok(true);
        }
        if !old.is_directory() && (old.size, old.mtime) != (new.size, new.mtime) {
            return Ok(true);
        }
        if xattrs && xattrs_of(older, old.ino)? != xattrs_of(newer, new.ino)? {
            return Ok(true);
        }
        match kind(old) {
            mode::REGULAR if content => {
                let mut first = SnapshotObject { fs: older, attributes: old };
                bytes_differ(&mut first, &mut SnapshotObject { fs: newer, attributes: new }, old.size)
            }
            mode::SYMLINK if content => Ok(older.read_link(old.ino)? != newer.read_link(new.ino)?),
            _ => Ok(false),
        }
    }
}

type EntriesByInode = BTreeMap<Ino, BTreeSet<Entry>>;

/// Returns the entries of the first of two lists by inode. An entry that is also in the second only
/// moved within the directory's list, and is left out.
fn entries_by_inode(
    changes: &[ChangedInode],
    lists: impl Fn(&ChangedInode) -> [&Vec<(Vec<u8>, Ino)>; 2],
) -> EntriesByInode {
    let mut entries = EntriesByInode::new();
    for change in changes {
        let [own, other] = lists(change);
        let other: BTreeSet<&(Vec<u8>, Ino)> = other.iter().collect();
        for (name, ino) in own.iter().filter(|entry| !other.contains(entry)) {
            entries.entry(*ino).or_default().insert((change.ino, name.clone()));
        }
    }
    entries
}

fn below(path: &[u8], name: &[u8]) -> Vec<u8> {
    let mut below = path.to_vec();
    join(&mut below, name);
    below
}

/// Returns `None` for an inode that does not exist, or is an orphan waiting to be reclaimed.
fn attributes(fs: &FileSystem, ino: Ino) -> Result<Option<Attributes>> {
    match fs.attributes(ino) {
        Err(Error::Stale) => Ok(None),
        found => Ok(Some(found?).filter(|found| found.links > 0)),
    }
}

/// Bytes of each side that are compared at once.
const PIECE: u64 = 1 << 20;
/// Files up to this size are read without a search for holes, which is faster.
const SMALL: u64 = 64 << 10;

pub(super) struct SnapshotObject<'a> {
    pub(super) fs: &'a FileSystem,
    pub(super) attributes: &'a Attributes,
}

pub(super) fn kind(attributes: &Attributes) -> u32 {
    attributes.mode & mode::TYPE
}

/// Returns names and values of the extended attributes, sorted by name.
pub(super) fn xattrs_of(fs: &FileSystem, ino: Ino) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let names = fs.list_xattrs(ino)?;
    let mut names: Vec<&[u8]> = split_names(&names).collect();
    names.sort_unstable();
    names.into_iter().map(|name| Ok((name.to_vec(), fs.xattr(ino, name)?))).collect()
}

/// Reader of a regular file's content, in an archive or on the host.
pub(super) trait ContentReader {
    /// Returns the offset of the first data at or after `at`; `None` if the rest is a hole.
    fn next_data(&mut self, at: u64) -> Result<Option<u64>>;

    /// Returns the number of bytes read, which is less than `length` only at the end.
    fn read_into(&mut self, at: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize>;
}

impl ContentReader for SnapshotObject<'_> {
    fn next_data(&mut self, at: u64) -> Result<Option<u64>> {
        match self.fs.next_data(self.attributes.ino, at) {
            Err(Error::NoSuchRange) => Ok(None),
            found => found.map(Some),
        }
    }

    fn read_into(&mut self, at: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        self.fs.read_into(self.attributes.ino, at, length, buffer)
    }
}

/// Returns whether two files of the same size differ in content. Common holes are skipped.
pub(super) fn bytes_differ(one: &mut dyn ContentReader, other: &mut dyn ContentReader, size: u64) -> Result<bool> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < size {
        let mut data = || Ok::<_, Error>(one.next_data(at)?.into_iter().chain(other.next_data(at)?).min());
        let Some(start) = (if size <= SMALL { Some(at) } else { data()? }) else { return Ok(false) };
        let length = PIECE.min(size.saturating_sub(start)) as usize;
        let read = one.read_into(start, length, &mut first)?;
        let other_read = other.read_into(start, length, &mut second)?;
        if first[..read] != second[..other_read] {
            return Ok(true);
        }
        at = start + length as u64;
    }
    Ok(false)
}
