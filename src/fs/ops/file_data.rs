//! Content of files: open, read, write and release; truncate, the modes of fallocate(2), SEEK_DATA
//! and SEEK_HOLE.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use zeroize::Zeroize;

use super::attributes::clear_set_id;
use crate::error::{Error, Result};
use crate::format::values::{InodeValue, NO_TRIM};
use crate::format::{BLOCK, Ino, Key, MAX_OFFSET, kind};
use crate::fs::extents::{self, FRAME, MappedExtent, compression_of, may_be_inline};
use crate::fs::reclaim::STEP;
use crate::fs::write_buffer::{GROUP, INLINE_GROUPS, LockedFile, WHOLE_GROUPS};
use crate::fs::writeback::{MIN_FRAMES_PER_THREAD, run_parallel};
use crate::fs::{FileSystem, SyncProfile, inode};
use crate::txn::{Operation, ReadView, State, UnreferencedPages, View, Volume, groups_for};

/// Inode of a regular file in one state. While no other state is published it need not be looked up
/// again.
#[derive(Clone, Copy)]
struct InodeInState {
    sequence: u64,
    inode: InodeValue,
}

impl FileSystem {
    /// Counts a handle: an unlinked inode exists until the last one is released. `Stale` when it
    /// does not exist.
    pub fn open(&self, ino: Ino) -> Result<()> {
        // Counted first: a later unlink sees the handle, and an earlier one shows below.
        if !self.reclaim.open(ino) {
            return Err(Error::Stale);
        }
        self.published_inode(ino).map(drop).inspect_err(|_| self.reclaim.cancel_open(ino))
    }

    /// Releases a handle; the last one of an unlinked inode queues it for reclaim.
    pub fn release(&self, ino: Ino) -> Result<()> {
        self.reclaim.release(ino)?;
        if self.options.sync == SyncProfile::Always && self.volume.writer().is_dirty() {
            return self.sync();
        }
        Ok(())
    }

    /// Returns the bytes `offset..offset + length`, short at the end of the file; holes read as
    /// zeros.
    pub(crate) fn read(&self, ino: Ino, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let count = self.read_into(ino, offset, length, &mut out)?;
        out.truncate(count);
        Ok(out)
    }

    /// Reads the bytes `offset..offset + length` into the first bytes of `buffer`, and returns
    /// their number, less at the end of the file. Holes read as zeros. The buffer grows as needed
    /// and never shrinks, so a reused one is neither allocated nor zeroed. After an error its
    /// content is undefined.
    pub fn read_into(&self, ino: Ino, offset: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        let wanted = offset..offset.saturating_add(length as u64);
        let (state, overlay) = self.write_buffer.read_overlay(ino, &wanted);
        // Inode, inline data and the extents of a small file are mostly in one leaf.
        let reading = ReadView::of(&self.volume, state);
        let view = reading.view();
        let inode = inode::load_regular(view, ino)?;
        let range = offset..wanted.end.min(inode.size.max(overlay.end)).max(offset);
        let out = resize_buffer(buffer, (range.end - range.start) as usize);
        let whole = overlay.parts.iter().any(|(at, part)| *at == offset && part.len() == out.len());
        let mut is_prefetched = false;
        if let Some(ahead) = &self.readahead {
            let (behind, known) = ahead.record_read(ino, &range);
            is_prefetched = known;
            let visible = behind.start..behind.end.min(inode.trim).min(inode.size);
            let found = extents::find_overlapping(view, ino, visible, usize::MAX)?;
            self.volume.prefetch_pages(found.iter().map(|mapped| &mapped.extent.page));
        }
        if !whole {
            read_published(&self.volume, view, ino, &inode, &range, out, is_prefetched)?;
        }
        for (at, part) in &overlay.parts {
            let from = (at - offset) as usize;
            // Dirty bytes end before the overlay's end, hence within the range.
            out[from..from + part.len()].copy_from_slice(part);
        }
        Ok(out.len())
    }

    /// Writes like [`FileSystem::write_buffered`], and writes back some dirty data when the limit
    /// is near.
    ///
    /// # Errors
    /// Errors of `write_buffered`.
    pub fn write(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        self.write_buffered(ino, offset, data)?;
        self.throttle_dirty();
        Ok(())
    }

    /// Accepts all of `data` into the write buffer or nothing; the size grows when needed. Does not
    /// touch times (the caller's SETATTR does). The caller calls [`FileSystem::throttle_dirty`]
    /// before it accepts more, which bounds the dirty data.
    ///
    /// # Errors
    /// `NoSpace` against reservations, `FileTooLarge` beyond 2^63-1, `WriteFailed`, `ReadOnly`.
    pub fn write_buffered(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= MAX_OFFSET).ok_or(Error::FileTooLarge)?;
        let range = offset..end;
        let written = {
            let file = self.write_buffer.file(ino);
            // Before the file is locked, so that its writers compress and seal concurrently: the
            // content of a page does not depend on the file's state when the page is referenced.
            self.seal_frames(ino, &range, data).and_then(|frames| self.write_sealed(&file.lock(), range, data, frames))
        };
        written.map_err(|error| self.volume.error_for(error))
    }

    /// Writes back some dirty data when the limit is near, concurrently with other writers; waits
    /// for their writeback over the limit. Commits when much replaced data waits for a commit. The
    /// caller has no file locked.
    pub fn throttle_dirty(&self) {
        // Accepted data stays dirty; the next commit reports the error.
        if let Err(error) = self.dirty_throttle.throttle() {
            tracing::warn!(%error, "staged data could not be written out early");
        }
        self.release_freed();
    }

    pub(super) fn write_locked(&self, file: &LockedFile<'_>, range: Range<u64>, data: &[u8]) -> Result<()> {
        let frames = self.seal_frames(file.ino(), &range, data)?;
        self.write_sealed(file, range, data, frames)
    }

    /// Returns a state and the inode in it, which is looked up only if `known` is from another
    /// state.
    fn look_up(&self, ino: Ino, known: Option<InodeInState>) -> Result<(Arc<State>, InodeInState)> {
        let state = self.volume.state();
        let known = match known.filter(|known| known.sequence == state.sequence) {
            Some(known) => known,
            None => {
                let inode = inode::load_regular(self.volume.view(&state), ino)?;
                InodeInState { sequence: state.sequence, inode }
            }
        };
        Ok((state, known))
    }

    /// Writes the pages of the whole frames within the range, if any, without referencing them.
    fn seal_frames(
        &self,
        ino: Ino,
        range: &Range<u64>,
        data: &[u8],
    ) -> Result<Option<(UnreferencedPages, InodeInState)>> {
        let direct = whole_frames(range);
        if direct.is_empty() {
            return Ok(None);
        }
        // The state is dropped: it would pin the space that is waited for.
        let (_, known) = self.look_up(ino, None)?;
        let data = &data[(direct.start - range.start) as usize..(direct.end - range.start) as usize];
        Ok(Some((self.write_pages_of(ino, &known.inode, &direct, data, None)?, known)))
    }

    /// References `frames`, the result of [`FileSystem::seal_frames`] for the range, and buffers
    /// the rest.
    fn write_sealed(
        &self,
        file: &LockedFile<'_>,
        range: Range<u64>,
        data: &[u8],
        frames: Option<(UnreferencedPages, InodeInState)>,
    ) -> Result<()> {
        let (frames, known) = frames.unzip();
        let (_, known) = self.look_up(file.ino(), known)?;
        let Some(frames) = frames else {
            self.free_hidden(file, &known, range.end)?;
            let parts = [(range.start, data)];
            return if data.is_empty() {
                Ok(())
            } else {
                self.write_buffer.put(file, may_be_inline(&known.inode), &parts, None)
            };
        };
        let direct = whole_frames(&range);
        let (head, rest) = data.split_at((direct.start - range.start) as usize);
        let (whole, tail) = rest.split_at((direct.end - direct.start) as usize);
        let parts: Vec<(u64, &[u8])> =
            [(range.start, head), (direct.end, tail)].into_iter().filter(|(_, part)| !part.is_empty()).collect();
        // Space for the rest is reserved before any change, so that the write is accepted whole or
        // not at all.
        let most = parts.len() as u64 * (WHOLE_GROUPS + INLINE_GROUPS);
        self.free_hidden(file, &known, range.end)?;
        let reserved = if most > 0 { Some(self.volume.reserve_data(most * GROUP, 0)?) } else { None };
        let inode = self.link_frames(file, known, &direct, whole, frames)?;
        if parts.is_empty() { Ok(()) } else { self.write_buffer.put(file, may_be_inline(&inode), &parts, reserved) }
    }

    /// Frees hidden extents before `end`, where no extent may be added until then. Only the holder
    /// of the file's lock hides more.
    fn free_hidden(&self, file: &LockedFile<'_>, known: &InodeInState, end: u64) -> Result<()> {
        if known.inode.trim < end { self.reclaim.complete_trim(file, end) } else { Ok(()) }
    }

    /// Makes `pages` (of whole frames) the content of the range in one operation; returns the inode
    /// after it.
    fn link_frames(
        &self,
        file: &LockedFile<'_>,
        mut known: InodeInState,
        range: &Range<u64>,
        data: &[u8],
        mut pages: UnreferencedPages,
    ) -> Result<InodeValue> {
        let ino = file.ino();
        // Inline data that the pages include, since a file with extents has none.
        let mut included: Option<Vec<u8>> = None;
        loop {
            self.writeback.finish_older_batches(file)?;
            let (state, now) = self.look_up(ino, Some(known))?;
            known = now;
            let view = self.volume.view(&state);
            let inline = remaining_inline(view, ino, &known.inode, range)?;
            let (cuts, _) = extents::measure(view, ino, range.clone(), u64::MAX)?;
            drop(state);
            if inline != included {
                // Given back first: there may be no space for both.
                drop(pages);
                pages = self.write_pages_of(ino, &known.inode, range, data, inline.as_deref())?;
                included = inline;
            }
            // Inode, inline data.
            let records =
                2 + pages.pieces().len() as u64 * extents::RECORDS_PER_PIECE + cuts * extents::RECORDS_PER_CUT;
            let linked = self.volume.operate(records, false, |op| {
                let mut inode = inode::load(op.view(), ino)?;
                // A commit may have written back dirty data of the file in between.
                if !file.is_unsealed(&self.volume, op) || remaining_inline(op.view(), ino, &inode, range)? != included {
                    return Ok(None);
                }
                extents::set_inline(op, ino, &mut inode, &[])?;
                extents::link_pages(op, &mut inode, &mut pages)?;
                inode.size = inode.size.max(range.end);
                inode::store(op, ino, &inode)?;
                file.supersede(op, range.clone());
                Ok(Some(inode))
            })?;
            if let Some(inode) = linked {
                file.drop_published(&self.volume);
                return Ok(inode);
            }
        }
    }

    /// Writes the pages of whole frames, and one for inline data that they do not replace. Some MiB
    /// are sealed on all processors.
    fn write_pages_of(
        &self,
        ino: Ino,
        inode: &InodeValue,
        range: &Range<u64>,
        data: &[u8],
        inline: Option<&[u8]>,
    ) -> Result<UnreferencedPages> {
        let bytes = data.len() + inline.map_or(0, <[u8]>::len);
        let count = data.len() as u64 / FRAME + u64::from(inline.is_some());
        let mut reserved = Some(self.volume.reserve_data(bytes as u64, count)?);
        let compression = compression_of(&self.options, inode.flags);
        let frames = data.chunks(FRAME as usize).zip((range.start..).step_by(FRAME as usize));
        let parts: Vec<(&[u8], u64)> = inline.map(|content| (content, 0)).into_iter().chain(frames).collect();
        let threads = self.writeback.threads.min(parts.len() / MIN_FRAMES_PER_THREAD);
        let share = |(part, _): &(&[u8], u64)| groups_for(part.len() as u64, 1);
        let mut pages = UnreferencedPages::new(&self.volume);
        // One frame at a time, so that pages lie in the order of the file.
        let written = run_parallel(threads, 1, &parts, &mut reserved, share, |parts, reserved| {
            let reserved = reserved.as_mut().ok_or_else(|| Error::invalid("file data without a reservation"))?;
            let mut pages = UnreferencedPages::new(&self.volume);
            for (part, offset) in parts {
                pages.absorb(self.volume.write_data(reserved, ino, *offset, part, compression)?);
            }
            Ok(pages)
        })?;
        written.into_iter().for_each(|part| pages.absorb(part));
        self.volume.limit_unsynced()?;
        Ok(pages)
    }
}

/// Returns the first `count` bytes of a buffer that grows as needed.
pub(super) fn resize_buffer(buffer: &mut Vec<u8>, count: usize) -> &mut [u8] {
    if buffer.is_empty() {
        *buffer = vec![0; count]; // the allocator has zeros at hand
    } else if buffer.capacity() < count {
        // Wiped, since plaintext must not stay in freed memory.
        buffer.zeroize();
        *buffer = vec![0; count];
    } else if buffer.len() < count {
        buffer.resize(count, 0);
    }
    &mut buffer[..count]
}

/// Fills `out` with the published bytes of `range`, and holes with zeros. The pages are prefetched,
/// unless they were already (`is_prefetched`).
pub(super) fn read_published(
    volume: &Volume,
    view: View<'_>,
    ino: Ino,
    inode: &InodeValue,
    range: &Range<u64>,
    out: &mut [u8],
    is_prefetched: bool,
) -> Result<()> {
    if inode.bytes == 0 {
        out.fill(0);
        return Ok(());
    }
    if let Some(content) = extents::load_inline(view, ino, inode)? {
        let from = range.start.min(content.len() as u64) as usize;
        let to = range.end.min(content.len() as u64) as usize;
        let (stored, rest) = out.split_at_mut(to - from);
        stored.copy_from_slice(&content[from..to]);
        rest.fill(0);
        return Ok(());
    }
    // Bytes after the inode's size do not exist, even if an extent covers them.
    let visible = range.start..range.end.min(inode.trim).min(inode.size);
    let found = extents::find_overlapping(view, ino, visible.clone(), usize::MAX)?;
    let part = |mapped: &MappedExtent| {
        let (from, to) = (mapped.offset.max(visible.start), mapped.end().min(visible.end));
        (from, to, mapped.extent.start + (from - mapped.offset) as u32)
    };
    if !is_prefetched {
        volume.prefetch_data(found.iter().map(|mapped| {
            let (from, to, start) = part(mapped);
            (&mapped.extent.page, start, (to - from) as u32)
        }));
    }
    let mut filled = 0;
    for mapped in found {
        let (from, to, start) = part(&mapped);
        let place = (from - range.start) as usize..(to - range.start) as usize;
        // Extents are in order, with holes between them.
        if filled < place.start {
            out[filled..place.start].fill(0);
        }
        filled = filled.max(place.end);
        volume.read_data(&mapped.extent.page, start, &mut out[place])?;
    }
    out[filled..].fill(0);
    Ok(())
}

fn whole_frames(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(FRAME);
    start..(range.end / FRAME * FRAME).max(start)
}

/// Returns the inline data that whole frames at `range` do not replace: it is shorter than a frame.
fn remaining_inline(view: View<'_>, ino: Ino, inode: &InodeValue, range: &Range<u64>) -> Result<Option<Vec<u8>>> {
    if range.start > 0 { extents::load_inline(view, ino, inode) } else { Ok(None) }
}

impl FileSystem {
    /// Sets the size and applies `change` to the inode in the same operation. Data after a smaller
    /// size is removed at once: if it is a lot, the trim offset hides it, and it is freed later in
    /// steps. Growing makes a hole. Errors: `FileTooLarge`, `IsDirectory`, `Invalid` for anything
    /// else that is not a regular file.
    pub(crate) fn truncate(&self, ino: Ino, size: u64, change: &mut dyn FnMut(&mut InodeValue)) -> Result<InodeValue> {
        if size > MAX_OFFSET {
            return Err(Error::FileTooLarge);
        }
        let entry = self.write_buffer.file(ino);
        let file = entry.lock();
        let inode = loop {
            self.writeback.finish_older_batches(&file)?;
            let state = self.volume.state();
            let view = self.volume.view(&state);
            let inode = inode::load_regular(view, ino)?;
            let end = file.end();
            let cuts = count_cuts(view, ino, &inode, size)?;
            // Before the operation, which all writers wait for: this may read the records of half
            // of the file's extents.
            let kept = if cuts > STEP { Some(remaining_bytes(view, ino, &inode, size)?) } else { None };
            drop(state);
            // Inode, inline data, trim record.
            let records = 3 + cuts * extents::RECORDS_PER_CUT;
            let (shrinks, bytes) = (size < inode.size.max(end), inode.bytes);
            let truncated = self.volume.operate(records, shrinks, |op| {
                let mut inode = inode::load(op.view(), ino)?;
                // A commit intervened: try again. `kept` is valid while `bytes` is unchanged: the
                // file is locked, so only writeback changes the ranges that visible extents cover,
                // and it only adds bytes. Repacking and trim steps do not change these ranges.
                let is_unchanged = inode.bytes == bytes && count_cuts(op.view(), ino, &inode, size)? == cuts;
                if !is_unchanged || !file.is_unsealed(&self.volume, op) {
                    return Ok(None);
                }
                cut(op, ino, &mut inode, size, kept)?;
                inode.size = size;
                change(&mut inode);
                inode::store(op, ino, &inode)?;
                file.supersede(op, size..u64::MAX);
                Ok(Some(inode))
            })?;
            if let Some(inode) = truncated {
                break inode;
            }
        };
        file.drop_published(&self.volume);
        drop(file);
        drop(entry);
        if inode.trim != NO_TRIM {
            self.reclaim.enqueue(ino);
        }
        Ok(inode)
    }
}

/// Returns the number of extents that a truncation to `size` cuts, counted up to one more than a
/// step.
fn count_cuts(view: View<'_>, ino: Ino, inode: &InodeValue, size: u64) -> Result<u64> {
    Ok(extents::measure(view, ino, size..inode.trim.max(size), STEP + 1)?.0)
}

/// Removes everything from `size` on, or hides it if `kept` has the bytes of extents before `size`.
fn cut(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, size: u64, kept: Option<u64>) -> Result<()> {
    if let Some(old) = extents::load_inline(op.view(), ino, inode)?
        && old.len() as u64 > size
    {
        extents::set_inline(op, ino, inode, &old[..size as usize])?;
    }
    if inode.trim <= size {
        return Ok(());
    }
    let Some(kept) = kept else { return extents::remove_range(op, ino, inode, size..inode.trim) };
    let first = extents::find_overlapping(op.view(), ino, size..inode.trim, 1)?;
    if let Some(first) = first.first().filter(|first| first.offset < size) {
        extents::remove_range(op, ino, inode, size..first.end())?;
    }
    inode.bytes = kept;
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
    let end = offset.checked_add(length).filter(|end| *end <= MAX_OFFSET).ok_or(Error::FileTooLarge)?;
    Ok(offset..end)
}

impl FileSystem {
    /// Makes `offset..offset + length` a hole, which reads as zeros. Whole pages in it are freed.
    /// Without `keep_size`, a shorter file is extended to the end of the range. Does not touch
    /// times, like [`FileSystem::write`]; `kill_set_id` as in [`crate::fs::SetAttributes`]. A range
    /// of many extents takes several steps, each of them atomic.
    ///
    /// # Errors
    /// `Invalid` for an empty range or anything but a regular file (`IsDirectory`), `FileTooLarge`
    /// beyond 2^63-1.
    pub fn zero_range(&self, ino: Ino, offset: u64, length: u64, keep_size: bool, kill_set_id: bool) -> Result<()> {
        let range = checked_range(offset, length)?;
        self.strip_capability(ino, kill_set_id)?;
        self.punch_locked(&self.write_buffer.file(ino).lock(), range, keep_size, kill_set_id)?;
        self.finish_change()
    }

    fn punch_locked(&self, file: &LockedFile<'_>, range: Range<u64>, keep_size: bool, kill_set_id: bool) -> Result<()> {
        inode::load_regular(self.volume.view(&self.volume.state()), file.ino())?;
        let mut at = range.start;
        while at < range.end {
            let rest = at..range.end;
            self.writeback.clear(file, &rest)?;
            let (cuts, _) = extents::measure(self.volume.view(&self.volume.state()), file.ino(), rest.clone(), STEP)?;
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
        let visible = range.start..range.end.min(inode.trim).min(inode.size).max(range.start);
        let wanted = length.saturating_sub(extents::measure(view, ino, visible, u64::MAX)?.1);
        // A reader would delay the frees that this waits for.
        drop(state);
        let fits = || Ok(wanted <= self.writable_now(host_free)?);
        if !self.volume.space_waiter().have_room(&fits)? {
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
    /// Loads the layout, with dirty data over it. Errors: `NoSuchRange` when `offset` is not before
    /// the end of the file, `Invalid` or `IsDirectory` for anything but a regular file.
    pub(super) fn at(view: View<'_>, ino: Ino, offset: u64, dirty: Vec<Range<u64>>) -> Result<FileLayout<'_>> {
        let inode = inode::load_regular(view, ino)?;
        let size = inode.size.max(dirty.last().map_or(0, |range| range.end));
        if offset >= size {
            return Err(Error::NoSuchRange);
        }
        let inline = extents::load_inline(view, ino, &inode)?.map_or(0, |content| content.len() as u64);
        Ok(FileLayout { view, ino, inode, inline, dirty, size })
    }

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
