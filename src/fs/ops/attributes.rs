//! lookup, getattr, setattr.

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, SetAttributes};

impl FileSystem {
    /// `.` and `..` are understood; names are bytes without `/` and NUL, at most 255.
    ///
    /// # Errors
    /// `NotFound`, `NotDirectory`, `NameTooLong`, `Stale` when `directory` no longer exists.
    pub fn lookup(&self, directory: Ino, name: &[u8]) -> Result<Attributes> {
        let _ = (directory, name);
        todo!()
    }

    /// Includes the size and blocks of staged data.
    pub fn attributes(&self, ino: Ino) -> Result<Attributes> {
        let _ = ino;
        todo!()
    }

    /// Changes what is given, all or nothing. Sets ctime to now unless given. A size beyond 2^63-1 is `FileTooLarge`.
    pub fn set_attributes(&self, ino: Ino, set: &SetAttributes) -> Result<Attributes> {
        let _ = (ino, set);
        todo!()
    }
}
