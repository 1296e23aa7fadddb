//! Extended attributes: any namespace, values up to 64 KiB.

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{FileSystem, XattrMode};

impl FileSystem {
    /// # Errors
    /// `NoAttribute`.
    pub fn xattr(&self, ino: Ino, name: &[u8]) -> Result<Vec<u8>> {
        let _ = (ino, name);
        todo!()
    }

    /// # Errors
    /// `Exists` (Create), `NoAttribute` (Replace), `AttributeTooLarge` beyond 64 KiB, `RangeTooSmall` for names beyond 255.
    pub fn set_xattr(&self, ino: Ino, name: &[u8], value: &[u8], how: XattrMode) -> Result<()> {
        let _ = (ino, name, value, how);
        todo!()
    }

    /// Names, each followed by NUL, as listxattr(2) wants them.
    pub fn list_xattrs(&self, ino: Ino) -> Result<Vec<u8>> {
        let _ = ino;
        todo!()
    }

    pub fn remove_xattr(&self, ino: Ino, name: &[u8]) -> Result<()> {
        let _ = (ino, name);
        todo!()
    }
}
