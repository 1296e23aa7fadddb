//! Copies files of an archive out to the host, streaming, never beyond the target directory.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{AtFlags, Mode, OFlags};

use lockbox_terminal::display;

use super::attributes::{self, Object, Phase};
use super::host::{apply, apply_at, host_error, is_root};
use super::progress::Tally;
use super::skipped::LeftOut;
use super::staging_dir::{Stage, identity_of, link_again, make_directory, make_special, open_again};
use super::walk::{Step, Tree};
use super::{Copied, Entries, Entry, Filter, Problem, Progress, path};
use crate::env::SystemEnvironment;
use crate::error::{Error, Refusal, Result};
use crate::format::{Ino, ROOT_INO};
use crate::fs::{Attributes, FileSystem, mode};
use crate::storage::{Identity, host_call};

/// Bytes read from the archive and written to the host at once.
const PIECE: usize = 1 << 20;

/// How to extract.
#[derive(Clone, Debug)]
pub struct ExtractOptions {
    /// Directory of the host that takes the items; made when it is missing.
    pub to: PathBuf,
    /// What the one item is called there; None for names of their own.
    pub name: Option<Vec<u8>>,
    /// Replace files (and empty directories) that are in the way.
    pub replace: bool,
    /// What below the paths is left out; without paths, and for a path of the root, what below that.
    pub filter: Filter,
    /// Makes devices, and keeps set-ID and sticky bits of files and the attributes that give
    /// rights.
    pub privileges: bool,
}

/// What was extracted.
#[derive(Debug, Default)]
pub struct ExtractReport {
    pub copied: Copied,
    /// Extended attributes that could not be set, and what would lend rights.
    pub left: LeftOut,
    /// What failed while the rest went on.
    pub problems: Vec<Problem>,
}

/// Copies each path with what is below it under its own name into `options.to`; without paths, everything. Nothing shows in the
/// target before it is complete, except that what could not be read or made is missing and reported. An error of `progress` ends it.
///
/// # Errors
/// `Exists` naming what is in the way, `NotFound` for a path, `NoSpace` and failures of the host: nothing was put into place then.
pub fn extract(
    fs: &FileSystem,
    paths: &[Vec<u8>],
    options: &ExtractOptions,
    progress: &mut dyn FnMut(&Progress<'_>) -> Result<()>,
) -> Result<ExtractReport> {
    let (mut tops, unreadable) = tops(fs, paths)?;
    if let ([top], Some(name)) = (&mut tops[..], &options.name) {
        top.entry.name.clone_from(name);
    }
    let stage = Stage::new(&options.to, &SystemEnvironment)?;
    if !options.replace {
        for top in &tops {
            if stage.occupied(&top.entry.name)? {
                return Err(in_the_way(&top.entry.name, &options.to));
            }
        }
    }
    let mut extract = Extract {
        fs,
        stage: &stage,
        filter: &options.filter,
        of_root: false,
        progress,
        report: ExtractReport { left: LeftOut::extracting(options.privileges), ..ExtractReport::default() },
        tally: Tally::default(),
        links: HashMap::new(),
        closed: Vec::new(),
        path: Vec::new(),
        piece: Vec::new(),
    };
    for error in unreadable {
        extract.note(Err(error))?;
    }
    for top in &tops {
        extract.top(top)?;
    }
    for Top { entry: top, .. } in &tops {
        extract.path = top.name.clone();
        // What failed as a whole is not there, and was reported.
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

/// An item that gets a name of its own in the target.
struct Top {
    entry: Entry,
    /// It comes with the root: the filter's paths begin with its name, else below it.
    of_root: bool,
}

/// The items, and why others of the root cannot be any.
fn tops(fs: &FileSystem, paths: &[Vec<u8>]) -> Result<(Vec<Top>, Vec<Error>)> {
    let mut tops: Vec<Top> = Vec::new();
    let mut unreadable = Vec::new();
    let everything = [Vec::new()];
    for path in if paths.is_empty() { &everything } else { paths } {
        let attributes = path::resolve_given(fs, path)?;
        match path::components(path)?.last() {
            Some(name) => tops.push(Top { entry: Entry { name: name.to_vec(), attributes }, of_root: false }),
            None => {
                for entry in Entries::new(fs, ROOT_INO)? {
                    match entry {
                        Ok(entry) => tops.push(Top { entry, of_root: true }),
                        Err(error @ Error::Damaged(_)) => unreadable.push(error),
                        Err(error) => return Err(error),
                    }
                }
            }
        }
    }
    tops.sort_by(|a, b| a.entry.name.cmp(&b.entry.name));
    let twice = tops.windows(2).find(|pair| pair[0].entry.name == pair[1].entry.name);
    if let Some(pair) = twice.filter(|_| paths.len() > 1) {
        return Err(Error::invalid(format!("two items would get the name {}", display(&pair[0].entry.name))));
    }
    // The root cannot have a name twice, unless somebody with the key wrote it so; the others are extracted all the same.
    tops.dedup_by(|later, earlier| {
        let is_twice = later.entry.name == earlier.entry.name;
        if is_twice {
            unreadable.push(Error::damaged(format!("the root has the name {} twice", display(&later.entry.name))));
        }
        is_twice
    });
    Ok((tops, unreadable))
}

fn in_the_way(name: &[u8], target: &std::path::Path) -> Error {
    let what = format!("{} exists already in {}", display(name), display_path(target));
    Error::Refused(Refusal::InTheWay { what })
}

fn display_path(path: &std::path::Path) -> String {
    display(std::os::unix::ffi::OsStrExt::as_bytes(path.as_os_str()))
}

struct Extract<'a> {
    fs: &'a FileSystem,
    stage: &'a Stage,
    filter: &'a Filter,
    /// What is being extracted comes with the root, as [`Top`] says.
    of_root: bool,
    progress: &'a mut dyn FnMut(&Progress<'_>) -> Result<()>,
    report: ExtractReport,
    tally: Tally,
    /// A file with several names: the path of its first copy below the stage, which one it is, and the names still to come.
    links: HashMap<Ino, (Vec<u8>, Identity, u32)>,
    /// Directories whose mode would keep their owner out: they get it when everything is in place.
    closed: Vec<(Vec<u8>, Identity, Attributes)>,
    /// The path below the stage being made.
    path: Vec<u8>,
    /// What was read of a file, on its way to the host.
    piece: Vec<u8>,
}

/// A directory that was made.
struct Made {
    host: OwnedFd,
    attributes: Attributes,
}

impl<'a> Extract<'a> {
    fn top(&mut self, top: &Top) -> Result<()> {
        self.path.clone_from(&top.entry.name);
        self.of_root = top.of_root;
        let first = self.entry(self.stage.directory(), &top.entry);
        let mut tree = Tree::new();
        self.descend(&mut tree, first)?;
        while let Some(step) = tree.next(&mut self.path) {
            let below = step.and_then(|step| match step {
                Step::Entry(entry, directory) => self.entry(&directory.kept.host, &entry),
                Step::Leave(directory) => self.finish_directory(directory.kept).map(|()| None),
            });
            self.descend(&mut tree, below)?;
        }
        Ok(())
    }

    /// Goes on in a directory that was made.
    fn descend(&mut self, tree: &mut Tree<'a, Made>, made: Result<Option<Made>>) -> Result<()> {
        let Some(made) = self.tolerate(made)? else { return Ok(()) };
        let entered = tree.descend(self.fs, &self.path, made.attributes.ino, made);
        self.note(entered)
    }

    /// Makes one object; a directory is made and returned, its entries follow.
    fn entry(&mut self, at: &OwnedFd, entry: &Entry) -> Result<Option<Made>> {
        let Entry { name, attributes } = entry;
        self.tally.next();
        self.tell(0)?;
        if matches!(&name[..], b"" | b"." | b"..") || name.iter().any(|b| matches!(b, b'/' | 0)) {
            return Err(Error::damaged("a name that leads out of its directory"));
        }
        if self.is_left_out(attributes) || self.report.left.withholds_object(&self.path, attributes.mode) {
            return Ok(None);
        }
        self.tally.meet_stored(attributes);
        if attributes.is_directory() {
            let host = make_directory(at, name)?;
            self.report.copied.directories += 1;
            return Ok(Some(Made { host, attributes: *attributes }));
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
            mode::REGULAR => self.file(at, name, attributes)?,
            _ => self.node(at, name, attributes)?,
        };
        if attributes.links > 1 {
            self.links.insert(attributes.ino, (self.path.clone(), made, attributes.links - 1));
        }
        Ok(None)
    }

    /// `within`: bytes of the file that is being copied.
    fn tell(&mut self, within: u64) -> Result<()> {
        let copied = self.report.copied.progress(&self.path, within);
        (self.progress)(&Progress { passed: self.tally.passed(within), ..copied })
    }

    fn is_left_out(&self, attributes: &Attributes) -> bool {
        let below_top = || self.path.splitn(2, |&b| b == b'/').nth(1);
        let relative = if self.of_root { Some(&self.path[..]) } else { below_top() };
        relative.is_some_and(|path| self.filter.leaves_out(path, attributes.is_directory()))
    }

    /// Times last: every entry made in a directory changes them.
    fn finish_directory(&mut self, made: Made) -> Result<()> {
        let Made { host, attributes } = made;
        self.xattrs(&Object::open(&host), &attributes, Phase::BeforeMode)?;
        // Root gets in all the same, and the stage keeps everybody else from exchanging directories now.
        if attributes.mode & 0o700 != 0o700 && !is_root() {
            self.closed.push((self.path.clone(), identity_of(&host)?, attributes));
            return Ok(());
        }
        apply(&host, &attributes)?;
        self.xattrs(&Object::open(&host), &attributes, Phase::AfterMode)
    }

    /// Directories of the list come after those within them.
    fn close_directories(&mut self) -> Result<()> {
        for (path, made, attributes) in std::mem::take(&mut self.closed) {
            let opened = open_again(self.stage.target(), &path, made);
            self.path = path;
            let closed = opened.and_then(|directory| {
                apply(&directory, &attributes)?;
                self.xattrs(&Object::open(&directory), &attributes, Phase::AfterMode)
            });
            self.note(closed)?;
        }
        Ok(())
    }

    fn file(&mut self, at: &OwnedFd, name: &[u8], attributes: &Attributes) -> Result<Identity> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let host = rustix::fs::openat(at, name, flags, Mode::RUSR | Mode::WUSR).map_err(host_error("cannot make"))?;
        if let Err(error) = self.content(&host, attributes) {
            // Half a file must not pass for the file.
            if let Err(errno) = rustix::fs::unlinkat(at, name, AtFlags::empty()) {
                return Err(host_error("cannot remove an unfinished copy")(errno));
            }
            return Err(error);
        }
        self.report.copied.files += 1;
        let object = Object::open(&host);
        // The object is there, whatever is not about it: that is told, and it stays.
        let before = self.xattrs(&object, attributes, Phase::BeforeMode);
        self.note(before)?;
        let granted = self.report.left.granted(&self.path, attributes);
        self.note(apply(&host, &granted))?;
        let after = self.xattrs(&object, attributes, Phase::AfterMode);
        self.note(after)?;
        identity_of(&host)
    }

    /// Holes stay holes: only what the archive has data for is written.
    fn content(&mut self, host: &OwnedFd, attributes: &Attributes) -> Result<()> {
        let (ino, size) = (attributes.ino, attributes.size);
        // Mostly there are no holes to look for. That there are none is the archive's word, which may cost a piece of zeros and no disk.
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
        // With the holes, as everywhere where sizes are added up.
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
            self.tell(offset)?;
        }
        Ok(())
    }

    /// Symbolic links, FIFOs, sockets and devices, which are not opened; `user.` attributes such objects do not have.
    fn node(&mut self, at: &OwnedFd, name: &[u8], attributes: &Attributes) -> Result<Identity> {
        let held = make_special(at, name, attributes, || self.fs.read_link(attributes.ino))?;
        match attributes.mode & mode::TYPE {
            mode::SYMLINK => self.report.copied.symlinks += 1,
            _ => self.report.copied.others += 1,
        }
        let granted = self.report.left.granted(&self.path, attributes);
        self.note(apply_at(&held, at, name, &granted))?;
        let after = self.xattrs(&Object::Held(held.as_fd()), attributes, Phase::AfterMode);
        self.note(after)?;
        identity_of(&held)
    }

    fn xattrs(&mut self, object: &Object<'_>, attributes: &Attributes, phase: Phase) -> Result<()> {
        attributes::extract(self.fs, attributes.ino, object, phase, &self.path, &mut self.report.left)
    }

    fn note(&mut self, result: Result<()>) -> Result<()> {
        self.tolerate(result.map(Some)).map(drop)
    }

    /// Notes a failure that concerns one object, passes on one that ends the extraction.
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
