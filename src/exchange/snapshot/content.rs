//! Whether two objects of two moments are alike: what a comparison counts, and what it does not.

use crate::error::{Error, Result};
use crate::fs::{Attributes, FileSystem, mode};

/// Bytes of each side that are compared at once.
const PIECE: u64 = 1 << 20;
/// Of files no larger than this no holes are looked for: they are read in less time.
const SMALL: u64 = 64 << 10;

/// An object in its moment.
#[derive(Clone, Copy)]
pub(in crate::exchange) struct Seen<'a> {
    pub(in crate::exchange) fs: &'a FileSystem,
    pub(in crate::exchange) attributes: &'a Attributes,
}

/// What of two objects may differ and has to be read.
#[derive(Clone, Copy)]
pub(super) struct Suspects {
    pub(super) content: bool,
    pub(super) xattrs: bool,
}

impl Suspects {
    pub(super) const ALL: Suspects = Suspects { content: true, xattrs: true };
}

pub(in crate::exchange) fn kind(attributes: &Attributes) -> u32 {
    attributes.mode & mode::TYPE
}

/// Whether two objects of one type differ. Owner, mode, device number, extended attributes, content and the time of modification count. The time of access,
/// the times that nobody sets (of the last change, of birth) and the number of links do not; nor does the time of modification of a directory,
/// which says only that an entry came or went. Content that lies elsewhere, packed anew or written again as it was, is the same content.
pub(super) fn differ(old: Seen<'_>, new: Seen<'_>, suspects: Suspects) -> Result<bool> {
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

/// Names and values, in the order of names.
pub(in crate::exchange) fn xattrs(seen: Seen<'_>) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let ino = seen.attributes.ino;
    let names = seen.fs.list_xattrs(ino)?;
    let mut names: Vec<&[u8]> = names.split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    names.into_iter().map(|name| Ok((name.to_vec(), seen.fs.xattr(ino, name)?))).collect()
}

/// The content of a regular file, wherever it is.
pub(in crate::exchange) trait Bytes {
    /// Where there is data at or behind `at`; None when the rest is one hole.
    fn next_data(&mut self, at: u64) -> Result<Option<u64>>;

    /// Answers how many bytes were read, which is less than `length` at the end only.
    fn read_into(&mut self, at: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize>;
}

impl Bytes for Seen<'_> {
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

/// Whether two files of the same size have other bytes. Holes of both are passed by.
pub(in crate::exchange) fn bytes_differ(one: &mut dyn Bytes, other: &mut dyn Bytes, size: u64) -> Result<bool> {
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
