//! rename with its four modes.

use crate::error::Result;
use crate::format::Ino;
use crate::fs::{FileSystem, RenameMode};

impl FileSystem {
    /// Atomic. Refuses to move a directory below itself (`Invalid`).
    pub fn rename(
        &self,
        directory: Ino,
        name: &[u8],
        new_directory: Ino,
        new_name: &[u8],
        rename_mode: RenameMode,
    ) -> Result<()> {
        let _ = (directory, name, new_directory, new_name, rename_mode);
        todo!()
    }
}
