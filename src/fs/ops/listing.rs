//! readdir by sequence number.

use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{Attributes, DirectoryEntry, FileSystem};

impl FileSystem {
    /// The bound that a listing started now must not pass: the directory's next sequence number.
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        let _ = directory;
        todo!()
    }

    /// Calls `f` with the entries behind `cookie` (0 at the start) and before `bound`: `.` (cookie 1), `..` (cookie 2), then the
    /// entries in creation order, each with its attributes when `with_attributes`. All of one call come from one version.
    pub fn list_directory(
        &self,
        directory: Ino,
        cookie: u64,
        bound: u64,
        with_attributes: bool,
        f: &mut dyn FnMut(&DirectoryEntry<'_>, Option<&Attributes>) -> ControlFlow<()>,
    ) -> Result<()> {
        let _ = (directory, cookie, bound, with_attributes, f);
        todo!()
    }
}
