//! Copies files of the host into an archive, streaming, with everything that the archive can keep of them.

mod renewal;
mod small;

use std::collections::{HashMap, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, SeekFrom, Stat};
use rustix::io::Errno;

use lockbox_terminal::display;

use super::attributes::{self, Object};
use super::deletion::MirrorPlan;
use super::host::{self, attributes_of, device_number, host_error};
use super::progress::Tally;
use super::skipped::LeftOut;
use super::walk::{self, Names, Step, Walk};
use super::{Cause, Copied, Filter, Problem, Progress, path};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, Creator, FileSystem, SetAttributes, mode};
use crate::storage::Identity;

/// Bytes read from the host and handed to the archive at once.
const PIECE: usize = 1 << 20;

/// How to import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Directory of the archive that takes the sources; made when it is missing.
    pub to: Vec<u8>,
    /// What the one source is called there; None for names of their own.
    pub name: Option<Vec<u8>>,
    /// A source that is a symbolic link stands for what it points to. Links below a source are always kept as links.
    pub follow: bool,
    /// Replace what is in the way, except directories.
    pub replace: bool,
    /// Owner of directories made for `to`.
    pub creator: Creator,
    /// What below the sources is left out.
    pub filter: Filter,
    /// Make what the sources become equal to them: what is unchanged is not written again, and what the plan says is deleted, when all
    /// else is done and nothing failed. A replaced object has its old content or the new one at any moment.
    pub mirror: Option<MirrorPlan>,
}

impl ImportOptions {
    /// What a source is called in the archive.
    pub(super) fn name_of(&self, source: &Path) -> Result<Vec<u8>> {
        self.name.clone().map_or_else(|| source_name(source), Ok)
    }

    /// Of two sources with one name only one would be there in the end. Who has no name is told when it is read.
    pub(super) fn refuse_twins(&self, sources: &[PathBuf]) -> Result<()> {
        let mut names = HashSet::new();
        match sources.iter().filter_map(|source| self.name_of(source).ok()).find(|name| !names.insert(name.clone())) {
            Some(name) => Err(Error::invalid(format!("two sources would get the name {}", display(&name)))),
            None => Ok(()),
        }
    }
}

/// What was imported.
#[derive(Debug, Default)]
pub struct ImportReport {
    pub copied: Copied,
    /// Mirroring: what was as in the source, and what only got other metadata. Neither counts above.
    pub unchanged: u64,
    pub updated: u64,
    /// Mirroring: what was deleted, with everything below.
    pub deleted: u64,
    /// Mirroring: what was to be deleted, each with everything below, and stays because a part of the sources could not be copied: who
    /// does not know all that is there deletes nothing.
    pub deletions_skipped: u64,
    /// Extended attributes that the archive does not keep.
    pub left: LeftOut,
    /// What failed while the rest went on.
    pub problems: Vec<Problem>,
}

/// Copies each source, with what is below it, under its own name into the directory `options.to`. Existing directories are
/// merged. What cannot be read is reported and left out; a file that changes meanwhile is kept as it was read, and reported. An error of `progress`
/// ends it.
///
/// # Errors
/// `Invalid` for two sources of one name, with nothing added. `NoSpace`, `Latched`, `ReadOnly`, `Damaged`, and `Interrupted` of `progress`: nothing
/// more is added; what was added before is whole, and what was on its way is taken back.
pub fn import(
    fs: &FileSystem,
    archive: Option<Identity>,
    sources: &[PathBuf],
    options: &ImportOptions,
    progress: &mut dyn FnMut(&Progress<'_>) -> Result<()>,
) -> Result<ImportReport> {
    options.refuse_twins(sources)?;
    let directory =
        path::resolve_or_make(fs, &options.to, |parent, name| fs.make_directory(parent, name, 0o755, options.creator))?;
    let mut import = Import {
        fs,
        options,
        progress,
        archive,
        report: ImportReport::default(),
        tally: Tally::default(),
        links: HashMap::new(),
        claimed: HashSet::new(),
        piece: vec![0; PIECE],
        path: Vec::new(),
        top_length: 0,
        plan: options.mirror.clone(),
        waiting: small::Waiting::default(),
    };
    let copied = sources.iter().try_for_each(|source| import.source(source, directory));
    // What was read before an error is added as it would have been without waiting.
    copied.and(import.add_waiting())?;
    import.delete_the_rest()?;
    Ok(import.report)
}

struct Import<'a> {
    fs: &'a FileSystem,
    options: &'a ImportOptions,
    progress: &'a mut dyn FnMut(&Progress<'_>) -> Result<()>,
    /// The archive's own file, which cannot be added to itself.
    archive: Option<Identity>,
    report: ImportReport,
    tally: Tally,
    /// Device and inode of a file with several names: its copy and the names still to come, as far as the count of them goes: sources that
    /// lie in each other bring a name twice.
    links: HashMap<(u64, u64), (Ino, u64)>,
    /// Files of the archive that one with several names was found to be.
    claimed: HashSet<Ino>,
    piece: Vec<u8>,
    /// The host path being copied, for messages; the first `top_length` bytes are the source's own.
    path: Vec<u8>,
    top_length: usize,
    plan: Option<MirrorPlan>,
    waiting: small::Waiting,
}

/// What the import keeps of a directory whose entries are being copied.
struct Kept {
    stat: Stat,
    ino: Ino,
    /// Mirroring: the directory was there before, and what differs is to be found out.
    is_old: bool,
}

/// A directory of the host, and what is kept of it.
type Directory = walk::Directory<Names, Kept>;

impl Import<'_> {
    fn source(&mut self, source: &Path, directory: Ino) -> Result<()> {
        self.path = source.as_os_str().as_bytes().to_vec();
        self.top_length = self.path.len();
        let name = match self.options.name_of(source) {
            Ok(name) => name,
            Err(error) => return self.note(Err(error)),
        };
        let mut walk = Walk::new();
        let first = self.entry(CWD, source.as_os_str().as_bytes(), self.options.follow, directory, &name);
        let copied = self.descend(&mut walk, first).and_then(|()| self.copy_below(&mut walk));
        if copied.is_err() {
            // Their entries are not all copied, because the import ends.
            walk.abandon(&mut self.path, |path, directory| self.waiting.finish_later(path, directory));
        }
        copied
    }

    fn copy_below(&mut self, walk: &mut Walk<Names, Kept>) -> Result<()> {
        while let Some(step) = walk.step(&mut self.path, Iterator::next, |entry| entry.file_name().to_bytes()) {
            let below = match step {
                Ok(Step::Leave(directory)) => {
                    self.leave_directory(directory)?;
                    continue;
                }
                Ok(Step::Entry(entry, directory)) => {
                    let (host, name) = (directory.entries.descriptor(), entry.file_name().to_bytes());
                    host.and_then(|host| self.entry(host, name, false, directory.kept.ino, name))
                }
                Err(error) => Err(error),
            };
            self.descend(walk, below)?;
        }
        Ok(())
    }

    /// Goes on in a directory that was made.
    fn descend(&mut self, walk: &mut Walk<Names, Kept>, made: Result<Option<(Names, Kept)>>) -> Result<()> {
        if let Some((names, kept)) = self.tolerate(made)? {
            walk.enter(&self.path, names, kept);
        }
        Ok(())
    }

    /// Copies one object; a directory is made and returned, its entries follow.
    fn entry(
        &mut self,
        at: impl AsFd,
        host: &[u8],
        follow: bool,
        parent: Ino,
        name: &[u8],
    ) -> Result<Option<(Names, Kept)>> {
        self.tally.next();
        self.tell(0)?;
        let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
        let stat = rustix::fs::statat(&at, host, flags).map_err(host_error("cannot read"))?;
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        if self.options.filter.leaves_out(self.path.get(self.top_length + 1..).unwrap_or_default(), is_directory) {
            return Ok(None);
        }
        self.tally.meet_host(&stat);
        if Some(Identity::from(&stat)) == self.archive {
            self.report.problems.push(Problem { path: self.path.clone(), cause: Cause::Itself });
            return Ok(None);
        }
        if self.waiting.has(parent, name) {
            self.add_waiting()?;
        }
        if let Some(plan) = &mut self.plan {
            plan.spare(parent, name);
            let object = Object::Named { directory: at.as_fd(), name: host, follow };
            if !is_directory && self.is_unchanged(&stat, &object, parent, name)? {
                return Ok(None);
            }
        }
        let open = |kind: OFlags| {
            let follow = if follow { OFlags::empty() } else { OFlags::NOFOLLOW };
            // A FIFO that took the file's place must not block the open.
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | follow | kind;
            rustix::fs::openat(&at, host, flags, Mode::empty()).map_err(host_error("cannot open"))
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => self.directory(open(OFlags::DIRECTORY)?, parent, name).map(Some),
            FileType::RegularFile => {
                let file = open(OFlags::empty())?;
                if stat.st_nlink == 1 && self.read_small(&file, parent, name)? {
                    return Ok(None);
                }
                self.linked(&stat, parent, name, |import| import.file(&file, parent, name))
            }
            FileType::Symlink => self.linked(&stat, parent, name, |import| {
                let target =
                    rustix::fs::readlinkat(&at, host, Vec::new()).map_err(host_error("cannot read the link"))?;
                let creator = host::creator_of(&stat);
                let make = |name: &[u8]| import.fs.make_symlink(parent, name, target.to_bytes(), creator);
                let ino = import.place(parent, name, make, |import, ino| {
                    import.xattrs(&Object::Named { directory: at.as_fd(), name: host, follow }, ino)?;
                    import.fs.set_attributes(ino, &metadata_of(&stat)).map(drop)
                })?;
                import.report.copied.symlinks += 1;
                Ok(ino)
            }),
            _ => self.linked(&stat, parent, name, |import| {
                let object = Object::Named { directory: at.as_fd(), name: host, follow };
                import.node(&object, &stat, parent, name)
            }),
        }
    }

    /// `within`: where in the file that is being copied.
    fn tell(&mut self, within: u64) -> Result<()> {
        let copied = self.report.copied.progress(&self.path, 0);
        (self.progress)(&Progress { passed: self.tally.passed(within), ..copied })
    }

    fn directory(&mut self, host: OwnedFd, parent: Ino, name: &[u8]) -> Result<(Names, Kept)> {
        let stat = rustix::fs::fstat(&host).map_err(host_error("cannot read"))?;
        let creator = host::creator_of(&stat);
        let fs = self.fs;
        let make = |name: &[u8]| fs.make_directory(parent, name, stat.st_mode & mode::PERMISSIONS, creator);
        let (ino, is_old) = match path::if_there(fs.lookup(parent, name))? {
            Some(existing) if existing.is_directory() => {
                if self.plan.is_none() {
                    attributes::forget_lists(fs, existing.ino)?;
                }
                (existing.ino, self.plan.is_some())
            }
            Some(_) if self.plan.is_none() => return Err(Error::Exists),
            _ => (self.place(parent, name, make, |_, _| Ok(()))?, false),
        };
        self.report.copied.directories += 1;
        Ok((Names::of(host)?, Kept { stat, ino, is_old }))
    }

    /// Times last: every entry made in a directory changes them.
    fn finish_directory(&mut self, directory: &Directory) -> Result<()> {
        let (host, kept) = (directory.entries.descriptor()?, &directory.kept);
        if kept.is_old {
            return self.renew_directory(&Object::open(&host), kept);
        }
        let xattrs = self.xattrs(&Object::open(&host), kept.ino);
        self.fs.set_attributes(kept.ino, &attributes_of(&kept.stat))?;
        xattrs
    }

    /// Gives a file with several names one copy with as many names.
    fn linked(
        &mut self,
        stat: &Stat,
        parent: Ino,
        name: &[u8],
        copy: impl FnOnce(&mut Self) -> Result<Ino>,
    ) -> Result<Option<(Names, Kept)>> {
        let id = (stat.st_dev, stat.st_ino);
        let seen = self.links.get(&id).copied();
        let remaining = match seen {
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
        Ok(None)
    }

    fn file(&mut self, host: &OwnedFd, parent: Ino, name: &[u8]) -> Result<Ino> {
        let stat = rustix::fs::fstat(host).map_err(host_error("cannot read"))?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Error::invalid("the file was replaced while it was opened"));
        }
        let creator = host::creator_of(&stat);
        let fs = self.fs;
        let ino = self.place(
            parent,
            name,
            |name| fs.create_and_open(parent, name, stat.st_mode & mode::PERMISSIONS, creator),
            |import, ino| {
                let filled = import.fill(host, &stat, ino);
                fs.release(ino)?;
                filled
            },
        )?;
        self.report.copied.files += 1;
        Ok(ino)
    }

    fn fill(&mut self, host: &OwnedFd, before: &Stat, ino: Ino) -> Result<()> {
        let size = u64::try_from(before.st_size).unwrap_or(0);
        let mut end = self.content(host, size, ino)?;
        if end == size {
            end = self.unstated_content(host, before, ino)?;
        }
        self.xattrs(&Object::open(host), ino)?;
        let set = SetAttributes { size: Some(end), ..attributes_of(before) };
        self.fs.set_attributes(ino, &set)?;
        let after = rustix::fs::fstat(host).map_err(host_error("cannot read"))?;
        if end < size || host::was_written(before, &after) {
            self.report.problems.push(Problem { path: self.path.clone(), cause: Cause::Changed });
        }
        Ok(())
    }

    /// Copies the bytes after the stated size, and returns the length of the copy: files of /proc
    /// and documents of unknown length state 0. Of a file that grows meanwhile nothing more is
    /// copied; the copy of one that is written all the time would not end.
    fn unstated_content(&mut self, host: &OwnedFd, before: &Stat, ino: Ino) -> Result<u64> {
        let mut offset = u64::try_from(before.st_size).unwrap_or(0);
        loop {
            let length = host::read_at(host, &mut self.piece, offset)?;
            if length == 0 || host::has_other_size(host, before)? {
                return Ok(offset);
            }
            self.fs.write(ino, offset, &self.piece[..length])?;
            offset += length as u64;
            self.report.copied.bytes += length as u64;
            self.tell(offset)?;
        }
    }

    /// Copies what is data below `size`, leaves holes, and returns the length of the copy: less when the file shrank.
    fn content(&mut self, host: &OwnedFd, size: u64, ino: Ino) -> Result<u64> {
        let failed = host_error("cannot read");
        let mut offset = 0;
        while offset < size {
            let data = match rustix::fs::seek(host, SeekFrom::Data(offset)) {
                Ok(data) => data,
                // No data behind the offset: the rest is one hole, unless the file shrank.
                Err(Errno::NXIO) => {
                    let now = rustix::fs::fstat(host).map_err(&failed)?.st_size;
                    return Ok(size.min(u64::try_from(now).unwrap_or(0)));
                }
                // A host file system without the notion.
                Err(Errno::INVAL) => offset,
                Err(errno) => return Err(failed(errno)),
            };
            let hole = rustix::fs::seek(host, SeekFrom::Hole(data)).unwrap_or(size).min(size);
            offset = data.min(size);
            while offset < hole {
                let wanted = usize::try_from(hole - offset).unwrap_or(PIECE).min(PIECE);
                let length = host::read_at(host, &mut self.piece[..wanted], offset)?;
                if length == 0 {
                    return Ok(offset);
                }
                self.fs.write(ino, offset, &self.piece[..length])?;
                offset += length as u64;
                self.report.copied.bytes += length as u64;
                self.tell(offset)?;
            }
        }
        Ok(size)
    }

    fn node(&mut self, object: &Object<'_>, stat: &Stat, parent: Ino, name: &[u8]) -> Result<Ino> {
        let creator = host::creator_of(stat);
        let rdev = device_number(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev));
        let fs = self.fs;
        let ino = self.place(
            parent,
            name,
            |name| fs.make_node(parent, name, stat.st_mode, rdev, creator),
            |import, ino| {
                import.xattrs(object, ino)?;
                fs.set_attributes(ino, &attributes_of(stat)).map(drop)
            },
        )?;
        self.report.copied.others += 1;
        Ok(ino)
    }

    fn xattrs(&mut self, object: &Object<'_>, ino: Ino) -> Result<()> {
        attributes::import(object, self.fs, ino, &self.path, &mut self.report.left)
    }

    /// Makes an object and fills it; what could not be filled is removed again. A replacement is made beside and renamed over.
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
                    Some(plan) => plan.may_replace(&existing)?,
                    None if existing.is_directory() => return Err(Error::IsDirectory),
                    None => {}
                }
                let (made, temporary) = make_beside(&make)?;
                beside = Some(temporary);
                made
            }
            other => other?,
        };
        let filled = fill(self, made.ino).and_then(|()| match &beside {
            Some(temporary) => self.put_in_place(parent, temporary, name, &made),
            None => Ok(()),
        });
        match filled {
            Ok(()) => Ok(made.ino),
            Err(error) => {
                if let Err(second) = self.fs.unlink(parent, beside.as_deref().unwrap_or(name)) {
                    tracing::warn!(error = %second, "cannot remove an unfinished copy");
                }
                Err(error)
            }
        }
    }

    /// Notes a failure that concerns one object, passes on one that ends the import.
    fn tolerate<T>(&mut self, result: Result<Option<T>>) -> Result<Option<T>> {
        match result {
            Ok(value) => Ok(value),
            Err(error) if ends_import(&error) => Err(error),
            Err(error) => {
                self.report.problems.push(Problem { path: self.path.clone(), cause: Cause::Failed(error) });
                Ok(None)
            }
        }
    }

    fn note(&mut self, result: Result<()>) -> Result<()> {
        self.tolerate(result.map(Some)).map(drop)
    }
}

/// Whether nothing more can be added, or is to be.
fn ends_import(error: &Error) -> bool {
    use Error::{Damaged, Interrupted, Latched, NoSpace, ReadOnly};
    matches!(error, NoSpace(_) | Latched(_) | ReadOnly(_) | Damaged(_) | Interrupted(_))
}

/// What an object takes from its host file: a link has no mode of its own.
fn metadata_of(stat: &Stat) -> SetAttributes {
    let attributes = attributes_of(stat);
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Symlink => SetAttributes { mode: None, ..attributes },
        _ => attributes,
    }
}

fn make_beside(make: &impl Fn(&[u8]) -> Result<Attributes>) -> Result<(Attributes, Vec<u8>)> {
    let mut number = 0u32;
    loop {
        let name = format!(".lockbox-add-{number}").into_bytes();
        match make(&name) {
            // Left by an import that was killed.
            Err(Error::Exists) => number += 1,
            other => return Ok((other?, name)),
        }
    }
}

/// The name that a source gets: its last part, or that of the real path for `.` and the like.
fn source_name(source: &Path) -> Result<Vec<u8>> {
    let name = match source.file_name() {
        Some(name) => name.to_owned(),
        None => {
            let real = source.canonicalize().map_err(|e| Error::io("cannot find", e))?;
            real.file_name().ok_or_else(|| Error::invalid("the root directory has no name to add it under"))?.to_owned()
        }
    };
    Ok(name.as_bytes().to_vec())
}
