//! Compares two objects of two versions: relevant metadata and content.

use crate::error::{Error, Result};
use crate::fs::{Attributes, FileSystem, mode};

/// Bytes of each side that are compared at once.
const PIECE: u64 = 1 << 20;
/// Files up to this size are read without a search for holes, which is faster.
const SMALL: u64 = 64 << 10;

/// Object in its version.
#[derive(Clone, Copy)]
pub(in crate::exchange) struct SnapshotObject<'a> {
    pub(in crate::exchange) fs: &'a FileSystem,
    pub(in crate::exchange) attributes: &'a Attributes,
}

/// Parts of two objects that may differ and must be read.
#[derive(Clone, Copy)]
pub(super) struct SuspectedChanges {
    pub(super) content: bool,
    pub(super) xattrs: bool,
}

impl SuspectedChanges {
    pub(super) const ALL: SuspectedChanges = SuspectedChanges { content: true, xattrs: true };
}

pub(in crate::exchange) fn kind(attributes: &Attributes) -> u32 {
    attributes.mode & mode::TYPE
}

/// Returns whether two objects of one type differ. Owner, mode, device number, extended attributes,
/// content and the modification time are compared. Ignored are the access time, the times that
/// cannot be set (change and birth), the number of links, and the modification time of a directory,
/// which shows only that an entry was added or removed. Content is compared by bytes, so relocated
/// or rewritten equal content does not differ.
pub(super) fn differ(old: SnapshotObject<'_>, new: SnapshotObject<'_>, suspects: SuspectedChanges) -> Result<bool> {
    let (one, other) = (old.attributes, new.attributes);
    if (one.mode, one.uid, one.gid, one.rdev) != (other.mode, other.uid, other.gid, other.rdev) {
        return Ok(true);
    }
    if !one.is_directory() && (one.size, one.mtime) != (other.size, other.mtime) {
        return Ok(true);
    }
    if suspects.xattrs && xattrs(old)? != xattrs(new)? {
        return Ok(true);
    }
    match kind(one) {
        mode::REGULAR if suspects.content => bytes_differ(&mut { old }, &mut { new }, one.size),
        mode::SYMLINK if suspects.content => Ok(old.fs.read_link(one.ino)? != new.fs.read_link(other.ino)?),
        _ => Ok(false),
    }
}

/// Returns names and values, sorted by name.
pub(in crate::exchange) fn xattrs(seen: SnapshotObject<'_>) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let ino = seen.attributes.ino;
    let names = seen.fs.list_xattrs(ino)?;
    let mut names: Vec<&[u8]> = names.split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    names.into_iter().map(|name| Ok((name.to_vec(), seen.fs.xattr(ino, name)?))).collect()
}

/// Reader of a regular file's content, in an archive or on the host.
pub(in crate::exchange) trait ContentReader {
    /// Returns the offset of the first data at or after `at`; `None` if the rest is a hole.
    fn next_data(&mut self, at: u64) -> Result<Option<u64>>;

    /// Returns the number of bytes read, which is less than `length` only at the end.
    fn read_into(&mut self, at: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize>;
}

impl ContentReader for SnapshotObject<'_> {
    fn next_data(&mut self, at: u64) -> Result<Option<u64>> {
        match self.fs.next_data(self.attributes.ino, at) {
            Err(Error::NoSuchRange) => Ok(None),
            found => found.map(Some),
        }
    }

    fn read_into(&mut self, at: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        self.fs.read_into(self.attributes.ino, at, length, buffer)
    }
}

/// Returns whether two files of the same size differ in content. Common holes are skipped.
pub(in crate::exchange) fn bytes_differ(
    one: &mut dyn ContentReader,
    other: &mut dyn ContentReader,
    size: u64,
) -> Result<bool> {
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < size {
        let mut data = || Ok::<_, Error>(one.next_data(at)?.into_iter().chain(other.next_data(at)?).min());
        let Some(start) = (if size <= SMALL { Some(at) } else { data()? }) else { return Ok(false) };
        let length = PIECE.min(size.saturating_sub(start)) as usize;
        let read = one.read_into(start, length, &mut first)?;
        let other_read = other.read_into(start, length, &mut second)?;
        if first[..read] != second[..other_read] {
            return Ok(true);
        }
        at = start + length as u64;
    }
    Ok(false)
}
