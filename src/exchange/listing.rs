//! Lists a directory of an archive in batches, so that memory is bounded for a directory of any
//! size.

use std::collections::{HashSet, VecDeque};
use std::ops::ControlFlow;

use lockbox_terminal::display;

use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem};

/// Entries per batch: large enough to amortize the descent into the tree, small enough to be held
/// for every level of a deep tree.
const BATCH: usize = 128;

/// Directory entry with the attributes of its object.
#[derive(Clone, Debug)]
pub struct Entry {
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
    batch: VecDeque<Result<Entry>>,
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

    fn entry(&mut self, name: Vec<u8>, ino: Ino, attributes: Option<Attributes>) -> Result<Entry> {
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
        Ok(Entry { name, attributes })
    }
}

impl Iterator for Entries<'_> {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Result<Entry>> {
        while self.batch.is_empty() && !self.ended {
            self.fetch();
        }
        self.batch.pop_front()
    }
}
