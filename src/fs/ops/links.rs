//! link, unlink, rmdir.

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem};

impl FileSystem {
    /// At most 2^32 - 2 links; directories refuse with `NotPermitted`.
    pub fn link(&self, ino: Ino, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let _ = (ino, directory, name);
        todo!()
    }

    /// The last link of a file that is not open frees it at once when small, else in steps.
    pub fn unlink(&self, directory: Ino, name: &[u8]) -> Result<()> {
        let _ = (directory, name);
        todo!()
    }

    pub fn remove_directory(&self, directory: Ino, name: &[u8]) -> Result<()> {
        let _ = (directory, name);
        todo!()
    }
}
