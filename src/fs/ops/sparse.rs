//! Size and holes of a file: truncate, the modes of fallocate(2), SEEK_DATA and SEEK_HOLE.

use std::ops::{ControlFlow, Range};

use super::attributes::clear_set_id;
use crate::error::{Error, Result};
use crate::format::values::{InodeValue, NO_TRIM};
use crate::format::{BLOCK, Ino, Key, MAX_OFFSET, kind};
use crate::fs::reclaim::STEP;
use crate::fs::write_buffer::LockedFile;
use crate::fs::{FileSystem, extents, inode};
use crate::txn::{Operation, View};

impl FileSystem {
    /// Sets the size and applies `change` to the inode in the same operation. Data after a smaller
    /// size is removed at once: if it is a lot, the trim offset hides it, and it is freed later in
    /// steps. Growing makes a hole.
    ///
    /// # Errors
    /// `FileTooLarge`, `IsDirectory`, `Invalid` for anything else that is not a regular file.
    pub(crate) fn truncate(&self, ino: Ino, size: u64, change: &mut dyn FnMut(&mut InodeValue)) -> Result<InodeValue> {
        if size > MAX_OFFSET {
            return Err(Error::FileTooLarge);
        }
        let inode = self.truncate_locked(&self.write_buffer.file(ino).lock(), size, change)?;
        if inode.trim != NO_TRIM {
            self.reclaim.enqueue(ino);
        }
        Ok(inode)
    }

    fn truncate_locked(
        &self,
        file: &LockedFile<'_>,
        size: u64,
        change: &mut dyn FnMut(&mut InodeValue),
    ) -> Result<InodeValue> {
        loop {
            self.writeback.finish_older_batches(file)?;
            let state = self.volume.state();
            let view = self.volume.view(&state);
            let inode = inode::load_regular(view, file.ino())?;
            let end = file.end();
            let (cuts, _) = extents::measure(view, file.ino(), size..inode.trim.max(size), STEP + 1)?;
            drop(state);
            // Inode, inline data, trim record.
            let records = 3 + cuts * extents::RECORDS_PER_CUT;
            let shrinks = size < inode.size.max(end);
            let cut = self.volume.operate(records, shrinks, |op| self.truncate_in(op, file, size, change))?;
            if let Some(inode) = cut {
                file.drop_published(&self.volume);
                return Ok(inode);
            }
        }
    }

    /// Returns `None` when a commit intervened and the caller has to try again.
    fn truncate_in(
        &self,
        op: &mut Operation<'_>,
        file: &LockedFile<'_>,
        size: u64,
        change: &mut dyn FnMut(&mut InodeValue),
    ) -> Result<Option<InodeValue>> {
        if !file.is_unsealed(&self.volume, op) {
            return Ok(None);
        }
        let mut inode = inode::load(op.view(), file.ino())?;
        cut(op, file.ino(), &mut inode, size)?;
        inode.size = size;
        change(&mut inode);
        inode::store(op, file.ino(), &inode)?;
        file.supersede(op, size..u64::MAX);
        Ok(Some(inode))
    }
}

/// Removes or hides everything from `size` on.
fn cut(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, size: u64) -> Result<()> {
    if let Some(old) = extents::load_inline(op.view(), ino, inode)?
        && old.len() as u64 > size
    {
        extents::set_inline(op, ino, inode, &old[..size as usize])?;
    }
    if inode.trim <= size {
        return Ok(());
    }
    let behind = extents::find_overlapping(op.view(), ino, size..inode.trim, STEP as usize + 1)?;
    if behind.len() as u64 <= STEP {
        return extents::remove_range(op, ino, inode, size..inode.trim);
    }
    if let Some(first) = behind.first().filter(|first| first.offset < size) {
        extents::remove_range(op, ino, inode, size..first.end())?;
    }
    inode.bytes = remaining_bytes(op.view(), ino, inode, size)?;
    inode.trim = size;
    op.insert(Key::new(0, kind::TRIM, ino.0), &[])?;
    Ok(())
}

/// Returns the bytes of extents before `size`, counted on the side that is likely shorter.
fn remaining_bytes(view: View<'_>, ino: Ino, inode: &InodeValue, size: u64) -> Result<u64> {
    if size <= inode.size / 2 {
        return Ok(extents::measure(view, ino, 0..size, u64::MAX)?.1);
    }
    let (_, gone) = extents::measure(view, ino, size..inode.trim, u64::MAX)?;
    Ok(inode.bytes.saturating_sub(gone))
}

/// Returns the range, validated like in fallocate(2).
fn checked_range(offset: u64, length: u64) -> Result<Range<u64>> {
    if length == 0 {
        return Err(Error::invalid("the range is empty"));
    }
    match offset.checked_add(length).filter(|end| *end <= MAX_OFFSET) {
        Some(end) => Ok(offset..end),
        None => Err(Error::FileTooLarge),
    }
}

impl FileSystem {
    /// Makes `offset..offset + length` a hole, which reads as zeros; the size stays. Whole pages in
    /// it are freed. Does not touch times, like [`FileSystem::write`]; `kill_set_id` as in
    /// [`crate::fs::SetAttributes`]. A range of many extents takes several steps, each of them
    /// atomic.
    ///
    /// # Errors
    /// `Invalid` for an empty range or anything but a regular file (`IsDirectory`), `FileTooLarge`
    /// beyond 2^63-1.
    pub fn punch_hole(&self, ino: Ino, offset: u64, length: u64, kill_set_id: bool) -> Result<()> {
        self.punch_range(ino, checked_range(offset, length)?, true, kill_set_id)
    }

    /// Makes a hole like [`FileSystem::punch_hole`], but without `keep_size` extends a shorter file
    /// to the end of the range.
    ///
    /// # Errors
    /// Errors of `punch_hole`.
    pub fn zero_range(&self, ino: Ino, offset: u64, length: u64, keep_size: bool, kill_set_id: bool) -> Result<()> {
        self.punch_range(ino, checked_range(offset, length)?, keep_size, kill_set_id)
    }

    fn punch_range(&self, ino: Ino, range: Range<u64>, keep_size: bool, kill_set_id: bool) -> Result<()> {
        self.strip_capability(ino, kill_set_id)?;
        self.punch_locked(&self.write_buffer.file(ino).lock(), range, keep_size, kill_set_id)?;
        self.finish_change()
    }

    fn punch_locked(&self, file: &LockedFile<'_>, range: Range<u64>, keep_size: bool, kill_set_id: bool) -> Result<()> {
        let state = self.volume.state();
        inode::load_regular(self.volume.view(&state), file.ino())?;
        drop(state);
        let mut at = range.start;
        while at < range.end {
            let rest = at..range.end;
            self.writeback.clear(file, &rest)?;
            let state = self.volume.state();
            let (cuts, _) = extents::measure(self.volume.view(&state), file.ino(), rest.clone(), STEP)?;
            drop(state);
            // Inode and inline data.
            let done = self.volume.operate(2 + cuts * extents::RECORDS_PER_CUT, true, |op| {
                if !self.writeback.is_clear(file, op, &rest) {
                    return Ok(None);
                }
                let mut inode = inode::load(op.view(), file.ino())?;
                let end = punch_step(op, file.ino(), &mut inode, &rest)?;
                if !keep_size {
                    inode.size = inode.size.max(end);
                }
                if kill_set_id {
                    clear_set_id(&mut inode, false);
                }
                inode::store(op, file.ino(), &inode)?;
                Ok(Some(end))
            })?;
            // A commit intervened: try again.
            at = done.unwrap_or(at);
        }
        Ok(())
    }
}

/// Makes the first part of `range` a hole, up to `STEP` extents; returns the end of that part.
fn punch_step(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, range: &Range<u64>) -> Result<u64> {
    if let Some(mut content) = extents::load_inline(op.view(), ino, inode)? {
        let length = content.len() as u64;
        if range.end >= length {
            content.truncate(range.start.min(length) as usize);
        } else {
            content[range.start as usize..range.end as usize].fill(0);
        }
        extents::set_inline(op, ino, inode, &content)?;
        return Ok(range.end);
    }
    let visible = range.start..range.end.min(inode.trim);
    let found = extents::find_overlapping(op.view(), ino, visible, STEP as usize + 1)?;
    let end = found.get(STEP as usize).map_or(range.end, |next| next.offset);
    extents::remove_range(op, ino, inode, range.start..end)?;
    Ok(end)
}

impl FileSystem {
    /// Checks that the range could be written in full, by the available space that statfs reports,
    /// and without `keep_size` extends the file to its end. No blocks are reserved: a copy-on-write
    /// archive could not put later writes into them, so the checked space is not kept for this
    /// file. Waits for pending frees like a write. `host_free` as in [`FileSystem::statistics`].
    /// Does not touch times, like [`FileSystem::write`].
    ///
    /// # Errors
    /// `NoSpace`, and nothing has changed; `Invalid` for an empty range or anything but a regular
    /// file, `FileTooLarge` beyond 2^63-1.
    pub fn allocate(
        &self,
        ino: Ino,
        offset: u64,
        length: u64,
        keep_size: bool,
        kill_set_id: bool,
        host_free: u64,
    ) -> Result<()> {
        let range = checked_range(offset, length)?;
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let inode = inode::load_regular(view, ino)?;
        let wanted = length.saturating_sub(allocated_bytes(view, ino, &inode, range.start, range.end)?);
        // A reader would delay the frees that this waits for.
        drop(state);
        let fits = || Ok(wanted <= self.writable_now(host_free)?);
        if !self.volume.have_room(&fits)? {
            let free = self.writable_now(host_free)?;
            return Err(Error::NoSpace(format!("the range needs more than is free: bytes={wanted} free={free}")));
        }
        self.strip_capability(ino, kill_set_id)?;
        let entry = self.write_buffer.file(ino);
        // The size is changed under the file's lock (truncation compares it with the dirty data).
        let file = entry.lock();
        self.volume.operate(1, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            if !keep_size {
                inode.size = inode.size.max(range.end);
            }
            if kill_set_id {
                clear_set_id(&mut inode, false);
            }
            inode::store(op, ino, &inode)
        })?;
        drop(file);
        self.finish_change()
    }
}

/// Returns the bytes of the range that extents hold already.
fn allocated_bytes(view: View<'_>, ino: Ino, inode: &InodeValue, start: u64, end: u64) -> Result<u64> {
    Ok(extents::measure(view, ino, start..end.min(inode.trim).min(inode.size).max(start), u64::MAX)?.1)
}

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
        let inline = extents::load_inline(view, ino, &inode)?.map_or(0, |content| content.len() as u64);
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
        let mapped = extents::find_overlapping(self.view, self.ino, self.visible(offset), 1)?.first().map(|m| m.offset);
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
