//! Writes what is left of partly named packed pages elsewhere, so that the bytes of deleted files go with the old pages.
//!
//! # Invariants
//! V1  A repack changes no content: an extent is replaced by the bytes read through it, and only when in the operation it is still the same.
//! V2  What went between the reading and the operation makes the new page a partly named one, noted by the same operation.
//! V3  Pages wait for one to two intervals, so that those that die as a whole are not written again, and one that is noted again and again is
//!     repacked once per interval at most.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use parking_lot::Mutex;

use super::extents::{self, Mapped};
use super::plan::{PACK_FILES, compresses};
use super::{FileSystem, inode};
use crate::error::{Error, Result};
use crate::format::values::{Extent, inode_flags};
use crate::format::{Ino, Key, MAX_DATA, Pointer, kind};
use crate::txn::{Operation, View, WrittenPiece};

/// Seconds of an interval (V3); the manual names the delay.
const INTERVAL: i64 = 5;
/// Pages of one step: 1 MiB of content at most.
const PAGES: usize = 8;
/// Attempts of `repack_all` for pages that are noted meanwhile.
const ROUNDS: usize = 4;
/// Records and pages that one step of a search looks at.
const SEARCH_RECORDS: usize = 4096;
const SEARCH_PAGES: usize = 64;
/// Addresses of pages that a search remembers: files that were packed together have neighbouring numbers.
const LOOKED_AT: usize = 4096;

#[derive(Default)]
pub(super) struct Repack {
    /// Held by whoever repacks: pages that another one took out are not overlooked by a purge.
    turn: Mutex<Turn>,
    last_tick: Mutex<i64>,
}

#[derive(Default)]
struct Turn {
    /// Where the search for pages that nobody noted goes on (Q3).
    search: Option<Key>,
    looked_at: BTreeSet<u64>,
    /// The archive was idle but for the repacking, which therefore commits itself.
    commits: bool,
}

impl Turn {
    fn begin_search(&mut self) {
        self.search = Some(Key::new(1, 0, 0));
        self.looked_at.clear();
    }
}

/// An extent that names a page.
struct Part {
    ino: Ino,
    offset: u64,
    extent: Extent,
    content: Vec<u8>,
}

/// What becomes of it.
struct Move {
    part: Part,
    pieces: Vec<WrittenPiece>,
}

/// What may share a page: owner, compression, packing.
type Group = (u32, bool, bool);

impl FileSystem {
    /// Has the whole tree searched for pages that the session before noted (Q3).
    pub(super) fn search_partly_named(&self) {
        self.repack.turn.lock().begin_search();
    }

    /// One background step; answers whether there is more to do at once.
    pub(super) fn repack_step(&self) -> Result<bool> {
        let Some(mut turn) = self.repack.turn.try_lock() else { return Ok(false) };
        if self.interval_is_over() {
            self.volume.partly_named().tick();
        }
        if self.volume.partly_named().take_overflow() {
            turn.begin_search();
        }
        let searching = self.volume.partly_named().has_room(SEARCH_PAGES) && self.search_step(&mut turn)?;
        let idle = !self.volume.is_dirty();
        let repacked = match self.repack_due() {
            // It is tried again an interval later.
            Err(Error::NoSpace(_)) => false,
            repacked => repacked?,
        };
        turn.commits |= repacked && idle;
        if !repacked && std::mem::take(&mut turn.commits) {
            self.volume.commit()?;
        }
        Ok(searching || repacked)
    }

    /// Repacks all that is noted; with `search` also what nobody noted. Pages that lose a part meanwhile may be left.
    pub(crate) fn repack_all(&self, search: bool) -> Result<()> {
        let mut turn = self.repack.turn.lock();
        if search || self.volume.partly_named().take_overflow() {
            turn.begin_search();
        }
        loop {
            for _ in 0..ROUNDS {
                self.volume.partly_named().hurry();
                while self.repack_due()? {
                    if search {
                        self.closing.check()?;
                    }
                }
                if self.volume.partly_named().is_empty() {
                    break;
                }
            }
            if turn.search.is_none() {
                return Ok(());
            }
            self.search_step(&mut turn)?;
            if search {
                self.closing.check()?;
            }
        }
    }

    fn interval_is_over(&self) -> bool {
        let now = self.environment.now().seconds;
        let mut last = self.repack.last_tick.lock();
        // A clock that was set back must not stop it.
        let over = now < *last || now - *last >= INTERVAL;
        if over {
            *last = now;
        }
        over
    }

    /// Looks at the next records, and at the packed pages that they name; answers whether there are more.
    fn search_step(&self, turn: &mut Turn) -> Result<bool> {
        let Some(from) = turn.search else { return Ok(false) };
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let (mut pages, mut records, mut next) = (Vec::new(), 0, None);
        let found = view.scan(from, Key::MAX, &mut |key, value| {
            records += 1;
            if key.kind == kind::EXTENT {
                let extent = Extent::decode(value)?;
                if extents::may_be_packed(key.sub, &extent) && turn.looked_at.insert(extent.page.run.address) {
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
            // It would fail there every time.
            turn.search = None;
            return Err(error);
        }
        for page in pages {
            match self.parts_left(view, &page) {
                Ok(Some(_)) => self.volume.partly_named().note_again(page),
                // A damaged page is not for this to report.
                Ok(None) | Err(Error::Damaged(_)) => {}
                Err(error) => return Err(error),
            }
        }
        if turn.looked_at.len() > LOOKED_AT {
            turn.looked_at.clear();
        }
        turn.search = next;
        Ok(next.is_some())
    }

    /// What names the page, when it is a packed one of which a part is named no more; without content.
    fn parts_left(&self, view: View<'_>, page: &Pointer) -> Result<Option<Vec<Part>>> {
        let Some(items) = self.volume.pager().packed_items(page)? else { return Ok(None) };
        let mut parts = BTreeMap::new();
        for item in &items {
            let range = item.offset..item.offset + u64::from(item.length);
            extents::visit(view, item.ino, range, &mut |Mapped { offset, extent }| {
                if extent.page == *page {
                    parts.insert((item.ino, offset), extent);
                }
                Ok(ControlFlow::Continue(()))
            })?;
        }
        let held: u64 = items.iter().map(|item| u64::from(item.length)).sum();
        let named: u64 = parts.values().map(|extent| u64::from(extent.length)).sum();
        let part = |((ino, offset), extent)| Part { ino, offset, extent, content: Vec::new() };
        Ok((named < held && named > 0).then(|| parts.into_iter().map(part).collect()))
    }

    /// Repacks the next pages that are due; answers whether there were any.
    fn repack_due(&self) -> Result<bool> {
        // Taken out before the state is: what goes later is noted anew.
        let pages = self.volume.partly_named().take_due(PAGES);
        if pages.is_empty() {
            return Ok(false);
        }
        let repacked = self.repack(&pages);
        if repacked.is_err() {
            pages.iter().for_each(|page| self.volume.partly_named().note_again(*page));
        }
        repacked.map(|_| true)
    }

    fn repack(&self, pages: &[Pointer]) -> Result<()> {
        let mut moves = Vec::new();
        for ((_, compress, pack), parts) in self.content_left(pages)? {
            if let Err(error) = self.write_parts(parts, compress, pack, &mut moves) {
                self.abandon_moves(&moves);
                return Err(error);
            }
        }
        if moves.is_empty() {
            return Ok(());
        }
        // An extent goes; for each piece one comes, with a reference count.
        let records = moves.iter().map(|m| 4 + m.pieces.len() as u64 * extents::RECORDS_PER_PIECE).sum();
        let unnamed = self.volume.operate(records, true, |op| self.name_moves(op, &moves));
        match unnamed {
            Ok(unnamed) => {
                self.volume.abandon(&unnamed);
                Ok(())
            }
            Err(error) => {
                self.abandon_moves(&moves);
                Err(error)
            }
        }
    }

    /// The parts of all pages with their content, by what may share a page, in the order of the files' numbers.
    fn content_left(&self, pages: &[Pointer]) -> Result<BTreeMap<Group, Vec<Part>>> {
        let state = self.volume.state();
        let view = self.volume.view(&state);
        let mut groups: BTreeMap<Group, Vec<Part>> = BTreeMap::new();
        for page in pages {
            let read = self.parts_left(view, page).and_then(|parts| {
                let mut grouped = Vec::new();
                for mut part in parts.unwrap_or_default() {
                    let Some(inode) = inode::find(view, part.ino)? else { continue };
                    part.content = vec![0; part.extent.length as usize];
                    self.volume.pager().read_data(page, part.extent.start, &mut part.content)?;
                    let pack = self.options.pack && inode.flags & inode_flags::NO_PACK == 0;
                    grouped.push(((inode.uid, compresses(&self.options, &inode), pack), part));
                }
                Ok(grouped)
            });
            let parts = match read {
                Err(Error::Damaged(reason)) => {
                    // It was freed since it was noted, or is damaged, which readers and `check` report.
                    tracing::debug!("a packed page is not repacked: {reason}");
                    continue;
                }
                read => read?,
            };
            for (group, part) in parts {
                groups.entry(group).or_default().push(part);
            }
        }
        groups.values_mut().for_each(|parts| parts.sort_by_key(|part| (part.ino, part.offset)));
        Ok(groups)
    }

    fn write_parts(&self, parts: Vec<Part>, compress: bool, pack: bool, moves: &mut Vec<Move>) -> Result<()> {
        let mut rest = parts.into_iter().peekable();
        while let Some(first) = rest.next() {
            let mut bytes = first.content.len();
            let mut page = vec![first];
            while pack
                && page.len() < PACK_FILES
                && let Some(next) = rest.next_if(|next| bytes + next.content.len() <= MAX_DATA)
            {
                bytes += next.content.len();
                page.push(next);
            }
            // Room for each by itself, which is what free space in fragments takes.
            let mut room = self.volume.reserve_data(bytes as u64, page.len() as u64 + 1)?;
            let pieces = match &page[..] {
                [part] => self.volume.write_data(&mut room, part.ino, part.offset, &part.content, compress)?,
                parts => {
                    let content: Vec<_> = parts.iter().map(|p| (p.ino, p.offset, &p.content[..])).collect();
                    self.volume.write_packed(&mut room, &content, compress)?
                }
            };
            for mut part in page {
                part.content = Vec::new();
                let range = part.offset..part.offset + u64::from(part.extent.length);
                let its = |piece: &&WrittenPiece| piece.ino == part.ino && range.contains(&piece.offset);
                let pieces = pieces.iter().filter(its).copied().collect();
                moves.push(Move { part, pieces });
            }
        }
        Ok(())
    }

    fn abandon_moves(&self, moves: &[Move]) {
        let pieces: Vec<WrittenPiece> = moves.iter().flat_map(|m| m.pieces.iter().copied()).collect();
        self.volume.abandon(&pieces);
    }

    /// Lets the new pieces take the place of the extents that are still the same (V1). Answers the pieces whose pages are not named at all.
    fn name_moves(&self, op: &mut Operation<'_>, moves: &[Move]) -> Result<Vec<WrittenPiece>> {
        let mut pages: BTreeMap<u64, (Pointer, u32)> = BTreeMap::new();
        let (mut same, mut left_over) = (Vec::new(), Vec::new());
        for m in moves {
            let found = op.view().get(extents::key(m.part.ino, m.part.offset), Extent::decode)?;
            if found == Some(m.part.extent) && inode::find(op.view(), m.part.ino)?.is_some() {
                for piece in &m.pieces {
                    pages.entry(piece.page.run.address).or_insert((piece.page, 0)).1 += 1;
                }
                same.push(m);
            } else {
                op.note_partly(&m.part.extent.page);
                left_over.extend_from_slice(&m.pieces);
            }
        }
        for (page, extents) in pages.values() {
            op.adopt(page, *extents)?;
        }
        // V2
        for piece in left_over.iter().filter(|piece| pages.contains_key(&piece.page.run.address)) {
            op.note_partly(&piece.page);
        }
        let born = op.generation();
        for Move { part, pieces } in same {
            for piece in pieces {
                let extent = Extent { page: piece.page, start: piece.start, length: piece.length, born };
                op.insert(extents::key(part.ino, piece.offset), &extent.encode())?;
            }
            op.release(&part.extent.page, part.extent.born)?;
        }
        left_over.retain(|piece| !pages.contains_key(&piece.page.run.address));
        Ok(left_over)
    }
}
