//! Size and allocated bytes of a file, dirty and published data together.

use std::ops::Range;

use crate::error::Result;
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::extents;
use crate::txn::View;

/// Size of a file, and its bytes that are not in holes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::fs) struct ContentSize {
    pub(in crate::fs) size: u64,
    pub(in crate::fs) bytes: u64,
}

/// The published inode, and the size of the file including dirty data.
pub(in crate::fs) type InodeAndSize = (InodeValue, ContentSize);

impl ContentSize {
    /// Returns the size of a file without dirty data.
    pub(in crate::fs) fn published(inode: &InodeValue) -> ContentSize {
        ContentSize { size: inode.size, bytes: inode.bytes }
    }
}

/// Published ranges of a file.
pub(super) struct PublishedRanges<'a> {
    view: View<'a>,
    ino: Ino,
    bytes: u64,
    /// End of the visible extents.
    visible: u64,
    inline: Option<u64>,
}

impl PublishedRanges<'_> {
    pub(super) fn new<'a>(view: View<'a>, ino: Ino, inode: &InodeValue) -> Result<PublishedRanges<'a>> {
        let inline = extents::inline(view, ino, inode)?.map(|content| content.len() as u64);
        Ok(PublishedRanges { view, ino, bytes: inode.bytes, visible: inode.trim.min(inode.size), inline })
    }

    /// Returns the bytes of the range that are holes in the published file.
    pub(super) fn hole_bytes(&self, range: &Range<u64>) -> Result<u64> {
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
