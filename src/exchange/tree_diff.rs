//! Compares two trees by content, each in an archive or on the host.

use std::collections::{BTreeMap, btree_map};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{CWD, OFlags, SeekFrom};
use rustix::io::Errno;

use super::attributes::{self, HostName, XattrObject, host_error, rdev_of, timestamps};
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
    let ((first, one_name, one), (second, other_name, other)) = (first.locate()?, second.locate()?);
    let mut walk = TreeWalk::new();
    if let Some((below, places)) = comparison.pair((&first, one_name, &one), (&second, other_name, &other))? {
        walk.enter(b"", below, places);
    }
    while !comparison.ended
        && let Some(step) = walk.step(&mut comparison.path, |below| below.next().map(Ok), |(name, _)| name)
    {
        let WalkStep::Entry((name, (first, second)), directory) = step? else { continue };
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
    fn locate(self) -> Result<(TreeLocation<'a>, &'a [u8], Attributes)> {
        match self {
            DiffRoot::Archive(fs, path) => Ok((TreeLocation::Archive(fs), path, resolve_argument(fs, path)?)),
            DiffRoot::Host(path) => {
                let name = path.as_os_str().as_bytes();
                let object = stat_object(TreeLocation::Here.host(name))
                    .map_err(|errno| Error::io(format!("cannot read {}", path.display()), errno.into()))?;
                Ok((TreeLocation::Here, name, object))
            }
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
    fn host<'n>(&'n self, name: &'n [u8]) -> HostName<'n> {
        match self {
            TreeLocation::Directory(directory) => HostName { directory: directory.as_fd(), name, follow: false },
            TreeLocation::Here | TreeLocation::Archive(_) => HostName { directory: CWD, name, follow: true },
        }
    }
}

/// Returns the attributes of a host object, without inode number: its name identifies it.
fn stat_object(host: HostName<'_>) -> rustix::io::Result<Attributes> {
    let stat = host.stat()?;
    let (atime, mtime) = timestamps(&stat);
    Ok(Attributes {
        mode: stat.st_mode,
        uid: stat.st_uid,
        gid: stat.st_gid,
        rdev: rdev_of(&stat),
        size: u64::try_from(stat.st_size).unwrap_or(0),
        atime,
        mtime,
        ..Attributes::default()
    })
}

/// Objects of one name in the two trees.
type EntryPair = (Option<Attributes>, Option<Attributes>);
/// Entries of two directories by name, and the directories.
type DirectoryPair<'a> = (btree_map::IntoIter<Vec<u8>, EntryPair>, (TreeLocation<'a>, TreeLocation<'a>));
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

fn both<'a>(one: LocatedObject<'_, 'a>, other: LocatedObject<'_, 'a>) -> Result<DirectoryPair<'a>> {
    let mut entries: BTreeMap<Vec<u8>, EntryPair> = BTreeMap::new();
    let first = list(one, |name, object| entries.entry(name).or_default().0 = Some(object))?;
    let second = list(other, |name, object| entries.entry(name).or_default().1 = Some(object))?;
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
    let directory = place.host(name).open(OFlags::DIRECTORY).map_err(host_error("cannot open"))?;
    let names = storage::names(&directory).map_err(host_error("cannot read the directory"))?;
    let directory = TreeLocation::Directory(directory);
    for name in names {
        match stat_object(directory.host(&name)) {
            Ok(object) => each(name, object),
            // Deleted meanwhile.
            Err(Errno::NOENT) => {}
            Err(errno) => return Err(host_error("cannot read")(errno)),
        }
    }
    Ok(directory)
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
        host => Box::new(HostFile(host.host(name).open(OFlags::empty()).map_err(host_error("cannot open"))?)),
    })
}

fn target((place, name, object): LocatedObject<'_, '_>) -> Result<Vec<u8>> {
    match place {
        TreeLocation::Archive(fs) => fs.read_link(object.ino),
        host => host.host(name).link_target(),
    }
}

fn attributes_differ(one: LocatedObject<'_, '_>, other: LocatedObject<'_, '_>) -> Result<bool> {
    let differ = |fs: &FileSystem, ino: Ino, (place, name, _): LocatedObject<'_, '_>| {
        attributes::is_equal(&XattrObject::Named(place.host(name)), fs, ino).map(|equal| !equal)
    };
    match (one.0, other.0) {
        (TreeLocation::Archive(first), TreeLocation::Archive(second)) => {
            Ok(xattrs_of(first, one.2.ino)? != xattrs_of(second, other.2.ino)?)
        }
        (TreeLocation::Archive(fs), _) => differ(fs, one.2.ino, other),
        (_, TreeLocation::Archive(fs)) => differ(fs, other.2.ino, one),
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
            match attributes::read_at(&self.0, &mut buffer[end..], at + end as u64)? {
                0 => break,
                read => end += read,
            }
        }
        Ok(end)
    }
}
