//! Which bytes of a file are there, staged and published together.

use std::ops::Range;
use std::sync::Arc;

use super::plan::join;
use super::{FileSystem, extents};
use crate::error::Result;
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::txn::{State, View};

/// Size of a file and the bytes of it that are not in holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Presence {
    pub(super) size: u64,
    pub(super) bytes: u64,
}

/// Frames with staged data up to which the bytes below them are counted exactly: the kernel may ask for attributes with each write.
const EXACT_FRAMES: usize = 32;

/// What is staged of a file, as far as counting goes.
enum Staged {
    Ranges(Vec<Range<u64>>),
    Sums { end: u64, bytes: u64 },
}

impl FileSystem {
    /// A state, and the ranges of the staged data that lies over it, sorted and disjoint.
    pub(super) fn staged_ranges(&self, ino: Ino) -> Result<(Arc<State>, Vec<Range<u64>>)> {
        let (state, ranges) = self.look(ino, |content| content.ranges())?;
        Ok((state, join(ranges.unwrap_or_default())))
    }

    /// With many staged frames `bytes` is an estimate until they are written out: as if holes lay below them, but within the file.
    pub(super) fn presence(&self, ino: Ino) -> Result<Presence> {
        let (state, staged) = self.look(ino, |content| match content.sums() {
            (frames, end, bytes) if frames > EXACT_FRAMES => Staged::Sums { end, bytes },
            _ => Staged::Ranges(content.ranges()),
        })?;
        let view = self.volume.view(&state);
        let inode = super::inode::load(view, ino)?;
        match staged {
            Some(Staged::Sums { end, bytes }) => {
                let size = inode.size.max(end);
                Ok(Presence { size, bytes: inode.bytes.saturating_add(bytes).min(size.max(inode.bytes)) })
            }
            Some(Staged::Ranges(ranges)) => presence_with(view, ino, &inode, &join(ranges)),
            None => presence_with(view, ino, &inode, &[]),
        }
    }
}

/// Staged bytes that lie over published ones are counted once.
pub(super) fn presence_with(view: View<'_>, ino: Ino, inode: &InodeValue, staged: &[Range<u64>]) -> Result<Presence> {
    let Some(last) = staged.last() else { return Ok(Presence { size: inode.size, bytes: inode.bytes }) };
    let inline = extents::inline(view, ino, inode)?.map(|content| content.len() as u64);
    let visible = inode.trim.min(inode.size);
    let mut bytes = inode.bytes;
    for range in staged {
        let covered = match inline {
            Some(length) => length.min(range.end).saturating_sub(range.start),
            None if inode.bytes == 0 => 0,
            None => extents::measure(view, ino, range.start..range.end.min(visible).max(range.start), u64::MAX)?.1,
        };
        bytes += range.end - range.start - covered;
    }
    Ok(Presence { size: inode.size.max(last.end), bytes })
}
