//! What a leader of commits hands on to the next one: the tail of the chain of durable records.

use crate::format::values::HistoryValue;
use crate::format::{Generation, Run, Tag};

/// A checkpoint that has no room waits for deletions to make some. So long the ring has all records since the last one, also for a writer that
/// falls back by one (specification 9.3: c is at least g - 62); from then on records name no checkpoint, and the next opening makes the map anew.
const LONGEST_CHAIN: u64 = 62;

/// The tail of the chain of durable records.
#[derive(Clone, Default)]
pub(in crate::txn) struct Chain {
    pub(in crate::txn) tag: Tag,
    pub(in crate::txn) generation: Generation,
    pub(in crate::txn) checkpoint: Generation,
    /// List pages of the records since the checkpoint.
    pub(in crate::txn) list_pages: Vec<Run>,
    /// First generation of this session, once it has committed.
    pub(in crate::txn) session_first: Option<Generation>,
    /// The space map was rebuilt, and no checkpoint has been written since.
    pub(in crate::txn) force_checkpoint: bool,
    /// What the first commit of this session writes about the session before: its first generation and record.
    pub(in crate::txn) previous_session: Option<(Generation, HistoryValue)>,
    /// The number of a commit without changes whose record the host refused for want of space; the next one without changes takes it.
    pub(in crate::txn) refused: Option<Generation>,
}

impl Chain {
    /// TXN-7: the checkpoint that the record of `generation` names, 0 when no chain of records leads from one to it.
    pub(super) fn told_checkpoint(&self, generation: Generation) -> Generation {
        let broken = self.force_checkpoint || generation.0.saturating_sub(self.checkpoint.0) > LONGEST_CHAIN;
        if broken { Generation(0) } else { self.checkpoint }
    }
}

/// Why a commit is made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::txn) enum Purpose {
    /// When there is something to commit.
    Changes,
    /// Even when there is nothing: lets the blocks that the last commit freed go.
    Drain,
    /// As `Drain` without a checkpoint: after free space was erased for the last time nothing may be freed, and on a host without room nothing be
    /// written but the record.
    Shorten,
    /// The closed record of a clean end.
    Close,
}
