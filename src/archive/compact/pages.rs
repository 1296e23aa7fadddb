//! Copies pages of file data: drops parts that no extent names, and writes a shared page once.
//!
//! Memory: about 150 bytes for each page that several extents name in any version, since a later
//! version may name a page that was written for an earlier one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::format::data_head::{Cell, PackedItem};
use crate::format::page::PageKind;
use crate::format::values::Extent;
use crate::format::{Ino, Key, Pointer};
use crate::frame::{self, OpenedPage, PageContent, PlainPage};
use crate::fs::ranges::join;
use crate::txn::{State, Volume};

/// Maximum items of a page (specification 5.3).
const MAX_ITEMS: usize = 4096;

/// Page named by several extents, in one version or in several.
#[derive(Default)]
struct SharedPage {
    /// Named ranges; merged and ascending once the page is written.
    ranges: Vec<Range<u32>>,
    /// Number of extents in all versions.
    extents: u32,
    written: Option<Pointer>,
}

/// Position of an extent's bytes in the new archive.
struct PlacedExtent {
    page: Pointer,
    start: u32,
    /// For a new page: the number of extents that will name it.
    adopt: Option<u32>,
}

/// Pages of the old archive and their copies.
pub(in crate::archive) struct PageCopier<'a> {
    from: &'a Volume,
    state: &'a State,
    to: &'a Volume,
    /// Shared pages by pointer: all versions are in one file, so their pages have different
    /// addresses.
    shared: HashMap<Pointer, SharedPage>,
    /// Last page that was looked up, and whether it is shared: neighbouring extents are often in
    /// one page.
    last: Option<(Pointer, bool)>,
    /// Adds context to an error of the new file.
    said: fn(Error) -> Error,
}

impl<'a> PageCopier<'a> {
    pub(in crate::archive) fn new(
        from: &'a Volume,
        state: &'a State,
        to: &'a Volume,
        said: fn(Error) -> Error,
    ) -> PageCopier<'a> {
        PageCopier { from, state, to, shared: HashMap::new(), last: None, said }
    }

    /// Registers an extent. Must be called for every extent added in any version before the first
    /// page is written.
    pub(in crate::archive) fn announce(&mut self, extent: &Extent) -> Result<()> {
        let is_shared = match self.last {
            Some((page, is_shared)) if page == extent.page => is_shared,
            _ => self.from.count_in(self.state, &extent.page)? > 1,
        };
        self.last = Some((extent.page, is_shared));
        if is_shared {
            let shared = self.shared.entry(extent.page).or_default();
            shared.extents += 1;
            shared.ranges.push(extent.start..extent.start + extent.length);
            if shared.ranges.len() > 64 {
                shared.ranges = join(std::mem::take(&mut shared.ranges));
            }
        }
        Ok(())
    }

    /// Updates `value`, the extent at `key`, to its page in the new file. Writes the page unless it
    /// is written already; a new page is added to `adopted` with the number of its extents. Returns
    /// the bytes of file data.
    pub(in crate::archive) fn carry(
        &mut self,
        key: Key,
        value: &mut Vec<u8>,
        adopted: &mut Vec<(Pointer, u32)>,
    ) -> Result<u64> {
        let extent = Extent::decode(value)?;
        let PlacedExtent { page, start, adopt } = self.place(Ino(key.object), key.sub, &extent)?;
        adopted.extend(adopt.map(|extents| (page, extents)));
        *value = Extent { page, start, ..extent }.encode().to_vec();
        Ok(u64::from(extent.length))
    }

    /// Writes the page of `extent`, unless it is written already.
    fn place(&mut self, ino: Ino, offset: u64, extent: &Extent) -> Result<PlacedExtent> {
        let Some(shared) = self.shared.get_mut(&extent.page) else {
            let range = extent.start..extent.start + extent.length;
            let page = self.copy(ino, offset, extent, std::slice::from_ref(&range))?;
            return Ok(PlacedExtent { page, start: 0, adopt: Some(1) });
        };
        if let Some(page) = shared.written {
            return Ok(PlacedExtent { page, start: moved(&shared.ranges, extent.start), adopt: None });
        }
        shared.ranges = join(std::mem::take(&mut shared.ranges));
        let (ranges, extents) = (shared.ranges.clone(), shared.extents);
        let page = self.copy(ino, offset, extent, &ranges)?;
        if let Some(shared) = self.shared.get_mut(&extent.page) {
            shared.written = Some(page);
        }
        Ok(PlacedExtent { page, start: moved(&ranges, extent.start), adopt: Some(extents) })
    }

    fn copy(&self, ino: Ino, offset: u64, extent: &Extent, ranges: &[Range<u32>]) -> Result<Pointer> {
        let opened = self.from.open_page(&extent.page)?;
        if !matches!(opened.prologue.kind, PageKind::Data | PageKind::Packed) {
            return Err(Error::damaged(format!("page of another kind: block={}", extent.page.run.address)));
        }
        let length = opened.table()?.plain_length;
        if ranges.last().is_none_or(|last| last.end > length) {
            return Err(Error::damaged("an extent reaches beyond its page"));
        }
        if ranges.len() == 1 && ranges[0] == (0..length) {
            return self.to.write_framed(&whole(&opened)?).map_err(self.said);
        }
        let retained = plain(&opened, ranges)?;
        self.to.write_framed(&reframed(&opened, ranges, &retained, (ino, offset))?).map_err(self.said)
    }
}

/// Returns the plain bytes of the ranges, concatenated.
fn plain(opened: &OpenedPage, ranges: &[Range<u32>]) -> Result<Vec<u8>> {
    let table = opened.table()?;
    let mut plain = Vec::with_capacity(table.plain_length as usize);
    for cell in 0..table.cells.len() {
        plain.extend_from_slice(&opened.read_cell(cell)?);
    }
    Ok(ranges.iter().map(|range| &plain[range.start as usize..range.end as usize]).collect::<Vec<_>>().concat())
}

/// Copies the whole page without recompressing its chunks.
fn whole(opened: &OpenedPage) -> Result<PlainPage<'_>> {
    let (prologue, table) = (opened.prologue, opened.table()?);
    let stored = |cell: &Cell| (Cow::Borrowed(&opened.body()[cell.at as usize..][..cell.stored as usize]), cell.raw);
    let cells = table.cells.iter().map(stored).collect();
    let cell_log2 = table.cell_size.trailing_zeros() as u8; // at most 17
    Ok(PlainPage {
        kind: prologue.kind,
        compressed: false,
        plain_length: prologue.plain_length,
        owner: prologue.owner,
        position: prologue.position,
        content: PageContent::Cells { cell_log2, cells, items: table.items.clone() },
    })
}

/// Builds a page of `retained`, the bytes of the ranges.
fn reframed<'a>(
    opened: &'a OpenedPage,
    ranges: &[Range<u32>],
    retained: &'a [u8],
    (ino, offset): (Ino, u64),
) -> Result<PlainPage<'a>> {
    let prologue = opened.prologue;
    let table = opened.table()?;
    let mut items = Vec::new();
    let mut at = 0;
    for range in ranges {
        for item in &table.items {
            let (from, to) = (item.start.max(range.start), (item.start + item.length).min(range.end));
            if from < to {
                let offset = item.offset + u64::from(from - item.start);
                items.push(PackedItem { ino: item.ino, offset, start: at + from - range.start, length: to - from });
            }
        }
        if prologue.kind == PageKind::Data {
            let offset = prologue.position + u64::from(range.start);
            items.push(PackedItem { ino: Ino(prologue.owner), offset, start: at, length: range.len() as u32 });
        }
        at += range.len() as u32;
    }
    let compress = table.cells.iter().any(|cell| !cell.raw);
    if prologue.kind == PageKind::Data && ranges.len() == 1 {
        return Ok(frame::data_page(prologue.owner, items[0].offset, retained, compress));
    }
    if items.is_empty() {
        return Ok(frame::data_page(ino.0, offset, retained, compress));
    }
    // Used for rescue only; extents do not need them.
    items.truncate(MAX_ITEMS);
    Ok(frame::packed_page(retained, &items, compress))
}

/// Translates offset `start` of the old page to one that consists of `ranges`.
fn moved(ranges: &[Range<u32>], start: u32) -> u32 {
    let mut at = 0;
    for range in ranges {
        if range.contains(&start) {
            return at + start - range.start;
        }
        at += range.len() as u32;
    }
    start
}
