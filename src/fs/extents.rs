//! Maps file ranges to extents: lookup, insert with split, removal, and reference counts; and
//! places small files inline or on shared pages.
//!
//! # Invariants
//! EXTENT-1  Extents of an inode do not overlap; every extent is one count of its page
//!     (specification 8).
//! EXTENT-2  The remaining part of a cut extent is a new reference, born in the open transaction:
//!     it is shared before the old one is released.
//! EXTENT-3  `InodeValue::bytes` is the sum of the visible extents and the inline data; extents at
//!     or after the trim offset are not visible.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use super::types::{Compression, FsOptions};
use crate::error::Result;
use crate::format::values::{Extent, InodeValue, inode_flags};
use crate::format::{Ino, Key, MAX_DATA, Pointer, kind};
use crate::txn::{Operation, UnreferencedPages, View, WrittenPiece};

/// Bytes of an aligned frame of a file, which is the maximum of one data page.
pub(crate) const FRAME: u64 = MAX_DATA as u64;

/// Maximum records changed by removing or cutting one extent: itself, two parts, a dead-list entry,
/// and a reference record split in three by the sharing and again by the release.
pub(crate) const RECORDS_PER_CUT: u64 = 1 + 2 + 1 + 3 + 3;

/// Maximum records changed by one new extent: itself and the three around a reference count above
/// 1.
pub(crate) const RECORDS_PER_PIECE: u64 = 1 + 3;

#[cfg(test)]
thread_local! {
    /// Number of inode lookups of this thread, and of extents visited since the last one, which
    /// every operation on a file begins with.
    pub(crate) static VISITS: std::cell::Cell<(u64, u64)> = const { std::cell::Cell::new((0, 0)) };
}

#[cfg(test)]
fn count_visit() {
    let (lookups, (before, visits)) = (super::inode::LOOKUPS.get(), VISITS.get());
    VISITS.set((lookups, if lookups == before { visits + 1 } else { 1 }));
}

pub(crate) fn key(ino: Ino, offset: u64) -> Key {
    Key::new(ino.0, kind::EXTENT, offset)
}

pub(crate) fn end_key(ino: Ino) -> Key {
    Key::new(ino.0, kind::EXTENT + 1, 0)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MappedExtent {
    pub(crate) offset: u64,
    pub(crate) extent: Extent,
}

impl MappedExtent {
    pub(crate) fn end(&self) -> u64 {
        self.offset + u64::from(self.extent.length)
    }

    /// Returns the offset in the page of a part of the extent, given by its range in the file.
    pub(crate) fn start_of(&self, part: &Range<u64>) -> u32 {
        self.extent.start + (part.start - self.offset) as u32
    }

    pub(crate) fn overlap(&self, range: &Range<u64>) -> u64 {
        self.end().min(range.end).saturating_sub(self.offset.max(range.start))
    }
}

/// Calls `f` with the extents that overlap `range`, ascending and not clipped. Hidden extents are
/// included: the caller bounds `range` by the trim offset.
pub(crate) fn visit(
    view: View<'_>,
    ino: Ino,
    range: Range<u64>,
    f: &mut dyn FnMut(MappedExtent) -> Result<ControlFlow<()>>,
) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let mut f = |mapped| {
        #[cfg(test)]
        count_visit();
        f(mapped)
    };
    let before = view.floor(key(ino, range.start), |found, value| {
        if found.object != ino.0 || found.kind != kind::EXTENT {
            return Ok(None);
        }
        Ok(Some(MappedExtent { offset: found.sub, extent: Extent::decode(value)? }))
    })?;
    if let Some(mapped) = before.flatten()
        && mapped.end() > range.start
        && f(mapped)?.is_break()
    {
        return Ok(());
    }
    view.scan(key(ino, range.start.saturating_add(1)), key(ino, range.end), &mut |found, value| {
        f(MappedExtent { offset: found.sub, extent: Extent::decode(value)? })
    })
}

pub(crate) fn find_overlapping(view: View<'_>, ino: Ino, range: Range<u64>, limit: usize) -> Result<Vec<MappedExtent>> {
    let mut found = Vec::new();
    visit(view, ino, range, &mut |mapped| {
        found.push(mapped);
        Ok(if found.len() >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok(found)
}

/// Returns the number of extents that overlap `range`, counted up to `limit`, and the bytes of
/// `range` that they cover.
pub(crate) fn measure(view: View<'_>, ino: Ino, range: Range<u64>, limit: u64) -> Result<(u64, u64)> {
    let (mut count, mut bytes) = (0, 0);
    visit(view, ino, range.clone(), &mut |mapped| {
        count += 1;
        bytes += mapped.overlap(&range);
        Ok(if count >= limit { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
    })?;
    Ok((count, bytes))
}

/// Returns whether an extent may be on a packed page: only extents within the first `PACK` bytes
/// of a file can be (COPY-1).
pub(crate) fn may_be_packed(offset: u64, length: u32) -> bool {
    offset.saturating_add(length.into()) <= PACK
}

/// Notes the page of the extent at `offset` as stale, before all or a part of the extent is
/// removed.
pub(crate) fn note_stale_if_packed(op: &mut Operation<'_>, offset: u64, extent: &Extent) {
    if may_be_packed(offset, extent.length) {
        op.note_stale(&extent.page);
    }
}

/// Makes `range` a hole: removes the visible extents in it and cuts the extents at its ends.
pub(crate) fn remove_range(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, range: Range<u64>) -> Result<()> {
    let range = range.start..range.end.min(inode.trim);
    for mapped in find_overlapping(op.view(), ino, range.clone(), usize::MAX)? {
        let MappedExtent { offset, extent } = mapped;
        note_stale_if_packed(op, offset, &extent);
        let head = offset < range.start;
        let tail = mapped.end() > range.end;
        let parts = u32::from(head) + u32::from(tail);
        // EXTENT-2, except that a reference of the open transaction can stay: its `born` is already
        // right.
        if extent.born == op.generation() && parts > 0 {
            op.share(&extent.page, parts - 1)?;
        } else {
            op.share(&extent.page, parts)?;
            op.release(&extent.page, extent.born)?;
        }
        let born = op.generation();
        if head {
            let length = (range.start - offset) as u32;
            op.insert(key(ino, offset), &Extent { length, born, ..extent }.encode())?;
        } else {
            op.remove(key(ino, offset))?;
        }
        if tail {
            let cut = (range.end - offset) as u32;
            let rest = Extent { start: extent.start + cut, length: extent.length - cut, born, ..extent };
            op.insert(key(ino, range.end), &rest.encode())?;
        }
        inode.bytes = inode.bytes.saturating_sub(mapped.overlap(&range));
    }
    Ok(())
}

/// References pages that were written for one file and makes their pieces its content.
pub(crate) fn link_pages(op: &mut Operation<'_>, inode: &mut InodeValue, pages: &mut UnreferencedPages) -> Result<()> {
    pages.name(op, |_| true)?;
    replace(op, inode, pages.pieces())
}

/// Makes the pieces, all of one file, the content of their ranges. The caller references the pages.
pub(crate) fn replace(op: &mut Operation<'_>, inode: &mut InodeValue, pieces: &[WrittenPiece]) -> Result<()> {
    // Pieces of one frame mostly cut the same extents; extents between distant pieces need no look.
    let near = |a: &WrittenPiece, b: &WrittenPiece| a.offset / FRAME == b.offset / FRAME && end(a) <= b.offset;
    pieces.chunk_by(near).try_for_each(|pieces| replace_in_frame(op, inode, pieces))
}

fn end(piece: &WrittenPiece) -> u64 {
    piece.offset + u64::from(piece.length)
}

/// Runs `replace` for ascending pieces: each extent is cut once, and the count of each page changes
/// once, however many pieces cut it.
fn replace_in_frame(op: &mut Operation<'_>, inode: &mut InodeValue, pieces: &[WrittenPiece]) -> Result<()> {
    let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Ok(()) };
    let (ino, born) = (first.ino, op.generation());
    let mut counts: Vec<(Pointer, i64)> = Vec::new();
    for mapped in find_overlapping(op.view(), ino, first.offset..end(last).min(inode.trim), usize::MAX)? {
        let MappedExtent { offset, extent } = mapped;
        // Pieces replace no hidden extents.
        let replaced = pieces.iter().map(|piece| piece.offset..end(piece).min(inode.trim).max(piece.offset));
        let rest = gaps(offset..mapped.end(), replaced.filter(|range| !range.is_empty()));
        let left: u64 = rest.iter().map(|part| part.end - part.start).sum();
        if left == u64::from(extent.length) {
            continue;
        }
        note_stale_if_packed(op, offset, &extent);
        let parts = rest.len() as u32; // an extent of at most 128 KiB has no more
        if op.is_shown_by_snapshot(extent.born) {
            // EXTENT-2
            op.share(&extent.page, parts)?;
            op.release(&extent.page, extent.born)?;
        } else {
            let more = i64::from(parts) - 1;
            match counts.iter_mut().find(|(page, _)| page.run == extent.page.run) {
                Some((_, count)) => *count += more,
                None => counts.push((extent.page, more)),
            }
        }
        // A record at the same offset is overwritten.
        if rest.iter().all(|part| part.start != offset) && pieces.iter().all(|piece| piece.offset != offset) {
            op.remove(key(ino, offset))?;
        }
        for part in rest {
            let (start, length) = (extent.start + (part.start - offset) as u32, (part.end - part.start) as u32);
            op.insert(key(ino, part.start), &Extent { start, length, born, ..extent }.encode())?;
        }
        inode.bytes = inode.bytes.saturating_sub(u64::from(extent.length) - left);
    }
    counts.iter().try_for_each(|(page, more)| op.recount(page, *more))?;
    for piece in pieces {
        debug_assert!((1..=MAX_DATA as u32).contains(&piece.length) && piece.ino == ino);
        insert_piece(op, piece)?;
        inode.bytes = inode.bytes.saturating_add(u64::from(piece.length));
    }
    Ok(())
}

/// Inserts the extent of a new piece, born in the open transaction. The caller counts its bytes and
/// references its page.
pub(crate) fn insert_piece(op: &mut Operation<'_>, piece: &WrittenPiece) -> Result<()> {
    let WrittenPiece { ino, offset, page, start, length, .. } = *piece;
    op.insert(key(ino, offset), &Extent { page, start, length, born: op.generation() }.encode()).map(drop)
}

/// Returns whether the file may have inline data, now or after writeback of its dirty data.
pub(crate) fn may_be_inline(inode: &InodeValue) -> bool {
    inode.bytes <= crate::format::MAX_VALUE as u64
}

pub(crate) fn load_inline(view: View<'_>, ino: Ino, inode: &InodeValue) -> Result<Option<Vec<u8>>> {
    // Inline data counts in `bytes` and is never longer than a value (specification 7).
    if inode.bytes == 0 || inode.bytes > crate::format::MAX_VALUE as u64 {
        return Ok(None);
    }
    view.get(inline_key(ino), |value| Ok(value.to_vec()))
}

pub(crate) fn inline_key(ino: Ino) -> Key {
    Key::new(ino.0, kind::INLINE, 0)
}

/// Replaces the inline data; an empty value removes the record.
pub(crate) fn set_inline(op: &mut Operation<'_>, ino: Ino, inode: &mut InodeValue, value: &[u8]) -> Result<()> {
    if let Some(old) = load_inline(op.view(), ino, inode)? {
        inode.bytes = inode.bytes.saturating_sub(old.len() as u64);
        if value.is_empty() {
            op.remove(inline_key(ino))?;
        }
    }
    if !value.is_empty() {
        op.insert(inline_key(ino), value)?;
        inode.bytes = inode.bytes.saturating_add(value.len() as u64);
    }
    Ok(())
}

/// Files up to this many bytes are packed: with four or more on a page, sharing saves the rounding
/// up to blocks.
pub(super) const PACK: u64 = 32 * 1024;

/// Files up to this many bytes are stored inline in the tree. To be decided by measurement (design
/// 3.2): a packed file costs an extent of 73 bytes and a share of a page, an inline one its bytes
/// in every walk over the inodes.
pub(super) const INLINE: u64 = 256;

/// Items of one packed page (specification 5.3 bounds the page, `write_packed` the number).
pub(super) const PACK_FILES: usize = 256;

pub(super) fn compression_of(options: &FsOptions, flags: u32) -> Compression {
    if flags & inode_flags::NO_COMPRESS == 0 { options.compression } else { Compression::Off }
}

pub(super) fn packs(options: &FsOptions, flags: u32) -> bool {
    options.pack && flags & inode_flags::NO_PACK == 0
}

pub(super) struct SharedPage<T> {
    pub(super) items: Vec<T>,
    pub(super) bytes: usize,
    pub(super) compression: Compression,
}

pub(super) type SharedPages<T> = Vec<SharedPage<T>>;

/// Groups items into pages shared by files of one owner and one compression setting, in the order
/// of arrival.
pub(super) struct Packer<T> {
    options: FsOptions,
    /// Maximum items of a page.
    most: usize,
    /// Keyed by owner and compression: the contents of one page are read, and lost, together.
    open: BTreeMap<(u32, Compression), SharedPage<T>>,
    full: Vec<SharedPage<T>>,
}

impl<T> Packer<T> {
    pub(super) fn new(options: FsOptions, most: usize) -> Packer<T> {
        Packer { options, most, open: BTreeMap::new(), full: Vec::new() }
    }

    /// Adds an item of `bytes` bytes (at most `MAX_DATA`) of a file with this owner and these
    /// flags.
    pub(super) fn add(&mut self, uid: u32, flags: u32, bytes: usize, item: T) {
        let compression = compression_of(&self.options, flags);
        let empty = || SharedPage { items: Vec::new(), bytes: 0, compression };
        if !packs(&self.options, flags) {
            self.full.push(SharedPage { items: vec![item], bytes, compression });
            return;
        }
        let page = self.open.entry((uid, compression)).or_insert_with(empty);
        if page.items.len() == self.most || page.bytes + bytes > MAX_DATA {
            self.full.push(std::mem::replace(page, empty()));
        }
        page.items.push(item);
        page.bytes += bytes;
    }

    pub(super) fn pages(self) -> SharedPages<T> {
        self.full.into_iter().chain(self.open.into_values()).collect()
    }
}

/// Sorts the ranges and joins overlapping and adjacent ones.
pub(crate) fn join_ranges<T: Copy + Ord>(mut ranges: Vec<Range<T>>) -> Vec<Range<T>> {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut joined: Vec<Range<T>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

/// Returns the parts of `range` that no range of `others` (ascending) overlaps.
pub(crate) fn gaps(range: Range<u64>, others: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut gaps = Vec::new();
    let mut at = range.start;
    for other in others.filter(|other| other.end > range.start && other.start < range.end) {
        if other.start > at {
            gaps.push(at..other.start);
        }
        at = at.max(other.end);
    }
    if at < range.end {
        gaps.push(at..range.end);
    }
    gaps
}

#[cfg(test)]
mod tests {
    #![allow(clippy::single_range_in_vec_init)] // a list of ranges that has one
    use super::*;
    use crate::fs::SyncProfile;

    #[test]
    fn a_page_is_shared_by_files_of_one_owner_and_setting_as_far_as_it_goes() {
        let options = FsOptions {
            max_dirty_bytes: 0,
            sync: SyncProfile::Periodic,
            pack: true,
            compression: Compression::Default,
        };
        let mut packer = Packer::new(options, PACK_FILES);
        let third = MAX_DATA / 3;
        let alone = inode_flags::NO_PACK;
        let plain = inode_flags::NO_COMPRESS;
        let files =
            [(1, 0, third), (2, 0, 100), (1, plain, 100), (1, 0, third), (1, alone, 100), (1, 0, third + 3), (1, 0, 1)];
        for (number, (uid, flags, bytes)) in files.into_iter().enumerate() {
            packer.add(uid, flags, bytes, number);
        }
        (0..=PACK_FILES).for_each(|number| packer.add(3, 0, 1, 100 + number));
        let pages: Vec<_> = packer.pages().into_iter().map(|page| (page.items, page.bytes, page.compression)).collect();
        let many: Vec<usize> = (100..100 + PACK_FILES).collect();
        let expected = [
            (vec![4], 100, Compression::Default),
            (vec![0, 3], 2 * third, Compression::Default),
            (many, PACK_FILES, Compression::Default),
            (vec![2], 100, Compression::Off),
            (vec![5, 6], third + 4, Compression::Default),
            (vec![1], 100, Compression::Default),
            (vec![100 + PACK_FILES], 1, Compression::Default),
        ];
        assert_eq!(pages, expected);
    }

    #[test]
    fn what_overlaps_or_touches_is_one_range() {
        assert_eq!(join_ranges(vec![7..9, 0..3, 3..4, 1..2, 8..12_u64]), [0..4, 7..12]);
        assert_eq!(join_ranges(vec![5..6, 0..9_u32]), [0..9]);
        assert_eq!(join_ranges(Vec::<Range<u32>>::new()), []);
    }

    #[test]
    fn gaps_are_what_no_other_range_overlaps() {
        let gaps_in = |range, others: &[Range<u64>]| gaps(range, others.iter().cloned());
        assert_eq!(gaps_in(10..20, &[0..5, 8..12, 12..14, 15..16, 19..30, 40..41]), [14..15, 16..19]);
        assert_eq!(gaps_in(10..20, &[]), [10..20]);
        assert_eq!(gaps_in(10..20, &[5..25]), []);
        assert_eq!(gaps_in(10..10, &[]), []);
    }
}
