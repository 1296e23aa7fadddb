//! The open archive: owns the parts of a transaction, delegates each call to the responsible part,
//! and ends them in order.
//!
//! The parts are fields in the order of their locks, outermost first. Each part can reach only
//! later parts, so no lock can be taken against the order. `ARCHITECTURE.md` has the whole table.

mod backup;
#[cfg(test)]
mod for_tests;
mod open;
mod pages;
mod snapshots;

pub(crate) use backup::Pinned;
pub(crate) use pages::{UnreferencedPages, WrittenPiece};
pub(crate) use snapshots::{Choice, ReadView};

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::findings::{counter_contradictions, record_contradictions};
use super::operation::Logged;
use super::writer::StalePages;
use crate::btree::NodeStore;
use crate::env::Environment;
use crate::error::{CacheStats, Error, LogStats, Result, SnapshotStats};
use crate::format::record::{BackupOrigin, CommitRecord};
use crate::format::{BLOCK, Generation, Key, Tag};
use crate::pager::Pager;
use crate::pager::space::SpaceMap;
use crate::txn::allocator::{Allocator, Reservation, groups_for, keep_of};
use crate::txn::ancestry::{Ancestry, Durable, EntryMark, History, Mark};
use crate::txn::audit::{Audit, Auditor};
use crate::txn::commit::{CommitReason, CommitTail, CommitTicket, GroupCommit, Session};
use crate::txn::findings::Finding;
use crate::txn::operation::Operation;
use crate::txn::recovery::{self, LostPage, OpenedRecord};
use crate::txn::space_wait::SpaceWaiter;
use crate::txn::state::{Counters, State, Versions, View, VolumeContext};
use crate::txn::writer::{VolumeOwner, Writer};

/// Minimum seconds that a free block keeps its old ciphertext; the maximum is twice that plus the
/// time to drain.
const ERASE_AFTER: i64 = 5;

pub(crate) struct OpenOptions {
    pub(crate) read_only: bool,
    /// Bytes for frame cache, node cache, dirty nodes and space map together.
    pub(crate) memory: u64,
}

struct Start {
    record: CommitRecord,
    next_generation: Generation,
    space: SpaceMap,
    memory: u64,
    session: Session,
    opened: OpenedRecord,
}

pub(crate) struct Volume {
    /// Held while a snapshot is taken or removed, also over commits; true while a begun removal may
    /// be unfinished.
    snapshots: Mutex<bool>,
    /// Snapshot usage for callers that must not wait for the host; None before the first look and
    /// after one that failed.
    snapshot_use: Mutex<Option<SnapshotStats>>,
    space_waiter: SpaceWaiter,
    committer: Arc<GroupCommit>,
    writer: Arc<Writer>,
    allocator: Arc<Allocator>,
    medium: Arc<VolumeContext>,
    /// Second of the last background erase.
    last_erase: Mutex<i64>,
    opened: OpenedRecord,
    /// Origin of the backup as of opening.
    origin: Option<BackupOrigin>,
    /// Next inode number that the archive had when it was opened, before numbers were left out.
    recorded_ino: u64,
    /// Log entries after the opened record, until they are replayed.
    logged: Mutex<Option<Logged>>,
    /// State that a reader opened, before log replay or the switch to a snapshot.
    before_replay: OnceLock<Arc<State>>,
    /// The snapshot that this is a view of, in another open archive.
    snapshot: Option<u64>,
    /// The records of this session that were pinned, which backups may show.
    pinned: Mutex<BTreeMap<Generation, Tag>>,
}

/// Freed pages become free when the commit after theirs is durable, and one may be in flight: so
/// three times the share waits at most, a tenth of the pages in use.
const FREED_SHARE: u64 = 32;

impl Volume {
    fn assemble(pager: Arc<Pager>, environment: Arc<dyn Environment>, start: Start) -> Volume {
        let Start { record, next_generation, space, memory, session, opened } = start;
        let recorded_ino = record.next_ino;
        let medium = Arc::new(VolumeContext {
            store: NodeStore::new(pager.clone(), (memory / 4) as usize),
            versions: Versions::new(record, next_generation),
            pager,
            environment,
        });
        let allocator = Arc::new(Allocator::new(medium.clone(), space, memory));
        let writer = Arc::new(Writer::new(medium.clone(), allocator.clone(), memory));
        let committer = Arc::new(GroupCommit::new(medium.clone(), allocator.clone(), writer.clone(), &session));
        Volume {
            // A session that was interrupted may have left one.
            snapshots: Mutex::new(true),
            snapshot_use: Mutex::default(),
            space_waiter: SpaceWaiter::new(committer.clone(), writer.clone(), allocator.clone()),
            committer,
            writer,
            allocator,
            medium,
            last_erase: Mutex::new(0),
            opened,
            origin: None,
            recorded_ino,
            logged: Mutex::default(),
            before_replay: OnceLock::new(),
            snapshot: None,
            pinned: Mutex::default(),
        }
    }

    // ---- parts ----

    pub(crate) fn space_waiter(&self) -> &SpaceWaiter {
        &self.space_waiter
    }

    pub(crate) fn writer(&self) -> &Writer {
        &self.writer
    }

    pub(crate) fn allocator(&self) -> &Allocator {
        &self.allocator
    }

    pub(crate) fn stale_pages(&self) -> &StalePages {
        self.writer.stale_pages()
    }

    // ---- published state ----

    /// The current published version. Never waits.
    pub(crate) fn state(&self) -> Arc<State> {
        self.medium.versions.published()
    }

    pub(crate) fn view<'a>(&'a self, state: &'a State) -> View<'a> {
        View { tree: &state.trees.live, store: &self.medium.store, finger: None }
    }

    #[cfg(any(test, debug_assertions))]
    pub(crate) fn store(&self) -> &NodeStore {
        &self.medium.store
    }

    pub(crate) fn history(&self) -> Result<Vec<(Key, Vec<u8>)>> {
        self.history_of(&self.state())
    }

    fn history_of(&self, state: &State) -> Result<Vec<(Key, Vec<u8>)>> {
        let mut records = Vec::new();
        state.trees.history.scan(&self.medium.store, Key::MIN, Key::MAX, &mut |key, value| {
            records.push((key, value.to_vec()));
            Ok(ControlFlow::Continue(()))
        })?;
        Ok(records)
    }

    /// Returns the generation of the open transaction: no record in the trees has a later one.
    pub(crate) fn open_generation(&self) -> Generation {
        self.medium.versions.open_generation()
    }

    /// The newest durable record (generation, time, counters).
    pub(crate) fn durable(&self) -> Arc<CommitRecord> {
        arc_swap::Guard::into_inner(self.medium.versions.durable())
    }

    pub(crate) fn read_only(&self) -> bool {
        self.committer.read_only
    }

    pub(crate) fn lost(&self) -> Option<&str> {
        self.opened.lost.as_deref()
    }

    pub(crate) fn lost_pages(&self) -> &[LostPage] {
        &self.opened.lost_pages
    }

    pub(crate) fn fallback(&self) -> Option<String> {
        self.opened.fallback.clone()
    }

    pub(crate) fn latched(&self) -> Option<&str> {
        self.medium.pager.sticky_error().reason()
    }

    pub(crate) fn error_for(&self, error: Error) -> Error {
        self.medium.pager.sticky_error().error_for(error)
    }

    // ---- figures ----

    pub(crate) fn allocated_on_host(&self) -> Result<u64> {
        self.medium.pager.storage().allocated()
    }

    pub(crate) fn reserved_blocks(&self) -> &'static [(u64, u64)] {
        self.medium.pager.reserved()
    }

    /// Returns sizes and hit counts of the chunk, head and node caches.
    pub(crate) fn cache_use(&self) -> [CacheStats; 3] {
        let (chunks, heads) = self.medium.pager.cache_use();
        [chunks, heads, self.medium.store.usage()]
    }

    /// Drops decrypted, unchanged data from memory: pages of files, heads and nodes of trees.
    pub(crate) fn forget_plaintext(&self) {
        self.medium.pager.clear_data_caches();
        self.medium.store.clear();
    }

    /// Runs `f` with a buffer for file data, which [`Volume::wipe_buffers`] wipes.
    pub(crate) fn with_read_buffer<R>(&self, f: impl FnOnce(&mut Vec<u8>) -> R) -> R {
        self.medium.pager.read_buffers().with_buffer(f)
    }

    pub(crate) fn wipe_buffers(&self) {
        self.medium.pager.wipe_buffers();
    }

    // ---- room ----

    /// Promises space for `bytes` of file data in `pages` pages in the worst case; with 0 pages
    /// `bytes` is the size of whole groups. Errors: `NoSpace` (nothing else is disturbed),
    /// `WriteFailed`, `ReadOnly`.
    pub(crate) fn reserve_data(&self, bytes: u64, pages: u64) -> Result<Reservation> {
        self.committer.check_writable()?;
        self.committer.open_session()?;
        self.space_waiter.reserve(groups_for(bytes, pages), false)
    }

    /// Like [`Self::reserve_data`] for data that was accepted before, which may use the reserve of
    /// deletes: groups of four blocks.
    pub(crate) fn reserve_accepted(&self, groups: u64) -> Result<Reservation> {
        self.committer.check_writable()?;
        self.committer.open_session()?;
        self.space_waiter.reserve(groups, true)
    }

    /// Reserves groups of four blocks if they are available without a commit; callable under the
    /// writers' lock.
    pub(crate) fn reserve_spare(&self, groups: u64) -> Option<Reservation> {
        self.reserve_at_once(groups, false)
    }

    /// Like [`Self::reserve_spare`] for data that was accepted before, which may use the reserve of
    /// deletes.
    pub(crate) fn reserve_spare_accepted(&self, groups: u64) -> Option<Reservation> {
        self.reserve_at_once(groups, true)
    }

    fn reserve_at_once(&self, groups: u64, essential: bool) -> Option<Reservation> {
        self.allocator.reserve(groups, keep_of(essential)).ok()?.then(|| self.allocator.reserved(groups))
    }

    // ---- changes ----

    /// Sets the owner; later calls have no effect.
    pub(crate) fn set_owner(&self, owner: impl VolumeOwner + 'static) {
        self.writer.set_owner(Box::new(owner));
    }

    pub(crate) fn has_log(&self) -> bool {
        self.medium.pager.cipher().has_log()
    }

    pub(crate) fn log_use(&self) -> LogStats {
        self.committer.log_use()
    }

    pub(crate) fn nearly_full_log(&self) -> Option<Generation> {
        self.committer.nearly_full_log()
    }

    pub(crate) fn is_committing(&self) -> bool {
        self.committer.is_running()
    }

    /// Returns whether the pages that were freed since the last commit take more than `least` bytes
    /// and more than a 32nd of the pages in use.
    pub(crate) fn has_freed(&self, least: u64) -> bool {
        let freed = self.writer.freed_blocks();
        freed * BLOCK > least && freed > self.allocator.used_blocks() / FREED_SHARE
    }

    /// Runs `f` as `OpenTransaction::operate` does, alone among writers. `records` is about how
    /// many tree records `f` changes; `essential` operations (delete, truncate, reclaim, write-out
    /// of accepted data) may use the reserve. Commits first when too many nodes are dirty or freed
    /// space waits for a commit.
    pub(crate) fn operate<R>(
        &self,
        records: u64,
        essential: bool,
        f: impl FnOnce(&mut Operation<'_>) -> Result<R>,
    ) -> Result<R> {
        self.committer.check_writable()?;
        self.committer.open_session()?;
        if self.writer.commit_is_due() {
            self.commit()?;
        }
        let _queued = self.space_waiter.await_operation(records, essential)?;
        self.writer.lock().operate(essential, f)
    }

    // ---- commits ----

    /// Returns when everything published (and staged, through the flusher) before the call is
    /// durable. Concurrent callers share commits.
    pub(crate) fn commit(&self) -> Result<Generation> {
        self.committer.commit_for(CommitReason::Changes)
    }

    /// Counts a caller of [`Self::commit`] in without waiting; see [`GroupCommit::want_commit`].
    pub(crate) fn want_commit(&self) -> Result<CommitTicket> {
        self.committer.want_commit()
    }

    /// [`Self::commit`], by a caller that was counted in before.
    pub(crate) fn commit_wanted(&self, wanted: CommitTicket) -> Result<Generation> {
        self.committer.wait_for_commit(wanted, CommitReason::Changes)
    }

    /// Like [`Self::commit_wanted`], but an entry of the log suffices.
    pub(crate) fn sync_wanted(&self, wanted: CommitTicket) -> Result<Generation> {
        self.committer.wait_for_commit(wanted, CommitReason::Sync)
    }

    pub(in crate::txn) fn chain(&self) -> CommitTail {
        self.committer.chain()
    }

    // ---- the past ----

    /// The newest record and entry that may be remembered outside of the file (LINEAGE-1).
    pub(crate) fn durable_point(&self) -> Option<Durable> {
        if self.read_only() { self.past(&self.state()).durable_to_reader() } else { self.committer.durable() }
    }

    /// The record that was chosen when the archive was opened.
    pub(crate) fn opened_at(&self) -> Option<Mark> {
        self.opened.line.first().copied()
    }

    pub(crate) fn descent_from(&self, seen: &Mark) -> Result<Ancestry> {
        self.past(&self.state()).descent_from(seen)
    }

    /// Returns the same for an entry of the log of `seen`, a record of this line.
    pub(crate) fn descent_from_entry(&self, seen: &Mark, entry: &EntryMark) -> Ancestry {
        self.past(&self.state()).descent_from_entry(seen, entry)
    }

    /// Returns the number of valid log entries found on opening.
    pub(crate) fn opened_entries(&self) -> usize {
        self.opened.log.as_ref().map_or(0, |log| log.tags.len())
    }

    pub(crate) fn trail(&self, mark: Mark, most: usize) -> Result<Vec<Mark>> {
        self.past(&self.state()).trail(mark, most)
    }

    fn past<'a>(&'a self, state: &'a State) -> History<'a> {
        History {
            line: &self.opened.line,
            carried: &self.opened.carried,
            log: self.opened.log.as_ref(),
            history: &state.trees.history,
            store: &self.medium.store,
        }
    }

    // ---- audits ----

    /// Recomputes the used blocks and the count of every page from the live tree, snapshots and
    /// dead lists, and compares them with the space map and reference records; `full` opens every
    /// page. A sound archive has no findings. Writers wait meanwhile. `progress` gets (blocks done,
    /// blocks in use).
    pub(crate) fn audit(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Audit> {
        if self.read_only() {
            let mut contradictions = self.contradictions(&self.durable(), self.recorded_ino, None)?;
            contradictions.extend(self.allocator.find_behind_end()?);
            return self.auditor().audit(&self.chain(), contradictions, full, progress);
        }
        self.committer.as_leader(|chain| {
            let mut transaction = self.writer.lock();
            self.committer.commit_locked(CommitReason::Changes, chain, &mut transaction)?;
            let next_ino = self.state().counters.next_ino;
            let mut contradictions = self.contradictions(&self.durable(), next_ino, None)?;
            contradictions.extend(self.allocator.find_behind_end()?);
            self.auditor().audit(chain, contradictions, full, progress)
        })
    }

    pub(crate) fn check_space(&self, full: bool, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Finding>> {
        let Audit { mut findings, of_files, .. } = self.audit(full, progress)?;
        findings.extend(of_files);
        Ok(findings)
    }

    /// Returns the contradictions between the counters of `record`, the state of which is
    /// published, and its trees and the log after it.
    fn contradictions(&self, record: &CommitRecord, next_ino: u64, logged: Option<&Logged>) -> Result<Vec<Finding>> {
        let state = self.state();
        let given = Counters { next_ino, ..state.counters };
        let mut found = record_contradictions(record);
        found.extend(counter_contradictions(&given, &state.trees, logged, &self.medium.store)?);
        Ok(found)
    }

    fn auditor(&self) -> Auditor<'_> {
        // A reader replays the log over tree 1 alone: space and counts are those of the record.
        let state = self.before_replay.get().cloned().unwrap_or_else(|| self.state());
        Auditor { allocator: &self.allocator, medium: &self.medium, state }
    }

    // ---- in the background, and at the end ----

    /// Runs one background step: confirms the last commit of an idle archive, every 5 s erases
    /// blocks that were free 5 s before, sweeps a region after an unclean open, continues the
    /// removal of a snapshot. Returns whether there is more to do at once.
    pub(crate) fn maintain(&self) -> Result<bool> {
        self.committer.check_writable()?;
        let sticky_error = self.medium.pager.sticky_error();
        self.medium
            .pager
            .check_identity()
            .map_err(|error| sticky_error.record("looking after the archive's file", error))?;
        self.allocator.release_pending_frees();
        let confirmed = match self.confirm() {
            // Erasing blocks that are already free may give the host the space that the record
            // lacks.
            Err(Error::NoSpace(reason)) if sticky_error.reason().is_none() => Err(Error::NoSpace(reason)),
            confirmed => Ok(confirmed?),
        };
        let swept = self.allocator.sweep_step()? | self.allocator.look_step()?;
        if self.erase_is_due() {
            self.allocator.erase_aged()?;
            self.erase_log()?;
        }
        let removed = self.removal_step_aside();
        confirmed?;
        Ok(swept | removed?)
    }

    /// Makes a commit without changes when the newest record may be undone (TXN-8) or delays the
    /// release of blocks (TXN-1), and no other commit is due.
    ///
    /// This ends: such a commit lists at most the pages of a checkpoint, and after it no checkpoint
    /// is due, so the next one lists nothing and is the last. While other commits run, each record
    /// confirms the one before it, and this adds at most one for each step. A commit that a full
    /// host refuses changes nothing and is left for the next step.
    fn confirm(&self) -> Result<()> {
        let wanted = self.allocator.waits_for_commit() || recovery::may_be_undone(&self.durable());
        if wanted && !self.writer.is_dirty() {
            self.committer.commit_for(CommitReason::FreeSpace).map(drop)
        } else {
            Ok(())
        }
    }

    /// Recycled blocks need no erasing, so freed blocks get this long to be recycled.
    fn erase_is_due(&self) -> bool {
        let now = self.medium.environment.now().seconds;
        let mut last = self.last_erase.lock();
        // A clock that was set back must not stop erasing.
        let due = now < *last || now - *last >= ERASE_AFTER;
        if due {
            *last = now;
        }
        due
    }

    /// Like [`Self::erase_all`], but searches all free space for old ciphertext, including space
    /// that no remembered session freed. Errors: `InUse` if readers of older versions still need
    /// freed pages; all others are erased then.
    pub(crate) fn erase_everything(&self) -> Result<()> {
        self.committer.check_writable()?;
        // Later ones free no page that was freed until now.
        let last = self.medium.versions.sequence();
        self.allocator.restart_sweep();
        self.erase_all()?;
        if !self.allocator.has_pending_frees_until(last) {
            return Ok(());
        }
        let are_gone = self.space_waiter.await_readers_until(last);
        self.erase_all()?;
        if are_gone {
            return Ok(());
        }
        Err(Error::InUse(
            "deleted data is still in use by a backup, a comparison or a slow read: purge again after that".into(),
        ))
    }

    /// Erases everything that was freed until now, without waiting for its age (unmount).
    pub(crate) fn erase_all(&self) -> Result<()> {
        self.committer.check_writable()?;
        while self.allocator.sweep_step()? {}
        for _ in 0..3 {
            if !self.writer.is_dirty() && !self.allocator.waits_for_commit() {
                break;
            }
            self.committer.commit_for(CommitReason::FreeSpace)?;
        }
        self.allocator.release_pending_frees();
        // Blocks being erased cannot be allocated for a moment, so other free blocks must exist.
        drop(self.space_waiter.await_operation(0, false)?);
        self.allocator.erase_all()?;
        self.erase_log()
    }

    /// Makes a commit without changes, whose record carries the number of the header. The archive
    /// stays as it was: closed, or to be swept by the next session. No call may follow.
    pub(crate) fn record_header(&self) -> Result<()> {
        let closed = self.durable().closed;
        self.committer.open_session()?;
        if closed { self.close() } else { Ok(()) }
    }

    /// Commits, drains, erases every free block, truncates the tail and writes the closed record.
    /// No call may follow.
    pub(crate) fn close(&self) -> Result<()> {
        if self.read_only() {
            return Ok(());
        }
        self.committer.check_writable()?;
        if !self.writer.is_dirty() && self.durable().closed && self.chain().session_first.is_none() {
            return Ok(());
        }
        self.commit()?;
        self.allocator.load_tail()?;
        self.erase_all()?;
        // Erasing may have put regions away again.
        self.allocator.load_tail()?;
        let length = self.allocator.trim_tail();
        let storage = self.medium.pager.storage();
        if storage.len()? > length {
            if self.durable().total_blocks * BLOCK > length && !storage.has_atomic_barrier() {
                // The file must never be shorter than a record that may be trusted says.
                self.committer.commit_for(CommitReason::Truncate)?;
            }
            storage.set_len(length)?;
        }
        self.committer.commit_for(CommitReason::Close)?;
        // The next session needs it when the disk is full.
        storage.keep_ballast();
        Ok(())
    }
}
