//! Rewrites the live parts of stale pages, so that deleted bytes are freed with the old pages: of
//! packed pages in the background, of all pages in a purge.
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
//! REPACK-5  Other pages than packed ones of small files are rewritten only by a purge: each small
//!     overwrite would cost a page of 128 KiB. It leaves three: a page that a copy or a snapshot
//!     names, since the old page would stay; one that only a copy names, since the items of the
//!     page name the first file; one in more than `PACK_FILES` parts, which would take more space
//!     than before. Lack of space for one page does not end a purge.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use super::extents::{self, FRAME, MappedExtent, PACK_FILES, Packer, SharedPages};
use super::types::FsOptions;
use super::{ShutdownGate, inode};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::page::{PackedItem, PageKind};
use crate::format::values::{Extent, InodeValue};
use crate::format::{Ino, Key, Pointer, kind};
use crate::txn::{Operation, Reservation, State, UnreferencedPages, View, Volume, WrittenPiece, groups_for};

/// Seconds of an interval (REPACK-3); the manual names the delay.
const INTERVAL: i64 = 5;
/// Pages of one step: 1 MiB of content at most.
const PAGES: usize = 8;
/// Maximum parts of a page when only the reserve for deletes has space: each part reserves its own
/// space, all from that reserve.
const PARTS_PER_RESERVE_PAGE: usize = 16;
/// Attempts of `Repacker::run_all` for pages that are noted meanwhile.
const ROUNDS: usize = 4;
/// Freed bytes after which a repack of all pages commits, if they are also a share of the data in
/// use: the next pages use their space, and the file need not grow by all that is rewritten.
const COMMIT_BYTES: u64 = 4 << 20;
/// Maximum records and pages that one step of a search reads.
const SEARCH_RECORDS: usize = 4096;
const SEARCH_PAGES: usize = 64;
/// Maximum addresses of pages that a search remembers: files packed together have neighbouring
/// numbers.
const MAX_SEARCHED_PAGES: usize = 4096;

/// Pages that a search and a repack include.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// Packed pages of small files.
    Packed,
    /// All pages (REPACK-5).
    All,
}

pub(super) struct Repacker {
    volume: Arc<Volume>,
    environment: Arc<dyn Environment>,
    options: FsOptions,
    /// Held during a repack, so that a purge does not overlook pages that another thread took out.
    progress: Mutex<RepackProgress>,
    /// First error since the last report that kept a page from being examined or rewritten: damage,
    /// or `NoSpace` of a purge.
    failure: Mutex<Option<Error>>,
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
            failure: Mutex::default(),
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
        let searching =
            self.volume.stale_pages().has_room(SEARCH_PAGES) && self.search_step(&mut progress, Scope::Packed)?;
        let idle = !self.volume.writer().is_dirty();
        let repacked = match self.repack_due(Scope::Packed, false) {
            // Retried an interval later.
            Err(Error::NoSpace(_)) => false,
            repacked => repacked?,
        };
        progress.commits |= repacked && idle;
        if !repacked && std::mem::take(&mut progress.commits) {
            self.volume.commit()?;
        }
        self.report_failure()?;
        Ok(searching || repacked)
    }

    /// Repacks all noted pages; a purge, which stops when closing begins, also searches for others,
    /// of larger files as well if the archive is local. Pages that become stale meanwhile may be
    /// left. When the archive closes (`purge` is `None`), the reserve for deletes may be used, as
    /// nothing else will need it. Errors: `Damaged` or `Io` at the end (REPACK-4).
    pub(super) fn run_all(&self, purge: Option<&ShutdownGate>) -> Result<()> {
        // In a remote archive a search of all pages would take a request for almost each.
        let scope = if purge.is_some() && !self.volume.is_remote() { Scope::All } else { Scope::Packed };
        self.repack_all(purge, scope, purge.is_some())?;
        self.report_failure()
    }

    /// Repacks all noted pages before a snapshot would preserve the bytes of files deleted before.
    pub(super) fn run_noted(&self, closing: &ShutdownGate) -> Result<()> {
        self.repack_all(Some(closing), Scope::Packed, false)
    }

    /// `closing` stops it when the archive closes; `None` when it runs at that end.
    fn repack_all(&self, closing: Option<&ShutdownGate>, scope: Scope, search: bool) -> Result<()> {
        let go_on = || closing.map_or(Ok(()), ShutdownGate::check_open);
        let mut shared = self.progress.lock();
        let mut own = RepackProgress::default();
        if search || self.volume.stale_pages().take_overflow() {
            // Damage that an earlier search met may be gone with its file.
            self.failure.lock().take();
            if search { own.begin_search() } else { shared.begin_search() }
        }
        loop {
            for _ in 0..ROUNDS {
                self.volume.stale_pages().hurry();
                while self.repack_due(scope, closing.is_none())? {
                    if self.volume.has_freed(COMMIT_BYTES) {
                        self.volume.commit()?;
                    }
                    go_on()?;
                }
                if self.volume.stale_pages().is_empty() {
                    break;
                }
            }
            if search {
                // A snapshot need not wait for the whole search. No page noted by it is left here.
                MutexGuard::bump(&mut shared);
            }
            let progress = if search { &mut own } else { &mut *shared };
            if progress.search.is_none() {
                return Ok(());
            }
            self.search_step(progress, scope)?;
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

    /// Searches the next records and the pages that they reference; returns whether there are more.
    fn search_step(&self, progress: &mut RepackProgress, scope: Scope) -> Result<bool> {
        let Some(from) = progress.search else { return Ok(false) };
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let (mut pages, mut records, mut next, mut last) = (Vec::new(), 0, None, from);
        let found = view.scan(from, Key::MAX, &mut |key, value| {
            (records, last) = (records + 1, key);
            if key.kind == kind::EXTENT {
                let extent = Extent::decode(value)?;
                // An extent of a whole frame is all of its page.
                let included = match scope {
                    Scope::Packed => extents::may_be_packed(key.sub, extent.length),
                    Scope::All => u64::from(extent.length) < FRAME,
                };
                if included && progress.looked_at.insert(extent.page.run.address) {
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
        self.volume.prefetch_data(pages.iter().map(|page| (page, 0, 1)));
        for page in pages {
            match self.live_parts(&state, &page, scope) {
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

    /// Keeps the loss of a page for [`Self::report_failure`], and returns any other error.
    fn note_damage(&self, error: Error) -> Result<()> {
        if !error.is_page_loss() {
            return Err(error);
        }
        self.failure.lock().get_or_insert(error);
        Ok(())
    }

    fn report_failure(&self) -> Result<()> {
        let sentence = |reason: String| format!("cannot search all pages for remains of deleted files: {reason}");
        match self.failure.lock().take() {
            None => Ok(()),
            Some(Error::Damaged(reason)) => Err(Error::Damaged(sentence(reason))),
            Some(Error::Io { context, source }) => Err(Error::Io { context: sentence(context), source }),
            Some(error) => Err(error),
        }
    }

    /// Returns the extents that reference the page, if some of its parts are dead and some live,
    /// and if the scope includes it. Its items decide about that and not the extents (COPY-1): a
    /// copy may have put a piece of a larger file at the beginning of another file, which then
    /// noted the page.
    fn live_parts(&self, state: &State, page: &Pointer, scope: Scope) -> Result<Option<Vec<PagePart>>> {
        let view = self.volume.view(state);
        let (kind, items) = self.volume.page_items(page)?;
        let is_small = |item: &PackedItem| extents::may_be_packed(item.offset, item.length);
        let is_packed = kind == PageKind::Packed && items.iter().all(is_small);
        if !is_packed && scope == Scope::Packed {
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
        if !is_packed {
            // Extents that only a snapshot shows are counted by the dead list.
            let is_shared = parts.values().any(|extent| extent.born <= state.counters.newest_snapshot)
                || self.volume.count_in(state, page)? > parts.len() as u64;
            if is_shared || parts.len() > PACK_FILES {
                return Ok(None);
            }
        }
        let part = |((ino, offset), extent)| PagePart { ino, offset, extent };
        Ok((named < held && named > 0).then(|| parts.into_iter().map(part).collect()))
    }

    /// Repacks the next pages that are due; returns whether there were any.
    fn repack_due(&self, scope: Scope, at_end: bool) -> Result<bool> {
        // Taken before the state: later removals are noted again.
        let pages = self.volume.stale_pages().take_due(PAGES);
        if pages.is_empty() {
            return Ok(false);
        }
        let repacked = match self.repack(&pages, scope) {
            Err(Error::NoSpace(_)) if at_end => self.repack_into_reserve(&pages),
            Err(error @ Error::NoSpace(_)) if scope == Scope::All => {
                self.failure.lock().get_or_insert(error);
                self.repack(&pages, Scope::Packed)
            }
            repacked => repacked,
        };
        if repacked.is_err() {
            pages.iter().for_each(|page| self.volume.stale_pages().note_again(*page));
        }
        repacked.map(|_| true)
    }

    fn repack(&self, pages: &[Pointer], scope: Scope) -> Result<()> {
        let all = self.read_live_content(pages, scope, PACK_FILES)?;
        self.move_to(all, |bytes, parts| self.volume.reserve_data(bytes, parts))
    }

    /// Repacks with few parts on each page. Each page is an operation of its own, so that space
    /// freed by the previous one can be used.
    fn repack_into_reserve(&self, pages: &[Pointer]) -> Result<()> {
        let reserve = |bytes, parts| self.volume.reserve_accepted(groups_for(bytes, parts));
        self.read_live_content(pages, Scope::Packed, PARTS_PER_RESERVE_PAGE)?
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
    /// of the files' numbers. Parts after the beginning of a file share no page with other files
    /// (COPY-1).
    fn read_live_content(
        &self,
        pages: &[Pointer],
        scope: Scope,
        most: usize,
    ) -> Result<SharedPages<(PagePart, Vec<u8>)>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let (mut left, mut full) = (Vec::new(), Vec::new());
        // In one round trip of a distant store, not in one or two for each page.
        self.volume.prefetch_pages(pages.iter());
        for page in pages {
            let parts = match self.live_parts(&state, page, scope) {
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
                Ok(read) if read.iter().any(|(part, ..)| !extents::may_be_packed(part.offset, part.extent.length)) => {
                    full.append(&mut self.pack(read, most));
                }
                read => left.extend(read?),
            }
        }
        left.sort_by_key(|(part, ..)| (part.ino, part.offset));
        full.append(&mut self.pack(left, most));
        Ok(full)
    }

    fn pack(&self, parts: Vec<(PagePart, InodeValue, Vec<u8>)>, most: usize) -> SharedPages<(PagePart, Vec<u8>)> {
        let mut packer = Packer::new(self.options, most);
        for (part, inode, content) in parts {
            packer.add(inode.uid, inode.flags, content.len(), (part, content));
        }
        packer.pages()
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
