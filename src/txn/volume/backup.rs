//! Pinned versions of an open archive for backups, and backup volumes: their records name the
//! origin of their content.
//!
//! # Invariants
//! ORIGIN-1  A pinned version is the content of one durable record, and its origin is that record.
//!     As long as the pin lives, no page that the version reaches is reused: the pin holds the
//!     version, as a reader does. It ends with the process, also when the copy fails.
//! ORIGIN-2  The line of a backup is that of its origin: its history has the sessions before that
//!     one, and none of its own, as its records are never seen outside of it. So a comparison of a
//!     backup with a remembered commit uses its origin. The first session that writes to it as to
//!     an archive records the origin as the session before, and continues with higher numbers than
//!     that (9.1 rule 8). The nodes of a backup have its own numbers, which other commits of the
//!     line have as well. So the number of a node proves nothing about its age in a backup, nor in
//!     an archive that was one before. Such an archive shows by a gap of numbers between two
//!     sessions, since the first one that wrote to it counts on from the backup's own
//!     (`Pinned::counts_on_since`).
//! ORIGIN-3  Origin and content change in one operation, so every record of a backup names the
//!     version that its content has.

use std::cmp::Ordering;
use std::sync::Arc;

use super::{OpenOptions, Volume};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::{BackupOrigin, CommitRecord};
use crate::format::values::{HistoryValue, SnapshotValue};
use crate::format::{Generation, Key, Pointer, TreeId};
use crate::frame::PageCipher;
use crate::storage::Storage;
use crate::txn::ancestry::{Ancestry, Mark};
use crate::txn::commit::{CommitReason, CommitTail};
use crate::txn::operation::{Operation, reference_count};
use crate::txn::state::{Counters, State};

/// Records of one session that are remembered as pinned: a backup of every hour for half a year,
/// and 100 KB.
const MOST_PINNED: usize = 4096;

/// A pinned version of an archive, which stays readable as long as this lives.
pub(crate) struct Pinned {
    state: Arc<State>,
    /// Content as a snapshot record without a name.
    content: SnapshotValue,
    origin: BackupOrigin,
    /// Its nodes have numbers of their own (ORIGIN-2).
    of_backup: bool,
    /// The sessions before that of the origin.
    history: Vec<(Key, Vec<u8>)>,
}

impl Pinned {
    pub(crate) fn origin(&self) -> &BackupOrigin {
        &self.origin
    }

    pub(crate) fn state(&self) -> &State {
        &self.state
    }

    pub(super) fn content(&self) -> &SnapshotValue {
        &self.content
    }

    /// Returns whether all commits since `base`, its ancestor, have consecutive numbers: then every
    /// node with a number up to that of `base` existed in `base`.
    pub(crate) fn counts_on_since(&self, base: &BackupOrigin) -> Result<bool> {
        if self.of_backup {
            return Ok(false);
        }
        let mut last = None;
        for (key, value) in &self.history {
            let value = HistoryValue::decode(value)?;
            if last.is_some_and(|last: Generation| last >= base.generation && key.sub != last.0 + 1) {
                return Ok(false);
            }
            last = Some(value.last);
        }
        // Of the session of the base, which is the present one, nothing is in the history.
        Ok(last.is_none_or(|last| last < base.generation || self.origin.first.0 == last.0 + 1))
    }

    pub(crate) fn sessions(&self) -> usize {
        self.history.len()
    }
}

impl From<BackupOrigin> for Mark {
    fn from(origin: BackupOrigin) -> Mark {
        let BackupOrigin { session, first, generation, tag, .. } = origin;
        Mark { session, first, generation, tag }
    }
}

impl BackupOrigin {
    pub(super) fn session(&self) -> (Generation, HistoryValue) {
        (self.first, HistoryValue { session: self.session, last: self.generation, last_tag: self.tag })
    }
}

impl Volume {
    pub(crate) fn origin(&self) -> Option<BackupOrigin> {
        self.origin
    }

    /// Commits the present state and pins it. Errors: failures of a commit; `Damaged` when the
    /// history cannot be read.
    pub(crate) fn pin(&self) -> Result<Pinned> {
        let (state, origin, record) = if self.read_only() { self.opened()? } else { self.committed()? };
        let content = SnapshotValue {
            generation: record.generation,
            time: record.time,
            root: record.roots[TreeId::Live],
            inodes: record.inodes,
            name: Vec::new(),
        };
        Ok(Pinned { history: self.history_of(&state)?, of_backup: self.origin.is_some(), state, content, origin })
    }

    fn opened(&self) -> Result<(Arc<State>, BackupOrigin, Arc<CommitRecord>)> {
        let mark = self.opened_at().filter(|_| self.before_replay.get().is_none());
        let Some(Mark { session, first, generation, tag }) = mark else {
            return Err(Error::invalid(
                "this version is not a commit: it is a snapshot, or the archive was not closed and is open read-only",
            ));
        };
        let record = self.durable();
        // A copied backup keeps its origin.
        let time = record.origin.map_or(record.time, |origin| origin.time);
        Ok((self.state(), BackupOrigin { session, first, generation, tag, time }, record))
    }

    fn committed(&self) -> Result<(Arc<State>, BackupOrigin, Arc<CommitRecord>)> {
        self.committer.check_writable()?;
        self.committer.open_session()?;
        self.committer.as_leader(|chain| {
            // No operation may come between the commit and the read of its published state, so the
            // writers wait.
            let mut transaction = self.writer.lock();
            self.writer.mark_staged();
            // When nothing is changed, the newest record of this session says it already.
            self.committer.commit_locked(CommitReason::Changes, chain, &mut transaction)?;
            let record = self.durable();
            let origin = BackupOrigin {
                session: record.session,
                first: record.session_first,
                generation: record.generation,
                tag: chain.tag,
                time: record.time,
            };
            self.remember_pinned(&origin);
            Ok((self.state(), origin, record))
        })
    }

    fn remember_pinned(&self, origin: &BackupOrigin) {
        let mut pinned = self.pinned.lock();
        pinned.insert(origin.generation, origin.tag);
        if pinned.len() > MOST_PINNED {
            pinned.pop_first();
        }
    }

    /// Returns whether the present content, including this session's commits, is `origin` or a
    /// descendant of it.
    ///
    /// A machine that was set back continues in one session and repeats its numbers. So within a
    /// writer's own session a number alone proves nothing: only a record that this process pinned
    /// is known to be in its line. Any other record of the session may come from another machine's
    /// reader, or from this machine before it was set back: the result is [`Ancestry::Unknown`].
    pub(crate) fn descent_now(&self, origin: &BackupOrigin) -> Result<Ancestry> {
        let durable = self.durable();
        if !self.read_only() && (durable.session, durable.session_first) == (origin.session, origin.first) {
            return Ok(match durable.generation.cmp(&origin.generation) {
                Ordering::Less => Ancestry::Older,
                Ordering::Equal if self.chain().tag != origin.tag => Ancestry::Diverged,
                Ordering::Equal => Ancestry::Descendant,
                Ordering::Greater => match self.pinned.lock().get(&origin.generation) {
                    Some(tag) if *tag == origin.tag => Ancestry::Descendant,
                    Some(_) => Ancestry::Diverged,
                    None => Ancestry::Unknown,
                },
            });
        }
        Ok(match self.descent_from(&(*origin).into())? {
            // It is newer than the opened record, and other commits have replaced it since.
            Ancestry::Older if durable.generation >= origin.generation => Ancestry::Diverged,
            descent => descent,
        })
    }

    /// Returns how many extents (and dead-list entries) reference the page in a version.
    pub(crate) fn count_in(&self, state: &State, page: &Pointer) -> Result<u64> {
        reference_count(&state.trees.references, &self.medium.store, page.run.address)
    }

    pub(crate) fn cipher(&self) -> Arc<PageCipher> {
        self.medium.pager.cipher().clone()
    }

    /// Creates an empty volume for a copy of the pinned version. `header_sequence` is the number of
    /// its headers.
    pub(crate) fn begin_backup(
        &self,
        pinned: &Pinned,
        storage: Arc<dyn Storage>,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
    ) -> Result<Arc<Volume>> {
        let record = pinned.counters().to_record();
        let next = pinned.origin.generation.next();
        let volume = Volume::begin(storage, self.cipher(), environment, header_sequence, record, next)?;
        volume.committer.set_chain(CommitTail { tag: pinned.origin.tag, ..CommitTail::default() });
        Ok(volume)
    }

    /// Opens another file of this archive to read it. Errors: as [`Volume::open_seen`].
    pub(crate) fn read_copy(
        &self,
        storage: Arc<dyn Storage>,
        header_sequence: u64,
        memory: u64,
    ) -> Result<Arc<Volume>> {
        let options = OpenOptions { read_only: true, memory };
        let environment = self.medium.environment.clone();
        Volume::open_as(storage, self.cipher(), environment, header_sequence, &options, None, None)
    }

    /// Opens a backup of this archive to bring it up to the pinned version. Errors: as
    /// [`Volume::open_seen`].
    pub(crate) fn open_backup(
        &self,
        pinned: &Pinned,
        storage: Arc<dyn Storage>,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        memory: u64,
    ) -> Result<Arc<Volume>> {
        let options = OpenOptions { read_only: false, memory };
        let after = Some(pinned.origin.generation);
        Volume::open_as(storage, self.cipher(), environment, header_sequence, &options, None, after)
    }

    /// Runs one operation on a backup, which may be larger than others because a backup has no
    /// other writer. Only commits that return freed space come before it, and they keep the
    /// previous origin.
    pub(crate) fn operate_on_backup<R>(&self, f: impl FnOnce(&mut Operation<'_>) -> Result<R>) -> Result<R> {
        self.committer.check_writable()?;
        self.committer.open_session()?;
        self.writer.lock().operate(false, f)
    }
}

impl Pinned {
    fn counters(&self) -> Counters {
        // It has no snapshots.
        let none = Counters { newest_snapshot: Generation(0), newest_snapshot_id: 0, ..self.state.counters };
        Counters { origin: Some(self.origin), ..none }
    }
}

impl Operation<'_> {
    /// Replaces the counters and the history with those of the pinned version: from the publication
    /// of this operation on the volume is a backup of that version (ORIGIN-3).
    pub(crate) fn becomes_backup_of(&mut self, pinned: &Pinned) -> Result<()> {
        self.changed = true;
        self.needs_commit();
        self.counters = pinned.counters();
        self.replace_history(&pinned.history)
    }
}
