//! Carries pages of file data over: what no extent names is left behind, and what several name is written once.
//!
//! Memory: about 150 bytes for each page that several extents name, in any of the moments, since a later moment may name what an earlier one had written.

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

/// Items of a page at most (specification 5.3).
const MAX_ITEMS: usize = 4096;

/// A page that several extents name, in one moment or in several.
#[derive(Default)]
struct Shared {
    /// What they name of it, joined and ascending once the page is placed.
    ranges: Vec<Range<u32>>,
    /// Those that come with any moment.
    extents: u32,
    placed: Option<Pointer>,
}

/// Where an extent's bytes are in the new archive.
struct Placed {
    page: Pointer,
    start: u32,
    /// The page is new, and so many extents will come that name it.
    adopt: Option<u32>,
}

/// Pages of the old archive and their copies.
pub(in crate::archive) struct Pages<'a> {
    from: &'a Volume,
    state: &'a State,
    to: &'a Volume,
    /// By what names the page: all moments lie in one file, so none of them takes the place of another.
    shared: HashMap<Pointer, Shared>,
    /// The page that was looked up last, and whether several extents name it: neighbours are often in one page.
    last: Option<(Pointer, bool)>,
    /// How a failure of the new file is said.
    said: fn(Error) -> Error,
}

impl<'a> Pages<'a> {
    pub(in crate::archive) fn new(
        from: &'a Volume,
        state: &'a State,
        to: &'a Volume,
        said: fn(Error) -> Error,
    ) -> Pages<'a> {
        Pages { from, state, to, shared: HashMap::new(), last: None, said }
    }

    /// To be called with every extent that comes with a moment before the first is placed.
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

    /// Makes `value`, the extent at `key`, name its page where that is in the new file, and writes the page if it is not there already: `adopted` gets a new
    /// one, with how many extents will name it. Answers the bytes of file data.
    pub(in crate::archive) fn carry(
        &mut self,
        key: Key,
        value: &mut Vec<u8>,
        adopted: &mut Vec<(Pointer, u32)>,
    ) -> Result<u64> {
        let extent = Extent::decode(value)?;
        let Placed { page, start, adopt } = self.place(Ino(key.object), key.sub, &extent)?;
        adopted.extend(adopt.map(|extents| (page, extents)));
        *value = Extent { page, start, ..extent }.encode().to_vec();
        Ok(u64::from(extent.length))
    }

    /// Writes the page of `extent`, if it is not there already.
    fn place(&mut self, ino: Ino, offset: u64, extent: &Extent) -> Result<Placed> {
        let Some(shared) = self.shared.get_mut(&extent.page) else {
            let range = extent.start..extent.start + extent.length;
            let page = self.copy(ino, offset, extent, std::slice::from_ref(&range))?;
            return Ok(Placed { page, start: 0, adopt: Some(1) });
        };
        if let Some(page) = shared.placed {
            return Ok(Placed { page, start: moved(&shared.ranges, extent.start), adopt: None });
        }
        shared.ranges = join(std::mem::take(&mut shared.ranges));
        let (ranges, extents) = (shared.ranges.clone(), shared.extents);
        let page = self.copy(ino, offset, extent, &ranges)?;
        if let Some(shared) = self.shared.get_mut(&extent.page) {
            shared.placed = Some(page);
        }
        Ok(Placed { page, start: moved(&ranges, extent.start), adopt: Some(extents) })
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
        let kept = plain(&opened, ranges)?;
        self.to.write_framed(&reframed(&opened, ranges, &kept, (ino, offset))?).map_err(self.said)
    }
}

/// The plain bytes of the ranges, one after the other.
fn plain(opened: &OpenedPage, ranges: &[Range<u32>]) -> Result<Vec<u8>> {
    let table = opened.table()?;
    let mut plain = Vec::with_capacity(table.plain_length as usize);
    for cell in 0..table.cells.len() {
        plain.extend_from_slice(&opened.read_cell(cell)?);
    }
    Ok(ranges.iter().map(|range| &plain[range.start as usize..range.end as usize]).collect::<Vec<_>>().concat())
}

/// The page as it is: its cells stay as they are compressed.
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

/// A page of `kept`, the bytes of the ranges.
fn reframed<'a>(
    opened: &'a OpenedPage,
    ranges: &[Range<u32>],
    kept: &'a [u8],
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
        return Ok(frame::data_page(prologue.owner, items[0].offset, kept, compress));
    }
    if items.is_empty() {
        return Ok(frame::data_page(ino.0, offset, kept, compress));
    }
    // They serve rescue alone; extents do not need them.
    items.truncate(MAX_ITEMS);
    Ok(frame::packed_page(kept, &items, compress))
}

/// Where byte `start` of the old page lies in one made of `ranges`.
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
