//! Written pages that no tree references yet.
//!
//! The writer of pages owns them as [`UnreferencedPages`] until an operation that names them is
//! published; dropped before, they are given back. So a failure between the two leaves nothing
//! behind, and a failed operation can be repeated with the same pages.
//!
//! Its publication mark tells whether the operation was published (`publication`): published pages
//! are not given back. The owner outlives the operation, so `name` borrows the pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::allocator::Allocator;
use super::operation::Operation;
use super::publication::Publication;
use crate::error::Result;
use crate::format::{Ino, Pointer, Run};

/// Location of a written piece of file data.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WrittenPiece {
    pub(crate) ino: Ino,
    /// File offset of the first byte.
    pub(crate) offset: u64,
    pub(crate) length: u32,
    pub(crate) page: Pointer,
    /// First plain byte within the page.
    pub(crate) start: u32,
}

/// Owner of written pages until an operation references them.
#[must_use = "pages that nobody names are given back"]
pub(crate) struct UnreferencedPages {
    allocator: Arc<Allocator>,
    pieces: Vec<WrittenPiece>,
    publication: Publication,
}

impl UnreferencedPages {
    /// Returns an empty set.
    pub(super) fn none(allocator: &Arc<Allocator>) -> UnreferencedPages {
        UnreferencedPages { allocator: allocator.clone(), pieces: Vec::new(), publication: Publication::default() }
    }

    pub(super) fn push(&mut self, piece: WrittenPiece) {
        self.pieces.push(piece);
    }

    /// Adopts pages that no operation has named.
    pub(crate) fn absorb(&mut self, mut other: UnreferencedPages) {
        debug_assert!(!self.publication.is_set() && !other.publication.is_set(), "they are named");
        self.pieces.append(&mut other.pieces);
    }

    /// The pieces that lie on the pages.
    pub(crate) fn pieces(&self) -> &[WrittenPiece] {
        &self.pieces
    }

    /// The pieces of one file, once they are `sorted`.
    pub(crate) fn of(&self, ino: Ino) -> &[WrittenPiece] {
        let from = self.pieces.partition_point(|piece| piece.ino < ino);
        let behind = self.pieces.partition_point(|piece| piece.ino <= ino);
        &self.pieces[from..behind]
    }

    /// By file and offset.
    pub(crate) fn sorted(mut self) -> UnreferencedPages {
        self.pieces.sort_unstable_by_key(|piece| (piece.ino, piece.offset));
        self
    }

    /// Has `op` count each page once for each of its pieces that is named; the caller inserts the
    /// extents. A page without a named piece is given back at once; one that is named in part is
    /// noted by the operation.
    pub(crate) fn name(&mut self, op: &mut Operation<'_>, is_named: impl Fn(&WrittenPiece) -> bool) -> Result<()> {
        // By address: the page, and how many of its pieces are named and how many are not.
        let mut pages: BTreeMap<u64, (Pointer, u32, u32)> = BTreeMap::new();
        for piece in &self.pieces {
            let (_, named, lost) = pages.entry(piece.page.run.address).or_insert((piece.page, 0, 0));
            *(if is_named(piece) { named } else { lost }) += 1;
        }
        for (page, named, lost) in pages.values().filter(|(_, named, _)| *named > 0) {
            op.adopt(page, *named)?;
            if *lost > 0 {
                op.note_stale(page);
            }
        }
        let is_lost =
            |piece: &mut WrittenPiece| pages.get(&piece.page.run.address).is_none_or(|(_, named, _)| *named == 0);
        let lost: Vec<WrittenPiece> = self.pieces.extract_if(.., is_lost).collect();
        self.give_back(&lost);
        op.carry(&self.publication);
        Ok(())
    }

    fn give_back(&self, pieces: &[WrittenPiece]) {
        if !pieces.is_empty() {
            let mut runs: Vec<Run> = pieces.iter().map(|piece| piece.page.run).collect();
            runs.sort_unstable();
            runs.dedup();
            self.allocator.discard_unseen(runs);
        }
    }
}

impl Drop for UnreferencedPages {
    fn drop(&mut self) {
        if !self.publication.is_set() {
            self.give_back(&self.pieces);
        }
    }
}
