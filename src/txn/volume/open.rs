//! Makes a new volume, opens an existing one, and replays the log over the opened record.

use std::sync::Arc;

use super::{OpenOptions, Start, Volume};
use crate::env::Environment;
use crate::error::{Error, Result};
use crate::format::record::CommitRecord;
use crate::format::{BLOCK, Generation, LOG, MAX_INO, MIN_BLOCKS, RING_SLOTS, SessionId};
use crate::frame::PageCipher;
use crate::pager::Pager;
use crate::pager::space::SpaceMap;
use crate::storage::Storage;
use crate::txn::ancestry::Mark;
use crate::txn::commit::{CommitTail, LogState, Session};
use crate::txn::findings::Finding;
use crate::txn::operation::{Logged, Operation};
use crate::txn::recovery::{self, OpenedRecord};
use crate::txn::state::{State, View};
use crate::txn::writer::INODES_OF_TRANSACTION;

/// Memory while an archive is made: nothing is read back.
const CREATE_MEMORY: u64 = 16 << 20;

impl Volume {
    /// Creates an empty volume in a storage with written headers: random ring slots, empty trees.
    /// Nothing is durable before the first `commit`.
    pub(crate) fn create(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
    ) -> Result<Arc<Volume>> {
        let record = CommitRecord { next_ino: 1, next_dead: 1, next_snapshot: 1, ..CommitRecord::default() };
        Volume::begin(storage, cipher, environment, header_sequence, record, Generation(1))
    }

    /// Like [`Volume::create`], for tests that write any record: every inode number below 2^46 was
    /// given out.
    #[cfg(test)]
    pub(crate) fn create_for_records(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
    ) -> Result<Arc<Volume>> {
        let record = CommitRecord { next_ino: 1 << 46, next_dead: 1, next_snapshot: 1, ..CommitRecord::default() };
        Volume::begin(storage, cipher, environment, header_sequence, record, Generation(1))
    }

    /// Creates an empty volume in `storage` that continues from the newest commit of `from`:
    /// generations, inode numbers and the history of sessions continue, and its first record names
    /// that of `from`. `header_sequence` is the number of its headers.
    pub(crate) fn continue_from(
        from: &Volume,
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
    ) -> Result<Arc<Volume>> {
        let old = from.durable();
        let record = CommitRecord {
            next_ino: old.next_ino,
            next_dead: old.next_dead,
            next_snapshot: old.next_snapshot,
            ..CommitRecord::default()
        };
        let next = from.open_generation();
        let volume = Volume::begin(storage, cipher, environment, header_sequence, record, next)?;
        let CommitTail { tag, previous_session, .. } = from.chain();
        volume.committer.set_chain(CommitTail { tag, previous_session, ..CommitTail::default() });
        Ok(volume)
    }

    /// An empty volume with the counters of `record`, whose first commit will be `next_generation`.
    pub(super) fn begin(
        storage: Arc<dyn Storage>,
        cipher: impl Into<Arc<PageCipher>>,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        mut record: CommitRecord,
        next_generation: Generation,
    ) -> Result<Arc<Volume>> {
        record.total_blocks = storage.len()?.max(MIN_BLOCKS * BLOCK) / BLOCK;
        let pager = Arc::new(Pager::new(storage, cipher, CREATE_MEMORY as usize / 4).without_error_log());
        if pager.storage().len()? < record.total_blocks * BLOCK {
            pager.storage().set_len(record.total_blocks * BLOCK)?;
        }
        pager.storage().keep_ballast();
        for slot in 0..RING_SLOTS {
            pager.scrub_slot(slot, &*environment)?;
        }
        if pager.cipher().has_log() {
            // Written once, its blocks are overwritten in place from then on.
            pager.erase_log(LOG.0, LOG.1, &*environment)?;
        }
        let start = Start {
            space: SpaceMap::new(record.total_blocks, 0, false, pager.reserved()),
            next_generation,
            record,
            memory: CREATE_MEMORY,
            session: Session { id: new_session(&*environment)?, header_sequence, read_only: false },
            opened: OpenedRecord::default(),
        };
        let volume = Volume::assemble(pager, environment, start);
        volume.writer.lock().mark_changed();
        Ok(Arc::new(volume))
    }

    /// Recovers (writable) or only reads (read-only) the newest trustworthy commit. Errors:
    /// `Damaged` with the missing part, `ReadOnly` when a writable open meets a read-only storage.
    #[cfg_attr(not(test), allow(dead_code, reason = "programs open with rollback state"))]
    pub(crate) fn open(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        options: &OpenOptions,
    ) -> Result<Arc<Volume>> {
        Volume::open_seen(storage, cipher, environment, header_sequence, options, None)
    }

    /// Like [`Volume::open`]; `seen` is remembered as durable, so recovery does not undo it
    /// (LINEAGE-2).
    pub(crate) fn open_seen(
        storage: Arc<dyn Storage>,
        cipher: PageCipher,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        options: &OpenOptions,
        seen: Option<&Mark>,
    ) -> Result<Arc<Volume>> {
        Volume::open_as(storage, cipher, environment, header_sequence, options, seen, None)
    }

    /// Opens a volume. With `backup_after` a backup is opened to be updated with commits of higher
    /// numbers than this one, and stays a backup.
    pub(super) fn open_as(
        storage: Arc<dyn Storage>,
        cipher: impl Into<Arc<PageCipher>>,
        environment: Arc<dyn Environment>,
        header_sequence: u64,
        options: &OpenOptions,
        seen: Option<&Mark>,
        backup_after: Option<Generation>,
    ) -> Result<Arc<Volume>> {
        if storage.read_only() && !options.read_only {
            return Err(Error::ReadOnly("the archive's file cannot be written".into()));
        }
        let writable = !options.read_only;
        let pager = Pager::new(storage, cipher, (options.memory / 2) as usize);
        let pager = Arc::new(if backup_after.is_some() { pager.without_error_log() } else { pager });
        let mut recovered = recovery::choose(&pager, writable, seen)?;
        let recorded_ino = recovered.next_ino();
        let mut record = recovered.record.clone();
        let origin = record.origin;
        if writable && backup_after.is_none() {
            // New writes are in no backup.
            record.origin = None;
        }
        if !record.closed {
            // Numbers of files that were lost with the last session must not come to mean others.
            let next = record.next_ino.saturating_add(INODES_OF_TRANSACTION).min(MAX_INO + 1);
            record.next_ino = record.next_ino.max(next);
        }
        let length = pager.storage().len()?;
        let total = record.total_blocks.min(length / BLOCK).max(MIN_BLOCKS);
        let opened = std::mem::take(&mut recovered.opened);
        let line = origin.map_or_else(|| recovered.line(), |origin| vec![(origin.into(), None)]);
        let (line, carried) = line.into_iter().unzip();
        let start = Start {
            space: SpaceMap::new(total, record.used_blocks, !record.closed, pager.reserved()),
            next_generation: backup_after.map_or(recovered.next_generation, |after| recovered.generation_after(after)),
            memory: options.memory,
            session: Session { id: new_session(&*environment)?, header_sequence, read_only: options.read_only },
            opened: OpenedRecord { line, carried, ..opened },
            record,
        };
        let mut volume = Volume::assemble(pager, environment, start);
        volume.origin = origin;
        volume.recorded_ino = recorded_ino;
        if writable {
            let logged = recovered.logged.as_ref().map(|(logged, _)| logged);
            refuse(volume.contradictions(&recovered.record, recorded_ino, logged)?)?;
        }
        let mut chain = CommitTail::default();
        let auditor = volume.auditor();
        let whole = recovered.restore_space(&volume.allocator, &volume.medium.pager, &mut chain)?;
        if !whole {
            tracing::warn!("the space map's chain of commit records is broken: it is rebuilt from the trees");
            match auditor.rebuild_space(&mut chain) {
                // Readers need no space map, and intact data must stay readable.
                Err(Error::Damaged(reason)) if !writable => tracing::warn!("{reason}"),
                rebuilt => rebuilt?,
            }
        }
        drop(auditor);
        if writable {
            refuse(volume.allocator.find_behind_end()?.into_iter().collect())?;
            volume.medium.pager.storage().keep_ballast();
            recovered.scrub_rejected(&volume.medium.pager, &*volume.medium.environment)?;
            if length > total * BLOCK {
                // Growth of a transaction that never committed, or a part of a block: no page of
                // the chosen record lies there.
                volume.medium.pager.storage().set_len(total * BLOCK)?;
            }
        }
        if let Some(origin) = origin {
            // ORIGIN-2
            chain.previous_session = backup_after.is_none().then(|| origin.session());
        }
        volume.committer.set_chain(chain);
        *volume.logged.lock() = recovered.logged.take().map(|(logged, _)| logged);
        Ok(Arc::new(volume))
    }
}

/// Refuses to write on top of a record when its counters would make the next change replace a
/// record that is in use.
fn refuse(contradictions: Vec<Finding>) -> Result<()> {
    contradictions.first().map_or(Ok(()), |first| {
        Err(Error::damaged(format!(
            "{first}, so that the next change would destroy data; the archive can only be read"
        )))
    })
}

fn new_session(environment: &dyn Environment) -> Result<SessionId> {
    let mut session = SessionId::default();
    environment.fill_random(&mut session)?;
    Ok(session)
}

impl Volume {
    /// Returns the log entries after the opened record, once; the caller replays them before
    /// anything else is read or changed.
    pub(crate) fn take_logged(&self) -> Option<Logged> {
        self.logged.lock().take()
    }

    /// Returns whether a reader sees more than the trees have.
    pub(crate) fn lays_log(&self) -> bool {
        self.before_replay.get().is_some()
    }

    /// Adds the records to the open transaction, and has `stage` accept the `pieces` at the same
    /// time. `stage` gets the state with the records, may use space that is already reserved, and
    /// waits for nothing. The next commit makes them durable; the one before, the first of the
    /// session, names them as pending (LOG-4). Errors: `NoSpace` when there is no space to replay
    /// them: nothing is lost then, and a reader needs none. `Damaged` when a record has no place
    /// (LOG-6).
    pub(crate) fn replay(
        &self,
        logged: &Logged,
        pieces: u64,
        stage: &mut dyn FnMut(View<'_>) -> Result<()>,
    ) -> Result<()> {
        self.committer.open_session()?;
        let _queued = self.space_waiter.await_operation(logged.records.len() as u64, true)?;
        // After the last commit that could give it back: the next one is to use it (LOG-5).
        if !self.space_waiter.have_room(&|| self.committer.promise_nodes(pieces, true))? {
            return Err(Error::NoSpace("no room to replay the log".into()));
        }
        self.committer.between_commits(|chain| {
            let mut transaction = self.writer.lock();
            let laid = transaction.operate(true, |operation| operation.replay(logged));
            laid.and_then(|()| stage(self.view(&self.state()))).map_err(|error| match error {
                Error::Damaged(reason) => Error::damaged(format!(
                    "the log changes damaged data, so the archive can be read but not written: {reason}"
                )),
                error => error,
            })?;
            if let LogState::Pending { laid, .. } = &mut chain.log {
                *laid = true;
            }
            Ok(())
        })
    }

    /// Like [`Self::replay`], in memory only, for read-only volumes.
    pub(crate) fn replay_read_only(
        &self,
        logged: &Logged,
        stage: &mut dyn FnMut(View<'_>) -> Result<()>,
    ) -> Result<()> {
        let versions = &self.medium.versions;
        let base = versions.published();
        let mut operation = Operation::new(&self.medium.store, versions.open_generation(), &base);
        operation.replay_read_only(logged)?;
        let Operation { trees, counters, .. } = operation;
        let _first = self.before_replay.set(base.clone());
        versions.publish(Arc::new(State { trees, counters, sequence: base.sequence + 1 }));
        stage(self.view(&self.state()))
    }

    /// Overwrites the log after the entries of the newest record.
    pub(super) fn erase_log(&self) -> Result<()> {
        self.committer.between_commits(|chain| {
            if let Some(start) = chain.log.needed_to().filter(|start| *start < chain.log_end) {
                self.medium.pager.erase_log(start, chain.log_end, &*self.medium.environment)?;
                chain.log_end = start;
            }
            Ok(())
        })
    }
}
