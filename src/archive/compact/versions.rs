//! All versions in an archive, oldest first: the snapshots, then the live tree; with the
//! differences between neighbours.

use lockbox_terminal::display;

use crate::error::{Error, Result};
use crate::format::values::SnapshotValue;
use crate::format::{Generation, Key, kind};
use crate::txn::{Difference, DifferenceCursor, ReadView, View, Volume};

/// Records per batch; their values are at most 3,500 bytes long.
const BATCH: usize = 512;

/// All readable versions.
pub(super) struct ArchiveVersions<'v> {
    volume: &'v Volume,
    snapshots: Vec<(u64, SnapshotValue)>,
}

/// One version with its predecessor; the first has none.
pub(super) struct VersionStep<'v> {
    older: Option<ReadView<'v>>,
    newer: ReadView<'v>,
    snapshot: Option<SnapshotValue>,
    /// Generation of the commit with this tree.
    generation: Generation,
}

/// Iterator over the differing records of a step.
pub(super) struct VersionDifference<'s> {
    differing: DifferenceCursor<'s>,
    batch: std::vec::IntoIter<Difference>,
}

impl<'v> ArchiveVersions<'v> {
    pub(super) fn of(volume: &'v Volume) -> Result<ArchiveVersions<'v>> {
        Ok(ArchiveVersions { volume, snapshots: volume.readable_snapshots()? })
    }

    pub(super) fn count(&self) -> usize {
        self.snapshots.len() + 1
    }

    /// Returns whether the snapshots of both have equal names and times. Their content is not
    /// compared.
    pub(super) fn are_named_as(&self, other: &ArchiveVersions<'_>) -> bool {
        let named = |(_, snapshot): &(u64, SnapshotValue)| (snapshot.name.clone(), snapshot.time);
        self.snapshots.iter().map(named).eq(other.snapshots.iter().map(named))
    }

    /// Returns the step to the version with this index.
    pub(super) fn step(&self, number: usize) -> Result<VersionStep<'v>> {
        let reading = |number: usize| match self.snapshots.get(number) {
            Some((id, _)) => ReadView::of_snapshot(self.volume, *id),
            None => Ok(ReadView::of(self.volume, self.volume.state())),
        };
        let snapshot = self.snapshots.get(number).map(|(_, snapshot)| snapshot.clone());
        Ok(VersionStep {
            older: number.checked_sub(1).map(reading).transpose()?,
            newer: reading(number)?,
            generation: snapshot
                .as_ref()
                .map_or_else(|| self.volume.durable().generation, |snapshot| snapshot.generation),
            snapshot,
        })
    }
}

impl VersionStep<'_> {
    /// Returns the snapshot; `None` for the live tree.
    pub(super) fn snapshot(&self) -> Option<&SnapshotValue> {
        self.snapshot.as_ref()
    }

    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    pub(super) fn older(&self) -> Option<View<'_>> {
        self.older.as_ref().map(ReadView::view)
    }

    pub(super) fn newer(&self) -> View<'_> {
        self.newer.view()
    }

    pub(super) fn walk(&self) -> VersionDifference<'_> {
        let differing = self.newer().differences_since(self.older().as_ref());
        VersionDifference { differing, batch: Vec::new().into_iter() }
    }

    /// Adds the snapshot's name to a damage error, because removing that snapshot is the remedy.
    pub(super) fn named(&self, error: Error) -> Error {
        match (error, &self.snapshot) {
            (Error::Damaged(reason), Some(snapshot)) => {
                Error::damaged(format!("snapshot {}: {reason}", display(&snapshot.name)))
            }
            (error, _) => error,
        }
    }
}

impl VersionDifference<'_> {
    /// Returns the next differences; empty at the end.
    pub(super) fn batch(&mut self) -> Result<Vec<Difference>> {
        loop {
            let mut batch = self.differing.batch(BATCH)?;
            let ended = batch.is_empty();
            batch.retain(|difference| is_carried(difference.key));
            if ended || !batch.is_empty() {
                return Ok(batch);
            }
        }
    }

    /// Returns the next difference that `wanted` accepts; `None` at the end. Must not be mixed with
    /// [`Self::batch`].
    pub(super) fn next(&mut self, mut wanted: impl FnMut(&Difference) -> Result<bool>) -> Result<Option<Difference>> {
        loop {
            for difference in self.batch.by_ref() {
                if wanted(&difference)? {
                    return Ok(Some(difference));
                }
            }
            self.batch = self.batch()?.into_iter();
            if self.batch.len() == 0 {
                return Ok(None);
            }
        }
    }
}

/// Returns whether records with this key are copied. Object number 0 does not exist; its records
/// other than orphans and trims are stray (specification 6.2).
fn is_carried(key: Key) -> bool {
    key.object != 0 || matches!(key.kind, kind::ORPHAN | kind::TRIM)
}
