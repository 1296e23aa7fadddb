//! Copies pages of file data: drops parts that no extent names, and writes a shared page once; and
//! the pipeline of two threads in which that happens.
//!
//! Memory: about 150 bytes for each page that several extents name in any version, since a later
//! version may name a page that was written for an earlier one.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::mpsc;
use std::thread;

use crate::error::{Error, Result};
use crate::format::data_head::{Cell, PackedItem};
use crate::format::page::PageKind;
use crate::format::values::Extent;
use crate::format::{Ino, Key, Pointer};
use crate::frame::{self, OpenedPage, PageContent, PlainPage};
use crate::fs::join_ranges;
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
                shared.ranges = join_ranges(std::mem::take(&mut shared.ranges));
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
        shared.ranges = join_ranges(std::mem::take(&mut shared.ranges));
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

/// Maximum parts in the queue.
const WAITING: usize = 16;

/// Passes each part from `read` to `write`, in order, on a separate thread: one reads and seals
/// pages of file data, the other builds the trees that name them, which takes about as long.
///
/// # Errors
/// That of `write`, else that of `read`; either ends both. Parts passed on before `read` failed are
/// written.
pub(in crate::archive) fn relay<T: Send>(
    read: impl FnOnce(&mut dyn FnMut(T) -> Result<()>) -> Result<()>,
    write: impl FnMut(T) -> Result<()> + Send,
) -> Result<()> {
    thread::scope(|scope| {
        let (sender, parts) = mpsc::sync_channel(WAITING);
        let writer = thread::Builder::new()
            .name("relay".into())
            .spawn_scoped(scope, || parts.into_iter().try_for_each(write))
            .map_err(|error| Error::io("cannot start a thread", error))?;
        let was_read = read(&mut |part| {
            // The queue is closed when the writer has failed; then the writer's error is returned.
            sender.send(part).map_err(|_| Error::Invalid("nobody takes what is handed on".into()))
        });
        drop(sender);
        let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        written.and(was_read)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_in_order_and_all_of_them() {
        let mut seen = Vec::new();
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| (0..100).try_for_each(hand_on);
        relay(read, |part| {
            seen.push(part);
            Ok(())
        })
        .unwrap();
        assert_eq!(seen, (0..100).collect::<Vec<_>>());
    }

    #[test]
    fn an_error_of_either_ends_both_and_that_of_the_writer_is_told() {
        let failed = |what: &str| Error::Invalid(what.into());
        let mut handed_on = 0;
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| {
            loop {
                hand_on(0)?;
                handed_on += 1;
            }
        };
        let error = relay(read, |_| Err(failed("writer"))).unwrap_err();
        assert!(error.to_string().contains("writer"), "{error}");
        assert!(handed_on <= WAITING + 1);

        let mut written = 0;
        let read = |hand_on: &mut dyn FnMut(u32) -> Result<()>| {
            hand_on(1)?;
            Err(failed("reader"))
        };
        let error = relay(read, |_| {
            written += 1;
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("reader") && written == 1, "{error}");
    }
}
