//! Whether two objects of two moments are alike: what a comparison counts, and what it does not.

use crate::error::Result;
use crate::fs::{Attributes, FileSystem, mode};

/// Bytes of each side that are compared at once.
const PIECE: u64 = 1 << 20;

/// An object in its moment.
#[derive(Clone, Copy)]
pub(super) struct Seen<'a> {
    pub(super) fs: &'a FileSystem,
    pub(super) attributes: &'a Attributes,
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

pub(super) fn kind(attributes: &Attributes) -> u32 {
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
        mode::REGULAR if suspects.content => content_differs(old, new),
        mode::SYMLINK if suspects.content => Ok(old.fs.read_link(one.ino)? != new.fs.read_link(other.ino)?),
        _ => Ok(false),
    }
}

/// Names and values, in the order of names.
fn xattrs(seen: Seen<'_>) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let ino = seen.attributes.ino;
    let names = seen.fs.list_xattrs(ino)?;
    let mut names: Vec<&[u8]> = names.split(|&byte| byte == 0).filter(|name| !name.is_empty()).collect();
    names.sort_unstable();
    names.into_iter().map(|name| Ok((name.to_vec(), seen.fs.xattr(ino, name)?))).collect()
}

/// Both have the same size. Holes of both are passed by.
fn content_differs(old: Seen<'_>, new: Seen<'_>) -> Result<bool> {
    let size = old.attributes.size;
    let (mut one, mut other) = (Vec::new(), Vec::new());
    let mut at = 0;
    while at < size {
        let Some(start) = next_data(old, at)?.into_iter().chain(next_data(new, at)?).min() else { return Ok(false) };
        let length = PIECE.min(size - start) as usize;
        let read = old.fs.read_into(old.attributes.ino, start, length, &mut one)?;
        let other_read = new.fs.read_into(new.attributes.ino, start, length, &mut other)?;
        if one[..read] != other[..other_read] {
            return Ok(true);
        }
        at = start + length as u64;
    }
    Ok(false)
}

fn next_data(seen: Seen<'_>, at: u64) -> Result<Option<u64>> {
    match seen.fs.next_data(seen.attributes.ino, at) {
        Err(crate::error::Error::NoSuchRange) => Ok(None),
        found => found.map(Some),
    }
}
