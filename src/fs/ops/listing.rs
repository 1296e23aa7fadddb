//! readdir by sequence number.

use std::ops::ControlFlow;

use crate::error::Result;
use crate::format::values::decode_list;
use crate::format::{Ino, Key, ROOT_INO, kind};
use crate::fs::{Attributes, DirectoryEntry, FileSystem, inode, mode};

const DIRECTORY_TYPE: u8 = (mode::DIRECTORY >> 12) as u8;

impl FileSystem {
    /// The bound that a listing started now must not pass: the directory's next sequence number.
    pub fn directory_bound(&self, directory: Ino) -> Result<u64> {
        let state = self.volume.state();
        Ok(inode::load_directory(self.volume.view(&state), directory)?.next_sequence)
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
        let state = self.volume.state();
        let view = self.volume.view(&state);
        // A directory that was removed while it was open lists nothing.
        let parent = match inode::load_directory(view, directory) {
            Err(crate::Error::NotFound) => return Ok(()),
            other => other?,
        };
        let mut offer = |ino: Ino, file_type: u8, name: &[u8], cookie: u64| -> Result<ControlFlow<()>> {
            let attributes = match with_attributes {
                true => Some(self.overlaid(ino, &inode::load(view, ino)?)),
                false => None,
            };
            Ok(f(&DirectoryEntry { ino, file_type, name, cookie }, attributes.as_ref()))
        };
        let above = if directory == ROOT_INO { ROOT_INO } else { parent.parent };
        for (number, name, ino) in [(1, &b"."[..], directory), (2, &b".."[..], above)] {
            if cookie < number && offer(ino, DIRECTORY_TYPE, name, number)?.is_break() {
                return Ok(());
            }
        }
        let from = Key::new(directory.0, kind::DIR_LIST, cookie.saturating_add(1));
        let to = Key::new(directory.0, kind::DIR_LIST, bound);
        if from >= to {
            return Ok(());
        }
        view.scan(from, to, &mut |key, value| {
            let entry = decode_list(value)?;
            offer(entry.ino, entry.file_type, entry.name, key.sub)
        })
    }
}
