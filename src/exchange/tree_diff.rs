//! Compares two trees by content, each of an archive or of the host: what only one has, and what differs.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::vec;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::attributes::{self, Object};
use super::host::{device_number, host_error, timestamps};
use super::path::resolve_given;
use super::snapshot::{Bytes, Seen, bytes_differ, kind, xattrs};
use super::walk::{Step, Walk};
use super::{Entries, Problem};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, mode};
use crate::storage;

/// The top of a tree. On the host a symbolic link there is followed.
#[derive(Clone, Copy)]
pub enum Top<'a> {
    Archive(&'a FileSystem, &'a [u8]),
    Host(&'a Path),
}

/// What is told of one place, with the types of the objects as in [`Attributes::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unlike {
    /// Only the first tree has it, with everything below.
    First,
    Second,
    Types(u32, u32),
    /// The bytes of two files, the targets of two links, or the numbers of two devices.
    Content(u32),
    Metadata(UnlikeMetadata),
}

/// What differs of two objects beside their content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnlikeMetadata {
    pub mode: bool,
    pub owner: bool,
    pub modified: bool,
    pub attributes: bool,
}

/// Calls `found` with the path below the tops of each object that is not alike, in the order of names, a directory before what is in it; with `metadata` also for
/// permissions, owners, attributes, and times of modification but those of directories, which tell only that an entry came or went. It ends when `found` breaks.
/// What could not be compared is the answer.
///
/// # Errors
/// A top that is not there or cannot be read.
pub fn compare_trees(
    first: Top<'_>,
    second: Top<'_>,
    metadata: bool,
    found: &mut dyn FnMut(&[u8], Unlike) -> ControlFlow<()>,
) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    let mut comparison = Comparison { metadata, found, ended: false, path: Vec::new() };
    let tops = ((first.place(), first.object()?), (second.place(), second.object()?));
    let names = (first.name(), second.name());
    let mut walk = Walk::new();
    if let Some((below, places)) = comparison.pair((&tops.0.0, names.0, &tops.0.1), (&tops.1.0, names.1, &tops.1.1))? {
        walk.enter(b"", below, places);
    }
    while !comparison.ended
        && let Some(step) =
            walk.step(&mut comparison.path, |below: &mut vec::IntoIter<Entry>| below.next().map(Ok), |entry| &entry.0)
    {
        let Step::Entry((name, first, second), directory) = step? else { continue };
        let below = match (first, second) {
            (Some(first), Some(second)) => {
                let (one, other) = &directory.kept;
                comparison.pair((one, &name, &first), (other, &name, &second))
            }
            (Some(_), None) => comparison.tell(Unlike::First),
            (None, _) => comparison.tell(Unlike::Second),
        };
        if let Some((below, places)) = Problem::tolerate(&mut problems, &comparison.path, below)? {
            walk.enter(&comparison.path, below, places);
        }
    }
    Ok(problems)
}

impl<'a> Top<'a> {
    fn place(&self) -> Place<'a> {
        match self {
            Top::Archive(fs, _) => Place::Archive(fs),
            Top::Host(_) => Place::Here,
        }
    }

    fn object(&self) -> Result<Attributes> {
        match self {
            Top::Archive(fs, path) => resolve_given(fs, path),
            Top::Host(path) => looked_at(CWD, path.as_os_str().as_bytes(), true)
                .map_err(|errno| Error::io(format!("cannot read {}", path.display()), errno.into())),
        }
    }

    fn name(&self) -> &'a [u8] {
        match self {
            Top::Archive(_, path) => path,
            Top::Host(path) => path.as_os_str().as_bytes(),
        }
    }
}

/// Where an object is: its inode finds it in an archive, its name in a directory of the host.
enum Place<'a> {
    Archive(&'a FileSystem),
    /// The working directory, for the path of a top.
    Here,
    Directory(OwnedFd),
}

impl Place<'_> {
    /// The directory of the host.
    fn host(&self) -> BorrowedFd<'_> {
        match self {
            Place::Directory(directory) => directory.as_fd(),
            Place::Here | Place::Archive(_) => CWD,
        }
    }

    fn follows(&self) -> bool {
        matches!(self, Place::Here)
    }

    fn open(&self, name: &[u8], kind: OFlags) -> Result<OwnedFd> {
        let follow = if self.follows() { OFlags::empty() } else { OFlags::NOFOLLOW };
        // A FIFO that took the file's place must not block the open.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | follow | kind;
        rustix::fs::openat(self.host(), name, flags, Mode::empty()).map_err(host_error("cannot open"))
    }
}

/// An object of the host; which one it is says its name.
fn looked_at(directory: BorrowedFd<'_>, name: &[u8], follow: bool) -> rustix::io::Result<Attributes> {
    let flags = if follow { AtFlags::empty() } else { AtFlags::SYMLINK_NOFOLLOW };
    let stat = rustix::fs::statat(directory, name, flags)?;
    let (atime, mtime) = timestamps(&stat);
    Ok(Attributes {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: device_number(rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        atime,
        mtime,
        ..Attributes::default()
    })
}

/// A name and what each of the two trees has of it.
type Entry = (Vec<u8>, Option<Attributes>, Option<Attributes>);
/// What is in two directories, and both of them.
type Below<'a> = (vec::IntoIter<Entry>, (Place<'a>, Place<'a>));
/// An object with its place and its name there.
type There<'t, 'a> = (&'t Place<'a>, &'t [u8], &'t Attributes);

struct Comparison<'f> {
    metadata: bool,
    found: &'f mut dyn FnMut(&[u8], Unlike) -> ControlFlow<()>,
    /// Nobody wants to hear more.
    ended: bool,
    /// Below the tops.
    path: Vec<u8>,
}

impl Comparison<'_> {
    fn tell<'a>(&mut self, unlike: Unlike) -> Result<Option<Below<'a>>> {
        self.ended |= (self.found)(&self.path, unlike).is_break();
        Ok(None)
    }

    /// Compares two objects; of two directories what is in them follows.
    fn pair<'a>(&mut self, one: There<'_, 'a>, other: There<'_, 'a>) -> Result<Option<Below<'a>>> {
        let (first, second) = (one.2, other.2);
        if kind(first) != kind(second) {
            return self.tell(Unlike::Types(first.mode, second.mode));
        }
        if self.metadata {
            let unlike = UnlikeMetadata {
                // A link has no mode of its own.
                mode: kind(first) != mode::SYMLINK && (first.mode ^ second.mode) & mode::PERMISSIONS != 0,
                owner: (first.uid, first.gid) != (second.uid, second.gid),
                modified: !first.is_directory() && first.mtime != second.mtime,
                attributes: attributes_differ(one, other)?,
            };
            if unlike != UnlikeMetadata::default() {
                self.ended |= (self.found)(&self.path, Unlike::Metadata(unlike)).is_break();
            }
        }
        let differs = match kind(first) {
            mode::DIRECTORY => return both(one, other).map(Some),
            mode::REGULAR => content_differs(one, other)?,
            mode::SYMLINK => target(one)? != target(other)?,
            mode::BLOCK | mode::CHARACTER => first.rdev != second.rdev,
            _ => false,
        };
        if differs { self.tell(Unlike::Content(first.mode)) } else { Ok(None) }
    }
}

/// What is in two directories, by name.
fn both<'a>(one: There<'_, 'a>, other: There<'_, 'a>) -> Result<Below<'a>> {
    let mut entries: BTreeMap<Vec<u8>, (Option<Attributes>, Option<Attributes>)> = BTreeMap::new();
    let first = list(one, |name, object| entries.entry(name).or_default().0 = Some(object))?;
    let second = list(other, |name, object| entries.entry(name).or_default().1 = Some(object))?;
    let entries: Vec<Entry> = entries.into_iter().map(|(name, (one, other))| (name, one, other)).collect();
    Ok((entries.into_iter(), (first, second)))
}

fn list<'a>((place, name, object): There<'_, 'a>, mut each: impl FnMut(Vec<u8>, Attributes)) -> Result<Place<'a>> {
    if let Place::Archive(fs) = place {
        for entry in Entries::new(fs, object.ino)? {
            let entry = entry?;
            each(entry.name, entry.attributes);
        }
        return Ok(Place::Archive(fs));
    }
    let directory = place.open(name, OFlags::DIRECTORY)?;
    for name in storage::names(&directory).map_err(host_error("cannot read the directory"))? {
        match looked_at(directory.as_fd(), &name, false) {
            Ok(object) => each(name, object),
            // It went meanwhile.
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(host_error("cannot read")(errno)),
        }
    }
    Ok(Place::Directory(directory))
}

fn content_differs(one: There<'_, '_>, other: There<'_, '_>) -> Result<bool> {
    // Files of /proc and documents of unknown length state 0 and have content.
    let is_unstated = |(place, _, object): There<'_, '_>| object.size == 0 && !matches!(place, Place::Archive(_));
    let size = one.2.size.max(other.2.size);
    if !is_unstated(one) && !is_unstated(other) {
        return Ok(one.2.size != other.2.size || bytes_differ(&mut *bytes(one)?, &mut *bytes(other)?, size)?);
    }
    // With the byte that the longer one of them has.
    bytes_differ(&mut *bytes(one)?, &mut *bytes(other)?, size.saturating_add(1))
}

fn bytes<'t>((place, name, attributes): There<'t, '_>) -> Result<Box<dyn Bytes + 't>> {
    Ok(match place {
        Place::Archive(fs) => Box::new(Seen { fs, attributes }),
        host => Box::new(HostFile(host.open(name, OFlags::empty())?)),
    })
}

fn target((place, name, object): There<'_, '_>) -> Result<Vec<u8>> {
    match place {
        Place::Archive(fs) => fs.read_link(object.ino),
        host => rustix::fs::readlinkat(host.host(), name, Vec::new())
            .map(CString::into_bytes)
            .map_err(host_error("cannot read the link")),
    }
}

fn attributes_differ(one: There<'_, '_>, other: There<'_, '_>) -> Result<bool> {
    let same = |fs: &FileSystem, ino: Ino, (place, name, _): There<'_, '_>| {
        attributes::same(&Object::Named { directory: place.host(), name, follow: place.follows() }, fs, ino)
    };
    match (one.0, other.0) {
        (Place::Archive(first), Place::Archive(second)) => {
            let (first, second) = (Seen { fs: first, attributes: one.2 }, Seen { fs: second, attributes: other.2 });
            Ok(xattrs(first)? != xattrs(second)?)
        }
        (Place::Archive(fs), _) => same(fs, one.2.ino, other).map(|same| !same),
        (_, Place::Archive(fs)) => same(fs, other.2.ino, one).map(|same| !same),
        _ => Err(Error::invalid("neither of the two is in an archive")),
    }
}

/// A regular file of the host.
struct HostFile(OwnedFd);

impl Bytes for HostFile {
    fn next_data(&mut self, at: u64) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.0, SeekFrom::Data(at)) {
            Ok(data) => Ok(Some(data)),
            Err(Errno::NXIO) => Ok(None),
            // A host file system without the notion.
            Err(Errno::INVAL) => Ok(Some(at)),
            Err(errno) => Err(host_error("cannot read")(errno)),
        }
    }

    fn read_into(&mut self, at: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        buffer.resize(length, 0);
        let mut end = 0;
        while end < length {
            match rustix::io::pread(&self.0, &mut buffer[end..], at + end as u64) {
                Ok(0) => break,
                Ok(read) => end += read,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(host_error("cannot read")(errno)),
            }
        }
        Ok(end)
    }
}
