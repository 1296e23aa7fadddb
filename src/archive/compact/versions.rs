//! The moments of an archive, the oldest first: what each snapshot shows, then the live tree; and what each has that the one before has not.

use lockbox_terminal::display;

use crate::error::{Error, Result};
use crate::format::values::SnapshotValue;
use crate::format::{Generation, Key, kind};
use crate::txn::{Difference, Differing, Reading, View, Volume};

/// Records handed out at once; their values are 3,500 bytes at most.
const BATCH: usize = 512;

/// All moments that can be read.
pub(super) struct Moments<'v> {
    volume: &'v Volume,
    kept: Vec<(u64, SnapshotValue)>,
}

/// One of them beside the one before it; nothing comes before the first.
pub(super) struct Step<'v> {
    older: Option<Reading<'v>>,
    newer: Reading<'v>,
    kept: Option<SnapshotValue>,
    /// Of the commit whose tree it is.
    generation: Generation,
}

/// A walk over the records that differ in a step.
pub(super) struct Walk<'s> {
    differing: Differing<'s>,
    batch: std::vec::IntoIter<Difference>,
}

impl<'v> Moments<'v> {
    pub(super) fn of(volume: &'v Volume) -> Result<Moments<'v>> {
        Ok(Moments { volume, kept: volume.readable_snapshots()? })
    }

    pub(super) fn count(&self) -> usize {
        self.kept.len() + 1
    }

    /// Whether the snapshots of both are called the same, and are of the same times. What they show is for others to compare.
    pub(super) fn are_named_as(&self, other: &Moments<'_>) -> bool {
        let named = |(_, kept): &(u64, SnapshotValue)| (kept.name.clone(), kept.time);
        self.kept.iter().map(named).eq(other.kept.iter().map(named))
    }

    /// The step to the moment of this number.
    pub(super) fn step(&self, number: usize) -> Result<Step<'v>> {
        let reading = |number: usize| match self.kept.get(number) {
            Some((id, _)) => Reading::of_snapshot(self.volume, *id),
            None => Ok(Reading::of(self.volume, self.volume.state())),
        };
        let kept = self.kept.get(number).map(|(_, kept)| kept.clone());
        Ok(Step {
            older: number.checked_sub(1).map(reading).transpose()?,
            newer: reading(number)?,
            generation: kept.as_ref().map_or_else(|| self.volume.durable().generation, |kept| kept.generation),
            kept,
        })
    }
}

impl Step<'_> {
    /// None of the live tree.
    pub(super) fn kept(&self) -> Option<&SnapshotValue> {
        self.kept.as_ref()
    }

    pub(super) fn generation(&self) -> Generation {
        self.generation
    }

    pub(super) fn older(&self) -> Option<View<'_>> {
        self.older.as_ref().map(Reading::view)
    }

    pub(super) fn newer(&self) -> View<'_> {
        self.newer.view()
    }

    pub(super) fn walk(&self) -> Walk<'_> {
        let differing = self.newer().differences_since(self.older().as_ref());
        Walk { differing, batch: Vec::new().into_iter() }
    }

    /// The error of work on this step; damage is told with the snapshot, since who removes that is rid of it.
    pub(super) fn named(&self, error: Error) -> Error {
        match (error, &self.kept) {
            (Error::Damaged(reason), Some(kept)) => {
                Error::damaged(format!("snapshot {}: {reason}", display(&kept.name)))
            }
            (error, _) => error,
        }
    }
}

impl Walk<'_> {
    /// The next differences; empty at the end.
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

    /// The next one that `wanted` says yes to; None at the end. Not to be mixed with batches.
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

/// No object has the number 0: what is there beside orphans and trims is a stray (specification 6.2).
fn is_carried(key: Key) -> bool {
    key.object != 0 || matches!(key.kind, kind::ORPHAN | kind::TRIM)
}
