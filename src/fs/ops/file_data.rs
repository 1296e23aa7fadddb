//! Open, read, write and release of files.

use std::ops::Range;
use std::sync::Arc;

use zeroize::Zeroize;

use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, MAX_OFFSET, MAX_VALUE};
use crate::fs::extents::{FRAME, MappedExtent};
use crate::fs::packing::compresses;
use crate::fs::write_buffer::{GROUP, INLINE_GROUPS, LockedFile, WHOLE_GROUPS};
use crate::fs::{FileSystem, SyncProfile, extents, inode};
use crate::txn::{ReadView, Reservation, State, UnreferencedPages, View, Volume};

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
        let state = self.volume.state();
        if let Err(error) = inode::load(self.volume.view(&state), ino) {
            self.reclaim.cancel_open(ino);
            return Err(error);
        }
        Ok(())
    }

    /// Releases a handle; the last one of an unlinked inode queues it for reclaim.
    pub fn release(&self, ino: Ino) -> Result<()> {
        self.reclaim.release(ino)?;
        if self.options.sync == SyncProfile::Always && self.volume.is_dirty() {
            return self.sync();
        }
        Ok(())
    }

    /// Returns the bytes `offset..offset + length`, short at the end of the file; holes read as
    /// zeros.
    pub fn read(&self, ino: Ino, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let count = self.read_into(ino, offset, length, &mut out)?;
        out.truncate(count);
        Ok(out)
    }

    /// Reads like [`FileSystem::read`] into the first bytes of `buffer`; returns how many. The
    /// buffer grows as needed and never shrinks, so a reused one is neither allocated nor zeroed.
    /// After an error its content is undefined.
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
            prefetch_range(&self.volume, view, ino, &inode, behind)?;
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
        written.map_err(|error| self.deliver_error(error))
    }

    /// Writes back some dirty data when the limit is near, concurrently with other writers; waits
    /// for their writeback over the limit. The caller has no file locked.
    pub fn throttle_dirty(&self) {
        // Accepted data stays dirty; the next commit reports the error.
        if let Err(error) = self.dirty_throttle.throttle() {
            tracing::warn!(%error, "staged data could not be written out early");
        }
    }

    /// Writes for a caller that has the file locked.
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
        // Inline data that the pages include, since a file with extents has none.
        let mut included: Option<Vec<u8>> = None;
        loop {
            if let Some(inode) = self.try_link_frames(file, &mut known, range, data, &mut pages, &mut included)? {
                file.drop_published(&self.volume);
                return Ok(inode);
            }
        }
    }

    /// Returns `None` when a commit intervened and the caller has to try again.
    fn try_link_frames(
        &self,
        file: &LockedFile<'_>,
        known: &mut InodeInState,
        range: &Range<u64>,
        data: &[u8],
        pages: &mut UnreferencedPages,
        included: &mut Option<Vec<u8>>,
    ) -> Result<Option<InodeValue>> {
        self.writeback.finish_older_batches(file)?;
        let ino = file.ino();
        let (state, now) = self.look_up(ino, Some(*known))?;
        *known = now;
        let view = self.volume.view(&state);
        let inline = remaining_inline(view, ino, &known.inode, range)?;
        let (cuts, _) = extents::measure(view, ino, range.clone(), u64::MAX)?;
        drop(state);
        if inline != *included {
            // Given back first: there may be no space for both.
            *pages = UnreferencedPages::new(&self.volume);
            *pages = self.write_pages_of(ino, &known.inode, range, data, inline.as_deref())?;
            *included = inline;
        }
        // Inode, inline data.
        let records = 2 + pages.pieces().len() as u64 * extents::RECORDS_PER_PIECE + cuts * extents::RECORDS_PER_CUT;
        self.volume.operate(records, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            // A commit may have written back dirty data of the file in between.
            if !file.is_unsealed(&self.volume, op) || remaining_inline(op.view(), ino, &inode, range)? != *included {
                return Ok(None);
            }
            extents::set_inline(op, ino, &mut inode, &[])?;
            extents::link_pages(op, &mut inode, pages)?;
            inode.size = inode.size.max(range.end);
            inode::store(op, ino, &inode)?;
            file.supersede(op, range.clone());
            Ok(Some(inode))
        })
    }

    /// Writes the pages of whole frames, and one for inline data that they do not replace.
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
        let mut reserved: Reservation = self.volume.reserve_data(bytes as u64, count)?;
        let compress = compresses(&self.options, inode.flags);
        let mut pages = UnreferencedPages::new(&self.volume);
        let frames = data.chunks(FRAME as usize).zip((range.start..).step_by(FRAME as usize));
        for (part, offset) in inline.map(|content| (content, 0)).into_iter().chain(frames) {
            pages.absorb(self.volume.write_data(&mut reserved, ino, offset, part, compress)?);
        }
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

/// Prefetches the pages of a range of the file.
fn prefetch_range(volume: &Volume, view: View<'_>, ino: Ino, inode: &InodeValue, range: Range<u64>) -> Result<()> {
    let visible = range.start..range.end.min(inode.trim).min(inode.size);
    let found = extents::find_overlapping(view, ino, visible, usize::MAX)?;
    volume.prefetch_pages(found.iter().map(|mapped| &mapped.extent.page));
    Ok(())
}

/// Returns the aligned frames that the range covers; empty if none.
fn whole_frames(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(FRAME);
    start..(range.end / FRAME * FRAME).max(start)
}

/// Returns the inline data that whole frames at `range` do not replace: it is shorter than a frame.
fn remaining_inline(view: View<'_>, ino: Ino, inode: &InodeValue, range: &Range<u64>) -> Result<Option<Vec<u8>>> {
    if range.start > 0 { extents::load_inline(view, ino, inode) } else { Ok(None) }
}

/// Returns whether the file may have inline data, now or after writeback of its dirty data.
fn may_be_inline(inode: &InodeValue) -> bool {
    inode.bytes <= MAX_VALUE as u64
}
