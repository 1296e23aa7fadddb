//! Tail of the durable commit chain, passed from leader to leader.

use crate::format::log::LogMark;
use crate::format::values::HistoryValue;
use crate::format::{Generation, LOG, Run, Tag};

/// A checkpoint without space waits for deletions to free some. Until then the ring has all records
/// since the last checkpoint, also for a writer that falls back by one (specification 9.3: c is at
/// least g - 62). After that records name no checkpoint, and the next opening rebuilds the map.
const LONGEST_CHAIN: u64 = 62;

/// The tail of the chain of durable records.
#[derive(Clone, Default)]
pub(in crate::txn) struct CommitTail {
    pub(in crate::txn) tag: Tag,
    pub(in crate::txn) generation: Generation,
    pub(in crate::txn) checkpoint: Generation,
    /// List pages of the records since the checkpoint.
    pub(in crate::txn) list_pages: Vec<Run>,
    /// First generation of this session, once it has committed.
    pub(in crate::txn) session_first: Option<Generation>,
    /// The space map was rebuilt, and no checkpoint has been written since.
    pub(in crate::txn) force_checkpoint: bool,
    /// First generation and history record of the previous session, written by the first commit of
    /// this one.
    pub(in crate::txn) previous_session: Option<(Generation, HistoryValue)>,
    /// Generation of an empty commit whose record the host refused for lack of space; the next
    /// empty commit reuses it.
    pub(in crate::txn) refused: Option<Generation>,
    pub(in crate::txn) log: LogState,
    /// The first block of the log behind all that may hold entries.
    pub(in crate::txn) log_end: u64,
}

impl CommitTail {
    /// Returns the checkpoint that the record of `generation` names (TXN-7); 0 when no chain of
    /// records leads from one to it.
    pub(super) fn recorded_checkpoint(&self, generation: Generation) -> Generation {
        let broken = self.force_checkpoint || generation.0.saturating_sub(self.checkpoint.0) > LONGEST_CHAIN;
        if broken { Generation(0) } else { self.checkpoint }
    }
}

/// State of the log relative to the newest record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::txn) enum LogState {
    /// Nothing, and nothing may be written: there is no log, or its record is none of this session.
    #[default]
    Idle,
    /// The entries up to this place (LOG-3).
    Open(LogTail),
    /// The entries of an older record, which no record contains yet (LOG-4). `laid` is true when
    /// they are in the open transaction and the dirty data.
    Pending { mark: LogMark, laid: bool },
}

/// Position of the next log entry, and the predecessor that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::txn) struct LogTail {
    pub(in crate::txn) generation: Generation,
    pub(in crate::txn) record: Tag,
    pub(in crate::txn) block: u64,
    /// Number of the last entry, 0 before the first.
    pub(in crate::txn) number: u32,
    pub(in crate::txn) entry: Tag,
}

impl LogTail {
    /// The log of a record that nothing extends yet.
    fn of(generation: Generation, record: Tag) -> LogTail {
        LogTail { generation, record, block: LOG.0, number: 0, entry: Tag::default() }
    }

    fn mark(self) -> Option<LogMark> {
        let LogTail { generation, record, number, entry, .. } = self;
        (number > 0).then_some(LogMark { generation, record, number, entry })
    }
}

impl LogState {
    /// Returns the pending mark for a record written in this state, which contains all published
    /// changes and, `with_staged`, all staged data.
    pub(super) fn pending(self, with_staged: bool) -> Option<LogMark> {
        match self {
            LogState::Idle => None,
            LogState::Open(tail) => tail.mark().filter(|_| !with_staged),
            LogState::Pending { mark, laid } => Some(mark).filter(|_| !(laid && with_staged)),
        }
    }

    /// After the record of this generation and tag, that named `pending`.
    pub(super) fn after(self, generation: Generation, record: Tag, pending: Option<LogMark>, usable: bool) -> LogState {
        match (self, pending) {
            (LogState::Pending { laid, .. }, Some(mark)) => LogState::Pending { mark, laid },
            // The session that wrote the entries contains them already.
            (_, Some(mark)) => LogState::Pending { mark, laid: true },
            (_, None) if usable => LogState::Open(LogTail::of(generation, record)),
            (_, None) => LogState::Idle,
        }
    }

    /// The last entry that is durable and in no record, whichever record it extends.
    pub(super) fn last(self) -> Option<LogMark> {
        match self {
            LogState::Idle => None,
            LogState::Open(tail) => tail.mark(),
            LogState::Pending { mark, .. } => Some(mark),
        }
    }

    /// Blocks of entries that no record contains.
    pub(super) fn used_blocks(self) -> u64 {
        self.needed_to().unwrap_or(LOG.1) - LOG.0
    }

    /// The first block from which on nothing is needed; None while all of the log may be.
    pub(in crate::txn) fn needed_to(self) -> Option<u64> {
        match self {
            LogState::Idle => Some(LOG.0),
            LogState::Open(tail) => Some(tail.block),
            LogState::Pending { .. } => None,
        }
    }
}

/// Reason of a commit.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::txn) enum CommitReason {
    /// When there is something to make durable; an entry of the log will do.
    Sync,
    /// When there is something to commit.
    Changes,
    /// Even when there is nothing: lets the blocks that the last commit freed go.
    FreeSpace,
    /// Like `FreeSpace` without a checkpoint. After the last erasing of free space nothing may be
    /// freed, and on a full host nothing but the record may be written.
    Truncate,
    /// The closed record of a clean end.
    Close,
}
