//! Walks trees of any depth, of the host, of an archive and of what is left of one: depth first, each directory left after what is in it.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{Dir, DirEntry};

use super::host::host_error;
use super::{Entries, Entry};
use crate::error::Result;
use crate::format::Ino;
use crate::fs::FileSystem;

/// The directories from the top of a tree to where a walk is. The path of what it is at belongs to the one who walks, for whom it names things
/// in messages: each step puts it right.
pub(crate) struct Walk<S, T>(Vec<Directory<S, T>>);

/// A directory that is being walked.
pub(crate) struct Directory<S, T> {
    /// What lists its entries.
    pub(crate) entries: S,
    /// What the walk needs of it besides.
    pub(crate) kept: T,
    path_length: usize,
}

/// What a walk comes to next.
pub(crate) enum Step<'w, E, S, T> {
    /// An object, and the directory that it is in.
    Entry(E, &'w Directory<S, T>),
    /// The directory that was the innermost, when it has no more entries.
    Leave(Directory<S, T>),
}

impl<S, T> Walk<S, T> {
    pub(crate) fn new() -> Walk<S, T> {
        Walk(Vec::new())
    }

    /// Goes on in the directory at `path`.
    pub(crate) fn enter(&mut self, path: &[u8], entries: S, kept: T) {
        self.0.push(Directory { entries, kept, path_length: path.len() });
    }

    /// How many directories are open within each other.
    pub(crate) fn depth(&self) -> usize {
        self.0.len()
    }

    /// The next entry of the innermost directory as `next` lists it, with its name; None at the end of the walk. The path is that of the
    /// entry then, or that of the directory when it is left and when its listing fails.
    pub(crate) fn step<E>(
        &mut self,
        path: &mut Vec<u8>,
        next: impl FnOnce(&mut S) -> Option<Result<E>>,
        name: impl FnOnce(&E) -> &[u8],
    ) -> Option<Result<Step<'_, E, S, T>>> {
        let directory = self.0.last_mut()?;
        path.truncate(directory.path_length);
        let Some(entry) = next(&mut directory.entries) else {
            return self.0.pop().map(Step::Leave).map(Ok);
        };
        let directory = self.0.last()?;
        Some(entry.map(|entry| {
            join(path, name(&entry));
            Step::Entry(entry, directory)
        }))
    }

    /// Ends the walk where it is: the innermost directory first, each with `path` as its own.
    pub(crate) fn abandon(self, path: &mut Vec<u8>, mut each: impl FnMut(&[u8], Directory<S, T>)) {
        for directory in self.0.into_iter().rev() {
            path.truncate(directory.path_length);
            each(path, directory);
        }
    }
}

/// The names in a directory of the host, and the directory itself: what is done with a name is done by its descriptor.
pub(crate) struct Names(Dir);

impl Names {
    pub(crate) fn of(directory: OwnedFd) -> Result<Names> {
        Dir::new(directory).map(Names).map_err(host_error("cannot read the directory"))
    }

    pub(crate) fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        self.0.fd().map_err(host_error("cannot read the directory"))
    }
}

impl Iterator for Names {
    type Item = Result<DirEntry>;

    /// An error ends the list.
    fn next(&mut self) -> Option<Result<DirEntry>> {
        loop {
            match self.0.read()? {
                Ok(entry) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Ok(entry) => return Some(Ok(entry)),
                Err(errno) => return Some(Err(host_error("cannot read the directory")(errno))),
            }
        }
    }
}

/// A walk of an archive.
pub(crate) type Tree<'a, T> = Walk<Entries<'a>, T>;

impl<'a, T> Tree<'a, T> {
    /// A walk of what is below the directory `ino` at `path`.
    pub(crate) fn below(fs: &'a FileSystem, path: &[u8], ino: Ino, kept: T) -> Result<Tree<'a, T>> {
        let mut tree = Walk::new();
        tree.descend(fs, path, ino, kept)?;
        Ok(tree)
    }

    pub(crate) fn descend(&mut self, fs: &'a FileSystem, path: &[u8], ino: Ino, kept: T) -> Result<()> {
        self.enter(path, Entries::new(fs, ino)?, kept);
        Ok(())
    }

    pub(crate) fn next(&mut self, path: &mut Vec<u8>) -> Option<Result<Step<'_, Entry, Entries<'a>, T>>> {
        self.step(path, Iterator::next, |entry| &entry.name)
    }
}

/// Lengthens a path by a name.
pub(crate) fn join(path: &mut Vec<u8>, name: &[u8]) {
    if !path.is_empty() {
        path.push(b'/');
    }
    path.extend_from_slice(name);
}
