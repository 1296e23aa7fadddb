//! open, read, write, release of files.

use crate::error::Result;
use crate::format::Ino;
use crate::fs::FileSystem;

impl FileSystem {
    /// Counts a handle: an unlinked inode lives until the last one is closed. `Stale` when it does not exist.
    pub fn open(&self, ino: Ino) -> Result<()> {
        self.handles.open(ino);
        Ok(())
    }

    /// Ends a handle; the last one of an unlinked inode queues it for reclaim.
    pub fn release(&self, ino: Ino) -> Result<()> {
        if self.handles.release(ino) {
            self.queue_reclaim(ino);
        }
        Ok(())
    }

    /// The bytes `offset..offset + length`, short at the end of the file; holes read as zeros.
    pub fn read(&self, ino: Ino, offset: u64, length: usize) -> Result<Vec<u8>> {
        let _ = (ino, offset, length);
        todo!()
    }

    /// Accepts all of `data` or nothing; the size grows when needed. Does not touch times (the caller's SETATTR does).
    ///
    /// # Errors
    /// `NoSpace` against reservations, `FileTooLarge` beyond 2^63-1, `Latched`, `ReadOnly`.
    pub fn write(&self, ino: Ino, offset: u64, data: &[u8]) -> Result<()> {
        let _ = (ino, offset, data);
        todo!()
    }
}
