//! Paths of inodes: from the names up, although only directories tell where they are named.
//!
//! A directory's inode has its parent, and one look through that directory finds the name. A file's inode has nothing of the kind, so directories are
//! looked through until as many names are found as the inode has links. What is looked at first are guesses, beginning with what costs the least:
//!
//! 1. The directories in which it was probably made, with those above them: they were made before it, so their numbers are below its own. One with few entries
//!    and files lies just before the file's records; of a larger one the entries fill leaves, whose fences tell so without being read.
//! 2. In a directory, the place where its entry is if entries came in the order of their inodes; then all of it.
//! 3. All directories, once for all files together.
//!
//! The answer is complete in each case, since an inode's links are counted.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::values::decode_list;
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::directory::{DIRECTORY_TYPE, Target, agrees, file_type, list_key};
use crate::fs::{FileSystem, inode};
use crate::txn::{ReadView, View};

/// Numbers below that of a file among which the directory is looked for that has few entries.
const NEAR: u64 = 256;
/// Leaves whose fences are passed by on the way back from a file to a large directory: some 30,000 files.
const MOST_FENCES: u64 = 512;
/// The same for all files together: a few milliseconds.
const MOST_FENCES_OF_ALL: u64 = 100_000;

/// Paths of inodes, from the root and without a slash at their beginning.
pub(crate) type Paths = HashMap<Ino, Vec<Vec<u8>>>;

/// Where an inode is named: directory and name.
type Name = (Ino, Vec<u8>);

impl FileSystem {
    /// All paths of these inodes as the newest version has them; of one without a name none, and of the root an empty one. `go_on` is asked now and then.
    ///
    /// # Errors
    /// What reading meets, and what `go_on` answers.
    pub(crate) fn paths_of(&self, wanted: &BTreeSet<Ino>, go_on: &mut dyn FnMut() -> Result<()>) -> Result<Paths> {
        let reading = ReadView::of(&self.volume, self.volume.state());
        let mut search = Search::new(reading.view(), go_on);
        for ino in wanted {
            search.want(*ino)?;
        }
        search.files()?;
        search.directories()?;
        Ok(wanted.iter().map(|ino| (*ino, search.paths(*ino))).collect())
    }
}

struct Search<'a> {
    view: View<'a>,
    /// Files and how many names of them are still to be found.
    files: BTreeMap<Ino, u64>,
    names: HashMap<Ino, BTreeSet<Name>>,
    looked_through: HashSet<Ino>,
    /// Of each directory that is on the way of something: where it is named, with its name when that was found.
    above: HashMap<Ino, (Ino, Option<Vec<u8>>)>,
    fences: u64,
    go_on: &'a mut dyn FnMut() -> Result<()>,
}

impl<'a> Search<'a> {
    fn new(view: View<'a>, go_on: &'a mut dyn FnMut() -> Result<()>) -> Search<'a> {
        Search {
            view,
            go_on,
            files: BTreeMap::new(),
            names: HashMap::new(),
            looked_through: HashSet::new(),
            above: HashMap::new(),
            fences: MOST_FENCES_OF_ALL,
        }
    }

    fn want(&mut self, ino: Ino) -> Result<()> {
        match inode::find(self.view, ino)? {
            Some(inode) if file_type(inode.mode) == DIRECTORY_TYPE => self.rise(ino),
            Some(inode) if inode.links > 0 => {
                self.files.insert(ino, inode.links.into());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Notes a directory and all above it.
    fn rise(&mut self, mut directory: Ino) -> Result<()> {
        while directory != ROOT_INO && !self.above.contains_key(&directory) {
            let Some(inode) = inode::find(self.view, directory)? else { break };
            self.above.insert(directory, (inode.parent, None));
            directory = inode.parent;
        }
        Ok(())
    }

    /// Finds the names of the files.
    fn files(&mut self) -> Result<()> {
        let all: Vec<Ino> = self.files.keys().rev().copied().collect();
        for ino in all {
            (self.go_on)()?;
            // What costs little is tried with all guesses before any directory is looked through.
            let large = self.large_before(ino)?;
            if self.is_found_in_order(ino, large)? {
                continue;
            }
            let near = self.near_before(ino, large)?;
            if self.is_found_in_order(ino, near)? {
                continue;
            }
            for guess in [near, large] {
                self.climb(ino, guess)?;
            }
        }
        if !self.files.is_empty() {
            self.look_through_all()?;
        }
        let directories: BTreeSet<Ino> = self.names.values().flatten().map(|(directory, _)| *directory).collect();
        directories.into_iter().try_for_each(|directory| self.rise(directory))
    }

    /// Looks for a file at its place in a directory, and answers whether all its names are found.
    fn is_found_in_order(&mut self, ino: Ino, directory: Option<Ino>) -> Result<bool> {
        if let Some(directory) = directory
            && let Some(name) = entry_in_order(self.view, directory, ino)?
        {
            self.note(directory, ino, &name);
        }
        Ok(!self.files.contains_key(&ino))
    }

    /// Looks a directory and those above it through until a file is found by all its names.
    fn climb(&mut self, ino: Ino, mut directory: Option<Ino>) -> Result<()> {
        while self.files.contains_key(&ino)
            && let Some(at) = directory
        {
            let is_new = self.look_through(at)?.is_some();
            // What is above one that was looked through before was looked through for another file, or not needed.
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

    /// The directory with entries that has the greatest number just below this one, if it comes behind the large one, whose entries are not passed by.
    fn near_before(&self, ino: Ino, large: Option<Ino>) -> Result<Option<Ino>> {
        let mut found = None;
        let behind = large.map_or(Key::MIN, |large| Key::new(large.0, kind::DIR_LIST + 1, 0));
        let from = Key::new(ino.0.saturating_sub(NEAR), 0, 0).max(behind);
        self.view.scan(from, Key::new(ino.0, 0, 0), &mut |key, _| {
            if key.kind == kind::DIR_LIST && key.object > 0 {
                found = Some(Ino(key.object));
            }
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(found)
    }

    /// The directory with the greatest number below this one of which entries begin a leaf, unless that is far.
    fn large_before(&mut self, ino: Ino) -> Result<Option<Ino>> {
        let mut found = None;
        let most = self.fences.min(MOST_FENCES);
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

    /// Takes the names of wanted files out of a directory, and answers the directories in it; None when it was looked through before.
    fn look_through(&mut self, directory: Ino) -> Result<Option<Vec<Ino>>> {
        if !self.looked_through.insert(directory) {
            return Ok(None);
        }
        (self.go_on)()?;
        let mut below = Vec::new();
        entries(self.view, directory, &mut |name, target| {
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
    fn look_through_all(&mut self) -> Result<()> {
        self.looked_through.clear();
        let mut waiting = vec![ROOT_INO];
        while let Some(directory) = waiting.pop() {
            if self.files.is_empty() {
                break;
            }
            for below in self.look_through(directory)?.unwrap_or_default() {
                // NAME-5
                let inode = inode::find(self.view, below)?;
                if inode
                    .is_some_and(|inode| agrees(directory, Target { ino: below, file_type: DIRECTORY_TYPE }, &inode))
                {
                    waiting.push(below);
                }
            }
        }
        Ok(())
    }

    /// Finds the names of the directories on all ways: those that are named in one directory together.
    fn directories(&mut self) -> Result<()> {
        let mut named_in: BTreeMap<Ino, BTreeSet<Ino>> = BTreeMap::new();
        for (directory, (parent, _)) in &self.above {
            named_in.entry(*parent).or_default().insert(*directory);
        }
        for (parent, mut wanted) in named_in {
            (self.go_on)()?;
            let above = &mut self.above;
            for directory in wanted.clone() {
                if let Some(name) = entry_in_order(self.view, parent, directory)? {
                    wanted.remove(&directory);
                    above.insert(directory, (parent, Some(name)));
                }
            }
            if wanted.is_empty() {
                continue;
            }
            entries(self.view, parent, &mut |name, target| {
                if target.is_directory() && wanted.remove(&target.ino) {
                    above.insert(target.ino, (parent, Some(name.to_vec())));
                }
                if wanted.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })?;
        }
        Ok(())
    }

    fn paths(&self, ino: Ino) -> Vec<Vec<u8>> {
        match self.names.get(&ino) {
            None => self.path(ino).into_iter().collect(),
            Some(names) => {
                let path = |(directory, name): &Name| {
                    let mut path = self.path(*directory)?;
                    if !path.is_empty() {
                        path.push(b'/');
                    }
                    path.extend_from_slice(name);
                    Some(path)
                };
                names.iter().filter_map(path).collect()
            }
        }
    }

    /// Of a directory; None when no way leads to it.
    fn path(&self, directory: Ino) -> Option<Vec<u8>> {
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut at = directory;
        while at != ROOT_INO {
            let (parent, name) = self.above.get(&at)?;
            parts.push(name.as_deref()?);
            at = *parent;
            // Only a circle has more parts than there are directories.
            if parts.len() > self.above.len() {
                return None;
            }
        }
        parts.reverse();
        Some(parts.join(&b"/"[..]))
    }
}

/// The name of an inode in a directory, found in steps as many as a number has bits, if entries came there in the order of their inodes; one that came
/// otherwise may be there all the same.
fn entry_in_order(view: View<'_>, directory: Ino, ino: Ino) -> Result<Option<Vec<u8>>> {
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
            // All up to this place came earlier.
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

/// The entries of a directory.
fn entries(view: View<'_>, directory: Ino, f: &mut dyn FnMut(&[u8], Target) -> ControlFlow<()>) -> Result<()> {
    let end = Key::new(directory.0, kind::DIR_LIST + 1, 0);
    view.scan(list_key(directory, 0), end, &mut |_, value| {
        let entry = decode_list(value)?;
        Ok(f(entry.name, Target { ino: entry.ino, file_type: entry.file_type }))
    })
}
