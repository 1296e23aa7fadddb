//! Walks a directory of an archive in batches, so that a listing of any length takes bounded memory.

use std::collections::VecDeque;
use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem};

/// Entries fetched at once: enough to make the descent into the tree cheap, little enough to hold for every level of a deep tree.
const BATCH: usize = 128;

/// One entry with its attributes.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: Vec<u8>,
    pub attributes: Attributes,
}

/// The entries of one directory without `.` and `..`, in creation order.
pub struct Entries<'a> {
    fs: &'a FileSystem,
    directory: Ino,
    cookie: u64,
    bound: u64,
    batch: VecDeque<Entry>,
    failed: bool,
}

impl<'a> Entries<'a> {
    pub fn new(fs: &'a FileSystem, directory: Ino) -> Result<Entries<'a>> {
        let bound = fs.directory_bound(directory)?;
        // Cookies 1 and 2 are `.` and `..`.
        Ok(Entries { fs, directory, cookie: 2, bound, batch: VecDeque::new(), failed: false })
    }

    fn fetch(&mut self) -> Result<()> {
        let (batch, last) = (&mut self.batch, &mut self.cookie);
        let mut missing = Vec::new();
        self.fs.list_directory(self.directory, *last, self.bound, true, &mut |entry, attributes| {
            *last = entry.cookie;
            match attributes {
                Some(attributes) => batch.push_back(Entry { name: entry.name.to_vec(), attributes: *attributes }),
                None => missing.push((entry.name.to_vec(), entry.ino)),
            }
            if batch.len() + missing.len() < BATCH { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        })?;
        for (name, ino) in missing {
            let attributes = self.fs.attributes(ino)?;
            self.batch.push_back(Entry { name, attributes });
        }
        Ok(())
    }
}

impl Iterator for Entries<'_> {
    type Item = Result<Entry>;

    fn next(&mut self) -> Option<Result<Entry>> {
        if self.batch.is_empty()
            && !self.failed
            && let Err(error) = self.fetch()
        {
            self.failed = true;
            return Some(Err(error));
        }
        self.batch.pop_front().map(Ok)
    }
}
