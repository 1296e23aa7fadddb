//! Compares two trees by content, each in an archive or on the host.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::vec;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::attributes::{self, XattrObject};
use super::attributes::{device_number, host_error, timestamps};
use super::path_ops::resolve_argument;
use super::snapshot_diff::{ContentReader, SnapshotObject, bytes_differ, kind, xattrs_of};
use super::walk::{TreeWalk, WalkStep};
use super::{Entries, Problem};
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, mode};
use crate::storage;

/// Root of a compared tree. On the host a symbolic link is followed there.
#[derive(Clone, Copy)]
pub enum DiffRoot<'a> {
    Archive(&'a FileSystem, &'a [u8]),
    Host(&'a Path),
}

/// Difference at one path, with the types of the objects as in [`Attributes::mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TreeDifference {
    /// Exists only in the first tree, with all its descendants.
    First,
    Second,
    Types(u32, u32),
    /// Bytes of two files, targets of two links, or numbers of two devices.
    Content(u32),
    Metadata(MetadataDifference),
}

/// Metadata in which two objects differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataDifference {
    pub mode: bool,
    pub owner: bool,
    pub modified: bool,
    pub attributes: bool,
}

/// Calls `found` with the path below the roots of each differing object, sorted by name, a
/// directory before its entries. With `metadata`, permissions, owners, attributes, and modification
/// times are compared too, except the times of directories, which show only that an entry was added
/// or removed. Ends when `found` breaks. Returns the objects that could not be compared.
///
/// # Errors
/// A root that does not exist or cannot be read.
pub fn compare_trees(
    first: DiffRoot<'_>,
    second: DiffRoot<'_>,
    metadata: bool,
    found: &mut dyn FnMut(&[u8], TreeDifference) -> ControlFlow<()>,
) -> Result<Vec<Problem>> {
    let mut problems = Vec::new();
    let mut comparison = Comparison { metadata, found, ended: false, path: Vec::new() };
    let tops = ((first.place(), first.object()?), (second.place(), second.object()?));
    let names = (first.name(), second.name());
    let mut walk = TreeWalk::new();
    if let Some((below, places)) = comparison.pair((&tops.0.0, names.0, &tops.0.1), (&tops.1.0, names.1, &tops.1.1))? {
        walk.enter(b"", below, places);
    }
    while !comparison.ended
        && let Some(step) = walk.step(
            &mut comparison.path,
            |below: &mut vec::IntoIter<EntryPair>| below.next().map(Ok),
            |entry| &entry.0,
        )
    {
        let WalkStep::Entry((name, first, second), directory) = step? else { continue };
        let below = match (first, second) {
            (Some(first), Some(second)) => {
                let (one, other) = &directory.state;
                comparison.pair((one, &name, &first), (other, &name, &second))
            }
            (Some(_), None) => comparison.tell(TreeDifference::First),
            (None, _) => comparison.tell(TreeDifference::Second),
        };
        if let Some((below, places)) = Problem::tolerate(&mut problems, &comparison.path, below)? {
            walk.enter(&comparison.path, below, places);
        }
    }
    Ok(problems)
}

impl<'a> DiffRoot<'a> {
    fn place(&self) -> TreeLocation<'a> {
        match self {
            DiffRoot::Archive(fs, _) => TreeLocation::Archive(fs),
            DiffRoot::Host(_) => TreeLocation::Here,
        }
    }

    fn object(&self) -> Result<Attributes> {
        match self {
            DiffRoot::Archive(fs, path) => resolve_argument(fs, path),
            DiffRoot::Host(path) => stat_object(CWD, path.as_os_str().as_bytes(), true)
                .map_err(|errno| Error::io(format!("cannot read {}", path.display()), errno.into())),
        }
    }

    fn name(&self) -> &'a [u8] {
        match self {
            DiffRoot::Archive(_, path) => path,
            DiffRoot::Host(path) => path.as_os_str().as_bytes(),
        }
    }
}

/// Location of an object: identified by its inode in an archive, by its name in a host directory.
enum TreeLocation<'a> {
    Archive(&'a FileSystem),
    /// Working directory, for the path of a root.
    Here,
    Directory(OwnedFd),
}

impl TreeLocation<'_> {
    fn host(&self) -> BorrowedFd<'_> {
        match self {
            TreeLocation::Directory(directory) => directory.as_fd(),
            TreeLocation::Here | TreeLocation::Archive(_) => CWD,
        }
    }

    fn follows(&self) -> bool {
        matches!(self, TreeLocation::Here)
    }

    fn open(&self, name: &[u8], kind: OFlags) -> Result<OwnedFd> {
        let follow = if self.follows() { OFlags::empty() } else { OFlags::NOFOLLOW };
        // Opening a FIFO that replaced the file must not block.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | follow | kind;
        rustix::fs::openat(self.host(), name, flags, Mode::empty()).map_err(host_error("cannot open"))
    }
}

/// Returns the attributes of a host object, without inode number: its name identifies it.
fn stat_object(directory: BorrowedFd<'_>, name: &[u8], follow: bool) -> rustix::io::Result<Attributes> {
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

/// Name, and the object of that name in each of the two trees.
type EntryPair = (Vec<u8>, Option<Attributes>, Option<Attributes>);
/// Entries of two directories, and the directories.
type DirectoryPair<'a> = (vec::IntoIter<EntryPair>, (TreeLocation<'a>, TreeLocation<'a>));
type LocatedObject<'t, 'a> = (&'t TreeLocation<'a>, &'t [u8], &'t Attributes);

struct Comparison<'f> {
    metadata: bool,
    found: &'f mut dyn FnMut(&[u8], TreeDifference) -> ControlFlow<()>,
    /// The callback has ended the comparison.
    ended: bool,
    /// Path below the roots.
    path: Vec<u8>,
}

impl Comparison<'_> {
    fn tell<'a>(&mut self, unlike: TreeDifference) -> Result<Option<DirectoryPair<'a>>> {
        self.ended |= (self.found)(&self.path, unlike).is_break();
        Ok(None)
    }

    /// Compares two objects; returns the entries if both are directories.
    fn pair<'a>(
        &mut self,
        one: LocatedObject<'_, 'a>,
        other: LocatedObject<'_, 'a>,
    ) -> Result<Option<DirectoryPair<'a>>> {
        let (first, second) = (one.2, other.2);
        if kind(first) != kind(second) {
            return self.tell(TreeDifference::Types(first.mode, second.mode));
        }
        if self.metadata {
            let unlike = MetadataDifference {
                // A symbolic link has no mode.
                mode: kind(first) != mode::SYMLINK && (first.mode ^ second.mode) & mode::PERMISSIONS != 0,
                owner: (first.uid, first.gid) != (second.uid, second.gid),
                modified: !first.is_directory() && first.mtime != second.mtime,
                attributes: attributes_differ(one, other)?,
            };
            if unlike != MetadataDifference::default() {
                self.ended |= (self.found)(&self.path, TreeDifference::Metadata(unlike)).is_break();
            }
        }
        let differs = match kind(first) {
            mode::DIRECTORY => return both(one, other).map(Some),
            mode::REGULAR => content_differs(one, other)?,
            mode::SYMLINK => target(one)? != target(other)?,
            mode::BLOCK | mode::CHARACTER => first.rdev != second.rdev,
            _ => false,
        };
        if differs { self.tell(TreeDifference::Content(first.mode)) } else { Ok(None) }
    }
}

/// Merges the entries of two directories by name.
fn both<'a>(one: LocatedObject<'_, 'a>, other: LocatedObject<'_, 'a>) -> Result<DirectoryPair<'a>> {
    let mut entries: BTreeMap<Vec<u8>, (Option<Attributes>, Option<Attributes>)> = BTreeMap::new();
    let first = list(one, |name, object| entries.entry(name).or_default().0 = Some(object))?;
    let second = list(other, |name, object| entries.entry(name).or_default().1 = Some(object))?;
    let entries: Vec<EntryPair> = entries.into_iter().map(|(name, (one, other))| (name, one, other)).collect();
    Ok((entries.into_iter(), (first, second)))
}

fn list<'a>(
    (place, name, object): LocatedObject<'_, 'a>,
    mut each: impl FnMut(Vec<u8>, Attributes),
) -> Result<TreeLocation<'a>> {
    if let TreeLocation::Archive(fs) = place {
        let mut entries = Entries::new(fs, object.ino)?;
        while let Some(entry) = entries.next_entry() {
            let entry = entry?;
            each(entry.name.to_vec(), *entry.attributes);
        }
        return Ok(TreeLocation::Archive(fs));
    }
    let directory = place.open(name, OFlags::DIRECTORY)?;
    for name in storage::names(&directory).map_err(host_error("cannot read the directory"))? {
        match stat_object(directory.as_fd(), &name, false) {
            Ok(object) => each(name, object),
            // Deleted meanwhile.
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(host_error("cannot read")(errno)),
        }
    }
    Ok(TreeLocation::Directory(directory))
}

fn content_differs(one: LocatedObject<'_, '_>, other: LocatedObject<'_, '_>) -> Result<bool> {
    // Files of /proc and documents of unknown length report size 0 and have content.
    let is_unstated =
        |(place, _, object): LocatedObject<'_, '_>| object.size == 0 && !matches!(place, TreeLocation::Archive(_));
    let size = one.2.size.max(other.2.size);
    if !is_unstated(one) && !is_unstated(other) {
        return Ok(one.2.size != other.2.size || bytes_differ(&mut *bytes(one)?, &mut *bytes(other)?, size)?);
    }
    // Includes the additional byte of a longer file.
    bytes_differ(&mut *bytes(one)?, &mut *bytes(other)?, size.saturating_add(1))
}

fn bytes<'t>((place, name, attributes): LocatedObject<'t, '_>) -> Result<Box<dyn ContentReader + 't>> {
    Ok(match place {
        TreeLocation::Archive(fs) => Box::new(SnapshotObject { fs, attributes }),
        host => Box::new(HostFile(host.open(name, OFlags::empty())?)),
    })
}

fn target((place, name, object): LocatedObject<'_, '_>) -> Result<Vec<u8>> {
    match place {
        TreeLocation::Archive(fs) => fs.read_link(object.ino),
        host => rustix::fs::readlinkat(host.host(), name, Vec::new())
            .map(CString::into_bytes)
            .map_err(host_error("cannot read the link")),
    }
}

fn attributes_differ(one: LocatedObject<'_, '_>, other: LocatedObject<'_, '_>) -> Result<bool> {
    let same = |fs: &FileSystem, ino: Ino, (place, name, _): LocatedObject<'_, '_>| {
        attributes::is_equal(&XattrObject::Named { directory: place.host(), name, follow: place.follows() }, fs, ino)
    };
    match (one.0, other.0) {
        (TreeLocation::Archive(first), TreeLocation::Archive(second)) => {
            Ok(xattrs_of(first, one.2.ino)? != xattrs_of(second, other.2.ino)?)
        }
        (TreeLocation::Archive(fs), _) => same(fs, one.2.ino, other).map(|same| !same),
        (_, TreeLocation::Archive(fs)) => same(fs, other.2.ino, one).map(|same| !same),
        _ => Err(Error::invalid("neither of the two is in an archive")),
    }
}

struct HostFile(OwnedFd);

impl ContentReader for HostFile {
    fn next_data(&mut self, at: u64) -> Result<Option<u64>> {
        match rustix::fs::seek(&self.0, SeekFrom::Data(at)) {
            Ok(data) => Ok(Some(data)),
            Err(Errno::NXIO) => Ok(None),
            // The host file system does not support SEEK_DATA.
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
