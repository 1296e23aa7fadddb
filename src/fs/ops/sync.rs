//! fsync and the periodic commit.

use crate::error::{Error, Result};
use crate::format::{Generation, Timestamp};
use crate::fs::extents::FRAME;
use crate::fs::{FileSystem, SyncProfile};
use crate::txn::{CommitTicket, Volume};

/// A caller of [`FileSystem::sync`] that was counted in and is not answered yet.
#[derive(Debug)]
#[must_use = "its commit may be led by nobody"]
pub struct BegunSync(Option<CommitTicket>);

impl FileSystem {
    /// Returns when everything done so far, whichever file it concerns, is durable; with `SyncProfile::Never` at once.
    pub fn sync(&self) -> Result<()> {
        self.finish_sync(self.begin_sync()?)
    }

    /// Counts a caller of [`FileSystem::sync`] in without waiting: what was done until now is covered, and a commit that is about to begin
    /// serves the caller too. It is answered by [`FileSystem::finish_sync`], which may be called by another thread.
    ///
    /// # Errors
    /// As [`FileSystem::sync`].
    pub fn begin_sync(&self) -> Result<BegunSync> {
        if self.options.sync == SyncProfile::Never {
            return Ok(BegunSync(None));
        }
        self.begin_commit().map_err(|error| self.told(error))
    }

    /// Returns when that caller's commit is durable, and leads it when nobody does.
    pub fn finish_sync(&self, begun: BegunSync) -> Result<()> {
        self.finish(begun, Volume::sync_wanted).map_err(|error| self.told(error))
    }

    /// As [`FileSystem::sync`], for who has nobody to tell: after a failure the next caller of that, or of `write`, gets the cause. Always with a commit, so
    /// that the log stays short.
    ///
    /// # Errors
    /// As [`FileSystem::sync`].
    pub fn sync_in_background(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Never {
            Ok(())
        } else {
            self.finish(self.begin_commit()?, Volume::commit_wanted)
        }
    }

    /// What somebody who handed over data, or asked for its durability, is told of an error.
    pub(in crate::fs) fn told(&self, error: Error) -> Error {
        self.volume.told(error)
    }

    /// `wait` is the volume's way of making what was done durable.
    fn finish(&self, begun: BegunSync, wait: fn(&Volume, CommitTicket) -> Result<Generation>) -> Result<()> {
        let Some(wanted) = begun.0 else { return Ok(()) };
        // Most of what is staged is sealed before the commit holds the writers' lock, and nobody stages much more until then.
        let _awaited = self.pressure.await_commit();
        if let Err(error) = self.pressure.relieve_before_commit() {
            tracing::debug!(%error, "staged data could not be written out before the commit, which tells why");
        }
        wait(&self.volume, wanted)?;
        self.staging.sweep();
        Ok(())
    }

    /// As [`FileSystem::sync`] but under every profile: for the end of a mount, and when an operator asks.
    ///
    /// # Errors
    /// As [`FileSystem::sync`]; `Invalid` when the archive is being closed.
    pub fn make_durable(&self) -> Result<()> {
        let _work = self.closing.work()?;
        self.commit_all()
    }

    pub(in crate::fs) fn commit_all(&self) -> Result<()> {
        self.begin_commit()
            .and_then(|begun| self.finish(begun, Volume::commit_wanted))
            .map_err(|error| self.told(error))
    }

    /// An archive that was opened for reading has nothing that is not durable.
    fn begin_commit(&self) -> Result<BegunSync> {
        Ok(BegunSync(if self.volume.read_only() { None } else { Some(self.volume.want_commit()?) }))
    }

    /// Bytes of memory that hold what no commit has begun to make durable: staged file data and changed nodes, both estimated.
    pub fn dirty_bytes(&self) -> u64 {
        self.staging.total() + self.volume.dirty_bytes()
    }

    /// Those of [`FileSystem::dirty_bytes`] that a power cut would take; 0 when the log has the rest.
    pub(super) fn volatile_bytes(&self) -> u64 {
        if self.volume.is_logged() && self.staging.is_logged() { 0 } else { self.dirty_bytes() }
    }

    /// # Errors
    /// What a write of so many bytes would meet: `NoSpace`, `Latched`, `ReadOnly`. It waits for room as that would.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        self.volume.reserve_data(bytes, bytes.div_ceil(FRAME)).map(drop)
    }

    /// Whether a change may now have to wait for a commit or for write-out; a guess, for those who plan threads.
    pub fn may_wait(&self) -> bool {
        self.options.sync == SyncProfile::Always || self.pressure.is_near() || self.volume.commit_is_due()
    }

    /// The newest durable commit.
    pub fn generation(&self) -> Generation {
        self.volume.durable().generation
    }

    /// When it was made.
    pub fn committed(&self) -> Timestamp {
        self.volume.durable().time
    }

    /// Whether something was accepted that no commit has begun to make durable.
    pub fn is_dirty(&self) -> bool {
        self.volume.is_dirty()
    }
}
