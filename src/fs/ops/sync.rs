//! fsync and the periodic commit.

use crate::error::Result;
use crate::fs::{FileSystem, SyncProfile};

impl FileSystem {
    /// Returns when everything done so far, whichever file it concerns, is durable; with `SyncProfile::Never` at once.
    pub fn sync(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Never { Ok(()) } else { self.make_durable() }
    }

    /// As [`FileSystem::sync`] but under every profile: for the end of a mount, and when an operator asks.
    pub fn make_durable(&self) -> Result<()> {
        self.volume.commit()?;
        self.staging.sweep(&self.volume)
    }

    /// Bytes of file data that were accepted and are not written out yet.
    pub fn staged_bytes(&self) -> u64 {
        self.staging.total()
    }

    /// Whether something was accepted that no commit has begun to make durable.
    pub fn is_dirty(&self) -> bool {
        self.volume.is_dirty()
    }
}
