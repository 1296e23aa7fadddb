//! Makes the open transaction durable: one leader at a time, concurrent callers share its commit.
//!
//! The order of writes, and why it suffices:
//! 1. Under the writers' lock dirty data moves into the transaction, which is then frozen; the next
//!    transaction opens.
//! 2. Nodes are written bottom-up, then (sometimes) the space map's checkpoint.
//! 3. When the lists fit into the record: record, one barrier. A crash before the barrier returns
//!    may leave a record with some pages missing; recovery opens each listed page and falls back to
//!    the record before, which TXN-1 kept whole. Otherwise: list pages, barrier, record, barrier;
//!    the record then exists only with its pages.
//! 4. Only after the last barrier: acknowledge, and allow reuse of the blocks that the *previous*
//!    commit freed (TXN-1).

mod chain_tail;
mod commit_delay;
mod group_commit;
mod record;

pub(super) use chain_tail::{CommitReason, CommitTail, LogState};
pub(crate) use group_commit::CommitTicket;
pub(super) use group_commit::{GroupCommit, Session};
pub(super) use record::read_lists;
