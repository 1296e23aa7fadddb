//! Group commit: makes the open transaction durable; one leader at a time, concurrent callers share
//! its commit.
//!
//! Only a leader gets `&mut CommitTail`, and there is one at a time: a function that takes it runs
//! within a commit, under no other lock. The leader takes the writers' lock for the freeze and
//! releases it before anything is written, unless the caller already holds it.
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
//!
//! On storage with atomic barriers (STORAGE-4) the barrier after the record is the only one. A
//! commit for an fsync ([`CommitReason::Sync`]) is an entry of the log where that suffices
//! ([`GroupCommit::append`]), never on such storage.

mod record;

pub(super) use record::{CommitReason, CommitTail, LogState, read_lists};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::allocator::{Allocator, Reservation, keep_of};
use super::ancestry::{Durable, Mark};
use super::state::VolumeContext;
use super::writer::{Frozen, OpenTransaction, Writer};
use crate::error::{Error, LogStats, Result};
use crate::format::log::{EntryHead, LogEntry, entry_blocks, entry_capacity};
use crate::format::{BLOCK, Generation, LOG, SessionId};
use record::{LogTail, RecordWriter};

/// Longest entry in blocks; more data is cheaper to write once, by a commit.
const LONGEST: u64 = 64;

/// Blocks of entries from which the log counts as nearly full: most of the data is there, and the
/// rest of the log takes longer to fill than the data takes to be sealed.
const NEARLY_FULL: u64 = (LOG.1 - LOG.0) / 8 * 5;

/// Reservation step in groups, also the extra beyond the pieces: paths above the leaves, splits,
/// counts of pages.
const STEP: u64 = 64;
/// A piece changes the records of one file, which are neighbours: two leaves.
const GROUPS_PER_PIECE: u64 = 2;

/// Leader, waiting callers and results. Nothing else is locked, read or written while its lock is
/// held.
#[derive(Default)]
struct Queue {
    running: bool,
    /// Callers that wait for the commit in flight to end.
    waiting: u64,
    /// Number of commits begun and finished; a caller needs one that begins after its call.
    started: u64,
    finished: u64,
    /// Number of the last one that did not end with an entry of the log.
    committed: u64,
    /// Number of the last one that wrote a record.
    recorded: u64,
    /// The last commit that failed, with its reason.
    failed: Option<(u64, Error)>,
    /// Callers for which the next commit is needed.
    joined: u64,
    joining: CommitDelay,
    chain: CommitTail,
}

enum CommitOutcome {
    /// An entry of the log, or nothing because the last one had it all.
    LogEntry,
    Commit,
}

/// The number of the commit that a caller needs.
#[derive(Debug)]
#[must_use = "the commit may have no leader"]
pub(crate) struct CommitTicket(u64);

pub(in crate::txn) struct GroupCommit {
    medium: Arc<VolumeContext>,
    allocator: Arc<Allocator>,
    writer: Arc<Writer>,
    record: RecordWriter,
    queue: Mutex<Queue>,
    /// A commit ended.
    done: Condvar,
    /// A caller needs the commit that has not begun.
    joined: Condvar,
    pub(in crate::txn) read_only: bool,
    nodes: Mutex<LogReservation>,
    /// Entries of the log that were written, and their bytes.
    logged: (AtomicU64, AtomicU64),
}

/// Session of an opened volume, as its commit records carry it.
pub(in crate::txn) struct Session {
    pub(in crate::txn) id: SessionId,
    pub(in crate::txn) header_sequence: u64,
    pub(in crate::txn) read_only: bool,
}

impl GroupCommit {
    pub(in crate::txn) fn new(
        medium: Arc<VolumeContext>,
        allocator: Arc<Allocator>,
        writer: Arc<Writer>,
        session: &Session,
    ) -> GroupCommit {
        GroupCommit {
            record: RecordWriter {
                allocator: allocator.clone(),
                medium: medium.clone(),
                writer: writer.clone(),
                session: session.id,
                header_sequence: session.header_sequence,
                deferred: Mutex::default(),
            },
            medium,
            allocator,
            writer,
            queue: Mutex::default(),
            done: Condvar::new(),
            joined: Condvar::new(),
            read_only: session.read_only,
            nodes: Mutex::default(),
            logged: Default::default(),
        }
    }

    /// Errors: `ReadOnly`, `WriteFailed`.
    pub(in crate::txn) fn check_writable(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::ReadOnly("the archive is opened for reading".into()));
        }
        self.medium.pager.sticky_error().check()
    }

    /// Makes an empty commit before the first write on top of a closed record. Otherwise a crash
    /// before the first commit would look like a clean end, and the pages written until then would
    /// not be swept. On top of the record of a crashed session, the commit makes this session's
    /// first inode numbers durable, so that a second crash does not reuse them.
    pub(in crate::txn) fn open_session(&self) -> Result<()> {
        let begins = {
            let durable = self.medium.versions.durable();
            durable.closed || (durable.session != self.record.session && durable.generation != Generation(0))
        };
        if begins {
            self.commit_for(CommitReason::FreeSpace)?;
        }
        Ok(())
    }

    pub(in crate::txn) fn commit_for(&self, purpose: CommitReason) -> Result<Generation> {
        let wanted = self.want_commit()?;
        self.wait_for_commit(wanted, purpose)
    }

    /// Registers a caller: the commit that it needs begins after this call. A caller must wait on
    /// the ticket, or the commit has no leader. Errors: `WriteFailed`, `ReadOnly`.
    pub(in crate::txn) fn want_commit(&self) -> Result<CommitTicket> {
        self.check_writable()?;
        let mut queue = self.queue.lock();
        // A commit that is running may have frozen already, so the next one is needed.
        let needed = queue.started + 1;
        queue.joined += 1;
        self.joined.notify_one();
        Ok(CommitTicket(needed))
    }

    /// Waits for the commit of the ticket; leads commits while there is no other leader.
    pub(in crate::txn) fn wait_for_commit(
        &self,
        CommitTicket(needed): CommitTicket,
        purpose: CommitReason,
    ) -> Result<Generation> {
        let mut queue = self.queue.lock();
        // A commit for changes alone writes nothing when there are none, and only that of a close
        // says so.
        let is_over = |queue: &Queue| match purpose {
            CommitReason::Sync => queue.finished >= needed,
            CommitReason::Changes => queue.committed >= needed,
            CommitReason::FreeSpace | CommitReason::Truncate => queue.recorded >= needed,
            CommitReason::Close => queue.recorded >= needed && self.medium.versions.durable().closed,
        };
        while !is_over(&queue) {
            if queue.running {
                self.wait(&mut queue);
                continue;
            }
            queue.running = true;
            self.wait_for_callers(&mut queue);
            let (mut served, mut took) = (0, Duration::ZERO);
            let result = self.lead(&mut queue, |chain, callers| {
                let began = self.medium.environment.now();
                let made = self.run_commit(purpose, chain);
                (served, took) = (callers, self.medium.environment.now().since(began));
                made.map(|made| ((), made))
            });
            let came = queue.joined;
            queue.joining.ended(served, came, took);
            result?;
        }
        // The commit that covered this caller is `needed` or a later one.
        match &queue.failed {
            Some((number, error)) if *number >= needed => Err(error.clone()),
            _ => Ok(self.medium.versions.durable().generation),
        }
    }

    /// Waits for the commit in flight, then runs `f` as the only leader.
    pub(in crate::txn) fn as_leader<R>(&self, f: impl FnOnce(&mut CommitTail) -> Result<R>) -> Result<R> {
        let mut queue = self.begin_running();
        self.lead(&mut queue, |chain, _| {
            self.record.finish_deferred(chain)?;
            Ok((f(chain)?, CommitOutcome::Commit))
        })
    }

    /// Runs `f` as the leader, already marked as running, with the number of callers that its
    /// commit serves: callers from now on need a later commit.
    fn lead<R>(
        &self,
        queue: &mut MutexGuard<'_, Queue>,
        f: impl FnOnce(&mut CommitTail, u64) -> Result<(R, CommitOutcome)>,
    ) -> Result<R> {
        queue.started += 1;
        let (number, callers) = (queue.started, std::mem::take(&mut queue.joined));
        let mut chain = queue.chain.clone();
        let before = chain.tag;
        let (result, left) = MutexGuard::unlocked(queue, || {
            let result = f(&mut chain, callers);
            let left = result.is_err() && self.writer.is_dirty();
            (result, left)
        });
        queue.running = false;
        queue.finished = number;
        if chain.tag != before {
            queue.recorded = number;
        }
        if !matches!(result, Ok((_, CommitOutcome::LogEntry))) {
            queue.committed = number;
        }
        // Also after an error: `f` may have committed before it failed, and a commit that fails
        // leaves the chain as it was.
        queue.chain = chain;
        if let Err(error) = &result {
            // An empty commit that was refused contains no changes for its callers: then nothing
            // latched, and all changes were frozen. (The generation may be of an earlier commit.)
            let was_empty = matches!(error, Error::NoSpace(_)) && queue.chain.unused_generation.is_some();
            if !was_empty || left || self.medium.pager.sticky_error().reason().is_some() {
                queue.failed = Some((number, error.clone()));
            }
        }
        self.done.notify_all();
        result.map(|(answer, _)| answer)
    }

    /// Waits for the commit in flight, then runs `f` without a leader. It makes nothing durable:
    /// callers that wait for a commit keep waiting.
    pub(in crate::txn) fn between_commits<R>(&self, f: impl FnOnce(&mut CommitTail) -> Result<R>) -> Result<R> {
        let mut queue = self.begin_running();
        let mut chain = queue.chain.clone();
        let result = MutexGuard::unlocked(&mut queue, || f(&mut chain));
        queue.chain = chain;
        queue.running = false;
        self.done.notify_all();
        result
    }

    /// Waits for the commit in flight, and keeps others from beginning one.
    fn begin_running(&self) -> MutexGuard<'_, Queue> {
        let mut queue = self.queue.lock();
        while queue.running {
            self.wait(&mut queue);
        }
        queue.running = true;
        queue
    }

    fn wait(&self, queue: &mut MutexGuard<'_, Queue>) {
        queue.waiting += 1;
        self.done.wait(queue);
        queue.waiting -= 1;
    }

    fn wait_for_callers(&self, queue: &mut MutexGuard<'_, Queue>) {
        let here = queue.joined;
        if let Some((expected, limit)) = queue.joining.plan(here) {
            let waited = self.joined.wait_while_for(queue, |queue| queue.joined < expected, limit);
            queue.joining.waited(waited.timed_out());
        }
    }

    // ---- the commit ----

    fn run_commit(&self, mut purpose: CommitReason, chain: &mut CommitTail) -> Result<CommitOutcome> {
        self.record.finish_deferred(chain)?;
        if purpose == CommitReason::Sync {
            if self.append(chain)? {
                return Ok(CommitOutcome::LogEntry);
            }
            purpose = CommitReason::Changes;
        }
        if let Some(frozen) = self.freeze_with_room(purpose, chain)? {
            self.record.write(purpose, chain, frozen)?;
            self.writer.lock().forget_written();
        }
        Ok(CommitOutcome::Commit)
    }

    /// Runs one commit as the leader, which keeps the writers' lock throughout, so that nothing can
    /// be published meanwhile.
    pub(in crate::txn) fn commit_locked(
        &self,
        purpose: CommitReason,
        chain: &mut CommitTail,
        transaction: &mut OpenTransaction<'_>,
    ) -> Result<()> {
        let Some(frozen) = self.freeze(purpose, chain, transaction)? else { return Ok(()) };
        self.record.write(purpose, chain, frozen)?;
        transaction.forget_written();
        Ok(())
    }

    /// Freezes the transaction. If dirty data finds no space for its nodes, at most two commits
    /// without it first release blocks that were freed before.
    ///
    /// While nothing else is changed these commits have the content of the commit before them, so
    /// nothing overtakes the dirty data (STAGE-3). They write only their record, whichever commit
    /// lacks space: a checkpoint would free blocks after the last erasing of a close. When the host
    /// refuses one, the result is `NoSpace` as without it, and nothing latches.
    fn freeze_with_room(&self, purpose: CommitReason, chain: &mut CommitTail) -> Result<Option<Frozen>> {
        for _ in 0..2 {
            let mut transaction = self.writer.lock();
            let no_space = match self.freeze(purpose, chain, &mut transaction) {
                Err(error @ Error::NoSpace(_)) if !transaction.is_changed() && self.allocator.waits_for_commit() => {
                    error
                }
                frozen => return frozen,
            };
            let frozen = self.freeze_changes(chain, &mut transaction, false)?;
            drop(transaction);
            match self.record.write(CommitReason::Truncate, chain, frozen) {
                // A deferred commit that must record the previous session is finished by the next
                // leader.
                Err(Error::NoSpace(_)) if self.medium.pager.sticky_error().reason().is_none() => return Err(no_space),
                written => written?,
            }
            self.writer.lock().forget_written();
        }
        self.freeze(purpose, chain, &mut self.writer.lock())
    }

    fn freeze(
        &self,
        purpose: CommitReason,
        chain: &CommitTail,
        transaction: &mut OpenTransaction<'_>,
    ) -> Result<Option<Frozen>> {
        let mut nodes = self.nodes.lock();
        transaction.flush_staged(&mut nodes.held)?;
        *nodes = LogReservation::default();
        drop(nodes);
        if !transaction.is_changed() && purpose == CommitReason::Changes {
            // A failed commit may have taken the changes: then they are not durable.
            self.medium.pager.sticky_error().check()?;
            return Ok(None);
        }
        self.freeze_changes(chain, transaction, true).map(Some)
    }

    /// Freezes the published state, even if it has no changes.
    fn freeze_changes(
        &self,
        chain: &CommitTail,
        transaction: &mut OpenTransaction<'_>,
        with_staged: bool,
    ) -> Result<Frozen> {
        if let Some((first, value)) = chain.previous_session {
            transaction.operate(true, |operation| operation.record_session(first, &value))?;
        }
        // As of now: the log may be laid over a later transaction before this one is written (TXN-9).
        let pending = chain.log.pending(with_staged);
        Ok(transaction.freeze(chain.unused_generation, chain.list_pages.len(), with_staged, pending))
    }

    // ---- queries ----

    pub(in crate::txn) fn is_running(&self) -> bool {
        self.queue.lock().running
    }

    pub(in crate::txn) fn log_use(&self) -> LogStats {
        let [entries, bytes] = [&self.logged.0, &self.logged.1].map(|count| count.load(Ordering::Relaxed));
        LogStats { entries, bytes, used_bytes: self.queue.lock().chain.log.used_blocks() * BLOCK }
    }

    /// Returns the generation of the newest record if its log is nearly full.
    pub(in crate::txn) fn nearly_full_log(&self) -> Option<Generation> {
        match self.queue.lock().chain.log {
            LogState::Open(tail) if tail.block - LOG.0 >= NEARLY_FULL => Some(tail.generation),
            _ => None,
        }
    }

    /// Returns whether the last commits and entries served one caller each.
    pub(in crate::txn) fn has_single_caller(&self) -> bool {
        self.queue.lock().joining.alone >= MIN_ALONE
    }

    pub(in crate::txn) fn chain(&self) -> CommitTail {
        self.queue.lock().chain.clone()
    }

    /// Begins with this chain, before the first commit.
    pub(in crate::txn) fn set_chain(&self, chain: CommitTail) {
        self.queue.lock().chain = chain;
    }

    /// A writer's newest durable record, with the last entry of its log (LINEAGE-1).
    pub(in crate::txn) fn durable(&self) -> Option<Durable> {
        let chain = self.chain();
        let mark = match (chain.session_first, chain.previous_session) {
            (Some(first), _) => {
                Some(Mark { session: self.record.session, first, generation: chain.generation, tag: chain.tag })
            }
            (None, Some((first, value))) => {
                Some(Mark { session: value.session, first, generation: value.last, tag: value.last_tag })
            }
            (None, None) => None,
        };
        mark.map(|mark| Durable::new(mark, chain.log.last()))
    }
}

// ---- one log write instead of a commit's pages and record (LOG-1 to LOG-5) ----

/// Reservation for the log entries since the last commit.
#[derive(Default)]
struct LogReservation {
    held: Option<Reservation>,
    /// Pieces of all entries since the last commit.
    pieces: u64,
}

impl GroupCommit {
    /// Writes an entry of all published and dirty changes and makes it durable. Returns false when
    /// a commit is needed: there is no log or no space in it, or a change that log entries cannot
    /// record.
    fn append(&self, chain: &mut CommitTail) -> Result<bool> {
        let LogState::Open(tail) = chain.log else { return Ok(false) };
        if self.medium.pager.storage().has_atomic_barrier() {
            // A commit takes one barrier as well, and an entry would be written twice.
            return Ok(false);
        }
        let blocks = LONGEST.min(LOG.1 - tail.block);
        if blocks == 0 {
            return Ok(false);
        }
        let pager = &self.medium.pager;
        pager.check_identity().map_err(|error| pager.sticky_error().record("writing into the log", error))?;
        let Some(entry) = self.writer.lock().log_entry(entry_capacity(blocks))? else { return Ok(false) };
        if entry.is_empty() {
            // A failed commit may have taken the changes: then they are not durable.
            pager.sticky_error().check()?;
            return Ok(true);
        }
        // Without space, or when the host fails, each fsync takes its own commit, which reports the
        // error.
        if !self.promise_nodes(entry.pieces.len() as u64, false).unwrap_or(false) {
            self.writer.lock().leave_log();
            return Ok(false);
        }
        chain.log_end = chain.log_end.max(tail.block + entry_blocks(entry.length()));
        let written = self.write_entry(&tail, &entry);
        if written.is_err() {
            // It counts as logged by now.
            self.writer.lock().leave_log();
        }
        let after = match written {
            Err(Error::NoSpace(reason)) if pager.sticky_error().reason().is_none() => {
                tracing::warn!("the host refused a write into the log: {reason}");
                return Ok(false);
            }
            written => written?,
        };
        self.logged.0.fetch_add(1, Ordering::Relaxed);
        self.logged.1.fetch_add((after.block - tail.block) * BLOCK, Ordering::Relaxed);
        chain.log = LogState::Open(after);
        Ok(true)
    }

    /// Reserves space for `pieces` more (LOG-5); returns whether there is enough. The next commit
    /// releases it.
    pub(in crate::txn) fn promise_nodes(&self, pieces: u64, essential: bool) -> Result<bool> {
        let mut nodes = self.nodes.lock();
        let held = nodes.held.as_ref().map_or(0, Reservation::groups);
        // In steps, so that the file need not grow with each entry.
        let wanted = (STEP + GROUPS_PER_PIECE * (nodes.pieces + pieces)).next_multiple_of(STEP);
        if wanted > held {
            if !self.allocator.reserve(wanted - held, keep_of(essential))? {
                return Ok(false);
            }
            self.allocator.reserved(wanted - held).join(&mut nodes.held);
        }
        nodes.pieces += pieces;
        Ok(true)
    }

    /// Returns the place after it.
    fn write_entry(&self, tail: &LogTail, entry: &LogEntry) -> Result<LogTail> {
        let body = entry.encode();
        let blocks = entry_blocks(body.len());
        let head = EntryHead {
            generation: tail.generation,
            record: tail.record,
            number: tail.number + 1, // fewer than the log has blocks
            length: body.len() as u32,
            previous: tail.entry,
            time: self.medium.environment.now(),
            blocks: blocks as u16,
        };
        let tag = self.medium.pager.write_entry(&head, tail.block, &body)?;
        Ok(LogTail { block: tail.block + blocks, number: head.number, entry: tag, ..*tail })
    }
}

/// Divisor of the last commit's duration: the delay is longer than programs need to write again,
/// and shorter than another commit.
const DELAY_SHARE: u32 = 2;
/// A slow medium does not keep a single caller waiting for longer.
const MAX_DELAY: Duration = Duration::from_millis(5);
/// Commits without a wait after one in vain, doubled with each that follows.
const DELAY_PAUSE: (u32, u32) = (4, 64);

/// Commits in a row after which the caller counts as single. Of several callers, one is served
/// alone now and then; with 1 instead of 8, four callers lost 4 % of their rate.
const MIN_ALONE: u32 = 8;

/// How long the leader waits for more callers.
///
/// Without waiting, the first of n callers that were served together leads the next commit alone
/// while the others arrive, so commits serve one caller and n - 1 in turn. With a wait of half a
/// commit, each commit serves all n.
#[derive(Debug, Default)]
struct CommitDelay {
    /// Callers of the last commit, and callers that arrived while it ran.
    expected: u64,
    /// Commits in a row that expect one caller.
    alone: u32,
    took: Duration,
    /// Commits that begin without waiting.
    paused: u32,
    pause: u32,
}

impl CommitDelay {
    /// Returns the number of callers to wait for and the time limit, when `here` callers want the
    /// commit that is about to begin.
    fn plan(&mut self, here: u64) -> Option<(u64, Duration)> {
        if here >= self.expected {
            return None;
        }
        if self.paused > 0 {
            self.paused -= 1;
            return None;
        }
        Some((self.expected, (self.took / DELAY_SHARE).min(MAX_DELAY)))
    }

    fn waited(&mut self, in_vain: bool) {
        self.pause = if in_vain { (self.pause * 2).clamp(DELAY_PAUSE.0, DELAY_PAUSE.1) } else { 0 };
        self.paused = self.pause;
    }

    fn ended(&mut self, served: u64, came: u64, took: Duration) {
        self.expected = served + came;
        self.alone = if self.expected <= 1 { self.alone.saturating_add(1) } else { 0 };
        self.took = took;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl GroupCommit {
        pub(in crate::txn) fn commit_without_staged(&self, chain: &mut CommitTail) -> Result<()> {
            self.record.finish_deferred(chain)?;
            let frozen = self.freeze_changes(chain, &mut self.writer.lock(), false)?;
            self.record.write(CommitReason::Truncate, chain, frozen)
        }

        pub(in crate::txn) fn waiting_callers(&self) -> u64 {
            self.queue.lock().waiting
        }
    }

    const TOOK: Duration = Duration::from_micros(600);

    #[test]
    fn who_came_together_is_waited_for_and_who_comes_alone_never_waits() {
        let mut joining = CommitDelay::default();
        assert_eq!(joining.plan(1), None);
        joining.ended(1, 0, TOOK);
        assert_eq!(joining.plan(1), None);
        joining.ended(1, 3, TOOK);
        assert_eq!(joining.plan(3), Some((4, TOOK / 2)));
        joining.waited(false);
        joining.ended(4, 0, TOOK);
        assert_eq!(joining.plan(4), None, "all are here");
        assert_eq!(joining.plan(1), Some((4, TOOK / 2)));
        joining.ended(4, 0, Duration::from_secs(1));
        assert_eq!(joining.plan(1), Some((4, MAX_DELAY)));
    }

    #[test]
    fn callers_count_as_single_after_a_row_of_commits_for_one() {
        let mut joining = CommitDelay::default();
        (0..MIN_ALONE).for_each(|_| joining.ended(1, 0, TOOK));
        assert!(joining.alone >= MIN_ALONE);
        joining.ended(1, 1, TOOK);
        joining.ended(1, 0, TOOK);
        assert!(joining.alone < MIN_ALONE);
    }

    #[test]
    fn waits_in_vain_become_rare() {
        let mut joining = CommitDelay::default();
        joining.ended(1, 1, TOOK);
        let mut waits = 0;
        for _ in 0..1000 {
            if joining.plan(1).is_some() {
                waits += 1;
                joining.waited(true);
            }
            joining.ended(1, 1, TOOK);
        }
        assert!(waits < 25, "{waits}");
    }
}
