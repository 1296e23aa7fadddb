//! Reads many small files together: in the order of their pages, each page once, and on all
//! processors.

use std::ops::{ControlFlow, Range};

use parking_lot::Mutex;

use super::file_data::resize_buffer;
use crate::error::Result;
use crate::format::values::{Extent, InodeValue};
use crate::format::{Ino, Key, Pointer, kind};
use crate::fs::writeback::run_parallel;
use crate::fs::{FileSystem, MAX_SMALL_FILE, extents, inode, mode};
use crate::txn::{ReadView, View};

/// Largest part between two files of one page that is read with them: decompressing it costs less
/// than a request of its own.
const MAX_GAP: u32 = 4096;
/// Minimum bytes per thread: reading them takes 50 us and more, starting a thread about as long.
const MIN_BYTES_PER_THREAD: usize = 128 << 10;

/// Content of a small file: a part of one page.
struct FilePart {
    page: Pointer,
    range: Range<u32>,
    /// Position of the file in the request.
    file: usize,
}

/// Part of a page that is read at once.
struct Segment {
    page: Pointer,
    range: Range<u32>,
}

impl FileSystem {
    /// Reads the whole content of small files into `buffer`, which grows as needed, and returns the
    /// range of each one's content. `None` for a file that the caller must read by itself: it is
    /// large, sparse, dirty, damaged, or in several parts. All content is of one version.
    pub(crate) fn read_small_files(&self, files: &[Option<Ino>], buffer: &mut Vec<u8>) -> Vec<Option<Range<usize>>> {
        // Checked before the version is taken: data accepted until then is in that version, unless
        // it is dirty.
        let nothing_dirty = self.write_buffer.is_empty();
        let is_clean = |ino: &Ino| nothing_dirty || self.write_buffer.find(*ino).is_none();
        let wanted: Vec<(usize, Ino)> =
            files.iter().enumerate().filter_map(|(file, ino)| Some((file, ino.filter(is_clean)?))).collect();
        let reading = ReadView::of(&self.volume, self.volume.state());
        let (mut places, mut inline, mut parts) = (vec![None; files.len()], Vec::new(), Vec::new());
        for (file, ino) in wanted {
            match locate(reading.view(), ino, &mut inline) {
                Ok(Some(Location::Inline(place))) => places[file] = Some(place),
                Ok(Some(Location::Page(page, range))) => parts.push(FilePart { page, range, file }),
                // The caller gets the error when it reads the file.
                Ok(None) | Err(_) => {}
            }
        }
        parts.sort_unstable_by_key(|part| (part.page.run.address, part.range.start));
        let segments = segments(&parts);
        let bytes: usize = segments.iter().map(|segment| segment.range.len()).sum();
        let (stored, read) = resize_buffer(buffer, inline.len() + bytes).split_at_mut(inline.len());
        stored.copy_from_slice(&inline);
        let is_read = self.read_segments(&segments, read);

        let mut parts = parts.into_iter().peekable();
        let mut start = inline.len();
        for (Segment { page, range }, is_read) in segments.iter().zip(is_read) {
            while let Some(part) = parts.next_if(|part| part.page == *page && part.range.end <= range.end) {
                let from = start + (part.range.start - range.start) as usize;
                places[part.file] = is_read.then_some(from..from + part.range.len());
            }
            start += range.len();
        }
        places
    }

    /// Prefetches the first `most` bytes of the content of each file. A hint, which ends at the
    /// first error: the reader of the file gets it.
    pub(crate) fn prefetch_files(&self, files: &[Ino], most: u64) {
        let reading = ReadView::of(&self.volume, self.volume.state());
        let mut pages: Vec<Pointer> = Vec::new();
        for ino in files {
            let Ok(found) = extents::find_overlapping(reading.view(), *ino, 0..most, usize::MAX) else { break };
            pages.extend(found.iter().map(|mapped| mapped.extent.page));
        }
        self.volume.prefetch_pages(pages.iter());
    }

    pub(crate) fn is_remote(&self) -> bool {
        self.volume.is_remote()
    }

    /// Fills `out` with the segments, and returns which of them could be read.
    fn read_segments(&self, segments: &[Segment], mut out: &mut [u8]) -> Vec<bool> {
        let threads = self.writeback.threads.min(out.len() / MIN_BYTES_PER_THREAD);
        self.volume
            .prefetch_data(segments.iter().map(|Segment { page, range }| (page, range.start, range.len() as u32)));
        let mut jobs = Vec::with_capacity(segments.len());
        for segment in segments {
            let (part, rest) = out.split_at_mut(segment.range.len());
            jobs.push((segment, Mutex::new(part)));
            out = rest;
        }
        let read = run_parallel(
            threads,
            1,
            &jobs,
            &mut None,
            |_| 0,
            |jobs, _| {
                let read = |(segment, part): &(&Segment, Mutex<&mut [u8]>)| {
                    self.volume.read_data(&segment.page, segment.range.start, &mut part.lock()).is_ok()
                };
                Ok(jobs.iter().all(read))
            },
        );
        read.unwrap_or_else(|_| vec![false; segments.len()])
    }
}

enum Location {
    /// Range of the collected inline data.
    Inline(Range<usize>),
    Page(Pointer, Range<u32>),
}

/// Finds the content of a file by one scan of its records; appends inline data to `inline`.
fn locate(view: View<'_>, ino: Ino, inline: &mut Vec<u8>) -> Result<Option<Location>> {
    let mut found: Option<InodeValue> = None;
    let mut location = None;
    let end = Key::new(ino.0, kind::EXTENT + 1, 0);
    view.scan(inode::key(ino), end, &mut |key, value| {
        match (key.kind, &found) {
            (kind::INODE, _) => {
                let inode = InodeValue::decode(value)?;
                let is_small = inode.mode & mode::TYPE == mode::REGULAR && inode.size <= MAX_SMALL_FILE.min(inode.trim);
                if !is_small {
                    return Ok(ControlFlow::Break(()));
                }
                if inode.size == 0 {
                    location = Some(Location::Inline(inline.len()..inline.len()));
                    return Ok(ControlFlow::Break(()));
                }
                found = Some(inode);
            }
            (kind::INLINE, Some(inode)) => {
                if value.len() as u64 == inode.size {
                    let start = inline.len();
                    inline.extend_from_slice(value);
                    location = Some(Location::Inline(start..inline.len()));
                }
                return Ok(ControlFlow::Break(()));
            }
            (kind::EXTENT, Some(inode)) => {
                let extent = Extent::decode(value)?;
                if key.sub == 0 && u64::from(extent.length) >= inode.size {
                    let range = extent.start..extent.start + inode.size as u32;
                    location = Some(Location::Page(extent.page, range));
                }
                return Ok(ControlFlow::Break(()));
            }
            (_, Some(_)) => {}
            (_, None) => return Ok(ControlFlow::Break(())),
        }
        Ok(ControlFlow::Continue(()))
    })?;
    Ok(location)
}

/// Joins the sorted parts of a page that are near each other.
fn segments(parts: &[FilePart]) -> Vec<Segment> {
    let mut segments: Vec<Segment> = Vec::new();
    for part in parts {
        match segments.last_mut() {
            Some(last) if last.page == part.page && part.range.start <= last.range.end.saturating_add(MAX_GAP) => {
                last.range.end = last.range.end.max(part.range.end);
            }
            _ => segments.push(Segment { page: part.page, range: part.range.clone() }),
        }
    }
    segments
}
