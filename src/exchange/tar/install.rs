//! Moves an unpacked tree into a directory of the archive, after a look at everything that is there.

use std::collections::HashMap;

use lockbox_terminal::display;

use crate::error::{Error, Refusal, Result};
use crate::exchange::Entries;
use crate::exchange::path::if_there;
use crate::format::Ino;
use crate::fs::{Attributes, FileSystem, RenameMode};

pub(super) struct Install<'a> {
    pub(super) fs: &'a FileSystem,
    pub(super) replace: bool,
}

/// What is done with an entry of the stage.
enum Step {
    Move,
    Replace,
    /// Both are directories.
    Merge(Ino),
    InTheWay,
}

impl Install<'_> {
    /// # Errors
    /// `Invalid` naming the first thing that is in the way.
    pub(super) fn check(&self, from: Ino, to: Ino) -> Result<()> {
        let mut levels = vec![(from, to, Vec::new())];
        while let Some((from, to, path)) = levels.pop() {
            for entry in Entries::new(self.fs, from)? {
                let entry = entry?;
                let mut path = path.clone();
                path.push(b'/');
                path.extend_from_slice(&entry.name);
                match self.step(&entry.attributes, to, &entry.name)? {
                    Step::Move | Step::Replace => {}
                    Step::Merge(existing) => levels.push((entry.attributes.ino, existing, path)),
                    Step::InTheWay => {
                        let path = display(path.strip_prefix(b"/").unwrap_or_default());
                        let what = format!("nothing was imported: {path} exists already");
                        return Err(Error::Refused(Refusal::InTheWay { what }));
                    }
                }
            }
        }
        Ok(())
    }

    /// Moves everything, and returns which directories of the tar were merged into which of the archive.
    pub(super) fn carry_out(&self, from: Ino, to: Ino) -> Result<HashMap<Ino, Ino>> {
        let mut merged = HashMap::from([(from, to)]);
        let mut levels = vec![(from, to)];
        while let Some((from, to)) = levels.pop() {
            for entry in Entries::new(self.fs, from)? {
                let entry = entry?;
                let name = &entry.name[..];
                match self.step(&entry.attributes, to, name)? {
                    Step::Move => self.fs.rename(from, name, to, name, RenameMode::NoReplace)?,
                    Step::Replace => self.fs.rename(from, name, to, name, RenameMode::Replace)?,
                    Step::Merge(existing) => {
                        merged.insert(entry.attributes.ino, existing);
                        levels.push((entry.attributes.ino, existing));
                    }
                    // Nobody else has the archive, so `check` would have found it.
                    Step::InTheWay => return Err(Error::Exists),
                }
            }
        }
        Ok(merged)
    }

    fn step(&self, attributes: &Attributes, to: Ino, name: &[u8]) -> Result<Step> {
        let Some(existing) = if_there(self.fs.lookup(to, name))? else { return Ok(Step::Move) };
        Ok(match (attributes.is_directory(), existing.is_directory()) {
            (true, true) => Step::Merge(existing.ino),
            (false, false) if self.replace => Step::Replace,
            _ => Step::InTheWay,
        })
    }
}
