//! Rewrites the live parts of stale packed pages, so that the bytes of deleted files are freed with
//! the old pages.
//!
//! # Invariants
//! REPACK-1  A repack changes no content: an extent is replaced by the bytes read through it, and
//!     only if it is unchanged in the operation.
//! REPACK-2  A part removed between the reading and the operation makes the new page a stale one,
//!     noted by the same operation.
//! REPACK-3  Pages wait for one to two intervals, so that pages that die as a whole are not
//!     rewritten, and a page that is noted again and again is repacked once per interval at most.
//! REPACK-4  Damage stops neither a search nor a repack: they pass over the unreadable leaf or
//!     page. A purge, closing and background work report it at their end, since dead parts may be
//!     left.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::Mutex;

use super::extents::{self, MappedExtent, PACK_FILES, Packer, SharedPages};
use super::types::FsOptions;
use super::{ShutdownGate, inode};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Ino, Key, Pointer, kind};
use crate::txn::{Operation, Reservation, UnreferencedPages, View, Volume, WrittenPiece, groups_for};

/// Seconds of an interval (REPACK-3); the manual names the delay.
const INTERVAL: i64 = 5;
/// Pages of one step: 1 MiB of content at most.
const PAGES: usize = 8;
/// Maximum parts of a page when only the reserve for deletes has space: each part reserves its own
/// space, all from that reserve.
const PARTS_PER_RESERVE_PAGE: usize = 16;
/// Attempts of `Repacker::run_all` for pages that are noted meanwhile.
const ROUNDS: usize = 4;
/// Maximum records and pages that one step of a search reads.
const SEARCH_RECORDS: usize = 4096;
const SEARCH_PAGES: usize = 64;
/// Maximum addresses of pages that a search remembers: files packed together have neighbouring
/// numbers.
const MAX_SEARCHED_PAGES: usize = 4096;

pub(super) struct Repacker {
    volume: Arc<Volume>,
    environment: Arc<dyn Environment>,
    options: FsOptions,
    /// Held during a repack, so that a purge does not overlook pages that another thread took out.
    progress: Mutex<RepackProgress>,
    /// First damage since the last report that kept a page from being examined or rewritten.
    damage: Mutex<Option<Error>>,
    last_tick: Mutex<i64>,
}

#[derive(Default)]
struct RepackProgress {
    /// Position of the search for stale pages that were never noted (STALE-3).
    search: Option<Key>,
    looked_at: BTreeSet<u64>,
    /// Only repacking changed the archive, which therefore commits itself.
    commits: bool,
}

impl RepackProgress {
    fn begin_search(&mut self) {
        self.search = Some(Key::new(1, 0, 0));
        self.looked_at.clear();
    }
}

struct PagePart {
    ino: Ino,
    offset: u64,
    extent: Extent,
}

impl PagePart {
    /// Returns whether a new piece contains a part of the extent.
    fn has(&self, piece: &WrittenPiece) -> bool {
        let range = self.offset..self.offset + u64::from(self.extent.length);
        piece.ino == self.ino && range.contains(&piece.offset)
    }
}

impl Repacker {
    pub(super) fn new(volume: Arc<Volume>, environment: Arc<dyn Environment>, options: FsOptions) -> Repacker {
        Repacker {
            volume,
            environment,
            options,
            progress: Mutex::default(),
            damage: Mutex::default(),
            last_tick: Mutex::default(),
        }
    }

    /// Starts a search of the whole tree for stale pages that the previous session noted (STALE-3).
    pub(super) fn begin_search(&self) {
        self.progress.lock().begin_search();
    }

    /// Runs one background step; returns whether there is more to do at once.
    pub(super) fn step(&self) -> Result<bool> {
        let Some(mut progress) = self.progress.try_lock() else { return Ok(false) };
        if self.interval_is_over() {
            self.volume.stale_pages().tick();
        }
        if self.volume.stale_pages().take_overflow() {
            progress.begin_search();
        }
        let searching = self.volume.stale_pages().has_room(SEARCH_PAGES) && self.search_step(&mut progress)?;
        let idle = !self.volume.writer().is_dirty();
        let repacked = match self.repack_due(false) {
            // Retried an interval later.
            Err(Error::NoSpace(_)) => false,
            repacked => repacked?,
        };
        progress.commits |= repacked && idle;
        if !repacked && std::mem::take(&mut progress.commits) {
            self.volume.commit()?;
        }
        self.report_damage()?;
        Ok(searching || repacked)
    }

    /// Repacks all noted pages; a purge, which stops when closing begins, also searches for others.
    /// Pages that become stale meanwhile may be left. When the archive closes (`purge` is `None`),
    /// the reserve for deletes may be used, since nothing else will need it. Errors: `Damaged` or
    /// `Io` at the end (REPACK-4).
    pub(super) fn run_all(&self, purge: Option<&ShutdownGate>) -> Result<()> {
        self.repack_all(purge, purge.is_some(), purge.is_none())?;
        self.report_damage()
    }

    /// Repacks all noted pages before a snapshot would preserve the bytes of files deleted before.
    pub(super) fn run_noted(&self, closing: &ShutdownGate) -> Result<()> {
        self.repack_all(Some(closing), false, false)
    }

    fn repack_all(&self, closing: Option<&ShutdownGate>, search: bool, at_end: bool) -> Result<()> {
        let go_on = || closing.map_or(Ok(()), ShutdownGate::check_open);
        let mut progress = self.progress.lock();
        if search || self.volume.stale_pages().take_overflow() {
            // Damage that an earlier search met may be gone with its file.
            self.damage.lock().take();
            progress.begin_search();
        }
        loop {
            for _ in 0..ROUNDS {
                self.volume.stale_pages().hurry();
                while self.repack_due(at_end)? {
                    go_on()?;
                }
                if self.volume.stale_pages().is_empty() {
                    break;
                }
            }
            if progress.search.is_none() {
                return Ok(());
            }
            self.search_step(&mut progress)?;
            go_on()?;
        }
    }

    fn interval_is_over(&self) -> bool {
        let now = self.environment.now().seconds;
        let mut last = self.last_tick.lock();
        // A clock that was set back must not stop the repacking.
        let over = now < *last || now - *last >= INTERVAL;
        if over {
            *last = now;
        }
        over
    }

    /// Searches the next records and the packed pages that they reference; returns whether there
    /// are more.
    fn search_step(&self, progress: &mut RepackProgress) -> Result<bool> {
        let Some(from) = progress.search else { return Ok(false) };
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let (mut pages, mut records, mut next, mut last) = (Vec::new(), 0, None, from);
        let found = view.scan(from, Key::MAX, &mut |key, value| {
            (records, last) = (records + 1, key);
            if key.kind == kind::EXTENT {
                let extent = Extent::decode(value)?;
                if extents::may_be_packed(key.sub, extent.length) && progress.looked_at.insert(extent.page.run.address)
                {
                    pages.push(extent.page);
                }
            }
            if records < SEARCH_RECORDS && pages.len() < SEARCH_PAGES {
                return Ok(ControlFlow::Continue(()));
            }
            next = key.next();
            Ok(ControlFlow::Break(()))
        });
        if let Err(error) = found {
            // REPACK-4. The search would fail at the same record every time.
            progress.search = None;
            self.note_damage(error)?;
            next = next_leaf(view, last)?;
        }
        for page in pages {
            match self.live_parts(view, &page) {
                Ok(Some(_)) => self.volume.stale_pages().note_again(page),
                Ok(None) => {}
                Err(error) => self.note_damage(error)?,
            }
        }
        if progress.looked_at.len() > MAX_SEARCHED_PAGES {
            progress.looked_at.clear();
        }
        progress.search = next;
        Ok(next.is_some())
    }

    /// Keeps the loss of a page for [`Self::report_damage`], and returns any other error.
    fn note_damage(&self, error: Error) -> Result<()> {
        if !error.is_page_loss() {
            return Err(error);
        }
        self.damage.lock().get_or_insert(error);
        Ok(())
    }

    fn report_damage(&self) -> Result<()> {
        let sentence = |reason: String| format!("cannot search all pages for remains of deleted files: {reason}");
        match self.damage.lock().take() {
            None => Ok(()),
            Some(Error::Damaged(reason)) => Err(Error::Damaged(sentence(reason))),
            Some(Error::Io { context, source }) => Err(Error::Io { context: sentence(context), source }),
            Some(error) => Err(error),
        }
    }

    /// Returns the extents that reference the page, if it has parts of small files (COPY-1), some
    /// dead and some live. Not for gathered pieces of a large file, even if a copy put one of them
    /// at the beginning of another file, which then noted their page.
    fn live_parts(&self, view: View<'_>, page: &Pointer) -> Result<Option<Vec<PagePart>>> {
        let Some(items) = self.volume.packed_items(page)? else { return Ok(None) };
        if items.iter().any(|item| !extents::may_be_packed(item.offset, item.length)) {
            return Ok(None);
        }
        let mut parts = BTreeMap::new();
        for item in &items {
            let range = item.offset..item.offset + u64::from(item.length);
            extents::visit(view, item.ino, range, &mut |MappedExtent { offset, extent }| {
                if extent.page == *page {
                    parts.insert((item.ino, offset), extent);
                }
                Ok(ControlFlow::Continue(()))
            })?;
        }
        let held: u64 = items.iter().map(|item| u64::from(item.length)).sum();
        let named: u64 = parts.values().map(|extent| u64::from(extent.length)).sum();
        let part = |((ino, offset), extent)| PagePart { ino, offset, extent };
        Ok((named < held && named > 0).then(|| parts.into_iter().map(part).collect()))
    }

    /// Repacks the next pages that are due; returns whether there were any.
    fn repack_due(&self, at_end: bool) -> Result<bool> {
        // Taken before the state: later removals are noted again.
        let pages = self.volume.stale_pages().take_due(PAGES);
        if pages.is_empty() {
            return Ok(false);
        }
        let repacked = match self.repack(&pages) {
            Err(Error::NoSpace(_)) if at_end => self.repack_into_reserve(&pages),
            repacked => repacked,
        };
        if repacked.is_err() {
            pages.iter().for_each(|page| self.volume.stale_pages().note_again(*page));
        }
        repacked.map(|_| true)
    }

    fn repack(&self, pages: &[Pointer]) -> Result<()> {
        let all = self.read_live_content(pages, PACK_FILES)?;
        self.move_to(all, |bytes, parts| self.volume.reserve_data(bytes, parts))
    }

    /// Repacks with few parts on each page. Each page is an operation of its own, so that space
    /// freed by the previous one can be used.
    fn repack_into_reserve(&self, pages: &[Pointer]) -> Result<()> {
        let reserve = |bytes, parts| self.volume.reserve_accepted(groups_for(bytes, parts));
        self.read_live_content(pages, PARTS_PER_RESERVE_PAGE)?
            .into_iter()
            .try_for_each(|page| self.move_to(vec![page], reserve))
    }

    /// Moves the parts in one operation; `reserve(bytes, parts)` reserves their space.
    fn move_to(
        &self,
        pages: SharedPages<(PagePart, Vec<u8>)>,
        reserve: impl Fn(u64, u64) -> Result<Reservation>,
    ) -> Result<()> {
        let mut written = UnreferencedPages::new(&self.volume);
        let mut moved = Vec::new();
        for page in pages {
            // Each reserves its own space, as fragmented free space requires.
            let mut reserved = reserve(page.bytes as u64, page.items.len() as u64 + 1)?;
            let content: Vec<_> = page.items.iter().map(|(part, bytes)| (part.ino, part.offset, &bytes[..])).collect();
            written.absorb(self.volume.write_packed(&mut reserved, &content, page.compression)?);
            moved.extend(page.items.into_iter().map(|(part, _)| part));
        }
        if moved.is_empty() {
            return Ok(());
        }
        self.volume.limit_unsynced()?;
        let mut written = written.sorted();
        // Each extent is removed; each piece adds one, with a reference count.
        let records = 4 * moved.len() as u64 + written.pieces().len() as u64 * extents::RECORDS_PER_PIECE;
        self.volume.operate(records, true, |op| link_moved(op, &moved, &mut written))
    }

    /// Returns the live parts of all pages with their content, grouped by shared page, in the order
    /// of the files' numbers.
    fn read_live_content(&self, pages: &[Pointer], most: usize) -> Result<SharedPages<(PagePart, Vec<u8>)>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let mut left = Vec::new();
        // In one round trip of a distant store, not in one or two for each page.
        self.volume.prefetch_pages(pages.iter());
        for page in pages {
            let parts = match self.live_parts(view, page) {
                Err(Error::Damaged(reason)) => {
                    // Freed since it was noted, or damaged: a search finds it if it is referenced.
                    tracing::debug!("a packed page is not repacked: {reason}");
                    continue;
                }
                parts => parts?.unwrap_or_default(),
            };
            let read = parts.into_iter().try_fold(Vec::new(), |mut read, part| {
                if let Some(inode) = inode::find(view, part.ino)? {
                    let mut content = vec![0; part.extent.length as usize];
                    self.volume.read_data(page, part.extent.start, &mut content)?;
                    read.push((part, inode, content));
                }
                Ok(read)
            });
            match read {
                // This version references the page, so it was not freed.
                Err(error @ Error::Damaged(_)) => self.note_damage(error)?,
                read => left.extend(read?),
            }
        }
        left.sort_by_key(|(part, ..)| (part.ino, part.offset));
        let mut packer = Packer::new(self.options, most);
        for (part, inode, content) in left {
            packer.add(inode.uid, inode.flags, content.len(), (part, content));
        }
        Ok(packer.pages())
    }
}

/// Returns the lower fence of the first leaf that begins after `key`. Reads inner nodes only, from
/// the end of the tree; the result lies after an unreadable one.
fn next_leaf(view: View<'_>, key: Key) -> Result<Option<Key>> {
    let mut next = None;
    let walked = view.fences_before(Key::MAX, &mut |fence| {
        if fence <= key {
            return ControlFlow::Break(());
        }
        next = Some(fence);
        ControlFlow::Continue(())
    });
    match walked {
        Err(error) if !error.is_page_loss() => Err(error),
        _ => Ok(next),
    }
}

/// Replaces the extents that are unchanged by the new pieces (REPACK-1).
fn link_moved(op: &mut Operation<'_>, moved: &[PagePart], written: &mut UnreferencedPages) -> Result<()> {
    let mut same = BTreeMap::new();
    for part in moved {
        let found = op.view().get(extents::key(part.ino, part.offset), Extent::decode)?;
        if found == Some(part.extent) && inode::find(op.view(), part.ino)?.is_some() {
            same.insert((part.ino, part.offset), part);
        } else {
            op.note_stale(&part.extent.page);
        }
    }
    // REPACK-2
    let place_of = |piece: &WrittenPiece| same.range(..=(piece.ino, piece.offset)).next_back();
    written.name(op, |piece| place_of(piece).is_some_and(|(_, part)| part.has(piece)))?;
    for part in same.values() {
        for piece in written.of(part.ino).iter().filter(|piece| part.has(piece)) {
            extents::insert_piece(op, piece)?;
        }
        op.release(&part.extent.page, part.extent.born)?;
    }
    Ok(())
}
