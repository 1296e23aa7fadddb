//! Moves an extracted tree into a directory of the archive, after checking for conflicts.

use std::collections::HashMap;

use lockbox_terminal::display;

use crate::error::{Error, Refusal, Result};
use crate::exchange::Entries;
use crate::exchange::path::none_if_missing;
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, RenameMode};

pub(super) struct Install<'a> {
    pub(super) fs: &'a FileSystem,
    pub(super) replace: bool,
}

/// Action for an entry of the stage.
enum InstallStep {
    Move,
    Replace,
    /// Both are directories.
    Merge(Ino),
    InTheWay,
}

impl Install<'_> {
    /// Checks for conflicts.
    ///
    /// # Errors
    /// `Invalid` naming the first conflicting object.
    pub(super) fn check(&self, from: Ino, to: Ino) -> Result<()> {
        let mut levels = vec![(from, to, Vec::new())];
        while let Some((from, to, path)) = levels.pop() {
            for entry in Entries::new(self.fs, from)? {
                let entry = entry?;
                let mut path = path.clone();
                path.push(b'/');
                path.extend_from_slice(&entry.name);
                match self.step(&entry.attributes, to, &entry.name)? {
                    InstallStep::Move | InstallStep::Replace => {}
                    InstallStep::Merge(existing) => levels.push((entry.attributes.ino, existing, path)),
                    InstallStep::InTheWay => {
                        let path = display(path.strip_prefix(b"/").unwrap_or_default());
                        let what = format!("nothing was imported: {path} exists already");
                        return Err(Error::Refused(Refusal::InTheWay { what }));
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves everything; returns the merged directories: in the tar, and in the archive.
    pub(super) fn execute(&self, from: Ino, to: Ino) -> Result<HashMap<Ino, Ino>> {
        let mut merged = HashMap::from([(from, to)]);
        let mut levels = vec![(from, to)];
        while let Some((from, to)) = levels.pop() {
            for entry in Entries::new(self.fs, from)? {
                let entry = entry?;
                let name = &entry.name[..];
                match self.step(&entry.attributes, to, name)? {
                    InstallStep::Move => self.fs.rename(from, name, to, name, RenameMode::NoReplace)?,
                    InstallStep::Replace => self.fs.rename(from, name, to, name, RenameMode::Replace)?,
                    InstallStep::Merge(existing) => {
                        merged.insert(entry.attributes.ino, existing);
                        levels.push((entry.attributes.ino, existing));
                    }
                    // The archive has no other users, so `check` would have found it.
                    InstallStep::InTheWay => return Err(Error::Exists),
                }
            }
        }
        Ok(merged)
    }

    fn step(&self, attributes: &Attributes, to: Ino, name: &[u8]) -> Result<InstallStep> {
        let Some(existing) = none_if_missing(self.fs.lookup(to, name))? else { return Ok(InstallStep::Move) };
        Ok(match (attributes.is_directory(), existing.is_directory()) {
            (true, true) => InstallStep::Merge(existing.ino),
            (false, false) if self.replace => InstallStep::Replace,
            _ => InstallStep::InTheWay,
        })
    }
}
