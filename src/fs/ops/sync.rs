//! fsync and the periodic commit.

use crate::error::Result;
use crate::fs::{FileSystem, SyncProfile};

impl FileSystem {
    /// Returns when everything done so far, whichever file it concerns, is durable; with `SyncProfile::Never` at once.
    pub fn sync(&self) -> Result<()> {
        if self.options.sync == SyncProfile::Never {
            return Ok(());
        }
        self.volume.commit()?;
        self.staging.sweep(&self.volume)
    }

    /// Whether something was accepted that no commit has begun to make durable.
    pub fn is_dirty(&self) -> bool {
        self.volume.is_dirty()
    }
}
