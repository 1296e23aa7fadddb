//! File data reads: only chunks in the requested range are read; whole ones are decrypted into the
//! caller's buffer.
//!
//! READ-1  No byte is returned before its tag was verified: a chunk's tag comes from the head, the
//!     head's tag from the pointer.
//! READ-2  A cached head is equivalent to a reread one: the page that a pointer with this tag names
//!     never changes.
//! READ-3  Chunks read whole bypass the chunk cache, because the kernel caches them. Of partly read
//!     chunks the rest is likely to be read next.

use std::ops::Range;
use std::sync::Arc;

use super::Pager;
use super::cache::grow_to;
use crate::error::{Error, Result};
use crate::format::page::{PackedItem, PageKind, Prologue};
use crate::format::{BLOCK, Ino, MAX_DATA, NODE_BLOCKS, Pointer};
use crate::frame::{CHUNK_LOG2, DataHead, plain_chunk};

impl Pager {
    /// Runs `f` on a scratch slice of `length` bytes of arbitrary content, for stored bytes in
    /// transit: at most one page per concurrent read.
    fn with_scratch<R>(&self, length: usize, f: impl FnOnce(&mut [u8]) -> R) -> R {
        self.scratch.with_buffer(|buffer| f(grow_to(buffer, length)))
    }

    /// Fills `out` with the plain file bytes from `start` of a data or packed page. Errors:
    /// `Damaged` when a needed part fails verification or the page is shorter; `out` then holds no
    /// file data.
    pub(crate) fn read_data(&self, pointer: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        if out.is_empty() {
            return Ok(());
        }
        self.retry_evicted(pointer, || self.read_chunks_of(pointer, start, out))
    }

    fn read_chunks_of(&self, pointer: &Pointer, start: u32, out: &mut [u8]) -> Result<()> {
        let page = PageReader::open(self, pointer, start, out.len() as u32)?;
        let head = page.head()?;
        let table = &head.table;
        let (mut at, mut remaining) = (start as usize, out);
        if at + remaining.len() > table.plain_length as usize {
            return Err(pointer.damaged("extent reaches beyond its page"));
        }
        let end = at + remaining.len();
        let size = table.chunk_size as usize;
        while at < end {
            let (chunk, within) = (at / size, at % size);
            let wholes = if within > 0 {
                0
            } else if end == table.plain_length as usize {
                table.chunks.len() - chunk
            } else {
                end / size - chunk
            };
            let count = match wholes {
                0 => (size - within).min(end - at),
                _ => (wholes * size).min(end - at),
            };
            let (target, rest) = remaining.split_at_mut(count);
            if wholes > 0 {
                page.read_whole(&head, chunk..chunk + wholes, target)?;
            } else {
                page.read_part(&head, chunk, within, target)?;
            }
            at += count;
            remaining = rest;
        }
        Ok(())
    }

    /// Fills the first bytes of `buffer` with all file bytes of a data or packed page, bypassing
    /// the chunk cache; returns their number. Errors of [`Pager::read_data`].
    pub(crate) fn read_all_data(&self, pointer: &Pointer, buffer: &mut Vec<u8>) -> Result<usize> {
        self.retry_evicted(pointer, || {
            let page = PageReader::open(self, pointer, 0, MAX_DATA as u32)?;
            let head = page.head()?;
            let length = head.table.plain_length as usize;
            page.read_whole(&head, 0..head.table.chunks.len(), grow_to(buffer, length))?;
            Ok(length)
        })
    }

    /// Prefetches what [`Pager::read_data`] will read: pages, each with first plain byte and
    /// length. Pages without a cached head need two dependent reads, and long ranges need many
    /// pages; a disk can serve these in parallel and merge neighbours. Pages with a cached head are
    /// prefetched from remote storage only, where several sequential reads would each cost a round
    /// trip.
    pub(crate) fn prefetch_data<'a>(&self, parts: impl Iterator<Item = (&'a Pointer, u32, u32)>) {
        let mut places: Vec<Range<u64>> = Vec::new();
        let is_remote = self.is_remote();
        let mut parts = parts.peekable();
        let mut is_alone = true;
        while let Some((pointer, start, length)) = parts.next() {
            is_alone &= parts.peek().is_none();
            let begin = pointer.run.offset();
            if self.heads.has(pointer) {
                if let Some(place) = self.missing_chunks(pointer, start, length).filter(|_| is_remote && !is_alone) {
                    places.push(begin + place.start as u64..begin + place.end as u64);
                }
                continue;
            }
            // READ-1 is unaffected: an invalid pointer is rejected when it is read.
            if self.check_address(pointer).is_err() {
                continue;
            }
            let part = estimated_range(pointer.run.bytes(), start, length);
            // Remote storage gets one request for both.
            if is_remote || part.start <= 2 * BLOCK {
                places.push(begin..begin + part.end);
            } else {
                places.push(begin..begin + BLOCK);
                places.push(begin + part.start..begin + part.end);
            }
        }
        self.hint_ranges(places, 0);
    }

    /// Returns the stored range of the chunks in a page with a cached head, or `None` when all of
    /// them are cached.
    fn missing_chunks(&self, pointer: &Pointer, start: u32, length: u32) -> Option<Range<usize>> {
        let head = self.heads.get(pointer)?;
        let size = head.table.chunk_size as usize;
        let end = (start as usize + length as usize).div_ceil(size).min(head.table.chunks.len());
        let chunks = start as usize / size..end;
        let is_here = chunks.clone().all(|chunk| self.chunks.has(&(*pointer, chunk as u32)));
        (!chunks.is_empty() && !is_here).then(|| head.stored_range(&chunks))
    }

    /// Prefetches pages likely to be read soon, in any order. Merges neighbours, including small
    /// gaps.
    pub(crate) fn prefetch_pages<'a>(&self, pages: impl Iterator<Item = &'a Pointer>) {
        let named = pages.filter(|pointer| self.check_address(pointer).is_ok());
        let mut places: Vec<Range<u64>> =
            named.map(|pointer| pointer.run.offset()..pointer.run.offset() + pointer.run.bytes()).collect();
        places.sort_unstable_by_key(|place| place.start);
        self.hint_ranges(places, PREFETCH_GAP);
    }

    /// Passes ranges to the storage in order, merging each with its predecessor if it overlaps or
    /// starts at most `between` bytes after it.
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

    pub(crate) fn is_remote(&self) -> bool {
        self.storage.is_remote()
    }

    /// Returns the kind of a page of file data and its items: the whole as one item if it is not
    /// packed. Errors: `Damaged` also when other content replaced the page.
    pub(crate) fn page_items(&self, pointer: &Pointer) -> Result<(PageKind, Vec<PackedItem>)> {
        self.check_address(pointer)?;
        let offset = pointer.run.offset();
        let mut bytes = vec![0; BLOCK as usize];
        self.storage.read_at(offset, &mut bytes)?;
        let page_start = self.cipher.open_start(pointer, &bytes)?;
        let Prologue { kind, owner, position, plain_length, .. } = page_start.prologue;
        if kind != PageKind::Packed {
            return Ok((kind, vec![PackedItem { ino: Ino(owner), offset: position, start: 0, length: plain_length }]));
        }
        if page_start.main_end() > bytes.len() {
            bytes = vec![0; page_start.main_end()];
            self.storage.read_at(offset, &mut bytes)?;
        }
        Ok((kind, self.cipher.open_items(pointer, &page_start, &mut bytes)?))
    }
}

struct PageReader<'a> {
    pager: &'a Pager,
    pointer: &'a Pointer,
    /// First bytes of the page, if they were read in one request.
    prefetched: Vec<u8>,
}

impl<'a> PageReader<'a> {
    /// Opens a page for reading. On remote storage, reads head and chunks in one request, unless
    /// the head is cached or the gap between them exceeds the requested bytes. An IPC round trip
    /// costs as much as copying some chunks.
    fn open(pager: &'a Pager, pointer: &'a Pointer, start: u32, length: u32) -> Result<PageReader<'a>> {
        let mut page = PageReader { pager, pointer, prefetched: Vec::new() };
        if pager.is_remote() && !pager.heads.has(pointer) {
            pager.check_address(pointer)?;
            let part = estimated_range(pointer.run.bytes(), start, length);
            if part.start.saturating_sub(BLOCK) <= part.end - part.start {
                let mut prefetched = vec![0; part.end.max(BLOCK) as usize];
                match page.read_stored(0, &mut prefetched) {
                    Ok(()) => page.prefetched = prefetched,
                    // The missing bytes may not be needed; reads of the parts decide.
                    Err(Error::Damaged(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(page)
    }

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
            // Page with many packed files; bounded by the length of a page.
            let mut longer = vec![0; page_start.main_end()];
            self.read_stored(0, &mut longer)?;
            pager.cipher.open_head(pointer, &page_start, &mut longer)
        })?;
        let head = Arc::new(head);
        pager.heads.put(*pointer, head.clone(), head.bytes());
        Ok(head)
    }

    /// Reads whole chunks; uncompressed ones are read and decrypted in the output buffer.
    fn read_whole(&self, head: &DataHead, chunks: Range<usize>, out: &mut [u8]) -> Result<()> {
        let entries = &head.table.chunks[chunks.clone()];
        if entries.iter().all(|chunk| chunk.raw) {
            return self.read_chunks(head, chunks, out);
        }
        self.pager.with_scratch(head.stored_range(&chunks).len(), |stored| {
            self.read_chunks(head, chunks, stored)?;
            let (mut stored, mut out) = (&*stored, out);
            for entry in entries {
                let (one, rest) = stored.split_at(entry.stored as usize);
                let (target, others) = out.split_at_mut(entry.plain_length as usize);
                plain_chunk(entry, one, target)?;
                (stored, out) = (rest, others);
            }
            Ok(())
        })
    }

    /// Copies bytes from offset `within` of one chunk, through the chunk cache.
    fn read_part(&self, head: &DataHead, chunk: usize, within: usize, out: &mut [u8]) -> Result<()> {
        let part = within..within + out.len();
        let (cache, key) = (&self.pager.chunks, (*self.pointer, chunk as u32));
        if let Some(plain) = cache.get(&key) {
            out.copy_from_slice(&plain[part]);
            return Ok(());
        }
        let entry = &head.table.chunks[chunk];
        let plain = self.pager.with_scratch(entry.stored as usize, |stored| {
            self.read_chunks(head, chunk..chunk + 1, stored)?;
            if entry.raw {
                return Ok(stored.to_vec());
            }
            let mut plain = vec![0; entry.plain_length as usize];
            plain_chunk(entry, stored, &mut plain)?;
            Ok::<_, Error>(plain)
        })?;
        out.copy_from_slice(&plain[part]);
        let bytes = plain.len();
        cache.put(key, Arc::new(plain), bytes);
        Ok(())
    }

    fn read_chunks(&self, head: &DataHead, chunks: Range<usize>, bytes: &mut [u8]) -> Result<()> {
        self.read_stored(head.stored_range(&chunks).start, bytes)?;
        self.pager.cipher.open_chunks(self.pointer, head, chunks, bytes)
    }
}

/// Largest gap in bytes that is prefetched rather than split into two requests: some nodes.
const PREFETCH_GAP: u64 = 64 << 10;

/// Estimates the stored range of plain bytes in a page of `bytes` bytes without its head, assuming
/// a full page with chunks of equal length. Exact for a full page of raw chunks; otherwise padded
/// by one block on both sides.
fn estimated_range(bytes: u64, start: u32, length: u32) -> Range<u64> {
    if bytes <= NODE_BLOCKS * BLOCK {
        return 0..bytes; // all of it comes as fast as a part
    }
    let (full, chunk) = (MAX_DATA as u64, 1 << CHUNK_LOG2);
    let head = bytes.saturating_sub(full);
    let slack = if head > 0 { 0 } else { BLOCK };
    let place = |plain: u64| head + plain * (bytes - head) / full;
    let (first, end) =
        (u64::from(start) / chunk * chunk, (u64::from(start) + u64::from(length)).next_multiple_of(chunk));
    let to = (place(end) + slack).min(bytes);
    place(first).saturating_sub(slack).min(to)..to
}

#[cfg(test)]
mod tests;
