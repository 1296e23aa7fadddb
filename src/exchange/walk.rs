//! Listings of archive directories, exclude filters, and depth-first walks over trees of any depth:
//! of the host, of an archive, or of the remains of a damaged one.

use std::collections::{HashSet, VecDeque};
use std::fmt;
use std::ops::ControlFlow;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Dir, DirEntry};

use lockbox_terminal::display;

use super::attributes::host_error;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem};

/// Entries per batch: large enough to amortize the descent into the tree, small enough to be held
/// for every level of a deep tree.
const BATCH: usize = 128;

/// Directory entry with the attributes of its object.
#[derive(Clone, Debug)]
pub struct ListingEntry {
    pub name: Vec<u8>,
    pub attributes: Attributes,
}

/// Iterator over the entries of one directory without `.` and `..`, in creation order. A damaged
/// entry is returned as an error; the others follow.
///
/// Returned directories are remembered, 8 bytes each: a hostile archive can have two names of one
/// directory, and walking a few dozen nested levels of them would never end.
pub struct Entries<'a> {
    fs: &'a FileSystem,
    directory: Ino,
    cookie: u64,
    bound: u64,
    batch: VecDeque<Result<ListingEntry>>,
    directories: HashSet<Ino>,
    ended: bool,
}

impl<'a> Entries<'a> {
    pub fn new(fs: &'a FileSystem, directory: Ino) -> Result<Entries<'a>> {
        let bound = fs.directory_bound(directory)?;
        // Cookies 1 and 2 are `.` and `..`.
        let (batch, directories) = (VecDeque::new(), HashSet::new());
        Ok(Entries { fs, directory, cookie: 2, bound, batch, directories, ended: false })
    }

    fn fetch(&mut self) {
        let mut fetched = Vec::new();
        let last = &mut self.cookie;
        let listed = self.fs.list_directory(self.directory, *last, self.bound, true, &mut |entry, attributes| {
            *last = entry.cookie;
            fetched.push((entry.name.to_vec(), entry.ino, attributes.copied()));
            if fetched.len() < BATCH { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        self.ended = fetched.len() < BATCH;
        for (name, ino, attributes) in fetched {
            let entry = self.entry(name, ino, attributes);
            self.batch.push_back(entry);
        }
        if let Err(error) = listed {
            self.batch.push_back(Err(error));
        }
    }

    fn entry(&mut self, name: Vec<u8>, ino: Ino, attributes: Option<Attributes>) -> Result<ListingEntry> {
        let named = |error| match error {
            Error::Damaged(reason) => Error::damaged(format!("{}: {reason}", display(&name))),
            error => error,
        };
        let attributes = match attributes {
            Some(attributes) => attributes,
            // The lookup returns the error.
            None => self.fs.lookup(self.directory, &name).map_err(named)?,
        };
        if attributes.ino != ino {
            return Err(named(Error::damaged("an entry's two records disagree")));
        }
        if attributes.is_directory() && !self.directories.insert(ino) {
            return Err(named(Error::damaged(format!("a directory has two names: inode={}", ino.0))));
        }
        Ok(ListingEntry { name, attributes })
    }
}

impl Iterator for Entries<'_> {
    type Item = Result<ListingEntry>;

    fn next(&mut self) -> Option<Result<ListingEntry>> {
        while self.batch.is_empty() && !self.ended {
            self.fetch();
        }
        self.batch.pop_front()
    }
}

/// Stack of directories from the top of a tree to the current position. The caller owns the path of
/// the current entry, which it uses in messages; each step updates it.
pub(crate) struct TreeWalk<S, T>(Vec<WalkDirectory<S, T>>);

pub(crate) struct WalkDirectory<S, T> {
    pub(crate) entries: S,
    pub(crate) state: T,
    path_length: usize,
}

pub(crate) enum WalkStep<'w, E, S, T> {
    /// An object, and its directory.
    Entry(E, &'w WalkDirectory<S, T>),
    /// The innermost directory, after its last entry.
    Leave(WalkDirectory<S, T>),
}

impl<S, T> TreeWalk<S, T> {
    pub(crate) fn new() -> TreeWalk<S, T> {
        TreeWalk(Vec::new())
    }

    /// Pushes the directory at `path`.
    pub(crate) fn enter(&mut self, path: &[u8], entries: S, state: T) {
        self.0.push(WalkDirectory { entries, state, path_length: path.len() });
    }

    pub(crate) fn depth(&self) -> usize {
        self.0.len()
    }

    /// Returns the next entry of the innermost directory, as `next` lists it, with its name; `None`
    /// at the end of the walk. Sets the path to that of the entry, or of the directory when it is
    /// left or its listing fails.
    pub(crate) fn step<E>(
        &mut self,
        path: &mut Vec<u8>,
        next: impl FnOnce(&mut S) -> Option<Result<E>>,
        name: impl FnOnce(&E) -> &[u8],
    ) -> Option<Result<WalkStep<'_, E, S, T>>> {
        let directory = self.0.last_mut()?;
        path.truncate(directory.path_length);
        let Some(entry) = next(&mut directory.entries) else {
            return self.0.pop().map(WalkStep::Leave).map(Ok);
        };
        let directory = self.0.last()?;
        Some(entry.map(|entry| {
            join(path, name(&entry));
            WalkStep::Entry(entry, directory)
        }))
    }

    /// Ends the walk early: calls `each` with every directory on the stack, innermost first, with
    /// `path` set to its path.
    pub(crate) fn abandon(self, path: &mut Vec<u8>, mut each: impl FnMut(&[u8], WalkDirectory<S, T>)) {
        for directory in self.0.into_iter().rev() {
            path.truncate(directory.path_length);
            each(path, directory);
        }
    }
}

/// Entries of a host directory, and its descriptor for operations on them.
pub(crate) struct HostEntries {
    directory: Dir,
    /// The directory alone is of interest, without its entries.
    skipped: bool,
}

impl HostEntries {
    pub(crate) fn of(directory: OwnedFd) -> Result<HostEntries> {
        let directory = Dir::new(directory).map_err(host_error("cannot read the directory"))?;
        Ok(HostEntries { directory, skipped: false })
    }

    /// Returns a listing without entries if `skipped`.
    pub(crate) fn skip_if(self, skipped: bool) -> HostEntries {
        HostEntries { skipped, ..self }
    }

    pub(crate) fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        self.directory.fd().map_err(host_error("cannot read the directory"))
    }
}

impl Iterator for HostEntries {
    type Item = Result<DirEntry>;

    /// An error ends the iteration.
    fn next(&mut self) -> Option<Result<DirEntry>> {
        loop {
            match self.directory.read().filter(|_| !self.skipped)? {
                Ok(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Ok(entry) => return Some(Ok(entry)),
                Err(errno) => return Some(Err(host_error("cannot read the directory")(errno))),
            }
        }
    }
}

pub(crate) type ArchiveWalk<'a, T> = TreeWalk<Entries<'a>, T>;

impl<'a, T> ArchiveWalk<'a, T> {
    /// Starts a walk below the directory `ino` at `path`.
    pub(crate) fn below(fs: &'a FileSystem, path: &[u8], ino: Ino, state: T) -> Result<ArchiveWalk<'a, T>> {
        let mut tree = TreeWalk::new();
        tree.descend(fs, path, ino, state)?;
        Ok(tree)
    }

    pub(crate) fn descend(&mut self, fs: &'a FileSystem, path: &[u8], ino: Ino, state: T) -> Result<()> {
        self.enter(path, Entries::new(fs, ino)?, state);
        Ok(())
    }

    pub(crate) fn next(&mut self, path: &mut Vec<u8>) -> Option<Result<WalkStep<'_, ListingEntry, Entries<'a>, T>>> {
        self.step(path, Iterator::next, |entry| &entry.name)
    }
}

pub(crate) fn join(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}

type ExcludePredicate = dyn Fn(&[u8], bool) -> bool + Send + Sync;

/// Predicate on a path below a source (without the source's own name and a leading slash) and
/// whether it is a directory. An excluded directory is excluded with all its descendants.
#[derive(Clone, Default)]
pub struct Filter(Option<Arc<ExcludePredicate>>);

impl Filter {
    pub fn new(excludes: impl Fn(&[u8], bool) -> bool + Send + Sync + 'static) -> Filter {
        Filter(Some(Arc::new(excludes)))
    }

    pub(super) fn excludes(&self, path: &[u8], is_directory: bool) -> bool {
        self.0.as_ref().is_some_and(|excludes| excludes(path, is_directory))
    }
}

impl fmt::Debug for Filter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Filter(some)" } else { "Filter(none)" })
    }
}
