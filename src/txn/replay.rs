//! Log replay: applies log records to tree 1 and recomputes page references (LOG-2).

use super::log::LoggedRecords;
use super::operation::Operation;
use crate::error::{Error, Result};
use crate::format::values::Extent;
use crate::format::{Generation, Pointer, kind};

impl Operation<'_> {
    /// Applies the records and the counters to tree 1, and derives their effect on pages (LOG-2).
    /// Idempotent.
    ///
    /// # Errors
    /// `Damaged` where a record has no place, or does not decode: no writer continues with a part
    /// of them.
    pub(super) fn replay(&mut self, logged: &LoggedRecords) -> Result<()> {
        self.needs_commit();
        self.count(logged);
        let mut released: Vec<(Pointer, Generation)> = Vec::new();
        for (key, value) in &logged.records {
            if key.kind == kind::EXTENT {
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
        // After all new references are counted, so that no page loses its last count in between.
        for (page, born) in released {
            self.release(&page, born)?;
            self.note_stale(&page);
        }
        Ok(())
    }

    /// Like [`Self::replay`], for read-only volumes. Skips records of a damaged node; that node is
    /// lost with all its records (LOG-6).
    pub(super) fn replay_read_only(&mut self, logged: &LoggedRecords) -> Result<()> {
        self.count(logged);
        let mut damage = Vec::new();
        for (key, value) in &logged.records {
            match self.trees.live.overlay(self.store, &mut self.live_edits, *key, value.as_deref()) {
                Err(Error::Damaged(reason)) => damage.push(reason),
                laid => laid?,
            }
        }
        if let Some(first) = damage.first() {
            tracing::warn!("records of the log that lie on what is damaged: {}, the first one: {first}", damage.len());
        }
        Ok(())
    }

    fn count(&mut self, logged: &LoggedRecords) {
        self.changed = true;
        self.counters.next_ino = self.counters.next_ino.max(logged.next_ino);
        self.counters.inodes = logged.inodes;
    }
}
