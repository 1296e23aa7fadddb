//! fsync and the periodic commit.

use crate::error::Result;
use crate::fs::FileSystem;

impl FileSystem {
    /// Returns when everything done so far, whichever file it concerns, is durable.
    pub fn sync(&self) -> Result<()> {
        self.volume.commit().map(drop)
    }
}
