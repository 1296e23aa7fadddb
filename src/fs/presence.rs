//! Which bytes of a file are there, staged and published together.

use std::ops::Range;
use std::sync::Arc;

use super::ranges::join;
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

/// The inode as it is published, and the file with what is staged of it.
pub(super) type Known = (InodeValue, Presence);

impl Presence {
    /// Of a file that nothing is staged of.
    pub(super) fn published(inode: &InodeValue) -> Presence {
        Presence { size: inode.size, bytes: inode.bytes }
    }
}

impl FileSystem {
    /// A state, and the ranges of the staged data that lies over it, sorted and disjoint.
    pub(super) fn staged_ranges(&self, ino: Ino) -> (Arc<State>, Vec<Range<u64>>) {
        let (state, ranges) = self.look(ino, |content, _| content.ranges());
        (state, join(ranges.unwrap_or_default()))
    }

    /// A state, and what the inode is with the staged data that lies over it, if there is any.
    ///
    /// The kernel may ask with each write, of a file of which thousands of pieces are staged: only those are looked at of which it is not
    /// known yet what lies below them.
    pub(super) fn staged_presence(&self, ino: Ino) -> Result<(Arc<State>, Option<Known>)> {
        let (state, staged) = self.look(ino, |content, view| {
            let inode = super::inode::load(view, ino)?;
            let below = Below::new(view, ino, &inode)?;
            let added = content.added(&|range| below.bare(&range))?;
            let presence = Presence { size: inode.size.max(content.end()), bytes: inode.bytes.saturating_add(added) };
            Ok((inode, presence))
        });
        Ok((state, staged.transpose()?))
    }

    pub(super) fn presence(&self, ino: Ino) -> Result<Known> {
        let (state, staged) = self.staged_presence(ino)?;
        if let Some(staged) = staged {
            return Ok(staged);
        }
        let inode = super::inode::load(self.volume.view(&state), ino)?;
        Ok((inode, Presence::published(&inode)))
    }

    /// As [`FileSystem::presence`], with nothing remembered.
    #[cfg(test)]
    pub(super) fn presence_anew(&self, ino: Ino) -> Result<Presence> {
        let (state, staged) = self.staged_ranges(ino);
        let view = self.volume.view(&state);
        let inode = super::inode::load(view, ino)?;
        let below = Below::new(view, ino, &inode)?;
        let added = staged.iter().map(|range| below.bare(range)).sum::<Result<u64>>()?;
        let size = inode.size.max(staged.last().map_or(0, |range| range.end));
        Ok(Presence { size, bytes: inode.bytes + added })
    }
}

/// What is published of a file.
struct Below<'a> {
    view: View<'a>,
    ino: Ino,
    bytes: u64,
    /// Where extents can be seen.
    visible: u64,
    inline: Option<u64>,
}

impl Below<'_> {
    fn new<'a>(view: View<'a>, ino: Ino, inode: &InodeValue) -> Result<Below<'a>> {
        let inline = extents::inline(view, ino, inode)?.map(|content| content.len() as u64);
        Ok(Below { view, ino, bytes: inode.bytes, visible: inode.trim.min(inode.size), inline })
    }

    /// Bytes of the range that lie over nothing.
    fn bare(&self, range: &Range<u64>) -> Result<u64> {
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
