//! Reads of file data: only the cells that a range touches are read and opened, whole ones straight into the caller's buffer.
//!
//! READ-1  Nothing is handed out before its tag was verified: a cell's tag comes from the head, the head's from the pointer.
//! READ-2  A head in memory is as good as one read again: what a pointer with this tag names never changes.
//! READ-3  Cells that are wanted whole pass by the cell cache: the kernel keeps them. Of the others the rest is likely to be wanted next.

use std::ops::Range;
use std::sync::Arc;

use super::Pager;
use super::buffer_pool::grow_to;
use crate::error::{Error, Result};
use crate::format::data_head::PackedItem;
use crate::format::page::PageKind;
use crate::format::{BLOCK, MAX_DATA, NODE_BLOCKS, Pointer};
use crate::frame::{CELL_LOG2, DataHead, plain_cell};

impl Pager {
    /// Runs `f` on `length` bytes of any content: stored bytes on their way to the caller, at most
    /// one page for each read that runs.
    fn with_scratch<R>(&self, length: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
        self.scratch.with_buffer(|buffer| f(grow_to(buffer, length)))
    }

    /// Fills `out` with the plain file bytes from `start` of a data or packed page.
    ///
    /// # Errors
    /// `Damaged` when a part that is needed fails, or the page has fewer bytes; what `out` then holds is no file data.
    pub(crate) fn read_data(&self, pointer: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        self.retry_evicted(pointer, || self.read_cells_of(pointer, start, out))
    }

    fn read_cells_of(&self, pointer: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        let page = PageReader::begin(self, pointer, start, out.len() as u32)?;
        let head = page.head()?;
        let table = &head.table;
        let (mut at, mut left) = (start as usize, out);
        if at + left.len() > table.plain_length as usize {
            return Err(extent_beyond_page(pointer));
        }
        let end = at + left.len();
        let size = table.cell_size as usize;
        while at < end {
            let (cell, within) = (at / size, at % size);
            let wholes = if within > 0 {
                0
            } else if end == table.plain_length as usize {
                table.cells.len() - cell
            } else {
                end / size - cell
            };
            let count = match wholes {
                0 => (size - within).min(end - at),
                _ => (wholes * size).min(end - at),
            };
            let (target, rest) = left.split_at_mut(count);
            if wholes > 0 {
                page.read_whole(&head, cell..cell + wholes, target)?;
            } else {
                page.read_part(&head, cell, within, target)?;
            }
            at += count;
            left = rest;
        }
        Ok(())
    }

    /// Tells the medium what [`Pager::read_data`] is going to be asked for: pages, each with its first plain byte and their count. Of pages
    /// whose head is not in memory two places are read one after the other, and of a long range many pages; a disk can fetch them side
    /// by side, and neighbours in one go. Of the others only what lies on another machine, where several are waited for one after the other.
    pub(crate) fn prefetch_data<'a>(&self, parts: impl Iterator<Item = (&'a Pointer, u32, u32)>) {
        let mut places: Vec<Range<u64>> = Vec::new();
        let is_remote = self.is_remote();
        let mut parts = parts.peekable();
        let mut is_alone = true;
        while let Some((pointer, start, length)) = parts.next() {
            is_alone &= parts.peek().is_none();
            let begin = pointer.run.offset();
            if self.heads.has(pointer) {
                if let Some(place) = self.missing_cells(pointer, start, length).filter(|_| is_remote && !is_alone) {
                    places.push(begin + place.start as u64..begin + place.end as u64);
                }
                continue;
            }
            // READ-1 is not touched: a pointer that leads nowhere is refused when it is read.
            if self.check_address(pointer).is_err() {
                continue;
            }
            let part = estimated_range(pointer.run.bytes(), start, length);
            // Another machine is asked for both at once.
            if is_remote || part.start <= 2 * BLOCK {
                places.push(begin..begin + part.end);
            } else {
                places.push(begin..begin + BLOCK);
                places.push(begin + part.start..begin + part.end);
            }
        }
        self.hint_ranges(places, 0);
    }

    /// Where the cells lie in a page whose head is in memory, unless all of them are, too.
    fn missing_cells(&self, pointer: &Pointer, start: u32, length: u32) -> Option<Range<usize>> {
        let head = self.heads.get(pointer)?;
        let size = head.table.cell_size as usize;
        let end = (start as usize + length as usize).div_ceil(size).min(head.table.cells.len());
        let cells = start as usize / size..end;
        let is_here = cells.clone().all(|cell| self.cells.has(&(*pointer, cell as u32)));
        (!cells.is_empty() && !is_here).then(|| head.stored_range(&cells))
    }

    /// The same for pages that are likely to be read soon, in any order: neighbours are named together, also with a little between them.
    pub(crate) fn prefetch_pages<'a>(&self, pages: impl Iterator<Item = &'a Pointer>) {
        let named = pages.filter(|pointer| self.check_address(pointer).is_ok());
        let mut places: Vec<Range<u64>> =
            named.map(|pointer| pointer.run.offset()..pointer.run.offset() + pointer.run.bytes()).collect();
        places.sort_unstable_by_key(|place| place.start);
        self.hint_ranges(places, PREFETCH_GAP);
    }

    /// Names places to the medium in their order: those together of which one begins in the other, or behind it with so much between them at most.
    fn hint_ranges(&self, mut places: Vec<Range<u64>>, between: u64) {
        places.dedup_by(|place, before| {
            let is_near = (before.start..=before.end + between).contains(&place.start);
            if is_near {
                before.end = before.end.max(place.end);
            }
            is_near
        });
        for place in places.iter().filter(|place| !place.is_empty()) {
            self.storage.will_need(place.start, place.end - place.start);
        }
    }

    /// Whether the archive is on another machine.
    pub(crate) fn is_remote(&self) -> bool {
        self.storage.is_remote()
    }

    /// What lies in a packed page; None when it is a page of another kind.
    ///
    /// # Errors
    /// `Damaged` also when something else took the page's place.
    pub(crate) fn packed_items(&self, pointer: &Pointer) -> Result<Option<Vec<PackedItem>>> {
        self.check_address(pointer)?;
        let offset = pointer.run.offset();
        let mut bytes = vec![0; BLOCK as usize];
        self.storage.read_at(offset, &mut bytes)?;
        let page_start = self.cipher.open_start(pointer, &bytes)?;
        if page_start.kind() != PageKind::Packed {
            return Ok(None);
        }
        if page_start.main_end() > bytes.len() {
            bytes = vec![0; page_start.main_end()];
            self.storage.read_at(offset, &mut bytes)?;
        }
        self.cipher.open_items(pointer, &page_start, &mut bytes).map(Some)
    }
}

/// A page that is read.
struct PageReader<'a> {
    pager: &'a Pager,
    pointer: &'a Pointer,
    /// How it begins, when that came at once.
    prefetched: Vec<u8>,
}

impl<'a> PageReader<'a> {
    /// From another machine's process head and cells come together, unless the head is here, or more lies between them than is wanted: a way
    /// between two processes costs as much as copying some cells.
    fn begin(pager: &'a Pager, pointer: &'a Pointer, start: u32, length: u32) -> Result<PageReader<'a>> {
        let mut page = PageReader { pager, pointer, prefetched: Vec::new() };
        if pager.is_remote() && !pager.heads.has(pointer) {
            pager.check_address(pointer)?;
            let part = estimated_range(pointer.run.bytes(), start, length);
            if part.start.saturating_sub(BLOCK) <= part.end - part.start {
                let mut prefetched = vec![0; part.end.max(BLOCK) as usize];
                match page.read_stored(0, &mut prefetched) {
                    Ok(()) => page.prefetched = prefetched,
                    // What is gone may be nothing that is wanted: its parts tell.
                    Err(Error::Damaged(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(page)
    }

    /// Fills `bytes` with those of the page from `at`, as they are stored.
    fn read_stored(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        match self.prefetched.get(at..at + bytes.len()) {
            Some(prefetched) => bytes.copy_from_slice(prefetched),
            None => self.pager.storage.read_at(self.pointer.run.offset() + at as u64, bytes)?,
        }
        Ok(())
    }

    fn head(&self) -> Result<Arc<DataHead>> {
        let PageReader { pager, pointer, .. } = *self;
        if let Some(head) = pager.heads.get(pointer) {
            return Ok(head);
        }
        pager.check_address(pointer)?;
        let head = pager.with_scratch(BLOCK as usize, |block| {
            self.read_stored(0, block)?;
            let page_start = pager.cipher.open_start(pointer, block)?;
            if page_start.main_end() <= block.len() {
                return pager.cipher.open_head(pointer, &page_start, block);
            }
            // Many packed files: bounded by the length of a page.
            let mut longer = vec![0; page_start.main_end()];
            self.read_stored(0, &mut longer)?;
            pager.cipher.open_head(pointer, &page_start, &mut longer)
        })?;
        let head = Arc::new(head);
        pager.heads.put(*pointer, head.clone(), head.bytes());
        Ok(head)
    }

    /// Reads whole cells; raw ones are read and opened where they are wanted.
    fn read_whole(&self, head: &DataHead, cells: Range<usize>, out: &mut [u8]) -> Result<()> {
        let entries = &head.table.cells[cells.clone()];
        if entries.iter().all(|cell| cell.raw) {
            return self.read_cells(head, cells, out);
        }
        self.pager.with_scratch(head.stored_range(&cells).len(), |stored| {
            self.read_cells(head, cells, stored)?;
            let (mut stored, mut out) = (&*stored, out);
            for entry in entries {
                let (one, rest) = stored.split_at(entry.stored as usize);
                let (target, others) = out.split_at_mut(entry.plain_length as usize);
                plain_cell(entry, one, target)?;
                (stored, out) = (rest, others);
            }
            Ok(())
        })
    }

    /// Copies bytes `within..` of one cell, from the cache if it is there.
    fn read_part(&self, head: &DataHead, cell: usize, within: usize, out: &mut [u8]) -> Result<()> {
        let part = within..within + out.len();
        let (cache, key) = (&self.pager.cells, (*self.pointer, cell as u32));
        if let Some(plain) = cache.get(&key) {
            out.copy_from_slice(&plain[part]);
            return Ok(());
        }
        let entry = &head.table.cells[cell];
        let plain = self.pager.with_scratch(entry.stored as usize, |stored| {
            self.read_cells(head, cell..cell + 1, stored)?;
            if entry.raw {
                return Ok(stored.to_vec());
            }
            let mut plain = vec![0; entry.plain_length as usize];
            plain_cell(entry, stored, &mut plain)?;
            Ok::<_, Error>(plain)
        })?;
        out.copy_from_slice(&plain[part]);
        let bytes = plain.len();
        cache.put(key, Arc::new(plain), bytes);
        Ok(())
    }

    /// Reads consecutive cells as they are stored and opens them in place.
    fn read_cells(&self, head: &DataHead, cells: Range<usize>, bytes: &mut [u8]) -> Result<()> {
        self.read_stored(head.stored_range(&cells).start, bytes)?;
        self.pager.cipher.open_cells(self.pointer, head, cells, bytes)
    }
}

/// What is rather read along than asked for apart: a node or some.
const PREFETCH_GAP: u64 = 64 << 10;

/// Where plain bytes probably lie in a page of `bytes`, as far as that can be told without its head: the page is taken for full and its cells for
/// equally long. Exact for a full page of raw cells; else a block more on both sides.
fn estimated_range(bytes: u64, start: u32, length: u32) -> Range<u64> {
    if bytes <= NODE_BLOCKS * BLOCK {
        return 0..bytes; // all of it comes as fast as a part
    }
    let (full, cell) = (MAX_DATA as u64, 1 << CELL_LOG2);
    let head = bytes.saturating_sub(full);
    let slack = if head > 0 { 0 } else { BLOCK };
    let place = |plain: u64| head + plain * (bytes - head) / full;
    let (first, end) = (u64::from(start) / cell * cell, (u64::from(start) + u64::from(length)).next_multiple_of(cell));
    let to = (place(end) + slack).min(bytes);
    place(first).saturating_sub(slack).min(to)..to
}

fn extent_beyond_page(pointer: &Pointer) -> Error {
    Error::damaged(format!(
        "extent reaches beyond its page: block={} generation={}",
        pointer.run.address, pointer.generation.0
    ))
}

#[cfg(test)]
mod tests;
