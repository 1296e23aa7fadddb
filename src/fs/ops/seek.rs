//! SEEK_DATA and SEEK_HOLE.

use std::ops::{ControlFlow, Range};

use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{BLOCK, Ino};
use crate::fs::{FileSystem, extents, inode};
use crate::txn::View;

/// Rounds down to whole blocks, the unit of holes and data as in other file systems: a block with
/// any data is data.
fn floor(offset: u64) -> u64 {
    offset / BLOCK * BLOCK
}

fn ceiling(offset: u64) -> u64 {
    offset.saturating_add(BLOCK - 1) / BLOCK * BLOCK
}

/// Data ranges of a file in one version.
pub(super) struct FileLayout<'a> {
    view: View<'a>,
    ino: Ino,
    inode: InodeValue,
    /// Length of the inline data.
    inline: u64,
    /// Sorted and disjoint.
    dirty: Vec<Range<u64>>,
    size: u64,
}

impl FileSystem {
    /// Returns the first offset at or after `offset` that has data.
    ///
    /// # Errors
    /// `NoSuchRange` when there is none before the end of the file, `Invalid` or `IsDirectory` for
    /// anything but a regular file.
    pub fn next_data(&self, ino: Ino, offset: u64) -> Result<u64> {
        self.with_layout(ino, offset, |layout| layout.next_data(offset))?.ok_or(Error::NoSuchRange)
    }

    /// Returns the first offset at or after `offset` that is in a hole; the end of the file counts
    /// as one.
    ///
    /// # Errors
    /// `NoSuchRange` when `offset` is not before the end of the file, `Invalid` or `IsDirectory`
    /// for anything but a regular file.
    pub fn next_hole(&self, ino: Ino, offset: u64) -> Result<u64> {
        self.with_layout(ino, offset, |layout| layout.next_hole(offset))
    }

    fn with_layout<R>(&self, ino: Ino, offset: u64, f: impl FnOnce(&FileLayout<'_>) -> Result<R>) -> Result<R> {
        let (state, dirty) = self.write_buffer.dirty_ranges(ino);
        f(&FileLayout::at(self.volume.view(&state), ino, offset, dirty)?)
    }
}

impl FileLayout<'_> {
    /// Loads the layout, with dirty data over it.
    ///
    /// # Errors
    /// `NoSuchRange` when `offset` is not before the end of the file, `Invalid` or `IsDirectory`
    /// for anything but a regular file.
    pub(super) fn at(view: View<'_>, ino: Ino, offset: u64, dirty: Vec<Range<u64>>) -> Result<FileLayout<'_>> {
        let inode = inode::load_regular(view, ino)?;
        let size = inode.size.max(dirty.last().map_or(0, |range| range.end));
        if offset >= size {
            return Err(Error::NoSuchRange);
        }
        let inline = extents::inline(view, ino, &inode)?.map_or(0, |content| content.len() as u64);
        Ok(FileLayout { view, ino, inode, inline, dirty, size })
    }

    /// Returns the range of visible extents from `offset` on.
    fn visible(&self, offset: u64) -> Range<u64> {
        let end = if self.inode.bytes == 0 { 0 } else { self.inode.trim.min(self.inode.size) };
        offset..end.max(offset)
    }

    pub(super) fn next_data(&self, offset: u64) -> Result<Option<u64>> {
        if offset < self.inline {
            return Ok(Some(offset));
        }
        let dirty = self.dirty.iter().find(|range| range.end > offset).map(|range| range.start);
        let mapped = extents::overlapping(self.view, self.ino, self.visible(offset), 1)?.first().map(|m| m.offset);
        let first = [dirty, mapped].into_iter().flatten().min();
        Ok(first.map(|start| floor(start).max(offset)))
    }

    pub(super) fn next_hole(&self, offset: u64) -> Result<u64> {
        let mut at = if offset < self.inline { ceiling(self.inline) } else { offset };
        loop {
            let before = at;
            let position = self.dirty.partition_point(|range| range.end <= at);
            for range in &self.dirty[position..] {
                if floor(range.start) > at {
                    break;
                }
                at = at.max(ceiling(range.end));
            }
            extents::visit(self.view, self.ino, self.visible(at), &mut |mapped| {
                if floor(mapped.offset) > at {
                    return Ok(ControlFlow::Break(()));
                }
                at = at.max(ceiling(mapped.end()));
                Ok(ControlFlow::Continue(()))
            })?;
            if at == before || at >= self.size {
                return Ok(at.min(self.size));
            }
        }
    }
}
