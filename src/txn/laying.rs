//! Puts the records of log entries back into tree 1, and derives what they mean for pages (LOG-2).

use super::log::LoggedRecords;
use super::operation::Operation;
use crate::error::Result;
use crate::format::values::Extent;
use crate::format::{Generation, Pointer, kind};

impl Operation<'_> {
    /// Gives tree 1 the records, and the counters; with `references` also what follows from them for pages (LOG-2). Applied twice it is as applied once.
    pub(super) fn lay(&mut self, logged: &LoggedRecords, references: bool) -> Result<()> {
        self.needs_commit();
        self.changed = true;
        self.counters.next_ino = self.counters.next_ino.max(logged.next_ino);
        self.counters.inodes = logged.inodes;
        let mut released: Vec<(Pointer, Generation)> = Vec::new();
        for (key, value) in &logged.records {
            if key.kind == kind::EXTENT && references {
                let old = self.view().get(*key, Extent::decode)?;
                let new = value.as_deref().map(Extent::decode).transpose()?;
                let name = |extent: &Extent| (extent.page, extent.born);
                if old.as_ref().map(name) != new.as_ref().map(name) {
                    if let Some(new) = &new {
                        self.share(&new.page, 1)?;
                    }
                    released.extend(old.as_ref().map(name));
                }
            }
            let _there = match value {
                Some(value) => self.insert(*key, value)?,
                None => self.remove(*key)?,
            };
        }
        // After all that is named anew, so that no page loses its last count in between.
        for (page, born) in released {
            self.release(&page, born)?;
            self.note_stale(&page);
        }
        Ok(())
    }
}
