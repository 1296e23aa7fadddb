//! Fsync and the periodic commit.

use crate::error::{Error, Result};
use crate::format::{Generation, Timestamp};
use crate::fs::extents::FRAME;
use crate::fs::{FileSystem, SyncProfile};
use crate::txn::{CommitTicket, Volume};

/// A caller of [`FileSystem::sync`] that is counted in and waits for its result.
#[derive(Debug)]
#[must_use = "its commit may be led by nobody"]
pub struct PendingSync(Option<CommitTicket>);

impl FileSystem {
    /// Returns when everything done so far, for all files, is durable; with `SyncProfile::Never` at
    /// once.
    pub fn sync(&self) -> Result<()> {
        self.finish_sync(self.begin_sync()?)
    }

    /// Counts in a caller of [`FileSystem::sync`] without waiting: everything done until now is
    /// covered, and a commit that is about to begin serves the caller too. The caller, or another
    /// thread, waits with [`FileSystem::finish_sync`].
    ///
    /// # Errors
    /// Errors of [`FileSystem::sync`].
    pub fn begin_sync(&self) -> Result<PendingSync> {
        if self.options.sync == SyncProfile::Never {
            return Ok(PendingSync(None));
        }
        self.begin_commit().map_err(|error| self.deliver_error(error))
    }

    /// Waits until that caller's commit is durable, and leads it if no thread does.
    pub fn finish_sync(&self, begun: PendingSync) -> Result<()> {
        self.wait_commit(begun, Volume::sync_wanted).map_err(|error| self.deliver_error(error))
    }

    /// Syncs in the background, where there is no caller to report errors to: the next caller of
    /// `sync` or `write` gets them. Always commits, so that the log stays short.
    ///
    /// # Errors
    /// Errors of [`FileSystem::sync`].
    pub fn sync_in_background(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Never {
            Ok(())
        } else {
            self.wait_commit(self.begin_commit()?, Volume::commit_wanted)
        }
    }

    /// Returns the error for a caller that wrote data, or asked for its durability.
    pub(in crate::fs) fn deliver_error(&self, error: Error) -> Error {
        self.volume.told(error)
    }

    /// Throttles, then waits with the volume's function `wait` for the commit.
    fn wait_commit(&self, begun: PendingSync, wait: fn(&Volume, CommitTicket) -> Result<Generation>) -> Result<()> {
        let Some(wanted) = begun.0 else { return Ok(()) };
        // Most dirty data is sealed before the commit takes the writers' lock, and writers add
        // little until then.
        let _awaited = self.dirty_throttle.begin_commit_wait();
        if let Err(error) = self.dirty_throttle.throttle_before_commit() {
            tracing::debug!(%error, "staged data could not be written out before the commit, which tells why");
        }
        wait(&self.volume, wanted)?;
        self.write_buffer.drop_published();
        Ok(())
    }

    /// Commits like [`FileSystem::sync`] but under every profile: for the end of a mount, and on
    /// request of an operator.
    ///
    /// # Errors
    /// Errors of [`FileSystem::sync`]; `Invalid` when the archive is being closed.
    pub fn make_durable(&self) -> Result<()> {
        let _work = self.shutdown_gate.enter()?;
        self.commit_all()
    }

    pub(in crate::fs) fn commit_all(&self) -> Result<()> {
        self.begin_commit()
            .and_then(|begun| self.wait_commit(begun, Volume::commit_wanted))
            .map_err(|error| self.deliver_error(error))
    }

    /// Counts in a caller. A read-only archive has only durable data.
    fn begin_commit(&self) -> Result<PendingSync> {
        Ok(PendingSync(if self.volume.read_only() { None } else { Some(self.volume.want_commit()?) }))
    }

    /// Returns the bytes of memory with data that no commit has begun to make durable: dirty file
    /// data and changed nodes, both estimated.
    pub fn dirty_bytes(&self) -> u64 {
        self.write_buffer.total_bytes() + self.volume.dirty_bytes()
    }

    /// Returns the part of [`FileSystem::dirty_bytes`] that a power failure would lose; 0 when the
    /// log has the rest.
    pub(super) fn volatile_bytes(&self) -> u64 {
        if self.volume.is_logged() && self.write_buffer.is_logged() { 0 } else { self.dirty_bytes() }
    }

    /// Checks that a write of this many bytes could be accepted, and waits for space like one.
    ///
    /// # Errors
    /// `NoSpace`, `WriteFailed`, `ReadOnly`.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        self.volume.reserve_data(bytes, bytes.div_ceil(FRAME)).map(drop)
    }

    /// Returns whether a change may have to wait for a commit or for writeback: an estimate for
    /// scheduling threads.
    pub fn may_wait(&self) -> bool {
        self.options.sync == SyncProfile::Always || self.dirty_throttle.is_near_limit() || self.volume.commit_is_due()
    }

    /// Returns the generation of the newest durable commit.
    pub fn generation(&self) -> Generation {
        self.volume.durable().generation
    }

    /// Returns the time of the newest durable commit.
    pub fn commit_time(&self) -> Timestamp {
        self.volume.durable().time
    }

    /// Returns whether data was accepted that no commit has begun to make durable.
    pub fn is_dirty(&self) -> bool {
        self.volume.is_dirty()
    }
}
