//! Extracts files of an archive to the host, streaming, never outside the target directory.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags};

use lockbox_terminal::display;

use super::attributes::{self, Phase, SkippedItems, XattrObject, apply, apply_at, host_error, is_root};
use super::staging_dir::{StagingDir, identity_of, link_again, make_directory, make_special, open_again};
use super::walk::{ArchiveWalk, ContentPrefetch, WalkStep};
use super::{CopyCounts, CopyTally, Entries, FileTotals, Filter, ListingEntry, Problem, Progress, path_ops};
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem, mode};
use crate::storage::{FileIdentity, host_call};

/// Size of one read from the archive and one write to the host, in bytes.
const PIECE: usize = 1 << 20;

/// Options of an extraction.
#[derive(Clone, Debug)]
pub struct ExtractOptions {
    /// Target directory on the host; created if missing.
    pub to: PathBuf,
    /// New name of a single item; `None` to keep the names.
    pub name: Option<Vec<u8>>,
    /// Replace existing files (and empty directories).
    pub replace: bool,
    /// Excludes paths below each extracted path; below the root, paths relative to it.
    pub filter: Filter,
    /// Create devices, and keep set-ID and sticky bits of files and the attributes that grant
    /// privileges.
    pub privileges: bool,
}

/// Result of an extraction.
#[derive(Debug, Default)]
pub struct ExtractReport {
    pub copied: CopyCounts,
    /// Extended attributes that could not be set, and skipped privileges.
    pub skipped: SkippedItems,
    /// Failures of single objects.
    pub problems: Vec<Problem>,
    /// Path of the object at which a server became unavailable, and the error; no later object was
    /// extracted.
    pub ended: Option<(Vec<u8>, Error)>,
}

/// Extracts each path recursively under its own name into `options.to`; without paths, everything.
/// An item appears in the target when it is complete, except for unreadable or refused objects,
/// which are reported. An error of `progress` ends the extraction. When a server becomes
/// unavailable, the files extracted before remain, and the report has the error.
///
/// # Errors
/// `Exists` naming the existing object, `NotFound` for a path, `NoSpace` and failures of the host:
/// the target is unchanged then.
pub fn extract(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    options: &ExtractOptions,
    progress: &mut dyn FnMut(&Progress<'_>) -> Result<()>,
) -> Result<ExtractReport> {
    let (mut tops, unreadable) = tops(fs, paths)?;
    if let ([top], Some(name)) = (&mut tops[..], &options.name) {
        top.name.clone_from(name);
    }
    let stage = StagingDir::new(&options.to, &SystemEnvironment)?;
    if !options.replace {
        for top in &tops {
            if stage.has_entry(&top.name)? {
                return Err(in_the_way(&top.name, &options.to));
            }
        }
    }
    // The filter's paths of an item of the root begin with its name.
    let filtered = |top: &ExtractItem| if top.of_root { top.name.clone() } else { Vec::new() };
    let trees = tops.iter().map(|top| (filtered(top), top.attributes));
    let mut extract = Extractor {
        fs,
        prefetch: ContentPrefetch::new(fs, &options.filter, trees),
        stage: &stage,
        filter: &options.filter,
        top_length: 0,
        progress,
        report: ExtractReport { skipped: SkippedItems::extracting(options.privileges), ..ExtractReport::default() },
        tally: CopyTally::default(),
        links: HashMap::new(),
        closed: Vec::new(),
        path: Vec::new(),
        piece: Vec::new(),
    };
    for error in unreadable {
        extract.note(Err(error))?;
    }
    for top in &tops {
        match extract.top(top) {
            Err(error) if error.is_server_unavailable() => {
                extract.report.ended = Some((extract.path.clone(), error));
                break;
            }
            result => result?,
        }
    }
    for top in &tops {
        extract.path = top.name.clone();
        // Items that failed as a whole do not exist, and were reported.
        if rustix::fs::statat(stage.directory(), &top.name[..], AtFlags::SYMLINK_NOFOLLOW).is_err() {
            continue;
        }
        match stage.install(&top.name, options.replace) {
            Err(Error::Exists) => extract.note(Err(in_the_way(&top.name, &options.to)))?,
            other => extract.note(other)?,
        }
    }
    extract.close_directories()?;
    Ok(extract.report)
}

/// Item with a name of its own in the target.
struct ExtractItem {
    name: Vec<u8>,
    attributes: Attributes,
    /// Selected through the root: the filter's paths begin with its name, otherwise below it.
    of_root: bool,
}

/// Returns the items, and the errors of entries of the root that cannot be extracted.
fn tops(fs: &FileSystem, paths: &[Vec<u8>]) -> Result<(Vec<ExtractItem>, Vec<Error>)> {
    let mut tops: Vec<ExtractItem> = Vec::new();
    let mut unreadable = Vec::new();
    let everything = [Vec::new()];
    for path in if paths.is_empty() { &everything } else { paths } {
        let attributes = path_ops::resolve_argument(fs, path)?;
        match path_ops::components(path)?.last() {
            Some(name) => tops.push(ExtractItem { name: name.to_vec(), attributes, of_root: false }),
            None => {
                let mut entries = Entries::new(fs, ROOT_INO)?;
                while let Some(entry) = entries.next_entry() {
                    match entry {
                        Ok(ListingEntry { name, attributes, .. }) => {
                            tops.push(ExtractItem { name: name.to_vec(), attributes: *attributes, of_root: true });
                        }
                        Err(error @ Error::Damaged(_)) => unreadable.push(error),
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }
    tops.sort_by(|a, b| a.name.cmp(&b.name));
    let twice = tops.windows(2).find(|pair| pair[0].name == pair[1].name);
    if let Some(pair) = twice.filter(|_| paths.len() > 1) {
        return Err(Error::invalid(format!("two items would get the name {}", display(&pair[0].name))));
    }
    // The root has duplicate names only if a holder of the key wrote them; the other entries are
    // extracted nevertheless.
    tops.dedup_by(|later, earlier| {
        let is_twice = later.name == earlier.name;
        if is_twice {
            unreadable.push(Error::damaged(format!("the root has the name {} twice", display(&later.name))));
        }
        is_twice
    });
    Ok((tops, unreadable))
}

fn in_the_way(name: &[u8], target: &Path) -> Error {
    let what = format!("{} already exists in {}", display(name), display(target.as_os_str().as_bytes()));
    Error::Refused(Refusal::ExistingObject { what })
}

struct Extractor<'a> {
    fs: &'a FileSystem,
    prefetch: ContentPrefetch<'a>,
    stage: &'a StagingDir,
    filter: &'a Filter,
    /// Length of the path prefix to which the filter does not apply, with its slash.
    top_length: usize,
    progress: &'a mut dyn FnMut(&Progress<'_>) -> Result<()>,
    report: ExtractReport,
    tally: CopyTally,
    /// Files with several hard links: path of the first copy below the staging directory, its
    /// identity, and the number of remaining links.
    links: HashMap<Ino, (Vec<u8>, FileIdentity, u32)>,
    /// Directories that deny access to their owner; the mode is set after everything was installed.
    closed: Vec<(Vec<u8>, FileIdentity, Attributes)>,
    /// Path of the current object below the staging directory.
    path: Vec<u8>,
    piece: Vec<u8>,
}

struct ExtractedDirectory {
    host: OwnedFd,
    attributes: Attributes,
}

impl<'a> Extractor<'a> {
    fn top(&mut self, top: &ExtractItem) -> Result<()> {
        self.prefetch.advance(self.tally.met.bytes);
        self.path.clone_from(&top.name);
        self.top_length = if top.of_root { 0 } else { top.name.len() + 1 };
        let entry = ListingEntry { name: &top.name, attributes: &top.attributes, content: None };
        let first = self.entry(self.stage.directory(), entry);
        let mut tree = ArchiveWalk::new();
        self.descend(&mut tree, first)?;
        while let Some(step) = tree.next(&mut self.path) {
            let below = step.and_then(|step| match step {
                WalkStep::Entry(entry, directory) => self.entry(&directory.state.host, entry),
                WalkStep::Leave(directory) => self.finish_directory(directory.state).map(|()| None),
            });
            self.descend(&mut tree, below)?;
        }
        Ok(())
    }

    fn descend(
        &mut self,
        tree: &mut ArchiveWalk<'a, ExtractedDirectory>,
        made: Result<Option<ExtractedDirectory>>,
    ) -> Result<()> {
        let Some(made) = self.tolerate(made)? else { return Ok(()) };
        // Content of files that the filter excludes is not read.
        let list = if self.filter.is_empty() { Entries::with_contents } else { Entries::new };
        let entered = list(self.fs, made.attributes.ino).map(|entries| tree.enter(&self.path, entries, made));
        self.note(entered)
    }

    /// Creates one object. Returns a directory to descend into.
    fn entry(&mut self, at: &OwnedFd, entry: ListingEntry<'_>) -> Result<Option<ExtractedDirectory>> {
        let ListingEntry { name, attributes, content } = entry;
        self.tally.start_next();
        self.prefetch.advance(self.tally.met.bytes);
        self.report_progress(0)?;
        if matches!(name, b"" | b"." | b"..") || name.iter().any(|b| matches!(b, b'/' | 0)) {
            return Err(Error::damaged("a name that leads out of its directory"));
        }
        let filtered = self.path.get(self.top_length..);
        let is_excluded = filtered.is_some_and(|path| self.filter.excludes(path, attributes.is_directory()));
        if is_excluded || self.report.skipped.withholds_object(&self.path, attributes.mode) {
            return Ok(None);
        }
        self.tally.add_stored_file(attributes);
        if attributes.is_directory() {
            let host = make_directory(at, name)?;
            self.report.copied.directories += 1;
            return Ok(Some(ExtractedDirectory { host, attributes: *attributes }));
        }
        if attributes.links > 1
            && let Some((first, made, remaining)) = self.links.remove(&attributes.ino)
        {
            link_again(self.stage.directory(), &first, made, at, name)?;
            self.report.copied.links += 1;
            if remaining > 1 {
                self.links.insert(attributes.ino, (first, made, remaining - 1));
            }
            return Ok(None);
        }
        let made = match attributes.mode & mode::TYPE {
            mode::REGULAR => self.file(at, name, attributes, content)?,
            _ => self.node(at, name, attributes)?,
        };
        if attributes.links > 1 {
            self.links.insert(attributes.ino, (self.path.clone(), made, attributes.links - 1));
        }
        Ok(None)
    }

    fn report_progress(&mut self, within: u64) -> Result<()> {
        let copied = self.report.copied.progress(&self.path, within);
        (self.progress)(&Progress { passed: self.tally.passed(within), ..copied })
    }

    /// Sets the times last, because every created entry changes them.
    fn finish_directory(&mut self, made: ExtractedDirectory) -> Result<()> {
        let ExtractedDirectory { host, attributes } = made;
        self.xattrs(&XattrObject::open(&host), &attributes, Phase::BeforeMode)?;
        // Root has access nevertheless, and in the staging directory no other user can exchange
        // directories now.
        if attributes.mode & 0o700 != 0o700 && !is_root() {
            self.closed.push((self.path.clone(), identity_of(&host)?, attributes));
            return Ok(());
        }
        apply(&host, &attributes)?;
        self.xattrs(&XattrObject::open(&host), &attributes, Phase::AfterMode)
    }

    /// Sets the deferred modes. A directory comes after its subdirectories in the list.
    fn close_directories(&mut self) -> Result<()> {
        for (path, made, attributes) in std::mem::take(&mut self.closed) {
            let opened = open_again(self.stage.target(), &path, made);
            self.path = path;
            let closed = opened.and_then(|directory| {
                apply(&directory, &attributes)?;
                self.xattrs(&XattrObject::open(&directory), &attributes, Phase::AfterMode)
            });
            self.note(closed)?;
        }
        Ok(())
    }

    fn file(
        &mut self,
        at: &OwnedFd,
        name: &[u8],
        attributes: &Attributes,
        content: Option<&[u8]>,
    ) -> Result<FileIdentity> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let host = rustix::fs::openat(at, name, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot make"))?;
        if let Err(error) = self.content(&host, attributes, content) {
            // A partial file must not be taken for the complete one.
            let removed = rustix::fs::unlinkat(at, name, AtFlags::empty());
            return removed.map_err(host_error("cannot remove an unfinished copy")).and(Err(error));
        }
        self.report.copied.files += 1;
        let object = XattrObject::open(&host);
        // The object exists: failures of its metadata are reported, and it remains.
        let before = self.xattrs(&object, attributes, Phase::BeforeMode);
        self.note(before)?;
        let granted = self.report.skipped.granted(&self.path, attributes);
        self.note(apply(&host, &granted))?;
        let after = self.xattrs(&object, attributes, Phase::AfterMode);
        self.note(after)?;
        identity_of(&host)
    }

    /// Copies the data, which may have been read ahead, and preserves holes.
    fn content(&mut self, host: &OwnedFd, attributes: &Attributes, content: Option<&[u8]>) -> Result<()> {
        let (ino, size) = (attributes.ino, attributes.size);
        if let Some(content) = content {
            write_all(host, content, 0)?;
            if !content.is_empty() {
                self.report_progress(size)?;
            }
            self.report.copied.bytes += size;
            return Ok(());
        }
        // Most files have no holes. The block count is unverified: if it is wrong, at most one
        // buffer of zeros is written.
        let is_dense = size <= PIECE as u64 && attributes.blocks >= size.div_ceil(512);
        if is_dense {
            self.data(host, attributes, 0, size)?;
        }
        let mut end = if is_dense { size } else { 0 };
        while end < size {
            let start = match self.fs.next_data(ino, end) {
                Err(Error::NoSuchRange) => break,
                start => start?,
            };
            end = self.fs.next_hole(ino, start)?;
            self.data(host, attributes, start, end)?;
        }
        if end < size {
            host_call::set_length(host, size).map_err(host_error("cannot set the size"))?;
        }
        // Includes the holes, as all totals of sizes do.
        self.report.copied.bytes += size;
        Ok(())
    }

    fn data(&mut self, host: &OwnedFd, attributes: &Attributes, mut offset: u64, end: u64) -> Result<()> {
        while offset < end {
            let wanted = usize::try_from(end - offset).unwrap_or(PIECE).min(PIECE);
            let length = self.fs.read_into(attributes.ino, offset, wanted, &mut self.piece)?;
            if length == 0 {
                return Err(Error::damaged(format!("the file ends early: size={} end={offset}", attributes.size)));
            }
            write_all(host, &self.piece[..length], offset)?;
            offset += length as u64;
            self.report_progress(offset)?;
        }
        Ok(())
    }

    /// Creates an object that is not opened; such objects cannot have `user.` attributes.
    fn node(&mut self, at: &OwnedFd, name: &[u8], attributes: &Attributes) -> Result<FileIdentity> {
        let held = make_special(at, name, attributes, || self.fs.read_link(attributes.ino))?;
        match attributes.mode & mode::TYPE {
            mode::SYMLINK => self.report.copied.symlinks += 1,
            _ => self.report.copied.others += 1,
        }
        let granted = self.report.skipped.granted(&self.path, attributes);
        self.note(apply_at(&held, at, name, &granted))?;
        let after = self.xattrs(&XattrObject::Held(held.as_fd()), attributes, Phase::AfterMode);
        self.note(after)?;
        identity_of(&held)
    }

    fn xattrs(&mut self, object: &XattrObject<'_>, attributes: &Attributes, phase: Phase) -> Result<()> {
        attributes::extract(self.fs, attributes.ino, object, phase, &self.path, &mut self.report.skipped)
    }

    fn note(&mut self, result: Result<()>) -> Result<()> {
        self.tolerate(result.map(Some)).map(drop)
    }

    fn tolerate<T>(&mut self, result: Result<Option<T>>) -> Result<Option<T>> {
        Problem::tolerate(&mut self.report.problems, &self.path, result)
    }
}

pub(crate) fn write_all(host: impl AsFd, mut data: &[u8], mut offset: u64) -> Result<()> {
    while !data.is_empty() {
        match rustix::io::pwrite(&host, data, offset) {
            Ok(0) => return Err(Error::io("cannot write", std::io::ErrorKind::WriteZero.into())),
            Ok(length) => {
                data = &data[length..];
                offset += length as u64;
            }
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(host_error("cannot write")(errno)),
        }
    }
    Ok(())
}

/// Counts the files that [`extract`](super::extract()) and [`export_tar`](super::export_tar()) will
/// copy, except unreadable ones. Returns `None` as soon as `wanted` returns false.
pub fn count_archive_files(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    filter: &Filter,
    wanted: &dyn Fn() -> bool,
) -> Option<FileTotals> {
    let mut tally = CopyTally::default();
    let everything = [Vec::new()];
    for given in if paths.is_empty() { &everything } else { paths } {
        let Ok(top) = path_ops::resolve_argument(fs, given) else { continue };
        tally.add_stored_file(&top);
        let (mut tree, mut path) = (ArchiveWalk::new(), Vec::new());
        if top.is_directory() {
            let _ = tree.descend(fs, &path, top.ino, ());
        }
        while let Some(step) = tree.next(&mut path) {
            if !wanted() {
                return None;
            }
            let Ok(WalkStep::Entry(entry, _)) = step else { continue };
            let is_directory = entry.attributes.is_directory();
            if filter.excludes(&path, is_directory) {
                continue;
            }
            tally.add_stored_file(entry.attributes);
            if is_directory {
                let ino = entry.attributes.ino;
                let _ = tree.descend(fs, &path, ino, ());
            }
        }
    }
    Some(tally.met)
}
