//! Replays the log over the opened record, and erases log entries that no record needs.

use std::sync::Arc;

use super::Volume;
use crate::error::{Error, Result};
use crate::txn::commit::LogState;
use crate::txn::log::Logged;
use crate::txn::operation::Operation;
use crate::txn::state::State;
use crate::txn::view::View;

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
    /// session, names them as pending (LOG-4).
    ///
    /// # Errors
    /// `NoSpace` when there is no space to replay them: nothing is lost then, and a reader needs
    /// none. `Damaged` when a record has no place (LOG-6).
    pub(crate) fn replay(
        &self,
        logged: &Logged,
        pieces: u64,
        stage: &mut dyn FnMut(View<'_>) -> Result<()>,
    ) -> Result<()> {
        self.committer.open_session()?;
        let _queued = self.shortage.await_operation(logged.records.len(), true)?;
        // After the last commit that could give it back: the next one is to use it (LOG-5).
        if !self.shortage.have_room(&|| self.committer.promise_nodes(pieces, true))? {
            return Err(Error::NoSpace("no room for what the log says of files".into()));
        }
        self.committer.between_commits(|chain| {
            let mut transaction = self.writer.lock();
            let laid = transaction.operate(true, |operation| operation.replay(&logged.records));
            laid.and_then(|()| stage(self.view(&self.state()))).map_err(|error| match error {
                Error::Damaged(reason) => Error::damaged(format!(
                    "the log says more of what is damaged, so the archive can be read but not written: {reason}"
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
        operation.replay_read_only(&logged.records)?;
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
