//! open, read, write, release of files.

use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use zeroize::Zeroize;

use super::truncate::MAX_SIZE;
use crate::error::{Error, Result};
use crate::format::values::InodeValue;
use crate::format::{Ino, MAX_VALUE};
use crate::fs::extents::{FRAME, Mapped};
use crate::fs::packing::compresses;
use crate::fs::write_buffer::{GROUP, INLINE_GROUPS, LockedFile, WHOLE_GROUPS};
use crate::fs::{FileSystem, SyncProfile, extents, inode};
use crate::txn::{Reading, Reservation, State, UnnamedPages, View, Volume};

/// The inode of a regular file in the state of a number. While no other state is published it need not be looked up again.
#[derive(Clone, Copy)]
struct Known {
    sequence: u64,
    inode: InodeValue,
}

impl FileSystem {
    /// Counts a handle: an unlinked inode lives until the last one is closed. `Stale` when it does not exist.
    pub fn open(&self, ino: Ino) -> Result<()> {
        // Counted first: whoever unlinks it from now on sees the handle, and what is gone already shows below.
        if !self.reclaim.open(ino) {
            return Err(Error::Stale);
        }
        let state = self.volume.state();
        if let Err(error) = inode::load(self.volume.view(&state), ino) {
            self.reclaim.unopen(ino);
            return Err(error);
        }
        Ok(())
    }

    /// Ends a handle; the last one of an unlinked inode queues it for reclaim.
    pub fn release(&self, ino: Ino) -> Result<()> {
        self.reclaim.release(ino)?;
        if self.options.sync == SyncProfile::Always && self.volume.is_dirty() {
            return self.sync();
        }
        Ok(())
    }

    /// The bytes `offset..offset + length`, short at the end of the file; holes read as zeros.
    pub fn read(&self, ino: Ino, offset: u64, length: usize) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        let count = self.read_into(ino, offset, length, &mut out)?;
        out.truncate(count);
        Ok(out)
    }

    /// As [`FileSystem::read`], into the first bytes of `buffer`; answers how many. The buffer grows as needed and never shrinks, so one that
    /// is used again is neither allocated nor zeroed. After an error its content means nothing.
    pub fn read_into(&self, ino: Ino, offset: u64, length: usize, buffer: &mut Vec<u8>) -> Result<usize> {
        let wanted = offset..offset.saturating_add(length as u64);
        let (state, overlay) = self.staging.overlay(ino, &wanted);
        // Inode, inline data and the extents of a small file mostly lie in one leaf.
        let reading = Reading::of(&self.volume, state);
        let view = reading.view();
        let inode = inode::load_regular(view, ino)?;
        let range = offset..wanted.end.min(inode.size.max(overlay.end)).max(offset);
        let out = room(buffer, (range.end - range.start) as usize);
        let whole = overlay.parts.iter().any(|(at, part)| *at == offset && part.len() == out.len());
        let mut is_expected = false;
        if let Some(ahead) = &self.ahead {
            let (behind, known) = ahead.behind(ino, &range);
            is_expected = known;
            expect(&self.volume, view, ino, &inode, behind)?;
        }
        if !whole {
            read_published(&self.volume, view, ino, &inode, &range, out, is_expected)?;
        }
        for (at, part) in &overlay.parts {
            let from = (at - offset) as usize;
            // Staged bytes lie before the overlay's end, hence within the range.
            out[from..from + part.len()].copy_from_slice(part);
        }
        Ok(out.len())
    }

    /// As [`FileSystem::accept`], and writes some of what is staged out when there is much.
    ///
    /// # Errors
    /// As there.
    pub fn write(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        self.accept(ino, offset, data)?;
        self.write_out_early();
        Ok(())
    }

    /// Accepts all of `data` or nothing; the size grows when needed. Does not touch times (the caller's SETATTR does). Whoever calls it calls
    /// [`FileSystem::write_out_early`] before it accepts more, which keeps what is staged bounded.
    ///
    /// # Errors
    /// `NoSpace` against reservations, `FileTooLarge` beyond 2^63-1, `Latched`, `ReadOnly`.
    pub fn accept(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        let end = offset.checked_add(data.len() as u64).filter(|end| *end <= MAX_SIZE).ok_or(Error::FileTooLarge)?;
        let range = offset..end;
        let written = {
            let file = self.staging.entry(ino);
            // Before the file is locked, so that its writers compress and seal at the same time: what a page holds does not depend on what the
            // file is when the page is named.
            self.seal_frames(ino, &range, data).and_then(|frames| self.write_sealed(&file.lock(), range, data, frames))
        };
        written.map_err(|error| self.told(error))
    }

    /// Writes some of what is staged out when there is much, beside whoever stages more; waits for those who do when there is too much. The caller has no
    /// file locked.
    pub fn write_out_early(&self) {
        // What was accepted stays staged; the next commit reports what is wrong.
        if let Err(error) = self.pressure.relieve() {
            tracing::warn!(%error, "staged data could not be written out early");
        }
    }

    /// `write` for a caller that has the file locked.
    pub(super) fn write_locked(&self, file: &LockedFile<'_>, range: Range<u64>, data: &[u8]) -> Result<()> {
        let frames = self.seal_frames(file.ino(), &range, data)?;
        self.write_sealed(file, range, data, frames)
    }

    /// A state and the inode in it, which is looked up only when it is not `known` of that state.
    fn look_up(&self, ino: Ino, known: Option<Known>) -> Result<(Arc<State>, Known)> {
        let state = self.volume.state();
        let known = match known.filter(|known| known.sequence == state.sequence) {
            Some(known) => known,
            None => {
                let inode = inode::load_regular(self.volume.view(&state), ino)?;
                Known { sequence: state.sequence, inode }
            }
        };
        Ok((state, known))
    }

    /// Writes the pages of the whole frames within the range, if there are any; nothing names them yet.
    fn seal_frames(&self, ino: Ino, range: &Range<u64>, data: &[u8]) -> Result<Option<(UnnamedPages, Known)>> {
        let direct = whole_frames(range);
        if direct.is_empty() {
            return Ok(None);
        }
        // The state is not kept: it would pin what is waited for.
        let (_, known) = self.look_up(ino, None)?;
        let data = &data[(direct.start - range.start) as usize..(direct.end - range.start) as usize];
        Ok(Some((self.write_pages_of(ino, &known.inode, &direct, data, None)?, known)))
    }

    /// Names `frames`, which [`FileSystem::seal_frames`] made of the range, and stages the rest.
    fn write_sealed(
        &self,
        file: &LockedFile<'_>,
        range: Range<u64>,
        data: &[u8],
        frames: Option<(UnnamedPages, Known)>,
    ) -> Result<()> {
        let (frames, known) = frames.unzip();
        let (_, known) = self.look_up(file.ino(), known)?;
        let Some(frames) = frames else {
            self.uncover(file, &known, range.end)?;
            let parts = [(range.start, data)];
            return if data.is_empty() {
                Ok(())
            } else {
                self.staging.stage(file, may_be_inline(&known.inode), &parts, None)
            };
        };
        let direct = whole_frames(&range);
        let (head, rest) = data.split_at((direct.start - range.start) as usize);
        let (whole, tail) = rest.split_at((direct.end - direct.start) as usize);
        let parts: Vec<(u64, &[u8])> =
            [(range.start, head), (direct.end, tail)].into_iter().filter(|(_, part)| !part.is_empty()).collect();
        // Room for the rest is promised before anything is changed, so that the write is accepted whole or not at all.
        let most = parts.len() as u64 * (WHOLE_GROUPS + INLINE_GROUPS);
        self.uncover(file, &known, range.end)?;
        let reserved = if most > 0 { Some(self.volume.reserve_data(most * GROUP, 0)?) } else { None };
        let inode = self.name_frames(file, known, &direct, whole, frames)?;
        if parts.is_empty() { Ok(()) } else { self.staging.stage(file, may_be_inline(&inode), &parts, reserved) }
    }

    /// Frees what lies hidden before `end`, where nothing may be added until then. Only who has the file locked hides more.
    fn uncover(&self, file: &LockedFile<'_>, known: &Known, end: u64) -> Result<()> {
        if known.inode.trim < end { self.reclaim.complete_trim(file, end) } else { Ok(()) }
    }

    /// Makes `pages`, those of whole frames, the content of the range in one operation; answers the inode after it.
    fn name_frames(
        &self,
        file: &LockedFile<'_>,
        mut known: Known,
        range: &Range<u64>,
        data: &[u8],
        mut pages: UnnamedPages,
    ) -> Result<InodeValue> {
        // Inline data that the pages include, since it must not stay inline beside them.
        let mut included: Option<Vec<u8>> = None;
        loop {
            if let Some(inode) = self.try_to_name(file, &mut known, range, data, &mut pages, &mut included)? {
                file.drop_published(&self.volume);
                return Ok(inode);
            }
        }
    }

    /// None when a commit came between and the caller has to look again.
    fn try_to_name(
        &self,
        file: &LockedFile<'_>,
        known: &mut Known,
        range: &Range<u64>,
        data: &[u8],
        pages: &mut UnnamedPages,
        included: &mut Option<Vec<u8>>,
    ) -> Result<Option<InodeValue>> {
        self.write_out.land_older(file)?;
        let ino = file.ino();
        let (state, now) = self.look_up(ino, Some(*known))?;
        *known = now;
        let view = self.volume.view(&state);
        let inline = kept_inline(view, ino, &known.inode, range)?;
        let (cuts, _) = extents::measure(view, ino, range.clone(), u64::MAX)?;
        drop(state);
        if inline != *included {
            // Given back first: there may be no space for both.
            *pages = UnnamedPages::new(&self.volume);
            *pages = self.write_pages_of(ino, &known.inode, range, data, inline.as_deref())?;
            *included = inline;
        }
        // Inode, inline data.
        let records = 2 + pages.pieces().len() as u64 * extents::RECORDS_PER_PIECE + cuts * extents::RECORDS_PER_CUT;
        self.volume.operate(records, false, |op| {
            let mut inode = inode::load(op.view(), ino)?;
            // A commit may have written out staged data of the file in between.
            if !file.is_unsealed(&self.volume, op) || kept_inline(op.view(), ino, &inode, range)? != *included {
                return Ok(None);
            }
            extents::set_inline(op, ino, &mut inode, &[])?;
            extents::name_pages(op, &mut inode, pages)?;
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
    ) -> Result<UnnamedPages> {
        let bytes = data.len() + inline.map_or(0, <[u8]>::len);
        let count = data.len() as u64 / FRAME + u64::from(inline.is_some());
        let mut reserved: Reservation = self.volume.reserve_data(bytes as u64, count)?;
        let compress = compresses(&self.options, inode.flags);
        let mut pages = UnnamedPages::new(&self.volume);
        let frames = data.chunks(FRAME as usize).zip((range.start..).step_by(FRAME as usize));
        for (part, offset) in inline.map(|content| (content, 0)).into_iter().chain(frames) {
            pages.absorb(self.volume.write_data(&mut reserved, ino, offset, part, compress)?);
        }
        self.volume.bound_unsynced()?;
        Ok(pages)
    }
}

/// The first `count` bytes of a buffer that grows as needed.
pub(super) fn room(buffer: &mut Vec<u8>, count: usize) -> &mut [u8] {
    if buffer.is_empty() {
        *buffer = vec![0; count]; // the allocator has zeros at hand
    } else if buffer.capacity() < count {
        // What stood in it is not left behind in memory that it gives back.
        buffer.zeroize();
        *buffer = vec![0; count];
    } else if buffer.len() < count {
        buffer.resize(count, 0);
    }
    &mut buffer[..count]
}

/// Fills `out`, of any content before, with what extents or inline data say of `range`, and with zeros elsewhere. The medium is told before what of it is read, unless it was
/// and `is_expected` says so.
pub(super) fn read_published(
    volume: &Volume,
    view: View<'_>,
    ino: Ino,
    inode: &InodeValue,
    range: &Range<u64>,
    out: &mut [u8],
    is_expected: bool,
) -> Result<()> {
    if inode.bytes == 0 {
        out.fill(0);
        return Ok(());
    }
    if let Some(content) = extents::inline(view, ino, inode)? {
        let from = range.start.min(content.len() as u64) as usize;
        let to = range.end.min(content.len() as u64) as usize;
        let (stored, rest) = out.split_at_mut(to - from);
        stored.copy_from_slice(&content[from..to]);
        rest.fill(0);
        return Ok(());
    }
    // Bytes behind the inode's size do not exist, even where an extent reaches beyond.
    let visible = range.start..range.end.min(inode.trim).min(inode.size);
    let mut found = Vec::new();
    extents::visit(view, ino, visible.clone(), &mut |mapped| {
        found.push(mapped);
        Ok(ControlFlow::Continue(()))
    })?;
    let part = |mapped: &Mapped| {
        let (from, to) = (mapped.offset.max(visible.start), mapped.end().min(visible.end));
        (from, to, mapped.extent.start + (from - mapped.offset) as u32)
    };
    if !is_expected {
        volume.expect_data(found.iter().map(|mapped| {
            let (from, to, start) = part(mapped);
            (&mapped.extent.page, start, (to - from) as u32)
        }));
    }
    let mut filled = 0;
    for mapped in found {
        let (from, to, start) = part(&mapped);
        let place = (from - range.start) as usize..(to - range.start) as usize;
        // Extents come in their order; between them lie holes.
        if filled < place.start {
            out[filled..place.start].fill(0);
        }
        filled = filled.max(place.end);
        volume.read_data(&mapped.extent.page, start, &mut out[place])?;
    }
    out[filled..].fill(0);
    Ok(())
}

/// Tells the medium which pages a range of the file has.
fn expect(volume: &Volume, view: View<'_>, ino: Ino, inode: &InodeValue, range: Range<u64>) -> Result<()> {
    let mut pages = Vec::new();
    let visible = range.start..range.end.min(inode.trim).min(inode.size);
    extents::visit(view, ino, visible, &mut |mapped| {
        pages.push(mapped.extent.page);
        Ok(ControlFlow::Continue(()))
    })?;
    volume.expect_pages(pages.iter());
    Ok(())
}

/// The aligned frames that the range covers; empty when there is none.
fn whole_frames(range: &Range<u64>) -> Range<u64> {
    let start = range.start.next_multiple_of(FRAME);
    start..(range.end / FRAME * FRAME).max(start)
}

/// Inline data that whole frames at `range` do not replace: it is shorter than a frame.
fn kept_inline(view: View<'_>, ino: Ino, inode: &InodeValue, range: &Range<u64>) -> Result<Option<Vec<u8>>> {
    if range.start > 0 { extents::inline(view, ino, inode) } else { Ok(None) }
}

/// Whether the file may have inline data, now or when what is staged of it is written out.
fn may_be_inline(inode: &InodeValue) -> bool {
    inode.bytes <= MAX_VALUE as u64
}
