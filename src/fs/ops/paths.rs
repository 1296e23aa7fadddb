//! Paths of inodes: from the names up, although only directories tell where they are named.
//!
//! A directory's inode has its parent, and one look through that directory finds the name. A file's inode has nothing of the kind, so directories are
//! looked through until as many names are found as the inode has links: first those in which the file was probably made, which were made shortly
//! before it and have a number just below its own, with the directories above them; and when that is not enough, all directories, once for all files
//! together. The answer is complete in either case.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::values::decode_list;
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::directory::{DIRECTORY_TYPE, Target, agrees, file_type, list_key};
use crate::fs::{FileSystem, inode};
use crate::txn::{Reading, View};

/// Inodes that are passed by on the way back to the directory before a file, for all files together: a few milliseconds.
const MOST_BACK: u64 = 10_000;

/// Where an inode is named: directory and name.
type Name = (Ino, Vec<u8>);

impl FileSystem {
    /// All paths, from the root and without a slash at their beginning, of these inodes as the newest version has them; of one without a
    /// name none, and of the root an empty one.
    pub(crate) fn paths_of(&self, wanted: &BTreeSet<Ino>) -> Result<HashMap<Ino, Vec<Vec<u8>>>> {
        let reading = Reading::of(&self.volume, self.volume.state());
        let mut search = Search::new(reading.view());
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
    back: u64,
}

impl<'a> Search<'a> {
    fn new(view: View<'a>) -> Search<'a> {
        Search {
            view,
            files: BTreeMap::new(),
            names: HashMap::new(),
            looked_through: HashSet::new(),
            above: HashMap::new(),
            back: MOST_BACK,
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
            let Some(mut directory) = self.directory_before(ino)? else { continue };
            while self.files.contains_key(&ino) {
                let is_new = self.look_through(directory)?.is_some();
                // What is above one that was looked through before was looked through for another file, or not needed.
                if directory == ROOT_INO || !is_new {
                    break;
                }
                let Some(inode) = inode::find(self.view, directory)? else { break };
                directory = inode.parent;
            }
        }
        if !self.files.is_empty() {
            self.look_through_all()?;
        }
        let directories: BTreeSet<Ino> = self.names.values().flatten().map(|(directory, _)| *directory).collect();
        directories.into_iter().try_for_each(|directory| self.rise(directory))
    }

    /// The directory with the greatest number below this one, unless that is far.
    fn directory_before(&mut self, ino: Ino) -> Result<Option<Ino>> {
        let mut at = ino;
        while self.back > 0 {
            self.back -= 1;
            let before = self.view.floor(Key::new(at.0, 0, 0), |key, _| Ok(key))?;
            let Some(before) = before.filter(|key| key.object > 0) else { return Ok(None) };
            at = Ino(before.object);
            if before.kind == kind::DIR_LIST {
                return Ok(Some(at));
            }
            if inode::find(self.view, at)?.is_some_and(|inode| file_type(inode.mode) == DIRECTORY_TYPE) {
                return Ok(Some(at));
            }
        }
        Ok(None)
    }

    /// Takes the names of wanted files out of a directory, and answers the directories in it; None when it was looked through before.
    fn look_through(&mut self, directory: Ino) -> Result<Option<Vec<Ino>>> {
        if !self.looked_through.insert(directory) {
            return Ok(None);
        }
        let mut below = Vec::new();
        let (files, names) = (&mut self.files, &mut self.names);
        entries(self.view, directory, &mut |name, target| {
            if target.is_directory() {
                below.push(target.ino);
            } else if let Some(left) = files.get_mut(&target.ino)
                && names.entry(target.ino).or_default().insert((directory, name.to_vec()))
            {
                *left -= 1;
                if *left == 0 {
                    files.remove(&target.ino);
                }
            }
            if files.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
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
            let above = &mut self.above;
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

/// The entries of a directory.
fn entries(view: View<'_>, directory: Ino, f: &mut dyn FnMut(&[u8], Target) -> ControlFlow<()>) -> Result<()> {
    let end = Key::new(directory.0, kind::DIR_LIST + 1, 0);
    view.scan(list_key(directory, 0), end, &mut |_, value| {
        let entry = decode_list(value)?;
        Ok(f(entry.name, Target { ino: entry.ino, file_type: entry.file_type }))
    })
}
