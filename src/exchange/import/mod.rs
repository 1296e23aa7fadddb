//! Imports host files into an archive, streaming, with all metadata that the archive can store.

mod mirror;
mod small;

pub use mirror::{Deletion, MirrorChange, MirrorPlan, plan_mirror};

use std::collections::{HashMap, HashSet};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use lockbox_terminal::display;

use super::attributes::{
    self, HostName, HostVersion, SkippedItems, XattrObject, attributes_of, creator_of, host_error, version,
};
use super::walk::{self, HostEntries, TreeWalk, WalkStep};
use super::{CopyCounts, CopyTally, FileTotals, Filter, Problem, ProblemCause, Progress, path_ops};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem, SetAttributes, mode};
use crate::storage::FileIdentity;

const MIN_PIECE: usize = 1 << 20;

/// Returns the size of one read from the host and one write to the archive in bytes: frames for
/// four processors. Less for a remote archive, where a write may wait for the link, and an
/// interruption for the write.
pub(super) fn piece_length(fs: &FileSystem) -> usize {
    if fs.volume.is_remote() { MIN_PIECE } else { 8 * MIN_PIECE }
}

/// Writes a piece; without space for all of it at once, part by part: raw data takes more than it
/// does after compression, and a piece is written as a whole or not at all.
pub(super) fn write_piece(fs: &FileSystem, ino: Ino, offset: u64, piece: &[u8]) -> Result<()> {
    match fs.write(ino, offset, piece) {
        Err(Error::NoSpace(_)) => {
            let mut parts = piece.chunks(MIN_PIECE).zip((offset..).step_by(MIN_PIECE));
            parts.try_for_each(|(part, offset)| fs.write(ino, offset, part))
        }
        written => written,
    }
}

#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Target directory in the archive; created if missing.
    pub to: Vec<u8>,
    /// New name of a single source; `None` to keep the names.
    pub name: Option<Vec<u8>>,
    /// Follow a source that is a symbolic link. Links below a source are always copied as links.
    pub follow: bool,
    /// Replace existing objects, except directories.
    pub replace: bool,
    /// Owner of directories created for `to`.
    pub creator: Creator,
    /// Excludes paths below the sources.
    pub filter: Filter,
    /// Do not descend into directories of other file systems than the source's: they are copied
    /// without their entries, and mirroring deletes nothing below them. Only directories count,
    /// since a file of an overlay may have another device number than its directory.
    pub one_file_system: bool,
    /// Make the targets equal to the sources: unchanged objects are not written again, and the
    /// plan's deletions are executed at the end if nothing failed. A replaced object has its old or
    /// its new content at any time.
    pub mirror: Option<MirrorPlan>,
}

impl ImportOptions {
    /// Returns the name of a source in the archive: its last component, or that of the real path
    /// for `.` and the like.
    pub(super) fn name_of(&self, source: &Path) -> Result<Vec<u8>> {
        match (&self.name, source.file_name()) {
            (Some(name), _) => Ok(name.clone()),
            (None, Some(name)) => Ok(name.as_bytes().to_vec()),
            (None, None) => {
                let real = source.canonicalize().map_err(|e| Error::io("cannot find", e))?;
                let nameless = || Error::invalid("the root directory has no name to add it under");
                Ok(real.file_name().ok_or_else(nameless)?.as_bytes().to_vec())
            }
        }
    }

    /// Refuses two sources of one name, because the second would replace the first. A source
    /// without a name is reported when it is read.
    pub(super) fn refuse_duplicate_names(&self, sources: &[PathBuf]) -> Result<()> {
        let mut names = HashSet::new();
        match sources.iter().filter_map(|source| self.name_of(source).ok()).find(|name| !names.insert(name.clone())) {
            Some(name) => Err(Error::invalid(format!("two sources would get the name {}", display(&name)))),
            None => Ok(()),
        }
    }
}

/// Result of an import.
#[derive(Debug, Default)]
pub struct ImportReport {
    pub copied: CopyCounts,
    /// Mirroring: objects equal to the source, and objects of which only metadata was updated. Not
    /// included in `copied`.
    pub unchanged: u64,
    pub updated: u64,
    /// Mirroring: deleted objects, including descendants.
    pub deleted: u64,
    /// Mirroring: planned deletions (as subtrees) that were skipped because a part of the sources
    /// could not be copied and may be unknown.
    pub deletions_skipped: u64,
    /// Extended attributes that the archive does not store.
    pub skipped: SkippedItems,
    /// Failures of single objects.
    pub problems: Vec<Problem>,
}

/// Copies each source recursively under its own name into the directory `options.to`. Existing
/// directories are merged. Unreadable objects are reported and skipped; a file that changes
/// meanwhile is stored as it was read, and reported. An error of `progress` ends the import.
///
/// # Errors
/// `Invalid` for two sources of one name, with nothing added. `NoSpace`, `WriteFailed`, `ReadOnly`,
/// `Damaged`, and `Interrupted` of `progress` end the import; objects added before are complete,
/// the current one is removed.
pub fn import(
    fs: &FileSystem,
    archive: Option<FileIdentity>,
    sources: &[PathBuf],
    options: &ImportOptions,
    progress: &mut dyn FnMut(&Progress<'_>) -> Result<()>,
) -> Result<ImportReport> {
    options.refuse_duplicate_names(sources)?;
    let directory = path_ops::resolve_or_create(fs, &options.to, options.creator)?;
    let mut import = Importer {
        fs,
        options,
        progress,
        archive,
        report: ImportReport::default(),
        tally: CopyTally::default(),
        links: HashMap::new(),
        claimed: HashSet::new(),
        piece: vec![0; piece_length(fs)],
        path: Vec::new(),
        top_length: 0,
        plan: options.mirror.clone(),
        pending: small::PendingFiles::default(),
        device: None,
    };
    let copied = sources.iter().try_for_each(|source| import.source(source, directory));
    // Files read before an error are added as they would have been without batching.
    copied.and(import.add_pending())?;
    import.delete_remaining()?;
    Ok(import.report)
}

struct Importer<'a> {
    fs: &'a FileSystem,
    options: &'a ImportOptions,
    progress: &'a mut dyn FnMut(&Progress<'_>) -> Result<()>,
    /// Identity of the archive's own file, which cannot be added to itself.
    archive: Option<FileIdentity>,
    report: ImportReport,
    tally: CopyTally,
    /// Copies of files with several hard links, by version, with the number of links still
    /// expected. Overlapping sources may encounter a link twice.
    links: HashMap<HostVersion, (Ino, u64)>,
    /// Files of the archive matched with a host file that has several hard links.
    claimed: HashSet<Ino>,
    piece: Vec<u8>,
    /// Host path of the current object, for messages; its first `top_length` bytes name the source.
    path: Vec<u8>,
    top_length: usize,
    plan: Option<MirrorPlan>,
    pending: small::PendingFiles,
    /// Device of the current source.
    device: Option<u64>,
}

struct ImportedDirectory {
    stat: Stat,
    ino: Ino,
    /// Mirroring: the directory existed before, and its metadata is compared.
    is_old: bool,
}

/// Host directory on the walk's stack.
type ImportDirectory = walk::WalkDirectory<HostEntries, ImportedDirectory>;
type ImportWalk = TreeWalk<HostEntries, ImportedDirectory>;
/// Directory to descend into, if the object is one.
type Descent = Option<(HostEntries, ImportedDirectory)>;

impl Importer<'_> {
    fn source(&mut self, source: &Path, directory: Ino) -> Result<()> {
        self.path = source.as_os_str().as_bytes().to_vec();
        self.top_length = self.path.len();
        self.device = None;
        let name = match self.options.name_of(source) {
            Ok(name) => name,
            Err(error) => return self.note(Err(error)),
        };
        let mut walk = TreeWalk::new();
        let first = self.entry(top_name(source, self.options), directory, &name);
        let copied = self.descend(&mut walk, first).and_then(|()| self.copy_below(&mut walk));
        if copied.is_err() {
            // The import ends, so not all of their entries are copied.
            walk.abandon(&mut self.path, |path, directory| self.pending.finish_later(path, directory));
        }
        copied
    }

    fn copy_below(&mut self, walk: &mut ImportWalk) -> Result<()> {
        while let Some(step) = walk.step(&mut self.path, Iterator::next, |entry| entry.file_name().to_bytes()) {
            let below = match step {
                Ok(WalkStep::Leave(directory)) => {
                    self.leave_directory(directory)?;
                    continue;
                }
                Ok(WalkStep::Entry(entry, directory)) => {
                    let host = directory.entries.locate(&entry);
                    host.and_then(|host| self.entry(host, directory.state.ino, host.name))
                }
                Err(error) => Err(error),
            };
            self.descend(walk, below)?;
        }
        Ok(())
    }

    fn descend(&mut self, walk: &mut ImportWalk, made: Result<Descent>) -> Result<()> {
        if let Some((names, state)) = self.tolerate(made)? {
            walk.enter(&self.path, names, state);
        }
        Ok(())
    }

    /// Copies one object.
    fn entry(&mut self, host: HostName<'_>, parent: Ino, name: &[u8]) -> Result<Descent> {
        self.tally.start_next();
        self.report_progress(0)?;
        let stat = host.stat().map_err(host_error("cannot read"))?;
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if self.options.filter.excludes(self.path.get(self.top_length + 1..).unwrap_or_default(), is_directory) {
            return Ok(None);
        }
        self.tally.add_host_file(&stat);
        if Some(FileIdentity::from(&stat)) == self.archive {
            self.report.problems.push(Problem { path: self.path.clone(), cause: ProblemCause::Itself });
            return Ok(None);
        }
        if self.pending.has(parent, name) {
            self.add_pending()?;
        }
        if let Some(plan) = &mut self.plan {
            plan.keep(parent, name);
            if !is_directory && self.is_unchanged(&stat, host, parent, name)? {
                return Ok(None);
            }
        }
        let open = |kind| host.open(kind).map_err(host_error("cannot open"));
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => return self.directory(open(OFlags::DIRECTORY)?, parent, name).map(Some),
            FileType::RegularFile => {
                let file = open(OFlags::empty())?;
                // The name may denote another file by now.
                let stat = rustix::fs::fstat(&file).map_err(host_error("cannot read"))?;
                if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
                    return Err(Error::invalid("the file was replaced while it was opened"));
                }
                if !self.read_small(&file, &stat, parent, name)? {
                    self.linked(&stat, parent, name, |import| import.file(&file, &stat, parent, name))?;
                }
            }
            _ => self.linked(&stat, parent, name, |import| import.node(host, &stat, parent, name))?,
        }
        Ok(None)
    }

    fn report_progress(&mut self, within: u64) -> Result<()> {
        let copied = self.report.copied.progress(&self.path, 0);
        (self.progress)(&Progress { passed: self.tally.passed(within), ..copied })
    }

    fn directory(&mut self, host: OwnedFd, parent: Ino, name: &[u8]) -> Result<(HostEntries, ImportedDirectory)> {
        let stat = rustix::fs::fstat(&host).map_err(host_error("cannot read"))?;
        let (fs, creator) = (self.fs, creator_of(&stat));
        let make = |name: &[u8]| fs.make_directory(parent, name, stat.st_mode & mode::PERMISSIONS, creator);
        let (ino, is_old) = match path_ops::none_if_missing(fs.lookup(parent, name))? {
            Some(existing) if existing.is_directory() => {
                if self.plan.is_none() {
                    attributes::remove_access_lists(fs, existing.ino)?;
                }
                (existing.ino, self.plan.is_some())
            }
            Some(_) if self.plan.is_none() => return Err(Error::Exists),
            _ => (self.place(parent, name, make, |_, _| Ok(()))?, false),
        };
        self.report.copied.directories += 1;
        let crosses = self.options.one_file_system && *self.device.get_or_insert(stat.st_dev) != stat.st_dev;
        Ok((HostEntries::new(host, crosses)?, ImportedDirectory { stat, ino, is_old }))
    }

    /// Sets the times last, because every created entry changes them.
    fn finish_directory(&mut self, directory: &ImportDirectory) -> Result<()> {
        let (host, state) = (directory.entries.descriptor()?, &directory.state);
        if state.is_old {
            return self.update_directory(&XattrObject::open(&host), state);
        }
        let xattrs = self.xattrs(&XattrObject::open(&host), state.ino);
        self.fs.set_attributes(state.ino, &attributes_of(&state.stat))?;
        xattrs
    }

    /// Copies a file with several hard links once, and creates the other links.
    fn linked(
        &mut self,
        stat: &Stat,
        parent: Ino,
        name: &[u8],
        copy: impl FnOnce(&mut Self) -> Result<Ino>,
    ) -> Result<()> {
        let id = version(stat);
        let remaining = match self.links.get(&id).copied() {
            Some((ino, remaining)) => {
                self.place(parent, name, |name| self.fs.link(ino, parent, name), |_, _| Ok(()))?;
                self.report.copied.links += 1;
                (ino, remaining.saturating_sub(1))
            }
            None => (copy(self)?, stat.st_nlink.saturating_sub(1)),
        };
        if remaining.1 == 0 {
            self.links.remove(&id)
        } else {
            self.links.insert(id, remaining)
        };
        Ok(())
    }

    fn file(&mut self, host: &OwnedFd, stat: &Stat, parent: Ino, name: &[u8]) -> Result<Ino> {
        let (fs, creator) = (self.fs, creator_of(stat));
        let make = |name: &[u8]| fs.create_and_open(parent, name, stat.st_mode & mode::PERMISSIONS, creator);
        let ino = self.place(parent, name, make, |import, ino| {
            let filled = import.fill(host, stat, ino);
            fs.release(ino)?;
            filled
        })?;
        self.report.copied.files += 1;
        Ok(ino)
    }

    fn fill(&mut self, host: &OwnedFd, before: &Stat, ino: Ino) -> Result<()> {
        let size = u64::try_from(before.st_size).unwrap_or(0);
        let mut end = self.content(host, size, ino)?;
        if end == size {
            end = self.unstated_content(host, before, ino)?;
        }
        self.xattrs(&XattrObject::open(host), ino)?;
        let set = SetAttributes { size: Some(end), ..attributes_of(before) };
        self.fs.set_attributes(ino, &set)?;
        let after = rustix::fs::fstat(host).map_err(host_error("cannot read"))?;
        if end < size || version(before) != version(&after) {
            self.report.problems.push(Problem { path: self.path.clone(), cause: ProblemCause::Changed });
        }
        Ok(())
    }

    /// Copies the bytes after the reported size and returns the length of the copy: files of /proc
    /// and documents of unknown length report size 0. A file that grows meanwhile is not followed,
    /// because the copy of a continuously written file would not end.
    fn unstated_content(&mut self, host: &OwnedFd, before: &Stat, ino: Ino) -> Result<u64> {
        let mut offset = u64::try_from(before.st_size).unwrap_or(0);
        loop {
            let length = attributes::read_at(host, &mut self.piece, offset)?;
            if length == 0 || rustix::fs::fstat(host).map_err(host_error("cannot read"))?.st_size != before.st_size {
                return Ok(offset);
            }
            write_piece(self.fs, ino, offset, &self.piece[..length])?;
            offset += length as u64;
            self.report.copied.bytes += length as u64;
            self.report_progress(offset)?;
        }
    }

    /// Copies the data below `size`, preserves holes, and returns the length of the copy, which is
    /// shorter if the file shrank.
    fn content(&mut self, host: &OwnedFd, size: u64, ino: Ino) -> Result<u64> {
        let failed = host_error("cannot read");
        let mut offset = 0;
        while offset < size {
            let data = match rustix::fs::seek(host, SeekFrom::Data(offset)) {
                Ok(data) => data,
                // No data after the offset: the rest is a hole, unless the file shrank.
                Err(Errno::NXIO) => {
                    let now = rustix::fs::fstat(host).map_err(&failed)?.st_size;
                    return Ok(size.min(u64::try_from(now).unwrap_or(0)));
                }
                // The host file system does not support SEEK_DATA.
                Err(Errno::INVAL) => offset,
                Err(errno) => return Err(failed(errno)),
            };
            let hole = rustix::fs::seek(host, SeekFrom::Hole(data)).unwrap_or(size).min(size);
            offset = data.min(size);
            while offset < hole {
                let wanted = usize::try_from(hole - offset).unwrap_or(usize::MAX).min(self.piece.len());
                let length = attributes::read_at(host, &mut self.piece[..wanted], offset)?;
                if length == 0 {
                    return Ok(offset);
                }
                write_piece(self.fs, ino, offset, &self.piece[..length])?;
                offset += length as u64;
                self.report.copied.bytes += length as u64;
                self.report_progress(offset)?;
            }
        }
        Ok(size)
    }

    /// Copies a symbolic link, FIFO, socket or device.
    fn node(&mut self, host: HostName<'_>, stat: &Stat, parent: Ino, name: &[u8]) -> Result<Ino> {
        let (fs, creator) = (self.fs, creator_of(stat));
        let is_link = FileType::from_raw_mode(stat.st_mode) == FileType::Symlink;
        let target = if is_link { host.link_target()? } else { Vec::new() };
        let make = |name: &[u8]| match is_link {
            true => fs.make_symlink(parent, name, &target, creator),
            false => fs.make_node(parent, name, stat.st_mode, attributes::rdev_of(stat), creator),
        };
        let ino = self.place(parent, name, make, |import, ino| {
            import.xattrs(&XattrObject::Named(host), ino)?;
            fs.set_attributes(ino, &attributes_of(stat)).map(drop)
        })?;
        match is_link {
            true => self.report.copied.symlinks += 1,
            false => self.report.copied.others += 1,
        }
        Ok(ino)
    }

    fn xattrs(&mut self, object: &XattrObject<'_>, ino: Ino) -> Result<()> {
        attributes::import(object, self.fs, ino, &self.path, &mut self.report.skipped)
    }

    /// Creates an object and fills it; an incomplete one is removed. A replacement gets a temporary
    /// name and is renamed over the old object.
    fn place(
        &mut self,
        parent: Ino,
        name: &[u8],
        make: impl Fn(&[u8]) -> Result<Attributes>,
        fill: impl FnOnce(&mut Self, Ino) -> Result<()>,
    ) -> Result<Ino> {
        let mut beside = None;
        let made = match make(name) {
            Err(Error::Exists) if self.options.replace || self.plan.is_some() => {
                let existing = self.fs.lookup(parent, name)?;
                match &self.plan {
                    Some(plan) => plan.check_replaceable(&existing)?,
                    None if existing.is_directory() => return Err(Error::IsDirectory),
                    None => {}
                }
                // A name left over from an interrupted import is passed over, even if it is damaged.
                let mut names = (0u64..).map(|number| format!(".lockbox-add-{number}").into_bytes());
                loop {
                    match make(beside.insert(names.next().ok_or(Error::Exists)?)) {
                        Err(Error::Exists) => {}
                        made => break made?,
                    }
                }
            }
            other => other?,
        };
        let filled = fill(self, made.ino).and_then(|()| match &beside {
            Some(temporary) => self.put_in_place(parent, temporary, name, &made),
            None => Ok(()),
        });
        if filled.is_err()
            && let Err(second) = self.fs.unlink(parent, beside.as_deref().unwrap_or(name))
        {
            tracing::warn!(error = %second, "cannot remove an unfinished copy");
        }
        filled.map(|()| made.ino)
    }

    fn tolerate<T>(&mut self, result: Result<Option<T>>) -> Result<Option<T>> {
        Problem::tolerate_unless(ends_import, &mut self.report.problems, &self.path, result)
    }

    fn note(&mut self, result: Result<()>) -> Result<()> {
        self.tolerate(result.map(Some)).map(drop)
    }
}

/// Returns whether the error prevents all further additions, or is an interrupt.
fn ends_import(error: &Error) -> bool {
    use Error::{Damaged, Interrupted, NoSpace, ReadOnly, WriteFailed};
    let is_named = matches!(error, NoSpace(_) | WriteFailed(_) | ReadOnly(_) | Damaged(_) | Interrupted(_));
    is_named || error.is_server_unavailable()
}

fn top_name<'a>(source: &'a Path, options: &ImportOptions) -> HostName<'a> {
    HostName { directory: CWD, name: source.as_os_str().as_bytes(), follow: options.follow }
}

/// Maximum nesting of open directories: a count leaves enough descriptors to a concurrent copy.
const DEEPEST: usize = 100;

/// Counts the files that [`import`](super::import()) will copy, except unreadable ones. Returns
/// `None` as soon as `wanted` returns false, and for a tree that is too deep.
pub fn count_host_files(sources: &[PathBuf], options: &ImportOptions, wanted: &dyn Fn() -> bool) -> Option<FileTotals> {
    let mut tally = CopyTally::default();
    for source in sources {
        let (mut walk, mut path, mut device) = (TreeWalk::new(), Vec::new(), None);
        // Returns the entries of a directory.
        let mut count = |host: HostName<'_>, path: &[u8]| {
            let stat = host.stat().ok()?;
            let is_directory = stat.st_mode & mode::TYPE == mode::DIRECTORY;
            if options.filter.excludes(path, is_directory) {
                return None;
            }
            tally.add_host_file(&stat);
            let crosses = options.one_file_system && *device.get_or_insert(stat.st_dev) != stat.st_dev;
            if !is_directory || crosses {
                return None;
            }
            HostEntries::new(host.open(OFlags::DIRECTORY).ok()?, false).ok()
        };
        if let Some(names) = count(top_name(source, options), &path) {
            walk.enter(&path, names, ());
        }
        while let Some(step) = walk.step(&mut path, Iterator::next, |entry| entry.file_name().to_bytes()) {
            if !wanted() {
                return None;
            }
            let Ok(WalkStep::Entry(entry, directory)) = step else { continue };
            let Ok(host) = directory.entries.locate(&entry) else { continue };
            if let Some(names) = count(host, &path) {
                walk.enter(&path, names, ());
            }
            if walk.depth() > DEEPEST {
                return None;
            }
        }
    }
    Some(tally.met)
}
