//! Which bytes of a file are there, staged and published together.

use std::ops::Range;

use crate::error::Result;
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::extents;
use crate::txn::View;

/// Size of a file and the bytes of it that are not in holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) struct Presence {
    pub(in crate::fs) size: u64,
    pub(in crate::fs) bytes: u64,
}

/// The inode as it is published, and the file with what is staged of it.
pub(in crate::fs) type Known = (InodeValue, Presence);

impl Presence {
    /// Of a file that nothing is staged of.
    pub(in crate::fs) fn published(inode: &InodeValue) -> Presence {
        Presence { size: inode.size, bytes: inode.bytes }
    }
}

/// What is published of a file.
pub(super) struct Below<'a> {
    view: View<'a>,
    ino: Ino,
    bytes: u64,
    /// Where extents can be seen.
    visible: u64,
    inline: Option<u64>,
}

impl Below<'_> {
    pub(super) fn new<'a>(view: View<'a>, ino: Ino, inode: &InodeValue) -> Result<Below<'a>> {
        let inline = extents::inline(view, ino, inode)?.map(|content| content.len() as u64);
        Ok(Below { view, ino, bytes: inode.bytes, visible: inode.trim.min(inode.size), inline })
    }

    /// Bytes of the range that lie over nothing.
    pub(super) fn bare(&self, range: &Range<u64>) -> Result<u64> {
        let covered = match self.inline {
            Some(length) => length.min(range.end).saturating_sub(range.start),
            None if self.bytes == 0 => 0,
            None => {
                let visible = range.start..range.end.min(self.visible).max(range.start);
                extents::measure(self.view, self.ino, visible, u64::MAX)?.1
            }
        };
        Ok(range.end - range.start - covered)
    }
}
