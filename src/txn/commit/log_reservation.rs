//! Space reservation for the nodes of the commit that absorbs logged and staged data (LOG-5).

use std::sync::Arc;

use crate::error::Result;
use crate::txn::allocator::{Allocator, Reservation, keep_of};

/// Reservation step in groups, also the extra beyond the pieces: paths above the leaves, splits,
/// counts of pages.
const STEP: u64 = 64;
/// A piece changes the records of one file, which are neighbours: two leaves.
const GROUPS_PER_PIECE: u64 = 2;

/// Reservation for the log entries since the last commit.
#[derive(Default)]
pub(super) struct LogReservation {
    pub(super) held: Option<Reservation>,
    /// Pieces of all entries since the last commit.
    pieces: u64,
}

impl LogReservation {
    /// Reserves space for `pieces` more; returns whether there is enough.
    pub(super) fn promise(&mut self, allocator: &Arc<Allocator>, pieces: u64, essential: bool) -> Result<bool> {
        let held = self.held.as_ref().map_or(0, Reservation::groups);
        // In steps, so that the file need not grow with each entry.
        let wanted = (STEP + GROUPS_PER_PIECE * (self.pieces + pieces)).next_multiple_of(STEP);
        if wanted > held {
            if !allocator.reserve(wanted - held, keep_of(essential))? {
                return Ok(false);
            }
            allocator.reserved(wanted - held).join(&mut self.held);
        }
        self.pieces += pieces;
        Ok(true)
    }
}
