//! Mirroring of single objects: skips unchanged ones, replaces ones of another type, deletes
//! missing ones.

use rustix::fs::Stat;

use super::{ImportedDirectory, Importer, metadata_of};
use crate::error::Result;
use crate::exchange::attributes::{self, FileDifference, XattrObject, compare_with_host};
use crate::exchange::path_ops::none_if_missing;
use crate::exchange::{Problem, deletion};
use crate::format::Ino;
use crate::fs::{Attributes, RenameMode};

impl Importer<'_> {
    /// Returns whether the archive already has the object; updates its metadata if only that
    /// differs. Hard links of one file must be hard links of one file in the archive, and no
    /// others.
    pub(super) fn is_unchanged(
        &mut self,
        stat: &Stat,
        object: &XattrObject<'_>,
        parent: Ino,
        name: &[u8],
    ) -> Result<bool> {
        let Some(existing) = none_if_missing(self.fs.lookup(parent, name))? else { return Ok(false) };
        let id = (stat.st_dev, stat.st_ino);
        let linked = self.links.get(&id).copied();
        let same_names = match linked {
            Some((ino, _)) => ino == existing.ino,
            None => !self.claimed.contains(&existing.ino) && (existing.links == 1 || stat.st_nlink > 1),
        };
        if !same_names {
            return Ok(false);
        }
        match compare_with_host(self.fs, &existing, stat, object)? {
            FileDifference::Content => return Ok(false),
            FileDifference::None => self.report.unchanged += 1,
            FileDifference::Metadata => {
                attributes::update(object, self.fs, existing.ino, &self.path, &mut self.report.skipped)?;
                self.fs.set_attributes(existing.ino, &metadata_of(stat))?;
                self.report.updated += 1;
            }
        }
        if stat.st_nlink > 1 {
            let remaining = linked.map_or(stat.st_nlink, |(_, remaining)| remaining).saturating_sub(1);
            self.links.insert(id, (existing.ino, remaining));
            self.claimed.insert(existing.ino);
        }
        Ok(true)
    }

    /// Updates the metadata of an existing directory where it differs.
    pub(super) fn update_directory(&mut self, object: &XattrObject<'_>, state: &ImportedDirectory) -> Result<()> {
        let existing = self.fs.attributes(state.ino)?;
        if compare_with_host(self.fs, &existing, &state.stat, object)? != FileDifference::None {
            attributes::update(object, self.fs, state.ino, &self.path, &mut self.report.skipped)?;
            self.fs.set_attributes(state.ino, &metadata_of(&state.stat))?;
        }
        Ok(())
    }

    /// Executes the planned deletions, unless a part of the sources could not be copied.
    pub(super) fn delete_remaining(&mut self) -> Result<()> {
        let Some(mut plan) = self.plan.take() else { return Ok(()) };
        if self.report.problems.iter().any(Problem::hides_something) {
            self.report.deletions_skipped = plan.remaining();
            return Ok(());
        }
        let fs = self.fs;
        plan.execute(fs, |path, result| {
            self.path = path.to_vec();
            self.report.deleted += self.tolerate(result.map(Some))?.unwrap_or(0);
            Ok(())
        })
    }

    /// Renames the new object over the old one, which may have any type when mirroring.
    pub(super) fn put_in_place(&mut self, parent: Ino, temporary: &[u8], name: &[u8], made: &Attributes) -> Result<()> {
        let existing = self.fs.lookup(parent, name)?;
        if existing.ino == made.ino {
            // A rename between two hard links of one file has no effect and would leave the
            // temporary name.
            return self.fs.unlink(parent, temporary);
        }
        if !existing.is_directory() && !made.is_directory() {
            return self.fs.rename(parent, temporary, parent, name, RenameMode::Replace);
        }
        self.fs.rename(parent, temporary, parent, name, RenameMode::Exchange)?;
        self.report.deleted += deletion::delete_tree(self.fs, parent, temporary, &existing)?;
        Ok(())
    }
}
