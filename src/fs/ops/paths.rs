//! Paths of inodes, searched upward, although only directories store names.
//!
//! A directory's inode has its parent, and one scan of that directory finds the name. A file's
//! inode has no parent, so directories are scanned until as many names are found as the inode has
//! links. The search begins with guesses, cheapest first:
//!
//! 1. The directories in which the file was probably created, with those above them: they were
//!    created before it, so their numbers are below its own. A directory with few entries and files
//!    is just before the file's records; the entries of a larger one fill leaves, which is visible
//!    in the fences without reading the leaves.
//! 2. In a directory, the position of the entry if entries are in the order of their inodes; then
//!    all of it.
//! 3. All directories, once for all files together.
//!
//! The result is complete in each case, since an inode's links are counted.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::values::decode_list;
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::directory::{DIRECTORY_TYPE, EntryTarget, file_type, is_consistent_target, list_key};
use crate::fs::{FileSystem, inode};
use crate::txn::{ReadView, View};

/// Distance in inode numbers within which a small directory is searched before a file.
const NEARBY_INODES: u64 = 256;
/// Maximum fences of leaves scanned backward from a file to a large directory: some 30,000 files.
const MAX_FENCES: u64 = 512;
/// Maximum fences for all files together: a few milliseconds.
const MAX_FENCES_TOTAL: u64 = 100_000;

/// Paths of inodes, from the root and without a leading slash.
pub(crate) type Paths = HashMap<Ino, Vec<Vec<u8>>>;

type ParentAndName = (Ino, Vec<u8>);

impl FileSystem {
    /// Returns all paths of these inodes in the newest version; none for an inode without a name,
    /// and an empty one for the root. `go_on` is called before each step. Errors: read errors, and
    /// errors of `go_on`.
    pub(crate) fn paths_of(&self, wanted: &BTreeSet<Ino>, go_on: &mut dyn FnMut() -> Result<()>) -> Result<Paths> {
        let reading = ReadView::of(&self.volume, self.volume.state());
        let mut search = PathSearch {
            view: reading.view(),
            go_on,
            files: BTreeMap::new(),
            names: HashMap::new(),
            looked_through: HashSet::new(),
            above: HashMap::new(),
            fences: MAX_FENCES_TOTAL,
        };
        for ino in wanted {
            search.add_target(*ino)?;
        }
        search.find_files()?;
        search.name_directories()?;
        Ok(wanted.iter().map(|ino| (*ino, search.paths(*ino))).collect())
    }
}

struct PathSearch<'a> {
    view: View<'a>,
    /// Files, with the number of their names still to be found.
    files: BTreeMap<Ino, u64>,
    names: HashMap<Ino, BTreeSet<ParentAndName>>,
    looked_through: HashSet<Ino>,
    /// Directories on the paths: the parent, and the name once it is found.
    above: HashMap<Ino, (Ino, Option<Vec<u8>>)>,
    fences: u64,
    go_on: &'a mut dyn FnMut() -> Result<()>,
}

impl PathSearch<'_> {
    fn add_target(&mut self, ino: Ino) -> Result<()> {
        match inode::find(self.view, ino)? {
            Some(inode) if file_type(inode.mode) == DIRECTORY_TYPE => self.add_ancestors(ino),
            Some(inode) if inode.links > 0 => {
                self.files.insert(ino, inode.links.into());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn add_ancestors(&mut self, mut directory: Ino) -> Result<()> {
        while directory != ROOT_INO && !self.above.contains_key(&directory) {
            let Some(inode) = inode::find(self.view, directory)? else { break };
            self.above.insert(directory, (inode.parent, None));
            directory = inode.parent;
        }
        Ok(())
    }

    fn find_files(&mut self) -> Result<()> {
        let all: Vec<Ino> = self.files.keys().rev().copied().collect();
        for ino in all {
            (self.go_on)()?;
            // Cheap guesses are tried before any directory is scanned.
            let large = self.find_large_directory_before(ino)?;
            if self.is_found_in_order(ino, large)? {
                continue;
            }
            let near = self.find_nearby_directory(ino, large)?;
            if self.is_found_in_order(ino, near)? {
                continue;
            }
            for guess in [near, large] {
                self.search_upward(ino, guess)?;
            }
        }
        if !self.files.is_empty() {
            self.scan_all()?;
        }
        let directories: BTreeSet<Ino> = self.names.values().flatten().map(|(directory, _)| *directory).collect();
        directories.into_iter().try_for_each(|directory| self.add_ancestors(directory))
    }

    /// Searches a file at its expected position in a directory; returns whether all its names are
    /// found.
    fn is_found_in_order(&mut self, ino: Ino, directory: Option<Ino>) -> Result<bool> {
        if let Some(directory) = directory
            && let Some(name) = find_in_order(self.view, directory, ino)?
        {
            self.note(directory, ino, &name);
        }
        Ok(!self.files.contains_key(&ino))
    }

    /// Scans a directory and its ancestors until all names of a file are found.
    fn search_upward(&mut self, ino: Ino, mut directory: Option<Ino>) -> Result<()> {
        while self.files.contains_key(&ino)
            && let Some(at) = directory
        {
            let is_new = self.scan_directory(at)?.is_some();
            // The ancestors of a directory scanned before were scanned for another file, or not
            // needed.
            if at == ROOT_INO || !is_new {
                break;
            }
            directory = inode::find(self.view, at)?.map(|inode| inode.parent);
        }
        Ok(())
    }

    fn note(&mut self, directory: Ino, ino: Ino, name: &[u8]) {
        if let Some(left) = self.files.get_mut(&ino)
            && self.names.entry(ino).or_default().insert((directory, name.to_vec()))
        {
            *left -= 1;
            if *left == 0 {
                self.files.remove(&ino);
            }
        }
    }

    /// Returns the directory with entries that has the greatest number just below `ino`, if it is
    /// after the large one; entries of that one are not scanned.
    fn find_nearby_directory(&self, ino: Ino, large: Option<Ino>) -> Result<Option<Ino>> {
        let mut found = None;
        let behind = large.map_or(Key::MIN, |large| Key::new(large.0, kind::DIR_LIST + 1, 0));
        let from = Key::new(ino.0.saturating_sub(NEARBY_INODES), 0, 0).max(behind);
        self.view.scan(from, Key::new(ino.0, 0, 0), &mut |key, _| {
            if key.kind == kind::DIR_LIST && key.object > 0 {
                found = Some(Ino(key.object));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// Returns the directory with the greatest number below `ino` that has entries at the start of
    /// a leaf, unless it is too far.
    fn find_large_directory_before(&mut self, ino: Ino) -> Result<Option<Ino>> {
        let mut found = None;
        let most = self.fences.min(MAX_FENCES);
        if most == 0 {
            return Ok(None);
        }
        let mut passed = 0;
        self.view.fences_before(Key::new(ino.0, 0, 0), &mut |fence| {
            passed += 1;
            if matches!(fence.kind, kind::DIR_INDEX | kind::DIR_LIST) && (1..ino.0).contains(&fence.object) {
                found = Some(Ino(fence.object));
            }
            if found.is_some() || passed >= most { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        self.fences -= passed;
        Ok(found)
    }

    /// Takes the names of the target files from a directory, and returns the subdirectories; `None`
    /// if it was scanned before.
    fn scan_directory(&mut self, directory: Ino) -> Result<Option<Vec<Ino>>> {
        if !self.looked_through.insert(directory) {
            return Ok(None);
        }
        (self.go_on)()?;
        let mut below = Vec::new();
        visit_entries(self.view, directory, &mut |name, target| {
            if target.is_directory() {
                below.push(target.ino);
            } else {
                self.note(directory, target.ino, name);
            }
            if self.files.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(Some(below))
    }

    /// Walks down from the root until every name is found.
    fn scan_all(&mut self) -> Result<()> {
        self.looked_through.clear();
        let mut waiting = vec![ROOT_INO];
        while let Some(directory) = waiting.pop() {
            if self.files.is_empty() {
                break;
            }
            for below in self.scan_directory(directory)?.unwrap_or_default() {
                // NAME-5
                let target = EntryTarget { ino: below, file_type: DIRECTORY_TYPE };
                let inode = inode::find(self.view, below)?;
                if inode.is_some_and(|inode| is_consistent_target(directory, target, &inode)) {
                    waiting.push(below);
                }
            }
        }
        Ok(())
    }

    /// Finds the names of the directories on all paths, together for each parent.
    fn name_directories(&mut self) -> Result<()> {
        let mut named_in: BTreeMap<Ino, BTreeSet<Ino>> = BTreeMap::new();
        for (directory, (parent, _)) in &self.above {
            named_in.entry(*parent).or_default().insert(*directory);
        }
        for (parent, mut wanted) in named_in {
            (self.go_on)()?;
            let above = &mut self.above;
            for directory in wanted.clone() {
                if let Some(name) = find_in_order(self.view, parent, directory)? {
                    wanted.remove(&directory);
                    above.insert(directory, (parent, Some(name)));
                }
            }
            if wanted.is_empty() {
                continue;
            }
            visit_entries(self.view, parent, &mut |name, target| {
                if target.is_directory() && wanted.remove(&target.ino) {
                    above.insert(target.ino, (parent, Some(name.to_vec())));
                }
                if wanted.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
        }
        Ok(())
    }

    fn paths(&self, ino: Ino) -> Vec<Vec<u8>> {
        let Some(names) = self.names.get(&ino) else { return self.path(ino).into_iter().collect() };
        let path = |(directory, name): &ParentAndName| {
            let mut path = self.path(*directory)?;
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name);
            Some(path)
        };
        names.iter().filter_map(path).collect()
    }

    fn path(&self, directory: Ino) -> Option<Vec<u8>> {
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut at = directory;
        while at != ROOT_INO {
            let (parent, name) = self.above.get(&at)?;
            parts.push(name.as_deref()?);
            at = *parent;
            // Only a cycle has more components than there are directories.
            if parts.len() > self.above.len() {
                return None;
            }
        }
        parts.reverse();
        Some(parts.join(&b"/"[..]))
    }
}

/// Returns the name of an inode in a directory by binary search, if entries are in the order of
/// their inodes; an entry out of order may be missed.
fn find_in_order(view: View<'_>, directory: Ino, ino: Ino) -> Result<Option<Vec<u8>>> {
    let last = |below: u64| -> Result<Option<(u64, Ino, Vec<u8>)>> {
        let found = view.floor(list_key(directory, below), |key, value| {
            if key.object != directory.0 || key.kind != kind::DIR_LIST {
                return Ok(None);
            }
            let entry = decode_list(value)?;
            Ok(Some((key.sub, entry.ino, if entry.ino == ino { entry.name.to_vec() } else { Vec::new() })))
        })?;
        Ok(found.flatten())
    };
    let (mut from, mut at) = (0, u64::MAX);
    let mut to = u64::MAX;
    loop {
        match last(at)? {
            Some((_, found, name)) if found == ino => return Ok(Some(name)),
            // All entries up to this position are older.
            Some((sequence, found, _)) if sequence < from || found < ino => {
                if at == to {
                    return Ok(None);
                }
                from = at + 1;
            }
            Some((sequence, ..)) if sequence > from => to = sequence - 1,
            None if at < to => from = at + 1,
            _ => return Ok(None),
        }
        at = from + (to - from) / 2;
    }
}

fn visit_entries(
    view: View<'_>,
    directory: Ino,
    f: &mut dyn FnMut(&[u8], EntryTarget) -> ControlFlow<()>,
) -> Result<()> {
    let end = Key::new(directory.0, kind::DIR_LIST + 1, 0);
    view.scan(list_key(directory, 0), end, &mut |_, value| {
        let entry = decode_list(value)?;
        Ok(f(entry.name, EntryTarget { ino: entry.ino, file_type: entry.file_type }))
    })
}
