//! Listings of archive directories, exclude filters, and depth-first walks over trees of any depth:
//! of the host, of an archive, or of the remains of a damaged one.

use std::collections::HashSet;
use std::fmt;
use std::ops::{ControlFlow, Range};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{Dir, DirEntry};

use lockbox_terminal::display;

use super::CopyTally;
use super::attributes::{HostName, host_error};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, MAX_SMALL_FILE, mode};

/// Entries per batch: large enough to amortize the descent into the tree, small enough to be held
/// for every level of a deep tree.
const BATCH: usize = 128;
/// Entries per batch of a listing with contents: the files of one batch are read together, and so
/// few would not share the work between processors.
const CONTENT_BATCH: usize = 1024;
/// Maximum bytes of content that a listing holds, of the innermost directory of a walk only.
const MAX_CONTENT: u64 = 4 << 20;

/// Directory entry with the attributes of its object, valid until the listing moves on.
#[derive(Clone, Copy, Debug)]
pub struct ListingEntry<'e> {
    pub name: &'e [u8],
    pub attributes: &'e Attributes,
    /// Whole content of a small file, in a listing with contents. `None` does not mean that it
    /// cannot be read: the caller reads the file by itself then.
    pub content: Option<&'e [u8]>,
}

/// Listing of one directory without `.` and `..`, in creation order. A damaged entry is returned as
/// an error; the others follow.
///
/// Returned directories are remembered, 8 bytes each: a hostile archive can have two names of one
/// directory, and walking a few dozen nested levels of them would never end.
pub struct Entries<'a> {
    fs: &'a FileSystem,
    directory: Ino,
    cookie: u64,
    bound: u64,
    batch: EntryBatch,
    /// Position of the current entry in the batch, plus 1.
    passed: usize,
    directories: HashSet<Ino>,
    contents: Option<ContentRun>,
    ended: bool,
}

#[derive(Default)]
struct EntryBatch {
    /// All names, one after the other.
    names: Vec<u8>,
    entries: Vec<BatchEntry>,
    /// Error that follows the entries.
    failed: Option<Error>,
}

struct BatchEntry {
    name: Range<usize>,
    ino: Ino,
    /// `None` for an entry that must not be followed.
    attributes: Option<Attributes>,
}

/// Contents of consecutive entries of a batch, read together. A run ends before a directory, so a
/// walk holds none while it is below that.
#[derive(Default)]
struct ContentRun {
    buffer: Vec<u8>,
    /// Position of the first entry, and the place of each one's content in the buffer.
    first: usize,
    places: Vec<Option<Range<usize>>>,
}

impl<'a> Entries<'a> {
    /// # Errors
    /// `NotFound` when the directory was removed, `NotDirectory`; errors of reading.
    pub fn new(fs: &'a FileSystem, directory: Ino) -> Result<Entries<'a>> {
        let bound = fs.directory_bound(directory)?;
        Ok(Entries {
            fs,
            directory,
            // Cookies 1 and 2 are `.` and `..`.
            cookie: 2,
            bound,
            batch: EntryBatch::default(),
            passed: 0,
            directories: HashSet::new(),
            contents: None,
            ended: false,
        })
    }

    /// Returns a listing that reads small files ahead: many together, in the order of their pages
    /// and on all processors.
    ///
    /// # Errors
    /// Errors of [`Entries::new`].
    pub fn with_contents(fs: &'a FileSystem, directory: Ino) -> Result<Entries<'a>> {
        Ok(Entries { contents: Some(ContentRun::default()), ..Entries::new(fs, directory)? })
    }

    /// Returns the next entry; `None` at the end.
    pub fn next_entry(&mut self) -> Option<Result<ListingEntry<'_>>> {
        match self.advance()? {
            Ok(()) => self.current().map(Ok),
            Err(error) => Some(Err(error)),
        }
    }

    /// Moves to the next entry; `None` at the end. After an error there is no current entry.
    pub(crate) fn advance(&mut self) -> Option<Result<()>> {
        while self.passed == self.batch.entries.len() {
            if let Some(error) = self.batch.failed.take() {
                return Some(Err(error));
            }
            if self.ended {
                return None;
            }
            self.fetch();
        }
        self.passed += 1;
        Some(self.check_current())
    }

    /// Returns the entry to which the listing was moved.
    pub(crate) fn current(&self) -> Option<ListingEntry<'_>> {
        let position = self.passed.checked_sub(1)?;
        let entry = self.batch.entries.get(position)?;
        let attributes = entry.attributes.as_ref()?;
        let content = self.contents.as_ref().and_then(|run| run.content_of(position));
        // A file that was changed since it was listed is left to the caller.
        let content = content.filter(|content| content.len() as u64 == attributes.size);
        Some(ListingEntry { name: &self.batch.names[entry.name.clone()], attributes, content })
    }

    fn fetch(&mut self) {
        let EntryBatch { names, entries, failed } = &mut self.batch;
        names.clear();
        entries.clear();
        self.passed = 0;
        let most = if self.contents.is_some() { CONTENT_BATCH } else { BATCH };
        let last = &mut self.cookie;
        let listed = self.fs.list_directory(self.directory, *last, self.bound, true, &mut |entry, attributes| {
            *last = entry.cookie;
            let start = names.len();
            names.extend_from_slice(entry.name);
            let (name, attributes) = (start..names.len(), attributes.copied());
            entries.push(BatchEntry { name, ino: entry.ino, attributes });
            if entries.len() < most { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        self.ended = entries.len() < most;
        *failed = listed.err();
        if let Some(run) = &mut self.contents {
            run.first = 0;
            run.places.clear();
        }
    }

    /// Checks the current entry, and reads the contents of its file and the next ones.
    fn check_current(&mut self) -> Result<()> {
        let position = self.passed - 1;
        let EntryBatch { names, entries, .. } = &mut self.batch;
        let entry = &mut entries[position];
        let name = &names[entry.name.clone()];
        let named = |error| match error {
            Error::Damaged(reason) => Error::damaged(format!("{}: {reason}", display(name))),
            error => error,
        };
        let attributes = match &mut entry.attributes {
            Some(attributes) => attributes,
            // The lookup returns the error.
            missing => missing.insert(self.fs.lookup(self.directory, name).map_err(named)?),
        };
        if attributes.ino != entry.ino {
            return Err(named(Error::damaged("an entry's two records disagree")));
        }
        if attributes.is_directory() && !self.directories.insert(entry.ino) {
            return Err(named(Error::damaged(format!("a directory has two names: inode={}", entry.ino.0))));
        }
        if let Some(run) = &mut self.contents {
            run.cover(self.fs, entries, position);
        }
        Ok(())
    }
}

impl ContentRun {
    fn content_of(&self, position: usize) -> Option<&[u8]> {
        let place = self.places.get(position.checked_sub(self.first)?)?.clone()?;
        self.buffer.get(place)
    }

    /// Reads the file at `position` and those after it, unless an earlier call did.
    fn cover(&mut self, fs: &FileSystem, entries: &[BatchEntry], position: usize) {
        if (self.first..self.first + self.places.len()).contains(&position) {
            return;
        }
        let mut bytes = 0;
        let files = entries[position..].iter().map_while(|entry| {
            let attributes = entry.attributes.as_ref().filter(|attributes| !attributes.is_directory())?;
            // A file with several names is often wanted once.
            let is_small = attributes.mode & mode::TYPE == mode::REGULAR
                && attributes.size <= MAX_SMALL_FILE
                && attributes.links == 1;
            bytes += if is_small { attributes.size } else { 0 };
            (bytes <= MAX_CONTENT).then_some(is_small.then_some(entry.ino))
        });
        let files: Vec<Option<Ino>> = files.collect();
        self.first = position;
        if files.is_empty() {
            // The caller may enter the directory, and stay there for long.
            *self = ContentRun { first: position, ..ContentRun::default() };
        } else {
            self.places = fs.read_small_files(&files, &mut self.buffer);
        }
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
        self.step_with(path, next, |_, entry| Ok(entry), name)
    }

    /// Returns the next step of a listing that `advance` moves and that lends its `entry`.
    fn step_with<'w, A, E>(
        &'w mut self,
        path: &mut Vec<u8>,
        advance: impl FnOnce(&mut S) -> Option<Result<A>>,
        entry: impl FnOnce(&'w S, A) -> Result<E>,
        name: impl FnOnce(&E) -> &[u8],
    ) -> Option<Result<WalkStep<'w, E, S, T>>> {
        let directory = self.0.last_mut()?;
        path.truncate(directory.path_length);
        let Some(advanced) = advance(&mut directory.entries) else {
            return self.0.pop().map(WalkStep::Leave).map(Ok);
        };
        let directory = self.0.last()?;
        Some(advanced.and_then(|advanced| entry(&directory.entries, advanced)).map(|entry| {
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
    pub(super) fn new(directory: OwnedFd, skipped: bool) -> Result<HostEntries> {
        let directory = Dir::new(directory).map_err(host_error("cannot read the directory"))?;
        Ok(HostEntries { directory, skipped })
    }

    pub(super) fn descriptor(&self) -> Result<BorrowedFd<'_>> {
        self.directory.fd().map_err(host_error("cannot read the directory"))
    }

    pub(super) fn locate<'a>(&'a self, entry: &'a DirEntry) -> Result<HostName<'a>> {
        Ok(HostName { directory: self.descriptor()?, name: entry.file_name().to_bytes(), follow: false })
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
    pub(crate) fn below(fs: &'a FileSystem, path: &[u8], ino: Ino, state: T) -> Result<ArchiveWalk<'a, T>> {
        let mut tree = TreeWalk::new();
        tree.descend(fs, path, ino, state)?;
        Ok(tree)
    }

    pub(crate) fn descend(&mut self, fs: &'a FileSystem, path: &[u8], ino: Ino, state: T) -> Result<()> {
        self.enter(path, Entries::new(fs, ino)?, state);
        Ok(())
    }

    /// Returns the next step like [`TreeWalk::step`].
    pub(crate) fn next<'w>(
        &'w mut self,
        path: &mut Vec<u8>,
    ) -> Option<Result<WalkStep<'w, ListingEntry<'w>, Entries<'a>, T>>> {
        let lent = |entries: &'w Entries<'a>, ()| {
            entries.current().ok_or_else(|| Error::damaged("an entry has no attributes"))
        };
        self.step_with(path, Entries::advance, lent, |entry| entry.name)
    }
}

/// Maximum bytes of file content that are requested ahead of a walk: less than the memory cache of
/// remote storage, more than the bandwidth-delay product of its links.
const PREFETCH_WINDOW: u64 = 16 << 20;
/// Maximum objects that one call looks at: a tree can have any number of empty files.
const MAX_PREFETCH_STEPS: usize = 1024;

/// Prefetches file contents of remote storage ahead of a walk over the same trees in the same
/// order, across directories: the walk waits for the link once and not for each directory. Errors
/// are left to the walk.
pub(crate) struct ContentPrefetch<'a> {
    fs: &'a FileSystem,
    filter: &'a Filter,
    /// Further trees or files, each with its path for the filter; an empty path is not filtered.
    tops: std::vec::IntoIter<(Vec<u8>, Attributes)>,
    tree: ArchiveWalk<'a, ()>,
    path: Vec<u8>,
    tally: CopyTally,
    has_ended: bool,
}

impl<'a> ContentPrefetch<'a> {
    pub(crate) fn new(
        fs: &'a FileSystem,
        filter: &'a Filter,
        tops: impl Iterator<Item = (Vec<u8>, Attributes)>,
    ) -> ContentPrefetch<'a> {
        // A disk is read without.
        let tops: Vec<_> = if fs.is_remote() { tops.collect() } else { Vec::new() };
        ContentPrefetch {
            fs,
            filter,
            tops: tops.into_iter(),
            tree: ArchiveWalk::new(),
            path: Vec::new(),
            tally: CopyTally::default(),
            has_ended: false,
        }
    }

    /// Prefetches up to the window beyond the bytes of files that the walk has `passed`; in large
    /// parts, because neighbours in the archive take one request.
    pub(crate) fn advance(&mut self, passed: u64) {
        let until = passed.saturating_add(PREFETCH_WINDOW);
        if self.has_ended || self.tally.met.bytes >= until - PREFETCH_WINDOW / 2 {
            return;
        }
        let mut files = Vec::new();
        for _ in 0..MAX_PREFETCH_STEPS {
            let Some(file) = self.step() else {
                self.has_ended = true;
                break;
            };
            files.extend(file);
            if self.tally.met.bytes >= until {
                break;
            }
        }
        self.fs.prefetch_files(&files, PREFETCH_WINDOW);
    }

    /// Returns the next object if it is a file; `None` at the end, or after an error: a store that
    /// is away must not be waited for again and again, between two reports of progress.
    fn step(&mut self) -> Option<Option<Ino>> {
        let found = match self.tree.next(&mut self.path) {
            Some(step) => match step.ok()? {
                WalkStep::Entry(entry, _) => *entry.attributes,
                WalkStep::Leave(_) => return Some(None),
            },
            None => {
                let (path, attributes) = self.tops.next()?;
                self.path = path;
                attributes
            }
        };
        if !self.path.is_empty() && self.filter.excludes(&self.path, found.is_directory()) {
            return Some(None);
        }
        if found.is_directory() {
            self.tree.descend(self.fs, &self.path, found.ino, ()).ok()?;
            return Some(None);
        }
        self.tally.add_stored_file(&found);
        Some((found.mode & mode::TYPE == mode::REGULAR).then_some(found.ino))
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

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_none()
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
