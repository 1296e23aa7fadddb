//! The modes of fallocate(2): allocation, PUNCH_HOLE and ZERO_RANGE.

use std::ops::Range;

use super::attributes::clear_set_id;
use super::truncate::MAX_SIZE;
use crate::error::{Error, Result};
use crate::format::Ino;
use crate::format::values::InodeValue;
use crate::fs::reclaim::STEP;
use crate::fs::write_buffer::LockedFile;
use crate::fs::{FileSystem, extents, inode};
use crate::txn::{Operation, View};

/// Returns the range, validated like in fallocate(2).
fn checked_range(offset: u64, length: u64) -> Result<Range<u64>> {
    if length == 0 {
        return Err(Error::invalid("the range is empty"));
    }
    match offset.checked_add(length).filter(|end| *end <= MAX_SIZE) {
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
        self.empty_range(ino, checked_range(offset, length)?, true, kill_set_id)
    }

    /// Makes a hole like [`FileSystem::punch_hole`], but without `keep_size` extends a shorter file
    /// to the end of the range.
    ///
    /// # Errors
    /// Errors of `punch_hole`.
    pub fn zero_range(&self, ino: Ino, offset: u64, length: u64, keep_size: bool, kill_set_id: bool) -> Result<()> {
        self.empty_range(ino, checked_range(offset, length)?, keep_size, kill_set_id)
    }

    fn empty_range(&self, ino: Ino, range: Range<u64>, keep_size: bool, kill_set_id: bool) -> Result<()> {
        self.strip_capability(ino, kill_set_id)?;
        self.empty_locked(&self.write_buffer.file(ino).lock(), range, keep_size, kill_set_id)?;
        self.finish_change()
    }

    fn empty_locked(&self, file: &LockedFile<'_>, range: Range<u64>, keep_size: bool, kill_set_id: bool) -> Result<()> {
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
                let end = empty_step(op, file.ino(), &mut inode, &rest)?;
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
fn empty_step(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, range: &Range<u64>) -> Result<u64> {
    if let Some(mut content) = extents::inline(op.view(), ino, inode)? {
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
    let found = extents::overlapping(op.view(), ino, visible, STEP as usize + 1)?;
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
        let wanted = length.saturating_sub(present(view, ino, &inode, range.start, range.end)?);
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
fn present(view: View<'_>, ino: Ino, inode: &InodeValue, start: u64, end: u64) -> Result<u64> {
    Ok(extents::measure(view, ino, start..end.min(inode.trim).min(inode.size).max(start), u64::MAX)?.1)
}
