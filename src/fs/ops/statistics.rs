//! statfs.

use crate::error::Result;
use crate::fs::{FileSystem, Statistics};

impl FileSystem {
    /// Free is what the archive's free blocks and `host_free` (bytes that the host's file system has left) give together.
    pub fn statistics(&self, host_free: u64) -> Result<Statistics> {
        let _ = host_free;
        todo!()
    }
}
